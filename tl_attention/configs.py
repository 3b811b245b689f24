"""The only reader of configs/: the grid the tuner searches, defaults, tuned winners, named shapes.

Tuned tables are read from two places: the user's own under cache_dir(), then the one shipped in configs/tuned.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tl_attention.problem import (
    BUCKETS,
    BWD_TILE_WIDTHS,
    DECODE,
    DECODE_TILE_WIDTHS,
    DIRECTIONS,
    DTYPES,
    GRADS,
    MAX_SPLITS,
    OPTIONS,
    PAGE_ROWS,
    SCHEDULES,
    SPLIT_BUCKET,
    TABLE_ROWS,
    TILE_WIDTHS,
    AppendConfig,
    AttnProblem,
    BwdConfig,
    BwdDelta,
    BwdPass,
    BwdSum,
    Config,
    DecodeCombine,
    DecodeConfig,
    FwdCombine,
    FwdConfig,
    KernelConfig,
    append_kernel,
    buckets,
    decode_problem,
    tuning_key,
)
from tl_attention.target import SMEM_LIMIT, gpu_slug

BARRIER_BYTES = 1024  # what barriers take of the shared memory beside the tiles
TILE_BOX_BYTES = 64, 96  # kernels.scheduler.TileBox, without and with a table
VERDICTS_BYTES = 16  # kernels.scheduler.Verdicts
SEGMENT_BOX_BYTES = 80  # kernels.decode.SegmentBox
TILE_ALIGNMENT = 1024  # bytes; of each tile, so what lies between two takes a multiple
# Where the rows of a direction lie in a tuned table
SECTIONS = {"fwd": ("fwd",), "bwd": ("bwd",), "bwd_det": ("bwd_det", "bwd")}
# What a tile of a line of a search gives, or the first of them
TILE_FIELDS = ("block_M", "block_N", "num_stages", "num_stages_do")
# A thread, by consumer warpgroups; the rest of its 240 or 160 is for addresses and row statistics
ACCUMULATOR_REGISTERS = {
    FwdConfig: {1: 216, 2: 216, 3: 128},
    BwdPass: {1: 232, 2: 232, 3: 152},
}


def smem_bytes(problem: AttnProblem, config: KernelConfig) -> int:
    """Dynamic shared memory of a kernel; its barriers are static and take BARRIER_BYTES."""
    if isinstance(config, FwdConfig):
        return _fwd_smem_bytes(problem, config)
    if isinstance(config, BwdPass):
        return _pass_smem_bytes(problem, config)
    if isinstance(config, DecodeConfig):
        return _decode_smem_bytes(problem, config)
    if isinstance(config, DecodeCombine):
        # Of each row: its weights in the parts, their scale, its query and head
        return 4 * config.rows * (config.at_once + 3)
    if isinstance(config, AppendConfig):
        return 0
    tiles = {BwdDelta: 2, BwdSum: 1, FwdCombine: 1}[type(config)]  # O and dO; the gradient; O
    weights = 4 * config.rows * MAX_SPLITS * isinstance(config, FwdCombine)
    return 2 * tiles * config.rows * problem.head_dim + weights


def _fwd_smem_bytes(problem: AttnProblem, config: FwdConfig) -> int:
    rows_qk = config.q_stages * config.block_M + config.num_stages * config.block_N
    rows_v = config.num_stages * config.block_N
    # Else O leaves through the tile of Q, or from registers
    own_output = problem.head_dim != problem.head_dim_v and not config.split
    rows_v += config.block_M * own_output
    tile_box = TILE_BOX_BYTES[problem.has("varlen")] if config.schedule != "grid" else 0
    tile_box += VERDICTS_BYTES * config.hold_max
    tiles = 2 * (rows_qk * problem.head_dim + rows_v * problem.head_dim_v)
    return tiles + _bias_bytes(problem, config.block_N) + tile_box


def _pass_smem_bytes(problem: AttnProblem, one: BwdPass) -> int:
    owned, step = _owned_and_step(one)
    rows_qk = owned + one.num_stages * step
    rows_v = one.num_stages_do * step
    # V, or dO in "dq"; "dv" has no V, and dV leaves through the tile of K if that is as wide
    if one.grads != "dv" or problem.head_dim != problem.head_dim_v:
        rows_v += owned
    sixteen_bits = rows_qk * problem.head_dim + rows_v * problem.head_dim_v
    row_values = 0
    if one.grads != "dq":  # with each row of Q come its log-sum-exp and delta, which "dv" does without
        row_values = 4 * step * one.num_stages * (1 if one.grads == "dv" else 2)
    if one.adds_dq:
        sixteen_bits += owned * step  # dS
    if one.lean and "dv" in one.makes and problem.has("dropout"):
        sixteen_bits += owned * step  # P
    return 2 * sixteen_bits + _bias_bytes(problem, step) + -(-row_values // TILE_ALIGNMENT) * TILE_ALIGNMENT


def _bias_bytes(problem: AttnProblem, cols: int) -> int:
    """kernels.options.alloc_bias_columns: 16 numbers of a column."""
    return 32 * cols * problem.bias_is_linear


def _decode_smem_bytes(problem: AttnProblem, config: DecodeConfig) -> int:
    step = config.num_stages * config.block_N
    rows_qk = 64 * (1 if config.divides_columns else config.warpgroups) + step
    rows_v = 0 if config.v_in_k else step
    # Of each row: its query, head, place, slope and sink
    numbers = 3 + problem.has("alibi") + problem.has("sink")
    tiles = 2 * (rows_qk * problem.head_dim + rows_v * problem.head_dim_v)
    return tiles + 4 * 64 * config.warpgroups * numbers + SEGMENT_BOX_BYTES


def accumulator_registers(problem: AttnProblem, config: FwdConfig | BwdPass) -> int:
    """Registers a consumer thread holds at once for 64 rows a warpgroup, of which 64 columns take 32 in fp32.

    Forward: S and O in fp32, P in 16 bits. Backward: S, dP and what it makes in fp32, P and dS in 16 bits; lean, S and dP share
    theirs, and P and dS.
    """
    if isinstance(config, FwdConfig):
        return config.block_N // 2 + config.block_N // 4 + problem.head_dim_v // 2
    _, step = _owned_and_step(config)
    has_p, has_ds = "dv" in config.makes, config.grads != "dv"
    widths = {"dq": problem.head_dim, "dk": problem.head_dim, "dv": problem.head_dim_v}
    sums = sum(widths[grad] for grad in config.makes if not (grad == "dq" and config.adds_dq))
    if config.lean:
        # A softcap gives dS another P than dV
        return sums // 2 + step // 2 + (1 + (has_p and problem.has("softcap"))) * step // 4
    return sums // 2 + (1 + has_ds) * step // 2 + (has_p + has_ds) * step // 4


def _owned_and_step(one: BwdPass) -> tuple[int, int]:
    """(rows a CTA owns, rows of a step)"""
    return (one.block_M, one.block_N) if one.grads == "dq" else (one.block_N, one.block_M)


def is_legal(problem: AttnProblem, config: Config, direction: str | None = None) -> str | None:
    """Why the config cannot run the problem, or cannot without spills; None if it can.

    direction: one of DIRECTIONS that it must serve, or None for any that it is made for.
    """
    if isinstance(config, FwdConfig):
        return _fwd_fault(problem, config)
    for one in config.passes:
        if fault := _pass_fault(problem, one):
            return f"{one}: {fault}"
    made = sorted(grad for one in config.passes for grad in one.makes)
    if made != ["dk", "dq", "dv"]:
        return f"passes make {', '.join(made) or 'nothing'}: expected dk, dq and dv once each"
    if direction == "bwd_det" and not config.deterministic:
        return f"{config} adds up dq in an order that is not fixed: expected a pass that makes dq alone"
    return None


def _fwd_fault(problem: AttnProblem, config: FwdConfig) -> str | None:
    if config.block_M not in (64, 128, 192):
        return f"block_M {config.block_M}: expected 64, 128 or 192, 64 queries a consumer warpgroup"
    if config.block_N % 16 or not 16 <= config.block_N <= 256:
        return f"block_N {config.block_N}: expected a multiple of 16 in 16..256, what TileLang gets right"
    if config.num_stages < 2:
        return f"num_stages {config.num_stages}: expected at least 2, one to load while one is computed"
    if config.schedule not in SCHEDULES:
        return f"schedule {config.schedule!r}: expected one of {', '.join(SCHEDULES)}"
    if config.q_stages not in (1, 2):
        return f"q_stages {config.q_stages}: expected 1 or 2"
    if config.q_stages > 1 and config.schedule == "grid":
        return "q_stages 2: a CTA of the schedule grid has no next tile"
    if config.split and config.schedule != "grid":
        return f"split: expected the schedule grid, got {config.schedule}"
    if config.hold_max and problem.dtype != "bfloat16":
        return f"hold_max: expected bfloat16, got {problem.dtype}, whose numbers end too early"
    if config.hold_max and config.schedule == "grid":
        return "hold_max: expected the schedule persistent or dynamic, in which a CTA can take a tile again"
    if config.ping_pong and config.warpgroups < 2:
        return f"ping_pong: expected at least 2 warpgroups, block_M {config.block_M} has {config.warpgroups}"
    if problem.has("varlen") and config.block_M != TABLE_ROWS:
        return f"block_M {config.block_M}: expected {TABLE_ROWS} with varlen"
    return _capacity_fault(problem, config)


def _pass_fault(problem: AttnProblem, one: BwdPass) -> str | None:
    if one.grads not in GRADS:
        return f"grads {one.grads!r}: expected one of {', '.join(GRADS)}"
    by_queries = one.grads == "dq"
    owned, step = ("block_M", "block_N") if by_queries else ("block_N", "block_M")
    rows, step_rows = _owned_and_step(one)
    if rows not in (64, 128, 192):
        return f"{owned} {rows}: expected 64, 128 or 192, 64 {'queries' if by_queries else 'keys'} a consumer warpgroup"
    if by_queries and (step_rows % 16 or not 32 <= step_rows <= 256):
        return f"{step} {step_rows}: expected a multiple of 16 in 32..256"
    if not by_queries and step_rows not in (32, 64, 96, 128):
        return f"{step} {step_rows}: expected 32, 64, 96 or 128, as its log-sum-exps begin at a multiple of 128 bytes"
    if by_queries and one.lean:
        return "lean: expected False where dq is made alone"
    if one.adds_dq and rows != 128:
        return f"{owned} {rows}: expected 128, as two warpgroups share the work on dq"
    if one.adds_dq and step_rows % 64:
        return f"{step} {step_rows}: expected 64 or 128, as warpgroups compute 64 rows of dq at a time"
    if one.adds_dq and not one.lean:
        return "lean: expected True where dq is summed, as it takes registers of its own"
    if problem.has("varlen") and rows != TABLE_ROWS:
        return f"{owned} {rows}: expected {TABLE_ROWS} with varlen"
    if problem.has("varlen") and not by_queries and TABLE_ROWS % step_rows:
        return (
            f"{step} {step_rows}: expected a divisor of {TABLE_ROWS} with varlen, as the log-sum-exps past the padded queries"
            " are of the next sequence"
        )
    for name, least in (("num_stages", 2), ("num_stages_do", 1)):
        if getattr(one, name) < least:
            return f"{name} {getattr(one, name)}: expected at least {least}"
    return _capacity_fault(problem, one)


def _capacity_fault(problem: AttnProblem, config: FwdConfig | BwdPass) -> str | None:
    if (smem := smem_bytes(problem, config) + BARRIER_BYTES) > SMEM_LIMIT:
        return f"shared memory: {smem} of {SMEM_LIMIT} bytes"
    budget = ACCUMULATOR_REGISTERS[type(config)][config.warpgroups]
    if (registers := accumulator_registers(problem, config)) > budget:
        return f"registers: {registers} of {budget} a thread for accumulators"
    return None


def installed() -> bool:
    """Whether this is an installed wheel, whose files are not ours to write, and not a checkout."""
    return Path(__file__).with_name("configs_data").is_dir()


def data_dir() -> Path:
    """The folder of the data files: in an installed package beside this file, in a checkout configs/."""
    return Path(__file__).with_name("configs_data") if installed() else Path(__file__).parents[1] / "configs"


def manifest_path() -> Path:
    """The manifest of shipped kernels, which manifest.py reads and writes."""
    return data_dir() / "kernels.json"


def cache_dir() -> Path:
    """Where compiled kernels and the user's tuned tables lie.

    TL_ATTENTION_CACHE_DIR, else tl_attention/ in TILELANG_CACHE_DIR, in XDG_CACHE_HOME or in ~/.cache.
    """
    if explicit := os.environ.get("TL_ATTENTION_CACHE_DIR"):
        return Path(explicit)
    parents = (os.environ.get(name) for name in ("TILELANG_CACHE_DIR", "XDG_CACHE_HOME"))
    return Path(next(filter(None, parents), Path.home() / ".cache")) / "tl_attention"


def _toml(name: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # not at the top: importing the package needs torch alone

    path = data_dir() / name
    return tomllib.loads(path.read_text()) if path.exists() else {}


@functools.cache
def _grid() -> dict[str, Any]:
    return _toml("grid.toml")


def _class_table(problem: AttnProblem, direction: str) -> dict[str, Any]:
    """Default and search of a class of problems; both dtypes share it, and in the backward others as grid.toml says."""
    width, mask = str(problem).split()[1:]
    classes = _grid()["fwd" if direction == "fwd" else "bwd"]
    return next(classes[name] for name in (f"{width} {mask}", width) if name in classes)


def _config(problem: AttnProblem, fields: dict[str, Any], direction: str) -> Config:
    """Of its fields, as the grid and the tables hold them for both dtypes."""
    if direction != "fwd":
        return BwdConfig.of(fields["passes"])
    config = FwdConfig(**fields)
    return config if problem.dtype == "bfloat16" else config.following


def default_config(problem: AttnProblem, direction: str = "fwd", bucket: str | None = None) -> Config:
    """What serves where no tuned row does: in the split bucket the class's `split`, else its default as a split config."""
    table = _class_table(problem, direction)
    if bucket != SPLIT_BUCKET:
        return _config(problem, table["default"], direction)
    return split_config(_config(problem, table.get("split", table["default"]), direction))


