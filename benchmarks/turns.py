"""The providers of one problem: each checked, timed in turn with the others that are right, and checked again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import report
import torch
from providers import Inputs, Provider, Ready, Result, Unsupported, title
from report import Row

from tl_attention.testing import counts, timer
from tl_attention.testing.numeric import BwdVerdict, Verdict
from tl_attention.testing.shapes import Shape


def new_row(name: str, provider: Provider, shape: Shape) -> Row:
    """A row that nothing is known of."""
    size = asdict(shape) | {"mask": shape.mask}
    del size["causal"], size["options"]
    if shape.options:
        size |= {"options": shape.options.words, "share": counts.share_of_blocks(shape)}
    facts = {"provider": name, "title": title(name), "library": provider.library(), "layout": provider.layout}
    return facts | size | dict.fromkeys(report.MEASURED) | {"status": "failed", "reason": None}


@contextlib.contextmanager
def reasons(row: Row) -> Iterator[None]:
    """Whatever a library raises here goes into its row; what every later CUDA call meets, too, is raised."""
    try:
        yield
    except Unsupported as reason:
        row |= {"status": "skipped", "reason": str(reason)}
    except Exception as error:
        row |= {"status": "failed", "reason": timer.first_line(error)}
        torch.cuda.synchronize()


@contextlib.contextmanager
def reason_of_all(rows: dict[str, Row]) -> Iterator[None]:
    """What the inputs or the GPU raise here is the reason of all rows that are not finished by then."""
    try:
        yield
    except Exception as error:
        for row in rows.values():
            if row["status"] == "failed":
                row["reason"] = row["reason"] or timer.first_line(error)


@dataclass(frozen=True)
class Entrant:
    """A provider that is ready for a problem, and was right once."""

    ready: Ready
    inputs: Sequence[Inputs]  # of a call, for each copy
    checked: Result  # of the first


def compete(
    rows: dict[str, Row],
    rounds: int,
    enter: Callable[[str], tuple[Ready, Sequence[Inputs]]],
    verify: Callable[..., Row],
    speeds: Callable[..., Row],
    *,
    same_bits: bool,
    eager: bool = True,
    **timing_options: float,
) -> None:
    """Fills in the rows of the providers of a problem.

    Args:
        enter: name -> what is ready for the problem, and the arguments of a call for each copy of the inputs; it may raise.
        verify: (name, result of the first copy, when in words) -> what the check says, as a part of the row.
        speeds: (name, timing, eager or None) -> the speeds, as a part of the row.
        same_bits: whether each result of a provider has to be equal bit by bit to its first.
        eager: whether back-to-back calls are timed, too.
        timing_options: of timer.time_interleaved.
    """
    entrants: dict[str, Entrant] = {}
    for name, row in rows.items():
        with reasons(row):
            ready, inputs = enter(name)
            result = ready.launch(*inputs[0])
            row |= verify(name, result, "")
            if row["correct"]:
                entrants[name] = Entrant(ready, inputs, tuple(x if x is None else x.clone() for x in result))

    timings = time_all(entrants, rows, rounds, **timing_options)
    right: dict[str, timer.Timing] = {}
    for name, entrant in entrants.items():
        row, timing = rows[name], timings[name]
        with reasons(row):
            repeated = timer.time_eager(partial(entrant.ready.call, *entrant.inputs[0])) if eager else None
            for result in (timing.result, *([repeated.result] if repeated else ())):
                if row["correct"] and not same(result, entrant.checked):
                    row |= verify(name, result, "when timed, ")
                    if row["correct"] and same_bits:
                        row |= {
                            "correct": False,
                            "status": "wrong",
                            "reason": "when timed, other bits than at first",
                        }
            if row["correct"]:
                row |= speeds(name, timing, repeated)
                right[name] = timing
    for name, timing in right.items():
        for other in right.keys() - {name}:
            ratio = timer.speedup(timing, right[other])
            rows[name][f"ratio_vs_{other}"] = ratio.median
            rows[name][f"ratio_range_vs_{other}"] = [ratio.p25, ratio.p75]


def time_all(
    entrants: dict[str, Entrant], rows: dict[str, Row], rounds: int, **timing_options: float
) -> dict[str, timer.Timing]:
    """All in turn. One that fails loses its place among the entrants, and the others are timed anew."""
    while entrants:
        calls = {name: [partial(e.ready.launch, *copy) for copy in e.inputs] for name, e in entrants.items()}
        try:
            return timer.time_interleaved(calls, rounds, **timing_options)
        except timer.CallFailed as failure:
            del entrants[failure.name]
            with reasons(rows[failure.name]):
                raise failure.__cause__ from None
    return {}


def same(a: Result, b: Result) -> bool:
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def speeds(shape: Shape, direction: str, timing: timer.Timing, eager: timer.Eager | None) -> Row:
    """Of a row that is right; a time of eager calls that were not timed is None."""
    return {
        "status": "ok",
        "ms": timing.median_ms,
        "p25": timing.p25,
        "p75": timing.p75,
        "timer": timing.timer,
        "launches": timing.launches,
        "rounds": sum(sample is not None for sample in timing.samples),
        "eager_ms": eager and eager.ms,
        "host_us": eager and eager.host_us,
        "tflops": counts.flops(shape, direction) / timing.median_ms / 1e9,
        "gbps": counts.traffic(shape, direction) / timing.median_ms / 1e6,
        "intensity": counts.intensity(shape, direction),
    }


def spread(count: int, every: int) -> list[int]:
    """So many of a number of heads, evenly, with the first and the last of them; all where there are no more."""
    return list(range(every)) if count >= every else [i * (every - 1) // (count - 1) for i in range(count)]


def finite(x: float) -> float | None:
    """JSON has no inf."""
    return x if math.isfinite(x) else None


def found(verdicts: Sequence[Verdict | BwdVerdict], when: str, unchecked: Iterable[torch.Tensor] = ()) -> Row:
    """What verdicts say, as a part of a row.

    Args:
        when: in words, what was checked.
        unchecked: in which nothing may be NaN or inf.
    """
    row: Row = {
        "correct": all(verdict.ok for verdict in verdicts),
        "max_err_ratio": finite(max(verdict.max_err_ratio for verdict in verdicts)),
    }
    if not row["correct"]:
        wrong = "; ".join(verdict.text for verdict in verdicts if not verdict.ok)
        row |= {"status": "wrong", "reason": when + wrong}
    elif not all(bool(x.isfinite().all()) for x in unchecked):
        row |= {
            "correct": False,
            "status": "wrong",
            "reason": f"{when}all is right; others have NaN or inf",
        }
    return row
