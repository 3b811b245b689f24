"""flex_attention inside torch.compile: values and gradients of eager calls, what compiles again, errors; recordings of functions."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import AuxRequest, and_masks
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask
from torch.utils.checkpoint import checkpoint

from tl_attention import block_masks, create_block_mask, flash_attn_func, flex_attention, hf
from tl_attention.api import flex_compiled, flex_lists
from tl_attention.tracing.record import POSITIONS, Recording, rebuilt

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention", "ignore:.*torch.compile")
BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 20, 32
BLOCK = 8


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@pytest.fixture
def learned(request):
    """A bias per head and distance, one per head, both learned, and documents."""
    device = request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"
    return SimpleNamespace(
        bias=torch.randn(HEADS, 200, device=device, requires_grad=True),
        slopes=torch.rand(HEADS, device=device, requires_grad=True),
        documents=torch.arange(100, device=device) // 7,
    )


def rows(device, length=LENGTH, width=HEAD_DIM):
    return torch.randn(BATCH, HEADS, length, width, dtype=torch.bfloat16, device=device, requires_grad=True)


def biased(learned):
    def score_mod(score, b, h, q_idx, kv_idx):
        return 3.0 * torch.tanh(score + learned.bias[h, q_idx - kv_idx + 100])

    return score_mod


def in_document(documents):
    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (documents[q_idx] == documents[kv_idx])

    return mask_mod


def compiled(function, device, backend=None, **options):
    """(compiled function, counter of compiled frames)."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend or ("inductor" if device == "cuda" else "aot_eager"))
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def assert_alike(function, run, tensors, learned):
    """Compare results and gradients of a compiled function with those of the function. Inductor may round between operations otherwise."""
    leaves = [*tensors, learned.bias, learned.slopes]
    out, want = run(*tensors), function(*tensors)
    dout = torch.randn_like(want)
    grads = [torch.autograd.grad(x, leaves, dout, allow_unused=True) for x in (out, want)]
    for x, y in zip((out, *grads[0]), (want, *grads[1]), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2 * float(y.detach().abs().max()))


def functions_of_scores(q, k, v, learned):
    return flex_attention(q, k, v, biased(learned), mask_mod=in_document(learned.documents))


def options_by_name(q, k, v, learned):
    return flex_attention(q, k, v, mask_mod=causal)


def functions_made_inside(q, k, v, learned):
    length, slopes = q.shape[2], learned.slopes.exp()

    def score_mod(score, b, h, q_idx, kv_idx):
        score += slopes[h] * (kv_idx - q_idx)
        return torch.where(q_idx - kv_idx < length // 2, score, -float("inf"))

    rows = [x.transpose(1, 2) for x in (q, k, v)]
    return flash_attn_func(
        *rows, score_mod=score_mod, mask_mod=and_masks(causal, in_document(learned.documents))
    )


def dense_bias(q, k, v, learned):
    bias = learned.bias[:, : q.shape[2], None].mT.expand(1, HEADS, q.shape[2], q.shape[2])
    out, aux = flex_attention(q, k, v, attn_bias=bias, return_aux=AuxRequest(lse=True))
    return out.float() + aux.lse[..., None]


def wide_values(q, k, v, learned):
    return flex_attention(
        q, k, torch.cat([v, v], -1), lambda score, b, h, q_idx, kv_idx: score + learned.slopes[h]
    )


def fp32_rows(q, k, v, learned):
    rows = (x.float() for x in (q, k, v))
    return flex_attention(*rows, biased(learned), mask_mod=causal, precision="highest", deterministic=True)


CASES = fp32_rows, functions_of_scores, options_by_name, functions_made_inside, dense_bias, wide_values


@pytest.mark.parametrize("place", ["outside", "inside", "at-a-break"])
def test_flex_compile_in_checkpoints(place, device, learned):
    """The three ways that docs/flex.md names."""
    attend = lambda *tensors: functions_of_scores(*tensors, learned)  # noqa: E731
    torch._dynamo.reset()
    inner = torch.compile(attend, backend="aot_eager", fullgraph=True) if place == "outside" else attend
    run = functools.partial(checkpoint, inner, use_reentrant=False)
    if place != "outside":
        run = torch.compile(run, backend="aot_eager", fullgraph=place == "inside")
    # Not monkeypatch, which removes the switch from the config of torch 2.11
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=place == "inside"):
        assert_alike(attend, run, [rows(device) for _ in range(3)], learned)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_flex_compile_has_results_and_gradients_of_eager_calls(case, device, learned):
    function = lambda *tensors: case(*tensors, learned)  # noqa: E731
    run, _ = compiled(function, device)
    assert_alike(function, run, [rows(device) for _ in range(3)], learned)


