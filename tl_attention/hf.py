"""Hugging Face transformers: attn_implementation="tl_attention" after one register()."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from tl_attention.flash import flash_attn_func, flash_attn_varlen_func

NAME = "tl_attention"
MAX_DECODE_QUERIES = 64  # of a sequence, that are taken to its cache as it lies
_REFUSED = "expected causal, full, a window, packed sequences or chunks"
_INSTEAD = 'use attn_implementation="sdpa" or "eager"'
_CACHE_ROW = 4  # of a mask, the first of those that flash_attn_with_kvcache takes


def register() -> None:
    """Make "tl_attention" an attention implementation of transformers; calling it again changes nothing.

        tl_attention.hf.register()
        model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation="tl_attention")

    Raises:
        ImportError: no transformers, or one before 5, whose masks are asked for in other words.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        fault = None if "q_offset" in inspect.signature(sdpa_mask).parameters else "an older one"
    except ImportError as error:
        fault = str(error)
    if fault:
        raise ImportError(
            f"tl_attention.hf: expected transformers 5, got {fault}; pip install 'transformers>=5'"
        )
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
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
    position_bias: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one layer, as transformers' AttentionInterface asks for it.

    Where no gradient is asked for, up to MAX_DECODE_QUERIES queries and more keys go to flash_attn_with_kvcache: key and value are the
    cache, static or dynamic, of which nothing is copied.

    Args:
        module: the layer; its is_causal and that of its config serve where the argument is None.
        query: [batch, heads, seqlen_q, head_dim], bfloat16 or float16; fp32 within autocast is cast to its dtype.
        key, value: [batch, heads_kv, seqlen_k, head_dim or head_dim_v].
        attention_mask: what attention_mask() made: None, or which rows of query and key are a sequence's.
        sliding_window: keys that a query sees, itself included; of a layer that is not causal, on either side.
        s_aux: [heads], the scores of a sink.
        cu_seq_lens_q, cu_seq_lens_k: [sequences + 1], bounds of packed sequences in batch * seqlen; they go before the mask.
        max_length_q, max_length_k: of the longest sequence, or more.
        kwargs: what else models pass, which changes nothing here.
    Returns:
        (out [batch, seqlen_q, heads, head_dim_v], None). Rows that are padding are 0.
    Raises:
        NotImplementedError: position_bias, a paged cache, a mask made elsewhere.
        TypeError, ValueError, NotImplementedError: as flash_attn_func.
    """
    for name, given in (("position_bias", position_bias), ("cache", cache)):
        if given is not None:
            raise NotImplementedError(
                f"{name}: expected None, got {type(given).__name__}, which tl_attention does not support;"
                ' use attn_implementation="sdpa"'
            )
    if attention_mask is not None and attention_mask.ndim != 3:
        raise NotImplementedError(
            f"attention_mask: expected a 2-D mask of padding given to the model, got one of shape {tuple(attention_mask.shape)} that"
            ' was made elsewhere; use attn_implementation="sdpa" for masks of your own'
        )
    if query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)

    if is_causal is None:  # a config may have masks of a causal model made bidirectional
        config = getattr(module, "config", None)
        is_causal = getattr(module, "is_causal", True) and getattr(config, "is_causal", True)
    causal = bool(is_causal)
    reach = -1 if sliding_window is None else sliding_window - 1
    window = (reach, 0 if causal and sliding_window is not None else reach)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    batch, seqlen_q, seqlen_k = *q.shape[:2], k.shape[1]
    packed = cu_seq_lens_q is not None and cu_seq_lens_k is not None
    differentiable = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, s_aux)
    )
    cached = attention_mask is None or attention_mask.shape[0] > _CACHE_ROW
    few = seqlen_q <= MAX_DECODE_QUERIES and seqlen_q < seqlen_k
    if cached and few and not (packed or differentiable or dropout):
        rows = () if attention_mask is None else attention_mask[_CACHE_ROW:, 0, :batch].unbind()
        seqlens, leftpad = (*rows, None, None)[:2]
        if seqlen_q == 1:
            q = query.reshape(q.shape)  # strides of a dense tensor, which is not copied where it is loaded
        decode = _decode_op if torch.compiler.is_compiling() else _decode
        return decode(q, k, v, seqlens, leftpad, scaling, causal, *window, softcap or 0.0, s_aux), None

    options = {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "causal": causal,
        "window_size": window,
        "softcap": softcap or 0.0,
        "deterministic": deterministic,
        "learnable_sink": s_aux,
    }
    if packed:
        lengths = cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32)
        lengths += tuple(
            batch * seqlen if given is None else given
            for given, seqlen in ((max_length_q, seqlen_q), (max_length_k, seqlen_k))
        )
    elif attention_mask is not None:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = attention_mask[:_CACHE_ROW, 0].unbind()
        lengths = cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k
        options |= {"seqused_q": seqused_q[:-1], "seqused_k": seqused_k[:-1]}
    else:
        return flash_attn_func(q, k, v, **options), None
    out = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *lengths, **options)
    return out.unflatten(0, (batch, seqlen_q)), None


def _decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqlens: torch.Tensor | None,
    leftpad: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """flash_attn_with_kvcache of keys that are all in the cache; arguments that an op can have."""
    from tl_attention.kvcache import flash_attn_with_kvcache

    return flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=seqlens,
        cache_leftpad=leftpad,
        softmax_scale=scale,
        causal=causal,
        window_size=(left, right),
        softcap=softcap,
        learnable_sink=sink,
    )


_decode_op = torch.library.custom_op("tl_attention::hf_decode", _decode, mutates_args=())


@_decode_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of the layers of one kind, as transformers' AttentionMaskInterface asks for it; no matrix of queries and keys.

    Padding may lie on either side of a sequence, not within. What else a mask hides has to be what tl_attention computes: causal
    or not, a window, packed sequences, chunks. Outside torch.compile it is looked at (one sync); a compiled model is trusted, and
    gives packed sequences by cu_seq_lens_q and cu_seq_lens_k.

    Args:
        q_offset, kv_offset: the positions of the first query and the first key; q_offset is a tensor with a static cache.
        mask_function: (batch, head, query, key) -> whether the query sees the key, by positions.
        attention_mask: [batch, at most kv_offset + kv_length], False where a token is padding.
        local_size: keys within the window, itself included; on either side of a bidirectional one, without it; or of a chunk.
        use_vmap: mask_function has parts that the caller added.
        allow_is_bidirectional_skip: None of a causal mask.
    Returns:
        None where batch, lengths and window say all; else int32 [4 to 6, 1, sequences + 1]: cu_seqlens_q and cu_seqlens_k in
        batch * q_length and batch * kv_length, how many of these queries and keys each sequence uses, and a 0. Where all queries
        of a sequence, or none, come after its last key, a fifth row begins with cache_seqlens [batch], and if there is padding
        a sixth with cache_leftpad [batch].
    Raises:
        NotImplementedError: any other mask.
    """
    if attention_mask is not None and attention_mask.ndim == 3:
        return attention_mask  # made ahead by generate()
    if use_vmap:
        raise NotImplementedError(
            f"mask_function: {_REFUSED}, got one with parts of the caller's; {_INSTEAD}"
        )
    causal = allow_is_bidirectional_skip is None
    shift = q_offset - kv_offset  # the column of the first query; that of the first key is 0
    end = shift + q_length if causal else kv_length
    real = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    padded = real is not None
    shared = causal or local_size is not None  # queries share columns with keys: padding of both
    begin_k = torch.zeros(batch_size, dtype=torch.int64, device=device)
    end_k = begin_k + end
    if padded:
        begin_k = real.int().argmax(1)
        end_k = (begin_k + real.sum(1)).clamp(max=end)
    cached = not (padded and shared) or q_length == 1
    if not _is_traced():
        queries = torch.arange(q_length, device=device) + q_offset
        keys = kv_offset, kv_offset + kv_length
        starts, wrong = _probe(mask_function, batch_size, queries, keys, causal, local_size)
        padding = starts.new_zeros(1, 1) if real is None else ~real
        holes = (padding[:, :-1] & ~padding[:, 1:]).sum(1) + ~padding[:, 0] > 1
        early = (end_k < shift + q_length) & (end_k > begin_k)
        flags = torch.stack([wrong, starts.any(), padding.any(), holes.any(), early.any()])
        wrong, packed, padded, holes, early = flags.tolist()
        cached = cached or not early
        if wrong or (packed and (padded or q_length != kv_length)):
            raise NotImplementedError(f"mask_function: {_REFUSED}, got another; {_INSTEAD}")
        if holes:
            raise NotImplementedError(
                "attention_mask: expected padding before and after each sequence alone, got some within; "
                + _INSTEAD
            )
        if packed:
            starts[:, 0] = True
            begins = starts.flatten().nonzero().flatten()
            bounds = pad(begins, (0, 1), value=starts.numel())
            used = pad(bounds.diff(), (0, 1))
            return torch.stack([bounds, bounds, used, used])[:, None].to(torch.int32)

    if not padded and isinstance(end, int) and end == kv_length:
        return None
    begin_q, end_q = begin_k * 0, begin_k * 0 + q_length
    if shared:
        begin_q, end_q = (begin_k - shift).clamp(0, q_length), (end_k - shift).clamp(0, q_length)
    bounds_q, used_q = _rows(begin_q, end_q, q_length)
    bounds_k, used_k = _rows(begin_k, end_k, kv_length)
    rows = [bounds_q, bounds_k, used_q, used_k]
    if cached:
        seqlens = torch.where(begin_q < end_q, end_k, begin_k)
        rows += [pad(x, (0, batch_size + 1)) for x in ([seqlens, begin_k] if padded else [seqlens])]
    return torch.stack(rows)[:, None].to(torch.int32)


