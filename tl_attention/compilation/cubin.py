"""Reports on compiled kernels: registers, spills, shared memory, tensor instructions. Needs no GPU."""

from __future__ import annotations

import collections
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tl_attention.compilation import compiler, store, toolkit
from tl_attention.config.kernel_configs import BwdPass, DecodeConfig, FwdConfig, JvpConfig, KernelConfig
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.target import REGISTERS, SMEM_LIMIT, SMEM_PER_SM

# Warnings of ptxas that mark a slow kernel. C7507: setmaxnreg is ignored; the others: each wgmma is followed by a wait
WARNINGS = ("C7507", "C7510", "C7512", "C7514", "C7517")
THREADS_PER_SM = 2048
FAST_MATH = {
    "tl.enable_fast_math": True
}  # options of the compiler passes that matter to nvcc, in most kernels
SMEM_RESERVED = 1024  # bytes per CTA, taken by the hardware


@dataclass(frozen=True)
class Report:
    registers: int  # per thread at launch; warpgroups redistribute them
    spill_bytes: int  # stored per thread
    smem_bytes: int  # dynamic: the tiles
    smem_static: int  # the barriers
    ctas_per_sm: int
    warnings: tuple[str, ...]  # those of WARNINGS in the output of ptxas
    hgmma: int  # wgmma instructions in the code
    tma: int  # TMA loads
    tma_stores: int
    vector_sums: int  # atomic additions of four numbers in global memory
    loops: tuple[int, ...]  # instructions per loop over keys; a warpgroup has a masked and a plain loop
    counted_in: str  # what instructions were counted in: SASS, or without cuobjdump PTX, where loops is empty
    needs_wgmma: bool = True
    sass_hash: str = ""  # hash of the instructions, in hex; empty without cuobjdump
    source_hash: str = ""  # of the CUDA source

    @property
    def fault(self) -> str | None:
        """Reason not to ship the kernel, None if there is none."""
        faults = [f"{self.spill_bytes} bytes of spills"] * (self.spill_bytes > 0) + list(self.warnings)
        if (smem := self.smem_bytes + self.smem_static) > SMEM_LIMIT:
            faults.append(f"{smem} of {SMEM_LIMIT} bytes of shared memory")
        if self.needs_wgmma and not (self.hgmma and self.tma):
            faults.append(f"{self.hgmma} wgmma and {self.tma} TMA load instructions")
        return ", ".join(faults) or None


def uses_wgmma(config: KernelConfig) -> bool:
    """True if the kernel multiplies matrices; the others only read and write memory."""
    return isinstance(config, FwdConfig | JvpConfig | BwdPass | DecodeConfig)


def report(problem: AttnProblem, config: KernelConfig) -> Report:
    """Report on a kernel, lowered and assembled for sm_90a."""
    source, smem = compiler.lower(problem, config)
    options = compiler.pass_configs(problem, config)
    return report_source(source, smem, config.threads, uses_wgmma(config), options)


def report_compiled(problem: AttnProblem, config: KernelConfig) -> Report:
    """Report on a kernel compiled by building.compile_kernel, from its stored source; stored beside it."""
    path = store.kernel_path(problem, config)
    stored = path.with_suffix(".json")
    if (report := _read_report(stored)) is None:
        source, smem = compiler.stored_source(path)
        if smem is None:
            source, smem = compiler.lower(problem, config)
        options = compiler.pass_configs(problem, config)
        report = report_source(source, smem, config.threads, uses_wgmma(config), options)
        stored.write_text(json.dumps(asdict(report)), encoding="utf-8")
    return report


def _read_report(path: Path) -> Report | None:
    """Report in a file; None if there is no file, or if it is cut short or has other fields than Report."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Report(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
    except (FileNotFoundError, ValueError, TypeError):
        return None


def report_source(
    source: str,
    smem: int,
    threads: int,
    needs_wgmma: bool = True,
    options: Mapping[str, object] = FAST_MATH,
) -> Report:
    """Report on CUDA source by TileLang.

    Args:
        smem: bytes of dynamic shared memory at launch.
        options: those of the compiler passes.
    Raises:
        FileNotFoundError: there is no nvcc. compiler.Rejected: nvcc rejects the source.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, cubin = compiler.assemble(source, Path(folder), options, ["-Xptxas=-v", "--keep"])
        sass = _disassemble(cubin)
        code, counted_in = (
            (sass, "SASS") if sass else (cubin.with_suffix(".ptx").read_text(encoding="utf-8"), "PTX")
        )
    registers = _largest(r"Used (\d+) registers", log)
    smem_static = _largest(r"(\d+) bytes smem", log)
    patterns = {
        "SASS": (r"\bHGMMA\b", r"\bUTMALDG\b", r"\bUTMASTG\b", r"\bREDG\.E\.ADD\.F32x4\b"),
        "PTX": (
            r"\bwgmma\.mma_async\b",
            r"\btensor\.\dd\.shared::\w+\.global\b",
            r"\bcp\.async\.bulk\.tensor\.\dd\.global\.shared::cta\b",
            r"\b(?:red|atom)[.\w]*\.v4\.f32\b",
        ),
    }[counted_in]
    hgmma, tma, tma_stores, vector_sums = (len(re.findall(pattern, code)) for pattern in patterns)
    return Report(
        registers=registers,
        spill_bytes=_largest(r"(\d+) bytes spill stores", log),
        smem_bytes=smem,
        smem_static=smem_static,
        ctas_per_sm=ctas_per_sm(registers, smem + smem_static, threads),
        warnings=tuple(warning for warning in WARNINGS if warning in log),
        hgmma=hgmma,
        tma=tma,
        tma_stores=tma_stores,
        vector_sums=vector_sums,
        loops=tuple(loop.total() for loop in main_loops(sass)) if sass else (),
        counted_in=counted_in,
        needs_wgmma=needs_wgmma,
        sass_hash=_instructions_hash(sass) if sass else "",
        source_hash=source_hash(source),
    )


def ctas_per_sm(registers: int, smem: int, threads: int) -> int:
    """Resident CTAs per SM. Registers are allocated to warps in units of 256."""
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // (per_warp * threads // 32)
    return min(by_registers, THREADS_PER_SM // threads, SMEM_PER_SM // (smem + SMEM_RESERVED))


def _disassemble(cubin: Path) -> str | None:
    cuobjdump = toolkit.find_cuobjdump()
    return (
        cuobjdump
        and subprocess.run([cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    )


def _largest(pattern: str, log: str) -> int:
    return max(map(int, re.findall(pattern, log)), default=0)


def source_hash(source: str) -> str:
    """Hash of CUDA source, in hex."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _instructions_hash(sass: str) -> str:
    """Hash of the instructions alone, without the kernel's name."""
    return source_hash("\n".join(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", sass)))


def main_loops(sass: str) -> list[collections.Counter[str]]:
    """Opcode counts of the loops over keys: backward branches around wgmma and exponentials."""
    code = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    index = {address: i for i, (address, _) in enumerate(code)}
    loops = []
    for i, (address, text) in enumerate(code):
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        start = int(jump[1], 16) if jump else address + 1
        if start > address or start not in index:
            continue
        body = collections.Counter(
            re.sub(r"^@!?U?P\w+\s+", "", t).split()[0] for _, t in code[index[start] : i + 1]
        )
        wgmmas = sum(count for opcode, count in body.items() if opcode.startswith("HGMMA"))
        if wgmmas >= 4 and body["MUFU.EX2"] >= 16 and "EXIT" not in body:
            loops.append(body)
    return loops
