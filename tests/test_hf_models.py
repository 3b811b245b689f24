"""Model classes of transformers with attn_implementation="tl_attention": each is right beside eager attention, or refused by a clear error.

A sample runs by default; `pytest --all-models tests/test_hf_models.py` runs all classes of the auto-model mappings, about 15 minutes.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import hf_models
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeModel

from tl_attention.integrations import hf

pytestmark = pytest.mark.filterwarnings("ignore")

# Of each way to lose a mask where layers do not say what the mask says: a window (see below), a bidirectional and a causal mask, none asked
SAMPLE = {
    "SplinterModel": "right",
    "NllbMoeModel": "right",
    "PaliGemmaModel": "right",
    "BloomModel": "refused",
    "LEDModel": "refused",
    "DogeModel": "refused",
    "BridgeTowerModel": "refused",
    "FalconModel": "refused",
    "JetMoeModel": "right",
    "Lfm3Model": "right",
    "GptOssForCausalLM": "right",
    "CLIPModel": "right",
}
KINDS = {name: kind for kind, name in hf_models.classes()}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_class" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-models")
        metafunc.parametrize("model_class", KINDS if every else SAMPLE)


@pytest.fixture(autouse=True)
def registered():
    """Register tl_attention itself again, in the place of the functions that count calls."""
    yield
    hf.register()


@pytest.mark.timeout(2 * hf_models.SECONDS)
def test_hf_models_are_right_or_refused(model_class):
    found = hf_models.result(KINDS[model_class], model_class)
    if "skipped" in found:
        assert model_class not in SAMPLE, found["skipped"]
        pytest.skip(found["skipped"])
    silent = {case: text for case, text in found["cases"].items() if text.startswith(("wrong", "obscure"))}
    assert not silent
    if model_class in SAMPLE:
        assert hf_models.verdict(found) == SAMPLE[model_class], found


def test_hf_models_follow_a_window_that_only_the_mask_has():
    """Layers of qwen2_moe and phimoe pass no sliding_window."""
    config = Qwen2MoeConfig(
        vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 2, num_experts=2, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2MoeModel._from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(5, 90, (2, 24))
    outs = []
    for implementation in ("eager", "tl_attention"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            outs.append(model(ids).last_hidden_state)
    assert hf_models.far(*outs) < hf_models.CLOSE


def test_hf_models_comparison_finds_a_lost_mask(monkeypatch):
    """The comparison fails where attention_forward ignores what the mask says."""
    lost = hf.attention_forward
    with monkeypatch.context() as patch:  # undone before the fixture registers hf again
        patch.setattr(
            hf,
            "attention_forward",
            lambda m, q, k, v, mask, **options: lost(m, q, k, v, None, is_causal=False),
        )
        found = hf_models.result("mistral", "MistralModel")
    assert hf_models.verdict(found) == "wrong"
