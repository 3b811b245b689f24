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


@T.meta_class
class RingStep:
    """Step of the rings of Q and dO, which goes on from tile to tile."""

    def __init__(self, name: str = "ring_step"):
        self.number = T.alloc_var("int32", init=0)


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

    def steps(self, steps: Any) -> Any:
        """Loop over steps. nvcc unrolls it by 4, for which a producer of several tiles has no registers."""
        if self.dynamic:
            return T.unroll(0, steps, annotations={"pragma_unroll_factor": 1})
        return T.serial(0, steps)

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
    def load(self, ring_step, tile, blocks):
        """Load Q, dO, Lse_log2 and Delta of each query block; without the schedule dynamic also K and V, once.

        ring_step: None for a CTA of one tile.
        """
        tiles, shared, block_M = self.tiles, self.shared, self.config.block_M
        if not self.dynamic:
            self.load_k(0, tile)
        for step in self.steps(blocks.steps):
            head, query = blocks.head, blocks.query
            lse_log2 = tiles.lse_log2(tile, head, query, block_M)
            delta = tiles.delta(tile, head, query, block_M)
            row_values = (lse_log2, delta) if self.makes_dk else (lse_log2,)
            place = step if ring_step is None else ring_step.number[0]
            shared.Q.fill(place, tiles.q(tile, head, query, block_M), row_values)
            if self.makes_dk and not self.dynamic:
                if step == 0:
                    self.load_v(0, tile)
            shared.dO.fill(place, tiles.do(tile, head, query, block_M))
            blocks.advance()
            if ring_step is not None:
                ring_step.number[0] += 1

    @T.inline
    def produce(self, number):
        """Load tile `number`, or with the schedule dynamic the tiles that schedule() describes."""
        tile = self.tile()
        blocks = self.blocks(tile)
        if self.dynamic:
            turn = T.alloc_var("int32", init=0)
            ring_step = RingStep()
            box = self.shared.tile_box
            box.wait(0)
            while not box.at_end(turn):
                box.read_tile(turn, tile)
                box.read_blocks(turn, blocks)
                self.load(ring_step, tile, blocks)
                box.end_loads(turn)
                turn += 1
                box.wait(turn)
        else:
            tile.start(number, self.counts, blocks)
            if tile.exists:
                self.load(None, tile, blocks)

    @T.inline
    def schedule(self, number):
        """Describe one tile after another to the other roles, and load its K and V.

        The next is drawn when all loads of one are issued. No earlier: a tile that a CTA has drawn waits for it.
        """
        tile = self.tile()
        blocks = self.blocks(tile)
        box = self.shared.tile_box
        stream = TileStream(
            self.config.schedule, number, self.order, self.counts.ctas, self.tickets, None, None
        )
        turn = T.alloc_var("int32", init=0)
        while stream.has_next:
            tile.start(stream.number[0], self.counts, blocks)
            if tile.exists:
                box.post(turn, tile, blocks)
                self.load_k(turn, tile)
                self.load_v(turn, tile)
                box.wait_loaded(turn)
                turn += 1
                stream.draw_ticket()
                box.wait_empty(turn)
                stream.next_number()
            else:
                stream.skip_to(tile.group_end)
        box.close(turn)
        stream.close()
