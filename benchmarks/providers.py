"""The registry of compared libraries: one entry per library.

To add a library, write libraries/NAME.py with a PROVIDER (library.Provider says what its passes are) and add a line here.
"""

from __future__ import annotations

from libraries import cudnn, fa2, fa3, fa4, flashinfer, flex, naive, ours, triton
from library import Provider
from rows import OURS, PLAIN

PROVIDERS: dict[str, Provider] = {
    OURS: ours.PROVIDER,
    "fa2": fa2.PROVIDER,
    "cudnn": cudnn.PROVIDER,
    "fa3": fa3.PROVIDER,
    "fa4": fa4.PROVIDER,
    "triton": triton.PROVIDER,
    "flex": flex.PROVIDER,
    "flashinfer": flashinfer.PROVIDER,
    "flashinfer-xqa": flashinfer.XQA,
    "naive": naive.PROVIDER,
}


def names(pass_name: str) -> list[str]:
    """The libraries that offer a pass of library.PASSES."""
    return [name for name, provider in PROVIDERS.items() if pass_name in provider.passes]


def of_row(name: str) -> Provider:
    """The provider of a row: PLAIN is ours."""
    return PROVIDERS[OURS if name == PLAIN else name]


def title(name: str, pass_name: str = "fwd") -> str:
    """Name of a provider in tables and plots: it says where PyTorch's copy of FlashAttention-2 runs."""
    return "fa2 (torch sdpa)" if name == "fa2" and not fa2.has_package(pass_name) else name
