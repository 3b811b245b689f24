"""Rows of scores and masks as functions: flex_attention beside PyTorch's, our option for the same, and memory-efficient attention.

The word `function=NAME` of a shape names one of tl_attention/testing/functions.py. As a program it compiles PyTorch's kernels of a
shape, for later runs:

    python benchmarks/flex.py 2,16,16,8192,8192,128,128,full,function=causal
"""

from __future__ import annotations

import functools
import itertools
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import ahead
import fp32
import fwd_bwd
import options
import rows as row_files
import tables
import torch
import torch.nn.functional as F
import turns
from libraries.flex import RECOMPILE_LIMIT
from library import Attend, Inputs, Provider, Ready, Result, Unsupported, import_function, prepare
from rich.console import Console
from rows import OPTION, OURS, Row
from torch.nn.attention import SDPBackend, sdpa_kernel

from tl_attention import flash_attn_func, flash_attn_varlen_func, flex_attention
from tl_attention.testing import functions
from tl_attention.testing.environment import version
from tl_attention.testing.shapes import Shape

ALLOWED_ERROR = 2e-2  # rms error / rms value, of results in bf16
CHECKED_QUERIES = 1024  # whose scores the reference holds at once
COMPILERS = 12  # processes that compile PyTorch's kernels at a time


@dataclass(frozen=True)
class Asked(functions.Function):
    """A function with its mask for both libraries."""

    block_mask: Any = None


@functools.lru_cache(maxsize=1)
def function_of(shape: Shape, device: torch.device) -> Asked:
    """The function of a shape, its mask as PyTorch's BlockMask."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    found, lengths, mask = functions.of_shape(shape, device), (shape.seqlen_q, shape.seqlen_k), None
    if found.mask_mod is not None:
        mask = create_block_mask(found.mask_mod, None, None, *lengths, device=device)
    elif found.blocks is not None:
        full = found.blocks.sum(-1).int(), (~found.blocks).int().argsort(dim=-1, stable=True).int()
        mask = BlockMask.from_kv_blocks(*(torch.zeros_like(x) for x in full), *full, seq_lengths=lengths)
    return Asked(**{x.name: getattr(found, x.name) for x in fields(found)}, block_mask=mask)


def ours(shape: Shape, needs: options.Tensors) -> Attend:
    asked = function_of(shape, needs.cu_seqlens[0].device)
    return lambda *qkv: (flex_attention(*qkv, asked.score_mod, asked.block_mask, attn_bias=asked.bias), None)


def option(shape: Shape, needs: options.Tensors) -> Attend:
    """Our option that computes the same; for a score_mod without one, attention without it."""
    device = needs.cu_seqlens[0].device
    asked = function_of(shape, device)
    if asked.option is None:
        raise Unsupported("no option computes the same")
    if not asked.ends:
        return lambda *qkv: (flash_attn_func(*qkv, **asked.option), None)
    starts = range(0, shape.batch * shape.seqlen_q, shape.seqlen_q)
    ends = [0, *(start + end for start in starts for end in asked.ends)]
    longest = max(end - begin for begin, end in itertools.pairwise(ends))
    lengths = (torch.tensor(ends, dtype=torch.int32, device=device),) * 2

    def attend(*qkv: torch.Tensor) -> tuple[torch.Tensor, None]:
        packed = (x.flatten(0, 1) for x in qkv)
        out = flash_attn_varlen_func(*packed, *lengths, longest, longest, **asked.option)
        return out.view_as(qkv[0]), None

    return attend


def torch_flex(shape: Shape, needs: options.Tensors, **kernel_options: str) -> Attend:
    from torch.nn.attention.flex_attention import flex_attention as attend

    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._functorch.config.donated_buffer = False  # a timed backward runs repeatedly on one graph
    asked = function_of(shape, needs.cu_seqlens[0].device)
    score_mod, bias = asked.score_mod, asked.bias
    if bias is not None:
        one = bias.shape[0] == 1

        def score_mod(score: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
            return score + bias[0 if one else b, h, q, k]

    compiled = torch.compile(attend, dynamic=False, fullgraph=True)
    arguments = {
        "score_mod": score_mod,
        "block_mask": asked.block_mask,
        "kernel_options": kernel_options or None,
    }
    return lambda *qkv: (compiled(*qkv, **arguments), None)


def flex_by_fa4(shape: Shape, needs: options.Tensors) -> Attend:
    """PyTorch's flex_attention by the kernels of FlashAttention-4, which torch takes on request alone."""
    import_function("flash_attn.cute", "flash_attn_func")
    if function_of(shape, needs.cu_seqlens[0].device).learned:
        raise Unsupported("no captured tensors that need a gradient")
    return torch_flex(shape, needs, BACKEND="FLASH")


