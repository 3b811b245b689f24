"""Tensor arguments of compiled kernels."""

from __future__ import annotations

import ctypes
import weakref

import pytest
import torch

from tl_attention.launch.arrays import DLPACK_CUDA, ArgumentViews
from tl_attention.problem.attn_problem import FAR


class DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


@pytest.mark.parametrize(("dtype", "code"), [(torch.bfloat16, 4), (torch.float16, 2)], ids=["bf16", "fp16"])
def test_views_with_heads_first_are_pointers_to_transposed_tensors(dtype, code, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 3)
    tensors = [torch.zeros(2, 3, n, 64, dtype=dtype) for n in (5, 7)]
    tensors.append(torch.zeros(2, 9, 3, 64, dtype=dtype).transpose(1, 2))
    views = ArgumentViews(True, *tensors)
    for _ in range(2):
        for pointer, x in zip(views.of(*tensors), tensors, strict=True):
            array, want = DLTensor.from_address(pointer.value), x.transpose(1, 2)
            assert tuple(array.shape[:4]) == want.shape and tuple(array.strides[:4]) == want.stride()
            assert (array.data, array.byte_offset) == (want.data_ptr(), 0)
            assert (array.device_type, array.device_id, array.ndim) == (DLPACK_CUDA, 3, 4)
            assert (array.code, array.bits, array.lanes) == (code, 16, 1)
        tensors = [torch.ones_like(x) for x in tensors]


@pytest.mark.parametrize("heads_first", [False, True])
def test_views_are_copied_where_tma_cannot_address_them(heads_first):
    """An expanded tensor; and one at an odd address, with the strides of one that is not copied."""
    aligned, expanded = (
        torch.randn(2, 3, 4, 64).bfloat16(),
        torch.randn(1, 3, 4, 64).bfloat16().expand(2, 3, 4, 64),
    )
    odd = torch.cat([aligned.flatten(), aligned.flatten()])[1:][: aligned.numel()].view_as(aligned)
    for known, others in (((expanded, aligned), (expanded, aligned)), ((aligned, aligned), (odd, aligned))):
        found = ArgumentViews(heads_first, *known).of(*others)
        for view, x in zip(found, others, strict=True):
            view = view.transpose(1, 2) if heads_first else view
            assert torch.equal(view, x) and view.data_ptr() % 16 == 0 and all(view.stride())
        assert (found[0].data_ptr(), found[1].data_ptr()) != (others[0].data_ptr(), others[1].data_ptr())
        assert found[1].data_ptr() == others[1].data_ptr()


def test_views_of_packed_sequences_need_no_batch(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 3)
    whole = torch.randn(12, 3, 64).bfloat16()
    odd = torch.cat([whole.flatten(), whole.flatten()])[1:][: whole.numel()].view_as(whole)
    views = ArgumentViews(False, whole[None], whole[None], packed=True)
    for tensors in ((whole, whole), (whole[None], whole[None]), (odd, whole), (odd[None], whole[None])):
        first, second = [DLTensor.from_address(pointer.value) for pointer in views.of(*tensors)]
        assert tuple(second.shape[:5]) == tuple(first.shape[:5]) == (FAR + 1, 13, FAR, 3, 64)
        assert second.data == whole.data_ptr() and first.data % 16 == 0
        assert (first.data == whole.data_ptr()) == (tensors[0].data_ptr() == whole.data_ptr())


def test_copies_of_packed_sequences_are_released_after_the_launch(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 3)
    copies, clone = [], torch.Tensor.clone
    monkeypatch.setattr(
        torch.Tensor, "clone", lambda x, **given: copies.append(clone(x, **given)) or copies[-1]
    )
    expanded = torch.randn(12, 1, 64).bfloat16().expand(12, 3, 64)
    views = ArgumentViews(False, expanded[None], packed=True)
    pointers = views.of(expanded)
    kept = weakref.ref(copies.pop())
    array = DLTensor.from_address(pointers[0].value)
    assert array.data == kept().data_ptr() and array.shape[:5] == [FAR + 1, 13, FAR, 3, 64]
    del pointers
    assert kept() is None


def test_views_without_transposing_are_the_tensors():
    tensors = tuple(torch.zeros(2, 3, 4, 64, dtype=torch.float16) for _ in range(3))
    assert all(a is b for a, b in zip(ArgumentViews(False, *tensors).of(*tensors), tensors, strict=True))
