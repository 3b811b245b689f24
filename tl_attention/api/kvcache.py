"""Attention with a KV cache, for text generation, under FlashAttention-2's name flash_attn_with_kvcache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

import torch

from tl_attention import launch
from tl_attention.api import flash
from tl_attention.api.docstrings import complete
from tl_attention.checks import lengths as checks_lengths
from tl_attention.checks.common import check_device, check_splits, expect_bool, expect_scale
from tl_attention.checks.keywords import unknown_keyword
from tl_attention.checks.kvcache import (
    cache_capacity,
    check_addresses,
    check_cache,
    check_latent_bits,
    check_new_keys,
    check_no_gradient,
    check_own_memory,
    check_rotary,
    check_seqlen,
    check_sizes,
    check_tree_mask,
    check_workspace,
)
from tl_attention.checks.lengths import check_entries, check_positions, skips_check
from tl_attention.checks.transforms import check_no_forward_ad, refuse_vmap
from tl_attention.launch.decode import DecodePlan
from tl_attention.problem.options import (
    BATCH_INVARIANT,
    SCHEMA,
    UNLIMITED,
    Cache,
    Options,
    parse_options,
    writing,
)
from tl_attention.problem.request import Request, new_request, or_always
from tl_attention.problem.target import H200_SMS, sm_count
from tl_attention.reference.kvcache import append_reference, kvcache_reference, rotary_reference
from tl_attention.torch_ops.attend import checked_options, options_with_tensors
from tl_attention.torch_ops.flops import forward_flops, register_flops, values_of
from tl_attention.torch_ops.inductor import keep_storage_offsets
from tl_attention.torch_ops.ops import check_device_or_warn, is_traced, scale_of

_PLAIN_TYPES = {torch.Tensor, type(None)}  # no subclass that intercepts operations
_NO_OPTIONS = Options()
_SWITCHES = bool, bool, bool, int


class _KnownCall(NamedTuple):
    """Facts that follow from the signature of a call that has passed the checks. They hold no tensor.

    Attributes:
        options: as _checked_options() returns them, without their tensors.
        takes_tensors: the options have some.
        plan: None on the CPU, and without queries or keys.
    """

    options: Options
    takes_tensors: bool
    plan: DecodePlan | None


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    batch_invariant: bool = False,
    workspace: torch.Tensor | None = None,
    check_lengths: bool = False,
    check_block_table: bool = False,
    **unknown: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append new keys and values to a cache, then compute attention of each sequence's queries to its keys in the cache.

    The keys of a sequence are rows cache_leftpad to cache_seqlens + new - 1 of its cache; their number is its length. The diagonal of
    query i is key i + length - seqlen_q of the sequence, so with causal the last query sees all keys. Other rows of the cache are not
    used and may hold NaN. There is no backward. The cache is never copied.

    Args:
        q: [batch, seqlen_q, heads, head_dim], bfloat16 or float16; head_dim a multiple of 8, at most 256, or 576 where v_cache is
            k_cache[..., :512] (multi-head latent attention with absorbed weights).
        k_cache: [caches, seqlen_cache, heads_kv, head_dim], or with block_table [pages, page_size, heads_kv, head_dim], page_size a
            multiple of 16. The last dimension is contiguous, the other strides are positive multiples of 8, stride(0) is a multiple of
            stride(1), and the address is a multiple of 16 bytes.
        v_cache: like k_cache, with head_dim_v <= head_dim columns.
        k, v: [batch, new, heads_kv, head_dim or head_dim_v]: written to the cache from row cache_seqlens on. Pass both or neither;
            where v_cache is k_cache[..., :512] pass k alone. They must not share memory with the caches.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2] in the dtype of q, contiguous, with one position per row that a cache can
            hold. The first rotary_dim columns of q and of k (before it is written) are rotated: row i of k by position
            cache_seqlens + i; row i of q likewise with causal or a window, else by cache_seqlens. Positions count left padding. A row
            of q at a position past the table, where seqlen_q exceeds the new keys, is not rotated.
        cache_seqlens: [batch], int32, or an int for all: number of rows in use before the new keys, left padding included. None: all
            rows of the cache. The values of a tensor are not read on the host, so a CUDA graph can be replayed with other lengths.
        cache_batch_idx: [batch], int32: the cache of each sequence; None: cache b for sequence b. Not with block_table. Sequences may
            share a cache only where no new key is written to a row that another one has.
        cache_leftpad: [batch], int32: rows of left padding. Not with block_table.
        block_table: [batch, pages per sequence], int32: page i of a sequence holds its rows from i * page_size on. Entries beyond the
            rows in use are not read.
        rotary_interleaved: rotate the column pairs (2i, 2i + 1), else (i, i + rotary_dim / 2).
        num_splits: number of splits of a sequence's keys, each computed by another CTA; 0: chosen for the whole batch. At most 1 with
            batch_invariant.
        return_softmax_lse: also return the log-sum-exp.
        tree_mask: int64, [seqlen_q] for all sequences or [batch, seqlen_q], of at most 64 queries: the last seqlen_q keys are those of
            the queries, nodes of a tree of draft tokens, and query i sees the key of query j if bit j of tree_mask[.., i] is set, and all
            keys before them. draft_tree_mask() makes it from the parents of the nodes. With causal a key hidden by either is hidden. The
            values are not read on the host, so a CUDA graph can be replayed with another tree. Not with window_size, alibi_slopes or
            rotary_cos: the position of a node is its depth, so rotate q and k before the call.
        batch_invariant: out and softmax_lse of a query have the same bits whatever the rest of the batch, and those of
            flash_attn_func and flash_attn_varlen_func with batch_invariant, but with ALiBi and multi-head latent attention
            (docs/numerics.md), which is refused beside a sink or a left bound of window_size. One CTA then reads all keys of a sequence
            and key head: slower where these are few and long.
            TL_ATTENTION_BATCH_INVARIANT=1 sets it in every call.
        workspace: uint8, at least kvcache_workspace_bytes(..) long, for the partial results of splits. No other launch may use it at the
            same time. None: the call allocates it.
        check_lengths: for debugging: check the values of cache_seqlens, cache_batch_idx, cache_leftpad and block_table, that no
            sequence has rows that another one writes, and that rotary_cos has all positions. Waits for the GPU.
            TL_ATTENTION_CHECK_LENGTHS=1 asks for it in every call. Without it these values are not checked on a GPU: a key or page
            out of range is neither read nor written, and a position outside rotary_cos is not rotated.
        check_block_table: the same as check_lengths.
    Returns:
        out [batch, seqlen_q, heads, head_dim_v] in the dtype of q; with return_softmax_lse (out, softmax_lse [batch, heads,
        seqlen_q], fp32, natural log). A query that sees no key has out 0 and softmax_lse -inf, or with a sink softmax_lse = sink.
    Raises:
        TypeError, ValueError, NotImplementedError: the message names the argument, what was expected and what was passed.
        IndexError: a value of an index tensor is wrong; only with check_lengths and on the CPU.
    """
    if unknown:
        raise unknown_keyword(flash_attn_with_kvcache, unknown)
    if torch.is_grad_enabled():
        check_no_gradient(q, k_cache, v_cache, k, v, learnable_sink, alibi_slopes, rotary_cos, rotary_sin)
    if return_softmax_lse is not False:
        expect_bool("return_softmax_lse", return_softmax_lse)
    sink = learnable_sink
    if isinstance(sink, torch.Tensor):
        sink = sink.detach()  # makes a plain tensor of a parameter
    tensors = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table, alibi_slopes,
        sink, tree_mask, workspace, None if type(cache_seqlens) is int else cache_seqlens,
    )  # fmt: skip
    traced = is_traced() or not {type(x) for x in tensors} <= _PLAIN_TYPES
    if traced:
        check_no_forward_ad("flash_attn_with_kvcache")
    known = signature = None
    switches = type(causal), type(rotary_interleaved), type(batch_invariant), type(num_splits)
    if not traced and switches == _SWITCHES:
        values = softmax_scale, softcap, num_splits, causal, batch_invariant
        known, signature = _look_up(tensors, values, window_size, type(cache_seqlens))
    if known is None or known.takes_tensors:
        request = new_request(
            q, k_cache, v_cache, softmax_scale, causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
            learnable_sink=sink, num_splits=num_splits, batch_invariant=batch_invariant,
        )  # fmt: skip
    if known is not None:
        options = options_with_tensors(request, known.options) if known.takes_tensors else known.options
        if tree_mask is not None:
            options = options.with_tensors(tree_mask=tree_mask)
    else:
        check_cache(q, k_cache, v_cache, cache_batch_idx, cache_leftpad, block_table)
        check_new_keys(q, k_cache, v_cache, k, v, cache_seqlens, block_table)
        check_rotary(q, k_cache, v_cache, k, rotary_cos, rotary_sin, block_table)
        expect_scale("softmax_scale", softmax_scale)
        expect_bool("causal", causal)
        expect_bool("rotary_interleaved", rotary_interleaved)
        options = _checked_options(request)
        check_latent_bits(q, v_cache, options)
        if tree_mask is not None:
            check_tree_mask(q, tree_mask, options, rotary_cos)
            options = replace(options, tree_mask=tree_mask)
        if workspace is not None:
            sizes = *q.shape[:3], *v_cache.shape[2:], cache_capacity(k_cache, block_table)
            needed = _workspace_bytes(sizes, options.num_splits, q.device.index) if q.is_cuda else 0
            check_workspace(q, workspace, needed)
        check_device_or_warn(q, traced)

    capacity = cache_capacity(k_cache, block_table)
    new = 0 if k is None else k.shape[1]
    if cache_seqlens is None:
        cache_seqlens = capacity
    elif not isinstance(cache_seqlens, torch.Tensor):
        check_seqlen(cache_seqlens, capacity, new)
    if k is not None and v is None:
        v = k[..., : v_cache.shape[3]]
    queries_move = options.window != _NO_OPTIONS.window
    cache = Cache(k_cache, v_cache, cache_seqlens, new, cache_batch_idx, cache_leftpad, block_table)
    if check_lengths is not False or check_block_table is not False or checks_lengths.ALWAYS:
        expect_bool("check_lengths", check_lengths)
        expect_bool("check_block_table", check_block_table)
        if check_lengths or check_block_table or checks_lengths.ALWAYS:
            rows = 0 if rotary_cos is None else rotary_cos.shape[0]
            q = check_cache_op(q, cache.k, cache.v, *_fields(cache), rows, queries_move)

    if k is not None:
        append = _append_by_op if traced else _append
        q = append(q, k, v, cache, rotary_cos, rotary_sin, rotary_interleaved, queries_move)
    arguments = scale_of(q, softmax_scale), options, workspace
    if traced:
        out, lse = _decode_by_op(q, cache, *arguments)
    else:
        out, lse = _decode(q, cache, *arguments, None if known is None else known.plan)
    if known is None and signature is not None:
        plan = launch.decode_plan(q, cache, options) if q.is_cuda else None
        takes_tensors = not (alibi_slopes is sink is None)
        launch.keep_call(signature, _KnownCall(options.without_tensors(), takes_tensors, plan))
    return (out, lse) if return_softmax_lse else out


