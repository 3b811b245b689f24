"""Roles of a pass by keys, and CUDA in front of its kernel, by its config."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tl_attention.kernel_configs import BwdPass
from tl_attention.kernels import pipeline
from tl_attention.kernels.bwd_apart import add_dq
from tl_attention.kernels.bwd_load import KeyTileProducer
from tl_attention.kernels.bwd_one_tile import send_dq
from tl_attention.kernels.bwd_order import OrderKeeper
from tl_attention.kernels.bwd_round import BLOCKS_WITH_ROWS, rounding_code
from tl_attention.kernels.bwd_round_packed import ALL_BLOCKS
from tl_attention.kernels.cuda import source
from tl_attention.kernels.input_parts import MAKE_PARTS
from tl_attention.kernels.options import prelude
from tl_attention.kernels.pipeline import APART_REGISTERS, FOUR_WARPS_REGISTERS
from tl_attention.kernels.roles import Roles
from tl_attention.part_configs import MAKERS, splits_keys
from tl_attention.problem import AttnProblem
from tl_attention.round_configs import ROUNDING_WARPS


def pass_roles(problem: AttnProblem, config: BwdPass) -> Roles:
    """Roles of a pass by keys."""
    makes_dq = "dq" in config.makes and not problem.is_fp32
    registers = pipeline.registers(problem, config.warpgroups, config.makes_parts, full=makes_dq)
    if config.dq_apart:
        registers = FOUR_WARPS_REGISTERS if config.is_ordered or config.rounds(problem) else APART_REGISTERS
    return Roles(
        config.warpgroups,
        config.threads,
        registers,
        one_body=False,
        apart=config.dq_apart,
    )


def cuda_code(problem: AttnProblem, config: BwdPass, roles: Roles) -> str | None:
    """CUDA in front of the kernel; None: none."""
    code = prelude(problem, roles) or ""
    if problem.has_bits and config.makes_all:
        code += source("prefetch_bits")
    if config.order:
        code += source("fragments")
    if problem.is_fp32 and not problem.has("varlen"):
        code += source("rows")
    if config.adds_dq and problem.is_fp32:
        code += source("add_transposed")
    if config.is_ordered:
        code += source("turns")
    if config.dq_apart:
        code += source("add_by_tma") + source("fence_additions") * config.is_ordered
    if config.rounds(problem):
        packed = problem.has("varlen")
        loop = (ALL_BLOCKS, "round_packed_dq") if packed else (BLOCKS_WITH_ROWS, "round_dq")
        code += rounding_code(problem, *loop)
    if config.is_dynamic and problem.has("varlen"):
        code += source("zero")
    if config.makes_parts:
        code += MAKE_PARTS
    if splits_keys(problem, config.makes):
        code += source("split_tile")
    return code or None


def further_warps(producer: KeyTileProducer, number: Any, turns: Any, softmax_scale: Any) -> dict[str, Any]:
    """Arguments of Roles.run() for the warps beside the producer. turns: of OrderKeeper."""
    if producer.config.makes_parts:
        ctas = producer.counts.ctas
        make = functools.partial(producer.shared.inputs.make_share, number, ctas)
        if not producer.dynamic:
            return {"assist": make, "assist_warps": MAKERS}
        return {"assist": lambda: producer.schedule(number), "more": (make,), "more_warps": MAKERS - 1}
    more: tuple[Callable[[], None], ...] = ()
    if producer.config.is_ordered:
        keeper = OrderKeeper(producer, turns)
        more = lambda: keeper.admit(), lambda: keeper.pass_on()
    elif producer.config.one_tile:
        more = (lambda: send_dq(producer),)
    elif producer.shared.rounding is not None:
        more = (lambda: producer.shared.rounding.round(softmax_scale),)
    return {
        "assist": (lambda: producer.schedule(number)) if producer.dynamic else None,
        "more": more,
        "more_warps": ROUNDING_WARPS if producer.shared.rounding is not None else 1,
    }


def dq_warpgroup(producer: KeyTileProducer) -> Callable[[], None] | None:
    """Function of the warpgroup that computes dQ; None if the consumers do."""
    return (lambda: add_dq(producer)) if producer.config.dq_apart else None
