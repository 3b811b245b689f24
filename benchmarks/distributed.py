"""Attention over several GPUs beside one: forward and backward by method, and torch's context_parallel on tl_attention's kernels.

    python benchmarks/distributed.py --out benchmarks/results/nvidia_h200     # all GPUs of the machine
    python benchmarks/distributed.py --device cpu --lengths 128 --heads 4 2 --head-dim 16    # a trial by gloo

A time is that of the slowest rank, the median of ROUNDS rows of calls without a wait between them; the methods and one GPU take turns at
the rows. Host time is the shortest of the rows in which the host starts as few calls as fit into the queue of the GPU. Efficiency is the
time of one GPU on the whole problem, measured in the same process, over ranks times this time. Results are compared with one GPU's before
they are timed. A row "in a graph" replays a CUDA graph of the forward and backward. Writes distributed.json with the link, clocks and
versions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from ranks import STORED, table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from tl_attention import distributed, flash_attn_func, flash_attn_varlen_func
from tl_attention.integrations import torch_backend
from tl_attention.testing import environment

METHODS = ("gather", "ring")
ROUNDS = 5
ROW_SECONDS = 0.1  # of calls without a wait between them
HOST_CALLS = 5  # of a row for the host
GRAPH_TOKENS = 32768  # longer sequences are not bound by the host
MAX_ERROR = 0.01  # relative, in the 2-norm; bf16 against bf16
MEDIAN_DOCUMENT, SIGMA = 1500, 1.3  # log-normal lengths
Tensors = dict[str, torch.Tensor]
Run = Callable[[], list[torch.Tensor]]  # returns out, dq, dk, dv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 65536])
    parser.add_argument(
        "--documents", type=int, nargs="+", default=[65536], help="tokens of packed documents"
    )
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="of queries and of keys")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="folder for distributed.json")
    asked = parser.parse_args()
    gpus = torch.cuda.device_count()
    ranks = asked.ranks or (gpus if asked.device == "cuda" else 2)
    if asked.device == "cuda" and not 0 < ranks <= gpus:
        parser.error(
            f"--ranks: expected a GPU per rank, of which there are {gpus}; --device cpu tries it by gloo"
        )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (ranks, f"{folder}/store", asked), nprocs=ranks)


def run_rank(rank: int, ranks: int, store: str, asked: argparse.Namespace) -> None:
    """All measurements in one process; rank 0 prints and writes."""
    backend = "gloo"
    if asked.device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    rendezvous = {"init_method": f"file://{store}", "rank": rank, "world_size": ranks}
    dist.init_process_group(backend, timeout=timedelta(seconds=300), **rendezvous)
    rows = []
    for total in asked.lengths:
        rows += measure_sequence(total, asked)
    for total in asked.documents:
        rows += measure_documents(total, asked)
    if rank == 0:
        facts = environment.facts("python benchmarks/distributed.py") | link_facts(asked.device)
        print(table(rows, ranks))
        if asked.out:
            found = {"ranks": ranks, "environment": facts, "rows": rows}
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / STORED).write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


def link_facts(device: str) -> dict[str, str]:
    """Connection of the GPUs, and NCCL."""
    if device == "cpu":
        return {"link": "gloo"}
    topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout.split("\n")
    first = next((line.split() for line in topology if line.startswith("GPU0")), ["", "", "unknown"])
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "link": first[2],
        "nccl": nccl,
        "multicast": "off" if os.environ.get("NCCL_NVLS_ENABLE") == "0" else "on",
    }


def make_tensors(total: int, asked: argparse.Namespace) -> Tensors:
    """q, k, v, dout [1, total, heads, head_dim], the same on all ranks."""
    generator = torch.Generator(asked.device).manual_seed(1)
    heads = dict(
        zip(("q", "k", "v", "dout"), (asked.heads[0], *[asked.heads[1]] * 2, asked.heads[0]), strict=True)
    )
    return {
        name: torch.randn(
            1, total, n, asked.head_dim, generator=generator, device=asked.device, dtype=torch.bfloat16
        )
        for name, n in heads.items()
    }


def measure_sequence(total: int, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one causal sequence."""
    whole = make_tensors(total, asked)
    shards = {name: distributed.shard(x, dim=1) for name, x in whole.items()}

    def alone() -> list[torch.Tensor]:
        return differentiate(lambda q, k, v: flash_attn_func(q, k, v, causal=True), whole)

    expected = [distributed.shard(x, dim=1) for x in alone()]

    def run(method: str) -> Run:
        return lambda: differentiate(
            lambda q, k, v: distributed.attention(q, k, v, causal=True, method=method), shards
        )

    name = f"causal, {total} tokens"
    runs = [(method, run(method), expected) for method in METHODS]
    if asked.device == "cuda" and total <= GRAPH_TOKENS:
        runs += [(f"{method}, in a graph", captured(run(method)), expected) for method in METHODS]
    rows = measure(name, runs, alone)
    if asked.device == "cuda":
        rows += measure_torch(name, whole, expected, alone)
    return rows


