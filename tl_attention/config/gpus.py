"""Facts of Hopper GPUs by name: SMs, clocks, rates, memory; and which GPUs are nearest to another one.

Sources:
    Hopper   NVIDIA H100 Tensor Core GPU Architecture (whitepaper, v1.04), table 3: SMs, both boost clocks. Datasheets of H100,
             H100 NVL, H200, H200 NVL, GH200: dense bf16 TFLOPS (half of the printed ones, which count sparsity), memory.
    H20      NVIDIA's figures as reported by resellers, as there is no public datasheet: 148 TFLOPS, 4.0 TB/s, 78 SMs.
    per clock CUDA C++ Programming Guide, throughput of native arithmetic instructions: 16 exponentials per SM for 9.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

EXP_PER_CLOCK = 16  # per SM
HOPPER = (9, 0)


@dataclass(frozen=True)
class Gpu:
    """Rates and sizes that bound a kernel on a GPU."""

    name: str  # as torch reports it
    sms: int
    tflops: float  # dense bf16 or fp16, as NVIDIA states it, at boost_ghz
    boost_ghz: float  # of the tensor cores
    tb_s: float  # memory bandwidth
    max_ghz: float  # clock of short work without tensor cores


H200 = Gpu("NVIDIA H200", 132, 989, 1.83, 4.8, 1.98)
H100 = Gpu("NVIDIA H100 80GB HBM3", 132, 989, 1.83, 3.35, 1.98)
GPUS = {
    gpu.name: gpu
    for gpu in (
        H100,
        H200,
        Gpu("NVIDIA H100 PCIe", 114, 756, 1.62, 2.0, 1.755),
        Gpu("NVIDIA H100 NVL", 132, 835, 1.545, 3.9, 1.785),
        Gpu("NVIDIA H200 NVL", 132, 835, 1.545, 4.8, 1.785),
        Gpu("NVIDIA H800", 132, 989, 1.83, 3.35, 1.98),
        Gpu("NVIDIA H20", 78, 148, 1.83, 4.0, 1.98),
        Gpu("NVIDIA GH200 480GB", 132, 989, 1.83, 4.0, 1.98),
        Gpu("NVIDIA GH200 144G HBM3e", 132, 989, 1.83, 4.9, 1.98),
    )
}
# Alias -> name in torch; names without the word NVIDIA are aliases, too
ALIASES = {
    "h100": H100.name,
    "h100 sxm": H100.name,
    "h200 sxm": H200.name,
    "gh200": "NVIDIA GH200 480GB",
    "gh200 hbm3e": "NVIDIA GH200 144G HBM3e",
}


def full_name(words: str) -> str:
    """The name in torch for a name or alias in any case, with or without NVIDIA; others as they are."""
    plain = words.strip().lower().removeprefix("nvidia ")
    by_word = {name.lower().removeprefix("nvidia "): name for name in GPUS} | ALIASES
    return by_word.get(plain, words)


def find(name: str) -> Gpu | None:
    """Facts of a GPU. For an unknown Hopper GPU of this machine: those of the nearest one, scaled to its SM count. Else None."""
    if gpu := GPUS.get(name):
        return gpu
    if not (sms := _visible_sms(name)):
        return None
    like = by_distance(sms, None, GPUS.values())[0]
    share = sms / like.sms
    return Gpu(name, sms, like.tflops * share, like.boost_ghz, like.tb_s, like.max_ghz)


def _visible_sms(name: str) -> int | None:
    """SM count of this machine's Hopper GPU with this name in torch; None if there is none."""
    if not torch.cuda.is_available():
        return None
    for device in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(device)
        if properties.name == name and (properties.major, properties.minor) == HOPPER:
            return properties.multi_processor_count
    return None


def by_distance(sms: int, tb_s: float | None, among: Iterable[Gpu]) -> list[Gpu]:
    """GPUs ordered by difference in SM count, then by difference in memory bandwidth (None: unknown)."""

    def distance(gpu: Gpu) -> tuple[int, float]:
        return abs(gpu.sms - sms), abs(math.log(gpu.tb_s / tb_s)) if tb_s else 0.0

    return sorted(among, key=distance)


def nearest_names(name: str, names: Iterable[str]) -> list[str]:
    """The known GPUs among `names`, the nearest to the Hopper GPU `name` first. Empty if `name` is unknown."""
    own = find(name)
    if not own:
        return []
    known = [GPUS[other] for other in names if other in GPUS and other != name]
    return [gpu.name for gpu in by_distance(own.sms, own.tb_s if name in GPUS else None, known)]


def resolve(words: str) -> Gpu:
    """The Hopper GPU with a name or alias.

    Raises:
        ValueError: an unknown GPU, or one that the kernels do not run on.
    """
    gpu = find(full_name(words))
    if gpu:
        return gpu
    known = ", ".join(GPUS)
    raise ValueError(f"gpu: expected a Hopper GPU, one of {known} or one of this machine; got {words!r}")
