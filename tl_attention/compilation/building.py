"""Compiled kernels of this process: loaded from the store, or built if the store has none.

A kernel is built once per machine: by a subprocess, into the store on disk. This process only loads it, without importing
tilelang. The kernels of one call are built in parallel. If several processes need a kernel, one builds it and the others wait for that
kernel alone; see locks.py for whom and how long. No wait is without an end: a builder that dies is noticed, one that hangs is ended.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path

from tl_attention.compilation import compiler, locks, store, toolkit
from tl_attention.compilation.compiler import KernelKey
from tl_attention.compilation.locks import Lock
from tl_attention.compilation.notice import HIDES, Notice, described, is_quiet
from tl_attention.compilation.sandbox import Failure, OutOfTime, Sandbox
from tl_attention.compilation.store import Kernel
from tl_attention.config.kernel_configs import KernelConfig
from tl_attention.problem.attn_problem import AttnProblem

LOG = logging.getLogger(__name__)
TICK = 0.1  # seconds between checks of kernels that another process builds
BUILD_LIMIT = 1800  # seconds of a builder per kernel, which takes some 10 s of a core
# Errors of a builder that the stand-in for torch cannot cause: those of nvcc and of files
SAME_WITH_TORCH = {compiler.Rejected.__name__, OSError.__name__}
CPUS_PER_BUILDER = 4  # for building ahead, so that builders which a call waits for have CPUs of their own

_compiled: dict[KernelKey, Kernel] = {}
_ahead: dict[KernelKey, Sandbox] = {}  # running builders of build_ahead()
_begun: set[KernelKey] = set()  # all that build_ahead() ever began: one that failed is not tried again
_ahead_lock = threading.RLock()  # a signal's handler may call, too


def _forget_ahead() -> None:
    """Leave the builders to the process that this one was forked from, of which another thread may have had the lock."""
    global _ahead_lock
    _ahead_lock = threading.RLock()
    _ahead.clear()


os.register_at_fork(after_in_child=_forget_ahead)


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
    """Compiled kernels of a call. Missing ones are built in parallel, as notice.py reports.

    Args:
        where: returns words for what building interrupts; called only if something is built.
    """
    missing = [kernel for kernel in dict.fromkeys(kernels) if kernel not in _compiled]
    if unbuilt := [kernel for kernel in missing if not store.find(*kernel)]:
        with Notice(unbuilt, where()) as notice, contextlib.closing(_build(unbuilt)) as events:
            for event in events:
                if isinstance(event, int):
                    notice.tick(event)
                    store.load_runtime()  # 0.1 s once per process, while the builders work
                elif isinstance(event, str):
                    notice.say(event)
                elif event[1] is not None:
                    raise event[1]
                else:
                    notice.built += 1
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
    if started:
        LOG.debug("building %s meanwhile, %s", described(started), purpose)
    if started and not is_quiet():
        sys.stderr.write(f"tl_attention: building {described(started)} meanwhile, {purpose}; {HIDES}\n")


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
        if lock := locks.try_lock(path):
            with contextlib.closing(lock), contextlib.suppress(Failure):
                builder = Sandbox(prepare_to_build, fresh=True, inherits=(lock.file,), torchless=True)
                builder.begin(_build_and_end, compiler.build, *kernel, path)
                lock.name_holder(builder.process.pid, f"a builder that process {os.getpid()} began ahead")
                _ahead[kernel] = builder
                _begun.add(kernel)
                started.append(kernel)
    return started


def _build_and_end(build: Callable, problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    """Build a kernel, then end this process, which releases the inherited lock."""
    try:
        if not path.exists():
            _build_within_limit(build, problem, config, path)
    finally:
        os._exit(0)


def _build_within_limit(build: Callable, problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    """Build a kernel in a builder, which an alarm ends if nothing else does: a library may keep Python's threads from running."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(BUILD_LIMIT + 60)
    build(problem, config, path)
    signal.alarm(0)


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
            if isinstance(event, str):
                say(event)
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
    waits = locks.Waits()
    while not path.exists():
        if lock := locks.try_lock(path):
            try:
                if not path.exists():
                    compiler.build(problem, config, path)
            finally:
                lock.release()
        else:
            if (line := waits.look(path, f"{problem}, {config}")) and not is_quiet():
                sys.stderr.write(f"tl_attention: {line}\n")
            time.sleep(TICK)


def _build(
    kernels: Sequence[KernelKey], jobs: int | None = None
) -> Iterator[tuple[KernelKey, Exception | None] | int | str]:
    """Build kernels. Yields (kernel, error or None) as each ends, every TICK seconds how many of them other processes build, and
    lines about those that take long.

    The calling thread waits: another thread would delay the end of the program. A kernel that fails in a builder without torch is
    built once more by one with torch, unless the error would be the same. If both fail, the error has both reasons.
    """
    waiting, running, waits = list(kernels), dict[Connection, _Running](), locks.Waits()
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
                    lock = locks.try_lock(path)
                    if lock and not path.exists():
                        at_end.callback(lock.release)
                        begun = _Running(kernel, idle[-1], lock)
                        running[begun.begin()] = begun
                        idle.pop()
                        waiting.remove(kernel)
                        continue
                except (OSError, Failure) as failure:
                    error = _error(kernel, failure)
                if path.exists() or error:  # perhaps built by another process since
                    if lock:
                        lock.release()
                    waiting.remove(kernel)
                    yield kernel, error
                else:
                    elsewhere += 1
                    if line := waits.look(path, f"{kernel[0]}, {kernel[1]}"):
                        yield line
            if waiting or running:
                yield elsewhere
            if waiting and not running:
                time.sleep(TICK)
            connection.wait(running, TICK)
            for pipe in [pipe for pipe, one in running.items() if one.sandbox.has_ended()]:
                done = running.pop(pipe)
                failures = done.finish()
                if failures and done.sandbox.torchless and not _same_with_torch(failures[-1]):
                    # Perhaps a library asks for what the stand-in for torch lacks: once more with torch itself
                    done.sandbox.torchless = False
                    again = replace(done, earlier=failures)
                    try:
                        running[again.begin()] = again
                        continue
                    except Failure as failure:
                        failures = (*failures, failure)
                done.lock.release()
                idle.append(done.sandbox)
                yield done.kernel, _error(done.kernel, *failures) if failures else None


def _same_with_torch(failure: Failure) -> bool:
    """True for a failure of a builder without torch that one with torch would have, too."""
    return isinstance(failure, OutOfTime) or bool(SAME_WITH_TORCH & {*failure.raised})


@dataclass(frozen=True)
class _Running:
    """A kernel that is being built.

    Args:
        earlier: the failure of a builder without torch.
    """

    kernel: KernelKey
    sandbox: Sandbox
    lock: Lock
    earlier: tuple[Failure, ...] = ()

    def begin(self) -> Connection:
        """Begin to build it. Returns the pipe of the answer."""
        path = store.kernel_path(*self.kernel)
        self.sandbox.begin(_build_within_limit, compiler.build, *self.kernel, path, limit_s=BUILD_LIMIT)
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
