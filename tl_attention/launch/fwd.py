"""Launch of the forward: plans by tensor metadata, and calls of the kernels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tl_attention.compilation.store import Kernel
from tl_attention.config.buckets import window_bucket
from tl_attention.config.costs import Costs
from tl_attention.config.kernel_configs import (
    FirstTermsConfig,
    FwdCombine,
    FwdConfig,
    TermsConfig,
    TileTable,
    page_rows,
)
from tl_attention.launch import splits
from tl_attention.launch.arrays import ArgumentViews, PageViews, cut_columns, has_odd_columns, pad_columns
from tl_attention.launch.bwd_kernels import build_backward_ahead
from tl_attention.launch.common import (
    LN2,
    MAX_GRID,
    OptionValues,
    PackedTiles,
    PlanCache,
    compile_config,
    dense,
    device_costs,
    dtype_name,
    empty,
    find_config,
    fragment_blocks,
    has_no_sequences,
    lse_without_keys,
    qkv_key,
    tile_counts,
)
from tl_attention.launch.terms import AttentionTiles, halves, terms_launch
from tl_attention.launch.tickets import TICKETS, stream_tickets
from tl_attention.launch.traced import forward_program, traced_arguments
from tl_attention.problem.attn_problem import (
    INVARIANT_BUCKET,
    MAX_SPLITS,
    SPLIT_BUCKET,
    TABLE_ROWS,
    AttnProblem,
    length_bucket,
)
from tl_attention.problem.options import BATCH_INVARIANT, Options, as_stored, writing
from tl_attention.problem.program import Call
from tl_attention.problem.target import sm_count

_kernels: dict[tuple, FwdKernels] = {}
plan_cache = PlanCache()


class FwdKernels(NamedTuple):
    """The compiled kernels of a forward."""

    kernel: Kernel
    config: FwdConfig
    max_ctas: int  # most CTAs of a launch without splits
    combine: Kernel | None  # merges the partial outputs of splits
    problem: AttnProblem
    tile_table: Kernel | None  # runs first for packed sequences
    terms: Kernel | None  # runs first in fp32: splits k and v, or the first heads of them


def _find_kernels(
    key: tuple, config: FwdConfig | None, copy_rows: int = 0, max_logits: bool = False
) -> FwdKernels:
    """Compiled kernels of a key of find_config(). copy_rows: keys per copy from a page, one of PAGE_ROWS; 0: no pages."""
    problem, config = find_config(key, "fwd", config)
    config = config.paged(problem, copy_rows)
    if max_logits:
        config = config.storing_max
    if problem.has("added"):
        config = config.merging
    max_ctas = MAX_GRID if config.schedule == "grid" else sm_count(key[-1])
    compiled = {type(one): kernel for (_, one), kernel in compile_config(problem, config).items()}
    combine, tile_table = compiled.get(FwdCombine), compiled.get(TileTable)
    terms = compiled.get(FirstTermsConfig if config.makes_terms else TermsConfig)
    return FwdKernels(compiled[FwdConfig], config, max_ctas, combine, problem, tile_table, terms)


def key_rows(k: torch.Tensor, options: Options, block_table: torch.Tensor | None) -> int:
    """Upper bound of the keys of all packed sequences together; used by the schedule only."""
    if block_table is None:
        return k.shape[0]
    num_pages, page_size = k.shape[:2]
    batch, longest = block_table.shape[0], min(block_table.shape[1] * page_size, options.max_seqlen_k)
    return max(min(num_pages * page_size, batch * longest), 1)


class FwdSizes(NamedTuple):
    """Sizes of a forward. Packed sequences are one batch entry with all their rows, keys in pages with the bound of key_rows()."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int

    @property
    def rows(self) -> tuple[int, int, int]:
        """Shape of the log-sum-exp."""
        return self.batch, self.heads, self.seqlen_q


def _splits_and_bucket(
    sizes: FwdSizes,
    options: Options | None,
    costs: Costs,
    added: bool,
    shares: splits.Sharing | None = None,
    max_logits: bool = False,
) -> tuple[int, str]:
    """(num_splits, bucket of the config) of a forward; num_splits 0: not asked for, key_splits decides.

    Args:
        added: out and lse hold the result of other keys; such a forward has no splits.
        shares: tiles that CTAs may share.
        max_logits: the largest scores are stored, so one CTA has all keys of a query.
    """
    packed = options is not None and options.varlen
    num_splits = 0 if options is None else options.num_splits
    if num_splits == BATCH_INVARIANT:
        return 1, INVARIANT_BUCKET
    if packed:
        num_splits = splits.packed_splits(options, sizes.seqlen_q, sizes.seqlen_k, sizes.heads, costs)
    if added or max_logits or num_splits == 1:
        bucket = length_bucket(options.max_seqlen_k if packed else sizes.seqlen_k)
    elif num_splits:
        bucket = SPLIT_BUCKET
    else:
        bucket = splits.fwd_bucket(sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_k, costs, shares)
    if options is not None and not (added or packed):
        bucket = window_bucket(bucket, options.names, options.window_keys)
    return num_splits, bucket


