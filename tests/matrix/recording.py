"""Calls without a GPU: CPU tensors find their plans as on an H200, and their kernels compute nothing. In a process of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from protocol.launches import fake_gpu

from . import calls
from .calls import trial_of
from .classes import CallClass
from .draws import draws
from .memory import count_launches


def _no_formula(trial: calls.AttentionTrial, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of zeros."""
    out = torch.zeros(*trial.q.shape[:-1], trial.head_dim_v, dtype=dtype)
    return out, out[..., 0].mT.contiguous()


def compute_nothing() -> None:
    """Replace what computes values that nothing reads, in this process for good."""
    calls.AttentionTrial._reference = _no_formula
    calls.dropout_keep = lambda *_: None
    calls.Trial.randn = lambda trial, *shape: torch.zeros(shape, dtype=trial.dtype)


def launched(classes: Iterable[CallClass], most: int) -> dict[str, dict[str, int]]:
    """Launches of each class by kernel name, in its first draws: until all its kernels are launched, at most `most`."""
    counts: Counter[str] = Counter()
    compute_nothing()
    found = {}
    with fake_gpu(lambda problem, config: lambda *arguments: None):
        count_launches(counts)
        for one in classes:
            counts.clear()
            for draw in draws(one)[:most]:
                trial_of(one, draw, "cpu").run()
                if one.kernels.keys() <= counts.keys():
                    break
            found[one.name] = dict(counts)
    return found