def measure_torch(
    name: str, whole: Tensors, expected: list[torch.Tensor], alone: Run
) -> list[dict[str, Any]]:
    """The row of torch's context_parallel, whose load balancing has the layout "zigzag"."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    tensors = [whole[key].transpose(1, 2).contiguous() for key in ("q", "k", "v", "dout")]
    with (
        torch_backend.register(),
        context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 4, no_restore_buffers=set(tensors)),
    ):
        shards = dict(zip(("q", "k", "v", "dout"), tensors, strict=True))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        found = [x.transpose(1, 2) for x in expected]
        run = "torch context_parallel", lambda: differentiate(attend, shards), found
        return measure(name, [run], alone)


def measure_documents(total: int, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of packed documents with log-normal lengths."""
    generator, ends = random.Random(0), [0]
    median = MEDIAN_DOCUMENT if total > 4 * MEDIAN_DOCUMENT else total / 8
    while ends[-1] < total:
        ends.append(min(total, ends[-1] + max(1, int(generator.lognormvariate(math.log(median), SIGMA)))))
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=asked.device)
    longest = int(cu_seqlens.diff().max())
    whole = {name: x[0] for name, x in make_tensors(total, asked).items()}

    def attend_whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)

    def alone() -> list[torch.Tensor]:
        return differentiate(attend_whole, whole)

    everything, runs = alone(), []
    name = f"causal, {len(ends) - 1} documents, {total} tokens, the longest {longest}"
    balanced = distributed.make_layout(cu_seqlens=ends, causal=True)
    for method, layout in (*((method, balanced) for method in METHODS), ("gather", "zigzag")):
        place = {"cu_seqlens": ends, "layout": layout}
        shards = {key: distributed.shard(x, **place) for key, x in whole.items()}
        expected = [distributed.shard(x, **place) for x in everything]

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, method: str = method, place: dict = place
        ) -> torch.Tensor:
            return distributed.attention(q, k, v, causal=True, method=method, **place)

        words = method if layout == "zigzag" else f"{method}, balanced"
        words = f"{words}, zigzag" if layout == "zigzag" else words
        runs.append((words, lambda run=attend, x=shards: differentiate(run, x), expected))
    return measure(name, runs, alone)


def differentiate(attend: Callable[..., torch.Tensor], x: Tensors) -> list[torch.Tensor]:
    """out, dq, dk, dv."""
    leaves = [x[name].detach().requires_grad_() for name in ("q", "k", "v")]
    out = attend(*leaves)
    out.backward(x["dout"])
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def captured(run: Run) -> Run:
    """A replay of the CUDA graph of a call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = run()

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return found

    return replay


def measure(
    problem: str, runs: list[tuple[str, Run, list[torch.Tensor]]], alone: Run
) -> list[dict[str, Any]]:
    """The rows of some methods: no time where a result differs from one GPU's.

    Args:
        runs: name of a method, its call, the result of one GPU.
    """
    errors = [error_of(run(), expected) for _, run, expected in runs]
    whole, *times = seconds([alone, *(run for _, run, _ in runs)])
    found = []
    for (method, run, _), error, time_ in zip(runs, errors, times, strict=True):
        one = {
            "problem": problem,
            "method": method,
            "error": float(f"{error:.2g}"),
            "one_gpu_ms": 1e3 * whole,
        }
        if error < MAX_ERROR:
            one |= {"status": "ok", "ms": 1e3 * time_, "host_ms": 1e3 * host_seconds(run)}
            one["efficiency"] = whole / (dist.get_world_size() * time_)
        else:
            one["status"] = "wrong"
        found.append(one)
    return found


def error_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest relative difference of a tensor in the 2-norm, on any rank."""
    pairs = zip(found, expected, strict=True)
    error = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
    return slowest(error, expected[0])


def seconds(runs: list[Run]) -> list[float]:
    """Seconds per call of the slowest rank, for each of some calls."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    like, counts, found = torch.zeros((), device=device), [], []
    for run in runs:
        for _ in range(2):
            run()
        wait()
        begin = time.perf_counter()
        run()
        wait()
        count = round(ROW_SECONDS / slowest(time.perf_counter() - begin, like)) if device == "cuda" else 1
        counts.append(max(1, count))
        found.append([])
    for _ in range(ROUNDS):
        for run, count, times in zip(runs, counts, found, strict=True):
            dist.barrier()
            wait()
            begin = time.perf_counter()
            for _ in range(count):
                run()
            wait()
            times.append(slowest((time.perf_counter() - begin) / count, like))
    return [statistics.median(times) for times in found]


def host_seconds(run: Callable[[], object]) -> float:
    """Seconds per call in which the host starts the work, on the slowest rank."""
    found, device = [], "cuda" if dist.get_backend() == "nccl" else "cpu"
    for _ in range(ROUNDS):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            run()
        found.append((time.perf_counter() - begin) / HOST_CALLS)
    return slowest(min(found), torch.zeros((), device=device))


def slowest(value: float, like: torch.Tensor) -> float:
    """Largest value of all ranks."""
    whole = torch.tensor(value, dtype=torch.float64, device=like.device)
    dist.all_reduce(whole, dist.ReduceOp.MAX)
    return float(whole)


if __name__ == "__main__":
    main()
