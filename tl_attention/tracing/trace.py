"""Tracing: score_mod and mask_mod as Python functions -> a Program and the tensors and numbers of a call.

AtenRecorder records the aten operations of a function of 0-d tensors, and no tensor is read. The derivative is torch's own: the
operations are run a second time under autograd and recorded. Operations outside the tables below are refused by name.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from tl_attention.problem.program import (
    BOOL,
    FLOAT,
    INT,
    LEAVES,
    Call,
    Captured,
    Program,
    TensorGradient,
    Value,
)
from tl_attention.tracing.aten_recorder import AtenRecorder
from tl_attention.tracing.captures import Captures, outside_modes
from tl_attention.tracing.dense_bias import with_bias
from tl_attention.tracing.derivatives import Reverse
from tl_attention.tracing.program_values import differentiable
from tl_attention.tracing.symbol import Stated, Symbol, no_value
from tl_attention.tracing.trace_ops import SUPPORTED, TORCH_DTYPES, Builder, Unsupported, convert, evaluate

aten = torch.ops.aten
_OF_NUMPY = frozenset((torch.Tensor.numpy, torch.Tensor.__array__))
_READS = frozenset((torch.Tensor.tolist, torch.Tensor.data_ptr, torch.Tensor.__dlpack__))
_INDEXING = torch.Tensor.__getitem__, aten.index.Tensor  # all that reads a tensor without reading its sizes
AUTOGRAD_KEYS = "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"
PACKAGE = str(Path(__file__).parents[1])


class _Function(NamedTuple):
    """A function to trace, and its name in errors."""

    name: str  # score_mod or mask_mod
    call: Callable[..., Any]

    @property
    def place(self) -> str:
        """File and line of the function, if they are known."""
        code = getattr(inspect.unwrap(getattr(self.call, "func", self.call)), "__code__", None)
        return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


class _Recorder(TorchFunctionMode):
    """Mode in which a function is recorded: indexing with 0-d tensors is kept as an operation, and each node records its source line.

    Attributes:
        sets_grad_mode: the function turned gradients on or off, which the recorded operations do not show.
        reads_sizes: the function may have read sizes or strides of a captured tensor, which are constants in what is recorded.
    """

    def __init__(self, nodes: AtenRecorder):
        super().__init__()
        self._nodes = nodes
        self.sets_grad_mode = self.reads_sizes = False
        self._inference = torch.is_inference_mode_enabled()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            index = index if isinstance(index, tuple) else (index,)
            _check_index(tensor, index)
            if any(isinstance(i, torch.Tensor) for i in index):
                if any(i is None or i is Ellipsis for i in index):
                    raise _refused_index("None or ...", "name all dimensions")
                positions = [None if isinstance(i, slice) and i == slice(None) else i for i in index]
                if any(isinstance(i, slice) for i in positions):
                    raise _refused_index("a slice", "cut the tensor before the call")
                positions = [torch.tensor(i) if isinstance(i, int) else i for i in positions]
                func, args = aten.index.Tensor, (tensor, positions)
        elif func is torch._C._set_grad_enabled:
            self.sets_grad_mode = True
        elif func in _OF_NUMPY:
            raise Stated(
                TypeError,
                "captured tensors of torch",
                "an array of NumPy",
                "capture torch.as_tensor(array)",
            )
        elif func in _READS:
            raise no_value(isinstance(args[0], Symbol))
        self.sets_grad_mode |= torch.is_inference_mode_enabled() != self._inference
        if func not in _INDEXING:
            given = *args, *(kwargs or {}).values()
            self.reads_sizes |= any(isinstance(x, torch.Tensor) and x.ndim > 0 for x in given)
        frame = sys._getframe(1)
        while frame is not None and "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            self._nodes.line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return func(*args, **(kwargs or {}))


def _refused_index(got: str, instead: str) -> Stated:
    wanted = "indices that are 0-d tensors, ints or a full slice"
    return Stated(NotImplementedError, wanted, f"{got} beside 0-d tensors", instead)


def _check_index(tensor: torch.Tensor, index: tuple[Any, ...]) -> None:
    """Refuse an index that is no integer, and a tensor without strides."""
    wanted = "a function that captures dense tensors of this rank"
    if hasattr(tensor, "to_local"):
        raise Stated(NotImplementedError, wanted, "a DTensor", "capture its .to_local()")
    if tensor.layout != torch.strided:
        raise Stated(NotImplementedError, wanted, str(tensor.layout), "capture its .to_dense()")
    for i in index:
        is_tensor = isinstance(i, torch.Tensor)
        # torch takes bools and uint8 for masks
        is_mask = is_tensor and i.dtype in (torch.bool, torch.uint8) and not i.ndim
        if is_mask or (is_tensor and (i.is_floating_point() or i.is_complex())):
            got = str(i.dtype)
        elif isinstance(i, bool | float | complex | str):
            got = repr(i)
        else:
            continue
        raise Stated(
            TypeError,
            "integers as indices of a tensor",
            got,
            "round a number by .int(), and choose by a condition with torch.where",
        )


@contextmanager
def above_autograd():
    """Enable recording by autograd, also if the caller is the kernel of an op, which runs below autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in AUTOGRAD_KEYS:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


