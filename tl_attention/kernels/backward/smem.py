"""Shared memory of the backward by keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tl_attention.config.kernel_configs import BwdPass
from tl_attention.config.term_configs import splits_keys
from tl_attention.kernels.backward.dq_sinks.sink import DqSink
from tl_attention.kernels.backward.key_tiles import KeyTileBox, key_chunk
from tl_attention.kernels.backward.passes import KeyPass
from tl_attention.kernels.scores.linear_bias import alloc_bias_columns
from tl_attention.kernels.scores.staged import alloc_staged
from tl_attention.kernels.seams.pipeline import (
    TileRing,
    alloc_each,
    alloc_exchange,
    alloc_swizzled,
    alloc_terms,
    input_ring,
)
from tl_attention.kernels.sources.tiles import SmemTiles
from tl_attention.problem.attn_problem import AttnProblem


def alloc_key_rings(problem: AttnProblem, config: BwdPass) -> tuple[TileRing, TileRing | None]:
    """Rings of K and V, a step per 64 keys. A pass that makes dv alone has no V."""
    warpgroups, raw_fp32 = config.warpgroups, splits_keys(problem, config.makes)
    shares_dq = config.makes_all and not problem.is_fp32
    # Warps that read K: for dq all of them
    readers = 4 * warpgroups if config.is_persistent and shares_dq else 4
    if config.dq_apart:
        readers = 8  # those of the warpgroup that owns the keys, and those of dq
    chunk = key_chunk(config.block_M, problem.head_dim, warpgroups) if shares_dq else 64
    K = input_ring(problem, "K", [warpgroups, 64], problem.head_dim, readers, raw_fp32, chunk)
    if "dk" not in config.makes:
        return K, None
    return K, input_ring(problem, "V", [warpgroups, 64], problem.head_dim_v, 4, raw_fp32)


def alloc_dv(problem: AttnProblem, config: BwdPass, K: TileRing, V: TileRing | None) -> Any:
    """Tiles through which dV is stored: those of V; without V those of K, if as wide; else separate ones."""
    if config.has_dv_tile(problem):
        return alloc_each(config.warpgroups, [64, problem.head_dim_v], problem.dtype_of("dv"), "dV")
    if V is not None:
        return V.tiles
    if problem.head_dim == problem.head_dim_v:
        return K.tiles
    return alloc_swizzled([config.warpgroups, 64, problem.head_dim_v], problem.dtype_of("dv"))


def alloc_ds(problem: AttnProblem, config: BwdPass) -> Any:
    """Tiles [64, block_M] of dS' for dq; in fp32 one per warpgroup, which alone reads it, and per term."""
    if "dq" not in config.makes:
        return None
    if problem.is_fp32:
        return alloc_terms(
            config.warpgroups, problem.terms, [64, config.block_M], problem.dtype_of("ds"), "dS"
        )
    readers = 4 if config.dq_apart else None
    shape = config.warpgroups, config.block_M, problem.dtype_of("ds")
    return alloc_exchange(config.order != "", *shape, "dS", readers)


def alloc_smem_tiles(
    problem: AttnProblem,
    config: BwdPass,
    K: TileRing,
    V: TileRing | None,
    dV: Any,
    inputs: Any,
    alloc_dq: Callable[[], DqSink],
) -> SmemTiles:
    """Allocate the remaining SmemTiles of a CTA. alloc_dq: makes the way of dQ, with its shared memory."""
    dtype_of, terms, warpgroups, block_M = problem.dtype_of, problem.terms, config.warpgroups, config.block_M
    persistent, consumer_warps = config.is_persistent, 4 * warpgroups
    row_values = 2 if "dk" in config.makes else 1  # Lse_log2 and, for dS', Delta
    q_shape = [config.num_stages, block_M, terms * problem.head_dim]
    do_shape = [config.num_stages_do, block_M, terms * problem.head_dim_v]
    dk_shape = [64, problem.head_dim]
    has_dk = persistent and not problem.is_fp32  # fp32 leaves from registers
    stores_tiles = config.adds_dq and not problem.sends_dS
    # Warps beside the consumers' that read the box: two that keep the order of additions, one that stores dQ, four that compute it
    other_readers = 2 * config.is_ordered + config.one_tile + 4 * config.dq_apart
    has_table, late, ordered = problem.has("varlen"), config.draws_late, config.is_ordered
    box = consumer_warps + other_readers, has_table, late, ordered, config.has_five_counts(problem)
    Q = TileRing(q_shape, dtype_of("q"), consumer_warps, "Q", row_values, terms=terms)
    dO = TileRing(do_shape, dtype_of("do"), consumer_warps, "dO", terms=terms)
    P = (
        alloc_each(warpgroups, [64, block_M], dtype_of("p"), "P")
        if KeyPass(problem, config).stages_P
        else None
    )
    return SmemTiles(
        Q=Q,
        dO=dO,
        K=K,
        V=V,
        P=P,
        dV=dV,
        dS=alloc_ds(problem, config),
        dK=alloc_each(warpgroups, dk_shape, dtype_of("dk"), "dK") if has_dk else None,
        tile_box=KeyTileBox(*box) if persistent else None,
        dq=alloc_dq(),
        bias_columns=alloc_bias_columns(problem, block_M) if config.has_linear_bias(problem) else None,
        staged=alloc_staged(problem, consumer_warps, block_M, rows_are_keys=True, stores=stores_tiles),
        inputs=inputs,
    )
