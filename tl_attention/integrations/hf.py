"""Hugging Face transformers: attn_implementation="tl_attention" after one register()."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any, NamedTuple

import torch

from tl_attention.api.flash import flash_attn_func, flash_attn_varlen_func
from tl_attention.checks import lengths as checks_lengths
from tl_attention.checks.common import (
    FWD_DTYPES,
    check_shapes,
    expect_bool,
    expect_scale,
    expect_softcap,
    is_dtensor,
)
from tl_attention.checks.transforms import ARGUMENT_ERRORS, Renaming
from tl_attention.integrations.hf_checks import (
    VARLEN_ROWS,
    check_asked,
    check_documents,
    check_flex,
    check_inputs,
    check_mask,
    check_mask_lengths,
    check_no_others,
    check_others,
    check_packing,
    check_read,
    check_window_keys,
)
from tl_attention.integrations.hf_decode import decode, decode_op
from tl_attention.integrations.hf_flex import flex_forward, needs_flex
from tl_attention.integrations.hf_mask import Mask
from tl_attention.integrations.hf_mask_function import attention_mask, is_traced, packed_rows, whole

__all__ = ["attention_forward", "attention_mask", "register"]

NAME = "tl_attention"
MAX_DECODE_QUERIES = 64  # per sequence; more go to flash_attn_func
_NAMES = tuple(
    checks_lengths.Names(f"cu_seq_lens_{x}", f"max_length_{x}", "", name)
    for x, name in (("q", "query"), ("k", "key"))
)
_ERROR_NAMES = Renaming(
    {
        "q": "query", "k": "key", "v": "value", "k_cache": "key", "v_cache": "value",
        "softmax_scale": "scaling", "dropout_p": "dropout", "window_size": "sliding_window", "learnable_sink": "s_aux",
        "cu_seqlens_q": "cu_seq_lens_q", "cu_seqlens_k": "cu_seq_lens_k",
        "max_seqlen_q": "max_length_q", "max_seqlen_k": "max_length_k",
    }
)  # fmt: skip


def register(*, batch_invariant: bool = False) -> None:
    """Make "tl_attention" an attention implementation of transformers, in this process; the last call counts.

    Call it before a model asks for the implementation: transformers does not know the name otherwise.

        tl_attention.hf.register()
        model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation="tl_attention")
        model.set_attn_implementation("tl_attention")  # of a model that exists; "sdpa" or "eager" for transformers' own

    Args:
        batch_invariant: of each layer of each model, as in flash_attn_func, unless the model's call says otherwise; dropout is refused.
    Raises:
        ImportError: no transformers, or a version before 5, whose mask interface is another one.
        TypeError: batch_invariant is no bool.
    """
    expect_bool("batch_invariant", batch_invariant)
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        fault = None if "q_offset" in inspect.signature(sdpa_mask).parameters else "an older version"
    except ImportError as error:
        fault = str(error)
    if fault:
        raise ImportError(
            f"tl_attention.hf: expected transformers 5 or later, got {fault}; pip install 'transformers>=5'"
        )
    invariant = functools.partial(attention_forward, batch_invariant=True)
    AttentionInterface.register(NAME, invariant if batch_invariant else attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | torch.Tensor | None = None,
    max_length_k: int | torch.Tensor | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    position_bias: torch.Tensor | None = None,
    cache: Any = None,
    output_attentions: bool | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, for the AttentionInterface of transformers.

    Up to MAX_DECODE_QUERIES queries that need no gradient, with more keys than queries, run flash_attn_with_kvcache: key and value are the
    static or dynamic cache, which is not copied.

    Args:
        module: the layer.
        query: [batch, heads, seqlen_q, head_dim], bfloat16, float16 or float32. A query in float32 is cast with key and value to the
            dtype of autocast, of a quantized model or of the layer's first Linear, as in transformers' flash_attention_2; inside autocast
            a key or value in float32 is cast, too.
        key, value: [batch, heads_kv, seqlen_k, head_dim or head_dim_v]. Like query they are copied if their last dimension is not
            contiguous, and in a decode step if they are expanded or TMA cannot read them where they are.
        attention_mask: the result of attention_mask(), which is the whole mask: is_causal, sliding_window and the attributes of the layer
            change nothing beside it. Or a BlockMask or a mask [batch or 1, heads or 1, seqlen_q or 1, at least seqlen_k], bool or to be
            added to the scores, to which the same applies. None: no mask but that of is_causal and sliding_window.
        position_bias: float [batch or 1, heads or 1, seqlen_q or 1, at least seqlen_k], added to the scores; it may need a gradient.
        sliding_window: number of keys that a query sees, its own included; in a bidirectional layer, on either side. None: no window.
        is_causal: None: as the attributes is_causal of the layer and of its config say, causal where they are missing. A layer of a
            model that says causal in this way has to have a mask, cu_seq_lens_q, or a single query.
        s_aux: [heads], the scores of the sink.
        cu_seq_lens_q, cu_seq_lens_k: [sequences + 1], bounds of packed sequences in batch * seqlen; they override padding and documents of
            attention_mask, and are refused beside a BlockMask, a 4-D mask or position_bias. Both or neither. Their values are checked only
            with TL_ATTENTION_CHECK_LENGTHS=1: see checks/lengths.py.
        batch_invariant: as in flash_attn_func; a model passes it on, as model(ids, batch_invariant=True).
        max_length_q, max_length_k: upper bounds of the lengths in cu_seq_lens_q and cu_seq_lens_k; None: batch * seqlen.
        position_ids: [1, seqlen_q]: with batch 1, a document begins at each smallest position, and no document sees another one, as in
            flash_attention_2; not beside padding, cu_seq_lens_q, a BlockMask or 4-D mask of the caller. Positions are read once per tensor
            (one sync); in torch.compile and CUDA graphs several documents fail on the device. Of another shape: ignored.
        kwargs: other arguments that models pass to every attention, see HARMLESS of hf_checks.py; others than these have to be None.
    Returns:
        (out [batch, seqlen_q, heads, head_dim_v], contiguous, None). Rows of padding are 0.
    Raises:
        NotImplementedError: a paged cache, output_attentions=True, a mask of another form or none where the layer alone says that it is
            causal, an unknown argument, documents in position_ids
            beside keys from before, or dropout or packed sequences beside a BlockMask, a 4-D mask or position_bias.
        TypeError, ValueError, NotImplementedError: see flash_attn_func.
    """
    check_inputs(query, key, value, s_aux, dropout, is_causal)
    check_no_others(cache, output_attentions)
    check_others(kwargs)
    check_mask(attention_mask, query.shape[0])
    expect_scale("scaling", scaling)
    expect_bool("deterministic", deterministic)
    if not isinstance(attention_mask, Mask):
        check_window_keys("sliding_window", sliding_window)
    check_packing(query, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    query, key, value = _cast(module, query, key, value)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    packed = cu_seq_lens_q is not None
    rows, first_query = None, key.shape[2] - query.shape[2]
    if isinstance(attention_mask, Mask):
        if not packed:
            check_mask_lengths(attention_mask, query, key)
            rows = attention_mask.rows_for(query.shape[2])
        first_query = attention_mask.first_query
        causal, left, right = attention_mask.causal, attention_mask.left, attention_mask.right
    else:
        causal = is_causal
        if causal is None:
            causal = _layer_is_causal(module)
            if attention_mask is None and not packed and query.shape[2] > 1:
                check_asked(module, causal)
        left, right = _window(sliding_window, causal)
    softcap = 0.0 if softcap is None else softcap
    expect_softcap(softcap)

    documents = None
    if isinstance(attention_mask, Mask) and attention_mask.starts is not None:
        documents = attention_mask.starts.cumsum(1)
    elif not packed and _may_hold_documents(attention_mask, position_ids, query, key, causal):
        found = _documents(position_ids, attention_mask)
        if found is not None:
            check_documents(query, key, first_query)
            documents, rows = found.ids, found.rows
            if attention_mask is None or attention_mask.block_mask is None:
                key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if needs_flex(attention_mask, position_bias):
        check_flex(dropout, packed)
        window = causal, left, right
        masks = attention_mask, position_bias, documents
        modes = deterministic, batch_invariant
        return flex_forward(query, key, value, *masks, scaling, window, softcap, s_aux, *modes), None
    try:  # here, as the calls below see other layouts, and packed rows of no batch
        check_shapes(query, key, value, 1, 2)
    except ValueError as error:
        raise _ERROR_NAMES.of(error) from None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, s_aux))
    options = {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "causal": causal,
        "window_size": (left, right),
        "softcap": softcap,
        "deterministic": deterministic,
        "batch_invariant": batch_invariant,
        "learnable_sink": s_aux,
    }
    try:
        if _is_decode_step(q, k, v, rows) and not (packed or needs_grad or dropout):
            if q.shape[1] == 1:
                q = query.reshape(q.shape)  # same memory, dense strides: the kernel's load needs no copy
            attend = decode_op if torch.compiler.is_compiling() else decode
            lengths = _cache_lengths(rows, q.shape[0])
            out = attend(q, k, v, *lengths, scaling, causal, left, right, softcap, s_aux, batch_invariant)
        elif packed or rows is not None:
            tokens = [x.flatten(0, 1) for x in (q, k, v)]
            if packed:
                bounds = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
                lengths = _packed_lengths(*tokens[:2], *bounds)
            else:
                bounds, used = rows[:VARLEN_ROWS].split(2)
                lengths = *bounds, q.shape[1], k.shape[1]
                options |= {"seqused_q": used[0, :-1], "seqused_k": used[1, :-1]}
            out = flash_attn_varlen_func(*tokens, *lengths, **options).unflatten(0, q.shape[:2])
        else:
            out = flash_attn_func(q, k, v, **options)
    except ARGUMENT_ERRORS as error:
        raise _ERROR_NAMES.of(error) from None
    return out.contiguous(), None


