"""Parent of the matrix: builds kernels, gives classes to workers, and kills a worker whose GPU does not answer."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tl_attention.compilation import store

from .classes import CallClass

FOLDER = Path(__file__).parent
START_LIMIT = 240.0  # seconds for a worker to import torch and to open the GPU, beside builders
FIRST_TIMES = 3  # of the hang limit: the first class of a worker, in which libraries of torch load
TICK = 0.2
MOST_STARTS_LOST = 3  # workers in a row that do not start, after which the run ends
NOT_RUN, PASSED, FAILED = "not run", "passed", "failed"
FEW_LINES = 30  # of a worker's log, in the result of a class whose worker died


@dataclass(frozen=True)
class Settings:
    """Ways to run classes.

    Args:
        draws: indices of draws; None: all.
        jobs: workers per GPU.
        gpus: indices as CUDA_VISIBLE_DEVICES has them; an empty one leaves it as it is.
        time_limit: seconds after which no class begins.
        hang_limit: seconds without a line of a worker.
        worker, builder: commands.
    """

    seed: int = 0
    draws: tuple[int, ...] | None = None
    jobs: int = 8
    gpus: tuple[str, ...] = ("",)
    time_limit: float = 1e9
    hang_limit: float = 20.0
    build_jobs: int | None = None
    worker: tuple[str, ...] = (sys.executable, str(FOLDER), "--worker")
    builder: tuple[str, ...] = (sys.executable, str(FOLDER), "--build")


@dataclass
class Result:
    """Result of a class.

    Attributes:
        failures: (draw, its text, what is wrong) of each draw that failed.
        launches: draws that launched a kernel, by its name; or what else a worker counts.
    """

    state: str = NOT_RUN
    draws: int = 0
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    launches: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Results:
    """Results of a run, by class name."""

    gpu: str
    seconds: float
    classes: dict[str, Result]
    why_ended: str = ""


class Worker:
    """A worker process and what it does. A thread puts its lines into a queue."""

    def __init__(self, settings: Settings, gpu: str, lines: queue.Queue):
        self.gpu = gpu
        environment = dict(os.environ)
        if gpu:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            settings.worker,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.ready, self.lost, self.current, self.at, self.ended = False, False, None, "", 0
        self.moved = time.monotonic()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def _read(self, lines: queue.Queue) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self.process.stdout:
                lines.put((self, line))
        lines.put((self, None))

    def begin(self, one: CallClass, settings: Settings) -> bool:
        """Give it a class. False if it has died."""
        self.current, self.at, self.moved = one, "before its first draw", time.monotonic()
        asked = {"id": one.id, "seed": settings.seed, "draws": settings.draws}
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
        except (OSError, ValueError):
            self.current = None
            return False
        return True

    def is_stuck(self, settings: Settings) -> bool:
        """True if it has said nothing for too long."""
        silent = time.monotonic() - self.moved
        if not self.ready:
            return silent > START_LIMIT
        limit = settings.hang_limit * (FIRST_TIMES if not self.ended else 1)
        return self.current is not None and silent > limit

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)

    def end(self) -> None:
        """Let it end by itself."""
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()

    def last_lines(self) -> str:
        self.log.seek(0)
        return "\n".join(self.log.read().splitlines()[-FEW_LINES:])


class Builder:
    """A process that builds missing kernels, and which of them are there."""

    def __init__(self, classes: Sequence[CallClass], settings: Settings):
        needed = {name: kernel for one in classes for name, kernel in one.kernels.items()}
        self.missing = {name: kernel for name, kernel in needed.items() if not store.find(*kernel)}
        self.process, self.errors = None, {}
        if self.missing:
            self.process = subprocess.Popen(
                [*settings.builder, *([str(settings.build_jobs)] if settings.build_jobs else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self.thread = threading.Thread(target=self._talk, args=(list(self.missing),), daemon=True)
            self.thread.start()

    def _talk(self, names: list[str]) -> None:
        """Say which kernels are needed, then take the errors."""
        errors, _ = self.process.communicate(json.dumps(names))
        with contextlib.suppress(ValueError):
            self.errors = json.loads(errors)

    def look(self) -> None:
        """Notice kernels that are there by now."""
        for name in [name for name, kernel in self.missing.items() if store.kernel_path(*kernel).exists()]:
            del self.missing[name]

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.thread.is_alive()

    def stop(self) -> None:
        if self.is_running:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)


def run(
    classes: Sequence[CallClass], settings: Settings, say: Callable[[str], None] = lambda line: None
) -> Results:
    """Run classes in workers. A class of which a launch hangs, or whose worker dies, fails, and the others go on."""
    begin = time.monotonic()
    builder = Builder(classes, settings)
    run_of = _Run(classes, settings, builder, begin, say)
    try:
        run_of.loop()
    finally:
        builder.stop()
        for worker in run_of.workers:
            worker.kill()
    return Results(run_of.gpu, time.monotonic() - begin, run_of.results, run_of.why_ended)


class _Run:
    def __init__(
        self,
        classes: Sequence[CallClass],
        settings: Settings,
        builder: Builder,
        begin: float,
        say: Callable[[str], None],
    ):
        self.settings, self.builder, self.begin, self.say = settings, builder, begin, say
        self.waiting = list(classes)
        self.results = {one.name: Result() for one in classes}
        self.lines: queue.Queue[tuple[Worker, str | None]] = queue.Queue()
        self.workers: list[Worker] = []
        self.gpu, self.why_ended, self.starts_lost, self.ended = "", "", 0, 0

    def loop(self) -> None:
        settings = self.settings
        jobs = min(settings.jobs * len(settings.gpus), max(len(self.waiting), 1))
        gpus = [settings.gpus[i % len(settings.gpus)] for i in range(jobs)]
        self.workers = [Worker(settings, gpu, self.lines) for gpu in gpus]
        looked = 0.0
        while True:
            now = time.monotonic()
            if self.builder.missing and now - looked > 1:
                was_running = self.builder.is_running
                self.builder.look()
                if not was_running:
                    self._fail_unbuilt()
                looked = time.monotonic()
            if now - self.begin > settings.time_limit and self.waiting:
                self.waiting, self.why_ended = [], f"the time limit of {settings.time_limit:.0f} s"
                self.builder.stop()
            if self.starts_lost >= MOST_STARTS_LOST:
                self.waiting, self.why_ended = [], "workers do not start: the GPU does not answer"
            self._give_classes()
            if not self.waiting and not any(worker.current for worker in self.workers):
                break
            with contextlib.suppress(queue.Empty):
                self._take(*self.lines.get(timeout=TICK))
                while True:
                    self._take(*self.lines.get_nowait())
            stuck = [worker for worker in self.workers if worker.is_stuck(settings)]
            for worker in stuck:
                self._lose(worker, f"stopped the GPU: no sign for {time.monotonic() - worker.moved:.0f} s")
            if stuck:  # the driver may be busy with the killed ones
                now = time.monotonic()
                for worker in self.workers:
                    worker.moved = max(worker.moved, now - settings.hang_limit / 2)
        for worker in self.workers:
            worker.end()

    def _is_built(self, one: CallClass) -> bool:
        return not self.builder.missing or not one.kernels.keys() & self.builder.missing.keys()

    def _give_classes(self) -> None:
        for worker in self.workers:
            if worker.ready and not worker.lost and worker.current is None:
                found = next((one for one in self.waiting if self._is_built(one)), None)
                if found is None:
                    return
                if worker.begin(found, self.settings):
                    self.waiting.remove(found)

    def _fail_unbuilt(self) -> None:
        """Fail the classes of kernels that could not be built; the builder has ended."""
        for one in [one for one in self.waiting if not self._is_built(one)]:
            self.waiting.remove(one)
            names = [name for name in one.kernels if name in self.builder.missing]
            text = "; ".join(
                f"{name} could not be built: {self.builder.errors.get(name, '?')}" for name in names
            )
            self._end(one, Result(FAILED, 0, [(-1, "", text)]))

    def _take(self, worker: Worker, line: str | None) -> None:
        """Take a line of a worker, or its end."""
        if worker not in self.workers:
            return
        if line is None:
            self._lose(worker, "the worker died")
            return
        worker.moved = time.monotonic()
        event = json.loads(line)
        if event["kind"] == "ready":
            worker.ready, self.gpu, self.starts_lost = True, event["gpu"], 0
        elif event["kind"] == "at":
            worker.at = event
        elif event["kind"] == "end" and worker.current is not None:
            failures = [tuple(failure) for failure in event["failures"]]
            state = FAILED if failures else PASSED
            result = Result(state, event["draws"], failures, event["launches"], event["seconds"])
            one, worker.current = worker.current, None
            worker.ended += 1
            worker.lost = event.get("lost", False)  # it ends now
            self._end(one, result)

    def _lose(self, worker: Worker, why: str) -> None:
        """Kill a worker, fail its class, and start another one."""
        worker.kill()
        self.workers.remove(worker)
        if not worker.ready:
            self.starts_lost += 1
            self.say(f"a worker did not start: {worker.last_lines()}")
        if (one := worker.current) is not None:
            at = worker.at if isinstance(worker.at, dict) else {"draw": -1, "text": worker.at}
            if "died" in why:
                why = f"{why} (exit status {worker.process.poll()}): {worker.last_lines()[-400:]}"
            self._end(one, Result(FAILED, 0, [(at["draw"], at["text"], why)]))
        if self.waiting and self.starts_lost < MOST_STARTS_LOST:
            self.workers.append(Worker(self.settings, worker.gpu, self.lines))

    def _end(self, one: CallClass, result: Result) -> None:
        self.results[one.name] = result
        self.ended += 1
        seconds = time.monotonic() - self.begin
        if result.state == FAILED:
            draw, text, fault = result.failures[0]
            self.say(f"{self.ended}, {seconds:.0f} s: {one.name} FAILED at {text or draw}: {fault}")
        elif self.ended % 20 == 0:
            left = f", {len(self.builder.missing)} kernels to build" if self.builder.missing else ""
            self.say(f"{self.ended} of {len(self.results)} classes, {seconds:.0f} s{left}")


def counts_of(results: Results) -> Counter[str]:
    """Classes by state."""
    return Counter(result.state for result in results.classes.values())
