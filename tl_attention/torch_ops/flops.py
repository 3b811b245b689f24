"""FLOPs of attention for torch.utils.flop_counter, by the formulas of PyTorch's own attention: a query counts all keys, whatever the mask.

The module of torch imports Triton, which takes 0.2 s. So the formulas of the ops are registered once a program has imported it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from tl_attention.problem.options import FIELDS, PLAIN, Call
from tl_attention.torch_ops.transforms import NAMESPACE, define_op
from tl_attention.tracing.captures import has_values, is_recording, outside_modes

Formula = Callable[..., int]  # of the arguments of an op
_COUNTER = "torch.utils.flop_counter"
_formulas: dict[str, Formula] = {}  # by op
# Bound once: each dot costs 20 ns of a plain call
is_seen = torch._C._len_torch_dispatch_stack  # above 0 inside dispatch modes, such as that of FlopCounterMode


class _Finder:
    """Finder that has the formulas registered when the module of torch's counter is imported, and finds nothing else."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register(module, _formulas)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _Finder())


def register_flops(formula: Formula, *names: str) -> None:
    """Register the formula of the FLOPs of these ops, by their arguments."""
    found = dict.fromkeys(names, formula)
    _formulas.update(found)
    if _COUNTER in sys.modules:
        _register(importlib.import_module(_COUNTER), found)  # waits for another thread that imports it


def _register(counter: ModuleType, formulas: dict[str, Formula]) -> None:
    for name, formula in formulas.items():
        op = getattr(getattr(torch.ops, NAMESPACE), name)
        if op not in counter.flop_registry:  # a user may have registered another one
            counter.register_flop_formula(op, get_raw=True)(_raw(formula))


def _raw(formula: Formula) -> Formula:
    """The formula as torch calls it, with results of the op and notes of the compiler as keywords."""

    def counted(*arguments: Any, **_: Any) -> int:
        return formula(*arguments)

    return counted


def forward_flops(scores: int, q: torch.Tensor, v: torch.Tensor) -> int:
    """FLOPs of S = QKᵀ and O = PV, 2 per multiply-add. scores: pairs of query and key in all batch entries and query heads."""
    return 2 * scores * (q.shape[-1] + v.shape[-1])


def backward_flops(scores: int, q: torch.Tensor, v: torch.Tensor) -> int:
    """FLOPs of S = QKᵀ, dQ = dS K and dK = dSᵀQ over head_dim, and of dP = dO Vᵀ and dV = PᵀdO over head_dim_v."""
    return 2 * scores * (3 * q.shape[-1] + 2 * v.shape[-1])


def scores_of(q: torch.Tensor, k: torch.Tensor, heads_first: bool) -> int:
    """Scores of a call that is not packed, in all batch entries and query heads."""
    batch, n1, n2, _ = q.shape
    return batch * n1 * n2 * k.shape[2 if heads_first else 1]


def call_scores(q: torch.Tensor, k: torch.Tensor, arguments: Sequence[Any], pages: int | None = None) -> int:
    """Scores of a call.

    Args:
        arguments: fields of Call and of Options, without trailing defaults, which the dispatcher leaves out.
        pages: rows of a sequence in the pages of a block_table, which k has then.
    """
    options = dict(zip(FIELDS, arguments[PLAIN:], strict=False))
    if options.get("cu_seqlens_q") is None:
        return scores_of(q, k, Call(*arguments[:PLAIN]).heads_first)
    return q.shape[1] * _packed_pairs(q.shape[0], k.shape[0] if pages is None else None, options)


def _packed_pairs(rows_q: int, rows_k: int | None, options: dict[str, Any]) -> int:
    """Pairs of query and key of packed sequences, or where lengths are on a GPU or fake an upper bound, for which the host does not wait.

    rows_k: None: unknown, as keys are in pages.
    """
    batch = options["cu_seqlens_q"].shape[0] - 1
    used = options.get("seqused_q"), options.get("seqused_k")
    lengths = [_lengths(options[f"cu_seqlens_{x}"], y) for x, y in zip("qk", used, strict=True)]
    if lengths[0] is not None and lengths[1] is not None:
        return sum(m * n for m, n in zip(*lengths, strict=True))
    # Not min(), which would add guards for lengths that are symbols
    longest_q, longest_k = options["max_seqlen_q"], options["max_seqlen_k"]
    rows_q = torch.sym_min(rows_q, batch * longest_q)
    rows_k = batch * longest_k if rows_k is None else torch.sym_min(rows_k, batch * longest_k)
    return torch.sym_min(rows_q * longest_k, rows_k * longest_q)


def _lengths(cu_seqlens: torch.Tensor, seqused: torch.Tensor | None) -> list[int] | None:
    """Lengths of packed sequences; None where the host cannot read them at once."""
    if seqused is not None:
        return values_of(seqused)
    bounds = values_of(cu_seqlens)
    return None if bounds is None else [end - start for start, end in pairwise(bounds)]


def values_of(x: torch.Tensor) -> list[int] | None:
    """Values of a CPU tensor; None of another one, for which the host would wait, and of one without values."""
    return x.tolist() if x.device.type == "cpu" and has_values(x) else None


def _nothing(q: torch.Tensor, flops: int) -> None:
    """FlopCounterMode sees in this op the FLOPs of a launch that is no op."""


_eager_fwd, _eager_bwd = (
    define_op(name, "(Tensor q, SymInt flops) -> ()", _nothing)(_nothing)
    for name in ("eager_fwd", "eager_bwd")
)
register_flops(lambda q, flops: flops, "eager_fwd", "eager_bwd")


def show_forward(scores: int, q: torch.Tensor, v: torch.Tensor) -> None:
    """Let FlopCounterMode count a forward that is no op."""
    if not is_recording():  # make_fx and others would keep the op
        _eager_fwd(q, forward_flops(scores, q, v))


def show_backward(scores: int, q: torch.Tensor, v: torch.Tensor) -> None:
    """Let FlopCounterMode count a backward that is no op."""
    if not is_recording():
        _eager_bwd(q, backward_flops(scores, q, v))


def unseen() -> AbstractContextManager[Any]:
    """A context in which no mode sees the operations of a reference, but for those that record or fake them."""
    return outside_modes() if is_seen() else contextlib.nullcontext()
