"""Arguments of hf.attention_forward and hf.attention_mask: each is right or refused by name."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch._dynamo.testing

pytest.importorskip("transformers")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    create_causal_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from tl_attention.api import block_masks
from tl_attention.checks import lengths as checks_lengths
from tl_attention.integrations import hf
from tl_attention.integrations.hf_checks import HARMLESS
from tl_attention.reference import attention_reference

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
hf.register()

BATCH, HEADS, LENGTH = 4, 2, 9  # 2 * BATCH + 1 == LENGTH: the last size of a mask of ours
SIZES = {"batch_size": BATCH, "q_length": LENGTH, "kv_length": LENGTH}
REAL = torch.arange(LENGTH) >= torch.tensor([0, 2, 5, 1])[:, None]


def attend(mask=None, **options):
    """attention_forward on random inputs: out, q, k, v; the tensors are [batch, seqlen, heads, head_dim]."""
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, 16).bfloat16()
    out, _ = hf.attention_forward(torch.nn.Module(), q, k, v, mask, **options)
    return out, *(x.transpose(1, 2) for x in (q, k, v))


class BlockMask:
    """Stand-in for torch.nn.attention.flex_attention.BlockMask, which is no tensor but has a shape."""

    shape = (BATCH, HEADS, LENGTH, LENGTH)
    ndim = 4


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


THE_MODEL = r"attention_mask: expected a 2-D padding mask as argument of the model"
REFUSED = {
    "int32-3-d-like-ours": (ints(5, 1, LENGTH), r"got \(5, 1, 9\) torch\.int32 on cpu"),
    "int32-3-d-4-rows": (ints(4, 1, BATCH + 1), r"got \(4, 1, 5\) torch\.int32"),
    "batch-1-seqlen": (torch.ones(BATCH, 1, LENGTH), r"got \(4, 1, 9\) torch\.float32"),
    "batch-1-seqlen-bool": (torch.ones(BATCH, 1, LENGTH).bool(), r"got \(4, 1, 9\) torch\.bool"),
    "batch-queries-keys": (torch.ones(BATCH, LENGTH, LENGTH).bool(), r"got \(4, 9, 9\) torch\.bool"),
    "4-d-int": (ints(4, 1, 1, LENGTH), r"got \(4, 1, 1, 9\) torch\.int32"),
    "2-d-bool": (REAL, r"got \(4, 9\) torch\.bool.*pass it to the model"),
    "2-d-int": (REAL.int(), r"got \(4, 9\) torch\.int32.*pass it to the model"),
    "2-d-float": (REAL.float(), r"got \(4, 9\) torch\.float32.*pass it to the model"),
    "1-d": (ints(LENGTH), r"got \(9,\) torch\.int32"),
    "0-d": (ints(), r"got \(\) torch\.int32"),
    "numpy": (REAL.numpy(), "got ndarray"),
    "list": (REAL.tolist(), "got list"),
    "block-mask": (BlockMask(), "got BlockMask"),
    "5-d-bool": (ints(4, 1, 1, 1, LENGTH).bool(), r"got \(4, 1, 1, 1, 9\) torch\.bool"),
    "5-d-rows": (ints(3, 1, 1, 1, LENGTH), r"got \(3, 1, 1, 1, 9\)"),
    "5-d-sizes": (ints(4, 1, 2, 1, LENGTH), r"got \(4, 1, 2, 1, 9\)"),
    "5-d-of-another-batch": (ints(5, 1, 1, 1, LENGTH + 2), r"got \(5, 1, 1, 1, 11\)"),
}  # fmt: skip


@pytest.mark.parametrize(("mask", "got"), REFUSED.values(), ids=REFUSED)
def test_hf_forward_refuses_other_masks(mask, got):
    with pytest.raises(NotImplementedError, match=f"{THE_MODEL}.*{got}"):
        attend(mask)


FOR_THE_MASK = {name: REFUSED[name] for name in REFUSED if name not in ("2-d-bool", "2-d-int", "2-d-float")}


@pytest.mark.parametrize(("mask", "got"), FOR_THE_MASK.values(), ids=FOR_THE_MASK)
def test_hf_mask_refuses_other_masks(mask, got):
    with pytest.raises(NotImplementedError, match=f"attention_mask: expected a 2-D padding mask.*{got}"):
        hf.attention_mask(**SIZES, mask_function=causal_mask_function, attention_mask=mask)


PADDING_ERRORS = {
    "additive": (torch.zeros(BATCH, LENGTH), TypeError, r"attention_mask: expected bool or ints.*got \(4, 9\) torch\.float32"),
    "batch": (REAL[:1], ValueError, r"attention_mask: expected 4 rows, the batch size, got \(1, 9\) torch\.bool"),
}  # fmt: skip


@pytest.mark.parametrize(("mask", "error", "text"), PADDING_ERRORS.values(), ids=PADDING_ERRORS)
def test_hf_mask_refuses_other_padding(mask, error, text):
    with pytest.raises(error, match=text):
        hf.attention_mask(**SIZES, mask_function=causal_mask_function, attention_mask=mask)


@pytest.mark.parametrize("size", [-2, True, 2.5])
def test_hf_mask_refuses_a_window_without_keys(size):
    with pytest.raises(ValueError, match=f"local_size: expected None or an int of at least 1, got {size}"):
        hf.attention_mask(**SIZES, mask_function=causal_mask_function, local_size=size)


CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
)


def tiny_llama():
    return LlamaForCausalLM._from_config(CONFIG, attn_implementation="tl_attention", dtype=torch.bfloat16)


def test_hf_a_model_refuses_a_3_d_mask():
    model = tiny_llama()
    ids = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    for mask in (ints(BATCH, 1, LENGTH), torch.ones(BATCH, LENGTH, LENGTH).bool()):
        with pytest.raises(NotImplementedError, match="attention_mask: expected a 2-D padding mask"):
            model(ids, attention_mask=mask, use_cache=False)
    ours = create_causal_mask(CONFIG, torch.zeros(BATCH, LENGTH, 32), REAL, None)
    expected = model(ids, attention_mask=REAL, use_cache=False).logits
    assert torch.equal(model(ids, attention_mask=ours, use_cache=False).logits, expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_hf_padding_of_any_integer_dtype_is_right(dtype):
    mask = hf.attention_mask(**SIZES, mask_function=causal_mask_function, attention_mask=REAL.to(dtype))
    assert hf.attention_mask(**SIZES, mask_function=causal_mask_function, attention_mask=mask) is mask
    out, q, k, v = attend(mask)
    for b in range(BATCH):
        real = REAL[b]
        expected, _ = attention_reference(*(x[b : b + 1, real] for x in (q, k, v)), None, True)
        torch.testing.assert_close(out[b : b + 1, real].float(), expected, atol=0.02, rtol=0.02)
        assert not out[b, ~real].any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("columns", range(6))
def test_hf_keys_without_a_column_of_the_mask_are_padding(columns, causal):
    q, k, v = torch.randn(3, 2, 2, 5, 32).bfloat16()
    whole = torch.ones(2, 5, dtype=torch.int64)
    whole[:, columns:] = 0
    found = []
    for padding in (whole, whole[:, :columns]):
        mask = hf.attention_mask(
            2, 5, 5, attention_mask=padding, allow_is_bidirectional_skip=None if causal else True
        )
        found.append(hf.attention_forward(torch.nn.Module(), q, k, v, mask)[0])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_hf_no_mask_is_causal_attention():
    out, q, k, v = attend(None)
    expected, _ = attention_reference(q, k, v, None, True)
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("size", "got"), [(0, "0"), (-3, "-3"), (True, "True"), (2.5, "2.5"), (ints(), r"\(\) torch")]
)
def test_hf_forward_refuses_a_window_without_keys(size, got):
    with pytest.raises(ValueError, match=f"sliding_window: expected None or an int of at least 1.*got {got}"):
        attend(None, sliding_window=size)


def test_hf_window_of_one_key_sees_itself():
    out, _, _, v = attend(None, sliding_window=1)
    torch.testing.assert_close(out, v)


TOTAL = BATCH * LENGTH
CU = torch.tensor([0, 5, 12, TOTAL])
PACKED = {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": TOTAL, "max_length_k": TOTAL}
PACKED_ERRORS = {
    "q-alone": (PACKED | {"cu_seq_lens_k": None}, ValueError, r"cu_seq_lens_q, cu_seq_lens_k: expected both or neither, got .*and None"),
    "k-alone": (PACKED | {"cu_seq_lens_q": None}, ValueError, r"cu_seq_lens_q, cu_seq_lens_k: expected both or neither, got None and"),
    "lengths-alone": ({"max_length_q": 5}, ValueError, r"max_length_q: expected None without cu_seq_lens_q and cu_seq_lens_k, got 5"),
    "length-k-alone": ({"max_length_k": 5}, ValueError, r"max_length_k: expected None without cu_seq_lens_q and cu_seq_lens_k, got 5"),
    "list": (PACKED | {"cu_seq_lens_q": [0, 5]}, TypeError, r"cu_seq_lens_q: expected a torch\.Tensor, got list"),
    "numpy": (PACKED | {"cu_seq_lens_k": CU.numpy()}, TypeError, r"cu_seq_lens_k: expected a torch\.Tensor, got ndarray"),
    "float": (PACKED | {"cu_seq_lens_q": CU.float()}, TypeError, r"cu_seq_lens_q: expected an integer dtype, got torch\.float32"),
    "bool": (PACKED | {"cu_seq_lens_q": CU.bool()}, TypeError, r"cu_seq_lens_q: expected an integer dtype, got torch\.bool"),
    "2-d": (PACKED | {"cu_seq_lens_k": CU[None]}, ValueError, r"cu_seq_lens_k: expected shape \[sequences \+ 1\], got \(1, 4\)"),
    "empty": (PACKED | {"cu_seq_lens_q": CU[:0]}, ValueError, r"cu_seq_lens_q: expected shape \[sequences \+ 1\], got \(0,\)"),
    "sequences": (PACKED | {"cu_seq_lens_k": CU[1:]}, ValueError, r"cu_seq_lens_k: expected as many entries as cu_seq_lens_q, 4, got 3"),
    "device": (PACKED | {"cu_seq_lens_k": CU.to("meta")}, ValueError, r"cu_seq_lens_k: expected the device of query, cpu, got meta"),
    "max-float": (PACKED | {"max_length_q": 3.5}, TypeError, r"max_length_q: expected None, an int or a 0-d integer tensor, got 3\.5"),
    "max-bool": (PACKED | {"max_length_k": True}, TypeError, r"max_length_k: expected None, an int or a 0-d integer tensor, got True"),
    "max-1-d": (PACKED | {"max_length_k": CU}, TypeError, r"max_length_k: expected None, an int or a 0-d integer tensor, got \(4,\)"),
    "max-negative": (PACKED | {"max_length_q": -1}, ValueError, r"max_length_q: expected at least 0, got -1"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "text"), PACKED_ERRORS.values(), ids=PACKED_ERRORS)
def test_hf_forward_refuses_incomplete_packing(options, error, text):
    with pytest.raises(error, match=text):
        attend(None, **options)


WRONG = {
    "decreasing": ({"cu_seq_lens_k": torch.tensor([0, 12, 5, TOTAL])}, r"^cu_seq_lens_k\[2\]: expected 12 to 36, .*rows of key, got 5"),
    "past-the-end": ({"cu_seq_lens_q": torch.tensor([0, 5, 12, 37])}, r"^cu_seq_lens_q\[3\]: expected 12 to 36, .*of query, got 37"),
    "max": ({"max_length_q": 9}, r"^max_length_q: expected at least 24, the length of sequence 2, got 9"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "text"), WRONG.values(), ids=WRONG)
def test_hf_environment_variable_names_wrong_lengths(options, text, monkeypatch):
    monkeypatch.setattr(checks_lengths, "ALWAYS", True)
    attend(None, **PACKED)
    with pytest.raises(IndexError, match=text):
        attend(None, **PACKED | options)


LENGTHS = {
    "ints": {"max_length_q": 24, "max_length_k": 24},
    "only-q": {"max_length_q": 24, "max_length_k": None},
    "none": {"max_length_q": None, "max_length_k": None},
    "tensors": {"max_length_q": torch.tensor(24), "max_length_k": torch.tensor(24)},
    "mixed": {"max_length_q": torch.tensor(24), "max_length_k": 24},
    "int64-bounds": {"max_length_q": 24, "max_length_k": 24, "cu_seq_lens_q": CU.to(torch.int64)},
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_hf_packed_sequences_with_lengths_of_any_form_are_right(lengths):
    out, *qkv = attend(None, **PACKED | lengths)
    out = out.flatten(0, 1)
    for begin, end in zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True):
        rows = (x.flatten(0, 1)[None, begin:end] for x in qkv)
        expected, _ = attention_reference(*rows, None, True)
        torch.testing.assert_close(out[None, begin:end].float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("scaling", [1e39, True, torch.tensor(0.5)])
def test_hf_forward_names_its_own_scale(scaling):
    with pytest.raises(ValueError, match="^scaling: expected"):
        attend(None, scaling=scaling)


INPUTS = {
    "query-none": ({"query": None}, TypeError, r"query: expected a torch\.Tensor, got NoneType"),
    "key-numpy": ({"key": torch.zeros(1, 2, 3, 16).numpy()}, TypeError, r"key: expected a torch\.Tensor, got ndarray"),
    "value-list": ({"value": [1.0]}, TypeError, r"value: expected a torch\.Tensor, got list"),
    "query-3-d": ({"query": torch.zeros(2, 3, 16)}, ValueError, r"query: expected 4 dimensions \[batch, heads, seqlen, head_dim\]"),
    "sink-list": ({"s_aux": [1.0, 2.0]}, TypeError, r"s_aux: expected a torch\.Tensor, got list"),
    "sink-shape": ({"s_aux": torch.zeros(1, 2)}, ValueError, r"s_aux: expected shape \(2,\), got \(1, 2\)"),
    "sink-int": ({"s_aux": torch.zeros(2).int()}, TypeError, r"s_aux: expected torch\.float32 or .*got torch\.int32"),
    "query-dtype": ({"query": torch.zeros(1, 2, 3, 16).double()}, TypeError, r"^query: expected bfloat16.* cast it with query\.to"),
    "key-dtype": ({"key": torch.zeros(1, 2, 3, 16).half()}, TypeError, r"^key, value: expected the dtype of query, .*got torch\.float16"),
    "decode-dtype": ({"query": torch.zeros(1, 2, 1, 16).half()}, TypeError, r"^key: expected the dtype of query, torch\.float16, got"),
    "packed-dtype": (PACKED | {"value": torch.zeros(1, 2, 3, 16).half()}, TypeError, r"^key, value: expected the dtype of query"),
    "output-attentions": ({"output_attentions": True}, NotImplementedError, r"^output_attentions: expected False.*got True; .*eager"),
    "dropout": ({"dropout": 2.0}, ValueError, r"^dropout: expected a number from 0 to 255/256"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), INPUTS.values(), ids=INPUTS)
def test_hf_forward_names_wrong_inputs(changes, error, text):
    x = torch.zeros(1, 2, 3, 16).bfloat16()
    arguments = {"query": x, "key": x, "value": x, "attention_mask": None} | changes
    with pytest.raises(error, match=text):
        hf.attention_forward(torch.nn.Module(), **arguments)


@pytest.mark.parametrize("mask", ["none", "dense", "bias", "blocks", "documents", "decode"])
def test_hf_results_are_contiguous(mask):
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, 16)
    options = {"attention_mask": None}
    if mask == "dense":
        options["attention_mask"] = torch.zeros(1, 1, LENGTH, LENGTH)
    if mask == "bias":
        options["position_bias"] = torch.zeros(1, 1, LENGTH, LENGTH)
    if mask == "blocks":
        options["attention_mask"] = block_masks.causal(LENGTH, LENGTH, device="cpu")
    if mask == "documents":
        options["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    if mask == "decode":
        q = q[:, :, -1:]
    out, _ = hf.attention_forward(torch.nn.Module(), q, k, v, **options)
    assert out.is_contiguous() and out.shape == (1, q.shape[2], HEADS, 16)


@pytest.mark.parametrize("seqlen_q", [LENGTH, 1])
@pytest.mark.parametrize("dense", [False, True], ids=["options", "flex"])
def test_hf_inputs_whose_last_dimension_is_not_contiguous_are_copied(seqlen_q, dense):
    q, k, v = torch.randn(3, 1, HEADS, 16, LENGTH).bfloat16().mT
    q = q[:, :, -seqlen_q:]
    assert q.stride(-1) != 1
    mask = torch.ones(1, 1, seqlen_q, LENGTH).tril(LENGTH - seqlen_q).bool() if dense else None
    out, expected = (
        hf.attention_forward(torch.nn.Module(), *qkv, mask)[0]
        for qkv in ((q, k, v), (x.contiguous() for x in (q, k, v)))
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("seqlen_q", [1, 4])
@pytest.mark.parametrize(
    "of", [(1, 2), (3, 1), (1, 1), (0, 1)], ids=["batch", "heads", "both", "heads_of_no_batch"]
)
def test_hf_decode_takes_expanded_keys(of, seqlen_q):
    batch = 3 if of[0] else 0
    q = torch.randn(batch, 4, seqlen_q, 16).bfloat16()
    k, v = (torch.randn(*of, 12, 16).bfloat16().expand(batch, 2, 12, 16) for _ in range(2))
    out, expected = (
        hf.attention_forward(torch.nn.Module(), q, *kv, None, is_causal=True)[0]
        for kv in (
            (k, v),
            (k.clone(memory_format=torch.contiguous_format), v.clone(memory_format=torch.contiguous_format)),
        )
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_hf_prefill_is_exported_for_any_length(strict):
    """Also across the number of queries up to which a call with more keys is a decode step."""

    class Layer(torch.nn.Module):
        def forward(self, q):
            mask = hf.attention_mask(q.shape[0], q.shape[2], q.shape[2])
            return hf.attention_forward(self, q, q, q, mask)[0]

    length = {2: torch.export.Dim("length", min=2, max=512)}
    q = torch.randn(1, 2, 100, 16)
    program = torch.export.export(
        Layer(), (q[:, :, :7].contiguous(),), dynamic_shapes=(length,), strict=strict
    ).module()
    for rows in (5, 64, 100):
        some = q[:, :, :rows].contiguous()
        torch.testing.assert_close(program(some), Layer()(some))


def test_hf_padding_of_new_lengths_compiles_nothing_again():
    counter = torch._dynamo.testing.CompileCounter()

    def attend(q, padding):
        mask = hf.attention_mask(q.shape[0], q.shape[2], q.shape[2], attention_mask=padding)
        return hf.attention_forward(torch.nn.Module(), q, q, q, mask)[0]

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for length in (70, 80, 90, 75):
        q, padding = torch.randn(2, 2, length, 16), torch.ones(2, length, dtype=torch.int64)
        padding[1, :5] = 0
        torch.testing.assert_close(compiled(q, padding), attend(q, padding))
    assert counter.frame_count <= 2  # the second length makes a symbol of it


def _of_wider_rows(columns, first):
    return lambda batch, rows: torch.randn(batch, 2, rows, columns).bfloat16()[..., first : first + 16]


UNREADABLE = {
    "rows of 20 columns": _of_wider_rows(20, 0),
    "an address of 8 bytes": _of_wider_rows(32, 4),
    "caches 1.5 rows apart": lambda batch, rows: (
        torch.randn(5000).bfloat16().as_strided((batch, 2, rows, 16), (24 * rows + 8, 16, 32, 1))
    ),
    "negated": lambda batch, rows: torch._neg_view(torch.randn(batch, 2, rows, 16).bfloat16()),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", UNREADABLE)
def test_hf_decode_copies_keys_and_values_that_no_cache_can_be(name, compiled):
    """A decode step takes what longer calls take; an error said that a cache is never copied."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 1, 16).bfloat16(), *(UNREADABLE[name](2, 12) for _ in range(2))

    def attend(*qkv):
        return hf.attention_forward(torch.nn.Module(), *qkv, None, is_causal=True)[0]

    expected = attend(q, k.resolve_neg().contiguous(), v.resolve_neg().contiguous())
    found = torch.compile(attend, backend="eager", fullgraph=True)(q, k, v) if compiled else attend(q, k, v)
    assert torch.equal(found, expected)


