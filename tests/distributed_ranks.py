"""Processes with a process group, kept for all tests of a module: each runs functions that all ranks call together."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fork_server import start_fork_server

SECONDS = 120  # of the process group


class Processes:
    """Ranks of one process group, in processes of their own; started by the first call, and again after an error.

    The processes are forks of the server of fork_server.py.
    """

    def __init__(self, world: int, device: str = "cpu", seconds: float = SECONDS):
        """seconds: of a call."""
        self.world, self.device, self.seconds = world, device, seconds
        self._ranks: list[tuple[Any, Connection]] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        start_fork_server()
        self._folder = folder = Path(tempfile.mkdtemp())
        for rank in range(self.world):
            mine, its = context.Pipe()
            arguments = rank, self.world, folder, self.device, self.seconds, dict(os.environ), its
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            its.close()
            self._ranks.append((process, mine))

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of function(*arguments) on each rank.

        Raises:
            AssertionError: with the traceback of each rank that raised; the processes are ended.
        """
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((function, arguments))
        results, errors = [], []
        for rank, (_, pipe) in enumerate(self._ranks):
            # Ranks that wait for one that raised get no result
            try:
                answered = pipe.poll(1 if errors else self.seconds)
                result, error = pipe.recv() if answered else (None, f"no answer\n{self._place(rank)}")
            except EOFError:
                result, error = None, "it died"
            results.append(result)
            if error:
                errors.append(f"rank {rank}: {error}")
        if errors:
            self.end()
        assert not errors, "\n".join(errors)
        return results

    def _place(self, rank: int) -> str:
        """Stacks of a rank that gave no answer."""
        path = self._folder / f"stacks{rank}"
        return path.read_text() if path.exists() else ""

    def end(self) -> None:
        """End the processes."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()  # one that waits in a collective answers to nothing else
            process.join()
        self._ranks = []


def _serve(
    rank: int,
    world: int,
    folder: Path,
    device: str,
    seconds: float,
    environment: dict[str, str],
    pipe: Connection,
) -> None:
    """Join the process group and run what the pipe brings until it closes."""
    os.environ.clear()  # the server's, from another test
    os.environ.update(environment)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "nccl"
    rendezvous = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world}
    dist.init_process_group(backend, timeout=timedelta(seconds=SECONDS), **rendezvous)
    stacks = (folder / f"stacks{rank}").open("w")
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(0.8 * seconds, file=stacks)
        try:
            pipe.send((function(*arguments), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
