"""flash_attn_with_kvcache: results by the error rule, on CPU and GPU, and errors.

Unused cache entries hold NaN, unused table entries are out of range. Memory that a call must not write is compared bitwise.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tl_attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    kvcache_workspace_bytes,
    launch,
)
from tl_attention.api import kvcache
from tl_attention.compilation import building
from tl_attention.problem.options import BATCH_INVARIANT
from tl_attention.reference import attention_reference
from tl_attention.reference.kvcache import rotary_reference
from tl_attention.testing.numeric import check_fwd, mean_error

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16, FP16 = torch.bfloat16, torch.float16
ALL = "softcap alibi sink"
# One entry per compiled kernel: (head_dim, head_dim_v, dtype, options, page sizes; None: no pages)
CLASSES = [
    (128, 128, BF16, "", [None]),
    (128, 128, BF16, "", [16, 48]),
    (128, 128, BF16, "", [64, 256]),
    (128, 128, FP16, "", [64, 256]),
    (128, 128, BF16, "softcap", [None]),
    (128, 128, BF16, "alibi", [64, 256]),
    (128, 128, BF16, "sink", [16, 48]),
    (128, 128, BF16, ALL, [None]),
    (64, 64, BF16, "", [None]),
    (64, 64, BF16, "", [16, 48]),
    (64, 64, FP16, ALL, [64, 256]),
    (96, 96, BF16, "", [16, 48]),
    (192, 128, BF16, "", [64, 256]),
    (256, 256, BF16, "", [None]),
    (256, 256, BF16, ALL, [64, 256]),
    (576, 512, BF16, "", [None]),
    (576, 512, BF16, "", [64, 256]),
]
QUERIES = [1, 4, 16, 40, 70]
MASKS = [(False, (-1, -1)), (True, (-1, -1)), (True, (100, -1)), (False, (60, 20)), (False, (-1, 3))]
LENGTHS = (700, 0, 1, 64, 333)


@dataclasses.dataclass
class Case:
    """A call with random normal values where a sequence has data, and NaN elsewhere."""

    head_dim: int = 128
    head_dim_v: int = 128
    dtype: torch.dtype = BF16
    options: str = ""
    page: int | None = None
    seqlen_q: int = 1
    heads: int = 8
    heads_kv: int = 2
    lengths: tuple[int, ...] = LENGTHS  # in the cache before the call, including left padding
    new: int = 0
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    leftpad: tuple[int, ...] | None = None
    by_idx: bool = False
    rotary: tuple[int, bool] | None = None  # rotary_dim, interleaved
    scale: float | None = None
    room: int = 0  # free rows in the cache of the longest sequence
    heads_first: bool = False  # memory layout of the cache
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self):
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self.batch = len(self.lengths)
        self.ends = [n + self.new for n in self.lengths]
        self.starts = list(self.leftpad or [0] * self.batch)
        self.q = self.randn(self.batch, self.seqlen_q, self.heads, self.head_dim)
        keywords = {"causal": self.causal, "window_size": self.window, "softmax_scale": self.scale}
        self.options_of_reference = {"window": self.window}
        longest = max(self.ends, default=0) + self.room
        shuffled = torch.randperm(10_000, generator=torch.Generator().manual_seed(self.seed)).tolist()
        if self.page is None:
            caches, rows = self.batch + 2 * self.by_idx, max(longest, 1)
            numbers = (
                [n for n in shuffled if n < caches][: self.batch] if self.by_idx else list(range(self.batch))
            )
            self.rows_of = [
                [(number, j) for j in range(end)] for number, end in zip(numbers, self.ends, strict=True)
            ]
            if self.by_idx:
                keywords["cache_batch_idx"] = self.ints(numbers)
        else:
            rows, wide = self.page, max(-(-longest // self.page), 1)
            used = [-(-end // self.page) for end in self.ends]
            caches = sum(used) + 3
            free = iter([n for n in shuffled if n < caches])
            # Unused entries are invalid page numbers
            table = [[next(free) if i < n else (-7, 2**30)[i % 2] for i in range(wide)] for n in used]
            self.rows_of = [
                [(pages[j // rows], j % rows) for j in range(end)]
                for pages, end in zip(table, self.ends, strict=True)
            ]
            keywords["block_table"] = self.ints(table)
        self.k_cache, self.v_cache = (
            self.nan_cache(caches, rows, self.heads_kv, width) for width in (self.head_dim, self.head_dim_v)
        )
        self.latent = (self.head_dim, self.head_dim_v) == (576, 512)
        if self.latent:
            self.v_cache = self.k_cache[..., :512]
        for b, start in enumerate(self.starts):
            for x in (self.k_cache, self.v_cache)[: 1 if self.latent else 2]:
                where = self.where(b, start, self.lengths[b])
                x[where] = self.randn(len(where[0]), *x.shape[2:])
        if self.new:
            keywords["k"] = self.randn(self.batch, self.new, self.heads_kv, self.head_dim)
            keywords["v"] = (
                None if self.latent else self.randn(self.batch, self.new, self.heads_kv, self.head_dim_v)
            )
        if self.rotary:
            angles = torch.rand(
                longest + rows + self.seqlen_q,
                self.rotary[0] // 2,
                generator=self.generator,
                device=self.device,
            )
            keywords |= {
                "rotary_cos": (6 * angles).cos().to(self.dtype),
                "rotary_sin": (6 * angles).sin().to(self.dtype),
            }
            keywords["rotary_interleaved"] = self.rotary[1]
        if self.leftpad:
            keywords["cache_leftpad"] = self.ints(self.leftpad)
        if "softcap" in self.options:
            keywords["softcap"] = self.options_of_reference["softcap"] = 3.0
        if "alibi" in self.options:
            slopes = 0.3 * torch.rand(self.batch, self.heads, device=self.device, generator=self.generator)
            keywords["alibi_slopes"] = self.options_of_reference["alibi_slopes"] = slopes
        if "sink" in self.options:
            sink = torch.randn(self.heads, device=self.device, generator=self.generator)
            keywords["learnable_sink"] = self.options_of_reference["sink"] = sink
        self.keywords = keywords | {"cache_seqlens": self.ints(self.lengths)}

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator).to(self.dtype)

    def ints(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def nan_cache(self, caches: int, rows: int, heads: int, width: int) -> torch.Tensor:
        sizes = (caches, heads, rows, width) if self.heads_first else (caches, rows, heads, width)
        x = torch.full(sizes, math.nan, dtype=self.dtype, device=self.device)
        return x.transpose(1, 2) if self.heads_first else x

    def where(self, b: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices into the first two dimensions of a cache, for keys start to end - 1 of sequence b."""
        rows = torch.tensor(self.rows_of[b][start:end], device=self.device).long().view(-1, 2)
        return rows[:, 0], rows[:, 1]

    def run(self, **changes) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_attn_with_kvcache(
            self.q, self.k_cache, self.v_cache, **self.keywords | changes, return_softmax_lse=True
        )

    def check(self, **changes) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the call; check the output by the error rule and the cache bitwise."""
        before = self.k_cache.clone(), self.v_cache.clone()
        out, lse = self.run(**changes)
        self.check_cache(before)
        self.check_output(out, lse)
        return out, lse

    def check_cache(self, before: tuple[torch.Tensor, torch.Tensor]) -> None:
        k, v = self.keywords.get("k"), self.keywords.get("v")
        angles = [self.keywords.get(name) for name in ("rotary_cos", "rotary_sin")]
        for name, x, old, written in (("k", self.k_cache, before[0], k), ("v", self.v_cache, before[1], v)):
            written = k[..., :512] if self.latent and k is not None and name == "v" else written
            if written is not None and name == "k" and self.rotary:
                positions = self.keywords["cache_seqlens"].long()[:, None] + torch.arange(
                    self.new, device=self.device
                )
                written = rotary_reference(written, positions, *angles, self.rotary[1])
            for b in range(self.batch if self.new else 0):
                where = self.where(b, self.lengths[b], self.ends[b])
                old[where] = written[b]
            assert torch.equal(x.view(torch.int16), old.view(torch.int16)), (
                f"{name}_cache: a new row is wrong, or another row changed"
            )

    def check_output(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        assert (
            out.shape == (self.batch, self.seqlen_q, self.heads, self.head_dim_v) and out.dtype == self.dtype
        )
        assert lse.shape == (self.batch, self.heads, self.seqlen_q) and lse.dtype == torch.float32
        q = self.q
        if self.rotary:
            positions = self.ints(self.lengths).long()[:, None].expand(-1, self.seqlen_q)
            if self.causal or self.window != (-1, -1):
                positions = positions + torch.arange(self.seqlen_q, device=self.device)
            q = rotary_reference(
                q, positions, self.keywords["rotary_cos"], self.keywords["rotary_sin"], self.rotary[1]
            )
        parts = [
            [
                x[self.where(b, start, end)]
                for b, (start, end) in enumerate(zip(self.starts, self.ends, strict=True))
            ]
            for x in (self.k_cache, self.v_cache)
        ]
        cu_seqlens = (
            self.ints([0, *itertools.accumulate(lengths)])
            for lengths in ([self.seqlen_q] * self.batch, [len(x) for x in parts[0]])
        )
        result = check_fwd(
            out.flatten(0, 1),
            lse.transpose(0, 1).flatten(1),
            q.flatten(0, 1),
            *(torch.cat(x) for x in parts),
            self.scale,
            self.causal,
            **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True)),
            **self.options_of_reference,
        )
        assert result.ok, result.text


def case_of_class(case_class: tuple, **changes) -> Case:
    """A case for one entry of CLASSES; latent attention has one kv head."""
    head_dim, head_dim_v, dtype, options, pages = case_class
    if head_dim == 576:
        changes |= {"heads_kv": 1, "rotary": None}
    return Case(head_dim, head_dim_v, dtype, options, **{"page": pages[0]} | changes)


SMALL = {
    "plain": {},
    "not-causal": {"causal": False, "seqlen_q": 3},
    "pages": {"page": 16, "seqlen_q": 4},
    "pages-append": {"page": 48, "seqlen_q": 4, "new": 3},
    "append-one": {"new": 1},
    "append-more-than-queries": {"new": 20, "seqlen_q": 3},
    "no-queries": {"seqlen_q": 0, "new": 2},
    "rows-without-keys": {"seqlen_q": 20, "lengths": (30, 3, 0)},
    "idx": {"by_idx": True, "new": 2, "seqlen_q": 2},
    "leftpad": {"leftpad": (5, 0, 1, 64, 300), "seqlen_q": 2},
    "leftpad-append": {"leftpad": (5, 0, 1, 64, 300), "new": 2, "seqlen_q": 2, "by_idx": True},
    "rotary": {"rotary": (32, True), "new": 4, "seqlen_q": 4},
    "rotary-halves": {"rotary": (128, False), "new": 4, "seqlen_q": 4, "page": 16},
    "rotary-all-at-one-position": {"rotary": (32, False), "new": 4, "seqlen_q": 4, "causal": False},
    "rotary-window": {"rotary": (64, True), "new": 2, "seqlen_q": 2, "window": (10, 5), "causal": False},
    "window": {"window": (50, 0), "seqlen_q": 5},
    "window-not-causal": {"window": (50, 3), "seqlen_q": 5, "causal": False},
    "options": {"options": ALL, "window": (100, -1), "seqlen_q": 3, "page": 16},
    "latents": {"head_dim": 576, "head_dim_v": 512, "heads_kv": 1, "new": 2, "seqlen_q": 2, "page": 64},
    "narrow-values": {"head_dim": 192, "head_dim_v": 128},
    "odd-width": {"head_dim": 72, "head_dim_v": 40, "dtype": FP16, "new": 1},
    "heads-first": {"heads_first": True, "new": 3},
    "batch-0": {"lengths": (), "causal": False},
    "scale": {"scale": -0.3},
}  # fmt: skip


@pytest.mark.parametrize("changes", SMALL.values(), ids=SMALL)
def test_cpu_calls_match_reference(changes):
    case = Case(**{"room": 30} | changes)
    if case.batch:
        case.check(check_block_table=True)
    else:
        out, lse = case.run()
        assert out.shape == (0, 1, 8, 128) and lse.shape == (0, 8, 1)


def test_cache_seqlens_may_be_an_int_or_none():
    case = Case(lengths=(200, 200, 200), seqlen_q=2)
    expected = case.check()
    for changes in ({"cache_seqlens": 200}, {"cache_seqlens": None}):
        assert all(map(torch.equal, case.run(**changes), expected))
    whole = flash_attn_func(case.q, case.k_cache, case.v_cache, causal=True, return_attn_probs=True)
    assert all(map(torch.equal, whole[:2], expected))
    assert torch.equal(flash_attn_with_kvcache(case.q, case.k_cache, case.v_cache, causal=True), expected[0])


def test_pages_may_be_shared():
    case = Case(lengths=(50, 70), page=16, seqlen_q=2)
    table = case.keywords["block_table"]
    table[1, :3] = table[0, :3]
    case.rows_of[1][:48] = case.rows_of[0][:48]
    case.check()


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_reference_is_a_complex_product(interleaved):
    x, angles = torch.randn(2, 3, 4, 16), torch.rand(9, 6)
    positions = torch.tensor([[1, 2, 3], [8, 0, 4]])
    pairs = x[..., :12].unflatten(-1, (6, 2) if interleaved else (2, 6))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    turned = (
        torch.view_as_complex(pairs.contiguous())
        * torch.polar(torch.ones(9, 6), angles)[positions][:, :, None]
    )
    turned = torch.view_as_real(turned)
    expected = torch.cat(((turned if interleaved else turned.transpose(-1, -2)).flatten(-2), x[..., 12:]), -1)
    torch.testing.assert_close(
        rotary_reference(x, positions, angles.cos(), angles.sin(), interleaved), expected
    )


@pytest.mark.parametrize("inner", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outer", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_on_the_cpu_does_not_depend_on_autocast(interleaved, outer, inner):
    q, k_cache, v_cache, k = (torch.randn(1, rows, 2, 16, dtype=inner) for rows in (2, 8, 8, 2))
    cos, sin = torch.rand(2, 8, 8, dtype=inner)
    options = {"cache_seqlens": 3, "causal": True, "rotary_interleaved": interleaved}
    given = [(q, k_cache.clone(), v_cache.clone(), k, k, cos, sin) for _ in range(2)]
    wanted = flash_attn_with_kvcache(*given[0], **options)
    with torch.autocast("cpu", outer):
        assert torch.equal(flash_attn_with_kvcache(*given[1], **options), wanted)
    assert torch.equal(given[0][1], given[1][1])


def test_signature_is_that_of_flash_attention_2_plus_keywords():
    parameters = inspect.signature(flash_attn_with_kvcache).parameters.values()
    given = {
        x.name: x.default
        for x in parameters
        if x.kind == x.POSITIONAL_OR_KEYWORD and x.default is not x.empty
    }
    none = "k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale"
    others = {
        "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None,
        "num_splits": 0, "return_softmax_lse": False,
    }  # fmt: skip
    assert list(given.items()) == list((dict.fromkeys(none.split()) | others).items())
    ours = {x.name: x.default for x in parameters if x.kind == x.KEYWORD_ONLY}
    assert ours == {
        "learnable_sink": None,
        "tree_mask": None,
        "batch_invariant": False,
        "workspace": None,
        "check_lengths": False,
        "check_block_table": False,
    }


def small(page=None, **changes):
    case = Case(
        lengths=(20, 3), page=page, seqlen_q=2, heads=4, head_dim=64, head_dim_v=64, room=12, **changes
    )
    return {"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache} | case.keywords


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


def ints(*shape):
    return zeros(*shape, dtype=torch.int32)


NEW = {"k": zeros(2, 3, 2, 64), "v": zeros(2, 3, 2, 64)}
ROTARY = {"rotary_cos": zeros(32, 16), "rotary_sin": zeros(32, 16)}
LATENTS = zeros(2, 32, 1, 576)
LATENT = {"q": zeros(2, 2, 4, 576), "k_cache": LATENTS, "v_cache": LATENTS[..., :512]}
PAGED = {"k_cache": zeros(9, 16, 2, 64), "v_cache": zeros(9, 16, 2, 64), "block_table": ints(2, 2)}
ERRORS = {
    "q-is-no-tensor": ({"q": [1.0]}, TypeError, r"q: expected a torch\.Tensor, got list"),
    "q-fp32": ({"q": zeros(2, 2, 4, 64).float()}, TypeError, r"q: expected bfloat16 or float16, got torch\.float32; cast it"),
    "cache-dtype": ({"k_cache": zeros(2, 32, 2, 64).half()}, TypeError, r"k_cache: expected the dtype of q, torch\.bfloat16, got"),
    "q-dimensions": ({"q": zeros(2, 4, 64)}, ValueError, r"q: expected 4 dim.*; pass q\[:, None\] if it has one query per sequence"),
    "cache-dimensions": ({"k_cache": zeros(32, 2, 64)}, ValueError, r"k_cache: expected 4 dim.*; pass k_cache\[None\] if"),
    "k-dimensions": (NEW | {"k": zeros(2, 2, 64)}, ValueError, r"k: expected 4 dimensions.*; pass k\[:, None\] if it has one key per"),
    "heads-first": (
        {"q": zeros(2, 4, 1, 64), "k_cache": zeros(2, 2, 32, 64), "v_cache": zeros(2, 2, 32, 64)},
        ValueError,
        r"k_cache, v_cache: expected a number of heads that divides the 1 of q, got 32.*: call transpose\(1, 2\)",
    ),
    "page-dimensions": (PAGED | {"v_cache": zeros(9, 2, 64)}, ValueError, r"v_cache: expected 4 dimensions \[pages, page_size, heads_kv"),
    "cache-device": ({"v_cache": zeros(2, 32, 2, 64).to("meta")}, ValueError, r"v_cache: expected the device of q, cpu, got meta"),
    "cache-last-strided": ({"k_cache": zeros(2, 32, 2, 128)[..., ::2]}, ValueError, r"k_cache: expected a contiguous last dimension"),
    "cache-strides": ({"k_cache": zeros(2, 32, 2, 68)[..., :64]}, ValueError, r"k_cache: expected strides that are positive"),
    "cache-expanded": ({"v_cache": zeros(2, 32, 1, 64).expand(-1, -1, 2, -1)}, ValueError, r"v_cache: expected strides that are positive"),
    "cache-row-strides": ({"k_cache": zeros(2, 33 * 128 - 8)[:, : 32 * 128].view(2, 32, 2, 64)}, ValueError, r"stride\(0\) to be a m"),
    "cache-address": ({"k_cache": zeros(2 * 32 * 128 + 4)[4:].view(2, 32, 2, 64)}, ValueError, r"k_cache: expected an address.*% 16 = 8"),
    "cache-shapes": ({"v_cache": zeros(2, 31, 2, 64)}, ValueError, r"v_cache: expected the shape of k_cache, \(2, 32, 2, 64\), but for"),
    "cache-head-dim": ({"k_cache": zeros(2, 32, 2, 72)}, ValueError, r"k_cache: expected the head_dim of q, 64, got 72"),
    "heads": ({"q": zeros(2, 2, 3, 64)}, ValueError, r"k_cache, v_cache: expected a number of heads that divides the 3 of q, got 2"),
    "head-dim-odd": ({"v_cache": zeros(2, 32, 2, 64)[..., :60]}, ValueError, r"head dims that are multiples of 8, got 64.*60 for v_cache"),
    "head-dim-v": ({"v_cache": zeros(2, 32, 2, 128)}, NotImplementedError, r"v_cache: expected a head_dim .*64, got 128.*; allocate"),
    "head-dim-320": ({x: zeros(2, 32, 2, 320) for x in ("q", "k_cache", "v_cache")}, NotImplementedError, r"got 320 and 320.*; call"),
    "head-dim-300": ({x: zeros(2, 32, 2, 300) for x in ("q", "k_cache", "v_cache")}, NotImplementedError, r"of at most 256.*; call"),
    "latent-of-its-own": (LATENT | {"v_cache": zeros(2, 32, 1, 512)}, NotImplementedError, r"v_cache: expected k_cache\[\.\.\., :512\]"),
    "latent-elsewhere": (LATENT | {"v_cache": LATENTS[..., 64:]}, NotImplementedError, r"v_cache: expected k_cache\[\.\.\., :512\]"),
    "latent-v": (LATENT | {"k": zeros(2, 1, 1, 576), "v": zeros(2, 1, 1, 512)}, ValueError, r"v: expected None, as v_cache is part of"),
    "latent-rotary": (LATENT | ROTARY | {"k": zeros(2, 1, 1, 576)}, NotImplementedError, r"rotary_cos, rotary_sin: expected None where"),
    "few-caches": ({x: zeros(1, 32, 2, 64) for x in ("k_cache", "v_cache")}, ValueError, r"a cache for each of the 2.*got 1; pass"),
    "seqlens-long": ({"cache_seqlens": ints(2).long()}, TypeError, r"cache_seqlens: expected torch\.int32, got torch\.int64; cast it"),
    "seqlens-shape": ({"cache_seqlens": ints(3)}, ValueError, r"cache_seqlens: expected shape \(2,\), got \(3,\)"),
    "seqlens-strided": ({"cache_seqlens": ints(4)[::2]}, ValueError, r"cache_seqlens: expected a contiguous tensor, got strides \(2,\)"),
    "seqlens-float": ({"cache_seqlens": 3.0}, TypeError, r"cache_seqlens: expected an int, an int32 tensor \[batch\] or None, got 3\.0"),
    "seqlens-bool": ({"cache_seqlens": True}, TypeError, r"cache_seqlens: expected an int, an int32 tensor \[batch\] or None, got True"),
    "seqlens-much": ({"cache_seqlens": 33}, ValueError, r"cache_seqlens: expected 0 to 32, as .* room for 32 keys and 0 are new"),
    "seqlens-and-new": (NEW | {"cache_seqlens": 30}, ValueError, r"cache_seqlens: expected 0 to 29.*3 are new, got 30"),
    "seqlens-negative": ({"cache_seqlens": -1}, ValueError, r"cache_seqlens: expected 0 to 32"),
    "idx-dtype": ({"cache_batch_idx": ints(2).long()}, TypeError, r"cache_batch_idx: expected torch\.int32"),
    "idx-and-pages": (PAGED | {"cache_batch_idx": ints(2)}, NotImplementedError, r"cache_batch_idx: expected None with block_table"),
    "leftpad-and-pages": (PAGED | {"cache_leftpad": ints(2)}, NotImplementedError, r"cache_leftpad: expected None with block_table"),
    "leftpad-shape": ({"cache_leftpad": ints(2, 1)}, ValueError, r"cache_leftpad: expected shape \(2,\), got \(2, 1\)"),
    "page-size": (PAGED | {x: zeros(9, 24, 2, 64) for x in ("k_cache", "v_cache")}, ValueError, r"page_size that is a multiple of 16"),
    "table-list": (PAGED | {"block_table": [[0]]}, TypeError, r"block_table: expected a torch\.Tensor, got list"),
    "table-batch": (PAGED | {"block_table": ints(3, 2)}, ValueError, r"block_table: expected shape \(2, 2\), got \(3, 2\)"),
    "table-dtype": (PAGED | {"block_table": ints(2, 2).long()}, TypeError, r"block_table: expected torch\.int32"),
    "table-strided": (PAGED | {"block_table": ints(2, 4)[:, ::2]}, ValueError, r"block_table: expected a contiguous last dimension"),
    "k-alone": ({"k": NEW["k"]}, ValueError, r"k, v: expected both or neither, got \(2, 3, 2, 64\).*and None"),
    "new-without-lengths": (NEW | {"cache_seqlens": None}, ValueError, r"cache_seqlens: expected a tensor or an int with new k and v"),
    "k-shape": (NEW | {"k": zeros(2, 3, 4, 64)}, ValueError, r"k: expected shape \(2, 3, 2, 64\), got \(2, 3, 4, 64\)"),
    "v-rows": (NEW | {"v": zeros(2, 4, 2, 64)}, ValueError, r"v: expected shape \(2, 3, 2, 64\), got \(2, 4, 2, 64\)"),
    "v-dtype": (NEW | {"v": zeros(2, 3, 2, 64).half()}, TypeError, r"v: expected torch\.bfloat16, got torch\.float16"),
    "k-is-no-tensor": (NEW | {"k": 3}, TypeError, r"k: expected a torch\.Tensor \[batch, new, heads_kv, head_dim\] or None, got 3"),
    "cos-alone": (NEW | {"rotary_cos": zeros(32, 16)}, ValueError, r"rotary_cos, rotary_sin: expected both or neither"),
    "rotary-without-new": (ROTARY, ValueError, r"rotary_cos, rotary_sin: expected None without new k.*rotate q before"),
    "cos-few": (NEW | ROTARY | {"rotary_cos": zeros(31, 16)}, ValueError, r"rotary_cos: expected .*at least 32 positions.*got \(31, 16\)"),
    "cos-wide": (NEW | {x: zeros(32, 40) for x in ROTARY}, ValueError, r"rotary_cos: expected .*rotary_dim of at most 64, got \(32, 40\)"),
    "cos-dtype": (NEW | {x: zeros(32, 16).float() for x in ROTARY}, TypeError, r"rotary_cos: expected torch\.bfloat16, got torch\.float32"),
    "sin-shape": (NEW | ROTARY | {"rotary_sin": zeros(32, 8)}, ValueError, r"rotary_sin: expected shape \(32, 16\), got \(32, 8\)"),
    "sin-strided": (NEW | ROTARY | {"rotary_sin": zeros(32, 32)[:, ::2]}, ValueError, r"rotary_sin: expected a contiguous tensor"),
    "scale": ({"softmax_scale": math.nan}, ValueError, r"softmax_scale: expected a finite number, or None"),
    "causal": ({"causal": 1}, TypeError, r"causal: expected a bool, got 1"),
    "interleaved": ({"rotary_interleaved": 1}, TypeError, r"rotary_interleaved: expected a bool, got 1"),
    "invariant": ({"batch_invariant": 0}, TypeError, r"batch_invariant: expected a bool, got 0"),
    "splits": ({"num_splits": -1}, ValueError, r"num_splits: expected at least 0, with 0 for an automatic choice, got -1"),
    "splits-bool": ({"num_splits": False}, TypeError, r"num_splits: expected an int, with 0 for an automatic choice, got False"),
    "splits-and-invariant": ({"num_splits": 2, "batch_invariant": True}, ValueError, r"num_splits, batch_invariant: .*got 2 and"),
    "scale-inf-in-fp32": ({"softmax_scale": 1e39}, ValueError, r"softmax_scale: expected at most 2 \*\* 60.*got 1e\+39"),
    "scale-int-of-401-digits": ({"softmax_scale": 10**400}, ValueError, r"softmax_scale: expected at most 2 \*\* 60.*an int of 1329 bits"),
    "scale-0-d": ({"softmax_scale": torch.tensor(1.0)}, ValueError, r"softmax_scale: .*got \(\) torch\.float32 .*multiply it into q"),
    "window": ({"window_size": 128}, TypeError, r"window_size: expected a pair \(left, right\), got 128"),
    "window-tensor": ({"window_size": torch.tensor([3, 0])}, TypeError, r"window_size: .*got \(2,\) torch\.int64.*\.tolist\(\)"),
    "softcap": ({"softcap": -1.0}, ValueError, r"softcap: expected 0 for no cap"),
    "slopes": ({"alibi_slopes": zeros(2, dtype=torch.float32)}, ValueError, r"alibi_slopes: expected shape \(4,\) or \(2, 4\)"),
    "sink": ({"learnable_sink": zeros(4).int()}, TypeError, r"learnable_sink: expected torch\.float32 or torch\.bfloat16"),
    "workspace": ({"workspace": zeros(4)}, TypeError, r"workspace: expected torch\.uint8, got torch\.bfloat16"),
    "workspace-2-d": ({"workspace": zeros(4, 4)}, ValueError, r"workspace: expected a contiguous uint8 tensor \[bytes\], got \(4, 4\)"),
    "gradient": ({"q": zeros(2, 2, 4, 64).requires_grad_()}, NotImplementedError, r"q: expected a tensor that needs no grad.*_attn_func"),
}  # fmt: skip


def moved(arguments, device):
    """Move arguments to a device; views of one tensor stay views of one tensor."""
    memory = {}

    def there(x):
        if device == "cpu" or not isinstance(x, torch.Tensor) or x.device.type != "cpu":
            return x
        storage = x.untyped_storage()
        if storage.data_ptr() not in memory:
            memory[storage.data_ptr()] = torch.empty(0, dtype=x.dtype).set_(storage).to(device)
        whole = memory[storage.data_ptr()]
        return whole.as_strided(x.shape, x.stride(), x.storage_offset()).requires_grad_(x.requires_grad)

    return {name: there(x) for name, x in arguments.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("changes", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_errors(changes, error, text, device):
    """Also after correct calls, whose checks are not repeated."""
    for good in (small(), small() | PAGED):
        flash_attn_with_kvcache(**moved(good, device))
    with pytest.raises(error, match=text.replace("cpu, got", ".*, got")):
        flash_attn_with_kvcache(**moved(small() | changes, device))


def test_checks_run_once_per_metadata():
    calls = launch.fwd.plan_cache.calls
    calls.clear()
    for new in (False, True, True):
        flash_attn_with_kvcache(**small(new=2 * new))
    assert len(calls) == 2
    for window in ((3, 3), [3, 3]):
        flash_attn_with_kvcache(**small() | {"window_size": window})
        assert len(calls) == 3
    flash_attn_with_kvcache(**small() | {"cache_batch_idx": None, "softmax_scale": 1})
    assert len(calls) == 4


SLOPES, ROTATED = torch.ones(4), NEW | ROTARY
EQUAL = {
    "scale": ({"softmax_scale": 1.0}, {"softmax_scale": True}, ValueError, "softmax_scale: expected a finite number.*got True"),
    "softcap": ({"softcap": 1.0}, {"softcap": True}, ValueError, "softcap: expected 0 for no cap.*got True"),
    "window": ({"window_size": (1, 0)}, {"window_size": (True, 0)}, TypeError, "window_size: expected ints.*got True"),
    "lse": ({"return_softmax_lse": True}, {"return_softmax_lse": 1}, TypeError, "return_softmax_lse: expected a bool, got 1"),
    "slopes": ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES.clone().requires_grad_()}, NotImplementedError, "alibi_slopes: .*grad=T"),
    "cos": (ROTATED, ROTATED | {"rotary_cos": zeros(32, 16).requires_grad_()}, NotImplementedError, "rotary_cos: .*grad=True"),
}  # fmt: skip


@pytest.mark.parametrize(("good", "bad", "error", "text"), EQUAL.values(), ids=EQUAL)
def test_values_equal_to_those_of_a_correct_call_are_checked(good, bad, error, text):
    for _ in range(2):
        flash_attn_with_kvcache(**small() | good)
        with pytest.raises(error, match=text):
            flash_attn_with_kvcache(**small() | bad)


RANGES = {
    "length": (None, {"cache_seqlens": [33, 3]}, r"cache_seqlens\[0\]: expected 0 to 32, as .* room for 32 keys and 0 are new, got 33"),
    "length-and-new": (None, NEW | {"cache_seqlens": [3, 30]}, r"cache_seqlens\[1\]: expected 0 to 29, as .* 3 are new, got 30"),
    "length-negative": (16, {"cache_seqlens": [3, -1]}, r"cache_seqlens\[1\]: expected 0 to"),
    "idx": (None, {"cache_batch_idx": [0, 2]}, r"cache_batch_idx\[1\]: expected 0 to 1, as there are 2 caches, got 2"),
    "leftpad": (None, {"cache_leftpad": [-1, 0]}, r"cache_leftpad\[0\]: expected 0 to 32"),
    "page": (16, {"block_table": [[0, 9], [1, 10**6]]}, r"block_table\[0, 1\]: expected 0 to \d, a page of k_cache, got 9"),
    "page-negative": (16, {"block_table": [[0, 1], [-1, 0]]}, r"block_table\[1, 0\]: expected 0 to \d, a page of k_cache, got -1"),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("page", "changes", "text"), RANGES.values(), ids=RANGES)
def test_check_block_table_names_the_invalid_entry(page, changes, text, device):
    changes = {
        k: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x for k, x in changes.items()
    }
    with pytest.raises(IndexError, match=text):
        flash_attn_with_kvcache(**moved(small(page) | changes, device), check_block_table=True)


def test_workspace_bytes_asks_the_launch(monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "decode_workspace_bytes", lambda *x: seen.append(x) or 7)
    assert kvcache_workspace_bytes(2, 3, 8, 4, 64, 1000, num_splits=5) == 7
    *sizes, sms = seen[0]
    assert sizes == [2, 3, 8, 4, 64, 5, 1000] and sms > 0


SIZES = {"batch": 2, "seqlen_q": 3, "heads": 8, "heads_kv": 4, "head_dim_v": 64, "seqlen_cache": 1000}
SIZE_ERRORS = {
    "batch-negative": ({"batch": -1}, ValueError, "batch: expected at least 0, got -1"),
    "batch-bool": ({"batch": True}, TypeError, "batch: expected an int, got True"),
    "seqlen-fraction": ({"seqlen_q": 1.5}, TypeError, r"seqlen_q: expected an int, got 1\.5"),
    "heads-0": ({"heads": 0}, ValueError, "heads: expected at least 1, got 0"),
    "heads-kv-0": ({"heads_kv": 0}, ValueError, "heads_kv: expected at least 1, got 0"),
    "heads-kv-3": ({"heads_kv": 3}, ValueError, "heads_kv: expected a divisor of heads, 8, got 3"),
    "head-dim-0": ({"head_dim_v": 0}, ValueError, "head_dim_v: expected a multiple of 8 of at most 256, or 512, got 0"),
    "head-dim-60": ({"head_dim_v": 60}, ValueError, "head_dim_v: expected a multiple of 8 of at most 256, or 512, got 60"),
    "head-dim-320": ({"head_dim_v": 320}, ValueError, "head_dim_v: expected a multiple of 8 of at most 256, or 512, got 320"),
    "head-dim-negative": ({"head_dim_v": -64}, ValueError, "head_dim_v: expected at least 0, got -64"),
    "cache-tensor": ({"seqlen_cache": torch.tensor(9)}, TypeError, r"seqlen_cache: expected an int, got \(\) torch\.int64 on cpu"),
    "cache-negative": ({"seqlen_cache": -5}, ValueError, "seqlen_cache: expected at least 0, got -5"),
    "splits": ({"num_splits": -1}, ValueError, "num_splits: expected at least 0, with 0 for an automatic choice, got -1"),
    "splits-fraction": ({"num_splits": 2.0}, TypeError, r"num_splits: expected an int, .*got 2\.0"),
    "invariant": ({"batch_invariant": 1}, TypeError, "batch_invariant: expected a bool, got 1"),
    "both": ({"num_splits": 2, "batch_invariant": True}, ValueError, "num_splits, batch_invariant: expected one of them"),
    "cpu": ({"device": "cpu"}, ValueError, "device: expected a GPU, .*got 'cpu'; tensors on the CPU need no workspace"),
    "cpu-device": ({"device": torch.device("cpu")}, ValueError, r"device: expected a GPU, .*got device\(type='cpu'\)"),
    "device-negative": ({"device": -1}, ValueError, "device: expected a GPU, .*got -1"),
    "device-bool": ({"device": True}, ValueError, "device: expected a GPU, .*got True"),
    "device-fraction": ({"device": 0.0}, ValueError, r"device: expected a GPU, .*got 0\.0"),
    "device-99": ({"device": "cuda:99"}, ValueError, "device: expected .*, got 99"),
    "device-99-int": ({"device": 99}, ValueError, "device: expected .*, got 99"),
    "device-99-device": ({"device": torch.device("cuda", 99)}, ValueError, "device: expected .*, got 99"),
    "device-300": ({"device": "cuda:300"}, ValueError, "device: expected .*, got 300"),
    "device-word": ({"device": "cuda:first"}, ValueError, "device: expected a GPU, .*got 'cuda:first'"),
    "device-text": ({"device": "gpu"}, ValueError, "device: expected a GPU, .*got 'gpu'"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), SIZE_ERRORS.values(), ids=SIZE_ERRORS)
def test_workspace_bytes_errors(changes, error, text):
    with pytest.raises(error, match=text):
        kvcache_workspace_bytes(**SIZES | changes)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 0], ids=["whole", "split"])
@pytest.mark.parametrize("spread", [1, 4])
@pytest.mark.parametrize("queries", [1, 16])
def test_errors_of_decodes_are_those_of_rounded_weights(queries, spread, num_splits):
    """Weights are rounded relative to the largest one, which is 1 and so exact: it matters where few keys have most of the weight."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(4, rows, heads, 128, device="cuda", dtype=BF16, generator=generator)
        for rows, heads in ((queries, 8), (2000, 2), (2000, 2))
    )
    q *= spread  # the standard deviation of scores
    out = flash_attn_with_kvcache(q, k, v, num_splits=num_splits)
    rows = (x.double().transpose(1, 2) for x in (q, k, v))
    q, k, v = (x.repeat_interleave(8 // x.shape[1], 1) for x in rows)
    scores = q @ k.mT / 128**0.5
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    exact, rounded = (
        (x @ v / weights.sum(-1, keepdim=True)).transpose(1, 2) for x in (weights, weights.to(BF16).double())
    )
    error, least = (mean_error(x.to(BF16).double(), exact) for x in (out, rounded))
    assert error <= 1.05 * least, f"{error / least:.3f} times the error of rounded weights"


@pytest.mark.gpu
def test_workspace_bytes_of_a_missing_gpu_is_an_error():
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"device: expected a GPU from 0 to {count - 1}, got {count}"):
        kvcache_workspace_bytes(**SIZES, device=count)


def test_workspace_bytes_without_work():
    assert kvcache_workspace_bytes(**SIZES) > 0
    for name in ("batch", "seqlen_q", "seqlen_cache"):
        assert kvcache_workspace_bytes(**SIZES | {name: 0}) == 0
    for device in ("cuda", 0, "cuda:0", torch.device("cuda", 0)):
        assert kvcache_workspace_bytes(**SIZES, device=device) == kvcache_workspace_bytes(**SIZES)


LAUNCHED = {  # arguments: window at the launch, and whether each query is rotated by its own position
    "plain": ({}, (-1, -1), False),
    "causal": ({"causal": True, "window_size": [-1, None]}, (-1, 0), True),
    "causal-window": ({"causal": True, "window_size": (7, 7)}, (7, 0), True),
    "window": ({"window_size": (-1, 3)}, (-1, 3), True),
    "causal-by-window": ({"window_size": (None, 0)}, (-1, 0), True),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "window", "moves"), LAUNCHED.values(), ids=LAUNCHED)
