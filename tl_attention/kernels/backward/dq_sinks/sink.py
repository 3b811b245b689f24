"""How dQ leaves a pass of the backward by keys: as additions to sums in global memory, or stored whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tl_attention.config.kernel_configs import BwdPass
from tl_attention.kernels.backward.dq_sinks.apart import DqMemory, SumsByTma
from tl_attention.kernels.backward.dq_sinks.one_tile import DqTiles
from tl_attention.kernels.backward.dq_sinks.order import AddingOrder, AnyOrder, OrderedBlocks
from tl_attention.kernels.backward.dq_sinks.registers import SumsFromRegisters
from tl_attention.kernels.backward.dq_sinks.round import DqRounding, NoRounding, RecycledBlocks, Rounding
from tl_attention.kernels.backward.dq_sinks.round_packed import PackedRounding, RingBlocks
from tl_attention.kernels.backward.key_tiles import dq_pieces
from tl_attention.kernels.sources.tiles import FragmentBlocks
from tl_attention.problem.attn_problem import AttnProblem


class DqSink(Protocol):
    """How dQ of a step goes from the registers of the consumers to global memory.

    The consumers call wait_free(), add() and announce(), in this order. In the order "apart" they call none, as they do not compute dQ.
    """

    rounding: Rounding | NoRounding

    @property
    def tiles_wait(self) -> bool:
        """True if a tile may wait for tiles that were drawn before it."""

    def row_block(self, tiles: Any, tile: Any, blocks: Any) -> Any:
        """Row block of the sums that dQ of the current step is added to; 0 where add() does not read it."""

    def wait_free(self, step: Any) -> None:
        """Wait until dQ of a step may be added."""

    def add(self, w: Any, acc_dq: tuple, row_block: Any) -> None:
        """Add what warpgroup w has computed of dQ of a step: a fragment per piece of key_tiles.dq_pieces()."""

    def announce(self, step: Any) -> None:
        """Report that this warp has added its share of a step."""

    def further_warps(self, producer: Any) -> tuple[Callable[[], None], ...]:
        """Functions of the warps beside the producer that store or round dQ, or keep the order of additions."""


def rounding_of(
    problem: AttnProblem,
    config: BwdPass,
    tensors: tuple[Any, Any, Any],
    counts: Any,
    heads_kv: Any,
    slots: Any,
    rounded_q: Any,
    table: Any,
) -> Rounding | NoRounding:
    """Sums of dQ of a pass, and how they are rounded.

    Args:
        tensors: dQ, dQ_sum and the progress of the rounding.
        slots: units whose sums exist at a time, see DqRounding; with packed sequences tiles of the ring.
        rounded_q: rows of the sums of a head.
        table: tile table of keys with packed sequences, else None.
    """
    dQ, dQ_sum, progress = tensors
    if not config.rounds(problem):
        Sums = OrderedBlocks if config.is_ordered else FragmentBlocks
        return NoRounding(Sums(dQ_sum, rounded_q // 16))
    common = problem, config, dQ
    launch = progress, counts, heads_kv
    if table is None:
        sums = RecycledBlocks(dQ_sum, rounded_q // 16, slots * counts.heads_per_kv)
        return DqRounding(*common, sums, *launch, rounded_q, slots)
    return PackedRounding(*common, RingBlocks(dQ_sum, None, slots, counts.heads_per_kv), *launch, table)


def alloc_dq_sink(
    problem: AttnProblem, config: BwdPass, rounding: Rounding | NoRounding, turns: Any, softmax_scale: Any
) -> DqSink:
    """The DqSink of a pass, with its shared memory.

    Args:
        rounding: of rounding_of(), with the sums.
        turns: kernel argument of order.OrderKeeper.
    """
    pieces = dq_pieces(config.block_M, problem.head_dim, config.warpgroups)
    warps = 4 if config.dq_apart else 4 * config.warpgroups
    if config.one_tile:
        return DqTiles(pieces, problem.dtype_of("dq"), warps, softmax_scale)
    order = AddingOrder(warps) if config.is_ordered else AnyOrder()
    if config.dq_apart:
        return SumsByTma(order, turns, rounding, softmax_scale, DqMemory(name="dq_sums"))
    return SumsFromRegisters(order, turns, rounding, pieces)