def _cast(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """query, key and value in one dtype, where float32 comes from a layer whose weights are 16-bit, as with PEFT."""
    qkv = query, key, value
    single = [x.dtype == torch.float32 for x in qkv]
    if not any(single):
        return qkv
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return tuple(x.to(dtype) if is_single else x for x, is_single in zip(qkv, single, strict=True))
    dtype = _weights_dtype(module) if single[0] else None
    return qkv if dtype is None else tuple(x.to(dtype) for x in qkv)


def _weights_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """Dtype of a quantized model, or of the layer's first Linear; None if that is none that attention has."""
    config = getattr(module, "config", None)
    if hasattr(config, "_is_quantized"):
        dtype = config.dtype
    elif isinstance(module, torch.nn.Module):
        weights = (x.weight.dtype for x in module.modules() if isinstance(x, torch.nn.Linear))
        dtype = next(weights, None)
    else:
        return None
    return dtype if dtype in FWD_DTYPES else None


class _Documents(NamedTuple):
    """Documents of one row: ids [1, seqlen], the number of each token's document; rows of a Mask."""

    ids: torch.Tensor
    rows: torch.Tensor


# Positions that were read last, their version and their documents: all layers of a model get the same tensor
_last: tuple[weakref.ref, int, _Documents | None] | None = None


def _may_hold_documents(
    attention_mask: Any, position_ids: Any, query: torch.Tensor, key: torch.Tensor, causal: bool
) -> bool:
    """True if position_ids may tell documents apart that the mask does not: see attention_forward."""
    batch, _, seqlen, _ = query.shape
    if batch != 1 or seqlen < 2 or not isinstance(position_ids, torch.Tensor):
        return False
    if attention_mask is not None and not isinstance(attention_mask, Mask):
        return False
    if isinstance(attention_mask, Mask) and attention_mask.padded is True:
        return False
    # More keys than queries in a bidirectional layer: those of another sequence
    fits = position_ids.shape in ((1, seqlen), (seqlen,))
    return fits and (causal or key.shape[2] == seqlen)


def _documents(position_ids: torch.Tensor, mask: Mask | None) -> _Documents | None:
    """Documents that begin at each smallest position of position_ids [1, seqlen]; None: one.

    Waits for the GPU once per tensor of positions. The mask of a forward keeps them, as a tensor of inference mode has no version by which
    a change would show.
    """
    global _last
    check_read("position_ids", position_ids)
    positions = whole(position_ids).reshape(1, -1)
    if is_traced(positions):
        one = (positions[:, 1:] > positions[:, :1]).all()
        if mask is not None and isinstance(mask.padded, torch.Tensor):
            one = one | mask.padded
        torch._assert_async(
            one,
            "position_ids: expected one document per row in torch.compile and CUDA graphs, got positions that start over; pass"
            " cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k",
        )
        return None
    kept = None if mask is None else mask.__dict__.get("_documents")
    if kept is not None and kept[0] is position_ids:
        return kept[1]
    version = -1 if position_ids.is_inference() else position_ids._version
    last = _last  # another thread may set it meanwhile
    if last is not None and version >= 0 and last[0]() is position_ids and last[1] == version:
        return last[2]
    starts = positions == positions.min()
    starts[:, 0] = True
    found = None
    if starts.sum() > 1:
        found = _Documents(starts.cumsum(1), packed_rows(starts))
    _last = weakref.ref(position_ids), version, found
    if mask is not None and version < 0:
        mask.__dict__["_documents"] = position_ids, found
    return found


def _window(keys: int | None, causal: bool) -> tuple[int, int]:
    """window_size of flash_attn_func for a window of so many keys, the query's own included."""
    if keys is None:
        return -1, -1
    return keys - 1, 0 if causal else keys - 1


def _is_decode_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor | None) -> bool:
    """True for few queries against more keys, of types that flash_attn_with_kvcache takes; [batch, seqlen, heads, head_dim]."""
    has_cache_rows = rows is None or rows.shape[0] > VARLEN_ROWS
    # In this order: as many queries as keys, of any number, set no bound to a length that is a symbol
    few_queries = q.shape[1] < k.shape[1] and q.shape[1] <= MAX_DECODE_QUERIES
    # flash_attn_func copies other head dims, and takes fp32 and DTensors
    others = q.shape[3] % 8 or v.shape[3] % 8 or q.dtype == torch.float32 or is_dtensor(q)
    return has_cache_rows and few_queries and not others


