"""Decode rows without a GPU: problems, caches, the check, the command with stubs, the page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

import pytest
import torch

import tl_attention
from tl_attention.compilation import building
from tl_attention.problem.attn_problem import DECODE
from tl_attention.reference import attention_reference
from tl_attention.testing import counts, environment, shapes, timer
from tl_attention.testing.shapes import Shape
from tl_attention.testing.timer import Timing

pytest.importorskip("rich", reason="the benchmark needs rich")
import ahead
import decode
import library
import performance
import rows as row_files
import run
import tables
from providers import PROVIDERS
from test_bench_report import fake_row, store

SMALL = [
    "3,4,2,1,50,32,full",
    "3,4,2,4,50,32,causal",
    "3,4,2,1,50,32,full,page=16",
    "5,8,1,1,300,32,full,ragged",
    "5,4,2,4,200,32,16,causal,page=16,ragged",
]


def cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None = None,
    causal: bool,
    return_softmax_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_attn_with_kvcache by the reference, one sequence after the other, for caches with all keys."""
    assert return_softmax_lse
    outs = []
    for entry, length in enumerate(cache_seqlens.tolist()):
        keys, values = (
            x[entry] if block_table is None else x[block_table[entry]].flatten(0, 1) for x in (k, v)
        )
        own = (q[entry], keys[:length], values[:length])
        outs.append(attention_reference(*(x[None] for x in own), causal=causal))
    out, lse = (torch.cat(parts) for parts in zip(*outs, strict=True))
    return out.to(q.dtype), lse


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tl_attention, "flash_attn_with_kvcache", cached, raising=False)
    monkeypatch.setattr(timer, "rotation", lambda nbytes: 2)


def caches_of(*shapes: Shape, dtype: torch.dtype = torch.bfloat16) -> decode.Caches:
    return decode.Caches(shapes, dtype, "cpu")


def test_decode_grid_has_every_group_and_runs_the_largest_last() -> None:
    assert [len(decode.chosen_shapes([f"decode-{group}-*"])) for group in decode.GROUPS] == [48] * 5 + [
        36
    ] * 2
    chosen = decode.chosen_shapes(["decode-*"])
    assert len(chosen) == len(set(chosen.values())) == len(decode.NAMED)
    assert all(str(Shape.parse(text)) == text for text in decode.NAMED.values())
    sizes = [counts.decode_bytes(shape) for shape in chosen.values()]
    assert sizes == sorted(sizes)
    assert {decode._fault(shape) for shape in chosen.values()} == {None}
    shape = chosen["decode-serving-h64-b8-32k"]
    assert str(shape) == "8,64,8,4,32768,128,128,causal,page=64,ragged"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("decode-nonsense", r"not in benchmarks/decode.py, which has decode-\(q1\|q4"),
        ("1,2,2,1,8,64,full,sink", "no options but page=.. and ragged, got sink"),
    ],
)
def test_decode_shapes_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode.chosen_shapes([text])


def test_decode_bytes_are_those_of_what_is_read_and_written(ours: None) -> None:
    for text in SMALL:
        shape = Shape.parse(text)
        (q, k, v, seqlens, _), _ = caches_of(shape).copies(shape, "bshd")
        out = q.new_empty(*q.shape[:3], shape.head_dim_v)
        row = shape.heads_kv * (k.shape[-1] + v.shape[-1])
        assert counts.decode_bytes(shape) == 2 * (q.numel() + out.numel() + int(seqlens.sum()) * row)
        assert counts.traffic(shape, DECODE) == counts.decode_bytes(shape)


def test_decode_ragged_lengths_are_fixed_and_fit_their_caches() -> None:
    lengths = shapes.sequences(Shape.parse("128,8,1,4,8192,128,causal,ragged"))
    queries, keys = zip(*lengths, strict=True)
    assert set(queries) == {4}
    assert keys[0] == max(keys) == 8192
    assert 512 <= min(keys) < 700
    assert len(set(keys)) > 120
    assert keys[1:4] == (788, 1002, 2553), "the same on every machine"


