"""The manifest: every kernel has its entry, and each entry the text of today's kernel, if it ships also numbers without faults.

A sample is traced, which differs from commit to commit; `pytest --all-kernels` and `tl-attention manifest --check` trace all.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seeds import commit_seed

from tl_attention.compilation import compiler, manifest, shadows, toolkit
from tl_attention.compilation.manifest import Manifest, compare, faults
from tl_attention.config.kernel_configs import (
    BwdDelta,
    BwdPass,
    DecodeConfig,
    FwdCombine,
    FwdConfig,
    JvpConfig,
    TileTable,
)
from tl_attention.config.legality import BARRIER_BYTES, smem_bytes
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.target import SMEM_LIMIT

SHIPPED = manifest.shipped()
TRACED = manifest.traced_kernels()
COMMITTED = Manifest.read()
TEXTS = manifest.committed_texts()
STEP = 53  # one kernel in so many is traced: some 30 CPU seconds
needs_tilelang = pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang")


def pytest_generate_tests(metafunc):
    if "traced_kernel" in metafunc.fixturenames:
        step = 1 if metafunc.config.getoption("--all-kernels") else STEP
        metafunc.parametrize("traced_kernel", manifest.every(TRACED, step, commit_seed()))


def test_manifest_names_the_kernels():
    assert COMMITTED.kernels.keys() == SHIPPED.keys(), "run `tl-attention manifest`"
    assert TEXTS.keys() == TRACED.keys(), "run `tl-attention manifest`"


@needs_tilelang
@pytest.mark.timeout(600)
def test_manifest_has_the_text_of_the_kernel(traced_kernel):
    kernel = TRACED[traced_kernel]
    old, new = TEXTS.get(traced_kernel), manifest.text_hash(*kernel)
    if old == new:
        return
    judged = "not compiled"
    if toolkit.find_nvcc() and traced_kernel in SHIPPED:
        found = manifest.numbers(*kernel)
        judged = f"compiled: {'; '.join(manifest.new_faults(traced_kernel, kernel, found)) or 'no faults'}"
    pytest.fail(
        f"{traced_kernel}: expected the text {old}, got {new}; {judged}. `tl-attention manifest --check` lists all that changed; if the "
        "change is meant, run `tl-attention manifest`"
    )


def test_manifest_numbers_have_no_faults():
    found = {
        name: manifest.new_faults(name, kernel, COMMITTED.kernels.get(name, {}))
        for name, kernel in SHIPPED.items()
    }
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_manifest_is_of_the_pinned_compilers():
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    pins = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?==([\w.]+)"', pyproject))
    assert COMMITTED.versions == {"tilelang": pins["tilelang"], "nvcc": pins["nvidia-cuda-nvcc"]}


def test_manifest_file_is_formatted():
    assert manifest.manifest_path().read_text() == COMMITTED.format()
    others = {name: text for name, text in TEXTS.items() if name not in SHIPPED}
    assert manifest.texts_path().read_text() == manifest.format_texts(others)


PROBLEM = AttnProblem("bfloat16", 64, 64, True)
DECODE_PROBLEM = AttnProblem("bfloat16", 64, 64, False, ("window",))
FWD, SPLIT_FWD = FwdConfig(128, 64), FwdConfig(128, 64, split=True)
ONE_PASS, DQ = BwdPass("dq+dk+dv", 64, 128, reuse_registers=True), BwdPass("dq", 128, 64)
GOOD = {
    "registers": 168,
    "smem_static": 100,
    "ctas_per_sm": 2,
    "hgmma": 8,
    "tma": 4,
    "tma_stores": 1,
    "loops": [400],
}


def numbers(problem, config, **changed):
    """Numbers of a kernel without faults, with some changed; None drops a field."""
    found = GOOD | {"smem_bytes": 0 if isinstance(config, TileTable) else smem_bytes(problem, config)}
    if isinstance(config, FwdConfig) and config.split:
        found["tma_stores"] = 0
    if isinstance(config, BwdPass) and config.adds_dq and not problem.is_fp32:
        found["vector_sums"] = 2
    if isinstance(config, FwdCombine | BwdDelta | TileTable):
        found["hgmma"] = 0
    if isinstance(config, FwdCombine | TileTable):
        found["tma"] = 0
    if isinstance(config, BwdDelta):
        found["tma_stores"] = 0
    return {name: value for name, value in (found | changed).items() if value}


@pytest.mark.parametrize(
    "config",
    [FWD, SPLIT_FWD, JvpConfig(128, 64), ONE_PASS, DQ, FwdCombine(), BwdDelta(), TileTable(), DecodeConfig()],
    ids=str,
)
def test_faults_of_a_good_kernel(config):
    assert faults(PROBLEM, config, numbers(PROBLEM, config)) == []


@pytest.mark.parametrize(
    ("config", "changed", "text"),
    [
        (FWD, {"registers": None}, "numbers: expected those of the compiled kernel, got none; run `tl-attention manifest`"),
        (FWD, {"spill_bytes": 8}, "spill_bytes: expected 0, got 8"),
        (FWD, {"warnings": ["C7507"]}, "warnings: expected none, got ['C7507']"),
        (FWD, {"smem_static": BARRIER_BYTES + 4}, f"smem_static: expected at most {BARRIER_BYTES}, got {BARRIER_BYTES + 4}"),
        (FWD, {"ctas_per_sm": None}, "ctas_per_sm: expected at least 1, got 0"),
        (DecodeConfig(ctas_per_sm=2), {"ctas_per_sm": 1}, "ctas_per_sm: expected at least 2, got 1"),
        (FWD, {"smem_bytes": 8}, f"smem_bytes: expected {smem_bytes(PROBLEM, FWD)}, got 8"),
        (TileTable(), {"smem_bytes": SMEM_LIMIT}, f"smem_bytes: expected at most {SMEM_LIMIT} with smem_static, got {SMEM_LIMIT}"),
        (FWD, {"hgmma": None}, "hgmma: expected some, got 0"),
        (FwdCombine(), {"hgmma": 1}, "hgmma: expected none, got 1"),
        (FWD, {"tma": None}, "tma: expected some, got 0"),
        (DecodeConfig(), {"tma": None}, "tma: expected some, got 0"),
        (BwdDelta(), {"tma": None}, "tma: expected some, got 0"),
        (FwdCombine(), {"tma": 1}, "tma: expected none, got 1"),
        (FWD, {"tma_stores": None}, "tma_stores: expected some, got 0"),
        (SPLIT_FWD, {"tma_stores": 1}, "tma_stores: expected none, got 1"),
        (BwdDelta(), {"tma_stores": 1}, "tma_stores: expected none, got 1"),
        (ONE_PASS, {"vector_sums": None}, "vector_sums: expected some, got 0"),
        (DQ, {"vector_sums": 1}, "vector_sums: expected none, got 1"),
    ],
)  # fmt: skip
def test_faults_name_what_is_expected(config, changed, text):
    problem = DECODE_PROBLEM if isinstance(config, DecodeConfig) else PROBLEM
    assert text in faults(problem, config, numbers(problem, config, **changed))


def test_known_faults_are_of_shipped_kernels_and_must_go_with_the_fault(monkeypatch):
    assert manifest.KNOWN_FAULTS.keys() <= SHIPPED.keys()
    kernel, fault = (PROBLEM, FWD), "spill_bytes: expected 0, got 8"
    good, spilling = numbers(*kernel), numbers(*kernel, spill_bytes=8)
    assert manifest.new_faults("a", kernel, spilling) == [fault]
    monkeypatch.setattr(manifest, "KNOWN_FAULTS", {"a": (fault,)})
    assert manifest.new_faults("a", kernel, spilling) == []
    assert manifest.new_faults("a", kernel, good) == [
        f"KNOWN_FAULTS: expected {fault!r}, got no such fault; remove it"
    ]


NAMES = st.text("abcdef ,+-0123456789", min_size=1)
HASHES = st.sampled_from(["1a", "2b", "3c"])
MANIFESTS = st.builds(
    Manifest,
    st.fixed_dictionaries({"tilelang": HASHES, "nvcc": HASHES}),
    st.dictionaries(NAMES, st.fixed_dictionaries({"text": HASHES, "loops": st.lists(st.integers())})),
)


@given(MANIFESTS)
def test_manifest_format_has_one_sorted_kernel_per_line(written):
    text = written.format()
    assert json.loads(text) == {**written.versions, "kernels": written.kernels}
    names = [name for line in text.splitlines() if (name := re.match(r'  "(.*?)": \{', line))]
    assert [name[1] for name in names] == sorted(written.kernels)


def test_manifest_reads_what_it_wrote(monkeypatch, tmp_path):
    path = tmp_path / "kernels.json"
    monkeypatch.setattr(manifest, "manifest_path", lambda: path)
    assert Manifest.read() == Manifest({}, {})
    written = Manifest({"tilelang": "1", "nvcc": "2"}, {"a": {"text": "1a"}})
    path.write_text(written.format())
    assert Manifest.read() == written


@given(st.dictionaries(NAMES, HASHES), st.dictionaries(NAMES, HASHES), st.sets(NAMES))
def test_compare_puts_every_kernel_in_one_group(hashes, old, untraced):
    found = compare(hashes, old, untraced)
    assert sorted(found.new) == sorted({*hashes, *untraced} - {*old})
    assert sorted(found.gone) == sorted({*old} - {*hashes} - untraced)
    assert sorted((*found.changed, *found.same)) == sorted({*hashes} & {*old})
    assert all(hashes[name] == old[name] for name in found.same)
    assert all(hashes[name] != old[name] for name in found.changed)
    assert ("no hash changed" in str(found)) == (not (found.new or found.changed or found.gone))


def test_compare_with_itself_finds_no_change():
    assert str(compare(TEXTS, TEXTS)) == f"no hash changed: {len(TEXTS)} the same"


@pytest.mark.parametrize("step", [1, 2, STEP])
def test_every_kernel_is_in_the_sample_of_one_seed(step):
    samples = [manifest.every(TRACED, step, seed) for seed in range(100, 100 + step)]
    assert sorted(name for names in samples for name in names) == sorted(TRACED)


def test_samples_have_shadow_kernels_of_each_kind():
    kinds = {name.partition(": ")[0] for name in TRACED if ": " in name}
    assert len(kinds) == len(shadows.shadow_kernels())
    for names in (manifest.every(TRACED, STEP, seed) for seed in range(STEP)):
        assert sum(": " in name for name in names) >= 4


@given(st.integers(min_value=0), st.integers(0, 12))
def test_sample_has_as_many_as_asked_and_one_per_template(seed, count):
    names = manifest.sample(SHIPPED, seed, count)
    templates = {compiler.template(config) for _, config in SHIPPED.values()}
    assert {compiler.template(SHIPPED[name][1]) for name in names} == templates
    assert count <= len(names) <= count + len(templates) and len(names) == len({*names})
    assert names == manifest.sample(SHIPPED, seed, count)


def test_samples_reach_every_kernel():
    left = {*SHIPPED}
    for seed in range(len(SHIPPED)):
        left -= {*manifest.sample(SHIPPED, seed, 8)}
        if not left:
            return
    pytest.fail(f"in no sample: {left}")


def test_sample_prefers_cheap_kernels():
    names = manifest.sample(SHIPPED, 0, 0)
    assert all(
        not SHIPPED[name][0].options for name in names if isinstance(SHIPPED[name][1], FwdConfig | BwdPass)
    )


def test_kernels_without_numbers_are_compiled(monkeypatch, tmp_path):
    kernel, other = list(SHIPPED.values())[:2]
    versions = {"tilelang": "1", "nvcc": "2"}
    written = Manifest(versions, {"a": {"text": "1a", "source": "2a", "registers": 1}, "b": {"text": "1a"}})
    path = tmp_path / "kernels.json"
    monkeypatch.setattr(manifest, "manifest_path", lambda: path)
    monkeypatch.setattr(manifest, "texts_path", lambda: tmp_path / "texts.json")
    monkeypatch.setattr(manifest, "shipped", lambda: {"a": kernel, "b": other})
    monkeypatch.setattr(manifest, "traced_kernels", lambda: {"a": kernel, "b": other, "c: c": kernel})
    monkeypatch.setattr(manifest, "compiler_versions", lambda: versions)
    monkeypatch.setattr(manifest, "trace_all", lambda kernels, jobs: dict.fromkeys(kernels, "1a"))
    monkeypatch.setattr(manifest, "entry", lambda *kernel: {"text": "1a", "source": "2b", "registers": 2})
    path.write_text(written.format())
    for source, a in (("2a", 1), ("2b", 2)):
        monkeypatch.setattr(manifest, "source_hash", lambda *kernel, source=source: source)
        manifest.rewrite(jobs=1, sources=True, say=lambda text: None)
        kernels = json.loads(path.read_text())["kernels"]
        assert [kernels[name]["registers"] for name in "ab"] == [a, 2]
    assert json.loads((tmp_path / "texts.json").read_text()) == {"c: c": "1a"}
