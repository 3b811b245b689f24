"""Building of kernels with a stand-in for the compiler: several at once, once per machine, and the notices on stderr."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fake_compiler
import pytest
import torch
from fake_compiler import BAD, CRASHES, GOOD, PROBLEM, fake_build, slow_build

from tl_attention import launch
from tl_attention.compilation import building, compiler, store, toolkit, torchless
from tl_attention.compilation.sandbox import Sandbox
from tl_attention.config import configs
from tl_attention.config.buckets import buckets
from tl_attention.config.costs import costs_of
from tl_attention.config.kernel_configs import BwdDelta, BwdSum, FwdCombine, FwdConfig, KernelConfig
from tl_attention.problem.attn_problem import AttnProblem, decode_problem

NAME = f"{PROBLEM}, {GOOD}"


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(compiler, "build", fake_build)
    monkeypatch.setattr(store, "load", lambda path: path.name)
    monkeypatch.setattr(building, "_compiled", {})
    monkeypatch.setattr(building, "_begun", set())
    monkeypatch.delenv("TL_ATTENTION_QUIET", raising=False)


def builders(config: KernelConfig = GOOD) -> list[str]:
    """Ids of the processes that built a kernel."""
    return store.kernel_path(PROBLEM, config).with_suffix(".log").read_text().split()


def test_build_all_builds_what_is_missing_and_says_how_far_it_is():
    kernels, said = (
        [(PROBLEM, config) for config in (GOOD, BAD, CRASHES)],
        [],
    )  # nvcc rejects BAD: it is tried once
    results = building.build_all([*kernels, kernels[0]], jobs=3, say=said.append)
    assert list(results) == kernels and results[kernels[0]] is None
    assert str(results[kernels[1]]).endswith(
        "could not be built: Rejected: nvcc rejects the kernel:\nkernel.cu(7): error"
    )
    assert len(builders(BAD)) == 1, "it would fail with torch, too"
    assert str(results[kernels[2]]).endswith("could not be built: died: SIGSEGV")
    assert said[0] == "3 of 3 kernels to build" and len(said) == 4
    assert said[-1].startswith("3/3 kernels, ") and any(NAME in line for line in said)
    assert str(os.getpid()) not in builders()

    said.clear()
    assert building.build_all(kernels[:1], say=said.append) == {kernels[0]: None}
    assert not said and len(builders()) == 1


def test_build_names_the_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(tmp_path / "file"))
    (error,) = building.build_all([(PROBLEM, GOOD)]).values()
    assert str(tmp_path / "file") in str(error) and "TL_ATTENTION_CACHE_DIR names another" in str(error)


def test_build_without_a_python_says_so(monkeypatch):
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: b"/nowhere/python")
    kernels = [(PROBLEM, GOOD), (PROBLEM, CRASHES)]
    errors = building.build_all(kernels, jobs=1)
    assert all(
        "could not be built: cannot start /nowhere/python: " in str(error) for error in errors.values()
    )


def test_builder_that_cannot_import_the_compiler_says_so(monkeypatch):
    module = type(sys)("module_of_this_process")
    exec("def build(*kernel): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(compiler, "build", module.build)
    (error,) = building.build_all([(PROBLEM, GOOD)]).values()
    assert "ModuleNotFoundError: No module named 'module_of_this_process'" in str(error)


def test_files_are_read_ahead_though_one_is_missing(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100))
    paths, passed = [tmp_path / "missing", tmp_path, tmp_path / "file"], []

    def listed():
        for path in paths:
            yield path
            passed.append(path)

    before = set(threading.enumerate())
    toolkit.read_ahead(listed())
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert passed == paths


def test_programs_that_compile_are_found():
    found = list(toolkit.compiler_programs())
    assert any(path.name == "cc1plus" and path.exists() for path in found)
    libraries = list(toolkit.tilelang_libraries())
    assert libraries and all(path.exists() for path in libraries)


def test_builder_makes_the_text_of_a_kernel_without_torch():
    kernel = AttnProblem("bfloat16", 64, 64, False), BwdDelta()
    sandbox = Sandbox(building.prepare_to_build, fresh=True, torchless=True)
    try:
        source, imported = sandbox.call(fake_compiler.lower, *kernel, limit_s=60)
    finally:
        sandbox.close()
    assert imported == ["torch"], "TileLang asks for more of torch than its stand-in has"
    assert source == compiler.lower(*kernel)[0]


@pytest.mark.parametrize("build", [fake_compiler.use_of_torch, fake_compiler.crash_without_torch])
def test_builder_that_needs_torch_gets_it(monkeypatch, build):
    monkeypatch.setattr(compiler, "build", build)
    assert building.build_all([(PROBLEM, GOOD)]) == {(PROBLEM, GOOD): None}


def test_builder_whose_import_fails_without_torch_gets_it(monkeypatch):
    monkeypatch.setattr(torchless, "PROGRAM", "raise ImportError")
    assert building.build_all([(PROBLEM, GOOD)]) == {(PROBLEM, GOOD): None}


def test_build_that_fails_is_tried_once_more_with_torch(monkeypatch):
    monkeypatch.setattr(compiler, "build", fake_compiler.count_and_fail)
    (error,) = building.build_all([(PROBLEM, GOOD)]).values()
    assert "could not be built: ValueError: torch is there" in str(error) and len(builders()) == 2
    assert str(error).endswith("before, in a builder without torch: ValueError: torch is replaced")


def test_building_starts_no_thread(monkeypatch):
    monkeypatch.setattr(
        threading.Thread, "start", lambda self: pytest.fail("a thread delays the end of a program")
    )
    building.compile_kernel(PROBLEM, GOOD)


def test_compile_kernels_raises_what_went_wrong():
    with pytest.raises(RuntimeError, match=r"bf16 d64 causal, 64x48.* could not be built: Rejected"):
        building.compile_kernels([(PROBLEM, BAD)])


def test_kernel_is_built_once_by_threads_that_need_it_at_once(monkeypatch):
    monkeypatch.setattr(compiler, "build", slow_build)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(building.compile_kernel(PROBLEM, GOOD)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len(set(found)) == 1 and len(builders()) == 1
    assert building.compile_count() == 1


@contextlib.contextmanager
def built_elsewhere(seconds: float):
    """Another process holds the lock of GOOD, and has built it after some seconds."""
    path = store.kernel_path(PROBLEM, GOOD)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_suffix(".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def end() -> None:
        path.touch()
        fcntl.flock(lock, fcntl.LOCK_UN)

    timer = threading.Timer(seconds, end)
    timer.start()
    yield
    timer.join()


def test_build_waits_for_another_process_and_says_so(capfd):
    with built_elsewhere(0.5):
        building.compile_kernel(PROBLEM, GOOD)
    assert f"waiting for 1 kernel ({NAME}), 1 of them built by another process" in capfd.readouterr().err
    assert not store.kernel_path(PROBLEM, GOOD).with_suffix(".log").exists()


def test_build_of_other_kernels_goes_on_while_one_is_built_elsewhere():
    other, said = FwdConfig(64, 80), []
    with built_elsewhere(4):
        building.build_all([(PROBLEM, GOOD), (PROBLEM, other)], 1, lambda line: said.append(line))
    assert [str(other) in line for line in said] == [False, True, False]


def test_build_takes_over_a_kernel_that_another_process_gave_up():
    path = store.kernel_path(PROBLEM, GOOD)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.3, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        building.compile_kernel(PROBLEM, GOOD)
    assert len(builders()) == 1


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.fixture
def many_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    yield
    wait_for(lambda: not any(builder.process.is_alive() for builder in building._ahead.values()))
    building._ahead.clear()


def test_build_ahead_does_not_wait_and_later_calls_find_the_kernels(many_cpus, monkeypatch, capfd):
    monkeypatch.setattr(compiler, "build", slow_build)
    other = FwdConfig(64, 80)
    building.build_ahead([(PROBLEM, GOOD), (PROBLEM, other)], "for a test")
    assert not store.find(PROBLEM, GOOD) and not store.find(PROBLEM, other)
    building.build_ahead([(PROBLEM, GOOD)], "for a test")  # builds nothing twice
    building.compile_kernels([(PROBLEM, GOOD), (PROBLEM, other)])
    assert len(builders()) == len(builders(other)) == 1
    said, *_ = capfd.readouterr().err.splitlines()
    assert said.startswith(f"tl_attention: building 2 kernels ({NAME} and 1 more) meanwhile, for a test; ")


def test_build_ahead_leaves_a_failure_to_the_call(many_cpus):
    building.build_ahead([(PROBLEM, BAD)], "for a test")
    with pytest.raises(RuntimeError, match="64x48.* could not be built: Rejected"):
        building.compile_kernels([(PROBLEM, BAD)])


def test_build_ahead_tries_a_kernel_once(many_cpus, capfd):
    building.build_ahead([(PROBLEM, BAD)], "for a test")
    wait_for(lambda: not building._ahead[PROBLEM, BAD].process.is_alive())
    building.build_ahead([(PROBLEM, BAD)], "for a test")
    assert not building._ahead and len(capfd.readouterr().err.splitlines()) == 1


def test_build_ahead_takes_one_cpu_in_four(monkeypatch):
    kernels = [(PROBLEM, FwdConfig(64, 16 * n)) for n in range(1, 9)]
    for cpus, expected in ((3, 0), (7, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cpus=cpus: set(range(cpus)))
        building.build_ahead(kernels, "for a test")
        assert len(building._ahead) == expected
    wait_for(lambda: not any(builder.process.is_alive() for builder in building._ahead.values()))
    building._ahead.clear()


def test_notice_says_what_is_built_and_how_long_it_took(capfd):
    building.compile_kernels([(PROBLEM, GOOD), (PROBLEM, FwdConfig(64, 80))], lambda: " in a backward pass")
    start, end = capfd.readouterr().err.splitlines()
    assert start.startswith(
        f"tl_attention: building 2 kernels ({NAME} and 1 more), once per machine in a backward pass; "
    )
    assert "tl-attention compile" in start and "TL_ATTENTION_QUIET=1" in start
    assert end.startswith("tl_attention: 2 kernels built in ")


def test_notice_is_silenced_by_the_environment(monkeypatch, capfd):
    monkeypatch.setenv("TL_ATTENTION_QUIET", "1")
    building.compile_kernel(PROBLEM, GOOD)
    assert capfd.readouterr().err == ""


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_notice_counts_seconds_on_a_terminal_without_rich(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setitem(sys.modules, "rich", None)
    with built_elsewhere(2.3):
        building.compile_kernel(PROBLEM, GOOD)
    first, *ticks = sys.stderr.getvalue().split("\r")
    assert first.endswith("\n")
    seconds = [int(re.fullmatch(r"tl_attention: 0 of 1 kernel, (\d+) s", tick)[1]) for tick in ticks[:-1]]
    assert seconds and seconds == sorted(set(seconds))  # a busy machine may miss one
    assert re.fullmatch(r"tl_attention: 1 kernel built in \d s\n", ticks[-1])


def test_notice_shows_a_bar_on_a_terminal_with_rich(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(compiler, "build", slow_build)
    with built_elsewhere(2.3):
        building.compile_kernels([(PROBLEM, GOOD), (PROBLEM, FwdConfig(64, 80))])
    written = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", sys.stderr.getvalue())
    first, *steps = written.splitlines()
    assert first.startswith("tl_attention: building 2 kernels") or "waiting for 2 kernels" in first
    assert "kernels built" in steps[0] and "0/2" in steps[0] and any("1/2" in step for step in steps)
    assert re.fullmatch(r"tl_attention: 2 kernels built in \d+ s", steps[-1])


def test_notice_leaves_the_terminal_to_an_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(RuntimeError, match="could not be built"):
        building.compile_kernel(PROBLEM, BAD)
    written = sys.stderr.getvalue()
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1, "the cursor is hidden"
    assert "built in" not in written


def test_notice_names_a_capture(monkeypatch):
    words = []
    monkeypatch.setattr(
        launch.common, "compile_kernels", lambda kernels, where: words.append(where()) or kernels
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launch.common.compile_config(PROBLEM, configs.default_config(PROBLEM))
    launch.common.compile_config(PROBLEM, configs.default_config(PROBLEM, "bwd"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launch.common.compile_config(PROBLEM, configs.default_config(PROBLEM))
    launch.decode._append_kernel.__wrapped__("bfloat16")
    assert words[0] == "" and "backward" in words[1]
    assert all("call once before capturing" in text for text in words[2:]) and len(words) == 4


# A program without a guard around its main part, which an interpreter started by multiprocessing would run again
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.path[:0] = {paths!r}
{first}
import fake_compiler
from tl_attention.compilation import building, compiler
print("main", flush=True)
compiler.build = fake_compiler.{build}
print(building.build_all([(fake_compiler.PROBLEM, fake_compiler.GOOD)]), flush=True)
"""


