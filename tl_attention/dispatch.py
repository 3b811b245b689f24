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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tl_attention import configs
from tl_attention.problem import (
    BUCKETS,
    AttnProblem,
    BwdConfig,
    BwdDelta,
    BwdPass,
    BwdSum,
    Config,
    FwdConfig,
    KernelConfig,
    delta_width,
    length_bucket,
    tuning_key,
)
from tl_attention.target import TARGET, sm_count

LN2 = math.log(2.0)
LOG2E = 1 / LN2
MAX_GRID = 2**31 - 1  # CTAs of one launch
# Of one backward, whose small kernels have the batch in the last dimension of their grids
MAX_BATCH = 2**16 - 1
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
L2_SHARE = 32 << 20  # bytes of a 50 MB L2 that the keys and values of one group of heads may fill
# Counters a device has; when streams and captured launches have used them up, a new one is a memset before its launch
TICKET_ROWS = 1 << 15

QUERY_ROWS = 128  # that the log-sum-exp, delta and the sums of dq are padded to a multiple of
WAVES = 4  # of CTAs that a pass by keys is to have, if a key head has query heads enough to divide among them

# No template imports another; all import the other files of kernels/
TEMPLATES = {
    FwdConfig: ("fwd", "flash_fwd"),
    BwdDelta: ("bwd_delta", "flash_bwd_delta"),
    BwdPass: ("bwd", "flash_bwd"),
    "dq": ("bwd_dq", "flash_bwd_dq"),
    BwdSum: ("bwd_sum", "flash_bwd_sum"),
}

Kernel = Callable[..., None]

_compiled: dict[tuple[AttnProblem, KernelConfig], Kernel] = {}
_launchers: dict[tuple, tuple[Kernel, FwdConfig, int]] = {}
_bwd_launchers: dict[tuple, BwdKernels] = {}
_offices: dict[int, TicketOffice] = {}
_lock = threading.Lock()


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
    for path in sorted([*kernels, folder / "problem.py", folder / "target.py"]):
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
    return getattr(module, function)(problem, config), module.PASS_CONFIGS


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
    return artifact.kernel_source, int(function.attrs["dyn_shared_memory_buf"])


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
def _load_runtime() -> None:
    """The libraries of tilelang a compiled kernel calls into; importing tilelang itself would take most of a second."""
    if "tilelang" in sys.modules:
        return
    root = importlib.util.find_spec("tilelang").submodule_search_locations[0]
    for name in ("tvm_runtime", "tvm_compiler", "tilelang"):
        ctypes.CDLL(str(Path(root, "lib", f"lib{name}.so")), ctypes.RTLD_GLOBAL)


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
        _load_runtime()
        import tvm_ffi

        _compiled[key] = tvm_ffi.load_module(str(path))["main"]
    return _compiled[key]


def tma_ready(x: torch.Tensor) -> torch.Tensor:
    """x [batch, seqlen, heads, columns], or what TMA can address in its place.

    TMA takes an address and strides that are multiples of 16 bytes, and no stride of 0. A dimension of size 1 gets another
    stride; any other tensor that breaks this (an expanded one, a slice at an odd column) is copied.
    """
    s0, s1, s2, _ = x.stride()
    if s0 and s1 and s2 and not (s0 | s1 | s2) & 7 and not x.data_ptr() & 15:
        return x
    strides = [
        s if n > 1 else 8 * math.ceil(x.shape[-1] / 8) for n, s in zip(x.shape[:3], (s0, s1, s2), strict=True)
    ]
    if all(s and not s % 8 for s in strides) and not x.data_ptr() & 15:
        return x.as_strided(x.shape, (*strides, 1))
    return x.clone(memory_format=torch.contiguous_format)


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
            return self.rows[0]
        if torch.cuda.is_current_stream_capturing():
            return self.row()
        stream = torch.cuda.current_stream(device).cuda_stream
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


def _find_config(key: tuple, direction: str, config: Config | None) -> tuple[AttnProblem, Config]:
    """The problem of a launch key, and the config that serves it, compiled as are those of its other lengths."""
    dtype, head_dim, head_dim_v, causal, bucket, device = key
    problem = AttnProblem.of(DTYPE_NAMES[dtype], head_dim, head_dim_v, causal, direction)
    source = "explicit"
    if config is None:
        gpu = torch.cuda.get_device_name(device)
        config, source = configs.pick_config(problem, bucket, gpu, direction)
        for other in BUCKETS:  # so that no length compiles later
            compile_config(problem, configs.pick_config(problem, other, gpu, direction)[0])
    elif reason := configs.is_legal(problem, config, direction):
        raise ValueError(f"config: {config} cannot run {problem}: {reason}")
    if os.environ.get("TL_ATTENTION_PRINT_CONFIGS") == "1":
        print(
            f"tl_attention: {direction} {tuning_key(problem, bucket)} -> {config} ({source})", file=sys.stderr
        )
    return problem, config


