"""transformers models whose masks or biases are no option of attention, compared to eager: gemma3, T5, 4-D masks."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from test_hf import SIZES
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import (
    blockwise_overlay,
    causal_mask_function,
    create_causal_mask,
    or_masks,
    sliding_window_causal_mask_function,
)

from tl_attention.api import block_masks
from tl_attention.integrations import hf
from tl_attention.integrations.hf_checks import is_block_mask

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
hf.register()

# Smooth activation: one ReLU that bf16 switches on or off makes up to three times the error of eager attention
T5 = {
    "feed_forward_proj": "gated-gelu",
    "vocab_size": 61,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
GEMMA3 = SIZES | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "gemma3": (Gemma3ForCausalLM, lambda: Gemma3TextConfig(**GEMMA3)),
    "gemma3-bidirectional": (Gemma3ForCausalLM, lambda: Gemma3TextConfig(**GEMMA3, use_bidirectional_attention=True)),
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**SIZES)),
    "t5": (T5ForConditionalGeneration, lambda: T5Config(**T5)),
}  # fmt: skip


# On a GPU each function has kernels of its own, which take time to build: those of one test per kind
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
on_cpu = pytest.mark.parametrize("device", ["cpu"])


def models(name, device):
    """One model with random weights, three times: tl_attention and eager in bf16, eager in fp32."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    eager = kind._from_config(config(), attn_implementation="eager", dtype=torch.bfloat16).eval().to(device)
    ours = kind._from_config(config(), attn_implementation="tl_attention", dtype=torch.bfloat16).eval()
    ours.to(device).load_state_dict(eager.state_dict())
    return ours, eager, copy.deepcopy(eager).float()


def tokens(batch, length, device, seed=1):
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(seed)).to(device)


def largest(error):
    return error.abs().max()


def rms(error):
    return error.float().square().mean().sqrt()


def assert_close(ours, eager, exact, measure=largest):
    """Assert the error rule: at most twice the error of eager attention in bf16, plus the rounding of a sum."""
    rounded = exact.to(eager.dtype)
    allowed = 2 * measure(eager - exact) + 2 * measure(rounded + 0.3 - 0.3 - rounded)
    assert measure(ours - exact) <= allowed


