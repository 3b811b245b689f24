"""Checks of the arguments of flex_attention. They read metadata only, but for warn_about_mask_of_numbers() on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from tl_attention.checks.common import (
    BY_KEYWORD,
    check_num_splits,
    check_window,
    describe,
    expect_bool,
    expect_dropout,
    expect_local,
    expect_softcap,
    expect_tensor,
    is_dtensor,
    is_int,
    surely,
)
from tl_attention.checks.transforms import warn_caller
from tl_attention.problem.attn_problem import MAX_HEAD_DIM
from tl_attention.problem.program import BLOCK_BITS, HOW_BITS, Call
from tl_attention.problem.request import Request, new_request

MAX_ELEMENTS = 2**31 - 1  # from the first to the last element of a captured tensor: kernels index in 32 bits
MAX_LENGTH = 2**24  # positions are exact in fp32
MAX_BATCH = 2**16 - 1
MAX_GROUP = 1 << 31 - HOW_BITS - BLOCK_BITS  # query heads per key head, where blocks are listed
BIAS_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.bool
LISTS = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"  # of a BlockMask
# Fields of a Request that a call with functions takes. Every other one must be off, that is, have its default
TAKEN = {
    "q", "k", "v", "softmax_scale", "deterministic", "precision", "batch_invariant", "lengths", "heads_first", "lse_base2", "functions",
    "enable_gqa", "max_logits",
}  # fmt: skip
OPTIONS_OFF = {
    name: parameter.default
    for name, parameter in inspect.signature(new_request).parameters.items()
    if name not in TAKEN
}


class Names(NamedTuple):
    """Names of a public function and of its arguments, for errors."""

    function: str
    q: str
    k: str


FLEX_NAMES, FLASH_NAMES = Names("flex_attention", "query", "key"), Names("flash_attn_func", "q", "k")
LEAF_NAMES = {"batch": "b", "head": "h", "query": "q_idx", "key": "kv_idx"}


def check_aux(return_aux: Any, return_lse: bool) -> None:
    """Check the request for outputs beside out."""
    from torch.nn.attention.flex_attention import AuxRequest

    if not isinstance(return_aux, AuxRequest):
        raise TypeError(
            "return_aux: expected torch.nn.attention.flex_attention.AuxRequest or None, got"
            f" {describe(return_aux)}; pass AuxRequest(lse=True)"
        )
    if return_lse:
        raise ValueError("return_aux: expected None beside return_lse, got both; leave out return_lse")


def check_function(name: str, function: Callable[..., Any] | None) -> None:
    if function is not None and not callable(function):
        hint = ""
        if isinstance(function, torch.Tensor):
            hint = "; pass a tensor as attn_bias"
        elif is_block_mask(function):
            hint = "; pass it as block_mask"
        raise TypeError(f"{name}: expected a function of 0-d tensors or None, got {describe(function)}{hint}")


def check_dense_captures(name: str, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse sparse and nested tensors and DTensors that a function captures. name: score_mod or mask_mod."""
    for x in tensors:
        if is_dtensor(x):
            raise NotImplementedError(
                f"{name}: expected a function that captures tensors of this rank, got a DTensor of placements {tuple(x.placements)};"
                " capture its .to_local()"
            )
        if x.is_nested or x.layout != torch.strided:
            kind = "a nested tensor" if x.is_nested else f"a {x.layout} tensor of shape {tuple(x.shape)}"
            dense = "to_padded_tensor(0)" if x.is_nested else "to_dense()"
            raise NotImplementedError(
                f"{name}: expected a function that captures dense tensors, got {kind}; capture its .{dense}"
            )


def is_block_mask(x: Any) -> bool:
    """True for a BlockMask of PyTorch, or an object with the same fields."""
    return all(hasattr(x, name) for name in (*LISTS, "mask_mod", "seq_lengths", "BLOCK_SIZE"))


