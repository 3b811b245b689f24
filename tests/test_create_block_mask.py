"""Block masks: create_block_mask and the constructors against torch's create_block_mask, pictures, memory, and errors."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, or_masks
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from tl_attention import create_block_mask, draft_tree_mask, flex_attention
from tl_attention.api import block_masks, mask_picture
from tl_attention.tracing import intervals
from tl_attention.tracing.captures import Captures
from tl_attention.tracing.trace import trace

LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices", "full_q_num_blocks",
    "full_q_indices",
)  # fmt: skip
LENGTH = 600
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def causal(b, h, q, k):
    return q >= k


class Captured:
    """Tensors that the masks below capture."""

    def __init__(self, device: str):
        generator = torch.Generator().manual_seed(0)

        def ints(high, *shape):
            return torch.randint(0, high, shape, generator=generator)

        self.documents = ints(6, 2, LENGTH).sort(1)[0].to(device)
        self.unsorted = ints(3, 2, LENGTH).to(device)
        self.small = ints(3, LENGTH).to(torch.uint8).to(device)
        self.table = (ints(2, 2, 8, 8) > 0).to(device)
        self.visible = (ints(50, LENGTH) > 0).to(device)
        self.dense = (ints(10, LENGTH, LENGTH) > 8).to(device)
        self.offsets = torch.tensor([0, 100, 300, 500, 800, 900], device=device)
        self.windows = torch.tensor([5, 300, 70], dtype=torch.int32, device=device)
        self.prefix = torch.tensor([300, 10], device=device)
        self.number = torch.tensor(77, device=device)
        self.floats = torch.randn(LENGTH, generator=generator).to(device)
        self.nan = torch.where(self.floats > 2, torch.nan, self.floats)

    def place(self, b, position):
        """Position within its document."""
        return position - self.offsets[self.documents[b, position]]


def masks(c: Captured) -> dict:
    return {
        "causal": causal,
        "window": lambda b, h, q, k: (q >= k) & (q - k < 200),
        "near": lambda b, h, q, k: (q - k).abs() <= 100,
        "documents": lambda b, h, q, k: (c.documents[b, q] == c.documents[b, k]) & (q >= k),
        "long index": lambda b, h, q, k: c.documents[b, q.long()] == c.documents[b, k.long()],
        "unsorted": lambda b, h, q, k: (c.unsorted[b, q] == c.unsorted[b, k]) & (q >= k),
        "bytes": lambda b, h, q, k: (c.small[q] - c.small[k]) ** 2 < 2,
        "table": lambda b, h, q, k: c.table[b, q // 128, k // 128],
        "visible": lambda b, h, q, k: c.visible[k] | (q == k),
        "dense": lambda b, h, q, k: c.dense[q, k] & (q > 500),
        "dilated": lambda b, h, q, k: ((q - k) % 7 == 0) & (q >= k),
        "far dilated": lambda b, h, q, k: (q - k) % 300 == 0,
        "of heads": lambda b, h, q, k: (q - k < c.windows[h]) & (q >= k),
        "modulo head": lambda b, h, q, k: (q % (h + 2) == 0) | (q >= k),
        "prefix": lambda b, h, q, k: (k < c.prefix[b]) | (q >= k),
        "0-d": lambda b, h, q, k: q - k < c.number,
        "natten": lambda b, h, q, k: ((q // 32 - k // 32).abs() <= 3) & ((q % 32 - k % 32).abs() <= 3),
        "combined": or_masks(and_masks(causal, lambda b, h, q, k: q - k < 64), lambda b, h, q, k: k < 4),
        "remapped": lambda b, h, q, k: (c.documents[b, q] == c.documents[b, k]) & (c.place(b, q) // 50 >= c.place(b, k) // 50),
        "where": lambda b, h, q, k: torch.where(q < 500, q >= k, (q - k).abs() < 200),
        "where of numbers": lambda b, h, q, k: torch.where(q < 500, 10, k) >= torch.where(k > q, 3, q),
        "all": lambda b, h, q, k: q >= 0,
        "none": lambda b, h, q, k: q < 0,
        "floats": lambda b, h, q, k: c.floats[q] * 2.0 + c.floats[k] > 0.5 * h,
        "nan": lambda b, h, q, k: c.nan[q] > c.nan[k],
        "functions": lambda b, h, q, k: torch.sin(q * 0.01) + torch.floor(k / 100) / 5 > 0.3,
        "bits": lambda b, h, q, k: ((q ^ k) & 192) == 0,
        "shifts": lambda b, h, q, k: (q >> 6) == (k >> 6),
        "low bits": lambda b, h, q, k: (q & 255) >= (k & 255),
        "clamped": lambda b, h, q, k: torch.clamp(q - k, -10, 100) < 100,
        "negated": lambda b, h, q, k: ~(q < k) ^ (k < 5),
        "circle": lambda b, h, q, k: (q - 500) * (q - 500) + (k - 500) * (k - 500) < 90000,
        "no distance": lambda b, h, q, k: (q - k >= 5) & (q - k < 5),
        "both sides": lambda b, h, q, k: q + q - k >= q,
        "sign": lambda b, h, q, k: torch.sign(q - k) >= 0,
        "overflow": lambda b, h, q, k: (q + 2**31 - 500).to(torch.int32) > k,
    }  # fmt: skip


NAMES = tuple(masks(Captured("cpu")))
SHAPES = {
    "square": (LENGTH, LENGTH, 128, True),
    "wide": (420, LENGTH, (64, 128), True),
    "alike": (LENGTH, 450, 128, False),
}


def assert_same(ours, theirs, where=""):
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in LISTS:
        x, y = getattr(ours, name), getattr(theirs, name)
        assert (x is None) == (y is None), f"{where} {name}"
        if x is not None:
            assert x.dtype == y.dtype and torch.equal(x, y), f"{where} {name}"


@devices
@pytest.mark.parametrize("name", NAMES)
def test_block_mask_is_that_of_torch(name, device):
    mask_mod = masks(Captured(device))[name]
    for where, (seqlen_q, seqlen_k, block_size, separate) in SHAPES.items():
        sizes = 2, 3, seqlen_q, seqlen_k, device, block_size
        ours = create_block_mask(mask_mod, *sizes, separate_full_blocks=separate)
        theirs = torch_create_block_mask(mask_mod, *sizes)
        if separate:
            assert_same(ours, theirs, where)
        else:
            assert ours.full_kv_num_blocks is None and ours.full_q_indices is None
            assert torch.equal(ours.to_dense(), theirs.to_dense().clamp(max=1)), where
        assert ours.mask_mod is mask_mod


@pytest.mark.parametrize("name", NAMES)
def test_block_mask_bounds_are_true(name):
    """A block that is surely full or empty is; torch evaluates each element."""
    mask_mod = masks(Captured("cpu"))[name]
    blocks = intervals.Blocks(2, 3, LENGTH, LENGTH, 50, 40, torch.device("cpu"))
    full, empty = intervals.mask_bounds(trace(None, mask_mod, False), blocks)
    theirs = torch_create_block_mask(mask_mod, 2, 3, LENGTH, LENGTH, "cpu", (50, 40))
    states = torch.stack(
        [torch.stack([mask_picture.block_states(theirs, b, h) for h in range(3)]) for b in range(2)]
    )
    assert (states.eq(mask_picture.FULL) | ~full).all() and (states.eq(mask_picture.HIDDEN) | ~empty).all()
    if name in (
        "causal",
        "window",
        "near",
        "documents",
        "long index",
        "prefix",
        "of heads",
        "shifts",
        "combined",
        "0-d",
    ):
        assert torch.equal((full | empty).expand_as(states), states != mask_picture.PARTIAL)


def test_block_mask_computed_index_out_of_range_reads_the_nearest():
    table = torch.tensor([[False] * 300, [True] * 300])
    mask = create_block_mask(lambda b, h, q, k: table[b + 7, k] & (q >= k), None, None, 300, 300, "cpu")
    assert_same(mask, create_block_mask(causal, None, None, 300, 300, "cpu"))


@pytest.mark.parametrize("far", [2, 7, -3, torch.tensor(2)])
def test_block_mask_refuses_a_number_out_of_range(far):
    table = torch.tensor([[False] * 300, [True] * 300])
    with pytest.raises(
        ValueError,
        match=r"captured tensor 0, .*: expected an index within dimension 0, from -2 to 1, got -?\d",
    ):
        create_block_mask(lambda b, h, q, k: table[far, k] & (q >= k), None, None, 300, 300, "cpu")


def lengths_on(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_seqlens, lengths of prefixes)."""
    return torch.tensor([0, 200, 201, 201, 450, 550], device=device), torch.tensor([5, 500], device=device)


