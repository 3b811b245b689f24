"""Checks of the arguments of block masks. They read metadata, and on the CPU the values of trees, documents and prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tl_attention.checks.common import (
    cast_hint,
    check_window,
    describe,
    expect_local,
    expect_tensor,
    is_int,
)
from tl_attention.checks.flex import MAX_LENGTH
from tl_attention.checks.kvcache import MAX_NODES
from tl_attention.checks.lengths import ALWAYS, skips_check
from tl_attention.problem.options import UNLIMITED
from tl_attention.tracing.captures import has_values, is_vmapped
from tl_attention.tracing.intervals import Blocks


def check_mask_function(mask_mod: Any) -> None:
    if not callable(mask_mod):
        is_tensor = isinstance(mask_mod, torch.Tensor)
        hint = "; index it in a function, as mask[q_idx, kv_idx]" if is_tensor else ""
        raise TypeError(
            f"mask_mod: expected a function of 0-d tensors (b, h, q_idx, kv_idx), got {describe(mask_mod)}{hint}"
        )


def check_captures_are_outside(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors of a transform of torch.func, from which the blocks of a mask would follow."""
    for x in tensors:
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise NotImplementedError(
                "mask_mod: expected captured tensors from outside torch.func transforms (vmap, grad, jvp, functionalize), got one of shape"
                f" {tuple(x.shape)} from inside; make the mask before"
            )


def check_count(name: str, x: Any, least: int, most: int = MAX_LENGTH) -> None:
    if not is_int(x):
        raise TypeError(f"{name}: expected an int, got {describe(x)}{cast_hint(name, x, 'int')}")
    if not least <= x <= most:
        raise ValueError(f"{name}: expected {least} to {most}, got {x}")


def check_blocks(
    batch: Any, heads: Any, seqlen_q: Any, seqlen_k: Any, device: Any, block_size: Any
) -> Blocks:
    """Blocks of a mask, from the arguments of create_block_mask."""
    for name, x in (("B", batch), ("H", heads)):
        if x is not None:
            check_count(name, x, 1)
    check_count("Q_LEN", seqlen_q, 0)
    check_count("KV_LEN", seqlen_k, 0)
    sizes = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(sizes) != 2 or not all(is_int(size) and 1 <= size < 2**31 for size in sizes):
        raise ValueError(
            "BLOCK_SIZE: expected an int from 1 to 2 ** 31 - 1, or a pair of them for queries and keys, got"
            f" {describe(block_size)}; 128 suits the kernels"
        )
    return Blocks(batch or 1, heads or 1, seqlen_q, seqlen_k, *map(int, sizes), check_device(device))


def check_device(device: Any) -> torch.device:
    """The device with its index; None: the GPU, if there is one."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        text = str(error).split("\n")[0]
        raise ValueError(f"device: expected a device of torch, got {describe(device)}: {text}") from None


def check_window_pair(window_size: Any) -> tuple[int, int]:
    """The bounds of a window, -1 for no bound, at most MAX_LENGTH: a larger one hides no more."""
    check_window(window_size)
    left, right = (UNLIMITED if x is None else min(x, MAX_LENGTH) for x in window_size)
    return left, right


def check_lengths_tensor(name: str, x: Any, *ndims: int, may_be_empty: bool = False) -> torch.Tensor:
    """A tensor of positions, lengths or documents."""
    expect_tensor(name, x)
    expect_local(name, x)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{name}: expected torch.int32 or torch.int64, got {x.dtype}; cast it with {name}.int()"
        )
    if x.ndim not in ndims or not (x.numel() or may_be_empty):
        dims = " or ".join(map(str, ndims))
        raise ValueError(
            f"{name}: expected {dims} dimensions and at least one element, got shape {tuple(x.shape)}"
        )
    return x


def check_document_bounds(cu_seqlens: Any) -> None:
    """Check the bounds of packed documents; their values where the host has them."""
    check_lengths_tensor("cu_seqlens", cu_seqlens, 1)
    begin = 0
    for i, end in enumerate(_values(cu_seqlens)):
        if end < begin or (not i and end):
            wanted = f"at least {begin}, where document {i - 1} begins" if i else "0, where document 0 begins"
            raise ValueError(f"cu_seqlens: expected {wanted}, got {end} as cu_seqlens[{i}]")
        begin = end


def check_prefixes(prefix: Any) -> torch.Tensor:
    """Lengths of prefixes, [batch], with their values checked where the host has them."""
    check_lengths_tensor("prefix", prefix, 1)
    for b, length in enumerate(_values(prefix)):
        if length < 0:
            raise ValueError(f"prefix: expected at least 0, got {length} as prefix[{b}]")
    return prefix


class NodeValues(NamedTuple):
    """A number per node of one tree, or of a tree per batch entry.

    Args:
        tensor: int64 [nodes] or [batch, nodes].
        counts: nodes of each batch entry, without padding.
        rows: the numbers of each batch entry; None on a GPU, unless TL_ATTENTION_CHECK_LENGTHS=1 asks to wait for them.
    """

    tensor: torch.Tensor
    counts: list[int]
    rows: list[list[int]] | None

    @property
    def is_batch(self) -> bool:
        return self.tensor.ndim == 2

    def __str__(self) -> str:
        """The number of nodes."""
        if len({*self.counts}) > 1:
            return f"{self.counts[:8]} in {len(self.counts)} batch entries"
        return (
            f"{self.counts[0]} in each of {len(self.counts)} batch entries"
            if self.is_batch
            else f"{self.counts[0]}"
        )


def check_tree(parents: Any, lengths: Any, seqlen: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Parents and lengths of the nodes of prefix trees, int64 [nodes] or [batch, nodes] each, and the number of tokens."""
    parents, lengths = _nodes("parents", parents, -1), _nodes("lengths", lengths, 0)
    one_per_node = (
        parents.counts == lengths.counts
        if parents.is_batch == lengths.is_batch
        else {*parents.counts} == {*lengths.counts}
    )
    if not one_per_node:
        raise ValueError(f"lengths: expected a length per node of parents, {parents}, got {lengths}")
    for entry, row in enumerate(parents.rows or ()):
        _check_depth_first(f"parents[{entry}]" if parents.is_batch else "parents", row)
    for entry, row in enumerate(lengths.rows or ()):
        for node, length in enumerate(row):
            if length < 0:
                place = f"[{entry}][{node}]" if lengths.is_batch else f"[{node}]"
                raise ValueError(f"lengths: expected at least 0, got {length} as lengths{place}")
    longest = None if lengths.rows is None else max(map(sum, lengths.rows))
    if seqlen is None and longest is None:
        raise ValueError(
            f"seqlen: expected an int beside lengths on {lengths.tensor.device}, which are not read, got None; pass q.shape[-2]"
        )
    seqlen = longest if seqlen is None else seqlen
    check_count("seqlen", seqlen, 1)
    if longest is not None and seqlen < longest:
        raise ValueError(f"seqlen: expected at least the sum of lengths, {longest}, got {seqlen}")
    return parents.tensor, lengths.tensor, seqlen


