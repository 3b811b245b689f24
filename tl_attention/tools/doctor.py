"""Checks of `tl-attention doctor`: what is installed, what is missing and what to do about it."""

from __future__ import annotations

import functools
import importlib.util
import platform
import re
import subprocess
import sys

import torch

from tl_attention.config import configs
from tl_attention.problem.attn_problem import DIRECTIONS
from tl_attention.problem.target import gpu_name, is_hopper
from tl_attention.tools.text import as_json, filled

PARTLY = "partly"  # there, and not all of it
BENCHMARKS = "only for benchmarks"  # the use of a package


def report(strict: bool, in_json: bool = False) -> int:
    """Print what is found and, for what is missing, what to do. Returns 1 if strict and something needed is missing."""
    missing, found = 0, []
    for needed, name, find in CHECKS:
        needed = needed() if callable(needed) else needed
        try:
            good, text = find()
        except Exception as error:  # a broken installation is a finding too
            good, text = False, f"{type(error).__name__}: {error}"
        if needed and not good:
            missing += 1
        state = "partial" if good is PARTLY else "ok" if good else "MISSING" if needed else "-"
        if in_json:
            found.append({"name": name, "state": state, "needed": bool(needed), "text": text})
        else:
            print(filled(text, f"{state:8}{name:13}", " " * 21))
    if in_json:
        print(as_json(found))
    else:
        print(
            filled(
                "MISSING is needed here; - is optional; partial serves some calls. --strict: status 1 if something is missing"
            )
        )
    return 1 if missing and strict else 0


def _check_python() -> tuple[bool, str]:
    return sys.version_info >= (3, 10), f"{platform.python_version()}, {platform.machine()}"


def _check_torch() -> tuple[bool, str]:
    cuda = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA, so for CPU tensors only"
    )
    return True, f"{torch.__version__}, {cuda}"


def _check_gpu() -> tuple[bool, str]:
    if not torch.cuda.is_available():
        return False, "no CUDA device: kernels can be compiled and inspected; CPU tensors run the reference"
    sm = "sm_{}{}".format(*torch.cuda.get_device_capability())
    advice = (
        "" if is_hopper(torch.cuda.current_device()) else ": the kernels need sm_90, an H100, H200 or GH200"
    )
    return not advice, f"{torch.cuda.get_device_name()}, {sm}{advice}"


def _check_package(module: str, use: str, advice: str) -> tuple[bool, str]:
    """The check of an optional package. use: what it is for; advice: how to install it."""
    from tl_attention.testing.environment import version

    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if not found:
        return False, f"not installed; {use}: {advice}"
    return True, f"{version(module) or 'found'}; {use}"


def _check_tvm_ffi() -> tuple[bool, str]:
    from tl_attention.testing.environment import version

    found = version("apache-tvm-ffi")
    return bool(found), found or "not installed: pip install apache-tvm-ffi"


def _compiles() -> bool:
    """True if some kernels must be compiled here: no pack is installed, or it is damaged, of other sources or lacks kernels."""
    from tl_attention.compilation import pack

    try:
        if not pack.installed():
            return True
        covered, kernels = _pack_coverage()
        return covered < kernels
    except RuntimeError:  # the check of the pack says what is damaged
        return True


def _pack_coverage() -> tuple[int, int]:
    """Number of kernels of a whole pack that the installed one has as today's sources make them, and of all of them."""
    from tl_attention.compilation import manifest, pack

    kernels, installed = manifest.pack_kernels().values(), pack.installed()
    return sum(bool(installed and installed.find(*kernel)) for kernel in kernels), len(kernels)


def _check_pack() -> tuple[bool | str, str]:
    from tl_attention.compilation import pack

    found = pack.installed()
    if found is None:
        return False, pack.advice()
    covered, kernels = _pack_coverage()
    compilers = ", ".join(f"{name} {version}" for name, version in found.compilers.items())
    text = f"{found.version}, {covered} of {kernels} kernels, by {compilers}, {found.folder}"
    if not covered:
        return False, f"{text}: {pack.advice()}"
    if covered < kernels:
        others = f"the other {kernels - covered} are compiled on a first call, by TileLang and nvcc"
        return (
            PARTLY,
            f"{text}: {others}; {pack.REMEDY}",
        )
    return True, text


