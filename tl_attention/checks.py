"""What a user may get wrong in a call: argument, expectation, what came, what to do. Looks at metadata alone."""

from __future__ import annotations

import functools
import math

import torch

from tl_attention.problem import MAX_HEAD_DIM

DTYPES = (torch.bfloat16, torch.float16)


def _described(x: object) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}" if isinstance(x, torch.Tensor) else repr(x)


def check_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    heads_first: bool,
) -> None:
    """The arguments as a public function got them.

    Of tensors it asks nothing that dispatch keeps no plan by: shapes, strides, dtypes, devices.

    Args:
        heads_first: tensors are [batch, heads, seqlen, head_dim], else [batch, seqlen, heads, head_dim].

    Raises:
        TypeError: not a tensor, or a dtype the kernels do not take.
        ValueError: shapes, strides or devices that do not go together.
        NotImplementedError: sensible, but not supported.
    """
    layout, heads_axis = ("batch, heads, seqlen", 1) if heads_first else ("batch, seqlen, heads", 2)
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
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"k, v: expected the dtype of q, {q.dtype}, got {k.dtype} and {v.dtype}; cast them to one dtype"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"k, v: expected the device of q, {q.device}, got {k.device} and {v.device}; move them to one device"
        )

    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    batch, heads, head_dim = q_shape[0], q_shape[heads_axis], q_shape[3]
    heads_kv, seqlen_k, head_dim_v = k_shape[heads_axis], k_shape[3 - heads_axis], v_shape[3]
    if k_shape[0] != batch or v_shape[0] != batch:
        raise ValueError(f"k, v: expected the batch of q, {batch}, got {k_shape[0]} and {v_shape[0]}")
    if v_shape[heads_axis] != heads_kv or v_shape[3 - heads_axis] != seqlen_k:
        raise ValueError(
            f"v: expected the heads and seqlen of k, {heads_kv} and {seqlen_k}, got {v_shape[heads_axis]} and {v_shape[3 - heads_axis]}"
        )
    if heads and (not heads_kv or heads % heads_kv):
        raise ValueError(f"k, v: expected a number of heads that divides the {heads} of q, got {heads_kv}")
    if k_shape[3] != head_dim:
        raise ValueError(f"k: expected the head_dim of q, {head_dim}, got {k_shape[3]}")
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
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected a bool, got {_described(causal)}")


def check_bwd(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    deterministic: bool,
) -> None:
    """What a backward takes beside the arguments of its forward, all [batch, heads, seqlen, head_dim]; raises as check_fwd."""
    shape = (*q.shape[:3], v.shape[3])
    for name, x, expected, dtype in (
        ("do", do, shape, q.dtype),
        ("out", out, shape, q.dtype),
        ("lse", lse, shape[:3], torch.float32),
    ):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if tuple(x.shape) != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")
        if x.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {x.dtype}; cast it with {name}.to({dtype})")
        if x.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {x.device}; move it there")
    check_deterministic(deterministic)


def check_deterministic(deterministic: bool) -> None:
    """Raises TypeError unless it is a bool."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: expected a bool, got {_described(deterministic)}")


@functools.cache
def _fault_of_gpu(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0):
        return None
    name = f"{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]})"
    return f"q: expected a Hopper GPU (sm_90: H100, H200, H800, H20, GH200), got {name}"


def check_device(q: torch.Tensor) -> None:
    """Raises NotImplementedError unless q is on a Hopper GPU."""
    if q.device.type != "cuda":
        raise NotImplementedError(
            f"q: expected a tensor on a Hopper GPU, or on the CPU to run the reference, got {q.device}"
        )
    if fault := _fault_of_gpu(q.device):
        raise NotImplementedError(fault)


def check_not_built(
    dropout_p: float, window_size: tuple, softcap: float, alibi_slopes: torch.Tensor | None
) -> None:
    """Options of FlashAttention-2 that may be off alone, so far."""
    if (
        alibi_slopes is None
        and type(window_size) is tuple
        and (dropout_p, window_size, softcap) == (0, (-1, -1), 0)
    ):
        return
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2):
        raise TypeError(f"window_size: expected a pair (left, right), got {_described(window_size)}")
    off = {
        "dropout_p": (dropout_p, dropout_p == 0),
        "window_size": (window_size, all(bound in (-1, None) for bound in window_size)),
        "softcap": (softcap, softcap == 0),
        "alibi_slopes": (alibi_slopes, alibi_slopes is None),
    }
    for name, (value, is_off) in off.items():
        if not is_off:
            raise NotImplementedError(
                f"{name}: {_described(value)} is not supported yet; leave it at its default"
            )


def check_no_forward_ad() -> None:
    """Raises NotImplementedError within forward-mode automatic differentiation, whose tangents would be lost."""
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError(
            "q, k, v: forward-mode automatic differentiation is not supported; use no dual level"
        )
