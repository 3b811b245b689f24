"""Shared memory of the warps of a CTA for what a program needs of a tile."""

from __future__ import annotations

import tilelang.language as T

from tl_attention.problem.attn_problem import AttnProblem


@T.meta_class
class StagedTiles:
    """Shared memory of the warps of a CTA for tiles of captured tensors, of their gradients where queries are rows, and of
    diagonals: uint8 [bytes].
    """

    def __init__(
        self,
        problem: AttnProblem,
        warps: int,
        cols: int,
        rows_are_keys: bool = False,
        stores: bool = True,
        name: str = "staged",
    ):
        self.tiles = [
            SmemBytes(warps * size, name=f"captured_{n}").bytes
            for n, size in enumerate(problem.staged_bytes(cols, rows_are_keys))
        ]
        self.diagonals = [
            SmemBytes(warps * size, name=f"diagonal_{n}").bytes
            for n, size in enumerate(problem.program.diagonal_bytes(cols))
        ]
        sizes = problem.program.stored_bytes(16, cols) if problem.learns and stores else []
        self.gradients = [SmemBytes(warps * size, name=f"gradient_{n}").bytes for n, size in enumerate(sizes)]


@T.meta_class
class SmemBytes:
    """Buffer with a name of its own, as in pipeline.SharedTile.

    Functions that write it get access_ptr("r"): neither wgmma nor TMA reads it, and for a write TileLang 0.1.15 would put a
    fence.proxy.async, which waits for all memory operations, in front of the next wgmma.
    """

    def __init__(self, size: int, name: str):
        self.bytes = T.alloc_shared([size], "uint8")


def alloc_staged(
    problem: AttnProblem,
    warps: int,
    cols: int,
    rows_are_keys: bool = False,
    stores: bool = True,
) -> StagedTiles | None:
    """StagedTiles; None without a program. stores: the kernel stores gradients of captured tensors."""
    return (
        StagedTiles(problem, warps, cols, rows_are_keys, stores, name="staged")
        if problem.program is not None
        else None
    )
