"""Pack of compiled kernels, the distribution tl-attention-kernels: finding and loading its kernels, without TileLang or nvcc.

`tl-attention pack` builds it (packing.py). A kernel of the pack serves a problem and config if it was made from the installed sources.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import itertools
import json
import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tl_attention.compilation.compiler import TEMPLATES, template
from tl_attention.config.kernel_configs import KernelConfig
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.switches import switch

DISTRIBUTION = "tl-attention-kernels"
PACKAGE = "tl_attention_kernels"
INDEX, LAUNCHER = "index.json", "launcher.so"  # its files, beside those of data_name
FORMAT = 2  # of these files
KEY_DIGITS = 24  # hexadecimal, of a kernel's key

_alive: list[Any] = []  # keeps alive what loaded kernels point at
_serials = itertools.count()


def data_name(head_dim: int | None = None) -> str:
    """File of a pack's kernels: of all, or, if they take several wheels, of a head dim."""
    return f"kernels-d{head_dim}.bin" if head_dim else "kernels.bin"


@functools.cache
def sources(template: str) -> tuple[Path, ...]:
    """Files that determine the kernels of a template, named by its module, beside problem and config."""
    folder = Path(__file__).parents[1]
    others = {_file(each.module) for each in TEMPLATES.values()} - {_file(template)}
    return tuple(
        sorted(
            [
                *set(folder.glob("kernels/**/*.py")) - others,
                *folder.glob("kernels/cuda/*.cuh"),
                *(
                    folder / f"{name}.py"
                    for name in (
                        "problem/attn_problem",
                        "problem/program",
                        "problem/target",
                        "config/kernel_configs",
                        "config/term_configs",
                        "config/query_tiles",
                        "config/register_levels",
                        "config/round_configs",
                    )
                ),
            ]
        )
    )


def _file(module: str) -> Path:
    """File of a module of kernels/."""
    return Path(__file__).parents[1].joinpath("kernels", *module.split(".")).with_suffix(".py")


@functools.cache
def _sources_digest(template: str) -> str:
    digest = hashlib.sha256()
    for path in sources(template):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sources_version() -> str:
    """Hash of the sources of all kernels, in a pack's version."""
    text = " ".join(_sources_digest(each.module) for each in TEMPLATES.values())
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def key(problem: AttnProblem, config: KernelConfig) -> str:
    """Name of a kernel in a pack: fwd- and a hash of its sources, problem and config. Compiler versions are not in it."""
    chosen = template(config)
    text = f"{_sources_digest(chosen.module)} {problem!r} {config!r}"
    return f"{chosen.kind}-{hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]}"


