"""The table of docs/transforms.md: every cell is a call, of which a commit makes half."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import tl_attention

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
PAGE = Path(__file__).parents[1] / "docs" / "transforms.md"
BF16 = torch.bfloat16
SAMPLES, BATCH, HEADS, HEADS_KV, HEAD_DIM = 3, 2, 4, 2, 64


def table():
    text = PAGE.read_text()
    rows = text.split("<!-- transforms -->\n")[1].split("\n<!-- /transforms -->")[0].splitlines()
    head, _, *body = ([cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows)
    return [(row[0], column, cell) for row in body for column, cell in zip(head[1:], row[1:], strict=True)]


CELLS = table()


def cu(x, *ends):
    return torch.tensor(ends, device=x.device).int()


def attend_cache(q, cache):
    return tl_attention.flash_attn_with_kvcache(q, cache, cache)


def merge(outs, lses):
    return tl_attention.merge_states(outs, lses)[0]


def backward(do, q, k, v, out):
    lse = torch.ones(out.shape[:3], device=out.device)
    return tl_attention.mha_bwd_interface(do, q, k, v, out, lse)[0]


def attend_pages(q, k, v):
    table, used = cu(q, 2, 0, 3, 1).view(2, 2), cu(q, 20, 32)
    options = {"seqused_k": used, "block_table": table, "causal": True}
    return tl_attention.flash_attn_varlen_func(q, k, v, cu(q, 0, 4, 9), None, 5, 32, **options)


def varlen(function, *tensors, lengths=2):
    bounds = [cu(tensors[0], 0, 4, 9)] * lengths
    return function(*tensors, *bounds, *[5] * lengths)


Q, KV, ROWS = (BATCH, 9, HEADS, HEAD_DIM), (BATCH, 9, HEADS_KV, HEAD_DIM), (9, HEADS, HEAD_DIM)
# function -> sizes of tensors, call of them that returns one tensor
CALLS = {
    "flash_attn_func": ([Q, KV, KV], tl_attention.flash_attn_func),
    "flash_attn_qkvpacked_func": ([(BATCH, 9, 3, HEADS, HEAD_DIM)], tl_attention.flash_attn_qkvpacked_func),
    "flash_attn_kvpacked_func": ([Q, (BATCH, 9, 2, HEADS_KV, HEAD_DIM)], tl_attention.flash_attn_kvpacked_func),
    "flash_attn_varlen_func": ([ROWS] * 3, lambda *x: varlen(tl_attention.flash_attn_varlen_func, *x)),
    "flash_attn_varlen_func, pages": ([ROWS, *[(4, 16, HEADS_KV, HEAD_DIM)] * 2], attend_pages),
    "flash_attn_varlen_qkvpacked_func": (
        [(9, 3, HEADS, HEAD_DIM)], lambda *x: varlen(tl_attention.flash_attn_varlen_qkvpacked_func, *x, lengths=1),
    ),
    "flash_attn_varlen_kvpacked_func": (
        [ROWS, (9, 2, HEADS_KV, HEAD_DIM)], lambda *x: varlen(tl_attention.flash_attn_varlen_kvpacked_func, *x),
    ),
    "flash_attn_with_kvcache": ([(BATCH, 1, HEADS, HEAD_DIM), KV], attend_cache),
    "mha_fwd_interface": ([Q, Q, Q], lambda *x: tl_attention.mha_fwd_interface(*x)[0]),
    "mha_bwd_interface": ([Q] * 5, backward),
    "merge_states": ([(2, *Q), (2, BATCH, HEADS, 9)], lambda outs, lses: merge(outs, lses.float())),
}  # fmt: skip


class Module(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def loss_of(function):
    return lambda *tensors: function(*tensors).float().square().sum()


def gradients(loss, tensors, **options):
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    return tensors, torch.autograd.grad(loss(*tensors), tensors, **options)


def check(column, name, function, tensors):
    """Return the results of a call by way of a transform, and those wanted."""
    loss, everything = loss_of(function), tuple(range(len(tensors)))
    if column == "opcheck":
        check_ops(name, tensors)
        return [], []
    if column == "compile":
        torch._dynamo.reset()
        backend = "inductor" if tensors[0].is_cuda else "aot_eager"
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
        return [compiled(*tensors)], [function(*tensors)]
    if column == "export":
        program = torch.export.export(Module(function), tuple(tensors))
        return [program.module()(*tensors)], [function(*tensors)]
    if column == "grad, vjp":
        results = grad(loss, everything)(*tensors)
        pulled = torch.func.vjp(loss, *tensors)[1](torch.ones((), device=tensors[0].device))
        return [*results, *pulled], [*gradients(loss, tensors)[1]] * 2
    if column == "vmap":
        samples = [[x * n for x in tensors] for n in (1, 0.5, 0.25)]
        stacked = [torch.stack(x) for x in zip(*samples, strict=True)]
        return [vmap(function)(*stacked)], [torch.stack([function(*x) for x in samples])]
    if column == "jvp":  # |tangent|² is also that of the direction and the gradient along the tangent
        directions = tuple(map(torch.randn_like, tensors))
        out, tangent = jvp(function, tuple(tensors), directions)
        pulled = torch.func.vjp(function, *tensors)[1](tangent)
        product = sum((x.double() * y.double()).sum() for x, y in zip(directions, pulled, strict=True))
        return [out, tangent.double().square().sum()], [function(*tensors), product]
    if column == "double backward":
        leaves, (first, *_) = gradients(loss, tensors, create_graph=True)
        (second, *_) = torch.autograd.grad(first.float().square().sum(), leaves)
        return [second.isfinite().float()], [torch.ones_like(second).float()]
    if column == "checkpoint":
        recomputed = lambda *x: checkpoint(loss, *x, use_reentrant=False)  # noqa: E731
        return gradients(recomputed, tensors)[1], gradients(loss, tensors)[1]
    assert column == "autocast"
    with torch.autocast(tensors[0].device.type, dtype=torch.float16):
        results = [function(*tensors)]
    wanted = [function(*tensors)]
    with torch.autocast(tensors[0].device.type, dtype=torch.float16):
        if name in ("flash_attn_with_kvcache", "flash_attn_varlen_func, pages"):
            with pytest.raises(TypeError, match="float32"):
                function(*(x.float() for x in tensors))
        else:
            results.append(function(*(x.float() for x in tensors)))
            assert results[-1].dtype == torch.float32
            wanted.append(wanted[0].float())
    return results, wanted


def check_ops(name, tensors):
    ops = torch.ops.tl_attention
    options = 0.125, True, False, False, False
    q, k, v = (torch.randn(size, dtype=BF16, device=tensors[0].device) for size in (Q, KV, KV))
    if name == "flash_attn_with_kvcache":
        cache, new = torch.zeros(BATCH, 32, HEADS_KV, HEAD_DIM, dtype=BF16, device=q.device), k[:, :2]
        fields = cu(q, 3, 7), 0, 2, None, None, None
        torch.library.opcheck(
            ops.append.default, (q, new, new, cache, cache.clone(), *fields, None, None, True, False)
        )
        scores = 0.125, None, [-1, 0]
        torch.library.opcheck(ops.decode.default, (q, cache, cache, *fields, *scores))
        return
    if name == "flash_attn_varlen_func, pages":
        table, ends, lengths = cu(q, 2, 0, 3, 1).view(2, 2), cu(q, 0, 4, 9), cu(q, 20, 32)
        packed = *options, [-1, -1], 0.0, 0.0, 5, 32, 0, 0, None, None, None, ends, ends, None, lengths
        for out in (None, torch.zeros_like(tensors[0])):
            torch.library.opcheck(ops.fwd_packed.default, (*tensors, table, out, *packed))
        return
    torch.library.opcheck(ops.fwd.default, (*(x.requires_grad_() for x in (q, k, v)), *options))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = ops.fwd(q, k, v, *options)
    torch.library.opcheck(ops.bwd.default, (torch.randn_like(out), q, k, v, out, lse, None, *options))


def test_transforms_table_has_every_public_function():
    assert {name for name, *_ in CELLS} == set(CALLS)
    public = {
        name
        for name in tl_attention.__all__
        if callable(getattr(tl_attention, name))
        and not name.startswith(("ref_", "kvcache_", "flex_", "fp32_", "create_", "draft_"))
    }
    assert public == {name.partition(",")[0] for name in CALLS}


@pytest.mark.in_turn(50)
@pytest.mark.parametrize(("name", "column", "cell"), CELLS, ids=["-".join(x) for x in CELLS])
def test_transforms_table(name, column, cell, device):
    sizes, function = CALLS[name]
    tensors = [torch.randn(size, dtype=BF16, device=device) for size in sizes]
    if cell == "–":
        return
    if cell == "refused":
        with pytest.raises(
            NotImplementedError, match=r"tl_attention: the gradient of a gradient|^[\w, ]+: expected "
        ):
            check(column, name, function, tensors)
        return
    assert cell == "yes"
    results, wanted = check(column, name, function, tensors)
    for x, y in zip(results, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0.03, atol=0.02 * float(y.abs().max()), check_device=False)
