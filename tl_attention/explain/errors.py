"""The model against measured results: its error per file of a GPU's results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tl_attention.explain import measured, model, work
from tl_attention.gpus import Gpu
from tl_attention.problem import DTYPES
from tl_attention.target import gpu_slug

CLOSE = 0.15


@dataclass(frozen=True)
class Errors:
    """Predicted over measured times of a file, by name of the shape. Rows whose inputs were in L2 are left out: the model reads HBM."""

    path: Path
    ratios: dict[str, float]

    @property
    def median(self) -> float:
        """Median of the distances from 1."""
        return statistics.median(abs(ratio - 1) for ratio in self.ratios.values())

    @property
    def close(self) -> float:
        """Share of rows within CLOSE."""
        return statistics.mean(abs(ratio - 1) <= CLOSE for ratio in self.ratios.values())


def of_gpu(gpu: Gpu) -> list[Errors]:
    """Errors per file of a GPU's results.

    Raises:
        ValueError: there are none.
    """
    folder = measured.results_dir()
    if folder is None:
        raise ValueError(
            "--check: expected benchmarks/results, which an installed package lacks; clone the repository"
        )
    paths = sorted((folder / gpu_slug(gpu.name)).glob("*.jsonl"))
    if not paths:
        raise ValueError(f"--check: expected results in {folder / gpu_slug(gpu.name)}, got none")
    return [Errors(path, _ratios(path, gpu)) for path in paths]


def _ratios(path: Path, gpu: Gpu) -> dict[str, float]:
    names = {dtype.short: name for name, dtype in DTYPES.items()}
    found = {}
    for one in measured.read(path):
        if one.direction in ("fwd", "bwd", "bwd_det", "decode") and not one.warm:
            call = work.of_call(one.shape, one.direction, names[one.dtype], gpu)
            name = f"{one.name} {one.dtype}" if DTYPES[names[one.dtype]].parts else one.name
            found[name] = 1e3 * model.estimate(call).seconds / one.ms
    return found


def table(gpu: Gpu) -> str:
    """Lines of text, one per file."""
    return f"model against {gpu.name}, predicted / measured:\n" + "\n".join(
        map(_line, _with_rows(of_gpu(gpu)))
    )


def _with_rows(found: Sequence[Errors]) -> list[Errors]:
    return [errors for errors in found if errors.ratios]


def _line(errors: Errors) -> str:
    low, high = (choose(errors.ratios, key=errors.ratios.__getitem__) for choose in (min, max))
    return (
        f"  {errors.path.name:18} {len(errors.ratios):4} rows, median error {100 * errors.median:.1f} %, "
        f"{100 * errors.close:.0f} % of rows within {100 * CLOSE:.0f} %, "
        f"worst {errors.ratios[low]:.2f} ({low}) and {errors.ratios[high]:.2f} ({high})"
    )
