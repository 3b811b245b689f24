"""Rows of attention in fp32: our precisions beside PyTorch's backends, each with its error against fp64."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import fwd_bwd
import options
import rows as row_files
import tables
import torch
import torch.nn.functional as F
import turns
from libraries.flex import RECOMPILE_LIMIT
from library import Attend, Inputs, Provider, Ready, Result, Unsupported, import_function, prepare
from row_kernels import mark
from rows import HIGH, OURS, Row
from torch.nn.attention import SDPBackend, sdpa_kernel

from tl_attention.reference import attention_backward_reference, attention_reference
from tl_attention.testing.environment import version
from tl_attention.testing.shapes import Shape

BASE = "efficient"  # peer that our speeds are compared with
# Largest rms error / rms value of a correct result: products in tf32 keep 11 bits, the others at least 16
ALLOWED = {"flex-tf32": 1e-2}
ALLOWED_ERROR = 1e-4
MATH_KEYS = 4096  # most keys of the math backend, the slowest
CHECKED = 2  # heads that are compared with fp64; the others hold no NaN or inf


def ours(precision: str) -> Callable[[Shape, options.Tensors], Attend]:
    """tl_attention at a precision."""

    def attend_in_fp32(shape: Shape, _: options.Tensors) -> Attend:
        function = import_function("tl_attention", "flash_attn_func")
        return lambda *qkv: (function(*qkv, causal=shape.causal, precision=precision), None)

    return attend_in_fp32


def sdpa(backend: SDPBackend, *, heads_first: bool) -> Callable[[Shape, options.Tensors], Attend]:
    """A backend of scaled_dot_product_attention. heads_first: its tensors are [batch, heads, seqlen, head_dim]."""

    def attend_in_fp32(shape: Shape, _: options.Tensors) -> Attend:
        if backend is SDPBackend.MATH and shape.seqlen_k > MATH_KEYS:
            raise Unsupported(f"left out above {MATH_KEYS} keys, as it takes too long")
        if shape.causal and shape.seqlen_q != shape.seqlen_k:
            raise Unsupported("its causal mask is top-left")

        def attend(*qkv: torch.Tensor) -> tuple[torch.Tensor, None]:
            views = qkv if heads_first else [x.transpose(1, 2) for x in qkv]
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    *views, is_causal=shape.causal, enable_gqa=shape.heads_q != shape.heads_kv
                )
            return out if heads_first else out.transpose(1, 2), None

        return attend

    return attend_in_fp32


def flex(precision: str) -> Callable[[Shape, options.Tensors], Attend]:
    """Compiled FlexAttention. precision: ieee or tf32."""

    def attend_in_fp32(shape: Shape, needs: options.Tensors) -> Attend:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        torch._functorch.config.donated_buffer = False  # a timed backward runs repeatedly on one graph
        mask, offset = None, shape.seqlen_k - shape.seqlen_q
        if shape.causal:
            device = needs.cu_seqlens[0].device
            sizes = (None, None, shape.seqlen_q, shape.seqlen_k)
            mask = create_block_mask(lambda _b, _h, i, j: j <= i + offset, *sizes, device=device)
        attend = functools.partial(
            torch.compile(flex_attention, dynamic=False, fullgraph=True),
            block_mask=mask,
            enable_gqa=shape.heads_q != shape.heads_kv,
            kernel_options={"FLOAT32_PRECISION": f"'{precision}'"},
        )
        return lambda *qkv: (attend(*qkv), None)

    return attend_in_fp32


def _torch(what: str) -> Callable[[str], str]:
    return lambda _: f"torch {torch.__version__}, {what}"


PROVIDERS: dict[str, Provider] = {
    OURS: Provider({"options": ours("highest")}, lambda _: f"TileLang {version('tilelang')}"),
    HIGH: Provider({"options": ours("high")}, lambda _: f"TileLang {version('tilelang')}"),
    "math": Provider(
        {"options": sdpa(SDPBackend.MATH, heads_first=True)}, _torch("SDPA, MATH"), layout="bhsd"
    ),
    BASE: Provider(
        {"options": sdpa(SDPBackend.EFFICIENT_ATTENTION, heads_first=False)},
        _torch("SDPA, EFFICIENT_ATTENTION"),
    ),
    "flex-ieee": Provider({"options": flex("ieee")}, _torch("flex_attention, ieee"), layout="bhsd"),
    "flex-tf32": Provider({"options": flex("tf32")}, _torch("flex_attention, tf32"), layout="bhsd"),
}
TITLES = {OURS: "highest", HIGH: "high"}  # of our columns


def measure(shape: Shape, direction: str, names: Sequence[str], rounds: int) -> list[Row]:
    """One row per provider: checked, timed interleaved with the others that are right, and checked once more."""
    rows = {name: new_row(name, shape) for name in names}
    with turns.reason_of_all(rows):
        compare(shape, fwd_bwd.make_copies(shape, torch.float32, direction), direction, rows, rounds)
    return list(rows.values())


def provider_facts(name: str) -> Row:
    """The part of a row that follows from its provider."""
    provider = PROVIDERS[name]
    title = f"{OURS} {TITLES[name]}" if name in TITLES else name.replace("-", " ")
    return {"title": title, "library": provider.library("options"), "layout": provider.layout}


def new_row(name: str, shape: Shape) -> Row:
    """The row of a provider before it ran."""
    facts = {"provider": name} | provider_facts(name) | row_files.sizes_of(shape)
    return facts | dict.fromkeys(row_files.MEASURED) | {"status": "failed", "reason": None}


def compare(shape: Shape, bshd: Sequence[Inputs], direction: str, rows: dict[str, Row], rounds: int) -> None:
    """Fill in the rows, from copies of the inputs."""
    copies = {"bshd": bshd, "bhsd": [tuple(x.transpose(1, 2).contiguous() for x in copy) for copy in bshd]}
    heads, count = checked_heads(shape, direction)
    exact = reference([fwd_bwd.take_heads(x, heads, count) for x in bshd[0]], shape.causal, direction)

    def enter(name: str) -> tuple[Ready, Sequence[Inputs]]:
        provider = options.with_passes(name, PROVIDERS[name])
        return prepare(provider, shape, direction, copies[rows[name]["layout"]])

    def check(name: str, result: Result, when: str) -> Row:
        tensors = [x for x in result if isinstance(x, torch.Tensor)]
        if rows[name]["layout"] == "bhsd":
            tensors = [x.transpose(1, 2) for x in tensors]
        chosen = [fwd_bwd.take_heads(x, heads, count) for x in tensors]
        finite = all(bool(x.isfinite().all()) for x in tensors)
        return judged(chosen, exact, when, finite, ALLOWED.get(name, ALLOWED_ERROR))

    def speeds(name: str, *timings: Any) -> Row:
        measured = turns.speeds(shape, direction, *timings)
        return {key: value for key, value in measured.items() if key not in ("gbps", "intensity")}

    turns.compete(rows, rounds, enter, check, speeds, same_bits=False, eager=False)


def checked_heads(shape: Shape, direction: str) -> tuple[list[int], int]:
    """The heads to check, counted through the batch entries, and their number per entry: KV heads where there is a backward."""
    count = shape.heads_kv if "bwd" in direction else shape.heads_q
    return turns.spread(CHECKED, shape.batch * count), count


def reference(inputs: Inputs, causal: bool, direction: str) -> list[torch.Tensor]:
    """Results in fp64: out in a forward; dq, dk and dv in a backward; fwd_bwd: all four."""
    *dout, q, k, v = inputs
    every = []
    if "fwd" in direction:
        every.append(attention_reference(q, k, v, causal=causal, dtype=torch.float64)[0])
    if "bwd" in direction:
        every += attention_backward_reference(*dout, q, k, v, causal=causal, dtype=torch.float64)
    return every


def judged(
    found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], when: str, finite: bool, allowed: float
) -> Row:
    """Correctness and the largest rms error / rms value of the results, as a part of a row."""
    error = max(rms_error(x, ref) for x, ref in zip(found, exact, strict=True))
    ratio = error / allowed
    row: Row = {"rms_error": turns.finite(error), "max_err_ratio": turns.finite(ratio)}
    if ratio <= 1 and finite:
        return row | {"correct": True}
    why = f"its rms error is {error:.1e} of the values" if finite else "it has NaN or inf"
    return row | {"correct": False, "status": "wrong", "reason": f"{when}{why}"}


def rms_error(x: torch.Tensor, exact: torch.Tensor) -> float:
    """rms(x - exact) / rms(exact); inf where x has NaN."""
    error = float(((x - exact).square().mean() / exact.square().mean()).sqrt())
    return error if math.isfinite(error) else math.inf


CONVENTION = (
    "q, k, v and all results are fp32. `highest` and `high` are tl_attention; math and efficient are backends of "
    "scaled_dot_product_attention. Behind a speed stands its error: rms error over rms value against fp64, in two heads; in a "
    "backward the largest of dq, dk and dv. Ratios are of median times; a range is that of the rows. A backward "
    "is the work of torch.autograd.grad."
)


def section(rows: list[Row]) -> str:
    """Markdown of a run: convention, our speed over that of each peer, all rows."""
    groups = list(row_files.by_problem(rows).values())
    names = [name for name in PROVIDERS if any(name in group for group in groups)]
    peers = [name for name in names if name not in TITLES]
    titles = {name: TITLES.get(name, name.replace("-", " ")) for name in names}
    means = [
        [titles[name], *(_mean_and_range(_ratios(groups, name, peer)) for peer in peers)]
        for name in names
        if name in TITLES
    ]
    over = [f"{titles[name]} / {BASE}" for name in names if name in TITLES]
    lines = [
        [
            row_files.describe(next(iter(group.values()))) + mark(group.get(OURS)),
            *(_cell(group.get(name)) for name in names),
            *(_times(_ratio(group, name, BASE)) for name in names if name in TITLES),
        ]
        for group in groups
    ]
    parts = [
        f"fp32, TFLOPS. {tables.definition(rows[0]['pass'])} {CONVENTION}",
        "Our speed over that of each, geometric mean (range):",
        tables.markdown_table(["", *(titles[peer] for peer in peers)], means),
        tables.markdown_table(["problem", *titles.values(), *over], lines),
        tables.bullets(tables.notes(rows)),
    ]
    return "\n\n".join(part for part in parts if part)


def _ratio(group: dict[str, Row], name: str, peer: str) -> float | None:
    """Speed of a provider over a peer's on a problem; None if one of them has no speed."""
    pair = [group.get(each) for each in (peer, name)]
    if not all(row and row["status"] == "ok" for row in pair):
        return None
    return pair[0]["ms"] / pair[1]["ms"]


def _ratios(groups: Sequence[dict[str, Row]], name: str, peer: str) -> list[float]:
    return [ratio for group in groups if (ratio := _ratio(group, name, peer))]


def _mean_and_range(ratios: Sequence[float]) -> str:
    if not ratios:
        return "–"
    return (
        f"{statistics.geometric_mean(ratios):.2f}x ({min(ratios):.2f}–{max(ratios):.2f}, {len(ratios)} rows)"
    )


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}x"


def _cell(row: Row | None) -> str:
    """Speed and error of a row, as in 102 (4.1e-07)."""
    text = tables.cell(row, math.nan, ("", ""))
    return f"{text} ({row['rms_error']:.1e})" if row and row["status"] == "ok" else text
