"""Every error a user can meet before a launch: argument, expectation, what came, what to do. Looks at metadata alone."""

from __future__ import annotations

import math

import torch

from tl_attention.problem import MAX_HEAD_DIM

DTYPES = (torch.bfloat16, torch.float16)


def _described(x: object) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}" if isinstance(x, torch.Tensor) else repr(x)


def check_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None, layout: str
) -> None:
    """q, k, v as a public function got them; layout: its words for their shape, "batch, seqlen, heads" or "batch, heads, seqlen".

    Raises:
        TypeError: not a tensor, or a dtype the kernels do not take.
        ValueError: shapes, strides or devices that do not go together.
        NotImplementedError: sensible, but not supported.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name}: expected bfloat16 or float16, got {x.dtype}; cast it with {name}.to(torch.bfloat16)"
            )
        if x.ndim != 4:
            raise ValueError(
                f"{name}: expected 4 dimensions [{layout}, head_dim], got shape {tuple(x.shape)}"
            )
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(
                f"{name}: expected the last dimension to be contiguous, got strides {x.stride()}; call {name}.contiguous()"
            )
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            f"k, v: expected the dtype of q, {q.dtype}, got {k.dtype} and {v.dtype}; cast them to one dtype"
        )
    if k.device != q.device or v.device != q.device:
        raise ValueError(
            f"k, v: expected the device of q, {q.device}, got {k.device} and {v.device}; move them to one device"
        )

    heads_axis = 2 if layout.endswith("heads") else 1
    batch, heads, head_dim = q.shape[0], q.shape[heads_axis], q.shape[3]
    heads_kv, seqlen_k, head_dim_v = k.shape[heads_axis], k.shape[3 - heads_axis], v.shape[3]
    if k.shape[0] != batch or v.shape[0] != batch:
        raise ValueError(f"k, v: expected the batch of q, {batch}, got {k.shape[0]} and {v.shape[0]}")
    if v.shape[heads_axis] != heads_kv or v.shape[3 - heads_axis] != seqlen_k:
        raise ValueError(
            f"v: expected the heads and seqlen of k, {heads_kv} and {seqlen_k}, got {v.shape[heads_axis]} and {v.shape[3 - heads_axis]}"
        )
    if heads and (not heads_kv or heads % heads_kv):
        raise ValueError(f"k, v: expected a number of heads that divides the {heads} of q, got {heads_kv}")
    if k.shape[3] != head_dim:
        raise ValueError(f"k: expected the head_dim of q, {head_dim}, got {k.shape[3]}")
    if head_dim % 8 or head_dim_v % 8 or not head_dim or not head_dim_v:
        raise ValueError(
            f"q, k, v: expected head dims that are multiples of 8, got {head_dim} of q and k, {head_dim_v} of v; pad the last"
            " dimension with zeros, pass softmax_scale explicitly and slice the output"
        )
    if head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"q, k: head_dim {head_dim} is not supported; expected at most {MAX_HEAD_DIM}"
        )
    if head_dim_v > head_dim:
        raise NotImplementedError(
            f"v: head_dim {head_dim_v} above that of q and k, {head_dim}, is not supported; pad q and k with zeros"
        )
    if softmax_scale is not None and not (
        isinstance(softmax_scale, (int, float)) and math.isfinite(softmax_scale)
    ):
        raise ValueError(
            f"softmax_scale: expected a finite number or None for head_dim ** -0.5, got {softmax_scale!r}"
        )


def check_device(q: torch.Tensor) -> None:
    """Raises NotImplementedError unless q is on a Hopper GPU."""
    if q.device.type != "cuda":
        raise NotImplementedError(
            f"q: expected a CUDA tensor, or a CPU tensor for the reference path, got one on {q.device}"
        )
    capability = torch.cuda.get_device_capability(q.device)
    if capability != (9, 0):
        name = torch.cuda.get_device_name(q.device)
        raise NotImplementedError(
            f"q: expected a Hopper GPU (sm_90: H100, H200, H800, H20, GH200), got {name} (sm_{capability[0]}{capability[1]})"
        )


def check_not_built(**options: tuple[object, object]) -> None:
    """Options as name=(value, value that means off)."""
    for name, (value, off) in options.items():
        if value != off and not (name == "window_size" and tuple(value) in ((-1, -1), (None, None))):
            raise NotImplementedError(
                f"{name}: {_described(value)} is not supported yet; leave it at {off!r}"
            )