def start_program(tmp_path: Path, build: str, first: str = "") -> subprocess.Popen:
    script = tmp_path / "program.py"
    here = Path(__file__).parent
    script.write_text(PROGRAM.format(paths=[str(here), str(here.parent)], build=build, first=first))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "queue.py").write_text("raise ImportError('a module of the working directory')")
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=elsewhere)


def test_program_without_a_guard_runs_once(tmp_path):
    program = start_program(tmp_path, "fake_build")
    out, _ = program.communicate(timeout=60)
    assert out.count("main") == 1 and "None" in out and program.returncode == 0


def is_running(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(") ")[2][0] not in "ZX"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_builders_end_with_the_program(how, tmp_path):
    program = start_program(tmp_path, "hang", torchless.PROGRAM)  # to start sooner
    written = store.kernel_path(PROBLEM, GOOD).with_suffix(".pid")
    wait_for(lambda: written.exists() and written.read_text())
    program.send_signal(how)
    program.communicate(timeout=60)
    builder = int(written.read_text())
    wait_for(lambda: not is_running(builder), 20)
    assert not is_running(builder)


@pytest.fixture
def asked(monkeypatch) -> list:
    """Kernels that launches ask for, in a list per call."""
    calls = []

    def compile_kernels(kernels, where):
        calls.append(list(kernels))
        return kernels

    monkeypatch.setattr(launch.common, "compile_kernels", compile_kernels)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    for module in (launch.fwd, launch.decode):
        monkeypatch.setattr(module, "sm_count", lambda device: 132)
    for module in (launch.common, launch.decode):
        monkeypatch.setattr(module, "unused_tensor", lambda device, dtype, *shape: torch.zeros(shape))
    monkeypatch.setattr(launch.fwd, "device_costs", lambda device: costs_of())
    return calls


@pytest.mark.parametrize("bucket", buckets("fwd"))
def test_forward_needs_the_kernels_of_its_length_alone_and_at_once(bucket, asked):
    problem = AttnProblem("bfloat16", 128, 128, True)
    key = "bfloat16", 128, 128, True, (), None, bucket, 0
    launch.fwd._find_kernels(key, None)
    config = configs.pick_config(problem, bucket, "NVIDIA H200")[0]
    assert asked == [config.kernels(problem)]
    assert (bucket == "split") == any(isinstance(part, FwdCombine) for _, part in asked[0])


@pytest.mark.parametrize("deterministic", [False, True])
def test_forward_begins_to_build_the_backward_of_tensors_that_require_a_gradient(
    deterministic, asked, monkeypatch
):
    ahead = []
    monkeypatch.setattr(building, "build_ahead", lambda kernels, purpose: ahead.append(list(kernels)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(launch.fwd, "empty", lambda *metadata: torch.empty(1))
    monkeypatch.setattr(launch.fwd, "FwdPlan", lambda *args: pytest.fail("a launch"))
    q = torch.zeros(1, 256, 2, 128, dtype=torch.bfloat16)
    for requires_grad in (False, True):
        q.requires_grad_(requires_grad)
        with pytest.raises(pytest.fail.Exception, match="a launch"):
            launch.forward(q, q, q, 0.1, True, False, deterministic=deterministic)
    problem = AttnProblem("bfloat16", 128, 128, True)
    direction = "bwd_det" if deterministic else "bwd"
    assert ahead == [configs.pick_config(problem, "1k", "NVIDIA H200", direction)[0].kernels(problem)]


def test_backward_needs_all_its_kernels_at_once(asked):
    launch.bwd_kernels._find_kernels(("bfloat16", 128, 128, True, ("varlen",), None, "4k", 0), "bwd", None)
    (kernels,) = asked
    kinds = [type(config) for _, config in kernels]
    assert len(kernels) >= 4 and BwdDelta in kinds and BwdSum in kinds


def test_decode_needs_the_kernels_of_its_number_of_queries_alone(asked):
    from tl_attention.problem.options import Cache, Options

    q, k = torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16), torch.zeros(1, 256, 8, 128, dtype=torch.bfloat16)
    launch.decode.DecodePlan(q, Cache(k, k, 256), Options())
    problem = decode_problem("bfloat16", 128, 128, ())
    assert asked == [configs.decode_config(problem, 1, items_per_sm=0).kernels(problem)]