def test_hf_decode_copies_latents_with_their_values():
    wide = torch.randn(1, 1, 12, 600).bfloat16()
    k = wide[..., 2:578]  # an address of 4 bytes
    q = torch.randn(1, 4, 1, 576).bfloat16()
    found, expected = (
        hf.attention_forward(torch.nn.Module(), q, x, x[..., :512], None, is_causal=True)[0]
        for x in (k, k.contiguous())
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hf_names_a_device_that_it_does_not_have(dtype):
    q = torch.empty(1, 2, 8, 16, dtype=dtype, device="meta")
    for mask in (None, torch.empty(1, 1, 8, 8, dtype=dtype, device="meta")):
        with pytest.raises(NotImplementedError, match="^query: .*got meta"):
            hf.attention_forward(torch.nn.Module(), q, q, q, mask, is_causal=True)


def test_hf_names_a_device_that_it_does_not_have_beside_positions_and_padding():
    ids = torch.ones(2, 8, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = tiny_llama()
    for mask in (None, ids):
        with pytest.raises(
            NotImplementedError, match="^query: .*got meta; compute shapes under FakeTensorMode"
        ):
            model(input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_hf_models_have_shapes_under_fake_tensor_mode(padded, grad):
    """Values of positions and of padding cannot be read there."""
    with FakeTensorMode(), torch.set_grad_enabled(grad):
        model, ids = tiny_llama(), torch.ones(1, 8, dtype=torch.int64)
        result = model(input_ids=ids, attention_mask=ids if padded else None, use_cache=True)
        step = model(input_ids=ids[:, :1], past_key_values=result.past_key_values)
        assert result.logits.shape == (1, 8, 9)
        assert step.logits.shape == (1, 1, 9)
        if grad:
            result.logits.sum().backward()
            assert all(x.grad is not None and x.grad.shape == x.shape for x in model.parameters())


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_hf_recorded_calls_serve_other_padding(mode):
    def attend(q, padding, positions):
        mask = hf.attention_mask(2, 8, 8, attention_mask=padding)
        return hf.attention_forward(torch.nn.Module(), q, q, q, mask)[0], hf.attention_forward(
            torch.nn.Module(), q[:1], q[:1], q[:1], None, is_causal=True, position_ids=positions
        )[0]

    q, positions = torch.randn(2, 2, 8, 16), torch.arange(8)[None]
    whole = torch.ones(2, 8, dtype=torch.int64)
    recorded = make_fx(attend, tracing_mode=mode)(q, whole, positions)
    padding = PADDING["ends"]
    for found, expected in zip(recorded(q, padding, positions), attend(q, padding, positions), strict=True):
        torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="expected padding before and after each sequence"):
        recorded(q, PADDING["hole"], positions)
    with pytest.raises(RuntimeError, match="position_ids: expected one document per row"):
        recorded(q, whole, positions % 4)


@pytest.mark.parametrize("inside", [lambda f: f, torch.func.grad], ids=["vmap", "vmap of grad"])
def test_hf_padding_and_positions_of_each_sample_of_vmap_are_refused_by_name(inside):
    def attend(q, **given):
        padding, mask = given.get("attention_mask"), None
        if padding is not None:
            mask = hf.attention_mask(1, 8, 8, attention_mask=padding)
        positions = given.get("position_ids")
        out, _ = hf.attention_forward(
            torch.nn.Module(), q, q, q, mask, is_causal=True, position_ids=positions
        )
        return out.square().sum()

    q, ids = torch.randn(3, 1, 2, 8, 16), torch.ones(3, 1, 8, dtype=torch.int64)
    for name in ("attention_mask", "position_ids"):
        with pytest.raises(NotImplementedError, match=rf"^{name}: .* all samples of torch.vmap"):
            torch.vmap(lambda q, x, name=name: inside(attend)(q, **{name: x}))(q, ids)
    # The same for all of them
    found = torch.vmap(lambda q: inside(attend)(q, position_ids=torch.arange(8)[None]))(q)
    torch.testing.assert_close(found[1], inside(attend)(q[1]))


PADDING = {
    "ends": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]]),
    "hole": torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 1]]),
}


