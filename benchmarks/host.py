"""Host time: microseconds per eager call, milliseconds of the first call of a process. Run by run.py --host.

The problem is so small that the GPU keeps up with the host: the time per call is host time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import decode
import torch
from first_call import sdpa_backend
from library import Result, Unsupported, import_function
from providers import PROVIDERS, title
from rich.console import Console
from rows import OURS
from tables import bullets, markdown_table

from tl_attention.testing import timer
from tl_attention.testing.inputs import make_dout, make_inputs
from tl_attention.testing.shapes import Shape, ShapeOptions

SHAPE = Shape.parse("1,8,8,128,128,64,full")
CACHE = Shape.parse("1,64,8,1,2048,128,full")
PAGED = Shape.parse("1,64,8,1,2048,128,full,page=64")
ROUNDS = 7
STORED = "host.json"
FIRST_CALLS = 3
# Timed in one process each, as compiling takes long and varies little
COMPILING = ((OURS, "empty"), ("fa4", "empty"))
FIRST_SHAPE = Shape.parse("1,16,16,4096,4096,128,causal")
FIRST = {  # (provider, where its kernels are) -> title; empty: nowhere
    (OURS, "empty"): "tl_attention, empty cache",
    (OURS, "pack"): "tl_attention, empty cache, kernels in the pack",
    (OURS, "disk"): "tl_attention, kernels on disk",
    ("fa4", "empty"): "fa4, empty cache",
    ("fa4", "disk"): "fa4, kernels on disk (by an option of it)",
    ("fa2", "empty"): "fa2 (torch sdpa)",
    ("cudnn", "empty"): "cudnn (torch sdpa)",
}
OLD_FIRST = {
    "fwd": "forward",
    "fwd_bwd": "forward and backward",
}  # rows of results in which each process timed one sum
CACHES = (  # variables with the folders of caches
    "TL_ATTENTION_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "CUTE_DSL_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "XDG_CACHE_HOME",
)
TIMES = ("import", "forward", "backward", "total")
FIRST_CALL_LIMIT = 300.0  # seconds per process
MODES = {
    "forward": "forward, without gradients",
    "autograd": "forward under autograd",
    "both": "forward under autograd, then backward",
    "backward": "backward only",
}
CACHE_MODES = {
    "lengths": "lengths in a tensor",
    "append": "lengths in a tensor, a new key and value, rotary",
    "pages": "lengths in a tensor, pages of 64 keys",
}
CALLS_TEXT = (
    f"Host time in microseconds per eager call on the problem {SHAPE}, bf16: medians of {ROUNDS} interleaved rounds, each of 3 runs of "
    "up to 100 calls without synchronization in between. All are public functions on tensors in their own layout. Backward only is "
    "mha_bwd_interface, ATen's op for PyTorch's backends, and the function behind autograd for FlashAttention-4; forward and backward "
    "calls torch.autograd.grad."
)
CACHES_TEXT = f"The same for the attention of one token to a KV cache, {CACHE}."
FIRST_TEXT = (
    "Milliseconds of the first forward of a new process and of the backward after it, on the problem {problem}, bf16: medians of "
    f"{FIRST_CALLS} processes, of one where kernels are compiled. The clock runs from initialized CUDA and allocated inputs; each part "
    "ends with a synchronization. "
    "`import` is the import of the library after torch. With an empty cache a library compiles its kernels. Ours is flash_attn_func, "
    "with TL_ATTENTION_PACK=0 unless the row names the pack; fa4 is flash_attn.cute; the others are scaled_dot_product_attention."
)


@dataclass(frozen=True)
class Library:
    """A public function of a library, (q, k, v) -> out or (out, ...)."""

    provider: str  # of PROVIDERS
    attend: Callable[..., object]
    heads_first: bool  # [batch, heads, seqlen, head_dim], else [batch, seqlen, heads, head_dim]
    within: Callable[[], contextlib.AbstractContextManager]  # around its calls
    has_backward: bool  # a function for the backward, without autograd


def libraries() -> Iterator[tuple[str, Library]]:
    """(name, library) per installed library."""
    sdpa = ("torch.nn.functional", "scaled_dot_product_attention", True)
    for name, provider, module, function, heads_first in (
        ("mha_*_interface", OURS, "tl_attention", "mha_fwd_interface", True),
        ("flash_attn_func", OURS, "tl_attention", "flash_attn_func", False),
        (
            title("fa2"),
            "fa2",
            *(sdpa if "sdpa" in title("fa2") else ("flash_attn", "flash_attn_func", False)),
        ),
        ("cudnn (torch sdpa)", "cudnn", *sdpa),
        ("fa4", "fa4", "flash_attn.cute", "flash_attn_func", False),
    ):
        with contextlib.suppress(Unsupported):
            attend, within = import_function(module, function), functools.partial(sdpa_backend, provider)
            has_backward = name != "flash_attn_func"  # mha_*_interface has it
            yield name, Library(provider, attend, heads_first, within, has_backward)


def calls(library: Library, device: str = "cuda") -> Iterator[tuple[str, Callable[[], object]]]:
    """(key of MODES, call to time) of a library."""
    tensors = (
        make_dout(SHAPE, torch.bfloat16, device=device),
        *make_inputs(SHAPE, torch.bfloat16, device=device),
    )
    if library.heads_first:
        tensors = tuple(x.transpose(1, 2).contiguous() for x in tensors)
    dout, *qkv = tensors
    leaves = [x.detach().clone().requires_grad_() for x in qkv]

    def both() -> Result:
        out = library.attend(*leaves)
        return torch.autograd.grad(out if isinstance(out, torch.Tensor) else out[0], leaves, dout)

    yield "forward", functools.partial(library.attend, *qkv)
    yield "autograd", functools.partial(library.attend, *leaves)
    yield "both", both
    if library.has_backward:
        yield "backward", backward(library.provider, tensors, library.heads_first)


def backward(name: str, tensors: tuple[torch.Tensor, ...], heads_first: bool) -> Callable[[], object]:
    """The provider's backward as a user calls it, on the results of its forward."""
    provider = PROVIDERS[name]
    if heads_first != (provider.layout == "bhsd"):
        tensors = tuple(x.transpose(1, 2).contiguous() for x in tensors)
    saved = provider.function("fwd")(SHAPE, *tensors[1:], saves=True).launch(*tensors[1:])
    given = (*tensors, *saved)
    return functools.partial(provider.function("bwd")(SHAPE, False, *given).call, *given)


