"""The roofline picture of `tl-attention explain --plot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tl_attention.explain import measured, model
from tl_attention.explain.report import TITLES
from tl_attention.explain.work import Work
from tl_attention.gpus import COMPARED, Gpu

# Units of an SM -> color of the speed that each would allow alone
UNIT_ROOFS = {"exponential unit": "C3", "shared memory": "C4", "adding dq in L2": "C5"}


def draw(works: Sequence[Work], dtype: str, path: Path) -> None:
    """Write a picture with the roofs of the GPUs, and for each work the predicted and the measured point.

    Raises:
        ModuleNotFoundError: no matplotlib.
        OSError, ValueError: a file that cannot be written, or of an unknown kind.
    """
    from matplotlib.figure import Figure

    gpu = works[0].gpu
    points = [_points(work, dtype) for work in works]
    reach = [x for work_points in points for x, *_ in work_points.values()]
    left, right = min([0.5, *reach]) / 2, max([4000.0, *reach]) * 2
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axis = figure.subplots()
    _draw_roofs(axis, gpu, left, right)
    if len(works) == 1:
        _draw_units(axis, works[0], right)
    for number, (work, work_points) in enumerate(zip(works, points, strict=True)):
        _draw_points(axis, work, work_points, f"C{number}")
    lowest = min([gpu.tb_s * left, *(y for work_points in points for _, y in work_points.values())])
    axis.set(
        xscale="log",
        yscale="log",
        xlim=(left, right),
        ylim=(lowest / 2, 2 * max(other.tflops for other in (gpu, *COMPARED))),
    )
    axis.set(
        xlabel="FLOP per byte of HBM, each input and output once", ylabel="TFLOPS", title=f"Roofline, {dtype}"
    )
    axis.grid(alpha=0.3, which="both")
    figure.legend(loc="outside lower center", fontsize=8, ncols=1 if len(works) < 4 else 2)
    figure.savefig(path, dpi=150)


def _draw_roofs(axis: Any, gpu: Gpu, left: float, right: float) -> None:
    """Draw the roof of the GPU, and in gray those of the GPUs that it is compared with."""
    styles = [{"color": "0.55", "ls": dashes, "lw": 1.2} for dashes in ("--", "-.", ":", (0, (5, 5)))]
    others = [other for other in COMPARED if other != gpu]
    roofs = [*zip(others, styles, strict=False), (gpu, {"color": "black", "lw": 2.5})]
    for one, style in roofs:
        unit = " FLOP/B" if one is gpu else ""
        label = f"{one.name}, ridge {one.ridge:.0f}{unit}"
        axis.plot([left, one.ridge, right], [one.tb_s * left, one.tflops, one.tflops], label=label, **style)


def _draw_units(axis: Any, work: Work, right: float) -> None:
    """Draw the speed that a unit of an SM would allow alone, where it is below that of the tensor cores."""
    for unit, seconds in model.estimate(work).units.items():
        if unit in UNIT_ROOFS and seconds * 0.95e12 * work.gpu.tflops > work.flops:
            roof = work.flops / seconds / 1e12
            label = f"{unit} alone: {roof:.0f} TFLOPS"
            axis.plot([work.gpu.ridge, right], [roof, roof], color=UNIT_ROOFS[unit], lw=1, label=label)


def _draw_points(axis: Any, work: Work, points: Mapping[str, tuple[float, float]], color: str) -> None:
    """Draw the predicted point of a work as a ring, the measured one as a star."""
    for kind, (x, y) in points.items():
        star = kind == "measured"
        label = (
            f"{TITLES[work.direction]} {work.shape}, {'measured' if star else 'predicted'}: {y:.4g} TFLOPS"
        )
        style = {"ms": 14, "mfc": None} if star else {"ms": 8, "mfc": "none"}
        axis.plot([x], [y], "*" if star else "o", label=label, color=color, zorder=3, **style)


def _points(work: Work, dtype: str) -> dict[str, tuple[float, float]]:
    """predicted and measured -> (FLOP per byte, TFLOPS)."""
    intensity = work.flops / work.least_bytes
    points = {"predicted": (intensity, model.estimate(work).tflops(work.flops))}
    for one in measured.find(work.shape, work.direction, dtype, work.gpu.name)[:1]:
        points["measured"] = (intensity, work.flops / one.ms / 1e9)
    return points
