"""The rooms of the package: who imports whom, and what `import tl_attention` must not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tl_attention"
STDLIB = sys.stdlib_module_names | {"tomllib"}

# Room (a file or folder of the package): what it may import | what else inside a function or for type hints.
DOORS = {
    "__init__": "interface flash kvcache merge",
    "interface": "torch checks ops dispatch reference",
    "flash": "torch checks ops",
    "merge": "torch checks",
    "checks": "torch problem",
    "extras": "torch problem",
    "ops": "torch checks extras dispatch reference",
    "torch_backend": "torch extras flash ops",
    "kvcache": "torch checks extras problem target ops dispatch_decode reference",
    "hf": "torch flash kvcache | transformers",
    "dispatch": "torch arrays extras problem target configs | kernels cubin tilelang tvm_ffi",
    "dispatch_decode": "torch arrays extras problem target configs dispatch",
    "kernels": "tilelang problem target kernels",
    "arrays": "torch problem",
    "configs": "problem target | tomli",
    "target": "torch",
    "problem": "",
    "reference": "torch",
    "testing": "torch problem target configs reference testing",
    "autotune": "torch problem target configs dispatch cubin sandbox reference testing | rich",
    "sandbox": "",
    "cubin": "problem target configs dispatch | kernels tilelang",
    "manifest": "configs cubin dispatch problem",
    "cli": "torch problem target configs"
    "| dispatch cubin manifest autotune interface flash reference testing tilelang tvm_ffi rich benchmarks",
}
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imports(path: Path) -> list[tuple[int, str, bool]]:
    """(line, room or distribution, at the top?) of every import in a file, but for the standard library."""
    package = ".".join(("tl_attention", *path.parts[:-1]))
    found = []

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = resolve_name("." * child.level + (child.module or ""), package)
                names = [f"{base}.{alias.name}" for alias in child.names]
            for name in names:
                first, *rest = name.split(".")
                target = (rest or ["__init__"])[0] if first == "tl_attention" else first
                if target not in STDLIB:
                    found.append((child.lineno, target, top))
            for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            visit(child, top and not for_types and not isinstance(child, ast.FunctionDef))

    visit(ast.parse((PACKAGE / path).read_text()), True)
    return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_layers_imports_go_one_way(path):
    room = path.parts[0].removesuffix(".py")
    assert room in DOORS, f"{path} is no room of the house: give it a line in DOORS"
    at_top, _, inside = (set(words.split()) for words in DOORS[room].partition("|"))
    for line, name, top in imports(path):
        allowed = at_top if top else at_top | inside
        where = "at the top" if top else "inside a function"
        may = f"{where} {room} may import {' '.join(sorted(allowed)) or 'nothing'}"
        assert name in allowed, f"tl_attention/{path}:{line} imports {name}: {may}"


def test_layers_sees_every_kind_of_import(tmp_path, monkeypatch):
    source = """
from . import softmax
from .. import checks
from ..problem import AttnProblem
from tl_attention import ops
import tl_attention.flash, torch.nn as nn, math
def factory():
    from tilelang.jit import compile
"""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/x.py").write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    *at_top, last = [(name, top) for _, name, top in imports(Path("kernels/x.py"))]
    assert at_top == [(name, True) for name in ("kernels", "checks", "problem", "ops", "flash", "torch")]
    assert last == ("tilelang", False)


def import_without_extras(*modules: str) -> None:
    """Import modules in a process that has torch alone (None in sys.modules: not there) and takes no GPU."""
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys(("tilelang", "tvm_ffi", "triton", "rich", "matplotlib")))
for module in {modules}:
    importlib.import_module(module)
import torch
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


def test_layers_import_needs_torch_alone():
    import_without_extras("tl_attention")


def test_layers_every_room_but_kernels_needs_torch_alone():
    files = [path for path in FILES if path.parts[0] != "kernels" and path.stem != "__init__"]
    import_without_extras(*(".".join(("tl_attention", *path.with_suffix("").parts)) for path in files))
