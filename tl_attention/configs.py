"""The only reader of configs/: the grid the tuner searches, defaults, tuned winners, named shapes.

Tuned tables are read from two places: the user's own under cache_dir(), then the one shipped in configs/tuned.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tl_attention.problem import BUCKETS, DTYPES, SCHEDULES, TILE_WIDTHS, AttnProblem, FwdConfig, tuning_key
from tl_attention.target import SMEM_LIMIT, gpu_slug

BARRIER_BYTES = 1024  # what barriers take of the shared memory beside the tiles
TILE_BOX_BYTES = 64  # kernels.scheduler.TileBox
# What the lines of a search in grid.toml are products of, beside tiles
SEARCHED = ("num_stages", "ping_pong", "schedule", "q_stages")
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


def installed() -> bool:
    """Whether this is an installed wheel, whose files are not ours to write, and not a checkout."""
    return Path(__file__).with_name("configs_data").is_dir()


def data_dir() -> Path:
    """The folder of the data files: in an installed package beside this file, in a checkout configs/."""
    return Path(__file__).with_name("configs_data") if installed() else Path(__file__).parents[1] / "configs"


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


def _class_table(problem: AttnProblem) -> dict[str, Any]:
    return _grid()["fwd"][str(problem).split(maxsplit=1)[1]]  # both dtypes share it


def default_config(problem: AttnProblem) -> FwdConfig:
    return FwdConfig(**{"schedule": "grid", **_class_table(problem)["default"]})


def candidates(problem: AttnProblem, bucket: str) -> list[FwdConfig]:
    """The legal configs of the grid for a length bucket, the default first."""
    found = [default_config(problem)]
    for line in _class_table(problem)["search"]:
        lists = _grid()["fwd"] | line
        if bucket in line.get("buckets", BUCKETS):
            found += [
                FwdConfig(*tile, **dict(zip(SEARCHED, values, strict=True)))
                for tile, *values in itertools.product(lists["tiles"], *(lists[name] for name in SEARCHED))
            ]
    return [config for config in dict.fromkeys(found) if is_legal(problem, config) is None]


def tuned_paths(gpu_name: str) -> tuple[Path, Path]:
    """The tables of a GPU, by its name as torch gives it, in the order they are read: the user's, the shipped one."""
    name = Path("tuned", f"{gpu_slug(gpu_name)}.json")
    return cache_dir() / name, data_dir() / name


def tuned_path(gpu_name: str) -> Path:
    """The table the tuner writes: in a checkout the shipped one, else the user's."""
    users, shipped = tuned_paths(gpu_name)
    return users if installed() else shipped


def read_tuned(path: Path) -> dict[str, Any]:
    """A tuned table: provenance, and under fwd a row for each tuning key; empty if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else {"fwd": {}}


def format_tuned(table: dict[str, Any]) -> str:
    """JSON, provenance on the first line, then one row a line, sorted, so that a diff shows new winners."""
    provenance = json.dumps({key: value for key, value in table.items() if key != "fwd"})
    rows = ",\n".join(f'  "{key}": {json.dumps(row)}' for key, row in sorted(table["fwd"].items()))
    return f'{provenance[:-1]},\n "fwd": {{\n{rows}\n}}}}\n'


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

    A row tuned for this GPU comes before the default of the grid, the user's row before a shipped one.
    """
    return config_of_tables(problem, bucket, tuned_paths(gpu_name))


def config_of_tables(problem: AttnProblem, bucket: str, paths: Iterable[Path]) -> tuple[FwdConfig, str]:
    """The config of the first of some tuned tables that has one, else the default; and in words whence it comes.

    In a table that has no row for its dtype, a problem takes the other dtype's. A stale row counts as none.
    """
    keys = [
        tuning_key(replace(problem, dtype=dtype), bucket)
        for dtype in sorted(DTYPES, key=problem.dtype.__ne__)
    ]
    misses = []
    for path in paths:
        rows = read_tuned(path)["fwd"]
        key = next((key for key in keys if key in rows), None)
        if key is None:
            misses.append(f"{path} has no row {keys[0]!r}")
            continue
        try:
            return config_of_row(problem, rows[key]), f"row {key!r} of {path}"
        except ValueError as error:
            misses.append(f"row {key!r} of {path} is stale, {error}")
    return default_config(problem), f"default of {data_dir() / 'grid.toml'}: {'; '.join(misses)}"


def problems() -> list[AttnProblem]:
    """Every class of problems a kernel is compiled for."""
    return [
        AttnProblem(dtype, *widths, causal)
        for dtype in DTYPES
        for widths in TILE_WIDTHS
        for causal in (False, True)
    ]


def shipped_configs() -> list[tuple[AttnProblem, FwdConfig]]:
    """Every default and every config of a shipped table, in both dtypes, without duplicates."""
    tables = sorted((data_dir() / "tuned").glob("*.json"))
    tuned = [
        (problem, config_of_tables(problem, bucket, [table])[0])
        for table in tables
        for problem in problems()
        for bucket in BUCKETS
    ]
    return list(dict.fromkeys([*((p, default_config(p)) for p in problems()), *tuned]))


def named_shapes() -> dict[str, str]:
    """Name -> "batch,heads_q,heads_kv,seqlen_q,seqlen_k,head_dim,head_dim_v,mask" of configs/shapes.toml."""
    return _toml("shapes.toml")


def tuning_shapes(bucket: str) -> list[list[int]]:
    """[batch, query heads a key head serves, seqlen_q, seqlen_k] that a length bucket is tuned on."""
    return _grid()["tuning_shapes"][bucket]
