"""Launch of attention to a KV cache, on tensors that have passed checks/kvcache.py, on a Hopper GPU."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch

from tl_attention.compilation.store import Kernel
from tl_attention.config import configs
from tl_attention.config.kernel_configs import (
    MERGE_NUMBERS,
    MIN_BLOCKS_PER_CTA,
    DecodeConfig,
    append_kernel,
    page_rows,
)
from tl_attention.launch.arrays import ArgumentViews, page_rows_of
from tl_attention.launch.common import (
    LN2,
    OptionValues,
    PlanCache,
    compile_config,
    compile_needed,
    dense,
    empty,
    lse_without_keys,
    unused_tensor,
)
from tl_attention.problem.attn_problem import (
    DECODE_TILE_WIDTHS,
    DEFAULT_DTYPE,
    OPTIONS,
    AttnProblem,
    decode_arguments,
    decode_problem,
)
from tl_attention.problem.options import BATCH_INVARIANT, Cache, Options, as_stored
from tl_attention.problem.target import DTYPE_NAMES, sm_count

MAX_SPLITS = 4096  # per sequence
# Keys per split of a batch_invariant decode with v_in_k, which no forward equals bit by bit
INVARIANT_KEYS = 1024
TILE_ROWS = 64  # rows per consumer warpgroup

# Place of the sink in the values of options
_SINK = [argument.name for argument in decode_arguments(())].index("Sink")

plan_cache = PlanCache()


def _query_rows(seqlen_q: int, heads: int, heads_kv: int) -> int:
    """Query rows per key head: the queries of all heads that share it."""
    return seqlen_q * (heads // heads_kv)


def _split_rule(num_splits: int, config: DecodeConfig, capacity: int) -> int:
    """Split rule of kernels/decode/work.py: 0: all keys are divided evenly among CTAs; n > 0: splits of n key blocks; -n: n splits.

    Args:
        num_splits: as in Options.
        capacity: maximum number of keys per sequence.
    """
    if num_splits != BATCH_INVARIANT:
        return -min(num_splits, MAX_SPLITS)
    if config.batch_invariant:
        return -1
    return max(INVARIANT_KEYS // config.block_N, -(-capacity // (config.block_N * MAX_SPLITS)))


def _launch_sizes(
    config: DecodeConfig, batch: int, rows: int, heads_kv: int, split_rule: int, capacity: int, sms: int
) -> tuple[int, int, int, int]:
    """(m_blocks, ctas, slots, entries): query blocks per key head, CTAs, partials that O_parts has room for, entries of Merges."""
    m_blocks = -(-rows // config.block_M)
    items, ctas = batch * heads_kv * m_blocks, sms * config.ctas_per_sm
    if split_rule == 0:
        return m_blocks, ctas, ctas + items, min(items, ctas)
    splits = -split_rule if split_rule < 0 else -(-capacity // (config.block_N * split_rule))
    return m_blocks, ctas, items * splits if splits > 1 else 1, items  # one split is the whole result


def decode_workspace_bytes(
    batch: int,
    seqlen_q: int,
    heads: int,
    heads_kv: int,
    head_dim_v: int,
    num_splits: int,
    seqlen_cache: int,
    sms: int,
) -> int:
    """Bytes that a decode allocates at most beside its outputs, on a GPU with `sms` SMs, with pages of any size or without.

    It holds the partial outputs of splits and their log-sum-exps, fp32, and the list of those to merge.

    Args:
        num_splits: as in Options.
        seqlen_cache: maximum number of keys per sequence.
    """
    rows = _query_rows(seqlen_q, heads, heads_kv)
    most = 0
    # Each config of a width that holds head_dim_v: head_dim and the pages are unknown here
    for width in DECODE_TILE_WIDTHS:
        problem = AttnProblem(DEFAULT_DTYPE, *width, False)
        for line in configs.lines_of_rows(problem.width, rows):
            config = line.config
            if width[1] < head_dim_v or (config.v_in_k and width[1] != head_dim_v):
                continue
            if num_splits == BATCH_INVARIANT and not config.v_in_k:
                # for _split_rule() alone: the launch has other key blocks
                config = replace(config, batch_invariant=True)
            rule = _split_rule(num_splits, config, seqlen_cache)
            *_, slots, entries = _launch_sizes(config, batch, rows, heads_kv, rule, seqlen_cache, sms)
            partial_numbers = config.warpgroups * min(rows, TILE_ROWS) * (config.columns(problem) + 1)
            most = max(most, 4 * (slots * partial_numbers + entries * MERGE_NUMBERS))
    return most


class DecodePlan:
    """Launch plan of a decode: everything that follows from tensor metadata and from which options are on. Serves one thread."""

    def __init__(self, q: torch.Tensor, cache: Cache, options: Options):
        k, v = cache.k, cache.v
        self.device = q.device.index
        batch, seqlen_q, heads, head_dim = q.shape
        heads_kv, self.head_dim_v = k.shape[2], v.shape[3]
        paged = cache.block_table is not None
        problem = decode_problem(DTYPE_NAMES[q.dtype], head_dim, self.head_dim_v, options.names)
        rows = _query_rows(seqlen_q, heads, heads_kv)
        page_size = k.shape[1]
        rows_per_copy = page_rows(page_size) if paged else 0
        sms = sm_count(self.device)
        # Calls with batch_invariant have one config, whatever the batch
        items = math.inf if options.batch_invariant else configs.items_per_sm(batch, heads_kv, sms)
        config = configs.decode_config(problem, rows, rows_per_copy, items)
        if options.batch_invariant and not config.v_in_k:
            shared = tuple(name for name in options.names if name in OPTIONS)
            forward = AttnProblem.of(problem.dtype, head_dim, self.head_dim_v, False, options=shared)
            config = configs.invariant_decode_config(problem, config, forward)
        compiled = compile_config(problem, config)

        capacity = page_size
        if paged:
            capacity *= cache.block_table.shape[1]
        rule = _split_rule(options.num_splits, config, capacity)
        m_blocks, ctas, slots, entries = _launch_sizes(config, batch, rows, heads_kv, rule, capacity, sms)
        most_partials = capacity // (MIN_BLOCKS_PER_CTA * config.block_N)
        partials = min(slots // (batch * heads_kv * m_blocks), most_partials)
        self.kernel, combine = compiled[problem, config], compiled[config.combine(problem, partials)]
        partial_shape = slots, config.warpgroups, min(rows, TILE_ROWS)
        self.o_partials = dense((*partial_shape, config.columns(problem)))
        self.lse_partials = dense(partial_shape)
        self.merges = dense((entries, MERGE_NUMBERS), torch.int32)
        self.combine = None if rule == -1 else combine  # one split needs no merging

        stride_k, rows_k = page_rows_of(k, "k_cache")
        stride_v, rows_v = page_rows_of(v, "v_cache")
        self.views = ArgumentViews(False, rows_k, rows_v, packed=True)
        self.pad_q = (0, problem.head_dim - head_dim) if head_dim != problem.head_dim else None
        self.q_strides = dense(q.shape)[1]
        self.out = dense((batch, seqlen_q, heads, problem.head_dim_v), q.dtype)
        self.lse = dense((batch, heads, seqlen_q))
        given = (  # HAS_SEQLENS, HAS_LEFTPAD and HAS_CACHE_INDEX of kernels/decode/work.py
            isinstance(cache.seqlens, torch.Tensor)
            | (cache.leftpad is not None) << 1
            | (cache.batch_idx is not None) << 2
        )
        self.counts = heads // heads_kv, m_blocks, given
        self.sizes = capacity, page_size, k.shape[0], stride_k, stride_v, rule, ctas
        names = problem.options
        self.option_values = OptionValues(names, batch, self.device, decode_arguments(names))
        self.unused_lengths, self.unused_table = _unused_indices(self.device)

    def __call__(
        self,
        q: torch.Tensor,
        cache: Cache,
        softmax_scale: float,
        options: Options,
        workspace: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) for tensors with the metadata of the plan; see attend_cache."""
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(q, cache, softmax_scale, options, workspace)
        if self.pad_q is not None:
            q = torch.nn.functional.pad(q, self.pad_q)
        elif q.stride() != self.q_strides or q.data_ptr() & 15 or q.is_neg():
            q = q.clone(memory_format=torch.contiguous_format)
        out, lse = empty(*self.out), empty(*self.lse)
        if workspace is None:
            o_partials, lse_partials, merges = (
                empty(*self.o_partials),
                empty(*self.lse_partials),
                empty(*self.merges),
            )
        else:
            o_partials, lse_partials, merges = self._divide(workspace)
        no_lengths, no_table = self.unused_lengths, self.unused_table
        seqlens, seqlen = no_lengths, cache.seqlens
        if isinstance(seqlen, torch.Tensor):
            seqlens, seqlen = seqlen, 0
        values = self.option_values(options)
        self.kernel(
            q,
            *self.views.of(cache.k, cache.v),
            out,
            lse,
            seqlens,
            no_lengths if cache.leftpad is None else cache.leftpad,
            no_lengths if cache.batch_idx is None else cache.batch_idx,
            no_table if cache.block_table is None else cache.block_table,
            o_partials,
            lse_partials,
            merges,
            softmax_scale,
            LN2,
            *self.counts,
            seqlen,
            cache.new,
            *self.sizes,
            *values,
        )
        if self.combine is not None:
            self.combine(o_partials, lse_partials, merges, out, lse, LN2, self.counts[0], values[_SINK])
        return out if self.head_dim_v == out.shape[3] else out[..., : self.head_dim_v].contiguous(), lse

    def _divide(self, workspace: torch.Tensor) -> list[torch.Tensor]:
        """o_partials, lse_partials and merges as views of a uint8 workspace. Their elements have 4 bytes each."""
        tensors = self.o_partials, self.lse_partials, self.merges
        sizes = [4 * math.prod(shape) for shape, *_ in tensors]
        pieces = workspace[: sum(sizes)].split(sizes)
        return [x.view(dtype).view(shape) for x, (shape, _, dtype) in zip(pieces, tensors, strict=True)]


