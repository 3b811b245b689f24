"""The libraries compared: what makes each ready for a problem, or says why it cannot run it.

To add one: a function for its forward, one for its backward or the reason why there is none, and a line in PROVIDERS.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tl_attention.testing.environment import version
from tl_attention.testing.shapes import Shape, is_deterministic

Result = tuple[Any, ...]
Inputs = tuple[torch.Tensor, ...]

MAX_SCORE_BYTES = 16 << 30  # of the score matrix of plain PyTorch, which holds up to three of them


class Unsupported(Exception):
    """Why a library cannot run a problem, in words."""


@dataclass(frozen=True)
class Ready:
    """A pass of a library, ready for one problem.

    A forward is (q, k, v) -> (out, lse [batch, heads_q, seqlen_q] or None, *what its backward needs besides).
    A backward is (dout, q, k, v, *all that the forward returned) -> (dq, dk, dv).
    """

    call: Callable[..., Result]  # as a user calls it
    launch: Callable[..., Result]  # the same without its checks and lookups, where it can be had


@dataclass(frozen=True)
class Provider:
    forward: Callable[..., Ready]  # of (shape, q, k, v, saves=whether a backward follows)
    backward: Callable[..., Ready] | str  # of (shape, deterministic, *inputs of a call), or why there is none
    layout: str  # of q, k, v, out and gradients, all contiguous: bshd or bhsd
    library: Callable[[], str]  # its name and version
    lse_base2: bool = False


def prepare(
    provider: Provider, shape: Shape, direction: str, copies: Sequence[Inputs]
) -> tuple[Ready, list[Inputs]]:
    """A direction of a library, and the arguments of a call for each copy of the inputs.

    Args:
        direction: one of shapes.DIRECTIONS.
        copies: of (q, k, v), or with a backward (dout, q, k, v), in the layout of the provider.
    Returns:
        fwd: (q, k, v) -> (out, lse). bwd: (dout, q, k, v, *what its forward returned) -> (dq, dk, dv).
        fwd_bwd: (dout, q, k, v) -> (out, dq, dk, dv).
    Raises:
        Unsupported: it cannot run the problem in this direction.
    """
    if direction == "fwd":
        return provider.forward(shape, *copies[0], saves=False), list(copies)
    if isinstance(provider.backward, str):
        raise Unsupported(provider.backward)
    forward = provider.forward(shape, *copies[0][1:], saves=True)
    given = [(*inputs, *forward.launch(*inputs[1:])) for inputs in copies]
    backward = provider.backward(shape, is_deterministic(direction), *given[0])
    if "fwd" not in direction:
        return backward, given
    return Ready(_both(forward.call, backward.call), _both(forward.launch, backward.launch)), list(copies)


def _both(forward: Callable[..., Result], backward: Callable[..., Result]) -> Callable[..., Result]:
    def attend(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        saved = forward(q, k, v)
        return (saved[0], *backward(dout, q, k, v, *saved))

    return attend


def tl_attention(shape: Shape, *qkv: torch.Tensor, saves: bool) -> Ready:
    interface = functools.partial(
        import_function("tl_attention", "mha_fwd_interface"), is_causal=shape.causal
    )
    return Ready(interface, interface(*qkv, return_kernel=True))


def tl_attention_backward(shape: Shape, deterministic: bool, *given: torch.Tensor) -> Ready:
    interface = functools.partial(
        import_function("tl_attention", "mha_bwd_interface"),
        is_causal=shape.causal,
        deterministic=deterministic,
    )
    return Ready(interface, interface(*given, return_kernel=True))


def fa2(shape: Shape, *_: torch.Tensor, saves: bool) -> Ready:
    if shape.head_dim != shape.head_dim_v:
        raise Unsupported("one head_dim for q, k and v")
    if has_flash_attn():
        flash = functools.partial(
            import_function("flash_attn", "flash_attn_func"), causal=shape.causal, return_attn_probs=saves
        )
        return _same(lambda q, k, v: _pair(flash(q, k, v)))
    # The op behind SDPA's flash backend. Its causal is bottom-right where SDPA's own is top-left.
    sdpa = torch.ops.aten._scaled_dot_product_flash_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, *rest = sdpa(q, k, v, 0.0, shape.causal)
        return (out.transpose(1, 2), *rest) if saves else (out.transpose(1, 2), None)

    return _same(attend)


def fa2_backward(shape: Shape, deterministic: bool, *_: object) -> Ready:
    return _same(
        _flash_attn_backward(shape, deterministic)
        if has_flash_attn()
        else _sdpa_flash_backward(shape, deterministic)
    )


def _flash_attn_backward(shape: Shape, deterministic: bool) -> Callable[..., Result]:
    flash = functools.partial(
        import_function("flash_attn.flash_attn_interface", "_flash_attn_backward"),
        dropout_p=0.0,
        softmax_scale=shape.head_dim**-0.5,
        causal=shape.causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=deterministic,
    )

    def attend(dout: torch.Tensor, *saved: torch.Tensor) -> Result:
        grads = tuple(torch.empty_like(x) for x in saved[:3])
        flash(dout, *saved, *grads)
        return grads

    return attend


def _sdpa_flash_backward(shape: Shape, deterministic: bool) -> Callable[..., Result]:
    sdpa = torch.ops.aten._scaled_dot_product_flash_attention_backward

    def attend(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *rest: Any,
    ) -> Result:
        *lengths, seed, offset, _ = rest
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        with _deterministic_algorithms() if deterministic else contextlib.nullcontext():
            grads = sdpa(dout, q, k, v, out, lse, *lengths, 0.0, shape.causal, seed, offset)
        return tuple(grad.transpose(1, 2) for grad in grads)

    return attend


@contextlib.contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """Without the fills of uninitialized memory that come with them."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def cudnn(shape: Shape, q: torch.Tensor, *_: torch.Tensor, saves: bool) -> Ready:
    """Its causal mask is top-left. A bottom-right one of other lengths is a dense bias, made beforehand, as SDPA would make it."""
    sdpa = torch.ops.aten._scaled_dot_product_cudnn_attention  # the op behind SDPA's cuDNN backend
    bias, causal = None, shape.causal
    if shape.causal and shape.seqlen_q != shape.seqlen_k:
        if saves:
            raise Unsupported(
                "its causal mask is top-left, and its backward is not compared with a dense one"
            )
        if shape.seqlen_q > shape.seqlen_k:
            raise Unsupported("its causal mask is top-left, and with a dense one a row without a key is NaN")
        bias, causal = _bottom_right_bias(shape, q), False

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        saved = sdpa(q, k, v, bias, saves, 0.0, causal)
        return saved if saves else (saved[0], None)

    return _same(attend)


