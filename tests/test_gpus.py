"""Facts of GPUs."""

from __future__ import annotations

import math
import types

import pytest
import torch

from tl_attention.config import gpus
from tl_attention.problem import target
from tl_attention.testing import counts


@pytest.mark.parametrize("gpu", gpus.GPUS.values(), ids=lambda gpu: gpu.name)
def test_tflops_follow_from_the_clock(gpu):
    per_clock = math.log2(1e3 * gpu.tflops / gpu.sms / gpu.boost_ghz)  # and SM: a power of two
    assert per_clock == pytest.approx(round(per_clock), abs=0.03)
    assert gpu.boost_ghz <= gpu.max_ghz


def test_facts_agree_with_those_of_the_kernels():
    assert gpus.H200.name == target.DEFAULT_GPU and gpus.H200.sms == target.H200_SMS
    peak = gpus.H200.sms * 4096 * gpus.H200.max_ghz / 1e3
    assert peak == pytest.approx(counts.PEAK_TFLOPS, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("h100 pcie", "NVIDIA H100 PCIe"),
        ("NVIDIA H200", "NVIDIA H200"),
        ("nvidia h20", "NVIDIA H20"),
        ("gh200", "NVIDIA GH200 480GB"),
        ("Some GPU", "Some GPU"),
    ],
)
def test_full_name(words, name):
    assert gpus.full_name(words) == name


@pytest.mark.parametrize("words", ["A100", "NVIDIA A10", "H300", ""])
def test_resolve_refuses_what_is_no_hopper(words):
    with pytest.raises(ValueError, match=r"gpu: expected a Hopper GPU, one of NVIDIA H100.*; got"):
        gpus.resolve(words)


@pytest.fixture
def device(monkeypatch):
    """A GPU of this machine, by name and SM count."""

    def install(name: str, sms: int, capability: tuple[int, int] = (9, 0)) -> None:
        major, minor = capability
        properties = types.SimpleNamespace(name=name, multi_processor_count=sms, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return install


@pytest.mark.parametrize(("sms", "near"), [(132, 132), (60, 78), (120, 114), (90, 78)])
def test_unknown_hopper_goes_by_its_sm_count(sms, near, device):
    device("NVIDIA H100 80GB HBM3 MIG 3g.40gb", sms)
    gpu = gpus.find("NVIDIA H100 80GB HBM3 MIG 3g.40gb")
    assert gpu.sms == sms
    order = gpus.nearest_names(gpu.name, gpus.GPUS)
    assert gpus.GPUS[order[0]].sms == near and len(order) == len(gpus.GPUS)
    assert gpus.resolve(gpu.name) == gpu


def test_unknown_gpu_of_another_kind_is_not_found(device):
    device("NVIDIA B200", 148, (10, 0))
    assert gpus.find("NVIDIA B200") is None
    assert gpus.nearest_names("NVIDIA B200", ["NVIDIA H200"]) == []
    assert gpus.find("NVIDIA H500") is None


def test_equal_sm_counts_are_ordered_by_bandwidth():
    order = gpus.nearest_names("NVIDIA GH200 480GB", ["NVIDIA H20", "NVIDIA H200", "NVIDIA H100 80GB HBM3"])
    assert order == ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H20"]
