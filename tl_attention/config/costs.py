"""Costs of launches on a GPU: the numbers by which CTAs share tiles and heads form groups. configs/costs.toml says what each is."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from tl_attention.config import gpus
from tl_attention.config.configs import cost_tables
from tl_attention.problem.target import DEFAULT_GPU, H200_SMS


@dataclass(frozen=True)
class ForwardCosts:
    """CTAs that split the keys of a tile, in steps."""

    tile: float
    launch: float
    partial: float
    most_tiles: float


@dataclass(frozen=True)
class StreamKCosts:
    """The schedule stream-K of a forward, in steps."""

    partial: float
    least_steps: int
    least_gain: float
    begin: float
    second: float
    whole: float
    most_waves: int
    causal_tile: int
    running_max: float


@dataclass(frozen=True)
class BackwardCosts:
    """CTAs that share a key tile, in queries of one head."""

    tile: float
    launch: float
    partial: float
    most_sharers: int
    tail: float
    drift: float
    near_bytes: int
    least_unseen: int


@dataclass(frozen=True)
class GroupCosts:
    """Heads whose tiles are computed side by side."""

    bytes: int
    tiles: float
    least_keys: int
    short_tiles: int
    short_bytes: int
    short_fill: float
    packed_fill: float


@dataclass(frozen=True)
class RoundingCosts:
    """Sums of dq that exist at a time, in waves of key tiles."""

    causal: float
    full: float
    group: float
    many: float
    many_group: float
    ring: int


@dataclass(frozen=True)
class TermCosts:
    """Kernels that make the bf16 terms of fp32 inputs."""

    first_tiles: float


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs on a GPU with `sms` SMs. Hashed by identity, as cached functions take it: costs_of() makes one per GPU."""

    sms: int
    slack: float
    forward: ForwardCosts
    stream_k: StreamKCosts
    backward: BackwardCosts
    groups: GroupCosts
    rounding: RoundingCosts
    terms: TermCosts

    def fewest(self, times: Mapping[int, float]) -> int:
        """The first number of sharers whose time is within `slack` of the shortest. times: by number, the fewest sharers first."""
        limit = self.slack * min(times.values())
        return next(number for number, time in times.items() if time <= limit)


SECTIONS = {
    "forward": ForwardCosts,
    "stream_k": StreamKCosts,
    "backward": BackwardCosts,
    "groups": GroupCosts,
    "rounding": RoundingCosts,
    "terms": TermCosts,
}


@functools.cache
def costs_of(gpu_name: str = DEFAULT_GPU, sms: int = H200_SMS) -> Costs:
    """Costs on a GPU, by its name in torch and its number of SMs: those of the nearest GPU with a table."""
    tables = cost_tables()
    nearest = (gpu_name, *gpus.nearest_names(gpu_name, tables), DEFAULT_GPU)
    table = next(tables[name] for name in nearest if name in tables)
    sections = {name: section(**table[name]) for name, section in SECTIONS.items()}
    return Costs(sms, table["slack"], **sections)
