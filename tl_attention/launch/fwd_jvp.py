"""Launch of forward mode: the forward with its derivative along a direction."""

from __future__ import annotations

import math

import torch

from tl_attention.checks.common import check_config
from tl_attention.compilation.store import Kernel
from tl_attention.config import legality
from tl_attention.config.kernel_configs import JVP_CONFIGS, JvpConfig
from tl_attention.launch.arrays import cut_columns, has_odd_columns, pad_columns, tma_ready
from tl_attention.launch.common import LN2, compile_needed, dense, device_costs, empty, tile_counts
from tl_attention.problem.attn_problem import JVP, AttnProblem
from tl_attention.problem.target import DTYPE_NAMES

_kernels: dict[AttnProblem, Kernel] = {}

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _find_kernel(problem: AttnProblem, config: JvpConfig | None) -> tuple[Kernel, JvpConfig]:
    """Compiled kernel of a problem, and its config."""
    if config is not None:
        check_config(problem, config, legality.fault(problem, config))
        return compile_needed([(problem, config)])[0], config
    config = JVP_CONFIGS[problem.width]
    if problem not in _kernels:
        (_kernels[problem],) = compile_needed([(problem, config)])
    return _kernels[problem], config


def forward_jvp(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tq: torch.Tensor | None,
    tk: torch.Tensor | None,
    tv: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    heads_first: bool = False,
    config: JvpConfig | None = None,
) -> Outputs:
    """Launch the forward with its derivative on tensors that have passed checks/, on a Hopper GPU.

    Args:
        q, k, v: [batch, heads, seqlen, head_dim] if heads_first, else [batch, seqlen, heads, head_dim], head dims of at most 128. They
            and their tangents are copied if a head dim is no multiple of 8.
        tq, tk, tv: tangents in the shapes of q, k, v; None: 0, as a tensor of zeros.
        config: used instead of the default.
    Returns:
        out in the layout of q, contiguous; lse [batch, heads, seqlen_q] fp32; and the tangents of both.
    """
    if torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            return forward_jvp(q, k, v, tq, tk, tv, softmax_scale, causal, lse_base2, heads_first, config)
    pairs = zip((q, k, v), (tq, tk, tv), strict=True)
    tangents = [torch.zeros_like(x) if tangent is None else tangent for x, tangent in pairs]
    if has_odd_columns(q, v):
        padded = pad_columns(q, k, v, *tangents)
        out, lse, tout, tlse = forward_jvp(*padded, softmax_scale, causal, lse_base2, heads_first, config)
        return cut_columns(out, v.shape[-1]), lse, cut_columns(tout, v.shape[-1]), tlse

    seq, head = (2, 1) if heads_first else (1, 2)
    batch, seqlen_q, heads, head_dim = q.shape[0], q.shape[seq], q.shape[head], q.shape[3]
    seqlen_k, heads_kv, head_dim_v = k.shape[seq], k.shape[head], v.shape[3]
    out, tout = (empty(*dense((*q.shape[:-1], head_dim_v), q.dtype)) for _ in range(2))
    lse, tlse = (empty(*dense((batch, heads, seqlen_q))) for _ in range(2))
    if not out.numel():
        return out, lse, tout, tlse
    if not k.numel():
        return out.zero_(), lse.fill_(-math.inf), tout.zero_(), tlse.zero_()

    problem = AttnProblem.of(DTYPE_NAMES[q.dtype], head_dim, head_dim_v, causal, JVP)
    kernel, config = _find_kernel(problem, config)
    kv_bytes = 2 * q.element_size() * seqlen_k * (head_dim + head_dim_v)  # read by the tiles of one head
    counts = tile_counts(
        batch, heads, heads // heads_kv, kv_bytes, seqlen_q, config.block_M, device_costs(q.device.index)
    )
    m_blocks, group_heads, ctas = counts
    inputs = [tma_ready(x) for x in (q, k, v, *tangents)]
    outputs = [out, tout]
    if heads_first:
        inputs, outputs = ([x.transpose(1, 2) for x in tensors] for tensors in (inputs, outputs))
    unit = 1.0 if lse_base2 else LN2
    kernel(
        *inputs, outputs[0], lse, outputs[1], tlse,
        softmax_scale, unit, heads // heads_kv, m_blocks, group_heads, ctas,
    )  # fmt: skip
    return out, lse, tout, tlse
