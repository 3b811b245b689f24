"""Attention in plain PyTorch: the oracle of the tests, and what CPU tensors run."""

from tl_attention.reference.attention import (
    attention_backward_reference,
    attention_reference,
    dropout_keep,
    philox,
    rounded_dropout,
    true_fp32,
    varlen_backward_reference,
    varlen_reference,
)

__all__ = [
    "attention_backward_reference",
    "attention_reference",
    "dropout_keep",
    "philox",
    "rounded_dropout",
    "true_fp32",
    "varlen_backward_reference",
    "varlen_reference",
]
