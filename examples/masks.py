"""A gallery of masks: each function makes the BlockMask of n tokens, for flex_attention.

    python examples/masks.py                     all of them, as text
    python examples/masks.py documents prefix_tree

docs/masks.md shows their pictures: `python scripts/masks.py` writes it from this file. Needs no GPU.
"""

from __future__ import annotations

import argparse

import torch

from tl_attention import block_masks, create_block_mask, mask_picture

TOKENS = 4096
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def causal(n):
    """A token sees itself and what is before it: a language model.
    It runs as `causal=True`; a mask for it is of use as a part of others."""
    return block_masks.causal(n, n, device=DEVICE)


def sliding_window(n):
    """A token sees itself and the 1023 before it: Mistral, and the local layers of Gemma and gpt-oss, with other widths.
    It runs as `window_size=(1023, 0)`."""
    return block_masks.sliding_window(n, n, (1023, 0), device=DEVICE)


def two_sided_window(n):
    """A token sees 512 tokens on each side: encoders such as ModernBERT.
    It runs as `window_size=(512, 512)`."""
    return block_masks.sliding_window(n, n, (512, 512), device=DEVICE)


def window_and_first_tokens(n):
    """A window, and the first 128 tokens of the sequence, which are attention sinks: StreamingLLM.
    For generation without an end from a cache of constant size."""

    def mask(b, h, q, k):
        return (q >= k) & ((q - k < 1024) | (k < 128))

    return create_block_mask(mask, None, None, n, n, device=DEVICE)


def chunks(n):
    """A token sees what is before it in its chunk of 1024 tokens: local layers of Llama 4, whose chunks are longer.
    Chunks are independent of each other, so this equals packed sequences of 1024 tokens."""

    def mask(b, h, q, k):
        return (q >= k) & (q // 1024 == k // 1024)

    return create_block_mask(mask, None, None, n, n, device=DEVICE)


def frames(n):
    """A token sees its whole frame of 384 tokens and the frames before it: video, generated frame by frame.
    Causal in blocks, full within each."""

    def mask(b, h, q, k):
        return q // 384 >= k // 384

    return create_block_mask(mask, None, None, n, n, device=DEVICE)


def prefix_lm(n):
    """All tokens see a prompt of 1500 tokens, and what follows it is causal: prefix language models, PaliGemma.
    The prefix may be a tensor, with a length per sequence of the batch."""
    return block_masks.prefix_lm(n, n, 1500, device=DEVICE)


def documents(n):
    """Documents packed into one sequence, each causal, so that no token is padding.
    `document_ids` makes the number of each token's document from the bounds."""
    bounds = torch.tensor([0, 300, 1700, 2000, 2100, n], device=DEVICE)
    return block_masks.documents(block_masks.document_ids(bounds, n))


def documents_in_both_directions(n):
    """Documents packed into one sequence, each seen whole by its tokens: encoders, embeddings.
    `flash_attn_varlen_func` computes the same from `cu_seqlens`."""
    bounds = torch.tensor([0, 300, 1700, 2000, 2100, n], device=DEVICE)
    return block_masks.documents(block_masks.document_ids(bounds, n), causal=False)


def shared_prompt(n):
    """Several answers to one prompt of 1024 tokens in one sequence: each sees the prompt and itself.
    The prompt is computed once for all answers, as in GRPO and in preference training."""
    lengths = [1024, 776, 800, 500, n - 3100]  # of the prompt, then of its answers
    return block_masks.prefix_tree([-1, 0, 0, 0, 0], lengths, device=DEVICE)


def prefix_tree(n):
    """Trees of continuations, packed depth first: a token sees its node and the nodes on the way to the root.
    For search, dialogues with branches and drafts; here two trees, of which the second is a chain."""
    parents = [-1, 0, 1, 1, 0, 4, 4, -1, 7]  # node -> its parent
    lengths = [600, 500, 300, 700, 400, 250, 350, 500, n - 3600]
    return block_masks.prefix_tree(parents, lengths, device=DEVICE)


def images_in_text(n):
    """Text is causal, and the tokens of an image see each other in both directions: Gemma 3.
    `image` is the number of a token's image, 0 for text."""
    image = torch.zeros(n, dtype=torch.int32, device=DEVICE)
    image[400:1000], image[2300:3300] = 1, 2

    def mask(b, h, q, k):
        return (q >= k) | ((image[q] == image[k]) & (image[q] > 0))

    return create_block_mask(mask, None, None, n, n, device=DEVICE)


def global_tokens(n):
    """A window of 256 on each side, and 64 global tokens that see all and are seen by all: Longformer, BigBird.
    Global tokens are the first ones here; a table `is_global[q]` places them elsewhere."""

    def mask(b, h, q, k):
        return ((q - k).abs() <= 256) | (q < 64) | (k < 64)

    return create_block_mask(mask, None, None, n, n, device=DEVICE)


def neighbourhood(n):
    """Pixels of an image of 64 columns, row by row: a pixel sees 17 x 17 pixels around it, after NATTEN.
    Rows that are too far are skipped; columns are hidden within the blocks."""

    def mask(b, h, q, k):
        return ((q // 64 - k // 64).abs() <= 8) & ((q % 64 - k % 64).abs() <= 8)

    return create_block_mask(mask, None, None, n, n, device=DEVICE)


def tiles(n):
    """Pixels of an image of 64 columns, ordered by tiles of 8 x 16: a pixel sees its tile and the tiles beside it.
    The same neighbourhood as blocks: all that is computed is seen."""

    def mask(b, h, q, k):
        rows, columns = q // 512 - k // 512, q // 128 % 4 - k // 128 % 4
        return (rows.abs() <= 1) & (columns.abs() <= 1)

    return create_block_mask(mask, None, None, n, n, device=DEVICE)


def local_and_strided(n):
    """Half of the heads see the last 512 tokens, the others each eighth block of 128, after Sparse Transformer.
    A mask that depends on the head; the picture has a strided one."""

    def mask(b, h, q, k):
        local, strided = q - k < 512, (q // 128 - k // 128) % 8 == 0
        return (q >= k) & (((h % 2 == 0) & local) | ((h % 2 == 1) & strided))

    return create_block_mask(mask, None, 2, n, n, device=DEVICE)


def padded_keys(n):
    """Queries see the keys of their sequence up to its length: cross-attention to padded inputs.
    A mask that depends on the batch; the picture has a sequence of 1900 keys."""
    lengths = torch.tensor([1900, n], device=DEVICE)

    def mask(b, h, q, k):
        return k < lengths[b]

    return create_block_mask(mask, 2, None, n, n, device=DEVICE)


GALLERY = {
    "Language models": (causal, sliding_window, window_and_first_tokens, chunks, prefix_lm),
    "Packed sequences": (documents, documents_in_both_directions, shared_prompt, prefix_tree, padded_keys),
    "Images and video": (images_in_text, frames, neighbourhood, tiles),
    "Encoders and sparse patterns": (two_sided_window, global_tokens, local_and_strided),
}
HEADS = {local_and_strided: 1}  # head of the picture, where masks differ by head


def main() -> None:
    known = {function.__name__: function for functions in GALLERY.values() for function in functions}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default: all")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in known]:
        parser.error(f"NAME: expected one of {', '.join(known)}, got {unknown[0]}")
    for name in names or known:
        picture = mask_picture.picture(known[name](TOKENS), head=HEADS.get(known[name], 0))
        print(f"{name}: {picture}\n")


if __name__ == "__main__":
    main()
