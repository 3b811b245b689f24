"""The only reader of configs/: the grid (defaults, option lines, search), tuned tables, costs of launches, named shapes.

Tuned tables are read from two places: the user's own under cache_dir(), then the shipped one in configs/tuned.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tl_attention.config import gpus, legality
from tl_attention.config.kernel_configs import PAGE_ROWS, BwdConfig, Config, DecodeConfig, FwdConfig
from tl_attention.config.program_configs import features, traits
from tl_attention.config.term_configs import TERM_STAGES
from tl_attention.problem.attn_problem import (
    BUCKETS,
    DIRECTIONS,
    FEW_BUCKET,
    HALF_DTYPES,
    INVARIANT_BUCKET,
    OPTION_ARGUMENTS,
    OPTIONS,
    PART_OPTIONS,
    SPLIT_BUCKET,
    AttnProblem,
    tuning_key,
)
from tl_attention.problem.target import DEFAULT_GPU, SMEM_LIMIT, gpu_slug

PACKAGE = Path(__file__).parents[1]
# Sections of a tuned table that serve a direction, best first
SECTIONS: dict[str, tuple[str, ...]] = {"fwd": ("fwd",), "bwd": ("bwd",), "bwd_det": ("bwd_det", "bwd")}
# Fields that an entry of `tiles` in a search line sets, in order; an entry may have only the first of them
TILE_FIELDS = ("block_M", "block_N", "num_stages", "num_stages_do")
SHARED_HEADS = "shared"  # in the name of a bucket: more query heads than key heads
LINE_WORDS = ("needs", "serves", "buckets", "dtypes")  # of a line, beside the fields of its config
DECODE_ROWS = 64  # the most rows of a decode that is not served by the last config of its width


def installed() -> bool:
    """True in an installed wheel, whose files are read-only; False in a checkout."""
    return not (PACKAGE.parent / "pyproject.toml").is_file()


def data_dir() -> Path:
    """Folder of the data files."""
    return PACKAGE / "configs"


def cache_dir() -> Path:
    """Folder of compiled kernels and of the user's tuned tables.

    TL_ATTENTION_CACHE_DIR, else tl_attention/ in TILELANG_CACHE_DIR, in XDG_CACHE_HOME or in ~/.cache.
    """
    if explicit := os.environ.get("TL_ATTENTION_CACHE_DIR"):
        return Path(explicit)
    parents = (os.environ.get(name) for name in ("TILELANG_CACHE_DIR", "XDG_CACHE_HOME"))
    return Path(next(filter(None, parents), Path.home() / ".cache")) / "tl_attention"


def tuned_paths(gpu_name: str) -> tuple[Path, Path]:
    """Tuned tables of a GPU (by its name in torch), in the order they are read: the user's, the shipped one."""
    name = Path("tuned", f"{gpu_slug(gpu_name)}.json")
    return cache_dir() / name, data_dir() / name


def tuned_path(gpu_name: str) -> Path:
    """The table the tuner writes: the shipped one in a checkout, else the user's."""
    users, shipped = tuned_paths(gpu_name)
    return users if installed() else shipped


def shipped_tables() -> dict[str, Path]:
    """GPU (by its name in torch) -> its shipped table."""
    paths = sorted((data_dir() / "tuned").glob("*.json"))
    return {read_tuned(path)["gpu"]: path for path in paths}


def near_tables(gpu_name: str) -> dict[str, Path]:
    """GPU -> shipped table of other Hopper GPUs, the nearest to gpu_name first: their rows serve where it has none.

    The last one is the table of DEFAULT_GPU, on which the defaults of the grid were chosen. Empty for DEFAULT_GPU itself.
    """
    tables = shipped_tables()
    names = [gpu_name, *gpus.nearest_names(gpu_name, tables)]
    end = names.index(DEFAULT_GPU) + 1 if DEFAULT_GPU in names else len(names)
    return {name: tables[name] for name in names[1:end]}


def read_tuned(path: Path) -> dict[str, Any]:
    """A tuned table: provenance, and for each of DIRECTIONS its rows by tuning key; no rows if the file is missing. Do not change it."""
    try:
        file = path.stat()
    except FileNotFoundError:
        return {direction: {} for direction in DIRECTIONS}
    return _parsed(path, file.st_mtime_ns, file.st_size)


