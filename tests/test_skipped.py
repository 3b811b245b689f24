"""What a run leaves out: the line about skipped tests at its end, and cases that other commits run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("reasons", "asked", "expected"),
    [
        ({"needs a GPU": 900}, False, ["skipped 900: needs a GPU"]),
        (
            {"needs rich": 2, "needs a GPU": 900, "needs nvcc": 1},
            False,
            ["skipped 900: needs a GPU; 3 more: pytest -rs says why"],
        ),
        ({"needs a GPU": 900}, True, []),
        ({}, False, []),
    ],
    ids=["one-reason", "several", "by-rs", "none"],
)
def test_skipped_tests_are_one_line(reasons, asked, expected, request):
    lines = []
    skipped = [
        SimpleNamespace(longrepr=("test.py", 7, f"Skipped: {reason}"))
        for reason, count in reasons.items()
        for _ in range(count)
    ]
    reporter = SimpleNamespace(stats={"skipped": skipped}, hasopt=lambda name: asked, line=lines.append)
    conftest = request.config.pluginmanager.get_plugin(str(HERE / "conftest.py"))
    conftest.pytest_terminal_summary(reporter)
    assert lines == expected


class Item:
    """A case, marked in_turn with a count."""

    def __init__(self, nodeid: str, count: int | None = None):
        self.nodeid, self.mark = nodeid, None if count is None else SimpleNamespace(args=(count,))

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return self.mark if name == "in_turn" else None


@pytest.mark.parametrize(("seed", "chosen"), [(0, "ac"), (1, "bd"), (3, "db"), (102, "ca")])
def test_cases_in_turn_are_others_in_each_commit(seed, chosen, request, monkeypatch):
    conftest = request.config.pluginmanager.get_plugin(str(HERE / "conftest.py"))
    monkeypatch.setattr(conftest, "commit_seed", lambda: seed)
    left = []
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: left.extend(items)))
    items = [
        Item("test.py::dear"),
        *(Item(f"test.py::in_turn[{x}]", 2) for x in "abcd"),
        Item("test.py::never", 0),
    ]
    conftest.leave_some_in_turn(config, items)
    assert [x.nodeid for x in items] == ["test.py::dear", *(f"test.py::in_turn[{x}]" for x in sorted(chosen))]
    assert len(left) == 3
