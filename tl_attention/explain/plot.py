"""The roofline picture of `tl-attention explain --plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
    others = [other for other in COMPARED if other != gpu]
    for other, dashes in zip(others, ("--", "-.", ":", (0, (5, 5))), strict=False):
        _roof(
            axis,
            other,
            left,
            right,
            color="0.55",
            ls=dashes,
            lw=1.2,
            label=f"{other.name}, ridge {other.ridge:.0f}",
        )
    _roof(axis, gpu, left, right, color="black", lw=2.5, label=f"{gpu.name}, ridge {gpu.ridge:.0f} FLOP/B")
    if len(works) == 1:
        flops = works[0].flops
        for unit, seconds in model.estimate(works[0]).units.items():
            if unit in UNIT_ROOFS and seconds * 0.95e12 * gpu.tflops > flops:
                roof = flops / seconds / 1e12
                axis.plot(
                    [gpu.ridge, right],
                    [roof, roof],
                    color=UNIT_ROOFS[unit],
                    lw=1,
                    label=f"{unit} alone: {roof:.0f} TFLOPS",
                )
    for number, (work, work_points) in enumerate(zip(works, points, strict=True)):
        for kind, (x, y) in work_points.items():
            marker, label = ("*", "measured") if kind == "measured" else ("o", "predicted")
            style = {
                "color": f"C{number}",
                "ms": 14 if marker == "*" else 8,
                "mfc": "none" if marker == "o" else None,
            }
            title = f"{TITLES[work.direction]} {work.shape}, {label}: {y:.4g} TFLOPS"
            axis.plot([x], [y], marker, label=title, zorder=3, **style)
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


def _roof(axis: object, gpu: Gpu, left: float, right: float, **style: object) -> None:
    axis.plot([left, gpu.ridge, right], [gpu.tb_s * left, gpu.tflops, gpu.tflops], **style)


def _points(work: Work, dtype: str) -> dict[str, tuple[float, float]]:
    """predicted and measured -> (FLOP per byte, TFLOPS)."""
    intensity = work.flops / work.least_bytes
    points = {"predicted": (intensity, model.estimate(work).tflops(work.flops))}
    for one in measured.find(work.shape, work.direction, dtype, work.gpu.name)[:1]:
        points["measured"] = (intensity, work.flops / one.ms / 1e9)
    return points
