"""Row max of a tile of the forward: which steps update it, which hold it, and the check that a held one served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.scores.mask import KeyBlocks, StepRange
from tl_attention.kernels.scores.softcap import PolynomialCap
from tl_attention.kernels.seams.pipeline import wait_for_stores
from tl_attention.kernels.seams.scheduler import Overflows
from tl_attention.kernels.seams.softmax import OnlineSoftmax


@dataclass(frozen=True)
class MaxSteps:
    """Consecutive steps that treat the row max alike.

    Args:
        steps: the range that they are in.
        count: number of steps, from steps.first on.
        update: they update the row max; else it is held.
        at_zero: the row max is 0 and held.
    """

    steps: StepRange
    count: Any
    update: bool
    at_zero: bool = False


@dataclass(frozen=True)
class RowMax:
    """Row max of a tile: updated in each step, or held once each row has seen a key.

    A held row max may be too small for later scores, so that the sums overflow; a held 0 may be out of the range of the polynomial.
    Then check() says so to the producer, and the tile comes a second time, with `recomputes` and a row max that is updated.

    Args:
        holds: FwdConfig.hold_max.
        polynomial: that of ForwardScores.polynomial_cap().
        overflows, recomputes: of the tile, where the row max is held.
    """

    softmax: OnlineSoftmax
    holds: bool
    polynomial: PolynomialCap | None
    overflows: Overflows | None
    recomputes: Any

    @T.inline
    def after_first_step(self, w, acc_s, steps):
        """Hold a row max of 0 in the further steps, if it is close to 0."""
        if self.softmax.at_zero is not None:
            self.softmax.flag[0] = 0
            if self.polynomial is not None:
                self.polynomial.flag_if_out_of_range(self.softmax, steps)
            self.softmax.hold_zero(w, acc_s, self.recomputes == 0)

    def ranges(self, blocks: KeyBlocks) -> tuple[MaxSteps, ...]:
        """Loops after step 0. With hold_max they hold the row max once each row has seen a key, unless the tile is recomputed."""
        if self.holds and blocks.listed:
            # A tile that is recomputed has all steps in the first range: full blocks have bits of ones
            again, (first, *others) = self.recomputes != 0, blocks.ranges
            held = (MaxSteps(steps, T.if_then_else(again, 0, steps.count), False) for steps in others)
            return MaxSteps(first, T.if_then_else(again, blocks.steps - 1, first.count), True), *held
        found = []
        for steps in blocks.ranges:
            if (
                steps.check_right or not self.holds
            ):  # with check_right a row may see its first key, see KeyBlocks.overlap
                found.append(MaxSteps(steps, steps.count, True))
                continue
            # Loops of their own: a branch around the update of the row max costs more than half of the gain
            holds = self.recomputes == 0
            if self.softmax.at_zero is not None:
                at_zero = T.if_then_else(self.softmax.at_zero[0] != 0, steps.count, 0)
                found.append(MaxSteps(steps, at_zero, False, True))
                holds = holds & (self.softmax.at_zero[0] == 0)
            found.append(MaxSteps(steps, T.if_then_else(holds, steps.count, 0), False))
            found.append(MaxSteps(steps, T.if_then_else(self.recomputes == 0, 0, steps.count), True))
        return tuple(found)

    @T.inline
    def check(self, turn):
        """Ask for the tile a second time if its row sums are out of range; after the warp's last read of its TileBox."""
        if self.holds:
            if self.recomputes == 0:  # only once: no row max helps if scores are not finite
                self.softmax.check_sums()
                if self.polynomial is not None:
                    self.polynomial.check_sums(self.softmax)
                if self.softmax.overflowed():
                    self.overflows.report(turn)
            self.overflows.finish(turn)

    @T.inline
    def wait_for_first_result(self):
        """Wait for the stores of the tile's first result, which might be written after this one."""
        if self.holds:
            if self.recomputes != 0:
                wait_for_stores(read=False)
