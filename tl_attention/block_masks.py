"""Block masks of flex_attention: create_block_mask, and constructors of common masks."""

from tl_attention.api.block_masks import (
    block_diagonal,
    causal,
    create_block_mask,
    dilated,
    document_ids,
    documents,
    prefix_lm,
    prefix_tree,
    prefix_tree_positions,
    sliding_window,
)

__all__ = [
    "block_diagonal",
    "causal",
    "create_block_mask",
    "dilated",
    "document_ids",
    "documents",
    "prefix_lm",
    "prefix_tree",
    "prefix_tree_positions",
    "sliding_window",
]
