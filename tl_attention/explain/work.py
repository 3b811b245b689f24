"""Kernels of a call as the model sees them: tiles in launch order, steps per tile, bytes, and the clocks of clocks.py per step.

A step is one block of keys (of queries in a backward by keys). Sizes are those of the tiles, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tl_attention import configs
from tl_attention.explain import clocks, functions
from tl_attention.explain.clocks import BYTES
from tl_attention.explain.functions import Asked
from tl_attention.explain.tiles import (
    Runs,
    cut_share,
    forward_tiles,
    key_tiles,
    launch_order,
    query_tiles,
    runs,
    share_last,
)
from tl_attention.gpus import Gpu
from tl_attention.kernel_configs import (
    BwdPass,
    Config,
    DecodeCombine,
    DecodeConfig,
    FwdConfig,
    KernelConfig,
    page_rows,
)
from tl_attention.launch import splits
from tl_attention.launch.bwd_passes import causal_tiles, key_head_group, pass_parts, row_bytes_of
from tl_attention.launch.common import GROUP_KEYS, head_group
from tl_attention.launch.seen import unseen_queries
from tl_attention.part_configs import stores_key_parts
from tl_attention.problem import (
    DECODE,
    SPLIT_BUCKET,
    TABLE_ROWS,
    AttnProblem,
    bwd_bucket,
    decode_problem,
    length_bucket,
    window_bucket,
)
from tl_attention.query_tiles import end_at_last_query
from tl_attention.round_configs import ring_tiles, slots_of
from tl_attention.testing import counts
from tl_attention.testing.counts import bounds
from tl_attention.testing.shapes import Shape, sequences

LATE = "dynamic-late"  # the schedule that loads K and V of the next tile, and stores dK and dV, beside the steps of others
FP32_BYTES = 4
MIN_KEYS_PER_CTA = 256  # of kernels/decode_work.py
MERGED_AT_ONCE = DecodeCombine().at_once
# Products per score in a pass: (of width head_dim, of width head_dim_v)
PRODUCTS = {"dq+dk+dv": (3, 2), "dq+dk": (3, 1), "dk+dv": (2, 2), "dk": (2, 1), "dv": (1, 1), "dq": (2, 1)}


@dataclass(frozen=True)
class Kernel:
    """A kernel whose CTAs go through tiles."""

    name: str
    config: KernelConfig
    clocks: dict[str, float]  # unit of an SM -> its busy clocks per step
    tiles: Runs
    flops_per_step: int
    step_bytes: int  # loaded and stored per step
    tile_bytes: int  # loaded before the first step of a tile and stored after the last
    stream_bytes: int  # what the steps of one head read, each byte once
    streams: int  # heads, of all sequences, with bytes of their own
    static: bool = False  # every n-th tile belongs to the same CTA
    ctas_per_sm: int = 1

    @property
    def is_exposed(self) -> bool:
        """False where what a tile loads first and stores last moves under the steps of its neighbours."""
        return self.config.schedule != LATE

    @property
    def count(self) -> int:
        return sum(count for _, count in self.tiles)

    @property
    def steps(self) -> int:
        return round(sum(steps * count for steps, count in self.tiles))


@dataclass(frozen=True)
class Helper:
    """A kernel that only moves bytes."""

    name: str
    bytes: int
    known: int = 0  # of them, those that the least traffic of the call has
    beside: bool = False  # idle warps of the main kernels move them


@dataclass(frozen=True)
class Work:
    """All kernels of a call on a GPU, and the config they follow from."""

    shape: Shape
    direction: str
    gpu: Gpu
    problem: AttnProblem
    config: Config | DecodeConfig
    source: str
    misses: tuple[str, ...]
    least_bytes: int  # each input read and each output written once
    kernels: tuple[Kernel, ...]
    helpers: tuple[Helper, ...] = ()
    splits: int = 1  # CTAs per tile
    merge_rounds: int = 0  # rounds of loads of the decode's second kernel
    asked: Asked | None = None  # by the function of the shape
    again_bytes: int = 0  # of captured tensors, read again

    @property
    def launches(self) -> int:
        return len(self.kernels) + len(self.helpers)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that the mask shows, of all heads."""
        seen = self.asked.seen if self.asked else 1.0
        return round(seen * counts.visible_pairs(self.shape) * self.shape.heads_q)

    @property
    def flops(self) -> int:
        """FLOPs of these pairs."""
        seen = self.asked.seen if self.asked else 1.0
        return round(seen * counts.flops(self.shape, self.direction))


