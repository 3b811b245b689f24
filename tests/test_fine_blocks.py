"""BlockMasks whose BLOCK_SIZE is no multiple of 128: the lists and bits of the kernels, and calls against dense masks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

from tl_attention import create_block_mask, flash_attn_func, flex_attention
from tl_attention.api import block_masks
from tl_attention.api.flex_lists import kept_mask, listed
from tl_attention.launch import block_lists, mask_bits
from tl_attention.launch.block_lists import FULL, HIDDEN, PARTIAL, states_of_rows
from tl_attention.launch.mask_bits import unpacked
from tl_attention.reference.flex import new_scores
from tl_attention.tracing.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention. CPU tensors", "ignore:.*torch.compile")
BATCH, HEADS, HEADS_KV = 2, 4, 2
SIZES = (64, 64), (16, 16), (1, 64), (64, 128), (256, 64), (96, 200), (1, 1), (100, 7)
# Batch and heads of a mask, seqlen_q, seqlen_k
SHAPES = {
    "one for all": ((1, 1), (300, 420)),
    "per head": ((1, HEADS), (129, 130)),
    "per entry": ((BATCH, HEADS), (257, 384)),
    "one query": ((BATCH, 1), (1, 333)),
}


def third(b, h, q, k):
    return (q + k + h) % 3 != 0


def of_keys(b, h, q, k):
    return (k + b) % 5 != 0


def none(b, h, q, k):
    return q < 0


def causal(b, h, q, k):  # an option, but for blocks that are not listed
    return q >= k


MASK_MODS = {"third": third, "of keys": of_keys, "causal": causal, "none": none, "all": None}


def drawn_states(shape: tuple[int, int], lengths: tuple[int, int], size: tuple[int, int], device: str):
    """States of blocks, int8 [batch, heads, rows, columns]: alike in patches of some 150 queries and keys, then others here and there."""
    rows, columns = (-(-n // block) for n, block in zip(lengths, size, strict=True))
    patches = torch.randint(3, (*shape, -(-lengths[0] // 150), -(-lengths[1] // 150)), device=device)
    at = [
        torch.arange(n, device=device) * block // 150 for n, block in zip((rows, columns), size, strict=True)
    ]
    states = patches[..., at[0], :][..., at[1]]
    others = torch.randint(3, states.shape, device=device)
    return torch.where(torch.rand(states.shape, device=device) < 3 / states[0, 0].numel(), others, states)


def mask_of_states(states: torch.Tensor, lengths, size, mask_mod: Callable | None) -> BlockMask:
    lists = []
    for wanted in (PARTIAL, FULL):
        found = states == wanted
        lists += [found.sum(-1).int(), (~found).int().argsort(dim=-1, stable=True).int()]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=lengths)


def indices(lengths: tuple[int, int], device: str) -> list[torch.Tensor]:
    shape = BATCH, HEADS, *lengths
    return [
        torch.arange(n, device=device).view([-1 if dim == i else 1 for i in range(4)])
        for dim, n in enumerate(shape)
    ]


def dense(states: torch.Tensor, lengths, size, mask_mod: Callable | None) -> torch.Tensor:
    """Elements that blocks in these states show: bool [batch, heads, seqlen_q, seqlen_k]."""
    b, h, q, k = indices(lengths, states.device)
    of_elements = states.expand(BATCH, HEADS, -1, -1)[b, h, q // size[0], k // size[1]]
    shown = torch.ones((), dtype=torch.bool, device=states.device)
    if mask_mod is not None:
        shown = mask_mod(b, h, q, k)
    return (of_elements == FULL) | (of_elements == PARTIAL) & shown


def inputs(device: str, lengths: tuple[int, int], head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    heads = (HEADS, lengths[0]), (HEADS_KV, lengths[1]), (HEADS_KV, lengths[1])
    return [
        torch.randn(BATCH, *shape, head_dim, device=device, dtype=dtype, requires_grad=True)
        for shape in heads
    ]


def compare(mask: BlockMask, shown: torch.Tensor, qkv: list[torch.Tensor], tolerance: float, bias=None):
    """Compare out, lse and all gradients with fp64. bias: learned, one per head, added to the scores."""
    wanted = [*qkv, *([] if bias is None else [bias])]
    exact = [x.detach().double().requires_grad_() for x in wanted]
    group = HEADS // HEADS_KV
    q, k, v = exact[0], *(x.repeat_interleave(group, 1) for x in exact[1:3])
    scores = q @ k.mT * q.shape[-1] ** -0.5
    score_mod = None
    if bias is not None:
        scores = scores * exact[3][:, None, None]
        score_mod = lambda s, b, h, q, k: s * bias[h]  # noqa: E731
    sees = shown.any(-1, keepdim=True)
    scores = scores.masked_fill(~shown & sees, -math.inf)  # a row without keys is cut off below
    right = [
        scores.softmax(-1).masked_fill(~sees, 0) @ v,
        scores.logsumexp(-1).masked_fill(~sees[..., 0], 0),
    ]
    out, lse = flex_attention(*qkv, score_mod, mask, enable_gqa=True, return_lse=True)
    assert torch.equal(lse == -math.inf, ~sees[..., 0])
    found = [out, lse.masked_fill(~sees[..., 0], 0)]
    grads = [torch.randn_like(x) for x in found]
    found += torch.autograd.grad(found, wanted, grads)
    right += torch.autograd.grad(right, exact, [x.double() for x in grads])
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dbias"), found, right, strict=False):
        assert not x.isnan().any(), name
        error = ((x.double() - y).norm() / (y.norm() + 1e-30)).item()
        assert error < tolerance or x.norm() == y.norm() == 0, (
            f"{name}: expected an error of at most {tolerance}, got {error}"
        )


# Each two of shape, size of blocks and mask_mod meet
FINE = [
    (name, size, list(MASK_MODS)[(i + j + more) % len(MASK_MODS)])
    for i, name in enumerate(SHAPES)
    for j, size in enumerate(SIZES)
    for more in ((0, 4) if i == 0 else (0,))
]


@pytest.mark.parametrize(("name", "size", "mask_mod"), FINE, ids=str)
def test_fine_blocks_on_cpu(name, size, mask_mod):
    shape, lengths = SHAPES[name]
    states = drawn_states(shape, lengths, size, "cpu")
    mask = mask_of_states(states, lengths, size, MASK_MODS[mask_mod])
    shown = dense(states, lengths, size, MASK_MODS[mask_mod])
    bias = torch.rand(HEADS, requires_grad=True) if size[0] == 64 else None
    compare(mask, shown, inputs("cpu", lengths, 16, torch.float32), 1e-5, bias)


def shown_by_lists(call, lengths: tuple[int, int]) -> torch.Tensor:
    """Elements that kernels show, read from lists of blocks of 128 and from their bits."""
    lists, bits = call.blocks, call.blocks.bits
    assert lists.block_size == (128, 128)
    if bits is None:
        return new_scores(torch.zeros(BATCH, HEADS, *lengths), call) > -1e20
    assert torch.equal(bits.places >= 0, lists.states == PARTIAL)
    shown = torch.where(
        (lists.states == FULL)[..., None, None], True, unpacked(bits.blocks)[bits.places.long()]
    )
    shown = (shown & (lists.states != HIDDEN)[..., None, None]).transpose(-3, -2)
    return shown.flatten(-4, -3).flatten(-2)[..., : lengths[0], : lengths[1]].expand(BATCH, HEADS, -1, -1)


def as_on_gpu(mask: BlockMask, call, monkeypatch, by_bits: bool = True):
    """The call that a GPU would launch."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr("tl_attention.api.flex_lists.stream_of", lambda device: 0)
        return listed(call, kept_mask(mask), torch.empty(BATCH, HEADS, 1, 8), HEADS, by_bits)


