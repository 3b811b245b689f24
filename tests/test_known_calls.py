"""Eager calls with options on a GPU whose launches are replaced: a known signature skips the checks, and only a call like the first."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import pytest
import torch
from protocol.launches import fake_gpu
from torch.utils._python_dispatch import BaseTorchDispatchMode

from tl_attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flex_attention,
    launch,
    mha_bwd_interface,
    mha_fwd_interface,
)
from tl_attention.api import kvcache
from tl_attention.config.buckets import bwd_bucket
from tl_attention.problem.attn_problem import KERNEL_ARGUMENTS, OPTION_ARGUMENTS
from tl_attention.problem.options import MAX_WINDOW, PUBLIC_NAMES, TENSOR_RULES, Options
from tl_attention.torch_ops import attend as attend_module
from tl_attention.torch_ops import ops

BF16 = torch.bfloat16
HEADS = 2


@pytest.fixture
def kernels():
    """Arguments of each kernel that a call launches, in a list."""
    launched: list[tuple] = []
    with fake_gpu(lambda problem, config: lambda *given: launched.append(given)):
        yield launched


@pytest.fixture
def checks(monkeypatch):
    """Number of calls that were checked, as the length of a list."""
    done: list[None] = []
    check = attend_module.check_fwd
    monkeypatch.setattr(attend_module, "check_fwd", lambda *x, **y: done.append(None) or check(*x, **y))
    return done


def leaves(*shape):
    return [torch.randn(shape, dtype=BF16, requires_grad=True) for _ in range(3)]


def packed(*ends):
    starts = torch.tensor([0, *ends], dtype=torch.int32)
    return starts, starts, 16, 16


def options():
    """name -> (lengths of packed sequences or (), options of a call)."""
    sink = torch.randn(HEADS, requires_grad=True)
    used = {"seqused_k": torch.tensor([3, 5], dtype=torch.int32)}
    return {
        "window": ((), {"window_size": (5, 2), "dropout_p": False}),
        "list": ((), {"window_size": [5, None]}),
        "softcap": ((), {"softcap": 20, "causal": True}),
        "alibi": ((), {"alibi_slopes": torch.rand(HEADS)}),
        "alibi-strided": ((), {"alibi_slopes": torch.rand(2 * HEADS)[::2]}),
        "sink": ((), {"learnable_sink": sink}),
        "sink-strided": ((), {"learnable_sink": torch.randn(2 * HEADS, requires_grad=True)[::2]}),
        "parameter": ((), {"learnable_sink": torch.nn.Parameter(sink.detach()), "window_size": (3, 0)}),
        "dropout": ((), {"dropout_p": 0.5, "rng_state": torch.zeros(2, dtype=torch.int64)}),
        "splits": ((), {"num_splits": 2}),
        "varlen": (packed(9, 16), {}),
        "varlen-everything": (packed(9, 16), {"window_size": (3, 3), "learnable_sink": sink, **used}),
    }


def attend(qkv, lengths, asked):
    return flash_attn_varlen_func(*qkv, *lengths, **asked) if lengths else flash_attn_func(*qkv, **asked)


def facts(launched):
    """Arguments of launches: values of numbers, metadata of tensors, kinds of pointers."""
    return [
        [
            (x.shape, x.stride(), x.dtype, type(x))
            if isinstance(x, torch.Tensor)
            else (x if isinstance(x, (int, float)) else type(x))
            for x in given
        ]
        for given in launched
    ]


@pytest.mark.parametrize("name", options())
def test_a_known_call_launches_the_same_without_checks(name, kernels, checks):
    lengths, asked = options()[name]
    qkv = leaves(*((16,) if lengths else (2, 16)), HEADS, 64)
    inputs = [*qkv, *([asked["learnable_sink"]] if "learnable_sink" in asked else [])]
    found = []
    for _ in range(3):
        kernels.clear()
        out = attend(qkv, lengths, asked)
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
        found.append((facts(kernels), [(x.shape, x.dtype) for x in (out, *grads)]))
    assert len(checks) == 1
    assert found[0] == found[1] == found[2] and len(found[0][0]) > 1
    assert found[0][1] == [(out.shape, out.dtype), *((x.shape, x.dtype) for x in inputs)]
    with torch.no_grad():
        assert attend(qkv, lengths, asked).shape == out.shape
    assert len(checks) == 1


def test_a_known_call_sees_the_tensors_of_now(kernels):
    """Slopes, sinks and lengths of a later call reach the kernels, also in the backward of an earlier one."""
    qkv, outs = leaves(2, 16, HEADS, 64), []
    for value in (1.0, 2.0):
        kernels.clear()
        slopes, sink = torch.full((HEADS,), value), torch.full((HEADS,), -value)
        outs.append(flash_attn_func(*qkv, alibi_slopes=slopes, learnable_sink=sink, softcap=3.0))
        ((*_, cap, its_slopes, its_sink, _, _, _),) = kernels
        assert cap == 3.0 and its_sink is sink and its_slopes.data_ptr() == slopes.data_ptr()
    kernels.clear()
    torch.autograd.grad(outs[0], qkv, outs[0])
    seen = [x for given in kernels for x in given if isinstance(x, torch.Tensor) and x.shape == (2, HEADS)]
    assert len(seen) and all(torch.equal(x, torch.ones(2, HEADS)) for x in seen)


def test_kernels_get_a_strided_state_of_dropout_contiguous(kernels):
    qkv, state = leaves(2, 16, HEADS, 64), torch.tensor([5, 0, 7, 0])[::2]
    for _ in range(2):  # checked, then known
        kernels.clear()
        out = flash_attn_func(*qkv, 0.5, rng_state=state)
        torch.autograd.grad(out, qkv, out)
        found = [x for given in kernels for x in given if getattr(x, "dtype", None) == torch.int64]
        assert len(found) >= 2 and all(x.tolist() == [5, 7] and x.is_contiguous() for x in found)


@pytest.mark.parametrize("case", ["used", "odd-columns", "no-keys"])
def test_launches_write_an_out_of_inference_mode(case, kernels):
    """Beside the kernels, operations of torch write to it: zeros, and columns that were padded."""
    q = k = torch.randn(16, HEADS, 60 if case == "odd-columns" else 64, dtype=BF16)
    starts, zeros = (torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 16], [0, 0, 0]))
    with torch.inference_mode():
        out = torch.ones_like(q)
    ends, used = zeros if case == "no-keys" else starts, zeros[1:] if case == "used" else None
    k = k[: ends[-1]]
    assert flash_attn_varlen_func(q, k, k, starts, ends, 9, 9, out=out, seqused_q=used) is out
    assert case == "odd-columns" or not out.any()


BAD = {
    "bool": ("window", {"window_size": (True, 2)}, r"^window_size: expected ints"),
    "float": ("window", {"window_size": (5.0, 2)}, r"^window_size: expected ints"),
    "softcap": ("softcap", {"softcap": torch.tensor(20)}, r"^softcap: "),
    "splits": ("splits", {"num_splits": 2.0}, r"^num_splits: "),
    "causal": ("window", {"causal": 0}, r"^causal: "),
    "deterministic": ("window", {"deterministic": 0}, r"^deterministic: "),
    "scale": ("window", {"softmax_scale": float("nan")}, r"^softmax_scale: "),
    "precision": ("window", {"precision": "high"}, r"^precision: "),
    "slopes-gradient": ("alibi", {"alibi_slopes": torch.rand(HEADS).requires_grad_()}, r"^alibi_slopes: "),
    "slopes-dtype": ("alibi", {"alibi_slopes": torch.rand(HEADS).double()}, r"^alibi_slopes: "),
    "slopes-device": ("alibi", {"alibi_slopes": torch.rand(HEADS, device="meta")}, r"^alibi_slopes: "),
    "slopes-list": ("alibi", {"alibi_slopes": [0.5] * HEADS}, r"^alibi_slopes: "),
    "sink": ("sink", {"learnable_sink": torch.rand(HEADS + 1)}, r"^learnable_sink: "),
    "sink-sparse": ("sink", {"learnable_sink": torch.rand(HEADS + 1).to_sparse()}, r"^learnable_sink: "),
    "state": ("dropout", {"rng_state": torch.zeros(2)}, r"^rng_state: "),
    "used": ("varlen-everything", {"seqused_k": torch.zeros(3, dtype=torch.int32)}, r"^seqused_k: "),
    "starts": ("varlen", {"cu_seqlens_k": torch.zeros(6, dtype=torch.int32)[::2]}, r"^cu_seqlens_k: "),
    "longest": ("varlen", {"max_seqlen_k": True}, r"^max_seqlen_k: "),
    "negative": ("varlen", {"max_seqlen_k": -1}, r"^max_seqlen_k: "),
}


@pytest.mark.parametrize("name", BAD)
def test_a_known_call_hides_no_error(name, kernels):
    known, bad, message = BAD[name]
    lengths, asked = options()[known]
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    asked = asked | dict(zip(names, lengths))  # noqa: B905
    function = flash_attn_varlen_func if lengths else flash_attn_func
    qkv = leaves(*((16,) if lengths else (2, 16)), HEADS, 64)
    for _ in range(2):
        function(*qkv, **asked)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        function(*qkv, **asked | bad)


def test_other_metadata_and_modes_are_no_known_call(kernels, checks, monkeypatch):
    q, k, v = leaves(2, 16, HEADS, 64)
    others = [
        (q[:1], k[:1], v[:1]),
        (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        tuple(x.half() for x in (q, k, v)),
    ]
    for number, tensors in enumerate(((q, k, v), *others), 1):
        for _ in range(2):
            flash_attn_func(*tensors, window_size=(5, 2))
        assert len(checks) == number
    flash_attn_func(q, k, v, window_size=(5, 3))
    assert len(checks) == 5

    seen = []
    fwd_op = ops.fwd_op
    monkeypatch.setattr(ops, "fwd_op", lambda *x: seen.append(x) or fwd_op(*x))
    window = {"window_size": (5, 2)}
    flash_attn_func(torch.nn.Parameter(q.detach()), k, v, **window)  # a subclass of Tensor
    with BaseTorchDispatchMode():
        flash_attn_func(q, k, v, **window)
    torch.vmap(lambda x: flash_attn_func(x, x, x, **window))(torch.stack([q, q]))
    assert len(seen) == 3


def test_a_bound_of_lengths_in_a_tensor_is_not_kept(kernels, checks):
    starts, qkv = torch.tensor([0, 9, 16], dtype=torch.int32), leaves(16, HEADS, 64)
    bound = torch.nn.Parameter(torch.tensor(16), requires_grad=False)
    for _ in range(2):
        flash_attn_varlen_func(*qkv, starts, starts, bound, bound)
    assert len(checks) == 2 and not launch.fwd.plan_cache.calls


@pytest.mark.parametrize("max_logits", [False, True])
def test_a_call_that_launches_nothing_or_on_copies_is_not_kept(max_logits, kernels, checks):
    q, k = torch.randn(2, 16, HEADS, 64), torch.randn(2, 0, HEADS, 64)
    asked = {"return_attn_probs": True, "return_max_logits": max_logits}
    for _ in range(2):
        out, lse, _, *largest = flash_attn_func(q, k, k, **asked)
        assert not out.any() and len(largest) == max_logits
        assert all((x == -torch.inf).all() and x.shape == (2, HEADS, 16) for x in (lse, *largest))
    assert len(checks) == 2 and not kernels
    narrow = [torch.randn(2, 16, HEADS, 12, dtype=BF16) for _ in range(3)]
    for number in (1, 2):
        assert flash_attn_func(*narrow, **asked)[0].shape == (2, 16, HEADS, 12)
        assert len(checks) == 2 + number and len(kernels) == number
    assert not launch.fwd.plan_cache.calls


@pytest.mark.parametrize("field", TENSOR_RULES)
def test_each_tensor_of_options_is_in_the_signature(field, kernels, checks):
    rule, qkv = TENSOR_RULES[field], leaves(2, 16, HEADS, 64)
    sizes = {"batch": 2, "heads": HEADS}
    x = torch.ones([sizes.get(n, n) for n in rule.shapes[0]], dtype=rule.dtypes[0])
    for dropout_p in (0.0, 0.5):
        done = len(checks)
        for _ in range(2):
            flash_attn_func(*qkv, dropout_p)
        assert len(checks) == done + 1
        for _ in range(2):
            flash_attn_func(*qkv, dropout_p, **{PUBLIC_NAMES[field]: x})
        assert len(checks) == done + 2


def test_fp32_calls_are_known_by_their_precision(kernels, checks):
    qkv = [torch.randn(2, 16, HEADS, 64) for _ in range(3)]
    words, seen = ["highest", "high", "highest", "high"], []
    before = torch.get_float32_matmul_precision()
    try:
        for word in words:
            torch.set_float32_matmul_precision(word)
            kernels.clear()
            flash_attn_func(*qkv)
            seen.append(facts(kernels))
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(checks) == 2 and seen[0] == seen[2] != seen[1] == seen[3]
    kernels.clear()
    flash_attn_func(*qkv, precision="high")
    assert len(checks) == 2 and facts(kernels) == seen[1]
    with pytest.raises(ValueError, match=r"^precision: "):
        flash_attn_func(*qkv, precision="")


def test_options_that_are_off_run_the_plain_call(kernels, checks):
    qkv, found = leaves(2, 16, HEADS, 64), []
    for asked in ({"causal": True}, *[{"window_size": (None, 0)}] * 3):
        kernels.clear()
        flash_attn_func(*qkv, **asked)
        found.append(facts(kernels))
    assert found[0] == found[1] == found[2] == found[3] and len(checks) == 2


def test_known_calls_hold_no_tensor_and_are_bounded(kernels, monkeypatch):
    monkeypatch.setattr(launch.common, "MAX_PLANS", 8)
    refs = []
    for size in range(1, 20):
        qkv, lengths = leaves(16, HEADS, 64), packed(size, size + 1)
        slopes, sink = torch.rand(HEADS), torch.rand(HEADS, requires_grad=True)
        asked = {"alibi_slopes": slopes, "learnable_sink": sink, "window_size": (size, 0)}
        out = attend(qkv, lengths, asked)
        torch.autograd.grad(out, (*qkv, sink), out)
        refs += map(weakref.ref, (*qkv, lengths[0], slopes, sink, out))
        cache = launch.fwd.plan_cache
        assert len(cache.calls) == (size - 1) % 8 + 1 and len(cache.plans) <= 8
    kernels.clear()
    del qkv, lengths, slopes, sink, asked, out
    gc.collect()
    assert not any(ref() is not None for ref in refs)


@pytest.mark.parametrize("longest", [(128, 129), (192, 193), (1024, 1025), (4096, 4097)])
def test_the_config_of_a_packed_backward_does_not_follow_earlier_calls(longest, kernels, monkeypatch):
    """Lengths of keys on both sides of the limit of a bucket, below longer queries."""
    picked = []
    pick_config = launch.common.configs.pick_config
    monkeypatch.setattr(
        launch.common.configs, "pick_config", lambda *x: picked.append(x[1]) or pick_config(*x)
    )
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (16, 12))
    q, k, v = leaves(16, 4, 64)[0], *leaves(12, 2, 64)[1:]
    for keys in longest:
        out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 8192, keys)
        picked.clear()
        torch.autograd.grad(out, (q, k, v), out)
        assert picked == [bwd_bucket(False, 4, 2, keys)]


def test_each_thread_has_its_own_known_calls(kernels, checks):
    qkv = leaves(2, 16, HEADS, 64)

    def run():
        for _ in range(2):
            flash_attn_func(*qkv, softcap=5.0)

    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(checks) == 2


def test_functions_that_are_options_are_known(kernels, checks):
    qkv = leaves(2, HEADS, 16, 64)
    for _ in range(3):
        flex_attention(*qkv, mask_mod=lambda b, h, q, k: (q >= k) & (q - k <= 5))
    assert len(checks) == 1


@pytest.mark.parametrize("names", ((), tuple(OPTION_ARGUMENTS)), ids=("off", "on"))
def test_each_argument_of_options_has_a_value_of_its_type(names, kernels):
    sink, place = torch.rand(HEADS, dtype=BF16), torch.zeros(1, 8, dtype=torch.int32)
    tensors = {"rng_state": torch.zeros(2, dtype=torch.int64), "alibi_slopes": torch.rand(HEADS)}
    options = Options((5, 2), 3.0, 0.5, sink=sink, place=place, **tensors) if names else None
    values = launch.common.OptionValues(names, 2, 0)(options)
    assert KERNEL_ARGUMENTS[-1].name == "Table"  # launches of packed sequences replace the last one
    for argument, value in zip(KERNEL_ARGUMENTS, values, strict=True):
        if argument.shape:
            assert (value.dtype, value.ndim) == (getattr(torch, argument.dtype), len(argument.shape))
            assert not (names and argument.is_per_entry) or value.shape == (2, HEADS)
        else:
            assert type(value) is (float if argument.dtype == "float32" else int)


def test_options_keep_their_key_without_tensors():
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    some = Options(cu_seqlens_q=starts, cu_seqlens_k=starts, window=(3, 4), sink=torch.zeros(2))
    bare = some.without_tensors()
    assert bare.tensors() == (None,) * 9 and bare.key == some.key and bare.names == some.names
    other = starts.clone()
    again = bare.with_tensors(cu_seqlens_q=other)
    assert again.cu_seqlens_q is other and again.window == (3, 4) and bare.cu_seqlens_q is None


def negated(x):
    """A view of -x whose sign is in a bit of the tensor: its memory holds x, negated."""
    view = torch._neg_view(x.detach().neg().requires_grad_(x.requires_grad))
    assert view.is_neg() and torch.equal(view, x)
    return view


def in_memory(given):
    """First element of each tensor and pointer in the arguments of a launch, as its memory has it."""
    found = []
    for x in given:
        if isinstance(x, torch.Tensor):
            assert not x.is_neg()
            found += x.flatten()[:1].double().tolist()
        elif isinstance(x, ctypes.c_void_p):
            address = ctypes.cast(x, ctypes.POINTER(ctypes.c_uint64))[0]
            number = ctypes.cast(address, ctypes.POINTER(ctypes.c_int16))[0]
            found.append(torch.tensor(number, dtype=torch.int16).view(BF16).double().item())
    return found


@pytest.fixture
def memory(kernels, monkeypatch):
    """First elements of all tensors that launches get, in a set."""
    found: set[float] = set()
    for module in (launch.common, launch.bwd_kernels):
        if hasattr(module, "compile_kernels"):
            launches = lambda kernels, _: [lambda *given: found.update(in_memory(given))] * len(kernels)  # noqa: E731
            monkeypatch.setattr(module, "compile_kernels", launches)
    return found


def firsts(*tensors):
    return {x.flatten()[0].double().item() for x in tensors}


@pytest.mark.parametrize("name", [*options(), "plain", "causal"])
def test_launches_read_the_values_of_negated_views(name, memory):
    """The bit is of a tensor, not of its metadata: calls of a new and of a known signature read values, not memory."""
    lengths, asked = options().get(name, ((), {"causal": name == "causal"}))
    qkv = leaves(*((16,) if lengths else (2, 16)), HEADS, 64)
    names = asked.keys() & {"learnable_sink", "alibi_slopes"}
    for lazily in (True, False, True):
        some = [negated(x) for x in qkv] if lazily else qkv
        given = asked | {name: negated(asked[name]) for name in names} if lazily else asked
        wanted = [*some, *([given["learnable_sink"]] if "learnable_sink" in names else [])]
        memory.clear()
        out = attend(some, lengths, given)
        assert firsts(*qkv, *(asked[name] for name in names)) <= memory
        memory.clear()
        dout = torch.full_like(out, 3.0)
        torch.autograd.grad(out, wanted, negated(dout) if lazily else dout)
        assert firsts(*qkv, dout) <= memory


def test_a_launch_of_the_backward_reads_the_values_of_negated_views(memory):
    q, k, v = (x.detach() for x in leaves(2, HEADS, 16, 64))
    out, lse = mha_fwd_interface(q, k, v)
    tensors = torch.full_like(out, 3.0), q, k, v, out.fill_(2.0), lse.fill_(5.0)
    for some in (tensors, [negated(x) for x in tensors], tensors):
        memory.clear()
        mha_bwd_interface(*some)
        assert firsts(*tensors) <= memory


def test_a_gradient_of_lse_reaches_a_launch_with_its_sign(memory):
    qkv, lengths = leaves(16, HEADS, 64), packed(9, 16)
    _, lse, _ = flash_attn_varlen_func(*qkv, *lengths, return_attn_probs=True)
    memory.clear()
    torch.autograd.grad(lse, qkv, negated(torch.full_like(lse, 7.0)))
    assert 7.0 in memory


def test_fp32_launches_read_the_values_of_negated_views(memory):
    qkv = [torch.randn(2, 16, HEADS, 64, requires_grad=True) for _ in range(3)]
    dout = torch.full_like(qkv[0], 3.0)
    for lazily in (True, False, True):
        some = [negated(x) for x in qkv] if lazily else qkv
        memory.clear()
        out = flash_attn_func(*some, precision="highest")
        halves = qkv[0].detach().view(BF16)  # pairs of numbers, as kernels read q
        assert firsts(halves, *qkv[1:]) <= memory
        memory.clear()
        torch.autograd.grad(out, some, negated(dout) if lazily else dout)
        assert firsts(qkv[0], dout) <= memory


def test_flex_launches_read_the_values_of_negated_views(memory):
    qkv, table, bias = leaves(2, HEADS, 16, 64), torch.full((HEADS,), 3.0), torch.randn(1, 1, 16, 16)
    for some in ((*qkv, table, bias), [negated(x) for x in (*qkv, table, bias)]):
        *inputs, captured, added = some
        memory.clear()
        out = flex_attention(*inputs, score_mod=lambda s, b, h, i, j, t=captured: s * t[h], attn_bias=added)
        assert firsts(*qkv, table, bias) <= memory
        memory.clear()
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        assert firsts(*qkv, table, bias) <= memory


def test_a_known_call_of_a_cache_launches_the_tensors_of_now(kernels, monkeypatch):
    done, check = [], kvcache.check_cache
    monkeypatch.setattr(kvcache, "check_cache", lambda *x: done.append(None) or check(*x))
    q, k, v = (torch.randn(2, 16, HEADS, 64, dtype=BF16) for _ in range(3))
    options = {"window_size": (5, 0), "softcap": 3, "num_splits": 2}
    found, refs = [], []
    for value in (1.0, 2.0, 3.0):
        kernels.clear()
        slopes, sink = torch.full((HEADS,), value), torch.nn.Parameter(torch.full((HEADS,), -value), False)
        flash_attn_with_kvcache(q, k, v, alibi_slopes=slopes, learnable_sink=sink, **options)
        (*_, left, right, cap, its_slopes, its_sink), combine = kernels
        assert (left, right, cap) == (5, 0, 3.0) and its_slopes.shape == (2, HEADS)
        assert its_slopes[0, 0] == value == -its_sink[0] == -combine[-1][0]
        found.append(facts(kernels))
        refs += map(weakref.ref, (slopes, sink))
    assert len(done) == 1 and found[0] == found[1] == found[2]
    flash_attn_with_kvcache(q, k, v, alibi_slopes=slopes, learnable_sink=sink, **options | {"causal": True})
    flash_attn_with_kvcache(q, k, v, causal=True)
    assert len(done) == 3 and kernels[-2][-5:-2] == (MAX_WINDOW, 0, 0.0)
    kernels.clear()
    del slopes, sink, its_slopes, its_sink, combine
    gc.collect()
    assert not any(ref() is not None for ref in refs)


def test_launches_of_a_cache_read_values_and_refuse_negated_caches(memory, monkeypatch):
    monkeypatch.setattr(launch.decode, "_append_kernel", launch.decode._append_kernel.__wrapped__)
    q, k, v = (torch.randn(2, 1, HEADS, 64, dtype=BF16) for _ in range(3))
    caches = [torch.zeros(2, 32, HEADS, 64, dtype=BF16) for _ in range(2)]
    angles = [torch.full((32, 32), x, dtype=BF16) for x in (3.0, 5.0)]
    slopes, sink = torch.full((HEADS,), 7.0), torch.full((HEADS,), 9.0)
    tensors = q, k, v, *angles, slopes, sink
    for some in (tensors, [negated(x) for x in tensors], tensors):
        memory.clear()
        queries, *new, some_slopes, some_sink = some
        options = {"alibi_slopes": some_slopes, "learnable_sink": some_sink, "causal": True}
        flash_attn_with_kvcache(queries, *caches, *new, 4, **options)
        assert firsts(*tensors) <= memory
        memory.clear()
        flash_attn_with_kvcache(queries, *caches, cache_seqlens=4)
        assert firsts(q) <= memory
    for name, some in (("k", (negated(caches[0]), caches[1])), ("v", (caches[0], negated(caches[1])))):
        text = f"^{name}_cache: expected a tensor whose memory holds its values, .* pass {name}_cache.resolve_neg"
        with pytest.raises(ValueError, match=text):
            flash_attn_with_kvcache(q, *some, cache_seqlens=4)


@pytest.mark.parametrize("name", ["alibi", "sink", "dropout", "varlen-everything"])
def test_tensors_of_inference_mode_are_saved_for_the_backward(name, kernels):
    lengths, asked = options()[name]
    qkv = leaves(*((16,) if lengths else (2, 16)), HEADS, 64)

    def inferred(x):
        with torch.inference_mode():
            return x.detach().clone() if isinstance(x, torch.Tensor) else x

    lengths, asked = tuple(map(inferred, lengths)), {name: inferred(x) for name, x in asked.items()}
    found = []
    for _ in range(3):
        out = attend(qkv, lengths, asked)
        kernels.clear()
        assert len(torch.autograd.grad(out, qkv, out)) == 3
        found.append(facts(kernels))
    assert found[0] == found[1] == found[2] and len(found[0]) > 1


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["dense", "packed", "flex", "mha"])
def test_negated_views_give_the_results_of_their_values(form, device):
    qkv = [x.to(device) for x in leaves(2, 40, HEADS, 64)]
    sink = torch.randn(HEADS, device=device)
    if form == "packed":
        qkv = [x.flatten(0, 1) for x in qkv]
        starts = torch.tensor([0, 30, 80], dtype=torch.int32, device=device)
        run = lambda q, k, v, s: flash_attn_varlen_func(q, k, v, starts, starts, 50, 50, learnable_sink=s)  # noqa: E731
    elif form == "dense":
        run = lambda q, k, v, s: flash_attn_func(q, k, v, learnable_sink=s)  # noqa: E731
    elif form == "flex":
        run = lambda q, k, v, s: flex_attention(q, k, v, score_mod=lambda x, b, h, i, j: x * s[h % 2])  # noqa: E731
    else:
        run = lambda q, k, v, s: mha_fwd_interface(q, k, v)[0]  # noqa: E731
    results = []
    for make in (lambda x: x, negated):
        some = [make(x.detach().requires_grad_()) for x in (*qkv, sink)]
        out = run(*some)
        wanted = some[:3]
        dout = make(torch.linspace(-1, 1, out.numel(), dtype=BF16, device=device).view(out.shape))
        results.append((out, *torch.autograd.grad(out, wanted, dout)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("lengths", [(), packed(9, 16)], ids=["dense", "varlen"])
def test_max_logits_are_part_of_a_signature(lengths, kernels, checks):
    qkv = leaves(*((16,) if lengths else (2, 16)), HEADS, 64)
    for records in (True, False, True):
        with torch.set_grad_enabled(records):
            out, largest = attend(qkv, lengths, {"causal": True, "return_max_logits": True})
            of_max = kernels[-1]
            plain = attend(qkv, lengths, {"causal": True})
        assert isinstance(plain, torch.Tensor) and plain.requires_grad == out.requires_grad == records
        assert len(of_max) == len(kernels[-1]) + 1 and not largest.requires_grad
        assert of_max[-1].data_ptr() == largest.data_ptr()
        if lengths:  # no kernel writes the rows of no sequence
            assert bool((largest == -float("inf")).all())
        if records:
            kernels.clear()
            grads = [torch.autograd.grad(x, qkv, torch.ones_like(x)) for x in (out, plain)]
            half = len(kernels) // 2
            assert len(grads) == 2 and facts(kernels[:half]) == facts(kernels[half:])
    assert len(checks) == 2
