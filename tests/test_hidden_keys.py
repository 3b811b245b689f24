"""Two things that hide keys in one call: which pairs run, on every pass, and which are refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

from tl_attention import create_block_mask, flash_attn_func, flash_attn_varlen_func, flex_attention
from tl_attention.api.flex_lists import kept_mask, listed
from tl_attention.launch import mask_bits
from tl_attention.launch.block_lists import FULL, PARTIAL
from tl_attention.launch.mask_bits import unpacked
from tl_attention.problem.program import Call, Program
from tl_attention.reference.flex import new_scores
from tl_attention.tracing.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention. CPU tensors", "ignore:.*torch.compile")
BATCH, HEADS, ROWS, KEYS = 2, 2, 300, 400
WINDOW = 60


@dataclass(frozen=True)
class Hider:
    """Something that hides keys.

    Args:
        argument: of flex_attention, or of flash_attn_func, that it is.
        value: of the argument, on a device.
        shown: what it shows, as a mask_mod on whole tensors.
    """

    argument: str
    value: Callable
    shown: Callable


def causal(b, h, q, k):
    return q >= k


def near(b, h, q, k):
    return (q - k).abs() <= WINDOW


def prefix(b, h, q, k):
    return (k < 140 - 30 * b) | (q >= k)


def rows_alike(b, h, q, k):  # key padding: the same for all queries
    return k < 390 - 100 * b


def holes(b, h, q, k):
    return (q * 7 + k * 3 + h) % 5 != 0


def mask_of(mask_mod: Callable, make: Callable = create_block_mask) -> Callable:
    return lambda device: make(mask_mod, BATCH, HEADS, ROWS, KEYS, device=device)


def indices(device: str) -> list[torch.Tensor]:
    shape = BATCH, HEADS, ROWS, KEYS
    return [
        torch.arange(n, device=device).view([-1 if dim == i else 1 for i in range(4)])
        for dim, n in enumerate(shape)
    ]


def dense(shown: Callable, device: str = "cpu") -> torch.Tensor:
    return shown(*indices(device)).expand(BATCH, HEADS, ROWS, KEYS)


def biased(device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(BATCH, HEADS, ROWS, KEYS, generator=generator).to(device)
    return values.masked_fill(~dense(holes, device), -math.inf).requires_grad_()


def where(shown: Callable) -> Callable:
    return lambda device: lambda s, b, h, q, k: torch.where(shown(b, h, q, k), s, -math.inf)


HIDERS = {
    "causal option": Hider("causal", lambda device: True, lambda b, h, q, k: q >= k - (KEYS - ROWS)),
    "window option": Hider("window_size", lambda device: (9, 0), lambda b, h, q, k: q >= k - (KEYS - ROWS)),
    "seqused": Hider("seqused_k", lambda device: torch.tensor([300, 9]), rows_alike),
    "mask_mod": Hider("mask_mod", lambda device: prefix, prefix),
    "mask_mod as option": Hider("mask_mod", lambda device: near, near),
    "block mask": Hider("block_mask", mask_of(prefix), prefix),
    "block mask as option": Hider("block_mask", mask_of(near), near),
    "block mask of PyTorch": Hider("block_mask", mask_of(prefix, torch_block_mask), prefix),
    "block mask of padding": Hider("block_mask", mask_of(rows_alike), rows_alike),
    "bool bias": Hider("attn_bias", lambda device: dense(holes, device).contiguous(), holes),
    "float bias": Hider("attn_bias", biased, holes),
    "score_mod": Hider("score_mod", where(holes), holes),
    "score_mod as option": Hider("score_mod", where(causal), causal),
}
# Pairs of arguments that run; a pair of one argument cannot be written
RUN = {
    ("mask_mod", "attn_bias"),
    ("mask_mod", "score_mod"),
    ("block_mask", "attn_bias"),
    ("block_mask", "score_mod"),
    ("attn_bias", "score_mod"),
    ("causal", "window_size"),
    ("causal", "seqused_k"),
    ("window_size", "seqused_k"),
}
# Pairs that are refused, and the words of the error
FUNCTIONS = "mask_mod", "block_mask", "attn_bias", "score_mod"
REFUSED = {("mask_mod", "block_mask"): "mask_mod: expected None beside block_mask"}
for _argument in FUNCTIONS:
    REFUSED["causal", _argument] = (
        "causal: expected False beside score_mod, mask_mod, block_mask or attn_bias"
    )
    REFUSED["window_size", _argument] = "window_size: expected .* beside score_mod, mask_mod"
    REFUSED["seqused_k", _argument] = "seqused_k|" + _argument
PAIRS = list(itertools.combinations(HIDERS, 2))
OF_FUNCTIONS = [
    (x, y)
    for x, y in PAIRS
    if (HIDERS[x].argument, HIDERS[y].argument) in RUN and HIDERS[x].argument in FUNCTIONS
]
TRIPLES = [("block mask", "bool bias", "score_mod"), ("block mask as option", "float bias", "score_mod")]


def test_hidden_keys_every_pair_is_in_the_table():
    arguments = {(HIDERS[x].argument, HIDERS[y].argument) for x, y in PAIRS}
    assert {pair for pair in arguments if pair[0] != pair[1]} == RUN | REFUSED.keys()


def arguments_of(names: tuple[str, ...], device: str) -> tuple[dict, torch.Tensor]:
    """Arguments of a call, and what all of them show."""
    given = {HIDERS[name].argument: HIDERS[name].value(device) for name in names}
    shown = torch.stack([dense(HIDERS[name].shown, device) for name in names]).all(0)
    return given, shown


def inputs(device: str, dtype: torch.dtype, head_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(BATCH, HEADS, n, head_dim, generator=generator).to(device, dtype).requires_grad_()
        for n in (ROWS, KEYS, KEYS)
    ]


def check(names: tuple[str, ...], device: str, dtype: torch.dtype, head_dim: int, tolerance: float) -> None:
    """Compare out, lse and all gradients with fp64; a query that sees no key has out 0, lse -inf and no NaN in a gradient."""
    given, shown = arguments_of(names, device)
    qkv, bias = inputs(device, dtype, head_dim), given.get("attn_bias")
    wanted = [*qkv, *([bias] if bias is not None and bias.requires_grad else [])]
    exact = [x.detach().double().requires_grad_() for x in wanted]
    scores = exact[0] @ exact[1].mT * head_dim**-0.5
    if len(exact) > 3:
        scores = scores + exact[3].masked_fill(~shown, 0)
    sees = shown.any(-1, keepdim=True)
    scores = scores.masked_fill(~shown & sees, -math.inf)  # a row without keys is cut off below
    expected = scores.softmax(-1).masked_fill(~sees, 0) @ exact[2]
    lse = scores.logsumexp(-1).masked_fill(~sees[..., 0], 0)
    out, found_lse = flex_attention(*qkv, **given, return_lse=True)
    assert torch.equal(found_lse == -math.inf, ~sees[..., 0])
    found_lse = found_lse.masked_fill(~sees[..., 0], 0)
    dout, dlse = torch.randn_like(out), torch.randn_like(found_lse)
    found = [out, found_lse, *torch.autograd.grad([out, found_lse], wanted, [dout, dlse])]
    right = [expected, lse, *torch.autograd.grad([expected, lse], exact, [dout.double(), dlse.double()])]
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dbias"), found, right, strict=False):
        assert not x.isnan().any(), name
        error = ((x.double() - y).norm() / y.norm()).item()
        assert error < tolerance, f"{name}: expected an error of at most {tolerance}, got {error}"


@pytest.mark.parametrize("names", [*OF_FUNCTIONS, *TRIPLES], ids=" and ".join)
def test_hidden_keys_of_pairs_on_cpu(names):
    check(names, "cpu", torch.float32, 16, 1e-5)


def shown_by_lists(call: Call) -> torch.Tensor:
    """Elements that the kernels of a listed program show, read from its lists and bits."""
    if call.blocks.bits is None:
        return new_scores(torch.zeros(BATCH, HEADS, ROWS, KEYS), call) > -1e20
    lists, bits = call.blocks, call.blocks.bits
    elements = unpacked(bits.blocks)
    shown = torch.where((lists.states == FULL)[..., None, None], True, elements[bits.places.long()])
    shown = shown & (lists.states != 0)[..., None, None]
    assert torch.equal(bits.places >= 0, lists.states == PARTIAL)
    shown = shown.transpose(-3, -2).flatten(-4, -3).flatten(-2)[..., :ROWS, :KEYS]
    scores = Program(call.program.values, score=call.program.score)
    score = new_scores(torch.zeros(BATCH, HEADS, ROWS, KEYS), Call(scores, call.tensors, call.numbers))
    return shown & (score > -1e20)


@pytest.mark.parametrize("by_bits", [True, False], ids=["bits", "no bits"])
@pytest.mark.parametrize(
    "names",
    [pair for pair in [*OF_FUNCTIONS, *TRIPLES] if HIDERS[pair[0]].argument == "block_mask"],
    ids=" and ".join,
)
def test_hidden_keys_of_lists_for_the_kernels(names, by_bits, monkeypatch):
    """Program, lists and bits that a GPU's call would launch, in place of the reference."""
    given, shown = arguments_of(names, "cpu")
    mask, bias = given["block_mask"], given.get("attn_bias")
    call = trace(given.get("score_mod"), mask.mask_mod, True, bias, True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("tl_attention.api.flex_lists.stream_of", lambda device: 0)
    found = listed(call, kept_mask(mask), torch.empty(BATCH, HEADS, ROWS, 8), HEADS, by_bits)
    assert (found.blocks.bits is not None) == by_bits
    monkeypatch.undo()
    assert torch.equal(shown_by_lists(found), shown)


@pytest.mark.parametrize(("first", "second"), sorted(REFUSED))
def test_hidden_keys_of_refused_pairs(first, second):
    names = {hider.argument: name for name, hider in HIDERS.items()}
    given, _ = arguments_of((names[first], names[second]), "cpu")
    q, k, v = (x.transpose(1, 2) for x in inputs("cpu", torch.bfloat16, 16))
    with pytest.raises((TypeError, ValueError), match=REFUSED[first, second]):
        flash_attn_func(q, k, v, **given)


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (9, 0)}], ids=["causal", "window"])
def test_hidden_keys_of_options_beside_seqused(options):
    """The mask of an option is aligned with the last key that is used."""
    used, lengths = torch.tensor([20, 31], dtype=torch.int32), torch.tensor([0, 40, 80], dtype=torch.int32)
    q, k, v = (torch.randn(80, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    packed = flash_attn_varlen_func(q, k, v, lengths, lengths, 40, 40, seqused_k=used, **options)
    for i, rows in enumerate(used.tolist()):
        part = slice(40 * i, 40 * i + 40)
        alone = flash_attn_func(q[None, part], k[None, part][:, :rows], v[None, part][:, :rows], **options)
        torch.testing.assert_close(packed[part], alone[0])


@pytest.mark.gpu
@pytest.mark.parametrize("by_bits", [True, False], ids=["bits", "no bits"])
@pytest.mark.parametrize("names", [*OF_FUNCTIONS, *TRIPLES], ids=" and ".join)
def test_hidden_keys_of_pairs(names, by_bits, monkeypatch):
    if not by_bits:
        monkeypatch.setattr(mask_bits, "MAX_BLOCKS", 0)
    check(names, "cuda", torch.bfloat16, 64, 2e-2)
