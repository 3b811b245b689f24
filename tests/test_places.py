"""Launches that write to rows of a longer tensor of the caller, merge into it, or compute a part of longer sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tl_attention import launch
from tl_attention.problem.options import Options

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
        dq, dk, dv = launch.backward(*inputs, *asked, deterministic=exact, options=options).values()
        whole, placed = place(dq, dim)
        found = tuple(
            launch.backward(*inputs, *asked, deterministic=exact, options=options, dq=placed).values()
        )
        assert found[0] is placed and torch.equal(dk, found[1]) and torch.equal(dv, found[2])
        check_placed(whole, placed, dq, dim, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_places_hold_results_that_launches_merge(packed):
    """Two halves of the keys, one after the other, into rows of longer tensors."""
    x, asked = tensors(1, packed), (128**-0.5, False)
    q, k, v = (x[name] if not packed else x[name][None] for name in "qkv")
    expected, lse_expected = launch.forward(q, k, v, *asked, True)
    dtype = {"dtype": torch.float32}
    whole_out = torch.full((1, ROWS + BEFORE, 8, 128), float("nan"), device="cuda", **dtype)
    whole_lse = torch.full((1, 8, ROWS + BEFORE), float("-inf"), device="cuda", **dtype)
    out, lse = whole_out[:, BEFORE:], whole_lse[:, :, BEFORE:]
    for keys in (slice(0, 100), slice(100, ROWS)):
        options, parts, results = None, (q, k[:, keys], v[:, keys]), (out, lse)
        if packed:  # the last row is a sequence of its own, which sees one key
            last = keys.stop - keys.start
            bounds = [0, ROWS - 1, ROWS], [0, last - 1, last]
            lengths = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in bounds]
            options = Options(
                cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1], max_seqlen_q=ROWS, max_seqlen_k=ROWS
            )
            parts, results = ([x[0] for x in tensors] for tensors in (parts, results))
        launch.forward(*parts, *asked, True, options=options, out=results[0], lse=results[1])
    if packed:
        seen = torch.tensor([99, ROWS - 1], device="cuda")
        others = [x for x in range(ROWS) if x not in (99, ROWS - 1)]
        first, _ = launch.forward(
            q[:, :-1], k[:, others].contiguous(), v[:, others].contiguous(), *asked, True
        )
        last, _ = launch.forward(q[:, -1:], k[:, seen].contiguous(), v[:, seen].contiguous(), *asked, True)
        expected = torch.cat((first, last), 1)
    else:
        torch.testing.assert_close(lse, lse_expected, atol=1e-5, rtol=1e-5)
    # A weight of `expected` is rounded to bf16 within its launch; the last row has two of them, and values up to 4
    torch.testing.assert_close(out[:, :-1], expected[:, :-1].float(), atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(out[:, -1:], expected[:, -1:].float(), atol=8e-3, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["alibi", "dropout"])
def test_places_are_positions_of_queries_and_keys(name):
    x, asked = tensors(2, False), (128**-0.5, False)
    q, k, v = (x[name] for name in "qkv")
    state, slopes = torch.tensor([3, 5], device="cuda"), torch.rand(2, 8, device="cuda") * 0.1
    facts = {"alibi_slopes": slopes} if name == "alibi" else {"dropout_p": 0.25, "rng_state": state}
    whole = Options(window=(200, 0), **facts)
    out, lse = launch.forward(q, k, v, *asked, False, options=whole)
    dq, *_ = launch.backward(x["dout"], q, k, v, out, lse, *asked, False, options=whole).values()
    # The queries from 160 on
    place = torch.tensor([[160, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.int32, device="cuda")
    rows, options = slice(160, ROWS), Options(window=(200, 0), place=place, **facts)
    some = q[:, rows].contiguous(), k, v
    found, lse_found = launch.forward(*some, *asked, False, options=options)
    torch.testing.assert_close(found, out[:, rows], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse_found, lse[:, :, rows], atol=1e-4, rtol=1e-4)
    dout = x["dout"][:, rows].contiguous()
    grads = tuple(launch.backward(dout, *some, found, lse_found, *asked, False, options=options).values())
    torch.testing.assert_close(grads[0], dq[:, rows], atol=2e-2, rtol=2e-2)
    # Without the first 16 keys, which a copy of the others stands for
    place = torch.tensor([[160, 16, 16, 0, 0, 0, 0, 0]], dtype=torch.int32, device="cuda")
    hidden = replace(options, place=place)
    keys = torch.cat((k[:, 32:48], k[:, 32:]), 1), torch.cat((v[:, 32:48], v[:, 32:]), 1)
    found, lse_found = launch.forward(some[0], *keys, *asked, False, options=hidden)
    first = torch.tensor([[160, 32, 0, 0, 0, 0, 0, 0]], dtype=torch.int32, device="cuda")
    others = k[:, 32:].contiguous(), v[:, 32:].contiguous()
    expected, lse = launch.forward(some[0], *others, *asked, False, options=replace(options, place=first))
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse_found, lse, atol=1e-4, rtol=1e-4)


PARTIAL = {  # (query heads, key heads, head_dim, options, deterministic): each kind of pass, and key heads shared by several CTAs
    "d64": (4, 4, 64, {}, False),
    "d64 deterministic": (4, 4, 64, {}, True),
    "d96 packed": (4, 4, 96, {"packed": True}, False),
    "d128 shared": (8, 1, 128, {}, False),
    "d128 shared deterministic": (8, 1, 128, {}, True),
    "d128 window": (8, 4, 128, {"window": (70, 0)}, False),
    "d128 softcap packed deterministic": (8, 2, 128, {"softcap": 20.0, "packed": True}, True),
    "d256": (4, 2, 256, {}, False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", PARTIAL)
def test_partial_gradients_are_those_of_a_launch_before_they_are_rounded(case):
    heads, heads_kv, head_dim, options, deterministic = PARTIAL[case]
    options, rows, keys = dict(options), 333, 450
    packed, generator = options.pop("packed", False), torch.Generator("cuda").manual_seed(0)
    if packed:
        rows = keys
        ends = torch.tensor([0, 100, 101, rows], dtype=torch.int32, device="cuda")
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": rows, "max_seqlen_k": rows}
    shapes = (heads, rows), (heads_kv, keys), (heads_kv, keys), (heads, rows)
    q, k, v, dout = (
        torch.randn(*(() if packed else (2,)), n, h, head_dim, device="cuda", generator=generator).bfloat16()
        for h, n in shapes
    )
    options = Options(**options) if options else None
    asked = head_dim**-0.5, "window" not in case, False
    out, lse = launch.forward(q, k, v, *asked, options=options)
    inputs = dout, q, k, v, out, lse
    for _ in range(2):  # the second time by the plan of the first
        rounded = tuple(
            launch.backward(*inputs, *asked, deterministic=deterministic, options=options).values()
        )
        exact = tuple(
            launch.backward(
                *inputs, *asked, deterministic=deterministic, options=options, partial=True
            ).values()
        )
        for name, x, whole in zip(("dq", "dk", "dv"), rounded, exact, strict=True):
            assert whole.dtype == torch.float32 and whole.shape == x.shape
            assert not torch.equal(whole, x.float()), name
            if deterministic or name != "dq":
                assert torch.equal(whole.bfloat16(), x), name
            else:
                torch.testing.assert_close(whole, x.float(), atol=1e-2, rtol=1e-2)
        placed, dq = place(exact[0], 0 if packed else 1)
        found = tuple(
            launch.backward(
                *inputs, *asked, deterministic=deterministic, options=options, dq=dq, partial=True
            ).values()
        )
        assert found[0] is dq
        check_placed(placed, dq, exact[0], 0 if packed else 1, deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "rows", "causal"), [(32, 4096, True), (34, 2049, False)])
def test_partial_gradients_of_shared_tiles(heads, rows, causal):
    """Sizes at which a stream-K pass has one CTA per tile, and at which CTAs share the last tiles."""
    q, k, v, dout = (torch.randn(1, rows, heads, 128, device="cuda").bfloat16() for _ in range(4))
    out, lse = launch.forward(q, k, v, 128**-0.5, causal, False)
    inputs = dout, q, k, v, out, lse, 128**-0.5, causal, False
    rounded, exact = (tuple(launch.backward(*inputs, partial=partial).values()) for partial in (False, True))
    for x, whole in zip(rounded, exact, strict=True):
        torch.testing.assert_close(whole.bfloat16(), x, rtol=2**-6, atol=2**-6)
