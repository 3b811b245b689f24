"""From a call to a launch: (problem, config) -> compiled kernel -> outputs. The short hot path of the package.

Kernels are compiled once, kept on disk under configs.cache_dir() and in a dict of the process. A process that finds its kernel on
disk loads it without importing tilelang, which takes longer than loading.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
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
from pathlib import Path

import torch

from tl_attention import configs
from tl_attention.problem import BUCKETS, AttnProblem, FwdConfig, length_bucket, tuning_key
from tl_attention.target import TARGET, sm_count

LN2 = math.log(2.0)
MAX_GRID = 2**31 - 1  # CTAs of one launch
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
L2_SHARE = 32 << 20  # bytes of a 50 MB L2 that the keys and values of one group of heads may fill
# Counters a device has; when streams and captured launches have used them up, a new one is a memset before its launch
TICKET_ROWS = 1 << 15

Kernel = Callable[..., None]

_compiled: dict[tuple[AttnProblem, FwdConfig], Kernel] = {}
_launchers: dict[tuple, tuple[Kernel, FwdConfig, int]] = {}
_offices: dict[int, TicketOffice] = {}
_lock = threading.Lock()


def compile_count() -> int:
    """How many kernels this process has compiled or loaded."""
    return len(_compiled)


@functools.cache
def _sources_digest() -> str:
    """Of everything a kernel is made from but its problem and config."""
    folder = Path(__file__).parent
    versions = [importlib.metadata.version(name) for name in ("tilelang", "apache-tvm-ffi")]
    digest = hashlib.sha256(" ".join([*versions, platform.machine()]).encode())
    for path in sorted([*folder.glob("kernels/*.py"), folder / "problem.py", folder / "target.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kernel_path(problem: AttnProblem, config: FwdConfig) -> Path:
    """Where the compiled kernel lies, or will; its CUDA source lies beside it as .cu."""
    key = f"{_sources_digest()} {problem!r} {config!r}"
    return configs.cache_dir() / f"fwd-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"


def lower_fwd(problem: AttnProblem, config: FwdConfig) -> tuple[str, int]:
    """CUDA source of a kernel, and the bytes of dynamic shared memory it asks for. Needs neither GPU nor nvcc."""
    import tilelang
    from tilelang import tvm

    from tl_attention.kernels.fwd import PASS_CONFIGS, flash_fwd

    target = tvm.target.Target(TARGET)
    with tvm.transform.PassContext(opt_level=3, config=PASS_CONFIGS), target:
        artifact = tilelang.lower(flash_fwd(problem, config), target=target)
    (function,) = (f for _, f in artifact.device_mod.functions.items())
    return artifact.kernel_source, int(function.attrs["dyn_shared_memory_buf"])


def _build(problem: AttnProblem, config: FwdConfig, path: Path) -> None:
    import tilelang

    from tl_attention import cubin
    from tl_attention.kernels.fwd import PASS_CONFIGS, flash_fwd

    if cubin.find_nvcc() is None:
        raise RuntimeError(
            f"tl_attention: {problem} needs a kernel that is not compiled yet; {cubin.NO_NVCC}"
        )
    logger = logging.getLogger("tilelang")
    level = logger.level
    logger.setLevel(logging.WARNING)  # it tells of each export
    try:
        kernel = tilelang.compile(flash_fwd(problem, config), target=TARGET, pass_configs=PASS_CONFIGS)
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


def compile_fwd(problem: AttnProblem, config: FwdConfig) -> Kernel:
    """The compiled kernel: from this process, else from disk, else by nvcc for sm_90a (seconds, no GPU needed).

    Returns:
        kernel(Q, K, V, O, Lse, Tickets, softmax_scale, lse_unit, *plan(...)), as kernels/fwd.py describes it.
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
    batch: int,
    heads: int,
    heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    row_bytes: int,
    block_M: int,
    max_ctas: int,
) -> tuple[int, int, int, int]:
    """(heads_a_kv_head, m_blocks, group_heads, ctas): what kernels/scheduler.py asks of the host.

    row_bytes: of one key and its value.
    """
    heads_a_kv_head = heads // heads_kv
    m_blocks = -(-seqlen_q // block_M)
    group_heads = min(max(L2_SHARE // (seqlen_k * row_bytes), 1) * heads_a_kv_head, heads * batch)
    return heads_a_kv_head, m_blocks, group_heads, min(m_blocks * heads * batch, max_ctas)


def _find_kernel(key: tuple, config: FwdConfig | None) -> tuple[Kernel, FwdConfig, int]:
    """The kernel of a launch key, its config, and how many CTAs it may have."""
    dtype, head_dim, head_dim_v, causal, bucket, device = key
    problem = AttnProblem.of(DTYPE_NAMES[dtype], head_dim, head_dim_v, causal)
    source = "explicit"
    if config is None:
        gpu = torch.cuda.get_device_name(device)
        config, source = configs.pick_config(problem, bucket, gpu)
        for other in BUCKETS:  # so that no length compiles later
            compile_fwd(problem, configs.pick_config(problem, other, gpu)[0])
    elif reason := configs.is_legal(problem, config):
        raise ValueError(f"config: {config} cannot run {problem}: {reason}")
    if os.environ.get("TL_ATTENTION_PRINT_CONFIGS") == "1":
        print(f"tl_attention: {tuning_key(problem, bucket)} -> {config} ({source})", file=sys.stderr)
    return compile_fwd(problem, config), config, MAX_GRID if config.schedule == "grid" else sm_count(device)


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
    seqlen_k, head_dim_v = k.shape[1], v.shape[3]
    if heads_first:
        out = q.new_empty((batch, heads, seqlen_q, head_dim_v)).transpose(1, 2)
    else:
        out = q.new_empty((batch, seqlen_q, heads, head_dim_v))
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    if not out.numel():
        return out, lse
    if not seqlen_k:
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
    row_bytes = 2 * (head_dim + v.shape[3])
    counts = plan(batch, heads, k.shape[2], seqlen_q, k.shape[1], row_bytes, config.block_M, max_ctas)
    unit = 1.0 if lse_base2 else LN2
    kernel(tma_ready(q), tma_ready(k), tma_ready(v), out, lse, tickets, softmax_scale, unit, *counts)
    return out, lse
