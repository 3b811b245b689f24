"""Operations of aten as values of a Program: the tables of what is supported, and the conversion of traced graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tl_attention.problem.program import BOOL, CAPTURED_DTYPES, FLOAT, INT, LEAVES, LONG, Value
from tl_attention.tracing.aten_recorder import Node
from tl_attention.tracing.captures import is_number, number_of
from tl_attention.tracing.symbol import Stated

# Operations of a program, as functions of PyTorch on operands of the right dtype. kernels/scores/program_code.py has their CUDA
FLOAT_FUNCTIONS = (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log1p",
    "sqrt",
    "rsqrt",
    "tanh",
    "sigmoid",
    "sin",
    "cos",
    "atan",
    "erf",
)
ROUNDINGS = ("floor", "ceil", "round", "trunc")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ARITHMETIC = ("add", "sub", "mul", "maximum", "minimum", "floor_divide", "remainder", "fmod")
OPS: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch, name)
    for name in (
        *FLOAT_FUNCTIONS,
        *ROUNDINGS,
        *COMPARISONS,
        *ARITHMETIC,
        "div",
        "pow",
        "abs",
        "neg",
        "sign",
        "where",
    )
} | {
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    "detach": torch.Tensor.detach,
}
RENAMED = {
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_not": "not",
    "logical_and": "and",
    "logical_or": "or",
    "logical_xor": "xor",
    "logical_not": "not",
    "bitwise_left_shift": "shift_left",
    "bitwise_right_shift": "shift_right",
    "__and__": "and",
    "__or__": "or",
    "__xor__": "xor",
    "__lshift__": "shift_left",
    "__rshift__": "shift_right",
    "__ilshift__": "shift_left",
    "__irshift__": "shift_right",
    "sgn": "sign",
    "true_divide": "div",
}
# Operations that return their scalar operand; clone and the like
IDENTITIES = (
    "alias",
    "clone",
    "lift_fresh_copy",
    "lift_fresh",
    "expand",
    "view",
    "_unsafe_view",
    "reshape",
    "squeeze",
    "contiguous",
)
CASTS = ("_to_copy", "convert_element_type", "to", "type_as")
FILLS: dict[str, int | float] = {
    "scalar_tensor": 0,
    "full": 1,
    "full_like": 1,
    "new_full": 2,
    "zeros_like": 0.0,
    "ones_like": 1.0,
}
CREATIONS = {"zeros": 0.0, "ones": 1.0, "new_zeros": 0.0, "new_ones": 1.0}
OTHERS = "clamp relu square reciprocal isnan isinf masked_fill gelu silu softplus hardtanh leaky_relu elu lerp logaddexp casts indexing"
SUPPORTED = ", ".join(
    sorted(
        {*OPS, *OTHERS.split(), *(name for name in RENAMED if not name.startswith(("bitwise", "__")))}
        - {"and", "or", "xor", "not", "detach"}
    )
)
# Numbers compiled into kernels, as they make operations cheaper or vanish. Other numbers are arguments of a launch
BUILT_IN = (0, 1, -1, 2, 0.5, -0.5, -2)
DTYPES = {
    torch.float32: FLOAT,
    torch.bfloat16: FLOAT,
    torch.float16: FLOAT,
    torch.int64: LONG,
    torch.int32: INT,
    torch.int16: INT,
    torch.int8: INT,
    torch.uint8: INT,
    torch.bool: BOOL,
}
HALVES = torch.float16, torch.bfloat16
# Integers that a program computes in 32 bits: (bits, signed)
SMALL_INTS = {torch.uint8: (8, False), torch.int8: (8, True), torch.int16: (16, True)}
# Operations whose result fits wherever their operands do
NEVER_WRAPS = frozenset(
    (
        *IDENTITIES,
        *FILLS,
        *CREATIONS,
        "detach",
        "index",
        "select",
        "where",
        "masked_fill",
        "maximum",
        "minimum",
        "and",
        "or",
        "xor",
    )
) | {"remainder", "fmod", "sign", "shift_right", "clamp", "clamp_min", "clamp_max", "relu"}
TORCH_DTYPES = {FLOAT: torch.float32, INT: torch.int32, LONG: torch.int64, BOOL: torch.bool}


@dataclass(frozen=True)
class CapturedTensor:
    """Captured tensor of which some dimensions have been indexed.

    Args:
        index: a value per dimension that is indexed; None for the others.
        detached: its gradient is not wanted.
    """

    slot: int
    index: tuple[int | None, ...]
    detached: bool = False


@dataclass
class Builder:
    """Values of a program under construction; equal values are merged.

    A load whose gradient is not wanted has ~slot in the place of slot, so that no other load is merged with it.

    Attributes:
        reads_sizes: numbers may be sizes or strides of captured tensors.
    """

    values: list[Value] = field(default_factory=list)
    positions: dict[Value, int] = field(default_factory=dict)
    numbers: list[float | int] = field(default_factory=list)
    number_dtypes: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    # Maximum or minimum -> its first operand has the derivative of a tie
    ties: dict[int, bool] = field(default_factory=dict)
    reads_sizes: bool = False

    def dtype(self, value: int) -> str:
        return self.values[value].dtype

    def leaf(self, name: str) -> int:
        return self._keep(Value(name, LEAVES[name]))

    def constant(self, number: float | int | bool, dtype: str) -> int:
        number = {FLOAT: float, BOOL: bool}.get(dtype, int)(number)
        return self._keep(Value("constant", dtype, data=number))

    def number(self, number: float | int | bool, dtype: str) -> int:
        """A number of the call: a constant of the kernel if that makes operations cheaper, else a launch argument."""
        if dtype == BOOL or number in BUILT_IN or not math.isfinite(number):
            return self.constant(number, dtype)
        number = float(number) if dtype == FLOAT else int(number)
        if dtype == INT and not -(2**31) <= number < 2**31:
            dtype = LONG
        self.numbers.append(number)
        self.number_dtypes.append(dtype)
        return self._keep(Value("number", dtype, data=len(self.numbers) - 1))

    def slot(self, tensor: torch.Tensor) -> int:
        for i, other in enumerate(self.tensors):
            if other is tensor:
                return i
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def cast(self, value: int, dtype: str) -> int:
        old = self.values[value]
        if old.dtype == dtype:
            return value
        if old.op == "constant":
            return self.constant(old.data, dtype)
        if dtype == BOOL:
            return self.op("ne", BOOL, value, self.constant(0, old.dtype))
        return self._keep(Value("cast", dtype, (value,)))

    def op(self, name: str, dtype: str, *args: int) -> int:
        """An operation of OPS on operands that have been cast; an operation that changes nothing is left out."""
        if name == "mul":
            for x, y in (args, args[::-1]):
                if self._is(x, 1):
                    return y
        if name in ("add", "sub") and self._is(args[1], 0):
            return args[0]
        if name == "add" and self._is(args[0], 0):
            return args[1]
        if name == "div" and self._is(args[1], 1):
            return args[0]
        if name == "detach" and self.values[args[0]].op in ("constant", "number"):
            return args[0]
        if name == "where" and args[1] == args[2]:
            return args[1]
        if name in ("and", "or") and dtype == BOOL:
            for x, y in (args, args[::-1]):
                if self.values[x].op == "constant":  # torch's and_masks and or_masks start from one
                    return y if self.values[x].data is (name == "and") else x
        if name in ROUNDINGS and dtype != FLOAT:
            return args[0]
        return self._keep(Value(name, dtype, args))

    def load(self, slot: int, index: tuple[int, ...], detached: bool = False) -> int:
        dtype = CAPTURED_DTYPES[str(self.tensors[slot].dtype).removeprefix("torch.")]
        is_other = detached and dtype == FLOAT and self.tensors[slot].requires_grad
        return self._keep(Value("load", dtype, index, ~slot if is_other else slot))

    def learns(self, value: int) -> bool:
        """True for a load whose tensor gets a gradient from it."""
        found = self.values[value]
        is_load = found.op == "load" and found.dtype == FLOAT and found.data >= 0
        return is_load and self.tensors[found.data].requires_grad

    def finished(self) -> tuple[Value, ...]:
        """Values of the program: loads by slot alone."""
        return tuple(replace(x, data=~x.data) if x.op == "load" and x.data < 0 else x for x in self.values)

    def _is(self, value: int, number: float) -> bool:
        found = self.values[value]
        return found.op == "constant" and found.data == number

    def _keep(self, value: Value) -> int:
        if value not in self.positions:
            self.positions[value] = len(self.values)
            self.values.append(value)
        return self.positions[value]


def evaluate(
    value: Value, operands: Sequence[torch.Tensor], device: torch.device | None = None
) -> torch.Tensor:
    """Value of an operation or constant, in PyTorch."""
    if value.op == "constant":
        return torch.tensor(value.data, dtype=TORCH_DTYPES[value.dtype], device=device)
    if value.op == "cast":
        return operands[0].to(TORCH_DTYPES[value.dtype])
    return OPS[value.op](*operands)


class Unsupported(Exception):
    """Something in a traced function that kernels do not support; the text says what, and where if that is known."""


def convert(
    builder: Builder, nodes: Sequence[Node], arguments: Sequence[int], outputs: Sequence[Node]
) -> list[int]:
    """Values of some nodes of a recording whose inputs are the values `arguments`. Raises Unsupported."""
    found: dict[Node, int | CapturedTensor] = {}
    inputs = iter(arguments)
    for node in nodes:
        if node.captured is not None:
            found[node] = _captured(builder, node.captured)
        elif node.target is None:
            found[node] = next(inputs)
        else:
            try:
                found[node] = _Operation(builder, found, node).value()
            except KeyError:
                dtype = getattr(node.result, "dtype", None)
                result = "" if dtype is None or dtype in DTYPES else f" with a result of {dtype}"
                raise Unsupported(f"{node.target}{result}{_at(node)}") from None
    return [_scalar(builder, found[x]) for x in outputs]


def _at(node: Node) -> str:
    """File and line of a node, for errors, if they are known."""
    return f" at {node.line}" if node.line else ""


def _captured(builder: Builder, tensor: torch.Tensor) -> int | CapturedTensor:
    """A tensor that the function captured, or that it made from a number."""
    if is_number(tensor):
        return builder.number(number_of(tensor), DTYPES[tensor.dtype])
    if not tensor.numel():
        raise ValueError(
            f"expected captured tensors with at least one element, got shape {tuple(tensor.shape)}"
        )
    return CapturedTensor(builder.slot(tensor), (None,) * tensor.ndim)


def _scalar(builder: Builder, value: int | CapturedTensor) -> int:
    """A value; a tensor all of whose dimensions are indexed is loaded. KeyError if some are not."""
    if isinstance(value, int):
        return value
    if None in value.index:
        raise KeyError("a captured tensor that is not indexed to one element")
    return builder.load(value.slot, value.index, value.detached)


class _Operation:
    """One call of an aten operation, converted to values. A KeyError means that it is not supported."""

    def __init__(self, builder: Builder, found: dict[Node, int | CapturedTensor], node: Node):
        self.builder, self.found, self.node = builder, found, node
        packet = getattr(node.target, "overloadpacket", node.target)
        name = getattr(packet, "__name__", str(packet))
        # In place or not: later nodes see the result
        self.name = name if name.startswith("_") else name.rstrip("_")
        result = node.result
        if isinstance(result, torch.Tensor) and result.dtype not in DTYPES:
            raise KeyError(f"{self.name} to {result.dtype}")
        self.torch_dtype = result.dtype if isinstance(result, torch.Tensor) else None
        self.dtype = DTYPES.get(self.torch_dtype)
        self.is_in_place = name.endswith("_") and not name.startswith("_")
        self.ndim = result.ndim if isinstance(result, torch.Tensor) else 0

    def operand(self, argument: Any, dtype: str) -> int:
        """A node or Python number as a value of this dtype."""
        if isinstance(argument, Node):
            return self.builder.cast(_scalar(self.builder, self.found[argument]), dtype)
        if isinstance(argument, bool | int | float):
            self._refuse_overflow(argument)
            return self.builder.number(argument, dtype)
        raise KeyError(self.name)

    def _refuse_overflow(self, number: float | int) -> None:
        """Refuse a number that 8 or 16 bits of the result cannot hold, as PyTorch does; negative ones wrap if these are unsigned."""
        dtype = self.torch_dtype
        if type(number) is not int or dtype not in SMALL_INTS:
            return
        most = torch.iinfo(dtype).max
        if not min(torch.iinfo(dtype).min, -most) <= number <= most:
            raise Unsupported(
                f"{self.node.target} of {dtype} and {number}, which {dtype} cannot hold{_at(self.node)}; convert with .long()"
            )

    def dtype_of(self, argument: Any) -> torch.dtype | type[Any]:
        if isinstance(argument, Node):
            return argument.result.dtype
        return type(argument)

    def common_dtype(self, arguments: Sequence[Any]) -> str:
        """Dtype in which these are compared, by torch's rules for promotion."""
        stand_ins = [torch.zeros((), dtype=self.dtype_of(x)) if isinstance(x, Node) else x for x in arguments]
        return DTYPES[torch.result_type(*stand_ins)]

    def value(self) -> int | CapturedTensor:
        if "out" in self.node.kwargs:  # the tensor that it writes to would keep its value
            raise KeyError(self.name)
        self._refuse_rounding()
        value = self._value()
        bits, signed = SMALL_INTS.get(self.torch_dtype, (32, True))
        if (
            bits == 32
            or RENAMED.get(self.name, self.name) in NEVER_WRAPS
            or isinstance(value, CapturedTensor)
        ):
            return value
        return self._wrapped(value, bits, signed)

    def _refuse_rounding(self) -> None:
        """Refuse what PyTorch rounds to 16 bits: kernels compute in fp32. Arithmetic of captured tensors alone is not rounded."""
        if self.torch_dtype not in HALVES or not (self.name in CASTS or self.is_in_place):
            return
        nodes = [x for x in self.node.args if isinstance(x, Node)]
        dtypes = {x.result.dtype for x in nodes if isinstance(x.result, torch.Tensor)}
        if not dtypes <= {self.torch_dtype, torch.bool}:
            raise Unsupported(
                f"{self.node.target} that rounds to {self.torch_dtype}, where kernels compute in float32{_at(self.node)}; leave the"
                " rounding out, or round before the call"
            )

    def _wrapped(self, value: int, bits: int, signed: bool) -> int:
        """An integer of 32 bits as one of fewer: the values repeat."""
        build, constant = self.builder.op, lambda number: self.builder.constant(number, INT)
        value = build("and", INT, value, constant(2**bits - 1))
        if not signed:
            return value
        half = constant(2 ** (bits - 1))
        return build("sub", INT, build("xor", INT, value, half), half)

    def _value(self) -> int | CapturedTensor:
        name, args, kwargs = self.name, self.node.args, self.node.kwargs
        first = self.found.get(args[0]) if args and isinstance(args[0], Node) else None
        if isinstance(first, CapturedTensor) and None in first.index:
            return self._part_of(first)
        if self.ndim:
            raise KeyError(name)
        name = RENAMED.get(name, name)
        build = self.builder.op
        if name in IDENTITIES:
            return self.operand(args[0], self.dtype)
        if name == "detach":
            return (
                self.operand(args[0], self.dtype)
                if self._is_inner()
                else build(name, self.dtype, self.operand(args[0], self.dtype))
            )
        if name in CASTS:
            return self._cast()
        if name in CREATIONS or name in FILLS:
            return self._fill()
        if name in ("and", "or", "xor", "not") and self.node.target.overloadpacket.__name__.startswith(
            "logical"
        ):
            return build(name, BOOL, *(self._truth(x) for x in args))
        if name == "where":
            condition, *branches = args
            if not branches:
                raise KeyError(name)
            return build(
                name,
                self.dtype,
                self.operand(condition, BOOL),
                *(self.operand(x, self.dtype) for x in branches),
            )
        if name == "masked_fill":
            x, mask, filler = args
            return build(
                "where", self.dtype, *map(self.operand, (mask, filler, x), (BOOL, self.dtype, self.dtype))
            )
        if name in COMPARISONS:
            dtype = self.common_dtype(args)
            return build(name, BOOL, *(self.operand(x, dtype) for x in args))
        if name in ("isnan", "isinf", "isposinf", "isneginf"):
            x = self.operand(args[0], FLOAT)
            if name in ("isposinf", "isneginf"):
                infinity = math.inf if name == "isposinf" else -math.inf
                return build("eq", BOOL, x, self.builder.constant(infinity, FLOAT))
            if name == "isnan":
                return build("ne", BOOL, x, x)
            return build("eq", BOOL, build("abs", FLOAT, x), self.builder.constant(math.inf, FLOAT))
        if name in ("add", "sub", "rsub"):
            return self._add(name, *args, **kwargs)
        if name == "div":
            return self._divide(*args, **kwargs)
        if name in ("floor_divide", "remainder", "fmod", "pow", "shift_left", "shift_right"):
            return self._with_constant(name, *args)
        if name in ("clamp", "clamp_min", "clamp_max", "relu", "square", "reciprocal"):
            return self._composed(name, *args, **kwargs)
        if name in OPS and not kwargs:
            return build(name, self.dtype, *(self.operand(x, self.dtype) for x in args))
        raise KeyError(name)

    def _is_inner(self) -> bool:
        """True for the detach of torch's own backward, in which nothing is differentiated again."""
        return not self.node.line

    def _part_of(self, tensor: CapturedTensor) -> int | CapturedTensor:
        """Captured tensor with some of its dimensions indexed."""
        args, index = self.node.args, list(tensor.index)
        open_dims = [dim for dim, i in enumerate(index) if i is None]
        if self.name == "index":
            for dim, argument in zip(open_dims, args[1], strict=False):
                if argument is not None:
                    dtype = DTYPES[argument.result.dtype]
                    if dtype == BOOL or argument.result.ndim:
                        raise KeyError(self.name)
                    index[dim] = self.operand(argument, dtype)
        elif self.name == "select":
            dim, position = args[1:]
            if not isinstance(position, int):
                raise KeyError(self.name)
            index[open_dims[dim]] = self.builder.constant(position, INT)
        elif self.name not in ("detach", "alias", "lift_fresh", "clone"):
            raise KeyError(self.name)
        found = CapturedTensor(tensor.slot, tuple(index), tensor.detached or self.name == "detach")
        return found if None in index else _scalar(self.builder, found)

    def _truth(self, argument: Any) -> int:
        if isinstance(argument, Node):
            return self.operand(argument, BOOL)
        return self.builder.constant(bool(argument), BOOL)

    def _cast(self) -> int:
        (argument, *_), builder = self.node.args, self.builder
        value = _scalar(builder, self.found[argument])
        if builder.dtype(value) == FLOAT and self.dtype in (INT, LONG):  # torch truncates
            value = builder.op("trunc", FLOAT, value)
        return builder.cast(value, self.dtype)

    def _fill(self) -> int:
        number = FILLS.get(self.name, CREATIONS.get(self.name))
        if isinstance(number, int):
            number = self.node.args[number]
            if isinstance(number, Node):
                return self.operand(number, self.dtype)
        if self.torch_dtype in HALVES:
            number = torch.tensor(number, dtype=self.torch_dtype).item()
        return self.builder.number(number, self.dtype)

    def _add(self, name: str, x: Any, y: Any, alpha: float | int = 1) -> int:
        x, y = self.operand(x, self.dtype), self.operand(y, self.dtype)
        if name == "rsub":
            x, y, name = y, x, "sub"
            if alpha != 1:
                raise KeyError("rsub with alpha")
        if alpha != 1:
            y = self.builder.op("mul", self.dtype, y, self.builder.number(alpha, self.dtype))
        return self.builder.op(name, self.dtype, x, y)

    def _divide(self, x: Any, y: Any, rounding_mode: str | None = None) -> int:
        if rounding_mode == "floor":
            return self._with_constant("floor_divide", x, y)
        if rounding_mode == "trunc" and self.dtype != FLOAT:
            build, first = self.builder.op, self.operand(x, self.dtype)
            rest = self._with_constant("fmod", x, y)
            whole = build("sub", self.dtype, first, rest)
            return build("floor_divide", self.dtype, whole, self.builder.values[rest].args[1])
        quotient = self.builder.op("div", FLOAT, self.operand(x, FLOAT), self.operand(y, FLOAT))
        if rounding_mode is None:
            return quotient
        return self.builder.op("trunc", FLOAT, quotient)

    def _with_constant(self, name: str, x: Any, y: Any) -> int:
        """An operation whose second operand is compiled in, as that makes it much cheaper."""
        first = self.operand(x, self.dtype)
        if isinstance(y, Node):
            second = self.operand(y, self.dtype)
        else:
            second = self.builder.constant(y, self.dtype)
            if name == "pow" and y == 2:
                return self.builder.op("mul", self.dtype, first, first)
            if name == "pow" and y in (0, 1):
                return first if y else self.builder.constant(1, self.dtype)
        if name == "pow" and self.dtype != FLOAT:
            return self._power(first, y)
        return self.builder.op(name, self.dtype, first, second)

    def _power(self, base: int, exponent: Any) -> int:
        """A power of ints by products, which wrap as those of torch. exponent: of at least 2."""
        if isinstance(exponent, Node):
            raise Stated(
                NotImplementedError,
                "powers of ints whose exponent is a Python int",
                f"{self.node.target} with an exponent in a tensor{_at(self.node)}",
                "make the base a float, as 2.0 ** x",
            )
        result = None
        while exponent:
            if exponent & 1:
                result = base if result is None else self.builder.op("mul", self.dtype, result, base)
            exponent >>= 1
            if exponent:
                base = self.builder.op("mul", self.dtype, base, base)
        return result

    def _composed(self, name: str, x: Any, low: Any = None, high: Any = None, **kwargs: Any) -> int:
        build, dtype = self.builder.op, self.dtype
        value = self.operand(x, dtype)
        if name == "square":
            return build("mul", dtype, value, value)
        if name == "reciprocal":
            return build("div", dtype, self.builder.constant(1, dtype), value)
        if name == "relu":
            low = 0
        if name == "clamp_max":
            low, high = None, low
        low, high = kwargs.get("min", low), kwargs.get("max", high)
        for bound, op in ((low, "maximum"), (high, "minimum")):
            if bound is not None:
                value = build(op, dtype, value, self.operand(bound, dtype))
                self.builder.ties[value] = name != "relu"
        return value
