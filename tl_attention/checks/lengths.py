"""Checks of values in lengths and index tensors: of CPU tensors always, on a GPU for debugging, by check_lengths=True or for every call
by TL_ATTENTION_CHECK_LENGTHS=1.

All other checks read metadata only. These check that cu_seqlens start at 0, never decrease and stay within the tensors, that seqused
fit their sequences, that max_seqlen is an upper bound, that lengths, pages, caches and positions exist, and that no sequence of a
cache has rows that another one writes. Unchecked, wrong values give wrong results, and wrong cu_seqlens and seqused may read and
write other memory.

A check on a GPU waits for it. It is a torch op, so that it also runs in compiled code. In CUDA graph capture, where no value can be
read, it warns and checks nothing. Each error is an IndexError that names the entry and its value.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tl_attention.checks.common import check_lengths, expect_tensor, is_dtensor
from tl_attention.checks.kvcache import cache_capacity
from tl_attention.problem.options import Cache, Options
from tl_attention.problem.switches import switch

ALWAYS = switch("TL_ATTENTION_CHECK_LENGTHS")

Lengths = tuple  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k


class Names(NamedTuple):
    """Names of a caller's arguments, for the side of queries or of keys."""

    cu_seqlens: str
    max_seqlen: str
    seqused: str
    tensor: str


NAMES = (
    Names("cu_seqlens_q", "max_seqlen_q", "seqused_q", "q"),
    Names("cu_seqlens_k", "max_seqlen_k", "seqused_k", "k"),
)


def checked_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: Lengths,
    names: tuple[Names, Names] = NAMES,
    block_table: torch.Tensor | None = None,
) -> Lengths:
    """Check the values of lengths; return them, with a cu_seqlens_q that depends on the check.

    Lengths whose metadata is wrong are returned unchecked: the checks that follow refuse them. Beside DTensors, the values of replicated
    ones are checked on each rank.

    Args:
        q, k: [total, heads, head_dim]; k with block_table: [pages, page_size, heads_kv, head_dim].
    """
    mine = tuple(map(_of_rank, lengths)) if is_dtensor(q) else lengths
    try:
        for name, x in (("q", q), ("k", k)):
            expect_tensor(name, x)
        check_lengths(q, *mine)
    except (TypeError, ValueError, NotImplementedError):
        return lengths
    if not q.ndim or not k.ndim:
        return lengths
    cu_q, cu_k, *longest, used_q, used_k = mine
    tensors = [x if isinstance(x, torch.Tensor) else None for x in longest]
    numbers = [0 if isinstance(x, torch.Tensor) else x for x in longest]
    words = [word for side in names for word in side]
    totals, page_size = (q.shape[0], k.shape[0]), 0 if block_table is None else k.shape[1]
    cu_q = check_lengths_op(
        cu_q, cu_k, used_q, used_k, *tensors, *numbers, *totals, words, block_table, page_size
    )
    return (cu_q, *lengths[1:])


def _of_rank(x: Any) -> Any:
    """This rank's tensor of a replicated DTensor; anything else as it is."""
    return x.to_local() if is_dtensor(x) and all(place.is_replicate() for place in x.placements) else x


def check_cpu_lengths(q: torch.Tensor, k: torch.Tensor, options: Options) -> None:
    """Check the lengths of packed sequences on the CPU, where reading them waits for nothing. q, k: [total, heads, head_dim]."""
    check_side(NAMES[0], options.cu_seqlens_q, options.seqused_q, options.max_seqlen_q, q.shape[0])
    check_side(NAMES[1], options.cu_seqlens_k, options.seqused_k, options.max_seqlen_k, k.shape[0])


def skips_check(x: torch.Tensor) -> bool:
    """True, with a warning, where values cannot be read."""
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return False
    warnings.warn(
        "check_lengths: values are not checked in CUDA graph capture, nor in replays; call once before capture",
        stacklevel=2,
    )
    return True


