"""Python functions of a call (score_mod, mask_mod): traced, bounded per block, recognized."""
