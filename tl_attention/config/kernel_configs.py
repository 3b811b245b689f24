"""Kernel configs: tiles, pipeline stages, warpgroups and schedule of each kernel.

A forward is one FwdConfig, a backward is a BwdConfig of several BwdPass; the other configs are of helper kernels.
`kernels(problem)` of a config lists everything it compiles.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tl_attention.config.term_configs import FirstTermsConfig, TermsConfig, terms_kernels
from tl_attention.problem.attn_problem import (
    DEFAULT_DTYPE,
    FP32_DTYPES,
    HALF_DTYPES,
    JVP_TILE_WIDTHS,
    AttnProblem,
)
from tl_attention.problem.program import stored_dtype

# Schedules: which CTA computes which tile.
#   grid        one CTA per tile, longest tiles first
#   persistent  one CTA per SM; it computes every ctas-th tile
#   dynamic     one CTA per SM; it draws the number of its next tile from a counter
#   stream-K    as persistent; CTAs share the last tiles by their keys, under a causal mask all tiles. Not with options and programs, in
#               fp32, nor with hold_max under a causal mask
SCHEDULES = ("grid", "persistent", "dynamic", "stream-K")

# Gradients that one backward pass computes. "dq" alone: a CTA owns queries and loops over keys. The others: a CTA owns keys and
# loops over queries; if dq is among them it adds its share of dq to fp32 sums, in no fixed order.
GRADS = ("dq+dk+dv", "dq+dk", "dk+dv", "dk", "dv", "dq")

# Default depth of the K and V rings of a forward: 3 was searched wherever it fits and never won (bf16, H200, 2026-11-21)
KV_STAGES = 2

# Numbers of adjacent cache rows that a kernel may load at once; 0: keys without pages, else a divisor of the page size
PAGE_ROWS = (0, 16, 64)

# Constants by which a decode is divided among CTAs, fitted to an H200 on 2026-11-30 (docs/notes/2026-11-30-items-of-a-decode.md,
# -equal-splits.md).
# Least number of key blocks of an equal split, and of work units of a CTA: with fewer, merging takes longer than another CTA saves
MIN_BLOCKS_PER_CTA = 2
# Bytes of keys and values that an SM reads in the time that an item takes beside them, by consumer warpgroups; fitted at d128
BYTES_OF_AN_ITEM = {1: 128 * 1024, 2: 192 * 1024}
# Equal splits are taken if no CTA has more keys than the mean plus KEYS_OF_A_MERGE, which take about as long as to merge the partials of
# an item, plus a sixteenth of the mean, at most MORE_KEYS
KEYS_OF_A_MERGE, MORE_KEYS = 192, 384
# Partials of an item from which on the kernel that merges them loads more at a time. More equal splits than that have twice as many key
# blocks at least
MANY_PARTIALS = 64

# Fields of an entry of Merges, which DecodeCombine reads, and the int32 numbers that an entry has room for
MERGE_FIELDS = ("b", "kv_head", "m_block", "parts", "first_slot")
MERGE_NUMBERS = 8


@dataclass(frozen=True)
class FwdConfig:
    """Tiles and schedule of a forward kernel."""

    block_M: int  # queries per tile, 64 per consumer warpgroup
    block_N: int  # keys per step
    ping_pong: bool = False  # warpgroups alternate at the tensor cores
    schedule: str = "grid"  # one of SCHEDULES
    q_stages: float = 1  # depth of the Q ring; 2 prefetches the queries of the next tile, 1.5 those of the first of two warpgroups
    split: bool = False  # several CTAs per tile, each with a split of its keys; FwdCombine merges them
    # Hold each row max after the masked steps; not in fp16. A tile whose row sums then overflow is computed a second time without it
    hold_max: bool = False
    page_rows: int = 0  # one of PAGE_ROWS
    kv_stages: int = KV_STAGES  # depth of the K ring and of the V ring
    # fp32: stages in which idle warps make the terms of the inputs beside attention; 0: a kernel before makes them. Not with options and
    # programs
    term_stages: int = 0
    # The bits of a query's result depend on its own keys alone: not with hold_max, split and stream-K. See configs.choose_invariant()
    batch_invariant: bool = False
    # Store the largest score of each query: not with hold_max, split and stream-K. See storing_max
    max_logits: bool = False

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups; one more holds the producer warp."""
        return self.block_M // 64

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    def __str__(self) -> str:
        words = [f"{self.block_M}x{self.block_N}", self.schedule]
        if self.q_stages > 1:
            words.append(f"q{self.q_stages}")
        if self.kv_stages != KV_STAGES:
            words.append(f"kv{self.kv_stages}")
        flags = "ping_pong", "split", "hold_max", "batch_invariant", "max_logits"
        words += [name.replace("_", "-") for name in flags if getattr(self, name)]
        if self.term_stages:
            words.append(f"terms{self.term_stages}")
        if self.page_rows:
            words.append(f"pages {self.page_rows}")
        return " ".join(words)

    @property
    def makes_terms(self) -> bool:
        return self.term_stages > 0

    def without_hold_max(self) -> FwdConfig:
        """The config for kernels that cannot hold the row max, as in fp16 and with splits.

        ping_pong stays on only with three warpgroups: with two it is faster only beside a held row max.
        """
        if not self.hold_max:
            return self
        ping_pong = self.ping_pong and self.warpgroups > 2
        return replace(self, hold_max=False, ping_pong=ping_pong)

    def paged(self, problem: AttnProblem, page_rows: int) -> FwdConfig:
        """The config for keys in pages, without a third Q slot. page_rows: one of PAGE_ROWS; 0: keys in one tensor.

        Kernels for pages begin at the last key, also where others begin near the diagonal, so a held row max of ALiBi would overflow.
        """
        if not page_rows:
            return self
        held = self.without_hold_max() if problem.bias_has_two_sides else self
        return replace(held, page_rows=page_rows, q_stages=int(self.q_stages))

    @property
    def merging(self) -> FwdConfig:
        """The config for the option `added`: a tile that is computed twice, or that CTAs share, would be merged twice."""
        schedule = "persistent" if self.schedule == "stream-K" else self.schedule
        return replace(self, hold_max=False, schedule=schedule)

    @property
    def storing_max(self) -> FwdConfig:
        """The config that stores the largest scores: each step looks for them, and one CTA has all keys of a query."""
        schedule = "persistent" if self.schedule == "stream-K" else self.schedule
        return replace(self.without_hold_max(), schedule=schedule, max_logits=True)

    def paged_forms(self, problem: AttnProblem) -> list[FwdConfig]:
        """The config for keys in pages of every size."""
        return [self.paged(problem, rows) for rows in PAGE_ROWS if rows]

    def kernels(self, problem: AttnProblem) -> list[tuple[AttnProblem, KernelConfig]]:
        """Every kernel this config compiles for a problem."""
        found: list[tuple[AttnProblem, KernelConfig]] = [(problem, self)]
        if self.split:
            # It sees the rows of packed sequences as one batch entry
            found.append((problem.plain.helper_problem(problem.head_dim_v), FwdCombine()))
        return found + terms_kernels(problem, self.makes_terms) + table_kernels(problem)


