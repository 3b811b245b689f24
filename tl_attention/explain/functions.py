"""Masks and scores as functions, as the model sees them: the blocks that they list, and what their program costs per score.

Functions are traced as flex_attention does it. Those that an option computes are explained as that option.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from tl_attention.launch.block_lists import FULL, HIDDEN, PARTIAL, block_states
from tl_attention.program import BYTES, FLOAT, Program, stored_dtype
from tl_attention.testing import functions
from tl_attention.testing.functions import BLOCK, Function
from tl_attention.testing.shapes import Shape, ShapeOptions

# Elements of captured tensors that an SM gathers per clock, each with an index of its own, and those that it adds to gradients in memory.
# Both from one row each of fwd_flex and bwd_flex, relative (H200, 2026-11-22), when each of its scores did so: no row does now
GATHERED_PER_CLOCK, SCATTERED_PER_CLOCK = 8.0, 0.65
# Per score whose value or gradient is that of its diagonal: its load from shared memory, and the sums, counted in the kernels' SASS
DIAGONAL_INSTRUCTIONS, DIAGONAL_SUM_INSTRUCTIONS = 0.5, 5
DENSE_INSTRUCTIONS = 2  # per score of a bias by query and key: its load from shared memory and its conversion
MAX_LENGTH = 1 << 17  # queries or keys of a mask, whose blocks are listed one by one
MAX_BLOCKS = 1 << 26  # of all heads, where each has blocks of its own
LEAVES = ("score", "query", "key")  # what differs from score to score of a tile


@dataclass(frozen=True, eq=False)
class Asked:
    """Demands of the function of a shape on the kernels.

    Args:
        shape: the shape with the options that compute the function; without any for a program.
        program: None: options compute it.
        seen: share of the pairs that the mask shows.
        partial, full: bool [1 or heads, query blocks, key blocks] of BLOCK queries and keys; None: all blocks are computed.
        bias_bytes: of the dense bias.
        is_bias_per_batch: it has an entry of its own per batch entry.
    """

    shape: Shape
    program: Program | None = None
    seen: float = 1.0
    partial: torch.Tensor | None = None
    full: torch.Tensor | None = None
    bias_bytes: int = 0
    is_bias_per_batch: bool = False

    def tiles(self, block_M: int, block_N: int, by_keys: bool) -> list[list[int]]:
        """Steps of the tiles of each head that differs: key blocks per query tile, or query blocks per key tile."""
        seen = self._states(block_M, block_N) != HIDDEN
        return seen.sum(-2 if by_keys else -1).tolist()

    def cut_share(self, block_M: int, block_N: int) -> float:
        """Share of the steps whose mask is read as bits."""
        states = self._states(block_M, block_N)
        return (states == PARTIAL).sum().item() / max((states != HIDDEN).sum().item(), 1)

    @property
    def bits_bytes(self) -> int:
        """A bit per element of the partial blocks, for one direction."""
        return 0 if self.partial is None else int(self.partial.sum()) * BLOCK * BLOCK // 8

    def _states(self, block_M: int, block_N: int) -> torch.Tensor:
        """States of pairs of tiles of block_M queries and block_N keys. Both divide BLOCK."""
        states = torch.where(self.full, FULL, self.partial * PARTIAL).to(torch.int8)
        sizes = (block_M, self.shape.seqlen_q), (block_N, self.shape.seqlen_k)
        for dim, (block, length) in enumerate(sizes, -2):
            states = states.repeat_interleave(BLOCK // block, dim=dim).narrow(dim, 0, -(-length // block))
        return states

    def dense_bytes_moved(self, gradients: bool) -> int:
        """Bytes per score of tiles of captured tensors; with those of their gradients."""
        values, tensors = self.program.values, self.program.tensors
        moved = sum(BYTES[tensors[values[i].data].dtype] for i in self.program.dense_loads)
        stored = (tensors[self.program.gradients[i].tensor] for i in self.program.stored)
        return moved + gradients * sum(BYTES[stored_dtype(tensor)] for tensor in stored)

    @property
    def gathers(self) -> int:
        """Loads per score with indices of their own."""
        others = {*self.program.dense_loads, *self._of_diagonals}
        loads = (i for i, x in enumerate(self.program.values) if x.op == "load" and i not in others)
        return sum(self.program.depends_on(i, LEAVES) for i in loads)

    @functools.cached_property
    def _of_diagonals(self) -> frozenset[int]:
        """Values that are computed once per diagonal."""
        program = self.program
        return frozenset(i for i in program.needed(program.diagonals) if program.is_diagonal(i))

    @property
    def scatters(self) -> int:
        """Additions to gradients in memory per score."""
        once = len(self.program.stored) + len(self.program.diagonal_gradients)
        return len(self.program.gradients) - once

    @property
    def instructions(self) -> float:
        """Arithmetic per score in units of fp32 instructions, beside loads; that of integers runs at half rate."""
        per_score = (
            x
            for i, x in enumerate(self.program.values)
            if x.args
            and x.op != "load"
            and i not in self._of_diagonals
            and self.program.depends_on(i, LEAVES)
        )
        fetched = DENSE_INSTRUCTIONS * len(self.program.dense_loads)
        fetched += DIAGONAL_INSTRUCTIONS * len(self.program.diagonals)
        return fetched + sum(1 if x.dtype == FLOAT else 2 for x in per_score)

    @property
    def sum_instructions(self) -> int:
        """Arithmetic per score of the sums of gradients along diagonals."""
        return DIAGONAL_SUM_INSTRUCTIONS * len(self.program.diagonal_gradients)


def check(shape: Shape) -> None:
    """Raise ValueError for a function that is unknown, that a shape cannot have, or whose blocks are too many to list."""
    functions.check(shape)
    name, longest = shape.options.function, max(shape.seqlen_q, shape.seqlen_k)
    if name in functions.SCORES | functions.BIASES:
        return
    if longest > MAX_LENGTH:
        raise ValueError(f"shape {shape}: expected at most {MAX_LENGTH} keys with a mask, got {longest}")
    blocks = shape.heads_q * (longest // BLOCK) ** 2
    if name not in functions.MASKS and blocks > MAX_BLOCKS:
        raise ValueError(
            f"shape {shape}: expected at most {MAX_BLOCKS} blocks of {BLOCK} x {BLOCK} in all heads, got {blocks}"
        )


@functools.lru_cache(maxsize=64)
def of_shape(shape: Shape) -> Asked | None:
    """Demands of the function of a shape on the kernels; None without a function. Needs no GPU and none of the memory of a bias."""
    from tl_attention.block_masks import create_block_mask
    from tl_attention.tracing.builtin_options import builtin_options, program_with_bits
    from tl_attention.tracing.dense_bias import with_bias
    from tl_attention.tracing.trace import trace

    if not shape.options.function:
        return None
    needs_values = shape.options.function not in functions.SCORES | functions.BIASES
    found: Function = functions.of_shape(shape, torch.device("cpu" if needs_values else "meta"))
    score_mod, mask_mod = found.score_mod, found.mask_mod
    if found.bias is not None:
        score_mod, mask_mod = with_bias(score_mod, mask_mod, found.bias)
    call = trace(score_mod, mask_mod, True)
    plain = replace(shape, options=ShapeOptions())
    if not needs_values:
        options = builtin_options(
            call, shape.seqlen_q, shape.seqlen_k, shape.batch, shape.heads_q, torch.device("meta")
        )
        if options is not None:
            has_slopes = options.alibi_slopes is not None
            return Asked(replace(plain, options=ShapeOptions(softcap=options.softcap, alibi=has_slopes)))
        bias = found.bias
        size = 0 if bias is None else bias.numel() * bias.element_size()
        return Asked(
            plain, call.program, bias_bytes=size, is_bias_per_batch=bias is not None and len(bias) > 1
        )
    if found.blocks is not None:
        states = found.blocks.to(torch.int8) * FULL
    else:
        mask = create_block_mask(mask_mod, None, None, shape.seqlen_q, shape.seqlen_k, device="cpu")
        lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
        states = block_states(*lists, -(-shape.seqlen_k // BLOCK))
    program, *_ = program_with_bits(call, max(shape.seqlen_q, shape.seqlen_k))
    return Asked(plain, program, found.seen[0], states[0] == PARTIAL, states[0] == FULL)
