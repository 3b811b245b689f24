"""Tensor arguments for compiled kernels: torch tensors, or hand-made DLTensors, which take less host time than views of tensors."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

from tl_attention.checks.common import check_cache_strides
from tl_attention.problem.attn_problem import FAR

DLPACK_CUDA = 2  # device type
DLPACK_CODES = {torch.int32: 0, torch.float16: 2, torch.float32: 2, torch.bfloat16: 4}  # element types
HEADER_WORDS = 6  # 8-byte words of a DLTensor (DLPack 1), before the sizes and strides it points at
TMA_ALIGNMENT = 16  # bytes, for addresses and strides
COLUMN_STEP = 8  # columns of 2 bytes, TMA_ALIGNMENT in all
_UNALIGNED_BITS = TMA_ALIGNMENT - 1


def tma_strides(shape: Sequence[int], strides: tuple[int, ...], element_bytes: int) -> tuple[int, ...] | None:
    """Strides by which TMA reads a 4-dimensional tensor; None if it must be copied.

    TMA needs a contiguous last dimension and other strides that are non-zero multiples of 16 bytes. A dimension of size 1 gets such a
    stride.
    """
    unaligned = TMA_ALIGNMENT // element_bytes - 1
    s0, s1, s2, s3 = strides
    if s3 != 1:
        return None
    if s0 and s1 and s2 and not (s0 | s1 | s2) & unaligned:
        return strides
    s0, s1, s2 = (s if n > 1 else shape[3] for n, s in zip(shape[:3], strides[:3], strict=True))
    return (s0, s1, s2, 1) if s0 and s1 and s2 and not (s0 | s1 | s2) & unaligned else None


def tma_ready(x: torch.Tensor) -> torch.Tensor:
    """x, or a replacement that TMA can address: another view, or a contiguous copy.

    TMA needs the strides of tma_strides, an address that is a multiple of 16 bytes, and memory that holds the values: see
    options.as_stored.
    """
    strides = tma_strides(x.shape, x.stride(), x.element_size())
    if strides is None or x.data_ptr() % TMA_ALIGNMENT or x.is_neg():
        return x.clone(memory_format=torch.contiguous_format)
    return x if strides == x.stride() else x.as_strided(x.shape, strides)


def has_odd_columns(q: torch.Tensor, v: torch.Tensor) -> bool:
    """True if a head dim is no multiple of COLUMN_STEP: TMA cannot address such rows."""
    return bool(q.shape[-1] % COLUMN_STEP or v.shape[-1] % COLUMN_STEP)


def pad_columns(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors padded with zero columns to the next multiple of COLUMN_STEP; a tensor that is one already is not copied."""
    extra = [-x.shape[-1] % COLUMN_STEP for x in tensors]
    return [torch.nn.functional.pad(x, (0, n)) if n else x for x, n in zip(tensors, extra, strict=True)]


def cut_columns(x: torch.Tensor, columns: int) -> torch.Tensor:
    """The first columns of x, contiguous."""
    return x[..., :columns].contiguous()


def page_rows_of(x: torch.Tensor, name: str) -> tuple[int, torch.Tensor]:
    """(rows from one cache or page to the next, view [1, rows, heads_kv, columns] of all rows).

    Rows between two caches may belong to other tensors.
    """
    caches, room, heads_kv, columns = x.shape
    step, row, head, _ = x.stride()
    # A dimension of size 1 may have any stride; TMA needs a valid one
    if room == 1:
        row = step if caches > 1 else columns * heads_kv
    if heads_kv == 1:
        head = columns
    step_rows = room
    if caches > 1:
        check_cache_strides(name, x, step, row)
        step_rows = step // row
    rows = (caches - 1) * step_rows + room
    return step_rows, x.as_strided((1, rows, heads_kv, columns), (x.numel(), row, head, 1))


class DLTensors:
    """Hand-made DLTensors on a GPU, of one dtype and number of dimensions. Serves one thread, because it holds addresses of one launch.

    Args:
        layouts: (shape, strides) of each tensor.

    Attributes:
        words: all DLTensors, in 8-byte words.
        starts: the word of each that holds its address, which a launch sets.
        pointers: them as kernel arguments.
    """

    def __init__(
        self, device: int, dtype: torch.dtype, layouts: Sequence[tuple[Sequence[int], Sequence[int]]]
    ):
        dims, lanes = len(layouts[0][0]), 1
        kind = dims | DLPACK_CODES[dtype] << 32 | 8 * dtype.itemsize << 40 | lanes << 48
        size = HEADER_WORDS + 2 * dims
        words = []
        for shape, strides in layouts:
            words += (0, DLPACK_CUDA | device << 32, kind, 0, 0, 0, *shape, *strides)
        self.words = words = array("q", words)
        self.starts = range(0, len(words), size)
        address, _ = words.buffer_info()
        for i in self.starts:
            sizes = address + 8 * (i + HEADER_WORDS)
            words[i + 3], words[i + 4] = sizes, sizes + 8 * dims
        self.pointers = [ctypes.c_void_p(address + 8 * i) for i in self.starts]


