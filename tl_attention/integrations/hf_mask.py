"""The mask that a transformers model hands from hf.attention_mask to its layers: all that it was asked for, and nothing to compute with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import torch

USE_ANOTHER = 'call model.set_attn_implementation("sdpa"), or "eager"'


class OtherUse(NotImplementedError, AttributeError):
    """A model computes with a Mask by itself; an AttributeError too, so that hasattr() is False."""


@dataclasses.dataclass(eq=False)
class Mask:
    """Mask of all layers of one kind: causal or not, window, padding, documents.

    It is no tensor. A model whose attention does not go through transformers' AttentionInterface would add it to its scores, slice it or
    combine it with another mask: each of these raises OtherUse.

    Args:
        sizes: (batch, q_length, kv_length) that the mask was made for.
        causal: a query sees keys up to its position; without meaning beside block_mask.
        left, right: keys that a query sees on either side of its position; -1: no bound.
        first_query: column of the first query's key, which counts from the first key; a tensor with a static cache.
        rows: int32 [4 to 6, sequences + 1], see hf.attention_mask; None: all rows of queries and keys are used.
        starts: bool [batch, q_length], True at the first token of a document; None: one document per row, or unknown.
        block_mask: BlockMask of a mask that the fields above cannot say, which is the whole mask; None: they say it.
        padded: a key is padding; a bool tensor in torch.compile and CUDA graph capture.
        no_keys: the window has no keys, as in configs that turn it off by 0; models make such a mask, and no layer uses it.
        of_documents: document of each token [1, q_length] -> BlockMask of block_mask's mask within these documents.
    """

    sizes: tuple[int, int, int]
    causal: bool
    left: int = -1
    right: int = -1
    first_query: int | torch.Tensor = 0
    rows: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    block_mask: Any = None
    padded: bool | torch.Tensor = False
    no_keys: bool = False
    of_documents: Callable[[torch.Tensor], Any] | None = None

    ndim = 4

    @property
    def shape(self) -> torch.Size:
        """Shape of the same mask as a tensor."""
        batch, q_length, kv_length = self.sizes
        return torch.Size((batch, 1, q_length, kv_length))

    @property
    def holds_for_each_query(self) -> bool:
        """True if all queries see the same keys."""
        return (
            not self.causal
            and self.left < 0
            and self.right < 0
            and self.block_mask is None
            and self.starts is None
        )

    def rows_for(self, queries: int) -> torch.Tensor | None:
        """Rows for so many queries, which differ from those of the mask if it was made for one query that stands for all."""
        if self.rows is None or self.sizes[1] != 1 or queries == 1 or not self.holds_for_each_query:
            return self.rows
        # Rows 0 and 2 are cu_seqlens_q and seqused_q
        times = self.rows.new_tensor([queries, 1, queries, *[1] * (len(self.rows) - 3)])
        return self.rows * times[:, None]

    def to(self, *args: Any, **options: Any) -> Mask:
        """Mask on another device, for models whose layers are on several. A dtype changes nothing: the mask has none of the scores'."""
        device = torch._C._nn._parse_to(*args, **options)[0]
        if device is None:
            return self
        tensors = {}
        for name in ("first_query", "rows", "starts", "padded"):
            x = getattr(self, name)
            tensors[name] = x.to(device) if isinstance(x, torch.Tensor) else x
        if self.block_mask is not None:
            tensors["block_mask"] = self.block_mask.to(device)
        return dataclasses.replace(self, **tensors)

    def contiguous(self) -> Mask:
        """The mask itself: transformers 5.20 asks for it where it fills a static cache."""
        return self

    def _refuse(self, *_: Any) -> NoReturn:
        raise _error("an operator")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _error(f".{name}")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise _error(getattr(function, "__name__", "a function of torch"))

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = _refuse
    __or__ = __ror__ = __invert__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__


def _error(use: str) -> OtherUse:
    return OtherUse(
        "attention_mask: expected a model whose attention calls transformers' AttentionInterface, which tl_attention serves, got a model"
        f" that computes with the mask itself ({use}); {USE_ANOTHER}"
    )
