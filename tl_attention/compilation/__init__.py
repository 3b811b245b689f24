"""From a problem and a config to a compiled kernel: builders, disk cache, packs, and what a kernel holds."""