complete(flash.__doc__, flash_attn_with_kvcache)


def kvcache_workspace_bytes(
    batch: int,
    seqlen_q: int,
    heads: int,
    heads_kv: int,
    head_dim_v: int,
    seqlen_cache: int,
    num_splits: int = 0,
    batch_invariant: bool = False,
    device: torch.device | int | None = None,
) -> int:
    """Size of the workspace of flash_attn_with_kvcache in bytes.

    Args:
        batch, seqlen_q, heads, heads_kv, head_dim_v, num_splits, batch_invariant: as in the call.
        seqlen_cache: maximum number of keys per sequence: k_cache.shape[1], or with pages block_table.shape[1] * page_size.
        device: the GPU, as torch.device or index; None: the current one, or an H200 on a machine without a GPU.
    Raises:
        TypeError, ValueError: the message names the argument, what was expected and what was passed.
    """
    sizes = {
        "batch": batch,
        "seqlen_q": seqlen_q,
        "heads": heads,
        "heads_kv": heads_kv,
        "head_dim_v": head_dim_v,
        "seqlen_cache": seqlen_cache,
    }
    check_sizes(sizes, device)
    batch_invariant = or_always(batch_invariant)
    check_splits(num_splits, batch_invariant)
    num_splits = BATCH_INVARIANT if batch_invariant else num_splits
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return _workspace_bytes(tuple(sizes.values()), num_splits, index)


