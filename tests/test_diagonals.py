"""Values and gradients of a score_mod that q_idx - kv_idx determines: which they are, and the kernels against formulas on whole tensors."""

from __future__ import annotations

import importlib.util
import math
import re

import pytest
import torch

from tl_attention import flex_attention
from tl_attention.compilation import building, compiler, toolkit
from tl_attention.config import configs, legality
from tl_attention.config.kernel_configs import BwdPass, FwdConfig
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.program import MAX_DIAGONALS
from tl_attention.tracing.program_values import program_values
from tl_attention.tracing.trace import trace

HEADS, HEADS_KV, MAX = 4, 2, 900


def causal(b, h, q, k):
    return q >= k


def bucket(distance: torch.Tensor) -> torch.Tensor:
    """Number of 32 for a distance: one of 16 per sign, wider and wider, as in T5."""
    far = 8 + (torch.log(distance.abs().float().clamp(min=1) / 8) * 2.9).to(torch.int32)
    near = torch.where(distance.abs() < 8, distance.abs(), far.clamp(max=15))
    return (distance < 0).to(torch.int32) * 16 + near


class Captured:
    """Tensors that the functions below capture, on a device."""

    def __init__(self, device: str):
        on = {"device": device, "requires_grad": True}
        self.relative = torch.randn(HEADS, 2 * MAX, **on)
        self.half = torch.randn(HEADS, 2 * MAX, **on, dtype=torch.bfloat16)
        self.buckets = torch.randn(HEADS, 32, **on)
        self.temperature = torch.rand(HEADS, **on)
        self.slopes = torch.rand(HEADS, device=device)
        self.table = torch.randn(HEADS, 2 * MAX, device=device)


def cases(c: Captured) -> dict[str, tuple]:
    """Name -> score_mod, values per diagonal, gradients per diagonal, captured tensors with gradients."""
    return {
        "relative": (lambda s, b, h, q, k: s + c.relative[h, q - k + MAX], 1, (0,), (c.relative,)),
        "reversed": (lambda s, b, h, q, k: s + c.half[h, MAX - (q - k)], 1, (0,), (c.half,)),
        "buckets": (lambda s, b, h, q, k: s + c.buckets[h, bucket(q - k)], 1, (0,), (c.buckets,)),
        "fixed": (lambda s, b, h, q, k: s + c.table[h, q - k + MAX], 1, (), ()),
        "slopes": (lambda s, b, h, q, k: s + c.slopes[h] * (k - q), 0, (), ()),  # cheaper per score
        "capped": (lambda s, b, h, q, k: 20 * torch.tanh((s + c.relative[h, q - k + MAX]) / 20), 1, (0,), (c.relative,)),
        "two": (lambda s, b, h, q, k: s * torch.exp2(-(q - k).abs() * 0.01) + c.relative[h, q - k + MAX], 2, (0,), (c.relative,)),
        "three": (
            lambda s, b, h, q, k: torch.sin(s * torch.exp(-(q - k).abs() * 0.1) + c.relative[h, q - k + MAX]) * c.buckets[h, bucket(q - k)],
            MAX_DIAGONALS, (0, 1), (c.relative, c.buckets),
        ),
        "temperature": (lambda s, b, h, q, k: s * c.temperature[h], 0, (), (c.temperature,)),
        "sums": (lambda s, b, h, q, k: s + c.relative[h, q + k], 0, (), (c.relative,)),
        "of_query": (lambda s, b, h, q, k: s + c.relative[h, q], 0, (), (c.relative,)),
        "stretched": (lambda s, b, h, q, k: s + c.relative[h, 2 * q - k + MAX], 0, (), (c.relative,)),
        "floats": (lambda s, b, h, q, k: s + (q.float() - k.float()) * 0.01, 0, (), ()),
    }  # fmt: skip


NAMES = tuple(cases(Captured("cpu")))


