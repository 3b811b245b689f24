"""Attention over several ranks, compared with the reference on one: CPU processes with gloo; two GPUs with NCCL."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import distributed_cases as cases
import pytest
import torch
from distributed_ranks import Processes

from tl_attention.compilation import building
from tl_attention.config import configs
from tl_attention.config.kernel_configs import KernelConfig
from tl_attention.problem.attn_problem import BUCKETS, FEW_BUCKET, SPLIT_BUCKET, AttnProblem

pytestmark = [pytest.mark.filterwarnings("ignore:.*CPU"), pytest.mark.xdist_group("distributed")]
RANDOM = 200


@pytest.fixture(scope="module")
def processes():
    """Processes by the size of their group."""
    found = {world: Processes(world) for world in (2, 3, 4)}
    yield found
    for one in found.values():
        one.end()


def merged(results: list[dict[str, str]]) -> dict[str, list[str]]:
    """Texts of what is wrong on any rank, by case."""
    return {name: [one.get(name, "") for one in results] for name in sorted(set().union(*results))}


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("world", [3, 4])
def test_distributed_equals_one_process(processes, world):
    assert not merged(processes[world].run(cases.run_cases, cases.CASES))


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("first", range(4))
def test_distributed_random_problems_equal_one_process(processes, first):
    problems = [cases.random_case(seed, "cpu") for seed in range(first, RANDOM, 4)]
    assert not merged(processes[2].run(cases.run_cases, problems))


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("world", [2, 3])
def test_distributed_max_logits_are_the_largest_scores(processes, world):
    assert not merged(processes[world].run(cases.run_cases, cases.CASES, "cpu", cases.compare_max_logits))


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_distributed_max_logits_leave_the_other_results_alone(processes, method):
    for holds in processes[2].run(cases.ask_for_max_logits, method):
        assert len(holds) == 9 and all(holds.values()), holds


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_distributed_deterministic_runs_have_equal_bits(processes, method):
    case = cases.Case("bits", method, options=cases.MASKS["causal"])
    assert all(processes[2].run(cases.repeat, case))


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_distributed_refuses_gradients_of_gradients_and_of_several_samples(processes, method):
    second = "NotImplementedError: attention: the gradient of a gradient is not supported"
    expected = {
        "read": "True",
        "backward": second,
        "grad": second,
        "batched": "NotImplementedError: attention: expected gradients of one sample",
    }
    for found in processes[2].run(cases.differentiate_otherwise, method):
        assert sorted(found) == sorted(expected)
        for name, text in found.items():
            assert text.startswith(expected[name]), f"{name}: {text}"


@pytest.mark.parametrize("max_logits", [False, True])
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_distributed_backward_runs_under_compiled_autograd(processes, method, max_logits):
    assert processes[2].run(cases.compile_autograd, method, max_logits) == ["True", "True"]


def test_distributed_unshard_takes_any_dtype_and_no_columns(processes):
    assert processes[2].run(cases.unshard_dtypes) == [[], []]


EXPECTED = {
    "causal": r"ValueError: causal, window_size: expected the same on all ranks .*\(True, .* on rank 0; \(False, .* on rank 1$",
    "dtype": r"TypeError: k, v: expected the dtype of q|ValueError: group: rank 1 refused its arguments with TypeError: k, v",
    "rows": r"ValueError: cu_seqlens, seqlen: expected the same .* \(0, 8\) on rank 0; \(0, 6\) on rank 1",
    "documents": r"ValueError: cu_seqlens, seqlen: expected the same .* \(0, 4, 8\) on rank 0; \(0, 3, 8\) on rank 1",
    "cross": "ValueError: k, v: expected the tokens of q, 4, got 3",
    "max_logits": "ValueError: return_max_logits: expected the same on all ranks .* True on rank 0; False on rank 1$",
    "no bool": "TypeError: return_max_logits: expected a bool, got 1",
    "layout": "ValueError: layout: expected the same on all ranks",
    "gradient": "ValueError: q, k, v, learnable_sink .any needs a gradient.: .* True on rank 0; False on rank 1",
    **dict.fromkeys(("jvp", "dual", "vmap"), r"NotImplementedError: attention: expected a call outside torch.func \("),
    "groups": "True",
    "strides": "True",
    "mesh": "ValueError: group: expected a mesh of one dimension, got one of 2",
    "alone": "True",
    "member": "TypeError|ValueError",
}  # fmt: skip


def test_distributed_ranks_that_disagree_get_errors(processes):
    for rank, found in enumerate(processes[2].run(cases.disagree)):
        assert sorted(found) == sorted(EXPECTED)
        for name, text in found.items():
            assert re.match(EXPECTED[name], text), f"rank {rank}, {name}: {text}"


@pytest.mark.parametrize("always", [False, True])
def test_distributed_ranks_that_differ_later_get_errors(processes, always):
    expected = {
        "known": r"ValueError: causal, window_size: expected the same on all ranks of the group, got \(True, .* on rank 0; \(False, ",
        "one knows": r"ValueError: softcap: expected the same on all ranks of the group, got 0.0 on rank 0; 2.0 on rank 1$",
        "backward": r"ValueError: group: expected all ranks .* got its backward on rank 0; its forward on rank 1 at call \d+$",
        "right": "no error$",
    }  # fmt: skip
    for found in processes[2].run(cases.differ_later, always):
        for name, text in found.items():
            assert re.match(expected[name], text), f"{name}: {text}"


def test_distributed_ranks_that_do_not_wait_find_differences_at_the_next_call(processes):
    first, last = processes[2].run(cases.differ_without_waiting)
    differs = "ValueError: causal, window_size: expected the same on all ranks"
    assert [text.startswith(differs) for text in first] == [False, False, True]
    assert [text.startswith(differs) for text in last] == [False, True, False]


def test_distributed_ranks_without_common_memory_compare_new_calls(processes):
    for found in processes[2].run(cases.differ_on_machines):
        assert [found.pop(name) for name in ("right", "forgotten", "later")] == ["no error"] * 3
        assert re.match(
            r"ValueError: group: expected all ranks to make the same calls, .* got \d+ with digest \w+ on rank 0; \d+ with digest",
            found.pop("earlier"),
        )
        for name, text in found.items():
            assert re.match(EXPECTED[name], text), f"{name}: {text}"


def test_distributed_rank_without_room_is_an_error_of_all(processes):
    for text in processes[2].run(cases.lack_memory):
        assert re.match("OSError: group: on rank 1 no room for .*; make some, or set TMPDIR$", text), text


def test_distributed_call_that_a_rank_does_not_make_ends_with_the_timeout(processes):
    first, last = processes[2].run(cases.miss_a_call)
    assert last == "no call"
    assert re.match("(RuntimeError|DistBackendError|TimeoutError): .*[Tt]im(ed |e)out", first, re.DOTALL), (
        first
    )


def test_distributed_rank_that_dies_is_an_error_of_the_others(processes):
    with pytest.raises(AssertionError, match=r"(?s)rank 0: .*RuntimeError: .*rank 1: it died"):
        processes[2].run(cases.lose_a_rank)


EXAMPLES = Path(__file__).parents[1] / "examples"
LONG_CONTEXT = [
    "--seqlen",
    "256",
    "--steps",
    "2",
    "--layers",
    "1",
    "--heads",
    "2",
    "--heads-kv",
    "1",
    "--documents",
    "3",
]
QK_CLIP = ["--steps", "4", "--threshold", "3"]


def printed_by_two_processes(script: str, arguments: list[str]) -> str:
    """Lines of an example that torchrun starts on two processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, script, *arguments], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_distributed_example_trains_alike_on_any_number_of_processes(processes):
    example = str(EXAMPLES / "long_context.py")
    expected = cases.train_example(example, LONG_CONTEXT)
    assert len(expected) == 2
    for losses in processes[2].run(cases.train_example, example, [*LONG_CONTEXT, "--method", "ring"]):
        assert losses == pytest.approx(expected, abs=2e-3)
    printed = printed_by_two_processes(example, LONG_CONTEXT)
    assert [float(loss) for loss in re.findall(r"loss (\S+)", printed)] == pytest.approx(expected, abs=2e-3)


