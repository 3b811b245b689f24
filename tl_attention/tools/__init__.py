"""The command `tl-attention`."""
