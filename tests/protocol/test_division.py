"""Division of a decode's work among CTAs: each key block has one CTA, each merged item one entry.

Of one sequence by running the kernels, whose warps are one lane here, and lanes count a sequence each; of batches by running work.py alone
in 32 lanes.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import random
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.protocol.check import Program, run
from tests.protocol.launches import recorded
from tests.protocol.machine import Cta
from tl_attention import launch
from tl_attention.config.kernel_configs import MERGE_FIELDS, DecodeConfig
from tl_attention.kernels.decode import work
from tl_attention.kernels.decode.work import SegmentBox
from tl_attention.problem.options import Cache, Options

SMS = 6  # 12 CTAs of one warpgroup, but 6 for at most 6 items; 6 of two warpgroups


class _Words(dict):
    """Integers in the shared memory of a CTA, with the values that its mailbox of segments had."""

    def __init__(self) -> None:
        self.posted: list[tuple[tuple, int]] = []

    def __setitem__(self, key: tuple, value: object) -> None:
        name, where = key
        if name.startswith("segment_box"):
            self.posted.append((where, value))
        super().__setitem__(key, value)


def segments_of(length: int, heads_kv: int, queries: int, window: tuple[int, int], monkeypatch) -> tuple:
    """(launch, segments of each CTA as dicts by field, numbers written to Merges) of a decode with 8 query heads per key head."""
    q = torch.zeros(1, queries, 8 * heads_kv, 128, dtype=torch.bfloat16)
    k = torch.zeros(1, max(length, 1), heads_kv, 128, dtype=torch.bfloat16)
    cache = Cache(k, k.clone(), torch.tensor([length], dtype=torch.int32))
    decode, *_ = recorded(lambda: launch.attend_cache(q, cache, 1.0, Options(window=window)), SMS)
    assert isinstance(decode.config, DecodeConfig)
    program = _program(decode.problem, decode.config)
    kernel, memories, create = program.bind(decode.arguments), {}, Cta.__init__

    def noting(self, machine, kernel, block) -> None:
        create(self, machine, kernel, block)
        self.words = memories[tuple(block.values())] = _Words()

    with monkeypatch.context() as patch:
        patch.setattr(Cta, "__init__", noting)
        assert run(kernel, program.grid(kernel), 1, "random", "last", "never", 0) is None
    found = []
    for _, memory in sorted(memories.items()):
        posts, fields = memory.posted, len(SegmentBox.FIELDS)
        values = [value for _, value in posts]
        assert len(posts) % fields == 0
        found.append(
            [
                dict(zip(SegmentBox.FIELDS, values[i : i + fields], strict=True))
                for i in range(0, len(posts), fields)
            ]
        )
    return decode, found, kernel.tensors["Merges"].numbers


_programs: dict[tuple, Program] = {}


def _program(problem: object, config: object) -> Program:
    if (problem, config) not in _programs:
        _programs[problem, config] = Program(problem, config)
    return _programs[problem, config]


@pytest.mark.parametrize("queries", [2, 16], ids=["one-warpgroup", "two-warpgroups"])
@pytest.mark.parametrize("window", [(-1, 0), (200, 0)], ids=["causal", "window"])
@pytest.mark.parametrize("length", [0, 300, 1500, 3001])
@pytest.mark.parametrize("heads_kv", [1, 2, 5, 6, 13, 20])
def test_each_key_block_has_one_cta(heads_kv, length, window, queries, monkeypatch):
    decode, ctas, entries = segments_of(length, heads_kv, queries, window, monkeypatch)
    blocks, partials, slots = defaultdict(list), defaultdict(dict), set()
    entry_per_cta = heads_kv > len(ctas)
    for cta, (*segments, end) in enumerate(ctas):
        assert end["steps"] == 0
        for x in segments:
            assert (x["b"], x["m_block"], x["length"]) == (0, 0, length)
            blocks[x["kv_head"]] += range(x["start_block"], x["start_block"] + x["steps"])
            if x["parts"] > 1:
                slot = x["first_slot"] + x["part"]
                assert slot not in slots
                slots.add(slot)
                partials[x["kv_head"]][x["part"]] = slot
            first = cta if entry_per_cta else x["kv_head"]
            assert x["entry"] == (-1 if x["part"] or (entry_per_cta and x["parts"] == 1) else first)
    block_N = decode.config.block_N
    first = max(length - queries - window[0], 0) // block_N if window[0] >= 0 else 0
    last = max(-(-length // block_N), first + 1)  # one masked block without keys
    assert {head: sorted(found) for head, found in blocks.items()} == {
        head: list(range(first, last)) for head in range(heads_kv)
    }
    merged = {}
    for number in range(min(heads_kv, len(ctas))):
        entry = {name: entries[number, i] for i, name in enumerate(MERGE_FIELDS) if (number, i) in entries}
        if entry["parts"] > 1:
            assert entry["kv_head"] not in merged
            merged[entry["kv_head"]] = list(range(entry["first_slot"], entry["first_slot"] + entry["parts"]))
    assert merged == {head: [slot for _, slot in sorted(x.items())] for head, x in partials.items()}


@pytest.mark.parametrize(
    ("length", "heads_kv", "queries", "wanted"),
    [
        (2000, 12, 2, 0),  # 12 items for 12 CTAs
        (2000, 3, 2, 6),  # two splits of each for 6 CTAs, as an SM has one of few items
        (2000, 6, 16, 0),  # 6 items for 6 CTAs
        (300, 40, 2, 0),
        (9000, 8, 2, 16),  # by key blocks
    ],
)
def test_partials_are_as_few_as_an_even_division_has(length, heads_kv, queries, wanted, monkeypatch):
    _, ctas, _ = segments_of(length, heads_kv, queries, (-1, 0), monkeypatch)
    found = [x for segments in ctas for x in segments if x["steps"]]
    assert sum(x["parts"] > 1 for x in found) == wanted
    steps = [sum(x["steps"] for x in segments) for segments in ctas]
    assert max(steps) - sum(steps) / len(steps) <= 4


class _Warp:
    """What work.py uses of TileLang, for 32 threads of Python that are the lanes of a warp."""

    def __init__(self) -> None:
        self.here, self.values, self.barrier = threading.local(), [0] * 32, threading.Barrier(32)

    def run(self, lane_code: Callable[[], None]) -> None:
        """Run a function in all lanes; a failure of one ends the others."""

        def run_lane(lane: int) -> None:
            self.here.lane = lane
            try:
                lane_code()
            except BaseException:
                self.barrier.abort()
                raise

        with concurrent.futures.ThreadPoolExecutor(32) as lanes:
            for lane in [lanes.submit(run_lane, lane) for lane in range(32)]:
                lane.result()

    def _all(self, value: int) -> list[int]:
        self.values[self.here.lane] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found

    meta_class = inline = macro = staticmethod(lambda x: x)
    max, min = staticmethod(max), staticmethod(min)
    alloc_var = staticmethod(lambda dtype, init: [init])
    unroll = staticmethod(lambda steps, unroll_factor: range(steps))
    truncdiv = staticmethod(lambda a, b: int(a / b))
    ceildiv = staticmethod(lambda a, b: -(-a // b))
    if_then_else = staticmethod(lambda condition, a, b: a if condition else b)

    def get_thread_binding(self) -> int:
        return self.here.lane

    def warp_reduce_sum(self, value: int) -> int:
        return sum(self._all(value))

    def warp_reduce_max(self, value: int) -> int:
        return max(self._all(value))

    def shfl_sync(self, value: int, lane: int) -> int:
        return self._all(value)[lane]

    def shfl_up(self, value: int, distance: int) -> int:
        lane = self.here.lane
        return self._all(value)[lane - distance if lane >= distance else lane]


def segments_of_batch(sizes: dict[str, int], lengths: Sequence[int], ctas: int) -> list[list[dict]]:
    """Segments of each CTA, as dicts by field, of a batch: work.py, run lane by lane."""
    warp = _Warp()
    source = Path(work.__file__).read_text().replace("import tilelang.language as T\n", "")
    code = {"__name__": work.__name__, "T": warp}
    with pytest.MonkeyPatch.context() as patch:
        module = types.ModuleType(work.__name__)
        patch.setitem(sys.modules, work.__name__, module)  # where dataclass() looks for it
        exec(compile(source, work.__file__, "exec"), code)
    ranges = code["KeyRanges"](lengths, [0], [0], work.HAS_SEQLENS, 0, 0, 10**9)
    found: list[list[dict]] = [[] for _ in range(ctas)]

    def divide() -> None:
        for cta in range(ctas):
            share = code["WorkShare"](ranges, code["WorkSizes"](**sizes, batch=len(lengths), ctas=ctas))
            share.start(cta)
            while share.has_next:
                share.next_segment()
                if share.steps[0] > 0 and warp.here.lane == 0:
                    found[cta].append({name: getattr(share, name)[0] for name in SegmentBox.FIELDS})

    warp.run(divide)
    return found


@pytest.mark.timeout(100)  # a range that never ends
@pytest.mark.parametrize("seed", range(24))
def test_each_key_block_of_a_batch_has_one_cta(seed):
    chance = random.Random(seed)
    batch, heads_kv = chance.choice((1, 3, 9, 31, 40, 70)), chance.choice((1, 2, 5))
    m_blocks = chance.choice((1, 2))
    ctas, block_N, left = chance.choice((6, 12, 13)), chance.choice((64, 128)), chance.choice((300, 2**30))
    kind, same = chance.choice(("equal", "ragged", "ragged", "one long")), chance.randint(1, 3000)
    lengths = [
        same if kind == "equal" else chance.choice((0, 1, chance.randint(1, 900))) for _ in range(batch)
    ]
    if kind == "one long":
        lengths[chance.randrange(batch)] = 20_000
    items, rule = batch * heads_kv * m_blocks, chance.choice((0, 0, 0, 0, 0, -1, -5, 3))
    entry_per_cta = rule == 0 and items > ctas
    sizes = {
        "block_N": block_N,
        "item_blocks": chance.randint(0, 6),
        "seqlen_q": 2,
        "items_per_sequence": heads_kv * m_blocks,
        "m_blocks": m_blocks,
        "left": left,
        "split_rule": rule,
        "entry_per_cta": entry_per_cta,
    }
    blocks, parts, slots, entries = defaultdict(list), defaultdict(dict), set(), {}
    for segments in segments_of_batch(sizes, lengths, ctas):
        for x in segments:
            item = x["b"], x["kv_head"], x["m_block"]
            blocks[item] += range(x["start_block"], x["start_block"] + x["steps"])
            assert x["part"] not in parts[item] and x["part"] < x["parts"]
            parts[item][x["part"]] = x["parts"]
            if x["parts"] > 1:
                slot = x["first_slot"] + x["part"]
                assert slot not in slots and (rule or slot < ctas + items)
                slots.add(slot)
            if x["entry"] >= 0:
                assert x["part"] == 0 and x["entry"] not in entries
                assert x["entry"] < (ctas if entry_per_cta else items)
                entries[x["entry"]] = item
    for b, length in enumerate(lengths):
        first = max(length - 2 - left, 0) // block_N
        wanted = list(range(first, max(-(-length // block_N), first + 1)))  # one masked block without keys
        for kv_head, m_block in itertools.product(range(heads_kv), range(m_blocks)):
            item = b, kv_head, m_block
            assert sorted(blocks.pop(item)) == wanted
            count = len(parts[item])
            assert parts[item] == dict.fromkeys(range(count), count)
    assert not blocks
    merged = {item for item, of in parts.items() if len(of) > 1}
    assert merged <= set(entries.values()) and (entry_per_cta or len(entries) == items)
