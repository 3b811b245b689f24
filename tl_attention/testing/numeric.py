"""The error rule: at most twice (outputs) or three times (gradients) the error of PyTorch in the same dtype."""

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
from tl_attention.reference.jvp import attention_jvp_reference

# The LSE is always fp32, so PyTorch's error in the input dtype would allow too much. The exp2 unit, the order of sums
# and the rounding of tensor cores stay within 1e-5 of the largest LSE.
LSE_RTOL = 2**-15
# With softcap: the error of tanh.approx by the PTX manual, see docs/numerics.md
CAPPED_LSE_RTOL = 2**-11
# Relative rounding left in dP - delta, fp32, where the exact difference is 0, as in a row with one key
CANCELLATION_RTOL = 2**-20


@dataclass(frozen=True)
class FwdComparison:
    """A forward compared to the reference. Ratios are worst error / allowed error, inf for a misplaced NaN or inf."""

    ok: bool
    max_err_ratio: float
    lse_err_ratio: float
    text: str
    mean_errors: dict[str, float]  # of out and, in forward mode, tout: see mean_error


@dataclass(frozen=True)
class BwdComparison:
    """A backward compared to the reference. Ratios are worst error / allowed error, inf for a misplaced NaN or inf."""

    ok: bool
    ratios: dict[str, float]  # by gradient: dq, dk, dv and, with a sink, dsink
    text: str  # the worst gradient first
    mean_errors: dict[str, float]  # by gradient: see mean_error

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
    max_logits: torch.Tensor | None = None,
    **options: Any,
) -> FwdComparison:
    """Compare a forward to the reference (fp32 math on a GPU, fp64 on CPU).

        max|out - ref| <= 2 max|pt - ref| + 2 max|ref + 0.3 - 0.3 - ref|
        max|lse - ref_lse| <= rtol * max(1, max|ref_lse|), with rtol = LSE_RTOL, or CAPPED_LSE_RTOL with softcap
        max_logits: as lse

    pt is the formula of the reference in the dtype of q. The last term is the rounding of a sum in that dtype.
    NaN and inf must be where the reference has them; the maxima ignore them.

    Args:
        out: [batch, seqlen_q, heads_q, head_dim_v].
        lse: [batch, heads_q, seqlen_q], base 2 with lse_base2, else natural; None skips it.
        max_logits: in the shape of lse, natural; None skips it.
        q, k, v: [batch, seqlen, heads, head_dim], as for attention_reference.
        options: as for attention_reference; with cu_seqlens_q, all arguments are as for varlen_reference.
    """
    reference = varlen_reference if "cu_seqlens_q" in options else attention_reference
    options |= {"softmax_scale": softmax_scale, "causal": causal, "lse_base2": lse_base2}
    asked = {} if max_logits is None else {"max_logits": True}
    ref, *numbers = reference(q, k, v, dtype=_reference_dtype(q), **options, **asked)
    pt, _ = reference(q, k, v, dtype=q.dtype, **options)
    ratio, text = _compare("out", out, ref, _allowed_error(2, ref, pt))
    lse_ratio, lse_text = 0.0, "lse unchecked"
    rtol = CAPPED_LSE_RTOL if options.get("softcap") else LSE_RTOL
    given = {"lse": lse, "max_logits": max_logits}
    compared = [
        _compare(name, given[name], exact, rtol * max(1.0, _peak(exact)))
        for name, exact in zip(given, numbers, strict=False)
        if given[name] is not None
    ]
    if compared:
        lse_ratio, lse_text = max(compared)
    errors = {"out": mean_error(out, ref)}
    return FwdComparison(max(ratio, lse_ratio) <= 1, ratio, lse_ratio, f"{text}; {lse_text}", errors)


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
) -> BwdComparison:
    """Compare a backward to attention_backward_reference (fp32 math on a GPU, fp64 on CPU).

        max|g - ref| <= 3 max|pt - ref| + 2 max|ref + 0.3 - 0.3 - ref| + cancellation    for each g in grads

    pt, the second term, NaN and inf are as in check_fwd. The cancellation is CANCELLATION_RTOL times the largest possible
    |scale dP K| for dq, |scale dP Q| for dk, and 0 for the others. dq of a query that sees no key must be exactly 0.

    Args:
        grads: dq, dk, dv in the shapes of q, k, v, and dsink if there is a sink.
        dout, q, k, v, softmax_scale, causal, dlse, lse_base2, options: as for attention_backward_reference;
            with cu_seqlens_q, as for varlen_backward_reference.
    """
    reference = varlen_backward_reference if "cu_seqlens_q" in options else attention_backward_reference
    arguments = {"softmax_scale": softmax_scale, "causal": causal, "dlse": dlse, "lse_base2": lse_base2}
    ref, pt = (
        reference(dout, q, k, v, dtype=dtype, **arguments, **options)
        for dtype in (_reference_dtype(q), q.dtype)
    )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    dp_bound = _peak(dout.float().norm(dim=-1)) * _peak(v.float().norm(dim=-1))
    cancellation = CANCELLATION_RTOL * abs(scale) * dp_bound
    factors = {"dq": _peak(k), "dk": _peak(q), "dv": 0.0, "dsink": 0.0}
    compared = {
        name: _compare(name, grad, exact, _allowed_error(3, exact, plain) + cancellation * factors[name])
        for name, grad, exact, plain in zip(list(factors)[: len(ref)], grads, ref, pt, strict=True)
    }
    if grads[0].shape == q.shape:
        without_keys = _rows_without_keys(q, k, causal, options)[..., None, None]
        zeros = _compare("dq", grads[0].where(without_keys, 0), torch.zeros_like(q), 0.0)
        compared["dq"] = max(compared["dq"], zeros, key=lambda ratio_and_text: ratio_and_text[0])
    worst_first = sorted(compared.values(), reverse=True)
    ratios = {name: ratio for name, (ratio, _) in compared.items()}
    errors = {name: mean_error(grad, exact) for name, grad, exact in zip(compared, grads, ref, strict=True)}
    return BwdComparison(worst_first[0][0] <= 1, ratios, "; ".join(text for _, text in worst_first), errors)


