"""Functions that read only some of (score, b, h, q_idx, kv_idx): block masks, lists, bits, tables, gradients, and whole calls."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

from tl_attention import create_block_mask, flex_attention
from tl_attention.api.flex_lists import kept_mask, listed
from tl_attention.launch.mask_bits import unpacked
from tl_attention.problem.program import LISTED_ROWS
from tl_attention.reference.flex import flex_backward_reference, flex_reference
from tl_attention.tracing import by_distance as tables
from tl_attention.tracing.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention. CPU tensors", "ignore:.*torch.compile")
BATCH, HEADS, LENGTHS = 2, 4, (300, 400)
READS = [names for n in range(5) for names in itertools.combinations("bhqk", n)]
SIZES = {"b": BATCH, "h": HEADS, "q": LENGTHS[0], "k": LENGTHS[1]}
ids = pytest.mark.parametrize("reads", READS, ids=lambda names: "".join(names) or "nothing")


def drawn(reads, device: str) -> torch.Tensor:
    """A bool tensor with one dimension per argument that is read, True in some whole blocks and in parts of others."""
    generator = torch.Generator().manual_seed(len(reads))
    shape = [SIZES[name] for name in reads]
    found = torch.rand(shape, generator=generator) < 0.6
    for dim, name in enumerate(reads):
        if name in "qk":
            found.narrow(dim, 0, LISTED_ROWS).fill_(True)
            found.narrow(dim, 2 * LISTED_ROWS, 30).fill_(False)
    return found.to(device)


def mask_that(reads, device: str = "cpu"):
    """A mask_mod that reads these arguments, by one table; and its table."""
    table = drawn(reads, device)

    def mask_mod(b, h, q_idx, kv_idx):
        found = {"b": b, "h": h, "q": q_idx, "k": kv_idx}
        return table[tuple(found[name] for name in reads)] if reads else table > 0

    return mask_mod, table


def whole(reads, table: torch.Tensor) -> torch.Tensor:
    """The table as [batch, heads, seqlen_q, seqlen_k]."""
    shape = [SIZES[name] if name in reads else 1 for name in "bhqk"]
    return table.view(shape).expand(*SIZES.values())


@ids
def test_block_mask_of_fewer_arguments_is_that_of_torch(reads):
    mask_mod, table = mask_that(reads)
    batch, heads = (SIZES[name] if name in reads else None for name in "bh")
    found = create_block_mask(mask_mod, batch, heads, *LENGTHS, device="cpu")
    if not reads:  # vmap of torch takes no mask without an index
        expected = torch_block_mask(lambda b, h, q, k: (q >= 0) & table, batch, heads, *LENGTHS, device="cpu")
    else:
        expected = torch_block_mask(mask_mod, batch, heads, *LENGTHS, device="cpu")
    assert torch.equal(found.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@ids
@pytest.mark.parametrize("lengths", [(256, 384), LENGTHS], ids=["whole blocks", "cut blocks"])
def test_bits_of_fewer_arguments_show_the_mask(reads, lengths, monkeypatch):
    """Bits as a GPU's call makes them: one word set per element of a block, whatever the mask_mod reads."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("tl_attention.api.flex_lists.stream_of", lambda device: 0)
    mask_mod, table = mask_that(reads)
    batch, heads = (SIZES[name] if name in reads else None for name in "bh")
    # All blocks as partial: each has bits
    mask = create_block_mask(mask_mod, batch, heads, *lengths, device="cpu", separate_full_blocks=False)
    query = torch.empty(BATCH, HEADS, lengths[0], 8)
    for change in (False, True):
        if change:  # bits of the same blocks are made again
            table.logical_not_()
        blocks = listed(trace(None, mask_mod, False), kept_mask(mask), query, HEADS).blocks
        bits = blocks.bits
        assert bits.blocks.shape[0] == len(bits.found) + 1 and int(bits.places.max()) < len(bits.blocks)
        shown = whole(reads, table)[:, :, : lengths[0], : lengths[1]]
        elements = unpacked(bits.blocks)
        for (b, h, row, column), block in zip(bits.found.tolist(), elements, strict=False):
            rows, columns = (slice(n * LISTED_ROWS, (n + 1) * LISTED_ROWS) for n in (row, column))
            expected = shown[b, h, rows, columns]
            assert torch.equal(block[: expected.shape[0], : expected.shape[1]], expected)
            assert not block[:, expected.shape[1] :].any()
        lists = blocks.by_queries(128, 128), blocks.by_keys(128, 64, 2)
        assert all(int(places.max()) < len(bits.blocks) for _, _, places, _ in lists)


def formula(q, k, v, scores, shown):
    scores = scores.masked_fill(~shown, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0) @ v, scores


