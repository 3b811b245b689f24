"""Locks of kernels that are being built: one process builds a kernel, the others wait, know for whom, and not for ever.

A kernel appears in the store complete, by a rename. So a lock only saves work, and a process that has waited long enough builds the
kernel, too. The kernel of the operating system drops the lock of a process that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

SAY_EVERY = 30.0  # seconds of waiting per line that says for whom
WAIT_LIMIT = 600.0  # seconds of waiting for one holder of a lock; a kernel takes some 10 s of a core

_open: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """Lock of a kernel that this process builds: a file beside it that names the holder.

    Args:
        file: number of the open file.
    """

    def __init__(self, file: int):
        self.file: int | None = file
        _open.add(self)

    def name_holder(self, process: int, what: str) -> None:
        """Write down who holds the lock, for those that wait. what: that process, in words."""
        with contextlib.suppress(OSError):  # a full disk: the lock does without
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, f"{process} {platform.node()} {what}".encode(errors="replace"), 0)

    def close(self) -> None:
        """Leave the lock to a process that has inherited the file; without one it is released."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def release(self) -> None:
        if self.file is not None:
            fcntl.flock(self.file, fcntl.LOCK_UN)  # closing alone would leave it to a child forked meanwhile
            self.close()


def _close_inherited() -> None:
    """Close the locks in a forked process, which would hold them for as long as it runs."""
    for lock in list(_open):
        lock.close()


os.register_at_fork(after_in_child=_close_inherited)


def try_lock(path: Path) -> Lock | None:
    """Lock of the kernel with this path, None if another process or thread has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_suffix(".lock")
    lock = Lock(os.open(name, os.O_RDWR | os.O_CREAT, 0o666))
    try:
        fcntl.flock(lock.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock.file), name.stat()):  # else given up by who waited for it
            lock.name_holder(os.getpid(), Path(sys.argv[0]).name or "python")
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        lock.close()
        raise
    lock.close()
    return None


def holder(path: Path) -> str:
    """The process that builds the kernel with this path, in words."""
    try:
        process, host, what = path.with_suffix(".lock").read_text(errors="replace").split(" ", 2)
    except (OSError, ValueError):
        return "another process"
    if host != platform.node():
        return f"process {process} ({what}) on {host}"
    if process == str(os.getpid()):
        return "another thread of this process"
    try:
        state = Path("/proc", process, "stat").read_text(encoding="utf-8").rpartition(") ")[2][:1]
    except OSError:  # perhaps in another container
        return f"process {process} ({what})"
    stopped = f", which is stopped: continue it by `kill -CONT {process}` or end it" if state in "tT" else ""
    return f"process {process} ({what}){stopped}"


@dataclass
class _Wait:
    """Waiting for one holder of a lock."""

    holder: tuple[int, str]
    begin: float
    said: float


class Waits:
    """Waiting of a call for kernels that other processes build. Each holder of a lock is waited for WAIT_LIMIT seconds."""

    def __init__(self):
        self.waits: dict[Path, _Wait] = {}

    def look(self, path: Path, kernel: str) -> str | None:
        """Line to say about a kernel whose lock another process has, mostly None. After WAIT_LIMIT the next try_lock() succeeds."""
        name, now = path.with_suffix(".lock"), time.monotonic()
        try:
            found = name.stat().st_ino, name.read_text(errors="replace")
        except OSError:  # just removed
            return None
        wait = self.waits.get(path)
        if wait is None or wait.holder != found:
            self.waits[path] = _Wait(found, now, now)
            return None
        seconds = now - wait.begin
        if seconds > WAIT_LIMIT:
            del self.waits[path]
            line = f"building {kernel} here, which was not built in {seconds:.0f} s by {holder(path)}"
            with contextlib.suppress(OSError):  # a folder that this process may not write to: it waits on
                name.unlink()
            return line
        if now - wait.said > SAY_EVERY:
            wait.said = now
            return f"waiting for {kernel}, {seconds:.0f} s so far: it is built by {holder(path)}"
        return None
