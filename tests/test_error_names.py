"""Errors in the names of the function that was called, and inputs of unusual kinds: scalars, nested and sparse tensors, compiled calls."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.func import jvp
from torch.nn.attention.flex_attention import BlockMask

from tl_attention import (
    create_block_mask,
    distributed,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    flex_attention,
    fp32_workspace_bytes,
    launch,
    merge_states,
    mha_bwd_interface,
    mha_fwd_interface,
    ref_mha_bwd_interface,
    ref_mha_fwd_interface,
)
from tl_attention.checks.transforms import Renaming
from tl_attention.integrations import hf

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16 = torch.bfloat16


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


def cu(*ends, dtype=torch.int32):
    return torch.tensor(ends, dtype=dtype)


Q, QKV, KV = zeros(2, 5, 4, 64), zeros(2, 5, 3, 4, 64), zeros(2, 5, 2, 4, 64)
ROWS, ROWS_QKV, ROWS_KV = zeros(10, 4, 64), zeros(10, 3, 4, 64), zeros(10, 2, 4, 64)
qkv, kv = flash_attn_qkvpacked_func, flash_attn_kvpacked_func
varlen_qkv, varlen_kv = flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func
NAMES = {
    "qkv-dtype": (lambda: qkv(QKV.double()), TypeError, r"^qkv: expected bfloat16, float16 or.*cast it with qkv\.to\(torch\.bfloat16\)$"),
    "qkv-strides": (lambda: qkv(zeros(2, 5, 3, 64, 4).mT), ValueError, r"^qkv: expected a contiguous last.*call qkv\.contiguous\(\)$"),
    "qkv-wide": (lambda: qkv(zeros(2, 5, 3, 4, 264)), NotImplementedError, r"^qkv: expected a head_dim of at most 256, got 264"),
    "qkv-empty": (lambda: qkv(zeros(2, 5, 3, 4, 0)), ValueError, r"^qkv: expected head dims of at least 1, got 0 for qkv"),
    "qkv-slopes": (lambda: qkv(QKV, alibi_slopes=torch.ones(3)), ValueError, r"^alibi_slopes: expected shape \(4,\) or \(2, 4\), got"),
    "qkv-sink": (
        lambda: qkv(QKV, learnable_sink=torch.ones(4, device="meta")), ValueError, r"^learnable_sink: expected the device of qkv, cpu",
    ),
    "qkv-tangent": (
        lambda: jvp(lambda x: jvp(qkv, (x,), (QKV,))[1], (QKV,), (QKV,)), NotImplementedError, r"^qkv: expected a tensor without a tangent",
    ),
    "kv-dtype": (lambda: kv(Q, KV.double()), TypeError, r"^kv: expected bfloat16, float16 or.*kv\.to"),
    "kv-mixed": (lambda: kv(Q, KV.half()), TypeError, r"^kv: expected the dtype of q, torch\.bfloat16, got torch\.float16 and"),
    "kv-device": (lambda: kv(Q, KV.to("meta")), ValueError, r"^kv: expected the device of q, cpu, got meta and meta"),
    "kv-batch": (lambda: kv(Q, KV[:1]), ValueError, r"^kv: expected the batch size of q, 2, got 1 and 1"),
    "kv-heads": (lambda: kv(Q, zeros(2, 5, 2, 3, 64)), ValueError, r"^kv: expected a number of heads that divides the 4 of q, got 3"),
    "kv-head-dim": (lambda: kv(Q, KV[..., :32]), ValueError, r"^kv: expected the head_dim of q, 64, got 32"),
    "kv-q": (lambda: kv(Q.double(), KV), TypeError, r"^q: expected bfloat16, float16 or.*cast it with q\.to"),
    "kv-wide": (lambda: kv(zeros(1, 5, 4, 264), zeros(1, 5, 2, 4, 264)), NotImplementedError, r"^q, kv: expected a head_dim of at most"),
    "varlen-qkv-cu": (
        lambda: varlen_qkv(ROWS_QKV, cu(0, 10, dtype=torch.int64), 10), TypeError,
        r"^cu_seqlens: expected torch\.int32, got torch\.int64; cast it with cu_seqlens\.to\(torch\.int32\)$",
    ),
    "varlen-qkv-list": (lambda: varlen_qkv(ROWS_QKV, [0, 10], 10), TypeError, r"^cu_seqlens: expected a torch\.Tensor, got list"),
    "varlen-qkv-device": (lambda: varlen_qkv(ROWS_QKV, cu(0, 10).to("meta"), 10), ValueError, r"^cu_seqlens: expected the device of qkv"),
    "varlen-qkv-max": (lambda: varlen_qkv(ROWS_QKV, cu(0, 10), -1), ValueError, r"^max_seqlen: expected the length of the longest"),
    "varlen-qkv-dtype": (lambda: varlen_qkv(ROWS_QKV.double(), cu(0, 10), 10), TypeError, r"^qkv: expected bfloat16, float16"),
    "varlen-kv-cu": (lambda: varlen_kv(ROWS, ROWS_KV, cu(0, 10), [0], 10, 10), TypeError, r"^cu_seqlens_k: expected a torch\.Tensor"),
    "varlen-kv-heads": (
        lambda: varlen_kv(ROWS, zeros(10, 2, 3, 64), cu(0, 10), cu(0, 10), 10, 10), ValueError,
        r"^kv: expected a number of heads that divides the 4 of q, got 3",
    ),
    "mha-scale": (lambda: mha_fwd_interface(Q, Q, Q, math.inf), ValueError, r"^sm_scale: "),
    "mha-causal": (lambda: mha_fwd_interface(Q, Q, Q, None, 1), TypeError, r"^is_causal: "),
    "mha-kernel": (lambda: mha_fwd_interface(Q, Q, Q, None, 1, True), TypeError, r"^is_causal: "),
    "mha-v-wide": (lambda: mha_fwd_interface(Q[..., :32], Q[..., :32], Q), NotImplementedError, r"zeros and pass sm_scale explicitly"),
    "flash-v-wide": (lambda: flash_attn_func(Q[..., :32], Q[..., :32], Q), NotImplementedError, r"zeros and pass softmax_scale"),
    "mha-bwd-scale": (lambda: mha_bwd_interface(Q, Q, Q, Q, Q, Q, math.nan), ValueError, r"^sm_scale: "),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), NAMES.values(), ids=NAMES)
def test_errors_name_the_arguments_of_the_caller(call, error, text):
    with pytest.raises(error, match=text):
        call()


def never(b, h, q, k):
    return q * k < -1


LISTS = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
MASK = BlockMask.from_kv_blocks(*LISTS, mask_mod=never, seq_lengths=(5, 5))
META = zeros(5).to("meta")
LONG, MANY = zeros(1, 1, 1, 8).expand(1, 2**24 + 1, 1, 8), zeros(1, 1, 1, 8).expand(2**16, 1, 1, 8)
FUNCTIONS = {
    "flash-bias": (
        lambda: flash_attn_func(Q, Q, Q, attn_bias=zeros(1, 1, 5, 5).to("meta")), ValueError,
        r"^attn_bias: expected the device of q, cpu, got meta; move it with \.to\(q\.device\)$",
    ),
    "flash-lengths": (
        lambda: flash_attn_func(Q, KV[:, :3, 0], KV[:, :3, 1], block_mask=MASK), ValueError,
        r"^block_mask: expected one made for lengths \(5, 3\) of q and k, got one for \(5, 5\); make it for these lengths$",
    ),
    "flash-lists": (
        lambda: flash_attn_func(Q, Q, Q, block_mask=MASK.to("meta")), ValueError,
        r"^block_mask\.kv_num_blocks: expected the device of q, cpu, got meta; call block_mask\.to\(q\.device\)$",
    ),
    "flash-captured": (
        lambda: flash_attn_func(Q, Q, Q, score_mod=lambda s, b, h, q, k: s + META[k]), ValueError,
        r"^captured tensor 0, .*expected the device of q, cpu; move it with \.to\(q\.device\)$",
    ),
    "flash-dtype": (lambda: flash_attn_func(Q.double(), Q, Q, mask_mod=never), TypeError, r"^q: expected bfloat16.*q\.to"),
    "flash-heads": (lambda: flash_attn_func(Q, *KV[..., :3, :].unbind(2), mask_mod=never), ValueError, r"^k, v: expected a number"),
    "flash-scale": (lambda: flash_attn_func(Q, Q, Q, softmax_scale=math.inf, mask_mod=never), ValueError, r"^softmax_scale: "),
    "flash-rows": (
        lambda: flash_attn_func(LONG, LONG, LONG, mask_mod=never), NotImplementedError, r"^q: expected at most 16777216 rows, got 16777217",
    ),
    "flash-batch": (
        lambda: flash_attn_func(MANY, MANY, MANY, mask_mod=never), NotImplementedError, r"^q: expected a batch of at most 65535, got",
    ),
    "flash-jvp": (
        lambda: jvp(lambda x: flash_attn_func(x, Q, Q, mask_mod=never), (Q,), (Q,)), NotImplementedError, r"^flash_attn_func: expected a",
    ),
    "flex-bias": (
        lambda: flex_attention(Q, Q, Q, attn_bias=zeros(1, 1, 4, 4).to("meta")), ValueError,
        r"^attn_bias: expected the device of query, cpu, got meta; move it with \.to\(query\.device\)$",
    ),
    "flex-rows": (
        lambda: flex_attention(LONG[:, :2], *[LONG.transpose(1, 2)] * 2), NotImplementedError, r"^key: expected at most 16777216 rows, got",
    ),
    "flex-dtype": (lambda: flex_attention(Q.double(), Q, Q), TypeError, r"^query: expected bfloat16.*query\.to"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_errors_with_functions_name_the_arguments_of_the_caller(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_errors_of_others_keep_their_words():
    error = RuntimeError("k is not v")
    assert Renaming({"k": "kv", "v": "kv"}).of(error) is error
    ours = ValueError("k, v: expected q.shape of k and v, got 1; pass x.k")
    assert str(Renaming({"k": "kv", "v": "kv"}).of(ours)) == "kv: expected q.shape of kv, got 1; pass x.k"
    entry = IndexError("cu_seqlens_q[3]: expected at least 5, got 4")
    assert str(Renaming({"cu_seqlens_q": "cu"}).of(entry)) == "cu[3]: expected at least 5, got 4"


REFERENCE_ERRORS = {
    "3-d": ({"q": Q[0]}, ValueError, r"^q: expected 4 dimensions \[batch, heads, seqlen, head_dim\], got shape \(5, 4, 64\)"),
    "0-d": ({"v": torch.tensor(1.0)}, ValueError, r"^v: expected 4 dimensions"),
    "list": ({"k": [1.0]}, TypeError, r"^k: expected a torch\.Tensor, got list"),
    "int": ({"q": Q.int()}, TypeError, r"^q: expected a floating-point dtype, got torch\.int32"),
    "batch": ({"k": Q[:1]}, ValueError, r"^k, v: expected the batch size of q, 2, got 1 and 2"),
    "heads": ({"k": zeros(2, 3, 4, 64), "v": zeros(2, 3, 4, 64)}, ValueError, r"^k, v: expected a number of heads that divides the 5"),
    "head-dim": ({"k": Q[..., :32]}, ValueError, r"^k: expected the head_dim of q, 64, got 32"),
    "rows": ({"v": Q[:, :, :3]}, ValueError, r"^v: expected the heads and seqlen of k, 5 and 4, got 5 and 3"),
    "device": ({"v": Q.to("meta")}, ValueError, r"^v: expected the device of q, cpu, got meta"),
    "scale": ({"sm_scale": math.nan}, ValueError, r"^sm_scale: expected a finite number"),
    "causal": ({"is_causal": 1}, TypeError, r"^is_causal: expected a bool, got 1"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), REFERENCE_ERRORS.values(), ids=REFERENCE_ERRORS)
def test_errors_of_the_references(changes, error, text):
    arguments = {"q": Q, "k": Q, "v": Q} | changes
    with pytest.raises(error, match=text):
        ref_mha_fwd_interface(**arguments)
    with pytest.raises(error, match=text):
        ref_mha_bwd_interface(do=Q, **arguments)


def test_errors_of_the_reference_name_do():
    with pytest.raises(ValueError, match=r"^do: expected shape \(2, 5, 4, 64\), got \(2, 5, 4, 8\)"):
        ref_mha_bwd_interface(Q[..., :8], Q, Q, Q)


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64])
def test_references_take_any_floating_point_dtype(dtype):
    q, k, v = (torch.randn(1, 2, 3, n).to(dtype) for n in (20, 20, 33))
    out, lse = ref_mha_fwd_interface(q, k, v)
    assert out.shape == (1, 2, 3, 33) and lse.shape == (1, 2, 3)
    assert [x.shape for x in ref_mha_bwd_interface(out, q, k, v)] == [x.shape for x in (q, k, v)]


SCALAR = torch.tensor(1.0, dtype=BF16)
SCALARS = {
    "flash": (lambda x: flash_attn_func(x, x, x), r"^q: expected 4 dimensions"),
    "varlen": (
        lambda x: flash_attn_varlen_func(x, x, x, cu(0, 1), cu(0, 1), 1, 1),
        r"^q: expected 3 dimensions",
    ),
    "qkv": (lambda x: qkv(x), r"^qkv: expected shape \[batch, seqlen, 3, heads, head_dim\]"),
    "mha": (lambda x: mha_fwd_interface(x, x, x), r"^q: expected 4 dimensions"),
    "mha-bwd": (lambda x: mha_bwd_interface(x, x, x, x, x, x), r"^q: expected 4 dimensions"),
    "kvcache": (lambda x: flash_attn_with_kvcache(x, x, x), r"^q: expected 4 dimensions"),
    "merge": (lambda x: merge_states([x], [x]), r"^outs\[0\]: expected \[batch, seqlen, heads, head_dim\]"),
    "merge-stacked": (lambda x: merge_states(x, x), r"^outs: expected a stack of partial results, got \(\)"),
}


@pytest.mark.parametrize(("call", "text"), SCALARS.values(), ids=SCALARS)
def test_scalars_are_refused_by_name(call, text):
    with pytest.raises(ValueError, match=text):
        call(SCALAR)


def attend_backward(x):
    return mha_bwd_interface(x, x, x, x, x, x)


NESTED = {
    "flash": (lambda x: flash_attn_func(x, x, x), "q"),
    "flash-options": (lambda x: flash_attn_func(x, x, x, softcap=1.0), "q"),
    "varlen": (lambda x: flash_attn_varlen_func(x, x, x, cu(0, 5, 8), cu(0, 5, 8), 5, 5), "q"),
    "kv": (lambda x: kv(Q.to(x.device), x), "kv"),
    "mha": (lambda x: mha_fwd_interface(x, x, x), "q"),
    "mha-bwd": (attend_backward, "q"),
    "reference": (lambda x: ref_mha_fwd_interface(x, x, x), "q"),
    "kvcache": (lambda x: flash_attn_with_kvcache(Q.to(x.device), x, x), "k_cache"),
    "distributed": (lambda x: distributed.attention(x, x, x), "q"),
    "bias": (lambda x: flash_attn_func(*[Q.to(x.device)] * 3, attn_bias=x), "attn_bias"),
    "merge": (lambda x: merge_states([x], [x]), r"outs\[0\]"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize(("call", "name"), NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nested_tensors_are_refused_by_name(call, name, layout, device):
    x = torch.nested.nested_tensor([Q[0], Q[0, :3]], layout=layout, device=device)
    with pytest.raises(
        NotImplementedError, match=rf"^{name}: expected .* got a nested tensor; pass its values\(\)"
    ):
        call(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["dropout_p", "causal", "softcap", "num_splits", "return_max_logits"])
def test_nested_tensors_in_the_place_of_a_number_are_refused_by_name(name):
    x = torch.nested.nested_tensor([Q[0], Q[0, :3]], layout=torch.strided)
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: expected .* got a nested tensor"):
        flash_attn_func(Q, Q, Q, **{name: x})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_no_plan():
    x = torch.nested.nested_tensor([Q[0], Q[0, :3]])
    assert launch.bwd_plan(x, x, x, x, x, x, False, False, False) is None


HEADS_FIRST, LSE = Q.transpose(1, 2), zeros(2, 4, 5, dtype=torch.float32)
SPARSE = {
    "q": (lambda x: flash_attn_func(x(Q), Q, Q), "q"),
    "slopes": (lambda x: flash_attn_func(Q, Q, Q, alibi_slopes=x(torch.ones(4))), "alibi_slopes"),
    "sink": (lambda x: flash_attn_with_kvcache(Q, Q, Q, learnable_sink=x(torch.ones(4))), "learnable_sink"),
    "bias": (lambda x: flash_attn_func(Q, Q, Q, attn_bias=x(zeros(1, 1, 5, 5))), "attn_bias"),
    "rotary": (lambda x: flash_attn_with_kvcache(Q, Q, Q, Q[:, :1], Q[:, :1], *[x(zeros(5, 4))] * 2, 2), "rotary_cos"),
    "do": (lambda x: mha_bwd_interface(x(HEADS_FIRST), *[HEADS_FIRST] * 4, LSE), "do"),
    "lse": (lambda x: mha_bwd_interface(*[HEADS_FIRST] * 5, x(LSE)), "lse"),
    "reference": (lambda x: ref_mha_fwd_interface(Q, x(Q), Q), "k"),
    "hf": (lambda x: hf.attention_forward(None, Q, Q, Q, None, position_bias=x(zeros(1, 1, 4, 4))), "position_bias"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "name"), SPARSE.values(), ids=SPARSE)
def test_sparse_tensors_are_refused_by_name(call, name):
    with pytest.raises(
        NotImplementedError,
        match=rf"^{name}: expected a dense tensor, got torch\.sparse_coo; call {name}\.to_dense\(\)",
    ):
        call(torch.Tensor.to_sparse)


NUMBERS = np.zeros(4)
VALUES = {
    "precision": (lambda: flash_attn_func(Q, Q, Q, precision=["high"]), ValueError, r"^precision: expected one of 'highest', 'high'"),
    "state": (lambda: flash_attn_func(Q, Q, Q, rng_state=3), TypeError, r"^rng_state: expected a torch\.Tensor, got int"),
    "kernels": (
        lambda: flex_attention(Q, Q, Q, kernel_options=torch.ones(2)), NotImplementedError, r"^kernel_options: expected None, got \(2,\)",
    ),
    "workspace-scalar": (lambda: fp32_workspace_bytes(*[torch.ones(())] * 3), ValueError, r"^q: expected shape \[\.\., head_dim\], head"),
    "workspace-wide": (lambda: fp32_workspace_bytes(*[torch.ones(2, 257)] * 3), ValueError, r"^q: .*head_dim 1 to 256, got \(2, 257\)"),
    "bias-of-layer": (
        lambda: hf.attention_forward(None, Q, Q, Q, None, position_bias=[1.0]), TypeError, r"^position_bias: expected a torch\.Tensor, got",
    ),
    "softcap-of-layer": (lambda: hf.attention_forward(None, Q, Q, Q, None, softcap={}), ValueError, r"^softcap: expected 0 for no cap"),
    "documents-of-list": (
        lambda: distributed.attention([1.0], ROWS, ROWS, cu_seqlens=[0, 10]), TypeError, r"^q: expected a torch\.Tensor, got list",
    ),
    "packed": (lambda: distributed.attention(ROWS, ROWS, ROWS), ValueError, r"^q: expected \[batch, .*; pass cu_seqlens for packed"),
    "tokens": (lambda: distributed.attention(Q, Q, Q, seqlen=-1), ValueError, r"^seqlen: expected the tokens of the whole sequence, at"),
    "layout": (lambda: distributed.shard(Q, layout=torch.ones(2)), ValueError, r"^layout: expected 'zigzag' or 'contiguous' or"),
    "method": (lambda: distributed.attention(Q, Q, Q, method=["ring"]), ValueError, r"^method: expected one of 'auto'.*got \['ring'\]"),
    "shard-scalar": (lambda: distributed.shard(torch.ones(())), ValueError, r"^x: expected at least one dimension, got \(\)"),
    "documents-none": (lambda: distributed.shard_cu_seqlens(None), TypeError, r"^cu_seqlens: expected a tensor or a list of ints, got"),
    "causal-of-layer": (
        lambda: hf.attention_forward(None, Q, Q, Q, None, is_causal="no"), TypeError,
        r"^is_causal: expected a bool, or None to ask the layer, got 'no'; pass True or False$",
    ),
    "causal-tensor-of-layer": (
        lambda: hf.attention_forward(None, Q, Q, Q, None, is_causal=torch.tensor(True)), TypeError, r"; pass bool\(is_causal\)$",
    ),
    "dropout-of-layer": (
        lambda: hf.attention_forward(None, Q, Q, Q, None, dropout=None), ValueError, r"^dropout: .*, got None; pass 0\.0 for none$",
    ),
    "causal-none": (lambda: flash_attn_func(Q, Q, Q, causal=None), TypeError, r"^causal: .*, got None; pass True or False$"),
    "causal-numpy": (lambda: flash_attn_func(Q, Q, Q, causal=np.True_), TypeError, r"^causal: .*; pass bool\(causal\)$"),
    "softcap-numpy": (lambda: flash_attn_func(Q, Q, Q, softcap=np.float32(9)), ValueError, r"^softcap: .*; pass float\(softcap\)$"),
    "scale-tensor": (
        lambda: flash_attn_func(Q, Q, Q, softmax_scale=torch.ones(1, requires_grad=True)), ValueError,
        r"^softmax_scale: .*; multiply it into q, as float\(softmax_scale\) drops its gradient and waits for the GPU, and pass 1\.0$",
    ),
    "scale-numpy": (
        lambda: flash_attn_func(Q, Q, Q, softmax_scale=np.array(1)), ValueError, r"^softmax_scale: .*; pass float\(softmax_scale\)$",
    ),
    "softcap-learned": (
        lambda: flash_attn_func(Q, Q, Q, softcap=torch.ones((), requires_grad=True)), ValueError,
        r"^softcap: .*; write a cap that is learned as a score_mod: cap \* torch\.tanh\(score / cap\)$",
    ),
    "causal-number-beside-a-mask": (
        lambda: flash_attn_func(Q, Q, Q, causal=0, mask_mod=lambda b, h, i, j: i >= j), TypeError,
        r"^causal: expected a bool, got 0; pass bool\(causal\)$",
    ),
    "tokens-of-one-rank": (
        lambda: distributed.attention(ROWS, ROWS[:5], ROWS[:5], cu_seqlens=[0, 10]), ValueError,
        r"^k, v: expected the tokens of q, 10, got 5; cross attention over ranks is not supported, call flash_attn_func",
    ),
    "splits-numpy": (lambda: flash_attn_func(Q, Q, Q, num_splits=np.int64(2)), TypeError, r"^num_splits: .*; pass int\(num_splits\)$"),
    "longest-numpy": (
        lambda: flash_attn_varlen_func(ROWS, ROWS, ROWS, cu(0, 10), cu(0, 10), np.int64(9), 9), TypeError,
        r"^max_seqlen_q: .*; pass int\(max_seqlen_q\)$",
    ),
    "bounds-none": (
        lambda: flash_attn_varlen_func(ROWS, ROWS, ROWS, cu(0, 10), None, 10, 10), TypeError,
        r"^cu_seqlens_k: expected a torch\.Tensor, got NoneType; pass the first row of each sequence",
    ),
    "state-generator": (
        lambda: flash_attn_func(Q, Q, Q, rng_state=torch.Generator()), TypeError, r"^rng_state: .*Generator; pass a seed and an offset$",
    ),
    "packed-by-two": (lambda: qkv(KV), ValueError, r"^qkv: .*; pass torch\.stack\(\(q, k, v\), -3\)$"),
    "pages-of-packed-keys": (
        lambda: flash_attn_varlen_func(ROWS, ROWS, ROWS, cu(0, 10), None, 10, 10, block_table=cu(0)[None]), ValueError,
        r"^k: expected 4 dimensions .*; leave block_table out, as these keys are packed$",
    ),
    "scale-by-position": (
        lambda: flash_attn_with_kvcache(Q, Q, Q, 0.1), TypeError, r"^k: .*, got 0\.1; the parameters after v_cache are in",
    ),
    "cache-length-numpy": (
        lambda: flash_attn_with_kvcache(Q, Q, Q, cache_seqlens=np.int64(3)), TypeError, r"^cache_seqlens: .*; pass int\(cache_seqlens\)$",
    ),
    "cache-length-negative": (lambda: flash_attn_with_kvcache(Q, Q, Q, cache_seqlens=-1), ValueError, r"^cache_seqlens: .*, got -1$"),
    "captured-numpy": (
        lambda: flex_attention(Q, Q, Q, lambda s, b, h, q, k: s + NUMBERS[k]), TypeError,
        r"^score_mod .*an array of NumPy at .*; capture torch\.as_tensor\(array\)$",
    ),
    "size-numpy": (lambda: create_block_mask(never, 1, 1, np.int64(5), 5), TypeError, r"^Q_LEN: .*; pass int\(Q_LEN\)$"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), VALUES.values(), ids=VALUES)
def test_values_of_a_wrong_kind_are_refused_by_name(call, error, text):
    with pytest.raises(error, match=text):
        call()


KEYWORDS = {
    "key_padding_mask": (lambda **x: flash_attn_func(Q, Q, Q, **x), r"; pack the sequences for flash_attn_varlen_func, or pass"),
    "return_softmax": (lambda **x: flash_attn_func(Q, Q, Q, **x), r"; did you mean return_attn_probs\?"),
    "is_causal": (lambda **x: flash_attn_func(Q, Q, Q, **x), r"; did you mean causal\?"),
    "casual": (lambda **x: flash_attn_with_kvcache(Q, Q, Q, **x), r"; did you mean causal\?"),
    "causal": (lambda **x: mha_fwd_interface(Q, Q, Q, **x), r"; did you mean is_causal\?"),
    "return_lse": (lambda **x: kv(Q, KV, **x), r"; did you mean return_attn_probs\?"),
    "page_table": (lambda **x: flash_attn_varlen_func(Q, Q, Q, Q, Q, 1, 1, **x), r"; did you mean block_table\?"),
    "sm_scale": (lambda **x: flex_attention(Q, Q, Q, **x), r"; did you mean scale\?"),
    "qv": (lambda **x: qkv(QKV, **x), r"; see docs/kvcache\.md"),
    "mask_mod": (lambda **x: varlen_qkv(ROWS_QKV, Q, 1, **x), r"; flash_attn_func and flex_attention take masks"),
    "pack_gqa": (lambda **x: varlen_kv(ROWS, ROWS_KV, Q, Q, 1, 1, **x), r"; leave it out, it has no counterpart here"),
    "fa_version": (lambda **x: flash_attn_with_kvcache(Q, Q, Q, **x), r"; leave it out, it has no counterpart here"),
    "q_v": (lambda **x: flash_attn_varlen_func(Q, Q, Q, Q, Q, 1, 1, **x), r"; see docs/kvcache\.md"),
    "cu_seqlens_k_new": (lambda **x: flash_attn_varlen_func(Q, Q, Q, Q, Q, 1, 1, **x), r"; write new keys to their pages, then call"),
    "cu_seqlens_q": (lambda **x: distributed.attention(Q, Q, Q, **x), r"; did you mean cu_seqlens\?"),
    "alibi_slopes": (lambda **x: mha_bwd_interface(Q, Q, Q, Q, Q, Q, **x), r"; flash_attn_func takes it"),
    "training": (lambda **x: flash_attn_func(Q, Q, Q, **x), r"; leave it out, and pass dropout_p=0.0 in evaluation"),
    "max_logits": (lambda **x: flash_attn_func(Q, Q, Q, **x), r"; did you mean return_max_logits\?"),
    "return_max_logits": (lambda **x: flex_attention(Q, Q, Q, **x), r"; .*return_aux=AuxRequest\(max_scores=True\)"),
    "tree_mask": (lambda **x: flash_attn_func(Q, Q, Q, **x), r"; flash_attn_with_kvcache takes it"),
    "rotary_seqlens": (lambda **x: flash_attn_with_kvcache(Q, Q, Q, **x), r"; leave it out, positions count from cache_seqlens"),
    "deterministic": (lambda **x: flash_attn_with_kvcache(Q, Q, Q, **x), r"; leave it out, a forward always is"),
    "batch_invariant": (lambda **x: mha_fwd_interface(Q, Q, Q, **x), r"; flash_attn_func takes it"),
    "precision": (lambda **x: distributed.attention(Q, Q, Q, **x), r"; leave it out, it is of fp32 tensors, which this function does not"),
    "max_seqlen": (lambda **x: distributed.attention(Q, Q, Q, **x), r"; leave it out, cu_seqlens has the lengths"),
    "check_lengths": (lambda **x: flash_attn_func(Q, Q, Q, **x), r"; leave it out, flash_attn_varlen_func and flash_attn_with_kvcache"),
    "seqused_k": (lambda **x: flash_attn_func(Q, Q, Q, **x), r"; flash_attn_varlen_func takes it, for packed sequences"),
    "rotary_cos": (lambda **x: flash_attn_func(Q, Q, Q, **x), r"; flash_attn_with_kvcache takes it"),
    "out": (lambda **x: flash_attn_func(Q, Q, Q, **x), r"; flash_attn_varlen_func takes it, for packed sequences"),
    "xyz": (lambda **x: flash_attn_func(Q, Q, Q, **x), ""),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "call", "hint"), [(name, *case) for name, case in KEYWORDS.items()], ids=KEYWORDS
)
def test_unknown_keywords_have_a_hint(name, call, hint):
    with pytest.raises(TypeError, match=rf"\(\) got an unexpected keyword argument '{name}'{hint}"):
        call(**{name: None})


COMPILED = {
    "dtype": (
        lambda x: flash_attn_func(x.double(), x, x),
        r"q: expected bfloat16, float16 or float32, got torch\.float64",
    ),
    "causal": (lambda x: flash_attn_func(x, x, x, causal=1), r"causal: expected a bool, got 1"),
    "packed": (
        lambda x: kv(x, torch.stack([x, x], 2).double()),
        r"kv: expected bfloat16, float16 or float32, got torch\.float64",
    ),
}


def test_unknown_keywords_name_no_function_of_other_sequences_or_of_one_gpu():
    """Packed sequences do not go to flash_attn_func, nor a sequence of several ranks to a call of one GPU."""
    for call in (
        lambda **x: varlen_qkv(ROWS_QKV, Q, 1, **x),
        lambda **x: varlen_kv(ROWS, ROWS_KV, Q, Q, 1, 1, **x),
    ):
        with pytest.raises(TypeError, match="'num_splits'; flash_attn_varlen_func takes it$"):
            call(num_splits=2)
    for name, hint in {
        "num_splits": "each call of a rank",
        "batch_invariant": "as the number of ranks",
    }.items():
        with pytest.raises(TypeError, match=f"'{name}'; leave it out, {hint}"):
            distributed.attention(Q, Q, Q, **{name: 1})


@pytest.mark.parametrize(("call", "text"), COMPILED.values(), ids=COMPILED)
def test_compiled_calls_name_the_argument(call, text):
    torch._dynamo.reset()
    with pytest.raises(Exception, match=text):
        torch.compile(call, fullgraph=True, backend="eager")(Q)