def _cache_lengths(rows: torch.Tensor | None, batch: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """cache_seqlens and cache_leftpad [batch] of flash_attn_with_kvcache, from the rows of the mask behind the first ones."""
    if rows is None:
        return None, None
    seqlens, *leftpad = rows[VARLEN_ROWS:, :batch].unbind()
    return seqlens, leftpad[0] if leftpad else None


def _packed_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int | torch.Tensor | None,
    max_k: int | torch.Tensor | None,
) -> tuple:
    """cu_seqlens and max_seqlen of flash_attn_varlen_func for the caller's packed sequences; q, k: [total, heads, head_dim]."""
    longest = (q.shape[0] if max_q is None else max_q), (k.shape[0] if max_k is None else max_k)
    lengths = _as_int32(cu_q), _as_int32(cu_k), *longest
    if checks_lengths.ALWAYS:
        lengths = checks_lengths.checked_lengths(q, k, (*lengths, None, None), _NAMES)[:4]
    return lengths


def _as_int32(bounds: torch.Tensor) -> torch.Tensor:
    """Bounds of sequences in int32. Larger values become the largest one, so that checks of values see them."""
    if bounds.dtype == torch.int32:
        return bounds
    limits = torch.iinfo(torch.int32)
    return bounds.to(torch.int64).clamp(limits.min, limits.max).to(torch.int32)


def _layer_is_causal(module: torch.nn.Module) -> bool:
    """True unless the layer, or a config that makes a causal model bidirectional, says otherwise."""
    config = getattr(module, "config", None)
    return bool(getattr(module, "is_causal", True) and getattr(config, "is_causal", True))
