"""attn_bias of flex_attention, and gradients of captured tensors: what kernels store or add exactly, and how the host reduces it."""

from __future__ import annotations

import math
import random
import struct
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from tl_attention import create_block_mask, flash_attn_func, flex_attention
from tl_attention.checks.flex import OPTIONS_OFF, TAKEN, warn_about_mask_of_numbers
from tl_attention.compilation import building
from tl_attention.config import configs, legality
from tl_attention.config.kernel_configs import BwdConfig, reduce_kernels
from tl_attention.launch.traced import FIRST_UNIT, SLOT_EXPONENTS, SLOTS, Gradients, aligned
from tl_attention.problem.attn_problem import BWD_TILE_WIDTHS, AttnProblem
from tl_attention.problem.request import Request
from tl_attention.tracing.dense_bias import with_bias
from tl_attention.tracing.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention. CPU tensors")
HEADS = 4
SHAPES = {"whole": (2, HEADS), "of heads": (1, HEADS), "of the batch": (2, 1), "one": (1, 1)}


def causal(b, h, q, k):
    return q >= k


@pytest.mark.parametrize("name", SHAPES)
def test_bias_on_cpu(name):
    q, k, v = (torch.randn(2, HEADS, n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (9, 13, 13))
    bias = torch.randn(*SHAPES[name], 9, 13, requires_grad=True)
    out = flex_attention(q, k, v, attn_bias=bias)
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), bias)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    dout = torch.randn_like(expected)
    (found,) = torch.autograd.grad(out, bias, dout.bfloat16())
    (wanted,) = torch.autograd.grad(expected, bias, dout)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_bias_beside_functions_on_cpu():
    q = torch.randn(2, HEADS, 8, 16, dtype=torch.bfloat16)
    bias, mask = torch.randn(1, 1, 8, 8), torch.rand(2, 1, 8, 8) > 0.3
    mask = mask | torch.eye(8, dtype=torch.bool)
    out = flex_attention(q, q, q, lambda s, b, h, q, k: s * 0.5, attn_bias=bias, mask_mod=causal)
    whole = bias.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -math.inf)
    expected = F.scaled_dot_product_attention(q.float() * 0.5, q.float(), q.float(), whole)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    out = flex_attention(q, q, q, attn_bias=mask, mask_mod=causal)
    expected = F.scaled_dot_product_attention(q.float(), q.float(), q.float(), mask & (whole == bias))
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "bias", [torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8, dtype=torch.bool)], ids=["float", "bool"]
)
def test_bias_hides_no_error_of_a_function(bias):
    q = torch.randn(2, HEADS, 8, 16)
    mask = create_block_mask(causal, None, None, 8, 8, device="cpu")
    with pytest.raises(
        TypeError, match=r"score_mod .*test_dense_bias.py:\d+\): expected a score, got a bool"
    ):
        flex_attention(q, q, q, lambda s, b, h, q, k: s > 0, mask, attn_bias=bias)
    with pytest.raises(TypeError, match=r"mask_mod .*test_dense_bias.py:\d+\): expected a bool"):
        flex_attention(q, q, q, mask_mod=lambda b, h, q, k: q - k, attn_bias=bias)


def test_flash_attn_func_with_functions_on_cpu():
    q, k, v = (torch.randn(2, n, HEADS, 16, dtype=torch.bfloat16, requires_grad=True) for n in (9, 13, 13))
    bias = torch.randn(1, HEADS, 9, 13, requires_grad=True)
    functions = {"score_mod": lambda s, b, h, q, k: s * 0.5, "mask_mod": lambda b, h, q, k: q + 4 >= k}
    out, lse, _ = flash_attn_func(q, k, v, **functions, attn_bias=bias, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (2, HEADS, 9)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    expected, its_lse = flex_attention(*turned, **functions, attn_bias=bias, return_lse=True)
    assert torch.equal(out, expected.transpose(1, 2)) and torch.equal(lse, its_lse)
    with pytest.raises(
        ValueError, match="causal: expected False beside score_mod.*got True; write it as a function"
    ):
        flash_attn_func(q, k, v, causal=True, attn_bias=bias)
    with pytest.raises(ValueError, match="window_size: expected"):
        flash_attn_func(q, k, v, window_size=(3, 0), attn_bias=bias)


q8 = torch.randn(2, HEADS, 8, 16, dtype=torch.bfloat16)


def test_bias_of_no_keys():
    kv = torch.randn(2, HEADS, 0, 16, dtype=torch.bfloat16)
    assert flex_attention(q8, kv, kv, attn_bias=torch.zeros(1, 1, 8, 0)).eq(0).all()


@pytest.mark.parametrize(
    ("bias", "error", "words"),
    [
        (3.0, TypeError, "expected a torch.Tensor"),
        (torch.zeros(2, 4, 8, 8, dtype=torch.int32), TypeError, "expected float32, bfloat16, float16 or bool, got"),
        (torch.zeros(8, 8), ValueError, r"expected shape \(1 or 2, 1 or 4, 8, 8\).*got \(8, 8\)"),
        (torch.zeros(2, 2, 8, 8), ValueError, r"got \(2, 2, 8, 8\)"),
        (torch.zeros(1, 1, 8, 8, device="meta"), ValueError, "expected the device of query, cpu, got meta"),
        (torch.zeros(1, 1, 1, 8), ValueError, r"got \(1, 1, 1, 8\); pass attn_bias.expand\(-1, -1, 8, -1\)"),
        (torch.zeros(3, 1, 1, 8), ValueError, r"got \(3, 1, 1, 8\); view or expand it to that"),
        (torch.zeros(2, 1, 8), ValueError, r"got \(2, 1, 8\); pass attn_bias\[:, None\].expand\(-1, -1, 8, -1\)"),
        (torch.zeros(2, 8, 8), ValueError, r"got \(2, 8, 8\); pass attn_bias\[:, None\]$"),
        (torch.zeros(2, 8)[:, :7], ValueError, r"got \(2, 7\); view or expand it to that"),
        (torch.zeros(2, 9), ValueError, r"got \(2, 9\); pass attn_bias\[:, None, None\].expand\(-1, -1, 8, -1\), if it is a mask of keys"),
    ],
)  # fmt: skip
def test_bias_refuses(bias, error, words):
    keys = (
        torch.randn(2, HEADS, 9, 16, dtype=torch.bfloat16) if getattr(bias, "shape", ())[-1:] == (9,) else q8
    )
    with pytest.raises(error, match=f"attn_bias: .*{words}"):
        flex_attention(q8, keys, keys, attn_bias=bias)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout_p": 0.1}, "leave out the dropout"),
        ({"num_splits": 2}, "leave it out"),
        ({"causal": True}, "write it as a function"),
        ({"alibi_slopes": torch.ones(HEADS)}, "write it as a function"),
        ({"learnable_sink": torch.ones(HEADS)}, r"multiply out by torch\.sigmoid\(softmax_lse - sink\)"),
    ],
)
def test_bias_refuses_options_beside_it(options, words):
    q = q8.transpose(1, 2)
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected .* beside score_mod.*{words}"):
        flash_attn_func(q, q, q, attn_bias=torch.zeros(1, 1, 8, 8), **options)


def test_functions_take_or_refuse_each_field_of_a_request():
    """A new option is refused beside functions until it is taken."""
    assert set(OPTIONS_OFF) | TAKEN == set(Request._fields) and not TAKEN & set(OPTIONS_OFF)
    assert set(OPTIONS_OFF) >= {"window_size", "softcap", "learnable_sink", "rng_state"}


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 4, 8),
        torch.randn(3, 5, 7),
        torch.randn(3, 5, 7)[:, :, 1:],
        torch.randn(6, 4).mT,
        torch.randn(1, 5, 7).expand(4, 5, 7),
        torch.randn(5, 1).expand(5, 6),
        torch.rand(2, 4, 7) > 0.5,
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)
def test_aligned(x):
    rows, elements = aligned(x), 16 // x.element_size()
    assert torch.equal(rows, x) and rows.stride(-1) == 1
    assert not any(s % elements for s, n in zip(rows.stride()[:-1], rows.shape, strict=False) if n > 1)
    end = rows.storage_offset() + sum((n - 1) * s for n, s in zip(rows.shape, rows.stride(), strict=True))
    assert rows.untyped_storage().nbytes() // rows.element_size() >= end + elements - end % elements
    if x.is_contiguous() and x.shape[-1] % elements == 0:
        assert rows.data_ptr() == x.data_ptr()


