"""Calls that all ranks of a group make together, and what they return: for test_distributed.py."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo.compiled_autograd
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tl_attention import distributed, flash_attn_func, flash_attn_varlen_func
from tl_attention.distributed import functions, roll
from tl_attention.distributed.group import ranks_of
from tl_attention.integrations import torch_backend
from tl_attention.testing import numeric

warnings.filterwarnings("ignore", ".*CPU")


@dataclass(frozen=True)
class Case:
    """A call on all ranks. documents: cumulative lengths; None: a batch of sequences of `total` tokens."""

    name: str
    method: str = "gather"
    layout: str = "zigzag"
    total: int = 37
    documents: tuple[int, ...] | None = None
    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (16, 8)
    options: dict[str, Any] = field(default_factory=dict)
    slopes: int = 0  # dimensions
    sink: bool = False
    dropout: float = 0.0
    lse: bool = True  # it gets a gradient
    max_logits: bool = False

    @property
    def tokens(self) -> int:
        return self.total if self.documents is None else self.documents[-1]


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
        for method in ("gather", "ring")
        for layout in ("zigzag", "contiguous")
        for mask, options in MASKS.items()
        for kind, documents in (("dense", None), ("documents", DOCUMENTS))
        if mask in ("causal", "window") or layout == "zigzag"
    ),
    *(
        Case(f"{method}-balanced-{mask}", method, "balanced", documents=(0, 3, 28, 33, 90, 97), options=MASKS[mask])
        for method in ("gather", "ring")
        for mask in ("causal", "window")
    ),
    *(
        Case(f"{method}-sink-softcap-{kind}", method, options={"softcap": 2.0, **MASKS["causal"]}, sink=True, documents=documents)
        for method in ("gather", "ring")
        for kind, documents in (("dense", None), ("documents", DOCUMENTS))
    ),
    Case("gather-alibi", options=MASKS["causal"], slopes=1),
    Case("gather-alibi-batch", options=MASKS["sliding"], slopes=2),
    Case("gather-alibi-documents", options=MASKS["causal"], slopes=2, documents=DOCUMENTS),
    *(
        Case(f"{method}-{option}-{mask}-{kind}", method, total=101, options=MASKS[mask], documents=documents, **facts)
        for method in ("gather", "ring")
        for option, mask, facts in (
            ("dropout", "causal", {"dropout": 0.25}),
            ("dropout", "window", {"dropout": 0.25}),
            ("alibi", "full", {"slopes": 2}),
            ("alibi", "causal", {"slopes": 2}),
            ("dropout-alibi-sink", "window", {"dropout": 0.5, "slopes": 1, "sink": True}),
        )
        for kind, documents in (("dense", None), ("documents", (0, 30, 30, 33, 90, 97)))
    ),
    Case("gather-few-tokens", total=3, options=MASKS["causal"]),
    Case("ring-few-tokens", "ring", total=3, options=MASKS["causal"]),
    Case("auto", "auto", options=MASKS["causal"]),
    Case("auto-documents", "auto", documents=DOCUMENTS, options=MASKS["window"]),
]  # fmt: skip


def random_case(seed: int, device: str) -> Case:
    """A problem with a random method, mask, options, heads, lengths and layout.

    On a GPU kernels are few: d128, options on short sequences under a causal mask only, documents under a causal mask.
    """
    draw, on_gpu = random.Random(seed), device != "cpu"
    method = draw.choice(("gather", "gather", "ring", "ring", "auto"))
    option = draw.choice(("", "", "", "softcap and sink", "alibi", "dropout"))
    mask = draw.choice(("full", "causal", "causal", "window", "sliding"))
    if on_gpu and option:
        mask = "causal"
    if method == "ring" and on_gpu and option == "softcap and sink":
        method = "gather"
    heads = draw.choice(((4, 4), (8, 2), (4, 1), (8, 8), (2, 2)))
    top = 60 if not on_gpu else 1024 if option else 4000
    total = draw.choice((draw.randrange(1, top), draw.randrange(top // 2, top), top // 2, top // 4 * 3))
    documents, layout = None, draw.choice(("zigzag", "zigzag", "contiguous"))
    if (not on_gpu or (mask == "causal" and option in ("", "dropout"))) and draw.random() < 0.5:
        cuts = sorted(draw.randrange(total + 1) for _ in range(draw.choice((0, 1, 4, 11))))
        documents, layout = (0, *cuts, total), draw.choice(("zigzag", "contiguous", "balanced"))
    options = dict(MASKS[mask])
    if on_gpu and "window_size" in options:
        options["window_size"] = (300, 100) if mask == "window" else (257, -1)
    if option == "softcap and sink":
        options["softcap"] = 3.0
    return Case(
        f"random-{seed}",
        method,
        layout,
        total,
        documents,
        draw.choice((1, 1, 2, 3)),
        heads,
        (128, 128) if on_gpu else (16, 8),
        options,
        draw.choice((1, 2)) if option == "alibi" else 0,
        option == "softcap and sink",
        0.25 if option == "dropout" else 0.0,
        draw.random() < 0.3,
    )


def inputs(case: Case, device: str = "cpu") -> dict[str, torch.Tensor | None]:
    """Whole tensors, the same on all ranks."""
    generator = torch.Generator(device).manual_seed(random.Random(case.name).randrange(2**31))
    on = {"generator": generator, "device": device}
    (heads, heads_kv), (head_dim, head_dim_v) = case.heads, case.head_dims
    tokens = (case.batch, case.total) if case.documents is None else (case.documents[-1],)
    sizes = {"q": (heads, head_dim), "k": (heads_kv, head_dim), "v": (heads_kv, head_dim_v), "dout": (heads, head_dim_v)}  # fmt: skip
    found = {name: torch.randn(*tokens, *size, dtype=torch.bfloat16, **on) for name, size in sizes.items()}
    lse = (heads, tokens[0]) if len(tokens) == 1 else (case.batch, heads, case.total)
    found["dlse"] = torch.randn(lse, **on) if case.lse else None
    batch = case.batch if case.documents is None else len(case.documents) - 1
    slopes = (heads,) if case.slopes == 1 else (batch, heads)
    found["slopes"] = torch.rand(slopes, **on) * 0.1 if case.slopes else None
    found["sink"] = torch.randn(heads, **on) if case.sink else None
    return found


def differentiate(
    out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
) -> None:
    torch.autograd.backward(
        (out, lse) if dlse is not None else out, (dout, dlse) if dlse is not None else dout
    )


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
    differentiate(out, lse, x["dout"], x["dlse"])
    return out.detach(), lse.detach(), *(leaf.grad for leaf in leaves), None if sink is None else sink.grad


def run_shards(
    case: Case, x: dict[str, torch.Tensor | None], deterministic: bool = False
) -> list[torch.Tensor]:
    """out, lse, gradients and, with max_logits, the largest scores of the shards, joined."""
    dim, lse_dim = (1, 2) if case.documents is None else (0, 1)
    layout = case.layout
    if layout == "balanced":
        mask = {name: value for name, value in case.options.items() if name != "softcap"}
        layout = distributed.make_layout(cu_seqlens=case.documents, **mask)
    place = {"dim": dim, "layout": layout}
    if case.documents is None:
        placed = {"layout": layout, "seqlen": case.total}
    else:
        placed = {"layout": layout, "cu_seqlens": torch.tensor(case.documents)}
    leaves = [distributed.shard(x[name], **place).requires_grad_() for name in "qkv"]
    sink = None if x["sink"] is None else x["sink"].clone().requires_grad_()
    options = dict(case.options, alibi_slopes=x["slopes"], learnable_sink=sink, dropout_p=case.dropout)
    options |= {"rng_state": rng_state(x) if case.dropout else None, "return_attn_probs": True}
    options |= {"deterministic": deterministic, "method": case.method, "return_max_logits": case.max_logits}
    out, lse, _, *largest = distributed.attention(*leaves, **options, **placed)
    dlse = None if x["dlse"] is None else distributed.shard(x["dlse"], dim=lse_dim, layout=layout)
    differentiate(out, lse, distributed.shard(x["dout"], **place), dlse)
    assert not any(x._is_view() for x in (out, lse, *largest))  # else autograd refuses changes in place
    results = (
        (out, dim),
        (lse, lse_dim),
        *((leaf.grad, dim) for leaf in leaves),
        *((x, lse_dim) for x in largest),
    )
    joined = unsharded(results, seqlen=case.tokens, layout=layout)
    if sink is not None:
        dist.all_reduce(sink.grad)
        joined.insert(5, sink.grad)
    return joined


def unsharded(results: tuple[tuple[torch.Tensor, int], ...], **placed: Any) -> list[torch.Tensor]:
    """Tensors of all tokens, from shards and their dimensions of tokens, by one exchange."""
    rows = [x.detach().movedim(dim, 0) for x, dim in results]
    flat = [x.reshape(len(x), math.prod(x.shape[1:])).float() for x in rows]
    widths = [x.shape[1] for x in flat]
    whole = distributed.unshard(torch.cat(flat, 1), **placed).split(widths, 1)
    return [
        one.unflatten(1, x.shape[1:]).movedim(0, dim).to(x.dtype).contiguous()
        for one, x, (_, dim) in zip(whole, rows, results, strict=True)
    ]


def rng_state(x: dict[str, torch.Tensor | None]) -> torch.Tensor:
    return torch.tensor([7, 11], device=x["q"].device)


def compare(case: Case, checks: bool, device: str = "cpu") -> str:
    """Text of what is wrong with the results of a case, which all ranks run and those that check compare."""
    x = inputs(case, device)
    found = run_shards(case, x)
    return difference(case, x, found) if checks else ""


def difference(case: Case, x: dict[str, Any], found: list[torch.Tensor]) -> str:
    """Text of what is wrong with joined results, by the error rule; with dropout, by the results of one process."""
    if case.dropout:
        expected = run_whole(case, x, rng_state(x))
        for name, actual, whole in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=False):
            if not torch.allclose(actual.float(), whole.float(), atol=2e-2, rtol=2e-2):
                return f"{name} differs by {float((actual.float() - whole.float()).abs().max())}"
        return ""
    options = {name: value for name, value in case.options.items() if name == "softcap"}
    window = case.options.get("window_size", (-1, -1))
    options |= {"causal": case.options.get("causal", False), "window": window, "alibi_slopes": x["slopes"], "sink": x["sink"]}  # fmt: skip
    if case.documents is not None:
        cu = torch.tensor(case.documents, dtype=torch.int32, device=x["q"].device)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    qkv = [x[name] for name in "qkv"]
    forward = numeric.check_fwd(found[0], found[1], *qkv, **options)
    backward = numeric.check_bwd(tuple(found[2:]), x["dout"], *qkv, dlse=x["dlse"], **options)
    return "; ".join(one.text for one in (forward, backward) if not one.ok)


def largest_scores(case: Case, x: dict[str, torch.Tensor | None]) -> torch.Tensor:
    """Largest score of each query by the formula in fp64, in the shape of lse."""
    q, k = (x[name].double() if case.documents is None else x[name][None].double() for name in "qk")
    k = k.repeat_interleave(case.heads[0] // case.heads[1], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * case.head_dims[0] ** -0.5
    if softcap := case.options.get("softcap"):
        scores = softcap * (scores / softcap).tanh()
    token = torch.arange(case.tokens, device=q.device)
    bounds = torch.tensor(case.documents or (0, case.total), device=q.device)
    document = torch.searchsorted(bounds, token, right=True) - 1
    ahead = token - token[:, None]  # key after query
    if (slopes := x["slopes"]) is not None:
        if slopes.ndim == 1:
            slopes = slopes[:, None, None]
        elif case.documents is None:
            slopes = slopes[:, :, None, None]
        else:
            slopes = slopes[document].mT[:, :, None]
        scores = scores - slopes.double() * ahead.abs()
    left, right = (math.inf if n < 0 else n for n in case.options.get("window_size", (-1, -1)))
    right = 0 if case.options.get("causal") else right
    hidden = (document != document[:, None]) | (ahead > right) | (ahead < -left)
    found = scores.masked_fill(hidden, -math.inf).amax(-1)
    return found if case.documents is None else found[0]


def compare_max_logits(case: Case, checks: bool, device: str = "cpu") -> str:
    """Text of what is wrong with the largest scores of a case, and with its other results beside them.

    On the CPU these have the bits of a call without max_logits, on a GPU other kernels compute them.
    """
    x = inputs(case, device)
    *found, largest = run_shards(replace(case, max_logits=True), x)
    plain = run_shards(case, x) if device == "cpu" else []
    if not checks:
        return ""
    wrong = [] if plain else [difference(case, x, found)]
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv", "dsink"), found, plain, strict=False):
        wrong += [] if torch.equal(one, other) else [f"{name} has other bits"]
    tolerance = 1e-6 if device == "cpu" else 1e-3
    try:
        torch.testing.assert_close(largest.double(), largest_scores(case, x), rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        wrong.append(f"max_logits: {error}")
    return "; ".join(text for text in wrong if text)


def raised(call: Any, *arguments: Any, **options: Any) -> str:
    """Type and text of the error of a call."""
    try:
        call(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_cases(
    cases: list[Case], device: str = "cpu", compare: Callable[[Case, bool, str], str] = compare
) -> dict[str, str]:
    """Texts of what is wrong, by case. The ranks take turns in checking."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {case.name: compare(case, number % world == rank, device) for number, case in enumerate(cases)}
    return {name: text for name, text in found.items() if text}


