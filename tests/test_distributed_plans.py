"""Layouts and plans of attention over several ranks: which queries meet which keys, without any process group."""

from __future__ import annotations

import contextlib
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tl_attention import distributed, flash_attn_func, flash_attn_varlen_func
from tl_attention.distributed import functions, roll, shards
from tl_attention.distributed.choice import choose, remote_rows
from tl_attention.distributed.gather import gather_plan
from tl_attention.distributed.group import Ranks
from tl_attention.distributed.layout import (
    Layout,
    balanced_layout,
    document_positions,
    named_layout,
    shard_documents,
    work_of_ranks,
)
from tl_attention.distributed.pieces import ALL, CAUSAL, Mask, Needs, cumulative
from tl_attention.distributed.ring import ring_plan

WINDOWS = (ALL, CAUSAL, (5, 0), (0, 0), (4, 3), (-1, 2), (3, -1))
LAYOUTS = ("zigzag", "contiguous", "balanced")


def random_documents(generator, total):
    """Cumulative lengths of 1 to 6 documents, some of them empty."""
    ends = sorted(generator.randrange(total + 1) for _ in range(generator.randrange(6)))
    return (0, *ends, total)


def layout_by_name(name, documents, world, window):
    if name == "balanced":
        return balanced_layout(documents, world, window)
    return named_layout(name, documents[-1], world)


def visible(mask):
    """Mask of all queries and keys, bool [total, total]."""
    total = mask.documents[-1]
    token = torch.arange(total)
    document = torch.tensor([mask.document_at(int(t)) for t in token])
    left, right = (total if n == -1 else n for n in mask.window)
    ahead = token - token[:, None]
    return (document == document[:, None]) & (ahead <= right) & (ahead >= -left)


def add_call(seen, call, query_tokens, key_tokens):
    """Count the pairs that plain attention, aligned bottom-right, computes in a call."""
    rows, keys = call.q[0], call.k[0]
    for length_q, length_k in zip(call.lengths_q, call.lengths_k, strict=True):
        left, right = (length_q + length_k if n == -1 else n for n in call.window)
        diagonal = torch.arange(length_q)[:, None] + length_k - length_q
        key = torch.arange(length_k)
        inside = (key <= diagonal + right) & (key >= diagonal - left)
        q, k = query_tokens[rows : rows + length_q], key_tokens[keys : keys + length_k]
        seen[q[:, None], k] += inside.int()
        rows, keys = rows + length_q, keys + length_k
    assert (rows, keys) == (call.q[1], call.k[1])
    assert min(call.window) >= -1


def gathered_tokens(layout, mask, rank):
    """Token in each row of a rank's buffer, filled as the exchange does."""
    plan = gather_plan(layout, rank, mask)
    arrived = []
    for peer in range(layout.world):
        sent = [part for part in gather_plan(layout, peer, mask).sends if part.peer == rank]
        received = [part for part in plan.receives if part.peer == peer]
        assert [x.stop - x.start for x in sent] == [x.stop - x.start for x in received]
        arrived += [layout.tokens(peer)[part.start : part.stop] for part in sent]
    assert not plan.silent or not (plan.sends or plan.receives)
    rows = [origin.of(layout.tokens(rank), arrived) for origin in plan.buffer]
    return torch.cat(rows) if rows else torch.arange(0)


def problems():
    generator = random.Random(5)
    for world, name, window in itertools.product((2, 3, 5), LAYOUTS, WINDOWS):
        for total in (generator.randrange(1, 60), 40):
            documents = random_documents(generator, total)
            yield layout_by_name(name, documents, world, window), Mask(documents, window)


def test_plans_layouts_hold_each_token_once():
    for layout, mask in problems():
        tokens = torch.cat([layout.tokens(rank) for rank in range(layout.world)])
        assert tokens.sort().values.tolist() == list(range(mask.documents[-1]))
        sizes = [layout.rows(rank) for rank in range(layout.world)]
        assert max(sizes) - min(sizes) <= 2, sizes
        assert [token for x in layout.segments for token in range(x.start, x.stop)] == list(
            range(layout.total)
        )


