"""What a user may get wrong in a call: argument, expectation, what came, what to do. Looks at metadata alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from tl_attention.problem import MAX_HEAD_DIM

DTYPES = (torch.bfloat16, torch.float16)
Int = (int, torch.SymInt)
Number = (int, float, torch.SymInt, torch.SymFloat)


def described(x: object) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}" if isinstance(x, torch.Tensor) else repr(x)


def check_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    heads_first: bool,
    varlen: bool = False,
) -> None:
    """The arguments as a public function got them.

    Of tensors it asks nothing that dispatch keeps no plan by: shapes, strides, dtypes, devices.

    Args:
        heads_first: tensors are [batch, heads, seqlen, head_dim], else [batch, seqlen, heads, head_dim].
        varlen: tensors are [total, heads, head_dim].

    Raises:
        TypeError: not a tensor, or a dtype the kernels do not take.
        ValueError: shapes, strides or devices that do not go together.
        NotImplementedError: sensible, but not supported.
    """
    if varlen:
        layout, seqlen_axis, heads_axis = ("total, heads", 0, 1)
    elif heads_first:
        layout, seqlen_axis, heads_axis = ("batch, heads, seqlen", 2, 1)
    else:
        layout, seqlen_axis, heads_axis = ("batch, seqlen, heads", 1, 2)
    ndim = 3 if varlen else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name}: expected bfloat16 or float16, got {x.dtype}; cast it with {name}.to(torch.bfloat16)"
            )
        if x.ndim != ndim:
            raise ValueError(
                f"{name}: expected {ndim} dimensions [{layout}, head_dim], got shape {tuple(x.shape)}"
            )
        if x.stride(-1) != 1 and x.shape[-1] > 1:
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
    heads, head_dim = q_shape[heads_axis], q_shape[-1]
    heads_kv, seqlen_k, head_dim_v = k_shape[heads_axis], k_shape[seqlen_axis], v_shape[-1]
    if not varlen and not q_shape[0] == k_shape[0] == v_shape[0]:
        raise ValueError(f"k, v: expected the batch of q, {q_shape[0]}, got {k_shape[0]} and {v_shape[0]}")
    if v_shape[heads_axis] != heads_kv or v_shape[seqlen_axis] != seqlen_k:
        raise ValueError(
            f"v: expected the heads and seqlen of k, {heads_kv} and {seqlen_k}, got {v_shape[heads_axis]} and {v_shape[seqlen_axis]}"
        )
    if heads and (not heads_kv or heads % heads_kv):
        raise ValueError(f"k, v: expected a number of heads that divides the {heads} of q, got {heads_kv}")
    if k_shape[-1] != head_dim:
        raise ValueError(f"k: expected the head_dim of q, {head_dim}, got {k_shape[-1]}")
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
        raise TypeError(f"causal: expected a bool, got {described(causal)}")


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
    check_tensor("do", do, q, (shape,), (q.dtype,))
    check_tensor("out", out, q, (shape,), (q.dtype,))
    check_tensor("lse", lse, q, (shape[:3],), (torch.float32,))
    check_deterministic(deterministic)


def check_tensor(
    name: str,
    x: torch.Tensor,
    q: torch.Tensor,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
) -> None:
    """Raises as check_fwd unless x is a tensor of one of these shapes and dtypes, where q is."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name}: expected shape {' or '.join(map(str, shapes))}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise TypeError(
            f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}; cast it with {name}.to({dtypes[0]})"
        )
    if x.device != q.device:
        raise ValueError(f"{name}: expected the device of q, {q.device}, got {x.device}; move it there")


def check_lengths(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> None:
    """What says where the sequences of q, k and v [total, heads, head_dim] lie; raises as check_fwd. What tensors hold is not looked at."""
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.ndim != 1 or not x.shape[0]:
            raise ValueError(f"{name}: expected shape [batch + 1], got {tuple(x.shape)}")
    batch = cu_seqlens_q.shape[0] - 1
    for name, x, entries in (
        ("cu_seqlens_q", cu_seqlens_q, batch + 1),
        ("cu_seqlens_k", cu_seqlens_k, batch + 1),
        ("seqused_q", seqused_q, batch),
        ("seqused_k", seqused_k, batch),
    ):
        if x is None:
            continue
        check_tensor(name, x, q, ((entries,),), (torch.int32,))
        if not x.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor, got stride {x.stride(0)}; call {name}.contiguous()"
            )
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(length, torch.Tensor):
            if length.ndim or length.is_floating_point():
                raise TypeError(f"{name}: expected an int or a 0-d tensor of one, got {described(length)}")
        elif not isinstance(length, Int) or isinstance(length, bool):
            raise TypeError(f"{name}: expected an int or a 0-d tensor of one, got {length!r}")
        elif length < 0:
            raise ValueError(f"{name}: expected the longest sequence's length, got {length}")


