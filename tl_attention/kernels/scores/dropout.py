"""Dropout inside the kernels: random bits per element of a tile."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.problem.attn_problem import AttnProblem


@T.meta_class
class Dropout:
    """Dropout of a tile of 64 rows per warpgroup, in the registers of an accumulator."""

    def __init__(
        self,
        problem: AttnProblem,
        options: Any,
        cols: int,
        rows_are_keys: bool = False,
        name: str = "dropout",
    ):
        self.on, self.options, self.rows_are_keys = problem.has("dropout"), options, rows_are_keys
        self.placed = problem.has("placed")
        self.template = f"<{str(rows_are_keys).lower()}, {cols}>"
        self.k0, self.k1, self.offset = (T.alloc_var("int32", init=0) if self.on else None for _ in range(3))
        self.keeps = T.alloc_local([-(-cols // 64)], "uint32") if self.on else None  # one bit per element

    @T.inline
    def start(self):
        """Read seed and offset.

        Where rows are keys, each step calls this: kept in uniform registers they make ptxas serialize all wgmma (C7515).
        """
        if self.on:
            k0, k1, offset = (
                T.call_extern("int32", "tl_attention_random_state", self.options.Rng.data, word)
                for word in range(3)
            )
            # From one lane, so that the round keys are in uniform registers
            self.k0[0] = k0 if self.rows_are_keys else T.shfl_sync(k0, 0)
            self.k1[0] = k1 if self.rows_are_keys else T.shfl_sync(k1, 0)
            self.offset[0] = offset

    @T.inline
    def draw(self, stream, query, key):
        """Draw the bits of the tile that begins at this query and key, multiples of 16. stream: batch index * heads + head."""
        if self.on:
            query, key, stream = self.position(query, key, stream)
            T.evaluate(
                T.call_extern(
                    "handle",
                    f"tl_attention_draw{self.template}",
                    self.keeps.data,
                    key if self.rows_are_keys else query,
                    query if self.rows_are_keys else key,
                    stream,
                    self.offset[0],
                    self.k0[0],
                    self.k1[0],
                    self.options.drop_below,
                )
            )

    def position(self, query: Any, key: Any, stream: Any) -> tuple:
        """(query, key, stream) in the whole sequences, of which a placed problem has a part."""
        if not self.placed:
            return query, key, stream
        place = self.options.Table.data
        first_query, first_key, first_stream = (
            T.call_extern("int32", "tl_attention_random_state", place, i) for i in (0, 1, 3)
        )
        return query + first_query, key + first_key, stream + first_stream

    @property
    def scale(self) -> Any:
        """Factor of kept probabilities, 1 / (1 - p)."""
        return 256.0 / T.cast(T.max(256 - self.options.drop_below, 1), "float32")

    @T.inline
    def drop(self, tile):
        """Set elements to 0 that the last draw() drops."""
        if self.on:
            T.evaluate(
                T.call_extern(
                    "handle",
                    f"tl_attention_drop_{'float' if tile.dtype == 'float32' else 'half'}{self.template}",
                    tile.data,
                    self.keeps.data,
                )
            )

    @T.inline
    def scale_kept(self, acc):
        """Multiply by the factor of kept probabilities."""
        if self.on:
            rows, cols = acc.shape
            for i, j in T.Parallel(rows, cols):
                acc[i, j] *= self.scale