@torch.no_grad()
def check_jvp(
    outputs: tuple[torch.Tensor, ...],
    primals: tuple[torch.Tensor, ...],
    tangents: tuple[torch.Tensor | None, ...],
    softmax_scale: float | None = None,
    causal: bool = False,
    lse_base2: bool = False,
) -> FwdComparison:
    """Compare a forward and its derivative to attention_jvp_reference (fp32 math on a GPU, fp64 on CPU).

        max|tout - ref| <= 3 max|pt - ref| + 2 max|ref + 0.3 - 0.3 - ref| + cancellation
        max|tlse - ref_tlse| <= LSE_RTOL * max(1, max|ref_tlse|)

    out, lse, pt, NaN and inf are as in check_fwd. The cancellation is CANCELLATION_RTOL times the largest possible |tS V|.

    Args:
        outputs: out, lse, tout, tlse.
        primals, tangents: q, k, v, and a tangent or None of each; else as for attention_jvp_reference.
    """
    (out, lse, tout, tlse), (q, k, v) = outputs, primals
    tq, tk, _ = (torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True))
    arguments = {"softmax_scale": softmax_scale, "causal": causal, "lse_base2": lse_base2}
    (ref, ref_lse, ref_tout, ref_tlse), (pt, _, pt_tout, _) = (
        attention_jvp_reference(*primals, *tangents, dtype=dtype, **arguments)
        for dtype in (_reference_dtype(q), q.dtype)
    )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    norms = (_peak(x.float().norm(dim=-1)) for x in (tq, k, q, tk))
    tq_norm, k_norm, q_norm, tk_norm = norms
    cancellation = CANCELLATION_RTOL * abs(scale) * (tq_norm * k_norm + q_norm * tk_norm) * _peak(v)
    compared = [
        _compare("out", out, ref, _allowed_error(2, ref, pt)),
        _compare("tout", tout, ref_tout, _allowed_error(3, ref_tout, pt_tout) + cancellation),
    ]
    of_lse = [
        _compare(name, x, exact, LSE_RTOL * max(1.0, _peak(exact)))
        for name, x, exact in (("lse", lse, ref_lse), ("tlse", tlse, ref_tlse))
    ]
    ratio, lse_ratio = (max(pairs)[0] for pairs in (compared, of_lse))
    text = "; ".join(text for _, text in sorted([*compared, *of_lse], reverse=True))
    errors = {"out": mean_error(out, ref), "tout": mean_error(tout, ref_tout)}
    return FwdComparison(max(ratio, lse_ratio) <= 1, ratio, lse_ratio, text, errors)


def mean_error(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Mean of |x - ref| over the mean of |ref|; 0 where both are 0, inf where the shapes differ."""
    if x.shape != ref.shape:
        return math.inf
    error, size = ((y.abs().mean(dtype=ref.dtype).item() if y.numel() else 0.0) for y in (x - ref, ref))
    return error / size if size else (math.inf if error else 0.0)


def _rows_without_keys(
    q: torch.Tensor, k: torch.Tensor, causal: bool, options: dict[str, Any]
) -> torch.Tensor:
    """Mask of the queries that see no key or are in no sequence: bool, [batch, seqlen_q] or [total_q]."""
    names = ("window", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    masks = {name: options[name] for name in names if name in options}
    reference = varlen_reference if "cu_seqlens_q" in options else attention_reference
    q, k = (x.new_zeros(*x.shape[:-2], 1, 1) for x in (q, k))
    return reference(q, k, k, causal=causal, **masks)[1][..., 0, :] == -math.inf


def _reference_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float32 if q.is_cuda else torch.float64


def _allowed_error(times: float, ref: torch.Tensor, pt: torch.Tensor) -> float:
    """`times` the error of pt, plus twice the rounding of a sum in its dtype."""
    rounded = ref.to(pt.dtype)
    return times * _peak(pt - ref) + 2 * _peak(rounded + 0.3 - 0.3 - rounded)


def _peak(x: torch.Tensor) -> float:
    """Largest finite magnitude, 0 if there is none."""
    return float(x.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if x.numel() else 0.0


def _compare(name: str, actual: torch.Tensor, expected: torch.Tensor, allowed: float) -> tuple[float, str]:
    """Return the largest error over the allowed error, and a sentence that says where it is."""
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
        return ratio, f"{name}: largest error is {ratio:.2g} of the allowed error, at {name}{list(at)}"
    share = int((error > allowed).sum()) / error.numel()
    return ratio, (
        f"{name}{list(at)} is {float(actual[at]):.6g} instead of {float(expected[at]):.6g}, {ratio:.3g} "
        f"times the allowed error ({allowed:.3g}), which {share:.2%} of elements exceed"
    )
