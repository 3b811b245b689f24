"""The grid, tuned tables, choice of a config, and legality."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tl_attention.config import catalog, configs, legality
from tl_attention.config.buckets import buckets, option_buckets
from tl_attention.config.kernel_configs import (
    BWD_SCHEDULES,
    SCHEDULES,
    BwdConfig,
    BwdDelta,
    BwdPass,
    BwdSum,
    Config,
    FirstTermsConfig,
    FwdCombine,
    FwdConfig,
    TermsConfig,
    terms_kernels,
)
from tl_attention.problem.attn_problem import (
    BUCKETS,
    BWD_TILE_WIDTHS,
    DEFAULT_DTYPE,
    DIRECTIONS,
    HALF_DTYPES,
    NARROW_WIDTH,
    OPTIONS,
    SPLIT_BUCKET,
    AttnProblem,
    tile_widths,
    tuning_key,
)
from tl_attention.problem.target import gpu_slug

D128 = AttnProblem("bfloat16", 128, 128, True)
D64 = AttnProblem("bfloat16", 64, 64, False)
TABLES = sorted((configs.data_dir() / "tuned").glob("*.json"))


D192_128 = AttnProblem("bfloat16", 192, 128, False)
D256 = AttnProblem("bfloat16", 256, 256, True)
ROW_BUCKETS = "short", "256", "fit-192", "tile", "tile192"  # some classes have no line for them
CLASSES = [(problem, direction) for direction in DIRECTIONS for problem in catalog.problems(direction)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_config_of_the_grid_can_run(direction):
    """Defaults, candidates of each length class, and all configs of its search lines."""
    for problem in catalog.problems(direction):
        asked = {configs.default_config(problem, direction): "default"}
        for bucket in buckets(direction):
            found = configs.candidates(problem, bucket, direction)
            assert found[0] == configs.default_config(problem, direction, bucket), f"{problem} {bucket}"
            assert (bucket not in ROW_BUCKETS) < len(found) == len(set(found)) <= 26, f"{problem} {bucket}"
            asked |= dict.fromkeys(found, bucket)
        for line in configs._class_table(problem, direction)["search"] if direction != "bwd_det" else ():
            assert set(line.get("buckets", BUCKETS)) <= {*BUCKETS, *ROW_BUCKETS}, problem
            asked |= dict.fromkeys(configs._line_configs(problem, line, direction), "search")
        faults = {c: fault for c in asked if (fault := legality.fault(problem, c, direction))}
        assert not faults, problem


def test_every_section_of_the_grid_serves_a_problem():
    served = {id(configs._class_table(problem, direction)) for problem, direction in CLASSES}
    for section in ("fwd", "bwd"):
        assert [name for name, table in configs._grid()[section].items() if id(table) not in served] == []


FAULTS = [
    (D128, FwdConfig(96, 128), "block_M: expected 64, 128 or 192 (64 rows per consumer warpgroup), got 96"),
    (D128, FwdConfig(256, 64), "block_M: expected 64, 128 or 192 (64 rows per consumer warpgroup), got 256"),
    (D128, FwdConfig(128, 120), "block_N: expected a multiple of 16 in 16..256, got 120"),
    (D64, FwdConfig(64, 272), "block_N: expected a multiple of 16 in 16..256, got 272"),
    (D128, FwdConfig(128, 128, schedule="best"), "schedule: expected one of grid, persistent, dynamic, stream-K, got 'best'"),
    (D128, FwdConfig(64, 128, ping_pong=True), "ping_pong: expected block_M of at least 128 (2 warpgroups), got 64"),
    (D128, FwdConfig(128, 128, q_stages=2), "no next tile"),
    (D128, FwdConfig(192, 64, schedule="dynamic", q_stages=1.5), "unless block_M is 128"),
    (AttnProblem("bfloat16", 192, 128, True), FwdConfig(128, 64, schedule="dynamic", q_stages=1.5), "tile of Q"),
    (D128, FwdConfig(128, 128, schedule="dynamic", split=True), "split: expected the schedule grid"),
    (D128, FwdConfig(128, 128, hold_max=True), "hold_max: expected the schedule persistent or dynamic"),
    (replace(D128, dtype="float16"), FwdConfig(128, 128, schedule="dynamic", hold_max=True), "hold_max: expected bfloat16, got float16"),
    (replace(D128, options=("varlen",)), FwdConfig(192, 64), "block_M: expected a divisor of 128 with varlen, got 192"),
    (D256, FwdConfig(128, 128), "shared memory: expected at most 232448 bytes, got 328704"),
    (D64, FwdConfig(192, 192), "registers: expected at most 128 per thread for accumulators, got 176"),
]  # fmt: skip


def passes(*texts: str) -> BwdConfig:
    """A BwdConfig from passes as they print: dk+dv 64x128x2x2 reuse late-sums."""
    parts = (text.split() for text in texts)
    return BwdConfig(
        tuple(
            BwdPass(
                grads,
                *map(int, sizes.split("x")),
                reuse_registers="reuse" in words,
                order="".join(set(words) - {"reuse", *SCHEDULES, *BWD_SCHEDULES}),
                schedule=next((word for word in words if word in (*SCHEDULES, *BWD_SCHEDULES)), "grid"),
            )
            for grads, sizes, *words in parts
        )
    )


BWD_FAULTS = [
    (D128, passes(), "passes: expected dk, dq and dv once each, got nothing"),
    (D128, passes("dk+dv 64x128"), "passes: expected dk, dq and dv once each, got dk, dv"),
    (D128, passes("dk+dv 64x128", "dq 128x64", "dv 64x128"), "passes: expected dk, dq and dv once each, got dk, dq, dv, dv"),
    (D128, passes("dv+dk 64x128", "dq 128x64"), "grads: expected one of dq+dk+dv, dq+dk, dk+dv, dk, dv, dq, got 'dv+dk'"),
    (D128, passes("dk+dv 64x96", "dq 128x64"), "dk+dv 64x96x2x2: block_N: expected 64, 128 or 192 (64 rows per consumer warpgroup), got"),
    (D128, passes("dk+dv 64x128", "dq 96x64"), "dq 96x64x2x2: block_M: expected 64, 128 or 192 (64 rows per consumer warpgroup), got 96"),
    (D128, passes("dk+dv 56x128", "dq 128x64"), "block_M: expected 32, 64, 96 or 128, got 56"),
    (D64, passes("dk+dv 16x128", "dq 128x64"), "block_M: expected 32, 64, 96 or 128, got 16"),
    (D64, passes("dk+dv 64x128", "dq 128x120"), "block_N: expected a multiple of 16 in 16..256, got 120"),
    (D64, passes("dq+dk+dv 96x128"), "block_M: expected 64 or 128 where dq is summed, 64 rows of it at a time, got 96"),
    (D64, passes("dq+dk+dv 64x128"), "reuse_registers: expected True where dq is summed"),
    (D64, passes("dk+dv 64x128", "dq 128x64 reuse"), "reuse_registers: expected False in the pass of dq alone, got True"),
    (D64, passes("dq+dk+dv 64x128 reuse late"), "order: expected one of '', 'early-sums', 'late-sums', 'separate-dS', 'apart' where dq is"),
    (D64, passes("dk+dv 64x128 reuse late-sums", "dq 128x64"), "order: expected one of '' where no dq is summed, got 'late-sums'"),
    (D128, passes("dq+dk+dv 64x128 reuse apart"), "order: expected another than 'apart' with the schedule grid, got 'apart'"),
    (D64, passes("dq+dk+dv 64x128 reuse apart stream-K"), "reuse_registers: expected False in the order apart up to d64, got True"),
    (replace(D128, options=("softcap",)), passes("dq+dk+dv 64x128 reuse apart dynamic-late"), "order: expected another than 'apart' with"),
    (
        replace(D128, options=("window", "placed")), passes("dq+dk+dv 64x128 reuse apart dynamic-late"),
        "order: expected another than 'apart' with one_tile, another option than sink, varlen, window, alibi or",
    ),
    (D64, passes("dq+dk+dv 64x128 reuse late-sums persistent"), "schedule: expected grid or dynamic or dynamic-late or ordered or"),
    (D64, passes("dq+dk+dv 64x128 reuse dynamic"), "schedule: expected grid with another program than a bias or a mask, without an order,"),
    (replace(D128, options=("window",)), passes("dq+dk 64x128 reuse late-sums", "dv 64x128"), "grads: expected dq in a pass of its own,"),
    (replace(D64, options=("window",)), passes("dq+dk+dv 64x128 reuse late-sums dynamic"), "schedule: expected grid or dynamic-late or"),
    (
        replace(D64, options=("window", "softcap")), passes("dq+dk+dv 64x128 reuse late-sums stream-K"),
        "schedule: expected grid or dynamic-late here, got 'stream-K'",
    ),
    (D64, passes("dk+dv 64x128 dynamic", "dq 128x64"), "schedule: expected grid with another program than a bias or a mask, without an"),
    (D128, passes("dq+dk+dv 64x128x3x3 reuse early-sums dynamic"), "shared memory: expected at most 232448 bytes, got "),
    (D64, passes("dq+dk+dv 64x128x1 reuse"), "num_stages: expected at least 2, got 1"),
    (D64, passes("dq+dk+dv 64x128x2x0 reuse"), "num_stages_do: expected at least 1, got 0"),
    (D64, passes("dk+dv 128x128", "dq 128x64"), "registers: expected at most 232 per thread for accumulators, got 256"),
    (D64, passes("dq+dk+dv 64x192"), "block_N: expected 128 where dq is summed (two warpgroups share it), got 192"),
    (D64, passes("dk+dv 64x192", "dq 128x64"), "registers: expected at most 152 per thread for accumulators, got 160"),
    (D128, passes("dk+dv 96x128", "dq 128x64"), "registers: expected at most 232 per thread for accumulators, got 272"),
    (D192_128, passes("dk 64x128", "dv 64x128", "dq 128x112"), "dq 128x112x2x2: registers: expected at most 232 per thread for"),
    (D192_128, passes("dk 64x128", "dv 64x128x6", "dq 128x64"), "dv 64x128x6x2: shared memory: expected at most 232448 bytes, got 265216"),
    (D256, passes("dk 64x128", "dv 64x128", "dq 128x64x2x1"), "dk 64x128x2x2: shared memory: expected at most 232448 bytes, got 264192"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "config", "reason", "direction"),
    [*((*row, "fwd") for row in FAULTS), *((*row, "bwd") for row in BWD_FAULTS)],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_fault_says_why_not(problem, config, reason, direction):
    assert reason in legality.fault(problem, config, direction)


def test_fault_refuses_summed_dq_for_the_deterministic_backward():
    fast, fixed = passes("dq+dk+dv 64x128 reuse"), passes("dk+dv 64x128", "dq 128x64")
    assert legality.fault(D128, fast) is legality.fault(D128, fast, "bwd") is None
    assert "sums dq in no fixed order" in legality.fault(D128, fast, "bwd_det")
    assert legality.fault(D128, fixed, "bwd") is legality.fault(D128, fixed, "bwd_det") is None


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_without_a_mask_in_pages_holds_no_row_max(causal):
    """Kernels for pages begin at the last key."""
    problem = replace(D128, causal=causal, options=("alibi", "varlen"))
    config = configs.option_config(problem, "4k")
    assert config.hold_max and config.paged(problem, 0) == config
    for form in config.paged_forms(problem):
        assert form.page_rows and form.hold_max == causal and legality.fault(problem, form) is None


LINES = [
    (width, direction) for direction in ("fwd", "bwd") for width in tile_widths(direction, with_options=True)
]


@pytest.mark.parametrize(("width", "direction"), LINES)
def test_every_option_line_serves_something_and_the_last_serves_all(width, direction):
    lines = configs.option_lines(AttnProblem(DEFAULT_DTYPE, *width, False).width, direction)
    known = [option for option in OPTIONS if direction == "fwd" or option != "sink"]
    served = {}
    for options in itertools.chain(*(itertools.combinations(known, n) for n in range(1, len(known) + 1))):
        directions = (direction, "bwd_det") if direction == "bwd" else (direction,)
        places = ((), ("placed",)) if "window" in options else ((),)
        for wanted, place, dtype in itertools.product(directions, places, HALF_DTYPES):
            problem = AttnProblem(dtype, *width, False, (*options, *place))
            for bucket in option_buckets(wanted, options):
                line = next(line for line in lines if line.miss(problem, wanted, bucket) is None)
                assert set(options) <= set(line.serves)
                served[line.name] = line
    assert list(lines[-1].serves) == known
    assert {line.name for line in lines} == set(served)


def test_option_line_says_why_it_does_not_serve():
    half = replace(D64, dtype="float16", options=("alibi",))
    assert (
        "line 8 of [options.d64] bwd does not serve float16"
        in configs.choose_config(half, "4k", "NVIDIA H200", "bwd").misses
    )
    problem = replace(D64, options=("window", "dropout"))
    choice = configs.choose_config(problem, "4k", "NVIDIA H200", "bwd_det")
    assert choice.misses[0] == "line 1 of [options.d64] bwd does not serve dropout"
    assert "line 15 of [options.d64] bwd sums dq in no fixed order" in choice.misses
    assert choice.source.startswith("line 18 of [options.d64] bwd of ") and choice.config.deterministic
    with_sink = replace(D64, options=("window", "sink", "dropout"))
    assert configs.choose_config(with_sink, "4k", "NVIDIA H200", "bwd_det") == choice


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tuned_table_is_sorted_legal_and_one_row_per_line(path):
    text = path.read_text()
    table = json.loads(text)
    assert text == configs.format_tuned(table)
    assert path.stem == gpu_slug(table["gpu"])
    for direction in DIRECTIONS:
        problems = catalog.problems(direction)
        by_key = {tuning_key(p, bucket): (p, bucket) for p in problems for bucket in buckets(direction)}
        for key, row in table.get(direction, {}).items():
            problem, bucket = by_key[key]
            configs.config_of_row(problem, row, direction, bucket)
            # A config that was set by hand has no times
            assert set(row) == {"config"} or (row["tflops"] > 0 and row["shapes"])


@pytest.fixture
def tuned_row(tmp_path, monkeypatch):
    """A function that writes one row into the user's table of a GPU and picks the config of a problem."""
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(tmp_path))

    def pick(row: dict, problem: AttnProblem = D128, direction: str = "fwd") -> tuple[Config, str]:
        write_row(tmp_path / "tuned" / "gpu.json", row, direction)
        configs.pick_config.cache_clear()
        return configs.pick_config(problem, "4k", "GPU", direction)

    yield pick
    configs.pick_config.cache_clear()


