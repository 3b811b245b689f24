"""Roles of a CTA's warps: one producer warp loads tiles by TMA, the consumer warpgroups compute on them.

The consumers share one body of code, in which the warpgroup is a runtime value, or each have a copy. One body has half the instructions
and so needs less instruction cache. With it the forward took 3.2 % less time on average, and 4 to 20 % less with a window of 127; decode
0.6 % less; the forward with dropout 10 % more; the deterministic backward, with one body in dq, between 1 % less and 5.5 % more (H200,
2026-11-22).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.cuda import source

WARPGROUP = 128  # threads


@dataclass(frozen=True)
class Roles:
    """Division of a CTA's threads into consumer warpgroups and the producer's warps behind them.

    Args:
        warpgroups: consumer warpgroups.
        threads: threads per CTA, including the producer's.
        registers: registers per thread of (the producer, the consumers), then of the warpgroup apart, if there is one; None: as at launch.
        one_body: consumers share one body of code; else each warpgroup has a copy.
        apart: there is a warpgroup between the consumers and the producer's warps; not with one_body.
    """

    warpgroups: int
    threads: int
    registers: tuple[int, ...] | None
    one_body: bool
    apart: bool = False

    @property
    def block(self) -> Any:
        """The `threads` argument of T.Kernel."""
        return (WARPGROUP, self.threads // WARPGROUP) if self.one_body else self.threads

    @property
    def prelude(self) -> str | None:
        """CUDA source that the kernel needs in front of its own; None: none."""
        return source("elect_one_thread") if self.one_body else None

    @property
    def copies(self) -> tuple[int, ...]:
        """Warpgroups to make a copy of the consumers' code for."""
        return () if self.one_body else tuple(range(self.warpgroups))

    @property
    def producer_thread(self) -> int:
        """First thread of the producer's warps."""
        return WARPGROUP * (self.warpgroups + self.apart)

    @T.inline
    def run(self, produce, consume, assist=None, more=(), assist_warps=1, apart=None, more_warps=1):
        """Run produce() in the producer warp, and consume(w) in consumer warpgroup w.

        assist: function that the warp after the producer's runs, or that `assist_warps` warps run.
        more: up to two functions that the warps after it run, or one that `more_warps` warps run; not with one_body.
        apart: function that the warpgroup apart runs.
        """
        if self.one_body:
            if T.get_thread_binding(1) == self.warpgroups:
                if self.registers is not None:
                    T.dec_max_nreg(self.registers[0])
                if T.get_thread_binding() < 32:
                    produce()
                if assist is not None:
                    # Not one condition: TileLang 0.1.15 would elect a thread of another warp to start copies
                    if T.get_thread_binding() >= 32:
                        if T.get_thread_binding() < 32 + 32 * assist_warps:
                            assist()
            else:
                if self.registers is not None:
                    T.inc_max_nreg(self.registers[1])
                w = T.shfl_sync(T.get_thread_binding(1), 0)  # from one lane, so in a uniform register
                consume(w)
        else:
            thread = T.get_thread_binding()
            if thread >= self.producer_thread:
                if self.registers is not None:
                    T.dec_max_nreg(self.registers[0])
                if assist is None:
                    if thread < self.producer_thread + 32:
                        produce()
                elif len(more) == 0:
                    if thread < self.producer_thread + 32:
                        produce()
                    elif thread < self.producer_thread + 32 + 32 * assist_warps:
                        assist()
                else:
                    if thread < self.producer_thread + 32:
                        produce()
                    elif thread < self.producer_thread + 64:
                        assist()
                    elif thread < self.producer_thread + 64 + 32 * more_warps:
                        more[0]()
                    elif len(more) > 1:
                        more[1]()
            if self.apart:
                with T.ws(self.warpgroups):
                    T.dec_max_nreg(self.registers[2])
                    apart()
            for w in self.copies:
                with T.ws(w):
                    if self.registers is not None:
                        T.inc_max_nreg(self.registers[1])
                    consume(w)
