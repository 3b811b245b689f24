"""Legality of a config for a problem: models of shared memory and registers, and the rules of the kernels.

The tuner, the tests of stored rows and an explicit `config=` all ask fault().
"""

from __future__ import annotations

from tl_attention.config.kernel_configs import (
    BWD_SCHEDULES,
    DQ_ORDERS,
    GRADS,
    KV_STAGES,
    PAGE_ROWS,
    SCHEDULES,
    AppendConfig,
    BwdDelta,
    BwdPass,
    BwdReduce,
    BwdSum,
    Config,
    DecodeCombine,
    DecodeConfig,
    FirstTermsConfig,
    FwdCombine,
    FwdConfig,
    JvpConfig,
    KernelConfig,
    TermsConfig,
    sum_columns,
)
from tl_attention.config.round_configs import ROUNDING_BYTES
from tl_attention.config.term_configs import TERM_STAGES, staging_bytes
from tl_attention.problem.attn_problem import MAX_SPLITS, TABLE_ROWS, AttnProblem
from tl_attention.problem.program import LISTED_ROWS
from tl_attention.problem.target import SMEM_LIMIT

BARRIER_BYTES = 1024  # static shared memory reserved for barriers
TILE_BOX_BYTES = 64  # seams.scheduler.TileBox
TABLE_BOX_BYTES = 96  # TileBox with a tile table (varlen)
KEY_TABLE_BOX_BYTES = 128  # backward.key_tiles.KeyTileBox with a tile table
# KeyTileBox without a table: with the schedule ordered, or with five counts of query blocks
LARGE_BOX_BYTES = 96
HOLD_MAX_BYTES = 16  # flags of tiles that need a second run, two int32 per tile in flight
SEGMENT_BOX_BYTES = 80  # kernels.decode.work.SegmentBox: 2 slots of 10 int32
BIAS_BYTES = 32  # per column: 16 bf16 numbers, kernels.linear_bias.alloc_bias_columns
FP32_BYTES = 4
DQ_PIECE = 64 * 64  # elements of dq at a time in the order "apart", see kernels/backward/dq_sinks/apart.py
MAKER_COLUMNS = 128  # most columns of a row that a warp splits in kernels/fp32/input_terms.py, four per lane
CHUNK = 64  # columns of the accumulator of one block in fp32, see kernels/seams/products.py
TILE_ALIGNMENT = 1024  # bytes; every tile starts at a multiple
# Accumulator registers per thread, by number of consumer warpgroups. The rest of a thread's 240 (one or two warpgroups) or 160 (three)
# hold addresses and row statistics
ACCUMULATOR_REGISTERS = {
    FwdConfig: {1: 216, 2: 216, 3: 128},
    BwdPass: {1: 240, 2: 232, 3: 152},
    JvpConfig: {1: 232, 2: 232, 3: 152},
}