def check_draft_tree(parents: Any) -> None:
    """Check the parents of the draft tokens of trees, [nodes] or [batch, nodes]; their values where the host has them."""
    check_lengths_tensor("parents", parents, 1, 2, may_be_empty=True)
    if not parents.shape[-1]:
        raise ValueError(f"parents: expected at least one draft token, got shape {tuple(parents.shape)}")
    if parents.shape[-1] > MAX_NODES:
        raise NotImplementedError(
            f"parents: expected at most {MAX_NODES} draft tokens, a bit each, got {parents.shape[-1]}; verify fewer per call"
        )
    for entry, row in enumerate(_values(parents.reshape(-1, parents.shape[-1]))):
        for node, parent in enumerate(row):
            if not -1 <= parent < node:
                place = f"[{entry}][{node}]" if parents.ndim == 2 else f"[{node}]"
                raise ValueError(
                    f"parents: expected a node before each, or -1, got {parent} as parents{place}; number parents before their children"
                )


def _nodes(name: str, x: Any, padding: int) -> NodeValues:
    if isinstance(x, torch.Tensor):
        check_lengths_tensor(name, x, 1, 2)
        rows = (x if x.ndim == 2 else x[None]).tolist() if _is_read(x) else None
        return NodeValues(x.long(), [x.shape[-1]] * (len(x) if x.ndim == 2 else 1), rows)
    is_batch = isinstance(x, list | tuple) and bool(x) and all(isinstance(row, list | tuple) for row in x)
    rows = [*x] if is_batch else [x]
    if not all(
        isinstance(row, list | tuple) and all(is_int(n) and abs(n) < 2**31 for n in row) for row in rows
    ):
        hint = f"; pass torch.as_tensor({name})" if hasattr(x, "__array__") else ""
        raise TypeError(
            f"{name}: expected 32-bit ints, a list of them per batch entry, or a torch.Tensor, got {describe(x)}{hint}"
        )
    counts = [len(row) for row in rows]
    if not max(counts):
        raise ValueError(f"{name}: expected at least one node, got {describe(x)}")
    padded = torch.tensor([[*row, *[padding] * (max(counts) - len(row))] for row in rows], device="cpu")
    return NodeValues(padded if is_batch else padded[0], counts, rows)


def _values(x: torch.Tensor) -> list[Any]:
    """Values of a tensor in a list; [] where the host does not read it."""
    return [] if torch.compiler.is_compiling() or not _is_read(x) else x.tolist()


def _is_read(x: torch.Tensor) -> bool:
    """True for a tensor whose values the host has, or is asked to wait for."""
    if is_vmapped(x) or not has_values(x):
        return False
    return x.device.type == "cpu" or (ALWAYS and x.is_cuda and not skips_check(x))


def _check_depth_first(name: str, parents: Sequence[int]) -> None:
    path = [-1]  # to the last node, each its parent's child
    for node, parent in enumerate(parents):
        while path and path[-1] > parent:
            path.pop()
        if path[-1:] != [parent]:
            raise ValueError(
                f"{name}: expected depth-first order, in which the parent of a node is the node before it, an ancestor of that one, or -1,"
                f' got {parent} for node {node}; sort the nodes as "Prefix trees" of docs/flex.md shows'
            )
        path.append(node)
