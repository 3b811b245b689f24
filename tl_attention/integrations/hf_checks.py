"""Argument checks of hf.py, in the form of common.py. They read metadata only."""

from __future__ import annotations

from typing import Any

import torch

from tl_attention.checks.common import (
    DTYPES,
    cast_hint,
    describe,
    expect_dropout,
    expect_like,
    expect_tensor,
    holds_ints,
    is_dtensor,
    is_int,
    surely,
)
from tl_attention.integrations.hf_mask import USE_ANOTHER, Mask
from tl_attention.tracing.captures import is_vmapped

# The first rows of a Mask, for flash_attn_varlen_func; up to 2 more are for flash_attn_with_kvcache
VARLEN_ROWS = 4
# Arguments that models pass on to every attention, and on which no result depends
HARMLESS = frozenset(
    {
        "cache_position", "input_ids", "labels", "layer_idx", "logits_to_keep", "mm_token_type_ids", "num_items_in_batch",
        "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "return_dict", "seq_idx",
        "shift_labels", "skip_logits", "token_type_ids", "use_cache",
    }
)  # fmt: skip


def check_inputs(query: Any, key: Any, value: Any, sink: Any, dropout: Any, is_causal: Any) -> None:
    """Check the forms of the arguments of hf.attention_forward; flash_attn_func checks the rest."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        expect_tensor(name, x)
        if x.ndim != 4:
            raise ValueError(
                f"{name}: expected 4 dimensions [batch, heads, seqlen, head_dim], got shape {tuple(x.shape)}"
            )
    if sink is not None and not (is_dtensor(sink) and is_dtensor(query)):  # flash_attn_func checks shards
        hint = "pass a number per head of query"
        expect_like("s_aux", sink, query, ((query.shape[1],),), (torch.float32, *DTYPES), hint)
    expect_dropout("dropout", dropout, "; pass 0.0 for none")
    if is_causal is not None and not isinstance(is_causal, bool):
        raise TypeError(
            f"is_causal: expected a bool, or None to ask the layer, got {describe(is_causal)}"
            f"{cast_hint('is_causal', is_causal, 'bool', '; pass True or False')}"
        )


def is_block_mask(mask: Any) -> bool:
    """True for a BlockMask of torch."""
    return hasattr(mask, "kv_num_blocks") and hasattr(mask, "mask_mod")


def is_dense_mask(mask: Any) -> bool:
    """True for a mask [batch, heads, queries, keys], bool or to be added to the scores."""
    return (
        isinstance(mask, torch.Tensor)
        and mask.ndim == 4
        and (mask.dtype == torch.bool or mask.is_floating_point())
    )


def _mask_error(mask: Any) -> NotImplementedError:
    is_tensor = isinstance(mask, torch.Tensor)
    hint = "pass it to the model, which converts it, or " if is_tensor and mask.ndim == 2 else ""
    return NotImplementedError(
        "attention_mask: expected a 2-D padding mask as argument of the model, a 4-D mask (bool or float), a BlockMask, or the result of"
        " tl_attention.hf.attention_mask, got"
        f" {describe(mask) if is_tensor else type(mask).__name__}; {hint}{USE_ANOTHER}"
    )


def check_mask(mask: Any, batch: int) -> None:
    """Check the mask of hf.attention_forward, for `batch` sequences."""
    if isinstance(mask, Mask):
        if mask.no_keys:
            raise ValueError(
                "attention_mask: expected one with a window of at least 1 key, got one with a window of 0, in which no query sees a key;"
                " set sliding_window of the config, or to None"
            )
        if mask.sizes[0] != batch and (mask.rows is not None or mask.block_mask is not None):
            raise ValueError(
                f"attention_mask: expected one for {batch} sequences, got one for {mask.sizes[0]}; {_REMAKE}"
            )
    elif not (mask is None or is_block_mask(mask) or is_dense_mask(mask)):
        raise _mask_error(mask)


def check_asked(module: Any, causal: bool) -> None:
    """Refuse a causal layer of a model without a mask: eager attention would see all keys, SDPA the past."""
    if causal and (hasattr(module, "is_causal") or hasattr(module, "config")):
        raise NotImplementedError(
            f"attention_mask: expected the result of tl_attention.hf.attention_mask, as {type(module).__name__} says is_causal=True, got"
            " None and no is_causal in the call, of a model that asked for no mask and may mean no mask at all; call"
            ' model.set_attn_implementation("eager"), or pass is_causal'
        )


def check_mask_lengths(mask: Mask, query: torch.Tensor, key: torch.Tensor) -> None:
    """Check that a mask was made for the lengths of query and key [batch, heads, seqlen, head_dim]."""
    q_length, kv_length = mask.sizes[1:]
    plain = mask.rows is None and mask.block_mask is None and mask.left < 0 and mask.right < 0
    if plain and not mask.causal:
        return  # all keys are seen, whatever their number
    if mask.holds_for_each_query and q_length == 1:
        q_length = query.shape[2]
    if (q_length, kv_length) != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"attention_mask: expected one for {query.shape[2]} queries and {key.shape[2]} keys, the lengths of query and key, got one for"
            f" {q_length} and {kv_length}; {_REMAKE}"
        )


_REMAKE = f"make it with the sizes of this call, or {USE_ANOTHER}"


def check_others(others: dict[str, Any]) -> None:
    """Refuse arguments that hf.attention_forward does not know and that may change the result."""
    for name, x in others.items():
        if name not in HARMLESS and x is not None:
            raise NotImplementedError(
                f"{name}: expected None, as tl_attention does not know this argument and it may change the result, got {describe(x)};"
                f" leave it out, or {USE_ANOTHER}"
            )


def check_documents(query: torch.Tensor, key: torch.Tensor, first_query: int | torch.Tensor) -> None:
    """Refuse documents in position_ids beside keys from before, to which no document can be given; this may wait for the GPU."""
    if query.shape[2] > key.shape[2] or first_query != 0:
        raise NotImplementedError(
            f"position_ids: expected positions that do not start over beside {key.shape[2]} keys for {query.shape[2]} queries, got several"
            f" documents; run them without a filled cache, or {USE_ANOTHER}"
        )


def check_padding(mask: Any, batch: int) -> None:
    """Check the padding mask that hf.attention_mask gets from a model."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        raise _mask_error(mask)
    if mask.dtype != torch.bool and not holds_ints(mask):
        raise TypeError(
            f"attention_mask: expected bool or ints, True or 1 for a token, got {describe(mask)}; pass attention_mask.bool(), or"
            " attention_mask == 0 for an additive mask"
        )
    check_read("attention_mask", mask)
    if mask.shape[0] != batch:
        raise ValueError(f"attention_mask: expected {batch} rows, the batch size, got {describe(mask)}")


