"""fp32 attention: precisions and errors on any machine; on a Hopper GPU errors against fp64, edge values and options."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tl_attention import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    fp32_workspace_bytes,
    launch,
    mha_bwd_interface,
    mha_fwd_interface,
)
from tl_attention.checks.fp32 import has_gradient_kernels
from tl_attention.config import configs, legality
from tl_attention.config.costs import costs_of
from tl_attention.config.kernel_configs import BwdConfig, BwdPass
from tl_attention.launch.bwd_passes import bwd_workspace_bytes
from tl_attention.problem.attn_problem import (
    FP32_DTYPES,
    FP32_TILE_WIDTHS,
    OPTIONS,
    PRECISIONS,
    PRODUCTS,
    AttnProblem,
    tile_widths,
)
from tl_attention.problem.options import Options
from tl_attention.reference import (
    attention_backward_reference,
    attention_reference,
    dropout_keep,
    varlen_reference,
)
from tl_attention.testing.inputs import guard_is_untouched, poisoned

FP64 = torch.float64
# Largest error over the largest value: high is 2^-16 per product and its sums; medium 2^-9
RELATIVE_ERROR = {"high": 1e-4, "medium": 2e-2}


@pytest.fixture(autouse=True)
def default_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def draw(*shapes, device="cpu", scale=1.0):
    return [scale * torch.randn(shape, device=device) for shape in shapes]


def draw_qkv(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v=None, **options):
    kv = batch, seqlen_k, heads_kv
    return draw((batch, seqlen_q, heads, head_dim), (*kv, head_dim), (*kv, head_dim_v or head_dim), **options)


def split(x, terms):
    """The terms of x, as kernels/fp32/terms.py computes them."""
    found = []
    for _ in range(terms):
        found.append(x.bfloat16())
        x = x - found[-1].float()
    return found


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-6, 1e30, 1e-25])
def test_fp32_is_the_sum_of_three_terms(scale):
    (x,) = draw((1000,), scale=scale)
    assert torch.equal(sum(term.double() for term in split(x, 3)), x.double())
    two = sum(term.double() for term in split(x, 2))
    assert ((two - x).abs() <= 2.0**-16 * x.abs()).all()


@pytest.mark.parametrize(
    ("precision", "bound"), [("highest", 2.0**-23), ("high", 2.0**-15), ("medium", 2.0**-7)]
)
def test_fp32_products_of_terms_bound_the_error(precision, bound):
    x, y = (x.double() for x in draw((1000,), (1000,)))
    n = PRECISIONS[precision]
    x_terms, y_terms = split(x.float(), n), split(y.float(), n)
    product = sum(x_terms[i].double() * y_terms[j].double() for i, j in PRODUCTS[n])
    exact = x.float().double() * y.float().double()
    assert ((product - exact).abs() <= bound * exact.abs()).all()
    assert PRODUCTS[n][-1] == (0, 0) and len(set(PRODUCTS[n])) == len(PRODUCTS[n]) == n * (n + 1) // 2


@pytest.mark.parametrize("precision", [*PRECISIONS, None])
def test_fp32_on_the_cpu_is_the_reference(precision):
    q, k, v = (x.requires_grad_() for x in draw_qkv(2, 4, 2, 9, 13, 24))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, precision=precision, return_attn_probs=True)
    ref, ref_lse = attention_reference(q, k, v, causal=True)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close((out, lse), (ref, ref_lse))
    (dout,) = draw(out.shape)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    wanted = attention_backward_reference(dout, q, k, v, causal=True)
    torch.testing.assert_close(grads, wanted)


def test_fp32_reaches_every_form():
    q, k, v = draw_qkv(1, 2, 2, 8, 8, 16)
    wanted = flash_attn_func(q, k, v)
    options = {"precision": "high"}
    assert torch.equal(flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options), wanted)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options), wanted)
    cu = torch.tensor([0, 8], dtype=torch.int32)
    assert torch.equal(flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 8, 8, **options)[None], wanted)
    views = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = mha_fwd_interface(*views, **options)
    assert torch.equal(out.transpose(1, 2), wanted)
    grads = mha_bwd_interface(torch.ones_like(out), *views, out, lse, **options)
    assert {x.dtype for x in grads} == {torch.float32}
    kernel = mha_fwd_interface(*views, return_kernel=True, **options)
    assert torch.equal(kernel(*views)[0], out)


def seen_terms(call, monkeypatch):
    """Terms per element that a call asks the kernels for."""
    seen = []

    def forward(q, k, v, *_, options=None, **__):
        seen.append(0 if options is None else options.parts)
        return q, q[..., 0]

    monkeypatch.setattr(launch, "forward", forward)
    monkeypatch.setattr(launch, "fwd_plan", lambda *_, **__: None)
    monkeypatch.setattr("tl_attention.torch_ops.attend.check_device", lambda *_: None)
    monkeypatch.setattr("tl_attention.torch_ops.ops.check_device_or_warn", lambda *_: None)
    monkeypatch.setattr("tl_attention.torch_ops.ops.is_traced", lambda: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    call()
    return seen


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fp32_precision_defaults_to_that_of_torch(precision, monkeypatch):
    for module in ("ops", "attend"):
        monkeypatch.setattr(f"tl_attention.torch_ops.{module}.runs_in_bf16", lambda q, terms: terms == 1)
    q, k, v = draw_qkv(1, 1, 1, 8, 8, 16)
    torch.set_float32_matmul_precision(precision)
    wanted = 0 if precision == "medium" else PRECISIONS[precision]  # medium runs in bf16
    assert seen_terms(lambda: flash_attn_func(q, k, v), monkeypatch) == [wanted]
    options = {"window_size": (3, 0)}
    assert seen_terms(lambda: flash_attn_func(q, k, v, **options), monkeypatch) == [wanted]


def test_fp32_explicit_precision_wins(monkeypatch):
    q, k, v = draw_qkv(1, 1, 1, 8, 8, 16)
    torch.set_float32_matmul_precision("medium")
    call = lambda: flash_attn_func(q, k, v, precision="highest", window_size=(3, 0))  # noqa: E731
    assert seen_terms(call, monkeypatch) == [3]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fp32_compiled_precision_is_never_lower_than_asked(precision):
    q, k, v = draw_qkv(1, 1, 1, 8, 8, 16)
    torch.set_float32_matmul_precision(precision)
    torch._dynamo.reset()
    seen = []

    def backend(graph, inputs):
        seen.extend(node.args for node in graph.graph.nodes if "fwd" in str(node.target))
        return graph.forward

    compiled = torch.compile(lambda *x: flash_attn_func(*x), fullgraph=True, backend=backend)
    wanted = flash_attn_func(q, k, v)
    assert torch.equal(compiled(q, k, v), wanted)
    place = 3 + 5 + list(Options.__dataclass_fields__).index("parts")
    assert [args[place] for args in seen] == [max(PRECISIONS[precision], 2)]
    torch.set_float32_matmul_precision("highest")
    compiled(q, k, v)
    assert seen[-1][place] == 3


HALF = [x.bfloat16() for x in draw_qkv(1, 1, 1, 8, 8, 16)]
ERRORS = {
    "unknown": (lambda: flash_attn_func(*draw_qkv(1, 1, 1, 8, 8, 16), precision="tf32"), ValueError, r"^precision: expected one of"),
    "bool": (lambda: mha_fwd_interface(*draw_qkv(1, 1, 1, 8, 8, 16), precision=True), ValueError, r"^precision: .*got True"),
    "bf16": (lambda: flash_attn_func(*HALF, precision="high"), ValueError, r"^precision: expected None with tensors of torch\.bfloat16"),
    "mixed": (lambda: flash_attn_func(HALF[0].float(), *HALF[1:]), TypeError, r"^k, v: expected the dtype of q, torch\.float32"),
    "fp64": (lambda: flash_attn_func(*(x.double() for x in HALF)), TypeError, r"^q: expected bfloat16, float16 or float32"),
    "cache": (
        lambda: flash_attn_with_kvcache(HALF[0].float(), HALF[1].float(), HALF[2].float(), cache_seqlens=4), TypeError,
        r"^q: expected bfloat16 or float16, got torch\.float32",
    ),
    "workspace": (lambda: fp32_workspace_bytes(*HALF), TypeError, r"^q: expected float32, got torch\.bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_fp32_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_fp32_settings_of_torch_that_differ_are_an_error(monkeypatch):
    def fail():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", fail)
    q, k, v = draw_qkv(1, 1, 1, 8, 8, 16)
    with pytest.raises(ValueError, match=r"^precision: expected one of .*; pass precision$"):
        flash_attn_func(q, k, v)
    flash_attn_func(q, k, v, precision="high")


@pytest.mark.parametrize(("terms", "widest"), [(3, 128), (2, 256)], ids=["highest", "high"])
def test_fp32_gradients_of_wide_heads_have_kernels_at_high(terms, widest):
    def has(columns, columns_v):
        return has_gradient_kernels(*(torch.empty(1, 1, 1, n) for n in (columns, columns_v)), terms)

    assert has(widest, widest) and not has(widest + 8, 64) and not has(64, widest + 8)
    assert has_gradient_kernels(*(torch.empty(1, 1, 1, 256, dtype=torch.bfloat16) for _ in "qv"), 0)


@pytest.mark.parametrize("dtype", FP32_DTYPES)
def test_fp32_configs_serve_every_set_of_options(dtype):
    for width in FP32_TILE_WIDTHS:
        for options in ((), ("window",), ("softcap",), ("alibi",), ("dropout",), ("varlen",), OPTIONS):
            problem = AttnProblem(dtype, *width, False, options)
            for bucket in ("4k", "split"):
                config, _ = configs.pick_config(problem, bucket, "NVIDIA H200")
                assert legality.fault(problem, config, "fwd") is None
            if width in tile_widths("bwd", dtype):
                config, _ = configs.pick_config(problem, "4k", "NVIDIA H200", "bwd_det")
                assert legality.fault(problem, config, "bwd_det") is None


@pytest.mark.parametrize(
    ("one", "options", "text"),
    [
        (
            {"grads": "dq+dk+dv", "block_M": 32},
            ("window",),
            "expected dq in a pass of its own in fp32 with options",
        ),
        (
            {"grads": "dq+dk+dv", "block_M": 96},
            (),
            "block_M: expected 32 or 64 where dq is summed in fp32, got 96",
        ),
        (
            {"grads": "dq+dk+dv", "block_M": 32, "order": "early-sums"},
            (),
            "in fp32, got 'early-sums'",
        ),
        ({"grads": "dk+dv", "block_M": 64}, (), "shared memory: expected at most"),
    ],
)
def test_fp32_passes_that_do_not_fit_are_refused(one, options, text):
    problem = AttnProblem("float32-highest", 128, 128, False, options)
    assert text in legality.fault(problem, BwdConfig.of([{"block_N": 128, **one}]))


@pytest.mark.parametrize(("dtype", "block_N"), [("float32-highest", 64), ("float32-high", 128)])
def test_fp32_gradients_in_one_pass_add_dq_to_the_result(dtype, block_N):
    """No sums of dq beside it, and so not deterministic."""
    problem = AttnProblem(dtype, 128, 128, False)
    config = BwdConfig((BwdPass("dq+dk+dv", 32, block_N),))
    assert legality.fault(problem, config, "bwd") is None
    assert "sums dq in no fixed order" in legality.fault(problem, config, "bwd_det")
    two = BwdConfig((BwdPass("dk+dv", 32, block_N), BwdPass("dq", 64, 32)))
    sizes = 1, 4, 4, 300, 300, problem
    assert bwd_workspace_bytes(*sizes, config, costs_of()) == bwd_workspace_bytes(*sizes, two, costs_of())


def test_fp32_workspace_bytes():
    q, k, v = draw_qkv(2, 4, 2, 100, 300, 72, 40)
    rows_q, rows_k = 2 * 100 * 4, 2 * 300 * 2
    for precision, terms in (("highest", 3), ("high", 2)):
        of_element = 2 * terms * 128
        assert fp32_workspace_bytes(q, k, v, precision) == 2 * rows_k * of_element
        assert fp32_workspace_bytes(q, k, v, precision, backward=True) == 2 * (rows_q + rows_k) * of_element
    medium = q.numel() + k.numel() + v.numel() + rows_q * 40
    assert fp32_workspace_bytes(q, k, v, "medium") == 2 * medium
    assert fp32_workspace_bytes(q, k, v, "medium", backward=True) == 4 * medium


# The rest needs a GPU


def exact(q, k, v, **options):
    return attention_reference(q.double(), k.double(), v.double(), dtype=FP64, **options)


def error(x, ref):
    return float((x.double() - ref).abs().max())


def efficient(q, k, v, softmax_scale=None, causal=False):
    """Memory-efficient attention of torch, 3xTF32; causal with equal lengths only."""
    group = q.shape[2] // k.shape[2]
    views = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(*views, is_causal=causal, scale=softmax_scale).transpose(1, 2)


def check(precision, name, actual, ref, *peers):
    """Three times the error of the peers, all fp32, and 2^-21 of the largest value; at lower precisions a share of the largest value."""
    assert actual.dtype == torch.float32
    largest = float(ref.abs().max())
    allowed = RELATIVE_ERROR.get(precision, 0) * largest
    if precision == "highest":
        allowed = 3 * max(error(x, ref) for x in peers) + 2.0**-21 * largest
    got = error(actual, ref)
    assert got <= allowed, f"{name} at {precision}: expected an error of at most {allowed:.2e}, got {got:.2e}"


GPU_SHAPES = [
    # batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v
    (1, 2, 2, 128, 128, 128, 128),
    (2, 4, 2, 333, 517, 128, 128),
    (1, 4, 1, 129, 80, 64, 64),
    (2, 2, 2, 1, 2000, 128, 128),
    (1, 2, 2, 1000, 63, 96, 64),
    (1, 2, 1, 200, 1111, 72, 40),
    (1, 2, 2, 300, 300, 256, 256),
    (1, 2, 2, 130, 257, 192, 128),
]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_fp32_forward_matches_fp64(shape, causal, precision):
    q, k, v = draw_qkv(*shape, device="cuda")
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, precision=precision, return_attn_probs=True)
    ref, ref_lse = exact(q, k, v, causal=causal)
    plain, _ = attention_reference(q, k, v, causal=causal)
    peers = [plain] if causal and shape[3] != shape[4] else [plain, efficient(q, k, v, causal=causal)]
    check(precision, "out", out, ref, *peers)
    assert torch.equal(lse == -math.inf, ref_lse == -math.inf)
    finite = ref_lse > -math.inf
    allowed = {"highest": 2e-6, "high": 1e-4, "medium": 5e-2}[precision] * max(
        1.0, float(ref_lse[finite].abs().max())
    )
    assert error(lse[finite], ref_lse[finite]) <= allowed


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("values", ["peaky", "large", "small", "far-from-0"])
def test_fp32_forward_of_extreme_values(values, precision):
    q, k, v = draw_qkv(
        1, 2, 2, 700, 700, 128, device="cuda", scale={"large": 1e4, "small": 1e-6}.get(values, 1)
    )
    scale = 128**-0.5 * {"large": 1e-8, "peaky": 16}.get(values, 1)
    if values == "far-from-0":
        v += 1000
    out = flash_attn_func(q, k, v, softmax_scale=scale, precision=precision)
    ref, _ = exact(q, k, v, softmax_scale=scale)
    check(precision, "out", out, ref, efficient(q, k, v, scale), attention_reference(q, k, v, scale)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_fp32_never_hides_nan_or_inf(value):
    q, k, v = draw_qkv(1, 1, 1, 100, 200, 64, device="cuda")
    v[0, 150, 0, 3] = value
    out = flash_attn_func(q, k, v, precision="highest")
    assert (
        not out[..., 3].isfinite().any() and out[..., :3].isfinite().all() and out[..., 4:].isfinite().all()
    )
    k[0, 150, 0, 3] = value
    assert flash_attn_func(q, k, v, causal=True, precision="highest")[0, 60:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_fp32_layouts_and_splits_agree(precision):
    q, k, v = draw_qkv(2, 4, 2, 90, 3000, 64, device="cuda")
    wanted, lse, _ = flash_attn_func(q, k, v, precision=precision, return_attn_probs=True, num_splits=1)
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    views = [torch.cat([x, x], -1)[..., :64] for x in (q, k, v)]
    for found in (
        flash_attn_func(*views, precision=precision, num_splits=1),
        flash_attn_func(*(x.transpose(1, 2) for x in heads_first), precision=precision, num_splits=1),
    ):
        assert torch.equal(found, wanted)
    out, base2 = mha_fwd_interface(*heads_first, precision=precision)
    parts, parts_lse, _ = flash_attn_func(q, k, v, precision=precision, return_attn_probs=True, num_splits=5)
    bound = {"highest": 1e-6, "high": 1e-5, "medium": 1e-2}[precision]
    for x, x_lse in ((out.transpose(1, 2), base2 * math.log(2)), (parts, parts_lse)):
        assert error(x, wanted.double()) <= bound and error(x_lse, lse.double()) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_fp32_writes_nothing_outside_its_outputs(head_dim):
    q, k, v = draw_qkv(2, 3, 3, 77, 100, head_dim, device="cuda")
    whole_out, out = poisoned(2, 77, 3, head_dim, dtype=torch.float32)
    whole_lse, lse = poisoned(2, 3, 77, dtype=torch.float32)
    options = Options(parts=3)
    plan = launch.fwd.FwdPlan(q, k, v, out, False, False, options)
    plan(q, k, v, head_dim**-0.5, False, options, out=out, lse=lse)
    assert guard_is_untouched(whole_out, out) and guard_is_untouched(whole_lse, lse)
    check("highest", "out", out, exact(q, k, v)[0], attention_reference(q, k, v)[0], efficient(q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_fp32_options_match_fp64(causal):
    """Window or causal, softcap, ALiBi and sink at once."""
    q, k, v = draw_qkv(1, 4, 2, 200, 310, 64, device="cuda")
    slopes, sink = 0.3 * torch.rand(4, device="cuda"), torch.randn(4, device="cuda")
    options = {"softcap": 20.0, "alibi_slopes": slopes, "sink": sink}
    options |= {"causal": True} if causal else {"window": (90, 3)}
    names = {"window": "window_size", "sink": "learnable_sink"}
    arguments = {names.get(name, name): value for name, value in options.items()}
    out = flash_attn_func(q, k, v, precision="highest", **arguments)
    check("highest", "out", out, exact(q, k, v, **options)[0], attention_reference(q, k, v, **options)[0])


@pytest.mark.gpu
def test_fp32_dropout_matches_fp64():
    q, k, v = draw_qkv(2, 2, 2, 200, 310, 64, device="cuda")
    state = torch.tensor([7, 11], device="cuda")
    keep = dropout_keep(state, 2, 2, 200, 310, 0.25)
    options = {"keep": keep, "dropout_p": 0.25, "causal": True}
    out = flash_attn_func(q, k, v, dropout_p=0.25, causal=True, rng_state=state, precision="highest")
    check("highest", "out", out, exact(q, k, v, **options)[0], attention_reference(q, k, v, **options)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 256])
def test_fp32_packed_sequences_match_fp64(head_dim):
    """Tiles of 128 queries, and of 64, of which two share an entry of the tile table."""
    lengths_q, lengths_k = [100, 0, 333, 1, 64, 65], [100, 20, 333, 700, 64, 65]
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device="cuda")
        for x in (lengths_q, lengths_k)
    )
    kv = (sum(lengths_k), 2, head_dim)
    q, k, v = draw((sum(lengths_q), 4, head_dim), kv, kv, device="cuda")
    out = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 333, 700, causal=True, precision="highest", num_splits=1
    )
    ref, _ = varlen_reference(*(x.double() for x in (q, k, v)), cu_q, cu_k, causal=True, dtype=FP64)
    check("highest", "out", out, ref, varlen_reference(q, k, v, cu_q, cu_k, causal=True)[0])


ROWS_FIRST, HEADS_FIRST = (1, 5, 2, 16), (1, 2, 5, 16)
ONE_PART = {
    "plain": (lambda q, k, v, **x: flash_attn_func(q, k, v, causal=True, **x), ROWS_FIRST),
    "options": (lambda q, k, v, **x: flash_attn_func(q, k, v, window_size=(2, 1), **x), ROWS_FIRST),
    "functions": (lambda q, k, v, **x: flash_attn_func(q, k, v, mask_mod=below_a_line, **x), ROWS_FIRST),
    "research": (lambda q, k, v, **x: mha_fwd_interface(q, k, v, **x)[0], HEADS_FIRST),
}


def below_a_line(b, h, q, k):
    return 2 * q >= k


@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize(("call", "shape"), ONE_PART.values(), ids=ONE_PART)
def test_calls_of_one_term_run_in_bf16_and_return_fp32(call, shape, monkeypatch):
    for module in ("torch_ops.ops", "api.flex_calls", "torch_ops.attend"):
        monkeypatch.setattr(f"tl_attention.{module}.runs_in_bf16", lambda q, terms: terms == 1)
    qkv = [x.requires_grad_() for x in draw(shape, shape, shape)]
    half = [x.detach().bfloat16().requires_grad_() for x in qkv]
    out, wanted = call(*qkv, precision="medium"), call(*half)
    assert out.dtype == torch.float32 and torch.equal(out, wanted.float())
    grads = [torch.autograd.grad(x.float().square().sum(), y) for x, y in ((out, qkv), (wanted, half))]
    assert all(x.dtype == torch.float32 and torch.equal(x, y.float()) for x, y in zip(*grads, strict=True))


@pytest.mark.filterwarnings("ignore:tl_attention")
def test_backward_of_one_term_runs_in_bf16_and_returns_fp32(monkeypatch):
    monkeypatch.setattr("tl_attention.torch_ops.ops.runs_in_bf16", lambda q, terms: terms == 1)
    dout, q, k, v = draw(*[HEADS_FIRST] * 4)
    out, lse = mha_fwd_interface(q, k, v, precision="medium")
    found = mha_bwd_interface(dout, q, k, v, out, lse, precision="medium")
    wanted = mha_bwd_interface(*[x.bfloat16() for x in (dout, q, k, v, out)], lse)
    assert all(
        x.dtype == torch.float32 and torch.equal(x, y.float()) for x, y in zip(found, wanted, strict=True)
    )
