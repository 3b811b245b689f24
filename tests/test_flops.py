"""Counts of torch.utils.flop_counter: those of PyTorch's own attention at the same sizes, for every op of attention, eager and traced."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch._functorch import config, partitioners
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from tl_attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flex_attention,
    mha_bwd_interface,
    mha_fwd_interface,
)

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
OPS = torch.ops.tl_attention
# Ops that compute no attention
OTHERS = {"append", "check_cache", "check_lengths", "dropout_state", "leaf", "traced_leaf"}
BATCH, HEADS, HEADS_KV, HEAD_DIM, HEAD_DIM_V = 2, 4, 2, 16, 8
LENGTHS = 5, 7


def inputs(device="cpu", lengths=LENGTHS):
    """q, k, v with gradients: more keys than queries, more query heads than key heads, narrow values."""
    sizes = (
        (lengths[0], HEADS, HEAD_DIM),
        (lengths[1], HEADS_KV, HEAD_DIM),
        (lengths[1], HEADS_KV, HEAD_DIM_V),
    )
    return [
        torch.randn(BATCH, *size, device=device, dtype=torch.bfloat16, requires_grad=True) for size in sizes
    ]


def shapes(seqlen_q, seqlen_k, batch=1):
    """Shapes of dout, q, k and v as the formulas of torch take them, with a key head per query head: those of torch 2.11 know no others."""
    of_q, of_k = (batch, HEADS, seqlen_q), (batch, HEADS, seqlen_k)
    return (*of_q, HEAD_DIM_V), (*of_q, HEAD_DIM), (*of_k, HEAD_DIM), (*of_k, HEAD_DIM_V)


def forward_count(*sizes):
    """Count of torch for a forward of each (seqlen_q, seqlen_k)."""
    return sum(sdpa_flop_count(*shapes(*size)[1:]) for size in sizes)


def backward_count(*sizes):
    return sum(sdpa_backward_flop_count(*shapes(*size)) for size in sizes)


FORWARD, BACKWARD = forward_count(LENGTHS) * BATCH, backward_count(LENGTHS) * BATCH


def counts(function, *arguments):
    """FLOPs by op that torch counts in a call."""
    with FlopCounterMode(display=False) as mode:
        function(*arguments)
    return dict(mode.flop_counts["Global"])


def transposed(tensors):
    return [x.transpose(1, 2) for x in tensors]


def flex(*qkv, **others):
    return flex_attention(*transposed(qkv), enable_gqa=True, **others)


def doubled(score, b, h, q_idx, kv_idx):
    return score + torch.where(h > 1, q_idx, kv_idx)


def test_every_op_has_a_formula_or_computes_no_attention():
    names = {
        x.split("::")[1] for x in torch._C._dispatch_get_all_op_names() if x.startswith("tl_attention::")
    }
    with_formula = {name for name in names if getattr(OPS, name) in flop_registry}
    assert names - with_formula == OTHERS


def test_flash_counts_as_sdpa(device):
    found = counts(lambda: flash_attn_func(*inputs(device), causal=True).sum().backward())
    assert found == {OPS.fwd: FORWARD, OPS.bwd: BACKWARD}


@pytest.mark.parametrize("options", [{"window_size": (2, 0)}, {"softcap": 2.0}, {"dropout_p": 0.5}])
def test_flash_with_options_counts_all_keys(options, device):
    assert counts(lambda: flash_attn_func(*inputs(device), **options)) == {OPS.fwd: FORWARD}


def test_max_logits_count_once():
    found = counts(lambda: flash_attn_func(*inputs(), return_max_logits=True))
    assert found == {OPS.fwd_max_logits: FORWARD}


def test_interface_counts_the_same():
    q, k, v = (x.detach() for x in transposed(inputs()))
    out, lse = mha_fwd_interface(q, k, v)
    found = counts(lambda: mha_bwd_interface(torch.ones_like(out), q, k, v, out, lse))
    assert sum(found.values()) == BACKWARD


@pytest.mark.parametrize("tangents", ["qkv", "q", "v"])
def test_forward_mode_counts_its_products(tangents):
    tensors = dict(zip("qkv", [x.detach().transpose(1, 2) for x in inputs()], strict=True))

    def push():
        along = tuple(tensors[name] for name in tangents)
        torch.func.jvp(lambda *x: flash(**tensors | dict(zip(tangents, x, strict=True))), along, along)

    def flash(q, k, v):
        return flash_attn_func(*transposed((q, k, v)))

    columns = {
        "qkv": 3 * HEAD_DIM + 3 * HEAD_DIM_V,
        "q": 2 * HEAD_DIM + 2 * HEAD_DIM_V,
        "v": HEAD_DIM + 2 * HEAD_DIM_V,
    }
    found = counts(push)
    assert found == {OPS.fwd_jvp: FORWARD // (HEAD_DIM + HEAD_DIM_V) * columns[tangents]}


def packed(lengths, device="cpu"):
    """cu_seqlens."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def test_packed_sequences_count_by_their_lengths():
    q, k, v = (x[0] for x in inputs(lengths=(8, 12)))
    lengths = packed((3, 5)), packed((4, 8))
    found = counts(lambda: flash_attn_varlen_func(q, k, v, *lengths, 5, 8, causal=True).sum().backward())
    sizes = (3, 4), (5, 8)
    assert found == {OPS.fwd: forward_count(*sizes), OPS.bwd: backward_count(*sizes)}