@functools.lru_cache(maxsize=8)
def _parsed(path: Path, changed: int, size: int) -> dict[str, Any]:
    """The table in a file of this age and size. It is kept, as each lookup of a row needs it and parsing takes milliseconds."""
    return {direction: {} for direction in DIRECTIONS} | json.loads(path.read_text(encoding="utf-8"))


def format_tuned(table: dict[str, Any]) -> str:
    """JSON with the provenance on the first line, then one sorted row per line, so that a diff shows new winners."""
    text = json.dumps({name: value for name, value in table.items() if name not in DIRECTIONS})[:-1]
    for direction in DIRECTIONS:
        if sorted_rows := sorted(table.get(direction, {}).items()):
            rows = ",\n".join(f'  "{key}": {json.dumps(row)}' for key, row in sorted_rows)
            text += f',\n "{direction}": {{\n{rows}\n}}'
    return text + "}\n"


def named_shapes() -> dict[str, str]:
    """Name -> "batch,heads_q,heads_kv,seqlen_q,seqlen_k,head_dim,head_dim_v,mask" of configs/shapes.toml."""
    return _toml("shapes.toml")


def tuning_shapes(bucket: str) -> list[list[int]]:
    """[batch, query heads per key head, seqlen_q, seqlen_k] that a bucket is tuned on."""
    return _grid()["tuning_shapes"][bucket]


