"""Models of the CUDA functions that kernels call, by name: what each does to shared memory, barriers and counters in global memory.

A function that is neither in MODELS nor in PURE raises NotImplementedError. All of them read the fragments that they are given; those in
WRITES_FRAGMENTS also write some of them.

Not modelled: shared memory that is private to a warp (tiles of captured tensors, values of diagonals, rows that are rounded or split to
terms), and float data in global memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from tl_attention.config.round_configs import ROUNDED_ROWS
from tl_attention.config.term_configs import ITEM_ELEMENTS
from tl_attention.kernels.backward.dq_sinks.round import DQ_WARPS
from tl_attention.kernels.backward.dq_sinks.round_packed import BLOCKS_PER_TILE
from tl_attention.problem.attn_problem import TABLE_ROWS

from .machine import WARP, WARPS, Warp
from .races import Fault
from .values import Address, Place

# Functions of values, of registers, or of shared memory that is private to a warp. `#` stands for a number
PURE = {
    "__fdiv_rn", "__fmul_rn", "__saturatef", "fminf", "fmaxf",
    "add", "add_exactly", "add_fp32_tile", "add_fragment", "add_rows", "add_stored", "add_sum", "add_tile", "add_to_place",
    "add_transposed", "base#", "before", "bit", "diagonal", "diagonal#", "distance", "draw", "drop_float", "drop_half", "factor#",
    "fence_additions", "fetch", "fetch_bits", "fetch_shared", "fetched", "gradient", "keep_diagonals", "keep_rest", "merge_sums",
    "new_score", "prefetch", "prefetch_bits", "random_state", "seen", "slope", "sloped", "slot_of_lane", "store_rows",
    "store_tile", "store_vector", "sum_diagonals", "sum_pairs", "summed_slot", "tanh", "target#", "wait_for_prefetch",
}  # fmt: skip
# Arguments that a function writes
WRITES_FRAGMENTS = {
    **dict.fromkeys(("add_stored", "drop_float", "drop_half", "merge_piece"), slice(None)),
    "softmax_backward": slice(-1, None),
}


REACHED: dict[
    int, set[int]
] = {}  # lines of an instrumented kernel that ran, and by which warps: see mutations.reached_lines()


def base_name(name: str) -> str:
    """Name of a function without its prefix and its template arguments."""
    return re.sub(r"<.*>$", "", name.removeprefix("tl_attention_"), flags=re.DOTALL)


def template_arguments(name: str) -> list[int]:
    """Numbers among the template arguments of a function."""
    return [int(n) for n in re.findall(r"(?<![\w.])\d+(?!\w)", name.partition("<")[2])]


def is_pure(name: str) -> bool:
    return name in PURE or re.sub(r"\d+$", "#", name) in PURE


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)


# Functions of a warp. Those that are generators may wait


def store_fragment(warp: Warp, address: Address, fragment: Any) -> None:
    """stmatrix of a warp's 16 rows."""
    warp.tile_write(*address.tile, "rows")


def split_tile(warp: Warp, address: Address, slot: int) -> None:
    """A warp reads and writes its own 16 rows."""
    name, _ = address.tile
    warp.tile_read(name, slot, ("rows", warp.number % WARPS))
    warp.tile_write(name, slot, "rows")


def softmax_backward(warp: Warp, P: Any, rest: Any, dp: Any, delta: Address, dS: Any) -> None:
    """Each thread reads its deltas."""
    warp.tile_read(*delta.tile)


def add_by_tma(warp: Warp, place: Place, address: Address, fragment: Any) -> None:
    """A warp waits for its additions, writes its rows, and starts to add them."""
    name, slot = address.tile
    warp.sums.append((place.index + warp.number % WARPS, warp.machine.events))
    warp.wait_puts(0)
    warp.tile_write(name, slot, "rows")
    warp.fence()
    warp.put(name, slot, share=("rows", warp.number % WARPS))


