"""tl_attention as PyTorch's flash attention: register() replaces it in F.scaled_dot_product_attention, varlen_attn and nested tensors."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tl_attention.api.flash import flash_attn_func, flash_attn_varlen_func
from tl_attention.checks.common import FWD_DTYPES, check_fwd, expect_bool, expect_like, expect_scale
from tl_attention.checks.fp32 import check_precision
from tl_attention.checks.transforms import ARGUMENT_ERRORS, Renaming
from tl_attention.integrations import torch_masks
from tl_attention.integrations.torch_masks import with_strides_of
from tl_attention.integrations.torch_modes import MODES
from tl_attention.problem.options import Options, canonical_window
from tl_attention.problem.request import new_request
from tl_attention.torch_ops.attend import attend
from tl_attention.torch_ops.ops import run_backward_op

NAME = "tl_attention"
_NAMES = Renaming(
    {
        "q": "query", "k": "key", "v": "value", "softmax_scale": "scale", "sm_scale": "scale", "causal": "is_causal",
        "cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k", "max_seqlen_q": "max_q", "max_seqlen_k": "max_k",
    }
)  # fmt: skip
_active: Handle | None = None  # whose kernels replace PyTorch's


def register(*, batch_invariant: bool = False) -> Handle:
    """Replace PyTorch's flash attention on CUDA tensors by tl_attention, until handle.remove() or to the end of a with statement.

        handle = tl_attention.torch_backend.register()
        F.scaled_dot_product_attention(q, k, v, is_causal=True)  # tl_attention
        handle.remove()  # PyTorch's own

        with tl_attention.torch_backend.register():
            F.scaled_dot_product_attention(q, k, v, is_causal=True)  # tl_attention
        F.scaled_dot_product_attention(q, k, v, is_causal=True)  # what was registered before

    Flash attention then has priority over cuDNN, which PyTorch prefers on Hopper. Calls with attn_mask, with fp32 or with values of fewer
    columns go to cuDNN's or the memory-efficient op, which are replaced, too: see torch_masks.py and torch_unmasked.py. A caller who
    prefers another backend by sdpa_kernel gets it. docs/torch.md has the table of calls. One that reaches the flash op and is not supported
    raises NotImplementedError. Gradients are bitwise reproducible under torch.use_deterministic_algorithms(True).

    After the first register(), torch.nn.attention.activate_flash_attention_impl("tl_attention") does the same.

    Args:
        batch_invariant: as in flash_attn_func, for the calls, and the backwards, that run while this registration holds. A call that the
            kernels do not serve so, such as one with dropout, is then an error, unless its caller prefers another backend by sdpa_kernel.
            False: only with TL_ATTENTION_BATCH_INVARIANT=1.
    Raises:
        NotImplementedError: torch before 2.11.
        TypeError: batch_invariant is no bool.
    """
    expect_bool("batch_invariant", batch_invariant)
    try:
        from torch.nn.attention import current_flash_attention_impl
    except ImportError as error:
        raise NotImplementedError(
            "tl_attention.torch_backend: expected torch 2.11 or later, which has current_flash_attention_impl, got"
            f" {torch.__version__}; call tl_attention.flash_attn_func instead"
        ) from error
    handle = Handle(_active or current_flash_attention_impl(), batch_invariant)
    handle._activate()
    return handle


class Handle:
    """A call of register(), which remove() or the end of a with statement reverts.

    Args:
        before: what it replaces: the handle of another call, or the name of another implementation.
        batch_invariant: of register().
    """

    def __init__(self, before: Handle | str | None, batch_invariant: bool) -> None:
        self._before, self._batch_invariant = before, batch_invariant
        self._holds = True  # until remove(); another call of register() may have the ops meanwhile
        self._entered = False
        self._overrides: _Overrides | None = None

    def remove(self) -> None:
        """Revert register() to PyTorch's own kernels; a second call does nothing."""
        self._holds = False
        if _active is self:
            self._overrides.remove()

    def __enter__(self) -> Handle:
        if self._entered or _active is not self:
            state = "was in one before" if self._entered else "is removed or replaced"
            raise RuntimeError(
                f"torch_backend: expected a new handle in a with statement, got one that {state}; write"
                " `with tl_attention.torch_backend.register():`"
            )
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        """Restore what register() replaced, unless another caller has activated something else since."""
        others = _active is not self and torch.nn.attention.current_flash_attention_impl() is not None
        self.remove()
        if others:
            return
        if isinstance(self._before, str):
            torch.nn.attention.activate_flash_attention_impl(self._before)
        elif self._before is not None and self._before._holds:
            self._before._activate()

    def _activate(self) -> None:
        torch.nn.attention.register_flash_attention_impl(NAME, register_fn=self._install)
        torch.nn.attention.activate_flash_attention_impl(NAME)

    def _install(self) -> _Overrides:
        """Override the ops, as torch asks when the implementation is activated. Returns what torch removes for another one."""
        global _active
        self._overrides, self._holds, _active = _Overrides(), True, self
        MODES.batch_invariant = self._batch_invariant
        return self._overrides


