"""From a call to a launch: (problem, config) -> compiled kernel -> outputs. The short hot path of the package.

Kernels are compiled once, kept on disk under cache_dir() and in a dict of the process. A process that finds its kernel on
disk loads it without importing tilelang, which takes longer than loading.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tl_attention import configs
from tl_attention.problem import AttnProblem, FwdConfig, length_bucket, tile_width, tuning_key
from tl_attention.target import TARGET, sm_count

LN2 = math.log(2.0)
MAX_GRID = 2**31 - 1  # CTAs of one launch
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
L2_SHARE = 32 << 20  # bytes of a 50 MB L2 that the keys and values of one group of heads may fill
GRAPH_TICKETS = (
    1 << 15
)  # launches of dynamic kernels that captured graphs may hold, before each costs a memset of its own

Kernel = Callable[..., None]

_compiled: dict[tuple[AttnProblem, FwdConfig], Kernel] = {}
_launchers: dict[tuple, Kernel] = {}
_stream_tickets: dict[tuple[int, int], torch.Tensor] = {}
_graph_tickets: dict[int, tuple[torch.Tensor, Any]] = {}


def cache_dir() -> Path:
    """Where compiled kernels lie: TL_ATTENTION_CACHE_DIR, else tl_attention/ in TILELANG_CACHE_DIR or the user's cache."""
    if explicit := os.environ.get("TL_ATTENTION_CACHE_DIR"):
        return Path(explicit)
    if tilelang_cache := os.environ.get("TILELANG_CACHE_DIR"):
        return Path(tilelang_cache) / "tl_attention"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tl_attention"


def compile_count() -> int:
    """How many kernels this process has compiled or loaded."""
    return len(_compiled)


@functools.cache
def _sources_digest() -> str:
    """Of everything a kernel is made from but its problem and config."""
    folder = Path(__file__).parent
    digest = hashlib.sha256(importlib.metadata.version("tilelang").encode())
    for path in sorted([*folder.glob("kernels/*.py"), folder / "problem.py", folder / "target.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kernel_path(problem: AttnProblem, config: FwdConfig) -> Path:
    """Where the compiled kernel lies, or will; its CUDA source lies beside it as .cu."""
    key = f"{_sources_digest()} {problem!r} {config!r}"
    return cache_dir() / f"fwd-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"


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

    from tl_attention.kernels.fwd import PASS_CONFIGS, flash_fwd

    logging.getLogger("tilelang").setLevel(logging.WARNING)  # it tells of each export
    kernel = tilelang.compile(flash_fwd(problem, config), target=TARGET, pass_configs=PASS_CONFIGS)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        path.with_suffix(".cu").write_text(kernel.get_kernel_source())
        kernel.export_library(str(Path(folder, path.name)))
        os.replace(Path(folder, path.name), path)  # whole or not at all, whoever else compiles it now


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
        kernel(Q, K, V, O, Lse, Tickets, softmax_scale, lse_unit, m_blocks, group_heads, ctas), as kernels/fwd.py describes it.
    """
    key = (problem, config)
    if key not in _compiled:
        path = kernel_path(problem, config)
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


def _tickets(device: int) -> torch.Tensor:
    """The counter of a dynamic kernel: int32 [2], zero whenever no kernel runs with it.

    Kernels on one stream share it, as they run one after the other; a captured launch has one of its own, as graphs may be
    replayed beside each other.
    """
    if torch.cuda.is_current_stream_capturing():
        arena, numbers = _graph_tickets.get(device, (None, None))
        number = next(numbers, None) if numbers is not None else None
        return torch.zeros(2, dtype=torch.int32, device=device) if number is None else arena[number]
    stream = torch.cuda.current_stream(device).cuda_stream
    tickets = _stream_tickets.get((device, stream))
    if tickets is None:
        if device not in _graph_tickets:
            arena = torch.zeros(GRAPH_TICKETS, 2, dtype=torch.int32, device=device)
            _graph_tickets[device] = arena, iter(range(GRAPH_TICKETS))
        tickets = _stream_tickets[device, stream] = torch.zeros(2, dtype=torch.int32, device=device)
    return tickets


@functools.cache
def _unused_tickets(device: int) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


def plan(
    batch: int,
    heads: int,
    heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    row_bytes: int,
    block_M: int,
    max_ctas: int,
) -> tuple[int, int, int]:
    """(m_blocks, group_heads, ctas): what kernels/scheduler.py asks of the host. row_bytes: of one key and its value."""
    m_blocks = -(-seqlen_q // block_M)
    group_heads = max(L2_SHARE // (seqlen_k * row_bytes), 1) * (heads // heads_kv)
    return m_blocks, min(group_heads, heads * batch), min(m_blocks * heads * batch, max_ctas)


def _find_kernel(key: tuple, config: FwdConfig | None) -> tuple[Kernel, FwdConfig, int]:
    """The kernel of a launch key, its config, and how many CTAs it may have."""
    dtype, head_dim, head_dim_v, causal, bucket, device = key
    problem = AttnProblem(DTYPE_NAMES[dtype], *tile_width(head_dim, head_dim_v), causal)
    source = "explicit"
    if config is None:
        config, source = configs.pick_config(problem, bucket, torch.cuda.get_device_name(device))
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
    """Run the kernel on q's device, the current one; out and lse are written and returned. No tensor is empty."""
    device = q.device.index
    key = (q.dtype, q.shape[3], v.shape[3], causal, length_bucket(k.shape[1]), device)
    if config is None:
        found = _launchers.get(key)
        if found is None:
            found = _launchers[key] = _find_kernel(key, None)
    else:
        found = _find_kernel(key, config)
    kernel, config, max_ctas = found
    tickets = _tickets(device) if config.schedule == "dynamic" else _unused_tickets(device)
    batch, seqlen_q, heads, head_dim = q.shape
    row_bytes = 2 * (head_dim + v.shape[3])
    counts = plan(batch, heads, k.shape[2], seqlen_q, k.shape[1], row_bytes, config.block_M, max_ctas)
    unit = 1.0 if lse_base2 else LN2
    kernel(
        tma_ready(q), tma_ready(k), tma_ready(v), tma_ready(out), lse, tickets, softmax_scale, unit, *counts
    )
    return out, lse
