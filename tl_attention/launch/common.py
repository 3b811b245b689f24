"""Parts that all launches use: plan cache, allocation, config lookup, tile counts, tile tables, option arguments."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from tl_attention.checks.common import check_config
from tl_attention.compilation import building
from tl_attention.compilation.building import compile_kernels
from tl_attention.compilation.store import Kernel
from tl_attention.config import configs, legality
from tl_attention.config.costs import Costs, costs_of
from tl_attention.config.kernel_configs import BwdConfig, Config, DecodeConfig, KernelConfig
from tl_attention.launch.arrays import RowWords
from tl_attention.problem.attn_problem import (
    FP32_DTYPES,
    KERNEL_ARGUMENTS,
    TABLE_ROWS,
    AttnProblem,
    OptionArgument,
    arguments_of,
    tuning_key,
)
from tl_attention.problem.options import MAX_WINDOW, TENSOR_RULES, Options
from tl_attention.problem.switches import switch
from tl_attention.problem.target import DTYPE_NAMES, sm_count

LN2 = math.log(2.0)
LOG2E = 1 / LN2
FP32_NAMES = {dtype.terms: name for name, dtype in FP32_DTYPES.items()}
LOG = logging.getLogger(__name__)
MAX_GRID = 2**31 - 1  # CTAs per launch
TABLE_NUMBERS = 8  # int32 per row of a tile table
MAX_PLANS = 2048  # per thread and direction, and as many known calls: the number of lengths has no bound

Argument = torch.Tensor | ctypes.c_void_p  # kernel argument, see arrays.ArgumentViews

# (sizes, strides, dtype) -> a tensor on the current device. Used by the code of torch.compile: it skips the torch dispatcher and
# takes half the time of torch.empty_strided
empty = torch._C._dynamo.guards._empty_strided_cuda


class PlanCache(threading.local):
    """Per-thread cache of launch plans, keyed by tensor metadata (shape, stride, dtype, device), never by values.

    Attributes:
        calls: facts of calls, under the signatures of torch_ops/attend.py; cleared on its own.
    """

    def __init__(self):
        self.plans: dict[Any, Any] = {}
        self.calls: dict[Any, Any] = {}

    def keep(self, key: object, plan: Any) -> None:
        _keep(self.plans, key, plan)

    def keep_call(self, key: object, call: Any) -> None:
        _keep(self.calls, key, call)


def _keep(cache: dict[Any, Any], key: object, value: Any) -> None:
    if len(cache) >= MAX_PLANS:
        cache.clear()
    cache[key] = value


def qkv_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, heads_first: bool) -> tuple:
    """Key of a plan without options. It holds all metadata that checks.common.check_fwd reads, so a known key has passed the checks.

    A device is its index, -1 for the CPU: it is found and compared faster than a torch.device.
    """
    return (
        q.shape, q.stride(), q.dtype, q.get_device(),
        k.shape, k.stride(), k.dtype, k.get_device(),
        v.shape, v.stride(), v.dtype, v.get_device(),
        causal, heads_first,
    )  # fmt: skip


def dtype_name(dtype: torch.dtype, options: Options | None) -> str:
    """Name in problem.DTYPES for tensors of a dtype."""
    return DTYPE_NAMES[dtype] if options is None or not options.parts else FP32_NAMES[options.parts]


def has_no_sequences(options: Options | None) -> bool:
    """True for packed sequences with a batch of 0."""
    return options is not None and options.varlen and options.cu_seqlens_q.shape[0] == 1


def lse_without_keys(sink: torch.Tensor, lse_unit: float) -> torch.Tensor:
    """Log-sum-exp [heads] of a query that sees no key, rounded as in kernels: the sink in base 2, then in units of `lse_unit`."""
    return sink.float() * LOG2E * lse_unit


@functools.cache
def device_costs(device: int) -> Costs:
    """Costs of launches on a GPU, by its index."""
    return costs_of(torch.cuda.get_device_name(device), sm_count(device))


def tile_counts(
    batch: int,
    heads: int,
    heads_sharing: int,
    shared_bytes: int,
    rows: int,
    block: int,
    costs: Costs,
    max_ctas: int = MAX_GRID,
    fills_sms: bool = True,
) -> tuple[int, int, int]:
    """(blocks, group_heads, ctas): the launch arguments of kernels/seams/scheduler.py.

    Args:
        heads_sharing: number of heads that read the same data, of shared_bytes bytes.
        rows: queries or keys per head, divided into blocks of `block`.
        fills_sms: a head group has tiles for all SMs; else it is sized for the L2 alone.
    """
    blocks, groups = -(-rows // block), costs.groups
    least_tiles = groups.tiles * costs.sms if fills_sms else 0
    group_heads = head_group(heads * batch, heads_sharing, shared_bytes, blocks, groups.bytes, least_tiles)
    return blocks, group_heads, min(blocks * heads * batch, max_ctas)


def head_group(
    heads: int, heads_sharing: int, shared_bytes: int, blocks: int, l2_bytes: int, least_tiles: float
) -> int:
    """Heads per group of scheduler.TileOrder, where the longest tiles of a group come first.

    The least group fills l2_bytes of the L2 with shared data, and has least_tiles tiles: in a smaller one long tiles would start when
    other SMs are out of work. From there up to twice the size, the number that leaves the last group fullest is taken.

    Args:
        heads: query heads of all batch entries.
        heads_sharing, shared_bytes: as in tile_counts.
        blocks: tiles per head.
    """
    sharing_sets = heads // heads_sharing
    filling = math.ceil(least_tiles / (blocks * heads_sharing))
    least = min(max(l2_bytes // shared_bytes, filling, 1), sharing_sets)
    sizes = range(least, min(2 * least, sharing_sets) + 1)
    return heads_sharing * min(sizes, key=lambda size: -sharing_sets % size)


def find_config(key: tuple, direction: str, config: Config | None) -> tuple[AttnProblem, Config]:
    """Problem that the kernels of a key are compiled for, and the config that serves it.

    Args:
        key: name of the dtype, head_dim, head_dim_v, causal, option names, program, length bucket, device index.
        config: an explicit one; None: the tuned row or default.
    """
    dtype, head_dim, head_dim_v, causal, names, program, bucket, device = key
    problem = AttnProblem.of(dtype, head_dim, head_dim_v, causal, direction, names, program)
    source = "explicit"
    if config is None:
        gpu = torch.cuda.get_device_name(device)
        config, source = configs.pick_config(problem.served_as, bucket, gpu, direction)
    else:
        check_config(problem, config, legality.fault(problem, config, direction))
    words = tuning_key(problem, bucket)
    LOG.debug("%s %s -> %s (%s)", direction, words, config, source)
    if switch("TL_ATTENTION_PRINT_CONFIGS"):
        print(f"tl_attention: {direction} {words} -> {config} ({source})", file=sys.stderr)
    return problem.compiled_as, config


def build_ahead(key: tuple, direction: str, purpose: str) -> None:
    """Start to build missing kernels for a key of find_config(), without waiting. purpose: the call that needs them, in words."""
    dtype, head_dim, head_dim_v, causal, names, program, bucket, device = key
    # A failure is reported by the call that needs the kernel, which may never come
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError, OSError):
        problem = AttnProblem.of(dtype, head_dim, head_dim_v, causal, direction, names, program)
        config, _ = configs.pick_config(
            problem.served_as, bucket, torch.cuda.get_device_name(device), direction
        )
        building.build_ahead(config.kernels(problem), purpose)


def compile_config(
    problem: AttnProblem, config: Config | DecodeConfig
) -> dict[tuple[AttnProblem, KernelConfig], Kernel]:
    """Compiled kernels of a config. Missing ones are built now, in parallel."""
    kernels = config.kernels(problem)
    return dict(zip(kernels, compile_needed(kernels, isinstance(config, BwdConfig)), strict=True))


def compile_needed(
    kernels: Sequence[tuple[AttnProblem, KernelConfig]], in_backward: bool = False
) -> list[Kernel]:
    """Compiled kernels of a call, in the given order. Missing ones are built now, in parallel."""
    return compile_kernels(kernels, lambda: _interrupted(in_backward))


def _interrupted(in_backward: bool) -> str:
    """Words for what the building of a kernel interrupts, for the notice on stderr."""
    if torch.cuda.is_current_stream_capturing():
        return " inside a CUDA graph capture (call once before capturing)"
    return " in a backward pass" if in_backward else ""


def dense(
    shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Arguments of empty() for a contiguous tensor."""
    strides, stride = [], 1
    for n in reversed(shape):
        strides.append(stride)
        stride *= n or 1
    return tuple(shape), tuple(reversed(strides)), dtype


