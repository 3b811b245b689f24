"""Forward mode: torch.func.jvp and dual tensors through attention, against the derivative of plain attention in float64."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch.func import grad, hessian, jacfwd, jvp, linearize, vjp, vmap

from tl_attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    launch,
    mha_bwd_interface,
    mha_fwd_interface,
)
from tl_attention.compilation import building
from tl_attention.config.kernel_configs import JvpConfig, jvp_kernels
from tl_attention.config.legality import fault
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.reference.jvp import attention_jvp_reference
from tl_attention.testing.numeric import check_jvp

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16, FP16 = torch.bfloat16, torch.float16


def inputs(
    device, batch=2, heads=4, heads_kv=2, seqlen_q=9, seqlen_k=20, head_dim=64, head_dim_v=None, dtype=BF16
):
    """(q, k, v) and tangents of them."""
    rows_q, rows_k = (batch, seqlen_q, heads), (batch, seqlen_k, heads_kv)
    sizes = (*rows_q, head_dim), (*rows_k, head_dim), (*rows_k, head_dim_v or head_dim)
    return tuple(tuple(torch.randn(size, device=device).to(dtype) for size in sizes) for _ in range(2))


def plain(q, k, v, causal=False, scale=None):
    """(out, lse) by the textbook formula; rows that see no key are not for it."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        sizes = scores.shape[-2:]
        hidden = torch.ones(sizes, dtype=bool, device=q.device).triu(1 + sizes[1] - sizes[0])
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def double(tensors):
    return tuple(x.double() for x in tensors)


def attend(*tensors, **options):
    return flash_attn_func(*tensors, **options, return_attn_probs=True)[:2]


def along(function, primals, tangents, chosen=(0, 1, 2)):
    """(outputs, their tangents) along the chosen tangents alone, by torch.func.jvp."""

    def of_chosen(*moved):
        tensors = list(primals)
        for i, x in zip(chosen, moved, strict=True):
            tensors[i] = x
        return function(*tensors)

    return jvp(of_chosen, tuple(primals[i] for i in chosen), tuple(tangents[i] for i in chosen))


def assert_right(outputs, primals, tangents, **options):
    found = check_jvp(outputs, primals, tangents, **options)
    assert found.ok, found.text


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chosen", [(0, 1, 2), (0,), (1,), (2,), (0, 2)], ids=str)
def test_jvp_reference_matches_autograd(causal, chosen):
    primals, tangents = (double(x) for x in inputs("cpu"))
    (out, lse), (tout, tlse) = along(lambda *x: plain(*x, causal, 0.3), primals, tangents, chosen)
    kept = [tangent if i in chosen else None for i, tangent in enumerate(tangents)]
    got = attention_jvp_reference(*primals, *kept, 0.3, causal, dtype=torch.float64)
    torch.testing.assert_close(got, (out, lse, tout, tlse))
    got_base2 = attention_jvp_reference(*primals, *kept, 0.3, causal, dtype=torch.float64, lse_base2=True)
    torch.testing.assert_close(got_base2, (out, lse / math.log(2), tout, tlse / math.log(2)))


def test_jvp_reference_rows_without_keys_are_zero():
    primals, tangents = inputs("cpu", seqlen_q=20, seqlen_k=9)
    out, lse, tout, tlse = attention_jvp_reference(*primals, *tangents, None, True)
    assert not out[:, :11].any() and not tout[:, :11].any() and not tlse[..., :11].any()
    assert (lse[..., :11] == -math.inf).all()
    assert tout[:, 11:].all(2).all() and all(x.isfinite().all() for x in (out, tout, tlse))


@pytest.mark.parametrize("chunk", [20, 60])
def test_jvp_reference_in_chunks(chunk, monkeypatch):
    primals, tangents = inputs("cpu")
    whole = attention_jvp_reference(*primals, *tangents, None, True)
    monkeypatch.setattr("tl_attention.reference.jvp.MAX_SCORES", 2 * chunk)
    torch.testing.assert_close(attention_jvp_reference(*primals, *tangents, None, True), whole)


