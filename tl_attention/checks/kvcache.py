"""Argument checks of flash_attn_with_kvcache, in the form of common.py.

check_addresses, check_own_memory and check_seqlen read values that the host has, in every call. The others read metadata only, and a
repeated call with the same metadata skips them. lengths.py holds the checks of values on the GPU.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tl_attention.checks.common import (
    FROM_ENVIRONMENT,
    ONE_PER_SEQUENCE,
    SEQLEN_FIRST,
    WIDER,
    cast_hint,
    check_cache_strides,
    describe,
    expect_contiguous,
    expect_contiguous_last,
    expect_device,
    expect_head_dims,
    expect_heads_divide,
    expect_like,
    expect_operand,
    expect_stored,
    expect_tensor,
    is_int,
    memory_of,
)
from tl_attention.problem.attn_problem import MAX_HEAD_DIM
from tl_attention.problem.options import UNLIMITED, Cache, Options

# Head dims of multi-head latent attention with absorbed weights, where v_cache is the first columns of k_cache
LATENT = (576, 512)
PAGE_STEP = 16  # the page size is a multiple of this many rows
ALIGNMENT = 8  # elements, 16 bytes
MAX_NODES = 64  # draft tokens of a tree, a bit each

_SEPARATE_LATENTS = (
    f"v_cache: expected k_cache[..., :{LATENT[1]}], as head dims {LATENT[0]} and {LATENT[1]} are multi-head latent attention with absorbed"
    " weights, got separate memory, which is not supported"
)


def cache_capacity(k_cache: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """Maximum number of keys per sequence."""
    return k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]


_WITHOUT_GRADIENT = (
    "q",
    "k_cache",
    "v_cache",
    "k",
    "v",
    "learnable_sink",
    "alibi_slopes",
    "rotary_cos",
    "rotary_sin",
)


def check_no_gradient(*tensors: torch.Tensor | None) -> None:
    """Refuse gradients of the tensors of _WITHOUT_GRADIENT, passed in this order."""
    for x in tensors:
        if x is not None and getattr(x, "requires_grad", False):
            name = next(name for name, y in zip(_WITHOUT_GRADIENT, tensors, strict=True) if y is x)
            raise NotImplementedError(
                f"{name}: expected a tensor that needs no gradient, as attention to a cache has no backward, got requires_grad=True; use"
                " flash_attn_func, or torch.no_grad()"
            )


def check_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    """Check q, the cache, and the tensors that locate sequences in it."""
    first = "caches, seqlen_cache" if block_table is None else "pages, page_size"
    hints = {3: "pass q[:, None] if it has one query per sequence, q[None] if it has one sequence"}
    expect_operand("q", q, "batch, seqlen_q, heads, head_dim", 4, hints=hints)
    for name, x, width in (("k_cache", k_cache, "head_dim"), ("v_cache", v_cache, "head_dim_v")):
        hints = {3: f"pass {name}[None] if there is one cache"} if block_table is None else {}
        expect_operand(name, x, f"{first}, heads_kv, {width}", 4, dtypes=(q.dtype,), hints=hints)
        expect_device(name, x, q)
    batch, _, heads, head_dim = q.shape
    caches, rows, heads_kv, head_dim_v = v_cache.shape
    if tuple(k_cache.shape[:3]) != (caches, rows, heads_kv):
        raise ValueError(
            f"v_cache: expected the shape of k_cache, {tuple(k_cache.shape)}, but for the last dimension, got {tuple(v_cache.shape)}"
        )
    if k_cache.shape[3] != head_dim:
        raise ValueError(f"k_cache: expected the head_dim of q, {head_dim}, got {k_cache.shape[3]}")
    lengths = (q.shape[1], rows) if block_table is None else None
    expect_heads_divide("k_cache, v_cache", heads, heads_kv, SEQLEN_FIRST, lengths)
    expect_head_dims("q, k_cache", "v_cache", head_dim, head_dim_v)
    if (head_dim, head_dim_v) == LATENT:
        if v_cache.stride() != k_cache.stride():
            raise NotImplementedError(_SEPARATE_LATENTS)
    elif head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"q, k_cache, v_cache: expected head dims of at most {MAX_HEAD_DIM}, or {LATENT[0]} where v_cache is"
            f" k_cache[..., :{LATENT[1]}], got {head_dim} and {head_dim_v}, which are not supported; {WIDER}"
        )
    elif head_dim_v > head_dim:
        raise NotImplementedError(
            f"v_cache: expected a head_dim of at most that of q and k_cache, {head_dim}, got {head_dim_v}, which is not supported; allocate"
            f" k_cache as wide as v_cache, pad q and new k with zeros to this width and pass softmax_scale={head_dim} ** -0.5"
        )
    elif head_dim % ALIGNMENT or head_dim_v % ALIGNMENT:
        wanted, wanted_v = (-(-n // ALIGNMENT) * ALIGNMENT for n in (head_dim, head_dim_v))
        raise ValueError(
            f"q, k_cache, v_cache: expected head dims that are multiples of {ALIGNMENT}, got {head_dim} for q, k_cache and {head_dim_v} for"
            f" v_cache; a cache is never copied: allocate caches {wanted} and {wanted_v} wide, pad q, new k and new v with zeros to these"
            f" widths, pass softmax_scale={head_dim} ** -0.5 and slice out[..., :{head_dim_v}]"
        )
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_page_strides(name, x)

    for name, x in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if x is None:
            continue
        _expect_entries(name, x, q)
        if block_table is not None:
            raise NotImplementedError(
                f"{name}: expected None with block_table, as the two together are not supported, got {describe(x)}; leave one out"
            )
    if block_table is not None:
        check_pages("k_cache", q, k_cache, batch, block_table)
    elif cache_batch_idx is None and caches < batch:
        raise ValueError(
            f"k_cache, v_cache: expected a cache for each of the {batch} sequences of q, got {caches}; pass cache_batch_idx"
        )


def check_page_strides(name: str, x: torch.Tensor) -> None:
    """Check the strides of a cache or pages [caches, rows, heads_kv, columns], which TMA reads where they are."""
    steps = [step for size, step in zip(x.shape[:3], x.stride(), strict=False) if size > 1]
    if any(step <= 0 or step % ALIGNMENT for step in steps):
        raise ValueError(
            f"{name}: expected strides that are positive multiples of {ALIGNMENT}, as a cache is never copied, got {x.stride()};"
            " allocate it with such strides"
        )
    if x.shape[0] > 1 and x.shape[1] > 1:
        check_cache_strides(name, x, x.stride(0), x.stride(1))


def is_cache(x: torch.Tensor) -> bool:
    """True for a tensor [caches, rows, heads_kv, columns] that kernels read where it is: see check_page_strides and check_addresses."""
    # The usual strides first: a decode step asks this of each layer
    caches, rows, heads, _ = x.stride()
    is_usual = caches and rows and heads and not (caches % rows or rows % ALIGNMENT or heads % ALIGNMENT)
    if not is_usual:
        try:
            check_page_strides("k_cache", x)
        except ValueError:
            return False
    if isinstance(x, FakeTensor):
        return True
    try:
        return not (x.data_ptr() & 15 or x.is_neg())
    except RuntimeError:  # no memory, as inside torch.vmap
        return True


def is_part(v: torch.Tensor, k: torch.Tensor) -> bool:
    """True if v is the first columns of k, in the same memory."""
    same_memory = v.untyped_storage()._cdata == k.untyped_storage()._cdata
    return same_memory and v.storage_offset() == k.storage_offset() and v.stride() == k.stride()


def check_pages(
    name: str, q: torch.Tensor, pages: torch.Tensor, batch: int, block_table: torch.Tensor
) -> None:
    """Check the page size of `pages`, an argument of this name, and the table of pages."""
    page_size = pages.shape[1]
    if page_size % PAGE_STEP or not page_size:
        raise ValueError(
            f"{name}: expected a page_size that is a multiple of {PAGE_STEP}, got {page_size}; allocate pages of {PAGE_STEP} * n rows"
        )
    expect_tensor("block_table", block_table, dtype=torch.int32)
    if block_table.ndim != 2:
        raise ValueError(
            f"block_table: expected 2 dimensions [batch, pages per sequence], got shape {tuple(block_table.shape)}"
        )
    expect_like("block_table", block_table, q, ((batch, block_table.shape[1]),), (torch.int32,))
    expect_contiguous_last("block_table", block_table)


def _expect_entries(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    """Expect an int32 tensor with one entry per sequence."""
    expect_like(name, x, q, ((q.shape[0],),), (torch.int32,), ONE_PER_SEQUENCE)
    expect_contiguous(name, x)


def check_new_keys(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: torch.Tensor | int | None,
    block_table: torch.Tensor | None,
) -> None:
    """Check the keys and values to append, and cache_seqlens, where they go."""
    if isinstance(cache_seqlens, torch.Tensor):
        _expect_entries("cache_seqlens", cache_seqlens, q)
    elif cache_seqlens is not None and not is_int(cache_seqlens):
        as_tensor = "; pass torch.tensor(lengths, dtype=torch.int32, device=q.device)"
        raise TypeError(
            "cache_seqlens: expected an int, an int32 tensor [batch] or None, got"
            f" {describe(cache_seqlens)}{cast_hint('cache_seqlens', cache_seqlens, 'int', as_tensor)}"
        )
    latent = (k_cache.shape[3], v_cache.shape[3]) == LATENT
    if latent and v is not None:
        raise ValueError(
            f"v: expected None, as v_cache is part of k_cache, where k is written, got {describe(v)}; leave it out"
        )
    for name, x in (("k", k), ("v", v)):
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(
                f"{name}: expected a torch.Tensor [batch, new, heads_kv, head_dim] or None, got {describe(x)}; the parameters after v_cache"
                " are in FlashAttention-2's order, k first: pass the others by keyword"
            )
    if not latent and (k is None) != (v is None):
        raise ValueError(
            f"k, v: expected both or neither, got {describe(k)} and {describe(v)}; pass the new keys with their values"
        )
    if k is None:
        return
    if cache_seqlens is None:
        raise ValueError(
            "cache_seqlens: expected a tensor or an int with new k and v, got None, which means a full cache; pass the lengths before"
            " the new keys"
        )
    heads_kv = k_cache.shape[2]
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x is None:
            continue
        if x.ndim != 4:
            hint = f"; pass {name}[:, None] if it has one key per sequence" if x.ndim == 3 else ""
            raise ValueError(
                f"{name}: expected 4 dimensions [batch, new, heads_kv, head_dim], got shape {tuple(x.shape)}{hint}"
            )
        expect_like(name, x, q, ((q.shape[0], k.shape[1], heads_kv, cache.shape[3]),), (q.dtype,))
        expect_contiguous_last(name, x)
    capacity = cache_capacity(k_cache, block_table)
    if k.shape[1] > capacity:
        raise ValueError(
            f"k: expected at most {capacity} new keys, as a sequence has room for as many, got {k.shape[1]}; allocate a larger cache"
        )


def check_sizes(sizes: dict[str, int], device: torch.device | int | str | None) -> None:
    """Check the sizes that kvcache_workspace_bytes gets. sizes: argument name -> value."""
    for name, size in sizes.items():
        if not is_int(size):
            raise TypeError(f"{name}: expected an int, got {describe(size)}")
        least = 1 if name in ("heads", "heads_kv") else 0
        if size < least:
            raise ValueError(f"{name}: expected at least {least}, got {size}")
    heads, heads_kv, head_dim_v = (sizes[name] for name in ("heads", "heads_kv", "head_dim_v"))
    if heads % heads_kv:
        raise ValueError(f"heads_kv: expected a divisor of heads, {heads}, got {heads_kv}")
    if head_dim_v % 8 or not (0 < head_dim_v <= MAX_HEAD_DIM or head_dim_v == LATENT[1]):
        raise ValueError(
            f"head_dim_v: expected a multiple of 8 of at most {MAX_HEAD_DIM}, or {LATENT[1]}, got {head_dim_v}"
        )
    expect_gpu(device)


def expect_gpu(device: torch.device | int | str | None) -> None:
    """Expect a GPU of this machine, if it has one, or None."""
    index = device if is_int(device) and device >= 0 else None
    kind, _, number = str(device).partition(":")
    if (
        isinstance(device, (str, torch.device))
        and kind == "cuda"
        and (number.isdecimal() or ":" not in str(device))
    ):
        index = int(number) if number else None
    elif device is not None and index is None:
        raise ValueError(
            f"device: expected a GPU, as 0, 'cuda' or torch.device('cuda', 0), or None for the current one, got {describe(device)};"
            " tensors on the CPU need no workspace"
        )
    count = torch.cuda.device_count()
    if index and not count:
        raise ValueError(
            f"device: expected None or 0, an H200, on a machine without a GPU, got {index}; leave it out"
        )
    if index is not None and count and index >= count:
        raise ValueError(f"device: expected a GPU from 0 to {count - 1}, got {index}")


def check_seqlen(cache_seqlens: int, capacity: int, new: int) -> None:
    """Check a cache_seqlens that is one int for all sequences."""
    if not 0 <= cache_seqlens <= capacity - new:
        raise ValueError(
            f"cache_seqlens: expected 0 to {capacity - new}, as a sequence has room for {capacity} keys and {new} are new, got"
            f" {cache_seqlens}{'; allocate a larger cache' if cache_seqlens > 0 else ''}"
        )


def check_rotary(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    """Check the rotary angles."""
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ValueError(
            f"rotary_cos, rotary_sin: expected both or neither, got {describe(cos)} and {describe(sin)}; pass the other one, too"
        )
    if k is None:
        raise ValueError(
            "rotary_cos, rotary_sin: expected None without new k and v, got tensors; rotate q before the call"
        )
    if (q.shape[3], v_cache.shape[3]) == LATENT:
        raise NotImplementedError(
            "rotary_cos, rotary_sin: expected None where v_cache is part of k_cache, got tensors, which are not supported; rotate q and k"
            " before the call"
        )
    if not isinstance(cos, torch.Tensor) or cos.ndim != 2:
        raise ValueError(
            f"rotary_cos: expected a torch.Tensor [positions, rotary_dim / 2], got {describe(cos)}"
        )
    positions = cache_capacity(k_cache, block_table)
    if cos.shape[0] < positions or not 0 < 2 * cos.shape[1] <= q.shape[3]:
        raise ValueError(
            f"rotary_cos: expected [positions, rotary_dim / 2] with at least {positions} positions, one per key of the cache, and a"
            f" rotary_dim of at most {q.shape[3]}, got {tuple(cos.shape)}"
        )
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        expect_like(name, x, q, (tuple(cos.shape),), (q.dtype,))
        expect_contiguous(name, x)


def check_tree_mask(
    q: torch.Tensor, tree_mask: torch.Tensor, options: Options, rotary_cos: torch.Tensor | None
) -> None:
    """Check the bits of a tree of draft tokens, and what they do not combine with. options: the checked ones of the call beside them."""
    batch, seqlen_q = q.shape[:2]
    hint = "draft_tree_mask(parents) makes it from the parent of each draft token"
    expect_tensor("tree_mask", tree_mask, hint, torch.int64)
    if seqlen_q > MAX_NODES:
        raise NotImplementedError(
            f"tree_mask: expected at most {MAX_NODES} queries, a bit each, got {seqlen_q} rows of q per sequence; verify fewer draft tokens"
            " per call"
        )
    expect_like("tree_mask", tree_mask, q, ((seqlen_q,), (batch, seqlen_q)), (torch.int64,), hint)
    expect_contiguous_last("tree_mask", tree_mask)
    others = {
        "window_size": options.window not in ((UNLIMITED, UNLIMITED), (UNLIMITED, 0)),
        "alibi_slopes": options.alibi_slopes is not None,
        "rotary_cos": rotary_cos is not None,
    }
    for name, is_on in others.items():
        if is_on:
            todo = "rotate q and k before the call" if name == "rotary_cos" else f"leave {name} out"
            raise NotImplementedError(
                f"tree_mask: expected None with {name}, as positions in a tree are depths, not indices, got {describe(tree_mask)}; {todo}"
            )


def check_latent_bits(q: torch.Tensor, v_cache: torch.Tensor, options: Options) -> None:
    """Check that batch_invariant of multi-head latent attention is without what depends on other queries of the call.

    Its keys are split from the first one on that the first query sees, which a window moves; and a sink is rounded in another way where
    there is one split.
    """
    if not options.batch_invariant or (q.shape[3], v_cache.shape[3]) != LATENT:
        return
    others = {
        "window_size": options.window[0] != UNLIMITED,
        "learnable_sink": options.sink is not None,
    }
    for name, is_on in others.items():
        if is_on:
            raise NotImplementedError(
                f"batch_invariant: expected False with {name} in multi-head latent attention, whose bits then depend on other queries of"
                f" the call, got True; leave {name} out{FROM_ENVIRONMENT}"
            )


def check_workspace(q: torch.Tensor, workspace: torch.Tensor, needed: int) -> None:
    """Check the scratch memory; `needed` is in bytes."""
    if not isinstance(workspace, torch.Tensor) or workspace.ndim != 1 or not workspace.is_contiguous():
        raise ValueError(f"workspace: expected a contiguous uint8 tensor [bytes], got {describe(workspace)}")
    expect_like("workspace", workspace, q, (tuple(workspace.shape),), (torch.uint8,))
    if workspace.shape[0] < needed:
        raise ValueError(
            f"workspace: expected at least {needed} bytes, got {workspace.shape[0]}; ask kvcache_workspace_bytes"
        )


def check_own_memory(k: torch.Tensor, v: torch.Tensor, cache: Cache, rotated: bool) -> None:
    """Check that new keys and values are no part of the caches, and that the caches differ where their new rows differ.

    Rows of a cache are written in no order, so reading or writing them twice would give wrong results.

    Args:
        rotated: the keys are rotated before they are written.
    """
    storages = cache.k.untyped_storage()._cdata, cache.v.untyped_storage()._cdata
    for name, x in (("k", k), ("v", v)):
        if x.untyped_storage()._cdata not in storages:
            continue
        read = memory_of(x)
        for cache_name, written in (("k_cache", memory_of(cache.k)), ("v_cache", memory_of(cache.v))):
            if min(written.stop, read.stop) > max(written.start, read.start):
                raise ValueError(
                    f"{name}: expected memory that {cache_name} does not use, as it is read while the cache is written, got a part of"
                    f" what {cache_name} spans; pass {name}.clone()"
                )
    is_shared = storages[0] == storages[1] and cache.k.data_ptr() == cache.v.data_ptr()
    if (
        is_shared
        and cache.k.shape[3] != LATENT[0]
        and (rotated or k.data_ptr() != v.data_ptr())
        and k.numel()
    ):
        raise ValueError(
            "v_cache: expected memory of its own, as other values than the new keys are written to it, got that of k_cache; allocate a"
            " cache of values, or pass as v the view of k that v_cache is of k_cache, without rotary_cos"
        )


def check_addresses(cache: Cache, workspace: torch.Tensor | None = None) -> None:
    """Check 16-byte alignment, that the memory of caches holds their values, and that in latent attention v_cache is part of k_cache."""
    k, v = cache.k.data_ptr(), cache.v.data_ptr()
    w = 0 if workspace is None else workspace.data_ptr()
    if (k | v | w | cache.k.is_neg() | cache.v.is_neg()) & 15:
        expect_stored("k_cache", cache.k)
        expect_stored("v_cache", cache.v)
        name, address = next(x for x in (("k_cache", k), ("v_cache", v), ("workspace", w)) if x[1] & 15)
        raise ValueError(
            f"{name}: expected an address that is a multiple of 16 bytes, as it is never copied, got {name}.data_ptr() % 16 ="
            f" {address & 15}; slice it at multiples of 16 bytes"
        )
    if cache.k.shape[3] == LATENT[0] and k != v:
        raise NotImplementedError(_SEPARATE_LATENTS)
