"""Greedy generation with a small Llama of random weights, on tl_attention and on sdpa; compares their tokens.

    python examples/generate.py --tokens 32

Prompts are padded on the left. The cache is static and is never copied. Runs on a Hopper GPU, or without a GPU on the CPU by the slow
reference. The exit status is 1 if a token differs.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tl_attention.hf
from tl_attention.problem.arguments import at_least

SEED = 9  # with it, the best logit of each step leads the second by more than the rounding error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=at_least(1), default=32, help="new tokens per prompt (default 32)")
    tokens = parser.parse_args().tokens

    tl_attention.hf.register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM._from_config(config, dtype=torch.float16).eval().to(device)
    prompts = torch.randint(1, config.vocab_size, (2, 24)).to(device)
    prompts[1, :9] = config.pad_token_id

    def generate(implementation: str) -> torch.Tensor:
        """Generate tokens; return the logits of each step, [prompts, tokens, vocabulary]."""
        model.set_attn_implementation(implementation)
        result = model.generate(
            prompts,
            attention_mask=prompts != config.pad_token_id,
            max_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return torch.stack(result.logits, 1)

    logits = {}
    for implementation in ("sdpa", "tl_attention"):
        generate(implementation)  # compiles kernels
        start = time.perf_counter()
        logits[implementation] = generate(implementation)
        best = logits[implementation][0].argmax(-1).tolist()
        milliseconds = 1000 * (time.perf_counter() - start) / tokens
        print(f"{implementation}: {milliseconds:.2f} ms per step, first prompt {best}")

    ours, theirs = (logits[name].argmax(-1) for name in ("tl_attention", "sdpa"))
    if torch.equal(ours, theirs):
        print(f"the {theirs.numel()} tokens are equal")
        return 0
    for i, differ in enumerate((ours != theirs).tolist()):
        if any(differ):
            at = differ.index(True)
            first, second = logits["sdpa"][i, at].topk(2).values.tolist()
            print(
                f"prompt {i}: token {at} differs; the two best logits of sdpa are {first:.3f} and {second:.3f}"
            )
    return 1


if __name__ == "__main__":
    sys.exit(main())
