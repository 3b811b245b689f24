"""FlashAttention's function names and arguments, shared by the libraries that have them."""

from __future__ import annotations

from collections.abc import Callable

import library
import torch
from library import Attend, Ready, Result, Unsupported, by_entry, same_call
from options import Tensors

from tl_attention.testing.shapes import Shape

OURS = "tl_attention"


def attend_with_options(module: str, shape: Shape, needs: Tensors) -> Attend:
    """The options pass of a module with flash_attn_func, flash_attn_varlen_func and, ours, flash_attn_qkvpacked_func."""
    asked, arguments = shape.options, {"causal": shape.causal, "return_attn_probs": True}
    arguments |= {
        name: value
        for name, value, given in (
            ("window_size", shape.window_size, asked.window is not None),
            ("softcap", asked.softcap, asked.softcap),
            ("alibi_slopes", needs.slopes, asked.alibi),
            ("learnable_sink", needs.sink, asked.sink),
            ("dropout_p", asked.dropout, asked.dropout),
            ("rng_state", needs.rng_state, asked.dropout and module == OURS),
        )
        if given
    }
    packed = asked.packed and module == OURS
    forms = ["varlen"] * shape.is_varlen + ["qkvpacked"] * packed
    function = library.import_function(module, "_".join(["flash_attn", *forms, "func"]))
    sides = 1 if packed else 2

    def attend(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not shape.is_varlen:
            return function(*operands, **arguments)[:2]
        tokens = [x.flatten(0, 1) for x in operands]
        out, lse, *_ = function(*tokens, *needs.cu_seqlens[:sides], *needs.max_seqlens[:sides], **arguments)
        return by_entry(out, operands[0]), lse

    return attend


def decode_with_kvcache(
    module: str, table: str = "block_table", page_multiple: int = 1
) -> Callable[..., Ready]:
    """The decode pass of a module with flash_attn_with_kvcache.

    Args:
        table: the module's name for the page table.
        page_multiple: divisor of the page sizes that the module accepts.
    """

    def decode(shape: Shape, *_: object, saves: bool) -> Ready:
        if shape.options.page % page_multiple:
            raise Unsupported(f"page sizes are multiples of {page_multiple} keys")
        attend = library.import_function(module, "flash_attn_with_kvcache")

        def launch(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            seqlens: torch.Tensor,
            pages: torch.Tensor | None,
        ) -> Result:
            arguments = {"cache_seqlens": seqlens, "causal": shape.causal, "return_softmax_lse": True}
            return attend(q, k, v, **arguments, **({} if pages is None else {table: pages}))[:2]

        return same_call(launch)

    return decode


def decode_with_forward(forward: Callable[..., Ready]) -> Callable[..., Ready]:
    """The decode pass of a library without a function for caches: its forward, over caches that are full."""

    def decode(
        shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, saves: bool
    ) -> Ready:
        if shape.options:
            raise Unsupported("neither pages nor lengths of sequences in its forward")
        launch = forward(shape, q, k, v, saves=saves).launch
        return same_call(lambda q, k, v, *_: launch(q, k, v))

    return decode
