"""PyTorch's SDPA, varlen_attn and nested tensors by these kernels: `tl_attention.torch_backend.register()`."""

from tl_attention.integrations.torch_backend import Handle, register

__all__ = ["Handle", "register"]
