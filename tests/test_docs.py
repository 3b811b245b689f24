"""Code of README.md, docs/ and CONTRIBUTING.md, and the tutorial kernel."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from tl_attention.compilation import manifest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks/results").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

# Calls of these pages run on a CPU, by the reference, as on a GPU: only sizes and device differ
CALLS = [
    pytest.param(code, id=f"{name}-{number}")
    for name in ("README.md", "docs/options.md", "docs/kvcache.md", "docs/flex.md")
    for number, code in enumerate(BLOCK.findall((ROOT / name).read_text()), 1)
    if "import torch\n" in code
]
TINY = {
    "cuda": "cpu", "4096": "64", "1500": "20", "2596": "44", "100,": "40,", "8192": "128", "4000": "40", "5000": "50",
    "512, 513": "20, 21", "        512,": "        20,", "513, 32": "21, 32", "3000": "90", "3200": "96", "1000, 1700": "10, 20",
}  # fmt: skip


def anchors(page):
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    found = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    numbers = [found[:i].count(anchor) for i, anchor in enumerate(found)]
    return {f"{anchor}-{n}" if n else anchor for anchor, n in zip(found, numbers, strict=True)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_links_and_contents_name_what_is_there(page):
    """Links lead to a file, and to a heading of it; contents at the top of a page name all its headings; the index has all notes."""
    text = page.read_text()
    links = [link for link in LINK.findall(text) if not link.startswith("mailto:") and "://" not in link]
    pages = {link: page.parent / link.split("#")[0] if link.split("#")[0] else page for link in links}
    missing = [link for link, there in pages.items() if not there.exists()]
    assert not missing, f"{page.name} links to {missing}"
    missing = [link for link in links if "#" in link and link.split("#")[1] not in anchors(pages[link])]
    assert not missing, f"{page.name} links to {missing}"
    top = text.partition("\n## ")[0]
    if top.count("](#") >= 2:
        titles = re.findall(r"^## (.*?)(?: \(2.*)?$", text, re.MULTILINE)  # without its date
        missing = [title for title in titles if f"[{title}](#" not in top]
        assert not missing, f"{page.name}: expected the headings {missing} in the contents at the top"
    if page.parent.name == "notes" and page.name[0] == "2":
        assert f"[{page.name}]({page.name})" in (page.parent / "README.md").read_text()


def test_docs_matrix_counts_the_kernels_of_the_manifest():
    text = (ROOT / "docs/matrix.md").read_text()
    for count, of in (
        (len(manifest.Manifest.read().kernels), "`configs/kernels.json`"),
        (len(manifest.pack_kernels()), "a pack"),
    ):
        assert f"the {count:,} kernels of {of}" in text


def test_docs_python_compiles():
    for page in PAGES:
        for code in BLOCK.findall(page.read_text()):
            compile(code, str(page), "exec")


@pytest.mark.filterwarnings("ignore:.*CPU")
@pytest.mark.parametrize("code", CALLS)
def test_docs_calls_run_on_cpu(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a block writes a picture
    if "save_picture" in code:
        pytest.importorskip("matplotlib")
    for word, tiny in TINY.items():
        code = code.replace(word, tiny)
    exec(compile(code, "<docs>", "exec"), {"__name__": "docs"})


def load_tutorial():
    spec = importlib.util.spec_from_file_location("tutorial_fwd", ROOT / "examples" / "tutorial_fwd.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang")
@pytest.mark.in_turn(1)
@pytest.mark.parametrize("causal", [False, True])
def test_docs_tutorial_kernel_lowers(causal):
    source, smem = load_tutorial().lower(causal)
    assert "tl::wgmma_ss" in source and "tl::wgmma_rs" in source, (
        "both products on the tensor cores of Hopper"
    )
    assert source.count("tl::tma_load(") == 3, "Q, K and V by TMA"
    assert "warpgroup_reg_dealloc" in source, "TileLang makes a warpgroup of its own for the loads"
    assert smem == 2 * 128 * (128 + 2 * 2 * 128), "Q, and two stages of K and V, 2 bytes per element"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (333, 777), (777, 333), (512, 512)], ids=str)
def test_docs_tutorial_kernel_is_right(causal, lengths):
    error, lse_error = load_tutorial().largest_error(causal, 2, 8, 2, *lengths)
    assert error < 0.03  # |O| < 6, in bfloat16
    assert lse_error < 1e-4
    torch.cuda.synchronize()
