"""Import rules of the package: down a list of folders, no private names, and `import tl_attention` with torch alone."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "tl_attention"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
# Files and folders of the package: each imports what stands below it
FLOORS = (
    "__init__ block_masks hf mask_picture torch_backend",  # names that users import
    "tools",
    "tuning",
    "distributed integrations",
    "api",
    "torch_ops",
    "testing",
    "reference",
    "launch",
    "compilation",
    "kernels.forward kernels.backward kernels.decode",
    "kernels.fp32",
    "kernels.sources",
    "kernels.scores",
    "kernels.seams",
    "kernels.cuda",
    "checks",
    "tracing",
    "config",
    "problem version",
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
PRIVATE = re.compile("_[^_].*")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text())


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full name) per name of the package that one of its files imports. Imports are absolute."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (
                (node.lineno, alias.name) for alias in node.names if alias.name.startswith("tl_attention")
            )
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"tl_attention/{path}:{node.lineno} has a relative import"
            if not node.module.startswith("tl_attention"):
                continue
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def room(name: str) -> str:
    """Name in FLOORS of the file or folder that has a module, or a name of it."""
    first, *rest = name.removeprefix("tl_attention.").split(".")
    return f"{first}.{rest[0]}" if first == "kernels" and rest[0] != "__init__" else first


def test_layers_imports_go_down():
    """A file imports what stands below its folder in FLOORS."""
    faults = []
    for path in FILES:
        here = room(".".join(path.with_suffix("").parts))
        for line, name in imported(path):
            if here != (there := room(name)) and FLOOR_OF[here] >= FLOOR_OF[there]:
                faults.append(f"tl_attention/{path}:{line} imports {name}")
    assert not faults


def test_layers_private_names_stay_in_their_module():
    faults = []
    for path in FILES:
        modules = set()
        for line, name in imported(path):
            last = name.rpartition(".")[2]
            if Path(*name.split(".")[1:]).with_suffix(".py") in FILES:
                modules.add(last)
            if PRIVATE.fullmatch(last):
                faults.append(f"tl_attention/{path}:{line} imports {name}")
        for node in ast.walk(tree_of(path)):
            of_module = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if of_module and node.value.id in modules and PRIVATE.fullmatch(node.attr):
                faults.append(f"tl_attention/{path}:{node.lineno} uses {node.value.id}.{node.attr}")
    assert not faults


def test_layers_kernels_have_no_postponed_annotations():
    """`typing` of Python 3.10 refuses a buffer as the value of an annotation that is text."""
    texts = {
        path: path.read_text()
        for folder in (PACKAGE, PACKAGE.parent / "examples")
        for path in folder.rglob("*.py")
    }
    kernels = [path for path, text in texts.items() if "@T.prim_func" in text]
    assert kernels
    assert not [path for path in kernels if "from __future__ import annotations" in texts[path]]


SLOW = [
    "torch._dynamo",
    "torch._inductor",
    "torch.nn.attention.flex_attention",
    "sympy",
    "tilelang",
    "tvm",
    "tvm_ffi",
    "triton",
    "rich",
]
WITHOUT_NUMPY = f"""
import logging, sys, warnings
warnings.simplefilter("error")
sys.modules["numpy"] = None
import tl_attention
public = set(dir(tl_attention))
assert public > set(tl_attention.__all__) | {{"distributed", "torch_backend"}}, public
logging.getLogger("tl_attention.x").error("a line that a program did not ask for")
print(*(name for name in {SLOW} if name in sys.modules))
"""
FILES_WITHOUT_KERNELS = [
    ".".join(("tl_attention", *path.with_suffix("").parts))
    for path in FILES
    if path.parts[0] != "kernels" and path.stem != "__init__"
]
WITH_TORCH_ALONE = f"""
import importlib, sys
import torch
print(*(name for name in {SLOW} if name in sys.modules))
sys.modules.update(dict.fromkeys(("tilelang", "tvm_ffi", "triton", "rich", "matplotlib")))
import tl_attention
for later in ("torch._dynamo", "tl_attention.distributed", "tl_attention.tracing.trace"):
    assert later not in sys.modules, f"import tl_attention imports {{later}}, which takes time for all"
assert tl_attention.distributed.shard.__name__ == "shard" and not hasattr(tl_attention, "x")
for module in {FILES_WITHOUT_KERNELS}:
    importlib.import_module(module)
assert not torch.cuda.is_initialized()
"""


def test_layers_import_needs_torch_alone_warns_nothing_and_adds_no_machinery():
    """Import in a process without NumPy, where a warning is an error, and log; and all but kernels in one with torch alone."""
    found, of_torch = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
        for code in (WITHOUT_NUMPY, WITH_TORCH_ALONE)
    )
    assert not found.stderr
    assert of_torch.returncode == 0, of_torch.stderr
    added = set(found.stdout.split()) - set(of_torch.stdout.split())
    assert not added, f"import tl_attention imports {added}, which takes time for all"
