"""Pictures of block masks: as text, and as an image file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from tl_attention.api.block_masks import LISTS
from tl_attention.checks.common import describe
from tl_attention.checks.masks import check_count
from tl_attention.launch.block_lists import FULL, HIDDEN, PARTIAL
from tl_attention.launch.block_lists import block_states as states_of_lists

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SIGNS = {HIDDEN: "·", PARTIAL: "▒", FULL: "█"}
COLORS = {HIDDEN: "#f2f2f2", PARTIAL: "#f2b35e", FULL: "#2f5d8a"}
WORDS = {HIDDEN: "hidden", PARTIAL: "partial", FULL: "full"}
MAX_SIGNS = 64  # per row or column of a text picture


def block_states(block_mask: BlockMask, batch: int = 0, head: int = 0) -> torch.Tensor:
    """State per block of one batch entry and head: uint8 [rows, columns], 0 hidden, 1 partial, 2 full.

    Raises:
        TypeError, ValueError: block_mask is no BlockMask, or has no such batch entry or head.
    """
    if not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError(
            f"block_mask: expected a BlockMask, got {describe(block_mask)}; make one of a mask_mod with create_block_mask"
        )
    shape = block_mask.kv_num_blocks.shape
    if len(shape) != 3:
        raise ValueError(
            f"block_mask: expected lists [batch, heads, rows], got kv_num_blocks of shape {tuple(shape)}"
        )
    lists = [getattr(block_mask, name) for name in LISTS]
    # Each list has the batch entries and heads of the mask, or one for all of them
    for dim, (name, number) in enumerate((("batch", batch), ("head", head))):
        sizes = [x.shape[dim] for x in lists if x is not None]
        check_count(name, number, 0, next((n for n in sizes if n != 1), 1) - 1)
        lists = [None if x is None else x.narrow(dim, number if x.shape[dim] > 1 else 0, 1) for x in lists]
    key_blocks = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    return states_of_lists(*(None if x is None else x.cpu() for x in lists), key_blocks)[0, 0].to(torch.uint8)


def picture(block_mask: BlockMask, batch: int = 0, head: int = 0) -> str:
    """Text with a sign per block: █ full, ▒ partial, · hidden; queries go down, keys to the right.

    If a mask has more than 64 blocks per row or column, a sign stands for several blocks: ▒ unless they all have one state.

    Raises:
        TypeError, ValueError: as block_states().
    """
    states = block_states(block_mask, batch, head)
    step = max(1, -(-max(states.shape) // MAX_SIGNS))
    lines = [_summary(block_mask, states)]
    if step > 1:
        lines[0] += f"; a sign is {step} x {step} blocks"
    for rows in states.split(step) if states.numel() else ():
        signs = ""
        for part in rows.split(step, 1):
            found = part.unique().tolist()
            signs += SIGNS[found[0] if len(found) == 1 else PARTIAL]
        lines.append(signs)
    return "\n".join(lines)


def save_picture(block_mask: BlockMask, path: str | os.PathLike[str], batch: int = 0, head: int = 0) -> None:
    """Write an image of one batch entry and head of a block mask.

    Args:
        path: file to write; its suffix chooses the format, such as .png, .svg or .pdf.
    Raises:
        ImportError: no matplotlib. TypeError, ValueError: as block_states().
    """
    states = block_states(block_mask, batch, head)
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "tl_attention.mask_picture.save_picture: expected matplotlib, got none; pip install matplotlib, or print(picture(block_mask))"
        ) from error
    figure = Figure(figsize=(6, 6.6), layout="constrained")
    axes = figure.subplots()
    seqlen_q, seqlen_k = block_mask.seq_lengths
    rows, columns = states.shape
    extent = (0, columns * block_mask.BLOCK_SIZE[1], rows * block_mask.BLOCK_SIZE[0], 0)
    axes.imshow(
        states.numpy(),
        cmap=ListedColormap([*COLORS.values()]),
        vmin=HIDDEN,
        vmax=FULL,
        extent=extent,
        interpolation="nearest",
    )
    axes.set(xlim=(0, seqlen_k), ylim=(seqlen_q, 0), xlabel="key", ylabel="query")
    axes.set_title(_summary(block_mask, states).replace(": ", "\n"), fontsize=9)
    patches = [Patch(facecolor=COLORS[state], edgecolor="gray", label=WORDS[state]) for state in COLORS]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    figure.savefig(path, dpi=150)


def _summary(block_mask: BlockMask, states: torch.Tensor) -> str:
    """Lengths, block size and the share of blocks per state."""
    count = max(states.numel(), 1)
    shares = ", ".join(
        f"{(states == state).sum().item() / count:.1%} {word}" for state, word in reversed(WORDS.items())
    )
    (seqlen_q, seqlen_k), (block_q, block_k) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    return f"{seqlen_q} queries x {seqlen_k} keys in blocks of {block_q} x {block_k}: {shares}"
