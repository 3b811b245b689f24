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
    """Slots of 64 queries, enough for one, one and a half or two tiles (FwdConfig.q_stages): one per warpgroup of a tile.

    With one and a half, Q of warpgroup 1 goes into the slot that warpgroup 0 had in the previous tile, once warpgroup 0 has begun this one.

    A warpgroup frees its slot once, by one of these calls; the others do nothing:

        O leaves through the slot, one tile of slots: free_after_result(), or free_after_piece() if another CTA stores O
        O leaves through the slot, more slots: free_previous(), in the next tile
        O leaves in another way: free_after_scores() if a CTA computes several tiles and has slots for one, else free_after_steps()

    Args:
        holds_output: O is stored through the slot of its queries.
        first_row: first_row(w) -> first query of a warpgroup in its tile.
    """

    config: FwdConfig
    holds_output: bool
    first_row: Callable[[Any], Any]

    @property
    def prefetched(self) -> tuple[int, ...]:
        """Warpgroups whose Q is loaded before the tile is posted."""
        return (0,) if self.config.q_stages == 1.5 else tuple(range(self.config.warpgroups))

    @property
    def frees_early(self) -> bool:
        """True if a slot is freed right after the last S.

        Not with more slots: the producer might then refill the TileBox of this tile before attend() has read it a second time.
        """
        return not self.holds_output and self.config.q_stages == 1 and self.config.schedule != "grid"

    @T.inline
    def load(self, turn, tile, first_query, tiles, Q):
        """Load Q of a tile; with one and a half tiles of slots, of warpgroup 0 alone."""
        for w in self.prefetched:
            Q.fill(turn * self.config.warpgroups + w, tiles.q(tile, first_query + self.first_row(w), 64))

    @T.inline
    def load_late(self, when, turn, tile, first_query, tiles, Q):
        """Load Q of warpgroup 1 if load() has not, under the condition `when`."""
        if self.config.q_stages == 1.5:
            if when:
                Q.fill(2 * turn + 1, tiles.q(tile, first_query + self.first_row(1), 64))

    @T.inline
    def wait_until_read(self, turn, Q):
        """Wait until the slots of the next tile are free, so that consumers have read the TileBox of two turns before."""
        for w in self.prefetched:
            Q.wait_empty(turn * self.config.warpgroups + w)

    @T.inline
    def free_previous(self, turn, q_step, Q):
        """Free the slot of the previous tile, once O has been stored from it."""
        if self.holds_output and self.config.q_stages > 1:
            if turn > 0:
                wait_for_stores()
                Q.release(q_step - self.config.warpgroups)

    @T.inline
    def free_after_scores(self, is_last, q_step, Q):
        """Free the slot after the last S. is_last: this S is the last one."""
        if self.frees_early:
            if is_last:
                Q.release(q_step)

    @T.inline
    def free_after_steps(self, q_step, Q):
        """Free the slot after the last step."""
        if not self.holds_output and not self.frees_early:
            Q.release(q_step)

    @T.inline
    def free_after_piece(self, q_step, Q):
        """Free the slot of a tile whose O another CTA stores."""
        if self.holds_output and self.config.q_stages == 1:
            Q.release(q_step)

    @T.inline
    def free_after_result(self, q_step, Q):
        """Free the slot once O has been stored from it."""
        if self.config.q_stages == 1:
            wait_for_stores()
            Q.release(q_step)

    @T.inline
    def wait_for_queries(self, problem, w, q_step, Q, softmax_scale, takes_sign):
        """Wait for Q of a warpgroup, and split fp32 into terms.

        takes_sign: negate Q if softmax_scale is negative. The row max is a maximum of raw scores, which the softmax multiplies by
            |softmax_scale|.
        """
        if self.config.q_stages == 1.5:
            # Wait until the other warpgroup has left the slot: two phases behind, the next wait would pass at once
            Q.wait_empty(q_step)
        Q.wait(q_step)
        if problem.terms > 1:
            split_tile(problem, w, Q, q_step)
        if takes_sign:
            if softmax_scale < 0:
                Q.negate(q_step)
                T.fence_proxy_async()
                sync_warpgroup(w)