def ask_for_max_logits(method: str) -> dict[str, bool]:
    """What holds of calls that ask for the largest scores."""
    torch.manual_seed(dist.get_rank())
    leaves = [torch.randn(1, 4, 4, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]

    def attend(*qkv: torch.Tensor, **options: bool) -> Any:
        return distributed.attention(*qkv, method=method, causal=True, return_max_logits=True, **options)

    def gradients(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out.float().square().sum(), leaves)

    out, lse, none, expected = attend(*leaves, return_attn_probs=True)
    plain = distributed.attention(*leaves, method=method, causal=True)
    of_plain = gradients(plain)
    holds = {"four results": none is None and lse.requires_grad and torch.equal(out, plain)}
    found, largest = attend(*leaves)
    holds["two results"] = torch.equal(found, plain) and torch.equal(largest, expected)
    holds["not differentiable"] = not largest.requires_grad and largest.dtype is torch.float32
    largest.zero_()
    holds["changed in place"] = all(map(torch.equal, gradients(found), of_plain))
    with torch.no_grad():
        holds["without gradients"] = torch.equal(attend(*leaves)[1], expected)
    packed = attend(*(x[0] for x in leaves), cu_seqlens=[0, 4 * dist.get_world_size()])
    holds["packed"] = torch.equal(packed[1], expected[0])
    found, largest = torch.compile(lambda *x: attend(*(2 * one for one in x)), backend="aot_eager")(*leaves)
    doubled = attend(*(2 * one.detach() for one in leaves))
    holds["compiled around"] = torch.equal(found, doubled[0]) and torch.equal(largest, doubled[1])
    found, largest = checkpoint(attend, *leaves, use_reentrant=False)
    holds["checkpoint"] = torch.equal(largest, expected) and all(map(torch.equal, gradients(found), of_plain))
    of_heads = expected.amax((0, 2))
    dist.all_reduce(of_heads, dist.ReduceOp.MAX)
    whole = [distributed.unshard(x.detach(), dim=1) for x in leaves]
    _, of_whole = flash_attn_func(*whole, causal=True, return_max_logits=True)
    holds["of heads"] = torch.equal(of_heads, of_whole.amax((0, 2)))
    return holds


def disagree() -> dict[str, str]:
    """Errors of calls that ranks disagree on, then results of right ones on groups of all kinds."""
    first, world = dist.get_rank() == 0, dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(1, 4, 4, 16, dtype=torch.bfloat16)
    attend, found = distributed.attention, {}
    found["causal"] = raised(attend, x, x, x, causal=first)
    found["dtype"] = raised(attend, x, x if first else x.half(), x)
    found["rows"] = raised(attend, *[x if first else x[:, :3]] * 3)
    found["documents"] = raised(attend, *[x[0]] * 3, cu_seqlens=[0, 3 + first, world * 4])
    found["cross"] = raised(attend, x, *[x[:, :3]] * 2)
    found["max_logits"] = raised(attend, x, x, x, return_max_logits=first)
    found["no bool"] = raised(attend, x, x, x, return_max_logits=1)
    found["layout"] = raised(attend, x, x, x, layout="zigzag" if first else "contiguous")
    found["gradient"] = raised(attend, x.clone().requires_grad_(first), x, x)
    attend(x, x, x)
    found["jvp"] = raised(torch.func.jvp, lambda x: attend(x, x, x), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        found["dual"] = raised(attend, x, x, x, method="ring")
    found["vmap"] = raised(torch.vmap(lambda x: attend(x, x, x)), x[None])
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    outs = [attend(x, x, x, one, causal=True) for one in (None, dist.group.WORLD, mesh, mesh["cp"])]
    found["groups"] = str(all(torch.equal(out, outs[0]) for out in outs))
    # Equal calls on tensors that are elsewhere in memory on one rank only
    apart = x if first else torch.cat((x, x), -1)[..., :16]
    found["strides"] = str(torch.equal(attend(apart, apart, apart, causal=True), outs[0]))
    square = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp"))
    found["mesh"] = raised(attend, x, x, x, square)
    alone = attend(x, x, x, square["dp"], causal=True)
    found["alone"] = str(torch.equal(alone, flash_attn_func(x, x, x, causal=True)))
    others = dist.new_group([0])
    found["member"] = "ValueError" if first else raised(attend, x, x, x, others)
    return found


def differentiate_otherwise(method: str) -> dict[str, str]:
    """Errors of backwards that are refused, and a gradient with create_graph=True that is only read."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, 4, 16, dtype=torch.bfloat16)
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    out = distributed.attention(q, k, v, method=method, causal=True)
    dout = torch.randn(3, *out.shape, dtype=out.dtype)
    plain = torch.autograd.grad(out, (q, k, v), dout[0], retain_graph=True)
    recorded = torch.autograd.grad(out, (q, k, v), dout[0], create_graph=True)
    penalty = sum(grad.float().square().sum() for grad in recorded)
    return {
        "read": str(all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))),
        "backward": raised((penalty + out.float().sum()).backward, retain_graph=True),
        "grad": raised(torch.autograd.grad, penalty, k, retain_graph=True),
        "batched": raised(torch.autograd.grad, out, q, dout, is_grads_batched=True),
    }


def compile_autograd(method: str, max_logits: bool) -> str:
    """Whether compiled autograd gives the gradients of a plain backward."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, 4, 16, dtype=torch.bfloat16)
    found = []
    for enabled in (False, True):
        leaves = [x.clone().requires_grad_() for _ in range(3)]
        out = distributed.attention(*leaves, method=method, causal=True, return_max_logits=max_logits)
        loss = (out[0] if max_logits else out).float().square().sum()
        compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
        with compiled if enabled else contextlib.nullcontext():
            loss.backward()
        found.append([leaf.grad for leaf in leaves])
    return str(all(map(torch.equal, *found)))


def unshard_dtypes() -> list[str]:
    """What is wrong with unshard() of dtypes that backends of torch.distributed lack, and of tensors without columns."""
    total, found = 7, []
    for dtype in (
        torch.int16,
        torch.uint16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.bool,
        torch.bfloat16,
    ):
        x = torch.arange(2 * total).view(total, 2).float().to(dtype)
        for whole in (x, x.conj()) if dtype.is_complex else (x,):
            joined = distributed.unshard(distributed.shard(whole), seqlen=total)
            if joined.dtype != dtype or not torch.equal(
                joined.view(torch.uint8), whole.clone().view(torch.uint8)
            ):
                found.append(f"{dtype}: {joined}")
    for shape in ((0,), (3, 0), (0, 3)):
        empty = distributed.shard(torch.zeros(total, *shape))
        if distributed.unshard(empty, seqlen=total).shape != (total, *shape):
            found.append(f"{shape}")
    return found


def differ_later(always: bool) -> dict[str, str]:
    """Errors of calls that differ, of which ranks know some from before. always: every call is compared."""
    x, first = torch.ones(1, 4, 2, 16, dtype=torch.bfloat16), dist.get_rank() == 0
    leaf = x.clone().requires_grad_()
    for causal in (True, False):
        distributed.attention(x, x, x, causal=causal)
    out = distributed.attention(leaf, x, x)
    found, roll.ALWAYS = {}, always
    try:
        found["known"] = raised(distributed.attention, x, x, x, causal=first)
        found["one knows"] = raised(distributed.attention, x, x, x, softcap=0.0 if first else 2.0)
        found["backward"] = raised(out.sum().backward) if first else raised(distributed.attention, leaf, x, x)
    finally:
        roll.ALWAYS = False
    found["right"] = raised(distributed.attention, x, x, x)
    return found


def differ_without_waiting() -> list[str]:
    """Errors of calls by two ranks that do not wait: the last one makes its calls after the other."""
    last = dist.get_rank() == dist.get_world_size() - 1
    x = torch.ones(1, 4, 2, 16, dtype=torch.bfloat16)
    group = dist.new_group()
    for causal in (True, False):
        distributed.attention(x, x, x, group, causal=causal)
    found = roll.roll_of(ranks_of(group))
    found._blocks = False
    calls = [roll.Known(found, digest) for digest in found._sheets]
    texts = []
    for own, other in ((0, 0), (0, 1), (0, 0)):  # equal, different, equal again
        if last:
            dist.barrier()
        texts.append(raised(calls[other if last else own].enter))
        if not last:
            dist.barrier()
        dist.barrier()
    return texts


def differ_on_machines() -> dict[str, str]:
    """Errors of new calls that differ, by ranks that share no memory."""
    x, first = torch.ones(1, 4, 2, 16, dtype=torch.bfloat16), dist.get_rank() == 0
    group, real, found = dist.new_group(), roll.Roll._open, {}
    roll.Roll._open = lambda self: (real(self)[0], {})
    try:
        found["causal"] = raised(distributed.attention, x, x, x, group, causal=first)
        found["dtype"] = raised(distributed.attention, x, x if first else x.half(), x, group)
        found["right"] = raised(distributed.attention, x, x, x, group)
        # All ranks forget the arguments at the same call, and one of them the prepared call, too
        roll.roll_of(ranks_of(group))._sheets.clear()
        if first:
            functions._known[group].clear()
        found["forgotten"] = raised(distributed.attention, x, x, x, group)
        # Known calls that differ are found by the next new one, and no longer by that after it
        for causal in (True, False):
            distributed.attention(x, x, x, group, causal=causal)
        raised(distributed.attention, x, x, x, group, causal=first)
        found["earlier"] = raised(distributed.attention, x, x, x, group, softcap=2.0)
        found["later"] = raised(distributed.attention, x, x, x, group, softcap=3.0)
    finally:
        roll.Roll._open = real
    return found


def lack_memory() -> str:
    """Error of the first call of a group whose last rank has no room for a page."""
    x, group, real = torch.ones(1, 4, 2, 16, dtype=torch.bfloat16), dist.new_group(), roll.PAGE_BYTES
    if dist.get_rank() == dist.get_world_size() - 1:
        roll.PAGE_BYTES = 1 << 60
    try:
        return raised(distributed.attention, x, x, x, group)
    finally:
        roll.PAGE_BYTES = real


def lose_a_rank() -> None:
    """Call attention while the last rank ends."""
    x = torch.ones(1, 4, 2, 16, dtype=torch.bfloat16)
    distributed.attention(x, x, x, causal=True)
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(1)
    distributed.attention(x, x, x, causal=True)


def miss_a_call() -> str:
    """Error of a rank whose call the last rank does not make, in a group with a timeout of a second."""
    hasty = dist.new_group(timeout=timedelta(seconds=1))
    x = torch.ones(1, 4, 2, 16, dtype=torch.bfloat16)
    distributed.attention(x, x, x, hasty, causal=True)
    last = dist.get_rank() == dist.get_world_size() - 1
    text = "no call" if last else raised(distributed.attention, x, x, x, hasty, causal=True)
    dist.barrier()
    return text


def repeat(case: Case, device: str = "cpu") -> bool:
    """True if three deterministic runs have the same bits."""
    x = inputs(case, device)
    first, *others = (run_shards(case, x, deterministic=True) for _ in range(3))
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def train_example(path: str, arguments: list[str]) -> list[float]:
    """Losses of an example."""
    spec = importlib.util.spec_from_file_location("long_context", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.train(example.parse(arguments), torch.device("cpu"))


def capture(case: Case) -> float:
    """Relative difference in the 2-norm between a replayed CUDA graph of forward and backward and the calls that it holds."""
    x = inputs(case, "cuda")
    placed = {"layout": case.layout, "seqlen": case.total}
    *leaves, dout = (
        distributed.shard(x[name], dim=1, layout=case.layout) for name in ("q", "k", "v", "dout")
    )
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def run() -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.grad = None
        asked = {"method": case.method, "return_max_logits": case.max_logits}
        found = distributed.attention(*leaves, **case.options, **placed, **asked)
        out, *largest = found if case.max_logits else [found]
        out.backward(dout)
        return [out.detach(), *(leaf.grad for leaf in leaves), *largest]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            expected = [found.clone() for found in run()]
    torch.cuda.current_stream().wait_stream(side)
    dist.barrier()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = run()
    for one in found:
        one.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return max(relative(a, b) for a, b in zip(found, expected, strict=True))


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Difference in the 2-norm."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def train_by_torch() -> list[float]:
    """Errors of some steps with torch's context_parallel on tl_attention's kernels, relative to one GPU."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))
    handle, errors = torch_backend.register(), []
    for step, seqlen in enumerate((512, 2048, 2048)):
        torch.manual_seed(step)
        tensors = [torch.randn(1, 8, seqlen, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        *leaves, dout = (x.clone() for x in tensors)
        expected = _by_sdpa([x.clone().requires_grad_() for x in tensors[:3]], tensors[3])
        buffers = [*leaves, dout]
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)
        ):
            found = _by_sdpa([x.requires_grad_() for x in leaves], dout)
        for actual, whole in zip(found, expected, strict=True):
            chunks = whole.chunk(2 * world, 2)  # torch balances by chunks rank and 2 * world - 1 - rank
            errors.append(relative(actual, torch.cat((chunks[rank], chunks[-1 - rank]), 2)))
    handle.remove()
    return errors


def _by_sdpa(leaves: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]