class FwdPlan:
    """Launch plan of a forward: everything that follows from tensor metadata and from which options are on. Serves one thread.

    Args:
        q, k, v, out: [batch, heads, seqlen, head_dim] if heads_first, else [batch, seqlen, heads, head_dim]; packed sequences
            [total, heads, head_dim]. On the current device, none of them empty.
        options, traced: those of the first call; later calls may have other values.
        block_table: [batch, pages per sequence]; k and v are then [pages, page_size, heads_kv, head_dim].
        added: out and lse hold the result of other keys; see `lse` of forward().
        max_logits: the largest score of each query is stored, too.
        config: used instead of the tuned row or default.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        causal: bool,
        heads_first: bool,
        options: Options | None = None,
        block_table: torch.Tensor | None = None,
        traced: Call | None = None,
        added: bool = False,
        max_logits: bool = False,
        config: FwdConfig | None = None,
    ):
        self.packed = options is not None and options.varlen
        self.device, self.added, self.max_logits = q.device.index, added, max_logits
        self.out = dense(out.shape, q.dtype)
        self.pages = None
        if block_table is not None:
            seqlen_k = key_rows(k, options, block_table)
            self.pages = PageViews(k, v)
            k, v = self.pages.rows
        elif self.packed:
            k, v = k[None], v[None]
        if self.packed:
            q, out = q[None], out[None]
        seq, head = (2, 1) if heads_first else (1, 2)
        if self.pages is None:
            seqlen_k = k.shape[seq]
        sizes = FwdSizes(
            q.shape[0], q.shape[head], k.shape[head], q.shape[seq], seqlen_k, q.shape[3], v.shape[3]
        )
        self.lse = dense(sizes.rows[1:] if self.packed else sizes.rows)
        self.batch = options.cu_seqlens_q.shape[0] - 1 if self.packed else sizes.batch
        self.heads = sizes.heads

        self.costs = device_costs(self.device)
        self.sms = self.costs.sms
        names = () if options is None else options.names
        if added:
            names = *names, "added"
        self.option_values = OptionValues(names, self.batch, self.device) if names else None
        problem = dtype_name(q.dtype, options), sizes.head_dim, sizes.head_dim_v, causal, names
        found, num_splits = self._choose_kernels(problem, sizes, options, traced, config)
        if self.packed:
            self.step_rows = found.config.block_N
            where = sizes.seqlen_q, sizes.seqlen_k, causal, q.get_device()
            self.tiles = PackedTiles(found.tile_table, self.batch, *where)
        self._count_tiles(sizes, options, found, num_splits)
        if self.packed:
            self._clear_rows_behind(out)
        self._make_views(q, k, v, out, heads_first, found)

    def _choose_kernels(
        self,
        problem: tuple[str, int, int, bool, tuple[str, ...]],
        sizes: FwdSizes,
        options: Options | None,
        traced: Call | None,
        config: FwdConfig | None,
    ) -> tuple[FwdKernels, int]:
        """Choose the kernels of the plan, and compile those that are new.

        Args:
            problem: dtype, head dims, causal and names of options, as in AttnProblem.
        Returns:
            The kernels, and how many CTAs share the keys of a tile; 0: not asked for, key_splits decides.
        """
        names, shares = problem[-1], None
        if not names and traced is None and not self.max_logits:
            shares = splits.sharing(AttnProblem.of(*problem[:-1]), torch.cuda.get_device_name(self.device))
        num_splits, bucket = _splits_and_bucket(
            sizes, options, self.costs, self.added, shares, self.max_logits
        )
        program = None if traced is None else forward_program(traced.program)
        key = *problem, program, bucket, self.device
        copy_rows = 0 if self.pages is None else page_rows(self.pages.page_size)
        form = copy_rows, self.max_logits
        found = _kernels.get((key, *form)) if config is None else _find_kernels(key, config, *form)
        if found is None:
            found = _kernels[(key, *form)] = _find_kernels(key, None, *form)
        self.kernel, self.combine, config = found.kernel, found.combine, found.config
        self.block, self.is_stream_k = (config.block_M, config.block_N), config.schedule == "stream-K"
        self.hold_max = config.hold_max
        self.tickets = (
            self.device,
            config.schedule in ("dynamic", "stream-K"),
            TICKETS + self.sms * self.is_stream_k,
        )
        return found, num_splits

    def _clear_rows_behind(self, out: torch.Tensor) -> None:
        """Let the kernel of the tile table clear the rows behind the last sequence: of out [1, total_q, ..], or of the partials."""
        rows = 1, out.shape[1], math.prod(out.shape[2:]) * out.element_size()
        if self.combine:
            (*groups, total_q, columns), *_ = self.partials[0]
            rows = math.prod(groups), total_q, 4 * columns
        self.tiles.clear_behind([rows], 0 if self.added else self.sms)

    def _make_views(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        heads_first: bool,
        found: FwdKernels,
    ) -> None:
        """Prepare views of the tensors as the kernel takes them, and the terms of fp32 inputs.

        Packed sequences are [1, total, heads, head_dim].
        """
        self.terms = None
        if self.added:
            self.heads_first = heads_first
            self.views = ArgumentViews(heads_first, q, k, v, packed=self.packed)
        elif found.terms is None:
            tensors = (q, k, v, out) if self.pages is None else (q, out)
            self.views = ArgumentViews(heads_first, *tensors, packed=self.packed)
        else:  # out is fp32 and leaves from registers, so without the view of packed sequences
            _, m_blocks, group_heads, ctas = self.arguments
            tiles = m_blocks * self.batch * self.heads, m_blocks * group_heads, ctas, self.costs
            attention = AttentionTiles(*tiles) if found.config.makes_terms else None
            self.terms = terms_launch(found.terms, found.problem, heads_first, attention, k, v)
            self.views = ArgumentViews(heads_first, halves(q), packed=self.packed)
            self.term_views = ArgumentViews(False, *self.terms.empty(), packed=self.packed)
            self.out_view = ArgumentViews(heads_first, out)

    def _count_tiles(
        self, sizes: FwdSizes, options: Options | None, found: FwdKernels, num_splits: int
    ) -> None:
        """Set the sizes among the arguments of a launch, and the shapes of the partials of splits.

        Args:
            num_splits: CTAs that share the keys of a tile; 0: chosen by key_splits, where there are splits.
        """
        batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v = sizes
        config, problem, costs = found.config, found.problem, self.costs
        least_keys = costs.groups.least_keys
        rows, keys = seqlen_q, max(seqlen_k, least_keys)
        if self.packed:
            rows = self.tiles.counts[0] * TABLE_ROWS  # padded: each sequence starts a new tile
        elif options is not None:
            keys = min(keys, options.window_keys + config.block_M)
        kv_bytes = problem.element_bytes * keys * (head_dim + head_dim_v)  # read by the tiles of one head
        sizes_of_heads = batch, heads, heads // heads_kv, kv_bytes, rows, config.block_M
        fills_sms = not self.combine and seqlen_k >= least_keys
        m_blocks, group_heads, ctas = tile_counts(*sizes_of_heads, costs, found.max_ctas, fills_sms)
        if self.combine:
            num_splits = min(num_splits, MAX_SPLITS)
            if not num_splits:
                num_splits = splits.key_splits(ctas, -(-seqlen_k // config.block_N), costs)
            ctas *= num_splits
            shape = num_splits, *sizes.rows
            # O and Lse of the splits, fp32
            self.partials = dense((*shape, problem.head_dim_v)), dense(shape)
        self.arguments = heads // heads_kv, m_blocks, group_heads, ctas
        if self.is_stream_k:
            shares = splits.Sharing(*self.block, problem.causal)
            ctas, self.share_arguments = splits.share_arguments(
                shares, heads * batch, seqlen_q, seqlen_k, costs, num_splits
            )
            sharers = self.share_arguments[1]
            self.pieces = fragment_blocks(max(sharers, 1) * config.block_M // 16, problem.head_dim_v + 8)
            self.arguments = *self.arguments[:-1], ctas

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float,
        lse_base2: bool,
        options: Options | None = None,
        block_table: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        traced: Call | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """(out, lse) for tensors with the metadata of the plan; out is the tensor passed, or a new one in the layout of q.

        With max_logits (out, lse, max_logits).
        """
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(q, k, v, softmax_scale, lse_base2, options, block_table, out, traced, lse)
        out, lse = empty(*self.out) if out is None else out, empty(*self.lse) if lse is None else lse
        results = out, lse
        # A kernel with a tensor argument (lse, terms, tickets) runs on the current stream of its device
        term_arguments = ()  # of a kernel that makes terms
        is_negated = q.is_neg() or k.is_neg() or v.is_neg()  # a view whose memory has the other sign
        views_of = self.views.replaced if is_negated else self.views.of
        if self.pages is not None:
            q_view, out_view = views_of(q, out)
            views = q_view, *self.pages.views.of(k, v), out_view
        else:
            if self.packed and (self.added or self.terms is not None):
                q, k, v, out = (x[None] for x in (q, k, v, out))
            if self.added:
                views = *views_of(q, k, v), out.transpose(1, 2) if self.heads_first else out
            elif self.terms is None:
                views = views_of(q, k, v, out)
            else:
                q, (terms, term_arguments) = halves(q), self.terms(k, v)  # alive until the launch
                views = *self.views.of(q), *self.term_views.of(*terms), *self.out_view.of(out)
        written = results if self.combine is None else [empty(*x) for x in self.partials]  # by the kernel
        tickets = stream_tickets(*self.tickets)
        unit = 1.0 if lse_base2 else LN2
        arguments = self.arguments
        if self.option_values is not None:
            arguments += self.option_values(options)
            if self.packed:
                arguments = *arguments[:-1], self.tiles.table(options, self.step_rows, *written)
        if self.pages is not None:
            arguments += (block_table, *self.pages.arguments)
        if traced is not None:
            arguments += traced_arguments(traced)
            if traced.blocks is not None:
                arguments += traced.blocks.by_queries(*self.block, held=self.hold_max)
        if self.is_stream_k:
            arguments = *arguments, empty(*self.pieces), *self.share_arguments
        arguments += term_arguments
        if self.max_logits:
            largest = empty(*self.lse)
            if self.packed:  # no tile writes the rows behind the last sequence
                largest.fill_(-math.inf)
            arguments, results = (*arguments, largest), (*results, largest)
        if self.combine is None:
            self.kernel(*views, lse, tickets, softmax_scale, unit, *arguments)
            return results
        *qkv, out_view = views
        self.kernel(*qkv, *written, tickets, softmax_scale, 1.0, *arguments)
        merged = out_view, lse
        if self.packed:
            merged = out if out.ndim == 4 else out[None], lse[None]
        self.combine(*written, *merged, unit)
        return results


def fwd_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    heads_first: bool,
    options: Options | None = None,
    block_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    traced: Call | None = None,
    lse: torch.Tensor | None = None,
    max_logits: bool = False,
    deterministic: bool = False,
    config: FwdConfig | None = None,
) -> FwdPlan | None:
    """Plan for a launch on tensors with this metadata, found or made; None for a call that launches on copies, or not at all.

    The arguments are those of forward(). The plan of an explicit config is not kept.
    """
    if block_table is not None and not block_table.numel():  # whatever the plan of a call with another table
        return None
    key = qkv_key(q, k, v, causal, heads_first)
    if options is not None:
        key += options.key
        if options.varlen:
            sizes = q.shape[0], key_rows(k, options, block_table), q.shape[1]
            key = (*key, splits.packed_splits(options, *sizes, device_costs(q.device.index)))
    if traced is not None:
        key = (*key, forward_program(traced.program))
    if out is not None:
        key = (*key, out.stride())
    if lse is not None:
        key = (*key, lse.stride(), "added")
    if max_logits:
        key = (*key, "max_logits")
    plan = plan_cache.plans.get(key) if config is None else None
    if plan is not None:
        return plan
    if has_odd_columns(q, v) or not q.numel() or not k.numel() or has_no_sequences(options):
        return None
    if torch.cuda.current_device() != q.device.index:
        others = options, block_table, out, traced, lse, max_logits, deterministic, config
        with torch.cuda.device(q.device):
            return fwd_plan(q, k, v, causal, heads_first, *others)
    if q.requires_grad or k.requires_grad or v.requires_grad:
        build_backward_ahead(q, k, v, causal, heads_first, deterministic, options, traced)
    if out is None:
        out = empty(*dense((*q.shape[:-1], v.shape[-1]), q.dtype))
    added = lse is not None
    plan = FwdPlan(q, k, v, out, causal, heads_first, options, block_table, traced, added, max_logits, config)
    if config is None:
        plan_cache.keep(key, plan)
    return plan


def kept_call(key: tuple) -> Any:
    """Facts that keep_call() has kept under this key in this thread, or None."""
    return plan_cache.calls.get(key)


def keep_call(key: tuple, call: Any) -> None:
    """Keep facts of calls with this key, such as a plan. They may hold no tensor."""
    plan_cache.keep_call(key, call)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    heads_first: bool = False,
    *,
    options: Options | None = None,
    block_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    traced: Call | None = None,
    lse: torch.Tensor | None = None,
    max_logits: bool = False,
    deterministic: bool = False,
    config: FwdConfig | None = None,
) -> tuple[torch.Tensor, ...]:
    """Launch the forward on tensors that have passed checks/, on a Hopper GPU.

    Args:
        q, k, v: [batch, heads, seqlen, head_dim] if heads_first, else [batch, seqlen, heads, head_dim]; packed sequences
            [total, heads, head_dim]. They are copied if a head dim is no multiple of 8.
        block_table: int32 [batch, pages per sequence], for packed sequences with seqused_k: k and v are then [pages, page_size,
            heads_kv, head_dim], never copied, and page i of a sequence holds its keys from i * page_size on.
        out: tensor to write to, in the layout of q, with strides and an address that TMA takes, contiguous for packed sequences.
            None: a new contiguous one.
        traced: score_mod and mask_mod; not with causal or options.
        lse: log-sum-exp over other keys, base 2, whose output is in `out`, fp32. Both are overwritten by the result over all keys. Only
            their last stride must be 1. Rows of out whose lse is -inf may hold anything. Not with a sink, pages, traced or fp32 tensors.
        max_logits: return the largest score of each query, too. Keys are not split. Not with lse.
        deterministic: whether a later backward is. If q, k or v requires a gradient, its kernels start to be built.
        config: used instead of the tuned row or default.
    Returns:
        out in the layout of q; lse [batch, heads, seqlen_q] or [heads, total_q] fp32. Rows of packed sequences between seqused and the
        next sequence are undefined. With max_logits also these, in the shape of lse, natural, -inf for rows without keys and those of no
        sequence.
    """
    if q.dtype is torch.float32:  # kernels read views of another dtype, which lose the sign of a negated view
        q, k, v = as_stored(q), as_stored(k), as_stored(v)
    plan = fwd_plan(
        q, k, v, causal, heads_first, options, block_table, out, traced, lse, max_logits, deterministic, config,
    )  # fmt: skip
    if plan is not None:
        return plan(q, k, v, softmax_scale, lse_base2, options, block_table, out, traced, lse)
    if has_odd_columns(q, v):
        asked = softmax_scale, causal, lse_base2, heads_first
        others = {"options": options, "traced": traced, "max_logits": max_logits}
        others |= {"deterministic": deterministic, "config": config}
        if lse is not None:  # the kernel stores as many columns as out has
            return forward(*pad_columns(q, k, v), *asked, out=out, lse=lse, **others)
        padded, *numbers = forward(*pad_columns(q, k, v), *asked, **others)
        result = cut_columns(padded, v.shape[-1])
        if out is None:
            return result, *numbers
        with writing(out):
            return out.copy_(result), *numbers
    return _forward_of_empty(q, v, lse_base2, heads_first, options, out, lse, max_logits)


def _forward_of_empty(
    q: torch.Tensor,
    v: torch.Tensor,
    lse_base2: bool,
    heads_first: bool,
    options: Options | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    max_logits: bool,
) -> tuple[torch.Tensor, ...]:
    """Results without queries, keys or sequences, as forward() returns them: out is 0, and lse is -inf or the sink."""
    if lse is None:
        *outer, n1, n2, _ = q.shape
        rows = (n1, n2) if heads_first else (n2, n1)
        lse = q.new_full((*outer, *rows), -math.inf, dtype=torch.float32)
        out = q.new_empty((*q.shape[:-1], v.shape[-1])) if out is None else out
        with writing(out):
            out.zero_()
        if options is not None and options.sink is not None and not has_no_sequences(options):
            lse.copy_(lse_without_keys(options.sink, 1.0 if lse_base2 else LN2)[:, None].expand_as(lse))
            if options.varlen:
                behind = torch.arange(lse.shape[-1], device=lse.device) >= options.cu_seqlens_q[-1]
                lse.masked_fill_(behind, -math.inf)
    return (out, lse, torch.full_like(lse, -math.inf)) if max_logits else (out, lse)
