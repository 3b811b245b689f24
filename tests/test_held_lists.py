"""Lists of a block mask for a held row max: first a block in which each query of a tile sees a key, full blocks, partial blocks."""

from __future__ import annotations

import pytest
import torch
from test_block_masks import HEADS, SHAPES, block_lists, causal, compare, inputs, masks_with_bits
from torch.nn.attention.flex_attention import create_block_mask

from tl_attention import flex_attention
from tl_attention.launch.mask_bits import packed
from tl_attention.problem.program import BLOCK_BITS, HOW_BITS
from tl_attention.tracing.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention. CPU tensors", "ignore:.*torch.compile")


def documents(length: int, ends: tuple[int, ...], device: str = "cpu"):
    """A mask_mod of causal documents that end at `ends`."""
    ids = torch.bucketize(torch.arange(length), torch.tensor(ends), right=True).to(device)
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


@pytest.mark.parametrize("columns", [128, 64, 32])
def test_bits_say_which_rows_they_cover(columns):
    shown = torch.rand(5, 128, 128) < 0.05
    shown[0], shown[1] = True, torch.eye(128, dtype=torch.bool)
    lists = block_lists(create_block_mask(causal, None, None, 300, 300, device="cpu"), 1, HEADS)
    bits = lists.with_bits(trace(None, causal, False)).bits
    object.__setattr__(bits, "blocks", packed(shown))
    wanted = shown.view(5, 2, 64, 128 // columns, columns).any(-1).all(2)
    assert torch.equal(bits.covers(columns), wanted)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("step", [128, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_lists_begin_where_all_queries_see_a_key(name, rows, step):
    for shown, lists in masks_with_bits(name):
        spans, entries, *_ = lists.by_queries(rows, step, held=True)
        for b, h, tile in torch.cartesian_prod(*map(torch.arange, spans.shape[:3])).tolist():
            first_steps, steps, first, _ = spans[b, h, tile].tolist()
            blocks = [
                entry >> HOW_BITS & (1 << BLOCK_BITS) - 1 for entry in entries[first : first + steps].tolist()
            ]
            of_tile = shown[b, h, tile * rows : (tile + 1) * rows]
            seen = [of_tile[:, n * step : (n + 1) * step].any(-1).all().item() for n in blocks]
            assert seen[0] if any(seen) else first_steps == steps
            assert not seen[0] or first_steps == 1


def test_lists_of_causal_documents_hold_the_row_max_after_the_diagonal():
    mask_mod = documents(1024, (300, 420))
    mask = create_block_mask(mask_mod, None, None, 1024, 1024, device="cpu")
    lists = block_lists(mask, 1, 1).with_bits(trace(None, mask_mod, False))
    spans, entries, *_ = lists.by_queries(128, 128, held=True)
    steps, diagonal = [], []
    for first_steps, all_steps, first, whole in spans[0, 0].tolist():
        steps.append((first_steps, whole, all_steps - first_steps - whole))
        diagonal.append(entries[first].item() >> HOW_BITS & (1 << BLOCK_BITS) - 1)
    assert diagonal == list(range(8))
    # (with an updated row max, full, partial)
    assert steps == [(1, 0, 0), (1, 1, 0), (1, 0, 2), (1, 0, 1), (1, 0, 1), (1, 1, 1), (1, 2, 1), (1, 3, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("factor", [1, 20], ids=["", "large scores"])
def test_causal_documents_match_the_formula(head_dim, factor):
    mask_mod = documents(1111, (100, 333, 334, 800), "cuda")
    mask = create_block_mask(mask_mod, None, None, 1111, 1111, device="cuda")
    q, k, v = inputs("cuda", (1111, 1111), head_dim, batch=24)
    compare((q.detach() * factor).requires_grad_(), k, v, mask)


@pytest.mark.gpu
def test_queries_that_new_values_hide_from_the_first_block():
    """Lists stay when captured values change: their first block may then hide all keys of a query."""
    length = 1000
    hidden = torch.zeros(length, dtype=torch.bool, device="cuda")
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & ~hidden[k], None, None, length, length, device="cuda"
    )
    q, k, v = inputs("cuda", (length, length), 64, batch=24)
    flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    hidden[384:400] = True  # the first queries of a tile then see keys of full blocks alone
    compare(q, k, v, mask)
