"""hf.attention_mask: the mask function of transformers, which makes the Mask of all layers of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from tl_attention.checks.common import is_dtensor
from tl_attention.integrations.hf_checks import (
    check_mask,
    check_mask_function,
    check_padding,
    check_window_keys,
    is_block_mask,
    is_dense_mask,
)
from tl_attention.integrations.hf_flex import block_mask_of
from tl_attention.integrations.hf_mask import Mask
from tl_attention.tracing.captures import has_values, is_recording


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
) -> Any:
    """Mask of all layers of one kind, for the AttentionMaskInterface of transformers; never a [queries, keys] matrix.

    The result carries what the model asked for, and attention_forward follows it, not the attributes of the layer. Causal and full masks,
    with a sliding window, packed sequences or chunks, and with padding before and after each sequence, run the kernels of the options.
    mask_function and padding are checked (one sync; none for transformers' causal or full mask without padding): any other mask becomes a
    BlockMask, with which flex_attention skips hidden blocks. In torch.compile, make_fx and CUDA graph capture they are checked on the
    device without a wait, and any other mask fails there. A bidirectional window whose last query is not at the last key becomes a
    BlockMask in all of them; with a tensor q_offset that takes one more sync, and in torch.compile and capture it fails on the device.

    Args:
        q_offset, kv_offset: positions of the first query and of the first key; q_offset is a tensor with a static cache.
        mask_function: mask_function(batch, head, query, key) -> True where the query sees the key; arguments are positions. None: causal or
            full, as allow_is_bidirectional_skip says, with the window of local_size.
        attention_mask: [batch, at most kv_offset + kv_length], bool or ints, False for padding; or a result of this function, a BlockMask
            or a 4-D mask, which is returned as it is.
        local_size: width of the window in keys: up to the query, its own included, or in a bidirectional mask on either side; or size of a
            chunk.
        use_vmap: mask_function contains functions of the caller, which may use the operations that docs/flex.md lists.
        allow_is_bidirectional_skip: None for a causal mask.
    Returns:
        A Mask. Its `rows` are None if lengths, causality and window define the mask. Else they are int32 [4 to 6, sequences + 1]. Rows 0 to
        3: cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k of flash_attn_varlen_func, in batch * q_length and batch * kv_length rows.
        Row 4 begins with cache_seqlens [batch], row 5, if there is padding, with cache_leftpad [batch]. Rows 4 and 5 exist if in each
        sequence all queries or none come after its last key, as flash_attn_with_kvcache requires.
    Raises:
        NotImplementedError: mask_function has an operation that flex_attention does not support; the message names it.
        TypeError, ValueError: attention_mask or local_size of another form; the message names what was expected and what came.
    """
    if isinstance(attention_mask, Mask) or is_block_mask(attention_mask) or is_dense_mask(attention_mask):
        check_mask(attention_mask, batch_size)
        return attention_mask  # generate() has called this function
    check_padding(attention_mask, batch_size)
    attention_mask = whole(attention_mask)
    if isinstance(local_size, int) and not isinstance(local_size, bool) and local_size == 0:
        return Mask((batch_size, q_length, kv_length), True, no_keys=True)
    check_window_keys("local_size", local_size)
    check_mask_function(mask_function)
    sizes = batch_size, q_length, kv_length, q_offset, kv_offset
    causal = allow_is_bidirectional_skip is None
    function = mask_function or _function_of(causal, local_size)
    # Columns are positions minus kv_offset: the first key has column 0
    first_query = q_offset - kv_offset
    mask = Mask((batch_size, q_length, kv_length), causal, first_query=first_query)
    if local_size is not None:
        mask.left, mask.right = (local_size - 1, 0) if causal else (local_size, local_size)
    end = first_query + q_length if causal else kv_length
    tokens = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if tokens is not None:
        # Keys without a column are padding. With a static cache, whose `end` is a tensor, those are keys that nobody sees yet
        present = min(kv_length, 1) if isinstance(end, torch.Tensor) else min(end, kv_length)
        tokens = pad(tokens, (0, max(present - tokens.shape[1], 0))) if kv_length else None
    ends_elsewhere = False
    if local_size is not None and not causal and not use_vmap:
        ends_elsewhere = _ends_elsewhere(first_query + q_length, kv_length)
    if ends_elsewhere and _is_simple(_find_sequences(mask_function, *sizes, causal, local_size, device)):
        function = _function_of(causal, local_size)
    if use_vmap or ends_elsewhere:
        mask.padded = tokens is not None and (is_traced(tokens) or not tokens.all())
        return _with_blocks(mask, *sizes, function, attention_mask, device)
    begin_k = torch.zeros(batch_size, dtype=torch.int64, device=device)
    end_k = begin_k + end
    if tokens is not None:
        begin_k = tokens.int().argmax(1)
        end_k = (begin_k + tokens.sum(1)).clamp(max=end)
    padded = tokens is not None
    shared = causal or local_size is not None  # queries are among the keys, and so have the same padding
    cached = not (padded and shared) or q_length == 1
    sequence = _find_sequences(mask_function, *sizes, causal, local_size, device)
    if is_traced(begin_k):
        if sequence is not None or padded:
            _assert_simple(sequence, tokens)
        mask.padded = padded and ~tokens.all()
    elif sequence is not None or padded:
        ends_early = (end_k < first_query + q_length) & (end_k > begin_k)
        is_other, padded, packed, ends_early = _inspect(sequence, tokens, ends_early, q_length == kv_length)
        mask.padded = padded
        if is_other:
            return _with_blocks(mask, *sizes, function, attention_mask, device)
        if packed:
            mask.starts = sequence[0]
            mask.rows = packed_rows(mask.starts)
            return mask
        cached = cached or not ends_early

    if not padded and not isinstance(end, torch.Tensor) and end == kv_length:
        return mask
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
    mask.rows = torch.stack(rows).to(torch.int32)
    return mask


def _ends_elsewhere(end: int | torch.Tensor, kv_length: int) -> bool:
    """True if the last query is not at the last key. Options align a bidirectional window with both.

    Args:
        end: column after that of the last query; a tensor is read, where nothing traces it.
    """
    if isinstance(end, torch.Tensor) and is_traced(end):
        torch._assert_async(
            (end == kv_length).all(),
            "attention_mask: expected a bidirectional window of as many queries as keys in torch.compile and CUDA graphs, got other keys;"
            " make the mask outside",
        )
        return False
    return bool(end != kv_length)


def _function_of(causal: bool, local_size: int | None) -> Callable:
    """Mask function of a causal or full mask, with a window of local_size keys."""

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = key <= query if causal else query >= 0
        if local_size is None:
            return seen
        # Not Python's abs(), which torch.compile hides from flex_attention
        return seen & (query - key < local_size if causal else (query - key).abs() <= local_size)

    return sees


def _with_blocks(mask: Mask, *recipe: Any) -> Mask:
    """The mask as a BlockMask; recipe: arguments of block_mask_of."""
    mask.block_mask, mask.of_documents = block_mask_of(*recipe)
    return mask


def _assert_simple(sequence: tuple[torch.Tensor, torch.Tensor] | None, tokens: torch.Tensor | None) -> None:
    """Fail on the device, without a wait, where options cannot express a mask or a row has documents.

    Args:
        sequence: see _find_sequences.
        tokens: bool [batch, keys], False for padding.
    """
    if sequence is not None:
        starts, unsupported = sequence
        torch._assert_async(
            ~(unsupported | starts.any()),
            "attention_mask: expected a causal, full or windowed mask of one document per row in torch.compile and CUDA graphs, got another"
            " one; pass cu_seq_lens_q and cu_seq_lens_k, or make the mask outside",
        )
    if tokens is not None:
        torch._assert_async(
            (_runs(~tokens) <= 1).all(),
            "attention_mask: expected padding before and after each sequence in torch.compile and CUDA graphs, got padding inside one; make"
            " the mask outside",
        )


def _is_simple(sequence: tuple[torch.Tensor, torch.Tensor] | None) -> bool:
    """True if options can express a mask but for padding: read by the host, or asserted on the device. sequence: see _find_sequences."""
    if sequence is None:
        return True
    starts, unsupported = sequence
    if is_traced(starts):
        _assert_simple(sequence, None)
        return True
    return not bool(unsupported | starts.any())


def _runs(padding: torch.Tensor) -> torch.Tensor:
    """Number of runs of consecutive tokens [batch]; padding: bool [batch, keys]."""
    return (padding[:, :-1] & ~padding[:, 1:]).sum(1) + (~padding[:, 0]).int()


def _inspect(
    sequence: tuple[torch.Tensor, torch.Tensor] | None,
    tokens: torch.Tensor | None,
    ends_early: torch.Tensor,
    equal_lengths: bool,
) -> tuple[bool, bool, bool, bool]:
    """(not expressible by options, has padding, has packed sequences, ends early somewhere): four bools, by one synchronization.

    Args:
        sequence: see _find_sequences.
        tokens: bool [batch, keys], False for padding.
    """
    padding = ends_early.new_zeros(1, 1) if tokens is None else ~tokens
    starts, unsupported = sequence or (padding[:1, :1] & False, padding.new_zeros(()))
    flags = torch.stack(
        [unsupported, starts.any(), padding.any(), (_runs(padding) > 1).any(), ends_early.any()]
    )
    unsupported, packed, padded, holes, ends_early = flags.tolist()
    is_other = unsupported or holes or (packed and (padded or not equal_lengths))
    return is_other, padded, packed, ends_early


def packed_rows(starts: torch.Tensor) -> torch.Tensor:
    """Rows 0 to 3 of a mask for packed sequences; `starts` is bool [batch, seqlen], True at each sequence's first row."""
    starts = starts.clone()
    starts[:, 0] = True
    begins = starts.flatten().nonzero().flatten()
    bounds = pad(begins, (0, 1), value=starts.numel())
    used = pad(bounds.diff(), (0, 1))
    return torch.stack([bounds, bounds, used, used]).to(torch.int32)


def _bounds(begin: torch.Tensor, end: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cu_seqlens and seqused [2 * batch + 1].

    Each entry of the batch is two sequences: its left padding, of which no row is used, then the sequence itself.
    """
    first = torch.arange(begin.shape[0], device=begin.device) * length
    bounds = torch.stack([first, first + begin], 1).flatten()
    used = torch.stack([torch.zeros_like(begin), (end - begin).clamp(min=0)], 1).flatten()
    # Not pad(), which makes a number of a length that is a symbol
    return torch.cat([bounds, bounds.new_full((1,), begin.shape[0] * length)]), pad(used, (0, 1))


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
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Find packed sequences, and whether the mask is other than causal or full, with a window if local_size is set.

    For each query, mask_function is evaluated at the keys where such masks change: next to the query, at the first key, and at the ends
    of the window.

    Returns:
        (starts, unsupported), or None where mask_function is transformers' own for the mask. starts: bool [batch, q_length], True at a
        query that does not see the key before it. unsupported: bool [].
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function in (None, causal_mask_function if causal else bidirectional_mask_function):
        return None
    queries = torch.arange(q_length, device=device) + q_offset
    begin, end = kv_offset, kv_offset + kv_length
    starts = queries.new_zeros(batch, q_length, dtype=torch.bool)
    unsupported = starts.new_zeros(())
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


def whole(x: Any) -> Any:
    """All of a DTensor, such as replicated positions or padding; anything else as it is."""
    return x.full_tensor() if is_dtensor(x) else x


def is_traced(x: torch.Tensor) -> bool:
    """True where the values of a tensor cannot be read: in torch.compile, make_fx and CUDA graph capture, of a fake tensor and on the meta
    device.
    """
    if torch.compiler.is_compiling() or is_recording() or not has_values(x):
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