def write_row(path: Path, row: dict, direction: str = "fwd") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(configs.format_tuned({"gpu": "GPU", direction: {tuning_key(D128, "4k"): row}}))
    return path


WINNER = FwdConfig(128, 96, ping_pong=True)
BWD_WINNER = passes("dk+dv 32x128", "dq 128x128")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tuned_row_comes_before_the_default(direction, tuned_row, tmp_path):
    winner = WINNER if direction == "fwd" else BWD_WINNER
    assert tuned_row({"config": asdict(winner), "tflops": 1.0}, direction=direction) == (
        winner,
        f"{direction} row 'bf16 d128 causal 4k' of {tmp_path / 'tuned' / 'gpu.json'}",
    )
    for other in set(DIRECTIONS) - {direction}:
        serves = other == "bwd_det" and direction == "bwd"
        expected = winner if serves else configs.default_config(D128, other)
        assert configs.pick_config(D128, "4k", "GPU", other)[0] == expected


def test_tuned_row_serves_the_other_dtype(tuned_row):
    fp16 = AttnProblem("float16", 128, 128, True)
    assert tuned_row({"config": asdict(WINNER)}, fp16)[0] == WINNER


@pytest.mark.parametrize(
    ("direction", "row", "why"),
    [
        (
            "fwd",
            {"config": {**asdict(WINNER), "block_N": 100}},
            "block_N: expected a multiple of 16 in 16..256, got 100",
        ),
        ("fwd", {"config": {"block_M": 128, "warps": 12}}, "unexpected keyword argument 'warps'"),
        ("fwd", {"block_M": 128}, "KeyError"),
        ("fwd", {"config": {**asdict(WINNER), "block_N": "96"}}, "TypeError"),
        ("fwd", {"config": asdict(BWD_WINNER)}, "unexpected keyword argument 'passes'"),
        ("fwd", {"config": {**asdict(WINNER), "split": True}}, "split is True in the bucket 4k"),
        ("bwd", {"config": asdict(WINNER)}, "KeyError: 'passes'"),
        ("bwd", {"config": {"passes": [{"grads": "dq+dk+dv", "block_M": 64, "warps": 3}]}}, "'warps'"),
        ("bwd", {"config": asdict(passes("dq 128x64"))}, "passes: expected dk, dq and dv once each, got dq"),
        ("bwd_det", {"config": asdict(passes("dq+dk+dv 64x128 reuse"))}, "sums dq in no fixed order"),
    ],
    ids=[
        "illegal",
        "renamed",
        "flat",
        "text",
        "of-the-backward",
        "of-another-bucket",
        "of-the-forward",
        "pass-renamed",
        "incomplete",
        "order",
    ],
)
def test_tuned_row_that_does_not_serve_is_a_miss_with_a_reason(tuned_row, direction, row, why):
    config, source = tuned_row(row, direction=direction)
    assert config == configs.default_config(D128, direction)
    assert "does not serve" in source and why in source


