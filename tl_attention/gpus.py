"""Facts of GPUs by name: SMs, clocks, rates per clock, memory, power; and which GPUs are nearest to another one.

Sources:
    Hopper   NVIDIA H100 Tensor Core GPU Architecture (whitepaper, v1.04), table 3: SMs, both boost clocks, L2. Datasheets of H100,
             H100 NVL, H200, H200 NVL, GH200: dense bf16 TFLOPS (half of the printed ones, which count sparsity), memory, power. L2
             of GPUs with six memory stacks: 60 MB, from torch.cuda.get_device_properties on an H200.
    H20      NVIDIA's figures as reported by resellers, as there is no public datasheet: 148 TFLOPS, 4.0 TB/s, 78 SMs, 400 W.
    Ampere   NVIDIA A100 Tensor Core GPU Architecture (whitepaper), table 4; datasheets of A100 80GB SXM and A10.
    per clock CUDA C++ Programming Guide, throughput of native arithmetic instructions: 16 exponentials per SM for 8.0, 8.6 and 9.0;
             32 banks x 4 bytes of shared memory. Tensor FLOPs: TFLOPS over SMs and boost clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

EXP_PER_CLOCK = 16  # per SM
SMEM_BYTES_PER_CLOCK = 128  # per SM
HOPPER = (9, 0)


@dataclass(frozen=True)
class Gpu:
    """Rates and sizes that bound a kernel on a GPU."""

    name: str  # as torch reports it
    sms: int
    tflops: float  # dense bf16 or fp16, as NVIDIA states it, at boost_ghz
    boost_ghz: float  # of the tensor cores
    tb_s: float  # memory bandwidth
    l2_mb: int
    watts: int  # power limit
    max_ghz: float = 0.0  # clock of short work without tensor cores
    capability: tuple[int, int] = HOPPER

    @property
    def is_hopper(self) -> bool:
        return self.capability == HOPPER

    @property
    def flops_per_clock(self) -> int:
        """Tensor FLOPs per clock and SM, a power of two."""
        return 1 << round(math.log2(1e3 * self.tflops / self.sms / self.boost_ghz))

    @property
    def ridge(self) -> float:
        """FLOPs per byte of memory at which tensor cores and memory take equally long."""
        return self.tflops / self.tb_s


H200 = Gpu("NVIDIA H200", 132, 989, 1.83, 4.8, 60, 700, 1.98)
H100 = Gpu("NVIDIA H100 80GB HBM3", 132, 989, 1.83, 3.35, 50, 700, 1.98)
A100 = Gpu("NVIDIA A100-SXM4-80GB", 108, 312, 1.41, 2.039, 40, 400, 1.41, (8, 0))
A10 = Gpu("NVIDIA A10", 72, 125, 1.695, 0.6, 6, 150, 1.695, (8, 6))
COMPARED = (H100, H200, A100, A10)
GPUS = {
    gpu.name: gpu
    for gpu in (
        *COMPARED,
        Gpu("NVIDIA H100 PCIe", 114, 756, 1.62, 2.0, 50, 350, 1.755),
        Gpu("NVIDIA H100 NVL", 132, 835, 1.545, 3.9, 60, 400, 1.785),
        Gpu("NVIDIA H200 NVL", 132, 835, 1.545, 4.8, 60, 600, 1.785),
        Gpu("NVIDIA H800", 132, 989, 1.83, 3.35, 50, 700, 1.98),
        Gpu("NVIDIA H20", 78, 148, 1.83, 4.0, 60, 400, 1.98),
        Gpu("NVIDIA GH200 480GB", 132, 989, 1.83, 4.0, 60, 700, 1.98),
        Gpu("NVIDIA GH200 144G HBM3e", 132, 989, 1.83, 4.9, 60, 700, 1.98),
    )
}
# Alias -> name in torch; names without the word NVIDIA are aliases, too
ALIASES = {
    "h100": H100.name,
    "h100 sxm": H100.name,
    "h200 sxm": H200.name,
    "gh200": "NVIDIA GH200 480GB",
    "gh200 hbm3e": "NVIDIA GH200 144G HBM3e",
    "a100": A100.name,
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
    like = by_distance(sms, None, [gpu for gpu in GPUS.values() if gpu.is_hopper])[0]
    share = sms / like.sms
    return Gpu(
        name, sms, like.tflops * share, like.boost_ghz, like.tb_s, like.l2_mb, like.watts, like.max_ghz
    )


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
    """The known GPUs among `names`, the nearest to the Hopper GPU `name` first. Empty if `name` is unknown or no Hopper GPU."""
    own = find(name)
    if not own or not own.is_hopper:
        return []
    known = [GPUS[other] for other in names if other in GPUS and other != name]
    return [gpu.name for gpu in by_distance(own.sms, own.tb_s if name in GPUS else None, known)]


def resolve(words: str) -> Gpu:
    """The Hopper GPU with a name or alias.

    Raises:
        ValueError: an unknown GPU, or one that the kernels do not run on.
    """
    gpu = find(full_name(words))
    if gpu and gpu.is_hopper:
        return gpu
    known = ", ".join(gpu.name for gpu in GPUS.values() if gpu.is_hopper)
    raise ValueError(f"gpu: expected a Hopper GPU, one of {known} or one of this machine; got {words!r}")