def _find_kernel(key: tuple, config: FwdConfig | None) -> tuple[Kernel, FwdConfig, int]:
    """The kernel of a launch key, its config, and how many CTAs it may have."""
    problem, config = _find_config(key, "fwd", config)
    max_ctas = MAX_GRID if config.schedule == "grid" else sm_count(key[-1])
    return compile_kernel(problem, config), config, max_ctas


def empty_view(
    x: torch.Tensor, batch: int, seqlen: int, heads: int, head_dim: int, heads_first: bool
) -> torch.Tensor:
    """A view [batch, seqlen, heads, head_dim] of a new tensor like x."""
    if heads_first:
        return x.new_empty((batch, heads, seqlen, head_dim)).transpose(1, 2)
    return x.new_empty((batch, seqlen, heads, head_dim))


def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    heads_first: bool = False,
    config: FwdConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward on tensors that checks.py has passed, on a Hopper GPU.

    Args:
        q, k, v: views [batch, seqlen, heads, head_dim].
        heads_first: lay out out as [batch, heads, seqlen_q, head_dim_v] in memory, else as [batch, seqlen_q, heads, head_dim_v].
        config: serves instead of the tuned row or default.
    Returns:
        out [batch, seqlen_q, heads, head_dim_v], a view if heads_first; lse [batch, heads, seqlen_q] fp32.
    """
    batch, seqlen_q, heads, _ = q.shape
    out = empty_view(q, batch, seqlen_q, heads, v.shape[3], heads_first)
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    if not out.numel():
        return out, lse
    if not k.shape[1]:
        return out.zero_(), lse.fill_(-math.inf)

    device = q.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(q, k, v, out, lse, softmax_scale, causal, lse_base2, config)
    return launch(q, k, v, out, lse, softmax_scale, causal, lse_base2, config)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    config: FwdConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel on q's device, the current one. No tensor is empty.

    out, which TMA can address, and lse, contiguous, are written and returned.
    """
    device = q.device.index
    key = (q.dtype, q.shape[3], v.shape[3], causal, length_bucket(k.shape[1]), device)
    if config is None:
        found = _launchers.get(key)
        if found is None:
            found = _launchers[key] = _find_kernel(key, None)
    else:
        found = _find_kernel(key, config)
    kernel, config, max_ctas = found
    tickets = _tickets(device, config.schedule == "dynamic")
    batch, seqlen_q, heads, head_dim = q.shape
    heads_a_kv_head = heads // k.shape[2]
    kv_bytes = 2 * k.shape[1] * (head_dim + v.shape[3])
    counts = plan(batch, heads, heads_a_kv_head, kv_bytes, seqlen_q, config.block_M, max_ctas)
    unit = 1.0 if lse_base2 else LN2
    kernel(
        tma_ready(q),
        tma_ready(k),
        tma_ready(v),
        out,
        lse,
        tickets,
        softmax_scale,
        unit,
        heads_a_kv_head,
        *counts,
    )
    return out, lse


@dataclass(frozen=True)
class BwdKernels:
    """The compiled kernels of a backward."""

    problem: AttnProblem
    delta: Kernel
    passes: tuple[tuple[BwdPass, Kernel], ...]
    sum_qk: Kernel
    sum_v: Kernel


def _find_bwd_kernels(key: tuple, direction: str, config: BwdConfig | None) -> BwdKernels:
    problem, config = _find_config(key, direction, config)
    return BwdKernels(
        problem,
        compile_kernel(problem.of_width(delta_width(problem.head_dim_v)), BwdDelta()),
        tuple((one, compile_kernel(problem, one)) for one in config.passes),
        compile_kernel(problem.of_width(problem.head_dim), BwdSum()),
        compile_kernel(problem.of_width(problem.head_dim_v), BwdSum()),
    )


