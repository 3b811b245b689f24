"""FlashAttention forward in one screen of TileLang, to read before tl_attention/kernels/forward/kernel.py.

    python examples/tutorial_fwd.py

On a Hopper GPU this checks the kernel against PyTorch. Without one it compiles the kernel for sm_90a and prints what the compiler
made of it.

The algorithm and the names are those of the shipped kernel. The schedule is TileLang's: the compiler decides when tiles are loaded and
when to wait for the tensor cores. docs/architecture.md says what the shipped kernel adds and where each part is.
"""

import math

import tilelang
import tilelang.language as T
import torch
from tilelang import tvm

from tl_attention.compilation import cubin
from tl_attention.problem.target import TARGET, is_hopper
from tl_attention.reference import attention_reference

PASS_CONFIGS = {"tl.enable_fast_math": True}
LOG2E = math.log2(math.e)
LOWEST = -1e20  # below every score, but finite: LOWEST - LOWEST is 0, where -inf - -inf is NaN


def flash_fwd_tutorial(
    head_dim: int = 128, causal: bool = False, dtype: str = "bfloat16", block_M: int = 128, block_N: int = 128
) -> T.PrimFunc:
    """O = softmax(softmax_scale * Q K^T + mask) V, and Lse, the natural log-sum-exp of the scores.

    Compiled in: head_dim, dtype, the mask, the tile sizes. Runtime values: batch, heads, lengths, softmax_scale (> 0).
    causal: query i sees key j if j <= i + seqlen_k - seqlen_q. A query that sees no key has O = 0, Lse = -inf.
    """
    batch, heads, heads_kv, seqlen_q, seqlen_k = T.dynamic("batch, heads, heads_kv, seqlen_q, seqlen_k")
    row_wise = T.GemmWarpPolicy.FullRow  # a warp holds whole rows, so a row max needs 4 threads of one warp

    @T.prim_func
    def tutorial_fwd(
        Q: T.Tensor([batch, seqlen_q, heads, head_dim], dtype),
        K: T.Tensor([batch, seqlen_k, heads_kv, head_dim], dtype),
        V: T.Tensor([batch, seqlen_k, heads_kv, head_dim], dtype),
        O: T.Tensor([batch, seqlen_q, heads, head_dim], dtype),
        Lse: T.Tensor([batch, heads, seqlen_q], "float32"),
        softmax_scale: T.float32,
    ):
        # One CTA per tile: block_M queries of one head. Its 256 threads are two warpgroups, 64 queries each
        with T.Kernel(T.ceildiv(seqlen_q, block_M), heads, batch, threads=256) as (m_block, head, batch_idx):
            Q_shared = T.alloc_shared([block_M, head_dim], dtype)
            K_shared = T.alloc_shared([block_N, head_dim], dtype)
            V_shared = T.alloc_shared([block_N, head_dim], dtype)
            acc_s = T.alloc_fragment([block_M, block_N], "float32")  # scores, then exp(score - row_max)
            P = T.alloc_fragment([block_M, block_N], dtype)
            acc_o = T.alloc_fragment([block_M, head_dim], "float32")
            row_max = T.alloc_fragment([block_M], "float32")
            row_max_prev = T.alloc_fragment([block_M], "float32")
            row_scale = T.alloc_fragment([block_M], "float32")  # factor for what was summed before this block
            row_sum = T.alloc_fragment([block_M], "float32")
            block_sum = T.alloc_fragment([block_M], "float32")

            first_query = m_block * block_M
            kv_head = head // (heads // heads_kv)  # GQA: neighbouring heads share keys and values
            diagonal = first_query + seqlen_k - seqlen_q  # causal: the last key that first_query sees
            keys_seen = T.min(diagonal + block_M, seqlen_k) if causal else seqlen_k
            # At least one block: a tile that sees no key gets a wholly masked one
            key_blocks = T.max(T.ceildiv(keys_seen, block_N), 1)
            scale_log2 = softmax_scale * LOG2E  # exp(x) = exp2(x * LOG2E), and exp2 is one instruction

            # TMA reads zeros past seqlen_q and seqlen_k
            T.copy(Q[batch_idx, first_query : first_query + block_M, head, :], Q_shared)
            T.fill(row_max, LOWEST)
            T.clear(row_sum)
            T.clear(acc_o)
            for n_block in T.Pipelined(key_blocks, num_stages=2):
                first_key = n_block * block_N
                T.copy(K[batch_idx, first_key : first_key + block_N, kv_head, :], K_shared)
                T.copy(V[batch_idx, first_key : first_key + block_N, kv_head, :], V_shared)

                # S = Q K^T
                T.gemm(Q_shared, K_shared, acc_s, transpose_B=True, clear_accum=True, policy=row_wise)
                for i, j in T.Parallel(block_M, block_N):
                    limit = T.min(diagonal + i + 1, seqlen_k) if causal else seqlen_k
                    seen = first_key + j < limit
                    acc_s[i, j] = T.if_then_else(seen, acc_s[i, j], -T.infinity("float32"))

                # Online softmax: exponentials are relative to the row max so far; older sums and outputs are rescaled to it
                T.copy(row_max, row_max_prev)
                T.reduce_max(acc_s, row_max, dim=1, clear=False)
                for i in T.Parallel(block_M):
                    row_scale[i] = T.exp2((row_max_prev[i] - row_max[i]) * scale_log2)
                for i, j in T.Parallel(block_M, block_N):
                    acc_s[i, j] = T.exp2((acc_s[i, j] - row_max[i]) * scale_log2)
                T.reduce_sum(acc_s, block_sum, dim=1)
                for i in T.Parallel(block_M):
                    row_sum[i] = row_sum[i] * row_scale[i] + block_sum[i]
                for i, j in T.Parallel(block_M, head_dim):
                    acc_o[i, j] *= row_scale[i]

                # O += P V
                T.copy(acc_s, P)
                T.gemm(P, V_shared, acc_o, policy=row_wise)

            for i, j in T.Parallel(block_M, head_dim):
                acc_o[i, j] = T.if_then_else(row_sum[i] > 0, acc_o[i, j] / row_sum[i], 0.0)
            for i in T.Parallel(block_M):  # log2(0) = -inf
                row_sum[i] = (T.log2(row_sum[i]) + row_max[i] * scale_log2) / LOG2E
            T.copy(acc_o, O[batch_idx, first_query : first_query + block_M, head, :])
            T.copy(row_sum, Lse[batch_idx, head, first_query : first_query + block_M])

    return tutorial_fwd


