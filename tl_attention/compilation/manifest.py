"""Manifest of kernels: configs/kernels.json has the hash of each shipped kernel's text and what the compiler made of it.

configs/texts.json has the hash alone, of the other kernels of a pack and of the shadow kernels of shadows.py.

The hash covers the kernel as TileLang traces it (TIR) and the options of its compiler passes. TileLang and nvcc are pinned,
so an equal hash means an equal kernel: a change that should not touch a kernel shows an unchanged hash. Names of variables and
values that are bound to one are not in it, the order of operations and all synchronization are: see canonical_text().
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import keyword
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tl_attention.compilation import building, compiler, cubin, toolkit
from tl_attention.compilation.compiler import KernelKey
from tl_attention.compilation.sandbox import Failure, Sandboxes
from tl_attention.config import catalog, configs
from tl_attention.config.kernel_configs import (
    BwdDelta,
    BwdPass,
    BwdSum,
    DecodeConfig,
    FwdCombine,
    FwdConfig,
    JvpConfig,
    KernelConfig,
    TermsConfig,
    TileTable,
)
from tl_attention.config.legality import BARRIER_BYTES, smem_bytes
from tl_attention.config.term_configs import stores_key_terms
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.target import SMEM_LIMIT

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

# Words of TVM's script that are no names of a kernel
SCRIPT_WORDS = {*keyword.kwlist, "I", "T", "main", "metadata", "Module", "range"}

# Kernel name -> bytes per thread that a kernel which ships spills, with nvcc 13.0.88: it is slow, not wrong
KNOWN_SPILLS = {
    # 8 bits of P' in registers, see cuda/rest.cuh: per tile, and in a step up to 3 loads, 7 with dropout, 22 with a softcap.
    # The packed ones of d128 take 0.78 to 0.94 of the time of the order "" (H200, 2026-11-26)
    "bf16 d64 full window dropout, dq+dk+dv 128x128x3x2 reuse": 52,
    "bf16 d64 full window softcap, dq+dk+dv 128x128x3x2 reuse": 164,
    "bf16 d64 full, dq+dk+dv 64x192x4x4 reuse early-sums stream-K one-tile": 16,
    "bf16 d128 causal softcap, dq+dk+dv 64x128x2x2 reuse late-sums": 76,
    "bf16 d128 causal varlen, dq+dk+dv 64x128x2x2 reuse apart dynamic-late": 80,
    "bf16 d128 causal varlen, dq+dk+dv 64x128x2x2 reuse apart dynamic-late rounds-dq": 96,
    "bf16 d128 causal, dq+dk+dv 64x128x2x2 reuse apart ordered": 28,
    "bf16 d128 causal, dq+dk+dv 64x128x2x2 reuse early-sums stream-K one-tile": 16,
    "bf16 d128 full blocks bits, dq+dk+dv 64x128x2x2 reuse apart dynamic-late": 12,
    "bf16 d128 full blocks bits, dq+dk+dv 64x128x2x2 reuse apart stream-K rounds-dq": 12,
    "bf16 d128 full window dropout varlen, dq+dk+dv 64x128x2x2 reuse": 28,
    "bf16 d128 full window dropout, dq+dk+dv 64x128x2x2 reuse": 28,
    "bf16 d128 full window varlen, dq+dk+dv 64x128x2x2 reuse apart dynamic-late": 88,
    "bf16 d128 full window varlen, dq+dk+dv 64x128x2x2 reuse apart dynamic-late rounds-dq": 84,
    "bf16 d128 full window, dq+dk+dv 64x128x2x2 reuse apart stream-K": 8,
    "bf16 d128 full window, dq+dk+dv 64x128x2x2 reuse apart stream-K rounds-dq": 8,
    "bf16 d128 full, dq+dk+dv 64x128x2x2 reuse early-sums stream-K one-tile": 16,
    "bf16 d192-128 causal, dk+dv 64x128x2x1 reuse": 4,
    "bf16 d192-128 full window varlen, dk+dv 64x128x2x1 reuse": 68,
    "fp16 d64 full, dq+dk+dv 128x128x2x2 reuse separate-dS stream-K one-tile": 8,
    "fp16 d128 causal, dq+dk+dv 64x128x2x2 reuse apart stream-K": 16,
    "fp16 d128 causal, dq+dk+dv 64x128x2x2 reuse apart stream-K rounds-dq": 16,
    "fp16 d128 causal, dq+dk+dv 64x128x2x2 reuse early-sums stream-K one-tile": 16,
    "fp16 d128 full, dq+dk+dv 64x128x2x2 reuse early-sums stream-K one-tile": 16,
    # Registers of the producer's warps, and of those that round dq: once per tile
    "bf16 d64 causal varlen, dq+dk+dv 64x128x4x4 apart dynamic-late rounds-dq": 20,
    "bf16 d64 full window varlen, dq+dk+dv 64x128x4x4 apart dynamic-late": 20,
    "bf16 d64 full window varlen, dq+dk+dv 64x128x4x4 apart dynamic-late rounds-dq": 16,
    # One store and one load of a consumer warpgroup: keys in pages take a second producer warp
    "bf16 d128 full window sink varlen, 128x128 dynamic q2 ping-pong hold-max pages 16": 4,
    "bf16 d128 full window alibi sink varlen, 128x128 dynamic q2 ping-pong hold-max pages 16": 4,
    "bf16 d128 full window softcap sink varlen, 128x128 dynamic q2 ping-pong hold-max pages 16": 4,
    # Gradients of three terms with an accumulator per block, and skipped steps; without a mask none
    "fp32-highest d64 causal, dk+dv 64x128x2x2 reuse": 20,
    # With the warps that make terms
    "fp32-high d128 causal, dk+dv 32x128x2x2 terms8": 4,
    # Faster than the default: full 8 to 13 %, causal 2 to 5 % (H200, 2026-11-22). With the steps
    # that it skips the causal one spills, and takes 0.99 of the time (H200, 2026-11-26)
    "fp32-highest d64 full, 128x96 persistent ping-pong hold-max terms8": 12,
    "fp32-highest d64 causal, 128x96 dynamic ping-pong hold-max terms8": 8,
    # Two to five registers; not timed
    "bf16 d128 causal dropout, 128x128 dynamic ping-pong hold-max": 20,
    "bf16 d256 causal, 128x64 stream-K q1.5": 12,
    "fp16 d256 causal, 128x64 stream-K q1.5": 12,
    "fp32-highest d64 causal, 128x96 dynamic": 8,
    "fp32-highest d64 full window softcap alibi sink dropout varlen, 128x64 dynamic q2": 8,
    # 0.86 of the time of 128x80 with the pass, which does not spill (1k, H200, 2026-11-23)
    "fp32-high d128 full, 128x64 persistent ping-pong hold-max terms8": 36,
    # All options at once in fp32; d128 at register usage level 0 8 bytes, in the schedule grid 172, d256 at level 0 196
    "fp32-high d128 full window softcap alibi sink dropout varlen, 128x64 dynamic": 172,
    "fp32-high d256 full window softcap alibi sink dropout varlen, 128x32 grid kv1": 492,
    "fp32-highest d128 full window softcap alibi sink dropout varlen, 128x48 grid kv1": 40,
    # Two registers, with all options but a tree at once; not timed
    "bf16 d128 full window softcap alibi sink, decode 2x128x2x1": 8,
    "fp16 d128 full window softcap alibi sink, decode 2x128x2x1": 8,
    # All options at once: no tile of these widths holds them in registers
    "bf16 d192 full window softcap alibi sink dropout varlen, 128x64 grid": 16,
    "bf16 d256 full window softcap alibi sink dropout varlen, 128x32 grid": 80,
}

# Kernel name -> known faults of a kernel that ships nevertheless
KNOWN_FAULTS: dict[str, tuple[str, ...]] = {
    name: (f"spill_bytes: expected 0, got {size}",) for name, size in KNOWN_SPILLS.items()
}
KNOWN_FAULTS["bf16 d192-128 full window varlen, dk+dv 64x128x2x1 reuse"] += (
    "warnings: expected none, got ['C7512']",
)


def manifest_path() -> Path:
    """The manifest of shipped kernels."""
    return configs.data_dir() / "kernels.json"


def texts_path() -> Path:
    """The hashes of the texts of other kernels."""
    return configs.data_dir() / "texts.json"


def kernel_name(problem: AttnProblem, config: KernelConfig) -> str:
    """Key of a kernel in the manifest: bf16 d128 causal, 128x128x2 dynamic q2"""
    return f"{problem}, {config}"


@functools.cache
def shipped() -> dict[str, KernelKey]:
    """Every kernel that the package ships, by name: those of catalog.shipped_calls()."""
    return _of_calls(catalog.shipped_calls())


@functools.cache
def pack_kernels() -> dict[str, KernelKey]:
    """Every kernel of a whole pack, by name: those of catalog.pack_calls()."""
    return _of_calls(catalog.pack_calls())


def _of_calls(calls: Iterable[catalog.CallKind]) -> dict[str, KernelKey]:
    kernels = {kernel for call in calls for kernel in call.kernels}
    named = {kernel_name(*kernel): kernel for kernel in kernels}
    if len(named) < len(kernels):
        raise RuntimeError("two kernels have the same name")
    return dict(sorted(named.items()))


def traced_kernels() -> dict[str, KernelKey]:
    """Every kernel whose text has a hash, by name: those of a pack, then shadow kernels, named by their kind, too."""
    from tl_attention.compilation import shadows

    of_pack = pack_kernels()
    known = {*of_pack.values()}
    shadow = {
        f"{kind}: {kernel_name(*kernel)}": kernel
        for kind, kernels in shadows.shadow_kernels().items()
        for kernel in kernels
        if kernel not in known
    }
    return of_pack | dict(sorted(shadow.items()))


def text_hash(problem: AttnProblem, config: KernelConfig) -> str:
    """Hash of a kernel's canonical text and pass options; the same in every process. Needs tilelang, no nvcc."""
    program, pass_configs = compiler.trace(problem, config), compiler.pass_configs(problem, config)
    text = f"{canonical_text(program)}\n{sorted(pass_configs.items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def canonical_text(program: Any) -> str:
    """Text of a traced kernel, blind to what a refactoring changes: bound values are inlined, expressions simplified, and names numbered.

    Names of kernel arguments and of shared memory stay, as the launch and the layouts know them.
    """
    from tilelang import transform
    from tvm import IRModule

    inlined = transform.LetInline()(IRModule({"main": program}))
    (function,) = transform.Simplify()(inlined).functions.values()
    text = function.script(show_meta=True)
    arguments = re.search(r"def \w+\(([^\n]*)\):", text)
    kept = SCRIPT_WORDS | set(re.findall(r'(\w+) = T\.handle\("[^"]+", "shared[^"]*"\)', text))
    kept |= set(re.findall(r"(\w+): ", arguments[1])) if arguments else set()
    numbered: dict[str, str] = {}

    def canonical(name: re.Match) -> str:
        return name[0] if name[0] in kept else numbered.setdefault(name[0], f"v{len(numbered)}")

    strings_apart = re.split(r'("(?:[^"\\]|\\.)*")', text)
    return "".join(
        part if part.startswith('"') else re.sub(r"(?<![\w.])[A-Za-z_]\w*", canonical, part)
        for part in strings_apart
    )


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
    """Entry of one kernel: its text hash, and the numbers of its compilation."""
    return {"text": text_hash(problem, config), **numbers(problem, config)}


