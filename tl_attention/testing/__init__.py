"""Helpers of tests, benchmarks and the tuner: problems as text, inputs, the error rule, formulas and the timer."""
