"""Attention between shards as calls of plain attention, whose mask is aligned bottom-right.

The diagonal of a query is its own token. A call on the queries [q_start, q_stop) and the keys [k_start, k_stop) of one document puts the
diagonal of its last query on its last key, which is right if both are the same token: k_stop == q_stop. Otherwise the diagonals are
k_stop - q_stop keys off, and a window (left, right) becomes (left + k_stop - q_stop, right - (k_stop - q_stop)). Queries that see none
of the keys, and keys that none of the queries sees, are cut off first, so that both bounds are at least 0.

ALiBi and dropout need the positions of tokens themselves: see Needs.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tl_attention.distributed.layout import UNLIMITED, Range

ALL = (UNLIMITED, UNLIMITED)
CAUSAL = (UNLIMITED, 0)
ALIGNMENT = 64  # int32 elements between two cu_seqlens in one tensor: 256 bytes


class Piece(NamedTuple):
    """Queries of one document and the keys that they see, as tokens of the whole sequence or as rows."""

    document: int
    q: Range
    k: Range
    window: Range  # of plain attention; ALL: every query sees every key
    place: Range = (0, 0)  # positions of the first query and the first key in the document

    @property
    def is_aligned(self) -> bool:
        """True if the last query and the last key are the same token."""
        return self.place[0] + self.q[1] - self.q[0] == self.place[1] + self.k[1] - self.k[0]

    def moved(self, q_rows: int, k_rows: int) -> Piece:
        """The piece with this many rows added to its queries and keys."""
        (q0, q1), (k0, k1) = self.q, self.k
        return self._replace(q=(q0 + q_rows, q1 + q_rows), k=(k0 + k_rows, k1 + k_rows))


class Needs(NamedTuple):
    """Options that depend on the positions of tokens. If the mask of a call does not determine these, the call is one piece with a place.

    Args:
        distances: True for ALiBi, which needs distances between queries and keys. Bottom-right alignment gives them if the last query
            and the last key are the same token.
        positions: True for dropout, which needs positions in a document and the document's number. Pieces that start at the first token
            of their document have them, as sequences between empty ones.
    """

    distances: bool = False
    positions: bool = False

    def needs_own_call(self, piece: Piece) -> bool:
        """True if a piece needs a call of its own."""
        return (self.distances and not piece.is_aligned) or (self.positions and piece.place != (0, 0))


NOTHING = Needs()


class Mask(NamedTuple):
    """Mask of packed documents of any lengths.

    Args:
        documents: cumulative lengths, as cu_seqlens.
        window: (left, right); -1: no limit. CAUSAL for a causal mask.
    """

    documents: tuple[int, ...]
    window: Range

    def document_at(self, token: int) -> int:
        """Number of the document that a token is in."""
        return bisect.bisect_right(self.documents, token) - 1

    def keys_seen(self, start: int, stop: int) -> Range:
        """Range of the keys that the queries [start, stop) of the whole sequence see."""
        left, right = self.window
        first = self.documents[self.document_at(start)]
        last = self.documents[self.document_at(stop - 1) + 1]
        first = first if left == UNLIMITED else max(first, start - left)
        return first, last if right == UNLIMITED else min(last, stop + right)

    def piece(self, document: int, q: Range, k: Range) -> Piece | None:
        """The piece of a document between a range of queries and one of keys; None if no query sees a key."""
        begin, end = self.documents[document : document + 2]
        left, right = (end - begin if n == UNLIMITED else n for n in self.window)
        (q0, q1), (k0, k1) = ((max(start, begin), min(stop, end)) for start, stop in (q, k))
        q0, q1 = max(q0, k0 - right), min(q1, k1 + left)
        k0, k1 = max(k0, q0 - left), min(k1, q1 + right)
        if q0 >= q1 or k0 >= k1:
            return None
        place = q0 - begin, k0 - begin
        ahead = k1 - q1  # the last key is this far right of the last query's own token
        if not ahead:
            return Piece(document, (q0, q1), (k0, k1), self.window, place)
        left = UNLIMITED if q1 - 1 - left <= k0 else left + ahead
        right = UNLIMITED if k1 - 1 <= q0 + right else right - ahead
        return Piece(document, (q0, q1), (k0, k1), (left, right), place)

    def pieces(self, q: Range, k: Range) -> Iterator[Piece]:
        """Pieces between a range of queries and one of keys, by document."""
        first, last = self.document_at(max(q[0], k[0])), self.document_at(min(q[1], k[1]) - 1)
        if (q[1] <= k[0] or k[1] <= q[0]) and first != last:  # no document has tokens in both
            return
        for document in range(first, last + 1):
            piece = self.piece(document, q, k)
            if piece is not None:
                yield piece


@dataclass(frozen=True, eq=False)
class Call:
    """One call of attention: pieces that follow one another and have the same window.

    Args:
        q, k: rows of the shard's queries, rows of the buffer of keys.
        lengths_q, lengths_k: per piece.
        documents: number of each piece's document.
        place: positions of the first query and the first key in the document; the window is then that of the mask. None: bottom-right
            alignment.
    """

    q: Range
    k: Range
    window: Range
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    documents: tuple[int, ...]
    place: Range | None = None

    @property
    def packed(self) -> bool:
        return len(self.lengths_q) > 1

    def cu_seqlens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cu_seqlens of queries and keys, int32, copied to a device once."""
        known = self.__dict__.setdefault("_on_device", {})
        if device not in known:
            known[device] = cumulative((self.lengths_q, self.lengths_k), device)
        return known[device]


