"""flex_attention with a BlockMask: the lists of blocks that kernels visit, the CPU route and the kernels against dense masks, errors."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import weakref
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tl_attention import flex_attention
from tl_attention.api import flex_lists
from tl_attention.api.flex_lists import MaskState, kept_mask, listed, lists_with_bits
from tl_attention.compilation import building
from tl_attention.config import configs, legality
from tl_attention.config.kernel_configs import BwdConfig
from tl_attention.launch import mask_bits
from tl_attention.launch.block_lists import FULL, HIDDEN, PARTIAL, BlockLists, block_states
from tl_attention.launch.mask_bits import packed, unpacked
from tl_attention.problem.attn_problem import TILE_WIDTHS, AttnProblem
from tl_attention.problem.program import BLOCK_BITS, HIDE_ALL, HOW_BITS, MASK, SHOW_ALL, SHOW_TO_LAST
from tl_attention.tracing.builtin_options import program_with_bits
from tl_attention.tracing.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention. CPU tensors", "ignore:.*torch.compile")
HEADS, HEADS_KV = 4, 2


def block_lists(mask: BlockMask, batch: int, heads: int) -> BlockLists:
    return kept_mask(mask).lists(batch, heads)


def causal(b, h, q, k):
    return q >= k


def noop(b, h, q, k):
    return q >= 0


def third(b, h, q, k):
    return (q + k + h) % 3 != 0


def random_lists(
    batch: int, heads: int, lengths: tuple[int, int], size: tuple[int, int], device: str, share: float = 0.5
) -> BlockMask:
    """A BlockMask of random partial and full blocks, some queries and keys without any."""
    rows, columns = (-(-n // rows) for n, rows in zip(lengths, size, strict=True))
    draw = torch.rand(batch, heads, rows, columns, device=device)
    state = torch.where(draw < share, torch.where(draw < share / 2, PARTIAL, FULL), HIDDEN)
    state[:, -1, 0] = HIDDEN
    state[0, :, :, min(1, columns - 1)] = HIDDEN
    lists = []
    for wanted in (PARTIAL, FULL):
        found = state == wanted
        lists += [found.sum(-1).int(), (~found).int().argsort(dim=-1, stable=True).int()]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=third, seq_lengths=lengths)


def dense(mask: BlockMask, batch: int, heads: int) -> torch.Tensor:
    """Mask of a BlockMask: bool [batch, heads, seqlen_q, seqlen_k]."""
    lengths, device = mask.seq_lengths, mask.kv_num_blocks.device
    at = [
        torch.arange(n, device=device).view([-1 if i == dim else 1 for i in range(4)])
        for dim, n in enumerate((batch, heads, *lengths))
    ]
    listed = []
    for numbers, indices in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):  # fmt: skip
        if numbers is None:  # a mask without whole blocks
            listed.append(torch.zeros((), dtype=torch.bool, device=device))
            continue
        blocks = torch.zeros(*numbers.shape, -(-lengths[1] // mask.BLOCK_SIZE[1]), dtype=torch.bool)
        for b, h, row in torch.cartesian_prod(*map(torch.arange, numbers.shape)).tolist():
            blocks[b, h, row, indices[b, h, row, : int(numbers[b, h, row])].cpu().long()] = True
        for dim, (size, length) in enumerate(zip(mask.BLOCK_SIZE, lengths, strict=True), -2):
            blocks = blocks.repeat_interleave(size, dim).narrow(dim, 0, length)
        listed.append(blocks.to(device))
    partial, full = listed
    return (full | partial & mask.mask_mod(*at)).expand(batch, heads, -1, -1)


def formula(q, k, v, shown: torch.Tensor, dtype: torch.dtype, scale: float, factor=None):
    """(out, lse) of attention over the keys that `shown` says."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), *(x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    scores = ((q @ k.mT) * scale).to(torch.promote_types(dtype, torch.float32))
    if factor is not None:
        scores = scores * factor[:, None, None]
    scores = scores.masked_fill(~shown, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0).to(dtype) @ v, scores.logsumexp(-1)


