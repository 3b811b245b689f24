"""Memory of launches: outputs and workspaces that start as NaN, with canaries between them; counts of launched kernels."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tl_attention import launch
from tl_attention.compilation import manifest

BYTE = 0xFF  # four of them are NaN in fp32, two in bf16 and in fp16; -1 as an integer
GUARD_BYTES, ALIGNMENT = 1024, 1024
CHUNK_BYTES = 1 << 28


class Arena:
    """Memory for the tensors that launches allocate. Each is dense in bytes BYTE, between canaries of the same bytes."""

    def __init__(self, device: torch.device | str):
        self.device = device
        self.chunks: list[torch.Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Free all tensors, and set what they had to BYTE again."""
        used = getattr(self, "used", [])
        for chunk, end in zip(self.chunks, used, strict=False):
            chunk[:end].fill_(BYTE)
        self.used, self.canaries = [0] * len(self.chunks), []

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the place of launch.common.empty()."""
        if not all(shape):
            return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
        extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        size = extent * dtype.itemsize
        needed = GUARD_BYTES + size + GUARD_BYTES + ALIGNMENT
        number = next(
            (i for i, chunk in enumerate(self.chunks) if self.used[i] + needed <= chunk.numel()), None
        )
        if number is None:
            number = len(self.chunks)
            room = max(CHUNK_BYTES, needed)
            self.chunks.append(torch.full((room,), BYTE, dtype=torch.uint8, device=self.device))
            self.used.append(0)
        before = self.used[number]
        start = -(-(before + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
        end = start + size
        self.used[number] = end + GUARD_BYTES
        self.canaries += [(number, before, start), (number, end, end + GUARD_BYTES)]
        typed = self.chunks[number][start:end].view(dtype)
        return typed.as_strided(tuple(shape), tuple(strides), typed.storage_offset())

    def damaged(self) -> torch.Tensor:
        """True on the device if a byte before or after a tensor has changed."""
        if not self.canaries:
            return torch.zeros((), dtype=torch.bool, device=self.device)
        return (torch.cat([self.chunks[i][a:b] for i, a, b in self.canaries]) != BYTE).any()


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, name: str, kernel: Callable[..., None], counts: Counter[str]):
        self.name, self.kernel, self.counts = name, kernel, counts

    def __call__(self, *arguments: Any) -> None:
        self.counts[self.name] += 1
        self.kernel(*arguments)


def launch_modules() -> list[Any]:
    """The modules of tl_attention.launch."""
    return [
        importlib.import_module(f"{launch.__name__}.{found.name}")
        for found in pkgutil.iter_modules(launch.__path__)
    ]


def replace_everywhere(name: str, value: Any) -> None:
    """Replace a name in all modules of tl_attention.launch that have it."""
    found = [module for module in launch_modules() if hasattr(module, name)]
    if not found:
        raise RuntimeError(f"tl_attention.launch has no {name} any more")
    for module in found:
        setattr(module, name, value)


def count_launches(counts: Counter[str]) -> None:
    """Make every kernel that a call finds from now on count its launches by name."""
    compile_kernels = launch.common.compile_kernels

    def counted(kernels: Sequence[tuple], *others: Any) -> list[Counted]:
        found = compile_kernels(kernels, *others)
        names = (manifest.kernel_name(*kernel) for kernel in kernels)
        return [Counted(name, kernel, counts) for name, kernel in zip(names, found, strict=True)]

    replace_everywhere("compile_kernels", counted)


def forget_plans() -> None:
    """Forget launch plans, so that the next class finds its own kernels, and memory does not grow."""
    for module in launch_modules():
        if hasattr(module, "plan_cache"):
            module.plan_cache.plans.clear()
            module.plan_cache.calls.clear()


def is_untouched(x: torch.Tensor) -> torch.Tensor:
    """True on the device if all elements are NaN, as an Arena has made them."""
    return x.isnan().all() if x.numel() else torch.ones((), dtype=torch.bool, device=x.device)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a floating-point tensor as integers."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