def cumulative(lengths: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """cu_seqlens of each list of lengths, int32, by one copy to the device."""
    sizes = [-(-(len(x) + 1) // ALIGNMENT) * ALIGNMENT for x in lengths]
    whole = torch.zeros(sum(sizes), dtype=torch.int32, device="cpu")
    parts = whole.split(sizes)
    for part, x in zip(parts, lengths, strict=True):
        part[1 : len(x) + 1] = torch.tensor(x, dtype=torch.int32, device="cpu").cumsum(0)
    if device.type == "cuda":
        parts = whole.pin_memory().to(device, non_blocking=True).split(sizes)
    return tuple(part[: len(x) + 1] for part, x in zip(parts, lengths, strict=True))


def calls_of(pieces: Iterable[Piece], window: Range, needs: Needs = NOTHING) -> list[Call]:
    """Calls of pieces in rows, each with as many consecutive pieces as can share one.

    window: that of the mask.
    """
    groups: list[list[Piece]] = []
    for piece in _merged(pieces, needs):
        last = groups[-1][-1] if groups else None
        # A dense batch has one document, so its calls have one piece
        if last and last.document != piece.document and _continues(piece, last, needs):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return [_call(group, window, needs) for group in groups]


def _call(group: list[Piece], window: Range, needs: Needs) -> Call:
    q, k = (group[0].q[0], group[-1].q[1]), (group[0].k[0], group[-1].k[1])
    lengths_q = tuple(piece.q[1] - piece.q[0] for piece in group)
    lengths_k = tuple(piece.k[1] - piece.k[0] for piece in group)
    documents = tuple(piece.document for piece in group)
    if needs.needs_own_call(group[0]):
        return Call(q, k, window, lengths_q, lengths_k, documents, group[0].place)
    if needs.positions:
        count = documents[-1] + 1
        lengths_q, lengths_k = (spread(count, documents, lengths) for lengths in (lengths_q, lengths_k))
        documents = tuple(range(count))
    return Call(q, k, group[0].window, lengths_q, lengths_k, documents)


def spread(count: int, numbers: Iterable[int], lengths: Iterable[int]) -> tuple[int, ...]:
    """Lengths of `count` sequences, of which those with these numbers are not empty."""
    found = [0] * count
    for number, length in zip(numbers, lengths, strict=True):
        found[number] = length
    return tuple(found)


def _continues(piece: Piece, last: Piece, needs: Needs) -> bool:
    if needs.needs_own_call(piece) or needs.needs_own_call(last):
        return False
    return (last.q[1], last.k[1], last.window) == (piece.q[0], piece.k[0], piece.window)


def _merged(pieces: Iterable[Piece], needs: Needs) -> Iterator[Piece]:
    """Pieces of which neighbours are one where a single mask says the same."""
    last = None
    for piece in pieces:
        both = None if last is None else _union(last, piece)
        # Rows that follow one another may hold tokens that do not
        if both is not None and any(needs) and not _follows(last, piece):
            both = None
        if both is None and last is not None:
            yield last
        last = both or piece
    if last is not None:
        yield last


def _follows(a: Piece, b: Piece) -> bool:
    """True if the positions of b go on where those of a end, or are the same."""
    (q, k), (size_q, size_k) = a.place, (a.q[1] - a.q[0], a.k[1] - a.k[0])
    return b.place in ((q, k + size_k), (q + size_q, k))


def _union(a: Piece, b: Piece) -> Piece | None:
    """One piece for two of the same document, or None."""
    if a.document != b.document or a.window != ALL:
        return None
    # The same queries: keys in front, which all of them see, do not move the diagonal, which the last key fixes
    if a.q == b.q and a.k[1] == b.k[0] and b.window in (ALL, CAUSAL):
        return b._replace(k=(a.k[0], b.k[1]), place=a.place)
    if a.k == b.k and a.q[1] == b.q[0] and b.window == ALL:
        return b._replace(q=(a.q[0], b.q[1]), place=a.place)
    return None
