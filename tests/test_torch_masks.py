"""F.scaled_dot_product_attention with attn_mask: the aten ops called directly on CPU tensors, and through PyTorch on a GPU."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tl_attention.integrations import torch_backend, torch_masks

pytestmark = [
    pytest.mark.filterwarnings("ignore:tl_attention", "ignore:.*Overriding a previously"),
    pytest.mark.usefixtures("highest_precision"),
]
BATCH, HEADS, ROWS, KEYS, DIM = 2, 3, 40, 50, 16
SHAPES = [(BATCH, HEADS, ROWS, KEYS), (1, HEADS, ROWS, KEYS), (BATCH, 1, 1, KEYS), (1, 1, ROWS, KEYS)]


def inputs(device="cpu", rows=ROWS, keys=KEYS, dim=DIM, dtype=torch.bfloat16):
    return [
        torch.randn(BATCH, HEADS, n, dim, device=device, dtype=dtype, requires_grad=True)
        for n in (rows, keys, keys)
    ]


def refused(*_, **__):
    raise AssertionError("PyTorch's kernel was called")


def assert_close(found, expected, tolerance=None):
    """Assert equality within a fraction of the largest magnitude: by default 2 %, or 1e-5 for fp32."""
    assert found.shape == expected.shape
    tolerance = tolerance or (1e-5 if found.dtype == torch.float32 else 0.02)
    assert (found.double() - expected.double()).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_masks_match_the_formula(shape, dtype):
    q, k, v = inputs(dtype=dtype)
    mask = torch.randn(shape, dtype=dtype, requires_grad=True)
    expanded = mask.expand(BATCH, HEADS, ROWS, KEYS)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask.double(), scale=0.2)
    dout = torch.randn_like(q)
    expected = torch.autograd.grad(exact, [q, k, v, mask], dout.double())
    with torch.no_grad():
        out, lse, *rest = torch_masks.efficient_forward(refused, None, q, k, v, expanded, True, scale=0.2)
        assert lse.shape == (BATCH, HEADS, 64) and lse[..., ROWS:].eq(torch.inf).all()
        saved = out, lse, *rest, 0.0, [True] * 4
        grads = torch_masks.efficient_backward(refused, None, dout, q, k, v, expanded, *saved, scale=0.2)
        assert out.transpose(1, 2).is_contiguous() and grads[3].shape == expanded.shape
        cudnn = torch_masks.cudnn_forward(refused, None, q, k, v, expanded, True, scale=0.2)
        saved = cudnn[0], cudnn[1], cudnn[6], cudnn[7], expanded, None, None, ROWS, KEYS, 0.0, False
        others = torch_masks.cudnn_backward(refused, None, dout, q, k, v, *saved, scale=0.2)
    for found, want in zip((out, *grads[:3], grads[3].sum_to_size(shape)), (exact, *expected), strict=True):
        assert_close(found, want)
    assert torch.equal(cudnn[0], out) and all(
        torch.equal(*pair) for pair in zip(others, grads[:3], strict=True)
    )
    assert cudnn[1].shape == (BATCH, HEADS, ROWS, 1) and cudnn[0].is_contiguous()


def test_torch_masks_gradient_of_a_mask_alone():
    """PyTorch asks for no log-sum-exp then, and its backward reads it all the same."""
    q, k, v = (x.detach() for x in inputs())
    mask = torch.randn(BATCH, HEADS, ROWS, KEYS)
    out, lse, *rest = torch_masks.efficient_forward(refused, None, q, k, v, mask, False)
    padded = torch_masks.efficient_forward(refused, None, q, k, v, mask, True)[1]
    assert torch.equal(lse, padded[..., :ROWS])
    saved = out, lse, *rest, 0.0, [False, False, False, True]
    found = torch_masks.efficient_backward(refused, None, q, q, k, v, mask, *saved)[3]
    exact = mask.double().requires_grad_()
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), exact)
    assert_close(found, torch.autograd.grad(expected, exact, q.double())[0], 0.02)


@pytest.mark.parametrize("shape", [(ROWS, KEYS), (HEADS, ROWS, KEYS), (BATCH, 1, 1, KEYS)], ids=str)
def test_torch_masks_of_cudnn_need_no_expansion(shape):
    """cuDNN's op receives the mask of the caller. Its last dimension is that of the keys; the first of three is that of the heads."""
    q, k, v = inputs()
    mask = torch.randn(shape)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask.double())
    dout = torch.randn_like(q)
    expected = torch.autograd.grad(exact, [q, k, v], dout.double())
    with torch.no_grad():
        found = torch_masks.cudnn_forward(refused, None, q, k, v, mask, True)
        saved = found[0], found[1], found[6], found[7], mask, None, None, ROWS, KEYS, 0.0, False
        grads = torch_masks.cudnn_backward(refused, None, dout, q, k, v, *saved)
    for actual, want in zip((found[0], *grads), (exact, *expected), strict=True):
        assert_close(actual, want)