def test_check_jvp_notices_a_wrong_tangent():
    primals, tangents = inputs("cpu")
    out, lse, tout, tlse = attention_jvp_reference(*primals, *tangents)
    assert check_jvp((out.to(BF16), lse, tout.to(BF16), tlse), primals, tangents).ok
    assert not check_jvp((out.to(BF16), lse, tout.to(BF16) * 1.1, tlse), primals, tangents).ok
    assert not check_jvp((out.to(BF16), lse, tout.to(BF16), tlse + 1e-3), primals, tangents).ok


LENGTHS = [(1, 1), (9, 20), (20, 9), (64, 64), (130, 257)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (80, BF16), (128, BF16), (128, FP16)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_jvp_matches_float64(lengths, head_dim, causal, dtype, device):
    primals, tangents = inputs(device, 2, 4, 2, *lengths, head_dim, dtype=dtype)
    outputs = along(lambda *x: attend(*x, causal=causal), primals, tangents)
    (out, lse), (tout, tlse) = outputs
    assert_right((out, lse, tout, tlse), primals, tangents, causal=causal)
    if causal and lengths[0] > lengths[1]:
        return
    (want, _), (want_tout, want_tlse) = along(lambda *x: plain(*x, causal), double(primals), double(tangents))
    torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.02)
    torch.testing.assert_close(tout.double(), want_tout, rtol=0.02, atol=0.06)
    torch.testing.assert_close(tlse.double(), want_tlse, rtol=1e-3, atol=1e-4)


SUBSETS = [chosen for n in (1, 2, 3) for chosen in itertools.combinations(range(3), n)]


@pytest.mark.parametrize("chosen", SUBSETS, ids=str)
def test_jvp_along_some_tensors_alone(chosen, device):
    primals, tangents = inputs(device, head_dim_v=32)
    (out, lse), (tout, tlse) = along(lambda *x: attend(*x, causal=True), primals, tangents, chosen)
    kept = tuple(x if i in chosen else None for i, x in enumerate(tangents))
    assert_right((out, lse, tout, tlse), primals, kept, causal=True)


def test_jvp_primal_is_that_of_the_forward(device):
    primals, tangents = inputs(device, seqlen_q=100, seqlen_k=300)
    (out, lse), _ = along(lambda *x: attend(*x, causal=True), primals, tangents)
    wanted, wanted_lse = attend(*primals, causal=True)
    torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.004)
    torch.testing.assert_close(lse, wanted_lse)


