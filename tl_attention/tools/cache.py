"""The command `tl-attention cache`: what is on disk, and its limit.

A kernel is a library and files of the same stem. A program that has loaded a library keeps it after its removal, and one that looks for
it later builds it anew. A kernel that is being built is left alone: its lock says so.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tl_attention.compilation import locks, texts
from tl_attention.config import configs
from tl_attention.tools import text

HELP = {
    "help": "show, limit or clear the kernels compiled on this machine",
    "description": "Print the folder of compiled kernels with their number and size. With --limit or --clear remove kernels, but for"
    " those that are being built. Running programs keep what they have loaded; tuned tables stay.",
}
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class StoredKernel:
    """A compiled kernel, or what a build that ended early has left.

    Args:
        files: with the library first, if there is one.
        sizes: bytes by inode. Kernels of one text share their files.
        used: time of its last use that the file system knows, in seconds.
    """

    library: Path
    files: tuple[Path, ...]
    sizes: dict[int, int]
    used: float


def size(word: str) -> int:
    """Bytes of a size with a unit, such as 500M or 2GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])B?", word.upper())
    if not found:
        raise argparse.ArgumentTypeError(f"expected a size with a unit, such as 500M or 2GB, got {word!r}")
    return int(float(found[1]) * UNITS[found[2]])


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments, and the function that serves them."""
    removal = command.add_mutually_exclusive_group()
    removal.add_argument(
        "--limit",
        type=size,
        metavar="SIZE",
        help="remove those used longest ago until the others take SIZE, such as 2GB",
    )
    removal.add_argument("--clear", action="store_true", help="remove all")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Remove what is asked for, and print what is there."""
    folder = configs.cache_dir()
    limit = 0 if arguments.clear else arguments.limit
    before = list(stored(folder))
    removed = [] if limit is None else remove(before, limit)
    kernels = [kernel for kernel in before if kernel not in removed]
    found = {
        "folder": str(folder),
        "kernels": sum(kernel.library.exists() for kernel in kernels),
        "bytes": bytes_of(kernels),
        "removed": len(removed),
        "removed_bytes": bytes_of(before) - bytes_of(kernels),
        "tuned_tables": [str(path) for path in sorted(folder.glob("tuned/*.json"))],
    }
    if arguments.json:
        print(text.as_json(found))
        return 0
    print(f"folder   {folder}")
    print(f"kernels  {found['kernels']}, {found['bytes'] / 1e6:.1f} MB{_span(kernels)}")
    for path in found["tuned_tables"]:
        print(f"tuned    {path}")
    if limit is not None:
        print(f"removed  {len(removed)}, {found['removed_bytes'] / 1e6:.1f} MB")
        if found["bytes"] > limit:
            print(f"kept     {len(kernels)} above the limit, which are being built or may not be removed")
    return 0


def stored(folder: Path) -> Iterator[StoredKernel]:
    """Kernels of a cache folder, those used longest ago first."""
    files: dict[Path, list[Path]] = {}
    for path in folder.glob("*") if folder.is_dir() else ():
        stem = re.match(r"[a-z_0-9]+-[0-9a-f]{24}", path.name)
        if stem:
            files.setdefault(folder / f"{stem[0]}.so", []).append(path)
    found = []
    for library, paths in files.items():
        stats = []
        for path in _inside(paths):
            with contextlib.suppress(FileNotFoundError):  # a build has renamed it
                stats.append(path.stat())
        used = max((max(stat.st_atime, stat.st_mtime) for stat in stats), default=0.0)
        sizes = {stat.st_ino: stat.st_size for stat in stats}
        found.append(
            StoredKernel(library, tuple(sorted(paths, key=lambda path: path != library)), sizes, used)
        )
    yield from sorted(found, key=lambda kernel: kernel.used)


def _inside(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        yield from (x for x in path.rglob("*") if x.is_file()) if path.is_dir() else (path,)


def bytes_of(kernels: Iterable[StoredKernel]) -> int:
    """Bytes of kernels on disk, where a file of several counts once."""
    return sum({inode: size for kernel in kernels for inode, size in kernel.sizes.items()}.values())


def remove(kernels: list[StoredKernel], limit: int) -> list[StoredKernel]:
    """Remove kernels in their order until the others take at most `limit` bytes; those that were removed."""
    total, removed = bytes_of(kernels), []
    sharers = Counter(inode for kernel in kernels for inode in kernel.sizes)
    for kernel in kernels:
        if limit and total <= limit:
            break
        lock = locks.try_lock(kernel.library)
        if lock is None:  # a process is building it
            continue
        try:
            for path in kernel.files:  # the library first: without it no other file is looked for
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            kernel.library.with_suffix(".lock").unlink(missing_ok=True)
        finally:
            lock.release()
        removed.append(kernel)
        for inode, count in kernel.sizes.items():
            sharers[inode] -= 1
            total -= 0 if sharers[inode] else count
    for folder in {kernel.library.parent for kernel in removed}:
        for note in (folder / texts.FOLDER).glob("*"):
            with contextlib.suppress(FileNotFoundError):  # a build has renamed it
                if not (folder / note.read_text(errors="replace")).exists():
                    note.unlink()
    return removed


def _span(kernels: list[StoredKernel]) -> str:
    """When kernels were used, in words."""
    if not kernels:
        return ""
    first, last = (time.strftime("%Y-%m-%d", time.localtime(kernels[i].used)) for i in (0, -1))
    return f", used {last}" if first == last else f", used from {first} to {last}"
