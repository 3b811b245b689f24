"""DTensors: batch and heads may be sharded; other placements are refused by name. The ranks are those of a fake group: nothing is sent."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tl_attention import (
    block_masks,
    create_block_mask,
    distributed,
    draft_tree_mask,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    flex_attention,
    hf,
    merge_states,
    mha_bwd_interface,
    mha_fwd_interface,
)
from tl_attention.checks import lengths as checks_lengths

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16 = torch.bfloat16
RANKS = 2, 2  # of the mesh: along the batch, along the heads


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def mesh(request):
    torch.manual_seed(4)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh(request.param, RANKS)
    dist.destroy_process_group()


def local(mesh, *shape):
    return torch.randn(shape, device=mesh.device_type, dtype=BF16)


def whole(mesh, x, *placements):
    return DTensor.from_local(x, mesh, placements).requires_grad_()


LAYOUTS = {  # name -> placements of q, k and v [batch, seqlen, heads, head_dim], those of lse
    "batch": ((Shard(0), Replicate()), (Shard(0), Replicate())),
    "heads": ((Replicate(), Shard(2)), (Replicate(), Shard(1))),
    "both": ((Shard(0), Shard(2)), (Shard(0), Shard(1))),
    "none": ((Replicate(), Replicate()), (Replicate(), Replicate())),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 3), "softcap": 20.0}], ids=str)
def test_shards_of_batch_and_heads_run_as_calls_of_their_own(name, options, mesh):
    placements, of_lse = LAYOUTS[name]
    parts = [local(mesh, 2, 20, heads, 64).requires_grad_() for heads in (4, 2, 2)]
    tensors = [whole(mesh, x.detach(), *placements) for x in parts]
    out, lse, _ = flash_attn_func(*tensors, **options, return_attn_probs=True)
    want, want_lse, _ = flash_attn_func(*parts, **options, return_attn_probs=True)
    assert (out.placements, lse.placements) == (placements, of_lse)
    sizes = [2 if p.is_shard() else 1 for p in placements]
    assert out.shape == (2 * sizes[0], 20, 4 * sizes[1], 64) and lse.shape == (2 * sizes[0], 4 * sizes[1], 20)
    assert torch.equal(out.to_local(), want) and torch.equal(lse.to_local(), want_lse)
    dout = local(mesh, *want.shape)
    grads = torch.autograd.grad(out, tensors, whole(mesh, dout, *placements).detach())
    for grad, expected in zip(grads, torch.autograd.grad(want, parts, dout), strict=True):
        assert grad.placements == placements and torch.equal(grad.to_local(), expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_max_logits_have_the_shards_of_lse(name, mesh):
    placements, of_lse = LAYOUTS[name]
    parts = [local(mesh, 2, 20, heads, 64) for heads in (4, 2, 2)]
    tensors = [whole(mesh, x, *placements) for x in parts]
    out, lse, _, largest = flash_attn_func(*tensors, return_attn_probs=True, return_max_logits=True)
    _, want = flash_attn_func(*parts, return_max_logits=True)
    assert largest.placements == of_lse and largest.shape == lse.shape and not largest.requires_grad
    assert torch.equal(largest.to_local(), want)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def test_shards_of_other_functions(mesh):
    q, k, v = (local(mesh, 2, 4, 20, 64) for _ in range(3))
    placements = Shard(0), Shard(1)
    out, lse = mha_fwd_interface(*(whole(mesh, x, *placements) for x in (q, k, v)), is_causal=True)
    want, want_lse = mha_fwd_interface(q, k, v, is_causal=True)
    assert out.placements == lse.placements == placements
    assert torch.equal(out.to_local(), want) and torch.equal(lse.to_local(), want_lse)

    qkv = local(mesh, 2, 20, 3, 4, 64)
    out = flash_attn_qkvpacked_func(whole(mesh, qkv, Shard(0), Shard(3)), causal=True)
    assert torch.equal(out.to_local(), flash_attn_qkvpacked_func(qkv, causal=True))

    starts = torch.tensor([0, 12, 20], dtype=torch.int32, device=q.device)
    rows = [local(mesh, 20, 4, 64) for _ in range(3)]
    lengths = starts, starts, 12, 12
    given = [whole(mesh, x, Replicate(), Shard(1)) for x in rows]
    out, lse, _ = flash_attn_varlen_func(*given, *lengths, return_attn_probs=True)
    want, want_lse, _ = flash_attn_varlen_func(*rows, *lengths, return_attn_probs=True)
    assert torch.equal(out.to_local(), want) and torch.equal(lse.to_local(), want_lse)
    assert out.placements == (Replicate(), Shard(1)) and lse.placements == (Replicate(), Shard(0))


def test_dtensors_take_whole_lengths_alone(mesh):
    rows = [local(mesh, 20, 2, 32) for _ in range(3)]
    placed = [DTensor.from_local(x, mesh, [Replicate(), Shard(1)]) for x in rows]
    starts = torch.tensor([0, 8, 20], device=mesh.device_type, dtype=torch.int32)
    part = DTensor.from_local(starts, mesh, [Shard(0), Replicate()])
    with pytest.raises(NotImplementedError, match="^cu_seqlens_q: expected a replicated DTensor"):
        flash_attn_varlen_func(*placed, part, part, 12, 12)


def test_sinks_and_slopes_have_the_shards_of_the_heads(mesh):
    parts = [local(mesh, 2, 20, 4, 64).requires_grad_() for _ in range(3)]
    sink = torch.randn(4, device=parts[0].device, requires_grad=True)
    slopes = torch.rand(2, 4, device=sink.device)
    placements = Shard(0), Shard(2)
    tensors = [whole(mesh, x.detach(), *placements) for x in parts]
    of_heads = whole(mesh, sink.detach(), Replicate(), Shard(0))
    of_both = whole(mesh, slopes, Shard(0), Shard(1)).detach()
    out = flash_attn_func(*tensors, learnable_sink=of_heads, alibi_slopes=of_both)
    want = flash_attn_func(*parts, learnable_sink=sink, alibi_slopes=slopes)
    assert torch.equal(out.to_local(), want)
    (grad,) = torch.autograd.grad(out.to_local().sum(), of_heads)
    (expected,) = torch.autograd.grad(want.sum(), sink)
    assert grad.placements == (Partial(), Shard(0)) and torch.equal(grad.to_local(), expected)
    for name, x, given in (
        ("learnable_sink", sink, "Tensor"),
        ("alibi_slopes", of_heads.detach(), r"\(Replicate"),
    ):
        if name == "alibi_slopes":
            x = whole(mesh, slopes, Shard(0), Replicate()).detach()
            given = r"\(Shard\(dim=0\), Replicate"
        with pytest.raises(
            NotImplementedError, match=rf"^{name}: expected a DTensor of placements .* got {given}.*to_local"
        ):
            flash_attn_func(*tensors, **{name: x})


def test_shards_compile_without_a_graph_break(mesh):
    torch._dynamo.reset()
    placements = Shard(0), Shard(2)
    parts = [local(mesh, 2, 20, 4, 64) for _ in range(3)]
    tensors = [whole(mesh, x, *placements) for x in parts]
    compiled = torch.compile(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True), backend="aot_eager", fullgraph=True
    )
    out = compiled(*tensors)
    assert out.placements == placements and torch.equal(out.to_local(), flash_attn_func(*parts, causal=True))


REFUSED = {
    "sequence": (
        (Shard(1), Replicate()),
        r"^q: expected placements Replicate\(\), or Shard of the batch or the heads, got .*to_local",
    ),
    "columns": ((Replicate(), Shard(3)), r"^q: expected placements .* got .*to_local\(\)"),
    "partial": ((Partial(), Replicate()), r"^q: expected placements .* got .*to_local\(\)"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}], ids=str)
def test_placements_that_need_other_ranks_are_refused(name, options, mesh):
    placements, text = REFUSED[name]
    x = DTensor.from_local(local(mesh, 2, 20, 4, 64), mesh, placements)
    with pytest.raises(NotImplementedError, match=text):
        flash_attn_func(x, x, x, **options)


def test_packed_tensors_sharded_between_q_k_and_v_are_refused(mesh):
    def part(sizes, *placements):
        """A DTensor of these sizes whose third-last dimension is sharded."""
        x = local(mesh, *sizes)
        return DTensor.from_local(x, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())

    text = "expected placements that do not shard dimension 2"
    with pytest.raises(NotImplementedError, match=f"^qkv: {text}"):
        flash_attn_qkvpacked_func(part((2, 20, 3, 4, 64), Replicate(), Shard(2)))
    with pytest.raises(NotImplementedError, match=f"^kv: {text}"):
        flash_attn_kvpacked_func(local(mesh, 2, 20, 4, 64), part((2, 20, 2, 4, 64), Shard(2), Replicate()))


def test_unlike_placements_are_refused(mesh):
    x = local(mesh, 2, 20, 4, 64)
    q, k = whole(mesh, x, Shard(0), Shard(2)), whole(mesh, x, Shard(0), Replicate())
    with pytest.raises(
        NotImplementedError, match=r"^k: expected the placements of q, .*redistribute.*to_local\(\)"
    ):
        flash_attn_func(q, k, k)
    with pytest.raises(
        TypeError, match=r"^v: expected a DTensor, as others of q, k and v are, got Tensor; .*to_local\(\)"
    ):
        flash_attn_func(q, q, x)
    with pytest.raises(NotImplementedError, match=r"^dropout_p: expected 0 with DTensors.*to_local\(\)"):
        flash_attn_func(q, q, q, 0.5)
    odd = DTensor.from_local(
        x, mesh, (Replicate(), Shard(2)), shape=(2, 20, 7, 64), stride=(7 * 1280, 448, 64, 1)
    )
    with pytest.raises(
        NotImplementedError,
        match=r"^q: expected a number of heads that the 2 ranks of its shards divide, got 7",
    ):
        flash_attn_func(odd, odd, odd)
    rows, starts = whole(mesh, x[0], Shard(0), Replicate()), torch.tensor([0, 20], dtype=torch.int32)
    with pytest.raises(
        NotImplementedError, match=r"^q: expected placements Replicate\(\), or Shard of the heads, got"
    ):
        flash_attn_varlen_func(rows, rows, rows, starts, starts, 20, 20)


FUNCTIONS = {
    "mask_mod": {"mask_mod": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx % 3 != 1)},
    "option": {"mask_mod": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx},
    "score_mod": {"score_mod": lambda score, b, h, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx)},
    "neither": {},
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("functions", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_run_on_shards(name, functions, mesh):
    _, placements = LAYOUTS[name]  # [batch, heads, ..], as those of lse
    parts = [local(mesh, 2, heads, 20, 64).requires_grad_() for heads in (4, 2, 2)]
    tensors = [whole(mesh, x.detach(), *placements) for x in parts]
    out, lse = flex_attention(*tensors, **functions, enable_gqa=True, return_lse=True)
    want, want_lse = flex_attention(*parts, **functions, enable_gqa=True, return_lse=True)
    assert out.placements == lse.placements == placements
    assert torch.equal(out.to_local(), want) and torch.equal(lse.to_local(), want_lse)
    dout = local(mesh, *want.shape)
    grads = torch.autograd.grad(out, tensors, whole(mesh, dout, *placements).detach())
    for grad, expected in zip(grads, torch.autograd.grad(want, parts, dout), strict=True):
        assert grad.placements == placements and torch.equal(grad.to_local(), expected)


def test_functions_of_flash_attn_func_run_on_shards(mesh):
    parts = [local(mesh, 2, 20, 4, 64) for _ in range(3)]
    tensors = [whole(mesh, x, Shard(0), Shard(2)) for x in parts]
    for functions in FUNCTIONS.values():
        found = flash_attn_func(*tensors, **functions)
        assert torch.equal(found.to_local(), flash_attn_func(*parts, **functions))


def reads(index):
    return {"mask_mod": lambda *indices: (indices[index] >= 0) & (indices[2] >= indices[3])}


def test_functions_of_an_index_that_is_not_sharded_run_on_shards(mesh):
    part = local(mesh, 2, 4, 20, 64)
    for placements, index in (((Shard(0), Replicate()), 1), ((Replicate(), Shard(1)), 0)):
        x = whole(mesh, part, *placements)
        out = flex_attention(x, x, x, **reads(index))
        assert torch.equal(out.to_local(), flex_attention(part, part, part, **reads(index)))


def test_functions_that_need_other_ranks_are_refused(mesh):
    part = local(mesh, 2, 4, 20, 64)
    placements = Shard(0), Shard(1)
    x = DTensor.from_local(part, mesh, placements)
    bias = torch.zeros(20, device=part.device)
    block_mask = create_block_mask(reads(2)["mask_mod"], None, None, 20, 20, device=part.device)
    cases = {
        "score_mod": {"score_mod": lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx]},
        "mask_mod: expected a function that does not read the index of the batch": reads(0),
        "mask_mod: expected a function that does not read the index of the head": reads(1),
        "block_mask": {"block_mask": block_mask},
        "attn_bias": {"attn_bias": torch.zeros(1, 1, 20, 20, device=part.device)},
    }
    for start, functions in cases.items():
        with pytest.raises(NotImplementedError, match=rf"^{start}.*\.to_local\(\) on query, key, value"):
            flex_attention(x, x, x, **functions)
    with pytest.raises(NotImplementedError, match=r"^query: expected placements .*to_local\(\)"):
        y = DTensor.from_local(part, mesh, (Shard(2), Replicate()))
        flex_attention(y, y, y)
    with pytest.raises(TypeError, match=r"^key: expected a DTensor, as others of query, key, value are"):
        flex_attention(x, part, x)
    one = DTensor.from_local(part[:1], mesh, placements, shape=(1, 8, 20, 64), stride=(1, 1280, 64, 1))
    with pytest.raises(NotImplementedError, match=r"^key: expected the batch of query .*to_local\(\)"):
        flex_attention(x, one, one)


def test_functions_of_local_tensors_capture_no_dtensors(mesh):
    x = local(mesh, 2, 4, 20, 64)
    bias = DTensor.from_local(torch.zeros(20, device=x.device), mesh, (Replicate(), Replicate()))

    class Held:
        tensor = bias

    cases = {
        "score_mod: expected a function that captures tensors of this rank": lambda s, b, h, i, j: (
            s + bias[j]
        ),
        "score_mod .*: expected a function that captures dense tensors of this rank": (
            lambda s, b, h, i, j: s + Held.tensor[j]
        ),
    }
    for start, score_mod in cases.items():
        with pytest.raises(NotImplementedError, match=rf"^{start}.*got a DTensor.*\.to_local\(\)"):
            flex_attention(x, x, x, score_mod)
    with pytest.raises(
        NotImplementedError, match=r"^attn_bias: expected a tensor of this rank.*attn_bias\.to_local\(\)"
    ):
        dense = DTensor.from_local(
            torch.zeros(1, 1, 20, 20, device=x.device), mesh, (Replicate(), Replicate())
        )
        flex_attention(x, x, x, attn_bias=dense)


@pytest.mark.parametrize("index", range(6))
def test_backward_refuses_a_dtensor_by_name(index, mesh):
    x = local(mesh, 2, 4, 16, 64)
    tensors = [x, x, x, x, x, torch.zeros(2, 4, 16, device=x.device)]
    tensors[index] = DTensor.from_local(tensors[index], mesh, (Shard(0), Replicate()))
    name = ("do", "q", "k", "v", "out", "lse")[index]
    with pytest.raises(
        NotImplementedError, match=rf"^{name}: expected a tensor of this rank.*{name}\.to_local\(\)"
    ):
        mha_bwd_interface(*tensors)


@pytest.mark.parametrize(
    "name", ["k_cache", "v_cache", "k", "v", "cache_seqlens", "block_table", "learnable_sink"]
)
def test_caches_refuse_a_dtensor_by_name(name, mesh):
    cache, new = local(mesh, 2, 16, 4, 64), local(mesh, 2, 1, 4, 64)
    lengths = torch.tensor([3, 4], device=new.device, dtype=torch.int32)
    given = {"k_cache": cache, "v_cache": cache, "k": new, "v": new, "cache_seqlens": lengths}
    if name == "block_table":
        given |= {"block_table": torch.zeros(2, 1, device=new.device, dtype=torch.int32)}
    if name == "learnable_sink":
        given |= {"learnable_sink": torch.zeros(4, device=new.device)}
    given[name] = DTensor.from_local(given[name], mesh, (Replicate(), Replicate()))
    with pytest.raises(
        NotImplementedError, match=rf"^{name}: expected a tensor of this rank.*{name}\.to_local\(\)"
    ):
        flash_attn_with_kvcache(new, **given)


@pytest.mark.parametrize("name", ["cache", "backward", "kernel", "pages", "distributed"])
def test_other_functions_refuse_dtensors_by_name(name, mesh):
    x = DTensor.from_local(local(mesh, 2, 4, 16, 64), mesh, (Shard(0), Replicate()))
    table = torch.zeros(1, 1, dtype=torch.int32)
    calls = {
        "cache": (lambda: flash_attn_with_kvcache(x, x, x), "q"),
        "backward": (lambda: mha_bwd_interface(x, x, x, x, x, x), "q"),
        "kernel": (lambda: mha_fwd_interface(x, x, x, return_kernel=True), "q"),
        "pages": (
            lambda: flash_attn_varlen_func(x[0], x, x, table[0], table[0], 1, 1, block_table=table),
            "q",
        ),
        "distributed": (lambda: distributed.attention(x, x, x), "q"),
    }
    call, argument = calls[name]
    text = rf"^{argument}: expected a tensor of this rank, got a DTensor of placements .*{re.escape(argument)}\.to_local\(\)"
    with pytest.raises(NotImplementedError, match=text):
        call()


@pytest.mark.parametrize(
    "name", ["document_ids", "documents", "prefix_lm", "tree", "tree lengths", "positions", "draft", "bounds"]
)
def test_values_of_masks_and_bounds_refuse_a_dtensor_by_name(name, mesh):
    x = DTensor.from_local(torch.tensor([0, 1, 3], device=mesh.device_type), mesh, (Replicate(), Replicate()))
    calls = {
        "document_ids": (lambda: block_masks.document_ids(x, 3), "cu_seqlens"),
        "documents": (lambda: block_masks.documents(x), "ids"),
        "prefix_lm": (lambda: block_masks.prefix_lm(4, 4, x), "prefix"),
        "tree": (lambda: block_masks.prefix_tree(x, [1, 2, 3]), "parents"),
        "tree lengths": (lambda: block_masks.prefix_tree([-1, 0, 0], x), "lengths"),
        "positions": (lambda: block_masks.prefix_tree_positions(x, [1, 2, 3]), "parents"),
        "draft": (lambda: draft_tree_mask(x), "parents"),
        "bounds": (lambda: distributed.shard_cu_seqlens(x), "cu_seqlens"),
    }
    call, argument = calls[name]
    with pytest.raises(NotImplementedError, match=rf"^{argument}: expected a tensor of this rank.*to_local"):
        call()


def test_merged_states_are_all_dtensors_or_none(mesh):
    out, lse = (torch.randn(shape, device=mesh.device_type) for shape in ((2, 5, 4, 8), (2, 4, 5)))
    placed = DTensor.from_local(out, mesh, (Shard(0), Replicate()))
    of_lse = DTensor.from_local(lse, mesh, (Shard(0), Replicate()))
    found, _ = merge_states([placed, placed], [of_lse, of_lse])
    assert torch.equal(found.to_local(), merge_states([out, out], [lse, lse])[0])
    for outs, lses in (([placed], [lse]), ([placed[:2], out], [lse, lse]), ([out], [of_lse])):
        with pytest.raises(TypeError, match=r"^outs, lses: expected DTensors alone or none.*to_local\(\)"):
            merge_states(outs, lses)


def test_hf_takes_the_shards_of_flash_attn_func(mesh):
    """Also in a decode step, with a sink, and with positions and padding that are replicated."""
    device, layer = mesh.device_type, torch.nn.Module()
    q, k, v = (local(mesh, 1, heads, 20, 64) for heads in (4, 2, 2))
    sink = torch.randn(4, device=device)
    qkv = [DTensor.from_local(x, mesh, (Replicate(), Shard(1))) for x in (q, k, v)]
    sinks = DTensor.from_local(sink, mesh, (Replicate(), Shard(0)))
    positions, padding = torch.arange(20, device=device)[None] % 8, torch.ones(1, 20, device=device).bool()
    padding[:, :3] = False
    whole_of = [DTensor.from_local(x, mesh, (Replicate(), Replicate())) for x in (positions, padding)]
    for rows, beside, of_ranks in (
        (20, {}, {}),
        (20, {"position_ids": positions}, {"position_ids": whole_of[0]}),
        (1, {}, {}),
    ):
        options = {"is_causal": True}
        given = (qkv[0][:, :, -rows:], *qkv[1:])
        found, _ = hf.attention_forward(layer, *given, None, s_aux=sinks, **options, **of_ranks)
        want, _ = hf.attention_forward(layer, q[:, :, -rows:], k, v, None, s_aux=sink, **options, **beside)
        assert found.placements == (Replicate(), Shard(2))
        torch.testing.assert_close(found.to_local(), want, rtol=0.02, atol=0.02)
    pytest.importorskip("transformers")
    masks = [hf.attention_mask(1, 20, 20, attention_mask=x, device=device) for x in (padding, whole_of[1])]
    (want, _), (found, _) = (
        hf.attention_forward(layer, *x, mask) for x, mask in zip(((q, k, v), qkv), masks, strict=True)
    )
    assert torch.equal(found.to_local(), want)


def test_lengths_that_are_dtensors_are_checked(mesh, monkeypatch):
    rows = [local(mesh, 20, 2, 32) for _ in range(3)]
    placed = [DTensor.from_local(x, mesh, [Replicate(), Shard(1)]) for x in rows]
    packed = torch.stack(rows, 1)
    qkv = DTensor.from_local(packed, mesh, [Replicate(), Shard(2)])
    kv = DTensor.from_local(packed[:, 1:].contiguous(), mesh, [Replicate(), Shard(2)])

    def bounds(*values):
        x = torch.tensor(values, device=mesh.device_type, dtype=torch.int32)
        return x, DTensor.from_local(x, mesh, [Replicate(), Replicate()])

    (right, of_mesh), (_, wrong_of_mesh) = bounds(0, 8, 20), bounds(0, 8, 21)
    used, used_of_mesh = bounds(8, 3)
    for always in (False, True):
        monkeypatch.setattr(checks_lengths, "ALWAYS", always)
        switch = {"check_lengths": not always}
        options = {"seqused_q": used, "seqused_k": used}
        found = flash_attn_varlen_func(
            *placed, of_mesh, of_mesh, 12, 12, seqused_q=used_of_mesh, seqused_k=used, **switch
        )
        want = flash_attn_varlen_func(*rows, right, right, 12, 12, **options)
        assert torch.equal(found.to_local(), want)
        want = flash_attn_varlen_func(*rows, right, right, 12, 12)
        for found in (
            flash_attn_varlen_func(*placed, right, of_mesh, 12, 12, **switch),
            flash_attn_varlen_qkvpacked_func(qkv, of_mesh, 12, **switch),
            flash_attn_varlen_kvpacked_func(placed[0], kv, of_mesh, of_mesh, 12, 12, **switch),
        ):
            assert torch.equal(found.to_local(), want)
        with pytest.raises(IndexError, match=r"^cu_seqlens_k\[2\]: expected 8 to 20, .*got 21"):
            flash_attn_varlen_func(*placed, of_mesh, wrong_of_mesh, 13, 13, **switch)
        with pytest.raises(IndexError, match=r"^cu_seqlens\[2\]: expected 8 to 20, .*rows of qkv, got 21"):
            flash_attn_varlen_qkvpacked_func(qkv, wrong_of_mesh, 13, **switch)
        part = DTensor.from_local(right, mesh, [Shard(0), Replicate()])
        with pytest.raises(NotImplementedError, match="^cu_seqlens_q: expected a replicated DTensor"):
            flash_attn_varlen_func(*placed, part, part, 12, 12, **switch)
        with pytest.raises(NotImplementedError, match="^cu_seqlens_q: expected a tensor of this rank"):
            flash_attn_varlen_func(*rows, of_mesh, of_mesh, 12, 12, **switch)
        with pytest.raises(NotImplementedError, match="^cu_seqlens: expected a tensor of this rank"):
            flash_attn_varlen_qkvpacked_func(packed, of_mesh, 12, **switch)


def test_the_state_of_dropout_is_checked_beside_dtensors(mesh):
    parts = [local(mesh, 2, 20, 4, 64) for _ in range(3)]
    tensors = [whole(mesh, x, Shard(0), Shard(2)) for x in parts]
    with pytest.raises(TypeError, match=r"^rng_state: expected a torch\.Tensor, got str"):
        flash_attn_func(*tensors, rng_state="garbage")
    with pytest.raises(TypeError, match=r"^rng_state: expected torch\.int64"):
        flash_attn_func(*tensors, rng_state=torch.zeros(2, device=mesh.device_type))
    state = torch.zeros(2, dtype=torch.int64, device=mesh.device_type)
    of_mesh = DTensor.from_local(state, mesh, (Replicate(), Replicate()))
    want = flash_attn_func(*parts)
    for x in (state, of_mesh):
        assert torch.equal(flash_attn_func(*tensors, rng_state=x).to_local(), want)
    with pytest.raises(
        NotImplementedError, match=r"^rng_state: expected a replicated DTensor or .* got placements"
    ):
        flash_attn_func(*tensors, rng_state=DTensor.from_local(state, mesh, (Shard(0), Replicate())))


CAPPED = {"score_mod": lambda score, b, h, q_idx, kv_idx: 20 * torch.tanh(score / 20)}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    "sizes", [(2, 20, 4, 64), (1, 20, 1, 64), (2, 1, 4, 64), (1, 1, 1, 8), (2, 0, 4, 64)], ids=str
)
@pytest.mark.parametrize("functions", [*FUNCTIONS.values(), CAPPED], ids=[*FUNCTIONS, "capped"])
def test_strides_of_results_are_those_of_their_memory(name, functions, sizes, mesh):
    batch, seqlen, heads, head_dim = sizes
    rows, placements = LAYOUTS[name]
    for given, shape, call in (
        (placements, (batch, heads, seqlen, head_dim), flex_attention),
        (rows, (batch, seqlen, heads, head_dim), flash_attn_func),
    ):
        part = local(mesh, *shape)
        x = whole(mesh, part, *given)
        out = call(x, x, x, **functions)
        mine = out.to_local()
        assert torch.equal(mine, call(part, part, part, **functions))
        assert out.is_contiguous() == mine.is_contiguous()
        order, of_mine = (
            [dim for dim in sorted(range(4), key=y.stride, reverse=True) if mine.shape[dim] > 1]
            for y in (out, mine)
        )
        assert order == of_mine
        assert torch.equal(out.transpose(1, 2).contiguous().to_local(), mine.transpose(1, 2))
