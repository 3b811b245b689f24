"""Store of compiled kernels: the file of a kernel under configs.cache_dir(), and its loading."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tl_attention import configs
from tl_attention.compiler import TEMPLATES, template
from tl_attention.kernel_configs import KernelConfig
from tl_attention.problem import AttnProblem

Kernel = Callable[..., None]


@functools.cache
def _sources_digest(template: str) -> str:
    """Hash of all that determines a kernel beside its problem and config: source files and compiler versions."""
    folder = Path(__file__).parent
    versions = [importlib.metadata.version(name) for name in ("tilelang", "apache-tvm-ffi")]
    digest = hashlib.sha256(" ".join([*versions, platform.machine()]).encode())
    others = {name for name, _ in TEMPLATES.values()} - {template}
    kernels = (path for path in folder.glob("kernels/*.py") if path.stem not in others)
    for path in sorted(
        [*kernels, *(folder / f"{name}.py" for name in ("problem", "kernel_configs", "target"))]
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kernel_path(problem: AttnProblem, config: KernelConfig) -> Path:
    """File of a compiled kernel, which may not exist yet; its CUDA source is beside it as .cu."""
    module, _ = template(config)
    key = f"{_sources_digest(module)} {problem!r} {config!r}"
    return configs.cache_dir() / f"{module}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"


def load(path: Path) -> Kernel:
    """The kernel in a library."""
    return _load_runtime().load_module(str(path))["main"]


@functools.cache
def _load_runtime() -> ModuleType:
    """tvm_ffi with the libraries of tilelang that compiled kernels call. Importing tilelang itself would take most of a second."""
    import tvm_ffi  # before the libraries: it would list their thousands of functions

    if "tilelang" not in sys.modules:
        root = importlib.util.find_spec("tilelang").submodule_search_locations[0]
        for name in ("tvm_runtime", "tvm_compiler", "tilelang"):
            ctypes.CDLL(str(Path(root, "lib", f"lib{name}.so")), ctypes.RTLD_GLOBAL)
    return tvm_ffi
