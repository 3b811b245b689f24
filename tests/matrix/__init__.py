"""The GPU test matrix: every kernel that the tables can choose, on drawn lengths, under a watchdog. docs/matrix.md describes it."""