@dataclass(frozen=True)
class FwdCombine:
    """The kernel after a split forward: merges the outputs and log-sum-exps of the CTAs of a tile."""

    rows: int = 4  # queries per CTA
    threads: int = 128

    def __str__(self) -> str:
        return f"combine {self.rows}"


@dataclass(frozen=True)
class JvpConfig:
    """Tiles of the kernel of a forward and its derivative along a direction."""

    block_M: int  # queries per tile, 64 per consumer warpgroup
    block_N: int  # keys per step
    ping_pong: bool = False  # warpgroups alternate at the products of S and tS

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups; one more holds the producer warp."""
        return self.block_M // 64

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    def __str__(self) -> str:
        return f"jvp {self.block_M}x{self.block_N}" + " ping-pong" * self.ping_pong


# Tile width -> config. Numbers: TFLOPS of B4 8k, full and causal, counted as three times the forward (H200, 2026-11-22)
JVP_CONFIGS = {
    # 616 and 660, 32 heads; with ping_pong 608 and 580; block_N 96: 615 and 655, 80: 578 and 550
    "d64": JvpConfig(128, 112),
    "d96": JvpConfig(128, 80),  # the widest that fits; checked, but not timed
    # 703 and 695, 16 heads; without ping_pong 674 and 651; block_N 48 without it: 638 and 591
    "d128": JvpConfig(128, 64, ping_pong=True),
}


def jvp_kernels() -> list[tuple[AttnProblem, JvpConfig]]:
    """Every kernel of forward mode."""
    return [
        (problem, JVP_CONFIGS[problem.width])
        for dtype in HALF_DTYPES
        for width in JVP_TILE_WIDTHS
        for problem in (AttnProblem(dtype, *width, causal) for causal in (False, True))
    ]


# Orders of operations in a step of the pass that sums dq.
#   ""           dq of the previous step is added before dS
#   early-sums   the same, but for the slots of dS
#   late-sums    dq of the previous step is added at the end of the step
#   separate-dS  dS has registers of its own: the product of dV reads P beside it
#   apart        a third warpgroup computes and adds dq, see kernels/backward/dq_sinks/apart.py;
#                without reuse_registers dP is computed beside the exponentials, and dV beside dS
# Except for "", dS has two slots in shared memory: a warpgroup writes one while others read that of the previous step.
DQ_ORDERS = ("", "early-sums", "late-sums", "separate-dS", "apart")

# Schedules of a pass by keys; all but grid need an order that is not "". In fp32 grid, and dynamic in a pass that makes all gradients
#   grid          one CTA per tile, longest tiles first
#   dynamic       one CTA per SM, drawing the next tile when one begins; without options
#   dynamic-late  one CTA per SM, drawing the next tile when all loads of one are issued
#   ordered       as dynamic-late; tiles add to dq in the order in which they are drawn, so always in the same. Without options
#   stream-K      as dynamic-late; CTAs may share the last key tiles by their queries (causal: all). No option but a window or ALiBi
BWD_SCHEDULES = ("grid", "dynamic", "dynamic-late", "ordered", "stream-K")


@dataclass(frozen=True)
class BwdPass:
    """Tiles of one kernel of a backward."""

    grads: str  # one of GRADS
    block_M: int  # queries per step; in "dq" queries per CTA, 64 per consumer warpgroup
    block_N: int  # keys per CTA, 64 per consumer warpgroup; in "dq" keys per step
    num_stages: int = 2  # depth of the Q ring; in "dq" of the K ring
    num_stages_do: int = 2  # depth of the dO ring; in "dq" of the V ring
    reuse_registers: bool = False  # dP reuses the registers of S, and dS those of P; not for "dq"
    order: str = ""  # one of DQ_ORDERS where dq is summed
    schedule: str = "grid"  # one of BWD_SCHEDULES
    # All keys of a head are in one tile of block_N keys: dq of a step is whole, and is stored. With the schedule dynamic-late or stream-K
    one_tile: bool = False
    term_stages: int = 0  # as in FwdConfig; of the first pass, by keys
    one_sum: bool = False  # fp32: one accumulator sums all blocks, not one per block; for few rows, see kernels/seams/products.py
    rounds_dq: bool = False  # warps of the pass round dq, see kernels/backward/dq_sinks/round.py. Only in the order apart, see legality.py

    @property
    def makes_terms(self) -> bool:
        return self.term_stages > 0

    def rounds(self, problem: AttnProblem) -> bool:
        """True if warps of the pass round dq. With `partial` dq is fp32, and a kernel after the pass stores it."""
        return self.rounds_dq and not problem.has("partial")

    @property
    def makes(self) -> tuple[str, ...]:
        return tuple(self.grads.split("+"))

    @property
    def adds_dq(self) -> bool:
        """True if the pass adds to fp32 sums of dq; in no fixed order unless it is_ordered."""
        return self.makes_all and not self.one_tile

    @property
    def makes_all(self) -> bool:
        """True if the pass makes dq beside dk and dv."""
        return "dq" in self.makes and self.grads != "dq"

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups; one more holds the warps that load, and store dq."""
        return (self.block_M if self.grads == "dq" else self.block_N) // 64

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1 + self.dq_apart)

    @property
    def dq_apart(self) -> bool:
        """True if a warpgroup beside those that own keys computes dq."""
        return self.order == "apart"

    def __str__(self) -> str:
        words = [f"{self.grads} {self.block_M}x{self.block_N}x{self.num_stages}x{self.num_stages_do}"]
        words += ["reuse"] * self.reuse_registers + [self.order] * bool(self.order)
        words += [self.schedule] * self.is_persistent + ["one-tile"] * self.one_tile
        words += [f"terms{self.term_stages}"] * self.makes_terms
        return " ".join(words + ["rounds-dq"] * self.rounds_dq + ["one-sum"] * self.one_sum)

    @property
    def is_persistent(self) -> bool:
        """True if a CTA computes several tiles."""
        return self.schedule != "grid"

    @property
    def draws_late(self) -> bool:
        """True if a CTA draws its next tile when all loads of one are issued."""
        return self.schedule in ("dynamic-late", "ordered", "stream-K")

    @property
    def is_stream_k(self) -> bool:
        """True if several CTAs may divide the queries of a key tile."""
        return self.schedule == "stream-K"

    @property
    def is_ordered(self) -> bool:
        """True if additions to dq have a fixed order."""
        return self.schedule == "ordered"

    def has_linear_bias(self, problem: AttnProblem) -> bool:
        """True if a causal ALiBi bias is a matrix product. Not in the order apart, where ptxas serializes all wgmma (C7512, d128)."""
        return problem.bias_is_linear and not self.dq_apart

    def has_five_counts(self, problem: AttnProblem) -> bool:
        """True if the query blocks of a key tile have five counts, see sources/query_blocks.py; else they have fewer."""
        return problem.is_listed or (self.is_stream_k and problem.has("window"))

    def has_dv_tile(self, problem: AttnProblem) -> bool:
        """True if dV is stored through shared memory of its own, so that the next V can be loaded meanwhile; else through that of V."""
        # At 1k keys, against dV through V: d128 5.7 % faster full and 2.2 % causal, d64 2.0 % slower full and 0.5 % causal (H200)
        # 128 columns fit beside two stages of Q only, and not beside the P' of dropout, tiles of dQ or values per diagonal
        others = problem.has("dropout") or problem.has_diagonals or self.one_tile or self.dq_apart
        fits = problem.head_dim_v < 128 or (self.num_stages == 2 and not others)
        return self.is_persistent and problem.head_dim_v > 64 and fits and not problem.is_fp32


