"""Before a decode: new keys and values to their places in a cache, keys and queries rotated by position (Su et al. 2021, RoFormer)."""

from typing import Any

import tilelang.language as T

from tl_attention.kernel_configs import AppendConfig
from tl_attention.kernels.tiles import strided
from tl_attention.problem import AttnProblem

PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True
}  # indices are guarded where they may leave their tensors


@T.meta_class
class Rotary:
    """An element of a row, rotated with its partner by the angle of a position."""

    def __init__(self, Cos: Any, Sin: Any, rotary_dim: Any, interleaved: Any, name: str = "rotary"):
        self.Cos, self.Sin, self.rotary_dim, self.interleaved = Cos, Sin, rotary_dim, interleaved
        self.value, self.other = (T.alloc_var("float32", init=0.0) for _ in range(2))
        self.partner, self.pair, self.second = (T.alloc_var("int32", init=0) for _ in range(3))

    @T.inline
    def load(self, X, b, i, h, j, position):
        """value: X[b, i, h, j], rotated if j is of a pair and the position has an angle."""
        self.value[0] = T.cast(X[b, i, h, j], "float32")
        if (j < self.rotary_dim) & (position < self.Cos.shape[0]):
            if self.interleaved != 0:
                self.second[0] = j % 2
                self.pair[0] = T.truncdiv(j, 2)
                self.partner[0] = j + 1 - 2 * self.second[0]
            else:
                self.second[0] = T.if_then_else(j >= T.truncdiv(self.rotary_dim, 2), 1, 0)
                self.pair[0] = j - self.second[0] * T.truncdiv(self.rotary_dim, 2)
                self.partner[0] = j + (1 - 2 * self.second[0]) * T.truncdiv(self.rotary_dim, 2)
            self.other[0] = T.cast(X[b, i, h, self.partner[0]], "float32") * T.cast(
                self.Sin[position, self.pair[0]], "float32"
            )
            self.value[0] = self.value[0] * T.cast(self.Cos[position, self.pair[0]], "float32")
            self.value[0] += T.if_then_else(self.second[0] != 0, self.other[0], -self.other[0])


def flash_append(problem: AttnProblem, config: AppendConfig) -> T.PrimFunc:
    """Kernel(Q, Q_rotated, K_new, V_new, K_cache, V_cache, Cos, Sin, Seqlens, Caches, Table, rotary_dim, interleaved, queries_move, given,
    seqlen, appended, page_size, num_pages).

    Q: [batch, seqlen_q, heads, head_dim], which goes to Q_rotated if rotary_dim > 0: query i by the position Seqlens + i, or all by
    Seqlens unless queries_move. K_new, V_new: [batch, appended, heads_kv, head_dim or head_dim_v], which go to the positions from Seqlens
    on. K_cache, V_cache: [caches, seqlen_cache, heads_kv, ..], or pages, where given & 8; given, Seqlens, seqlen, Caches, Table, num_pages
    are as in decode.py. Cos, Sin: [positions, rotary_dim / 2], of the first rotary_dim columns: pairs (2i, 2i + 1) if interleaved,
    else (i, i + rotary_dim / 2). What a position past the room there is would be written to is left alone.
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
        with T.Kernel(
            T.max(T.if_then_else(rotary_dim > 0, seqlen_q, 0), appended), batch, threads=threads
        ) as (i, b):
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
