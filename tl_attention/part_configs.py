"""Configs of the kernels before attention in fp32, which split its inputs into bf16 parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tl_attention.problem import AttnProblem


@dataclass(frozen=True)
class PartsConfig:
    """The kernel before attention in fp32: splits Q, K, V or dO into bf16 parts."""

    rows: int = 32  # rows of one head per CTA
    threads: int = 128

    def __str__(self) -> str:
        return f"parts {self.rows}"


PART_STAGES = (8, 3)  # numbers of tiles that a warp loads ahead, the best first
# Warps per CTA that make parts beside attention; one less in a backward where one of them draws tiles
MAKERS = 3
STAGE_BYTES = 1024  # of fp32 rows, a tile that such a warp loads ahead


def staging_bytes(stages: int, warps: int = MAKERS) -> int:
    """Shared memory of warps that make parts, each with `stages` tiles ahead."""
    return warps * stages * STAGE_BYTES


ITEM_ELEMENTS = 8192  # rows times columns of an item of kernels/input_parts.py


def part_items(width: int, heads_per_kv: Any, seqlen_q: Any, seqlen_k: Any, backward: bool) -> Any:
    """Items of kernels/input_parts.py per key head: those of K and V, and of its query heads those of Q, and in a backward dO."""
    rows = ITEM_ELEMENTS // width
    of_keys, of_queries = ((seqlen + rows - 1) // rows for seqlen in (seqlen_k, seqlen_q))
    return 2 * of_keys + heads_per_kv * (1 + backward) * of_queries


@dataclass(frozen=True)
class FirstPartsConfig:
    """The kernel before attention in fp32 whose idle warps split its inputs: splits those of the first heads."""

    backward: bool = False  # dO is an input
    warps: int = 4  # per CTA, each with an item
    stages: int = 8  # tiles that a warp loads ahead

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.warps

    def __str__(self) -> str:
        return "first parts" + " backward" * self.backward


def parts_kernels(
    problem: AttnProblem, beside: bool = False, backward: bool = False
) -> list[tuple[AttnProblem, PartsConfig | FirstPartsConfig]]:
    """The kernel that splits the inputs of an fp32 problem, or those of the first heads; none for other dtypes.

    Args:
        beside: the other heads are split beside attention.
    """
    if not problem.is_fp32:
        return []
    config = FirstPartsConfig(backward) if beside else PartsConfig()
    return [(AttnProblem(problem.dtype, problem.head_dim, problem.head_dim, False), config)]