def _toml(name: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # not at the top: importing the package needs torch alone

    path = data_dir() / name
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@functools.cache
def _grid() -> dict[str, Any]:
    return _toml("grid.toml")


def bucket_lines(direction: str) -> list[dict[str, Any]]:
    """[buckets] of the grid for a direction, see buckets.Bucket."""
    return _grid()["buckets"][direction]


def _stand_ins(bucket: str, direction: str) -> Sequence[str]:
    """Buckets whose rows serve where a bucket has none, in this order: the nearest lengths, or those that its line names."""
    if bucket in BUCKETS:
        others = (length for length in BUCKETS if length != bucket)
        return sorted(others, key=lambda length: abs(BUCKETS.index(length) - BUCKETS.index(bucket)))
    line = next(line for line in bucket_lines(direction) if line["name"] == bucket)
    return line.get("rows", BUCKETS)


def cost_tables() -> dict[str, Any]:
    """GPU (by its name in torch) -> its costs of launches, see costs.py."""
    return _toml("costs.toml")


def _section(direction: str) -> str:
    """The section of the grid for a direction; bwd and bwd_det share one."""
    return "fwd" if direction == "fwd" else "bwd"


def _class_table(problem: AttnProblem, direction: str) -> dict[str, Any]:
    """`default` and `search` of a problem class, from the section "WIDTH MASK" or "WIDTH". Both dtypes share it."""
    classes = _grid()[_section(direction)]
    names = (f"{problem.tile_class} {problem.mask}", problem.tile_class)
    return next(classes[name] for name in names if name in classes)


def _config(problem: AttnProblem, fields: dict[str, Any], direction: str) -> Config:
    """The config of a line or row. Fields that it leaves out are derived from the problem."""
    if direction == "fwd":
        return _fwd_config(problem, fields)
    config = BwdConfig.of(fields["passes"])
    given = any("term_stages" in one for one in fields["passes"])
    return config if given else _making_terms(problem, config, direction)


def with_term_stages(config: Config, stages: int) -> Config:
    """The same config with other term_stages; those of a backward are of its first pass."""
    if isinstance(config, FwdConfig):
        return replace(config, term_stages=stages)
    first, *others = config.passes
    return BwdConfig((replace(first, term_stages=stages), *others))


def _making_terms(problem: AttnProblem, config: Config, direction: str) -> Config:
    """The config with the most term_stages that are legal for the problem."""
    found = (with_term_stages(config, stages) for stages in TERM_STAGES)
    return next((one for one in found if legality.fault(problem, one, direction) is None), config)


def _fwd_config(problem: AttnProblem, fields: dict[str, Any]) -> FwdConfig:
    """A forward config. Derived if `fields` lack them: schedule, term_stages, and q_stages, the most that fit if a CTA has a next tile."""
    config = FwdConfig(**{"schedule": derived_schedule(problem)} | fields)
    if not problem.profits_from_held_max:
        config = config.without_hold_max()
    if "q_stages" not in fields:
        # d192 with 1.5 spills 40 bytes: causal 128x96 at 4k 414 us instead of 387, at 2k 240 and 237 (H100, 2026-11-26)
        stages = (2, 1.5) if problem.head_dim == 256 else (2,)
        found = (replace(config, q_stages=depth) for depth in stages)
        config = next((one for one in found if legality.fault(problem, one) is None), config)
    return config if "term_stages" in fields else _making_terms(problem, config, "fwd")


def derived_schedule(problem: AttnProblem) -> str:
    """persistent where all tiles take equally long (full, no options or a linear bias, no mask_mod), else dynamic."""
    if problem.scores_stay_close or (problem.bias_has_two_sides and not problem.has("varlen")):
        return "persistent"
    return "dynamic" if problem.causal or problem.options or problem.program else "persistent"


def default_config(problem: AttnProblem, direction: str = "fwd", bucket: str | None = None) -> Config:
    """The config of a problem without a tuned row: that of its class for the bucket, else `default`; see bucket_config."""
    table = _class_table(problem, direction)
    config = _config(problem, table.get(bucket, table["default"]), direction)
    if direction == "bwd_det" and not config.deterministic:
        return _config(problem, table["default"], direction)
    return bucket_config(problem, config, bucket) if direction == "fwd" else config


def bucket_config(problem: AttnProblem, config: FwdConfig, bucket: str | None) -> FwdConfig:
    """The form of a forward config for a bucket: split for SPLIT_BUCKET, stream-K for FEW_BUCKET if CTAs can share tiles, else itself."""
    if bucket == SPLIT_BUCKET:
        return split_config(config)
    return shared_config(problem, config) if bucket == FEW_BUCKET and problem.can_share else config


def option_sets() -> dict[str, list[list[str]]]:
    """[pack] of the grid: section -> sets of options."""
    return _grid()["pack"]


def split_config(config: FwdConfig) -> FwdConfig:
    """The same tile, with its keys split among several CTAs."""
    return replace(config.without_hold_max(), schedule="grid", q_stages=1, split=True, term_stages=0)


def shared_config(problem: AttnProblem, config: FwdConfig) -> FwdConfig:
    """The same tile, with tiles shared among CTAs by their keys."""
    return replace(config.without_hold_max() if problem.causal else config, schedule="stream-K")


def sharing_config(problem: AttnProblem, gpu_name: str) -> FwdConfig | None:
    """The config for few tiles per SM on a GPU (by its name in torch); None if CTAs do not share tiles there."""
    config = pick_config(problem, FEW_BUCKET, gpu_name)[0] if problem.can_share else None
    return config if config and config.schedule == "stream-K" else None


@dataclass(frozen=True)
class OptionLine:
    """A line of [options] or [programs] in the grid. It serves problems of its buckets and dtypes whose options are all in `serves`.

    Args:
        name: for example "line 2 of [options.d64] fwd".
        serves: options; of a line of [programs] the one program that it serves.
        fields: those of the config.
        buckets, dtypes: None: all.
    """

    name: str
    serves: tuple[str, ...]
    fields: dict[str, Any]
    buckets: Sequence[str] | None = None
    dtypes: Sequence[str] | None = None

    @classmethod
    def of(cls, name: str, serves: tuple[str, ...], line: dict[str, Any]) -> OptionLine:
        """The line with these words in the grid."""
        fields = {word: value for word, value in line.items() if word not in LINE_WORDS}
        return cls(name, serves, fields, line.get("buckets"), line.get("dtypes"))

    def miss(self, problem: AttnProblem, direction: str, bucket: str) -> str | None:
        """The reason why the line does not serve a problem; None if it does."""
        others = [option for option in problem.options if option not in (*self.serves, *PART_OPTIONS)]
        if direction != "fwd" and "sink" in others:
            others.remove("sink")  # backward kernels do not depend on a sink
        if others:
            return f"{self.name} does not serve {' '.join(others)}"
        if self.buckets is not None and bucket not in self.buckets:
            return f"{self.name} does not serve the bucket {bucket}"
        if self.dtypes is not None and problem.dtype not in self.dtypes:
            return f"{self.name} does not serve {problem.dtype}"
        config = self.config(problem, direction)
        if direction == "bwd_det" and not config.deterministic:
            return f"{self.name} sums dq in no fixed order"
        is_checked = problem.program or problem.has("placed")
        fault = legality.fault(problem, config, direction) if is_checked else None
        return f"{self.name} does not serve, {fault}" if fault else None

    def config(self, problem: AttnProblem, direction: str) -> Config:
        return _config(problem, self.fields, direction)


def option_lines(tile_class: str, direction: str) -> list[OptionLine]:
    """The [options] lines of an AttnProblem.tile_class, in the order they are tried. The last line serves every option."""
    section = _section(direction)
    known = [option for option in OPTIONS if section == "fwd" or option != "sink"]
    return [
        OptionLine.of(
            f"line {number} of [options.{tile_class}] {section}",
            tuple(option for option in known if option in line.get("serves", known)),
            line,
        )
        for number, line in enumerate(_grid()["options"][tile_class][section], 1)
    ]


def program_lines(problem: AttnProblem, direction: str) -> list[OptionLine]:
    """The [programs] lines of the width of a problem that fit its program, in the order they are tried."""
    section, has = _section(direction), traits(problem)
    asked = features(problem) if section == "bwd" else frozenset()
    return [
        OptionLine.of(
            f"line {number} of [programs.{problem.tile_class}] {section}", (str(problem.program),), line
        )
        for number, line in enumerate(_grid()["programs"][problem.tile_class].get(section, ()), 1)
        if line.get("needs") in (None, *has) and asked <= {*line.get("serves", ())}
    ]


def option_config(problem: AttnProblem, bucket: str, direction: str = "fwd") -> Config:
    """The config of a problem with options: the first line of its width that serves it."""
    return _choose_option_line(problem, bucket, direction).config


def candidates(problem: AttnProblem, bucket: str, direction: str = "fwd") -> list[Config]:
    """Legal configs of the grid for a bucket, the default first. SPLIT_BUCKET and FEW_BUCKET have the tiles of all lengths."""
    found = [default_config(problem, direction, bucket)]
    bucket = bucket.removesuffix(f"-{SHARED_HEADS}")
    for line in _class_table(problem, direction)["search"]:
        configs = _line_configs(problem, line, direction)
        if bucket in (SPLIT_BUCKET, FEW_BUCKET) and "buckets" not in line:
            found += [bucket_config(problem, config, bucket) for config in configs]
        elif bucket in line.get("buckets", (*BUCKETS, SHARED_HEADS)):
            found += configs
    return [config for config in dict.fromkeys(found) if legality.fault(problem, config, direction) is None]


def _line_configs(problem: AttnProblem, line: dict[str, Any], direction: str) -> list[Config]:
    """Every config that a search line describes."""
    if direction == "fwd":
        return [_fwd_config(problem, fields) for fields in _products(line)]
    found = (BwdConfig.of(passes) for passes in itertools.product(*map(_products, line["passes"])))
    return [_making_terms(problem, config, direction) for config in found]


def _products(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Fields of a config or pass, for each element of the Cartesian product of a search line's lists."""
    others = {name: value for name, value in line.items() if name not in ("tiles", "buckets")}
    lists = [value if isinstance(value, list) else [value] for value in others.values()]
    return [
        dict(zip(TILE_FIELDS, tile, strict=False)) | dict(zip(others, values, strict=True))
        for tile, *values in itertools.product(line["tiles"], *lists)
    ]


@functools.cache
def decode_lines(width: str, page_rows: int = 0) -> tuple[DecodeLine, ...]:
    """The decode configs of a width, in the order in which they are asked. The last one serves tiles of more than 64 rows.

    One producer warp per SM is too slow for copies of 16 rows, so no line for few items has them (0.75 to 1.09 of the speed, H200).
    """
    found = []
    for fields in _grid()["decode"][width]:
        most = fields.get("items_per_sm", math.inf)
        config = DecodeConfig(**{name: value for name, value in fields.items() if name != "items_per_sm"})
        if most == math.inf or page_rows != PAGE_ROWS[1]:
            found.append(DecodeLine(replace(config, page_rows=page_rows), most))
    return tuple(found)


def items_per_sm(batch: int, heads_kv: int, sms: int) -> float:
    """Items of a decode, key heads of all sequences, over the SMs of a GPU."""
    return batch * heads_kv / sms


def lines_of_rows(width: str, rows: int, page_rows: int = 0) -> tuple[DecodeLine, ...]:
    """Those of decode_lines() that serve so many rows, for some number of items."""
    lines = decode_lines(width, page_rows)
    return lines[-1:] if rows > DECODE_ROWS else lines[:-1] or lines


def decode_line(
    problem: AttnProblem, rows: int, page_rows: int = 0, items_per_sm: float = math.inf
) -> DecodeLine:
    """The line of the grid that serves a decode.

    Args:
        rows: queries x query heads per key head.
        page_rows: rows that a copy of keys from a page has; 0 without pages.
        items_per_sm: see items_per_sm(); infinite where the config may not depend on the batch.
    """
    lines = lines_of_rows(problem.width, rows, page_rows)
    return next(line for line in lines if items_per_sm <= line.items_per_sm)


def decode_config(
    problem: AttnProblem, rows: int, page_rows: int = 0, items_per_sm: float = math.inf
) -> DecodeConfig:
    """The config of a decode, see decode_line()."""
    return decode_line(problem, rows, page_rows, items_per_sm).config


def invariant_decode_config(problem: AttnProblem, config: DecodeConfig, forward: AttnProblem) -> DecodeConfig:
    """The config of a batch_invariant decode: that of the call, with the key blocks of a batch_invariant forward.

    Args:
        problem: of the decode.
        forward: the forward of the same head dims and options.
    """
    block_N = choose_invariant(forward).config.block_N
    # A copy of 64 rows does not divide blocks of 80 and 96 keys
    page_rows = config.page_rows if block_N % max(config.page_rows, 1) == 0 else PAGE_ROWS[1]
    found = (
        replace(
            config, block_N=block_N, num_stages=n, page_rows=page_rows, ctas_per_sm=1, batch_invariant=True
        )
        for n in range(config.num_stages, 0, -1)
    )
    limit = SMEM_LIMIT - legality.BARRIER_BYTES
    return next(one for one in found if legality.smem_bytes(problem, one) <= limit)


@dataclass(frozen=True)
class DecodeLine:
    """A decode config, and the launches that it serves."""

    config: DecodeConfig
    items_per_sm: float  # at most so many key heads of all sequences per SM

    def launches(self, rows: int) -> str:
        """The launches of this line in words. rows: those of a launch."""
        words = f"{'more than' if rows > DECODE_ROWS else 'at most'} {DECODE_ROWS} rows per key head"
        if self.items_per_sm == math.inf:
            return words
        return f"{words}, at most {self.items_per_sm} x SMs key heads of all sequences"


@dataclass(frozen=True)
class Choice:
    """The config that serves a problem, and why."""

    config: Config
    source: str  # the tuned row or line of the grid
    misses: tuple[str, ...] = ()  # rows and lines that were tried before, and why each does not serve
    tuned: bool = False  # from a row of a tuned table

    def __str__(self) -> str:
        return f"{self.source}: {'; '.join(self.misses)}" if self.misses else self.source


@functools.cache
def pick_config(
    problem: AttnProblem, bucket: str, gpu_name: str, direction: str = "fwd"
) -> tuple[Config, str]:
    """The config that serves a problem on a GPU (by its name in torch), and its source in words."""
    choice = choose_config(problem, bucket, gpu_name, direction)
    return choice.config, str(choice)


def choose_config(problem: AttnProblem, bucket: str, gpu_name: str, direction: str = "fwd") -> Choice:
    """The choice for a problem on a GPU: the user's tuned row, the shipped one, a row of the nearest GPU with a table, the default of
    the grid. With options, which tuned rows do not have, a line of [options].
    """
    if bucket == INVARIANT_BUCKET:
        return choose_invariant(problem)
    if problem.options or problem.program:
        return _choose_option_line(problem, bucket, direction)
    own = choose_from_tables(problem, bucket, tuned_paths(gpu_name), direction)
    misses = own.misses
    if not own.tuned:
        for near, path in near_tables(gpu_name).items():
            choice = choose_from_tables(problem, bucket, [path], direction)
            if choice.tuned:
                source = f"{choice.source}, {near}'s table, as {gpu_name} has no such row"
                return replace(choice, source=source, misses=misses + choice.misses)
            misses += choice.misses
    return replace(own, misses=misses)


def _choose_option_line(problem: AttnProblem, bucket: str, direction: str) -> Choice:
    misses = []
    of_options = problem.program is None
    lines = option_lines(problem.tile_class, direction) if of_options else program_lines(problem, direction)
    for line in lines:
        if miss := line.miss(problem, direction, bucket):
            misses.append(miss)
            continue
        config = line.config(problem, direction)
        if direction == "fwd":
            config = bucket_config(problem, config, bucket)
        source = f"{line.name} of {data_dir() / 'grid.toml'}, for {' '.join(line.serves)}"
        return Choice(config, source, tuple(misses))
    table = "options" if of_options else "programs"
    raise AssertionError(f"no [{table}.{problem.tile_class}] line serves {problem}")


def choose_invariant(problem: AttnProblem) -> Choice:
    """The choice for a forward whose bits may not depend on the batch: the key blocks of packed sequences, whatever the lengths.

    So a query has the same key blocks in a dense batch, in packed sequences and with keys in pages. The row max is not held: from which
    step on it is held depends on the other queries of the tile. The number of queries per tile is free.
    """
    packed = tuple(name for name in OPTION_ARGUMENTS if problem.has(name) or name == "varlen")
    served = problem
    if not problem.program:
        widths = problem.head_dim, problem.head_dim_v
        served = AttnProblem.of(problem.dtype, *widths, problem.causal, options=packed)
    choice = _choose_option_line(served, INVARIANT_BUCKET, "fwd")
    plain = default_config(problem)
    if not problem.options and not problem.program and plain.block_N == choice.config.block_N:
        # d64: 192 queries, 1.08 to 1.24 times as fast as 128 (H200, 2026-11-29)
        choice = Choice(plain, f"fwd default of {data_dir() / 'grid.toml'}")
    return replace(choice, config=replace(choice.config.without_hold_max(), batch_invariant=True))


def choose_from_tables(
    problem: AttnProblem, bucket: str, paths: Iterable[Path], direction: str = "fwd"
) -> Choice:
    """The config of the first tuned table that has a row, else the default.

    A missing row is replaced by the row of the other dtype, else in bwd_det by the row of bwd if that is deterministic, else by that of the
    nearest length. No other length serves if the class has a default for the bucket. A row with fields that configs lack counts as missing.
    """
    misses = []
    stand_ins = () if bucket in _class_table(problem, direction) else _stand_ins(bucket, direction)
    for near, path, section in itertools.product((bucket, *stand_ins), tuple(paths), SECTIONS[direction]):
        rows = read_tuned(path)[section]
        own, *others = (
            tuning_key(replace(problem, dtype=dtype), near) for dtype in _own_first(problem.dtype)
        )
        key = next((key for key in (own, *others) if key in rows), None)
        if key is None:
            if near == bucket and path.exists():
                misses.append(f"{path} has no {section} row {own!r}")
            continue
        try:
            config = config_of_row(problem, rows[key], direction, bucket)
            return Choice(config, f"{section} row {key!r} of {path}", tuple(misses), tuned=True)
        except ValueError as error:
            misses.append(f"{section} row {key!r} of {path} does not serve, {error}")
    config = default_config(problem, direction, bucket)
    return Choice(config, f"{direction} default of {data_dir() / 'grid.toml'}", tuple(misses))


def config_of_tables(
    problem: AttnProblem, bucket: str, paths: Iterable[Path], direction: str = "fwd"
) -> Config:
    """The config of choose_from_tables."""
    return choose_from_tables(problem, bucket, paths, direction).config


def config_of_row(
    problem: AttnProblem, row: dict[str, Any], direction: str = "fwd", bucket: str | None = None
) -> Config:
    """The config of a tuned row; the row also holds measurements.

    Raises:
        ValueError: the row has fields that configs no longer have, belongs to the other kind of bucket, or is not legal; the text says why.
    """
    try:
        config = _config(problem, row["config"], direction)
        reason = legality.fault(problem, config, direction)
        if bucket and direction == "fwd" and config.split != (bucket == SPLIT_BUCKET):
            reason = f"split is {config.split} in the bucket {bucket}"
    except (KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise ValueError(reason)
    return config


def _own_first(dtype: str) -> list[str]:
    """Dtypes whose rows may serve a dtype, itself first: bf16 and fp16 have tiles of the same size."""
    others = HALF_DTYPES if dtype in HALF_DTYPES else ()
    return [dtype, *(other for other in others if other != dtype)]
