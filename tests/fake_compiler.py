"""Stand-ins for compiler.build that test_building.py gives to builders, whose interpreters have no torch to import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tl_attention.compilation import compiler
from tl_attention.config.kernel_configs import FwdConfig, KernelConfig
from tl_attention.problem.attn_problem import AttnProblem

PROBLEM = AttnProblem("bfloat16", 64, 64, True)
GOOD, BAD, CRASHES = FwdConfig(64, 32), FwdConfig(64, 48), FwdConfig(64, 64)


def fake_build(problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    if config == BAD:  # as nvcc does: not tried again with torch, whose import takes two seconds
        with path.with_suffix(".log").open("a") as log:
            log.write(f"{os.getpid()}\n")
        raise compiler.Rejected("nvcc rejects the kernel:\nkernel.cu(7): error")
    if config == CRASHES:
        os.kill(os.getpid(), signal.SIGSEGV)
    with path.with_suffix(".log").open("a") as log:
        log.write(f"{os.getpid()}\n")
    path.touch()


def slow_build(problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    path.with_suffix(".pid").write_text(str(os.getpid()))
    time.sleep(0.5)
    fake_build(problem, config, path)


def count_and_fail(problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    with path.with_suffix(".log").open("a") as log:
        log.write(f"{os.getpid()}\n")
    raise ValueError(f"torch is {'there' if 'torch._C' in sys.modules else 'replaced'}")


def use_of_torch(problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    import torch

    assert torch.nn.Module
    fake_build(problem, config, path)


def crash_without_torch(problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    fake_build(problem, config if "torch._C" in sys.modules else CRASHES, path)


def hang(problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    path.with_suffix(".pid").write_text(str(os.getpid()))
    subprocess.run(["sleep", "300"])


def hang_once(problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    """Build that never ends in the first process that begins it, whose id it writes down."""
    try:
        with path.with_suffix(".pid").open("x") as first:
            first.write(str(os.getpid()))
    except FileExistsError:
        return fake_build(problem, config, path)
    time.sleep(300)


def lower(problem: AttnProblem, config: KernelConfig) -> tuple[str, list[str]]:
    """CUDA source of a kernel, and what this process has imported of torch."""
    source, _ = compiler.lower(problem, config)
    return source, [name for name in sys.modules if name.partition(".")[0] == "torch"]
