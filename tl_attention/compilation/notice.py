"""What a call that waits for kernels says on stderr: a line at the start and one at the end, and between them, on a terminal, progress."""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from tl_attention.compilation import pack
from tl_attention.compilation.compiler import KernelKey
from tl_attention.problem.switches import switch

if TYPE_CHECKING:
    from rich.progress import Progress

LOG = logging.getLogger(__name__)
HIDES = "TL_ATTENTION_QUIET=1 hides this line"


def is_quiet() -> bool:
    """True if nothing is to be written to stderr."""
    return switch("TL_ATTENTION_QUIET") or sys.stderr is None


def described(kernels: Sequence[KernelKey]) -> str:
    """The number of some kernels and the first of them, in words."""
    problem, config = kernels[0]
    others = f" and {len(kernels) - 1} more" if len(kernels) > 1 else ""
    return f"{_count(len(kernels))} ({problem}, {config}{others})"


class Notice:
    """Lines on stderr about the kernels that a call waits for; TL_ATTENTION_QUIET=1 silences them.

    On a terminal the last line shows how many are built, and the seconds: a bar where rich is installed.
    """

    def __init__(self, kernels: Sequence[KernelKey], where: str):
        self.what, self.where, self.total = described(kernels), where, len(kernels)
        self.begin, self.started, self.built = time.monotonic(), False, 0
        self.quiet = is_quiet()
        self.counts = not self.quiet and sys.stderr.isatty()
        self.shown = 0  # seconds of the count on the last line
        self.bar: Progress | None = None

    def __enter__(self) -> Notice:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report the end of the build, or leave the terminal to the error."""
        if self.bar is not None:
            self.bar.stop()
        if error is None and self.started:
            seconds = time.monotonic() - self.begin
            LOG.debug("built %s in %.1f s", self.what, seconds)
            self._write(f"{self._back()}tl_attention: {_count(self.total)} built in {seconds:.0f} s\n")
        elif self.shown:
            self._write("\n")

    def tick(self, elsewhere: int) -> None:
        """Report the start once, and on a terminal how far the build is.

        Args:
            elsewhere: number of kernels that other processes are building.
        """
        if not self.started:
            self.started = True
            self._start(elsewhere)
        seconds = int(time.monotonic() - self.begin)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.built, refresh=True)
        elif self.counts and seconds > self.shown:
            self.shown = seconds
            self._write(f"\rtl_attention: {self.built} of {_count(self.total)}, {seconds} s")

    def say(self, line: str) -> None:
        """Write a line about a kernel that is waited for."""
        if self.bar is not None:
            self.bar.console.print(f"tl_attention: {line}", markup=False, highlight=False, soft_wrap=True)
        else:
            self._write(f"{self._back()}tl_attention: {line}\n")

    def _start(self, elsewhere: int) -> None:
        LOG.debug("building %s%s", self.what, self.where)
        does = f"building {self.what}, once per machine"
        if elsewhere:
            does = f"waiting for {self.what}, {elsewhere} of them built by another process"
        self._write(
            f"tl_attention: {does}{self.where}; {pack.advice()}; `tl-attention compile` builds kernels ahead, {HIDES}\n"
        )
        if self.counts and importlib.util.find_spec("rich"):
            self.bar = _bar(self.total)

    def _back(self) -> str:
        """Start of a line that replaces the count."""
        return "\r" if self.shown else ""

    def _write(self, text: str) -> None:
        if not self.quiet:
            sys.stderr.write(text)
            sys.stderr.flush()


def _bar(total: int) -> Progress | None:
    """A bar on stderr, without a thread, which would delay the end of the program; None on a terminal that cannot move its cursor."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    if not console.is_interactive:
        return None
    bar = Progress(
        TextColumn("tl_attention: kernels built"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.add_task("", total=total)
    bar.start()
    return bar


def _count(kernels: int) -> str:
    return f"{kernels} kernel" + "s" * (kernels != 1)
