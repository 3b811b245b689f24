"""Kernel after a backward: sums a gradient that the passes stored per batch entry and head, where its tensor has fewer of them."""

import tilelang.language as T

from tl_attention.config.kernel_configs import BwdReduce
from tl_attention.problem.attn_problem import AttnProblem

PASS_CONFIGS = {"tl.enable_fast_math": True, "tl.disable_safe_memory_legalize": True}
AT_ONCE = 8  # addends in flight per thread


def flash_bwd_reduce(problem: AttnProblem, config: BwdReduce) -> T.PrimFunc:
    """Build the kernel that computes Total = sum of Stored over its second dimension, in fp32 and in a fixed order.

    The last addends come first: the pass has just stored them, so the L2 still holds them.

    Kernel arguments:
        Stored: [outer, addends, vectors, elements], of 16 bytes per vector.
        Total: [outer, vectors, elements].
    """
    dtype, threads = problem.dtype_of("o"), config.threads
    elements = 16 // problem.output_bytes
    outer, addends, vectors = T.dynamic("outer, addends, vectors")
    at_once = tuple(range(AT_ONCE))

    @T.prim_func
    def flash_bwd_reduce_kernel(
        Stored: T.Tensor([outer, addends, vectors, elements], dtype),
        Total: T.Tensor([outer, vectors, elements], dtype),
    ):
        # In one dimension, as the others of a grid end at 65,535
        with T.Kernel(T.ceildiv(vectors, threads) * outer, threads=threads) as number:
            block = T.alloc_var("int32", init=T.truncmod(number, T.ceildiv(vectors, threads)))
            row = T.alloc_var("int32", init=T.truncdiv(number, T.ceildiv(vectors, threads)))
            thread = T.get_thread_binding()
            total = T.alloc_local([elements], "float32")
            parts = T.alloc_local([AT_ONCE, elements], dtype)
            place = T.alloc_var("int32", init=T.min(block * threads + thread, vectors - 1))
            T.clear(total)
            for i in T.serial(T.ceildiv(addends, AT_ONCE)):
                # Past the first addend the first one again, so that no load depends on a condition
                for u in at_once:
                    for e in T.vectorized(elements):
                        parts[u, e] = Stored[row, T.max(addends - 1 - AT_ONCE * i - u, 0), place, e]
                for u in at_once:
                    if AT_ONCE * i + u < addends:
                        for e in T.serial(elements):
                            total[e] += T.cast(parts[u, e], "float32")
            if block * threads + thread < vectors:
                for e in T.vectorized(elements):
                    Total[row, place, e] = total[e]

    return flash_bwd_reduce_kernel