def split_config(config: FwdConfig) -> FwdConfig:
    """With the same tiles, a config whose tiles have several CTAs each."""
    return replace(config.following, schedule="grid", q_stages=1, split=True)


def option_config(problem: AttnProblem, bucket: str, direction: str = "fwd") -> Config:
    """What serves a problem with options: the first line of its width in the grid that is for them."""
    for without, config in _option_lines(problem, direction):
        if not without.intersection(problem.options) and (direction != "bwd_det" or config.deterministic):
            break
    if direction == "fwd" and bucket == SPLIT_BUCKET:
        return split_config(config)
    return config


def _option_lines(problem: AttnProblem, direction: str) -> list[tuple[set[str], Config]]:
    """(options that it is not for, config) of each line; the last is for all."""
    width = str(problem).split()[1]
    lines = _grid()["options"][width]["fwd" if direction == "fwd" else "bwd"]
    return [
        (
            set(line.get("without", ())),
            _config(problem, {k: v for k, v in line.items() if k != "without"}, direction),
        )
        for line in lines
    ]


def option_problems(direction: str = "fwd", causal: bool = True) -> list[tuple[AttnProblem, Config]]:
    """Of each line of the grid for options the problem with all that it is for, in bfloat16, and its config."""
    found = []
    for width in tile_widths(direction):
        for without, config in _option_lines(AttnProblem(DTYPES[0], *width, False), direction):
            options = tuple(o for o in OPTIONS if o not in without and (direction == "fwd" or o != "sink"))
            found.append(
                (AttnProblem(DTYPES[0], *width, causal and "window" not in options, options), config)
            )
    return found


