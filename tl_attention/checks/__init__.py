"""Argument checks of the public functions. Each raises with the argument, the expectation, what came and what to do."""
