"""Launches of tl_attention without a GPU: calls on CPU tensors find their plans as on an H200, and their kernels compute nothing.

`recorded(call)` returns a Launch per kernel. Tile tables of packed sequences are filled as kernels/sources/tile_table.py fills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

SMS = 132
GPU = "NVIDIA H200"
HEADER_WORDS = 6  # of a DLTensor


@dataclass(frozen=True)
class Shaped:
    """A tensor of which only the sizes matter."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """A kernel and the arguments of one launch: numbers, integer tensors, and Shaped for all other tensors.

    places: addresses of the integer tensors, 0 for other arguments. Launches with an address in common share a tensor.
    """

    problem: Any
    config: Any
    arguments: tuple
    places: tuple[int, ...] = ()


def _sizes(pointer: ctypes.c_void_p) -> Shaped:
    words = (ctypes.c_int64 * HEADER_WORDS).from_address(pointer.value)
    dims = words[2] & 0xFFFFFFFF
    return Shaped(tuple((ctypes.c_int64 * dims).from_address(words[3])))


def _has_integers(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not x.dtype.is_floating_point


def _kept(x: Any) -> Any:
    if isinstance(x, ctypes.c_void_p):
        return _sizes(x)
    if isinstance(x, torch.Tensor):
        return x.clone() if _has_integers(x) else Shaped(tuple(x.shape))
    return x


def fill_tables(cu_q: Any, cu_k: Any, used_q: Any, used_k: Any, blocks: Any, *rest: Any) -> None:
    """Do the work of kernels/sources/tile_table.py: tiles of TABLE_ROWS queries, those with the most steps first."""
    from tl_attention.problem.attn_problem import TABLE_ROWS

    *tables, _, _, _, _, use_q, use_k, step_rows, left, right, by_sequence, _ = rest
    batch = len(cu_q) - 1
    of = [(cu_q, used_q, use_q), (cu_k, used_k, use_k)]
    lens = [[int(used[b]) if use else int(cu[b + 1] - cu[b]) for b in range(batch)] for cu, used, use in of]
    counts = [[-(-n // TABLE_ROWS) for n in x] for x in lens]
    counts[0] = [max(n, 1) for n in counts[0]]
    first = [[sum(c[:b]) for b in range(batch)] for c in counts]
    for side, table in enumerate(tables):
        if (
            not isinstance(table, torch.Tensor)
            or (table.shape[0] <= 1 and side == 1)
            or (side == 1 and by_sequence)
        ):
            continue
        entries = []
        for b in range(batch):
            for block in range(counts[side][b]):
                rows, others = lens[side][b], lens[1 - side][b]
                behind, ahead = (left, right) if side == 0 else (right, left)
                start = max(block * TABLE_ROWS + others - rows - behind, 0)
                last = min(min(block * TABLE_ROWS + TABLE_ROWS, rows) - 1 + others - rows + ahead, others - 1)
                steps = max(max(last, -step_rows) // step_rows - start // step_rows + 1, 0)
                entries.append((-steps, b, block))
        table[:, 1] = -1
        for i, (_, b, block) in enumerate(sorted(entries)[: table.shape[0]]):
            row = b, block, int(cu_q[b]) + lens[0][b], lens[0][b], int(cu_k[b]) + lens[1][b], lens[1][b]
            table[i] = torch.tensor(
                (*row, first[0][b] * TABLE_ROWS, first[1][b] * TABLE_ROWS), dtype=torch.int32
            )


def fill_progress(problem: Any, first: Any, *arguments: Any) -> None:
    """Do what kernels/fp32/first_terms.py does to counters: the items of the first heads are drawn and done."""
    from tl_attention.config.term_configs import ITEM_ELEMENTS

    *_, progress, heads, _ = arguments
    rows = _kept(first).shape[1]
    per_head = 2 * -(-rows // (ITEM_ELEMENTS // problem.head_dim))
    progress[0], progress[1 : 1 + heads] = heads * per_head, per_head


def _zeros(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
    return torch.zeros(extent, dtype=dtype).as_strided(tuple(shape), tuple(strides))


@functools.cache
def _modules() -> tuple:
    """Modules whose names are replaced."""
    found = [importlib.import_module("tl_attention.problem.target")]
    for folder in ("launch", "checks", "torch_ops", "api"):
        package = importlib.import_module(f"tl_attention.{folder}")
        for one in pkgutil.iter_modules(package.__path__):
            found.append(importlib.import_module(f"{package.__name__}.{one.name}"))
    return tuple(found)


def _forget_plans() -> None:
    for module in _modules():
        for name in ("plans", "calls"):
            if hasattr(cache := getattr(module, "plan_cache", None), name):
                getattr(cache, name).clear()
        getattr(module, "_kernels", {}).clear()  # those of a forward or a backward, by their key
        for value in vars(module).values():
            if hasattr(value, "cache_clear") and getattr(value, "__module__", "") == module.__name__:
                value.cache_clear()


@contextlib.contextmanager
def fake_gpu(kernel_of: Callable[[Any, Any], Callable[..., None]], sms: int = SMS) -> Iterator[None]:
    """Within it calls on CPU tensors launch kernel_of(problem, config), as on an H200 with `sms` SMs. Restores all that it replaces.

    Raises RuntimeError if the package no longer has a name that is replaced.
    """
    names = {
        "empty": _zeros,
        "sm_count": lambda device: sms,
        "stream_tickets": lambda device, dynamic, numbers=2: torch.zeros(numbers, dtype=torch.int32),
        "unused_tensor": lambda device, dtype, *shape: torch.zeros(shape, dtype=getattr(torch, dtype)),
        "compile_kernels": lambda kernels, *_: [kernel_of(*kernel) for kernel in kernels],
        "build_ahead": lambda *_: None,
        "check_device_or_warn": lambda *_, **__: None,
        "check_device": lambda *_, **__: None,
        "is_hopper": lambda device: True,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            owners = [module for module in _modules() if hasattr(module, name)]
            if not owners:
                raise RuntimeError(f"tl_attention has no {name} any more")
            for module in owners:
                patch.setattr(module, name, value)
        patch.setattr(torch.cuda, "current_device", lambda: None)
        patch.setattr(torch.cuda, "get_device_name", lambda *_: GPU)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(torch.Tensor, "get_device", lambda x: 0)
        _forget_plans()
        try:
            yield
        finally:
            _forget_plans()


@contextlib.contextmanager
def recording(sms: int = SMS) -> Iterator[list[Launch]]:
    """fake_gpu() in which calls append their launches to a list."""
    from tl_attention.config.kernel_configs import FirstTermsConfig, TileTable

    launches: list[Launch] = []

    def recorder(problem: Any, config: Any) -> Callable:
        def note(*arguments: Any) -> None:
            before = tuple(map(_kept, arguments))
            if isinstance(config, TileTable):
                fill_tables(*arguments)
            if isinstance(config, FirstTermsConfig):
                fill_progress(problem, *arguments)
            places = tuple(x.data_ptr() if _has_integers(x) else 0 for x in arguments)
            launches.append(Launch(problem, config, before, places))

        return note

    with fake_gpu(recorder, sms):
        yield launches


@contextlib.contextmanager
def forced_decode(config: Any) -> Iterator[None]:
    """Within it decodes run `config`, whatever their number of items; one of batch_invariant follows from the call."""
    from tl_attention.config import configs
    from tl_attention.launch import common, decode

    with pytest.MonkeyPatch.context() as patch:
        if not config.batch_invariant:
            patch.setattr(configs, "decode_config", lambda *_, **__: config)
        patch.setattr(decode, "plan_cache", common.PlanCache())
        yield


def recorded(call: Callable[[], Any], sms: int = SMS) -> list[Launch]:
    """Launches of a call on a GPU with `sms` SMs."""
    with recording(sms) as launches:
        call()
    return launches
