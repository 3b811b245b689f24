"""Configs of kernels with a program: which line of [programs] in the grid serves which program."""

from __future__ import annotations

from typing import Any

from tl_attention.problem import AttnProblem

# Features of a program that a config of the backward may not serve; see Program.features
FEATURES = ("slope", "gradients", "scores")


def program_lines(
    table: dict[str, Any], problem: AttnProblem, direction: str
) -> list[tuple[str, dict[str, Any]]]:
    """(name, fields) of the lines of [programs] that serve a problem, the first of which is taken.

    Args:
        table: the grid. A forward has one line per width, a backward a list: a line serves the features in `serves` alone.
    """
    section = "fwd" if direction == "fwd" else "bwd"
    name = f"[programs.{problem.width}] {section}"
    lines = table["programs"][problem.width][section]
    if direction == "fwd":
        return [(name, lines)]
    wanted = problem.program.features
    return [
        (f"line {number} of {name}", {key: value for key, value in line.items() if key != "serves"})
        for number, line in enumerate(lines, 1)
        if wanted <= {*line.get("serves", ())} and not (direction == "bwd_det" and _adds_dq(line))
    ]


def _adds_dq(line: dict[str, Any]) -> bool:
    return any("dq" in fields["grads"] and fields["grads"] != "dq" for fields in line["passes"])