@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
@pytest.mark.parametrize("local_size", [None, 3])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_hf_mask_without_a_function(causal, local_size, padding):
    """Causal or full, with the window of local_size and the padding."""
    q, k, v = torch.randn(3, 2, 2, 8, 16).bfloat16()
    skip = None if causal else True
    mask = hf.attention_mask(
        2, 8, 8, attention_mask=padding, local_size=local_size, allow_is_bidirectional_skip=skip
    )
    out, _ = hf.attention_forward(torch.nn.Module(), q, k, v, mask)
    rows = torch.arange(8)
    distance = rows[:, None] - rows
    seen = distance >= 0 if causal else distance.abs() >= 0
    if local_size is not None:
        seen = seen & (distance < local_size if causal else distance.abs() <= local_size)
    seen = (seen & padding[:, None].bool())[:, None]
    scores = (q.double() @ k.double().mT / 4).masked_fill(~seen, -torch.inf)
    expected = torch.softmax(scores, -1).nan_to_num() @ v.double()
    tokens = padding.bool()  # rows of padding have no meaning
    assert torch.allclose(out.double()[tokens], expected.transpose(1, 2)[tokens], atol=0.02)


@pytest.mark.parametrize("first_query", [0, 2, torch.tensor(0)], ids=["0", "2", "tensor"])
@pytest.mark.parametrize("keys", [8, 12, 5])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_hf_bidirectional_window_of_other_keys_follows_positions(keys, padded, first_query):
    """As a layer of cross-attention asks for it; options would count from the last key."""
    q, k, v = torch.randn(2, 2, 8, 16), *torch.randn(2, 2, 2, keys, 16)
    padding = torch.ones(2, keys, dtype=torch.bool)
    padding[1, keys - 2 :] = not padded
    mask = hf.attention_mask(
        2, 8, keys, first_query, mask_function=sliding_window_bidirectional_mask_function(3), attention_mask=padding,
        local_size=3, allow_is_bidirectional_skip=True,
    )  # fmt: skip
    out, _ = hf.attention_forward(torch.nn.Module(), q, k, v, mask)
    distance = torch.arange(8)[:, None] + int(first_query) - torch.arange(keys)
    seen = ((distance.abs() <= 3) & padding[:, None])[:, None]
    scores = (q.double() @ k.double().mT / 4).masked_fill(~seen, -torch.inf)
    expected = (torch.softmax(scores, -1).nan_to_num() @ v.double()).transpose(1, 2)
    same = int(first_query) + 8 == keys  # queries are the keys' tokens: rows of padding have no meaning
    tokens = padding if same else slice(None)
    torch.testing.assert_close(out[tokens].double(), expected[tokens], atol=1e-4, rtol=1e-4)


