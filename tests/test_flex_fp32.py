"""flex_attention with fp32 tensors: precisions, errors and tiles on any machine; on a Hopper GPU errors against fp64."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_flex import HEADS, Captured, cases, causal, inputs, oracle, results
from torch.nn.attention.flex_attention import create_block_mask

from tl_attention import flash_attn_func, flex_attention
from tl_attention.api.flex_lists import kept_mask, listed
from tl_attention.compilation import building, cubin
from tl_attention.config import configs, legality
from tl_attention.config.kernel_configs import BwdConfig, BwdPass
from tl_attention.kernels.scores.options import prelude
from tl_attention.kernels.scores.program_code import program_code
from tl_attention.problem.attn_problem import (
    BUCKETS,
    DIRECTIONS,
    FP32_DTYPES,
    SPLIT_BUCKET,
    AttnProblem,
    tile_widths,
)
from tl_attention.problem.options import options_of_terms
from tl_attention.reference import flex as reference
from tl_attention.reference.flex import flex_reference
from tl_attention.torch_ops import flex_autograd
from tl_attention.tracing.trace import trace

pytestmark = [
    pytest.mark.filterwarnings("ignore:tl_attention", "ignore:.*torch.compile"),
    pytest.mark.usefixtures("highest_precision"),
]
# Largest rms error over rms value; that of calls without functions is 7e-7 and 8e-6, see docs/numerics.md
ERRORS = {"highest": 2e-6, "high": 2e-5}
DTYPES = {precision: dtype for dtype, precision in zip(FP32_DTYPES, ERRORS, strict=True)}
NAMES = ("documents", "softcap", "slopes", "relative", "half", "temperature", "of_query", "dense", "together")


def programs(backward: bool):
    """(name, program) of functions, and of the same under a block mask with bits."""
    made = cases(Captured("cpu"))
    for name in NAMES:
        program = trace(*made[name][:2], True).program
        for word, form in (("", program), (" bits", program.with_bits[0])):
            yield name + word, form if backward else form.forward
    yield "bits", trace(None, causal, True).program.with_bits[0]


def rms(x) -> float:
    """Root mean square."""
    return (x.double().square().mean() ** 0.5).item()


def check(precision, q, k, v, score_mod, mask_mod, learned, block_mask=None, deterministic=False) -> None:
    """Compare out, lse and all gradients with fp64; where they are deterministic, also with themselves."""
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[:3], device=q.device)
    scale = q.shape[-1] ** -0.5
    arguments = q, k, v, learned, dout, dlse

    def ours():
        masks = {"block_mask": block_mask} if block_mask is not None else {"mask_mod": mask_mod}
        options = {"enable_gqa": True, "return_lse": True, "precision": precision}
        return flex_attention(q, k, v, score_mod, **masks, **options, deterministic=deterministic)

    found = results(ours, *arguments)
    if deterministic:
        assert all(torch.equal(x, found[name]) for name, x in results(ours, *arguments).items())
    exact = results(lambda: oracle(q, k, v, score_mod, mask_mod, torch.float64, scale), *arguments)
    assert torch.equal(found.pop("hidden"), exact["hidden"])
    assert found["out"].dtype == found["lse"].dtype == torch.float32
    largest = max((rms(x) for name, x in exact.items() if name.startswith("captured")), default=0.0)
    for name, x in found.items():
        error, size = rms(x - exact[name]), rms(exact[name])
        if (
            x.ndim == 0
        ):  # one number can cancel to any size by chance, and with it what its error is compared with
            size = largest
        # A gradient of a captured tensor that sums over many scores nearly cancels
        bound = ERRORS[precision] * (5 if name.startswith("captured") else 1)
        bound = max(bound, 2**-8 if x.dtype == torch.bfloat16 else 0)
        assert error <= bound * size, (
            f"{name}: expected a relative error of at most {bound}, got {error / size}"
        )


@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize("name", NAMES)
def test_flex_fp32_on_cpu(name, precision):
    check(precision, *inputs("cpu", torch.float32, 70, 90, 16), *cases(Captured("cpu"))[name])


def test_flex_fp32_medium_on_cpu_is_exact():
    q, k, v = inputs("cpu", torch.float32, 20, 30, 16)
    made = [flex_attention(q, k, v, enable_gqa=True, mask_mod=causal, precision=x) for x in ("medium", None)]
    assert torch.equal(*made)


def test_flex_fp32_in_flash_attn_func():
    q, k, v = (x.transpose(1, 2) for x in inputs("cpu", torch.float32, 20, 20, 16))
    mod = cases(Captured("cpu"))["softcap"][0]
    out = flash_attn_func(q, k, v, score_mod=mod, precision="high")
    expected = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), mod, enable_gqa=True)
    torch.testing.assert_close(out.transpose(1, 2), expected)
    with pytest.raises(ValueError, match="causal: expected False beside score_mod"):
        flash_attn_func(q, k, v, causal=True, score_mod=mod, precision="high")


@pytest.mark.parametrize(
    "mask_mod", [causal, lambda b, h, q, k: (k < 3) | (q >= k)], ids=["option", "function"]
)
def test_flex_fp32_precision_is_checked(mask_mod):
    q, k, v = inputs("cpu", torch.float32, 8, 8, 16)
    with pytest.raises(ValueError, match="precision: expected one of 'highest', 'high', 'medium'"):
        flex_attention(q, k, v, enable_gqa=True, mask_mod=mask_mod, precision="low")
    half = (x.bfloat16() for x in (q, k, v))
    with pytest.raises(ValueError, match="precision: expected None with tensors of torch.bfloat16"):
        flex_attention(*half, enable_gqa=True, mask_mod=mask_mod, precision="high")


@pytest.mark.parametrize(("precision", "terms"), [("highest", 3), ("high", 2)])
def test_flex_fp32_terms_reach_the_launch(precision, terms, monkeypatch):
    """The forward and the backward have the precision of the forward."""
    seen = []
    q, k, v = (x.detach().requires_grad_() for x in inputs("cpu", torch.float32, 8, 8, 16))

    def forward(q, k, v, *_, options, **__):
        seen.append(options.parts)
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(dout, q, k, v, *_, options, traced, **__):
        seen.append(options.parts)
        grads = {name: torch.zeros_like(x) for name, x in zip("qkv", (q, k, v), strict=True)}
        return grads | dict(enumerate(traced.tensors))

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(flex_autograd.launch, "forward", forward)
    monkeypatch.setattr(flex_autograd.launch, "backward", backward)
    score_mod, _, learned = cases(Captured("cpu"))["temperature"]
    call = trace(score_mod, None, True)
    out, _ = flex_autograd.differentiable(
        call, (1.0, True, False), options_of_terms(terms), None, q, k, v, *call.tensors
    )
    torch.set_float32_matmul_precision("medium")
    out.sum().backward()
    assert seen == [terms, terms] and learned[0].grad is not None


def formula(q, k, v, call, arguments):
    """Gradients by autograd of flex_reference, all at once; captured tensors are fp32. arguments: dout, dlse."""
    tensors = [
        x.detach().float().requires_grad_() if i in call.program.learned else x
        for i, x in enumerate(call.tensors)
    ]
    call = replace(call, tensors=tuple(tensors))
    out, lse = flex_reference(q, k, v, 0.2, call)
    learned = [call.tensors[i] for i in call.program.learned]
    hidden = lse == -math.inf
    given = arguments[0], arguments[1].masked_fill(hidden, 0)
    return torch.autograd.grad([out, lse.masked_fill(hidden, 0)], [q, k, v, *learned], given)


@pytest.mark.parametrize("name", [*NAMES, "nothing"])
def test_flex_fp32_formula_in_chunks(name, monkeypatch):
    """Its results do not depend on the chunks of queries, also under a block mask and where a query sees no key."""
    monkeypatch.setattr(reference, "MAX_SCORES", 50 * 2 * HEADS * 290)
    q, k, v = inputs("cpu", torch.float32, 270, 290, 16)
    score_mod, mask_mod, _ = cases(Captured("cpu"))[name]
    call = trace(score_mod, mask_mod, True)
    if mask_mod is not None:
        call = listed(
            call, kept_mask(create_block_mask(mask_mod, 2, HEADS, 270, 290, device="cpu")), q, HEADS
        )
    given = torch.randn_like(q), torch.randn(q.shape[:3])
    expected = formula(q, k, v, call, given)
    found = reference.flex_backward_reference(*given, q, k, v, 0.2, call)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * y.abs().max().item())


def test_flex_fp32_gradients_of_wide_heads_without_kernels_are_a_formula(monkeypatch):
    q, k, v = (x.detach().requires_grad_() for x in inputs("cpu", torch.float32, 20, 30, 136))
    score_mod, mask_mod, learned = cases(Captured("cpu"))["relative"]
    call = trace(score_mod, mask_mod, True)

    def forward(q, k, v, *_, **__):
        return tuple(x.detach() for x in flex_reference(q, k, v, 0.2, call))

    monkeypatch.setattr(flex_autograd.launch, "forward", forward)
    monkeypatch.setattr(flex_autograd.launch, "backward", lambda *_, **__: pytest.fail("expected no launch"))
    given = torch.randn_like(q), torch.randn(q.shape[:3])
    results = flex_autograd.differentiable(call, (0.2, True, False), 3, None, q, k, v, *call.tensors)
    found = torch.autograd.grad(results, [q, k, v, *learned], given)
    for x, y in zip(found, formula(q, k, v, call, given), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", FP32_DTYPES)
def test_flex_fp32_configs_are_legal(dtype, direction):
    for width in tile_widths(direction, dtype):
        for name, program in programs(direction != "fwd"):
            problem = AttnProblem.of(dtype, *width, False, direction, (), program)
            for bucket in (*BUCKETS, *((SPLIT_BUCKET,) if direction == "fwd" else ())):
                config, _ = configs.pick_config(problem, bucket, "NVIDIA H200", direction)
                fault = legality.fault(problem, config, direction)
                assert fault is None, f"{name}: {problem}, {config}: {fault}"


def test_flex_fp32_gradients_of_a_bias_are_not_rounded():
    """A pass by keys stores dS, or sums it, before it is split; probabilities times a slope have a pass of their own."""
    made = dict(programs(True))
    one, two = ["dq+dk+dv"], ["dk+dv", "dq"]
    for name, passes in (("relative", one), ("relative bits", one), ("dense", two)):
        problem = AttnProblem("float32-highest", 64, 64, False, (), made[name])
        assert problem.learns_dS and not problem.sends_dS and not problem.learns_bias
        assert replace(problem, dtype="bfloat16").learns_dS is (name != "dense")
        config, _ = configs.pick_config(problem, "4k", "NVIDIA H200", "bwd")
        assert [x.grads for x in config.passes] == passes
    assert "tl_attention_add_fp32_tile" in program_code(made["relative"], accurate=True)
    assert "tl_attention_add_fp32_tile" not in program_code(made["relative"])
    sloped = AttnProblem("float32-high", 64, 64, False, (), made["softcap"])
    passes = BwdPass("dk+dv", 64, 128), BwdPass("dq", 128, 64)
    assert "scores have a slope, got dk+dv" in legality.fault(sloped, BwdConfig(passes))


def test_flex_fp32_values_of_wide_heads_are_computed_by_score():
    """Shared memory has no room for values per diagonal; the sums of their gradients need none."""
    program = dict(programs(True))["relative"]
    wide = AttnProblem.of("float32-high", 256, 256, False, "bwd", (), program)
    assert program.diagonals and not wide.has_diagonals and wide.program.diagonal_gradients == (0,)
    for dtype, width, direction in (
        ("float32-high", 128, "bwd"),
        ("float32-high", 256, "fwd"),
        ("bfloat16", 256, "bwd"),
    ):
        assert AttnProblem.of(dtype, width, width, False, direction, (), program).program is program


@pytest.mark.parametrize("dtype", [None, *FP32_DTYPES])
def test_flex_fp32_functions_are_accurate(dtype):
    """fp32 kernels call libdevice where fast math errs by 2^-11."""
    problem = AttnProblem(dtype or "bfloat16", 64, 64, False, (), dict(programs(False))["softcap"])
    code = prelude(problem, SimpleNamespace(prelude=None))
    assert ("= __nv_tanhf(v" in code) == (dtype is not None)
    assert ("= tanhf(v" in code) == (dtype is None)


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(
    ("name", "direction", "precision", "width"),
    [
        ("relative bits", "fwd", "highest", 128),
        ("dense", "bwd", "high", 128),
        ("relative bits", "bwd", "highest", 64),
        ("dense", "bwd", "high", 256),
    ],
)
def test_flex_fp32_kernels_do_not_spill(name, direction, precision, width):
    program = dict(programs(direction != "fwd"))[name]
    problem = AttnProblem.of(DTYPES[precision], width, width, False, direction, (), program)
    config, _ = configs.pick_config(problem, "4k", "NVIDIA H200", direction)
    kernel = config if direction == "fwd" else config.passes[-1]
    report = cubin.report(problem, kernel)
    assert report.spill_bytes == 0 and not report.warnings


# name, head_dim, precision, under a block mask, deterministic
GPU_CASES = [
    *(("dense", 64, precision, False, False) for precision in ERRORS),
    *(("relative", 64, precision, True, False) for precision in ERRORS),
    *(("documents", 128, precision, True, False) for precision in ERRORS),
    *(("sloped", 64, precision, True, False) for precision in ERRORS),
    ("relative", 64, "highest", True, True),
    ("relative", 128, "highest", True, False),
    ("dense", 128, "high", False, False),
    ("dense", 128, "highest", False, False),
    ("documents", 256, "high", True, False),
    ("relative", 256, "high", True, False),
    ("sloped", 256, "high", True, False),
    ("dense", 256, "high", False, False),
    ("relative", 256, "highest", True, False),
]


def gpu_case(name, c):
    """score_mod, mask_mod, captured tensors with gradients, as those of cases()."""
    if name != "sloped":
        return cases(c)[name]
    return (
        lambda s, b, h, q, k: 20 * torch.tanh((s * c.temperature + c.slopes[h] * (k - q) * 0.1) / 20),
        cases(c)["documents"][1],
        (c.temperature, c.slopes),
    )


def gpu_kernels(c, gpu):
    """Kernels of GPU_CASES; those of "dense" are also those of fp32 in test_torch_masks.py. Highest d256 has those of the forward alone."""
    kernels = []
    for name, head_dim, precision, by_blocks, deterministic in GPU_CASES:
        program = trace(*gpu_case(name, c)[:2], True).program
        by_formula = (head_dim, precision) == (256, "highest")
        if by_blocks:
            program = program.as_listed if by_formula else program.with_bits[0]
        backward = ("bwd_det", program.as_exact) if deterministic else ("bwd", program)
        for direction, form in (("fwd", program.forward), backward)[: 1 if by_formula else 2]:
            problem = AttnProblem.of(DTYPES[precision], head_dim, head_dim, False, direction, (), form)
            config, _ = configs.pick_config(problem, "1k", gpu, direction)
            kernels += config.kernels(problem)
    return list(dict.fromkeys(kernels))


@pytest.fixture(scope="module")
def built():
    """The kernels of the GPU tests, built at the same time."""
    kernels = gpu_kernels(Captured("cuda"), torch.cuda.get_device_name())
    failed = {kernel: error for kernel, error in building.build_all(kernels).items() if error}
    assert not failed, failed


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("name", "head_dim", "precision", "listed", "deterministic"), GPU_CASES)
def test_flex_fp32_matches_fp64(name, head_dim, precision, listed, deterministic):
    score_mod, mask_mod, learned = gpu_case(name, Captured("cuda"))
    q, k, v = inputs("cuda", torch.float32, 577, 600, head_dim)
    block_mask = create_block_mask(mask_mod, len(q), HEADS, 577, 600) if listed else None
    check(precision, q, k, v, score_mod, mask_mod, learned, block_mask, deterministic)


@pytest.mark.gpu
def test_flex_fp32_medium_runs_in_bf16():
    q, k, v = inputs("cuda", torch.float32, 577, 600, 64)
    mask = create_block_mask(cases(Captured("cuda"))["documents"][1], len(q), None, 577, 600)
    options = {"block_mask": mask, "enable_gqa": True, "return_lse": True}
    out, lse = flex_attention(q, k, v, **options, precision="medium")
    half, half_lse = flex_attention(*(x.bfloat16() for x in (q, k, v)), **options)
    assert out.dtype == torch.float32 and torch.equal(out, half.float()) and torch.equal(lse, half_lse)
