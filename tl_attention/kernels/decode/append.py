"""Kernel before a decode: writes new keys and values to the cache, and rotates keys and queries by position.

Rotary embedding: Su et al. 2021 (RoFormer).
"""

from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import AppendConfig
from tl_attention.kernels.sources.tiles import strided
from tl_attention.problem.attn_problem import AttnProblem

# Bounds checks are off: indices that may leave their tensors are checked in the kernel
PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}


@T.meta_class
class Rotary:
    """Rotary embedding of one element per thread.

    Args:
        Cos, Sin: [positions, rotary_dim / 2].
        rotary_dim: int32, the first rotary_dim columns of a row are rotated.
        interleaved: int32, 1 for pairs (2i, 2i + 1), 0 for pairs (i, i + rotary_dim / 2).
    """

    def __init__(self, Cos: Any, Sin: Any, rotary_dim: Any, interleaved: Any, name: str = "rotary"):
        self.Cos, self.Sin, self.rotary_dim, self.interleaved = Cos, Sin, rotary_dim, interleaved
        self.value = T.alloc_var("float32", init=0.0)
        self.partner_term = T.alloc_var("float32", init=0.0)
        self.partner = T.alloc_var("int32", init=0)  # column of the other element of the pair
        self.pair = T.alloc_var("int32", init=0)  # column in Cos and Sin
        self.is_second = T.alloc_var("int32", init=0)

    @T.inline
    def load(self, X, b, i, h, j, position):
        """Set value to X[b, i, h, j], rotated if j < rotary_dim and Cos has the position."""
        self.value[0] = T.cast(X[b, i, h, j], "float32")
        if (j < self.rotary_dim) & (position >= 0) & (position < self.Cos.shape[0]):
            if self.interleaved != 0:
                self.is_second[0] = j % 2
                self.pair[0] = T.truncdiv(j, 2)
                self.partner[0] = j + 1 - 2 * self.is_second[0]
            else:
                self.is_second[0] = T.if_then_else(j >= T.truncdiv(self.rotary_dim, 2), 1, 0)
                self.pair[0] = j - self.is_second[0] * T.truncdiv(self.rotary_dim, 2)
                self.partner[0] = j + (1 - 2 * self.is_second[0]) * T.truncdiv(self.rotary_dim, 2)
            self.partner_term[0] = T.cast(X[b, i, h, self.partner[0]], "float32") * T.cast(
                self.Sin[position, self.pair[0]], "float32"
            )
            self.value[0] = self.value[0] * T.cast(self.Cos[position, self.pair[0]], "float32")
            self.value[0] += T.if_then_else(
                self.is_second[0] != 0, self.partner_term[0], -self.partner_term[0]
            )


