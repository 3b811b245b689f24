"""The TileLang kernels and their parts. docs/architecture.md says in which order to read them."""
