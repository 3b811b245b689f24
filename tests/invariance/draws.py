"""Drawn rearrangements of a dtype and head dims, from a seed: plain numbers, without tensors; and the kernels that they need."""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tl_attention.config import configs
from tl_attention.config.kernel_configs import KernelConfig, append_kernel, page_rows
from tl_attention.problem.attn_problem import OPTIONS, TABLE_ROWS, AttnProblem, decode_problem

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
LATENT = (576, 512)  # head dims of latent attention with absorbed weights, which has decodes alone
MASKS = ("causal", "full", "band")  # band: a window with keys before and after the query
VALUES = ("window", "softcap", "sink", "alibi")
PAGES = (16, 48, 64, 128, 256)
DEFAULT_OPTIONS = ("causal", "full", "window", "softcap-sink", "alibi")
DEFAULT_LATENT_OPTIONS = ("causal", "full", "softcap")
PER_SET = 4  # draws that share a set of sequences and its reference
MOST_SEQUENCES = 5
MOST_ROWS, LONG_ROWS = 1500, 5000
MOST_HEADS = 24
SHORT = ((0, 0), (0, 70), (70, 0), (1, 0), (1, 1), (1, 1), (2, 2), (1, 300))
LATENT_HEADS = (1, 5, 16, 17, 32, 128)
MOST_LATENT_ROWS = (
    30_000  # queries x heads of a sequence: partials of its reference take 2 KB per row and 1024 keys
)

# Kinds, and whether they have keys in pages
FORWARDS = ("packed", "dense", "chunks")
CACHES = ("cache", "decode", "each position", "rollout")
PAGED = ("packed", "chunks", *CACHES)


@dataclass(frozen=True)
class OptionSet:
    """Options that choose kernels, by a name of words: causal, full or band, and VALUES. Without a mask it is causal."""

    name: str

    def __post_init__(self) -> None:
        words = self.name.split("-")
        is_wrong = bool(set(words) - {*MASKS, *VALUES}) or len({*words} & {*MASKS}) > 1
        if is_wrong or ("window" in words and {*words} & {"full", "band"}):
            raise ValueError(
                f"options: expected words of {', '.join(MASKS)} (one of them) and {', '.join(VALUES)} joined by '-', got {self.name}"
            )

    def has(self, word: str) -> bool:
        return word in self.name.split("-")

    @property
    def is_causal(self) -> bool:
        return not (self.has("full") or self.has("band"))

    @property
    def compiled(self) -> tuple[str, ...]:
        """Options of the problem."""
        words = {"window" if word == "band" else word for word in self.name.split("-")}
        return tuple(name for name in OPTIONS if name in words)

    @property
    def depends_on_chunk(self) -> bool:
        """True if a query's bits depend on the other queries of its sequence in the call, and on whether it is a decode."""
        return self.has("alibi")


@dataclass(frozen=True)
class Run:
    """What all draws of a run have in common.

    Args:
        longest: the most keys of a sequence.
    """

    dtype: str
    head_dims: tuple[int, int]
    seed: int = 0
    longest: int = LONG_ROWS
    pages: tuple[int, ...] = PAGES

    @property
    def is_latent(self) -> bool:
        return self.head_dims == LATENT

    @property
    def words(self) -> list[str]:
        """Arguments of the command that repeat it."""
        head_dim, head_dim_v = self.head_dims
        width = str(head_dim) if head_dim == head_dim_v else f"{head_dim}-{head_dim_v}"
        found = ["--dtype", self.dtype, "--head-dim", width, "--seed", str(self.seed)]
        found += ["--longest", str(self.longest)] if self.longest != LONG_ROWS else []
        return found + (["--pages", ",".join(map(str, self.pages))] if self.pages != PAGES else [])

    @property
    def name(self) -> str:
        return f"{self.dtype} d{'-'.join(map(str, dict.fromkeys(self.head_dims)))}"


@functools.cache
def key_block(run: Run, options: OptionSet) -> int:
    """Keys per block of these calls."""
    dtype = DTYPES[run.dtype]
    if run.is_latent:
        return configs.decode_config(decode_problem(dtype, *LATENT), 1).block_N
    problem = AttnProblem.of(dtype, *run.head_dims, False, options=options.compiled)
    return configs.choose_invariant(problem).config.block_N


@dataclass(frozen=True)
class SequenceSet:
    """Sequences, heads and values of options. Draws of a set share its tensors and its reference.

    Args:
        lengths: (queries, keys) per sequence.
        scale: of q.
        window: keys before, keys after.
    """

    seed: int
    lengths: tuple[tuple[int, int], ...]
    heads_kv: int
    group: int
    scale: float
    window: tuple[int, int]
    softcap: float

    @property
    def heads(self) -> int:
        return self.heads_kv * self.group

    def __str__(self) -> str:
        lengths = " ".join(f"{q}x{k}" for q, k in self.lengths)
        return f"heads {self.heads}/{self.heads_kv}, {lengths}"


@dataclass(frozen=True)
class Draw:
    """One rearrangement.

    Args:
        index: of the draw among those of its options.
        kind: one of FORWARDS and CACHES.
        page: keys per page; 0: no pages.
        seed: of all that the call draws: which sequences, in which order, chunks, heads, lengths of buffers.
    """

    index: int
    options: OptionSet
    sequences: SequenceSet
    kind: str
    page: int
    seed: int

    @property
    def column(self) -> str:
        """Kind as the summary has it."""
        return f"{self.kind}, pages" if self.page else self.kind

    def __str__(self) -> str:
        pages = f" of {self.page}" if self.page else ""
        return f"{self.options.name}:{self.index} {self.column}{pages}, {self.sequences}"