@torch.library.custom_op(
    "tl_attention::check_lengths",
    mutates_args=(),
    device_types=("cuda", "cpu"),
    schema="(Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? longest_q, Tensor? longest_k,"
    " SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt total_q, SymInt total_k, str[] names, Tensor? block_table, SymInt page_size)"
    " -> Tensor",
)
def check_lengths_op(
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    used_q: torch.Tensor | None,
    used_k: torch.Tensor | None,
    longest_q: torch.Tensor | None,
    longest_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    total_q: int,
    total_k: int,
    names: Sequence[str],
    block_table: torch.Tensor | None,
    page_size: int,
) -> torch.Tensor:
    """Check the values; return a copy of cu_seqlens_q, so that the check runs before what uses the copy.

    With block_table, total_k is the number of pages.
    """
    if not skips_check(cu_q):
        sides = Names(*names[:4]), Names(*names[4:])
        longest = (most if x is None else x.item() for most, x in ((max_q, longest_q), (max_k, longest_k)))
        check_side(sides[0], cu_q, used_q, next(longest), total_q)
        if block_table is None:
            check_side(sides[1], cu_k, used_k, next(longest), total_k)
        else:
            check_paged_keys(sides[1], cu_k, used_k, next(longest), block_table, page_size, total_k)
    return cu_q.clone()


