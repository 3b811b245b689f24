"""A kernel of TileLang (a TIR PrimFunc, before any pass) -> Python source of a generator that one warp runs.

A warp is modelled by its lane 0. Kept are integers, conditions, loops, shared and global integers, all synchronization, and which tiles
and fragments are read and written. What waits or is seen by others becomes a `yield` of a request (machine.py), the rest a call of Warp.
Computations on floats leave no code: their values are UNKNOWN, and conditions on them ask the policy. A loop over the elements of a tile
has one iteration, which stands for all. An operation that is neither modelled nor known to be without effect here raises
NotImplementedError, so nothing is skipped silently.
"""

from __future__ import annotations

import contextlib
import keyword
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tilelang import tvm
from tvm import tirx

import tl_attention

from . import externs

KERNELS = Path(tl_attention.__file__).with_name("kernels")
PARALLEL, THREAD_BINDING = 1, 4  # kinds of loops
READS, WRITES = 1, 2  # bits of the access of a region
# Operations without effect here. Regions among their arguments are read and written
IGNORED = {
    "tl.sync_warp", "tl.set_max_nreg", "tl.warpgroup_arrive", "tl.warpgroup_commit_batch", "tl.tma_store_arrive",
    "tl.tileop.fill", "tl.tileop.reduce", "tl.warpgroup_fence_operand", "tl.tileop.finalize_reducer", "tl.no_set_max_nreg",
    "tl.fence_barrier_init", "tl.tileop.atomicadd", "tl.tileop.atomic_add", "tl.annotate_layout", "tl.tileop.reinterpret",
    "tl.pdl_trigger", "tl.pdl_sync",
}  # fmt: skip
# Operations on floats. Their results are UNKNOWN, but for some of launch arguments, see values.compute()
FUNCTIONS_OF_FLOATS = {
    "tirx.exp2", "tirx.log2", "tirx.exp", "tirx.log", "tirx.tanh", "tirx.sqrt", "tirx.rsqrt", "tl.infinity", "tirx.reinterpret",
    "tirx.floor", "tirx.ceil", "tirx.pow", "tirx.sin", "tirx.cos", "tirx.sigmoid", "tirx.isnan", "tirx.round", "tirx.nearbyint",
    "tirx.popcount", "tirx.fma", "tl.fma2", "tl.rng_rand", "tl.ldg32", "tl.ldg64", "tl.ldg128", "tirx.erf",
}  # fmt: skip
ATTRIBUTES = (
    "pragma_unroll_factor",
    "pragma_import_c",
    "warp_specialize",
    "tl.min_blocks_per_sm",
)  # T.ws also makes a condition
INFIX = {"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%"}
INFIX |= {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">="}
FUNCTIONS = {
    "Div": "truncdiv",
    "Mod": "truncmod",
    "Min": "least",
    "Max": "largest",
    "And": "both",
    "Or": "either",
}
FUNCTIONS_OF_ONE = {"Not": "opposite"}
TRANSPOSE_A, ROWS, CLEAR_ACCUM = 3, 5, 9  # arguments of a product
# Methods of Warp that a kernel calls by their names
CALLED = (
    "truth",
    "elect",
    "read",
    "load",
    "touch",
    "tile_read",
    "tile_write",
    "fence",
    "product",
    "products",
    "put",
    "wait_puts",
)
TRACED = (
    "mbarrier_wait_parity",
    "mbarrier_arrive",
    "tma_copy",
    "sync_threads",
    "named_barrier_arrive",
    "call_extern",
    "wgmma_gemm",
)
TRACED = (*TRACED, "fence_proxy_async", "wait_wgmma", "tma_store_wait", "copy")
RESERVED = {
    *keyword.kwlist, *CALLED, *FUNCTIONS.values(), *FUNCTIONS_OF_ONE.values(), "warp", "thread", "block", "given", "range", "float", "abs",
    "cast", "compute", "externs", "UNKNOWN", "BINARY", "Variable", "Address", "Place",
}  # fmt: skip


