"""Waits of processes for each other's kernels: twelve that start at once, killed and stopped ones, builders ahead, forks, packs."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import hashlib
import json
import lzma
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fake_compiler
import pytest
from fake_compiler import GOOD, PROBLEM

from tl_attention.compilation import building, compiler, locks, pack, store
from tl_attention.compilation.sandbox import Failure, Sandbox
from tl_attention.config.kernel_configs import FwdConfig

HERE = Path(__file__).parent
PROCESSES = 12
LIMIT = 60.0  # seconds for processes that start at once, on busy CPUs
KERNELS = [(PROBLEM, FwdConfig(64, 80 + 16 * n)) for n in range(4)]


class Processes:
    """Processes forked from this one that call functions at once; those that still run at the end are killed."""

    def __init__(self, functions: Sequence[Callable[[], object]], folder: Path):
        self.outputs = [folder / f"output-{number}" for number in range(len(functions))]
        self.ids = [self._start(*process) for process in zip(functions, self.outputs, strict=True)]
        self.running = set(self.ids)

    @staticmethod
    def _start(function: Callable[[], object], output: Path) -> int:
        """Fork a process whose stdout and stderr are a file."""
        if process := os.fork():
            return process
        status = 1
        try:
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
            os.dup2(1, 2)
            sys.stdout, sys.stderr, sys.argv = os.fdopen(1, "w"), os.fdopen(2, "w"), ["train.py"]
            # No dump_traceback_later(): where the parent has one, as in tests with a GPU, it waits for a thread that fork() left behind
            faulthandler.register(signal.SIGUSR1, file=2)
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)

    def said(self) -> str:
        """Lines of all processes, each with its number."""
        return "".join(
            f"[{number}] {line}\n"
            for number, path in enumerate(self.outputs)
            for line in (path.read_text().splitlines() if path.exists() else ())
        )

    def end(self, seconds: float = LIMIT, but: int | None = None) -> None:
        """Wait until each process but the one with an id has ended well. Fails with all that they said, and where they are."""
        deadline, failed = time.monotonic() + seconds, []
        while (waited := self.running - {but}) and time.monotonic() < deadline:
            for number, process in enumerate(self.ids):
                ended, status = os.waitpid(process, os.WNOHANG) if process in waited else (0, 0)
                if ended:
                    self.running.remove(process)
                    failed += [number] if status else []
            time.sleep(0.05)
        running = [number for number, process in enumerate(self.ids) if process in waited]
        for number in running:
            os.kill(self.ids[number], signal.SIGUSR1)  # it says where it is
        time.sleep(1 if running else 0)
        assert not running and not failed, (
            f"processes {running} did not end in {seconds} s, {failed} failed:\n{self.said()}"
        )


def wait_for(condition: Callable[[], object], seconds: float = LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def is_running(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(") ")[2][0] not in "ZX"


def path_of(config: FwdConfig = GOOD) -> Path:
    return store.kernel_path(PROBLEM, config)


def builders(config: FwdConfig = GOOD) -> list[str]:
    """Ids of the processes that built a kernel."""
    return path_of(config).with_suffix(".log").read_text().split()


def number_in(path: Path) -> int:
    """Id of a process that a file begins with, once it is there."""
    wait_for(lambda: path.exists() and path.read_text())
    return int(path.read_text().split()[0])


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for the compiler in this process and those forked from it, with CPUs for builders ahead."""
    monkeypatch.setattr(compiler, "build", fake_compiler.fake_build)
    monkeypatch.setattr(store, "load", lambda path: path.name)
    monkeypatch.setattr(store, "load_runtime", lambda: None)
    monkeypatch.setattr(building, "_compiled", {})
    monkeypatch.setattr(building, "_begun", set())
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.delenv("TL_ATTENTION_QUIET", raising=False)
    yield
    for builder in building._ahead.values():
        builder.close()
    building._ahead.clear()


def build(kernels: Sequence[compiler.KernelKey] = KERNELS[:1]) -> None:
    building.compile_kernels(kernels)


def test_twelve_processes_at_once_build_each_kernel_once(tmp_path, stand_ins, monkeypatch):
    monkeypatch.setattr(compiler, "build", fake_compiler.slow_build)
    orders = [KERNELS[number % 4 :] + KERNELS[: number % 4] for number in range(PROCESSES)]
    with Processes([functools.partial(build, order) for order in orders], tmp_path) as processes:
        processes.end()
    assert [len(builders(config)) for _, config in KERNELS] == [1] * 4
    assert "built by another process" in processes.said()


