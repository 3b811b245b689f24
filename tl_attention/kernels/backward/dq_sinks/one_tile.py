"""Backward by keys where one tile has all keys of a head: dQ of a step is whole, and is stored in place of sums.

The consumers write it to shared memory in the input dtype, and a warp beside the producer stores it by TMA, which writes nothing past the
last query and column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T

from tl_attention.kernels.backward.dq_sinks.round import NoRounding
from tl_attention.kernels.backward.key_tiles import Piece, piece_shape
from tl_attention.kernels.backward.load import KeyTileProducer
from tl_attention.kernels.seams.pipeline import WrittenTiles, alloc_each, fragment_address, store_fragment
from tl_attention.kernels.seams.products import scale


@T.meta_class
class DqTiles(WrittenTiles):
    """DqSink of smem tiles of dQ of a step, which TMA stores: a piece per warpgroup that computes some.

    Args:
        pieces: key_tiles.dq_pieces().
    """

    rounding = NoRounding()
    tiles_wait = False

    def __init__(
        self,
        pieces: list[list[Piece]],
        dtype: str,
        consumer_warps: int,
        softmax_scale: Any,
        name: str = "dq_tiles",
    ):
        self.pieces, self.dtype = [piece for of_one in pieces for piece in of_one], dtype
        self.softmax_scale = softmax_scale
        self.tiles = alloc_each(len(self.pieces), piece_shape(self.pieces[0]), dtype, name="dQ")
        self.full = T.alloc_barrier([consumer_warps])  # every warp has written its share
        self.empty = T.alloc_barrier([1])  # TMA has read the tiles

    def row_block(self, tiles: Any, tile: Any, blocks: Any) -> Any:
        return 0

    def wait_free(self, step: Any) -> Any:
        return T.mbarrier_wait_parity(self.empty[0], step % 2 ^ 1)

    @T.inline
    def add(self, w, acc_dq, row_block):
        """Write the piece of a warpgroup, if it has one."""
        for n in tuple(range(len(acc_dq))):
            scale((acc_dq[n],), self.softmax_scale)
            if acc_dq[n].shape[1] == 64:
                rounded = T.alloc_fragment(acc_dq[n].shape, self.dtype)
                T.copy(acc_dq[n], rounded)
                T.evaluate(store_fragment(rounded, fragment_address(self.tiles[w][0, 0])))
            else:
                T.copy(acc_dq[n], self.tiles[w])

    @T.inline
    def send(self, step, tiles, tile, blocks):
        """Store dQ of a step."""
        T.mbarrier_wait_parity(self.full[0], step % 2)
        for w, (rows, cols) in enumerate(self.pieces):
            T.tma_copy(self.tiles[w], tiles.dq_piece(tile, blocks.head, blocks.query, rows, cols))
        T.tma_store_wait(0, True)
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.empty[0])

    def further_warps(self, producer: KeyTileProducer) -> tuple[Callable[[], None], ...]:
        def send(step: Any, tile: Any, blocks: Any) -> None:
            self.send(step, producer.tiles, tile, blocks)

        return (lambda: producer.each_step(send),)
