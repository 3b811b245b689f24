"""Orders of a step of the backward by keys: each is a list of the products and waits of a step, from its S' to its last product.

A prime is a transpose. At the beginning of a step its S' = K Q' is in flight, issued by the step before, unless the order begins with it.
A product that is issued runs beside what follows until a wait. wait_all_but("dV") waits until at most dV is in flight. Registers decide
which orders are possible: dP' takes those of S', and dS' those of P', or each has its own.

Tensor cores work in the order of issue. dS' is shared first, as dQ waits for it. S' of the next step comes before dK in the orders "",
early-sums and late-sums, and in apart with reuse_registers. Elsewhere that gained nothing, cost spills, or was not tried
(docs/notes/2026-11-30-order-of-issue.md).

    step    parts of a step and their registers, see step.KeyStep
    i       number of the step, counted through all tiles of a CTA
    begin   the first step of the tile
"""

from __future__ import annotations

from collections.abc import Callable

import tilelang.language as T

from tl_attention.kernels.backward.key_tiles import scores_come_first
from tl_attention.kernels.backward.passes import KeyPass
from tl_attention.kernels.seams import products as tile_products


def step_body_of(key_pass: KeyPass) -> Callable[..., None]:
    """The macro of a step of a pass, which has its order of products."""
    problem, config, makes_dv = key_pass.problem, key_pass.config, key_pass.makes_dv
    scores_first = scores_come_first(problem, config)
    if key_pass.shares_dS:
        return {
            "": dq_added_early,
            "early-sums": dq_added_early,
            "late-sums": dq_added_late,
            "separate-dS": separate_dS,
            "apart": dq_apart if config.reuse_registers else dq_apart_own_registers,
        }[config.order]
    if not key_pass.makes_dk:
        return dv_by_block if key_pass.by_block else dv_alone
    if not problem.is_fp32:
        return reusing if config.reuse_registers else dk_and_dv if makes_dv else dk_alone
    if not makes_dv:
        return fp32_reusing if config.reuse_registers else fp32_dk
    if config.reuse_registers:
        return fp32_reusing if key_pass.by_block else fp32_one_sum_reusing
    if key_pass.by_block:
        return fp32_by_block
    return fp32_scores_first if scores_first else fp32_one_sum


# Passes over 16-bit tensors that make dQ, too: dP' in registers of S', dS' in those of P'


@T.macro
def dq_added_early(step, i, begin):
    """Orders "" and "early-sums": dQ of the step before is added before dS' is computed."""
    smem = step.smem
    step.finish_scores(i, begin)
    step.dq.start(i)
    step.exponentiate(i)
    step.start_dp(i)
    step.start_dv(i)
    step.wait_all_but("dP", "dV")  # dQ of the step before
    step.dq.free_and_add(i)
    T.wait_wgmma(0)  # dP', and dV, whose P' gives its registers to dS'
    smem.dO.release(i)
    step.compute_dS(i)
    step.share_dS(i)
    step.start_next_scores(i)
    step.start_dk(i)
    step.advance()


@T.macro
def dq_added_late(step, i, begin):
    """Order "late-sums": dQ of the step before is added at the end of the step."""
    smem = step.smem
    step.finish_scores(i, begin)
    step.dq.start(i)
    step.exponentiate(i)
    step.start_dp(i)
    step.start_dv(i)
    step.wait_all_but("dP", "dV")  # dQ of the step before
    step.dq.free_dS(i)
    T.wait_wgmma(0)  # dP', and dV, whose P' gives its registers to dS'
    smem.dO.release(i)
    step.compute_dS(i)
    step.share_dS(i)
    step.start_next_scores(i)
    step.start_dk(i)
    step.dq.add(i)
    step.advance()


@T.macro
def separate_dS(step, i, begin):
    """Order "separate-dS": dS' has registers of its own, and dV reads P' beside it."""
    smem = step.smem
    step.finish_scores(i, begin)
    step.dq.start(i)
    step.exponentiate(i)
    step.start_dp(i)
    step.start_dv(i)
    step.wait_all_but("dP", "dV")  # dQ of the step before
    step.dq.free_and_add(i)
    step.wait_all_but("dV")  # dP'
    if not step.key_pass.makes_dv:
        smem.dO.release(i)
    step.compute_dS(i)
    step.share_dS(i)
    step.start_dk(i)
    step.start_next_scores(i)
    if step.key_pass.makes_dv:
        step.wait_all_but("dK", "S")  # dV
        smem.dO.release(i)
    step.advance()


