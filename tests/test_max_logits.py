"""return_max_logits: the largest score of each query, without another bit of out, lse or a gradient."""

from __future__ import annotations

import inspect
import math
import random
import re
import runpy
from pathlib import Path

import pytest
import torch
from protocol.launches import recorded
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import tl_attention
from tl_attention import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flex_attention,
    launch,
)
from tl_attention.config import configs, legality
from tl_attention.config.buckets import buckets
from tl_attention.problem.attn_problem import DTYPES, AttnProblem, tile_widths
from tl_attention.problem.options import Options
from tl_attention.testing.numeric import check_fwd

gpu = pytest.mark.gpu
pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16 = torch.bfloat16
FUNCTIONS = (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
)


def naive(q, k, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """Largest score per query in fp64, [batch, heads, seqlen_q], by a loop over batch entries and heads."""
    batch, rows, heads, head_dim = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    left, right = (math.inf if x < 0 else x for x in window)
    right = 0 if causal else right
    diagonal = torch.arange(rows, device=q.device)[:, None] + keys - rows
    key = torch.arange(keys, device=q.device)
    found = torch.full((batch, heads, rows), -math.inf, dtype=torch.float64, device=q.device)
    for b in range(batch if keys else 0):
        for h in range(heads):
            scores = q[b, :, h].double() @ k[b, :, h // group].double().T * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            if slopes is not None:
                slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
                scores = scores - slope.double() * (diagonal - key).abs()
            hidden = (key < diagonal - left) | (key > diagonal + right)
            found[b, h] = scores.masked_fill(hidden, -math.inf).amax(-1)
    return found


def qkv(rows, keys, batch=2, heads=4, heads_kv=2, widths=(64, 64), device="cpu", dtype=BF16):
    sizes = (rows, heads, widths[0]), (keys, heads_kv, widths[0]), (keys, heads_kv, widths[1])
    return [torch.randn(batch, *size, device=device).to(dtype).requires_grad_() for size in sizes]


def assert_same(found, expected, rtol=1e-3):
    """Equal up to rtol, with -inf in the same places."""
    assert found.dtype == torch.float32 and not found.requires_grad and found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=rtol)


OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "scale": ({"softmax_scale": 0.7}, {"scale": 0.7}),
    "negative scale": ({"softmax_scale": -0.7, "causal": True}, {"scale": -0.7, "causal": True}),
    "scale 0": ({"softmax_scale": 0.0}, {"scale": 0.0}),
    "window": ({"window_size": (5, 2)}, {"window": (5, 2)}),
    "window left": ({"window_size": (3, -1), "causal": True}, {"window": (3, -1), "causal": True}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "sink": ({"learnable_sink": "sink"}, {}),
    "alibi": ({"alibi_slopes": "slopes"}, {"slopes": "slopes"}),
    "causal alibi": ({"alibi_slopes": "slopes", "causal": True}, {"slopes": "slopes", "causal": True}),
    "all": (
        {"alibi_slopes": "each", "softcap": 2.0, "window_size": (9, 0), "learnable_sink": "sink"},
        {"slopes": "each", "softcap": 2.0, "window": (9, 0)},
    ),
}


def options_of(name, heads, batch, device):
    """(options of the functions, of naive()) of a set."""
    tensors = {
        "sink": 5 + torch.randn(heads, device=device),  # above most scores
        "slopes": torch.rand(heads, device=device),
        "each": torch.rand(batch, heads, device=device),
    }
    return tuple(
        {key: tensors.get(x, x) if isinstance(x, str) else x for key, x in one.items()}
        for one in OPTIONS[name]
    )


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", [(20, 33), (33, 20), (7, 1), (5, 0)], ids=str)
def test_max_logits_are_the_largest_scores(name, sizes):
    torch.manual_seed(1)
    q, k, v = qkv(*sizes)
    ours, theirs = options_of(name, 4, 2, "cpu")
    expected = naive(q.detach(), k.detach(), **theirs)
    out, largest = flash_attn_func(q, k, v, **ours, return_max_logits=True)
    assert_same(largest, expected)
    want, want_lse, _ = flash_attn_func(q, k, v, **ours, return_attn_probs=True)
    got, lse, none, again = flash_attn_func(q, k, v, **ours, return_attn_probs=True, return_max_logits=True)
    assert none is None and torch.equal(again, largest)
    assert torch.equal(out, want) and torch.equal(got, want) and torch.equal(lse, want_lse)


def test_rows_without_keys_have_minus_infinity():
    q, k, v = qkv(9, 4)
    _, largest = flash_attn_func(q, k, v, causal=True, learnable_sink=torch.ones(4), return_max_logits=True)
    assert bool((largest[..., :5] == -math.inf).all()) and bool(largest[..., 5:].isfinite().all())
    for rows, keys in ((0, 4), (3, 0), (0, 0)):
        _, largest = flash_attn_func(*qkv(rows, keys), return_max_logits=True)
        assert largest.shape == (2, 4, rows) and bool((largest == -math.inf).all())


def starts(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("name", ["plain", "causal", "window", "softcap", "alibi", "all"])
def test_packed_sequences_have_those_of_each(name):
    torch.manual_seed(2)
    of_q, of_k, used_q, used_k = (5, 0, 9, 3), (7, 4, 4, 0), (4, 0, 9, 2), (7, 3, 2, 0)
    (q,), (k,), (v,) = qkv(sum(of_q) + 2, sum(of_k) + 3, batch=1)
    ours, theirs = options_of(name, 4, 4, "cpu")
    lengths = starts(*of_q), starts(*of_k), 9, 7
    used = {"seqused_q": torch.tensor(used_q).int(), "seqused_k": torch.tensor(used_k).int()}
    out, lse, _, largest = flash_attn_varlen_func(
        q, k, v, *lengths, **used, **ours, return_attn_probs=True, return_max_logits=True
    )
    expected = torch.full(lse.shape, -math.inf, dtype=torch.float64)
    slopes = theirs.pop("slopes", None)
    for b in range(4):
        rows = slice(int(lengths[0][b]), int(lengths[0][b]) + used_q[b])
        keys = slice(int(lengths[1][b]), int(lengths[1][b]) + used_k[b])
        own = slopes if slopes is None or slopes.ndim == 1 else slopes[b]
        (expected[:, rows],) = naive(q[None, rows].detach(), k[None, keys].detach(), slopes=own, **theirs)
    assert_same(largest, expected)
    want, want_lse, _ = flash_attn_varlen_func(q, k, v, *lengths, **used, **ours, return_attn_probs=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_keys_in_pages_and_out_have_those_of_packed_keys():
    torch.manual_seed(3)
    (q,), (k,), (v,) = (x.detach() for x in qkv(8, 40, batch=1))
    lengths = starts(5, 3), starts(25, 15), 5, 25
    _, expected = flash_attn_varlen_func(q, k, v, *lengths, causal=True, return_max_logits=True)
    pages = [torch.zeros(4, 16, *x.shape[1:], dtype=x.dtype) for x in (k, v)]
    for x, page in zip((k, v), pages, strict=True):
        page[2], page[0, :9], page[3, :15] = x[:16], x[16:25], x[25:]
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    asked = {"seqused_k": torch.tensor([25, 15]).int(), "block_table": table, "causal": True}

    def attend(q):
        return flash_attn_varlen_func(q, *pages, lengths[0], None, 5, 25, **asked, return_max_logits=True)

    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        _, largest = function(q)
        assert torch.equal(largest, expected)
    out = torch.empty_like(q)
    found, largest = flash_attn_varlen_func(q, k, v, *lengths, causal=True, out=out, return_max_logits=True)
    assert found is out and torch.equal(largest, expected)


def test_packed_forms_pass_it_on():
    torch.manual_seed(4)
    q, k, v = (x.detach() for x in qkv(11, 11, heads_kv=4))
    rows, lengths = [x.flatten(0, 1) for x in (q, k, v)], (starts(11, 11), starts(11, 11), 11, 11)
    expected = naive(q, k, causal=True)
    packed = expected.transpose(0, 1).flatten(1)
    asked = {"causal": True, "return_max_logits": True}
    assert_same(flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), **asked)[-1], expected)
    assert_same(flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **asked)[-1], expected)
    assert_same(flash_attn_varlen_func(*rows, *lengths, **asked)[-1], packed)
    qkv_rows, kv_rows = torch.stack(rows, 1), torch.stack(rows[1:], 1)
    assert_same(flash_attn_varlen_qkvpacked_func(qkv_rows, lengths[0], 11, **asked)[-1], packed)
    assert_same(flash_attn_varlen_kvpacked_func(rows[0], kv_rows, *lengths, **asked)[-1], packed)
    for function in FUNCTIONS:
        parameter = inspect.signature(function).parameters["return_max_logits"]
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is False
        assert "return_max_logits: also return the largest score" in " ".join(function.__doc__.split())


