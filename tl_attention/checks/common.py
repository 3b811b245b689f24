"""Argument checks that several public functions share: operands, scale, lengths, options.

Checks read metadata only (shapes, strides, dtypes, devices), so none waits for the GPU. kvcache.py holds the checks of
flash_attn_with_kvcache.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from tl_attention.problem.attn_problem import MAX_HEAD_DIM
from tl_attention.problem.options import (
    ALWAYS_INVARIANT,
    GRADIENTS,
    MAX_SCALE,
    MAX_SOFTCAP,
    MIN_SOFTCAP,
    PUBLIC_NAMES,
    TENSOR_RULES,
)
from tl_attention.problem.target import DTYPE_NAMES

DTYPES = tuple(DTYPE_NAMES)
FWD_DTYPES = (*DTYPES, torch.float32)  # dtypes of q, k and v without a cache, pages or out
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # dtypes of the reference
INT_TYPES = (int, torch.SymInt)
MAX_INT = 2**31 - 1  # kernels have 32 bits for it
NUMBER_TYPES = (int, float, torch.SymInt, torch.SymFloat)
BY_KEYWORD = (
    "; the parameters after v are in FlashAttention-2's order, dropout_p first: pass the others by keyword"
)
# Dimensions of q, k and v, in words
SEQLEN_FIRST, HEADS_FIRST = "batch, seqlen, heads, head_dim", "batch, heads, seqlen, head_dim"
PACKED = "total, heads, head_dim"
OTHER_LAYOUT = {SEQLEN_FIRST: HEADS_FIRST, HEADS_FIRST: SEQLEN_FIRST}
ONE_PER_SEQUENCE = "pass an entry per sequence"
WIDER = "call torch.nn.functional.scaled_dot_product_attention for wider heads"
NO_HINTS: Mapping[int, str] = MappingProxyType({})
FROM_ENVIRONMENT = (
    "; TL_ATTENTION_BATCH_INVARIANT=1 sets batch_invariant in every call" if ALWAYS_INVARIANT else ""
)
# What to pass instead of a tensor of options of another shape
_WANTED = {"rng_state": "pass a seed and an offset", "alibi_slopes": "pass a slope per head of q"}


def describe(x: object) -> str:
    """The "got ..." of an error: shape, dtype and device of a tensor, the repr of anything else, or the type if that is long."""
    if isinstance(x, torch.Tensor):
        if x.is_nested:  # it may have no shape
            return f"a nested tensor of {x.dtype} on {x.device}"
        return f"{tuple(x.shape)} {x.dtype} on {x.device}"
    if isinstance(x, int) and x.bit_length() > 128:  # Python prints no int of more than 4300 digits
        return f"an int of {x.bit_length()} bits"
    text = repr(x)
    return text if len(text) <= 120 and "\n" not in text else f"an object of type {type(x).__name__}"


def expect_tensor(name: str, x: torch.Tensor, hint: str = "", dtype: torch.dtype | None = None) -> None:
    """Expect a dense tensor.

    Args:
        hint: what to do about an object that has no values, such as None.
        dtype: the one that the tensor must have, for the hint about an object that has values; None: that of the values serves.
    """
    if not isinstance(x, torch.Tensor):
        has_values = isinstance(x, (list, tuple, *NUMBER_TYPES)) or hasattr(x, "__array__")
        hint = f"pass torch.as_tensor({name}{f', dtype={dtype}' if dtype else ''})" if has_values else hint
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}{hint and f'; {hint}'}")
    if x.is_nested:
        raise NotImplementedError(
            f"{name}: expected one length per dimension, got a nested tensor; pass its values() and offsets() to flash_attn_varlen_func,"
            " or call torch_backend.register() and scaled_dot_product_attention"
        )
    if x.layout != torch.strided:
        raise NotImplementedError(f"{name}: expected a dense tensor, got {x.layout}; call {name}.to_dense()")


def is_dtensor(x: object) -> bool:
    """True for a DTensor. (Its class takes long to import.)"""
    return type(x).__name__ == "DTensor"


def expect_local(name: str, x: torch.Tensor) -> None:
    """Refuse a DTensor, for an argument whose shards are no calls of their own."""
    if is_dtensor(x):
        raise NotImplementedError(
            f"{name}: expected a tensor of this rank, got a DTensor of placements {tuple(x.placements)}, which is not supported here; pass"
            f" {name}.to_local()"
        )


def expect_operand(
    name: str,
    x: torch.Tensor,
    layout: str,
    ndim: int,
    dtypes: Sequence[torch.dtype] = DTYPES,
    hints: Mapping[int, str] = NO_HINTS,
) -> None:
    """Expect a tensor of these dtypes and this rank whose last dimension is contiguous.

    Args:
        hints: other rank -> what a caller with a tensor of this rank should do.
    """
    expect_tensor(name, x)
    expect_local(name, x)
    if x.dtype not in dtypes:
        *most, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        wanted = f"{', '.join(most)} or {last}" if most else f"the dtype of q, {dtypes[0]}"
        raise TypeError(f"{name}: expected {wanted}, got {x.dtype}; cast it with {name}.to({dtypes[0]})")
    if x.ndim != ndim:
        hint = f"; {hints[x.ndim]}" if x.ndim in hints else ""
        raise ValueError(f"{name}: expected {ndim} dimensions [{layout}], got shape {tuple(x.shape)}{hint}")
    expect_contiguous_last(name, x)


def expect_contiguous_last(name: str, x: torch.Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(
            f"{name}: expected a contiguous last dimension, got strides {x.stride()}; call {name}.contiguous()"
        )


def expect_contiguous(name: str, x: torch.Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor, got strides {x.stride()}; call {name}.contiguous()"
        )


def expect_stored(name: str, x: torch.Tensor) -> None:
    """Expect a tensor whose memory holds its values, for an argument that is never copied; see options.as_stored."""
    if x.is_neg():
        raise ValueError(
            f"{name}: expected a tensor whose memory holds its values, as it is never copied, got a lazily negated view; pass"
            f" {name}.resolve_neg()"
        )


def memory_of(x: torch.Tensor) -> range:
    """Addresses from the first element of x to its last, those between its rows included."""
    if not x.numel():
        return range(0)
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return range(x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size())


def expect_like(
    name: str,
    x: torch.Tensor,
    q: torch.Tensor,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    hint: str = "",
) -> None:
    """Expect a tensor of one of these shapes and dtypes on the device of q. hint: what to pass instead of another shape."""
    expect_tensor(name, x, hint, None if dtypes[0].is_floating_point else dtypes[0])
    expect_local(name, x)
    # One size after the other: torch.compile guards on a comparison of sizes, not on `in`
    if not any(x.ndim == len(shape) and all(map(operator.eq, x.shape, shape)) for shape in shapes):
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"{name}: expected shape {wanted}, got {tuple(x.shape)}{hint and f'; {hint}'}")
    if x.dtype not in dtypes:
        raise TypeError(
            f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}; cast it with {name}.to({dtypes[0]})"
        )
    expect_device(name, x, q)


def expect_device(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    if x.device != q.device:
        raise ValueError(
            f"{name}: expected the device of q, {q.device}, got {x.device}; call {name}.to(q.device)"
        )


def expect_heads_divide(
    names: str, heads: int, heads_kv: int, layout: str, lengths: tuple[int, int] | None = None
) -> None:
    """Expect a number of key heads that divides that of query heads.

    Args:
        layout: dimensions of q, in words.
        lengths: (seqlen_q, seqlen_k), which are the numbers of heads if the caller has confused the dimensions; None: they cannot be.
    """
    if heads and (not heads_kv or heads % heads_kv):
        other = OTHER_LAYOUT.get(layout)
        hint = ""
        if other and lengths and lengths[0] and lengths[1] and lengths[0] % lengths[1] == 0:
            hint = f": call transpose(1, 2) if yours are [{other}]"
        raise ValueError(
            f"{names}: expected a number of heads that divides the {heads} of q, got {heads_kv}; tensors are [{layout}]{hint}"
        )


def expect_head_dims(names_qk: str, name_v: str, head_dim: int, head_dim_v: int) -> None:
    """Expect head dims of at least 1; another check has the maximum."""
    if not head_dim or not head_dim_v:
        raise ValueError(
            f"{names_qk}, {name_v}: expected head dims of at least 1, got {head_dim} for {names_qk} and {head_dim_v} for {name_v}"
        )


def expect_scale(name: str, scale: float | None) -> None:
    """Expect None, or a number whose products in the kernels are finite in fp32."""
    if scale is None:
        return
    is_number = is_scalar(scale)
    if not is_number or scale != scale or scale in (math.inf, -math.inf):
        cast = "" if is_number else f"; pass float({name})"
        if isinstance(scale, bool):
            cast = "; a causal flag is passed by keyword: causal=True, in mha_fwd_interface is_causal=True"
        elif isinstance(scale, torch.Tensor):
            cast = f"; multiply it into q, as float({name}) drops its gradient and waits for the GPU, and pass 1.0"
        raise ValueError(
            f"{name}: expected a finite number, or None for head_dim ** -0.5, got {describe(scale)}{cast}"
        )
    if not -MAX_SCALE <= scale <= MAX_SCALE:
        raise ValueError(
            f"{name}: expected at most 2 ** 60 in magnitude, so that its products in fp32 are finite, got {describe(scale)}; scale q or"
            " k instead"
        )


def expect_bool(name: str, x: bool) -> None:
    if not isinstance(x, bool):
        hint = f"bool({name})" if is_scalar(x) or _is_number_of_array(x) else "True or False"
        raise TypeError(f"{name}: expected a bool, got {describe(x)}; pass {hint}")


def is_int(x: object) -> bool:
    """True for an int or a SymInt, but not for a bool."""
    return isinstance(x, INT_TYPES) and not isinstance(x, bool)


def surely(condition: Any) -> bool:
    """A condition on numbers; False where torch.compile or torch.export cannot know it, as of a length that .item() reads."""
    if torch.compiler.is_compiling() or isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import guard_or_false  # here, as it takes time to import

        return guard_or_false(condition)
    return condition


def holds_ints(x: torch.Tensor) -> bool:
    """True for a tensor of an integer dtype; bool is not one."""
    return not (x.dtype == torch.bool or x.is_floating_point() or x.is_complex())


def is_scalar(x: object) -> bool:
    """True for a number of Python or a symbolic number, but not for a bool."""
    return isinstance(x, NUMBER_TYPES) and not isinstance(x, bool)


def _is_number_of_array(x: object) -> bool:
    """True for a tensor or an array that holds one number, and for a number of NumPy."""
    # A nested tensor may have no shape
    return hasattr(x, "__array__") and not getattr(x, "is_nested", False) and x.shape in ((), (1,))


def cast_hint(name: str, x: object, kind: str, otherwise: str = "") -> str:
    """End of an error about `x`: to cast a number of NumPy or of a tensor to the Python type `kind`, or else `otherwise`."""
    return f"; pass {kind}({name})" if _is_number_of_array(x) else otherwise


def check_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    heads_first: bool,
    varlen: bool = False,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """Check the arguments that every forward has.

    Launch plans are cached by the metadata that this function reads, and a repeated call skips it. A check of anything else must come
    before the lookup of the plan.

    Args:
        heads_first: tensors are [batch, heads, seqlen, head_dim], else [batch, seqlen, heads, head_dim].
        varlen: tensors are [total, heads, head_dim].
        dtypes: dtypes that the caller takes.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes, strides or devices that do not match.
        NotImplementedError: a sensible call that the kernels do not support.
    """
    if varlen:
        layout, ndim, seqlen_axis, heads_axis = PACKED, 3, 0, 1
        hints = {4: "call flash_attn_func for sequences of one length, or pass block_table for keys in pages"}
    elif heads_first:
        layout, ndim, seqlen_axis, heads_axis = HEADS_FIRST, 4, 2, 1
        hints = {3: "pass q[None], k[None] and v[None] for a batch of one"}
    else:
        layout, ndim, seqlen_axis, heads_axis = SEQLEN_FIRST, 4, 1, 2
        hints = {3: "call flash_attn_varlen_func for packed sequences, or pass q[None], k[None] and v[None]"}
    expect_operand("q", q, layout, ndim, dtypes, hints)
    expect_operand("k", k, layout, ndim, dtypes, hints)
    expect_operand("v", v, layout, ndim, dtypes, hints)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"k, v: expected the dtype of q, {q.dtype}, got {k.dtype} and {v.dtype}; cast them to one dtype"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"k, v: expected the device of q, {q.device}, got {k.device} and {v.device}; move them to one device"
        )

    check_shapes(q, k, v, heads_axis, seqlen_axis, varlen, layout)
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    # mha_fwd_interface, the heads-first function, names its arguments sm_scale and is_causal
    scale_name, causal_name = ("sm_scale", "is_causal") if heads_first else ("softmax_scale", "causal")
    if head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"q, k: expected a head_dim of at most {MAX_HEAD_DIM}, got {head_dim}, which is not supported; {WIDER}"
        )
    if head_dim_v > head_dim:
        raise NotImplementedError(
            f"v: expected a head_dim of at most that of q and k, {head_dim}, got {head_dim_v}, which is not supported; pad q and k with"
            f" zeros and pass {scale_name} explicitly"
        )
    expect_scale(scale_name, softmax_scale)
    expect_bool(causal_name, causal)


def check_shapes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads_axis: int,
    seqlen_axis: int,
    varlen: bool = False,
    layout: str = HEADS_FIRST,
) -> None:
    """Check that the shapes of q, k and v match. layout: their dimensions, in words."""
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    heads_kv, seqlen_k = k_shape[heads_axis], k_shape[seqlen_axis]
    if not varlen and not q_shape[0] == k_shape[0] == v_shape[0]:
        raise ValueError(
            f"k, v: expected the batch size of q, {q_shape[0]}, got {k_shape[0]} and {v_shape[0]}; expand or slice them"
        )
    if v_shape[heads_axis] != heads_kv or v_shape[seqlen_axis] != seqlen_k:
        raise ValueError(
            f"v: expected the heads and seqlen of k, {heads_kv} and {seqlen_k}, got {v_shape[heads_axis]} and {v_shape[seqlen_axis]};"
            " pass one value per key"
        )
    lengths = q_shape[seqlen_axis], seqlen_k
    expect_heads_divide("k, v", q_shape[heads_axis], heads_kv, layout, lengths)
    if k_shape[-1] != q_shape[-1]:
        raise ValueError(
            f"k: expected the head_dim of q, {q_shape[-1]}, got {k_shape[-1]}; pad the smaller with zeros"
        )
    expect_head_dims("q, k", "v", q_shape[-1], v_shape[-1])


def check_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float | None, is_causal: bool
) -> None:
    """Check the arguments of the reference: any floating-point dtype, any strides, any head dims, [batch, heads, seqlen, head_dim]."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        expect_tensor(name, x)
        if x.dtype not in FLOATS:
            raise TypeError(
                f"{name}: expected a floating-point dtype, got {x.dtype}; cast it with {name}.float()"
            )
        if x.ndim != 4:
            raise ValueError(
                f"{name}: expected 4 dimensions [batch, heads, seqlen, head_dim], got shape {tuple(x.shape)}"
            )
        expect_device(name, x, q)
    check_shapes(q, k, v, 1, 2)
    expect_scale("sm_scale", sm_scale)
    expect_bool("is_causal", is_causal)


