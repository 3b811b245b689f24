"""Launch of the backward."""

from __future__ import annotations

import math

import torch

from tl_attention.checks.common import check_dropout_batch, check_one_tile
from tl_attention.checks.fp32 import has_gradient_kernels
from tl_attention.kernel_configs import (
    BwdConfig,
    BwdDelta,
    BwdSum,
    delta_width,
    parts_kernels,
    reduce_kernels,
    table_kernels,
)
from tl_attention.launch.arrays import ArgumentViews, cut_columns, has_odd_columns, pad_columns
from tl_attention.launch.bwd_passes import (
    MAX_BATCH,
    BwdKernels,
    BwdSizes,
    KeyPass,
    QueryPass,
    Tables,
    queries_of_tile,
)
from tl_attention.launch.common import (
    LN2,
    LOG2E,
    PackedTiles,
    PlanCache,
    build_ahead,
    compile_config,
    dense,
    dtype_name,
    empty,
    find_config,
    has_no_sequences,
    option_arguments,
    qkv_key,
)
from tl_attention.launch.parts import parts_launch
from tl_attention.launch.seen import seen_queries
from tl_attention.launch.traced import Gradients, backward_call, traced_arguments
from tl_attention.options import Options
from tl_attention.problem import TABLE_ROWS, bwd_bucket
from tl_attention.program import Call
from tl_attention.target import sm_count

_kernels: dict[tuple, BwdKernels] = {}
plan_cache = PlanCache()


def _find_kernels(key: tuple, direction: str, config: BwdConfig | None) -> BwdKernels:
    problem, config = find_config(key, direction, config)
    compiled = compile_config(problem, config)
    return BwdKernels(
        problem,
        compiled[problem.helper_problem(delta_width(problem.head_dim_v)), BwdDelta()],
        tuple((bwd_pass, compiled[problem, bwd_pass]) for bwd_pass in config.passes),
        compiled[problem.sum_problem(problem.head_dim), BwdSum()],
        compiled[problem.sum_problem(problem.head_dim_v), BwdSum()],
        compiled.get((problem.sum_problem(problem.head_dim), BwdSum(shared=True))),
        compiled.get((problem.sum_problem(problem.head_dim_v), BwdSum(shared=True))),
        next((compiled[kernel] for kernel in table_kernels(problem)), None),
        next(
            (compiled[kernel] for kernel in parts_kernels(problem, config.makes_parts, backward=True)), None
        ),
        {number: compiled[kernel] for number, kernel in reduce_kernels(problem).items()},
    )


def _kernel_key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    heads_first: bool,
    options: Options | None,
    traced: Call | None,
    deterministic: bool,
    partial: bool = False,
) -> tuple:
    """Key of the kernels of a backward, as find_config takes it."""
    packed = options is not None and options.varlen
    head, seq = (-3, -2) if heads_first else (-2, -3)
    longest = options.max_seqlen_k if packed else k.shape[seq]
    bucket = bwd_bucket(deterministic, q.shape[head], k.shape[head], longest, partial)
    # The log-sum-exp already contains the sink: no kernel is compiled for it
    names = () if options is None else tuple(name for name in options.names if name != "sink")
    if partial:
        names = *names, "partial"
    program = None if traced is None else traced.program
    dtype = dtype_name(q.dtype, options)
    return dtype, q.shape[-1], v.shape[-1], causal, names, program, bucket, q.device.index


def build_backward_ahead(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    heads_first: bool,
    deterministic: bool,
    options: Options | None,
    traced: Call | None,
) -> None:
    """Start to build missing kernels of a forward call's backward, without waiting."""
    if options is not None and not has_gradient_kernels(q, v, options.parts):
        return
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    key = _kernel_key(
        q, k, v, causal, heads_first, options, backward_call(traced, deterministic), deterministic
    )
    direction = "bwd_det" if deterministic else "bwd"
    if (direction, key) not in _kernels:
        build_ahead(key, direction, "for the backward pass")


