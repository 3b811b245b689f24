"""Price of tree_mask: a tree of draft tokens of each sequence against its cache, beside the causal call of the same sizes.

    python benchmarks/tree_mask.py [--rounds N] [--out FILE]

Times in microseconds, the ratio of both, and mean errors of the first sequence and key head against the reference. A result that breaks the
error rule ends the run. bf16, 64 query heads and 8 key heads of 128 columns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tl_attention import draft_tree_mask, flash_attn_with_kvcache
from tl_attention.problem.target import is_hopper
from tl_attention.testing import timer
from tl_attention.testing.numeric import check_fwd

HEADS, HEADS_KV, HEAD_DIM = 64, 8, 128
# (sequences, draft tokens, keys)
SIZES = list(itertools.product((8, 16, 32, 64), (16, 32, 64), (4096, 32768)))


def parents(batch: int, nodes: int) -> torch.Tensor:
    """Parents of random trees, [batch, nodes]: a node is the child of one of the eight before it, or of the last accepted token."""
    chance = random.Random(0)
    return torch.tensor([[chance.randint(max(i - 8, -1), i - 1) for i in range(nodes)] for _ in range(batch)])


def calls_of(batch: int, nodes: int, keys: int, device: str = "cuda") -> dict[str, Callable[[], Any]]:
    """The calls with either mask; their results pass the error rule."""
    half = {"device": device, "dtype": torch.bfloat16}
    k, v = (torch.randn(batch, keys, HEADS_KV, HEAD_DIM, **half) for _ in range(2))
    q = torch.randn(batch, nodes, HEADS, HEAD_DIM, **half)
    lengths = torch.full((batch,), keys, device=device, dtype=torch.int32)
    tree = draft_tree_mask(parents(batch, nodes).to(device))
    call = partial(flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths)
    return {"causal": partial(call, causal=True), "tree": partial(call, tree_mask=tree)}


def error_of(call: Callable[[], Any]) -> float:
    """Mean error of out of the first sequence and key head. Raises ArithmeticError if it is too large."""
    out, lse = call(return_softmax_lse=True)
    group, (q, k, v) = HEADS // HEADS_KV, call.args
    mask = {"causal": call.keywords.get("causal", False)}
    if (tree := call.keywords.get("tree_mask")) is not None:
        mask["tree_mask"] = tree[0]
    result = check_fwd(
        out[:1, :, :group], lse[:1, :group], q[:1, :, :group], k[:1, :, :1], v[:1, :, :1], **mask
    )
    if not result.ok:
        raise ArithmeticError(result.text)
    return result.mean_errors["out"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="file for the rows as JSON, a line each")
    arguments = parser.parse_args(argv)
    if not is_hopper(0):
        print("benchmarks/tree_mask.py needs an NVIDIA Hopper GPU")
        return 2
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'':34}   causal     tree   tree/causal   error of causal, of tree")
    rows = []
    for batch, nodes, keys in SIZES:
        calls = calls_of(batch, nodes, keys)
        errors = {name: error_of(call) for name, call in calls.items()}
        timings = timer.time_interleaved(calls, arguments.rounds, cap_ms=150)
        us = {name: 1e3 * timing.median_ms for name, timing in timings.items()}
        name = f"{batch} sequences, {nodes} nodes, {keys} keys"
        rows.append({"row": name, "us": us, "errors": errors})
        print(
            f"{name:34} {us['causal']:8.1f} {us['tree']:8.1f}   {us['tree'] / us['causal']:11.3f}"
            f"   {errors['causal']:.2e} {errors['tree']:.2e}",
            flush=True,
        )
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
