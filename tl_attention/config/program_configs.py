"""What a program has that its config depends on: the words of [programs] in the grid."""

from __future__ import annotations

from tl_attention.problem.attn_problem import AttnProblem


def traits(problem: AttnProblem) -> frozenset[str]:
    """Words of `needs` that hold for a problem with a program."""
    # hold_max needs scores of similar magnitude: those of a score_mod may grow from block to block, or all be -inf in the first ones
    has = {
        "mask": problem.is_mask_of_bits,
        "band": problem.is_band,
        "bits": problem.has_bits,
        "close": problem.scores_stay_close,
        "score": problem.changes_scores and not problem.fetches,
    }
    return frozenset(name for name, it_has in has.items() if it_has)


def features(problem: AttnProblem) -> frozenset[str]:
    """Words of `serves` that a line of a backward must have: Program.features, with "dS" instead of gradients that are dS, and "sums"
    instead of those that are sums of it.
    """
    found = problem.program.features
    if not problem.learns_dS:
        return found
    return found - {"gradients"} | {"dS" if problem.program.stored else "sums"}
