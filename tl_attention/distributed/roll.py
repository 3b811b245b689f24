"""Roll of a process group: a log of each rank's calls in shared memory, with which ranks detect that they make different calls.

A call is a word of 64 bits: its number, its pass, and a digest of the arguments that must be equal on all ranks. Each rank writes the
words of its calls and reads those of the other ranks of the machine: of two ranks that make different calls, the second one notices
before it sends anything. A rank with new arguments waits for the words of all ranks. A rank with known arguments waits only if messages
block the host anyway; else it reads what has been written, in 1 to 2 us.

Ranks on other machines, or without common shared memory, are asked by all_gather_object when arguments are new, and whether they made the
same calls since they were asked before.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import secrets
import tempfile
import time
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tl_attention.distributed.group import Ranks
from tl_attention.problem.switches import switch

# For debugging: all ranks wait for each other at every call
ALWAYS = switch("TL_ATTENTION_CHECK_RANKS")
MAX_AGREED = 4096  # calls whose arguments a rank remembers; after them all ranks forget, at the same call
SHARED_MEMORY = Path("/dev/shm")

SLOTS = 1024  # latest calls of a rank that can be read
NUMBER = (1 << 20) - 1  # bits of a word for the number of the call; the first is 1
REFUSED, BACKWARD = 1 << 62, 1 << 63  # bits of a word; those between are of the digest
DIGEST = REFUSED - 1 & ~NUMBER
TEXT_BYTES = 8 << 10  # of a text: its digest, its length, JSON
TEXTS = 4  # latest new calls whose text can be read, behind the words
PAGE_BYTES = 8 * SLOTS + TEXTS * TEXT_BYTES
SHORT = 100  # characters of a value in a text
MAX_ERROR = 1000  # characters of an error in a text
ALIVE_SECONDS = 0.1  # between checks whether an awaited rank has ended

Sheet = dict[str, tuple[str, str]]  # name of an argument -> its value in short, digest of its value


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _sheet(arguments: dict[str, Hashable]) -> Sheet:
    values = ((name, repr(value)) for name, value in arguments.items())
    return {name: (x if len(x) <= SHORT else f"{x[:SHORT]}...", _digest(x).hex()) for name, x in values}


class _Page:
    """Shared memory of a rank: SLOTS words, then TEXTS texts. Its owner holds a lock on the file until its process ends."""

    def __init__(self, path: Path, token: bytes = b""):
        """Page of another rank, or with a token a new one of this rank. OSError: it cannot be opened or made."""
        self._file = path.open("r+b" if not token else "x+b")
        if token:
            os.posix_fallocate(self._file.fileno(), 0, PAGE_BYTES)  # else a full disk ends the process later
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._bytes = mmap.mmap(self._file.fileno(), PAGE_BYTES)
        self.words = memoryview(self._bytes).cast("Q")[:SLOTS]
        if token:
            self.write(0, token)

    def write(self, number: int, text: bytes) -> None:
        """Write the text of the call with a number."""
        head = hashlib.blake2b(text, digest_size=8).digest() + len(text).to_bytes(8, "little")
        place = 8 * SLOTS + number % TEXTS * TEXT_BYTES
        self._bytes[place : place + 16 + len(text)] = head + text

    def read(self, number: int) -> bytes:
        """The text of a call, or of the call TEXTS before or after it; empty if it is not complete within a second."""
        place = 8 * SLOTS + number % TEXTS * TEXT_BYTES
        for _ in range(1000):
            head = self._bytes[place : place + 16]
            size = min(int.from_bytes(head[8:], "little"), TEXT_BYTES - 16)
            text = self._bytes[place + 16 : place + 16 + size]
            if hashlib.blake2b(text, digest_size=8).digest() == head[:8]:
                return text
            time.sleep(1e-3)
        return b""

    @property
    def has_ended(self) -> bool:
        """True if the process of the owner has ended."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True


def gathered(ranks: Ranks, x: object, device: torch.device | None) -> list[Any]:
    """Objects of all ranks, in order.

    Args:
        device: of this rank's tensors. NCCL sends objects by way of the current GPU, which is the same one on all ranks of a machine
            that have not called torch.cuda.set_device: so it is this one here; without it the one that init_process_group was told.
    """
    group, found = ranks.group, [None] * ranks.world
    if device is None or device.type != "cuda":
        device = group.bound_device_id
    by_cpu = any(of_group.type == "cpu" for of_group in group._device_types)
    with contextlib.nullcontext() if by_cpu or device is None else torch.cuda.device(device):
        dist.all_gather_object(found, x, group)
    return found


def _new_page(token: str) -> tuple[_Page, Path]:
    """Page of this rank and its file, in the first folder that has room for it."""
    for folder in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        path = folder / f"tl_attention-{token}"
        try:
            return _Page(path, token.encode()), path
        except OSError:
            path.unlink(missing_ok=True)
    raise OSError(
        f"no room for {PAGE_BYTES} bytes that the ranks of a machine share, in {SHARED_MEMORY} and {tempfile.gettempdir()}; make some, or"
        " set TMPDIR"
    )


