"""Launch of the backward: plans by tensor metadata, and calls of the passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tl_attention.checks.common import check_dropout_batch, check_one_tile
from tl_attention.config.kernel_configs import BwdConfig
from tl_attention.launch.arrays import ArgumentViews, cut_columns, has_odd_columns, pad_columns
from tl_attention.launch.bwd_kernels import BwdKernels, cached_kernels, goes_by_sequence, kernel_key
from tl_attention.launch.bwd_passes import (
    MAX_BATCH,
    BwdSizes,
    KeyPassLaunch,
    QueryPassLaunch,
    Tables,
    queries_of_tile,
)
from tl_attention.launch.common import (
    LN2,
    LOG2E,
    OptionValues,
    PackedTiles,
    PlanCache,
    dense,
    device_costs,
    empty,
    has_no_sequences,
    qkv_key,
)
from tl_attention.launch.seen import seen_queries
from tl_attention.launch.terms import BwdTermsLaunch, terms_launch
from tl_attention.launch.traced import Gradients, backward_call, traced_arguments
from tl_attention.problem.attn_problem import TABLE_ROWS
from tl_attention.problem.options import Options, as_stored
from tl_attention.problem.program import Call

plan_cache = PlanCache()

# Gradients by name: q, k, v; fields of Options; captured tensors by their number in Call.tensors
NamedGradients = dict[str | int, torch.Tensor]


class BwdPlan:
    """Launch plan of a backward: everything that follows from tensor metadata and from which options are on. Serves one thread.

    Args:
        dout, q, k, v, out, dq, dk, dv: [batch, heads, seqlen, head_dim] if heads_first, else [batch, seqlen, heads, head_dim]; packed
            sequences [total, heads, head_dim]. On the current device, none of them empty.
        options, traced: those of the first call; later calls may have other values.
        partial: dq, dk and dv are fp32, of inputs that are not; not with traced.
        config: used instead of the tuned row or default.
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
        options: Options | None = None,
        traced: Call | None = None,
        partial: bool = False,
        config: BwdConfig | None = None,
    ):
        self.packed = options is not None and options.varlen
        self.device = q.device.index
        self.grads = [dense(x.shape, torch.float32 if partial else x.dtype) for x in (q, k, v)]
        plain_causal = causal and options is None and traced is None
        costs = device_costs(self.device)
        self.seen = seen_queries(q, k, heads_first, costs) if plain_causal else None
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

        key = kernel_key(q, k, v, causal, heads_first, options, traced, deterministic, partial)
        _, _, _, _, names, *_ = key
        self.option_values = OptionValues(names, self.batch, self.device) if names else None
        kernels = cached_kernels(key, deterministic, config)
        self.delta, self.reduce = kernels.delta, kernels.reduce
        self.adds_dq = any(bwd_pass.adds_dq for bwd_pass, _ in kernels.passes)
        of_sequences = {}
        if self.packed:
            # Nothing is cleared beside a dq that is part of a larger tensor, which only a distributed call may pass
            clearing_ctas = costs.sms if dq.is_contiguous() else 0
            self._table_tiles(kernels, causal, q.get_device(), clearing_ctas)
            of_sequences = {
                "tiles": self.tiles.counts,
                "longest": queries_of_tile(options.max_seqlen_q_rounded, 1, options),
                "longest_rows": options.longest_rounded,
            }
        may_share = not (deterministic and options is not None and options.batch_invariant)
        queries = queries_of_tile(seqlen_q, self.batch if self.packed else 1, options)
        sizes = BwdSizes(
            batch,
            heads,
            heads_kv,
            seqlen_q,
            seqlen_k,
            width=head_dim + head_dim_v,
            element_bytes=kernels.problem.element_bytes,
            costs=costs,
            device=self.device,
            queries=queries,
            may_share=may_share,
            **of_sequences,
        )
        self.rows = dense((batch, heads, sizes.rounded_q))
        self.passes = [
            (QueryPassLaunch if bwd_pass.grads == "dq" else KeyPassLaunch)(bwd_pass, kernel, kernels, sizes)
            for bwd_pass, kernel in kernels.passes
        ]
        self._make_views(kernels, tensors, heads_first, partial)
        self.query_axis, self.unseen = -2 if heads_first else -3, 0
        for bwd_pass, _ in kernels.passes:
            if bwd_pass.one_tile:
                check_one_tile(bwd_pass.block_N, seqlen_k)
                self.unseen = sizes.unseen_queries(bwd_pass, causal)

    def _table_tiles(self, kernels: BwdKernels, causal: bool, device: int, clearing_ctas: int) -> None:
        """Prepare the tile tables of packed sequences, whose kernel also clears rows of gradients behind the last sequence."""
        by_sequence = goes_by_sequence(kernels.problem, [bwd_pass for bwd_pass, _ in kernels.passes])
        where = self.batch, self.seqlen_q, self.seqlen_k, causal, device
        self.tiles = PackedTiles(kernels.tile_table, *where, by_sequence)
        results = [(1, shape[0], math.prod(shape[1:]) * dtype.itemsize) for shape, _, dtype in self.grads]
        self.tiles.clear_behind(results, clearing_ctas)

    def _make_views(
        self, kernels: BwdKernels, tensors: Sequence[torch.Tensor], heads_first: bool, partial: bool
    ) -> None:
        """Prepare views of q, k, v, dout, out, dq, dk and dv as the kernels take them, and the terms of fp32 inputs."""
        self.terms = self.partial_views = None
        *inputs, out, dq, dk, dv = tensors
        if kernels.terms is not None:
            # dq is fp32 and leaves from registers, so without the view of packed sequences
            q, k, v, dout = inputs
            where, first = (kernels.problem, heads_first), self.passes[0]
            query_terms = terms_launch(kernels.terms, *where, first.attention_tiles, q, dout)
            self.terms = BwdTermsLaunch(query_terms, *where, self.packed, first.stores_key_terms, k, v)
            self.dq_view = ArgumentViews(heads_first, dq)
        if partial:  # a pass by queries stores dq from registers, the others sum it
            tensors = *inputs, out
            dq_views = ArgumentViews(heads_first, dq, packed=self.packed and self.adds_dq)
            self.partial_views = dq_views, ArgumentViews(heads_first, dk, dv, packed=self.packed)
        self.views = ArgumentViews(heads_first, *tensors, packed=self.packed)

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
        dk: torch.Tensor | None = None,
        dv: torch.Tensor | None = None,
    ) -> NamedGradients:
        """Gradients of q, k, v, a sink and captured tensors, for tensors with the metadata of the plan.

        dq, dk, dv are the tensors passed, or new ones.
        """
        if torch.cuda.current_device() != self.device:
            others = softmax_scale, lse_base2, dlse, options, traced, dq, dk, dv
            with torch.cuda.device(self.device):
                return self(dout, q, k, v, out, lse, *others)
        new_dq, new_dk, new_dv = self.grads
        dq = empty(*new_dq) if dq is None else dq
        dk, dv = empty(*new_dk) if dk is None else dk, empty(*new_dv) if dv is None else dv
        result = {"q": dq, "k": dk, "v": dv}
        if self.seen:
            self.seen.zero_others(dq)
            q, dout, out, dq = self.seen.rows(q, dout, out, dq)
            lse, dlse = self.seen.numbers(lse, dlse)
        sink = None if options is None else options.sink
        tensors = q, k, v, dout, out, dq, dk, dv
        if self.packed and self.terms is not None:
            tensors = [x[None] for x in tensors]
        q, k, v, dout, out, *grads = self._views_of(tensors)
        dq_rows = tensors[5]
        terms = None
        if self.terms is not None:
            terms = self.terms(*tensors[:4])  # alive until the last launch
            if self.adds_dq:
                dq_rows.zero_()
            (grads[0],) = self.dq_view.of(dq_rows)
        if self.unseen:  # queries before the first step of the key tile
            dq_rows.narrow(self.query_axis, 0, self.unseen).zero_()
        arguments, tables, blocks = (), None, None
        if self.option_values is not None:
            arguments = self.option_values(options)
        if traced is not None:
            sizes = self.batch, self.heads, self.seqlen_q, self.seqlen_k
            captured = Gradients(traced, *sizes, transposed=self.adds_dq)
            arguments += (*traced_arguments(traced), *captured.arguments)
            blocks = traced.blocks
        if self.packed:
            tables = Tables(*self.tiles.tables(options, TABLE_ROWS, *result.values()))
        lse_log2, delta = self._row_numbers(out, dout, lse, dlse, lse_base2, tables, sink is not None)
        rows, inputs, call = (lse_log2, delta), (q, k, v, dout), (*grads, softmax_scale)
        first, *others = self.passes
        if terms is None:
            first.launch((*inputs, *rows), *call, arguments, tables, blocks)
        else:
            inputs, first_arguments = terms.others, arguments + terms.last_arguments
            first.launch((*terms.first, *rows), *call, first_arguments, tables, blocks, terms.key_terms)
        for bwd_pass in others:
            bwd_pass.launch((*inputs, *rows), *call, arguments, tables, blocks)
        if traced is not None:
            result |= captured.results(self.reduce)
        if sink is not None:
            result["sink"] = _sink_gradient(sink, lse_log2, delta)
        return result

    def _views_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of q, k, v, dout, out, dq, dk, dv, as the kernels take them."""
        q, k, v, dout, out, dq, dk, dv = tensors
        # A negated view's memory has the other sign
        is_negated = dout.is_neg() or q.is_neg() or k.is_neg() or v.is_neg() or out.is_neg()
        views_of = self.views.replaced if is_negated else self.views.of
        if self.partial_views is None:
            return views_of(*tensors)
        dq_views, key_views = self.partial_views
        rows = dq[None] if self.packed and not dq_views.packed else dq
        return [*views_of(q, k, v, dout, out), *dq_views.of(rows), *key_views.of(dk, dv)]

    def _row_numbers(
        self,
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        lse_base2: bool,
        tables: Tables | None,
        pads: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the base-2 log-sum-exp and delta, dout · out - dlse, of each query: [batch, heads, rounded_q], fp32.

        Args:
            out, dout: views of the plan; lse, dlse as a call takes them.
            tables: of packed sequences, else None.
            pads: the padding after each packed sequence gets lse +inf and delta 0, of which the gradient of a sink reads.
        """
        # A kernel with an fp32 tensor argument runs on the current stream of its device
        lse_log2, delta = empty(*self.rows), empty(*self.rows)
        lse, lse_to_log2 = as_stored(lse).contiguous(), 1.0 if lse_base2 else LOG2E
        if not self.packed:
            self.delta(out, dout, lse, lse_log2, delta, lse_to_log2)
            if dlse is not None:
                delta[:, :, : self.seqlen_q] -= _natural_dlse(dlse, lse, lse_base2)
            return lse_log2, delta
        dlse_scale = 0.0 if dlse is None else LOG2E if lse_base2 else 1.0
        dlse = lse if dlse is None else as_stored(dlse).contiguous()
        if pads:
            lse_log2.fill_(math.inf)
            delta.zero_()
        self.delta(out, dout, lse, dlse, lse_log2, delta, lse_to_log2, dlse_scale, tables.queries)
        return lse_log2, delta


