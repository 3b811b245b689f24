"""Schedules on Hopper GPUs with other SM counts: the heuristics of splits by themselves, and whole calls by the model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tl_attention import gpus
from tl_attention.explain import model, work
from tl_attention.launch.bwd_passes import WAVES, key_parts
from tl_attention.launch.splits import COMBINE_STEPS, CTA_STEPS, PART_STEPS, key_splits
from tl_attention.problem import DECODE, MAX_SPLITS
from tl_attention.testing.shapes import Shape

PAGE = Path(__file__).parents[1] / "docs" / "tuning.md"
# An H200 with the SM counts of H20, H100 PCIe, H100 and H200
SIMULATED = {sms: replace(gpus.H200, sms=sms) for sms in (78, 114, 132)}
SM_COUNTS = (16, 60, *SIMULATED, 144)  # and slices of a GPU (MIG), and all of a GH100
STEPS = (1, 2, 3, 5, 8, 16, 33, 64, 128, 257, 512, 1024, 4096)
CALLS = (
    ("fwd", "1,8,1,128,16384,128,128,causal"),
    ("fwd", "1,8,1,512,65536,128,128,causal"),
    ("fwd", "1,8,1,1024,131072,128,128,causal"),
    ("fwd", "1,32,8,512,32768,128,128,causal"),
    ("fwd", "1,32,8,4096,4096,128,128,causal"),
    ("fwd", "4,16,16,4096,4096,128,128,full"),
    ("bwd", "1,8,8,1024,1024,128,128,causal"),
    ("bwd", "1,32,8,4096,4096,128,128,causal"),
    ("decode", "1,8,1,1,8192,128,128,full"),
    ("decode", "1,32,8,1,131072,128,128,full"),
    ("decode", "32,32,8,1,8192,128,128,full"),
)


def split_time(tiles: int, steps: int, sms: int, splits: int) -> float:
    """The cost model of key_splits, in steps."""
    combine = COMBINE_STEPS + splits * PART_STEPS if splits > 1 else 0
    return -(-tiles * splits // sms) * (-(-steps // splits) + CTA_STEPS) + combine


def efficiency(tiles: int, steps: int, sms: int, splits: int) -> float:
    """Share of the SMs' time that is spent on key blocks, if all waves are as long as the longest CTA."""
    return tiles * steps / (-(-tiles * splits // sms) * sms * -(-steps // splits))


@pytest.mark.parametrize("sms", SM_COUNTS)
def test_key_splits_stay_sane(sms):
    for tiles in range(1, sms + 20):
        before = 1
        for steps in STEPS:
            splits = key_splits(tiles, steps, sms)
            assert before - 1 <= splits <= MAX_SPLITS, (
                "but for rounding, more key blocks never take fewer splits"
            )
            assert splits == 1 or steps // splits >= 2
            assert tiles * splits <= 8 * sms, "the workspace of partial outputs stays small"
            assert split_time(tiles, steps, sms, splits) <= split_time(tiles, steps, sms, 1)
            if splits > 1:
                assert efficiency(tiles, steps, sms, splits) > efficiency(tiles, steps, sms, 1)
            before = splits


@pytest.mark.parametrize("sms", SM_COUNTS)
@pytest.mark.parametrize(("least_steps", "bound"), [(128, 0.75), (512, 0.85)])
def test_key_splits_keep_the_sms_busy(sms, least_steps, bound):
    """Long keys and an eighth of a wave of tiles or more; up to the number of tiles from which none is split."""
    for tiles in range(max(sms // 8, 1), int(0.8 * sms)):
        for steps in (steps for steps in STEPS if steps >= least_steps):
            assert efficiency(tiles, steps, sms, key_splits(tiles, steps, sms)) >= bound, (tiles, steps)


def test_more_sms_never_take_longer():
    for tiles in range(1, 200):
        for steps in STEPS:
            times = [split_time(tiles, steps, sms, key_splits(tiles, steps, sms)) for sms in SM_COUNTS]
            assert all(fewer >= more / 1.04 for fewer, more in itertools.pairwise(times))


@pytest.mark.parametrize("sms", SM_COUNTS)
@pytest.mark.parametrize("heads_per_kv", [1, 3, 4, 8, 48])
def test_key_parts_fill_the_sms_and_no_more(sms, heads_per_kv):
    for batch_heads in (1, 2, 8, 32):
        for blocks in (1, 2, 7, 32, 512):
            parts, per_part = key_parts(1, batch_heads * heads_per_kv, batch_heads, blocks, sms)
            assert 1 <= parts <= heads_per_kv and (parts - 1) * per_part < heads_per_kv <= parts * per_part
            ctas = parts * blocks * batch_heads
            assert parts == 1 or ctas < 2 * WAVES * sms or blocks * batch_heads >= WAVES * sms
            assert parts == heads_per_kv or 2 * ctas >= WAVES * sms


@pytest.mark.parametrize("gpu", SIMULATED.values(), ids=lambda gpu: f"{gpu.sms} SMs")
@pytest.mark.parametrize("lengths", [100, 1000, 8192, 131072])
def test_decode_divides_keys_evenly_on_every_sm_count(gpu, lengths):
    for batch, heads_kv in ((1, 1), (1, 8), (7, 3), (128, 8)):
        shape = Shape.parse(f"{batch},{8 * heads_kv},{heads_kv},1,{lengths},128,128,full")
        found = work.of_call(shape, DECODE, "bfloat16", gpu)
        (kernel,) = found.kernels
        assert kernel.count <= gpu.sms * kernel.ctas_per_sm
        steps = [steps for steps, _ in kernel.tiles]
        assert max(steps) - min(steps) <= 1
        assert kernel.steps == batch * heads_kv * -(-lengths // kernel.config.block_N)


def simulated_table() -> str:
    """In Markdown, CTAs per SM and the share of the time in which an SM has work, for CALLS on GPUs of SIMULATED."""
    titles = " | ".join(f"{sms} SMs" for sms in SIMULATED)
    lines = [f"| pass | problem | {titles} |", "|---" * (2 + len(SIMULATED)) + "|"]
    for direction, text in CALLS:
        cells = []
        for gpu in SIMULATED.values():
            found = work.of_call(Shape.parse(text), direction, "bfloat16", gpu)
            time = model.estimate(found).kernels[0]
            ctas = found.kernels[0].count / gpu.sms
            cells.append(f"{found.splits}, {ctas:.2f}, {100 * time.busy:.0f} %")
        lines.append(f"| {direction} | {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_simulated_table_in_the_docs_is_current():
    between = PAGE.read_text().split("<!-- sm counts -->")[1].split("<!-- /sm counts -->")[0]
    assert between.strip() == simulated_table(), "docs/tuning.md: expected what simulated_table() returns"