def test_first_table_that_has_a_row_serves(tmp_path):
    other = FwdConfig(128, 64)
    first = write_row(tmp_path / "first.json", {"config": asdict(WINNER)})
    second = write_row(tmp_path / "second.json", {"config": asdict(other)})
    assert configs.config_of_tables(D128, "4k", [first, second]) == WINNER
    assert configs.config_of_tables(D128, "4k", [tmp_path / "none.json", second]) == other
    stale = write_row(tmp_path / "stale.json", {"config": {"warps": 12}})
    assert configs.config_of_tables(D128, "4k", [stale, second]) == other


def test_length_without_a_row_uses_the_nearest_row(tmp_path):
    near = write_row(tmp_path / "near.json", {"config": asdict(WINNER)})
    for bucket in ("1k", "long"):
        choice = configs.choose_from_tables(D128, bucket, [near])
        assert choice.config == WINNER and "causal 4k" in choice.source
        assert choice.misses == (f"{near} has no fwd row 'bf16 d128 causal {bucket}'",)
    default = configs.default_config(D128, bucket="split")
    assert configs.config_of_tables(D128, "split", [near]) == default

    other = FwdConfig(128, 64)
    own = tmp_path / "own.json"
    key = tuning_key(D128, "long")
    own.write_text(configs.format_tuned({"gpu": "GPU", "fwd": {key: {"config": asdict(other)}}}))
    assert configs.config_of_tables(D128, "long", [near, own]) == other


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pick_config_without_table_is_the_default(direction, tmp_path, monkeypatch):
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(tmp_path))
    config, source = configs.pick_config(D128, "4k", "No Such GPU", direction)
    assert config == configs.default_config(D128, direction)
    assert source == f"{direction} default of {configs.data_dir() / 'grid.toml'}", (
        "a table that is not there misses no row"
    )
    users, _ = configs.tuned_paths("Another GPU")
    users.parent.mkdir()
    users.write_text("{}")
    _, source = configs.pick_config(D128, "4k", "Another GPU", direction)
    assert f"{users} has no {direction} row 'bf16 d128 causal 4k'" in source


