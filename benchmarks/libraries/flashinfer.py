"""FlashInfer's decode with paged caches. A cache without pages is one whose pages are in order."""

from __future__ import annotations

import functools
from typing import Any

import library
import torch
from library import Provider, Ready, Result, Unsupported, same_call

from tl_attention.testing.environment import version
from tl_attention.testing.shapes import Shape

TENSOR_CORE_HEADS = 4  # query heads per KV head from which its tensor-core kernel is the faster one
WORKSPACE_BYTES = 512 << 20
PAGE = 64  # rows of a page of a cache without pages


def decode(shape: Shape, *_: torch.Tensor, saves: bool) -> Ready:
    """Decode, planned for the lengths and pages of each copy before it is timed."""
    if shape.seqlen_q > 1:
        raise Unsupported("its decode is compared with one query per sequence")
    if not shape.options.page and shape.seqlen_k % PAGE:
        raise Unsupported(f"caches of whole pages of {PAGE} keys")
    page = shape.options.page or PAGE
    if shape.head_dim != shape.head_dim_v:
        raise Unsupported("one head_dim for q, k and v")
    make = library.import_function("flashinfer", "BatchDecodeWithPagedKVCacheWrapper")
    planned: dict[int, Any] = {}  # address of the keys -> wrapper

    def plan(q: torch.Tensor, seqlens: torch.Tensor, pages: torch.Tensor | None) -> Any:
        if pages is None:
            count = shape.batch * shape.seqlen_k // page
            pages = torch.arange(count, dtype=torch.int32, device=q.device).view(shape.batch, -1)
        used = (seqlens + page - 1) // page
        ends = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
        chosen = pages[torch.arange(pages.shape[1], device=pages.device) < used[:, None]]
        tensor_cores = shape.heads_q >= TENSOR_CORE_HEADS * shape.heads_kv
        wrapper = make(_workspace(q.device), "NHD", use_tensor_cores=tensor_cores)
        sizes = shape.heads_q, shape.heads_kv, shape.head_dim, page
        last = seqlens - (used - 1) * page
        wrapper.plan(ends, chosen, last, *sizes, q_data_type=q.dtype, kv_data_type=q.dtype)
        return wrapper

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seqlens: torch.Tensor,
        pages: torch.Tensor | None = None,
    ) -> Result:
        wrapper = planned.get(k.data_ptr())
        if wrapper is None:
            wrapper = planned[k.data_ptr()] = plan(q, seqlens, pages)
        if pages is None:
            k, v = (x.view(-1, page, *x.shape[2:]) for x in (k, v))
        return wrapper.run(q[:, 0], (k, v))[:, None], None

    return same_call(launch)


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """One buffer for all plans: they run one after the other."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


PROVIDER = Provider({"decode": decode}, lambda _: f"flashinfer-python {version('flashinfer-python')}")