def test_used_rows_of_packed_sequences_count():
    q, k, v = (x[0].detach() for x in inputs(lengths=(8, 12)))
    used = {"seqused_q": torch.tensor([2, 5]).int(), "seqused_k": torch.tensor([4, 3]).int()}
    found = counts(lambda: flash_attn_varlen_func(q, k, v, packed((3, 5)), packed((4, 8)), 5, 8, **used))
    assert found == {OPS.fwd: forward_count((2, 4), (5, 3))}


def test_packed_sequences_in_pages_count_by_their_lengths():
    q, k, v = (x.detach() for x in inputs(lengths=(8, 16)))
    q, table = q[0], torch.tensor([[0], [1]]).int()
    lengths = packed((3, 5)), None, 5, 16
    found = counts(
        lambda: flash_attn_varlen_func(
            q, k, v, *lengths, block_table=table, seqused_k=torch.tensor([9, 16]).int()
        )
    )
    assert found == {OPS.fwd_packed: forward_count((3, 9), (5, 16))}


@pytest.mark.parametrize("rows", [8, 64])
def test_lengths_that_cannot_be_read_count_as_the_longest(rows):
    with FakeTensorMode():
        q, k, v = (x[0].detach() for x in inputs(lengths=(rows, rows)))
        starts = torch.zeros(3, dtype=torch.int32)
        found = counts(lambda: flash_attn_varlen_func(q, k, v, starts, starts, 5, 5))
    # No more rows than there are, and none past the longest sequences
    assert found == {OPS.fwd: forward_count((min(rows, 10), 5))}


@pytest.mark.gpu
def test_the_host_reads_no_lengths_of_a_gpu():
    q, k, v = (x[0].detach() for x in inputs("cuda", (8, 8)))
    starts = packed((3, 5), "cuda")

    def attend():
        flash_attn_varlen_func(q, k, v, starts, starts, 5, 5)

    attend()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert counts(attend) == {OPS.fwd: forward_count((8, 5))}
    finally:
        torch.cuda.set_sync_debug_mode("default")


def caches(seqlen=16):
    q, k, v = (x.detach() for x in inputs(lengths=(3, seqlen)))
    return q, k, v