def test_plans_gather_sees_each_visible_pair_once():
    for layout, mask in problems():
        seen = torch.zeros(layout.total, layout.total, dtype=torch.int32)
        for rank in range(layout.world):
            plan = gather_plan(layout, rank, mask)
            keys = gathered_tokens(layout, mask, rank)
            for call in plan.calls:
                add_call(seen, call, layout.tokens(rank), keys)
        assert torch.equal(seen, visible(mask).int()), (layout, mask)


def test_plans_ring_sees_each_visible_pair_once():
    for layout, mask in problems():
        seen = torch.zeros(layout.total, layout.total, dtype=torch.int32)
        for rank in range(layout.world):
            for number, step in enumerate(ring_plan(layout, rank, mask)):
                keys = layout.tokens(step.source)[step.rows[0] : step.rows[1]]
                sender = ring_plan(layout, step.source, mask)[number]
                assert (sender.target, sender.target_rows) == (rank, step.rows)
                for call in step.calls:
                    add_call(seen, call, layout.tokens(rank), keys)
        assert torch.equal(seen, visible(mask).int()), (layout, mask)


def test_plans_window_skips_ranks_out_of_reach():
    layout, mask = named_layout("contiguous", 800, 8), Mask((0, 800), (50, 0))
    plan = gather_plan(layout, 5, mask)
    assert [(part.peer, part.stop - part.start) for part in plan.receives] == [(4, 50)]
    assert [(part.peer, part.start, part.stop) for part in plan.sends] == [(6, 50, 100)]
    assert [step.rows for step in ring_plan(layout, 5, mask)] == [(0, 100), (50, 100), *[(0, 0)] * 6]
    assert remote_rows(layout, mask) == 50


def test_plans_zigzag_causal_has_equal_work_and_few_calls():
    layout, mask = named_layout("zigzag", 4096, 4), Mask((0, 4096), CAUSAL)
    work = work_of_ranks(layout, mask.documents, CAUSAL)
    assert max(work) - min(work) <= 0.001 * max(work) and sum(work) == 4096 * 4097 // 2
    calls = [len(gather_plan(layout, rank, mask).calls) for rank in range(4)]
    assert calls == [2, 2, 2, 1]  # the chunks of the last rank touch
    assert [len(step.calls) for step in ring_plan(layout, 1, mask)] == [2, 1, 1, 1]


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("window", [ALL, CAUSAL, (500, 0)], ids=str)
def test_plans_balanced_layout_divides_work_of_any_documents(world, window):
    generator = random.Random(world)
    for _ in range(5):
        ends = [0]
        while ends[-1] < 16384:
            ends.append(min(16384, ends[-1] + int(generator.lognormvariate(6, 1.5)) + 1))
        documents = tuple(ends)
        layout = balanced_layout(documents, world, window)
        sizes = [layout.rows(rank) for rank in range(world)]
        assert max(sizes) - min(sizes) <= 1
        work = work_of_ranks(layout, documents, window)
        assert max(work) <= 1.15 * sum(work) / world + 64 * 16384 / world / 4, work


def test_plans_positions_and_lengths_of_a_shard():
    layout, documents = Layout((((0, 3), (7, 9)), ((3, 7),))), (0, 2, 2, 8, 9)
    assert document_positions(layout, 0, documents).tolist() == [0, 1, 0, 5, 0]
    assert document_positions(layout, 1, documents).tolist() == [1, 2, 3, 4]
    assert shard_documents(layout, 0, documents) == [0, 2, 4, 5]
    assert shard_documents(layout, 1, documents) == [0, 4]


def test_plans_are_made_on_the_cpu_under_any_default_device():
    documents = 0, 5, 16
    with torch.device("meta"):
        layout = balanced_layout.__wrapped__(documents, 2, CAUSAL)
        found = document_positions(layout, 0, documents)
        (lengths,) = cumulative(((5, 11),), torch.device("cpu"))
    assert layout == balanced_layout(documents, 2, CAUSAL)
    assert found.tolist() == document_positions(layout, 0, documents).tolist()
    assert lengths.tolist() == [*documents]


def test_plans_choice_follows_the_bytes_of_gathered_keys():
    layout, mask = named_layout("zigzag", 1 << 16, 2), Mask((0, 1 << 16), CAUSAL)
    row_bytes = 8 * (128 + 128) * 2
    assert choose(layout, mask, row_bytes).method == "gather"
    assert remote_rows(layout, mask) == 1 << 15
    million = named_layout("zigzag", 1 << 22, 2)
    ring = choose(million, Mask((0, 1 << 22), CAUSAL), row_bytes)
    assert ring.method == "ring" and ring.reason == "gathered keys and values take 16384 MiB, ring from 8192"


