"""tl_attention as PyTorch's flash attention: the aten ops called directly on CPU tensors, and through PyTorch on a GPU."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import bias, current_flash_attention_impl, list_flash_attention_impls
from torch.nn.attention.varlen import varlen_attn

from tl_attention.integrations import torch_backend
from tl_attention.problem.options import Call
from tl_attention.reference import (
    attention_backward_reference,
    attention_reference,
    dropout_keep,
    varlen_backward_reference,
    varlen_reference,
)

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16 = torch.bfloat16
# torch 2.11 lacks one of them
OPS = sorted(name for name in torch_backend.KERNELS if hasattr(torch.ops.aten, name))


def overridden():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return [has_kernel(f"aten::{name}", "CUDA") for name in OPS]


def rand(*shape, device="cpu", heads_last=False, dtype=BF16):
    """Random [batch, heads, seqlen, head_dim]; with heads_last a view of [batch, seqlen, heads, head_dim] memory."""
    if heads_last:
        batch, heads, seqlen, head_dim = shape
        return torch.randn(batch, seqlen, heads, head_dim, device=device, dtype=dtype).transpose(1, 2)
    return torch.randn(shape, device=device, dtype=dtype)


def assert_close(actual, expected, rtol=0.02):
    """Assert equality within 2 % of the largest magnitude."""
    assert actual.shape == expected.shape
    assert (actual.double() - expected.double()).abs().max() <= rtol * expected.abs().max()


def bshd(*tensors):
    return [x.transpose(1, 2) for x in tensors]


@pytest.fixture
def order():
    """Restore the order of SDPA backends, which the first register() of a process may set."""
    torch_backend.register().remove()
    order = torch._C._get_sdp_priority_order()
    yield order
    torch._C._set_sdp_priority_order(order)


def test_torch_backend_register_and_remove(order):
    before = overridden()
    handle = torch_backend.register()
    assert torch_backend.NAME in list_flash_attention_impls()
    assert current_flash_attention_impl() == torch_backend.NAME
    assert all(overridden())
    assert torch._C._get_sdp_priority_order()[0] == int(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
    handle.remove()
    assert current_flash_attention_impl() is None
    assert (torch._C._get_sdp_priority_order(), overridden()) == (order, before)
    handle.remove()


def test_torch_backend_a_second_register_outlives_the_first_handle():
    first, second = torch_backend.register(), torch_backend.register()
    first.remove()
    assert current_flash_attention_impl() == torch_backend.NAME
    assert all(overridden())
    torch.nn.attention.restore_flash_attention_impl()
    assert current_flash_attention_impl() is None
    second.remove()


def test_torch_backend_remove_keeps_an_order_set_later(order):
    handle = torch_backend.register()
    torch._C._set_sdp_priority_order(order[::-1])
    handle.remove()
    assert torch._C._get_sdp_priority_order() == order[::-1]


def test_torch_backend_with_statement_restores_what_was_before(order):
    before = overridden()
    for _ in range(2):
        with torch_backend.register() as handle:
            assert isinstance(handle, torch_backend.Handle) and all(overridden())
            with torch_backend.register():
                assert all(overridden())
            assert current_flash_attention_impl() == torch_backend.NAME and all(overridden())
        assert current_flash_attention_impl() is None
        assert (torch._C._get_sdp_priority_order(), overridden()) == (order, before)


def test_torch_backend_with_statement_leaves_a_handle_from_before(order):
    before, handle = overridden(), torch_backend.register()
    with pytest.raises(ZeroDivisionError), torch_backend.register():
        raise ZeroDivisionError
    assert all(overridden())
    handle.remove()
    assert (torch._C._get_sdp_priority_order(), overridden()) == (order, before)


def test_torch_backend_with_statement_does_not_bring_back_a_removed_handle():
    handle = torch_backend.register()
    with torch_backend.register():
        handle.remove()
        assert all(overridden())
    assert current_flash_attention_impl() is None


def test_torch_backend_with_statement_restores_another_implementation():
    installed = []

    class Other:
        def remove(self):
            installed.remove("other")

    def install():
        installed.append("other")
        return Other()

    torch.nn.attention.register_flash_attention_impl("other", register_fn=install)
    torch.nn.attention.activate_flash_attention_impl("other")
    with torch_backend.register():
        assert not installed
    assert installed == ["other"] and current_flash_attention_impl() == "other"
    with torch_backend.register():
        torch.nn.attention.activate_flash_attention_impl("other")
    assert current_flash_attention_impl() == "other", "what was activated meanwhile stays"
    torch.nn.attention.restore_flash_attention_impl()


def test_torch_backend_activated_by_torch_is_removed_by_the_handle():
    handle = torch_backend.register()
    handle.remove()
    torch.nn.attention.activate_flash_attention_impl(torch_backend.NAME)
    assert all(overridden())
    handle.remove()
    assert current_flash_attention_impl() is None


def test_torch_backend_with_statement_refuses_a_used_handle():
    with torch_backend.register() as handle, pytest.raises(RuntimeError, match="got one that was in one"):
        handle.__enter__()
    handle = torch_backend.register()
    handle.remove()
    with pytest.raises(RuntimeError, match=r"is removed or replaced; write .with tl_attention"), handle:
        pass


def test_torch_backend_old_torch_is_an_error(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "current_flash_attention_impl")
    with pytest.raises(NotImplementedError, match="expected torch 2.11 or later"):
        torch_backend.register()


@pytest.mark.parametrize("name", OPS)
def test_torch_backend_parameters_match_the_schema(name):
    expected = [(x.name, x.kwarg_only) for x in getattr(torch.ops.aten, name).default._schema.arguments]
    parameters = inspect.signature(torch_backend.KERNELS[name]).parameters.values()
    assert [(x.name, x.kind == x.KEYWORD_ONLY) for x in parameters][: len(expected)] == expected


@pytest.mark.parametrize("heads_last", [False, True], ids=["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 40), (30, 50)])
def test_torch_backend_sdpa_ops_match_the_reference(heads_last, causal, seqlen_q, seqlen_k):
    q = rand(2, 4, seqlen_q, 64, heads_last=heads_last)
    k, v = (rand(2, 2, seqlen_k, 64, heads_last=heads_last) for _ in range(2))
    out, lse, cum_q, cum_k, max_q, max_k, state, unused, mask = torch_backend.sdpa_forward(
        q.requires_grad_(), k, v, 0.0, causal, scale=0.3
    )
    expected, expected_lse = attention_reference(*bshd(q, k, v), 0.3, causal)
    assert_close(out, expected.transpose(1, 2))
    assert_close(lse, expected_lse)
    assert (cum_q, cum_k, max_q, max_k, mask.numel()) == (None, None, seqlen_q, seqlen_k, 0)
    assert (state.shape, state.dtype, unused.dtype) == ((2,), torch.uint64, torch.uint64)
    assert out.stride() == torch.empty_like(q).stride()  # as in torch's meta function
    assert not out.requires_grad  # torch builds the autograd graph

    dout = rand(2, 4, seqlen_q, 64)
    grads = torch_backend.sdpa_backward(
        dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, state, unused, scale=0.3
    )
    expected = attention_backward_reference(*bshd(dout, q, k, v), 0.3, causal)
    for grad, want, x in zip(grads, expected, (q, k, v), strict=True):
        assert_close(grad, want.transpose(1, 2))
        assert grad.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("heads_last", [False, True], ids=["bhsd", "bshd"])
def test_torch_backend_dropout_has_one_mask_in_both_passes(heads_last):
    q, k, v, dout = (rand(1, 2, 40, 64, heads_last=heads_last) for _ in range(4))
    torch.manual_seed(3)
    out, lse, *_, state, unused, _ = torch_backend.sdpa_forward(q, k, v, 0.25, True)
    again = torch_backend.sdpa_forward(q, k, v, 0.25, True)
    torch.manual_seed(3)
    assert torch.equal(out, torch_backend.sdpa_forward(q, k, v, 0.25, True)[0])
    assert not torch.equal(out, again[0])

    keep = dropout_keep(state.view(torch.int64), 1, 2, 40, 40, 0.25)
    options = {"keep": keep, "dropout_p": 0.25}
    assert_close(out, attention_reference(*bshd(q, k, v), None, True, **options)[0].transpose(1, 2))
    assert out.stride() == torch.empty_like(q).stride()
    grads = torch_backend.sdpa_backward(
        dout, q, k, v, out, lse, None, None, 40, 40, 0.25, True, state, unused
    )
    expected = attention_backward_reference(*bshd(dout, q, k, v), None, True, **options)
    for grad, want in zip(grads, expected, strict=True):
        assert_close(grad, want.transpose(1, 2))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 0), (5, 3)], ids=str)
def test_torch_backend_varlen_ops_match_the_reference(window):
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 30, 30, 70], [0, 50, 60, 95]))
    q, dout = (torch.randn(70, 4, 64).to(BF16) for _ in range(2))
    k, v = (torch.randn(95, 2, 64).to(BF16) for _ in range(2))
    bounds = {"window_size_left": window[0], "window_size_right": window[1]}
    causal = window == (-1, 0)
    lengths = cu_q, cu_k, 40, 50
    out, lse, state, unused, _ = torch_backend.flash_forward(q, k, v, *lengths, 0.0, causal, False, **bounds)
    expected, expected_lse = varlen_reference(q, k, v, cu_q, cu_k, window=window)
    assert_close(out, expected)
    assert_close(lse.nan_to_num(neginf=0), expected_lse.nan_to_num(neginf=0))
    assert torch.equal(lse == -math.inf, expected_lse == -math.inf)
    grads = torch_backend.flash_backward(
        dout, q, k, v, out, lse, *lengths, 0.0, causal, state, unused, **bounds
    )
    for grad, want in zip(
        grads, varlen_backward_reference(dout, q, k, v, cu_q, cu_k, window=window), strict=True
    ):
        assert_close(grad, want)


def test_torch_backend_forward_inplace_with_seqused_k():
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [0, 50, 100]))
    used = torch.tensor([13, 50], dtype=torch.int32)
    q, (k, v) = torch.randn(2, 4, 64).to(BF16), torch.randn(2, 100, 2, 64).to(BF16)
    out = torch.empty_like(q)
    options = {"window_size_left": -1, "window_size_right": -1, "seqused_k": used}
    lse = torch_backend.flash_forward_inplace(out, q, k, v, cu_q, cu_k, 1, 50, 0.0, True, False, **options)
    expected, expected_lse = varlen_reference(q, k, v, cu_q, cu_k, None, True, seqused_k=used)
    assert_close(out, expected)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize(
    "shape, dtype, error", [((2, 4, 64), torch.float32, TypeError), ((3, 4, 64), BF16, ValueError)]
)
def test_torch_backend_forward_inplace_refuses_another_out(shape, dtype, error):
    cu, q = torch.tensor([0, 1, 2], dtype=torch.int32), torch.randn(2, 4, 64).to(BF16)
    with pytest.raises(error, match="^out: expected "):
        torch_backend.flash_forward_inplace(
            torch.empty(shape, dtype=dtype), q, q, q, cu, cu, 1, 1, 0.0, False, False
        )


def test_torch_backend_dense_windows_and_alibi():
    q, (k, v) = torch.randn(1, 30, 4, 64).to(BF16), torch.randn(2, 1, 50, 2, 64).to(BF16)
    slopes = torch.rand(4)
    out, lse, *_ = torch_backend.flash_forward(
        q,
        k,
        v,
        None,
        None,
        30,
        50,
        0.0,
        False,
        False,
        window_size_left=7,
        window_size_right=2,
        alibi_slopes=slopes,
    )
    expected, expected_lse = attention_reference(q, k, v, window=(7, 2), alibi_slopes=slopes)
    assert_close(out, expected)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_torch_backend_passes_num_splits(name, monkeypatch):
    seen = []
    run = getattr(torch_backend, name)
    monkeypatch.setattr(
        torch_backend, name, lambda *x, **options: seen.append(options["num_splits"]) or run(*x, **options)
    )
    q, cu = torch.randn(1, 30, 4, 64).to(BF16), None
    if "varlen" in name:
        q, cu = q[0], torch.tensor([0, 30], dtype=torch.int32)
    for num_splits in (None, 1, 3):
        torch_backend.flash_forward(q, q, q, cu, cu, 30, 30, 0.0, False, False, num_splits=num_splits)
    assert seen == [0, 1, 3]


def test_torch_backend_errors():
    q = torch.randn(1, 30, 4, 64).to(BF16)
    cu = torch.tensor([0, 30], dtype=torch.int32)

    def call(q=q, debug=False, cum_seq_q=None, cum_seq_k=None, **options):
        torch_backend.flash_forward(q, q, q, cum_seq_q, cum_seq_k, 30, 30, 0.0, False, debug, **options)

    with pytest.raises(NotImplementedError, match="return_debug_mask: "):
        call(debug=True)
    with pytest.raises(NotImplementedError, match="return_debug_mask: "):
        torch_backend.sdpa_forward(q, q, q, return_debug_mask=True)
    with pytest.raises(NotImplementedError, match="block_table: "):
        call(block_table=cu)
    with pytest.raises(ValueError, match="num_splits: "):
        call(num_splits=-1)
    with pytest.raises(NotImplementedError, match="cum_seq_k: "):
        call(cum_seq_q=cu)
    with pytest.raises(NotImplementedError, match="seqused_k: "):
        call(seqused_k=cu[1:])
    with pytest.raises(NotImplementedError, match="alibi_slopes: "):
        call(q=q.clone().requires_grad_(), alibi_slopes=torch.rand(4))
    with pytest.raises(TypeError, match="^query: expected bfloat16, float16 or float32"):
        call(q=q.double())


def test_torch_backend_names_the_arguments_of_varlen_attn():
    cu, q = torch.tensor([0, 3, 5], dtype=torch.int32), torch.randn(5, 2, 16).bfloat16()

    def call(cu=cu, longest=3, k=q):
        torch_backend.flash_forward(q, k, k, cu, cu, longest, longest, 0.0, False, False)

    with pytest.raises(TypeError, match=r"^cu_seq_q: expected torch.int32.*cu_seq_q\.to\(torch.int32\)$"):
        call(cu=cu.long())
    with pytest.raises(IndexError, match="^max_q: expected at least 3"):
        call(longest=2)
    with pytest.raises(ValueError, match="^key: expected "):
        call(k=q[..., :8])


def test_torch_backend_follows_deterministic_algorithms(monkeypatch):
    seen = []
    run = torch_backend.run_backward_op

    def record(tensors, dlse, call, options):
        seen.append(Call(*call).deterministic)
        return run(tensors, dlse, call, options)

    monkeypatch.setattr(torch_backend, "run_backward_op", record)
    q = rand(1, 2, 8, 64)
    out, lse, *rest = torch_backend.sdpa_forward(q, q, q)
    for asked in (False, True):
        torch.use_deterministic_algorithms(asked)
        try:
            torch_backend.sdpa_backward(q, q, q, q, out, lse, *rest[:4], 0.0, False, *rest[4:6])
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


def exact(function, *inputs):
    """out_and_gradients in fp32."""
    return out_and_gradients(function, *(x.detach().float() for x in inputs))


def out_and_gradients(function, *inputs):
    """Output and input gradients of a function, with a dout of seed 0."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    dout = torch.randn(out.shape, generator=torch.Generator(out.device).manual_seed(0), device=out.device)
    return out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))


