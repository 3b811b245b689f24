"""Warp beside the producer of a forward that follows its tiles and loads V of keys in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernel_configs import FwdConfig
from tl_attention.kernels.mask import KeyBlocks, Mask
from tl_attention.kernels.options import OptionArguments
from tl_attention.kernels.scheduler import Tile, TileOrder
from tl_attention.kernels.tiles import SharedTiles
from tl_attention.problem import AttnProblem


@dataclass(frozen=True)
class Followed:
    """Arguments of a kernel that this warp needs."""

    problem: AttnProblem
    config: FwdConfig
    lengths: tuple[Any, Any]  # queries, keys
    splits: Any
    first_tile: Any
    order: TileOrder
    tiles: Any
    shared: SharedTiles
    options: OptionArguments


def steps_from(config: FwdConfig, first: int, steps: Any) -> Any:
    """Loop over the steps from `first` on. Unrolled by 4, as nvcc would, a producer that recomputes tiles has too few registers."""
    if config.hold_max:
        return T.unroll(first, steps, annotations={"pragma_unroll_factor": 1})
    return T.serial(first, steps)


@T.macro
def follow_tiles(followed, tile, blocks, work):
    """Call work(first step) for the tiles that the producer posts, or for the CTA's only tile."""
    config, shared = followed.config, followed.shared
    if config.schedule != "grid":
        turn = T.alloc_var("int32", init=0)
        shared.tile_box.wait(0)
        while not shared.tile_box.at_end(turn):
            shared.tile_box.read_tile(turn, tile)
            tile.find_kv_head()
            shared.tile_box.read_blocks(turn, blocks)
            work(shared.tile_box.first_step(turn))
            turn += 1
            shared.tile_box.wait(turn)
    else:
        tile.locate(followed.first_tile)
        if tile.exists:
            blocks.start(tile.m_block * config.block_M)
            if config.split:
                blocks.keep_share(tile.split, followed.splits)
            work(0)


@T.macro
def load_values(followed, first_step, tile, blocks):
    for step in steps_from(followed.config, 0, blocks.steps):
        followed.tiles.load_v(followed.shared.V, first_step + step, tile, blocks, step)


@T.macro
def produce_values(followed):
    """Load V of all tiles."""
    config = followed.config
    tile = Tile(followed.order)
    mask = Mask.of(followed.problem, followed.options, tile, *followed.lengths)
    blocks = KeyBlocks(mask, config.block_M, config.block_N, config.split, overlap=config.hold_max)
    follow_tiles(followed, tile, blocks, lambda first_step: load_values(followed, first_step, tile, blocks))
