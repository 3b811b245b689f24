"""The benchmark without a Hopper GPU: speeds measured on one, a report on kernels compiled here, and a check of the CPU path."""

from __future__ import annotations

import math
import warnings

import performance
import rows as row_files
import tables
import torch
from rich.console import Console
from rows import unit

from tl_attention.compilation import cubin, toolkit
from tl_attention.config import catalog, configs
from tl_attention.config.kernel_configs import FwdConfig, KernelConfig
from tl_attention.problem.attn_problem import DECODE, DEFAULT_DTYPE, AttnProblem, decode_problem
from tl_attention.problem.target import DEFAULT_GPU
from tl_attention.testing.counts import PEAK_TFLOPS, fwd_ceiling
from tl_attention.testing.inputs import make_dout, make_inputs
from tl_attention.testing.shapes import Shape
from tl_attention.tuning import autotune
from tl_attention.tuning.progress import track
from tl_attention.tuning.results import REPORT_COLUMNS, Kernel, print_reports, report_cells

COLUMNS = 100  # of a line where there is no terminal
CEILING_SEQLEN = 8192
GRAD_ATOL = 2**-6  # of the largest gradient: the bfloat16 of P and dS
CPU_SHAPES = (
    "2,4,2,100,100,64,causal",
    "1,2,2,33,130,128,causal",
    "1,2,1,77,50,96,64,full",
    "1,1,1,9,5,192,128,causal",  # rows without a key
)
# The kernels that are compiled unless all are: (pass, head dim, causal), with the config of 4k keys on an H200
EXAMPLES = (("fwd", 128, True), ("fwd", 64, False), ("bwd", 128, True), (DECODE, 128, False))
EXPECTED = {  # pass -> shapes whose stored speeds are shown
    "fwd": ("paper-d64-causal-8k", "paper-d128-causal-8k", "paper-d128-full-8k", "paper-d256-full-8k"),
    "bwd": ("paper-d64-causal-8k", "paper-d128-causal-8k", "paper-d128-full-8k"),
    DECODE: ("decode-q1-h64-b32-8k", "decode-q1-h64-b1-128k"),
}


def run(console: Console, all_kernels: bool, facts: dict) -> int:
    """Report and check. all_kernels: compile every shipped one; facts: of the environment. Returns 1 if the CPU path is wrong, else 0."""
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    console.print(
        f"The benchmark without a Hopper GPU (found: {found}): nothing is timed here.\n"
        "It prints the speeds that were measured on a Hopper, a report of kernels compiled for sm_90a with their upper bounds of "
        "speed, and a check of the CPU path.\n"
    )
    tables.show_environment(console, facts)
    show_expected(console)
    try:
        report_kernels(console, all_kernels)
    except KeyboardInterrupt:
        console.print("Interrupted: the other kernels are left out.\n")
    return check_cpu(console)


def show_expected(console: Console) -> None:
    """Print stored speeds of each GPU with results, and their source."""
    for folder in sorted(performance.RESULTS.iterdir()):
        for direction, names in EXPECTED.items():
            path = folder / row_files.file_name(direction)
            if not path.exists():
                continue
            rows, header = row_files.read(path)
            source = f"{path.relative_to(performance.ROOT)}, commit {header['commit']}"
            title = f"{tables.TITLES[direction]} on {header['gpu']}, {unit(rows[0])}"
            console.print(f"Measured: {title} ({source})", markup=False, highlight=False)
            for group in row_files.by_problem(rows).values():
                problem = list(group.values())
                if problem[0]["shape"] in names:
                    console.print(f"  {tables.line(problem)}", highlight=False)
    page = performance.PAGE.relative_to(performance.ROOT)
    console.print(f"All of it, and how it was measured: {page}\n", highlight=False)


def example_kernels() -> list[Kernel]:
    """The main kernels of EXAMPLES."""
    found: list[Kernel] = []
    for direction, head_dim, causal in EXAMPLES:
        if direction == DECODE:
            problem = decode_problem(DEFAULT_DTYPE, head_dim, head_dim, ())
            kernels = configs.decode_config(problem, 1).kernels(problem)
        else:
            problem = AttnProblem(DEFAULT_DTYPE, head_dim, head_dim, causal)
            kernels = configs.pick_config(problem, "4k", DEFAULT_GPU, direction)[0].kernels(problem)
        found += (kernel for kernel in kernels if cubin.uses_wgmma(kernel[1]))
    return found