@pytest.mark.parametrize("name", NAMES)
def test_diagonals_of_a_program(name):
    score_mod, values, gradients, _ = cases(Captured("cpu"))[name]
    call = trace(score_mod, causal, True)
    program = call.program
    assert len(program.diagonals) == values
    assert program.diagonal_gradients == gradients
    at = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in (1, HEADS, 40, 50)), indexing="ij")
    leaves = {
        **dict(zip(("batch", "head", "query", "key"), at, strict=True)),
        "score": torch.randn(at[0].shape),
    }
    index = [i for n in gradients for i in program.gradients[n].index]
    for x in program_values(call, [*program.diagonals, *index], leaves, torch.float32):
        x = x.expand(at[0].shape)
        assert torch.equal(x[..., 1:, 1:], x[..., :-1, :-1])


def test_scores_stay_close_unless_positions_are_numbers():
    """A held row max suits scores that positions change by captured values alone."""
    made = cases(Captured("cpu"))
    programs = {name: trace(made[name][0], None, True).program.forward for name in made}
    grows = {name for name in NAMES if programs[name].grows_with_positions}
    assert grows == {"slopes", "two", "three", "floats"}
    for name, program in programs.items():
        problem = AttnProblem("bfloat16", 128, 128, False, (), program)
        config, _ = configs.pick_config(problem, "long", "NVIDIA H200", "fwd")
        held = problem.scores_stay_close, config.hold_max, config.schedule == "persistent"
        assert held == (name not in grows,) * 3
        masked = AttnProblem("bfloat16", 128, 128, False, (), trace(made[name][0], causal, False).program)
        assert not masked.scores_stay_close
        assert not configs.pick_config(masked, "long", "NVIDIA H200", "fwd")[0].hold_max


@pytest.mark.parametrize("hidden", [-math.inf, -1e30, -5e4])
def test_scores_that_a_score_mod_hides_do_not_stay_close(hidden):
    """A row that sees only hidden keys at first would hold their scores as its row max."""
    lengths = torch.tensor([7, 9])
    for score_mod in (
        lambda s, b, h, q, k: torch.where(k < lengths[b], s, hidden),
        lambda s, b, h, q, k: torch.where(q >= k, s * 0.5, hidden) + 1,
    ):
        program = trace(score_mod, None, False).program
        assert program.chooses_scores and not program.grows_with_positions
        problem = AttnProblem("bfloat16", 128, 128, False, (), program)
        assert not problem.scores_stay_close
        assert not configs.pick_config(problem, "long", "NVIDIA H200", "fwd")[0].hold_max


def test_scores_that_add_a_diagonal():
    made = cases(Captured("cpu"))
    added = {name for name in NAMES if trace(made[name][0], None, True).program.forward.adds_diagonal}
    assert added == {"relative", "reversed", "buckets", "fixed"}
    values = torch.randn(2 * MAX)
    for score_mod in (
        lambda s, b, h, q, k: values[q - k + MAX] + s,
        lambda s, b, h, q, k: s + (values[q - k + MAX] * 0.5 - 1),
        lambda s, b, h, q, k: s + (torch.exp(-(q - k).abs() * 0.01) + h * 0.25),
    ):
        assert trace(score_mod, None, False).program.adds_diagonal
    for score_mod in (
        lambda s, b, h, q, k: s * 2 + values[q - k + MAX],
        lambda s, b, h, q, k: s - values[q - k + MAX],
        lambda s, b, h, q, k: s + values[q - k + MAX] * s,
        lambda s, b, h, q, k: values[q - k + MAX] + values[q - k + MAX],
    ):
        assert not trace(score_mod, None, False).program.adds_diagonal


