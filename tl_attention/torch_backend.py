"""tl_attention as the flash attention of torch: F.scaled_dot_product_attention, varlen_attn and nested tensors after one register()."""

from __future__ import annotations

import warnings

import torch

from tl_attention.flash import flash_attn_func, flash_attn_varlen_func
from tl_attention.ops import attention, bwd_op
from tl_attention.options import Options, canonical_window

NAME = "tl_attention"
_handle: Handle | None = None


def register() -> Handle:
    """Have CUDA tensors that torch would give to its FlashAttention attended by tl_attention, until handle.remove().

        handle = tl_attention.torch_backend.register()
        F.scaled_dot_product_attention(q, k, v, is_causal=True)  # ours
        handle.remove()  # torch's own again

    Flash attention goes before cuDNN meanwhile, which torch prefers on Hopper. Torch chooses as before: what it gives to no flash
    attention (a mask, fp32, head dims above 256 or that differ, is_causal of unequal lengths, which aligns top-left) takes another
    of its ways. What it does give us and we do not compute raises NotImplementedError. Gradients are the same bits every time under
    torch.use_deterministic_algorithms(True).

    Once registered, torch.nn.attention.activate_flash_attention_impl("tl_attention") does the same.

    Raises:
        NotImplementedError: torch before 2.11.
    """
    try:
        from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl
    except ImportError as error:
        raise NotImplementedError(
            f"tl_attention.torch_backend: expected torch 2.11 or later, which takes other flash attentions, got {torch.__version__};"
            " call tl_attention.flash_attn_func instead"
        ) from error
    register_flash_attention_impl(NAME, register_fn=_override)
    activate_flash_attention_impl(NAME)
    return _handle


class Handle:
    """What register() changed."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL", "CUDA")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Overriding a previously registered kernel")
            for name, function in KERNELS.items():
                if hasattr(torch.ops.aten, name):
                    self._library.impl(name, function)
        self._order = _flash_first()

    def remove(self) -> None:
        """Undo it; a second time changes nothing."""
        if self._library is None:
            return
        self._library._destroy()
        self._library = None
        before, after = self._order
        if torch._C._get_sdp_priority_order() == after:  # else somebody has chosen since
            torch._C._set_sdp_priority_order(before)
        if torch.nn.attention.current_flash_attention_impl() == NAME:
            torch.nn.attention.restore_flash_attention_impl()  # has torch forget this handle


def _override() -> Handle:
    global _handle
    _handle = Handle()
    return _handle


def _flash_first() -> tuple[list[int], list[int]]:
    """Put flash attention first among the ways of F.scaled_dot_product_attention; the order before and after."""
    if torch.cuda.is_available():
        q = torch.empty(1, 1, 8, 8, device="cuda", dtype=torch.float16)
        torch._fused_sdp_choice(q, q, q)  # the first choice of a process sets the order
    before = torch._C._get_sdp_priority_order()
    flash = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
    after = [flash, *(way for way in before if way != flash)]
    torch._C._set_sdp_priority_order(after)
    return before, after


def _check(reasons: dict[str, bool]) -> None:
    for reason, refused in reasons.items():
        if refused:
            raise NotImplementedError(f"{reason}; use torch's own: handle.remove(), or another SDPBackend")


def _like(x: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """x in the strides of torch.empty_like(model), which compiled code takes for granted."""
    strides = torch.empty_like(model, device="meta").stride()
    same = all(a == b or n == 1 for n, a, b in zip(x.shape, x.stride(), strides, strict=True))
    return x if same else torch.empty_like(model).copy_(x)


def _heads_are_outer(query: torch.Tensor) -> bool:
    """Whether [batch, heads, seqlen, head_dim] lies in memory so, not as [batch, seqlen, heads, head_dim]."""
    return query.stride(1) >= query.stride(2)


def _dropout_state(query: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Seed and offset, int64 [2], from torch's generator; and what torch keeps beside them. Nobody reads them without dropout."""
    state = torch.empty(2, dtype=torch.int64, device=query.device)
    if dropout_p:
        state.random_()
    return state, torch.empty((), dtype=torch.uint64, device=query.device)


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """aten::_flash_attention_forward: [batch, seqlen, heads, head_dim], or [total, heads, head_dim] with cum_seq_q; causal bottom-right.

    Returns:
        out; log-sum-exp, natural, [batch, heads, seqlen_q] or [heads, total_q]; rng_state uint64 [2], an unused one, an empty mask.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    _check(
        {
            "return_debug_mask: tl_attention writes no probabilities": return_debug_mask,
            "block_table: tl_attention takes no paged keys here": block_table is not None,
            "cum_seq_k: tl_attention expects it with cum_seq_q": (cum_seq_q is None) != (cum_seq_k is None),
            "seqused_k: tl_attention expects it with cum_seq_q": cum_seq_q is None and seqused_k is not None,
            "alibi_slopes: torch passes them to no backward": needs_grad and alibi_slopes is not None,
            "seqused_k: torch passes it to no backward": needs_grad and seqused_k is not None,
        }
    )
    state, unused = _dropout_state(query, dropout_p)
    options = {
        "dropout_p": dropout_p,
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": (window_size_left, window_size_right),
        "alibi_slopes": alibi_slopes,
        "return_attn_probs": True,
        "rng_state": state if dropout_p else None,
        "num_splits": num_splits or 0,
    }
    with torch.no_grad():
        if cum_seq_q is None:
            out, lse, _ = flash_attn_func(query, key, value, **options)
        else:
            lengths = cum_seq_q, cum_seq_k, max_q, max_k
            out, lse, _ = flash_attn_varlen_func(query, key, value, *lengths, **options, seqused_k=seqused_k)
    return _like(out, query), lse, state.view(torch.uint64), unused, query.new_empty(0)


def flash_forward_inplace(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: flash_forward copied into out; the log-sum-exp."""
    result, lse, *_ = flash_forward(
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        scale=scale,
        window_size_left=window_size_left,
        window_size_right=window_size_right,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        num_splits=num_splits,
    )
    out.copy_(result)
    return lse


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """aten::_flash_attention_backward: the gradients of flash_forward's out."""
    causal, window = canonical_window(is_causal, (window_size_left, window_size_right))
    options = Options(
        window=window,
        dropout_p=dropout_p,
        max_seqlen_q=max_q if cum_seq_q is not None else 0,
        max_seqlen_k=max_k if cum_seq_q is not None else 0,
        rng_state=rng_state.view(torch.int64) if dropout_p else None,
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=cum_seq_k,
    )
    tensors = grad_out, query, key, value, out, logsumexp
    return _backward(tensors, scale, causal, False, options)


