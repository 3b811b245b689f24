"""Calls in subprocesses: a call that raises, crashes or hangs costs only itself."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import multiprocessing
import multiprocessing.context
import multiprocessing.spawn
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any

from tl_attention.compilation import torchless

START_LIMIT = 60.0  # seconds for a subprocess to import and prepare, if its call may not take longer
GRACE = 10.0  # seconds that every call has at least
# Imported once by the server that subprocesses are forked from: none of it starts a thread or CUDA
PRELOAD = ("tl_attention.tuning.autotune",)


_pipes: weakref.WeakSet[Connection] = weakref.WeakSet()  # both ends, of all sandboxes


def _close_pipes() -> None:
    """Close the pipes in a forked process: while it has them, neither a builder nor its parent learns of the other's end."""
    for pipe in list(_pipes):
        pipe.close()


os.register_at_fork(after_in_child=_close_pipes)


def time_left(limit_s: float, end_by: float) -> float:
    """Seconds for a call: limit_s, or the time until end_by (time.monotonic) if that is less, but at least GRACE."""
    return min(limit_s, max(end_by - time.monotonic(), GRACE))


class Failure(Exception):
    """A call in a subprocess without a result; the text says why.

    Args:
        raised: names of the class of the exception that the call raised and of its bases; empty if it raised none.
    """

    raised: tuple[str, ...]

    def __init__(self, text: str, raised: Sequence[str] = ()):
        super().__init__(text)
        self.raised = tuple(raised)


class OutOfTime(Failure):
    """A call that exceeded its limit."""


