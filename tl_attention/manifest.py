"""Manifest of the shipped kernels, configs/kernels.json: the hash of each kernel's text and what the compiler made of it.

The hash covers the kernel as TileLang traces it (TIR) and the options of its compiler passes. TileLang and nvcc are pinned,
so an equal hash means an equal kernel: a change that should not touch a kernel shows an unchanged hash.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tl_attention import compiler, configs, cubin, toolkit
from tl_attention.kernel_configs import KernelConfig
from tl_attention.problem import DECODE, DECODE_OPTIONS, DIRECTIONS, AttnProblem

Kernel = tuple[AttnProblem, KernelConfig]

# Fields of cubin.Report that an entry keeps
REPORT_FIELDS = (
    "registers",
    "spill_bytes",
    "smem_bytes",
    "smem_static",
    "ctas_per_sm",
    "hgmma",
    "tma",
    "tma_stores",
    "vector_sums",
    "loops",
    "warnings",
)


def kernel_name(problem: AttnProblem, config: KernelConfig) -> str:
    """Key of a kernel in the manifest: bf16 d128 causal, 128x128x2 dynamic q2"""
    return f"{problem}, {config}"


def shipped() -> dict[str, Kernel]:
    """Every kernel that the package ships, by name.

    These are the kernels of all defaults and tuned rows in both dtypes, of each option line of the grid with all options
    that the line serves in bfloat16, and of decoding without options and with all of them.
    """
    found = [
        *configs.shipped_kernels([*DIRECTIONS, DECODE]),
        *configs.option_kernels(DIRECTIONS[:2]),
        *configs.decode_kernels(options=[name for name in DECODE_OPTIONS if name != "window"]),
    ]
    named = {kernel_name(*kernel): kernel for kernel in found}
    if len(named) < len(set(found)):
        raise RuntimeError("two shipped kernels have the same name")
    return dict(sorted(named.items()))


def text_hash(problem: AttnProblem, config: KernelConfig) -> str:
    """Hash of a kernel's traced text and pass options; the same in every process. Needs tilelang, no nvcc."""
    program, pass_configs = compiler.trace(problem, config), compiler.pass_configs(problem, config)
    text = f"{program.script(show_meta=True)}\n{sorted(pass_configs.items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compiler_versions() -> dict[str, str]:
    """Versions of TileLang and nvcc, which make a kernel of its text."""
    found = toolkit.find_nvcc()
    text = subprocess.run([found[0], "--version"], capture_output=True, text=True).stdout if found else ""
    version = re.search(r"V(\d+\.\d+\.\d+)", text)
    return {
        "tilelang": importlib.metadata.version("tilelang"),
        "nvcc": version[1] if version else "none",
    }


def entry(problem: AttnProblem, config: KernelConfig) -> dict[str, Any]:
    """What the manifest says of one kernel: its text hash, and the compiler's report without the fields that are 0 or empty."""
    report = cubin.report(problem, config)
    values = {name: getattr(report, name) for name in REPORT_FIELDS}
    kept = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v}
    return {"text": text_hash(problem, config), "sass": report.sass_hash, **kept}


@dataclass(frozen=True)
class Manifest:
    """The file's content: compiler versions, and per kernel name what entry() returns."""

    versions: dict[str, str]
    kernels: dict[str, dict[str, Any]]

    @classmethod
    @functools.cache
    def read(cls) -> Manifest:
        """The committed manifest; an empty one if there is no file."""
        path = configs.manifest_path()
        table = json.loads(path.read_text()) if path.exists() else {"kernels": {}}
        return cls({name: text for name, text in table.items() if name != "kernels"}, table["kernels"])

    def format(self) -> str:
        """JSON with one kernel per line, sorted, so that a diff shows which kernels changed."""
        head = json.dumps(self.versions)[1:-1]
        rows = ",\n".join(f'  "{name}": {json.dumps(self.kernels[name])}' for name in sorted(self.kernels))
        return f'{{{head},\n "kernels": {{\n{rows}\n}}}}\n'


@dataclass(frozen=True)
class Difference:
    """Names of kernels by how they differ from the committed manifest."""

    new: tuple[str, ...]
    changed: tuple[str, ...]  # another text
    gone: tuple[str, ...]
    same: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{word}: {name}"
            for word, names in (("new", self.new), ("changed", self.changed), ("gone", self.gone))
            for name in names
        ]
        counts = f"{len(self.changed)} changed, {len(self.new)} new, {len(self.gone)} gone, {len(self.same)} the same"
        return "\n".join([*lines, counts if lines else f"no hash changed: {len(self.same)} the same"])


def compare(hashes: dict[str, str], manifest: Manifest) -> Difference:
    """Compare the text hashes of today's kernels with the manifest's."""
    old = {name: kernel["text"] for name, kernel in manifest.kernels.items()}
    return Difference(
        new=tuple(name for name in hashes if name not in old),
        changed=tuple(name for name in hashes if name in old and hashes[name] != old[name]),
        gone=tuple(name for name in old if name not in hashes),
        same=tuple(name for name in hashes if hashes[name] == old.get(name)),
    )


def trace_all(kernels: dict[str, Kernel], jobs: int | None = None) -> dict[str, str]:
    """Text hash per kernel name, traced by several processes."""
    return dict(zip(kernels, _in_processes(text_hash, kernels.values(), jobs), strict=True))


def rewrite(jobs: int | None = None, say: Callable[[str], None] = print) -> Difference:
    """Compile what changed, write the manifest, and return what changed. All is compiled where a compiler version changed."""
    manifest, versions, kernels = Manifest.read(), compiler_versions(), shipped()
    difference = compare(trace_all(kernels, jobs), manifest)
    stale = [*difference.new, *difference.changed]
    if versions != manifest.versions:
        stale = list(kernels)
    say(f"{len(stale)} of {len(kernels)} kernels to compile")
    made = _in_processes(entry, [kernels[name] for name in stale], jobs)
    table = {name: manifest.kernels[name] for name in kernels if name not in stale}
    for number, (name, values) in enumerate(zip(stale, made, strict=True), 1):
        table[name] = values
        say(f"{number}/{len(stale)} {name}")
    path = configs.manifest_path()
    path.write_text(Manifest(versions, table).format())
    Manifest.read.__func__.cache_clear()
    return difference


def _in_processes(function: Callable[..., Any], kernels: Iterable[Kernel], jobs: int | None) -> Iterable[Any]:
    """function(problem, config) of each kernel, in their order, as results come."""
    kernels = list(kernels)
    jobs = min(jobs or os.cpu_count() or 1, len(kernels))
    if jobs <= 1:
        yield from itertools.starmap(function, kernels)
        return
    context = multiprocessing.get_context("spawn")  # tilelang has threads, which a fork would lose
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(function, *zip(*kernels, strict=True))


def sample(names: Sequence[str], seed: int, count: int) -> list[str]:
    """Names that a test compiles: `count` that change with the seed, and the first of each template."""
    step = max(len(names) // count, 1)
    rotating = [names[(seed + i * step) % len(names)] for i in range(count)]
    first_of_template = {compiler.template(shipped()[name][1]): name for name in reversed(names)}
    return sorted({*rotating, *first_of_template.values()})