def test_hf_bidirectional_window_of_other_keys_compiles():
    """The function of transformers has Python's abs(), which torch 2.13 hides from flex_attention."""
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 12, 16)

    def attend(q, k):
        window = {"mask_function": sliding_window_bidirectional_mask_function(3), "local_size": 3}
        mask = hf.attention_mask(1, 8, 12, allow_is_bidirectional_skip=True, **window)
        return hf.attention_forward(torch.nn.Module(), q, k, k, mask)[0]

    torch.testing.assert_close(torch.compile(attend, backend="eager")(q, k), attend(q, k))


@pytest.mark.parametrize("function", [3, torch.ones(8, 8).bool()], ids=["int", "tensor"])
def test_hf_mask_refuses_what_is_no_function(function):
    with pytest.raises(
        TypeError, match="^mask_function: expected a function .*; pass a mask as attention_mask"
    ):
        hf.attention_mask(2, 8, 8, mask_function=function)


@pytest.mark.parametrize("beside", [{}, {"position_bias": torch.zeros(1, 1, 3, 3)}], ids=["alone", "bias"])
@pytest.mark.parametrize("softcap", [-1.0, math.nan, math.inf, 1e39, "3", True, torch.tensor(3.0)], ids=str)
def test_hf_forward_refuses_other_softcaps(softcap, beside):
    x = torch.zeros(1, 2, 3, 16).bfloat16()
    with pytest.raises(ValueError, match="^softcap: expected 0 for no cap, or a number from"):
        hf.attention_forward(torch.nn.Module(), x, x, x, None, is_causal=True, softcap=softcap, **beside)