class Sandbox:
    """A subprocess for one call at a time. A call that raises, crashes or hangs ends it; the next call starts another.

    Args:
        prepare: called first in each subprocess.
        fresh: the subprocess is a new interpreter, which a library may start in any program: it does not import the program's main
            module, and ends with the program. Otherwise it is forked from a server, which is faster.
        inherits: open files of this process that a fresh subprocess has, too.
        torchless: a fresh subprocess has the stand-in of torchless.py for torch, and of this package only the modules that a call
            needs. It may be changed between calls, for the next subprocess.
    """

    prepare: Callable[[], None]
    fresh: bool
    inherits: Sequence[int]
    torchless: bool
    stopped: bool
    limit_s: float
    end_by: float
    pipe: Connection

    def __init__(
        self,
        prepare: Callable[[], None],
        fresh: bool = False,
        inherits: Sequence[int] = (),
        torchless: bool = False,
    ):
        self.prepare, self.fresh, self.inherits, self.torchless = prepare, fresh, inherits, torchless
        self.process: multiprocessing.process.BaseProcess | _Interpreter | None = None
        self.stopped = False

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float) -> Any:
        """function(*args), both picklable. Raises Failure, also after limit_s seconds."""
        with self._ended_by_failure():
            if self.process is None:
                self._start()
                if self.fresh:
                    self.pipe.send((self.prepare, ()))
                self._receive(max(START_LIMIT, limit_s))
            self.pipe.send((function, args))
            return self._receive(limit_s)

    def begin(self, function: Callable[..., Any], *args: Any, limit_s: float = math.inf) -> None:
        """Begin a call of a fresh sandbox: its answer makes `pipe` readable, then `finish` returns it. Needs no thread."""
        self.limit_s, self.end_by = limit_s, time.monotonic() + limit_s
        with self._ended_by_failure():
            if self.process is None:
                self._start()
                function, args = _prepare_and_call, (self.prepare, function, args)
            self.pipe.send((function, args))

    def has_ended(self) -> bool:
        """True if finish() need not be waited for: the answer of a call started by begin() is there, or will not come in time.

        An end of the subprocess alone may leave the pipe open: another process may have inherited it.
        """
        return self.pipe.poll() or not self.process.is_alive() or time.monotonic() > self.end_by

    def finish(self) -> Any:
        """Result of a call started by begin(). Raises Failure, also if there is no answer yet."""
        with self._ended_by_failure():
            if not self.process.is_alive() and not self.pipe.poll():
                raise EOFError
            return self._receive(0, self.limit_s)

    @contextlib.contextmanager
    def _ended_by_failure(self) -> Iterator[None]:
        """End the subprocess where its call fails, and name the reason."""
        try:
            yield
        except (EOFError, OSError) as error:
            if self.process is None:
                raise Failure(f"cannot start {_executable()}: {error}") from None
            self.process.join(GRACE)
            code = self.process.exitcode
            self.close()
            if code is None:
                raise Failure(f"closed its pipe: {error}") from None
            how = signal.Signals(-code).name if code < 0 else f"exit {code}"
            raise Failure(f"died: {how}") from None
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """Make the call of another thread fail, and every later one."""
        self.stopped = True
        if self.process and self.process.is_alive():
            self.process.kill()

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.join(GRACE)  # a disk that does not answer may keep it
            self.pipe.close()
            self.process = None

    def _start(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        _pipes.update((self.pipe, theirs))
        if self.fresh:
            self.process = _Interpreter(theirs, self.inherits, self.torchless)
        else:
            arguments = (theirs, self.prepare, dict(os.environ))
            process = _context().Process(target=_serve_forked, args=arguments, daemon=True)
            process.start()
            self.process = process
        theirs.close()
        if self.stopped:
            raise Failure("stopped")

    def _receive(self, limit_s: float, all_s: float | None = None) -> Any:
        """Answer of the call, in limit_s seconds. all_s: those that the call has had, if more."""
        if not self.pipe.poll(limit_s):
            raise OutOfTime(f"no end within {all_s or limit_s:.4g} s")
        value, error = self.pipe.recv()
        if error:
            raise Failure(*error)
        return value


@functools.cache
def _context() -> multiprocessing.context.BaseContext:
    """Processes forked from a server that has imported PRELOAD: 0.02 s per start, instead of 1 s to import torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def _executable() -> str:
    return os.fsdecode(multiprocessing.spawn.get_executable() or "python")


class _Interpreter(subprocess.Popen):
    """A new Python interpreter with this one's module path, in a session of its own; with the interface of a multiprocessing process."""

    def __init__(self, pipe: Connection, inherits: Sequence[int], without_torch: bool):
        # The path comes first: with -c a module of the working directory could hide one of Python
        lines = [
            f"import sys; sys.path[:] = {[str(folder) for folder in sys.path]!r}",
            *([torchless.PROGRAM] if without_torch else []),
            f"from {__name__} import serve_interpreter; serve_interpreter({pipe.fileno()})",
        ]
        super().__init__(
            [_executable(), "-c", "\n".join(lines)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # that of the program may be data
            pass_fds=[pipe.fileno(), *inherits],
            start_new_session=True,
        )

    @property
    def exitcode(self) -> int | None:
        return self.returncode

    def is_alive(self) -> bool:
        return self.poll() is None

    def join(self, limit_s: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(limit_s)

    def kill(self) -> None:
        """End the interpreter and the compilers it has started."""
        if self.is_alive():
            os.killpg(self.pid, signal.SIGKILL)


def serve_interpreter(pipe_number: int) -> None:
    """Main function of an _Interpreter. It ends as soon as the other end of the pipe is closed, also in the middle of a call."""
    pipe, calls = Connection(pipe_number), queue.SimpleQueue()

    def receive() -> None:
        while True:
            try:
                calls.put(pipe.recv())
            except (EOFError, OSError):
                os.killpg(0, signal.SIGKILL)
            except Exception as error:  # the function cannot be imported here
                calls.put((_raise, (error,)))

    threading.Thread(target=receive, daemon=True).start()
    _serve(pipe, calls.get)


def _prepare_and_call(
    prepare: Callable[[], None], function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    prepare()
    return function(*args)


def _raise(error: Exception) -> None:
    raise error


def _serve_forked(pipe: Connection, prepare: Callable[[], None], environment: dict[str, str]) -> None:
    """Main function of a forked subprocess. It ignores Ctrl-C: its parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The server has the environment of its start
    os.environ.clear()
    os.environ.update(environment)
    calls = itertools.chain([(prepare, ())], iter(pipe.recv, None))
    _serve(pipe, calls.__next__)


def _serve(pipe: Connection, receive: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    """Answer calls until the pipe is closed."""
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            function, args = receive()
            try:
                answer = function(*args), None
            except Exception as error:
                classes = [parent.__name__ for parent in type(error).__mro__]
                answer = None, (f"{classes[0]}: {error}", classes)
            pipe.send(answer)


class Sandboxes:
    """Several sandboxes that share the calls of a map; default one per CPU of this process."""

    all: list[Sandbox]
    threads: ThreadPoolExecutor

    def __init__(self, count: int | None, prepare: Callable[[], None], fresh: bool = False):
        count = count or len(os.sched_getaffinity(0))
        self.all = [Sandbox(prepare, fresh) for _ in range(count)]
        self.idle: queue.LifoQueue[Sandbox] = queue.LifoQueue()  # started ones first
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
        calls: Iterable[tuple[Any, ...]],
        limit_s: float,
        begin_by: float = math.inf,
        end_by: float = math.inf,
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """(args, result or Failure) of each call as it ends, without the calls that do not begin by begin_by (time.monotonic).

        A call has limit_s seconds, or the time left until end_by when it begins, but at least GRACE.
        """

        def run(args: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Any]]:
            if time.monotonic() > begin_by:
                return []
            try:
                return [(args, self.call(function, *args, limit_s=time_left(limit_s, end_by)))]
            except Failure as failure:
                return [(args, failure)]

        for future in as_completed([self.threads.submit(run, args) for args in calls]):
            yield from future.result()