@check_lengths_op.register_fake
def _(cu_q: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(cu_q)


def check_side(
    names: Names, cu_seqlens: torch.Tensor, seqused: torch.Tensor | None, longest: int, total: int
) -> None:
    """Check the lengths of queries or of keys; `total` is the number of rows."""
    first, *ends = cu_seqlens.tolist()
    if first != 0:
        raise IndexError(f"{names.cu_seqlens}[0]: expected 0, where sequence 0 begins, got {first}")
    used = [None] * len(ends) if seqused is None else seqused.tolist()
    begin = 0
    for i, (end, rows) in enumerate(zip(ends, used, strict=True)):
        if not begin <= end <= total:
            raise IndexError(
                f"{names.cu_seqlens}[{i + 1}]: expected {begin} to {total}, from the start of sequence {i} to the rows of {names.tensor},"
                f" got {end}"
            )
        length = end - begin
        if rows is not None and not 0 <= rows <= length:
            raise IndexError(
                f"{names.seqused}[{i}]: expected 0 to {length}, the length of sequence {i}, got {rows}"
            )
        used[i] = length if rows is None else rows
        begin = end
    _check_longest(names, used, longest)


def _check_longest(names: Names, lengths: list[int], longest: int) -> None:
    most = max(lengths, default=0)
    if longest < most:
        raise IndexError(
            f"{names.max_seqlen}: expected at least {most}, the length of sequence {lengths.index(most)}, got {longest}"
        )


def check_paged_keys(
    names: Names,
    cu_seqlens: torch.Tensor,
    seqused: torch.Tensor | None,
    longest: int,
    block_table: torch.Tensor,
    page_size: int,
    num_pages: int,
) -> list[int]:
    """Check the key lengths of sequences in pages, from seqused or else cu_seqlens, and the pages in use; return the lengths."""
    name, lengths = names.seqused, (cu_seqlens.diff() if seqused is None else seqused).tolist()
    if seqused is None:
        name, first = names.cu_seqlens, cu_seqlens[0].item()
        if first != 0:
            raise IndexError(f"{name}[0]: expected 0, where sequence 0 begins, got {first}")
    capacity = block_table.shape[1] * page_size
    for i, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            entry, begin = (
                (f"{name}[{i}]", 0) if seqused is not None else (f"{name}[{i + 1}]", cu_seqlens[i].item())
            )
            raise IndexError(
                f"{entry}: expected {begin} to {begin + capacity}, as sequence {i} has room for {capacity} keys, got {begin + length}"
            )
    _check_longest(names, lengths, longest)
    check_page_numbers(names.tensor, block_table, lengths, page_size, num_pages)
    return lengths


def check_page_numbers(
    name: str, block_table: torch.Tensor, lengths: Sequence[int], page_size: int, num_pages: int
) -> list[list[int]]:
    """Check the entries of a table of pages that sequences of these lengths use; return them per sequence."""
    table = block_table.tolist()
    pages = [some[: -(-length // page_size)] for some, length in zip(table, lengths, strict=True)]
    for b, i, page in _entries(pages):
        if not 0 <= page < num_pages:
            raise IndexError(
                f"block_table[{b}, {i}]: expected 0 to {num_pages - 1}, a page of {name}, got {page}"
            )
    return pages


def check_entries(q: torch.Tensor, cache: Cache) -> tuple[list[int] | None, list[int] | None, list[int]]:
    """Check the values of the index tensors of a cache.

    Returns:
        batch_idx, leftpad and seqlens as lists.
    """
    caches, rows = cache.k.shape[:2]
    capacity = cache_capacity(cache.k, cache.block_table)
    batch_idx, leftpad = (None if x is None else x.tolist() for x in (cache.batch_idx, cache.leftpad))
    in_tensor = isinstance(cache.seqlens, torch.Tensor)
    seqlens = cache.seqlens.tolist() if in_tensor else [cache.seqlens] * q.shape[0]
    room = f"as a sequence has room for {capacity} keys"
    for name, values, most, why in (
        ("cache_seqlens", seqlens, capacity - cache.new, f"{room} and {cache.new} are new"),
        ("cache_batch_idx", batch_idx or [], caches - 1, f"as there are {caches} caches"),
        ("cache_leftpad", leftpad or [], capacity, room),
    ):
        for b, value in enumerate(values):
            if not 0 <= value <= most:
                raise IndexError(f"{name}[{b}]: expected 0 to {most}, {why}, got {value}")
    pages = None
    if cache.block_table is not None:
        lengths = [end + cache.new for end in seqlens]
        pages = check_page_numbers("k_cache", cache.block_table, lengths, rows, caches)
    if cache.new and (batch_idx is not None or pages is not None):
        _check_rows_are_own(cache, batch_idx, leftpad, seqlens, pages)
    return batch_idx, leftpad, seqlens


def _entries(pages: list[list[int]]) -> list[tuple[int, int, int]]:
    """(sequence, number of the page in it, page) of each entry."""
    return [(b, i, page) for b, some in enumerate(pages) for i, page in enumerate(some)]


def _check_rows_are_own(
    cache: Cache,
    batch_idx: list[int] | None,
    leftpad: list[int] | None,
    seqlens: list[int],
    pages: list[list[int]] | None,
) -> None:
    """Check that no sequence has a row of the cache that another entry of the tables writes."""
    rows = cache.k.shape[1]
    by_memory = {}  # cache or page -> (name of the entry, rows of its sequence there, rows that it writes there)
    entries = [(b, 0, number) for b, number in enumerate(batch_idx)] if pages is None else _entries(pages)
    for b, i, number in entries:
        name = f"cache_batch_idx[{b}]" if pages is None else f"block_table[{b}, {i}]"
        first, end = i * rows, seqlens[b]
        stop = min(end + cache.new - first, rows)
        begin = max(leftpad[b] - first, 0) if leftpad else 0
        written = range(max(end - first, 0), stop)
        for other, its_rows, its_written in by_memory.setdefault(number, []):
            if _overlap(written, its_rows) or _overlap(range(begin, stop), its_written):
                kind = "cache" if pages is None else "page"
                raise IndexError(
                    f"{name}: expected a {kind} of its own, as new keys are written, got {number}, which {other} has too"
                )
        by_memory[number].append((name, range(begin, stop), written))


def _overlap(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


def check_positions(seqlens: Sequence[int], span: int, rows: int) -> None:
    """Check that a rotary table with `rows` rows has all positions; sequence b has seqlens[b] to seqlens[b] + span - 1."""
    for b, begin in enumerate(seqlens):
        if begin + span > rows:
            raise IndexError(
                f"rotary_cos: expected at least {begin + span} rows, as sequence {b} has position {begin + span - 1}, got {rows}; a row"
                " at such a position is not rotated"
            )