@pytest.mark.parametrize(
    "name", ["sinks", "softcapp", "indices", "block_indices", "head_mask", "window_size"]
)
def test_hf_unknown_arguments_are_refused(name):
    with pytest.raises(
        NotImplementedError,
        match=f"^{name}: expected None, as tl_attention does not know.*got 0.5; leave it out, or",
    ):
        attend(None, **{name: 0.5})


def test_hf_arguments_without_effect_run():
    """Models pass these on to every attention; an unknown argument that is None says nothing."""
    expected = attend(None)[0].shape
    assert attend(None, **dict.fromkeys(HARMLESS, 1), sinks=None)[0].shape == expected


class Layer(torch.nn.Module):
    """Layer whose first Linear has a dtype."""

    def __init__(self, dtype, config=None):
        super().__init__()
        self.o_proj = torch.nn.Linear(4, 4, dtype=dtype)
        self.config = config


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
QUANTIZED = type("Config", (), {"_is_quantized": True, "dtype": F16})()
# dtypes of query, key, value; dtype of the layer; dtype of autocast; dtype of the result
CASTS = {
    "peft": ((F32, F32, BF16), Layer(BF16), None, BF16),
    "peft-all": ((F32, F32, F32), Layer(F16), None, F16),
    "peft-fp32-weights": ((F32, F32, BF16), Layer(F32), None, F32),
    "fp32": ((F32, F32, F32), Layer(F32), None, F32),
    "no-weights": ((F32, F32, F32), torch.nn.Module(), None, F32),
    "quantized": ((F32, F32, F32), Layer(BF16, QUANTIZED), None, F16),
    "autocast": ((F32, F32, F32), Layer(F32), BF16, BF16),
    "autocast-qk": ((F32, F32, BF16), Layer(F32), BF16, BF16),
    "autocast-v": ((BF16, BF16, F32), Layer(F32), BF16, BF16),
}


