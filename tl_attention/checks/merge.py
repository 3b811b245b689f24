"""Argument checks of merge_states, in the form of common.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tl_attention.checks.common import describe, expect_bool, expect_tensor, is_dtensor


def check_states(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    lse_base2: bool,
) -> None:
    """Check the arguments of merge_states."""
    expect_bool("lse_base2", lse_base2)
    for name, states in (("outs", outs), ("lses", lses)):
        if not isinstance(states, (torch.Tensor, list, tuple)):
            raise TypeError(
                f"{name}: expected a list of tensors or one stacked tensor, got {type(states).__name__}"
            )
        if not isinstance(states, torch.Tensor):
            for i, x in enumerate(states):
                expect_tensor(f"{name}[{i}]", x)
            continue
        expect_tensor(name, states)
        if not states.ndim:
            raise ValueError(f"{name}: expected a stack of partial results, got {describe(states)}")
    if not len(outs) or len(outs) != len(lses):
        raise ValueError(
            f"outs, lses: expected non-empty lists of equal length, got {len(outs)} and {len(lses)}"
        )
    kinds = {is_dtensor(x) for x in (*outs, *lses)}
    if len(kinds) > 1:
        raise TypeError(
            "outs, lses: expected DTensors alone or none, got both; call torch.distributed.tensor.distribute_tensor on those that are none,"
            " or .to_local() on the others"
        )
    shape = tuple(outs[0].shape)
    if len(shape) not in (3, 4):
        raise ValueError(
            f"outs[0]: expected [batch, seqlen, heads, head_dim] or [total, heads, head_dim], got shape {shape}"
        )
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if tuple(out.shape) != shape:
            raise ValueError(f"outs[{i}]: expected the shape of outs[0], {shape}, got {tuple(out.shape)}")
        if tuple(lse.shape) != lse_shape:
            raise ValueError(
                f"lses[{i}]: expected shape {lse_shape} for outs of shape {shape}, got {tuple(lse.shape)}"
            )
        if out.dtype != outs[0].dtype:
            raise TypeError(
                f"outs[{i}]: expected the dtype of outs[0], {outs[0].dtype}, got {out.dtype}; cast them to one dtype"
            )
        if not out.dtype.is_floating_point or lse.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"outs[{i}], lses[{i}]: expected a floating-point out and an fp32 or fp64 lse, got {out.dtype} and {lse.dtype}"
            )
        if not out.device == lse.device == outs[0].device:
            raise ValueError(
                f"outs[{i}], lses[{i}]: expected the device of outs[0], {outs[0].device}, got {out.device} and {lse.device}; move them"
                " to one device"
            )
