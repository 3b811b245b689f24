"""Kernel before attention in fp32 whose idle warps split its inputs: makes the parts of the first heads, see input_parts.py."""

import tilelang.language as T

from tl_attention.kernels.input_parts import MAKE_PARTS, InputParts, input_argument
from tl_attention.part_configs import FirstPartsConfig
from tl_attention.problem import AttnProblem

PASS_CONFIGS = {"tl.enable_fast_math": True}


def flash_first_parts(problem: AttnProblem, config: FirstPartsConfig) -> T.PrimFunc:
    """Build the kernel that splits the inputs of the first key heads and sets Progress.

    Kernel arguments:
        Q_input, K_input, V_input, dO_input: see input_parts.InputParts; dO in a backward alone.
        Q, K, V, dO: their parts.
        Progress: int32, see input_parts.MAKE_PARTS.
        key_heads: number of key heads, of all batch entries.
        ctas: CTAs of the launch.
    """
    batch, heads, heads_kv, seqlen_q, seqlen_k = T.dynamic("batch, heads, heads_kv, seqlen_q, seqlen_k")
    of_queries, of_keys = (batch, seqlen_q, heads), (batch, seqlen_k, heads_kv)
    columns = problem.parts * problem.head_dim
    parts_of_queries = [T.Tensor([*of_queries, columns], "bfloat16") for _ in range(2)]
    parts_of_keys = [T.Tensor([*of_keys, columns], "bfloat16") for _ in range(2)]
    backward = config.backward

    @T.prim_func
    def flash_first_parts_kernel(
        Q_input: input_argument("q_input", *of_queries),
        K_input: input_argument("k_input", *of_keys),
        V_input: input_argument("v_input", *of_keys),
        dO_input: input_argument("do_input", *of_queries) if backward else False,
        Q: parts_of_queries[0],
        K: parts_of_keys[0],
        V: parts_of_keys[1],
        dO: parts_of_queries[1] if backward else False,
        Progress: T.Tensor([T.dynamic("counters")], "int32"),
        key_heads: T.int32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=config.threads, prelude=MAKE_PARTS):
            pairs = ((K_input, K), (V_input, V), (Q_input, Q), (dO_input, dO))
            inputs = pairs if backward else pairs[:3]
            InputParts(problem, inputs, Progress, config.stages, config.warps).make_first(key_heads)

    return flash_first_parts_kernel
