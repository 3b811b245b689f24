"""Checks of the arguments of block masks. They read metadata only."""

from __future__ import annotations

from typing import Any

import torch

from tl_attention.checks.common import cast_hint, describe, expect_tensor, is_int, window_hint
from tl_attention.checks.flex import MAX_LENGTH
from tl_attention.tracing.intervals import Blocks


def check_mask_function(mask_mod: Any) -> None:
    if not callable(mask_mod):
        is_tensor = isinstance(mask_mod, torch.Tensor)
        hint = "; index it in a function, as mask[q_idx, kv_idx]" if is_tensor else ""
        raise TypeError(
            f"mask_mod: expected a function of 0-d tensors (b, h, q_idx, kv_idx), got {describe(mask_mod)}{hint}"
        )


def check_count(name: str, x: Any, least: int, most: int = MAX_LENGTH) -> None:
    if not is_int(x):
        raise TypeError(f"{name}: expected an int, got {describe(x)}{cast_hint(name, x, 'int')}")
    if not least <= x <= most:
        raise ValueError(f"{name}: expected {least} to {most}, got {x}")


def check_blocks(
    batch: Any, heads: Any, seqlen_q: Any, seqlen_k: Any, device: Any, block_size: Any
) -> Blocks:
    """Blocks of a mask, from the arguments of create_block_mask."""
    for name, x in (("B", batch), ("H", heads)):
        if x is not None:
            check_count(name, x, 1)
    check_count("Q_LEN", seqlen_q, 0)
    check_count("KV_LEN", seqlen_k, 0)
    sizes = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(sizes) != 2 or not all(is_int(size) and 1 <= size < 2**31 for size in sizes):
        raise ValueError(
            "BLOCK_SIZE: expected an int from 1 to 2 ** 31 - 1, or a pair of them for queries and keys, got"
            f" {describe(block_size)}; 128 suits the kernels"
        )
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        device = torch.empty(0, device=device).device  # with its index
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        text = str(error).split("\n")[0]
        raise ValueError(f"device: expected a device of torch, got {describe(device)}: {text}") from None
    return Blocks(batch or 1, heads or 1, seqlen_q, seqlen_k, *map(int, sizes), device)


def check_window_pair(window_size: Any) -> tuple[int, int]:
    is_pair = isinstance(window_size, tuple | list) and len(window_size) == 2
    if not is_pair or not all(is_int(x) and x >= -1 for x in window_size):
        raise ValueError(
            f"window_size: expected (left, right), ints of at least 0, or -1 for no bound, got {describe(window_size)}; pass"
            f" {window_hint(window_size)}"
        )
    return window_size[0], window_size[1]


def check_lengths_tensor(name: str, x: Any, *ndims: int) -> torch.Tensor:
    """A tensor of positions, lengths or documents."""
    expect_tensor(name, x)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{name}: expected torch.int32 or torch.int64, got {x.dtype}; cast it with {name}.int()"
        )
    if x.ndim not in ndims or not x.numel():
        dims = " or ".join(map(str, ndims))
        raise ValueError(
            f"{name}: expected {dims} dimensions and at least one element, got shape {tuple(x.shape)}"
        )
    return x
