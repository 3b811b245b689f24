"""Checks of the arguments of flex_attention. They read metadata only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tl_attention.checks import describe, expect_tensor
from tl_attention.program import Call

MAX_ELEMENTS = 2**31 - 1  # of a captured tensor, from its first to its last: kernels index in 32 bits
MAX_LENGTH = 2**24  # positions are exact in fp32
MAX_BATCH = 2**16 - 1
LEAF_NAMES = {"batch": "b", "head": "h", "query": "q_idx", "key": "kv_idx"}


def check_function(name: str, function: Callable | None) -> None:
    if function is not None and not callable(function):
        raise TypeError(f"{name}: expected a function of 0-d tensors or None, got {describe(function)}")


def check_not_transformed() -> None:
    """Refuse torch.func, which would have to see the functions inside the kernels."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "flex_attention: expected a call outside torch.func transforms (vmap, grad, jvp), which are not supported; call"
            " .backward(), and make a vmapped dimension part of the batch"
        )
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError(
            "flex_attention: forward-mode derivatives are not supported; call .backward()"
        )


def check_order(*grads: torch.Tensor | None) -> None:
    """Refuse the gradient of a gradient."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in grads):
        raise NotImplementedError(
            "flex_attention: the gradient of a gradient is not supported; call backward without create_graph=True"
        )


def expand_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v with the batch of q, where they have one entry for all."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        expect_tensor(name, x)
    if q.ndim == k.ndim == v.ndim == 4 and k.shape[0] == v.shape[0] == 1 < q.shape[0]:
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
    if q.ndim == 4 and q.shape[0] > MAX_BATCH:
        raise NotImplementedError(
            f"query: expected a batch of at most {MAX_BATCH}, got {q.shape[0]}; call it in parts"
        )
    for name, x in (("query", q), ("key", k)):
        if x.ndim == 4 and x.shape[2] > MAX_LENGTH:
            raise NotImplementedError(f"{name}: expected at most {MAX_LENGTH} rows, got {x.shape[2]}")
    return k, v


def check_group(q: torch.Tensor, k: torch.Tensor, enable_gqa: bool) -> None:
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(
            f"key, value: expected the heads of query, {q.shape[1]}, got {k.shape[1]}; pass enable_gqa=True to share them"
        )


def check_block_mask(
    block_mask: Any, mask_mod: Callable | None, q: torch.Tensor, k: torch.Tensor
) -> Callable | None:
    """The mask_mod of a call, from itself or from a BlockMask."""
    if block_mask is None:
        return mask_mod
    if mask_mod is not None:
        raise ValueError(
            "mask_mod: expected None beside block_mask, which has a mask_mod of its own, got a function"
        )
    missing = [
        name
        for name in ("kv_num_blocks", "kv_indices", "mask_mod", "seq_lengths")
        if not hasattr(block_mask, name)
    ]
    if missing:
        raise TypeError(
            f"block_mask: expected a BlockMask of torch.nn.attention.flex_attention, got {type(block_mask).__name__}; pass a function as"
            " mask_mod"
        )
    lengths = q.shape[2], k.shape[2]
    if tuple(block_mask.seq_lengths) != lengths:
        raise ValueError(
            f"block_mask: expected one made for lengths {lengths} of query and key, got one for {tuple(block_mask.seq_lengths)}; make it"
            " for these lengths"
        )
    return block_mask.mask_mod


def refuse_lists_alone() -> None:
    """Refuse a BlockMask whose mask_mod hides nothing: only its lists, which the kernels do not use, could."""
    raise NotImplementedError(
        "block_mask: expected one with a mask_mod that hides keys, got one whose mask_mod is True for all; lists of blocks alone are not"
        " supported: pass block_mask=None for no mask, or a mask_mod that says what the lists say"
    )


def check_captured(call: Call, q: torch.Tensor, k: torch.Tensor) -> None:
    """Check devices and sizes of captured tensors."""
    sizes = {"batch": q.shape[0], "head": q.shape[1], "query": q.shape[2], "key": k.shape[2]}
    for i, x in enumerate(call.tensors):
        name = f"captured tensor {i}, {describe(x)}"
        if x.device != q.device:
            raise ValueError(
                f"{name}: expected the device of query, {q.device}; move it with .to(query.device)"
            )
        if x.layout != torch.strided or x.is_nested:
            raise NotImplementedError(f"{name}: expected a dense tensor, got {x.layout}; call .to_dense()")
        extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        if extent >= MAX_ELEMENTS:
            raise NotImplementedError(f"{name}: expected at most {MAX_ELEMENTS} elements; pass a part of it")
    for value in call.program.values:
        if value.op != "load":
            continue
        x = call.tensors[value.data]
        for dim, arg in enumerate(value.args):
            index = call.program.values[arg]
            wanted = sizes.get(index.op)
            if wanted is not None and x.shape[dim] < wanted:
                raise ValueError(
                    f"captured tensor {value.data}, {describe(x)}: expected at least {wanted} entries in dimension {dim}, which"
                    f" {LEAF_NAMES[index.op]} indexes, got {x.shape[dim]}"
                )
            if index.op == "constant" and not -x.shape[dim] <= index.data < x.shape[dim]:
                raise ValueError(
                    f"captured tensor {value.data}, {describe(x)}: expected an index within dimension {dim}, got {index.data}"
                )
