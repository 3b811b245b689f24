"""The draw of a dropout mask's state as a torch op, so that code which torch recomputes has the mask of its first run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.fx.traceback

from tl_attention.torch_ops.transforms import NAMESPACE, define_op

_STATES = 2**63 - 1


def draw(q: torch.Tensor) -> torch.Tensor:
    """New state of a dropout mask, int64 [2] on the device of q, from torch's generator of that device."""
    return torch.randint(_STATES, (2,), dtype=torch.int64, device=q.device)


def _fake(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(2, dtype=torch.int64)


# Tagged, so that torch stores the generator for a recomputation of the op: in checkpoints inside torch.compile
@define_op("dropout_state", "(Tensor q) -> Tensor", _fake, tags=(torch.Tag.nondeterministic_seeded,))
def dropout_state_op(q: torch.Tensor) -> torch.Tensor:
    """draw(), for tracers."""
    return draw(q)


def _below_autograd(keyset: torch._C.DispatchKeySet, q: torch.Tensor) -> torch.Tensor:
    with _kept(), torch._C._AutoDispatchBelowAutograd():
        return dropout_state_op.redispatch(keyset & torch._C._after_autograd_keyset, q)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Mark the node that torch.compile traces: a backward that computes parts of the forward again keeps the state of the forward.

    Without a mark torch 2.13 draws another one, by activation_memory_budget below 1. A node of a checkpoint has a mark of its own. With a
    budget of 0 torch ignores what must be saved; there it stores the generator.
    """
    traceback = torch.fx.traceback  # nodes that are made copy its current_meta
    if not traceback.has_preserved_node_meta() or traceback.current_meta.get("recompute") is not None:
        yield
        return
    from torch._functorch import config
    from torch.utils.checkpoint import CheckpointPolicy

    # Of torch.autograd.graph.region_activation_memory_budget
    region = getattr(traceback, "MEMORY_BUDGET_ANNOTATION_KEY", None)
    budget = (traceback.current_meta.get("custom") or {}).get(region, config.activation_memory_budget)
    mark = CheckpointPolicy.MUST_SAVE if budget > 0 else CheckpointPolicy.PREFER_RECOMPUTE
    traceback.current_meta["recompute"] = mark
    try:
        yield
    finally:
        del traceback.current_meta["recompute"]


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.impl("dropout_state", _below_autograd, "Autograd", with_keyset=True)
# By the randomness of vmap, whether q is a batch or not
_library.impl("dropout_state", draw, "FuncTorchVmapMode")
