"""Kernel before attention in fp32 whose idle warps split its inputs: makes the terms of the first heads, see input_terms.py."""

import tilelang.language as T

from tl_attention.config.term_configs import FirstTermsConfig
from tl_attention.kernels.fp32.input_terms import MAKE_TERMS, InputTerms, input_argument
from tl_attention.problem.attn_problem import AttnProblem

PASS_CONFIGS = {"tl.enable_fast_math": True}


def flash_first_terms(problem: AttnProblem, config: FirstTermsConfig) -> T.PrimFunc:
    """Build the kernel that splits the first heads of two inputs and sets Progress.

    Kernel arguments:
        First_input, Second_input, First, Second: the inputs and their terms, see input_terms.InputTerms.
        Progress: int32, see there.
        first_heads: number of heads, of all batch entries.
        ctas: CTAs of the launch.
    """
    batch, heads, seqlen = T.dynamic("batch, heads, seqlen")
    columns = problem.terms * problem.head_dim
    terms = [T.Tensor([batch, seqlen, heads, columns], "bfloat16") for _ in range(2)]

    @T.prim_func
    def flash_first_parts_kernel(
        First_input: input_argument("first_input", batch, seqlen, heads),
        Second_input: input_argument("second_input", batch, seqlen, heads),
        First: terms[0],
        Second: terms[1],
        Progress: T.Tensor([T.dynamic("counters")], "int32"),
        first_heads: T.int32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=config.threads, prelude=MAKE_TERMS):
            pairs = (First_input, First), (Second_input, Second)
            InputTerms(problem, *pairs, Progress, config.stages, warps=config.warps).make_first(first_heads)

    return flash_first_parts_kernel
