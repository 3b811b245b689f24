"""The only reader of configs/: the grid the tuner searches, defaults, tuned winners, named shapes."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from tl_attention.problem import BUCKETS, DTYPES, SCHEDULES, TILE_WIDTHS, AttnProblem, FwdConfig, tuning_key
from tl_attention.target import SMEM_LIMIT, gpu_slug

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BARRIER_BYTES = 1024  # what barriers take of the shared memory beside the tiles
TILE_BOX_BYTES = 64  # kernels.scheduler.TileBox
# A thread, by consumer warpgroups; the rest of its 240 or 160 is for addresses and row statistics
ACCUMULATOR_REGISTERS = {1: 216, 2: 216, 3: 128}


def smem_bytes(problem: AttnProblem, config: FwdConfig) -> int:
    """Dynamic shared memory of a kernel; its barriers are static and take BARRIER_BYTES."""
    rows_qk = config.q_stages * config.block_M + config.num_stages * config.block_N
    rows_v = config.num_stages * config.block_N
    own_output = problem.head_dim != problem.head_dim_v  # else O leaves through the tile of Q
    rows_v += config.block_M * own_output
    tile_box = TILE_BOX_BYTES * (config.schedule != "grid")
    return 2 * (rows_qk * problem.head_dim + rows_v * problem.head_dim_v) + tile_box


def accumulator_registers(problem: AttnProblem, config: FwdConfig) -> int:
    """Registers a consumer thread holds at once for 64 rows a warpgroup: S and O in fp32, P in 16 bits."""
    return 64 * (config.block_N + config.block_N // 2 + problem.head_dim_v) // 128


def is_legal(problem: AttnProblem, config: FwdConfig) -> str | None:
    """Why the config cannot run the problem, or cannot without spills; None if it can."""
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
    if config.ping_pong and config.warpgroups < 2:
        return f"ping_pong: expected at least 2 warpgroups, block_M {config.block_M} has {config.warpgroups}"
    if (smem := smem_bytes(problem, config) + BARRIER_BYTES) > SMEM_LIMIT:
        return f"shared memory: {smem} of {SMEM_LIMIT} bytes"
    budget = ACCUMULATOR_REGISTERS[config.warpgroups]
    if (registers := accumulator_registers(problem, config)) > budget:
        return f"registers: {registers} of {budget} a thread for accumulators"
    return None


def data_dir() -> Path:
    """The folder of the data files: in an installed package beside this file, in a checkout configs/."""
    shipped = Path(__file__).with_name("configs_data")
    return shipped if shipped.is_dir() else Path(__file__).parents[1] / "configs"


def _toml(name: str) -> dict[str, Any]:
    path = data_dir() / name
    return tomllib.loads(path.read_text()) if path.exists() else {}


@functools.cache
def _grid() -> dict[str, Any]:
    return _toml("grid.toml")


def _class_table(problem: AttnProblem) -> dict[str, Any]:
    return _grid()["fwd"][str(problem).split(maxsplit=1)[1]]  # both dtypes share it


def default_config(problem: AttnProblem) -> FwdConfig:
    return FwdConfig(**{"schedule": "grid", **_class_table(problem)["default"]})


def candidates(problem: AttnProblem, bucket: str) -> list[FwdConfig]:
    """The legal configs of the grid for a length bucket, the default first."""
    table = _class_table(problem)
    layers = (_grid()["fwd"], table, table.get(bucket, {}))
    lists = {key: value for layer in layers for key, value in layer.items() if isinstance(value, list)}
    tiles, names = lists.pop("tiles"), tuple(lists)
    product = [
        FwdConfig(block_M, block_N, **dict(zip(names, values, strict=True)))
        for (block_M, block_N), *values in itertools.product(tiles, *lists.values())
    ]
    return [c for c in dict.fromkeys([default_config(problem), *product]) if is_legal(problem, c) is None]


def tuned_path(gpu_name: str) -> Path:
    """Where the winners of a GPU lie, by its name as torch gives it: tuned/nvidia_h200.json."""
    return data_dir() / "tuned" / f"{gpu_slug(gpu_name)}.json"


def read_tuned(path: Path) -> dict[str, Any]:
    """A tuned table: provenance, and under fwd a row for each tuning key; empty if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else {"fwd": {}}


def format_tuned(table: dict[str, Any]) -> str:
    """JSON, provenance on the first line, then one row a line, sorted, so that a diff shows new winners."""
    provenance = json.dumps({key: value for key, value in table.items() if key != "fwd"})
    rows = ",\n".join(f'  "{key}": {json.dumps(row)}' for key, row in sorted(table["fwd"].items()))
    return f'{provenance[:-1]},\n "fwd": {{\n{rows}\n}}}}\n'


@functools.cache
def _tuned_rows(path: Path) -> dict[str, Any]:
    return read_tuned(path)["fwd"]


def config_of_row(problem: AttnProblem, row: dict[str, Any]) -> FwdConfig:
    """The config of a tuned row, which holds measurements too.

    Raises:
        ValueError: the row is of another version of FwdConfig or not legal; the text says why.
    """
    try:
        config = FwdConfig(**row["config"])
        reason = is_legal(problem, config)
    except (KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise ValueError(reason)
    return config


@functools.cache
def pick_config(problem: AttnProblem, bucket: str, gpu_name: str) -> tuple[FwdConfig, str]:
    """The config that serves a problem on a GPU, by its name as torch gives it, and in words whence it comes.

    A row tuned for this GPU comes before the default of the grid; a dtype without a row has the other's.
    """
    path = tuned_path(gpu_name)
    rows = _tuned_rows(path)
    keys = [
        tuning_key(AttnProblem(dtype, *_shape(problem)), bucket)
        for dtype in sorted(DTYPES, key=problem.dtype.__ne__)
    ]
    key = next((key for key in keys if key in rows), None)
    if key is None:
        return default_config(problem), f"default of grid.toml: {path.name} has no row {keys[0]!r}"
    try:
        return config_of_row(problem, rows[key]), f"row {key!r} of {path.name}"
    except ValueError as error:
        return default_config(problem), f"default of grid.toml: row {key!r} of {path.name} is stale, {error}"


def _shape(problem: AttnProblem) -> tuple[int, int, bool]:
    return problem.head_dim, problem.head_dim_v, problem.causal


def problems() -> list[AttnProblem]:
    """Every class of problems a kernel is compiled for."""
    return [
        AttnProblem(dtype, *widths, causal)
        for dtype in DTYPES
        for widths in TILE_WIDTHS
        for causal in (False, True)
    ]


def shipped_configs() -> list[tuple[AttnProblem, FwdConfig]]:
    """Every default and every config of a tuned table, in both dtypes, without duplicates."""
    gpus = [read_tuned(path)["gpu"] for path in sorted((data_dir() / "tuned").glob("*.json"))]
    tuned = [(p, pick_config(p, bucket, gpu)[0]) for gpu in gpus for p in problems() for bucket in BUCKETS]
    return list(dict.fromkeys([*((p, default_config(p)) for p in problems()), *tuned]))


def named_shapes() -> dict[str, str]:
    """Name -> "batch,heads_q,heads_kv,seqlen_q,seqlen_k,head_dim,head_dim_v,mask" of configs/shapes.toml."""
    return _toml("shapes.toml")


def tuning_shapes(bucket: str) -> list[list[int]]:
    """[batch, query heads a key head serves, seqlen_q, seqlen_k] that a length bucket is tuned on."""
    return _grid()["tuning_shapes"][bucket]
