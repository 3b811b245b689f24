"""Building a pack of compiled kernels: a wheel of the distribution tl-attention-kernels, which pack.py reads.

A compiled library holds host code of TVM and, serialized, the cubin with the types of its arguments. A record of the pack has both
parts, each with zeros in the place of what a launch does not read: in the cubin lines of source and the text of PTX, where the
compiler left them (three quarters of it), in the host code the cubin. Records are compressed in groups of similar kernels, which
takes two thirds of the bytes of single ones, while a first call unpacks little that it does not need.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import lzma
import os
import platform
import re
import struct
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tl_attention.compilation import building, manifest, pack, store, toolkit
from tl_attention.compilation.compiler import KernelKey, template
from tl_attention.problem.arguments import at_least, folder, has_words
from tl_attention.version import __version__

MAX_BYTES = 95_000_000  # of compressed kernels per wheel: PyPI takes files of 100 MB
GROUP = 12  # kernels: 10.1 KB each, a forward's loaded in 24 ms; 8: 11.1 KB, 23 ms; 16: 10.0 KB, 38 ms (101 kernels of six places)
SAY_EVERY = 12  # groups, which take a core some 10 s to compress
LAUNCHER_SOURCE = Path(__file__).parents[1] / "native" / "launcher.cc"

# The symbol by which TVM's host code finds functions, and the one of native/launcher.cc, of the same length
LOOKUP, OUR_LOOKUP = b"TVMBackendGetFuncFromEnv", b"tl_attention_pack_lookup"

# Sections of a cubin for tools alone
DEBUG_SECTIONS = ("debug_line", "debug_str", "nv_debug_line_sass", "nv_debug_ptx_txt")
SECTION = struct.Struct("<IIQQQQIIQQ")  # header of a section: name, type, .., offset, size, ..
INFO = struct.Struct("<BBH")  # entry of .nv.info: format, attribute, number or size of what follows
SIZED, FRAME_SIZE = 4, 0x11  # a format; an attribute: (index of a symbol, bytes of local memory per thread)

# (code, bits) of a parameter's DLDataType -> its letter, see Kernel in native/launcher.cc. 30: a value that the host holds
PARAMETERS = {
    (3, 64): "p",
    (30, 64): "g",
    (0, 32): "i",
    (1, 32): "u",
    (0, 64): "l",
    (2, 32): "f",
    (2, 64): "d",
}
# Tag of a number in a launch -> its letter
LAUNCH_TAGS = {
    **{f"blockIdx.{axis}": axis for axis in "xyz"},
    **{f"threadIdx.{axis}": axis.upper() for axis in "xyz"},
    "tirx.use_dyn_shared_memory": "s",
}
EARLY_TAG = "tirx.use_programtic_dependent_launch"  # has no number


class PackError(Exception):
    """A pack that cannot be built; the text says why and what to do."""


@dataclass(frozen=True)
class Record:
    """A kernel as a pack holds it."""

    symbol: str  # of the kernel in the cubin
    parameters: str  # a letter each, see native/launcher.cc
    launch: str
    early: bool
    host: bytes
    cubin: bytes

    def content(self) -> bytes:
        """Bytes that pack.PackedKernel.read takes apart."""
        facts = {name: getattr(self, name) for name in ("symbol", "parameters", "launch", "early")}
        facts |= {"host_bytes": len(self.host), "cubin_bytes": len(self.cubin)}
        return b"\n".join([json.dumps(facts).encode(), self.host + self.cubin])


class _Reader:
    """Reader of TVM's serialized modules: numbers of 64 bits, and lists with their length before them."""

    def __init__(self, data: bytes, place: int):
        self.data, self.place = data, place

    def number(self) -> int:
        self.place += 8
        return struct.unpack_from("<Q", self.data, self.place - 8)[0]

    def take(self, size: int) -> bytes:
        self.place += size
        return self.data[self.place - size : self.place]

    def text(self) -> str:
        return self.take(self.number()).decode()


