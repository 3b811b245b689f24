"""Launches of attention to a cache: of tensors that kvcache.py has checked, on a Hopper GPU."""

from __future__ import annotations

import functools
import math

import torch

from tl_attention import configs
from tl_attention.compiler import Kernel, compile_kernel
from tl_attention.launch.arrays import Views
from tl_attention.launch.common import DTYPE_NAMES, LN2, PlanCache, dense, empty, unused_arguments
from tl_attention.options import MAX_WINDOW, Cache, Options
from tl_attention.problem import (
    DECODE_TILE_WIDTHS,
    DTYPES,
    MERGE_NUMBERS,
    AttnProblem,
    DecodeConfig,
    append_kernel,
    decode_problem,
    page_rows,
)
from tl_attention.target import sm_count

MAX_PARTS = 4096  # splits of a sequence
INVARIANT_KEYS = 1024  # of a split that does not depend on the batch

plan_cache = PlanCache()


def _rows(seqlen_q: int, heads: int, heads_kv: int) -> int:
    """Of the tile that all queries of a key head are."""
    return seqlen_q * (heads // heads_kv)


def _sizes(
    config: DecodeConfig, batch: int, rows: int, heads_kv: int, fixed: int, capacity: int, sms: int
) -> tuple[int, int, int, int]:
    """(m_blocks, ctas, slots, entries): tiles of queries a key head, CTAs, parts that there may be, items to be merged of them."""
    m_blocks = -(-rows // config.block_M)
    items, ctas = batch * heads_kv * m_blocks, sms * config.ctas_a_sm
    if fixed == 0:
        return m_blocks, ctas, ctas + items, ctas
    splits = -fixed if fixed < 0 else -(-capacity // (config.block_N * fixed))
    return m_blocks, ctas, items * max(splits, 1), items


def _fixed(num_splits: int, batch_invariant: bool, capacity: int, block_N: int) -> int:
    """How kernels/decode.py is to split: 0 as suits all sequences together, else see Walk there."""
    if num_splits > 0:
        return -min(num_splits, MAX_PARTS)
    if batch_invariant:
        return max(INVARIANT_KEYS // block_N, -(-capacity // (block_N * MAX_PARTS)))
    return 0


def decode_workspace_bytes(
    batch: int,
    seqlen_q: int,
    heads: int,
    heads_kv: int,
    head_dim_v: int,
    num_splits: int,
    batch_invariant: bool,
    seqlen_cache: int,
    sms: int,
) -> int:
    """What a decode allocates beside its outputs on a GPU with so many SMs: the parts of the output and their log-sum-exps, fp32, and
    which of them belong together.

    Args:
        seqlen_cache: keys that a sequence may have.
    """
    rows = _rows(seqlen_q, heads, heads_kv)
    most = 0
    for width in DECODE_TILE_WIDTHS:  # that of q and k is not said
        problem = AttnProblem(DTYPES[0], *width, False)
        config = configs.decode_config(problem, rows)
        if width[1] >= head_dim_v:
            fixed = _fixed(num_splits, batch_invariant, seqlen_cache, config.block_N)
            *_, slots, entries = _sizes(config, batch, rows, heads_kv, fixed, seqlen_cache, sms)
            part_numbers = config.warpgroups * min(rows, 64) * (config.columns(problem) + 1)
            most = max(most, 4 * (slots * part_numbers + entries * MERGE_NUMBERS))
    return most


class DecodePlan:
    """All of a decode that the shapes, strides, dtype and device of its tensors settle, and which options are on. Serves one thread."""

    def __init__(
        self, q: torch.Tensor, cache: Cache, options: Options, num_splits: int, batch_invariant: bool
    ):
        k, v = cache.k, cache.v
        self.device = q.device.index
        batch, seqlen_q, heads, head_dim = q.shape
        heads_kv, self.head_dim_v = k.shape[2], v.shape[3]
        paged = cache.block_table is not None
        problem = decode_problem(DTYPE_NAMES[q.dtype], head_dim, self.head_dim_v, options.names)
        width = problem.head_dim, problem.head_dim_v
        rows = _rows(seqlen_q, heads, heads_kv)
        page_size = k.shape[1]
        together = page_rows(page_size) if paged else 0
        config = configs.decode_config(problem, rows, together)
        for number in configs.DECODE_ROWS:  # so that no number of queries compiles later
            compile_kernel(problem, configs.decode_config(problem, number, together))
        self.kernel = compile_kernel(problem, config)
        combine = compile_kernel(*config.combine(problem))

        capacity = page_size * (cache.block_table.shape[1] if paged else 1)
        fixed = _fixed(num_splits, batch_invariant, capacity, config.block_N)
        m_blocks, ctas, slots, entries = _sizes(
            config, batch, rows, heads_kv, fixed, capacity, sm_count(self.device)
        )
        part_rows = min(rows, 64)
        columns = config.columns(problem)
        self.o_parts = dense((slots, config.warpgroups, part_rows, columns))
        self.lse_parts = dense((slots, config.warpgroups, part_rows))
        self.merges = dense((entries, MERGE_NUMBERS), torch.int32)
        self.combine = None if fixed == -1 else combine  # one split has one part
        (page_k, rows_k), (page_v, rows_v) = (
            _rows_of(x, name) for x, name in ((k, "k_cache"), (v, "v_cache"))
        )
        self.views = Views(False, rows_k, rows_v, packed=True)
        self.pad_q = (0, width[0] - head_dim) if head_dim != width[0] else None
        self.q_strides = dense(q.shape)[1]
        self.out = dense((batch, seqlen_q, heads, width[1]), q.dtype)
        self.lse = dense((batch, heads, seqlen_q))
        given = (
            isinstance(cache.seqlens, torch.Tensor)
            | (cache.leftpad is not None) << 1
            | (cache.batch_idx is not None) << 2
        )
        self.counts = heads // heads_kv, m_blocks, given
        self.pages = capacity, page_size, k.shape[0], page_k, page_v, fixed, ctas
        self.batch, self.heads = batch, heads

    def __call__(
        self,
        q: torch.Tensor,
        cache: Cache,
        softmax_scale: float,
        causal: bool,
        options: Options,
        workspace: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(q, cache, softmax_scale, causal, options, workspace)
        if self.pad_q is not None:
            q = torch.nn.functional.pad(q, self.pad_q)
        elif q.stride() != self.q_strides or q.data_ptr() & 15:
            q = q.clone(memory_format=torch.contiguous_format)
        out, lse = empty(*self.out), empty(*self.lse)
        slopes, sink, _, no_lengths, no_table = unused_arguments(self.device)
        if workspace is None:
            o_parts, lse_parts, merges = empty(*self.o_parts), empty(*self.lse_parts), empty(*self.merges)
        else:
            tensors = self.o_parts, self.lse_parts, self.merges
            sizes = [4 * math.prod(shape) for shape, *_ in tensors]
            parts = workspace[: sum(sizes)].split(sizes)
            o_parts, lse_parts, merges = (
                x.view(dtype).view(shape) for x, (shape, _, dtype) in zip(parts, tensors, strict=True)
            )
        if options.alibi_slopes is not None:
            slopes = options.alibi_slopes.expand(self.batch, self.heads)
        if options.sink is not None:
            sink = options.sink.float()
        seqlens, seqlen = (
            (cache.seqlens, 0) if isinstance(cache.seqlens, torch.Tensor) else (no_lengths, cache.seqlens)
        )
        left, right = (MAX_WINDOW, 0) if causal else options.bounds
        self.kernel(
            q,
            *self.views.of(cache.k, cache.v),
            out,
            lse,
            seqlens,
            no_lengths if cache.leftpad is None else cache.leftpad,
            no_lengths if cache.batch_idx is None else cache.batch_idx,
            no_table if cache.block_table is None else cache.block_table,
            o_parts,
            lse_parts,
            merges,
            softmax_scale,
            LN2,
            *self.counts,
            seqlen,
            cache.new,
            *self.pages,
            left,
            right,
            options.softcap,
            slopes,
            sink,
        )
        if self.combine is not None:
            self.combine(o_parts, lse_parts, merges, out, lse, LN2, self.counts[0], sink)
        return out if self.head_dim_v == out.shape[3] else out[..., : self.head_dim_v].contiguous(), lse


def _rows_of(x: torch.Tensor, name: str) -> tuple[int, torch.Tensor]:
    """Rows from a cache or page to the next, and all rows as [1, rows, heads_kv, columns], some of them perhaps of other tensors."""
    caches, room, heads_kv, columns = x.shape
    step, row, head, _ = x.stride()
    # The stride of a dimension of size 1 may be anything, and TMA asks for one
    if room == 1:
        row = step if caches > 1 else columns * heads_kv
    if heads_kv == 1:
        head = columns
    if caches > 1 and step % row:
        raise ValueError(
            f"{name}: expected stride(0) to be a multiple of stride(1), got {x.stride()}; allocate it as [caches, seqlen, heads, head_dim],"
            " or with the sequence anywhere outside the head dimension"
        )
    step = step // row if caches > 1 else room
    return step, x.as_strided((1, (caches - 1) * step + room, heads_kv, columns), (x.numel(), row, head, 1))


def attend_cache(
    q: torch.Tensor,
    cache: Cache,
    softmax_scale: float,
    causal: bool,
    options: Options,
    num_splits: int = 0,
    batch_invariant: bool = False,
    workspace: torch.Tensor | None = None,
    known: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [batch, seqlen_q, heads, head_dim] to the keys of a cache.

    Args:
        options: window, softcap, alibi_slopes, sink alone.
        num_splits: 0 divides all keys evenly among the CTAs, n has n splits of each sequence.
        batch_invariant: splits of a fixed number of keys, so that a sequence's result does not depend on the others.
        workspace: of decode_workspace_bytes() bytes, for the parts; else they are allocated.
        known: hashable, the same for calls that have one plan alone; None: it is found by their metadata.
    Returns:
        out [batch, seqlen_q, heads, head_dim_v], lse [batch, heads, seqlen_q] fp32, natural.
    """
    plan = plan_cache.plans.get(known)
    if plan is None:
        if not q.numel() or not cache.k.numel() or not cache.v.numel():
            return _of_nothing(q, cache.v.shape[3], options)
        key = _plan_key(q, cache, options, num_splits, batch_invariant)
        plan = plan_cache.plans.get(key)
        if plan is None:
            plan = DecodePlan(q, cache, options, num_splits, batch_invariant)
            plan_cache.keep(key, plan)
        if known is not None:
            plan_cache.keep(known, plan)
    return plan(q, cache, softmax_scale, causal, options, workspace)


def _plan_key(
    q: torch.Tensor, cache: Cache, options: Options, num_splits: int, batch_invariant: bool
) -> tuple:
    k, v, table = cache.k, cache.v, cache.block_table
    return (
        q.shape, q.dtype, q.device, k.shape, k.stride(), v.shape, v.stride(), options.names, num_splits, batch_invariant,
        None if table is None else table.shape[1],
        isinstance(cache.seqlens, torch.Tensor), cache.leftpad is None, cache.batch_idx is None,
    )  # fmt: skip


def _of_nothing(q: torch.Tensor, head_dim_v: int, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    lse = torch.full((batch, heads, seqlen_q), -math.inf, device=q.device)
    if options.sink is not None:
        lse.copy_(options.sink.float()[:, None].expand_as(lse))
    return q.new_zeros(batch, seqlen_q, heads, head_dim_v), lse


def append_to_cache(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: Cache,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    q_in_place_of_keys: bool,
) -> torch.Tensor:
    """Write k_new and v_new [batch, new, heads_kv, ..] to the cache behind its seqlens, k_new rotated; returns q, rotated.

    Args:
        cos, sin: [positions, rotary_dim / 2] in the dtype of q, contiguous; None rotates nothing.
        interleaved: pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2).
        q_in_place_of_keys: query i is rotated by position seqlens + i, else all by seqlens.
    """
    device = q.device.index
    if torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            return append_to_cache(q, k_new, v_new, cache, cos, sin, interleaved, q_in_place_of_keys)
    kernel = _append_kernel(DTYPE_NAMES[q.dtype])
    if not k_new.shape[1] or not q.shape[0]:
        return q
    rotated = empty(*dense(q.shape, q.dtype))
    *_, no_lengths, no_table = unused_arguments(device)
    angles = (_no_angles(q.dtype, device),) * 2 if cos is None else (cos, sin)
    tensor = isinstance(cache.seqlens, torch.Tensor)
    paged = cache.block_table is not None
    kernel(
        q,
        rotated,
        k_new,
        v_new,
        cache.k,
        cache.v,
        *angles,
        cache.seqlens if tensor else no_lengths,
        no_lengths if cache.batch_idx is None else cache.batch_idx,
        cache.block_table if paged else no_table,
        0 if cos is None else 2 * cos.shape[1],
        interleaved,
        q_in_place_of_keys,
        tensor | (cache.batch_idx is not None) << 2 | paged << 3,
        0 if tensor else cache.seqlens,
        k_new.shape[1],
        cache.k.shape[1],
        cache.k.shape[0],
    )
    return q if cos is None else rotated


@functools.cache
def _append_kernel(dtype: str) -> Kernel:
    return compile_kernel(*append_kernel(dtype))


@functools.cache
def _no_angles(dtype: torch.dtype, device: int) -> torch.Tensor:
    """In place of cos and sin, which are not read without rotary."""
    return torch.zeros(1, 1, dtype=dtype, device=f"cuda:{device}")
