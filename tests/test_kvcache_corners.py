"""flash_attn_with_kvcache at its edges: no sequences, another default device, compiled debug checks, scalars and nested tensors."""

from __future__ import annotations

import random

import pytest
import torch
from protocol.launches import recording

from tl_attention import flash_attn_varlen_func, flash_attn_with_kvcache, kvcache_workspace_bytes
from tl_attention.api import kvcache
from tl_attention.checks.kvcache import check_page_strides, is_cache
from tl_attention.problem.options import Cache

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16 = torch.bfloat16


def arguments(device, batch, rotary=True, pages=False):
    """A call that appends 3 keys per sequence, of 2 queries."""
    torch.manual_seed(0)

    def random(*shape):
        return torch.randn(shape, dtype=BF16, device=device)

    shape = (4, 16, 2, 64) if pages else (max(batch, 1), 32, 2, 64)
    some = {
        "q": random(batch, 2, 4, 64), "k_cache": random(*shape), "v_cache": random(*shape),
        "k": random(batch, 3, 2, 64), "v": random(batch, 3, 2, 64),
        "cache_seqlens": torch.full((batch,), 7, dtype=torch.int32, device=device),
        "return_softmax_lse": True,
    }  # fmt: skip
    if rotary:
        some |= {"rotary_cos": random(32, 16), "rotary_sin": random(32, 16)}
    if pages:
        some["block_table"] = torch.arange(2 * batch, dtype=torch.int32, device=device).view(batch, 2)
    return some


