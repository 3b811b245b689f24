"""Attention over several ranks: CPU processes with gloo, compared with the reference on one."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from tl_attention import distributed, flash_attn_func, flash_attn_varlen_func, torch_backend
from tl_attention.testing import numeric

pytestmark = pytest.mark.filterwarnings("ignore:.*CPU")


@dataclass(frozen=True)
class Case:
    """A call on all ranks. documents: cumulative lengths; None: a batch of two sequences of `total` tokens."""

    name: str
    method: str = "gather"
    layout: str = "zigzag"
    total: int = 37
    documents: tuple[int, ...] | None = None
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (16, 8)
    options: dict[str, Any] = field(default_factory=dict)
    slopes: int = 0  # dimensions
    sink: bool = False
    dropout: float = 0.0


DOCUMENTS = (0, 1, 1, 14, 30, 37)
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 3)},
    "sliding": {"causal": True, "window_size": (6, -1)},
    "ahead": {"window_size": (-1, 4)},
}
CASES = [
    *(
        Case(f"{method}-{layout}-{mask}-{kind}", method, layout, documents=documents, options=options)
        for method in ("gather", "ring", "ulysses")
        for layout in ("zigzag", "contiguous")
        for mask, options in MASKS.items()
        for kind, documents in (("dense", None), ("documents", DOCUMENTS))
        if mask in ("causal", "window") or (method != "ulysses" and layout == "zigzag")
    ),
    *(
        Case(f"{method}-balanced-{mask}", method, "balanced", documents=(0, 3, 28, 33, 90, 97), options=MASKS[mask])
        for method in ("gather", "ring")
        for mask in ("causal", "window")
    ),
    *(
        Case(f"{method}-sink-softcap-{kind}", method, options={"softcap": 2.0, **MASKS["causal"]}, sink=True, documents=documents)
        for method in ("gather", "ring", "ulysses")
        for kind, documents in (("dense", None), ("documents", DOCUMENTS))
    ),
    Case("gather-alibi", options=MASKS["causal"], slopes=1),
    Case("gather-alibi-batch", options=MASKS["sliding"], slopes=2),
    Case("gather-alibi-documents", options=MASKS["causal"], slopes=2, documents=DOCUMENTS),
    Case("ulysses-alibi-full", "ulysses", slopes=2),
    Case("ulysses-dropout", "ulysses", options=MASKS["causal"], dropout=0.25),
    Case("ulysses-dropout-alibi-documents", "ulysses", documents=DOCUMENTS, slopes=2, dropout=0.25),
    Case("ulysses-copies-of-key-heads", "ulysses", heads=(4, 1), options=MASKS["causal"]),
    Case("gather-few-tokens", total=3, options=MASKS["causal"]),
    Case("ring-few-tokens", "ring", total=3, options=MASKS["causal"]),
    Case("ulysses-few-tokens", "ulysses", total=3, options=MASKS["causal"]),
    Case("auto", "auto", options=MASKS["causal"]),
    Case("auto-documents", "auto", documents=DOCUMENTS, options=MASKS["window"]),
]  # fmt: skip


def inputs(case: Case, device: str = "cpu") -> dict[str, torch.Tensor | None]:
    """Whole tensors, the same on all ranks."""
    generator = torch.Generator().manual_seed(random.Random(case.name).randrange(2**31))
    (heads, heads_kv), (head_dim, head_dim_v) = case.heads, case.head_dims
    tokens = (2, case.total) if case.documents is None else (case.documents[-1],)
    sizes = {"q": (heads, head_dim), "k": (heads_kv, head_dim), "v": (heads_kv, head_dim_v), "dout": (heads, head_dim_v)}  # fmt: skip
    found = {
        name: torch.randn(*tokens, *size, generator=generator, dtype=torch.bfloat16)
        for name, size in sizes.items()
    }
    lse = (heads, tokens[0]) if len(tokens) == 1 else (2, heads, case.total)
    found["dlse"] = torch.randn(lse, generator=generator)
    batch = 2 if case.documents is None else len(case.documents) - 1
    slopes = (heads,) if case.slopes == 1 else (batch, heads)
    found["slopes"] = torch.rand(slopes, generator=generator) if case.slopes else None
    found["sink"] = torch.randn(heads, generator=generator) if case.sink else None
    return {name: None if x is None else x.to(device) for name, x in found.items()}


def run_whole(case: Case, x: dict[str, torch.Tensor | None], state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """out, lse and gradients of one process."""
    options = dict(case.options, alibi_slopes=x["slopes"], return_attn_probs=True)
    leaves = [x[name].clone().requires_grad_() for name in "qkv"]
    sink = None if x["sink"] is None else x["sink"].clone().requires_grad_()
    options |= {"learnable_sink": sink, "dropout_p": case.dropout, "rng_state": state}
    if case.documents is None:
        out, lse, _ = flash_attn_func(*leaves, **options)
    else:
        cu = torch.tensor(case.documents, dtype=torch.int32, device=x["q"].device)
        most = int(cu.diff().max())
        out, lse, _ = flash_attn_varlen_func(*leaves, cu, cu, most, most, **options)
    torch.autograd.backward((out, lse), (x["dout"], x["dlse"]))
    return out.detach(), lse.detach(), *(leaf.grad for leaf in leaves), None if sink is None else sink.grad


def compare(case: Case, world: int, device: str = "cpu") -> None:
    """Run a case on all ranks; raise where out, lse or a gradient is wrong."""
    if case.method == "ulysses" and case.heads[0] % world:
        expect_refusal(case)
        return
    x, dim = inputs(case, device), 0 if case.documents else 1
    state = torch.tensor([7, 11], device=device)
    layout = case.layout
    if layout == "balanced":
        layout = distributed.make_layout(cu_seqlens=case.documents, **case.options)
    place = {"dim": dim, "layout": layout}
    if case.documents is None:
        placed = {"layout": layout, "seqlen": case.total}
    else:
        placed = {"layout": layout, "cu_seqlens": torch.tensor(case.documents)}
    leaves = [distributed.shard(x[name], **place).requires_grad_() for name in "qkv"]
    sink = None if x["sink"] is None else x["sink"].clone().requires_grad_()
    options = dict(case.options, alibi_slopes=x["slopes"], learnable_sink=sink, dropout_p=case.dropout)
    options |= {"rng_state": state if case.dropout else None, "return_attn_probs": True}
    out, lse, _ = distributed.attention(*leaves, **options, **placed, method=case.method)
    lse_dim = 1 if case.documents else 2
    dlse = distributed.shard(x["dlse"], dim=lse_dim, layout=layout)
    torch.autograd.backward((out, lse), (distributed.shard(x["dout"], **place), dlse))
    total = case.total if case.documents is None else case.documents[-1]
    joined = [
        distributed.unshard(tensor.detach(), dim=d, seqlen=total, layout=layout)
        for tensor, d in ((out, dim), (lse, lse_dim), *((leaf.grad, dim) for leaf in leaves))
    ]
    if sink is not None:
        dist.all_reduce(sink.grad)
        joined.append(sink.grad)
    check(case, x, state, joined)


def check(case: Case, x: dict[str, Any], state: torch.Tensor, found: list[torch.Tensor]) -> None:
    """Compare joined results with the reference by the error rule; with dropout, with one process."""
    if case.dropout:
        for name, actual, expected in zip(
            ("out", "lse", "dq", "dk", "dv"), found, run_whole(case, x, state), strict=False
        ):
            torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2, msg=lambda text, name=name: f"{name}: {text}")  # fmt: skip
        return
    options = {name: value for name, value in case.options.items() if name == "softcap"}
    window = case.options.get("window_size", (-1, -1))
    options |= {"causal": case.options.get("causal", False), "window": window, "alibi_slopes": x["slopes"], "sink": x["sink"]}  # fmt: skip
    if case.documents is not None:
        cu = torch.tensor(case.documents, dtype=torch.int32, device=x["q"].device)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    qkv = [x[name] for name in "qkv"]
    forward = numeric.check_fwd(found[0], found[1], *qkv, **options)
    assert forward.ok, forward.text
    backward = numeric.check_bwd(tuple(found[2:]), x["dout"], *qkv, dlse=x["dlse"], **options)
    assert backward.ok, backward.text


def expect_refusal(case: Case) -> None:
    x = inputs(case)
    dim = 0 if case.documents else 1
    qkv = [distributed.shard(x[name], dim=dim) for name in "qkv"]
    placed = {"seqlen": case.total} if case.documents is None else {"cu_seqlens": case.documents}
    with pytest.raises(NotImplementedError, match="heads that .* ranks can share"):
        distributed.attention(*qkv, **placed, method="ulysses")


def start(rank: int, world: int, store: str, device: str = "cpu") -> None:
    """Join the process group of a test."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    backend = "gloo" if device == "cpu" else "nccl"
    if device != "cpu":
        torch.cuda.set_device(rank)
    rendezvous = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    dist.init_process_group(backend, timeout=timedelta(seconds=120), **rendezvous)