@pytest.mark.filterwarnings("ignore:.*CPU")
def test_plans_one_rank_makes_the_plain_call():
    q, k, v = (torch.randn(1, 9, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    out, lse, _ = distributed.attention(q, k, v, causal=True, return_attn_probs=True)
    expected, expected_lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    found = distributed.attention(q, k, v, causal=True, return_max_logits=True)
    assert all(map(torch.equal, found, flash_attn_func(q, k, v, causal=True, return_max_logits=True)))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    out = distributed.attention(q[0], k[0], v[0], causal=True, cu_seqlens=[0, 4, 9])
    assert torch.equal(out, flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 5, 5, causal=True))
    assert torch.equal(distributed.shard(q, dim=1), q) and torch.equal(distributed.unshard(q, dim=1), q)
    assert distributed.positions(cu_seqlens=cu).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert distributed.shard_cu_seqlens(cu).tolist() == [0, 4, 9]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"method": "rings"}, ValueError, "method: expected one of 'auto', .* got 'rings'"),
        ({"method": "ulysses"}, ValueError, "method: expected one of 'auto', 'ring', 'gather', got 'ulysses'"),
        ({"layout": "zig"}, ValueError, "layout: expected 'zigzag' or 'contiguous' or the result"),
        ({"seqlen": 10}, ValueError, "q: expected the 10 tokens .* got 9"),
        ({"seqlen": 9.0}, TypeError, "seqlen: expected an int or None, got 9.0"),
        ({"group": 3}, TypeError, "group: expected a ProcessGroup"),
        ({"cu_seqlens": [1, 9]}, ValueError, "cu_seqlens: expected at least two numbers that start at 0"),
        ({"cu_seqlens": [0, 5, 4]}, ValueError, "cu_seqlens: expected .* do not decrease"),
        ({"cu_seqlens": [0, 9.0]}, TypeError, "cu_seqlens: expected ints"),
        ({"cu_seqlens": 3}, TypeError, "cu_seqlens: expected a tensor or a list of ints, got 3"),
        ({"cu_seqlens": torch.zeros(2, device="meta")}, ValueError, "cu_seqlens: expected a tensor on the CPU"),
        ({"return_max_logits": 1}, TypeError, "^return_max_logits: expected a bool, got 1"),
        ({"max_logits": True}, TypeError, r"^attention.* 'max_logits'; did you mean return_max_logits\?"),
        ({"cu_seqlens": FakeTensorMode().from_tensor(torch.tensor([0, 9]))}, ValueError, "cu_seqlens: expected .* cannot be read here"),
        ({"layout": named_layout("zigzag", 9, 2)}, ValueError, "layout: expected one of 9 tokens on 1 ranks"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)  # fmt: skip
