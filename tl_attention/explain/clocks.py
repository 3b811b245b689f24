"""Busy clocks of each unit of an SM per step of a kernel. A step is one block of keys, of queries in a backward by keys."""

from __future__ import annotations

from tl_attention.explain import functions
from tl_attention.explain.functions import Asked
from tl_attention.gpus import EXP_PER_CLOCK, SMEM_BYTES_PER_CLOCK, Gpu
from tl_attention.kernel_configs import BwdPass, FwdConfig
from tl_attention.problem import AttnProblem

FP32_PER_CLOCK = 128  # results per SM
# fp32 bytes that an SM adds to sums in L2 per clock: the 30 GB/s that flash-attention's pull request 2889 states, at boost clock
ADD_BYTES_PER_CLOCK = 16
# Instructions per score beside the exponential. Forward: scale and subtract, max, add to the row sum, half a conversion to bf16;
# without hold_max also the maximum across lanes and scaling O. Backward: scale and subtract, P * (dP - delta), conversions
FWD_INSTRUCTIONS, HELD_MAX_INSTRUCTIONS, BWD_INSTRUCTIONS, DV_INSTRUCTIONS = 4.5, 3.5, 5, 3
PART_INSTRUCTIONS = 3  # per part of a probability after the first: its rounding, and what it leaves
SOFTCAP_INSTRUCTIONS = 3  # and a second use of the exponential unit, for tanh
SLOPE_INSTRUCTIONS = 2  # of a backward: 1 - tanh squared, times dS
# Per score: the distance of query and key as a float, at half rate, its absolute value times the slope; or one product with a slope
ALIBI_INSTRUCTIONS, LINEAR_ALIBI_INSTRUCTIONS = 6, 1
# Per score and edge of the mask, in steps that an edge cuts: a comparison, which runs at half rate, and a choice
MASK_INSTRUCTIONS = 3
# An estimate: a call of the generator makes 16 random bytes, then each score is kept or cleared
DROPOUT_INSTRUCTIONS = 10
HBM, GATHERING, SCATTERING = "HBM", "gathering tensors", "adding to gradients"
HBM_SHARE = 0.9  # of the stated bandwidth: a copy reaches 4.30 of 4.8 TB/s on an H200
BYTES = 2  # per element that tensor cores multiply


def of_forward(
    problem: AttnProblem, config: FwdConfig, gpu: Gpu, cut: float, asked: Asked | None
) -> dict[str, float]:
    """Busy clocks per step of a forward. cut: edges of the mask per step."""
    M, N, row = config.block_M, config.block_N, problem.head_dim + problem.head_dim_v
    instructions = HELD_MAX_INSTRUCTIONS if config.hold_max else FWD_INSTRUCTIONS + problem.head_dim_v / N
    instructions += MASK_INSTRUCTIONS * cut
    # Each warpgroup reads the blocks of K and V, and its rows of Q; TMA writes K and V
    read = config.warpgroups * N * row + M * problem.head_dim
    moved = len(problem.products) * read + problem.parts * N * row
    if problem.bias_has_two_sides and not config.split:
        instructions += LINEAR_ALIBI_INSTRUCTIONS - ALIBI_INSTRUCTIONS
    clocks = of_scores(problem, gpu, M * N, 2 * row, instructions, BYTES * moved, asked)
    clocks["shared memory"] += _staged(asked, M * N, gradients=False)
    return clocks | _captured(asked, M * N, gpu, gradients=False)


def of_pass(
    problem: AttnProblem,
    one: BwdPass,
    gpu: Gpu,
    flops: int,
    cut: float,
    asked: Asked | None,
    gradients: bool,
) -> dict[str, float]:
    """Busy clocks per step of a backward pass.

    Args:
        flops: per score.
        cut: edges of the mask per step.
        gradients: the pass makes those of captured tensors.
    """
    scores = one.block_M * one.block_N
    instructions = DV_INSTRUCTIONS if one.grads == "dv" else BWD_INSTRUCTIONS
    slope = SLOPE_INSTRUCTIONS * (problem.has("softcap") and one.grads != "dv")
    instructions += slope + MASK_INSTRUCTIONS * cut
    if gradients and problem.learns:
        instructions += asked.sum_instructions
    if problem.bias_is_linear and not one.has_linear_bias(problem):
        instructions += ALIBI_INSTRUCTIONS - LINEAR_ALIBI_INSTRUCTIONS
    smem = len(problem.products) * BYTES * _pass_smem(problem, one)
    clocks = of_scores(problem, gpu, scores, flops, instructions, smem, asked)
    clocks |= _captured(asked, scores, gpu, gradients)
    clocks["shared memory"] += _staged(asked, scores, gradients)
    if one.adds_dq:
        adders = one.warpgroups if problem.is_fp32 else 1  # of a number of dq
        clocks["adding dq in L2"] = 4 * one.block_M * problem.head_dim * adders / ADD_BYTES_PER_CLOCK
    return clocks


