"""Log-probabilities of several answers to one prompt: one sequence with a prefix tree, beside a sequence per answer.

    python examples/prefix_tree.py --answers 8

As GRPO and preference training need them. Runs on a Hopper GPU, or without a GPU on the CPU by the slow reference.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from tl_attention import flex_attention
from tl_attention.api import block_masks, mask_picture
from tl_attention.problem.arguments import at_least

TOKENS, WIDTH, HEADS = 64, 128, 2


class Model(nn.Module):
    """A language model of two layers of attention with rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, block_mask) -> torch.Tensor:
        angles = positions[:, None] * 0.01 ** torch.linspace(0, 1, WIDTH // HEADS // 2, device=tokens.device)
        x = self.embedding(tokens)  # [seqlen, WIDTH]
        for qkv in self.qkv:
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).permute(1, 2, 0, 3)
            q, k = (rotated(y, angles.cos(), angles.sin()) for y in (q, k))
            out = flex_attention(*(y[None].bfloat16() for y in (q, k, v)), block_mask=block_mask)[0]
            x = x + out.transpose(0, 1).flatten(1).to(x.dtype)
        return self.head(x).log_softmax(-1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    real, imaginary = x.chunk(2, -1)
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)


def packed(model: Model, prompt: torch.Tensor, answers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probabilities of the tokens of each answer, from one sequence that has the prompt once."""
    n, sizes, device = len(prompt), [len(answer) for answer in answers], prompt.device
    parents, lengths = [-1] + [0] * len(answers), [n, *sizes]
    mask = block_masks.prefix_tree(parents, lengths, device=device)
    positions = block_masks.prefix_tree_positions(parents, lengths, device=device)
    tokens = torch.cat([prompt, *answers])
    # A token is predicted by the one before it, the first of each answer by the last of the prompt
    before = torch.arange(n - 1, len(tokens) - 1, device=device)
    before[positions[n:] == n] = n - 1
    found = model(tokens, positions, mask)[before]
    return [*found.gather(1, tokens[n:, None])[:, 0].split(sizes)]


def alone(model: Model, prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """The same of one answer, from a causal sequence of the prompt and the answer."""
    tokens, device = torch.cat([prompt, answer]), prompt.device
    mask = block_masks.causal(len(tokens), len(tokens), device=device)
    found = model(tokens, torch.arange(len(tokens), device=device), mask)
    return found[len(prompt) - 1 : -1].gather(1, answer[:, None])[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=at_least(1), default=200, help="tokens of the prompt (default 200)")
    parser.add_argument("--answers", type=at_least(1), default=4, help="number of answers (default 4)")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device)
    prompt = torch.randint(TOKENS, (arguments.prompt,), device=device)
    answers = [torch.randint(TOKENS, (30 + 11 * i,), device=device) for i in range(arguments.answers)]
    print(mask_picture.picture(block_masks.prefix_tree([-1, 0, 0, 0], [1500, 800, 1000, 796], device=device)))

    ours, theirs = packed(model, prompt, answers), [alone(model, prompt, answer) for answer in answers]
    for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        print(f"answer {i}: log-probability {x.sum():.3f} packed, {y.sum():.3f} alone")
    gradients = [torch.autograd.grad(sum(map(torch.sum, x)), model.parameters()) for x in (ours, theirs)]
    differences = [(x - y).norm() / y.norm() for x, y in zip(*gradients, strict=True)]
    print(f"gradients of the parameters differ by at most {max(differences):.1e} of their norms")


if __name__ == "__main__":
    main()