def test_plans_errors_name_the_argument(arguments, error, words):
    q = torch.randn(1, 9, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(error, match=words):
        distributed.attention(q, q, q, **{"group": None, **arguments})


@pytest.mark.parametrize("packed", [False, True])
def test_plans_one_rank_takes_the_tokens_of_q_alone(packed):
    q, k = (torch.randn(1, rows, 4, 16, dtype=torch.bfloat16) for rows in (9, 6))
    options = {"cu_seqlens": [0, 4, 9]} if packed else {}
    q, k = (q[0], k[0]) if packed else (q, k)
    with pytest.raises(ValueError, match="^k, v: expected the tokens of q, 9, got 6; cross attention"):
        distributed.attention(q, k, k, **options)
    with pytest.raises(ValueError, match="v"):
        distributed.attention(q, q, k, **options)


@pytest.mark.parametrize(("options", "dims"), [({}, 4), ({"cu_seqlens": [0, 4]}, 3)])
def test_plans_one_rank_names_a_q_of_too_few_dimensions(options, dims):
    for x in (torch.randn(4, 16, dtype=torch.bfloat16), torch.randn(16, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=f"^q: expected {dims} dimensions"):
            distributed.attention(x, x, x, **options)


def test_plans_helpers_name_the_argument():
    with pytest.raises(ValueError, match="seqlen: expected the tokens of the whole sequence"):
        distributed.positions()
    with pytest.raises(ValueError, match="seqlen: expected None or the end of cu_seqlens, 4, got 5"):
        distributed.positions(seqlen=5, cu_seqlens=[0, 4])
    for helper, dim in ((distributed.shard, 1), (distributed.unshard, -2), (distributed.shard, True)):
        with pytest.raises(ValueError, match=f"dim: expected a dimension of x, -1 to 0, got {dim}"):
            helper(torch.zeros(4), dim=dim)
    with pytest.raises(ValueError, match="x: expected the 5 tokens of rank 0"):
        distributed.unshard(torch.zeros(4), seqlen=5)
    with pytest.raises(TypeError, match="causal: expected a bool"):
        distributed.make_layout(seqlen=4, causal=1)
    assert shards.layout_of("zigzag", 8, 2).ranges == (((0, 2), (6, 8)), ((2, 6),))


def test_plans_give_positions_to_calls_that_need_them():
    documents = (0, 4, 20, 24, 32)
    layout, mask = named_layout("contiguous", 32, 2), Mask(documents, CAUSAL)
    # Rank 1 has tokens 16 to 32: the end of document 1, and documents 2 and 3
    plain = gather_plan(layout, 1, mask).calls
    assert [call.documents for call in plain] == [(1, 2, 3)]
    distances = gather_plan(layout, 1, mask, Needs(distances=True)).calls
    assert [(call.documents, call.place) for call in distances] == [((1, 2, 3), None)]
    end, rest = gather_plan(layout, 1, mask, Needs(positions=True)).calls
    assert (end.documents, end.place, end.window) == ((1,), (12, 0), CAUSAL)
    assert (rest.place, rest.lengths_q, rest.lengths_k) == (None, (0, 0, 4, 8), (0, 0, 4, 8))
    # Keys of rank 0 alone end before the queries of rank 1
    (step,) = [step for step in ring_plan(layout, 1, mask, Needs(distances=True)) if step.source == 0]
    assert [(call.place, call.window) for call in step.calls] == [((12, 0), CAUSAL)]
    (step,) = [step for step in ring_plan(layout, 1, mask) if step.source == 0]
    assert [(call.place, call.window) for call in step.calls] == [(None, ALL)]


@pytest.mark.parametrize(
    ("backends", "bound", "device", "current"),
    [
        (["cuda"], None, "cuda:3", "cuda:3"),
        (["cuda"], "cuda:1", "cuda:3", "cuda:3"),
        (["cuda"], "cuda:1", None, "cuda:1"),
        (["cuda"], "cuda:1", "cpu", "cuda:1"),
        (["cuda"], None, None, None),
        (["cpu", "cuda"], None, "cuda:3", None),
        (["cpu"], None, "cpu", None),
    ],
)
def test_objects_of_ranks_travel_by_the_gpu_of_the_tensors(monkeypatch, backends, bound, device, current):
    # Without torch.cuda.set_device the current GPU is the same on all ranks of a machine, where NCCL refuses or hangs
    entered, used = [], []

    @contextlib.contextmanager
    def on_device(device):
        entered.append(str(device))
        yield
        entered.pop()

    def all_gather_object(found, x, group):
        used.append(entered[-1] if entered else None)
        found[:] = [x] * len(found)

    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(roll.dist, "all_gather_object", all_gather_object)
    group = SimpleNamespace(
        _device_types=[torch.device(x) for x in backends], bound_device_id=bound and torch.device(bound)
    )
    ranks = SimpleNamespace(group=group, world=2)
    assert roll.gathered(ranks, "x", device and torch.device(device)) == ["x", "x"] and used == [current]


def test_ranks_take_a_strided_state_of_dropout_contiguous(monkeypatch):
    """Kernels read its memory."""
    seen = []

    def forward(q, k, v, given):
        seen.append(given.rng_state)
        return q, None, None, []

    monkeypatch.setattr(functions, "ranks_of", lambda group: Ranks(None, 0, 2))
    monkeypatch.setattr(functions, "_prepared", lambda *_: SimpleNamespace(training=False, forward=forward))
    q, state = torch.zeros(1, 8, 2, 16), torch.tensor([5, 0, 7, 0])[::2]
    distributed.attention(q, q, q, dropout_p=0.5, rng_state=state)
    (found,) = seen
    assert found.is_contiguous() and found.tolist() == [5, 7]