@pytest.mark.parametrize("killed", ["builder", "program"])
def test_twelve_processes_end_though_one_is_killed(killed, tmp_path, stand_ins, monkeypatch):
    monkeypatch.setattr(compiler, "build", fake_compiler.hang_once)
    path = path_of(KERNELS[0][1])
    with Processes([build] * PROCESSES, tmp_path) as processes:
        builder, holder = number_in(path.with_suffix(".pid")), number_in(path.with_suffix(".lock"))
        os.kill(builder if killed == "builder" else holder, signal.SIGKILL)
        processes.end(but=holder if killed == "program" else None)
    assert len(builders(KERNELS[0][1])) == 1
    wait_for(lambda: not is_running(builder))


def test_processes_end_while_the_one_that_builds_is_stopped(tmp_path, stand_ins, monkeypatch):
    monkeypatch.setattr(compiler, "build", fake_compiler.slow_build)
    path = path_of(KERNELS[0][1])
    with Processes([build] * 3, tmp_path) as processes:
        _, holder = number_in(path.with_suffix(".pid")), number_in(path.with_suffix(".lock"))
        os.kill(holder, signal.SIGSTOP)  # its builder goes on
        processes.end(but=holder)
        assert is_running(holder)
    assert len(builders(KERNELS[0][1])) == 1


def test_processes_say_for_whom_they_wait_and_do_not_wait_for_ever(tmp_path, stand_ins, monkeypatch):
    monkeypatch.setattr(compiler, "build", fake_compiler.hang_once)
    monkeypatch.setattr(locks, "SAY_EVERY", 0.5)
    monkeypatch.setattr(locks, "WAIT_LIMIT", 2.0)
    path = path_of(KERNELS[0][1])
    with Processes([build] * 3, tmp_path) as processes:
        builder, holder = number_in(path.with_suffix(".pid")), number_in(path.with_suffix(".lock"))
        os.kill(holder, signal.SIGSTOP)
        processes.end(but=holder)
        assert is_running(holder) and is_running(builder)
    name, said = f"{PROBLEM}, {KERNELS[0][1]}", processes.said()
    assert f"waiting for {name}, " in said
    assert f"s so far: it is built by process {holder} (train.py), which is stopped" in said
    assert f"`kill -CONT {holder}` or end it" in said
    assert f"building {name} here, which was not built in 2 s by process {holder}" in said
    wait_for(lambda: not is_running(builder))


def test_lock_is_taken_by_a_program_of_any_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["\udcff"])  # no UTF-8
    lock = locks.try_lock(tmp_path / "kernel.so")
    assert lock and locks.try_lock(tmp_path / "kernel.so") is None
    assert "another thread" in locks.holder(tmp_path / "kernel.so")
    lock.release()
    assert locks.try_lock(tmp_path / "kernel.so")


def test_wait_is_silent_with_quiet(tmp_path, stand_ins, monkeypatch):
    monkeypatch.setenv("TL_ATTENTION_QUIET", "1")
    monkeypatch.setattr(locks, "SAY_EVERY", 0.1)
    lock = locks.try_lock(path_of(KERNELS[0][1]))
    with Processes([build], tmp_path) as processes:
        time.sleep(0.5)
        lock.release()
        processes.end()
    assert processes.said() == ""


def test_waits_begin_anew_with_another_holder(monkeypatch):
    monkeypatch.setattr(locks, "WAIT_LIMIT", 0.2)
    waits, path = locks.Waits(), path_of()
    for _ in range(3):
        lock = locks.try_lock(path)
        lock.name_holder(os.getpid(), f"program at {time.monotonic()}")
        assert waits.look(path, "a kernel") is None
        time.sleep(0.15)
        assert waits.look(path, "a kernel") is None
        lock.release()
    assert locks.try_lock(path)


