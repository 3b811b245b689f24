"""Stores of the backward by keys: dK and dV of 64 keys at its end."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import BwdPass
from tl_attention.kernels.backward.dq_sinks.round import key_policy
from tl_attention.kernels.backward.passes import KeyPass
from tl_attention.kernels.seams.pipeline import indices, sync_warpgroup, wait_for_stores
from tl_attention.kernels.seams.products import scale
from tl_attention.kernels.seams.row_stores import store_columns
from tl_attention.problem.attn_problem import AttnProblem


def dk_tile(config: BwdPass, w: int, smem: Any) -> Any:
    """Shared tile through which dK is stored: that of K, or a separate one if the next keys are loaded meanwhile."""
    return smem.dK[w] if config.is_persistent else smem.K.tiles[w, :, :]


def dv_tile(problem: AttnProblem, config: BwdPass, w: int, smem: Any) -> Any:
    """Shared tile through which dV is stored."""
    return smem.dV[w] if config.has_dv_tile(problem) else smem.dV[w, :, :]


def send(problem: AttnProblem, config: BwdPass, tile: Any, place: Any) -> Any:
    """Store an smem tile by TMA; with the schedule grid also wait until TMA has read it."""
    if not config.is_persistent:
        return T.copy(tile, place)
    return T.tma_copy(tile, place, eviction_policy=key_policy(problem, config))


def is_shared(config: BwdPass, counts: Any, tile: Any, tiles: Any) -> Any:
    """True if several CTAs compute the tile, so that this one has partial gradients."""
    return tiles.shared_number(tile) >= 0 if config.is_stream_k else counts.sharers > 1


@T.macro
def store_gradients(
    key_pass: KeyPass,
    w,
    key,
    tile,
    cta,
    dropout,
    dk_chunks,
    dv_chunks,
):
    """Scale dK and dV, and store them through smem tiles, in fp32 from registers.

    They are stored as partials if several CTAs share the query heads or the tile, with the option `partial`, and in fp32 with packed
    sequences.

    dk_chunks, dv_chunks: fp32 tiles [64, columns] side by side.
    """
    problem, config = key_pass.problem, key_pass.config
    makes_dk, makes_dv = key_pass.makes_dk, key_pass.makes_dv
    counts, tiles, smem = cta.counts, cta.tiles, cta.smem
    # TileLang 0.1.15 names the kernel argument after the variable that was bound to it last
    softmax_scale = cta.softmax_scale
    if makes_dk:
        scale(dk_chunks, softmax_scale)
    if makes_dv:
        for n in indices(dv_chunks):
            dropout.scale_kept(dv_chunks[n])
    if problem.is_fp32 and not problem.has("varlen"):
        if counts.sharers == 1:
            if makes_dk:
                store_columns(tiles.dK, tile, key, dk_chunks)
            if makes_dv:
                store_columns(tiles.dV, tile, key, dv_chunks)
        else:
            store_partials(makes_dk, makes_dv, tile, key, tiles, dk_chunks, dv_chunks)
    elif problem.is_fp32 or problem.has("partial") or is_shared(config, counts, tile, tiles):
        store_partials(makes_dk, makes_dv, tile, key, tiles, dk_chunks, dv_chunks)
    else:
        if config.has_dv_tile(problem):  # gradients of the previous tile have been stored
            wait_for_stores()
            sync_warpgroup(w)
        if makes_dk:
            T.copy(dk_chunks[0], dk_tile(config, w, smem))
        if makes_dv:
            T.copy(dv_chunks[0], dv_tile(problem, config, w, smem))
        T.fence_proxy_async()
        sync_warpgroup(w)
        if makes_dk:
            send(problem, config, dk_tile(config, w, smem), tiles.dk(tile, key, 64))
        if makes_dv:
            send(problem, config, dv_tile(problem, config, w, smem), tiles.dv(tile, key, 64))


@T.macro
def store_partials(makes_dk, makes_dv, tile, key, tiles, dk_chunks, dv_chunks):
    """Store fp32 partials, which sum.py adds."""
    if makes_dk:
        tiles.dK_partials.store(dk_chunks, tiles.dk_row_block(tiles.dK_partials, tile, key))
    if makes_dv:
        tiles.dV_partials.store(dv_chunks, tiles.dk_row_block(tiles.dV_partials, tile, key))
