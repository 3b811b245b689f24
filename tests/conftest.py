"""A seed and a cache folder per test, no deadline for hypothesis, one thread for PyTorch, a reason for each skipped GPU test."""

from __future__ import annotations

import gc
import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from seeds import commit_seed

from tl_attention.integrations import torch_backend
from tl_attention.problem.target import is_hopper

pytest_plugins = ["gpu_limit", "pytester"]
# Tensors here are small, and threads of several test processes would only compete.
torch.set_num_threads(1)
settings.register_profile("tl_attention", deadline=None)
settings.load_profile("tl_attention")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-kernels", action="store_true", help="compile every shipped kernel, not a sample")
    parser.addoption(
        "--all-models", action="store_true", help="try every model class of transformers, not a sample"
    )


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU, where the reference runs, and a GPU."""
    return request.param


@pytest.fixture
def highest_precision() -> Iterator[None]:
    """Set the default precision of fp32 products to "highest" for a test."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def handle() -> Iterator[torch_backend.Handle]:
    """torch_backend.register(), removed after the test."""
    handle = torch_backend.register()
    yield handle
    handle.remove()


@pytest.fixture(scope="session")
def new_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths without a folder; tmp_path makes one per test, and looks through those of all tests before it."""
    root = tmp_path_factory.mktemp("caches")
    return (root / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_cache(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, new_folders: Iterator[Path]
) -> None:
    """Point the cache of kernels and of tuned tables to a new folder; GPU tests keep the user's, whose kernels take minutes."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(next(new_folders)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all tests without garbage collections, as modules live until the end: 5 s per process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def leave_some_in_turn(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases of tests marked in_turn that another commit runs. Those of a GPU all run."""
    cases = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("in_turn")
        if marker and not item.get_closest_marker("gpu"):
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    others = {case for found in cases.values() for case in found} - {
        found[(commit_seed() + i * len(found) // count) % len(found)]
        for (_, count), found in cases.items()
        for i in range(min(count, len(found)))
    }
    if others:
        config.hook.pytest_deselected(items=[item for item in items if item in others])
        items[:] = [item for item in items if item not in others]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-kernels"):
        leave_some_in_turn(config, items)
    if is_hopper(0):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.xdist_group("gpu"))  # one process has the GPU to itself
        return
    found = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA GPU"
    reason = (
        f"needs an NVIDIA Hopper GPU (sm_90), found {found}: run `pytest -m gpu` on an H100, H200 or GH200"
    )
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line about skipped tests: the most common reason, and how many have others. -rs prints a line per test and reason."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    if reasons and not terminalreporter.hasopt("skipped"):
        (reason, count), *others = reasons.most_common()
        rest = f"; {sum(n for _, n in others)} more: pytest -rs says why" if others else ""
        terminalreporter.line(f"skipped {count}: {reason}{rest}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))
