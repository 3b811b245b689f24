"""flex_attention in several threads, of fake tensors, and with functions that change the score in place."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tl_attention import create_block_mask, flash_attn_func, flex_attention
from tl_attention.api import block_masks
from tl_attention.tracing.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention. CPU tensors")
HEADS, ROWS = 2, 256


def test_flex_functions_are_traced_by_several_threads():
    """First calls of different functions, among them masks that create_block_mask traces."""
    q = torch.randn(1, 1, 8, 16)
    mods = [eval(f"lambda s, b, h, i, j: s * {n}.5 + i * {n}") for n in range(24)]

    def run(n: int) -> torch.Tensor:
        mask = create_block_mask(lambda b, h, i, j: (i * n + j) % 5 != 0, None, None, 8, 8, device="cpu")
        return flex_attention(q, q, q, mods[n], mask)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(24)))
    assert all(torch.equal(x, run(n)) for n, x in enumerate(found))


FIRST_CALLS = """
import sys, threading, warnings
from concurrent.futures import ThreadPoolExecutor
import torch
import tl_attention as tl

warnings.simplefilter("ignore")
sys.setswitchinterval(1e-4)
q, ready = torch.randn(1, 1, 8, 16), threading.Barrier(4)
calls = (
    lambda: tl.flex_attention(q, q, q, lambda s, b, h, i, j: s * 2),
    lambda: tl.create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="cpu"),
    lambda: tl.flash_attn_func(q, q, q),
    lambda: tl.block_masks.causal(8, 8, device="cpu"),
)

def run(call):
    ready.wait()
    call()

with ThreadPoolExecutor(4) as pool:
    list(pool.map(run, calls))