def numbers(problem: AttnProblem, config: KernelConfig) -> dict[str, Any]:
    """Hashes of a kernel's CUDA source and instructions, and the compiler's report without what is 0 or empty. Compiles the kernel.

    Two CUDA sources of one text differ in names and bound values. nvcc may order their instructions differently, so numbers
    are comparable where the sources are equal.
    """
    report = cubin.report(problem, config)
    values = {name: getattr(report, name) for name in REPORT_FIELDS}
    kept = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v}
    return {"source": report.source_hash, "sass": report.sass_hash, **kept}


def source_hash(problem: AttnProblem, config: KernelConfig) -> str:
    """Hash of a kernel's CUDA source. Needs no nvcc."""
    source, _ = compiler.lower(problem, config)
    return cubin.source_hash(source)


def has_numbers(found: dict[str, Any]) -> bool:
    """True for an entry of a compiled kernel, False for one that holds a text hash only."""
    return "registers" in found


def faults(problem: AttnProblem, config: KernelConfig, found: dict[str, Any]) -> list[str]:
    """Reasons not to ship a kernel, from its entry or its numbers; empty if there are none."""
    if not has_numbers(found):
        return ["numbers: expected those of the compiled kernel, got none; run `tl-attention manifest`"]
    got = {name: found.get(name, 0) for name in REPORT_FIELDS}
    ctas = config.ctas_per_sm if isinstance(config, DecodeConfig) else 1
    rules = [
        ("spill_bytes", "0", got["spill_bytes"] == 0),
        ("warnings", "none", not got["warnings"]),
        ("smem_static", f"at most {BARRIER_BYTES}", got["smem_static"] <= BARRIER_BYTES),
        (
            "smem_bytes",
            f"at most {SMEM_LIMIT} with smem_static",
            got["smem_bytes"] + got["smem_static"] <= SMEM_LIMIT,
        ),
        ("ctas_per_sm", f"at least {ctas}", got["ctas_per_sm"] >= ctas),
    ]
    if not isinstance(config, TileTable):  # its shared memory is small, and has no model
        modelled = smem_bytes(problem, config)
        rules.append(("smem_bytes", str(modelled), got["smem_bytes"] == modelled))
    for name, wanted in _instructions(problem, config).items():
        rules.append((name, "some" if wanted else "none", bool(got[name]) == wanted))
    return [f"{name}: expected {expected}, got {got[name]}" for name, expected, good in rules if not good]


