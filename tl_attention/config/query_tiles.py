"""Tiles of a forward: which queries they have, and whether their warpgroups skip steps.

A tile has block_M queries, 64 per warpgroup. Tiles are numbered in the order of their queries.
"""

from __future__ import annotations

import math
from typing import Any

from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.problem.attn_problem import AttnProblem

ROWS = 64  # queries of a warpgroup


def end_at_last_query(problem: AttnProblem, config: FwdConfig) -> bool:
    """True if warpgroups without queries are the first ones of tile 0, not the last ones of the last tile.

    Under a causal mask the last tile sees the most keys, and tile 0 the fewest. d64 in tiles of 192 queries and 128 keys has 5 % fewer
    steps at 2k and 4k, 1.5 % at 8k. Tiles of as many queries as keys have no fewer steps. Where CTAs share tiles, d256 took 1.00 to 1.09
    of the time, d64 0.95 to 1.01 (H200, 2026-11-27).
    """
    hides_keys = (problem.causal or problem.has("window")) and problem.program is None
    is_dense = config.page_rows == 0 and not problem.has("varlen")
    stored_by_tma = not config.split and problem.dtype_of("o") != "float32"
    fewer_steps = config.block_M > config.block_N and config.schedule != "stream-K"
    return hides_keys and is_dense and stored_by_tma and fewer_steps


def first_query(tile: Any, tiles: Any, block_M: int, seqlen_q: Any, from_end: bool) -> Any:
    """First query of tile number `tile` of `tiles`: integers, or expressions of a kernel.

    from_end: see end_at_last_query(). Tile 0 then begins at 0 or at a negative multiple of ROWS.
    """
    if from_end:
        return (seqlen_q + ROWS - 1) // ROWS * ROWS - (tiles - tile) * block_M
    return tile * block_M


def first_queries(block_M: int, seqlen_q: int, from_end: bool) -> list[int]:
    """First query of each tile of a head."""
    tiles = -(-seqlen_q // block_M)
    return [first_query(tile, tiles, block_M, seqlen_q, from_end) for tile in range(tiles)]


def hides_steps(problem: AttnProblem, config: FwdConfig) -> bool:
    """True if a mask may hide whole key blocks of a tile from 64 of its queries, and their warpgroup can skip them.

    A causal mask hides the last key blocks from the first queries, a window also the first ones from the last queries. The warpgroup
    releases V of the steps that it skips first after its first S. So K of its first step must be loaded before a V that needs their slots,
    and it skips at most kv_stages + 1 steps. With ping-pong one less: another warpgroup keeps its turn until V of the step before is there.
    """
    further = config.block_M - ROWS  # queries of the other warpgroups
    most_skipped = -(-further // config.block_N)
    most_allowed = config.kv_stages if config.ping_pong else config.kv_stages + 1
    if most_skipped > most_allowed or config.split or config.schedule == "stream-K":
        return False
    if problem.has("window"):  # d64 and d128 gain nothing with tiles of 128 queries (H200, 2026-11-27)
        return config.block_M > 128 and problem.program is None and not problem.has("alibi")
    return problem.is_plain_causal and math.gcd(config.block_M, config.block_N) <= further


def first_row(problem: AttnProblem, config: FwdConfig, warpgroup: Any) -> Any:
    """First query of a warpgroup in its tile.

    Where steps are skipped, warpgroup 0 has the last queries, and so the first steps.
    """
    if hides_steps(problem, config):
        return ROWS * (config.warpgroups - 1 - warpgroup)
    return ROWS * warpgroup


def hides_last_steps(problem: AttnProblem, config: FwdConfig) -> bool:
    """True if a warpgroup may need none of the last steps of its tile, and can skip them.

    Under a window it does not see their keys. Else it has no queries, in the last tile of a sequence: d128 causal 9 x 32 x 777 takes 0.95
    of the time, 40 packed sequences of 500 0.97. A dense problem without a mask takes 1.01 where all warpgroups have queries; options and
    keys in pages were not measured (H200, 2026-11-27).
    """
    if problem.has("window"):
        return hides_steps(problem, config)
    is_plain = set(problem.options) <= {"varlen"} and problem.program is None and not problem.is_fp32
    is_whole = not config.split and config.schedule != "stream-K" and config.page_rows == 0
    may_be_short = (problem.causal or problem.has("varlen")) and not end_at_last_query(problem, config)
    return is_plain and is_whole and may_be_short and config.warpgroups > 1
