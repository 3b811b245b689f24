"""A limit per GPU test, loaded by conftest.py: it ends a process whose GPU does not answer, and names the test.

A test that waits for a hung kernel waits inside a call of CUDA, where no signal handler of Python runs. So a thread of pytest-timeout
ends the process. If the call holds Python's lock, too, that thread does not run, and faulthandler's thread, which needs no lock, ends
the process a little later. Under xdist another worker takes the place of the ended one and runs the other tests.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

LIMIT = 180.0  # seconds per test, with what its fixtures do for it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-limit",
        type=float,
        metavar="SECONDS",
        help=f"least limit of each GPU test, 0: none; default: that of its `timeout` mark, else {LIMIT:.0f}",
    )


def limit_of(item: pytest.Item) -> float:
    """Seconds that a GPU test may take, 0 for no limit."""
    given, mark = item.config.getoption("--gpu-limit"), item.get_closest_marker("timeout")
    own = LIMIT if mark is None else float((*mark.args, mark.kwargs.get("timeout"))[0])
    return own if given is None else given and max(own, given)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.timeout(limit_of(item), method="thread"), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    limit = limit_of(item) if item.get_closest_marker("gpu") else 0
    if limit:
        stderr = item.config.stash[fault_handler_stderr_fd_key]  # not the one that pytest captures
        faulthandler.dump_traceback_later(1.1 * limit + 1, file=stderr, exit=True)
    try:
        return (yield)
    finally:
        if limit:
            faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Scheduler of `--dist loadgroup` that does not repeat a test which ended its worker: it would end the next one, too."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class EachTestOnce(LoadGroupScheduling):
        def remove_node(self, node: Any) -> str | None:
            units = self.assigned_work[node]
            tests = ((unit, test) for unit in units.values() for test in unit if not unit[test])
            unit, crashed = next(tests, ({}, None))
            unit[crashed] = True
            # A unit without tests to run would leave the next worker waiting
            for scope in [scope for scope, unit in units.items() if all(unit.values())]:
                del units[scope]
            super().remove_node(node)
            return crashed

        def schedule(self) -> None:
            super().schedule()
            for node in self.nodes:
                # A worker begins a test when it knows the next one, or that there is none
                self._reschedule(node)

    return EachTestOnce(config, log)