@contextlib.contextmanager
def places() -> Iterator[dict]:
    """Note which lines of kernels/ ask for each synchronization of kernels traced meanwhile: hash of the call -> (text, call)."""
    import tilelang.language as T

    found, own = {}, {name: getattr(T, name) for name in TRACED}

    def noting(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            frame, lines = sys._getframe(1), []
            while frame is not None and len(lines) < 3:
                path = Path(frame.f_code.co_filename)
                if path.is_relative_to(KERNELS) and not frame.f_code.co_name.startswith("<"):
                    lines.append(f"{path.relative_to(KERNELS)}:{frame.f_lineno} {frame.f_code.co_name}")
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


class Uses:
    """Tiles and fragments that a statement uses."""

    def __init__(self) -> None:
        self.reads: dict[str, None] = {}
        self.writes: dict[str, None] = {}
        self.clears: dict[str, None] = {}
        self.tile_reads: dict[str, None] = {}
        self.tile_writes: dict[str, None] = {}


class Translator:
    """Translates a kernel.

    Args:
        function: the kernel.
        places: of its synchronization, see places().
    """

    def __init__(self, function: Any, places: dict):
        self.function, self.places = function, places
        self.names: dict[int, str] = {}
        self.used: set[str] = set()
        self.kept: list = []  # keeps the variables alive whose hashes are keys
        self.fragments: set[str] = set()
        self.shapes_of: dict[str, tuple] = {}  # of buffers in shared memory: (buffer, numbers of its shape)
        # Found by a first translation, used by the second
        self.operands: set[str] = set()  # fragments that products use
        # Buffers in shared memory -> leading dimensions that no access goes across
        self.slot_dims: dict[str, int] = {}
        # Integers in shared memory that threads index: tiles of unknown data
        self.scattered: set[str] = set()
        self.externs: set[str] = set()
        self.start()

    def start(self) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self.barriers: dict[str, list[int]] = {}
        self.allocated: list[str] = []
        self.grid: dict[str, str] = {}  # expression of the number of CTAs in each direction
        self.before_grid: list[str] = []  # lines that set names in these expressions
        self.threads: tuple[int, ...] = ()
        self.arguments: list[tuple[str, str]] = []
        self.shapes: list[tuple[str, str, int]] = []
        self.strides: list[str] = []
        self.effects = 0  # lines so far that change more than a name
        self.by_thread: set[str] = set()  # variables whose values differ between the lanes of a warp
        self.parallel: dict[
            str, int
        ] = {}  # variables of the loops over elements around a statement, and their extents
        self.conditional = 0  # conditions around it in these loops
        self.uses = Uses()

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

    def varies(self, e: Any, among: Any = None) -> bool:
        """True if an expression may differ between the threads of a warp: it has one of the variables that do, or of others."""
        found, among = [], self.by_thread if among is None else among

        def visit(x: Any) -> None:
            if isinstance(x, tirx.Var) and self.names.get(x.__hash__()) in among:
                found.append(x)

        tirx.stmt_functor.post_order_visit(e, visit)
        return bool(found)

    def is_own(self, indices: Any) -> bool:
        """True if each thread has an element of its own, by its number."""
        varying = [i for i in indices if self.varies(i)]
        return bool(varying) and not any(self.varies(i, self.parallel) for i in varying)

    # Statements

    def emit(self, line: str, has_effect: bool = False) -> None:
        self.lines.append("    " * self.depth + line)
        self.effects += has_effect or "yield" in line or "atomic_" in line

    def flush(self, place: str = "") -> None:
        """Emit the uses of the current statement."""
        uses, self.uses = self.uses, Uses()
        of = f"  # {place}" if place else ""
        for tile in uses.tile_reads:
            self.emit(f"tile_read({tile}){of}", True)
        reads, writes, clears = (
            tuple(name for name in x if name in self.operands) for x in (uses.reads, uses.writes, uses.clears)
        )
        if reads or writes or clears:
            self.emit(f"touch({reads}, {writes}, {clears}){of}", True)
        for tile in uses.tile_writes:
            self.emit(f"tile_write({tile}){of}", True)

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
                self.shapes_of[name] = tuple(int(n) for n in b.shape), b.dtype
            elif scope == "local.fragment":
                self.fragments.add(name)
            elif scope in ("local.var", "local"):
                self.allocated.append(name)
        for key, value in s.annotations.items():
            if key == "barrier_init":
                for data, counts in value.items():
                    self.barriers[self.name(data)] = [int(c) for c in counts]
            if key == "tl.launch_threads":
                self.threads = tuple(int(n) for n in value)
        self.stmt(s.body)

    def stmt_Bind(self, s: Any) -> None:
        name, value = self.name(s.var), s.value
        if isinstance(value, tirx.Call) and value.op.name == "tl.launch_thread_idx":
            number = int(value.args[0])
            if number == 0:
                self.by_thread.add(name)
            self.emit(f"{name} = thread[{number}]")
            return
        if self.varies(value):
            self.by_thread.add(name)
        text = self.expr(value)
        self.flush()
        self.emit(f"{name} = {text}")

    def stmt_Evaluate(self, s: Any) -> None:
        text = self.effect(s.value)
        place, _ = self.places.get(hash(s.value), ("", None))
        self.flush(place)
        if text:
            self.emit(f"{text}  # {place}" if place else text, True)

    def stmt_BufferStore(self, s: Any) -> None:
        b, scope, name = s.buffer, s.buffer.scope(), self.buffer(s.buffer)
        value = self.expr(s.value)
        if scope == "local.fragment":
            indices = [self.names.get(i.__hash__()) if isinstance(i, tirx.Var) else None for i in s.indices]
            elements = (
                math.prod(self.parallel.get(i, 0) for i in indices if i)
                if len(set(indices)) == len(indices)
                else 0
            )
            self.write_fragment(name, not self.conditional and elements == math.prod(int(n) for n in b.shape))
        elif scope.startswith("shared") and not self.has_words(b):
            slot = self.slot(b, s.indices, [1] * len(s.indices))
            # Each thread reads and writes elements of its own
            own = f"{name!r}, {slot}"
            if own in self.uses.tile_reads:
                del self.uses.tile_reads[own]
                self.uses.tile_reads[f"{own}, ('threads', warp.number)"] = None
            self.uses.tile_writes[own] = None
        if "yield" in value and scope != "local.var" and not self.has_words(b):
            self.emit(value)
        self.flush()
        if not self.has_words(b):
            return
        where = self.indices(s.indices)
        if scope.startswith("shared"):
            self.emit(f"yield 'store', {name!r}, {where}, {value}")
        elif scope in ("local.var", "local"):
            self.emit(f"{name}[{where}] = {value}", True)
        else:
            self.emit(f"warp.put_number({name!r}, {where}, {value})", True)

    def write_fragment(self, name: str, whole: bool) -> None:
        (self.uses.clears if whole else self.uses.writes)[name] = None

    def has_words(self, b: Any) -> bool:
        """True for variables of a warp and for integers, whose values are modelled; not for those that threads index."""
        scope = b.scope()
        if scope in ("local.var", "local"):
            return True
        return (
            scope != "local.fragment"
            and ("int" in b.dtype or b.dtype == "bool")
            and self.buffer(b) not in self.scattered
        )

    def stmt_IfThenElse(self, s: Any) -> None:
        condition = self.expr(s.condition)
        self.flush()
        at = len(self.lines)
        self.emit(f"if truth({condition}, {len(self.lines)}):")
        self.conditional += bool(self.parallel)
        has_then = self.body(s.then_case)
        if not has_then:
            self.lines.append("    " * (self.depth + 1) + "pass")
        has_else = False
        if s.else_case is not None:
            self.emit("else:")
            has_else = self.body(s.else_case)
            if not has_else:
                self.lines.pop()
        self.conditional -= bool(self.parallel)
        if not has_then and not has_else:
            del self.lines[at:]
            if "yield" in condition:
                self.emit(condition)

    def stmt_For(self, s: Any) -> None:
        var, first, extent = self.name(s.loop_var), self.expr(s.min), self.expr(s.extent)
        if int(s.kind) == THREAD_BINDING:
            tag = str(s.thread_binding.thread_tag)
            if not self.grid:
                self.before_grid = [line.strip() for line in self.lines]
            self.grid[tag] = extent
            self.emit(f"{var} = block[{tag!r}]")
            self.stmt(s.body)
            return
        self.flush()
        at = len(self.lines)
        if int(s.kind) == PARALLEL:
            self.emit(f"{var} = {first}")
            self.by_thread.add(var)
            self.parallel[var] = int(s.extent) if isinstance(s.extent, tirx.IntImm) else 0
            self.depth -= 1
            if not self.body(s.body):
                del self.lines[at:]
            self.depth += 1
            del self.parallel[var]
            return
        step = "" if s.step is None or int(s.step) == 1 else f", {self.expr(s.step)}"
        self.emit(f"for {var} in range({first}, {first} + {extent}{step}):")
        if not self.body(s.body):
            del self.lines[at:]

    def stmt_While(self, s: Any) -> None:
        condition = self.expr(s.condition)
        if self.uses.tile_reads or self.uses.reads:
            raise NotImplementedError(f"a loop whose condition reads a tile: {s.condition}")
        self.emit(f"while truth({condition}, {len(self.lines)}):")
        self.depth += 1
        self.emit("yield ('go',)")
        self.depth -= 1
        self.body(s.body)

    def stmt_AttrStmt(self, s: Any) -> None:
        if s.attr_key not in ATTRIBUTES:
            raise NotImplementedError(f"attribute {s.attr_key}: {s.node} {s.value}")
        self.stmt(s.body)

    # Tiles

    def slot(self, b: Any, indices: Any, extents: list) -> str:
        """Slot of an access: its first indices, as far as all accesses of the buffer stay within one of each."""
        name, dims = self.buffer(b), 0
        for i, extent in zip(indices[:-1], extents, strict=False):
            if not isinstance(extent, int) or extent != 1 or self.varies(i):
                break
            dims += 1
        dims = self.slot_dims[name] = min(self.slot_dims.get(name, dims), dims)
        texts = [self.expr(i) for i in indices[:dims]]
        return "0" if not texts else texts[0] if dims == 1 else f"({', '.join(texts)})"

    def region(self, region: Any) -> tuple[Any, str, bool]:
        """(buffer, slot, True if it is the whole fragment) of a region."""
        first = region.args[0]
        extents = [int(n) if isinstance(n, tirx.IntImm) else n for n in region.args[2:]]
        b = first.buffer
        if b.scope() == "local.fragment":
            sizes = [int(n) for n in b.shape]
            return b, "0", all(isinstance(n, int) for n in extents) and math.prod(extents) == math.prod(sizes)
        return b, self.slot(b, first.indices, extents) if b.scope().startswith("shared") else "0", False

    def tile(self, region: Any) -> str:
        """(buffer, slot) of a region in shared memory."""
        b, slot, _ = self.region(region)
        return f"({self.buffer(b)!r}, {slot})"

    def use_region(self, region: Any, access: int) -> None:
        """Note plain accesses of a region."""
        b, slot, whole = self.region(region)
        name = self.buffer(b)
        if b.scope() == "local.fragment":
            if access & READS:
                self.uses.reads[name] = None
            if access & WRITES:
                self.write_fragment(name, whole)
        elif b.scope().startswith("shared"):
            if self.has_words(b):
                self.scattered.add(name)
            rows = (
                ", 'rows'"
                if [int(n) for n in region.args[2:] if isinstance(n, tirx.IntImm)][-2:-1] == [64]
                else ""
            )
            if access & READS:
                self.uses.tile_reads[f"{name!r}, {slot}"] = None
            if access & WRITES:
                self.uses.tile_writes[f"{name!r}, {slot}{rows}"] = None

    # Expressions

    def indices(self, indices: Any) -> str:
        return "(" + ", ".join(self.expr(i) for i in indices) + ",)"

    def expr(self, e: Any) -> str:
        kind = type(e).__name__
        if kind in INFIX:
            return f"({self.expr(e.a)} {INFIX[kind]} {self.expr(e.b)})"
        if kind in FUNCTIONS:
            return f"{FUNCTIONS[kind]}({self.expr(e.a)}, {self.expr(e.b)})"
        if kind in FUNCTIONS_OF_ONE:
            return f"{FUNCTIONS_OF_ONE[kind]}({self.expr(e.a)})"
        return getattr(self, "expr_" + kind)(e)

    def expr_IntImm(self, e: Any) -> str:
        return str(bool(e.value)) if e.dtype == "bool" else str(e.value)

    def expr_FloatImm(self, e: Any) -> str:
        return f"float({str(e.value)!r})"

    def expr_StringImm(self, e: Any) -> str:
        return repr(e.value)

    def expr_Var(self, e: Any) -> str:
        if e.dtype != "handle":
            return self.name(e)
        if (name := self.name(e)) in self.fragments:
            self.uses.reads[name] = None
        return "UNKNOWN"

    def expr_SizeVar(self, e: Any) -> str:
        return self.name(e)

    def expr_BufferLoad(self, e: Any) -> str:
        b, scope, name = e.buffer, e.buffer.scope(), self.buffer(e.buffer)
        if scope == "local.fragment":
            self.uses.reads[name] = None
            return "UNKNOWN"
        if scope.startswith("shared") and "int" in b.dtype and any(self.varies(i) for i in e.indices):
            self.scattered.add(name)
        if not self.has_words(b):
            for i in e.indices:
                self.expr(i)
            if scope.startswith("shared"):
                own = ", ('threads', warp.number)" if self.is_own(e.indices) else ""
                self.uses.tile_reads[f"{name!r}, {self.slot(b, e.indices, [1] * len(e.indices))}{own}"] = None
            return "UNKNOWN"
        where = self.indices(e.indices)
        if scope in ("local.var", "local"):
            return f"{name}[{where}]"
        return f"{'read' if scope.startswith('shared') else 'load'}({name!r}, {where})"

    def expr_Ramp(self, e: Any) -> str:
        return self.expr(e.base)

    def expr_Broadcast(self, e: Any) -> str:
        return self.expr(e.value)

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
        if op in FUNCTIONS_OF_FLOATS:
            texts = [self.expr(x) for x in e.args]
            return (
                "UNKNOWN"
                if "UNKNOWN" in texts or not texts
                else f"compute({short!r}, {str(e.dtype)!r}, {', '.join(texts)})"
            )
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
        if short in (
            "shfl_sync",
            "any_sync",
            "shfl_up_sync",
            "shfl_down_sync",
            "shfl_xor_sync",
        ):  # lane 0 stands for its warp
            return self.expr(e.args[1])
        if short == "tl_shuffle_elect":
            return f"elect({self.expr(e.args[0])})"
        if short == "atomic_add_ret_elem_op":
            return self._atomic(e, "add")
        if short in ("address_of", "access_ptr"):
            load = e.args[0]
            return self.address(load.buffer, load.indices)
        if short == "tvm_access_ptr":
            return self.address_of_data(e.args[1], e.args[2])
        if short in ("call_extern", "call_pure_extern"):
            return self.extern(str(e.args[0].value), e.args[1:])
        raise NotImplementedError(f"operation {op}: {e}")

    def extern(self, name: str, args: Any) -> str:
        """Call of a CUDA function."""
        short = externs.base_name(name)
        self.externs.add(short)
        texts = [self.expr(x) for x in args]
        if short in externs.WRITES_FRAGMENTS:
            written = list(args)[externs.WRITES_FRAGMENTS[short]]
            self.uses.writes |= self.uses_of(written).reads
        if short in externs.MODELS:
            return externs.MODELS[short](texts, externs.template_arguments(name))
        if not externs.is_pure(short):
            raise NotImplementedError(f"function {name}: neither in externs.MODELS nor in externs.PURE")
        waits = [text for text in texts if "yield" in text or "externs." in text]
        return f"[{', '.join(waits)}, UNKNOWN][-1]" if waits else "UNKNOWN"

    def uses_of(self, expressions: Iterable[Any]) -> Uses:
        """What expressions use alone."""
        others, self.uses = self.uses, Uses()
        for x in expressions:
            self.expr(x)
        found, self.uses = self.uses, others
        return found

    def address(self, b: Any, indices: Any) -> str:
        """Address of an element."""
        scope, name = b.scope(), self.buffer(b)
        if scope.startswith("shared"):
            offset = "0"
            for i, n in zip(indices, b.shape, strict=True):
                offset = f"({offset} * {int(n)} + {self.expr(i)})"
            return self._shared_address(name, offset)
        if scope == "global":
            return f"Place({name!r}, {self.expr(indices[0])})"
        return "UNKNOWN"

    def address_of_data(self, data: Any, offset: Any) -> str:
        name = self.name(data)
        return self._shared_address(name, self.expr(offset)) if name in self.shapes_of else "UNKNOWN"

    def _shared_address(self, name: str, offset: str) -> str:
        shape, dtype = self.shapes_of[name]
        size = tvm.DataType(dtype).bits // 8
        dims = self.slot_dims.setdefault(name, min(len(shape) - 1, 1))
        if dims > 2:
            raise NotImplementedError(f"address of {name}, which has {dims} dimensions of slots")
        per_slot = math.prod(shape[dims:]) * size if dims else 0
        inner = f", {int(shape[1])}" if dims == 2 else ""
        return f"Address({name!r}, {offset} * {size}, {per_slot}{inner})"

    def _atomic(self, e: Any, how: str) -> str:
        place = e.args[0].args[0]  # of access_ptr
        b = place.buffer
        if b.scope() != "global":
            raise NotImplementedError(f"atomic on {b.scope()} {b.name}")
        return f"warp.atomic_{how}({self.buffer(b)!r}, {self.indices(place.indices)}, {self.expr(e.args[1])})"

    # Calls for their effect

    def effect(self, e: Any) -> str | None:
        if not isinstance(e, tirx.Call):
            text = self.expr(e)
            return text if "yield" in text else None
        op = e.op.name
        short = op.split(".")[-1]
        if op in IGNORED:
            for x in e.args:
                if isinstance(x, tirx.Call) and x.op.name == "tl.tileop.region":
                    self.use_region(x, int(x.args[1]))
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
            return self.product(e, short)
        if short == "fence_proxy_async":
            return "fence()"
        if short == "tma_store_wait":
            return f"wait_puts({self.expr(e.args[0])})"
        if short == "wait_wgmma":
            return f"products({self.expr(e.args[0])})"
        if short in (
            "atomic_add_ret_elem_op",
            "atomic_add_elem_op",
            "atomic_max_elem_op",
        ) and self.is_integer(e.args[0]):
            return self._atomic(e, short.split("_")[1])
        if short.startswith("atomic_"):
            for x in e.args[1:]:
                self.expr(x)
            return None
        text = self.expr(e)  # also raises for what is not modelled
        return text if "yield" in text or "externs." in text else None

    def is_integer(self, pointer: Any) -> bool:
        return "int" in pointer.args[0].buffer.dtype

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

    def product(self, e: Any, short: str) -> str:
        tiles, operands = [], []
        # A warp multiplies its 16 rows of the left factor by all of the right one
        by_rows = self.expr(e.args[TRANSPOSE_A]) == "False" and self.expr(e.args[ROWS]) == "64"
        for x, share in ((e.args[0], by_rows), (e.args[1], False)):
            b = x.args[0].buffer
            if b.scope().startswith("shared"):
                tiles.append(f"({self.tile(x)}, {share})")
            else:
                operands.append(self.buffer(b))
        accumulator = self.buffer(e.args[2].args[0].buffer)
        self.operands |= {*operands, accumulator}
        waits = short == "gemm" or int(e.annotations.get("wg_wait", 0)) == 0
        clear = self.expr(e.args[CLEAR_ACCUM])
        return f"product([{', '.join(tiles)}], {operands}, {accumulator!r}, {clear}, {waits})"

    def copy(self, e: Any, short: str) -> str | None:
        source, target = e.args[0], e.args[1]
        notes = e.annotations
        barrier = notes.get("barrier") if notes else None
        from_scope, to_scope = source.args[0].buffer.scope(), target.args[0].buffer.scope()
        if barrier is None:
            if from_scope.startswith("shared") and to_scope == "global":  # one thread starts the store
                name = self.tile(source).removesuffix(")").removeprefix("(")
                return f"put({name}, waits={short == 'copy'})"
            if short == "tma_copy":
                raise NotImplementedError(f"copy by TMA without a barrier: {e}")
            self.use_region(source, READS)
            self.use_region(target, WRITES)
            return None
        name, slot = self.barrier(barrier)
        to = target.args[0].buffer
        extents = " * ".join(f"({self.expr(x)})" for x in target.args[2:])
        bits = tvm.DataType(to.dtype).bits
        return f"yield 'load', {name!r}, {slot}, {extents} * {bits} // 8, {bool(notes.get('emit_arrive'))}, {self.tile(target)}"

    # The function

    def source(self) -> str:
        """The text of the kernel. The first of two translations finds how its buffers are used."""
        self._translate()
        self.start()
        return self._translate()

    def _translate(self) -> str:
        f = self.function
        for p in f.params:
            if p in f.buffer_map:
                b = f.buffer_map[p]
                self.arguments.append(("tensor", self.buffer(b)))
                for i, n in enumerate(b.shape):
                    if isinstance(n, tirx.Var):
                        self.shapes.append((self.name(n), self.buffer(b), i))
                self.strides += [self.name(n) for n in b.strides if isinstance(n, tirx.Var)]
            else:
                self.arguments.append(("scalar", self.name(p)))
        self.stmt(f.body)
        head = ["def kernel(warp, thread, block, given):"]
        head += [f"    {name} = warp.{name}" for name in CALLED]
        scalars = [name for kind, name in self.arguments if kind == "scalar"] + [
            name for name, *_ in self.shapes
        ]
        head += [f"    {name} = given[{name!r}]" for name in dict.fromkeys(scalars)]
        head += [f"    {name} = UNKNOWN" for name in self.strides if name not in scalars]
        head += [f"    {name} = Variable()" for name in self.allocated]
        return "\n".join(head + self.lines + ["    return", "    yield"]) + "\n"
