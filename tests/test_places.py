"""Results of launches in memory of the caller: rows of a longer tensor."""

from __future__ import annotations

import pytest
import torch

from tl_attention import launch
from tl_attention.options import Options

ROWS, BEFORE, AFTER = 300, 64, 100


def tensors(batch, packed):
    generator = torch.Generator("cuda").manual_seed(3)
    sizes = {"q": 8, "k": 2, "v": 2, "dout": 8}
    found = {
        name: torch.randn(batch, ROWS, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
        for name, heads in sizes.items()
    }
    return {name: x[0] if packed else x for name, x in found.items()}


def place(like, dim):
    """NaNs of more rows, and the place of the result in them."""
    shape = list(like.shape)
    shape[dim] += BEFORE + AFTER
    whole = like.new_full(shape, float("nan"))
    return whole, whole.narrow(dim, BEFORE, like.shape[dim])


def check_placed(whole, placed, expected, dim, exact=True):
    assert torch.equal(placed, expected) or (not exact and torch.allclose(placed, expected, 2e-2, 2e-2))
    for start, rows in ((0, BEFORE), (BEFORE + expected.shape[dim], AFTER)):
        assert whole.narrow(dim, start, rows).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("batch, packed", [(1, False), (3, False), (1, True)], ids=["one", "batch", "packed"])
def test_places_hold_the_results_of_launches(batch, packed):
    x, dim = tensors(batch, packed), 0 if packed else 1
    options = None
    if packed:
        cu_seqlens = torch.tensor([0, 1, 130, ROWS], dtype=torch.int32, device="cuda")
        options = Options(
            cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=ROWS, max_seqlen_k=ROWS
        )
    qkv, asked = (x["q"], x["k"], x["v"]), (128**-0.5, True, False)
    for _ in range(2):  # the second time by the plan of the first
        out, lse = launch.forward(*qkv, *asked, options=options)
        whole, placed = place(out, dim)
        found, lse_of_found = launch.forward(*qkv, *asked, options=options, out=placed)
        assert found is placed and torch.equal(lse, lse_of_found)
        check_placed(whole, placed, out, dim)

        # Sums of dq are exact with deterministic, whose kernels for packed sequences no other test needs
        inputs, exact = (x["dout"], *qkv, out, lse), not packed
        dq, dk, dv = launch.backward(*inputs, *asked, deterministic=exact, options=options)
        whole, placed = place(dq, dim)
        found = launch.backward(*inputs, *asked, deterministic=exact, options=options, dq=placed)
        assert found[0] is placed and torch.equal(dk, found[1]) and torch.equal(dv, found[2])
        check_placed(whole, placed, dq, dim, exact)
