"""Compiled kernels of this process: loaded from the store, and built where the store has none.

A kernel is compiled once, and kept on disk and in a dict of the process. A process that finds its kernel on disk loads it without
importing tilelang, which takes longer than the loading.
"""

from __future__ import annotations

import fcntl

from tl_attention import compiler, store
from tl_attention.kernel_configs import Config, KernelConfig
from tl_attention.problem import AttnProblem
from tl_attention.store import Kernel

_compiled: dict[tuple[AttnProblem, KernelConfig], Kernel] = {}


def compile_count() -> int:
    """Number of kernels that this process has compiled or loaded."""
    return len(_compiled)


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
        path = store.kernel_path(problem, config)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open(
                "w"
            ) as lock:  # of many processes one compiles, the others wait
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    compiler.build(problem, config, path)
        _compiled[key] = store.load(path)
    return _compiled[key]