def attend_cache(
    q: torch.Tensor,
    cache: Cache,
    softmax_scale: float,
    options: Options,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [batch, seqlen_q, heads, head_dim] to the keys of a cache.

    Args:
        options: window, softcap, num_splits, alibi_slopes, sink and tree_mask only. A causal mask is a window whose right bound is 0.
            num_splits are those of a sequence; 0: all keys are divided evenly among the CTAs; BATCH_INVARIANT: one, computed as a forward
            does, or with v_in_k splits of a fixed number of keys.
        workspace: uint8 [decode_workspace_bytes()]; None: the call allocates it.
    Returns:
        out [batch, seqlen_q, heads, head_dim_v], lse [batch, heads, seqlen_q] fp32, natural.
    """
    without_pages = cache.block_table is not None and not cache.block_table.numel()
    if not q.numel() or not cache.k.numel() or not cache.v.numel() or without_pages:
        return _attend_nothing(q, cache.v.shape[3], options)
    plan = decode_plan(q, cache, options)
    if plan is None:
        plan = DecodePlan(q, cache, options)
        plan_cache.keep(_plan_key(q, cache, options), plan)
    return plan(q, cache, softmax_scale, options, workspace)


def decode_plan(q: torch.Tensor, cache: Cache, options: Options) -> DecodePlan | None:
    """Cached plan for tensors with this metadata, or None."""
    return plan_cache.plans.get(_plan_key(q, cache, options))


def _plan_key(q: torch.Tensor, cache: Cache, options: Options) -> tuple:
    k, v, table = cache.k, cache.v, cache.block_table
    return (
        q.shape, q.dtype, q.device, k.shape, k.stride(), v.shape, v.stride(), options.names, options.num_splits,
        None if table is None else table.shape[1],
        isinstance(cache.seqlens, torch.Tensor), cache.leftpad is None, cache.batch_idx is None,
    )  # fmt: skip


def _attend_nothing(q: torch.Tensor, head_dim_v: int, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Result without queries or keys: out 0, lse -inf or the sink."""
    batch, seqlen_q, heads, _ = q.shape
    lse = torch.full((batch, heads, seqlen_q), -math.inf, device=q.device)
    if options.sink is not None:
        lse.copy_(lse_without_keys(options.sink, LN2)[:, None].expand_as(lse))
    return q.new_zeros(batch, seqlen_q, heads, head_dim_v), lse


def append_to_cache(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: Cache,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    queries_move: bool,
) -> torch.Tensor:
    """Write k_new (rotated) and v_new, [batch, new, heads_kv, ...], to the cache after its seqlens; return q, rotated if there is a cos.

    Args:
        cos, sin: [positions, rotary_dim / 2] in the dtype of q, contiguous; None: no rotation.
        interleaved: rotate column pairs (2i, 2i + 1), else (i, i + rotary_dim / 2).
        queries_move: query i is rotated by position seqlens + i, else all queries by position seqlens.
    """
    device = q.device.index
    if torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            return append_to_cache(q, k_new, v_new, cache, cos, sin, interleaved, queries_move)
    dtype = DTYPE_NAMES[q.dtype]
    kernel = _append_kernel(dtype)
    if not k_new.shape[1] or not q.shape[0]:
        return q
    q, k_new, v_new = as_stored(q), as_stored(k_new), as_stored(v_new)
    rotated = empty(*dense(q.shape, q.dtype))
    no_lengths, no_table = _unused_indices(device)
    angles = (unused_tensor(device, dtype, 1, 1),) * 2 if cos is None else (as_stored(cos), as_stored(sin))
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
        queries_move,
        tensor | (cache.batch_idx is not None) << 2 | paged << 3,
        0 if tensor else cache.seqlens,
        k_new.shape[1],
        cache.k.shape[1],
        cache.k.shape[0],
    )
    return q if cos is None else rotated


@functools.cache
def _unused_indices(device: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(lengths, block table): placeholders for a cache without them."""
    return unused_tensor(device, "int32", 1), unused_tensor(device, "int32", 1, 1)


@functools.cache
def _append_kernel(dtype: str) -> Kernel:
    return compile_needed([append_kernel(dtype)])[0]