H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


@pytest.fixture
def two_tables(tmp_path, monkeypatch):
    """Shipped tables of an H100, with a row of 4k, and of an H200, with one of the split bucket too; and the user's folder."""
    split = configs.split_config(FwdConfig(128, 64))
    rows = {H100: {"4k": WINNER}, H200: {"4k": FwdConfig(128, 64), "split": split}}
    paths = {}
    for gpu, configs_by_bucket in rows.items():
        table = {tuning_key(D128, bucket): {"config": asdict(c)} for bucket, c in configs_by_bucket.items()}
        paths[gpu] = tmp_path / "tuned" / f"{gpu_slug(gpu)}.json"
        paths[gpu].parent.mkdir(exist_ok=True)
        paths[gpu].write_text(configs.format_tuned({"gpu": gpu, "fwd": table}))
    monkeypatch.setattr(configs, "data_dir", lambda: tmp_path)
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(tmp_path / "user"))
    return paths


@pytest.mark.parametrize(
    ("gpu", "near"),
    [
        ("NVIDIA H100 PCIe", H100),
        ("NVIDIA H100 NVL", H100),
        ("NVIDIA H800", H100),
        ("NVIDIA H20", H100),
        ("NVIDIA GH200 480GB", H100),
        ("NVIDIA GH200 144G HBM3e", H200),
        ("NVIDIA H200 NVL", H200),
    ],
)
def test_gpu_without_a_table_takes_that_of_the_nearest(gpu, near, two_tables):
    choice = configs.choose_config(D128, "4k", gpu)
    assert choice.config == configs.choose_config(D128, "4k", near).config
    assert choice.source == (
        f"fwd row 'bf16 d128 causal 4k' of {two_tables[near]}, {near}'s table, as {gpu} has no such row"
    )


