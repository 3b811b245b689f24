"""Operators of PyTorch: autograd, torch.compile, vmap, forward mode, distributed tensors."""