def _no_search_for_nan() -> torch.autograd.set_detect_anomaly:
    """A context in which torch's anomaly detection reads no gradients: those of a trace have no values."""
    return torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False)


@contextmanager
def _own_saved_tensors():
    """A context in which no hook of the caller, such as that of a checkpoint, gets the tensors that autograd saves in a trace."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # then there are none
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


@contextmanager
def _floats_in_fp32():
    """A context in which Python's floats become fp32 numbers. The default dtype is that of all threads, so it is set only if it differs."""
    default = torch.get_default_dtype()
    if default is torch.float32:
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def trace(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    differentiate: bool,
    attn_bias: torch.Tensor | None = None,
    listed: bool = False,
) -> Call:
    """Program of these functions, and the tensors and numbers that they capture.

    Repeated calls with the same functions are looked up if the functions capture only tensors, numbers and functions of these: see
    captures.Captures. Functions that read sizes of tensors are looked up by these, too. Else each call traces them, which takes a
    millisecond, or some with derivatives. One thread traces at a time.

    Args:
        differentiate: also compute derivatives: of the score, and of captured float tensors that require a gradient.
        attn_bias: as in dense_bias.with_bias; without effect where it has no elements.
        listed: the mask_mod is that of a block mask, as in dense_bias.with_bias.
    Raises:
        TypeError, ValueError, NotImplementedError: which function, which operation and line, and what is supported.
    """
    with _lock:
        captures = Captures.of(score_mod, mask_mod, attn_bias)
        broadcast = None if attn_bias is None else tuple(size == 1 for size in attn_bias.shape[:2])
        key = sized = None
        if captures is not None:
            key = captures.key, differentiate, broadcast, listed
            sizes = captures.sizes
            sized = None if sizes is None else (*key, sizes)
            known = _traced.get(key) or _traced.get(sized)
            if known is not None:
                program, slots, numbers = known
                return Call(program, tuple(captures.tensors[i] for i in slots), numbers)
        if attn_bias is not None and attn_bias.numel():
            score_mod, mask_mod = with_bias(score_mod, mask_mod, attn_bias, listed)
        # Whatever the defaults, a number of the functions is none of a GPU, and in fp32: later calls get the program
        with outside_modes(), torch.device("cpu"), _floats_in_fp32():
            call, reads_sizes = _trace(score_mod, mask_mod, differentiate)
        if captures is not None:
            slots = [captures.position(tensor) for tensor in call.tensors]
            if None not in slots:
                if len(_traced) >= MAX_TRACED:
                    _traced.clear()
                    _programs.clear()
                # One object for equal programs: they are compared in the keys of plans
                call = Call(_programs.setdefault(call.program, call.program), call.tensors, call.numbers)
                if (known_by := sized if reads_sizes else key) is not None:
                    _traced[known_by] = call.program, tuple(slots), call.numbers
        return call


