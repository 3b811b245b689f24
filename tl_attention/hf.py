"""Hugging Face transformers: attn_implementation="tl_attention" after one register()."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from tl_attention import kvcache
from tl_attention.checks import lengths as checks_lengths
from tl_attention.checks.common import expect_scale
from tl_attention.checks.hf import (
    VARLEN_ROWS,
    check_flex,
    check_inputs,
    check_mask,
    check_no_others,
    check_packing,
    check_padding,
    check_window_keys,
    is_block_mask,
    is_dense_mask,
    is_our_mask,
)
from tl_attention.checks.transforms import ARGUMENT_ERRORS, Renaming
from tl_attention.flash import flash_attn_func, flash_attn_varlen_func
from tl_attention.hf_flex import block_mask_of, flex_forward, needs_flex

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


def register() -> None:
    """Make "tl_attention" an attention implementation of transformers; further calls change nothing.

        tl_attention.hf.register()
        model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation="tl_attention")

    Raises:
        ImportError: no transformers, or a version before 5, whose mask interface is another one.
    """
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
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, for the AttentionInterface of transformers.

    Up to MAX_DECODE_QUERIES queries that need no gradient, with more keys than queries, run flash_attn_with_kvcache: key and value are the
    static or dynamic cache, which is not copied.

    Args:
        module: the layer.
        query: [batch, heads, seqlen_q, head_dim], bfloat16, float16 or float32; inside autocast fp32 is cast to its dtype.
        key, value: [batch, heads_kv, seqlen_k, head_dim or head_dim_v].
        attention_mask: the result of attention_mask(): None, the rows of query and key that belong to each sequence, or a BlockMask;
            or a mask [batch or 1, heads or 1, seqlen_q or 1, at least seqlen_k], bool or to be added to the scores. A BlockMask or a 4-D
            mask is the whole mask: causality and sliding_window are not applied to it.
        position_bias: float [batch or 1, heads or 1, seqlen_q or 1, at least seqlen_k], added to the scores; it may need a gradient.
        sliding_window: number of keys that a query sees, its own included; in a bidirectional layer, on either side. None: no window.
        is_causal: None: as the attributes is_causal of the layer and of its config say, causal where they are missing.
        s_aux: [heads], the scores of the sink.
        cu_seq_lens_q, cu_seq_lens_k: [sequences + 1], bounds of packed sequences in batch * seqlen; they override attention_mask, and
            are refused beside a BlockMask, a 4-D mask or position_bias. Both or neither. Their values are checked only with
            TL_ATTENTION_CHECK_LENGTHS=1: see checks/lengths.py.
        max_length_q, max_length_k: upper bounds of the lengths in cu_seq_lens_q and cu_seq_lens_k; None: batch * seqlen.
        kwargs: other arguments that models pass to every attention, such as position_ids; ignored.
    Returns:
        (out [batch, seqlen_q, heads, head_dim_v], None). Rows of padding are 0.
    Raises:
        NotImplementedError: a paged cache, output_attentions=True, a mask of another form, or dropout or packed sequences beside a
            BlockMask, a 4-D mask or position_bias.
        TypeError, ValueError, NotImplementedError: see flash_attn_func.
    """
    check_inputs(query, key, value, s_aux, dropout, is_causal)
    check_no_others(cache, output_attentions)
    check_mask(attention_mask, query.shape[0])
    expect_scale("scaling", scaling)
    check_window_keys("sliding_window", sliding_window)
    check_packing(query, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    causal = _layer_is_causal(module) if is_causal is None else is_causal
    left, right = _window(sliding_window, causal)
    softcap = 0.0 if softcap is None else softcap

    packed = cu_seq_lens_q is not None
    if needs_flex(attention_mask, position_bias):
        check_flex(dropout, packed)
        window = causal, left, right
        masks = attention_mask, position_bias
        return flex_forward(query, key, value, *masks, scaling, window, softcap, s_aux, deterministic), None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, s_aux))
    options = {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "causal": causal,
        "window_size": (left, right),
        "softcap": softcap,
        "deterministic": deterministic,
        "learnable_sink": s_aux,
    }
    try:
        if _is_decode_step(q, k, v, attention_mask) and not (packed or needs_grad or dropout):
            if q.shape[1] == 1:
                q = query.reshape(q.shape)  # same memory, dense strides: the kernel's load needs no copy
            attend = _decode_op if torch.compiler.is_compiling() else _decode
            lengths = _cache_lengths(attention_mask, q.shape[0])
            out = attend(q, k, v, *lengths, scaling, causal, left, right, softcap, s_aux)
        elif packed or attention_mask is not None:
            rows = [x.flatten(0, 1) for x in (q, k, v)]
            if packed:
                bounds = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
                lengths = _packed_lengths(*rows[:2], *bounds)
            else:
                bounds, used = attention_mask.flatten(1)[:VARLEN_ROWS].split(2)
                lengths = *bounds, q.shape[1], k.shape[1]
                options |= {"seqused_q": used[0, :-1], "seqused_k": used[1, :-1]}
            out = flash_attn_varlen_func(*rows, *lengths, **options).unflatten(0, q.shape[:2])
        else:
            out = flash_attn_func(q, k, v, **options)
    except ARGUMENT_ERRORS as error:
        raise _ERROR_NAMES.of(error) from None
    return out, None