def test_lock_that_was_waited_for_too_long_is_taken_once(monkeypatch):
    monkeypatch.setattr(locks, "WAIT_LIMIT", 0)
    waits, path = locks.Waits(), path_of()
    slow = locks.try_lock(path)
    assert locks.try_lock(path) is None and waits.look(path, "a kernel") is None
    assert waits.look(path, "a kernel").startswith(
        "building a kernel here, which was not built in 0 s by another thread"
    )
    taken = locks.try_lock(path)
    assert taken and locks.try_lock(path) is None
    slow.release()
    assert locks.try_lock(path) is None
    taken.release()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "another process"),
        (f"1 {os.uname().nodename} train.py --steps 3", "process 1 (train.py --steps 3)"),
        ("7 node17 train.py", "process 7 (train.py) on node17"),
        (f"{os.getpid()} {os.uname().nodename} pytest", "another thread of this process"),
    ],
    ids=["nobody", "here", "elsewhere", "thread"],
)
def test_holder_of_a_lock_is_named(content, words):
    path_of().parent.mkdir(parents=True)
    path_of().with_suffix(".lock").write_text(content)
    assert locks.holder(path_of()) == words


def test_lock_needs_no_space_on_the_disk(monkeypatch, stand_ins):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert building.compile_kernel(PROBLEM, GOOD)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """A child of this process, forked now, that waits."""
    if (child := os.fork()) == 0:
        signal.pause()
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_forked_process_does_not_keep_a_lock():
    lock = locks.try_lock(path_of())
    with forked():
        os.close(lock.file)  # as the end of this process does
        wait_for(lambda: locks.try_lock(path_of()), 10)


def test_forked_process_can_build_ahead_while_a_thread_of_its_parent_does(stand_ins):
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with building._ahead_lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        building.build_ahead([], "for a test")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    release.set()
    thread.join()
    assert status == 0


@pytest.fixture
def begun(stand_ins) -> Iterator[tuple[Sandbox, int]]:
    """A sandbox with a call that does not end, and the id of its process."""
    sandbox = Sandbox(building.prepare_to_build, fresh=True, torchless=True)
    path = path_of()
    path.parent.mkdir(parents=True)
    sandbox.begin(fake_compiler.hang_once, PROBLEM, GOOD, path)
    yield sandbox, number_in(path.with_suffix(".pid"))
    sandbox.close()


@pytest.mark.parametrize("inherited", ["by-fork", "otherwise"])
def test_end_of_a_builder_is_noticed_though_another_process_has_its_pipe(inherited, monkeypatch, request):
    pairs, real = [], multiprocessing.Pipe

    def pipe() -> tuple:
        pairs.append(real())
        if inherited == "otherwise":
            pairs.append(os.dup(pairs[-1][1].fileno()))
        return pairs[0]

    monkeypatch.setattr(multiprocessing, "Pipe", pipe)
    sandbox, builder = request.getfixturevalue("begun")
    assert not sandbox.has_ended()
    with forked():
        os.kill(builder, signal.SIGKILL)
        wait_for(sandbox.has_ended, 10)
        with pytest.raises(Failure, match="died: SIGKILL"):
            sandbox.finish()
    if inherited == "otherwise":
        os.close(pairs[1])


def test_builder_that_hangs_is_ended_and_named(monkeypatch, stand_ins):
    monkeypatch.setattr(compiler, "build", fake_compiler.hang_once)
    monkeypatch.setattr(building, "BUILD_LIMIT", 2)
    (error,) = building.build_all([(PROBLEM, GOOD)]).values()
    assert str(error) == f"tl_attention: {PROBLEM}, {GOOD} could not be built: no end within 2 s"
    assert not is_running(number_in(path_of().with_suffix(".pid")))


def test_program_ends_while_builders_ahead_run(tmp_path, stand_ins, monkeypatch):
    monkeypatch.setattr(compiler, "build", fake_compiler.hang_once)
    path = path_of()

    def program() -> None:
        building.build_ahead([(PROBLEM, GOOD)], "for a test")
        number_in(path.with_suffix(".pid"))

    with Processes([program], tmp_path) as processes:
        processes.end()
    builder = number_in(path.with_suffix(".pid"))
    wait_for(lambda: not is_running(builder), 20)
    assert locks.try_lock(path)


@pytest.mark.parametrize("fate", ["killed", "hangs"])
def test_call_that_needs_a_kernel_being_built_ahead_ends(fate, monkeypatch, stand_ins, capfd):
    monkeypatch.setattr(compiler, "build", fake_compiler.hang_once)
    monkeypatch.setattr(locks, "SAY_EVERY", 0.3)
    monkeypatch.setattr(locks, "WAIT_LIMIT", LIMIT if fate == "killed" else 1.0)
    building.build_ahead([(PROBLEM, GOOD)], "for a test")
    builder = number_in(path_of().with_suffix(".pid"))
    if fate == "killed":
        threading.Timer(1.0, os.kill, (builder, signal.SIGKILL)).start()
    building.compile_kernel(PROBLEM, GOOD)
    assert len(builders()) == 1
    whom = f"by process {builder} (a builder that process {os.getpid()} began ahead)"
    assert f"s so far: it is built {whom}" in capfd.readouterr().err