def constructed(cu_seqlens: torch.Tensor, prefixes: torch.Tensor) -> dict:
    ids = block_masks.document_ids(cu_seqlens, LENGTH)
    on = {"device": cu_seqlens.device}
    return {
        "causal": block_masks.causal(LENGTH, 500, **on),
        "window": block_masks.sliding_window(LENGTH, 500, (100, 30), **on),
        "left": block_masks.sliding_window(LENGTH, 500, (30, -1), block_size=64, **on),
        "right": block_masks.sliding_window(500, LENGTH, (None, 30), **on),
        "far": block_masks.sliding_window(500, LENGTH, (2**70, 30), **on),
        "no window": block_masks.sliding_window(LENGTH, LENGTH, (-1, -1), **on),
        "prefix": block_masks.prefix_lm(LENGTH, LENGTH, 333, **on),
        "prefixes": block_masks.prefix_lm(LENGTH, LENGTH, prefixes),
        "documents": block_masks.documents(ids),
        "whole documents": block_masks.documents(ids, causal=False),
        "batches": block_masks.documents(torch.stack([ids, ids.flip(0)])),
        "tree": block_masks.prefix_tree([-1, 0, 1, 0, -1], cu_seqlens.diff(), LENGTH),
        "trees": block_masks.prefix_tree(
            [[-1, 0, 1, 0, 3], [-1, 0, -1]], [[9, 8, 7, 6, 5], [0, 500, 40]], **on
        ),
        "dilated": block_masks.dilated(LENGTH, LENGTH, 5, **on),
        "far dilated": block_masks.dilated(LENGTH, LENGTH, 300, causal=False, **on),
        "chunks": block_masks.block_diagonal(LENGTH, 500, 200, **on),
    }


