"""The benchmark of forward mode, with stand-ins for the GPU."""

from __future__ import annotations

import functools

import forward_mode
import pytest
import torch

from tl_attention import launch
from tl_attention.problem.attn_problem import JVP_TILE_WIDTHS
from tl_attention.reference import attention_reference
from tl_attention.reference.jvp import attention_jvp_reference
from tl_attention.testing import timer
from tl_attention.testing.inputs import make_inputs
from tl_attention.testing.shapes import chosen_shapes


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_formula_is_attention(mask):
    (shape,) = chosen_shapes([f"2,3,3,20,30,64,{mask}"]).values()
    q, k, v = (x.double() for x in make_inputs(shape, torch.bfloat16, device="cpu"))
    out = forward_mode.formula(*(x.transpose(1, 2) for x in (q, k, v)), shape.causal)
    wanted, _ = attention_reference(q, k, v, causal=shape.causal, dtype=torch.float64)
    torch.testing.assert_close(out.transpose(1, 2), wanted)


def test_default_shapes_have_kernels():
    widths = {shape.head_dim for shape in chosen_shapes(forward_mode.SHAPES).values()}
    assert widths == {width for width, _ in JVP_TILE_WIDTHS}


@pytest.mark.parametrize("wrong", [False, True])
def test_a_speed_is_printed_beside_a_right_result_alone(wrong, monkeypatch, capsys):
    def kernel(q, k, v, tq, tk, tv, scale, causal, _):
        out, lse, tout, tlse = attention_jvp_reference(q, k, v, tq, tk, tv, scale, causal)
        return out.to(q.dtype), lse, (tout * (1.5 if wrong else 1)).to(q.dtype), tlse

    def time(calls, rounds):
        return {name: timer.Timing((1.0,) * rounds, 1, "graph") for name in calls}

    monkeypatch.setattr(launch, "forward_jvp", kernel)
    monkeypatch.setattr(timer, "time_interleaved", time)
    monkeypatch.setattr(forward_mode, "is_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(forward_mode, "make_inputs", functools.partial(make_inputs, device="cpu"))
    assert forward_mode.main(["1,2,2,512,512,64,full"]) == wrong
    *_, line = capsys.readouterr().out.splitlines()
    assert (
        line.split() == ["1,2,2,512,512,64,64,full", "WRONG"]
        if wrong
        else line.startswith("1,2,2,512,512,64,64,full")
    )
    if not wrong:
        flops = 4 * 2 * 512 * 512 * 64 / 1e9
        assert [float(x) for x in line.split()[1:]] == [
            1,
            round(3 * flops),
            1,
            round(flops),
            1,
            round(3 * flops),
        ]
