"""Head dims that are no multiple of 8: outputs and gradients, and the copies of a launch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, vmap

from tl_attention import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    launch,
    mha_bwd_interface,
    mha_fwd_interface,
)
from tl_attention.integrations import hf, torch_backend
from tl_attention.reference import attention_backward_reference, attention_reference

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16 = torch.bfloat16
WIDTHS = [(60, 60), (1, 1), (7, 3), (100, 36), (64, 33), (121, 121), (255, 130), (20, 8)]
widths = pytest.mark.parametrize("width", WIDTHS, ids=lambda width: f"d{width[0]}-{width[1]}")


def leaves(device, width, *lead):
    """q, k, v [*lead of each, head_dim or head_dim_v] that require gradients."""
    widths = width[0], width[0], width[1]
    sizes = zip(lead, widths, strict=True)
    return [torch.randn(*shape, n, dtype=BF16, device=device).requires_grad_() for shape, n in sizes]


DENSE = (2, 9, 4), (2, 20, 2), (2, 20, 2)
PACKED = (11, 4), (20, 2), (20, 2)


def assert_close(results, wanted):
    for i, (x, y) in enumerate(zip(results, wanted, strict=True)):
        assert x.shape == y.shape, i
        torch.testing.assert_close(x.double(), y.double(), rtol=0.02, atol=0.02 * float(y.abs().max()))


def with_gradients(function, inputs, dtype=None):
    """out, lse and gradients through both."""
    inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    out, lse = function(*inputs)
    weights = torch.linspace(-1, 2, out.numel(), device=out.device).view(out.shape)
    loss = (out * weights).sum() + lse.square().sum()
    return out, lse, *torch.autograd.grad(loss, inputs)


def reference(q, k, v, **options):
    return attention_reference(q, k, v, dtype=torch.float64, **options)


@widths
def test_dense_outputs_and_gradients(width, device):
    inputs = leaves(device, width, *DENSE)

    def ours(q, k, v):
        return flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2]

    results = with_gradients(ours, inputs)
    assert_close(results, with_gradients(lambda *x: reference(*x, causal=True), inputs, torch.float64))
    assert all(x.is_contiguous() for x in results)


@widths
def test_heads_first_outputs_and_gradients(width, device):
    inputs = [x.detach().transpose(1, 2) for x in leaves(device, width, *DENSE)]

    def expected(q, k, v):
        out, lse = reference(*(x.transpose(1, 2) for x in (q, k, v)), lse_base2=True)
        return out.transpose(1, 2), lse

    q, k, v = inputs
    assert_close(with_gradients(mha_fwd_interface, inputs), with_gradients(expected, inputs, torch.float64))
    out, lse = mha_fwd_interface(*inputs)
    kernel = mha_fwd_interface(*inputs, return_kernel=True)
    assert_close(kernel(*inputs), (out, lse))
    do = torch.randn_like(out)
    views = (x.transpose(1, 2) for x in (do, q, k, v))
    wanted = [x.transpose(1, 2) for x in attention_backward_reference(*views, dtype=torch.float64)]
    grads = mha_bwd_interface(do, q, k, v, out, lse)
    assert_close(grads, wanted)
    assert all(x.is_contiguous() for x in grads)
    kernel = mha_bwd_interface(do, q, k, v, out, lse, return_kernel=True)
    assert_close(kernel(do, q, k, v, out, lse), wanted)


@widths
def test_packed_sequences_with_options(width, device):
    """Each sequence equals a call of its own."""
    inputs = leaves(device, width, *PACKED)
    cu_q, cu_k = (torch.tensor(x, device=device).int() for x in ([0, 4, 11], [0, 12, 20]))
    sink = torch.linspace(-1, 1, 4, device=device)
    slopes = torch.linspace(0.1, 0.5, 4, device=device)

    def ours(q, k, v, sink):
        options = {"window_size": (5, 2), "softcap": 3.0, "alibi_slopes": slopes, "learnable_sink": sink}
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 12, **options, return_attn_probs=True)[:2]

    def expected(q, k, v, sink):
        options = {"window": (5, 2), "softcap": 3.0, "alibi_slopes": slopes, "sink": sink}
        parts = [
            reference(q[None, a:b], k[None, c:d], v[None, c:d], **options)
            for a, b, c, d in ((0, 4, 0, 12), (4, 11, 12, 20))
        ]
        return torch.cat([x[0] for x, _ in parts]), torch.cat([x[0] for _, x in parts], 1)

    inputs = [*inputs, sink]
    assert_close(with_gradients(ours, inputs), with_gradients(expected, inputs, torch.float64))


@pytest.mark.parametrize("width", [60, 121])
def test_packed_tensors_have_one_gradient(width, device):
    qkv = torch.randn(2, 9, 3, 4, width, dtype=BF16, device=device, requires_grad=True)
    q, kv = qkv[:, :, 0], qkv[:, :, 1:]
    results = []
    for out in (
        flash_attn_func(*qkv.unbind(2)),
        flash_attn_qkvpacked_func(qkv),
        flash_attn_kvpacked_func(q, kv),
    ):
        results.append((out, *torch.autograd.grad(out.float().square().sum(), qkv)))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])


def test_scale_defaults_to_the_head_dim_of_the_caller(device):
    q, k, v = leaves(device, (60, 60), *DENSE)
    wanted = flash_attn_func(q, k, v, softmax_scale=60**-0.5)
    assert_close([flash_attn_func(q, k, v)], [wanted])
    more = flash_attn_func(q, k, v, softmax_scale=64**-0.5)
    assert not torch.allclose(more, wanted, rtol=1e-3, atol=1e-4)


def test_compile_and_transforms(device):
    torch._dynamo.reset()
    inputs = [x.detach() for x in leaves(device, (60, 36), *DENSE)]

    def loss(q, k, v):
        return flash_attn_func(q, k, v, causal=True).float().square().sum()

    leaf = [x.clone().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(loss(*leaf), leaf)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    assert_close(torch.autograd.grad(compiled(*leaf), leaf), wanted)
    assert_close(grad(loss, (0, 1, 2))(*inputs), wanted)
    one = vmap(grad(lambda *x: loss(*(y[None] for y in x)), (0, 1, 2)))(*inputs)
    assert_close(one, wanted)
    arguments = 0.125, True, False, False, False
    torch.library.opcheck(torch.ops.tl_attention.fwd.default, (*leaf, *arguments))


def test_meta_tensors_have_the_shapes_of_the_caller():
    q, k, v = (torch.empty(2, 9, 4, n, dtype=BF16, device="meta") for n in (60, 60, 36))
    out, lse = torch.ops.tl_attention.fwd(q, k, v, 0.125, True, False, False, False)
    assert out.shape == (2, 9, 4, 36) and lse.shape == (2, 4, 9)


def test_torch_backend_takes_odd_head_dims(device):
    """The functions behind aten's ops, which other callers than F.scaled_dot_product_attention may call without padding."""
    q, k, v = (x.detach() for x in leaves(device, (60, 60), (2, 9, 4), (2, 9, 4), (2, 9, 4)))
    out, lse, state, *_ = torch_backend.flash_forward(q, k, v, None, None, 9, 9, 0.0, True, False)
    dout = torch.randn_like(out)
    rest = None, None, 9, 9, 0.0, True, state, state
    grads = torch_backend.flash_backward(dout, q, k, v, out, lse, *rest)
    wanted = attention_backward_reference(dout, q, k, v, None, True, dtype=torch.float64)
    assert_close(grads, wanted)
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    assert_close([torch_backend.sdpa_forward(*heads_first, 0.0, True)[0].transpose(1, 2)], [out])


