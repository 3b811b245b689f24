"""Pictures of block masks, as text and as a file."""

from tl_attention.api.mask_picture import block_states, picture, save_picture

__all__ = ["block_states", "picture", "save_picture"]
