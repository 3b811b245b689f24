"""Split of an fp32 tile into its bf16 terms, in shared memory, by the warpgroup that multiplies them.

For inputs that one CTA reads, or few: Q of a forward, K and V of a backward by keys. TMA brings the tile as bf16 numbers, two per fp32
number, to the place of its terms.
"""

from __future__ import annotations

import tilelang.language as T

from tl_attention.kernels.seams.pipeline import TileRing, sync_warpgroup
from tl_attention.problem.attn_problem import AttnProblem


@T.macro
def split_tile(problem: AttnProblem, w, ring: TileRing, step, target=None):
    """Split the tile [64, terms * width] of a step, which the warpgroup has waited for. Needs split_tile.cuh.

    target: rows of a tensor of terms, which TMA also stores the tile to: see wait_for_stores().
    """
    width = ring.tiles.shape[2] // problem.terms
    # The slot by its number: TileLang 0.1.15 takes no address of element 32768, where the second slot of d256 begins
    T.evaluate(
        T.call_extern(
            "handle",
            f"tl_attention_split_tile<{width}, {problem.terms}>",
            T.address_of(ring.tiles[0, 0, 0]),
            step % ring.slots,
        )
    )
    T.fence_proxy_async()
    sync_warpgroup(w)
    if target is not None:
        T.tma_copy(ring.tiles[step % ring.slots, :, :], target)
