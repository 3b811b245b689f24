"""Compiled kernels of this process: loaded from the store, or built if the store has none.

A kernel is built once per machine: by a subprocess, into the store on disk. This process only loads it, without importing
tilelang. The kernels of one call are built in parallel. If several processes need a kernel, one builds it and the others wait for that
kernel alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from tl_attention.compilation import compiler, pack, store, toolkit
from tl_attention.compilation.compiler import KernelKey
from tl_attention.compilation.sandbox import Failure, Sandbox
from tl_attention.compilation.store import Kernel
from tl_attention.kernel_configs import KernelConfig
from tl_attention.problem import AttnProblem

TICK = 0.1  # seconds between checks of kernels that another process builds
# Errors of a builder that the stand-in for torch cannot cause: those of nvcc and of files
SAME_WITH_TORCH = {compiler.Rejected.__name__, OSError.__name__}
CPUS_PER_BUILDER = 4  # for building ahead, so that builders which a call waits for have CPUs of their own

_compiled: dict[KernelKey, Kernel] = {}
_ahead: dict[KernelKey, Sandbox] = {}  # running builders of build_ahead()
_begun: set[KernelKey] = set()  # all that build_ahead() ever began: one that failed is not tried again
_ahead_lock = threading.Lock()


def compile_count() -> int:
    """Number of kernels that this process has compiled or loaded."""
    return len(_compiled)


def compile_kernel(problem: AttnProblem, config: KernelConfig) -> Kernel:
    """Compiled kernel: from this process, else from disk, else built now (seconds, no GPU needed).

    Returns:
        A function whose arguments are described in its file of kernels/.
    """
    return compile_kernels([(problem, config)])[0]


def compile_kernels(kernels: Sequence[KernelKey], where: Callable[[], str] = str) -> list[Kernel]:
    """Compiled kernels of a call. Missing ones are built in parallel, which a line on stderr reports.

    Args:
        where: returns words for what building interrupts; called only if something is built.
    """
    missing = [kernel for kernel in dict.fromkeys(kernels) if kernel not in _compiled]
    if unbuilt := [kernel for kernel in missing if not store.find(*kernel)]:
        notice = _Notice(unbuilt, where())
        with contextlib.closing(_build(unbuilt)) as built:
            for event in built:
                if isinstance(event, int):
                    notice.tick(event)
                    store.load_runtime()  # 0.1 s once per process, while the builders work
                elif event[1] is not None:
                    raise event[1]
        notice.end()
    for kernel in missing:
        _compiled[kernel] = store.load(store.find(*kernel))
    return [_compiled[kernel] for kernel in kernels]


def build_ahead(kernels: Sequence[KernelKey], purpose: str) -> None:
    """Start to build kernels that a later call will need, without waiting. The builders end with the program.

    A kernel that fails is left to that call, which builds it once more and raises the error.

    Args:
        purpose: that call, in words.
    """
    with _ahead_lock:
        started = _start_ahead(kernels)
    if started and not is_quiet():
        sys.stderr.write(
            f"tl_attention: building {_described(started)} meanwhile, {purpose}; TL_ATTENTION_QUIET=1 hides this line\n"
        )


def _start_ahead(kernels: Sequence[KernelKey]) -> list[KernelKey]:
    """Start builders of missing kernels, as many as CPUs allow. Returns the kernels that they build."""
    for kernel in [kernel for kernel, builder in _ahead.items() if not builder.process.is_alive()]:
        _ahead.pop(kernel).close()
    room = len(os.sched_getaffinity(0)) // CPUS_PER_BUILDER - len(_ahead)
    started = []
    for kernel in dict.fromkeys(kernels):
        if len(started) >= room or kernel in _compiled or kernel in _begun or store.find(*kernel):
            continue
        path = store.kernel_path(*kernel)
        if lock := _try_lock(path):
            with lock, contextlib.suppress(Failure):
                builder = Sandbox(prepare_to_build, fresh=True, inherits=(lock.fileno(),), torchless=True)
                builder.begin(_build_and_end, compiler.build, *kernel, path)
                _ahead[kernel] = builder
                _begun.add(kernel)
                started.append(kernel)
    return started


def _build_and_end(build: Callable, problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    """Build a kernel, then end this process, which releases the inherited lock."""
    try:
        if not path.exists():
            build(problem, config, path)
    finally:
        os._exit(0)


def is_quiet() -> bool:
    """True if nothing is to be written to stderr."""
    return os.environ.get("TL_ATTENTION_QUIET") == "1" or sys.stderr is None


class _Notice:
    """Lines on stderr about the kernels that a call waits for. On a terminal the last one counts the seconds.

    TL_ATTENTION_QUIET=1 silences them.
    """

    def __init__(self, kernels: Sequence[KernelKey], where: str):
        self.what, self.where = _described(kernels), where
        self.begin, self.started, self.shown = time.monotonic(), False, 0
        self.quiet = is_quiet()
        self.counts = not self.quiet and sys.stderr.isatty()
        self.total = len(kernels)

    def tick(self, elsewhere: int) -> None:
        """Report the start once, and the seconds so far.

        Args:
            elsewhere: number of kernels that other processes are building.
        """
        seconds = int(time.monotonic() - self.begin)
        if not self.started:
            self.started = True
            does = f"building {self.what}, once per machine"
            if elsewhere:
                does = f"waiting for {self.what}, {elsewhere} of them built by another process"
            why = f"{pack.advice()}; `tl-attention compile` builds kernels ahead, TL_ATTENTION_QUIET=1 hides this line"
            self._write(f"tl_attention: {does}{self.where}; {why}\n")
        if self.counts and seconds > self.shown:
            self.shown = seconds
            self._write(f"\rtl_attention: {seconds} s")

    def end(self) -> None:
        if self.started:
            seconds = time.monotonic() - self.begin
            back = "\r" if self.shown else ""
            self._write(f"{back}tl_attention: {_count(self.total)} built in {seconds:.0f} s\n")

    def _write(self, text: str) -> None:
        if not self.quiet:
            sys.stderr.write(text)
            sys.stderr.flush()


def _described(kernels: Sequence[KernelKey]) -> str:
    problem, config = kernels[0]
    others = f" and {len(kernels) - 1} more" if len(kernels) > 1 else ""
    return f"{_count(len(kernels))} ({problem}, {config}{others})"


def _count(kernels: int) -> str:
    return f"{kernels} kernel" + "s" * (kernels != 1)


def build_all(
    kernels: Sequence[KernelKey], jobs: int | None = None, say: Callable[[str], None] | None = None
) -> dict[KernelKey, Exception | None]:
    """Put kernels into the store, by several processes. Kernels that it has already are skipped. Needs no GPU.

    Args:
        jobs: number of processes; default: one per CPU of this process.
        say: called with a line of progress at the start and per kernel.
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
        for event in built:
            if isinstance(event, int):
                continue
            kernel, error = event
            results[kernel] = error
            fault = "" if error is None else f": {error}"
            seconds = time.monotonic() - begin
            say(f"{len(results)}/{len(missing)} kernels, {seconds:.0f} s: {kernel[0]}, {kernel[1]}{fault}")
    return {kernel: results.get(kernel) for kernel in kernels}


