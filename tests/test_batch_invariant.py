"""batch_invariant: the same bits of a query in whatever batch, chunk, cache and pages, and of its sequence's gradients."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from invariance.arrangements import Sequences as DrawnSequences
from invariance.draws import FORWARDS, LATENT, OptionSet, Run, draw_of, kernels_of
from invariance.worker import run_draw
from protocol.launches import recorded

from tl_attention import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    flex_attention,
    kvcache_workspace_bytes,
)
from tl_attention.api import flex_calls
from tl_attention.api.block_masks import create_block_mask
from tl_attention.compilation import building
from tl_attention.config import configs, legality
from tl_attention.config.catalog import _decodes
from tl_attention.integrations import (
    hf,
    hf_decode,
    hf_flex,
    torch_backend,
    torch_masks,
    torch_modes,
    torch_unmasked,
)
from tl_attention.launch.decode import INVARIANT_KEYS, MAX_SPLITS, _split_rule
from tl_attention.problem.attn_problem import (
    HALF_DTYPES,
    INVARIANT_BUCKET,
    OPTIONS,
    AttnProblem,
    decode_problem,
    tile_widths,
)
from tl_attention.problem.options import BATCH_INVARIANT
from tl_attention.torch_ops import attend
from tl_attention.tuning import question

gpu = pytest.mark.gpu
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# head_dim, head_dim_v
HEAD_DIMS = (
    (64, 64),
    (128, 128),
    (256, 256),
    (192, 128),
    (96, 96),
    (80, 80),
    (192, 192),
    (128, 64),
    (40, 32),
)
PAGES = (16, 64, 128)
OPTION_SETS = (
    {"causal": True},
    {"causal": True, "window_size": (300, 0)},
    {"causal": True, "softcap": 20.0},
    {"causal": True, "sink": True},
    {"causal": True, "window_size": (200, 0), "sink": True},
    {"causal": True, "window_size": (300, 0), "softcap": 20.0},
    {"causal": True, "alibi": True},
    {},
)


# Configs


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_key_blocks_are_those_of_packed_sequences_in_every_form(dtype):
    names = [name for name in OPTIONS if name not in ("varlen", "placed", "added", "partial", "dropout")]
    for width, number in itertools.product(tile_widths("fwd", dtype), range(len(names) + 1)):
        for options in itertools.combinations(names, number):
            causal = "window" not in options
            found = set()
            for form in (options, (*options, "varlen")):
                form = tuple(name for name in OPTIONS if name in form)
                problem = AttnProblem.of(dtype, *width, causal, options=form)
                config, _ = configs.pick_config(problem, INVARIANT_BUCKET, "NVIDIA H200")
                assert config.schedule != "stream-K" and not config.split and not config.hold_max
                every = [config, *config.paged_forms(problem)] if "varlen" in form else [config]
                assert [legality.fault(problem, one) for one in every] == [None] * len(every)
                found |= {one.block_N for one in every}
            assert len(found) == 1, (width, options)


def test_decodes_have_the_key_blocks_of_the_forward():
    for options in ((), ("sink",), ("softcap",)):
        for call in _decodes(options):
            if call.config.v_in_k:
                continue
            problem = call.problem
            forward = AttnProblem.of(
                problem.dtype, problem.head_dim, problem.head_dim_v, False, options=options
            )
            config = configs.invariant_decode_config(problem, call.config, forward)
            assert config.block_N == configs.choose_invariant(forward).config.block_N
            assert config.block_N % max(config.page_rows, 1) == 0 and config.batch_invariant
            assert legality.smem_bytes(problem, config) + legality.BARRIER_BYTES <= 227 * 1024


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_latent_decodes_have_splits_of_one_number_of_keys(dtype):
    problem = decode_problem(dtype, *LATENT)
    rules = set()
    for rows, pages, capacity in itertools.product(
        (1, configs.DECODE_ROWS + 1), (0, 16, 64), (16, 1500, INVARIANT_KEYS * MAX_SPLITS)
    ):
        config = configs.decode_config(problem, rows, pages)
        rules.add(config.block_N * _split_rule(BATCH_INVARIANT, config, capacity))
    assert rules == {INVARIANT_KEYS}


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_ordered_gradients_have_one_group_of_heads(head_dim):
    for batch in (1, 2, 5):
        launches = recorded(lambda batch=batch: _ordered(batch, head_dim))
        (ordered,) = (x for x in launches if getattr(x.config, "is_ordered", False))
        sharers, _, group_heads, _ = [x for x in ordered.arguments if type(x) is int][-4:]
        assert (sharers, group_heads) == (1, 16 * batch)


def _ordered(batch: int, head_dim: int) -> None:
    """A deterministic causal backward of 16 heads."""
    q, k, v = (
        torch.zeros(batch, 2048, 16, head_dim, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
    )
    out = flash_attn_func(q, k, v, causal=True, deterministic=True, batch_invariant=True)
    out.backward(torch.zeros_like(out))


def test_a_mask_is_a_function_in_each_batch(monkeypatch):
    seen, listed = [], flex_calls.listed
    monkeypatch.setattr(flex_calls, "listed", lambda *x: seen.append(x[-1]) or listed(*x))
    q = torch.zeros(1, 1, 200, 64)
    mask = create_block_mask(lambda b, h, x, y: (x >= y) & (y % 3 != 1), None, None, 200, 200, device="cpu")
    for invariant in (False, True):
        flex_attention(q, q, q, block_mask=mask, batch_invariant=invariant)
    assert seen == [True, False]


def test_tools_name_the_config():
    for words, wanted in (
        ("d64 causal batch_invariant", "192x128 dynamic q2 ping-pong batch-invariant"),
        ("d128 batch_invariant varlen", "128x128 dynamic q2 batch-invariant"),
        ("d128 batch_invariant decode page_size=64", "decode 1x128x2x1 pages 64 batch-invariant"),
    ):
        asked = question.parse(words.split())
        first, *_ = question.answer(asked, *(asked.directions or ["fwd"]), question.gpu_of("H200"))
        assert first.name == wanted and "batch_invariant" in first.asked
        assert "all with batch_invariant" in "".join(question.legend([first])) or "decode" in words
    with pytest.raises(ValueError, match="bucket: expected none with batch_invariant"):
        question.parse(["d64", "4k", "batch_invariant"])


# Arguments


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch_invariant": 1}, TypeError, "batch_invariant: expected a bool, got 1"),
        ({"batch_invariant": True, "num_splits": 2}, ValueError, "num_splits, batch_invariant: expected one of them"),
        ({"batch_invariant": True, "dropout_p": 0.1}, ValueError, "dropout_p: expected 0 with batch_invariant"),
        ({"num_splits": -1}, ValueError, "num_splits: expected at least 0"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(options, error, text):
    q = torch.zeros(1, 8, 2, 64)
    with pytest.raises(error, match=text):
        flash_attn_func(q, q, q, **options)


def test_latent_decodes_take_no_splits_beside_it():
    q, cache = (torch.zeros(1, rows, heads, 576).bfloat16() for rows, heads in ((2, 4), (32, 1)))
    with pytest.raises(ValueError, match="num_splits, batch_invariant: expected one of them"):
        flash_attn_with_kvcache(q, cache, cache[..., :512], num_splits=2, batch_invariant=True)


@pytest.mark.parametrize("name", ["window_size", "learnable_sink"])
def test_latent_decodes_with_it_refuse_what_other_queries_change(name):
    value = {"window_size": (16, 0), "learnable_sink": torch.zeros(4)}[name]
    q, cache = (torch.zeros(1, rows, heads, 576).bfloat16() for rows, heads in ((2, 4), (32, 1)))
    with pytest.raises(
        NotImplementedError,
        match=f"batch_invariant: expected False with {name} in multi-head latent attention",
    ):
        flash_attn_with_kvcache(q, cache, cache[..., :512], batch_invariant=True, **{name: value})
    flash_attn_with_kvcache(q, cache, cache[..., :512], **{name: value})
    flash_attn_with_kvcache(q, cache, cache[..., :512], window_size=(-1, 0), batch_invariant=True)


def test_every_function_takes_it_on_the_cpu():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, 2, 64).bfloat16().unbind()
    ends = torch.tensor([0, 8], dtype=torch.int32)
    out = flash_attn_func(q, k, v)
    on = {"batch_invariant": True}
    mask = create_block_mask(lambda b, h, x, y: x < 99, None, None, 8, 8, device="cpu")
    flex = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, **on).transpose(1, 2)
    for same in (
        flash_attn_func(q, k, v, **on),
        flash_attn_func(q, k, v, num_splits=1, **on),
        flash_attn_func(q, k, v, score_mod=lambda s, b, h, x, y: s + 0 * x, **on),
        flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), **on),
        flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **on),
        flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 8, 8, **on)[None],
        flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 2)[0], ends, 8, **on)[None],
        flash_attn_varlen_kvpacked_func(q[0], torch.stack((k, v), 2)[0], ends, ends, 8, 8, **on)[None],
        flash_attn_with_kvcache(q, k, v, **on),
        flex,
    ):
        torch.testing.assert_close(same, out)
    with pytest.raises(TypeError, match="batch_invariant: expected a bool, got 'yes'"):
        flex_attention(q, k, v, batch_invariant="yes")


def test_the_environment_asks_for_it_in_every_call():
    code = """if True:
        import torch, tl_attention
        from tl_attention.torch_ops import attend
        from tl_attention.problem.options import BATCH_INVARIANT, options_of_terms
        seen, checked = [], attend.checked_options
        attend.checked_options = lambda *x: seen.append(checked(*x)) or seen[-1]
        q = torch.zeros(1, 2, 8, 64)
        tl_attention.mha_fwd_interface(q, q, q, 1.0, False)
        tl_attention.flash_attn_func(q, q, q)
        assert [x.num_splits for _, x in seen] == [BATCH_INVARIANT] * 2
        assert options_of_terms(0).batch_invariant
        try:
            tl_attention.flash_attn_func(q, q, q, dropout_p=0.1)
        except ValueError as error:
            assert "TL_ATTENTION_BATCH_INVARIANT=1" in str(error)
        else:
            raise AssertionError
    """
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"TL_ATTENTION_BATCH_INVARIANT": "1"}
    )


def test_keys_that_are_not_split_need_no_workspace_for_partials():
    sizes = 64, 1, 32, 8, 128, 32768
    assert (
        kvcache_workspace_bytes(*sizes, batch_invariant=True)
        < kvcache_workspace_bytes(*sizes, num_splits=2) / 100
    )


# Bits on a GPU


class Sequences:
    """Packed sequences of drawn lengths, and their result as a training forward has it: all in one packed call.

    Attributes:
        lengths: (queries, keys) of each sequence; in a causal call as many, so that a query sees the same keys in any chunk.
    """

    def __init__(self, seed: int, dtype: torch.dtype, head_dims: tuple[int, int], options: dict):
        self.random = random.Random(seed)
        self.heads_kv = self.random.choice((1, 2, 3))
        self.heads = self.heads_kv * self.random.choice((1, 2, 4, 7))
        count = self.random.randint(1, 5)
        self.lengths = [
            self.random.choice((1, 2, self.random.randint(1, 140), self.random.randint(1, 1500)))
            for _ in range(count)
        ]
        generator = torch.Generator("cuda").manual_seed(seed)
        scale = self.random.choice((0.3, 1.0, 3.0))

        def tensor(heads: int, columns: int) -> torch.Tensor:
            sizes = sum(self.lengths), heads, columns
            return torch.randn(sizes, generator=generator, device="cuda", dtype=dtype)

        self.q = tensor(self.heads, head_dims[0]) * scale
        self.k, self.v = (tensor(self.heads_kv, columns) for columns in head_dims)
        self.options = {"batch_invariant": True, **options}
        if self.options.pop("sink", False):
            self.options["learnable_sink"] = torch.linspace(-1, 3, self.heads, device="cuda")
        if self.options.pop("alibi", False):
            self.options["alibi_slopes"] = torch.logspace(-1, -4, self.heads, 2.0, device="cuda")
        self.starts = list(itertools.accumulate(self.lengths, initial=0))
        self.out, self.lse = self.packed(range(count))

    def rows(self, i: int) -> slice:
        return slice(self.starts[i], self.starts[i + 1])

    def packed(self, chosen, longest: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [total, heads, columns], lse [heads, total]) of some sequences in one call."""
        rows = torch.cat([torch.arange(self.starts[i], self.starts[i + 1]) for i in chosen]).cuda()
        ends = _ints([0, *itertools.accumulate(self.lengths[i] for i in chosen)])
        longest = longest or max(self.lengths[i] for i in chosen)
        q, k, v = (x[rows] for x in (self.q, self.k, self.v))
        out, lse, _ = flash_attn_varlen_func(
            q, k, v, ends, ends, longest, longest, return_attn_probs=True, **self.options
        )
        return out, lse

    def check(self, results: tuple[torch.Tensor, torch.Tensor], chosen, what: str) -> None:
        """The results of the last queries of sequences have the bits of the packed call."""
        out, lse = results
        wanted = torch.cat([self.out[self.rows(i)] for i in chosen])
        assert torch.equal(out, wanted), (
            f"{what}: out of {(out != wanted).any(-1).any(-1).nonzero().flatten().tolist()[:9]}"
        )
        wanted = torch.cat([self.lse[:, self.rows(i)] for i in chosen], 1)
        assert torch.equal(lse, wanted), (
            f"{what}: lse of {(lse != wanted).any(0).nonzero().flatten().tolist()[:9]}"
        )

    def rearranged(self) -> None:
        """In another order, in part, alone, with another bound of the lengths, in a dense batch."""
        everyone = list(range(len(self.lengths)))
        some = self.random.sample(everyone, self.random.randint(1, len(everyone)))
        self.check(self.packed(some, self.random.choice((0, 4096, 40000))), some, f"sequences {some}")
        i = self.random.choice(everyone)
        dense = [x[self.rows(i)][None].expand(3, *([-1] * 3)) for x in (self.q, self.k, self.v)]
        out, lse, _ = flash_attn_func(*dense, return_attn_probs=True, **self.options)
        for b in (0, 2):
            self.check((out[b], lse[b]), [i], f"dense {i}")

    def in_chunks(self) -> None:
        """A sequence in chunks of any sizes, its keys in pages or not."""
        i = self.random.randrange(len(self.lengths))
        length, page = self.lengths[i], self.random.choice((0, *PAGES))
        cuts = sorted(self.random.sample(range(1, length), min(self.random.randint(0, 5), length - 1)))
        q, k, v = (x[self.rows(i)] for x in (self.q, self.k, self.v))
        results = []
        for first, last in itertools.pairwise((0, *cuts, length)):
            ends = _ints([0, last - first])
            if page:
                (k_pages, v_pages), table = _pages((k, v), page, self.random)
                lengths = ends, None, last - first, length
                how = {"block_table": table, "seqused_k": _ints([last])}
                keys = k_pages, v_pages
            else:
                lengths, how, keys = (ends, _ints([0, last]), last - first, last), {}, (k[:last], v[:last])
            out, lse, _ = flash_attn_varlen_func(
                q[first:last], *keys, *lengths, return_attn_probs=True, **how, **self.options
            )
            results.append((out, lse))
        out, lse = torch.cat([x for x, _ in results]), torch.cat([x for _, x in results], 1)
        self.check((out, lse), [i], f"chunks {cuts} of {length}, pages of {page}")

    def decoded(self) -> None:
        """Each sequence by its last queries against a cache of keys, with others, in pages or not."""
        queries = min(self.random.choice((1, 1, 2, 5, 16, 40)), *self.lengths)
        page = self.random.choice((0, *PAGES))
        order = self.random.sample(range(len(self.lengths)), len(self.lengths))
        cut = [self.random.randint(queries, self.lengths[i]) for i in order]  # as many keys are in the cache
        room = -(-max(cut) // 128) * 128
        caches = []
        for x in (self.k, self.v):
            cache = torch.full((len(order), room, *x.shape[1:]), torch.nan, dtype=x.dtype, device="cuda")
            for b, (i, keys) in enumerate(zip(order, cut, strict=True)):
                cache[b, :keys] = x[self.rows(i)][:keys]
            caches.append(cache)
        how = {}
        if page:
            tables = []
            flat = [x.flatten(0, 1) for x in caches]
            caches, table = _pages(flat, page, self.random)
            tables = table.view(len(order), -1)
            how["block_table"] = tables.contiguous()
        q = torch.stack([self.q[self.rows(i)][n - queries : n] for i, n in zip(order, cut, strict=True)])
        out, lse = flash_attn_with_kvcache(
            q, *caches, cache_seqlens=_ints(cut), return_softmax_lse=True, **how, **self.options
        )
        for b, (i, n) in enumerate(zip(order, cut, strict=True)):
            first = self.starts[i] + n - queries
            rows, what = slice(first, first + queries), f"decode of {queries} at {n}, pages of {page}"
            assert torch.equal(out[b], self.out[rows]), what
            assert torch.equal(lse[b], self.lse[:, rows]), what


def _ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _pages(tensors, page: int, chance: random.Random) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Tensors [rows, heads, columns] as pages [pages, page, heads, columns] in a drawn order, and the table [1, pages] of their places."""
    count = -(-tensors[0].shape[0] // page)
    places = chance.sample(range(count + 3), count)
    found = []
    for x in tensors:
        pages = torch.full((count + 3, page, *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
        rows = torch.zeros((count * page, *x.shape[1:]), dtype=x.dtype, device=x.device)
        rows[: x.shape[0]] = x
        pages[places] = rows.unflatten(0, (count, page))
        found.append(pages)
    return found, _ints([places])


@gpu
@pytest.mark.parametrize("options", OPTION_SETS, ids=lambda x: "-".join(x) or "full")
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=lambda x: f"d{x[0]}-{x[1]}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_batch_chunks_pages_or_phase(dtype, head_dims, options, draws):
    for seed in range(draws):
        sequences = Sequences(seed, DTYPES[dtype], head_dims, options)
        sequences.rearranged()
        if options and "alibi" not in options:  # without a causal mask a chunk sees other keys
            sequences.in_chunks()
            sequences.decoded()


def _check_drawn(
    dtype: str, head_dims: tuple[int, int], options: str, count: int, without_pages: bool = False
) -> None:
    """Rearrangements of tests/invariance have the bits of their reference. without_pages: those of forwards have none."""
    run, one, sequences, counts = Run(dtype, head_dims), OptionSet(options), None, Counter()
    building.build_all(kernels_of(run, [one]))  # side by side
    for index in range(count):
        draw = draw_of(run, one, index)
        if without_pages and draw.kind in FORWARDS and draw.page:
            continue
        if sequences is None or sequences.drawn != draw.sequences:
            sequences = DrawnSequences(run, one, draw.sequences, "cuda")
        fault = run_draw(draw, sequences, counts)
        assert not fault, f"{draw}: {fault}"


@gpu
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=lambda x: f"d{x[0]}-{x[1]}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_alibi_bits_do_not_depend_on_batch_pages_or_place(dtype, head_dims, draws):
    """The same chunk alone is the reference: of a forward by a forward, of a decode by a decode."""
    _check_drawn(dtype, head_dims, "alibi", 16 * draws)


@gpu
@pytest.mark.parametrize("options", ["window-alibi", "sink-alibi", "softcap-alibi"])
def test_alibi_beside_other_options_does_not_depend_on_the_batch(options, draws):
    _check_drawn("bf16", (128, 128), options, 8 * draws)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_alibi_without_a_mask_does_not_depend_on_the_batch(dtype, draws):
    """Forwards with keys in pages compute this bias by element, others by its lines on both sides of the diagonal."""
    _check_drawn(dtype, (128, 128), "full-alibi", 16 * draws, without_pages=True)


@gpu
def test_alibi_slopes_of_an_entry_are_those_of_all_entries():
    q, k, v = (torch.randn(3, 333, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    slopes = torch.rand(4, device="cuda")
    for how in ({"causal": True}, {}):
        found = [
            flash_attn_func(q, k, v, alibi_slopes=x, batch_invariant=True, return_attn_probs=True, **how)
            for x in (slopes, slopes.expand(3, -1).contiguous())
        ]
        assert all(torch.equal(x, y) for x, y in zip(found[0][:2], found[1][:2], strict=True))


@gpu
@pytest.mark.parametrize("options", ["causal", "full", "softcap"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_decodes_do_not_depend_on_batch_pages_or_queries(dtype, options, draws):
    _check_drawn(dtype, LATENT, options, 16 * draws)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_decodes_of_each_number_of_queries_are_equal(dtype):
    """128 heads, keys around multiples of 1024: the last query alone, with others, beside longer sequences, in pages."""
    latents = torch.randn(3, 20_032, 1, 576, device="cuda", dtype=DTYPES[dtype])
    pages = latents.view(-1, 64, 1, 576)
    table = torch.arange(pages.shape[0], device="cuda", dtype=torch.int32).view(3, -1)
    q = torch.randn(3, 17, 128, 576, device="cuda", dtype=DTYPES[dtype])
    for keys in (1, 17, 1023, 1024, 1025, 2048, 3071, 4097, 8191, 8192, 8193, 20_000):
        found = []
        for queries, batch, paged in itertools.product((1, 2, 17), (1, 3), (False, True)):
            # Further rows that nothing uses, as a larger cache has
            cache = pages if paged else latents[:batch, : keys + 4200] if queries == 2 else latents[:batch]
            out, lse = flash_attn_with_kvcache(
                q[:batch, -queries:], cache, cache[..., :512], cache_seqlens=_ints([keys, 4100, 3][:batch]),
                block_table=table[:batch] if paged else None, causal=True, return_softmax_lse=True, batch_invariant=True,
            )  # fmt: skip
            found.append((out[0, -1], lse[0, :, -1]))
        assert all(torch.equal(x, y) for one in found for x, y in zip(one, found[0], strict=True)), keys


@gpu
@pytest.mark.parametrize("options", ["causal", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_of_latent_attention_equals_its_decodes(dtype, options, draws):
    """Head dims 192 and 128: without absorbed weights."""
    _check_drawn(dtype, (192, 128), options, 16 * draws)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_of_a_call_do_not_choose_the_kernel(dtype):
    """14/2 heads, d64, 19802 keys, 9 and 10 queries: vllm-project/vllm#51902."""
    q, k, v = (torch.randn(19802, heads, 64, device="cuda", dtype=DTYPES[dtype]) for heads in (14, 2, 2))
    found = []
    for queries in (9, 10, 64, 300):
        ends, keys = _ints([0, queries]), _ints([0, 19802])
        out = flash_attn_varlen_func(
            q[-queries:], k, v, ends, keys, queries, 19802, causal=True, batch_invariant=True
        )
        found.append(out[-9:])
        decoded = flash_attn_with_kvcache(
            q[None, -queries:], k[None], v[None], causal=True, batch_invariant=True
        )
        found.append(decoded[0, -9:])
    assert all(torch.equal(x, found[0]) for x in found)


@gpu
@pytest.mark.parametrize("options", OPTION_SETS, ids=lambda x: "-".join(x) or "full")
@pytest.mark.parametrize("head_dims", HEAD_DIMS[:4], ids=lambda x: f"d{x[0]}-{x[1]}")
def test_deterministic_gradients_of_a_sequence_do_not_depend_on_the_others(head_dims, options):
    for seed in range(3):
        one = Sequences(seed, torch.bfloat16, head_dims, options)
        one.options["deterministic"] = True
        dout = torch.randn_like(one.out)

        def gradients(chosen, one=one, dout=dout):
            rows = torch.cat([torch.arange(one.starts[i], one.starts[i + 1]) for i in chosen]).cuda()
            ends = _ints([0, *itertools.accumulate(one.lengths[i] for i in chosen)])
            longest = max(one.lengths[i] for i in chosen)
            inputs = [x[rows].requires_grad_() for x in (one.q, one.k, one.v)]
            out = flash_attn_varlen_func(*inputs, ends, ends, longest, longest, **one.options)
            return torch.autograd.grad(out, inputs, dout[rows])

        everyone = list(range(len(one.lengths)))
        together = gradients(everyone)
        for chosen in ([i] for i in everyone):
            for name, x, all_rows in zip("qkv", gradients(chosen), together, strict=True):
                assert torch.equal(x, all_rows[one.rows(chosen[0])]), (
                    f"d{name} of sequence {chosen} of {one.lengths}"
                )
        i = one.random.choice(everyone)
        dense = [x[one.rows(i)][None].expand(4, -1, -1, -1).clone() for x in (one.q, one.k, one.v)]
        found = []
        for batch in (1, 4):
            inputs = [x[:batch].clone().requires_grad_() for x in dense]
            out = flash_attn_func(*inputs, **one.options)
            found.append(torch.autograd.grad(out, inputs, dout[one.rows(i)][None].expand(batch, -1, -1, -1)))
        for name, alone, batched in zip("qkv", *found, strict=True):
            for b in (0, 3):
                assert torch.equal(alone[0], batched[b]), (
                    f"d{name} of entry {b} of a dense batch, {one.lengths[i]} rows"
                )


@gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_gradients_of_many_heads_have_one_order(head_dim, causal):
    """A batch has several groups of heads, of which the last goes through the keys of a causal mask in another order."""
    inputs = [torch.randn(5, 2048, 16, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    found = []
    for batch in (5, 1):
        *qkv, dout = (x[:batch] for x in inputs)
        qkv = [x.clone().requires_grad_() for x in qkv]
        out = flash_attn_func(*qkv, causal=causal, deterministic=True, batch_invariant=True)
        found.append(torch.autograd.grad(out, qkv, dout))
    assert all(torch.equal(x[0], alone[0]) for x, alone in zip(*found, strict=True))


@gpu
def test_a_query_without_keys_has_one_log_sum_exp():
    """A call without any key launches no kernel."""
    heads = 200
    sinks = 4 * torch.randn(heads, generator=torch.Generator().manual_seed(0))
    q, k, v = torch.randn(3, 301, heads, 64, device="cuda", dtype=torch.bfloat16)
    options = {"learnable_sink": sinks.cuda(), "return_attn_probs": True, "batch_invariant": True}
    ends = _ints([0, 1, 301]), _ints([0, 0, 301])
    _, packed, _ = flash_attn_varlen_func(q, k, v, *ends, 300, 301, causal=True, **options)
    _, alone, _ = flash_attn_func(q[None, :1], k[None, :0], v[None, :0], causal=True, **options)
    assert torch.equal(packed[:, 0], alone[0, :, 0])
    torch.testing.assert_close(alone[0, :, 0].cpu(), sinks)


@gpu
def test_flex_entries_do_not_depend_on_the_batch():
    q, k, v = (torch.randn(5, 4, 700, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = create_block_mask(lambda b, h, x, y: (x >= y) & (y % 7 != 3), None, None, 700, 700, device="cuda")
    mods = {"score_mod": lambda s, b, h, x, y: s + 0.01 * (x - y).abs()}
    for how in ({"block_mask": mask}, mods, {"block_mask": mask, **mods}):
        out = flex_attention(q, k, v, batch_invariant=True, **how)
        for b in (0, 4):
            alone = flex_attention(*(x[b : b + 1] for x in (q, k, v)), batch_invariant=True, **how)
            assert torch.equal(alone[0], out[b])


@pytest.fixture
def draws(request) -> int:
    """Batches per case: 3, with --all-kernels 60."""
    return 60 if request.config.getoption("--all-kernels", default=False) else 3


def test_several_ranks_are_refused(monkeypatch):
    from tl_attention.distributed import functions

    q = torch.zeros(1, 8, 2, 64)
    monkeypatch.setattr(functions, "ALWAYS_INVARIANT", True)
    with pytest.raises(
        ValueError,
        match=r"TL_ATTENTION_BATCH_INVARIANT: expected it to be unset for tl_attention\.distributed",
    ):
        functions._checked(q, q, q, None, None)


def test_registration_asks_for_it_in_every_call(monkeypatch):
    seen, checked = [], attend.checked_options
    monkeypatch.setattr(attend, "checked_options", lambda *x: seen.append(checked(*x)) or seen[-1])
    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    lengths = torch.tensor([0, 8], dtype=torch.int32)

    def calls() -> list[bool]:
        """batch_invariant of a call of each kind: dense in both layouts, packed, without a mask for other ops, and gradients and masks."""
        seen.clear()
        out, lse, *_ = torch_backend.sdpa_forward(q, q, q)
        torch_backend.sdpa_forward(*(q.transpose(1, 2).contiguous().transpose(1, 2),) * 3)
        torch_backend.flash_forward(*(q[0].transpose(0, 1),) * 3, lengths, lengths, 8, 8, 0.0, False, False)
        torch_unmasked.forward(q, q, q, False, None)
        options, run = [], torch_backend.run_backward_op
        for module in (torch_backend, torch_unmasked):
            monkeypatch.setattr(module, "run_backward_op", lambda *x: options.append(x[3]) or run(*x))
        nothing = torch.zeros(2, dtype=torch.uint64)
        torch_backend.sdpa_backward(out, q, q, q, out, lse, None, None, 8, 8, 0.0, False, nothing, nothing)
        torch_unmasked.backward(out, q, q, q, out, lse, False, None)
        for module in (torch_backend, torch_unmasked):
            monkeypatch.setattr(module, "run_backward_op", run)
        found = [x for _, x in seen] + options
        return [x.batch_invariant for x in found] + [torch_modes.MODES.is_invariant]

    assert calls() == [False] * 7
    with torch_backend.register(batch_invariant=True):
        assert calls() == [True] * 7
        with torch_backend.register():
            assert calls() == [False] * 7
        assert calls() == [True] * 7
        with pytest.raises(
            ValueError, match=r"dropout_p: expected none after torch_backend.register\(batch_inv"
        ):
            torch_backend.sdpa_forward(q, q, q, 0.1)
        with pytest.raises(ValueError, match="num_splits: expected none after torch_backend.register"):
            flat = q[0].transpose(0, 1)
            torch_backend.flash_forward(
                flat, flat, flat, lengths, lengths, 8, 8, 0.0, False, False, num_splits=2
            )
        monkeypatch.setattr(torch_masks, "preferred", lambda backend: True)
        with pytest.raises(NotImplementedError, match=r"after torch_backend.register.*dropout_p=0.1"):
            torch_masks.efficient_forward(None, None, q, q, q, torch.zeros(1, 2, 8, 8), True, 0.1)
        # PyTorch has the results of empty calls
        theirs = tuple(torch.zeros(()) for _ in range(4))
        for query, key in ((q[:0], q[:0]), (q[:, :, :0], q), (q, q[:, :, :0])):
            mask = torch.zeros(len(query), 1, query.shape[2], key.shape[2])
            found = torch_masks.efficient_forward(lambda *_, **__: theirs, None, query, key, key, mask, True)
            assert found is theirs
    assert calls() == [False] * 7
    with pytest.raises(TypeError, match="batch_invariant: expected a bool, got 1"):
        torch_backend.register(batch_invariant=1)


def test_environment_refuses_calls_of_sdpa_that_the_kernels_do_not_serve(monkeypatch):
    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    call = None, None, q, q, q, torch.zeros(1, 2, 8, 8), True, 0.1
    theirs = tuple(torch.zeros(()) for _ in range(4))
    monkeypatch.setattr(torch_masks, "preferred", lambda backend: True)
    monkeypatch.setattr(torch_modes, "ALWAYS_INVARIANT", True)
    with pytest.raises(
        NotImplementedError, match=r"serves with TL_ATTENTION_BATCH_INVARIANT=1, .*dropout_p=0.1"
    ):
        torch_masks.efficient_forward(*call)
    monkeypatch.setattr(torch_modes, "ALWAYS_INVARIANT", False)
    assert torch_masks.efficient_forward(lambda *_, **__: theirs, *call[1:]) is theirs


def test_registration_asks_for_it_in_every_layer(monkeypatch):
    transformers = pytest.importorskip("transformers")
    layer, q, seen = torch.nn.Module(), torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16), []
    monkeypatch.setattr(
        hf, "flash_attn_func", lambda *x, **options: seen.append(options["batch_invariant"]) or x[0]
    )
    for asked in (True, False):
        hf.register(batch_invariant=asked)
        forward = transformers.AttentionInterface()["tl_attention"]
        forward(layer, q, q, q, None, is_causal=True)
        forward(layer, q, q, q, None, is_causal=True, batch_invariant=not asked)
    assert seen == [True, False, False, True]
    with pytest.raises(TypeError, match="batch_invariant: expected a bool, got None"):
        hf.register(batch_invariant=None)


def test_transformers_pass_it_to_each_function(monkeypatch):
    seen = []

    def noting(function):
        def noted(*arguments, **options):
            seen.append((function.__name__, options["batch_invariant"]))
            return function(*arguments, **options)

        return noted

    for module, name in (
        (hf, "flash_attn_func"),
        (hf, "flash_attn_varlen_func"),
        (hf_decode.kvcache, "flash_attn_with_kvcache"),
        (hf_flex, "flex_attention"),
    ):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    layer = torch.nn.Module()
    q, k, v = (torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16) for _ in "qkv")
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    for query, mask, how in (
        (q, None, {"is_causal": True}),
        (q, None, {"is_causal": True, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}),
        (q[:, :, :1], None, {}),
        (q, torch.ones(1, 1, 8, 8, dtype=torch.bool), {}),
    ):
        out, _ = hf.attention_forward(layer, query, k, v, mask, batch_invariant=True, **how)
        assert out.shape == (1, query.shape[2], 2, 64)
    names = "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "flex_attention"
    assert seen == [(name, True) for name in names]


@gpu
def test_example_recomputes_the_log_probabilities_of_a_rollout():
    path = Path(__file__).parents[1] / "examples/rollout_equals_training.py"
    subprocess.run([sys.executable, path, "--prompts", "3", "--tokens", "5"], check=True)
