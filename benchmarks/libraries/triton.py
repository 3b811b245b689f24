"""A Triton forward, benchmarks/triton_fwd.py: the same algorithm from another compiler."""

from __future__ import annotations

import library
import torch
from library import Provider, Ready, same_call

from tl_attention.testing.environment import version
from tl_attention.testing.shapes import Shape


def forward(shape: Shape, *_: torch.Tensor, saves: bool) -> Ready:
    flash = library.import_function("triton_fwd", "flash_attn_triton")
    return same_call(lambda q, k, v: flash(q, k, v, shape.causal))


PROVIDER = Provider(
    {"fwd": forward, "bwd": "forward only"},
    lambda _: f"triton_fwd.py, Triton {version('triton')}",
    layout="bhsd",
)