def check_bwd(
    do: torch.Tensor,
    q: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    deterministic: bool,
) -> None:
    """Check the arguments that a backward has beside those of its forward; tensors are [batch, heads, seqlen, head_dim]."""
    shape = (*q.shape[:3], v.shape[3])
    expect_like("do", do, q, (shape,), (q.dtype,))
    expect_like("out", out, q, (shape,), (q.dtype,))
    expect_like("lse", lse, q, (shape[:3],), (torch.float32,))
    expect_bool("deterministic", deterministic)


def expect_boundaries(name: str, x: torch.Tensor) -> None:
    """Expect a tensor of one dimension, not empty: cu_seqlens."""
    hint = "pass the first row of each sequence, then the number of rows"
    expect_tensor(name, x, hint, torch.int32)
    if x.ndim != 1 or not x.shape[0]:
        if x.ndim == 2 and 1 in x.shape:
            hint = f"pass {name}.flatten()"
        raise ValueError(f"{name}: expected shape [batch + 1], got {tuple(x.shape)}; {hint}")


def check_lengths(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> None:
    """Check the lengths of packed sequences, q, k and v [total, heads, head_dim], by metadata: no value of a tensor is read."""
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        expect_boundaries(name, x)
    batch = cu_seqlens_q.shape[0] - 1
    for name, x, entries, hint in (
        ("cu_seqlens_q", cu_seqlens_q, batch + 1, ""),
        ("cu_seqlens_k", cu_seqlens_k, batch + 1, "pass as many entries as in cu_seqlens_q"),
        ("seqused_q", seqused_q, batch, ONE_PER_SEQUENCE),
        ("seqused_k", seqused_k, batch, ONE_PER_SEQUENCE),
    ):
        if x is not None:
            expect_like(name, x, q, ((entries,),), (torch.int32,), hint)
            expect_contiguous(name, x)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        in_tensor = isinstance(length, torch.Tensor) and not length.ndim and holds_ints(length)
        if not in_tensor and not is_int(length):
            hint = cast_hint(name, length, "int", "; pass the length of the longest sequence")
            raise TypeError(f"{name}: expected an int or a 0-d integer tensor, got {describe(length)}{hint}")
        if not in_tensor and surely(length < 0):
            raise ValueError(f"{name}: expected the length of the longest sequence, at least 0, got {length}")
        if not in_tensor and surely(length > MAX_INT):
            raise ValueError(
                f"{name}: expected the length of the longest sequence, at most 2 ** 31 - 1, got {describe(length)}"
            )


def expect_softcap(softcap: float) -> None:
    """Expect 0 for no cap, or a cap within the bounds of the kernels."""
    if not is_scalar(softcap) or not (softcap == 0 or MIN_SOFTCAP <= softcap <= MAX_SOFTCAP):
        hint = cast_hint("softcap", softcap, "float")
        if isinstance(softcap, torch.Tensor) and softcap.requires_grad:
            hint = "; write a cap that is learned as a score_mod: cap * torch.tanh(score / cap)"
        raise ValueError(
            f"softcap: expected 0 for no cap, or a number from 2 ** -60 to 2 ** 60, got {describe(softcap)}{hint}"
        )


def check_options(q: torch.Tensor, batch: int, asked: Any) -> None:
    """Check the options that change scores or probabilities: attributes of `asked`, by public names. q is [.., heads, head_dim]."""
    sizes = {"batch": batch, "heads": q.shape[-2]}
    check_window(asked.window_size)
    expect_softcap(asked.softcap)
    expect_dropout("dropout_p", asked.dropout_p, BY_KEYWORD)
    for field, rule in TENSOR_RULES.items():
        name = PUBLIC_NAMES[field]
        x = getattr(asked, name)
        if x is None:
            continue
        shapes = tuple(tuple(sizes.get(n, n) for n in shape) for shape in rule.shapes)
        expect_like(name, x, q, shapes, rule.dtypes, _WANTED.get(field, "pass a number per head of q"))
        if field not in GRADIENTS and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}: expected a tensor that needs no gradient, got requires_grad=True; pass {name}.detach()"
            )