def lower(causal: bool) -> tuple[str, int]:
    """CUDA source of the kernel, and the bytes of dynamic shared memory that it asks for. Needs neither GPU nor nvcc."""
    target = tvm.target.Target(TARGET)
    with tvm.transform.PassContext(opt_level=3, config=PASS_CONFIGS), target:
        artifact = tilelang.lower(flash_fwd_tutorial(causal=causal), target=target)
    (function,) = (f for _, f in artifact.device_mod.functions.items())
    return artifact.kernel_source, int(function.attrs["dyn_shared_memory_buf"])


def largest_error(
    causal: bool, batch: int, heads: int, heads_kv: int, seqlen_q: int, seqlen_k: int
) -> tuple[float, float]:
    """Largest differences of O and Lse from the fp32 reference, for random inputs on the current GPU."""
    kernel = tilelang.compile(
        flash_fwd_tutorial(causal=causal), out_idx=[3, 4], target=TARGET, pass_configs=PASS_CONFIGS
    )
    q = torch.randn(batch, seqlen_q, heads, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, seqlen_k, heads_kv, 128, device="cuda", dtype=torch.bfloat16)
    out, lse = kernel(q, k, v, 128**-0.5)
    expected, expected_lse = attention_reference(q, k, v, None, causal)
    without_keys = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, without_keys)
    lse_error = (lse - expected_lse).masked_fill(without_keys, 0).abs().max().item()
    return (out - expected).abs().max().item(), lse_error


def main() -> None:
    for causal in (False, True):
        name = "causal" if causal else "full"
        if torch.cuda.is_available() and is_hopper(0):
            for lengths in ((512, 512), (333, 777), (777, 333)):
                errors = largest_error(causal, 2, 8, 2, *lengths)
                print(f"{name} {lengths}: largest error of O {errors[0]:.4f}, of Lse {errors[1]:.6f}")
        else:
            source, smem = lower(causal)
            # 384 threads: TileLang adds a warpgroup that loads tiles
            report = cubin.report_source(source, smem, threads=384)
            print(
                f"{name}: {len(source.splitlines())} lines of CUDA; {report.hgmma} wgmma and {report.tma} TMA load instructions,"
                f" {report.registers} registers, {report.spill_bytes} bytes of spills, {smem} bytes of shared memory"
            )


if __name__ == "__main__":
    main()
