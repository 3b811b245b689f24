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
    "__init__": "block_masks interface flash flex kvcache merge version",
    "interface": "torch checks/common checks/fp32 checks/keywords ops options problem launch reference",
    "flash": "torch checks/common checks/keywords checks/lengths checks/transforms flex ops paged user_options",
    "paged": "torch checks/common checks/kvcache checks/lengths checks/paged checks/transforms options ops reference/kvcache "
    "user_options",
    "tracing/builtin_options": "torch checks/common options program tracing/program_values",
    "flex": "torch dtensors flex_lists tracing/builtin_options tracing/by_distance tracing/captures checks/common checks/flex checks/fp32 "
    "checks/keywords checks/transforms launch ops options program reference/flex user_options | tracing/trace",
    "flex_lists": "torch block_masks checks/transforms tracing/builtin_options tracing/captures tracing/fine_blocks tracing/intervals "
    "launch/block_lists program | tracing/trace",
    "tracing/dense_bias": "torch",
    "tracing/fine_blocks": "torch program",
    "block_masks": "torch tracing/builtin_options tracing/captures checks/common checks/flex checks/masks checks/transforms "
    "tracing/intervals program tracing/program_values | tracing/trace",
    "mask_picture": "torch block_masks checks/common checks/masks launch/block_lists | matplotlib",
    "tracing/intervals": "torch program tracing/program_values tracing/trace_ops",
    "tracing/program_values": "torch program tracing/trace_ops",
    "tracing/by_distance": "torch program tracing/program_values",
    "checks/flex": "torch checks/common problem program",
    "checks/masks": "torch checks/common checks/flex tracing/intervals",
    "tracing/trace": "torch tracing/captures tracing/dense_bias tracing/derivatives program tracing/program_values tracing/trace_ops",
    "tracing/derivatives": "torch program tracing/trace_ops",
    "tracing/trace_ops": "torch program",
    "tracing/captures": "torch",
    "merge": "torch checks/merge",
    "checks/merge": "torch checks/common",
    "checks/common": "torch problem target",
    "checks/fp32": "torch checks/common problem",
    "checks/keywords": "",
    "checks/kvcache": "torch checks/common options problem kernel_configs",
    "checks/paged": "torch checks/common checks/kvcache problem",
    "checks/transforms": "torch problem",
    "options": "torch problem",
    "ops": "torch checks/common checks/fp32 checks/lengths checks/transforms dtensors options launch ops_jvp reference transforms",
    "user_options": "torch checks/common checks/fp32 dtensors launch ops ops_dropout options",
    "dtensors": "torch checks/common",
    "ops_dropout": "torch transforms",
    "ops_jvp": "torch checks/common checks/transforms options launch reference/jvp transforms",
    "transforms": "torch options",
    "torch_backend": "torch checks/common checks/fp32 options flash ops torch_masks",
    "torch_unmasked": "torch checks/common checks/flex checks/fp32 ops options problem target",
    "torch_masks": "torch torch_unmasked checks/common checks/flex tracing/dense_bias launch options problem program "
    "reference/flex target | tracing/trace",
    "checks/lengths": "torch checks/common checks/kvcache options",
    "kvcache": "torch checks/common checks/keywords checks/transforms checks/kvcache checks/lengths options problem kernel_configs target "
    "ops launch reference/kvcache",
    "distributed": "torch checks/common checks/keywords options ops launch flash distributed",
    "hf": "torch checks/common checks/hf checks/lengths checks/transforms flash hf_flex hf_mask hf_mask_function kvcache | transformers",
    "hf_mask": "torch",
    "hf_mask_function": "torch checks/hf hf_flex hf_mask | transformers",
    "hf_flex": "torch block_masks checks/common checks/hf checks/transforms hf_mask tracing/dense_bias flex",
    "checks/hf": "torch checks/common hf_mask",
    "launch": "launch/fwd launch/fwd_jvp launch/bwd launch/bwd_passes launch/decode launch/parts launch/splits",
    "launch/seen": "torch",
    "launch/arrays": "torch checks/common problem",
    "launch/tickets": "torch",
    "launch/splits": "configs options problem",
    "launch/traced": "torch options program compilation/store",
    "launch/block_lists": "torch program launch/mask_bits",
    "launch/mask_bits": "torch program tracing/program_values",
    "launch/parts": "torch problem part_configs compilation/store launch/arrays launch/common",
    "launch/common": "torch launch/arrays checks/common options problem kernel_configs legality target configs "
    "compilation/building compilation/store",
    "launch/fwd": "torch configs options problem kernel_configs target compilation/store program launch/arrays "
    "launch/bwd_kernels launch/common launch/parts launch/splits launch/tickets launch/traced",
    "launch/fwd_jvp": "torch checks/common problem kernel_configs legality target compilation/store launch/arrays launch/common",
    "launch/bwd_kernels": "torch checks/fp32 options problem kernel_configs compilation/store program launch/common launch/traced",
    "launch/bwd_passes": "torch options problem kernel_configs part_configs round_configs compilation/store launch/block_lists "
    "launch/bwd_kernels launch/common launch/parts launch/seen launch/splits launch/tickets",
    "launch/bwd": "torch checks/common options problem kernel_configs target program launch/arrays launch/bwd_kernels "
    "launch/bwd_passes "
    "launch/common launch/parts launch/seen launch/traced",
    "launch/decode": "torch checks/common options problem kernel_configs target configs compilation/store launch/arrays launch/common",
    "compilation/building": "problem kernel_configs compilation/compiler compilation/locks compilation/pack compilation/sandbox "
    "compilation/store compilation/toolkit",
    "compilation/sandbox": "compilation/torchless",
    "compilation/torchless": "",
    "compilation/locks": "",
    "compilation/store": "problem kernel_configs configs compilation/compiler compilation/pack compilation/toolkit | tvm_ffi",
    "compilation/pack": "problem kernel_configs compilation/compiler | tvm_ffi",
    "compilation/packing": "version arguments compilation/compiler compilation/building compilation/manifest compilation/pack "
    "compilation/store compilation/toolkit | tilelang tvm_ffi",
    "compilation/compiler": "problem kernel_configs register_levels target compilation/headers compilation/layouts compilation/texts "
    "compilation/toolkit | kernels tilelang tvm_ffi",
    "compilation/headers": " | tilelang",
    "compilation/layouts": " | tilelang tvm",
    "compilation/texts": "target compilation/toolkit",
    "compilation/toolkit": " | tilelang",
    "kernels": "tilelang problem program kernel_configs part_configs query_tiles round_configs target kernels",
    "catalog": "problem program kernel_configs legality configs",
    "configs": "problem program_configs kernel_configs part_configs legality target gpus | tomli",
    "gpus": "torch",
    "target": "torch problem",
    "problem": "program",
    "program": "",
    "program_configs": "problem",
    "part_configs": "problem",
    "round_configs": "",
    "kernel_configs": "problem program part_configs",
    "query_tiles": "problem kernel_configs",
    "register_levels": "problem kernel_configs",
    "legality": "problem program kernel_configs part_configs round_configs target",
    "reference": "torch reference",
    "checks": "",
    "compilation": "",
    "tracing": "",
    "reference/kvcache": "torch reference",
    "reference/jvp": "torch reference",
    "reference/flex": "torch program reference tracing/program_values",
    "testing": "torch problem target configs reference reference/jvp testing",
    "tuning": "torch options problem kernel_configs target question catalog configs launch compilation/building compilation/cubin "
    "compilation/sandbox tuning reference testing | rich",
    "compilation/cubin": "problem kernel_configs legality target compilation/compiler compilation/store compilation/toolkit | tilelang",
    "compilation/manifest": "compilation/building compilation/sandbox catalog configs compilation/cubin compilation/compiler "
    "compilation/toolkit problem program kernel_configs part_configs legality target | tilelang tvm compilation/shadows",
    "compilation/shadows": "torch configs compilation/compiler problem program tracing/trace",
    "version": "",
    "arguments": "problem",
    "question": "torch problem kernel_configs legality target configs gpus testing | launch launch/splits options",
    "explain": "arguments torch gpus problem program kernel_configs target configs testing question explain "
    "| tracing/builtin_options tracing/by_distance tracing/dense_bias tracing/trace",
    "doctor": "torch problem target configs | compilation/manifest compilation/pack compilation/toolkit testing",
    "cli": "version arguments catalog torch problem kernel_configs legality target configs question doctor compilation/packing"
    "| explain launch compilation/building compilation/store compilation/compiler compilation/cubin compilation/toolkit "
    "compilation/manifest tuning interface flash reference testing tilelang tvm_ffi rich "
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


def test_layers_import_needs_torch_alone_and_no_more_than_it_uses():
    """Import all but kernels in a process with torch alone (None in sys.modules: not installed)."""
    files = [path for path in FILES if path.parts[0] != "kernels" and path.stem != "__init__"]
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys(("tilelang", "tvm_ffi", "triton", "rich", "matplotlib")))
import tl_attention
for later in ("torch._dynamo", "tl_attention.distributed", "tl_attention.tracing.trace"):
    assert later not in sys.modules, f"import tl_attention imports {{later}}, which takes time for all"
assert tl_attention.distributed.shard.__name__ == "shard" and not hasattr(tl_attention, "x")
for module in {[".".join(("tl_attention", *path.with_suffix("").parts)) for path in files]}:
    importlib.import_module(module)
import torch
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
