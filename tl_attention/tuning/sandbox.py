"""Calls in subprocesses, each at its own risk: one that raises, crashes or hangs costs only itself."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

START_LIMIT = 60.0  # seconds a subprocess may take to import and prepare, if its call may not take longer
GRACE = 10.0  # seconds a call has at least, however late it begins


def time_left(limit_s: float, end_by: float) -> float:
    """Seconds for a call: limit_s, or if that is less what is left until end_by (time.monotonic), but at least GRACE."""
    return min(limit_s, max(end_by - time.monotonic(), GRACE))


class Failure(Exception):
    """A call in a subprocess that came to nothing; the text says how."""


class OutOfTime(Failure):
    """It did not end within its limit."""


class Sandbox:
    """A subprocess for a call at a time. One that raises, crashes or hangs ends it; the next gets another."""

    def __init__(self, prepare: Callable[[], None]):
        self.prepare = prepare
        self.process: multiprocessing.process.BaseProcess | None = None
        self.stopped = False

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float) -> Any:
        """function(*args), both picklable. Raises Failure after limit_s seconds, too."""
        try:
            if self.process is None:
                self._start()
                self._receive(max(START_LIMIT, limit_s))
            self.pipe.send((function, args))
            return self._receive(limit_s)
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            how = signal.Signals(-code).name if code < 0 else f"exit {code}"
            self.close()
            raise Failure(f"died: {how}") from None
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """Make the call of another thread fail, and any after it."""
        self.stopped = True
        if self.process and self.process.is_alive():
            self.process.kill()

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.prepare), daemon=True)
        process.start()
        self.process = process
        theirs.close()
        if self.stopped:
            raise Failure("stopped")

    def _receive(self, limit_s: float) -> Any:
        if not self.pipe.poll(limit_s):
            raise OutOfTime(f"no end within {limit_s:.3g} s")
        value, error = self.pipe.recv()
        if error:
            raise Failure(error)
        return value


def _serve(pipe: Any, prepare: Callable[[], None]) -> None:
    """The subprocess of a Sandbox. It leaves Ctrl-C to its parent, who ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    function, args = prepare, ()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            try:
                answer = function(*args), None
            except Exception as error:
                answer = None, f"{type(error).__name__}: {error}"
            pipe.send(answer)
            function, args = pipe.recv()


class Sandboxes:
    """Several, that share the calls of a map: default as many as there are CPUs for this process."""

    def __init__(self, count: int | None, prepare: Callable[[], None]):
        count = count or len(os.sched_getaffinity(0))
        self.all = [Sandbox(prepare) for _ in range(count)]
        self.idle: queue.LifoQueue[Sandbox] = queue.LifoQueue()  # those that have started go first
        for sandbox in self.all:
            self.idle.put(sandbox)
        self.threads = ThreadPoolExecutor(count)

    def __enter__(self) -> Sandboxes:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        for sandbox in self.all:
            sandbox.stop()
        self.threads.shutdown()
        for sandbox in self.all:
            sandbox.close()

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float) -> Any:
        sandbox = self.idle.get()
        try:
            return sandbox.call(function, *args, limit_s=limit_s)
        finally:
            self.idle.put(sandbox)

    def map(
        self,
        function: Callable[..., Any],
        calls: Iterable[tuple],
        limit_s: float,
        begin_by: float = math.inf,
        end_by: float = math.inf,
    ) -> Iterator[tuple[tuple, Any]]:
        """(args, result or Failure) of each call as it ends, but for those not begun in time (time.monotonic).

        A call may take limit_s, or what is left until end_by when it begins, but GRACE at least.
        """

        def run(args: tuple) -> list[tuple[tuple, Any]]:
            if time.monotonic() > begin_by:
                return []
            try:
                return [(args, self.call(function, *args, limit_s=time_left(limit_s, end_by)))]
            except Failure as failure:
                return [(args, failure)]

        for future in as_completed([self.threads.submit(run, args) for args in calls]):
            yield from future.result()
