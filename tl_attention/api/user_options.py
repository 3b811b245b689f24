"""Attention with options as users pass them: their checks and canonical form.

attention_with_options is the entry of the public functions. A call whose signature is that of an earlier one skips the checks, and finds
its launch plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tl_attention import launch
from tl_attention.checks.common import (
    FWD_DTYPES,
    check_deterministic,
    check_fwd,
    check_lengths,
    check_num_splits,
    check_options,
    describe,
    is_dtensor,
)
from tl_attention.checks.fp32 import check_precision, runs_in_bf16
from tl_attention.problem.attn_problem import Precision
from tl_attention.problem.options import Call, Options, as_stored, as_stored_eagerly, canonical_window
from tl_attention.torch_ops.dropout import draw, dropout_state_op
from tl_attention.torch_ops.dtensors import Axes, Shards, axes_of_rows
from tl_attention.torch_ops.ops import (
    Outputs,
    attend,
    attention,
    has_plain_values,
    in_bf16,
    is_traced,
    run_eagerly,
    scale_of,
)

# Exact types of the numbers in a signature: all have a hash and hold no tensor
_NUMBER_TYPES = frozenset((int, float, bool, type(None)))


class UserOptions(NamedTuple):
    """Options of a call as passed to a public function, unchecked; flash.py documents them."""

    window_size: tuple[int | None, int | None]
    softcap: float
    dropout_p: float
    alibi_slopes: torch.Tensor | None
    learnable_sink: torch.Tensor | None
    rng_state: torch.Tensor | None
    num_splits: int
    # lengths of packed sequences: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    lengths: tuple[Any, ...] | None
    precision: Precision | None = None


def checked_options(q: torch.Tensor, keys: int, causal: bool, asked: UserOptions) -> tuple[bool, Options]:
    """Check options; return (causal, options) in canonical form. keys: upper bound of the keys of a packed sequence."""
    cu_seqlens_q = cu_seqlens_k = seqused_q = seqused_k = None
    max_seqlens, batch = [0, 0], q.shape[0]
    if asked.lengths is not None:
        check_lengths(q, *asked.lengths)
        cu_seqlens_q, cu_seqlens_k, *max_seqlens, seqused_q, seqused_k = asked.lengths
        batch = cu_seqlens_q.shape[0] - 1
        # Reading a tensor would synchronize with the GPU; the total number of rows bounds a length, too
        rows = q.shape[0], keys
        max_seqlens = [
            n if isinstance(x, torch.Tensor) else x for x, n in zip(max_seqlens, rows, strict=True)
        ]
    check_num_splits(asked.num_splits)
    window_size, softcap, dropout_p, alibi_slopes, sink, rng_state, *_ = asked
    check_options(q, batch, window_size, softcap, dropout_p, alibi_slopes, sink, rng_state)
    causal, window = canonical_window(causal, window_size)
    return causal, Options(
        window=window,
        softcap=float(softcap),
        dropout_p=float(dropout_p),
        max_seqlen_q=max_seqlens[0],
        max_seqlen_k=max_seqlens[1],
        num_splits=asked.num_splits,
        parts=check_precision(q, asked.precision),
        rng_state=_state_of_dropout(q, dropout_p, rng_state),
        alibi_slopes=None if alibi_slopes is None else as_stored_eagerly(alibi_slopes).contiguous(),
        sink=None if sink is None else as_stored_eagerly(sink).contiguous(),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )


def _state_of_dropout(
    q: torch.Tensor, dropout_p: float, rng_state: torch.Tensor | None
) -> torch.Tensor | None:
    """State of dropout in a launch: by default drawn; None without dropout."""
    if not dropout_p:
        return None
    if rng_state is None:
        return dropout_state_op(q) if is_traced() else draw(q)
    return rng_state


def _options_again(q: torch.Tensor, options: Options, asked: tuple[Any, ...]) -> Options:
    """Options of a call whose signature is known.

    Args:
        options: those of an earlier call, without its tensors.
        asked: fields of UserOptions in order.
    """
    _, _, dropout_p, slopes, sink, rng_state, _, lengths, _ = asked
    if lengths is None:
        if slopes is None and sink is None and not dropout_p:
            return options
        cu_seqlens_q = cu_seqlens_k = seqused_k = None
    else:
        cu_seqlens_q, cu_seqlens_k, _, _, _, seqused_k = lengths
    return options.with_tensors(
        rng_state=_state_of_dropout(q, dropout_p, rng_state),
        alibi_slopes=None if slopes is None else as_stored(slopes).contiguous(),
        sink=None if sink is None else as_stored(sink).contiguous(),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
    )


def _signature(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    deterministic: bool,
    asked: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """Key of a call: all that its checks and its launch plan depend on. None: the call is checked each time.

    It has metadata of tensors, and numbers with their types, as 1, 1.0 and True are equal. It holds no tensor. q is on a GPU; k and v
    on another device have another index.

    Args:
        q, k, v: plain tensors. causal, deterministic: two bools.
        asked: fields of UserOptions in order.
    """
    window_size, softcap, dropout_p, slopes, sink, rng_state, num_splits, lengths, precision = asked
    # The precision of fp32 tensors depends on a setting of torch
    if precision is not None or q.dtype is torch.float32 or type(window_size) not in (tuple, list):
        return None
    if lengths is None:
        numbers = *window_size, softcap, dropout_p, num_splits
        tensors = slopes, rng_state
    else:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k = lengths
        if seqused_q is not None:  # launch_forward clears unused rows
            return None
        numbers = *window_size, softcap, dropout_p, num_splits, max_seqlen_q, max_seqlen_k
        tensors = slopes, rng_state, cu_seqlens_q, cu_seqlens_k, seqused_k
    types = tuple(map(type, numbers))
    if not _NUMBER_TYPES.issuperset(types):
        return None
    facts: list[Any] = []
    try:
        for x in tensors:
            if x is None:
                facts.append(None)
            elif type(x) is torch.Tensor:
                facts += x.shape, x.stride(), x.dtype, x.device
            else:
                return None
        if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
            return None
        if sink is not None:
            if type(sink) not in (torch.Tensor, torch.nn.Parameter):
                return None
            facts += sink.shape, sink.stride(), sink.dtype, sink.device
        return (
            q.shape, q.stride(), q.dtype, q.get_device(),
            k.shape, k.stride(), k.dtype, k.get_device(),
            v.shape, v.stride(), v.dtype, v.get_device(),
            causal, deterministic, types, numbers, *facts,
        )  # fmt: skip
    except RuntimeError:  # a nested or sparse tensor, which the checks refuse
        return None


class _KnownCall(NamedTuple):
    """Facts that follow from the signature of a call that has passed the checks. They hold no tensor.

    Attributes:
        causal, options: in canonical form; the options without their tensors.
        plan: None: all options are off.
    """

    causal: bool
    options: Options | None
    plan: Callable[..., Outputs] | None


def attention_with_options(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    asked: tuple[Any, ...],
) -> Outputs:
    """(out, lse) of attention with options, from unchecked arguments; lse is natural, sequence dimensions come first.

    Args:
        asked: fields of UserOptions in order: a tuple takes less host time to make.
    """
    traced = is_traced() or not (type(q) is type(k) is type(v) is torch.Tensor)
    key = None
    if not traced and has_plain_values(q, softmax_scale, causal, deterministic):
        key = _signature(q, k, v, causal, deterministic, asked)
        known = None if key is None else launch.kept_call(key)
        if known is not None:
            causal, options, plan = known
            if plan is None:
                return attention(q, k, v, softmax_scale, causal, False, False, deterministic)
            call = scale_of(q, softmax_scale), causal, False, False, deterministic
            return run_eagerly(q, k, v, call, _options_again(q, options, asked), plan)

    asked = UserOptions(*asked)
    varlen = asked.lengths is not None
    if is_dtensor(q) or is_dtensor(k) or is_dtensor(v):
        return _on_shards(q, k, v, (softmax_scale, causal, deterministic), asked)
    check_fwd(q, k, v, softmax_scale, causal, heads_first=False, varlen=varlen, dtypes=FWD_DTYPES)
    check_deterministic(deterministic)
    causal, options = checked_options(q, k.shape[0], causal, asked)
    if options.is_off:
        results = attention(q, k, v, softmax_scale, causal, False, False, deterministic)
        if key is not None:
            launch.keep_call(key, _KnownCall(causal, None, None))
        return results
    if runs_in_bf16(q, options.parts):
        given = softmax_scale, causal, deterministic, asked._replace(precision=None)
        return in_bf16(lambda *half: attention_with_options(*half, *given), q, k, v)
    call = Call(scale_of(q, softmax_scale), causal, False, False, deterministic)
    results = attend(q, k, v, call, options)
    plan = None if key is None else launch.fwd_plan(q, k, v, causal, False, options)
    if plan is not None:
        launch.keep_call(key, _KnownCall(causal, options.without_tensors(), plan))
    return results


def _on_shards(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: tuple[Any, ...], asked: UserOptions
) -> Outputs:
    """attention_with_options() of DTensors, on this rank's batch entries and heads.

    Args:
        call: softmax_scale, causal, deterministic.
    """
    if asked.dropout_p:
        raise NotImplementedError(
            f"dropout_p: expected 0 with DTensors, as a mask depends on batch entry and head, got {describe(asked.dropout_p)}; call"
            " .to_local() on q, k and v"
        )
    shards = Shards(q, k, v, axes_of_rows(False, packed=asked.lengths is not None))
    slopes = asked.alibi_slopes
    own = {
        "learnable_sink": shards.option("learnable_sink", asked.learnable_sink, Axes(None, 0)),
        "alibi_slopes": shards.option(
            "alibi_slopes", slopes, Axes(0, 1) if getattr(slopes, "ndim", 1) == 2 else Axes(None, 0)
        ),
    }
    if asked.lengths is not None:
        for x in asked.lengths:
            if is_dtensor(x) and not all(placement.is_replicate() for placement in x.placements):
                raise NotImplementedError(
                    "cu_seqlens, seqused: expected replicated DTensors or tensors of this rank beside DTensors, got placements"
                    f" {tuple(x.placements)}; pass .full_tensor()"
                )
        own["lengths"] = tuple(x.to_local() if is_dtensor(x) else x for x in asked.lengths)
    own = asked._replace(rng_state=None, **own)
    return shards.run(lambda *local: attention_with_options(*local, *call, own), q, k, v)
