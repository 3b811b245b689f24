"""QK-clip of Muon (Kimi K2): training in which the attention scores of each head stay below a threshold.

    python examples/qk_clip.py --steps 10
    torchrun --nproc_per_node=2 examples/qk_clip.py     # ranks share each sequence

After each step of the optimizer the weights of a head's queries and keys shrink if its largest score was above the threshold. A layer
returns the largest score of each query. The largest score of a head is the maximum of these over batch entries, queries and ranks. Runs on
Hopper GPUs, or without a GPU on the CPU by the slow reference. On one rank distributed.attention calls flash_attn_func.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

from tl_attention import distributed
from tl_attention.problem.arguments import at_least

WIDTH, HEADS, HEAD_DIM, LENGTH = 64, 2, 32, 48


class Attention(nn.Module):
    """Self-attention that keeps the largest score of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(0.5 * torch.randn(3, HEADS, HEAD_DIM, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.einsum("bsw,phdw->pbshd", x, self.qkv).bfloat16()
        out, max_logits = distributed.attention(q, k, v, causal=True, seqlen=LENGTH, return_max_logits=True)
        self.max_of_heads = max_logits.amax((0, 2))  # over batch entries and queries
        if dist.is_initialized():
            dist.all_reduce(self.max_of_heads, dist.ReduceOp.MAX)
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

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)  # the same weights and sequences on all ranks
    layer, whole = Attention().to(device), torch.randn(4, LENGTH, WIDTH)
    x = distributed.shard(whole, dim=1).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for step in range(arguments.steps):
        # The mean over the tokens of all ranks, so that gradients are added up
        (layer(x).square().sum() / whole.numel()).backward()
        if dist.is_initialized():
            dist.all_reduce(layer.qkv.grad)
        optimizer.step()
        optimizer.zero_grad()
        layer.clip(arguments.threshold)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"step {step}: largest scores {', '.join(f'{m:.2f}' for m in layer.max_of_heads.tolist())}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
