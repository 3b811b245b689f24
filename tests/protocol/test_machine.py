"""The machine reports each kind of fault in the smallest kernel that has it."""

from __future__ import annotations

import textwrap

import pytest
import torch

from .check import Program, run
from .machine import Kernel, Numbers

pytestmark = pytest.mark.timeout(20)
LOAD = "yield 'load', 'full', {0}, 64, True, ('X', {0})"


def faults(*roles: str, barriers: dict | None = None, tensors: dict | None = None, ctas: int = 1) -> set[str]:
    """Kinds of the findings of a CTA whose warps run these texts, and how it ends."""
    program = Program.__new__(Program)
    lines = ["def kernel(warp, thread, block, given):", "    step = Variable()"]
    for number, text in enumerate(roles):
        lines += [f"    if warp.number == {number}:", textwrap.indent(textwrap.dedent(text).strip(), " " * 8)]
    program.use("\n".join([*lines, "    return", "    yield"]))
    barriers = {"full": [1, 1], "empty": [1, 1]} if barriers is None else barriers
    numbers = {name: Numbers(name, torch.zeros(2, dtype=torch.int32)) for name in tensors or ()}
    kernel = Kernel(program.run, program.lines, barriers, (32 * len(roles),), {}, numbers, False)
    found = set()
    for who in ("producer first", "consumers first"):
        for copies in ("first", "last"):
            if one := run(kernel, [{"x": i} for i in range(ctas)], ctas, who, copies, "never", 0):
                found |= {finding.kind for finding in one.findings} | (
                    {one.end.partition(":")[0]} if one.end else set()
                )
    return found


READ = "warp.product([(('X', 0), False)], [], 'acc', True, True)\nwarp.touch(reads=('acc',))"


def test_filled_slot_that_is_waited_for_passes():
    assert not faults(LOAD.format(0), f"yield 'wait', 'full', 0, 0, 0\n{READ}")


def test_read_of_a_slot_before_its_tile_is_found():
    assert "reads early" in faults(LOAD.format(0), f"yield ('go',)\n{READ}")


def test_useless_product_is_no_fault_until_its_result_is_read():
    useless = "warp.product([(('X', 0), False)], [], 'acc', True, True)"
    assert not faults(LOAD.format(0), useless + "\nyield 'wait', 'full', 0, 0, 0")
    overwritten = f"{useless}\nyield 'wait', 'full', 0, 0, 0\n{READ}"
    assert not faults(LOAD.format(0), overwritten)
    kept = "warp.product([(('X', 0), False)], [], 'acc', False, True)\nwarp.touch(reads=('acc',))"
    assert "reads early" in faults(LOAD.format(0), f"{useless}\nyield 'wait', 'full', 0, 0, 0\n{kept}")


def test_fill_before_the_release_is_found():
    consumer = (
        f"yield 'wait', 'full', 0, 0, 0\n{READ}\nyield 'arrive', 'empty', 0\nyield 'wait', 'full', 0, 1, 1"
    )
    twice = f"{LOAD.format(0)}\n{{}}\n{LOAD.format(0)}"
    assert not faults(twice.format("yield 'wait', 'empty', 0, 0, 0"), consumer)
    assert faults(twice.format("yield ('go',)"), consumer) & {"overwrites", "deadlock"}


def test_parity_two_phases_behind_is_found():
    late = "yield 'wait', 'empty', 0, 0, 0"
    arrivals = "yield 'arrive', 'full', 0\n" * 2
    assert faults(arrivals + "yield 'arrive', 'empty', 0", f"{late}\nyield 'wait', 'full', 0, 1, 1") == set()
    # Parity 1 means phase 1 here, and passes before phase 0 has completed
    assert "passes early" in faults(arrivals, "yield 'wait', 'full', 0, 1, 1")


def test_arrivals_that_do_not_match_a_barrier_are_found():
    two = {"full": [2]}
    assert "deadlock" in faults("yield 'arrive', 'full', 0", "yield 'wait', 'full', 0, 0, 0", barriers=two)
    assert "unfinished phases" in faults("yield 'arrive', 'full', 0", "yield ('go',)", barriers=two)
    assert "arrives twice" in faults("yield 'arrive', 'full', 0\n" * 2, "yield ('go',)", barriers=two)
    assert "named barrier" in faults("yield 'pass', 8, 64", "yield 'pass', 8, 96")


def test_flag_that_may_be_overwritten_is_found():
    writer = "yield 'store', 'flag', (0,), 1\nyield 'arrive', 'full', 0\n{}\nyield 'store', 'flag', (0,), 2"
    reader = "yield 'wait', 'full', 0, 0, 0\nwarp.read('flag', (0,))\nyield 'arrive', 'empty', 0"
    assert not faults(writer.format("yield 'wait', 'empty', 0, 0, 0"), reader)
    assert faults(writer.format("yield ('go',)"), reader) & {"overwrites", "reads early"}


def test_missing_proxy_fence_is_found():
    writer = "warp.tile_write('X', 0)\n{}\nyield 'arrive', 'full', 0"
    reader = f"yield 'wait', 'full', 0, 0, 0\n{READ}"
    assert not faults(writer.format("warp.fence()"), reader)
    assert faults(writer.format(""), reader) == {"no fence"}
    assert faults("warp.tile_write('X', 0)\nyield 'arrive', 'full', 0\nwarp.fence()", reader) == {"no fence"}


def test_accumulator_of_a_product_in_flight_is_not_read():
    flying = "yield 'wait', 'full', 0, 0, 0\nwarp.product([(('X', 0), False)], ['P'], 'acc', True, False)\n{}\nwarp.products(0)"
    assert not faults(LOAD.format(0), flying.format(""))
    assert "registers" in faults(LOAD.format(0), flying.format("warp.touch(reads=('acc',))"))
    assert "registers" in faults(LOAD.format(0), flying.format("warp.touch(clears=('P',))"))


def test_store_that_outlives_its_cta_is_found():
    writer = "warp.tile_write('X', 0)\nwarp.fence()\nwarp.put('X', 0)\n{}"
    assert not faults(writer.format("warp.wait_puts(0)"))
    assert "ends early" in faults(writer.format(""))


def test_ticket_that_does_not_return_to_its_start_is_found():
    draw = "yield ('go',)\nif warp.atomic_add('tickets', (0,), 1) == 1: {}"
    assert not faults(draw.format("warp.put_number('tickets', (0,), 0)"), tensors={"tickets": 0}, ctas=2)
    assert "counter" in faults(draw.format("pass"), tensors={"tickets": 0}, ctas=2)


def test_deadlock_names_what_each_warp_waits_for():
    program = Program.__new__(Program)
    program.use(
        "def kernel(warp, thread, block, given):\n    yield 'wait', 'full', 0, 0, 0  # fwd.py:1 attend\n"
    )
    one = run(
        Kernel(program.run, program.lines, {"full": [2]}, (32,), {}, {}, False),
        [{"x": 0}],
        1,
        "random",
        "last",
        "never",
        0,
    )
    assert one.end == "deadlock"
    assert "waits at full[0] for phase 0" in str(one) and "fwd.py:1 attend" in str(one)