class _Overrides:
    """Our kernels in the place of those of PyTorch."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL", "CUDA")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Overriding a previously registered kernel")
            for name, function in KERNELS.items():
                if hasattr(torch.ops.aten, name):
                    self._library.impl(name, function)
            for name, function in torch_masks.overrides().items():
                self._library.impl(name, function, with_keyset=True)
        self._priorities = _prioritize_flash()

    def remove(self) -> None:
        """Bring PyTorch's kernels and its order of backends back; a second call does nothing."""
        global _active
        if self._library is None:
            return
        self._library._destroy()
        self._library = _active = None
        MODES.batch_invariant = False
        before, after = self._priorities
        if torch._C._get_sdp_priority_order() == after:  # unless another caller has changed it
            torch._C._set_sdp_priority_order(before)
        if torch.nn.attention.current_flash_attention_impl() == NAME:
            torch.nn.attention.restore_flash_attention_impl()  # drops torch's reference to this object


def _prioritize_flash() -> tuple[list[int], list[int]]:
    """Move flash attention to the front of the SDPA backends; return their order before and after."""
    if torch.cuda.is_available():
        q = torch.empty(1, 1, 8, 8, device="cuda", dtype=torch.float16)
        torch._fused_sdp_choice(q, q, q)  # the first call of a process sets the order
    before = torch._C._get_sdp_priority_order()
    flash = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
    after = [flash, *(backend for backend in before if backend != flash)]
    torch._C._set_sdp_priority_order(after)
    return before, after


def _expect(supported: bool, message: str) -> None:
    if not supported:
        raise NotImplementedError(
            f"{message}; call handle.remove() for PyTorch's own, or choose another SDPBackend"
        )


def _heads_are_outer(query: torch.Tensor) -> bool:
    """True if [batch, heads, seqlen, head_dim] has this order in memory, False for [batch, seqlen, heads, head_dim]."""
    return query.stride(1) >= query.stride(2)


