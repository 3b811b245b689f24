"""Calls that reach a given kernel: launches of drawn lengths with a config that is forced on them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tl_attention import launch
from tl_attention.api.flex_lists import kept_mask, listed
from tl_attention.checks.kvcache import MAX_NODES
from tl_attention.config import catalog, configs
from tl_attention.config.catalog import PAGED
from tl_attention.problem.attn_problem import DECODE, DEFAULT_DTYPE, DIRECTIONS, DTYPES, JVP, AttnProblem
from tl_attention.problem.options import BATCH_INVARIANT, UNLIMITED, Cache, Options
from tl_attention.tracing.trace import trace

from .launches import forced_decode

FORWARD, BACKWARD, DETERMINISTIC = DIRECTIONS
MASK_BLOCK = 128  # queries and keys per block of a mask
FEW_ROWS = configs.DECODE_ROWS  # of a decode: with more it has the last config of its width


@dataclass(frozen=True)
class Kind:
    """A kind of call with a forced config.

    Args:
        direction: one of DIRECTIONS, PAGED, DECODE or JVP.
        config: of the call. That of a decode follows from its number of rows. None: as the tables choose.
        function: name of one of SCORE_MODS, of a call with a score_mod; or one of PART_CALLS.
    """

    direction: str
    problem: AttnProblem
    config: Any
    function: str = ""

    @property
    def name(self) -> str:
        if self.function:
            return f"{self.direction} {self.problem} {self.function}"
        return f"{self.direction} {self.problem}, {self.config}"

    @property
    def kernels(self) -> list[tuple]:
        """(problem, config) of the kernels that its calls launch; none with a score_mod, whose config the call chooses."""
        return (
            [] if self.config is None else catalog.CallKind(self.direction, self.problem, self.config).kernels
        )


@dataclass(frozen=True)
class Draw:
    """Sizes of a call.

    Args:
        lengths: (queries, keys) of each sequence; several ones in a packed batch only.
        heads, heads_kv: of queries and of keys.
        batch: of a dense call.
        window: (left, right), with the option.
            sms: SMs of the GPU. A launch of a few CTAs takes less time to check, and they have more tiles each.
        seed: of contents that decide, such as block lists.
        scale: of scores. Kernels negate queries if it is negative.
    """

    lengths: tuple[tuple[int, int], ...]
    heads: int = 2
    heads_kv: int = 1
    batch: int = 1
    window: tuple[int, int] = (100, 0)
    sms: int = 3
    seed: int = 0
    scale: float = 0.1

    def __str__(self) -> str:
        lengths = ",".join(f"{a}x{b}" for a, b in self.lengths)
        return (
            f"{lengths} heads {self.heads}/{self.heads_kv} batch {self.batch} sms {self.sms} seed {self.seed}"
        )


def kinds(whole_pack: bool = True) -> list[Kind]:
    """Kinds of call that together launch every kernel of the manifest, or of the whole pack."""
    calls = catalog.pack_calls() if whole_pack else catalog.shipped_calls()
    return [*(Kind(call.kind, call.problem, call.config) for call in calls), *kinds_without_table()]


def torch_dtype(problem: AttnProblem) -> torch.dtype:
    return torch.float32 if problem.is_fp32 else getattr(torch, problem.dtype)


def call_of(kind: Kind, draw: Draw) -> Callable[[], Any]:
    """The call of a draw, to be run within launches.recording()."""
    if kind.direction == DECODE:
        return _decode(kind, draw)
    if kind.direction == JVP:
        return _jvp(kind, draw)
    return _attention(kind, draw)


def _ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _options(problem: AttnProblem, draw: Draw, paged: bool) -> Options | None:
    fields: dict[str, Any] = {}
    if problem.has("varlen"):
        starts = [_ints([0, *itertools.accumulate(pair[i] for pair in draw.lengths)]) for i in (0, 1)]
        longest = [max(pair[i] for pair in draw.lengths) for i in (0, 1)]
        fields |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
        fields |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
        if paged:
            fields |= {"seqused_k": _ints([k for _, k in draw.lengths]), "cu_seqlens_k": starts[0]}
    if problem.has("window"):
        fields["window"] = draw.window
    if problem.has("softcap"):
        fields["softcap"] = 20.0
    if problem.has("alibi"):
        fields["alibi_slopes"] = torch.ones(draw.heads)
    if problem.has("sink"):
        fields["sink"] = torch.zeros(draw.heads)
    if problem.has("dropout"):
        fields |= {"dropout_p": 0.25, "rng_state": torch.tensor([3, 5])}
    terms = DTYPES[problem.dtype].terms
    return Options(**fields, parts=terms) if fields or terms else None


def _attention(kind: Kind, draw: Draw) -> Callable[[], Any]:
    """A forward or a backward: dense, packed, with keys in pages, or with a block mask."""
    problem, paged = kind.problem, kind.direction == PAGED
    dtype, heads_first = torch_dtype(problem), problem.program is not None or kind.function in SCORE_MODS
    rows = [sum(pair[i] for pair in draw.lengths) for i in (0, 1)]
    outer = () if problem.has("varlen") else (draw.batch,)

    def tensor(rows: int, heads: int, width: int) -> torch.Tensor:
        sizes = (heads, rows, width) if heads_first else (rows, heads, width)
        return torch.zeros(*outer, *sizes, dtype=dtype)

    widths = problem.head_dim, problem.head_dim_v
    q, k, v = tensor(rows[0], draw.heads, widths[0]), *(tensor(rows[1], draw.heads_kv, n) for n in widths)
    options, table = _options(problem, draw, paged), None
    if paged:
        page = kind.config.page_rows
        of_each = [-(-n // page) for _, n in draw.lengths]
        table = _ints(
            [
                [(7 * b + 3 * i) % (sum(of_each) + 1) for i in range(max(*of_each, 1))]
                for b in range(len(of_each))
            ]
        )
        k, v = (torch.zeros(sum(of_each) + 1, page, draw.heads_kv, n, dtype=dtype) for n in widths)
    layout = draw.scale, problem.causal, False, heads_first
    mask = None if problem.program is None else _block_mask(problem, draw)

    def traced() -> Any:
        if kind.function in SCORE_MODS:
            return trace(SCORE_MODS[kind.function](draw), None, kind.direction != FORWARD)
        return mask and listed(trace(None, mask.mask_mod, False), kept_mask(mask), q, draw.heads)

    if kind.function == "placed":
        options = Options(window=draw.window, place=_ints([[17, 5, 3, 0, 0, 0, 0, 0]]))
    if kind.function == "added":
        others = tensor(rows[0], draw.heads, widths[1]).float(), torch.zeros(draw.batch, draw.heads, rows[0])
        return lambda: launch.forward(q, k, v, *layout, out=others[0], lse=others[1])
    if kind.direction in (FORWARD, PAGED):
        max_logits = getattr(kind.config, "max_logits", False)
        given = {"options": options, "block_table": table, "max_logits": max_logits, "config": kind.config}
        return lambda: launch.forward(q, k, v, *layout, traced=traced(), **given)
    out = tensor(rows[0], draw.heads, widths[1])
    lse = torch.zeros(*outer, draw.heads, rows[0])
    deterministic = kind.direction == DETERMINISTIC
    given = {"options": options, "partial": kind.function == "partial", "config": kind.config}
    return lambda: tuple(
        launch.backward(out, q, k, v, out, lse, *layout, deterministic, traced=traced(), **given).values()
    )


def _relative_bias(draw: Draw) -> Callable:
    """A learned number per head and distance, which warps beside the producer look up per diagonal."""
    ((rows, keys),) = draw.lengths
    table = torch.zeros(draw.heads, rows + keys, requires_grad=True)
    return lambda score, b, h, q, k: score + table[h, q - k + keys]


def _dense_bias(draw: Draw) -> Callable:
    """A learned number per query and key, whose tiles are staged in shared memory."""
    bias = torch.zeros(draw.heads, *draw.lengths[0], dtype=torch.bfloat16, requires_grad=True)
    return lambda score, b, h, q, k: score + bias[h, q, k]


SCORE_MODS: dict[str, Callable[[Draw], Callable]] = {
    "score_mod relative bias": _relative_bias,
    "score_mod dense bias": _dense_bias,
    "score_mod cap": lambda draw: lambda score, b, h, q, k: 20.0 * torch.tanh(score / 20.0),
}


# Calls on parts of a sequence, as several GPUs make them: (directions, whether the mask is causal)
PART_CALLS = {
    "added": (DIRECTIONS[:1], True),
    "partial": (DIRECTIONS[1:], True),
    "placed": (DIRECTIONS, False),
}


def kinds_without_table() -> list[Kind]:
    """Calls with a score_mod, which users write, and on parts of a sequence: no table has their kernels."""
    functions = {name: (DIRECTIONS, False) for name in SCORE_MODS} | PART_CALLS
    return [
        Kind(direction, AttnProblem(DEFAULT_DTYPE, *width, causal), None, name)
        for name, (directions, causal) in functions.items()
        for direction in directions
        for width in ((64, 64), (128, 128))
    ]


def _block_mask(problem: AttnProblem, draw: Draw) -> BlockMask:
    """A band, or random lists of partial and whole blocks."""
    rows, keys = draw.lengths[0]
    if problem.is_band:
        left, right = draw.window
        return create_block_mask(
            lambda b, h, q, k: (q - k <= left) & (k - q <= right), None, None, rows, keys, device="cpu"
        )
    chance = torch.Generator().manual_seed(draw.seed)
    blocks = -(-rows // MASK_BLOCK), -(-keys // MASK_BLOCK)
    outer = (draw.batch, draw.heads) if draw.seed % 2 else (1, 1)
    chosen, lists = torch.rand(*outer, *blocks, generator=chance), []
    for wanted in (chosen < 0.35, chosen > 0.65):
        lists += [wanted.sum(-1).int(), (~wanted).int().argsort(dim=-1, stable=True).int()]
    return BlockMask.from_kv_blocks(
        *lists,
        BLOCK_SIZE=(MASK_BLOCK,) * 2,
        mask_mod=lambda b, h, q, k: (q + k) % 3 != 0,
        seq_lengths=(rows, keys),
    )


def _jvp(kind: Kind, draw: Draw) -> Callable[[], Any]:
    problem = kind.problem
    ((rows, keys),) = draw.lengths
    sizes = (
        (rows, draw.heads, problem.head_dim),
        (keys, draw.heads_kv, problem.head_dim),
        (keys, draw.heads_kv, problem.head_dim_v),
    )
    tensors = [torch.zeros(draw.batch, *size, dtype=torch_dtype(problem)) for size in sizes]
    return lambda: launch.forward_jvp(
        *tensors, *tensors, draw.scale, problem.causal, False, False, kind.config
    )


def _decode(kind: Kind, draw: Draw) -> Callable[[], Any]:
    """A decode of as many rows as select the config. Seeds vary splits, leftpad, cache indices, rotation and appended keys."""
    problem, config, batch = kind.problem, kind.config, len(draw.lengths)
    dtype, page_rows = torch_dtype(problem), config.page_rows
    heads, heads_kv, queries = draw.heads, draw.heads_kv, max(min(draw.lengths)[0], 1)
    if config.warpgroups == configs.decode_config(problem, FEW_ROWS, page_rows).warpgroups:
        queries = max(min(queries, FEW_ROWS * heads_kv // heads), 1)
    elif queries * heads // heads_kv <= FEW_ROWS:
        queries = FEW_ROWS * heads_kv // heads + 1 + queries
    if problem.has("tree") and queries > MAX_NODES:
        heads, queries = max(heads, 2 * heads_kv), MAX_NODES
    keys, longest = [k for _, k in draw.lengths], max(*(k for _, k in draw.lengths), 1)
    q = torch.zeros(batch, queries, heads, problem.head_dim, dtype=dtype)
    room, caches, table = longest + 7, batch + 2, None
    if page_rows:
        room, pages = page_rows, -(-(longest + 7) // page_rows)
        caches = batch * pages + 1
        table = _ints([[(5 * b + i) % caches for i in range(pages)] for b in range(batch)])
    k, v = (
        torch.zeros(caches, room, heads_kv, n, dtype=dtype) for n in (problem.head_dim, problem.head_dim_v)
    )
    if problem.head_dim_v > problem.head_dim or getattr(config, "v_in_k", False):
        v = k[..., : problem.head_dim_v]
    chance = random.Random(draw.seed)
    padded, indexed, new = (chance.random() < 0.3 for _ in range(3))
    leftpad = _ints([min(3, n) for n in keys]) if padded and not page_rows else None
    index = _ints([(2 * b) % caches for b in range(batch)]) if indexed and not page_rows else None
    cache = Cache(k, v, _ints(keys), 3 * new, index, leftpad, table)
    options = _options(problem, replace(draw, heads=heads), False) or Options()
    if problem.has("tree"):  # each query sees the nodes before it of its own parity
        bits = [sum(1 << j for j in range(i % 2, i + 1, 2)) for i in range(queries)]
        words = torch.tensor([bit - 2**64 * (bit >= 2**63) for bit in bits])
        options = replace(options, tree_mask=words if draw.seed % 2 else words.expand(batch, -1).clone())
    splits = chance.choice([0, 0, 3, 1, BATCH_INVARIANT] if config.v_in_k else [0, 0, 3, 1])
    if config.batch_invariant:
        splits = BATCH_INVARIANT

    def call() -> None:
        if new:
            added = [
                torch.zeros(batch, 3, heads_kv, n, dtype=dtype)
                for n in (problem.head_dim, problem.head_dim_v)
            ]
            angles = (
                (torch.zeros(longest + 10, 8, dtype=dtype),) * 2 if chance.random() < 0.5 else (None, None)
            )
            launch.append_to_cache(q, *added, cache, *angles, False, True)
        full = (UNLIMITED, UNLIMITED) if problem.has("tree") else options.window
        window = (UNLIMITED, 0) if chance.random() < 0.5 else full
        asked = replace(options, window=window, num_splits=splits)
        with forced_decode(config):
            launch.attend_cache(q, cache, draw.scale, asked)

    return call
