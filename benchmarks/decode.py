"""Decoding: some new queries of each sequence against its cache of keys and values, by the bytes that must be read.

Problems are shapes whose seqlen_k is the room of a cache, all of it in use unless the lengths are ragged; NAMED has the grid. A speed
is bytes of K, V, q and out, each once, over the time of a launch in a CUDA graph, and a share of the rate of a copy in the same run.

All caches are views of one buffer of random values. A launch finds none of its cache in L2: problems of up to 1 GB have as many caches,
which take turns, as exceed twice the L2, two at least. Pages lie in a random order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import providers
import torch
import turns
from providers import Inputs, Provider, Ready, Result, Unsupported, has_flash_attn, import_function
from report import OURS, Row

from tl_attention.problem import DECODE
from tl_attention.testing import counts, environment, shapes, timer
from tl_attention.testing.numeric import check_fwd
from tl_attention.testing.shapes import Shape

HEADS = {"h64": (64, 8), "h32": (32, 8), "h8": (8, 1)}
BATCHES = (1, 8, 32, 128)
LENGTHS = {"2k": 2048, "8k": 8192, "32k": 32768, "128k": 131072}
GROUPS = {  # queries of a sequence and options
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
MAX_CHECKED_KEYS = 2**18  # of all heads of keys that are checked
MAX_CHECKED_HEADS = 16
SPREAD = 2  # of scores, in standard deviations: out is neither the mean of all values nor one of them
SAMPLE_MS, CAP_MS = 2.0, 100.0
TENSOR_CORE_HEADS = 4  # of queries a head of keys, from which on FlashInfer's tensor cores are faster
WORKSPACE_BYTES = 512 << 20  # of FlashInfer's parts


def chosen_shapes(texts: Sequence[str]) -> dict[str, Shape]:
    """Name -> shape, the fewest bytes first, so that what may fail for its size comes last; raises ValueError."""
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
    """The buffer of all caches of some problems, large enough for the largest."""

    def __init__(self, shapes: Iterable[Shape], dtype: torch.dtype, device: torch.device | str = "cuda"):
        sizes = [_elements(shape) * _count(shape) for shape in shapes if _fault(shape) is None]
        self.generator = torch.Generator(device).manual_seed(0)
        self.values = torch.empty(2, max(sizes, default=0), dtype=dtype, device=device)
        self.values.normal_(generator=self.generator)

    def copies(self, shape: Shape, layout: str) -> list[Inputs]:
        """(q, k, v, seqlens, pages) of each of the problems that take turns.

        Args:
            layout: of providers.Provider.
        Returns:
            q: [batch, seqlen_q, heads_q, head_dim]; k, v: [batch, seqlen_k, heads_kv, ..]; with bhsd seqlen and heads change places.
            seqlens: int32 [batch], the keys of each sequence.
            pages: None; or int32 [batch, pages of a sequence], and k, v are [pages, page, heads_kv, ..].
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
    """(caches, seqlen_k), or with pages (pages, page), of all sequences."""
    page = shape.options.page
    return (shape.batch * math.ceil(shape.seqlen_k / page), page) if page else (shape.batch, shape.seqlen_k)


def _elements(shape: Shape) -> int:
    """Of the keys or the values of a problem, whichever are more."""
    return math.prod(_rows(shape)) * shape.heads_kv * max(shape.head_dim, shape.head_dim_v)


def _count(shape: Shape) -> int:
    """How many caches take turns: two at least, but of the largest, of which L2 holds nearly nothing."""
    nbytes = counts.decode_bytes(shape)
    return max(timer.rotation(nbytes), 2 if nbytes < LARGE_BYTES else 1)


def _fault(shape: Shape) -> str | None:
    """Why a problem is left out, if it is."""
    nbytes = 4 * _elements(shape)
    return (
        f"its cache of {nbytes / 1e9:.0f} GB exceeds {MAX_CACHE_BYTES / 1e9:.0f}"
        if nbytes > MAX_CACHE_BYTES
        else None
    )


