"""The words rule of CONTRIBUTING.md, as far as a program can check it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("tl_attention", "benchmarks", "tests", "examples")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

# Words that open a docstring without naming its subject
BARE_OPENINGS = {
    "Of", "That", "Those", "These", "This", "What", "As", "Whether", "Where", "Which", "Who", "When", "While", "By", "How", "Past",
    "Before", "After", "Beside", "So", "On", "At", "From", "With", "Without", "It", "They",
}  # fmt: skip


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def docstrings(source: str) -> list[tuple[int, str]]:
    """(line, text) of every docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (getattr(node, "lineno", 1), text)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and (text := ast.get_docstring(node))
    ]


def bare_openings(source: str) -> list[tuple[int, str]]:
    """(line, docstring) of those that open with a bare preposition, pronoun or conjunction."""
    return [
        (line, text) for line, text in docstrings(source) if text.split()[0].rstrip(",.:") in BARE_OPENINGS
    ]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_words_docstrings_name_their_subject(path):
    found = [
        f"{name(path)}:{line} {text.splitlines()[0]!r}" for line, text in bare_openings(path.read_text())
    ]
    assert not found, "open with a noun phrase or an imperative: " + "; ".join(found)


def test_words_finds_bare_openings():
    source = '"""Launches."""\ndef f():\n    """Of a launch."""\nclass A:\n    """That of x."""\n    def g(self): "As f."\n'
    assert bare_openings(source) == [(2, "Of a launch."), (4, "That of x."), (6, "As f.")]
