"""Arguments of hf.attention_forward and hf.attention_mask: each is right or refused by name."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import causal_mask_function, create_causal_mask

from tl_attention import hf
from tl_attention.checks import lengths as checks_lengths
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


@pytest.mark.parametrize("size", [0, -2, True, 2.5])
def test_hf_mask_refuses_a_window_without_keys(size):
    with pytest.raises(ValueError, match=f"local_size: expected None or an int of at least 1, got {size}"):
        hf.attention_mask(**SIZES, mask_function=causal_mask_function, local_size=size)


def test_hf_a_model_refuses_a_3_d_mask():
    config = LlamaConfig(
        hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="tl_attention", dtype=torch.bfloat16)
    ids = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    for mask in (ints(BATCH, 1, LENGTH), torch.ones(BATCH, LENGTH, LENGTH).bool()):
        with pytest.raises(NotImplementedError, match="attention_mask: expected a 2-D padding mask"):
            model(ids, attention_mask=mask, use_cache=False)
    ours = create_causal_mask(config, torch.zeros(BATCH, LENGTH, 32), REAL, None)
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
    "output-attentions": ({"output_attentions": True}, NotImplementedError, r"^output_attentions: expected False.*got True; use.*eager"),
    "dropout": ({"dropout": 2.0}, ValueError, r"^dropout: expected a number from 0 to 255/256"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), INPUTS.values(), ids=INPUTS)
def test_hf_forward_names_wrong_inputs(changes, error, text):
    x = torch.zeros(1, 2, 3, 16).bfloat16()
    arguments = {"query": x, "key": x, "value": x, "attention_mask": None} | changes
    with pytest.raises(error, match=text):
        hf.attention_forward(torch.nn.Module(), **arguments)
