"""The schedule stream-K of a forward: CTAs share the tiles that are left when every SM has computed equally many, by their keys.

The steps of these tiles, one tile after another, are cut into pieces of equal length, one per CTA: part of a tile, or the last steps of
a tile and the first ones of the next. The CTA with the last steps of a tile finishes it. The others write their O and log-sum-exp to
memory, and it merges them, always in the same order. It waits only for CTAs that have begun before it, and a CTA writes before it
waits, so however few CTAs run, the first of them goes on.

Under a causal mask all tiles are shared. They have different numbers of steps, so a CTA may have several short ones between the two
that it shares with its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.kernels.cuda import source
from tl_attention.kernels.scores.mask import KeyBlocks, Mask
from tl_attention.kernels.seams.scheduler import Overflows, TileBox, TileOrder, TileStream
from tl_attention.kernels.seams.softmax import LOWEST, rows_layout
from tl_attention.kernels.sources.tiles import FragmentBlocks, SmemTiles
from tl_attention.problem.attn_problem import AttnProblem

DONE = 2**30  # past the number of any piece
FLAGS_FROM = 2  # int32 before those of CTAs in SharedPieces.written
SHARED = 4  # flag of a piece beside the turns of Overflows: its row max is not held, as another CTA has the rest of the tile
PIECES = source("pieces", LOWEST=f"{LOWEST:.1e}f")


@dataclass(frozen=True)
class PieceArguments:
    """Kernel arguments of the schedule stream-K, or their types; False for one that the kernel lacks. See SharedPieces.

    whole: head_cost where there is a tile_cost.
    """

    Pieces: Any = False
    whole: Any = False
    sharers: Any = False
    tile_cost: Any = False

    @classmethod
    def of(cls, problem: AttnProblem, config: FwdConfig) -> PieceArguments:
        """Types of the arguments of a forward."""
        if config.schedule != "stream-K":
            return cls()
        pieces = FragmentBlocks.argument(T.dynamic("piece_blocks"), problem.head_dim_v + 8)
        return cls(pieces, T.int32, T.int32, T.int32 if problem.causal else False)


@dataclass(frozen=True)
class SharedPieces:
    """Pieces of shared tiles in global memory, and which CTAs have them.

    Args:
        tensor: fp32 [16-row blocks, columns / 8 + 1, 32, 4], block_M / 16 row blocks per CTA: O as in FragmentBlocks, then log-sum-exps.
        written: int32: CTAs that have begun, CTAs that are done, then one per CTA: a bit per consumer warp that has written its rows. All 0
            before the kernel and after.
        whole: tiles that are not shared, the first ones; none under a causal mask.
        sharers: CTAs that have pieces, those with the lowest numbers.
        head_cost, tile_cost: under a causal mask, the cost of the tiles of a head, and of a tile beside its steps, in steps.
    """

    config: FwdConfig
    tensor: Any
    written: Any
    whole: Any
    sharers: Any
    head_cost: Any
    tile_cost: Any

    @classmethod
    def of(cls, config: FwdConfig, arguments: PieceArguments, written: Any) -> SharedPieces:
        """Build from the arguments of forward/kernel.py."""
        tile_cost = arguments.tile_cost
        whole, head_cost = (arguments.whole, None) if tile_cost is False else (0, arguments.whole)
        return cls(config, arguments.Pieces, written, whole, arguments.sharers, head_cost, tile_cost)

    def place(self, rank: Any, w: Any) -> Any:
        """Address of the rows of a warpgroup of a CTA."""
        return T.address_of(self.tensor[(rank * self.config.warpgroups + w) * 4, 0, 0, 0])

    def exchange(self, how: str, rank: Any, w: Any, acc_o: Any, lse: Any) -> Any:
        """Call of a function of PIECES for the piece of a CTA."""
        name = f"tl_attention_{how}_piece<{acc_o.shape[1]}>"
        written = T.address_of(self.written[FLAGS_FROM + rank])
        return T.call_extern("handle", name, self.place(rank, w), written, acc_o.data, lse.data)

    @T.inline
    def store(self, rank, w, acc_o, lse):
        """Write the piece of a warpgroup. lse: base 2."""
        T.evaluate(self.exchange("store", rank, w, acc_o, lse))

    @T.inline
    def merge(self, rank, w, partners, acc_o, lse, lse_unit):
        """Merge the pieces of `partners` CTAs below `rank` into acc_o and lse, which is in base 2 before."""
        for i in T.serial(partners):
            T.evaluate(self.exchange("merge", rank - 1 - i, w, acc_o, lse))
        for i in T.Parallel(64, loop_layout=rows_layout()):
            lse[i] *= lse_unit


@T.meta_class
class SharedKeyBlocks(KeyBlocks):
    """Key blocks without a mask or under a causal one, of which a piece of a shared tile keeps some.

    Attributes:
        partners: number of other CTAs whose pieces this CTA merges into its own; -1 where another merges this one.
        rank: that of the CTA.
    """

    def __init__(self, mask: Mask, block_M: int, block_N: int, name: str = "blocks"):
        super().__init__(mask, block_M, block_N, name=name)
        self.last_block = T.alloc_var("int32", init=0)
        self.partners, self.rank = (T.alloc_var("int32", init=0) for _ in range(2))

    def steps_from(self, first_query: Any) -> Any:
        """Steps of the queries from first_query on, as start() counts them."""
        seen = T.min(self.mask.last_key(first_query + self.block_M - 1) + 1, self.mask.seqlen_k)
        return T.max(T.ceildiv(seen, self.block_N), 1)

    @T.inline
    def keep(self, first, stop, partners, rank):
        """Keep the steps [first, stop)."""
        self.last_block[0] = T.shfl_sync(self.num_steps[0] - 1 - first, 0)
        self.num_steps[0] = T.shfl_sync(stop - first, 0)
        if self.mask.causal:
            right = T.max(self.num_right[0] - first, 1)
            self.num_right[0] = T.shfl_sync(T.min(right, self.num_steps[0]), 0)
        self.partners[0] = partners
        self.rank[0] = rank

    @property
    def counts(self) -> tuple:
        right = (self.num_right,) if self.mask.causal else ()
        return self.num_steps, self.last_block, self.partners, self.rank, *right

    @T.inline
    def read_partners(self, turn, tile_box):
        """Read `partners` and `rank` again, in place of holding them in registers: the third and the fourth of `counts`."""
        self.partners[0] = T.shfl_sync(tile_box.tiles[turn % 2, 6], 0)
        self.rank[0] = T.shfl_sync(tile_box.tiles[turn % 2, 7], 0)


@T.meta_class
class SharingStream(TileStream):
    """TileStream of a CTA: every ctas-th of the first `whole` tiles, from the one of its rank on, then its pieces of the others.

    A tile that is not finished here comes first, as another CTA waits for it. Numbers from `whole` on count pieces: `ctas` first ones, then
    `ctas` second ones.

    Args:
        steps: steps per tile.
    """

    def __init__(
        self,
        order: TileOrder,
        ctas: Any,
        tile_box: TileBox,
        overflows: Overflows | None,
        pieces: SharedPieces,
        steps: Any,
        name: str = "stream",
    ):
        super().__init__("persistent", 0, order, ctas, pieces.written, tile_box, overflows)
        self.whole, self.sharers, self.steps = pieces.whole, pieces.sharers, steps
        self.rank = T.alloc_var("int32", init=0)
        self.shared_steps = (order.num_tiles - pieces.whole) * steps  # of all shared tiles
        # The CTA's pieces are the steps [begin, end) of all shared tiles; piece_tile is the tile of the current piece
        self.begin, self.end, self.piece_tile = (T.alloc_var("int32", init=0) for _ in range(3))

    @T.inline
    def start(self):
        """Go to the CTA's first tile."""
        self.draw_rank()

    @T.inline
    def draw_rank(self):
        """Draw the CTA's number, so that running CTAs have the lowest ones."""
        if T.get_thread_binding() % 32 == 0:
            self.rank[0] = T.atomic_add(self.tickets[0], 1, return_prev=True)
        self.rank[0] = T.shfl_sync(self.rank[0], 0)
        self.number[0] = self.rank[0]

    @property
    def stop(self) -> Any:
        return DONE

    @property
    def is_piece(self) -> Any:
        shared = self.number[0] >= self.whole
        return shared if self.overflows is None else shared & (self.turns_ago[0] == 0)

    @property
    def recomputes(self) -> Any:
        if self.overflows is None:
            return 0
        return T.if_then_else(self.is_piece, SHARED, self.turns_ago[0])

    def is_new(self, turn: Any) -> Any:
        return True if self.overflows is None else self.overflows.recomputes(turn) % SHARED == 0

    @T.inline
    def locate(self, turn, tile):
        if self.is_piece:
            self.begin[0] = T.truncdiv(self.rank[0] * self.shared_steps, self.sharers)
            self.end[0] = T.truncdiv((self.rank[0] + 1) * self.shared_steps, self.sharers)
            # The first piece ends where the CTA's steps end, the second one begins where they begin
            is_first = self.number[0] - self.whole < self.ctas
            step = T.if_then_else(is_first, self.end[0] - 1, self.begin[0])
            self.piece_tile[0] = T.truncdiv(step, self.steps)
            tile.locate(self.whole + self.piece_tile[0])
        else:
            self.locate_whole(turn, tile)

    @T.inline
    def keep_piece(self, blocks):
        """Restrict the blocks of the tile that locate() has found to those of the piece."""
        if self.is_piece:
            begin = self.piece_tile[0] * self.steps  # of the tile
            first = T.max(self.begin[0] - begin, 0)
            stop = T.min(self.end[0] - begin, self.steps)
            # The lowest CTA whose piece has a step of the tile
            lowest = T.truncdiv((begin + 1) * self.sharers - 1, self.shared_steps)
            partners = T.if_then_else(stop < self.steps, -1, self.rank[0] - lowest)
            blocks.keep(first, stop, partners, self.rank[0])
        else:
            blocks.keep(0, blocks.steps, 0, self.rank[0])

    @T.inline
    def next_number(self):
        self.number[0] += self.ctas
        if self.number[0] >= self.whole:
            if self.rank[0] >= self.sharers:
                self.number[0] = DONE
            if self.number[0] - self.whole >= self.ctas:
                # The second piece, if the CTA's steps lie in two tiles
                if (self.number[0] - self.whole >= 2 * self.ctas) | (
                    self.begin[0] >= self.piece_tile[0] * self.steps
                ):
                    self.number[0] = DONE

    @T.inline
    def close(self):
        self.reset_tickets()