def check_options(
    q: torch.Tensor,
    batch: int,
    window_size: Sequence[int | None],
    softcap: float,
    dropout_p: float,
    alibi_slopes: torch.Tensor | None,
    learnable_sink: torch.Tensor | None,
    rng_state: torch.Tensor | None,
) -> None:
    """What changes a score or a probability, beside causal; q has its heads last but one. Raises as check_fwd."""
    heads = q.shape[-2]
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2):
        raise TypeError(f"window_size: expected a pair (left, right), got {described(window_size)}")
    for bound in window_size:
        if bound is not None and (not isinstance(bound, Int) or isinstance(bound, bool)):
            raise TypeError(
                f"window_size: expected ints, -1 or None for no limit, got {described(bound)} in {window_size}"
            )
        if bound is not None and bound < -1:
            raise ValueError(
                f"window_size: expected bounds from 0 up, -1 or None for no limit, got {window_size}"
            )
    if not isinstance(softcap, Number) or not 0 <= softcap < math.inf:
        raise ValueError(f"softcap: expected a finite number from 0, for none, up, got {described(softcap)}")
    if not isinstance(dropout_p, Number) or not 0 <= dropout_p < 255.5 / 256:
        raise ValueError(
            "dropout_p: expected a number from 0 to 255/256, as it is rounded to a multiple of 1/256 below 1,"
            f" got {described(dropout_p)}"
        )
    if rng_state is not None:
        check_tensor("rng_state", rng_state, q, ((2,),), (torch.int64,))
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes, q, ((heads,), (batch, heads)), (torch.float32,))
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                "alibi_slopes: a gradient of slopes is not supported; pass alibi_slopes.detach()"
            )
    if learnable_sink is not None:
        check_tensor("learnable_sink", learnable_sink, q, ((heads,),), (torch.float32, q.dtype))


def check_num_splits(num_splits: int) -> None:
    """Raises as check_fwd unless it is a number of splits, 0 to choose, that there may be."""
    if not isinstance(num_splits, Int) or isinstance(num_splits, bool):
        raise TypeError(f"num_splits: expected an int, 0 to choose, got {described(num_splits)}")
    if num_splits < 0:
        raise ValueError(
            f"num_splits: expected 0, to choose, or how many splits of the keys, got {num_splits}"
        )


def check_packed(name: str, x: torch.Tensor, layout: str, parts: int) -> None:
    """Raises TypeError or ValueError unless x is a tensor of this layout, whose last but two dimension holds so many parts."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.ndim != len(layout.split(", ")) or x.shape[-3] != parts:
        raise ValueError(f"{name}: expected shape [{layout}], got {tuple(x.shape)}")


def check_no_block_table(block_table: object) -> None:
    """Raises NotImplementedError if there is one."""
    if block_table is not None:
        raise NotImplementedError(
            f"block_table: paged caches are not supported, got {described(block_table)}; gather the pages, and leave it None"
        )


def check_states(
    outs: torch.Tensor | Sequence[torch.Tensor], lses: torch.Tensor | Sequence[torch.Tensor]
) -> None:
    """Raises TypeError or ValueError unless these are outputs of one shape and their log-sum-exps."""
    for name, states in (("outs", outs), ("lses", lses)):
        if not isinstance(states, (torch.Tensor, list, tuple)):
            raise TypeError(
                f"{name}: expected a sequence of tensors, or a tensor that stacks them, got {type(states).__name__}"
            )
        for x in () if isinstance(states, torch.Tensor) else states:
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name}: expected tensors, got {type(x).__name__} among them")
    if not len(outs) or len(outs) != len(lses):
        raise ValueError(
            f"outs, lses: expected as many of one as of the other, one at least, got {len(outs)} and {len(lses)}"
        )
    shape = tuple(outs[0].shape)
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if len(shape) not in (3, 4) or tuple(out.shape) != shape:
            raise ValueError(
                f"outs: expected [batch, seqlen, heads, head_dim] or [total, heads, head_dim], the same of all, got {tuple(out.shape)}"
                f" as number {i} after {shape}"
            )
        expected = (*shape[:-3], shape[-2], shape[-3])
        if tuple(lse.shape) != expected:
            raise ValueError(
                f"lses: expected shape {expected} beside outputs {shape}, got {tuple(lse.shape)} as number {i}"
            )
        if out.dtype != outs[0].dtype:
            raise TypeError(
                f"outs: expected one dtype, got {out.dtype} as number {i} after {outs[0].dtype}; cast them to one"
            )
        if not out.dtype.is_floating_point or lse.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"outs, lses: expected floating point outputs with fp32 log-sum-exps, got {out.dtype} and {lse.dtype} as number {i}"
            )
        if not out.device == lse.device == outs[0].device:
            raise ValueError(
                f"outs, lses: expected one device, got {out.device} and {lse.device} as number {i} beside {outs[0].device}"
            )


def check_deterministic(deterministic: bool) -> None:
    """Raises TypeError unless it is a bool."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: expected a bool, got {described(deterministic)}")


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


def check_no_forward_ad() -> None:
    """Raises NotImplementedError within forward-mode automatic differentiation, whose tangents would be lost."""
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError(
            "q, k, v: forward-mode automatic differentiation is not supported; use no dual level"
        )


def check_config(problem: object, config: object, reason: str | None) -> None:
    """Raise ValueError if an explicit config cannot run a problem, for a reason."""
    if reason:
        raise ValueError(f"config: {config} cannot run {problem}: {reason}")


def check_dropout_batch(dropout_p: float, batch: int, max_batch: int) -> None:
    """Raise NotImplementedError for a backward with dropout whose batch needs more than one launch."""
    if dropout_p and batch > max_batch:
        raise NotImplementedError(
            f"dropout_p: expected a batch of at most {max_batch} in a backward with dropout, got {batch}; divide the batch"
        )


def check_cache_strides(name: str, cache: torch.Tensor, cache_step: int, row_step: int) -> None:
    """Raise ValueError unless the caches or pages of a tensor begin a whole number of rows after each other."""
    if cache_step % row_step:
        raise ValueError(
            f"{name}: expected stride(0) to be a multiple of stride(1), got {cache.stride()}; allocate it as [caches, seqlen, heads,"
            " head_dim], or with the sequence anywhere outside the head dimension"
        )
