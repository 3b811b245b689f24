"""The one error rule: an output may err at most twice, a gradient three times, as much as PyTorch does in the same dtype."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch

from tl_attention.reference import (
    attention_backward_reference,
    attention_reference,
    varlen_backward_reference,
    varlen_reference,
)

# An LSE is fp32 whatever the inputs are: PyTorch's error in their dtype would excuse too much. The exp2 unit,
# the order of sums and the tensor cores' rounding stay within 1e-5 of the largest LSE.
LSE_RTOL = 2**-15
# Of dP and delta, in fp32: what is left of their difference where it is 0, as in a row with one key.
CANCELLED = 2**-20


@dataclass(frozen=True)
class Verdict:
    """Whether a forward is right. Ratios are worst error / error allowed, inf at a misplaced NaN or inf."""

    ok: bool
    max_err_ratio: float
    lse_err_ratio: float
    text: str


@dataclass(frozen=True)
class BwdVerdict:
    """Whether a backward is right. Ratios are worst error / error allowed, inf at a misplaced NaN or inf."""

    ok: bool
    ratios: dict[str, float]  # of dq, dk, dv and, with a sink, dsink
    text: str  # the worst gradient first

    @property
    def max_err_ratio(self) -> float:
        return max(self.ratios.values())


@torch.no_grad()
def check_fwd(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    lse_base2: bool = False,
    **options: Any,
) -> Verdict:
    """Compare a forward to the reference (fp32 math on a GPU, fp64 on CPU).

        max|out - ref| <= 2 max|pt - ref| + 2 max|ref + 0.3 - 0.3 - ref|
        max|lse - ref_lse| <= LSE_RTOL * max(1, max|ref_lse|)

    pt is the reference's formula in the dtype of q, as is the last term of that line, the rounding of a sum.
    NaN and inf must be where the reference has them; they have no part in these maxima.

    Args:
        out: [batch, seqlen_q, heads_q, head_dim_v].
        lse: [batch, heads_q, seqlen_q], base 2 with lse_base2, else natural; None leaves it unchecked.
        q, k, v: [batch, seqlen, heads, head_dim], as for attention_reference.
        options: of attention_reference; with cu_seqlens_q, everything is as for varlen_reference.
    """
    reference = varlen_reference if "cu_seqlens_q" in options else attention_reference
    how = {"softmax_scale": softmax_scale, "causal": causal, "lse_base2": lse_base2, **options}
    ref, ref_lse = reference(q, k, v, dtype=_exact(q), **how)
    pt, _ = reference(q, k, v, dtype=q.dtype, **how)
    ratio, text = _judge("out", out, ref, _allowed(2, ref, pt))
    lse_ratio, lse_text = 0.0, "lse unchecked"
    if lse is not None:
        lse_ratio, lse_text = _judge("lse", lse, ref_lse, LSE_RTOL * max(1.0, _peak(ref_lse)))
    return Verdict(max(ratio, lse_ratio) <= 1, ratio, lse_ratio, f"{text}; {lse_text}")


@torch.no_grad()
def check_bwd(
    grads: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    dlse: torch.Tensor | None = None,
    lse_base2: bool = False,
    **options: Any,
) -> BwdVerdict:
    """Compare a backward to attention_backward_reference (fp32 math on a GPU, fp64 on CPU).

        max|g - ref| <= 3 max|pt - ref| + 2 max|ref + 0.3 - 0.3 - ref| + cancelled    of each of grads

    pt, the rounding of a sum and what is not finite are as in check_fwd. cancelled is CANCELLED times the largest
    possible |scale dP K| in dq, |scale dP Q| in dk, 0 elsewhere. dq of a query that sees no key must be 0.

    Args:
        grads: dq, dk, dv in the shapes of q, k, v, and dsink if there is a sink.
        dout, q, k, v, softmax_scale, causal, dlse, lse_base2, options: as for attention_backward_reference;
            with cu_seqlens_q, as for varlen_backward_reference.
    """
    reference = varlen_backward_reference if "cu_seqlens_q" in options else attention_backward_reference
    how = {"softmax_scale": softmax_scale, "causal": causal, "dlse": dlse, "lse_base2": lse_base2, **options}
    ref, pt = (reference(dout, q, k, v, dtype=dtype, **how) for dtype in (_exact(q), q.dtype))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    cancelled = CANCELLED * abs(scale) * _peak(dout.float().norm(dim=-1)) * _peak(v.float().norm(dim=-1))
    factors = {"dq": _peak(k), "dk": _peak(q), "dv": 0.0, "dsink": 0.0}
    judged = {
        name: _judge(name, grad, expected, _allowed(3, expected, plain) + cancelled * factors[name])
        for name, grad, expected, plain in zip(list(factors)[: len(ref)], grads, ref, pt, strict=True)
    }
    if grads[0].shape == q.shape:
        unseeing = _unseeing(q, k, causal, options)[..., None, None]
        zeros = _judge("dq", grads[0].where(unseeing, 0), torch.zeros_like(q), 0.0)
        judged["dq"] = max(judged["dq"], zeros, key=lambda ratio_and_text: ratio_and_text[0])
    worst_first = sorted(judged.values(), reverse=True)
    ratios = {name: ratio for name, (ratio, _) in judged.items()}
    return BwdVerdict(worst_first[0][0] <= 1, ratios, "; ".join(text for _, text in worst_first))


def _unseeing(q: torch.Tensor, k: torch.Tensor, causal: bool, options: dict[str, Any]) -> torch.Tensor:
    """Which queries see no key, or are in no sequence: bool, in the shape of q but for heads and columns."""
    names = ("window", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    masks = {name: options[name] for name in names if name in options}
    reference = varlen_reference if "cu_seqlens_q" in options else attention_reference
    q, k = (x.new_zeros(*x.shape[:-2], 1, 1) for x in (q, k))
    return reference(q, k, k, causal=causal, **masks)[1][..., 0, :] == -math.inf


def _exact(q: torch.Tensor) -> torch.dtype:
    return torch.float32 if q.is_cuda else torch.float64


def _allowed(times: float, ref: torch.Tensor, pt: torch.Tensor) -> float:
    """So many times the error of pt, and twice the rounding of a sum in its dtype."""
    rounded = ref.to(pt.dtype)
    return times * _peak(pt - ref) + 2 * _peak(rounded + 0.3 - 0.3 - rounded)


def _peak(x: torch.Tensor) -> float:
    """The largest finite magnitude, 0 if there is none."""
    return float(x.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if x.numel() else 0.0


def _judge(name: str, actual: torch.Tensor, expected: torch.Tensor, allowed: float) -> tuple[float, str]:
    """The largest error over the error allowed, and where it is in words."""
    if actual.shape != expected.shape:
        return math.inf, f"{name} has shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if not expected.numel():
        return 0.0, f"{name} is empty"
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = (actual - expected).abs().masked_fill(same, 0).nan_to_num(nan=math.inf, posinf=math.inf)
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    worst = float(error[at])
    ratio = worst / max(allowed, sys.float_info.min)
    if ratio <= 1:
        return ratio, f"{name} errs by {ratio:.2g} of what is allowed, most at {name}{list(at)}"
    share = int((error > allowed).sum()) / error.numel()
    return ratio, (
        f"{name}{list(at)} is {float(actual[at]):.6g} instead of {float(expected[at]):.6g}, {ratio:.3g} "
        f"times the error allowed ({allowed:.3g}), which {share:.2%} of elements exceed"
    )
