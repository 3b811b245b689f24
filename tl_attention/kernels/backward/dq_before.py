"""dQ from registers of the consumers: the warpgroups that own keys compute dQ of a step together, in the step after it.

By then dS' of all warpgroups is in shared memory, and the product runs beside exponentials. dQ is added to sums in global memory, or is
left to the warp that stores it (dq_sinks/one_tile.py). In the order apart a warpgroup of its own computes it (dq_sinks/apart.py).
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import BwdPass
from tl_attention.kernels.backward.key_tiles import dq_pieces
from tl_attention.kernels.backward.load import key_step
from tl_attention.kernels.backward.passes import KeyPass
from tl_attention.kernels.seams.pipeline import sync_consumers, wait_for_stores
from tl_attention.kernels.seams.roles import WARPGROUP


@T.meta_class
class StepBefore:
    """The step before in the same tile, if there is one, and the row block that its dQ goes to.

    Args:
        counted: the row block tells the first step of a tile, so that its number takes no register: -1 until a step has been noted.
    """

    def __init__(self, config: BwdPass, counted: bool, name: str = "before"):
        self.counted = counted
        self.row_block = T.alloc_var("int32", init=-1 if config.is_persistent else 0)

    def exists(self, step: Any, first: Any) -> Any:
        """True if `step` is not the `first` one."""
        return self.row_block[0] >= 0 if self.counted else step > first

    @property
    def is_missing(self) -> Any:
        """True in the first step, if the row block tells it."""
        return self.row_block[0] < 0

    @T.inline
    def note(self, row_block):
        """Note the current step, before the next one begins. row_block: of DqSink."""
        self.row_block[0] = row_block


@T.meta_class
class BiasGradient:
    """Stores dS' as the gradient of a dense bias, a step late: by TMA, from the smem tile that all warpgroups wait for to compute dQ.

    Args:
        on: dS' is stored so; else all methods do nothing.
        tiles: Exchange or ExchangeRing of dS'.
        w, key: the warpgroup and its first key.
    """

    def __init__(self, on: bool, traced: Any, tiles: Any, w: int, key: Any, name: str = "bias_gradient"):
        self.on, self.traced, self.tiles, self.w, self.key = on, traced, tiles, w, key
        # Position of the tile that was written last
        self.head, self.query = (T.alloc_var("int32", init=0) if on else None for _ in range(2))

    @T.inline
    def locate(self, blocks):
        """Note the position of the current step, before it advances."""
        if self.on:
            self.head[0] = blocks.head
            self.query[0] = blocks.query

    def store(self, step: Any) -> None:
        """Start to store the tile of the step that was located last, after all warps have written it."""
        if self.on:
            self.traced.send_dS(self.tiles.tile(step, self.w), self.head[0], self.query[0], self.key)

    @T.inline
    def wait(self):
        """Wait until the tile may be overwritten."""
        if self.on:
            wait_for_stores()


@T.meta_class
class DqBefore:
    """dQ of the step before.

    Args:
        acc_dq: pieces of it that warpgroup w computes.
        last: those of the last step of a tile.
        first: first step of the tile.
    """

    def __init__(
        self,
        key_pass: KeyPass,
        w: int,
        acc_dq: tuple,
        last: tuple,
        before: StepBefore,
        bias_gradient: BiasGradient,
        first: Any,
        cta: Any,
    ):
        config = key_pass.config
        self.config, self.w, self.before, self.first = config, w, before, first
        self.pieces = dq_pieces(config.block_M, key_pass.problem.head_dim, config.warpgroups)[w]
        self.acc_dq, self.last, self.bias_gradient = acc_dq, last, bias_gradient
        self.smem = cta.smem

    @T.inline
    def start(self, step):
        """Issue dQ = dS K of the step before `step`; the first step of a tile issues a product of no use."""
        if self.before.exists(step, self.first):
            self.smem.dS.wait(step - 1)
            self.bias_gradient.store(step - 1)
        # step + 1 has the slot of step - 1
        self.multiply(step + 1, self.acc_dq)

    @T.inline
    def free_dS(self, step):
        """Release dS' of the step before, when dQ is complete."""
        if self.before.exists(step, self.first):
            self.bias_gradient.wait()
            self.smem.dS.release(step - 1)

    @T.inline
    def free_and_add(self, step):
        """Release dS' of the step before, and pass its dQ on."""
        if self.before.exists(step, self.first):
            self.bias_gradient.wait()
            self.smem.dS.release(step - 1)
            self.pass_on(step - 1)

    @T.inline
    def add(self, step):
        """Pass dQ of the step before on."""
        if self.before.exists(step, self.first):
            self.pass_on(step - 1)

    @T.inline
    def pass_on(self, step):
        """Pass dQ of a step on, when it may be added."""
        dq = self.smem.dq
        dq.wait_free(step)
        dq.add(self.w, self.acc_dq, self.before.row_block[0])
        dq.announce(step)

    @T.inline
    def finish(self, step, turn):
        """Compute dQ of the last step of a tile, pass it on, and free K."""
        smem, config = self.smem, self.config
        smem.dS.wait(step)
        # Before the GEMM: after it nvcc 13.0.88 spills 150 bytes at d128
        smem.dq.wait_free(step)
        self.multiply(step, self.last)
        self.bias_gradient.store(step)
        T.wait_wgmma(0)
        self.bias_gradient.wait()
        smem.dS.release(step)
        if config.is_persistent:
            for other in tuple(range(config.warpgroups)):
                smem.K.release(key_step(config, turn, other))
        smem.dq.add(self.w, self.last, self.before.row_block[0])
        smem.dq.announce(step)
        if not config.is_persistent:
            sync_consumers(WARPGROUP * config.warpgroups)  # all warpgroups have read K

    @T.inline
    def multiply(self, step, acc_dq):
        """Issue dQ = dS K of the slot of a step, the sum over the keys of all warpgroups."""
        for i, (rows, cols) in enumerate(self.pieces):
            for other in tuple(range(self.config.warpgroups)):
                T.wgmma_gemm(
                    self.smem.dS.columns(step, other, rows),
                    self.smem.K.tiles[other, :, cols],
                    acc_dq[i],
                    transpose_A=True,
                    policy=T.GemmWarpPolicy.FullRow,
                    clear_accum=other == 0,
                )
