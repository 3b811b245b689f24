"""What a compiled kernel takes for tensors: the tensors, or where it needs other views of them, pointers that cost less."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

from tl_attention.problem import FAR

CUDA = 2  # in DLPack
TYPES = {torch.float16: (2, 16), torch.bfloat16: (4, 16)}  # in DLPack: code and bits
SIZES = 6  # words of 8 bytes in a DLTensor of DLPack 1, before the sizes and strides it points at


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
        packed: they are [1, total, heads, head_dim], and the kernel takes what kernels.tiles.packed describes.
    """

    def __init__(self, heads_first: bool, *tensors: torch.Tensor, packed: bool = False):
        self.heads_first, self.packed = heads_first, packed
        self.ready = all(tma_strides(x.shape, x.stride()) == x.stride() for x in tensors)
        self.pointed = heads_first or packed
        if self.ready and self.pointed:
            self._point_at(tensors)

    def _point_at(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Make a DLTensor for each, transposed or packed, whose first word is its address."""
        code, bits = TYPES[tensors[0].dtype]
        device = CUDA | tensors[0].get_device() << 32
        dims = 5 if self.packed else 4
        kind = dims | code << 32 | bits << 40 | 1 << 48  # of elements of 1 lane
        size = SIZES + 2 * dims
        words = []
        for x in tensors:
            (n0, n1, n2, n3), (s0, s1, s2, s3) = x.shape, x.stride()
            if self.packed:
                # FAR planes are 2^64 bytes less FAR rows
                plane = 2**64 // FAR // x.element_size() - s1
                words += (0, device, kind, 0, 0, 0, FAR + 1, n1 + 1, FAR, n2, n3, plane, s1, s1, s2, s3)
            else:
                words += (0, device, kind, 0, 0, 0, n0, n2, n1, n3, s0, s2, s1, s3)
        self.words = words = array("q", words)
        self.starts = range(0, len(words), size)
        first, _ = words.buffer_info()
        for i in self.starts:
            words[i + 3], words[i + 4] = first + 8 * (i + SIZES), first + 8 * (i + SIZES + dims)
        self.pointers = [ctypes.c_void_p(first + 8 * i) for i in self.starts]

    def of(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor | ctypes.c_void_p]:
        """Arguments for tensors that differ from those of __init__ in their addresses alone; good until the next call.

        What TMA cannot address is copied.
        """
        bits = 0
        if self.ready and self.pointed:
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
        if self.packed:
            self.copies = tensors, Views(False, *tensors, packed=True)  # alive until the launch
            return self.copies[1].of(*tensors)
        return [x.transpose(1, 2) for x in tensors] if self.heads_first else tensors
