"""Producer of a backward by keys: the loads of its tiles, and with the schedule dynamic which tiles a CTA computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernel_configs import BwdPass
from tl_attention.kernels.block_lists import query_blocks
from tl_attention.kernels.bwd_tiles import KeyTile, KeyTileCounts
from tl_attention.kernels.mask import QueryBlocks
from tl_attention.kernels.options import OptionArguments
from tl_attention.kernels.scheduler import TileOrder, TileStream
from tl_attention.kernels.tiles import DenseGradTiles, SharedTiles
from tl_attention.problem import AttnProblem


def key_step(config: BwdPass, turn: Any, w: int) -> Any:
    """Step of the rings of K and V with the 64 keys of warpgroup w in the tile of a turn."""
    return turn * config.warpgroups + w if config.schedule == "dynamic" else w


@dataclass(frozen=True)
class KeyTileProducer:
    """The warps of a CTA that load its tiles and, with the schedule dynamic, draw them.

    Args:
        lengths: (seqlen_q, seqlen_k).
        tickets: int32 [2], see scheduler.TileStream; not read without the schedule dynamic.
    """

    problem: AttnProblem
    config: BwdPass
    order: TileOrder
    counts: KeyTileCounts
    lengths: tuple[Any, Any]
    tiles: DenseGradTiles
    shared: SharedTiles
    options: OptionArguments
    tickets: Any

    @property
    def dynamic(self) -> bool:
        return self.config.schedule == "dynamic"

    @property
    def makes_dk(self) -> bool:
        return "dk" in self.config.makes

    def tile(self) -> KeyTile:
        return KeyTile(self.order, self.config.block_N)

    def blocks(self, tile: KeyTile) -> QueryBlocks:
        config = self.config
        return query_blocks(self.problem, self.options, tile, *self.lengths, config.block_M, config.block_N)

    def steps(self, first: Any, end: Any) -> Any:
        """Loop over steps. nvcc unrolls it by 4, for which a producer of several tiles has no registers."""
        if self.dynamic:
            return T.unroll(first, end, annotations={"pragma_unroll_factor": 1})
        return T.serial(first, end)

    @T.inline
    def load_k(self, turn, tile):
        for w in tuple(range(self.config.warpgroups)):
            self.shared.K.fill(
                key_step(self.config, turn, w), self.tiles.k(tile, tile.first_key + 64 * w, 64)
            )

    @T.inline
    def load_v(self, turn, tile):
        for w in tuple(range(self.config.warpgroups)):
            self.shared.V.fill(
                key_step(self.config, turn, w), self.tiles.v(tile, tile.first_key + 64 * w, 64)
            )

    @T.inline
    def load(self, turn, first_step, tile, blocks):
        """Load K and V once, then Q, dO, Lse_log2 and Delta of each query block."""
        tiles, shared, block_M = self.tiles, self.shared, self.config.block_M
        if not self.dynamic:
            self.load_k(turn, tile)
        for step in self.steps(first_step, first_step + blocks.steps):
            head, query = blocks.head, blocks.query
            lse_log2 = tiles.lse_log2(tile, head, query, block_M)
            delta = tiles.delta(tile, head, query, block_M)
            row_values = (lse_log2, delta) if self.makes_dk else (lse_log2,)
            shared.Q.fill(step, tiles.q(tile, head, query, block_M), row_values)
            if self.dynamic:  # after Q, which has room earlier
                if step == first_step:
                    self.load_k(turn, tile)
            if self.makes_dk:
                if step == first_step:
                    self.load_v(turn, tile)
            shared.dO.fill(step, tiles.do(tile, head, query, block_M))
            blocks.advance()

    @T.inline
    def produce(self, number):
        """Load tile `number`, or with the schedule dynamic the tiles that schedule() describes."""
        tile = self.tile()
        blocks = self.blocks(tile)
        if self.dynamic:
            turn = T.alloc_var("int32", init=0)
            first_step = T.alloc_var("int32", init=0)  # rings go on from tile to tile
            box = self.shared.tile_box
            box.wait(0)
            while not box.at_end(turn):
                box.read_tile(turn, tile)
                box.read_blocks(turn, blocks)
                box.release(turn)
                self.load(turn, first_step, tile, blocks)
                first_step += blocks.steps
                turn += 1
                box.wait(turn)
        else:
            tile.start(number, self.counts, blocks)
            if tile.exists:
                self.load(0, 0, tile, blocks)

    @T.inline
    def schedule(self, number):
        """Describe one tile after another to the other roles, one ahead of the tile that they compute."""
        tile = self.tile()
        blocks = self.blocks(tile)
        box = self.shared.tile_box
        stream = TileStream(
            self.config.schedule, number, self.order, self.counts.ctas, self.tickets, None, None
        )
        turn = T.alloc_var("int32", init=0)
        while stream.has_next:
            tile.start(stream.number[0], self.counts, blocks)
            box.post(turn, tile, blocks)
            turn += 1
            box.wait_empty(turn)
            stream.draw_ticket()
            stream.next_number()
        box.close(turn)
        stream.close()