MAX_TRACED = 1024
_lock = threading.RLock()  # a trace may change the default dtype, which is that of all threads
# A process is forked between traces of other threads, which it does not have: it would wait for their end
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
# By what the functions capture, and the sizes of tensors where a function reads these
_traced: dict[tuple[Any, ...], tuple[Program, tuple[int, ...], tuple[Any, ...]]] = {}
_programs: dict[Program, Program] = {}


def _trace(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, differentiate: bool
) -> tuple[Call, bool]:
    """(call, True if a function reads sizes of captured tensors)."""
    builder = Builder()
    score = mask = slope = None
    gradients: tuple[TensorGradient, ...] = ()
    indices = [builder.leaf(name) for name in ("batch", "head", "query", "key")]
    if score_mod is not None:
        function = _Function("score_mod", score_mod)
        leaf = builder.leaf("score")
        score = _record(builder, function, [leaf, *indices], differentiate)
        if builder.dtype(score) == BOOL:
            raise TypeError(
                f"score_mod{function.place}: expected a score, got a bool; return torch.where(condition, score, -float('inf')), or pass the"
                " function as a mask_mod"
            )
        score = builder.cast(score, FLOAT)
        if differentiate:
            slope, gradients = _differentiate(builder, function, score, leaf)
        score = None if score == leaf else score
    if mask_mod is not None:
        function = _Function("mask_mod", mask_mod)
        mask = _record(builder, function, indices)
        if builder.dtype(mask) != BOOL:
            raise TypeError(
                f"mask_mod{function.place}: expected a bool, True where the query sees the key, got {builder.dtype(mask)}; compare"
            )
        if builder.values[mask] == Value("constant", BOOL, data=True):
            mask = None
    captured = tuple(Captured(str(x.dtype).removeprefix("torch."), x.ndim) for x in builder.tensors)
    program = Program(
        builder.finished(), score, mask, slope, captured, tuple(builder.number_dtypes), gradients
    )
    return Call(program.pruned(), tuple(builder.tensors), tuple(builder.numbers)), builder.reads_sizes


def _record(builder: Builder, function: _Function, arguments: list[int], differentiate: bool = False) -> int:
    """Value that a user's function returns for these arguments. differentiate: as in trace()."""
    nodes = AtenRecorder.new()
    recorder = _Recorder(nodes)

    def recorded(*inputs: torch.Tensor) -> Any:
        with torch.no_grad(), recorder:
            return function.call(*inputs)

    try:
        result = nodes.record(recorded, [TORCH_DTYPES[builder.dtype(i)] for i in arguments])
    except Exception as error:
        raise _refusal(function, error) from error
    if differentiate and recorder.sets_grad_mode:
        raise NotImplementedError(
            f"{function.name}{function.place}: expected no torch.no_grad, torch.enable_grad or torch.inference_mode inside, whose effect on"
            " gradients is not traced, got one; call .detach() on what needs no gradient"
        )
    builder.reads_sizes |= recorder.reads_sizes
    if isinstance(result, bool | int | float):
        kind = BOOL if isinstance(result, bool) else INT if isinstance(result, int) else FLOAT
        return builder.number(result, kind)  # of NumPy, too, whose float64 is a float
    if not isinstance(result, torch.Tensor):
        raise TypeError(
            f"{function.name}{function.place}: expected a 0-d tensor, got {type(result).__name__}; return one value"
        )
    if result.ndim:
        raise ValueError(
            f"{function.name}{function.place}: expected a 0-d tensor, got shape {tuple(result.shape)}; index captured tensors down to"
            " one element, with b, h, q_idx and kv_idx"
        )
    return _converted(builder, function, nodes, arguments, [result])[0]


