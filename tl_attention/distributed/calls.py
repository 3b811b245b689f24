"""Calls of the kernels on parts of a shard: [batch, rows, heads, head_dim] tensors, natural log-sum-exp [batch, heads, rows]."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch

from tl_attention import launch
from tl_attention.distributed.pieces import Call
from tl_attention.ops import bwd_op, fwd_op
from tl_attention.options import Options, canonical_window

State = tuple[torch.Tensor, torch.Tensor]  # out, lse
Gradients = tuple[torch.Tensor | None, ...]  # dq, dk, dv, dsink


class Scores(NamedTuple):
    """Values of all calls beside their masks.

    Args:
        packed: the tensors hold packed documents, in a batch of one.
    """

    softmax_scale: float
    softcap: float = 0.0
    deterministic: bool = False
    dropout_p: float = 0.0
    packed: bool = False


class Given(NamedTuple):
    """Tensors of a call beside q, k and v.

    Args:
        slopes: [heads], [batch, heads] or, with packed documents, [documents, heads].
        sink: [heads].
        rng_state: int64 [2].
    """

    slopes: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None


NOTHING_GIVEN = Given()


class Attend:
    """Prepared call of attention: all that follows from its shapes and options, not from the values of tensors."""

    def __init__(self, call: Call, scores: Scores, device: torch.device):
        self.rows, self.key_rows = slice(*call.q), slice(*call.k)
        self.whole = call.q, call.k
        self._packed, self._scores = call.packed, scores
        self._causal, window = canonical_window(False, call.window)
        lengths = call.cu_seqlens(device) if call.packed else (None, None)
        self._device, self._documents = device, call.documents if scores.packed else None
        self._options = Options(
            window=window,
            softcap=scores.softcap,
            dropout_p=scores.dropout_p,
            max_seqlen_q=max(call.lengths_q) if call.packed else 0,
            max_seqlen_k=max(call.lengths_k) if call.packed else 0,
            cu_seqlens_q=lengths[0],
            cu_seqlens_k=lengths[1],
        )

    @functools.cached_property
    def _sequences(self) -> torch.Tensor:
        """Numbers of the documents, on the device."""
        return torch.tensor(self._documents, device=self._device)

    def _with(self, given: Given) -> Options:
        """Options with the tensors of a call."""
        slopes, sink, state = given
        if slopes is None and sink is None and state is None:
            return self._options
        if slopes is not None and slopes.ndim == 2 and self._documents is not None:
            slopes = slopes[self._sequences]
        return replace(self._options, alibi_slopes=slopes, sink=sink, rng_state=state)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        given: Given = NOTHING_GIVEN,
        out: torch.Tensor | None = None,
    ) -> State:
        """(out, lse) of the rows of a call, in new memory or in `out`."""
        options = self._with(given)
        result = out
        if self._packed:
            q, k, v = q[0], k[0], v[0]
            out = None if out is None else out[0]
        if q.is_cuda:
            named = options if options.names else None
            scale = self._scores.softmax_scale
            out, lse = launch.forward(q, k, v, scale, self._causal, False, options=named, out=out)
        else:
            plain = self._scores.softmax_scale, self._causal, False, False, False
            found, lse = fwd_op(q, k, v, *plain, *options.arguments())
            out = found if out is None else out.copy_(found)
        if self._packed:
            lse = lse[None]
        return (result if result is not None else out[None] if self._packed else out), lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None = None,
        given: Given = NOTHING_GIVEN,
        dq: torch.Tensor | None = None,
    ) -> Gradients:
        """(dq, dk, dv, dsink) of a call whose queries see keys of this call alone; dq in new memory or in `dq`.

        Without a sink dsink is None.
        """
        options, result = self._with(given), dq
        tensors = dout, q, k, v, out, lse
        if self._packed:
            tensors = tuple(x[0] for x in tensors)
            dlse, dq = (None if x is None else x[0] for x in (dlse, dq))
        scale, *_, deterministic = self._scores[:3]
        if q.is_cuda:
            deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
            asked = scale, self._causal, False, False, deterministic, dlse
            named = options if options.names else None
            dq, dk, dv, *dsink = launch.backward(*tensors, *asked, options=named, dq=dq)
        else:
            asked = scale, self._causal, False, False, deterministic
            found, dk, dv, *dsink = bwd_op(*tensors, dlse, *asked, *options.arguments())
            dq = found if dq is None else dq.copy_(found)
        if self._packed:
            dq, dk, dv = dq[None], dk[None], dv[None]
        return (dq if result is None else result), dk, dv, None if given.sink is None else dsink[0]

    def partial_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        dq: torch.Tensor | None = None,
    ) -> Gradients:
        """(dq, dk, dv) of a call whose queries see other keys, too; dq in new memory or in `dq`.

        out, lse, dout and dlse are those of all keys. Kernels compute P = exp(score - lse) and delta = rowsum(dout * out) - dlse from
        them, which is right for any part of the keys. The reference recomputes out and lse from the keys at hand. It gets the
        gradients with respect to these, which gives the same P and delta: for w = exp(lse_part - lse)

            dout_part = w dout    dlse_part = w (rowsum(dout * (out_part - out)) + dlse)
        """
        if q.device.type != "cpu":
            return self.backward(dout, q, k, v, out, lse, dlse, dq=dq)[:3]
        part, lse_part = self.forward(q, k, v)
        weight = torch.exp(lse_part - lse)
        slope = (dout.float() * (part.float() - out.float())).sum(-1).mT  # [batch, heads, rows]
        dlse_part = weight * (slope if dlse is None else slope + dlse)
        dout_part = (dout.float() * weight.mT[..., None]).to(dout.dtype)
        return self.backward(dout_part, q, k, v, part, lse_part, dlse_part, dq=dq)[:3]