def sections(elf: bytes) -> dict[str, tuple[int, int, int]]:
    """Name -> (place of the header, offset, size) of each section of a 64-bit ELF file."""
    if elf[:5] != b"\x7fELF\x02":
        raise PackError(f"a compiled kernel: expected a shared library, got {elf[:5]!r}")
    (table,), (count, names) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HH", elf, 60)
    headers = [
        (table + i * SECTION.size, SECTION.unpack_from(elf, table + i * SECTION.size)) for i in range(count)
    ]
    strings = headers[names][1][4]
    return {_string(elf, strings + header[0]): (place, header[4], header[5]) for place, header in headers}


def _string(data: bytes, place: int) -> str:
    return data[place : data.index(b"\0", place)].decode()


def _symbol_address(elf: bytes, name: str) -> int:
    """Address of a dynamic symbol, which in the sections before the writable ones is its offset in the file."""
    (_, symbols, size), (_, strings, _) = (sections(elf)[table] for table in (".dynsym", ".dynstr"))
    for place in range(symbols, symbols + size, 24):
        start, address = struct.unpack_from("<I4xQ", elf, place)
        if _string(elf, strings + start) == name:
            return address
    raise PackError(
        f"a compiled kernel has no symbol {name}; expected a library of TileLang {toolkit.TILELANG}"
    )


def record_of(library: bytes) -> Record:
    """The record of a compiled kernel's library."""
    start = _symbol_address(library, "__tvm_ffi__library_bin")
    reader = _Reader(library, start)
    end = reader.number() + reader.place
    tree = [[reader.number() for _ in range(reader.number())] for _ in range(2)]
    kinds = reader.text(), reader.text()
    reader.number()  # bytes of the module
    file_format, functions, _ = reader.text(), reader.number(), reader.text()
    symbol = reader.text()
    types = [struct.unpack("<BBH", reader.take(4)) for _ in range(reader.number())]
    tags = [reader.text() for _ in range(reader.number())]
    reader.take(4 * reader.number())  # more tags of arguments
    cubin = reader.take(reader.number())
    found = (tree, kinds, file_format, functions, reader.place)
    if found != ([[0, 1, 1], [1]], ("_lib", "cuda"), "cubin", 1, end):
        raise PackError(f"a compiled kernel: expected a library with one kernel as a cubin, got {found}")
    if library.count(LOOKUP + b"\0") < 1:
        raise PackError(f"a compiled kernel: expected host code that calls {LOOKUP.decode()}")
    host = library[:start] + bytes(end - start) + library[end:]
    host = host.replace(LOOKUP + b"\0", OUR_LOOKUP + b"\0")
    try:
        parameters = "".join(PARAMETERS[code, bits] for code, bits, _ in types)
        launch = "".join(LAUNCH_TAGS[tag] for tag in tags if tag != EARLY_TAG)
    except KeyError as error:
        raise PackError(
            f"{symbol}: the launcher of packs knows no argument or launch of kind {error}"
        ) from None
    return Record(symbol, parameters, launch, EARLY_TAG in tags, host, without_debug(cubin))


def _read_record(path: Path) -> Record:
    try:
        return record_of(path.read_bytes())
    except (PackError, OSError, ValueError, LookupError, struct.error) as error:
        raise PackError(f"{path}: {error}; delete the file, and it is built anew") from None


def without_debug(cubin: bytes) -> bytes:
    """A cubin whose sections for debuggers are empty and of no type. Everything else keeps its place and its bits."""
    slim = bytearray(cubin)
    for name, (header, offset, size) in sections(cubin).items():
        if name.removeprefix(".rela").lstrip(".") in DEBUG_SECTIONS:
            slim[offset : offset + size] = bytes(size)
            name_offset, _, *rest = SECTION.unpack_from(cubin, header)
            rest[3] = 0  # size
            SECTION.pack_into(slim, header, name_offset, 0, *rest)
    return bytes(slim)


def local_bytes(cubin: bytes) -> int:
    """Bytes of local memory per thread of the kernel in a cubin, where nvcc spills registers to."""
    _, place, size = sections(cubin)[".nv.info"]
    end, found = place + size, 0
    while place < end:
        entry, attribute, following = INFO.unpack_from(cubin, place)
        place += INFO.size
        if entry == SIZED:
            if attribute == FRAME_SIZE:
                found = max(found, struct.unpack_from("<II", cubin, place)[1])
            place += following
    return found