"""


def test_first_calls_of_a_process_come_from_several_threads():
    """Each imports tools of torch, whose modules import each other: in another order the import fails."""
    found = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, timeout=120)
    assert not found.returncode, found.stderr


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_is_forked_during_a_trace_of_another_thread_traces():
    """As a worker of a DataLoader, forked while a thread of the trainer makes its first call."""
    started = threading.Event()

    def slow(b, h, i, j):
        started.set()
        time.sleep(0.3)
        return i >= j

    tracing = threading.Thread(target=trace, args=(None, slow, False))
    tracing.start()
    assert started.wait(60)
    child = os.fork()
    if not child:
        status = 1
        try:
            trace(None, lambda b, h, i, j: i > j, False)
            status = 0
        finally:
            os._exit(status)
    tracing.join()
    end, done = time.monotonic() + 30, 0
    while not done and time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.05)
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done and not status


def changed(score, b, h, i, j):
    score += TABLE[h, j]
    return score


def changed_more(score, b, h, i, j):
    score.mul_(TABLE[h, i]).add_(2)
    score.masked_fill_(i > j, TABLE[h, 0])
    return score


def changed_copy(score, b, h, i, j):
    new = score.clone()
    new -= TABLE[h, j]
    new *= score
    return new


TABLE = torch.randn(HEADS, ROWS)


@pytest.mark.parametrize("function", [changed, changed_more, changed_copy])
@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_flex_functions_change_the_score_in_place_on_any_device(function, device, monkeypatch):
    """A captured tensor of another device than that of the trace: the program of a GPU is that of the CPU."""
    expected = trace(function, None, True).program
    with FakeTensorMode():
        elsewhere = torch.empty(HEADS, ROWS, device=device)
    monkeypatch.setitem(globals(), "TABLE", elsewhere)
    assert trace(function, None, True).program == expected


@pytest.mark.parametrize(
    ("function", "formula"),
    [
        (changed, lambda s, t: s + t[:, None]),
        (changed_more, lambda s, t: torch.where(torch.ones(8, 8).triu(1).T > 0, t[:, :1, None], s * t[..., None] + 2)),
        (changed_copy, lambda s, t: (s - t[:, None]) * s),
    ],
    ids=["changed", "changed more", "changed copy"],
)  # fmt: skip
def test_flex_functions_change_the_score_in_place(function, formula):
    q, k, v = (torch.randn(1, HEADS, 8, 16) for _ in range(3))
    expected = formula(q @ k.mT / 4, TABLE[:, :8]).softmax(-1) @ v
    torch.testing.assert_close(flex_attention(q, k, v, function), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [changed, changed_more, changed_copy])
def test_flex_functions_change_the_score_in_place_on_a_gpu(function, monkeypatch):
    q, k, v = (torch.randn(1, HEADS, 200, 64, dtype=torch.bfloat16) for _ in range(3))
    expected = flex_attention(q, k, v, function)
    monkeypatch.setitem(globals(), "TABLE", TABLE.cuda())
    found = flex_attention(q.cuda(), k.cuda(), v.cuda(), function)
    assert (found.cpu().float() - expected.float()).norm() < 1e-2 * expected.float().norm()


def differentiates(device: str) -> bool:
    """True where torch has autograd for a device: on a GPU not without one, for fake tensors either."""
    return device == "cpu" or torch.cuda.is_available()


# Functions, masks and biases of a call; {} is plain attention
def calls(device: str) -> dict[str, dict]:
    step, learns = torch.tensor(3), differentiates(device)
    table = torch.empty(HEADS, ROWS, device=device, requires_grad=learns)
    return {
        "score_mod": {"score_mod": lambda s, b, h, i, j: s * 2},
        "captured": {"score_mod": lambda s, b, h, i, j: s + table[h, j] * step},
        "causal": {"mask_mod": lambda b, h, i, j: i >= j},
        "mask_mod": {"mask_mod": lambda b, h, i, j: (i >= j) | (j < 3)},
        "bias": {"attn_bias": torch.empty(1, HEADS, ROWS, ROWS, device=device, requires_grad=learns)},
        "bool": {"attn_bias": torch.empty(1, 1, ROWS, ROWS, device=device, dtype=torch.bool)},
        "in place": {"score_mod": changed},
    }


@pytest.mark.parametrize("rows_first", [False, True], ids=["flex_attention", "flash_attn_func"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", calls("cpu"))
def test_flex_of_fake_tensors_gives_shapes(name, device, rows_first):
    with FakeTensorMode():
        shape = (2, ROWS, HEADS, 64) if rows_first else (2, HEADS, ROWS, 64)
        made = {"device": device, "dtype": torch.bfloat16, "requires_grad": differentiates(device)}
        q, k = (torch.empty(shape, **made) for _ in range(2))
        v = torch.empty((*shape[:3], 32), **made)
        given = calls(device)[name]
        if rows_first:
            out, lse, _ = flash_attn_func(q, k, v, **given, return_attn_probs=True)
        else:
            out, lse = flex_attention(q, k, v, **given, return_lse=True)
        assert isinstance(out, FakeTensor) and out.device.type == device
        assert out.shape == (*shape[:3], 32) and out.dtype == torch.bfloat16
        assert lse.shape == (2, HEADS, ROWS) and lse.dtype == torch.float32
        if not differentiates(device):
            return
        (out.float().sum() + lse.sum()).backward()
        assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]
        bias = given.get("attn_bias")
        assert bias is None or not bias.requires_grad or bias.grad.shape == bias.shape


def test_flex_of_fake_tensors_has_the_layout_of_real_ones():
    x = torch.randn(2, 8, HEADS, 16)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        found = flash_attn_func(fake, fake, fake, score_mod=lambda s, *_: s * 2)
        turned = flex_attention(*[fake.transpose(1, 2)] * 3, lambda s, *_: s * 2)
    real = flash_attn_func(x, x, x, score_mod=lambda s, *_: s * 2)
    assert found.stride() == real.stride()
    assert turned.stride() == flex_attention(*[x.transpose(1, 2)] * 3, lambda s, *_: s * 2).stride()


def test_flex_of_fake_tensors_takes_block_masks_and_checks():
    with FakeTensorMode():
        x = torch.empty(1, HEADS, ROWS, 64)
        mask = block_masks.causal(ROWS, ROWS, device="cpu")
        assert flex_attention(x, x, x, block_mask=mask).shape == x.shape
        with pytest.raises(TypeError, match="score_mod: expected a function of 0-d tensors"):
            flex_attention(x, x, x, score_mod=3)
        with pytest.raises(ValueError, match="attn_bias: expected shape"):
            flex_attention(x, x, x, attn_bias=torch.empty(3, 3))
        with pytest.raises(ValueError, match="precision: expected one of"):
            flex_attention(x, x, x, lambda s, *_: s * 2, precision="low")


def test_flex_of_meta_tensors_says_what_gives_shapes():
    x = torch.empty(1, HEADS, 8, 16, device="meta")
    with pytest.raises(NotImplementedError, match="^query: .*got meta; compute shapes under FakeTensorMode"):
        flex_attention(x, x, x, score_mod=lambda s, *_: s * 2)


def test_block_masks_of_fake_tensors_are_not_kept():
    """Lists and bounds that FakeTensorMode made have no values."""
    with FakeTensorMode():
        ids = torch.zeros(384, dtype=torch.int32)
        assert isinstance(block_masks.causal(384, 384, device="cpu").kv_indices, FakeTensor)
        with pytest.raises(
            NotImplementedError, match="mask_mod: expected tensors with values.*outside FakeTensorMode"
        ):
            create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 384, 384, device="cpu")
    found = block_masks.causal(384, 384, device="cpu")
    assert not isinstance(found.kv_indices, FakeTensor) and found.kv_num_blocks.eq(1).all()
    assert (
        create_block_mask(
            lambda b, h, i, j: (i >= j) | (j < 3), None, None, 384, 384, device="cpu"
        ).sparsity()
        > 0
    )
