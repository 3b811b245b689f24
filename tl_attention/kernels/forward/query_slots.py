"""Slots of Q in the shared memory of a forward: when they are filled, when they are free, and whether O leaves through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.kernels.seams.pipeline import sync_warpgroup, wait_for_stores
from tl_attention.kernels.seams.split_tile import split_tile


@dataclass(frozen=True)
class QuerySlots:
    """One, one and a half or two tiles of queries per CTA, a slot of 64 queries per warpgroup.

    With one and a half, Q of warpgroup 1 is loaded to the slot of warpgroup 0 in the previous tile, once that has begun this tile.

    A warpgroup frees its slot by one of these calls:

        O leaves through the slot: free_after_result(), in a piece free_after_piece(); with more than one tile of slots free_previous()
        else: free_after_steps(); persistent with one tile of slots free_after_scores()

    Args:
        hold_output: O is stored through the slot of its queries.
        first_row: first_row(w) -> first query of a warpgroup in its tile.
    """

    config: FwdConfig
    hold_output: bool
    first_row: Callable[[Any], Any]

    @property
    def prefetched(self) -> tuple[int, ...]:
        """Warpgroups whose Q is loaded before the tile is posted."""
        return (0,) if self.config.q_stages == 1.5 else tuple(range(self.config.warpgroups))

    @property
    def frees_early(self) -> bool:
        """True if a slot is freed right after the last S. With more slots the box of the tile, read again at its end, might be refilled."""
        return not self.hold_output and self.config.q_stages == 1 and self.config.schedule != "grid"

    @T.inline
    def load(self, turn, tile, first_query, tiles, Q):
        for w in self.prefetched:
            Q.fill(turn * self.config.warpgroups + w, tiles.q(tile, first_query + self.first_row(w), 64))

    @T.inline
    def load_late(self, when, turn, tile, first_query, tiles, Q):
        if self.config.q_stages == 1.5:
            if when:
                Q.fill(2 * turn + 1, tiles.q(tile, first_query + self.first_row(1), 64))

    @T.inline
    def wait_until_read(self, turn, Q):
        """Wait until consumers have read the last queries."""
        for w in self.prefetched:
            Q.wait_empty(turn * self.config.warpgroups + w)

    @T.inline
    def free_previous(self, turn, q_step, Q):
        """Free the slot of the previous tile, once O has been stored from it: with more than one tile of slots."""
        if self.hold_output and self.config.q_stages > 1:
            if turn > 0:
                wait_for_stores()
                Q.release(q_step - self.config.warpgroups)

    @T.inline
    def free_after_scores(self, is_last, q_step, Q):
        """Free the slot after the last S, if O does not leave through it."""
        if self.frees_early:
            if is_last:
                Q.release(q_step)

    @T.inline
    def free_after_steps(self, q_step, Q):
        """Free the slot after the last step, if O does not leave through it and free_after_scores() has not."""
        if not self.hold_output and not self.frees_early:
            Q.release(q_step)

    @T.inline
    def free_after_piece(self, q_step, Q):
        """Free the slot of a tile whose O another CTA stores."""
        if self.hold_output and self.config.q_stages == 1:
            Q.release(q_step)

    @T.inline
    def free_after_result(self, q_step, Q):
        """Free the only slot once O has been stored from it; free_previous() does it for more."""
        if self.config.q_stages == 1:
            wait_for_stores()
            Q.release(q_step)

    @T.inline
    def wait_for_queries(self, problem, w, q_step, Q, softmax_scale, takes_sign):
        """Wait for Q of a warpgroup, and split fp32 into terms.

        takes_sign: Q changes its sign where softmax_scale is negative. The softmax multiplies raw scores by the magnitude of the scale, as
            the row max is their maximum.
        """
        if self.config.q_stages == 1.5:
            # The other warpgroup has left the slot: two phases behind, the next wait would pass at once
            Q.wait_empty(q_step)
        Q.wait(q_step)
        if problem.terms > 1:
            split_tile(problem, w, Q, q_step)
        if takes_sign:
            if softmax_scale < 0:
                Q.negate(q_step)
                T.fence_proxy_async()
                sync_warpgroup(w)
