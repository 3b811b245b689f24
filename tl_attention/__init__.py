"""FlashAttention for NVIDIA Hopper, written in TileLang."""

import importlib
import logging
import warnings
from types import ModuleType

with warnings.catch_warnings():  # torch's import warns where there is no NumPy, which nothing here needs
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    importlib.import_module("torch")

from tl_attention.api.block_masks import create_block_mask
from tl_attention.api.flash import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from tl_attention.api.flex import flex_attention
from tl_attention.api.interface import (
    fp32_workspace_bytes,
    mha_bwd_interface,
    mha_fwd_interface,
    ref_mha_bwd_interface,
    ref_mha_fwd_interface,
)
from tl_attention.api.kvcache import flash_attn_with_kvcache, kvcache_workspace_bytes
from tl_attention.api.merge import merge_states
from tl_attention.api.trees import draft_tree_mask
from tl_attention.version import __version__

importlib.import_module("tl_attention.integrations.hf_decode")  # its op, which exported programs may hold

__all__ = [
    "__version__",
    "create_block_mask",
    "draft_tree_mask",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "fp32_workspace_bytes",
    "kvcache_workspace_bytes",
    "merge_states",
    "mha_bwd_interface",
    "mha_fwd_interface",
    "ref_mha_bwd_interface",
    "ref_mha_fwd_interface",
]


logging.getLogger(__name__).addHandler(logging.NullHandler())  # a program decides where lines go
_MODULES = "block_masks", "distributed", "hf", "mask_picture", "torch_backend"


def __getattr__(name: str) -> ModuleType:
    """Import a public module at its first use: `import tl_attention` alone needs only torch and takes little time."""
    if name in _MODULES:
        return importlib.import_module(f"tl_attention.{name}")
    raise AttributeError(f"module 'tl_attention' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, and those of the module itself."""
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
