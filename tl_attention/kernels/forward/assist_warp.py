"""Warp beside the producer of a forward that follows its tiles and loads V of keys in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.kernels.scores.mask import KeyBlocks, Mask
from tl_attention.kernels.seams.scheduler import Tile, TileOrder
from tl_attention.problem.attn_problem import AttnProblem


@dataclass(frozen=True)
class Followed:
    """Arguments of a kernel that this warp needs. cta: kernel.Cta."""

    problem: AttnProblem
    config: FwdConfig
    lengths: tuple[Any, Any]  # queries, keys
    splits: Any
    first_tile: Any
    order: TileOrder
    cta: Any


def loop_over(config: FwdConfig, first: int, steps: Any) -> Any:
    """Loop over the steps from `first` on. Unrolled by 4, as nvcc would, a producer that recomputes tiles has too few registers."""
    if config.hold_max:
        return T.unroll(first, steps, annotations={"pragma_unroll_factor": 1})
    return T.serial(first, steps)


@T.macro
def load_values(followed, first_step, tile, blocks):
    cta = followed.cta
    for step in loop_over(followed.config, 0, blocks.steps):
        cta.tiles.load_v(cta.smem.V, first_step + step, tile, blocks, step)


@T.macro
def produce_values(followed):
    """Load V of the tiles that the producer posts, or of the CTA's only tile."""
    config = followed.config
    tile = Tile(followed.order, loads_keys=True)
    mask = Mask.of(followed.problem, followed.cta.options, tile, *followed.lengths)
    blocks = KeyBlocks(mask, config.block_M, config.block_N, config.split, overlap=config.hold_max)
    if config.schedule != "grid":
        followed.cta.smem.tile_box.each_posted(
            tile, blocks, lambda _, first_step: load_values(followed, first_step, tile, blocks)
        )
    else:
        tile.locate(followed.first_tile)
        if tile.exists:
            blocks.start(tile.m_block * config.block_M)
            if config.split:
                blocks.keep_share(tile.split, followed.splits)
            load_values(followed, 0, tile, blocks)