def test_picked_config_says_whose_table_serves(two_tables):
    """TL_ATTENTION_PRINT_CONFIGS prints the source."""
    configs.pick_config.cache_clear()
    config, source = configs.pick_config(D128, "4k", "NVIDIA H20")
    configs.pick_config.cache_clear()
    assert config == WINNER and f"{H100}'s table, as NVIDIA H20 has no such row" in source


def test_nearest_table_comes_after_the_users_and_the_own(two_tables, monkeypatch):
    own = configs.choose_config(D128, "4k", H100)
    assert own.config == WINNER and own.source == f"fwd row 'bf16 d128 causal 4k' of {two_tables[H100]}"
    users = FwdConfig(128, 32)
    write_row(configs.tuned_paths("NVIDIA H20")[0], {"config": asdict(users)})
    assert configs.choose_config(D128, "4k", "NVIDIA H20").config == users
    assert configs.choose_config(D128, "long", "NVIDIA H20").config == users, (
        "the user's nearest length first"
    )


def test_row_that_the_nearest_table_lacks_is_that_of_the_next(two_tables, monkeypatch):
    monkeypatch.setattr(configs, "default_config", lambda *_: WINNER)  # the tables' folder has no grid
    for gpu in (H100, "NVIDIA H20"):
        choice = configs.choose_config(D128, "split", gpu)
        assert (
            choice.config.split
            and choice.config.block_N == 64
            and f"{H200}'s table, as {gpu}" in choice.source
        )
    assert not configs.choose_config(replace(D128, causal=False), "4k", "NVIDIA H20").tuned


