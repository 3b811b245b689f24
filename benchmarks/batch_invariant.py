"""Price of batch_invariant: forwards and decodes with and without it, beside FlashAttention-3 with num_splits=1.

    python benchmarks/batch_invariant.py [--rounds N] [--out FILE]

Before it is timed, a row with batch_invariant is compared bit by bit with the same queries in another call: a forward with its last
sequence alone, a decode with a forward of one more row. A row without FlashAttention-3 has a dash. bf16; forwards in TFLOPS of visible
pairs, decodes in microseconds; behind them the mean errors of out of the first head against fp64.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import library
import torch

from tl_attention import flash_attn_func, flash_attn_with_kvcache
from tl_attention.problem.target import is_hopper
from tl_attention.reference import attention_reference
from tl_attention.testing import counts, timer
from tl_attention.testing.inputs import make_inputs
from tl_attention.testing.numeric import mean_error
from tl_attention.testing.shapes import chosen_shapes

FORWARDS = [
    f"{16384 // seqlen},{2048 // head_dim},{2048 // head_dim},{seqlen},{seqlen},{head_dim},{mask}"
    for head_dim in (64, 128, 256)
    for mask in ("full", "causal")
    for seqlen in (512, 2048, 4096, 16384)
] + ["4,16,16,4096,4096,192,128,causal", "2,64,8,4096,4096,128,causal", "3,28,4,3001,3001,128,causal"]
# batch, heads, heads_kv, keys; one query per sequence, d128
DECODES = [
    (batch, heads, 8, keys) for heads in (32, 64) for batch in (1, 8, 32, 128) for keys in (2048, 8192, 32768)
]
NAMES = "plain", "batch_invariant", "fa3"


def fa3_function(name: str) -> Callable[..., Any] | None:
    """A function of FlashAttention-3 with num_splits=1; None: it is not installed."""
    try:
        return partial(library.import_function("flash_attn_interface", name), num_splits=1)
    except library.Unsupported:
        return None


def forward_calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict[str, Callable]:
    calls = {
        "plain": partial(flash_attn_func, q, k, v, causal=causal),
        "batch_invariant": partial(flash_attn_func, q, k, v, causal=causal, batch_invariant=True),
    }
    if fa3 := fa3_function("flash_attn_func"):
        calls["fa3"] = partial(fa3, q, k, v, causal=causal)
    last = [x[-1:] for x in (q, k, v)]
    alone = flash_attn_func(*last, causal=causal, batch_invariant=True)
    assert torch.equal(calls["batch_invariant"]()[-1:], alone)
    return calls


def decode_calls(batch: int, heads: int, heads_kv: int, keys: int) -> dict[str, Callable]:
    k, v = (torch.randn(batch, keys, heads_kv, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, 1, heads, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    how = {"cache_seqlens": lengths, "causal": True}
    calls = {
        "plain": partial(flash_attn_with_kvcache, q, k, v, **how),
        "batch_invariant": partial(flash_attn_with_kvcache, q, k, v, **how, batch_invariant=True),
    }
    if fa3 := fa3_function("flash_attn_with_kvcache"):
        calls["fa3"] = partial(fa3, q, k, v, **how)
    two = torch.cat((torch.zeros_like(q), q), 1)
    assert torch.equal(
        calls["batch_invariant"](), flash_attn_func(two, k, v, causal=True, batch_invariant=True)[:, 1:]
    )
    return calls


def errors_of(calls: dict[str, Callable]) -> dict[str, float]:
    """Mean error of out of the first sequence and head, per call."""
    call = calls["plain"]
    q, k, v = (x[:1, :, :1] for x in call.args)
    out, _ = attention_reference(q, k, v, causal=call.keywords["causal"], dtype=torch.float64)
    found = {name: call() for name, call in calls.items()}
    outs = {name: x[0] if isinstance(x, tuple) else x for name, x in found.items()}
    return {name: mean_error(x[:1, :, :1], out) for name, x in outs.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="file for the rows as JSON, a line each")
    parser.add_argument("--only", choices=("forward", "decode"))
    arguments = parser.parse_args(argv)
    if not is_hopper(0):
        print("benchmarks/batch_invariant.py needs an NVIDIA Hopper GPU")
        return 2
    torch.manual_seed(0)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; in brackets over plain, over fa3; errors"
    )
    rows = []
    if arguments.only != "decode":
        for shape in chosen_shapes(FORWARDS).values():
            qkv = make_inputs(shape, torch.bfloat16)[:3]
            calls = forward_calls(*qkv, shape.causal)
            ms, errors = _measure(calls, arguments.rounds), errors_of(calls)
            tflops = {name: counts.fwd_flops(shape) / x / 1e9 for name, x in ms.items()}
            rows.append({"row": str(shape), **tflops, "errors": errors})
            _show(rows[-1], 1)
    if arguments.only != "forward":
        for sizes in DECODES:
            calls = decode_calls(*sizes)
            ms, errors = _measure(calls, arguments.rounds), errors_of(calls)
            batch, heads, heads_kv, keys = sizes
            name = f"decode B{batch} H{heads}/{heads_kv} {keys} keys"
            rows.append({"row": name, **{name: 1e3 * x for name, x in ms.items()}, "errors": errors})
            _show(rows[-1], -1)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


def _measure(calls: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Milliseconds of each call."""
    return {
        name: timing.median_ms for name, timing in timer.time_interleaved(calls, rounds, cap_ms=150).items()
    }


def _show(row: dict[str, Any], sign: int) -> None:
    """Print a row; sign: 1 if more is faster, -1 if less is."""
    cells = [f"{row[name]:9.1f}" if name in row else "        –" for name in NAMES]
    own = row["batch_invariant"]
    ratios = [f"{(own / row[name]) ** sign:5.2f}" for name in ("plain", "fa3") if name in row]
    errors = ", ".join(f"{error:.2e}" for error in row["errors"].values())
    print(f"{row['row']:40} {' '.join(cells)}  ({', '.join(ratios)})  {errors}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
