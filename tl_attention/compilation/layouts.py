"""Layout inference of TileLang 0.1.15 in less than half its time, with the same layouts.

TileLang solves the layouts of fragments once per tile operation, with that operation first, and checks all others after it. So
its time grows with the square of their number. A kernel repeats most of them: each of its loops over keys has a copy. Here
TileLang sees one of each, and its answer holds for the copies, which access the same buffers by the same indices.

TileLang also enumerates all elements of a tile whose layout is annotated, to see that none share an address. Here it infers these
layouts, too, which gives the annotated ones; if not, it is given the annotations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

LAYOUTS = "layout_map"  # TileLang's annotation of a block
KEPT = "tl_attention.kept"  # annotation of a loop: its number
REMOVED = "tl_attention.removed"  # call in the place of a statement: its number
TILE_OPERATIONS = "tl.tileop."
# Operations whose layouts follow from buffers and sizes, wherever in a buffer a tile is
ANYWHERE = ("tl.tileop.tma_copy", "tl.tileop.wgmma_gemm")


@contextlib.contextmanager
def inferred_once() -> Iterator[None]:
    """Make TileLang infer layouts by infer()."""
    from tilelang import transform

    own = transform.LayoutInference
    transform.LayoutInference = lambda: lambda module: infer(module, own())
    try:
        yield
    finally:
        transform.LayoutInference = own


def infer(module: Any, infer_all: Any) -> Any:
    """A module with layouts.

    Args:
        infer_all: TileLang's pass.
    """
    from tvm.ir import IRModule

    functions = {name: _infer_function(function, infer_all) for name, function in module.functions.items()}
    return IRModule(functions, attrs=module.attrs)


def _infer_function(function: Any, infer_all: Any) -> Any:
    from tvm.ir import IRModule

    def inferred(function: Any) -> Any:
        (found,) = infer_all(IRModule({"main": function})).functions.values()
        return found

    once = _Once()
    shortened = function.with_body(once.shortened(function.body))
    with contextlib.suppress(Exception):  # TileLang cannot do without an annotation
        found = inferred(shortened.with_body(once.without_annotations(shortened.body)))
        if once.has_annotated(found.body):
            return found.with_body(once.restored(found.body))
    found = inferred(shortened)
    return found.with_body(once.restored(found.body))


class _Once:
    """Statements that a function repeats, and its annotated layouts."""

    def __init__(self) -> None:
        # Structural hash -> statements: number, the statement, its buffers
        self.kept: dict[int, list[tuple[int, Any, list[Any]]]] = {}
        self.count = 0
        self.removed: list[tuple[Any, int]] = []  # statements, and the number of the one that each repeats
        self.annotated: dict[Any, Any] = {}  # data of a buffer in shared memory -> layout

    def shortened(self, body: Any) -> Any:
        """Body with one of each parallel loop and tile operation, and calls of REMOVED in the place of the others."""
        from tvm import ir, tirx

        def kept_once(statement: Any) -> Any:
            if isinstance(statement, tirx.For):
                if statement.kind != tirx.ForKind.PARALLEL:
                    return None
            elif not _operation(statement).startswith(TILE_OPERATIONS):
                return None
            form = _without_places(statement) if _operation(statement) in ANYWHERE else statement
            same = self.kept.setdefault(ir.structural_hash(form), [])
            buffers = _buffers(form)
            if buffers is None:
                return None
            for number, first, its_buffers in same:
                if _are_same(buffers, its_buffers) and ir.structural_equal(first, form):
                    self.removed.append((statement, number))
                    return tirx.Evaluate(tirx.call_extern("int32", REMOVED, len(self.removed) - 1))
            same.append((self.count, form, buffers))
            self.count += 1
            if isinstance(statement, tirx.For):
                return _loop(statement.loop_var, statement, {**statement.annotations, KEPT: self.count - 1})
            return statement

        return tirx.stmt_functor.ir_transform(body, kept_once, None, ["tirx.For", "tirx.Evaluate"])

    def without_annotations(self, body: Any) -> Any:
        """Body whose blocks have no annotated layouts of shared memory."""
        from tilelang.layout import Fragment
        from tvm import tirx

        def stripped(block: Any) -> Any:
            layouts = block.annotations.get(LAYOUTS, {})
            own = {data: layout for data, layout in layouts.items() if not isinstance(layout, Fragment)}
            self.annotated |= own
            left = {data: layout for data, layout in layouts.items() if data not in own}
            return _block(block, {**block.annotations, LAYOUTS: left}) if own else None

        return tirx.stmt_functor.ir_transform(body, None, stripped, ["tirx.SBlock"])

    def has_annotated(self, body: Any) -> bool:
        """True if the layouts of a body with layouts include the annotated ones."""
        from tvm import tirx

        found: list[bool] = []

        def compare(node: Any) -> None:
            if isinstance(node, tirx.SBlock):
                layouts = {buffer.data: layout for buffer, layout in node.annotations[LAYOUTS].items()}
                found.append(
                    all(
                        data in layouts and own.is_equal(layouts[data])
                        for data, own in self.annotated.items()
                    )
                )

        tirx.stmt_functor.post_order_visit(body, compare)
        return all(found)

    def restored(self, body: Any) -> Any:
        """Body with layouts of the whole function, from that of the shortened one. A block lists the annotated layouts first."""
        from tvm import tirx

        loops: dict[int, Any] = {}

        def ordered(block: Any) -> Any:
            places = {data: place for place, data in enumerate(self.annotated)}
            layouts = sorted(
                block.annotations[LAYOUTS].items(), key=lambda item: places.get(item[0].data, len(places))
            )
            return _block(block, {**block.annotations, LAYOUTS: dict(layouts)})

        def restored(statement: Any) -> Any:
            if isinstance(statement, tirx.For):
                if KEPT not in statement.annotations:
                    return None
                annotations = dict(statement.annotations)
                number = int(annotations.pop(KEPT))
                loops[number] = _loop(statement.loop_var, statement, annotations)
                return loops[number]
            name, *numbers = getattr(statement.value, "args", None) or [None]
            if getattr(name, "value", None) != REMOVED:
                return None
            removed, number = self.removed[int(numbers[0])]
            return _copied(loops[number]) if isinstance(removed, tirx.For) else removed

        body = tirx.stmt_functor.ir_transform(body, restored, None, ["tirx.For", "tirx.Evaluate"])
        return tirx.stmt_functor.ir_transform(body, None, ordered, ["tirx.SBlock"])


def _buffers(statement: Any) -> list[Any] | None:
    """Buffers that a statement accesses, in order; None if it defines more than loop variables and names of values.

    Two views of one memory are two buffers, which structural_equal takes for one.
    """
    from tvm import tirx

    found: list[Any] = []
    definitions: list[Any] = []

    def collect(node: Any) -> None:
        if isinstance(node, tirx.BufferLoad | tirx.BufferStore):
            found.append(node.buffer)
        elif isinstance(node, tirx.SBlock | tirx.AttrStmt | tirx.AllocBuffer | tirx.DeclBuffer | tirx.Let):
            definitions.append(node)

    tirx.stmt_functor.post_order_visit(statement, collect)
    return None if definitions else found


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(
        one.same_as(other) for one, other in zip(some, others, strict=True)
    )


def _operation(statement: Any) -> str:
    """Name of the operation that a statement calls; empty if it is another statement."""
    operation = getattr(getattr(statement, "value", None), "op", None)
    return getattr(operation, "name", "")


def _without_places(statement: Any) -> Any:
    """Statement that reads and writes the same buffers outside registers at 0."""
    from tvm import tirx

    def first(load: Any) -> Any:
        if load.buffer.scope() == "local.fragment":
            return None
        return tirx.BufferLoad(load.buffer, [0] * len(load.indices))

    return tirx.stmt_functor.ir_transform(statement, None, first, ["tirx.BufferLoad"])


def _block(block: Any, annotations: dict[str, Any]) -> Any:
    """Block with other annotations."""
    from tvm import tirx

    return tirx.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        block.body,
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        annotations,
    )


def _copied(loop: Any) -> Any:
    """Loop with variables of its own."""
    from tvm import tirx

    own: dict[Any, Any] = {}

    def define(node: Any) -> None:
        if isinstance(node, tirx.For | tirx.Bind):
            variable = node.loop_var if isinstance(node, tirx.For) else node.var
            own[variable] = tirx.Var(variable.name, variable.dtype)

    def defined(node: Any) -> Any:
        if isinstance(node, tirx.Bind):
            return tirx.Bind(own[node.var], node.value)
        return _loop(own[node.loop_var], node, node.annotations)

    tirx.stmt_functor.post_order_visit(loop, define)
    used = tirx.stmt_functor.substitute(loop, own)
    return tirx.stmt_functor.ir_transform(used, None, defined, ["tirx.For", "tirx.Bind"])


def _loop(variable: Any, loop: Any, annotations: dict[str, Any]) -> Any:
    """Loop with another variable and other annotations."""
    from tvm import tirx

    return tirx.For(
        variable, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding, annotations, loop.step
    )
