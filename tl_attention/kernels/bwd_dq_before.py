"""dQ from registers of the consumers: the warpgroups that own keys compute dQ of a step together, in the step after it.

By then dS' of all warpgroups is in shared memory, and the product runs beside exponentials. dQ is added to sums in global memory, or is
left to the warp that stores it (bwd_one_tile.py). In the order apart a warpgroup of its own computes it (bwd_apart.py).
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.kernel_configs import BwdPass
from tl_attention.kernels.bwd_load import key_step
from tl_attention.kernels.bwd_store import BiasGradient
from tl_attention.kernels.bwd_tiles import dq_pieces
from tl_attention.kernels.pipeline import sync_consumers
from tl_attention.kernels.roles import WARPGROUP
from tl_attention.kernels.softmax import indices
from tl_attention.problem import AttnProblem


@T.meta_class
class StepBefore:
    """Whether a step has one before it in the same tile, and where in dQ_sum dQ of that one goes.

    Args:
        counted: the row block tells the first step of a tile, so that its number takes no register: -1 until a step has been noted.
    """

    def __init__(self, config: BwdPass, counted: bool, name: str = "before"):
        self.counted = counted
        self.row_block = T.alloc_var("int32", init=-1 if config.is_dynamic else 0)

    def exists(self, step: Any, first: Any) -> Any:
        """True if `step` is not the `first` one."""
        return self.row_block[0] >= 0 if self.counted else step > first

    @property
    def is_missing(self) -> Any:
        """True in the first step, if the row block tells it."""
        return self.row_block[0] < 0

    @T.inline
    def note(self, row_block):
        """Note the current step, before the next one begins. row_block: 0 where dQ does not go to dQ_sum from here."""
        self.row_block[0] = row_block


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
        problem: AttnProblem,
        config: BwdPass,
        w: int,
        acc_dq: tuple,
        last: tuple,
        before: StepBefore,
        bias_gradient: BiasGradient,
        first: Any,
        tiles: Any,
        shared: Any,
        softmax_scale: Any,
    ):
        self.config, self.w, self.before, self.first = config, w, before, first
        self.pieces = dq_pieces(config.block_M, problem.head_dim, config.warpgroups)[w]
        self.acc_dq, self.last, self.bias_gradient = acc_dq, last, bias_gradient
        self.tiles, self.shared, self.softmax_scale = tiles, shared, softmax_scale

    @T.inline
    def start(self, step):
        """Issue dQ = dS K of the step before `step`; the first step of a tile issues a product of no use."""
        if self.before.exists(step, self.first):
            self.shared.dS.wait(step - 1)
            self.bias_gradient.store(step - 1)
        # step + 1 has the slot of step - 1
        self.multiply(step + 1, self.acc_dq)

    @T.inline
    def free_dS(self, step):
        """Release dS' of the step before, when dQ is complete."""
        if self.before.exists(step, self.first):
            self.bias_gradient.wait()
            self.shared.dS.release(step - 1)

    @T.inline
    def free_and_add(self, step):
        """Release dS' of the step before, and pass its dQ on."""
        if self.before.exists(step, self.first):
            self.bias_gradient.wait()
            self.shared.dS.release(step - 1)
            self.shared.adding.wait(step - 1)
            self.pass_on(self.acc_dq)
            self.shared.adding.announce(step - 1)

    @T.inline
    def add(self, step):
        """Pass dQ of the step before on."""
        if self.before.exists(step, self.first):
            self.shared.adding.wait(step - 1)
            self.pass_on(self.acc_dq)
            self.shared.adding.announce(step - 1)

    @T.inline
    def finish(self, step, turn):
        """Compute dQ of the last step of a tile, pass it on, and free K."""
        shared, config = self.shared, self.config
        shared.dS.wait(step)
        # Before the GEMM: after it nvcc 13.0.88 spills 150 bytes at d128
        shared.adding.wait(step)
        self.multiply(step, self.last)
        self.bias_gradient.store(step)
        T.wait_wgmma(0)
        self.bias_gradient.wait()
        shared.dS.release(step)
        if config.is_dynamic:
            for other in tuple(range(config.warpgroups)):
                shared.K.release(key_step(config, turn, other))
        self.pass_on(self.last)
        shared.adding.announce(step)
        if not config.is_dynamic:
            sync_consumers(WARPGROUP * config.warpgroups)  # all warpgroups have read K

    @T.inline
    def multiply(self, step, acc_dq):
        """Issue dQ = dS K of the slot of a step, the sum over the keys of all warpgroups."""
        for i, (rows, cols) in enumerate(self.pieces):
            for other in tuple(range(self.config.warpgroups)):
                T.wgmma_gemm(
                    self.shared.dS.columns(step, other, rows),
                    self.shared.K.tiles[other, :, cols],
                    acc_dq[i],
                    transpose_A=True,
                    policy=T.GemmWarpPolicy.FullRow,
                    clear_accum=other == 0,
                )

    @T.inline
    def pass_on(self, acc_dq):
        """Add dQ to the sums, or leave it to the warp that stores dQ."""
        if self.config.one_tile:
            self.shared.adding.write(self.w, acc_dq, self.softmax_scale)
        else:
            for i in indices(acc_dq):
                rows, cols = self.pieces[i]
                self.tiles.dQ_sum.add(acc_dq[i], self.before.row_block[0] + rows.start // 16, cols.start)
