"""Row max of a tile of the forward: which steps update it, which hold it, and the check of a held one."""

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
    """A loop over steps that treat the row max alike.

    Args:
        step_range: the loop begins at the first step of this range, and masks as it says.
        count: number of steps; 0 if the tile has another loop over the range.
        update: each step updates the row max; else it is held.
        at_zero: the row max is 0 and held.
    """

    step_range: StepRange
    count: Any
    update: bool
    at_zero: bool = False


@dataclass(frozen=True)
class RowMax:
    """Row max of a tile: updated in each step, or held once each row has seen a key.

    A held row max may be too small for later scores, so that the row sums overflow. A held 0 may leave the range of the polynomial.
    Then check() asks the producer for the tile a second time. It comes with `recomputes`, and its row max is updated in each step.

    Args:
        holds: FwdConfig.hold_max.
        polynomial: ForwardScores.polynomial_cap().
        overflows: flags of the CTA's tiles; None if the row max is never held.
        recomputes: int32, not 0 if this tile's row max is updated in each step; None if the row max is never held.
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
            recomputes, (first, *others) = self.recomputes != 0, blocks.ranges
            held = (MaxSteps(x, T.if_then_else(recomputes, 0, x.count), False) for x in others)
            return MaxSteps(first, T.if_then_else(recomputes, blocks.steps - 1, first.count), True), *held
        found = []
        for steps in blocks.ranges:
            # With check_right a row may see its first key, see KeyBlocks.overlap
            if steps.check_right or not self.holds:
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
        """Wait for the stores of the first result of a tile that is computed twice: they might be written after those of the second."""
        if self.holds:
            if self.recomputes != 0:
                wait_for_stores(read=False)
