"""Calls of the kernels on parts of a shard: [batch, rows, heads, head_dim] tensors, natural log-sum-exp [batch, heads, rows]."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import NamedTuple

import torch

from tl_attention import launch
from tl_attention.distributed.group import Ranks
from tl_attention.distributed.layout import Layout
from tl_attention.distributed.pieces import ALL, NOTHING, Call, Mask, Needs
from tl_attention.problem.options import MAX_WINDOW, Options, canonical_window
from tl_attention.torch_ops.flops import call_scores, is_seen, show_backward, show_forward
from tl_attention.torch_ops.ops import fwd_max_logits_op, fwd_op, run_backward_op

State = tuple[torch.Tensor, ...]  # out, lse, and max_logits of a call that asks for these
Gradients = tuple[torch.Tensor | None, ...]  # dq, dk, dv, dsink
LN2 = math.log(2)
DROPOUT_ROWS = 16  # with dropout the positions of a place are multiples of this


class Scores(NamedTuple):
    """Options of all calls, except their masks.

    Args:
        packed: the tensors hold packed documents, in a batch of one.
        needs: options that depend on positions.
    """

    softmax_scale: float
    softcap: float = 0.0
    deterministic: bool = False
    dropout_p: float = 0.0
    packed: bool = False
    needs: Needs = NOTHING


class Task(NamedTuple):
    """Task of a method, without the sizes of tensors.

    Args:
        returns_lse: a call returns the log-sum-exp, too.
        returns_max_logits: a call returns the largest score of each query, too.
    """

    layout: Layout
    mask: Mask
    ranks: Ranks
    scores: Scores
    returns_lse: bool
    returns_max_logits: bool


class Given(NamedTuple):
    """Tensors of a call other than q, k and v.

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
    """Prepared call of attention: everything that follows from shapes and options, not from values of tensors."""

    rows: slice
    key_rows: slice
    whole: tuple[tuple[int, int], tuple[int, int]]

    def __init__(self, call: Call, scores: Scores, q: torch.Tensor):
        """q: [batch, rows, heads, head_dim]; only its metadata is used."""
        device = q.device
        self.rows, self.key_rows = slice(*call.q), slice(*call.k)
        self.whole = call.q, call.k
        self._packed, self._scores = call.packed, scores
        self._causal, window = canonical_window(False, call.window)
        # Rows of padding before the first query and the first key, so that the blocks of 16 x 16 elements of dropout start there
        self._padding, place = (0, 0), None
        if call.place is not None:
            self._causal, window = False, call.window if call.window != ALL else (MAX_WINDOW, MAX_WINDOW)
            if scores.dropout_p:
                self._padding = tuple(first % DROPOUT_ROWS for first in call.place)
            first_query, first_key = (x - n for x, n in zip(call.place, self._padding, strict=True))
            stream = call.documents[0] * q.shape[2]
            place = [first_query, first_key, self._padding[1], stream, 0, 0, 0, 0]
            place = torch.tensor([place], dtype=torch.int32, device=device)
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
            place=place,
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
        max_logits: bool = False,
    ) -> State:
        """(out, lse) of the rows of a call, out in new memory or in `out`; with max_logits (out, lse, max_logits)."""
        if any(self._padding):
            q, k, v = (self._padded(x, i) for x, i in ((q, 0), (k, 1), (v, 1)))
            found, *numbers = self._run(q, k, v, given, None, max_logits)
            first = self._padding[0]
            found, numbers = found[:, first:], [x[:, :, first:] for x in numbers]
            return found if out is None else out.copy_(found), *numbers
        return self._run(q, k, v, given, out, max_logits)

    def _padded(self, x: torch.Tensor, of_keys: int) -> torch.Tensor:
        """x [batch, rows, heads, columns] with rows of zeros in front."""
        return torch.nn.functional.pad(x, (0, 0, 0, 0, self._padding[of_keys], 0))

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        given: Given,
        out: torch.Tensor | None,
        max_logits: bool,
    ) -> State:
        """forward() with padding in the tensors."""
        options = self._with(given)
        result = out
        if self._packed:
            q, k, v = q[0], k[0], v[0]
            out = None if out is None else out[0]
        if q.is_cuda:
            named = options if options.names else None
            scale = self._scores.softmax_scale
            asked = scale, self._causal, False
            if is_seen():
                show_forward(self._number_of_scores(q, k, options), q, v)
            out, *numbers = launch.forward(q, k, v, *asked, options=named, out=out, max_logits=max_logits)
        else:
            plain = self._scores.softmax_scale, self._causal, False, False, False
            op = fwd_max_logits_op if max_logits else fwd_op
            found, *numbers = op(q, k, v, *plain, *options.arguments())
            out = found if out is None else out.copy_(found)
        if self._packed:
            numbers = [x[None] for x in numbers]
        return (result if result is not None else out[None] if self._packed else out), *numbers

    def _number_of_scores(self, q: torch.Tensor, k: torch.Tensor, options: Options) -> int:
        return call_scores(q, k, (0.0, self._causal, False, False, False, *options.arguments()))

    def add(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        given: Given,
        out: torch.Tensor,
        lse: torch.Tensor,
        max_logits: torch.Tensor | None = None,
    ) -> None:
        """Merge the result of a call, without a sink, into the result of other keys.

        Args:
            out: fp32; rows whose lse is -inf may hold anything.
            lse: in base 2.
            max_logits: largest scores over the other keys, -inf without keys. The kernel that merges does not have those of its own
                keys, so with them the call rounds its result to the dtype of q, and PyTorch merges it.
        """
        asks = max_logits is not None
        if asks or not q.is_cuda or any(self._padding):
            partial, partial_lse, *largest = self.forward(q, k, v, given, max_logits=asks)
            _merge(out, lse, partial, partial_lse / LN2)
            if asks:
                torch.maximum(max_logits, *largest, out=max_logits)
            return
        options = self._with(given)
        tensors = q, k, v, out, lse
        if self._packed:
            tensors = tuple(x[0] for x in tensors)
        *qkv, out, lse = tensors
        if is_seen():
            show_forward(self._number_of_scores(*qkv[:2], options), qkv[0], qkv[2])
        asked = self._scores.softmax_scale, self._causal, True
        launch.forward(*qkv, *asked, options=options if options.names else None, out=out, lse=lse)

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
        """(dq, dk, dv, dsink) of a call whose queries see no keys of other calls; dq is new or written to `dq`.

        Without a sink dsink is None.
        """
        return self._backward((dout, q, k, v, out, lse), dlse, given, dq, partial=False)

    def _backward(
        self,
        tensors: tuple[torch.Tensor, ...],
        dlse: torch.Tensor | None,
        given: Given,
        dq: torch.Tensor | None,
        partial: bool,
    ) -> Gradients:
        """backward() of dout, q, k, v, out and lse, or with `partial` partial_backward() of kernels."""
        if not any(self._padding):
            return self._differentiate(tensors, dlse, given, dq, partial)
        dout, q, k, v, out, lse = tensors
        tensors = [self._padded(x, i) for x, i in ((dout, 0), (q, 0), (k, 1), (v, 1), (out, 0))]
        first, first_key = self._padding
        # With lse = +inf the probabilities of a query are exp(score - inf) = 0
        lse = torch.nn.functional.pad(lse, (first, 0), value=math.inf)
        dlse = None if dlse is None else torch.nn.functional.pad(dlse, (first, 0))
        found, dk, dv, dsink = self._differentiate((*tensors, lse), dlse, given, None, partial)
        found = found[:, first:]
        return found if dq is None else dq.copy_(found), dk[:, first_key:], dv[:, first_key:], dsink

    def _differentiate(
        self,
        tensors: tuple[torch.Tensor, ...],
        dlse: torch.Tensor | None,
        given: Given,
        dq: torch.Tensor | None,
        partial: bool,
    ) -> Gradients:
        """_backward() with padding in the tensors."""
        options, result, q = self._with(given), dq, tensors[1]
        if self._packed:
            tensors = tuple(x[0] for x in tensors)
            dlse, dq = (None if x is None else x[0] for x in (dlse, dq))
        scale, *_, deterministic = self._scores[:3]
        if q.is_cuda:
            deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
            asked = scale, self._causal, False, False, deterministic, dlse
            named = options if options.names else None
            if is_seen():
                show_backward(self._number_of_scores(*tensors[1:3], options), tensors[1], tensors[3])
            grads = launch.backward(*tensors, *asked, options=named, dq=dq, partial=partial)
        else:
            asked = scale, self._causal, False, False, deterministic
            grads = run_backward_op(tensors, dlse, asked, options)
            if dq is not None:
                dq.copy_(grads["q"])
        dq, dk, dv = grads["q"] if dq is None else dq, grads["k"], grads["v"]
        if self._packed:
            dq, dk, dv = dq[None], dk[None], dv[None]
        return (dq if result is None else result), dk, dv, grads.get("sink")

    def partial_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        given: Given = NOTHING_GIVEN,
        dq: torch.Tensor | None = None,
    ) -> Gradients:
        """(dq, dk, dv), in fp32, of a call whose queries also see keys of other calls; dq is new or written to `dq`.

        out, lse, dout and dlse are those of all keys. Kernels compute P = exp(score - lse) and delta = rowsum(dout * out) - dlse from
        them, which is right for any part of the keys. The reference recomputes out and lse from the keys at hand. It gets the
        gradients with respect to these, which gives the same P and delta: for w = exp(lse_partial - lse)

            dout_partial = w dout    dlse_partial = w (rowsum(dout * (out_partial - out)) + dlse)
        """
        if q.device.type != "cpu":
            return self._backward((dout, q, k, v, out, lse), dlse, given, dq, partial=True)[:3]
        dout, q, k, v = (x.float() for x in (dout, q, k, v))
        partial, lse_partial = self.forward(q, k, v, given)
        weight = torch.exp(lse_partial - lse)
        slope = (dout.float() * (partial.float() - out.float())).sum(-1).mT  # [batch, heads, rows]
        dlse_partial = weight * (slope if dlse is None else slope + dlse)
        dout_partial = (dout.float() * weight.mT[..., None]).to(dout.dtype)
        return self.backward(dout_partial, q, k, v, partial, lse_partial, dlse_partial, given, dq)[:3]


def _merge(out: torch.Tensor, lse: torch.Tensor, partial: torch.Tensor, partial_lse: torch.Tensor) -> None:
    """Merge results of the same queries in place, as kernels/forward/results.py does.

    Args:
        out, partial: [batch, rows, heads, columns], out in fp32.
        lse, partial_lse: [batch, heads, rows], base 2.
    """
    total = torch.logaddexp2(lse, partial_lse)
    finite = total.masked_fill(total == -math.inf, 0)
    weight, of_partial = (torch.exp2(x - finite).mT[..., None] for x in (lse, partial_lse))
    lse.copy_(total)
    out.masked_fill_(weight == 0, 0).mul_(weight).addcmul_(partial.float(), of_partial)
