"""Documents in one row that position_ids tell apart, in transformers models: none sees another, as with flash_attention_2."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("transformers")

from test_hf import Trio, assert_close, tokens
from test_hf_flex import models as flex_models
from transformers import StaticCache
from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks

from tl_attention.integrations import hf

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
hf.register()

LENGTHS = 7, 12, 5
TOTAL = sum(LENGTHS)
BOUNDS = [0, *itertools.accumulate(LENGTHS)]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def positions(lengths=LENGTHS, first=0):
    return torch.cat([torch.arange(n) + first for n in lengths])[None]


def document(lengths=LENGTHS):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def inputs(heads=2, length=TOTAL, keys=None, batch=1, dim=16):
    torch.manual_seed(0)
    shapes = (length, keys or length, keys or length)
    return [torch.randn(batch, heads, n, dim) for n in shapes]


def dense(q, k, v, seen, bias=0.0, sink=None):
    """Attention in plain PyTorch in fp32: [batch, seqlen, heads, head_dim]."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5 + bias).masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


def made(length=TOTAL, keys=None, **options):
    """Mask of hf.attention_mask for one row."""
    return hf.attention_mask(1, length, keys or length, **{"mask_function": causal_mask_function} | options)


def attend(q, k, v, mask, **options):
    return hf.attention_forward(torch.nn.Module(), q, k, v, mask, **options)[0]


SEEN = (document()[:, None] == document()) & torch.ones(TOTAL, TOTAL).tril().bool()
FULL = document()[:, None] == document()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("case", ["default-cache", "static-cache", "ones", "no-cache"])
def test_hf_packed_documents_of_position_ids_do_not_mix(name, case):
    """Windows, softcap and sinks are in these models; gpt-oss makes its masks without position_ids."""
    trio, ids = Trio(name, "cpu"), tokens(1, TOTAL, "cpu")
    options = {"position_ids": positions()}
    if case == "no-cache":
        options["use_cache"] = False
    if case == "ones":
        options["attention_mask"] = torch.ones_like(ids)
    if case == "static-cache":
        options["past_key_values"] = StaticCache(trio.ours.config, max_cache_len=32)
    with torch.no_grad():
        ours = trio.ours(ids, **options).logits
        pieces = ids.split(LENGTHS, 1)
        eager = [
            torch.cat([m(x, use_cache=False).logits for x in pieces], 1) for m in (trio.eager, trio.exact)
        ]
    assert_close(ours, *eager)


@devices
def test_hf_packed_documents_of_a_training_step(device):
    trio, ids = Trio("mistral", device), tokens(1, TOTAL, device)
    given = {"position_ids": positions().to(device), "labels": ids}
    losses = []
    for model in trio.all(lambda model: model):
        if model is trio.ours:
            logits = model(ids, **given).logits
        else:
            logits = torch.cat([model(x, use_cache=False).logits for x in ids.split(LENGTHS, 1)], 1)
        losses.append(logits.float().logsumexp(-1).sum())
        losses[-1].backward()
    grads = trio.all(lambda model: model.model.layers[0].self_attn.k_proj.weight.grad)
    assert_close(*grads, times=3)  # as gradients have in testing/numeric.py


def test_hf_packed_padding_to_a_multiple():
    """A collator that pads to a multiple gives position 0 to each token of padding."""
    q, k, v = inputs(length=TOTAL + 8)
    at = torch.cat([positions(), torch.zeros(1, 8, dtype=torch.int64)], 1)
    out = attend(q, k, v, made(TOTAL + 8), position_ids=at)
    torch.testing.assert_close(out[:, :TOTAL], dense(*(x[:, :, :TOTAL] for x in (q, k, v)), SEEN))
    torch.testing.assert_close(out[:, TOTAL:], v.transpose(1, 2)[:, TOTAL:])


def test_hf_packed_positions_may_begin_anywhere():
    """RoBERTa's begin behind padding_idx; a position that jumps or repeats begins no document, as in flash_attention_2."""
    q, k, v = inputs()
    torch.testing.assert_close(attend(q, k, v, made(), position_ids=positions(first=2)), dense(q, k, v, SEEN))
    causal = dense(q, k, v, torch.ones(TOTAL, TOTAL).tril().bool())
    jumps = torch.tensor([[0, 1, 2, 2, 2, 9, 10, *range(11, 11 + TOTAL - 7)]])
    torch.testing.assert_close(attend(q, k, v, made(), position_ids=jumps), causal)
    torch.testing.assert_close(attend(q, k, v, made(), position_ids=torch.arange(TOTAL) + 5), causal)


def test_hf_packed_positions_are_read_anew_when_they_change():
    q, k, v = inputs()
    at = positions()
    torch.testing.assert_close(attend(q, k, v, None, position_ids=at), dense(q, k, v, SEEN))
    at.copy_(torch.arange(TOTAL))
    torch.testing.assert_close(
        attend(q, k, v, None, position_ids=at), dense(q, k, v, torch.ones(TOTAL, TOTAL).tril().bool())
    )
    with torch.inference_mode():
        at = positions()
        torch.testing.assert_close(attend(q, k, v, None, position_ids=at), dense(q, k, v, SEEN))


def test_hf_packed_positions_of_another_thread(monkeypatch):
    """A thread that reads positions of its own between two looks at those that were read last."""
    q, k, v = inputs()
    at, others = positions(), torch.arange(TOTAL)[None]

    def same():
        monkeypatch.setattr(hf, "_last", (lambda: others, others._version, None))
        return at

    found = hf._documents(at, None)
    monkeypatch.setattr(hf, "_last", (same, at._version, found))
    torch.testing.assert_close(attend(q, k, v, None, position_ids=at), dense(q, k, v, SEEN))


def test_hf_packed_bidirectional():
    q, k, v = inputs()
    full = {"mask_function": None, "allow_is_bidirectional_skip": True}
    for mask, options in ((None, {"is_causal": False}), (made(**full), {})):
        out = attend(q, k, v, mask, position_ids=positions(), **options)
        torch.testing.assert_close(out, dense(q, k, v, FULL))
    q, k, v = inputs(keys=TOTAL + 3)  # keys of another sequence: cross attention
    out = attend(q, k, v, None, position_ids=positions(), is_causal=False)
    torch.testing.assert_close(out, dense(q, k, v, torch.ones(TOTAL, TOTAL + 3).bool()))


@pytest.mark.parametrize("kind", ["sink", "bias", "blocks", "holes", "bias-and-documents-of-the-mask"])
@devices
def test_hf_packed_beside(kind, device):
    """Each entry: sinks, position biases, mask functions that become a BlockMask; documents in the mask or in position_ids alone."""
    q, k, v = (x.to(device) for x in inputs())
    if device == "cuda":
        q, k, v = (x.bfloat16() for x in (q, k, v))
    seen, options, mask, terms = SEEN, {"position_ids": positions().to(device)}, {"device": device}, {}
    if kind == "sink":
        options["s_aux"] = terms["sink"] = torch.tensor([0.5, 2.0], device=device)
    if kind.startswith("bias"):
        options["position_bias"] = terms["bias"] = torch.randn(1, 2, TOTAL, TOTAL).to(q)
    if kind == "blocks":  # images at 2 to 9: over a bound of two documents
        images = torch.full((1, TOTAL), -1, device=device)
        images[:, 2:10] = 0
        mask |= {"mask_function": or_masks(causal_mask_function, blockwise_overlay(images)), "use_vmap": True}
        both = torch.zeros(TOTAL, TOTAL, dtype=torch.bool)
        both[2:10, 2:10] = True
        seen = (SEEN | both) & FULL
    if kind == "holes":
        seen = SEEN & (torch.arange(TOTAL) != 9)
        mask["mask_function"] = lambda b, h, q, k: (k <= q) & (k != 9)
    if kind.endswith("mask"):
        ids = document().to(device)
        mask["mask_function"] = lambda b, h, q, k: (k <= q) & (ids[q] == ids[k])
        options.pop("position_ids")
    out = attend(q, k, v, made(**mask), **options)
    rows = seen.any(-1)
    expected = dense(*(x.float() for x in (q, k, v)), seen.to(device), **terms)[:, rows]
    atol = 1e-4 if device == "cpu" else 0.03
    torch.testing.assert_close(
        out[:, rows].float(), expected, atol=atol, rtol=1e-4 if device == "cpu" else 0.03
    )


def test_hf_packed_positions_of_padded_rows_and_batches_tell_no_documents():
    """The mask of a padded row comes first, as in flash_attention_2; a batch has a document per row."""
    q, k, v = inputs()
    real = torch.arange(TOTAL)[None] >= 4
    padded = made(attention_mask=real)
    at = (real.long().cumsum(1) - 1).clamp(min=0)
    seen = torch.ones(TOTAL, TOTAL).tril().bool() & real
    out = attend(q, k, v, padded, position_ids=at)
    torch.testing.assert_close(out[:, 4:], dense(q, k, v, seen)[:, 4:])
    q, k, v = inputs(batch=2)
    causal = dense(q, k, v, torch.ones(TOTAL, TOTAL).tril().bool())
    out = attend(q, k, v, None, position_ids=positions().expand(2, -1))
    torch.testing.assert_close(out, causal)


def test_hf_packed_documents_beside_a_filled_cache_are_refused():
    q, k, v = inputs(length=6, keys=TOTAL)
    at = torch.tensor([[0, 1, 2, 0, 1, 2]])
    mask = hf.attention_mask(1, 6, TOTAL, q_offset=TOTAL - 6, mask_function=causal_mask_function)
    for given in (mask, None):
        with pytest.raises(
            NotImplementedError, match="^position_ids: expected positions that do not start over"
        ):
            attend(q, k, v, given, position_ids=at)
    with pytest.raises(NotImplementedError, match="^position_ids: expected"):
        attend(q, k, v, made(6, TOTAL, q_offset=torch.tensor(2)), position_ids=at)


def test_hf_packed_lengths_may_be_read_in_a_compiled_call():
    q, k, v = inputs()
    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)

    def call(bounds):
        longest = bounds.diff().max().item()
        given = {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        return attend(q, k, v, None, is_causal=True, **given)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = torch.compile(call, backend="aot_eager", fullgraph=True)(bounds)
    torch.testing.assert_close(found, call(bounds))


@pytest.mark.parametrize("cause", ["positions", "mask", "ones", "holes"])
def test_hf_packed_documents_fail_in_a_compiled_call(cause):
    """Documents cannot be found there without a wait, so the call fails on the device; one document runs."""
    q, k, v = inputs()
    ids = document()
    function = causal_mask_function
    if cause == "mask":

        def function(b, h, q, k):
            return (k <= q) & (ids[q] == ids[k])

    real = None
    if cause in ("ones", "holes"):
        real = torch.ones(1, TOTAL, dtype=torch.bool)

    def call(at, real):
        return attend(q, k, v, made(mask_function=function, attention_mask=real), position_ids=at)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    one = torch.arange(TOTAL)[None]
    if cause != "mask":
        torch.testing.assert_close(
            compiled(one, real), dense(q, k, v, torch.ones(TOTAL, TOTAL).tril().bool())
        )
    if cause == "holes":
        real = real.clone()
        real[:, 9] = False
    with pytest.raises(RuntimeError, match="attention_mask: expected|position_ids: expected one document"):
        compiled(one if cause in ("mask", "holes") else positions(), real)


def test_hf_packed_flex_models_keep_documents_apart():
    """gemma3 with bidirectional attention has a mask function of its own, which becomes a BlockMask."""
    ours, eager, exact = flex_models("gemma3", "cpu")
    ids = tokens(1, TOTAL, "cpu")
    with torch.no_grad():
        found = ours(ids, position_ids=positions()).logits
        expected = [torch.cat([m(x).logits for x in ids.split(LENGTHS, 1)], 1) for m in (eager, exact)]
    assert_close(found, *expected)