def _workspace_bytes(sizes: tuple[int, ...], num_splits: int, index: int | None) -> int:
    """kvcache_workspace_bytes of checked arguments.

    Args:
        sizes: the first six of them.
        num_splits: as in Options.
        index: of the GPU.
    """
    batch, seqlen_q, heads, heads_kv, head_dim_v, seqlen_cache = sizes
    if not (batch and seqlen_q and heads and seqlen_cache):
        return 0  # nothing to launch
    sms = H200_SMS
    if torch.cuda.is_available():
        sms = sm_count(torch.cuda.current_device() if index is None else index)
    return launch.decode_workspace_bytes(
        batch, seqlen_q, heads, heads_kv, head_dim_v, num_splits, seqlen_cache, sms
    )


def _look_up(
    tensors: Sequence[torch.Tensor | None],
    values: tuple,
    window_size: Sequence[int | None],
    seqlens: type,
) -> tuple[_KnownCall | None, tuple | None]:
    """(known, signature): what is kept of an earlier call with this signature, or None; None: the call has no signature.

    Args:
        values: softmax_scale, softcap and arguments whose types are checked.
        seqlens: type of cache_seqlens.
    """
    if type(window_size) not in (tuple, list):
        return None, None
    try:
        left, right = window_size
        signature = (
            *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors],
            *values, left, right, seqlens,
            # As 1 == True
            type(values[0]), type(values[1]), type(left), type(right),
        )  # fmt: skip
        return launch.kept_call(signature), signature
    # An argument that is no tensor, a window that is no pair, a nested tensor, a value without a hash
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None, None