@ids
def test_flex_masks_of_fewer_arguments_on_cpu(reads):
    mask_mod, table = mask_that(reads)
    q, k, v = (torch.randn(BATCH, HEADS, n, 16) for n in (LENGTHS[0], LENGTHS[1], LENGTHS[1]))
    expected, _ = formula(q, k, v, q @ k.mT / 4, whole(reads, table))
    batch, heads = (SIZES[name] if name in reads else None for name in "bh")
    mask = create_block_mask(mask_mod, batch, heads, *LENGTHS, device="cpu")
    for given in ({"mask_mod": mask_mod}, {"block_mask": mask}):
        torch.testing.assert_close(flex_attention(q, k, v, **given), expected, rtol=1e-4, atol=1e-5)


@ids
@pytest.mark.parametrize("with_score", [True, False], ids=["score", "no score"])
def test_flex_scores_of_fewer_arguments_on_cpu(reads, with_score):
    """The score and a learned table of what is read. A score_mod that ignores the score has gradient 0 for query and key."""
    table = torch.randn([SIZES[name] for name in reads], requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        found = {"b": b, "h": h, "q": q_idx, "k": kv_idx}
        added = table[tuple(found[name] for name in reads)] if reads else table * 1
        return score * 0.5 + added if with_score else added

    q, k, v = (torch.randn(BATCH, HEADS, n, 16) for n in (LENGTHS[0], LENGTHS[1], LENGTHS[1]))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    added = whole(reads, table)
    scores = (q @ k.mT / 8 if with_score else 0 * (q @ k.mT)) + added
    expected, _ = formula(q, k, v, scores, torch.ones((), dtype=torch.bool))
    out, lse = flex_attention(q, k, v, score_mod, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-4, atol=1e-5)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, (q, k, v, table), dout, retain_graph=True)
    for x, y in zip(torch.autograd.grad(out, (q, k, v, table), dout), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=2e-4)
    # The formula that stands in for gradient kernels on a GPU
    call = trace(score_mod, None, True)
    found = flex_backward_reference(dout, None, q, k, v, 0.25, call)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("of", ["", "b", "h", "bh"])
def test_tables_of_fewer_arguments_read_the_same(of):
    """A launch of many scores reads a table by distance in the place of a bias by bucket."""
    bias = torch.randn([SIZES[name] for name in of] + [8], requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        found = {"b": b, "h": h}
        return score + bias[(*(found[name] for name in of), (q_idx - kv_idx).abs() // 64)]

    call = trace(score_mod, None, True)
    sizes = BATCH, HEADS, *LENGTHS
    by_table = tables.by_distance(call.program).call(call, sizes, False)
    q, k, v = (torch.randn(BATCH, HEADS, n, 16) for n in (LENGTHS[0], LENGTHS[1], LENGTHS[1]))
    for x, y in zip(
        flex_reference(q, k, v, 0.25, by_table), flex_reference(q, k, v, 0.25, call), strict=True
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.gpu
@ids
def test_flex_functions_of_fewer_arguments(reads):
    mask_mod, table = mask_that(reads, "cuda")
    bias = torch.randn([SIZES[name] for name in reads], device="cuda", requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        found = {"b": b, "h": h, "q": q_idx, "k": kv_idx}
        return score + (bias[tuple(found[name] for name in reads)] if reads else bias * 1)

    q, k, v = (
        torch.randn(BATCH, HEADS, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (LENGTHS[0], LENGTHS[1], LENGTHS[1])
    )
    batch, heads = (SIZES[name] if name in reads else None for name in "bh")
    mask = create_block_mask(mask_mod, batch, heads, *LENGTHS)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    scores = exact[0] @ exact[1].mT / 8 + whole(reads, exact[3])
    expected, _ = formula(*exact[:3], scores, whole(reads, table))
    dout = torch.randn_like(q)
    wanted = [expected, *torch.autograd.grad(expected, exact, dout.double())]
    for given in ({"mask_mod": mask_mod}, {"block_mask": mask}):
        out = flex_attention(q, k, v, score_mod, **given)
        for x, y in zip([out, *torch.autograd.grad(out, (q, k, v, bias), dout)], wanted, strict=True):
            error = (x.double() - y).norm() / y.norm().clamp_min(1e-3)
            # A bias that all keys of a query share has gradient 0 but for rounding
            assert error < 2e-2 or (x is not out and y.norm() < 1e-3 * dout.numel() ** 0.5), error
        alone, _ = formula(*exact[:3], exact[0] @ exact[1].mT / 8, whole(reads, table))
        assert (flex_attention(q, k, v, **given).double() - alone).norm() < 1e-2 * alone.norm().clamp_min(1)
