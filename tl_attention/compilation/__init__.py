"""The way from a problem and a config to a compiled kernel: builders, disk cache, packs, and reports on what a kernel holds."""