def check_not_transformed(function: str) -> None:
    """Refuse torch.func, which would have to see the functions inside the kernels. function: the public one, for the error.

    torch.compile asks the op of the call instead.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise transformed(function)
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{function}: forward-mode derivatives are not supported with functions, masks and biases; call .backward()"
        )


def transformed(function: str) -> NotImplementedError:
    """Error of a call inside torch.func. function: as in check_not_transformed."""
    return NotImplementedError(
        f"{function}: expected a call outside torch.func transforms (vmap, grad, jvp), which are not supported with functions, masks"
        " and biases; call .backward(), and make a vmapped dimension part of the batch"
    )


_OPTION_ADVICE = {
    "dropout_p": "leave out the dropout, which no function can draw",
    "rng_state": "leave it out, it is of dropout",
    "learnable_sink": "leave it out, and multiply out by torch.sigmoid(softmax_lse - sink) of its query and head (docs/flex.md)",
    "num_splits": "leave it out",
}


def check_no_options(request: Request) -> None:
    """Refuse options of flash_attn_func beside functions, but for the precision, and malformed ones as a call without functions does."""
    check_num_splits(request.num_splits)
    check_window(request.window_size)
    expect_softcap(request.softcap)
    expect_dropout("dropout_p", request.dropout_p, BY_KEYWORD)
    for name, off in OPTIONS_OFF.items():
        value = getattr(request, name)
        if isinstance(off, bool):
            expect_bool(name, value)
        if name == "window_size":
            is_off = all(x is None or x == -1 for x in value)
        else:
            is_off = value is off or (off is not None and isinstance(value, int | float) and value == off)
        if not is_off:
            advice = _OPTION_ADVICE.get(name, "write it as a function")
            raise ValueError(
                f"{name}: expected {off} beside score_mod, mask_mod, block_mask or attn_bias, got {describe(value)}; {advice}"
            )


def no_second_order(function: str) -> NotImplementedError:
    """Error of a gradient of a gradient. function: as in check_not_transformed."""
    return NotImplementedError(
        f"{function}: the gradient of a gradient is not supported; call backward without create_graph=True"
    )


def batched_gradients(function: str) -> NotImplementedError:
    """Error of a backward of several samples at once. function: as in check_not_transformed."""
    return NotImplementedError(
        f"{function}: expected gradients of one sample, as those of torch.autograd.grad(is_grads_batched=True) and"
        " torch.autograd.functional with vectorize=True are not supported with functions, masks and biases, got several; call it per sample"
    )


def expand_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v expanded to the batch of q if they have one entry for all."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        expect_tensor(name, x)
    is_one = (surely(x.shape[0] == 1) for x in (k, v))
    if q.ndim == k.ndim == v.ndim == 4 and all(is_one) and not surely(q.shape[0] == 1):
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
    return k, v


def has_wide_values(q: Any, k: Any, v: Any) -> bool:
    """True for values wider than queries and keys, which are alike; False for tensors that the other checks refuse."""
    try:
        if not v.shape[-1] > k.shape[-1]:
            return False
    except (AttributeError, IndexError, RuntimeError, TypeError):  # no dense tensors
        return False
    are_tensors = all(isinstance(x, torch.Tensor) and x.ndim == 4 for x in (q, k, v))
    return are_tensors and 0 < q.shape[-1] == k.shape[-1]


def check_value_width(v: torch.Tensor) -> None:
    if v.shape[-1] > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"value: expected a head_dim of at most {MAX_HEAD_DIM}, got {v.shape[-1]}, which is not supported; pass parts of its columns"
        )


def check_sizes(q: torch.Tensor, k: torch.Tensor, names: Names) -> None:
    """Check that batch and lengths of q and k [batch, heads, seqlen, head_dim] are within limits."""
    if surely(q.shape[0] > MAX_BATCH):
        raise NotImplementedError(
            f"{names.q}: expected a batch of at most {MAX_BATCH}, got {q.shape[0]}; call it in parts"
        )
    for name, x in ((names.q, q), (names.k, k)):
        if surely(x.shape[2] > MAX_LENGTH):
            raise NotImplementedError(f"{name}: expected at most {MAX_LENGTH} rows, got {x.shape[2]}")


def check_group(q: torch.Tensor, k: torch.Tensor, enable_gqa: bool) -> None:
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(
            f"key, value: expected the heads of query, {q.shape[1]}, got {k.shape[1]}; pass enable_gqa=True to share them"
        )


def check_block_mask(
    block_mask: Any, mask_mod: Callable[..., Any] | None, q: torch.Tensor, k: torch.Tensor, names: Names
) -> None:
    """Check a BlockMask of PyTorch, q and k [batch, heads, seqlen, head_dim]."""
    if mask_mod is not None:
        raise ValueError(
            "mask_mod: expected None beside block_mask, which has a mask_mod of its own, got a function"
        )
    if not is_block_mask(block_mask):
        raise TypeError(
            f"block_mask: expected a BlockMask of torch.nn.attention.flex_attention, got {type(block_mask).__name__}; pass a function as"
            " mask_mod, a tensor as attn_bias"
        )
    lengths = q.shape[2], k.shape[2]
    if tuple(block_mask.seq_lengths) != lengths:
        raise ValueError(
            f"block_mask: expected one made for lengths {lengths} of {names.q} and {names.k}, got one for"
            f" {tuple(block_mask.seq_lengths)}; make it for these lengths"
        )
    size = block_mask.BLOCK_SIZE
    if (
        not isinstance(size, tuple | list)
        or len(size) != 2
        or not all(is_int(rows) and rows > 0 for rows in size)
    ):
        raise ValueError(
            f"block_mask: expected a BLOCK_SIZE of two ints of at least 1, got {size}; make it with create_block_mask or from_kv_blocks"
        )
    for name in LISTS:
        _check_list(name, getattr(block_mask, name), -(-lengths[0] // size[0]), q, names)
    if (block_mask.full_kv_num_blocks is None) != (block_mask.full_kv_indices is None):
        raise ValueError(
            "block_mask: expected both of full_kv_num_blocks and full_kv_indices or neither, got one; make it with from_kv_blocks"
        )
    if k.shape[1] and q.shape[1] // k.shape[1] >= MAX_GROUP:
        raise NotImplementedError(
            f"block_mask: expected fewer than {MAX_GROUP} query heads per key head, got {q.shape[1] // k.shape[1]}; pass mask_mod"
        )


def _check_list(name: str, x: torch.Tensor | None, rows: int, q: torch.Tensor, names: Names) -> None:
    """Check numbers, or indices, of the blocks of a BlockMask for `rows` blocks of queries."""
    if x is None and name.startswith("full"):
        return
    name, ndim = f"block_mask.{name}", 4 if name.endswith("indices") else 3
    expect_tensor(name, x)
    if x.device != q.device:
        raise ValueError(
            f"{name}: expected the device of {names.q}, {q.device}, got {x.device}; call block_mask.to({names.q}.device)"
        )
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{name}: expected int32 or int64, got {describe(x)}; convert it with .to(torch.int32)"
        )
    if x.ndim != ndim or x.shape[2] != rows:
        raise ValueError(
            f"{name}: expected [batch, heads, {rows}{', entries' if ndim == 4 else ''}], a row per block of queries, got shape"
            f" {tuple(x.shape)}; make it for these lengths"
        )
    if x.shape[0] not in (1, q.shape[0]) or x.shape[1] not in (1, q.shape[1]):
        raise ValueError(
            f"{name}: expected a batch of 1 or {q.shape[0]} and 1 or {q.shape[1]} heads, got shape {tuple(x.shape)}; make it for these"
        )


def _bias_hint(bias: torch.Tensor, wanted: tuple[int, ...]) -> str:
    """Advice for a bias of another shape than [1 or batch, 1 or heads, seqlen_q, seqlen_k]."""
    batch, heads, seqlen_q, seqlen_k = wanted
    shape, expand = tuple(bias.shape), f".expand(-1, -1, {seqlen_q}, -1)"
    if shape in {(seqlen_q, seqlen_k), (heads, seqlen_q, seqlen_k)}:
        return f"pass attn_bias[{', '.join(['None'] * (4 - bias.ndim))}]"
    if shape == (batch, seqlen_q, seqlen_k):
        return "pass attn_bias[:, None]"
    if shape == (batch, seqlen_k):
        return f"pass attn_bias[:, None, None]{expand}, if it is a mask of keys"
    if shape == (batch, 1, seqlen_k):
        return f"pass attn_bias[:, None]{expand}"
    if bias.ndim == 4 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2:] == (1, seqlen_k):
        return f"pass attn_bias{expand}"
    return "view or expand it to that"


def check_bias(bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, names: Names) -> None:
    """Check attn_bias for q and k [batch, heads, seqlen, head_dim]."""
    expect_tensor("attn_bias", bias)
    expect_local("attn_bias", bias)
    # Of torch.nn.attention.bias: its memory and its shape are those of no mask
    if type(bias).__name__ == "CausalBias":
        raise TypeError(
            "attn_bias: expected a tensor with a value per score, got a CausalBias, which has none; call flash_attn_func(causal=True) in"
            " place of causal_lower_right, and pass a mask_mod that returns q_idx >= kv_idx in place of causal_upper_left"
        )
    if bias.dtype not in BIAS_DTYPES:
        raise TypeError(
            f"attn_bias: expected float32, bfloat16, float16 or bool, got {describe(bias)}; call .bool()"
            " if it is a mask of zeros and ones, else .float()"
        )
    wanted = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    fits = bias.ndim == 4 and all(
        x == n or (dim < 2 and x == 1) for dim, (x, n) in enumerate(zip(bias.shape, wanted, strict=True))
    )
    if not fits:
        batch, heads = (n if n == 1 else f"1 or {n}" for n in wanted[:2])
        raise ValueError(
            f"attn_bias: expected shape ({batch}, {heads}, {wanted[2]}, {wanted[3]}) of batch, heads, seqlen_q, seqlen_k,"
            f" got {tuple(bias.shape)}; {_bias_hint(bias, wanted)}"
        )
    if bias.device != q.device:
        raise ValueError(
            f"attn_bias: expected the device of {names.q}, {q.device}, got {bias.device}; move it with .to({names.q}.device)"
        )


def warn_about_mask_of_numbers(bias: torch.Tensor) -> None:
    """Warn about a float attn_bias on the CPU that has only zeros and ones, both of them. On a GPU reading the values would wait for it,
    and a tracer such as make_fx cannot read them.
    """
    if type(bias) is not torch.Tensor or bias.device.type != "cpu" or bias.dtype == torch.bool:
        return
    if bias.requires_grad or torch._C._len_torch_dispatch_stack():  # learned, or traced
        return
    ones = bias == 1
    if bool(ones.any()) and not bool(ones.all()) and bool((ones | (bias == 0)).all()):
        warn_caller(
            "attn_bias: a float tensor is added to the scores, and all values are 0 or 1; pass attn_bias.bool() if it is a mask"
        )


def check_captured(call: Call, q: torch.Tensor, k: torch.Tensor, names: Names) -> None:
    """Check devices and sizes of captured tensors."""
    sizes = {"batch": q.shape[0], "head": q.shape[1], "query": q.shape[2], "key": k.shape[2]}
    check_captured_sizes(call, sizes, q.device, f"the device of {names.q}", f"{names.q}.device")


def check_captured_sizes(
    call: Call, sizes: dict[str, int], device: torch.device, of: str, in_code: str
) -> None:
    """Check devices and sizes of captured tensors.

    Args:
        sizes: number of values of each leaf that is an index.
        of, in_code: the expected device, in words and as code, the argument of .to().
    """
    for i, x in enumerate(call.tensors):
        name = f"captured tensor {i}, {describe(x)}"
        if x.device != device:
            raise ValueError(f"{name}: expected {of}, {device}; move it with .to({in_code})")
        if x.layout != torch.strided or x.is_nested:
            raise NotImplementedError(f"{name}: expected a dense tensor, got {x.layout}; call .to_dense()")
        extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        if extent >= MAX_ELEMENTS:
            raise NotImplementedError(f"{name}: expected at most {MAX_ELEMENTS} elements; pass a part of it")
    for value in call.program.values:
        if value.op != "load":
            continue
        x = call.tensors[value.data]
        for dim, arg in enumerate(value.args):
            index = call.program.values[arg]
            wanted = sizes.get(index.op)
            if wanted is not None and x.shape[dim] < wanted:
                raise ValueError(
                    f"captured tensor {value.data}, {describe(x)}: expected at least {wanted} entries in dimension {dim}, which"
                    f" {LEAF_NAMES[index.op]} indexes, got {x.shape[dim]}"
                )
            position = _known_index(call, arg)
            if position is not None and not -x.shape[dim] <= position < x.shape[dim]:
                raise ValueError(
                    f"captured tensor {value.data}, {describe(x)}: expected an index within dimension {dim}, from {-x.shape[dim]} to"
                    f" {x.shape[dim] - 1}, got {position}"
                )


def _known_index(call: Call, i: int) -> int | None:
    """Number that an index is, a constant or one that the function captured; None for others."""
    value = call.program.values[i]
    while value.op == "cast":
        value = call.program.values[value.args[0]]
    if value.op == "constant":
        return int(value.data)
    return int(call.numbers[value.data]) if value.op == "number" else None