def test_diagonals_pass_dS_on():
    """One pass makes all gradients if those of captured tensors are dS, summed over diagonals."""
    made = cases(Captured("cpu"))
    programs = {name: trace(made[name][0], None, True).program for name in made}
    assert {name for name in NAMES if programs[name].learns_dS} == {"relative", "reversed", "buckets"}
    shared = {name: programs[name].shares_targets(0) for name in ("relative", "reversed", "buckets")}
    assert shared == {"relative": False, "reversed": False, "buckets": True}
    for name in ("relative", "fixed"):
        problem = AttnProblem("bfloat16", 64, 64, False, (), programs[name])
        config, _ = configs.pick_config(problem, "long", "NVIDIA H200", "bwd")
        assert problem.is_diagonal_bias and config.passes[0].order == "apart"
    for direction, passes in (("bwd", 1), ("bwd_det", 2)):
        program = programs["relative"] if passes == 1 else programs["relative"].as_exact
        problem = AttnProblem("bfloat16", 128, 128, False, (), program)
        config, _ = configs.pick_config(problem, "8k", "NVIDIA H200", direction)
        assert len(config.passes) == passes


@pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang")
@pytest.mark.timeout(300)
@pytest.mark.in_turn(1)
@pytest.mark.parametrize(
    ("head_dim", "config", "most"),  # bytes of spills
    [
        (128, BwdPass("dq", 128, 64), 0),
        (
            64,
            BwdPass("dq+dk+dv", 128, 128, reuse_registers=True, order="separate-dS", schedule="stream-K"),
            0,
        ),
        (64, BwdPass("dq+dk+dv", 64, 128, 4, 4, order="apart", schedule="stream-K"), 0),
        (128, BwdPass("dq+dk+dv", 64, 128, reuse_registers=True, order="apart", schedule="stream-K"), 16),
    ],
    ids=str,
)
def test_diagonals_compile_without_spills(head_dim, config, most, tmp_path):
    if not toolkit.find_nvcc():
        pytest.skip(toolkit.NO_NVCC)
    program = trace(cases(Captured("cpu"))["buckets"][0], None, True).program
    problem = AttnProblem("bfloat16", head_dim, head_dim, False, (), program)
    source, _ = compiler.lower(problem, config)
    flags = compiler.pass_configs(problem, config), ["-Xptxas=-v", "-w"]
    output, _ = compiler.assemble(source, tmp_path, *flags)
    assert int(re.search(r"(\d+) bytes spill stores", output)[1]) <= most and "C75" not in output


@pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang")
@pytest.mark.timeout(300)
@pytest.mark.in_turn(1)
@pytest.mark.parametrize(("head_dim", "mask_mod"), [(64, causal), (128, None)])
def test_values_per_diagonal_of_a_forward_have_the_shared_memory_of_legality(head_dim, mask_mod):
    program = trace(cases(Captured("cpu"))["relative"][0], mask_mod, False).program
    problem = AttnProblem("bfloat16", head_dim, head_dim, False, (), program)
    config = FwdConfig(128, 64, schedule="dynamic")
    assert compiler.lower(problem, config)[1] == legality.smem_bytes(problem, config)


@pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang")
@pytest.mark.timeout(300)
@pytest.mark.in_turn(0)  # TileLang takes a core 40 s for each
@pytest.mark.parametrize("mask_mod", [None, causal])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_values_per_diagonal_of_a_forward_fit(head_dim, mask_mod, tmp_path):
    """The config of a forward with such values has the shared memory that legality.py counts, and no spills."""
    program = trace(cases(Captured("cpu"))["relative"][0], mask_mod, False).program
    problem = AttnProblem("bfloat16", head_dim, head_dim, False, (), program)
    config, _ = configs.pick_config(problem, "long", "NVIDIA H200")
    source, smem = compiler.lower(problem, config)
    assert smem == legality.smem_bytes(problem, config)
    if not toolkit.find_nvcc():
        pytest.skip(toolkit.NO_NVCC)
    flags = compiler.pass_configs(problem, config), ["-Xptxas=-v", "-w"]
    output, _ = compiler.assemble(source, tmp_path, *flags)
    assert "0 bytes spill stores" in output and "C75" not in output, output[-400:]