@pytest.mark.parametrize(("dtypes", "layer", "autocast", "expected"), CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("dense", [False, True], ids=["options", "flex"])
def test_hf_casts_as_flash_attention_2_does(dtypes, layer, autocast, expected, dense):
    qkv = [x.to(dtype) for x, dtype in zip(torch.randn(3, 1, HEADS, LENGTH, 16), dtypes, strict=True)]
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().bool() if dense else None
    with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
        out, _ = hf.attention_forward(layer, *qkv, mask, is_causal=True)
        same, _ = hf.attention_forward(layer, *(x.to(expected) for x in qkv), mask, is_causal=True)
    assert out.dtype == expected and torch.equal(out, same)


@pytest.mark.parametrize("dtypes", [(BF16, BF16, F32), (BF16, F32, F32), (F16, BF16, F16)], ids=str)
def test_hf_other_dtypes_side_by_side_are_refused(dtypes):
    """The query is no float32, so no dtype to cast to is known, as in flash_attention_2."""
    qkv = [x.to(dtype) for x, dtype in zip(torch.randn(3, 1, HEADS, LENGTH, 16), dtypes, strict=True)]
    with pytest.raises(TypeError, match="key, value: expected the dtype of query"):
        hf.attention_forward(Layer(BF16), *qkv, None, is_causal=True)


def made(batch=1, queries=LENGTH, keys=LENGTH, **options):
    return hf.attention_mask(batch, queries, keys, **{"mask_function": causal_mask_function} | options)


BIDIRECTIONAL = {"mask_function": bidirectional_mask_function, "allow_is_bidirectional_skip": True}
AT = torch.arange(LENGTH)
FAR = AT[:, None] - AT
SAYS = {
    "causal": ({}, FAR >= 0),
    "window": ({"mask_function": sliding_window_causal_mask_function(3), "local_size": 3}, (FAR >= 0) & (FAR < 3)),
    "bidirectional": (BIDIRECTIONAL, FAR < LENGTH),
    "bidirectional-window": (
        BIDIRECTIONAL | {"mask_function": sliding_window_bidirectional_mask_function(3), "local_size": 3}, FAR.abs() <= 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "seen"), SAYS.values(), ids=SAYS)
@pytest.mark.parametrize("layer", [None, False, True], ids=["no-attribute", "not-causal", "causal"])
@pytest.mark.parametrize("sliding_window", [None, 2])
@pytest.mark.parametrize("bias", [False, True], ids=["options", "position_bias"])
def test_hf_forward_follows_the_mask_not_the_layer(options, seen, layer, sliding_window, bias):
    module = torch.nn.Module()
    if layer is not None:
        module.is_causal = layer
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, 16)
    more = {"position_bias": torch.zeros(1, 1, LENGTH, LENGTH)} if bias else {}
    found, _ = hf.attention_forward(
        module, q, k, v, made(**options), sliding_window=sliding_window, is_causal=layer, **more
    )
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen[None, None])
    torch.testing.assert_close(found, expected.transpose(1, 2))


