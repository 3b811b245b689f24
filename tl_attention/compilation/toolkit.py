"""Tools that compile and disassemble kernels: TileLang, nvcc and cuobjdump."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

TILELANG = ("0.1.15",)  # versions that compile the kernels as they were tested: see docs/install.md
INSTALL = "pip install 'tl-attention[jit]'"
NO_TILELANG = f"TileLang, which compiles kernels, is not installed: {INSTALL}"
READ_BYTES = 1 << 20  # at a time
NO_NVCC = f"no TileLang {TILELANG[-1]} with nvcc in CUDA_HOME, on PATH or as a pip package: {INSTALL}"


def tilelang_version() -> str | None:
    """Version of the installed TileLang; None if there is none."""
    try:
        return importlib.metadata.version("tilelang") if importlib.util.find_spec("tilelang") else None
    # None in sys.modules; a folder without metadata
    except (ValueError, importlib.metadata.PackageNotFoundError):
        return None


def require_tilelang(subject: str, reason: Callable[[], str] | None = None) -> None:
    """Raise RuntimeError if there is no TileLang that compiles the kernels: names the subject that needs it and what to install."""
    found = tilelang_version()
    if found in TILELANG:
        return
    fault = (
        f"TileLang {found} is installed, expected {' or '.join(TILELANG)}: {INSTALL}"
        if found
        else NO_TILELANG
    )
    raise RuntimeError(f"tl_attention: {'; '.join([subject, *([reason()] if reason else []), fault])}")


def find_nvcc() -> tuple[Path, str] | None:
    """nvcc where TileLang looks for it, and the source of that path in words; None if there is none, or no TileLang."""
    if tilelang_version() not in TILELANG:
        return None
    from tilelang.env import CUDA_HOME

    nvcc = Path(CUDA_HOME, "bin", "nvcc")
    if not CUDA_HOME or not nvcc.exists():
        return None
    variable = next((name for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ), None)
    if variable:
        return nvcc, variable
    if shutil.which("nvcc"):
        return nvcc, "PATH"
    return nvcc, "pip package nvidia-cuda-nvcc" if "site-packages" in nvcc.parts else "usual folder"


def find_cplusplus() -> str | None:
    """The C++ compiler that TileLang and nvcc run; None if there is none."""
    named = os.environ.get("CXX") or os.environ.get("CC")
    return named or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def tilelang_libraries() -> Iterator[Path]:
    """Large files that an import of TileLang maps."""
    for package, names in (("tilelang", ("tvm_compiler", "tilelang", "tvm_runtime")), ("z3", ("z3",))):
        found = importlib.util.find_spec(package)
        for folder in found.submodule_search_locations if found else ():
            yield from (Path(folder, "lib", f"lib{name}.so") for name in names)


def compiler_programs() -> Iterator[Path]:
    """Programs that nvcc and the C++ compiler run. Imports tilelang."""
    from tilelang.contrib import cc

    if found := find_nvcc():
        yield from (
            found[0].resolve().parents[1] / name for name in ("bin/nvcc", "nvvm/bin/cicc", "bin/ptxas")
        )
    for name in ("cc1plus", "cc1") if (compiler := cc.get_cplus_compiler()) else ():
        run = subprocess.run([compiler, f"-print-prog-name={name}"], capture_output=True, text=True)
        yield Path(run.stdout.strip())


def read_ahead(paths: Iterable[Path]) -> None:
    """Have a thread read files that this process or its children will map: page by page they would wait for the disk."""

    def read() -> None:
        for path in paths:
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                while file.read(READ_BYTES):
                    pass

    threading.Thread(target=read, daemon=True).start()


def find_cuobjdump() -> Path | None:
    """cuobjdump from PATH, the CUDA toolkit or an installed triton; None if there is none."""
    folders = [os.environ.get("PATH", "")]
    if tilelang_version() in TILELANG:
        from tilelang.env import CUDA_HOME

        folders.append(str(Path(CUDA_HOME, "bin")))
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        folders.append(str(Path(triton.origin).parent / "backends/nvidia/bin"))
    found = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    return Path(found) if found else None