def spill_line(found: Mapping[KernelKey, int]) -> str | None:
    """A line about kernels with local memory whose spills manifest.KNOWN_FAULTS lacks; None if there are none.

    Args:
        found: local_bytes of each kernel.
    """
    names = {manifest.kernel_name(*kernel): size for kernel, size in found.items() if size}
    new = {
        name: size
        for name, size in names.items()
        if not any(fault.startswith("spill_bytes") for fault in manifest.KNOWN_FAULTS.get(name, ()))
    }
    if not new:
        return None
    listed = "; ".join(f"{name} ({size} bytes per thread)" for name, size in new.items())
    verb = "kernel spills" if len(new) == 1 else "kernels spill"
    return f"{len(new)} {verb} to local memory, which costs time and is no known fault: {listed}"


def build_launcher(target: Path) -> None:
    """Compile native/launcher.cc with the C++ compiler that TileLang needs too."""
    import tvm_ffi
    from tilelang.contrib import cc
    from tilelang.env import CUDA_HOME

    if not (compiler := cc.get_cplus_compiler()):
        raise PackError("there is no C++ compiler; install g++ or set CXX")
    folders = [tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()]
    folders += [str(path) for path in _cuda_headers(Path(CUDA_HOME))]
    command = [
        compiler,
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-fno-exceptions",
        "-fno-rtti",
    ]
    command += [f"-I{folder}" for folder in folders]
    # C alone: no C++ library of this machine's version is needed where the pack is installed
    command += ["-nodefaultlibs", "-Wl,--strip-all", str(LAUNCHER_SOURCE), "-o", str(target), "-lc"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise PackError(
            f"the C++ compiler {compiler} does not run ({error}); install g++ or set CXX"
        ) from None
    if done.returncode:
        raise PackError(f"{compiler} does not compile {LAUNCHER_SOURCE}:\n{done.stderr}")


def _cuda_headers(cuda_home: Path) -> list[Path]:
    """Folders that have cuda.h: of the toolkit, and of the pip packages of CUDA 13."""
    folders = [cuda_home / "include"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        runtime = importlib.metadata.distribution("nvidia-cuda-runtime")
        folders.append(Path(runtime.locate_file("nvidia/cu13/include")))
    return [folder for folder in folders if (folder / "cuda.h").exists()]


def platform_tag(library: bytes) -> str:
    """The platforms on which a library loads: the newest glibc version that it names, at least 2.17."""
    minors = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)]
    return f"manylinux_2_{max([17, *minors])}_{platform.machine()}"


def compiler_versions() -> dict[str, str]:
    """Versions of what makes a kernel, which a pack records."""
    return manifest.compiler_versions() | {"apache-tvm-ffi": importlib.metadata.version("apache-tvm-ffi")}


