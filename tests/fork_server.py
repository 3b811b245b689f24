"""The server that processes of tests are forked from, which has imported what they need: 0.02 s per process, not 4 s."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver

import pytest

from tl_attention.compilation import sandbox


def start_fork_server() -> None:
    """Start the server, of which a process has one, with the imports of all tests, whichever is the first.

    Python 3.11 tells it no sys.path, and a module that it does not find is silently left to each process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        modules = *sandbox.PRELOAD, "pytest", "rich.console", "distributed_cases"
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
        forkserver.ensure_running()
