"""Attention of other libraries by these kernels: PyTorch's SDPA, nested tensors and varlen_attn; transformers."""