def expect_dropout(name: str, p: float, hint: str) -> None:
    """Expect a probability that rounds to less than 1, or False. hint: what to do about anything but a number."""
    if p is False or (is_scalar(p) and 0 <= p < 255.5 / 256):
        return
    hint = "" if is_scalar(p) else cast_hint(name, p, "float", hint)
    raise ValueError(
        f"{name}: expected a number from 0 to 255/256 (it is rounded to a multiple of 1/256), got {describe(p)}{hint}"
    )


def check_window(window_size: Sequence[int | None]) -> None:
    if isinstance(window_size, torch.Tensor):
        raise TypeError(
            f"window_size: expected a pair of ints (left, right), got {describe(window_size)}; pass window_size.tolist(), which waits for"
            " the GPU"
        )
    if not (isinstance(window_size, Sequence) and len(window_size) == 2):
        raise TypeError(
            f"window_size: expected a pair (left, right), got {describe(window_size)}; pass {window_hint(window_size)}"
        )
    for bound in window_size:
        if bound is not None and not is_int(bound):
            raise TypeError(
                f"window_size: expected ints, with -1 or None for no limit, got {describe(bound)}; pass int(bound)"
            )
        if bound is not None and bound < -1:
            raise ValueError(
                f"window_size: expected bounds of at least 0, with -1 or None for no limit, got {window_size}; pass None for no limit, as"
                " a negative bound does not shift a window here (FlashAttention-4)"
            )


