"""Facts of the GPU this package is written for: NVIDIA Hopper, sm_90a."""

from __future__ import annotations

import functools

import torch

from tl_attention.problem.attn_problem import HALF_DTYPES

# torch.dtype -> name in problem.DTYPES, for dtypes that tensor cores multiply as they are
DTYPE_NAMES = {getattr(torch, name): name for name in HALF_DTYPES}
DEFAULT_GPU = "NVIDIA H200"  # the GPU whose tuned table serves where there is no GPU
TARGET = {"kind": "cuda", "arch": "sm_90a"}
SMEM_LIMIT = 232448  # bytes of shared memory per CTA
SMEM_PER_SM = 233472  # bytes, 1 KB of them reserved per CTA
H200_SMS = 132  # as in an H100 SXM
REGISTERS = 65536  # 32-bit registers per SM


def is_hopper(device: torch.device | int) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def sm_count(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def gpu_name() -> str:
    """Name of the current GPU in torch, or DEFAULT_GPU where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else DEFAULT_GPU


def gpu_slug(name: str) -> str:
    """NVIDIA H200 -> nvidia_h200, the name of its tuned table and of its folder of results."""
    return "_".join(name.lower().split())