class BwdPlan:
    """Launch plan of a backward: everything that follows from tensor metadata and from which options are on. Serves one thread.

    Args:
        dout, q, k, v, out, dq, dk, dv: [batch, heads, seqlen, head_dim] if heads_first, else [batch, seqlen, heads, head_dim]; packed
            sequences [total, heads, head_dim]. On the current device, none of them empty.
        config: used instead of the tuned row or default.
        options, traced: those of the first call; later calls may have other values.
        partial: dq, dk and dv are fp32, of inputs that are not; not with traced.
    """

    def __init__(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        causal: bool,
        heads_first: bool,
        deterministic: bool,
        config: BwdConfig | None = None,
        options: Options | None = None,
        traced: Call | None = None,
        partial: bool = False,
    ):
        self.packed = options is not None and options.varlen
        self.device = q.device.index
        self.grads = [dense(x.shape, torch.float32 if partial else x.dtype) for x in (q, k, v)]
        plain_causal = causal and options is None and traced is None
        self.seen = seen_queries(q, k, heads_first) if plain_causal else None
        if self.seen:
            q, dout, out, dq = self.seen.rows(q, dout, out, dq)
        tensors = q, k, v, dout, out, dq, dk, dv
        if self.packed:
            q, k, v, *_ = tensors = [x[None] for x in tensors]
        seq, head = (2, 1) if heads_first else (1, 2)
        batch, seqlen_q, heads, head_dim = q.shape[0], q.shape[seq], q.shape[head], q.shape[3]
        seqlen_k, heads_kv, head_dim_v = k.shape[seq], k.shape[head], v.shape[3]
        self.batch = options.cu_seqlens_q.shape[0] - 1 if self.packed else batch
        self.heads, self.seqlen_q, self.seqlen_k = heads, seqlen_q, seqlen_k

        key = _kernel_key(q, k, v, causal, heads_first, options, traced, deterministic, partial)
        _, _, _, _, names, *_ = key
        self.has_options = bool(names)
        direction = "bwd_det" if deterministic else "bwd"
        if config is None:
            kernels = _kernels.get((direction, key))
            if kernels is None:
                kernels = _kernels[direction, key] = _find_kernels(key, direction, None)
        else:
            kernels = _find_kernels(key, direction, config)
        self.delta, self.reduce = kernels.delta, kernels.reduce
        self.split = None
        self.partial_views = None
        if partial:  # a pass by queries stores dq from registers, the others sum it
            *tensors, dq, dk, dv = tensors
            sums_dq = any(bwd_pass.adds_dq for bwd_pass, _ in kernels.passes)
            dq_views = ArgumentViews(heads_first, dq, packed=self.packed and sums_dq)
            self.partial_views = dq_views, ArgumentViews(heads_first, dk, dv, packed=self.packed)
        self.views = ArgumentViews(heads_first, *tensors, packed=self.packed)
        counts = None
        if self.packed:
            self.tiles = PackedTiles(kernels.tile_table, self.batch, seqlen_q, seqlen_k, causal, self.device)
            counts = self.tiles.counts
        width, sms, element_bytes = (
            head_dim + head_dim_v,
            sm_count(self.device),
            kernels.problem.element_bytes,
        )
        lengths, device = (seqlen_q, seqlen_k), self.device
        queries = queries_of_tile(seqlen_q, self.batch if self.packed else 1, options)
        longest = queries_of_tile(options.max_seqlen_q_rounded, 1, options) if self.packed else 0
        sizes = BwdSizes(
            batch, heads, heads_kv, *lengths, width, element_bytes, sms, device, queries, counts, longest
        )
        self.rows = dense((batch, heads, sizes.rounded_q))
        self.passes = [
            (QueryPass if bwd_pass.grads == "dq" else KeyPass)(bwd_pass, kernel, kernels, sizes)
            for bwd_pass, kernel in kernels.passes
        ]
        if kernels.parts is not None:
            # dq is fp32 and leaves from registers, so without the view of packed sequences
            *inputs, out, dq, dk, dv = tensors
            split = kernels.parts, kernels.problem, heads_first, self.passes[0].attention_tiles
            self.split = parts_launch(*split, *inputs)
            self.part_views = ArgumentViews(False, *self.split.empty(), packed=self.packed)
            self.dq_view = ArgumentViews(heads_first, dq)
        self.adds_dq = any(bwd_pass.adds_dq for bwd_pass, _ in kernels.passes)
        self.query_axis, self.unseen = -2 if heads_first else -3, 0
        for bwd_pass, _ in kernels.passes:
            if bwd_pass.one_tile:
                check_one_tile(bwd_pass.block_N, seqlen_k)
                self.unseen = sizes.unseen_queries(bwd_pass, causal)

    def __call__(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        softmax_scale: float,
        lse_base2: bool,
        dlse: torch.Tensor | None = None,
        options: Options | None = None,
        traced: Call | None = None,
        dq: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """(dq, dk, dv), with a sink also dsink, for tensors with the metadata of the plan; then gradients of traced.program.learned."""
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(dout, q, k, v, out, lse, softmax_scale, lse_base2, dlse, options, traced, dq)
        new_dq, dk, dv = self.grads
        dq, dk, dv = empty(*new_dq) if dq is None else dq, empty(*dk), empty(*dv)
        tensors = dout, q, k, v, out, lse, dq, dk, dv
        return self.launch(*tensors, softmax_scale, lse_base2, dlse, options, traced)

    def launch(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        softmax_scale: float,
        lse_base2: bool,
        dlse: torch.Tensor | None,
        options: Options | None = None,
        traced: Call | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Write dq, dk, dv and return them; with a sink also dsink; then gradients of traced.program.learned."""
        result = dq, dk, dv
        if self.seen:
            self.seen.zero_others(dq)
            q, dout, out, dq = self.seen.rows(q, dout, out, dq)
            lse, dlse = self.seen.numbers(lse, dlse)
        sink = None if options is None else options.sink
        tensors = q, k, v, dout, out, dq, dk, dv
        if self.packed and self.split is not None:
            tensors = [x[None] for x in tensors]
        inputs, parts, share = tensors[:4], None, ()
        if self.partial_views is None:
            q, k, v, dout, out, *grads = self.views.of(*tensors)
        else:
            q, k, v, dout, out = self.views.of(*tensors[:5])
            dq_views, key_views = self.partial_views
            rows = dq[None] if self.packed and not dq_views.packed else dq
            grads = [*dq_views.of(rows), *key_views.of(dk, dv)]
        if self.split is not None:
            parts, share = self.split(*inputs)  # alive until the last launch
            if self.adds_dq:
                tensors[5].zero_()
            (grads[0],) = self.dq_view.of(tensors[5])
        if self.unseen:  # queries before those that the key tile goes through
            tensors[5].narrow(self.query_axis, 0, self.unseen).zero_()
        # A kernel with an fp32 tensor argument runs on the current stream of its device
        lse_log2, delta = empty(*self.rows), empty(*self.rows)
        lse, lse_to_log2 = lse.contiguous(), 1.0 if lse_base2 else LOG2E
        arguments, tables, blocks = (), None, None
        if self.has_options:
            arguments = option_arguments(options or Options(), self.batch, self.heads, self.device)
        if traced is not None:
            sizes = self.batch, self.heads, self.seqlen_q, self.seqlen_k
            captured = Gradients(traced, *sizes, transposed=self.adds_dq)
            arguments += (*traced_arguments(traced), *captured.arguments)
            blocks = traced.blocks
        if self.packed:
            tables = Tables(*(self.tiles.table(options, of_keys, TABLE_ROWS) for of_keys in (False, True)))
            dlse, dlse_scale = (
                (lse, 0.0) if dlse is None else (dlse.contiguous(), LOG2E if lse_base2 else 1.0)
            )
            if sink is not None:  # for the padding after each sequence
                lse_log2.fill_(math.inf)
                delta.zero_()
            self.delta(out, dout, lse, dlse, lse_log2, delta, lse_to_log2, dlse_scale, tables.queries)
        else:
            self.delta(out, dout, lse, lse_log2, delta, lse_to_log2)
            if dlse is not None:
                delta[:, :, : self.seqlen_q] -= _natural_dlse(dlse, lse, lse_base2)
        if parts is not None:
            q, k, v, dout = self.part_views.of(*parts)
        call = (q, k, v, dout, lse_log2, delta), *grads, softmax_scale
        for number, bwd_pass in enumerate(self.passes):  # the first makes all parts
            bwd_pass.launch(*call, arguments if number else arguments + share, tables, blocks)
        if traced is not None:
            return *result, *captured.results(self.reduce)
        return result if sink is None else (*result, _sink_gradient(sink, lse_log2, delta))


def _natural_dlse(dlse: torch.Tensor, lse: torch.Tensor, lse_base2: bool) -> torch.Tensor:
    """Gradient with respect to the natural lse; 0 for a query that sees no key, whatever the gradient of its lse of -inf is."""
    return dlse.masked_fill(lse == -math.inf, 0) * (LOG2E if lse_base2 else 1.0)


def _sink_gradient(sink: torch.Tensor, lse_log2: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Gradient of the sink, [heads]: minus the sum of P_sink * delta over all queries. Padding has lse_log2 = +inf, delta = 0."""
    log_weights = torch.sub(sink[:, None], lse_log2, alpha=LN2)
    # delta * -exp(log_weights) in one kernel: the derivative of an ELU below 0, and no weight is above 1
    products = torch.ops.aten.elu_backward(delta, 1, -1, 1, False, log_weights)
    return products.sum((0, 2)).to(sink.dtype)


def _bwd_key(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    heads_first: bool,
    deterministic: bool,
) -> tuple:
    """Key of a plan without options. It holds all metadata that checks.common.check_bwd reads, so a known key has passed the checks."""
    return (
        dout.shape, dout.stride(), dout.dtype, dout.device,
        out.shape, out.stride(), out.dtype, out.device,
        lse.shape, lse.dtype, lse.device,
        deterministic,
        *qkv_key(q, k, v, causal, heads_first),
    )  # fmt: skip


def bwd_plan(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    heads_first: bool,
    deterministic: bool,
) -> BwdPlan | None:
    """Cached plan for tensors with this metadata, without options, or None."""
    try:
        return plan_cache.plans.get(_bwd_key(dout, q, k, v, out, lse, causal, heads_first, deterministic))
    except RuntimeError:  # a nested tensor, which has no shape; the checks refuse it
        return None


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    heads_first: bool = False,
    deterministic: bool = False,
    dlse: torch.Tensor | None = None,
    config: BwdConfig | None = None,
    options: Options | None = None,
    traced: Call | None = None,
    dq: torch.Tensor | None = None,
    partial: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Launch the backward on tensors that have passed checks/, on a Hopper GPU.

    Args:
        dout, q, k, v, out: [batch, heads, seqlen, head_dim] if heads_first, else [batch, seqlen, heads, head_dim]; packed sequences
            [total, heads, head_dim]. out and lse as the forward returned them.
        lse, dlse: [batch, heads, seqlen_q] or [heads, total_q], fp32; dlse is the gradient with respect to lse.
        deterministic: bitwise equal gradients from run to run.
        config: used instead of the tuned row or default.
        dq: tensor to write to, in the layout of q, with strides and an address that TMA takes; None: a new contiguous one.
        partial: dq, dk and dv are fp32, to be added to those of other calls; not with traced.
    Returns:
        dq, dk, dv: shaped as q, k, v, in their dtype or fp32, dk and dv contiguous; with a sink also dsink: [heads], in its dtype; then a
            gradient per tensor of traced.program.learned, in its shape, fp32 or as traced.Gradients stores it.
    """
    tensors, layout = (dout, q, k, v, out, lse), (causal, heads_first, deterministic)
    key = _bwd_key(*tensors, *layout)
    if options is not None:
        key = (*key, *options.key, options.max_seqlen_q_rounded)
    if traced is not None:
        traced = backward_call(traced, deterministic)
        key = (*key, traced.program)
    if dq is not None:
        key = (*key, dq.stride())
    partial = partial and q.dtype != torch.float32
    if partial:
        key = (*key, "partial")
    plan = plan_cache.plans.get(key) if config is None else None
    if plan is not None:
        return plan(*tensors, softmax_scale, lse_base2, dlse, options, traced, dq)
    asked = softmax_scale, causal, lse_base2, *layout[1:], dlse, config, options, traced
    if has_odd_columns(q, v):
        padded = *pad_columns(dout, q, k, v, out), lse
        grads = backward(*padded, *asked, partial=partial)
        cut = [cut_columns(grad, x.shape[-1]) for grad, x in zip(grads[:3], (q, k, v), strict=True)]
        if dq is not None:
            cut[0] = dq.copy_(cut[0])
        return *cut, *grads[3:]
    if torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            return backward(*tensors, *asked, dq, partial)
    grads = tuple(
        empty(*dense(x.shape, torch.float32 if partial else x.dtype)) if grad is None else grad
        for x, grad in ((q, dq), (k, None), (v, None))
    )
    if not q.numel() or not k.numel() or has_no_sequences(options):
        zeros = (
            ()
            if traced is None
            else (torch.zeros_like(traced.tensors[i], dtype=torch.float32) for i in traced.program.learned)
        )
        return *_backward_of_empty(q, lse, lse_base2, grads, dlse, options), *zeros
    if q.shape[0] <= MAX_BATCH or (options is not None and options.varlen):
        plan = BwdPlan(*tensors[:5], *grads, *layout, config, options, traced, partial)
        if config is None:
            plan_cache.keep(key, plan)
        return plan.launch(*tensors, *grads, softmax_scale, lse_base2, dlse, options, traced)
    if options is not None:
        check_dropout_batch(options.dropout_p, q.shape[0], MAX_BATCH)
    return _backward_in_chunks(
        (*tensors, *grads), softmax_scale, lse_base2, layout, dlse, config, options, partial
    )


def _backward_of_empty(
    q: torch.Tensor,
    lse: torch.Tensor,
    lse_base2: bool,
    grads: tuple[torch.Tensor, ...],
    dlse: torch.Tensor | None,
    options: Options | None,
) -> tuple[torch.Tensor, ...]:
    """Gradients where there are no queries, no keys or no sequences."""
    zeros = tuple(x.zero_() for x in grads)
    if options is None or options.sink is None:
        return zeros
    if dlse is None or not q.numel():
        return *zeros, torch.zeros_like(options.sink)
    dsink = _natural_dlse(dlse, lse, lse_base2)  # without keys lse = sink
    return *zeros, dsink.sum((0, 2) if dlse.ndim == 3 else 1).to(options.sink.dtype)


def _backward_in_chunks(
    tensors: tuple[torch.Tensor, ...],
    softmax_scale: float,
    lse_base2: bool,
    layout: tuple[bool, bool, bool],
    dlse: torch.Tensor | None,
    config: BwdConfig | None,
    options: Options | None,
    partial: bool,
) -> tuple[torch.Tensor, ...]:
    """Gradients of a batch above MAX_BATCH, a chunk of it per launch.

    Args:
        tensors: dout, q, k, v, out, lse, dq, dk, dv; the gradients are written.
        layout: causal, heads_first, deterministic.
    """
    sink = None if options is None else options.sink
    dsink = None if sink is None else torch.zeros_like(sink, dtype=torch.float32)
    for first in range(0, len(tensors[0]), MAX_BATCH):
        chunk = [x[first : first + MAX_BATCH] for x in tensors]
        chunk_dlse = None if dlse is None else dlse[first : first + MAX_BATCH]
        chunk_options = None if options is None else options.for_batch(first, MAX_BATCH)
        plan = BwdPlan(*chunk[:5], *chunk[6:], *layout, config, chunk_options, partial=partial)
        result = plan.launch(*chunk, softmax_scale, lse_base2, chunk_dlse, chunk_options)
        if sink is not None:
            dsink += result[3]
    grads = tensors[6:]
    return grads if sink is None else (*grads, dsink.to(sink.dtype))
