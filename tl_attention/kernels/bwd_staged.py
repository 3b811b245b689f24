"""P' of a backward by keys in shared memory. dV += P' dO reads it from there where dS' takes the registers of another P'."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.kernel_configs import BwdPass
from tl_attention.kernels.pipeline import ExchangeRing, alloc_each, share, sync_warpgroup
from tl_attention.problem import AttnProblem


def stages_P(problem: AttnProblem, config: BwdPass) -> bool:
    """True if dV reads P' from shared memory. Not in fp32, see legality.py."""
    return has_tiles_of_P(problem, config) or lends_slots(problem, config)


def has_tiles_of_P(problem: AttnProblem, config: BwdPass) -> bool:
    """True if P' has tiles of its own: with dropout."""
    return config.reuse_registers and "dv" in config.makes and problem.has("dropout")


def lends_slots(problem: AttnProblem, config: BwdPass) -> bool:
    """True if P' is in the slots of dS': with a softcap, in steps of 128 queries of the order apart. P' in registers spills 524 bytes."""
    return config.dq_apart and config.block_M == 128 and problem.has("softcap")


def alloc_tiles_of_P(problem: AttnProblem, config: BwdPass) -> TilesOfP | None:
    """Tiles of P', one per warpgroup; None: P' has none of its own."""
    if not has_tiles_of_P(problem, config):
        return None
    return TilesOfP(config.warpgroups, config.block_M, problem.dtype_of("p"))


@T.meta_class
class TilesOfP:
    """Tiles [64, cols] of P', one per warpgroup."""

    def __init__(self, warpgroups: int, cols: int, dtype: str):
        self.tiles = alloc_each(warpgroups, [64, cols], dtype, "P")

    @T.inline
    def write(self, w, step, place, P):
        share(w, (P,), (self.tiles[w],))

    def tile(self, w: int, step: Any) -> Any:
        return self.tiles[w]


@T.meta_class
class SlotsOfDS:
    """Slots of dS', which hold P' of a step until dV is complete.

    Args:
        dS: ExchangeRing of dS'. The `place` of write() is that of its write().
    """

    def __init__(self, dS: ExchangeRing):
        self.dS = dS

    @T.inline
    def write(self, w, step, place, P):
        self.dS.wait_empty(step)
        self.dS.write(place, step, P)

    def tile(self, w: int, step: Any) -> Any:
        return self.dS.tile(step, w)


@T.macro
def publish_P(w, shared):
    """Make P' of a warpgroup in slots of dS' visible to wgmma. Called while dP' is computed, as it takes some 270 clocks (H200,
    2026-11-28).
    """
    if isinstance(shared.P, SlotsOfDS):
        T.fence_proxy_async()
        sync_warpgroup(w)


@T.macro
def wait_to_write_dS(w, step, shared):
    """Wait until a warpgroup may write dS' of a step."""
    if isinstance(shared.P, SlotsOfDS):
        sync_warpgroup(w)  # all warps have dV
    else:
        shared.dS.wait_empty(step)