def build_here(problem: AttnProblem, config: KernelConfig) -> None:
    """Build a kernel in this process, which imports tilelang, and put it into the store. For processes started to build."""
    path = store.kernel_path(problem, config)
    while not path.exists():
        if lock := _try_lock(path):
            try:
                if not path.exists():
                    compiler.build(problem, config, path)
            finally:
                _unlock(lock)
        else:
            time.sleep(TICK)


def _build(
    kernels: Sequence[KernelKey], jobs: int | None = None
) -> Iterator[tuple[KernelKey, Exception | None] | int]:
    """Build kernels. Yields (kernel, error or None) as each ends, and every TICK seconds how many of them other processes build.

    The calling thread waits: another thread would delay the end of the program. A kernel that fails in a builder without torch is
    built once more by one with torch, unless the error would be the same. If both fail, the error has both reasons.
    """
    waiting, running = list(kernels), dict[Connection, _Running]()
    jobs = max(1, min(jobs or len(os.sched_getaffinity(0)), len(kernels)))
    idle = [Sandbox(prepare_to_build, fresh=True, torchless=True) for _ in range(jobs)]
    with contextlib.ExitStack() as at_end:
        for sandbox in idle:
            at_end.callback(sandbox.close)
        while waiting or running:
            elsewhere = 0
            for kernel in tuple(waiting):
                if not idle:
                    break
                path, lock, error = store.kernel_path(*kernel), None, None
                try:
                    lock = _try_lock(path)
                    if lock and not path.exists():
                        at_end.callback(_unlock, lock)
                        begun = _Running(kernel, idle[-1], lock)
                        running[begun.begin()] = begun
                        idle.pop()
                        waiting.remove(kernel)
                        continue
                except (OSError, Failure) as failure:
                    error = _error(kernel, failure)
                if path.exists() or error:  # perhaps built by another process since
                    _unlock(lock)
                    waiting.remove(kernel)
                    yield kernel, error
                else:
                    elsewhere += 1
            if waiting or running:
                yield elsewhere
            if waiting and not running:
                time.sleep(TICK)
            for pipe in connection.wait(running, TICK):
                done = running.pop(pipe)
                failures = done.finish()
                if failures and done.sandbox.torchless and not SAME_WITH_TORCH & {*failures[-1].raised}:
                    # Perhaps a library asks for what the stand-in for torch lacks: once more with torch itself
                    done.sandbox.torchless = False
                    again = replace(done, earlier=failures)
                    try:
                        running[again.begin()] = again
                        continue
                    except Failure as failure:
                        failures = (*failures, failure)
                _unlock(done.lock)
                idle.append(done.sandbox)
                yield done.kernel, _error(done.kernel, *failures) if failures else None


