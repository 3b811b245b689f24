"""`tl-attention explain`: FLOPs and bytes of a call, what bounds it on a GPU, its measured time, and its config."""
