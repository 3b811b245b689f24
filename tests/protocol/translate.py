"""A kernel of TileLang (a TIR PrimFunc, before any pass) -> Python source of a generator that one warp runs.

A warp is modelled by its lane 0. Kept are integers, conditions, loops, shared and global integers, and all synchronization, which becomes
a `yield` of a request (machine.py). Computations on floats leave no code: their values are UNKNOWN, and conditions on them ask the
policy. An operation that is neither modelled nor known to be without effect here raises NotImplementedError, so nothing is skipped silently.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tilelang import tvm
from tvm import tirx

PARALLEL, THREAD_BINDING = 1, 4  # kinds of loops
# Operations without effect on the control flow of lane 0
IGNORED = {
    "tl.sync_warp", "tl.set_max_nreg", "tl.fence_proxy_async", "tl.warpgroup_arrive", "tl.warpgroup_commit_batch",
    "tl.tma_store_arrive", "tl.tileop.fill", "tl.tileop.reduce",
    "tl.warpgroup_fence_operand", "tl.tileop.finalize_reducer", "tl.no_set_max_nreg", "tl.fence_barrier_init",
    "tl.tileop.atomicadd", "tl.tileop.atomic_add", "tl.annotate_layout",
    "tl.tileop.reinterpret", "tl.pdl_trigger", "tl.pdl_sync",
}  # fmt: skip
# Operations whose result is computed from floats, or is an address
UNKNOWN_VALUES = {
    "tirx.exp2", "tirx.log2", "tirx.exp", "tirx.log", "tirx.tanh", "tirx.sqrt", "tirx.rsqrt", "tirx.address_of", "tl.access_ptr",
    "tl.infinity", "tirx.reinterpret", "tl.region", "tirx.floor", "tirx.ceil", "tirx.pow", "tirx.sin", "tirx.cos", "tirx.sigmoid",
    "tirx.isnan", "tirx.round", "tirx.nearbyint", "tirx.popcount", "tirx.fma", "tl.fma2", "tl.rng_rand", "tl.ldg32", "tl.ldg64", "tl.ldg128",
    "tirx.erf",
}  # fmt: skip
# Functions of CUDA source that wait for other CTAs, which are taken to have done their part
OTHER_CTAS = re.compile(r"tl_attention_(merge_piece|wait_for_parts|await_turn)")
# Other functions that wait: each needs a model of its own
BLOCKING = re.compile(r"tl_attention_.*(wait|sync)")


# A product whose result is of no use after the last step of a tile. Then it reads a slot that need not be filled, or may be filled again
USELESS = re.compile(r"products.py:\d+ multiply < bwd.py:\d+ compute_scores < bwd.py:\d+ differentiate")
TRACED = (
    "mbarrier_wait_parity",
    "mbarrier_arrive",
    "tma_copy",
    "sync_threads",
    "named_barrier_arrive",
    "call_extern",
    "wgmma_gemm",
)


@contextlib.contextmanager
def places() -> Iterator[dict]:
    """While kernels are traced, note which lines of kernels/ ask for each synchronization: hash of the call -> text."""
    import tilelang.language as T

    found, own = {}, {name: getattr(T, name) for name in TRACED}

    def noting(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            frame, lines = sys._getframe(1), []
            while frame is not None and len(lines) < 3:
                path = Path(frame.f_code.co_filename)
                if path.parent.name == "kernels" and not frame.f_code.co_name.startswith("<"):
                    lines.append(f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}")
                frame = frame.f_back
            if isinstance(result, tirx.Call):
                found[hash(result)] = " < ".join(lines), result
            return result

        return call

    for name, function in own.items():
        setattr(T, name, noting(function))
    try:
        yield found
    finally:
        for name, function in own.items():
            setattr(T, name, function)


class Translator:
    """Args: function: the kernel. places: of its synchronization, see places()."""

    def __init__(self, function: Any, places: dict):
        self.function, self.places = function, places
        self.names: dict[int, str] = {}
        self.used: set[str] = set()
        self.kept: list = []  # keeps the variables alive whose addresses are keys
        self.buffers: dict[int, tuple[Any, str]] = {}  # by the variable of their data
        self.lines: list[str] = []
        self.depth = 1
        self.barriers: dict[str, list[int]] = {}
        self.allocated: list[tuple[str, str]] = []
        self.externs: set[str] = set()
        self.grid: dict[str, str] = {}  # expression of the number of CTAs in each direction
        self.threads: tuple[int, ...] = ()
        self.shared: list[str] = []
        self.loaded: set[str] = set()  # buffers that TMA fills
        self.effects = 0  # lines so far that change more than a name

    # Names

    def name(self, var: Any) -> str:
        key = var.__hash__()
        if key not in self.names:
            base = re.sub(r"\W", "_", var.name) or "x"
            found, i = base, 1
            while found in self.used or found in RESERVED:
                found, i = f"{base}_{i}", i + 1
            self.used.add(found)
            self.names[key] = found
            self.kept.append(var)
        return self.names[key]

    def buffer(self, buffer: Any) -> str:
        return self.name(buffer.data)

    # Statements

    def emit(self, line: str, has_effect: bool = False) -> None:
        self.lines.append("    " * self.depth + line)
        self.effects += has_effect or "yield" in line or "atomic_" in line

    def body(self, stmt: Any) -> bool:
        """Translate a nested body; False and no lines if it has no effect."""
        lines, effects = len(self.lines), self.effects
        self.depth += 1
        self.stmt(stmt)
        self.depth -= 1
        if self.effects == effects:
            del self.lines[lines:]
        return self.effects > effects

    def stmt(self, s: Any) -> None:
        getattr(self, "stmt_" + type(s).__name__)(s)

    def stmt_SeqStmt(self, s: Any) -> None:
        for one in s.seq:
            self.stmt(one)

    def stmt_SBlockRealize(self, s: Any) -> None:
        self.stmt(s.block)

    def stmt_SBlock(self, s: Any) -> None:
        for b in s.alloc_buffers:
            name, scope = self.buffer(b), b.scope()
            if scope == "shared.barrier":
                self.barriers.setdefault(name, [])
            elif scope.startswith("shared"):
                if "int" in b.dtype:
                    self.shared.append(name)
            elif scope == "local.var" or scope == "local":
                self.allocated.append((name, b.dtype))
        for key, value in s.annotations.items():
            if key == "barrier_init":
                for data, counts in value.items():
                    self.barriers[self.name(data)] = [int(c) for c in counts]
            if key == "tl.launch_threads":
                self.threads = tuple(int(n) for n in value)
        self.stmt(s.body)

    def stmt_Bind(self, s: Any) -> None:
        name = self.name(s.var)
        value = s.value
        if isinstance(value, tirx.Call) and value.op.name == "tl.launch_thread_idx":
            self.emit(f"{name} = thread[{int(value.args[0])}]")
        else:
            self.emit(f"{name} = {self.expr(value)}")

    def stmt_Evaluate(self, s: Any) -> None:
        text = self.effect(s.value)
        if text:
            place, _ = self.places.get(hash(s.value), ("", None))
            if USELESS.match(place):
                text = re.sub(r"\[.*\]", "[]", text)
            self.emit(f"{text}  # {place}" if place else text, True)

    def stmt_BufferStore(self, s: Any) -> None:
        b, scope = s.buffer, s.buffer.scope()
        if (
            scope == "local.fragment"
            or ("int" not in b.dtype
            and b.dtype != "bool"
            and scope not in ("local.var", "local"))
        ):
            if "yield" in (value := self.expr(s.value)):
                self.emit(value)
            return
        where = self.indices(s.indices)
        if scope.startswith("shared"):
            self.emit(f"yield 'store', {self.buffer(b)!r}, {where}, {self.expr(s.value)}")
        else:
            self.emit(f"{self.buffer(b)}[{where}] = {self.expr(s.value)}", True)

    def stmt_IfThenElse(self, s: Any) -> None:
        condition = self.expr(s.condition)
        at = len(self.lines)
        self.emit(f"if truth({condition}, {len(self.lines)}):")
        has_then = self.body(s.then_case)
        if not has_then:
            self.lines.append("    " * (self.depth + 1) + "pass")
        has_else = False
        if s.else_case is not None:
            self.emit("else:")
            has_else = self.body(s.else_case)
            if not has_else:
                self.lines.pop()
        if not has_then and not has_else:
            del self.lines[at:]
            if "yield" in condition:
                self.emit(condition)

    def stmt_For(self, s: Any) -> None:
        var, first, extent = self.name(s.loop_var), self.expr(s.min), self.expr(s.extent)
        if int(s.kind) == THREAD_BINDING:
            tag = str(s.thread_binding.thread_tag)
            self.grid[tag] = extent
            self.emit(f"{var} = block[{tag!r}]")
            self.stmt(s.body)
            return
        at = len(self.lines)
        if int(s.kind) == PARALLEL:  # its iterations are those of all threads: one stands for all
            self.emit(f"{var} = {first}")
            self.depth -= 1
            if not self.body(s.body):
                del self.lines[at:]
            self.depth += 1
            return
        step = "" if s.step is None or int(s.step) == 1 else f", {self.expr(s.step)}"
        self.emit(f"for {var} in range({first}, {first} + {extent}{step}):")
        if not self.body(s.body):
            del self.lines[at:]

    def stmt_While(self, s: Any) -> None:
        self.emit(f"while truth({self.expr(s.condition)}, {len(self.lines)}):")
        self.depth += 1
        self.emit("yield ('go',)")
        self.depth -= 1
        self.body(s.body)

    def stmt_AttrStmt(self, s: Any) -> None:
        if s.attr_key not in (
            "pragma_unroll_factor",
            "pragma_import_c",
            "warp_specialize",
            "tl.min_blocks_per_sm",
        ):  # T.ws also makes a condition
            raise NotImplementedError(f"attribute {s.attr_key}: {s.node} {s.value}")
        self.stmt(s.body)

    # Expressions

    def indices(self, indices: Any) -> str:
        return "(" + ", ".join(self.expr(i) for i in indices) + ",)"

    def expr(self, e: Any) -> str:
        return getattr(self, "expr_" + type(e).__name__)(e)

    def expr_IntImm(self, e: Any) -> str:
        return str(bool(e.value)) if e.dtype == "bool" else str(e.value)

    def expr_FloatImm(self, e: Any) -> str:
        return f"float({str(e.value)!r})"

    def expr_StringImm(self, e: Any) -> str:
        return repr(e.value)

    def expr_Var(self, e: Any) -> str:
        return "UNKNOWN" if e.dtype == "handle" else self.name(e)

    def expr_SizeVar(self, e: Any) -> str:
        return self.name(e)

    def expr_BufferLoad(self, e: Any) -> str:
        b, scope = e.buffer, e.buffer.scope()
        if scope == "local.fragment" or (
            "int" not in b.dtype and b.dtype != "bool" and scope not in ("local.var", "local")
        ):
            return "UNKNOWN"
        if scope in ("local.var", "local"):
            return f"{self.buffer(b)}[{self.indices(e.indices)}]"
        if scope.startswith("shared"):
            return f"read({self.buffer(b)!r}, {self.indices(e.indices)})"
        return f"load({self.buffer(b)!r}, {self.indices(e.indices)})"

    def _binary(self, e: Any, sign: str) -> str:
        return f"({self.expr(e.a)} {sign} {self.expr(e.b)})"

    expr_Add = lambda self, e: self._binary(e, "+")
    expr_Sub = lambda self, e: self._binary(e, "-")
    expr_Mul = lambda self, e: self._binary(e, "*")
    expr_FloorDiv = lambda self, e: self._binary(e, "//")
    expr_FloorMod = lambda self, e: self._binary(e, "%")
    expr_EQ = lambda self, e: self._binary(e, "==")
    expr_NE = lambda self, e: self._binary(e, "!=")
    expr_LT = lambda self, e: self._binary(e, "<")
    expr_LE = lambda self, e: self._binary(e, "<=")
    expr_GT = lambda self, e: self._binary(e, ">")
    expr_GE = lambda self, e: self._binary(e, ">=")

    def _call(self, name: str, *of: Any) -> str:
        return f"{name}({', '.join(self.expr(x) for x in of)})"

    expr_Div = lambda self, e: self._call("truncdiv", e.a, e.b)
    expr_Mod = lambda self, e: self._call("truncmod", e.a, e.b)
    expr_Min = lambda self, e: self._call("least", e.a, e.b)
    expr_Max = lambda self, e: self._call("largest", e.a, e.b)
    expr_And = lambda self, e: self._call("both", e.a, e.b)
    expr_Or = lambda self, e: self._call("either", e.a, e.b)
    expr_Not = lambda self, e: self._call("opposite", e.a)

    def expr_Cast(self, e: Any) -> str:
        return f"cast({self.expr(e.value)}, {str(e.dtype)!r})"

    def expr_Select(self, e: Any) -> str:
        return self._choose(e.condition, e.true_value, e.false_value)

    def _choose(self, condition: Any, yes: Any, no: Any) -> str:
        return f"({self.expr(yes)} if truth({self.expr(condition)}, {len(self.lines)}) else {self.expr(no)})"

    def expr_Let(self, e: Any) -> str:
        return f"[{self.name(e.var)} := {self.expr(e.value)}, {self.expr(e.body)}][1]"

    def expr_Call(self, e: Any) -> str:
        op = e.op.name
        short = op.split(".")[-1]
        if op in UNKNOWN_VALUES:
            return "UNKNOWN"
        if short in ("bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right"):
            return f"BINARY[{short!r}]({self.expr(e.args[0])}, {self.expr(e.args[1])})"
        if short == "bitwise_not":
            return f"(~{self.expr(e.args[0])})"
        if short == "if_then_else":
            return self._choose(*e.args)
        if short in ("fabs", "abs"):
            return f"abs({self.expr(e.args[0])})"
        if short.startswith("warp_reduce_"):
            return self.expr(e.args[0])
        if short in ("shfl_sync", "any_sync"):  # of lane 0, and its opinion stands for that of its warp
            return self.expr(e.args[1])
        if short == "tl_shuffle_elect":
            return f"elect({self.expr(e.args[0])})"
        if short == "atomic_add_ret_elem_op":
            place = e.args[0].args[0]  # of access_ptr
            return f"atomic_add({self.buffer(place.buffer)!r}, {self.indices(place.indices)}, {self.expr(e.args[1])})"
        if short in ("call_extern", "call_pure_extern"):
            name = str(e.args[0].value)
            if name == "tl_attention_any_of_warpgroup":
                return f"(yield 'any', {self.expr(e.args[1])}, 128, {self.expr(e.args[2])})"
            if BLOCKING.match(name) and not OTHER_CTAS.match(name):
                raise NotImplementedError(f"function {name}")
            self.externs.add(name)
            return "UNKNOWN"
        raise NotImplementedError(f"operation {op}: {e}")

    # Calls for their effect

    def effect(self, e: Any) -> str | None:
        if not isinstance(e, tirx.Call):
            text = self.expr(e)
            return text if "yield" in text else None
        op = e.op.name
        short = op.split(".")[-1]
        if op in IGNORED:
            return None
        if short == "mbarrier_wait_parity":
            name, slot = self.barrier(e.args[0])
            return f"yield 'wait', {name!r}, {slot}, {self.expr(e.args[1])}, {self.phase(e.args[1])}"
        if short == "ptx_arrive_barrier":
            name, slot = self.barrier(e.args[0])
            return f"yield 'arrive', {name!r}, {slot}"
        if short == "tvm_storage_sync":
            if len(e.args) < 3:
                return "yield 'sync', 0, None"
            return f"yield 'sync', {self.expr(e.args[1])}, {self.expr(e.args[2])}"
        if short == "named_barrier_arrive":
            return f"yield 'pass', {self.expr(e.args[0])}, {self.expr(e.args[1])}"
        if short in ("tma_copy", "copy"):
            return self.copy(e, short)
        if short in ("wgmma_gemm", "gemm"):
            tiles = [self.tile(x) for x in e.args[:2] if x.args[0].buffer.scope().startswith("shared")]
            waits = short == "gemm" or int(e.annotations.get("wg_wait", 0)) == 0
            return f"yield 'product', [{', '.join(tiles)}], {waits}"
        if short == "tma_store_wait":
            return f"yield 'puts', {self.expr(e.args[0])}"
        if short == "wait_wgmma":
            return f"yield 'products', {self.expr(e.args[0])}"
        if short in (
            "atomic_add_ret_elem_op",
            "atomic_add_elem_op",
            "atomic_max_elem_op",
        ) and self.is_integer(e.args[0]):
            place = e.args[0].args[0]  # of access_ptr
            how = short.split("_")[1]
            return f"atomic_{how}({self.buffer(place.buffer)!r}, {self.indices(place.indices)}, {self.expr(e.args[1])})"
        if short.startswith("atomic_"):
            return None
        text = self.expr(e)  # also raises for what is not modelled
        return text if "yield" in text else None

    def is_integer(self, pointer: Any) -> bool:
        buffer = pointer.args[0].buffer
        if "int" in buffer.dtype and buffer.scope() != "global":
            raise NotImplementedError(f"atomic on {buffer.scope()} {buffer.name}")
        return "int" in buffer.dtype

    def barrier(self, load: Any) -> tuple[str, str]:
        (slot,) = load.indices
        return self.buffer(load.buffer), self.expr(slot)

    def phase(self, parity: Any) -> str:
        """The phase that a wait means, counted from 0, where its parity is written as `phase % 2` or `phase % 2 ^ 1`; else None."""
        before = 0
        if (
            isinstance(parity, tirx.Call)
            and parity.op.name.endswith("bitwise_xor")
            and isinstance(parity.args[1], tirx.IntImm)
        ):
            parity, before = parity.args[0], int(parity.args[1])
        if isinstance(parity, tirx.FloorMod) and isinstance(parity.b, tirx.IntImm) and int(parity.b) == 2:
            return f"{self.expr(parity.a)} - {before}"
        return "None"

    def tile(self, region: Any) -> str:
        """(buffer, slot) of a region in shared memory."""
        first = region.args[0]
        slot = self.expr(first.indices[0]) if len(first.indices) > 2 else "0"
        return f"({self.buffer(first.buffer)!r}, {slot})"

    def copy(self, e: Any, short: str) -> str | None:
        source, target = e.args[0], e.args[1]
        notes = e.annotations
        barrier = notes.get("barrier") if notes else None
        to = target.args[0].buffer
        if barrier is None:
            if "int" in to.dtype and to.scope() != "local.fragment":
                raise NotImplementedError(f"copy of integers to {to.name}")
            if to.scope().startswith("shared") and short == "tma_copy":
                raise NotImplementedError(f"load without a barrier to {to.name}")
            if short == "tma_copy":  # a store; one thread of the warpgroup starts it
                return f"yield 'put', {self.tile(source)}"
            return None
        name, slot = self.barrier(barrier)
        extents = " * ".join(f"({self.expr(x)})" for x in target.args[2:])
        bits = tvm.DataType(to.dtype).bits
        arrives = bool(notes.get("emit_arrive"))
        self.loaded.add(self.buffer(to))
        return f"yield 'load', {name!r}, {slot}, {extents} * {bits} // 8, {arrives}, {self.tile(target)}"

    # The function

    def source(self) -> str:
        f = self.function
        self.arguments, self.shapes = [], []
        for p in f.params:
            if p in f.buffer_map:
                b = f.buffer_map[p]
                self.arguments.append(("tensor", self.buffer(b)))
                for i, n in enumerate(b.shape):
                    if isinstance(n, tirx.Var):
                        self.shapes.append((self.name(n), self.buffer(b), i))
            else:
                self.arguments.append(("scalar", self.name(p)))
        self.stmt(f.body)
        head = ["def warp(thread, block, given, truth, elect, read, load, atomic_add, atomic_max, write):"]
        scalars = [name for kind, name in self.arguments if kind == "scalar"] + [
            name for name, *_ in self.shapes
        ]
        tensors = [name for kind, name in self.arguments if kind == "tensor"]
        head += [f"    {name} = given[{name!r}]" for name in dict.fromkeys(scalars)]
        head += [
            f"    {name} = write({name!r})"
            for name in tensors
            if any(f" {name}[" in line for line in self.lines)
        ]
        head += [f"    {name} = Variable()" for name, _ in self.allocated]
        return "\n".join(head + self.lines + ["    return", "    yield"]) + "\n"


RESERVED = {"thread", "block", "given", "truth", "elect", "read", "load", "atomic_add", "atomic_max", "write", "range", "float", "abs", "cast", "both", "either",
            "least", "largest", "opposite", "truncdiv", "truncmod", "lambda", "if", "in", "is", "for", "not", "and", "or", "pass", "def",
            "from", "with", "as", "del", "global", "return", "yield", "while", "else", "None", "True", "False", "class", "import",
            "UNKNOWN", "BINARY", "Variable"}  # fmt: skip
