"""Configs of kernels with a program: which lines of [programs] in the grid serve which program."""

from __future__ import annotations

from typing import Any

from tl_attention.problem.attn_problem import AttnProblem


def program_lines(
    grid: dict[str, Any], problem: AttnProblem, direction: str, bucket: str
) -> list[dict[str, Any]]:
    """Arguments of configs.OptionLine for the lines of [programs] that a problem has, in the order they are tried. The first that is legal
    serves it.

    A forward has one line per width, and optional ones for block masks: fwd_bits, and fwd_listed where the tiles of fwd do not divide
    program.LISTED_ROWS, fwd_held for scores that stay close, and fwd_scores for a score_mod alone. A backward tries other lines before
    those of bwd: with bits those of bwd_bits, before these without a score_mod those of bwd_mask, and first those of bwd_band for a mask
    that shows a range of distances; with a dense bias alone, whose gradient is dS, those of bwd_bias; with a learned value per diagonal
    alone those of bwd_adds. A line of a backward serves problems whose features are all in `serves`.
    """
    width, served = grid["programs"][problem.tile_class], (str(problem.program),)
    table = f"[programs.{problem.tile_class}]"
    if direction == "fwd":
        held = problem.scores_stay_close
        # hold_max needs scores of similar magnitude: those of a score_mod may grow from block to block, or all be -inf in the first ones
        wanted = (
            ("fwd_bits", problem.has_bits and not problem.changes_scores),
            ("fwd_listed", problem.is_listed),
            ("fwd_held", held),
            ("fwd_scores", problem.changes_scores and not (problem.fetches or problem.is_listed)),
        )
        names = [name for name, applies in wanted if applies and name in width]
        return [
            {"name": f"{table} {name}", "serves": served, "fields": width[name]} for name in (*names, "fwd")
        ]
    wanted = (
        ("bwd_band", problem.is_band),
        ("bwd_mask", problem.is_mask_of_bits),
        ("bwd_bits", problem.has_bits),
        ("bwd_bias", problem.learns_bias),
        ("bwd_adds", problem.is_diagonal_bias),
    )
    first = [line for special, applies in wanted if applies for line in width.get(special, ())]
    return [
        {
            "name": f"line {number} of {table} bwd",
            "serves": served,
            "fields": {
                key: value for key, value in line.items() if key not in ("serves", "buckets", "dtypes")
            },
            "buckets": line.get("buckets"),
            "dtypes": line.get("dtypes"),
        }
        for number, line in enumerate([*first, *width.get("bwd", ())], 1)
        if features(problem) <= {*line.get("serves", ())}
    ]


def features(problem: AttnProblem) -> frozenset[str]:
    """Properties of a program that the config of a backward depends on: Program.features, with "dS" instead of gradients that are dS, and
    "sums" instead of those that are sums of it.
    """
    found = problem.program.features
    if not problem.learns_dS:
        return found
    return found - {"gradients"} | {"dS" if problem.program.stored else "sums"}