def _check_tilelang() -> tuple[bool, str]:
    from tl_attention.compilation import toolkit

    found = toolkit.tilelang_version()
    if found in toolkit.TILELANG:
        return True, found
    return (
        False,
        f"{found}, expected {toolkit.TILELANG[-1]}: {toolkit.INSTALL}" if found else toolkit.NO_TILELANG,
    )


def _check_nvcc() -> tuple[bool, str]:
    from tl_attention.compilation import toolkit

    if not (found := toolkit.find_nvcc()):
        return False, toolkit.NO_NVCC
    nvcc, origin = found
    release = (
        subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-2]
    )
    text = f"{release.rpartition(', ')[2]}, {nvcc}, by {origin}"
    headers = nvcc.parents[1] / "include/cuda_runtime_api.h"
    version = headers.exists() and re.search(
        r"define CUDART_VERSION\s+(\d+)", headers.read_text(encoding="utf-8")
    )
    if version:
        major, minor = divmod(int(version[1]) // 10, 100)
        if f"release {major}.{minor}," not in release:
            advice = "set CUDA_HOME to a CUDA toolkit, or install a pack, or a torch built for nvcc's CUDA"
            return False, f"{text}: its headers are of CUDA {major}.{minor} and do not fit it: {advice}"
    return True, text


def _check_compiler() -> tuple[bool, str]:
    from tl_attention.compilation import toolkit

    found = toolkit.find_cplusplus()
    return bool(found), found or "not found; nvcc needs it: install g++ or set CXX"


def _check_cuobjdump() -> tuple[bool, str]:
    from tl_attention.compilation import toolkit

    found = toolkit.find_cuobjdump()
    return bool(found), str(
        found
        or "not found; only for counts of instructions in reports, which are those of PTX without it: pip install triton"
    )


def _check_cache() -> tuple[bool, str]:
    folder = configs.cache_dir()
    sizes = [path.stat().st_size for path in folder.rglob("*.so")] if folder.exists() else []
    return True, f"{folder}, {len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB"


def _check_table() -> tuple[bool, str]:
    name = gpu_name()
    found = []
    for path in configs.tuned_paths(name):
        table = configs.read_tuned(path)
        if rows := [f"{len(table[direction])} {direction}" for direction in DIRECTIONS if table[direction]]:
            found.append(f"{path}, rows: {', '.join(rows)}")
    if found:
        return True, "; then ".join(found)
    if tables := configs.near_tables(name):
        near, path = next(iter(tables.items()))
        return False, f"none for {name}, so that of {near} serves, {path}: tl-attention tune makes one"
    return (
        False,
        f"none for {name}, so the defaults of {configs.data_dir() / 'grid.toml'} serve: tl-attention tune",
    )


CHECKS = (  # (needed, or a function that says so; name; check)
    (True, "python", _check_python),
    (True, "torch", _check_torch),
    (True, "GPU", _check_gpu),
    (True, "tvm-ffi", _check_tvm_ffi),
    (False, "pack", _check_pack),
    (_compiles, "tilelang", _check_tilelang),
    (_compiles, "nvcc", _check_nvcc),
    (_compiles, "c++", _check_compiler),
    (False, "cuobjdump", _check_cuobjdump),
    (True, "cache", _check_cache),
    (False, "tuned table", _check_table),
    *(
        (False, name, functools.partial(_check_package, module, use, advice))
        for name, module, use, advice in (
            ("rich", "rich", "for progress bars and tables", "pip install 'tl-attention[jit]'"),
            ("matplotlib", "matplotlib", "for pictures of masks", "pip install matplotlib"),
            ("triton", "triton", BENCHMARKS, "pip install triton"),
            ("fa2", "flash_attn", BENCHMARKS, "pip install flash-attn --no-build-isolation"),
            (
                "fa3",
                "flash_attn_interface",
                BENCHMARKS,
                "build hopper/ of github.com/Dao-AILab/flash-attention",
            ),
            ("fa4", "flash_attn.cute", BENCHMARKS, "pip install --pre flash-attn-4"),
            ("flashinfer", "flashinfer", BENCHMARKS, "pip install flashinfer-python"),
        )
    ),
)