def logits_and_gradients(model, rows=..., **inputs):
    """Logits, and gradients of a weighted sum of them, by parameter name."""
    out = model(**inputs, use_cache=False).logits[rows]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad((out * weights).sum(), parameters, allow_unused=True)
    return out.detach(), {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def check(name, device, rows=..., **inputs):
    assert_results_close([logits_and_gradients(model, rows, **inputs) for model in models(name, device)])


def assert_results_close(results):
    """The error rule for the logits and gradients of the three models()."""
    logits, grads = zip(*results, strict=True)
    assert_close(*logits)
    assert len({frozenset(x) for x in grads}) == 1
    for key in grads[0]:
        assert_close(*(x[key] for x in grads), rms)  # the largest error of a weight varies too much


REAL = torch.arange(24) >= torch.tensor([0, 5, 0])[:, None]
HOLES = REAL & (torch.arange(24) != 11)


@on_cpu
def test_hf_flex_bidirectional_gemma3_matches_eager(device):
    """The mask function contains a lambda of the model."""
    check("gemma3-bidirectional", device, input_ids=tokens(3, 24, device))


@on_cpu
@pytest.mark.parametrize("mask", [REAL, HOLES], ids=["padded", "holes"])
def test_hf_flex_padding_matches_eager(mask, device):
    mask = mask.to(device)
    check("gemma3", device, mask, input_ids=tokens(3, 24, device), attention_mask=mask)


def image_mask(config, device, sliding):
    """Masks as of gemma3 with images: tokens 4 to 11 and 15 to 20 see all of their image."""
    images = torch.full((3, 24), -1, device=device)
    images[:, 4:12], images[1:, 15:21] = 0, 1
    embeds = torch.zeros(3, 24, 64, device=device)
    options = {"or_mask_function": blockwise_overlay(images)}
    if sliding:
        options["and_mask_function"] = tl_window
    return create_causal_mask(config, embeds, None, None, **options)


def tl_window(batch_idx, head_idx, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < 8


@devices
def test_hf_flex_image_tokens_match_eager(device):
    """Each model gets the masks that its implementation makes."""
    results = []
    for model in models("gemma3", device):
        masks = {
            kind: image_mask(model.config, device, kind[0] == "s")
            for kind in ("sliding_attention", "full_attention")
        }
        if not results:
            assert all(is_block_mask(x.block_mask) for x in masks.values())
        results.append(logits_and_gradients(model, input_ids=tokens(3, 24, device), attention_mask=masks))
    assert_results_close(results)


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("bool", "cpu"),
        ("additive", "cpu"),
        ("heads", "cpu"),
        pytest.param("bool", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_hf_flex_4d_masks_match_eager(kind, device):
    """Eager attention adds the mask to the scores, so that a bool mask is one of -inf there."""
    batch, heads = (3, 4) if kind == "heads" else (1, 1)
    seen = torch.rand(batch, heads, 24, 24, generator=torch.Generator().manual_seed(3)) > 0.4
    seen = (seen | torch.eye(24).bool()).to(device)
    added = torch.zeros(seen.shape, device=device).masked_fill(~seen, -1e9)
    ids, results = tokens(3, 24, device), []
    for model in models("llama", device):
        mask = seen if kind == "bool" and not results else added.to(model.dtype)
        results.append(logits_and_gradients(model, input_ids=ids, attention_mask=mask))
    assert_results_close(results)


@pytest.mark.parametrize(
    ("padded", "device"),
    [(False, "cpu"), (True, "cpu"), pytest.param(True, "cuda", marks=pytest.mark.gpu)],
)
def test_hf_flex_t5_matches_eager(padded, device):
    """The relative position bias is learned: its gradient is that of an embedding."""
    ids = tokens(3, 24, device)
    mask = (
        torch.arange(24, device=device) < torch.tensor([24, 20, 9], device=device)[:, None]
        if padded
        else None
    )
    check("t5", device, input_ids=ids, attention_mask=mask, decoder_input_ids=tokens(3, 17, device, 4))


@on_cpu
def test_hf_flex_t5_in_fp32_matches_eager(device):
    ours, _, eager = models("t5", device)
    asked = {"input_ids": tokens(3, 24, device), "decoder_input_ids": tokens(3, 17, device, 4)}
    (logits, grads), (expected, expected_grads) = (
        logits_and_gradients(x, **asked) for x in (ours.float(), eager)
    )
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * largest(expected).item())
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert rms(grad - expected_grads[name]) <= 1e-4 * rms(expected_grads[name]) + 1e-7, name


@on_cpu
def test_hf_flex_t5_generates_what_eager_does(device):
    ids = tokens(2, 9, device)
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    ours, eager, _ = (model.generate(ids, **options) for model in models("t5", device))
    assert torch.equal(ours.sequences, eager.sequences)
    for x, y in zip(ours.logits, eager.logits, strict=True):
        torch.testing.assert_close(x, y, atol=0.3, rtol=0.1)


@on_cpu
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_hf_flex_prefill_and_decode_match_eager(cache, device):
    ids, mask = tokens(3, 24, device), HOLES.to(device)

    @torch.no_grad()
    def logits_by_parts(model):
        past = StaticCache(model.config, max_cache_len=32) if cache == "static" else None
        parts = []
        for begin, end in [(0, 14), (14, 20), (20, 21), (21, 22)]:
            out = model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=past, use_cache=True)
            past = out.past_key_values
            parts.append(out.logits)
        return torch.cat(parts, 1)[mask[:, :22]]

    assert_close(*(logits_by_parts(model) for model in models("gemma3", device)))


def test_hf_flex_prefix_tree_matches_a_sequence_per_path():
    """Positions that start over tell no documents apart beside the mask."""
    model = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="tl_attention").eval()
    ids, lengths = tokens(1, 34, "cpu"), [11, 5, 7, 3, 8]
    parents, starts = [-1, 0, 0, 2, -1], [0, 11, 16, 23, 26]
    mask = block_masks.prefix_tree(parents, lengths, device="cpu")
    positions = block_masks.prefix_tree_positions(parents, lengths, device="cpu")
    with torch.no_grad():
        packed = model(ids, attention_mask=mask, position_ids=positions[None]).logits
        for nodes in ([0, 1], [0, 2, 3], [4]):
            path = [i for node in nodes for i in range(starts[node], starts[node] + lengths[node])]
            torch.testing.assert_close(packed[:, path], model(ids[:, path]).logits, rtol=1e-4, atol=1e-5)


def test_hf_flex_sinks_and_softcap():
    q, k, v = torch.randn(3, 2, 4, 9, 16).bfloat16()
    sink = torch.randn(4)
    dense = torch.ones(9, 9).tril().bool()[None, None]
    options = {"softcap": 5.0, "s_aux": sink, "scaling": 1.0}
    found, _ = hf.attention_forward(torch.nn.Module(), q, k, v, dense, **options)
    expected, _ = hf.attention_forward(torch.nn.Module(), q, k, v, None, is_causal=True, **options)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


MASK = torch.ones(1, 1, 9, 9).bool()
REFUSED = {
    "dropout": ({"attention_mask": MASK, "dropout": 0.1}, NotImplementedError, "dropout: expected 0 with a BlockMask.*dropout_rate"),
    "batch": ({"attention_mask": MASK.expand(3, -1, -1, -1)}, ValueError, r"attention_mask: expected shape .*got \(3, 1, 9, 9\)"),
    "keys": ({"attention_mask": MASK[..., :5]}, ValueError, r"attention_mask: expected shape .*got \(1, 1, 9, 5\)"),
    "device": ({"attention_mask": MASK.to("meta")}, ValueError, "attention_mask: expected the device of query, cpu, got meta"),
    "lengths": (
        {"attention_mask": block_masks.causal(9, 7, device="cpu")},
        ValueError,
        r"^attention_mask: expected one made for lengths \(9, 9\) of query and key, got one for \(9, 7\)",
    ),
    "double": ({"attention_mask": MASK.double()}, TypeError, "attention_mask: expected bool, True for keys"),
    "bias-bool": ({"position_bias": MASK}, TypeError, "position_bias: expected a float tensor"),
    "bias-3-d": ({"position_bias": MASK[0].float()}, ValueError, "position_bias: expected shape"),
    "packed": (
        {"attention_mask": MASK, "cu_seq_lens_q": torch.tensor([0, 18]), "cu_seq_lens_k": torch.tensor([0, 18])},
        NotImplementedError,
        "cu_seq_lens_q, cu_seq_lens_k: expected None with a BlockMask",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_hf_flex_refuses(options, error, text):
    q = torch.randn(2, 4, 9, 16).bfloat16()
    with pytest.raises(error, match=text):
        hf.attention_forward(torch.nn.Module(), q, q, q, **{"attention_mask": None} | options)


def test_hf_flex_masks_of_options_stay_options():
    """No BlockMask where an option serves."""
    sizes = {"batch_size": 2, "q_length": 9, "kv_length": 9}
    window = sliding_window_causal_mask_function(4)
    assert hf.attention_mask(**sizes, mask_function=causal_mask_function).block_mask is None
    assert hf.attention_mask(**sizes, mask_function=window, local_size=4).block_mask is None
    other = hf.attention_mask(**sizes, mask_function=or_masks(causal_mask_function, lambda b, h, q, k: k < 3))
    assert is_block_mask(other.block_mask) and other.block_mask.seq_lengths == (9, 9)
    assert hf.attention_mask(**sizes, attention_mask=other) is other


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemma3-bidirectional", "t5"])
def test_hf_flex_training_losses_are_those_of_eager(name):
    """Twenty steps; the difference is at most twice that of eager attention in bf16 from fp32, plus 0.5 %."""
    curves = []
    ids = tokens(8, 40, "cuda")
    for model in models(name, "cuda"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        losses = []
        for _ in range(20):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(torch.tensor(losses))
    ours, eager, exact = curves
    assert exact[-1] < exact[0]
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + 0.005 * exact.max()


HIDDEN_ROW = MASK.clone()
HIDDEN_ROW[..., 4, :] = False
PADDED_ROW = hf.attention_mask(1, 9, 9, attention_mask=torch.tensor([[0] + [1] * 8]))
WITHOUT_KEYS = {
    "mask": ({"attention_mask": HIDDEN_ROW}, 4),
    "additive": ({"attention_mask": torch.zeros(1, 1, 9, 9).masked_fill(~HIDDEN_ROW, -torch.inf)}, 4),
    "bias": ({"attention_mask": PADDED_ROW, "position_bias": torch.zeros(1, 4, 9, 9)}, 0),
}


@pytest.mark.parametrize("sink", [-torch.inf, 0.0, torch.inf])
@pytest.mark.parametrize(("options", "row"), WITHOUT_KEYS.values(), ids=WITHOUT_KEYS)
def test_hf_flex_sinks_without_bounds_are_finite(options, row, sink):
    """A query that sees no key has out 0, whatever its sink; a sink of -inf counts as none, one of inf takes all."""
    q, k, v = (torch.randn(1, 4, 9, 16, requires_grad=True) for _ in range(3))
    s_aux = torch.full((4,), sink, requires_grad=True)
    out, _ = hf.attention_forward(None, q, k, v, s_aux=s_aux, **options)
    assert out.isfinite().all() and out[:, row].eq(0).all()
    without, _ = hf.attention_forward(None, q, k, v, **options)
    if sink:
        torch.testing.assert_close(out, without if sink < 0 else torch.zeros_like(out))
    grads = torch.autograd.grad(out.sum(), (q, k, v, s_aux))
    assert all(x.isfinite().all() for x in grads)
    assert grads[3].eq(0).all() == bool(sink)
    if sink < 0:
        for x, y in zip(grads, torch.autograd.grad(without.sum(), (q, k, v)), strict=False):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("sink", [None, torch.zeros(4)], ids=["plain", "sink"])
@pytest.mark.parametrize("sizes", [(1, 9, 0), (1, 0, 9), (1, 0, 0), (0, 9, 9)], ids=str)
@pytest.mark.parametrize("kind", ["bias", "bias-of-mask", "mask", "additive"])
def test_hf_flex_empty_calls_are_those_without_a_mask(kind, sizes, sink):
    batch, seqlen_q, seqlen_k = sizes
    q, k = torch.randn(batch, 4, seqlen_q, 16), torch.randn(batch, 4, seqlen_k, 16)
    bias = torch.zeros(batch, 4, seqlen_q, seqlen_k, requires_grad=True)
    padding = torch.zeros(batch, seqlen_k, dtype=torch.int64)
    options = {
        "bias": {"attention_mask": None, "position_bias": bias},
        "bias-of-mask": {
            "attention_mask": hf.attention_mask(
                *sizes, attention_mask=padding, allow_is_bidirectional_skip=True
            ),
            "position_bias": bias,
        },
        "mask": {"attention_mask": torch.ones(batch, 1, seqlen_q, seqlen_k).bool()},
        "additive": {"attention_mask": bias},
    }[kind]
    out, _ = hf.attention_forward(None, q, k, k, s_aux=sink, is_causal=False, **options)
    expected, _ = hf.attention_forward(None, q, k, k, None, s_aux=sink, is_causal=False)
    assert out.shape == expected.shape and torch.equal(out, expected)
    if kind in ("bias", "additive"):
        (grad,) = torch.autograd.grad(out.sum(), bias)
        assert grad.shape == bias.shape and not grad.any()
