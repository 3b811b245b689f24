"""Attention over the ranks of a process group, each of which holds a share of the sequence."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from tl_attention.api import flash
from tl_attention.api.docstrings import complete
from tl_attention.api.flash import Output, flash_attn_func, flash_attn_varlen_func
from tl_attention.checks.common import (
    check_fwd,
    check_options,
    describe,
    expect_bool,
    expect_tensor,
    is_int,
)
from tl_attention.checks.keywords import unknown_keyword
from tl_attention.checks.transforms import check_no_transforms
from tl_attention.distributed import roll
from tl_attention.distributed.calls import Given, Scores, Task
from tl_attention.distributed.choice import METHODS, MethodName, choose
from tl_attention.distributed.gather import Gather
from tl_attention.distributed.group import Group, Ranks, ranks_of
from tl_attention.distributed.layout import Layout, LayoutName
from tl_attention.distributed.pieces import CAUSAL, Mask, Needs, cumulative
from tl_attention.distributed.ring import Ring
from tl_attention.distributed.shards import documents_of, layout_of
from tl_attention.problem.options import ALWAYS_INVARIANT, as_stored, canonical_window, saveable
from tl_attention.torch_ops.ops import check_device_or_warn, is_batched, scale_of

CLASSES: dict[str, type[Gather] | type[Ring]] = {"gather": Gather, "ring": Ring}
Method = Gather | Ring
MAX_PREPARED = 1024  # prepared calls per group, as there is no bound on the number of different documents


@torch.compiler.disable  # torch.compile cannot see into process groups: it compiles what is around the call
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    return_max_logits: bool = False,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    seqlen: int | None = None,
    layout: LayoutName | Layout = "zigzag",
    method: MethodName = "auto",
    **unknown: NoReturn,
) -> (
    torch.Tensor
    | tuple[torch.Tensor, torch.Tensor, None]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]
):
    """Attention of a sequence that the ranks of a group hold together. Results and gradients are those of one GPU.

    All ranks must call it with equal options, and all or none must run its backward. roll.py compares their calls, without waiting for a
    GPU. A group of one rank calls flash_attn_func or flash_attn_varlen_func.

    Args:
        q: [batch, rows, heads, head_dim], bfloat16 or float16: the tokens of this rank, as shard() gives them; with cu_seqlens
            [rows, heads, head_dim].
        k, v: as q, with heads_kv heads and, for v, head_dim_v columns; the same tokens as q.
        group: a ProcessGroup; a DeviceMesh of one dimension; None: all processes, or this one where torch.distributed is not initialized.
        dropout_p: probability of dropping an attention weight, as in flash_attn_func. The dropout mask equals that of one GPU. Without
            rng_state the first rank draws the state for all.
        return_max_logits: also return the largest score of each query of this rank over the keys of all ranks, max_logits, as in
            flash_attn_func. The largest score of a head is a maximum over the ranks (examples/qk_clip.py). Not differentiable.
        learnable_sink: [heads], fp32, bf16 or fp16: score of one extra key per query, as in flash_attn_func. Its gradient is that of this
            rank's queries. As with other parameters, the sum over the ranks is the whole gradient.
        cu_seqlens: [documents + 1], cumulative lengths of all documents, the same on all ranks: a tensor on the CPU or a list. A document
            may be empty and may end at any token.
        seqlen: tokens of the whole sequence; None: world size times rows, for shards of equal length.
        layout: tokens of each rank: "zigzag", "contiguous", or the result of make_layout().
        method: "gather"; "ring", for sequences whose gathered keys do not fit; "auto": one of them by the bytes of the keys.
            TL_ATTENTION_PRINT_CONFIGS=1 prints the choice and the reason.
    Returns:
        out: [.., heads, head_dim_v], the other dimensions and the dtype those of q. With return_attn_probs (out, softmax_lse, None), where
            softmax_lse is [batch, heads, rows], or [heads, rows] with cu_seqlens, fp32, natural log. As in flash_attn_func a query that
            sees no key has out 0 and softmax_lse -inf, or with a sink softmax_lse = sink. With return_max_logits max_logits come last,
            (out, max_logits) or (out, softmax_lse, None, max_logits), in the shape of softmax_lse, fp32.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed; on all ranks. Transforms of
            torch.func and forward-mode differentiation are refused.
    """
    if unknown:
        raise unknown_keyword(attention, unknown)
    ranks = ranks_of(group)
    asked = Asked(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        return_max_logits,
        learnable_sink,
        rng_state,
        cu_seqlens,
        seqlen,
        layout,
        method,
    )
    if ranks.world == 1:
        return _attend_alone(q, k, v, ranks, asked)
    call = _prepared(q, k, v, ranks, asked)
    q, k, v = as_stored(q), as_stored(k), as_stored(v)
    if dropout_p:
        if rng_state is None:
            rng_state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)
            dist.broadcast(rng_state, dist.get_global_rank(ranks.group, 0), ranks.group)
        rng_state = rng_state.contiguous()
    else:
        rng_state = None
    slopes = None if alibi_slopes is None else as_stored(alibi_slopes.detach()).contiguous()
    sink = None if learnable_sink is None else as_stored(learnable_sink).contiguous()
    if call.training:
        out, lse, largest = _Attention.apply(call, q, k, v, sink, slopes, rng_state)
    else:
        out, lse, largest, _ = call.forward(q, k, v, Given(slopes, sink, rng_state))
    if return_max_logits:
        return (out, lse, None, largest) if return_attn_probs else (out, largest)
    return (out, lse, None) if return_attn_probs else out


complete(flash.__doc__, attention)


class Asked(NamedTuple):
    """Arguments of attention() other than q, k, v and the group."""

    dropout_p: Any
    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    alibi_slopes: Any
    deterministic: Any
    return_attn_probs: Any
    return_max_logits: Any
    learnable_sink: Any
    rng_state: Any
    cu_seqlens: Any
    seqlen: Any
    layout: Any
    method: Any

    @property
    def of_one_gpu(self) -> dict[str, Any]:
        """The arguments that flash_attn_func has, too."""
        return {name: value for name, value in self._asdict().items() if name not in _PLACEMENT}


_PLACEMENT = "cu_seqlens", "seqlen", "layout", "method"


class _Attention(torch.autograd.Function):
    """Autograd of a prepared call."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Prepared,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        slopes: torch.Tensor | None,
        rng_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """(out, lse, max_logits)."""
        out, lse, largest, saved = call.forward(q, k, v, Given(slopes, sink, rng_state))
        options = saveable(slopes), saveable(sink), saveable(rng_state)
        ctx.save_for_backward(*options, out, *saved)
        ctx.call = call
        ctx.set_materialize_grads(False)
        if largest is not None:
            ctx.mark_non_differentiable(largest)
        return out, lse, largest

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: None) -> tuple[Any, ...]:
        if is_batched(dout) or is_batched(dlse):
            raise NotImplementedError(
                "attention: expected gradients of one sample, as ranks exchange no samples, got those of torch.autograd.grad("
                "is_grads_batched=True); call it per sample"
            )
        slopes, sink, rng_state, out, *saved = ctx.saved_tensors
        given = Given(slopes, sink, rng_state)
        with torch.no_grad():
            grads = ctx.call.backward(dout, dlse, out, saved, given)
        if torch.is_grad_enabled():  # all inputs are behind out
            grads = _Once.apply(len(grads), *grads, dout, dlse, out)
        return None, *grads, None, None