def _natural_dlse(dlse: torch.Tensor, lse: torch.Tensor, lse_base2: bool) -> torch.Tensor:
    """Gradient with respect to the natural lse; 0 for a query that sees no key, whatever the gradient of its lse of -inf is."""
    return dlse.masked_fill(lse == -math.inf, 0) * (LOG2E if lse_base2 else 1.0)


def _sink_gradient(sink: torch.Tensor, lse_log2: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Gradient of the sink, [heads]: minus the sum of P_sink * delta over all queries. Padding has lse_log2 = +inf, delta = 0."""
    log_weights = torch.sub(sink[:, None], lse_log2, alpha=LN2)
    # delta * -exp(log_weights) in one kernel: the derivative of an ELU below 0, and no weight is above 1
    products = torch.ops.aten.elu_backward(delta, 1, -1, 1, False, log_weights)
    return products.sum((0, 2)).to(sink.dtype)


def _plan_key(
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
        dout.shape, dout.stride(), dout.dtype, dout.get_device(),
        out.shape, out.stride(), out.dtype, out.get_device(),
        lse.shape, lse.dtype, lse.get_device(),
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
        return plan_cache.plans.get(_plan_key(dout, q, k, v, out, lse, causal, heads_first, deterministic))
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
    *,
    options: Options | None = None,
    traced: Call | None = None,
    dq: torch.Tensor | None = None,
    partial: bool = False,
    config: BwdConfig | None = None,
) -> NamedGradients:
    """Launch the backward on tensors that have passed checks/, on a Hopper GPU.

    Args:
        dout, q, k, v, out: [batch, heads, seqlen, head_dim] if heads_first, else [batch, seqlen, heads, head_dim]; packed sequences
            [total, heads, head_dim]. out and lse as the forward returned them.
        lse, dlse: [batch, heads, seqlen_q] or [heads, total_q], fp32; dlse is the gradient with respect to lse.
        deterministic: bitwise equal gradients from run to run.
        dq: tensor to write to, in the layout of q, with strides and an address that TMA takes; None: a new contiguous one.
        partial: dq, dk and dv are fp32, to be added to those of other calls; not with traced.
        config: used instead of the tuned row or default.
    Returns:
        gradients by name: q, k, v, shaped as these, in their dtype or fp32, those of k and v contiguous; with a sink: sink, [heads], in its
            dtype; and by its number one per tensor of traced.program.learned, in its shape, fp32 or as traced.Gradients stores it.
    """
    if q.dtype is torch.float32:  # kernels read views of another dtype, which lose the sign of a negated view
        dout, q, k, v, out = (as_stored(x) for x in (dout, q, k, v, out))
    tensors, layout = (dout, q, k, v, out, lse), (causal, heads_first, deterministic)
    if traced is not None:
        traced = backward_call(traced, deterministic)
    partial = partial and q.dtype != torch.float32
    key = _plan_key(*tensors, *layout)
    if options is not None:
        key = (*key, *options.key, options.max_seqlen_q_rounded, options.max_seqlen_k_rounded)
    if traced is not None or dq is not None or partial:
        key = (*key, traced and traced.program, None if dq is None else dq.stride(), partial)
    plan = plan_cache.plans.get(key) if config is None else None
    if plan is not None:
        return plan(*tensors, softmax_scale, lse_base2, dlse, options, traced, dq)
    asked = softmax_scale, causal, lse_base2, heads_first, deterministic, dlse
    others = {"options": options, "traced": traced, "partial": partial, "config": config}
    if has_odd_columns(q, v):
        return _backward_of_padded(tensors, asked, others, dq)
    if torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            return backward(*tensors, *asked, dq=dq, **others)
    grads = tuple(
        empty(*dense(x.shape, torch.float32 if partial else x.dtype)) if grad is None else grad
        for x, grad in ((q, dq), (k, None), (v, None))
    )
    if not q.numel() or not k.numel() or has_no_sequences(options):
        return _backward_of_empty(q, lse, lse_base2, grads, dlse, options, traced)
    if q.shape[0] <= MAX_BATCH or (options is not None and options.varlen):
        plan = BwdPlan(*tensors[:5], *grads, *layout, options, traced, partial, config)
        if config is None:
            plan_cache.keep(key, plan)
        return plan(*tensors, softmax_scale, lse_base2, dlse, options, traced, *grads)
    if options is not None:
        check_dropout_batch(options.dropout_p, q.shape[0], MAX_BATCH)
    return _backward_in_chunks(
        (*tensors, *grads), softmax_scale, lse_base2, layout, dlse, options, partial, config
    )


def _backward_of_padded(
    tensors: tuple[torch.Tensor, ...], asked: tuple, others: dict[str, Any], dq: torch.Tensor | None
) -> NamedGradients:
    """Gradients of inputs whose head dims TMA cannot address, from copies with more columns.

    Args:
        tensors: dout, q, k, v, out, lse.
        asked: the arguments of backward from softmax_scale to dlse.
        others: those by keyword but dq.
    """
    *inputs, lse = tensors
    grads = backward(*pad_columns(*inputs), lse, *asked, **others)
    for name, x in zip("qkv", inputs[1:4], strict=True):
        grads[name] = cut_columns(grads[name], x.shape[-1])
    if dq is not None:
        grads["q"] = dq.copy_(grads["q"])
    return grads


def _backward_of_empty(
    q: torch.Tensor,
    lse: torch.Tensor,
    lse_base2: bool,
    grads: tuple[torch.Tensor, ...],
    dlse: torch.Tensor | None,
    options: Options | None,
    traced: Call | None,
) -> NamedGradients:
    """Gradients where there are no queries, no keys or no sequences."""
    zeros: NamedGradients = {name: x.zero_() for name, x in zip("qkv", grads, strict=True)}
    if traced is not None:
        for number in traced.program.learned:
            zeros[number] = torch.zeros_like(traced.tensors[number], dtype=torch.float32)
    if options is None or options.sink is None:
        return zeros
    zeros["sink"] = torch.zeros_like(options.sink)
    if dlse is not None and q.numel():
        dsink = _natural_dlse(dlse, lse, lse_base2)  # without keys lse = sink
        zeros["sink"] = dsink.sum((0, 2) if dlse.ndim == 3 else 1).to(options.sink.dtype)
    return zeros


def _backward_in_chunks(
    tensors: tuple[torch.Tensor, ...],
    softmax_scale: float,
    lse_base2: bool,
    layout: tuple[bool, bool, bool],
    dlse: torch.Tensor | None,
    options: Options | None,
    partial: bool,
    config: BwdConfig | None,
) -> NamedGradients:
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
        (*inputs, lse), outputs = chunk[:6], chunk[6:]
        plan = BwdPlan(*inputs, *outputs, *layout, chunk_options, None, partial, config)
        result = plan(*inputs, lse, softmax_scale, lse_base2, chunk_dlse, chunk_options, None, *outputs)
        if sink is not None:
            dsink += result["sink"]
    grads: NamedGradients = dict(zip("qkv", tensors[6:], strict=True))
    if sink is not None:
        grads["sink"] = dsink.to(sink.dtype)
    return grads
