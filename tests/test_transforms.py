"""torch.func and torch.vmap: gradients, per-sample gradients, and what is refused by name."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch.func import functional_call, grad, jacrev, vjp, vmap

from tl_attention import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    mha_fwd_interface,
)

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16 = torch.bfloat16
SAMPLES, BATCH, HEADS, HEADS_KV, HEAD_DIM = 3, 2, 4, 2, 64
TOTAL_Q, TOTAL_K = 9, 20


def random(device, *sizes):
    return [torch.randn(size, dtype=BF16, device=device) for size in sizes]


def bounds(device, *ends):
    return torch.tensor(ends, device=device).int()


# Form: sizes of the tensors, function(*tensors, **options) -> (out, lse)
def of_flash(function, *lengths):
    def attend(*tensors, **options):
        device = tensors[0].device
        more = [bounds(device, *x) if isinstance(x, tuple) else x for x in lengths]
        return function(*tensors, *more, **options, return_attn_probs=True)[:2]

    return attend


CU_Q, CU_K = (0, 4, 9), (0, 12, 20)
FORMS = {
    "flash": ([(BATCH, 9, HEADS, HEAD_DIM), (BATCH, 20, HEADS_KV, HEAD_DIM), (BATCH, 20, HEADS_KV, 32)], of_flash(flash_attn_func)),
    "qkv": ([(BATCH, 9, 3, HEADS, HEAD_DIM)], of_flash(flash_attn_qkvpacked_func)),
    "kv": ([(BATCH, 9, HEADS, HEAD_DIM), (BATCH, 20, 2, HEADS_KV, HEAD_DIM)], of_flash(flash_attn_kvpacked_func)),
    "varlen": (
        [(TOTAL_Q, HEADS, HEAD_DIM), (TOTAL_K, HEADS_KV, HEAD_DIM), (TOTAL_K, HEADS_KV, 32)],
        of_flash(flash_attn_varlen_func, CU_Q, CU_K, 5, 12),
    ),
    "varlen-qkv": ([(TOTAL_Q, 3, HEADS, HEAD_DIM)], of_flash(flash_attn_varlen_qkvpacked_func, CU_Q, 5)),
    "varlen-kv": (
        [(TOTAL_Q, HEADS, HEAD_DIM), (TOTAL_K, 2, HEADS_KV, HEAD_DIM)],
        of_flash(flash_attn_varlen_kvpacked_func, CU_Q, CU_K, 5, 12),
    ),
    "mha": (
        [(BATCH, HEADS, 9, HEAD_DIM), (BATCH, HEADS_KV, 20, HEAD_DIM), (BATCH, HEADS_KV, 20, 32)],
        lambda *tensors, causal=False: mha_fwd_interface(*tensors, is_causal=causal),
    ),
}  # fmt: skip
forms = pytest.mark.parametrize("form", FORMS)


def options(device):
    slopes = torch.linspace(0.1, 1.2, BATCH * HEADS, device=device).view(BATCH, HEADS)
    dropout = {"dropout_p": 0.4, "rng_state": torch.tensor([2**40 + 7, 3], device=device)}
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window_size": (5, 3), "softcap": 1.5},
        "alibi": {"alibi_slopes": slopes[0], "causal": True},
        "alibi-of-each": {"alibi_slopes": slopes},
        "sink": {"learnable_sink": slopes[1].clone(), "alibi_slopes": slopes},
        "dropout": dropout,
        "everything": {
            "window_size": (9, 0), "softcap": 2.0, "alibi_slopes": slopes, "learnable_sink": slopes[0].clone(), **dropout,
        },
    }  # fmt: skip


CASES = [
    (form, name) for form in FORMS for name in options("cpu") if form != "mha" or name in ("plain", "causal")
]
cases = pytest.mark.parametrize(("form", "name"), CASES, ids=map("-".join, CASES))


def loss_of(attend, arguments, out_weight=0.5):
    """A scalar function of the tensors of attend, and of the sink as one more."""

    def loss(*tensors):
        changed = dict(arguments)
        if "learnable_sink" in arguments:
            *tensors, changed["learnable_sink"] = tensors
        out, lse = attend(*tensors, **changed)
        return out_weight * (out.float() ** 2).sum() + lse.masked_fill(lse == -math.inf, 0).square().sum()

    return loss


def assert_close(results, wanted):
    assert len(results) == len(wanted)
    for i, (x, y) in enumerate(zip(results, wanted, strict=True)):
        assert x.shape == y.shape and x.dtype == y.dtype, i
        torch.testing.assert_close(
            x.float(), y.float(), rtol=0.02, atol=0.02 * float(y.abs().max()), msg=lambda m, i=i: f"{i}: {m}"
        )


def inputs_of(form, arguments, device, *samples):
    tensors = random(device, *((*samples, *size) for size in FORMS[form][0]))
    if "learnable_sink" in arguments:
        tensors.append(arguments["learnable_sink"].expand(*samples, HEADS).clone())
    return tensors


def by_autograd(loss, tensors):
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(loss(*tensors), tensors)


@cases
def test_grad_and_vjp_equal_autograd(form, name, device):
    arguments = options(device)[name]
    tensors, loss = inputs_of(form, arguments, device), loss_of(FORMS[form][1], arguments)
    wanted = by_autograd(loss, tensors)
    everything = tuple(range(len(tensors)))
    assert_close(grad(loss, everything)(*tensors), wanted)
    value, pull = vjp(loss, *tensors)  # pull runs after its transform has ended
    assert_close(pull(torch.ones_like(value)), wanted)


@pytest.mark.in_turn(75)
@cases
@pytest.mark.parametrize("batched", ["all", "first", "last"])
def test_vmap_equals_a_loop(form, name, batched, device):
    """Outputs and per-sample gradients, where all tensors or one of them have samples."""
    arguments = options(device)[name]
    attend = FORMS[form][1]
    loss = loss_of(attend, arguments)
    tensors = inputs_of(form, arguments, device, SAMPLES)
    count = len(tensors)
    chosen = {"all": range(count), "first": [0], "last": [count - 1]}[batched]
    in_dims = tuple(0 if i in chosen else None for i in range(count))
    tensors = [x if dim == 0 else x[0] for x, dim in zip(tensors, in_dims, strict=True)]
    samples = [
        [x if dim is None else x[i] for x, dim in zip(tensors, in_dims, strict=True)] for i in range(SAMPLES)
    ]
    everything = tuple(range(count))

    per_sample = vmap(grad(loss, everything), in_dims)(*tensors)
    assert_close(
        per_sample, [torch.stack(x) for x in zip(*(by_autograd(loss, x) for x in samples), strict=True)]
    )

    def outputs(*x):
        sink = {"learnable_sink": x[-1]} if "learnable_sink" in arguments else {}
        return attend(*x[: len(FORMS[form][0])], **arguments | sink)

    wanted = [torch.stack(x) for x in zip(*(outputs(*x) for x in samples), strict=True)]
    for x, y in zip(vmap(outputs, in_dims)(*tensors), wanted, strict=True):
        assert torch.equal(x == -math.inf, y == -math.inf)
        assert_close([x.masked_fill(x == -math.inf, 0)], [y.masked_fill(y == -math.inf, 0)])

    # The gradient of the sum over the samples: the backward of the batching rule
    leaves = [x.clone().requires_grad_() for x in tensors]
    total = torch.autograd.grad(vmap(loss, in_dims)(*leaves).sum(), leaves)
    summed = [
        x if dim == 0 else x.float().sum(0).to(x.dtype) for x, dim in zip(per_sample, in_dims, strict=True)
    ]
    assert_close(total, summed)


@pytest.mark.parametrize("in_dims", [(1, 1, 1), (0, 2, 3), (2, None, 0)], ids=str)
def test_vmap_over_any_dimension(in_dims, device):
    sizes = FORMS["flash"][0]
    tensors = []
    for x, dim in zip(random(device, *((SAMPLES, *size) for size in sizes)), in_dims, strict=True):
        tensors.append(x[0] if dim is None else x.movedim(0, dim).contiguous())
    result = vmap(flash_attn_func, in_dims)(*tensors)
    wanted = [
        flash_attn_func(*(x if d is None else x.select(d, i) for x, d in zip(tensors, in_dims, strict=True)))
        for i in range(SAMPLES)
    ]
    assert_close([result], [torch.stack(wanted)])


def test_vmap_in_vmap(device):
    tensors = random(device, *((2, SAMPLES, *size) for size in FORMS["flash"][0]))
    result = vmap(vmap(flash_attn_func), (0, 0, 0))(*tensors)
    wanted = [
        torch.stack([flash_attn_func(*y) for y in zip(*x, strict=True)]) for x in zip(*tensors, strict=True)
    ]
    assert_close([result], [torch.stack(wanted)])


@pytest.mark.parametrize("size", [0, 1])
@forms
def test_vmap_over_few_samples(form, size, device):
    sizes, attend = FORMS[form]
    tensors = random(device, *((size, *shape) for shape in sizes))
    out, lse = vmap(attend)(*tensors)
    one, one_lse = attend(*random(device, *sizes))
    assert out.shape == (size, *one.shape) and lse.shape == (size, *one_lse.shape)
    grads = vmap(grad(lambda *x: attend(*x)[0].float().sum(), tuple(range(len(tensors)))))(*tensors)
    assert [x.shape for x in grads] == [x.shape for x in tensors]


def test_vmap_over_lengths_and_states_of_no_samples(device):
    q = torch.randn(0, 6, HEADS, 16, device=device)
    bounds = torch.zeros(0, 3, dtype=torch.int32, device=device)
    out, largest = vmap(lambda q, cu: flash_attn_varlen_func(q, q, q, cu, cu, 6, 6, return_max_logits=True))(
        q, bounds
    )
    assert out.shape == q.shape and largest.shape == (0, HEADS, 6)
    one, states = q.new_zeros(1, 6, HEADS, 16), torch.zeros(0, 2, dtype=torch.int64, device=device)
    assert vmap(lambda x: flash_attn_func(one, one, one, 0.5, rng_state=x))(states).shape == (0, *one.shape)
    drop = vmap(lambda q: flash_attn_func(q[None], q[None], q[None], 0.5), randomness="different")
    assert drop(q).shape == (0, *one.shape)


def test_vmap_over_options_of_each_sample(device):
    """Slopes, sinks and seeds of its own per sample."""
    q, k, v = random(device, *FORMS["flash"][0])
    slopes = torch.rand(SAMPLES, HEADS, device=device)
    of_each = torch.rand(SAMPLES, BATCH, HEADS, device=device)
    states = torch.tensor([[5, 1], [6, 1], [5, 1]], device=device)
    for samples, attend in (
        (slopes, lambda x: flash_attn_func(q, k, v, alibi_slopes=x)),
        (of_each, lambda x: flash_attn_func(q, k, v, alibi_slopes=x)),
        (slopes, lambda x: flash_attn_func(q, k, v, learnable_sink=x)),
        (states, lambda x: flash_attn_func(q, k, v, 0.5, rng_state=x)),
    ):
        assert_close([vmap(attend)(samples)], [torch.stack([attend(x) for x in samples])])


def test_vmap_over_lengths_of_each_sample(device):
    tensors = random(device, *((SAMPLES, *size) for size in FORMS["varlen"][0]))
    cu_q = torch.stack([bounds(device, 0, n, TOTAL_Q) for n in (4, 0, 7)])
    cu_k = torch.stack([bounds(device, 0, n, TOTAL_K) for n in (12, 5, 20)])

    def attend(q, k, v, cu_q, cu_k):
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, TOTAL_Q, TOTAL_K, causal=True)

    arguments = *tensors, cu_q, cu_k
    wanted = torch.stack([attend(*x) for x in zip(*arguments, strict=True)])
    assert_close([vmap(attend)(*arguments)], [wanted])


@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_dropout_follows_the_randomness_of_vmap(randomness, device):
    q, k, v = (x.expand(SAMPLES, *x.shape) for x in random(device, *FORMS["flash"][0]))

    def attend(q, k, v):
        return flash_attn_func(q, k, v, dropout_p=0.5)

    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(attend, randomness=randomness)(q, k, v)
        return
    out = vmap(attend, randomness=randomness)(q, k, v)
    assert torch.equal(out[0], out[1]) == torch.equal(out[0], out[2]) == (randomness == "same")


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_under_vmap_have_the_mask_of_the_forward(randomness, device):
    """The loss is linear in v: its gradient, applied to v, is the loss."""
    tensors = random(device, *((SAMPLES, *size) for size in FORMS["flash"][0]))

    def loss_and_product(q, k, v):
        dv, loss = grad(
            lambda v: (2 * flash_attn_func(q, k, v, dropout_p=0.5).float().sum(),) * 2, has_aux=True
        )(v)
        return loss, (dv.float() * v.float()).sum()

    losses, products = vmap(loss_and_product, randomness=randomness)(*tensors)
    torch.testing.assert_close(losses, products, rtol=0.02, atol=0.5)


def test_jacrev_equals_gradients_of_each_output(device):
    q, k, v = random(device, (1, 2, 2, 8), (1, 3, 2, 8), (1, 3, 2, 8))

    def attend(q):
        return flash_attn_func(q, k, v)[0, :, :, :2].float()

    jacobian = jacrev(attend)(q)
    assert jacobian.shape == (2, 2, 2, *q.shape)
    leaf = q.clone().requires_grad_()
    out = attend(leaf)
    wanted = [torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in out.flatten()]
    assert_close([jacobian.flatten(0, 2)], [torch.stack(wanted)])
    batched = torch.autograd.grad(
        out, leaf, torch.eye(8, device=device).view(8, 2, 2, 2), is_grads_batched=True
    )
    assert_close(batched, [torch.stack(wanted)])


def test_per_sample_gradients_of_a_layer(device):
    """The usual recipe: vmap(grad) over functional_call."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 96, device=device, dtype=BF16)
    x = torch.randn(4, 6, 32, device=device, dtype=BF16)

    def loss(parameters, x):
        qkv = functional_call(layer, parameters, (x[None],)).unflatten(-1, (3, 2, 16))
        return flash_attn_qkvpacked_func(qkv, causal=True).float().square().mean()

    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    per_sample = vmap(grad(loss), (None, 0))(parameters, x)
    for i in range(4):
        wanted = torch.autograd.grad(loss(dict(layer.named_parameters()), x[i]), list(layer.parameters()))
        assert_close([per_sample[name][i] for name in parameters], wanted)