def worker(rank: int, world: int, store: str, names: list[str], device: str, results: Any) -> None:
    """Run cases in one of the processes; a case's traceback, or None, goes to results."""
    start(rank, world, store, device)
    by_name = {case.name: case for case in CASES}
    for name in names:
        try:
            compare(by_name[name], world, device)
            results.put((name, rank, None))
        except Exception:
            results.put((name, rank, traceback.format_exc()))
            os._exit(0)  # the other ranks time out, and the cases that follow are missing
    dist.barrier()
    dist.destroy_process_group()


def run_workers(world: int, store: str, target: Any, *arguments: Any) -> list[tuple]:
    """Collect the results that `world` processes put into a queue."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    processes = mp.spawn(target, (world, store, *arguments, results), nprocs=world, join=False)
    found = []
    while not processes.join(timeout=0.05):
        while not results.empty():
            found.append(results.get())
    while not results.empty():
        found.append(results.get())
    return found


@pytest.mark.parametrize("world", [3, 4])
def test_distributed_equals_one_process(world, tmp_path):
    """All cases in one set of processes, whose start takes longer than a case."""
    names = [case.name for case in CASES]
    found = run_workers(world, str(tmp_path / "store"), worker, names, "cpu")
    errors = [f"{name}, rank {rank}: {text}" for name, rank, text in found if text]
    assert not errors, "\n".join(errors)
    assert sorted(found) == sorted((name, rank, None) for name in names for rank in range(world))


def raised(call: Any, *arguments: Any, **options: Any) -> str:
    """Type and text of the error of a call."""
    try:
        call(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def check_agreement(rank: int, world: int, store: str, results: Any) -> None:
    """Make calls that ranks disagree on, then right ones, on groups of all kinds."""
    start(rank, world, store)
    first = rank == 0
    x = torch.randn(1, 4, 4, 16, dtype=torch.bfloat16)
    attend = distributed.attention
    results.put((rank, "causal", raised(attend, x, x, x, causal=first)))
    results.put((rank, "dtype", raised(attend, x, x.half() if rank == 1 else x, x)))
    results.put((rank, "rows", raised(attend, *[x if first else x[:, :3]] * 3)))
    results.put((rank, "documents", raised(attend, *[x[0]] * 3, cu_seqlens=[0, 3 + first, world * 4])))
    results.put((rank, "cross", raised(attend, x, *[x[:, :3]] * 2)))
    results.put((rank, "layout", raised(attend, x, x, x, layout="zigzag" if first else "contiguous")))
    results.put((rank, "gradient", raised(attend, x.clone().requires_grad_(first), x, x)))
    results.put((rank, "dropout", raised(attend, x, x, x, dropout_p=0.5, method="gather")))
    results.put((rank, "alibi", raised(attend, x, x, x, alibi_slopes=torch.ones(4), method="ring")))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    outs = [attend(x, x, x, group, causal=True) for group in (None, dist.group.WORLD, mesh, mesh["cp"])]
    results.put((rank, "groups", str(all(torch.equal(out, outs[0]) for out in outs))))
    square = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp"))
    results.put((rank, "mesh", raised(attend, x, x, x, square)))
    alone = attend(x, x, x, square["dp"], causal=True)
    results.put((rank, "alone", str(torch.equal(alone, flash_attn_func(x, x, x, causal=True)))))
    others = dist.new_group([0])
    results.put((rank, "member", "ValueError" if first else raised(attend, x, x, x, others)))
    dist.barrier()
    dist.destroy_process_group()


EXPECTED = {
    "causal": r"ValueError: causal, window_size: expected the same on all ranks .*\(True, .* on rank 0; \(False, .* on rank 1$",
    "dtype": r"TypeError: k, v: expected the dtype of q|ValueError: group: rank 1 refused its arguments with TypeError: k, v",
    "rows": r"ValueError: cu_seqlens, seqlen: expected the same .* \(0, 8\) on rank 0; \(0, 6\) on rank 1",
    "documents": r"ValueError: cu_seqlens, seqlen: expected the same .* \(0, 4, 8\) on rank 0; \(0, 3, 8\) on rank 1",
    "cross": "ValueError: k, v: expected the tokens of q, 4, got 3",
    "layout": "ValueError: layout: expected the same on all ranks",
    "gradient": "ValueError: q, k, v, learnable_sink .any needs a gradient.: .* True on rank 0; False on rank 1",
    "dropout": "NotImplementedError: dropout_p: expected 0 with method='gather'",
    "alibi": "NotImplementedError: alibi_slopes: expected None with method='ring'",
    "groups": "True",
    "mesh": "ValueError: group: expected a mesh of one dimension, got one of 2",
    "alone": "True",
    "member": "TypeError|ValueError",
}  # fmt: skip


def test_distributed_ranks_that_disagree_get_errors(tmp_path):
    found = run_workers(2, str(tmp_path / "store"), check_agreement)
    assert sorted((rank, name) for rank, name, _ in found) == [(rank, name) for rank in (0, 1) for name in sorted(EXPECTED)]  # fmt: skip
    for rank, name, text in found:
        assert re.match(EXPECTED[name], text), f"rank {rank}, {name}: {text}"


ARGUMENTS = [
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


@pytest.mark.parametrize("method", ["auto", "ring"])
def test_distributed_example_trains_alike_on_any_number_of_processes(method):
    example = Path(__file__).parents[1] / "examples" / "long_context.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    losses = []
    for command in ([sys.executable], torchrun):
        asked = [*command, str(example), *ARGUMENTS, "--method", method]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(asked, capture_output=True, text=True, env=environment, timeout=240)
        assert done.returncode == 0, done.stderr
        losses.append([float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


@pytest.mark.gpu
def test_distributed_equals_one_gpu(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    masks = "causal-dense", "causal-documents", "full-dense", "window-dense"
    names = [f"{method}-zigzag-{mask}" for method in ("gather", "ring") for mask in masks]
    names += ["gather-balanced-causal", "ulysses-zigzag-causal-dense", "ulysses-zigzag-causal-documents"]
    found = run_workers(2, str(tmp_path / "store"), worker, names, "cuda")
    assert not [text for *_, text in found if text]
    assert len(found) == 2 * len(names)


def run_context_parallel(rank: int, world: int, store: str, results: Any) -> None:
    """Train with torch's context_parallel on tl_attention's kernels for some steps; errors relative to one GPU go to results."""
    start(rank, world, store, "cuda")
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))
    handle = torch_backend.register()
    for step, seqlen in enumerate((512, 2048, 2048)):
        torch.manual_seed(step)
        tensors = [torch.randn(1, 8, seqlen, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        *leaves, dout = (x.clone() for x in tensors)
        expected = attend_and_differentiate([x.clone().requires_grad_() for x in tensors[:3]], tensors[3])
        buffers = [*leaves, dout]
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)
        ):
            found = attend_and_differentiate([x.requires_grad_() for x in leaves], dout)
        for name, actual, whole in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
            chunks = whole.chunk(2 * world, 2)  # torch balances by chunks rank and 2 * world - 1 - rank
            own = torch.cat((chunks[rank], chunks[-1 - rank]), 2).float()
            results.put((f"step {step}, {name}, rank {rank}", float((actual - own).norm() / own.norm())))
    handle.remove()
    dist.destroy_process_group()


def attend_and_differentiate(leaves: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.gpu
def test_distributed_context_parallel_of_torch_runs_on_the_kernels(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = run_workers(2, str(tmp_path / "store"), run_context_parallel)
    assert len(found) == 2 * 3 * 4
    wrong = [one for one in found if not one[1] < 0.01]
    assert not wrong
