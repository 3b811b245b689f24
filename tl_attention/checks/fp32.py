"""Checks of fp32 calls: the precision of their products, and the head dims that have kernels at it."""

from __future__ import annotations

import torch

from tl_attention.checks.common import describe
from tl_attention.problem.attn_problem import FP32_BWD_WIDTHS, PRECISIONS

_WORDS = ", ".join(map(repr, PRECISIONS))


def check_precision(q: torch.Tensor, precision: str | None) -> int:
    """Check the precision of a call, and return the terms of an fp32 element: a value of PRECISIONS, 0 for another dtype."""
    if precision is not None and not (isinstance(precision, str) and precision in PRECISIONS):
        raise ValueError(
            f"precision: expected one of {_WORDS}, or None for torch.get_float32_matmul_precision(), got {describe(precision)}"
        )
    if q.dtype != torch.float32:
        if precision is not None:
            raise ValueError(
                f"precision: expected None with tensors of {q.dtype}, got {precision!r}; leave it out, or pass q.float(), k.float()"
                " and v.float()"
            )
        return 0
    if precision is None:
        precision = _constant_precision() if torch.compiler.is_compiling() else _default_precision()
    return PRECISIONS[precision]


def _default_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError as error:  # torch refuses to sum up settings of its backends that differ
        raise ValueError(
            f"precision: expected one of {_WORDS}, as torch.get_float32_matmul_precision() fails, got None;"
            " pass precision"
        ) from error


def _constant_precision() -> str:
    """The default precision as a constant of compiled code: torch compiles again if it changes from or to highest.

    torch does not see a change between high and medium, so both count as high.
    """
    return "highest" if _default_precision() == "highest" else "high"


# torch.compiler.assume_constant_result sets this attribute, too, but first imports the compiler, which takes a second (torch 2.11 to 2.14)
_constant_precision._dynamo_marked_constant = True


def runs_in_bf16(q: torch.Tensor, terms: int) -> bool:
    """True for an fp32 call on a GPU whose products have one bf16 term: it runs the bf16 kernels. The CPU reference is exact instead."""
    return terms == 1 and q.device.type != "cpu"


def has_gradient_kernels(q: torch.Tensor, v: torch.Tensor, terms: int) -> bool:
    """True if kernels compute the gradients of a call on a GPU, False if PyTorch's formula does. terms: 0 for dtypes other than fp32."""
    return terms < 2 or max(q.shape[-1], v.shape[-1]) <= FP32_BWD_WIDTHS[terms][-1][0]