def window_hint(window_size: object) -> str:
    """Replacement that an error suggests for this window."""
    if is_int(window_size) and window_size >= 0:
        return f"({window_size}, 0) for {window_size} keys before the diagonal and the one on it"
    return "(-1, -1) for no window"


def check_num_splits(num_splits: int) -> None:
    if not is_int(num_splits):
        hint = cast_hint("num_splits", num_splits, "int")
        raise TypeError(
            f"num_splits: expected an int, with 0 for an automatic choice, got {describe(num_splits)}{hint}"
        )
    if num_splits < 0:
        raise ValueError(f"num_splits: expected at least 0, with 0 for an automatic choice, got {num_splits}")
    if num_splits > MAX_INT:
        raise ValueError(f"num_splits: expected 0 to 2 ** 31 - 1, got {describe(num_splits)}; leave it out")


def check_splits(
    num_splits: int, batch_invariant: bool, dropout_p: float = 0.0, max_logits: bool = False
) -> None:
    """Check the arguments that divide keys among CTAs, and that dropout is not asked for beside batch_invariant."""
    check_num_splits(num_splits)
    if max_logits and num_splits > 1:
        raise ValueError(
            f"num_splits: expected 0 or 1 with return_max_logits, which splits no keys, got {num_splits}; leave it out"
        )
    expect_bool("batch_invariant", batch_invariant)
    if not batch_invariant:
        return
    if num_splits > 1:
        raise ValueError(
            f"num_splits, batch_invariant: expected one of them, as batch_invariant splits no keys, got {num_splits} and True; leave"
            f" num_splits at 0{FROM_ENVIRONMENT}"
        )
    if dropout_p:
        raise ValueError(
            f"dropout_p: expected 0 with batch_invariant, as a dropout mask depends on the place in the batch, got {describe(dropout_p)};"
            f" leave one of them out{FROM_ENVIRONMENT}"
        )


