"""Compiler: problem and config -> a kernel as TIR, as CUDA source, as a library on disk. Imports tilelang when called."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import re
import shutil
import subprocess
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tl_attention.compilation import headers, layouts, texts, toolkit
from tl_attention.config.kernel_configs import (
    AppendConfig,
    BwdDelta,
    BwdPass,
    BwdReduce,
    BwdSum,
    DecodeCombine,
    DecodeConfig,
    FirstTermsConfig,
    FwdCombine,
    FwdConfig,
    JvpConfig,
    KernelConfig,
    TermsConfig,
    TileTable,
)
from tl_attention.config.register_levels import REGISTER_LEVEL, register_level
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.target import TARGET

KernelKey = tuple[AttnProblem, KernelConfig]  # identifies a kernel


class Template(NamedTuple):
    """A function that makes kernels."""

    module: str  # in kernels/, such as forward.kernel
    function: str

    @property
    def kind(self) -> str:
        """Begin of the names of its compiled kernels, such as fwd."""
        return self.function.removeprefix("flash_")


# By config class. No template imports another; all import the other files of kernels/
TEMPLATES = {
    FwdConfig: Template("forward.kernel", "flash_fwd"),
    TermsConfig: Template("fp32.terms", "flash_terms"),
    FirstTermsConfig: Template("fp32.first_terms", "flash_first_terms"),
    FwdCombine: Template("forward.combine", "flash_fwd_combine"),
    JvpConfig: Template("forward.jvp", "flash_fwd_jvp"),
    BwdDelta: Template("backward.delta", "flash_bwd_delta"),
    BwdPass: Template("backward.by_keys", "flash_bwd"),
    "dq": Template("backward.by_queries", "flash_bwd_dq"),
    BwdSum: Template("backward.sum", "flash_bwd_sum"),
    BwdReduce: Template("backward.dq_sinks.reduce", "flash_bwd_reduce"),
    TileTable: Template("sources.tile_table", "flash_tile_table"),
    DecodeConfig: Template("decode.kernel", "flash_decode"),
    DecodeCombine: Template("decode.combine", "flash_decode_combine"),
    AppendConfig: Template("decode.append", "flash_append"),
}


SMEM_LINE = "// dynamic shared memory: {} bytes"  # last line of a stored source
STALE = 3600  # seconds after which no process builds in a folder any more


class Rejected(RuntimeError):
    """CUDA source that nvcc rejects; the text has what nvcc printed."""


def template(config: KernelConfig) -> Template:
    """The function that makes a kernel."""
    by_queries = isinstance(config, BwdPass) and config.grads == "dq"
    return TEMPLATES["dq" if by_queries else type(config)]


def trace(problem: AttnProblem, config: KernelConfig) -> Any:
    """Kernel in TileLang, a PrimFunc. Needs neither GPU nor nvcc."""
    chosen = template(config)
    return getattr(_kernel_module(chosen.module), chosen.function)(problem, config)


def _kernel_module(name: str) -> ModuleType:
    _parse_functions_once()
    return importlib.import_module(f"tl_attention.kernels.{name}")


@functools.cache
def _parse_functions_once() -> None:
    """Make TileLang 0.1.15 translate each function of a kernel once per process, not once per kernel, which took 4/5 of a trace.

    The translation depends on the function's code; only the variables around it differ from one kernel to the next.
    """
    from tilelang.language.eager import builder

    translate, known = builder.mutate, {}

    def translate_once(function: Callable[..., Any]) -> Any:
        code = function.__code__
        key = code.co_filename, code
        if key not in known:
            known[key] = translate(function)
        own = known[key].gen
        around = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        cells = tuple(types.CellType(around[name].cell_contents) for name in own.__code__.co_freevars)
        bound = types.FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, cells)
        return dataclasses.replace(known[key], gen=bound)

    builder.mutate = translate_once


@functools.cache
def _prove_without_cuts() -> None:
    """Make z3, the prover of TileLang 0.1.15, leave out Hermite cuts. Sources of kernels are the same without them.

    They took 14 of 24 seconds of a forward with ALiBi and no causal mask, whose order of key blocks z3 reasons about:
    mask.NearFirstKeyBlocks.
    """
    import z3

    z3.set_param("smt.arith.enable_hnf", False)


def pass_configs(problem: AttnProblem, config: KernelConfig) -> dict[str, object]:
    """Options of the compiler passes for a kernel."""
    found = dict(_kernel_module(template(config).module).PASS_CONFIGS)
    if (level := register_level(problem, config)) != REGISTER_LEVEL:
        found["tl.ptxas_register_usage_level"] = level
    return found


def lower(problem: AttnProblem, config: KernelConfig) -> tuple[str, int]:
    """CUDA source of a kernel, and its bytes of dynamic shared memory. Needs neither GPU nor nvcc."""
    import tilelang
    from tilelang import tvm

    _prove_without_cuts()
    program = trace(problem, config)
    target = tvm.target.Target(TARGET)
    context = tvm.transform.PassContext(opt_level=3, config=pass_configs(problem, config))
    with layouts.inferred_once(), context, target:
        artifact = tilelang.lower(program, target=target)
    return artifact.kernel_source, _dynamic_smem(artifact)


def _dynamic_smem(artifact: Any) -> int:
    (function,) = (f for _, f in artifact.device_mod.functions.items())
    return int(function.attrs.get("dyn_shared_memory_buf", 0))


def stored_source(library: Path) -> tuple[str, int | None]:
    """CUDA source beside a kernel's library, and its bytes of dynamic shared memory; None where SMEM_LINE is missing."""
    source = library.with_suffix(".cu").read_text(encoding="utf-8")
    found = re.search(f"^{SMEM_LINE}$".format(r"(\d+)"), source, re.MULTILINE)
    return source, int(found[1]) if found else None