@dataclass(frozen=True)
class BwdConfig:
    """The passes of a backward, which compute dq, dk and dv once each."""

    passes: tuple[BwdPass, ...]

    @classmethod
    def of(cls, passes: Iterable[dict[str, object]]) -> BwdConfig:
        """Build from the fields of each pass, as tables hold them."""
        return cls(tuple(BwdPass(**fields) for fields in passes))

    @property
    def deterministic(self) -> bool:
        return not any(bwd_pass.adds_dq and not bwd_pass.is_ordered for bwd_pass in self.passes)

    @property
    def is_stream_k(self) -> bool:
        return any(bwd_pass.is_stream_k for bwd_pass in self.passes)

    @property
    def makes_terms(self) -> bool:
        return self.passes[0].makes_terms

    def kernels(self, problem: AttnProblem) -> list[tuple[AttnProblem, KernelConfig]]:
        """Every kernel this config compiles for a problem: the passes and their helpers."""
        problem, widths = problem.compiled_as, sorted({problem.head_dim, problem.head_dim_v})
        return [
            *((problem, bwd_pass) for bwd_pass in self.passes),
            (problem.helper_problem(delta_width(problem.head_dim_v)), BwdDelta()),
            *((problem.sum_problem(width), BwdSum()) for width in widths),
            *((problem.sum_problem(width), BwdSum(shared=True)) for width in widths if self.is_stream_k),
            *terms_kernels(problem, self.makes_terms),
            *table_kernels(problem),
            *dict.fromkeys(reduce_kernels(problem).values()),
        ]

    def __str__(self) -> str:
        return ", ".join(map(str, self.passes))


