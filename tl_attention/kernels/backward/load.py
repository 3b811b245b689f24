"""Producer of a backward by keys: loads of tiles, and the choice of tiles for a CTA that computes several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import BwdPass
from tl_attention.kernels.backward.dq_sinks.round import key_policy
from tl_attention.kernels.backward.key_tiles import KeyTile, KeyTileCounts
from tl_attention.kernels.scores.options import OptionArguments
from tl_attention.kernels.seams.scheduler import TileOrder, TileStream
from tl_attention.kernels.sources.block_lists import query_blocks
from tl_attention.kernels.sources.query_blocks import QueryBlocks
from tl_attention.kernels.sources.tiles import DenseGradTiles, SmemTiles
from tl_attention.problem.attn_problem import AttnProblem


def key_step(config: BwdPass, turn: Any, w: int) -> Any:
    """Step of the K and V rings that holds the 64 keys of warpgroup w of a turn's tile."""
    return turn * config.warpgroups + w if config.is_persistent else w


@dataclass(frozen=True)
class KeyTileProducer:
    """The warps of a CTA that load its tiles and, if it computes several, draw them.

    With the schedule dynamic the producer loads K and V, and the next tile is drawn when a tile begins. With dynamic-late, ordered and
    stream-K the warp that draws tiles loads their K and V, and draws the next one when the producer has issued all loads of a tile. A tile
    drawn early waits for its CTA, which costs up to 4 % in long loops; the later draw costs 2 to 4 % at 1k keys (H200, 2026-11-22).

    Args:
        lengths: (seqlen_q, seqlen_k).
        tickets: int32 [2], see scheduler.TileStream; not read with the schedule grid.
    """

    problem: AttnProblem
    config: BwdPass
    order: TileOrder
    counts: KeyTileCounts
    lengths: tuple[Any, Any]
    tiles: DenseGradTiles
    smem: SmemTiles
    options: OptionArguments
    tickets: Any

    @property
    def persistent(self) -> bool:
        return self.config.is_persistent

    @property
    def late(self) -> bool:
        """True if tiles are drawn as with dynamic-late."""
        return self.config.draws_late

    @property
    def policy(self) -> str | None:
        """L2 eviction policy of K and V; None: the default."""
        return key_policy(self.problem, self.config)

    @property
    def makes_dk(self) -> bool:
        return "dk" in self.config.makes

    def tile(self) -> KeyTile:
        return KeyTile(self.order, self.config.block_N, self.config.is_ordered, self.config.is_stream_k)

    def blocks(self, tile: KeyTile, with_places: bool = False) -> QueryBlocks:
        config = self.config
        sizes = *self.lengths, config.block_M, config.block_N
        roles = {"ahead": False, "with_places": with_places}
        return query_blocks(self.problem, self.options, tile, *sizes, **roles)

    def steps(self, first: Any, end: Any) -> Any:
        """Loop over steps. nvcc would unroll it by 4, for which a producer of several tiles has too few registers."""
        if self.persistent:
            return T.unroll(first, end, annotations={"pragma_unroll_factor": 1})
        return T.serial(first, end)

    @T.inline
    def load_k(self, turn, tile):
        for w in tuple(range(self.config.warpgroups)):
            self.smem.K.fill(
                key_step(self.config, turn, w),
                self.tiles.k(tile, tile.first_key + 64 * w, 64),
                policy=self.policy,
            )

    @T.inline
    def load_v(self, turn, tile):
        for w in tuple(range(self.config.warpgroups)):
            self.smem.V.fill(
                key_step(self.config, turn, w),
                self.tiles.v(tile, tile.first_key + 64 * w, 64),
                policy=self.policy,
            )

    @T.inline
    def load(self, turn, first_step, tile, blocks):
        """Load Q, dO, Lse_log2 and Delta of each query block, and K and V once, unless the warp that draws tiles loads these."""
        tiles, smem, block_M = self.tiles, self.smem, self.config.block_M
        if self.config.makes_terms:
            for i in T.serial(self.counts.heads_per_kv):
                smem.inputs.wait(tile.batch, tile.kv_head * self.counts.heads_per_kv + i)
        if not self.persistent:
            self.load_k(turn, tile)
        for step in self.steps(first_step, first_step + blocks.steps):
            head, query = blocks.head, blocks.query
            lse_log2 = tiles.lse_log2(tile, head, query, block_M)
            delta = tiles.delta(tile, head, query, block_M)
            row_values = (lse_log2, delta) if self.makes_dk else (lse_log2,)
            smem.Q.fill(step, tiles.q(tile, head, query, block_M), row_values)
            if self.persistent and not self.late:  # after Q, which has room earlier
                if step == first_step:
                    self.load_k(turn, tile)
            if self.makes_dk and not self.late:
                if step == first_step:
                    self.load_v(turn, tile)
            smem.dO.fill(step, tiles.do(tile, head, query, block_M))
            blocks.advance()

    @T.inline
    def load_posted(self, turn, first_step, tile, blocks):
        """Load a posted tile. The next one is drawn meanwhile, or where tiles are drawn late when all loads are issued."""
        box = self.smem.tile_box
        if not self.late:
            box.release(turn)
        self.load(turn, first_step, tile, blocks)
        if self.late:
            box.end_loads(turn)

    @T.inline
    def produce(self, number):
        """Load tile `number`, or the tiles that schedule() describes."""
        tile = self.tile()
        blocks = self.blocks(tile)
        if self.persistent:
            self.smem.tile_box.each_posted(
                tile, blocks, lambda turn, first_step: self.load_posted(turn, first_step, tile, blocks)
            )
        else:
            tile.start(number, self.counts, blocks)
            if tile.exists:
                self.load(0, 0, tile, blocks)

    @T.inline
    def each_step(self, visit, begin=None, end=None):
        """Call visit(step, tile, blocks) for each step of each tile that schedule() describes, in a warp that is none of the consumers'.

        begin, end: called with the turn and the tile, before and after the steps of a tile.
        """
        tile = self.tile()
        blocks = self.blocks(tile)
        calls = visit, begin, end
        self.smem.tile_box.each_posted(
            tile, blocks, lambda turn, first_step: self.each_step_of(turn, first_step, tile, blocks, *calls)
        )

    @T.inline
    def each_step_of(self, turn, first_step, tile, blocks, visit, begin, end):
        """each_step() for one tile."""
        self.smem.tile_box.release(turn)
        if begin is not None:
            begin(turn, tile)
        for step in self.steps(first_step, first_step + blocks.steps):
            visit(step, tile, blocks)
            blocks.advance()
        if end is not None:
            end(turn, tile)

    def has_next(self, stream: TileStream) -> Any:
        """True if there is a tile with the stream's number."""
        if not self.problem.has("varlen"):
            return stream.has_next
        # Multiplied for each tile: nvcc 13.0.88 kept the product, which spilled 4 bytes at d128
        blocks = self.order.m_blocks + T.call_extern("int32", "tl_attention_zero")
        return stream.number[0] < blocks * self.order.all_heads

    @T.inline
    def schedule(self, number):
        """Describe one tile after another to the other roles, each before they have finished the previous one."""
        tile = self.tile()
        blocks = self.blocks(tile, with_places=True)
        box = self.smem.tile_box
        dq = self.smem.dq
        # A CTA draws its first tile, too, where tiles wait for others, so it waits only for CTAs that run
        stream = TileStream(
            "dynamic",
            number,
            self.order,
            self.counts.ctas,
            self.tickets,
            tile_box=None,
            overflows=None,
            all_drawn=dq.tiles_wait,
        )
        turn = T.alloc_var("int32", init=0)
        if dq.tiles_wait:
            stream.draw_ticket()
            stream.next_number()
        while self.has_next(stream):
            tile.start(stream.number[0], self.counts, blocks)
            if tile.exists:
                box.post(turn, tile, blocks)
                if self.late:
                    self.load_k(turn, tile)
                    self.load_v(turn, tile)
                    box.wait_loaded(turn)
                turn += 1
                box.wait_empty(turn)
                stream.draw_ticket()
                stream.next_number()
            elif self.config.is_stream_k:
                dq.rounding.count_empty(tile)  # a share without queries
                stream.draw_ticket()
                stream.next_number()
            elif tile.by_sequence:
                if tile.tile.exists:  # without keys
                    stream.draw_ticket()
                    stream.next_number()
                else:
                    stream.skip_to(self.order.num_tiles)
            else:
                stream.skip_to(tile.group_end(stream.number[0]))
        box.close(turn)
        stream.close()
