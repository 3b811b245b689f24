"""Options of attention inside the kernels: softcap, ALiBi, sink, and the arguments that carry their values.

A kernel contains code only for the options that its problem names. Their values are launch arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.cuda import source
from tl_attention.kernels.scores.linear_bias import LinearBias
from tl_attention.kernels.scores.program_code import program_code
from tl_attention.kernels.scores.staged import StagedTiles
from tl_attention.kernels.scores.traced import Traced
from tl_attention.kernels.scores.traced_arguments import TracedArguments
from tl_attention.kernels.seams.roles import Roles
from tl_attention.kernels.seams.softmax import LOG2E
from tl_attention.problem.attn_problem import (
    KERNEL_ARGUMENTS,
    OPTION_ARGUMENTS,
    AttnProblem,
    OptionArgument,
    arguments_of,
)
from tl_attention.problem.program import LISTED_ROWS

_NAMES = tuple(x.name for x in arguments_of(OPTION_ARGUMENTS))
_Values = make_dataclass("_Values", [(name, Any) for name in _NAMES], frozen=True)


@dataclass(frozen=True)
class OptionArguments(_Values):
    """Arguments of a kernel with options: a field per argument of OPTION_ARGUMENTS, by its name, and those of the problem's program.

    Those of options that the problem lacks are not read. Table is scheduler.TileOrder's with packed sequences, else options.Options.place.
    """

    traced: TracedArguments | None = None

    @property
    def window(self) -> tuple[Any, Any]:
        return self.left, self.right


def option_arguments(problem: AttnProblem) -> OptionArguments:
    """Types of OptionArguments; none if the problem has no options.

    The tensor of an option that is off may be any tensor of the same rank.
    """
    return argument_types(KERNEL_ARGUMENTS if problem.options else ())


def argument_types(arguments: Sequence[OptionArgument]) -> OptionArguments:
    """Types of these arguments; False, for which declare() makes no argument, of others."""
    types = dict.fromkeys(_NAMES, False)
    return OptionArguments(**types | {x.name: _type_of(x) for x in arguments})


def _type_of(argument: OptionArgument) -> Any:
    """Type of an argument for declare()."""
    if not argument.shape:
        return T.dtype(argument.dtype)
    prefix = argument.name.lower()
    sizes = [T.dynamic(f"{prefix}_{size}") if isinstance(size, str) else size for size in argument.shape]
    if argument.is_per_entry:
        return T.StridedTensor(sizes, [T.dynamic(f"{prefix}_stride"), 1], argument.dtype)
    return T.Tensor(sizes, argument.dtype)


def sink_score(problem: AttnProblem, options: OptionArguments | None, tile: Any, split: bool) -> Any:
    """Sink score of the tile's head; of the CTAs that split a tile only one gets it. None without a sink."""
    if not problem.has("sink"):
        return None
    sink = options.Sink[tile.head]
    return T.if_then_else(tile.split == 0, sink, -T.infinity("float32")) if split else sink


def prelude(problem: AttnProblem, roles: Roles, more: str = "") -> str | None:
    """CUDA that a kernel needs beside its own, with `more` at its end; None for nothing."""
    philox = source("philox") if problem.has("dropout") else ""
    tanh = source("tanh") if problem.has("softcap") and problem.is_fp32 else ""
    zero = source("zero") if problem.terms > 1 else ""
    program = "" if problem.program is None else program_code(problem.program, accurate=problem.is_fp32)
    return (roles.prelude or "") + philox + tanh + zero + program + more or None