def smem_bytes(problem: AttnProblem, config: KernelConfig) -> int:
    """Dynamic shared memory of a kernel. Its barriers are static and need BARRIER_BYTES more."""
    if isinstance(config, FwdConfig):
        return _fwd_smem_bytes(problem, config)
    if isinstance(config, BwdPass):
        return _pass_smem_bytes(problem, config)
    if isinstance(config, JvpConfig):
        return _jvp_smem_bytes(problem, config)
    if isinstance(config, DecodeConfig):
        return _decode_smem_bytes(problem, config)
    if isinstance(config, DecodeCombine):
        # Per row: a weight per split in flight, and in arrays at multiples of 16 bytes their scale, its query and head
        return FP32_BYTES * (config.rows * config.at_once + 3 * -(-config.rows // 4) * 4)
    if isinstance(config, AppendConfig | BwdReduce):
        return 0
    if isinstance(config, FirstTermsConfig):
        return staging_bytes(config.stages, config.warps)
    if isinstance(config, TermsConfig):
        # The tile of X is free when the terms are written, so they share memory
        return max(FP32_BYTES, problem.element_bytes) * config.rows * problem.head_dim
    tiles = {BwdDelta: 2, BwdSum: 1, FwdCombine: 1}[type(config)]  # O and dO; the gradient; O
    weights = FP32_BYTES * config.rows * MAX_SPLITS if isinstance(config, FwdCombine) else 0
    return problem.output_bytes * tiles * config.rows * problem.head_dim + weights


def _fwd_smem_bytes(problem: AttnProblem, config: FwdConfig) -> int:
    rows_qk = int(config.q_stages * config.block_M) + config.kv_stages * config.block_N
    rows_v = config.kv_stages * config.block_N
    # O needs a tile of its own unless it is as wide as Q, whose tile it reuses, or leaves from registers
    if problem.head_dim != problem.head_dim_v and not config.split and not problem.is_fp32:
        rows_v += config.block_M
    smem = problem.element_bytes * (rows_qk * problem.head_dim + rows_v * problem.head_dim_v)
    if config.schedule != "grid":
        # A description of causal stream-K has 10 numbers, padded to 12
        shares_causal = config.schedule == "stream-K" and problem.causal
        smem += TABLE_BOX_BYTES if problem.has("varlen") or shares_causal else TILE_BOX_BYTES
    if config.hold_max:
        smem += HOLD_MAX_BYTES
    smem += staging_bytes(config.term_stages)
    per_warp = sum(problem.staged_bytes(config.block_N)) + problem.diagonal_bytes(config.block_N)
    staged = 4 * config.warpgroups * per_warp
    two_sides = problem.bias_has_two_sides and not config.split and config.page_rows == 0
    bias = 2 * BIAS_BYTES * config.block_N if two_sides else _bias_bytes(problem, config.block_N)
    return smem + bias + staged


def _jvp_smem_bytes(problem: AttnProblem, config: JvpConfig) -> int:
    """Tiles of Q, K, V and of their tangents; the outputs are stored through the tiles of Q."""
    step = KV_STAGES * config.block_N
    elements = (config.block_M + step) * problem.head_dim + step * problem.head_dim_v
    return 2 * problem.element_bytes * elements


def _pass_smem_bytes(problem: AttnProblem, bwd_pass: BwdPass) -> int:
    owned, step = _owned_and_step(bwd_pass)
    rows_qk = owned + bwd_pass.num_stages * step
    rows_v = bwd_pass.num_stages_do * step
    # V, or dO in "dq"; "dv" has no V, and dV leaves through the tile of K if that is as wide
    if bwd_pass.grads != "dv" or problem.head_dim != problem.head_dim_v:
        rows_v += owned
    elements = rows_qk * problem.head_dim + rows_v * problem.head_dim_v
    if bwd_pass.makes_all:
        elements += (2 if bwd_pass.order else 1) * owned * step  # dS
    if bwd_pass.one_tile:
        elements += step * problem.head_dim  # dQ
    if bwd_pass.dq_apart:
        elements += DQ_PIECE * FP32_BYTES // problem.element_bytes  # dQ on its way to the sums
    if bwd_pass.reuse_registers and "dv" in bwd_pass.makes and problem.has("dropout"):
        elements += owned * step  # P
    row_values = 0
    if bwd_pass.grads != "dq":  # each row of Q brings its log-sum-exp and, but in "dv", its delta
        per_row = 1 if bwd_pass.grads == "dv" else 2
        # A tile whose rows are no multiple of 64 elements has a swizzle of 64 bytes, which needs half the alignment. dS has 128
        whole_swizzle = problem.head_dim % 64 == 0 or bwd_pass.makes_all
        alignment = TILE_ALIGNMENT if whole_swizzle else TILE_ALIGNMENT // 2
        row_values = _round_up(FP32_BYTES * step * bwd_pass.num_stages * per_row, alignment)
    if bwd_pass.is_persistent:
        if not problem.is_fp32:  # dK, and maybe dV, leave while the next keys come
            elements += owned * (problem.head_dim + problem.head_dim_v * bwd_pass.has_dv_tile(problem))
        is_large = bwd_pass.is_ordered or bwd_pass.has_five_counts(problem)
        box = LARGE_BOX_BYTES if is_large else TILE_BOX_BYTES
        row_values += KEY_TABLE_BOX_BYTES if problem.has("varlen") else box
    staged = sum(problem.staged_bytes(step, bwd_pass.grads != "dq")) + problem.diagonal_bytes(step)
    if "dq" in bwd_pass.makes and problem.learns and not (bwd_pass.adds_dq and problem.sends_dS):
        staged += sum(problem.program.stored_bytes(16, step))
    return (
        problem.element_bytes * elements
        + BIAS_BYTES * step * bwd_pass.has_linear_bias(problem)
        + row_values
        + staging_bytes(bwd_pass.term_stages)
        + ROUNDING_BYTES * bwd_pass.rounds(problem)
        + 4 * bwd_pass.warpgroups * staged
    )


def _decode_smem_bytes(problem: AttnProblem, config: DecodeConfig) -> int:
    step = config.num_stages * config.block_N
    rows_qk = config.block_M + step
    rows_v = 0 if config.v_in_k else step
    tiles = problem.element_bytes * (rows_qk * problem.head_dim + rows_v * problem.head_dim_v)
    # Per row: its query, head, position, and where the option is on slope, sink, and two words of bits
    numbers = 3 + problem.has("alibi") + problem.has("sink") + 2 * problem.has("tree")
    return tiles + FP32_BYTES * 64 * config.warpgroups * numbers + SEGMENT_BOX_BYTES


def _bias_bytes(problem: AttnProblem, columns: int) -> int:
    return BIAS_BYTES * columns if problem.bias_is_linear else 0


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def accumulator_registers(problem: AttnProblem, config: FwdConfig | JvpConfig | BwdPass) -> int:
    """Registers per consumer thread for 64 rows of accumulators per warpgroup.

    Forward: S and O in fp32, P in the input dtype; in forward mode also the tangents of all three. Backward: S, dP and the
    gradients in fp32, P and dS in the input dtype; with reuse_registers dP shares those of S, and dS those of P except in the order
    "separate-dS".
    """

    def fp32(columns: int) -> int:
        return columns // 2

    def narrow(columns: int) -> int:
        return columns * problem.element_bytes // 8

    if isinstance(config, FwdConfig):
        block_sum = fp32(CHUNK) if problem.is_fp32 else 0
        return fp32(config.block_N) + narrow(config.block_N) + fp32(problem.head_dim_v) + block_sum
    if isinstance(config, JvpConfig):
        return 2 * (fp32(config.block_N) + narrow(config.block_N) + fp32(problem.head_dim_v))
    _, step = _owned_and_step(config)
    has_p, has_ds = "dv" in config.makes, config.grads != "dv"
    widths = {"dq": problem.head_dim, "dk": problem.head_dim, "dv": problem.head_dim_v}
    sums = fp32(sum(widths[grad] for grad in config.makes if not (grad == "dq" and config.makes_all)))
    # The second accumulator of a block uses the registers of dP
    sums += fp32(sum_columns(problem, config) or 0)
    learned = _learned_tiles(problem, config) * fp32(step)
    if config.grads == "dq" and problem.is_fp32:
        # The terms of dS take the registers of dP and of the learned tiles
        return sums + fp32(step) + max(fp32(step) + learned, narrow(step))
    if config.reuse_registers:
        # If scores have a slope (softcap, score_mod), dS and dV use different P
        tiles = (2 if has_p and problem.is_sloped else 1) + (config.order == "separate-dS")
        return sums + fp32(step) + tiles * narrow(step)
    scores = fp32(step) * (2 if has_ds else 1)
    return sums + scores + learned + narrow(step) * (int(has_p) + int(has_ds))


def _learned_tiles(problem: AttnProblem, config: BwdPass) -> int:
    """Fragments of scores that the gradients of captured tensors need: kept scores, and gradients that are stored."""
    if config.grads != "dq" or not problem.learns:
        return 0
    return int(problem.program.learns_from_scores) + len(problem.program.stored)


def _owned_and_step(bwd_pass: BwdPass) -> tuple[int, int]:
    """(rows per CTA, rows per step)"""
    if bwd_pass.grads == "dq":
        return bwd_pass.block_M, bwd_pass.block_N
    return bwd_pass.block_N, bwd_pass.block_M


def _listed_fault(problem: AttnProblem, block_M: int, block_N: int) -> str | None:
    """The reason why tiles do not divide the blocks of a block mask; None if they do."""
    for name, rows in (("block_M", block_M), ("block_N", block_N)):
        if problem.is_listed and LISTED_ROWS % rows:
            return f"{name}: expected a divisor of {LISTED_ROWS} with a block mask, got {rows}"
    return None


def fault(problem: AttnProblem, config: Config | JvpConfig, direction: str | None = None) -> str | None:
    """The reason why a config cannot run a problem, or only with spills; None if it can.

    direction: one of DIRECTIONS that the config must serve; None for any that it fits.
    """
    if isinstance(config, FwdConfig):
        return _fwd_fault(problem, config)
    if isinstance(config, JvpConfig):
        return _jvp_fault(problem, config)
    for bwd_pass in config.passes:
        if reason := _pass_fault(problem, bwd_pass):
            return f"{bwd_pass}: {reason}"
    for bwd_pass in config.passes[1:]:
        if bwd_pass.makes_terms:
            return f"term_stages: expected 0 after the first pass, got {bwd_pass.term_stages}"
    made = sorted(grad for bwd_pass in config.passes for grad in bwd_pass.makes)
    if made != ["dk", "dq", "dv"]:
        return f"passes: expected dk, dq and dv once each, got {', '.join(made) or 'nothing'}"
    if problem.is_fp32 and "dk" not in config.passes[0].makes:
        return f"passes: expected dk in the first one in fp32, which splits K and V for the others, got {config.passes[0].grads}"
    if direction == "bwd_det" and not config.deterministic:
        return f"{config}: sums dq in no fixed order; expected the schedule ordered, or a pass that makes dq alone"
    return None


def _rows_fault(name: str, rows: int) -> str | None:
    """The reason why a CTA cannot own tiles of so many rows; None if it can."""
    if rows in (64, 128, 192):
        return None
    return f"{name}: expected 64, 128 or 192 (64 rows per consumer warpgroup), got {rows}"


def _keys_fault(block_N: int) -> str | None:
    """The reason why a step of a CTA that owns queries cannot have so many keys; None if it can."""
    if block_N % 16 == 0 and 16 <= block_N <= 256:
        return None
    return f"block_N: expected a multiple of 16 in 16..256, got {block_N}"


def _table_fault(problem: AttnProblem, name: str, rows: int) -> str | None:
    """The reason why blocks of so many rows do not divide the tiles of packed sequences; None if they do."""
    if problem.has("varlen") and TABLE_ROWS % rows:
        return f"{name}: expected a divisor of {TABLE_ROWS} with varlen, got {rows}"
    return None


def _query_tile_fault(config: FwdConfig | JvpConfig) -> str | None:
    """The reason why the tiles of a forward cannot be computed, or not in ping-pong; None if they can."""
    if fault := _rows_fault("block_M", config.block_M) or _keys_fault(config.block_N):
        return fault
    if config.ping_pong and config.warpgroups < 2:
        return f"ping_pong: expected block_M of at least 128 (2 warpgroups), got {config.block_M}"
    return None


def _fwd_fault(problem: AttnProblem, config: FwdConfig) -> str | None:
    if fault := _query_tile_fault(config):
        return fault
    if config.schedule not in SCHEDULES:
        return f"schedule: expected one of {', '.join(SCHEDULES)}, got {config.schedule!r}"
    if config.schedule == "stream-K" and not problem.can_share:
        return "schedule: expected another than shared with options or a program and in fp32, got shared"
    if config.schedule == "stream-K" and config.hold_max and problem.causal:
        return "hold_max: expected False where CTAs share all tiles of a causal mask, got True"
    if config.q_stages not in (1, 1.5, 2):
        return f"q_stages: expected 1, 1.5 or 2, got {config.q_stages}"
    if config.q_stages > 1 and config.schedule == "grid":
        return f"q_stages: expected 1 with the schedule grid, whose CTAs have no next tile, got {config.q_stages}"
    if config.q_stages == 1.5:
        if config.kv_stages == 1:
            return "q_stages: expected 1 or 2 with kv_stages 1, as Q of warpgroup 1 is loaded after the second K, got 1.5"
        if config.warpgroups != 2 or config.page_rows:
            return "q_stages: expected 1 or 2 unless block_M is 128 and keys are not in pages, got 1.5"
        if problem.head_dim != problem.head_dim_v or problem.is_fp32:
            return "q_stages: expected 1 or 2 where O is not stored through the tile of Q (fp32, head_dim_v < head_dim), got 1.5"
    if config.split and config.schedule != "grid":
        return f"split: expected the schedule grid, got {config.schedule}"
    if config.hold_max and problem.dtype_of("p") != "bfloat16":
        return f"hold_max: expected bfloat16, got {problem.dtype}, whose range is too small"
    if config.hold_max and config.schedule == "grid":
        return "hold_max: expected the schedule persistent or dynamic, whose CTAs can repeat a tile, got grid"
    if config.kv_stages not in (1, 2, 3):
        return f"kv_stages: expected 1, 2 or 3, got {config.kv_stages}"
    if fault := _table_fault(problem, "block_M", config.block_M):
        return fault
    if config.batch_invariant and (config.hold_max or config.split or config.schedule == "stream-K"):
        return "batch_invariant: expected False with hold_max, split or stream-K, in which other queries change bits, got True"
    if config.max_logits and (config.hold_max or config.split or config.schedule == "stream-K"):
        return "max_logits: expected False with hold_max, split or stream-K, in which no thread has seen all scores of a query, got True"
    if config.max_logits and problem.has("added"):
        return "max_logits: expected False with added, whose result is that of other keys, too, got True"
    if config.hold_max and problem.is_listed and not problem.program.bits:
        return "hold_max: expected False with a block mask without bits, whose first blocks may hide all keys of a query, got True"
    if fault := _listed_fault(problem, config.block_M, config.block_N):
        return fault
    if fault := _terms_fault(problem, config, "with splits" if config.split else None):
        return fault
    if config.page_rows not in PAGE_ROWS:
        return f"page_rows: expected one of {', '.join(map(str, PAGE_ROWS))}, got {config.page_rows}"
    if config.page_rows and (not problem.has("varlen") or problem.has("dropout")):
        return f"page_rows: expected 0 without varlen or with dropout, got {config.page_rows}"
    return _capacity_fault(problem, config)


def _terms_fault(problem: AttnProblem, config: FwdConfig | BwdPass, other: str | None) -> str | None:
    """Reason why a kernel makes no terms. other: one that its config gives."""
    if not config.makes_terms:
        return None
    reason = other
    if not problem.is_fp32:
        reason = f"for {problem.dtype}, whose inputs have no terms"
    elif problem.head_dim > MAKER_COLUMNS:
        reason = f"for head dims above {MAKER_COLUMNS}, whose rows a warp does not split in one round"
    elif problem.options or problem.program is not None:
        reason = "with options or a program"
    if reason is not None:
        return f"term_stages: expected 0 {reason}, got {config.term_stages}"
    if config.term_stages not in TERM_STAGES:
        return (
            f"term_stages: expected 0 or one of {', '.join(map(str, TERM_STAGES))}, got {config.term_stages}"
        )
    return None


def _jvp_fault(problem: AttnProblem, config: JvpConfig) -> str | None:
    if problem.options or problem.head_dim != problem.head_dim_v:
        return f"problem: expected one width and no options, got {problem}"
    if fault := _query_tile_fault(config):
        return fault
    return _capacity_fault(problem, config)


def _pass_fault(problem: AttnProblem, bwd_pass: BwdPass) -> str | None:
    if bwd_pass.grads not in GRADS:
        return f"grads: expected one of {', '.join(GRADS)}, got {bwd_pass.grads!r}"
    owns_queries = bwd_pass.grads == "dq"
    owned, step = ("block_M", "block_N") if owns_queries else ("block_N", "block_M")
    rows, step_rows = _owned_and_step(bwd_pass)
    if fault := _rows_fault(owned, rows):
        return fault
    if owns_queries and (fault := _keys_fault(step_rows)):
        return fault
    if not owns_queries and step_rows not in (32, 64, 96, 128):
        # The log-sum-exps of a step start at a multiple of 128 bytes
        return f"{step}: expected 32, 64, 96 or 128, got {step_rows}"
    if problem.is_fp32 and bwd_pass.adds_dq:
        if problem.options:
            return "grads: expected dq in a pass of its own in fp32 with options, got dq+dk+dv"
        if step_rows not in (32, 64):
            return f"{step}: expected 32 or 64 where dq is summed in fp32, got {step_rows}"
    if problem.is_fp32 and "dv" in bwd_pass.makes:
        # P' of dV is not that of dS'
        if problem.is_sloped and "dk" in bwd_pass.makes:
            return "grads: expected dk and dv in passes of their own in fp32 where scores have a slope, got dk+dv"
        if problem.has("dropout") and bwd_pass.reuse_registers:
            return "reuse_registers: expected False for dv in fp32 with dropout, got True"
    if bwd_pass.one_sum and not problem.is_fp32:
        return "one_sum: expected False outside fp32, got True"
    if owns_queries and bwd_pass.reuse_registers:
        return "reuse_registers: expected False in the pass of dq alone, got True"
    shares_dq = bwd_pass.makes_all and not problem.is_fp32
    # A third warpgroup computes nothing of dq. Its additions to sums of dq have not been tried
    if shares_dq and rows != 128 and not (bwd_pass.one_tile and rows == 192 and step_rows == 64):
        return f"{owned}: expected 128 where dq is summed (two warpgroups share it), got {rows}"
    if bwd_pass.grads == "dq+dk" and (
        problem.served_as.options or problem.program is not None or problem.is_fp32
    ):
        return "grads: expected dq in a pass of its own, or with dk and dv, in fp32, with options or with a program, got dq+dk"
    if bwd_pass.adds_dq and problem.learns and not problem.learns_dS:
        return "grads: expected dq in a pass of its own where captured tensors get gradients, got dq+dk+dv"
    if shares_dq and step_rows % 64:
        return f"{step}: expected 64 or 128 where dq is summed, 64 rows of it at a time, got {step_rows}"
    reuses = not (bwd_pass.dq_apart and problem.head_dim <= 64)
    if shares_dq and bwd_pass.reuse_registers != reuses:
        where = (
            "where dq is summed, but for the order apart up to d64"
            if reuses
            else "in the order apart up to d64"
        )
        return f"reuse_registers: expected {reuses} {where}, got {bwd_pass.reuse_registers}"
    orders = DQ_ORDERS if shares_dq else ("",)
    if bwd_pass.order not in orders:
        elsewhere = "in fp32" if problem.is_fp32 else "where no dq is summed"
        where = "where dq is summed" if shares_dq else elsewhere
        return f"order: expected one of {', '.join(map(repr, orders))} {where}, got {bwd_pass.order!r}"
    schedules = ("grid",)
    if bwd_pass.makes_all and bwd_pass.order:
        schedules = _bwd_schedules(problem)
    elif (
        problem.is_fp32
        and problem.program is None
        and (bwd_pass.adds_dq or (bwd_pass.one_sum and not owns_queries))
    ):
        schedules = "grid", "dynamic"
    if bwd_pass.schedule not in schedules:
        where = (
            "here"
            if len(schedules) > 1
            else "with another program than a bias or a mask, without an order, or where no dq is summed"
        )
        return f"schedule: expected {' or '.join(schedules)} {where}, got {bwd_pass.schedule!r}"
    taken = {"sink", "varlen", "window", "alibi"} | ({"softcap"} if problem.width == "d64" else set())
    others = {*problem.served_as.options} - taken
    other_program = problem.program is not None and not (problem.is_mask_of_bits or problem.is_diagonal_bias)
    if bwd_pass.dq_apart and (others or other_program or bwd_pass.one_tile):
        where = (
            "one_tile, another option than sink, varlen, window, alibi or, at d64, softcap, or another program than a block mask or a "
            "bias per distance"
        )
        return f"order: expected another than 'apart' with {where}, got 'apart'"
    if bwd_pass.dq_apart and bwd_pass.schedule not in ("dynamic", "dynamic-late", "stream-K", "ordered"):
        return f"order: expected another than 'apart' with the schedule {bwd_pass.schedule}, got 'apart'"
    if bwd_pass.dq_apart and (problem.width not in ("d32", "d64", "d128") or bwd_pass.block_M != 64):
        got = f"{problem.width} in steps of {bwd_pass.block_M}"
        return f"order: expected 'apart' for d32, d64 and d128 in steps of 64 queries alone, got {got}"
    schedule = "dynamic-late" if problem.has("varlen") else "stream-K"
    if bwd_pass.rounds_dq and not (bwd_pass.dq_apart and bwd_pass.schedule == schedule):
        got = f"the order {bwd_pass.order!r} and the schedule {bwd_pass.schedule}"
        return f"rounds_dq: expected False with {got}, got True"
    if fault := _terms_fault(problem, bwd_pass, "in the pass of dq alone" if owns_queries else None):
        return fault
    if bwd_pass.one_tile and (problem.options or problem.program is not None):
        return "one_tile: expected False with options or a program, got True"
    if bwd_pass.one_tile and bwd_pass.schedule not in ("dynamic-late", "stream-K"):
        return f"one_tile: expected False with the schedule {bwd_pass.schedule}, got True"
    if fault := _table_fault(problem, owned, rows):
        return fault
    # The log-sum-exps after the padded queries belong to the next sequence
    if not owns_queries and (fault := _table_fault(problem, step, step_rows)):
        return fault
    if fault := _listed_fault(problem, bwd_pass.block_M, bwd_pass.block_N):
        return fault
    for name, least in (("num_stages", 2), ("num_stages_do", 1)):
        if getattr(bwd_pass, name) < least:
            return f"{name}: expected at least {least}, got {getattr(bwd_pass, name)}"
    return _capacity_fault(problem, bwd_pass)


def _bwd_schedules(problem: AttnProblem) -> tuple[str, ...]:
    """Schedules of a pass by keys that makes all gradients in an order."""
    if problem.program is None:
        options = {*problem.served_as.options} - {"sink"}
        if options in ({"window"}, {"alibi"}, {"softcap"}):
            return "grid", "dynamic-late", "stream-K"
        return ("grid", "dynamic-late") if options else BWD_SCHEDULES
    if problem.learns_bias:
        return "grid", "dynamic", "dynamic-late"
    if problem.is_mask_of_bits:
        return "grid", "dynamic-late", "stream-K"
    if problem.is_diagonal_bias:
        return "grid", "dynamic-late", "stream-K"
    return ("grid",)


def _capacity_fault(problem: AttnProblem, config: FwdConfig | JvpConfig | BwdPass) -> str | None:
    if (smem := smem_bytes(problem, config) + BARRIER_BYTES) > SMEM_LIMIT:
        return f"shared memory: expected at most {SMEM_LIMIT} bytes, got {smem}"
    budget = ACCUMULATOR_REGISTERS[type(config)][config.warpgroups]
    if (registers := accumulator_registers(problem, config)) > budget:
        return f"registers: expected at most {budget} per thread for accumulators, got {registers}"
    return None
