"""Calls of PyTorch that reach our kernels after torch_backend.register(): the table of docs/torch.md, and launches counted on a GPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, bias, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention", "ignore:.*Overriding a previously")
PAGE = Path(__file__).parents[1] / "docs" / "torch.md"
BF16, FP32 = torch.bfloat16, torch.float32
BATCH, HEADS, ROWS, KEYS, DIM = 2, 4, 200, 333, 64


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of call. `run` takes query, key and value, [batch, heads, seqlen, head_dim]."""

    run: Callable[..., torch.Tensor]
    ours: bool
    heads_kv: int = HEADS
    keys: int = ROWS
    dim: int = DIM
    dim_v: int | None = None
    dtype: torch.dtype = BF16
    trains: bool = (
        True  # False: a kind that PyTorch does not differentiate, or that the table has for the forward alone
    )


def sdpa(**options):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def masked(*shape, dtype=None, requires_grad=False, **options):
    """SDPA with a random mask, which shows key 0 to all: bool, or of a float dtype."""

    def run(q, k, v):
        mask = torch.randn(*shape, k.shape[2], device=q.device)
        mask[..., 0] = 1
        mask = mask > 0 if dtype is None else mask.to(dtype).requires_grad_(requires_grad)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)

    return run


def within(backend, run, **options):
    def chosen(q, k, v):
        with sdpa_kernel(backend, **options):
            return run(q, k, v)

    return chosen


def lower_right(q, k, v):
    mask = bias.causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def packed(q, k, v, **options):
    """varlen_attn on batch sequences of one length."""
    rows = q.shape[2]
    cu = torch.arange(0, q.shape[0] * rows + 1, rows, dtype=torch.int32, device=q.device)
    qkv = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return varlen_attn(*qkv, cu, cu, rows, rows, **options)


def jagged(x):
    """Nested tensor of the batch entries of x, each one row shorter than the one before."""
    rows = [entry[:, : x.shape[2] - i].transpose(0, 1) for i, entry in enumerate(x)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


def nested(causal):
    def run(q, k, v):
        out = F.scaled_dot_product_attention(*map(jagged, (q, k, v)), is_causal=causal)
        return out.transpose(1, 2).values()

    return run


CUDNN, EFFICIENT = SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
KINDS = {
    "no mask": Kind(sdpa(), True, keys=KEYS),
    "`is_causal`, equal lengths": Kind(sdpa(is_causal=True), True),
    "`is_causal`, unequal lengths: aligned top-left": Kind(sdpa(is_causal=True), True, keys=KEYS),
    "`causal_lower_right`": Kind(lower_right, True, keys=KEYS),
    "a head_dim of no multiple of 8": Kind(sdpa(is_causal=True), True, dim=100),
    "values of fewer columns": Kind(sdpa(is_causal=True), True, dim=192, dim_v=128),
    "`enable_gqa`": Kind(sdpa(is_causal=True, enable_gqa=True), True, heads_kv=2),
    "`dropout_p`": Kind(sdpa(dropout_p=0.25), True),
    "a bool mask of two dimensions": Kind(masked(ROWS), True, keys=KEYS),
    "a bool mask of four dimensions": Kind(masked(BATCH, 1, 1), True, keys=KEYS),
    "a float mask": Kind(masked(1, HEADS, ROWS, dtype=BF16), True, keys=KEYS),
    "a float mask with a gradient": Kind(masked(1, HEADS, ROWS, dtype=BF16, requires_grad=True), True, keys=KEYS),
    "a mask and `enable_gqa`": Kind(masked(ROWS, enable_gqa=True), True, heads_kv=2, keys=KEYS),
    "fp32": Kind(sdpa(), True, keys=KEYS, dtype=FP32),
    "fp32, `is_causal`, equal lengths": Kind(sdpa(is_causal=True), True, dtype=FP32),
    "fp32 and a mask": Kind(masked(ROWS, dtype=FP32), True, keys=KEYS, dtype=FP32),
    "nested tensors": Kind(nested(False), True),
    "nested tensors, `is_causal`": Kind(nested(True), True),
    "`varlen_attn`": Kind(packed, True),
    "`varlen_attn` with a window": Kind(lambda q, k, v: packed(q, k, v, window_size=(32, 0)), True),
    "`sdpa_kernel([CUDNN_ATTENTION, FLASH_ATTENTION])`": Kind(within([CUDNN, SDPBackend.FLASH_ATTENTION], masked(ROWS)), True),
    "a mask and `dropout_p`": Kind(masked(ROWS, dropout_p=0.25), False, keys=KEYS),
    "fp32 and `dropout_p`": Kind(sdpa(dropout_p=0.25), False, dtype=FP32),
    "a head_dim above 256": Kind(sdpa(), False, dim=264),
    "`sdpa_kernel(MATH)`": Kind(within(SDPBackend.MATH, sdpa()), False),
    "`sdpa_kernel(CUDNN_ATTENTION)`": Kind(within(CUDNN, masked(ROWS)), False),
    "`sdpa_kernel(EFFICIENT_ATTENTION)`": Kind(within(EFFICIENT, masked(ROWS)), False),
}  # fmt: skip


def rows_of_the_page():
    """Kind of call -> True if the page says that our kernels run it."""
    rows = re.findall(r"^\| (.+?) \| (ours|PyTorch's) \|", PAGE.read_text(), re.MULTILINE)
    return {name: answer == "ours" for name, answer in rows}


def test_torch_calls_are_those_of_the_page():
    assert rows_of_the_page() == {name: kind.ours for name, kind in KINDS.items()}


def launches(run):
    """(result, names of our kernels that the GPU ran during run())."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = run()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.name.startswith("flash_")]
    return result, names


@pytest.mark.gpu
@pytest.mark.usefixtures("highest_precision")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_torch_calls_launch_our_kernels(kind, handle):
    """The forward of a call that is ours is one launch, and its backward runs our kernels; others, and all without the handle, run none."""
    sizes = (
        (HEADS, ROWS, kind.dim),
        (kind.heads_kv, kind.keys, kind.dim),
        (kind.heads_kv, kind.keys, kind.dim_v or kind.dim),
    )
    inputs = [
        torch.randn(BATCH, *size, device="cuda", dtype=kind.dtype, requires_grad=True) for size in sizes
    ]
    kind.run(*inputs)  # builds the kernels
    out, forward = launches(lambda: kind.run(*inputs))
    assert sum(name.startswith("flash_fwd_kernel") for name in forward) == kind.ours, forward
    _, backward = launches(lambda: torch.autograd.grad(out, inputs, torch.ones_like(out)))
    assert any(re.match("flash_bwd_(dq_)?kernel", name) for name in backward) == kind.ours, backward
    handle.remove()
    assert not launches(lambda: kind.run(*inputs))[1]