@pytest.mark.parametrize("text", SMALL)
def test_decode_caches_are_views_that_take_turns(text: str, ours: None) -> None:
    shape, larger = Shape.parse(text), Shape.parse("4,8,4,1,600,32,full")
    caches = caches_of(shape, larger)
    for layout in ("bshd", "bhsd") if not shape.options else ("bshd",):
        first, second = caches.copies(shape, layout)
        seen = []
        for q, k, v, seqlens, pages in (first, second):
            assert all(x.untyped_storage().data_ptr() == caches.values.data_ptr() for x in (k, v))
            assert all(x.is_contiguous() for x in (q, k, v))
            assert (seqlens.dtype, seqlens.shape) == (torch.int32, (shape.batch,))
            seen += [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in (k, v)]
            if pages is None:
                assert k.shape[0] == v.shape[0] == shape.batch
            else:
                assert sorted(pages.flatten().tolist()) == list(range(k.shape[0]))
                assert pages.shape == (shape.batch, math.ceil(shape.seqlen_k / shape.options.page))
        assert all(a[1] <= b[0] or b[1] <= a[0] for a in seen for b in seen if a != b)
        assert len(set(seen)) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", SMALL)
def test_decode_ours_is_right(text: str, dtype: torch.dtype, ours: None) -> None:
    shape = Shape.parse(text)
    inputs, _ = caches_of(shape, dtype=dtype).copies(shape, "bshd")
    result = PROVIDERS["tl_attention"].function("decode")(shape, *inputs, saves=False).launch(*inputs)
    row = decode.verify(shape, "bshd", result, inputs)
    assert row["correct"], row["reason"]


def shorter(inputs: library.Inputs) -> library.Inputs:
    q, k, v, seqlens, pages = inputs
    return q, k, v, seqlens - 1, pages


def swapped(inputs: library.Inputs) -> library.Inputs:
    q, k, v, seqlens, pages = inputs
    if pages is None:
        return q, k.flip(1), v, seqlens, pages
    return q, k, v, seqlens, pages.roll(1, 0)


def full(inputs: library.Inputs) -> library.Inputs:
    q, k, v, seqlens, pages = inputs
    return q, k, v, torch.full_like(seqlens, 199), pages


@pytest.mark.parametrize("change", [shorter, swapped, full])
@pytest.mark.parametrize("text", SMALL)
def test_decode_check_sees_what_is_wrong(text: str, change: Callable, ours: None) -> None:
    shape = Shape.parse(text)
    if change is full and not shape.options.ragged:
        pytest.skip("all lengths are the full ones")
    inputs, _ = caches_of(shape).copies(shape, "bshd")
    launch = PROVIDERS["tl_attention"].function("decode")(shape, *inputs, saves=False).launch
    row = decode.verify(shape, "bshd", launch(*change(inputs)), inputs, "when timed, ")
    assert row["status"] == "wrong"
    assert row["reason"].startswith(f"when timed, in {min(shape.batch * shape.heads_kv, 16)} checked heads, ")


def test_decode_check_sees_nan_in_heads_that_it_leaves_out(ours: None) -> None:
    shape = Shape.parse("40,2,2,1,20,32,full")
    inputs, _ = caches_of(shape).copies(shape, "bshd")
    out, lse = cached(*inputs[:3], cache_seqlens=inputs[3], causal=False, return_softmax_lse=True)
    assert decode.verify(shape, "bshd", (out, lse), inputs)["correct"]
    out[1, 0, 0] = math.nan
    assert decode.verify(shape, "bshd", (out, lse), inputs)["reason"].endswith("other heads have NaN or inf")


