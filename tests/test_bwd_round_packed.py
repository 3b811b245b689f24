"""Rounding of dq beside the backward of packed sequences: numbers of its tiles, and on a GPU gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_bwd_apart import apart

from tl_attention import launch
from tl_attention.config.costs import costs_of
from tl_attention.config.legality import fault
from tl_attention.config.round_configs import LAST_WAVES, SIDE_WAVES
from tl_attention.launch import bwd_workspace_bytes
from tl_attention.launch.common import TABLE_NUMBERS, table_counts
from tl_attention.launch.rounding import ring_tiles
from tl_attention.problem.attn_problem import TABLE_ROWS, AttnProblem
from tl_attention.problem.options import Options
from tl_attention.testing.inputs import make_dout, make_inputs
from tl_attention.testing.numeric import check_bwd
from tl_attention.testing.shapes import Shape

LENGTHS = (300, 0, 77, 513, 129, 1, 1260), (260, 140, 77, 700, 0, 129, 1260)


def test_packed_sequences_round_with_the_schedule_dynamic_late():
    problem = AttnProblem("bfloat16", 128, 128, True, ("varlen",))
    assert fault(problem, apart("dynamic-late", rounds_dq=True)) is None
    for schedule in ("grid", "stream-K"):
        assert fault(problem, apart(schedule, rounds_dq=True)) is not None


@given(st.integers(1, 10**5), st.integers(1, 1000))
def test_a_head_of_the_longest_sequence_fits_the_ring(tiles, longest):
    ring = ring_tiles(tiles, longest, costs_of())
    assert min(longest, tiles) <= ring <= tiles
    assert ring >= min(tiles, SIDE_WAVES * 132)


def located(table, counts, key_heads, sharers, side_tiles, last_entries):
    """(sequence, key head, sharer, block, tiles before its head) per number, as sequence_order.SequenceTile.locate() finds them."""
    heads = key_heads * sharers
    for number in range(heads * sum(counts)):
        b, block = table[number // heads]
        first_entry, tiles = number // heads - block, counts[b]
        is_last = table[min(first_entry + tiles + last_entries, len(table)) - 1][1] < 0
        side_head = max(heads - (max(side_tiles // tiles, 1) if is_last else 1), 0)
        in_sequence = number - first_entry * heads
        head, block = divmod(in_sequence, tiles)
        if in_sequence >= side_head * tiles:
            block, beside = divmod(in_sequence - side_head * tiles, heads - side_head)
            head = side_head + beside
        key_head, sharer = divmod(head, sharers)
        yield b, key_head, sharer, block, first_entry * key_heads + key_head * tiles


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 700)), min_size=1, max_size=20),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 20),
)
def test_each_tile_has_one_number_and_waits_for_drawn_ones(lengths, heads, sharers, sms):
    counts = [-(-max(*both, 1) // TABLE_ROWS) for both in lengths]
    _, entries = table_counts(*map(sum, zip(*lengths, strict=True)), len(lengths), True)
    table = [(b, block) for b, count in enumerate(counts) for block in range(count)]
    slots = heads * len(table)
    table += [(0, -1)] * (entries - len(table))
    assert len(table) == entries
    ctas = min(sms, entries * heads * sharers)
    ends = SIDE_WAVES * ctas, -(-LAST_WAVES * ctas // (heads * sharers))
    found = list(located(table, counts, heads, sharers, *ends))
    assert sorted(before + block for *_, block, before in found) == [
        n // sharers for n in range(slots * sharers)
    ]
    assert len({tile[:4] for tile in found}) == slots * sharers

    head_of = {before + block: (b, head) for b, head, _, block, before in found}
    last_draw = {(b, head): number for number, (b, head, *_) in enumerate(found)}
    ring = ring_tiles(entries * heads, max(counts), costs_of(sms=sms))
    for number, (b, *_, before) in enumerate(found):
        freed = before - ring + counts[b]  # slots before it are rounded when the tile adds
        assert all(last_draw[head_of[slot]] < number for slot in range(max(before - ring, 0), freed))


def test_sums_do_not_grow_with_the_tokens():
    problem = AttnProblem("bfloat16", 128, 128, True, ("varlen",))
    config = apart("dynamic-late", rounds_dq=True)

    def sums(tokens: int, longest: int) -> int:
        """Bytes beside the log-sum-exps and deltas, the tables, and the counts of tiles."""
        sizes = 32, 16, 16, tokens, tokens
        tiles_q, tiles_k = table_counts(tokens, tokens, 32, True)
        others = 2 * 16 * TABLE_ROWS * tiles_q + TABLE_NUMBERS * (tiles_q + tiles_k) + 4 * 33 + 32 * tiles_k
        return bwd_workspace_bytes(*sizes, problem, config, costs_of(), longest=longest) - 4 * others

    slot = TABLE_ROWS * 128 * 4
    for tokens in (32768, 65536, 10**6):
        assert 0 <= sums(tokens, 8004) - costs_of().rounding.ring * 132 * slot < slot
    assert 0 <= sums(10**6, 65536) - (512 + SIDE_WAVES * 132) * slot < slot


class Packed:
    """Sequences of LENGTHS, `times` times over, with their options."""

    def __init__(self, times: int, window: tuple[int, int] = (-1, -1), **seqused: torch.Tensor):
        self.lengths_q, self.lengths_k = (lengths * times for lengths in LENGTHS)
        self.cu_q, self.cu_k = (
            torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
            for lengths in (self.lengths_q, self.lengths_k)
        )
        longest = {"max_seqlen_q": max(self.lengths_q), "max_seqlen_k": max(self.lengths_k)}
        cu_seqlens = {"cu_seqlens_q": self.cu_q, "cu_seqlens_k": self.cu_k}
        self.options = Options(window=window, **cu_seqlens, **longest, **seqused)

    def inputs(self, heads: tuple[int, int], width: int) -> list[torch.Tensor]:
        """q, k, v and dout."""
        rows = f"{sum(self.lengths_q)},{sum(self.lengths_k)}"
        shape = Shape.parse(f"1,{heads[0]},{heads[1]},{rows},{width},{width},full")
        return [x[0] for x in (*make_inputs(shape, torch.bfloat16), make_dout(shape, torch.bfloat16))]

    def gradients(self, q, k, v, dout, causal: bool) -> tuple[torch.Tensor, ...]:
        out, lse = launch.forward(q, k, v, 0.1, causal, False, options=self.options)
        config = apart("dynamic-late", q.shape[-1], rounds_dq=True)
        return tuple(
            launch.backward(
                dout, q, k, v, out, lse, 0.1, causal, False, config=config, options=self.options
            ).values()
        )

    def per_query(self, numbers: torch.Tensor) -> torch.Tensor:
        """The number of the sequence of each query."""
        return torch.repeat_interleave(numbers, torch.tensor(self.lengths_q, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("heads", [(16, 16), (40, 40), (8, 2)])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("times", [1, 7])
def test_packed_sequences_match_the_reference(times, used, heads, width, causal):
    seqused = {}
    if used:
        halves = [n // 2 for n in LENGTHS[0] * times]
        seqused["seqused_q"] = torch.tensor(halves, dtype=torch.int32, device="cuda")
    packed = Packed(times, **seqused)
    q, k, v, dout = packed.inputs(heads, width)
    grads = packed.gradients(q, k, v, dout, causal)
    if used:  # rows that are not written
        row = torch.arange(len(q), device="cuda") - packed.per_query(packed.cu_q[:-1])
        grads[0][row >= packed.per_query(seqused["seqused_q"])] = 0
    given = {"cu_seqlens_q": packed.cu_q, "cu_seqlens_k": packed.cu_k, **seqused}
    verdict = check_bwd(grads, dout, q, k, v, softmax_scale=0.1, causal=causal, **given)
    assert verdict.ok, verdict.text


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("heads", [(16, 16), (8, 2)])
@pytest.mark.parametrize("window", [(100, 30), (0, 0), (513, 0), (-1, 20)])
def test_windows_of_packed_sequences_match_the_reference(window, heads, width):
    packed = Packed(2, window)
    q, k, v, dout = packed.inputs(heads, width)
    grads = packed.gradients(q, k, v, dout, False)
    given = {"cu_seqlens_q": packed.cu_q, "cu_seqlens_k": packed.cu_k, "window": window}
    verdict = check_bwd(grads, dout, q, k, v, softmax_scale=0.1, causal=False, **given)
    assert verdict.ok, verdict.text


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_not_a_number_stays_in_its_sequence(width):
    """Steps add NaN to rows behind the last query, too, where a sequence in the same slot later has queries."""
    packed = Packed(7)
    q, k, v, dout = packed.inputs((40, 40), width)
    for begin, end in list(itertools.pairwise(packed.cu_k.tolist()))[:: len(LENGTHS[0])]:
        k[begin:end] = torch.nan
    dq = packed.gradients(q, k, v, dout, False)[0]
    number = packed.per_query(torch.arange(len(packed.lengths_q), device="cuda"))
    spoiled = number % len(LENGTHS[0]) == 0
    assert dq[spoiled].isnan().all()
    assert dq[~spoiled].isfinite().all()
