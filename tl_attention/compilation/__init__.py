"""Compilation: from a problem and a config to a compiled kernel. Builders, disk cache, packs, and reports on compiled kernels."""