def flash_append(problem: AttnProblem, config: AppendConfig) -> T.PrimFunc:
    """Kernel that writes new keys and values to a cache, and rotates keys and queries. A CTA handles one row of one sequence.

    Kernel arguments:
        Q: [batch, seqlen_q, heads, head_dim].
        Q_rotated: like Q; written if rotary_dim > 0.
        K_new, V_new: [batch, appended, heads_kv, head_dim or head_dim_v], written to positions Seqlens[b] and up.
        K_cache, V_cache: [caches, seqlen_cache, heads_kv, head_dim or head_dim_v], or pages [num_pages, page_size, ..].
        Cos, Sin: [positions, rotary_dim / 2].
        Seqlens, Caches (CacheIndex of kernel.py), Table, seqlen, num_pages: as in kernel.py; bits of `given` say which tensors are present.
        rotary_dim: int32, columns to rotate; 0 for no rotation.
        interleaved: int32, see Rotary.
        queries_move: int32, 1: query i is rotated by position Seqlens[b] + i; 0: all queries by Seqlens[b].
        given: int32 bits: 1 Seqlens, 4 Caches, 8 Table.
        appended: int32, new rows per sequence.
        page_size: int32, rows per page.

    Rows past the end of a cache are not written.
    """
    dtype, threads = problem.dtype, config.threads
    batch, seqlen_q, heads, heads_kv, new_rows = T.dynamic("batch, seqlen_q, heads, heads_kv, new_rows")
    columns_qk, columns_v, caches, room, positions, pairs = T.dynamic(
        "columns_qk, columns_v, caches, room, positions, pairs"
    )
    seqlens_n, caches_n, table_n, pages_n = T.dynamic("seqlens_n, caches_n, table_n, pages_n")

    @T.prim_func
    def flash_append_kernel(
        Q: strided("q", [batch, seqlen_q, heads, columns_qk], dtype),
        Q_rotated: T.Tensor([batch, seqlen_q, heads, columns_qk], dtype),
        K_new: strided("k_new", [batch, new_rows, heads_kv, columns_qk], dtype),
        V_new: strided("v_new", [batch, new_rows, heads_kv, columns_v], dtype),
        K_cache: strided("k", [caches, room, heads_kv, columns_qk], dtype),
        V_cache: strided("v", [caches, room, heads_kv, columns_v], dtype),
        Cos: T.Tensor([positions, pairs], dtype),
        Sin: T.Tensor([positions, pairs], dtype),
        Seqlens: T.Tensor([seqlens_n], "int32"),
        Caches: T.Tensor([caches_n], "int32"),
        Table: T.StridedTensor([table_n, pages_n], [T.dynamic("table_stride"), 1], "int32"),
        rotary_dim: T.int32,
        interleaved: T.int32,
        queries_move: T.int32,
        given: T.int32,
        seqlen: T.int32,
        appended: T.int32,
        page_size: T.int32,
        num_pages: T.int32,
    ):
        rows = T.max(T.if_then_else(rotary_dim > 0, seqlen_q, 0), appended)
        # In one dimension, as the others of a grid end at 65,535
        with T.Kernel(rows * batch, threads=threads) as number:
            T.pdl_trigger()  # the decode may launch; it waits for the end of this kernel
            T.pdl_sync()  # the kernel before this one has ended
            i = T.alloc_var("int32", init=T.truncmod(number, rows))
            b = T.alloc_var("int32", init=T.truncdiv(number, rows))
            thread = T.get_thread_binding()
            first = T.alloc_var("int32", init=0)
            cache = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)
            h = T.alloc_var("int32", init=0)
            column = T.alloc_var("int32", init=0)
            rotary = Rotary(Cos, Sin, rotary_dim, interleaved)
            first = T.if_then_else(given & 1 != 0, Seqlens[b * (given & 1)], seqlen)
            if (rotary_dim > 0) & (i < seqlen_q):
                for n in T.serial(T.ceildiv(heads * columns_qk, threads)):
                    h = T.truncdiv(n * threads + thread, columns_qk)
                    column = n * threads + thread - h * columns_qk
                    if h < heads:
                        rotary.load(Q, b, i, h, column, first + T.if_then_else(queries_move != 0, i, 0))
                        Q_rotated[b, i, h, column] = T.cast(rotary.value[0], dtype)
            if i < appended:
                row = first + i
                cache = T.if_then_else(given & 4 != 0, Caches[b * (given >> 2 & 1)], b)
                if given & 8 != 0:
                    cache = -1
                    if (row >= 0) & (T.truncdiv(row, page_size) < pages_n):
                        cache = Table[b, T.truncdiv(row, page_size)]
                    row = row - T.truncdiv(row, page_size) * page_size
                if (cache >= 0) & (cache < num_pages) & (row >= 0) & (row < room):
                    for n in T.serial(T.ceildiv(heads_kv * columns_qk, threads)):
                        h = T.truncdiv(n * threads + thread, columns_qk)
                        column = n * threads + thread - h * columns_qk
                        if h < heads_kv:
                            rotary.load(K_new, b, i, h, column, first + i)
                            K_cache[cache, row, h, column] = T.cast(rotary.value[0], dtype)
                    for n in T.serial(T.ceildiv(heads_kv * columns_v, threads)):
                        h = T.truncdiv(n * threads + thread, columns_v)
                        column = n * threads + thread - h * columns_v
                        if h < heads_kv:
                            V_cache[cache, row, h, column] = V_new[b, i, h, column]

    return flash_append_kernel
