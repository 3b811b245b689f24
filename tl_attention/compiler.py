"""Compiler: problem and config -> a kernel as TIR, as CUDA source, as a library on disk. Imports tilelang when called."""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from tl_attention import toolkit
from tl_attention.kernel_configs import (
    REGISTER_LEVEL,
    AppendConfig,
    BwdDelta,
    BwdPass,
    BwdSum,
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


def build(problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    """Compile a kernel with nvcc for sm_90a into the library `path`; its CUDA source goes beside it as .cu. Needs no GPU."""
    toolkit.require_tilelang(f"{problem}, {config} is not compiled")
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