def option_kernels(directions: Sequence[str]) -> list[tuple[AttnProblem, KernelConfig]]:
    """What is compiled for option_problems, once each."""
    found = [one for direction in directions for one in option_problems(direction)]
    return list(dict.fromkeys(kernel for problem, config in found for kernel in config.kernels(problem)))


def _products(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields of a config or a pass for each product of the lists of a line of a search."""
    others = {name: value for name, value in line.items() if name not in ("tiles", "buckets")}
    lists = [value if isinstance(value, list) else [value] for value in others.values()]
    return [
        dict(zip(TILE_FIELDS, tile, strict=False)) | dict(zip(others, values, strict=True))
        for tile, *values in itertools.product(line["tiles"], *lists)
    ]


def _line_configs(problem: AttnProblem, line: dict[str, Any], direction: str) -> list[Config]:
    """What a line of a search names."""
    if direction == "fwd":
        return [_config(problem, fields, direction) for fields in _products(line)]
    return [
        _config(problem, {"passes": passes}, direction)
        for passes in itertools.product(*map(_products, line["passes"]))
    ]


DECODE_ROWS = (64, 65)  # one number of rows for each config of a width


def decode_configs(problem: AttnProblem) -> list[DecodeConfig]:
    """Those of a width: for tiles of at most 64 rows, and for more."""
    configs = [DecodeConfig(**fields) for fields in _grid()["decode"][str(problem).split()[1]]]
    return [configs[0], configs[-1]]


def decode_config(problem: AttnProblem, rows: int, page_rows: int = 0) -> DecodeConfig:
    """What serves a decode whose key heads have so many rows of queries each."""
    return replace(decode_configs(problem)[rows > 64], page_rows=page_rows)


def candidates(problem: AttnProblem, bucket: str, direction: str = "fwd") -> list[Config]:
    """The legal configs of the grid for a bucket, the default first; in the split bucket, those of all lengths as split configs."""
    found = [default_config(problem, direction, bucket)]
    for line in _class_table(problem, direction)["search"]:
        configs = _line_configs(problem, line, direction)
        if bucket == SPLIT_BUCKET and "buckets" not in line:
            found += map(split_config, configs)
        elif bucket in line.get("buckets", BUCKETS):
            found += configs
    return [config for config in dict.fromkeys(found) if is_legal(problem, config, direction) is None]


def tuned_paths(gpu_name: str) -> tuple[Path, Path]:
    """The tables of a GPU, by its name as torch gives it, in the order they are read: the user's, the shipped one."""
    name = Path("tuned", f"{gpu_slug(gpu_name)}.json")
    return cache_dir() / name, data_dir() / name


def tuned_path(gpu_name: str) -> Path:
    """The table the tuner writes: in a checkout the shipped one, else the user's."""
    users, shipped = tuned_paths(gpu_name)
    return users if installed() else shipped


def read_tuned(path: Path) -> dict[str, Any]:
    """A tuned table: provenance, and under each of DIRECTIONS a row for each tuning key; no rows if there is no such file."""
    table = json.loads(path.read_text()) if path.exists() else {}
    return {direction: {} for direction in DIRECTIONS} | table


def format_tuned(table: dict[str, Any]) -> str:
    """JSON, provenance on the first line, then one row a line, sorted, so that a diff shows new winners."""
    text = json.dumps({name: value for name, value in table.items() if name not in DIRECTIONS})[:-1]
    for direction in DIRECTIONS:
        if sorted_rows := sorted(table.get(direction, {}).items()):
            rows = ",\n".join(f'  "{key}": {json.dumps(row)}' for key, row in sorted_rows)
            text += f',\n "{direction}": {{\n{rows}\n}}'
    return text + "}\n"


def config_of_row(
    problem: AttnProblem, row: dict[str, Any], direction: str = "fwd", bucket: str | None = None
) -> Config:
    """The config of a tuned row, which holds measurements too.

    Raises:
        ValueError: the row is of another version of the config, of another kind of bucket or not legal; the text says why.
    """
    try:
        config = _config(problem, row["config"], direction)
        reason = is_legal(problem, config, direction)
        if bucket and direction == "fwd" and config.split != (bucket == SPLIT_BUCKET):
            reason = f"split is {config.split} in the bucket {bucket}"
    except (KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise ValueError(reason)
    return config


@functools.cache
def pick_config(
    problem: AttnProblem, bucket: str, gpu_name: str, direction: str = "fwd"
) -> tuple[Config, str]:
    """The config that serves a problem on a GPU, by its name as torch gives it, and in words whence it comes.

    A row tuned for this GPU comes before the default of the grid, the user's row before a shipped one. Problems with options have
    configs of their own in the grid.
    """
    if problem.options:
        return option_config(problem, bucket, direction), f"options of {data_dir() / 'grid.toml'}"
    return config_of_tables(problem, bucket, tuned_paths(gpu_name), direction)


def config_of_tables(
    problem: AttnProblem, bucket: str, paths: Iterable[Path], direction: str = "fwd"
) -> tuple[Config, str]:
    """The config of the first of some tuned tables that has one, else the default; and in words whence it comes.

    In a table that has no row for its dtype, a problem takes the other dtype's, and bwd_det the row of bwd if that is
    deterministic. Where no table has a row for its length, it takes that of the nearest. A row of another version of the config
    counts as none.
    """
    misses = []
    for near, path, section in itertools.product(_nearest(bucket), tuple(paths), SECTIONS[direction]):
        rows = read_tuned(path)[section]
        keys = [
            tuning_key(replace(problem, dtype=dtype), near)
            for dtype in sorted(DTYPES, key=problem.dtype.__ne__)
        ]
        key = next((key for key in keys if key in rows), None)
        if key is None:
            misses += [f"{path} has no {section} row {keys[0]!r}"] * (near == bucket)
            continue
        try:
            return config_of_row(problem, rows[key], direction, bucket), f"{section} row {key!r} of {path}"
        except ValueError as error:
            misses.append(f"{section} row {key!r} of {path} does not serve, {error}")
    grid = data_dir() / "grid.toml"
    return default_config(problem, direction, bucket), f"{direction} default of {grid}: {'; '.join(misses)}"


def _nearest(bucket: str) -> list[str]:
    """The buckets whose rows may serve one, itself first; of lengths alone, as one of few tiles asks for another kernel."""
    if bucket not in BUCKETS:
        return [bucket]
    return sorted(BUCKETS, key=lambda other: abs(BUCKETS.index(other) - BUCKETS.index(bucket)))


def tile_widths(direction: str) -> tuple[tuple[int, int], ...]:
    """(of Q and K, of V and O) that a direction has kernels for."""
    return TILE_WIDTHS if direction == "fwd" else BWD_TILE_WIDTHS


def problems(direction: str = "fwd") -> list[AttnProblem]:
    """Every class of problems kernels are compiled for."""
    return [
        AttnProblem(dtype, *width, causal)
        for dtype in DTYPES
        for width in tile_widths(direction)
        for causal in (False, True)
    ]


def shipped_configs(directions: Sequence[str] = DIRECTIONS) -> list[tuple[AttnProblem, str, Config]]:
    """(problem, direction, config) of every default and every row of a shipped table, in both dtypes, once each."""
    tables = sorted((data_dir() / "tuned").glob("*.json"))
    classes = [(problem, direction) for direction in directions for problem in problems(direction)]
    defaults = [
        (problem, direction, default_config(problem, direction, bucket))
        for problem, direction in classes
        for bucket in buckets(direction)
    ]
    tuned = [
        (problem, direction, config_of_tables(problem, bucket, [table], direction)[0])
        for table in tables
        for problem, direction in classes
        for bucket in buckets(direction)
    ]
    return list(dict.fromkeys([*defaults, *tuned]))


def shipped_kernels(directions: Sequence[str] = DIRECTIONS) -> list[tuple[AttnProblem, KernelConfig]]:
    """What is compiled for shipped_configs, and with DECODE among the directions for caches, once each."""
    configs = shipped_configs([direction for direction in directions if direction != DECODE])
    found = [kernel for problem, _, config in configs for kernel in config.kernels(problem)]
    if DECODE in directions:
        found += decode_kernels()
    return list(dict.fromkeys(found))


def decode_kernels(
    dtypes: Sequence[str] = DTYPES,
    widths: Iterable[tuple[int, int]] = DECODE_TILE_WIDTHS,
    options: Sequence[str] = (),
) -> list[tuple[AttnProblem, KernelConfig]]:
    """What attention to caches with these of softcap, ALiBi and sink compiles, whatever the pages, and what writes to them; once each."""
    found = []
    for dtype in dtypes:
        problems = [decode_problem(dtype, *width, options) for width in widths]
        found += [
            kernel
            for problem, pages, rows in itertools.product(problems, PAGE_ROWS, DECODE_ROWS)
            for kernel in decode_config(problem, rows, pages).kernels(problem)
        ]
        found.append(append_kernel(dtype))
    return list(dict.fromkeys(found))


def named_shapes() -> dict[str, str]:
    """Name -> "batch,heads_q,heads_kv,seqlen_q,seqlen_k,head_dim,head_dim_v,mask" of configs/shapes.toml."""
    return _toml("shapes.toml")


def tuning_shapes(bucket: str) -> list[list[int]]:
    """[batch, query heads a key head serves, seqlen_q, seqlen_k] that a bucket is tuned on."""
    return _grid()["tuning_shapes"][bucket]