def _backward(
    tensors: tuple[torch.Tensor, ...],  # dout, q, k, v, out, lse
    scale: float | None,
    causal: bool,
    heads_first: bool,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, *qkv, _, _ = tensors
    scale = qkv[0].shape[-1] ** -0.5 if scale is None else scale
    deterministic = torch.are_deterministic_algorithms_enabled()
    grads = bwd_op(*tensors, None, scale, causal, False, heads_first, deterministic, *options.arguments())
    return tuple(_like(grad, x) for grad, x in zip(grads[:3], qkv, strict=True))


def sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | int | None, ...]:
    """aten::_scaled_dot_product_flash_attention: [batch, heads, seqlen, head_dim].

    Causal aligns bottom-right, as torch.nn.attention.bias.causal_lower_right expects of this op; F.scaled_dot_product_attention
    calls it with equal lengths alone.

    Returns:
        out, log-sum-exp, None, None, seqlen_q, seqlen_k, rng_state uint64 [2], an unused one, an empty mask.
    """
    lengths = query.shape[2], key.shape[2]
    if dropout_p or return_debug_mask or not _heads_are_outer(query):
        qkv = (x.transpose(1, 2) for x in (query, key, value))
        out, lse, *rest = flash_forward(
            *qkv, None, None, *lengths, dropout_p, is_causal, return_debug_mask, scale=scale
        )
        return _like(out.transpose(1, 2), query), lse, None, None, *lengths, *rest
    with torch.no_grad():
        out, lse = attention(query, key, value, scale, is_causal, lse_base2=False, heads_first=True)
    state, unused = _dropout_state(query, 0.0)
    rest = state.view(torch.uint64), unused, query.new_empty(0)
    return _like(out, query), lse, None, None, *lengths, *rest


def sdpa_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """aten::_scaled_dot_product_flash_attention_backward: the gradients of sdpa_forward's out."""
    state = philox_seed.view(torch.int64) if dropout_p else None
    options = Options(dropout_p=dropout_p, rng_state=state)
    heads_first = _heads_are_outer(query)
    tensors = grad_out, query, key, value, out
    if not heads_first:
        tensors = tuple(x.transpose(1, 2) for x in tensors)
    grads = _backward((*tensors, logsumexp), scale, is_causal, heads_first, options)
    return grads if heads_first else tuple(x.transpose(1, 2) for x in grads)


KERNELS = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_inplace,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}