@pytest.mark.parametrize(
    ("seqlens", "leftpad", "sizes"),
    [
        (None, None, [(3, 16), (3, 16)]),
        (9, None, [(3, 9), (3, 9)]),
        ([4, 11], None, [(3, 4), (3, 11)]),
        ([4, 11], [1, 2], [(3, 3), (3, 9)]),
    ],
)
def test_decodes_count_the_keys_in_use(seqlens, leftpad, sizes):
    seqlens = torch.tensor(seqlens).int() if isinstance(seqlens, list) else seqlens
    others = {} if leftpad is None else {"cache_leftpad": torch.tensor(leftpad).int()}
    found = counts(lambda: flash_attn_with_kvcache(*caches(), cache_seqlens=seqlens, **others))
    assert found == {OPS.decode: forward_count(*sizes)}


def test_new_keys_and_pages_count_in_decodes():
    q, k, v = caches()
    new = k[:, :2].clone(), v[:, :2].clone()
    table = torch.tensor([[1], [0]]).int()
    found = counts(
        lambda: flash_attn_with_kvcache(
            q, k, v, *new, cache_seqlens=torch.tensor([4, 11]).int(), block_table=table
        )
    )
    assert found == {OPS.decode: forward_count((3, 6), (3, 13))}


def test_caches_of_unknown_lengths_count_in_full():
    with FakeTensorMode():
        seqlens = torch.zeros(BATCH, dtype=torch.int32)
        found = counts(lambda: flash_attn_with_kvcache(*caches(), cache_seqlens=seqlens))
    assert found == {OPS.decode: forward_count((3, 16), (3, 16))}


def test_decode_steps_of_transformers_count():
    op = OPS.hf_decode
    arguments = torch.tensor([4, 11]).int(), None, None, True, -1, -1, 0.0, None, False
    assert counts(lambda: op(*caches(), *arguments)) == {op: forward_count((3, 4), (3, 11))}


@pytest.mark.parametrize("flash", [False, True])
def test_functions_count_in_eager_mode(flash, device):
    def attend():
        attend = partial(flash_attn_func, score_mod=doubled) if flash else partial(flex, score_mod=doubled)
        attend(*inputs(device)).sum().backward()

    assert counts(attend) == {OPS.eager_fwd: FORWARD, OPS.eager_bwd: BACKWARD}


def test_functions_with_the_largest_scores_count_once():
    from torch.nn.attention.flex_attention import AuxRequest

    found = counts(lambda: flex(*inputs(), score_mod=doubled, return_aux=AuxRequest(max_scores=True)))
    assert found == {OPS.eager_fwd: FORWARD}


def test_functions_that_are_options_count_as_these():
    found = counts(lambda: flex(*inputs()).sum().backward())
    assert found == {OPS.fwd: FORWARD, OPS.bwd: BACKWARD}


def test_fake_tensors_count():
    def attend(function):
        with FakeTensorMode():
            return counts(lambda: function(*inputs()).sum().backward())

    assert attend(flash_attn_func) == {OPS.fwd: FORWARD, OPS.bwd: BACKWARD}
    assert attend(partial(flex, score_mod=doubled)) == {OPS.eager_fwd: FORWARD, OPS.eager_bwd: BACKWARD}


@pytest.mark.parametrize(
    ("function", "ops"),
    [
        (flash_attn_func, {OPS.fwd, OPS.eager_fwd}),
        (partial(flex, score_mod=doubled), {OPS.flex, OPS.eager_fwd}),
    ],
    ids=["flash", "flex"],
)
def test_checkpoints_count_what_they_compute_again(function, ops):
    found = counts(lambda: checkpoint(function, *inputs(), use_reentrant=False).sum().backward())
    assert sum(n for op, n in found.items() if op in ops) == 2 * FORWARD
    assert sum(found.values()) == 2 * FORWARD + BACKWARD


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    "function", [flash_attn_func, partial(flex, score_mod=doubled)], ids=["flash", "flex"]
)
def test_compiled_code_counts(function, warm):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *qkv: function(*qkv).sum(), backend="aot_eager")
    if warm:
        compiled(*inputs()).backward()
    found = counts(lambda: compiled(*inputs()).backward())
    assert sum(found.values()) == FORWARD + BACKWARD


