"""Kernels and warps that write fp32 tensors as sums of bf16 numbers."""