@dataclass(frozen=True)
class BwdDelta:
    """The kernel before the passes: rowsum(dO * O), and the log-sum-exp in base 2."""

    rows: int = 64  # queries per CTA
    threads: int = 128

    def __str__(self) -> str:
        return f"delta {self.rows}"


def delta_width(head_dim_v: int) -> int:
    """The tile width of BwdDelta, a power of two: TileLang 0.1.15 finds no layout for the row sums of 96 columns."""
    return 1 << (head_dim_v - 1).bit_length()


@dataclass(frozen=True)
class BwdSum:
    """The kernel after the passes: converts fp32 sums to a gradient in the input dtype."""

    rows: int = 16  # rows of the gradient per CTA
    threads: int = 128
    shared: bool = False  # of the key tiles alone that several CTAs share, after a stream-K pass

    def __str__(self) -> str:
        return f"sum {self.rows}" + " shared" * self.shared


@dataclass(frozen=True)
class BwdReduce:
    """The kernel after the passes: sums stored gradients of captured tensors over batch entries or heads."""

    threads: int = 256  # 16 bytes of the result each

    def __str__(self) -> str:
        return f"reduce {self.threads}"


def reduce_kernels(problem: AttnProblem) -> dict[int, tuple[AttnProblem, KernelConfig]]:
    """Number of a stored gradient of the problem's program that is summed -> the kernel that sums it."""
    program = problem.program
    if program is None:
        return {}
    summed = [number for number in program.stored if program.outer_dims(number)[1]]
    dtypes = {number: stored_dtype(program.tensors[program.gradients[number].tensor]) for number in summed}
    fp32 = next(iter(FP32_DTYPES))
    return {
        number: (AttnProblem(fp32 if dtype == "float32" else dtype, 64, 64, False), BwdReduce())
        for number, dtype in dtypes.items()
    }