def test_masks_are_canonical_at_the_launch(changes, window, moves, monkeypatch):
    seen = []
    monkeypatch.setattr(kvcache, "_append", lambda q, *x: seen.append(x) or q)
    monkeypatch.setattr(kvcache, "_decode", lambda *x: seen.append(x) or (1, 2))
    arguments = {**small(), "softmax_scale": 2, **NEW, **ROTARY, "causal": False, **changes}
    workspace = zeros(64, dtype=torch.uint8)
    splits = 3 if moves else 0
    how = {"num_splits": splits, "batch_invariant": not moves, "workspace": workspace}
    assert flash_attn_with_kvcache(**arguments, **how | {"return_softmax_lse": True}) == (1, 2)
    (
        (k, v, _, cos, sin, interleaved, moved_queries),
        (_, cache, scale, options, given, _),
    ) = seen
    assert (
        (k, v, cos, sin) == (*NEW.values(), *ROTARY.values())
        and interleaved is True
        and moved_queries is moves
    )
    names = () if window == (-1, -1) else ("window",)
    assert (options.window, options.num_splits, options.names) == (window, splits or BATCH_INVARIANT, names)
    assert (cache.new, cache.seqlens, cache.k) == (3, arguments["cache_seqlens"], arguments["k_cache"])
    assert (scale, given) == (2.0, workspace)


