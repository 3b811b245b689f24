"""Steps of a tile of the forward: ranges that hold the row max, steps that a warpgroup skips, and the check of the row sums at the end."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.kernels.mask import KeyBlocks
from tl_attention.kernels.pipeline import sync_warpgroup
from tl_attention.kernels.scheduler import Overflows
from tl_attention.kernels.softcap import PolynomialCap
from tl_attention.kernels.softmax import OnlineSoftmax


def step_ranges(
    blocks: KeyBlocks,
    hold_max: bool,
    recomputes: Any,
    softmax: OnlineSoftmax,
    polynomial: PolynomialCap | None,
) -> tuple:
    """(steps, True if they update the row max, True if it is 0, polynomial that replaces a softcap, number of steps) of each range.

    Ranges are those after step 0. With hold_max the row max is held once each row has seen a key, except when a tile is recomputed.
    """
    if hold_max and blocks.listed:
        # A tile that is recomputed has all steps in the first range: full blocks have bits of ones
        again, (first, *others) = recomputes != 0, blocks.ranges
        held = tuple((steps, False, False, None, T.if_then_else(again, 0, steps.count)) for steps in others)
        return (first, True, False, None, T.if_then_else(again, blocks.steps - 1, first.count)), *held
    ranges = []
    for steps in blocks.ranges:
        if steps.check_right or not hold_max:
            ranges.append((steps, True, False, None, steps.count))
            continue
        # Loops of their own: a branch around the update of the row max costs more than half of the gain
        holds = recomputes == 0
        if softmax.at_zero is not None:
            at_zero = T.if_then_else(softmax.at_zero[0] != 0, steps.count, 0)
            ranges.append((steps, False, True, polynomial, at_zero))
            holds = holds & (softmax.at_zero[0] == 0)
        ranges.append((steps, False, False, None, T.if_then_else(holds, steps.count, 0)))
        ranges.append((steps, True, False, None, T.if_then_else(recomputes == 0, 0, steps.count)))
    return tuple(ranges)


@T.macro
def prepare_queries(w, Q, q_step, softmax_scale, makes_positive: bool):
    """Negate the warpgroup's Q if the scale is negative, which is replaced by its magnitude: the row max is a maximum of raw scores."""
    if makes_positive:
        if softmax_scale < 0:
            Q.negate(q_step)
            T.fence_proxy_async()
            sync_warpgroup(w)


@T.macro
def hold_zero(w, softmax: OnlineSoftmax, polynomial: PolynomialCap | None, acc_s, steps, recomputes):
    """Hold a row max of 0 in the tile's further steps, if step 0 allows it."""
    softmax.flag[0] = 0
    if polynomial is not None:
        polynomial.flag_if_out_of_range(softmax, steps)
    softmax.hold_zero(w, acc_s, recomputes == 0)


@T.macro
def skip_keys(w, K, turns, first_step, steps):
    """Release K of steps that a warpgroup skips, and pass its turns on."""
    for i in T.serial(steps):
        K.wait(first_step + i)
        turns.wait(w)
        turns.pass_on(w)
        K.release(first_step + i)


@T.macro
def skip_values(V, first_step, steps):
    """Release V of skipped steps. Called after the first S of the warpgroup, as V of a block is loaded after K of the next one."""
    for i in T.serial(steps):
        V.wait(first_step + i)
        V.release(first_step + i)


@T.macro
def skip_last(w, K, V, turns, first_step, steps):
    """Release K and V of the last steps, which a warpgroup skips, and pass its turns on."""
    for i in T.serial(steps):
        K.wait(first_step + i)
        turns.wait(w)
        turns.pass_on(w)
        K.release(first_step + i)
        V.wait(first_step + i)
        V.release(first_step + i)


@T.meta_class
class FirstSteps:
    """First steps of a tile, whose keys no query of a warpgroup sees. It skips them."""

    def __init__(self, hidden: Any, name: str = "skipped"):
        self.count = T.alloc_var("int32", init=T.shfl_sync(hidden, 0))

    @T.inline
    def skip(self, w, K, turns, first_step, blocks):
        skip_keys(w, K, turns, first_step, self.count[0])
        blocks.skip(self.count[0])

    def after(self, first_step: Any) -> Any:
        return T.shfl_sync(first_step + self.count[0], 0)

    @T.inline
    def release_values(self, V, first_step):
        skip_values(V, first_step - self.count[0], self.count[0])


@T.meta_class
class LastSteps:
    """Last steps of a tile, likewise."""

    def __init__(self, hidden: Any, name: str = "hidden_last"):
        self.count = T.alloc_var("int32", init=T.shfl_sync(hidden, 0))

    @T.inline
    def skip(self, blocks):
        blocks.stop_before(self.count[0])

    @T.inline
    def release(self, w, K, V, turns, first_step):
        skip_last(w, K, V, turns, first_step, self.count[0])


class NoSteps:
    """Tiles of which every warpgroup takes all steps."""

    def skip(self, *others: Any) -> None:
        return None

    def after(self, first_step: Any) -> Any:
        return first_step

    def release_values(self, *others: Any) -> None:
        return None

    def release(self, *others: Any) -> None:
        return None


@T.macro
def check_sums(
    softmax: OnlineSoftmax, polynomial: PolynomialCap | None, overflows: Overflows, turn, recomputes
):
    """Request a recomputation of a tile whose row sums are out of range; after the warp's last read of its TileBox."""
    if recomputes == 0:  # only once: no row max helps if scores are not finite
        softmax.check_sums()
        if polynomial is not None:
            polynomial.check_sums(softmax)
        if softmax.overflowed():
            overflows.report(turn)
    overflows.finish(turn)