def fake_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> tuple[torch.Tensor]:
    """ATen's ops behind SDPA, which end in dropout_p and is_causal; cuDNN's has a bias before these."""
    *others, _, causal = rest
    bias = others[0] if others and isinstance(others[0], torch.Tensor) else None
    if causal:
        bias = torch.full((q.shape[-2], k.shape[-2]), -math.inf, dtype=q.dtype)
        bias = bias.triu(k.shape[-2] - q.shape[-2] + 1)
    return (torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True),)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("fa4", "1,2,1,1,64,576,512,full", "at most 256"),
        ("fa4", "1,2,1,1,64,40,full,page=16", "multiples of 16"),
        ("fa4", SMALL[2], r"flash_attn.cute.flash_attn_varlen_func cannot be imported"),
        ("flashinfer", SMALL[2], r"flashinfer.BatchDecodeWithPagedKVCacheWrapper cannot be imported"),
        ("flashinfer", "1,2,1,1,70,64,full", "caches of whole pages of 64 keys"),
        ("flashinfer", "1,2,1,4,64,32,causal,page=16", "one query per sequence"),
        ("flashinfer", "1,2,1,1,64,64,32,full,page=16", "one head_dim"),
    ],
)
def test_decode_libraries_say_what_they_do_not_take(name: str, text: str, words: str, ours: None) -> None:
    shape = Shape.parse(text)
    (row,) = decode.measure(shape, caches_of(shape), [name], 3)
    assert row["status"] == "skipped" and re.search(words, row["reason"]), row["reason"]