def new_faults(name: str, kernel: KernelKey, found: dict[str, Any]) -> list[str]:
    """Differences between a kernel's faults and KNOWN_FAULTS: those that are new, and known ones that are gone."""
    texts, known = faults(*kernel, found), KNOWN_FAULTS.get(name, ())
    gone = [
        f"KNOWN_FAULTS: expected {text!r}, got no such fault; remove it"
        for text in known
        if text not in texts
    ]
    return [text for text in texts if text not in known] + gone


def _instructions(problem: AttnProblem, config: KernelConfig) -> dict[str, bool]:
    """Fields of cubin.Report that count instructions, and whether a kernel must have some (True) or none (False)."""
    multiplies = cubin.uses_wgmma(config)
    expected = {"hgmma": multiplies}
    if multiplies:
        expected["tma"] = True
    if isinstance(config, FwdConfig | FwdCombine | JvpConfig | TermsConfig | BwdPass | BwdDelta | BwdSum):
        expected["tma"] = multiplies or isinstance(config, BwdDelta | TermsConfig)
        # O of a split leaves from registers, as all results in fp32; delta is one number per row
        split = isinstance(config, FwdConfig) and config.split
        from_registers = split or (problem.is_fp32 and isinstance(config, FwdConfig | BwdPass))
        stores_terms = isinstance(config, BwdPass) and stores_key_terms(problem, config.makes)
        expected["tma_stores"] = stores_terms or not (isinstance(config, BwdDelta) or from_registers)
        adds_dq = isinstance(config, BwdPass) and config.adds_dq and not config.dq_apart  # there TMA adds
        expected["vector_sums"] = adds_dq and not problem.is_fp32
    return expected


