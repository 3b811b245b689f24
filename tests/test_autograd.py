"""Differentiable ops in PyTorch: autograd, opcheck, torch.compile, checkpointing, autocast, training. On CPU the reference runs
behind the same ops."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tl_attention import flash_attn_func, mha_bwd_interface, mha_fwd_interface, ref_mha_bwd_interface
from tl_attention.reference import attention_reference
from tl_attention.testing.inputs import make_dlse, make_dout, make_inputs
from tl_attention.testing.shapes import Shape

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = {
    "gqa-causal": "2,4,2,37,50,64,causal",
    "rows-without-keys": "1,2,2,150,70,64,causal",
    "full": "2,2,2,70,150,64,full",
    "d128-64": "1,2,1,70,70,128,64,causal",
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def flash(q, k, v, causal):
    """(out, natural lse) of q, k, v [batch, seqlen, heads, head_dim]."""
    return flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)[:2]


def mha(q, k, v, causal):
    """(out as a [batch, seqlen, heads, head_dim] view, lse in base 2) of mha_fwd_interface."""
    out, lse = mha_fwd_interface(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    return out.transpose(1, 2), lse


def reference(lse_base2):
    def attend(q, k, v, causal):
        return attention_reference(q, k, v, None, causal, dtype=torch.float64, lse_base2=lse_base2)

    return attend


FUNCTIONS = {"flash": (flash, reference(False)), "mha": (mha, reference(True))}
functions = pytest.mark.parametrize(("function", "expected"), FUNCTIONS.values(), ids=FUNCTIONS)


def leaves(shape, device, dtype=BF16):
    """q, k, v [batch, seqlen, heads, head_dim] that require gradients."""
    return [x.requires_grad_() for x in make_inputs(shape, dtype, device=device)]


def gradients(function, inputs, causal, dout, dlse=None):
    """Gradients of sum(dout * out) + sum(dlse * lse) with respect to inputs; dout or dlse may be None."""
    outputs = zip(function(*inputs, causal), (dout, dlse), strict=True)
    outputs, grads = zip(*((y, dy) for y, dy in outputs if dy is not None), strict=True)
    return torch.autograd.grad(outputs, inputs, grads)


def assert_close(grads, expected):
    """Compare within 2 % of the largest value per tensor; the error rule of tests/test_bwd.py is finer."""
    for name, grad, want in zip(("dq", "dk", "dv"), grads, expected, strict=True):
        assert grad.shape == want.shape, name
        error, peak = (grad.double() - want.double()).abs().max(), want.abs().max()
        assert error <= 0.02 * peak, f"{name}: {error:.3g} beside {peak:.3g}"


@shapes
@functions
@pytest.mark.parametrize("through", ["out", "lse", "both"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_gradients_match_those_of_the_reference(shape, function, expected, through, dtype, device):
    shape = Shape.parse(shape)
    inputs = leaves(shape, device, dtype)
    dout = None if through == "lse" else make_dout(shape, dtype, device=device)
    dlse = None if through == "out" else make_dlse(shape, dtype, device=device)
    grads = gradients(function, inputs, shape.causal, dout, dlse)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    if through == "lse":  # it does not depend on v: autograd of the reference raises an error
        dv_wanted = torch.zeros_like(exact[2])
        lse = expected(*exact, shape.causal)[1]
        wanted = [*torch.autograd.grad(lse, exact[:2], dlse.double()), dv_wanted]
    else:
        wanted = gradients(
            expected, exact, shape.causal, dout.double(), None if dlse is None else dlse.double()
        )
    assert all(grad.dtype == dtype for grad in grads)
    assert_close(grads, wanted)


@functions
@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv", "qv"])
def test_gradients_of_some_inputs_alone(function, expected, wanted, device):
    shape = Shape.parse(SHAPES["gqa-causal"])
    dout = make_dout(shape, BF16, device=device)
    inputs = leaves(shape, device)
    everything = dict(zip("qkv", gradients(function, inputs, True, dout), strict=True))
    some = {name: x.detach().requires_grad_(name in wanted) for name, x in zip("qkv", inputs, strict=True)}
    function(**some, causal=True)[0].backward(dout)
    for name, x in some.items():
        if name in wanted:
            torch.testing.assert_close(x.grad, everything[name], rtol=0.01, atol=0.01)
        else:
            assert x.grad is None


@functions
def test_gradients_of_a_sum_and_of_transposed_outputs(function, expected, device):
    """dout is expanded from one number, or strided in its last dimension."""
    shape = Shape.parse(SHAPES["gqa-causal"])
    inputs = leaves(shape, device)
    dout = make_dout(shape, BF16, device=device)
    out, _ = function(*inputs, True)
    of_sum = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    of_ones = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    transposed = torch.autograd.grad(
        out.permute(3, 0, 2, 1), inputs, dout.permute(3, 0, 2, 1).contiguous(), retain_graph=True
    )
    plain = torch.autograd.grad(out, inputs, dout)
    assert_close(of_sum, of_ones)
    assert_close(transposed, plain)


@functions
@pytest.mark.parametrize(
    "sizes",
    ["0,2,2,3,4", "2,0,0,3,4", "2,2,1,0,4", "2,2,1,3,0"],
    ids=["batch", "heads", "seqlen_q", "seqlen_k"],
)
def test_gradients_of_empty_tensors_are_zero(function, expected, sizes, device):
    shape = Shape(*map(int, sizes.split(",")), 64, 32, True)
    inputs = leaves(shape, device)
    out, lse = function(*inputs, True)
    dlse = make_dlse(shape, BF16, device=device)
    grads = torch.autograd.grad((out, lse), inputs, (make_dout(shape, BF16, device=device), dlse))
    assert [x.shape for x in grads] == [x.shape for x in inputs]
    assert not any(x.any() for x in grads)


def test_nothing_is_kept_where_no_gradient_is_wanted(device):
    inputs = leaves(Shape.parse(SHAPES["full"]), device)
    with torch.no_grad():
        assert not flash(*inputs, False)[0].requires_grad
    with torch.inference_mode():
        assert not mha(*inputs, False)[0].requires_grad


@shapes
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_mha_bwd_interface_equals_autograd_and_its_twin(shape, deterministic, device):
    shape = Shape.parse(shape)
    q, k, v = (x.transpose(1, 2) for x in leaves(shape, device))
    do = make_dout(shape, BF16, device=device).transpose(1, 2)
    out, lse = mha_fwd_interface(q, k, v, sm_scale=0.07, is_causal=shape.causal)
    by_autograd = torch.autograd.grad(out, (q, k, v), do)
    q, k, v, out = (x.detach() for x in (q, k, v, out))
    options = {"sm_scale": 0.07, "is_causal": shape.causal, "deterministic": deterministic}
    grads = mha_bwd_interface(do, q, k, v, out, lse, **options)
    assert all(x.shape == y.shape and x.is_contiguous() for x, y in zip(grads, (q, k, v), strict=True))
    assert_close(grads, by_autograd)  # deterministic gradients may have another config
    assert_close(grads, ref_mha_bwd_interface(do, q, k, v, 0.07, shape.causal))
    kernel = mha_bwd_interface(do, q, k, v, out, lse, **options, return_kernel=True)
    torch.testing.assert_close(kernel(do, q, k, v, out, lse), grads, rtol=0.01, atol=0.01)


def test_double_backward_is_refused_though_the_first_made_no_graph_of_its_inputs(device):
    q, k, v = (x.detach() for x in leaves(Shape.parse(SHAPES["full"]), device))
    q.requires_grad_()
    (dq,) = torch.autograd.grad(flash_attn_func(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradient of a gradient"):
        torch.autograd.grad((dq.float() ** 2).sum(), q)


@functions
def test_saved_tensors_go_through_hooks(function, expected, device):
    shape = Shape.parse(SHAPES["gqa-causal"])
    inputs, dout = leaves(shape, device), make_dout(shape, BF16, device=device)
    saved = []

    def pack(x):
        saved.append(x.shape)
        return x.cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.to(device)):
        outputs = function(*inputs, True)
    assert len(saved) >= 5
    grads = torch.autograd.grad(outputs[0], inputs, dout)
    assert_close(grads, gradients(function, inputs, True, dout))


def test_an_input_changed_in_place_is_an_error_of_the_backward(device):
    q, k, v = leaves(Shape.parse(SHAPES["full"]), device)
    k = k * 1
    out = flash_attn_func(q, k, v)
    k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


OPTIONS = {
    # causal, lse_base2, heads_first, deterministic
    "plain": (False, False, False, False),
    "causal-base2": (True, True, False, False),
    "heads-first": (True, True, True, False),
    "deterministic": (True, False, False, True),
}


def laid_out(x, options):
    """Tensor [batch, seqlen, heads, head_dim] in the layout that an op with these options expects."""
    heads_first = options[2]
    return x.detach().transpose(1, 2).requires_grad_(x.requires_grad) if heads_first else x


@pytest.mark.in_turn(6)
@shapes
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_opcheck_of_the_forward(shape, options, device):
    shape = Shape.parse(shape)
    q, k, v = (laid_out(x, options) for x in leaves(shape, device))
    torch.library.opcheck(torch.ops.tl_attention.fwd.default, (q, k, v, 0.125, *options))


@pytest.mark.in_turn(16)
@shapes
@pytest.mark.parametrize("layout", ["bshd", "packed"])
@pytest.mark.parametrize("with_dlse", [False, True], ids=["no-dlse", "dlse"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_opcheck_of_the_backward(shape, layout, with_dlse, options, device):
    shape = Shape.parse(shape)
    q, k, v = make_inputs(shape, BF16, layout, device=device)
    dout = make_dout(shape, BF16, layout, device=device)
    dlse = make_dlse(shape, BF16, device=device) if with_dlse else None
    q, k, v, dout = (laid_out(x, options) for x in (q, k, v, dout))
    out, lse = torch.ops.tl_attention.fwd(q, k, v, 0.125, *options)
    torch.library.opcheck(
        torch.ops.tl_attention.bwd.default, (dout, q, k, v, out, lse, dlse, 0.125, *options)
    )


LENGTHS = {
    "square": [(100, 100), (57, 57), (130, 130), (64, 64)],
    "more-keys": [(30, 100), (57, 61), (64, 130), (10, 200)],
}


@pytest.mark.in_turn(3)
@functions
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_compile_of_forward_and_backward_has_no_break_and_serves_every_length(
    function, expected, lengths, device
):
    torch._dynamo.reset()

    def loss_of(q, k, v):
        out, lse = function(q * 1.5, k, v, True)
        return (out.float() ** 2).mean() + lse.mean()

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True, backend=backend)
    for seqlen_q, seqlen_k in lengths:
        inputs = leaves(Shape(2, 4, 2, seqlen_q, seqlen_k, 64, 64, True), device)
        with torch._dynamo.config.patch(error_on_recompile=(seqlen_q, seqlen_k) != lengths[0]):
            grads = torch.autograd.grad(compiled(*inputs), inputs)
        assert_close(grads, torch.autograd.grad(loss_of(*inputs), inputs))


@pytest.mark.gpu
def test_forward_and_backward_in_one_cuda_graph():
    shape = Shape.parse(SHAPES["gqa-causal"])
    inputs, dout = leaves(shape, "cuda"), make_dout(shape, BF16)
    gradients(flash, inputs, True, dout)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(flash, inputs, True, dout)
    for seed in (7, 8):  # new values in the captured inputs
        with torch.no_grad():
            for x, new in zip(inputs, make_inputs(shape, BF16, seed=seed), strict=True):
                x.copy_(new)
        graph.replay()
        assert_close(captured, gradients(flash, inputs, True, dout))


@pytest.mark.gpu
def test_compile_into_graph_trees():
    torch._dynamo.reset()
    shape = Shape(2, 8, 2, 500, 500, 128, 128, True)
    dout = make_dout(shape, BF16)
    compiled = torch.compile(lambda q, k, v, causal: flash(q, k, v, causal), mode="reduce-overhead")
    for seed in range(5):  # eager, then captured, then replayed
        inputs = [x.requires_grad_() for x in make_inputs(shape, BF16, seed=seed)]
        expected = gradients(flash, inputs, True, dout)
        assert_close(gradients(compiled, inputs, True, dout), expected)


class Attention(nn.Module):
    """Causal self-attention of a GPT, with `heads` query heads and `heads_kv` key heads."""

    def __init__(self, width, heads, heads_kv, attend):
        super().__init__()
        self.heads, self.heads_kv, self.attend = heads, heads_kv, attend
        self.qkv = nn.Linear(width, width + 2 * heads_kv * (width // heads), bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (self.heads + 2 * self.heads_kv, -1))
        q, k, v = heads.split([self.heads, self.heads_kv, self.heads_kv], dim=2)
        return self.out(self.attend(q, k, v).flatten(2))


def ours(q, k, v):
    return flash_attn_func(q, k, v, causal=True)


def sdpa(q, k, v):
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def checkpointed(q, k, v):
    return checkpoint(ours, q, k, v, use_reentrant=False)


@pytest.mark.parametrize("attend", [ours, checkpointed])
def test_autocast_trains_weights_in_fp32(attend, device):
    def of(function):
        torch.manual_seed(0)
        module = Attention(256, 4, 2, function).to(device)
        x = torch.randn(2, 60, 256, device=device)
        with torch.autocast(device, BF16):
            out = module(x)
        assert out.dtype == BF16
        (out.float() ** 2).sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    for grad, expected in zip(of(attend), of(sdpa), strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, expected, rtol=0.05, atol=0.02 * float(expected.abs().max()))


class Block(nn.Module):
    def __init__(self, width, *attention):
        super().__init__()
        self.attention = Attention(width, *attention)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, tokens, length, width, layers, *attention):
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, *attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


TOKENS = 32


def sentences(count, length, generator):
    """Tokens [count, length]: each is the previous one + 1, or the one four before + 7, or, one in ten, random."""
    text = torch.randint(TOKENS, (count, length), generator=generator)
    chance = torch.rand(count, length, generator=generator)
    for i in range(4, length):
        near, far = (text[:, i - 1] + 1) % TOKENS, (text[:, i - 4] + 7) % TOKENS
        text[:, i] = near.where(chance[:, i] < 0.45, far.where(chance[:, i] < 0.9, text[:, i]))
    return text


def losses_of_training(attend, device, steps=300, batch=32):
    """Loss per step of a GPT with 2 layers in bf16, 4 query heads and 2 key heads, from a fixed seed."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = GPT(TOKENS, 128, 256, 2, 4, 2, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 30))
    losses = []
    for _ in range(steps):
        text = sentences(batch, 129, generator).to(device)
        with torch.autocast(device, BF16):
            logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm_up.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.mark.gpu
def test_a_small_gpt_learns_as_it_does_with_sdpa():
    """The loss is 1.9 for a model that sees the previous token only, and 1.14 for one that also finds the token four before."""
    losses, expected = losses_of_training(ours, "cuda"), losses_of_training(sdpa, "cuda")
    assert losses[0] > 3.4 and losses[-20:].mean() < 1.25
    assert abs(losses[-20:].mean() / expected[-20:].mean() - 1) < 0.01


def test_a_small_gpt_starts_to_learn_as_it_does_with_sdpa(device):
    batch = 2 if device == "cpu" else 32  # products in bf16 take a CPU 0.4 s per sequence
    losses, expected = (losses_of_training(attend, device, 3, batch) for attend in (ours, sdpa))
    torch.testing.assert_close(losses, expected, rtol=0.005, atol=0)
