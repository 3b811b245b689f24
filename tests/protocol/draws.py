"""Draws of the sizes of calls.

Queries are in every residue class modulo block_M in turn; keys are fewer, as many, or more; documents may be empty or have one token.
"""

from __future__ import annotations

import random
import zlib

from tl_attention.config.catalog import PAGED
from tl_attention.problem.attn_problem import DECODE, JVP

from .calls import Draw, Kind

HEADS = (1, 1), (2, 1), (3, 3), (4, 2), (6, 2)
SMS = 1, 2, 3, 5
RESIDUES = 61  # step between residue classes of successive draws; prime, so that all come in turn


def blocks_of(kind: Kind) -> tuple[int, int]:
    """(queries, keys) per tile of the largest pass of a kind."""
    configs = getattr(kind.config, "passes", None) or (kind.config,)
    return (
        max(getattr(config, "block_M", 64) for config in configs),
        max(getattr(config, "block_N", 64) for config in configs),
    )


def draw_of(kind: Kind, number: int) -> Draw:
    """Draw number `number` of a kind; the same each time."""
    chance = random.Random(zlib.crc32(f"{kind.name} {number}".encode()))
    block_M, block_N = blocks_of(kind)
    several = kind.problem.has("varlen") or kind.direction in (PAGED, DECODE)
    most_keys = min((x.block_N for x in _passes(kind) if getattr(x, "one_tile", False)), default=None)

    def pair(i: int) -> tuple[int, int]:
        residue = ((number + i) * RESIDUES + zlib.crc32(kind.name.encode())) % block_M
        queries = residue + block_M * chance.choice((0, 0, 1, 1, 2))
        if kind.direction == DECODE:
            queries = chance.choice((1, 1, 2, 5, 17, residue + 1))
        keys = chance.choice((queries, chance.randint(0, queries), queries + chance.randint(1, 4 * block_N)))
        if several and chance.random() < 0.3:
            queries, keys = chance.choice(((0, 0), (1, 1), (0, keys), (queries, 0), (1, keys)))
        if not several:
            queries, keys = max(queries, 1), max(keys, 1)
        if kind.direction == DECODE:
            queries = max(queries, 1)
        return queries, keys if most_keys is None else min(keys, most_keys)

    lengths = tuple(pair(i) for i in range(chance.choice((1, 2, 3, 5)) if several else 1))
    if several and not any(a and b for a, b in lengths):
        lengths += ((1, 1),)
    heads, heads_kv = chance.choice(HEADS)
    window = (chance.choice((0, 17, 100, 300)), 0 if chance.random() < 0.5 else chance.choice((0, 5, 128)))
    batch = 1 if several or kind.direction == JVP else chance.choice((1, 1, 2))
    scale = chance.choice((0.1, 0.1, -0.1))
    return Draw(lengths, heads, heads_kv, batch, window, chance.choice(SMS), number, scale)


def _passes(kind: Kind) -> tuple:
    return tuple(getattr(kind.config, "passes", None) or (kind.config,))