def cache_libraries() -> Iterator[tuple[str, Library]]:
    """(name, library) per library with a function for KV caches."""
    name = "flash_attn_with_kvcache"
    yield name, Library(OURS, import_function("tl_attention", name), False, contextlib.nullcontext, False)


def cache_calls(library: Library, device: str = "cuda") -> Iterator[tuple[str, Callable[[], object]]]:
    """(key of CACHE_MODES, call to time) of a library."""

    def inputs_of(shape: Shape) -> tuple:
        return decode.Caches([shape], torch.bfloat16, device).copies(shape, "bshd")[0]

    q, k, v, seqlens, _ = inputs_of(CACHE)
    yield "lengths", functools.partial(library.attend, q, k, v, cache_seqlens=seqlens)
    angles = torch.rand(CACHE.seqlen_k, CACHE.head_dim // 2, device=device)
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    new = {"k": k[:, :1].clone(), "v": v[:, :1].clone(), "rotary_cos": cos, "rotary_sin": sin}
    yield "append", functools.partial(library.attend, q, k, v, cache_seqlens=seqlens - 1, **new)
    q, k, v, seqlens, pages = inputs_of(PAGED)
    yield "pages", functools.partial(library.attend, q, k, v, cache_seqlens=seqlens, block_table=pages)


def time_calls(
    rivals: Iterable[tuple[str, Library]],
    modes: Mapping[str, str],
    calls: Callable[[Library], Iterator[tuple[str, Callable[[], object]]]],
) -> list[dict[str, object]]:
    """One row per library: microseconds under the keys of modes; `reasons` says why one is missing."""
    rows, ready = [], []
    for name, library in rivals:
        version = PROVIDERS[library.provider].library("fwd")
        row = {"library": name, "provider": library.provider, "version": version, "reasons": {}}
        rows.append(row | dict.fromkeys(modes))
        with library.within():
            made: list[str] = []
            try:
                for mode, call in calls(library):
                    ready.append((rows[-1], library, mode, call))
                    made.append(mode)
            except Exception as error:
                left = [mode for mode in modes if mode not in made]
                rows[-1]["reasons"] = dict.fromkeys(left, timer.first_line(error))
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for row, library, mode, call in ready:
            if mode in row["reasons"]:
                continue
            with library.within():
                try:
                    samples.setdefault((row["library"], mode), []).append(timer.time_eager(call).host_us)
                except Exception as error:
                    row["reasons"][mode] = timer.first_line(error)
    for row in rows:
        row |= {
            mode: statistics.median(samples[row["library"], mode])
            for mode in modes
            if mode not in row["reasons"] and (row["library"], mode) in samples
        }
    return rows


def first_call(provider: str, kernels: str) -> dict[str, float]:
    """Milliseconds of first_call.py in a new process.

    Args:
        kernels: where the kernels are, as in FIRST.
    Raises:
        RuntimeError: the process failed, with its last line; or the pack lacks a kernel.
    """
    script = Path(__file__).with_name("first_call.py")
    command = [sys.executable, str(script), provider, str(FIRST_SHAPE)]
    environment = {name: text for name, text in os.environ.items() if name != "TL_ATTENTION_PACK"}
    environment["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1" if kernels == "disk" else "0"
    if kernels != "pack":
        environment["TL_ATTENTION_PACK"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        if kernels != "disk":
            environment |= {name: str(Path(folder, name)) for name in CACHES}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FIRST_CALL_LIMIT, env=environment
        )
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "-").splitlines()[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    if kernels == "pack" and found["on_disk"]:
        raise RuntimeError(f"expected kernels from the pack, got {found['on_disk']} that were built")
    return found


def time_first_calls() -> list[dict[str, object]]:
    """One row per entry of FIRST: medians of milliseconds, or a reason. Runs after time_calls."""
    rows = []
    for provider, kernels in FIRST:
        row = {"provider": provider, "kernels": kernels, "reason": None}
        try:
            if kernels == "disk":
                first_call(provider, kernels)
            processes = 1 if (provider, kernels) in COMPILING else FIRST_CALLS
            found = [first_call(provider, kernels) for _ in range(processes)]
            for times in found:
                times["total"] = times["import"] + times["forward"] + times["backward"]
            row |= {f"{name}_ms": statistics.median(times[name] for times in found) for name in TIMES}
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            row["reason"] = timer.first_line(error)
        rows.append(row)
    return rows


def first_title(row: dict) -> str:
    if "passes" in row:
        return f"{row['provider']}, kernels on disk, {OLD_FIRST[row['passes']]}"
    return FIRST[row["provider"], row["kernels"]]


def first_times(row: dict) -> dict:
    """Milliseconds of a row by `{name of TIMES}_ms`."""
    return row | {"forward_ms": row.get("call_ms")} if row.get("passes") == "fwd" else row


def stored_page(folder: Path) -> str:
    """The tables of the host.json of a folder."""
    stored = json.loads((folder / STORED).read_text())
    problem = Shape(**stored.get("first_shape", stored["shape"]) | {"options": ShapeOptions()})
    shown = tables(stored["calls"], stored.get("cache_calls", []), stored["first_calls"], problem)
    return f"Commit {stored['environment']['commit']}.\n\n{shown}"


def tables(called: list[dict], cached: list[dict], first: list[dict], problem: Shape) -> str:
    """The tables, with the reasons of missing numbers; `problem` is that of the first calls."""

    def numbers(row: dict, keys: Iterable[str]) -> list[str]:
        return ["–" if row.get(key) is None else f"{row[key]:.1f}" for key in keys]

    def by_mode(rows: list[dict], modes: Mapping[str, str]) -> str:
        columns = zip(*(numbers(row, modes) for row in rows), strict=True)
        cells = [[words, *of_mode] for words, of_mode in zip(modes.values(), columns, strict=True)]
        return markdown_table(["microseconds", *(row["library"] for row in rows)], cells)

    by_process = [
        [first_title(row), *numbers(first_times(row), (f"{name}_ms" for name in TIMES))] for row in first
    ]
    reasons = [
        f"{row['library']}, {(MODES | CACHE_MODES)[mode]}: {why}"
        for row in called + cached
        for mode, why in row["reasons"].items()
    ]
    reasons += [f"{first_title(row)}: {row['reason']}" for row in first if row["reason"]]
    parts = [
        bullets(f"{row['library']}: {row['version']}" for row in called),
        CALLS_TEXT,
        by_mode(called, MODES),
        CACHES_TEXT if cached else "",
        by_mode(cached, CACHE_MODES) if cached else "",
        FIRST_TEXT.format(problem=problem),
        markdown_table(["milliseconds", "import", "forward", "backward", "all"], by_process),
        bullets(reasons),
    ]
    return "\n\n".join(part for part in parts if part)


def run(console: Console, out: Path, environment: dict[str, str]) -> int:
    """Measure all, write host.json and show its tables. Returns 1 if something of ours failed."""
    called = time_calls(libraries(), MODES, calls)
    cached = time_calls(cache_libraries(), CACHE_MODES, cache_calls)
    first = time_first_calls()
    out.mkdir(parents=True, exist_ok=True)
    stored = {"environment": environment, "shape": asdict(SHAPE), "calls": called, "first_calls": first}
    stored |= {"cache": asdict(CACHE), "cache_calls": cached, "first_shape": asdict(FIRST_SHAPE)}
    (out / STORED).write_text(json.dumps(stored, indent=1) + "\n")
    console.print(tables(called, cached, first, FIRST_SHAPE), markup=False, highlight=False)
    console.print(f"Written: {out / STORED}")
    failed = [row for row in called + cached if row["reasons"]]
    failed += [row for row in first if row["reason"] and row["kernels"] != "pack"]  # which may be absent
    return int(any(row["provider"] == OURS for row in failed))
