"""Recording of the aten operations that a function of 0-d tensors runs.

The tensors that the function gets, and that operations give it, have no values. An operation on 0-d tensors runs on ones of their
dtypes, and any other on the meta device: that finds dtypes and shapes. Captured tensors are not read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tl_attention.problem.program import CAPTURED_DTYPES
from tl_attention.problem.uncompiled import may_compile
from tl_attention.tracing.captures import for_later_calls, is_number, is_tracing
from tl_attention.tracing.symbol import Stated, Symbol, no_value

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")
DECOMPOSED_NAMES = """
addcdiv addcmul elu elu_backward gelu gelu_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh
hardtanh_backward leaky_relu leaky_relu_backward lerp log_sigmoid_backward log_sigmoid_forward logaddexp masked_fill mish mish_backward
nan_to_num sigmoid_backward silu silu_backward softplus softplus_backward tanh_backward threshold threshold_backward xlogy
"""
# Torch's own decompositions into operations of the tables of trace_ops.py
DECOMPOSED = get_decompositions(
    [getattr(aten, name) for name in DECOMPOSED_NAMES.split() if hasattr(aten, name)]
)


@dataclass(eq=False)
class Node:
    """An operation that was recorded, or a tensor that it starts from.

    Attributes:
        stand_in: what operations run on in place of the result: a 0-d one on the CPU, or a tensor of the meta device.
        result: what the function has; a Symbol, but for a captured tensor.
        target, args, kwargs: the operation, with Nodes for tensors; target is None for an input and a captured tensor.
        line: file and line in the function; "" of an operation that torch itself runs.
    """

    stand_in: Any
    result: Any
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    line: str = ""

    @property
    def captured(self) -> torch.Tensor | None:
        return None if self.target is not None or isinstance(self.result, Symbol) else self.result

    def inputs(self) -> list[Node]:
        return _nodes_in(self.args, self.kwargs)

    @functools.cached_property
    def follows_from_input(self) -> bool:
        if self.target is None:
            return self.captured is None
        return any(x.follows_from_input for x in self.inputs())

    @functools.cached_property
    def value(self) -> torch.Tensor | None:
        """A copy of the value of a captured 0-d CPU tensor, and of what follows from such ones and numbers; else None."""
        x = self.captured
        if x is not None:
            return x.clone() if is_number(x) else None
        if self.target is None or self.stand_in.ndim or torch.Tag.nondeterministic_seeded in self.target.tags:
            return None
        values = {node: node.value for node in self.inputs()}
        if any(x is None for x in values.values()):
            return None
        return _run(self.target, self.args, self.kwargs, lambda node: values[node].clone())


class AtenRecorder(TorchDispatchMode):
    """Mode that records the operations that run in it.

    Attributes:
        nodes: inputs, then operations in order, each behind the captured tensors that it is the first to use.
        line: that of the nodes to come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.line = ""
        # By id of the result, which the node keeps alive
        self._known: dict[int, Node] = {}
        # By the same: all tensors that share its memory, itself among them
        self._shared: dict[int, list[torch.Tensor]] = {}
        # Tensors that were changed in place through another
        self._outdated: set[int] = set()
        # A tracer of the caller, as make_fx, records calls with other values, too
        self._reads_values = not is_tracing()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler here, which takes seconds."""
        return False

    @classmethod
    def new(cls) -> AtenRecorder:
        """A recorder. torch.compile leaves it to Python, where a compiled function runs in it."""
        return _Uncompiled() if may_compile() else cls()

    def record(self, function: Callable[..., Any], dtypes: Sequence[torch.dtype]) -> Any:
        """Result of a function of 0-d tensors of these dtypes, which are the first nodes."""
        with _disable_current_modes():
            inputs = [self._add(_stand_in((), dtype)).result for dtype in dtypes]
            with self:
                return function(*inputs)

    def use(self, x: torch.Tensor) -> Node:
        """Node of a tensor, which is a captured one if no operation gave it."""
        node = self._node_of(x)
        if node is not self._known.get(id(x)):
            if str(x.dtype).removeprefix("torch.") not in CAPTURED_DTYPES:
                got = f"{tuple(x.shape)} {x.dtype}"
                wanted = f"captured tensors of {', '.join(CAPTURED_DTYPES)}"
                raise Stated(TypeError, wanted, got, "cast it before the call")
            self._known[id(x)] = node
            self.nodes.append(node)
        return node

    def _node_of(self, x: torch.Tensor) -> Node:
        if id(x) in self._outdated:
            wanted = "tensors that are not changed in place through a view or .detach() of theirs"
            raise Stated(NotImplementedError, wanted, "one that was", "change a .clone()")
        if id(x) in self._known:
            return self._known[id(x)]
        if isinstance(x, Symbol):
            got = "a score, an index or a value of theirs that was copied, or kept from another call"
            raise Stated(NotImplementedError, "tensors of this call", got, "use .clone(), and keep none")
        return Node(_stand_in(x.shape, x.dtype), x)

    def _add(self, stand_in: torch.Tensor, result: Any = None, *operation: Any) -> Node:
        node = Node(stand_in, Symbol(stand_in) if result is None else result, *operation)
        self.nodes.append(node)
        self._known[id(node.result)] = node
        return node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if func in DECOMPOSED:
                with self:
                    return DECOMPOSED[func](*args, **kwargs)
            if _is_composite(func):
                with self:
                    return func.decompose(*args, **kwargs)
            return self._operate(func, args, kwargs)

    def _operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            return self._read(func, args, kwargs)
        args, kwargs = _mapped(args, kwargs, torch.Tensor, self.use)
        inputs = _nodes_in(args, kwargs)
        written = [x for x, y in zip(args, func._schema.arguments, strict=False) if y.is_write]
        shared = [y for x in written for y in self._shared.get(id(x.result), [x.result])]
        if any(not isinstance(x, Symbol) for x in shared):
            raise Stated(
                NotImplementedError,
                "captured tensors that it only reads",
                f"{func} of one",
                "change it before the call",
            )
        self._outdated.update(id(x) for x in shared if x is not written[0].result)
        if func is aten.index.Tensor and (shape := _shape_of_element(*args)) is not None:
            found = _stand_in(shape, args[0].stand_in.dtype)
        else:
            # Functions such as torch.zeros may make large tensors
            device = CPU if inputs and not any(x.stand_in.ndim for x in inputs) else META
            given = {x: x.stand_in.to(device, copy=func._schema.is_mutable) for x in inputs}
            found = _run(func, args, kwargs, given.__getitem__, device)
        operation = func, args, kwargs, self.line
        if isinstance(found, torch.Tensor):
            result = written[0].result if written else None
            node = self._add(_stand_in(found.shape, found.dtype), result, *operation)
            if func.is_view and func is not aten.lift_fresh.default:  # that starts from a tensor of its own
                views = self._shared.setdefault(id(inputs[0].result), [inputs[0].result])
                views.append(node.result)
                self._shared[id(node.result)] = views
            return node.result
        self.nodes.append(Node(None, None, *operation))
        return found

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operation such as .item(), which needs values."""
        args, kwargs = _mapped(args, kwargs, torch.Tensor, self._node_of)
        values = {x: x.value for x in _nodes_in(args, kwargs)}
        if self._reads_values and all(value is not None for value in values.values()):
            return _run(func, args, kwargs, values.__getitem__)
        raise no_value(any(x.follows_from_input for x in values))