def test_torch_masks_serve_grouped_heads():
    q = torch.randn(BATCH, 4, ROWS, DIM).bfloat16().requires_grad_()
    k, v = (torch.randn(BATCH, 2, KEYS, DIM).bfloat16().requires_grad_() for _ in range(2))
    mask = torch.randn(BATCH, 4, ROWS, KEYS)
    double = [x.double() for x in (q, k, v, mask)]
    exact = F.scaled_dot_product_attention(*double, enable_gqa=True)
    dout = torch.randn_like(q)
    expected = torch.autograd.grad(exact, [q, k, v], dout.double())
    with torch.no_grad():
        out, *rest = torch_masks.efficient_forward(refused, None, q, k, v, mask, True)
        saved = out, *rest, 0.0, [True, True, True, False]
        *grads, none = torch_masks.efficient_backward(refused, None, dout, q, k, v, mask, *saved)
    assert none is None
    for actual, want in zip((out, *grads), (exact, *expected), strict=True):
        assert_close(actual, want)


BACKENDS = {
    "cudnn": (torch_masks.cudnn_forward, SDPBackend.CUDNN_ATTENTION),
    "efficient": (torch_masks.efficient_forward, SDPBackend.EFFICIENT_ATTENTION),
}


@pytest.mark.parametrize("forward, backend", BACKENDS.values(), ids=BACKENDS)
def test_torch_masks_leave_a_backend_that_the_caller_chose(forward, backend):
    q, k, v = (x.detach() for x in inputs())
    mask, result = torch.zeros(ROWS, KEYS).expand(BATCH, HEADS, ROWS, KEYS), (torch.zeros(()),) * 9
    flash, theirs = SDPBackend.FLASH_ATTENTION, lambda *_, **__: result
    with sdpa_kernel(backend):
        assert forward(theirs, None, q, k, v, mask, True) is result
    with sdpa_kernel([backend, flash], set_priority=True):
        assert forward(theirs, None, q, k, v, mask, True) is result
    with sdpa_kernel([flash, backend], set_priority=True):
        assert forward(refused, None, q, k, v, mask, True)[0].shape == q.shape
    with sdpa_kernel(
        [backend, flash]
    ):  # no order: that of the process holds, which has flash attention first
        assert forward(refused, None, q, k, v, mask, True)[0].shape == q.shape


def test_torch_masks_backward_runs_where_the_forward_ran():
    q, k, v = (x.detach() for x in inputs())
    mask = torch.zeros(BATCH, HEADS, ROWS, KEYS)
    out, lse, seed, offset = torch_masks.efficient_forward(refused, None, q, k, v, mask, True)
    rest = 0.0, [True, True, True, False]
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        torch_masks.efficient_backward(refused, None, q, q, k, v, mask, out, lse, seed, offset, *rest)
    for other in (torch.empty((), dtype=torch.int64).fill_(3), torch.zeros(2, dtype=torch.int64), None):
        saved = out, lse, other, offset, *rest
        found = torch_masks.efficient_backward(lambda *_, **__: "theirs", None, q, q, k, v, mask, *saved)
        assert found == "theirs"


def test_torch_masks_seed_is_on_the_cpu_under_any_default_device():
    with torch.device("meta"):
        seed, offset = torch_masks._seed_and_offset(torch.device("meta"))
    assert seed.device.type == offset.device.type == "cpu" and torch_masks._is_ours(seed, 0.0)


