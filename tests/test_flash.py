"""FlashAttention's functions: each option and form against a plain formula in fp64, and their ops in PyTorch."""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tl_attention
from tl_attention import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from tl_attention.api import flash, kvcache
from tl_attention.config.costs import costs_of
from tl_attention.problem.options import (
    Options,
    canonical_window,
    rows_in_use,
)
from tl_attention.problem.request import Request
from tl_attention.reference import dropout_keep, rounded_dropout
from tl_attention.torch_ops import ops

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16 = torch.bfloat16
BATCH, HEADS, HEADS_KV, HEAD_DIM, HEAD_DIM_V = 2, 4, 2, 64, 32


def naive(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, slopes=None, sink=None, keep=None, p=0.0):
    """(out [seqlen_q, heads, head_dim_v], lse [heads, seqlen_q]) of one sequence, by definition."""
    (seqlen_q, heads, head_dim), seqlen_k = q.shape, k.shape[0]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    beyond = torch.arange(seqlen_k) - (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)
    beyond = beyond.to(q.device)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * beyond.abs()
    left, right = (math.inf if x in (-1, None) else x for x in window_size)
    scores = scores.masked_fill((beyond > (0 if causal else right)) | (beyond < -left), -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[:, None, None].expand(-1, seqlen_q, 1)], -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()[..., :seqlen_k]
    if keep is not None:
        weights = weights * keep / (1 - rounded_dropout(p) / 256)
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def formula(q, k, v, lengths, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, learnable_sink=None,
            dropout_p=0.0, rng_state=None):  # fmt: skip
    """naive per sequence. lengths: [(first query, queries, first key, keys)]; q, k, v and out are [total, heads, columns]."""
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf)
    keep = None
    if dropout_p:
        longest = max(n for _, n, _, _ in lengths), max(n for _, _, _, n in lengths)
        keep = dropout_keep(rng_state, len(lengths), q.shape[1], *longest, dropout_p)
    for i, (first_q, len_q, first_k, len_k) in enumerate(lengths):
        rows, keys = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        slopes = alibi_slopes[i] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        kept = None if keep is None else keep[i, :, :len_q, :len_k]
        one = naive(
            q[rows], k[keys], v[keys], causal, window_size, softcap, slopes, learnable_sink, kept, dropout_p
        )
        out[rows], lse[:, rows] = one
    return out, lse


def options(device, batch=BATCH):
    def values(*shape):
        return torch.linspace(0.05, 1.5, math.prod(shape), device=device).view(shape)

    rng_state = torch.tensor([2**40 + 7, 3], device=device)
    dropout = {"dropout_p": 0.3, "rng_state": rng_state}
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window_size": (5, 3)},
        "window-left": {"window_size": [4, None]},
        "window-right": {"window_size": (-1, 2)},
        "window-causal": {"window_size": (6, 6), "causal": True},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": values(HEADS), "causal": True},
        "alibi-of-each": {"alibi_slopes": values(batch, HEADS)},
        "sink": {"learnable_sink": values(HEADS), "causal": True},
        "sink-bf16": {"learnable_sink": values(HEADS).to(BF16)},
        "dropout": dropout,
        "everything": {
            "window_size": (9, 0), "softcap": 2.0, "alibi_slopes": values(batch, HEADS) / 4,
            "learnable_sink": values(HEADS), **dropout,
        },
    }  # fmt: skip


names = pytest.mark.parametrize("name", options("cpu"))


def leaves(device, *sizes):
    return [torch.randn(size, dtype=BF16, device=device).requires_grad_() for size in sizes]


def assert_close(name, actual, expected):
    assert actual.shape == expected.shape, name
    seen = expected != -math.inf
    assert torch.equal(actual == -math.inf, ~seen), name
    error = torch.where(seen, actual.double() - expected, 0).abs()
    peak = torch.where(seen, expected, 0).abs().amax() if expected.numel() else 0
    assert not error.numel() or error.max() <= 0.02 * peak + 1e-6, (
        f"{name}: {error.max():.3g} beside {peak:.3g}"
    )


