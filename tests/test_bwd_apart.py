"""Backward in the order "apart": its threads and registers, and on a GPU its gradients, whose dq a third warpgroup computes."""

from __future__ import annotations

import pytest
import torch
from test_bwd import run

from tl_attention import launch
from tl_attention.config.kernel_configs import BwdConfig, BwdPass
from tl_attention.config.legality import fault
from tl_attention.kernels.backward.by_keys import pass_roles
from tl_attention.kernels.seams.pipeline import APART_REGISTERS, FOUR_WARPS_REGISTERS
from tl_attention.kernels.seams.roles import WARPGROUP
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.options import Options
from tl_attention.problem.target import REGISTERS
from tl_attention.testing.inputs import make_dout, make_inputs
from tl_attention.testing.shapes import Shape

SCHEDULES = ["dynamic", "dynamic-late", "stream-K", "ordered"]


def apart(schedule: str, width: int = 128, rounds_dq: bool = False) -> BwdConfig:
    stages = {64: 4, 128: 2}[width]
    one = BwdPass("dq+dk+dv", 64, 128, stages, stages, width == 128, "apart", schedule, rounds_dq=rounds_dq)
    return BwdConfig((one,))


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_third_warpgroup_fits(schedule, width):
    config = apart(schedule, width)
    assert config.passes[0].threads == 4 * WARPGROUP
    producer, consumers, third = APART_REGISTERS
    assert WARPGROUP * (producer + 2 * consumers + third) <= REGISTERS
    assert fault(AttnProblem("bfloat16", width, width, True), config) is None


def test_only_d64_has_registers_for_each_tile():
    problems = [AttnProblem("bfloat16", width, width, True) for width in (64, 128)]
    for problem, width, expected in ((problems[0], 128, False), (problems[1], 64, True)):
        assert f"reuse_registers: expected {expected}" in fault(problem, apart("stream-K", width))


def test_softcaps_have_the_order_at_d64_alone():
    problems = [AttnProblem("bfloat16", width, width, True, ("softcap",)) for width in (64, 128)]
    assert fault(problems[0], apart("dynamic-late", 64)) is None
    assert fault(problems[0], apart("stream-K", 64, rounds_dq=True)) is None
    assert "another option" in fault(problems[1], apart("dynamic-late", 128))


def test_additions_in_turns_are_deterministic():
    assert apart("ordered").deterministic
    assert not apart("stream-K").deterministic


def test_warps_that_keep_the_order_have_registers():
    roles = pass_roles(AttnProblem("bfloat16", 128, 128, True), apart("ordered").passes[0])
    assert roles.registers == FOUR_WARPS_REGISTERS


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "shape",
    [
        "2,3,3,1000,1000,128,128,causal",
        "2,3,3,1000,1000,128,128,full",
        "1,6,2,900,1031,128,128,causal",
        "1,6,2,1031,900,128,120,full",
        "3,4,4,77,333,104,128,causal",  # fewer steps than sharers
        "1,1,1,1,1,128,128,full",
        "2,8,2,2048,2048,128,128,causal",  # CTAs compute several tiles
        "12,12,12,1024,1024,128,128,full",
        "2,3,3,1000,1000,64,64,causal",
        "2,3,3,1000,1000,64,64,full",
        "1,6,2,900,1031,64,64,causal",
        "1,6,2,1031,900,64,56,full",
        "3,4,4,77,333,48,64,causal",
        "1,1,1,1,1,64,64,full",
        "2,16,4,2048,2048,64,64,causal",
        "12,24,24,1024,1024,64,64,full",
    ],
)
def test_gradients_match_the_reference(shape, schedule):
    parsed = Shape.parse(shape)
    run(parsed, config=apart(schedule, 64 if parsed.head_dim <= 64 else 128))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_match_in_each_layout_and_dtype(layout, dtype, width):
    shape = Shape.parse(f"3,12,4,400,700,{width},{width},causal")
    run(shape, dtype, layout, scale=0.3, lse_base2=True, with_dlse=True, config=apart("stream-K", width))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_gradients_in_turns_have_the_same_bits(width, causal):
    shape = Shape(2, 12, 4, 1500, 1700, width, width, causal)
    q, k, v = make_inputs(shape, torch.bfloat16)
    dout = make_dout(shape, torch.bfloat16)
    out, lse = launch.forward(q, k, v, 0.1, causal, False)

    def gradients() -> tuple[torch.Tensor, ...]:
        return tuple(
            launch.backward(
                dout,
                q,
                k,
                v,
                out,
                lse,
                0.1,
                causal,
                False,
                deterministic=True,
                config=apart("ordered", width),
            ).values()
        )

    first = gradients()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["dynamic-late", "stream-K", "rounds-dq"])
@pytest.mark.parametrize("sizes", [(2, 12, 4, 1000, 1031), (30, 4, 4, 600, 600), (1, 1, 1, 1, 77)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_of_softcaps_match_those_of_another_order(causal, sizes, schedule):
    """Scores reach three times the cap. The orders round dS in other places, so near 0 a gradient differs by more than its last bit."""
    shape = Shape(*sizes, 64, 64, causal)
    q, k, v = make_inputs(shape, torch.bfloat16)
    dout = make_dout(shape, torch.bfloat16)
    options = Options(softcap=1.5)
    out, lse = launch.forward(q, k, v, 0.125, causal, False, options=options)
    rounds = schedule == "rounds-dq"
    config = apart("stream-K" if rounds else schedule, 64, rounds)
    other = BwdConfig((BwdPass("dq+dk+dv", 128, 128, 3, 2, True),))
    found, wanted = (
        tuple(
            launch.backward(dout, q, k, v, out, lse, 0.125, causal, False, options=options, config=x).values()
        )
        for x in (config, other)
    )
    for name, grad, same in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        typical = same.float().square().mean().sqrt().item()
        torch.testing.assert_close(
            grad, same, rtol=2**-7, atol=2**-5 * typical, msg=lambda text, name=name: f"{name}: {text}"
        )
