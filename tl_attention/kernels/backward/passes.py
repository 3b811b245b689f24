"""A pass of the backward by keys: what it makes, which registers its tiles have, and when its scores are masked.

Tiles are [keys, queries], so S' is the transpose of S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import BwdPass
from tl_attention.kernels.scores.options import OptionArguments, Scores
from tl_attention.kernels.seams.softmax import SMALLEST_SCALE
from tl_attention.problem.attn_problem import AttnProblem


@dataclass(frozen=True)
class KeyPass:
    """A problem and the config of a pass over it, with what follows from them."""

    problem: AttnProblem
    config: BwdPass

    @property
    def makes_dk(self) -> bool:
        return "dk" in self.config.makes

    @property
    def makes_dv(self) -> bool:
        return "dv" in self.config.makes

    @property
    def shares_dS(self) -> bool:
        """True if dQ is computed over the keys of a tile, from dS' of all warpgroups in shared memory."""
        return "dq" in self.config.makes and not self.problem.is_fp32

    @property
    def makes_dq_late(self) -> bool:
        """True if the consumers compute dQ of a step in the next one, see dq_before.py."""
        return self.shares_dS and not self.config.dq_apart

    @property
    def adds_own_dq(self) -> bool:
        """True if each warpgroup adds dQ' = K' dS' of its keys to dQ itself, in the step that makes dS': fp32."""
        return "dq" in self.config.makes and self.problem.is_fp32

    @property
    def by_block(self) -> bool:
        """True if products are summed by block, see products.py."""
        return self.problem.terms > 1 and not self.config.one_sum

    @property
    def dS_in_P(self) -> bool:
        """True if dS' takes the registers of P'."""
        return self.config.reuse_registers and self.config.order != "separate-dS"

    @property
    def keeps_rest(self) -> bool:
        """True if P' in fp32 is restored from its rounded value and the bits cut off, as dP' takes its registers: see cuda/rest.cuh."""
        return self.config.reuse_registers and self.makes_dk and not self.problem.is_fp32

    def function_of_rest(self, name: str) -> str:
        """One of cuda/rest.cuh, with its template arguments."""
        is_fp16 = int(self.problem.dtype_of("p") == "float16")
        return f"tl_attention_{name}<{is_fp16}, {str(self.problem.is_sloped).lower()}, {self.config.block_M // 2}>"

    @property
    def has_two_P(self) -> bool:
        """True if dV and dS' need different P': with a slope of scores in a pass that makes dk and dv."""
        return self.problem.is_sloped and self.makes_dk and self.makes_dv

    @property
    def stages_P(self) -> bool:
        """True if dV reads P' from shared memory: with dropout, if dS' takes the registers of another P'. Not in fp32, see legality.py."""
        return self.config.reuse_registers and self.makes_dv and self.problem.has("dropout")

    @property
    def separates_P(self) -> bool:
        """True if P' for dV has registers of its own, as dS' is made in those of another P'.

        P' for dV has dropout, and P' for dS' has the slope of the softcap.
        """
        return self.stages_P or (self.config.reuse_registers and self.makes_dv and self.problem.is_sloped)

    @property
    def frees_V_early(self) -> bool:
        """True if the tile of V is free after the last product, as dV does not leave through it."""
        return self.config.has_dv_tile(self.problem) or self.problem.is_fp32

    @property
    def prefetches_lse(self) -> bool:
        """True if log-sum-exps are loaded before S' is waited for: shared memory is busy with GEMMs and slow to answer.

        Full d64 at 4k 435 -> 479 TFLOPS, d128 509 -> 525 (H200, 2026-11-21). dk+dv, ALiBi and dense biases by 128 spill with it, dv of d256
        was slower.
        """
        if self.problem.has("alibi") or (self.problem.fetches and self.config.block_M > 64):
            return False
        return self.shares_dS or not self.makes_dv

    @property
    def hides_raw(self) -> bool:
        """True if the mask of a program sets raw scores to -inf, before the program changes them.

        Such scores stay -inf if the program changes none, or adds a value per diagonal; the latter only in steps of 128 queries, as it
        spills in steps of 64 (d128, nvcc 13.0.88).
        """
        adds = self.problem.is_diagonal_bias and self.config.block_M == 128
        return self.shares_dS and (self.problem.is_mask_of_bits or adds)

    @property
    def masks_before_exp(self) -> bool:
        """True if S' is masked instead of P'. The exponential is then in one basic block with the code after it.

        Full d64 455 -> 474 TFLOPS, d256 dv 833 -> 781 us (H200, 2026-11-21). dk+dv of 192/128 spills. With a softcap dk+dv must mask first,
        for the P' of dV, and dk alone spills.
        """
        if self.problem.program is not None:
            return self.hides_raw
        return self.shares_dS or (self.makes_dk and self.makes_dv) == self.problem.is_sloped

    def scores(self, options: OptionArguments, softmax_scale: Any, staged: Any) -> Scores:
        """Scores [keys, queries]. staged: see alloc_staged."""
        problem, config, scale = self.problem, self.config, softmax_scale
        if self.hides_raw and problem.changes_scores:  # masked raw scores have to stay -inf
            scale = T.if_then_else(softmax_scale == 0, SMALLEST_SCALE, softmax_scale)
        return Scores(
            problem,
            options,
            scale,
            config.block_M,
            rows_are_keys=True,
            staged=staged,
            hides_raw=self.hides_raw,
            by_element=not config.has_linear_bias(problem),
            # In steps of 64 queries pairs spill in other orders, and were 7 % slower in one without spills (d128, H200, 2026-11-23). In the
            # order apart 5.54 -> 5.50 ms (relative bias, B2 8k, 16 heads, H200, 2026-11-27)
            sums_pairs=config.block_M == 128 or config.dq_apart,
        )