class Known(NamedTuple):
    """A call whose arguments are equal on all ranks of a group. Call enter() before each pass of it."""

    roll: Roll
    digest: int

    @property
    def is_kept(self) -> bool:
        """False if the ranks have forgotten the arguments since; they all forget at the same call."""
        return self.roll.keeps(self.digest)

    def enter(self, backward: bool = False) -> None:
        self.roll.enter(self.digest | BACKWARD if backward else self.digest)


class Roll:
    """The roll of a group. All ranks of the group must create it together."""

    sees_all: bool

    def __init__(self, ranks: Ranks, device: torch.device | None = None):
        """device: of this rank's tensors, if that is known."""
        self._ranks, self._number, self._sheets = ranks, 0, {}
        self._device, self._compared = device, 0  # number of the last call that was compared by messages
        self._own, self._pages = self._open()
        self.sees_all = len(self._pages) == ranks.world - 1
        self._read = dict.fromkeys(self._pages, 0)  # number of the last call that has been compared, by rank
        group = ranks.group
        self._blocks = "nccl" not in dist.get_backend_config(group)  # a message blocks the host
        backends = [group._get_backend(device) for device in group._device_types]
        timeouts = [
            getattr(getattr(x, "options", None), "_timeout", dist.default_pg_timeout) for x in backends
        ]
        self._seconds = min(timeouts).total_seconds()

    def _open(self) -> tuple[_Page, dict[int, _Page]]:
        """Own page, and those of the ranks with whom this one shares memory."""
        token, own, path, fault = secrets.token_hex(16), None, None, ""
        try:
            own, path = _new_page(token)
        except OSError as error:  # of all ranks: the others would wait
            fault = str(error)
        try:
            of_ranks = gathered(self._ranks, (str(path), token, fault), self._device)
            for rank, (_, _, fault) in enumerate(of_ranks):
                if fault:
                    raise OSError(f"group: on rank {rank} {fault}")
            pages = {}
            for rank, (its_path, its_token, _) in enumerate(of_ranks):
                if rank == self._ranks.rank:
                    continue
                try:
                    page = _Page(Path(its_path))
                except OSError:
                    continue
                if page.read(0) == its_token.encode():
                    pages[rank] = page
            gathered(self._ranks, None, self._device)
        finally:
            if path is not None:
                path.unlink(missing_ok=True)  # pages that are open stay
        return own, pages

    def keeps(self, digest: int) -> bool:
        """True if all ranks remember the arguments with this digest."""
        return digest in self._sheets

    def agree(self, check: Callable[[], dict[str, Hashable]], device: torch.device | None = None) -> Known:
        """Run the checks of a call, and compare its arguments with those of the other ranks unless they agreed on the same ones before.

        Args:
            check: returns arguments by name that must be equal on all ranks; raises for wrong ones.
            device: of this rank's tensors; None: that of an earlier call.
        Raises:
            The error of check(), on its rank. ValueError: the ranks disagree, or another rank raised; on all ranks that compare.
            RuntimeError: a rank has ended, or does not make the call within the timeout of the group.
        """
        error, sheet, self._device = None, {}, device or self._device
        earlier = () if self.sees_all else self._earlier()
        try:
            sheet = _sheet(check())
        except Exception as found:
            error = found
        mine = f"{type(error).__name__}: {error}" if error else sheet
        digest = int.from_bytes(_digest(repr(mine)), "little") & DIGEST
        if digest in self._sheets and not ALWAYS:
            self.enter(digest)
            return Known(self, digest)
        words = json.dumps([self._number + 1, mine if sheet else mine[:MAX_ERROR]])
        self._own.write(self._number + 1, words.encode())
        try:
            self.enter(digest if sheet else digest | REFUSED, {digest: sheet}, wait=True)
        except (RuntimeError, ValueError) as found:
            error, mine = error or found, f"{type(found).__name__}: {found}" if sheet else mine
        of_all: list[Any] = []
        # Ranks that know their arguments ask nobody
        if not self.sees_all and (ALWAYS or not self._some_know(self._number)):
            of_all = gathered(self._ranks, (mine, earlier), self._device)
            self._compared = self._number
        if error is not None:
            raise error
        if of_all:
            self._compare({rank: its for rank, (its, _) in enumerate(of_all)})
            self._compare_earlier([its for _, its in of_all])
        if len(self._sheets) >= MAX_AGREED:
            self._sheets.clear()
        self._sheets[digest] = sheet
        return Known(self, digest)

    def enter(self, word: int, sheets: dict[int, Sheet] | None = None, wait: bool = False) -> None:
        """Write the next pass, and compare it with those of the other ranks.

        Args:
            word: digest, and bits.
            sheets: those that are not known yet.
            wait: wait for all ranks; else only if messages block the host.
        """
        self._number = number = self._number + 1
        own = self._own.words
        own[number % SLOTS] = word | number & NUMBER
        if word & REFUSED:  # the others find it
            self._read = dict.fromkeys(self._pages, number)
            return
        wait = wait or self._blocks
        for rank, page in self._pages.items():
            words = page.words
            for one in range(max(self._read[rank] + 1, number - SLOTS + 1), number + 1):
                slot = one % SLOTS
                if (words[slot] ^ own[slot]) & NUMBER:
                    if not wait:
                        break
                    self._wait(rank, page, one)
                if words[slot] != own[slot]:
                    self._disagree(one, sheets or {}, wait)
                self._read[rank] = one

    def _earlier(self) -> tuple[int, str]:
        """Number of the passes since the last comparison by messages, and a digest of the latest of them."""
        first = max(self._compared, self._number - SLOTS) + 1
        words = [self._own.words[number % SLOTS] & ~NUMBER for number in range(first, self._number + 1)]
        return self._number - self._compared, _digest(repr(words)).hex()

    def _compare_earlier(self, earlier: list[tuple[int, str]]) -> None:
        """Raise the error for earlier calls that differ, which ranks on several machines made without a comparison."""
        if len(set(earlier)) > 1:
            raise ValueError(
                f"group: expected all ranks to make the same calls, and to run the backward of all or of none, in the same order, got"
                f" {_by_value({rank: f'{count} with digest {digest}' for rank, (count, digest) in enumerate(earlier)})} before call"
                f" {self._number}, whose results may be wrong; set TL_ATTENTION_CHECK_RANKS=1 to find the first that differs"
            )

    def _some_know(self, number: int) -> bool:
        """True if a rank that shares memory with this one made the call with known arguments."""
        words = (page.words[number % SLOTS] for page in self._pages.values())
        return any(not (word ^ number) & NUMBER and word & DIGEST in self._sheets for word in words)

    def _wait(self, rank: int, page: _Page, number: int) -> None:
        """Wait until a rank makes the call with a number."""
        start = looked = time.monotonic()
        delay, slot = 2e-5, number % SLOTS
        while (page.words[slot] ^ number) & NUMBER:
            time.sleep(delay)
            delay, now = min(1.2 * delay, 1e-3), time.monotonic()
            if now - looked > ALIVE_SECONDS:
                looked = now
                if page.has_ended:
                    raise RuntimeError(f"group: rank {rank} has ended")
            if now - start > self._seconds:
                raise RuntimeError(
                    f"group: rank {rank} did not make the call of rank {self._ranks.rank} within the timeout of the group,"
                    f" {self._seconds:g} s"
                )

    def _disagree(self, number: int, sheets: dict[int, Sheet], wait: bool) -> None:
        """Raise the error for a call that ranks disagree on."""
        slot, self._read = number % SLOTS, dict.fromkeys(self._read, number)
        found = {self._ranks.rank: self._own.words[slot]}
        for rank, page in self._pages.items():
            if wait:
                self._wait(rank, page, number)
            if not (page.words[slot] ^ number) & NUMBER:
                found[rank] = page.words[slot]
        known, of_ranks = self._sheets | sheets, {}
        for rank, word in found.items():
            sheet = known.get(word & DIGEST)
            if sheet is None and rank in self._pages:
                its_number, text = json.loads(self._pages[rank].read(number) or "[0, null]")
                sheet = text if its_number == number else None
            if sheet is not None:
                of_ranks[rank] = sheet
        self._compare(of_ranks)
        passes = {rank: "its backward" if word & BACKWARD else "its forward" for rank, word in found.items()}
        raise ValueError(
            f"group: expected all ranks to make the same calls, and to run the backward of all or of none, in the same order, got"
            f" {_by_value(passes) if len(set(passes.values())) > 1 else 'different ones'} at call {number}"
        )

    def _compare(self, sheets: dict[int, Sheet | str]) -> None:
        """Raise the error for arguments of ranks that differ, or that a rank refused."""
        for rank, other in sheets.items():
            if isinstance(other, str) and rank != self._ranks.rank:
                raise ValueError(f"group: rank {rank} refused its arguments with {other}")
        sheets = {rank: sheet for rank, sheet in sheets.items() if not isinstance(sheet, str)}
        for name in next(iter(sheets.values()), {}):
            values = {rank: tuple(sheet[name]) for rank, sheet in sheets.items()}
            if len(set(values.values())) > 1:
                raise ValueError(
                    f"{name}: expected the same on all ranks of the group, got {_by_value(values)}"
                )


def _by_value(values: dict[int, Hashable]) -> str:
    """Values and the ranks that have them, in words."""
    ranks: dict[Hashable, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value if isinstance(value, str) else value[0]} on {'ranks' if len(who) > 1 else 'rank'} {', '.join(map(str, who[:8]))}"
        f"{', ...' if len(who) > 8 else ''}"
        for value, who in ranks.items()
    )


_rolls: weakref.WeakKeyDictionary[dist.ProcessGroup, Roll] = weakref.WeakKeyDictionary()


def roll_of(ranks: Ranks, device: torch.device | None = None) -> Roll:
    """The roll of a group, made at its first call. device: of this rank's tensors, if that is known."""
    found = _rolls.get(ranks.group)
    if found is None:
        found = _rolls[ranks.group] = Roll(ranks, device)
    return found