def _window(keys: int | None, causal: bool) -> tuple[int, int]:
    """window_size of flash_attn_func for a window of so many keys, the query's own included."""
    if keys is None:
        return -1, -1
    return keys - 1, 0 if causal else keys - 1


def _is_decode_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: torch.Tensor | None
) -> bool:
    """True for few queries against keys that flash_attn_with_kvcache reads as they are; [batch, seqlen, heads, head_dim]."""
    has_cache_rows = attention_mask is None or attention_mask.shape[0] > VARLEN_ROWS
    few_queries = q.shape[1] <= MAX_DECODE_QUERIES and q.shape[1] < k.shape[1]
    # flash_attn_func copies other head dims, and takes fp32
    return (
        has_cache_rows and few_queries and not (q.shape[3] % 8 or v.shape[3] % 8 or q.dtype == torch.float32)
    )


def _cache_lengths(
    attention_mask: torch.Tensor | None, batch: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """cache_seqlens and cache_leftpad [batch] of flash_attn_with_kvcache, from the rows of the mask behind the first ones."""
    if attention_mask is None:
        return None, None
    seqlens, *leftpad = attention_mask.flatten(1)[VARLEN_ROWS:, :batch].unbind()
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
    lengths = cu_q.to(torch.int32), cu_k.to(torch.int32), *longest
    if checks_lengths.ALWAYS:
        lengths = checks_lengths.checked_lengths(q, k, (*lengths, None, None), _NAMES)[:4]
    return lengths


def _layer_is_causal(module: torch.nn.Module) -> bool:
    """True unless the layer, or a config that makes a causal model bidirectional, says otherwise."""
    config = getattr(module, "config", None)
    return bool(getattr(module, "is_causal", True) and getattr(config, "is_causal", True))


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
    """flash_attn_with_kvcache without new keys, as a torch op: its arguments have types that an op may have."""
    return kvcache.flash_attn_with_kvcache(
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
    """Mask of all layers of one kind, for the AttentionMaskInterface of transformers; never a [queries, keys] matrix.

    Causal and full masks, with a sliding window, packed sequences or chunks, and with padding before and after each sequence, run the
    kernels of the options. Outside torch.compile mask_function is checked (one sync): any other mask becomes a BlockMask, with which
    flex_attention skips hidden blocks. In torch.compile it is not checked; a compiled model has to pass packed sequences as
    cu_seq_lens_q and cu_seq_lens_k.

    Args:
        q_offset, kv_offset: positions of the first query and of the first key; q_offset is a tensor with a static cache.
        mask_function: mask_function(batch, head, query, key) -> True where the query sees the key; arguments are positions.
        attention_mask: [batch, at most kv_offset + kv_length], bool or ints, False for padding; or a result of this function, which is
            returned as it is.
        local_size: width of the window in keys: up to the query, its own included, or in a bidirectional mask on either side; or size of a
            chunk.
        use_vmap: mask_function contains functions of the caller, which may use the operations that docs/flex.md lists.
        allow_is_bidirectional_skip: None for a causal mask.
    Returns:
        None if lengths, causality and window define the mask. A BlockMask if the options cannot express the mask. Else int32
        [4 to 6, 1, 1, 1, sequences + 1]. Rows 0 to 3: cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k of flash_attn_varlen_func, in
        batch * q_length and batch * kv_length rows. Row 4 begins with cache_seqlens [batch], row 5, if there is padding, with
        cache_leftpad [batch]. Rows 4 and 5 exist if in each sequence all queries or none come after its last key, as
        flash_attn_with_kvcache requires.
    Raises:
        NotImplementedError: mask_function has an operation that flex_attention does not support; the message names it.
        TypeError, ValueError: attention_mask or local_size of another form; the message names what was expected and what came.
    """
    if is_our_mask(attention_mask) or is_block_mask(attention_mask) or is_dense_mask(attention_mask):
        check_mask(attention_mask, batch_size)
        return attention_mask  # generate() has called this function
    check_padding(attention_mask, batch_size)
    check_window_keys("local_size", local_size)
    sizes = batch_size, q_length, kv_length, q_offset, kv_offset
    if use_vmap:
        return block_mask_of(*sizes, mask_function, attention_mask, device)
    causal = allow_is_bidirectional_skip is None
    # Columns are positions minus kv_offset: the first key has column 0
    first_query = q_offset - kv_offset
    end = first_query + q_length if causal else kv_length
    tokens = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    begin_k = torch.zeros(batch_size, dtype=torch.int64, device=device)
    end_k = begin_k + end
    if tokens is not None:
        begin_k = tokens.int().argmax(1)
        end_k = (begin_k + tokens.sum(1)).clamp(max=end)
    padded = tokens is not None
    shared = causal or local_size is not None  # queries are among the keys, and so have the same padding
    cached = not (padded and shared) or q_length == 1
    if not _is_traced():
        sequence = _find_sequences(mask_function, *sizes, causal, local_size, device)
        ends_early = (end_k < first_query + q_length) & (end_k > begin_k)
        is_other, padded, packed, ends_early = _inspect(*sequence, tokens, ends_early, q_length == kv_length)
        if is_other:
            return block_mask_of(*sizes, mask_function, attention_mask, device)
        if packed:
            return _packed_mask(sequence[0])
        cached = cached or not ends_early

    if not padded and isinstance(end, int) and end == kv_length:
        return None
    begin_q = torch.zeros_like(begin_k)
    end_q = begin_q + q_length
    if shared:
        begin_q = (begin_k - first_query).clamp(0, q_length)
        end_q = (end_k - first_query).clamp(0, q_length)
    cu_seqlens_q, seqused_q = _bounds(begin_q, end_q, q_length)
    cu_seqlens_k, seqused_k = _bounds(begin_k, end_k, kv_length)
    rows = [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k]
    if cached:
        cache_seqlens = torch.where(begin_q < end_q, end_k, begin_k)
        rows.append(pad(cache_seqlens, (0, batch_size + 1)))
        if padded:
            rows.append(pad(begin_k, (0, batch_size + 1)))
    return _mask_of_rows(rows)


def _mask_of_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    """Stack rows in the form that checks.hf.is_our_mask recognizes."""
    return torch.stack(rows)[:, None, None, None].to(torch.int32)


def _inspect(
    starts: torch.Tensor,
    unsupported: torch.Tensor,
    tokens: torch.Tensor | None,
    ends_early: torch.Tensor,
    equal_lengths: bool,
) -> tuple[bool, bool, bool, bool]:
    """(not expressible by options, has padding, has packed sequences, ends early somewhere): four bools, by one synchronization.

    Args:
        starts, unsupported: see _find_sequences.
        tokens: bool [batch, keys], False for padding.
    """
    padding = starts.new_zeros(1, 1) if tokens is None else ~tokens
    runs = (padding[:, :-1] & ~padding[:, 1:]).sum(1) + (~padding[:, 0]).int()  # of consecutive tokens
    flags = torch.stack([unsupported, starts.any(), padding.any(), (runs > 1).any(), ends_early.any()])
    unsupported, packed, padded, holes, ends_early = flags.tolist()
    is_other = unsupported or holes or (packed and (padded or not equal_lengths))
    return is_other, padded, packed, ends_early


def _packed_mask(starts: torch.Tensor) -> torch.Tensor:
    """Return rows 0 to 3 of a mask for packed sequences; `starts` is bool [batch, seqlen]."""
    starts[:, 0] = True
    begins = starts.flatten().nonzero().flatten()
    bounds = pad(begins, (0, 1), value=starts.numel())
    used = pad(bounds.diff(), (0, 1))
    return _mask_of_rows([bounds, bounds, used, used])


def _bounds(begin: torch.Tensor, end: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cu_seqlens and seqused [2 * batch + 1].

    Each entry of the batch is two sequences: its left padding, of which no row is used, then the sequence itself.
    """
    first = torch.arange(begin.shape[0], device=begin.device) * length
    bounds = torch.stack([first, first + begin], 1).flatten()
    used = torch.stack([torch.zeros_like(begin), (end - begin).clamp(min=0)], 1).flatten()
    return pad(bounds, (0, 1), value=begin.shape[0] * length), pad(used, (0, 1))


def _find_sequences(
    mask_function: Callable[..., torch.Tensor] | None,
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    causal: bool,
    local_size: int | None,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find packed sequences, and whether the mask is other than causal or full, with a window if local_size is set.

    For each query, mask_function is evaluated at the keys where such masks change: next to the query, at the first key, and at the ends
    of the window.

    Returns:
        starts: bool [batch, q_length], True at a query that does not see the key before it.
        unsupported: bool [].
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    queries = torch.arange(q_length, device=device) + q_offset
    begin, end = kv_offset, kv_offset + kv_length
    starts = queries.new_zeros(batch, q_length, dtype=torch.bool)
    unsupported = starts.new_zeros(())
    if mask_function in (None, causal_mask_function if causal else bidirectional_mask_function):
        return starts, unsupported
    sequence, head = torch.arange(batch, device=queries.device)[:, None], queries.new_zeros(())

    def sees(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mask_function at one key per query, and whether the key exists."""
        exists = (begin <= key) & (key < end)
        return mask_function(sequence, head, queries[None], key.clamp(begin, end - 1)[None]), exists

    seen, exists = sees(queries - 1)
    starts |= exists & ~seen
    start = torch.where(starts, queries, begin).cummax(1).values
    distances = {1, -1}  # key - query
    if local_size is not None and causal:
        distances |= {1 - local_size, -local_size}
    elif local_size is not None:
        distances |= {local_size, local_size + 1, -local_size, -local_size - 1}
    for key in (torch.full_like(queries, begin), *(queries + distance for distance in sorted(distances))):
        seen, exists = sees(key)
        back = queries - key
        expected = key >= start
        if causal:
            expected &= back >= 0
        if local_size is not None:
            expected &= back < local_size if causal else back.abs() <= local_size
        unsupported = unsupported | (exists & (seen != expected)).any()
    if not causal:  # full attention within packed sequences is not supported
        unsupported = unsupported | starts.any()
    return starts, unsupported


def _is_traced() -> bool:
    """True where values of tensors cannot be read: in torch.compile and CUDA graph capture."""
    return torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )
