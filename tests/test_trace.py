"""Tracing of score_mod and mask_mod: values, derivatives, what is captured, what is found again, and what is refused."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import pickle
import subprocess
import sys

import numpy
import pytest
import torch

from tl_attention.problem.program import CAPTURED_DTYPES, Call, Program
from tl_attention.reference.flex import new_scores
from tl_attention.tracing.trace import trace
from tl_attention.tracing.trace_ops import OPS

HEADS, ROWS = 4, 8
slopes = torch.rand(HEADS)
learned = torch.rand(HEADS, requires_grad=True)
table = torch.rand(HEADS, 2 * ROWS, requires_grad=True)
documents = torch.arange(ROWS) // 3
bytes_of = torch.tensor([0, 1, 100, 127, 128, 200, 254, 255], dtype=torch.uint8)
signed = torch.tensor([-128, -100, -1, 0, 1, 63, 100, 127], dtype=torch.int8)
shorts = torch.tensor([-32768, -300, -1, 0, 2, 255, 300, 32767], dtype=torch.int16)
WINDOW = 3
WRONG, EMPTY = torch.ones(3, dtype=torch.float64), torch.ones(0)
BYTES = torch.ones(3).to(torch.float8_e4m3fn)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def scores() -> torch.Tensor:
    return torch.randn(2, HEADS, ROWS, ROWS) * 3


def positions(shape: torch.Size) -> list[torch.Tensor]:
    return [torch.arange(n).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate(shape)]


def trunc(x, y):
    return torch.div(x, y, rounding_mode="trunc")


# Every operation, at arguments where it is defined
FUNCTIONS = {
    "add": lambda s, b, h, q, k: s + q - 2 * k + b * 0.25,
    "alpha": lambda s, b, h, q, k: torch.add(s, h, alpha=3) + torch.sub(1, s, alpha=1) + (5 - s),
    "div": lambda s, b, h, q, k: s / 7.0 + q / (k + 1) + 2.0 / (s.abs() + 1) + s.abs().reciprocal(),
    "floor_divide": lambda s, b, h, q, k: s + (q - k) // 3 + torch.div(k, 2, rounding_mode="floor"),
    "trunc_divide": lambda s, b, h, q, k: s + torch.div(s, 2.0, rounding_mode="trunc") + trunc(q - k, 3) + trunc(k - q, -2),
    "divide_scores": lambda s, b, h, q, k: s + s // 0.7 + torch.div(s, 0.3, rounding_mode="floor"),
    "nan_to_num": lambda s, b, h, q, k: torch.nan_to_num(s, 0.0, 2.0, -2.0) + torch.nan_to_num(s.log()) + s.nan_to_num(nan=1.5),
    "remainder": lambda s, b, h, q, k: s % 3 + (q - k) % 5 + (k % 4) * 0.5 + torch.fmod(s, 2.0) + torch.fmod(q - k, 3),
    "pow": lambda s, b, h, q, k: s**3 + s**2 + s.abs() ** 0.5 + s.abs() ** 1.7 + s**-1 + s**0 + s.abs() ** (h * 0.5 + 1),
    "pow_of_ints": lambda s, b, h, q, k: s + (q - k) ** 3 + k**5 + signed[q] ** 3 + 2.0**k,
    "exponentials": lambda s, b, h, q, k: torch.exp(-s.abs()) + torch.exp2(s) + torch.expm1(s),
    "logarithms": lambda s, b, h, q, k: torch.log(s.abs() + 1) + torch.log2(s.abs() + 1) + torch.log1p(s.abs()),
    "roots": lambda s, b, h, q, k: torch.sqrt(s.abs() + 1) + torch.rsqrt(s.abs() + 1) + torch.square(s),
    "sigmoids": lambda s, b, h, q, k: torch.tanh(s) + torch.sigmoid(s) + torch.erf(s) + torch.atan(s),
    "waves": lambda s, b, h, q, k: torch.sin(s) + torch.cos(q * 0.3),
    "roundings": lambda s, b, h, q, k: s + torch.floor(s) + torch.ceil(s) + torch.round(s) + torch.trunc(s) + torch.round(q),
    "sign": lambda s, b, h, q, k: s * torch.sign(s) + torch.sgn(q - k) + (q - k).abs() - (-s),
    "extremes": lambda s, b, h, q, k: torch.maximum(s, q * 0.1) + torch.minimum(s, k * 0.1) + torch.clamp(s, -1, 1) + s.clamp(min=0.5),
    "clamps": lambda s, b, h, q, k: torch.clamp_min(s, 0.1) + torch.clamp_max(q - k, 2) + torch.relu(s),
    "where": lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf) + torch.where(h < 2, 1.0, s),
    "comparisons": lambda s, b, h, q, k: s + (q == k) + (s != 0) + (s < 1.5) * 2 + (k <= q) + (s > q) + (q >= 2),
    "logic": lambda s, b, h, q, k: torch.where(((q > k) & (h != 1)) | ~(s > 0) ^ (b == 0), s, 2 * s),
    "logical": lambda s, b, h, q, k: torch.where(torch.logical_and(q > 2, torch.logical_not(k > 2)) | torch.logical_or(h, b > 0), s, -s),
    "bits": lambda s, b, h, q, k: s + ((q ^ k) & 3) + ((q | k) << 1) + ((q & ~k) >> 1),
    "bits_in_place": lambda s, b, h, q, k: s + operator.ilshift(q.clone(), 2) + operator.irshift(k.clone(), 1),
    "activations": lambda s, b, h, q, k: sum(
        f(s)
        for f in (
            torch.nn.functional.gelu,
            torch.nn.functional.silu,
            torch.nn.functional.softplus,
            torch.nn.functional.leaky_relu,
            torch.nn.functional.elu,
            torch.nn.functional.hardtanh,
            torch.nn.functional.logsigmoid,
        )
    ),
    "filled": lambda s, b, h, q, k: s.masked_fill(q < k, -1e4) + torch.full_like(s, 2.0) + torch.zeros_like(s) + s.new_ones(()),
    "in_place": lambda s, b, h, q, k: s.clone().add_(1).mul_(slopes[h]),
    "small": lambda s, b, h, q, k: s + bytes_of[q] * 2 + shorts[k] * shorts[q] - (bytes_of[q] - 200) + ~bytes_of[k],
    "small_signed": lambda s, b, h, q, k: s + (-signed[k] + signed[q] * 3) + signed[q].abs() + (signed[k] ^ bytes_of[q]),
    "small_bits": lambda s, b, h, q, k: s + (signed[q] << 3) + (bytes_of[k] << 1) + (bytes_of[q] >> 1),
    "small_casts": lambda s, b, h, q, k: s + (q * 100).to(torch.uint8) + (k * 99 - 400).to(torch.int8) + (q * 9999).short(),
    "small_quotients": lambda s, b, h, q, k: s + signed[q] // 3 + signed[k] % 7 + (signed[q] > bytes_of[k]) * 2,
    "casts": lambda s, b, h, q, k: s + s.to(torch.int32) + q.float() + (k > 2).to(s.dtype) + s.long() + h.type_as(s),
    "nan": lambda s, b, h, q, k: torch.where(torch.isnan(s) | torch.isinf(s), 0.0, s),
    "detached": lambda s, b, h, q, k: s * s.detach() + learned.detach()[h],
    "captured": lambda s, b, h, q, k: s + slopes[h] * (k - q) + table[h, q - k + ROWS] + documents[q],
    "partly": lambda s, b, h, q, k: s + table[h][q] + table[1][k] + table[:, 3][h] + table[-1, q],
    "gathered": lambda s, b, h, q, k: s + table[h, documents[q] - documents[k]],  # negative indices count from the end
    "numbers": lambda s, b, h, q, k: s * torch.tensor(2.5) + WINDOW,
}  # fmt: skip
# The same on tensors that are broadcast
BROADCAST = FUNCTIONS | {
    # torch differentiates div with its rounding modes, not //
    "divide_scores": lambda s, b, h, q, k: (
        s + torch.div(s, 0.7, rounding_mode="floor") + torch.div(s, 0.3, rounding_mode="floor")
    ),
    "partly": lambda s, b, h, q, k: s + table[h, q] + table[1, k] + table[h, 3] + table[-1, q],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_trace_agrees_with_the_function(name):
    function, x = FUNCTIONS[name], scores().requires_grad_()
    call = trace(function, causal, True)
    expected = BROADCAST[name](x, *positions(x.shape))
    found = new_scores(x, Call(call.program.forward, call.tensors, call.numbers))
    hidden = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
    torch.testing.assert_close(found, expected.float().masked_fill(hidden, -math.inf), rtol=1e-5, atol=1e-5)


def slope_and_gradients(call: Call, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Derivatives that a program says it has: of the scores, and of captured tensors, summed over all scores."""
    program = call.program

    def value(i: int | None) -> torch.Tensor:
        return new_scores(x, Call(Program(program.values, score=i), call.tensors, call.numbers))

    slope = torch.ones_like(x) if program.slope is None else value(program.slope)
    sums = [torch.zeros_like(tensor) for tensor in call.tensors]
    for gradient in program.gradients:
        index = tuple(value(i).long() for i in gradient.index)
        sums[gradient.tensor].index_put_(index, value(gradient.factor), accumulate=True)
    return slope, [sums[i] for i in program.learned]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_trace_derivatives_are_those_of_torch(name):
    x = scores().requires_grad_()
    call = trace(FUNCTIONS[name], None, True)
    with torch.no_grad():
        slope, sums = slope_and_gradients(call, x)
    wanted = [call.tensors[i] for i in call.program.learned]
    out = BROADCAST[name](x, *positions(x.shape))
    seen = out.isfinite()
    grads = torch.autograd.grad(out[seen].sum(), [x, *wanted])
    torch.testing.assert_close(slope[seen], grads[0][seen], rtol=1e-4, atol=1e-5)
    for found, expected in zip(sums, grads[1:], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_trace_names_every_operation():
    """Each operation of the table is traced by some function above."""
    used = {
        value.op for function in FUNCTIONS.values() for value in trace(function, causal, True).program.values
    }
    assert used >= OPS.keys(), f"untested: {sorted(OPS.keys() - used)}"


def test_trace_gives_each_captured_tensor_that_learns_its_gradient():
    call = trace(lambda s, b, h, q, k: s * learned[h] + table[h, q] + slopes[h], None, True)
    assert [call.tensors[i] is x for i, x in zip(call.program.learned, (learned, table), strict=True)] == [
        True,
        True,
    ]
    assert trace(lambda s, b, h, q, k: s + learned.detach()[h], None, True).program.gradients == ()
    assert call.program.forward.gradients == ()


def test_trace_slope_of_an_added_bias_is_none():
    assert trace(FUNCTIONS["captured"], causal, True).program.slope is None
    assert trace(FUNCTIONS["pow"], causal, True).program.slope is not None


def test_trace_differentiates_within_the_kernel_of_an_op():
    """The kernel runs below autograd, which would record nothing."""
    found = []

    @torch.library.custom_op("tl_attention_test::trace", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        found.append(trace(lambda s, b, h, q, k: 3.5 * s + learned[h], None, True).program)
        return x.clone()

    op(torch.zeros(1))
    expected = trace(lambda s, b, h, q, k: 3.5 * s + learned[h], None, True).program
    assert found == [expected] and expected.slope is not None and expected.gradients


def test_trace_values_are_no_part_of_a_program():
    def made(window, cap, bias):
        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.where(q_idx - kv_idx < window, cap * torch.tanh(score / cap) + bias[h], -math.inf)

        return trace(score_mod, None, True)

    first, second = made(5, 30.0, torch.rand(3)), made(77, 50.0, torch.rand(9))
    assert first.program == second.program and hash(first.program) == hash(second.program)
    assert sorted(first.numbers) == [5, 30.0, 30.0] and sorted(second.numbers) == [50.0, 50.0, 77]
    assert made(5, 30.0, torch.rand(3, dtype=torch.bfloat16)).program != first.program


def test_trace_programs_survive_pickling():
    program = trace(FUNCTIONS["captured"], causal, True).program
    again = pickle.loads(pickle.dumps(program))
    assert again == program and hash(again) == hash(program) and again.text() == program.text()


def test_trace_finds_equal_functions_again():
    def made(window, bias):
        return lambda s, b, h, q, k: s + bias[h] * window

    first, second = (trace(made(3, torch.rand(HEADS)), None, False) for _ in range(2))
    assert first.program is second.program and first.tensors[0] is not second.tensors[0]
    assert trace(made(4, slopes), None, False).numbers != trace(made(5, slopes), None, False).numbers
    partial = functools.partial(lambda window, s, b, h, q, k: s * window, 7.0)
    assert trace(partial, None, False).program is trace(partial, None, False).program


def test_trace_sees_a_changed_global(monkeypatch):
    function = FUNCTIONS["numbers"]
    assert trace(function, None, False).numbers[-1] == 3
    monkeypatch.setitem(globals(), "WINDOW", 9)
    assert trace(function, None, False).numbers[-1] == 9


def test_trace_sees_a_changed_object():
    class Bias:
        size = 3.0

        def __call__(self, score, b, h, q_idx, kv_idx):
            return score + self.size

    bias = Bias()
    assert trace(bias, None, False).numbers == (3.0,)
    bias.size = 4.0
    assert trace(bias, None, False).numbers == (4.0,)


class HELD:
    """Tensor of an object, which is seen only when the function runs."""

    sparse = torch.eye(16).to_sparse()


half_slopes = torch.rand(HEADS, dtype=torch.bfloat16)


def without_gradient(score, b, h, q_idx, kv_idx):
    with torch.no_grad():
        bias = learned[h] * 2
    return score + bias


def control_flow(score, b, h, q_idx, kv_idx):
    if q_idx > kv_idx:
        return score
    return score * 2


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (
            control_flow, NotImplementedError,
            r"expected no control flow that .*\.item\(\) or a list indexed by it at .*test_trace.py:\d+; use torch.where.*a tensor in",
        ),
        (lambda s, b, h, q, k: s * s.item(), NotImplementedError, "expected no control flow"),
        (lambda s, b, h, q, k: s + float(q), NotImplementedError, r"expected no control flow .*float\(\).* \.float\(\) in place of"),
        (lambda s, b, h, q, k: min(s, 2.0), NotImplementedError, r"expected no control flow .*min\(\).* torch\.minimum in place of"),
        (lambda s, b, h, q, k: torch.sort(s)[0], NotImplementedError, r"got aten.sort.default at .*test_trace.py:\d+; supported are abs"),
        (lambda s, b, h, q, k: s + 2**k, NotImplementedError, r"got aten.pow.Scalar with .* at .*test_trace.py:\d+; make the base a float"),
        (lambda s, b, h, q, k: s + table.sum(), NotImplementedError, "got aten.sum.default"),
        (lambda s, b, h, q, k: torch.clamp(q, 1, 5, out=k) * s + k, NotImplementedError, "got aten.clamp.out at"),
        (lambda s, b, h, q, k: s.double(), NotImplementedError, "got aten._to_copy.default with a result of torch.float64 at"),
        (lambda s, b, h, q, k: s.expand(2), ValueError, r"expected a 0-d tensor, got shape \(2,\)"),
        (lambda s, b, h, q, k: s.expand(2).sum(), NotImplementedError, "got aten.expand.default"),
        (lambda s, b, h, q, k: table[h], ValueError, r"expected a 0-d tensor, got shape \(16,\)"),
        (lambda s, b, h, q, k: table[h, 1:], NotImplementedError, "got a slice beside 0-d tensors"),
        (lambda s, b, h, q, k: (s, s), TypeError, "expected a 0-d tensor, got tuple"),
        (lambda s, b, h, q, k: s > 0, TypeError, "expected a score, got a bool"),
        (lambda s, b, h: s, TypeError, r"expected a function of 0-d tensors \(score, b, h, q_idx, kv_idx\)"),
        (lambda s, b, h, q, k: s + WRONG[h], TypeError, "expected captured tensors of float32"),
        (lambda s, b, h, q, k: s + BYTES[h], TypeError, r"captured tensors of float32, .*got \(3,\) torch.float8_e4m3fn at .*; cast"),
        (lambda s, b, h, q, k: s + EMPTY[h], ValueError, "at least one element"),
        (lambda s, b, h, q, k: s.half(), NotImplementedError, r"got aten._to_copy.default that rounds to torch.float16.*test_trace.py"),
        (lambda s, b, h, q, k: s + q.bfloat16(), NotImplementedError, "rounds to torch.bfloat16.*; leave the rounding out"),
        (lambda s, b, h, q, k: s * half_slopes[h].to(torch.float16), NotImplementedError, "rounds to torch.float16"),
        (lambda s, b, h, q, k: half_slopes[h].clone().add_(s), NotImplementedError, "got aten.add_.Tensor that rounds"),
        (torch.inference_mode()(lambda s, b, h, q, k: s * 2), NotImplementedError, "expected no torch.no_grad"),
        (lambda s, b, h, q, k: s + (bytes_of[q] + 300), NotImplementedError, "of torch.uint8 and 300, .*; convert with .long()"),
        (lambda s, b, h, q, k: s + table[h, q / 2], TypeError, r"expected integers as indices of a tensor, got torch.float32 at .*; round"),
        (lambda s, b, h, q, k: s + table[h, s], TypeError, r"integers as indices .*got torch.float32 at .*test_trace.py:\d+; round"),
        (lambda s, b, h, q, k: s + table[h, 1.5], TypeError, "expected integers as indices of a tensor, got 1.5 at"),
        (lambda s, b, h, q, k: s + table[h, q >= k], TypeError, "integers as indices .*got torch.bool at .*torch.where"),
        (lambda s, b, h, q, k: s + table[h, bytes_of[q]], TypeError, "integers as indices .*got torch.uint8 at"),
        (lambda s, b, h, q, k: s + HELD.sparse[h, q], NotImplementedError, r"captures dense tensors .*got torch.sparse_coo.*\.to_dense"),
        (without_gradient, NotImplementedError, r"expected no torch.no_grad, torch.enable_grad or .*; call .detach\(\)"),
    ],
)  # fmt: skip
def test_trace_refuses(function, error, words):
    with pytest.raises(error, match="^score_mod .*test_trace.py:") as found:
        trace(function, None, True)
    found.match(words)


two_elements, one_element = torch.arange(2.0), torch.tensor([7.0])
kept = []
READS = {
    "list": lambda s, b, h, q, k: s + torch.tensor([q, k])[0],
    "as_tensor": lambda s, b, h, q, k: s + torch.as_tensor([q, k])[0],
    "new_tensor": lambda s, b, h, q, k: s.new_tensor([s])[0],
    "legacy": lambda s, b, h, q, k: torch.Tensor([s])[0],
    "full": lambda s, b, h, q, k: torch.full((), q) + s,
    "arange": lambda s, b, h, q, k: torch.arange(q)[0] + s,
    "slice": lambda s, b, h, q, k: s + two_elements[:q][0],
    "list of Python": lambda s, b, h, q, k: s + [1, 2][q],
    "tolist": lambda s, b, h, q, k: s + q.tolist(),
    "math": lambda s, b, h, q, k: s + math.floor(q),
    "numpy": lambda s, b, h, q, k: s + q.numpy(),
    "numpy force": lambda s, b, h, q, k: s + q.numpy(force=True),
    "ufunc": lambda s, b, h, q, k: numpy.sqrt(s),
    "array": lambda s, b, h, q, k: s + numpy.array([q, k])[0],
    "index of an array": lambda s, b, h, q, k: s + numpy.arange(2.0)[q],
    "storage": lambda s, b, h, q, k: s.untyped_storage()[0],
    "pointer": lambda s, b, h, q, k: s + s.data_ptr(),
    "equal": lambda s, b, h, q, k: s * 2 if torch.equal(q, k) else s,
    "captured": lambda s, b, h, q, k: s + two_elements[1].item(),
    "captured list": lambda s, b, h, q, k: s + two_elements.tolist()[0],
    "captured one": lambda s, b, h, q, k: s + one_element.item(),
}


@pytest.mark.parametrize("function", READS.values(), ids=READS)
def test_trace_reads_no_values(function):
    """Values of scores and indices there are none, and those of a captured tensor may change before the next call."""
    with pytest.raises((NotImplementedError, TypeError, RuntimeError), match="^score_mod .*expected"):
        trace(function, None, False)


def test_trace_takes_values_of_numbers():
    offset = torch.tensor(5)
    assert trace(lambda s, b, h, q, k: s + offset.item(), None, False).numbers == (5.0,)
    offset.fill_(6)
    numbers = trace(lambda s, b, h, q, k: s + offset.item() * torch.tensor(3).item(), None, False).numbers
    assert numbers[-1] == 18
    assert trace(lambda s, b, h, q, k: numpy.float64(2.5), None, False).numbers == (2.5,)


def test_trace_takes_values_once():
    """A value that is used twice is read once: sixty squares are sixty operations."""
    one = torch.tensor(1.0)

    def power(x):
        for _ in range(60):
            x = x * x
        return x

    assert trace(lambda s, b, h, q, k: s + 3 * power(one).item(), None, False).numbers == (3.0,)
    with pytest.raises(NotImplementedError, match="expected captured tensors whose elements"):
        trace(lambda s, b, h, q, k: s + power(one_element[0]).item(), None, False)


@pytest.mark.parametrize("captured", [torch.tensor(5.0), torch.arange(5.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("view", [lambda x: x, torch.Tensor.detach], ids=["itself", "view"])
def test_trace_changes_no_captured_tensor(captured, view):
    before = captured.clone()
    with pytest.raises(
        NotImplementedError, match=r"expected captured tensors that it only reads, got aten.add_"
    ):
        trace(lambda s, b, h, q, k: (view(captured).add_(1), s)[1], None, False)
    assert torch.equal(captured, before)


@pytest.mark.parametrize("view", [lambda x: x.view(()), torch.Tensor.detach, lambda x: x[...]])
def test_trace_refuses_what_a_view_changed(view):
    def changed(score, returned, changes_view):
        x = score * 1
        both = x, view(x)
        both[changes_view].add_(1)
        return both[returned] * 2

    for i in (0, 1):
        with pytest.raises(NotImplementedError, match="^score_mod .*not changed in place through a view"):
            trace(lambda s, b, h, q, k, i=i: changed(s, i, 1 - i), None, False)
        call = trace(lambda s, b, h, q, k, i=i: changed(s, i, i), None, False)
        x = scores()
        torch.testing.assert_close(new_scores(x, call), (x + 1) * 2)


def test_trace_runs_operations_on_ones_of_their_own():
    """An operation that writes to its arguments leaves those of later traces as they are: torch divides no integer by 0."""
    for write in (lambda q: q.sub_(1), lambda q: torch.sub(q, 1, out=q)):
        with contextlib.suppress(NotImplementedError):
            trace(lambda s, b, h, q, k, write=write: s + write(q), None, False)
    trace(lambda s, b, h, q, k: s + k // q, None, False)


def test_trace_refuses_an_index_of_another_call():
    def keeps(score, b, h, q, k):
        kept.append(q)
        return score + kept[0]

    trace(keeps, None, False)
    for function in (keeps, lambda s, b, h, q, k: kept[0]):
        with pytest.raises(NotImplementedError, match="^score_mod .*expected tensors of this call"):
            trace(function, None, False)


def test_trace_shows_and_formats_an_index():
    def shown(score, b, h, q, k):
        assert "without a value" in repr(q) and "int32" in f"{q}"
        return score + q

    trace(shown, None, False)


def test_masks_and_scores_need_no_compiler_of_torch():
    code = """
import sys, torch, tl_attention
ids, q = torch.zeros(200, dtype=torch.int), torch.zeros(1, 1, 200, 64)
mask = tl_attention.create_block_mask(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), None, None, 200, 200, device="cpu")
tl_attention.flex_attention(q, q, q, block_mask=mask)
tl_attention.flex_attention(q, q, q, lambda s, b, h, q, k: s * 3)
assert "torch._dynamo" not in sys.modules
"""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_trace_runs_functions_that_were_compiled_as_they_are():
    """Without compiling them, or the recorder."""
    compiled = []
    function = FUNCTIONS["detached"]
    made = torch.compile(function, backend=lambda graph, _: compiled.append(graph) or graph)
    assert trace(made, None, True).program == trace(function, None, True).program
    assert not compiled


def test_trace_refuses_masks_of_scores():
    with pytest.raises(
        TypeError, match="^mask_mod .*expected a bool, True where the query sees the key, got int32"
    ):
        trace(None, lambda b, h, q, k: q - k, True)


def test_trace_takes_captured_dtypes():
    for name in CAPTURED_DTYPES:
        tensor = torch.ones(HEADS, dtype=getattr(torch, name))
        call = trace(lambda s, b, h, q, k, tensor=tensor: s + tensor[h], None, True)
        x = scores()
        torch.testing.assert_close(new_scores(x, call), x + 1)
