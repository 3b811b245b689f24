"""Block masks: which blocks of queries and keys are hidden, partial or full under a mask_mod, as torch's BlockMask.

Bounds of the mask decide on most blocks (tracing/intervals.py). Undecided blocks are evaluated, first at a few elements each, then at
all elements, a bounded number at a time. No tensor has an element per query and key.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from tl_attention.checks.common import expect_bool
from tl_attention.checks.flex import LISTS, check_captured_sizes
from tl_attention.checks.keywords import unknown_keyword
from tl_attention.checks.masks import (
    check_blocks,
    check_captures_are_outside,
    check_count,
    check_device,
    check_document_bounds,
    check_lengths_tensor,
    check_mask_function,
    check_prefixes,
    check_tree,
    check_window_pair,
)
from tl_attention.checks.transforms import ARGUMENT_ERRORS, Renaming
from tl_attention.problem.program import Call
from tl_attention.problem.uncompiled import uncompiled
from tl_attention.tracing.builtin_options import seen_distances
from tl_attention.tracing.captures import Captures, for_later_calls, versions
from tl_attention.tracing.intervals import AXES, Blocks, distance_bounds, mask_bounds, stream_of
from tl_attention.tracing.program_values import program_values

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from tl_attention.problem.request import MaskMod

Nodes = torch.Tensor | Sequence[int] | Sequence[Sequence[int]]  # a number per node of a tree, or of several
CHUNK = 2**24  # elements of a mask that are evaluated at once
PROBED = 8  # first and last queries and keys of a block that are evaluated before the others
MAX_CACHED = 64
_lock = threading.Lock()  # for the oldest of _cached to be one that is there
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)

_cached: dict[
    tuple[Any, ...], tuple[tuple[torch.Tensor | None, ...], tuple[Any, ...]]
] = {}  # lists and their versions
_made: weakref.WeakKeyDictionary[Any, tuple[Origin, ListsState]] = weakref.WeakKeyDictionary()


@uncompiled
def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    **unknown: NoReturn,
) -> BlockMask:
    """Create the BlockMask of a mask_mod: parameters, their order and the result are those of torch's create_block_mask.

    Blocks are classified by bounds of the traced mask_mod, so memory grows with the number of blocks, not of elements. Causal masks,
    windows, documents, prefixes and similar masks take some dozens of small operations. The host waits for two numbers: how many blocks
    are undecided after the bounds, and after the probed elements. A mask of q_idx - kv_idx alone needs neither. A mask without captured
    tensors is computed once per length and device.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> True where the query sees the key; see docs/flex.md for what it may do. and_masks and
            or_masks of torch combine several.
        B, H: number of batch entries and query heads, if the mask depends on them; None: one mask for all. If the mask does not depend on
            them, the lists are views with stride 0 there.
        Q_LEN, KV_LEN: number of queries and keys.
        device: device of the lists and of captured tensors; None: the GPU, if there is one.
        BLOCK_SIZE: queries and keys per block: an int or a pair.
        _compile: accepted without effect; nothing is compiled.
        separate_full_blocks: list full blocks in lists of their own, so that kernels skip mask_mod in them; False: list them as partial.
        compute_dq_write_order, dq_kv_order: for PyTorch's FLASH backend; compute_dq_write_order has to be False.
    Returns:
        torch.nn.attention.flex_attention.BlockMask, with lists int32 in both directions. A block that ends past Q_LEN or KV_LEN is never
        listed as full. The entries of an index row past its number of blocks are the remaining blocks, in order.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, or which operation of mask_mod, what was expected and what came.
    Source: Dong et al. 2024 (FlexAttention) for the format.
    """
    if unknown:
        raise unknown_keyword(create_block_mask, unknown)
    check_mask_function(mask_mod)
    expect_bool("separate_full_blocks", separate_full_blocks)
    expect_bool("compute_dq_write_order", compute_dq_write_order)
    if compute_dq_write_order:
        raise NotImplementedError(
            "compute_dq_write_order: expected False, got True; the order serves PyTorch's FLASH backend: call PyTorch's create_block_mask"
        )
    blocks = check_blocks(B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
    return _block_mask(mask_mod, blocks, separate_full_blocks, exact=True)


class Origin(NamedTuple):
    """Mask that the lists of a BlockMask were made from.

    Args:
        key: everything that mask_mod captured then, by Captures, and the sizes of tensors; None if that cannot be compared.
    """

    mask_mod: Callable[..., Any]
    key: tuple[Any, ...] | None

    @classmethod
    def of(cls, mask_mod: Callable[..., Any], captures: Captures | None) -> Origin:
        if captures is None or (sizes := captures.sizes) is None:
            return cls(mask_mod, None)
        return cls(mask_mod, (captures.key, sizes))


def origin_of_lists(block_mask: BlockMask) -> Origin | None:
    """Origin of the lists of a BlockMask that were made here; None if they were not, or have changed since."""
    origin, lists = _made.get(block_mask, (None, None))
    return origin if lists is not None and lists.are_in(block_mask) else None


class ListsState:
    """Lists by queries of a BlockMask, and how often each was changed in place; PyTorch counts no changes of inference tensors."""

    tensors: list[torch.Tensor | None]
    versions: tuple[int | None, ...]

    def __init__(self, block_mask: BlockMask):
        self.tensors = [getattr(block_mask, name) for name in LISTS]
        self.versions = versions(self.tensors)

    def are_in(self, block_mask: BlockMask) -> bool:
        """True if the block mask has these lists, without a change since."""
        partial_numbers, partial, full_numbers, full = self.tensors
        return (
            block_mask.kv_num_blocks is partial_numbers
            and block_mask.kv_indices is partial
            and block_mask.full_kv_num_blocks is full_numbers
            and block_mask.full_kv_indices is full
            and self.versions == versions(self.tensors)
        )


def _block_mask(mask_mod: Callable[..., Any], blocks: Blocks, separate_full_blocks: bool, exact: bool) -> Any:
    captures = Captures.of(mask_mod)
    check_captures_are_outside([] if captures is None else captures.tensors)
    # Later calls get the same lists, of which a backward may save some
    with for_later_calls():
        lists = _cached_lists(mask_mod, captures, blocks, separate_full_blocks, exact)
    _, block_mask_class = _tools()
    made = block_mask_class(
        (blocks.seqlen_q, blocks.seqlen_k),
        *lists,
        BLOCK_SIZE=(blocks.block_q, blocks.block_k),
        mask_mod=mask_mod,
    )
    _made[made] = Origin.of(mask_mod, captures), ListsState(made)
    return made


def _cached_lists(
    mask_mod: Callable[..., Any],
    captures: Captures | None,
    blocks: Blocks,
    separate_full_blocks: bool,
    exact: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Lists of a mask in the order of the arguments of BlockMask, those of an earlier call where nothing differs."""
    key, stream = None, stream_of(blocks.device)
    if captures is not None and not captures.tensors and stream is not None:
        key = captures.key, blocks, separate_full_blocks, exact, stream
    lists, made_at = _cached.get(key, (None, None))
    if lists is None or made_at != versions(lists):
        trace, _ = _tools()
        call = trace(None, mask_mod, False)
        sizes = {leaf: blocks.size(leaf) for leaf in AXES}
        check_captured_sizes(call, sizes, blocks.device, "the device of the mask", "device")
        try:
            with torch.no_grad():
                lists = _lists(*_states(call, blocks, exact), blocks, separate_full_blocks)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise NotImplementedError(
                "mask_mod: expected tensors with values, from which the blocks follow, got fake ones; make the mask outside FakeTensorMode"
            ) from None
        if key is not None:
            with _lock:
                if len(_cached) >= MAX_CACHED:
                    _cached.pop(next(iter(_cached)))
                _cached[key] = lists, versions(lists)
    return lists