@pytest.mark.parametrize("make", [create_block_mask, torch_block_mask])
def test_flex_compile_takes_block_masks(make, device, learned):
    """BlockMask of tl_attention or of PyTorch, passed as argument; another one of the same lengths compiles nothing again."""
    masks = [
        make(mask_mod, None, None, LENGTH, LENGTH, device=device, BLOCK_SIZE=BLOCK)
        for mask_mod in (in_document(learned.documents), in_document(learned.documents // 2))
    ]
    function = lambda q, k, v, mask: flex_attention(q, k, v, biased(learned), mask)  # noqa: E731
    run, counter = compiled(function, device)
    for mask in masks:
        attend = lambda f: lambda *tensors: f(*tensors, mask)  # noqa: B023, E731
        assert_alike(attend(function), attend(run), [rows(device) for _ in range(3)], learned)
    assert counter.frame_count == 1


def test_flex_compile_compiles_once_more_for_all_new_lengths(device, learned):
    function = lambda *tensors: functions_made_inside(*tensors, learned)  # noqa: E731
    run, counter = compiled(function, device)
    for length in (20, 30, 41, 57):
        assert_alike(function, run, [rows(device, length) for _ in range(3)], learned)
    assert counter.frame_count == 2


@pytest.mark.parametrize("shared", [True, False], ids=["a batch of keys", "keys for all"])
def test_flex_compile_takes_sizes_that_follow_from_values(shared, device):
    function = lambda q, k: flex_attention(q, k, k, lambda s, b, h, i, j: s + j)  # noqa: E731
    run, _ = compiled(function, device)
    q, k = (torch.randn(batch, HEADS, LENGTH, HEAD_DIM, device=device) for batch in (3, 1))
    k = q if shared else k
    wanted = function(q, k)
    torch._dynamo.decorators.mark_unbacked(q, 0)
    torch._dynamo.decorators.mark_unbacked(q, 2)
    torch.testing.assert_close(run(q, k), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("dynamic", "frames"), [(True, 1), (None, 2)])
def test_flex_compile_of_block_masks_of_new_lengths(dynamic, frames, device, learned):
    def function(q, k, v):
        mask = block_masks.causal(q.shape[2], k.shape[2], device=device, block_size=BLOCK)
        return run(q, k, v, mask)

    attend = lambda q, k, v, mask: flex_attention(q, k, v, biased(learned), mask)  # noqa: E731
    run, counter = compiled(attend, device, dynamic=dynamic)
    for length in (20, 30, 41):
        tensors = [rows(device, length) for _ in range(3)]
        mask = block_masks.causal(length, length, device=device, block_size=BLOCK)
        torch.testing.assert_close(function(*tensors), attend(*tensors, mask), rtol=1e-2, atol=1e-2)
    assert counter.frame_count == frames


def test_flex_compile_reads_new_values(device, learned):
    """New values of a captured tensor, another tensor and ints after the second compile nothing again; a float does."""
    count, scale = 1, 1.0

    def function(q, bias, score_mod):
        def scaled(score, b, h, q_idx, kv_idx):
            return score_mod(score * scale, b, h, q_idx, kv_idx) + bias[h] * count

        return flex_attention(q, q, q, scaled)

    def doubled(score, b, h, q_idx, kv_idx):
        return score * 2 + learned.slopes[h]

    def shifted(score, b, h, q_idx, kv_idx):
        return score + q_idx * 0.1

    run, counter = compiled(function, device)
    q, bias = rows(device), torch.randn(HEADS, device=device)

    def compare(*arguments, frames=None):
        torch.testing.assert_close(run(*arguments), function(*arguments), rtol=1e-2, atol=1e-2)
        assert frames is None or counter.frame_count == frames

    compare(q, bias, doubled, frames=1)
    with torch.no_grad():
        learned.slopes += 1
    compare(q, bias.flip(0), doubled, frames=1)
    compare(q, bias, shifted, frames=2)
    compare(q, bias, doubled, frames=2)
    for count in (2, 3, 4):  # noqa: B007
        compare(q, bias, doubled, frames=3)
    for scale in (0.5, 0.25):  # noqa: B007
        compare(q, bias, doubled)


@torch.compiler.allow_in_graph
def hidden(x):
    return x * x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_flex_compile_refuses_an_operation_that_torch_hides(backend):
    """Also a value of score_mod in mask_mod: in compiled code it would be that of other indices."""
    values = []

    def score_mod(score, b, h, q_idx, kv_idx):
        values.append(score * 2)
        return score

    q = torch.randn(1, 1, 8, 16)
    for functions in (
        {"score_mod": lambda score, *_: hidden(score)},
        {"score_mod": score_mod, "mask_mod": lambda b, h, q_idx, kv_idx: values[-1] > q_idx},
    ):
        run, _ = compiled(lambda q: flex_attention(q, q, q, **functions), "cpu", backend)  # noqa: B023
        with pytest.raises(
            NotImplementedError, match="score_mod, mask_mod: expected operations that torch.compile shows"
        ):
            run(q)


def test_flex_compile_names_abs_of_python_where_torch_hides_it():
    """Torch 2.13 shows a TorchFunctionMode no abs(x), other versions do."""
    q = torch.randn(1, 1, 8, 16)
    attend = lambda q: flex_attention(q, q, q, lambda score, b, h, q_idx, kv_idx: score - abs(q_idx - kv_idx))  # noqa: E731
    run, _ = compiled(attend, "cpu", "aot_eager")
    try:
        found = run(q)
    except NotImplementedError as error:
        assert "such as Python's abs()" in str(error) and "x.abs() for abs(x)" in str(error)
    else:
        torch.testing.assert_close(found, attend(q))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad


TABLE, COUNTS = torch.zeros(8, 8, requires_grad=True), torch.zeros(8)


def changes_its_tensor(score, b, h, q_idx, kv_idx):
    return score + COUNTS.add_(1)[q_idx]


def by_float(score, b, h, q_idx, kv_idx):
    return score + TABLE[q_idx * 0.5]


def by_condition(score, b, h, q_idx, kv_idx):
    return score + TABLE[q_idx > 3]


def slices(score, b, h, q_idx, kv_idx):
    return score + TABLE[1:, q_idx][0]


def sums(score, b, h, q_idx, kv_idx):
    return score.cumsum(0)


def by_function(score, b, h, q_idx, kv_idx):
    return Squared.apply(score + TABLE[h, q_idx])


def by_branch(score, b, h, q_idx, kv_idx):
    return torch.cond(score > 0, lambda x: x + 1, lambda x: x - 1, (score,))


def without_gradient(score, b, h, q_idx, kv_idx):
    with torch.no_grad():
        return score.exp()


@pytest.mark.parametrize(
    ("score_mod", "text"),
    [
        (
            changes_its_tensor,
            "score_mod: expected captured tensors that it only reads, got torch.Tensor.add_",
        ),
        (slices, "score_mod: expected indices that are 0-d tensors, ints or a full slice, got a slice"),
        (
            by_float,
            "score_mod: expected integers as indices of a tensor, got torch.float32; round a number by .int",
        ),
        (by_condition, "score_mod: expected integers as indices of a tensor, got torch.bool"),
        (sums, "expected pointwise operations on scalars, got aten.cumsum"),
        (without_gradient, "score_mod: expected no torch.no_grad"),
        (by_function, "score_mod: expected no torch.no_grad.* nor a torch.autograd.Function"),
        # PyTorch 2.11 refuses it itself
        (
            by_branch,
            "expected functions of torch on scalars in compiled code, got cond|This higher order operator",
        ),
    ],
)
def test_flex_compile_refuses_in_words_of_its_own(score_mod, text):
    q = torch.randn(1, 1, 8, 16)
    run, _ = compiled(lambda q: flex_attention(q, q, q, score_mod), "cpu", "eager")
    with pytest.raises(Exception, match=text):
        run(q)


def test_flex_compile_checks_arguments_at_compile_time():
    q = torch.randn(1, 1, 8, 16)
    run, counter = compiled(lambda q: flex_attention(q, q[..., :8], q), "cpu", "eager")
    with pytest.raises(Exception, match="key: expected"):
        run(q)
    assert not counter.frame_count


def leaves():
    return {"score": torch.tensor(0.5), **{name: torch.tensor(n).int() for n, name in enumerate(POSITIONS)}}


def recorded(name, function):
    """(recording, text, function of the text)."""
    recording = Recording(leaves())
    text = recording.text(name, function)
    return recording, text, rebuilt(text, recording.tensors, recording.ints, recording.floats)


def test_recording_is_a_function_of_what_it_captures():
    table, length = torch.arange(12.0).view(3, 4), 2

    def score_mod(score, b, h, q_idx, kv_idx):
        score += table[h, q_idx - kv_idx + length]
        large, index = torch.stack([score, -score]).max(0)
        return (
            torch.nn.functional.gelu(large, approximate="tanh").to(score.dtype) * 0.5 + index + table[:, 1][b]
        )

    recording, text, function = recorded("score_mod", score_mod)
    assert recording.tensors == [table] and recording.floats == [0.5]
    assert "torch.Tensor.__getitem__(x0, (h, v1, ))" in text
    assert torch.equal(function(*leaves().values()), score_mod(*leaves().values()))
    again = rebuilt(text, recording.tensors, recording.ints, recording.floats)
    assert again.__code__ is function.__code__


@pytest.mark.parametrize("result", [True, 3, None, float("-inf")])
def test_recording_keeps_results_that_are_no_tensors(result):
    _, _, function = recorded("mask_mod", lambda b, h, q_idx, kv_idx: result)
    assert function(0, 0, 0, 0) == result and type(function(0, 0, 0, 0)) is type(result)


@pytest.mark.parametrize("op", ["flex", "flex_max_logits"])
def test_flex_op_passes_opcheck(op):
    q, bias = (torch.randn(*size, requires_grad=True) for size in ((1, 2, 5, 16), (2,)))
    text = "def make(x0):\n    def score_mod(score, b, h, q_idx, kv_idx):\n        return score + x0[h]\n    return score_mod"
    arguments = (
        q,
        q.detach(),
        q.detach(),
        None,
        [bias],
        [],
        [],
        [],
        [],
        text,
        "",
        0.25,
        False,
        None,
        True,
        False,
    )
    torch.library.opcheck(getattr(torch.ops.tl_attention, op).default, arguments)


def test_lists_of_a_graph_are_kept_until_they_change():
    mask = create_block_mask(causal, None, None, 20, 20, "cpu", BLOCK_SIZE=BLOCK)
    lists = [getattr(mask, name).clone() for name in flex_compiled.LISTS]
    blocks = BLOCK, BLOCK, 20, 20

    def kept(lists):
        return flex_lists.kept_mask(flex_lists.block_mask_of(lists, blocks, causal))

    first = kept(lists)
    assert kept(lists) is first
    assert kept([x.detach() for x in lists]) is first, "lists of a backward"
    assert kept([x.clone() for x in lists]) is not first
    lists[0].add_(0)
    assert kept(lists) is not first
    first = weakref.ref(first)
    del lists
    gc.collect()
    assert first() is None


def test_flex_compile_makes_lists_of_a_mask_once(learned, monkeypatch):
    made = []

    class Counted(flex_lists.KeptMask):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(flex_lists, "KeptMask", Counted)
    mask = create_block_mask(
        in_document(learned.documents), None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=BLOCK
    )
    run, _ = compiled(lambda q, mask: flex_attention(q, q, q * 2, None, mask), "cpu")
    for _ in range(3):
        run(rows("cpu"), mask).sum().backward()
    assert len(made) == 1


def test_recording_refuses_to_read_values_outside_of_compiled_code():
    """A graph break leaves functions to Python, where leaves have values."""
    for function in (lambda score, *_: score if score > 0 else -score, lambda score, *_: score * int(score)):
        with pytest.raises(
            NotImplementedError, match="score_mod: expected no control flow that depends on the score"
        ):
            recorded("score_mod", function)


def test_numbers_beside_indices_do_not_follow_the_default_device(learned):
    q, bias = rows("cpu").detach(), learned.bias.detach()

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[1, q_idx]

    run, _ = compiled(lambda q: flex_attention(q, q, q, score_mod), "cpu", "eager")
    with torch.device("meta"):
        found = run(q)
    assert torch.equal(found, flex_attention(q, q, q, score_mod))


LOADING = """
import sys
import torch
import tl_attention  # nothing else of it
path, = sys.argv[1:]
q, out = torch.load(path + ".pt")
torch.testing.assert_close(torch.export.load(path).module()(q), out)
"""
EXPORTED = {
    "flex": lambda q: flex_attention(q, q, q, lambda score, b, h, q, k: score * 2 - (q - k).abs()),
    "flex of largest scores": lambda q: (
        flex_attention(q, q, q, lambda score, b, h, q, k: score * 2, return_aux=AuxRequest(max_scores=True))[
            1
        ].max_scores
    ),
    "hf decode": lambda q: hf.attention_forward(torch.nn.Module(), q[:, :, :1], q, q, None, is_causal=True)[
        0
    ],
}


class Exported(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.function = EXPORTED[name]

    def forward(self, q):
        return self.function(q)


# A process each, as one could import what the next needs
@pytest.mark.in_turn(1)
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_programs_load_after_import_of_the_package_alone(name, tmp_path):
    path, q, layer = str(tmp_path / "program.pt2"), rows("cpu").detach().bfloat16(), Exported(name)
    torch.export.save(torch.export.export(layer, (q,)), path)
    torch.save((q, layer(q)), path + ".pt")
    subprocess.run([sys.executable, "-c", LOADING, path], check=True)


@pytest.mark.parametrize("strict", [False, True])
def test_flex_exports(learned, strict):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(learned.bias.detach())

        def forward(self, q):
            def score_mod(score, b, h, q_idx, kv_idx):
                score += self.bias[h, q_idx - kv_idx + 100]
                score -= 1 - 2 * self.bias[:, 3][h]
                return torch.where((q_idx & 1 > 0) | ~(kv_idx > 2), -score, score / 3)

            return flex_attention(q, q, q, score_mod, mask_mod=causal)

    layer, q = Layer(), rows("cpu").detach()
    program = torch.export.export(layer, (q,), strict=strict)
    assert torch.equal(program.module()(q), layer(q))


def test_strict_export_refuses_to_change_a_captured_tensor(learned):
    class Layer(torch.nn.Module):
        def forward(self, q):
            def score_mod(score, b, h, q_idx, kv_idx):
                table = learned.documents
                table += 1
                return score + table[q_idx]

            return flex_attention(q, q, q, score_mod)

    with pytest.raises(Exception, match=r"expected captured tensors that it only reads, got operator\.iadd"):
        torch.export.export(Layer(), (rows("cpu").detach(),), strict=True)


def test_flex_compile_refuses_vmap():
    q = torch.randn(3, 1, 1, 8, 16)
    run, _ = compiled(torch.vmap(lambda q: flex_attention(q, q, q, sums)), "cpu", "eager")
    with pytest.raises(Exception, match="expected a call outside torch.func transforms"):
        run(q)


def test_flex_compile_refuses_a_graph_break_inside_a_function():
    def score_mod(score, b, h, q_idx, kv_idx):
        torch._dynamo.graph_break()
        return score * 2

    torch._dynamo.reset()
    run = torch.compile(lambda q: flex_attention(q, q, q, score_mod), backend="aot_eager")
    with pytest.raises(
        NotImplementedError, match="score_mod, mask_mod: expected operations .* code at a graph break"
    ):
        run(torch.randn(1, 1, 8, 16))


def test_flex_compile_runs_between_graph_breaks(learned):
    def function(q, k, v):
        doubled = q * 2
        torch._dynamo.graph_break()
        return flex_attention(doubled, k, v, biased(learned), mask_mod=causal)

    torch._dynamo.reset()
    run = torch.compile(function, backend="aot_eager")
    assert_alike(function, run, [rows("cpu") for _ in range(3)], learned)
