"""F.scaled_dot_product_attention without a mask where PyTorch's flash op does not serve it.

These are calls of fp32 tensors, of values of fewer columns, and causal ones of unequal lengths. PyTorch gives them to its memory-efficient
op or to cuDNN; torch_masks.py replaces both. The precision of fp32 is that of torch.get_float32_matmul_precision(). Calls that the
kernels do not support go on to PyTorch's own kernel.
"""

from __future__ import annotations

import torch

from tl_attention.checks.common import FWD_DTYPES
from tl_attention.checks.flex import MAX_BATCH, MAX_LENGTH
from tl_attention.checks.fp32 import check_precision, has_gradient_kernels, runs_in_bf16
from tl_attention.integrations.torch_modes import MODES
from tl_attention.problem.attn_problem import MAX_HEAD_DIM
from tl_attention.problem.options import MAX_SCALE, Options
from tl_attention.problem.request import new_request
from tl_attention.problem.target import is_hopper
from tl_attention.torch_ops.attend import attend
from tl_attention.torch_ops.ops import run_backward_op


def serves(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None = None,
) -> bool:
    """True for calls that the kernels serve: no mask, no dropout, on Hopper, at a precision whose gradients have kernels."""
    tensors = query, key, value
    if scale is not None and not abs(scale) <= MAX_SCALE:
        return False
    if attn_bias is not None or dropout_p or query.dtype not in FWD_DTYPES:
        return False
    if not query.dtype == key.dtype == value.dtype:
        return False
    if any(x.ndim != 4 or not x.numel() or x.stride(3) != 1 for x in tensors):
        return False
    if max(query.shape[2], key.shape[2]) > MAX_LENGTH:
        return False
    if (
        MODES.is_invariant and causal and query.shape[2] > key.shape[2]
    ):  # a window's bits are not those of causal=True
        return False
    if not has_groups(query, key, value) or not has_widths(query, value):
        return False
    return has_kernels(query, value) and (not query.is_cuda or is_hopper(query.device))


def has_groups(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """True for one batch and one number of heads of key and value that divides that of query."""
    (batch, heads), (batch_k, heads_kv) = query.shape[:2], key.shape[:2]
    return batch == batch_k <= MAX_BATCH and key.shape[:2] == value.shape[:2] and heads % heads_kv == 0


def has_widths(query: torch.Tensor, value: torch.Tensor) -> bool:
    """True for a head_dim that the kernels have, and one of value that is not above it: multiples of 8 but for fp32."""
    head_dim, head_dim_v = query.shape[3], value.shape[3]
    aligned = query.dtype == torch.float32 or not (head_dim % 8 or head_dim_v % 8)
    return aligned and head_dim_v <= head_dim <= MAX_HEAD_DIM


def has_kernels(query: torch.Tensor, value: torch.Tensor) -> bool:
    """True for head dims and a dtype whose gradients have kernels, for fp32 at the default precision."""
    try:
        terms = check_precision(query, None)
    except ValueError:  # PyTorch's settings of its backends differ
        return False
    return has_gradient_kernels(query, value, terms)


def operands(*tensors: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """(terms, tensors) of a launch, [batch, seqlen, heads, columns], at the default precision: bf16 and 0 for fp32 of one term."""
    terms = check_precision(tensors[0], None)
    if runs_in_bf16(tensors[0], terms):
        tensors, terms = [x.bfloat16() for x in tensors], 0
    return terms, [x.transpose(1, 2) for x in tensors]


def from_top_left(query: torch.Tensor, key: torch.Tensor, causal: bool) -> tuple[int, bool, tuple[int, int]]:
    """The call of the kernels that has the mask of is_causal: (keys, causal, window_size).

    Query i sees keys 0 to i: PyTorch aligns the diagonal top-left, the kernels bottom-right. Keys behind the last query are left out.
    With more queries than keys the diagonal is the right side of a window.
    """
    queries, keys = query.shape[2], key.shape[2]
    if causal and queries > keys:
        return keys, False, (-1, queries - keys)
    return min(queries, keys) if causal else keys, causal, (-1, -1)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [batch, heads, seqlen_q, head_dim_v], a view of [batch, seqlen_q, heads, head_dim_v]; natural lse [batch, heads, seqlen_q]."""
    keys, causal, window_size = from_top_left(query, key, causal)
    qkv = (x.transpose(1, 2) for x in (query, key[:, :, :keys], value[:, :, :keys]))
    modes = {"window_size": window_size, "batch_invariant": MODES.batch_invariant}
    with torch.no_grad():
        out, lse = attend(new_request(*qkv, scale, causal, **modes))
    return out.transpose(1, 2), lse


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, as views of [batch, seqlen, heads, head_dim]."""
    keys, causal, window = from_top_left(query, key, causal)
    hidden_keys = key.shape[2] - keys
    terms, tensors = operands(grad_out, query, key[:, :, :keys], value[:, :, :keys], out)
    tensors[0] = tensors[0].contiguous()
    scale = query.shape[3] ** -0.5 if scale is None else scale
    deterministic = torch.are_deterministic_algorithms_enabled()
    call = scale, causal, False, False, deterministic
    options = Options(window=window, num_splits=MODES.num_splits, parts=terms)
    grads = run_backward_op((*tensors, lse), None, call, options)
    if hidden_keys:
        grads |= {name: torch.nn.functional.pad(grads[name], (0, 0, 0, 0, 0, hidden_keys)) for name in "kv"}
    return tuple(grads[name].to(query.dtype).transpose(1, 2) for name in "qkv")