COMPILED = {
    "grad": lambda loss: grad(loss, (0, 1, 2)),
    "vmap": lambda loss: vmap(loss),
    "vmap-grad": lambda loss: vmap(grad(loss, (0, 1, 2))),
}


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("transform", COMPILED)
@pytest.mark.parametrize(
    ("form", "name"),
    [("flash", "causal"), ("flash", "alibi-of-each"), ("flash", "everything"), ("varlen", "everything")],
)
def test_compile_of_transforms_has_no_break(form, transform, name, device):
    torch._dynamo.reset()
    arguments = options(device)[name]
    attend = FORMS[form][1]
    samples = (SAMPLES,) if "vmap" in transform else ()
    tensors = random(device, *((*samples, *size) for size in FORMS[form][0]))

    def loss(q, k, v):
        return attend(q, k, v, **arguments)[0].float().square().sum()

    function = COMPILED[transform](loss)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(lambda *x: function(*x), fullgraph=True, backend=backend)
    results, wanted = compiled(*tensors), function(*tensors)
    assert_close(*((x if isinstance(x, tuple) else (x,)) for x in (results, wanted)))


def test_module_of_the_ops_loads_again():
    """Reload as an editor does, in a process of its own."""
    code = """
import importlib, torch
from tl_attention.api import flash
from tl_attention.torch_ops import ops
for module in (ops, flash, ops, flash):
    importlib.reload(module)
    q = torch.ones(1, 2, 2, 8, dtype=torch.bfloat16)
    torch.func.grad(lambda q: flash.flash_attn_func(q, q, q).float().sum())(q)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap-grad", "compile", "compile-vmap-grad"])
def test_lengths_are_checked_under_transforms(transform, device):
    torch._dynamo.reset()
    (q,) = random(device, (SAMPLES, TOTAL_Q, HEADS, HEAD_DIM))

    def attend(q, cu, check_lengths=True):
        return flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, check_lengths=check_lengths)

    def loss(*arguments):
        return attend(*arguments).float().square().sum()

    calls = {
        "grad": lambda x, cu, loss: grad(loss)(x[0], cu),
        "vmap": lambda x, cu, loss: vmap(attend, (0, None))(x, cu),
        "vmap-grad": lambda x, cu, loss: vmap(grad(loss), (0, None))(x, cu),
        "compile": lambda x, cu, loss: attend(x[0], cu),
        "compile-vmap-grad": lambda x, cu, loss: vmap(grad(loss), (0, None))(x, cu),
    }
    function, right = calls[transform], bounds(device, *CU_Q)

    def run(x, cu):
        return function(x, cu, loss)

    if "compile" in transform:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_close([run(q, right)], [function(q, right, lambda *x: attend(*x, False).float().square().sum())])
    with pytest.raises(IndexError, match=r"cu_seqlens_q\[2\]: expected 5 to 9"):
        run(q, bounds(device, 0, 5, 4))


def test_compiled_autograd(device):
    torch._dynamo.reset()
    tensors = [x.requires_grad_() for x in random(device, *FORMS["flash"][0])]

    def step(*tensors):
        flash_attn_func(*tensors, causal=True).float().square().sum().backward()

    step(*tensors)
    wanted = [x.grad.clone() for x in tensors]
    for x in tensors:
        x.grad = None
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(*tensors)
    assert_close([x.grad for x in tensors], wanted)


def loss_of_q(q):
    other = torch.ones(BATCH, 20, HEADS_KV, HEAD_DIM, dtype=BF16, device=q.device)
    return flash_attn_func(q, other, other, causal=True).float().sum()


def test_gradient_of_a_gradient_is_refused_under_transforms(device):
    (q,) = random(device, (BATCH, 9, HEADS, HEAD_DIM))
    for function in (
        grad(lambda q: grad(loss_of_q)(q).float().square().sum()),
        lambda q: vmap(grad(lambda q: grad(loss_of_q)(q).float().square().sum()))(q[None]),
        lambda q: vjp(grad(loss_of_q), q)[1](q),
    ):
        with pytest.raises(NotImplementedError, match="gradient of a gradient"):
            function(q)


def test_cache_is_refused_under_transforms(device):
    q, cache = random(device, (SAMPLES, BATCH, 1, HEADS, HEAD_DIM), (SAMPLES, BATCH, 20, HEADS_KV, HEAD_DIM))
    with pytest.raises(
        NotImplementedError, match=r"^flash_attn_with_kvcache: expected a call outside torch\.vmap"
    ):
        vmap(flash_attn_with_kvcache)(q, cache, cache)
    with pytest.raises(
        NotImplementedError, match=r"^flash_attn_with_kvcache: expected a call outside torch\.vmap"
    ):
        vmap(lambda q, k: flash_attn_with_kvcache(q, cache[0], cache[0], k, k, cache_seqlens=3))(
            q, q[..., :HEADS_KV, :]
        )
    with pytest.raises(NotImplementedError, match="^q: expected a tensor that needs no gradient"):
        grad(lambda q: flash_attn_with_kvcache(q, cache[0], cache[0]).float().sum())(q[0])


@pytest.mark.parametrize("name", ["learnable_sink", "alibi_slopes"])
@pytest.mark.parametrize("strict", [False, True])
def test_export_takes_a_captured_option(strict, name):
    """A tensor that the module reads from its surroundings becomes a constant of the program, which is used once."""
    q, option = torch.randn(1, 8, 2, 64), torch.rand(2)

    class Layer(torch.nn.Module):
        def forward(self, q):
            return flash_attn_func(q, q, q, **{name: option})

    program = torch.export.export(Layer(), (q,), strict=strict)
    torch.testing.assert_close(program.module()(q), Layer()(q))
