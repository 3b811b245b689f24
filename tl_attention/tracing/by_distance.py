"""Captured tensors that a score_mod indexes by a function of q_idx - kv_idx, as by the buckets of T5, as tables by distance.

Kernels compute such an index for each diagonal of a tile, and where many distances share an element, many additions to its gradient
meet. If the index is the distance itself both are cheap. So a launch of many scores gets a table of the elements by distance, which
PyTorch makes and whose gradient it passes on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from tl_attention.problem.program import FLOAT, INT, Call, Captured, Program, TensorGradient, Value
from tl_attention.tracing.captures import for_later_calls
from tl_attention.tracing.program_values import program_values, within

# Scores of a launch from which on a table saves more than it takes (estimated). T5's buckets, 2**31 scores, backward: d128 7.59 ms, by
# tables 6.36; d64 6.74 and 4.69, with PyTorch's deterministic sum. Forward: 1.81 and 1.85, 1.29 and 1.24 (H200, 2026-11-23)
MIN_SCORES = 2**28
# Operations of an index that takes no longer than the distance itself
PLAIN = frozenset(("query", "key", "batch", "head", "constant", "number", "add", "sub", "neg", "cast"))
KEPT_BYTES = 64 << 20  # of places, in all
_kept: dict[tuple, torch.Tensor] = {}  # places of tables


@dataclass(frozen=True)
class Load:
    """Load by a function of the distance, of the original program.

    Attributes:
        has_batch, has_head: the index depends on the batch entry, the head.
        is_kept: the index depends on numbers and sizes alone.
    """

    value: int
    has_batch: bool
    has_head: bool
    is_kept: bool


@dataclass(frozen=True)
class ByDistance:
    """A program with a table in the place of each such load.

    Attributes:
        program: its last tensors are the tables, [batch or 1, heads or 1, distances] in fp32; its last number is seqlen_k - 1.
    """

    original: Program
    program: Program
    loads: tuple[Load, ...]

    def call(self, call: Call, sizes: tuple[int, int, int, int], deterministic: bool) -> Call:
        """The call of the program for a call of the original one. Autograd differentiates its tables.

        sizes: batch, heads, seqlen_q, seqlen_k. deterministic: sum the gradient of a captured tensor in a fixed order, which takes longer.
        """
        tables = [self._table(load, call, sizes, deterministic) for load in self.loads]
        return Call(self.program, (*call.tensors, *tables), (*call.numbers, sizes[-1] - 1))

    def _table(
        self, load: Load, call: Call, sizes: tuple[int, int, int, int], deterministic: bool
    ) -> torch.Tensor:
        tensor = call.tensors[self.original.values[load.value].data]
        places, elements = self._places(load, call, sizes), tensor.float().flatten()
        if deterministic:
            return elements[places]
        return elements.index_select(0, places.flatten()).view(places.shape)

    def _places(self, load: Load, call: Call, sizes: tuple[int, int, int, int]) -> torch.Tensor:
        tensor = call.tensors[self.original.values[load.value].data]
        device = tensor.device
        if not load.is_kept or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return _made_places(self.original, load, call, sizes)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        key = self.original, load, call.numbers, sizes, tensor.shape, device, stream
        places = _kept.get(key)
        if places is None:
            with for_later_calls():
                places = _made_places(self.original, load, call, sizes)
            if sum(x.nbytes for x in list(_kept.values())) + places.nbytes > KEPT_BYTES:
                _kept.clear()
            if places.nbytes <= KEPT_BYTES:
                _kept[key] = places
        return places


def _made_places(program: Program, load: Load, call: Call, sizes: tuple[int, int, int, int]) -> torch.Tensor:
    """Places of the elements of a table among those of the captured tensor, int64 [batch or 1, heads or 1, distances]."""
    value, (batch, heads, seqlen_q, seqlen_k) = program.values[load.value], sizes
    tensor = call.tensors[value.data]

    def numbers(first: int, stop: int, shape: tuple[int, int, int]) -> torch.Tensor:
        return torch.arange(first, stop, dtype=torch.int32, device=tensor.device).view(shape)

    distances = seqlen_q + seqlen_k - 1
    leaves = {
        "batch": numbers(0, batch if load.has_batch else 1, (-1, 1, 1)),
        "head": numbers(0, heads if load.has_head else 1, (1, -1, 1)),
        "query": numbers(1 - seqlen_k, seqlen_q, (1, 1, -1)),
        "key": numbers(0, 1, (1, 1, 1)),
    }
    found = program_values(call, value.args, leaves)
    places = 0
    for x, size in zip(found, tensor.shape, strict=True):
        places = places * size + within(x, size)
    return places.expand(*(leaves[name].numel() for name in ("batch", "head")), distances).contiguous()


@functools.lru_cache(1024)
def by_distance(program: Program) -> ByDistance | None:
    """The program with tables; None if none of its gradients profits."""
    learned = {(x.tensor, x.index) for x in program.gradients}
    chosen = [
        i
        for i, x in enumerate(program.values)
        if x.op == "load" and (x.data, x.args) in learned and _profits(program, i)
    ]
    if not chosen:
        return None
    loads = []
    for i in chosen:
        found = {program.values[j].op for j in program.needed(program.values[i].args)}
        loads.append(Load(i, "batch" in found, "head" in found, "load" not in found))
    return ByDistance(program, _rewritten(program, loads), tuple(loads))


def _profits(program: Program, i: int) -> bool:
    """True for a load of a float whose index the distance determines, by more than sums."""
    value = program.values[i]
    if value.dtype != FLOAT or not value.args or not all(map(program.is_diagonal, value.args)):
        return False
    found = {program.values[j].op for j in program.needed(value.args)}
    return found >= {"query", "key"} and not found <= PLAIN


def _rewritten(program: Program, loads: list[Load]) -> Program:
    tensors, numbers = program.tensors, program.numbers
    first = [
        Value("query", INT),
        Value("key", INT),
        Value("sub", INT, (0, 1)),
        Value("number", INT, data=len(numbers)),
        Value("add", INT, (2, 3)),  # place of the distance in a table
        Value("batch", INT),
        Value("head", INT),
        Value("constant", INT, data=0),
    ]
    place, batch, head, zero, shift = 4, 5, 6, 7, len(first)
    values = [replace(x, args=tuple(i + shift for i in x.args)) for x in program.values]
    moved = {}  # (tensor, index) of a load -> those of its table
    for n, load in enumerate(loads):
        value, table = program.values[load.value], len(tensors) + n
        index = batch if load.has_batch else zero, head if load.has_head else zero, place
        values[load.value] = Value("load", FLOAT, index, table)
        moved[value.data, value.args] = table, index

    def gradient(x: TensorGradient) -> TensorGradient:
        tensor, index = moved.get((x.tensor, x.index), (x.tensor, tuple(i + shift for i in x.index)))
        return TensorGradient(tensor, index, x.factor + shift)

    def root(i: int | None) -> int | None:
        return None if i is None else i + shift

    return replace(
        program,
        values=(*first, *values),
        score=root(program.score),
        mask=root(program.mask),
        slope=root(program.slope),
        tensors=(*tensors, *[Captured(FLOAT, 3) for _ in loads]),
        numbers=(*numbers, INT),
        gradients=tuple(map(gradient, program.gradients)),
    ).pruned()