@pytest.mark.parametrize("by_bits", [True, False], ids=["bits", "no bits"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_fine_blocks_are_lists_of_128(name, size, by_bits, monkeypatch):
    shape, lengths = SHAPES[name]
    for mask_mod in MASK_MODS.values() if by_bits else (third,):
        states = drawn_states(shape, lengths, size, "cpu")
        mask = mask_of_states(states, lengths, size, mask_mod)
        call = as_on_gpu(mask, trace(None, mask.mask_mod, False), monkeypatch, by_bits)
        assert (call.blocks.bits is not None) == by_bits
        assert torch.equal(shown_by_lists(call, lengths), dense(states, lengths, size, mask_mod))


@pytest.mark.parametrize("size", [1, 7, 16, 64, 96, 128, 192, 200, 256, 2**30])
@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 511])
def test_fine_blocks_of_128_rows(size, length):
    """A block of 128 rows is full or hidden where all blocks are that it lies in."""
    states = torch.randint(3, (-(-length // size), 1)).repeat_interleave(2, 1)
    states[:, 1] = states[:1, 1]
    found = states_of_rows(states, -2, size, length)
    for column in (0, 1):
        of_rows = states[:, column].repeat_interleave(min(size, max(length, 1)))[:length]
        for block, state in zip(of_rows.split(128) if length else (), found[:, column].tolist(), strict=True):
            expected = block[0].item() if (block == block[0]).all() else PARTIAL
            assert state == expected


@pytest.mark.parametrize("lengths", [(300, 420), (1, 8000)], ids=str)
def test_fine_blocks_of_few_tiles_are_read_without_a_wait(lengths, monkeypatch):
    """Lists and bits have sizes that follow from the lengths alone; more than MAX_UNCOUNTED blocks are counted."""
    size = (1, 64)
    states, call = drawn_states((1, 1), lengths, size, "cpu"), trace(None, third, False)
    mask = mask_of_states(states, lengths, size, third)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "nonzero", "__bool__", "__int__"):
            patch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"called {name}"))
        found = as_on_gpu(mask, call, patch)
        found.blocks.by_queries(128, 64, held=True), found.blocks.by_keys(128, 64, 2)
    monkeypatch.setattr(mask_bits, "MAX_UNCOUNTED", 0)
    counted = as_on_gpu(mask_of_states(states, lengths, size, third), call, monkeypatch)
    assert counted.blocks.bits.last <= found.blocks.bits.last
    for one in (found, counted):
        assert torch.equal(shown_by_lists(one, lengths), dense(states, lengths, size, third))