MISMATCHES = {
    "queries": (made(queries=5), r"expected one for 9 queries and 9 keys, the lengths of query and key, got one for 5 and 9"),
    "keys": (made(keys=12), r"expected one for 9 queries and 9 keys, .*got one for 9 and 12"),
    "window": (made(keys=7, **SAYS["bidirectional-window"][0]), r".*got one for 9 and 7; make it with the sizes of this call"),
    "batch": (made(2, attention_mask=REAL[1:3]), r"expected one for 1 sequences, got one for 2"),
}  # fmt: skip


@pytest.mark.parametrize(("mask", "text"), MISMATCHES.values(), ids=MISMATCHES)
def test_hf_forward_refuses_a_mask_of_other_lengths(mask, text):
    q = torch.randn(1, HEADS, LENGTH, 16)
    with pytest.raises(ValueError, match=f"^attention_mask: {text}"):
        hf.attention_forward(torch.nn.Module(), q, q, q, mask)


USES = {
    "add": lambda x, mask: x + mask,
    "radd": lambda x, mask: mask + x,
    "slice": lambda x, mask: mask[:, :, :, :3],
    "compare": lambda x, mask: mask == 0,
    "invert": lambda x, mask: ~mask,
    "function": lambda x, mask: torch.where(mask, x, 0),
    "masked_fill": lambda x, mask: x.masked_fill(mask, 0),
    "sdpa": lambda x, mask: torch.nn.functional.scaled_dot_product_attention(x, x, x, mask),
    "method": lambda x, mask: mask.size(),
    "attribute": lambda x, mask: mask.dtype,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_hf_a_mask_that_a_model_computes_with_names_what_works(use, padded):
    x = torch.randn(4, HEADS, LENGTH, LENGTH)
    mask = made(4, attention_mask=REAL if padded else None)
    words = r'computes with the mask itself.*; call model\.set_attn_implementation\("sdpa"\), or "eager"'
    with pytest.raises(NotImplementedError, match=words):
        use(x, mask)


def test_hf_a_mask_moves_and_has_a_shape():
    mask = made(4, attention_mask=REAL)
    assert (mask.shape, mask.ndim, hasattr(mask, "dim"), {mask: 1}[mask]) == (
        (4, 1, LENGTH, LENGTH),
        4,
        False,
        1,
    )
    moved = mask.to("meta", non_blocking=True)
    assert moved.rows.device.type == "meta" and moved.causal and mask.rows.device.type == "cpu"
    assert copy.deepcopy(mask).sizes == mask.sizes


def test_hf_a_causal_layer_without_a_mask_is_refused():
    """The model asked for no mask: eager attention would see all keys, sdpa the past alone."""
    q = torch.randn(1, HEADS, LENGTH, 16)
    layer = torch.nn.Module()
    layer.is_causal = True
    with pytest.raises(
        NotImplementedError,
        match="^attention_mask: expected the result of tl_attention.hf.attention_mask.*is_causal=True",
    ):
        hf.attention_forward(layer, q, q, q, None)
    hf.attention_forward(layer, q[:, :, :1], q, q, None)
    hf.attention_forward(layer, q, q, q, None, is_causal=True)
    hf.attention_forward(layer, q, q, q, made())
    layer.is_causal = False
    hf.attention_forward(layer, q, q, q, None)


@pytest.mark.parametrize("padding", ["left", "right", "full"])
@pytest.mark.parametrize("seqlen_q", [3, LENGTH])
@pytest.mark.parametrize("bias", [False, True], ids=["options", "position_bias"])
def test_hf_a_bidirectional_mask_of_one_query_stands_for_all(padding, seqlen_q, bias):
    """BridgeTower and LightGlue make their masks so."""
    real = {"left": REAL, "right": REAL.flip(1), "full": torch.ones_like(REAL)}[padding]
    mask = made(BATCH, 1, attention_mask=real, **BIDIRECTIONAL)
    q, (k, v) = torch.randn(BATCH, HEADS, seqlen_q, 16), torch.randn(2, BATCH, HEADS, LENGTH, 16)
    more = {"position_bias": torch.zeros(1, 1, seqlen_q, LENGTH)} if bias else {}
    out, _ = hf.attention_forward(torch.nn.Module(), q, k, v, mask, **more)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, real[:, None, None])
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_hf_a_window_of_zero_is_refused_where_a_layer_uses_it():
    """Qwen2-MoE makes a mask for sliding layers even where its config turns them off, by a window of 0."""
    q = torch.randn(1, HEADS, LENGTH, 16)
    mask = made(mask_function=sliding_window_causal_mask_function(0), local_size=0)
    with pytest.raises(
        ValueError,
        match="^attention_mask: expected one with a window of at least 1 key, got one with a window of 0",
    ):
        hf.attention_forward(torch.nn.Module(), q, q, q, mask)
    expected, _ = hf.attention_forward(torch.nn.Module(), q, q, q, made())
    assert torch.equal(
        hf.attention_forward(torch.nn.Module(), q, q, q, made(), sliding_window=0)[0], expected
    )


