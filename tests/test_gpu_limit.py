"""The limit per GPU test (gpu_limit.py), in small runs of pytest whose "GPU" test waits in C for ever."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = """
import ctypes, signal
import pytest

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGINT])

def test_before(): pass

@pytest.mark.gpu
@pytest.mark.timeout(1)
@pytest.mark.xdist_group("gpu")
def test_waits_for_its_gpu():
    while True:
        ctypes.{library}(None).pause()

@pytest.mark.gpu
@pytest.mark.xdist_group("gpu")
def test_after(): pass

def test_of_the_cpu(): pass
"""
OPTIONS = ["-p", "gpu_limit", "-p", "no:cacheprovider", "--strict-markers", "-o", "markers=gpu: a GPU test"]


def run(tmp_path: Path, library: str, *options: str) -> tuple[str, float]:
    """Output of a run of TESTS, and its seconds."""
    (tmp_path / "test_small.py").write_text(TESTS.format(library=library))
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-rA", *OPTIONS, *options, "test_small.py"]
    begin = time.monotonic()
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(HERE), "PYTEST_ADDOPTS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode, done.stdout
    return done.stdout, time.monotonic() - begin


@pytest.mark.parametrize("library", ["CDLL", "PyDLL"], ids=["python-runs", "python-waits"])
def test_gpu_limit_ends_a_process_that_waits_in_c(library, tmp_path):
    out, seconds = run(tmp_path, library)
    assert "test_waits_for_its_gpu" in out and seconds < 30, out


def test_gpu_limit_lets_the_other_tests_go_on_in_another_worker(tmp_path):
    out, _ = run(tmp_path, "CDLL", "-n", "1", "--dist", "loadgroup")
    assert re.search(r"worker 'gw\d' crashed while running '.*test_waits_for_its_gpu", out), out
    passed = set(re.findall(r"^PASSED .*::(\w+)", out, re.MULTILINE))
    assert passed == {"test_before", "test_after", "test_of_the_cpu"}, out
    assert "1 failed, 3 passed" in out, "a test that ended a worker runs again"


@pytest.mark.parametrize(
    ("own", "option", "expected"),
    [
        ("", [], 180),
        ("(600)", [], 600),
        ("(timeout=20)", [], 20),
        ("(20)", ["--gpu-limit=900"], 900),
        ("(950)", ["--gpu-limit=900"], 950),
        ("(950)", ["--gpu-limit=0"], 0),
    ],
)
def test_gpu_limit_is_that_of_the_mark_or_a_larger_one_of_the_command(own, option, expected, pytester):
    mark = f"@pytest.mark.timeout{own}\n" if own else ""
    pytester.makepyfile(
        f"import pytest\n{mark}@pytest.mark.gpu\ndef test_gpu(): pass\ndef test_cpu(): pass\n"
    )
    items, _ = pytester.inline_genitems(*OPTIONS, *option)
    gpu, cpu = items
    assert gpu.get_closest_marker("timeout").args == (expected,)
    assert gpu.get_closest_marker("timeout").kwargs == {"method": "thread"}
    assert cpu.get_closest_marker("timeout") is None
