"""Packs of kernels on a GPU: python benchmarks/pack.py check|time

check   Forty problems of all kinds with a pack, in a process that cannot import TileLang, and with kernels compiled here, in
        another. Prints per problem whether all bits are equal. Builds both the pack and the kernels first, of these problems alone,
        or takes an installed pack (--installed). Status 1 if one differs.
time    Import to result of a fresh process with the installed pack and an empty cache: a forward, and a forward with backward.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
BLOCKED = "tilelang"  # None in sys.modules: not installed
BEGIN = time.monotonic()

# Name -> a function below and its keywords; one per kind of kernel and launch
PROBLEMS: dict[str, tuple[str, dict]] = {
    "d64 full": ("dense", {"head_dim": 64}),
    "d128 causal": ("dense", {"head_dim": 128, "causal": True}),
    "d128 causal fp16": ("dense", {"head_dim": 128, "causal": True, "dtype": torch.float16}),
    "d96 GQA": ("dense", {"head_dim": 96, "heads_kv": 2}),
    "d192-128 causal": ("dense", {"head_dim": 192, "head_dim_v": 128, "causal": True}),
    "d256 causal": ("dense", {"head_dim": 256, "causal": True}),
    "d128 deterministic": ("dense", {"head_dim": 128, "causal": True, "deterministic": True}),
    "d64 1000 keys": ("dense", {"head_dim": 64, "seqlen": 1000, "causal": True}),
    "d128 split": ("dense", {"head_dim": 128, "seqlen": 128, "seqlen_k": 16384, "heads": 2, "heads_kv": 2, "grad": False}),
    "d128 window": ("dense", {"head_dim": 128, "causal": True, "window_size": (256, 0)}),
    "d128 softcap": ("dense", {"head_dim": 128, "softcap": 30.0}),
    "d64 alibi": ("dense", {"head_dim": 64, "causal": True, "alibi": True}),
    "d128 sink": ("dense", {"head_dim": 128, "causal": True, "sink": True}),
    "d128 dropout": ("dense", {"head_dim": 128, "causal": True, "dropout_p": 0.25}),
    "d128 varlen": ("packed", {"head_dim": 128}),
    "d64 varlen fp16": ("packed", {"head_dim": 64, "dtype": torch.float16}),
    "d32 full": ("dense", {"head_dim": 32}),
    "d80 causal": ("dense", {"head_dim": 80, "causal": True}),
    "d96-64 causal": ("dense", {"head_dim": 96, "head_dim_v": 64, "causal": True}),
    "d160 full": ("dense", {"head_dim": 160}),
    "d192 causal": ("dense", {"head_dim": 192, "causal": True}),
    "d256 full fp16": ("dense", {"head_dim": 256, "dtype": torch.float16}),
    "d64 64 queries, 800 keys": ("dense", {"head_dim": 64, "seqlen": 64, "seqlen_k": 800, "causal": True}),
    "d128 GQA deterministic": ("dense", {"head_dim": 128, "heads_kv": 2, "deterministic": True}),
    "d64 window deterministic": ("dense", {"head_dim": 64, "window_size": (200, 100), "deterministic": True}),
    "d256 window, softcap": ("dense", {"head_dim": 256, "causal": True, "window_size": (256, 0), "softcap": 20.0}),
    "d64 window, sink": ("dense", {"head_dim": 64, "causal": True, "window_size": (128, 0), "sink": True}),
    "d64 fp32": ("dense", {"head_dim": 64, "causal": True, "dtype": torch.float32, "seqlen": 600}),
    "d128 fp32": ("dense", {"head_dim": 128, "dtype": torch.float32, "seqlen": 600}),
    "d128 varlen window": ("packed", {"head_dim": 128, "window_size": (256, 0)}),
    "d192 varlen": ("packed", {"head_dim": 192}),
    "d256 varlen": ("packed", {"head_dim": 256}),
    "d64 varlen dropout": ("packed", {"head_dim": 64, "dropout_p": 0.25}),
    "decode": ("decode", {}),
    "decode of several queries": ("decode", {"queries": 4, "heads": 64}),
    "decode of pages": ("decode", {"page": 64}),
    "decode with append": ("decode", {"page": 16, "append": True}),
    "decode of 16 queries": ("decode", {"queries": 16, "heads": 8}),
    "decode with a window": ("decode", {"window_size": (500, 0)}),
    "decode with softcap": ("decode", {"softcap": 30.0}),
}  # fmt: skip


def random(seed: int, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(sizes, generator=generator, dtype=dtype, device="cuda")


def gradients(out: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad((out * random(7, *out.shape, dtype=out.dtype)).sum(), inputs))


def dense(
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seqlen: int = 2048,
    seqlen_k: int | None = None,
    heads: int = 8,
    heads_kv: int = 8,
    grad: bool = True,
    alibi: bool = False,
    sink: bool = False,
    **options,
) -> list[torch.Tensor]:
    """Out and gradients of flash_attn_func."""
    from tl_attention import flash_attn_func

    q = random(1, 2, seqlen, heads, head_dim, dtype=dtype)
    k = random(2, 2, seqlen_k or seqlen, heads_kv, head_dim, dtype=dtype)
    v = random(3, 2, seqlen_k or seqlen, heads_kv, head_dim_v or head_dim, dtype=dtype)
    if alibi:
        options["alibi_slopes"] = torch.logspace(-1, -4, heads, 2.0, device="cuda")
    if sink:
        options["learnable_sink"] = torch.linspace(-1, 1, heads, device="cuda")
    if options.get("dropout_p"):
        options["rng_state"] = torch.tensor([5, 6], device="cuda")
    inputs = [x.requires_grad_(grad) for x in (q, k, v)]
    out = flash_attn_func(*inputs, **options)
    return [out, *(gradients(out, *inputs) if grad else ())]


def packed(head_dim: int, dtype: torch.dtype = torch.bfloat16, **options) -> list[torch.Tensor]:
    """Out and gradients of flash_attn_varlen_func."""
    from tl_attention import flash_attn_varlen_func

    ends = torch.tensor([0, 1, 700, 2000, 4096], dtype=torch.int32, device="cuda")
    inputs = [random(seed, 4096, 8, head_dim, dtype=dtype).requires_grad_() for seed in (1, 2, 3)]
    if options.get("dropout_p"):
        options["rng_state"] = torch.tensor([5, 6], device="cuda")
    out = flash_attn_varlen_func(*inputs, ends, ends, 2096, 2096, causal=True, **options)
    return [out, *gradients(out, *inputs)]


def decode(
    queries: int = 1, heads: int = 32, page: int = 0, append: bool = False, **options
) -> list[torch.Tensor]:
    """Out of flash_attn_with_kvcache, with append also the caches."""
    from tl_attention import flash_attn_with_kvcache

    lengths = torch.tensor([5, 1000, 2000, 3000], dtype=torch.int32, device="cuda")
    options |= {"cache_seqlens": lengths, "causal": True}
    sizes = (4, 4096) if not page else (4 * 4096 // page, page)
    k_cache, v_cache = (random(seed, *sizes, 8, 128) for seed in (2, 3))
    if page:
        pages = torch.randperm(sizes[0], generator=torch.Generator().manual_seed(0))
        options["block_table"] = pages.int().view(4, -1).cuda()
    if append:
        options |= {"k": random(4, 4, queries, 8, 128), "v": random(5, 4, queries, 8, 128)}
    out = flash_attn_with_kvcache(random(1, 4, queries, heads, 128), k_cache, v_cache, **options)
    return [out, k_cache, v_cache] if append else [out]


def results(name: str) -> list[str]:
    """Hash of the bits of each result of a problem. A dq that atomic additions sum has other bits each time and is left out."""
    kind, options = PROBLEMS[name]
    found = {"dense": dense, "packed": packed, "decode": decode}[kind](**options)
    if kind != "decode" and len(found) > 1 and not options.get("deterministic"):
        del found[1]
    torch.cuda.synchronize()
    return [
        hashlib.sha256(x.detach().contiguous().view(torch.uint8).cpu().numpy()).hexdigest()[:16]
        for x in found
    ]


def compute(kernels: str, folder: str = "") -> None:
    """Print the results of all problems as JSON, or the error of a problem in their place.

    Args:
        kernels: pack, without TileLang; jit, without a pack.
        folder: for the wheel of a pack with the kernels that were loaded; none is written if empty.
    """
    if kernels == "pack":
        sys.modules[BLOCKED] = None
    from tl_attention.compilation import packing, store

    asked, find = [], store.find
    store.find = lambda *kernel: asked.append(kernel) or find(*kernel)
    found = {}
    for name in PROBLEMS:
        try:
            found[name] = results(name)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    if folder:
        packing.build(list(dict.fromkeys(asked)), Path(folder), say=say)
    print(json.dumps(found))


def say(text: str) -> None:
    """A line of progress, with the seconds of this process."""
    print(f"[{time.monotonic() - BEGIN:5.1f} s] {text}", file=sys.stderr, flush=True)


def build() -> None:
    """Build the kernels of all problems, each problem in a process of its own, which run at the same time."""
    environment = os.environ | {"TL_ATTENTION_PACK": "0", "TL_ATTENTION_QUIET": "1"}
    command = [sys.executable, __file__, "one"]
    running = {name: subprocess.Popen([*command, name], env=environment) for name in PROBLEMS}
    failed = [name for name, process in running.items() if process.wait()]
    say(f"kernels of {len(PROBLEMS) - len(failed)} problems are built" + f"; failed: {failed}" * bool(failed))


def child(command: str, *arguments: str, **variables: str) -> str:
    """The last line that a fresh process prints."""
    environment = os.environ | variables
    done = subprocess.run(
        [sys.executable, __file__, command, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{command}: status {done.returncode}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def check(folder: Path, installed: bool) -> int:
    """Compare the bits of both kinds of kernels. Returns 1 if some differ or a problem has no result."""
    paths = os.environ.get("PYTHONPATH", "")
    folder.mkdir(parents=True, exist_ok=True)
    build()
    theirs = json.loads(child("compute", "jit", *([] if installed else [str(folder)]), TL_ATTENTION_PACK="0"))
    say("computed with kernels compiled here")
    if not installed:
        (wheel,) = folder.glob("*.whl")
        site = folder / "site"
        options = ["--quiet", "--no-deps", "--no-index", "--target"]
        pip = [sys.executable, "-m", "pip", "install", *options, site, wheel]
        subprocess.run(pip, check=True)
        paths = os.pathsep.join(filter(None, [str(site), paths]))
    empty = str(folder / "empty")
    ours = json.loads(child("compute", "pack", PYTHONPATH=paths, TL_ATTENTION_CACHE_DIR=empty))
    say("computed with the pack, without TileLang")
    equal = {name: isinstance(ours[name], list) and ours[name] == theirs[name] for name in PROBLEMS}
    for name, same in equal.items():
        outcome = (
            f"bits equal in {len(ours[name])} results" if same else f"DIFFERS: {ours[name]} {theirs[name]}"
        )
        print(f"{name:28}{outcome}")
    print(f"{sum(equal.values())} of {len(equal)} problems have the bits of kernels compiled here")
    return 0 if all(equal.values()) else 1


def first_result(passes: str) -> None:
    """Print the milliseconds from the import of tl_attention to the result, torch and CUDA being ready, and those of torch."""
    sys.modules[BLOCKED] = None
    q, k, v = (
        torch.randn(4, 4096, 16, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in "qkv"
    )
    dout = torch.randn_like(q)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    from tl_attention import flash_attn_func

    out = flash_attn_func(q, k, v, causal=True)
    if passes == "fwd_bwd":
        torch.autograd.grad((out * dout).sum(), (q, k, v))
    torch.cuda.synchronize()
    print(json.dumps(1000 * (time.perf_counter() - begin)))


def times(repeats: int) -> None:
    """Print the median of several fresh processes."""
    with tempfile.TemporaryDirectory() as empty:
        for passes in ("fwd", "fwd_bwd"):
            run: Callable[[], str] = functools.partial(child, "first", passes, TL_ATTENTION_CACHE_DIR=empty)
            found = [float(run()) for _ in range(repeats)]
            print(
                f"{passes:8} {statistics.median(found):6.0f} ms, {min(found):.0f} to {max(found):.0f} in {repeats} processes"
            )
        assert not list(Path(empty).rglob("*.so"))


def main() -> int:
    commands = {"one": results, "compute": compute, "first": first_result}
    if sys.argv[1:] and sys.argv[1] in commands:  # a process of check or time
        commands[sys.argv[1]](*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("check", "time"))
    parser.add_argument(
        "--installed",
        action="store_true",
        help="check: the installed pack, which has kernels for all problems",
    )
    parser.add_argument("--folder", type=Path, help="check: keep the pack and its installation here")
    parser.add_argument("--repeats", type=int, default=5, help="time: processes; default: %(default)s")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("benchmarks/pack.py needs an NVIDIA Hopper GPU")
        return 2
    if arguments.command == "time":
        times(arguments.repeats)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        return check(arguments.folder or Path(temporary), arguments.installed)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
