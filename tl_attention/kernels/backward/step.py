"""Parts of a step of the backward by keys, for the 64 keys of a warpgroup: each issues one product, or computes one tile in registers.

product_orders.py has the orders in which a step calls them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import sum_columns
from tl_attention.config.term_configs import splits_keys, stores_key_terms
from tl_attention.kernels.backward.dq_before import BiasGradient, DqBefore, StepBefore
from tl_attention.kernels.backward.key_tiles import KeyRowsMask, dq_pieces, piece_shape, scores_come_first
from tl_attention.kernels.backward.load import key_step
from tl_attention.kernels.backward.passes import KeyPass
from tl_attention.kernels.scores.dropout import Dropout
from tl_attention.kernels.scores.options import OptionArguments, Scores
from tl_attention.kernels.seams import products as tile_products
from tl_attention.kernels.seams.pipeline import alloc_fragments, indices, share, wait_for_stores
from tl_attention.kernels.seams.softmax import probabilities, softmax_backward
from tl_attention.kernels.seams.split_tile import split_tile


@dataclass(frozen=True)
class Cta:
    """Arguments and memory of a CTA, for all its key tiles.

    Args:
        counts: KeyTileCounts.
        tiles: where rows are in global memory.
        smem: SmemTiles.
        heads: query heads.
    """

    counts: Any
    tiles: Any
    smem: Any
    options: OptionArguments
    softmax_scale: Any
    heads: Any


@dataclass(frozen=True)
class Elements:
    """Changes of scores, dropout and mask, with which P' and dS' of a tile are computed from S' and dP'."""

    scores: Scores
    dropout: Dropout
    mask: KeyRowsMask
    scale_log2: Any  # factor of scores in base 2


@T.meta_class
class KeyStep:
    """The registers of warpgroup w for a key tile, and the parts of a step against block_M queries.

    Args:
        key: first of the 64 keys.
        turn: number of the tile in its CTA.
        first: first step of the tile, counted through all tiles of the CTA.
    """

    def __init__(
        self,
        key_pass: KeyPass,
        w: int,
        key: Any,
        turn: Any,
        first: Any,
        tile: Any,
        blocks: Any,
        elements: Elements,
        cta: Cta,
        name: str = "step",
    ):
        self.key_pass, self.w, self.key, self.turn, self.first = key_pass, w, key, turn, first
        self.problem, self.config = problem, config = key_pass.problem, key_pass.config
        self.tile, self.blocks, self.tiles, self.smem = tile, blocks, cta.tiles, cta.smem
        self.heads, self.softmax_scale = cta.heads, cta.softmax_scale
        self.scores, self.dropout, self.mask = elements.scores, elements.dropout, elements.mask
        self.scale_log2, self.products = elements.scale_log2, problem.products
        # Ring that the last product of a step reads
        self.last_read = cta.smem.Q if key_pass.makes_dk else cta.smem.dO
        self.steps_before = 0 if problem.program is None else first  # steps of other tiles
        # Sums of diagonals are added beside the next S', but not in steps of 64 queries: 6.26 ms in place of 5.81 (d128, H200, 2026-11-23)
        self.adds_learned_late = config.block_M == 128

        block_M, reuse, terms = config.block_M, config.reuse_registers, problem.terms
        head_dim, head_dim_v, tile_shape = problem.head_dim, problem.head_dim_v, [64, config.block_M]
        sum_cols = sum_columns(problem, config)
        dk_cols, dv_cols = (sum_cols if key_pass.by_block else width for width in (head_dim, head_dim_v))
        self.acc_s = T.alloc_fragment(tile_shape, "float32")  # S' [keys, queries], then P'
        self.P = T.alloc_fragment(tile_shape, problem.dtype_of("p"))  # P' [keys, queries]
        self.P_for_dv = (
            T.alloc_fragment(tile_shape, problem.dtype_of("p")) if key_pass.separates_P else self.P
        )
        # Bits that rounding to P cuts off
        self.rest = T.alloc_local([config.block_M // 8], "uint32") if key_pass.keeps_rest else None
        self.acc_dp = self.acc_s if reuse else T.alloc_fragment(tile_shape, "float32")  # dP' [keys, queries]
        # dS' [keys, queries]
        self.dS = self.P if key_pass.dS_in_P else T.alloc_fragment(tile_shape, problem.dtype_of("ds"))
        self.P_terms = (self.P_for_dv, *tile_products.alloc_further_terms(tile_shape, terms))
        further = self.P_terms[1:] if reuse else tile_products.alloc_further_terms(tile_shape, terms)
        self.dS_terms = (self.dS, *further)
        acc_dk = T.alloc_fragment([64, dk_cols], "float32")
        acc_dv = T.alloc_fragment([64, dv_cols], "float32")
        self.dk_chunks = (acc_dk, *alloc_fragments([[64, dk_cols]] * (head_dim // dk_cols - 1), "float32"))
        self.dv_chunks = (acc_dv, *alloc_fragments([[64, dv_cols]] * (head_dim_v // dv_cols - 1), "float32"))
        # fp32: two accumulators of one key and query block, used in turn, see products.Job
        self.sums = alloc_fragments([[64, sum_cols]] * (2 if sum_cols else 0), "float32")
        pieces = dq_pieces(block_M, head_dim, config.warpgroups)[w]
        acc_dq = alloc_fragments([piece_shape(x) for x in pieces if not config.dq_apart], "float32")
        # dQ of the last step. In acc_dq, nvcc 13.0.88 serializes all wgmma of d64 that computes several tiles
        last_dq = alloc_fragments([x.shape for x in acc_dq], "float32") if config.is_persistent else acc_dq
        self.lse_log2 = T.alloc_fragment([block_M], "float32")
        self.before = StepBefore(config, counted=config.is_persistent and key_pass.shares_dS, name="before")
        sends_dS = key_pass.shares_dS and problem.sends_dS
        self.bias_gradient = BiasGradient(sends_dS, self.scores.traced, cta.smem.dS, w, key, name="dbias")
        # Where this thread writes dS'
        self.dS_address = T.alloc_var("int32", init=cta.smem.dS.address(w)) if config.order else None
        self.dq = DqBefore(key_pass, w, acc_dq, last_dq, self.before, self.bias_gradient, first, cta)

    @property
    def P_operands(self) -> tuple:
        """Tiles of P' that dV is the product of."""
        return (self.smem.P[self.w],) if self.key_pass.stages_P else self.P_terms

    def wait_all_but(self, *products: str) -> Any:
        """Wait until no products but these, which were issued last, are in flight."""
        counts = {
            "S": len(self.products) + self.config.has_linear_bias(self.problem),
            "dP": len(self.products) * self.key_pass.makes_dk,
            "dV": len(self.products) * self.key_pass.makes_dv,
            "dK": len(self.products) * self.key_pass.makes_dk,
        }
        return T.wait_wgmma(sum(counts[name] for name in products))

    @property
    def key_step(self) -> Any:
        """Step of the K and V rings that holds the keys."""
        return key_step(self.config, self.turn, self.w)

    @T.inline
    def wait_for_keys(self):
        """Wait for K; if the consumers compute dQ, for K of all warpgroups."""
        config, late_dq = self.config, self.key_pass.makes_dq_late
        # Cleared: else nvcc keeps S' and dQ from tile to tile: d128 causal spilled 16 bytes (nvcc 13.0.88)
        if config.is_persistent:
            tile_products.clear((*(self.dq.acc_dq if late_dq else ()), self.acc_s))
        for other in tuple(range(config.warpgroups)) if late_dq else (self.w,):
            self.smem.K.wait(key_step(config, self.turn, other))
        if splits_keys(self.problem, config.makes):
            terms = self.tiles.k_terms(self.tile, self.key, 64)
            split_tile(self.problem, self.w, self.smem.K, self.key_step, terms)

    @T.inline
    def wait_for_values(self):
        """Wait for V, unless the first step does, and begin the sums of dK and dV."""
        if self.key_pass.makes_dk:
            if not self.waits_for_V_late:
                self.smem.V.wait(self.key_step)
            if splits_keys(self.problem, self.config.makes):
                terms = self.tiles.v_terms(self.tile, self.key, 64)
                split_tile(self.problem, self.w, self.smem.V, self.key_step, terms)
            tile_products.clear(self.dk_chunks)
        if self.key_pass.makes_dv:
            tile_products.clear(self.dv_chunks)

    @T.inline
    def finish(self, last):
        """Wait for the last products, release what the last step has read, and pass its dQ on."""
        smem, config, key_pass = self.smem, self.config, self.key_pass
        T.wait_wgmma(0)
        if stores_key_terms(self.problem, config.makes):
            wait_for_stores()
        if config.is_persistent:
            self.last_read.release(last)
            if scores_come_first(self.problem, config):  # a step releases dO of the step before it
                smem.dO.release(last)
            if key_pass.frees_V_early:
                smem.V.release(self.key_step)
        # Else dq.finish() releases K, or the CTA has one tile
        if config.dq_apart or (config.is_persistent and self.problem.is_fp32):
            smem.K.release(self.key_step)
        if key_pass.makes_dq_late:
            self.dq.finish(last, self.turn)

    @T.inline
    def start_scores(self, step, head):
        """Issue S' = K Q', accumulated on the linear bias if there is one."""
        smem = self.smem
        self.scores.start(self.tile.batch, head, self.scale_log2)
        self.scores.begin(self.acc_s, smem.bias_columns)
        tile_products.multiply(
            self.products,
            smem.K.terms_of(self.w),
            smem.Q.terms_of(step),
            self.acc_s,
            transpose_B=True,
            clear_accum=not self.config.has_linear_bias(self.problem),
        )

    @T.inline
    def start_next_scores(self, step):
        """Issue S' of the next step, and add the sums of learned gradients beside it.

        After the last step it may read a slot that is empty or being filled: nothing reads this S'.
        """
        if step + 1 < self.first + self.blocks.steps:
            self.smem.Q.wait(step + 1)
        next_head = T.min(self.blocks.next_head, self.heads - 1)
        self.start_scores(step + 1, next_head)
        self.add_learned()

    @T.inline
    def add_learned(self):
        """Add the sums of diagonals that dS' is the gradient of, if compute_dS() has not."""
        if self.adds_learned_late:
            self.scores.add_learned(self.blocks)

    @T.inline
    def finish_scores(self, step, begin):
        """Wait for S' and the last GEMM of the step before, after the loads that the exponentials need."""
        if self.key_pass.prefetches_lse:
            self.smem.Q.read_row_values(step, 0, self.lse_log2)
        self.dropout.start()
        self.dropout.draw(self.tile.batch * self.heads + self.blocks.head, self.blocks.query, self.key)
        # ptxas serializes all wgmma if S' is read while a GEMM is in flight that was issued in the step before
        T.wait_wgmma(0)
        if self.before.exists(step, begin):
            self.last_read.release(step - 1)

    @T.inline
    def exponentiate(self, step):
        """Compute P' from S', in fp32 and as an operand of dV."""
        self.replace_scores(step)
        reuse, key_pass = self.config.reuse_registers, self.key_pass
        if self.problem.terms > 1:
            tile_products.split_kept(self.acc_s, self.P_terms)
        else:
            if key_pass.makes_dv and not key_pass.has_two_P:  # else replace_scores() has written P_for_dv
                T.copy(self.acc_s, self.P_for_dv)
            if reuse and (key_pass.separates_P or not key_pass.makes_dv):
                T.copy(self.acc_s, self.P)
            if key_pass.keeps_rest:
                keep = key_pass.function_of_rest("keep_rest")
                T.evaluate(T.call_extern("handle", keep, self.acc_s.data, self.rest.data))
        if key_pass.makes_dv:
            for n in indices(self.P_terms):
                self.dropout.drop(self.P_terms[n])
            if key_pass.stages_P:
                share(self.w, (self.P_for_dv,), (self.smem.P[self.w],))

    @T.inline
    def replace_scores(self, step):
        """Replace S' in acc_s by the masked P' = exp2(S' * scale_log2 - lse_log2(query)).

        If scores have a slope, acc_s gets P' * slope for dS', and P_for_dv gets P'.
        """
        key_pass, scores, mask, blocks, acc_s = self.key_pass, self.scores, self.mask, self.blocks, self.acc_s
        prefetched, P = key_pass.prefetches_lse, self.P_for_dv if key_pass.has_two_P else None
        diagonal = mask.diagonal(blocks.query)
        scores.locate_transposed(mask.key, blocks, step - self.steps_before)
        scores.prepare(acc_s, diagonal)
        if key_pass.masks_before_exp:
            scores.hide_transposed(acc_s, mask, blocks, self.softmax_scale)
        probabilities(
            acc_s,
            lambda score, i, j: scores.exponent(
                *(score, i, j, diagonal, self.scale_log2),
                self.lse_log2[j] if prefetched else self.smem.Q.row_value(step, 0, j),
            ),
            P=P,
            sloped=scores.sloped if self.problem.is_sloped and key_pass.makes_dk else None,
        )
        if not key_pass.masks_before_exp:
            scores.clear_transposed(acc_s, P, mask, blocks)

    @T.inline
    def start_dp(self, step):
        """Issue dP' = V dO'."""
        smem = self.smem
        if self.waits_for_V_late:
            if self.before.is_missing:  # the first step of the tile
                smem.V.wait(self.key_step)
        smem.dO.wait(step)
        tile_products.multiply(
            self.products,
            smem.V.terms_of(self.w),
            smem.dO.terms_of(step),
            self.acc_dp,
            transpose_B=True,
            clear_accum=True,
        )

    @property
    def waits_for_V_late(self) -> bool:
        """True if V is waited for in the first step, not before it."""
        config = self.config
        return config.is_persistent and config.reuse_registers and not splits_keys(self.problem, config.makes)

    @T.inline
    def start_dv(self, step):
        """Issue dV += P' dO, if the pass makes dV."""
        if self.key_pass.makes_dv:
            dO = self.smem.dO.terms_of(step)
            tile_products.multiply(self.products, self.P_operands.__getitem__, dO, self.dv_chunks[0])

    @T.inline
    def start_dk(self, step):
        """Issue dK += dS' Q."""
        tile_products.multiply(
            self.products, self.dS_terms.__getitem__, self.smem.Q.terms_of(step), self.dk_chunks[0]
        )

    @T.inline
    def drop_dp(self):
        """Apply dropout to dP': set it to 0 for dropped weights, and scale it for kept ones as the forward scales these."""
        self.dropout.drop(self.acc_dp)
        self.dropout.scale_kept(self.acc_dp)

    @T.inline
    def compute_dS(self, step):
        """dS' = P' * (dP' - Delta), in 16 bits."""
        self.drop_dp()
        if self.key_pass.keeps_rest:
            T.evaluate(
                T.call_extern(
                    *("handle", self.key_pass.function_of_rest("softmax_backward")),
                    *(self.P.data, self.rest.data, self.acc_dp.data),
                    *(T.access_ptr(self.smem.Q.row_value(step, 1, 0), "r"), self.dS.data),
                )
            )
        else:
            softmax_backward(self.acc_s, self.acc_dp, lambda i, j: self.smem.Q.row_value(step, 1, j), self.dS)
        self.fetch_next(step)

    @T.inline
    def fetch_next(self, step):
        """Compute values of the next step's diagonals, see Scores.fetch_next()."""
        self.scores.fetch_next(self.mask, self.blocks, step - self.steps_before)

    @T.inline
    def share_dS(self, step):
        """Write dS' to shared memory, if dQ is computed from there."""
        if self.key_pass.shares_dS:
            dS = self.smem.dS
            dS.wait_empty(step)
            dS.write(self.w, self.dS_address, step, self.dS)
            dS.announce(step)
            self.scores.learn_dS(self.dS, self.blocks, not self.adds_learned_late)

    @T.inline
    def compute_fp32_dS(self, step):
        """dS' = P' * (dP' - Delta) in fp32, in the registers of dP'."""
        self.drop_dp()
        P = self.P_terms if self.config.reuse_registers else (self.acc_s,)
        tile_products.replace_dp(P, self.acc_dp, lambda j: self.smem.Q.row_value(step, 1, j))
        if self.key_pass.adds_own_dq:
            self.scores.learn_dS(self.acc_dp, self.blocks, True)

    @T.inline
    def split_dS(self, step):
        """Split dS' into bf16 terms."""
        tile_products.split_terms(self.acc_dp, self.dS_terms)
        self.fetch_next(step)

    def dv_jobs(self, step: Any) -> tuple:
        """Jobs of dV += P' dO, see products.Job."""
        return (
            tile_products.jobs(self.dv_chunks, self.P_terms, self.smem.dO, step)
            if self.key_pass.makes_dv
            else ()
        )

    def dk_jobs(self, step: Any) -> tuple:
        """Jobs of dK += dS' Q."""
        return (
            tile_products.jobs(self.dk_chunks, self.dS_terms, self.smem.Q, step)
            if self.key_pass.makes_dk
            else ()
        )

    def dq_jobs(self) -> tuple:
        """Jobs of dQ' = K' dS', after share_terms_of_dS()."""
        if not self.key_pass.adds_own_dq:
            return ()
        place = {"tile": self.tile, "head": self.blocks.head, "start": self.blocks.query}
        add_dq = functools.partial(self.tiles.add_dq, **place, factor=self.softmax_scale)
        smem = self.smem
        return tile_products.transposed_jobs(self.problem.head_dim, smem.K, self.w, smem.dS[self.w], add_dq)

    @T.inline
    def share_terms_of_dS(self):
        """Write the terms of dS' to shared memory of the warpgroup, if it computes dQ of its keys."""
        if self.key_pass.adds_own_dq:
            share(self.w, self.dS_terms, self.smem.dS[self.w])

    @T.inline
    def advance(self):
        """Go to the next query block."""
        if self.key_pass.shares_dS:
            self.before.note(self.smem.dq.row_block(self.tiles, self.tile, self.blocks))
        self.bias_gradient.locate(self.blocks)
        self.scores.advance(self.mask, self.blocks)