def _checked_options(request: Request) -> Options:
    """Checked options of a call in canonical form, where a causal mask is a window."""
    causal, options = checked_options(request, 0)
    return replace(options, window=(UNLIMITED, 0)) if causal else options


def _append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: Cache,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    queries_move: bool,
) -> torch.Tensor:
    """launch.append_to_cache, or the reference on CPU tensors."""
    check_addresses(cache)
    check_own_memory(k, v, cache, cos is not None)
    if q.is_cuda and not k.shape[1] and cos is not None:  # no new keys, but queries to rotate
        return _rotated(q, cache.seqlens, cos, sin, interleaved, queries_move)
    if q.is_cuda:
        return launch.append_to_cache(q, k, v, cache, cos, sin, interleaved, queries_move)
    batch_idx, _, starts = check_entries(q, cache)
    if cos is not None:
        first = torch.tensor(starts, dtype=torch.int64, device=q.device)
        q = _rotated(q, first, cos, sin, interleaved, queries_move)
        k = _rotated(k, first, cos, sin, interleaved, True)
    where = {"batch_idx": batch_idx, "block_table": cache.block_table}
    with writing(cache.k, cache.v):
        append_reference(k, v, cache.k, cache.v, starts, **where)
    return q


def _rotated(
    x: torch.Tensor,
    first: torch.Tensor | int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    moves: bool,
) -> torch.Tensor:
    """Queries or keys [batch, rows, heads, head_dim], rotated by the operations of torch.

    Args:
        first: position of row 0, [batch] or one for all.
        moves: row i has position first + i, else all rows have first.
    """
    rows = torch.arange(x.shape[1], device=x.device) if moves else x.new_zeros(x.shape[1], dtype=torch.int64)
    starts = first.long()[:, None] if isinstance(first, torch.Tensor) else first
    return rotary_reference(x, (starts + rows).expand(x.shape[0], -1), cos, sin, interleaved)


