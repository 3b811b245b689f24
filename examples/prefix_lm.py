"""A prefix-LM on a block mask: train a small layer that sees a prompt in both directions, and what follows it causally.

    python examples/prefix_lm.py --steps 100

The answer is the prompt in reverse. A BlockMask says which blocks of queries and keys are hidden, so that kernels skip them. Runs on a
Hopper GPU, or without a GPU on the CPU by the slow reference.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from tl_attention import flex_attention
from tl_attention.api import block_masks, mask_picture
from tl_attention.problem.arguments import at_least

TOKENS, WIDTH, HEADS = 16, 128, 4


class Layer(nn.Module):
    """Self-attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, block_mask) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).bfloat16()
        out = flex_attention(q, k, v, block_mask=block_mask)
        x = x + self.out(out.transpose(1, 2).flatten(2).to(x.dtype))
        return x + self.feed(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Parameter(0.5 * torch.randn(length, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor, block_mask) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x, block_mask)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=at_least(1), default=100, help="training steps (default 100)")
    parser.add_argument(
        "--prefix", type=at_least(1), default=24, help="length of the prompt, and of the answer (default 24)"
    )
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    prefix, length = arguments.prefix, 2 * arguments.prefix
    torch.manual_seed(0)
    # Made once for all steps and layers; no tensor has an element per query and key
    block_mask = block_masks.prefix_lm(length, length, prefix, device=device)
    print(mask_picture.picture(block_masks.prefix_lm(4096, 4096, 1500, device=device)))

    model = Model(length).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(arguments.steps):
        prompt = torch.randint(TOKENS, (32, prefix), device=device)
        tokens = torch.cat([prompt, prompt.flip(1)], 1)
        # Each position of the answer but its last says the next; the last of the prompt says the first
        logits = model(tokens, block_mask)[:, prefix - 1 : -1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, prefix:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == arguments.steps - 1:
            right = (logits.argmax(-1) == tokens[:, prefix:]).float().mean()
            print(f"step {step}: loss {loss.item():.3f}, {right:.0%} of the answers right")


if __name__ == "__main__":
    main()
