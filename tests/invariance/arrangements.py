"""Rearranged calls on tensors: the queries of a set of sequences in other batches, chunks, caches and pages, and their reference."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from matrix.memory import bits

from tl_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

from .draws import Draw, OptionSet, Run, SequenceSet

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MOST_POSITIONS = 1500  # of a sequence that are decoded in one call
LOUD = 30.0  # scale of other sequences, whose row max is far from that of the compared ones
FIRST = 3  # differing rows that a failure names
# Queries per sequence and call of a cache: tiles of one and of two warpgroups
QUERIES = (2, 3, 5, 8, 15, 16, 17, 40, 64, 65, 100, 300)

Pair = tuple[torch.Tensor, torch.Tensor]


class Rows(NamedTuple):
    """Queries first to last - 1 of sequence i."""

    i: int
    first: int
    last: int

    def __str__(self) -> str:
        return f"sequence {self.i} rows {self.first} to {self.last - 1}"


@dataclass(frozen=True)
class Compared:
    """Rows whose bits are other ones, on the device.

    Args:
        out, lse: [rows, heads], true where out or lse differs.
    """

    what: str
    rows: Rows
    out: torch.Tensor
    lse: torch.Tensor

    def text(self) -> str:
        """The first differing rows."""
        found = []
        for name in ("out", "lse"):
            wrong = getattr(self, name).nonzero().tolist()
            if wrong:
                first = ", ".join(f"query {self.rows.first + row} head {head}" for row, head in wrong[:FIRST])
                found.append(f"{name} of {len(wrong)} of {getattr(self, name).numel()} differs: {first}")
        return f"{self.what}, {self.rows}: {'; '.join(found)}"


class Sequences:
    """Tensors of a set of sequences, and its reference: a training forward of each sequence alone.

    Latent attention has no forward: there it is a decode of all queries of a sequence alone.

    Attributes:
        q, k, v: [rows, heads, columns] per sequence.
        out, lse: [queries, heads, columns] and [heads, queries] per sequence.
    """

    def __init__(self, run: Run, options: OptionSet, sequences: SequenceSet, device: str):
        self.run, self.options, self.drawn, self.device = run, options, sequences, device
        self.dtype = TORCH_DTYPES[run.dtype]
        self.generator = torch.Generator(device).manual_seed(sequences.seed)
        of = [self.tensors(*lengths) for lengths in sequences.lengths]
        self.q, self.k, self.v = ([x[n] for x in of] for n in range(3))
        heads = sequences.heads
        self.slopes = torch.logspace(-1, -6, heads, 2.0, device=device)
        self.sink = torch.linspace(-1, 3, heads, device=device)
        self.scale = run.head_dims[0] ** -0.5
        alone = self.decoded_alone if run.is_latent else self.forward_alone
        found = [alone(Rows(i, 0, queries)) for i, (queries, _) in enumerate(sequences.lengths)]
        self.out, self.lse = ([x[n] for x in found] for n in range(2))

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def tensors(self, queries: int, keys: int, loud: float = 1.0) -> tuple[torch.Tensor, ...]:
        """q, k, v of a sequence. Some keys are long, so that the row max grows late."""
        head_dim, head_dim_v = self.run.head_dims
        q = self.randn(queries, self.drawn.heads, head_dim) * (self.drawn.scale * loud)
        k = self.randn(keys, self.drawn.heads_kv, head_dim)
        k[::97] *= 3
        return q, k, k[..., :head_dim_v] if self.run.is_latent else self.randn(keys, k.shape[1], head_dim_v)

    def arguments(self, heads: torch.Tensor | None = None) -> dict[str, Any]:
        """Keyword arguments of every call; heads: those of q, None: all."""
        found: dict[str, Any] = {"batch_invariant": True, "softmax_scale": self.scale}
        found["causal"] = self.options.is_causal
        if self.options.has("window") or self.options.has("band"):
            found["window_size"] = self.drawn.window
        if self.options.has("softcap"):
            found["softcap"] = self.drawn.softcap
        for word, name, x in (("sink", "learnable_sink", self.sink), ("alibi", "alibi_slopes", self.slopes)):
            if self.options.has(word):
                found[name] = x if heads is None else x[heads]
        return found

    def keys_of(self, rows: Rows) -> int:
        """Keys of a call whose last query is the last of these rows: the diagonal is at the end."""
        queries, keys = self.drawn.lengths[rows.i]
        return max(keys - queries + rows.last, 0) if self.options.is_causal else keys

    def may_end(self, i: int, last: int) -> bool:
        """True if a call may end with this query: one whose window has later keys may not, as it then has other neighbours."""
        return last == self.drawn.lengths[i][0] or not self.options.has("band")

    def forward_alone(self, rows: Rows) -> Pair:
        """(out, lse) of flash_attn_func of one sequence."""
        keys = self.keys_of(rows)
        q, k, v = self.q[rows.i][rows.first : rows.last], self.k[rows.i][:keys], self.v[rows.i][:keys]
        out, lse, _ = flash_attn_func(q[None], k[None], v[None], return_attn_probs=True, **self.arguments())
        return out[0], lse[0]

    def decoded_alone(self, rows: Rows) -> Pair:
        """(out, lse) of flash_attn_with_kvcache of one sequence."""
        keys = self.keys_of(rows)
        q, k, v = self.q[rows.i][rows.first : rows.last], self.k[rows.i][:keys], self.v[rows.i][:keys]
        out, lse = flash_attn_with_kvcache(
            q[None], k[None], v[None], return_softmax_lse=True, **self.arguments()
        )
        return out[0], lse[0]


class Arrangement:
    """The calls of one draw.

    Attributes:
        compared: results beside the reference, in the order of the calls.
    """

    def __init__(self, sequences: Sequences, draw: Draw):
        self.of, self.draw, self.page = sequences, draw, draw.page
        self.device = sequences.device
        self.random, self.compared = random.Random(draw.seed), list[Compared]()
        self.heads, self.heads_kv = self._choose_heads()
        self.arguments = sequences.arguments(self.heads)

    def _choose_heads(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Heads of q and of k that the calls have; None: all. A tensor-parallel rank has some, and keys may be repeated per query head."""
        drawn = self.of.drawn
        kind = self.random.random()
        if kind < 0.6 or self.of.options.depends_on_chunk:
            return None, None
        heads_kv, group = drawn.heads_kv, drawn.group
        first = self.random.randrange(heads_kv)
        keys = list(range(first, self.random.randint(first + 1, heads_kv)))
        fewer = self.random.randint(1, group)
        heads = [i * group + j for i in keys for j in range(fewer)]
        if kind < 0.7 and not self.of.run.is_latent:
            keys = [i for i in keys for _ in range(fewer)]
        return torch.tensor(heads, device=self.device), torch.tensor(keys, device=self.device)

    def q(self, rows: Rows) -> torch.Tensor:
        return self._of_heads(self.of.q[rows.i][rows.first : rows.last], self.heads)

    def kv(self, i: int, keys: int) -> Pair:
        return tuple(self._of_heads(x[i][:keys], self.heads_kv) for x in (self.of.k, self.of.v))

    def _of_heads(self, x: torch.Tensor, heads: torch.Tensor | None) -> torch.Tensor:
        return x if heads is None else x[:, heads]

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def run(self) -> list[Compared]:
        """Make the calls. Returns what differs from the reference."""
        getattr(self, self.draw.kind.replace(" ", "_"))()
        return self.compared

    def compare(self, what: str, rows: Rows, out: torch.Tensor, lse: torch.Tensor, by_cache: bool) -> None:
        """Compare out [rows, heads, columns] and lse [heads, rows] of a call to the reference."""
        if rows.first == rows.last:
            return
        of = self.of
        whole = rows.first == 0 and rows.last == of.drawn.lengths[rows.i][0]
        if of.options.depends_on_chunk and (by_cache or not whole):
            wanted, wanted_lse = (of.decoded_alone if by_cache else of.forward_alone)(rows)
        else:
            wanted, wanted_lse = (
                of.out[rows.i][rows.first : rows.last],
                of.lse[rows.i][:, rows.first : rows.last],
            )
        if self.heads is not None:
            wanted, wanted_lse = wanted[:, self.heads], wanted_lse[self.heads]
        if out.shape != wanted.shape or lse.shape != wanted_lse.shape:
            raise AssertionError(f"{what}, {rows}: shapes {tuple(out.shape)}, {tuple(lse.shape)}")
        differs = differing_bits if out.is_cuda else differing_much
        self.compared.append(
            Compared(what, rows, differs(out, wanted).any(-1), differs(lse, wanted_lse).transpose(0, 1))
        )

    # Forwards

    def packed(self) -> None:
        """Sequences in another order, in part, among others, with rows that are not used."""
        lengths = self.of.drawn.lengths
        chosen = self.random.sample(range(len(lengths)), self.random.randint(1, len(lengths)))
        entries: list[Rows | None] = [Rows(i, 0, lengths[i][0]) for i in chosen]
        for _ in range(self.random.choice((0, 0, 1, 2))):
            entries.insert(self.random.randint(0, len(entries)), None)
        self._varlen(entries, "packed", self.random.random() < 0.3)

    def chunks(self) -> None:
        """Sequences in chunks of any sizes, one chunk of each per call."""
        lengths, waiting = self.of.drawn.lengths, []
        for i in self.random.sample(range(len(lengths)), self.random.randint(1, min(3, len(lengths)))):
            cuts = self._cuts(i)
            pieces = [Rows(i, *pair) for pair in itertools.pairwise((0, *cuts, lengths[i][0]))]
            waiting.append([rows for rows in pieces if self.of.may_end(i, rows.last)])
        calls = itertools.zip_longest(*waiting)
        for number, call in enumerate(calls):
            entries: list[Rows | None] = [rows for rows in call if rows is not None]
            self.random.shuffle(entries)
            self._varlen(entries, f"call {number}", False)

    def _cuts(self, i: int) -> list[int]:
        """Where a sequence is cut: anywhere, and around one token."""
        length = self.of.drawn.lengths[i][0]
        if length < 2:
            return []
        cuts = {self.random.randrange(1, length) for _ in range(self.random.randint(1, 3))}
        if self.random.random() < 0.5:
            cuts.add(min(max(cuts) + 1, length - 1))
        return sorted(cuts)

    def dense(self) -> None:
        """A sequence in a batch of others, in rows of any strides."""
        lengths = self.of.drawn.lengths
        i = self.random.randrange(len(lengths))
        queries, keys = lengths[i]
        batch = self.random.randint(1, 5)
        place = self.random.randrange(batch)
        rows = Rows(i, 0, queries)
        tensors = []
        for own, other in zip((self.q(rows), *self.kv(i, keys)), self._others(queries, keys), strict=True):
            x = other[None].repeat(batch, 1, 1, 1)
            x[place] = own
            if self.random.random() < 0.3:  # heads first in memory
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            tensors.append(x)
        out, lse, _ = flash_attn_func(
            *tensors, return_attn_probs=True, num_splits=self.random.randint(0, 1), **self.arguments
        )
        self.compare(f"entry {place} of {batch}", rows, out[place], lse[place], False)

    def _others(self, queries: int, keys: int) -> list[torch.Tensor]:
        """q, k, v of a sequence that is not compared, with large scores."""
        q, k, v = self.of.tensors(queries, keys, LOUD)
        return [self._of_heads(q, self.heads), *(self._of_heads(x, self.heads_kv) for x in (k, v))]

    def _varlen(self, entries: Sequence[Rows | None], what: str, padded: bool) -> None:
        """One call of packed sequences; None: one that is not compared. padded: with rows that are not used, which are NaN."""
        tensors = []
        for rows in entries:
            if rows is None:
                tensors.append(self._others(self.random.randint(0, 200), self.random.randint(0, 300)))
            else:
                tensors.append([self.q(rows), *self.kv(rows.i, self.of.keys_of(rows))])
        used_q, used_k = ([x[n].shape[0] for x in tensors] for n in (0, 1))
        if not sum(used_q):
            return
        how: dict[str, Any] = {"num_splits": self.random.randint(0, 1), **self.arguments}
        rows_q, rows_k = used_q, used_k
        if padded and not self.page:
            rows_q, rows_k = ([n + self.random.randint(0, 70) for n in x] for x in (used_q, used_k))
            how |= {"seqused_q": self.ints(used_q), "seqused_k": self.ints(used_k)}
        ends_q, ends_k = ([0, *itertools.accumulate(x)] for x in (rows_q, rows_k))
        bound_q, bound_k = (self._bound(x) for x in (rows_q, rows_k))
        q = _joined([x[0] for x in tensors], rows_q)
        if self.page:
            k, v, table = self._pages([x[1] for x in tensors], [x[2] for x in tensors], used_k)
            how |= {"block_table": table, "seqused_k": self.ints(used_k)}
            cu_k = None
        else:
            k, v = (_joined([x[n] for x in tensors], rows_k) for n in (1, 2))
            cu_k = self.ints(ends_k)
        out, lse, _ = flash_attn_varlen_func(
            q, k, v, self.ints(ends_q), cu_k, bound_q, bound_k, return_attn_probs=True, **how
        )
        for rows, start, count in zip(entries, ends_q, used_q, strict=False):
            if rows is not None:
                end = start + count
                self.compare(
                    f"{what}, {len(entries)} entries", rows, out[start:end], lse[:, start:end], False
                )

    def _bound(self, lengths: Sequence[int]) -> int:
        """An upper bound of lengths."""
        longest = max(*lengths, 1)
        return self.random.choice((longest, longest, longest + 1, 2 * longest, max(longest, 4096), 40_000))

    # Caches

    def cache(self) -> None:
        """A chunk of each of some sequences against a cache."""
        self._attend(self.random.choice(QUERIES))

    def decode(self) -> None:
        """One token of each of some sequences, at any positions."""
        self._attend(1)

    def _attend(self, queries: int) -> None:
        """A call of flash_attn_with_kvcache: new keys or none, left padding, caches in any order, one sequence several times."""
        lengths = self.of.drawn.lengths
        found = [i for i, (n, _) in enumerate(lengths) if n]
        if not found:
            return
        chosen = [self.random.choice(found) for _ in range(self.random.choice((1, 2, 3, 5, 9)))]
        queries = min(queries, *(lengths[i][0] for i in chosen))
        ends = [self.random.randint(queries, lengths[i][0]) for i in chosen]
        entries = [
            Rows(i, last - queries, last) if self.of.may_end(i, last) else Rows(i, lengths[i][0] - queries, lengths[i][0])
            for i, last in zip(chosen, ends, strict=True)
        ]  # fmt: skip
        keys = [self.of.keys_of(rows) for rows in entries]
        new = min(self.random.choice((0, 0, 1, queries, self.random.randint(1, 20))), *keys)
        how: dict[str, Any] = {"num_splits": self.random.randint(0, 1), **self.arguments}
        rows = [self.kv(rows.i, n) for rows, n in zip(entries, keys, strict=True)]
        written = [n - new for n in keys]
        pads = [0] * len(entries)
        if not self.page and self.random.random() < 0.25:
            pads = [self.random.randint(0, 200) for _ in entries]
            how["cache_leftpad"] = self.ints(pads)
        filled = [[x[:n] for x in pair] for pair, n in zip(rows, written, strict=True)]
        if self.page:
            k, v, table = self._pages([x[0] for x in filled], [x[1] for x in filled], keys)
            how["block_table"] = table
        else:
            k, v, places = self._caches(filled, keys, pads)
            if places is not None:
                how["cache_batch_idx"] = places
        if new:
            how["k"] = torch.stack([x[0][n:] for x, n in zip(rows, written, strict=True)])
            if not self.of.run.is_latent:
                how["v"] = torch.stack([x[1][n:] for x, n in zip(rows, written, strict=True)])
        q = torch.stack([self.q(rows) for rows in entries])
        seqlens = self.ints([n + pad for n, pad in zip(written, pads, strict=True)])
        out, lse = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=seqlens, return_softmax_lse=True, **how
        )  # fmt: skip
        words = [f"{len(entries)} entries, {queries} queries, {new} new keys"]
        words += [name for name in ("cache_leftpad", "cache_batch_idx") if name in how]
        for b, one in enumerate(entries):
            self.compare(", ".join(words), one, out[b], lse[b], True)

    def each_position(self) -> None:
        """All queries of a sequence as the entries of one batch, each against the keys before it, which they share."""
        lengths = self.of.drawn.lengths
        found = [i for i, (n, _) in enumerate(lengths) if n]
        if not found:
            return
        i = self.random.choice(found)
        queries, keys = lengths[i]
        count = min(queries, MOST_POSITIONS)
        first = self.random.randint(0, queries - count)
        if self.of.options.has("band"):
            first, count = queries - 1, 1
        used = [self.of.keys_of(Rows(i, n, n + 1)) for n in range(first, first + count)]
        k, v = self.kv(i, keys)
        how: dict[str, Any] = {"num_splits": self.random.randint(0, 1), **self.arguments}
        if self.page:
            k, v, table = self._pages([k], [v], [keys])
            how["block_table"] = table.expand(count, -1).contiguous()
        else:
            k, v, _ = self._caches([(k, v)], [keys], [0], 1)
            how["cache_batch_idx"] = self.ints([0] * count)
        rows = Rows(i, first, first + count)
        out, lse = flash_attn_with_kvcache(
            self.q(rows)[:, None], k, v, cache_seqlens=self.ints(used), return_softmax_lse=True, **how
        )
        self.compare("each position", rows, out[:, 0], lse[:, :, 0].transpose(0, 1), True)

    def rollout(self) -> None:
        """Sequences that grow by tokens, which the calls write to the cache."""
        lengths = self.of.drawn.lengths
        found = [i for i, (n, keys) in enumerate(lengths) if min(n, keys)]
        if not found:
            return
        chosen = self.random.sample(found, self.random.randint(1, min(4, len(found))))
        steps = [self.random.choice((1, 1, 1, 2, 5, 33)) for _ in range(self.random.randint(1, 6))]
        room = min(min(lengths[i]) for i in chosen)
        steps = [n for n, end in zip(steps, itertools.accumulate(steps), strict=True) if end <= room] or [1]
        least = [max(n - keys, 0) for n, keys in (lengths[i] for i in chosen)]
        starts = [
            self.random.randint(low, lengths[i][0] - sum(steps)) for i, low in zip(chosen, least, strict=True)
        ]
        used = [self.of.keys_of(Rows(i, n, n)) for i, n in zip(chosen, starts, strict=True)]
        filled = [self.kv(i, n) for i, n in zip(chosen, used, strict=True)]
        rooms = [n + sum(steps) for n in used]
        how: dict[str, Any] = dict(self.arguments)
        if self.page:
            k, v, table = self._pages([x[0] for x in filled], [x[1] for x in filled], rooms)
            how["block_table"] = table
        else:
            k, v, places = self._caches(filled, rooms, [0] * len(chosen))
            if places is not None:
                how["cache_batch_idx"] = places
        done = 0
        for number, count in enumerate(steps):
            entries = [
                Rows(i, n + done, n + done + count) for i, n in zip(chosen, starts, strict=True)
            ]  # fmt: skip
            new = [
                [x[n + done : n + done + count] for x in self.kv(i, n + done + count)]
                for i, n in zip(chosen, used, strict=True)
            ]
            given = {"k": torch.stack([x[0] for x in new])}
            if not self.of.run.is_latent:
                given["v"] = torch.stack([x[1] for x in new])
            out, lse = flash_attn_with_kvcache(
                torch.stack([self.q(rows) for rows in entries]), k, v,
                cache_seqlens=self.ints([n + done for n in used]), return_softmax_lse=True, **given, **how,
            )  # fmt: skip
            for b, one in enumerate(entries):
                self.compare(f"step {number} of {steps}", one, out[b], lse[b], True)
            done += count

    def _caches(
        self,
        filled: Sequence[Sequence[torch.Tensor]],
        rooms: Sequence[int],
        pads: Sequence[int],
        most: int = 99,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """k_cache, v_cache and cache_batch_idx. All rows but the filled ones are NaN."""
        count = len(filled)
        capacity = max(n + pad for n, pad in zip(rooms, pads, strict=True)) + self.random.choice(
            (0, 1, 8, 100)
        )
        places = list(range(count))
        by_idx = most > count and self.random.random() < 0.3
        if by_idx:
            places = self.random.sample(range(count + 2), count)
        caches = [
            torch.full((count + 2 * by_idx, max(capacity, 1), *x.shape[1:]), torch.nan, dtype=x.dtype, device=self.device)
            for x in filled[0][: 1 if self.of.run.is_latent else 2]
        ]  # fmt: skip
        for place, pair, pad in zip(places, filled, pads, strict=True):
            for cache, x in zip(caches, pair, strict=False):
                cache[place, pad : pad + x.shape[0]] = x
        return caches[0], self._v_of(caches), self.ints(places) if by_idx else None

    def _v_of(self, caches: Sequence[torch.Tensor]) -> torch.Tensor:
        return caches[-1][..., : self.of.run.head_dims[1]] if self.of.run.is_latent else caches[-1]

    def _pages(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], rooms: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """k_cache, v_cache and block_table: pages in a drawn order among others. All rows but the given ones are NaN."""
        page = self.page
        counts = [-(-n // page) for n in rooms]
        total = sum(counts) + self.random.randint(1, 4)
        places = self.random.sample(range(total), sum(counts))
        width = max(*counts, 1) + self.random.choice((0, 0, 1, 5))
        table, given = [], iter(places)
        for count in counts:
            own = list(itertools.islice(given, count))
            table.append(own + [self.random.randrange(total) for _ in range(width - count)])
        pools = []
        for tensors in (keys,) if self.of.run.is_latent else (keys, values):
            rows = _joined(tensors, [n * page for n in counts])
            pool = torch.full((total, page, *rows.shape[1:]), torch.nan, dtype=rows.dtype, device=self.device)
            pool[torch.tensor(places, dtype=torch.int64, device=self.device)] = rows.unflatten(0, (-1, page))
            pools.append(pool)
        return pools[0], self._v_of(pools), self.ints(table)


def _joined(tensors: Sequence[torch.Tensor], rooms: Sequence[int]) -> torch.Tensor:
    """Tensors one after the other, each in so many rows, of which the last ones are NaN."""
    if all(x.shape[0] == n for x, n in zip(tensors, rooms, strict=True)):
        return torch.cat(list(tensors))
    found = tensors[0].new_full((sum(rooms), *tensors[0].shape[1:]), torch.nan)
    start = 0
    for x, room in zip(tensors, rooms, strict=True):
        found[start : start + x.shape[0]] = x
        start += room
    return found


def differing_bits(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Elements whose bits differ."""
    return bits(x.contiguous()) != bits(wanted.contiguous())


def differing_much(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Elements that differ by more than two roundings: the CPU path sums in an order that depends on the batch."""
    rtol = 1e-4 if x.dtype is torch.float32 else 2 * torch.finfo(x.dtype).eps
    x, wanted = x.float(), wanted.float()
    return ~torch.isclose(x, wanted, rtol=rtol, atol=rtol / 10)