def sdpa(**options):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


@pytest.fixture
def calls(monkeypatch):
    """Record the names of the ops that reach tl_attention."""
    seen = []

    def spied(name, function):
        return lambda *args, **kwargs: seen.append(name) or function(*args, **kwargs)

    spies = {name: spied(name, function) for name, function in torch_backend.KERNELS.items()}
    monkeypatch.setattr(torch_backend, "KERNELS", spies)
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("heads_last", [False, True], ids=["bhsd", "bshd"])
@pytest.mark.parametrize("head_dim", [64, 100, 128])
def test_torch_backend_sdpa_calls_tl_attention(calls, handle, compiled, heads_last, head_dim):
    q = rand(2, 8, 300, head_dim, device="cuda", heads_last=heads_last)
    k, v = (rand(2, 2, 300, head_dim, device="cuda", heads_last=heads_last) for _ in range(2))
    function = sdpa(is_causal=True, enable_gqa=True)
    run = torch.compile(function) if compiled else function
    got = out_and_gradients(run, q, k, v)
    assert calls == ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"]
    handle.remove()
    for x, want in zip(got, exact(function, q, k, v), strict=True):
        assert_close(x, want)
    calls.clear()
    function(q, k, v)
    assert not calls


@pytest.mark.gpu
def test_torch_backend_sdpa_dropout(calls, handle):
    q, k, v = (rand(1, 4, 512, 64, device="cuda") for _ in range(3))
    v = torch.ones_like(v)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert calls
    assert 0.9 < out.float().mean() < 1.1
    assert out.float().std() > 0.01


