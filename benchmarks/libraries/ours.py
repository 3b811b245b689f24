"""tl_attention, the package of this repository."""

from __future__ import annotations

import functools

import library
import torch
from library import Attend, Provider, Ready
from options import Tensors

from libraries import flash_api
from tl_attention.testing.environment import version
from tl_attention.testing.shapes import Shape


def forward(shape: Shape, *qkv: torch.Tensor, saves: bool) -> Ready:
    interface = functools.partial(
        library.import_function("tl_attention", "mha_fwd_interface"), is_causal=shape.causal
    )
    return Ready(interface, interface(*qkv, return_kernel=True))


def backward(shape: Shape, deterministic: bool, *given: torch.Tensor) -> Ready:
    interface = functools.partial(
        library.import_function("tl_attention", "mha_bwd_interface"),
        is_causal=shape.causal,
        deterministic=deterministic,
    )
    return Ready(interface, interface(*given, return_kernel=True))


def attend_with_options(shape: Shape, needs: Tensors) -> Attend:
    return flash_api.attend_with_options("tl_attention", shape, needs)


PROVIDER = Provider(
    {
        "fwd": forward,
        "bwd": backward,
        "options": attend_with_options,
        "decode": flash_api.decode_with_kvcache("tl_attention"),
    },
    lambda _: f"TileLang {version('tilelang')}",
    layout="bhsd",
    lse_base2=True,
    accepts_packed=True,
)
