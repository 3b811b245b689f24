"""Bounds of a mask per block of queries and keys, from its traced program: which blocks are surely full or surely empty.

Interval arithmetic: a value is bounded from below and above over all elements of a block, by a few operations on tensors with one
element per block. Captured tensors that q_idx or kv_idx index are reduced per block. Nothing is read back by the host.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from tl_attention.problem.program import BOOL, FLOAT, INT, LEAVES, LONG, Call, Value
from tl_attention.tracing.program_values import within
from tl_attention.tracing.trace_ops import ROUNDINGS, TORCH_DTYPES, evaluate

AXES = {"batch": 0, "head": 1, "query": 2, "key": 3}


class Blocks(NamedTuple):
    """Blocks to compute bounds for."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    block_q: int
    block_k: int
    device: torch.device

    @property
    def rows(self) -> int:
        return -(-self.seqlen_q // self.block_q)

    @property
    def columns(self) -> int:
        return -(-self.seqlen_k // self.block_k)

    @property
    def are_whole(self) -> bool:
        """True if no block ends past the last query or key."""
        return not (self.seqlen_q % self.block_q or self.seqlen_k % self.block_k)

    def size(self, leaf: str) -> int:
        """Number of different values of a leaf."""
        return {"batch": self.batch, "head": self.heads, "query": self.seqlen_q, "key": self.seqlen_k}[leaf]

    def block(self, leaf: str) -> int:
        return {"query": self.block_q, "key": self.block_k}.get(leaf, 1)


class Bounds(NamedTuple):
    """Bounds of a value per block: tensors [batch or 1, heads or 1, rows or 1, columns or 1], or numbers.

    Args:
        low, high: for a number: the smallest and the largest value in a block, fp64; NaN: unknown. For a bool: low is True where it is
            surely True, high is True where it is surely False.
        is_point: True if the value does not vary within blocks.
    """

    low: Any
    high: Any
    is_point: bool = False


def mask_bounds(call: Call, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """(surely full, surely empty): bool [batch or 1, heads or 1, rows, columns]; a dimension is 1 if the mask does not depend on it."""
    root = call.program.mask
    found = (True, False) if root is None else _Evaluation(call, blocks).bounds(root)[:2]
    full, empty = (
        x.view(x.shape or (1, 1, 1, 1))
        if isinstance(x, torch.Tensor)
        else torch.full((1, 1, 1, 1), x, device=blocks.device)
        for x in found
    )
    shape = *full.shape[:2], blocks.rows, blocks.columns
    return full.expand(shape), empty.expand(shape)


def distance_bounds(least: int | None, most: int | None, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """(full, empty) as mask_bounds(), exact, of the mask least <= q_idx - kv_idx <= most; None: no bound."""
    stream = stream_of(blocks.device)
    query, key = (
        (_leaf.__wrapped__ if stream is None else _leaf)(x, blocks, stream) for x in ("query", "key")
    )
    low, high = query.low - key.high, query.high - key.low
    least, most = -math.inf if least is None else least, math.inf if most is None else most
    return (low >= least) & (high <= most), (high < least) | (low > most) | (least > most)


def stream_of(device: torch.device) -> int | None:
    """Current stream, the only one that may use what this call caches.

    None in a CUDA graph capture and under FakeTensorMode, where nothing may be cached.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return None
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)


@functools.lru_cache(maxsize=64)
def _leaf(leaf: str, blocks: Blocks, stream: int | None) -> Bounds:
    """Bounds of a leaf, cached per stream."""
    block, size = blocks.block(leaf), blocks.size(leaf)
    low = torch.arange(0, size, block, dtype=torch.float64, device=blocks.device)
    low = low.view([-1 if axis == AXES[leaf] else 1 for axis in range(4)])
    if block == 1:
        return Bounds(low, low, True)
    return Bounds(low, (low + (block - 1)).clamp(max=size - 1))


class _Evaluation:
    """Bounds of the values of one program, each computed once."""

    def __init__(self, call: Call, blocks: Blocks):
        self.call, self.blocks, self.values = call, blocks, call.program.values
        self.stream = stream_of(blocks.device)
        self.found: dict[int, Bounds] = {}
        self.sizes: dict[int, float] = {}  # upper bound of |value|, known without the tensors
        self.by_block: dict[
            tuple, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # (smallest, largest) elements per block

    def bounds(self, root: int) -> Bounds:
        for i in sorted(self.call.program.needed([root])):
            self.sizes[i] = self._size(self.values[i])
            self.found[i] = self._representable(i, self._bounds(self.values[i]))
        return self.found[root]

    def _bounds(self, value: Value) -> Bounds:
        op, args = value.op, [self.found[arg] for arg in value.args]
        if op in LEAVES:
            return self._leaf(op)
        if op in ("constant", "number"):
            return _number(value.data if op == "constant" else self.call.numbers[value.data], value.dtype)
        if op == "load":
            return self._load(value)
        if all(arg.is_point for arg in args):
            return self._point(value, args)
        dtypes = [self.values[arg].dtype for arg in value.args]
        if value.dtype == BOOL:
            found = _of_bools(op, args) if BOOL in dtypes else _comparison(op, *args)
            return found or self._unknown(False)
        found = _of_numbers(op, args, dtypes) or self._unknown(math.nan)
        if value.dtype != FLOAT:
            return found
        return Bounds(found.low.float().double(), found.high.float().double())  # rounding is monotone

    def _leaf(self, leaf: str) -> Bounds:
        return (_leaf.__wrapped__ if self.stream is None else _leaf)(leaf, self.blocks, self.stream)

    def _unknown(self, x: float | bool) -> Bounds:
        x = torch.full((1, 1, 1, 1), x, device=self.blocks.device)
        return Bounds(x, x)

    def _point(self, value: Value, args: list[Bounds]) -> Bounds:
        """Result in PyTorch of an operation on values that do not vary within blocks."""
        operands = []
        for i, (low, *_) in zip(value.args, args, strict=True):
            dtype = TORCH_DTYPES[self.values[i].dtype]
            if isinstance(low, torch.Tensor):
                operands.append(low.to(dtype))
            else:
                operands.append(torch.full((), low, dtype=dtype, device=self.blocks.device))
        return _exact(evaluate(value, operands, self.blocks.device))

    def _load(self, value: Value) -> Bounds:
        """Bounds of an element of a captured tensor.

        A dimension indexed by q_idx or kv_idx itself is bounded per block. Other indices are exact if they do not vary within blocks; else
        the bounds cover the whole dimension.
        """
        tensor = self.call.tensors[value.data].detach()
        leaves, others, certain = [], [], True
        for dim, arg in enumerate(value.args):
            others.append(self.found[arg])
            while self.values[arg].op == "cast" and self.values[arg].dtype == LONG:  # of a position
                (arg,) = self.values[arg].args
            leaves.append(self.values[arg].op if self.values[arg].op in LEAVES else None)
            if leaves[dim] is None and not others[dim].is_point:
                certain = (others[dim].low == others[dim].high) & certain
        low, high = self._blocks_of(value.data, tensor, leaves)
        # A view: dimensions in the order of the axes
        if None not in leaves and len({*leaves}) == len(leaves):
            dims = sorted(range(tensor.ndim), key=lambda dim: AXES[leaves[dim]])
            sizes = {AXES[leaves[dim]]: low.shape[dim] for dim in dims}
            shape = [sizes.get(axis, 1) for axis in range(4)]
            low, high = (x.permute(dims).reshape(shape) for x in (low, high))
        else:
            index = []
            for leaf, bounds, size in zip(leaves, others, tensor.shape, strict=True):
                if leaf is not None:
                    index.append(self._leaf(leaf).low.long() // self.blocks.block(leaf))
                elif isinstance(bounds.low, torch.Tensor):
                    index.append(within(bounds.low.nan_to_num(0), size))
                else:
                    place = int(bounds.low)
                    index.append(min(max(place + size if place < 0 else place, 0), size - 1))  # as within()
            low, high = (x[tuple(index)] for x in (low, high))
        is_point = certain is True and not {"query", "key"} & {leaf for leaf in leaves if self._varies(leaf)}
        if is_point:
            return _exact(low)
        if certain is not True:
            least, most = tensor.aminmax() if tensor.dtype != torch.bool else (tensor.all(), tensor.any())
            least, most = least.to(low.dtype), most.to(high.dtype)
            low, high = torch.where(certain, low, least), torch.where(certain, high, most)
        return Bounds(low, ~high) if value.dtype == BOOL else Bounds(low.double(), high.double())

    def _varies(self, leaf: str | None) -> bool:
        return leaf is not None and self.blocks.block(leaf) > 1

    def _blocks_of(
        self, slot: int, tensor: torch.Tensor, leaves: list[str | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Smallest and largest elements of a tensor in each block of the dimensions that are indexed by q_idx or kv_idx."""
        sizes = [
            (dim, self.blocks.size(leaf), self.blocks.block(leaf))
            for dim, leaf in enumerate(leaves)
            if leaf is not None
        ]
        key = slot, *sizes
        if key not in self.by_block:
            low = high = tensor
            for dim, count, block in sizes:
                if block == 1:
                    low, high = low.narrow(dim, 0, count), high.narrow(dim, 0, count)
                elif low is high:
                    low, high = _by_block(tensor, dim, count, block)
                else:
                    low, high = _by_block(low, dim, count, block)[0], _by_block(high, dim, count, block)[1]
            if tensor.dtype != torch.bool and low is not high:  # few elements are left
                low, high = low.double(), high.double()
            self.by_block[key] = low, high
        return self.by_block[key]

    def _size(self, value: Value) -> float:
        sizes = [self.sizes[arg] for arg in value.args]
        if value.dtype in (BOOL, FLOAT):
            return 1.0 if value.dtype == BOOL else math.inf
        if value.op in LEAVES:
            return float(self.blocks.size(value.op))
        if value.op in ("constant", "number"):
            return abs(float(value.data if value.op == "constant" else self.call.numbers[value.data]))
        if value.op in ("add", "sub"):
            return sum(sizes)
        if value.op == "mul":
            return math.prod(sizes)
        if value.op == "where":
            return max(sizes[1:])
        if value.op in ("maximum", "minimum"):
            return max(sizes)
        if value.op in ("neg", "abs", "detach", "sign", "floor_divide", "fmod"):
            return sizes[0]
        if value.op == "remainder":
            return sizes[1]
        if value.op == "cast":
            return sizes[0]
        if value.op == "load":
            dtype = self.call.tensors[value.data].dtype
            return float(max(abs(torch.iinfo(dtype).min), torch.iinfo(dtype).max))
        return math.inf

    def _representable(self, i: int, found: Bounds) -> Bounds:
        """Bounds that are unknown where an integer may overflow, or is not exact in fp64."""
        value = self.values[i]
        limit = {INT: 2.0**31, LONG: 2.0**53}.get(value.dtype)
        if limit is None or self.sizes[i] < limit or value.op in ("constant", "number"):
            return found
        if value.dtype == INT and (found.is_point or value.op == "load"):
            return found  # an element of a tensor, or computed by PyTorch: in range
        fits = (found.low >= -limit) & (found.high < limit)
        return Bounds(torch.where(fits, found.low, math.nan), torch.where(fits, found.high, math.nan))


def _exact(x: torch.Tensor) -> Bounds:
    """Bounds of values that do not vary within blocks."""
    if x.dtype == torch.bool:
        return Bounds(x, ~x, True)
    x = x.double()
    return Bounds(x, x, True)


def _number(number: float | int | bool, dtype: str) -> Bounds:
    if dtype == BOOL:
        return Bounds(number, not number, True)
    if dtype == FLOAT:
        number = torch.tensor(number, dtype=torch.float32, device="cpu").item()
    return Bounds(float(number), float(number), True)


def _by_block(x: torch.Tensor, dim: int, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest element of each block of the first `count` elements of a dimension; of bools, all and any."""
    is_bool = x.dtype == torch.bool
    whole = count // block * block
    parts = []
    if whole:
        part = x if whole == x.shape[dim] else x.narrow(dim, 0, whole)
        part = part.view(*x.shape[:dim], -1, block, *x.shape[dim + 1 :])
        parts.append(_ends(part.view(torch.uint8) if is_bool else part, dim + 1))
    if whole < count:
        part = x.narrow(dim, whole, count - whole)
        parts.append([y.unsqueeze(dim) for y in _ends(part.view(torch.uint8) if is_bool else part, dim)])
    low, high = (y[0] if len(y) == 1 else torch.cat(y, dim) for y in zip(*parts, strict=True))
    return (low.view(torch.bool), high.view(torch.bool)) if is_bool else (low, high)


def _ends(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.aminmax(x, dim=dim) if x.numel() else (x.amin(dim), x.amax(dim))


def _least(x: Any, y: Any) -> Any:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return torch.minimum(x, y)
    return x.clamp(max=y) if isinstance(x, torch.Tensor) else y.clamp(max=x)


def _most(x: Any, y: Any) -> Any:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return torch.maximum(x, y)
    return x.clamp(min=y) if isinstance(x, torch.Tensor) else y.clamp(min=x)


def _comparison(op: str, x: Bounds, y: Bounds) -> Bounds | None:
    """Bounds of a comparison of numbers; unknown numbers are neither surely smaller nor surely larger."""
    if op in ("gt", "ge"):
        return _comparison({"gt": "lt", "ge": "le"}[op], y, x)
    if op == "lt":
        return Bounds(x.high < y.low, x.low >= y.high)
    if op == "le":
        return Bounds(x.high <= y.low, x.low > y.high)
    if op not in ("eq", "ne"):
        return None
    same = (x.high <= y.low) & (x.low >= y.high)
    differ = (x.high < y.low) | (x.low > y.high)
    return Bounds(same, differ) if op == "eq" else Bounds(differ, same)


def _of_bools(op: str, args: list[Bounds]) -> Bounds | None:
    """Bounds of a bool that is made of bools."""
    (true, false, _), *others = args
    if op == "detach":
        return args[0]
    if op == "not":
        return Bounds(false, true)
    if op == "where":
        yes, no = others
        return Bounds(
            (true & yes.low) | (false & no.low) | (yes.low & no.low),
            (true & yes.high) | (false & no.high) | (yes.high & no.high),
        )
    if not others:
        return None
    ((other_true, other_false, _),) = others
    if op == "and":
        return Bounds(true & other_true, false | other_false)
    if op == "or":
        return Bounds(true | other_true, false & other_false)
    if op not in ("xor", "ne", "eq"):
        return None
    same = (true & other_true) | (false & other_false)
    differ = (true & other_false) | (false & other_true)
    return Bounds(same, differ) if op == "eq" else Bounds(differ, same)


def _of_numbers(op: str, args: list[Bounds], dtypes: list[str]) -> Bounds | None:
    """Bounds of a number; None for operations without a rule."""
    x, *others = args
    if op == "cast":
        if dtypes[0] == BOOL:
            return Bounds(x.low.double(), (~x.high).double())
        return Bounds(x.low.trunc(), x.high.trunc()) if dtypes[0] == FLOAT else x
    if op == "detach":
        return x
    if op in ROUNDINGS:
        return Bounds(getattr(torch, op)(x.low), getattr(torch, op)(x.high))
    if op == "neg":
        return Bounds(-x.high, -x.low)
    if op == "abs":
        return Bounds(_most(_most(x.low, -x.high), 0.0), _most(-x.low, x.high))
    if op == "where":
        yes, no = others
        if not isinstance(x.low, torch.Tensor):
            return yes if x.low else no
        # Unknown: the smaller of both, the larger of both
        return Bounds(
            _least(_chosen(x.low, yes.low, no.low), _chosen(x.high, no.low, yes.low)),
            _most(_chosen(x.low, yes.high, no.high), _chosen(x.high, no.high, yes.high)),
        )
    if len(others) != 1:
        return None
    (y,) = others
    if op == "add":
        return Bounds(x.low + y.low, x.high + y.high)
    if op == "sub":
        return Bounds(x.low - y.high, x.high - y.low)
    if op in ("maximum", "minimum"):
        f = _most if op == "maximum" else _least
        return Bounds(f(x.low, y.low), f(x.high, y.high))
    if op == "mul":
        return _product(x, y)
    if not isinstance(y.low, float):
        return None  # a divisor that varies, or a shift
    number = y.low
    if op in ("shift_left", "shift_right") and 0 <= number < 31:
        factor = 2.0**number
        if op == "shift_left":
            return Bounds(x.low * factor, x.high * factor)
        return Bounds((x.low / factor).floor(), (x.high / factor).floor())
    if op == "and" and number >= 0 and not int(number) & (int(number) + 1):
        return _remainder(x, number + 1)  # the lowest bits
    if not number > 0:
        return None
    if op == "div":
        return Bounds(x.low / number, x.high / number)
    if op == "floor_divide" and FLOAT not in dtypes:
        return Bounds((x.low / number).floor(), (x.high / number).floor())
    if op == "remainder" and FLOAT not in dtypes:
        return _remainder(x, number)
    return None


def _chosen(condition: torch.Tensor, x: Any, y: Any) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        x = torch.full((), x, dtype=torch.float64, device=condition.device)
    return torch.where(condition, x, y)


def _remainder(x: Bounds, divisor: float) -> Bounds:
    """Bounds of an integer modulo a positive number: exact within one period, else all remainders."""
    period = (x.low / divisor).floor()
    same = period == (x.high / divisor).floor()
    start = period * divisor
    unknown = (x.high - x.low) * 0.0  # NaN where the integer is unknown
    return Bounds(
        torch.where(same, x.low - start, unknown), torch.where(same, x.high - start, unknown + (divisor - 1))
    )


def _product(x: Bounds, y: Bounds) -> Bounds:
    """Bounds of a product: those at the corners."""
    products = [a * b for a in (x[:1] if x.is_point else x[:2]) for b in (y[:1] if y.is_point else y[:2])]
    low = high = products[0]
    for product in products[1:]:
        low, high = _least(low, product), _most(high, product)
    return Bounds(low, high)
