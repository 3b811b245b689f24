"""check_lengths: values of length and index tensors, by argument and by TL_ATTENTION_CHECK_LENGTHS, eager and compiled."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch

from tl_attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from tl_attention.checks import lengths as checks_lengths

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def ints(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def packed(device="cpu", **changes):
    """Arguments of flash_attn_varlen_func: sequences of 2, 3 and 4 queries, and of 5, 0 and 7 keys."""
    q, k, v = (torch.randn(n, 2, 64).bfloat16() for n in (9, 12, 12))
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": ints(0, 2, 5, 9),
        "cu_seqlens_k": ints(0, 5, 5, 12),
        "max_seqlen_q": 4,
        "max_seqlen_k": 7,
    } | changes
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


RIGHT = {
    "plain": {},
    "used": {"seqused_q": ints(2, 0, 4), "seqused_k": ints(5, 0, 1), "max_seqlen_k": 5},
    "rows-behind": {"cu_seqlens_k": ints(0, 5, 5, 10)},
    "tensors": {"max_seqlen_q": torch.tensor(4), "max_seqlen_k": torch.tensor(9)},
    "large-bounds": {"max_seqlen_q": 1000, "max_seqlen_k": 1000},
}
WRONG = {
    "start": ({"cu_seqlens_q": ints(1, 2, 5, 9)}, r"cu_seqlens_q\[0\]: expected 0, .*got 1"),
    "decreasing": ({"cu_seqlens_q": ints(0, 5, 2, 9)}, r"cu_seqlens_q\[2\]: expected 5 to 9, .*sequence 1 .*rows of q, got 2"),
    "past-the-end": ({"cu_seqlens_k": ints(0, 5, 5, 13)}, r"cu_seqlens_k\[3\]: expected 5 to 12, .*rows of k, got 13"),
    "garbage": ({"cu_seqlens_k": ints(0, 2**30, 5, 12)}, r"cu_seqlens_k\[1\]: expected 0 to 12, .*got 1073741824"),
    "negative": ({"cu_seqlens_q": ints(0, -1, 5, 9)}, r"cu_seqlens_q\[1\]: expected 0 to 9, .*got -1"),
    "used-long": ({"seqused_q": ints(2, 4, 4)}, r"seqused_q\[1\]: expected 0 to 3, the length of sequence 1, got 4"),
    "used-negative": ({"seqused_k": ints(-2, 0, 7)}, r"seqused_k\[0\]: expected 0 to 5, the length of sequence 0, got -2"),
    "max-q": ({"max_seqlen_q": 3}, r"max_seqlen_q: expected at least 4, the length of sequence 2, got 3"),
    "max-k": ({"max_seqlen_k": 0}, r"max_seqlen_k: expected at least 7, the length of sequence 2, got 0"),
    "max-tensor": ({"max_seqlen_k": torch.tensor(6)}, r"max_seqlen_k: expected at least 7, the length of sequence 2, got 6"),
}  # fmt: skip


@devices
@pytest.mark.parametrize("changes", RIGHT.values(), ids=RIGHT)
def test_right_lengths_change_nothing(changes, device):
    arguments = packed(device, **changes)
    results = []
    for check in (False, True):
        q, k, v = (arguments[name].clone().requires_grad_() for name in "qkv")
        given = arguments | {"q": q, "k": k, "v": v, "deterministic": True}
        out, lse, _ = flash_attn_varlen_func(**given, return_attn_probs=True, check_lengths=check)
        rows = slice(arguments["cu_seqlens_k"][-1])
        results.append((out, lse, *torch.autograd.grad(out.sum(), (q, k, v))))
    for x, y in zip(*results, strict=True):
        keep = rows if x.shape[0] == 12 else slice(None)
        assert torch.equal(x[keep], y[keep])


@devices
@pytest.mark.parametrize(("changes", "text"), WRONG.values(), ids=WRONG)
def test_wrong_lengths_are_named(changes, text, device):
    with pytest.raises(IndexError, match=text):
        flash_attn_varlen_func(**packed(device, **changes), check_lengths=True)


def test_wrong_lengths_are_named_in_a_compiled_call():
    """Values of tensors, which one graph serves."""
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    good = packed(seqused_q=ints(2, 3, 4), seqused_k=ints(5, 0, 7))
    assert torch.equal(compiled(**good, check_lengths=True), flash_attn_varlen_func(**good))
    for changes, text in WRONG.values():
        with pytest.raises(IndexError, match=text):
            compiled(**good | changes, check_lengths=True)


def test_packed_forms_name_their_own_arguments():
    qkv = torch.randn(9, 3, 2, 64).bfloat16()
    with pytest.raises(IndexError, match=r"^cu_seqlens\[3\]: expected 5 to 9, .*rows of qkv, got 10"):
        flash_attn_varlen_qkvpacked_func(qkv, ints(0, 2, 5, 10), 5, check_lengths=True)
    with pytest.raises(IndexError, match=r"^max_seqlen: expected at least 4"):
        flash_attn_varlen_qkvpacked_func(qkv, ints(0, 2, 5, 9), 3, check_lengths=True)
    with pytest.raises(IndexError, match=r"^cu_seqlens_k\[1\]: expected 0 to 9, .*rows of kv, got 10"):
        flash_attn_varlen_kvpacked_func(
            qkv[:, 0], qkv[:, :2], ints(0, 9), ints(0, 10), 9, 10, check_lengths=True
        )


@pytest.mark.parametrize("value", [1, 0, None, "1", torch.tensor(True)])
def test_switches_are_bools(value):
    with pytest.raises(TypeError, match="check_lengths: expected a bool, got"):
        flash_attn_varlen_func(**packed(), check_lengths=value)
    for name in ("check_lengths", "check_block_table", "return_softmax_lse"):
        with pytest.raises(TypeError, match=f"{name}: expected a bool, got"):
            flash_attn_with_kvcache(**cached(), **{name: value})


def test_errors_of_metadata_come_first():
    with pytest.raises(TypeError, match=r"q: expected a torch\.Tensor, got list"):
        flash_attn_varlen_func(**packed() | {"q": [1.0]}, check_lengths=True)
    with pytest.raises(TypeError, match=r"cu_seqlens_q: expected torch\.int32"):
        flash_attn_varlen_func(**packed(cu_seqlens_q=ints(0, 2, 5, 9).long()), check_lengths=True)
    with pytest.raises(TypeError, match="max_seqlen_q: expected an int"):
        flash_attn_varlen_func(**packed(max_seqlen_q=2.5), check_lengths=True)
    with pytest.raises(ValueError, match=r"q: expected 3 dimensions \[total, heads, head_dim\]"):
        flash_attn_varlen_func(**packed(q=torch.ones((), dtype=torch.bfloat16)), check_lengths=True)


def test_environment_variable_checks_every_call(monkeypatch):
    monkeypatch.setattr(checks_lengths, "ALWAYS", True)
    with pytest.raises(IndexError, match=r"cu_seqlens_q\[2\]: expected 5 to 9"):
        flash_attn_varlen_func(**packed(cu_seqlens_q=ints(0, 5, 2, 9)))
    with pytest.raises(IndexError, match=r"rotary_cos: expected at least 34 rows"):
        flash_attn_with_kvcache(**cached(new=3, seqlens=(29, 3), seqlen_q=5, rotary=True, causal=True))


def test_environment_variable_is_read_at_import(monkeypatch):
    monkeypatch.setenv("TL_ATTENTION_CHECK_LENGTHS", "1")
    assert runpy.run_path(checks_lengths.__file__)["ALWAYS"] is True and checks_lengths.ALWAYS is False


def cached(page=None, new=0, seqlens=(20, 3), seqlen_q=2, rotary=False, device="cpu", **changes):
    """Arguments of flash_attn_with_kvcache: two sequences with room for 32 keys each."""
    shape = (2, 32, 2, 64) if page is None else (9, page, 2, 64)
    arguments = {
        "q": torch.randn(2, seqlen_q, 4, 64),
        "k_cache": torch.randn(shape),
        "v_cache": torch.randn(shape),
    }
    if new:
        arguments |= {"k": torch.randn(2, new, 2, 64), "v": torch.randn(2, new, 2, 64)}
    if rotary:
        angles = torch.rand(32, 16)
        arguments |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    arguments = {name: x.bfloat16() for name, x in arguments.items()} | {"cache_seqlens": ints(*seqlens)}
    if page is not None:
        arguments["block_table"] = ints(*range(64 // page)).view(2, -1)
    arguments |= changes
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


WRONG_CACHES = {
    "length": ({"seqlens": (33, 3)}, r"cache_seqlens\[0\]: expected 0 to 32, as .* room for 32 keys and 0 are new, got 33"),
    "length-of-pages": ({"page": 16, "seqlens": (3, 40)}, r"cache_seqlens\[1\]: expected 0 to 32, as .* room for 32 keys.*got 40"),
    "length-and-new-of-pages": ({"page": 16, "seqlens": (3, 31), "new": 2}, r"cache_seqlens\[1\]: expected 0 to 30, .*2 are new, got 31"),
    "more-new-than-room": ({"new": 33, "seqlens": (0, 0)}, r"k: expected at most 32 new keys.*got 33"),
    "same-cache": (
        {"new": 1, "cache_batch_idx": ints(1, 1)},
        r"cache_batch_idx\[1\]: expected a cache of its own, as new keys are written, got 1, which cache_batch_idx\[0\] has too",
    ),
    "same-page": (
        {"new": 1, "page": 16, "block_table": torch.stack((ints(0, 1), ints(1, 2)))},
        r"block_table\[1, 0\]: expected a page of its own.*got 1, which block_table\[0, 1\] has too",
    ),
    "page-read-by-another": (
        {"new": 1, "page": 16, "seqlens": (20, 20), "block_table": torch.stack((ints(0, 1), ints(2, 1)))},
        r"block_table\[1, 1\]: expected a page of its own.*got 1, which block_table\[0, 1\] has too",
    ),
    "page-twice": (
        {"new": 1, "page": 16, "seqlens": (20, 3), "block_table": torch.stack((ints(1, 1), ints(2, 3)))},
        r"block_table\[0, 1\]: expected a page of its own.*got 1, which block_table\[0, 0\] has too",
    ),
    "position-of-a-query": (
        {"new": 1, "rotary": True, "seqlens": (3, 30), "seqlen_q": 3, "causal": True},
        r"rotary_cos: expected at least 33 rows, as sequence 1 has position 32, got 32",
    ),
    "position-of-a-query-in-a-window": (
        {"new": 1, "rotary": True, "seqlens": (31, 3), "seqlen_q": 3, "window_size": (3, 3)},
        r"rotary_cos: expected at least 34 rows, as sequence 0 has position 33, got 32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [x for x in WRONG if x != "max-tensor"])
def test_wrong_lengths_on_the_cpu_are_named_without_the_option(name):
    changes, text = WRONG[name]
    with pytest.raises(IndexError, match=text):
        flash_attn_varlen_func(**packed(**changes))


def test_wrong_lengths_of_packed_tensors_are_named_as_passed():
    with pytest.raises(IndexError, match=r"cu_seqlens\[1\]: expected 0 to 9, .*rows of qkv, got 10"):
        flash_attn_varlen_qkvpacked_func(torch.randn(9, 3, 2, 64), ints(0, 10), 10)


@devices
@pytest.mark.parametrize("name", ["check_lengths", "check_block_table"])
@pytest.mark.parametrize(("changes", "text"), WRONG_CACHES.values(), ids=WRONG_CACHES)
def test_wrong_caches_are_named(changes, text, name, device):
    with pytest.raises((IndexError, ValueError), match=text):
        flash_attn_with_kvcache(**cached(**changes, device=device), **{name: True})


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", [x for x in WRONG_CACHES if x != "more-new-than-room"])
def test_wrong_caches_are_named_in_a_compiled_call(name):
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    changes, text = WRONG_CACHES[name]
    with pytest.raises(IndexError, match=text):
        compiled(**cached(**changes), check_lengths=True)


RIGHT_CACHES = {
    "plain": {},
    "append": {"new": 2},
    "int-length": {"cache_seqlens": 20},
    "full": {"cache_seqlens": None},
    "same-cache-without-new-keys": {"cache_batch_idx": ints(1, 1)},
    "one-cache-divided": {"new": 1, "seqlens": (3, 20), "cache_batch_idx": ints(1, 1), "cache_leftpad": ints(0, 10)},
    "pages": {"page": 16, "new": 2},
    "shared-first-page": {
        "page": 16, "new": 2, "seqlens": (20, 18), "block_table": torch.stack((ints(5, 1), ints(5, 2))),
    },
    "unused-entries": {"page": 16, "new": 2, "seqlens": (3, 3), "block_table": torch.stack((ints(5, 6), ints(6, -1)))},
    "rotary": {"new": 3, "rotary": True, "seqlens": (29, 0), "seqlen_q": 3, "causal": True},
    "rotary-at-one-position": {"new": 1, "rotary": True, "seqlens": (31, 0), "seqlen_q": 9},
    "no-queries": {"new": 1, "rotary": True, "seqlens": (31, 0), "seqlen_q": 0, "causal": True},
}  # fmt: skip


@pytest.mark.in_turn(16)
@devices
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("changes", RIGHT_CACHES.values(), ids=RIGHT_CACHES)
def test_right_caches_change_nothing(changes, compiled, device):
    torch._dynamo.reset()
    call = flash_attn_with_kvcache
    checked = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    arguments = cached(**changes, device=device)
    caches = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    out, lse = checked(**arguments, return_softmax_lse=True, check_lengths=True)
    expected = call(**arguments | caches, return_softmax_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert all(torch.equal(arguments[name], x) for name, x in caches.items())


@devices
def test_positions_past_the_rotary_table_are_not_rotated(device):
    """A query past the cache keeps its columns; all others are as with a longer table."""
    arguments = cached(new=1, rotary=True, seqlens=(30, 31), seqlen_q=4, causal=True, device=device)
    longer = dict(arguments)
    for name, fill in (("rotary_cos", 1.0), ("rotary_sin", 0.0)):
        rest = torch.full((9, 16), fill, dtype=torch.bfloat16, device=device)
        longer[name] = torch.cat((arguments[name], rest))
    caches = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    assert torch.equal(flash_attn_with_kvcache(**arguments), flash_attn_with_kvcache(**longer | caches))


def test_a_shorter_rotary_table_than_the_cache_is_an_error():
    arguments = cached(new=1, rotary=True, seqlen_q=4)
    arguments |= {name: arguments[name][:31] for name in ("rotary_cos", "rotary_sin")}
    with pytest.raises(ValueError, match=r"rotary_cos: expected .*at least 32 positions.*got \(31, 16\)"):
        flash_attn_with_kvcache(**arguments)


def test_ops_pass_opcheck(monkeypatch):
    calls = []
    for module, name in (
        (checks_lengths, "check_lengths_op"),
        (sys.modules["tl_attention.api.kvcache"], "check_cache_op"),
    ):
        op = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, op=op: calls.append((op, x)) or op(*x))
    flash_attn_varlen_func(**packed(), check_lengths=True)
    flash_attn_with_kvcache(**cached(page=16, new=1, rotary=True), check_lengths=True)
    assert len(calls) == 2
    for op, arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
def test_captured_calls_warn_and_are_not_checked():
    good, cache = packed("cuda"), cached(new=1, device="cuda")
    flash_attn_varlen_func(**good), flash_attn_with_kvcache(**cache)  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.warns(UserWarning, match="check_lengths: values are not checked in CUDA graph capture"),
        torch.cuda.graph(graph),
    ):
        out = flash_attn_varlen_func(**good, check_lengths=True)
        cache_out = flash_attn_with_kvcache(**cache, check_lengths=True)
    graph.replay()
    assert torch.equal(out, flash_attn_varlen_func(**good))
    assert torch.equal(cache_out, flash_attn_with_kvcache(**cache))


@pytest.mark.gpu
def test_calls_without_the_switch_do_not_synchronize():
    arguments, cache = packed("cuda"), cached(new=1, device="cuda")
    flash_attn_varlen_func(**arguments), flash_attn_with_kvcache(**cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_varlen_func(**arguments), flash_attn_with_kvcache(**cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_dense_functions_have_no_lengths_to_check():
    with pytest.raises(TypeError, match="check_lengths"):
        flash_attn_func(*torch.randn(3, 1, 4, 2, 64).bfloat16(), check_lengths=True)