def oracle(q, k, v, score_mod, mask_mod, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by calling the functions on whole tensors; the products are made in `dtype`."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    scores = ((q.to(dtype) @ k.mT) * q.shape[-1] ** -0.5).to(torch.promote_types(dtype, torch.float32))
    at = [
        torch.arange(n, device=q.device).view([-1 if i == d else 1 for i in range(4)])
        for d, n in enumerate(scores.shape)
    ]
    scores = score_mod(scores, *at)
    if mask_mod is not None:
        scores = torch.where(mask_mod(*at), scores, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0).to(dtype) @ v, scores.logsumexp(-1)


# name, mask_mod, head_dim, deterministic, seqlen_q, seqlen_k
ON_GPU = [
    ("relative", None, 64, False, 577, 777),
    ("relative", None, 64, False, 890, 130),
    ("relative", None, 128, False, 777, 577),
    ("relative", None, 256, False, 333, 450),
    ("relative", None, 128, True, 577, 777),
    ("relative", causal, 128, False, 601, 601),
    ("reversed", None, 64, False, 1, 900),
    ("buckets", None, 64, False, 577, 777),
    ("buckets", None, 128, False, 900, 333),
    ("buckets", None, 64, True, 577, 777),
    ("fixed", None, 64, False, 577, 777),
    ("fixed", causal, 64, False, 601, 601),
    ("fixed", None, 128, False, 777, 577),
    ("slopes", None, 64, False, 577, 777),
    ("capped", None, 128, False, 577, 777),
    ("two", None, 64, False, 777, 577),
]


@pytest.fixture(scope="module")
def built():
    """The kernels of the GPU tests, built at the same time."""
    made, kernels = cases(Captured("cuda")), []
    for name, mask_mod, head_dim, deterministic, *_ in ON_GPU:
        program = trace(made[name][0], mask_mod, True).program
        of_backward = program.as_exact if deterministic else program
        for direction, used in (
            ("fwd", program.forward),
            ("bwd_det" if deterministic else "bwd", of_backward),
        ):
            problem = AttnProblem("bfloat16", head_dim, head_dim, False, (), used)
            config, _ = configs.pick_config(problem, "1k", torch.cuda.get_device_name(), direction)
            kernels += config.kernels(problem)
    failed = {kernel: error for kernel, error in building.build_all(kernels).items() if error}
    assert not failed, failed


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("of", ["query", "dout"])
def test_diagonals_pass_nan_on(of, deterministic):
    """NaN in a row of one head: in the gradient of its biases, and in none of another head."""
    score_mod, *_, (bias,) = cases(Captured("cuda"))["relative"]
    q, k, v, dout = (
        torch.randn(8, HEADS, n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (577, 777, 777, 577)
    )
    (q if of == "query" else dout).data[0, 1, 20] = math.nan
    out = flex_attention(q, k, v, score_mod, deterministic=deterministic)
    (found,) = torch.autograd.grad(out, bias, dout)
    assert found.isnan().any(1).tolist() == [head == 1 for head in range(HEADS)]


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("name", "mask_mod", "head_dim", "deterministic", "seqlen_q", "seqlen_k"), ON_GPU)
def test_diagonals_match_the_formula(name, mask_mod, head_dim, deterministic, seqlen_q, seqlen_k):
    """Errors of at most twice those of the formula with products in bf16, or of fp64 with the kernel's outputs, as roots of mean squares.

    Kernels make delta, the sum of dO * O per query, from their own outputs: an error of it acts like a gradient of lse. It stays in the
    gradient of a bucket, which sums over many keys of a query. As there are few buckets, their error varies from seed to seed: 0.5 to 2.6
    times that of the formula in 20 runs (H100, 2026-11-24), so three times it is allowed.
    """
    score_mod, *_, learned = cases(Captured("cuda"))[name]
    shapes = (HEADS, seqlen_q), (HEADS_KV, seqlen_k), (HEADS_KV, seqlen_k)
    q, k, v = (
        torch.randn(8, heads, n, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads, n in shapes
    )
    dout = torch.randn_like(q)

    def results(
        found: tuple[torch.Tensor, torch.Tensor], dlse: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        out, lse = found
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        return [out, *torch.autograd.grad([out, lse], [q, k, v, *learned], [dout.to(out.dtype), dlse])]

    functions = {"enable_gqa": True, "return_lse": True, "mask_mod": mask_mod, "deterministic": deterministic}
    runs = [results(flex_attention(q, k, v, score_mod, **functions)) for _ in range(1 + deterministic)]
    assert all(torch.equal(x, y) for run in runs for x, y in zip(run, runs[0], strict=True))
    whole = q, k, v, score_mod, mask_mod
    exact, same = (results(oracle(*whole, dtype)) for dtype in (torch.float64, torch.bfloat16))
    rounding = (dout.double() * (exact[0] - runs[0][0].double())).sum(-1)
    rounded = results(oracle(*whole, torch.float64), rounding)
    for what, *found in zip(("out", "dq", "dk", "dv", "bias"), runs[0], same, rounded, exact, strict=False):
        *others, reference = (x.double() for x in found)
        error, *allowed = ((x - reference).square().mean().sqrt().item() for x in others)
        bound = (3 if (what, name) == ("bias", "buckets") else 2) * max(allowed)
        assert error <= bound, f"{what}: expected an error of at most {bound}, got {error}"


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("is_learned", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_past_the_end_change_nothing(head_dim, is_learned):
    """A tile has keys past the last one, at distances of no pair, whose biases may be anything."""
    captured = Captured("cuda")
    bias = captured.relative if is_learned else captured.table
    score_mod, *_, learned = cases(captured)["relative" if is_learned else "fixed"]
    seqlen_q, seqlen_k = 768, 777
    unused = torch.ones(2 * MAX, dtype=torch.bool, device="cuda")
    unused[MAX - seqlen_k + 1 : MAX + seqlen_q] = False
    with torch.no_grad():
        bias[:, unused] = math.nan
    q, k, v, dout = (
        torch.randn(8, HEADS, n, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (seqlen_q, seqlen_k, seqlen_k, seqlen_q)
    )
    grads = torch.autograd.grad(flex_attention(q, k, v, score_mod), (q, k, v, *learned), dout)
    assert all(x.isfinite().all() for x in grads)


def rows_that_differ(q, bias):
    """Scores of every 16th query 60 times as large as others, whose exponentials are 0 relative to its row max."""
    with torch.no_grad():
        q[:, :, 3::16] *= 60


def scores_that_grow(q, bias):
    """Far keys with larger scores than all that a row max is held of."""
    with torch.no_grad():
        bias[:, : MAX - 150] += 90


def hidden_distances(q, bias):
    """Every other distance, and all keys of the last queries."""
    with torch.no_grad():
        bias[:, ::2] = -math.inf
        bias[:, MAX - 300 :] = -math.inf


def large_scores(q, bias):
    """Maxima too far from 0 for a row max of 0."""
    with torch.no_grad():
        bias += 60


def small_scores(q, bias):
    with torch.no_grad():
        bias -= 60


def one_far_head(q, bias):
    """Scores of -40 in one head; in another, far keys with scores larger by 30 than all that a row max is held of."""
    with torch.no_grad():
        bias[0] -= 40
        bias[1, : MAX - 150] += 30


CHANGES = [rows_that_differ, scores_that_grow, hidden_distances, large_scores, small_scores, one_far_head]


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("scale", [0.1, -0.1, 0.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_relative_bias_where_a_held_row_max_does_not_serve(head_dim, scale, change):
    lengths = (HEADS, 577), (HEADS, 777), (HEADS, 777)
    q, k, v = (
        torch.randn(16, heads, n, head_dim, device="cuda", dtype=torch.bfloat16) for heads, n in lengths
    )
    bias = torch.randn(HEADS, 2 * MAX, device="cuda")
    change(q, bias)

    def score_mod(s, b, h, i, j):
        return s + bias[h, i - j + MAX]

    out, lse = flex_attention(q, k, v, score_mod, scale=scale, return_lse=True)
    exact, exact_lse = oracle(q.double() * (scale * head_dim**0.5), k, v, score_mod, None, torch.float64)
    assert torch.equal(lse.isfinite(), exact_lse.isfinite())
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-3)
    error = (out.double() - exact).square().mean().sqrt()
    assert error <= 6e-3 * exact.square().mean().sqrt()
