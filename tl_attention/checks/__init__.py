"""Argument checks of the public functions. An error names the argument, what was expected, what was passed and what to do."""
