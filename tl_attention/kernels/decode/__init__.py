"""A few queries against a KV cache: kernel.py is the algorithm."""
