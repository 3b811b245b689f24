"""Calls without a GPU: CPU tensors find their plans as on an H200, and their kernels compute nothing. In a process of its own."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tl_attention import launch

from . import calls
from .calls import trial_of
from .classes import CallClass
from .draws import draws
from .memory import count_launches, replace_everywhere

SMS = 132
GPU = "NVIDIA H200"
OUTSIDE = (
    "tl_attention.checks.common",
    "tl_attention.torch_ops.attend",
    "tl_attention.torch_ops.ops",
    "tl_attention.api.kvcache",
    "tl_attention.problem.target",
)


def _zeros(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    return torch.zeros(extent, dtype=dtype).as_strided(tuple(shape), tuple(strides))


def _no_kernels(kernels: Sequence[tuple], *others: Any) -> list:
    return [lambda *arguments: None] * len(kernels)


def _no_formula(trial: calls.AttentionTrial, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of zeros."""
    out = torch.zeros(*trial.q.shape[:-1], trial.head_dim_v, dtype=dtype)
    return out, out[..., 0].mT.contiguous()


def install() -> None:
    """Replace what asks for a GPU, and what computes values that nothing reads, in this process for good."""
    calls.AttentionTrial._reference = _no_formula
    calls.dropout_keep = lambda *_: None
    calls.Trial.randn = lambda trial, *shape: torch.zeros(shape, dtype=trial.dtype)
    stand_ins = {
        "empty": _zeros,
        "sm_count": lambda device: SMS,
        "stream_tickets": lambda device, dynamic, numbers=2: torch.zeros(numbers, dtype=torch.int32),
        "unused_tensor": lambda device, dtype, *shape: torch.zeros(shape, dtype=getattr(torch, dtype)),
        "compile_kernels": _no_kernels,
    }
    for name, value in stand_ins.items():
        replace_everywhere(name, value)
    launch.decode._no_angles = lambda dtype, device: torch.zeros(1, 1, dtype=dtype)
    for name in OUTSIDE:
        module = importlib.import_module(name)
        for asked in ("check_device", "check_device_or_warn"):
            if hasattr(module, asked):
                setattr(module, asked, lambda *_, **__: None)
    torch.cuda.current_device = lambda: None
    torch.cuda.get_device_name = lambda *_: GPU
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.is_cuda = True
    torch.Tensor.get_device = lambda x: 0


def launched(classes: Iterable[CallClass], most: int) -> dict[str, dict[str, int]]:
    """Launches of each class by kernel name, in its first draws: until all its kernels are launched, at most `most`."""
    counts: Counter[str] = Counter()
    install()
    count_launches(counts)
    found = {}
    for one in classes:
        counts.clear()
        for draw in draws(one)[:most]:
            trial_of(one, draw, "cpu").run()
            if one.kernels.keys() <= counts.keys():
                break
        found[one.name] = dict(counts)
    return found