class _Once(torch.autograd.Function):
    """Gradients that refuse to be differentiated, where a backward is recorded (create_graph=True)."""

    @staticmethod
    def forward(ctx: Any, number: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """tensors: `number` gradients, then what they depend on."""
        return tuple(None if x is None else x.detach() for x in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> NoReturn:
        raise NotImplementedError(
            "attention: the gradient of a gradient is not supported; call backward without create_graph=True"
        )


class Prepared(NamedTuple):
    """A call whose arguments have been checked: everything that does not depend on values of tensors.

    Results are no views and share no memory, so they may be changed in place.

    Args:
        packed: q, k, v are [rows, heads, head_dim].
        training: the results must be differentiable.
        known: the arguments that must be equal on all ranks.
    """

    method: Method
    packed: bool
    training: bool
    known: roll.Known

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Given
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
        """(out, lse, max_logits, tensors for the backward)."""
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        if not self.packed:
            return out, *self.method.forward(q, k, v, given, out)
        lse, largest, saved = self.method.forward(q[None], k[None], v[None], given, out[None])
        lse, largest = (None if x is None else x[0].clone() for x in (lse, largest))
        return out, lse, largest, saved

    def backward(
        self,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        saved: list[torch.Tensor],
        given: Given,
    ) -> tuple[torch.Tensor | None, ...]:
        """(dq, dk, dv, dsink)."""
        self.known.enter(backward=True)
        dout, dlse = (None if x is None else as_stored(x) for x in (dout, dlse))
        if not self.packed:
            return self.method.backward(dout, dlse, out, saved, given)
        dout, dlse, out = (None if x is None else x[None] for x in (dout, dlse, out))
        *grads, dsink = self.method.backward(dout, dlse, out, saved, given)
        return *(grad[0] for grad in grads), dsink


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, Prepared]] = weakref.WeakKeyDictionary()