def _bottom_right_bias(shape: Shape, q: torch.Tensor) -> torch.Tensor:
    """[seqlen_q, seqlen_k], -inf at the keys that a query does not see, in the dtype of q."""
    hidden = torch.full((shape.seqlen_q, shape.seqlen_k), -math.inf, dtype=q.dtype, device=q.device)
    return hidden.triu_(shape.seqlen_k - shape.seqlen_q + 1)


def cudnn_backward(shape: Shape, deterministic: bool, *_: object) -> Ready:
    if deterministic:
        raise Unsupported("PyTorch has no deterministic mode of its backward")
    sdpa = torch.ops.aten._scaled_dot_product_cudnn_attention_backward

    def attend(*given: Any) -> Result:
        *tensors, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, _ = given
        lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
        return sdpa(*tensors, seed, offset, None, *lengths, 0.0, shape.causal)

    return _same(attend)


def fa3(shape: Shape, *_: torch.Tensor, saves: bool) -> Ready:
    flash = import_function("flash_attn_interface", "flash_attn_func")
    return _same(lambda q, k, v: _pair(flash(q, k, v, causal=shape.causal)))


def fa4(shape: Shape, *_: torch.Tensor, saves: bool) -> Ready:
    options = {"return_lse": True} if saves else {}
    flash = functools.partial(
        import_function("flash_attn.cute", "flash_attn_func"), causal=shape.causal, **options
    )
    return _same(lambda q, k, v: _pair(flash(q, k, v)))


def fa4_backward(shape: Shape, deterministic: bool, *_: object) -> Ready:
    flash = functools.partial(
        import_function("flash_attn.cute.interface", "_flash_attn_bwd"),
        causal=shape.causal,
        deterministic=deterministic,
    )
    return _same(lambda dout, q, k, v, out, lse: flash(q=q, k=k, v=v, out=out, dout=dout, lse=lse))


def triton(shape: Shape, *_: torch.Tensor, saves: bool) -> Ready:
    flash = import_function("triton_fwd", "flash_attn_triton")
    return _same(lambda q, k, v: flash(q, k, v, shape.causal))


def flex(shape: Shape, q: torch.Tensor, *_: torch.Tensor, saves: bool) -> Ready:
    from torch.nn.attention.flex_attention import create_block_mask

    offset = shape.seqlen_k - shape.seqlen_q
    mask = None
    if shape.causal:
        sizes = (None, None, shape.seqlen_q, shape.seqlen_k)
        mask = create_block_mask(lambda _b, _h, i, j: j <= i + offset, *sizes, device=q.device)
    attend = functools.partial(_compiled_flex(), block_mask=mask, enable_gqa=shape.heads_q != shape.heads_kv)
    return _same(lambda q, k, v: (attend(q, k, v), None))


