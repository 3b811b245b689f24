"""Building of the kernels that the rows of a run need, several at once, before the first row."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rows import OURS

from tl_attention.compilation import building, store
from tl_attention.problem.attn_problem import DECODE
from tl_attention.testing.shapes import Shape
from tl_attention.tuning import needs
from tl_attention.tuning.results import Kernel


def build(
    console: Console, shapes: Iterable[Shape], direction: str, dtype: str, providers: Iterable[str]
) -> None:
    """Build the kernels of our rows that no pack has. A kernel that fails is the fault of its row, which says so later."""
    if OURS in providers:
        build_kernels(console, kernels_of_rows(shapes, direction, dtype))


def build_kernels(console: Console, kernels: Iterable[Kernel]) -> None:
    """Build the kernels of a run that no pack has."""
    building.build_all(
        [kernel for kernel in kernels if _is_to_build(kernel)],
        say=lambda text: console.print(text, highlight=False, markup=False),
    )


def _is_to_build(kernel: Kernel) -> bool:
    try:
        return store.find(*kernel) is None
    except RuntimeError:  # no pack has it, and TileLang is not installed
        return False


def kernels_of_rows(shapes: Iterable[Shape], direction: str, dtype: str) -> list[Kernel]:
    """Kernels of all rows of a pass, once each. Every backward has a forward; rows with options have a plain twin."""
    deterministic = direction.endswith("_det")
    passes = [direction]
    if direction != DECODE:
        passes = ["fwd"] + (["bwd_det" if deterministic else "bwd"] if "bwd" in direction else [])
    found: list[Kernel] = []
    for shape in shapes:
        for problem in [shape] if direction == DECODE else dict.fromkeys([shape, shape.plain]):
            for name in passes:
                try:
                    found += needs.kernels_of(problem, dtype, name)
                except ValueError:  # head dims without kernels: the row will say so
                    continue
    return list(dict.fromkeys(found))