def _dropout_state(query: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return seed and offset, int64 [2], from torch's generator, and the unused tensor that aten returns with them.

    Both stay uninitialized without dropout, where nothing reads them.
    """
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
    """aten::_flash_attention_forward.

    Tensors are [batch, seqlen, heads, head_dim], or [total, heads, head_dim] with cum_seq_q. Causal is aligned bottom-right.

    Returns:
        out; log-sum-exp, natural, [batch, heads, seqlen_q] or [heads, total_q]; rng_state uint64 [2]; an unused tensor; an empty mask.
    """
    expect_scale("scale", scale)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    varlen = cum_seq_q is not None
    _expect(
        not return_debug_mask,
        "return_debug_mask: expected False, as probabilities are never written, got True",
    )
    _expect(varlen or block_table is None, "block_table: expected None without cum_seq_q, got a tensor")
    _expect(
        varlen == (cum_seq_k is not None) or block_table is not None,
        "cum_seq_q, cum_seq_k: expected both or neither, got one of them",
    )
    _expect(varlen or seqused_k is None, "seqused_k: expected None without cum_seq_q, got a tensor")
    inference = ("block_table", block_table), ("alibi_slopes", alibi_slopes), ("seqused_k", seqused_k)
    for name, x in inference:
        _expect(
            x is None or not needs_grad,
            f"{name}: expected None with gradients, as torch does not pass it to the backward, got a tensor",
        )
    MODES.check(dropout_p=dropout_p, num_splits=(num_splits or 0) > 1 and num_splits)
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
        "batch_invariant": MODES.batch_invariant,
    }
    function, tensors = flash_attn_func, (query, key, value)
    if varlen:
        function, tensors = flash_attn_varlen_func, (*tensors, cum_seq_q, cum_seq_k, max_q, max_k)
        options |= {"seqused_k": seqused_k, "block_table": block_table}
    with torch.no_grad():
        try:
            out, lse, _ = function(*tensors, **options)
        except ARGUMENT_ERRORS as error:
            raise _NAMES.of(error) from None
    return with_strides_of(out, query), lse, state.view(torch.uint64), unused, query.new_empty(0)


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
    """aten::_flash_attention_forward_no_dropout_inplace: flash_forward into out; returns the log-sum-exp."""
    shape = *query.shape[:-1], value.shape[-1]
    expect_like("out", out, query, (shape,), (query.dtype,))  # copy_() would cast and broadcast
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
    """aten::_flash_attention_backward: gradients of flash_forward."""
    causal, window = canonical_window(is_causal, (window_size_left, window_size_right))
    options = Options(
        num_splits=MODES.num_splits,
        parts=check_precision(query, None),
        window=window,
        dropout_p=dropout_p,
        max_seqlen_q=max_q if cum_seq_q is not None else 0,
        max_seqlen_k=max_k if cum_seq_q is not None else 0,
        rng_state=rng_state.view(torch.int64) if dropout_p else None,
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=cum_seq_k,
    )
    tensors = grad_out, query, key, value, out, logsumexp
    grads = _backward(tensors, scale, causal, False, options)
    return tuple(with_strides_of(grad, x) for grad, x in zip(grads, (query, key, value), strict=True))


def _backward(
    tensors: tuple[torch.Tensor, ...],  # dout, q, k, v, out, lse
    scale: float | None,
    causal: bool,
    heads_first: bool,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, *qkv, _, _ = tensors
    if options.parts == 1:  # as in ops.py
        *floats, lse = tensors
        tensors = *(x.bfloat16() for x in floats), lse
        options = dataclasses.replace(options, parts=0)
    scale = qkv[0].shape[-1] ** -0.5 if scale is None else scale
    deterministic = torch.are_deterministic_algorithms_enabled()
    grads = run_backward_op(tensors, None, (scale, causal, False, heads_first, deterministic), options)
    return tuple(grads[name].to(x.dtype) for name, x in zip("qkv", qkv, strict=True))


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
    """aten::_scaled_dot_product_flash_attention on [batch, heads, seqlen, head_dim].

    Causal is aligned bottom-right, as torch.nn.attention.bias.causal_lower_right expects from this op. F.scaled_dot_product_attention
    calls it with equal lengths only.

    Returns:
        out, log-sum-exp, None, None, seqlen_q, seqlen_k, rng_state uint64 [2], an unused tensor, an empty mask.
    """
    if scale is not None:
        expect_scale("scale", scale)
    lengths = query.shape[2], key.shape[2]
    try:
        if dropout_p or return_debug_mask or not _heads_are_outer(query):
            qkv = (x.transpose(1, 2) for x in (query, key, value))
            out, lse, *rest = flash_forward(
                *qkv, None, None, *lengths, dropout_p, is_causal, return_debug_mask, scale=scale
            )
            return with_strides_of(out.transpose(1, 2), query), lse, None, None, *lengths, *rest
        with torch.no_grad():
            modes = {"batch_invariant": MODES.batch_invariant, "heads_first": True}
            out, lse = attend(new_request(query, key, value, scale, is_causal, **modes))
    except ARGUMENT_ERRORS as error:
        raise _sdpa_error(error, query, key, value, scale, is_causal) from None
    state, unused = _dropout_state(query, 0.0)
    rest = state.view(torch.uint64), unused, query.new_empty(0)
    return with_strides_of(out, query), lse, None, None, *lengths, *rest


def _sdpa_error(
    error: Exception,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    is_causal: bool,
) -> Exception:
    """The error of sdpa_forward in the names of its arguments and in their layout, which is not always that of the call inside."""
    try:
        check_fwd(query, key, value, scale, is_causal, heads_first=True, dtypes=FWD_DTYPES)
    except ARGUMENT_ERRORS as of_layout:
        error = of_layout
    return _NAMES.of(error)


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
    """aten::_scaled_dot_product_flash_attention_backward: gradients of sdpa_forward."""
    state = philox_seed.view(torch.int64) if dropout_p else None
    options = Options(
        num_splits=MODES.num_splits, dropout_p=dropout_p, rng_state=state, parts=check_precision(query, None)
    )
    heads_first = _heads_are_outer(query)
    tensors = grad_out, query, key, value, out
    if not heads_first:
        tensors = tuple(x.transpose(1, 2) for x in tensors)
    grads = _backward((*tensors, logsumexp), scale, is_causal, heads_first, options)
    if not heads_first:
        grads = tuple(x.transpose(1, 2) for x in grads)
    return tuple(with_strides_of(grad, x) for grad, x in zip(grads, (query, key, value), strict=True))


KERNELS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_inplace,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}
