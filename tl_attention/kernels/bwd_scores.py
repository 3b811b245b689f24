"""Scores of a backward by keys: when they are masked, when the log-sum-exps are loaded, and their exponentials."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.kernel_configs import BwdPass
from tl_attention.kernels.options import OptionArguments, Scores
from tl_attention.kernels.softmax import SMALLEST_SCALE, probabilities
from tl_attention.problem import AttnProblem


def shares_dq(problem: AttnProblem, config: BwdPass) -> bool:
    """True if the warpgroups of a pass compute dQ together; in fp32 each computes that of its keys."""
    return "dq" in config.makes and not problem.is_fp32


def prefetches_lse(problem: AttnProblem, config: BwdPass) -> bool:
    """True if log-sum-exps are loaded before S' is waited for: shared memory is busy with GEMMs and slow to answer.

    Full d64 at 4k 435 -> 479 TFLOPS, d128 509 -> 525 (H200, 2026-11-21). dk+dv, ALiBi and dense biases by 128 spill with it, dv of d256
    was slower.
    """
    if problem.has("alibi") or (problem.fetches and config.block_M > 64):
        return False
    return shares_dq(problem, config) or "dv" not in config.makes


def hides_raw(problem: AttnProblem, config: BwdPass) -> bool:
    """True if raw scores of a program are masked: those of -inf stay so if it changes none, or adds a value per diagonal.

    Not for such values in steps of 64 queries, where it spills (d128, nvcc 13.0.88).
    """
    adds = problem.is_diagonal_bias and config.block_M == 128
    return shares_dq(problem, config) and (problem.is_mask_of_bits or adds)


def masks_before_exp(problem: AttnProblem, config: BwdPass) -> bool:
    """True if S' is masked instead of P'. The exponential is then in one basic block with the code after it.

    Full d64 455 -> 474 TFLOPS, d256 dv 833 -> 781 us (H200, 2026-11-21). dk+dv of 192/128 spills. With a softcap dk+dv must mask first, for
    the P' of dV, and dk alone spills.
    """
    if problem.program is not None:
        return hides_raw(problem, config)
    makes_both = "dk" in config.makes and "dv" in config.makes
    return shares_dq(problem, config) or makes_both == problem.is_sloped


def scale_of_scores(problem: AttnProblem, config: BwdPass, softmax_scale: Any) -> Any:
    """The scale that a program's scores are multiplied by; not 0 where masked raw scores have to stay -inf."""
    if hides_raw(problem, config) and problem.changes_scores:
        return T.if_then_else(softmax_scale == 0, SMALLEST_SCALE, softmax_scale)
    return softmax_scale


def scores_of(
    problem: AttnProblem, config: BwdPass, options: OptionArguments, softmax_scale: Any, staged: Any
) -> Scores:
    """Scores [keys, queries] of a pass. staged: see alloc_staged."""
    return Scores(
        problem,
        options,
        scale_of_scores(problem, config, softmax_scale),
        config.block_M,
        rows_are_keys=True,
        staged=staged,
        hides_raw=hides_raw(problem, config),
        by_element=not config.has_linear_bias(problem),
        # In steps of 64 queries pairs spill in other orders, and were 7 % slower in one without spills (d128, H200, 2026-11-23). In the
        # order apart 5.54 -> 5.50 ms (relative bias, B2 8k, 16 heads, H200, 2026-11-27)
        sums_pairs=config.block_M == 128 or config.dq_apart,
    )


def has_two_P(problem: AttnProblem, config: BwdPass) -> bool:
    """True if dV and dS' need different P': with a slope of scores in a pass that makes dk and dv."""
    return problem.is_sloped and "dk" in config.makes and "dv" in config.makes


@T.macro
def exponentiate(
    problem, config, step, acc_s, P_for_dv, lse_log2, blocks, mask, scores, scale_log2, softmax_scale
):
    """Replace S' in acc_s by the masked P' = exp2(S' * scale_log2 - lse_log2(query)).

    If scores have a slope, acc_s gets P' * slope for dS', and P_for_dv gets P'.
    """
    diagonal = mask.diagonal(blocks.query)
    scores.locate_transposed(mask.key, blocks, step)
    scores.prepare(acc_s, diagonal)
    if masks_before_exp(problem, config):
        scores.hide_transposed(acc_s, mask, blocks, softmax_scale)
    probabilities(
        acc_s,
        lambda score, i, j: scores.exponent(score, i, j, diagonal, scale_log2, lse_log2(j)),
        P=P_for_dv if has_two_P(problem, config) else None,
        sloped=scores.sloped if problem.is_sloped and "dk" in config.makes else None,
    )
    if not masks_before_exp(problem, config):
        scores.clear_transposed(acc_s, P_for_dv if has_two_P(problem, config) else None, mask, blocks)