@pytest.mark.gpu
def test_torch_backend_unsupported_calls_use_other_backends(calls, handle):
    q, k, v = rand(1, 2, 50, 64, device="cuda"), *(rand(1, 2, 80, 64, device="cuda") for _ in range(2))
    mask = torch.rand(50, 80, device="cuda") > 0.5
    top_left = torch.ones(50, 80, dtype=torch.bool, device="cuda").tril()
    cases = {
        "mask": (sdpa(attn_mask=mask), sdpa(attn_mask=mask), (q, k, v)),
        "top-left": (sdpa(is_causal=True), sdpa(attn_mask=top_left), (q, k, v)),
        "head dims": (sdpa(), sdpa(), (q, k, v[..., :32])),
    }
    for function, expected, inputs in cases.values():
        assert_close(function(*inputs), expected(*(x.float() for x in inputs)))
        assert not calls


@pytest.mark.gpu
def test_torch_backend_causal_lower_right(calls, handle):
    q, k, v = rand(1, 2, 50, 64, device="cuda"), *(rand(1, 2, 80, 64, device="cuda") for _ in range(2))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.causal_lower_right(50, 80))
    assert calls == ["_scaled_dot_product_flash_attention"]
    assert_close(out, attention_reference(*bshd(q, k, v), None, True)[0].transpose(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 0)], ids=str)
