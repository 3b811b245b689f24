"""From a call to a launch: (problem, config) -> compiled kernels -> outputs. The short hot path of the package.

Kernels are compiled once, kept on disk under configs.cache_dir() and in a dict of the process. A process that finds its kernel on
disk loads it without importing tilelang, which takes longer than loading.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import logging
import math
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tl_attention import configs, legality
from tl_attention.arrays import Views
from tl_attention.extras import MAX_WINDOW, Extras
from tl_attention.kernel_configs import (
    REGISTER_LEVEL,
    AppendConfig,
    BwdConfig,
    BwdDelta,
    BwdPass,
    BwdSum,
    Config,
    DecodeCombine,
    DecodeConfig,
    FwdCombine,
    FwdConfig,
    KernelConfig,
    TileTable,
    delta_width,
    register_level,
    table_kernels,
)
from tl_attention.problem import (
    MAX_SPLITS,
    SPLIT_BUCKET,
    TABLE_ROWS,
    AttnProblem,
    buckets,
    length_bucket,
    tuning_key,
)
from tl_attention.target import DTYPE_NAMES, TARGET, sm_count

LN2 = math.log(2.0)
LOG2E = 1 / LN2
MAX_GRID = 2**31 - 1  # CTAs of one launch
# Of one backward, whose small kernels have the batch in the last dimension of their grids
MAX_BATCH = 2**16 - 1
L2_SHARE = 32 << 20  # bytes of a 50 MB L2 that the keys and values of one group of heads may fill
# Counters a device has; when streams and captured launches have used them up, a new one is a memset before its launch
TICKET_ROWS = 1 << 15

# What a split forward costs, in steps of a block of keys (1.3 us at d128): a CTA beside its steps, with its part's way to memory
# and back; the kernel that combines the parts, and each part in it. Causal d128 on an H200, 2026-11-21, us: 8 heads of 1024 x 1024
# 16.3 whole, 19.0 in 2 parts; 4 of 2048 x 2048 26.7 and 24.0; 8 of 128 x 1024 15.3, 11.5 in 4; 8 of 128 x 16k 175, 21.8 in 16
CTA_STEPS, COMBINE_STEPS, PART_STEPS = 3, 5, 1 / 8
ABOUT = 1.04  # times the least time, for fewer parts in memory
FEW_TILES = 0.8  # of the SMs: with more tiles a split gains little
TILE = 128  # queries, and keys, that a tile has where no config is at hand yet
QUERY_ROWS = TABLE_ROWS  # that the log-sum-exp, delta and the sums of dq are padded to a multiple of
WAVES = 4  # of CTAs that a pass by keys is to have, if a key head has query heads enough to divide among them

# No template imports another; all import the other files of kernels/
TEMPLATES = {
    FwdConfig: ("fwd", "flash_fwd"),
    FwdCombine: ("fwd_combine", "flash_fwd_combine"),
    BwdDelta: ("bwd_delta", "flash_bwd_delta"),
    BwdPass: ("bwd", "flash_bwd"),
    "dq": ("bwd_dq", "flash_bwd_dq"),
    BwdSum: ("bwd_sum", "flash_bwd_sum"),
    TileTable: ("tile_table", "flash_tile_table"),
    DecodeConfig: ("decode", "flash_decode"),
    DecodeCombine: ("decode_combine", "flash_decode_combine"),
    AppendConfig: ("append", "flash_append"),
}

MAX_PLANS = 2048  # that a thread keeps of each direction: lengths may never come to an end

Kernel = Callable[..., None]
Argument = torch.Tensor | ctypes.c_void_p  # see arrays.Views

_compiled: dict[tuple[AttnProblem, KernelConfig], Kernel] = {}
_launchers: dict[tuple, FwdKernels] = {}
_bwd_launchers: dict[tuple, BwdKernels] = {}
_offices: dict[int, TicketOffice] = {}
_lock = threading.Lock()


class _Plans(threading.local):
    """Of the calls that a thread has made, by what tensors are, not what they hold."""

    def __init__(self):
        self.fwd: dict[tuple, FwdPlan] = {}
        self.bwd: dict[tuple, BwdPlan] = {}


_plans = _Plans()

# (sizes, strides, dtype) -> a tensor on the current device. What code of torch.compile allocates with: past the
# dispatcher, in half the time of torch.empty_strided
_empty = torch._C._dynamo.guards._empty_strided_cuda


def compile_count() -> int:
    """How many kernels this process has compiled or loaded."""
    return len(_compiled)


@functools.cache
def _sources_digest(template: str) -> str:
    """Of everything a kernel is made from but its problem and config."""
    folder = Path(__file__).parent
    versions = [importlib.metadata.version(name) for name in ("tilelang", "apache-tvm-ffi")]
    digest = hashlib.sha256(" ".join([*versions, platform.machine()]).encode())
    others = {name for name, _ in TEMPLATES.values()} - {template}
    kernels = (path for path in folder.glob("kernels/*.py") if path.stem not in others)
    for path in sorted(
        [*kernels, *(folder / f"{name}.py" for name in ("problem", "kernel_configs", "target"))]
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _template(config: KernelConfig) -> tuple[str, str]:
    """The module of kernels/ that a kernel comes from, and the function in it."""
    by_queries = isinstance(config, BwdPass) and config.grads == "dq"
    return TEMPLATES["dq" if by_queries else type(config)]


def _program(problem: AttnProblem, config: KernelConfig) -> tuple[Any, dict[str, object]]:
    """The kernel in TileLang, and the options of the passes that lower it."""
    module, function = _template(config)
    module = importlib.import_module(f"tl_attention.kernels.{module}")
    pass_configs = dict(module.PASS_CONFIGS)
    if (level := register_level(problem, config)) != REGISTER_LEVEL:
        pass_configs["tl.ptxas_register_usage_level"] = level
    return getattr(module, function)(problem, config), pass_configs


def kernel_path(problem: AttnProblem, config: KernelConfig) -> Path:
    """Where the compiled kernel lies, or will; its CUDA source lies beside it as .cu."""
    template, _ = _template(config)
    key = f"{_sources_digest(template)} {problem!r} {config!r}"
    return configs.cache_dir() / f"{template}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"


def lower(problem: AttnProblem, config: KernelConfig) -> tuple[str, int]:
    """CUDA source of a kernel, and the bytes of dynamic shared memory it asks for. Needs neither GPU nor nvcc."""
    import tilelang
    from tilelang import tvm

    program, pass_configs = _program(problem, config)
    target = tvm.target.Target(TARGET)
    with tvm.transform.PassContext(opt_level=3, config=pass_configs), target:
        artifact = tilelang.lower(program, target=target)
    (function,) = (f for _, f in artifact.device_mod.functions.items())
    return artifact.kernel_source, int(function.attrs.get("dyn_shared_memory_buf", 0))


def _build(problem: AttnProblem, config: KernelConfig, path: Path) -> None:
    import tilelang

    from tl_attention import cubin

    if cubin.find_nvcc() is None:
        raise RuntimeError(
            f"tl_attention: {problem} needs a kernel that is not compiled yet; {cubin.NO_NVCC}"
        )
    logger = logging.getLogger("tilelang")
    level = logger.level
    logger.setLevel(logging.WARNING)  # it tells of each export
    try:
        program, pass_configs = _program(problem, config)
        kernel = tilelang.compile(program, target=TARGET, pass_configs=pass_configs)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            path.with_suffix(".cu").write_text(kernel.get_kernel_source())
            kernel.export_library(str(Path(folder, path.name)))
            os.replace(Path(folder, path.name), path)
    finally:
        logger.setLevel(level)


@functools.cache
def _load_runtime() -> ModuleType:
    """tvm_ffi, and the libraries of tilelang a compiled kernel calls into; importing tilelang itself would take most of a second."""
    import tvm_ffi  # before the libraries, whose thousands of functions it would list

    if "tilelang" not in sys.modules:
        root = importlib.util.find_spec("tilelang").submodule_search_locations[0]
        for name in ("tvm_runtime", "tvm_compiler", "tilelang"):
            ctypes.CDLL(str(Path(root, "lib", f"lib{name}.so")), ctypes.RTLD_GLOBAL)
    return tvm_ffi


def compile_config(problem: AttnProblem, config: Config) -> None:
    """Have all kernels of a config at hand."""
    for one in config.kernels(problem):
        compile_kernel(*one)


def compile_kernel(problem: AttnProblem, config: KernelConfig) -> Kernel:
    """The compiled kernel: from this process, else from disk, else by nvcc for sm_90a (seconds, no GPU needed).

    Returns:
        A function of the arguments that its file in kernels/ describes.
    """
    key = (problem, config)
    if key not in _compiled:
        path = kernel_path(problem, config)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open(
                "w"
            ) as lock:  # of many processes one compiles, the others wait
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    _build(problem, config, path)
        _compiled[key] = _load_runtime().load_module(str(path))["main"]
    return _compiled[key]


class TicketOffice:
    """The counters of the dynamic kernels of a device: rows of one int32 [n, 2], zero whenever no kernel runs with them.

    Kernels on one stream share a row, as they run one after the other; a captured launch has a row of its own, as graphs may be
    replayed beside each other.
    """

    def __init__(self, device: int):
        # In a thread of its own: this one may be filling the memory pool of a graph, which must not own the counters
        thread = threading.Thread(target=self._allocate, args=(device,))
        thread.start()
        thread.join()
        self.idle = self.rows[0]  # for kernels that draw none
        self.next_row = itertools.count(1)
        self.of_stream: dict[int, torch.Tensor] = {}

    def _allocate(self, device: int) -> None:
        self.rows = torch.zeros(TICKET_ROWS, 2, dtype=torch.int32, device=f"cuda:{device}")
        torch.cuda.current_stream(device).synchronize()

    def row(self) -> torch.Tensor:
        number = next(self.next_row)
        return self.rows[number] if number < TICKET_ROWS else torch.zeros_like(self.rows[0])

    def tickets(self, device: int, dynamic: bool) -> torch.Tensor:
        if not dynamic:
            return self.idle
        if torch.cuda.is_current_stream_capturing():
            return self.row()
        stream = torch._C._cuda_getCurrentRawStream(device)
        tickets = self.of_stream.get(stream)
        if tickets is None:
            tickets = self.of_stream.setdefault(stream, self.row())
        return tickets


def _tickets(device: int, dynamic: bool) -> torch.Tensor:
    office = _offices.get(device)
    if office is None:
        # No call came before: a memset in the graph, before each launch
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")
        with _lock:
            office = _offices.get(device) or _offices.setdefault(device, TicketOffice(device))
    return office.tickets(device, dynamic)


def plan(
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


@functools.lru_cache(maxsize=4096)
def key_splits(tiles: int, steps: int, sms: int) -> int:
    """How many CTAs the blocks of keys of each tile are divided among, at least two blocks each: the fewest that are done about
    as soon as can be.

    CTAs of one length run in waves of one an SM. All are taken to be as long as those of the longest tile, of `steps` blocks: in
    one wave they decide, and with keys of earlier queries before a chunk the tiles of a causal problem are nearly equal.
    """
    if tiles >= FEW_TILES * sms:
        return 1

    def time(splits: int) -> float:
        combine = (splits > 1) * (COMBINE_STEPS + splits * PART_STEPS)
        return -(-tiles * splits // sms) * (-(-steps // splits) + CTA_STEPS) + combine

    times = [time(splits) for splits in range(1, min(MAX_SPLITS, max(steps // 2, 1)) + 1)]
    enough = ABOUT * min(times)
    return next(splits for splits, one in enumerate(times, 1) if one <= enough)


def fwd_bucket(batch: int, heads: int, seqlen_q: int, seqlen_k: int, sms: int) -> str:
    """Which row of the tuned table serves a forward on a GPU with so many SMs."""
    splits = key_splits(batch * heads * -(-seqlen_q // TILE), -(-seqlen_k // TILE), sms)
    return SPLIT_BUCKET if splits > 1 else length_bucket(seqlen_k)


def packed_splits(extras: Extras, total_q: int, total_k: int, heads: int, sms: int) -> int:
    """key_splits of packed sequences, by what bounds their lengths; or as many as are asked for."""
    if extras.num_splits:
        return min(extras.num_splits, MAX_SPLITS)
    batch = extras.cu_seqlens_q.shape[0] - 1
    longest_q = min(extras.max_seqlen_q, total_q)
    tiles = min(total_q // TABLE_ROWS + batch, batch * -(-longest_q // TABLE_ROWS))
    keys = min(extras.max_seqlen_k, total_k, sum(extras.bounds) + TABLE_ROWS)  # that a tile sees
    return key_splits(heads * tiles, -(-keys // TILE), sms)


def _find_config(key: tuple, direction: str, config: Config | None) -> tuple[AttnProblem, Config]:
    """The problem of a launch key, and the config that serves it, compiled as are those of its other lengths."""
    dtype, head_dim, head_dim_v, causal, options, bucket, device = key
    problem = AttnProblem.of(DTYPE_NAMES[dtype], head_dim, head_dim_v, causal, direction, options)
    source = "explicit"
    if config is None:
        gpu = torch.cuda.get_device_name(device)
        config, source = configs.pick_config(problem, bucket, gpu, direction)
        for other in buckets(direction):  # so that no length compiles later
            compile_config(problem, configs.pick_config(problem, other, gpu, direction)[0])
    elif reason := legality.is_legal(problem, config, direction):
        raise ValueError(f"config: {config} cannot run {problem}: {reason}")
    if os.environ.get("TL_ATTENTION_PRINT_CONFIGS") == "1":
        print(
            f"tl_attention: {direction} {tuning_key(problem, bucket)} -> {config} ({source})", file=sys.stderr
        )
    return problem, config


class FwdKernels(NamedTuple):
    """The compiled kernels of a forward."""

    kernel: Kernel
    config: FwdConfig
    max_ctas: int  # but for those that share a tile
    combine: Kernel | None  # what makes one output of theirs
    width: int  # of a tile of V
    plan: Kernel | None  # what goes before varlen


def _find_kernel(key: tuple, config: FwdConfig | None) -> FwdKernels:
    problem, config = _find_config(key, "fwd", config)
    max_ctas = MAX_GRID if config.schedule == "grid" else sm_count(key[-1])
    compiled = {type(one): compile_kernel(problem, one) for problem, one in config.kernels(problem)}
    combine, tile_table = compiled.get(FwdCombine), compiled.get(TileTable)
    return FwdKernels(compiled[FwdConfig], config, max_ctas, combine, problem.head_dim_v, tile_table)


def _dense(
    shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """The arguments by which _empty allocates a contiguous tensor."""
    strides, stride = [], 1
    for n in reversed(shape):
        strides.append(stride)
        stride *= n or 1
    return tuple(shape), tuple(reversed(strides)), dtype


def _fragment_blocks(row_blocks: int, width: int) -> tuple:
    """The arguments by which _empty allocates what tiles.FragmentBlocks describes."""
    return _dense((row_blocks, width // 8, 32, 4))


class Nothing(NamedTuple):
    """In place of tensors that a kernel does not read."""

    slopes: torch.Tensor
    sink: torch.Tensor
    rng: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor


@functools.cache
def _nothing(device: int) -> Nothing:
    at = {"device": f"cuda:{device}"}
    return Nothing(
        torch.zeros(1, 1, **at),
        torch.zeros(1, **at),
        torch.zeros(1, dtype=torch.int64, **at),
        torch.zeros(1, dtype=torch.int32, **at),
        torch.zeros(1, 8, dtype=torch.int32, **at),
    )


class Sequences:
    """The tables of the tiles of packed sequences, and where their padded rows end.

    Args:
        kernel: of kernels/tile_table.py.
        batch: number of sequences.
        total_q, total_k: rows.
    """

    def __init__(self, kernel: Kernel, batch: int, total_q: int, total_k: int, causal: bool, device: int):
        self.kernel, self.causal, self.device = kernel, causal, device
        # Of each sequence, the last may be a part
        self.tiles = total_q // TABLE_ROWS + batch, total_k // TABLE_ROWS + batch
        self.blocks = _dense((2, batch + 1), torch.int32)
        self.tables = [_dense((n, 8), torch.int32) for n in self.tiles]

    def table(self, extras: Extras, of_keys: bool, step_rows: int) -> torch.Tensor:
        """int32 [tiles of queries, or of keys, 8], of kernels that walk the others in steps of so many rows."""
        blocks, table = _empty(*self.blocks), _empty(*self.tables[of_keys])
        left, right = (MAX_WINDOW, 0) if self.causal else extras.bounds
        behind, ahead = (right, left) if of_keys else (left, right)
        used_q, used_k = extras.seqused_q, extras.seqused_k
        none = _nothing(self.device).lengths
        self.kernel(
            extras.cu_seqlens_q,
            extras.cu_seqlens_k,
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


def _option_arguments(
    extras: Extras, batch: int, heads: int, device: int, table: torch.Tensor | None = None
) -> tuple:
    """The arguments of a kernel with options after those that it has without: kernels.options.Options."""
    slopes, sink, rng, _, no_table = _nothing(device)
    if extras.alibi_slopes is not None:
        slopes = extras.alibi_slopes.expand(batch, heads)
    if extras.sink is not None:
        sink = extras.sink.float()
    if extras.rng_state is not None:
        rng = extras.rng_state
    table = no_table if table is None else table
    return (*extras.bounds, extras.softcap, slopes, sink, rng, extras.drop_below, table)


class FwdPlan:
    """All of a forward that the shapes, strides, dtype and device of its tensors settle, and which options are on. Serves one thread.

    Args:
        q, k, v, out: [batch, heads, seqlen, head_dim] if heads_first, else [batch, seqlen, heads, head_dim]; with varlen [total, heads,
            head_dim]; on the current device, none of them empty.
        config: serves instead of the tuned row or default.
        extras: like those of the calls.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        causal: bool,
        heads_first: bool,
        config: FwdConfig | None = None,
        extras: Extras | None = None,
    ):
        self.packed = extras is not None and extras.varlen
        self.device = q.device.index
        self.out = _dense(out.shape, q.dtype)
        if self.packed:
            q, k, v, out = (x[None] for x in (q, k, v, out))
        seq, head = (2, 1) if heads_first else (1, 2)
        batch, seqlen_q, heads, head_dim = q.shape[0], q.shape[seq], q.shape[head], q.shape[3]
        seqlen_k, heads_kv, head_dim_v = k.shape[seq], k.shape[head], v.shape[3]
        self.lse = _dense((heads, seqlen_q) if self.packed else (batch, heads, seqlen_q))
        self.views = Views(heads_first, q, k, v, out, packed=self.packed)
        self.batch = extras.cu_seqlens_q.shape[0] - 1 if self.packed else batch
        self.heads = heads

        sms = sm_count(self.device)
        bucket = fwd_bucket(batch, heads, seqlen_q, seqlen_k, sms)
        asked_splits = 0 if extras is None else extras.num_splits
        if self.packed:
            asked_splits = packed_splits(extras, seqlen_q, seqlen_k, heads, sms)
        if asked_splits:
            longest = extras.max_seqlen_k if self.packed else seqlen_k
            bucket = SPLIT_BUCKET if asked_splits > 1 else length_bucket(longest)
        names = () if extras is None else extras.names
        key = (q.dtype, head_dim, head_dim_v, causal, names, bucket, self.device)
        found = _launchers.get(key) if config is None else _find_kernel(key, config)
        if found is None:
            found = _launchers[key] = _find_kernel(key, None)
        self.kernel, config, max_ctas, self.combine, width, tile_table = found
        self.dynamic = config.schedule == "dynamic"
        self.heads_per_kv = heads // heads_kv
        keys = seqlen_k if self.packed or extras is None else min(seqlen_k, _window(extras) + config.block_M)
        kv_bytes = 2 * keys * (head_dim + head_dim_v)  # that the tiles of a head at one place share
        if self.packed:
            self.sequences = Sequences(tile_table, self.batch, seqlen_q, seqlen_k, causal, self.device)
            self.step_rows = config.block_N
        # As many rows as there are tiles of TABLE_ROWS
        rows = self.sequences.tiles[0] * TABLE_ROWS if self.packed else seqlen_q
        self.counts = plan(batch, heads, self.heads_per_kv, kv_bytes, rows, config.block_M, max_ctas)
        if self.combine:
            m_blocks, group_heads, tiles = self.counts
            splits = min(asked_splits, MAX_SPLITS) or key_splits(tiles, -(-seqlen_k // config.block_N), sms)
            self.counts = m_blocks, group_heads, splits * tiles
            rows = (splits, batch, heads, seqlen_q)
            self.parts = _dense((*rows, width)), _dense(rows)  # outputs and log-sum-exps, in fp32

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float,
        lse_base2: bool,
        extras: Extras | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out, in the layout of q, and lse of other tensors of the same metadata."""
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(q, k, v, softmax_scale, lse_base2, extras)
        out, lse = _empty(*self.out), _empty(*self.lse)
        self.launch(q, k, v, out, lse, softmax_scale, lse_base2, extras)
        return out, lse

    def launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        softmax_scale: float,
        lse_base2: bool,
        extras: Extras | None = None,
    ) -> None:
        # lse, parts and tickets are tensors: the kernels run on PyTorch's current stream of their device
        if self.packed:
            q, k, v, out = (x[None] for x in (q, k, v, out))
        *qkv, out_view = self.views.of(q, k, v, out)
        tickets = _tickets(self.device, self.dynamic)
        unit = 1.0 if lse_base2 else LN2
        counts = (*self.counts, *self.options(extras)) if extras is not None and extras.names else self.counts
        if self.combine is None:
            self.kernel(*qkv, out_view, lse, tickets, softmax_scale, unit, self.heads_per_kv, *counts)
            return
        parts = [_empty(*x) for x in self.parts]
        self.kernel(*qkv, *parts, tickets, softmax_scale, 1.0, self.heads_per_kv, *counts)
        whole = (out, lse[None]) if self.packed else (out_view, lse)
        self.combine(*parts, *whole, unit)

    def options(self, extras: Extras) -> tuple:
        table = self.sequences.table(extras, False, self.step_rows) if self.packed else None
        return _option_arguments(extras, self.batch, self.heads, self.device, table)


def _fwd_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, heads_first: bool) -> tuple:
    """All that checks.check_fwd asks of tensors, and all that a plan is made of."""
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        causal, heads_first,
    )  # fmt: skip


def fwd_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, heads_first: bool
) -> FwdPlan | None:
    """That of an earlier call of fwd in this thread, by tensors that differ from these in their values alone."""
    return _plans.fwd.get(_fwd_key(q, k, v, causal, heads_first))


def _window(extras: Extras) -> int:
    """A power of two above the keys that a window has, or without one above any length."""
    return 1 << sum(extras.bounds).bit_length()


def _options_key(extras: Extras | None) -> tuple:
    """All of the options that a plan is made of, but how packed sequences are split."""
    if extras is None or not extras.varlen:
        return () if extras is None else (*extras.names, extras.num_splits, _window(extras))
    return *extras.names, extras.cu_seqlens_q.shape[0], length_bucket(extras.max_seqlen_k)


def _keep(plans: dict[tuple, Any], key: tuple, plan: Any) -> None:
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan


def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    heads_first: bool = False,
    config: FwdConfig | None = None,
    extras: Extras | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward on tensors that checks.py has passed, on a Hopper GPU.

    Args:
        q, k, v: [batch, heads, seqlen, head_dim] if heads_first, else [batch, seqlen, heads, head_dim]; with varlen [total, heads,
            head_dim].
        config: serves instead of the tuned row or default.
    Returns:
        out in the layout of q, contiguous; lse [batch, heads, seqlen_q] or [heads, total_q] fp32. With varlen, rows of no sequence and
        those that it does not use hold anything.
    """
    key = (*_fwd_key(q, k, v, causal, heads_first), *_options_key(extras))
    if extras is not None and extras.varlen:
        sms = sm_count(q.device.index)
        key = (*key, packed_splits(extras, q.shape[0], k.shape[0], q.shape[1], sms))
    known = _plans.fwd.get(key) if config is None else None
    if known is not None:
        return known(q, k, v, softmax_scale, lse_base2, extras)
    if torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            return fwd(q, k, v, softmax_scale, causal, lse_base2, heads_first, config, extras)
    *outer, n1, n2, _ = q.shape
    out = _empty(*_dense((*q.shape[:-1], v.shape[-1]), q.dtype))
    lse = _empty(*_dense((*outer, n1, n2) if heads_first else (*outer, n2, n1)))
    if not out.numel():
        return out, lse
    if not k.numel():
        lse.fill_(-math.inf)
        if extras is not None and extras.sink is not None:
            lse.copy_((extras.sink.float() / (LN2 if lse_base2 else 1.0))[:, None].expand_as(lse))
        return out.zero_(), lse
    made = FwdPlan(q, k, v, out, causal, heads_first, config, extras)
    if config is None:
        _keep(_plans.fwd, key, made)
    made.launch(q, k, v, out, lse, softmax_scale, lse_base2, extras)
    return out, lse


@dataclass(frozen=True)
class BwdKernels:
    """The compiled kernels of a backward."""

    problem: AttnProblem
    delta: Kernel
    passes: tuple[tuple[BwdPass, Kernel], ...]
    sum_qk: Kernel
    sum_v: Kernel
    plan: Kernel | None  # what goes before varlen


def _find_bwd_kernels(key: tuple, direction: str, config: BwdConfig | None) -> BwdKernels:
    problem, config = _find_config(key, direction, config)
    return BwdKernels(
        problem,
        compile_kernel(problem.helper_problem(delta_width(problem.head_dim_v)), BwdDelta()),
        tuple((one, compile_kernel(problem, one)) for one in config.passes),
        compile_kernel(problem.helper_problem(problem.head_dim), BwdSum()),
        compile_kernel(problem.helper_problem(problem.head_dim_v), BwdSum()),
        next((compile_kernel(*one) for one in table_kernels(problem)), None),
    )


def _key_parts(batch: int, heads: int, heads_kv: int, n_blocks: int, sms: int) -> tuple[int, int]:
    """(parts, heads_per_part): among how many CTAs the query heads of a key head are divided, and how many each has."""
    heads_per_kv = heads // heads_kv
    parts = min(heads_per_kv, -(-WAVES * sms // (n_blocks * heads_kv * batch)))
    heads_per_part = -(-heads_per_kv // parts)
    return -(-heads_per_kv // heads_per_part), heads_per_part


def bwd_workspace_bytes(
    batch: int,
    heads: int,
    heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    problem: AttnProblem,
    config: BwdConfig,
    sms: int,
) -> int:
    """What a backward allocates beside its gradients on a GPU with so many SMs, all of it fp32.

    The log-sum-exp and delta of each query; the sums of dq, if a pass adds to them; and where the query heads of a key head
    are divided among CTAs, the parts of dk and dv.
    """
    rows = batch * heads * -(-seqlen_q // QUERY_ROWS) * QUERY_ROWS
    numbers = 2 * rows
    for one in config.passes:
        if one.adds_dq:
            numbers += rows * problem.head_dim
        if one.grads != "dq":
            n_blocks = -(-seqlen_k // one.block_N)
            parts, _ = _key_parts(batch, heads, heads_kv, n_blocks, sms)
            width = problem.head_dim * ("dk" in one.makes) + problem.head_dim_v * ("dv" in one.makes)
            numbers += (parts > 1) * parts * batch * heads_kv * n_blocks * one.block_N * width
    return 4 * numbers


@dataclass(frozen=True)
class BwdSizes:
    """What a backward's kernels are planned by."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    width: int  # head_dim + head_dim_v
    sms: int
    tiles: tuple[int, int] | None = None  # of queries and of keys, of packed sequences

    @property
    def heads_per_kv(self) -> int:
        return self.heads // self.heads_kv

    @property
    def rounded_q(self) -> int:
        if self.tiles:
            return self.tiles[0] * TABLE_ROWS
        return -(-self.seqlen_q // QUERY_ROWS) * QUERY_ROWS

    def key_blocks(self, block_N: int) -> int:
        return self.tiles[1] if self.tiles else -(-self.seqlen_k // block_N)


@dataclass(frozen=True)
class Tables:
    """Of a launch with varlen: what its small kernels take after their other arguments."""

    queries: torch.Tensor
    keys: torch.Tensor


class QueryPass:
    """A pass whose CTAs own queries."""

    def __init__(self, one: BwdPass, kernel: Kernel, kernels: BwdKernels, sizes: BwdSizes):
        batch, heads, group = sizes.batch, sizes.heads, sizes.heads_per_kv
        kv_bytes = 2 * sizes.seqlen_k * sizes.width
        queries = sizes.rounded_q if sizes.tiles else sizes.seqlen_q
        counts = plan(batch, heads, group, kv_bytes, queries, one.block_M, MAX_GRID)
        self.kernel, self.counts = kernel, (group, *counts)

    def launch(
        self,
        inputs: tuple[Argument, ...],
        dq: Argument,
        dk: Argument,
        dv: Argument,
        softmax_scale: float,
        options: tuple = (),
        tables: Tables | None = None,
    ) -> None:
        if tables is not None:
            options = *options[:-1], tables.queries
        self.kernel(*inputs, dq, softmax_scale, *self.counts, *options)


class KeyPass:
    """A pass whose CTAs own keys, with the sums it may leave to others."""

    def __init__(self, one: BwdPass, kernel: Kernel, kernels: BwdKernels, sizes: BwdSizes):
        batch, heads_kv = sizes.batch, sizes.heads_kv
        head_dim, head_dim_v = kernels.problem.head_dim, kernels.problem.head_dim_v
        n_blocks = sizes.key_blocks(one.block_N)
        parts, heads_per_part = _key_parts(batch, sizes.heads, heads_kv, n_blocks, sizes.sms)
        q_bytes = sizes.seqlen_q * heads_per_part * (2 * sizes.width + 4 * head_dim * one.adds_dq)
        counts = plan(batch, heads_kv * parts, 1, q_bytes, n_blocks * one.block_N, one.block_N, MAX_GRID)
        self.kernel, self.counts = kernel, (sizes.heads_per_kv, heads_per_part, parts, *counts)
        self.sum_qk, self.sum_v = kernels.sum_qk, kernels.sum_v

        self.adds_dq = one.adds_dq
        self.dk_in_parts, self.dv_in_parts = (parts > 1 and grad in one.makes for grad in ("dk", "dv"))
        self.row_blocks_q, self.row_blocks_k = sizes.rounded_q // 16, n_blocks * one.block_N // 16
        rows_q = batch * sizes.heads * self.row_blocks_q
        rows_k = parts * batch * heads_kv * self.row_blocks_k
        self.dq_sum = _fragment_blocks(rows_q * self.adds_dq, head_dim)
        self.dk_parts = _fragment_blocks(rows_k * self.dk_in_parts, head_dim)
        self.dv_parts = _fragment_blocks(rows_k * self.dv_in_parts, head_dim_v)
        self.parts = parts

    def launch(
        self,
        inputs: tuple[Argument, ...],
        dq: Argument,
        dk: Argument,
        dv: Argument,
        softmax_scale: float,
        options: tuple = (),
        tables: Tables | None = None,
    ) -> None:
        dq_sum, dk_parts, dv_parts = _empty(*self.dq_sum), _empty(*self.dk_parts), _empty(*self.dv_parts)
        if self.adds_dq:
            dq_sum.zero_()
        of_queries = of_keys = ()
        if tables is not None:
            of_queries, of_keys = (False, tables.queries), (True, tables.keys)
            options = *options[:-1], tables.keys
        self.kernel(*inputs, dq_sum, dk, dv, dk_parts, dv_parts, softmax_scale, *self.counts, *options)
        if self.adds_dq:
            self.sum_qk(dq_sum, dq, softmax_scale, 1, self.row_blocks_q, *of_queries)
        if self.dk_in_parts:
            self.sum_qk(dk_parts, dk, 1.0, self.parts, self.row_blocks_k, *of_keys)
        if self.dv_in_parts:
            self.sum_v(dv_parts, dv, 1.0, self.parts, self.row_blocks_k, *of_keys)


class BwdPlan:
    """All of a backward that the shapes, strides, dtype and device of its tensors settle. Serves one thread.

    Args:
        dout, q, k, v, out, dq, dk, dv: [batch, heads, seqlen, head_dim] if heads_first, else [batch, seqlen, heads, head_dim]; on the
            current device, none of them empty.
        config: serves instead of the tuned row or default.
    """

    def __init__(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        causal: bool,
        heads_first: bool,
        deterministic: bool,
        config: BwdConfig | None = None,
        extras: Extras | None = None,
    ):
        self.packed = extras is not None and extras.varlen
        self.device = q.device.index
        self.grads = [_dense(x.shape, x.dtype) for x in (q, k, v)]
        tensors = q, k, v, dout, out, dq, dk, dv
        if self.packed:
            q, k, v, *_ = tensors = [x[None] for x in tensors]
        seq, head = (2, 1) if heads_first else (1, 2)
        batch, seqlen_q, heads, head_dim = q.shape[0], q.shape[seq], q.shape[head], q.shape[3]
        seqlen_k, heads_kv, head_dim_v = k.shape[seq], k.shape[head], v.shape[3]
        self.views = Views(heads_first, *tensors, packed=self.packed)
        self.batch = extras.cu_seqlens_q.shape[0] - 1 if self.packed else batch
        self.heads = heads

        bucket = length_bucket(extras.max_seqlen_k if self.packed else seqlen_k)
        # A sink is in the log-sum-exp, and so in all probabilities
        names = () if extras is None else tuple(name for name in extras.names if name != "sink")
        self.has_options = bool(names)
        key = (q.dtype, head_dim, head_dim_v, causal, names, bucket, self.device)
        direction = "bwd_det" if deterministic else "bwd"
        if config is None:
            kernels = _bwd_launchers.get((direction, key))
            if kernels is None:
                kernels = _bwd_launchers[direction, key] = _find_bwd_kernels(key, direction, None)
        else:
            kernels = _find_bwd_kernels(key, direction, config)
        self.delta = kernels.delta
        tiles = None
        if self.packed:
            self.sequences = Sequences(kernels.plan, self.batch, seqlen_q, seqlen_k, causal, self.device)
            tiles = self.sequences.tiles
        width, sms = head_dim + head_dim_v, sm_count(self.device)
        sizes = BwdSizes(batch, heads, heads_kv, seqlen_q, seqlen_k, width, sms, tiles)
        self.seqlen_q, self.rows = seqlen_q, _dense((batch, heads, sizes.rounded_q))
        self.passes = [
            (QueryPass if one.grads == "dq" else KeyPass)(one, kernel, kernels, sizes)
            for one, kernel in kernels.passes
        ]

    def __call__(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        softmax_scale: float,
        lse_base2: bool,
        dlse: torch.Tensor | None = None,
        extras: Extras | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv, in the layout of q, and with a sink dsink, of other tensors of the same metadata."""
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(dout, q, k, v, out, lse, softmax_scale, lse_base2, dlse, extras)
        dq, dk, dv = (_empty(*x) for x in self.grads)
        return self.launch(dout, q, k, v, out, lse, dq, dk, dv, softmax_scale, lse_base2, dlse, extras)

    def launch(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        softmax_scale: float,
        lse_base2: bool,
        dlse: torch.Tensor | None,
        extras: Extras | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Fills dq, dk, dv and returns them, and with a sink dsink."""
        made = dq, dk, dv
        sink = None if extras is None else extras.sink
        # Each kernel has an fp32 tensor among its arguments, and so runs on PyTorch's current stream of its device
        tensors = q, k, v, dout, out, dq, dk, dv
        if self.packed:
            tensors = [x[None] for x in tensors]
        q, k, v, dout, out, *grads = self.views.of(*tensors)
        lse_log2, delta = _empty(*self.rows), _empty(*self.rows)
        lse, lse_to_log2 = lse.contiguous(), 1.0 if lse_base2 else LOG2E
        options = ()
        if self.has_options:
            options = _option_arguments(extras, self.batch, self.heads, self.device)
        if self.packed:
            tables = Tables(*(self.sequences.table(extras, keys, TABLE_ROWS) for keys in (False, True)))
            dlses = (lse, 0.0) if dlse is None else (dlse.contiguous(), LOG2E if lse_base2 else 1.0)
            if sink is not None:  # padding between sequences and after the last
                lse_log2.fill_(math.inf)
                delta.zero_()
            self.delta(out, dout, lse, dlses[0], lse_log2, delta, lse_to_log2, dlses[1], tables.queries)
            for one in self.passes:
                one.launch((q, k, v, dout, lse_log2, delta), *grads, softmax_scale, options, tables)
            return made if sink is None else (*made, _sink_gradient(sink, lse_log2, delta))
        self.delta(out, dout, lse, lse_log2, delta, lse_to_log2)
        if dlse is not None:
            delta[:, :, : self.seqlen_q] -= _of_natural_lse(dlse, lse, lse_base2)
        for one in self.passes:
            one.launch((q, k, v, dout, lse_log2, delta), *grads, softmax_scale, options)
        return made if sink is None else (*made, _sink_gradient(sink, lse_log2, delta))


def _of_natural_lse(dlse: torch.Tensor, lse: torch.Tensor, lse_base2: bool) -> torch.Tensor:
    """The gradient by lse in natural units; a query that sees no key has none, whatever came of its lse of -inf."""
    return dlse.masked_fill(lse == -math.inf, 0) * (LOG2E if lse_base2 else 1.0)


def _sink_gradient(sink: torch.Tensor, lse_log2: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """[heads], minus the sum of P_sink * delta over all queries; where there is none, lse_log2 is +inf and delta 0."""
    weights = torch.exp2(sink.float()[:, None] * LOG2E - lse_log2)
    return -(weights * delta).sum((0, 2)).to(sink.dtype)


def _bwd_key(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    heads_first: bool,
    deterministic: bool,
) -> tuple:
    """All that checks.check_bwd asks of tensors beside _fwd_key, and all that a plan is made of."""
    return (
        dout.shape, dout.stride(), dout.dtype, dout.device,
        out.shape, out.stride(), out.dtype, out.device,
        lse.shape, lse.dtype, lse.device,
        deterministic,
        *_fwd_key(q, k, v, causal, heads_first),
    )  # fmt: skip


def bwd_plan(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    heads_first: bool,
    deterministic: bool,
) -> BwdPlan | None:
    """That of an earlier call of bwd in this thread, by tensors that differ from these in their values alone."""
    return _plans.bwd.get(_bwd_key(dout, q, k, v, out, lse, causal, heads_first, deterministic))


def bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    heads_first: bool = False,
    deterministic: bool = False,
    dlse: torch.Tensor | None = None,
    config: BwdConfig | None = None,
    extras: Extras | None = None,
) -> tuple[torch.Tensor, ...]:
    """Launch the backward on tensors that checks.py has passed, on a Hopper GPU.

    Args:
        dout, q, k, v, out: [batch, heads, seqlen, head_dim] if heads_first, else [batch, seqlen, heads, head_dim]; the last two and
            lse as the forward returned them.
        lse, dlse: [batch, heads, seqlen_q] fp32, dlse the gradient with respect to lse.
        deterministic: gradients equal bit by bit from run to run.
        config: serves instead of the tuned row or default.
    Returns:
        dq, dk, dv: as q, k, v, in their dtype, contiguous; with a sink also dsink: [heads], in its dtype.
    """
    tensors, layout = (dout, q, k, v, out, lse), (causal, heads_first, deterministic)
    key = (*_bwd_key(*tensors, *layout), *_options_key(extras))
    known = _plans.bwd.get(key) if config is None else None
    if known is not None:
        return known(*tensors, softmax_scale, lse_base2, dlse, extras)
    if torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            return bwd(*tensors, softmax_scale, causal, lse_base2, *layout[1:], dlse, config, extras)
    sink = None if extras is None else extras.sink
    grads = tuple(_empty(*_dense(x.shape, x.dtype)) for x in (q, k, v))
    if not q.numel() or not k.numel():
        zeros = tuple(x.zero_() for x in grads)
        if sink is None:
            return zeros
        if dlse is None or not q.numel():
            return *zeros, torch.zeros_like(sink)
        dsink = _of_natural_lse(dlse, lse, lse_base2)  # lse = sink
        return *zeros, dsink.sum((0, 2) if dlse.ndim == 3 else 1).to(sink.dtype)
    if q.shape[0] <= MAX_BATCH or (extras is not None and extras.varlen):
        made = BwdPlan(*tensors[:5], *grads, *layout, config, extras)
        if config is None:
            _keep(_plans.bwd, key, made)
        return made.launch(*tensors, *grads, softmax_scale, lse_base2, dlse, extras)
    if extras is not None and extras.dropout_p:
        raise NotImplementedError(
            f"dropout_p: a backward with dropout takes a batch of at most {MAX_BATCH}, got {q.shape[0]}; divide it"
        )
    dsink = None if sink is None else torch.zeros_like(sink, dtype=torch.float32)
    for first in range(0, q.shape[0], MAX_BATCH):
        some = [x[first : first + MAX_BATCH] for x in (*tensors, *grads)]
        dlse_some = None if dlse is None else dlse[first : first + MAX_BATCH]
        extras_some = None if extras is None else extras.of_batch(first, MAX_BATCH)
        one = BwdPlan(*some[:5], *some[6:], *layout, config, extras_some)
        made = one.launch(*some, softmax_scale, lse_base2, dlse_some, extras_some)
        if sink is not None:
            dsink += made[3]
    return grads if sink is None else (*grads, dsink.to(sink.dtype))
