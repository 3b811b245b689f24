"""Repeated calls of flex_attention: what is found again, and that nothing stale is: values, metadata, functions and masks that changed."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections import deque
from functools import partial
from types import CellType, FunctionType, ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from tl_attention import create_block_mask, flash_attn_func, flex_attention
from tl_attention.api import flex_calls
from tl_attention.torch_ops import flex_autograd
from tl_attention.tracing import trace
from tl_attention.tracing.captures import Captures

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention. CPU tensors")
HEADS, LENGTH = 2, 256


@pytest.fixture
def qkv():
    return [torch.randn(2, HEADS, LENGTH, 16, dtype=torch.bfloat16) for _ in range(3)]


def expected(qkv, bias):
    return F.scaled_dot_product_attention(*(x.float() for x in qkv), bias.float())


def assert_close(actual, wanted):
    torch.testing.assert_close(actual.float(), wanted, rtol=2e-2, atol=2e-2)


def refuse(*arguments):
    raise AssertionError("prepared again")


def test_outputs_beside_out_are_those_of_pytorch(qkv):
    ours, theirs = (
        function(*qkv, return_aux=AuxRequest(lse=True)) for function in (flex_attention, torch_flex_attention)
    )
    assert type(ours[1]) is type(theirs[1]) and ours[1].max_scores is None
    assert_close(ours[0], theirs[0].float())
    assert_close(ours[1].lse, theirs[1].lse)
    assert flex_attention(*qkv, return_aux=AuxRequest())[1].lse is None


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        (
            {"return_aux": True},
            TypeError,
            r"^return_aux: expected .*AuxRequest or None, got True; pass AuxRequest",
        ),
        (
            {"return_aux": AuxRequest(lse=True), "return_lse": True},
            ValueError,
            r"^return_aux: .*beside return_lse",
        ),
    ],
)
def test_wrong_requests_of_outputs_are_named(qkv, asked, error, text):
    with pytest.raises(error, match=text):
        flex_attention(*qkv, **asked)


def test_calls_are_prepared_once(qkv, monkeypatch):
    table, slopes = torch.randn(LENGTH), torch.rand(HEADS)
    mask = create_block_mask(
        lambda b, h, q, k: table[q] >= table[k], None, None, LENGTH, LENGTH, device="cpu"
    )

    def raised(cap):
        return lambda s, b, h, q, k: torch.where(q > k, s + table[k], cap)

    def calls():
        for cap in (3.0, float("nan"), -0.0):
            flex_attention(*qkv, raised(cap), scale=1)
        flex_attention(
            *qkv, partial(lambda n, s, b, h, q, k: s * n, 2.5), attn_bias=torch.zeros(1, 1, LENGTH, LENGTH)
        )
        flex_attention(*qkv, lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), enable_gqa=True)
        flex_attention(*qkv, block_mask=mask)
        flash_attn_func(*(x.transpose(1, 2) for x in qkv), attn_bias=torch.zeros(2, HEADS, LENGTH, LENGTH))
        flex_attention(qkv[0], qkv[1][:1], qkv[2][:1])

    calls()
    monkeypatch.setattr(flex_calls, "_prepare", refuse)
    calls()
    with pytest.raises(AssertionError, match="prepared again"):
        flex_attention(*qkv, raised(0.0), scale=1)


def test_calls_see_new_values_and_metadata_of_captured_tensors(qkv):
    held = [torch.randn(LENGTH)]

    def score_mod(score, b, h, q, k):
        return score + held[0][k]

    def check():
        assert_close(flex_attention(*qkv, score_mod), expected(qkv, held[0].expand(2, HEADS, LENGTH, LENGTH)))

    check()
    held[0].mul_(-2)
    check()
    held[0].data = torch.randn(LENGTH)
    check()
    for other in (torch.randn(2 * LENGTH)[::2], torch.randn(LENGTH).half(), torch.randn(LENGTH).bfloat16()):
        held[0] = other
        check()
    held[0].data = torch.randn(LENGTH)  # another dtype in the same object
    check()
    held[0].requires_grad_()
    flex_attention(*qkv, score_mod).sum().backward()
    assert held[0].grad is not None
    with torch.no_grad():
        assert not flex_attention(*qkv, score_mod).requires_grad
    held[0] = torch.randn(LENGTH - 1)
    with pytest.raises(ValueError, match=r"captured tensor 0, \(255,\).*expected at least 256 entries"):
        flex_attention(*qkv, score_mod)
    held[0] = torch.randn(LENGTH, device="meta")
    with pytest.raises(ValueError, match="captured tensor 0.*on meta: expected the device of query, cpu"):
        flex_attention(*qkv, score_mod)
    held[0] = torch.randn(LENGTH).to_sparse()
    with pytest.raises((NotImplementedError, ValueError)):
        flex_attention(*qkv, score_mod)


@pytest.mark.parametrize(
    "middle",
    [
        lambda x: x.shape[1] // 2,
        lambda x: x.size(-1) // 2,
        lambda x: len(x[0]) // 2,
        lambda x: x.numel() // 4,
    ],
)
def test_calls_see_new_sizes_that_a_function_reads(middle, qkv):
    q, k, v = (x[:1, :2] for x in qkv)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    for length in (600, 900, 600):
        bias = torch.randn(2, length)
        out = flex_attention(q, k, v, lambda s, b, h, i, j, x=bias: s + x[h, i - j + middle(x)])
        assert_close(out, expected((q, k, v), bias[:, distance + length // 2][None]))


def test_block_masks_see_new_sizes_that_their_function_reads(qkv):
    """Lists made for a smaller size go on to hide what they do not list."""
    held = [torch.zeros(100)]
    mask = create_block_mask(
        lambda b, h, i, j: (i - j).abs() < held[0].shape[0], None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=32
    )
    listed = mask.to_dense()[0, 0].bool().repeat_interleave(32, 0).repeat_interleave(32, 1)
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    for length in (100, LENGTH):
        held[0] = torch.zeros(length)
        bias = torch.where(listed & (distance < length), 0.0, -torch.inf)
        assert_close(flex_attention(*qkv, block_mask=mask), expected(qkv, bias))


@pytest.fixture(params=["meta", torch.bfloat16, torch.float64], ids=str)
def default(request):
    """A default device or dtype, as a program sets it for its weights."""
    is_device, dtype = isinstance(request.param, str), torch.get_default_dtype()
    torch.set_default_device(request.param) if is_device else torch.set_default_dtype(request.param)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)


def test_functions_do_not_follow_default_devices_and_dtypes(qkv, default):
    on = {"device": "cpu", "dtype": torch.float32}
    table = torch.linspace(-1, 1, LENGTH, **on).requires_grad_()
    bias = torch.rand(1, HEADS, LENGTH, LENGTH, **on)
    q_idx, kv_idx = (torch.arange(LENGTH, device="cpu").view(*shape) for shape in ((-1, 1), (1, -1)))

    def check(added, *functions, **given):
        found = flex_attention(*qkv, *functions, **given)
        assert_close(found, expected(qkv, added.expand(2, HEADS, LENGTH, LENGTH)))
        return found

    check(bias, attn_bias=bias)
    alibi = (kv_idx - q_idx).float().masked_fill(kv_idx > q_idx, -torch.inf)
    check(alibi, lambda s, b, h, i, j: s + (j - i), mask_mod=lambda b, h, i, j: i >= j)
    learned = check(
        torch.where(q_idx > kv_idx, table, 2 * table),
        lambda s, b, h, i, j: torch.where(i > j, s, s + table[j]) + table[j],
    )
    assert torch.autograd.grad(learned.float().sum(), table)[0].dtype == torch.float32
    create_block_mask(lambda b, h, i, j: i.float() > j.float() + 0.5, None, None, LENGTH, LENGTH, "cpu")


FLOATS = {
    "where": lambda s, b, h, i, j: torch.where(j < 8, 0.3, s),
    "where_of_numbers": lambda s, b, h, i, j: s * 0 + torch.where(j < 8, 0.3, 0.7),
    "tensor": lambda s, b, h, i, j: s * 0 + torch.tensor(0.3),
    "full": lambda s, b, h, i, j: s * 0 + torch.full((), 0.3),
    "sum_with_an_index": lambda s, b, h, i, j: s * 0 + (j * 0 + 0.3),
    "quotient_of_an_index": lambda s, b, h, i, j: s * 0 + (j * 0 + 3) / 10,
    "function_of_an_index": lambda s, b, h, i, j: s * 0 + torch.log1p(j * 0) + 0.3,
}


@pytest.mark.parametrize("score_mod", FLOATS.values(), ids=FLOATS)
def test_floats_of_a_function_are_fp32_whatever_the_default_dtype_of_its_first_call(
    score_mod, default, monkeypatch
):
    """A program of the first call serves later ones, so its numbers must not be those of another dtype."""
    monkeypatch.setattr(trace, "_traced", {})
    monkeypatch.setattr(flex_calls, "_prepared", {})
    qkv = [torch.randn(1, 1, 8, 16, device="cpu", dtype=torch.float32) for _ in range(3)]
    before = torch.get_default_dtype()
    _, lse = flex_attention(*qkv, score_mod, return_lse=True)
    assert torch.get_default_dtype() == before
    torch.testing.assert_close(lse, torch.full_like(lse, 0.3 + math.log(8)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_results_in_the_layout_of_flash_attn_are_contiguous(device):
    q = torch.randn(2, 64, HEADS, 64, device=device, dtype=torch.bfloat16)
    out = flash_attn_func(q, q, q, score_mod=lambda s, b, h, i, j: s * s)
    assert out.is_contiguous() and out.shape == q.shape


def test_functions_take_lazily_negated_tensors_at_their_first_call():
    q, k, v = (torch.randn(1, HEADS, 8, 16) for _ in range(3))
    bias = torch.randn(8, 8, dtype=torch.complex64, requires_grad=True)
    lazy, plain = bias.conj().imag, -bias.imag
    assert lazy.is_neg()
    found = [flex_attention(q, k, v, attn_bias=lazy[None, None])]
    found.append(flex_attention(q, k, v, lambda s, b, h, i, j: s + lazy[i, j].clone() * 1.0))
    wanted = F.scaled_dot_product_attention(q, k, v, plain.expand(1, HEADS, 8, 8))
    (gradient,) = torch.autograd.grad(wanted.square().sum(), bias)
    for out in found:
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), bias)[0], gradient)


def test_autocast_and_tf32_change_nothing():
    q, k, v = (torch.randn(1, HEADS, 64, 16, requires_grad=True) for _ in range(3))
    before = torch.get_float32_matmul_precision()

    def results():
        out, lse = flex_attention(q, k, v, lambda s, b, h, i, j: s * s, return_lse=True)
        return out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))

    wanted = results()
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "highest"):
                found = results()
            assert all(
                x.dtype == torch.float32 and torch.equal(x, y) for x, y in zip(found, wanted, strict=True)
            )
    finally:
        torch.set_float32_matmul_precision(before)


def test_calls_see_new_numbers_functions_and_globals(qkv, monkeypatch):
    state = {"scale": 0.5, "inner": lambda x: x}

    class Opaque:
        shift = 1.0

    opaque, number = Opaque(), torch.tensor(2.0)

    def score_mod(score, b, h, q, k):
        return state["inner"](score * state["scale"]) * number + opaque.shift

    def check(factor, seen=slice(None)):
        assert_close(
            flex_attention(*qkv, score_mod),
            F.scaled_dot_product_attention(*(x.float() for x in qkv), scale=factor / 4),
        )

    check(1.0)
    state["scale"] = 1.5
    check(3.0)
    state["inner"] = lambda x: -x
    check(-3.0)
    number.fill_(3)
    check(-4.5)
    opaque.shift = 2.0
    check(-4.5)

    def shifted(score, b, h, q, k):
        return score + opaque.shift * k

    one = flex_attention(*qkv, shifted)
    opaque.shift = 0.0
    assert not torch.equal(flex_attention(*qkv, shifted), one)


def of_class():
    class Settings:
        width = 4

    return lambda b, h, q, k: (q * k) % Settings.width == 0, lambda n: setattr(Settings, "width", n)


def of_function():
    def mask_mod(b, h, q, k):
        return (q * k) % mask_mod.width == 0

    mask_mod.width = 4
    return mask_mod, lambda n: setattr(mask_mod, "width", n)


def of_method():
    widths = deque([4])
    count = widths.index  # of 4
    return lambda b, h, q, k: (q * k) % (3 + count(4)) == 0, lambda n: widths.insert(0, n)


def of_import():
    settings = sys.modules["its_settings"] = ModuleType("its_settings")
    settings.width = 4

    def mask_mod(b, h, q, k):
        import its_settings

        return (q * k) % its_settings.width == 0

    return mask_mod, lambda n: setattr(settings, "width", n)


@pytest.mark.parametrize("made", [of_class, of_function, of_method, of_import])
def test_calls_see_new_attributes(qkv, made):
    mask_mod, change = made()
    one = flex_attention(*qkv, mask_mod=mask_mod)
    change(7)
    other = flex_attention(*qkv, mask_mod=mask_mod)
    sys.modules.pop("its_settings", None)
    assert not torch.equal(one, other)


def test_calls_tell_defaults_of_nested_functions_apart(qkv):
    def outer(score, b, h, q, k, shift=0, more=0):
        return score * inner() + shift + more

    def inner(factor=1, more=0):
        return factor + more

    def made(of_inner, of_outer):
        its_inner = FunctionType(inner.__code__, {}, "inner", of_inner)
        return FunctionType(outer.__code__, {}, "outer", of_outer, (CellType(its_inner),))

    assert Captures.of(made((1,), (2, 3))).key != Captures.of(made((1, 2), (3,))).key


def test_calls_take_sizes_that_are_symbols(qkv):
    graph = make_fx(lambda q, k, v: flex_attention(q, k, v), tracing_mode="symbolic")(*qkv)
    assert torch.equal(graph(*qkv), flex_attention(*qkv))


def test_calls_of_alibi_see_new_slopes(qkv):
    slopes, distance = torch.rand(HEADS), torch.arange(LENGTH)
    distance = (distance[:, None] - distance).abs()
    for _ in range(2):
        out = flex_attention(*qkv, lambda s, b, h, q, k: s - slopes[h] * (q - k).abs())
        assert_close(out, expected(qkv, (-slopes[:, None, None] * distance).expand(2, -1, -1, -1)))
        out = flex_attention(*qkv, lambda s, b, h, q, k: s - 2 * slopes[h] * (q - k).abs())
        assert_close(out, expected(qkv, (-2 * slopes[:, None, None] * distance).expand(2, -1, -1, -1)))
        slopes.mul_(3)


def test_calls_see_changes_of_a_block_mask(qkv):
    def causal(b, h, q, k):
        return q >= k

    def later(b, h, q, k):
        return q <= k

    def shown(mask):
        one = flex_attention(*qkv, block_mask=mask)
        assert torch.equal(one, flex_attention(*qkv, block_mask=mask))
        return one

    def wanted(seen):
        return expected(qkv, torch.zeros(2, HEADS, LENGTH, LENGTH).masked_fill(~seen, -torch.inf)).nan_to_num(
            0
        )

    tril = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    diagonal = torch.block_diag(tril[:128, :128], tril[:128, :128]).bool()
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    assert_close(shown(mask), wanted(tril))
    mask.full_kv_num_blocks.zero_()
    assert_close(shown(mask), wanted(diagonal))
    mask.full_kv_num_blocks.data = torch.tensor([[[0, 1]]], dtype=torch.int32)
    assert_close(shown(mask), wanted(tril))
    mask.full_kv_num_blocks = torch.zeros(1, 1, 2, dtype=torch.int32)
    assert_close(shown(mask), wanted(diagonal))
    mask.mask_mod = later
    assert_close(shown(mask), wanted(torch.block_diag(tril[:128, :128].mT, tril[:128, :128].mT).bool()))
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    assert_close(shown(mask), wanted(tril))
    mask.mask_mod = later  # the lists are those of another mask: full blocks stay full
    assert_close(
        shown(mask),
        wanted((tril & ~diagonal) | torch.block_diag(tril[:128, :128].mT, tril[:128, :128].mT).bool()),
    )
    mask.seq_lengths = (LENGTH, LENGTH + 1)
    with pytest.raises(ValueError, match="block_mask: expected one made for lengths"):
        flex_attention(*qkv, block_mask=mask)
    mask.seq_lengths, mask.BLOCK_SIZE = (LENGTH, LENGTH), (64, 64)
    with pytest.raises(ValueError, match="block_mask.kv_num_blocks: expected .*, a row per block of queries"):
        flex_attention(*qkv, block_mask=mask)
    mask.BLOCK_SIZE = [128, 128]
    shown(mask)
    mask.BLOCK_SIZE[0] = 0
    with pytest.raises(ValueError, match="block_mask: expected a BLOCK_SIZE of two ints of at least 1"):
        flex_attention(*qkv, block_mask=mask)


def test_calls_check_what_follows_no_metadata(qkv):
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu")
    flex_attention(*qkv)
    flex_attention(*qkv, block_mask=mask)
    with pytest.raises(ValueError, match="scale: expected a finite number"):
        flex_attention(*qkv, scale=float("nan"))
    with pytest.raises(ValueError, match="scale: expected at most"):
        flex_attention(*qkv, scale=2.0**61)
    with pytest.raises(ValueError, match="mask_mod: expected None beside block_mask"):
        flex_attention(*qkv, block_mask=mask, mask_mod=mask.mask_mod)
    with pytest.raises(ValueError, match="key, value: expected the heads of query"):
        flex_attention(qkv[0], qkv[1][:, :1], qkv[2][:, :1])
    flex_attention(qkv[0], qkv[1][:, :1], qkv[2][:, :1], enable_gqa=True)
    with pytest.raises(ValueError, match="key, value: expected the heads of query"):
        flex_attention(qkv[0], qkv[1][:, :1], qkv[2][:, :1])
    with pytest.raises(TypeError, match="score_mod: expected a function"):
        flex_attention(*qkv, 3)
    with pytest.raises(TypeError, match="block_mask: expected a BlockMask"):
        flex_attention(*qkv, block_mask=3)
    with pytest.raises(TypeError, match="query: expected a torch.Tensor"):
        flex_attention(qkv[0].float().numpy(), *qkv[1:])


def test_calls_keep_nothing_alive(qkv):
    def made() -> list[weakref.ref]:
        table, bias = torch.zeros(LENGTH), torch.zeros(1, 1, LENGTH, LENGTH)
        mask = create_block_mask(
            lambda b, h, q, k: table[q] == table[k], None, None, LENGTH, LENGTH, device="cpu"
        )
        lists = BlockMask.from_kv_blocks(
            mask.kv_num_blocks, mask.kv_indices, mask_mod=mask.mask_mod, seq_lengths=(LENGTH, LENGTH)
        )
        for _ in range(2):
            flex_attention(*qkv, lambda s, b, h, q, k: s + table[k], block_mask=mask)
            flex_attention(*qkv, attn_bias=bias, block_mask=lists)
        return [weakref.ref(x) for x in (table, bias, mask, lists, mask.kv_indices)]

    refs = made()
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize("rows_first", [False, True], ids=["flex_attention", "flash_attn_func"])
def test_calls_launch_with_what_they_got(monkeypatch, rows_first):
    seen = []

    def forward(q, k, v, *layout, options, traced, deterministic, max_logits):
        assert options is None and max_logits is False
        seen.append((q, traced, layout, deterministic))
        return torch.zeros_like(q), torch.zeros(2, HEADS, 8)

    def backward(dout, q, k, v, out, lse, *layout, options, traced):
        assert options is None
        seen.append((q, traced, layout, dout))
        sums = {i: torch.full(traced.tensors[i].shape, i + 4.0) for i in traced.program.learned}
        return {"q": torch.full_like(q, 1), "k": torch.full_like(k, 2), "v": torch.full_like(v, 3)} | sums

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(flex_calls, "check_device_or_warn", lambda *_, **__: None)
    monkeypatch.setattr(flex_autograd.launch, "forward", forward)
    monkeypatch.setattr(flex_autograd.launch, "backward", backward)
    shape = (2, 8, HEADS, 16) if rows_first else (2, HEADS, 8, 16)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    frozen = torch.randn(8)
    attend = flash_attn_func if rows_first else flex_attention
    for deterministic in (False, True):
        bias = torch.randn(1, HEADS, 8, 8, dtype=torch.float16, requires_grad=True)
        out = attend(
            q,
            k,
            v,
            score_mod=lambda s, b, h, q, k: s * frozen[k],
            attn_bias=bias,
            deterministic=deterministic,
        )
        grads = torch.autograd.grad(out.sum(), (q, k, v, bias))
        (its_q, call, layout, its_order), (same_q, back, back_layout, dout) = seen
        assert its_q is q and same_q is q and its_order is deterministic and dout.shape == out.shape == shape
        assert (
            all(x is y for x, y in zip(call.tensors, (frozen, bias), strict=True))
            and call.program is back.program
        )
        assert layout == (0.25, False, False, not rows_first)
        assert back_layout == (*layout, deterministic, None)
        assert [(x.dtype, x.unique().item()) for x in grads] == [
            *((torch.bfloat16, n) for n in (1.0, 2.0, 3.0)),
            (bias.dtype, 5.0),
        ]
        seen.clear()
        with torch.no_grad():
            attend(q, k, v, attn_bias=bias)
        assert [x is bias for x in seen[0][1].tensors] == [True]
        seen.clear()


@pytest.mark.parametrize("kind", ["coo", "csr", "nested"])
@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_captured_tensors_that_are_not_dense_are_refused_by_name(name, kind, qkv):
    x = torch.eye(LENGTH)
    x = {
        "coo": x.to_sparse,
        "csr": x.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor([x[0], x[1]]),
    }[kind]()
    functions = {"score_mod": lambda s, b, h, i, j: s + x[i, j], "mask_mod": lambda b, h, i, j: x[i, j] > 0}
    dense = "to_padded_tensor" if kind == "nested" else "to_dense"
    with pytest.raises(
        NotImplementedError,
        match=rf"^{name}: expected a function that captures dense tensors, got a .*{dense}\(",
    ):
        flex_attention(*qkv, **{name: functions[name]})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["score_mod", "mask_mod", "attn_bias", "block_mask"])
def test_second_derivatives_are_refused(name, device):
    q = torch.randn(1, 1, 128, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    given = {
        "score_mod": lambda s, b, h, i, j: s * s,
        "mask_mod": lambda b, h, i, j: i >= j,
        "attn_bias": torch.zeros(1, 1, 128, 128, device=device),
        "block_mask": create_block_mask(
            lambda b, h, i, j: (i + j) % 3 > 0, None, None, 128, 128, device=device
        ),
    }
    out = flex_attention(q, q, q, **{name: given[name]}).float().square().sum()
    with pytest.raises(NotImplementedError, match="the gradient of a gradient is not supported"):
        (grad,) = torch.autograd.grad(out, q, create_graph=True)
        torch.autograd.grad(grad.float().square().sum(), q)


def test_weights_of_large_scores_sum_to_1(qkv):
    """In fp32 the log-sum-exp of scores of -1e9 has no room for the logarithm of their number."""
    v = qkv[2]
    out, lse = flex_attention(*qkv, lambda score, b, h, q, k: score * 0 - 1e9, return_lse=True)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), rtol=0.01, atol=1e-3)
    assert (lse == -1e9).all()


def test_functions_capture_tensors_whose_sizes_are_symbols(qkv):
    def attend(q, k, v, bias):
        return flex_attention(q, k, v, lambda score, b, h, q, k: score - bias[h, q])

    bias = torch.randn(HEADS, LENGTH)
    graph = make_fx(attend, tracing_mode="symbolic")(*qkv, bias)
    torch.testing.assert_close(graph(*qkv, bias), attend(*qkv, bias))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_a_captured_number(mode, qkv):
    """Else a 0-d CPU tensor is a number, which is read."""

    def attend(q, k, v, temperature):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score * temperature)

    graph = make_fx(attend, tracing_mode=mode)(*qkv, torch.tensor(2.0))
    for temperature in torch.tensor([2.0, 3.0]):
        torch.testing.assert_close(graph(*qkv, temperature), attend(*qkv, temperature))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_a_number_that_changed(mode, qkv):
    temperature = torch.tensor(2.0)

    def attend(q, k, v):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score * temperature)

    for value in (2.0, 3.0):
        temperature.fill_(value)
        graph = make_fx(attend, tracing_mode=mode, _allow_non_fake_inputs=True)(*qkv)
        torch.testing.assert_close(graph(*qkv), attend(*qkv))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_keeps_no_value_that_a_function_reads(mode, qkv):
    def attend(q, k, v, temperature):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score * temperature.item())

    with pytest.raises(
        NotImplementedError, match="expected captured tensors whose elements it uses as tensors"
    ):
        make_fx(attend, tracing_mode=mode)(*qkv, torch.tensor(2.0))


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("kind", ["added", "mask", "constant index"])
def test_make_fx_records_dense_biases_and_constant_indices(kind, mode, qkv):
    """No value of a tensor is read: a tracer has none, and on a GPU the host would wait for it."""

    def attend(q, k, v, bias):
        if kind == "constant index":
            return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score + bias[0, 0, 3, kv_idx])
        return flex_attention(q, k, v, attn_bias=bias)

    bias = torch.randn(1, 1, LENGTH, LENGTH)
    bias = bias > 0 if kind == "mask" else bias
    graph = make_fx(attend, tracing_mode=mode)(*qkv, bias)
    torch.testing.assert_close(graph(*qkv, bias), attend(*qkv, bias))


MALFORMED = {
    "window-short": {"window_size": (-1,)},
    "window-long": {"window_size": (-1, None, None)},
    "window-empty": {"window_size": ()},
    "window-float": {"window_size": (-1.0, None)},
    "window-set": {"window_size": {-1, None}},
    "softcap-bool": {"softcap": False},
    "softcap-text": {"softcap": "0"},
    "splits-bool": {"num_splits": False},
    "splits-float": {"num_splits": 0.0},
    "dropout-text": {"dropout_p": "0"},
    "scale": {"softmax_scale": False},
    "causal": {"causal": 0},
}


@pytest.mark.parametrize("options", MALFORMED.values(), ids=MALFORMED)
def test_functions_refuse_malformed_options_as_calls_without(options):
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises((TypeError, ValueError)) as plain:
        flash_attn_func(x, x, x, **options)
    with pytest.raises(plain.type) as found:
        flash_attn_func(x, x, x, score_mod=lambda s, b, h, i, j: s * 2, **options)
    assert str(found.value) == str(plain.value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("score_mod", [None, lambda s, b, h, i, j: s * 2], ids=["plain", "score_mod"])
def test_no_query_shares_the_keys_of_one_batch_entry(score_mod, device):
    q, k, v = (torch.randn(n, 2, 3, 8, device=device, requires_grad=True) for n in (0, 1, 1))
    out, lse = flex_attention(q, k, v, score_mod, return_lse=True)
    assert out.shape == (0, 2, 3, 8) and lse.shape == (0, 2, 3)
    for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert grad.shape == x.shape and not grad.any()