def measure(shape: Shape, caches: Caches, names: Sequence[str], rounds: int) -> list[Row]:
    """One row a provider: checked, timed in turn with the others that are right, and checked again."""
    rows = {
        name: turns.new_row(name, PROVIDERS[name], shape) | {"us": None}
        for name in names
        if name in PROVIDERS
    }
    copies = functools.cache(functools.partial(caches.copies, shape))

    def enter(name: str) -> tuple[Ready, list[Inputs]]:
        inputs = copies(PROVIDERS[name].layout)
        return PROVIDERS[name].forward(shape, *inputs[0], saves=False), inputs

    def check(name: str, result: Result, when: str) -> Row:
        layout = PROVIDERS[name].layout
        return verify(shape, layout, result, copies(layout)[0], when)

    def speeds(name: str, timing: timer.Timing, eager: None) -> Row:
        return turns.speeds(shape, DECODE, timing, eager) | {"us": 1000 * timing.median_ms}

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
    """What the error rule says of a provider's result for inputs in its layout.

    Heads of keys are checked with all their queries: as many as have MAX_CHECKED_KEYS, two at least and MAX_CHECKED_HEADS at most,
    spread over batch and heads, the first and the last included. In the others nothing may be NaN or inf.
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
    verdicts = []
    for chosen in by_length.values():
        out_part, q_part, k_part, v_part = (
            torch.stack([part_of(x, *at) for at in chosen])
            for part_of, x in ((queries_of, out), (queries_of, q), (keys_of, k), (keys_of, v))
        )
        lse_part = None
        if lse is not None:
            lse_part = torch.stack([queries_of(lse, *at) for at in chosen])
        verdicts.append(check_fwd(out_part, lse_part, q_part, k_part, v_part, causal=shape.causal))
    return turns.found(verdicts, f"{when}in {min(most, every)} heads that were checked, ", [out])


def kvcache(module: str, table: str = "block_table", page_multiple: int = 1) -> Callable[..., Ready]:
    """The forward of a library that has FlashAttention's function of this name.

    Args:
        table: its name for the table of pages.
        page_multiple: a page has to be a multiple of it.
    """

    def forward(shape: Shape, *_: object, saves: bool) -> Ready:
        if shape.options.page % page_multiple:
            raise Unsupported(f"its pages are multiples of {page_multiple} keys")
        attend = import_function(module, "flash_attn_with_kvcache")

        def launch(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            seqlens: torch.Tensor,
            pages: torch.Tensor | None,
        ) -> Result:
            options = {"cache_seqlens": seqlens, "causal": shape.causal, "return_softmax_lse": True}
            return attend(q, k, v, **options, **({} if pages is None else {table: pages}))[:2]

        return Ready(launch, launch)

    return forward


def dense(name: str) -> Callable[..., Ready]:
    """The forward of one of providers.PROVIDERS, which takes keys and values that are all in use."""

    def forward(
        shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, saves: bool
    ) -> Ready:
        if shape.options:
            raise Unsupported("it takes neither pages nor lengths of its sequences here")
        launch = providers.PROVIDERS[name].forward(shape, q, k, v, saves=saves).launch
        return Ready(*[lambda q, k, v, *_: launch(q, k, v)] * 2)

    return forward


def fa2(shape: Shape, *inputs: torch.Tensor, saves: bool) -> Ready:
    way = kvcache("flash_attn", page_multiple=256) if has_flash_attn() else dense("fa2")
    return way(shape, *inputs, saves=saves)


def fa4(shape: Shape, *inputs: torch.Tensor, saves: bool) -> Ready:
    """On sm_90 it does not divide the keys of a sequence: more splits than one, which is its default, are an error there."""
    if max(shape.head_dim, shape.head_dim_v) > 256:
        raise Unsupported("its head dims on sm_90 are at most 256")
    if not shape.options:
        return dense("fa4")(shape, *inputs, saves=saves)
    if shape.options.page and (shape.head_dim % 16 or shape.head_dim_v % 16):
        raise Unsupported("with pages its head dims are multiples of 16")
    attend = import_function("flash_attn.cute", "flash_attn_varlen_func")

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqlens: torch.Tensor, pages: torch.Tensor | None
    ) -> Result:
        options = {"seqused_k": seqlens, "page_table": pages, "causal": shape.causal, "return_lse": True}
        return attend(q, k, v, **options)[:2]

    return Ready(launch, launch)


def flashinfer(shape: Shape, *_: torch.Tensor, saves: bool) -> Ready:
    """Its decode for caches in pages, planned for the lengths and the pages of each copy before it is timed."""
    if shape.seqlen_q > 1:
        raise Unsupported("its decode is compared with one query of each sequence")
    if not shape.options.page:
        raise Unsupported("its caches have pages")
    if shape.head_dim != shape.head_dim_v:
        raise Unsupported("one head_dim for q, k and v")
    make = import_function("flashinfer", "BatchDecodeWithPagedKVCacheWrapper")
    planned: dict[int, Any] = {}  # by the address of the table

    def plan(q: torch.Tensor, seqlens: torch.Tensor, pages: torch.Tensor) -> Any:
        page = shape.options.page
        used = (seqlens + page - 1) // page
        ends = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
        chosen = pages[torch.arange(pages.shape[1], device=pages.device) < used[:, None]]
        wrapper = make(
            _workspace(q.device), "NHD", use_tensor_cores=shape.heads_q >= TENSOR_CORE_HEADS * shape.heads_kv
        )
        sizes = shape.heads_q, shape.heads_kv, shape.head_dim, page
        last = seqlens - (used - 1) * page
        wrapper.plan(ends, chosen, last, *sizes, q_data_type=q.dtype, kv_data_type=q.dtype)
        return wrapper

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqlens: torch.Tensor, pages: torch.Tensor
    ) -> Result:
        wrapper = planned.get(pages.data_ptr())
        if wrapper is None:
            wrapper = planned[pages.data_ptr()] = plan(q, seqlens, pages)
        return wrapper.run(q[:, 0], (k, v))[:, None], None

    return Ready(launch, launch)


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Of all plans, as one runs after the other."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


FORWARDS = {
    OURS: kvcache("tl_attention"),
    "fa2": fa2,
    "cudnn": dense("cudnn"),
    "fa3": kvcache("flash_attn_interface", "page_table"),
    "fa4": fa4,
    "flashinfer": flashinfer,
}
LAYOUTS = {"cudnn": "bhsd"}
LIBRARIES = {  # others than those of providers.PROVIDERS
    "fa4": lambda: f"{providers.PROVIDERS['fa4'].library()} (on sm_90 it does not split keys)",
    "flashinfer": lambda: f"flashinfer-python {environment.version('flashinfer-python')}",
}
PROVIDERS = {
    name: Provider(
        forward,
        "decoding has none",
        LAYOUTS.get(name, "bshd"),
        LIBRARIES.get(name) or providers.PROVIDERS[name].library,
    )
    for name, forward in FORWARDS.items()
}