def of_call(shape: Shape, direction: str, dtype: str, gpu: Gpu) -> Work:
    """The work of a pass of a shape."""
    if direction == DECODE:
        return _decode_work(shape, dtype, gpu)
    asked = functions.of_shape(shape)
    served = asked.shape if asked else shape
    problem = served.problem(dtype, direction)
    if asked and asked.program:
        program = asked.program.forward if direction == "fwd" else asked.program
        program = program.as_exact if direction == "bwd_det" else program
        problem = replace(problem, program=program)
    find = _fwd_work if direction == "fwd" else _bwd_work
    return replace(find(served, direction, problem, gpu, asked), shape=shape)


def _least_bytes(shape: Shape, direction: str, problem: AttnProblem, asked: Asked | None) -> int:
    """Each input read and each output written once; the log-sum-exp is fp32 whatever the dtype."""
    lse = FP32_BYTES * shape.batch * shape.heads_q * shape.seqlen_q
    tensors = (counts.traffic(shape, direction) - lse) * problem.output_bytes // BYTES
    captured = asked.bias_bytes * (1 if direction == "fwd" else 2) + asked.bits_bytes if asked else 0
    return tensors + lse + captured


class _Steps(NamedTuple):
    """Steps of the tiles of a head by sequence, of tiles by keys for the mean query head of a key head.

    Args:
        heads: heads per sequence with as many; 1 where heads differ, each then a sequence of its own.
        cut: edges of the mask per step.
    """

    by_sequence: Sequence[Sequence[float]]
    heads: int
    are_alike: bool
    cut: float


def _forward_steps(shape: Shape, asked: Asked | None, problem: AttnProblem, config: FwdConfig) -> _Steps:
    if asked is not None and asked.full is not None:
        return _steps_of(shape, asked, config.block_M, config.block_N, by_keys=False)
    cut = _cut_of(shape, config.block_M, config.block_N, end_at_last_query(problem, config))
    return _Steps(forward_tiles(shape, problem, config), shape.heads_q, True, cut)


def _cut_of(shape: Shape, block_M: int, block_N: int, from_end: bool = False) -> float:
    """Share of the steps that a mask cuts, once per bound of the mask."""
    return cut_share(shape, block_M, block_N, from_end) * max(sum(x < float("inf") for x in bounds(shape)), 1)


def _steps_of(shape: Shape, asked: Asked | None, block_M: int, block_N: int, by_keys: bool) -> _Steps:
    heads = shape.heads_kv if by_keys else shape.heads_q
    if asked is None or asked.full is None:
        by_sequence = (key_tiles if by_keys else query_tiles)(shape, block_M, block_N)
        return _Steps(by_sequence, heads, True, _cut_of(shape, block_M, block_N))
    of_heads, cut = asked.tiles(block_M, block_N, by_keys), asked.cut_share(block_M, block_N)
    if len(of_heads) == 1:
        return _Steps(of_heads * shape.batch, heads, True, cut)
    if by_keys:
        group = shape.heads_q // shape.heads_kv
        groups = [of_heads[first : first + group] for first in range(0, shape.heads_q, group)]
        of_heads = [[sum(steps) / group for steps in zip(*one, strict=True)] for one in groups]
    return _Steps(of_heads * shape.batch, 1, False, cut)


