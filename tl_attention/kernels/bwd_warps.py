"""Roles of a pass by keys, and CUDA in front of its kernel, by its config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tl_attention.kernel_configs import BwdPass
from tl_attention.kernels import pipeline
from tl_attention.kernels import products as fp32
from tl_attention.kernels.bwd_apart import ADD_BY_TMA, add_dq
from tl_attention.kernels.bwd_load import KeyTileProducer
from tl_attention.kernels.bwd_one_tile import send_dq
from tl_attention.kernels.bwd_order import TAKE_TURNS, OrderKeeper
from tl_attention.kernels.options import ZERO, prelude
from tl_attention.kernels.pipeline import APART_REGISTERS, STORE_FRAGMENT
from tl_attention.kernels.program_code import PREFETCH_BITS
from tl_attention.kernels.roles import Roles
from tl_attention.problem import AttnProblem


def pass_roles(problem: AttnProblem, config: BwdPass) -> Roles:
    """Roles of a pass by keys."""
    makes_dq = "dq" in config.makes and not problem.is_fp32
    registers = pipeline.registers(problem, config.warpgroups, full=makes_dq)
    return Roles(
        config.warpgroups,
        config.threads,
        APART_REGISTERS if config.dq_apart else registers,
        one_body=False,
        apart=config.dq_apart,
    )


def cuda_code(problem: AttnProblem, config: BwdPass, roles: Roles) -> str | None:
    """CUDA in front of the kernel; None: none."""
    code = prelude(problem, roles) or ""
    if problem.has_bits and config.makes_all:
        code += PREFETCH_BITS
    if config.order:
        code += STORE_FRAGMENT
    if config.adds_dq and problem.is_fp32:
        code += fp32.ADD_TRANSPOSED
    if config.is_ordered:
        code += TAKE_TURNS
    if config.dq_apart:
        code += ADD_BY_TMA
    if config.is_dynamic and problem.has("varlen"):
        code += ZERO
    return code or None


def further_warps(producer: KeyTileProducer, turns: Any) -> tuple[Callable[[], None], ...]:
    """Functions of the warps behind the one that draws tiles, at most two. turns: of OrderKeeper."""
    if producer.config.is_ordered:
        keeper = OrderKeeper(producer, turns)
        return lambda: keeper.admit(), lambda: keeper.pass_on()
    if producer.config.one_tile:
        return (lambda: send_dq(producer),)
    return ()


def dq_warpgroup(producer: KeyTileProducer) -> Callable[[], None] | None:
    """Function of the warpgroup that computes dQ; None if the consumers do."""
    return (lambda: add_dq(producer)) if producer.config.dq_apart else None
