"""Well-known masks and score functions, and 300 random ones, against torch's eager flex_attention and against autograd."""

from __future__ import annotations

import math
import random
import runpy
from pathlib import Path

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import and_masks, or_masks

from tl_attention import create_block_mask, flex_attention
from tl_attention.problem.program import Call, Program
from tl_attention.reference.flex import flex_reference, new_scores
from tl_attention.tracing.builtin_options import builtin_options
from tl_attention.tracing.trace import trace

pytestmark = pytest.mark.filterwarnings(
    "ignore:tl_attention. CPU tensors", "ignore:.*torch.compile", "ignore:return_lse"
)
BATCH, HEADS, ROWS = 2, 4, 64
WIDTH = 8  # of an image of ROWS tokens

generator = torch.Generator().manual_seed(0)
documents = torch.tensor([0] * 20 + [1] * 5 + [2] * 39)
starts = torch.tensor([0, 20, 25])
# Begin and end of an image in each sequence, between which tokens see each other
images = torch.tensor([[10, 30], [5, 50]])
frames = torch.arange(ROWS) // 9
is_global = torch.arange(ROWS) % 16 == 0
lengths = torch.tensor([40, 64])
# Text token -> last image tile that it may look at
last_tile = torch.randint(0, 4, (BATCH, ROWS), generator=generator)
visible = torch.rand(ROWS, generator=generator) > 0.3
slopes = torch.exp2(-torch.arange(1, HEADS + 1) * 8.0 / HEADS)
relative = torch.randn(HEADS, 2 * ROWS, generator=generator, requires_grad=True)
dense = torch.randn(1, HEADS, ROWS, ROWS, generator=generator, requires_grad=True)
buckets = torch.randn(8, HEADS, generator=generator, requires_grad=True)
temperature = torch.rand(HEADS, generator=generator, requires_grad=True)
gate = torch.randn(BATCH, HEADS, ROWS, generator=generator, requires_grad=True)
permutation = torch.randperm(ROWS, generator=generator)


def causal(b, h, q, k):
    return q >= k


def within(n):
    return lambda b, h, q, k: q - k < n


def same_document(b, h, q, k):
    return documents[q] == documents[k]


def in_documents(mask_mod):
    """A mask of positions within documents."""

    def inner(b, h, q, k):
        return same_document(b, h, q, k) & mask_mod(b, h, q - starts[documents[q]], k - starts[documents[k]])

    return inner


def image_distance(q, k):
    return (q // WIDTH - k // WIDTH).abs(), (q % WIDTH - k % WIDTH).abs()


def natten(b, h, q, k):
    rows, columns = image_distance(q, k)
    return (rows <= 2) & (columns <= 2)


def clamped_natten(b, h, q, k):
    """The window stays within the image."""
    row = (q // WIDTH).clamp(2, ROWS // WIDTH - 3)
    column = (q % WIDTH).clamp(2, WIDTH - 3)
    return ((row - k // WIDTH).abs() <= 2) & ((column - k % WIDTH).abs() <= 2)


def in_image(b, h, q, k):
    begin, end = images[b, 0], images[b, 1]
    return (q >= begin) & (q < end) & (k >= begin) & (k < end)


MASKS = {
    "causal": causal,
    "sliding window": and_masks(causal, within(9)),
    "window of two sides": lambda b, h, q, k: (q - k).abs() <= 7,
    "prefix-LM": or_masks(lambda b, h, q, k: k < 17, causal),
    "prefix-LM of a batch": or_masks(lambda b, h, q, k: k < images[b, 0], causal),
    "documents": and_masks(same_document, causal),
    "prefix-LM of documents": in_documents(or_masks(lambda b, h, q, k: k < 4, causal)),
    "window of documents": in_documents(and_masks(causal, within(5))),
    "dilated window": lambda b, h, q, k: ((q - k) % 3 == 0) & (q >= k) & (q - k < 24),
    "chunks": lambda b, h, q, k: q // 10 == k // 10,
    "chunked causal": and_masks(causal, lambda b, h, q, k: q // 10 == k // 10),
    "natten": natten,
    "natten at the border": clamped_natten,
    "axial": lambda b, h, q, k: (q // WIDTH == k // WIDTH) | (q % WIDTH == k % WIDTH),
    "transfusion": or_masks(causal, in_image),
    "frames": lambda b, h, q, k: frames[q] >= frames[k],
    "padding": lambda b, h, q, k: (k < lengths[b]) & (q >= k),
    "global and local": lambda b, h, q, k: is_global[q] | is_global[k] | ((q - k).abs() < 4),
    "sink tokens and a window": or_masks(and_masks(causal, within(9)), lambda b, h, q, k: (k < 4) & (q >= k)),
    "cross attention to tiles": lambda b, h, q, k: k // 16 <= last_tile[b, q],
    "visible keys": lambda b, h, q, k: visible[k] | (q == k),
    "windows of heads": lambda b, h, q, k: (q >= k) & (q - k < 4 * (h + 1)),
    "strided heads": lambda b, h, q, k: (q >= k) & (torch.where(h < 2, q - k, 4 * ((q - k) // 4)) == q - k),
    "permuted": lambda b, h, q, k: permutation[q] >= permutation[k],
    "checkerboard": lambda b, h, q, k: (q + k) % 2 == 0,
    "diagonal": lambda b, h, q, k: q == k,
    "all": lambda b, h, q, k: q >= 0,
}


def alibi(s, b, h, q, k):
    return s + slopes[h] * (k - q)


def bucket(q, k):
    """Bucket of a distance: exact up to 4, then by powers of 2."""
    distance = (q - k).abs()
    far = 4 + torch.log2((distance.float() / 4).clamp(min=1)).to(torch.int32)
    return torch.where(distance < 4, distance, far.clamp(max=7))


def tower(n):
    """Scores change by the level of a tree that joins a query and a key."""

    def score_mod(s, b, h, q, k):
        for level in range(1, n):
            s = torch.where((q >> level) == (k >> level), s, s - 0.5 * level)
        return s

    return score_mod


MODS = {
    "softcap": (lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0), causal),
    "alibi": (alibi, causal),
    "alibi of both sides": (lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), None),
    "alibi by formula": (lambda s, b, h, q, k: s + torch.exp2(-(h + 1) * 8.0 / HEADS) * (k - q), causal),
    "softcap and alibi": (lambda s, b, h, q, k: alibi(5.0 * torch.tanh(s / 5.0), b, h, q, k), causal),
    "relative positions": (lambda s, b, h, q, k: s + (q - k), causal),
    "causal as a score": (lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf), None),
    "identity": (lambda s, b, h, q, k: s, None),
    "learned relative bias": (lambda s, b, h, q, k: s + relative[h, q - k + ROWS], None),
    "learned bias": (lambda s, b, h, q, k: s + dense[0, h, q, k], causal),
    "buckets of T5": (lambda s, b, h, q, k: s + buckets[bucket(q, k), h], None),
    "temperature": (lambda s, b, h, q, k: s * torch.exp(temperature[h]), causal),
    "temperature by position": (lambda s, b, h, q, k: s * torch.log1p(q.float()), causal),
    "gated keys": (lambda s, b, h, q, k: s + torch.nn.functional.logsigmoid(gate[b, h, k]), causal),
    "gated scores": (lambda s, b, h, q, k: s * torch.sigmoid(gate[b, h, q]), None),
    "decay": (lambda s, b, h, q, k: s + torch.log(1 - torch.exp2(-5.0 - h)) * (q - k).abs(), causal),
    "squared relu": (lambda s, b, h, q, k: torch.relu(s).square() - 1.0, None),
    "distance in an image": (lambda s, b, h, q, k: s - 0.1 * sum(image_distance(q, k)), None),
    "tree": (tower(5), None),
    "heads apart": (lambda s, b, h, q, k: torch.where(h % 2 == 0, 2.0 * torch.tanh(s / 2.0), alibi(s, b, h, q, k)), causal),
    "nested where": (lambda s, b, h, q, k: torch.where(q < 20, torch.where(k < 20, s, s * 0.5), torch.where(k > 40, s + 1, s - 1)), None),
}  # fmt: skip
LEARNED = {
    "learned relative bias": relative,
    "learned bias": dense,
    "buckets of T5": buckets,
    "temperature": temperature,
    "gated keys": gate,
    "gated scores": gate,
}


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """torch's flex_attention without dynamo, which would compile each function for a second."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def inputs(rows=ROWS):
    return [torch.randn(BATCH, heads, rows, 16, dtype=torch.bfloat16) for heads in (HEADS, 2, 2)]


@torch.no_grad()
def check_with_torch(score_mod, mask_mod, rows=ROWS):
    """Compare with torch's eager function, whose mask is ours."""
    q, k, v = inputs(rows)
    block_mask = (
        None if mask_mod is None else create_block_mask(mask_mod, BATCH, HEADS, rows, rows, "cpu", 128)
    )
    ours, theirs = (
        f(q, k, v, score_mod, block_mask, 0.5, True, True)
        for f in (flex_attention, torch_flex.flex_attention)
    )
    hidden = theirs[1] == -math.inf
    assert torch.equal(ours[1] == -math.inf, hidden)
    torch.testing.assert_close(
        ours[0].masked_fill(hidden[..., None], 0),
        theirs[0].masked_fill(hidden[..., None], 0),
        rtol=2e-2,
        atol=2e-2,
    )
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=1e-3)


def check_derivatives(score_mod, call, rows=ROWS):
    """Compare the slope and the gradients of a program with autograd through the function on whole tensors."""
    x = (torch.randn(BATCH, HEADS, rows, rows) * 3).requires_grad_()
    at = [
        torch.arange(n, dtype=torch.int32).view([-1 if i == dim else 1 for i in range(4)])
        for dim, n in enumerate(x.shape)
    ]
    out = score_mod(x, *at)
    learned = [call.tensors[i] for i in call.program.learned]
    seen = out.isfinite()
    expected = torch.autograd.grad(out[seen].sum(), [x, *learned])

    def value(i):
        return new_scores(x, Call(Program(call.program.values, score=i), call.tensors, call.numbers))

    with torch.no_grad():
        slope = torch.ones_like(x) if call.program.slope is None else value(call.program.slope)
        torch.testing.assert_close(slope[seen], expected[0][seen], rtol=1e-3, atol=1e-4)
        for i, want in zip(call.program.learned, expected[1:], strict=True):
            total = torch.zeros_like(call.tensors[i])
            for gradient in call.program.gradients:
                if gradient.tensor == i:
                    index = tuple(value(arg).long() for arg in gradient.index)
                    total.index_put_(index, value(gradient.factor) * seen, accumulate=True)
            torch.testing.assert_close(total, want, rtol=1e-3, atol=1e-3 * want.abs().max().item() + 1e-4)


@pytest.mark.parametrize("name", MASKS)
def test_gallery_masks_agree_with_torch(name):
    check_with_torch(None, MASKS[name])


@pytest.mark.parametrize("name", MODS)
def test_gallery_mods_agree_with_torch_and_autograd(name):
    score_mod, mask_mod = MODS[name]
    check_with_torch(score_mod, mask_mod)
    call = trace(score_mod, None, True)
    check_derivatives(score_mod, call)
    assert [call.tensors[i] is LEARNED[name] for i in call.program.learned] == [True] * (name in LEARNED)


def test_gallery_options_are_recognized():
    masks = {name for name, mask in MASKS.items() if builtin_options(trace(None, mask, False), ROWS, ROWS)}
    assert masks == {"causal", "sliding window", "window of two sides", "diagonal", "all"}
    mods = {
        name for name, mods in MODS.items() if builtin_options(trace(*mods, False), ROWS, ROWS, BATCH, HEADS)
    }
    assert mods == {
        "softcap", "alibi", "alibi of both sides", "alibi by formula", "softcap and alibi", "causal as a score", "identity", "decay",
        "relative positions",
    }  # fmt: skip


REFUSED = {
    "stick-breaking": lambda s, b, h, q, k: (
        s - torch.cumsum(torch.nn.functional.softplus(s).reshape(1), 0)[0]
    ),
    "top-k": lambda s, b, h, q, k: torch.topk(s.reshape(1), 1).values[0],
    "softmax over heads": lambda s, b, h, q, k: torch.softmax(s.reshape(1), 0)[0],
    "random": lambda s, b, h, q, k: s + torch.rand(()),
    "matrix product": lambda s, b, h, q, k: s + relative[h] @ relative[h],
}


@pytest.mark.parametrize("name", REFUSED)
def test_gallery_what_is_not_pointwise_is_refused(name):
    with pytest.raises(
        NotImplementedError,
        match=r"^score_mod .*gallery.py:\d+.*expected pointwise operations.*, got aten",
    ):
        trace(REFUSED[name], None, True)


def random_mask(draw: random.Random):
    """A mask_mod of up to two of the masks above, and the query itself."""
    masks = draw.sample([*MASKS.values()], draw.randint(1, 2))
    return or_masks(draw.choice((and_masks, or_masks))(*masks), MASKS["diagonal"])


def random_score(draw: random.Random):
    """A score_mod of random operations on the score, the indices, and captured tensors."""
    seed = draw.random()
    unary = (
        torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.atan, torch.erf, torch.relu, torch.nn.functional.gelu,
        torch.nn.functional.silu, torch.nn.functional.softplus, torch.abs, torch.neg, lambda x: torch.sqrt(x.abs() + 1),
        lambda x: torch.rsqrt(x.abs() + 1), lambda x: torch.log1p(x.abs()), lambda x: torch.exp(-x.abs()), torch.square,
        lambda x: torch.clamp(x, -2, 3), lambda x: x / 7.0, lambda x: torch.expm1(torch.clamp(x, max=1.0)),
        lambda x: x.masked_fill(x > 9, 0.5),
    )  # fmt: skip
    binary = (
        torch.add, torch.sub, lambda x, y: torch.clamp(x, -4, 4) * torch.clamp(y, -4, 4), torch.maximum, torch.minimum,
        lambda x, y: x / (y.abs() + 1), lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: torch.logaddexp(x, y),
    )  # fmt: skip

    def score_mod(s, b, h, q, k):
        own = random.Random(seed)

        def condition():
            choices = (
                lambda: q >= k, lambda: (q - k) % 3 == 0, lambda: documents[q] == documents[k], lambda: (h < 2) ^ (b == 0),
                lambda: visible[k],
            )  # fmt: skip
            return own.choice(choices)()

        def operand():
            choices = (
                lambda: s, lambda: (q - k) * 0.01, lambda: slopes[h], lambda: relative[h, q - k + ROWS], lambda: gate[b, h, k],
                lambda: own.uniform(-2, 2) + 0 * s, lambda: (k % 7).float() * 0.2, lambda: temperature[h] * s, lambda: dense[0, h, q, k],
                lambda: ((q // 4) ^ (k >> 1)).float() * 0.05,
            )  # fmt: skip
            return own.choice(choices)()

        x = s
        for _ in range(own.randint(2, 5)):
            kind = own.random()
            if kind < 0.35:
                x = own.choice(unary)(x)
            elif kind < 0.85:
                x = own.choice(binary)(x, operand())
            else:
                x = torch.where(condition(), x, operand())
        return torch.clamp(x, -30, 30) + s * 0.1

    return score_mod


ONE_BLOCK = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("group", range(10))
def test_gallery_random_functions_agree_with_torch_and_autograd(group):
    """Thirty functions each."""
    q, k, v = inputs(24)
    for i in range(30):
        draw = random.Random(1000 * group + i)
        score_mod, mask_mod = random_score(draw), random_mask(draw)
        call = trace(score_mod, mask_mod, True)
        with torch.no_grad():
            out, lse = flex_reference(q, k, v, 0.5, call)
            block_mask = torch_flex.BlockMask.from_kv_blocks(
                *ONE_BLOCK, mask_mod=mask_mod, seq_lengths=(24, 24)
            )
            expected = torch_flex.flex_attention(q, k, v, score_mod, block_mask, 0.5, True, True)
        torch.testing.assert_close(out.bfloat16(), expected[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, expected[1], rtol=1e-3, atol=1e-3)
        check_derivatives(score_mod, call, 24)


@pytest.mark.parametrize("name", ["learned_bias", "prefix_lm"])
def test_gallery_examples_run(name, monkeypatch, capsys):
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(path), "--steps", "2"])
    runpy.run_path(str(path), run_name="__main__")
    assert "step 1: loss" in capsys.readouterr().out