def report_kernels(console: Console, all_kernels: bool) -> None:
    """Compile kernels on all cores and print a line per kernel."""
    if not (nvcc := toolkit.find_nvcc()):
        console.print(f"No kernel is compiled: {toolkit.NO_NVCC}\n", markup=False)
        return
    shipped = list(dict.fromkeys([*catalog.shipped_kernels(), *catalog.decode_kernels()]))
    pairs = shipped if all_kernels else example_kernels()
    if not all_kernels:
        console.print(f"{len(pairs)} of {len(shipped)} kernels; --all-kernels compiles the others, too")

    ceilings = ("exp after MMA", "exp under MMA")
    results = {}
    try:
        for problem, config, result in track(autotune.compile_all(pairs), len(pairs), "compiling", console):
            results[problem, config] = result
    finally:
        console.print(f"Kernels by {nvcc[0]} for sm_90a, and their ceilings in TFLOPS at S={CEILING_SEQLEN}:")
        columns = "problem", "config", *REPORT_COLUMNS, *ceilings, "result"
        print_reports(
            console, columns, [kernel_line(*pair, results[pair]) for pair in pairs if pair in results]
        )
        console.print(
            f"Ceilings of a forward: {PEAK_TFLOPS} TFLOPS of an H200 at its boost clock, less what the mask wastes of the "
            "tiles, with the exponentials of the softmax after the matrix products or under them.\n"
        )


def kernel_line(
    problem: AttnProblem, config: KernelConfig, result: cubin.Report | autotune.Failure
) -> tuple[str, ...]:
    """The compiler's report of one kernel, or its error."""
    length = CEILING_SEQLEN
    shape = Shape(1, 1, 1, length, length, problem.head_dim, problem.head_dim_v, problem.causal)
    ceilings = ["–", "–"]
    if isinstance(config, FwdConfig):
        ceilings = [f"{tflops:.0f}" for tflops in fwd_ceiling(shape, config.block_M, config.block_N)]
    report = None if isinstance(result, autotune.Failure) else result
    result_text = report.fault or "ok" if report else str(result).strip().splitlines()[-1]
    return (str(problem), str(config), *report_cells(report), *ceilings, result_text)


def check_cpu(console: Console) -> int:
    """Compare mha_fwd_interface and mha_bwd_interface on CPU tensors to PyTorch in float64. Returns 1 if wrong."""
    from tl_attention import mha_bwd_interface, mha_fwd_interface

    wrong = 0
    for text in CPU_SHAPES:
        shape = Shape.parse(text)
        q, k, v = (x.transpose(1, 2) for x in make_inputs(shape, torch.bfloat16, device="cpu"))
        dout = make_dout(shape, torch.bfloat16, device="cpu").transpose(1, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the CPU is slow
            out, lse = mha_fwd_interface(q, k, v, is_causal=shape.causal)
        grads = mha_bwd_interface(dout, q, k, v, out, lse, is_causal=shape.causal)
        ref, ref_lse, ref_grads = sdpa_float64(dout, q, k, v, shape)
        same = torch.allclose(out.double(), ref, rtol=2**-6, atol=1e-4)
        same &= torch.allclose(lse.double(), ref_lse, rtol=1e-4, atol=1e-4)
        pairs = zip(grads, ref_grads, strict=True)
        same &= all(
            torch.allclose(a.double(), b, rtol=2**-5, atol=GRAD_ATOL * float(b.abs().max())) for a, b in pairs
        )
        wrong += not same
        text = "as scaled_dot_product_attention" if same else "WRONG"
        console.print(f"CPU, forward and backward of {shape}: {text}", highlight=False)
    return int(wrong > 0)


def sdpa_float64(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """PyTorch's out, lse in base 2, and (dq, dk, dv); all are [batch, heads, seqlen, head_dim]."""
    inputs = tuple(x.double().requires_grad_() for x in (q, k, v))
    q, k, v = inputs
    k, v = (x.repeat_interleave(shape.heads_q // shape.heads_kv, 1) for x in (k, v))
    seen = torch.ones(shape.seqlen_q, shape.seqlen_k, dtype=torch.bool)
    if shape.causal:
        seen = seen.tril(shape.seqlen_k - shape.seqlen_q)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    out = out.masked_fill(~seen.any(1, keepdim=True), 0)  # SDPA may return NaN for a row without a key
    scores = (q @ k.mT * shape.head_dim**-0.5).masked_fill(~seen, -torch.inf)
    grads = torch.autograd.grad(out, inputs, dout.double())
    return out.detach(), scores.detach().logsumexp(-1) / math.log(2), grads