def naive(shape: Shape, q: torch.Tensor, *_: torch.Tensor, saves: bool) -> Ready:
    attention_weights = _naive_weights(shape, q.device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        return attention_weights(q, k) @ v.repeat_interleave(shape.heads_q // shape.heads_kv, 1), None

    return _same(attend)


def naive_backward(shape: Shape, deterministic: bool, dout: torch.Tensor, *_: object) -> Ready:
    """From the inputs and out: the scores are computed again, as the other libraries do."""
    attention_weights = _naive_weights(shape, dout.device)
    group = shape.heads_q // shape.heads_kv

    def attend(
        dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, _: None
    ) -> Result:
        weights = attention_weights(q, k)
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        dv = weights.mT @ dout
        delta = (dout.float() * out).sum(-1, keepdim=True).to(dout.dtype)
        dscores = (dout @ v.mT).sub_(delta).mul_(weights).mul_(shape.head_dim**-0.5)
        dk = dscores.mT @ q
        return dscores @ k, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))

    return _same(attend)


def _naive_weights(
    shape: Shape, device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(q, k) -> softmax of their scores."""
    score_bytes = 2 * shape.batch * shape.heads_q * shape.seqlen_q * shape.seqlen_k
    if score_bytes > MAX_SCORE_BYTES:
        raise Unsupported(f"its scores would take {score_bytes / 2**30:.0f} GiB")
    if shape.causal and shape.seqlen_q > shape.seqlen_k:
        raise Unsupported("a row without a key is NaN")
    hidden = None
    if shape.causal:
        ones = torch.ones(shape.seqlen_q, shape.seqlen_k, dtype=torch.bool, device=device)
        hidden = ones.triu(shape.seqlen_k - shape.seqlen_q + 1)

    def attention_weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        k = k.repeat_interleave(shape.heads_q // shape.heads_kv, 1)
        scores = q @ k.mT * shape.head_dim**-0.5
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        return scores.softmax(-1)

    return attention_weights


PROVIDERS = {
    "tl_attention": Provider(
        tl_attention,
        tl_attention_backward,
        "bhsd",
        lambda: f"TileLang {version('tilelang')}",
        lse_base2=True,
    ),
    "fa2": Provider(
        fa2,
        fa2_backward,
        "bshd",
        lambda: f"flash-attn {version('flash-attn')}" if has_flash_attn() else "torch SDPA",
    ),
    "cudnn": Provider(
        cudnn,
        cudnn_backward,
        "bhsd",
        lambda: (
            f"torch SDPA, cuDNN {torch.backends.cudnn.version()} (causal of unequal lengths: a dense bias)"
        ),
    ),
    "fa3": Provider(
        fa3,
        "the arguments of its raw backward differ from version to version",
        "bshd",
        lambda: f"flash-attn-3 {version('flash-attn-3')}",
    ),
    "fa4": Provider(fa4, fa4_backward, "bshd", lambda: f"flash-attn-4 {version('flash-attn-4')}"),
    "triton": Provider(triton, "forward only", "bhsd", lambda: f"triton_fwd.py, Triton {version('triton')}"),
    "flex": Provider(
        flex,
        "its backward is reached through Tensor.backward alone",
        "bhsd",
        lambda: f"torch {torch.__version__}, compiled flex_attention",
    ),
    "naive": Provider(
        naive, naive_backward, "bhsd", lambda: f"torch {torch.__version__}, matmul and softmax"
    ),
}


def title(name: str) -> str:
    """A provider's name in tables and plots."""
    return "fa2 (torch sdpa)" if name == "fa2" and not has_flash_attn() else name


def _same(attend: Callable[..., Result]) -> Ready:
    return Ready(attend, attend)


def _pair(result: Any) -> Result:
    """(out, lse) of a library some of whose versions return out alone."""
    return (result, None) if isinstance(result, torch.Tensor) else (result[0], result[1])


def import_function(module: str, name: str) -> Callable[..., Any]:
    """Raises Unsupported if there is none to import."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # of a broken installation: whatever it raises
        raise Unsupported(f"{module}.{name} cannot be imported: {error}") from error


@functools.cache
def has_flash_attn() -> bool:
    try:
        return callable(import_function("flash_attn", "flash_attn_func"))
    except Unsupported:
        return False


@functools.cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 1024  # static shapes are its fastest, at one compile each
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
