"""Time of the forward with its derivative along a direction, beside the forward alone and PyTorch's formula.

    python benchmarks/forward_mode.py [SHAPE ..]        # B,Hq,Hkv,Sq,Sk,D[,Dv],mask or names of configs/shapes.toml

Each result is checked before it is timed. FLOPs are three times those of the forward: each of its products has a tangent of two.
PyTorch's formula stores scores and probabilities, so it runs where they fit in 4 GB.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence

import torch

from tl_attention import launch
from tl_attention.problem.target import is_hopper
from tl_attention.testing import counts, timer
from tl_attention.testing.inputs import make_inputs
from tl_attention.testing.numeric import check_jvp
from tl_attention.testing.shapes import Shape, chosen_shapes

SHAPES = [
    f"{batch},{heads},{heads},{seqlen},{seqlen},{head_dim},{mask}"
    for head_dim, heads in ((64, 32), (96, 16), (128, 16))
    for mask in ("full", "causal")
    for batch, seqlen in ((8, 2048), (4, 8192), (1, 32768))
]
FORMULA_BYTES = 4 << 30


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Plain attention of [batch, heads, seqlen, head_dim] tensors with as many key heads as query heads."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(
            1 + k.shape[2] - q.shape[2]
        )
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v


def is_right(shape: Shape, primals: tuple, tangents: tuple) -> bool:
    """Check the first head of the first batch entry."""
    outputs = launch.forward_jvp(*primals, *tangents, shape.head_dim**-0.5, shape.causal, False)
    out, lse, tout, tlse = outputs
    first = out[:1, :, :1], lse[:1, :1], tout[:1, :, :1], tlse[:1, :1]
    primals, tangents = (tuple(x[:1, :, :1] for x in tensors) for tensors in (primals, tangents))
    found = check_jvp(first, primals, tangents, causal=shape.causal)
    if not found.ok:
        print(found.text)
    return found.ok and all(bool(x.isfinite().all()) for x in outputs)


def calls(shape: Shape, primals: tuple, tangents: tuple) -> dict[str, Callable[[], object]]:
    """Timed calls by name."""
    scale, causal = shape.head_dim**-0.5, shape.causal
    found: dict[str, Callable[[], object]] = {
        "jvp": lambda: launch.forward_jvp(*primals, *tangents, scale, causal, False),
        "forward": lambda: launch.forward(*primals, scale, causal, False),
    }
    scores = shape.batch * shape.heads_q * shape.seqlen_q * shape.seqlen_k
    if 2 * 6 * scores <= FORMULA_BYTES and shape.heads_q == shape.heads_kv:
        first = [tuple(x.transpose(1, 2) for x in tensors) for tensors in (primals, tangents)]
        found["PyTorch"] = lambda: torch.func.jvp(lambda *x: formula(*x, causal), *first)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per shape; 1 if a result is wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="SHAPE")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(argv)
    try:
        shapes = chosen_shapes(arguments.shapes)
    except ValueError as error:
        parser.error(str(error))
    if not is_hopper(0):
        print("benchmarks/forward_mode.py needs an NVIDIA Hopper GPU")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16; ms and TFLOPS")
    print(f"{'shape':34} {'jvp':>16} {'forward':>16} {'PyTorch':>16}")
    wrong = 0
    for shape in shapes.values():
        primals = make_inputs(shape, torch.bfloat16)
        tangents = make_inputs(shape, torch.bfloat16, seed=1)
        if not is_right(shape, primals, tangents):
            wrong += 1
            print(f"{shape!s:34} WRONG")
            continue
        timings = timer.time_interleaved(calls(shape, primals, tangents), arguments.rounds)
        cells = []
        for name in ("jvp", "forward", "PyTorch"):
            if name not in timings:
                cells.append(f"{'–':>16}")
                continue
            ms = timings[name].median_ms
            flops = counts.fwd_flops(shape) * (1 if name == "forward" else 3)
            cells.append(f"{ms:9.3f} {flops / ms / 1e9:6.0f}")
        print(f"{shape!s:34} {' '.join(cells)}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
