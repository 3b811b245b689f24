"""Compiled kernels of this process: loaded from the store, and built where the store has none.

A kernel is built once per machine: by a subprocess, into the store on disk. This process only loads it, without importing
tilelang. The kernels of one call are built at the same time. Of several processes that need a kernel one builds it, and the others
wait for that kernel alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import IO

from tl_attention import compiler, store
from tl_attention.kernel_configs import Config, KernelConfig
from tl_attention.problem import AttnProblem
from tl_attention.sandbox import Failure, Sandboxes
from tl_attention.store import Kernel

BUILD_LIMIT = 900.0  # seconds per kernel; the dearest takes 30 on one core
TICK = 0.1  # seconds between two looks at kernels that another process builds

KernelKey = tuple[AttnProblem, KernelConfig]

_compiled: dict[KernelKey, Kernel] = {}


def compile_count() -> int:
    """Number of kernels that this process has compiled or loaded."""
    return len(_compiled)


def compile_config(problem: AttnProblem, config: Config) -> None:
    """Compile or load all kernels of a config."""
    compile_kernels(config.kernels(problem))


def compile_kernel(problem: AttnProblem, config: KernelConfig) -> Kernel:
    """Compiled kernel: from this process, else from disk, else built now (seconds, no GPU needed).

    Returns:
        A function whose arguments are described in its file of kernels/.
    """
    return compile_kernels([(problem, config)])[0]


def compile_kernels(kernels: Sequence[KernelKey]) -> list[Kernel]:
    """Compiled kernels; those that are on no disk are built at the same time."""
    missing = [kernel for kernel in kernels if kernel not in _compiled]
    if unbuilt := [kernel for kernel in missing if not store.find(*kernel)]:
        for error in build_all(unbuilt).values():
            if error is not None:
                raise error
    for kernel in missing:
        _compiled[kernel] = store.load(store.find(*kernel))
    return [_compiled[kernel] for kernel in kernels]


def build_all(
    kernels: Sequence[KernelKey], jobs: int | None = None, say: Callable[[str], None] | None = None
) -> dict[KernelKey, Exception | None]:
    """Put kernels into the store, in several processes at a time. Kernels that are there already cost nothing. Needs no GPU.

    Args:
        jobs: number of processes; default: one per CPU of this process.
        say: gets a line of progress at the start and per kernel.
    Returns:
        Per kernel None, or why it could not be built.
    """
    begin, say = time.monotonic(), say or (lambda line: None)
    kernels = list(dict.fromkeys(kernels))
    missing = [kernel for kernel in kernels if not store.kernel_path(*kernel).exists()]
    results: dict[KernelKey, Exception | None] = {}
    if missing:
        say(f"{len(missing)} of {len(kernels)} kernels to build")
    with contextlib.closing(_build(missing, jobs)) as built:
        for kernel, error in filter(None, built):
            results[kernel] = error
            fault = "" if error is None else f": {error}"
            seconds = time.monotonic() - begin
            say(f"{len(results)}/{len(missing)} kernels, {seconds:.0f} s: {kernel[0]}, {kernel[1]}{fault}")
    return {kernel: results.get(kernel) for kernel in kernels}


def _build(
    kernels: Sequence[KernelKey], jobs: int | None
) -> Iterator[tuple[KernelKey, Exception | None] | None]:
    """Build kernels; yields (kernel, error or None) as each ends, and None every TICK seconds."""
    waiting, running = list(kernels), dict[Future, tuple[KernelKey, IO]]()
    if not kernels:
        return
    jobs = max(1, min(jobs or len(os.sched_getaffinity(0)), len(kernels)))
    with contextlib.ExitStack() as locks, Sandboxes(jobs, _prepare, fresh=True) as sandboxes:
        while waiting or running:
            for kernel in tuple(waiting):
                if len(running) == jobs:
                    break
                path, error = store.kernel_path(*kernel), None
                try:
                    lock = _try_lock(path)
                except OSError as failure:
                    lock, error = None, failure
                if error or path.exists():  # perhaps built by another process since
                    waiting.remove(kernel)
                    _unlock(lock)
                    yield kernel, error
                elif lock:
                    waiting.remove(kernel)
                    locks.callback(_unlock, lock)
                    future = sandboxes.submit(compiler.build, *kernel, path, limit_s=BUILD_LIMIT)
                    running[future] = kernel, lock
            if not running:
                time.sleep(TICK)
            for future in wait(running, TICK, FIRST_COMPLETED).done:
                kernel, lock = running.pop(future)
                _unlock(lock)
                yield kernel, _error_of(future, kernel)
            yield None


def _error_of(future: Future, kernel: KernelKey) -> Exception | None:
    try:
        future.result()
    except Failure as failure:
        problem, config = kernel
        return RuntimeError(f"tl_attention: {problem}, {config} could not be built: {failure}")
    return None


def _prepare() -> None:
    """Prepare a subprocess: it needs no GPU, and TileLang's log of each kernel is not for the user."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logging.disable(logging.WARNING)


def _try_lock(path: Path) -> IO | None:
    """Lock of a kernel to build, None if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_suffix(".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _unlock(lock: IO | None) -> None:
    if lock and not lock.closed:
        fcntl.flock(lock, fcntl.LOCK_UN)  # closing alone would leave it to a child forked meanwhile
        lock.close()
