"""Calls in subprocesses, each at its own risk: one that raises, crashes or hangs costs only itself."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import queue
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

START_LIMIT = 180.0  # seconds a subprocess may take to import and prepare


class Failure(Exception):
    """A call in a subprocess that came to nothing; the text says how."""


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
                self._receive(START_LIMIT)
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
            raise Failure(f"no end within {limit_s:g} s")
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
    """Several, that share the calls of a map."""

    def __init__(self, count: int, prepare: Callable[[], None]):
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
        self, function: Callable[..., Any], calls: Iterable[tuple], limit_s: float, deadline: float = math.inf
    ) -> Iterator[tuple[tuple, Any]]:
        """(args, result or Failure) of each call as it ends, but for those not begun by the deadline."""

        def run(args: tuple) -> list[tuple[tuple, Any]]:
            if time.monotonic() > deadline:
                return []
            try:
                return [(args, self.call(function, *args, limit_s=limit_s))]
            except Failure as failure:
                return [(args, failure)]

        for future in as_completed([self.threads.submit(run, args) for args in calls]):
            yield from future.result()
