"""FlashAttention for NVIDIA Hopper, written in TileLang."""

from tl_attention.flash import flash_attn_func
from tl_attention.interface import (
    mha_bwd_interface,
    mha_fwd_interface,
    ref_mha_bwd_interface,
    ref_mha_fwd_interface,
)

__all__ = [
    "flash_attn_func",
    "mha_bwd_interface",
    "mha_fwd_interface",
    "ref_mha_bwd_interface",
    "ref_mha_fwd_interface",
]
