"""What a compiled kernel takes for tensors: the tensors, or where it needs other views of them, pointers that cost less."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

CUDA = 2  # in DLPack
TYPES = {torch.float16: (2, 16), torch.bfloat16: (4, 16)}  # in DLPack: code and bits
# Of 8 bytes, in a DLTensor of DLPack 1 and the sizes and strides it points at
WORDS, SIZES, STRIDES = 14, 6, 10


def tma_strides(shape: Sequence[int], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Those that TMA is told of a 4-dimensional tensor of 16-bit elements, None if it must be copied.

    TMA takes a contiguous last dimension, and of the others strides that are multiples of 16 bytes, and not 0. A dimension of
    size 1 gets another stride.
    """
    s0, s1, s2, s3 = strides
    if s3 != 1:
        return None
    if s0 and s1 and s2 and not (s0 | s1 | s2) & 7:
        return strides
    s0, s1, s2 = (s if n > 1 else shape[3] for n, s in zip(shape[:3], strides[:3], strict=True))
    return (s0, s1, s2, 1) if s0 and s1 and s2 and not (s0 | s1 | s2) & 7 else None


def tma_ready(x: torch.Tensor) -> torch.Tensor:
    """x, or what TMA can address in its place: another view, or a contiguous copy.

    Beside strides as tma_strides has them, TMA takes an address that is a multiple of 16.
    """
    strides = tma_strides(x.shape, x.stride())
    if strides is None or x.data_ptr() & 15:
        return x.clone(memory_format=torch.contiguous_format)
    return x if strides == x.stride() else x.as_strided(x.shape, strides)


class Views:
    """Tensors of one dtype and known shapes and strides, as a kernel takes them that reads and writes them by TMA.

    Serves one thread, as it holds the addresses of a launch.

    Args:
        heads_first: they are [batch, heads, seqlen, head_dim], else [batch, seqlen, heads, head_dim] as the kernel takes them.
    """

    def __init__(self, heads_first: bool, *tensors: torch.Tensor):
        self.heads_first = heads_first
        self.ready = all(tma_strides(x.shape, x.stride()) == x.stride() for x in tensors)
        if self.ready and heads_first:
            self._point_at(tensors)

    def _point_at(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Make a DLTensor for each, transposed, whose first word is its address."""
        code, bits = TYPES[tensors[0].dtype]
        device = CUDA | tensors[0].get_device() << 32
        kind = 4 | code << 32 | bits << 40 | 1 << 48  # 4 dimensions, of elements of 1 lane
        words = []
        for x in tensors:
            (n0, n1, n2, n3), (s0, s1, s2, s3) = x.shape, x.stride()
            words += (0, device, kind, 0, 0, 0, n0, n2, n1, n3, s0, s2, s1, s3)
        self.words = words = array("q", words)
        self.starts = range(0, len(words), WORDS)
        first, _ = words.buffer_info()
        for i in self.starts:
            words[i + 3], words[i + 4] = first + 8 * (i + SIZES), first + 8 * (i + STRIDES)
        self.pointers = [ctypes.c_void_p(first + 8 * i) for i in self.starts]

    def of(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor | ctypes.c_void_p]:
        """Arguments for tensors that differ from those of __init__ in their addresses alone; good until the next call.

        What TMA cannot address is copied.
        """
        bits = 0
        if self.ready and self.heads_first:
            words = self.words
            for i, x in zip(self.starts, tensors):  # noqa: B905
                words[i] = address = x.data_ptr()
                bits |= address
            if not bits & 15:
                return self.pointers
        elif self.ready:
            for x in tensors:
                bits |= x.data_ptr()
            if not bits & 15:
                return tensors
        tensors = [tma_ready(x) for x in tensors]
        return [x.transpose(1, 2) for x in tensors] if self.heads_first else tensors
