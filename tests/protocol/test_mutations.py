"""Planted faults are found, in a forward, a backward and a decode; those that are not are explained.

A run of the tests plants a sample, which changes from day to day. With --all-kernels it plants all.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

import pytest

from .calls import Draw, call_of, kinds
from .check import Program
from .launches import Launch, recorded
from .mutations import is_found, mutations, reached_lines

EVENTS = 200_000  # of a run that does not end
SAMPLE = 24  # faults per kernel in a run of the tests


@dataclass(frozen=True)
class Case:
    """A kernel, the draws that it runs, and why some faults are not found: pattern of the fault's name -> reason."""

    kind: str
    draws: tuple[Draw, ...]
    explained: dict[str, str]


CASES = {
    "forward": Case(
        "fwd bf16 d128 causal, 128x128 dynamic q2 ping-pong hold-max",
        (
            Draw(((100, 100),), 5, 5, sms=2),
            Draw(((200, 350),), 3, 3, sms=2),
            Draw(((64, 700),), 2, 1, sms=1),
            Draw(((130, 90),), 2, 1, sms=1, scale=-0.1),
            Draw(((300, 180),), 5, 5, sms=2),
        ),
        {
            r"wait: yield 'wait', 'Q_empty', .*kernel.py:\d+ produce": "`done` of the last two turns implies it",
            r"other slot of wait: yield 'wait', 'done', \(\(turn_\d+ - 2": "that of the turn after implies it, and comes in time",
            r"no store: yield 'store', 'flags', .*1,\), 0$": "a tile is recomputed once more than is needed",
            r"no store: yield 'store', 'flags', .*1,\), 1$": "a tile that overflows is not recomputed: wrong data",
            r"no wait: yield 'wait', '[KV]_full', .*skip_last": "it is released unread",
            r"no sync: .*wait_for_queries": "the wait for the turn syncs the warpgroup, too",
            r"no wait_puts: .*kernel.py:\d+ attend": "orders two stores to global memory, whose data is not modelled",
            r"a step too few in warpgroup 0: for \w+ in range\(0, 0 \+ steps_\d+\)": "only warpgroup 1 has steps to skip",
        },
    ),
    "backward": Case(
        "bwd bf16 d128 causal, dq+dk+dv 64x128x2x2 reuse apart stream-K rounds-dq",
        (
            Draw(((100, 150),), 3, 1, sms=2),
            Draw(((190, 260),), 3, 1, sms=2),
            Draw(((64, 64),), 3, 3, batch=2, sms=1),
        ),
        {
            r"no wait: yield 'wait', 'dO_empty'": "`Q_empty` of the same step implies it: a slot of Q is released after that of dO",
            r"arrives early: yield 'arrive', 'dO_empty'": "the producer fills dO after Q, whose release comes later",
            r"wait: yield 'wait', 'K_empty'": "the warps of dq release both slots at once; only products of no use still read them",
            r"no wait: yield 'wait', 'key_tile_box_loaded'": "delays the draw of a tile, and orders nothing",
            r"wait: yield 'wait', 'key_tile_box_empty', .*schedule": "`V_empty` of the turn implies it: V is released after the box",
            r"no count: .*load.py:\d+ schedule": "a part without queries: no small problem has one",
            r"wait: yield 'wait', 'K_full', .*apart.py": "`dS_full` implies it: who writes dS' has waited for K",
            r"no wait_puts: .*/round.py:\d+ report": "orders additions in global memory, whose data is not modelled",
            r"no wait_puts: .*apart.py:\d+ add_dq": "the count of a tile waits before",
            r"no products: products\(0\)  # backward/by_keys.py:\d+ differentiate": "for the compiler; the loop waits before it uses S'",
            r"product of another slot of Q_tiles: .*start_scores": "reads the slot of the step before, which is filled: wrong data",
        },
    ),
    "decode": Case(
        "decode bf16 d128 full window, decode 1x64x2x2",
        (
            Draw(tuple((1, n) for n in (300, 40, 900, 64, 20, 640, 5, 130)), 8, 4, window=(5000, 0), sms=1),
            Draw(((1, 700),), 8, 1, window=(5000, 0), sms=1),
            Draw(((1, 40), (1, 20), (1, 60)), 4, 1, window=(5000, 0), sms=1),
        ),
        {
            r"no store: yield 'store', 'segment_box_values', \(\(turn_2 % 2\), [1-9]": "the last segment, of 0 steps, has no other field",
            r"other slot of (wait|arrive): .*'segment_box_empty'": "each other turn waits for one more, which implies the rest",
            r"no put_number: .*'Merges'": "the work of the kernel that merges, not of this one",
        },
    ),
}


def launches_of(case: Case) -> list[Launch]:
    kind = next(kind for kind in kinds(False) if kind.name == case.kind)
    kernel = kind.kernels[0]
    return [
        x
        for draw in case.draws
        for x in recorded(call_of(kind, draw), draw.sms)
        if (x.problem, x.config) == kernel
    ]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_planted_faults_are_found(name, request):
    case, launches = CASES[name], launches_of(CASES[name])
    program = Program(launches[0].problem, launches[0].config)
    reached = reached_lines(program, launches)
    planted = list(mutations(program, reached))
    explained = {
        x.name: why for x in planted for pattern, why in case.explained.items() if re.search(pattern, x.name)
    }
    every = request.config.getoption("--all-kernels")
    chosen = [x for x in planted if x.name not in explained]
    if not every:
        first, step = datetime.date.today().toordinal(), max(len(chosen) // SAMPLE, 1)
        chosen = chosen[first % step :: step]
    left = [x.name for x in chosen if not is_found(program, x, launches, EVENTS)]
    not_reached = [x.name for x in planted if x.line >= 0 and x.line not in reached]
    assert not left, "\n".join(left)
    assert set(not_reached) <= explained.keys(), "\n".join(not_reached)
    if every:
        for pattern in case.explained:
            matches = [x for x in planted if re.search(pattern, x.name)]
            assert not all(x.line in reached and is_found(program, x, launches, EVENTS) for x in matches), (
                pattern
            )
    print(
        f"{name}: {len(planted)} faults, {len(chosen) - len(left)} of {len(chosen)} found, {len(explained)} explained"
    )
