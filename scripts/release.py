"""Make the files of a release in a folder: source archive, wheel, pack of kernels, checksums and notes.

    pip install -e '.[jit]' build twine
    python scripts/release.py --out dist [WORD ..]

Words choose kernels of the pack, as in `tl-attention pack`, to try the command; a release has them all. Kernels are kept in the cache
folder, so an interrupted run goes on where it was. Needs no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tl_attention.version import __version__

ROOT = Path(__file__).parents[1]
CHECKSUMS, NOTES = "SHA256SUMS", "NOTES.md"


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status: that of the first step that fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only kernels with all of these words")
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="FOLDER", help="default: dist")
    parser.add_argument("--jobs", metavar="N", help="kernels built at a time; default: one per CPU")
    arguments = parser.parse_args(argv)
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if others := [path.name for path in out.iterdir() if not belongs(path.name)]:
        parser.error(f"--out: expected an empty folder or one with files of {__version__}, got {others}")
    jobs = ["--jobs", arguments.jobs] if arguments.jobs else []
    steps = {
        "source archive and wheel": ["-m", "build", "--outdir", str(out), str(ROOT)],
        "pack": ["-m", "tl_attention.tools.cli", "pack", *arguments.words, *jobs, "--out", str(out)],
    }
    for name, command in steps.items():
        if status := run(name, command):
            return status
    files = sorted(path for path in out.iterdir() if path.name not in (CHECKSUMS, NOTES))
    if status := run("twine check", ["-m", "twine", "check", "--strict", *map(str, files)]):
        return status
    (out / CHECKSUMS).write_text("".join(f"{digest(path)}  {path.name}\n" for path in files))
    changelog = (ROOT / "CHANGELOG.md").read_text()
    (out / NOTES).write_text(notes(changelog, __version__))
    if f"\n## [{__version__}]" not in changelog:
        print(f"CHANGELOG.md: expected a section [{__version__}], so {NOTES} is a draft, of [Unreleased]")
    for path in files:
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {path}")
    return 0


def belongs(name: str) -> bool:
    """True if a release of this version has a file of this name."""
    return name in (CHECKSUMS, NOTES) or bool(
        re.fullmatch(rf"tl_attention\w*-{re.escape(__version__)}(-.*\.(whl|part)|\.tar\.gz)", name)
    )


def run(name: str, command: Sequence[str]) -> int:
    """Run a step with this Python, and print its time. Returns its exit status."""
    begin = time.monotonic()
    status = subprocess.run([sys.executable, *command]).returncode
    print(
        f"== {name}: {f'failed with status {status}' if status else 'done'}, {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    return status


def notes(changelog: str, version: str) -> str:
    """The section of a version in a changelog; that of unreleased changes if it has none."""
    sections = re.split(r"^## \[(.+?)\].*\n", changelog, flags=re.MULTILINE)
    by_name = dict(zip(sections[1::2], sections[2::2], strict=True))
    return by_name.get(version, by_name.get("Unreleased", "")).strip() + "\n"


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
