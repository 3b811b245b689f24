"""The tuner: search the grid of configs on a GPU, one subprocess per risky step."""