def test_distributed_qk_clip_example_clips_alike_on_any_number_of_processes(monkeypatch, capsys):
    script = str(EXAMPLES / "qk_clip.py")
    printed = printed_by_two_processes(script, QK_CLIP)
    monkeypatch.setattr("sys.argv", [script, *QK_CLIP])
    runpy.run_path(script, run_name="__main__")
    alone, together = (
        [float(score) for scores in re.findall(r"largest scores (.*)", text) for score in scores.split(", ")]
        for text in (capsys.readouterr().out, printed)
    )
    assert len(alone) == 8 and together == pytest.approx(alone, abs=0.03)


def kernels_for_gpus(gpu: str) -> list[tuple[AttnProblem, KernelConfig]]:
    """Kernels of the tests on GPUs, at d128."""
    found, short = [], ("1k", SPLIT_BUCKET)
    for causal, names, buckets, directions in (
        *((causal, varlen, (*BUCKETS[:2], SPLIT_BUCKET), ("fwd", "bwd")) for causal in (True, False) for varlen in ((), ("varlen",))),
        *((causal, (), (FEW_BUCKET,), ("fwd",)) for causal in (True, False)),
        *((causal, (), ("1k",), ("bwd_det",)) for causal in (True, False)),
        (False, ("window",), (*BUCKETS[:2], SPLIT_BUCKET), ("fwd", "bwd")),
        *((True, names, short, ("fwd", "bwd")) for names in (("softcap", "sink"), ("alibi",), ("dropout",), ("dropout", "varlen"))),
        *((False, ("window", name, "placed"), short, ("fwd", "bwd")) for name in ("alibi", "dropout")),
    ):  # fmt: skip
        for direction in directions:
            asked = tuple(x for x in names if direction == "fwd" or x != "sink")
            problem = AttnProblem.of("bfloat16", 128, 128, causal, direction, asked)
            for bucket in buckets if direction == "fwd" else set(buckets) - {SPLIT_BUCKET}:
                config, _ = configs.pick_config(problem.served_as, bucket, gpu, direction)
                found += config.kernels(problem)
                if direction == "fwd" and bucket not in (SPLIT_BUCKET, FEW_BUCKET):
                    found += config.storing_max.kernels(problem)
                if direction != "fwd":  # of the ring
                    found += config.kernels(replace(problem, options=(*asked, "partial")))
                if (
                    direction == "fwd" and bucket not in (SPLIT_BUCKET, FEW_BUCKET) and "sink" not in names
                ):  # of the ring
                    added = replace(problem, options=(*asked, "added"))
                    found += replace(config, hold_max=False).kernels(added)
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def gpus():
    """Processes on two GPUs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    kernels = kernels_for_gpus(torch.cuda.get_device_name())
    assert not {key: error for key, error in building.build_all(kernels).items() if error}
    found = Processes(2, "cuda", seconds=25)
    yield found
    found.end()


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_distributed_deterministic_runs_have_equal_bits_on_gpus(gpus, method):
    case = cases.Case(
        "bits", method, total=1000, heads=(8, 2), head_dims=(128, 128), options=cases.MASKS["causal"]
    )
    assert all(gpus.run(cases.repeat, case, "cuda"))


@pytest.mark.gpu
def test_distributed_context_parallel_of_torch_runs_on_the_kernels(gpus):
    for errors in gpus.run(cases.train_by_torch):
        assert len(errors) == 3 * 4
        assert max(errors) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("max_logits", [False, True])
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_distributed_calls_can_be_captured_in_a_graph(gpus, method, max_logits):
    case = cases.Case(
        "graph",
        method,
        total=2048,
        batch=1,
        heads=(8, 2),
        head_dims=(128, 128),
        options=cases.MASKS["causal"],
        max_logits=max_logits,
    )
    assert max(gpus.run(cases.capture, case)) < 1e-3


@pytest.mark.gpu
def test_distributed_random_problems_equal_one_gpu(gpus):
    for seed in range(RANDOM):  # one at a time, so that an error names it
        problem = cases.random_case(seed, "cuda")
        assert not merged(gpus.run(cases.run_cases, [problem], "cuda")), problem


@pytest.mark.gpu
def test_distributed_max_logits_are_the_largest_scores_on_gpus(gpus):
    for seed in range(RANDOM, RANDOM + 60):  # one at a time, so that an error names it
        problem = cases.random_case(seed, "cuda")
        wrong = merged(gpus.run(cases.run_cases, [problem], "cuda", cases.compare_max_logits))
        assert not wrong, f"{problem}: {wrong}"
