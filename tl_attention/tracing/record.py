"""Recordings: score_mod and mask_mod inside torch.compile -> the text of a function that does the same, and what it captures.

torch.compile runs a function of scores on tensors that it traces, and knows what the function reads: closures, attributes, lengths as
symbols. A mode of torch that torch.compile traces as well writes down each operation. The text is an argument of an op, so compiled
code that is kept on disk has it, and another process makes the function of it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from tl_attention.tracing.symbol import WITHOUT_VALUES

POSITIONS = "b", "h", "q_idx", "kv_idx"
PARAMETERS = {"score_mod": ("score", *POSITIONS), "mask_mod": POSITIONS}
# Methods that read a value, in code that torch.compile leaves to Python
READS = frozenset(
    ("__bool__", "__int__", "__float__", "__complex__", "__index__", "item", "tolist", "numpy", "is_nonzero", "equal", "allclose")
)  # fmt: skip
# All that a text may name: a text of an exported program is code of whoever made it
_NAMES = {
    "__builtins__": {"slice": slice},
    "__name__": __name__,
    "torch": torch,
    "operator": operator,
    "device": torch.device,
    "inf": float("inf"),
    "nan": float("nan"),
}


class Recording(TorchFunctionMode):
    """What functions of scores do and capture.

    Attributes:
        tensors, ints, floats: what they capture, and constants: x0, n0 and f0 of the texts are the first ones.
    """

    def __init__(self, leaves: dict[str, torch.Tensor]):
        """leaves: 0-d tensors by the names of PARAMETERS."""
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self.ints: list[int] = []
        self.floats: list[float] = []
        self._leaves = leaves
        self._known: dict[torch.Tensor, str] = {}  # captured tensors
        self._function = ""
        self._captured: list[str] = []
        self._values: dict[torch.Tensor, str] = {}
        self._lines: list[str] = []
        self._differentiates = torch.is_grad_enabled()

    def text(self, name: str, function: Callable[..., Any] | None) -> str:
        """Text of the maker of a function, for rebuilt(); "" for None. name: one of PARAMETERS."""
        if function is None:
            return ""
        parameters = PARAMETERS[name]
        self._function, self._lines, self._captured = name, [], []
        # A function may change a leaf in place
        leaves = [self._leaves[parameter].clone() for parameter in parameters]
        self._values = dict(zip(leaves, parameters, strict=True))
        with self:
            result = function(*leaves)
        body = [*self._lines, f"return {self._written(result)}"]
        captured = ", ".join(dict.fromkeys(self._captured))
        lines = [f"def make({captured}):", f"    def {name}({', '.join(parameters)}):"]
        lines += [f"        {line}" for line in body]
        return "\n".join([*lines, f"    return {name}"])

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        name = _name_of(func)
        if not name:
            raise NotImplementedError(
                f"{self._function}: expected functions of torch on scalars in compiled code, got {_shown(func)}; call it before, as a"
                " tensor to index"
            )
        if torch.is_grad_enabled() != self._differentiates:
            raise NotImplementedError(
                f"{self._function}: expected no torch.no_grad, torch.enable_grad or torch.inference_mode inside, nor a"
                " torch.autograd.Function in compiled code, whose effect on gradients is not traced, got one; call .detach() on what needs"
                " no gradient"
            )
        if _is_in_place(name) and not any([args[0] is x for x in self._values]):
            raise NotImplementedError(
                f"{self._function}: expected captured tensors that it only reads, got {name} of one; change it before the call"
            )
        if name.rpartition(".")[2] in READS:
            raise NotImplementedError(
                f"{self._function}: expected no control flow that depends on the score or an index, got {name};"
                f" {WITHOUT_VALUES}"
            )
        is_element = func is torch.Tensor.__getitem__ or func is operator.getitem
        result = _element(self._function, *args) if is_element else func(*args, **kwargs)
        results = result if isinstance(result, tuple | list) else (result,)
        if not any([isinstance(x, torch.Tensor) for x in results]):
            return result
        given = [self._written(x) for x in args]
        given += [f"{key}={self._written(x)}" for key, x in kwargs.items()]
        value = f"v{len(self._lines)}"
        self._lines.append(f"{value} = {name}({', '.join(given)})")
        if isinstance(result, torch.Tensor):
            self._values[result] = value
        else:
            for i, x in enumerate(results):
                if isinstance(x, torch.Tensor):
                    self._values[x] = f"{value}[{i}]"
        return result

    def _written(self, x: Any) -> str:
        """Expression of an argument or a result."""
        if isinstance(x, torch.Tensor):
            if x in self._values:
                return self._values[x]
            if x not in self._known:
                self._known[x] = f"x{len(self.tensors)}"
                self.tensors.append(x)
            return self._capture(self._known[x])
        if isinstance(x, bool):
            return repr(x)
        if isinstance(x, int):
            self.ints.append(x)
            return self._capture(f"n{len(self.ints) - 1}")
        if isinstance(x, float):
            self.floats.append(x)
            return self._capture(f"f{len(self.floats) - 1}")
        if isinstance(x, tuple):
            return "(" + "".join([f"{self._written(y)}, " for y in x]) + ")"
        if isinstance(x, list):
            return "[" + ", ".join([self._written(y) for y in x]) + "]"
        if isinstance(x, slice):
            return f"slice({self._written(x.start)}, {self._written(x.stop)}, {self._written(x.step)})"
        if isinstance(x, torch.device) and x == self._leaves["score"].device:
            return f"{PARAMETERS[self._function][-1]}.device"
        constant = _constant(x)
        if not constant:
            raise NotImplementedError(
                f"{self._function}: expected tensors, numbers and dtypes as arguments in compiled code, got {_shown(x)}; call the function"
                " before, as a tensor to index"
            )
        return constant

    def _capture(self, name: str) -> str:
        self._captured.append(name)
        return name


def _element(function: str, tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """tensor[index], where 0-d tensors in the index are not read."""
    positions = index if isinstance(index, tuple) else (index,)
    if not any([isinstance(i, torch.Tensor) for i in positions]):
        return tensor[index]
    for i in positions:
        if isinstance(i, bool | float) or (
            isinstance(i, torch.Tensor) and (i.is_floating_point() or i.dtype == torch.bool)
        ):
            raise TypeError(
                f"{function}: expected integers as indices of a tensor, got {i.dtype if isinstance(i, torch.Tensor) else i}; round a number"
                " by .int(), and choose by a condition with torch.where"
            )
        if isinstance(i, slice) and not (i.start is None and i.stop is None and i.step is None):
            raise NotImplementedError(
                f"{function}: expected indices that are 0-d tensors, ints or a full slice, got a slice beside 0-d tensors; cut the tensor"
                " before the call"
            )
        if i is None or i is Ellipsis:
            raise NotImplementedError(
                f"{function}: expected indices that are 0-d tensors, ints or a full slice, got None or ... beside 0-d tensors; name all"
                " dimensions"
            )
    given = [
        None if isinstance(i, slice) else i if isinstance(i, torch.Tensor) else torch.tensor(i, device="cpu")
        for i in positions
    ]
    return torch.ops.aten.index.Tensor(tensor, given)


def _is_in_place(name: str) -> bool:
    """True for names like torch.Tensor.add_, torch.Tensor.__iadd__ and operator.iadd."""
    module, _, last = name.rpartition(".")
    last = f"__{last}__" if module == "operator" else last
    return last.startswith("__i") and last != "__invert__" if last.endswith("__") else last.endswith("_")


def _name_of(func: Callable[..., Any]) -> str:
    """Name of a function of torch as code; "" for another, and for one that takes functions.

    torch.export with strict=True shows an operator of Python, as +, as a function of the module operator.
    """
    if getattr(func, "__module__", None) == operator.add.__module__:
        return f"operator.{func.__name__}"
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{func}"
    return resolve_name(func) or ""


def _constant(x: Any) -> str:
    """Code of a constant; "" for something else."""
    kinds = str | torch.dtype | torch.device | torch.memory_format
    return repr(x) if x is None or x is Ellipsis or isinstance(x, kinds) else ""


def _shown(x: Any) -> str:
    return getattr(x, "__name__", "") or type(x).__name__


# Constants of compiled code; torch.compiler.assume_constant_result sets this attribute, too, but first imports the compiler
for _function in (_name_of, _constant, _shown):
    _function._dynamo_marked_constant = True


@functools.lru_cache(maxsize=1024)
def _maker(text: str) -> Callable[..., Callable[..., Any]]:
    made = dict(_NAMES)
    exec(compile(text, "<torch.compile>", "exec"), made)
    return made["make"]


def rebuilt(
    text: str, tensors: Sequence[torch.Tensor], ints: Sequence[int], floats: Sequence[float]
) -> Callable[..., Any] | None:
    """The function of a text of Recording.text(), with the values of its captures."""
    if not text:
        return None
    maker, kinds = _maker(text), {"x": tensors, "n": ints, "f": floats}
    names = maker.__code__.co_varnames[: maker.__code__.co_argcount]
    return maker(*[kinds[name[0]][int(name[1:])] for name in names])
