"""Attention over several GPUs: context parallelism with torch.distributed."""

from tl_attention.distributed.functions import attention
from tl_attention.distributed.layout import Layout
from tl_attention.distributed.shards import make_layout, positions, shard, shard_cu_seqlens, unshard

__all__ = [
    "Layout",
    "attention",
    "make_layout",
    "positions",
    "shard",
    "shard_cu_seqlens",
    "unshard",
]
