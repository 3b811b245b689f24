"""bwd_workspace_bytes equals what a launch allocates: plans of backwards with kernels that do nothing, on tensors without memory."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tl_attention import launch
from tl_attention.config import configs
from tl_attention.config.buckets import bwd_bucket
from tl_attention.config.costs import costs_of
from tl_attention.launch import bwd, bwd_kernels, bwd_passes, common, terms
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.options import MAX_WINDOW, Options, canonical_window
from tl_attention.problem.target import DEFAULT_GPU

COSTS, HALF, FULL = costs_of(), torch.bfloat16, (-1, -1)


@pytest.fixture
def allocated(monkeypatch):
    """Bytes of each allocation of a launch, without those of the terms of fp32 tensors."""
    found = []

    def empty_part(shape, strides, dtype):
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    def empty(shape, strides, dtype):
        found.append(math.prod(shape) * dtype.itemsize)
        return empty_part(shape, strides, dtype)

    def compiled(problem, config):
        return dict.fromkeys(config.kernels(problem), lambda *_: None)

    for module in (bwd, bwd_passes, common):
        monkeypatch.setattr(module, "empty", empty)
    monkeypatch.setattr(terms, "empty", empty_part)
    monkeypatch.setattr(bwd_kernels, "compile_config", compiled)
    monkeypatch.setattr(bwd, "device_costs", lambda device: COSTS)
    monkeypatch.setattr(bwd_kernels, "_kernels", {})
    monkeypatch.setattr(bwd_passes, "stream_tickets", lambda *_: None)
    monkeypatch.setattr(common, "unused_tensor", lambda device, dtype, *shape: torch.zeros(shape))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: DEFAULT_GPU)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return found


def tensors(sizes, head_dim, head_dim_v, dtype, packed):
    """q, k, v, out, lse of [batch, rows, heads, columns], or packed ones."""
    batch, heads, heads_kv, seqlen_q, seqlen_k = sizes
    on = {"device": "meta", "dtype": dtype}
    outer = () if packed else (batch,)
    q, out = (torch.empty(*outer, seqlen_q, heads, n, **on) for n in (head_dim, head_dim_v))
    k, v = (torch.empty(*outer, seqlen_k, heads_kv, n, **on) for n in (head_dim, head_dim_v))
    return q, k, v, out, torch.empty(*outer, heads, seqlen_q, device="meta")


SIZES = [
    (2, 4, 4, 300, 500),
    (1, 16, 2, 1000, 129),
    (3, 28, 4, 4096, 4096),
    (1, 64, 8, 8192, 64),
    (7, 8, 1, 1, 2000),
]
WINDOWS = {
    "full": (False, FULL),
    "causal": (True, FULL),
    "short": (False, (127, 0)),
    "both": (False, (1000, 20)),
    "left": (False, (3, -1)),
}


@pytest.mark.parametrize("direction", ["bwd", "bwd_det"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("mask", WINDOWS)
def test_bwd_workspace_is_what_a_launch_allocates(allocated, direction, packed, mask):
    causal, window = canonical_window(*WINDOWS[mask])
    widths = [(64, 64), (128, 128), (192, 128), (256, 256)]
    cases = [("bfloat16", HALF, 0, width) for width in widths] + [
        ("float32-high", torch.float32, 2, widths[1])
    ]
    for sizes, (name, dtype, terms_of, width) in itertools.product(SIZES, cases):
        q, k, v, out, lse = tensors(sizes, *width, dtype, packed)
        ends = torch.empty(sizes[0] + 1, dtype=torch.int32, device="meta") if packed else None
        options = Options(
            window=window, parts=terms_of, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_k=sizes[4]
        )
        options = options if options.names or terms_of else None
        names = () if options is None else options.names
        deterministic = direction == "bwd_det"
        plan = bwd.BwdPlan(out, q, k, v, out, q, k, v, causal, False, deterministic, options=options)
        allocated.clear()
        plan(out, q, k, v, out, lse, 0.1, False, None, options, None, q, k, v)
        problem = AttnProblem.of(name, *width, causal, direction, names)
        config, _ = configs.pick_config(
            problem.served_as, bwd_bucket(deterministic, *sizes[1:3], sizes[4]), DEFAULT_GPU, direction
        )
        assert launch.bwd_workspace_bytes(*sizes, problem, config, COSTS, window) == sum(allocated)


def test_bwd_workspace_asks_for_the_window():
    plain, windowed = (AttnProblem("bfloat16", 64, 64, False, names) for names in ((), ("window",)))
    config, _ = configs.pick_config(plain, "1k", DEFAULT_GPU, "bwd")
    sizes = 2, 4, 4, 300, 500
    assert launch.bwd_workspace_bytes(2, 4, 4, 0, 500, plain, config, COSTS) == 0
    with pytest.raises(
        ValueError,
        match=r"window_size: expected that of the call, as the problem has a window, got \(-1, -1\)",
    ):
        launch.bwd_workspace_bytes(*sizes, windowed, config, COSTS)
    with pytest.raises(
        ValueError, match=r"window_size: expected \(-1, -1\), as the problem has no window, got \(3, 0\)"
    ):
        launch.bwd_workspace_bytes(*sizes, plain, config, COSTS, (3, 0))
    assert launch.bwd_workspace_bytes(*sizes, windowed, config, COSTS, (MAX_WINDOW, 0))
