"""F.scaled_dot_product_attention with attn_mask: replacements of the aten ops that take a mask, by kernels with a dense bias.

They are also the ops of some calls without a mask, see torch_unmasked.py.

PyTorch turns a bool mask into one of 0 and -inf, in the dtype of query. Its memory-efficient op receives a mask expanded over batch and
heads, that of cuDNN one of any shape that broadcasts. Calls that the kernels do not support, and those of a caller who prefers another
backend to flash attention, go on to PyTorch's own kernel.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from tl_attention import launch
from tl_attention.checks.common import FWD_DTYPES, check_shapes
from tl_attention.checks.flex import MAX_ELEMENTS, MAX_LENGTH
from tl_attention.checks.transforms import Renaming
from tl_attention.integrations import torch_unmasked
from tl_attention.integrations.torch_modes import MODES
from tl_attention.problem.options import MAX_SCALE, options_of_terms
from tl_attention.problem.program import Call
from tl_attention.problem.target import is_hopper
from tl_attention.reference.flex import flex_reference
from tl_attention.tracing.dense_bias import element

LOG = logging.getLogger(__name__)
EFFICIENT, CUDNN = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"
FLASH = int(SDPBackend.FLASH_ATTENTION)
OURS = 0x746C5F61  # seed of a forward of this package, by which its backward knows it
# Of that seed in its memory in CUDA graph capture: at a multiple of 16 bytes, as compiled code assumes
PLACE = 2
SEED_OF_EFFICIENT, SEED_OF_CUDNN = 2, 6  # places of the seed in the results
_NAMES = Renaming({"q": "query", "k": "key", "v": "value"})
LSE_ROWS = 32  # the memory-efficient backend pads the rows of its log-sum-exp to a multiple of this


def overrides() -> dict[str, Callable[..., Any]]:
    """aten op -> its replacement, a function of (dispatch keys, arguments of the op) that passes unsupported calls to PyTorch's kernel.

    Empty without a GPU, or if this version of PyTorch cannot return its kernels.
    """
    if not hasattr(torch.library, "get_kernel") or not torch.cuda.is_available():
        return {}
    functions = {
        EFFICIENT: efficient_forward,
        f"{EFFICIENT}_backward": efficient_backward,
        CUDNN: cudnn_forward,
        f"{CUDNN}_backward": cudnn_backward,
    }
    return {
        name: functools.partial(function, _original(name).call_boxed) for name, function in functions.items()
    }


@functools.cache
def _original(name: str) -> Any:
    """Kernel of PyTorch; the first call must come before a kernel of this package replaces it."""
    return torch.library.get_kernel(f"aten::{name}", "CUDA")


def preferred(backend: SDPBackend) -> bool:
    """True if flash attention, which this package stands for, is enabled and has priority over `backend`: sdpa_kernel changes both."""
    order = torch._C._get_sdp_priority_order()
    return torch.backends.cuda.flash_sdp_enabled() and order.index(FLASH) < order.index(int(backend))


def serves(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None = None,
) -> bool:
    """True for calls that the kernels serve: a mask, no dropout, on Hopper; fp32 and scale as in torch_unmasked.serves().

    attn_bias: [batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1].
    """
    if attn_bias is None or dropout_p or causal or query.dtype not in FWD_DTYPES:
        return False
    if scale is not None and not abs(scale) <= MAX_SCALE:
        return False
    tensors = query, key, value, attn_bias
    if any(x.ndim != 4 or not x.numel() for x in tensors) or any(x.stride(3) != 1 for x in tensors[:3]):
        return False
    full = *query.shape[:3], key.shape[2]
    if any(size not in (1, whole) for size, whole in zip(attn_bias.shape, full, strict=True)):
        return False
    if max(query.shape[2], key.shape[2]) > MAX_LENGTH or query.shape[3] % 8 or value.shape[3] % 8:
        return False
    if not torch_unmasked.has_groups(query, key, value) or not torch_unmasked.has_widths(query, value):
        return False
    if not torch_unmasked.has_kernels(query, value):
        return False
    extent = sum((n - 1) * stride for n, stride in zip(attn_bias.shape, attn_bias.stride(), strict=True))
    is_float = attn_bias.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_float and extent < MAX_ELEMENTS and (not query.is_cuda or is_hopper(query.device))


def _four_dims(attn_bias: torch.Tensor | None) -> torch.Tensor | None:
    """A mask [seqlen_q, seqlen_k] or [heads, seqlen_q, seqlen_k] with leading dimensions of size 1, as PyTorch broadcasts it."""
    return None if attn_bias is None else attn_bias[(None,) * (4 - attn_bias.ndim)]


def efficient_forward(
    original: Callable[..., Any],
    keys: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """aten::_scaled_dot_product_efficient_attention: output, log-sum-exp [batch, heads, rows padded to 32], seed, offset.

    Where PyTorch asks for no log-sum-exp it is not padded: the backward of a mask that alone needs a gradient reads it.
    """
    arguments = query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal
    call = query, key, value, attn_bias, dropout_p, is_causal
    result = _served(SDPBackend.EFFICIENT_ATTENTION, *call, scale)
    if result is None:
        return _not_ours(original(keys, *arguments, scale=scale), SEED_OF_EFFICIENT, dropout_p)
    out, lse = result
    if compute_log_sumexp:
        lse = torch.nn.functional.pad(lse, (0, -query.shape[2] % LSE_ROWS), value=torch.inf)
    return out, lse, *_seed_and_offset(query.device)


def efficient_backward(
    original: Callable[..., Any],
    keys: Any,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """aten::_scaled_dot_product_efficient_attention_backward: gradients of query, key, value, and of the mask if it is asked for."""
    tensors = grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset
    if not _is_ours(philox_seed, dropout_p):
        return original(keys, *tensors, dropout_p, grad_input_mask, is_causal, scale=scale)
    lse = logsumexp[..., : query.shape[2]].contiguous()
    if attn_bias is None:
        return *torch_unmasked.backward(grad_out, query, key, value, out, lse, is_causal, scale), None
    return _backward(grad_out, query, key, value, attn_bias, out, lse, scale, grad_input_mask[3])


def cudnn_forward(
    original: Callable[..., Any],
    keys: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | int | None, ...]:
    """aten::_scaled_dot_product_cudnn_attention: output in the layout of query, log-sum-exp [batch, heads, seqlen_q, 1], and others."""
    arguments = query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask
    call = query, key, value, _four_dims(attn_bias), dropout_p, is_causal
    result = None if return_debug_mask else _served(SDPBackend.CUDNN_ATTENTION, *call, scale)
    if result is None:
        return _not_ours(original(keys, *arguments, scale=scale), SEED_OF_CUDNN, dropout_p)
    out, lse = result
    others = None, None, query.shape[2], key.shape[2], *_seed_and_offset(query.device), None
    return with_strides_of(out, query), lse[..., None], *others


def cudnn_backward(
    original: Callable[..., Any],
    keys: Any,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    attn_bias: torch.Tensor | None,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """aten::_scaled_dot_product_cudnn_attention_backward: gradients of query, key and value."""
    if not _is_ours(philox_seed, dropout_p):
        tensors = grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias
        lengths = cum_seq_q, cum_seq_k, max_q, max_k
        return original(keys, *tensors, *lengths, dropout_p, is_causal, scale=scale)
    lse = logsumexp.squeeze(-1).contiguous()
    if attn_bias is None:
        grads = torch_unmasked.backward(grad_out, query, key, value, out, lse, is_causal, scale)
    else:
        bias = _four_dims(attn_bias)
        grads = _backward(grad_out, query, key, value, bias, out, lse, scale, False)[:3]
    return tuple(with_strides_of(grad, x) for grad, x in zip(grads, (query, key, value), strict=True))


def with_strides_of(x: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    """x, copied if its strides differ from those that compiled code assumes: of torch.empty_like(template), or for fewer columns those of a
    dense tensor with the order of the template's dimensions.
    """
    if x.shape == template.shape:
        like = torch.empty_like(template, device="meta")
    else:
        order = sorted(range(x.ndim), key=template.stride, reverse=True)
        like = torch.empty_permuted(x.shape, order, device="meta")
    same = all(a == b or n == 1 for n, a, b in zip(x.shape, x.stride(), like.stride(), strict=True))
    return x if same else torch.empty_like(like, dtype=x.dtype, device=x.device).copy_(x)


def _seed_and_offset(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Seed and offset of a forward of this package, which has no dropout: where PyTorch has its own, on the CPU, and in CUDA graph capture
    on the GPU. A value cannot be read there: the seed's place in its memory says that it is ours.
    """
    on = {"dtype": torch.int64, "device": "cpu"}
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        on["device"] = device
        return torch.empty(PLACE + 1, **on)[PLACE], torch.empty((), **on)
    return torch.tensor(OURS, **on), torch.empty((), **on)


