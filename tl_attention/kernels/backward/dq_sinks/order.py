"""Additions to the sums of dQ in a fixed order, so that gradients are equal bit by bit from run to run.

The key tiles of a head add to a row block of dQ one after another, in the order in which CTAs draw them, rank 0 first. A number per row
block in global memory, Turns, is the rank of the tile that may add next; where the tile before has no such queries, 0. A tile waits only
for tiles that were drawn before it, so however few CTAs run, the one with the first tile goes on.

The consumers see two barriers in shared memory. Two warps beside the producer keep the numbers: one waits for the turn of each step and
admits the consumers, the other passes the turn on once they have added. What they wait for in global memory is hidden so as long as the
tile before is a step ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.backward.load import KeyTileProducer
from tl_attention.kernels.sources.tiles import FragmentBlocks


@dataclass(frozen=True)
class OrderedBlocks(FragmentBlocks):
    """FragmentBlocks of dQ that wgmma fragments [64, cols] are added to by red instructions. Needs turns.cuh.

    Where a kernel has a fence, nvcc 13.0.88 makes atom instructions of those of FragmentBlocks, which wait for an answer.
    """

    @T.inline
    def add(self, acc, row_block, first_col):
        name = f"tl_attention_add_fragment<{acc.shape[1]}, {self.tensor.shape[1]}>"
        T.evaluate(
            T.call_extern(
                "handle", name, T.address_of(self.tensor[row_block, first_col // 8, 0, 0]), acc.data
            )
        )


class AnyOrder:
    """Additions that wait for nothing; with the methods of AddingOrder and TmaTurns."""

    tiles_wait = False

    def wait(self, step: Any) -> None:
        return None

    def announce(self, step: Any) -> None:
        return None

    def by_tma(self) -> AnyOrder:
        return self

    def begin(self, step: Any) -> None:
        return None

    def end(self) -> None:
        return None

    def further_warps(self, producer: KeyTileProducer, turns: Any) -> tuple[Callable[[], None], ...]:
        return ()


@T.meta_class
class AddingOrder:
    """Barriers of ordered additions, two slots each: step i uses slot i % 2.

    A step is admitted after the warp that passes turns on has seen the additions of two steps before. So no barrier is two phases ahead of
    a warp that waits for it.
    """

    tiles_wait = True

    def __init__(self, adding_warps: int, name: str = "adding"):
        self.admitted = T.alloc_barrier([1, 1])  # dQ of the step may be added
        self.added = T.alloc_barrier([adding_warps] * 2)  # every warp that adds has added its share
        self.taken_on = T.alloc_barrier([1, 1])  # the warp that passes turns on has seen that

    def wait(self, step: Any) -> Any:
        """Wait until dQ of a step may be added."""
        return T.mbarrier_wait_parity(self.admitted[step % 2], step // 2 % 2)

    @T.inline
    def announce(self, step):
        """Report that this warp has added its share of a step."""
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.added[step % 2])

    def by_tma(self) -> TmaTurns:
        """Turns of a warp that adds by TMA."""
        return TmaTurns(self)

    def further_warps(self, producer: KeyTileProducer, turns: Any) -> tuple[Callable[[], None], ...]:
        """Functions of the warps that keep the order. turns: of OrderKeeper."""
        keeper = OrderKeeper(producer, self, turns)
        return keeper.admit, keeper.pass_on


@T.meta_class
class TmaTurns:
    """Turns of a warp that adds by TMA: additions of a step are announced when the next one begins. Needs fence_additions.cuh."""

    def __init__(self, adding: AddingOrder, name: str = "turns"):
        self.adding = adding
        self.step = T.alloc_var("int32", init=-1)  # whose additions are under way; -1: none are

    @T.inline
    def begin(self, step):
        """End the turn of the step before, and wait for the turn of this step."""
        if self.step[0] >= 0:
            self.end()
        self.adding.wait(step)
        T.evaluate(T.call_extern("handle", "tl_attention_fence_additions"))
        self.step[0] = step

    @T.inline
    def end(self):
        """Announce the additions that are under way, when they are complete."""
        T.tma_store_wait(0, False)
        self.adding.announce(self.step[0])
        self.step[0] = -1


@dataclass(frozen=True)
class OrderKeeper:
    """The two warps that keep the order of a CTA's additions.

    Args:
        adding: the barriers through which they see the warps that add.
        turns: int32, one per row block of dQ_sum; read and written at the first row block of a step.
    """

    producer: KeyTileProducer
    adding: AddingOrder
    turns: Any

    def place(self, tile: Any, blocks: Any) -> Any:
        """Address of the turn of a step."""
        producer = self.producer
        sums = producer.smem.dq.rounding.sums
        return T.address_of(self.turns[producer.tiles.dq_row_block(sums, tile, blocks.head, blocks.query)])

    @T.inline
    def admit_step(self, step, tile, blocks):
        """Wait for the turn of a step, and admit the warps that add."""
        T.mbarrier_wait_parity(self.adding.taken_on[step % 2], step // 2 % 2 ^ 1)
        if T.get_thread_binding() % 32 == 0:
            if blocks.query + self.producer.config.block_M > tile.shared_from[0]:
                T.evaluate(
                    T.call_extern("handle", "tl_attention_await_turn", self.place(tile, blocks), tile.rank[0])
                )
            T.mbarrier_arrive(self.adding.admitted[step % 2])

    @T.inline
    def pass_step_on(self, step, tile, blocks):
        """Wait for the additions of a step, and pass its turn on."""
        T.mbarrier_wait_parity(self.adding.added[step % 2], step // 2 % 2)
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.adding.taken_on[step % 2])
            T.evaluate(
                T.call_extern("handle", "tl_attention_pass_turn", self.place(tile, blocks), tile.rank[0] + 1)
            )

    def admit(self) -> None:
        """Run admit_step() for each step."""
        self.producer.each_step(self.admit_step)

    def pass_on(self) -> None:
        """Run pass_step_on() for each step."""
        self.producer.each_step(self.pass_step_on)
