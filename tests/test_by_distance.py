"""Tables by distance of captured tensors that functions of q_idx - kv_idx index: the same scores and gradients, places kept."""

from __future__ import annotations

import pytest
import torch

from tl_attention import flex_attention
from tl_attention.api import flex_calls
from tl_attention.reference.flex import flex_reference
from tl_attention.testing import functions
from tl_attention.testing.shapes import Shape
from tl_attention.tracing import by_distance
from tl_attention.tracing.trace import trace

SIZES = BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 50, 37


def bucket(distance: torch.Tensor) -> torch.Tensor:
    """Number of 32 for a distance: one of 16 per sign, wider and wider, as in T5."""
    size = distance.abs()
    far = 8 + (torch.log(size.float().clamp(min=1) / 8) * 2.9).to(torch.int32)
    return (distance < 0).to(torch.int32) * 16 + torch.where(size < 8, size, far.clamp(max=15))


def cases(device: str = "cpu") -> dict[str, tuple]:
    """Name -> score_mod, captured tensor with a gradient, sizes of its table but for distances; None: it gets no table."""
    on = {"device": device, "requires_grad": True}
    buckets, clipped, one = (torch.randn(*sizes, **on) for sizes in ((HEADS, 32), (BATCH, HEADS, 9), (9,)))
    numbers = torch.randint(0, 32, (200,), device=device)
    return {
        "buckets": (lambda s, b, h, q, k: s + buckets[h, bucket(k - q)], buckets, (1, HEADS)),
        "scaled": (lambda s, b, h, q, k: s * 0.5 + buckets[h, bucket(k - q)] * s, buckets, (1, HEADS)),
        "clipped": (
            lambda s, b, h, q, k: s + clipped[b, h, (q - k).clamp(-4, 4) + 4],
            clipped,
            (BATCH, HEADS),
        ),
        "without heads": (lambda s, b, h, q, k: s + one[(q - k).clamp(-4, 4) + 4], one, (1, 1)),
        "by a tensor": (lambda s, b, h, q, k: s + buckets[h, numbers[(q - k).abs()]], buckets, (1, HEADS)),
        "from the end": (lambda s, b, h, q, k: s + one[-(q - k).abs()], one, (1, 1)),
        "distance": (lambda s, b, h, q, k: s + buckets[h, q - k + 3], buckets, None),
        "query": (lambda s, b, h, q, k: s + buckets[h, q // 2], buckets, None),
    }


def test_buckets_of_the_benchmark_are_those_of_t5():
    shape = Shape.parse("1,2,2,300,300,64,64,full,function=buckets")
    function = functions.of_shape(shape, torch.device("cpu"))
    (bias,) = function.learned
    assert by_distance.by_distance(trace(function.score_mod, None, True).program) is not None
    first = {
        0: 0,
        7: 7,
        8: 8,
        11: 8,
        12: 9,
        16: 10,
        23: 11,
        32: 12,
        46: 13,
        64: 14,
        90: 14,
        91: 15,
        128: 15,
        299: 15,
    }
    for distance, number in first.items():
        for query, key in ((299, 299 - distance), (299 - distance, 299)):
            wanted = bias[1, number + 16 * (key > query)]
            found = function.score_mod(torch.zeros(()), 0, 1, torch.tensor(query), torch.tensor(key))
            assert torch.equal(found, wanted), (query, key)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", cases())
def test_tables_give_the_scores_and_gradients_of_the_function(name, deterministic):
    score_mod, learned, sizes = cases()[name]
    call = trace(score_mod, lambda b, h, q, k: q + 20 >= k, True)
    found = by_distance.by_distance(call.program)
    assert by_distance.by_distance(call.program.forward) is None  # forwards alone take no table
    if sizes is None:
        assert found is None
        return
    tabulated = found.call(call, SIZES, deterministic)
    assert tabulated.tensors[-1].shape == (*sizes, SEQLEN_Q + SEQLEN_K - 1)
    (gradient,) = (n for n, x in enumerate(tabulated.program.gradients) if x.tensor == len(call.tensors))
    assert gradient in tabulated.program.diagonal_gradients and not tabulated.program.shares_targets(gradient)
    q, k, v = (torch.randn(BATCH, HEADS, n, 16, requires_grad=True) for n in (SEQLEN_Q, SEQLEN_K, SEQLEN_K))
    dout = torch.randn(BATCH, HEADS, SEQLEN_Q, 16)
    results = []
    for one in (call, tabulated):
        out, _ = flex_reference(q, k, v, 0.25, one)
        results.append([out, *torch.autograd.grad(out, [q, k, v, learned], dout)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def test_tables_see_new_values_and_keep_places():
    """Captured values are read at each call; places that numbers alone determine are made once, also in inference mode."""
    by_distance._kept.clear()
    score_mod, learned, _ = cases()["buckets"]
    call = trace(score_mod, None, True)
    found = by_distance.by_distance(call.program)
    with torch.inference_mode():
        before = found.call(call, SIZES, False).tensors[-1]
    with torch.no_grad():
        learned += 1
    table = found.call(call, SIZES, False).tensors[-1]
    torch.testing.assert_close(table, before + 1)
    table.sum().backward()
    assert learned.grad.sum() == table.numel()
    assert len(by_distance._kept) == 1
    found.call(call, (*SIZES[:2], SEQLEN_Q + 1, SEQLEN_K), False)
    assert len(by_distance._kept) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["buckets", "clipped"])
def test_tables_match_kernels_without_them(name, monkeypatch):
    score_mod, learned, _ = cases("cuda")[name]
    q, k, v = (
        torch.randn(BATCH, HEADS, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (300, 217, 217)
    )
    dout, results = torch.randn_like(q), []
    for least in (2**60, 0):
        monkeypatch.setattr(flex_calls, "MIN_SCORES", least)
        out = flex_attention(q, k, v, score_mod)
        results.append([out, *torch.autograd.grad(out, [q, k, v, learned], dout)])
    for x, y in zip(*results, strict=True):
        difference, size = ((x - y).float().square().mean().sqrt(), y.float().square().mean().sqrt())
        assert difference <= 5e-3 * size