def test_pack_is_read_by_twelve_processes_at_once(tmp_path):
    records = []
    for number in range(24):
        host, cubin = os.urandom(3000), bytes([number]) * 5000
        facts = {"host_bytes": len(host), "cubin_bytes": len(cubin)}
        records.append(b"\n".join([json.dumps(facts).encode(), host + cubin]))
    groups = [lzma.compress(b"".join(records[first : first + 12])) for first in (0, 12)]
    file = pack.data_name()
    sizes = [[file, 0, len(groups[0])], [file, len(groups[0]), len(groups[1])]]
    places = {
        f"fwd-{number}": [number // 12, sum(map(len, records[number // 12 * 12 : number])), len(record)]
        for number, record in enumerate(records)
    }
    index = {"format": pack.FORMAT, "version": "0", "compilers": {}, "groups": sizes, "kernels": places}
    (tmp_path / pack.INDEX).write_text(json.dumps(index))
    (tmp_path / file).write_bytes(b"".join(groups))

    def read() -> None:
        found, digest = pack.Pack.read(tmp_path), hashlib.sha256()
        for name, place in found.kernels.items():
            _, host, cubin = pack.PackedKernel(found, name, *place).read()
            digest.update(host + cubin)
        print(digest.hexdigest())

    expected = hashlib.sha256(b"".join(record.split(b"\n", 1)[1] for record in records)).hexdigest()
    with Processes([read] * PROCESSES, tmp_path) as processes:
        processes.end()
    assert [path.read_text() for path in processes.outputs] == [f"{expected}\n"] * PROCESSES


def test_processes_start_beside_the_watchdog_of_a_gpu_test(tmp_path):
    faulthandler.dump_traceback_later(10 * LIMIT)
    try:
        with Processes([lambda: print("here")] * 2, tmp_path) as processes:
            processes.end()
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert [path.read_text() for path in processes.outputs] == ["here\n"] * 2


GPU_LIMIT = 180  # seconds for twelve processes that import torch and build some eight kernels together
GPU_PROGRAM = f"""
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR1)
sys.path.insert(0, {str(HERE.parent)!r})
begin = time.monotonic()
def reached(stage):  # a failure shows these lines of all processes
    print(f"{{stage}} after {{time.monotonic() - begin:.0f}} s", flush=True)
import torch
from tl_attention import flash_attn_func
reached("imported")
torch.manual_seed(0)
q, k, v = (torch.randn(2, 200, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
reached("inputs")
out = flash_attn_func(q, k, v, causal=True)
reached("forward")
out.backward(torch.ones_like(out))
torch.cuda.synchronize()
reached("backward")
print(*(f"{{x.double().abs().sum().item():.17g}}" for x in (out, q.grad, k.grad, v.grad)))
"""


@pytest.mark.gpu
@pytest.mark.timeout(GPU_LIMIT + 60)
@pytest.mark.parametrize("kernels", ["of-an-empty-folder", "of-the-pack"])
def test_twelve_processes_at_once_on_one_gpu_agree(kernels, tmp_path):
    if kernels == "of-the-pack" and (pack.ignored() or not pack.installed()):
        pytest.skip("no pack of kernels is installed")
    environment = os.environ | {"TL_ATTENTION_CACHE_DIR": str(tmp_path / "cache"), "TL_ATTENTION_QUIET": "1"}
    if kernels == "of-an-empty-folder":
        environment["TL_ATTENTION_PACK"] = "0"
    program = functools.partial(os.execve, sys.executable, [sys.executable, "-c", GPU_PROGRAM], environment)
    with Processes([program] * PROCESSES, tmp_path) as processes:
        processes.end(GPU_LIMIT + 30)
    printed = [path.read_text().splitlines()[-1].split() for path in processes.outputs]
    assert len({out for out, *_ in printed}) == 1, processes.said()
    for values in zip(*(map(float, line) for line in printed), strict=True):
        assert min(values) == pytest.approx(max(values), rel=1e-3)  # dq's sums have no fixed order
