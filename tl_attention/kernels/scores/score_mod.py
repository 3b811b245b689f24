"""Scores of the forward: what happens to Q Kᵀ of a key block before its softmax."""

from __future__ import annotations

from typing import Any, Protocol

import tilelang.language as T

from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.kernels.scores.mask import KeyBlock, KeyBlocks
from tl_attention.kernels.scores.options import OptionArguments, Scores, sink_score
from tl_attention.kernels.scores.softcap import PolynomialCap
from tl_attention.kernels.seams.softmax import LOG2E, SMALLEST_SCALE
from tl_attention.problem.attn_problem import AttnProblem


class ScoreMod(Protocol):
    """Change of the scores of 64 queries, the first of which is `query`, in one key block after another.

    The calls are in this order, the last four per key block. S = Q Kᵀ is issued between begin() and look_up().
    """

    raw: bool  # S is left in units of Q Kᵀ, so the softmax applies softmax_scale
    clears: bool  # begin() leaves acc_s alone: S replaces what is in it
    scale_log2: Any  # factor of scores in exponents of base 2

    def start(self, tile: Any, query: Any, blocks: KeyBlocks, scale_log2: Any) -> None:
        """Read what all key blocks of a tile need, and begin to read what the first one needs."""

    def begin(self, acc_s: Any, block: KeyBlock) -> None:
        """Set acc_s to a bias on top of which S is accumulated."""

    def look_up(self, query: Any, block: KeyBlock) -> None:
        """Read what apply() needs of a key block, beside S, as memory latency is long."""

    def apply(self, acc_s: Any, query: Any, block: KeyBlock, at_zero: bool = False) -> None:
        """Change S, and mask it. at_zero: the row max is 0 and held, and scores become exponents of base 2."""

    def shift(self, query: Any, block: KeyBlock) -> Any:
        """Number to add to all scores of the key block; None for 0."""


def has_two_sides(problem: AttnProblem, config: FwdConfig) -> bool:
    """True if an ALiBi without a mask is linear on either side of the diagonals."""
    return problem.bias_has_two_sides and not config.split and config.page_rows == 0


def near_keys_first(problem: AttnProblem, config: FwdConfig) -> bool:
    """True if the key blocks that the diagonals of a tile cross come early, see mask.NearFirstKeyBlocks."""
    return has_two_sides(problem, config) or (config.hold_max and problem.scores_stay_close)


@T.meta_class
class ForwardScores:
    """ScoreMod of any problem: softcap, ALiBi, a program with its dense biases, and the mask of the key blocks, each if there is one."""

    def __init__(
        self,
        problem: AttnProblem,
        config: FwdConfig,
        options: OptionArguments,
        softmax_scale: Any,
        smem: Any,
        name: str = "scores",
    ):
        self.problem, self.config, self.options, self.softmax_scale = problem, config, options, softmax_scale
        self.smem, self.two_sides = smem, has_two_sides(problem, config)
        self.may_hold_zero, self.polynomial = PolynomialCap.serves(problem, config), None
        self.scores = Scores(
            problem, options, softmax_scale, config.block_N, staged=smem.staged, two_sides=self.two_sides
        )

    @property
    def raw(self) -> bool:
        return self.scores.raw

    @property
    def clears(self) -> bool:
        return self.scores.linear is None

    @property
    def scale_log2(self) -> Any:
        if not self.raw:
            return self.scores.scale_log2
        return self.scores.not_too_small(T.max(T.abs(self.softmax_scale) * LOG2E, SMALLEST_SCALE))

    def polynomial_cap(self, blocks: KeyBlocks) -> PolynomialCap | None:
        """Begin the softcap of the steps whose row max is 0 and held, which apply() needs; None: there are no such steps."""
        if self.may_hold_zero:
            keys = blocks.steps * self.config.block_N
            self.polynomial = PolynomialCap(self.softmax_scale, self.options.softcap, keys)
        return self.polynomial

    def sink(self, tile: Any) -> Any:
        """Score without a key that the row sums contain; None without a sink."""
        return sink_score(self.problem, self.options, tile, self.config.split)

    @T.inline
    def start(self, tile, query, blocks, scale_log2):
        self.scores.start(tile.batch, tile.head, scale_log2)
        if blocks.listed:
            blocks.read_ahead(0)
        self.scores.prefetch(query, blocks, 0)

    @T.inline
    def begin(self, acc_s, block):
        self.scores.begin(acc_s, self.bias_columns(block))

    def bias_columns(self, block: KeyBlock) -> Any:
        """Right factor of the linear bias; None without one."""
        columns = self.smem.bias_columns
        return columns[block.is_right, :, :] if self.two_sides else columns

    @T.inline
    def look_up(self, query, block):
        blocks, step, step_range, traced = block.blocks, block.step, block.step_range, self.scores.traced
        if blocks.listed and (traced.needs_key or (step_range.masked and not self.scores.has_whole_bits)):
            blocks.find(step)
        if self.scores.has_bits and step_range.masked:
            if blocks.is_ahead(step_range):
                traced.fetch_bits(blocks.place_ahead[0], query, blocks.key_at(step))
                blocks.read_ahead(blocks.next_partial(step, step_range))
            else:
                traced.fetch_bits(blocks.place_at(step), query, blocks.key_at(step))
        if self.scores.fetches or self.scores.has_diagonals:
            self.scores.fetch(query, blocks, step)

    @T.inline
    def apply(self, acc_s, query, block, at_zero=False):
        blocks, step, step_range, traced = block.blocks, block.step, block.step_range, self.scores.traced
        if at_zero:
            self.polynomial.apply(acc_s)
        else:
            self.scores.cap(acc_s)
        self.scores.bias(acc_s, block.diagonal(query))
        if self.two_sides and step_range.masked:
            self.scores.linear.fold(acc_s, block.diagonal(query))
        if traced is not None:
            traced.locate(query, blocks.key_at(step), blocks.how_at(step))
            traced.apply(acc_s)
            if step_range.masked or not blocks.listed:
                may_hide = not step_range.is_last_block or blocks.may_hide(step)
                traced.hide_step(acc_s, -T.infinity("float32"), blocks, may_hide)
        if not blocks.listed:
            blocks.hide(acc_s, query, step, step_range)

    def shift(self, query: Any, block: KeyBlock) -> Any:
        return self.scores.shift(block.diagonal(query), block.is_right)