def _not_ours(result: tuple[Any, ...], seed: int, dropout_p: float) -> tuple[Any, ...]:
    """Result of a forward of PyTorch. Without dropout its seed is memory that nobody has written, and may be OURS: it becomes 0."""
    LOG.debug("scaled_dot_product_attention -> PyTorch's own kernel")
    if not dropout_p and result[seed].device.type == "cpu":
        result[seed].zero_()
    return result


def _is_ours(seed: torch.Tensor | None, dropout_p: float) -> bool:
    """True for a seed of _seed_and_offset(): the backward of a call runs where its forward ran. With dropout none is: a generator may have
    OURS as its seed.
    """
    if dropout_p or seed is None or seed.numel() != 1:
        return False
    return seed.item() == OURS if seed.device.type == "cpu" else seed.storage_offset() == PLACE


def _served(
    backend: SDPBackend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(out, lse) by the kernels, None for a call that they do not serve or whose caller prefers `backend`.

    Raises:
        ValueError: shapes of query, key and value that do not fit, which PyTorch does not check before.
        NotImplementedError: PyTorch's kernel would compute what has to be batch_invariant.
    """
    call = query, key, value, attn_bias, dropout_p, causal
    if not preferred(backend):
        return None
    if torch_unmasked.serves(*call, scale):
        _check_sizes(query, key, value)
        return torch_unmasked.forward(query, key, value, causal, scale)
    if serves(*call, scale):
        _check_sizes(query, key, value)
        return _forward(query, key, value, attn_bias, scale)
    if MODES.is_invariant and query.numel() and key.numel():  # without keys nothing depends on the batch
        mask = "no attn_mask" if attn_bias is None else f"attn_mask {list(attn_bias.shape)} {attn_bias.dtype}"
        raise NotImplementedError(
            f"scaled_dot_product_attention: expected a call that tl_attention serves {MODES.origin}, got query"
            f" {list(query.shape)} {query.dtype}, {mask}, dropout_p={dropout_p}; docs/torch.md has the table, or choose another"
            " SDPBackend"
        )
    return None


def _check_sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse a key without a value, and another head_dim of key: kernels take the sizes of one tensor for both."""
    if key.shape[2] == value.shape[2] and key.shape[3] == query.shape[3]:
        return
    try:
        check_shapes(query, key, value, 1, 2)
    except ValueError as error:
        raise _NAMES.of(error) from None


def _call(bias: torch.Tensor, differentiate: bool) -> Call:
    """Call whose score_mod adds a mask, [batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1]."""
    from tl_attention.tracing.trace import trace

    added = element(bias)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + added(b, h, q_idx, kv_idx)

    return trace(score_mod, None, differentiate)


def _narrow(attn_bias: torch.Tensor) -> torch.Tensor:
    """The mask with size 1 in its expanded dimensions."""
    for dim, (size, stride) in enumerate(zip(attn_bias.shape, attn_bias.stride(), strict=True)):
        if size > 1 and not stride:
            attn_bias = attn_bias.narrow(dim, 0, 1)
    return attn_bias


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [batch, heads, seqlen_q, head_dim_v], a view of [batch, seqlen_q, heads, head_dim_v]; lse [batch, heads, seqlen_q]."""
    call = _call(_narrow(attn_bias.detach()), False)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if query.is_cuda:
        terms, qkv = torch_unmasked.operands(query, key, value)
        out, lse = launch.forward(
            *qkv, scale, False, False, options=options_of_terms(terms, MODES.is_invariant), traced=call
        )
        return out.to(query.dtype).transpose(1, 2), lse
    out, lse = flex_reference(query, key, value, scale, call)
    return out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float | None,
    with_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv, as views of [batch, seqlen, heads, head_dim]; the gradient of the mask or None."""
    call = _call(_narrow(attn_bias.detach()).requires_grad_(with_bias), True)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    deterministic = torch.are_deterministic_algorithms_enabled()
    if query.is_cuda:
        terms, tensors = torch_unmasked.operands(grad_out, query, key, value, out)
        tensors[0] = tensors[0].contiguous()
        modes = False, False, False, deterministic
        grads = launch.backward(
            *tensors, lse, scale, *modes, options=options_of_terms(terms, MODES.is_invariant), traced=call
        )
        sums = [grads[i] for i in call.program.learned]
        grads = [grads[name].to(query.dtype).transpose(1, 2) for name in "qkv"]
    else:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (query, key, value)]
            result, _ = flex_reference(*inputs, scale, call)
            wanted = [*inputs, *(call.tensors[i] for i in call.program.learned)]
            (*grads,) = torch.autograd.grad(result, wanted, grad_out.to(result.dtype))
            grads, sums = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in grads[:3]], grads[3:]
    return *grads, _expanded(sums[0], attn_bias) if with_bias else None


def _expanded(total: torch.Tensor, attn_bias: torch.Tensor) -> torch.Tensor:
    """Gradient in the shape of the expanded mask: `total` in the first element of each expanded dimension, else 0; PyTorch sums these."""
    last = attn_bias.shape[-1]
    grad = attn_bias.new_zeros(*attn_bias.shape[:-1], last + -last % 16)[..., :last]
    part = grad
    shape = _narrow(attn_bias).shape
    for dim, size in enumerate(shape):
        part = part.narrow(dim, 0, size)
    part.copy_(total.reshape(shape))
    return grad
