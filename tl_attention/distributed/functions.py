"""Attention over the ranks of a process group, each of which holds a share of the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from tl_attention.checks import (
    check_deterministic,
    check_fwd,
    check_options,
    expect_bool,
)
from tl_attention.distributed import gather, ring, ulysses
from tl_attention.distributed.calls import Scores
from tl_attention.distributed.choice import METHODS, Sizes, choose, supported
from tl_attention.distributed.group import Group, Ranks, agree, ranks_of
from tl_attention.distributed.layout import Layout
from tl_attention.distributed.pieces import CAUSAL, Mask, cumulative
from tl_attention.distributed.shards import documents_of, layout_of
from tl_attention.flash import Output, flash_attn_func, flash_attn_varlen_func
from tl_attention.ops import check_device_or_warn, scale_of
from tl_attention.options import canonical_window


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    seqlen: int | None = None,
    layout: str | Layout = "zigzag",
    method: str = "auto",
) -> Output:
    """Attention of a sequence that the ranks of a group hold together. Results and gradients are those of one GPU.

    All ranks call it, with equal options, and run its backward or not alike. Ranks compare their arguments at the first call with new ones,
    which waits for the GPU; other calls do not. A group of one rank makes the call of flash_attn_func or flash_attn_varlen_func.

    Args:
        q: [batch, rows, heads, head_dim], bfloat16 or float16: the tokens of this rank, as shard() gives them; with cu_seqlens
            [rows, heads, head_dim].
        k, v: as q, with heads_kv heads and, for v, head_dim_v columns; the same tokens as q.
        group: a ProcessGroup; a DeviceMesh of one dimension; None: all processes, or this one where torch.distributed is not initialized.
        dropout_p: needs method "ulysses". Without rng_state the first rank draws the state for all.
        alibi_slopes: method "gather" needs a mask that hides the keys after the query; "ring" does not take slopes.
        learnable_sink: its gradient is the share of this rank's queries. As with other parameters, the sum over the ranks is the whole.
        cu_seqlens: [documents + 1], cumulative lengths of all documents on all ranks, on the CPU: a tensor or a list. A document may be
            empty, and end at any token.
        seqlen: tokens of the whole sequence; None: world size times rows, for shards of equal length.
        layout: tokens of each rank: "zigzag", "contiguous", or the result of make_layout().
        method: "gather", "ring", "ulysses", or "auto": the one that takes least time by the model of choice.py.
            TL_ATTENTION_PRINT_CONFIGS=1 prints it and why.

    Other parameters, result and errors: see flash.py; softmax_lse is [batch, heads, rows], or [heads, rows].

    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed; on all ranks.
    """
    ranks = ranks_of(group)
    options = {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
        "learnable_sink": learnable_sink,
        "rng_state": rng_state,
    }
    placed = {"cu_seqlens": cu_seqlens, "seqlen": seqlen, "layout": layout, "method": method}
    if ranks.world == 1:
        _check_placement(q, ranks, **placed)
        return _attend_whole(q, k, v, cu_seqlens, return_attn_probs=return_attn_probs, **options)

    def check() -> dict[str, Any]:
        return _checked(q, k, v, ranks, return_attn_probs, options, placed)

    agree(ranks, check, _key(q, k, v, return_attn_probs, options, placed))
    documents = documents_of(cu_seqlens)
    packed = documents is not None
    layout, documents = _placement(q, ranks, **placed)
    causal, window = canonical_window(causal, window_size)
    mask = Mask(documents, CAUSAL if causal else window)
    if method == "auto":
        sizes = _sizes(q, k, v, dropout_p, alibi_slopes, _trains(q, k, v, learnable_sink))
        method = choose(layout, mask, sizes).method
    if packed:
        q, k, v = (x[None] for x in (q, k, v))
    if method == "ulysses":
        options["causal"], options["window_size"] = causal, window
        out, lse = _by_heads(
            q, k, v, ranks, layout, documents if packed else None, options, return_attn_probs
        )
    else:
        slopes = None if alibi_slopes is None else alibi_slopes.detach()
        scores = Scores(scale_of(q, softmax_scale), float(softcap), deterministic, slopes, None, packed)
        run = gather.attend if method == "gather" else ring.attend
        out, lse = run(q, k, v, learnable_sink, scores, layout, mask, ranks)
    if packed:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse, None) if return_attn_probs else out


def _trains(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _sizes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    slopes: torch.Tensor | None,
    training: bool,
) -> Sizes:
    batch = len(q) if q.ndim == 4 else 1
    heads, heads_kv, head_dim, head_dim_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    return Sizes(
        batch,
        heads,
        heads_kv,
        head_dim,
        head_dim_v,
        q.element_size(),
        training,
        dropout_p > 0,
        slopes is not None,
    )


def _placement(
    q: torch.Tensor,
    ranks: Ranks,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
    seqlen: int | None,
    layout: str | Layout,
    method: str,
) -> tuple[Layout, tuple[int, ...]]:
    """(layout, documents) of checked arguments."""
    documents = documents_of(cu_seqlens)
    if documents is None:
        total = q.shape[1] * ranks.world if seqlen is None else seqlen
        if seqlen is None and isinstance(layout, Layout):
            total = layout.total
        documents = (0, total)
    return layout_of(layout, documents[-1], ranks.world), documents


def _check_placement(
    q: torch.Tensor,
    ranks: Ranks,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
    seqlen: int | None,
    layout: str | Layout,
    method: str,
) -> None:
    """Check where the tokens are, for q that has the right rank."""
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(map(repr, METHODS))}, got {method!r}")
    if seqlen is not None and (isinstance(seqlen, bool) or not isinstance(seqlen, int)):
        raise TypeError(f"seqlen: expected an int or None, got {seqlen!r}")
    documents = documents_of(cu_seqlens)
    if documents is not None and seqlen not in (None, documents[-1]):
        raise ValueError(f"seqlen: expected None or the end of cu_seqlens, {documents[-1]}, got {seqlen}")
    if not isinstance(q, torch.Tensor) or q.ndim != (4 if documents is None else 3):
        return  # check_fwd says it
    found, _ = _placement(q, ranks, cu_seqlens, seqlen, layout, method)
    rows, expected = q.shape[-3], found.rows(ranks.rank)
    if rows != expected:
        raise ValueError(
            f"q: expected the {expected} tokens that the layout gives to rank {ranks.rank} of {ranks.world}, of {found.total} in all, got"
            f" {rows}; cut the sequence with tl_attention.distributed.shard, and pass seqlen for shards of unequal length"
        )


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranks: Ranks,
    return_attn_probs: bool,
    options: dict[str, Any],
    placed: dict[str, Any],
) -> dict[str, Any]:
    """Check all arguments; return those that must be equal on all ranks."""
    documents = documents_of(placed["cu_seqlens"])
    packed = documents is not None
    scale, causal, slopes, sink = (
        options[name] for name in ("softmax_scale", "causal", "alibi_slopes", "learnable_sink")
    )
    expect_bool("return_attn_probs", return_attn_probs)
    check_fwd(q, k, v, scale, causal, heads_first=False, varlen=packed)
    if k.shape[-3] != q.shape[-3]:
        raise ValueError(
            f"k, v: expected the tokens of q, {q.shape[-3]}, got {k.shape[-3]}; cross attention over several ranks is not supported"
        )
    check_device_or_warn(q, traced=False)
    check_deterministic(options["deterministic"])
    batch = len(documents) - 1 if packed else len(q)
    check_options(
        q,
        batch,
        *(options[name] for name in ("window_size", "softcap", "dropout_p")),
        slopes,
        sink,
        options["rng_state"],
    )
    _check_placement(q, ranks, **placed)
    layout, bounds = _placement(q, ranks, **placed)
    is_causal, window = canonical_window(causal, options["window_size"])
    mask = Mask(bounds, CAUSAL if is_causal else window)
    training = _trains(q, k, v, sink)
    sizes = _sizes(q, k, v, options["dropout_p"], slopes, training)
    method = placed["method"]
    if method == "auto":
        choose(layout, mask, sizes)
    elif refused := supported(method, sizes, ranks.world, mask):
        raise NotImplementedError(refused)
    return {
        "q": (*q.shape[:-3], *q.shape[-2:], str(q.dtype)),
        "k": tuple(k.shape[-2:]),
        "v": tuple(v.shape[-2:]),
        "q, k, v, learnable_sink (any needs a gradient)": training,
        "softmax_scale": scale_of(q, scale),
        "causal, window_size": (is_causal, window),
        "softcap": float(options["softcap"]),
        "dropout_p": float(options["dropout_p"]),
        "rng_state": options["rng_state"] is not None,
        "alibi_slopes": None if slopes is None else tuple(slopes.shape),
        "learnable_sink": None if sink is None else str(sink.dtype),
        "return_attn_probs": return_attn_probs,
        "cu_seqlens, seqlen": bounds,
        "layout": layout.ranges,
        "method": method,
    }


def _key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    return_attn_probs: bool,
    options: dict[str, Any],
    placed: dict[str, Any],
) -> object:
    """Everything that the checks of a call depend on; None if an argument is not what it should be."""
    try:
        documents = documents_of(placed["cu_seqlens"])
        values = [return_attn_probs, *options.values(), placed["seqlen"], placed["layout"], placed["method"]]
        key = (
            documents,
            torch.is_grad_enabled(),
            *(_metadata(x) for x in (q, k, v)),
            *(_metadata(tuple(x) if isinstance(x, list) else x) for x in values),
        )
        hash(key)
    except Exception:  # the checks name it
        return None
    return key


def _metadata(x: object) -> object:
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    return type(x), x


def _attend_whole(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
    **options: Any,
) -> Output:
    """The call of one rank."""
    documents = documents_of(cu_seqlens)
    if documents is None:
        return flash_attn_func(q, k, v, **options)
    lengths = [stop - start for start, stop in pairwise(documents)]
    (cu_seqlens,) = cumulative((lengths,), q.device)
    longest = max(lengths, default=0)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)


def _by_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranks: Ranks,
    layout: Layout,
    documents: tuple[int, ...] | None,
    options: dict[str, Any],
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Method "ulysses": (out, lse) of [batch, rows, heads, head_dim] shards; no lse without return_lse."""
    heads = ulysses.heads_of_ranks(q.shape[2], k.shape[2], ranks.world)
    start, stop = heads.q[ranks.rank]
    slopes, sink, state = (options[name] for name in ("alibi_slopes", "learnable_sink", "rng_state"))
    options = options | {
        "alibi_slopes": None if slopes is None else slopes[..., start:stop],
        "learnable_sink": None if sink is None else sink[start:stop],
        "return_attn_probs": True,
    }
    batch = len(q)
    q, k, v = ulysses.to_heads(q, k, v, heads, layout, ranks)
    if options["dropout_p"]:
        if state is None:
            state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)
            dist.broadcast(state, dist.get_global_rank(ranks.group, 0), ranks.group)
        options["rng_state"] = state
        out, lse = _with_dropout(q, k, v, ranks, documents, options)
    elif documents is None:
        out, lse, _ = flash_attn_func(q, k, v, **options)
    else:
        out, lse, _ = _attend_whole(q[0], k[0], v[0], documents, **options)
        out, lse = out[None], lse[None]
    assert len(out) == batch, f"{len(out)=} {batch=}"
    out = ulysses.to_tokens(out, heads, layout, ranks)
    if return_lse:
        lse = ulysses.to_tokens(lse.mT[..., None], heads, layout, ranks)[..., 0].mT
    return out, lse if return_lse else None


def _with_dropout(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranks: Ranks,
    documents: tuple[int, ...] | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of all tokens with the heads of this rank, whose dropout masks are those of one GPU.

    A mask depends on sequence * heads + head. One GPU has world * heads of this rank: sequence i and head h of this rank are sequence
    i * world + rank here, among empty ones.
    """
    batch, total, heads = q.shape[:3]
    bounds = documents or (0, total)
    lengths = [stop - start for start, stop in pairwise(bounds)] * batch
    spread = [0] * (len(lengths) * ranks.world)
    spread[ranks.rank :: ranks.world] = lengths
    if (slopes := options["alibi_slopes"]) is not None and slopes.ndim == 2:
        options = options | {"alibi_slopes": slopes.repeat_interleave(ranks.world, 0)}
    (cu_seqlens,) = cumulative((spread,), q.device)
    longest = max(lengths, default=0)
    q, k, v = (x.reshape(batch * total, *x.shape[2:]) for x in (q, k, v))
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
    return out.view(batch, total, *out.shape[1:]), lse.view(heads, batch, total).transpose(0, 1)
