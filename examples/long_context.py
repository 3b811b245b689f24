"""A small causal language model trained on one long sequence that all GPUs hold together.

    torchrun --nproc_per_node=8 examples/long_context.py --seqlen 262144
    python examples/long_context.py --seqlen 8192                            # one GPU
    python examples/long_context.py --seqlen 512 --layers 2 --heads 4        # the CPU, by the slow reference
    torchrun --nproc_per_node=2 examples/long_context.py --seqlen 65536 --documents 20

Each rank has all weights and its share of the tokens. Tokens, labels and positions are cut once per step; attention is the only layer
that sees other ranks' tokens. Each step prints the loss, tokens per second and, on GPUs, the peak memory of rank 0 so far. Losses do not
depend on the number of GPUs, up to rounding. The text repeats eight random phrases in random order, so the loss falls from
log(vocabulary), 4.2, as the model learns them: to 1.6 in the 20 steps on the CPU above.
"""

from __future__ import annotations

import argparse
import os
import random
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tl_attention import distributed
from tl_attention.problem.arguments import at_least

VOCABULARY = 64
HEAD_DIM = 64
PHRASE = 32  # tokens


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [tokens, heads, head_dim] at these positions."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None, None] * frequencies
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Layer(nn.Module):
    """Attention and an MLP, each after a norm and with a residual."""

    def __init__(self, heads: int, heads_kv: int):
        super().__init__()
        width = heads * HEAD_DIM
        self.heads, self.heads_kv = heads, heads_kv
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, (heads + 2 * heads_kv) * HEAD_DIM, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, asked: dict) -> torch.Tensor:
        """x: [tokens of this rank, width]. asked: keyword arguments of distributed.attention."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = qkv.to(torch.bfloat16).split((self.heads, self.heads_kv, self.heads_kv), 1)
        q, k = rotated(q, positions), rotated(k, positions)
        x = x + self.out(distributed.attention(q, k, v, causal=True, **asked).flatten(1).to(x.dtype))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A decoder of tokens."""

    def __init__(self, layers: int, heads: int, heads_kv: int):
        super().__init__()
        width = heads * HEAD_DIM
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(heads, heads_kv) for _ in range(layers))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, asked: dict) -> torch.Tensor:
        """Logits [tokens, vocabulary]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, asked)
        return self.head(x)


def text(seqlen: int, step: int) -> torch.Tensor:
    """Tokens of a step, the same on all ranks: the phrases of all steps in a new order."""
    phrases = torch.randint(VOCABULARY, (8, PHRASE), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(step)
    order = torch.randint(8, (-(-seqlen // PHRASE),), generator=generator)
    return phrases[order].flatten()[:seqlen]


def document_ends(seqlen: int, documents: int, step: int) -> list[int]:
    """cu_seqlens of a step: documents of random lengths."""
    cuts = random.Random(step).sample(range(1, seqlen), documents - 1)
    return [0, *sorted(cuts), seqlen]


def train(arguments: argparse.Namespace, device: torch.device) -> list[float]:
    """Losses of all steps."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = Model(arguments.layers, arguments.heads, arguments.heads_kv).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    losses = []
    for step in range(arguments.steps):
        begin = time.perf_counter()
        cu_seqlens = document_ends(arguments.seqlen, arguments.documents, step)
        # Ranks get equal numbers of tokens and equal work, whatever the documents are
        layout = distributed.make_layout(cu_seqlens=cu_seqlens, causal=True)
        placed = {"cu_seqlens": cu_seqlens, "layout": layout}
        whole = text(arguments.seqlen + 1, step)
        tokens, labels = (distributed.shard(x, **placed).to(device) for x in (whole[:-1], whole[1:]))
        positions = distributed.positions(**placed, device=device)

        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens, positions, {**placed, "method": arguments.method})
        # The mean over the tokens of all ranks, so that gradients are added up
        loss = F.cross_entropy(logits.float(), labels, reduction="sum") / arguments.seqlen
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if world > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            dist.all_reduce(loss)
        optimizer.step()
        losses.append(float(loss))
        if rank == 0:
            speed = arguments.seqlen / (time.perf_counter() - begin)
            on_gpu = device.type == "cuda"
            memory = f"  {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if on_gpu else ""
            print(f"step {step:3}  loss {losses[-1]:.4f}  {speed:,.0f} tokens/s{memory}", flush=True)
    return losses


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Arguments, by default those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seqlen", type=at_least(2), default=8192, help="tokens of a step, on all ranks together"
    )
    parser.add_argument("--documents", type=at_least(1), default=1, help="documents that a sequence packs")
    parser.add_argument("--steps", type=at_least(1), default=20)
    parser.add_argument("--layers", type=at_least(1), default=4)
    parser.add_argument("--heads", type=at_least(1), default=16)
    parser.add_argument("--heads-kv", type=at_least(1), default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--method", choices=("auto", "gather", "ring"), default="auto")
    found = parser.parse_args(words)
    if found.heads % found.heads_kv:
        parser.error(f"--heads: expected a multiple of --heads-kv, got {found.heads} and {found.heads_kv}")
    if found.documents > found.seqlen:
        parser.error(f"--documents: expected at most --seqlen, {found.seqlen}, got {found.documents}")
    return found


def main() -> None:
    arguments = parse()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("nccl" if on_gpu else "gloo")
    train(arguments, device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