@dataclass(frozen=True)
class _Running:
    """A kernel that is being built.

    Args:
        earlier: the failure of a builder without torch.
    """

    kernel: KernelKey
    sandbox: Sandbox
    lock: IO
    earlier: tuple[Failure, ...] = ()

    def begin(self) -> Connection:
        """Begin to build it. Returns the pipe of the answer."""
        self.sandbox.begin(compiler.build, *self.kernel, store.kernel_path(*self.kernel))
        return self.sandbox.pipe

    def finish(self) -> tuple[Failure, ...]:
        """Take the answer. Returns the failures of all builders, none if the last one has built the kernel."""
        try:
            self.sandbox.finish()
        except Failure as failure:
            return (*self.earlier, failure)
        return ()


def _error(kernel: KernelKey, *reasons: Exception) -> RuntimeError:
    """Error of a kernel that could not be built.

    Args:
        reasons: one per builder; the first of two is that of a builder without torch.
    """
    problem, config = kernel
    *earlier, reason = dict.fromkeys(map(str, reasons))
    advice = "; TL_ATTENTION_CACHE_DIR names another folder" if isinstance(reasons[-1], OSError) else ""
    before = f"; before, in a builder without torch: {earlier[0]}" if earlier else ""
    return RuntimeError(f"tl_attention: {problem}, {config} could not be built: {reason}{advice}{before}")


def prepare_to_build() -> None:
    """Prepare a subprocess that builds: it sees no GPU, TileLang's log is silenced, and NumPy starts no threads."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    logging.disable(logging.WARNING)
    gc.set_threshold(100_000)  # saves 0.4 s per kernel
    toolkit.read_ahead(toolkit.tilelang_libraries())


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