def _refusal(function: _Function, error: Exception) -> Exception:
    """Error for a function that torch or the recorder could not trace."""
    where = f"{function.name}{function.place}"
    line = _line_of(error)
    at = f" at {line}" if line else ""
    if isinstance(error, Stated):
        return error.kind(f"{where}: expected {error.expected}, got {error.got}{at}; {error.instead}")
    text = str(error).split("\n")[0]
    kind = type(error)
    if kind is NotImplementedError:
        return kind(f"{where}: expected pointwise operations on scalars, got {text}{at}")
    if kind not in (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return RuntimeError(f"{where}: {kind.__name__}{at}: {text}")
    if kind is IndexError and line:
        return kind(
            f"{where}: expected indices within what it captures, got {text}{at}; pass a larger tensor, or a smaller number"
        )
    expected = "score, b, h, q_idx, kv_idx" if function.name == "score_mod" else "b, h, q_idx, kv_idx"
    if not line and function.name == "score_mod" and "positional argument" in text:
        text += "; pass a mask as mask_mod"
    return kind(f"{where}: expected a function of 0-d tensors ({expected}), got {kind.__name__}{at}: {text}")


def _line_of(error: Exception) -> str | None:
    """File and line in the caller's function where an error was raised, if known."""
    frames = traceback.extract_tb(error.__traceback__)
    others = "/torch/", PACKAGE, "<string>"  # the last is code generated by torch
    own = [frame for frame in frames if not any(other in frame.filename for other in others)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


def _differentiate(
    builder: Builder, function: _Function, score: int, leaf: int
) -> tuple[int | None, tuple[TensorGradient, ...]]:
    """Derivatives of a score with respect to the leaf and to each load of a tensor that requires a gradient."""
    values = tuple(builder.values)
    needed = sorted(Program(values).needed([score]))
    inputs = [i for i in needed if values[i].op in (*LEAVES, "number", "load")]
    if leaf not in inputs:
        inputs.append(leaf)
    reached = differentiable(values, score)
    learned = [i for i in inputs if i in reached and builder.learns(i)]
    reverse = Reverse(values, builder.ties, reached, [leaf, *learned])

    def joint(*tensors: torch.Tensor) -> tuple[Any, ...]:
        found = dict(zip(inputs, tensors, strict=True))
        for i in needed:
            if i not in found:
                found[i] = evaluate(values[i], [found[arg] for arg in values[i].args])
        return tuple(reverse.derivatives(score, found))

    nodes = AtenRecorder.new()
    try:
        with torch.enable_grad(), above_autograd(), _no_search_for_nan(), _own_saved_tensors():
            outputs = nodes.record(joint, [TORCH_DTYPES[values[i].dtype] for i in inputs])
    except Exception as error:
        raise RuntimeError(
            f"{function.name}{function.place}: torch cannot differentiate it: {error}"
        ) from error
    slope, *factors = _converted(builder, function, nodes, inputs, outputs)
    gradients = [
        TensorGradient(builder.values[i].data, builder.values[i].args, builder.cast(factor, FLOAT))
        for i, factor in zip(learned, factors, strict=True)
    ]
    slope = builder.cast(slope, FLOAT)
    is_one = builder.values[slope] == Value("constant", FLOAT, data=1.0)
    return None if is_one else slope, tuple(gradients)


def _converted(
    builder: Builder,
    function: _Function,
    recorder: AtenRecorder,
    arguments: Sequence[int],
    outputs: Sequence[torch.Tensor],
) -> list[int]:
    """Values of these tensors; errors name the function."""
    try:
        nodes = [recorder.use(x) for x in outputs]
        return convert(builder, recorder.nodes, arguments, nodes)
    except Stated as error:
        raise _refusal(function, error) from None
    except Unsupported as error:
        raise NotImplementedError(
            f"{function.name}{function.place}: expected pointwise operations on scalars, got {error}; supported are {SUPPORTED}, and"
            " what torch makes of these (docs/flex.md has a table). Compute anything else before the call, as a tensor to index"
        ) from None
    except (TypeError, ValueError) as error:
        raise type(error)(f"{function.name}{function.place}: {error}") from None