class RowWords:
    """Contiguous tensors as kernel arguments [groups, rows, words], in words of 4 bytes. Serves one thread.

    groups are all dimensions before that of the rows.

    Args:
        tensors: (groups, rows, bytes of a row in a group) of each.
    """

    def __init__(self, device: int, *tensors: tuple[int, int, int]):
        shapes = [(groups, rows, row_bytes // 4) for groups, rows, row_bytes in tensors]
        layouts = [((g, rows, words), (rows * words, words, 1)) for g, rows, words in shapes]
        self.made = DLTensors(device, torch.int32, layouts)

    def of(self, *tensors: torch.Tensor) -> list[ctypes.c_void_p]:
        """Kernel arguments, valid until the next call."""
        words = self.made.words
        for i, x in zip(self.made.starts, tensors):  # noqa: B905
            words[i] = x.data_ptr()
        return self.made.pointers


class ArgumentViews:
    """Views of tensors of one dtype and fixed shapes and strides, as arguments of a kernel that accesses them by TMA.

    Serves one thread, because it holds the addresses of the current launch.

    Args:
        heads_first: tensors are [batch, heads, seqlen, head_dim]; else [batch, seqlen, heads, head_dim], the layout of the kernel.
        packed: tensors are [1, total, heads, head_dim], and the kernel reads views in the layout of sources.tiles.packed.
    """

    def __init__(self, heads_first: bool, *tensors: torch.Tensor, packed: bool = False):
        self.heads_first, self.packed = heads_first, packed
        self.ready = all(tma_strides(x.shape, x.stride(), x.element_size()) == x.stride() for x in tensors)
        self.pointed = heads_first or packed
        if self.ready and self.pointed:
            self._make_pointers(tensors)

    def _make_pointers(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Make a transposed or packed DLTensor per tensor. Its first word is the address, which each launch sets."""
        first, layouts = tensors[0], []
        for x in tensors:
            (n0, n1, n2, n3), (s0, s1, s2, s3) = x.shape, x.stride()
            if self.packed:
                # FAR planes step back FAR rows, modulo 2^64 bytes
                plane = 2**64 // FAR // x.element_size() - s1
                layouts.append(((FAR + 1, n1 + 1, FAR, n2, n3), (plane, s1, s1, s2, s3)))
            else:
                layouts.append(((n0, n2, n1, n3), (s0, s2, s1, s3)))
        made = DLTensors(first.get_device(), first.dtype, layouts)
        self.words, self.starts, self.pointers = made.words, made.starts, made.pointers

    def of(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor | ctypes.c_void_p]:
        """Kernel arguments for tensors with the metadata of __init__, valid until the next call. What TMA cannot address is copied.

        Packed sequences may come without their first dimension. Memory must hold the values of the tensors; else call replaced().
        """
        bits = 0
        if self.ready and self.pointed:
            words = self.words
            for i, x in zip(self.starts, tensors):  # noqa: B905
                words[i] = address = x.data_ptr()
                bits |= address
            if not bits & _UNALIGNED_BITS:
                return self.pointers
        elif self.ready:
            for x in tensors:
                bits |= x.data_ptr()
            if not bits & _UNALIGNED_BITS:
                return tensors
        return self.replaced(*tensors)

    def replaced(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor | ctypes.c_void_p]:
        """of() for tensors some of which are copied."""
        if self.packed:
            tensors = [x if x.ndim == 4 else x[None] for x in tensors]
        tensors = [tma_ready(x) for x in tensors]
        if self.packed:
            copies = ArgumentViews(False, *tensors, packed=True)
            pointers = copies.of(*tensors)
            for pointer in pointers:
                pointer.kept = tensors, copies.words  # as long as a launch has the pointer
            return pointers
        return [x.transpose(1, 2) for x in tensors] if self.heads_first else tensors


class PageViews:
    """Views of k and v [pages, page_size, heads_kv, columns] as a kernel reads them.

    Attributes:
        rows: k and v as [1, rows, heads_kv, columns], all pages one after the other.
        views: makes their arguments of a launch.
        arguments: page_size, num_pages, and the rows from one page to the next in k and in v.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor):
        num_pages, self.page_size = k.shape[:2]
        strides, self.rows = zip(page_rows_of(k, "k"), page_rows_of(v, "v"), strict=True)
        self.views = ArgumentViews(False, *self.rows, packed=True)
        self.arguments = self.page_size, num_pages, *strides