def test_torch_backend_varlen_attn_calls_tl_attention(calls, handle, window):
    cu = torch.tensor([0, 100, 130, 400], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(400, 4, 64, device="cuda", dtype=BF16) for _ in range(3))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = varlen_attn(*inputs, cu, cu, 270, 270, window_size=window)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, dout)
    assert calls == ["_flash_attention_forward", "_flash_attention_backward"]
    assert_close(out.detach(), varlen_reference(q.detach(), k.detach(), v.detach(), cu, cu, window=window)[0])
    for grad, want in zip(
        grads, varlen_backward_reference(dout, q, k, v, cu, cu, window=window), strict=True
    ):
        assert_close(grad, want)


@pytest.mark.gpu
def test_torch_backend_nested_tensors(calls, handle):
    rows = [torch.randn(n, 4, 64, device="cuda", dtype=BF16) for n in (100, 30, 270)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    out = F.scaled_dot_product_attention(nested, nested, nested, is_causal=True)
    assert calls == ["_flash_attention_forward"]
    for got, x in zip(out.transpose(1, 2).unbind(), rows, strict=True):
        assert_close(got, attention_reference(x[None], x[None], x[None], None, True)[0][0])


@pytest.mark.parametrize("scale", [1e39, math.inf, math.nan])
def test_torch_backend_names_its_own_scale(scale):
    q = torch.randn(1, 2, 8, 64).bfloat16()
    with pytest.raises(ValueError, match="^scale: expected"):
        torch_backend.sdpa_forward(q, q, q, scale=scale)
    with pytest.raises(ValueError, match="^scale: expected"):
        torch_backend.flash_forward(q, q, q, None, None, 2, 2, 0.0, False, False, scale=scale)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("heads_last", [False, True])
def test_torch_backend_sdpa_errors_have_the_names_and_layout_of_sdpa(heads_last, dropout):
    def tensor(heads, head_dim=8, seqlen=6):
        x = torch.randn(2, seqlen, heads, head_dim) if heads_last else torch.randn(2, heads, seqlen, head_dim)
        return (x.transpose(1, 2) if heads_last else x).bfloat16()

    q = tensor(4)
    layout = (
        r"^key, value: expected a number of heads that divides the 4 of query, got 3; tensors are"
        r" \[batch, heads, seqlen, head_dim\]: call transpose\(1, 2\) if yours are \[batch, seqlen, heads, head_dim\]$"
    )
    for error, text, k, v in (
        (ValueError, layout, tensor(3), tensor(3)),
        (NotImplementedError, r"^value: expected a head_dim .*zeros and pass scale explicitly$", tensor(4), tensor(4, 16)),
        (ValueError, r"^value: expected the heads and seqlen of key, 4 and 6, got 4 and 5", tensor(4), tensor(4, seqlen=5)),
        (TypeError, r"^key, value: expected the dtype of query", tensor(4).half(), tensor(4)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            torch_backend.sdpa_forward(q, k, v, dropout)
    with pytest.raises(TypeError, match=r"^is_causal: expected a bool"):
        torch_backend.sdpa_forward(q, q, q, dropout, is_causal=1)