@functools.cache
def _tools() -> tuple[Callable[..., Any], type[Any]]:
    """trace.trace and BlockMask, imported at the first call: the tools of torch that they need take time to import."""
    from torch.nn.attention.flex_attention import BlockMask

    from tl_attention.tracing.trace import trace

    return trace, BlockMask


def _states(call: Call, blocks: Blocks, exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(partial, full): bool [batch or 1, heads or 1, rows, columns]."""
    if not (blocks.rows and blocks.columns):
        none = torch.zeros(1, 1, blocks.rows, blocks.columns, dtype=torch.bool, device=blocks.device)
        return none, none
    distances = seen_distances(call, max(blocks.seqlen_q, blocks.seqlen_k))
    surely_full, empty = (
        mask_bounds(call, blocks) if distances is None else distance_bounds(*distances, blocks)
    )
    inside = None if blocks.are_whole else _inside(blocks)
    full = surely_full if inside is None else surely_full & inside
    partial = ~(full | empty)
    if not exact or call.program.mask is None or distances is not None:
        return partial, full
    undecided = partial if inside is None else ~(surely_full | empty)
    left = undecided.nonzero()
    if len(left):
        seen, hidden = _seen_and_hidden(call, blocks, left, probe=True)
        left = left[~(seen & hidden)]
    if len(left):
        seen, hidden = _seen_and_hidden(call, blocks, left, probe=False)
        place = left.unbind(1)
        full, whole = full.contiguous(), seen & ~hidden
        full[place] = whole if inside is None else whole & inside[place[2:]]
        partial[place] = seen & ~full[place]
    return partial, full


def _inside(blocks: Blocks) -> torch.Tensor:
    """Blocks that end before the last query and key: bool [rows, columns]."""
    sizes = (blocks.rows, blocks.block_q, blocks.seqlen_q), (blocks.columns, blocks.block_k, blocks.seqlen_k)
    rows, columns = (torch.arange(n, device=blocks.device) < length // block for n, block, length in sizes)
    return rows[:, None] & columns


def _seen_and_hidden(
    call: Call, blocks: Blocks, places: torch.Tensor, probe: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(some element is shown, some element is hidden): bool [blocks] each, of these blocks of a mask.

    Args:
        places: int64 [blocks, 4], batch entry, head, row and column.
        probe: evaluate the first and the last few queries and keys of each block only.
    """
    stream = stream_of(blocks.device)
    of_block = _offsets.__wrapped__ if stream is None else _offsets
    offsets = [of_block(block, probe, blocks.device, stream) for block in (blocks.block_q, blocks.block_k)]
    found = []
    for part in places.to(torch.int32).split(max(1, CHUNK // (len(offsets[0]) * len(offsets[1])))):
        batch, head, row, column = part[:, :, None, None].unbind(1)
        query = row * blocks.block_q + offsets[0][:, None]
        key = column * blocks.block_k + offsets[1]
        if not blocks.are_whole:
            there = (query < blocks.seqlen_q) & (key < blocks.seqlen_k)
            query, key = query.clamp(max=blocks.seqlen_q - 1), key.clamp(max=blocks.seqlen_k - 1)
        leaves = {"batch": batch, "head": head, "query": query, "key": key}
        (mask,) = program_values(call, [call.program.mask], leaves)
        if blocks.are_whole:
            mask = mask.expand(len(part), *mask.shape[1:]).flatten(1)
            found.append((mask.any(1), ~mask.all(1)))
        else:
            found.append(((mask & there).flatten(1).any(1), (~mask & there).flatten(1).any(1)))
    return found[0] if len(found) == 1 else tuple(map(torch.cat, zip(*found, strict=True)))


@functools.lru_cache(maxsize=64)
def _offsets(block: int, probe: bool, device: torch.device, stream: int | None) -> torch.Tensor:
    """Offsets of the queries or keys of a block that are evaluated, int32; cached per stream."""
    offsets = torch.arange(block, dtype=torch.int32, device=device)
    return torch.cat([offsets[:PROBED], offsets[-PROBED:]]) if probe and block > 2 * PROBED else offsets


def _lists(
    partial: torch.Tensor, full: torch.Tensor, blocks: Blocks, separate_full_blocks: bool
) -> tuple[torch.Tensor | None, ...]:
    """Numbers and indices of blocks in the order of the arguments of BlockMask: partial and full per row, then per column."""
    kinds = [partial, full] if separate_full_blocks else [partial | full]
    if blocks.rows == blocks.columns:
        pairs = _numbers_and_indices(torch.stack([*kinds, *(kind.mT for kind in kinds)]))
    else:
        pairs = [
            *_numbers_and_indices(torch.stack(kinds)),
            *_numbers_and_indices(torch.stack(kinds).mT),
        ]
    lists = [[x.expand(blocks.batch, blocks.heads, *x.shape[2:]) for x in pair] for pair in pairs]
    if not separate_full_blocks:
        lists = [lists[0], [None, None], lists[1], [None, None]]
    return tuple(x for pair in lists for x in pair)


def _numbers_and_indices(kinds: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(number of blocks, indices: theirs, then those of the others) per row, int32, for each of kinds, bool [.., rows, columns]."""
    numbers = kinds.sum(-1, dtype=torch.int32)
    indices = kinds.to(torch.uint8).argsort(stable=True, dim=-1, descending=True).to(torch.int32)
    return list(zip(numbers, indices, strict=True))


def causal(
    seqlen_q: int,
    seqlen_k: int,
    *,
    device: torch.device | str | None = None,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """BlockMask of `q_idx >= kv_idx`: the diagonal is top-left if lengths differ.

    This constructor and the following ones evaluate no mask_mod and never wait for the GPU. Each result has its function as `.mask_mod`,
    for and_masks and or_masks. It can be pickled and copied.

    Args:
        seqlen_q, seqlen_k: number of queries and keys.
        device: device of the lists; None: the GPU, if there is one.
        block_size: queries and keys per block: an int or a pair.
    """

    return _bounded(_causal, None, seqlen_q, seqlen_k, device, block_size)


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def sliding_window(
    seqlen_q: int,
    seqlen_k: int,
    window_size: Sequence[int | None],
    *,
    device: torch.device | str | None = None,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """BlockMask of a window around each query, top-left aligned: `-right <= q_idx - kv_idx <= left`.

    Args:
        window_size: (left, right), keys before and after the query's own; -1 or None: unbounded. (n - 1, 0) is causal with n keys.
    """
    left, right = check_window_pair(window_size)

    mask_mod = functools.partial(_window, left, right)
    return _bounded(mask_mod, None, seqlen_q, seqlen_k, device, block_size)


def _window(left: int, right: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    if left < 0 and right < 0:
        return q_idx >= 0
    if left < 0:
        return kv_idx - q_idx <= right
    if right < 0:
        return q_idx - kv_idx <= left
    return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)


def prefix_lm(
    seqlen_q: int,
    seqlen_k: int,
    prefix: int | torch.Tensor,
    *,
    device: torch.device | str | None = None,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """BlockMask of a prefix that all queries see, and a causal mask after it: `(kv_idx < prefix) | (q_idx >= kv_idx)`.

    Args:
        prefix: length of the prefix: an int, or int32 or int64 [batch] on `device`.
    """
    lengths = check_prefixes(prefix) if isinstance(prefix, torch.Tensor) else None
    if lengths is None:
        check_count("prefix", prefix, 0)

    mask_mod = (
        functools.partial(_prefix, prefix) if lengths is None else functools.partial(_prefixes, lengths)
    )
    batch = None if lengths is None else len(lengths)
    return _bounded(mask_mod, batch, seqlen_q, seqlen_k, _device_of(lengths, device), block_size)


def _prefix(prefix: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < prefix) | (q_idx >= kv_idx)


def _prefixes(lengths: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < lengths[b]) | (q_idx >= kv_idx)


def document_ids(cu_seqlens: torch.Tensor, seqlen: int) -> torch.Tensor:
    """Document of each position, int32 [seqlen], from the bounds of packed documents.

    Args:
        cu_seqlens: int32 or int64 [documents + 1], starting at 0, never decreasing. Positions past its last entry form one more
            document. Values on a GPU are checked with TL_ATTENTION_CHECK_LENGTHS=1 alone, for which the host waits.
    """
    check_document_bounds(cu_seqlens)
    check_count("seqlen", seqlen, 0)
    positions = torch.arange(seqlen, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.bucketize(positions, cu_seqlens[1:], right=True, out_int32=True)


def documents(
    ids: torch.Tensor,
    *,
    causal: bool = True,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """BlockMask of packed documents: a query sees the keys of its document, and with `causal` only those up to its own.

    Args:
        ids: document of each position, int32 or int64 [seqlen] or [batch, seqlen], such as document_ids() returns. A document may
            have several runs of positions; blocks between its runs are then listed as partial.
    """
    check_lengths_tensor("ids", ids, 1, 2)
    expect_bool("causal", causal)
    batch = len(ids) if ids.ndim == 2 else None
    mask_mod = functools.partial(_documents if batch is None else _batched_documents, ids, causal)
    seqlen = ids.shape[-1]
    return _bounded(mask_mod, batch, seqlen, seqlen, ids.device, block_size)


def _documents(ids: torch.Tensor, causal: bool, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    same = ids[q_idx] == ids[kv_idx]
    return same & (q_idx >= kv_idx) if causal else same


def _batched_documents(ids: torch.Tensor, causal: bool, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    same = ids[b, q_idx] == ids[b, kv_idx]
    return same & (q_idx >= kv_idx) if causal else same


@uncompiled
def prefix_tree(
    parents: Nodes,
    lengths: Nodes,
    seqlen: int | None = None,
    *,
    device: torch.device | str | None = None,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """BlockMask of trees whose nodes are packed depth first: a query sees the ancestors of its node, and its node up to itself.

    The tokens on a path from a root attend as in a causal sequence of their own; paths share what they have in common.
    `prefix_tree([-1] + [0] * 8, lengths)` is a prompt with eight answers. Position ids: prefix_tree_positions(). Queries of the tokens
    after the first n alone, such as a draft beside a cache of n keys, need create_block_mask of `mask_mod(b, h, q_idx + n, kv_idx)`.

    Args:
        parents: parent of each node, -1 for a root; several roots are a forest. The parent of a node is the node before it, an ancestor
            of that one, or -1. Ints, or a list of ints per batch entry; or a tensor, int32 or int64 [nodes] or [batch, nodes].
        lengths: tokens of each node, 0 or more, in the same forms. If one of the two has no batch, all batch entries share it. Tensors
            pad an entry of fewer nodes with roots of length 0.
        seqlen: number of queries and keys, at least 1; None: the sum of lengths, in a batch the largest. Needed if lengths are a GPU
            tensor. Tokens past the last node see no key and are seen by no query.
        device: device of the mask, to which ints and CPU tensors are copied; None: that of lengths or else of parents, if it is a tensor,
            else the GPU, if there is one.
        block_size: queries and keys per block: an int or a pair.

    The values of GPU tensors are checked only with TL_ATTENTION_CHECK_LENGTHS=1, for which the host waits.
    """
    ends = _subtree_ends(parents, lengths, seqlen, device)
    batch = len(ends) if ends.ndim == 2 else None
    mask_mod = functools.partial(_tree if batch is None else _trees, ends)
    seqlen = ends.shape[-1]
    return _bounded(mask_mod, batch, seqlen, seqlen, ends.device, block_size)


def _tree(ends: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx < ends[kv_idx])


def _trees(ends: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx < ends[b, kv_idx])


@uncompiled
def prefix_tree_positions(
    parents: Nodes, lengths: Nodes, seqlen: int | None = None, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Position of each token of prefix_tree() on its path from the root, int64 [seqlen] or [batch, seqlen], for rotary embeddings.

    Args:
        parents, lengths, seqlen, device: see prefix_tree(). Tokens past the last node count from 0.
    """
    ends = _subtree_ends(parents, lengths, seqlen, device).long()
    seqlen = ends.shape[-1]
    ends = torch.where(ends > 0, ends, seqlen)
    # Tokens before, less those in subtrees that have ended
    ended = ends.new_zeros(*ends.shape[:-1], seqlen + 1).scatter_add(-1, ends, torch.ones_like(ends))
    return torch.arange(seqlen, device=ends.device) - ended.cumsum(-1)[..., :-1]


@torch.inference_mode(False)  # bits need a tensor whose changes are counted
def _subtree_ends(
    parents: Nodes, lengths: Nodes, seqlen: int | None, device: torch.device | str | None
) -> torch.Tensor:
    """First token after the subtree of each token's node, int32 [seqlen] or [batch, seqlen]; 0 past the last node.

    A query sees a key if kv_idx <= q_idx < ends[kv_idx].
    """
    given = [x for x in (lengths, parents) if isinstance(x, torch.Tensor)]
    parents, lengths, seqlen = check_tree(parents, lengths, seqlen)
    device = check_device(_device_of(given[0] if given else None, device))
    nodes = _on_device("parents", parents, device), _on_device("lengths", lengths, device)
    parents, lengths = torch.broadcast_tensors(*nodes)
    # Ancestor of each node by 1, 2, 4, .. levels, and tokens of the node and the levels before that one; place 0 is the parent of roots
    above, below = (torch.nn.functional.pad(x, (1, 0)) for x in (parents + 1, lengths))
    for _ in range((parents.shape[-1] - 1).bit_length()):
        below, above = below.scatter_add(-1, above, below), above.gather(-1, above)
    after = lengths.cumsum(-1)
    ends = torch.nn.functional.pad(after - lengths + below[..., 1:], (0, 1))
    tokens = torch.arange(seqlen, device=device).expand(*after.shape[:-1], seqlen).contiguous()
    return ends.gather(-1, torch.searchsorted(after, tokens, right=True)).int()


def _on_device(name: str, x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the device, or a copy of a CPU tensor, for which the host does not wait."""
    if x.device == device:
        return x
    if x.device.type != "cpu":
        raise ValueError(
            f"{name}: expected a tensor on the device of the mask, {device}, or on the CPU, got one on {x.device}; move it, or pass"
            " device"
        )
    pins = device.type == "cuda" and stream_of(device) is not None  # CUDA refuses the copy in a graph capture
    return (x.pin_memory() if pins else x).to(device, non_blocking=pins)


def dilated(
    seqlen_q: int,
    seqlen_k: int,
    dilation: int,
    *,
    causal: bool = True,
    device: torch.device | str | None = None,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """BlockMask of every `dilation`-th key, counted from the query's own; with `causal` only keys up to it."""
    check_count("dilation", dilation, 1)
    expect_bool("causal", causal)

    mask_mod = functools.partial(_dilated, dilation, causal)
    return _bounded(mask_mod, None, seqlen_q, seqlen_k, device, block_size)


def _dilated(dilation: int, causal: bool, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    every = (q_idx - kv_idx) % dilation == 0
    return every & (q_idx >= kv_idx) if causal else every


def block_diagonal(
    seqlen_q: int,
    seqlen_k: int,
    size: int,
    *,
    device: torch.device | str | None = None,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """BlockMask of chunks of `size` positions that see themselves: `q_idx // size == kv_idx // size`."""
    check_count("size", size, 1)

    mask_mod = functools.partial(_chunks, size)
    return _bounded(mask_mod, None, seqlen_q, seqlen_k, device, block_size)


def _chunks(size: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx // size == kv_idx // size


@uncompiled
def _bounded(
    mask_mod: Callable[..., Any],
    batch: int | None,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | str | None,
    block_size: int | tuple[int, int],
) -> BlockMask:
    """BlockMask from bounds alone: undecided blocks are listed as partial."""
    names = {"Q_LEN": "seqlen_q", "KV_LEN": "seqlen_k", "BLOCK_SIZE": "block_size"}
    try:
        blocks = check_blocks(batch, None, seqlen_q, seqlen_k, device, block_size)
    except ARGUMENT_ERRORS as error:
        raise Renaming(names).of(error) from None
    return _block_mask(mask_mod, blocks, True, exact=False)


def _device_of(tensor: torch.Tensor | None, device: torch.device | str | None) -> torch.device | str | None:
    return device if tensor is None or device is not None else tensor.device
