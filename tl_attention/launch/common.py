"""What forward, backward and decode launches share: allocation, config lookup, tile counts, option arguments, plan keys."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tl_attention import configs
from tl_attention.compiler import Kernel, compile_config
from tl_attention.options import MAX_WINDOW, Options
from tl_attention.problem import TABLE_ROWS, AttnProblem, Config, buckets, length_bucket, tuning_key

LN2 = math.log(2.0)
LOG2E = 1 / LN2
MAX_GRID = 2**31 - 1  # CTAs of one launch
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
L2_SHARE = 32 << 20  # bytes of a 50 MB L2 that the keys and values of one group of heads may fill
MAX_PLANS = 2048  # that a thread keeps of each direction: lengths may never come to an end
Argument = torch.Tensor | ctypes.c_void_p  # see arrays.Views

# (sizes, strides, dtype) -> a tensor on the current device. What code of torch.compile allocates with: past the
# dispatcher, in half the time of torch.empty_strided
empty = torch._C._dynamo.guards._empty_strided_cuda


class PlanCache(threading.local):
    """Per-thread cache of launch plans, keyed by tensor metadata (shape, stride, dtype, device), never by values."""

    def __init__(self):
        self.plans: dict[Any, Any] = {}

    def keep(self, key: object, plan: Any) -> None:
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
        self.plans[key] = plan


def tile_counts(
    batch: int, heads: int, heads_sharing: int, shared_bytes: int, rows: int, block: int, max_ctas: int
) -> tuple[int, int, int]:
    """(blocks, group_heads, ctas): what kernels/scheduler.py asks of the host.

    Args:
        heads_sharing: how many heads read the same shared_bytes, all of them at once.
        rows: what blocks of `block` divide: the queries, or the keys.
    """
    blocks = -(-rows // block)
    group_heads = min(max(L2_SHARE // shared_bytes, 1) * heads_sharing, heads * batch)
    return blocks, group_heads, min(blocks * heads * batch, max_ctas)


def find_config(key: tuple, direction: str, config: Config | None) -> tuple[AttnProblem, Config]:
    """The problem of a launch key, and the config that serves it, compiled as are those of its other lengths."""
    dtype, head_dim, head_dim_v, causal, options, bucket, device = key
    problem = AttnProblem.of(DTYPE_NAMES[dtype], head_dim, head_dim_v, causal, direction, options)
    source = "explicit"
    if config is None:
        gpu = torch.cuda.get_device_name(device)
        config, source = configs.pick_config(problem, bucket, gpu, direction)
        for other in buckets(direction):  # so that no length compiles later
            compile_config(problem, configs.pick_config(problem, other, gpu, direction)[0])
    elif reason := configs.is_legal(problem, config, direction):
        raise ValueError(f"config: {config} cannot run {problem}: {reason}")
    if os.environ.get("TL_ATTENTION_PRINT_CONFIGS") == "1":
        print(
            f"tl_attention: {direction} {tuning_key(problem, bucket)} -> {config} ({source})", file=sys.stderr
        )
    return problem, config


def dense(
    shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """The arguments by which empty allocates a contiguous tensor."""
    strides, stride = [], 1
    for n in reversed(shape):
        strides.append(stride)
        stride *= n or 1
    return tuple(shape), tuple(reversed(strides)), dtype


def fragment_blocks(row_blocks: int, width: int) -> tuple:
    """The arguments by which empty allocates what tiles.FragmentBlocks describes."""
    return dense((row_blocks, width // 8, 32, 4))


class UnusedArguments(NamedTuple):
    """In place of tensors that a kernel does not read."""

    slopes: torch.Tensor
    sink: torch.Tensor
    rng: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor


@functools.cache
def unused_arguments(device: int) -> UnusedArguments:
    at = {"device": f"cuda:{device}"}
    return UnusedArguments(
        torch.zeros(1, 1, **at),
        torch.zeros(1, **at),
        torch.zeros(1, dtype=torch.int64, **at),
        torch.zeros(1, dtype=torch.int32, **at),
        torch.zeros(1, 8, dtype=torch.int32, **at),
    )


class TileTables:
    """The tables of the tiles of packed sequences, and where their padded rows end.

    Args:
        kernel: of kernels/varlen_plan.py.
        batch: number of sequences.
        total_q, total_k: rows.
    """

    def __init__(self, kernel: Kernel, batch: int, total_q: int, total_k: int, causal: bool, device: int):
        self.kernel, self.causal, self.device = kernel, causal, device
        # Of each sequence, the last may be a part
        self.tiles = total_q // TABLE_ROWS + batch, total_k // TABLE_ROWS + batch
        self.blocks = dense((2, batch + 1), torch.int32)
        self.tables = [dense((n, 8), torch.int32) for n in self.tiles]

    def table(self, options: Options, of_keys: bool, step_rows: int) -> torch.Tensor:
        """int32 [tiles of queries, or of keys, 8], of kernels that walk the others in steps of so many rows."""
        blocks, table = empty(*self.blocks), empty(*self.tables[of_keys])
        left, right = (MAX_WINDOW, 0) if self.causal else options.bounds
        behind, ahead = (right, left) if of_keys else (left, right)
        used_q, used_k = options.seqused_q, options.seqused_k
        none = unused_arguments(self.device).lengths
        self.kernel(
            options.cu_seqlens_q,
            options.cu_seqlens_k,
            none if used_q is None else used_q,
            none if used_k is None else used_k,
            blocks,
            table,
            used_q is not None,
            used_k is not None,
            of_keys,
            step_rows,
            behind,
            ahead,
        )
        return table


def option_arguments(
    options: Options, batch: int, heads: int, device: int, table: torch.Tensor | None = None
) -> tuple:
    """The arguments of a kernel with options after those that it has without: kernels.options.Options."""
    slopes, sink, rng, _, no_table = unused_arguments(device)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.expand(batch, heads)
    if options.sink is not None:
        sink = options.sink.float()
    if options.rng_state is not None:
        rng = options.rng_state
    table = no_table if table is None else table
    return (*options.bounds, options.softcap, slopes, sink, rng, options.drop_below, table)


def qkv_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, heads_first: bool) -> tuple:
    """All that checks.check_fwd asks of tensors, and all that a plan is made of."""
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        causal, heads_first,
    )  # fmt: skip


def window_span(options: Options) -> int:
    """A power of two above the keys that a window has, or without one above any length."""
    return 1 << sum(options.bounds).bit_length()


def options_key(options: Options | None) -> tuple:
    """All of the options that a plan is made of, but how packed sequences are split."""
    if options is None or not options.varlen:
        return () if options is None else (*options.names, options.num_splits, window_span(options))
    return *options.names, options.cu_seqlens_q.shape[0], length_bucket(options.max_seqlen_k)