@pytest.mark.parametrize(
    ("function", "op"),
    [(flash_attn_func, OPS.fwd), (partial(flex, score_mod=doubled), OPS.flex)],
    ids=["flash", "flex"],
)
def test_exported_programs_count(function, op):
    class Model(torch.nn.Module):
        def forward(self, *qkv):
            return function(*qkv)

    qkv = tuple(x.detach() for x in inputs())
    program = torch.export.export(Model(), qkv).module()
    assert counts(lambda: program(*qkv)) == {op: FORWARD}


def test_memory_budgets_know_what_attention_costs(monkeypatch):
    torch._dynamo.reset()
    costs = {}
    estimate = partitioners.estimate_runtime

    def recording(node):
        cost = costs[str(node.target)] = estimate(node)
        return cost

    monkeypatch.setattr(partitioners, "estimate_runtime", recording)
    with config.patch(activation_memory_budget=0.1, is_non_builtin_to_include=True):
        compiled = torch.compile(
            lambda q, k, v: flash_attn_func(q.sin(), k, v).cos(), backend="aot_eager_decomp_partition"
        )
        compiled(*inputs()).sum().backward()
    assert costs["tl_attention.fwd.default"] == FORWARD


def test_bounds_of_symbolic_lengths_add_no_guards():
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    q, starts = mode.from_tensor(torch.zeros(40, HEADS, HEAD_DIM)), mode.from_tensor(torch.zeros(3).int())
    before = len(environment.guards)
    options = (-1, -1), 0.0, 0.0, q.shape[0], q.shape[0], 0, 0, None, None, None, starts, starts
    found = flop_registry[OPS.fwd](q, q, q, 1.0, True, False, False, False, *options)
    assert isinstance(found, torch.SymInt) and len(environment.guards) == before


@pytest.mark.parametrize("first", ["tl_attention", "torch.utils.flop_counter"])
def test_counts_do_not_depend_on_the_order_of_imports(first):
    lines = [
        "import sys, warnings",
        "warnings.simplefilter('ignore')",
        f"import {first}",
        f"assert {first != 'tl_attention'} == ('torch.utils.flop_counter' in sys.modules)",
        "import torch, tl_attention",
        "from torch.utils.flop_counter import FlopCounterMode",
        "x = torch.ones(1, 4, 1, 8, dtype=torch.bfloat16)",
        "with FlopCounterMode(display=False) as mode:",
        "    tl_attention.flash_attn_func(x, x, x)",
        "print(mode.get_total_flops(), sum('tl_attention' in type(x).__module__ for x in sys.meta_path))",
    ]
    found = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert found.stdout.split() == [str(2 * 16 * 16), "0"], found.stderr


def test_a_formula_of_a_user_stays(monkeypatch):
    from torch.utils import flop_counter

    from tl_attention.torch_ops import flops

    monkeypatch.setitem(flop_counter.flop_registry, OPS.fwd, lambda *_, **__: 7)
    flops.register_flops(lambda *_: 8, "fwd")
    assert counts(lambda: flash_attn_func(*inputs())) == {OPS.fwd: 7}


def test_selective_checkpoints_beside_a_counter_see_no_reference():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    seen = []

    def policy(context, op, *arguments, **others):
        seen.append(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    q, k, v = inputs()
    attend = partial(flex, score_mod=doubled)
    out = checkpoint(attend, q, k, v, use_reentrant=False, context_fn=contexts)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    expected = torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
    torch.testing.assert_close(found, expected)
    assert OPS.eager_fwd.default in seen and torch.ops.aten.bmm.default not in seen


def test_recorded_graphs_hold_no_op_for_the_counter():
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(partial(flex, score_mod=doubled))(*(x.detach() for x in inputs()))
    assert not any("eager_fwd" in str(node.target) for node in graph.graph.nodes)