class _Uncompiled(AtenRecorder):
    """See AtenRecorder.new()."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, *args: Any) -> Any:
        return super().__torch_dispatch__(*args)


def _run(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensor_of: Callable[[Node], Any],
    device: torch.device | None = None,
) -> Any:
    """Result of an operation on tensors of nodes; device: in place of all devices among its arguments."""
    args, kwargs = _mapped(args, kwargs, Node, tensor_of)
    if device is not None:
        args, kwargs = _mapped(args, kwargs, torch.device, lambda _: device)
    return func(*args, **kwargs)


def _mapped(
    args: Sequence[Any], kwargs: dict[str, Any], kind: type, other: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an operation, with other(x) for each x of this kind, in lists, too."""

    def mapped(x: Any) -> Any:
        if isinstance(x, kind):
            return other(x)
        return [mapped(y) for y in x] if isinstance(x, list | tuple) else x

    return tuple([mapped(x) for x in args]), {name: mapped(x) for name, x in kwargs.items()}


def _nodes_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Node]:
    found: list[Node] = []
    _mapped(args, kwargs, Node, found.append)
    return found


@functools.cache
def _is_composite(func: Any) -> bool:
    """True for an operation that torch makes of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _shape_of_element(tensor: Node, indices: Sequence[Node | None]) -> list[int] | None:
    """Shape of a tensor indexed with 0-d tensors; None for other indices. The meta kernel of torch would import sympy, 0.3 s."""
    sizes = tensor.stand_in.shape
    if len(indices) > len(sizes) or any(i is not None and i.stand_in.ndim for i in indices):
        return None
    return [n for n, i in itertools.zip_longest(sizes, indices) if i is None]


def _stand_in(shape: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    if not len(shape):
        return _one(dtype)
    sizes = [n if type(n) is int else 1 for n in shape]  # not a symbol of torch.compile
    return torch.empty(sizes, dtype=dtype, device=META)


@functools.cache
def _one(dtype: torch.dtype) -> torch.Tensor:
    with for_later_calls():
        return torch.ones((), dtype=dtype, device=CPU)