def compare(function, expected, inputs, sink):
    """Compare outputs, and gradients through both of them. expected takes inputs and the sink in fp64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    sinks = [] if sink is None else [sink.detach().clone().requires_grad_()]
    exact_sinks = [x.detach().double().requires_grad_() for x in sinks]
    outputs = function(*inputs, *sinks)
    wanted = expected(*exact, *exact_sinks)
    for name, x, y in zip(("out", "lse"), outputs, wanted, strict=True):
        assert_close(name, x, y)
    assert outputs[0].dtype == BF16 and outputs[1].dtype == torch.float32
    seen = wanted[1] > -math.inf
    weights = [torch.randn_like(wanted[0]).to(BF16), torch.randn_like(wanted[1]).float().where(seen, 0)]
    grads = torch.autograd.grad(outputs, [*inputs, *sinks], weights)
    wanted = torch.autograd.grad(wanted, [*exact, *exact_sinks], [x.double() for x in weights])
    for i, (x, y) in enumerate(zip(grads, wanted, strict=True)):
        assert_close(f"gradient of input {i}", x, y)
    for x, of in zip(grads, [*inputs, *sinks], strict=True):
        assert x.dtype == of.dtype


DENSE = {"more-keys": (9, 20), "rows-without-keys": (20, 9)}


def with_sink(arguments, sink):
    return arguments | ({"learnable_sink": sink[0]} if sink else {})


def dense(arguments, seqlen_q, seqlen_k):
    """formula for [batch, seqlen, heads, columns] tensors."""

    def of(q, k, v, *sink):
        lengths = [(i * seqlen_q, seqlen_q, i * seqlen_k, seqlen_k) for i in range(q.shape[0])]
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = formula(*flat, lengths, **with_sink(arguments, sink))
        return out.unflatten(0, (q.shape[0], -1)), lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1)

    return of


@names
@pytest.mark.parametrize("lengths", DENSE.values(), ids=DENSE)
def test_dense(name, lengths, device):
    arguments, (seqlen_q, seqlen_k) = options(device)[name], lengths
    inputs = leaves(
        device,
        (BATCH, seqlen_q, HEADS, HEAD_DIM),
        (BATCH, seqlen_k, HEADS_KV, HEAD_DIM),
        (BATCH, seqlen_k, HEADS_KV, HEAD_DIM_V),
    )

    def function(q, k, v, *sink):
        return flash_attn_func(q, k, v, **with_sink(arguments, sink), return_attn_probs=True)[:2]

    compare(function, dense(arguments, *lengths), inputs, arguments.get("learnable_sink"))


# Rows of q and of k per sequence, and how many of them are used
LENGTHS = {
    "uneven": ([3, 20, 1, 9], [10, 20, 1, 4], None, None),
    "zero-length": ([0, 7, 5, 0], [4, 0, 6, 0], None, None),
    "seqused": ([6, 12, 4, 3], [9, 12, 5, 3], [5, 0, 4, 2], [7, 12, 0, 3]),
    "seqused-k": ([6, 12], [9, 12], None, [7, 2]),
    "none": ([], [], None, None),
}


def cumulative(rows, device):
    return torch.tensor([0, *rows], device=device).cumsum(0).int()


def of_sequences(rows_q, rows_k, used_q, used_k):
    """Lengths in the form that formula takes."""
    firsts = zip(cumulative(rows_q, "cpu").tolist(), cumulative(rows_k, "cpu").tolist(), strict=True)
    used = zip(used_q or rows_q, used_k or rows_k, strict=True)
    return [(q, len_q, k, len_k) for (q, k), (len_q, len_k) in zip(firsts, used, strict=False)]


@names
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_varlen(name, lengths, device):
    rows_q, rows_k, *used = lengths
    arguments = options(device, len(rows_q))[name]
    inputs = leaves(
        device,
        (sum(rows_q), HEADS, HEAD_DIM),
        (sum(rows_k), HEADS_KV, HEAD_DIM),
        (sum(rows_k), HEADS_KV, HEAD_DIM_V),
    )
    cu = [cumulative(rows, device) for rows in (rows_q, rows_k)]
    longest = [max(rows, default=0) for rows in (rows_q, rows_k)]
    seqused = dict(
        zip(
            ("seqused_q", "seqused_k"),
            (None if x is None else torch.tensor(x, device=device).int() for x in used),
            strict=True,
        )
    )

    def function(q, k, v, *sink):
        extra = with_sink(arguments, sink) | seqused
        return flash_attn_varlen_func(q, k, v, *cu, *longest, **extra, return_attn_probs=True)[:2]

    def expected(q, k, v, *sink):
        return formula(q, k, v, of_sequences(*lengths), **with_sink(arguments, sink))

    if rows_q:
        compare(function, expected, inputs, arguments.get("learnable_sink"))
    else:
        out, lse = function(*inputs)
        assert out.shape == (0, HEADS, HEAD_DIM_V) and lse.shape == (HEADS, 0)


PACKED = {  # inputs, the function, the unpacked function that it equals
    "qkv": ([(BATCH, 13, 3, HEADS, HEAD_DIM)], flash_attn_qkvpacked_func, flash_attn_func),
    "kv": ([(BATCH, 7, HEADS, HEAD_DIM), (BATCH, 13, 2, HEADS_KV, HEAD_DIM)], flash_attn_kvpacked_func, flash_attn_func),
    "varlen-qkv": ([(20, 3, HEADS, HEAD_DIM)], flash_attn_varlen_qkvpacked_func, flash_attn_varlen_func),
    "varlen-kv": (
        [(17, HEADS, HEAD_DIM), (20, 2, HEADS_KV, HEAD_DIM)], flash_attn_varlen_kvpacked_func, flash_attn_varlen_func,
    ),
}  # fmt: skip


@names
@pytest.mark.parametrize("form", PACKED)
def test_packed_forms_equal_their_slices(form, name, device):
    sizes, function, plain = PACKED[form]
    inputs, arguments = leaves(device, *sizes), options(device)[name]
    slices = [part for x in inputs for part in (x.unbind(-3) if x.shape[-3] in (2, 3) else [x])]
    lengths = []
    if "varlen" in form:
        cu_q, cu_k = (torch.tensor([0, 5, x.shape[0]], device=device).int() for x in (slices[0], slices[1]))
        lengths = [cu_q, cu_k, 15, 15]
    packed_lengths = lengths[::2] if form == "varlen-qkv" else lengths
    results = []
    for attend, tensors, more in ((function, inputs, packed_lengths), (plain, slices, lengths)):
        out, lse, _ = attend(*tensors, *more, **arguments, return_attn_probs=True)
        grads = torch.autograd.grad((out.float() ** 2).sum() + lse.clamp(-50).sum(), inputs)
        results.append((out, lse, *grads))
    assert all(x.is_contiguous() for x in results[0][2:])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)


FA2 = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
OURS = "learnable_sink rng_state precision"
CU = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": (
        f"q k v {FA2}",
        f"{OURS} num_splits batch_invariant return_max_logits score_mod mask_mod block_mask attn_bias",
    ),
    "flash_attn_qkvpacked_func": (f"qkv {FA2}", f"{OURS} batch_invariant return_max_logits"),
    "flash_attn_kvpacked_func": (f"q kv {FA2}", f"{OURS} batch_invariant return_max_logits"),
    "flash_attn_varlen_func": (
        f"q k v {CU} {FA2} block_table",
        f"seqused_q seqused_k {OURS} num_splits batch_invariant return_max_logits check_lengths out",
    ),
    "flash_attn_varlen_qkvpacked_func": (
        f"qkv cu_seqlens max_seqlen {FA2}",
        f"{OURS} batch_invariant return_max_logits check_lengths",
    ),
    "flash_attn_varlen_kvpacked_func": (
        f"q kv {CU} {FA2}",
        f"{OURS} batch_invariant return_max_logits check_lengths",
    ),
}
DEFAULTS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None,
    "deterministic": False, "return_attn_probs": False, "block_table": None, "num_splits": 0, "batch_invariant": False,
    "return_max_logits": False,
    "check_lengths": False,
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_match_flash_attention_2_and_ours_are_keyword_only(name):
    parameters = inspect.signature(getattr(tl_attention, name)).parameters
    positional, keywords = SIGNATURES[name]
    assert list(parameters) == f"{positional} {keywords} unknown".split()
    for parameter in list(parameters.values())[:-1]:
        wanted = (
            parameter.KEYWORD_ONLY if parameter.name in keywords.split() else parameter.POSITIONAL_OR_KEYWORD
        )
        assert parameter.kind == wanted
        if parameter.name in DEFAULTS:
            assert parameter.default == DEFAULTS[parameter.name]
        elif wanted == parameter.KEYWORD_ONLY:
            assert parameter.default is None


class _Seen(Exception):
    pass


@pytest.mark.parametrize("name", [x for x in tl_attention.__all__ if x.startswith("flash_attn_")])
def test_every_option_reaches_the_request(name, monkeypatch):
    def new_request(*values, **options):
        raise _Seen(dict(zip(Request._fields, values, strict=False)) | options)

    monkeypatch.setattr(kvcache if name == "flash_attn_with_kvcache" else flash, "new_request", new_request)
    function = getattr(tl_attention, name)
    q, rows = torch.zeros(2, 8, 1, 8), (8,) if "varlen" in name else (2, 8)
    passed = {"qkv": torch.zeros(*rows, 3, 1, 8), "kv": torch.zeros(*rows, 2, 1, 8)}
    wanted = {}
    for x in list(inspect.signature(function).parameters.values())[:-1]:
        if x.default is inspect.Parameter.empty:
            passed.setdefault(x.name, q)
        elif x.name in Request._fields and x.name not in "kv":  # new keys of a cache
            wanted[x.name] = f"{x.name} of the caller"
    takes = inspect.signature(function).parameters
    with pytest.raises(_Seen) as seen:
        function(**{key: x for key, x in passed.items() if key in takes}, **wanted)
    (request,) = seen.value.args
    assert "batch_invariant" in wanted and {x: request[x] for x in wanted} == wanted


def test_each_mask_has_one_spelling():
    off = (-1, -1)
    assert canonical_window(False, (-1, None)) == (False, off)
    assert canonical_window(True, off) == canonical_window(False, (None, 0)) == (True, off)
    assert canonical_window(True, [-1, 5]) == (True, off)
    assert canonical_window(True, (7, -1)) == canonical_window(False, (7, 0)) == (False, (7, 0))
    assert canonical_window(False, (0, 3)) == (False, (0, 3))
    assert canonical_window(False, (2**62, 1)) == (False, (2**30, 1))


def test_num_splits_does_not_change_the_result(device):
    assert Options(num_splits=3).names == () and not Options(num_splits=3).is_off
    inputs = leaves(device, (1, 9, 2, 64), (1, 200, 2, 64), (1, 200, 2, 64))
    results = []
    for num_splits in (0, 1, 3):
        out, lse, _ = flash_attn_func(*inputs, causal=True, num_splits=num_splits, return_attn_probs=True)
        results.append((out, lse, *torch.autograd.grad(out.float().sum() + lse.sum(), inputs)))
    for one in results[1:]:
        torch.testing.assert_close(one, results[0], rtol=0.02, atol=0.01)


def test_num_splits_does_not_change_the_result_of_packed_sequences(device):
    """Unused rows have out 0 and lse -inf, though splits write nothing there."""
    cu_q, cu_k = cumulative([9, 200, 0], device), cumulative([300, 200, 7], device)
    used = [torch.tensor(x, device=device).int() for x in ([9, 150, 0], [0, 170, 7])]
    inputs = leaves(device, (215, 2, 64), (510, 2, 64), (510, 2, 64))
    results = []
    for num_splits in (0, 1, 3):
        out, lse, _ = flash_attn_varlen_func(
            *inputs, cu_q, cu_k, 200, 300, causal=True, num_splits=num_splits, return_attn_probs=True,
            seqused_q=used[0], seqused_k=used[1],
        )  # fmt: skip
        finite = lse.masked_fill(lse == -math.inf, 0)
        results.append((out, lse, *torch.autograd.grad(out.float().sum() + finite.sum(), inputs)))
    assert (results[2][0][159:] == 0).all() and (results[2][1][:, 159:] == -math.inf).all()
    for one in results[1:]:
        torch.testing.assert_close(one, results[0], rtol=0.02, atol=0.01)


def test_rows_in_use():
    cu, used = torch.tensor([1, 1, 4, 4, 6]).int(), torch.tensor([0, 2, 0, 2]).int()
    assert rows_in_use(cu, None, 8).tolist() == [False, *[True] * 5, False, False]
    assert rows_in_use(cu, used, 8).tolist() == [False, True, True, False, True, True, False, False]
    assert not rows_in_use(cu[:1], None, 3).any()


def test_rows_outside_sequences_do_not_contribute_to_the_gradient_of_a_sink(device):
    q, k, v = leaves(device, *[(9, 2, 64)] * 3)
    cu = torch.tensor([0, 4, 6], device=device).int()
    sink = torch.ones(2, device=device, requires_grad=True)
    grads = []
    for rows in (9, 6):
        out = flash_attn_varlen_func(q[:rows], k, v, cu, cu, 4, 4, learnable_sink=sink)
        grads.append(torch.autograd.grad(out[:6].float().sum() + 0 * out[6:].nan_to_num().sum(), sink)[0])
    torch.testing.assert_close(*grads)


def test_a_sink_of_minus_infinity_has_no_effect(device):
    q, k, v = leaves(device, *[(1, 5, 2, 64)] * 3)
    sink = torch.full((2,), -math.inf, device=device, requires_grad=True)
    attend = {"causal": True, "window_size": (2, 2)}
    out = flash_attn_func(q, k, v, **attend, learnable_sink=sink)
    torch.testing.assert_close(out, flash_attn_func(q, k, v, **attend), rtol=0.01, atol=0.01)
    grads = torch.autograd.grad(out.float().sum(), (q, sink))
    assert grads[0].isfinite().all() and not grads[1].any()


def test_dropout_follows_manual_seed_and_repeats_with_a_state(device):
    q, k, v = leaves(device, *[(1, 40, 2, 64)] * 3)

    def attend(seed, **state):
        torch.manual_seed(seed)
        return flash_attn_func(q, k, v, dropout_p=0.5, **state)

    assert torch.equal(attend(0), attend(0)) and not torch.equal(attend(0), attend(1))
    torch.manual_seed(0)
    assert not torch.equal(*(flash_attn_func(q, k, v, 0.5) for _ in range(2)))
    state = torch.tensor([5, 6], device=device)
    assert torch.equal(attend(0, rng_state=state), attend(1, rng_state=state))
    assert flash_attn_func(q, k, v, 0.5, return_attn_probs=True)[2] is None


def test_max_seqlen_in_a_tensor_is_not_read(device):
    """A meta tensor has no value to read."""
    q, k, v = leaves(device, *[(9, 2, 64)] * 3)
    cu = torch.tensor([0, 4, 9], device=device).int()
    unknown = torch.empty((), dtype=torch.int32, device="meta")
    out = flash_attn_varlen_func(q, k, v, cu, cu, unknown, unknown, causal=True)
    torch.testing.assert_close(
        out, flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, causal=True), rtol=0.01, atol=0.01
    )


def test_slopes_may_be_a_parameter_without_gradient(device):
    slopes = torch.nn.Parameter(torch.ones(2, device=device))
    q, k, v = leaves(device, *[(1, 5, 2, 64)] * 3)
    with torch.no_grad():
        out = flash_attn_func(q, k, v, alibi_slopes=slopes)
    torch.testing.assert_close(out, flash_attn_func(q, k, v, alibi_slopes=slopes.detach()))


def test_gradient_of_a_gradient_is_refused_with_options(device):
    q, k, v = leaves(device, *[(1, 5, 2, 64)] * 3)
    (dq,) = torch.autograd.grad(flash_attn_func(q, k, v, softcap=2.0).float().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradient of a gradient"):
        dq.float().sum().backward()


def op_arguments(name, device, varlen):
    """q, k, v and the other arguments of fwd_op."""
    arguments = options(device)[name]
    causal, window = canonical_window(arguments.get("causal", False), arguments.get("window_size", (-1, -1)))
    lengths = {}
    size_q, size_k = ((9,), (20,)) if varlen else ((BATCH, 9), (BATCH, 20))
    if varlen:
        cu = (torch.tensor(x, device=device).int() for x in ([0, 4, 9], [0, 12, 20]))
        lengths = dict(
            zip(("cu_seqlens_q", "cu_seqlens_k"), cu, strict=True), max_seqlen_q=5, max_seqlen_k=12
        )
        lengths["seqused_k"] = torch.tensor([7, 8], device=device).int()
    q, k, v = leaves(
        device, (*size_q, HEADS, HEAD_DIM), (*size_k, HEADS_KV, HEAD_DIM), (*size_k, HEADS_KV, HEAD_DIM_V)
    )
    sink = arguments.get("learnable_sink")
    launch_options = Options(
        window,
        arguments.get("softcap", 0.0),
        arguments.get("dropout_p", 0.0),
        rng_state=arguments.get("rng_state"),
        alibi_slopes=arguments.get("alibi_slopes"),
        sink=None if sink is None else sink.requires_grad_(),
        **lengths,
    )
    return (q, k, v), (0.125, causal, False, False, False, *launch_options.arguments())


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("name", ["window", "softcap", "alibi-of-each", "sink", "dropout", "everything"])
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_opcheck(name, varlen, device):
    qkv, arguments = op_arguments(name, device, varlen)
    torch.library.opcheck(torch.ops.tl_attention.fwd.default, (*qkv, *arguments))
    out, lse = torch.ops.tl_attention.fwd(*qkv, *arguments)
    dlse = torch.randn_like(lse)
    tensors = [x.detach().clone() for x in (torch.randn_like(out), *qkv, out, lse, dlse)]
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.library.opcheck(torch.ops.tl_attention.bwd.default, (*tensors, *arguments))


# Forms differ in their lengths and in how they unpack tensors, whatever the options
COMPILED = [
    *(("dense", name) for name in options("cpu")),
    *itertools.product(("qkv", "varlen", "varlen-kv"), ("plain", "sink", "everything")),
]


@pytest.mark.in_turn(11)
@pytest.mark.parametrize(("form", "name"), COMPILED, ids=map("-".join, COMPILED))
def test_compile_has_no_break(name, form, device):
    torch._dynamo.reset()
    arguments = options(device)[name]
    sizes, function, _ = {
        "dense": ([(BATCH, 13, HEADS, HEAD_DIM)] * 3, flash_attn_func, None),
        "varlen": ([(20, HEADS, HEAD_DIM)] * 3, flash_attn_varlen_func, None),
    }.get(form) or PACKED[form]
    lengths = []
    if "varlen" in form:
        lengths = [torch.tensor([0, 5, sizes[i][0]], device=device).int() for i in (0, -1)] + [15, 15]
    sink = arguments.get("learnable_sink")
    sinks = [] if sink is None else [sink.detach().clone().requires_grad_()]
    inputs = leaves(device, *sizes)

    def loss_of(*tensors):
        out, lse, _ = function(
            *tensors[: len(inputs)],
            *lengths,
            **with_sink(arguments, tensors[len(inputs) :]),
            return_attn_probs=True,
        )
        return (out.float() ** 2).mean() + lse.clamp(-50).mean()

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    tensors = [*inputs, *sinks]
    grads = [torch.autograd.grad(f(*tensors), tensors) for f in (compiled, loss_of)]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * float(y.abs().max()))


def test_compile_serves_every_length_and_window(device):
    torch._dynamo.reset()

    def loss_of(q, cu, longest, window):
        out, lse, _ = flash_attn_varlen_func(
            q, q, q, cu, cu, longest, longest, window_size=(window, 0), return_attn_probs=True
        )
        return (out.float() ** 2).mean() + lse.mean()

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True, backend=backend)
    for i, (ends, window) in enumerate((([0, 3, 9], 4), ([0, 7, 8, 20], 6), ([0, 2, 12, 13, 30], 3))):
        (q,) = leaves(device, (ends[-1], 2, 64))
        cu = torch.tensor(ends, device=device).int()
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            (grad,) = torch.autograd.grad(compiled(q, cu, 20, window), q)
        torch.testing.assert_close(
            grad, torch.autograd.grad(loss_of(q, cu, 20, window), q)[0], rtol=0.02, atol=1e-3
        )


def test_compile_takes_a_longest_length_that_it_reads(device):
    """max_seqlen as models compute it, of a value that torch.compile and torch.export do not know."""
    torch._dynamo.reset()

    def loss_of(q, cu):
        longest = cu.diff().max().item()
        return (flash_attn_varlen_func(q, q, q, cu, cu, longest, longest, causal=True).float() ** 2).mean()

    class Loss(torch.nn.Module):
        def forward(self, q, cu):
            return loss_of(q, cu)

    (q,) = leaves(device, (20, 2, 64))
    cu = torch.tensor([0, 7, 8, 20], device=device).int()
    backend = "inductor" if device == "cuda" else "aot_eager"
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
        (grad,) = torch.autograd.grad(compiled(q, cu), q)
    torch.testing.assert_close(grad, torch.autograd.grad(loss_of(q, cu), q)[0], rtol=0.02, atol=1e-3)
    with torch.no_grad():
        program = torch.export.export(Loss(), (q, cu)).module()
        torch.testing.assert_close(program(q, cu), loss_of(q, cu), rtol=0.02, atol=1e-3)


def test_compile_draws_dropout_anew_each_call(device):
    torch._dynamo.reset()
    q, k, v = leaves(device, *[(1, 40, 2, 64)] * 3)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(lambda q: flash_attn_func(q, k, v, 0.5), fullgraph=True, backend=backend)
    assert not torch.equal(compiled(q), compiled(q))
    torch.manual_seed(0)
    out = compiled(q)
    torch.manual_seed(0)
    assert torch.equal(out, compiled(q))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_checkpointing_gives_the_same_gradients(dropout_p, device):
    q, k, v = leaves(device, *[(1, 40, 2, 64)] * 3)
    sink = torch.ones(2, device=device, requires_grad=True)

    def attend(q, k, v, sink):
        return (
            flash_attn_func(q, k, v, dropout_p, window_size=(9, 2), learnable_sink=sink)
            .float()
            .square()
            .mean()
        )

    def recomputed(*tensors):
        return checkpoint(attend, *tensors, use_reentrant=False)

    grads = []
    for function in (attend, recomputed):
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(function(q, k, v, sink), (q, k, v, sink)))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * float(y.abs().max()))


@pytest.mark.parametrize("used", ["q", "k", "none"])
def test_unused_rows_are_cleared_after_a_launch(used, monkeypatch):
    def garbage(*shape):
        return torch.full(shape, math.nan)

    monkeypatch.setattr(ops.launch, "forward", lambda *a, **others: (garbage(5, 2, 8), garbage(2, 5)))
    grads = {"q": garbage(5, 2, 8), "k": garbage(5, 1, 8), "v": garbage(5, 1, 8)}
    monkeypatch.setattr(ops.launch, "backward", lambda *a, options: grads)
    cu, seqused = torch.tensor([0, 3, 5]).int(), torch.tensor([1, 2]).int()
    options = Options(
        cu_seqlens_q=cu, cu_seqlens_k=cu, **{} if used == "none" else {f"seqused_{used}": seqused}
    )
    q = torch.zeros(5, 2, 8)
    call = ops.Call(1.0, False, False, False, False)
    out, lse = ops.launch_forward(q, q, q, call, options)
    grads = ops._launch_backward(out, q, q, q, out, lse, None, call, options)
    cleared = [False, True, True, False, False]
    for x, of in zip((out, lse.T, *grads.values()), "qqqkk", strict=True):
        assert x.isnan().flatten(1).all(1).tolist() == [not (row and of == used) for row in cleared]
    if used == "q":
        assert not out[1:3].any() and (lse[:, 1:3] == -math.inf).all()


@pytest.mark.parametrize("rows", [0, 5], ids=["no-rows", "rows"])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "sink", "dropout"])
def test_a_batch_without_sequences(name, rows, device):
    """cu_seqlens of length 1: rows that belong to no sequence have out 0, log-sum-exp -inf and gradient 0."""
    arguments, cu = options(device, 0)[name], torch.zeros(1, dtype=torch.int32, device=device)
    inputs = leaves(device, (rows, HEADS, HEAD_DIM), *[(rows, HEADS_KV, HEAD_DIM)] * 2)
    if "learnable_sink" in arguments:
        inputs.append(arguments["learnable_sink"].requires_grad_())

    def attend(q, k, v, *sink):
        return flash_attn_varlen_func(
            q, k, v, cu, cu, 0, 0, **with_sink(arguments, sink), return_attn_probs=True
        )

    out, lse, _ = attend(*inputs)
    assert out.shape == inputs[0].shape and lse.shape == (HEADS, rows)
    assert not out.any() and (lse == -math.inf).all()
    for grad in torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse))):
        assert not grad.any()


def test_a_launch_without_sequences_needs_no_kernel(monkeypatch):
    """launch.forward and launch.backward themselves, with tensors on the CPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    for module in (ops.launch.fwd, ops.launch.bwd):
        monkeypatch.setattr(
            module, "empty", lambda shape, strides, dtype: torch.full(shape, math.nan, dtype=dtype)
        )
    monkeypatch.setattr(ops.launch.fwd, "device_costs", lambda device: costs_of())
    cu, sink = torch.zeros(1, dtype=torch.int32), torch.ones(2)
    q = torch.randn(5, 2, 64).to(BF16)
    some = Options(cu_seqlens_q=cu, cu_seqlens_k=cu, sink=sink)
    out, lse = ops.launch.forward(q, q, q, 1.0, False, False, options=some)
    assert not out.any() and (lse == -math.inf).all()
    grads = tuple(
        ops.launch.backward(
            q, q, q, q, out, lse, 1.0, False, False, dlse=torch.ones_like(lse), options=some
        ).values()
    )
    assert [x.shape for x in grads] == [q.shape] * 3 + [sink.shape] and not any(x.any() for x in grads)


@pytest.mark.gpu
def test_a_graph_draws_dropout_anew_at_each_replay():
    q, k, v = leaves("cuda", *[(1, 200, 2, 64)] * 3)
    sink = torch.ones(2, device="cuda", requires_grad=True)

    def run():
        out = flash_attn_func(q, k, v, 0.5, window_size=(90, 0), learnable_sink=sink)
        return out, *torch.autograd.grad(out.float().square().mean(), (q, k, v, sink))

    run()  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    replays = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        graph.replay()
        replays.append([x.clone() for x in captured])
    assert torch.equal(replays[0][0], replays[1][0]) and not torch.equal(replays[0][0], replays[2][0])
    torch.testing.assert_close(replays[0], replays[1], rtol=0.02, atol=1e-4)
    assert all(x.isfinite().all() for x in captured)