def test_fine_blocks_are_kept_until_something_changes(monkeypatch):
    lengths, size, step = (300, 420), (64, 64), torch.tensor([0], dtype=torch.int32)

    def moved(b, h, q, k):
        return (q + k + step[0]) % 3 != 0

    def check() -> object:
        call = as_on_gpu(mask, trace(None, moved, False), monkeypatch)
        assert torch.equal(shown_by_lists(call, lengths), dense(states, lengths, size, moved))
        return call.blocks

    states = drawn_states((1, 1), lengths, size, "cpu")
    mask = mask_of_states(states, lengths, size, moved)
    first = check()
    assert check() is first
    with monkeypatch.context() as patch:  # other values need no new lists
        patch.setattr(block_lists.BlockLists, "with_bits", lambda *_: pytest.fail("counted blocks"))
        step += 1
        assert check() is not first
    mask.full_kv_num_blocks.zero_()
    states = states.masked_fill(states == FULL, HIDDEN)
    check()


def test_fine_blocks_share_a_program():
    """Two masks of one size, and layers of one mask, use the same kernels."""
    lengths, size = (300, 420), (64, 32)
    programs = []
    for shape in ((1, 1), (1, 1), (BATCH, HEADS)):
        mask = mask_of_states(drawn_states(shape, lengths, size, "cpu"), lengths, size, third)
        call = listed(trace(None, third, False), kept_mask(mask), torch.empty(BATCH, 1), HEADS)
        programs.append(call.program)
    assert programs[0] is programs[1] and programs[0] != programs[2]
    assert programs[0].mask is not None and programs[0].listed


