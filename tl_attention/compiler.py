"""Compiler: problem and config -> compiled kernel, a callable.

A kernel is compiled once, and kept on disk under configs.cache_dir() and in a dict of the process. A process that finds its kernel
on disk loads it without importing tilelang, which takes longer than the loading.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tl_attention import configs, toolkit
from tl_attention.kernel_configs import (
    REGISTER_LEVEL,
    AppendConfig,
    BwdDelta,
    BwdPass,
    BwdSum,
    Config,
    DecodeCombine,
    DecodeConfig,
    FwdCombine,
    FwdConfig,
    KernelConfig,
    TileTable,
    register_level,
)
from tl_attention.problem import AttnProblem
from tl_attention.target import TARGET

# Config class -> module of kernels/ and function in it. No template imports another; all import the other files of kernels/
TEMPLATES = {
    FwdConfig: ("fwd", "flash_fwd"),
    FwdCombine: ("fwd_combine", "flash_fwd_combine"),
    BwdDelta: ("bwd_delta", "flash_bwd_delta"),
    BwdPass: ("bwd", "flash_bwd"),
    "dq": ("bwd_dq", "flash_bwd_dq"),
    BwdSum: ("bwd_sum", "flash_bwd_sum"),
    TileTable: ("tile_table", "flash_tile_table"),
    DecodeConfig: ("decode", "flash_decode"),
    DecodeCombine: ("decode_combine", "flash_decode_combine"),
    AppendConfig: ("append", "flash_append"),
}

Kernel = Callable[..., None]
_compiled: dict[tuple[AttnProblem, KernelConfig], Kernel] = {}


def compile_count() -> int:
    """Number of kernels that this process has compiled or loaded."""
    return len(_compiled)


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


def template(config: KernelConfig) -> tuple[str, str]:
    """Module of kernels/ that makes a kernel, and the function in it."""
    by_queries = isinstance(config, BwdPass) and config.grads == "dq"
    return TEMPLATES["dq" if by_queries else type(config)]


def trace(problem: AttnProblem, config: KernelConfig) -> Any:
    """Kernel in TileLang, a PrimFunc. Needs neither GPU nor nvcc."""
    module, function = template(config)
    return getattr(_kernel_module(module), function)(problem, config)


def _kernel_module(name: str) -> ModuleType:
    return importlib.import_module(f"tl_attention.kernels.{name}")


def pass_configs(problem: AttnProblem, config: KernelConfig) -> dict[str, object]:
    """Options of the compiler passes for a kernel."""
    module, _ = template(config)
    found = dict(_kernel_module(module).PASS_CONFIGS)
    if (level := register_level(problem, config)) != REGISTER_LEVEL:
        found["tl.ptxas_register_usage_level"] = level
    return found


def kernel_path(problem: AttnProblem, config: KernelConfig) -> Path:
    """File of a compiled kernel, which may not exist yet; its CUDA source is beside it as .cu."""
    module, _ = template(config)
    key = f"{_sources_digest(module)} {problem!r} {config!r}"
    return configs.cache_dir() / f"{module}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"


def lower(problem: AttnProblem, config: KernelConfig) -> tuple[str, int]:
    """CUDA source of a kernel, and its bytes of dynamic shared memory. Needs neither GPU nor nvcc."""
    import tilelang
    from tilelang import tvm

    program = trace(problem, config)
    target = tvm.target.Target(TARGET)
    with tvm.transform.PassContext(opt_level=3, config=pass_configs(problem, config)), target:
        artifact = tilelang.lower(program, target=target)
    (function,) = (f for _, f in artifact.device_mod.functions.items())
    return artifact.kernel_source, int(function.attrs.get("dyn_shared_memory_buf", 0))


def _build(problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    import tilelang

    if toolkit.find_nvcc() is None:
        raise RuntimeError(
            f"tl_attention: {problem} needs a kernel that is not compiled yet; {toolkit.NO_NVCC}"
        )
    logger = logging.getLogger("tilelang")
    level = logger.level
    logger.setLevel(logging.WARNING)  # it reports each export
    try:
        kernel = tilelang.compile(
            trace(problem, config), target=TARGET, pass_configs=pass_configs(problem, config)
        )
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            path.with_suffix(".cu").write_text(kernel.get_kernel_source())
            kernel.export_library(str(Path(folder, path.name)))
            os.replace(Path(folder, path.name), path)
    finally:
        logger.setLevel(level)


@functools.cache
def _load_runtime() -> ModuleType:
    """tvm_ffi with the libraries of tilelang that compiled kernels call. Importing tilelang itself would take most of a second."""
    import tvm_ffi  # before the libraries: it would list their thousands of functions

    if "tilelang" not in sys.modules:
        root = importlib.util.find_spec("tilelang").submodule_search_locations[0]
        for name in ("tvm_runtime", "tvm_compiler", "tilelang"):
            ctypes.CDLL(str(Path(root, "lib", f"lib{name}.so")), ctypes.RTLD_GLOBAL)
    return tvm_ffi


def compile_config(problem: AttnProblem, config: Config) -> None:
    """Compile or load all kernels of a config."""
    for kernel in config.kernels(problem):
        compile_kernel(*kernel)


def compile_kernel(problem: AttnProblem, config: KernelConfig) -> Kernel:
    """Compiled kernel: from this process, else from disk, else by nvcc for sm_90a (seconds, no GPU needed).

    Returns:
        A function whose arguments are described in its file of kernels/.
    """
    key = (problem, config)
    if key not in _compiled:
        path = kernel_path(problem, config)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open(
                "w"
            ) as lock:  # of many processes one compiles, the others wait
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    _build(problem, config, path)
        _compiled[key] = _load_runtime().load_module(str(path))["main"]
    return _compiled[key]
