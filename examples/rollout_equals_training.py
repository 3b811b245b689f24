"""Log-probabilities of sampled tokens, recomputed in training with difference 0.

    python examples/rollout_equals_training.py --prompts 8 --tokens 64

A small decoder samples tokens for prompts of different lengths: it prefills a cache in chunks, then decodes token by token with all
sequences in a batch. Then all sequences are packed, and one forward that records gradients computes the same log-probabilities. With
batch_invariant each result of attention has the same bits in both phases; without it, they differ. Attention is not all: the products with
weights run 64 rows at a time here, as torch.matmul, too, may round differently for other numbers of rows.

Needs a Hopper GPU. The exit status is 1 if a difference is not 0.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F

from tl_attention import flash_attn_varlen_func, flash_attn_with_kvcache
from tl_attention.problem.arguments import at_least

VOCABULARY, LAYERS, HEADS, HEADS_KV, HEAD_DIM = 512, 2, 8, 2, 64
WIDTH = HEADS * HEAD_DIM
ROWS = 64  # of each product with weights
ROOM = 512  # keys per sequence in the cache
CHUNK = 48  # prompt tokens per prefill


class Linear(torch.nn.Linear):
    """A product of ROWS rows at a time, so that a row's bits do not depend on the number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[0] % ROWS))
        return torch.cat([super(Linear, self).forward(rows) for rows in padded.split(ROWS)])[: x.shape[0]]


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm_mlp = torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH)
        self.qkv = Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out, self.up, self.down = (
            Linear(*sizes, bias=False) for sizes in ((WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
        )

    def forward(self, x: torch.Tensor, attend) -> torch.Tensor:
        """x: [rows, WIDTH]. attend: attention of q, k, v [rows, heads, HEAD_DIM], as q."""
        q, k, v = self.qkv(self.norm(x)).unflatten(1, (-1, HEAD_DIM)).split((HEADS, HEADS_KV, HEADS_KV), 1)
        x = x + self.out(attend(q, k, v).flatten(1))
        return x + self.down(F.silu(self.up(self.norm_mlp(x))))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, attend) -> torch.Tensor:
        """Logits [rows, VOCABULARY] in fp32. attend: attend(layer, q, k, v)."""
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, lambda q, k, v, number=number: attend(number, q, k, v))
        return self.head(x).float()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=at_least(1), default=8, help="sequences (default 8)")
    parser.add_argument(
        "--tokens", type=at_least(1), default=64, help="sampled tokens per prompt (default 64)"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model().bfloat16()
    lengths = torch.randint(1, 200, (args.prompts,)).tolist()
    prompts = [torch.randint(VOCABULARY, (n,), device="cuda") for n in lengths]
    found = {}
    for invariant in (False, True):
        sequences, sampled = roll_out(model, prompts, args.tokens, invariant)
        trained = recompute(model, sequences, lengths, invariant)
        found[invariant] = (trained - sampled).abs().max().item()
        trained.mean().backward()
        print(f"batch_invariant={invariant}: largest difference of a log-probability {found[invariant]:.3g}")
    return int(found[True] != 0)


@torch.no_grad()
def roll_out(
    model: Model, prompts: list[torch.Tensor], count: int, invariant: bool
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(each prompt with its sampled tokens, log-probabilities of those, [prompts, count])."""
    caches = torch.zeros(
        2, LAYERS, len(prompts), ROOM, HEADS_KV, HEAD_DIM, device="cuda", dtype=torch.bfloat16
    )
    used = torch.zeros(len(prompts), device="cuda", dtype=torch.int32)

    def step(tokens: torch.Tensor, of: slice) -> torch.Tensor:
        """Logits of the last of these tokens [sequences, tokens] of some sequences, which go into the cache."""

        def attend(layer, *qkv):
            q, k, v = (x.unflatten(0, tokens.shape) for x in qkv)
            lengths = {"cache_seqlens": used[of], "causal": True, "batch_invariant": invariant}
            out = flash_attn_with_kvcache(q, caches[0, layer, of], caches[1, layer, of], k, v, **lengths)
            return out.flatten(0, 1)

        logits = model(tokens.flatten(), attend).unflatten(0, tokens.shape)[:, -1]
        used[of] += tokens.shape[1]
        return logits

    logits = []
    for i, prompt in enumerate(prompts):
        for chunk in prompt.split(CHUNK):
            last = step(chunk[None], slice(i, i + 1))
        logits.append(last)
    logits, tokens, chosen = torch.cat(logits), [], []
    for _ in range(count):
        logs = logits.log_softmax(-1)
        tokens.append(torch.multinomial(logs.exp(), 1))
        chosen.append(logs.gather(1, tokens[-1]))
        logits = step(tokens[-1], slice(None))
    sampled = torch.cat(tokens, 1)
    return [torch.cat(pair) for pair in zip(prompts, sampled, strict=True)], torch.cat(chosen, 1)


def recompute(
    model: Model, sequences: list[torch.Tensor], prompts: list[int], invariant: bool
) -> torch.Tensor:
    """Log-probabilities of the sampled tokens, [sequences, tokens], by one forward of the packed sequences.

    Args:
        prompts: number of tokens of each prompt.
    """
    lengths = torch.tensor([0, *map(len, sequences)])
    ends, longest = lengths.cumsum(0).int().cuda(), int(lengths.max())

    def attend(_, q, k, v):
        return flash_attn_varlen_func(
            q, k, v, ends, ends, longest, longest, causal=True, batch_invariant=invariant, deterministic=True
        )

    logs = model(torch.cat(sequences), attend).log_softmax(-1).split(lengths[1:].tolist())
    return torch.stack(
        [
            rows[n - 1 : -1].gather(1, tokens[n:, None])[:, 0]
            for rows, tokens, n in zip(logs, sequences, prompts, strict=True)
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