def _key_parts(batch: int, heads: int, heads_kv: int, n_blocks: int, sms: int) -> tuple[int, int]:
    """(parts, heads_a_part): among how many CTAs the query heads of a key head are divided, and how many each has."""
    heads_a_kv_head = heads // heads_kv
    parts = min(heads_a_kv_head, -(-WAVES * sms // (n_blocks * heads_kv * batch)))
    heads_a_part = -(-heads_a_kv_head // parts)
    return -(-heads_a_kv_head // heads_a_part), heads_a_part


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the backward on tensors that checks.py has passed, on a Hopper GPU.

    Args:
        dout, q, k, v, out: views [batch, seqlen, heads, head_dim]; the last two and lse as the forward returned them.
        lse, dlse: [batch, heads, seqlen_q] fp32, dlse the gradient with respect to lse.
        heads_first: lay out the gradients as [batch, heads, seqlen, head_dim] in memory, else as [batch, seqlen, heads, head_dim].
        deterministic: gradients equal bit by bit from run to run.
        config: serves instead of the tuned row or default.
    Returns:
        dq, dk, dv: as q, k, v, in their dtype; views if heads_first.
    """
    grads = tuple(empty_view(x, *x.shape, heads_first) for x in (q, k, v))
    if not q.numel() or not k.numel():
        return tuple(x.zero_() for x in grads)
    tensors, options = (dout, q, k, v, out, lse, *grads), (softmax_scale, causal, lse_base2, deterministic)
    with torch.cuda.device(q.device):
        if q.shape[0] <= MAX_BATCH:
            return launch_bwd(*tensors, *options, dlse, config)
        for first in range(0, q.shape[0], MAX_BATCH):
            some = slice(first, first + MAX_BATCH)
            dlse_some = None if dlse is None else dlse[some]
            launch_bwd(*(x[some] for x in tensors), *options, dlse_some, config)
    return grads


def launch_bwd(
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
    causal: bool,
    lse_base2: bool,
    deterministic: bool = False,
    dlse: torch.Tensor | None = None,
    config: BwdConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the kernels on q's device, the current one. No tensor is empty.

    dq, dk and dv, which TMA can address, are written and returned.
    """
    device = q.device.index
    key = (q.dtype, q.shape[3], v.shape[3], causal, length_bucket(k.shape[1]), device)
    direction = "bwd_det" if deterministic else "bwd"
    if config is None:
        kernels = _bwd_launchers.get((direction, key))
        if kernels is None:
            kernels = _bwd_launchers[direction, key] = _find_bwd_kernels(key, direction, None)
    else:
        kernels = _find_bwd_kernels(key, direction, config)
    problem = kernels.problem
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, heads_kv = k.shape[1], k.shape[2]
    heads_a_kv_head = heads // heads_kv
    rounded_q = -(-seqlen_q // QUERY_ROWS) * QUERY_ROWS
    dout, out = (x if x.stride(3) == 1 else x.contiguous() for x in (dout, out))
    q, k, v, dout, out = (tma_ready(x) for x in (q, k, v, dout, out))

    rows = q.new_empty((2, batch, heads, rounded_q), dtype=torch.float32)
    lse_log2, delta = rows.unbind()
    kernels.delta(out, dout, lse.contiguous(), lse_log2, delta, 1.0 if lse_base2 else LOG2E)
    if dlse is not None:
        # A query that sees no key has no gradient, whatever came of its lse of -inf
        natural = dlse.masked_fill(lse == -math.inf, 0) * (LOG2E if lse_base2 else 1.0)
        delta[:, :, :seqlen_q] -= natural

    for one, kernel in kernels.passes:
        if one.grads == "dq":
            kv_bytes = 2 * seqlen_k * (q.shape[3] + v.shape[3])
            counts = plan(batch, heads, heads_a_kv_head, kv_bytes, seqlen_q, one.block_M, MAX_GRID)
            kernel(q, k, v, dout, lse_log2, delta, dq, softmax_scale, heads_a_kv_head, *counts)
            continue
        n_blocks = -(-seqlen_k // one.block_N)
        parts, heads_a_part = _key_parts(batch, heads, heads_kv, n_blocks, sm_count(device))
        q_row_blocks, k_row_blocks = rounded_q // 16, n_blocks * one.block_N // 16
        dq_row_blocks = batch * heads * q_row_blocks * one.adds_dq
        dq_sum = rows.new_zeros((dq_row_blocks, problem.head_dim // 8, 32, 4))
        part_row_blocks = (parts > 1) * parts * batch * heads_kv * k_row_blocks
        dk_parts, dv_parts = (
            rows.new_empty((part_row_blocks * (grad in one.makes), width // 8, 32, 4))
            for grad, width in (("dk", problem.head_dim), ("dv", problem.head_dim_v))
        )
        q_bytes = (
            seqlen_q * heads_a_part * (2 * (q.shape[3] + v.shape[3]) + 4 * problem.head_dim * one.adds_dq)
        )
        counts = plan(batch, heads_kv * parts, 1, q_bytes, seqlen_k, one.block_N, MAX_GRID)
        kernel(
            q, k, v, dout, lse_log2, delta, dq_sum, dk, dv, dk_parts, dv_parts,
            softmax_scale, heads_a_kv_head, heads_a_part, parts, *counts,
        )  # fmt: skip
        if one.adds_dq:
            kernels.sum_qk(dq_sum, dq, softmax_scale, 1, q_row_blocks)
        if parts > 1 and "dk" in one.makes:
            kernels.sum_qk(dk_parts, dk, 1.0, parts, k_row_blocks)
        if parts > 1 and "dv" in one.makes:
            kernels.sum_v(dv_parts, dv, 1.0, parts, k_row_blocks)
    return dq, dk, dv