def _prepared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: Ranks, asked: Asked) -> Prepared:
    """The prepared call for arguments with this metadata. The first call checks them and compares them with those of other ranks."""
    of_group = _known.get(ranks.group)
    if of_group is None:
        of_group = _known[ranks.group] = {}
    try:
        key = _key(q, k, v, asked)
        found = of_group.get(key)
    except Exception:  # a wrong argument, which the checks will name
        key = found = None
    if found is not None and found.known.is_kept and not roll.ALWAYS:
        found.known.enter()
        return found
    device = q.device if isinstance(q, torch.Tensor) else None
    known = roll.roll_of(ranks, device).agree(lambda: _checked(q, k, v, ranks, asked), device)
    if found is not None:
        return found
    found = _prepare(q, k, v, ranks, asked, known)
    if key is not None:
        if len(of_group) >= MAX_PREPARED:
            of_group.clear()
        of_group[key] = found
    return found


def _prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: Ranks, asked: Asked, known: roll.Known
) -> Prepared:
    layout, documents = _placement(q, ranks, asked)
    packed = asked.cu_seqlens is not None
    causal, window = canonical_window(asked.causal, asked.window_size)
    mask = Mask(documents, CAUSAL if causal else window)
    method = asked.method
    if method == "auto":
        method = choose(layout, mask, _row_bytes(k, v)).method
    scores = Scores(
        scale_of(q, asked.softmax_scale),
        float(asked.softcap),
        asked.deterministic,
        float(asked.dropout_p),
        packed,
        Needs(asked.alibi_slopes is not None, asked.dropout_p > 0),
    )
    training = _trains(q, k, v, asked.learnable_sink)
    if packed:
        q, k, v = q[None], k[None], v[None]
    returns = asked.return_attn_probs, asked.return_max_logits
    method = CLASSES[method](Task(layout, mask, ranks, scores, *returns), q, k, v)
    return Prepared(method, packed, training, known)


