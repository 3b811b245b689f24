"""Attention implementation "tl_attention" of transformers: `tl_attention.hf.register()`, then `attn_implementation="tl_attention"`."""

from tl_attention.integrations.hf import attention_forward, attention_mask, register

__all__ = ["attention_forward", "attention_mask", "register"]
