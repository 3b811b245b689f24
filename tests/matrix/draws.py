"""Drawn calls of a class: lengths, heads, layouts and the values of options, from a seed. Plain numbers, without tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tl_attention.checks.kvcache import MAX_NODES
from tl_attention.config import configs
from tl_attention.config.catalog import PAGED
from tl_attention.config.kernel_configs import PAGE_ROWS, BwdConfig, DecodeConfig, FwdConfig
from tl_attention.problem.attn_problem import DECODE, JVP, AttnProblem, decode_width

from .classes import CallClass

DRAWS = 40
WARP_ROWS, WARPGROUP_ROWS = 16, 64
MOST_ROWS = 700  # of most sequences
LONG_ROWS = 1300
MANY_TILES = 132  # SMs of an H200
MAX_SCORES = 20_000_000  # per call, which bounds the time of the reference
UNLIMITED = -1
WINDOWS = (0, 0, 1, 5, 15, 63, 64, 65, 100, 127, 128, 129, 200, 300, 513, 3000, 2**30, UNLIMITED)
PAGE_SIZES = {16: (16, 16, 48, 80), 64: (64, 64, 128, 256)}


@dataclass(frozen=True)
class Draw:
    """One call of a class.

    Args:
        lengths: (queries, keys) per sequence; of a dense call one pair for the whole batch. Of a decode the keys end with the new ones.
        used: rows in use per sequence of packed ones, as lengths; None: all.
        layout: one of testing.inputs.LAYOUTS, of pages that of the pages; packed sequences have one.
        narrower: columns that the tensors have less than the tile.
        ramp: keys shrink from the first one to the last one, so that a held row max overflows.
        causal: of a decode, whose kernels take any mask; else that of the problem.
        tree: of a decode: "shared" by all sequences, or "each" has its own.
        new: keys that a decode appends.
    """

    index: int
    seed: int
    lengths: tuple[tuple[int, int], ...]
    used: tuple[tuple[int, int], ...] | None = None
    batch: int = 1
    heads_kv: int = 1
    group: int = 1
    layout: str = "bshd"
    narrower: tuple[int, int] = (0, 0)
    ramp: bool = False
    scale: float | None = None
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    softcap: float = 0.0
    tree: str = ""
    dropout_p: float = 0.0
    slopes_of_batch: bool = False
    with_dlse: bool = False
    causal: bool = False
    page: int = 0
    new: int = 0
    rotary: int = 0
    interleaved: bool = False
    leftpad: tuple[int, ...] | None = None
    by_idx: bool = False
    num_splits: int = 0
    batch_invariant: bool = False
    size: int = 128  # of the blocks of a block mask
    share: float = 0.5  # of them that are listed

    @property
    def heads(self) -> int:
        return self.heads_kv * self.group

    def __str__(self) -> str:
        lengths = " ".join(f"{q}x{k}" for q, k in self.lengths)
        words = [f"draw {self.index}: batch {self.batch}, heads {self.heads}/{self.heads_kv}, {lengths}"]
        names = "used", "narrower", "layout", "window", "softcap", "tree", "dropout_p", "scale", "page", "new"
        for name in names:
            value = getattr(self, name)
            if value != getattr(type(self), name, None):
                words.append(f"{name} {value}")
        flags = ("ramp", "causal", "with_dlse", "by_idx", "batch_invariant", "leftpad", "num_splits")
        return ", ".join([*words, *(name for name in flags if getattr(self, name))])


def draws(call_class: CallClass, seed: int = 0, count: int = DRAWS) -> list[Draw]:
    """The draws of a class, the same ones for a seed in every process."""
    rng = random.Random(f"{seed} {call_class.name}")
    makers = {DECODE: _decode_draws, JVP: _attention_draws, PAGED: _packed_draws}
    packed = call_class.problem.has("varlen")
    make = makers.get(call_class.kind, _packed_draws if packed else _attention_draws)
    return make(call_class, rng, seed, count)


def tiles_of(call_class: CallClass, rng: random.Random, count: int) -> list[tuple[int, int, int, int]]:
    """(block_M, queries modulo it, block_N, keys modulo it) per draw. Passes of a backward with other tiles come in turn."""
    config = call_class.config
    configs_of = config.passes if isinstance(config, BwdConfig) else (config,)
    blocks = list(dict.fromkeys((one.block_M, one.block_N) for one in configs_of))
    found = []
    for block_m, block_n in blocks:
        share = -(-count // len(blocks))
        pairs = zip(residues(block_m, rng, share), residues(block_n, rng, share), strict=True)
        found.append([(block_m, q, block_n, k) for q, k in pairs])
    return [found[i % len(blocks)][i // len(blocks)] for i in range(count)]


def residues(block: int, rng: random.Random, count: int) -> list[int]:
    """Lengths modulo a block in random order: around multiples of 64 rows, one in each group of 16 rows, and random ones."""
    special = [1, WARP_ROWS - 1, WARP_ROWS, WARP_ROWS + 1, 0, block - 1]
    for edge in range(WARPGROUP_ROWS, block, WARPGROUP_ROWS):
        special += [edge - 1, edge, edge + 1]
    special += [first + rng.randint(1, WARP_ROWS) for first in range(0, block, WARP_ROWS)]
    found = list(dict.fromkeys(n % block for n in special if n <= block))
    while len(found) < count:
        found.append(rng.randrange(block))
    found = found[:count]
    rng.shuffle(found)
    return found


def _length(residue: int, block: int, rng: random.Random, most: int = MOST_ROWS) -> int:
    """A length with a residue: of few blocks mostly, at least 1."""
    limit = LONG_ROWS if most == MOST_ROWS and rng.random() < 0.12 else most
    blocks = rng.choice((0, 0, 1, 1, 2, 3, rng.randint(0, max(limit // block, 1))))
    return min(max(blocks * block + residue, 1), max(limit, 1))


def _keys(queries: int, residue: int, block: int, rng: random.Random) -> int:
    """Keys for these queries: fewer, as many, more, one, or beside a multiple of the key block."""
    kind = rng.random()
    if kind < 0.25:
        return queries
    if kind < 0.45:
        return rng.randint(1, queries)
    if kind < 0.6:
        return queries + rng.randint(1, 4 * block)
    if kind < 0.64:
        return 1
    if kind < 0.8:
        return max(rng.randint(1, 6) * block + rng.choice((-1, 0, 1)), 1)
    return _length(residue, block, rng)


def _heads(rng: random.Random) -> tuple[int, int]:
    """(heads_kv, group)"""
    return rng.choice(((1, 1), (3, 1), (6, 1), (1, 3), (3, 2), (1, 6), (2, 3), (1, 5), (2, 1)))


def _narrower(call_class: CallClass, rng: random.Random) -> tuple[int, int]:
    """Columns of Q and K, and of V, less than the tile has; the tile stays the first that holds them."""
    problem = call_class.problem
    width = problem.head_dim, problem.head_dim_v
    less = rng.choice(((0, 0), (0, 0), (0, 0), (8, 8), (0, 8), (16, 24)))
    found = tuple(n - x for n, x in zip(width, less, strict=True))
    if problem.head_dim_v != problem.head_dim and less[0] != less[1]:
        return (0, 0)
    if call_class.kind == DECODE:
        return less if width[0] != 576 and decode_width(*found) == width else (0, 0)
    direction = {PAGED: "fwd"}.get(call_class.kind, call_class.kind)
    if found[1] > found[0]:
        return (0, 0)
    served = AttnProblem.of(
        problem.dtype, *found, problem.causal, direction, problem.options, problem.program
    )
    return less if (served.head_dim, served.head_dim_v) == width else (0, 0)


def _options(call_class: CallClass, rng: random.Random) -> dict:
    """Values of the options that the class has."""
    problem, found = call_class.problem, {}
    if problem.has("window"):
        window = rng.choice(WINDOWS), rng.choice(WINDOWS)
        # These two bounds are a causal mask, or none
        found["window"] = (65, 0) if window in ((UNLIMITED, 0), (UNLIMITED, UNLIMITED)) else window
    if problem.has("softcap"):
        found["softcap"] = rng.choice((2.0, 15.0, 50.0, 200.0))
    if problem.has("tree"):
        found["tree"] = rng.choice(("shared", "each"))
    if problem.has("dropout"):
        found["dropout_p"] = rng.choice((0.1, 0.2, 0.5))
    found["slopes_of_batch"] = rng.random() < 0.5
    return found


def _most_keys(config: object) -> int:
    """The most keys that a config takes."""
    passes = config.passes if isinstance(config, BwdConfig) else ()
    return min((one.block_N for one in passes if one.one_tile), default=LONG_ROWS)


def _attention_draws(call_class: CallClass, rng: random.Random, seed: int, count: int) -> list[Draw]:
    """Draws of dense calls."""
    problem, config = call_class.problem, call_class.config
    forward = call_class.kind == "fwd"
    found = []
    for i, (block_m, of_queries, block_n, of_keys) in enumerate(tiles_of(call_class, rng, count)):
        q = _length(of_queries, block_m, rng)
        k = min(_keys(q, of_keys, block_n, rng), _most_keys(config))
        batch, (heads_kv, group) = rng.randint(1, 3), _heads(rng)
        if rng.random() < 0.2:  # more tiles than SMs
            q, k = min(q, 2 * block_m + of_queries), min(k, 400)
            batch, group = 3, rng.choice((1, 2))
            heads_kv = max(MANY_TILES * rng.choice((1, 2)) // (-(-q // block_m) * batch * group), 1) + 1
            heads_kv = min(heads_kv, 48)
        while batch * heads_kv * group * q * k > MAX_SCORES and heads_kv * batch > 1:
            heads_kv, batch = max(heads_kv // 2, 1), max(batch - 1, 1)
        one = Draw(
            i,
            rng.randrange(2**31),
            ((q, k),),
            batch=batch,
            heads_kv=heads_kv,
            group=group,
            layout=rng.choice(("bshd", "bshd", "bhsd", "packed")),
            narrower=_narrower(call_class, rng),
            ramp=forward and i % 10 == 3,
            scale=rng.choice((None, None, None, 0.1, -0.2)),
            with_dlse=call_class.kind.startswith("bwd") and rng.random() < 0.5,
            causal=problem.causal,
            size=rng.choice((128, 128, 256)),
            share=rng.choice((0.2, 0.5, 0.9)),
            **_options(call_class, rng),
        )
        found.append(one)
    return found


def _packed_draws(call_class: CallClass, rng: random.Random, seed: int, count: int) -> list[Draw]:
    """Draws of packed sequences: empty and one-token documents, more and fewer queries than keys, rows that are not used."""
    problem = call_class.problem
    forward = call_class.kind in ("fwd", PAGED)
    found = []
    for i, (block_m, of_queries, block_n, of_keys) in enumerate(tiles_of(call_class, rng, count)):
        documents = rng.choice((1, 1, 2, 3, 4, 5, 8, 12))
        most = MOST_ROWS if documents < 4 else 300
        first = _length(of_queries, block_m, rng)
        lengths = [(first, _keys(first, of_keys, block_n, rng))]
        for _ in range(documents - 1):
            kind = rng.random()
            q = _length(rng.randrange(block_m), block_m, rng, most)
            k = min(_keys(q, rng.randrange(block_n), block_n, rng), 2 * most)
            special = ((0, k), (q, 0), (0, 0), (1, 1), (1, k), (q, 1), (q, q))
            lengths.append(rng.choice(special) if kind < 0.5 else (q, k))
        rng.shuffle(lengths)
        heads_kv, group = _heads(rng)
        if rng.random() < 0.15:  # more tiles than SMs
            tiles = sum(-(-q // block_m) for q, _ in lengths)
            heads_kv, group = min(max(MANY_TILES // tiles, 1) + 1, 24), rng.choice((1, 2))
        scores = sum(q * k for q, k in lengths)
        if problem.has("dropout"):  # whose mask is padded
            scores = len(lengths) * max(q for q, _ in lengths) * max(k for _, k in lengths)
        while heads_kv * group * scores > MAX_SCORES and heads_kv > 1:
            heads_kv //= 2
        used = None
        if rng.random() < 0.3:
            used = tuple((rng.randint(0, q), rng.randint(0, k)) for q, k in lengths)
        one = Draw(
            i,
            rng.randrange(2**31),
            tuple(lengths),
            used,
            batch=len(lengths),
            heads_kv=heads_kv,
            group=group,
            narrower=_narrower(call_class, rng),
            ramp=forward and i % 10 == 3,
            scale=rng.choice((None, None, None, 0.1, -0.2)),
            with_dlse=call_class.kind.startswith("bwd") and rng.random() < 0.5,
            causal=problem.causal,
            page=_page_size(call_class, rng),
            layout=rng.choice(("bshd", "bhsd")) if call_class.kind == PAGED else "bshd",
            **_options(call_class, rng),
        )
        found.append(one)
    return found


def _page_size(call_class: CallClass, rng: random.Random) -> int:
    config = call_class.config
    rows = config.page_rows if isinstance(config, FwdConfig | DecodeConfig) else 0
    assert rows in PAGE_ROWS
    return rng.choice(PAGE_SIZES[rows]) if rows else 0


def _decode_draws(call_class: CallClass, rng: random.Random, seed: int, count: int) -> list[Draw]:
    """Draws of a decode: 1 to 300 queries per key head, of so many rows that its config is that of the class."""
    problem, config = call_class.problem, call_class.config
    is_latent = problem.head_dim == 576
    found = []
    for i in range(count):
        rows, group = _rows_of_config(call_class, rng)
        queries = rows // group
        batch = rng.choice((1, 2, 3, 5, 9))
        heads_kv = 1 if is_latent else rng.choice((1, 1, 2, 3, 8))
        kind = rng.choices(("any", "crowd", "alone"), (8, 1, 1))[0]
        if kind == "crowd":  # more sequences than lanes of a warp, more items than CTAs
            batch, heads_kv = (300, 1) if is_latent else (40, 8)
        elif kind == "alone":  # one item, which many CTAs share
            batch, heads_kv = 1, 1
        new = rng.choice((0, 0, 1, queries, rng.randint(1, 20)))
        lengths, leftpad = [], []
        for _ in range(batch):
            edge = max(rng.randint(1, 12) * config.block_N + rng.choice((-1, 0, 1)), 1)
            k = rng.choice((0, 1, edge, edge, rng.randint(1, MOST_ROWS), rng.randint(1, 2 * LONG_ROWS)))
            if kind == "crowd":
                k = rng.choice((0, 1, rng.randint(1, 300), rng.randint(1, 300), rng.randint(1, 900)))
            elif kind == "alone":
                k = rng.randint(8_192, 20_000)
            lengths.append((queries, k + new))
            leftpad.append(rng.randint(0, k))
        padded = not config.page_rows and rng.random() < 0.2
        options = _options(call_class, rng)
        causal = rng.random() < 0.5
        if causal or problem.has("tree") or rng.random() < 0.4:
            options.pop("window")
        splits = 0 if config.batch_invariant else rng.choice((0, 0, 0, 1, 2, 3, 7))
        # Others than latent attention run the kernel batch_invariant with it
        invariant = config.batch_invariant or (is_latent and not splits and rng.random() < 0.2)
        one = Draw(
            i,
            rng.randrange(2**31),
            tuple(lengths),
            batch=batch,
            heads_kv=heads_kv,
            group=group,
            narrower=_narrower(call_class, rng),
            causal=causal,
            page=_page_size(call_class, rng),
            new=new,
            rotary=rng.choice((0, 32, 64)) if new and not (is_latent or problem.has("tree")) else 0,
            interleaved=rng.random() < 0.5,
            leftpad=tuple(leftpad) if padded else None,
            by_idx=not config.page_rows and rng.random() < 0.3,
            num_splits=splits,
            batch_invariant=invariant,
            layout=rng.choice(("bshd", "bhsd")),
            **options,
        )
        found.append(one)
    return found


def _rows_of_config(call_class: CallClass, rng: random.Random) -> tuple[int, int]:
    """(rows, group): rows of a tile, a multiple of the query heads per key head, which select the config of the class."""
    config, problem = call_class.config, call_class.problem
    choices: Sequence[tuple[int, int]] = ((1, 64), (65, 300))
    fitting = [
        (low, high)
        for low, high in choices
        if configs.decode_config(problem, low, config.page_rows).warpgroups == config.warpgroups
    ]
    low, high = rng.choice(fitting)
    queries = MAX_NODES if problem.has("tree") else high  # per sequence
    group = rng.choice([n for n in (1, 1, 2, 3, 4, 5, 8, 16) if low <= n * queries and n <= high])
    high = min(high, group * queries)
    edges = [n for n in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 193, 300) if low <= n <= high]
    rows = rng.choice((rng.randint(low, high), rng.choice(edges)))
    rows = -(-rows // group) * group
    if rows > high:
        rows -= group
    if rows < low:
        rows += group
    return rows, group