def of_scores(
    problem: AttnProblem,
    gpu: Gpu,
    scores: int,
    flops: int,
    instructions: float,
    smem_bytes: int,
    asked: Asked | None = None,
) -> dict[str, float]:
    """Busy clocks of each unit of an SM for `scores` scores; flops and instructions are per score."""
    capped = problem.has("softcap")
    if problem.has("alibi"):
        instructions += LINEAR_ALIBI_INSTRUCTIONS if problem.bias_is_linear else ALIBI_INSTRUCTIONS
    if asked and asked.program:
        instructions += asked.instructions
    instructions += PART_INSTRUCTIONS * (problem.parts - 1)
    instructions += SOFTCAP_INSTRUCTIONS * capped + DROPOUT_INSTRUCTIONS * problem.has("dropout")
    return {
        "tensor cores": len(problem.products) * scores * flops / gpu.flops_per_clock,
        "exponential unit": scores * (1 + capped) / EXP_PER_CLOCK,
        "fp32 instructions": scores * instructions / FP32_PER_CLOCK,
        "shared memory": smem_bytes / SMEM_BYTES_PER_CLOCK,
    }


def _captured(asked: Asked | None, scores: int, gpu: Gpu, gradients: bool) -> dict[str, float]:
    """Busy clocks for the captured tensors of a program."""
    if not asked or not asked.program:
        return {}
    clocks = {
        HBM: scores
        * asked.dense_bytes_moved(gradients)
        * gpu.sms
        * gpu.boost_ghz
        / (1e3 * gpu.tb_s * HBM_SHARE),
        GATHERING: scores * asked.gathers / functions.GATHERED_PER_CLOCK,
        SCATTERING: gradients * scores * asked.scatters / functions.SCATTERED_PER_CLOCK,
    }
    return {name: busy for name, busy in clocks.items() if busy}


def _staged(asked: Asked | None, scores: int, gradients: bool) -> float:
    """Busy clocks of the shared memory that dense tiles go through: written and read."""
    if not asked or not asked.program:
        return 0.0
    return 2 * scores * asked.dense_bytes_moved(gradients) / SMEM_BYTES_PER_CLOCK


def _pass_smem(problem: AttnProblem, one: BwdPass) -> int:
    """Elements of shared memory that a step of a backward pass reads and writes."""
    M, N, qk, v, groups = one.block_M, one.block_N, problem.head_dim, problem.head_dim_v, one.warpgroups
    if one.grads == "dq":  # S = Q K', dP = dO V', dQ += dS K with dS in registers; TMA writes K and V
        return groups * (64 * (qk + v) + N * (qk + v) + N * qk) + N * (qk + v)
    elements = M * (qk + v) + groups * (64 + M) * qk  # TMA writes Q and dO; S' = K Q'
    if "dk" in one.makes:  # dP' = V dO', dK += dS' Q with dS' in registers
        elements += groups * ((64 + M) * v + M * qk)
    if "dv" in one.makes:  # dV += P' dO with P' in registers
        elements += groups * M * v
    if one.adds_dq and problem.is_fp32:  # dS' is written; each warpgroup has dQ' = K' dS' of its keys
        elements += M * N + groups * (64 + M) * qk
    elif (
        one.dq_apart
    ):  # dS' is written; a warpgroup has dQ = dS K, and writes it in fp32, from where TMA adds it
        elements += 2 * M * N + N * qk + 2 * (4 // BYTES) * M * qk
    elif one.makes_all:  # dS' is written; dQ = dS K, whose rows or columns the warpgroups divide
        elements += M * N + (groups * M * N + N * qk if M == 64 else M * N + groups * N * qk)
    return elements + one.one_tile * 2 * M * qk  # dQ is written and read
