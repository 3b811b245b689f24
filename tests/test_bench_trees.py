"""Race of two source trees without a GPU: its processes answer from a script, and the questions are answered on the CPU."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tl_attention.testing import timer

pytest.importorskip("rich", reason="the benchmark needs rich")
import trees
from rich.console import Console
from test_bench import gpu_stub  # noqa: F401
from trees import Tree

ROOT = Path(__file__).parents[1]
SHAPE = "1,2,2,64,64,32,causal"
SCRIPT = """
import json, sys
for line in sys.stdin:
    question = json.loads(line)
    print(json.dumps({MS} if question.get("sample") else {"bits": "BITS"}), flush=True)
"""


@pytest.fixture
def tree_of():
    """A tree whose process answers every sample with a text of Python."""
    with contextlib.ExitStack() as at_end:

        def make(folder: Path, sample: str, bits: str = "a") -> Tree:
            script = SCRIPT.replace("{MS}", sample).replace("BITS", bits)
            tree = Tree(folder, [sys.executable, "-c", script])
            at_end.callback(tree.close)
            return tree

        yield make


def test_race_has_ratios_per_round(tree_of, tmp_path: Path) -> None:
    before, after = tree_of(tmp_path / "old", '{"ms": 3.0}'), tree_of(tmp_path / "new", '{"ms": 2.0}')
    found = trees.race([before, after], {"shape": SHAPE}, 4)
    assert found == {"ms": [3.0, 2.0], "ratios": [1.5] * 4, "same_bits": True}
    console = Console(record=True, width=140, file=io.StringIO())
    console.print(
        trees.table([("fwd", SHAPE, found), ("bwd", SHAPE, {"error": "no such pass"})], [before, after])
    )
    text = console.export_text()
    assert all(word in text for word in ("old, ms", "new, ms", "3.0000", "1.500", "equal"))


def test_race_names_the_tree_that_failed(tree_of, tmp_path: Path) -> None:
    right = tree_of(tmp_path / "old", '{"ms": 3.0}')
    assert trees.race([right, tree_of(tmp_path / "new", '{"error": "spilled"}')], {}, 3) == {
        "error": "new: spilled"
    }
    died = trees.race([right, tree_of(tmp_path / "dead", "sys.exit(3)")], {}, 3)
    assert died == {"error": "dead: its process ended with 3"}
    other = trees.race([right, tree_of(tmp_path / "new", '{"ms": 3.0}', "b")], {}, 2)
    assert not other["same_bits"]


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("dtype", trees.DTYPES)
@pytest.mark.parametrize("direction", trees.PASSES)
def test_a_tree_answers_questions(direction: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "on_capture_stream", contextlib.nullcontext)
    asked = {"direction": direction, "shape": SHAPE, "dtype": dtype}
    questions = [
        asked,
        asked,
        {"sample": True},
        {"direction": direction, "shape": "nonsense", "dtype": dtype},
    ]
    answers = io.StringIO()
    trees.serve(io.StringIO("".join(json.dumps(x) + "\n" for x in questions)), answers, ROOT)
    first, again, sample, wrong = map(json.loads, answers.getvalue().splitlines())
    assert first == again and len(first["bits"]) == 64
    assert sample["ms"] > 0 and "nonsense" in wrong["error"]


def test_a_tree_has_its_own_package(tmp_path: Path) -> None:
    answers = io.StringIO()
    trees.serve(io.StringIO("{}\n"), answers, tmp_path)
    assert f"expected the package of {tmp_path}, imported that of {ROOT}" in answers.getvalue()
    shutil.copytree(ROOT / "tl_attention", tmp_path / "tl_attention")
    with contextlib.closing(trees.Tree(tmp_path)) as tree:
        asked = tree.ask(direction="fwd", shape=SHAPE, dtype="nonsense")
    assert asked["error"].startswith("KeyError"), "its package is that of the folder"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_race_needs_a_gpu(capsys: pytest.CaptureFixture) -> None:
    assert trees.main([str(ROOT), str(ROOT), "--shapes", SHAPE]) == 2
    assert "needs an NVIDIA Hopper GPU" in capsys.readouterr().out


def test_main_prints_a_table_and_the_reasons(
    tree_of, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "is_hopper", lambda device: True)
    samples = {"old": '{"ms": 3.0}', "new": '{"error": "spilled"}'}
    monkeypatch.setattr(trees, "Tree", lambda folder: tree_of(folder, samples[folder.name]))
    for name in samples:
        (tmp_path / name / "tl_attention").mkdir(parents=True)
    folders = [str(tmp_path / name) for name in samples]
    assert trees.main([*folders, "--shapes", SHAPE, "--rounds", "2"]) == 1
    assert f"fwd {SHAPE}: new: spilled" in capsys.readouterr().out


def test_digest_is_of_all_bits_and_refuses_nan() -> None:
    out, lse = torch.randn(2, 3), torch.tensor([1.0, -torch.inf])
    assert trees.digest((out, lse, None)) == trees.digest((out.clone(), lse.clone()))
    assert trees.digest((out, lse)) != trees.digest((out, lse + 1e-6))
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="NaN or inf"):
            trees.digest((out, torch.tensor(bad)))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([".", "nowhere", "--shapes", SHAPE], "after: expected a folder with tl_attention/, got nowhere"),
        ([".", ".", "--shapes", "nonsense"], "--shapes: shape 'nonsense': not in"),
        ([".", ".", "--shapes", SHAPE, "--rounds", "1"], "--rounds: expected at least 2, got 1"),
    ],
)
def test_bad_arguments_end_with_a_message(
    words: list[str], text: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        trees.main(words)
    assert text in capsys.readouterr().err