def efficient(shape: Shape, needs: options.Tensors) -> Attend:
    asked = function_of(shape, needs.cu_seqlens[0].device)
    if asked.bias is None:
        raise Unsupported("compared for biases alone")

    def attend(*qkv: torch.Tensor) -> tuple[torch.Tensor, None]:
        mask = asked.bias.expand(shape.batch, -1, -1, -1)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(*qkv, attn_mask=mask), None

    return attend


def _torch(what: str) -> Callable[[str], str]:
    return lambda _: f"torch {torch.__version__}, {what}"


PROVIDERS: dict[str, Provider] = {
    OURS: Provider({"options": ours}, lambda _: f"TileLang {version('tilelang')}", layout="bhsd"),
    OPTION: Provider({"options": option}, lambda _: f"TileLang {version('tilelang')}"),
    "flex": Provider({"options": torch_flex}, _torch("compiled flex_attention"), layout="bhsd"),
    "flex-fa4": Provider({"options": flex_by_fa4}, _torch("flex_attention by flash-attn-4"), layout="bhsd"),
    "efficient": Provider({"options": efficient}, _torch("SDPA, EFFICIENT_ATTENTION"), layout="bhsd"),
}
TITLES = {
    OPTION: "our option",
    "flex": "torch flex",
    "flex-fa4": "torch flex by fa4",
    "efficient": "memory-efficient",
}


def prepare_run(console: Console, shapes: Iterable[Shape], direction: str, names: Sequence[str]) -> None:
    """Build our kernels; compile PyTorch's in other processes, into caches on disk that the rows use."""
    shapes = list(shapes)
    if OURS in names:
        ahead.build_kernels(console, [kernel for shape in shapes for kernel in kernels_of(shape, direction)])
    if "flex" in names:
        with console.status("compiling PyTorch's kernels"), ThreadPoolExecutor(COMPILERS) as pool:
            command = [sys.executable, __file__]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            list(pool.map(lambda shape: subprocess.run([*command, str(shape)], **quiet), shapes))


def kernels_of(shape: Shape, direction: str) -> list:
    """Kernels of our rows that are not those of an option."""
    from tl_attention.config import configs
    from tl_attention.problem.attn_problem import AttnProblem, length_bucket
    from tl_attention.tracing.builtin_options import builtin_options, program_with_bits
    from tl_attention.tracing.by_distance import by_distance
    from tl_attention.tracing.dense_bias import with_bias
    from tl_attention.tracing.trace import trace

    asked = function_of(shape, torch.device("cuda"))
    functions = asked.score_mod, asked.block_mask and asked.block_mask.mask_mod
    call = trace(*(functions if asked.bias is None else with_bias(*functions, asked.bias)), True)
    if asked.block_mask is None and builtin_options(call, shape.seqlen_q, shape.seqlen_k) is not None:
        return []
    tables = by_distance(call.program) if "bwd" in direction else None  # a forward alone takes no table
    program = call.program if tables is None else tables.program
    if asked.block_mask is not None:
        program, *_ = program_with_bits(call, max(shape.seqlen_q, shape.seqlen_k))
    found = []
    for name in ("fwd", "bwd") if "bwd" in direction else ("fwd",):
        its_program = program.forward if name == "fwd" else program
        problem = AttnProblem.of("bfloat16", shape.head_dim, shape.head_dim_v, False, name, (), its_program)
        gpu = torch.cuda.get_device_name()
        found += configs.pick_config(problem, length_bucket(shape.seqlen_k), gpu, name)[0].kernels(problem)
    return found