def _trains(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _row_bytes(k: torch.Tensor, v: torch.Tensor) -> int:
    """Bytes of keys and values per token of all batch entries."""
    batch = len(k) if k.ndim == 4 else 1
    return batch * k.shape[-2] * (k.shape[-1] + v.shape[-1]) * k.element_size()


def _placement(q: torch.Tensor, ranks: Ranks, asked: Asked) -> tuple[Layout, tuple[int, ...]]:
    """(layout, documents) of checked arguments."""
    documents, layout = documents_of(asked.cu_seqlens), asked.layout
    if documents is None:
        total = q.shape[1] * ranks.world if asked.seqlen is None else asked.seqlen
        if asked.seqlen is None and isinstance(layout, Layout):
            total = layout.total
        documents = (0, total)
    return layout_of(layout, documents[-1], ranks.world), documents


def _check_placement(q: torch.Tensor, ranks: Ranks, asked: Asked) -> None:
    """Check layout, seqlen and cu_seqlens, for a q with the right number of dimensions."""
    seqlen, documents = asked.seqlen, documents_of(asked.cu_seqlens)
    if not isinstance(asked.method, str) or asked.method not in METHODS:
        raise ValueError(
            f"method: expected one of {', '.join(map(repr, METHODS))}, got {describe(asked.method)}"
        )
    if seqlen is not None and not is_int(seqlen):
        raise TypeError(f"seqlen: expected an int or None, got {describe(seqlen)}")
    if seqlen is not None and seqlen < 0:
        raise ValueError(
            f"seqlen: expected the tokens of the whole sequence, at least 0, got {describe(seqlen)}"
        )
    if documents is not None and seqlen not in (None, documents[-1]):
        raise ValueError(f"seqlen: expected None or the end of cu_seqlens, {documents[-1]}, got {seqlen}")
    expect_tensor("q", q)
    if q.ndim != (4 if documents is None else 3):
        return  # check_fwd says it
    found, _ = _placement(q, ranks, asked)
    rows, expected = q.shape[-3], found.rows(ranks.rank)
    if rows != expected:
        raise ValueError(
            f"q: expected the {expected} tokens that the layout gives to rank {ranks.rank} of {ranks.world}, of {found.total} in all, got"
            f" {rows}; cut the sequence with tl_attention.distributed.shard, and pass seqlen for shards of unequal length"
        )


def _check_packing(q: torch.Tensor, documents: tuple[int, ...] | None) -> None:
    """Refuse packed sequences without cu_seqlens; check_fwd would name flash_attn_varlen_func, which is of one GPU."""
    if documents is None and isinstance(q, torch.Tensor) and q.ndim == 3:
        raise ValueError(
            f"q: expected [batch, seqlen, heads, head_dim], got shape {tuple(q.shape)}; pass cu_seqlens for packed sequences, or q[None],"
            " k[None] and v[None]"
        )


def _check_rows(q: torch.Tensor, k: torch.Tensor) -> None:
    """Check that q and k have the same tokens, for tensors of three or four dimensions."""
    if k.shape[-3] != q.shape[-3]:
        raise ValueError(
            f"k, v: expected the tokens of q, {q.shape[-3]}, got {k.shape[-3]}; cross attention over ranks is not supported, call"
            " flash_attn_func with keys of one rank"
        )


def _checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: Ranks, asked: Asked) -> dict[str, Any]:
    """Check all arguments; return those that must be equal on all ranks."""
    check_no_transforms("attention")
    if ALWAYS_INVARIANT:
        raise ValueError(
            "TL_ATTENTION_BATCH_INVARIANT: expected it to be unset for tl_attention.distributed.attention on several ranks, as their number"
            " decides the order of sums, got 1; unset it, or call flash_attn_func on one GPU"
        )
    documents = documents_of(asked.cu_seqlens)
    packed = documents is not None
    slopes, sink = asked.alibi_slopes, asked.learnable_sink
    expect_bool("return_attn_probs", asked.return_attn_probs)
    expect_bool("return_max_logits", asked.return_max_logits)
    _check_packing(q, documents)
    check_fwd(q, k, v, asked.softmax_scale, asked.causal, heads_first=False, varlen=packed)
    _check_rows(q, k)
    check_device_or_warn(q, traced=False)
    expect_bool("deterministic", asked.deterministic)
    batch = len(documents) - 1 if packed else len(q)
    check_options(q, batch, asked)
    _check_placement(q, ranks, asked)
    layout, bounds = _placement(q, ranks, asked)
    is_causal, window = canonical_window(asked.causal, asked.window_size)
    training = _trains(q, k, v, sink)
    return {
        "q": (*q.shape[:-3], *q.shape[-2:], str(q.dtype)),
        "k": tuple(k.shape[-2:]),
        "v": tuple(v.shape[-2:]),
        "q, k, v, learnable_sink (any needs a gradient)": training,
        "softmax_scale": scale_of(q, asked.softmax_scale),
        "causal, window_size": (is_causal, tuple(window)),
        "softcap": float(asked.softcap),
        "dropout_p": float(asked.dropout_p),
        "rng_state": asked.rng_state is not None,
        "alibi_slopes": None if slopes is None else tuple(slopes.shape),
        "learnable_sink": None if sink is None else str(sink.dtype),
        "return_attn_probs": asked.return_attn_probs,
        "return_max_logits": asked.return_max_logits,
        "cu_seqlens, seqlen": bounds,
        "layout": layout.ranges,
        "method": asked.method,
    }


def _key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: Asked) -> tuple[Any, ...]:
    """Everything that a prepared call depends on."""
    check_no_transforms("attention")
    return (
        q.shape, q.stride(), q.dtype, q.device, q.requires_grad,
        k.shape, k.stride(), k.dtype, k.device, k.requires_grad,
        v.shape, v.stride(), v.dtype, v.device, v.requires_grad,
        torch.is_grad_enabled(),
        *map(_facts, asked),
        _values(asked.cu_seqlens),
    )  # fmt: skip


def _facts(x: object) -> object:
    """Facts of an argument that a prepared call depends on: the metadata of a tensor, the value of anything else."""
    if x is None or type(x) is str:
        return x
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    return type(x), tuple(x) if isinstance(x, list) else x


def _values(cu_seqlens: object) -> object:
    is_tensor = isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.device.type == "cpu"
    return tuple(cu_seqlens.tolist()) if is_tensor else None


def _attend_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: Ranks, asked: Asked) -> Output:
    """The call of a group of one rank."""
    documents, options = documents_of(asked.cu_seqlens), asked.of_one_gpu
    _check_packing(q, documents)
    _check_placement(q, ranks, asked)
    if isinstance(k, torch.Tensor) and k.ndim == q.ndim == (4 if documents is None else 3):
        _check_rows(q, k)
    if documents is None:
        return flash_attn_func(q, k, v, **options)
    lengths = [stop - start for start, stop in pairwise(documents)]
    (cu_seqlens,) = cumulative((lengths,), q.device)
    longest = max(lengths, default=0)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
