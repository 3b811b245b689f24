"""Store of compiled kernels: those of an installed pack, and those compiled here, whose files are under configs.cache_dir()."""

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

from tl_attention.compilation import pack, toolkit
from tl_attention.compilation.compiler import template
from tl_attention.compilation.pack import PackedKernel
from tl_attention.config import configs
from tl_attention.config.kernel_configs import KernelConfig
from tl_attention.problem.attn_problem import AttnProblem

Kernel = Callable[..., None]


@functools.cache
def _sources_digest(template: str) -> str:
    """Hash of all that determines a kernel beside its problem and config: source files and compiler versions."""
    versions = [importlib.metadata.version(name) for name in ("tilelang", "apache-tvm-ffi")]
    digest = hashlib.sha256(" ".join([*versions, platform.machine()]).encode())
    for path in pack.sources(template):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kernel_path(problem: AttnProblem, config: KernelConfig) -> Path:
    """File of a kernel compiled here, which may not exist yet; its CUDA source is beside it as .cu.

    Raises:
        RuntimeError: TileLang is not installed, so no kernel can be compiled here.
    """
    toolkit.require_tilelang(f"{problem}, {config} is not compiled", pack.advice)
    chosen = template(config)
    key = f"{_sources_digest(chosen.module)} {problem!r} {config!r}"
    return configs.cache_dir() / f"{chosen.kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"


def find(problem: AttnProblem, config: KernelConfig) -> PackedKernel | Path | None:
    """A compiled kernel: of the pack, else of the cache, else None.

    Raises:
        RuntimeError: the pack is damaged; or it has no such kernel, and TileLang is not installed.
    """
    if (installed := pack.installed()) and (packed := installed.find(problem, config)):
        return packed
    path = kernel_path(problem, config)
    return path if path.exists() else None


def load(found: PackedKernel | Path) -> Kernel:
    """The function of a kernel that find() found, or of a library."""
    if isinstance(found, PackedKernel):
        return pack.load(found)
    return load_runtime().load_module(str(found))["main"]


@functools.cache
def load_runtime() -> ModuleType:
    """tvm_ffi with the libraries of tilelang that compiled kernels call. Importing tilelang itself would take most of a second."""
    import tvm_ffi  # before the libraries: it would list their thousands of functions

    if "tilelang" not in sys.modules:
        root = importlib.util.find_spec("tilelang").submodule_search_locations[0]
        for name in ("tvm_runtime", "tvm_compiler", "tilelang"):
            ctypes.CDLL(str(Path(root, "lib", f"lib{name}.so")), ctypes.RTLD_GLOBAL)
    return tvm_ffi