def test_torch_masks_backward_in_a_cuda_graph_runs_where_the_forward_ran(monkeypatch):
    """Compiled code with CUDA graphs takes no outputs on the CPU, and a seed on the GPU, here on meta, cannot be read."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    seed, offset = torch_masks._seed_and_offset(torch.device("meta"))
    for x in (seed, offset):
        assert (x.shape, x.dtype, x.device.type) == ((), torch.int64, "meta")
    theirs = torch.empty((), dtype=torch.int64, device="meta")
    assert torch_masks._is_ours(seed, 0.0)
    assert not torch_masks._is_ours(seed, 0.1) and not torch_masks._is_ours(theirs, 0.0)


def test_torch_masks_of_three_dimensions_are_of_heads_where_there_are_as_many_batch_entries():
    q, k, v = (x[:, :BATCH].detach() for x in inputs())
    mask = torch.randn(BATCH, ROWS, KEYS)
    found = torch_masks.cudnn_forward(refused, None, q, k, v, mask, True)[0]
    assert_close(found, F.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask))


OTHERS = {
    "dropout": {"dropout_p": 0.1},
    "causal": {"is_causal": True},
    "fp32 without kernels": {name: torch.zeros(1, 2, 3, 136) for name in ("query", "key", "value")},
    "fp64": {name: torch.zeros(1, 2, 3, 8).double() for name in ("query", "key", "value")},
    "wide": {name: torch.zeros(1, 2, 3, 264).bfloat16() for name in ("query", "key", "value")},
    "odd": {name: torch.zeros(1, 2, 3, 12).bfloat16() for name in ("query", "key", "value")},
    "wide value": {"value": torch.zeros(1, 2, 3, 16).bfloat16()},
    "heads without groups": {"query": torch.zeros(1, 3, 3, 8).bfloat16()},
    "mask of another length": {"attn_bias": torch.zeros(1, 2, 2, 3)},
    "empty": {"key": torch.zeros(1, 2, 0, 8).bfloat16(), "value": torch.zeros(1, 2, 0, 8).bfloat16()},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_torch_masks_leave_other_calls_to_pytorch(changes):
    x = torch.zeros(1, 2, 3, 8).bfloat16()
    given = {
        "query": x,
        "key": x,
        "value": x,
        "attn_bias": torch.zeros(1, 2, 3, 3),
        "dropout_p": 0.0,
        "is_causal": False,
    }
    given |= changes
    seen, theirs = [], (torch.zeros(()),) * 9

    def original(keys, *arguments, scale):
        seen.append((keys, arguments, scale))
        return theirs

    tensors = [given[name] for name in ("query", "key", "value")]
    rest = given["dropout_p"], given["is_causal"]
    for forward in (torch_masks.efficient_forward, torch_masks.cudnn_forward):
        assert forward(original, "keys", *tensors, given["attn_bias"], True, *rest, scale=0.5) is theirs
        assert seen[-1][0] == "keys" and seen[-1][2] == 0.5
        assert all(
            a is b for a, b in zip(seen[-1][1], (*tensors, given["attn_bias"], True, *rest), strict=False)
        )
    saved = [x, torch.zeros(1, 2, 32), None, None]
    found = torch_masks.efficient_backward(
        original, "keys", x, *tensors, given["attn_bias"], *saved, rest[0], [True] * 4, rest[1], scale=0.5
    )
    assert found is theirs and len(seen[-1][1]) == 12
    found = torch_masks.cudnn_backward(
        original, "keys", x, *tensors, *saved, given["attn_bias"], None, None, 3, 3, *rest, scale=0.5
    )
    assert found is theirs and len(seen[-1][1]) == 15


MISMATCHES = {
    "values of another length": ({"value": (1, 2, 5, 8)}, "^value: expected the heads and seqlen of key, 2 and 6, got 2 and 5;"),
    "more values": ({"value": (1, 2, 7, 8)}, "^value: expected the heads and seqlen of key, 2 and 6, got 2 and 7;"),
    "keys of another head_dim": ({"key": (1, 2, 6, 16)}, "^key: expected the head_dim of query, 8, got 16;"),
}  # fmt: skip


@pytest.mark.parametrize("causal", [None, False, True], ids=["mask", "full", "causal"])
@pytest.mark.parametrize("shapes, text", MISMATCHES.values(), ids=MISMATCHES)
def test_torch_masks_refuse_shapes_that_do_not_fit(shapes, text, causal, monkeypatch):
    """PyTorch sends such calls to its ops, and kernels take the sizes of one tensor for both."""
    monkeypatch.setattr(torch_masks, "_forward", refused)
    tensors = [
        torch.zeros(shapes.get(name, (1, 2, rows, 8))).bfloat16()
        for name, rows in (("query", 3), ("key", 6), ("value", 6))
    ]
    mask = torch.zeros(1, 1, 3, 6) if causal is None else None
    for forward in (torch_masks.efficient_forward, torch_masks.cudnn_forward):
        with pytest.raises(ValueError, match=text):
            forward(refused, None, *tensors, mask, True, 0.0, bool(causal))


@pytest.mark.parametrize(
    "function",
    [
        torch_masks.efficient_forward,
        torch_masks.efficient_backward,
        torch_masks.cudnn_forward,
        torch_masks.cudnn_backward,
    ],
)
def test_torch_masks_parameters_match_the_schema(function):
    part = torch_masks.CUDNN if "cudnn" in function.__name__ else torch_masks.EFFICIENT
    name = part + ("_backward" if "backward" in function.__name__ else "")
    schema = getattr(torch.ops.aten, name).default._schema
    parameters = [x for x in inspect.signature(function).parameters if x not in ("original", "keys")]
    assert [x.rstrip("_") for x in parameters] == [x.name.rstrip("_") for x in schema.arguments]


@pytest.fixture
def calls(monkeypatch):
    """Record the shape of each mask that reaches the kernels, as the kernels read it."""
    seen, real = [], torch_masks._call
    monkeypatch.setattr(
        torch_masks, "_call", lambda bias, grad: seen.append(tuple(bias.shape)) or real(bias, grad)
    )
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("bool", torch.bfloat16),
        ("float", torch.bfloat16),
        ("learned", torch.bfloat16),
        ("learned", torch.float32),
    ],
)
def test_torch_masks_serve_sdpa(kind, dtype, handle, calls):
    q, k, v = inputs("cuda", 300, 333, 64, dtype)
    mask = torch.randn(1, HEADS, 300, 333, device="cuda", dtype=dtype)
    mask = mask > 0 if kind == "bool" else mask.requires_grad_(kind == "learned")
    learned = [q, k, v, *([mask] if kind == "learned" else [])]
    dout = torch.randn_like(q)
    grads = {}
    for name in ("ours", "theirs"):
        if name == "theirs":
            handle.remove()
            q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
            mask = mask if kind == "bool" else mask.detach().double().requires_grad_(kind == "learned")
            learned = [q, k, v, *([mask] if kind == "learned" else [])]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        grads[name] = [out, *torch.autograd.grad(out, learned, dout.to(out.dtype))]
    assert calls == [(1, HEADS, 300, 333)] * 2
    for found, want in zip(grads["ours"], grads["theirs"], strict=True):
        assert_close(found, want)


@pytest.mark.gpu
def test_torch_masks_serve_compiled_sdpa(handle, calls):
    q, k, v = inputs("cuda", 300, 333, 64)
    mask = torch.randn(BATCH, 1, 300, 333, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    function = torch.compile(
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), fullgraph=True
    )
    out = function(q, k, v, mask)
    grads = torch.autograd.grad(out.float().square().sum(), [q, k, v, mask])
    assert calls
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, mask)]
    want = F.scaled_dot_product_attention(*exact[:3], attn_mask=exact[3])
    assert_close(out, want)
    for found, expected in zip(grads, torch.autograd.grad(want.square().sum(), exact), strict=True):
        assert_close(found, expected)


def gradients(function, q, k, v, mask, wanted):
    """Output and gradients of function(q, k, v, mask) along the dout of seed 0."""
    out = function(q, k, v, mask)
    generator = torch.Generator(out.device).manual_seed(0)
    dout = torch.randn(out.shape, device=out.device, generator=generator).bfloat16().to(out.dtype)
    return out, *torch.autograd.grad(out, wanted, dout)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_torch_masks_dropout_has_the_gradients_of_pytorch(dtype, handle, calls):
    """PyTorch's own kernels run: with the same seed they give the same, before and after the handle is removed."""
    q, k, v = inputs("cuda", 64, 64, 64, dtype)
    mask = torch.randn(1, HEADS, 64, 64, device="cuda", dtype=dtype, requires_grad=True)

    def run():
        torch.cuda.manual_seed(3)
        function = functools.partial(F.scaled_dot_product_attention, dropout_p=0.3)
        return gradients(function, q, k, v, mask, [q, k, v, mask])

    found = run()
    handle.remove()
    for x, want in zip(found, run(), strict=True):
        assert_close(x, want)
    assert not calls


