"""Import rules of the package: allowed directions, no circles, no private names, and `import tl_attention` with torch alone."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tl_attention"
STDLIB = sys.stdlib_module_names | {"tomllib"}

# Room: what it may import | what else inside a function or for type hints.
# A room is a file, or a folder with those of its files that have no line of their own.
DOORS = {
    "__init__": "block_masks interface flash flex kvcache merge",
    "interface": "torch checks checks_fp32 ops options launch reference",
    "flash": "torch checks checks_lengths checks_torch flex ops paged",
    "paged": "torch checks checks_kvcache checks_lengths checks_paged checks_torch options ops reference_kvcache",
    "builtin_options": "torch checks options program program_values",
    "flex": "torch block_masks builtin_options checks checks_flex checks_torch dense_bias intervals launch launch/block_lists ops program "
    "reference_flex | trace",
    "dense_bias": "torch",
    "block_masks": "torch builtin_options captures checks_flex checks_masks checks_torch intervals program program_values | trace",
    "mask_picture": "torch block_masks checks checks_masks launch/block_lists | matplotlib",
    "intervals": "torch program program_values trace_ops",
    "program_values": "torch program trace_ops",
    "checks_flex": "torch checks program",
    "checks_masks": "torch checks checks_flex intervals",
    "trace": "torch captures program trace_ops",
    "trace_ops": "torch program",
    "captures": "torch",
    "merge": "torch checks",
    "checks": "torch problem target",
    "checks_fp32": "torch checks problem",
    "checks_kvcache": "torch checks options problem kernel_configs",
    "checks_paged": "torch checks checks_kvcache problem",
    "checks_torch": "torch problem",
    "options": "torch problem",
    "ops": "torch checks checks_fp32 checks_torch options launch ops_jvp reference transforms",
    "ops_jvp": "torch checks checks_torch options launch reference_jvp transforms",
    "transforms": "torch options",
    "torch_backend": "torch checks checks_fp32 options flash ops torch_masks",
    "torch_masks": "torch checks_flex dense_bias launch problem program reference_flex target | trace",
    "checks_lengths": "torch checks checks_kvcache options",
    "kvcache": "torch checks checks_torch checks_kvcache checks_lengths options problem kernel_configs target ops launch reference_kvcache",
    "distributed": "torch checks options ops launch flash distributed",
    "hf": "torch checks checks_hf checks_lengths checks_torch flash hf_flex kvcache | transformers",
    "hf_flex": "torch block_masks checks checks_hf checks_torch dense_bias flex",
    "checks_hf": "torch checks",
    "launch": "launch/fwd launch/fwd_jvp launch/bwd launch/bwd_passes launch/decode launch/parts launch/splits",
    "launch/arrays": "torch checks problem",
    "launch/tickets": "torch",
    "launch/splits": "options problem",
    "launch/traced": "torch program",
    "launch/block_lists": "torch program",
    "launch/parts": "torch problem store launch/arrays launch/common",
    "launch/common": "torch checks options problem kernel_configs legality target configs building store",
    "launch/fwd": "torch options problem kernel_configs target store program launch/arrays launch/bwd launch/common launch/parts "
    "launch/splits launch/tickets launch/traced",
    "launch/fwd_jvp": "torch checks problem kernel_configs legality target store launch/arrays launch/common",
    "launch/bwd_passes": "torch problem kernel_configs store launch/block_lists launch/common launch/tickets",
    "launch/bwd": "torch checks checks_fp32 options problem kernel_configs target store program launch/arrays launch/bwd_passes "
    "launch/common launch/parts launch/traced",
    "launch/decode": "torch checks options problem kernel_configs target configs store launch/arrays launch/common",
    "building": "problem kernel_configs compiler sandbox store",
    "sandbox": "",
    "store": "problem kernel_configs configs compiler pack toolkit | tvm_ffi",
    "pack": "problem kernel_configs compiler | tvm_ffi",
    "packing": "problem kernel_configs compiler building manifest pack store toolkit | tilelang tvm_ffi",
    "compiler": "problem kernel_configs target toolkit | kernels tilelang tvm_ffi",
    "toolkit": " | tilelang",
    "kernels": "tilelang problem program kernel_configs target kernels",
    "configs": "problem program_configs kernel_configs legality target gpus | tomli",
    "gpus": "torch",
    "target": "torch problem",
    "problem": "program",
    "program": "",
    "program_configs": "problem",
    "kernel_configs": "problem",
    "legality": "problem program kernel_configs target",
    "reference": "torch",
    "reference_kvcache": "torch reference",
    "reference_jvp": "torch reference",
    "reference_flex": "torch program program_values",
    "testing": "torch problem target configs reference reference_jvp testing",
    "tuning": "torch options problem kernel_configs target configs launch building cubin sandbox tuning reference testing | rich",
    "cubin": "problem kernel_configs legality target compiler store toolkit | tilelang",
    "manifest": "building sandbox configs cubin compiler toolkit problem kernel_configs legality target",
    "question": "torch problem kernel_configs legality target configs gpus | launch",
    "explain": "distributed "
    "gpus problem kernel_configs legality target configs launch/splits launch/bwd_passes launch/common testing question explain "
    "| matplotlib",
    "doctor": "torch problem target configs | manifest pack toolkit testing",
    "cli": "torch problem kernel_configs legality target configs question doctor packing"
    "| explain launch building store compiler cubin toolkit manifest tuning interface flash reference testing tilelang tvm_ffi rich "
    "benchmarks",
}
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(("tl_attention", *path.with_suffix("").parts)).removesuffix(".__init__")


def imported(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, full name, at the top?) per name that a file of the package imports, by absolute or relative import."""
    package = ".".join(("tl_attention", *path.parts[:-1]))

    def visit(node: ast.AST, top: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = resolve_name("." * child.level + (child.module or ""), package)
                names = [f"{base}.{alias.name}" for alias in child.names]
            yield from ((child.lineno, name, top) for name in names)
            for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from visit(child, top and not for_types and not isinstance(child, ast.FunctionDef))

    return visit(ast.parse((PACKAGE / path).read_text()), True)


def imports(path: Path) -> list[tuple[int, str, bool]]:
    """(line, room or distribution, at the top?) per import of a file, without the standard library."""
    found = []
    for line, name, top in imported(path):
        first, *rest = name.split(".")
        target = first
        if first == "tl_attention":
            target = "/".join(rest[:2]) if "/".join(rest[:2]) in DOORS else (rest or ["__init__"])[0]
        if target not in STDLIB:
            found.append((line, target, top))
    return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_layers_imports_go_one_way(path):
    room = path.with_suffix("").as_posix()
    if room not in DOORS:
        room = path.parts[0]
    assert room in DOORS, f"{path} is no room of the package: add a line to DOORS"
    at_top, _, inside = (set(words.split()) for words in DOORS[room].partition("|"))
    for line, name, top in imports(path):
        allowed = at_top if top else at_top | inside
        where = "at the top" if top else "inside a function"
        may = f"{where} {room} may import {' '.join(sorted(allowed)) or 'nothing'}"
        assert name in allowed, f"tl_attention/{path}:{line} imports {name}: {may}"


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Module of the package -> modules of the package that it imports, at the top or inside functions."""
    modules = {module_name(path) for path in FILES}
    graph = {}
    for path in FILES:
        names = (name for _, name, _ in imported(path))
        found = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module_name(path)] = found & modules - {"tl_attention"}
    return graph


def test_layers_imports_make_no_circle():
    TopologicalSorter(import_graph()).prepare()  # raises CycleError, which names the circle


PRIVATE = re.compile("_[^_].*")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_layers_private_names_stay_in_their_module(path):
    modules, of_package = set(), import_graph()
    for line, name, _ in imported(path):
        last = name.rpartition(".")[2]
        if name in of_package:
            modules.add(last)
        private = name.startswith("tl_attention.") and PRIVATE.fullmatch(last)
        assert not private, f"tl_attention/{path}:{line} imports {name}, which is private to its module"
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            private = f"{node.value.id}.{node.attr}, which is private to its module"
            assert not PRIVATE.fullmatch(node.attr), f"tl_attention/{path}:{node.lineno} uses {private}"


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
    """Import modules in a process with torch alone (None in sys.modules: not installed), which must not initialize CUDA."""
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


def test_layers_import_does_not_import_the_compiler_of_torch():
    code = "import sys, tl_attention; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "False", f"{done.stdout}{done.stderr}: a second of import for all"


def test_layers_every_room_but_kernels_needs_torch_alone():
    files = [path for path in FILES if path.parts[0] != "kernels" and path.stem != "__init__"]
    import_without_extras(*(".".join(("tl_attention", *path.with_suffix("").parts)) for path in files))