def test_jvp_of_dual_tensors(device):
    primals, tangents = inputs(device)
    with fwad.dual_level():
        duals = tuple(map(fwad.make_dual, primals, tangents))
        (out, tout), (lse, tlse) = (fwad.unpack_dual(x) for x in attend(*duals, causal=True))
        with fwad._set_fwd_grad_enabled(False):
            assert fwad.unpack_dual(flash_attn_func(*duals, causal=True)).tangent is None
    assert_right((out, lse, tout, tlse), primals, tangents, causal=True)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("of_tangents", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("function", ["flash", "mha"])
def test_tangents_of_another_dtype_are_rounded_to_that_of_their_tensor(dtype, of_tangents, function, device):
    primals, tangents = inputs(device, dtype=dtype)
    if function == "mha":
        primals, tangents = ([x.transpose(1, 2) for x in some] for some in (primals, tangents))
    run = attend if function == "flash" else mha_fwd_interface
    wide = [x.to(of_tangents) * (1 + 2**-12) for x in tangents]  # rounds to the same number
    results = []
    for along_them in (tangents, wide, [tangents[0], wide[1], None]):
        with fwad.dual_level():
            pairs = zip(primals, along_them, strict=True)
            duals = [x if tangent is None else fwad.make_dual(x, tangent) for x, tangent in pairs]
            results.append([fwad.unpack_dual(x).tangent for x in run(*duals)])
    (out, lse), (wide_out, wide_lse), (some_out, _) = results
    assert torch.equal(wide_out, out) and torch.equal(wide_lse, lse)
    assert wide_out.dtype == some_out.dtype == dtype and not torch.equal(some_out, out)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_jvp_with_a_scale(scale, device):
    primals, tangents = inputs(device, seqlen_q=70, seqlen_k=150)
    (out, lse), (tout, tlse) = along(lambda *x: attend(*x, softmax_scale=scale), primals, tangents)
    assert_right((out, lse, tout, tlse), primals, tangents, softmax_scale=scale)


def test_jvp_of_mha_interface(device):
    primals, tangents = inputs(device, heads_kv=4)
    primals, tangents = (tuple(x.transpose(1, 2) for x in tensors) for tensors in (primals, tangents))
    (out, lse), (tout, tlse) = jvp(lambda *x: mha_fwd_interface(*x, 0.2, True), primals, tangents)
    outputs = out.transpose(1, 2), lse, tout.transpose(1, 2), tlse
    primals, tangents = (tuple(x.transpose(1, 2) for x in tensors) for tensors in (primals, tangents))
    assert_right(outputs, primals, tangents, softmax_scale=0.2, causal=True, lse_base2=True)


@pytest.mark.parametrize("offset", [8.0, 100.0])
def test_jvp_is_exact_where_all_tangents_of_a_row_are_alike(offset, device):
    # tS = scale q·tk is the same for all keys, so that P and the output do not move
    (q, k, v), (_, tk, _) = inputs(device, seqlen_q=100, seqlen_k=300)
    _, (tout, tlse) = along(attend, (q, k, v), (None, torch.full_like(tk, offset), None), (1,))
    tangent = offset * q.double().sum(-1).mT / 8
    torch.testing.assert_close(tlse.double(), tangent, rtol=1e-5, atol=1e-3)
    assert tout.abs().max() <= 2e-6 * float(tangent.abs().max()) * float(v.abs().max())


def test_jvp_of_empty_tensors(device):
    for lengths in ((0, 20), (9, 0)):
        primals, tangents = inputs(device, 2, 4, 2, *lengths)
        (out, lse), (tout, tlse) = along(attend, primals, tangents)
        assert tout.shape == out.shape and tlse.shape == lse.shape
        assert not out.any() and not tout.any() and not tlse.any() and (lse == -math.inf).all()


def test_jvp_under_vmap(device):
    primals, tangents = inputs(device)
    directions = [tuple(n * x for x in tangents) for n in (1, -2, 0.5)]
    wanted = torch.stack([along(flash_attn_func, primals, t)[1] for t in directions])
    stacked = tuple(map(torch.stack, zip(*directions, strict=True)))
    got = vmap(lambda *t: jvp(flash_attn_func, primals, t)[1])(*stacked)
    torch.testing.assert_close(got, wanted)

    samples = tuple(torch.stack([n * x for n in (1, 0.5)]) for x in primals)
    moved = tuple(torch.stack([x, -x]) for x in tangents)
    wanted = [jvp(flash_attn_func, *pair) for pair in zip(zip(*samples), zip(*moved), strict=True)]  # noqa: B905
    for got in (
        jvp(vmap(flash_attn_func), samples, moved),
        vmap(lambda *x: jvp(flash_attn_func, x[:3], x[3:]))(*samples, *moved),
    ):
        torch.testing.assert_close(got, tuple(map(torch.stack, zip(*wanted, strict=True))))


def test_linearize_and_jacfwd(device):
    primals, tangents = inputs(device)
    wanted = along(flash_attn_func, primals, tangents)
    out, pushed = linearize(flash_attn_func, *primals)
    torch.testing.assert_close((out, pushed(*tangents)), wanted)

    direction = torch.ones(2, dtype=BF16, device=device)
    jacobian = jacfwd(lambda x: flash_attn_func(primals[0] + x[0] * tangents[0], *primals[1:]))(0 * direction)
    wanted = along(flash_attn_func, primals, tangents, (0,))[1]
    torch.testing.assert_close(jacobian[..., 0], wanted)
    assert not jacobian[..., 1].any()


def test_jvp_compiles_without_a_graph_break(device):
    torch._dynamo.reset()
    primals, tangents = inputs(device)
    compiled = torch.compile(
        lambda *x: jvp(flash_attn_func, x[:3], x[3:]), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(*primals, *tangents), along(flash_attn_func, primals, tangents))


def test_jvp_op_passes_opcheck(device):
    primals, tangents = inputs(device)
    op = torch.ops.tl_attention.fwd_jvp.default
    torch.library.opcheck(op, (*primals, *tangents, 0.125, True, False, False, False))
    torch.library.opcheck(op, (*primals, None, tangents[1], None, 0.125, False, True, False, False))


def test_gradient_beside_jvp_is_that_of_the_forward(device):
    # Mean-flow training makes its target of the tangent, behind a stopped gradient
    (q, k, v), tangents = inputs(device, seqlen_q=70, seqlen_k=150)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, tout = jvp(lambda *x: flash_attn_func(*x, causal=True), tuple(leaves), tangents)
    (out.float() * tout.detach().float()).sum().backward()
    plain_leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    (flash_attn_func(*plain_leaves, causal=True).float() * tout.detach().float()).sum().backward()
    for x, y in zip(leaves, plain_leaves, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0.02, atol=0.02)
    with fwad.dual_level():
        dual = flash_attn_func(fwad.make_dual(leaves[0], tangents[0]), *leaves[1:], causal=True)
        primal, tangent = fwad.unpack_dual(dual)
        (got,) = torch.autograd.grad((primal.float() * tout.detach().float()).sum(), leaves[:1])
        torch.testing.assert_close(got, plain_leaves[0].grad, rtol=0.02, atol=0.02)
        with pytest.raises(NotImplementedError, match="gradient of a forward-mode tangent"):
            tangent.float().sum().backward()
    wanted = grad(lambda q: flash_attn_func(q, k, v).float().sum())(q)
    of_primal = grad(lambda q: jvp(lambda q: flash_attn_func(q, k, v).float().sum(), (q,), tangents[:1])[0])(
        q
    )
    torch.testing.assert_close(of_primal, wanted, rtol=0.02, atol=0.02)


def loss_of_q(q):
    other = torch.ones(2, 20, 2, 64, dtype=BF16, device=q.device)
    return flash_attn_func(q, other, other, causal=True).float().sum()


def flash(**options):
    return lambda q: jvp(lambda q: flash_attn_func(q, q, q, **options), (q,), (q,))


def cu(q):
    return torch.tensor((0, 9), device=q.device).int()


REFUSED = {
    "hessian": (
        lambda q: hessian(lambda scale: loss_of_q(q * scale))(q.new_ones(())),
        r"q, .*: expected a tensor without a tangent.*flash_attn_func.*torch\.func\.jvp",
    ),
    "of-grad": (lambda q: jvp(grad(loss_of_q), (q,), (q,)), "expected a tensor without a tangent, as gradients"),
    "of-grad-no-grad": (lambda q: torch.no_grad()(jvp)(grad(loss_of_q), (q,), (q,)), "expected a tensor without a tangent, as gradients"),
    "of-jvp": (
        lambda q: jvp(lambda q: jvp(loss_of_q, (q,), (q.detach(),))[1], (q,), (q,)), "^q.*: expected a tensor without.*none of their own",
    ),
    "grad-of-tangent": (lambda q: grad(lambda q: jvp(loss_of_q, (q,), (q,))[1])(q), "gradient of a forward-mode tangent is not supported"),
    "vjp-of-tangent": (lambda q: vjp(lambda q: jvp(loss_of_q, (q,), (q,))[1], q)[1](q.sum().float()), "gradient of a forward-mode tangent"),
    "sink": (
        lambda q: jvp(lambda s: flash_attn_func(q, q, q, learnable_sink=s), *[(torch.ones(4, device=q.device),)] * 2),
        "^learnable_sink: expected a tensor without a tangent",
    ),
    "mha-bwd": (
        lambda q: jvp(lambda do: mha_bwd_interface(do, q, q, q, q, q[..., 0].float()), (q,), (q,)), "^do: expected a tensor without",
    ),
    "varlen": (
        lambda q: jvp(lambda q: flash_attn_varlen_func(q, q, q, *[cu(q)] * 2, 9, 9), (q[0],), (q[0],)), "^cu_seqlens_q: expected none in",
    ),
    "kvcache": (lambda q: jvp(lambda q: flash_attn_with_kvcache(q, q.detach(), q.detach()), (q,), (q,)), "^flash_attn_with_kvcache: "),
    "window": (flash(window_size=(3, 3)), "^window_size: expected none in forward-mode"),
    "two": (flash(window_size=(3, 3), softcap=2.0), "^window_size, softcap: expected none in forward-mode"),
    "dropout": (flash(dropout_p=0.1), "^dropout_p: expected none in forward-mode"),
    "alibi": (lambda q: flash(alibi_slopes=torch.ones(4, device=q.device))(q), "^alibi_slopes: expected none in forward-mode"),
    "splits": (flash(num_splits=2), "^num_splits: expected none in forward-mode"),
    "wide": (
        lambda q: flash()(torch.cat([q, q, q], -1)), r"^q: expected a head dim of at most 128 in forward-mode.*torch\.func\.jvp.*got 192",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_forward_mode_is_refused_by_name(case, device):
    call, text = REFUSED[case]
    with torch.device(device), pytest.raises(NotImplementedError, match=text):
        call(torch.randn(2, 9, 4, 64, dtype=BF16, device=device))


def test_inputs_without_a_tangent_pass_in_forward_mode(device):
    (q, k, v), _ = inputs(device)
    wanted = flash_attn_func(q, k, v, causal=True)
    (out, doubled), tangents = jvp(lambda x: (flash_attn_func(q, k, v, causal=True), 2 * x), (q,), (q,))
    torch.testing.assert_close([out, doubled, *tangents], [wanted, 2 * q, torch.zeros_like(wanted), 2 * q])


@pytest.mark.parametrize(("problem", "config"), jvp_kernels(), ids=str)
def test_jvp_configs_are_legal(problem, config):
    assert fault(problem, config) is None


@pytest.mark.parametrize(
    ("problem", "config", "text"),
    [
        ("128", JvpConfig(96, 64), "^block_M: expected 64, 128 or 192"),
        ("128", JvpConfig(128, 72), "^block_N: expected a multiple of 16"),
        ("128", JvpConfig(64, 96), "^registers: expected at most 232 per thread for accumulators, got 272"),
        ("64", JvpConfig(128, 512), "^block_N: expected a multiple of 16 in 16..256"),
        ("96", JvpConfig(64, 96, ping_pong=True), "^ping_pong: expected block_M of at least 128"),
        (
            "options",
            JvpConfig(128, 64),
            "^problem: expected one width and no options, got bf16 d64 full sink",
        ),
    ],
    ids=str,
)
def test_jvp_configs_that_are_not_legal(problem, config, text):
    options = ("sink",) if problem == "options" else ()
    width = 64 if options else int(problem)
    assert re.search(text, fault(AttnProblem("bfloat16", width, width, False, options), config))


# On a GPU


def launched(primals, tangents, causal):
    """Outputs of the kernel on memory that held NaN."""
    q = primals[0]
    poison = [torch.full_like(x, math.nan) for x in (q, q, q[..., 0].float(), q[..., 0].float())]
    del poison
    return launch.forward_jvp(*primals, *tangents, q.shape[-1] ** -0.5, causal, False)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1024, 1024), (1000, 777), (300, 2100), (2100, 300)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_jvp_kernel_matches_reference(head_dim, lengths, causal):
    primals, tangents = inputs("cuda", 2, 6, 2, *lengths, head_dim)
    outputs = launched(primals, tangents, causal)
    assert_right(outputs, primals, tangents, causal=causal)
    again = launched(primals, tangents, causal)
    assert all(map(torch.equal, outputs, again)), "not the same bits"


@pytest.mark.gpu
def test_jvp_new_lengths_and_layouts_compile_nothing():
    primals, tangents = inputs("cuda", 1, 4, 2, 100, 200)
    launched(primals, tangents, True)
    before = building.compile_count()
    for lengths in ((1, 4000), (333, 77)):
        primals, tangents = inputs("cuda", 3, 8, 8, *lengths)
        tangents = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tangents)
        assert_right(launched(primals, tangents, True), primals, tangents, causal=True)
    assert building.compile_count() == before


@pytest.mark.gpu
def test_jvp_of_expanded_tangents_and_odd_head_dims():
    primals, tangents = inputs("cuda", 2, 4, 2, 130, 140, 33, 65)
    tangents = tangents[0], tangents[1][:, :1].expand_as(primals[1]), tangents[2]
    assert_right(launched(primals, tangents, False), primals, tangents)
