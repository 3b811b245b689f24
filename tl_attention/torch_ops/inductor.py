"""Repair of Inductor for ops that write to a view of a tensor, such as the cache of one layer."""

from __future__ import annotations

import sys
from typing import Any

import torch

_LOWERING = "torch._inductor.lowering"


def keep_storage_offsets() -> None:
    """Have Inductor read a symbolic storage offset from its node, as it reads sizes and strides. Call it in the fake of an op that writes.

    Inductor computes the offset of a rebuilt tensor, which is always 0: with dynamic sizes an op then writes to the start of a tensor in
    place of the view that it got (torch 2.13 and 2.14, pytorch #198068: drop when fixed). Nothing is imported: while Inductor compiles, its
    module is there.
    """
    lowering, op = sys.modules.get(_LOWERING), torch.ops.aten.sym_storage_offset.default
    if lowering is None:
        return
    # A fallback, which computes the offset, is there where code with such a view was compiled before
    if op not in lowering.lowerings or op in lowering.fallbacks:
        lowering.register_lowering(op)(_offset)
        lowering.fallbacks.discard(op)


def _offset(x: Any) -> Any:
    """Storage offset of the tensor of the current node, as a number or a sympy expression."""
    value = sys.modules[_LOWERING].V.graph.current_node.meta["val"]
    return value.node.expr if isinstance(value, torch.SymInt) else int(value)
