"""Launches of the backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tl_attention.compiler import Kernel, compile_kernel
from tl_attention.launch.arrays import Views
from tl_attention.launch.common import (
    LOG2E,
    MAX_GRID,
    Argument,
    PlanCache,
    TileTables,
    dense,
    empty,
    find_config,
    fragment_blocks,
    option_arguments,
    options_key,
    qkv_key,
    tile_counts,
)
from tl_attention.options import Options
from tl_attention.problem import (
    TABLE_ROWS,
    AttnProblem,
    BwdConfig,
    BwdDelta,
    BwdPass,
    BwdSum,
    delta_width,
    length_bucket,
    plan_kernels,
)
from tl_attention.target import sm_count

# Of one backward, whose small kernels have the batch in the last dimension of their grids
MAX_BATCH = 2**16 - 1
QUERY_ROWS = TABLE_ROWS  # that the log-sum-exp, delta and the sums of dq are padded to a multiple of
WAVES = 4  # of CTAs that a pass by keys is to have, if a key head has query heads enough to divide among them
_kernels: dict[tuple, BwdKernels] = {}
plan_cache = PlanCache()


@dataclass(frozen=True)
class BwdKernels:
    """The compiled kernels of a backward."""

    problem: AttnProblem
    delta: Kernel
    passes: tuple[tuple[BwdPass, Kernel], ...]
    sum_qk: Kernel
    sum_v: Kernel
    plan: Kernel | None  # what goes before varlen


def _find_kernels(key: tuple, direction: str, config: BwdConfig | None) -> BwdKernels:
    problem, config = find_config(key, direction, config)
    return BwdKernels(
        problem,
        compile_kernel(problem.of_width(delta_width(problem.head_dim_v)), BwdDelta()),
        tuple((one, compile_kernel(problem, one)) for one in config.passes),
        compile_kernel(problem.of_width(problem.head_dim), BwdSum()),
        compile_kernel(problem.of_width(problem.head_dim_v), BwdSum()),
        next((compile_kernel(*one) for one in plan_kernels(problem)), None),
    )


def _key_parts(batch: int, heads: int, heads_kv: int, n_blocks: int, sms: int) -> tuple[int, int]:
    """(parts, heads_a_part): among how many CTAs the query heads of a key head are divided, and how many each has."""
    heads_a_kv_head = heads // heads_kv
    parts = min(heads_a_kv_head, -(-WAVES * sms // (n_blocks * heads_kv * batch)))
    heads_a_part = -(-heads_a_kv_head // parts)
    return -(-heads_a_kv_head // heads_a_part), heads_a_part


def bwd_workspace_bytes(
    batch: int,
    heads: int,
    heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    problem: AttnProblem,
    config: BwdConfig,
    sms: int,
) -> int:
    """What a backward allocates beside its gradients on a GPU with so many SMs, all of it fp32.

    The log-sum-exp and delta of each query; the sums of dq, if a pass adds to them; and where the query heads of a key head
    are divided among CTAs, the parts of dk and dv.
    """
    rows = batch * heads * -(-seqlen_q // QUERY_ROWS) * QUERY_ROWS
    numbers = 2 * rows
    for one in config.passes:
        if one.adds_dq:
            numbers += rows * problem.head_dim
        if one.grads != "dq":
            n_blocks = -(-seqlen_k // one.block_N)
            parts, _ = _key_parts(batch, heads, heads_kv, n_blocks, sms)
            width = problem.head_dim * ("dk" in one.makes) + problem.head_dim_v * ("dv" in one.makes)
            numbers += (parts > 1) * parts * batch * heads_kv * n_blocks * one.block_N * width
    return 4 * numbers


@dataclass(frozen=True)
class BwdSizes:
    """What a backward's kernels are planned by."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    width: int  # head_dim + head_dim_v
    sms: int
    tiles: tuple[int, int] | None = None  # of queries and of keys, of packed sequences

    @property
    def heads_a_kv_head(self) -> int:
        return self.heads // self.heads_kv

    @property
    def rounded_q(self) -> int:
        if self.tiles:
            return self.tiles[0] * TABLE_ROWS
        return -(-self.seqlen_q // QUERY_ROWS) * QUERY_ROWS

    def key_blocks(self, block_N: int) -> int:
        return self.tiles[1] if self.tiles else -(-self.seqlen_k // block_N)


@dataclass(frozen=True)
class Tables:
    """Of a launch with varlen: what its small kernels take after their other arguments."""

    queries: torch.Tensor
    keys: torch.Tensor


class QueryPass:
    """A pass whose CTAs own queries."""

    def __init__(self, one: BwdPass, kernel: Kernel, kernels: BwdKernels, sizes: BwdSizes):
        batch, heads, group = sizes.batch, sizes.heads, sizes.heads_a_kv_head
        kv_bytes = 2 * sizes.seqlen_k * sizes.width
        queries = sizes.rounded_q if sizes.tiles else sizes.seqlen_q
        counts = tile_counts(batch, heads, group, kv_bytes, queries, one.block_M, MAX_GRID)
        self.kernel, self.counts = kernel, (group, *counts)

    def launch(
        self,
        inputs: tuple[Argument, ...],
        dq: Argument,
        dk: Argument,
        dv: Argument,
        softmax_scale: float,
        option_args: tuple = (),
        tables: Tables | None = None,
    ) -> None:
        if tables is not None:
            option_args = *option_args[:-1], tables.queries
        self.kernel(*inputs, dq, softmax_scale, *self.counts, *option_args)


class KeyPass:
    """A pass whose CTAs own keys, with the sums it may leave to others."""

    def __init__(self, one: BwdPass, kernel: Kernel, kernels: BwdKernels, sizes: BwdSizes):
        batch, heads_kv = sizes.batch, sizes.heads_kv
        head_dim, head_dim_v = kernels.problem.head_dim, kernels.problem.head_dim_v
        n_blocks = sizes.key_blocks(one.block_N)
        parts, heads_a_part = _key_parts(batch, sizes.heads, heads_kv, n_blocks, sizes.sms)
        q_bytes = sizes.seqlen_q * heads_a_part * (2 * sizes.width + 4 * head_dim * one.adds_dq)
        counts = tile_counts(
            batch, heads_kv * parts, 1, q_bytes, n_blocks * one.block_N, one.block_N, MAX_GRID
        )
        self.kernel, self.counts = kernel, (sizes.heads_a_kv_head, heads_a_part, parts, *counts)
        self.sum_qk, self.sum_v = kernels.sum_qk, kernels.sum_v

        self.adds_dq = one.adds_dq
        self.dk_in_parts, self.dv_in_parts = (parts > 1 and grad in one.makes for grad in ("dk", "dv"))
        self.row_blocks_q, self.row_blocks_k = sizes.rounded_q // 16, n_blocks * one.block_N // 16
        rows_q = batch * sizes.heads * self.row_blocks_q
        rows_k = parts * batch * heads_kv * self.row_blocks_k
        self.dq_sum = fragment_blocks(rows_q * self.adds_dq, head_dim)
        self.dk_parts = fragment_blocks(rows_k * self.dk_in_parts, head_dim)
        self.dv_parts = fragment_blocks(rows_k * self.dv_in_parts, head_dim_v)
        self.parts = parts

    def launch(
        self,
        inputs: tuple[Argument, ...],
        dq: Argument,
        dk: Argument,
        dv: Argument,
        softmax_scale: float,
        option_args: tuple = (),
        tables: Tables | None = None,
    ) -> None:
        dq_sum, dk_parts, dv_parts = empty(*self.dq_sum), empty(*self.dk_parts), empty(*self.dv_parts)
        if self.adds_dq:
            dq_sum.zero_()
        of_queries = of_keys = ()
        if tables is not None:
            of_queries, of_keys = (False, tables.queries), (True, tables.keys)
            option_args = *option_args[:-1], tables.keys
        self.kernel(*inputs, dq_sum, dk, dv, dk_parts, dv_parts, softmax_scale, *self.counts, *option_args)
        if self.adds_dq:
            self.sum_qk(dq_sum, dq, softmax_scale, 1, self.row_blocks_q, *of_queries)
        if self.dk_in_parts:
            self.sum_qk(dk_parts, dk, 1.0, self.parts, self.row_blocks_k, *of_keys)
        if self.dv_in_parts:
            self.sum_v(dv_parts, dv, 1.0, self.parts, self.row_blocks_k, *of_keys)


class BwdPlan:
    """All of a backward that the shapes, strides, dtype and device of its tensors settle. Serves one thread.

    Args:
        dout, q, k, v, out, dq, dk, dv: [batch, heads, seqlen, head_dim] if heads_first, else [batch, seqlen, heads, head_dim]; on the
            current device, none of them empty.
        config: serves instead of the tuned row or default.
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
    ):
        self.packed = options is not None and options.varlen
        self.device = q.device.index
        self.grads = [dense(x.shape, x.dtype) for x in (q, k, v)]
        tensors = q, k, v, dout, out, dq, dk, dv
        if self.packed:
            q, k, v, *_ = tensors = [x[None] for x in tensors]
        seq, head = (2, 1) if heads_first else (1, 2)
        batch, seqlen_q, heads, head_dim = q.shape[0], q.shape[seq], q.shape[head], q.shape[3]
        seqlen_k, heads_kv, head_dim_v = k.shape[seq], k.shape[head], v.shape[3]
        self.views = Views(heads_first, *tensors, packed=self.packed)
        self.batch = options.cu_seqlens_q.shape[0] - 1 if self.packed else batch
        self.heads = heads

        bucket = length_bucket(options.max_seqlen_k if self.packed else seqlen_k)
        # A sink is in the log-sum-exp, and so in all probabilities
        names = () if options is None else tuple(name for name in options.names if name != "sink")
        self.has_options = bool(names)
        key = (q.dtype, head_dim, head_dim_v, causal, names, bucket, self.device)
        direction = "bwd_det" if deterministic else "bwd"
        if config is None:
            kernels = _kernels.get((direction, key))
            if kernels is None:
                kernels = _kernels[direction, key] = _find_kernels(key, direction, None)
        else:
            kernels = _find_kernels(key, direction, config)
        self.delta = kernels.delta
        tiles = None
        if self.packed:
            self.tile_tables = TileTables(kernels.plan, self.batch, seqlen_q, seqlen_k, causal, self.device)
            tiles = self.tile_tables.tiles
        width, sms = head_dim + head_dim_v, sm_count(self.device)
        sizes = BwdSizes(batch, heads, heads_kv, seqlen_q, seqlen_k, width, sms, tiles)
        self.seqlen_q, self.rows = seqlen_q, dense((batch, heads, sizes.rounded_q))
        self.passes = [
            (QueryPass if one.grads == "dq" else KeyPass)(one, kernel, kernels, sizes)
            for one, kernel in kernels.passes
        ]

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
    ) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv, in the layout of q, and with a sink dsink, of other tensors of the same metadata."""
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(dout, q, k, v, out, lse, softmax_scale, lse_base2, dlse, options)
        dq, dk, dv = (empty(*x) for x in self.grads)
        return self.launch(dout, q, k, v, out, lse, dq, dk, dv, softmax_scale, lse_base2, dlse, options)

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
    ) -> tuple[torch.Tensor, ...]:
        """Fills dq, dk, dv and returns them, and with a sink dsink."""
        made = dq, dk, dv
        sink = None if options is None else options.sink
        # Each kernel has an fp32 tensor among its arguments, and so runs on PyTorch's current stream of its device
        tensors = q, k, v, dout, out, dq, dk, dv
        if self.packed:
            tensors = [x[None] for x in tensors]
        q, k, v, dout, out, *grads = self.views.of(*tensors)
        lse_log2, delta = empty(*self.rows), empty(*self.rows)
        lse, lse_to_log2 = lse.contiguous(), 1.0 if lse_base2 else LOG2E
        option_args = ()
        if self.has_options:
            option_args = option_arguments(options, self.batch, self.heads, self.device)
        if self.packed:
            tables = Tables(*(self.tile_tables.table(options, keys, TABLE_ROWS) for keys in (False, True)))
            dlses = (lse, 0.0) if dlse is None else (dlse.contiguous(), LOG2E if lse_base2 else 1.0)
            if sink is not None:  # padding between sequences and after the last
                lse_log2.fill_(math.inf)
                delta.zero_()
            self.delta(out, dout, lse, dlses[0], lse_log2, delta, lse_to_log2, dlses[1], tables.queries)
            for one in self.passes:
                one.launch((q, k, v, dout, lse_log2, delta), *grads, softmax_scale, option_args, tables)
            return made if sink is None else (*made, _sink_gradient(sink, lse_log2, delta))
        self.delta(out, dout, lse, lse_log2, delta, lse_to_log2)
        if dlse is not None:
            delta[:, :, : self.seqlen_q] -= _of_natural_lse(dlse, lse, lse_base2)
        for one in self.passes:
            one.launch((q, k, v, dout, lse_log2, delta), *grads, softmax_scale, option_args)
        return made if sink is None else (*made, _sink_gradient(sink, lse_log2, delta))


def _of_natural_lse(dlse: torch.Tensor, lse: torch.Tensor, lse_base2: bool) -> torch.Tensor:
    """The gradient by lse in natural units; a query that sees no key has none, whatever came of its lse of -inf."""
    return dlse.masked_fill(lse == -math.inf, 0) * (LOG2E if lse_base2 else 1.0)


def _sink_gradient(sink: torch.Tensor, lse_log2: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """[heads], minus the sum of P_sink * delta over all queries; where there is none, lse_log2 is +inf and delta 0."""
    weights = torch.exp2(sink.float()[:, None] * LOG2E - lse_log2)
    return -(weights * delta).sum((0, 2)).to(sink.dtype)


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
    """All that checks.check_bwd asks of tensors beside qkv_key, and all that a plan is made of."""
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
    """That of an earlier call of bwd in this thread, by tensors that differ from these in their values alone."""
    return plan_cache.plans.get(_bwd_key(dout, q, k, v, out, lse, causal, heads_first, deterministic))


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
) -> tuple[torch.Tensor, ...]:
    """Launch the backward on tensors that checks.py has passed, on a Hopper GPU.

    Args:
        dout, q, k, v, out: [batch, heads, seqlen, head_dim] if heads_first, else [batch, seqlen, heads, head_dim]; the last two and
            lse as the forward returned them.
        lse, dlse: [batch, heads, seqlen_q] fp32, dlse the gradient with respect to lse.
        deterministic: gradients equal bit by bit from run to run.
        config: serves instead of the tuned row or default.
    Returns:
        dq, dk, dv: as q, k, v, in their dtype, contiguous; with a sink also dsink: [heads], in its dtype.
    """
    tensors, layout = (dout, q, k, v, out, lse), (causal, heads_first, deterministic)
    key = (*_bwd_key(*tensors, *layout), *options_key(options))
    known = plan_cache.plans.get(key) if config is None else None
    if known is not None:
        return known(*tensors, softmax_scale, lse_base2, dlse, options)
    if torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            return backward(*tensors, softmax_scale, causal, lse_base2, *layout[1:], dlse, config, options)
    sink = None if options is None else options.sink
    grads = tuple(empty(*dense(x.shape, x.dtype)) for x in (q, k, v))
    if not q.numel() or not k.numel():
        zeros = tuple(x.zero_() for x in grads)
        if sink is None:
            return zeros
        if dlse is None or not q.numel():
            return *zeros, torch.zeros_like(sink)
        dsink = _of_natural_lse(dlse, lse, lse_base2)  # lse = sink
        return *zeros, dsink.sum((0, 2) if dlse.ndim == 3 else 1).to(sink.dtype)
    if q.shape[0] <= MAX_BATCH or (options is not None and options.varlen):
        made = BwdPlan(*tensors[:5], *grads, *layout, config, options)
        if config is None:
            plan_cache.keep(key, made)
        return made.launch(*tensors, *grads, softmax_scale, lse_base2, dlse, options)
    if options is not None and options.dropout_p:
        raise NotImplementedError(
            f"dropout_p: a backward with dropout takes a batch of at most {MAX_BATCH}, got {q.shape[0]}; divide it"
        )
    dsink = None if sink is None else torch.zeros_like(sink, dtype=torch.float32)
    for first in range(0, q.shape[0], MAX_BATCH):
        some = [x[first : first + MAX_BATCH] for x in (*tensors, *grads)]
        dlse_some = None if dlse is None else dlse[first : first + MAX_BATCH]
        options_some = None if options is None else options.of_batch(first, MAX_BATCH)
        one = BwdPlan(*some[:5], *some[6:], *layout, config, options_some)
        made = one.launch(*some, softmax_scale, lse_base2, dlse_some, options_some)
        if sink is not None:
            dsink += made[3]
    return grads if sink is None else (*grads, dsink.to(sink.dtype))
