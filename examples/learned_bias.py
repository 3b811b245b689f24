"""Attention with a learned bias per head and distance: train two small layers to copy the token of some positions before.

    python examples/learned_bias.py --steps 60

The bias is a parameter that a score_mod captures; flex_attention gives it a gradient. Runs on a Hopper GPU, or without a GPU on the CPU
by the slow reference.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from tl_attention import flex_attention
from tl_attention.problem.arguments import at_least

TOKENS, WIDTH, HEADS, LENGTH, LAG = 32, 128, 4, 128, 5


class Attention(nn.Module):
    """Causal self-attention whose scores have a learned bias: bias[head, q_idx - kv_idx]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(HEADS, LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + bias[h, (q_idx - kv_idx).clamp(min=0)]

        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4).bfloat16()
        out = flex_attention(q, k, v, score_mod, mask_mod=causal)
        return self.out(out.transpose(1, 2).flatten(2).to(x.dtype))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer, norm in zip(self.layers, self.norms[:2], strict=True):
            x = x + layer(norm(x))
        return self.head(self.norms[2](x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=at_least(1), default=60, help="training steps (default 60)")
    steps = parser.parse_args().steps

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device)
    biases = [layer.bias for layer in model.layers]
    others = [x for x in model.parameters() if all(x is not bias for bias in biases)]
    optimizer = torch.optim.Adam([{"params": biases, "lr": 0.1}, {"params": others, "lr": 3e-3}])
    for step in range(steps):
        tokens = torch.randint(TOKENS, (16, LENGTH), device=device)
        logits = model(tokens)[:, LAG:]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, :-LAG].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")

    # Without positions in the embedding, only the bias can say how far back the token is
    for i, layer in enumerate(model.layers):
        print(
            f"layer {i}: distance with the largest bias, by head: {layer.bias.argmax(1).tolist()}; to copy: {LAG}"
        )


if __name__ == "__main__":
    main()