@dataclass(frozen=True)
class TileTable:
    """The kernel before every varlen kernel: a table of the tiles of all packed sequences."""

    threads: int = 1024

    def __str__(self) -> str:
        return f"tile table {self.threads}"


def table_kernels(problem: AttnProblem) -> list[tuple[AttnProblem, KernelConfig]]:
    """The tile table kernel, the same for all problems with varlen; none for others."""
    if not problem.has("varlen"):
        return []
    return [(AttnProblem(DEFAULT_DTYPE, 64, 64, False, ("varlen",)), TileTable())]


@dataclass(frozen=True)
class DecodeConfig:
    """Tiles of a decode kernel. A tile holds the queries of all heads that share a key head."""

    warpgroups: int = 1  # each computes 64 rows of the tile; with v_in_k all compute the same 64 rows
    block_N: int = 64  # keys per step
    num_stages: int = 3  # depth of the K ring and of the V ring
    page_rows: int = 0  # one of PAGE_ROWS
    ctas_per_sm: int = 2
    v_in_k: bool = False  # V is the first columns of K: V is not loaded, and warpgroups divide its columns
    # The operations of a batch_invariant forward, on its key blocks and in its order, from the last block on. Keys are not split
    batch_invariant: bool = False

    @property
    def divides_columns(self) -> bool:
        return self.v_in_k

    @property
    def block_M(self) -> int:
        return 64 if self.divides_columns else 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """One producer warp; with two consumer warpgroups a whole producer warpgroup, whose registers they use."""
        return 128 * self.warpgroups + (32 if self.warpgroups == 1 else 128)

    def item_blocks(self, problem: AttnProblem) -> int:
        """Key blocks that take as long as an item takes beside its keys."""
        columns = problem.head_dim + (0 if self.v_in_k else problem.head_dim_v)
        block_bytes = self.block_N * columns * problem.element_bytes
        return BYTES_OF_AN_ITEM[self.warpgroups] // self.ctas_per_sm // block_bytes

    def columns(self, problem: AttnProblem) -> int:
        """Columns of O per warpgroup."""
        return problem.head_dim_v // (self.warpgroups if self.divides_columns else 1)

    def first_column(self, problem: AttnProblem, warpgroup: int) -> int:
        return self.columns(problem) * warpgroup if self.divides_columns else 0

    def combine(self, problem: AttnProblem, partials: int = 1) -> tuple[AttnProblem, DecodeCombine]:
        """The kernel that merges the partials of items.

        Args:
            partials: of an item, about.
        """
        columns = self.columns(problem)
        options = ("sink",) if problem.has("sink") else ()
        merged = AttnProblem(problem.dtype, columns, columns, False, options)
        return merged, DecodeCombine.for_partials(partials, columns, self.divides_columns)

    def kernels(self, problem: AttnProblem) -> list[tuple[AttnProblem, KernelConfig]]:
        """Every kernel this config compiles for a problem."""
        combines = dict.fromkeys((self.combine(problem), self.combine(problem, MANY_PARTIALS)))
        return [(problem, self), *combines]

    def __str__(self) -> str:
        text = f"decode {self.warpgroups}x{self.block_N}x{self.num_stages}x{self.ctas_per_sm}"
        pages = f" pages {self.page_rows}" if self.page_rows else ""
        return f"{text}{pages}{' v-in-k' * self.v_in_k}{' batch-invariant' * self.batch_invariant}"