def _rows(begin: torch.Tensor, end: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds and use [2 * batch + 1] of twice as many sequences, of which the even ones are the padding before the odd."""
    first = torch.arange(begin.shape[0], device=begin.device) * length
    bounds = torch.stack([first, first + begin], 1).flatten()
    used = torch.stack([begin * 0, (end - begin).clamp(min=0)], 1).flatten()
    return pad(bounds, (0, 1), value=begin.shape[0] * length), pad(used, (0, 1))


def _probe(
    mask_function: Callable[..., torch.Tensor] | None,
    batch: int,
    queries: torch.Tensor,
    keys: tuple[int, int],
    causal: bool,
    local_size: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where packed sequences start, and whether the mask is any other than causal or full, within a window if there is one.

    Asks of each query the keys where such masks change: its neighbours, the first one, the ends of the window.

    Args:
        queries: [q_length], positions.
        keys: the position of the first key, and after the last.
    Returns:
        starts: bool [batch, q_length]; wrong: bool [].
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    begin, end = keys
    starts = queries.new_zeros(batch, queries.shape[0], dtype=torch.bool)
    wrong = starts.new_zeros(())
    if mask_function in (None, causal_mask_function if causal else bidirectional_mask_function):
        return starts, wrong
    sequence, head = torch.arange(batch, device=queries.device)[:, None], queries.new_zeros(())

    def seen(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inside = (begin <= key) & (key < end)
        return mask_function(sequence, head, queries[None], key.clamp(begin, end - 1)[None]), inside

    sees, inside = seen(queries - 1)
    starts |= inside & ~sees
    start = torch.where(starts, queries, begin).cummax(1).values
    edges = {1, -1}
    if local_size is not None:
        edges |= (
            {1 - local_size, -local_size}
            if causal
            else {local_size, local_size + 1, -local_size, -local_size - 1}
        )
    for key in (queries * 0 + begin, *(queries + edge for edge in sorted(edges))):
        sees, inside = seen(key)
        back = queries - key
        expected = back >= 0 if causal else back == back
        if local_size is not None:
            expected = expected & (back < local_size if causal else back.abs() <= local_size)
        wrong = wrong | (inside & (sees != (expected & (key >= start)))).any()
    return starts, wrong if causal else wrong | starts.any()


def _is_traced() -> bool:
    """Whether values of tensors cannot be had."""
    return torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )
