"""transformers models with attn_implementation="tl_attention" compared to eager: logits, gradients, padding, packing, caches."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from torch.nn.attention.flex_attention import create_mask
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from tl_attention.api import kvcache
from tl_attention.integrations import hf, hf_mask_function

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
hf.register()

WINDOW = 8
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
MODELS = {
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**SIZES)),
    "mistral": (MistralForCausalLM, lambda: MistralConfig(**SIZES, sliding_window=WINDOW)),
    "gemma2": (
        Gemma2ForCausalLM,
        lambda: Gemma2Config(
            **SIZES, sliding_window=WINDOW, attn_logit_softcapping=5.0, query_pre_attn_scalar=20
        ),
    ),
    # All experts are active for every token: with a selection, rounding errors could change the experts
    "gpt-oss": (
        GptOssForCausalLM,
        lambda: GptOssConfig(
            **SIZES | {"initializer_range": 0.1},
            sliding_window=WINDOW,
            num_local_experts=2,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    ),
}
models = pytest.mark.parametrize("name", MODELS)


class Trio:
    """One model with random bf16 weights, three times: tl_attention, eager in bf16, and eager in fp32."""

    def __init__(self, name, device):
        kind, config = MODELS[name]
        torch.manual_seed(0)
        eager = (
            kind._from_config(config(), attn_implementation="eager", dtype=torch.bfloat16).eval().to(device)
        )
        ours = kind._from_config(config(), attn_implementation="tl_attention", dtype=torch.bfloat16).eval()
        ours.to(device).load_state_dict(eager.state_dict())
        self.ours, self.eager, self.exact = ours, eager, copy.deepcopy(eager).float()

    def all(self, run):
        return tuple(run(model) for model in (self.ours, self.eager, self.exact))


def assert_close(ours, eager, exact, times=2):
    """Assert the error rule: at most `times` the error of eager attention in bf16, plus the rounding of a sum."""
    rounded = exact.to(eager.dtype)
    allowed = times * (eager - exact).abs().max() + 2 * (rounded + 0.3 - 0.3 - rounded).abs().max()
    assert (ours - exact).abs().max() <= allowed


def tokens(batch, length, device, seed=1):
    return torch.randint(
        1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed)
    ).to(device)


def padding(left, right, length, device):
    """Mask [batch, length], False for this many tokens on the left and on the right of each sequence."""
    at = torch.arange(length, device=device)
    sides = torch.tensor([left, right], device=device)[..., None]
    return (at >= sides[0]) & (at < length - sides[1])


def logits_and_gradients(model, ids, mask=None, **options):
    out = model(ids, attention_mask=mask, use_cache=False, **options).logits
    if mask is not None:
        out = out[mask]
    return out.detach(), gradients(out, model)


def gradients(out, model):
    """Gradients of a weighted sum of out, by parameter name."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad((out * weights).sum(), parameters), strict=True))


def assert_gradients_close(ours, eager, exact):
    for name in exact:
        assert_close(ours[name], eager[name], exact[name], times=3)


@models
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_hf_logits_and_gradients_match_eager(name, padded, device):
    ids = tokens(3, 24, device)
    mask = padding([0, 5, 0], [0, 0, 9], 24, device) if padded else None
    outputs = Trio(name, device).all(lambda model: logits_and_gradients(model, ids, mask))
    logits, grads = zip(*outputs, strict=True)
    assert_close(*logits)
    assert_gradients_close(*grads)


LOST = {
    "mistral": {"window_size": (-1, -1)},
    "gemma2": {"softcap": 0.0},
    "gpt-oss": {"learnable_sink": None},
}


@pytest.mark.parametrize("name", LOST)
def test_hf_error_rule_detects_a_lost_option(name, monkeypatch):
    full = hf.flash_attn_func
    monkeypatch.setattr(hf, "flash_attn_func", lambda *qkv, **options: full(*qkv, **options | LOST[name]))
    logits = Trio(name, "cpu").all(lambda model: model(tokens(2, 24, "cpu")).logits)
    with pytest.raises(AssertionError):
        assert_close(*logits)


@models
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_hf_prefill_chunks_and_decode_match_eager(name, cache, padded, device):
    ids = tokens(2, 20, device)
    mask = padding([0, 3], [0, 0], 20, device)
    trio = Trio(name, device)

    @torch.no_grad()
    def logits_by_parts(model):
        past = StaticCache(model.config, max_cache_len=32) if cache == "static" else None
        parts = []
        for begin, end in [(0, 12), (12, 16), *((i, i + 1) for i in range(16, 20))]:
            given = mask[:, :end] if padded else None
            out = model(ids[:, begin:end], attention_mask=given, past_key_values=past, use_cache=True)
            past = out.past_key_values
            parts.append(out.logits)
        return torch.cat(parts, 1)[mask if padded else ...]

    assert_close(*trio.all(logits_by_parts))


@pytest.fixture
def cache_calls(monkeypatch):
    """Record the arguments of flash_attn_with_kvcache."""
    real, seen = kvcache.flash_attn_with_kvcache, []

    def recorded(q, k, v, **options):
        seen.append({"q": q, "k": k, "v": v, **options})
        return real(q, k, v, **options)

    monkeypatch.setattr(kvcache, "flash_attn_with_kvcache", recorded)
    return seen


@models
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_hf_decode_does_not_copy_the_cache(name, cache, cache_calls):
    model, ids = Trio(name, "cpu").ours, tokens(2, 6, "cpu")
    past = StaticCache(model.config, max_cache_len=12) if cache == "static" else None
    with torch.no_grad():
        past = model(ids, past_key_values=past, use_cache=True).past_key_values
        cache_calls.clear()
        model(ids[:, :1], past_key_values=past)
    assert len(cache_calls) == len(past.layers)
    for seen, layer in zip(cache_calls, past.layers, strict=True):
        assert seen["q"].shape[1] == 1
        assert seen["q"].stride() == torch.empty(seen["q"].shape).stride()
        assert seen["k"].data_ptr() == layer.keys.data_ptr()
        assert seen["v"].data_ptr() == layer.values.data_ptr()
        if cache == "static":
            assert seen["cache_seqlens"].tolist() == [7, 7]
        else:
            assert seen["cache_seqlens"] is None
        assert seen["cache_leftpad"] is None


def test_hf_gradients_dropout_and_many_queries_do_not_use_the_cache_kernel(cache_calls):
    q, k = torch.randn(1, 2, 3, 16).bfloat16(), torch.randn(1, 2, 80, 16).bfloat16()
    attend = partial(hf.attention_forward, torch.nn.Module())
    attend(q, k, k, None)
    assert len(cache_calls) == 1
    attend(q.clone().requires_grad_(), k, k, None)
    attend(q, k, k, None, s_aux=torch.zeros(2, requires_grad=True))
    attend(q, k, k, None, dropout=0.5)
    attend(k[:, :, : hf.MAX_DECODE_QUERIES + 1], k, k, None)
    attend(q, q, q, None)
    assert len(cache_calls) == 1
    with torch.no_grad():
        attend(q.clone().requires_grad_(), k, k, None)
    assert len(cache_calls) == 2


@pytest.mark.parametrize("queries", [1, 3])
def test_hf_mask_holds_the_padding_of_a_cache(queries, cache_calls):
    """Four sequences: 2 keys of left padding, no padding, only padding, and padding up to the last query."""
    length, offset = 12, 8 - queries
    at = torch.arange(8)
    real = torch.stack([at >= 2, at >= 0, at < 0, at >= 7])
    sizes = {"batch_size": 4, "q_length": queries, "kv_length": length, "q_offset": torch.tensor(offset)}
    mask = hf.attention_mask(**sizes, mask_function=causal_mask_function, attention_mask=real)
    assert mask.rows[4:, :4].tolist() == [[8, 8, 0, 8], [2, 0, 0, 7]]
    q, k = torch.randn(4, 2, queries, 16).bfloat16(), torch.randn(4, 2, length, 16).bfloat16()
    masks = mask, dataclasses.replace(mask, rows=mask.rows[:4])
    outs = [hf.attention_forward(torch.nn.Module(), q, k, k, x)[0] for x in masks]
    assert len(cache_calls) == 1
    torch.testing.assert_close(*outs)
    assert outs[0][2].eq(0).all()


@pytest.mark.parametrize("queries", [1, 3])
def test_hf_padding_queries_are_zero(queries, cache_calls):
    """The second sequence ends with padding. Several queries need the varlen path, a single one sees no key."""
    real = torch.ones(2, 8, dtype=torch.bool)
    real[1, 7:] = False
    sizes = {"batch_size": 2, "q_length": queries, "kv_length": 8, "q_offset": 8 - queries}
    mask = hf.attention_mask(**sizes, mask_function=causal_mask_function, attention_mask=real)
    q, k = torch.randn(2, 2, queries, 16).bfloat16(), torch.randn(2, 2, 8, 16).bfloat16()
    out, _ = hf.attention_forward(torch.nn.Module(), q, k, k, mask)
    assert len(cache_calls) == (queries == 1)
    seen = torch.ones(2, 1, queries, 8, dtype=torch.bool).tril(8 - queries) & real[:, None, None]
    exact = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), k.float(), seen)
    rows = real[:, 8 - queries :]
    torch.testing.assert_close(out[rows].float(), exact.transpose(1, 2)[rows], atol=0.02, rtol=0.02)
    assert out[~rows].eq(0).all()


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_hf_decode_compiles_without_a_graph_break(cache, padded, device, cache_calls):
    model, ids, mask = Trio("gemma2", device).ours, tokens(2, 7, device), padding([0, 3], [0, 0], 7, device)
    logits = []
    for step in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        torch._dynamo.reset()
        with torch.no_grad():
            past = StaticCache(model.config, max_cache_len=12) if cache == "static" else None
            given = mask[:, :6] if padded else None
            past = model(
                ids[:, :6], attention_mask=given, past_key_values=past, use_cache=True
            ).past_key_values
            cache_calls.clear()
            given = mask if padded else None
            logits.append(step(ids[:, 6:], attention_mask=given, past_key_values=past).logits)
        assert len(cache_calls) == len(past.layers)
    torch.testing.assert_close(*logits, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_hf_bidirectional_decoder(padded):
    trio = Trio("llama", "cpu")
    for model in (trio.ours, trio.eager, trio.exact):
        model.config.is_causal = False
    ids, mask = tokens(2, 14, "cpu"), padding([0, 2], [0, 3], 14, "cpu") if padded else None
    logits = trio.all(
        lambda model: model(ids, attention_mask=mask, use_cache=False).logits[mask if padded else ...]
    )
    assert_close(*logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_hf_generate(cache):
    ids, mask = tokens(2, 9, "cpu"), padding([0, 4], [0, 0], 9, "cpu")
    trio = Trio("gemma2", "cpu")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    generated = [model.generate(ids, **options) for model in (trio.ours, trio.exact)]
    assert (generated[0] == generated[1]).float().mean() > 0.8  # rounding may change a late token


@pytest.mark.parametrize(
    ("name", "by"),
    # GPT-OSS does not pass position_ids to its masks: eager attention mixes the sequences, too
    [(name, "position_ids") for name in MODELS if name != "gpt-oss"]
    + [(name, "cu_seq_lens") for name in MODELS],
)
def test_hf_packed_sequences_do_not_mix(name, by, device):
    bounds, ids = [0, 7, 19, 24], tokens(1, 24, device)
    sequences = [slice(*pair) for pair in itertools.pairwise(bounds)]
    options = {
        "position_ids": torch.cat([torch.arange(x.stop - x.start) for x in sequences])[None].to(device)
    }
    if by == "cu_seq_lens":
        cu = torch.tensor(bounds, device=device)
        options |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 12, "max_length_k": 12}
    trio = Trio(name, device)
    ours = trio.ours(ids, use_cache=False, **options).logits
    per_sequence = (
        torch.cat([model(ids[:, x], use_cache=False).logits for x in sequences], 1)
        for model in (trio.eager, trio.exact)
    )
    logits = [ours, *per_sequence]
    assert_close(*logits)
    grads = [gradients(*pair) for pair in zip(logits, (trio.ours, trio.eager, trio.exact), strict=True)]
    assert_gradients_close(*grads)


def test_hf_encoder_with_padding(device):
    config = BertConfig(
        vocab_size=61, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    ids, mask = tokens(2, 18, device), padding([0, 0], [0, 6], 18, device)
    eager = (
        BertModel._from_config(config, attn_implementation="eager", dtype=torch.bfloat16).eval().to(device)
    )
    ours = BertModel._from_config(
        copy.deepcopy(config), attn_implementation="tl_attention", dtype=torch.bfloat16
    )
    ours.eval().to(device).load_state_dict(eager.state_dict())
    runs = (
        model(ids, attention_mask=mask).last_hidden_state[mask]
        for model in (ours, eager, copy.deepcopy(eager).float())
    )
    assert_close(*runs)


def test_hf_dropout_and_scaling_reach_the_call(monkeypatch):
    seen = {}
    monkeypatch.setattr(hf, "flash_attn_func", lambda q, k, v, **options: seen.update(options) or q)
    q, kv = torch.zeros(1, 4, 6, 16), torch.zeros(1, 2, 9, 16)
    out, weights = hf.attention_forward(
        torch.nn.Module(), q, kv, kv, None, dropout=0.25, scaling=0.5, sliding_window=4
    )
    assert (out.shape, weights) == ((1, 6, 4, 16), None)
    assert seen | {"dropout_p": 0.25, "softmax_scale": 0.5, "causal": True, "window_size": (3, 0)} == seen
    hf.attention_forward(torch.nn.Module(), q, kv, kv, None, dropout=0.25, sliding_window=4, is_causal=False)
    assert (seen["causal"], seen["window_size"]) == (False, (3, 3))


def test_hf_fp32_is_cast_only_in_autocast():
    q = torch.randn(1, 2, 6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = hf.attention_forward(torch.nn.Module(), q, q, q, None)
    assert out.dtype == torch.bfloat16
    out, _ = hf.attention_forward(torch.nn.Module(), q, q, q, None)
    assert out.dtype == torch.float32


def masked(mask, q_length, kv_length):
    """Keys that each query sees with a mask: bool [q_length, kv_length], from attention_forward with batch 1."""
    q = torch.zeros(1, 1, q_length, 16, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, kv_length, 16, dtype=torch.bfloat16)
    seen = []
    for key in range(kv_length):
        v = torch.zeros_like(k)
        v[:, :, key] = 1
        seen.append(hf.attention_forward(torch.nn.Module(), q, k, v, mask)[0][0, :, 0, 0] > 0)
    return torch.stack(seen, 1)


def test_hf_chunks_are_packed_sequences():
    config = LlamaConfig(**SIZES)
    config.attention_chunk_size, config._attn_implementation = 4, "tl_attention"
    mask = create_chunked_causal_mask(config, torch.zeros(1, 10, 64), None, None)
    at = torch.arange(10)
    assert torch.equal(masked(mask, 10, 10), (at[:, None] // 4 == at // 4) & (at[:, None] >= at))


def test_hf_mask_without_padding_waits_for_no_gpu(monkeypatch):
    monkeypatch.setattr(hf_mask_function, "_inspect", None)
    sizes = {"batch_size": 2, "q_length": 3, "kv_length": 5, "q_offset": 2}
    for function, options in ((causal_mask_function, {}), (None, {}), (None, {"local_size": 4})):
        mask = hf.attention_mask(**sizes, mask_function=function, **options)
        assert mask.causal and mask.rows is None and not mask.padded
    static = hf.attention_mask(**sizes | {"kv_length": 9, "q_offset": torch.tensor(2)})
    assert static.rows[2:, 1].tolist() == [3, 5, 5]


def test_hf_mask_has_no_rows_where_they_are_redundant():
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6}
    windows = sliding_window_causal_mask_function(3), sliding_window_bidirectional_mask_function(3)
    ones = torch.ones(2, 6, dtype=torch.bool)

    def made(function, **options):
        mask = hf.attention_mask(**sizes, mask_function=function, **options)
        assert mask.rows is None and mask.block_mask is None
        return mask.causal, mask.left, mask.right

    for given in (None, ones):
        full = {"attention_mask": given, "allow_is_bidirectional_skip": True}
        assert made(causal_mask_function, attention_mask=given) == (True, -1, -1)
        assert made(windows[0], local_size=3, attention_mask=given) == (True, 2, 0)
        assert made(bidirectional_mask_function, **full) == (False, -1, -1)
        assert made(windows[1], local_size=3, **full) == (False, 3, 3)


def test_hf_masks_of_other_kinds_become_block_masks():
    config = LlamaConfig(**SIZES)
    config._attn_implementation = "tl_attention"
    embeds = torch.zeros(1, 6, 64)
    at = torch.arange(6)
    causal, blocks = at[:, None] >= at, torch.tensor([[-1, 0, 0, 0, -1, -1]])
    in_block = (blocks[0][:, None] == blocks[0]) & (blocks[0] >= 0)
    holes = torch.tensor([[1, 0, 1, 1, 1, 1]])
    made = {
        "blocks": create_causal_mask(config, embeds, None, None, block_sequence_ids=blocks),
        "caller": create_causal_mask(config, embeds, None, None, or_mask_function=lambda b, h, q, k: k == 0),
        "holes": create_causal_mask(config, embeds, holes, None),
        "window": hf.attention_mask(
            1, 6, 6, mask_function=sliding_window_causal_mask_function(2), local_size=3
        ),
    }
    expected = {
        "blocks": causal | in_block,
        "caller": causal | (at == 0),
        "holes": causal & (at != 1),
        "window": causal & (at[:, None] - at < 2),
    }
    for name, mask in made.items():
        seen = create_mask(mask.block_mask.mask_mod, 1, 1, 6, 6, "cpu")[0, 0]
        assert torch.equal(seen, expected[name]), name
    config.sliding_window = 2
    mask = create_bidirectional_sliding_window_mask(config, embeds, None)
    assert (mask.rows, mask.block_mask, mask.left, mask.right) == (None, None, 2, 2)


def test_hf_paged_caches_are_errors():
    q = torch.zeros(1, 2, 6, 16, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="cache: expected None"):
        hf.attention_forward(torch.nn.Module(), q, q, q, None, cache=object())


def test_hf_old_transformers_is_an_error(monkeypatch):
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match="expected transformers 5 or later, got an older version"):
        hf.register()


def test_hf_attention_forward_has_named_parameters():
    names = inspect.signature(hf.attention_forward).parameters
    assert {"dropout", "scaling", "sliding_window", "softcap", "is_causal", "s_aux", "cu_seq_lens_q"} <= set(
        names
    )


def test_hf_compiles_without_a_graph_break(device):
    model = Trio("gemma2", device).ours
    ids, mask = tokens(2, 16, device), padding([0, 3], [0, 0], 16, device)
    expected = model(ids, attention_mask=mask, use_cache=False).logits[mask]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    out = compiled(ids, attention_mask=mask, use_cache=False).logits[mask]
    torch.testing.assert_close(out, expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("arguments", [["huggingface.py", "--steps", "2"], ["generate.py", "--tokens", "12"]])
def test_hf_examples_run(arguments, monkeypatch):
    example = Path(__file__).parents[1] / "examples" / arguments[0]
    monkeypatch.setattr(sys, "argv", [str(example), *arguments[1:]])
    try:
        runpy.run_path(str(example), run_name="__main__")
    except SystemExit as end:
        assert not end.code
