"""FlashInfer's decodes with paged caches. A cache without pages is one whose pages are in order."""

from __future__ import annotations

import functools
from collections.abc import Callable

import library
import torch
from library import Provider, Ready, Result, Unsupported, same_call

from tl_attention.testing.environment import version
from tl_attention.testing.shapes import Shape

TENSOR_CORE_HEADS = 4  # query heads per KV head from which its tensor-core kernel is the faster one
WORKSPACE_BYTES = 512 << 20
PAGE = 64  # rows of a page of a cache without pages
XQA_PAGES = 16, 32, 64, 128


def decode(shape: Shape, *_: torch.Tensor, saves: bool) -> Ready:
    """Decode, planned for the lengths and pages of each copy."""
    page = _page_size(shape)
    make = library.import_function("flashinfer", "BatchDecodeWithPagedKVCacheWrapper")

    def plan(q: torch.Tensor, seqlens: torch.Tensor, pages: torch.Tensor) -> Callable[..., torch.Tensor]:
        used = (seqlens + page - 1) // page
        ends = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
        chosen = pages[torch.arange(pages.shape[1], device=pages.device) < used[:, None]]
        tensor_cores = shape.heads_q >= TENSOR_CORE_HEADS * shape.heads_kv
        wrapper = make(_workspace(q.device, "plans"), "NHD", use_tensor_cores=tensor_cores)
        sizes = shape.heads_q, shape.heads_kv, shape.head_dim, page
        last = seqlens - (used - 1) * page
        wrapper.plan(ends, chosen, last, *sizes, q_data_type=q.dtype, kv_data_type=q.dtype)
        return wrapper.run

    return _prepared(shape, page, plan)


def xqa(shape: Shape, *_: torch.Tensor, saves: bool) -> Ready:
    """Decode by XQA, the kernel of TensorRT-LLM that vLLM calls through FlashInfer on Hopper. It needs no plan."""
    page = _page_size(shape)
    if page not in XQA_PAGES:
        raise Unsupported(f"pages of {XQA_PAGES}")
    run = library.import_function("flashinfer", "xqa_batch_decode_with_kv_cache")

    def prepare(q: torch.Tensor, seqlens: torch.Tensor, pages: torch.Tensor) -> Callable[..., torch.Tensor]:
        call = _workspace(q.device, "xqa"), pages, seqlens, shape.seqlen_k
        return lambda q, caches: run(q, caches, *call, bmm1_scale=shape.head_dim**-0.5)

    return _prepared(shape, page, prepare)


def _prepared(shape: Shape, page: int, prepare: Callable[..., Callable[..., torch.Tensor]]) -> Ready:
    """A decode that prepare(q, seqlens, pages) makes for each copy at its first call: a function of (q, caches)."""
    made: dict[int, Callable[..., torch.Tensor]] = {}  # address of the keys -> decode

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seqlens: torch.Tensor,
        pages: torch.Tensor | None = None,
    ) -> Result:
        attend = made.get(k.data_ptr())
        if attend is None:
            attend = made[k.data_ptr()] = prepare(q, seqlens, _in_order(shape, page, q, pages))
        return attend(q[:, 0], _paged(page, k, v))[:, None], None

    return same_call(launch)


def _page_size(shape: Shape) -> int:
    """Rows of a page. Raises Unsupported for problems that FlashInfer's decodes do not run."""
    if shape.seqlen_q > 1:
        raise Unsupported("its decode is compared with one query per sequence")
    if not shape.options.page and shape.seqlen_k % PAGE:
        raise Unsupported(f"caches of whole pages of {PAGE} keys")
    if shape.head_dim != shape.head_dim_v:
        raise Unsupported("one head_dim for q, k and v")
    return shape.options.page or PAGE


def _in_order(shape: Shape, page: int, q: torch.Tensor, pages: torch.Tensor | None) -> torch.Tensor:
    """The page table, int32 [batch, pages]; in order for a cache without pages."""
    if pages is not None:
        return pages
    count = shape.batch * shape.seqlen_k // page
    return torch.arange(count, dtype=torch.int32, device=q.device).view(shape.batch, -1)


def _paged(page: int, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Caches as [pages, page, heads_kv, head_dim], which those with pages are already."""
    return tuple(x.view(-1, page, *x.shape[2:]) for x in caches)


@functools.cache
def _workspace(device: torch.device, user: str) -> torch.Tensor:
    """A buffer of zeros for all calls of a kernel, which run one after the other. XQA leaves its counters 0 for the next."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _version(_: str) -> str:
    return f"flashinfer-python {version('flashinfer-python')}"


PROVIDER = Provider({"decode": decode}, _version)
XQA = Provider({"decode": xqa}, _version)