def _decode(
    q: torch.Tensor,
    cache: Cache,
    softmax_scale: float,
    options: Options,
    workspace: torch.Tensor | None,
    plan: DecodePlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A launch, with a known plan or by launch.attend_cache, or the reference on CPU tensors."""
    check_addresses(cache, workspace)
    if plan is not None:
        return plan(q, cache, softmax_scale, options, workspace)
    if q.is_cuda:
        return launch.attend_cache(q, cache, softmax_scale, options, workspace)
    batch_idx, leftpad, starts = check_entries(q, cache)
    out, lse = kvcache_reference(
        q,
        cache.k,
        cache.v,
        [start + cache.new for start in starts],
        softmax_scale,
        batch_idx=batch_idx,
        leftpad=leftpad,
        block_table=cache.block_table,
        **options.reference_arguments(),
    )
    return out.to(q.dtype), lse.contiguous()


CACHE_SCHEMA = (
    "Tensor? seqlens, SymInt seqlen, SymInt new, Tensor? batch_idx, Tensor? leftpad, Tensor? block_table"
)
CACHE_FIELDS = CACHE_SCHEMA.count(",") + 1


def _fields(cache: Cache) -> tuple:
    """Arguments of CACHE_SCHEMA."""
    in_tensor = isinstance(cache.seqlens, torch.Tensor)
    seqlens = (cache.seqlens, 0) if in_tensor else (None, cache.seqlens)
    return *seqlens, cache.new, cache.batch_idx, cache.leftpad, cache.block_table


def _from_fields(
    k: torch.Tensor, v: torch.Tensor, seqlens: torch.Tensor | None, seqlen: int, *others: object
) -> Cache:
    """Inverse of _fields."""
    return Cache(k, v, seqlen if seqlens is None else seqlens, *others)


@torch.library.custom_op(
    "tl_attention::check_cache",
    mutates_args=(),
    device_types=("cuda", "cpu"),
    schema=f"(Tensor q, Tensor k_cache, Tensor v_cache, {CACHE_SCHEMA}, SymInt rotary_rows, bool queries_move) -> Tensor",
)
def check_cache_op(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *arguments: object
) -> torch.Tensor:
    """Check the values of index tensors; return a copy of q, so that the check runs before what uses the copy.

    rotary_rows is 0 without rotary.
    """
    if not skips_check(q):
        *fields, rotary_rows, queries_move = arguments
        cache = _from_fields(k_cache, v_cache, *fields)
        *_, seqlens = check_entries(q, cache)
        if rotary_rows:
            queries = q.shape[1] if queries_move else min(q.shape[1], 1)
            check_positions(seqlens, max(cache.new, queries), rotary_rows)
    return q.clone()


@check_cache_op.register_fake
def _(q: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op(
    "tl_attention::append",
    mutates_args=("k_cache", "v_cache"),
    device_types=("cuda", "cpu"),
    schema="(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    f" {CACHE_SCHEMA}, Tensor? cos, Tensor? sin, bool interleaved, bool queries_move) -> Tensor",
)
def append_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *arguments: object,
) -> torch.Tensor:
    """Write new keys and values to the cache; return the rotated q, or an empty tensor without rotary.

    (An op may not return one of its arguments.)
    """
    if q.is_cuda:
        check_device(q)
    *fields, cos, sin, interleaved, queries_move = arguments
    rotated = _append(q, k, v, _from_fields(k_cache, v_cache, *fields), cos, sin, interleaved, queries_move)
    return q.new_empty(0) if cos is None else rotated


@append_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *arguments: object,
):
    keep_storage_offsets()
    *_, cos, _, _, _ = arguments
    return q.new_empty(0 if cos is None else q.shape)


@torch.library.custom_op(
    "tl_attention::decode",
    mutates_args=("workspace",),
    device_types=("cuda", "cpu"),
    schema=f"(Tensor q, Tensor k_cache, Tensor v_cache, {CACHE_SCHEMA}, float softmax_scale,"
    f" Tensor(a!)? workspace, {SCHEMA}) -> (Tensor, Tensor)",
)
def decode_op(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *arguments: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the keys in the cache."""
    if q.is_cuda:
        check_device(q)
    of_cache, (scale, workspace, *asked) = arguments[:CACHE_FIELDS], arguments[CACHE_FIELDS:]
    options = parse_options(*asked) or _NO_OPTIONS
    return _decode(q, _from_fields(k_cache, v_cache, *of_cache), scale, options, workspace)


@decode_op.register_fake
def _(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *arguments: object):
    keep_storage_offsets()
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty(batch, seqlen_q, heads, v_cache.shape[3])
    return out, q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


def decode_flops(q: torch.Tensor, cache: Cache) -> int:
    """FLOPs of a decode. Where lengths are on a GPU each cache counts in full: the host does not wait for their values."""
    batch, seqlen_q, heads, _ = q.shape
    keys, padding = cache.seqlens, None
    if isinstance(keys, torch.Tensor):
        lengths = values_of(keys)
        keys = (
            batch * cache_capacity(cache.k, cache.block_table)
            if lengths is None
            else sum(lengths) + batch * cache.new
        )
    else:
        keys = batch * (keys + cache.new)
    if cache.leftpad is not None:
        padding = values_of(cache.leftpad)
    keys -= sum(padding or ())
    return forward_flops(heads * seqlen_q * keys, q, cache.v)


register_flops(
    lambda q, k, v, *arguments: decode_flops(q, _from_fields(k, v, *arguments[:CACHE_FIELDS])), "decode"
)


def _refuse_vmap(*_: object) -> None:
    refuse_vmap("flash_attn_with_kvcache")


check_cache_op.register_vmap(_refuse_vmap)
append_op.register_vmap(_refuse_vmap)
decode_op.register_vmap(_refuse_vmap)


def _append_by_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: Cache,
    cos: torch.Tensor | None,
    *others: object,
) -> torch.Tensor:
    rotated = append_op(q, k, v, cache.k, cache.v, *_fields(cache), cos, *others)
    return q if cos is None else rotated


def _decode_by_op(
    q: torch.Tensor,
    cache: Cache,
    softmax_scale: float,
    options: Options,
    workspace: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = softmax_scale, workspace, *options.arguments()
    return decode_op(q, cache.k, cache.v, *_fields(cache), *arguments)
