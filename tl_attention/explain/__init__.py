"""`tl-attention explain`: the work of a problem, what bounds it on a GPU, and the time that a model of the kernels predicts."""