@devices
def test_block_mask_constructors_are_those_of_torch(device):
    for name, ours in constructed(*lengths_on(device)).items():
        batch = ours.kv_num_blocks.shape[0]
        theirs = torch_create_block_mask(ours.mask_mod, batch, 1, *ours.seq_lengths, device, ours.BLOCK_SIZE)
        assert_same(ours, theirs, name)
        assert block_masks.origin_of_lists(ours).mask_mod is ours.mask_mod


def saved(mask: BlockMask) -> BlockMask:
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "deepcopy": copy.deepcopy,
    "save": saved,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_block_mask_of_constructors_can_be_copied(copied):
    for name, mask in constructed(*lengths_on("cpu")).items():
        again = copied(mask)
        assert_same(again, mask, name)
        seqlen_q, seqlen_k = mask.seq_lengths
        q, k = torch.randn(mask.kv_num_blocks.shape[0], 1, seqlen_q, 8), torch.randn(1, 1, seqlen_k, 8)
        out = flex_attention(q, k, k, block_mask=mask)
        assert torch.equal(flex_attention(q, k, k, block_mask=again), out), name


class MasksOfDocuments(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> BlockMask:
        return block_masks.documents(torch.arange(40) // (7 + i))


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_workers_of_a_loader_make_masks():
    loader = torch.utils.data.DataLoader(MasksOfDocuments(), batch_size=None, num_workers=1)
    for mask, i in zip(loader, range(2), strict=True):
        assert_same(mask, MasksOfDocuments()[i])


def test_block_masks_of_equal_arguments_share_what_follows_from_them():
    cu_seqlens, prefixes = lengths_on("cpu")
    both = zip(*(constructed(cu_seqlens, prefixes).items() for _ in range(2)), strict=True)
    for (name, one), (_, other) in both:
        captures = [Captures.of(mask.mask_mod) for mask in (one, other)]
        assert captures[0].key == captures[1].key, name
        if not captures[0].tensors:
            assert one.kv_indices is other.kv_indices, name


def test_block_masks_of_each_step_compile_nothing_again():
    torch._dynamo.reset()
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph

    function = torch.compile(
        lambda q, mask: flex_attention(q, q, q, block_mask=mask), backend=backend, fullgraph=True
    )
    for step in range(3):
        q = torch.randn(1, 1, 40, 8)
        mask = block_masks.documents(torch.arange(40) // (7 + step))
        torch.testing.assert_close(function(q, mask), flex_attention(q, q, q, block_mask=mask))
    assert len(compiled) == 1


def test_block_mask_of_constructors_combines():
    window, prefix = (
        block_masks.sliding_window(300, 300, (50, 0), device="cpu"),
        block_masks.prefix_lm(300, 300, 9, device="cpu"),
    )
    mask_mod = and_masks(window.mask_mod, prefix.mask_mod)
    sizes = None, None, 300, 300, "cpu"
    assert_same(create_block_mask(mask_mod, *sizes), torch_create_block_mask(mask_mod, *sizes))


def test_block_mask_documents_of_several_runs_are_listed_in_part():
    ids = torch.tensor([0, 1, 0]).repeat_interleave(256)
    mask = block_masks.documents(ids, causal=False)
    states = mask_picture.block_states(mask)
    assert states[0].tolist() == [2, 2, 0, 0, 2, 2]
    ids[100:110] = 7
    states = mask_picture.block_states(block_masks.documents(ids, causal=False))
    assert states[0].tolist() == [1, 1, 1, 1, 1, 1] and (states[2] == torch.tensor([1, 0, 2, 2, 0, 0])).all()


def test_block_mask_dimensions_that_do_not_matter_are_not_stored():
    mask = create_block_mask(causal, 8, 16, 4096, 4096, "cpu")
    assert mask.kv_indices.shape == (8, 16, 32, 32) and mask.kv_indices.stride()[:2] == (0, 0)
    assert create_block_mask(causal, None, None, 4096, 4096, "cpu").kv_indices.shape == (1, 1, 32, 32)


def test_block_mask_of_long_sequences_needs_little_memory():
    """A byte per query and key would be 4 GiB; bounds alone decide, but for 0.6 million elements."""
    seen = []
    with torch.utils._python_dispatch._disable_current_modes(), Sizes(seen):
        mask = create_block_mask(
            lambda b, h, q, k: (q >= k) & (q - k < 4096), None, None, 65536, 65536, "cpu"
        )
    assert int(mask.kv_num_blocks.sum()) == 512 + 480 and int(mask.full_kv_num_blocks.sum()) == sum(
        min(i, 31) for i in range(512)
    )
    assert max(seen) <= 2**21


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Mode that records the number of elements of each result."""

    def __init__(self, seen: list[int]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen += [
            x.numel()
            for x in (out if isinstance(out, tuple | list) else [out])
            if isinstance(x, torch.Tensor)
        ]
        return out


def test_block_mask_is_computed_once(monkeypatch):
    calls, real = [], block_masks._states
    monkeypatch.setattr(block_masks, "_states", lambda *args: calls.append(1) or real(*args))

    def made(window, length, tensor=None):
        def mask_mod(b, h, q, k):
            near = q - k < window
            return near if tensor is None else near & (tensor[q] >= 0)

        return create_block_mask(mask_mod, None, None, length, 321, "cpu")

    first, second = made(5, 300), made(5, 300)
    assert len(calls) == 1 and first.kv_indices is second.kv_indices and first is not second
    made(6, 300), made(5, 301)
    assert len(calls) == 3
    values = torch.zeros(300)
    assert made(5, 300, values).kv_num_blocks.sum() > 0
    values.fill_(-1)
    assert made(5, 300, values).kv_num_blocks.sum() == 0  # a tensor may have changed


def test_block_mask_of_no_queries_or_keys():
    for lengths in ((0, 300), (300, 0), (0, 0)):
        mask = create_block_mask(causal, 2, None, *lengths, "cpu")
        assert mask.kv_num_blocks.sum() == 0 and mask.kv_indices.shape == (
            2,
            1,
            -(-lengths[0] // 128),
            -(-lengths[1] // 128),
        )


def test_block_mask_is_on_the_cpu_where_torch_was_built_for_cuda_and_there_is_no_gpu(monkeypatch):
    built_for = torch.device("cuda")
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else built_for,
    )
    assert create_block_mask(causal, None, None, 300, 300).kv_indices.device.type == "cpu"
    assert block_masks.causal(300, 300).kv_indices.device.type == "cpu"


SIZES = {"mask_mod": causal, "B": None, "H": None, "Q_LEN": 300, "KV_LEN": 300, "device": "cpu"}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"mask_mod": None}, TypeError, "mask_mod: expected a function of 0-d tensors (b, h, q_idx, kv_idx), got None"),
        ({"mask_mod": lambda s, b, h, q, k: s}, TypeError, "expected a function of 0-d tensors (b, h, q_idx, kv_idx), got TypeError"),
        ({"mask_mod": lambda b, h, q, k: q - k}, TypeError, "expected a bool, True where the query sees the key, got int32; compare"),
        ({"mask_mod": lambda b, h, q, k: q > k if q > 3 else k > 3}, NotImplementedError, "expected no control flow"),
        ({"mask_mod": lambda b, h, q, k: torch.sort(q)[0] > 0}, NotImplementedError, "aten.sort.default at"),
        ({"mask_mod": lambda b, h, q, k: torch.zeros(9)[q] > 0}, (NotImplementedError, ValueError), "mask_mod"),
        ({"mask_mod": lambda b, h, q, k: SHORT[q] > 0}, ValueError, "captured tensor 0, (7,) torch.float32 on cpu: expected at least 300"),
        ({"mask_mod": lambda b, h, q, k: SHORT[q] > 0, "device": "meta"}, ValueError, "expected the device of the mask, meta; move"),
        ({"B": 0}, ValueError, "B: expected 1 to"),
        ({"H": 2.0}, TypeError, "H: expected an int, got 2.0"),
        ({"Q_LEN": -1}, ValueError, "Q_LEN: expected 0 to 16777216, got -1"),
        ({"KV_LEN": True}, TypeError, "KV_LEN: expected an int, got True"),
        ({"device": "abacus"}, ValueError, "device: expected a device of torch, got 'abacus'"),
        ({"block_size": 64}, TypeError, "unexpected keyword argument 'block_size'; did you mean BLOCK_SIZE?"),
        ({"BLOCK_SIZE": 0}, ValueError, "BLOCK_SIZE: expected an int from 1 to 2 ** 31 - 1, or a pair"),
        ({"BLOCK_SIZE": 2**31}, ValueError, "or a pair of them for queries and keys, got 2147483648"),
        ({"separate_full_blocks": torch.ones(2)}, TypeError, "separate_full_blocks: expected a bool, got (2,)"),
        ({"compute_dq_write_order": "x"}, TypeError, "compute_dq_write_order: expected a bool, got 'x'"),
        ({"BLOCK_SIZE": (64, 64, 64)}, ValueError, "BLOCK_SIZE: expected an int"),
        ({"compute_dq_write_order": True}, NotImplementedError, "compute_dq_write_order: expected False"),
    ],
)  # fmt: skip
def test_block_mask_refuses(arguments, error, words):
    with pytest.raises(error, match=re.escape(words)):
        create_block_mask(**SIZES | arguments)


SHORT = torch.zeros(7)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: block_masks.causal(-1, 3), ValueError, "seqlen_q: expected 0 to"),
        (lambda: block_masks.causal(3, 3, block_size="big"), ValueError, "block_size: expected an int from 1 to"),
        (lambda: block_masks.sliding_window(3, 3, 5), TypeError, "window_size: expected a pair (left, right)"),
        (lambda: block_masks.sliding_window(3, 3, (-2, 0)), ValueError, "window_size: expected bounds of at least 0"),
        (lambda: block_masks.prefix_lm(3, 3, -1), ValueError, "prefix: expected 0 to"),
        (lambda: block_masks.prefix_lm(3, 3, torch.ones(2)), TypeError, "prefix: expected torch.int32 or torch.int64, got torch.float32"),
        (lambda: block_masks.documents([0, 1]), TypeError, "ids: expected a torch.Tensor"),
        (lambda: block_masks.documents(torch.zeros(1, 2, 3).int()), ValueError, "ids: expected 1 or 2 dimensions"),
        (lambda: block_masks.document_ids(torch.zeros(2, 2).int(), 4), ValueError, "cu_seqlens: expected 1 dimensions"),
        (lambda: block_masks.document_ids(torch.tensor([2, 5]), 6), ValueError, "cu_seqlens: expected 0, where document 0 begins, got 2"),
        (lambda: block_masks.document_ids(torch.tensor([0, 5, 3]), 6), ValueError, "expected at least 5, where document 1 begins, got 3"),
        (lambda: block_masks.document_ids(torch.tensor([-1]), 6), ValueError, "expected 0, where document 0 begins, got -1"),
        (lambda: block_masks.prefix_lm(6, 6, torch.tensor([2, -1])), ValueError, "prefix: expected at least 0, got -1 as prefix[1]"),
        (lambda: block_masks.documents(torch.zeros(4).int(), causal="yes"), TypeError, "causal: expected a bool"),
        (lambda: block_masks.dilated(3, 3, 2, causal=1), TypeError, "causal: expected a bool"),
        (lambda: block_masks.dilated(3, 3, 0), ValueError, "dilation: expected 1 to"),
        (lambda: block_masks.block_diagonal(3, 3, 1.5), TypeError, "size: expected an int, got 1.5"),
        (lambda: mask_picture.picture(causal), TypeError, "block_mask: expected a BlockMask, got"),
        (lambda: mask_picture.picture(block_masks.causal(3, 3, device="cpu"), batch=1), ValueError, "batch: expected 0 to 0, got 1"),
    ],
)  # fmt: skip
def test_block_mask_constructors_refuse(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()


def test_block_mask_picture_as_text():
    mask = block_masks.sliding_window(500, 640, (200, 0), device="cpu")
    assert mask_picture.picture(mask).split("\n") == [
        "500 queries x 640 keys in blocks of 128 x 128: 0.0% full, 45.0% partial, 55.0% hidden",
        "▒····",
        "▒▒···",
        "▒▒▒··",
        "·▒▒▒·",
    ]
    lines = mask_picture.picture(block_masks.causal(128 * 200, 128 * 200, device="cpu")).split("\n")
    assert lines[0].endswith("a sign is 4 x 4 blocks") and len(lines) == 51
    assert lines[3] == "██▒" + "·" * 47


def test_block_mask_picture_of_lists_for_all_batch_entries_and_of_each():
    """Partial and full lists of a mask may differ in their batch entries and heads; 1 is for all."""
    each = (
        torch.tensor([[[1, 1]], [[0, 1]]]).int(),
        torch.tensor([[[[0, 1], [1, 0]]]]).int().expand(2, 1, 2, 2),
    )
    shared = torch.tensor([[[0, 1]]]).int(), torch.tensor([[[[0, 1], [0, 1]]]]).int()
    for partial, full, last in ((each, shared, ["··", "█▒"]), (shared, each, ["··", "▒█"])):
        mask = BlockMask.from_kv_blocks(*partial, *full, mask_mod=causal, seq_lengths=(256, 256))
        assert mask_picture.picture(mask, batch=1).split("\n")[1:] == last
        with pytest.raises(ValueError, match="^batch: expected 0 to 1, got 2"):
            mask_picture.picture(mask, batch=2)


@pytest.mark.parametrize("lengths", [(0, 129), (129, 0), (0, 0)], ids=str)
def test_block_mask_picture_without_blocks_has_no_signs(lengths):
    assert "\n" not in mask_picture.picture(block_masks.causal(*lengths, device="cpu"))


@pytest.mark.parametrize("lengths", [(0, 129), (129, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("separate", [True, False])
def test_block_mask_without_queries_or_keys(lengths, separate):
    table = torch.rand(2, 200) < 0.5
    functions = causal, lambda b, h, q, k: table[b, q] & table[b, k]
    for function in functions:
        mask = create_block_mask(function, 2, None, *lengths, "cpu", (16, 32), separate_full_blocks=separate)
        rows, columns = -(-lengths[0] // 16), -(-lengths[1] // 32)
        assert mask.kv_num_blocks.shape == (2, 1, rows) and not mask.kv_num_blocks.any()
        assert mask.kv_indices.shape == (2, 1, rows, columns) and mask.q_indices.shape == (
            2,
            1,
            columns,
            rows,
        )


def test_block_mask_picture_as_file(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    mask_picture.save_picture(block_masks.causal(1000, 1000, device="cpu"), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_block_mask_constructors_do_not_wait_for_the_gpu():
    lengths = lengths_on("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        constructed(*lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "make",
    [
        lambda numbers: block_masks.document_ids(numbers + 1, 9),
        lambda numbers: block_masks.prefix_tree_positions(numbers, numbers + 1, 9),
        draft_tree_mask,
    ],
    ids=["document_ids", "prefix_tree_positions", "draft_tree_mask"],
)
def test_values_are_not_read_inside_functionalize(make):
    numbers = torch.tensor([-1, 0, 1])
    assert torch.equal(torch.func.functionalize(make)(numbers), make(numbers))


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f: lambda x: torch.vmap(f)(x[None]),
    "functionalize": torch.func.functionalize,
}


@pytest.mark.parametrize(
    ("transform", "n"), zip(TRANSFORMS.values(), range(311, 315), strict=True), ids=TRANSFORMS
)
def test_masks_made_inside_torch_func_serve_outside(transform, n):
    """Lists and bounds are kept for later calls, so they may not be tensors of the transform."""

    def make():
        upper = block_masks.sliding_window(n, n, (-1, 3), device="cpu")
        return upper, create_block_mask(
            lambda b, h, q, k: (q * 5 + k) % n > 99, None, None, n, n, device="cpu"
        )

    inside = []

    def loss(x):
        inside.extend(make())
        return x.sum() + inside[0].kv_num_blocks.sum() * 0

    transform(loss)(torch.ones(3))
    q = torch.randn(1, 1, n, 8)
    for mask, other in zip(inside, make(), strict=True):
        assert torch.equal(mask.kv_indices, other.kv_indices) and type(other.kv_num_blocks) is torch.Tensor
        out = flex_attention(q, q, q, block_mask=mask)
        torch.testing.assert_close(out, flex_attention(q, q, q, mask_mod=mask.mask_mod))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_masks_of_tensors_of_a_transform_are_refused(transform):
    def loss(x):
        return block_masks.prefix_lm(9, 9, x.detach().long()).kv_num_blocks.sum() + x.sum()

    with pytest.raises(
        NotImplementedError, match="mask_mod: expected captured tensors from outside torch.func"
    ):
        transform(loss)(torch.ones(3))