def fragment_blocks(row_blocks: int, width: int) -> tuple:
    """Arguments of empty() for an fp32 tensor in the layout of kernels/tiles.FragmentBlocks."""
    return dense((row_blocks, width // 8, 32, 4))


@functools.cache
def unused_tensor(device: int, dtype: str, *shape: int) -> torch.Tensor:
    """Placeholder for a tensor argument that a kernel does not read."""
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=f"cuda:{device}")


# Tensors of options that kernels take in fp32, and users in other dtypes, too
_CAST_TO_FP32 = {
    x.value
    for x in KERNEL_ARGUMENTS
    if x.dtype == "float32" and x.value in TENSOR_RULES and len(TENSOR_RULES[x.value].dtypes) > 1
}


class OptionValues:
    """Makes arguments of kernels with options, for launches that have the same ones on.

    Args:
        names: options of the kernel's problem.
        batch: of the call.
        arguments: those that the kernel declares, in its order.
    """

    def __init__(
        self,
        names: Sequence[str],
        batch: int,
        device: int,
        arguments: Sequence[OptionArgument] = KERNEL_ARGUMENTS,
    ):
        self.batch, off, on = batch, Options(), arguments_of(names)
        self.values = [_unused_value(x, off, device) for x in arguments]
        # (index, attribute of Options, may need a cast to fp32, is expanded)
        self.given = [
            (i, x.value, x.value in _CAST_TO_FP32, x.is_per_entry) for i, x in enumerate(arguments) if x in on
        ]

    def __call__(self, options: Options | None) -> tuple[Any, ...]:
        """Values of the arguments; options are None only where those that are on have no arguments."""
        values = self.values.copy()
        for i, name, is_cast, is_expanded in self.given:
            value = getattr(options, name)
            if is_cast:
                value = value.float()
            values[i] = value.expand(self.batch, -1) if is_expanded else value
        return tuple(values)


def _unused_value(argument: OptionArgument, off: Options, device: int) -> Any:
    """Value of an argument whose option is off."""
    if not argument.shape:
        return getattr(off, argument.value)
    shape = (1 if isinstance(size, str) else size for size in argument.shape)
    return unused_tensor(device, argument.dtype, *shape)


def table_tiles(rows: int, sequences: int) -> int:
    """Upper bound of the tiles of packed sequences: the last one of each may be partial."""
    return rows // TABLE_ROWS + sequences


def table_counts(total_q: int, total_k: int, sequences: int, by_sequence: bool) -> tuple[int, int]:
    """Entries of the tile tables of queries and of keys; by_sequence: of a sequence_order.SequenceOrder, with tiles for queries too."""
    rows_k = total_q + total_k if by_sequence else total_k
    return table_tiles(total_q, sequences), table_tiles(rows_k, sequences)


class PackedTiles:
    """Makes the tile tables of packed sequences, and clears rows behind the last sequence. Serves one thread.

    Args:
        kernel: compiled from kernels/sources/tile_table.py.
        batch: number of sequences.
        total_q, total_k: rows of the packed tensors.
        by_sequence: the table of keys is that of a sequence_order.SequenceOrder.
    """

    def __init__(
        self,
        kernel: Kernel,
        batch: int,
        total_q: int,
        total_k: int,
        causal: bool,
        device: int,
        by_sequence: bool = False,
    ):
        self.kernel, self.causal, self.device, self.by_sequence = kernel, causal, device, by_sequence
        self.unused_lengths = unused_tensor(device, "int32", 1)
        self.unused_table = unused_tensor(device, "int32", 1, TABLE_NUMBERS)
        self.unused_lse = unused_tensor(device, "float32", 1, 1)
        self.counts = table_counts(total_q, total_k, batch, by_sequence)
        self.blocks, self.blocks_of_both = (dense((n, 2, batch + 1), torch.int32) for n in (1, 2))
        self.table_q, self.table_k = (dense((n, TABLE_NUMBERS), torch.int32) for n in self.counts)

    def clear_behind(self, results: Sequence[tuple[int, int, int]], ctas: int) -> None:
        """Set what a table's kernel clears behind the last sequence: results to 0, log-sum-exps to -inf. Call it once, before table().

        Args:
            results: (groups, rows, bytes of a row in a group) of out, or of dq, dk and dv, see arrays.RowWords.
            ctas: number of CTAs that clear. 0: rows stay as they are.
        """
        self.rows, self.clearing_ctas = RowWords(self.device, *results), ctas

    def table(self, options: Options, step_rows: int, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Tile table of queries, int32 [tiles, 8].

        Args:
            step_rows: rows per step of the kernel that reads the table.
            lse: [.., total_q].
        """
        table = empty(*self.table_q)
        lse = lse.view(-1, lse.shape[-1]) if self.clearing_ctas else self.unused_lse
        rows = self.rows.of(out) * 3  # the kernel clears dk and dv only behind a table of keys
        self._fill(options, step_rows, self.blocks, table, self.unused_table, rows, lse)
        return table

    def tables(
        self, options: Options, step_rows: int, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tile tables of queries and of keys, as table(). gradients: dq, dk, dv."""
        tables = empty(*self.table_q), empty(*self.table_k)
        rows = self.rows.of(*gradients)
        self._fill(options, step_rows, self.blocks_of_both, *tables, rows, self.unused_lse)
        return tables

    def _fill(
        self,
        options: Options,
        step_rows: int,
        blocks: tuple,
        table_q: torch.Tensor,
        table_k: torch.Tensor,
        rows: Sequence[Argument],
        lse: torch.Tensor,
    ) -> None:
        left, right = (MAX_WINDOW, 0) if self.causal else (options.left, options.right)
        used_q, used_k = options.seqused_q, options.seqused_k
        unused = self.unused_lengths
        self.kernel(
            options.cu_seqlens_q,
            options.cu_seqlens_k,
            unused if used_q is None else used_q,
            unused if used_k is None else used_k,
            empty(*blocks),
            table_q,
            table_k,
            *rows,
            lse,
            used_q is not None,
            used_k is not None,
            step_rows,
            left,
            right,
            self.by_sequence,
            self.clearing_ctas,
        )