@T.macro
def dq_apart(step, i, begin):
    """Order "apart" with registers reused: the warpgroup of dq_sinks/apart.py computes dQ."""
    smem = step.smem
    step.finish_scores(i, begin)
    step.exponentiate(i)
    step.start_dp(i)
    step.start_dv(i)
    T.wait_wgmma(0)  # dP', and dV, whose P' gives its registers to dS'
    smem.dO.release(i)
    step.compute_dS(i)
    step.share_dS(i)
    step.start_next_scores(i)
    step.start_dk(i)
    step.advance()


@T.macro
def dq_apart_own_registers(step, i, begin):
    """Order "apart" with each tile in its own registers: dP' beside the exponentials, dV beside dS'."""
    smem = step.smem
    step.finish_scores(i, begin)
    step.start_dp(i)
    step.exponentiate(i)
    step.start_dv(i)  # here, or ptxas moves the exponentials behind the wait
    step.wait_all_but("dV")  # dP'
    step.compute_dS(i)
    step.share_dS(i)
    step.start_dk(i)
    step.start_next_scores(i)
    step.wait_all_but("dK", "S")  # dV
    smem.dO.release(i)
    step.advance()


# Passes without dQ


@T.macro
def reusing(step, i, begin):
    """dK and dV, or dK: dP' in registers of S', dS' in those of P'."""
    smem = step.smem
    step.finish_scores(i, begin)
    step.exponentiate(i)
    step.start_dp(i)
    step.start_dv(i)
    T.wait_wgmma(0)  # dP', and dV, whose P' gives its registers to dS'
    smem.dO.release(i)
    step.compute_dS(i)
    step.start_dk(i)
    step.start_next_scores(i)
    step.advance()


@T.macro
def dk_and_dv(step, i, begin):
    """dK and dV, each tile in its own registers: dP' beside the exponentials."""
    smem = step.smem
    step.finish_scores(i, begin)
    step.start_dp(i)
    step.exponentiate(i)
    T.wait_wgmma(0)  # dP'
    step.start_dv(i)
    step.compute_dS(i)
    step.start_dk(i)
    step.start_next_scores(i)
    step.wait_all_but("dK", "S")  # dV
    smem.dO.release(i)
    step.advance()


@T.macro
def dk_alone(step, i, begin):
    """dK, each tile in its own registers: dP' beside the exponentials."""
    smem = step.smem
    step.finish_scores(i, begin)
    step.start_dp(i)
    step.exponentiate(i)
    T.wait_wgmma(0)  # dP'
    smem.dO.release(i)
    step.compute_dS(i)
    step.start_dk(i)
    step.start_next_scores(i)
    step.advance()


@T.macro
def dv_alone(step, i, begin):
    """dV; in fp32 with one accumulator for all blocks."""
    smem = step.smem
    step.finish_scores(i, begin)
    step.exponentiate(i)
    smem.dO.wait(i)
    step.start_dv(i)
    # Only after the GEMM of P', when every lane has read its log-sum-exps: an arrival overtakes reads in flight. Released before, causal dv
    # of d192 and d256 sometimes read those of a later step (H200, 2026-11-21)
    smem.Q.release(i)
    step.fetch_next(i)
    step.start_next_scores(i)
    step.advance()


# Passes in fp32. Sums by block are jobs in two accumulators, which take turns: see products.py


@T.macro
def dv_by_block(step, i, begin):
    """dV, summed by block."""
    smem, products, sums = step.smem, step.products, step.sums
    step.finish_scores(i, begin)
    step.exponentiate(i)
    smem.dO.wait(i)
    jobs = step.dv_jobs(i)
    tile_products.start_jobs(products, jobs, sums)
    if step.config.reuse_registers:
        tile_products.continue_jobs(products, jobs, sums, 2)
        tile_products.finish_jobs(products, jobs, sums, 0)
    smem.Q.release(i)  # as in dv_alone
    step.fetch_next(i)
    if not step.config.reuse_registers:
        tile_products.continue_jobs(products, jobs, sums, 2)
    step.start_next_scores(i)
    if not step.config.reuse_registers:
        tile_products.finish_jobs(products, jobs, sums, len(products))
    step.advance()


@T.macro
def fp32_by_block(step, i, begin):
    """dK, dV and maybe dQ, summed by block; each tile in its own registers."""
    smem, products, sums = step.smem, step.products, step.sums
    step.finish_scores(i, begin)
    step.start_dp(i)
    step.exponentiate(i)
    T.wait_wgmma(0)  # dP'
    dv_jobs = step.dv_jobs(i)
    tile_products.start_jobs(products, dv_jobs, sums)
    step.compute_fp32_dS(i)
    step.split_dS(i)
    step.share_terms_of_dS()
    jobs = (*dv_jobs, *step.dk_jobs(i), *step.dq_jobs())
    tile_products.continue_jobs(products, jobs, sums, min(len(dv_jobs), 2))
    step.start_next_scores(i)
    tile_products.finish_jobs(products, jobs, sums, len(products))
    smem.dO.release(i)
    step.advance()


