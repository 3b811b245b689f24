"""The CUDA tools that compile and disassemble kernels: nvcc and cuobjdump."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

NO_NVCC = "nvcc is neither in CUDA_HOME, nor on PATH, nor a pip package: pip install 'tilelang[nvcc]==0.1.15'"


def find_nvcc() -> tuple[Path, str] | None:
    """nvcc where TileLang looks for it, and the source of that path in words; None if there is none."""
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


def find_cuobjdump() -> Path | None:
    """cuobjdump from PATH, the CUDA toolkit or an installed triton; None if there is none."""
    from tilelang.env import CUDA_HOME

    triton = importlib.util.find_spec("triton")
    folders = [os.environ.get("PATH", ""), str(Path(CUDA_HOME, "bin"))]
    if triton and triton.origin:
        folders.append(str(Path(triton.origin).parent / "backends/nvidia/bin"))
    found = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    return Path(found) if found else None