def kinds_of(run: Run, options: OptionSet) -> list[tuple[str, bool]]:
    """(kind, has pages) that these options can have, those of longer tables more often."""
    kinds = [*(() if run.is_latent else FORWARDS), *CACHES]
    if not options.is_causal:  # a query sees keys that a rollout has not written yet
        kinds.remove("rollout")
    if options.depends_on_chunk:  # its reference would be a call per position
        kinds.remove("each position")
    return [(kind, pages) for kind in kinds for pages in (False, True) if not pages or kind in PAGED]


def draw_of(run: Run, options: OptionSet, index: int) -> Draw:
    """A draw by its number, the same one in every process."""
    name = f"{run.seed} {run.name} {options.name} {run.longest} {run.pages}"
    number = index // PER_SET
    rng = random.Random(f"{name} {number} of draws {index}")
    kind, pages = rng.choice(kinds_of(run, options))
    page = rng.choice(run.pages) if pages else 0
    sequences = _sequence_set(run, options, number, f"{name} {number}")
    return Draw(index, options, sequences, kind, page, rng.randrange(2**31))


@functools.lru_cache(4)
def _sequence_set(run: Run, options: OptionSet, number: int, seed: str) -> SequenceSet:
    rng = random.Random(seed)
    heads_kv, group = rng.choice((1, 1, 2, 3, 4, 8)), rng.choice((1, 1, 2, 3, 4, 7, 8))
    while heads_kv * group > MOST_HEADS:
        heads_kv = (heads_kv + 1) // 2
    if run.is_latent:
        heads_kv, group = 1, rng.choice(LATENT_HEADS)
    longest = run.longest if rng.random() < (0.3 if run.is_latent else 0.08) else min(run.longest, MOST_ROWS)
    count = rng.randint(1, MOST_SEQUENCES)
    lengths = [_lengths(longest, TABLE_ROWS, residue_of(options, number), rng)]
    for _ in range(1, count):
        block = rng.choice((TABLE_ROWS, key_block(run, options)))
        special = rng.choice(SHORT) if rng.random() < 0.25 else None
        lengths.append(special or _lengths(min(longest, MOST_ROWS), block, rng.randrange(block), rng))
    rng.shuffle(lengths)
    if run.is_latent:
        lengths = [(min(q, MOST_LATENT_ROWS // group), k) for q, k in lengths]
    left = rng.choice((0, 1, 17, 63, 64, 127, 128, 129, 200, 300, 513, 1024))
    right = rng.choice((1, 5, 64, 100, 300)) if options.has("band") else 0
    scale, softcap = rng.choice((0.3, 1.0, 1.0, 3.0)), rng.choice((2.0, 15.0, 50.0))
    return SequenceSet(
        rng.randrange(2**31), tuple(lengths), heads_kv, group, scale, (left, right), softcap
    )  # fmt: skip


def residue_of(options: OptionSet, number: int) -> int:
    """Length modulo a tile of one sequence of a set: sets go through all, from another one on for other options."""
    return (zlib.crc32(options.name.encode()) + number) % TABLE_ROWS


def _lengths(longest: int, block: int, residue: int, rng: random.Random) -> tuple[int, int]:
    """(queries, keys) of a sequence: as many, fewer or more keys; the larger number has this residue modulo a block."""
    most = max(longest - residue, 0) // block
    blocks = min(rng.choice((0, 0, 1, 1, 2, 3, rng.randint(0, most))), most)
    rows = min(max(blocks * block + residue, 1), longest)
    kind = rng.random()
    if kind < 0.6:
        return rows, rows
    if kind < 0.7:  # fewer keys than queries: the first ones see none
        return rows, rng.randint(1, rows)
    if kind < 0.85:
        return rng.choice((1, rng.randint(1, rows))), rows
    return rows, min(rows + rng.randint(1, 700), longest)


def kernels_of(run: Run, options: Iterable[OptionSet]) -> list[tuple[AttnProblem, KernelConfig]]:
    """Kernels that draws of these options launch, once each."""
    dtype, found = DTYPES[run.dtype], []
    rows_of_pages = sorted({page_rows(page) for page in run.pages})
    for one in options:
        names = one.compiled
        causal = one.is_causal and "window" not in names
        if not run.is_latent:
            for form in ((), ("varlen",)):
                of_form = tuple(name for name in OPTIONS if name in (*names, *form))
                problem = AttnProblem.of(dtype, *run.head_dims, causal, options=of_form)
                config = configs.choose_invariant(problem).config
                every = [config, *(config.paged(problem, rows) for rows in rows_of_pages if form)]
                found += itertools.chain(*(config.kernels(problem) for config in every))
        problem = decode_problem(dtype, *run.head_dims, names)
        forward = None if run.is_latent else AttnProblem.of(dtype, *run.head_dims, False, options=names)
        edge = configs.DECODE_ROWS
        for rows, pages in itertools.product((edge, edge + 1), (0, *rows_of_pages)):
            config = configs.decode_config(problem, rows, pages)
            if forward is not None:
                config = configs.invariant_decode_config(problem, config, forward)
            found += config.kernels(problem)
    return list(dict.fromkeys([*found, append_kernel(dtype)]))


def divided(draws: int, names: Sequence[str]) -> dict[str, int]:
    """Draws per option set."""
    return {name: draws // len(names) + (i < draws % len(names)) for i, name in enumerate(names)}
