"""First queries of a causal backward that see no key. Their dq is 0, and where they are many no kernel reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tl_attention.config.costs import Costs


@dataclass(frozen=True)
class SeenQueries:
    """The queries of a head that see a key, the last of its queries."""

    axis: int  # of queries in q, dout, out and dq
    first: int
    count: int

    def rows(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of the rows of these queries in tensors with an axis of queries."""
        return tuple(x.narrow(self.axis, self.first, self.count) for x in tensors)

    def numbers(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Views of the columns of these queries in lse or dlse, [batch, heads, seqlen_q]."""
        return tuple(x if x is None else x.narrow(-1, self.first, self.count) for x in tensors)

    def zero_others(self, dq: torch.Tensor) -> None:
        dq.narrow(self.axis, 0, self.first).zero_()


def unseen_queries(batch: int, heads: int, seqlen_q: int, seqlen_k: int, costs: Costs) -> int:
    """Number of queries of a causal head that its backward leaves out; 0 where they are few.

    Leaving them out takes two launches more: one sets their dq to 0, one copies the log-sum-exps of the others.
    """
    unseen = max(seqlen_q - seqlen_k, 0)
    return unseen if batch * heads * unseen >= costs.backward.least_unseen else 0


def seen_queries(q: torch.Tensor, k: torch.Tensor, heads_first: bool, costs: Costs) -> SeenQueries | None:
    """The queries that a causal backward reads; None: all."""
    head, seq = (-3, -2) if heads_first else (-2, -3)
    first = unseen_queries(q.shape[0], q.shape[head], q.shape[seq], k.shape[seq], costs)
    return SeenQueries(seq, first, q.shape[seq] - first) if first else None
