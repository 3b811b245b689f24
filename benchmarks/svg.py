"""Parts of a plot as SVG: text that depends on the values alone, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rows import OURS

WIDTH = 880
LEFT = 48
COLORS = {  # provider -> color; also the order of a legend
    OURS: "#d62728",
    "high": "#ff9896",
    "option": "#ff9896",
    "fa3": "#1f77b4",
    "fa4": "#2ca02c",
    "cudnn": "#9467bd",
    "fa2": "#7f7f7f",
    "flex": "#ff7f0e",
    "efficient": "#8c564b",
    "flashinfer": "#17becf",
    "flashinfer-xqa": "#9edae5",
    "flex-fa4": "#2ca02c",
    "math": "#7f7f7f",
    "flex-ieee": "#ff7f0e",
    "flex-tf32": "#9467bd",
    "triton": "#bcbd22",
    "naive": "#e377c2",
}
OTHER = "#555555"  # color of any other provider
GRID, SHADE = "#dddddd", "#f4f4f4"
NAMES = {"fa2": "FlashAttention-2", "fa3": "FlashAttention-3", "fa4": "FlashAttention-4", "cudnn": "cuDNN"}
LETTER = 7  # width of one, about
STEPS = 4  # grid lines of an axis, about


def document(height: int, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">'
    return (
        "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"
    )


def text(x: float, y: float, words: str, anchor: str = "start", extra: str = "") -> str:
    place = f'x="{_short(x)}" y="{_short(y)}"'
    anchor = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f"<text {place}{anchor}{extra}>{escape(words)}</text>"


def line(x1: float, y1: float, x2: float, y2: float, color: str = GRID, width: float = 1) -> str:
    ends = " ".join(
        f'{key}="{_short(value)}"'
        for key, value in zip(("x1", "y1", "x2", "y2"), (x1, y1, x2, y2), strict=True)
    )
    return f'<line {ends} stroke="{color}"{"" if width == 1 else f" stroke-width={_quoted(width)}"}/>'


def box(x: float, y: float, width: float, height: float, color: str) -> str:
    sizes = f'width="{_short(width)}" height="{_short(height)}"'
    return f'<rect x="{_short(x)}" y="{_short(y)}" {sizes} fill="{color}"/>'


def dot(x: float, y: float, color: str, radius: float = 3) -> str:
    return f'<circle cx="{_short(x)}" cy="{_short(y)}" r="{radius}" fill="{color}"/>'


def title(x: float, y: float, words: str) -> str:
    return text(x, y, words, extra=' font-weight="bold"')


def color_of(name: str) -> str:
    return COLORS.get(name, OTHER)


def in_order(names: Iterable[str]) -> list[str]:
    """Providers in the order of COLORS, others last."""
    order = [*COLORS]
    return sorted(dict.fromkeys(names), key=lambda name: order.index(name) if name in order else len(order))


def width_of(name: str) -> float:
    return 3 if name == OURS else 1.6


def legend(titles: Mapping[str, str]) -> list[str]:
    """A line and a name per provider, in one row at the top."""
    parts, x = [], LEFT
    for name, words in titles.items():
        parts += [line(x, 18, x + 22, 18, color_of(name), width_of(name)), text(x + 28, 22, words)]
        x += 52 + LETTER * len(words)
    return parts


@dataclass(frozen=True)
class Panel:
    """Lines over lengths, at a place of a plot."""

    left: float
    top: float
    width: float
    height: float

    def draw(
        self, words: str, series: Mapping[str, Mapping[int, float]], most: float, step: float, below: str = ""
    ) -> list[str]:
        """Grid, axis labels and a line per provider.

        Args:
            series: provider -> length -> value.
            most: value at the top of the panel.
            step: value per grid line.
            below: name of the axis of lengths.
        """
        lengths = sorted({length for points in series.values() for length in points})
        bottom = self.top + self.height
        x_of = {n: self.left + self.width * i / max(len(lengths) - 1, 1) for i, n in enumerate(lengths)}
        parts = [title(self.left, self.top - 12, words)]
        for value in ticks(most, step):
            y = bottom - self.height * value / most
            parts += [
                line(self.left, y, self.left + self.width, y),
                text(self.left - 6, y + 4, f"{value:g}", "end"),
            ]
        parts += [text(x_of[n], bottom + 18, length_name(n), "middle") for n in lengths]
        if below:
            parts.append(text(self.left + self.width / 2, bottom + 36, below, "middle"))
        for name, points in series.items():
            places = [(x_of[n], bottom - self.height * value / most) for n, value in sorted(points.items())]
            path = " ".join(f"{_short(x)},{_short(y)}" for x, y in places)
            stroke = f'stroke="{color_of(name)}" stroke-width="{width_of(name)}"'
            parts.append(f'<polyline points="{path}" fill="none" {stroke}/>')
            parts += [dot(x, y, color_of(name)) for x, y in places]
        return parts


def ticks(most: float, step: float) -> Sequence[float]:
    return [step * i for i in range(round(most / step) + 1)]


def axis_of(values: Iterable[float]) -> tuple[float, float]:
    """(value at the end, value per grid line) of an axis from 0 that holds the values: 1, 2 or 5 times a power of ten per line."""
    largest = max(values)
    power = 10 ** math.floor(math.log10(largest / STEPS))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * STEPS >= largest * 0.75)
    return (largest // step + 1) * step, step


def length_name(length: int) -> str:
    """A length in k where it is a whole number of them."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _short(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


def _quoted(x: float) -> str:
    return f'"{x}"'