def test_new_latent_values_are_part_of_the_keys(monkeypatch):
    seen = []
    monkeypatch.setattr(kvcache, "_append", lambda q, *x: seen.append(x) or q)
    k = torch.randn(2, 1, 1, 576).to(BF16)
    flash_attn_with_kvcache(**LATENT, k=k, cache_seqlens=3)
    assert torch.equal(seen[0][1], k[..., :512])


COMPILED = {
    "plain": {},
    "append": {"new": 2},
    "rotary": {"new": 2, "rotary": (32, False)},
    "pages": {"page": 16, "new": 2},
}
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@devices
@pytest.mark.parametrize("changes", COMPILED.values(), ids=COMPILED)
def test_torch_compile_has_no_graph_break(changes, device):
    torch._dynamo.reset()
    cases = [Case(seqlen_q=2, lengths=(40, 3), room=8, device=device, **changes) for _ in range(2)]

    def step(case, q, k_cache, v_cache, keywords):
        return flash_attn_with_kvcache(q * 2, k_cache, v_cache, **keywords, return_softmax_lse=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    mine, expected = (
        run(None, case.q, case.k_cache, case.v_cache, case.keywords)
        for run, case in zip((compiled, step), cases, strict=True)
    )
    torch.testing.assert_close(mine, expected)
    for x, y in zip(*((case.k_cache, case.v_cache) for case in cases), strict=True):
        assert torch.equal(x.view(torch.int16), y.view(torch.int16))


@pytest.mark.parametrize("compiled_before", [False, True])
def test_inductor_keeps_the_offset_of_a_view_that_is_written(compiled_before):
    """With sizes that are symbols, as a second size makes them, Inductor wrote to the start of the tensor behind a view.

    compiled_before: Inductor has compiled such a view, as of an op of another package.
    """
    torch._dynamo.reset()
    if compiled_before:
        lowering = importlib.import_module("torch._inductor.lowering")
        lowering.make_fallback(torch.ops.aten.sym_storage_offset.default)
    step = torch.compile(
        lambda caches, out, q, k, v, lengths, starts: (
            flash_attn_with_kvcache(q, *caches[1], k, v, cache_seqlens=lengths, causal=True),
            flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 3, 3, out=out[1]),
        ),
        fullgraph=True,
        backend="inductor",
        dynamic=True,
    )
    with torch._inductor.config.patch(force_disable_caches=True):
        for rows in (24, 32):
            caches, q = torch.randn(3, 2, 2, rows, 2, 64).half(), torch.randn(2, 3, 4, 64).half()
            k, v = torch.randn(2, 2, 3, 2, 64).half()
            lengths, starts = (torch.tensor(x, dtype=torch.int32) for x in ([7, 20], [0, 3]))
            out, before = torch.zeros(2, *q.shape[1:]).half(), caches.clone()
            results = step(caches, out, q, k, v, lengths, starts)
            expected = flash_attn_with_kvcache(q, *before[1], k, v, cache_seqlens=lengths, causal=True)
            assert torch.equal(results[0], expected) and torch.equal(caches, before)
            expected = flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 3, 3)
            assert torch.equal(results[1], expected) and torch.equal(out[1], expected) and not out[0].any()