def test_mask_keeps_its_numbers_on_another_dtype():
    """Models cast masks to the dtype of their scores; documents beyond 256 have no number in bf16."""
    mask = made(queries=600, keys=600)
    mask.starts = torch.ones(1, 600, dtype=torch.bool)
    assert mask.to(torch.bfloat16) is mask and mask.contiguous() is mask
    moved = mask.to(device="cpu")
    assert moved.starts.dtype == torch.bool and moved.sizes == mask.sizes


def test_hf_empty_positions_and_padding_are_ignored():
    x = torch.randn(1, 2, 0, 8)
    out, _ = hf.attention_forward(None, x, x, x, None, is_causal=True, position_ids=torch.zeros(1, 0).long())
    assert out.shape == (1, 0, 2, 8)
    for padding in (torch.zeros(1, 0).long(), torch.zeros(1, 0).bool()):
        for use_vmap in (False, True):
            for function in (None, causal_mask_function):
                given = {"attention_mask": padding, "use_vmap": use_vmap, "mask_function": function}
                mask = hf.attention_mask(1, 0, 0, **given)
                out, _ = hf.attention_forward(None, x, x, x, mask, position_ids=torch.zeros(1, 0).long())
                assert out.shape == (1, 0, 2, 8)


def test_hf_padding_that_ends_before_the_keys_hides_them():
    """No column of the padding mask is left for keys behind its end."""
    q = torch.randn(1, 2, 3, 8)
    mask = hf.attention_mask(1, 3, 3, q_offset=2, kv_offset=2, attention_mask=torch.ones(1, 2).long())
    out, _ = hf.attention_forward(None, q, q, q, mask)
    assert out.eq(0).all()


LONG_BOUNDS = {
    "above": ([0, 2**32 + 2, 6], [0, 2, 6], r"^cu_seq_?lens_q\[1\]: expected 0 to 6, .*rows of q"),
    "below": ([0, 2, 6], [0, 2 - 2**32, 6], r"^cu_seq_?lens_k\[1\]: expected 0 to 6, .*rows of k"),
    "end": ([0, 2, 6 + 2**33], [0, 2, 6], r"^cu_seq_?lens_q\[2\]: expected 2 to 6, .*rows of q"),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("always", [False, True], ids=["cpu", "environment"])
@pytest.mark.parametrize(("cu_q", "cu_k", "text"), LONG_BOUNDS.values(), ids=LONG_BOUNDS)
def test_hf_bounds_of_more_than_32_bits_are_checked(cu_q, cu_k, text, always, compiled, monkeypatch):
    monkeypatch.setattr(hf.checks_lengths, "ALWAYS", always)
    q = torch.randn(2, 2, 3, 8)
    call = hf.attention_forward
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    bounds = {"cu_seq_lens_q": torch.tensor(cu_q), "cu_seq_lens_k": torch.tensor(cu_k)}
    with pytest.raises(IndexError, match=text):
        call(None, q, q, q, None, is_causal=True, **bounds)


@pytest.mark.parametrize("seqlen_q", [1, 9], ids=["decode", "prefill"])
def test_hf_deterministic_is_a_bool(seqlen_q):
    q, k = torch.randn(1, 2, seqlen_q, 8).bfloat16(), torch.randn(1, 2, 9, 8).bfloat16()
    with pytest.raises(TypeError, match=r"^deterministic: expected a bool, got 1"):
        hf.attention_forward(None, q, k, k, None, is_causal=True, deterministic=1)


def causal_of(batch, seqlen_q, seqlen_k, **options):
    return hf.attention_mask(batch, seqlen_q, seqlen_k, q_offset=seqlen_k - seqlen_q, **options)


LAYOUT_CALLS = {
    "plain": (6, lambda: None),
    "padded": (6, lambda: causal_of(2, 6, 6, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6]))),
    "decode": (2, lambda: None),
}
UNLIKE = {
    "heads": (
        (2, 3, 6, 8), (2, 3, 6, 8), ValueError,
        r"^key, value: .*divides the 4 of query, got 3; tensors are \[batch, heads, seqlen, head_dim\](: call"
        r" transpose\(1, 2\) if yours are \[batch, seqlen, heads, head_dim\])?$",
    ),
    "batch": ((1, 4, 6, 8), (1, 4, 6, 8), ValueError, r"^key, value: expected the batch size of query, 2, got 1 and 1"),
    "value": ((2, 4, 6, 8), (2, 2, 6, 8), ValueError, r"^value: expected the heads and seqlen of key, 4 and 6, got 2 and 6"),
    "width": ((2, 4, 6, 16), (2, 4, 6, 16), ValueError, r"^key: expected the head_dim of query, 8, got 16"),
}  # fmt: skip


@pytest.mark.parametrize("call", LAYOUT_CALLS)
@pytest.mark.parametrize(("k", "v", "error", "text"), UNLIKE.values(), ids=UNLIKE)
def test_hf_unlike_shapes_are_named_in_the_layout_of_the_caller(call, k, v, error, text):
    seqlen_q, mask = LAYOUT_CALLS[call]
    q, k, v = (torch.randn(shape).bfloat16() for shape in ((2, 4, seqlen_q, 8), k, v))
    with pytest.raises(error, match=text):
        hf.attention_forward(None, q, k, v, mask(), is_causal=True)
