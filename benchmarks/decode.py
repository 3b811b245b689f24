"""Decode: some new queries per sequence against its cache of keys and values, judged by the bytes that must be read.

Problems are shapes whose seqlen_k is the size of a cache, all of it in use unless the lengths are ragged; NAMED has the grid. A speed
is the bytes of K, V, q and out, each counted once, over the time of a launch in a CUDA graph.

All caches are views of one buffer of random values. A launch finds none of its cache in L2: problems of up to 1 GB rotate over as many
caches as exceed twice the L2, at least two. Pages lie in random order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import providers
import torch
import turns
from library import Inputs, Ready, Result, Unsupported
from rows import Row

from tl_attention.problem.attn_problem import DECODE
from tl_attention.testing import counts, shapes, timer
from tl_attention.testing.numeric import check_fwd
from tl_attention.testing.shapes import Shape

HEADS = {"h64": (64, 8), "h32": (32, 8), "h8": (8, 1)}
BATCHES = (1, 8, 32, 128)
LENGTHS = {"2k": 2048, "8k": 8192, "32k": 32768, "128k": 131072}
GROUPS = {  # name -> (queries per sequence, options)
    "q1": (1, ""),
    "q4": (4, ""),
    "q16": (16, ""),
    "page16": (1, ",page=16"),
    "page64": (1, ",page=64"),
    "ragged": (1, ",ragged"),
    "serving": (4, ",page=64,ragged"),
}
NAMED = {
    f"decode-{group}-{heads}-b{batch}-{length}": (
        f"{batch},{heads_q},{heads_kv},{queries},{keys},128,128,{'causal' if queries > 1 else 'full'}{options}"
    )
    for (group, (queries, options)), (heads, (heads_q, heads_kv)), batch, (length, keys) in itertools.product(
        GROUPS.items(), HEADS.items(), BATCHES, LENGTHS.items()
    )
    if batch > 1 or "ragged" not in options
}

MAX_CACHE_BYTES = 100e9
LARGE_BYTES = 20 * timer.L2_BYTES
MAX_CHECKED_KEYS = 2**18  # of all checked KV heads
MAX_CHECKED_HEADS = 16
SPREAD = 2  # standard deviation of scores: out is neither the mean of all values nor one of them
SAMPLE_MS, CAP_MS = 2.0, 100.0


def chosen_shapes(texts: Sequence[str]) -> dict[str, Shape]:
    """Name -> shape, by rising bytes, so that a problem that may fail for its size comes last. Raises ValueError."""
    parts = ("|".join(map(str, part)) for part in (GROUPS, HEADS, BATCHES, LENGTHS))
    where = "benchmarks/decode.py, which has decode-({})-({})-b({})-({})".format(*parts)
    chosen = shapes.chosen_shapes(texts, NAMED, where)
    for text, shape in chosen.items():
        if other := [
            word for word in shape.options.words if word.partition("=")[0] not in ("page", "ragged")
        ]:
            raise ValueError(f"shape {text!r}: expected no options but page=.. and ragged, got {other[0]}")
    return dict(sorted(chosen.items(), key=lambda item: counts.decode_bytes(item[1])))


class Caches:
    """One buffer for the caches of all problems, as large as the largest needs."""

    def __init__(self, shapes: Iterable[Shape], dtype: torch.dtype, device: torch.device | str = "cuda"):
        sizes = [_elements(shape) * _count(shape) for shape in shapes if _fault(shape) is None]
        self.generator = torch.Generator(device).manual_seed(0)
        self.values = torch.empty(2, max(sizes, default=0), dtype=dtype, device=device)
        self.values.normal_(generator=self.generator)

    def copies(self, shape: Shape, layout: str) -> list[Inputs]:
        """(q, k, v, seqlens, pages) for each of the copies that a problem rotates over.

        Args:
            layout: bshd or bhsd.
        Returns:
            q: [batch, seqlen_q, heads_q, head_dim]; k, v: [batch, seqlen_k, heads_kv, ..]; bhsd swaps seqlen and heads.
            seqlens: int32 [batch], keys per sequence.
            pages: None; or int32 [batch, pages per sequence], and k, v are [pages, page, heads_kv, ..].
        Raises:
            Unsupported: the cache is too large.
        """
        if fault := _fault(shape):
            raise Unsupported(fault)
        count, device = _count(shape), self.values.device
        sizes = (count, shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim)
        queries = torch.randn(sizes, generator=self.generator, dtype=self.values.dtype, device=device)
        queries *= SPREAD
        seqlens = torch.tensor([keys for _, keys in shapes.sequences(shape)], device=device).int()
        rows, columns = _rows(shape)
        sides = (shape.heads_kv, columns) if layout == "bhsd" else (columns, shape.heads_kv)
        made = []
        for i in range(count):
            k, v = (
                side.narrow(0, i * _elements(shape), rows * columns * shape.heads_kv * width).view(
                    rows, *sides, width
                )
                for side, width in zip(self.values, (shape.head_dim, shape.head_dim_v), strict=True)
            )
            q = queries[i].transpose(1, 2).contiguous() if layout == "bhsd" else queries[i]
            pages = None
            if shape.options.page:
                order = torch.randperm(rows, generator=self.generator, device=device)
                pages = order.view(shape.batch, -1).int()
            made.append((q, k, v, seqlens, pages))
        return made


def _rows(shape: Shape) -> tuple[int, int]:
    """(caches, seqlen_k) of all sequences, or with pages (pages, page)."""
    page = shape.options.page
    return (shape.batch * math.ceil(shape.seqlen_k / page), page) if page else (shape.batch, shape.seqlen_k)


def _elements(shape: Shape) -> int:
    """Number of elements of the keys or of the values of a problem, the larger one."""
    return math.prod(_rows(shape)) * shape.heads_kv * max(shape.head_dim, shape.head_dim_v)


def _count(shape: Shape) -> int:
    """Number of caches to rotate over: at least two, but one for the largest, of which L2 holds almost nothing."""
    nbytes = counts.decode_bytes(shape)
    return max(timer.rotation(nbytes), 2 if nbytes < LARGE_BYTES else 1)


def _fault(shape: Shape) -> str | None:
    """Reason why a problem is left out, or None."""
    nbytes = 4 * _elements(shape)
    return (
        f"its cache of {nbytes / 1e9:.0f} GB exceeds {MAX_CACHE_BYTES / 1e9:.0f}"
        if nbytes > MAX_CACHE_BYTES
        else None
    )


def measure(shape: Shape, caches: Caches, names: Sequence[str], rounds: int) -> list[Row]:
    """One row per provider: checked, timed interleaved with the others that are right, and checked once more."""
    layouts = {name: providers.PROVIDERS[name].decode_layout for name in names}
    rows = {name: turns.new_row(name, DECODE, layouts[name], shape) | {"us": None} for name in names}
    copies = functools.cache(functools.partial(caches.copies, shape))

    def enter(name: str) -> tuple[Ready, list[Inputs]]:
        inputs = copies(layouts[name])
        return providers.PROVIDERS[name].function(DECODE)(shape, *inputs[0], saves=False), inputs

    def check(name: str, result: Result, when: str) -> Row:
        return verify(shape, layouts[name], result, copies(layouts[name])[0], when)

    def speeds(name: str, timing: timer.Timing, eager: None) -> Row:
        return turns.speeds(shape, DECODE, timing, eager)

    with turns.reason_of_all(rows):
        turns.compete(
            rows,
            rounds,
            enter,
            check,
            speeds,
            same_bits=False,
            eager=False,
            sample_ms=SAMPLE_MS,
            cap_ms=CAP_MS,
        )
    return list(rows.values())


def verify(shape: Shape, layout: str, result: Result, inputs: Inputs, when: str = "") -> Row:
    """Judge a provider's result for inputs in its layout by the error rule.

    KV heads are checked with all their queries: as many as have MAX_CHECKED_KEYS, at least two and at most MAX_CHECKED_HEADS, spread
    over batch and heads with the first and the last included. The other heads must hold no NaN or inf.
    """
    out, lse = result
    q, k, v, _, pages = inputs
    if layout == "bhsd":
        q, k, v, out = (x.transpose(1, 2) for x in (q, k, v, out))
    lengths = [keys for _, keys in shapes.sequences(shape)]
    group = shape.heads_q // shape.heads_kv

    def queries_of(x: torch.Tensor, entry: int, head: int) -> torch.Tensor:
        return x[entry].narrow(-2, head * group, group)

    def keys_of(x: torch.Tensor, entry: int, head: int) -> torch.Tensor:
        if pages is None:
            return x[entry, : lengths[entry], head, None]
        used = pages[entry, : math.ceil(lengths[entry] / shape.options.page)]
        return x[used, :, head].flatten(0, 1)[: lengths[entry], None]

    every = shape.batch * shape.heads_kv
    most = min(MAX_CHECKED_HEADS, max(2, MAX_CHECKED_KEYS // shape.seqlen_k))
    by_length: dict[int, list[tuple[int, int]]] = {}
    for i in turns.spread(most, every):
        entry, head = divmod(i, shape.heads_kv)
        by_length.setdefault(lengths[entry], []).append((entry, head))
    checks = []
    for chosen in by_length.values():
        out_part, q_part, k_part, v_part = (
            torch.stack([part_of(x, *at) for at in chosen])
            for part_of, x in ((queries_of, out), (queries_of, q), (keys_of, k), (keys_of, v))
        )
        lse_part = None
        if lse is not None:
            lse_part = torch.stack([queries_of(lse, *at) for at in chosen])
        checks.append(check_fwd(out_part, lse_part, q_part, k_part, v_part, causal=shape.causal))
    return turns.found(checks, f"{when}in {min(most, every)} checked heads, ", [out])