def test_transformers_decode_without_a_cache_kernel(device):
    """One new query of a model whose head dim a cache kernel cannot read."""
    module = torch.nn.Module()
    q, k, v = (
        x.detach().transpose(1, 2) for x in leaves(device, (60, 60), (2, 1, 4), (2, 20, 2), (2, 20, 2))
    )
    out, _ = hf.attention_forward(module, q, k, v, None)
    assert_close([out], [reference(*(x.transpose(1, 2) for x in (q, k, v)))[0]])


def test_a_cache_is_refused_with_the_way_out():
    q, cache = torch.zeros(2, 1, 4, 60, dtype=BF16), torch.zeros(2, 20, 2, 60, dtype=BF16)
    text = (
        r"^q, k_cache, v_cache: expected head dims that are multiples of 8, got 60 .*a cache is never copied: allocate caches 64 and 64 "
        r".*softmax_scale=60 \*\* -0\.5 and slice out\[\.\.\., :60\]$"
    )
    with pytest.raises(ValueError, match=text):
        flash_attn_with_kvcache(q, cache, cache)


class PaddedPlans(dict):
    """Plans of a launch for every key without odd head dims: the reference, which notes what it was called with."""

    def __init__(self, run):
        self.run, self.calls = run, []

    def get(self, key):
        widths = {x[-1] for x in key if isinstance(x, torch.Size) and len(x) == 4}
        return None if any(n % 8 for n in widths) else self

    def __call__(self, *arguments):
        self.calls.append([tuple(x.shape) for x in arguments if isinstance(x, torch.Tensor)])
        return self.run(*arguments)


@pytest.mark.parametrize("width", [(60, 60), (60, 32), (64, 33)], ids=str)
def test_a_launch_pads_and_cuts(width, monkeypatch):
    """launch.forward and launch.backward themselves, with plans that compute on the CPU."""
    inputs = [x.detach() for x in leaves("cpu", width, *DENSE)]
    padded = [-(-n // 8) * 8 for n in width]

    def forward(q, k, v, scale, lse_base2, *options):
        out, lse = attention_reference(q, k, v, scale, True, lse_base2=lse_base2)
        assert not out[..., width[1] :].any()
        return out.to(BF16), lse

    def backward(dout, q, k, v, out, lse, scale, lse_base2, dlse, *options):
        assert not dout[..., width[1] :].any() and not out[..., width[1] :].any()
        grads = attention_backward_reference(dout, q, k, v, scale, True, dlse=dlse, lse_base2=lse_base2)
        return {name: x.to(BF16) for name, x in zip("qkv", grads, strict=True)}

    forwards, backwards = PaddedPlans(forward), PaddedPlans(backward)
    monkeypatch.setattr(launch.fwd.plan_cache, "plans", forwards)
    monkeypatch.setattr(launch.bwd.plan_cache, "plans", backwards)
    scale = width[0] ** -0.5
    out, lse = launch.forward(*inputs, scale, True, False)
    wanted, wanted_lse = attention_reference(*inputs, scale, True)
    assert out.is_contiguous()
    assert_close([out, lse], [wanted, wanted_lse])
    assert {shape[-1] for shape in forwards.calls[0]} == set(padded)

    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = tuple(launch.backward(dout, *inputs, out, lse, scale, True, False, dlse=dlse).values())
    assert_close(grads, attention_backward_reference(dout, *inputs, scale, True, dlse=dlse))
    assert all(x.is_contiguous() and x.dtype == BF16 for x in grads)
    assert math.prod(forwards.calls[0][0]) == 2 * 9 * 4 * padded[0]