def check_read(name: str, x: torch.Tensor) -> None:
    """Check a tensor whose values are read, but not in compiled code."""
    if not torch.compiler.is_compiling() and is_vmapped(x):
        raise NotImplementedError(
            f"{name}: expected the same values for all samples of torch.vmap, as they are read, got those of each sample; make the samples"
            f" entries of the batch, or {USE_ANOTHER}"
        )


def check_mask_function(function: Any) -> None:
    """Check the mask function that hf.attention_mask gets from transformers."""
    if function is not None and not callable(function):
        raise TypeError(
            f"mask_function: expected a function of batch entry, head, query and key, or None, got {describe(function)}; pass a mask as"
            " attention_mask"
        )


def check_window_keys(name: str, keys: Any) -> None:
    """Check the number of keys in a window, the query's own included."""
    if keys is not None and (not is_int(keys) or keys < 1):
        raise ValueError(
            f"{name}: expected None or an int of at least 1, got {describe(keys)}; pass None for no window"
        )


def check_no_others(cache: Any, output_attentions: Any) -> None:
    """Refuse arguments that change the result and are not supported."""
    if output_attentions:
        raise NotImplementedError(
            f"output_attentions: expected False, as probabilities are never stored, got {describe(output_attentions)}; call"
            ' model.set_attn_implementation("eager")'
        )
    if cache is not None:
        raise NotImplementedError(
            f"cache: expected None, got {type(cache).__name__}, which tl_attention does not support; {USE_ANOTHER}"
        )


def check_flex(dropout: Any, packed: bool) -> None:
    """Refuse what flex_attention does not support, for a mask or bias that needs flex_attention."""
    if dropout:
        raise NotImplementedError(
            f"dropout: expected 0 with a BlockMask, a 4-D mask or position_bias, got {describe(dropout)}; set the dropout of the config"
            f" to 0 (attention_dropout, of T5 dropout_rate), or {USE_ANOTHER}"
        )
    if packed:
        raise NotImplementedError(
            "cu_seq_lens_q, cu_seq_lens_k: expected None with a BlockMask, a 4-D mask or position_bias, got tensors; say the documents in"
            f" the mask, or {USE_ANOTHER}"
        )


def check_packing(query: torch.Tensor, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any) -> None:
    """Check cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k of hf.attention_forward."""
    if (cu_q is None) != (cu_k is None):
        raise ValueError(
            f"cu_seq_lens_q, cu_seq_lens_k: expected both or neither, got {describe(cu_q)} and {describe(cu_k)}; pass the same bounds"
            " twice where queries and keys have the same sequences"
        )
    for name, length in (("max_length_q", max_q), ("max_length_k", max_k)):
        if length is None:
            continue
        if cu_q is None:
            raise ValueError(
                f"{name}: expected None without cu_seq_lens_q and cu_seq_lens_k, got {describe(length)}; pass the bounds of the packed"
                " sequences"
            )
        in_tensor = isinstance(length, torch.Tensor) and not length.ndim and holds_ints(length)
        if not in_tensor and not is_int(length):
            raise TypeError(f"{name}: expected None, an int or a 0-d integer tensor, got {describe(length)}")
        if not in_tensor and surely(length < 0):
            raise ValueError(f"{name}: expected at least 0, got {length}")
    if cu_q is None:
        return
    for name, x in (("cu_seq_lens_q", cu_q), ("cu_seq_lens_k", cu_k)):
        expect_tensor(name, x)
        if not holds_ints(x):
            raise TypeError(f"{name}: expected an integer dtype, got {x.dtype}")
        if x.ndim != 1 or not x.shape[0]:
            raise ValueError(f"{name}: expected shape [sequences + 1], got {tuple(x.shape)}")
        if x.device != query.device:
            raise ValueError(
                f"{name}: expected the device of query, {query.device}, got {x.device}; call {name}.to(query.device)"
            )
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seq_lens_k: expected as many entries as cu_seq_lens_q, {cu_q.shape[0]}, got {cu_k.shape[0]}"
        )