def gradients_of(score_mod, transposed: bool) -> Gradients:
    return Gradients(trace(score_mod, None, True), 2, HEADS, 8, 9, transposed)


table = torch.zeros(3, HEADS + 1, 10, 12, requires_grad=True)


@pytest.mark.parametrize(
    ("score_mod", "reduce"),
    [
        (lambda s, b, h, q, k: s + table[b, h, q, k], lambda x, out: out[:2, :HEADS, :8, :9].copy_(x)),
        (lambda s, b, h, q, k: s + table[1, h, q, k], lambda x, out: out[1, :HEADS, :8, :9].copy_(x.sum(0))),
        (lambda s, b, h, q, k: s + table[b, 3, q, k], lambda x, out: out[:2, 3, :8, :9].copy_(x.sum(1))),
        (lambda s, b, h, q, k: s * table[2, 4, q, k], lambda x, out: out[2, 4, :8, :9].copy_(x.sum((0, 1)))),
    ],
    ids=["whole", "of heads", "of the batch", "one"],
)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_stored_gradients_are_reduced(score_mod, reduce, transposed):
    gradients = gradients_of(score_mod, transposed)
    (stored,) = gradients.arguments
    assert stored.shape == ((2, HEADS, 9, 8) if transposed else (2, HEADS, 8, 16))
    assert gradients.call.program.as_exact is gradients.call.program
    x = torch.randn(2, HEADS, 8, 9)
    if transposed:
        stored.copy_(x.mT)
    else:
        stored[..., :9], stored[..., 9:] = x, math.nan
    expected = torch.zeros_like(table)
    with torch.no_grad():
        reduce(x, expected)
    torch.testing.assert_close(gradients.results({})[0], expected)


@pytest.mark.parametrize("width", BWD_TILE_WIDTHS, ids=str)
def test_configs_serve_biases(width):
    for dtype in (torch.bfloat16, torch.float32):
        bias = torch.zeros(1, HEADS, 8, 8, dtype=dtype, requires_grad=True)
        program = trace(*with_bias(None, None, bias), True).program
        for direction in ("fwd", "bwd", "bwd_det"):
            used = program.forward if direction == "fwd" else program
            problem = AttnProblem.of("bfloat16", *width, False, direction, (), used)
            config, _ = configs.pick_config(problem, "long", "NVIDIA H200", direction)
            assert legality.fault(problem, config, direction) is None
            if direction == "fwd" and width == (64, 64):
                assert (
                    problem.stages and legality.smem_bytes(problem, config) > 128 * 128 * bias.element_size()
                )