@pytest.mark.parametrize("pages", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_kvcache_without_sequences(pages, rotary, causal, device):
    some = arguments(device, 0, rotary, pages)
    before = some["k_cache"].clone(), some["v_cache"].clone()
    out, lse = flash_attn_with_kvcache(**some, causal=causal)
    assert out.shape == (0, 2, 4, 64) and lse.shape == (0, 4, 2)
    assert torch.equal(some["k_cache"], before[0]) and torch.equal(some["v_cache"], before[1])


@pytest.mark.gpu
def test_kvcache_of_a_negative_length_reads_nothing_in_front_of_the_rotary_table():
    some = arguments("cuda", 2)
    some["cache_seqlens"].fill_(-1)
    for name in ("rotary_cos", "rotary_sin"):
        table = torch.cat([some[name].new_full((1, 16), torch.nan), some[name]])
        some[name] = table[1:]
    out, _ = flash_attn_with_kvcache(**some)
    assert out.isfinite().all()


@pytest.mark.parametrize("pages", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_kvcache_ignores_the_default_device(pages, causal, device):
    wanted = flash_attn_with_kvcache(**arguments(device, 2, pages=pages), causal=causal)
    some = arguments(device, 2, pages=pages)
    torch.set_default_device("meta")
    try:
        results = flash_attn_with_kvcache(**some, causal=causal)
    finally:
        torch.set_default_device(None)
    for x, y in zip(results, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("length", [5, torch.tensor([5, 0], dtype=torch.int32)])
@pytest.mark.parametrize("moves", [False, True])
def test_queries_are_rotated_without_new_keys(length, moves, device):
    """An append of no keys rotates the queries, as one of some keys does."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, rows, 2, 64, generator=generator).bfloat16().to(device) for rows in (3, 0))
    cos, sin = (torch.rand(32, 16, generator=generator).bfloat16().to(device) for _ in range(2))
    cache = torch.zeros(2, 32, 2, 64, dtype=torch.bfloat16, device=device)
    length = length.to(device) if isinstance(length, torch.Tensor) else length
    arguments = Cache(cache, cache.clone(), length), cos, sin, False, moves
    found = kvcache._append(q, k, k, *arguments)
    some = cache[:, :1].clone()
    wanted = kvcache._append(q, some, some, *arguments)
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.01)
    assert not torch.equal(found, q)


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_of_a_negative_length_are_not_rotated_without_new_keys(interleaved, device):
    """Lengths on a GPU are not checked, and an index in front of a table wraps, or ends the CUDA context."""
    q = torch.randn(3, 2, 4, 64, dtype=BF16, device=device)
    cos, sin = (torch.rand(32, 16, dtype=BF16, device=device) for _ in range(2))
    lengths = torch.tensor([-1, -100, 5], dtype=torch.int32, device=device)
    found = kvcache._rotated(q, lengths, cos, sin, interleaved, False)
    assert torch.equal(found[:2], q[:2]) and not torch.equal(found[2], q[2])


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_queries_of_a_cache_without_rows_are_not_rotated(pages, traced, device):
    """A table of no position has none to read; compiled code runs an op, which returns no argument of its own."""
    given = arguments(device, 2, pages=pages)
    for name in ("k", "v"):
        given[name] = given[name][:, :0]
    for name in ("rotary_cos", "rotary_sin"):
        given[name] = given[name][:0]
    if pages:
        given["block_table"] = given["block_table"][:, :0]
    else:
        given |= {name: given[name].expand(2, -1, -1, -1)[:, :0] for name in ("k_cache", "v_cache")}
    given["cache_seqlens"].zero_()
    call = torch.compile(flash_attn_with_kvcache, backend="eager") if traced else flash_attn_with_kvcache
    out, lse = call(**given)
    assert out.shape == given["q"].shape and not out.any() and lse.isneginf().all()


def test_no_kernel_is_asked_to_append_no_keys(monkeypatch):
    q, k, cos = (
        torch.randn(2, 3, 2, 64).bfloat16(),
        torch.zeros(2, 0, 2, 64).bfloat16(),
        torch.rand(32, 16).bfloat16(),
    )
    cache = torch.zeros(2, 32, 2, 64, dtype=BF16)
    call = q, k, k, Cache(cache, cache.clone(), 5), cos, cos, True, True
    wanted = kvcache._append(*call)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(kvcache.launch, "append_to_cache", None)
    assert torch.equal(kvcache._append(*call), wanted)


@pytest.mark.parametrize(
    "window",
    [{1: 0, 0: 1}, {0: 0, 3: 0}.keys(), {3, 0}, iter((3, 0))],
    ids=["dict", "keys", "set", "iterator"],
)
def test_kvcache_a_known_call_takes_sequences_as_windows_alone(window):
    some = arguments("cpu", 2, rotary=False)
    left, right = (3, 0) if not isinstance(window, dict | set) else window
    for _ in range(2):
        flash_attn_with_kvcache(**some, window_size=(left, right))
    with pytest.raises(TypeError, match=r"^window_size: expected a pair \(left, right\), got"):
        flash_attn_with_kvcache(**some, window_size=window)


def test_no_kernel_reads_an_empty_table_of_pages():
    """A table without columns has room for no key, also after a call with another table, and needs no workspace."""
    q, pages = torch.randn(2, 1, 4, 64).bfloat16(), torch.randn(8, 16, 2, 64).bfloat16()
    table, ends = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    lengths = torch.zeros(2, dtype=torch.int32)
    workspace = torch.empty(kvcache_workspace_bytes(2, 1, 4, 2, 64, 0), dtype=torch.uint8)

    def decode(table, **others):
        some = {"cache_seqlens": lengths, "return_softmax_lse": True}
        return flash_attn_with_kvcache(q, pages, pages, block_table=table, **some, **others)

    def prefill(table):
        some = {"block_table": table, "seqused_k": lengths, "return_attn_probs": True}
        return flash_attn_varlen_func(q[:, 0], pages, pages, ends, None, 1, 16, **some)[:2]

    with recording() as launches:
        for call in (decode, prefill):
            call(table)
            before = len(launches)
            results = [call(table[:, :0])]
            if call is decode:
                results.append(call(table[:, :0], workspace=workspace))
            assert len(launches) == before > 0
            for out, lse in results:
                assert not out.any() and (lse == -torch.inf).all()


def test_is_cache_agrees_with_the_check_of_a_cache():
    """is_cache() decides by usual strides first, without the check."""
    memory, rng, found = torch.zeros(200_000, dtype=torch.bfloat16), random.Random(0), set()
    for _ in range(3000):
        shape = *(rng.choice((1, 2, 3)) for _ in range(3)), 16
        steps = [rng.choice((0, 8, 16, 24, 32, 64, 96, 20, 384, 4096, 4104)) for _ in range(3)]
        x = memory.as_strided(shape, (*steps, 1), rng.choice((0, 8, 4)))
        try:
            check_page_strides("k_cache", x)
            expected = x.data_ptr() % 16 == 0
        except ValueError:
            expected = False
        assert is_cache(x) == expected, (shape, steps)
        found.add(expected)
    assert found == {True, False}


SHARED_MEMORY = {
    "k-from-k_cache": (lambda some: {"k": some["k_cache"][:, 6:9]}, "k: expected memory that k_cache does not use"),
    "k-at-its-place": (lambda some: {"k": some["k_cache"][:, 7:10]}, "k: expected memory that k_cache does not use"),
    "k-from-v_cache": (lambda some: {"k": some["v_cache"][:, :3]}, "k: expected memory that v_cache does not use"),
    "v-from-v_cache": (lambda some: {"v": some["v_cache"][:, 20:23]}, "v: expected memory that v_cache does not use"),
    "one-cache": (lambda some: {"v_cache": some["k_cache"]}, "v_cache: expected memory of its own"),
    "part-of-the-keys": (
        lambda some: {"v_cache": some["k_cache"][..., :32], "v": some["v"][..., :32]},
        "v_cache: expected memory of its own",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), SHARED_MEMORY.values(), ids=SHARED_MEMORY)
def test_new_keys_share_no_memory_with_caches(change, message, device):
    some = arguments(device, 2, rotary=False)
    some |= change(some)
    for _ in range(2):  # a repeated call, too
        with pytest.raises(ValueError, match=message):
            flash_attn_with_kvcache(**some)


def test_new_keys_beside_caches_in_one_buffer(device):
    """Parts of one allocation that do not overlap, and one cache of keys that are values, too, are right."""
    some = arguments(device, 2, rotary=False)
    expected, _ = flash_attn_with_kvcache(
        **some | {name: some[name].clone() for name in ("k_cache", "v_cache")}
    )
    names = "k", "v", "k_cache", "v_cache"
    memory = torch.cat([some[name].flatten() for name in names])
    parts = memory.split([some[name].numel() for name in names])
    parts = {name: part.view_as(some[name]) for name, part in zip(names, parts, strict=True)}
    assert torch.equal(flash_attn_with_kvcache(**some | parts)[0], expected)
    shared = some | {"v_cache": some["k_cache"], "v": some["k"]}
    apart = shared | {name: some["k_cache"].clone() for name in ("k_cache", "v_cache")}
    assert torch.equal(flash_attn_with_kvcache(**shared)[0], flash_attn_with_kvcache(**apart)[0])
