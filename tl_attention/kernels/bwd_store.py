"""End of the backward by keys: dK and dV of 64 keys leave the registers."""

from __future__ import annotations

import tilelang.language as T

from tl_attention.kernel_configs import BwdPass
from tl_attention.kernels.pipeline import sync_warpgroup
from tl_attention.kernels.products import scale
from tl_attention.kernels.softmax import indices
from tl_attention.kernels.tiles import store_columns
from tl_attention.problem import AttnProblem


@T.macro
def store_gradients(
    problem: AttnProblem,
    config: BwdPass,
    w,
    key,
    counts,
    tile,
    tiles,
    shared,
    softmax_scale,
    dropout,
    dk_chunks,
    dv_chunks,
):
    """Scale dK and dV, and store them through the shared tiles of K and V; in fp32 from registers. As parts if there are several.

    dk_chunks, dv_chunks: fp32 tiles [64, columns] side by side.
    """
    makes_dk, makes_dv = "dk" in config.makes, "dv" in config.makes
    if makes_dk:
        scale(dk_chunks, softmax_scale)
    if makes_dv:
        for n in indices(dv_chunks):
            dropout.scale_kept(dv_chunks[n])
    if problem.is_fp32 and not problem.has("varlen"):
        if counts.parts == 1:
            if makes_dk:
                store_columns(tiles.dK, tile, key, dk_chunks)
            if makes_dv:
                store_columns(tiles.dV, tile, key, dv_chunks)
        else:
            store_parts(makes_dk, makes_dv, tile, key, tiles, dk_chunks, dv_chunks)
    elif problem.is_fp32 or counts.parts > 1:
        store_parts(makes_dk, makes_dv, tile, key, tiles, dk_chunks, dv_chunks)
    else:
        if makes_dk:
            T.copy(dk_chunks[0], shared.K.tiles[w, :, :])
        if makes_dv:
            T.copy(dv_chunks[0], shared.dV[w, :, :])
        T.fence_proxy_async()
        sync_warpgroup(w)
        if makes_dk:
            T.copy(shared.K.tiles[w, :, :], tiles.dk(tile, key, 64))
        if makes_dv:
            T.copy(shared.dV[w, :, :], tiles.dv(tile, key, 64))


@T.macro
def store_parts(makes_dk, makes_dv, tile, key, tiles, dk_chunks, dv_chunks):
    """Store fp32 parts, which bwd_sum.py adds."""
    if makes_dk:
        tiles.dK_parts.store(dk_chunks, tiles.dk_row_block(tiles.dK_parts, tile, key))
    if makes_dv:
        tiles.dV_parts.store(dv_chunks, tiles.dk_row_block(tiles.dV_parts, tile, key))
