"""Launch of the passes of a backward: query passes (dq) and key passes (dk, dv), their sizes and workspace."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from tl_attention.compilation.store import Kernel
from tl_attention.config.costs import Costs
from tl_attention.config.kernel_configs import BwdConfig, BwdPass
from tl_attention.config.term_configs import stores_key_terms
from tl_attention.launch.block_lists import BlockLists
from tl_attention.launch.bwd_kernels import BwdKernels, goes_by_sequence
from tl_attention.launch.common import (
    MAX_GRID,
    TABLE_NUMBERS,
    Argument,
    empty,
    fragment_blocks,
    head_group,
    table_counts,
    tile_counts,
)
from tl_attention.launch.rounding import ring_tiles, slots_of
from tl_attention.launch.seen import unseen_queries
from tl_attention.launch.terms import AttentionTiles
from tl_attention.launch.tickets import stream_tickets
from tl_attention.problem.attn_problem import TABLE_ROWS, AttnProblem
from tl_attention.problem.options import UNLIMITED, Options, canonical_window, rounded_length

MAX_BATCH = 2**16 - 1  # per launch: the small kernels have the batch in the last dimension of their grids
QUERY_ROWS = TABLE_ROWS  # lse, delta and the sums of dq are padded to a multiple of it


@functools.lru_cache(maxsize=4096)
def key_sharers(
    tiles: int,
    heads_per_kv: int,
    queries: int,
    on_diagonal: float,
    costs: Costs,
    sum_queries: float = 0,
    head_bytes: int = 0,
) -> tuple[int, int]:
    """(sharers, heads_per_sharer): CTAs that share the query heads of a key head, and query heads of each.

    The fewest sharers that take nearly the shortest time, see Costs.fewest(). The work is exact but for the rounding of key blocks. The
    time is an estimate: the longest tiles run first, in waves of one per SM; behind them shorter ones fill the SMs.

    Args:
        tiles: key blocks of all key heads.
        queries: largest number of queries of one head that see keys of a tile.
        on_diagonal: share of the tiles that are seen by none to all of these queries, half of them on average, as under a causal mask; the
            others are seen by all. 0 without a mask, 1 under a causal mask with as many keys as queries: see causal_tiles().
        sum_queries: cost of the launches that several sharers need, in queries of one head.
        head_bytes: query rows of one head that CTAs read at once, see bytes_at_once().
    """

    sms, backward = costs.sms, costs.backward

    def waves(count: int) -> float:
        """Lower bound of the time of `count` tiles, in units of the longest.

        Full tiles take n rounds. Of the n * sms + 1 longest tiles some SM computes n + 1, each at least as long as the shortest of these;
        tiles on the diagonal have lengths that fall evenly from 1 to 0.
        """
        full = count * (1 - on_diagonal)
        n = -(-full // sms)
        return max(n, (n + 1) * (count - n * sms) / (count - full)) if count > n * sms else n

    def time(heads_per_sharer: int) -> float:
        sharers = -(-heads_per_kv // heads_per_sharer)
        longest = heads_per_sharer * queries + backward.tile
        drift = 1 + on_diagonal * backward.drift * (
            1 - backward.near_bytes / max(heads_per_sharer * head_bytes, backward.near_bytes)
        )
        mean = (
            tiles / sms * (drift * heads_per_kv * queries * (1 - on_diagonal / 2) + sharers * backward.tile)
        )
        rounds = max(waves(tiles * sharers) * longest, mean + on_diagonal * backward.tail * longest)
        return rounds + (sharers > 1) * (sum_queries + sharers * backward.partial * tiles / sms)

    heads_per_sharer = costs.fewest({number: time(number) for number in range(heads_per_kv, 0, -1)})
    return -(-heads_per_kv // heads_per_sharer), heads_per_sharer


def causal_tiles(queries: int, seqlen_q: int, seqlen_k: int) -> tuple[int, float]:
    """(queries, on_diagonal) of key_sharers() under a causal mask. Exact for equal lengths of sequences; others count by their means.

    With more keys than queries, the keys up to the first diagonal are seen by all queries. With fewer, the first queries see no key.

    Args:
        queries: of a head; with packed sequences the mean.
        seqlen_q, seqlen_k: with packed sequences the rows of all of them.
    """
    longest = min(queries, -(-queries * seqlen_k // max(seqlen_q, 1)))
    return longest, min(seqlen_q / max(seqlen_k, 1), 1)


def bytes_at_once(bwd_pass: BwdPass, queries: int, costs: Costs, row_bytes: int) -> int:
    """Bytes of query rows that the CTAs of all SMs read at once, per head of a CTA.

    At most half of near_bytes, so that sharers have two heads: with one the partials of dk and dv would take more memory than q and dout.

    A CTA begins at the diagonal of its keys, so the CTAs of a head are spread over as many queries as they have keys, or are of several key
    heads. Where a head has more, the next key tiles start behind, and CTAs may be anywhere in it. A pass that does not add to dq loses time
    in such heads alone (docs/notes/2026-11-22-shared-key-heads.md).
    """
    spread = costs.sms * bwd_pass.block_N
    if not bwd_pass.adds_dq:
        spread = queries if queries > spread else 0
    return min(row_bytes * spread, costs.backward.near_bytes // 2)


def pass_sharers(
    bwd_pass: BwdPass,
    tiles: int,
    heads_per_kv: int,
    queries: int,
    on_diagonal: float,
    costs: Costs,
    row_bytes: int = 0,
    shares_last: bool = True,
) -> tuple[int, int, int]:
    """(sharers, heads_per_sharer, whole) of a pass: key_sharers(); whole: with the schedule stream-K the tiles with one CTA each, else 0.

    With the schedule `stream-K`, at most most_sharers CTAs share a tile, by its queries in place of its heads: under a causal mask all
    tiles or none, else the last ones.

    Args:
        row_bytes: that a step reads and adds to per query, see row_bytes_of(); 0: CTAs are assumed to read the same rows.
        shares_last: tiles may be shared where there is at least one per SM. Not with a window or listed blocks: the launches that zero and
            add up the partials take longer than they save (docs/notes/2026-11-26-windows.md); nor in a causal pass with one_tile.
    """
    head_bytes = bytes_at_once(bwd_pass, queries, costs, row_bytes)
    if not bwd_pass.is_stream_k:
        return *key_sharers(tiles, heads_per_kv, queries, on_diagonal, costs, head_bytes=head_bytes), 0
    if not shares_last and tiles >= costs.sms:
        return 1, heads_per_kv, tiles
    if not on_diagonal:
        return shared_last_tiles(tiles, heads_per_kv, queries, costs)
    most = costs.backward.most_sharers
    share, share_bytes = (-(-heads_per_kv * n // most) for n in (queries, head_bytes))
    sharers, _ = key_sharers(tiles, most, share, on_diagonal, costs, costs.backward.launch, share_bytes)
    return sharers, heads_per_kv, 0 if sharers > 1 else tiles


def row_bytes_of(bwd_pass: BwdPass, problem: AttnProblem, width: int, element_bytes: int) -> int:
    """Bytes per query of a step: rows of Q and dO, width elements in all, and of the sums of dq."""
    return element_bytes * width + 4 * problem.head_dim * bwd_pass.adds_dq


@functools.lru_cache(maxsize=4096)
def shared_last_tiles(tiles: int, heads_per_kv: int, queries: int, costs: Costs) -> tuple[int, int, int]:
    """pass_sharers() of tiles with equally many queries. CTAs share those that are left when every SM has computed equally many.

    4096 tiles on 132 SMs are 31 per SM and four more, for which 128 SMs would wait a 32nd of the time. The fewest sharers that take nearly
    the shortest time, see Costs.fewest().
    """
    sms, backward = costs.sms, costs.backward
    whole = tiles // sms * sms
    per_tile = heads_per_kv * queries

    def time(sharers: int) -> float:
        rounds = -(-(tiles - whole) * sharers // sms)
        return rounds * (per_tile / sharers + backward.tile) + (sharers > 1) * (
            backward.launch + rounds * backward.partial
        )

    sharers = costs.fewest({sharers: time(sharers) for sharers in range(1, backward.most_sharers + 1)})
    return sharers, heads_per_kv, whole if sharers > 1 else tiles


@dataclass(frozen=True)
class BwdSizes:
    """Sizes of a backward that determine the launches of its passes."""

    batch: int  # 1 of packed sequences, whose lengths are those of all rows
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    width: int  # head_dim + head_dim_v
    element_bytes: int
    costs: Costs
    device: int
    queries: int  # largest number of one head that see keys of a tile; for packed sequences the mean
    tiles: tuple[int, int] | None = None  # (query tiles, key tiles) of packed sequences
    longest: int = 0  # queries of the longest of packed sequences
    longest_rows: int = 0  # of queries or keys of the longest, whatever a window hides
    # CTAs may share a key tile, and heads be in several groups. How many depends on the batch, and on them the order of sums
    may_share: bool = True

    @property
    def heads_per_kv(self) -> int:
        return self.heads // self.heads_kv

    def unseen_queries(self, config: BwdPass, causal: bool) -> int:
        """Queries of a head before the first step of a pass with one_tile; they see no key."""
        unseen = max(self.seqlen_q - self.seqlen_k, 0) if causal else 0
        return unseen // config.block_M * config.block_M

    @property
    def rounded_q(self) -> int:
        if self.tiles:
            return self.tiles[0] * TABLE_ROWS
        return -(-self.seqlen_q // QUERY_ROWS) * QUERY_ROWS

    def key_blocks(self, block_N: int) -> int:
        return self.tiles[1] * (TABLE_ROWS // block_N) if self.tiles else -(-self.seqlen_k // block_N)

    def long_tiles(self, block_N: int) -> int | None:
        """Key tiles per head of packed sequences that count in key_head_group(), fewer than all if lengths are unequal; else None.

        The root of the mean length over the longest is between no correction and one that counts only work. Backward of packed
        sequences, d128 causal, H200, 2026-11-23, µs in head groups of 1, 2, 4, 8, 16: mean 1024 of 3672 -, 817, 779, 832, 912; mean 2048
        of 8004 4868, 4973, 5268, -, 6280.
        """
        if self.tiles is None:
            return None
        if not self.longest:
            return self.key_blocks(block_N)
        return max(1, int(self.key_blocks(block_N) * math.sqrt(self.queries / self.longest)))


def key_head_group(
    bwd_pass: BwdPass,
    heads: int,
    heads_per_kv: int,
    q_bytes: int,
    blocks: int,
    long_tiles: int | None,
    costs: Costs,
) -> int:
    """head_group() of a pass by keys, in key heads.

    Args:
        heads: key heads of all batch entries, each times the sharers of its tiles.
        q_bytes: of the rows of one query head that a step reads and adds to.
        blocks: key tiles per head.
        long_tiles: see BwdSizes.long_tiles().
    """
    key_bytes, groups = q_bytes * heads_per_kv, costs.groups
    if bwd_pass.is_persistent and long_tiles is None and blocks <= groups.short_tiles:
        return head_group(heads, 1, key_bytes, blocks, groups.short_bytes, groups.short_fill * costs.sms)
    if bwd_pass.is_persistent and long_tiles is not None and key_bytes > groups.bytes:
        return head_group(heads, 1, key_bytes, long_tiles, groups.bytes, groups.packed_fill * costs.sms)
    # Bytes of one query head: the CTAs of a key head go through its query heads side by side
    return head_group(heads, 1, q_bytes, long_tiles or blocks, groups.bytes, groups.tiles * costs.sms)


def queries_of_tile(seqlen_q: int, sequences: int, options: Options | None) -> int:
    """BwdSizes.queries. sequences: packed ones, which have seqlen_q rows in all; else 1."""
    queries = -(-seqlen_q // sequences)
    return queries if options is None else min(queries, options.window_keys + TABLE_ROWS)


class KeyBuffers:
    """Sums and partials of a pass whose CTAs own keys.

    Attributes:
        workspace: arguments of empty() for the sums of dq, the partials of dk and those of dv; 0 rows for a result that has none.
    """

    def __init__(self, config: BwdPass, problem: AttnProblem, sizes: BwdSizes):
        n_blocks = sizes.key_blocks(config.block_N)
        tiles = sizes.batch * sizes.heads_kv * n_blocks
        self.keys = n_blocks * config.block_N
        self.row_blocks_q, self.row_blocks_k = sizes.rounded_q // 16, self.keys // 16
        self.row_bytes = row_bytes_of(config, problem, sizes.width, sizes.element_bytes)
        self.rounds, self.by_sequence = config.rounds(problem), goes_by_sequence(problem, [config])
        self.writes_dq = config.one_tile or (config.adds_dq and problem.is_fp32)  # no sums beside it
        self.adds_dq = config.adds_dq and not self.writes_dq
        self._share_queries(config, problem, sizes, tiles)
        self._count_tiles(config, problem, sizes)
        self._count_rows(config, problem, sizes, tiles)

    def _share_queries(self, config: BwdPass, problem: AttnProblem, sizes: BwdSizes, tiles: int) -> None:
        """Choose how many CTAs share the query heads of a key tile or its queries, and which key tiles one CTA has alone."""
        queries, on_diagonal = sizes.queries, 0
        if config.one_tile:
            queries = sizes.seqlen_q - sizes.unseen_queries(config, problem.causal)
        elif problem.causal:
            queries, on_diagonal = causal_tiles(sizes.queries, sizes.seqlen_q, sizes.seqlen_k)
        by_queries = sizes.heads_per_kv, queries, on_diagonal, sizes.costs, self.row_bytes
        # A causal pass shares all tiles or none, see tiles.StreamKGradTiles
        all_or_none = problem.causal and config.one_tile
        shares_last = not (problem.has("window") or problem.is_listed or all_or_none)
        key_tiles = tiles - self.by_sequence * sizes.heads_kv * (sizes.seqlen_q // TABLE_ROWS)
        if sizes.may_share:
            shares = pass_sharers(config, key_tiles, *by_queries, shares_last)
        else:
            shares = 1, sizes.heads_per_kv, tiles if config.is_stream_k else 0
        self.sharers, self.heads_per_sharer, self.whole = shares
        # Every tile leaves in fp32, at least as one partial
        if config.is_stream_k and problem.has("partial") and self.whole:
            self.sharers, self.whole = 1, 0
        assert not problem.causal or self.whole in (0, tiles), "see tiles.StreamKGradTiles"
        # A share of a stream-K pass without queries writes nothing. Each key tile has a step per head at least
        uneven = problem.causal or problem.has("window") or problem.is_listed
        steps = sizes.heads_per_kv * (1 if uneven else -(-sizes.queries // config.block_M))
        self.may_be_empty = config.is_stream_k and steps < self.sharers

    def _count_tiles(self, config: BwdPass, problem: AttnProblem, sizes: BwdSizes) -> None:
        """Set the numbers of tiles and slots of the launch.

        tiles: key tiles, each as often as it has sharers. counts: (n_blocks, group_heads, ctas). slots, where the pass rounds dq: units of
        kernels/backward/dq_sinks/round.py, or by sequence tiles of the ring of round_packed.py beside it.
        """
        n_blocks = sizes.key_blocks(config.block_N)
        heads = sizes.batch * sizes.heads_kv * self.sharers
        self.tiles = n_blocks * heads
        ctas = min(self.tiles, sizes.costs.sms if config.is_persistent else MAX_GRID)
        tiles = n_blocks, sizes.long_tiles(config.block_N), sizes.costs
        q_bytes = sizes.seqlen_q * self.row_bytes
        group_heads = key_head_group(config, heads, sizes.heads_per_kv, q_bytes, *tiles)
        if config.is_stream_k:
            group_heads = -(-group_heads // self.sharers)  # whole heads
        if config.is_ordered and problem.causal and not sizes.may_share:
            # One group: the last group adds to dq in another order than those before, see KeyTile.start()
            group_heads = heads
        if self.by_sequence:
            longest = -(-(sizes.longest_rows or max(sizes.seqlen_q, sizes.seqlen_k)) // TABLE_ROWS)
            self.slots = ring_tiles(n_blocks * sizes.heads_kv, longest, sizes.costs)
        elif self.rounds:
            units = sizes.batch * sizes.heads_kv
            group_heads, self.slots = slots_of(units, n_blocks, sizes.costs, problem.causal)
        self.counts = n_blocks, group_heads, ctas

    def _count_rows(self, config: BwdPass, problem: AttnProblem, sizes: BwdSizes, tiles: int) -> None:
        """Set the workspace: rows of the sums of dq and the counters behind them, and of the partials of dk and dv."""
        in_partials = (
            self.sharers > 1 or (problem.is_fp32 and problem.has("varlen")) or problem.has("partial")
        )
        self.dk_in_partials, self.dv_in_partials = (
            in_partials and grad in config.makes for grad in ("dk", "dv")
        )
        rows_q = sizes.batch * sizes.heads * self.row_blocks_q
        if self.rounds:
            row_blocks = TABLE_ROWS // 16 if self.by_sequence else self.row_blocks_q
            rows_q = self.slots * sizes.heads_per_kv * row_blocks
        rows_k = self.sharers * (tiles - self.whole) * (config.block_N // 16)
        self.sum_rows = rows_q if self.adds_dq else 0
        # Behind the sums, for one memset of both: turns of an ordered pass, one per row block; counters of a pass that rounds dq
        units = tiles if self.by_sequence else sizes.batch * sizes.heads_kv
        self.counters = rows_q if config.is_ordered else self.rounds * (1 + 2 * units)
        counter_rows = -(-self.counters // (16 * problem.head_dim))
        dq_sum = fragment_blocks(self.sum_rows + counter_rows, problem.head_dim)
        dk_partials = fragment_blocks(rows_k if self.dk_in_partials else 0, problem.head_dim)
        dv_partials = fragment_blocks(rows_k if self.dv_in_partials else 0, problem.head_dim_v)
        self.workspace = dq_sum, dk_partials, dv_partials


def bwd_workspace_bytes(
    batch: int,
    heads: int,
    heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    problem: AttnProblem,
    config: BwdConfig,
    costs: Costs,
    window_size: tuple[int | None, int | None] = (UNLIMITED, UNLIMITED),
    longest: int = 0,
) -> int:
    """Bytes that a backward of plain tensors allocates beside its gradients, all passes together, on a GPU with these costs.

    It holds lse and delta of each query; the sums of dq, if a pass adds to them; the partials of dk and dv, where several CTAs
    share the query heads of a key head or a key tile, for `partial`, and in fp32 with packed sequences; with these also tables of their
    tiles. A gradient through the lse and that of a sink need some bytes per query more, while they are computed. The bf16 terms of
    fp32 tensors are beside it: see terms_workspace_bytes.

    Args:
        batch, seqlen_q, seqlen_k: with packed sequences their number, and the rows of all of them.
        window_size: that of the call, where `problem` has a window, with 0 on the right where the call is causal, too. CTAs that own keys
            are counted by the queries in reach.
        longest: with packed sequences the larger one of max_seqlen_q and max_seqlen_k of the call; 0: one sequence may have all rows. A
            pass that rounds dq has sums of one head of it at least.
    Raises:
        ValueError: a window_size without a window in `problem`, or none for it.
    """
    _, window = canonical_window(problem.causal, window_size)
    has_window = problem.has("window")
    if has_window != (window != (UNLIMITED, UNLIMITED)):
        wanted = "that of the call, as the problem has a" if has_window else "(-1, -1), as the problem has no"
        raise ValueError(f"window_size: expected {wanted} window, got {window_size}")
    packed = problem.has("varlen")
    if problem.causal and not problem.is_fp32 and not problem.served_as.options and problem.program is None:
        seqlen_q -= unseen_queries(min(batch, MAX_BATCH), heads, seqlen_q, seqlen_k, costs)
    batch = batch if packed else min(batch, MAX_BATCH)  # larger ones are launched in chunks
    if not (batch and heads and seqlen_q and seqlen_k):
        return 0
    by_sequence = goes_by_sequence(problem, config.passes)
    tiles = table_counts(seqlen_q, seqlen_k, batch, by_sequence) if packed else None
    queries = queries_of_tile(seqlen_q, batch if packed else 1, Options(window=window))
    counts = 1 if packed else batch, heads, heads_kv, seqlen_q, seqlen_k
    row = problem.head_dim + problem.head_dim_v, problem.element_bytes
    sizes = BwdSizes(*counts, *row, costs, 0, queries, tiles, longest_rows=rounded_length(longest))
    numbers = 2 * sizes.batch * heads * sizes.rounded_q
    for bwd_pass in config.passes:
        if bwd_pass.grads != "dq":
            numbers += sum(math.prod(shape) for shape, *_ in KeyBuffers(bwd_pass, problem, sizes).workspace)
    if tiles:
        numbers += 2 * 2 * (batch + 1) + TABLE_NUMBERS * sum(tiles)
    return 4 * numbers


@dataclass(frozen=True)
class Tables:
    """Tile tables of one launch on packed sequences."""

    queries: torch.Tensor
    keys: torch.Tensor


class QueryPassLaunch:
    """Launch of a pass whose CTAs own queries: it computes dq."""

    attention_tiles, stores_key_terms = None, False  # as in KeyPassLaunch: it makes and stores no terms

    def __init__(self, config: BwdPass, kernel: Kernel, kernels: BwdKernels, sizes: BwdSizes):
        batch, heads, heads_per_kv = sizes.batch, sizes.heads, sizes.heads_per_kv
        kv_bytes = sizes.element_bytes * sizes.seqlen_k * sizes.width
        queries = sizes.rounded_q if sizes.tiles else sizes.seqlen_q
        counts = tile_counts(batch, heads, heads_per_kv, kv_bytes, queries, config.block_M, sizes.costs)
        self.kernel, self.counts = kernel, (heads_per_kv, *counts)
        self.block = config.block_M, config.block_N

    def launch(
        self,
        inputs: tuple[Argument, ...],
        dq: Argument,
        dk: Argument,
        dv: Argument,
        softmax_scale: float,
        options: tuple = (),
        tables: Tables | None = None,
        blocks: BlockLists | None = None,
    ) -> None:
        if tables is not None:
            options = *options[:-1], tables.queries
        if blocks is not None:
            options += blocks.by_queries(*self.block)
        self.kernel(*inputs, dq, softmax_scale, *self.counts, *options)


class KeyPassLaunch:
    """Launch of a pass whose CTAs own keys, and of the kernels that sum its partials."""

    def __init__(self, config: BwdPass, kernel: Kernel, kernels: BwdKernels, sizes: BwdSizes):
        problem = kernels.problem
        self.buffers, self.partial = KeyBuffers(config, problem, sizes), problem.has("partial")
        buffers = self.buffers
        sharers = buffers.sharers
        self.persistent, self.ordered, self.device = config.is_persistent, config.is_ordered, sizes.device
        counts = n_blocks, group_heads, ctas = buffers.counts
        self.block = config.block_N, config.block_M
        self.sum_qk, self.sum_dk, self.sum_dv = kernels.sum_qk, kernels.sum_qk, kernels.sum_v
        self.sum_counts, self.whole = (sharers, buffers.row_blocks_k), ()
        if config.is_stream_k:
            self.sum_dk, self.sum_dv = kernels.sum_shared_qk, kernels.sum_shared_v
            self.sum_counts = sharers, config.block_N // 16, n_blocks, buffers.whole
            self.whole = (buffers.whole,)
        self.kernel, self.counts = kernel, (sizes.heads_per_kv, buffers.heads_per_sharer, sharers, *counts)
        tiles = AttentionTiles(buffers.tiles, n_blocks * group_heads, ctas, sizes.costs, sizes.heads_per_kv)
        self.attention_tiles = tiles if config.makes_terms else None
        self.stores_key_terms = stores_key_terms(problem, config.makes)

    def launch(
        self,
        inputs: tuple[Argument, ...],
        dq: Argument,
        dk: Argument,
        dv: Argument,
        softmax_scale: float,
        options: tuple = (),
        tables: Tables | None = None,
        blocks: BlockLists | None = None,
        key_terms: tuple = (),
    ) -> None:
        buffers = self.buffers
        dq_sum, dk_partials, dv_partials = [empty(*x) for x in buffers.workspace]
        if buffers.adds_dq:
            dq_sum.zero_()
        if buffers.may_be_empty:
            dk_partials.zero_()
            dv_partials.zero_()
        turns = rounding = ()
        if buffers.counters:
            counters = dq_sum[buffers.sum_rows :].view(torch.int32).flatten()[: buffers.counters]
            dq_sum = dq_sum[: buffers.sum_rows]
            if self.ordered:
                turns = (counters,)
            else:
                rounding = dq, counters, buffers.slots
        table_q = table_k = ()
        if tables is not None:
            table_q, table_k = (False, tables.queries), (True, tables.keys)
            options = *options[:-1], tables.keys
        if blocks is not None:
            options += blocks.by_keys(*self.block, self.counts[0])
        tickets = (stream_tickets(self.device, True),) if self.persistent else ()
        # With `partial` dk and dv are sums of partials: the kernel writes to neither of the arguments in their place
        stored = inputs[1:3] if self.partial else (dk, dv)
        sums = dq if buffers.writes_dq else dq_sum, *stored, dk_partials, dv_partials
        extra = *tickets, *turns, *self.whole, *rounding, *key_terms, *options
        self.kernel(*inputs, *sums, softmax_scale, *self.counts, *extra)
        if buffers.adds_dq and not buffers.rounds:
            self.sum_qk(dq_sum, dq, softmax_scale, 1, buffers.row_blocks_q, *table_q)
        if buffers.dk_in_partials:
            self.sum_dk(dk_partials, dk, 1.0, *self.sum_counts, *table_k)
        if buffers.dv_in_partials:
            self.sum_dv(dv_partials, dv, 1.0, *self.sum_counts, *table_k)
