"""The grid, the defaults, the tuned tables, and what a kernel can be."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tl_attention import configs
from tl_attention.problem import BUCKETS, AttnProblem, FwdConfig, tuning_key
from tl_attention.target import gpu_slug

D128 = AttnProblem("bfloat16", 128, 128, True)
D64 = AttnProblem("bfloat16", 64, 64, False)
TABLES = sorted((configs.data_dir() / "tuned").glob("*.json"))


@pytest.mark.parametrize("problem", configs.problems(), ids=str)
def test_grid_default_and_candidates_are_legal(problem):
    assert configs.is_legal(problem, configs.default_config(problem)) is None
    for bucket in BUCKETS:
        found = configs.candidates(problem, bucket)
        assert found[0] == configs.default_config(problem)
        assert len(found) == len(set(found)) > 3
        assert [c for c in found if configs.is_legal(problem, c)] == []


@pytest.mark.parametrize("problem", configs.problems()[: len(configs.problems()) // 2], ids=str)
def test_grid_has_no_tile_that_never_runs(problem):
    table = configs._class_table(problem)
    for tiles in (table["tiles"], *(table[bucket].get("tiles", []) for bucket in BUCKETS if bucket in table)):
        for block_M, block_N in tiles:
            assert configs.is_legal(problem, FwdConfig(block_M, block_N)) is None


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (D128, FwdConfig(96, 128), "block_M 96"),
        (D128, FwdConfig(256, 64), "block_M 256"),
        (D128, FwdConfig(128, 120), "block_N 120"),
        (D64, FwdConfig(64, 272), "block_N 272"),
        (D128, FwdConfig(128, 128, num_stages=1), "num_stages 1"),
        (D128, FwdConfig(128, 128, schedule="best"), "schedule 'best'"),
        (D128, FwdConfig(64, 128, ping_pong=True), "ping_pong"),
        (D128, FwdConfig(128, 128, q_stages=2), "no next tile"),
        (D128, FwdConfig(128, 128, num_stages=4), "shared memory: 295936 of 232448 bytes"),
        (D64, FwdConfig(192, 192), "registers: 176 of 128"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_is_legal_says_why_not(problem, config, reason):
    assert reason in configs.is_legal(problem, config)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tuned_table_is_sorted_legal_and_one_row_a_line(path):
    text = path.read_text()
    table = json.loads(text)
    assert text == configs.format_tuned(table)
    assert path.stem == gpu_slug(table["gpu"])
    by_key = {tuning_key(problem, bucket): problem for problem in configs.problems() for bucket in BUCKETS}
    for key, row in table["fwd"].items():
        configs.config_of_row(by_key[key], row)
        assert row["tflops"] > 0 and row["shapes"]


@pytest.fixture
def tuned_row(tmp_path, monkeypatch):
    """Puts one row into the table of a GPU and picks the config of a problem there."""

    def pick(row: dict, problem: AttnProblem = D128) -> tuple[FwdConfig, str]:
        (tmp_path / "gpu.json").write_text(
            configs.format_tuned({"gpu": "GPU", "fwd": {tuning_key(D128, "8k"): row}})
        )
        monkeypatch.setattr(configs, "tuned_path", lambda gpu_name: tmp_path / "gpu.json")
        configs.pick_config.cache_clear()
        configs._tuned_rows.cache_clear()
        return configs.pick_config(problem, "8k", "GPU")

    yield pick
    configs.pick_config.cache_clear()
    configs._tuned_rows.cache_clear()


WINNER = FwdConfig(128, 96, ping_pong=True)


def test_tuned_row_comes_before_the_default(tuned_row):
    assert tuned_row({"config": WINNER.as_row(), "tflops": 1.0}) == (
        WINNER,
        "row 'bf16 d128 causal 8k' of gpu.json",
    )


def test_tuned_row_serves_the_other_dtype(tuned_row):
    fp16 = AttnProblem("float16", 128, 128, True)
    assert tuned_row({"config": WINNER.as_row()}, fp16)[0] == WINNER


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"config": {**WINNER.as_row(), "block_N": 100}}, "block_N 100"),
        ({"config": {"block_M": 128, "warps": 12}}, "unexpected keyword argument 'warps'"),
        ({"block_M": 128}, "KeyError"),
        ({"config": {**WINNER.as_row(), "block_N": "96"}}, "TypeError"),
    ],
    ids=["illegal", "renamed", "flat", "text"],
)
def test_tuned_row_that_is_stale_is_a_miss_with_words(tuned_row, row, why):
    config, source = tuned_row(row)
    assert config == configs.default_config(D128)
    assert "stale" in source and why in source


def test_pick_config_without_table_is_the_default():
    config, source = configs.pick_config(D128, "8k", "No Such GPU")
    assert config == configs.default_config(D128)
    assert source == "default of grid.toml: no_such_gpu.json has no row 'bf16 d128 causal 8k'"


def test_shipped_configs_hold_every_default_once():
    shipped = configs.shipped_configs()
    assert len(shipped) == len(set(shipped))
    assert {(problem, configs.default_config(problem)) for problem in configs.problems()} <= set(shipped)


def test_format_tuned_is_one_sorted_row_a_line():
    rows = {"b": {"tflops": 2.0}, "a": {"tflops": 1.0}}
    text = configs.format_tuned({"gpu": "GPU", "fwd": rows})
    assert json.loads(text) == {"gpu": "GPU", "fwd": rows}
    assert [line.strip()[:3] for line in text.splitlines()[2:4]] == ['"a"', '"b"']


@pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang to lower a kernel")
@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (D64, FwdConfig(64, 64)),
        (AttnProblem("float16", 96, 64, False), FwdConfig(64, 32, schedule="persistent", q_stages=2)),
        (D64, FwdConfig(64, 32, num_stages=3, schedule="dynamic")),
        (AttnProblem("bfloat16", 128, 64, False), FwdConfig(64, 64, schedule="dynamic")),
    ],
    ids=str,
)
def test_smem_bytes_is_what_lowering_asks_for(problem, config):
    from tl_attention import dispatch

    assert configs.smem_bytes(problem, config) == dispatch.lower_fwd(problem, config)[1]
