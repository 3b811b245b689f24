"""QK-clip of Muon (Kimi K2): training in which the attention scores of each head stay below a threshold.

    python examples/qk_clip.py --steps 10

After each step of the optimizer the weights of a head's queries and keys shrink if its largest score was above the threshold. A layer
returns the largest score of each query, and the largest one of a head is a maximum of these. Runs on a Hopper GPU, or without a GPU on the
CPU by the slow reference.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from tl_attention import flash_attn_func
from tl_attention.problem.arguments import at_least

WIDTH, HEADS, HEAD_DIM, LENGTH = 64, 2, 32, 48


class Attention(nn.Module):
    """Self-attention that keeps the largest score of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(0.5 * torch.randn(3, HEADS, HEAD_DIM, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.einsum("bsw,phdw->pbshd", x, self.qkv).bfloat16()
        out, max_logits = flash_attn_func(q, k, v, causal=True, return_max_logits=True)
        self.max_of_heads = max_logits.amax((0, 2))  # of batch entries and queries
        return out.float()

    @torch.no_grad()
    def clip(self, threshold: float) -> None:
        """Shrink Wq and Wk alike, so that their product shrinks by threshold / max."""
        factor = (threshold / self.max_of_heads).clamp(max=1).sqrt()
        self.qkv[:2] *= factor[:, None, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=at_least(1), default=10, help="training steps (default 10)")
    parser.add_argument("--threshold", type=float, default=5.0, help="largest score of a head (default 5)")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layer, x = Attention().to(device), torch.randn(4, LENGTH, WIDTH, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for step in range(arguments.steps):
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        layer.clip(arguments.threshold)
        print(f"step {step}: largest scores {', '.join(f'{m:.2f}' for m in layer.max_of_heads.tolist())}")


if __name__ == "__main__":
    main()
