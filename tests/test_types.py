"""Types and help as a user sees them: overloads, literals, complete docstrings, and type checkers on a file of a user."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import typed_user

import tl_attention
from tl_attention.distributed.choice import METHODS, MethodName
from tl_attention.distributed.layout import NAMES, LayoutName
from tl_attention.problem.attn_problem import PRECISIONS, Precision

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("stubs", ROOT / "scripts/stubs.py")
stubs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(stubs)
USER = Path(typed_user.__file__)
INTERNAL = (
    "checks", "compilation", "config", "kernels", "launch", "problem", "reference", "testing", "tools", "torch_ops", "tracing", "tuning",
)  # fmt: skip
MIN_KNOWN = 0.95  # of the public symbols
FUNCTIONS = [
    pytest.param(getattr(module, name), id=name)
    for module in (tl_attention, tl_attention.distributed)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name)) and stubs.flags_of(getattr(module, name))
]


def checker(module, *words):
    """Result of a type checker on a file of a user; the test is skipped where it is not installed."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}: pip install -e '.[dev]'")
    environment = os.environ | {"MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.timeout(600)
def test_mypy_strict_accepts_the_code_of_a_user(tmp_path):
    found = checker("mypy", "--strict", "--follow-imports=silent", f"--cache-dir={tmp_path}", USER)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.timeout(600)
def test_pyright_strict_accepts_the_code_of_a_user(tmp_path):
    config = tmp_path / "pyrightconfig.json"
    config.write_text(json.dumps({"include": [str(USER)], "extraPaths": [str(ROOT)]}))
    found = checker("pyright", "--project", config)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.timeout(600)
def test_pyright_knows_the_types_of_public_names():
    found = checker("pyright", "--verifytypes", "tl_attention", "--ignoreexternal", "--outputjson")
    symbols = [
        symbol
        for symbol in json.loads(found.stdout)["typeCompleteness"]["symbols"]
        if symbol["isExported"] and symbol["name"].split(".")[1] not in INTERNAL
    ]
    unknown = [symbol["name"] for symbol in symbols if not symbol["isTypeKnown"]]
    assert len(symbols) > 400
    assert len(unknown) <= (1 - MIN_KNOWN) * len(symbols), f"of {len(symbols)} no known type: {unknown}"


def test_the_code_of_a_user_runs():
    typed_user.main()


@pytest.mark.parametrize("package", stubs.PACKAGES)
def test_stub_is_current(package):
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("needs ruff, which formats stubs: pip install -e '.[dev]'")
    assert stubs.path_of(package).read_text() == stubs.stub(package), (
        "python scripts/stubs.py writes the stubs anew"
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_docstring_has_every_parameter(function):
    names = [name for name in inspect.signature(function).parameters if name != "unknown"]
    documented = re.findall(r"^    (\w+(?:, \w+)*):", inspect.cleandoc(function.__doc__), re.MULTILINE)
    assert not set(names) - set(", ".join(documented).split(", "))


@pytest.mark.parametrize(
    "literal, names", [(Precision, PRECISIONS), (MethodName, METHODS), (LayoutName, NAMES)]
)
def test_literals_are_the_accepted_words(literal, names):
    assert get_args(literal) == tuple(names)


def test_dir_has_the_public_names():
    public = [name for name in dir(tl_attention) if not name.startswith("_")]
    assert public == sorted(
        {*tl_attention.__all__, "block_masks", "distributed", "hf", "mask_picture", "torch_backend"}
        - {"__version__"}
    )