@T.meta_class
class CausalSharingStream(SharingStream):
    """SharingStream under a causal mask, for tiles with different numbers of steps. It goes from the CTA's last tile to its first.

    A tile costs `tile_cost` and its steps. The tiles of a head follow one another in the order of their queries, then those of the next
    head; each CTA has an equal share of the cost. `steps` of SharingStream is the cost of a head.

    Args:
        blocks: counts the steps of a tile.
    """

    def __init__(
        self,
        order: TileOrder,
        ctas: Any,
        tile_box: TileBox,
        pieces: SharedPieces,
        blocks: SharedKeyBlocks,
        name: str = "stream",
    ):
        super().__init__(order, ctas, tile_box, None, pieces, pieces.head_cost, name=name)
        self.blocks, self.tile_cost = blocks, pieces.tile_cost
        self.shared_steps = order.all_heads * self.steps
        self.before = T.alloc_var("int32", init=0)  # the cost of all tiles before the current one

    def cost(self, block: Any) -> Any:
        return self.tile_cost + self.blocks.steps_from(block * self.blocks.block_M)

    @T.inline
    def start(self):
        self.draw_rank()
        self.begin[0] = T.truncdiv(self.rank[0] * self.shared_steps, self.sharers)
        self.end[0] = T.truncdiv((self.rank[0] + 1) * self.shared_steps, self.sharers)
        head = T.truncdiv(self.end[0] - 1, self.steps)
        self.before[0] = head * self.steps
        self.number[0] = 0
        while self.before[0] + self.cost(self.number[0]) < self.end[0]:
            self.before[0] += self.cost(self.number[0])
            self.number[0] += 1
        self.number[0] += head * self.order.m_blocks
        if self.end[0] - self.before[0] <= self.tile_cost:  # the next CTA has all steps of this tile
            self.go_back()

    @T.inline
    def go_back(self):
        self.number[0] -= 1
        self.before[0] -= self.cost(T.truncmod(self.number[0], self.order.m_blocks))

    @T.inline
    def locate(self, turn, tile):
        tile.locate(self.number[0])

    @T.inline
    def keep_piece(self, blocks):
        first = T.max(self.begin[0] - self.before[0] - self.tile_cost, 0)
        stop = T.min(self.end[0] - self.before[0] - self.tile_cost, blocks.steps)
        # The lowest CTA whose piece has a step of the tile
        lowest = T.truncdiv((self.before[0] + self.tile_cost + 1) * self.sharers - 1, self.shared_steps)
        partners = T.if_then_else(stop < blocks.steps, -1, self.rank[0] - lowest)
        blocks.keep(first, stop, partners, self.rank[0])

    @T.inline
    def next_number(self):
        if self.before[0] > self.begin[0]:
            self.go_back()
        else:
            self.number[0] = DONE


def stream_of(
    config: FwdConfig,
    smem: SmemTiles,
    first: Any,
    order: TileOrder,
    ctas: Any,
    tickets: Any,
    keys: Any,
    blocks: KeyBlocks,
) -> TileStream:
    """The stream of a CTA's tiles. keys: per sequence."""
    box, overflows = smem.tile_box, smem.overflows
    if smem.pieces is not None and blocks.mask.causal:
        return CausalSharingStream(order, ctas, box, smem.pieces, blocks, name="stream")
    if smem.pieces is not None:
        steps = T.ceildiv(keys, config.block_N)
        return SharingStream(order, ctas, box, overflows, smem.pieces, steps, name="stream")
    return TileStream(config.schedule, first, order, ctas, tickets, box, overflows, name="stream")
