"""Errors for keywords that a public function does not have, with what to pass instead.

A public function ends with `**unknown: NoReturn`: no keyword has that type, so type checkers refuse each, as they do without it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping

_CAUSAL = "causal", "is_causal"
_SCALES = "softmax_scale", "sm_scale", "scale"
_LSES = "return_attn_probs", "return_softmax_lse", "return_lse"
# Names in PyTorch, FlashAttention, FlashInfer and transformers -> our names of the same, of which a function has one or none
NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_CAUSAL, _CAUSAL),
    **dict.fromkeys((*_SCALES, "scaling"), _SCALES),
    **dict.fromkeys((*_LSES, "return_softmax"), _LSES),
    **dict.fromkeys(("window", "sliding_window", "window_left", "window_size_left"), ("window_size",)),
    **dict.fromkeys(("soft_cap", "logit_cap", "logits_soft_cap"), ("softcap",)),
    **dict.fromkeys(("sink", "sinks", "s_aux"), ("learnable_sink",)),
    **dict.fromkeys(("dropout", "attention_dropout"), ("dropout_p",)),
    **dict.fromkeys(("attn_mask", "attention_mask", "mask", "bias"), ("attn_bias",)),
    **dict.fromkeys(("page_table", "block_tables"), ("block_table",)),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q"), ("cu_seqlens", "cu_seqlens_q")),
    **dict.fromkeys(("cu_seqlens_k", "cu_seq_lens_k"), ("cu_seqlens", "cu_seqlens_k")),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_length_q"), ("max_seqlen", "max_seqlen_q")),
    **dict.fromkeys(("max_seqlen_k", "max_length_k"), ("max_seqlen", "max_seqlen_k")),
    "block_size": ("BLOCK_SIZE",),
    "seqused_k": ("cache_seqlens",),
    "block_sparse_tensors": ("block_mask",),
    "leftpad_k": ("cache_leftpad",),
    **dict.fromkeys(("max_logits", "return_max_logit"), ("return_max_logits",)),
}
# Keyword -> what to do where the function has no name for it
ADVICE: dict[str, str] = {
    **dict.fromkeys(
        ("pack_gqa", "sm_margin", "scheduler_metadata", "aux_tensors", "kernel_options", "ver", "fa_version"),
        "leave it out, it has no counterpart here",
    ),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "leave it out, fp8 is not supported"),
    **dict.fromkeys(
        ("key_padding_mask", "padding_mask"),
        "pack the sequences for flash_attn_varlen_func, or pass the mask to flash_attn_func as attn_bias",
    ),
    **dict.fromkeys(
        ("return_max_logits", "max_logits", "return_max_logit"),
        "flash_attn_func and flash_attn_varlen_func take return_max_logits, flex_attention return_aux=AuxRequest(max_scores=True)",
    ),
    "tree_mask": "flash_attn_with_kvcache takes it",
    "leftpad_k": "flash_attn_with_kvcache takes it, as cache_leftpad",
    "rotary_seqlens": "leave it out, positions count from cache_seqlens",
    "zero_tensors": "leave it out, rows that belong to no sequence are 0",
    "deterministic": "leave it out, a forward always is; flash_attn_func takes it, for gradients",
    "training": "leave it out, and pass dropout_p=0.0 in evaluation",
    "enable_gqa": "leave it out, k and v may have fewer heads than q",
    "precision": "leave it out, it is of fp32 tensors, which this function does not take",
    "check_lengths": "leave it out, flash_attn_varlen_func and flash_attn_with_kvcache take it, for lengths on a GPU",
    "rng_state": "leave it out, it is of dropout, which flash_attn_func has",
    "out": "flash_attn_varlen_func takes it, for packed sequences",
    **dict.fromkeys(("seqused_q", "seqused_k"), "flash_attn_varlen_func takes it, for packed sequences"),
    **dict.fromkeys(
        (
            "cache_seqlens",
            "cache_batch_idx",
            "cache_leftpad",
            "rotary_cos",
            "rotary_sin",
            "rotary_interleaved",
            "workspace",
        ),
        "flash_attn_with_kvcache takes it",
    ),
    "attention_chunk": "pass a mask_mod to flash_attn_func: q_idx // size == kv_idx // size",
    **dict.fromkeys(("qv", "q_v"), "see docs/kvcache.md for latent attention"),
    "cu_seqlens_k_new": "write new keys to their pages, then call flash_attn_varlen_func with block_table",
    **dict.fromkeys(
        ("page_table", "block_table", "block_tables"),
        "flash_attn_varlen_func and flash_attn_with_kvcache take pages, as block_table",
    ),
    **dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k"),
        "flash_attn_varlen_func takes packed sequences",
    ),
    **dict.fromkeys(
        ("score_mod", "mask_mod", "block_mask", "attn_bias", "attn_mask", "attention_mask"),
        "flash_attn_func and flex_attention take masks and biases, for sequences of one length",
    ),
    **dict.fromkeys(
        (
            "window_size",
            "softcap",
            "alibi_slopes",
            "learnable_sink",
            "dropout_p",
            "num_splits",
            "batch_invariant",
        ),
        "flash_attn_func takes it",
    ),
    **dict.fromkeys(_CAUSAL, "flash_attn_func takes causal"),
}
# Function -> keyword -> what to do, where that of ADVICE is another function
ADVICE_OF: dict[str, dict[str, str]] = {
    "attention": {
        **dict.fromkeys(
            ("max_seqlen", "max_seqlen_q", "max_seqlen_k"), "leave it out, cu_seqlens has the lengths"
        ),
        "num_splits": "leave it out, each call of a rank chooses it",
        "batch_invariant": "leave it out, as the number of ranks decides the order of sums; flash_attn_func takes it, on one GPU",
    },
    **{
        key: {"num_splits": "flash_attn_varlen_func takes it"}
        for key in ("flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func")
    },
}


def unknown_keyword(function: Callable, unknown: Mapping[str, object]) -> TypeError:
    """Python's error for the first unknown keyword, with a hint."""
    name = next(iter(unknown))
    known = [x for x in inspect.signature(function).parameters if x != "unknown"]
    like = [x for x in NAMES.get(name, ()) if x in known]
    if not like and name not in ADVICE:
        like = difflib.get_close_matches(name, known, 1, 0.75)
    advice = ADVICE | ADVICE_OF.get(function.__name__, {})
    hint = f"did you mean {like[0]}?" if like else advice.get(name, "")
    return TypeError(
        f"{function.__name__}() got an unexpected keyword argument {name!r}{hint and f'; {hint}'}"
    )