def build(
    kernels: Sequence[KernelKey],
    out: Path,
    jobs: int | None = None,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Build the wheels of some kernels in the folder `out`. Kernels of the cache are not built anew.

    One wheel has all kernels. If it were larger than MAX_BYTES, it has the index and requires one wheel of kernels per head dim.

    Args:
        say: called with lines of progress, and at the end with that of spill_line.
    Returns:
        The wheel to install first, then those that it requires.
    Raises:
        PackError: kernels could not be built, there is no C++ compiler, or the kernels of a head dim are too large for a wheel.
    """
    alike = sorted(kernels, key=_likeness)
    groups = [
        same_width[i : i + GROUP]
        for same_width in (list(each) for _, each in itertools.groupby(alike, key=_head_dim))
        for i in range(0, len(same_width), GROUP)
    ]
    _build_all(kernels, jobs, say)
    say(f"compressing {len(kernels)} kernels")
    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count()) as threads:
        packed, compressed = [], 0
        for group, one in zip(groups, threads.map(_packed_group, groups), strict=True):
            packed.append(one)
            compressed += len(group)
            if len(packed) % SAY_EVERY == 0:
                say(f"{compressed}/{len(kernels)} kernels compressed")
    split = sum(len(one.content) for one in packed) > MAX_BYTES
    contents: dict[str, bytearray] = {}  # of files of kernels, by name
    places, spills = [], {}
    for group, one in zip(groups, packed, strict=True):
        name = pack.data_name(_head_dim(group[0]) if split else None)
        content = contents.setdefault(name, bytearray())
        places.append((name, len(content), len(one.content)))
        content += one.content
        spills |= dict(zip(group, one.spills, strict=True))
    if too_large := {name: len(content) for name, content in contents.items() if len(content) > MAX_BYTES}:
        raise PackError(
            f"expected at most {MAX_BYTES / 1e6:.0f} MB of kernels per head dim, got {too_large} bytes;"
            " shorten [pack] of configs/grid.toml"
        )
    with tempfile.TemporaryDirectory() as folder:
        build_launcher(launcher := Path(folder, pack.LAUNCHER))
        library = launcher.read_bytes()
    index = {
        "format": pack.FORMAT,
        "version": f"{__version__}+{pack.sources_version()}",
        "compilers": compiler_versions(),
        "groups": places,
        "kernels": {
            pack.key(*kernel): (number, offset, size)
            for number, (group, one) in enumerate(zip(groups, packed, strict=True))
            for kernel, size, offset in zip(
                group, one.sizes, itertools.accumulate(one.sizes, initial=0), strict=False
            )
        },
    }
    files = {
        "__init__.py": b'"""Compiled kernels of tl_attention, which tl_attention.compilation.pack reads."""\n',
        pack.INDEX: json.dumps(index, separators=(",", ":")).encode(),
        pack.LAUNCHER: library,
    }
    platforms = platform_tag(library)
    requires = [f"tl-attention=={__version__}"]
    parts = {}
    for name, content in contents.items():
        if split:
            parts[f"{pack.DISTRIBUTION}-{Path(name).stem.removeprefix('kernels-')}"] = {name: bytes(content)}
        else:
            files[name] = bytes(content)
    requires += [f"{distribution}=={__version__}" for distribution in parts]
    wheels = [_write_wheel(out, pack.DISTRIBUTION, platforms, files, requires)]
    wheels += [_write_wheel(out, distribution, platforms, part, []) for distribution, part in parts.items()]
    if line := spill_line(spills):
        say(line)
    return wheels


def _head_dim(kernel: KernelKey) -> int:
    return kernel[0].head_dim


class _PackedGroup(NamedTuple):
    """A group of kernels as a pack has it."""

    sizes: list[int]  # bytes of the records, before compression
    content: bytes  # the compressed records
    spills: list[int]  # bytes of local memory per kernel


def _packed_group(group: Sequence[KernelKey]) -> _PackedGroup:
    """Read and compress the records of built kernels."""
    records = [_read_record(store.kernel_path(*kernel)) for kernel in group]
    contents = [record.content() for record in records]
    content = lzma.compress(b"".join(contents), preset=9 | lzma.PRESET_EXTREME)
    return _PackedGroup(list(map(len, contents)), content, [local_bytes(record.cubin) for record in records])


def _build_all(kernels: Sequence[KernelKey], jobs: int | None, say: Callable[[str], None]) -> None:
    """Build the kernels that the cache lacks. Raises PackError if some cannot be built."""
    errors = building.build_all(kernels, jobs, say)
    if failed := [str(error) for error in errors.values() if error]:
        raise PackError("\n".join([*failed, f"{len(failed)} of {len(kernels)} kernels could not be built"]))


def _likeness(kernel: KernelKey) -> tuple:
    """Sort key by which similar kernels are neighbors: causal and full, bf16 and fp16 of one config differ least."""
    problem, config = kernel
    widths = problem.head_dim, problem.head_dim_v
    return (
        problem.head_dim,
        template(config),
        widths,
        problem.options,
        str(config),
        problem.causal,
        problem.dtype,
    )


def _write_wheel(
    out: Path, distribution: str, platforms: str, files: Mapping[str, bytes], requires: Sequence[str]
) -> Path:
    """Write a wheel with files of the pack's folder; the same files make the same bytes. Its version is that of the package."""
    name = distribution.replace("-", "_")
    tag = f"py3-none-{platforms}"
    info = f"{name}-{__version__}.dist-info"
    metadata = f"""Metadata-Version: 2.1
Name: {distribution}
Version: {__version__}
Summary: Compiled kernels of tl-attention {__version__} for NVIDIA Hopper
License: Apache-2.0
Requires-Python: >=3.10
{"".join(f"Requires-Dist: {one}{chr(10)}" for one in requires)}Description-Content-Type: text/markdown

{DESCRIPTION}"""
    wheel = f"Wheel-Version: 1.0\nGenerator: tl-attention pack\nRoot-Is-Purelib: false\nTag: {tag}\n"
    contents = {f"{pack.PACKAGE}/{file}": content for file, content in files.items()}
    contents |= {f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": wheel.encode()}
    rows = [f"{file},{_record_hash(content)},{len(content)}\n" for file, content in contents.items()]
    contents[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"]).encode()
    path = out / f"{name}-{__version__}-{tag}.whl"
    part = path.with_suffix(".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in contents.items():
            entry = zipfile.ZipInfo(file, date_time=(1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            packed = file.endswith(".bin")  # compressed already
            archive.writestr(entry, content, zipfile.ZIP_STORED if packed else zipfile.ZIP_DEFLATED)
    part.replace(path)
    return path


# Shown by an index of packages
DESCRIPTION = f"""Compiled kernels of tl-attention {__version__}, FlashAttention for NVIDIA Hopper, which finds and loads them.

Install them with the package: `pip install 'tl-attention[kernels]'`.
"""


def _record_hash(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


HELP = {
    "help": "build a wheel of compiled kernels, with which neither TileLang nor nvcc is needed",
    "description": f"Build the kernels of {pack.DISTRIBUTION} for sm_90a and write its wheel; needs no GPU. A kernel takes some 8"
    " seconds of a core. Kernels are kept in the cache folder, so an interrupted build goes on where it was.",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `tl-attention pack`."""
    command.add_argument(
        "words",
        nargs="*",
        action="extend",
        default=[],
        metavar="WORD",
        help="only kernels with all of these words: bf16 d128 causal",
    )
    command.add_argument(
        "--out",
        type=folder,
        default=Path("dist"),
        metavar="FOLDER",
        help="folder of the wheel; default: %(default)s",
    )
    command.add_argument(
        "--jobs", type=at_least(1), metavar="N", help="kernels built at a time; default: one per CPU"
    )
    command.add_argument("--list", action="store_true", help="print the kernels and build nothing")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The command. Returns its exit status."""
    chosen = choose(manifest.pack_kernels().values(), arguments.words)
    if not chosen:
        words = " ".join(arguments.words)
        print(
            f"tl-attention pack: no kernel has all of the words {words!r}; `tl-attention pack --list` prints the kernels"
        )
        return 2
    if arguments.list:
        print("\n".join(manifest.kernel_name(*kernel) for kernel in chosen))
        return 0
    try:
        toolkit.require_tilelang("tl-attention pack")
        if not toolkit.find_nvcc():
            raise PackError(toolkit.NO_NVCC)
        arguments.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=arguments.out):
            pass  # the folder can be written: known before minutes of building
    except (RuntimeError, PackError) as error:
        print(error if isinstance(error, RuntimeError) else f"tl-attention pack: {error}")
        return 2
    except OSError as error:
        print(
            f"tl-attention pack: --out: expected a folder that can be written, got {arguments.out} ({error})"
        )
        return 2
    begin = time.monotonic()
    try:
        wheels = build(chosen, arguments.out, arguments.jobs, lambda line: print(line, flush=True))
    except PackError as error:
        print(f"tl-attention pack: {error}")
        return 1
    sizes = [f"{wheel}, {wheel.stat().st_size / 1e6:.1f} MB" for wheel in wheels]
    print(f"{'; '.join(sizes)}: {len(chosen)} kernels, {time.monotonic() - begin:.0f} s")
    return 0


def choose(kernels: Iterable[KernelKey], words: Sequence[str]) -> list[KernelKey]:
    """Kernels whose problem and config have all of some words."""
    return [kernel for kernel in kernels if has_words("{} {}".format(*kernel), words)]