def compare(q, k, v, mask: BlockMask, factor=None) -> None:
    """Compare with fp64: at most twice the error of the formula in the dtype of q. factor: learned, one per head."""
    shown = dense(mask, *q.shape[:2])
    wanted = [q, k, v] if factor is None else [q, k, v, factor]
    dout, scale = torch.randn_like(q), q.shape[-1] ** -0.5
    dlse = torch.randn(q.shape[:3], device=q.device).masked_fill(~shown.any(-1), 0)

    def results(function) -> list[torch.Tensor]:
        out, lse = function()
        hidden = lse == -math.inf
        assert torch.equal(hidden, ~shown.any(-1))
        lse = lse.masked_fill(hidden, 0)
        return [
            out,
            lse,
            *torch.autograd.grad([out, lse], wanted, [dout.to(out.dtype), dlse.to(lse.dtype)]),
        ]

    score_mod = None if factor is None else (lambda s, b, h, q, k: s * factor[h])
    found = results(lambda: flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True))
    exact, same = (
        results(lambda dtype=dtype: formula(q, k, v, shown, dtype, scale, factor))
        for dtype in (torch.float64, q.dtype)
    )
    for name, x, reference, other in zip(
        ("out", "lse", "dq", "dk", "dv", "factor"), found, exact, same, strict=False
    ):
        reference = reference.double()
        error, allowed = ((y.double() - reference).abs().max().item() for y in (x, other))
        bound = 2 * allowed + (2e-2 if name == "factor" else 1e-4) * reference.abs().max().item() + 1e-5
        assert error <= bound, f"{name}: expected an error of at most {bound}, got {error}"