def assemble(
    source: str, folder: Path, options: Mapping[str, object], flags: Sequence[str] = ()
) -> tuple[str, Path]:
    """Compile the CUDA source of a kernel for sm_90a, without line information, which would make the cubin five times as large.

    nvcc reads the short headers of headers.py; a source that it rejects with these is compiled once more with all headers.

    Args:
        folder: where kernel.cubin and the headers are written.
        options: those of the compiler passes.
        flags: further ones of nvcc.
    Returns:
        Output of the compiler, and the file of the cubin.
    Raises:
        FileNotFoundError: there is no nvcc. Rejected: nvcc rejects the source.
    """
    from tilelang.contrib import cc, nvcc

    if not (found := toolkit.find_nvcc()):
        raise FileNotFoundError(toolkit.NO_NVCC)
    level = options.get("tl.ptxas_register_usage_level")
    path = folder / "kernel.cu"
    path.write_text(source, encoding="utf-8")
    command = [
        found[0],
        f"-ccbin={cc.get_cplus_compiler()}",
        "--cubin",
        "-O3",
        f"-arch={TARGET['arch']}",
        *nvcc.default_compile_options(["--use_fast_math"] if options.get("tl.enable_fast_math") else []),
        *([f"-Xptxas=--register-usage-level={level}"] if level is not None else []),
        *flags,
    ]
    narrowed = ["-Iheaders"] if headers.write_narrowed(source, folder / "headers") else []
    for first in (narrowed, []):
        arguments = [command[0], *first, *command[1:], path.name]
        run = subprocess.run(arguments, capture_output=True, text=True, cwd=folder)
        if not (run.returncode and first):  # else once more with all headers
            break
    if run.returncode:
        raise Rejected(f"nvcc rejects the kernel:\n{run.stdout}{run.stderr}")
    return run.stdout + run.stderr, path.with_suffix(".cubin")


def build(problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    """Compile a kernel with nvcc for sm_90a into the library `path`, beside it its CUDA source, see stored_source. Needs no GPU.

    A library of the same text in the folder of `path` serves in its place.
    """
    toolkit.require_tilelang(f"{problem}, {config} is not compiled")
    import tilelang
    from tilelang import tvm

    if toolkit.find_nvcc() is None:
        raise FileNotFoundError(toolkit.NO_NVCC)
    toolkit.read_ahead(toolkit.compiler_programs())
    _prove_without_cuts()
    options, program = pass_configs(problem, config), trace(problem, config)
    key = texts.key(program.script(show_meta=True), options)
    if texts.reuse(key, path):
        return
    for left in path.parent.glob(f"{path.stem}-*/"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > STALE:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{path.stem}-", dir=path.parent) as name:
        folder = Path(name)

        def compile_device(source: str, *_: object) -> bytearray:
            return bytearray(assemble(source, folder, options, ["-w"])[1].read_bytes())

        target = tvm.target.Target(TARGET)
        context = tvm.transform.PassContext(opt_level=3, config=options)
        with _device_compiler(compile_device), layouts.inferred_once(), context, target:
            artifact = tilelang.lower(
                program, target=target, enable_host_codegen=True, enable_device_compile=True
            )
        smem_line = SMEM_LINE.format(_dynamic_smem(artifact))
        path.with_suffix(".cu").write_text(f"{artifact.kernel_source}\n{smem_line}\n", encoding="utf-8")
        # The host code is C: as C++ it would take twice the time
        tvm.runtime.Executable(artifact.rt_mod).export_library(str(folder / path.name), options=["-x", "c"])
        os.replace(folder / path.name, path)
        texts.keep(key, path)


@contextlib.contextmanager
def _device_compiler(function: Callable[..., bytearray]) -> Iterator[None]:
    """Make TileLang call a function, (source, target, pass configs) -> cubin, in the place of its own."""
    import tvm_ffi

    name = "tilelang_callback_cuda_compile"
    own = tvm_ffi.get_global_func(name)
    tvm_ffi.register_global_func(name, function, override=True)
    try:
        yield
    finally:
        tvm_ffi.register_global_func(name, own, override=True)
