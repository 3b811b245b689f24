"""dQ from registers: the consumers add dQ of a step to fp32 sums in global memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.backward.dq_sinks.order import AddingOrder, AnyOrder
from tl_attention.kernels.backward.dq_sinks.round import NoRounding
from tl_attention.kernels.backward.key_tiles import Piece
from tl_attention.kernels.seams.pipeline import indices


@dataclass(frozen=True)
class SumsFromRegisters:
    """DqSink of sums that each warp adds to from its registers.

    Args:
        turns: of order.OrderKeeper.
        rounding: the sums.
        pieces: key_tiles.dq_pieces().
    """

    order: AnyOrder | AddingOrder
    turns: Any
    rounding: NoRounding
    pieces: list[list[Piece]]

    @property
    def tiles_wait(self) -> bool:
        return self.order.tiles_wait

    def row_block(self, tiles: Any, tile: Any, blocks: Any) -> Any:
        return tiles.dq_row_block(self.rounding.sums, tile, blocks.head, blocks.query)

    def wait_free(self, step: Any) -> Any:
        return self.order.wait(step)

    @T.inline
    def add(self, w, acc_dq, row_block):
        for i in indices(acc_dq):
            rows, cols = self.pieces[w][i]
            self.rounding.sums.add(acc_dq[i], row_block + rows.start // 16, cols.start)

    def announce(self, step: Any) -> Any:
        return self.order.announce(step)

    def further_warps(self, producer: Any) -> tuple[Callable[[], None], ...]:
        return self.order.further_warps(producer, self.turns)