def test_gradients_are_those_without_it():
    torch.manual_seed(5)
    tensors = qkv(12, 15)
    sink = torch.randn(4, requires_grad=True)
    found = []
    for asked in ({}, {"return_max_logits": True}):
        out, lse, *_ = flash_attn_func(
            *tensors, causal=True, learnable_sink=sink, return_attn_probs=True, **asked
        )
        found.append(torch.autograd.grad(out.float().square().sum() + lse.sum(), [*tensors, sink]))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


def score_of_head(score, b, h, q, k):
    return score * 0.5 + h


def early(b, h, q, k):
    return (q >= k) & (q > 2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", ["score_mod", "mask_mod", "block_mask", "causal", "learned"])
def test_flex_attention_has_max_scores(how, compiled):
    torch.manual_seed(6)
    torch._dynamo.reset()
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in qkv(20, 20, dtype=torch.float32))
    bias = torch.randn(4, requires_grad=True)
    functions = {
        "score_mod": {"score_mod": score_of_head},
        "mask_mod": {"score_mod": score_of_head, "mask_mod": early},
        "block_mask": {"block_mask": create_block_mask(early, None, None, 20, 20, device="cpu")},
        "causal": {"mask_mod": lambda b, h, q, k: q >= k},
        "learned": {"score_mod": lambda s, b, h, q, k: s + bias[h]},
    }[how]
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double().repeat_interleave(2, 1)) / 8
    if "score_mod" in functions:
        of_head = torch.arange(4.0)[:, None, None]
        scores = scores + bias.double()[:, None, None] if how == "learned" else scores * 0.5 + of_head
    rows, keys = torch.arange(20)[:, None], torch.arange(20)
    if how != "score_mod" and how != "learned":
        scores = scores.masked_fill(rows < keys, -math.inf)
        if how != "causal":
            scores = scores.masked_fill(rows <= 2, -math.inf)

    def attend(q, k, v, **asked):
        return flex_attention(q, k, v, enable_gqa=True, precision="highest", **functions, **asked)

    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    out, aux = run(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
    assert_same(aux.max_scores, scores.detach().amax(-1), 1e-5)
    want, lse = attend(q, k, v, return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(aux.lse, lse)
    learned = [q, k, v, *([bias] if how == "learned" else [])]
    grads = (torch.autograd.grad(x.square().sum(), learned, retain_graph=True) for x in (out, want))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y)
    alone = run(q, k, v, return_aux=AuxRequest(max_scores=True))[1]
    assert alone.lse is None and torch.equal(alone.max_scores, aux.max_scores)


def test_functions_of_flash_attn_func_have_them():
    q, k, v = qkv(9, 9)
    out, largest = flash_attn_func(q, k, v, score_mod=score_of_head, return_max_logits=True)
    expected = naive(q.detach(), k.detach()) * 0.5 + torch.arange(4)[:, None]
    assert_same(largest, expected)
    assert out.requires_grad


def test_compiled_calls_have_them_without_a_break():
    torch.manual_seed(7)
    torch._dynamo.reset()
    tensors = qkv(10, 13)

    def attend(q, k, v):
        return flash_attn_func(q, k, v, causal=True, return_attn_probs=True, return_max_logits=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    out, lse, _, largest = compiled(*tensors)
    want, want_lse, _, expected = attend(*tensors)
    assert torch.equal(largest, expected) and not largest.requires_grad
    loss, want_loss = out.float().sum() + lse.sum(), want.float().sum() + want_lse.sum()
    for x, y in zip(*(torch.autograd.grad(z, tensors) for z in (loss, want_loss)), strict=True):
        torch.testing.assert_close(x, y)


OP = torch.ops.tl_attention.fwd_max_logits


@pytest.mark.parametrize("heads_first", [False, True])
def test_op_passes_opcheck(heads_first):
    tensors = qkv(5, 7)
    if heads_first:
        tensors = [x.detach().transpose(1, 2).requires_grad_() for x in tensors]
    torch.library.opcheck(OP.default, (*tensors, 0.125, True, False, heads_first, False))


def test_packed_op_passes_opcheck():
    (q,), (k,), (v,) = (x.detach() for x in qkv(8, 9, batch=1))
    options = Options(
        cu_seqlens_q=starts(5, 3), cu_seqlens_k=starts(5, 4), max_seqlen_q=5, max_seqlen_k=5
    ).arguments()
    arguments = 0.125, True, False, False, False, *options
    torch.library.opcheck(OP.default, (q, k, v, *arguments))
    op = torch.ops.tl_attention.fwd_packed_max_logits.default
    utilities = "test_schema", "test_faketensor"
    torch.library.opcheck(op, (q, k, v, None, torch.empty_like(q), *arguments), test_utils=utilities)


def test_ops_without_it_have_their_old_outputs():
    """Exported programs hold them."""
    for name in ("fwd", "fwd_packed", "flex"):
        op = getattr(torch.ops.tl_attention, name).default
        assert [str(x.type) for x in op._schema.returns] == ["Tensor", "Tensor"]
    before, after = (str(op.default._schema).partition("(")[2] for op in (torch.ops.tl_attention.fwd, OP))
    assert after == before.replace("-> (Tensor, Tensor)", "-> (Tensor, Tensor, Tensor)")


def test_vmap_and_grad_of_torch_func():
    torch.manual_seed(8)
    q, k, v = (torch.stack([x.detach()] * 3) * torch.rand(3, 1, 1, 1, 1).to(BF16) for x in qkv(6, 8))

    def attend(q, k, v):
        return flash_attn_func(q, k, v, causal=True, return_max_logits=True)

    _, largest = torch.func.vmap(attend)(q, k, v)
    assert torch.equal(largest, torch.stack([attend(*x)[1] for x in zip(q, k, v, strict=True)]))

    def loss(q, k, v):
        out, largest = attend(q, k, v)
        return out.float().sum(), largest

    grads, largest = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(q[0], k[0], v[0])
    leaves = [x[0].requires_grad_() for x in (q, k, v)]
    for x, y in zip(grads, torch.autograd.grad(attend(*leaves)[0].float().sum(), leaves), strict=True):
        assert torch.equal(x, y)
    (of_each,) = torch.func.vmap(torch.func.grad(lambda q: loss(q, k[0], v[0])[0]))(q[:1])
    assert torch.equal(of_each, grads[0])


def test_forward_mode_refuses_it_by_name():
    q, k, v = (x.detach() for x in qkv(4, 4))

    def attend(q):
        return flash_attn_func(q, k, v, return_max_logits=True)[0]

    with pytest.raises(
        NotImplementedError, match="^return_max_logits: expected False in a forward-mode.* of q.detach"
    ):
        torch.func.jvp(attend, (q,), (q,))


def test_a_call_of_detached_tensors_has_it_in_forward_mode():
    """As the error of a call inside asks; torch.no_grad() leaves tangents as they are."""
    q = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)

    def attend(q):
        own = q.detach()
        return flash_attn_func(q, q, q), flash_attn_func(own, own, own, return_max_logits=True)[1]

    (_, largest), (moved, along) = torch.func.jvp(attend, (q,), (q,))
    assert torch.equal(largest, flash_attn_func(q, q, q, return_max_logits=True)[1])
    assert moved.any() and not along.any()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("value", ["yes", 1, None])
def test_wrong_values_are_named(function, value):
    packed = "varlen" in function.__name__
    rows = torch.zeros(*([8] if packed else [2, 4]), 2, 64, dtype=BF16)
    tensors = {
        "qkv": [torch.stack([rows] * 3, -3)],
        "kv": [rows, torch.stack([rows] * 2, -3)],
        "": [rows] * 3,
    }
    form = re.search(r"(qkv|kv|)(packed|)_func", function.__name__)[1]
    ends = starts(3, 5)
    lengths = ([ends, 5] if form == "qkv" else [ends, ends, 5, 5]) if packed else []
    with pytest.raises(TypeError, match="^return_max_logits: expected a bool"):
        function(*tensors[form], *lengths, return_max_logits=value)


def test_splits_are_refused():
    q, k, v = qkv(4, 4)
    with pytest.raises(ValueError, match="^num_splits: expected 0 or 1 with return_max_logits"):
        flash_attn_func(q, k, v, num_splits=2, return_max_logits=True)
    assert len(flash_attn_func(q, k, v, num_splits=1, return_max_logits=True)) == 2
    assert len(flash_attn_func(q, k, v, batch_invariant=True, return_max_logits=True)) == 2


def test_functions_without_it_refuse_the_keyword():
    q, k, v = (x.detach() for x in qkv(1, 4))
    with pytest.raises(TypeError, match="return_max_logits"):
        tl_attention.flash_attn_with_kvcache(q, k, v, return_max_logits=True)


SPREAD = [
    AttnProblem(dtype, *width, causal)
    for dtype in DTYPES
    for width in tile_widths("fwd", dtype)
    for causal in (False, True)
]


@pytest.mark.parametrize("problem", SPREAD, ids=str)
def test_each_config_has_a_legal_form_that_stores_the_max(problem):
    tables = [[path] for path in configs.shipped_tables().values()]
    found = [
        (problem, configs.config_of_tables(problem, bucket, table))
        for table in tables
        for bucket in buckets("fwd")
        if bucket != "split"
    ]
    for options in (
        ("varlen",),
        ("softcap",),
        ("alibi",),
        ("alibi", "sink", "dropout", "varlen"),
        ("window", "alibi", "sink", "dropout", "placed"),
    ):
        served = AttnProblem.of(*_of(problem), options=options)
        found.append((served, configs.option_config(served, "4k")))
    for served, config in found:
        stored = config.storing_max
        assert stored.max_logits and not (stored.hold_max or stored.schedule == "stream-K")
        assert legality.fault(served, stored) is None
        assert str(stored).endswith("max-logits") or "terms" in str(stored)
        assert stored.storing_max == stored


def _of(problem):
    return problem.dtype, problem.head_dim, problem.head_dim_v, problem.causal


def test_kernel_with_splits_or_a_held_max_is_not_legal():
    problem = AttnProblem("bfloat16", 128, 128, False)
    config = configs.default_config(problem)
    held = config.__class__(128, 128, schedule="persistent", hold_max=True, max_logits=True)
    for fault in (legality.fault(problem, x) for x in (held, configs.split_config(config.storing_max))):
        assert fault.startswith("max_logits: expected False with hold_max, split or stream-K")


@pytest.mark.parametrize("packed", [False, True])
def test_launch_has_the_kernel_that_stores_them_as_its_last_argument(packed):
    q, k, v = (x.detach() for x in qkv(2, 3000, batch=1))  # a few queries and many keys: splits without it
    options = None
    if packed:
        (q,), (k,), (v,) = q, k, v
        lengths = {"cu_seqlens_q": starts(2), "cu_seqlens_k": starts(3000)}
        options = Options(**lengths, max_seqlen_q=2, max_seqlen_k=3000)
    layout = 0.1, False, False, False
    split = recorded(lambda: launch.forward(q, k, v, *layout, options=options), 132)
    whole = recorded(lambda: launch.forward(q, k, v, *layout, options=options, max_logits=True), 132)
    assert any(getattr(x.config, "split", False) for x in split)
    kernel = next(x for x in whole if getattr(x.config, "max_logits", False))
    assert not kernel.config.split and kernel.arguments[-1].shape == kernel.arguments[4].shape
    assert not any(getattr(x.config, "max_logits", False) for x in split)


def test_example_clips_the_scores(monkeypatch, capsys):
    path = Path(__file__).parents[1] / "examples/qk_clip.py"
    monkeypatch.setattr("sys.argv", [str(path), "--steps", "4", "--threshold", "3"])
    runpy.run_path(str(path), run_name="__main__")
    lines = re.findall(r"largest scores (.*)", capsys.readouterr().out)
    assert len(lines) == 4 and all(float(x) < 3.1 for x in lines[-1].split(", "))
    assert any(float(x) > 3.5 for x in lines[0].split(", "))


WIDTHS = (64, 64), (128, 128), (192, 128), (256, 256)
GPU_DTYPES = {
    "bf16": (BF16, None),
    "fp16": (torch.float16, None),
    "fp32": (torch.float32, "highest"),
    "fp32-high": (torch.float32, "high"),
}
# Error of the largest score over max(1, the largest one), and of out over its largest value, by precision
FP32_ERRORS = {"highest": (4e-6, 4e-6), "high": (2e-4, 2e-4)}


FEW = "causal", "scale 0", "all"  # options of the dtypes and head dims whose kernels take long to compile
DENSE = [
    (name, dtype, widths)
    for widths in WIDTHS
    for dtype in GPU_DTYPES
    for name in (OPTIONS if dtype == "bf16" and widths in WIDTHS[:2] else FEW)
]


@gpu
@pytest.mark.parametrize(("name", "dtype", "widths"), DENSE, ids=str)
def test_kernels_store_the_largest_scores(name, dtype, widths):
    rng = random.Random(f"{name} {dtype} {widths}")
    torch.manual_seed(rng.randrange(2**31))
    dtype, precision = GPU_DTYPES[dtype]
    for rows, keys in ((rng.randint(1, 700), rng.randint(1, 1500)), (64, 128), (rng.randint(200, 900), 130)):
        batch, heads_kv = rng.randint(1, 3), rng.choice((1, 2))
        q, k, v = (x.detach() for x in qkv(rows, keys, batch, 2 * heads_kv, heads_kv, widths, "cuda", dtype))
        ours, theirs = options_of(name, 2 * heads_kv, batch, "cuda")
        out, lse, _, largest = flash_attn_func(
            q, k, v, **ours, precision=precision, return_attn_probs=True, return_max_logits=True
        )
        expected = naive(q, k, **theirs)
        if precision is None:
            assert_same(largest, expected, 1e-3)
            _check(out, lse, largest, q, k, v, ours)
            continue
        allowed, _ = FP32_ERRORS[precision]
        peak = max(1.0, float(expected[expected.isfinite()].abs().max())) if expected.isfinite().any() else 1
        assert torch.equal(largest == -math.inf, expected == -math.inf)
        seen = expected.isfinite()
        assert float((largest[seen] - expected[seen]).abs().max() if seen.any() else 0) <= allowed * peak
        plain, plain_lse, _ = flash_attn_func(q, k, v, **ours, precision=precision, return_attn_probs=True)
        torch.testing.assert_close(out, plain, rtol=1e-3, atol=allowed)
        torch.testing.assert_close(lse, plain_lse, rtol=1e-4, atol=1e-3)


def _check(out, lse, largest, q, k, v, options, **lengths):
    """Compare with the reference by the error rule."""
    given = {
        {"window_size": "window", "learnable_sink": "sink"}.get(key, key): x for key, x in options.items()
    }
    scale, causal = given.pop("softmax_scale", None), given.pop("causal", False)
    result = check_fwd(out, lse, q, k, v, scale, causal, max_logits=largest, **given, **lengths)
    assert result.ok, result.text


PACKED = [
    (name, widths, paged)
    for widths in WIDTHS
    for paged in (False, True)
    for name in (
        ("plain", "causal", "window", "softcap", "sink", "alibi", "all") if widths == (128, 128) else FEW
    )
]


@gpu
@pytest.mark.parametrize(("name", "widths", "paged"), PACKED, ids=str)
def test_kernels_of_packed_sequences_store_them(name, widths, paged):
    rng = random.Random(f"{name} {widths} {paged}")
    torch.manual_seed(rng.randrange(2**31))
    of_q = [rng.choice((0, 1, rng.randint(1, 400))) for _ in range(5)] + [130]
    of_k = [rng.choice((0, rng.randint(1, 900))) for _ in range(5)] + [257]
    used_q, used_k = ([rng.randint(n // 2, n) for n in x] for x in (of_q, of_k))
    (q,), (k,), (v,) = (x.detach() for x in qkv(sum(of_q) + 5, sum(of_k) + 9, 1, 4, 2, widths, "cuda"))
    ours, _ = options_of(name, 4, 6, "cuda")
    on_gpu = [x.cuda() for x in (starts(*of_q), starts(*of_k))]
    seqused = [torch.tensor(x, dtype=torch.int32) for x in (used_q, used_k)]
    asked = {"seqused_q": seqused[0].cuda(), "seqused_k": seqused[1].cuda()}
    keys, cu_k = (k, v), on_gpu[1]
    if paged:
        keys, asked["block_table"] = _in_pages(k, v, starts(*of_k), used_k)
        cu_k = None
    for _ in range(2):  # the second call has a known signature
        out, lse, _, largest = flash_attn_varlen_func(
            q, *keys, on_gpu[0], cu_k, max(of_q), max(of_k), **asked, **ours, return_attn_probs=True,
            return_max_logits=True,
        )  # fmt: skip
        lengths = {"cu_seqlens_q": starts(*of_q), "cu_seqlens_k": starts(*of_k)}
        lengths |= {"seqused_q": seqused[0], "seqused_k": seqused[1]}
        _check(out, lse, largest, q, k, v, ours, **lengths)
    assert bool((largest[:, sum(of_q) :] == -math.inf).all())


def _in_pages(k, v, cu, used, page=64):
    """Keys and values in pages, and their table."""
    counts = [-(-n // page) for n in used]
    table = torch.zeros(len(used), max(*counts, 1), dtype=torch.int32)
    pages = [x.new_zeros(sum(counts) + 1, page, *x.shape[1:]) for x in (k, v)]
    number = 0
    for b, n in enumerate(used):
        for i in range(counts[b]):
            rows = slice(int(cu[b]) + i * page, int(cu[b]) + min((i + 1) * page, n))
            for x, of in zip(pages, (k, v), strict=True):
                x[number, : rows.stop - rows.start] = of[rows]
            table[b, i] = number
            number += 1
    return pages, table.cuda()


@gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_scores_far_above_the_first_ones_are_stored(dtype):
    """The row max that the softmax subtracts follows in steps of 2 ** 8, or is held."""
    torch.manual_seed(9)
    q, k, v = (x.detach() for x in qkv(300, 2000, 2, 4, 2, device="cuda", dtype=dtype))
    for ramp in (torch.linspace(1, 20, 2000), torch.linspace(20, 1, 2000), torch.linspace(1, 1.5, 2000)):
        ramped = k * ramp.to(dtype).cuda()[:, None, None]
        for causal in (False, True):
            _, largest = flash_attn_func(q, ramped, v, causal=causal, return_max_logits=True)
            assert_same(largest, naive(q, ramped, causal=causal))


@gpu
def test_gradients_on_a_gpu_are_those_without_it():
    torch.manual_seed(10)
    tensors = qkv(300, 500, device="cuda")
    found = []
    for asked in ({}, {"return_max_logits": True}):
        for _ in range(2):
            out, lse, *_ = flash_attn_func(
                *tensors, causal=True, deterministic=True, return_attn_probs=True, **asked
            )
        dout = torch.ones_like(out)
        found.append((out.detach(), lse.detach(), *torch.autograd.grad(out, tensors, dout)))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=2e-2, atol=2e-2)


@gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("width", [64, 128])
def test_flex_kernels_store_them(dtype, width):
    torch.manual_seed(11)
    rows, keys = 333, 700
    q, k, v = (
        x.detach().transpose(1, 2).requires_grad_()
        for x in qkv(rows, keys, widths=(width, width), device="cuda", dtype=dtype)
    )
    table = torch.rand(keys, device="cuda")
    documents = (torch.arange(keys, device="cuda") * 7 // keys).int()

    def shifted(score, b, h, q, k):
        return score * 0.5 + table[k]

    def same(b, h, q, k):
        return documents[q] == documents[k]

    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * width**-0.5
    changed = scores * 0.5 + table.double()
    seen = documents[:rows, None] == documents
    mask = create_block_mask(same, None, None, rows, keys, device="cuda")
    for functions, expected in (
        ({"score_mod": shifted}, changed),
        ({"mask_mod": same}, scores.masked_fill(~seen, -math.inf)),
        ({"block_mask": mask}, scores.masked_fill(~seen, -math.inf)),
        ({"score_mod": shifted, "block_mask": mask}, changed.masked_fill(~seen, -math.inf)),
    ):
        asked = {"enable_gqa": True, **functions}
        if dtype == torch.float32:
            asked["precision"] = "high"
        out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True), **asked)
        assert_same(aux.max_scores, expected.detach().amax(-1))
        want, lse = flex_attention(q, k, v, return_lse=True, **asked)
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(aux.lse, lse, rtol=1e-3, atol=1e-3)
        torch.autograd.grad(out.float().sum(), (q, k, v))


@gpu
@pytest.mark.parametrize("widths", WIDTHS[:3], ids=str)
def test_batch_invariant_keeps_the_bits_of_out(widths):
    torch.manual_seed(12)
    q, k, v = (x.detach() for x in qkv(200, 900, 3, widths=widths, device="cuda"))
    asked = {"causal": True, "batch_invariant": True, "return_attn_probs": True}
    out, lse, _ = flash_attn_func(q, k, v, **asked)
    same, same_lse, _, largest = flash_attn_func(q, k, v, **asked, return_max_logits=True)
    assert torch.equal(out, same) and torch.equal(lse, same_lse)
    one = flash_attn_func(q[1:2], k[1:2], v[1:2], **asked, return_max_logits=True)[-1]
    assert torch.equal(one[0], largest[1])


@gpu
def test_max_scores_are_those_of_pytorch():
    """Its CPU form has none."""
    torch.manual_seed(13)
    tensors = [x.detach().transpose(1, 2) for x in qkv(200, 300, heads_kv=4, device="cuda")]
    for functions in ({}, {"score_mod": score_of_head}):
        ours, theirs = (
            function(*tensors, **functions, return_aux=AuxRequest(max_scores=True))[1].max_scores
            for function in (flex_attention, torch_flex_attention)
        )
        torch.testing.assert_close(ours, theirs.float(), rtol=2e-2, atol=2e-2)