@pytest.mark.parametrize("make", [create_block_mask, torch_block_mask], ids=["ours", "PyTorch"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_fine_blocks_of_create_block_mask(make, size):
    lengths, ids = (200, 200), torch.arange(200) // 70

    def documents(b, h, q, k):
        return (ids[q] == ids[k]) & (q >= k - h)

    for mask_mod in (documents, causal):  # the second runs as an option
        mask = make(mask_mod, BATCH, HEADS, *lengths, device="cpu", BLOCK_SIZE=size)
        shown = mask_mod(*indices(lengths, "cpu")).expand(BATCH, HEADS, -1, -1)
        compare(mask, shown, inputs("cpu", lengths, 16, torch.float32), 1e-5)


def test_fine_blocks_of_a_constructor():
    mask = block_masks.documents(torch.arange(200) // 70, block_size=32)
    shown = mask.mask_mod(*indices((200, 200), "cpu")).expand(BATCH, HEADS, -1, -1)
    compare(mask, shown, inputs("cpu", (200, 200), 16, torch.float32), 1e-5)


@pytest.mark.parametrize("size", [(1, 64), (64, 64), (128, 128)], ids=str)
def test_fine_blocks_of_a_sliced_mask(size):
    """Decoding: the mask of all queries, cut to the row of one."""
    whole = torch_block_mask(causal, None, None, 512, 512, device="cpu", BLOCK_SIZE=size)
    position = torch.tensor([301])
    mask = whole[:, :, position // size[0]]
    mask.mask_mod = lambda b, h, q, k: causal(b, h, q + position[0], k)
    mask.seq_lengths = (1, 512)
    qkv = inputs("cpu", (1, 512), 16, torch.float32)
    compare(mask, (torch.arange(512) <= 301).expand(BATCH, HEADS, 1, -1), qkv, 1e-5)


def test_fine_blocks_of_paged_attention():
    """Pages of 16 keys: PyTorch's page table makes a mask of its blocks."""
    paged = pytest.importorskip("torch.nn.attention.experimental._paged_attention")
    length, page = 96, 16
    table = paged.PagedAttention(BATCH * length // page + 3, page, BATCH, device="cpu")
    for entry in range(BATCH):
        table.reserve(torch.tensor(entry), torch.tensor(length))
    q, k, v = (x.detach() for x in inputs("cpu", (length, length), 16, torch.float32))
    caches = [torch.zeros(1, HEADS_KV, (BATCH * length // page + 3) * page, 16) for _ in range(2)]
    rows = torch.arange(length).expand(BATCH, -1)
    table.assign(torch.arange(BATCH), rows, k, v, *caches)
    mask = torch_block_mask(causal, BATCH, 1, length, length, device="cpu", BLOCK_SIZE=page)
    of_pages = table.convert_logical_block_mask(mask)
    assert (page, page) == of_pages.BLOCK_SIZE
    found = flex_attention(q, *caches, block_mask=of_pages, enable_gqa=True)
    torch.testing.assert_close(found, flex_attention(q, k, v, mask_mod=causal, enable_gqa=True))


@pytest.mark.parametrize("learned", [False, True], ids=["bool", "learned"])
def test_fine_blocks_beside_a_bias(learned):
    lengths, size = (150, 300), (16, 64)
    states = drawn_states((1, HEADS), lengths, size, "cpu")
    mask = mask_of_states(states, lengths, size, third)
    shown = dense(states, lengths, size, third)
    q, k, v = (x.detach() for x in inputs("cpu", lengths, 16, torch.float32))
    bias = torch.randn(1, HEADS, *lengths) if learned else torch.rand(1, HEADS, *lengths) < 0.7
    found = flex_attention(q, k, v, lambda s, b, h, q, k: s * 0.5, mask, enable_gqa=True, attn_bias=bias)
    together = bias.masked_fill(~shown, -math.inf) if learned else bias & shown
    expected = flex_attention(q, k, v, lambda s, b, h, q, k: s * 0.5, attn_bias=together, enable_gqa=True)
    torch.testing.assert_close(found, expected)


def test_fine_blocks_of_inference_mode_serve_training(monkeypatch):
    lengths, size = (150, 300), (16, 64)
    with torch.inference_mode():
        states = drawn_states((1, 1), lengths, size, "cpu")
        mask = mask_of_states(states, lengths, size, third)
        q, k, v = inputs("cpu", lengths, 16, torch.float32)
        flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        assert as_on_gpu(mask, trace(None, third, False), monkeypatch).blocks.bits is not None
    compare(
        mask, dense(states.clone(), lengths, size, third), inputs("cpu", lengths, 16, torch.float32), 1e-5
    )


def test_fine_blocks_in_flash_attn_func():
    lengths, size = (150, 300), (16, 64)
    states = drawn_states((1, 1), lengths, size, "cpu")
    mask = mask_of_states(states, lengths, size, third)
    q, k, v = (x.detach() for x in inputs("cpu", lengths, 16, torch.float32))
    found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask)
    expected = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(found.transpose(1, 2), expected)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((0, 64), "got .0, 64"),
        ((64, -1), "got .64, -1"),
        ((64.0, 64), "got .64.0"),
        ((64,), "got .64,"),
        (64, "got 64"),
    ],
)
def test_fine_blocks_refuse_sizes(size, words):
    mask = mask_of_states(torch.ones(1, 1, 2, 2, dtype=torch.int8), (128, 128), (64, 64), third)
    mask.BLOCK_SIZE = size
    qkv = inputs("cpu", (128, 128), 16, torch.float32)
    with pytest.raises(
        ValueError, match=f"block_mask: expected a BLOCK_SIZE of two ints of at least 1, {words}"
    ):
        flex_attention(*qkv, block_mask=mask, enable_gqa=True)


def test_fine_blocks_refuse_too_many(monkeypatch):
    monkeypatch.setattr(block_lists, "MAX_STATES", 100)
    mask = mask_of_states(drawn_states((1, 1), (300, 300), (16, 16), "cpu"), (300, 300), (16, 16), third)
    with pytest.raises(
        NotImplementedError, match=r"block_mask: expected at most 100 blocks of \(16, 16\) .* got 361"
    ):
        flex_attention(*inputs("cpu", (300, 300), 16, torch.float32), block_mask=mask, enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(64, 64), (16, 16), (1, 64), (256, 64), (96, 200)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_fine_blocks(name, size):
    shape, lengths = SHAPES[name]
    for mask_mod in MASK_MODS.values():
        states = drawn_states(shape, lengths, size, "cuda")
        mask = mask_of_states(states, lengths, size, mask_mod)
        qkv = inputs("cuda", lengths, 64, torch.bfloat16)
        compare(mask, dense(states, lengths, size, mask_mod), qkv, 2e-2)


@pytest.mark.gpu
def test_fine_blocks_without_bits(monkeypatch):
    """Kernels that read the states of the blocks for each score."""
    monkeypatch.setattr(mask_bits, "MAX_BLOCKS", 0)
    shape, lengths = SHAPES["per entry"]
    states = drawn_states(shape, lengths, (64, 16), "cuda")
    mask = mask_of_states(states, lengths, (64, 16), third)
    qkv = inputs("cuda", lengths, 64, torch.bfloat16)
    compare(mask, dense(states, lengths, (64, 16), third), qkv, 2e-2)


@pytest.mark.gpu
def test_fine_blocks_in_a_graph():
    lengths, size, step = (300, 420), (64, 64), torch.zeros(1, dtype=torch.int32, device="cuda")
    states = drawn_states((1, HEADS), lengths, size, "cuda")
    mask = mask_of_states(states, lengths, size, lambda b, h, q, k: (q + k + step[0]) % 3 != 0)
    q, k, v = (x.detach() for x in inputs("cuda", lengths, 64, torch.bfloat16))
    expected = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    found.zero_()
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_fine_blocks_past_the_keys_are_hidden():
    """A mask made for more keys, cut as a cache does it: its lists name blocks that do not exist."""
    mask = torch_block_mask(causal_mask, None, None, 512, 512, device="cpu", BLOCK_SIZE=(64, 64))
    mask.seq_lengths = (512, 200)
    q, k, v = (torch.randn(1, 1, n, 16, dtype=torch.float64).float() for n in (512, 200, 200))
    out = flex_attention(q, k, v, block_mask=mask)
    seen = torch.arange(512)[:, None] >= torch.arange(200)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen))


def causal_mask(b, h, q, k):
    return q >= k