def inputs(device: str, lengths: tuple[int, int], head_dim: int, dtype=torch.bfloat16, batch: int = 2):
    shapes = (HEADS, lengths[0]), (HEADS_KV, lengths[1]), (HEADS_KV, lengths[1])
    return tuple(
        torch.randn(batch, heads, n, head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads, n in shapes
    )


SHAPES = {
    "broadcast": ((1, 1), (300, 520), (128, 128)),
    "of heads": ((2, HEADS), (257, 384), (128, 128)),
    "large blocks": ((1, HEADS), (600, 500), (256, 384)),
    "one block": ((2, 1), (7, 100), (128, 256)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_block_mask_on_cpu(name):
    shape, lengths, size = SHAPES[name]
    compare(*inputs("cpu", lengths, 16), random_lists(*shape, lengths, size, "cpu"))


@pytest.mark.parametrize("of_keys", [False, True], ids=["by queries", "by keys"])
@pytest.mark.parametrize(("rows", "step"), [(128, 128), (128, 64), (64, 32)])
@pytest.mark.parametrize("name", SHAPES)
def test_lists_hold_the_blocks(name, rows, step, of_keys):
    shape, lengths, size = SHAPES[name]
    batch = 2
    mask = random_lists(*shape, lengths, size, "cpu")
    lists = block_lists(mask, batch, HEADS)
    heads, group = (HEADS_KV, HEADS // HEADS_KV) if of_keys else (HEADS, 1)
    spans, entries = lists.by_keys(rows, step, group) if of_keys else lists.by_queries(rows, step)
    assert spans.shape == (batch, heads, -(-lengths[of_keys] // rows), 3) and entries.dtype == torch.int32
    cut = (step, rows) if of_keys else (rows, step)
    states = lists.states
    for dim, (whole, wanted, length) in enumerate(zip(size, cut, lengths, strict=True), -2):
        states = states.repeat_interleave(whole // wanted, dim).narrow(dim, 0, -(-length // wanted))
    states = states.expand(batch, HEADS, -1, -1)
    ends_early = bool(lengths[1] % (rows if of_keys else step))
    blocks_k = -(-lengths[1] // cut[1])
    for b, h, tile in torch.cartesian_prod(*map(torch.arange, spans.shape[:3])).tolist():
        masked, steps, first = spans[b, h, tile].tolist()
        listed = entries[first : first + steps].tolist()
        found = {}
        for entry in listed:
            head, block, how = (
                entry >> HOW_BITS + BLOCK_BITS,
                entry >> HOW_BITS & (1 << BLOCK_BITS) - 1,
                entry & 3,
            )
            found[head, block] = how
        assert len(found) == steps >= 1
        expected = {}
        for head in range(group):
            line = states[b, h * group + head]
            line = line[:, tile] if of_keys else line[tile]
            for block, state in enumerate(line.tolist()):
                last = (tile if of_keys else block) == blocks_k - 1
                if state == FULL:
                    expected[head, block] = SHOW_TO_LAST if last and ends_early else SHOW_ALL
                elif state == PARTIAL:
                    expected[head, block] = MASK
        if not expected:  # one step that hides all
            expected = {(0, 0 if of_keys else blocks_k): HIDE_ALL}
        assert found == expected
        if not of_keys:
            assert all((entry & 3 != SHOW_ALL) == (i < masked) for i, entry in enumerate(listed))


@functools.cache
def masks_with_bits(name):
    """(shown elements, lists with bits) of random lists with several mask_mods."""
    (shape, lengths, size), found = SHAPES[name], []
    for mask_mod in (None, noop, lambda b, h, q, k: (q + b * 5) % 4 != k % 4):
        mask = random_lists(*shape, lengths, size, "cpu")
        mask.mask_mod = mask_mod or mask.mask_mod
        wanted, call = dense(mask, 2, HEADS), trace(None, mask.mask_mod, False)
        lists = block_lists(mask, 2, HEADS).with_bits(call)
        found += [(wanted, lists), (wanted, lists.with_bits_again(call))]
    return found


@pytest.mark.parametrize(
    ("of_keys", "held"),
    [(False, False), (False, True), (True, False)],
    ids=["by queries", "held", "by keys"],
)
@pytest.mark.parametrize(("rows", "step"), [(128, 128), (128, 64), (64, 32)])
@pytest.mark.parametrize("name", SHAPES)
def test_lists_with_bits_show_the_mask(name, rows, step, of_keys, held):
    """A walk over the lists, as that of the kernels."""
    _, lengths, _ = SHAPES[name]
    for wanted, lists in masks_with_bits(name):
        group = HEADS // HEADS_KV if of_keys else 1
        found = lists.by_keys(rows, step, group) if of_keys else lists.by_queries(rows, step, held)
        spans, entries, places, bits = found
        tiles = unpacked(bits.view(-1, 2, 128, 2))
        shown = torch.zeros_like(wanted)
        for b, h, tile in torch.cartesian_prod(*map(torch.arange, spans.shape[:3])).tolist():
            masked, steps, first, *unmasked = spans[b, h, tile].tolist()
            (unmasked,) = unmasked or [steps - masked]
            for i in range(steps):
                entry, place = entries[first + i].item(), places[first + i].item()
                head, block = entry >> HOW_BITS + BLOCK_BITS, entry >> HOW_BITS & (1 << BLOCK_BITS) - 1
                assert (place < 0) == (entry & 3 == SHOW_ALL)
                hides = i < masked or i >= masked + unmasked
                assert of_keys or (held and i == 0) or (place >= 0) == hides
                row, column = tile * rows, block * step
                part = torch.ones(rows, step, dtype=torch.bool)
                if place >= 0:
                    part = tiles[place, row % 128 :, column % 128 :][:rows, :step]
                row, column, part = (column, row, part.mT) if of_keys else (row, column, part)
                assert not part[:, max(lengths[1] - column, 0) :].any()
                if of_keys and (rows, step) == (128, 64) and not lists.remade:
                    assert part.any() or (steps == 1 and place == lists.bits.last)
                target = shown[b, h * group + head, row : row + len(part), column : column + part.shape[1]]
                target |= part[: target.shape[0], : target.shape[1]]
        assert torch.equal(shown, wanted)


def test_bits_by_keys_of_a_capture_are_not_kept(monkeypatch):
    mask = create_block_mask(third, None, None, 300, 300, device="cpu")
    bits = block_lists(mask, 1, HEADS).with_bits(trace(None, third, False)).bits
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(bits.by_keys, rows_as_keys(bits)) and not bits.transposed
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert torch.equal(bits.by_keys, rows_as_keys(bits)) and bits.transposed


def rows_as_keys(bits):
    return packed(unpacked(bits.blocks).mT).view(-1)


def test_too_many_blocks_have_no_bits(monkeypatch):
    mask = create_block_mask(third, None, None, 300, 300, device="cpu")
    call = trace(None, third, False)
    assert block_lists(mask, 2, HEADS).with_bits(call).bits.last == 9 * HEADS
    monkeypatch.setattr(mask_bits, "MAX_BLOCKS", 9)
    assert block_lists(mask, 2, HEADS).with_bits(call) is None


def test_too_many_blocks_are_counted_once_for_all_values(monkeypatch):
    monkeypatch.setattr(mask_bits, "MAX_BLOCKS", 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ids = torch.zeros(300, dtype=torch.int32)
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 300, 300, device="cpu")
    lists, call = block_lists(mask, 2, HEADS), trace(None, lambda b, h, q, k: ids[q] <= ids[k], False)
    assert lists_with_bits(call, lists) is None
    monkeypatch.setattr(BlockLists, "with_bits", lambda *_: pytest.fail("counted blocks"))
    ids.add_(1)
    assert lists_with_bits(call, lists) is None


def test_bits_are_made_again_after_a_change(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ids = torch.zeros(300, dtype=torch.int32)
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 300, 300, device="cpu")
    lists, call = block_lists(mask, 2, HEADS), trace(None, mask.mask_mod, False)
    found = lists_with_bits(call, lists)
    assert lists_with_bits(trace(None, mask.mask_mod, False), lists) is found
    ids[100:] = 1
    changed = lists_with_bits(call, lists)
    assert changed is not found and lists_with_bits(call, lists) is changed
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert lists_with_bits(call, lists) is changed
    ids[200:] = 2
    assert lists_with_bits(call, lists) is None


def test_bits_of_other_values_need_no_new_lists(monkeypatch):
    """Numbers and tensors that change from call to call: only bits are computed, and the host does not wait for the number of blocks."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    step = torch.tensor([3], dtype=torch.int32)

    def call(factor):
        return trace(None, lambda b, h, q, k: ((q * factor + k + step[0]) & 7) != 0, False)

    def arguments(lists):
        return *lists.by_queries(128, 64), *lists.by_keys(128, 128, 2)

    def count_blocks(*_):
        raise AssertionError("counted blocks")

    mask = create_block_mask(third, None, None, 300, 300, device="cpu")
    lists = block_lists(mask, 2, HEADS)
    first = lists_with_bits(call(5), lists)
    kept = [(x, x.clone()) for x in arguments(first)]
    for factor, added in ((5, 1), (7, 0), (11, 2)):
        step += added
        with monkeypatch.context() as patch:
            patch.setattr(BlockLists, "with_bits", count_blocks)
            found = lists_with_bits(call(factor), lists)
            assert found is not first and lists_with_bits(call(factor), lists) is found
            with pytest.raises(AssertionError, match="counted blocks"):
                lists_with_bits(trace(None, third, False), lists)
        fresh = arguments(lists.with_bits(call(factor)))
        assert all(torch.equal(x, y) for x, y in zip(arguments(found), fresh, strict=True))
        same = [x is y for x, (y, _) in zip(arguments(found), kept, strict=True)]
        assert same == [True, True, True, False] * 2
    # A backward of the first call reads what its forward read
    assert all(torch.equal(x, y) for x, (_, y) in zip(arguments(first), kept, strict=True))


def test_bits_of_data_that_was_replaced_are_made_again():
    ids = torch.zeros(300, dtype=torch.int32)
    call = trace(None, lambda b, h, q, k: ids[q] == ids[k], False)
    found = MaskState(call)
    assert found.is_of(call)
    ids.data = torch.arange(300, dtype=torch.int32)
    assert not found.is_of(call)
    found = MaskState(call)
    ids.data = ids.data[:1].expand(300)
    assert not found.is_of(call)


def test_bits_of_a_cuda_graph_live_as_long_as_the_mask(monkeypatch):
    """A change after the capture replaces bits and lists, which replays read."""
    ids, query = torch.zeros(300, dtype=torch.int32), torch.empty(2, HEADS, 300, 8)
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 300, 300, device="cpu")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    is_captured = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured[0])

    def used(mask):
        return listed(trace(None, mask.mask_mod, False), kept_mask(mask), query, HEADS).blocks

    def refs(lists):
        return weakref.ref(lists), weakref.ref(lists.bits.blocks)

    with monkeypatch.context() as patch:  # what a capture makes is memory of its graph
        patch.setattr(flex_lists, "stream_of", lambda device: None)
        is_captured[0] = True
        in_capture, is_captured[0] = weakref.ref(used(mask)), False
        assert in_capture() is None and not kept_mask(mask).in_graphs
    not_captured = refs(used(mask))
    ids[100:] = 1
    before = used(mask)
    is_captured[0] = True
    assert used(mask) is before and used(mask) is before
    captured, is_captured[0] = refs(before), False
    del before
    ids[200:] = 2
    assert used(mask) is not captured[0]()
    mask.kv_num_blocks.add_(0)
    used(mask)
    gc.collect()
    assert [ref() for ref in not_captured] == [None, None] and None not in [ref() for ref in captured]
    del mask
    gc.collect()
    assert [ref() for ref in captured] == [None, None]


def test_masks_that_capture_tensors_of_inference_mode_have_no_bits():
    with torch.inference_mode():
        ids = torch.zeros(300, dtype=torch.int32)
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 300, 300, device="cpu")
    assert lists_with_bits(trace(None, mask.mask_mod, False), block_lists(mask, 2, HEADS)) is None


def test_bits_keep_no_captured_tensor_alive(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    lists = block_lists(create_block_mask(third, None, None, 300, 300, device="cpu"), 2, HEADS)

    def made() -> weakref.ref:
        ids = torch.zeros(300, dtype=torch.int32)
        call = trace(None, lambda b, h, q, k: ids[q] == ids[k], False)
        assert lists_with_bits(call, lists) is not None
        return weakref.ref(ids)

    captured = made()
    gc.collect()  # graphs of the trace
    assert captured() is None


def test_programs_with_bits_keep_what_scores_need():
    ids, factor = torch.zeros(9, dtype=torch.int32), torch.ones(HEADS, requires_grad=True)
    cap = 3.5
    call = trace(
        lambda s, b, h, q, k: cap * torch.tanh(s * factor[h]), lambda b, h, q, k: ids[q] == ids[k], True
    )
    program, tensors, numbers = call.program.with_bits
    assert [call.tensors[i] for i in tensors] == [factor] and [call.numbers[i] for i in numbers] == [cap]
    assert (
        program.bits
        and program.mask is None
        and program.learned == (0,)
        and str(program) == "score_mod blocks bits"
    )
    others = trace(None, lambda b, h, q, k: ids[q] < k, True), trace(None, causal, True)
    assert others[0].program.with_bits == others[1].program.with_bits, "masks share kernels"


def test_block_states_ignores_what_lies_past_a_list():
    numbers, indices = torch.tensor([[[1, 0]]]), torch.tensor([[[[2, 1, 0], [1, 1, 1]]]])
    states = block_states(numbers, indices, numbers.flip(-1), indices.flip(-2), 3)
    assert states.tolist() == [[[[HIDDEN, HIDDEN, PARTIAL], [HIDDEN, HIDDEN, FULL]]]]


@pytest.mark.parametrize("single", [(0, 1), (2, 3), (0, 3), (1,)], ids=str)
def test_block_states_broadcast_lists(single):
    """Some of numbers and indices, partial and full, have one batch entry and one head for all."""
    mask = random_lists(2, HEADS, (300, 400), (128, 128), "cpu")
    names = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
    lists = [getattr(mask, name) for name in names]
    for i in single:
        lists[i] = lists[i][:1, :1]
    expanded = [x.expand(2, HEADS, *x.shape[2:]).contiguous() for x in lists]
    assert torch.equal(block_states(*lists, 4), block_states(*expanded, 4))


def test_block_lists_are_made_once_for_a_mask():
    mask = create_block_mask(causal, None, None, 300, 300, device="cpu")
    lists = block_lists(mask, 2, HEADS)
    assert isinstance(lists, BlockLists) and block_lists(mask, 2, HEADS) is lists
    assert lists.by_queries(128, 64)[1] is lists.by_queries(128, 64)[1]
    for x in (mask.kv_indices, mask.full_kv_num_blocks):
        x.zero_()
        assert block_lists(mask, 2, HEADS) is not lists
        lists = block_lists(mask, 2, HEADS)
    mask.kv_num_blocks = mask.kv_num_blocks.clone()
    assert block_lists(mask, 2, HEADS) is not lists
    with torch.inference_mode():
        mask = create_block_mask(causal, None, None, 300, 300, device="cpu")
    assert block_lists(mask, 2, HEADS) is block_lists(mask, 2, HEADS)


q8, kv8 = torch.randn(2, 4, 8, 16, dtype=torch.bfloat16), torch.randn(2, 2, 8, 16, dtype=torch.bfloat16)
one = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        (create_block_mask(causal, None, None, 16, 16, device="cpu"), ValueError, r"expected one made for lengths \(8, 8\).*\(16, 16\)"),
        (BlockMask.from_kv_blocks(*one, BLOCK_SIZE=4, seq_lengths=(8, 8)), ValueError, r"kv_num_blocks.*, 2\], a row per block of queries"),
        (BlockMask.from_kv_blocks(*(x.repeat(3, *[1] * (x.ndim - 1)) for x in one), seq_lengths=(8, 8)), ValueError, "batch of 1 or 2"),
        (BlockMask.from_kv_blocks(*(torch.cat([x] * 2, 2) for x in one), seq_lengths=(8, 8)), ValueError, r"kv_num_blocks.*, 1\]"),
        (BlockMask.from_kv_blocks(*(x.to("meta") for x in one), seq_lengths=(8, 8)), ValueError, "the device of query, cpu, got meta"),
    ],
)  # fmt: skip
def test_block_mask_refuses(mask, error, words):
    with pytest.raises(error, match=f"block_mask.*{words}"):
        flex_attention(q8, kv8, kv8, block_mask=mask, enable_gqa=True)


def test_lists_alone_hide_blocks():
    mask = BlockMask.from_kv_blocks(*one, seq_lengths=(8, 200))
    kv = torch.randn(2, 2, 200, 16, dtype=torch.bfloat16)
    out = flex_attention(q8, kv, kv, block_mask=mask, enable_gqa=True)
    expected = flex_attention(q8, *[kv[:, :, :128]] * 2, enable_gqa=True)
    torch.testing.assert_close(out, expected)


PROGRAM = trace(lambda s, b, h, q, k: s * 0.5, causal, True).program.as_listed


@pytest.mark.parametrize("width", TILE_WIDTHS, ids=str)
@pytest.mark.parametrize("whole", [PROGRAM, PROGRAM.with_bits[0]], ids=str)
def test_configs_of_block_masks_divide_their_blocks(width, whole):
    for direction in ("fwd", "bwd", "bwd_det"):
        program = whole.forward if direction == "fwd" else whole
        problem = AttnProblem.of("bfloat16", *width, False, direction, (), program)
        for bucket in ("long", "split") if direction == "fwd" else ("long",):
            config, _ = configs.pick_config(problem, bucket, "NVIDIA H200", direction)
            assert legality.fault(problem, config, direction) is None
    fault = legality.fault(problem, configs.pick_config(problem.plain, "long", "NVIDIA H200", "bwd")[0])
    assert fault is None or any(word in fault for word in ("block", "registers", "schedule", "grads"))


@pytest.mark.parametrize("width", ["d64", "d128"])
def test_schedules_of_backwards_of_block_masks(width):
    """Backwards of a mask alone compute several tiles per CTA, in an order."""
    head_dim = int(width[1:])

    def problem(program):
        return AttnProblem.of("bfloat16", head_dim, head_dim, False, "bwd", (), program)

    program = trace(None, causal, False).program
    mask = problem(program.with_bits[0])
    config, _ = configs.pick_config(mask, "long", "NVIDIA H200", "bwd")
    (bwd_pass,) = config.passes
    assert bwd_pass.schedule == "dynamic-late"
    assert bwd_pass.order
    dynamic = BwdConfig((replace(bwd_pass, schedule="dynamic"),))
    assert "schedule: expected grid or dynamic-late or stream-K here" in legality.fault(mask, dynamic)
    slopes = torch.rand(HEADS)
    scored = trace(lambda s, b, h, q, k: s + slopes[h] * (k - q), causal, False).program.with_bits[0]
    for each in (scored, program.as_listed):
        assert "schedule: expected grid" in legality.fault(problem(each), config)
        other, _ = configs.pick_config(problem(each), "long", "NVIDIA H200", "bwd")
        assert {x.schedule for x in other.passes} == {"grid"}


DOCUMENT = torch.zeros(4096, dtype=torch.int32)


@pytest.mark.parametrize(
    ("mask_mod", "is_band"),
    [
        (lambda b, h, q, k: (q >= k) & (q - k < 300), True),
        (lambda b, h, q, k: (q - k).abs() <= 64, True),
        (causal, False),
        (lambda b, h, q, k: (q >= k) | (k < 10), False),
        (lambda b, h, q, k: (q >= k) & (q % 2 == k % 2), False),
        (lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k) & (q - k < 300), False),
    ],
)
def test_masks_of_a_range_of_distances_are_bands(mask_mod, is_band):
    """Only the config of their backward differs: no other kernel is compiled a second time for them."""
    call = trace(None, mask_mod, True)
    program, *_ = program_with_bits(call, 4096)
    mask = call.program.with_bits[0]
    assert program.band == is_band
    assert program.forward == mask.forward and program.as_exact == mask.as_exact
    assert not program_with_bits(trace(lambda s, b, h, q, k: s * 2, mask_mod, True), 4096)[0].band
    for width in TILE_WIDTHS:
        problem = AttnProblem.of("bfloat16", *width, False, "bwd", (), program)
        config, _ = configs.pick_config(problem, "long", "NVIDIA H200", "bwd")
        rounds = is_band and problem.tile_class in ("d64", "d128")
        assert any(bwd_pass.rounds_dq for bwd_pass in config.passes) == rounds
        assert legality.fault(problem, config, "bwd") is None
        plain = AttnProblem.of("bfloat16", *width, False, "bwd", (), mask)
        assert config.kernels(problem) == config.kernels(plain)


# Kernels


@pytest.fixture(scope="module")
def built():
    """The kernels of the GPU tests, built at the same time."""
    kernels = []
    mask = random_lists(1, 1, (128, 128), (128, 128), "cuda")
    factor = torch.ones(HEADS, device="cuda", requires_grad=True)
    for score_mod, mask_mod, head_dim in (
        (None, mask.mask_mod, 128),
        (None, mask.mask_mod, 64),
        (lambda s, b, h, q, k: s * factor[h], mask.mask_mod, 64),
    ):
        program = trace(score_mod, mask_mod, True).program
        without_bits = [program.as_listed] if score_mod is None and head_dim == 128 else []
        for each, direction in itertools.product([program.with_bits[0], *without_bits], ("fwd", "bwd")):
            its_program = each.forward if direction == "fwd" else each
            problem = AttnProblem.of("bfloat16", head_dim, head_dim, False, direction, (), its_program)
            config, _ = configs.pick_config(problem, "1k", torch.cuda.get_device_name(), direction)
            kernels += config.kernels(problem)
    kernels = list(dict.fromkeys(kernels))
    failed = {kernel: error for kernel, error in building.build_all(kernels).items() if error}
    assert not failed, failed


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_block_mask_matches_the_formula(name, head_dim):
    shape, lengths, size = SHAPES[name]
    compare(
        *inputs("cuda", lengths, head_dim, batch=shape[0] * 8),
        random_lists(shape[0] * 8 if shape[0] > 1 else 1, shape[1], lengths, size, "cuda"),
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_block_mask_without_bits_matches_the_formula(monkeypatch):
    monkeypatch.setattr(mask_bits, "MAX_BLOCKS", 0)
    compare(
        *inputs("cuda", (257, 384), 128, batch=16), random_lists(16, HEADS, (257, 384), (128, 128), "cuda")
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_backward_of_more_lists_than_sms(head_dim):
    """CTAs that compute several key tiles, some without queries."""
    lengths = 900, 1100
    mask = random_lists(12, HEADS, lengths, (128, 128), "cuda", 0.3)
    compare(*inputs("cuda", lengths, head_dim, batch=12), mask)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [(900, 1100), (4300, 4300)])
def test_backward_of_a_window(head_dim, lengths):
    """Warps of the pass round dq, at d64 that of more than 4096 keys alone."""
    window = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 300), None, None, *lengths, device="cuda"
    )
    window.kv_num_blocks[..., -1] -= 1  # or it would run as an option
    compare(*inputs("cuda", lengths, head_dim, batch=3), window)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_block_mask_hides_all_keys_of_the_first_blocks():
    """A held row max: some queries see no key in the partial blocks, and many in the full ones."""
    mask = create_block_mask(lambda b, h, q, k: q > k, None, None, 1000, 1000, device="cuda")
    compare(*inputs("cuda", (1000, 1000), 128, batch=8), mask)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_bits_follow_what_a_mask_captures():
    ids = torch.randint(0, 4, (600,), device="cuda").sort()[0]
    every = torch.full((1, 1, 5), 5, device="cuda", dtype=torch.int32)
    columns = torch.arange(5, device="cuda", dtype=torch.int32).expand(1, 1, 5, 5).contiguous()
    mask = BlockMask.from_kv_blocks(
        every, columns, mask_mod=lambda b, h, q, k: ids[q] == ids[k], seq_lengths=(600, 600)
    )
    tensors = inputs("cuda", (600, 600), 128, batch=8)
    for _ in range(2):
        compare(*tensors, mask)
        ids.copy_(torch.randint(0, 5, (600,), device="cuda").sort()[0])
    q, k, v = (x.detach() for x in tensors)
    expected = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_block_mask_with_a_learned_factor():
    lengths = 700, 650
    factor = (torch.rand(HEADS, device="cuda") + 0.5).requires_grad_()
    compare(
        *inputs("cuda", lengths, 64, batch=16),
        random_lists(1, HEADS, lengths, (128, 128), "cuda"),
        factor,
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_new_lengths_build_no_kernel():
    def step(n: int) -> None:
        q, k, v = inputs("cuda", (n, n), 128, batch=16)
        mask = create_block_mask(third, None, None, n, n)
        flex_attention(q, k, v, block_mask=mask, enable_gqa=True).sum().backward()

    step(700)
    before = building.compile_count()
    for n in (513, 640, 641, 1000):
        step(n)
    assert building.compile_count() == before