ENTRY_LIMIT = 900.0  # seconds per kernel; the slowest takes 30 on one core


@dataclass(frozen=True)
class Manifest:
    """The file's content: compiler versions, and per kernel name what entry() returns."""

    versions: dict[str, str]
    kernels: dict[str, dict[str, Any]]

    @classmethod
    def read(cls) -> Manifest:
        """The committed manifest; an empty one if there is no file."""
        path = manifest_path()
        table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"kernels": {}}
        return cls({name: text for name, text in table.items() if name != "kernels"}, table["kernels"])

    def format(self) -> str:
        """JSON with one kernel per line, sorted, so that a diff shows which kernels changed."""
        head = json.dumps(self.versions)[1:-1]
        rows = ",\n".join(f'  "{name}": {json.dumps(self.kernels[name])}' for name in sorted(self.kernels))
        return f'{{{head},\n "kernels": {{\n{rows}\n}}}}\n'


def all_faults(manifest: Manifest) -> dict[str, list[str]]:
    """Shipped kernels with faults that KNOWN_FAULTS lacks, by name."""
    judged = {
        name: new_faults(name, kernel, manifest.kernels.get(name, {})) for name, kernel in shipped().items()
    }
    return {name: texts for name, texts in judged.items() if texts}


def committed_texts() -> dict[str, str]:
    """Text hash per kernel name in both files."""
    path = texts_path()
    others = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: kernel["text"] for name, kernel in Manifest.read().kernels.items()} | others


def format_texts(texts: dict[str, str]) -> str:
    """JSON with one kernel per line, sorted."""
    rows = ",\n".join(f' "{name}": "{texts[name]}"' for name in sorted(texts))
    return f"{{\n{rows}\n}}\n"


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


def compare(hashes: dict[str, str], old: dict[str, str], names: Iterable[str] = ()) -> Difference:
    """Compare the text hashes of today's kernels, or of a sample, with those of the files.

    Args:
        old: committed_texts().
        names: kernels of today whose text is not compared.
    """
    today = {*hashes, *names}
    return Difference(
        new=tuple(sorted(today - {*old})),
        changed=tuple(name for name in hashes if name in old and hashes[name] != old[name]),
        gone=tuple(name for name in old if name not in today),
        same=tuple(name for name in hashes if hashes[name] == old.get(name)),
    )


