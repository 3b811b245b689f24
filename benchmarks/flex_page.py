"""The tables of docs/flex.md that follow from the stored races of functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from rows import OPTION, OURS, Row, by_problem, ratio_over
from tables import markdown_table

PASSES = {"fwd": "Forward", "bwd": "Backward"}
WIDTHS = (128, 64)
COLUMNS = [*itertools.product(PASSES, WIDTHS)]
LENGTHS = ("8k", "4k")  # the first that a race has
MASKS = {
    "causal": "causal",
    "eight causal documents": "documents",
    "prefix of 1024": "prefix-lm",
    "causal window of 1024": "window",
}
FUNCTIONS = {
    "softcap": "softcap",
    "ALiBi": "alibi",
    "learned bias": "relative",
    "buckets of T5, by tables": "buckets",
}
TORCH, BY_FA4 = "flex", "flex-fa4"

Groups = Mapping[str, Mapping[str, Mapping[str, Row]]]  # pass -> name of a shape -> provider -> row


def blocks(runs: Mapping[str, Sequence[Row]]) -> dict[str, str]:
    """Name of a block -> its Markdown. runs: fwd and bwd -> their rows."""
    groups = {
        direction: {next(iter(group.values()))["shape"]: group for group in by_problem(rows).values()}
        for direction, rows in runs.items()
    }
    masks = _table("Mask", MASKS, groups, lambda group: f"{group[OURS]['tflops']:.0f}{_share(group)}")
    functions = _table("Function", FUNCTIONS, groups, lambda group: f"{group[OURS]['ms']:.2f}{_share(group)}")
    return {
        "masks": f"{masks}\n\n{_over_torch(groups)}",
        "functions": functions,
        "torch": _table("Function", FUNCTIONS, groups, lambda group: _over(group, TORCH)),
        "biases": _biases(groups),
        "fa4": _table("Function or mask", FUNCTIONS | MASKS, groups, lambda group: _over(group, BY_FA4)),
    }


def _table(
    title: str, kinds: Mapping[str, str], groups: Groups, cell: Callable[[Mapping[str, Row]], str]
) -> str:
    """A line per kind with a cell in it, a column per pass and head dim."""
    lines = []
    for words, kind in kinds.items():
        found = [_find(groups[direction], kind, width) for direction, width in COLUMNS]
        cells = [cell(group) if group else "–" for group in found]
        if any(text != "–" for text in cells):
            lines.append([words, *cells])
    return markdown_table([title, *(f"{PASSES[direction]} d{width}" for direction, width in COLUMNS)], lines)


def _biases(groups: Groups) -> str:
    """A line per race of a dense bias: our milliseconds and, in brackets, our speed over PyTorch's memory-efficient attention."""
    lines = []
    for name, group in groups["fwd"].items():
        if name.startswith("flex-bias-of-"):
            row = group[OURS]
            sizes = f"batch {row['batch']}, {row['heads_q']} heads, {row['seqlen_q']}, d{row['head_dim']}"
            of = "head" if name.startswith("flex-bias-of-heads") else "batch entry and head"
            found = [groups[direction].get(name) for direction in PASSES]
            lines.append([f"{sizes}, per {of}", *(_ms_of_bias(group) if group else "–" for group in found)])
    return markdown_table(["Bias", *PASSES.values()], lines)


def _ms_of_bias(group: Mapping[str, Row]) -> str:
    ratio = ratio_over(group[OURS], "efficient")
    return f"{group[OURS]['ms']:.3f}" + (f" ({ratio:.1f})" if ratio else "")


def _find(groups: Mapping[str, Mapping[str, Row]], kind: str, width: int) -> Mapping[str, Row] | None:
    names = (f"flex-{kind}-d{width}-{length}" for length in LENGTHS)
    return next((groups[name] for name in names if name in groups), None)


def _share(group: Mapping[str, Row]) -> str:
    """Share of the speed of the option that computes the same."""
    share = ratio_over(group[OURS], OPTION)
    return f" ({share:.2f})" if share else ""


def _over(group: Mapping[str, Row], peer: str) -> str:
    """Our speed over a peer's; how it ended, where it has none."""
    ratio = ratio_over(group[OURS], peer)
    return (
        f"{ratio:.2f}"
        if ratio
        else {"failed": "fails", "wrong": "wrong"}.get(group.get(peer, {}).get("status", ""), "–")
    )


def _over_torch(groups: Groups) -> str:
    """Our speed over PyTorch's in all lengths of the masks, in a sentence."""
    ranges = []
    for direction, width in COLUMNS:
        ratios = sorted(_ratios(groups[direction], width))
        if ratios:
            ranges.append(f"{ratios[0]:.2f} to {ratios[-1]:.2f} ({PASSES[direction].lower()}, d{width})")
    return f"Our speed over PyTorch's compiled flex_attention, with these masks in all lengths of the races: {', '.join(ranges)}."


def _ratios(groups: Mapping[str, Mapping[str, Row]], width: int) -> Iterator[float]:
    for name, group in groups.items():
        if any(name.startswith(f"flex-{kind}-d{width}-") for kind in MASKS.values()):
            ratio = ratio_over(group[OURS], TORCH)
            if ratio:
                yield ratio
