"""Lists of a block mask for tiles of 192 queries, which lie in two of its blocks."""

from __future__ import annotations

import pytest
import torch
from test_block_masks import (
    HEADS,
    SHAPES,
    block_lists,
    causal,
    compare,
    inputs,
    masks_with_bits,
    noop,
    random_lists,
)
from torch.nn.attention.flex_attention import create_block_mask

from tl_attention import configs, flex_attention, legality
from tl_attention.flex_lists import kept_mask, listed
from tl_attention.kernel_configs import FwdConfig
from tl_attention.launch import block_lists as lists_of_masks
from tl_attention.launch import fwd
from tl_attention.launch.mask_bits import unpacked
from tl_attention.problem import JOINED_BUCKET, SHORT_BUCKET, SPLIT_BUCKET, TILE_WIDTHS, AttnProblem
from tl_attention.program import BLOCK_BITS, GROUP_ROWS, HOW_BITS, JOINED_ROWS, Program
from tl_attention.tracing.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention. CPU tensors", "ignore:.*torch.compile")


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("step", [128, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_lists_of_joined_tiles_show_the_mask(name, step, held):
    """A walk over the lists, as that of the kernels: each 64 queries of a tile have bits of their own block."""
    _, lengths, _ = SHAPES[name]
    for wanted, lists in masks_with_bits(name):
        spans, entries, places, bits = lists.by_queries(JOINED_ROWS, step, held)
        assert spans.shape == (2, HEADS, -(-lengths[0] // JOINED_ROWS), 4 if held else 3)
        assert places.shape == (len(entries), JOINED_ROWS // GROUP_ROWS)
        tiles = unpacked(bits.view(-1, 2, 128, 2))
        shown = torch.zeros_like(wanted)
        for b, h, tile in torch.cartesian_prod(*map(torch.arange, spans.shape[:3])).tolist():
            masked, steps, first, *unmasked = spans[b, h, tile].tolist()
            (unmasked,) = unmasked or [steps - masked]
            whole = (places[first : first + steps] < 0).all(-1)
            assert whole[masked : masked + unmasked].all() and not whole[masked + unmasked :].any()
            for i in range(first, first + steps):
                column = (entries[i].item() >> HOW_BITS & (1 << BLOCK_BITS) - 1) * step
                for group in range(JOINED_ROWS // GROUP_ROWS):
                    row, place = tile * JOINED_ROWS + group * GROUP_ROWS, places[i, group].item()
                    part = torch.ones(GROUP_ROWS, step, dtype=torch.bool)
                    if place >= 0:
                        part = tiles[place, row % 128 :, column % 128 :][:GROUP_ROWS, :step]
                    target = shown[b, h, row : row + GROUP_ROWS, column : column + step]
                    target |= part[: target.shape[0], : target.shape[1]]
        assert torch.equal(shown, wanted)


@pytest.mark.parametrize(
    ("mask_mod", "length", "joined"), [(causal, 8192, True), (causal, 1000, False), (noop, 3000, True)]
)
def test_masks_whose_blocks_have_long_runs_are_joined(mask_mod, length, joined):
    mask = create_block_mask(mask_mod, None, None, length, length, device="cpu")
    assert block_lists(mask, 2, HEADS).with_bits(trace(None, mask.mask_mod, False)).joined == joined


def test_random_blocks_are_not_joined():
    mask = random_lists(1, HEADS, (4096, 4096), (128, 128), "cpu")
    assert not block_lists(mask, 1, HEADS).with_bits(trace(None, mask.mask_mod, False)).joined


def test_bits_of_other_values_keep_the_tiles(monkeypatch):
    """The lists, which decide, stay."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(lists_of_masks, "MAX_JOINED", 2)
    ids, query = torch.zeros(300, dtype=torch.int32), torch.empty(2, HEADS, 300, 8)
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 300, 300, device="cpu")
    monkeypatch.setattr("tl_attention.flex_lists.stream_of", lambda device: 0)
    first = listed(trace(None, mask.mask_mod, False), kept_mask(mask), query, HEADS).blocks
    assert first.joined
    ids[100:] = 1
    monkeypatch.setattr(lists_of_masks, "MAX_JOINED", 0)
    second = listed(trace(None, mask.mask_mod, False), kept_mask(mask), query, HEADS).blocks
    assert second is not first and second.joined
    found = [x.by_queries(JOINED_ROWS, 128) for x in (first, second)]
    assert [x is y for x, y in zip(*found, strict=True)] == [True, True, True, False]


@pytest.mark.parametrize("width", TILE_WIDTHS, ids=str)
def test_configs_of_joined_tiles(width):
    problem = AttnProblem("bfloat16", *width, False, program=Program((), listed=True, bits=True))
    config, usual = (configs.pick_config(problem, x, "NVIDIA H200")[0] for x in (JOINED_BUCKET, "long"))
    assert legality.fault(problem, config) is None
    assert config == usual or config.block_M == JOINED_ROWS
    if width == (64, 64):
        assert config.block_M == JOINED_ROWS


def test_joined_tiles_need_bits():
    config = FwdConfig(192, 128, ping_pong=True, schedule="dynamic")
    for program, is_fault in ((Program((), listed=True, bits=True), False), (Program((), listed=True), True)):
        problem = AttnProblem("bfloat16", 64, 64, False, program=program)
        assert bool(legality.fault(problem, config)) == is_fault


@pytest.mark.parametrize(
    ("batch", "length", "bucket"), [(8, 4096, JOINED_BUCKET), (1, 4096, SPLIT_BUCKET), (64, 60, SHORT_BUCKET)]
)
def test_few_tiles_are_not_joined(batch, length, bucket):
    sizes = fwd.FwdSizes(batch, 1 if bucket == SPLIT_BUCKET else 16, 1, length, length, 64, 64)
    assert fwd._splits_and_bucket(sizes, None, 132, False, True)[1] == bucket


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_joined_tiles_match_the_formula(name, monkeypatch):
    monkeypatch.setattr(lists_of_masks, "MAX_JOINED", float("inf"))
    shape, lengths, size = SHAPES[name]
    batch = 32
    mask = random_lists(batch if shape[0] > 1 else 1, shape[1], lengths, size, "cuda")
    compare(*inputs("cuda", lengths, 64, batch=batch), mask)


@pytest.mark.gpu
def test_joined_tiles_hide_all_keys_of_the_first_blocks(monkeypatch):
    """A held row max: some queries see no key in the partial blocks, and many in the full ones."""
    monkeypatch.setattr(lists_of_masks, "MAX_JOINED", float("inf"))
    mask = create_block_mask(lambda b, h, q, k: q > k, None, None, 1000, 1300, device="cuda")
    compare(*inputs("cuda", (1000, 1300), 64, batch=16), mask)


@pytest.mark.gpu
def test_joined_tiles_in_a_cuda_graph():
    ids = (torch.arange(4096, device="cuda") // 1500).int()
    q, k, v = (torch.randn(4, 16, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 4096, 4096, device="cuda")
    expected = flex_attention(q, k, v, block_mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(q, k, v, block_mask=mask)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