@pytest.mark.gpu
def test_torch_masks_gradient_of_a_mask_alone_on_a_gpu(handle, calls):
    q, k, v = (x.detach() for x in inputs("cuda", 300, 333, 64))
    mask = torch.randn(1, HEADS, 300, 333, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = gradients(F.scaled_dot_product_attention, q, k, v, mask, [mask])
    exact = mask.detach().double().requires_grad_()
    expected = gradients(F.scaled_dot_product_attention, q.double(), k.double(), v.double(), exact, [exact])
    assert calls
    assert_close(found[0], expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_masks_train_in_compiled_code_of_any_layout(mode, learned, handle, calls):
    """Queries whose memory is [seqlen, batch, heads, head_dim], as in MultiheadAttention. A mask that learns goes to another op."""
    shapes = [(rows, BATCH, HEADS, 64) for rows in (300, 333, 333)]
    made = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    q, k, v = (x.permute(1, 2, 0, 3).detach().requires_grad_() for x in made)
    mask = torch.randn(1, HEADS, 300, 333, device="cuda", dtype=torch.bfloat16, requires_grad=learned)
    wanted = [q, k, v, *[mask] * learned]
    function = torch.compile(
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), mode=mode
    )
    for _ in range(4):  # warms up, records and replays
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in gradients(function, q, k, v, mask, wanted)]
    assert calls
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, mask)]
    expected = gradients(F.scaled_dot_product_attention, *exact, exact[: len(wanted)])
    for x, want in zip(found, expected, strict=True):
        assert_close(x, want)


