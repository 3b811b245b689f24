"""Arguments of a backward by keys: sizes of its tensors, and their types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernel_configs import BwdPass
from tl_attention.kernels.tiles import FragmentBlocks, dq_sum_argument, input_arguments, rows_argument
from tl_attention.part_configs import splits_keys, stores_key_parts
from tl_attention.problem import AttnProblem


@dataclass(frozen=True)
class KeyPassArguments:
    """Types of the tensor arguments of bwd.flash_bwd; False for one that the kernel lacks.

    Args:
        sizes: (batch, heads, heads_kv, seqlen_q, seqlen_k).
        rounded_q: rows of Lse_log2 and Delta per head.
    """

    sizes: tuple[Any, ...]
    rounded_q: Any
    Q: Any
    K: Any
    V: Any
    dO: Any
    Lse_log2: Any
    Delta: Any
    dQ_sum: Any
    dK: Any
    dV: Any
    dK_parts: Any
    dV_parts: Any
    Tickets: Any
    Turns: Any
    dQ: Any
    Progress_dq: Any
    K_parts: Any = False
    V_parts: Any = False

    @classmethod
    def of(cls, problem: AttnProblem, config: BwdPass) -> KeyPassArguments:
        sizes = batch, heads, heads_kv, seqlen_q, seqlen_k = T.dynamic(
            "batch, heads, heads_kv, seqlen_q, seqlen_k"
        )
        columns_qk, columns_v = columns = T.dynamic("columns_qk, columns_v")
        rounded_q, dq_blocks, dk_blocks, dv_blocks = T.dynamic("rounded_q, dq_blocks, dk_blocks, dv_blocks")
        batch_rows = T.dynamic("batch_rows") if problem.has("varlen") else batch
        of_keys, lengths = (batch, seqlen_k, heads_kv), (seqlen_q, heads, seqlen_k, heads_kv)
        key_parts = {}
        if stores_key_parts(problem, config.makes):
            key_parts = {
                "K_parts": rows_argument(problem, "k", *of_keys, columns_qk),
                "V_parts": rows_argument(problem, "v", *of_keys, columns_v),
            }
        # fp32: the inputs have columns of parts, or two per number
        cols_dk, cols_dv = T.dynamic("columns_dk, columns_dv") if problem.is_fp32 else columns
        rounds = config.rounds(problem)
        split = ("k", "v") if splits_keys(problem, config.makes) else ()
        return cls(
            sizes,
            rounded_q,
            *input_arguments(problem, batch, *lengths, *columns, split=split),
            *(T.Tensor([batch_rows, heads, rounded_q], "float32") for _ in range(2)),
            dq_sum_argument(problem, config, batch, seqlen_q, heads, columns_qk, dq_blocks),
            rows_argument(problem, "dk", *of_keys, cols_dk),
            rows_argument(problem, "dv", *of_keys, cols_dv),
            FragmentBlocks.argument(dk_blocks, problem.head_dim),
            FragmentBlocks.argument(dv_blocks, problem.head_dim_v),
            T.Tensor([2], "int32") if config.is_dynamic else False,
            T.Tensor([dq_blocks], "int32") if config.is_ordered else False,
            rows_argument(problem, "dq", batch, seqlen_q, heads, columns_qk) if rounds else False,
            T.Tensor([T.dynamic("progress_dq")], "int32") if rounds else False,
            **key_parts,
        )
