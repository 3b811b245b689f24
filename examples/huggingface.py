"""A small Llama on tl_attention: train it on packed documents, then generate from padded prompts.

    python examples/huggingface.py --steps 20

Weights are random. Runs on a Hopper GPU, or without a GPU on the CPU by the slow reference.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tl_attention.hf
from tl_attention.problem.arguments import at_least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=at_least(1), default=20, help="training steps (default 20)")
    steps = parser.parse_args().steps

    tl_attention.hf.register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(
        config, attn_implementation="tl_attention", dtype=torch.bfloat16
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Three documents in one row; position_ids start at 0 for each, which masks the others
    lengths = 50, 100, 42
    tokens = torch.cat([torch.arange(n) % 11 + 1 for n in lengths])[None].to(device)
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    for step in range(steps):
        loss = model(tokens, position_ids=position_ids, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")

    prompts = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 7, 8, 9]], device=device)
    out = model.eval().generate(prompts, attention_mask=prompts > 0, max_new_tokens=8, do_sample=False)
    print(out.tolist())


if __name__ == "__main__":
    main()
