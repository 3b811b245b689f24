"""The grid, the defaults, the tuned tables, and what a kernel can be."""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import asdict
from pathlib import Path

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
        assert 5 < len(found) == len(set(found)) <= 24
        assert [c for c in found if configs.is_legal(problem, c)] == []


@pytest.mark.parametrize("problem", configs.problems()[: len(configs.problems()) // 2], ids=str)
def test_grid_has_no_value_that_never_runs(problem):
    for line in configs._class_table(problem)["search"]:
        assert set(line) <= {"tiles", "buckets", *configs.SEARCHED}
        assert set(line.get("buckets", BUCKETS)) <= set(BUCKETS)
        lists = configs._grid()["fwd"] | line
        for tile, *values in itertools.product(lists["tiles"], *(lists[name] for name in configs.SEARCHED)):
            config = FwdConfig(*tile, **dict(zip(configs.SEARCHED, values, strict=True)))
            assert configs.is_legal(problem, config) is None


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
    """Puts one row into the user's table of a GPU and picks the config of a problem there."""
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(tmp_path))

    def pick(row: dict, problem: AttnProblem = D128) -> tuple[FwdConfig, str]:
        write_row(tmp_path / "tuned" / "gpu.json", row)
        configs.pick_config.cache_clear()
        return configs.pick_config(problem, "4k", "GPU")

    yield pick
    configs.pick_config.cache_clear()


def write_row(path: Path, row: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(configs.format_tuned({"gpu": "GPU", "fwd": {tuning_key(D128, "4k"): row}}))
    return path


WINNER = FwdConfig(128, 96, ping_pong=True)


def test_tuned_row_comes_before_the_default(tuned_row, tmp_path):
    assert tuned_row({"config": asdict(WINNER), "tflops": 1.0}) == (
        WINNER,
        f"row 'bf16 d128 causal 4k' of {tmp_path / 'tuned' / 'gpu.json'}",
    )


def test_tuned_row_serves_the_other_dtype(tuned_row):
    fp16 = AttnProblem("float16", 128, 128, True)
    assert tuned_row({"config": asdict(WINNER)}, fp16)[0] == WINNER


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"config": {**asdict(WINNER), "block_N": 100}}, "block_N 100"),
        ({"config": {"block_M": 128, "warps": 12}}, "unexpected keyword argument 'warps'"),
        ({"block_M": 128}, "KeyError"),
        ({"config": {**asdict(WINNER), "block_N": "96"}}, "TypeError"),
    ],
    ids=["illegal", "renamed", "flat", "text"],
)
def test_tuned_row_that_is_stale_is_a_miss_with_words(tuned_row, row, why):
    config, source = tuned_row(row)
    assert config == configs.default_config(D128)
    assert "stale" in source and why in source


def test_first_table_that_has_a_row_serves(tmp_path):
    other = FwdConfig(128, 64)
    first = write_row(tmp_path / "first.json", {"config": asdict(WINNER)})
    second = write_row(tmp_path / "second.json", {"config": asdict(other)})
    assert configs.config_of_tables(D128, "4k", [first, second])[0] == WINNER
    assert configs.config_of_tables(D128, "4k", [tmp_path / "none.json", second])[0] == other
    stale = write_row(tmp_path / "stale.json", {"config": {"warps": 12}})
    assert configs.config_of_tables(D128, "4k", [stale, second])[0] == other


def test_pick_config_without_table_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(tmp_path))
    config, source = configs.pick_config(D128, "4k", "No Such GPU")
    assert config == configs.default_config(D128)
    assert source.startswith(f"default of {configs.data_dir() / 'grid.toml'}: ")
    for path in configs.tuned_paths("No Such GPU"):
        assert f"{path} has no row 'bf16 d128 causal 4k'" in source


def test_tuner_writes_to_a_checkout_and_not_into_an_installed_package(tmp_path, monkeypatch):
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


def test_shipped_configs_are_not_the_users(tuned_row):
    before = configs.shipped_configs()
    tuned_row({"config": asdict(FwdConfig(128, 32))})
    assert configs.shipped_configs() == before


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