def check_packed(name: str, x: torch.Tensor, layout: str, parts: int) -> None:
    """Check a tensor that packs `parts` tensors in its third-last dimension."""
    expect_tensor(name, x)
    if x.ndim != len(layout.split(", ")) or x.shape[-3] != parts:
        packed = ("q, k, v", "k, v")[parts == 2]
        raise ValueError(
            f"{name}: expected shape [{layout}], got {tuple(x.shape)}; pass torch.stack(({packed}), -3)"
        )
    if is_dtensor(x) and any(place.is_shard(x.ndim - 3) for place in x.placements):
        raise NotImplementedError(
            f"{name}: expected placements that do not shard dimension {x.ndim - 3}, which packs {parts} tensors, got"
            f" {tuple(x.placements)}; call .redistribute()"
        )


@functools.cache
def _gpu_fault(device: torch.device) -> str | None:
    """The error for a GPU that is not Hopper; None for Hopper."""
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0):
        return None
    name = f"{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]})"
    return f"q: expected a Hopper GPU (sm_90: H100, H200, H800, H20, GH200), got {name}"


def check_device(q: torch.Tensor) -> None:
    """Raise NotImplementedError unless q is on a Hopper GPU."""
    if q.device.type != "cuda":
        hint = "compute shapes under FakeTensorMode" if q.is_meta else "move it with q.cuda()"
        raise NotImplementedError(
            f"q: expected a tensor on a Hopper GPU, or on the CPU for the slow reference, got {q.device}; {hint}"
        )
    if fault := _gpu_fault(q.device):
        raise NotImplementedError(fault)