def provider_facts(name: str) -> Row:
    """The part of a row that follows from its provider."""
    provider = PROVIDERS[name]
    return {
        "title": TITLES.get(name, name),
        "library": provider.library("options"),
        "layout": provider.layout,
    }


def measure(shape: Shape, direction: str, names: Sequence[str], rounds: int) -> list[Row]:
    """One row per provider: checked, timed interleaved with the others that are right, and checked once more."""
    facts = (
        row_files.sizes_of(shape) | dict.fromkeys(row_files.MEASURED) | {"status": "failed", "reason": None}
    )
    rows = {name: {"provider": name} | provider_facts(name) | facts for name in names}
    with turns.reason_of_all(rows):
        compare(shape, fwd_bwd.make_copies(shape, torch.bfloat16, direction), direction, rows, rounds)
    return list(rows.values())


def compare(shape: Shape, bshd: Sequence[Inputs], direction: str, rows: dict[str, Row], rounds: int) -> None:
    """Fill in the rows, from copies of the inputs."""
    copies = {"bshd": bshd, "bhsd": [tuple(x.transpose(1, 2).contiguous() for x in copy) for copy in bshd]}
    asked = function_of(shape, bshd[0][0].device)
    exact: dict[str, list[torch.Tensor]] = {}

    def learned(name: str) -> tuple[torch.Tensor, ...]:
        return () if name == OPTION else asked.learned

    def enter(name: str) -> tuple[Ready, Sequence[Inputs]]:
        provider = options.with_passes(name, PROVIDERS[name], learned(name))
        return prepare(provider, shape, direction, copies[rows[name]["layout"]])

    def check(name: str, result: Result, when: str) -> Row:
        tensors = [x for x in result if isinstance(x, torch.Tensor)]
        results = tensors[: len(tensors) - len(learned(name))] if "bwd" in direction else tensors
        if rows[name]["layout"] == "bhsd":
            results = [x.transpose(1, 2) for x in results]
        stands_for = OPTION if name == OPTION else OURS
        if stands_for not in exact:
            exact[stands_for] = reference(
                shape, asked, [x[:1, :, :1] for x in bshd[0]], direction, name == OPTION
            )
        finite = all(bool(x.isfinite().all()) for x in tensors)
        chosen = [x[0, :, 0] for x in results]
        return fp32.judged(chosen, exact[stands_for], when, finite, ALLOWED_ERROR)

    def speeds(name: str, *timings: Any) -> Row:
        measured, seen = turns.speeds(shape, direction, *timings), asked.seen[name == OPTION]
        return measured | {"seen": seen, "tflops": seen * measured["tflops"]}

    turns.compete(rows, rounds, enter, check, speeds, same_bits=False)


def reference(
    shape: Shape, asked: Asked, inputs: Inputs, direction: str, as_option: bool
) -> list[torch.Tensor]:
    """Results of the first head of the first batch entry in fp32, [seqlen, head_dim]: out; or dq, dk and dv; or all.

    Args:
        as_option: compute what the option of the row computes.
    """
    *dout, q, k, v = (x[0, :, 0].float() for x in inputs)
    q, k, v = (x.requires_grad_("bwd" in direction) for x in (q, k, v))
    keys, outs = torch.arange(len(k), device=q.device), []
    for part in torch.arange(len(q), device=q.device).split(CHECKED_QUERIES):
        scores = q[part] @ k.T * q.shape[-1] ** -0.5
        place = 0, 0, part[:, None], keys
        if asked.score_mod is not None and not as_option:
            scores = asked.score_mod(scores, *place)
        if asked.bias is not None:
            scores = scores + asked.bias[0, 0, part]
        if asked.block_mask is not None:
            scores = scores.masked_fill(~shown(shape, asked, place, as_option), -torch.inf)
        out = scores.softmax(-1).nan_to_num(0) @ v
        outs.append(out.detach())
        if dout:
            out.backward(dout[0][part], inputs=[q, k, v])
    results = [torch.cat(outs)] if "fwd" in direction else []
    return results + ([q.grad, k.grad, v.grad] if dout else [])


