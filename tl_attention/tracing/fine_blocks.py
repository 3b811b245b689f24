"""Blocks of a mask that are smaller than those of the kernels, or cut them, as a part of the mask: a captured tensor of their states."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from tl_attention.problem.program import BOOL, INT, Call, Captured, Program, Value

PARTIAL, FULL = 1, 2  # states of blocks, see launch/block_lists.py


def with_fine_blocks(call: Call, states: torch.Tensor, size: tuple[int, int]) -> Call:
    """The call whose mask also says which blocks of a mask are hidden and full; its last tensor is `states`.

    Args:
        states: int8 [1 or batch, 1 or heads, query blocks, key blocks].
        size: queries and keys per block.
    """
    program = _with_fine_blocks(call.program, states.shape[0] > 1, states.shape[1] > 1, size)
    return replace(call, program=program, tensors=(*call.tensors, states))


@functools.lru_cache(maxsize=1024)
def _with_fine_blocks(program: Program, of_batch: bool, of_head: bool, size: tuple[int, int]) -> Program:
    """The program with states of blocks as its last tensor: of_batch, of_head say in which dimensions these have more than one entry."""
    values = [*program.values]

    def value(op: str, dtype: str, *args: int, data: int | None = None) -> int:
        new = Value(op, dtype, args, data)
        if new not in values:
            values.append(new)
        return values.index(new)

    def number(n: int) -> int:
        return value("constant", INT, data=n)

    def block(leaf: str, rows: int) -> int:
        position = value(leaf, INT)
        return position if rows == 1 else value("floor_divide", INT, position, number(rows))

    entry = [
        value(leaf, INT) if many else number(0) for leaf, many in (("batch", of_batch), ("head", of_head))
    ]
    index = *entry, block("query", size[0]), block("key", size[1])
    state = value("load", INT, *index, data=len(program.tensors))
    if program.mask is None:
        mask = value("ge", BOOL, state, number(PARTIAL))
    else:
        partial = value("and", BOOL, value("eq", BOOL, state, number(PARTIAL)), program.mask)
        mask = value("or", BOOL, value("eq", BOOL, state, number(FULL)), partial)
    return replace(program, values=tuple(values), mask=mask, tensors=(*program.tensors, Captured("int8", 4)))