def check_config(problem: object, config: object, reason: str | None) -> None:
    """Refuse an explicit config that cannot run a problem; `reason` is None for one that can."""
    if reason:
        raise ValueError(f"config: expected one that can run {problem}, got {config}: {reason}")


def check_one_tile(keys: int, seqlen_k: int) -> None:
    """Refuse more keys than the tile of a config that wants all of them in one."""
    if seqlen_k > keys:
        raise ValueError(
            f"config: expected at most {keys} keys with one_tile, got {seqlen_k}; use a config without it"
        )


def check_dropout_batch(dropout_p: float, batch: int, max_batch: int) -> None:
    """Refuse a backward with dropout whose batch needs more than one launch."""
    if dropout_p and batch > max_batch:
        raise NotImplementedError(
            f"dropout_p: expected a batch of at most {max_batch} in a backward with dropout, got {batch}; split the batch"
        )


def check_cache_strides(name: str, cache: torch.Tensor, cache_step: int, row_step: int) -> None:
    """Check that the distance between caches or pages is a whole number of rows; both steps are strides."""
    if cache_step % row_step:
        raise ValueError(
            f"{name}: expected stride(0) to be a multiple of stride(1), got {cache.stride()}; allocate it as [caches or pages, rows,"
            " heads, head_dim] or [caches or pages, heads, rows, head_dim]"
        )
