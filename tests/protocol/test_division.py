"""Division of a decode's work among CTAs, by running its kernels: each key block has one CTA, each merged item one entry.

Of one sequence: a warp that runs here is one lane, and lanes count a sequence each.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from tests.protocol.check import Program, run
from tests.protocol.launches import recorded
from tests.protocol.machine import Cta
from tl_attention import launch
from tl_attention.config.kernel_configs import MERGE_FIELDS, DecodeConfig
from tl_attention.kernels.decode.work import SegmentBox
from tl_attention.problem.options import Cache, Options

SMS = 6  # 12 CTAs with one warpgroup, 6 with two


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
        (2000, 6, 2, 12),  # two splits of each
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
