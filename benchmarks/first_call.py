"""First calls of a process: python benchmarks/first_call.py tl_attention|fa2|fa4|cudnn B,Hq,Hkv,Sq,Sk,D,mask

Prints a JSON object of milliseconds: `import` for the import of the library, `forward` from then until the GPU is done, `backward` for
the gradients after it; and `on_disk`, the number of our kernels in the cache then. The clock starts after torch is imported, CUDA
is initialized and the inputs are allocated. PyTorch's own functions need no further import.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def main(provider: str, sizes: str) -> None:
    *numbers, mask = sizes.split(",")
    batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, *_ = map(int, numbers)
    torch.cuda.init()
    shapes = ((seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    q, k, v = (
        torch.empty(batch, *shape, head_dim, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for shape in shapes
    )
    dout = torch.empty_like(q, requires_grad=False)
    backend = sdpa_backend(provider)
    torch.cuda.synchronize()

    times = [time.perf_counter()]

    def lap() -> None:
        torch.cuda.synchronize()
        times.append(time.perf_counter())

    if provider == "tl_attention":
        from tl_attention import flash_attn_func
    elif provider == "fa4":
        from flash_attn.cute import flash_attn_func
    lap()
    if provider in ("tl_attention", "fa4"):
        out = flash_attn_func(q, k, v, causal=mask == "causal")
        out = out if isinstance(out, torch.Tensor) else out[0]
    else:
        with backend:
            views = (x.transpose(1, 2) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                *views, is_causal=mask == "causal", enable_gqa=heads != heads_kv
            ).transpose(1, 2)
    lap()
    # The gradient of a scalar: for gradients of outputs PyTorch imports sympy, which takes more than a second
    torch.autograd.grad((out * dout).sum(), (q, k, v))
    lap()
    laps = (1000 * (end - begin) for begin, end in itertools.pairwise(times))
    found = dict(zip(("import", "forward", "backward"), laps, strict=True))
    print(json.dumps(found | {"on_disk": kernels_on_disk() if provider == "tl_attention" else 0}))


def kernels_on_disk() -> int:
    from tl_attention.config import configs

    return len(list(configs.cache_dir().glob("*.so")))


def sdpa_backend(provider: str) -> contextlib.AbstractContextManager:
    backends = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return sdpa_kernel(backends[provider]) if provider in backends else contextlib.nullcontext()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Milliseconds of the first calls of a process, as JSON.")
    parser.add_argument("provider", choices=("tl_attention", "fa2", "fa4", "cudnn"))
    parser.add_argument("sizes", metavar="SIZES", help="B,Hq,Hkv,Sq,Sk,D,mask")
    main(**vars(parser.parse_args()))
