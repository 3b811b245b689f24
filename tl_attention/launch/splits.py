"""CTAs that share the keys of a tile of a forward: the number of splits, the tiles of the schedule stream-K, and the times that decide."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tl_attention.config import configs
from tl_attention.config.buckets import Facts, bucket_of
from tl_attention.config.costs import Costs
from tl_attention.problem.attn_problem import (
    FEW_BUCKET,
    MAX_SPLITS,
    SPLIT_BUCKET,
    TABLE_ROWS,
    AttnProblem,
)
from tl_attention.problem.options import Options

MAX_STEPS = 2**31  # a step's number times the sharers is an int32 in the kernel
TILE = 128  # queries and keys per tile, assumed before the config is known


class Sharing(NamedTuple):
    """Tiles of a forward that CTAs may share by their keys."""

    block_M: int
    block_N: int
    causal: bool


@functools.lru_cache(maxsize=1024)
def sharing(problem: AttnProblem, gpu_name: str) -> Sharing | None:
    """The tiles of a problem that CTAs may share on a GPU (by its name in torch); None if they may not."""
    config = configs.sharing_config(problem, gpu_name)
    return config and Sharing(config.block_M, config.block_N, problem.causal)


@functools.lru_cache(maxsize=4096)
def shared_tiles(tiles: int, steps: int, costs: Costs) -> tuple[int, int]:
    """(whole, sharers) of the schedule stream-K: tiles that one CTA computes, the first ones, and the number of CTAs that share the others.

    512 tiles on 132 SMs are three per SM and 116 more, for which 16 SMs would wait. The model, in steps as key_splits(): CTAs begin to
    share at the same time; a tile is cut into equal pieces, or all shared tiles together, where some CTAs have pieces of two.

    Args:
        steps: key blocks per tile.
    """
    sms, stream_k = costs.sms, costs.stream_k
    left = tiles % sms
    numbers = (*range(2 * left, sms + 1, left), sms) if left else ()
    choices = [n for n in numbers if left * steps >= n * stream_k.least_steps]
    sharers = min(choices, key=lambda n: pieces_time(left, steps, n, costs), default=0)
    if not sharers or left * steps * (sms + 1) >= MAX_STEPS:
        return tiles, 0
    saved = steps + costs.forward.tile - pieces_time(left, steps, sharers, costs)
    return (tiles - left, sharers) if saved >= stream_k.least_gain else (tiles, 0)


def pieces_time(
    tiles: int, steps: int, sharers: int, costs: Costs, step: float = 1, second: float | None = None
) -> float:
    """Time of `tiles` tiles that `sharers` CTAs share, see shared_tiles().

    Args:
        step: time of a step.
        second: cost of the second piece of a CTA; None: costs.forward.tile, as of the first.
    """
    pieces, uneven = -(-sharers // tiles), sharers % tiles > 0
    merged = pieces - 1 + uneven
    fixed = costs.forward.tile
    second = fixed if second is None else second
    return -(-tiles * steps // sharers) * step + fixed + uneven * second + merged * costs.stream_k.partial


@functools.lru_cache(maxsize=4096)
def causal_shares(
    heads: int, seqlen_q: int, seqlen_k: int, block_M: int, block_N: int, costs: Costs
) -> tuple[int, int, int]:
    """(cost of a head, sharers, cost of a tile beside its steps) of the schedule stream-K under a causal mask, whose CTAs share all tiles.

    Args:
        heads: those of all batch entries.
    """
    tile_cost, least = costs.stream_k.causal_tile, costs.stream_k.least_steps
    cost = sum(tile_cost + steps for steps in causal_steps(seqlen_q, seqlen_k, block_M, block_N))
    total = heads * cost
    sharers = min(costs.sms, total // (tile_cost + least), (MAX_STEPS - 1) // total)
    return cost, max(sharers, 1), tile_cost


def share_arguments(
    shares: Sharing, heads: int, seqlen_q: int, seqlen_k: int, costs: Costs, num_splits: int = 0
) -> tuple[int, tuple[int, ...]]:
    """(ctas, last launch arguments) of the schedule stream-K.

    The arguments are the number of tiles that one CTA computes and the number of sharers; under a causal mask, where all tiles are
    shared, the cost of a head, the number of sharers and tile_cost. See kernels.shared_tiles.SharedPieces.

    Args:
        heads: those of all batch entries.
        num_splits: with 1 no tile is shared; under a causal mask no row of the tables has this schedule then.
    """
    if shares.causal:
        cost, sharers, tile_cost = causal_shares(
            heads, seqlen_q, seqlen_k, shares.block_M, shares.block_N, costs
        )
        return sharers, (cost, sharers, tile_cost)
    tiles = heads * -(-seqlen_q // shares.block_M)
    whole, sharers = (
        (tiles, 0) if num_splits == 1 else shared_tiles(tiles, -(-seqlen_k // shares.block_N), costs)
    )
    return min(tiles, costs.sms) if whole else sharers, (whole, sharers)


def causal_steps(seqlen_q: int, seqlen_k: int, block_M: int, block_N: int) -> list[int]:
    """Steps of the tiles of a head under a causal mask, in the order of their queries."""
    past_diagonals = (first + block_M + seqlen_k - seqlen_q for first in range(0, seqlen_q, block_M))
    return [max(-(-min(keys, seqlen_k) // block_N), 1) for keys in past_diagonals]


@functools.lru_cache(maxsize=4096)
def key_splits(tiles: int, steps: int, costs: Costs) -> int:
    """Number of splits per tile, each of at least two key blocks: the fewest that take nearly the shortest time, see Costs.fewest().

    The model: CTAs run in waves of one per SM, all as long as the longest tile, which has `steps` key blocks. The longest tile decides if
    there is one wave, and causal tiles of a chunk after many cached keys have nearly equal lengths.
    """
    if tiles >= costs.forward.most_tiles * costs.sms:
        return 1
    most = min(MAX_SPLITS, max(steps // 2, 1))
    return costs.fewest({n: splits_time(tiles, steps, n, costs) for n in range(1, most + 1)})


def splits_time(tiles: int, steps: float, splits: int, costs: Costs, step: float = 1) -> float:
    """Time of tiles whose steps `splits` CTAs share, see key_splits(). step: time of a step."""
    forward = costs.forward
    combine = forward.launch + splits * forward.partial if splits > 1 else 0
    waves = -(-tiles * splits // costs.sms)
    return waves * (-(-steps // splits) * step + forward.tile) + combine


def fwd_bucket(
    batch: int, heads: int, seqlen_q: int, seqlen_k: int, costs: Costs, shares: Sharing | None = None
) -> str:
    """Bucket of a forward in the tuned table. shares: tiles that CTAs may share."""
    sharing = sharing_bucket(batch * heads, seqlen_q, seqlen_k, costs, shares)
    return bucket_of("fwd", Facts(seqlen_q, seqlen_k, seqlen_k, sharing=sharing))


def sharing_bucket(
    heads: int, seqlen_q: int, seqlen_k: int, costs: Costs, shares: Sharing | None = None
) -> str | None:
    """FEW_BUCKET or SPLIT_BUCKET if CTAs share tiles so, else None. heads: those of all batch entries."""
    splits = key_splits(heads * -(-seqlen_q // TILE), -(-seqlen_k // TILE), costs)
    if shares and saves_time(shares, heads, seqlen_q, seqlen_k, costs, splits):
        return FEW_BUCKET
    return SPLIT_BUCKET if splits > 1 else None


def saves_time(shares: Sharing, heads: int, seqlen_q: int, seqlen_k: int, costs: Costs, splits: int) -> bool:
    """True if the schedule stream-K takes less time than whole tiles, or than `splits` CTAs per tile.

    Args:
        heads: those of all batch entries.
    """
    if shares.causal:
        return _saves_time_under_causal_mask(shares, heads, seqlen_q, seqlen_k, costs, splits)
    sms, of_stream_k = costs.sms, costs.stream_k
    tiles, steps = heads * -(-seqlen_q // shares.block_M), -(-seqlen_k // shares.block_N)
    whole, sharers = shared_tiles(tiles, steps, costs)
    if not sharers or whole > of_stream_k.most_waves * sms:
        return False
    shared = pieces_time(tiles - whole, steps, sharers, costs, of_stream_k.running_max, of_stream_k.second)
    if splits > 1:
        return shared + of_stream_k.least_gain < _splits_time_of(
            shares, heads, seqlen_q, steps, costs, splits
        )
    return shared + of_stream_k.begin + whole // sms * of_stream_k.whole <= steps + costs.forward.tile


def _splits_time_of(
    shares: Sharing, heads: int, seqlen_q: int, steps: float, costs: Costs, splits: int
) -> float:
    """splits_time() in steps of a shared tile with a held row max. Tiles of TILE queries may have fewer empty rows."""
    blocks, rows = -(-seqlen_q // TILE), -(-seqlen_q // shares.block_M) * shares.block_M
    step = costs.stream_k.running_max * blocks * TILE / rows
    return splits_time(heads * blocks, steps, splits, costs, step)


def _saves_time_under_causal_mask(
    shares: Sharing, heads: int, seqlen_q: int, seqlen_k: int, costs: Costs, splits: int
) -> bool:
    """saves_time() in steps of 128 keys. Whole tiles run the longest first; some SM has k + 1 of the k * sms + 1 longest."""
    sms, running, fixed = costs.sms, costs.stream_k.running_max, costs.forward.tile
    blocks = shares.block_M, shares.block_N
    tiles, step = heads * -(-seqlen_q // shares.block_M), shares.block_N / TILE
    if tiles * (running - 1) > sms:  # the last wave is less than a running row max costs
        return False
    steps = causal_steps(seqlen_q, seqlen_k, *blocks)[::-1]
    cost, sharers, _ = causal_shares(heads, seqlen_q, seqlen_k, *blocks, costs)
    share = heads * cost / sharers
    merged = -(-steps[0] // share)
    shared = step * running * share + fixed + (1 + merged) * costs.stream_k.partial
    if splits > 1:
        return shared < _splits_time_of(shares, heads, seqlen_q, steps[0] * step, costs, splits)
    waves = (steps[i // heads] * (i // sms + 1) for i in range(0, tiles, sms))
    return shared < step * max(heads * sum(steps) / sms, *waves) + fixed


def packed_splits(options: Options, total_q: int, total_k: int, heads: int, costs: Costs) -> int:
    """Number of splits for packed sequences: num_splits, else key_splits of the upper bounds of their lengths; or BATCH_INVARIANT."""
    if options.num_splits:
        return min(options.num_splits, MAX_SPLITS)
    batch = options.cu_seqlens_q.shape[0] - 1
    longest_q = min(options.max_seqlen_q, total_q)
    tiles = min(total_q // TABLE_ROWS + batch, batch * -(-longest_q // TABLE_ROWS))
    keys = min(options.max_seqlen_k, total_k, options.left + options.right + TABLE_ROWS)  # per tile
    return key_splits(heads * tiles, -(-keys // TILE), costs)