@pytest.mark.gpu
def test_torch_masks_other_calls_are_those_of_pytorch(handle, calls):
    """Dropout, and a second register()."""
    q, k, v = inputs("cuda", 64, 64, 64)
    mask = torch.rand(64, 64, device="cuda") > 0.5
    again = torch_backend.register()
    handle.remove()
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.2)
    again.remove()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not calls
    assert_close(out, F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask))


@pytest.mark.parametrize(("name", "place"), [("efficient", 2), ("cudnn", 6)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_torch_masks_seed_of_a_forward_of_pytorch(name, place, dropout_p, monkeypatch):
    """Without dropout it is memory that nobody has written: it may be that of a freed seed of ours. With dropout the backward of PyTorch
    reads it, whatever it is.
    """
    monkeypatch.setattr(torch_masks, "_served", lambda *_: None)
    seed = torch.tensor(torch_masks.OURS)
    passed_on = [None] * 9
    passed_on[place] = seed
    x = torch.zeros(1, 1, 8, 64)
    forward, backward = (getattr(torch_masks, f"{name}_{part}") for part in ("forward", "backward"))
    result = forward(lambda *_, **__: tuple(passed_on), None, x, x, x, None, True, dropout_p)
    assert result[place] is seed and seed.item() == (torch_masks.OURS if dropout_p else 0)
    last = [dropout_p, [True] * 4] if name == "efficient" else [None, None, 8, 8, dropout_p, False]
    bias = [None] if name == "efficient" else []
    saved = [*bias, x, x, seed, seed, *([] if bias else [None]), *last]
    assert backward(lambda *_, **__: "theirs", None, x, x, x, x, *saved) == "theirs"
