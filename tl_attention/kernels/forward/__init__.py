"""The forward: kernel.py is the algorithm."""