@T.macro
def fp32_dk(step, i, begin):
    """dK; each tile in its own registers."""
    smem, products, sums = step.smem, step.products, step.sums
    step.finish_scores(i, begin)
    step.start_dp(i)
    step.exponentiate(i)
    T.wait_wgmma(0)  # dP'
    smem.dO.release(i)
    step.compute_fp32_dS(i)
    step.split_dS(i)
    if step.key_pass.by_block:
        jobs = step.dk_jobs(i)
        tile_products.continue_jobs(products, jobs, sums, 0)
        step.start_next_scores(i)
        tile_products.finish_jobs(products, jobs, sums, len(products))
    else:
        step.start_dk(i)
        step.start_next_scores(i)
    step.advance()


@T.macro
def fp32_reusing(step, i, begin):
    """dK, maybe with dV and dQ, in one set of registers: dV is complete before dS' is computed."""
    smem, products, sums = step.smem, step.products, step.sums
    step.finish_scores(i, begin)
    step.exponentiate(i)
    step.start_dp(i)
    if step.key_pass.makes_dv:
        dv_jobs = step.dv_jobs(i)
        tile_products.start_jobs(products, dv_jobs, sums)
        tile_products.continue_jobs(products, dv_jobs, sums, 2)
        tile_products.finish_jobs(products, dv_jobs, sums, 0)
    T.wait_wgmma(0)  # dP'
    smem.dO.release(i)
    step.compute_fp32_dS(i)
    step.split_dS(i)
    if step.key_pass.by_block:
        step.share_terms_of_dS()
        jobs = (*step.dk_jobs(i), *step.dq_jobs())
        tile_products.continue_jobs(products, jobs, sums, 0)
        step.start_next_scores(i)
        tile_products.finish_jobs(products, jobs, sums, len(products))
    else:
        step.start_dk(i)
        step.start_next_scores(i)
    step.advance()


@T.macro
def fp32_one_sum_reusing(step, i, begin):
    """dK, dV and maybe dQ in one set of registers, with one accumulator for all blocks of dK and of dV."""
    smem, products, sums = step.smem, step.products, step.sums
    step.finish_scores(i, begin)
    step.exponentiate(i)
    step.start_dp(i)
    step.start_dv(i)
    step.wait_all_but("dV")  # dP'
    step.compute_fp32_dS(i)
    T.wait_wgmma(0)  # dV, whose P' gives its registers to dS'
    smem.dO.release(i)
    step.split_dS(i)
    step.start_dk(i)
    step.share_terms_of_dS()
    jobs = step.dq_jobs()
    tile_products.continue_jobs(products, jobs, sums, 0)
    step.start_next_scores(i)
    tile_products.finish_jobs(products, jobs, sums, len(products))
    step.advance()


@T.macro
def fp32_one_sum(step, i, begin):
    """dK, dV and maybe dQ, each tile in its own registers, with one accumulator for all blocks of dK and of dV."""
    smem, products, sums = step.smem, step.products, step.sums
    step.finish_scores(i, begin)
    step.start_dp(i)
    step.exponentiate(i)
    T.wait_wgmma(0)  # dP'
    step.start_dv(i)
    step.compute_fp32_dS(i)
    step.split_dS(i)
    step.start_dk(i)
    step.share_terms_of_dS()
    jobs = step.dq_jobs()
    tile_products.continue_jobs(products, jobs, sums, 0)
    step.start_next_scores(i)
    tile_products.finish_jobs(products, jobs, sums, len(products))
    step.wait_all_but("dK", "S")  # dV
    smem.dO.release(i)
    step.advance()


@T.macro
def fp32_scores_first(step, i, begin):
    """dK and dV, each tile in its own registers; a step issues its own S', beside dK of the step before, see scores_come_first()."""
    smem = step.smem
    smem.Q.wait(i)
    step.start_scores(i, step.blocks.head)
    step.wait_all_but("dK", "S")  # dV of the step before
    if i > begin:
        smem.dO.release(i - 1)
    step.finish_scores(i, begin)
    step.start_dp(i)
    step.exponentiate(i)
    T.wait_wgmma(0)  # dP'
    step.start_dv(i)
    step.compute_fp32_dS(i)
    step.split_dS(i)
    step.start_dk(i)
    step.add_learned()
    step.advance()