def _fwd_work(shape: Shape, direction: str, problem: AttnProblem, gpu: Gpu, asked: Asked | None) -> Work:
    lengths = sequences(shape)
    longest = max(k for _, k in lengths)
    bucket = length_bucket(longest)
    if not shape.is_varlen:
        sizes = shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k
        bucket = splits.fwd_bucket(*sizes, gpu.sms, splits.sharing(problem, gpu.name))
        bucket = window_bucket(bucket, problem.options, shape.window_keys)
    choice = configs.choose_config(problem, bucket, gpu.name, direction)
    config: FwdConfig = choice.config
    by_sequence, heads, alike, cut = _forward_steps(shape, asked, problem, config)
    number = 1
    if bucket == SPLIT_BUCKET:
        tiles = heads * sum(map(len, by_sequence))
        number = splits.key_splits(tiles, -(-longest // config.block_N), gpu.sms)
    row = problem.head_dim + problem.head_dim_v
    head_bytes = problem.element_bytes * max(longest, GROUP_KEYS) * (shape.head_dim + shape.head_dim_v)
    sharing = shape.heads_q // shape.heads_kv
    ordered = (problem.is_uneven or bool(problem.options)) and alike
    blocks, short = max(map(len, by_sequence)), longest < GROUP_KEYS and not shape.is_varlen
    fill = 0 if number > 1 or short else gpu.sms
    group = head_group(shape.heads_q * shape.batch, sharing, max(head_bytes, 1), blocks, fill)
    tiles = launch_order(by_sequence, heads, group, shape.is_varlen, ordered, last=True)
    if number > 1:
        tiles = runs((-(-steps // number), count * number) for steps, count in tiles)
    elif config.schedule == "shared":
        tiles = _shared_tiles(shape, config, tiles, gpu)
    kernel = Kernel(
        "forward",
        config,
        clocks.of_forward(problem, config, gpu, cut, asked),
        tiles,
        2 * config.block_M * config.block_N * row,
        problem.element_bytes * config.block_N * row,
        problem.output_bytes * config.block_M * (problem.head_dim + problem.head_dim_v),
        head_bytes,
        shape.heads_kv * shape.batch,
        static=config.schedule in ("persistent", "shared"),
    )
    helpers = [Helper("tile table", 0)] if shape.is_varlen else []
    helpers += _parts_helpers(problem, shape.head_dim, 2 * _rows_k(shape), config.makes_parts)
    if number > 1:
        rows = shape.heads_q * sum(q for q, _ in lengths)
        helpers.append(Helper(f"combine {number} splits", 2 * 4 * number * rows * (problem.head_dim_v + 1)))
    return Work(
        shape, direction, gpu, problem, config, choice.source, choice.misses, _least_bytes(shape, direction, problem, asked),
        (kernel,), tuple(helpers), number, asked=asked, again_bytes=_again_bytes(shape, asked, 0, gpu),
    )  # fmt: skip


def _shared_tiles(shape: Shape, config: FwdConfig, tiles: Runs, gpu: Gpu) -> Runs:
    """Tiles of the schedule shared: those that a CTA has alone, and the share of each CTA in the others."""
    steps, count = (sum(n * longest for longest, n in tiles), sum(n for _, n in tiles))
    if shape.causal:
        heads, blocks = shape.batch * shape.heads_q, (config.block_M, config.block_N)
        _, sharers, _ = splits.causal_shares(heads, shape.seqlen_q, shape.seqlen_k, *blocks, gpu.sms)
        return ((steps / sharers, sharers),)
    ((longest, _),) = tiles
    whole, sharers = splits.shared_tiles(count, longest, gpu.sms)
    return runs(
        [(longest, whole), ((count - whole) * longest / max(sharers, 1), sharers)][: 1 + bool(sharers)]
    )


def _rows_k(shape: Shape) -> int:
    return shape.heads_kv * sum(k for _, k in sequences(shape))


def _parts_helpers(
    problem: AttnProblem, columns: int, rows: int, beside: bool, stored_rows: int = 0
) -> list[Helper]:
    """The kernels that split fp32 tensors into bf16 parts.

    Args:
        columns: of the tensors.
        rows: that they split.
        beside: idle warps of the main kernels split most of them.
        stored_rows: whose parts a main kernel stores.
    """
    if not problem.is_fp32:
        return []
    read, written = FP32_BYTES * columns, problem.element_bytes * problem.head_dim
    helpers = [Helper("bf16 parts of fp32 tensors", (read + written) * rows, read * rows, beside)]
    if stored_rows:
        helpers.append(Helper("bf16 parts of k and v for further passes", written * stored_rows, 0, True))
    return helpers


def _again_bytes(shape: Shape, asked: Asked | None, passes: int, gpu: Gpu) -> int:
    """Bytes of dense captured tensors beside reading each once and writing its gradient once.

    Each pass reads them; where they serve all batch entries and the L2 does not keep them, for each entry anew. The gradient of a tensor
    that serves all entries is first stored per entry, and another kernel sums these.
    """
    if not asked or not asked.bias_bytes:
        return 0
    stays = asked.is_bias_per_batch or asked.bias_bytes <= 1e6 * gpu.l2_mb
    reads = max(passes, 1) * (1 if stays else shape.batch)
    stores = 0 if asked.is_bias_per_batch else shape.batch
    return asked.bias_bytes * (reads - 1 + stores * (passes > 0))


def _bias_helpers(shape: Shape, asked: Asked | None) -> list[Helper]:
    """The kernel that sums the gradients of a bias of all batch entries."""
    if not asked or not asked.bias_bytes or asked.is_bias_per_batch:
        return []
    return [Helper("sum of the bias's gradients", asked.bias_bytes * (shape.batch + 1), asked.bias_bytes)]


def _bwd_work(shape: Shape, direction: str, problem: AttnProblem, gpu: Gpu, asked: Asked | None) -> Work:
    lengths = sequences(shape)
    seqlen_k = max(k for _, k in lengths)
    queries = max(q for q, _ in lengths) if problem.is_fp32 else 0
    bucket = bwd_bucket(direction == "bwd_det", shape.heads_q, shape.heads_kv, seqlen_k, seqlen_q=queries)
    choice = configs.choose_config(problem, bucket, gpu.name, direction)
    qk, v = problem.head_dim, problem.head_dim_v
    called, unseen = shape, _unseen_queries(shape, problem)
    shape = replace(shape, seqlen_q=shape.seqlen_q - unseen)
    rows_q = shape.heads_q * sum(q for q, _ in sequences(shape))
    helpers = [Helper("tile table", 0)] if shape.is_varlen else []
    if unseen:
        zeros = problem.output_bytes * qk * unseen * shape.batch * shape.heads_q
        helpers += [Helper("zeros for dq of queries without a key", zeros, zeros)]
        helpers += [Helper("log-sum-exps of the others", 2 * FP32_BYTES * rows_q)]
    passes = choice.config.passes
    stored_rows = 2 * _rows_k(shape) * any(stores_key_parts(problem, one.makes) for one in passes)
    helpers += _parts_helpers(problem, shape.head_dim, 2 * rows_q, choice.config.makes_parts, stored_rows)
    stored = problem.output_bytes
    helpers.append(Helper("delta: rowsum of dout x out", 2 * stored * v * rows_q, stored * v * rows_q))
    kernels = []
    for one in choice.config.passes:
        kernel, parts, rows_in_parts = _pass_work(shape, problem, one, gpu, asked, gradients=not kernels)
        kernels.append(kernel)
        if one.adds_dq:
            summed = _summed_rows(shape, one, problem, gpu) if one.rounds(problem) else rows_q
            helpers.append(Helper("zeros for the fp32 sums of dq", 4 * qk * summed))
        if one.adds_dq and not problem.is_fp32 and not one.rounds(problem):
            helpers.append(Helper("dq from fp32", (4 + stored) * qk * rows_q, stored * qk * rows_q))
        for grad, width in (("dk", qk), ("dv", v)):
            uneven = problem.causal or problem.has("window")
            if one.is_split and uneven and shape.heads_q // shape.heads_kv < parts:
                zeros = 4 * parts * width * rows_in_parts
                helpers.append(Helper(f"zeros for the fp32 parts of {grad}", zeros))
            if (parts > 1 or (problem.is_fp32 and problem.has("varlen"))) and grad in one.makes:
                moved, known = (n * width * rows_in_parts for n in (2 * 4 * parts + stored, stored))
                helpers.append(Helper(f"sum of {parts} fp32 parts of {grad}", moved, known))
    return Work(
        called, direction, gpu, problem, choice.config, choice.source, choice.misses, _least_bytes(called, direction, problem, asked),
        tuple(kernels), (*helpers, *_bias_helpers(shape, asked)), asked=asked,
        again_bytes=_again_bytes(shape, asked, len(kernels), gpu),
    )  # fmt: skip


def _slots_of(shape: Shape, one: BwdPass, problem: AttnProblem, gpu: Gpu) -> tuple[int, int]:
    """slots_of() of a pass that rounds dq."""
    units, tiles = shape.batch * shape.heads_kv, -(-shape.seqlen_k // one.block_N)
    return slots_of(units, tiles, gpu.sms, problem.causal)


def _summed_rows(shape: Shape, one: BwdPass, problem: AttnProblem, gpu: Gpu) -> int:
    """Rows of the sums of dq that exist at a time, where a pass rounds them."""
    heads_per_kv = shape.heads_q // shape.heads_kv
    if problem.has("varlen"):
        tiles = [-(-max(lengths) // TABLE_ROWS) for lengths in sequences(shape)]
        return ring_tiles(sum(tiles) * shape.heads_kv, max(tiles), gpu.sms) * heads_per_kv * TABLE_ROWS
    _, slots = _slots_of(shape, one, problem, gpu)
    return slots * heads_per_kv * shape.seqlen_q


def _unseen_queries(shape: Shape, problem: AttnProblem) -> int:
    """First queries of a head that see no key and that a launch leaves out."""
    if not problem.causal or problem.is_fp32 or problem.served_as.options or problem.program:
        return 0
    return unseen_queries(shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k)


def _pass_work(
    shape: Shape, problem: AttnProblem, one: BwdPass, gpu: Gpu, asked: Asked | None, gradients: bool
) -> tuple[Kernel, int, int]:
    """The kernel of a pass, the number of CTAs that share key tiles, and the keys of all heads in such tiles.

    Args:
        gradients: it makes those of captured tensors.
    """
    M, N, qk, v = one.block_M, one.block_N, problem.head_dim, problem.head_dim_v
    longest_q, longest_k = (max(lengths) for lengths in zip(*sequences(shape), strict=True))
    row, owned, step, parts, per_part, shares, whole = qk + v, N, M, 1, 1, (1,), 0
    rows_in_parts = shape.heads_kv * sum(k for _, k in sequences(shape))
    by_sequence, heads, alike, cut = _steps_of(shape, asked, M, N, by_keys=one.grads != "dq")
    ordered = (problem.is_uneven or bool(problem.options)) and alike
    heads_per_kv, most_tiles = shape.heads_q // shape.heads_kv, max(map(len, by_sequence))
    if one.grads == "dq":
        owned, step = M, N
        stream = problem.element_bytes * longest_k * row
        group = head_group(heads * shape.batch, heads_per_kv, max(stream, 1), most_tiles, gpu.sms)
    else:
        batch, blocks = shape.batch, len(by_sequence[0])
        if shape.is_varlen:
            batch, blocks = 1, sum(map(len, by_sequence))
        tiles = batch * shape.heads_kv * blocks
        queries = _tile_queries(shape, problem, one)
        row_bytes = row_bytes_of(one, problem, row, problem.element_bytes)
        shares_last = not problem.has("window")
        parts, per_part, whole = pass_parts(
            one, tiles, heads_per_kv, *queries, gpu.sms, row_bytes, shares_last
        )
        order_parts = 1 if whole else parts
        if one.is_split:
            per_part = heads_per_kv / order_parts  # each part has some queries of all heads
        shares = *[per_part] * (order_parts - 1), heads_per_kv - per_part * (order_parts - 1)
        heads *= order_parts
        rows_in_parts = round(rows_in_parts * (1 - whole / tiles))
        stream = int(longest_q * per_part * row_bytes)
        sizes = longest_q * row_bytes, most_tiles, most_tiles if shape.is_varlen else None
        group = key_head_group(one, heads * shape.batch, heads_per_kv, *sizes, gpu.sms)
    if one.rounds(problem) and not shape.is_varlen:
        group = _slots_of(shape, one, problem, gpu)[0] * order_parts
    tiles = launch_order(by_sequence, heads, group, shape.is_varlen, ordered, one.grads == "dq", shares)
    tiles = share_last(tiles, whole, parts if whole else 1)
    of_qk, of_v = PRODUCTS[one.grads]
    flops = 2 * (of_qk * qk + of_v * v)
    busy = clocks.of_pass(problem, one, gpu, flops, cut, asked, gradients)
    # Each sum is also read, and set to 0, beside the additions of the steps that see its query
    if one.rounds(problem):
        rows = sum(rows_q for rows_q, _ in sequences(shape))
        busy["adding dq in L2"] *= 1 + 2 * rows / (M * sum(map(sum, by_sequence)))
    stored = sum(v if grad == "dv" else qk for grad in one.makes if not (grad == "dq" and one.makes_all))
    groups = shape.batch * (shape.heads_kv * parts if one.grads != "dq" else shape.heads_kv)
    tile_bytes = problem.element_bytes * owned * row + problem.output_bytes * owned * stored
    moved = problem.element_bytes * step * (row + qk * one.one_tile), tile_bytes, stream
    kernel = Kernel(f"pass {one.grads}", one, busy, tiles, M * N * flops, *moved, groups)
    return kernel, parts, rows_in_parts


def _tile_queries(shape: Shape, problem: AttnProblem, one: BwdPass) -> tuple[int, float]:
    """Queries of a head that see a key tile, and the share of tiles on the diagonal, as launch.bwd passes them to pass_parts."""
    if one.one_tile:
        unseen = problem.causal * max(shape.seqlen_q - shape.seqlen_k, 0) // one.block_M
        return shape.seqlen_q - unseen * one.block_M, 0
    lengths, window = sequences(shape), sum(bounds(shape))
    rows_q, rows_k = map(sum, zip(*lengths, strict=True))
    queries = -(-rows_q // len(lengths))
    if problem.has("window"):
        queries = min(queries, (1 << int(window).bit_length()) + TABLE_ROWS)
    return causal_tiles(queries, rows_q, rows_k) if problem.causal else (queries, 0)


def _decode_work(shape: Shape, dtype: str, gpu: Gpu) -> Work:
    problem = decode_problem(dtype, shape.head_dim, shape.head_dim_v, shape.option_names)
    rows = shape.seqlen_q * shape.heads_q // shape.heads_kv
    config = configs.decode_config(problem, rows, page_rows(shape.options.page) if shape.options.page else 0)
    M, N, qk, v = config.block_M, config.block_N, problem.head_dim, problem.head_dim_v
    m_blocks = -(-rows // M)
    window = bounds(shape)[0] + shape.seqlen_q  # keys that the queries of a sequence see at most
    visible = [int(min(k, window)) for _, k in sequences(shape)]
    items = shape.batch * shape.heads_kv * m_blocks
    blocks = shape.heads_kv * m_blocks * sum(max(-(-keys // N), 1) for keys in visible)
    ctas = max(min(blocks // (MIN_KEYS_PER_CTA // N), gpu.sms * config.ctas_per_sm), 1)
    per_cta, longer = divmod(blocks, ctas)
    row = qk if config.v_in_k else qk + v
    read = config.warpgroups * N * (qk + v) + M * qk + N * row
    kernel = Kernel(
        "decode",
        config,
        clocks.of_scores(problem, gpu, M * N, 2 * (qk + v), clocks.FWD_INSTRUCTIONS, BYTES * read),
        runs([(per_cta + 1, longer), (per_cta, ctas - longer)]),
        2 * M * N * (qk + v),
        BYTES * N * row,
        BYTES * M * (qk + v),
        BYTES * max(visible) * row,
        shape.heads_kv * shape.batch,
        ctas_per_sm=config.ctas_per_sm,
    )
    # Keys and values that a query sees, q and out; with V in K only K
    own_row = shape.head_dim if config.v_in_k else shape.head_dim + shape.head_dim_v
    queries = shape.heads_q * shape.batch * shape.seqlen_q * (shape.head_dim + shape.head_dim_v)
    least = BYTES * (shape.heads_kv * sum(visible) * own_row + queries)
    parts = -(-ctas // items)  # per item, about
    helpers = (Helper("merge of the splits", 2 * 4 * min(rows, M) * (v + 1) * ctas if ctas > items else 0),)
    few = "at most 64" if rows <= configs.DECODE_ROWS[0] else "more than 64"
    source = f"[decode] {problem.width} of {configs.data_dir() / 'grid.toml'}, for {few} rows per key head"
    return Work(
        shape, DECODE, gpu, problem, config, source, (), least, (kernel,), helpers,
        splits=parts, merge_rounds=-(-parts // MERGED_AT_ONCE) if parts > 1 else 0,
    )  # fmt: skip