def test_a_growing_int_length_is_traced_twice():
    torch._dynamo.reset()
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph

    case = Case(lengths=(9,), new=1, room=10)
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend=backend)
    for length in range(9, 15):
        arguments = case.keywords | {"cache_seqlens": length}
        out = compiled(case.q, case.k_cache, case.v_cache, **arguments)
        assert torch.equal(out, flash_attn_with_kvcache(case.q, case.k_cache, case.v_cache, **arguments))
    assert len(traced) <= 2


@devices
@pytest.mark.parametrize("changes", COMPILED.values(), ids=COMPILED)
def test_opcheck(changes, device, monkeypatch):
    # opcheck compares caches, so they must be finite
    calls = []
    for name in ("append_op", "decode_op"):
        op = getattr(kvcache, name)
        monkeypatch.setattr(kvcache, name, lambda *x, op=op: calls.append((op, x)) or op(*x))
    monkeypatch.setattr(kvcache, "is_traced", lambda: True)
    case = Case(seqlen_q=2, lengths=(40, 3), room=8, device=device, **changes)
    for x in (case.k_cache, case.v_cache):
        x.nan_to_num_()
    case.run()
    assert len(calls) == 1 + bool(changes)
    for op, arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


gpu = pytest.mark.gpu


def curated():
    """Each class with each number of queries and each mask; page sizes, heads and new keys alternate."""
    heads, appended = itertools.cycle([(8, 2), (4, 4), (64, 8)]), itertools.cycle([0, 1, 5, 70])
    for case_class, seqlen_q in itertools.product(CLASSES, QUERIES):
        pages = itertools.cycle(case_class[4])
        for causal, window in MASKS:
            (n, n_kv), new, page = next(heads), next(appended), next(pages)
            where = (
                {} if page is not None else [{}, {"by_idx": True}, {"leftpad": (9, 0, 1, 3, 300)}][new % 3]
            )
            rotary = None if not new or case_class[0] == 576 else (case_class[0] // 16 * 16, new % 2 == 1)
            masks = {"causal": causal, "window": window}
            heads_first = page is None and new == 5
            yield case_class, dict(
                page=page, seqlen_q=seqlen_q, heads=n, heads_kv=n_kv, new=new, room=37, rotary=rotary, heads_first=heads_first,
                **masks, **where,
            )  # fmt: skip


@gpu
@pytest.mark.parametrize("case_class", CLASSES, ids=str)
def test_decode_matches_reference(case_class):
    for seed, (this, changes) in enumerate(curated()):
        if this is case_class:
            case_of_class(case_class, **changes, device="cuda", seed=seed).check()


@gpu
@pytest.mark.timeout(1800)  # as the one of test_options.py
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_decode_matches_reference_on_any_problem(data):
    case_class = data.draw(st.sampled_from(CLASSES))
    page = data.draw(
        st.sampled_from(
            [None] if case_class[4] == [None] else [*case_class[4], 112 if case_class[4][0] == 16 else 128]
        )
    )
    lengths = tuple(data.draw(st.lists(st.integers(0, 300) | st.integers(0, 5000), min_size=1, max_size=9)))
    heads_kv = data.draw(st.sampled_from([1, 2, 3]))
    new = data.draw(st.sampled_from([0, 0, 1, 2, 33]))
    unpaged = page is None
    narrower = data.draw(st.sampled_from([0, 8])) if case_class[0] == case_class[1] else 0
    head_dim = case_class[0] - narrower
    rotary = st.tuples(st.integers(1, head_dim // 2).map(lambda n: 2 * n), st.booleans())
    case = case_of_class(
        (head_dim, case_class[1] - narrower, *case_class[2:]),
        page=page,
        seqlen_q=data.draw(st.integers(1, 20) | st.integers(1, 150)),
        heads=heads_kv * data.draw(st.sampled_from([1, 2, 5, 16])),
        heads_kv=heads_kv,
        lengths=lengths,
        new=new,
        causal=data.draw(st.booleans()),
        window=data.draw(st.sampled_from([(-1, -1), (-1, -1), (0, 0), (64, -1), (700, 9), (-1, 5)])),
        leftpad=data.draw(st.none() | st.tuples(*(st.integers(0, n) for n in lengths))) if unpaged else None,
        by_idx=unpaged and data.draw(st.booleans()),
        heads_first=unpaged and data.draw(st.booleans()),
        rotary=data.draw(rotary) if new and head_dim != 576 and data.draw(st.booleans()) else None,
        scale=data.draw(st.none() | st.sampled_from([-0.1, 0.0, 0.3])),
        room=data.draw(st.integers(0, 200)),
        device="cuda",
        seed=data.draw(st.integers(0, 2**20)),
    )
    splits = data.draw(st.sampled_from([0, 0, 0, 1, 3, 40]))
    case.check(num_splits=splits, batch_invariant=not splits and data.draw(st.booleans()))


@gpu
@pytest.mark.parametrize("page", [None, 16, 64])
@pytest.mark.parametrize("num_splits", range(1, 8))
def test_forced_splits(num_splits, page):
    case = Case(page=page, seqlen_q=3, lengths=(5000, 0, 1, 63, 64, 65, 2000), room=100, device="cuda")
    case.check(num_splits=num_splits)


@gpu
@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize("num_splits", [0, 5])
def test_workspace_size_suffices_and_its_contents_are_ignored(num_splits, page):
    case = Case(page=page, seqlen_q=3, lengths=(5000, 0, 77, 64), room=100, device="cuda")
    room = case.k_cache.shape[1] * (1 if page is None else case.keywords["block_table"].shape[1])
    needed = kvcache_workspace_bytes(4, 3, 8, 2, 128, room, num_splits)
    whole = torch.full((needed + 4096,), 0xFF, dtype=torch.uint8, device="cuda")
    mine = case.check(num_splits=num_splits, workspace=whole[:needed])
    assert (whole[needed:] == 0xFF).all()
    assert all(map(torch.equal, mine, case.run(num_splits=num_splits)))
    with pytest.raises(ValueError, match=f"workspace: expected at least {needed} bytes, got {needed - 1}"):
        case.run(num_splits=num_splits, workspace=whole[: needed - 1])


@gpu
@pytest.mark.parametrize("page", [None, 16])
def test_batch_invariant_results_are_bitwise_equal(page):
    lengths = (9000, 1, 0, 64, 3000, 5001, 777, 4096)
    case = Case(page=page, seqlen_q=2, lengths=lengths, by_idx=page is None, room=64, device="cuda")
    out, lse = case.check(batch_invariant=True)
    keywords = {"causal": True, "batch_invariant": True, "return_softmax_lse": True}
    of_each = [name for name in ("cache_seqlens", "cache_batch_idx", "block_table") if name in case.keywords]
    order = torch.tensor([5, 0, 7, 2, 1, 6, 3, 4], device="cuda")
    for some in (*(torch.tensor([b], device="cuda") for b in range(case.batch)), order, order[:3]):
        given = {name: case.keywords[name][some].contiguous() for name in of_each}
        alone = flash_attn_with_kvcache(case.q[some], case.k_cache, case.v_cache, **given, **keywords)
        assert torch.equal(alone[0], out[some]) and torch.equal(alone[1], lse[some])


@gpu
@pytest.mark.parametrize("seqlen_q", [1, 4, 70])
def test_decode_matches_prefill(seqlen_q):
    case = Case(seqlen_q=seqlen_q, lengths=(1500, 1500), device="cuda")
    others = case.randn(2, 1500 - seqlen_q, case.heads, case.head_dim)
    out, lse = case.check()
    prefill, prefill_lse, _ = flash_attn_func(
        torch.cat((others, case.q), 1), case.k_cache, case.v_cache, causal=True, return_attn_probs=True
    )
    ref, pt = (
        attention_reference(case.q, case.k_cache, case.v_cache, None, True, dtype=x)[0]
        for x in (torch.float32, BF16)
    )
    rounded = ref.to(BF16)
    allowed = 2 * (pt - ref).abs().max() + 2 * (rounded + 0.3 - 0.3 - rounded).abs().max()
    assert (out.float() - prefill[:, -seqlen_q:].float()).abs().max() <= allowed
    torch.testing.assert_close(lse, prefill_lse[..., -seqlen_q:], rtol=1e-4, atol=1e-4)


@gpu
@pytest.mark.parametrize("page", [None, 16, 64])
def test_cuda_graph_replays_with_other_lengths(page):
    def drawn(lengths, seed):
        return Case(
            page=page,
            seqlen_q=2,
            new=2,
            lengths=lengths,
            room=3000 - max(lengths),
            rotary=(64, False),
            device="cuda",
            seed=seed,
        )

    case = drawn((2000, 5, 0, 900), 0)
    if page is not None:  # as many pages as the largest of the other cases needs
        pages = 4 * -(-3002 // page) + 3
        case.k_cache, case.v_cache = (case.nan_cache(pages, page, 2, 128) for _ in range(2))
        case.keywords["block_table"].zero_()
    out, lse = case.run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.run()
    for seed, lengths in enumerate([(2000, 5, 0, 900), (1, 2998, 64, 16), (0, 0, 0, 0), (2998,) * 4], 1):
        other = drawn(lengths, seed)
        case.q.copy_(other.q)
        for name, x in other.keywords.items():
            if isinstance(x, torch.Tensor) and not name.startswith("rotary"):
                case.keywords[name].copy_(x)
        for mine, x in ((case.k_cache, other.k_cache), (case.v_cache, other.v_cache)):
            mine.fill_(math.nan)
            mine[: x.shape[0], : x.shape[1]].copy_(x)
        graph.replay()
        other.keywords |= {name: x for name, x in case.keywords.items() if name.startswith("rotary")}
        before = other.k_cache, other.v_cache
        other.k_cache, other.v_cache = (
            x[: y.shape[0], : y.shape[1]] for x, y in zip((case.k_cache, case.v_cache), before, strict=True)
        )
        other.check_cache(before)
        other.check_output(out, lse)


@gpu
def test_no_length_batch_page_or_split_compiles_a_kernel():
    for page in (None, 16, 64):
        for how in ({}, {"batch_invariant": True}):
            Case(page=page, new=1, rotary=(64, True), device="cuda").check(**how)
            # More than 64 rows of queries per key head
            Case(page=page, seqlen_q=70, device="cuda").check(**how)
    before = building.compile_count()
    for page in (None, 16, 48, 64, 320):
        for seqlen_q, lengths in ((1, (3,)), (5, (100, 2000, 17)), (70, (5, 300) * 20)):
            for how in ({}, {"num_splits": 3}, {"batch_invariant": True}):
                heads, window = (16, 4) if len(lengths) == 3 else (3, 1), (-1, -1) if how else (30, 0)
                Case(
                    page=page, seqlen_q=seqlen_q, lengths=lengths, new=seqlen_q % 3, window=window, heads=heads[0], heads_kv=heads[1],
                    device="cuda",
                ).check(**how)  # fmt: skip
    assert building.compile_count() == before


@gpu
def test_call_does_not_synchronize():
    case = Case(page=16, new=1, rotary=(64, True), device="cuda")
    case.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