def test_bias_gradients_that_are_dS():
    """Gradients of a bf16 bias that is added to a score, which nothing else changes: a pass by keys stores them."""
    bias = torch.zeros(1, HEADS, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    wide = bias.detach().float().requires_grad_()
    for bias_, score_mod, dtype, is_dS in (
        (bias, None, "bfloat16", True),
        (bias, None, "float16", False),
        (wide, None, "bfloat16", False),
        (bias, lambda s, b, h, q, k: s * 2.5, "bfloat16", False),
    ):
        program = trace(*with_bias(score_mod, None, bias_), True).program
        problem = AttnProblem.of(dtype, 64, 64, False, "bwd", (), program)
        assert problem.learns_dS is is_dS
        config, _ = configs.pick_config(problem, "long", "NVIDIA H200", "bwd")
        assert any(bwd_pass.adds_dq for bwd_pass in config.passes) is is_dS
    program = trace(lambda s, b, h, q, k: s + 2 * bias[0, h, q, k], None, True).program
    assert not program.learns_dS


def test_biases_that_run_in_narrow_tiles():
    """A dense bias alone whose gradient is dS has tiles of 32 columns, and schedules; more functions beside it have neither."""
    bias = torch.zeros(1, HEADS, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    found = {}
    for name, functions in {
        "alone": (None, None),
        "beside a score_mod": (lambda s, b, h, q, k: s + (q - k) * 0.1, None),
        "masked": (None, causal),
    }.items():
        program = trace(*with_bias(*functions, bias), True).program
        problem = AttnProblem.of("bfloat16", 24, 32, False, "bwd", (), program)
        config, _ = configs.pick_config(problem, "1k", "NVIDIA H200", "bwd")
        assert legality.fault(problem, config, "bwd") is None
        found[name] = problem.width, config.passes[0].schedule
        (bwd_pass,) = config.passes
        other = BwdConfig((replace(bwd_pass, order="separate-dS", schedule="dynamic-late"),))
        assert (legality.fault(problem, other) is None) is problem.learns_bias
    assert found == {
        "alone": ("d32", "dynamic-late"),
        "beside a score_mod": ("d64", "grid"),
        "masked": ("d64", "grid"),
    }
    program = trace(*with_bias(None, None, bias), True).program
    assert AttnProblem.of("bfloat16", 32, 32, False, "bwd_det", (), program).width == "d64"
    assert AttnProblem.of("bfloat16", 40, 32, False, "bwd", (), program).width == "d64"
    assert AttnProblem.of("bfloat16", 32, 32, False, "bwd", (), program.as_listed).width == "d64"


@pytest.mark.parametrize(
    ("shape", "dtype", "kernel"),
    [("whole", torch.bfloat16, None), ("of heads", torch.bfloat16, "bfloat16"), ("one", torch.float16, "float32-highest")],
)  # fmt: skip
def test_kernels_that_sum_gradients(shape, dtype, kernel):
    bias = torch.zeros(*SHAPES[shape], 8, 8, dtype=dtype, requires_grad=True)
    problem = AttnProblem.of(
        "bfloat16", 64, 64, False, "bwd", (), trace(*with_bias(None, None, bias), True).program
    )
    found = [(number, key.dtype) for number, (key, _) in reduce_kernels(problem).items()]
    assert found == ([] if kernel is None else [(0, kernel)])
    config, _ = configs.pick_config(problem, "1k", "NVIDIA H200", "bwd")
    assert {*reduce_kernels(problem).values()} <= {*config.kernels(problem)}


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize(
    "name, outer, addends", [("of heads", 1, 2), ("of the batch", 2, HEADS), ("one", 1, 2 * HEADS)]
)
def test_sums_of_gradients_are_passed_to_a_kernel(name, outer, addends, transposed):
    bias = torch.zeros(*SHAPES[name], 8, 9, dtype=torch.bfloat16, requires_grad=True)
    gradients = Gradients(trace(*with_bias(None, None, bias), True), 2, HEADS, 8, 9, transposed)
    (stored,) = gradients.arguments
    stored.normal_()
    shapes = []

    def kernel(x: torch.Tensor, total: torch.Tensor) -> None:
        shapes.append((*x.shape[:2], x.shape[3]))
        total.copy_(x.float().sum(1))

    (found,) = gradients.results({0: kernel}).values()
    assert shapes == [(outer, addends, 8)]
    torch.testing.assert_close(found, *gradients.results({}).values())


def test_gradients_that_scores_share_are_not_stored():
    for score_mod in (
        lambda s, b, h, q, k: s + table[b, h, q, 0],
        lambda s, b, h, q, k: s + table[b, h, k, q],
        lambda s, b, h, q, k: s + table[b, q, q, k],
        lambda s, b, h, q, k: s + table[0, h, q, k] + table[1, h, q, k],
        lambda s, b, h, q, k: s + table[b, h, q, k - 1],
    ):
        program = trace(score_mod, None, True).program
        assert program.stored == () and program.as_exact.exact


def exact_slot(x: float) -> tuple[int, int]:
    """(slot, number added to it) of an fp32 number, as the kernels have them."""
    (bits,) = struct.unpack("<i", struct.pack("<f", x))
    exponent = (bits >> 23 & 255) - 127 + 64
    if exponent >= (SLOTS - 1) * SLOT_EXPONENTS:
        return SLOTS - 1, 1
    digits = (bits & 0x7FFFFF | 0x800000) << (exponent % SLOT_EXPONENTS)
    if exponent < 0:
        digits = 0
    return max(exponent, 0) // SLOT_EXPONENTS, -digits if bits < 0 else digits


def test_exact_sums_are_exact():
    factors = torch.zeros(HEADS, requires_grad=True)
    call = trace(lambda s, b, h, q, k: s * factors[h], None, True)
    call = type(call)(call.program.as_exact, call.tensors, call.numbers)
    draw = random.Random(0)
    numbers = [
        [struct.unpack("<f", struct.pack("<f", draw.gauss(0, 1) * 2.0 ** draw.randint(-40, 40)))[0] for _ in range(99)]
        for _ in range(HEADS)
    ]  # fmt: skip
    numbers[3].append(math.inf)

    def total(order: int) -> torch.Tensor:
        gradients = Gradients(call, 2, HEADS, 8, 9)
        (sums,) = gradients.arguments
        for head, row in enumerate(numbers):
            for x in random.Random(order).sample(row, len(row)):
                slot, digits = exact_slot(x)
                sums[head * SLOTS + slot] += digits
        return gradients.results({})[0]

    found = total(1)
    assert torch.equal(found[:3], total(2)[:3]) and found[3].isnan()
    expected = torch.tensor([math.fsum(row) for row in numbers[:3]])
    assert torch.equal(found[:3], expected)
    assert math.ldexp(1.0, -64 - 23) == 2.0**FIRST_UNIT


# Kernels


@pytest.fixture(scope="module")
def built():
    """The kernels of the GPU tests, built at the same time."""
    kernels = []
    factors = torch.ones(HEADS, device="cuda", requires_grad=True)
    calls = [
        trace(*with_bias(None, None, torch.zeros(*shape, 8, 8, dtype=dtype, device="cuda", requires_grad=True)), True)
        for shape, dtype in (((8, HEADS), torch.bfloat16), ((1, 1), torch.float32), ((1, HEADS), torch.bfloat16))
    ]  # fmt: skip
    calls.append(trace(lambda s, b, h, q, k: s * factors[h], None, True))
    for call, head_dim in [(call, 64) for call in calls] + [(calls[0], 32), (calls[2], 32), (calls[0], 128)]:
        for direction in ("fwd", "bwd", "bwd_det"):
            program = {"fwd": call.program.forward, "bwd": call.program}.get(direction, call.program.as_exact)
            problem = AttnProblem.of("bfloat16", head_dim, head_dim, False, direction, (), program)
            kernels += configs.pick_config(problem, "1k", torch.cuda.get_device_name(), direction)[0].kernels(
                problem
            )
    failed = {
        kernel: error for kernel, error in building.build_all(list(dict.fromkeys(kernels))).items() if error
    }
    assert not failed, failed


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype", "seqlen_q", "seqlen_k", "head_dim"),
    [
        ((8, HEADS), torch.bfloat16, 500, 384, 64),
        ((8, HEADS), torch.bfloat16, 129, 77, 64),
        ((1, 1), torch.float32, 400, 401, 64),
        ((1, HEADS), torch.bfloat16, 1021, 1100, 64),
        ((8, HEADS), torch.bfloat16, 301, 205, 32),
        ((8, HEADS), torch.bfloat16, 300, 205, 128),
        ((1, HEADS), torch.bfloat16, 129, 999, 24),
    ],
    ids=str,
)
def test_bias_matches_the_formula(shape, dtype, seqlen_q, seqlen_k, head_dim, deterministic):
    on = {"device": "cuda", "requires_grad": True}
    q, k, v = (
        torch.randn(8, HEADS, n, head_dim, dtype=torch.bfloat16, **on) for n in (seqlen_q, seqlen_k, seqlen_k)
    )
    bias = torch.randn(*shape, seqlen_q, seqlen_k, dtype=dtype, **on)
    dout = torch.randn_like(q)

    def formula(dtype: torch.dtype) -> torch.Tensor:
        scores = (q.to(dtype) @ k.to(dtype).mT) * head_dim**-0.5
        scores = scores.to(torch.promote_types(dtype, torch.float32)) + bias.to(
            torch.promote_types(dtype, torch.float32)
        )
        return scores.softmax(-1).to(dtype) @ v.to(dtype)

    def results(out: torch.Tensor) -> list[torch.Tensor]:
        return [out, *torch.autograd.grad(out, [q, k, v, bias], dout.to(out.dtype))]

    found = results(flex_attention(q, k, v, attn_bias=bias, deterministic=deterministic))
    exact, same = results(formula(torch.float64)), results(formula(torch.bfloat16))
    for name, x, reference, other in zip(("out", "dq", "dk", "dv", "dbias"), found, exact, same, strict=True):
        reference = reference.double()
        error, allowed = ((y.double() - reference).abs().max().item() for y in (x, other))
        # A stored gradient is rounded to bf16 with bf16
        bound = 2 * allowed + (2e-3 if name == "dbias" else 1e-4) * reference.abs().max().item() + 1e-5
        assert error <= bound, f"{name}: expected an error of at most {bound}, got {error}"


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_deterministic_gradients_of_captured_tensors():
    on = {"device": "cuda", "requires_grad": True}
    q = torch.randn(8, HEADS, 700, 64, dtype=torch.bfloat16, **on)
    factors = torch.rand(HEADS, **on)

    def gradients(deterministic: bool) -> tuple[torch.Tensor, ...]:
        out = flex_attention(q, q, q, lambda s, b, h, q, k: s * factors[h], deterministic=deterministic)
        return torch.autograd.grad(out.square().sum(), [q, factors])

    first, second, atomic = gradients(True), gradients(True), gradients(False)
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close(first[1], atomic[1], rtol=1e-4, atol=1e-4 * atomic[1].abs().max().item())


def test_bias_refuses_for_a_batch_of_one():
    q = torch.randn(1, 2, 8, 32)
    with pytest.raises(ValueError, match=r"attn_bias: expected shape \(1, 1 or 2, 8, 8\) of batch, heads"):
        flex_attention(q, q, q, attn_bias=torch.zeros(8, 8))


@pytest.mark.parametrize("make", [causal_lower_right, causal_upper_left])
def test_bias_that_torch_makes_without_values_is_refused_by_name(make):
    """Its shape is (variant, seqlen_q, seqlen_k): with two batch entries a view [:, None] of it would fit."""
    q = torch.randn(2, 2, 8, 32)
    for call in (flex_attention, flash_attn_func):
        with pytest.raises(
            TypeError, match=r"^attn_bias: expected a tensor with .*got a CausalBias.*causal=True"
        ):
            call(q, q, q, attn_bias=make(8, 8))


def test_float_mask_of_zeros_and_ones_warns_on_the_cpu():
    """It is added to the scores: exp(1) does not hide a key, and exp(0) is no weight of 0."""
    q = torch.randn(1, 2, 11, 32)  # a size of no other test: the first call of its metadata warns
    mask = torch.ones(1, 1, 11, 11).tril()
    with pytest.warns(
        UserWarning, match=r"attn_bias: .* all values are 0 or 1; pass attn_bias\.bool\(\)"
    ) as caught:
        flex_attention(q, q, q, attn_bias=mask)
    assert caught[-1].filename == __file__
    others = (
        mask.bool(), torch.zeros(1, 1, 11, 11), torch.ones(1, 1, 11, 11), 2 * mask, mask.clone().requires_grad_(), mask.to("meta"),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in others:
            warn_about_mask_of_numbers(other)
