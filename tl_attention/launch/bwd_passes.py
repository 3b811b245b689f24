"""Launch of the passes of a backward: query passes (dq) and key passes (dk, dv), their sizes and workspace."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tl_attention.compilation.store import Kernel
from tl_attention.kernel_configs import BwdConfig, BwdPass
from tl_attention.launch.block_lists import BlockLists
from tl_attention.launch.common import MAX_GRID, Argument, empty, fragment_blocks, tile_counts
from tl_attention.launch.splits import TIME_SLACK
from tl_attention.launch.tickets import stream_tickets
from tl_attention.problem import TABLE_ROWS, AttnProblem

QUERY_ROWS = TABLE_ROWS  # lse, delta and the sums of dq are padded to a multiple of it
# Ordered additions wait less in larger groups of heads, in whose order tiles of one head are further apart: so many times the heads
ORDERED_GROUPS = 4
QUERY_SHARES = 16  # of the queries of a key tile, that a split pass divides among CTAs
# Costs in queries of one head against a key tile: the fixed cost of a tile; partial results of one, written and read. The share of the
# longest tile by which SMs end apart, under a causal mask. All fitted to GQA (H200, see tuning.md, "Query heads of a key head")
TILE_QUERIES, PART_QUERIES, TAIL = 192, 256, 0.35


@dataclass(frozen=True)
class BwdKernels:
    """The compiled kernels of a backward."""

    problem: AttnProblem
    delta: Kernel
    passes: tuple[tuple[BwdPass, Kernel], ...]
    sum_qk: Kernel
    sum_v: Kernel
    tile_table: Kernel | None  # runs first for packed sequences
    parts: Kernel | None  # runs first in fp32: splits q, k, v and dout


@functools.lru_cache(maxsize=4096)
def key_parts(tiles: int, heads_per_kv: int, queries: int, triangular: bool, sms: int) -> tuple[int, int]:
    """(parts, heads_per_part): CTAs that share the query heads of a key head, and query heads of each.

    The fewest CTAs within TIME_SLACK of the shortest time.

    Args:
        tiles: key blocks of all key heads.
        queries: largest number of one head that see some keys of a tile.
        triangular: tiles have between none and all of them, as under a causal mask, and the longest come first.
    """

    def time(heads_per_part: int) -> float:
        parts = -(-heads_per_kv // heads_per_part)
        longest = heads_per_part * queries + TILE_QUERIES
        if triangular:
            mean = tiles / sms * (heads_per_kv * queries / 2 + parts * TILE_QUERIES)
            time = max(longest, mean + TAIL * longest)
        else:
            time = -(-tiles * parts // sms) * longest
        return time + (parts > 1) * parts * PART_QUERIES * tiles / sms

    times = {heads_per_part: time(heads_per_part) for heads_per_part in range(heads_per_kv, 0, -1)}
    limit = TIME_SLACK * min(times.values())
    heads_per_part = next(number for number, needed in times.items() if needed <= limit)
    return -(-heads_per_kv // heads_per_part), heads_per_part


def pass_parts(
    bwd_pass: BwdPass, tiles: int, heads_per_kv: int, queries: int, triangular: bool, sms: int
) -> tuple[int, int]:
    """key_parts of a pass. With the schedule split CTAs divide queries in place of heads, by QUERY_SHARES of them."""
    if not bwd_pass.is_split:
        return key_parts(tiles, heads_per_kv, queries, triangular, sms)
    parts, _ = key_parts(tiles, QUERY_SHARES, -(-heads_per_kv * queries // QUERY_SHARES), triangular, sms)
    return parts, heads_per_kv


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
    """Bytes that a backward allocates beside its gradients, on a GPU with `sms` SMs. All of it is fp32.

    It holds lse and delta of each query; the sums of dq, if a pass adds to them; the parts of dk and dv, where several CTAs
    share the query heads of a key head, and in fp32 with packed sequences. The bf16 parts of fp32 tensors are beside it: see
    parts_workspace_bytes. A launch with a window or packed sequences may have other numbers of CTAs per key head, as it counts the
    queries that a tile sees.
    """
    rows = batch * heads * -(-seqlen_q // QUERY_ROWS) * QUERY_ROWS
    numbers = 2 * rows
    for bwd_pass in config.passes:
        if bwd_pass.adds_dq and not problem.is_fp32:
            numbers += rows * problem.head_dim
            if bwd_pass.is_ordered:  # an int32 per row block, in whole ones
                numbers += -(-rows // (256 * problem.head_dim)) * 16 * problem.head_dim
        if bwd_pass.grads == "dq":
            continue
        n_blocks = -(-seqlen_k // bwd_pass.block_N)
        tiles, per_kv = batch * heads_kv * n_blocks, heads // heads_kv
        parts, _ = pass_parts(bwd_pass, tiles, per_kv, seqlen_q, problem.causal, sms)
        if parts > 1 or (problem.is_fp32 and problem.has("varlen")):
            part_rows = parts * batch * heads_kv * n_blocks * bwd_pass.block_N
            widths = {"dk": problem.head_dim, "dv": problem.head_dim_v}
            numbers += sum(part_rows * width for grad, width in widths.items() if grad in bwd_pass.makes)
    return 4 * numbers


@dataclass(frozen=True)
class BwdSizes:
    """Sizes of a backward that its passes are launched by."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    width: int  # head_dim + head_dim_v
    element_bytes: int
    sms: int
    device: int
    queries: int  # largest number of one head that see some keys of a tile; of packed sequences their mean
    tiles: tuple[int, int] | None = None  # of queries and of keys, for packed sequences
    longest: int = 0  # queries of the longest of packed sequences

    @property
    def heads_per_kv(self) -> int:
        return self.heads // self.heads_kv

    @property
    def rounded_q(self) -> int:
        if self.tiles:
            return self.tiles[0] * TABLE_ROWS
        return -(-self.seqlen_q // QUERY_ROWS) * QUERY_ROWS

    def key_blocks(self, block_N: int) -> int:
        return self.tiles[1] * (TABLE_ROWS // block_N) if self.tiles else -(-self.seqlen_k // block_N)


@dataclass(frozen=True)
class Tables:
    """Tile tables of one launch on packed sequences."""

    queries: torch.Tensor
    keys: torch.Tensor


class QueryPass:
    """Launch of a pass whose CTAs own queries: it computes dq."""

    def __init__(self, config: BwdPass, kernel: Kernel, kernels: BwdKernels, sizes: BwdSizes):
        batch, heads, heads_per_kv = sizes.batch, sizes.heads, sizes.heads_per_kv
        kv_bytes = sizes.element_bytes * sizes.seqlen_k * sizes.width
        queries = sizes.rounded_q if sizes.tiles else sizes.seqlen_q
        counts = tile_counts(batch, heads, heads_per_kv, kv_bytes, queries, config.block_M, sizes.sms)
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


class KeyPass:
    """Launch of a pass whose CTAs own keys, and of the kernels that sum its partial results."""

    def __init__(self, config: BwdPass, kernel: Kernel, kernels: BwdKernels, sizes: BwdSizes):
        batch, heads_kv = sizes.batch, sizes.heads_kv
        problem, head_dim, head_dim_v = kernels.problem, kernels.problem.head_dim, kernels.problem.head_dim_v
        n_blocks = sizes.key_blocks(config.block_N)
        keys = n_blocks * config.block_N
        tiles = batch * heads_kv * n_blocks
        parts, heads_per_part = pass_parts(
            config, tiles, sizes.heads_per_kv, sizes.queries, problem.causal, sizes.sms
        )
        row_bytes = sizes.element_bytes * sizes.width
        if config.adds_dq:
            row_bytes += 4 * head_dim
        # Bytes of one query head: the CTAs of a key head go through its query heads side by side
        q_bytes = sizes.seqlen_q * row_bytes
        if config.is_ordered and problem.causal:
            q_bytes = -(-q_bytes // ORDERED_GROUPS)
        self.dynamic, self.ordered, self.device = config.is_dynamic, config.is_ordered, sizes.device
        max_ctas = sizes.sms if self.dynamic else MAX_GRID
        # Few of the tiles of packed sequences may be as long as the longest, which others must last as long as
        full_tiles = max(1, n_blocks * sizes.queries // sizes.longest) if sizes.longest else None
        counts = tile_counts(
            batch, heads_kv * parts, 1, q_bytes, keys, config.block_N, sizes.sms, max_ctas, full_tiles
        )
        self.kernel, self.counts = kernel, (sizes.heads_per_kv, heads_per_part, parts, *counts)
        self.block = config.block_N, config.block_M
        self.sum_qk, self.sum_v = kernels.sum_qk, kernels.sum_v

        self.parts = parts
        self.adds_to_dq = config.adds_dq and problem.is_fp32  # no sums beside it
        self.adds_dq = config.adds_dq and not self.adds_to_dq
        in_parts = parts > 1 or (problem.is_fp32 and problem.has("varlen"))
        self.dk_in_parts, self.dv_in_parts = (in_parts and grad in config.makes for grad in ("dk", "dv"))
        self.row_blocks_q, self.row_blocks_k = sizes.rounded_q // 16, keys // 16
        rows_q = batch * sizes.heads * self.row_blocks_q
        rows_k = parts * batch * heads_kv * self.row_blocks_k
        # A result that is not partial has no rows here
        self.rows_q = rows_q if self.adds_dq else 0
        # An int32 per row block behind the sums of an ordered pass, so that one memset reaches all
        turn_rows = -(-rows_q // (16 * head_dim)) if self.ordered else 0
        self.split = config.is_split  # some CTAs may have no queries, and write nothing
        self.dq_sum = fragment_blocks(self.rows_q + turn_rows, head_dim)
        self.dk_parts = fragment_blocks(rows_k if self.dk_in_parts else 0, head_dim)
        self.dv_parts = fragment_blocks(rows_k if self.dv_in_parts else 0, head_dim_v)

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
        dq_sum, dk_parts, dv_parts = empty(*self.dq_sum), empty(*self.dk_parts), empty(*self.dv_parts)
        if self.adds_dq:
            dq_sum.zero_()
        if self.split and self.parts > 1:
            dk_parts.zero_()
            dv_parts.zero_()
        turns = ()
        if self.ordered:
            turns = (dq_sum[self.rows_q :].view(torch.int32).flatten()[: self.rows_q],)
            dq_sum = dq_sum[: self.rows_q]
        table_q = table_k = ()
        if tables is not None:
            table_q, table_k = (False, tables.queries), (True, tables.keys)
            options = *options[:-1], tables.keys
        if blocks is not None:
            options += blocks.by_keys(*self.block, self.counts[0])
        tickets = (stream_tickets(self.device, True),) if self.dynamic else ()
        sums = dq if self.adds_to_dq else dq_sum, dk, dv, dk_parts, dv_parts
        self.kernel(*inputs, *sums, softmax_scale, *self.counts, *tickets, *turns, *options)
        if self.adds_dq:
            self.sum_qk(dq_sum, dq, softmax_scale, 1, self.row_blocks_q, *table_q)
        if self.dk_in_parts:
            self.sum_qk(dk_parts, dk, 1.0, self.parts, self.row_blocks_k, *table_k)
        if self.dv_in_parts:
            self.sum_v(dv_parts, dv, 1.0, self.parts, self.row_blocks_k, *table_k)
