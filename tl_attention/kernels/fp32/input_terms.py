"""Splitting of fp32 inputs beside attention: warps that have no other work make the bf16 terms that products.py multiplies.

These are the inputs that many CTAs read: K and V of a forward, Q and dO of a backward. split_tile.py splits the others.
The rows of the inputs are cut into items, ordered by heads as the tiles are. first_terms.py makes the first items. The idle warps of the
attention kernel draw the others one by one, and count those of each head that are done. A producer waits for the heads of its tile.
A warp that makes terms never waits, so whatever CTAs run, all items are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config.term_configs import ITEM_ELEMENTS, MAKERS, STAGE_BYTES, staging_bytes, term_items
from tl_attention.kernels.cuda import source
from tl_attention.kernels.sources.tiles import strided
from tl_attention.problem.attn_problem import AttnProblem

MAKE_TERMS = source("input_terms", ITEM_ELEMENTS=ITEM_ELEMENTS, STAGE_BYTES=STAGE_BYTES)


@dataclass(frozen=True)
class InputTerms:
    """Two fp32 inputs of a launch that have one shape but for their columns, and the tensors of their terms.

    Args:
        first, second: pairs of an fp32 tensor [batch, seqlen, heads, columns <= width] and its terms [batch, seqlen, heads, terms * width]:
            K and V of a forward, Q and dO of a backward.
        Progress: int32 [1 + batch * heads], set by first_terms.py: items drawn, then items done per head.
        stages: tiles that a warp loads ahead.
        tiles_ahead: see make_share().
        warps: warps per CTA that make terms.
    """

    problem: AttnProblem
    first: tuple[Any, Any]
    second: tuple[Any, Any]
    Progress: Any
    stages: int
    tiles_ahead: Any = None
    warps: int = MAKERS

    @classmethod
    def of(
        cls, problem: AttnProblem, inputs: InputArguments, terms: tuple[Any, Any], stages: int
    ) -> InputTerms:
        """Build from the arguments of a kernel. terms: those of the first and of the second input."""
        pairs = (inputs.first, terms[0]), (inputs.second, terms[1])
        return cls(problem, *pairs, inputs.Progress, stages, inputs.tiles_ahead)

    @T.inline
    def make(self, function, number):
        """Call a function of MAKE_TERMS that makes terms."""
        memory = T.alloc_shared([staging_bytes(self.stages, self.warps) // 4], "float32")
        T.evaluate(
            T.call_extern(
                "handle",
                f"tl_attention_{function}<{self.problem.head_dim}, {self.problem.terms}, {self.stages}>",
                T.address_of(self.Progress[0]),
                T.address_of(memory[0]),
                number,
                self.first[0].shape[0],
                _input_of(*self.first),
                _input_of(*self.second),
            )
        )

    def make_share(self, cta: Any, ctas: Any) -> Any:
        """Make terms until those of the first cta + tiles_ahead of ctas tiles have been drawn, if tiles have equal shares of them."""
        batch, seqlen, heads, _ = self.first[0].shape
        items = term_items(self.problem.head_dim, batch * heads, seqlen)
        return self.make("make_parts", T.ceildiv(items, ctas) * (cta + self.tiles_ahead))

    def make_first(self, heads: Any) -> Any:
        """Make the items of the first heads and set Progress; by all CTAs of a kernel."""
        return self.make("make_first_parts", heads)

    def wait(self, batch: Any, head: Any) -> Any:
        """Wait for the terms of a head; called by a warp before it loads them by TMA."""
        head = batch * self.first[0].shape[2] + head
        name = f"tl_attention_wait_for_parts<{self.problem.head_dim}>"
        return T.evaluate(
            T.call_extern("handle", name, T.address_of(self.Progress[0]), head, _input_of(*self.first))
        )


def _input_of(X: Any, terms: Any) -> Any:
    place = (0, 0, 0, 0)
    sizes = *X.strides[:3], *X.shape[1:]
    return T.call_extern(
        "handle", "tl_attention_input_of", T.address_of(X[place]), *sizes, T.address_of(terms[place])
    )


def input_argument(name: str, batch: Any, seqlen: Any, heads: Any) -> Any:
    """Tensor argument of an fp32 input."""
    return strided(name, [batch, seqlen, heads, T.dynamic(f"columns_{name}")], "float32")


@dataclass(frozen=True)
class InputArguments:
    """Types of the last arguments of a kernel that makes terms, see InputTerms; False for arguments that a kernel lacks."""

    first: Any = False
    second: Any = False
    Progress: Any = False
    tiles_ahead: Any = False

    @classmethod
    def of(cls, batch: Any, seqlen: Any, heads: Any, makes_terms: bool) -> InputArguments:
        if not makes_terms:
            return cls()
        inputs = (input_argument(name, batch, seqlen, heads) for name in ("first_input", "second_input"))
        return cls(*inputs, T.Tensor([T.dynamic("counters")], "int32"), T.int32)
