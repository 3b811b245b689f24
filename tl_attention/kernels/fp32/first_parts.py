"""Kernel before attention in fp32 whose idle warps split its inputs: makes the parts of the first heads, see input_parts.py."""

import tilelang.language as T

from tl_attention.config.part_configs import FirstPartsConfig
from tl_attention.kernels.fp32.input_parts import MAKE_PARTS, InputParts, input_argument
from tl_attention.problem.attn_problem import AttnProblem

PASS_CONFIGS = {"tl.enable_fast_math": True}


def flash_first_parts(problem: AttnProblem, config: FirstPartsConfig) -> T.PrimFunc:
    """Build the kernel that splits the first heads of two inputs and sets Progress.

    Kernel arguments:
        First_input, Second_input, First, Second: the inputs and their parts, see input_parts.InputParts.
        Progress: int32, see there.
        first_heads: number of heads, of all batch entries.
        ctas: CTAs of the launch.
    """
    batch, heads, seqlen = T.dynamic("batch, heads, seqlen")
    columns = problem.parts * problem.head_dim
    parts = [T.Tensor([batch, seqlen, heads, columns], "bfloat16") for _ in range(2)]

    @T.prim_func
    def flash_first_parts_kernel(
        First_input: input_argument("first_input", batch, seqlen, heads),
        Second_input: input_argument("second_input", batch, seqlen, heads),
        First: parts[0],
        Second: parts[1],
        Progress: T.Tensor([T.dynamic("counters")], "int32"),
        first_heads: T.int32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=config.threads, prelude=MAKE_PARTS):
            pairs = (First_input, First), (Second_input, Second)
            InputParts(problem, *pairs, Progress, config.stages, warps=config.warps).make_first(first_heads)

    return flash_first_parts_kernel
