"""Rows of forwards and backwards: the inputs, the correctness gate, the timing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import options
import providers
import torch
import turns
from library import Inputs, Provider, Ready, Result, prepare
from rows import OURS, PLAIN, Row

from tl_attention.reference import attention_backward_reference, attention_reference
from tl_attention.testing import counts, timer
from tl_attention.testing.inputs import make_dout, make_inputs
from tl_attention.testing.numeric import BwdComparison, check_bwd, check_fwd
from tl_attention.testing.shapes import Shape, is_deterministic

# Scores of the checked heads of a forward or a backward: one of 32 heads with 16384 full queries has 2^28
MAX_CHECKED_SCORES = 2**33
MAX_CHECKED_PAIRS = 2**30  # with options, whose reference makes more passes over the scores
SOFTCAP_SPREAD = 8  # factor of q, so that a softcap changes scores
SLOPE_RTOL = 0.03  # tolerance for results under an unknown dropout mask, regressed on those without dropout


def measure(
    shape: Shape, dtype: torch.dtype, direction: str, names: Sequence[str], rounds: int, warm: bool = False
) -> list[Row]:
    """One row per provider: checked, timed interleaved with the others that are right, and checked once more.

    An exception of a library becomes the reason of its row. An exception while making inputs, or of the GPU, becomes the reason of
    all unfinished rows.

    Args:
        warm: all launches share one copy of the inputs, so L2 holds as much of them as it can.
    """
    rows = {name: new_row(name, shape) for name in entering(names, shape)}
    with turns.reason_of_all(rows):
        compare(shape, make_copies(shape, dtype, direction, warm), direction, rows, rounds)
    return list(rows.values())


def entering(names: Sequence[str], shape: Shape) -> list[str]:
    """The providers with the pass of a shape; with options also ours without them, after ours."""
    if not shape.options:
        return [name for name in names if "fwd" in providers.PROVIDERS[name].passes]
    every = [name for name in names if "options" in providers.PROVIDERS[name].passes]
    if OURS in every:
        every.insert(every.index(OURS) + 1, PLAIN)
    return every


def provider_of(name: str, shape: Shape) -> Provider:
    """The provider of a row, with the fwd and bwd of its options pass where the shape has options."""
    provider = providers.of_row(name)
    return options.with_passes(name, provider) if shape.options else provider


def new_row(name: str, shape: Shape) -> Row:
    """The row of a provider before it ran."""
    pass_name = "options" if shape.options else "fwd"
    return turns.new_row(name, pass_name, provider_of(name, shape).layout, shape)


def compare(shape: Shape, bshd: Sequence[Inputs], direction: str, rows: dict[str, Row], rounds: int) -> None:
    """Fill in the rows, from copies of the inputs."""
    copies = {"bshd": bshd, "bhsd": [tuple(x.transpose(1, 2).contiguous() for x in copy) for copy in bshd]}

    def enter(name: str) -> tuple[Ready, Sequence[Inputs]]:
        return prepare(provider_of(name, shape), shape, direction, copies[rows[name]["layout"]])

    def check(name: str, result: Result, when: str) -> Row:
        return verify(name, shape, direction, result, bshd[0], when)

    def speeds(name: str, *timings: Any) -> Row:
        return turns.speeds(options.problem_of(name, shape), direction, *timings)

    turns.compete(rows, rounds, enter, check, speeds, same_bits=is_deterministic(direction))


def make_copies(shape: Shape, dtype: torch.dtype, direction: str, warm: bool = False) -> list[Inputs]:
    """(q, k, v), or with a backward (dout, q, k, v), as [batch, seqlen, heads, head_dim].

    There are enough copies for a launch to find none of its inputs in L2; warm: one.
    """
    seeds = range(1 if warm else timer.rotation(counts.input_bytes(shape, direction)))
    layout = "packed" if shape.options.packed else "bshd"
    copies = [make_inputs(shape, dtype, layout, seed=seed) for seed in seeds]
    if shape.options.softcap:
        for q, *_ in copies:
            q *= SOFTCAP_SPREAD
    if "bwd" not in direction:
        return copies
    return [(make_dout(shape, dtype, seed=seed), *copies[seed]) for seed in seeds]


def verify(name: str, shape: Shape, direction: str, result: Result, inputs: Inputs, when: str = "") -> Row:
    """Judge a provider's result for inputs in bshd by the error rule.

    A large problem is checked on some heads, each with all its queries and keys: a smaller problem, judged like any other. They are
    as many as have MAX_CHECKED_SCORES, at least two, evenly spread over batch and heads with the first and the last included. For a
    backward they are KV heads with all their query heads. The other heads must hold no NaN or inf. A forward of MAX_CHECKED_SCORES
    at head_dim 128 is 4.4 TFLOP of the reference in fp32. With options they are KV heads of all batch entries, with all their
    query heads.
    """
    provider, has_options = provider_of(name, shape), bool(shape.options)
    shape = options.problem_of(name, shape)
    if provider.layout == "bhsd":
        result = [x.transpose(1, 2) if x is not None and x.ndim == 4 else x for x in result]
    whole, asked = result, {}
    if has_options:
        heads = [turns.spread(option_heads(shape), shape.heads_kv), shape.heads_kv]
        asked = options.reference_options(
            shape, inputs[0].dtype, inputs[0].device, query_heads(shape, heads[0])
        )
        result, inputs = (
            [x if x is None else of_heads(x, shape, heads[0]) for x in tensors]
            for tensors in (result, inputs)
        )
    elif heads := checked_heads(shape, direction):
        result, inputs = ([take_heads(x, *heads) for x in tensors] for tensors in (result, inputs))
    if heads:
        when += f"in {len(heads[0])} checked heads, "
    *dout, q, k, v = inputs
    checks, causal, found = [], shape.causal, {}
    if shape.options.dropout and name in options.OWN_MASK:
        checks.append(check_on_average(result, direction, *dout, q, k, v, causal=causal))
    elif direction == "fwd":
        out, lse = result
        checks.append(check_fwd(out, lse, q, k, v, causal=causal, lse_base2=provider.lse_base2, **asked))
        found = {"lse_err_ratio": None if lse is None else turns.finite(checks[0].lse_err_ratio)}
    else:
        out, grads = (result[:1], result[1:]) if "fwd" in direction else ((), result)
        if out:
            checks.append(check_fwd(*out, None, q, k, v, causal=causal, **asked))
        checks.append(check_bwd(tuple(grads), *dout, q, k, v, causal=causal, **asked))
    unchecked = [x for x in whole if x is not None and x.ndim == 4] if heads else ()
    return found | turns.found(checks, when, unchecked)


def check_on_average(result: Result, direction: str, *inputs: torch.Tensor, causal: bool) -> BwdComparison:
    """Check of results under an unknown dropout mask: on average they equal those without dropout.

    Each is linear in the mask, whose mean is 1, so its regression on the exact one has slope 1.
    """
    *dout, q, k, v = inputs
    named: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    if "fwd" in direction:
        named.append(("out", result[0], attention_reference(q, k, v, causal=causal)[0]))
    if "bwd" in direction:
        exact = attention_backward_reference(*dout, q, k, v, causal=causal)
        named += zip(("dq", "dk", "dv"), result[-3:], exact, strict=True)
    slopes = {name: float((x * ref).sum() / ref.square().sum()) for name, x, ref in named}
    ratios = {
        name: abs(slope - 1) / SLOPE_RTOL if math.isfinite(slope) else math.inf
        for name, slope in slopes.items()
    }
    text = "; ".join(
        f"{name} is {slope:.3f} of that without dropout on average" for name, slope in slopes.items()
    )
    return BwdComparison(max(ratios.values()) <= 1, ratios, text, {})


def option_heads(shape: Shape) -> int:
    """Number of KV heads to check with options, in all batch entries: those with MAX_CHECKED_PAIRS, at least two."""
    pairs = counts.visible_pairs(shape) * shape.heads_q // shape.heads_kv
    return min(shape.heads_kv, max(2, MAX_CHECKED_PAIRS // max(pairs, 1)))


def query_heads(shape: Shape, key_heads: Sequence[int]) -> list[int]:
    """All query heads of some KV heads."""
    group = shape.heads_q // shape.heads_kv
    return [head * group + i for head in key_heads for i in range(group)]


def of_heads(x: torch.Tensor, shape: Shape, key_heads: Sequence[int]) -> torch.Tensor:
    """The part of a tensor that belongs to some KV heads, as an argument of the reference: varlen has one dimension of tokens.

    Args:
        x: [batch, seqlen, heads, columns], [batch, heads_q, seqlen], [heads_q, tokens] or [heads_q].
    """
    dim = {4: 2, 3: 1, 2: 0, 1: 0}[x.ndim]
    chosen = key_heads if dim == 2 and x.shape[dim] == shape.heads_kv else query_heads(shape, key_heads)
    picked = x.index_select(dim, torch.tensor(chosen, device=x.device))
    return picked.flatten(0, 1) if shape.is_varlen and x.ndim == 4 else picked


def checked_heads(shape: Shape, direction: str) -> tuple[list[int], int] | None:
    """The heads to check, counted through the batch entries, and their number per entry; None for all.

    They are query heads in a forward, KV heads where there is a backward.
    """
    heads = shape.heads_kv if "bwd" in direction else shape.heads_q
    scores = counts.visible_pairs(shape) // shape.batch * shape.heads_q // heads  # per head
    every = shape.batch * heads
    most = max(2, MAX_CHECKED_SCORES // max(scores, 1))
    if every <= most:
        return None
    return turns.spread(most, every), heads


def take_heads(x: torch.Tensor | None, chosen: Sequence[int], heads: int) -> torch.Tensor | None:
    """Some of the heads, as batch entries, with all that belongs to them.

    Args:
        x: [batch, seqlen, H, columns], or an lse [batch, H, seqlen]. Each of the heads has H // heads of the H, or shares one.
        heads: per batch entry.
    """
    if x is None:
        return None
    by_head = x if x.ndim == 3 else x.transpose(1, 2)
    H = by_head.shape[1]
    parts = []
    for i in chosen:
        entry, head = divmod(i, heads)
        first = head * H // heads
        parts.append(by_head[entry, first : first + max(1, H // heads)])
    picked = torch.stack(parts)
    return picked if x.ndim == 3 else picked.transpose(1, 2)