@dataclass(frozen=True)
class Pack:
    """An installed pack: its index."""

    folder: Path
    version: str  # 0.1.0+0123456789ab: of the package and of its sources
    compilers: dict[str, str]  # versions of what made the kernels
    groups: list[tuple[str, int, int]]  # file, offset and size in it
    kernels: dict[str, list[int]]  # key -> number of its group; offset and size in the unpacked group

    @classmethod
    def read(cls, folder: Path) -> Pack:
        """The pack in a folder. Raises RuntimeError if its index is damaged or of another format."""
        try:
            index = json.loads((folder / INDEX).read_bytes())
            if index["format"] != FORMAT:
                raise _damaged(folder, f"expected format {FORMAT}, got {index['format']}")
            return cls(folder, *(index[name] for name in ("version", "compilers", "groups", "kernels")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(folder, f"{INDEX}: {type(error).__name__}: {error}") from None

    def find(self, problem: AttnProblem, config: KernelConfig) -> PackedKernel | None:
        """A kernel made from the installed sources; None if the pack has none."""
        name = key(problem, config)
        place = self.kernels.get(name)
        return PackedKernel(self, name, *place) if place else None


@dataclass(frozen=True)
class PackedKernel:
    """The place of a kernel in a pack."""

    pack: Pack
    name: str
    group: int
    offset: int
    size: int

    def read(self) -> tuple[dict[str, Any], bytes, bytes]:
        """Facts of the launch (see packing.Record), host code (a shared library), and cubin of the kernel."""
        file, *place = self.pack.groups[self.group]
        path = self.pack.folder / file
        try:
            record = _unpacked(path, *place)[self.offset : self.offset + self.size]
            head, body = record.split(b"\n", 1)
            facts = json.loads(head)
            if len(body) != facts["host_bytes"] + facts["cubin_bytes"]:
                raise ValueError(f"kernel of {len(body)} bytes")
        except (OSError, lzma.LZMAError, IndexError, ValueError, KeyError) as error:
            what = f"{self.name} in {file}: {type(error).__name__}: {error}"
            raise _damaged(self.pack.folder, what) from None
        return facts, body[: facts["host_bytes"]], body[facts["host_bytes"] :]


@functools.lru_cache(maxsize=4)
def _unpacked(path: Path, offset: int, size: int) -> bytes:
    """A group of kernels. Those of one call are neighbors, so the last groups are kept."""
    with path.open("rb") as file:
        file.seek(offset)
        return lzma.decompress(file.read(size))


def _damaged(folder: Path, what: str) -> RuntimeError:
    return RuntimeError(
        f"tl_attention: the pack of kernels in {folder} is damaged: {what}; reinstall {DISTRIBUTION},"
        " or set TL_ATTENTION_PACK=0 to do without it"
    )


def ignored() -> bool:
    """True if TL_ATTENTION_PACK=0 says not to use a pack."""
    return not switch("TL_ATTENTION_PACK", default=True)


@functools.cache
def installed() -> Pack | None:
    """The pack of this environment; None if there is none or it is ignored. Raises RuntimeError if it is damaged."""
    found = None if ignored() else importlib.util.find_spec(PACKAGE)
    return Pack.read(Path(found.origin).parent) if found and found.origin else None


def load(kernel: PackedKernel) -> Callable[..., None]:
    """The function of a kernel. Its host code and cubin stay loaded until the process ends."""
    facts, host, cubin = kernel.read()
    make_kernel = _launcher(kernel.pack.folder)
    library = _open_library(kernel.name, host)
    texts = [ctypes.c_char_p(facts[name].encode()) for name in ("symbol", "parameters", "launch")]
    held = ctypes.c_char_p(cubin)
    _alive.extend((library, held, *texts))
    main, context = (
        ctypes.addressof(ctypes.c_char.in_dll(library, f"__tvm_ffi_{name}"))
        for name in ("main", "_library_ctx")
    )
    addresses = (ctypes.cast(text, ctypes.c_void_p).value for text in (held, *texts))
    return make_kernel(main, context, *addresses, int(facts["early"]))


@functools.cache
def _launcher(folder: Path) -> Callable[..., Any]:
    """make_kernel of native/launcher.cc, with the driver where there is one."""
    import tvm_ffi

    path = str(folder / LAUNCHER)
    try:
        _alive.append(ctypes.CDLL(path, ctypes.RTLD_GLOBAL))  # its symbols are for the kernels
        module = tvm_ffi.load_module(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise _damaged(folder, str(error)) from None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return module["make_kernel"]  # kernels load without a GPU, and cannot be launched
    dlsym = ctypes.cast(ctypes.CDLL(None).dlsym, ctypes.c_void_p).value
    module["open_driver"](driver._handle, dlsym)
    _alive.append(driver)
    return module["make_kernel"]


def _open_library(name: str, content: bytes) -> ctypes.CDLL:
    """A shared library from memory."""
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as stream:
            stream.write(content)
        # A path of its own, as the dynamic linker knows libraries by path, and descriptors return: /proc/self/fd//././/3
        slashes = "".join("/." if digit == "1" else "/" for digit in f"{next(_serials):b}")
        return ctypes.CDLL(f"/proc/self/fd{slashes}/{file}")
    finally:
        os.close(file)


REMEDY = "build it with `tl-attention pack`, or take that of a release: pip install 'tl-attention[kernels]'"


def advice() -> str:
    """The reason why a pack does not have a kernel, and what to do."""
    if ignored():
        return "TL_ATTENTION_PACK=0 ignores the pack of kernels"
    try:
        found = installed()
    except RuntimeError as error:
        return str(error)
    if found is None:
        return f"no pack of kernels ({DISTRIBUTION}) is installed: {REMEDY}"
    if not found.version.endswith(sources_version()):
        return (
            f"the installed {DISTRIBUTION} {found.version} is of other sources than those of this package ({sources_version()}):"
            f" {REMEDY}"
        )
    return f"{DISTRIBUTION} {found.version} does not have it"
