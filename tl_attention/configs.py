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

from tl_attention.kernel_configs import (
    PAGE_ROWS,
    BwdConfig,
    Config,
    DecodeConfig,
    FwdConfig,
    KernelConfig,
    append_kernel,
)
from tl_attention.legality import is_legal
from tl_attention.problem import (
    BUCKETS,
    DECODE,
    DECODE_TILE_WIDTHS,
    DEFAULT_DTYPE,
    DIRECTIONS,
    DTYPES,
    OPTIONS,
    SPLIT_BUCKET,
    AttnProblem,
    buckets,
    decode_problem,
    tile_widths,
    tuning_key,
)
from tl_attention.target import gpu_slug

# Where the rows of a direction lie in a tuned table
SECTIONS = {"fwd": ("fwd",), "bwd": ("bwd",), "bwd_det": ("bwd_det", "bwd")}
# What a tile of a line of a search gives, or the first of them
TILE_FIELDS = ("block_M", "block_N", "num_stages", "num_stages_do")


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
    classes = _grid()["fwd" if direction == "fwd" else "bwd"]
    names = (f"{problem.width} {problem.mask}", problem.width)
    return next(classes[name] for name in names if name in classes)


def _config(problem: AttnProblem, fields: dict[str, Any], direction: str) -> Config:
    """Of its fields, as the grid and the tables hold them for both dtypes."""
    if direction != "fwd":
        return BwdConfig.of(fields["passes"])
    config = FwdConfig(**fields)
    return config if problem.dtype == "bfloat16" else config.without_hold_max()


def default_config(problem: AttnProblem, direction: str = "fwd", bucket: str | None = None) -> Config:
    """What serves where no tuned row does: in the split bucket the class's `split`, else its default as a split config."""
    table = _class_table(problem, direction)
    if bucket != SPLIT_BUCKET:
        return _config(problem, table["default"], direction)
    return split_config(_config(problem, table.get("split", table["default"]), direction))


def split_config(config: FwdConfig) -> FwdConfig:
    """With the same tiles, a config whose tiles have several CTAs each."""
    return replace(config.without_hold_max(), schedule="grid", q_stages=1, split=True)


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
    lines = _grid()["options"][problem.width]["fwd" if direction == "fwd" else "bwd"]
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
        for without, config in _option_lines(AttnProblem(DEFAULT_DTYPE, *width, False), direction):
            options = tuple(o for o in OPTIONS if o not in without and (direction == "fwd" or o != "sink"))
            found.append(
                (AttnProblem(DEFAULT_DTYPE, *width, causal and "window" not in options, options), config)
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
    configs = [DecodeConfig(**fields) for fields in _grid()["decode"][problem.width]]
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