def test_decode_caches_that_are_too_large_are_skipped(ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape.parse("1000,8,8,1,131072,128,full")
    caches = caches_of(shape)
    assert caches.values.numel() == 0
    rows = decode.measure(shape, caches, run.providers.names("decode"), 3)
    assert {row["status"] for row in rows} == {"skipped"}
    assert rows[0]["reason"] == "its cache of 537 GB exceeds 100"


def time_interleaved(calls: dict, rounds: int, **timer: float) -> dict[str, Timing]:
    """Timings without a clock: every call takes as many milliseconds as its position."""
    assert timer == {"sample_ms": decode.SAMPLE_MS, "cap_ms": decode.CAP_MS}
    return {
        name: Timing((float(i),) * rounds, 1, "graph", copies[0]())
        for i, (name, copies) in enumerate(calls.items(), 1)
    }


@pytest.fixture
def gpu_stub(ours: None, monkeypatch: pytest.MonkeyPatch) -> list:
    """The kernels that would be built."""
    built = []
    monkeypatch.setattr(building, "build_all", lambda kernels, say: built.extend(kernels))
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", fake_sdpa)
    monkeypatch.setattr(decode.Caches, "__init__", partialmethod(decode.Caches.__init__, device="cpu"))
    monkeypatch.setattr(timer, "time_interleaved", time_interleaved)
    monkeypatch.setattr(timer, "measure_cublas_tflops", lambda: 700.0)
    monkeypatch.setattr(timer, "measure_copy_bandwidth", lambda: 4000.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(run, "is_hopper", lambda device: True)
    monkeypatch.setattr(environment, "facts", lambda command: ENVIRONMENT | {"commit": "c"})
    return built


ENVIRONMENT = {"gpu": "H", "power limit": "700 W", "torch": "2", "cuda": "13", "tilelang": "0.1.15"}


def test_decode_run_writes_rows_and_report(
    gpu_stub: list, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    argv = ["--pass", "decode", "--shapes", *SMALL[:3], "--out", str(tmp_path)]
    assert run.main([*argv, "--providers", "tl_attention", "fa2", "cudnn", "naive"]) == 0
    shapes = [Shape.parse(text) for text in SMALL[:3]]
    assert gpu_stub and gpu_stub == ahead.kernels_of_rows(shapes, "decode", "bfloat16")
    rows, _ = row_files.read(tmp_path / "decode.jsonl")
    assert [row["provider"] for row in rows[:3]] == ["tl_attention", "fa2", "cudnn"]
    plain, paged, queries = (row for row in rows if row["provider"] == "tl_attention")
    assert (plain["status"], queries["status"], paged["status"]) == ("ok",) * 3
    assert (paged["seqlen_k"], paged["options"], paged["pass"]) == (50, ["page=16"], "decode")
    assert plain["us"] == 1000.0
    assert plain["gbps"] == pytest.approx(counts.decode_bytes(Shape.parse(SMALL[0])) / 1e6)
    assert plain["pct_copy"] == pytest.approx(plain["gbps"] / 40)
    assert (plain["ratios"]["fa2"][1], plain["vs_best"]) == (2.0, 2.0)
    assert [row["status"] for row in rows if row["provider"] == "fa2"] == ["ok", "skipped", "ok"]
    text = (tmp_path / "performance.md").read_text()
    assert "### Decoding\n\nbf16, GB/s." in text
    assert tables.DECODE_CONVENTION in text
    assert "| problem | tl_attention | fa2 (torch sdpa) | cudnn | µs | % copy | error |" in text
    assert "| B3 H4/2 S1/50 d32 full page 16 |" in text
    assert "decoding, GB/s" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--shapes", "1,2,2,1,8,64,full,page=16"], "page and ragged are options of --pass decode alone"),
        (["--pass", "decode", "--shapes", "article"], "'article': not in benchmarks/decode.py"),
        (["--pass", "decode", "--deterministic"], "expected --pass bwd or fwd_bwd"),
        (["--providers", "flashinfer"], "--providers: expected one that has --pass fwd"),
        (["--pass", "decode", "--providers", "naive"], "--providers: expected one that has --pass decode"),
    ],
)
def test_decode_bad_arguments_end_with_a_message(
    argv: list[str], words: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        run.main(argv)
    assert words in " ".join(capsys.readouterr().err.split())


def decode_row(name: str, provider: str, gbps: float, **ratios: float) -> row_files.Row:
    shape = decode.chosen_shapes([name])[name]
    row = fake_row(provider, str(shape), counts.decode_bytes(shape) / gbps / 1e6, DECODE) | {"shape": name}
    return row | {"pct_copy": gbps / 40, "ratios": {peer: [x] * 3 for peer, x in ratios.items()}}


def test_decode_page_shows_groups_and_all_rows(tmp_path: Path) -> None:
    rows = [
        decode_row("decode-q1-h64-b32-8k", "tl_attention", 3900.0, cudnn=1.3),
        decode_row("decode-q1-h64-b32-8k", "cudnn", 3000.0),
        decode_row("decode-q1-h64-b8-8k", "tl_attention", 3000.0, cudnn=1.2),
        decode_row("decode-q1-h64-b8-8k", "cudnn", 2500.0),
        decode_row("decode-page16-h64-b32-8k", "tl_attention", 3510.0),
        decode_row("decode-page16-h64-b8-8k", "tl_attention", 3000.0),
    ]
    path = store(tmp_path, rows)
    facts = '"environment": {"copy": "4000 GB/s", '
    path.write_text(path.read_text().replace('"environment": {', facts))
    text = performance.section(tmp_path, tmp_path / "performance.md")
    assert "1.25x cudnn (faster in 2 of 2 rows)." in text
    assert "| decode-q1 | 2 | 97.5 (97.5) | 1.00 (1.00) | 1.25 (1.20) |" in text
    assert "| decode-page16 | 2 | 87.8 (87.8) | 0.95 (0.90) | – |" in text
    assert (
        "| B8 H64/8 S1/8192 d128 full | **3000** | 2500 | 89.6 | 75.0 | 0.50 |\n"
        "| B32 H64/8 S1/8192 d128 full | **3900** | 3000 | 275.6 | 97.5 | 0.50 |\n"
    ) in text, "in the order of their sizes"