def every(kernels: dict[str, KernelKey], step: int, seed: int) -> dict[str, KernelKey]:
    """One kernel in `step`, in the order of names, which has kernels of one kind together. Seeds 0 to step - 1 have different ones."""
    return dict(list(kernels.items())[seed % step :: step])


def check(jobs: int | None = None, step: int = 1) -> Difference:
    """Trace kernels, one in `step`, which are others each day, and compare their hashes with those of the files."""
    kernels = traced_kernels()
    sample = every(kernels, step, datetime.date.today().toordinal())
    return compare(trace_all(sample, jobs), committed_texts(), kernels)


def trace_all(kernels: dict[str, KernelKey], jobs: int | None = None) -> dict[str, str]:
    """Text hash per kernel name, traced by several processes."""
    hashes = dict(_in_processes(text_hash, dict.fromkeys(kernels.values()), jobs))
    return {name: hashes[kernel] for name, kernel in kernels.items()}


def rewrite(jobs: int | None = None, sources: bool = False, say: Callable[[str], None] = print) -> Difference:
    """Trace all kernels, compile shipped ones that changed or have no numbers, write both files, and return what changed.

    All shipped ones are compiled where a compiler version changed.

    Args:
        sources: compile those whose CUDA source changed, too.
    """
    manifest, versions, kernels = Manifest.read(), compiler_versions(), shipped()
    hashes = trace_all(traced_kernels(), jobs)
    difference = compare(hashes, committed_texts())
    stale = list(kernels)
    if versions == manifest.versions:
        stale = [name for name in kernels if not _is_fresh(manifest.kernels.get(name, {}), hashes[name])]
        if sources:
            fresh = {kernels[name]: name for name in kernels if name not in stale}
            for kernel, found in _in_processes(source_hash, fresh, jobs):
                if found != manifest.kernels[fresh[kernel]].get("source"):
                    stale.append(fresh[kernel])
    say(f"{len(stale)} of {len(kernels)} kernels to compile")
    names = {kernels[name]: name for name in stale}
    table = {name: manifest.kernels[name] for name in kernels if name not in stale}
    for number, (kernel, values) in enumerate(_in_processes(entry, names, jobs), 1):
        table[names[kernel]] = values
        say(f"{number}/{len(stale)} {names[kernel]}")
    manifest_path().write_text(Manifest(versions, table).format(), encoding="utf-8")
    texts_path().write_text(
        format_texts({name: text for name, text in hashes.items() if name not in kernels})
    )
    return difference


def _is_fresh(found: dict[str, Any], text: str) -> bool:
    """True for an entry of a compiled kernel with this text."""
    return found.get("text") == text and has_numbers(found)


def _in_processes(
    function: Callable[..., Any], kernels: Iterable[KernelKey], jobs: int | None
) -> Iterator[tuple[KernelKey, Any]]:
    """(kernel, function(problem, config)) of each kernel, as results come. Raises Failure for the first that fails."""
    kernels = list(kernels)
    jobs = min(jobs or os.cpu_count() or 1, len(kernels))
    if jobs <= 1:
        yield from ((kernel, function(*kernel)) for kernel in kernels)
        return
    with Sandboxes(jobs, building.prepare_to_build, fresh=True) as sandboxes:
        for kernel, result in sandboxes.map(function, kernels, ENTRY_LIMIT):
            if isinstance(result, Failure):
                raise result
            yield kernel, result


def sample(kernels: dict[str, KernelKey], seed: int, count: int) -> list[str]:
    """Names of kernels that a test compiles: `count` that change with the seed, and a cheap one per template."""
    names = sorted(kernels)
    step = max(len(names) // count, 1) if count else 1
    rotating = [names[(seed + i * step) % len(names)] for i in range(count)]
    dearest_first = sorted(names, key=lambda name: _cost(*kernels[name]), reverse=True)
    cheapest = {compiler.template(kernels[name][1]): name for name in dearest_first}
    return sorted({*rotating, *cheapest.values()})


def _cost(problem: AttnProblem, config: KernelConfig) -> tuple[int, ...]:
    """Sort key that grows with the time of a compilation: options, then columns, then threads."""
    return len(problem.options), problem.head_dim + problem.head_dim_v, config.threads