def test_h200_takes_no_other_table(two_tables, monkeypatch):
    two_tables[H200].write_text(configs.format_tuned({"gpu": H200}))
    monkeypatch.setattr(configs, "default_config", lambda *_: FwdConfig(128, 32))
    assert configs.near_tables(H200) == {}
    assert configs.choose_config(D128, "4k", H200).config == FwdConfig(128, 32)
    assert list(configs.near_tables("NVIDIA H20")) == [H100, H200]
    assert list(configs.near_tables("NVIDIA GH200 144G HBM3e")) == [H200]
    assert configs.near_tables("No Such GPU") == configs.near_tables("NVIDIA A10") == {}


def test_tuned_path_is_the_users_table_in_an_installed_package(tmp_path, monkeypatch):
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(tmp_path))
    assert configs.tuned_path("A GPU") == configs.data_dir() / "tuned" / "a_gpu.json"
    monkeypatch.setattr(configs, "installed", lambda: True)
    assert configs.tuned_path("A GPU") == tmp_path / "tuned" / "a_gpu.json"


@pytest.mark.parametrize(
    ("set_to", "expected"),
    [
        ({"TL_ATTENTION_CACHE_DIR": "/a", "TILELANG_CACHE_DIR": "/b", "XDG_CACHE_HOME": "/c"}, "/a"),
        ({"TILELANG_CACHE_DIR": "/b", "XDG_CACHE_HOME": "/c"}, "/b/tl_attention"),
        ({"XDG_CACHE_HOME": "/c", "TILELANG_CACHE_DIR": ""}, "/c/tl_attention"),
        ({}, "/home/me/.cache/tl_attention"),
    ],
    ids=["ours", "tilelang", "xdg", "home"],
)
def test_cache_dir(set_to, expected, monkeypatch):
    for name in ("TL_ATTENTION_CACHE_DIR", "TILELANG_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | set_to).items():
        monkeypatch.setenv(name, value)
    assert configs.cache_dir() == Path(expected)


def test_shipped_configs_ignore_the_users_table(tuned_row):
    before = catalog.shipped_configs()
    tuned_row({"config": asdict(FwdConfig(128, 32))})
    assert catalog.shipped_configs() == before


def test_shipped_configs_hold_every_default_once():
    shipped = catalog.shipped_configs()
    assert len(shipped) == len(set(shipped))
    defaults = {(*one, configs.default_config(*one, bucket)) for one in CLASSES for bucket in buckets(one[1])}
    assert defaults <= set(shipped)
    assert {direction for _, direction, _ in catalog.shipped_configs(["bwd"])} == {"bwd"}


def test_shipped_kernels_are_those_of_the_shipped_configs_once():
    shipped = catalog.shipped_kernels()
    assert len(shipped) == len(set(shipped))
    for problem, _, config in catalog.shipped_configs():
        assert set(config.kernels(problem)) <= set(shipped)
    of_forward = {FwdConfig, FwdCombine, TermsConfig, FirstTermsConfig}
    assert {type(config) for _, config in shipped} == {*of_forward, BwdPass, BwdDelta, BwdSum}
    assert {type(config) for _, config in catalog.shipped_kernels(["fwd"])} == of_forward


def test_split_bucket_has_split_configs_and_no_other_bucket_has_any():
    for problem in catalog.problems():
        for bucket in buckets("fwd"):
            found = configs.candidates(problem, bucket)
            assert {config.split for config in found} == {bucket == SPLIT_BUCKET}
            assert configs.pick_config(problem, bucket, "No Such GPU")[0].split == (bucket == SPLIT_BUCKET)
        split = configs.default_config(problem, bucket=SPLIT_BUCKET)
        combine = (problem.plain.helper_problem(problem.head_dim_v), FwdCombine())
        assert split.kernels(problem) == [(problem, split), combine, *terms_kernels(problem)]
        widths = problem.head_dim, problem.head_dim_v
        packed = AttnProblem.of(problem.dtype, *widths, problem.causal, options=("varlen",))
        combine = (packed.plain.helper_problem(packed.head_dim_v), FwdCombine())
        split = configs.option_config(packed, SPLIT_BUCKET)
        assert split.split and not configs.option_config(packed, "1k").split
        assert split.kernels(packed)[:2] == [(packed, split), combine]
    assert buckets("bwd") == (*BUCKETS, "tile", "tile192", "1k-shared", "4k-shared", "long-shared")
    assert buckets("bwd_det") == (*BUCKETS, "tile", "shared", "tile192")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_deterministic_rows_of_an_h100_are_those_of_an_h200(width, causal):
    """Its plain rows sum dq in no fixed order. A row of its own would stand in for the lengths that it lacks, too."""
    problem = AttnProblem("bfloat16", width, width, causal)
    for bucket in (*BUCKETS, "shared"):
        (ours, _), (theirs, source) = (
            configs.pick_config(problem, bucket, gpu, "bwd_det")
            for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
        )
        assert ours == theirs and "nvidia_h200.json" in source


def test_every_forward_problem_has_a_backward_problem():
    half = [problem for problem in catalog.problems("bwd") if not problem.is_fp32]
    assert {(p.head_dim, p.head_dim_v) for p in half} == {NARROW_WIDTH, *BWD_TILE_WIDTHS}
    for problem in catalog.problems("fwd"):
        if problem.is_fp32 and problem.width == "d256":
            continue  # refused by checks/fp32.py
        words = (problem.dtype, problem.head_dim, problem.head_dim_v, problem.causal)
        assert AttnProblem.of(*words, "bwd") in catalog.problems("bwd_det")


def test_format_tuned_is_one_sorted_row_per_line():
    rows = {"b": {"tflops": 2.0}, "a": {"tflops": 1.0}}
    table = {"gpu": "GPU", "fwd": rows, "bwd": {}, "bwd_det": rows}
    text = configs.format_tuned(table)
    assert json.loads(text) == {"gpu": "GPU", "fwd": rows, "bwd_det": rows}
    first_words = [line.split()[0] for line in text.splitlines()]
    assert first_words == ['{"gpu":', '"fwd":', '"a":', '"b":', "},", '"bwd_det":', '"a":', '"b":', "}}"]


def test_read_tuned_has_every_direction(tmp_path):
    assert configs.read_tuned(tmp_path / "none.json") == {direction: {} for direction in DIRECTIONS}
    path = write_row(tmp_path / "table.json", {"tflops": 1.0}, "bwd")
    table = configs.read_tuned(path)
    assert table["bwd"] and table["fwd"] == table["bwd_det"] == {}
    assert configs.format_tuned(table) == path.read_text()
