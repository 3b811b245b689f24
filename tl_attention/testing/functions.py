"""Masks, score functions and biases that the word `function=NAME` of a shape names, for benchmarks and `tl-attention explain`."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tl_attention.testing.shapes import Shape

DOCUMENTS = 8  # per sequence
ANSWERS = 8  # to a shared prompt
NODES = 32  # of a random tree
PREFIX, WINDOW, CAP = 1024, 1024, 20.0
BLOCK = 128  # queries and keys of a block of random masks
BUCKETS, FAR = 16, 128  # of T5: per direction; distance at which its logarithm reaches one more


@dataclass(frozen=True)
class Function:
    """A score_mod, a mask or a bias on one device.

    Args:
        mask_mod: of flex_attention.
        blocks: bool [1, heads, query blocks, key blocks] of BLOCK queries and keys, True where all of a block is seen.
        learned: captured tensors that get a gradient.
        seen: share of the pairs that the mask shows, and that the option of the row shows.
        option: arguments of flash_attn_func that compute the same, or nearly; None: no option does.
        ends: of documents.
    """

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    blocks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    learned: tuple[torch.Tensor, ...] = ()
    seen: tuple[float, float] = (1.0, 1.0)
    option: dict[str, Any] | None = None
    ends: tuple[int, ...] = ()


def share_of_causal(n: int) -> float:
    return (n + 1) / (2 * n)


def causal(shape: Shape, _device: torch.device) -> Function:
    share = share_of_causal(shape.seqlen_q)
    return Function(mask_mod=lambda _b, _h, q, k: q >= k, seen=(share, share), option={"causal": True})


def window(shape: Shape, _device: torch.device) -> Function:
    n, size = shape.seqlen_q, min(WINDOW, shape.seqlen_q)
    share = size / n - size * (size - 1) / (2 * n * n)
    return Function(
        mask_mod=lambda _b, _h, q, k: (q >= k) & (q - k < WINDOW),
        seen=(share, share),
        option={"window_size": (WINDOW - 1, 0)},
    )


def prefix_lm(shape: Shape, _device: torch.device) -> Function:
    """The first keys for all, the others causal; beside the causal option, which shows less."""
    n, size = shape.seqlen_q, min(PREFIX, shape.seqlen_q)
    share, added = share_of_causal(n), size * (size - 1) / (2 * n * n)
    return Function(
        mask_mod=lambda _b, _h, q, k: (k < PREFIX) | (q >= k),
        seen=(share + added, share),
        option={"causal": True},
    )


def documents(shape: Shape, device: torch.device) -> Function:
    """Causal documents of random lengths; beside packed sequences."""
    n = shape.seqlen_q
    ends = (*sorted(random.Random(1).sample(range(1, n), DOCUMENTS - 1)), n)
    lengths = [end - begin for begin, end in itertools.pairwise((0, *ends))]
    share = sum(length * (length + 1) / 2 for length in lengths) / n**2
    ids = torch.repeat_interleave(torch.arange(DOCUMENTS), torch.tensor(lengths)).to(device, torch.int32)
    return Function(
        mask_mod=lambda _b, _h, q, k: (ids[q] == ids[k]) & (q >= k),
        seen=(share, share),
        option={"causal": True},
        ends=ends,
    )


def shared_prompt(shape: Shape, device: torch.device) -> Function:
    """A prompt of a fifth of the tokens and answers of a tenth, 4096 and 8 x 2048 of 20480; beside the causal option, which shows more."""
    n = shape.seqlen_q
    prompt, answer = n // 5, n // 10
    rest = n - prompt - (ANSWERS - 1) * answer
    return _prefix_tree([-1] + [0] * ANSWERS, [prompt, *[answer] * (ANSWERS - 1), rest], device)


def tree(shape: Shape, device: torch.device) -> Function:
    """A random tree of nodes of random lengths; beside the causal option, which shows more."""
    n, draw = shape.seqlen_q, random.Random(1)
    ends = (*sorted(draw.sample(range(1, n), NODES - 1)), n)
    parents, path = [-1], [0]
    for node in range(1, NODES):
        path = path[: draw.randint(1, len(path))]
        parents.append(path[-1])
        path.append(node)
    return _prefix_tree(parents, [end - begin for begin, end in itertools.pairwise((0, *ends))], device)


def _prefix_tree(parents: Sequence[int], lengths: Sequence[int], device: torch.device) -> Function:
    """Nodes packed depth first: a query sees its node and the nodes on the way to the root. parents: -1 for the root."""
    n, before, below = sum(lengths), [0] * len(parents), [*lengths]
    for node, parent in enumerate(parents[1:], 1):
        before[node] = before[parent] + lengths[parent]
    for node, parent in reversed([*enumerate(parents)][1:]):
        below[parent] += below[node]
    pairs = sum(x * (x + 1) // 2 + x * above for x, above in zip(lengths, before, strict=True))
    subtree_ends = [sum(lengths[:node]) + tokens for node, tokens in enumerate(below)]
    ends = torch.repeat_interleave(torch.tensor(subtree_ends), torch.tensor(lengths)).to(device, torch.int32)
    return Function(
        mask_mod=lambda _b, _h, q, k: (q >= k) & (q < ends[k]),
        seen=(pairs / n**2, share_of_causal(n)),
        option={"causal": True},
    )


def random_blocks(sparsity: float) -> Callable[[Shape, torch.device], Function]:
    """Full blocks at random, other ones per head."""

    def made(shape: Shape, device: torch.device) -> Function:
        rows = shape.seqlen_q // BLOCK
        generator = torch.Generator().manual_seed(0)
        blocks = torch.rand(1, shape.heads_q, rows, rows, generator=generator).to(device) >= sparsity
        share = float(blocks.float().mean())
        return Function(blocks=blocks, seen=(share, share))

    return made


def softcap(_shape: Shape, _device: torch.device) -> Function:
    return Function(lambda score, _b, _h, _q, _k: CAP * torch.tanh(score / CAP), option={})


def alibi(shape: Shape, device: torch.device) -> Function:
    heads = torch.arange(1, shape.heads_q + 1, device=device)
    slopes = 2.0 ** (-8 * heads / shape.heads_q)
    return Function(lambda score, _b, h, q, k: score - slopes[h] * (q - k).abs(), option={})


def relative(shape: Shape, device: torch.device) -> Function:
    """A learned bias per head and distance."""
    n = shape.seqlen_k
    bias = torch.randn(shape.heads_q, shape.seqlen_q + n, device=device).requires_grad_()
    return Function(lambda score, _b, h, q, k: score + bias[h, q - k + n], learned=(bias,), option={})


def buckets(shape: Shape, device: torch.device) -> Function:
    """A learned bias per head and bucket of distances: per direction 8 of one distance each, then 8 wider ones, the last from 91 on.

    Source: Raffel et al. 2020 (T5), with its 32 buckets and max_distance 128.
    """
    bias = torch.randn(shape.heads_q, 2 * BUCKETS, device=device).requires_grad_()

    def score_mod(score: Any, _b: Any, h: Any, q: Any, k: Any) -> Any:
        ahead, near = k - q, BUCKETS // 2
        distance = ahead.abs()
        far = torch.log(distance.clamp(min=1) / near) * (near / math.log(FAR / near))
        bucket = torch.where(distance < near, distance, (near + far.int()).clamp(max=BUCKETS - 1))
        return score + bias[h, bucket + BUCKETS * (ahead > 0)]

    return Function(score_mod, learned=(bias,), option={})


def dense_bias(per_batch: bool) -> Callable[[Shape, torch.device], Function]:
    """A learned bias [batch or 1, heads, seqlen_q, seqlen_k] in bf16."""

    def made(shape: Shape, device: torch.device) -> Function:
        sizes = shape.batch if per_batch else 1, shape.heads_q, shape.seqlen_q, shape.seqlen_k
        bias = torch.randn(sizes, device=device, dtype=torch.bfloat16).requires_grad_()
        return Function(bias=bias, learned=(bias,))

    return made


MASKS: dict[str, Callable[..., Any]] = {
    "causal": causal,
    "documents": documents,
    "prefix-lm": prefix_lm,
    "shared-prompt": shared_prompt,
    "tree": tree,
    "window": window,
}
LEAST = {"documents": DOCUMENTS, "tree": NODES}  # queries
BLOCK_MASKS = {"half": random_blocks(0.5), "tenth": random_blocks(0.9)}
SCORES: dict[str, Callable[..., Any]] = {
    "softcap": softcap,
    "alibi": alibi,
    "relative": relative,
    "buckets": buckets,
}
BIASES = {"bias-of-heads": dense_bias(False), "bias-of-batch": dense_bias(True)}
FUNCTIONS: dict[str, Callable[[Shape, torch.device], Function]] = MASKS | BLOCK_MASKS | SCORES | BIASES
LISTED = "listed-"  # begins the names of random blocks by the share of them that is seen: listed-0.25


def check(shape: Shape) -> None:
    """Raise ValueError, with what was expected and what came, for a function that is unknown or that a shape cannot have."""
    name, options = shape.options.function, shape.options.words
    complaint = f"shape {shape}: expected"
    if name.startswith(LISTED):
        _seen_share(name)
    elif name not in FUNCTIONS:
        raise ValueError(f"{complaint} function={', '.join(FUNCTIONS)} or {LISTED}SHARE, got function={name}")
    if len(options) > 1 or shape.causal:
        other = (
            "causal" if shape.causal else next(word for word in options if not word.startswith("function"))
        )
        raise ValueError(f"{complaint} mask full and no other option beside function={name}, got {other}")
    if name in SCORES or name in BIASES:
        return
    if shape.seqlen_q != shape.seqlen_k:
        lengths = f"{shape.seqlen_q} and {shape.seqlen_k}"
        raise ValueError(f"{complaint} as many queries as keys for function={name}, got {lengths}")
    if shape.seqlen_q < LEAST.get(name, 0):
        raise ValueError(
            f"{complaint} at least {LEAST[name]} queries for function={name}, got {shape.seqlen_q}"
        )
    if name not in MASKS and shape.seqlen_q % BLOCK:
        raise ValueError(
            f"{complaint} a multiple of {BLOCK} queries for function={name}, got {shape.seqlen_q}"
        )


def of_shape(shape: Shape, device: torch.device) -> Function:
    """The function of a shape. Raises ValueError as check() does."""
    check(shape)
    name = shape.options.function
    made = random_blocks(1 - _seen_share(name)) if name.startswith(LISTED) else FUNCTIONS[name]
    return made(shape, device)


def _seen_share(name: str) -> float:
    """The share in a name of random blocks. Raises ValueError for one that is not above 0 and at most 1."""
    try:
        share = float(name.removeprefix(LISTED))
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"expected function={LISTED}SHARE, above 0 and at most 1, got function={name}")
    return share