@T.meta_class
class Scores:
    """Transformation of raw scores Q Kᵀ into scores for the softmax, and their factor in exponents of base 2.

    softcap: s -> c tanh(s scale / c). alibi: s -> s - slope * |query + seqlen_k - seqlen_q - key|.

    Args:
        cols: columns of a score tile; None where there is no program.
        rows_are_keys: score tiles are [keys, queries].
        staged: see alloc_staged().
        two_sides: an ALiBi bias is linear on either side of the diagonals.
        hides_raw: hide_transposed() hides the elements of a program, before exponent(). If that changes scores, softmax_scale is not 0.
        by_element: a causal ALiBi bias is subtracted from each score, not added by a product.
        sums_pairs: see Traced.
    """

    def __init__(
        self,
        problem: AttnProblem,
        options: OptionArguments | None,
        softmax_scale: Any,
        cols: int | None = None,
        rows_are_keys: bool = False,
        staged: StagedTiles | None = None,
        two_sides: bool = False,
        hides_raw: bool = False,
        by_element: bool = False,
        sums_pairs: bool = False,
        name: str = "scores",
    ):
        self.hides_raw = hides_raw
        self.rows_are_keys = rows_are_keys
        self.capped, self.causal, self.is_fp32 = problem.has("softcap"), problem.causal, problem.is_fp32
        self.options, self.softmax_scale = options, softmax_scale
        is_linear = two_sides or (problem.bias_is_linear and not by_element)
        self.linear = LinearBias(rows_are_keys, name="linear_bias") if is_linear else None
        self.biased = problem.has("alibi") and self.linear is None
        self.alibi_slope = T.alloc_var("float32", init=0.0) if self.biased else None
        self.traced, self.changed, program = None, problem.changes_scores, problem.program
        self.learns_dS = problem.learns_dS and not problem.sends_dS
        self.sums_dS = problem.learns_dS and not program.stored
        self.fetches, self.has_bits = problem.fetches, program is not None and program.bits
        # A step has all columns of a block with bits
        self.has_whole_bits = self.has_bits and cols == LISTED_ROWS
        self.has_diagonals = problem.has_diagonals
        # exponent() is -inf for hidden elements; with listed blocks they are set to 0 later, only in blocks that hide some
        self.hides_at_once = self.changed and program.hides and not program.listed
        if program is not None:
            sizes = cols, rows_are_keys, staged, sums_pairs
            self.traced = Traced(problem, options.traced, softmax_scale, *sizes, name="traced")

    @property
    def raw(self) -> bool:
        """True if the softmax gets raw scores and applies the scale in its exponents."""
        return not (self.capped or self.biased or self.changed)

    @property
    def scale_log2(self) -> Any:
        """Factor of scores that are not raw in exponents of base 2."""
        constant = self.biased or self.changed
        return T.float32(LOG2E) if constant else self.options.softcap * LOG2E

    def not_too_small(self, raw_scale: Any) -> Any:
        """Scale of raw scores, kept away from 0 so that slopes can be divided by it; scores are negligible before it is reached."""
        if self.linear is None:
            return raw_scale
        least = T.if_then_else(raw_scale < 0, -(2.0**-40), 2.0**-40)
        return T.if_then_else(T.abs(raw_scale) < 2.0**-40, least, raw_scale)

    @T.inline
    def start(self, batch, head, scale_log2):
        """Read the slope of a head."""
        if self.linear is not None:
            self.linear.start(self.options.Slopes[batch, head] * LOG2E / scale_log2)
        if self.biased:
            self.alibi_slope[0] = self.options.Slopes[batch, head]
        if self.traced is not None:
            self.traced.start(batch, head)

    @T.inline
    def begin(self, acc_s, columns):
        """Set acc_s to the linear bias, if there is one. Q Kᵀ is then added to it."""
        if self.linear is not None:
            self.linear.multiply(columns, acc_s)

    def shift(self, diagonal: Any, is_right: Any = 0) -> Any:
        """Constant to add to all scores of a tile after begin(); None without a linear bias."""
        return None if self.linear is None else self.linear.shift(diagonal, is_right)

    @T.inline
    def cap(self, acc_s):
        """Replace scores s by tanh(s scale / c)."""
        # The exponential unit also computes tanh. Computing every fourth exponential by a polynomial took longer: 632 us against 626 at
        # d128, 847 against 786 at d256 (H200, 2026-11-21)
        if self.capped:
            rows, cols = acc_s.shape
            for i, j in T.Parallel(rows, cols):
                acc_s[i, j] = self.tanh(acc_s[i, j])

    def tanh(self, score: Any) -> Any:
        """tanh(s scale / c) of a score s."""
        if self.is_fp32:
            factor = T.call_extern("float32", "__fdiv_rn", self.softmax_scale, self.options.softcap)
            return T.call_extern("float32", "tl_attention_tanh", score * factor)
        return T.tanh(score * (self.softmax_scale / self.options.softcap))

    def biased_score(self, score: Any, i: Any, j: Any, diagonal: Any) -> Any:
        """Score after cap(), or a raw score, minus the bias. diagonal: column that the diagonal of the tile's first query crosses.

        Only in the first 8 columns, of which a thread has 2 per row, is an int converted to a float. Other columns are computed from
        these by an addition, which takes a quarter of the time.
        """
        if not self.biased:
            return score
        factor = self.options.softcap if self.capped else self.softmax_scale
        first = T.cast(diagonal + (j % 8 - i if self.rows_are_keys else i - j % 8), "float32")
        from_first = T.cast((1 if self.rows_are_keys else -1) * (j // 8 * 8), "float32")
        return score * factor - (
            # A key right of the diagonal is masked, whatever its score
            self.alibi_slope[0] * first + self.alibi_slope[0] * from_first
            if self.causal
            else self.alibi_slope[0] * T.abs(first + from_first)
        )

    @T.inline
    def bias(self, acc_s, diagonal):
        """Apply softmax_scale and subtract ALiBi, where it is not linear."""
        if self.biased:
            rows, cols = acc_s.shape
            for i, j in T.Parallel(rows, cols):
                acc_s[i, j] = self.biased_score(acc_s[i, j], i, j, diagonal)

    @T.inline
    def locate(self, query, blocks, step):
        """Set the position of the tile [queries, keys] at a step of key blocks for a program, and fetch what it needs."""
        if self.traced is not None:
            if self.has_bits:
                self.traced.fetch_bits(blocks.place_at(step), query, blocks.key_at(step))
            self.fetch(query, blocks, step)

    @T.inline
    def fetch(self, query, blocks, step):
        """Set the position of the tile at a step, and fetch what a program needs, except bits."""
        self.traced.locate(query, blocks.key_at(step), blocks.how_at(step))
        if self.has_diagonals:
            self.traced.keep_diagonals()
        self.traced.fetch()
        self.prefetch(query, blocks, step + 1)

    @T.inline
    def prefetch(self, query, blocks, step):
        """Prefetch what a program needs at a step of key blocks; past the last step the result is not used."""
        if self.has_diagonals:
            self.traced.fetch_diagonals(self.traced.head[0], query, blocks.first_key(step), True)
        if self.traced is not None and self.traced.is_staged:
            self.traced.prefetch(self.traced.head[0], query, blocks.first_key(step), step < blocks.steps)

    @T.inline
    def start_transposed(self, mask, blocks):
        """Fetch what a program needs at the first step of query blocks, for the keys of a KeyRowsMask."""
        if self.has_bits:
            self.traced.fetch_bits(blocks.place, mask.key, blocks.query, self.hides_raw)
        if self.has_diagonals:
            self.traced.fetch_diagonals(blocks.head, blocks.query, mask.key, True)
            self.traced.keep_diagonals(self.hides_raw)
        if self.fetches:
            if self.traced.is_staged:
                self.traced.prefetch(blocks.head, blocks.query, mask.key, True)

    @T.inline
    def advance(self, mask, blocks):
        """Go to the next step of query blocks, and fetch its bits early."""
        if self.has_diagonals:
            self.traced.keep_diagonals(self.hides_raw)
        blocks.advance()
        if self.has_bits:
            self.traced.fetch_bits(blocks.place, mask.key, blocks.query, self.hides_raw)

    @T.inline
    def learn_dS(self, dS, blocks, adds):
        """Pass a tile dS' [keys, queries] on if it is the gradient of a captured tensor; after locate_transposed().

        adds: False if add_learned() follows, when GEMMs have been issued.
        """
        if self.learns_dS:
            self.traced.learn_dS(dS, blocks.mask.seqlen_q, blocks.mask.seqlen_k)
            if adds and self.sums_dS:
                self.traced.add_diagonals()

    @T.inline
    def add_learned(self, blocks):
        """Add the sums of learn_dS() to the gradient; before advance()."""
        if self.sums_dS:
            self.traced.add_diagonals(blocks.head)

    @T.inline
    def locate_transposed(self, key, blocks, step):
        """Set the position of the tile [keys, queries] at a step of query blocks for a program, and fetch what it needs."""
        if self.traced is not None:
            self.traced.locate(blocks.query, key, blocks.how)
            self.traced.fetch()
            if self.traced.is_staged:
                self.traced.prefetch(blocks.next_head, blocks.next_query, key, step + 1 < blocks.steps)

    @T.inline
    def fetch_next(self, mask, blocks, step):
        """Compute the values of the diagonals of the next step, which advance() stores; no registers are free before dS' is complete."""
        if self.has_diagonals:
            self.traced.fetch_diagonals(
                blocks.next_head, blocks.next_query, mask.key, step + 1 < blocks.steps
            )

    @T.inline
    def clear(self, acc_s, blocks, query, step):
        """Set probabilities [queries, keys] of hidden elements to 0; after locate()."""
        if self.traced is not None and not self.hides_at_once:
            self.traced.hide_step(acc_s, 0.0, blocks, blocks.may_hide(step))
        if not blocks.listed:
            blocks.mask.clear(acc_s, query, blocks.first_key(step))

    @T.inline
    def clear_transposed(self, acc_s, P_for_dv, mask, blocks):
        """Set probabilities [keys, queries] of hidden elements to 0; after locate_transposed(). P_for_dv: further ones, or None."""
        if self.traced is not None and not self.hides_at_once:
            self.traced.hide_step(acc_s, 0.0, blocks, blocks.may_hide)
            if P_for_dv is not None:
                self.traced.hide_step(P_for_dv, 0.0, blocks, blocks.may_hide)
        if not blocks.listed:
            mask.clear(acc_s, blocks.query)

    @T.inline
    def hide_transposed(self, acc_s, mask, blocks, softmax_scale):
        """Set scores [keys, queries] of hidden elements to the infinity that becomes -inf in exponent(); after locate_transposed()."""
        scale = softmax_scale if self.raw or self.changed else 1.0
        if not blocks.listed:
            mask.hide(acc_s, blocks.query, scale)
        else:
            if blocks.may_hide:
                hidden = T.if_then_else(scale < 0, T.infinity("float32"), -T.infinity("float32"))
                self.traced.hide(acc_s, hidden, blocks.stop_key)

    @T.inline
    def prepare(self, acc_s, diagonal):
        """Apply the changes of scores that exponent() does not apply itself; in the backward."""
        self.cap(acc_s)
        if not self.capped:  # with a softcap the bias is applied later: sloped() needs scores after cap()
            self.bias(acc_s, diagonal)

    def exponent(self, score: Any, i: Any, j: Any, diagonal: Any, scale_log2: Any, lse_log2: Any) -> Any:
        """Exponent of base 2 of the probability of a score."""
        if self.changed:
            exponent = self.traced.score(score, i, j) * scale_log2 - lse_log2
            if not self.hides_at_once:
                return exponent
            return T.if_then_else(self.traced.sees(i, j), exponent, -T.infinity("float32"))
        if self.linear is not None:
            lse_log2 = lse_log2 - self.linear.shift(diagonal) * scale_log2
        return (self.biased_score(score, i, j, diagonal) if self.capped else score) * scale_log2 - lse_log2

    def sloped(self, P: Any, score: Any, i: Any, j: Any) -> Any:
        """Probability times the derivative of its score: of the program, or of the cap, 1 - tanh², 0 for an infinite score."""
        if self.traced is not None:
            return self.traced.sloped(P, score, i, j)
        return P * T.call_extern("float32", "__saturatef", 1.0 - score * score)