def _bit(warp: Warp) -> int:
    x, y, _ = warp.thread
    return 1 << (y * WARPS + x // WARP)


def store_piece(warp: Warp, pieces: Any, written: Place, acc: Any, lse: Any) -> Iterator[tuple]:
    """Write rows for the same warp of another CTA, and set the warp's bit."""
    yield ("go",)
    if warp.at(written) & _bit(warp):
        raise IndexError(f"a piece is written at {written} before the one before has been read")
    warp.atomic(written.tensor, (written.index,), _bit(warp), int.__or__)


def merge_piece(warp: Warp, pieces: Any, written: Place, acc: Any, lse: Any) -> Iterator[tuple]:
    """Wait for the bit, and clear it."""
    yield "until", lambda: bool(warp.at(written) & _bit(warp)), f"bit {_bit(warp)} of {written}"
    warp.atomic(written.tensor, (written.index,), ~_bit(warp), int.__and__)


def await_turn(warp: Warp, turn: Place, rank: int) -> Iterator[tuple]:
    yield "until", lambda: warp.at(turn) == rank, f"{turn} is {rank}"


def pass_turn(warp: Warp, turn: Place, rank: int) -> Iterator[tuple]:
    yield ("go",)
    warp.put_number(turn.tensor, (turn.index,), rank)


def count(warp: Warp, counter: Place, number: int) -> Iterator[tuple]:
    """Add to a counter. Where it counts sums of dq, their memory must have been theirs when the warp added to it."""
    yield ("go",)
    for block, time in warp.sums:
        for rounded, at in warp.machine.rounded.get(block, ()):
            if at > time and rounded != counter.index:
                warp.note(_added_early(block, counter.index, rounded))
        warp.machine.added.setdefault(block, set()).add(counter.index)
    warp.sums.clear()
    warp.atomic_add(counter.tensor, (counter.index,), number)


def await_rounded(warp: Warp, counter: Place, wanted: int) -> Iterator[tuple]:
    yield "until", lambda: warp.at(counter) >= wanted, f"{counter} is at least {wanted}"


def await_tiles(warp: Warp, rounded: Place, first: int, end: int, wanted: int) -> Iterator[tuple]:
    for i in range(max(first, 0), end):
        yield from await_rounded(warp, rounded + i, wanted)


def _added_early(block: int, adds: int, rounded: int) -> Fault:
    text = f"row block {block} of dq: counter {adds} counts additions to sums of counter {rounded}, which are not rounded"
    return Fault("overwrites", text, "sums")


def note_rounded(warp: Warp, row: int, counter: Place) -> None:
    """Note that the sums of ROUNDED_ROWS rows are rounded, which only one unit may have added to."""
    for block in range(row // 16, (row + ROUNDED_ROWS) // 16):
        warp.machine.rounded.setdefault(block, []).append((counter.index, warp.machine.events))
        others = warp.machine.added.pop(block, set()) - {counter.index}
        for other in others:
            warp.note(_added_early(block, other, counter.index))


def round_dq(
    warp: Warp,
    progress: Place,
    sums: Any,
    dq: tuple,
    batch: int,
    heads_per_unit: int,
    slots: int,
    sum_rows: int,
    tiles: int,
    parts: int,
    *others: Any,
) -> Iterator[tuple]:
    """The loop of round_dq.cuh."""
    rows, heads = dq[4:6]
    per_head = ceildiv(rows, ROUNDED_ROWS)
    number = warp.atomic_add(progress.tensor, (progress.index,), 1)
    while number < per_head * batch * heads:
        following = warp.atomic_add(progress.tensor, (progress.index,), 1)
        head, first = number // per_head, number % per_head * ROUNDED_ROWS
        unit = head // heads_per_unit
        yield from await_rounded(warp, progress + (1 + unit), tiles * parts * DQ_WARPS)
        note_rounded(warp, head % (slots * heads_per_unit) * sum_rows + first, progress + (1 + unit))
        yield from count(warp, progress + (1 + batch * heads // heads_per_unit + unit), 1)
        number = following


def round_packed_dq(
    warp: Warp,
    progress: Place,
    sums: Any,
    dq: tuple,
    table: Place,
    entries: int,
    key_heads: int,
    query_heads: int,
    parts: int,
    ring: int,
    *others: Any,
) -> Iterator[tuple]:
    """The loop of round_packed_dq.cuh."""
    number = warp.atomic_add(progress.tensor, (progress.index,), 1)
    per_tile = query_heads * BLOCKS_PER_TILE
    while True:
        n = number // per_tile
        if n >= entries * key_heads:
            return
        entry = [warp.load(table.tensor, (n // key_heads, i)) for i in range(8)]
        if entry[1] < 0:
            return
        following = warp.atomic_add(progress.tensor, (progress.index,), 1)
        tiles = max(max(entry[3], entry[5]) + TABLE_ROWS - 1, TABLE_ROWS) // TABLE_ROWS
        in_sequence = n - (n // key_heads - entry[1]) * key_heads
        block = in_sequence % tiles
        wanted = ceildiv(entry[5], TABLE_ROWS) * parts * DQ_WARPS
        yield from await_rounded(warp, progress + (1 + n - block), wanted)
        rounded = progress + (1 + entries * key_heads)
        if entry[5] == 0:
            yield from await_tiles(warp, rounded, n - ring, n - ring + 1, per_tile)
        row = (n % ring * per_tile + number - n * per_tile) * ROUNDED_ROWS
        note_rounded(warp, row, progress + (1 + n - block))
        yield from count(warp, rounded + n, 1)
        number = following


def items_per_head(rows: int, width: int) -> int:
    """Items of input_terms.py per head, those of both inputs."""
    return 2 * ceildiv(rows, ITEM_ELEMENTS // width)


def make_parts(
    warp: Warp, progress: Place, memory: Any, stop: int, batch: int, first: tuple, second: tuple, width: int
) -> Iterator[tuple]:
    """The loop of tl_attention_make_parts in input_terms.py."""
    rows, heads = first[4:6]
    per_head = items_per_head(rows, width)
    items = batch * heads * per_head
    stop = min(stop, items)
    item = warp.atomic_add(progress.tensor, (progress.index,), 1)
    while item < items:
        following = warp.atomic_add(progress.tensor, (progress.index,), 1) if item < stop else items
        yield from count(warp, progress + (1 + item // per_head), 1)
        item = following


def wait_for_parts(warp: Warp, progress: Place, head: int, first: tuple, width: int) -> Iterator[tuple]:
    yield from await_rounded(warp, progress + (1 + head), items_per_head(first[4], width))


# Name -> Python text of a call, from the texts of its arguments and its template arguments. A generator runs by `yield from`


def _plain(name: str) -> Callable[[list[str], list[int]], str]:
    return lambda args, _: f"externs.{name}(warp, {', '.join(args)})"


def _waits(name: str) -> Callable[[list[str], list[int]], str]:
    return lambda args, _: f"(yield from externs.{name}(warp, {', '.join(args)}))"


MODELS: dict[str, Callable[[list[str], list[int]], str]] = {
    "any_of_warpgroup": lambda args, _: f"(yield 'any', {args[0]}, 128, {args[1]})",
    "zero": lambda args, _: "0",
    "fragment_address": lambda args, _: args[0],
    "smem_ptr_to_uint": lambda args, _: args[0],
    "gradient_of": lambda args, _: f"({', '.join(args)},)",
    "input_of": lambda args, _: f"({', '.join(args)},)",
    "make_first_parts": lambda args, _: "UNKNOWN",
    "make_parts": lambda args, sizes: f"(yield from externs.make_parts(warp, {', '.join(args)}, {sizes[0]}))",
    "wait_for_parts": lambda args, sizes: f"(yield from externs.wait_for_parts(warp, {', '.join(args)}, {sizes[0]}))",
    **{name: _plain(name) for name in ("store_fragment", "split_tile", "softmax_backward", "add_by_tma")},
    **{
        name: _waits(name)
        for name in (
            "store_piece", "merge_piece", "await_turn", "pass_turn", "count", "await_rounded", "await_tiles", "round_dq",
            "round_packed_dq",
        )
    },
}  # fmt: skip