def shown(shape: Shape, asked: Asked, place: tuple, as_option: bool) -> torch.Tensor:
    """Mask of some queries: bool [queries, keys]."""
    _, _, queries, keys = place
    if as_option and asked.option == {"causal": True} and not asked.ends:
        return queries >= keys
    mask = asked.block_mask
    if asked.option is not None:
        return mask.mask_mod(*place)
    numbers, indices = mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0]
    listed = torch.arange(indices.shape[-1], device=keys.device) < numbers[:, None]
    blocks = torch.zeros_like(listed).scatter_(1, indices.long(), listed)
    return blocks[queries // functions.BLOCK, keys // functions.BLOCK]


CONVENTION = (
    "Functions of docs/flex.md, bf16. `our option` is the option of tl_attention that computes the same: causal, a window, packed "
    "sequences; causal for prefix-lm, shared-prompt and tree, by TFLOPS of its own pairs; without a function for score_mods. TFLOPS count "
    "the pairs that a mask shows. Gradients of relative, buckets and the biases are included. Ratios are of median times, that to `our "
    "option` of TFLOPS; behind our speed stands its rms error over the rms value of an fp32 result, in one head."
)


def section(rows: list[Row]) -> str:
    """Markdown of a run: convention, our speed over that of each, all rows."""
    groups = list(row_files.by_problem(rows).values())
    others = [name for name in PROVIDERS if name != OURS and any(name in group for group in groups)]
    means = [
        f"{statistics.geometric_mean(found):.2f}x {TITLES[name]} ({min(found):.2f}–{max(found):.2f}, {len(found)} rows)"
        for name in others
        if (found := [ratio for group in groups if (ratio := ratio_over(group, name))])
    ]
    lines = []
    for group in groups:
        row, fastest = group.get(OURS), row_files.best(group)
        error = f" ({row['rms_error']:.0e})" if row and row["status"] == "ok" else ""
        own = [tables.cell(row, fastest, ("", "")) + error, _text(row and row.get("ms"), ".3f")]
        speeds = [tables.cell(group.get(name), fastest, ("", "")) for name in others]
        ratios = [_text(ratio_over(group, name), ".2f") for name in others]
        lines.append([row_files.describe(next(iter(group.values()))), *own, *speeds, *ratios])
    names = [TITLES[name] for name in others]
    header = ["problem", OURS, "ms", *names, *(f"over {name}" for name in names)]
    parts = [
        f"TFLOPS. {tables.definition(rows[0]['pass'])} {CONVENTION}",
        f"Our speed over that of each, geometric mean (range): {', '.join(means)}." if means else "",
        tables.markdown_table(header, lines),
        tables.bullets(tables.notes(rows)),
    ]
    return "\n\n".join(part for part in parts if part)


def ratio_over(group: dict[str, Row], name: str) -> float | None:
    """Our speed over another library's on a problem; None if one of them has no speed."""
    pair = [group.get(each) for each in (OURS, name)]
    return pair[0]["tflops"] / pair[1]["tflops"] if all(x and x["status"] == "ok" for x in pair) else None


def _text(x: float | None, form: str) -> str:
    return "–" if x is None else format(x, form)


def compile_torch(shape: Shape) -> None:
    """Run PyTorch's forward and backward of a shape once."""
    inputs = fwd_bwd.make_copies(shape, torch.bfloat16, "bwd")[0]
    dout, *qkv = (x.transpose(1, 2).contiguous() for x in inputs)
    needs = options.tensors(shape, torch.bfloat16, dout.device)
    attend = torch_flex(shape, needs)
    with torch.no_grad():
        attend(*qkv)
    asked = function_of(shape, dout.device)
    out, _ = attend(*(x.requires_grad_() for x in qkv))
    torch.autograd.grad(out, [*qkv, *asked.learned], dout)


if __name__ == "__main__":
    for text in sys.argv[1:]:
        compile_torch(Shape.parse(text))
