"""Libraries by the text of their kernels: a kernel whose sources changed, but not its text, is not compiled again.

The store names a library by a hash of the sources of all kernels, as a call cannot wait until a kernel is traced. Most changes of the
sources leave most texts as they are. So a builder, which traces a kernel anyway, looks in the store for a library of the same text.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tl_attention.compilation import toolkit
from tl_attention.problem.target import TARGET

FOLDER = "texts"  # in that of the store: a file per text, which has the name of a library
CODE = "compiler", "headers", "layouts", "texts"  # modules here that make a library of a text


def key(text: str, options: Mapping[str, object]) -> str:
    """Hash of a kernel's text, of the options of the compiler passes, and of the compilers.

    Raises:
        FileNotFoundError: there is no nvcc.
    """
    if not (found := toolkit.find_nvcc()):
        raise FileNotFoundError(toolkit.NO_NVCC)
    nvcc = subprocess.run([found[0], "--version"], capture_output=True, text=True).stdout
    versions = [importlib.metadata.version(name) for name in ("tilelang", "apache-tvm-ffi")]
    facts = text, sorted(options.items()), sorted(TARGET.items()), versions, platform.machine(), nvcc
    digest = hashlib.sha256(repr(facts).encode())
    for name in CODE:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:24]


def reuse(key: str, library: Path) -> bool:
    """Put a library of the same text, with its CUDA source, in the place of `library`; False if there is none."""
    try:
        found = library.with_name((library.parent / FOLDER / key).read_text(encoding="utf-8"))
        for suffix in (".cu", library.suffix):  # the library last: who finds it finds its source, too
            _link(found.with_suffix(suffix), library.with_suffix(suffix))
    except FileNotFoundError:
        return False
    return True


def keep(key: str, library: Path) -> None:
    """Note that a library has this text."""
    note = library.parent / FOLDER / key
    note.parent.mkdir(exist_ok=True)
    begun = note.with_suffix(f".{os.getpid()}")
    begun.write_text(library.name, encoding="utf-8")
    os.replace(begun, note)


def _link(found: Path, place: Path) -> None:
    """A second name of a file, or a copy where the file system has no links."""
    if found == place:
        found.stat()
        return
    begun = place.with_suffix(f"{place.suffix}.{os.getpid()}")
    try:
        os.link(found, begun)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(found, begun)
    os.replace(begun, place)
