"""Trees of draft tokens, for speculative decoding with flash_attn_with_kvcache."""

from __future__ import annotations

import torch

from tl_attention.checks.kvcache import MAX_NODES
from tl_attention.checks.masks import check_draft_tree


def draft_tree_mask(parents: torch.Tensor) -> torch.Tensor:
    """The tree_mask of flash_attn_with_kvcache: bits of the nodes that each node of a tree of draft tokens sees, itself and its ancestors.

    Args:
        parents: int32 or int64, [nodes] for one tree or [batch, nodes], of at most 64 nodes: the parent of each draft token, a node
            before it; -1 for those after the last accepted token. Nodes that pad a smaller tree may have -1.
    Returns:
        int64, in the shape of parents: bit j of node i is set if j is i or an ancestor of it. Bit 63 is the sign.
    Raises:
        TypeError, ValueError, NotImplementedError: the message names the argument, what was expected and what was passed. The values of
            GPU tensors are checked only with TL_ATTENTION_CHECK_LENGTHS=1, for which the host waits. Nothing else waits for the GPU.
    """
    check_draft_tree(parents)
    nodes = torch.arange(parents.shape[-1], device=parents.device)
    # Nodes from 1 on, after the root, which has no bit. A wrong parent becomes one that exists
    above = torch.nn.functional.pad(torch.minimum(parents.long().clamp(min=-1) + 1, nodes), (1, 0))
    seen = torch.nn.functional.pad(torch.ones_like(nodes) << nodes, (1, 0)).expand_as(above)
    # In compiled code the number of nodes may be a symbol, which the rounds would make a constant; more of them change nothing
    most = MAX_NODES if torch.compiler.is_compiling() else parents.shape[-1]
    for _ in range((most - 1).bit_length()):  # by 1, 2, 4, .. levels
        seen, above = seen | seen.gather(-1, above), above.gather(-1, above)
    return seen[..., 1:].contiguous()