def page_rows(page_size: int) -> int:
    """The largest entry of PAGE_ROWS that divides page_size."""
    return max(rows for rows in PAGE_ROWS[1:] if page_size % rows == 0)


@dataclass(frozen=True)
class DecodeCombine:
    """The kernel after a decode: merges the outputs and log-sum-exps of the splits of an item."""

    divides_columns: bool = False  # as in DecodeConfig
    rows: int = 4  # rows of queries per CTA
    at_once: int = 8  # splits loaded at a time
    threads: int = 128

    @classmethod
    def for_partials(cls, partials: int, columns: int, divides_columns: bool) -> DecodeCombine:
        """The config for items of so many partials. With many, fewer rows per CTA leave registers for more loads at a time."""
        if partials < MANY_PARTIALS or columns != 128:  # other widths were not measured
            return cls(divides_columns)
        return cls(divides_columns, rows=2, at_once=32)

    def __str__(self) -> str:
        text = f"decode combine {self.rows}x{self.at_once}"
        return f"{text} columns" if self.divides_columns else text


@dataclass(frozen=True)
class AppendConfig:
    """The kernel before a decode: writes new keys and values to the cache, and rotates them and the queries."""

    threads: int = 256

    def __str__(self) -> str:
        return f"append {self.threads}"


def append_kernel(dtype: str) -> tuple[AttnProblem, AppendConfig]:
    """The append kernel of a dtype; one serves all widths."""
    return AttnProblem(dtype, 64, 64, False), AppendConfig()


Config = FwdConfig | BwdConfig
KernelConfig = (
    FwdConfig
    | TermsConfig
    | FirstTermsConfig
    | FwdCombine
    | JvpConfig
    | BwdPass
    | BwdDelta
    | BwdSum
    | BwdReduce
    | TileTable
    | DecodeConfig
    | DecodeCombine
    | AppendConfig
)


def sum_columns(problem: AttnProblem, bwd_pass: BwdPass) -> int | None:
    """Columns of each of the two accumulators of one block in an fp32 backward, see kernels/seams/products.py; None if it has none."""
    if not problem.is_fp32 or (bwd_pass.one_sum and not bwd_pass.adds_dq):
        return None
    columns = 64 if problem.head_dim == 64 else 32
    return bwd_pass.block_M if bwd_pass.adds_dq else columns  # dQ' uses them in turn with dK and dV
