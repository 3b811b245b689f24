"""The line about skipped tests at the end of a run."""

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
