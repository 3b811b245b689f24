"""Configs of the kernels before attention in fp32, which split its inputs into bf16 terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tl_attention.problem.attn_problem import AttnProblem


@dataclass(frozen=True)
class TermsConfig:
    """The kernel before attention in fp32: splits K and V, in a backward Q and dO, into bf16 terms."""

    rows: int = 32  # rows of one head per CTA
    threads: int = 128

    def __str__(self) -> str:
        return f"terms {self.rows}"


TERM_STAGES = (8, 3)  # numbers of tiles that a warp loads ahead, the best first
# Warps per CTA that make terms beside attention; one less in a backward where one of them draws tiles
MAKERS = 3
STAGE_BYTES = 1024  # of fp32 rows, a tile that such a warp loads ahead


def staging_bytes(stages: int, warps: int = MAKERS) -> int:
    """Shared memory of warps that make terms, each with `stages` tiles ahead."""
    return warps * stages * STAGE_BYTES


def splits_keys(problem: AttnProblem, makes: tuple[str, ...]) -> bool:
    """True if a pass of a backward splits K and V in shared memory: in fp32 the first pass, which makes dk."""
    return problem.is_fp32 and "dk" in makes


def stores_key_terms(problem: AttnProblem, makes: tuple[str, ...]) -> bool:
    """True if such a pass stores the terms of K and V for the passes after it."""
    return splits_keys(problem, makes) and "dq" not in makes


ITEM_ELEMENTS = 8192  # rows times columns of an item of kernels/fp32/input_terms.py


def term_items(width: int, heads: Any, seqlen: Any) -> Any:
    """Items of kernels/fp32/input_terms.py, of two tensors."""
    rows = ITEM_ELEMENTS // width
    return heads * 2 * ((seqlen + rows - 1) // rows)


@dataclass(frozen=True)
class FirstTermsConfig:
    """The kernel before attention in fp32 whose idle warps split its inputs: splits those of the first heads."""

    warps: int = 4  # per CTA, each with an item
    stages: int = 8  # tiles that a warp loads ahead

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.warps

    def __str__(self) -> str:
        return "first terms"


def terms_kernels(
    problem: AttnProblem, beside: bool = False
) -> list[tuple[AttnProblem, TermsConfig | FirstTermsConfig]]:
    """The kernel that splits inputs of an fp32 problem, or those of the first heads; none for other dtypes.

    Args:
        beside: the other heads are split beside attention.
    """
    if not problem.is_fp32:
        return []
    config = FirstTermsConfig() if beside else TermsConfig()
    return [(AttnProblem(problem.dtype, problem.head_dim, problem.head_dim, False), config)]
