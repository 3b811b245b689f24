"""tree_mask of flash_attn_with_kvcache and draft_tree_mask: against a loop over queries and keys, on a GPU against the reference."""

from __future__ import annotations

import importlib.util
import itertools
import math
import random

import pytest
import torch
from test_kvcache import BF16, FP16, Case
from torch._subclasses.fake_tensor import FakeTensorMode

from tl_attention import draft_tree_mask, flash_attn_with_kvcache
from tl_attention.api import kvcache
from tl_attention.checks.kvcache import MAX_NODES
from tl_attention.problem.attn_problem import decode_arguments, decode_problem
from tl_attention.reference import attention_reference

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
gpu = pytest.mark.gpu
needs_tilelang = pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang")
SIZES = 1, 2, 3, 7, 16, 31, 32, 33, 48, 63, 64
SIGN = 63  # the bit that is the sign


def drawn_parents(nodes: int, seed: int) -> list[int]:
    """A parent before each node, or -1: bushy trees, chains and what lies between."""
    chance = random.Random(seed)
    back = chance.choice((1, 2, 4, nodes))
    return [chance.randint(max(i - back, -1), i - 1) for i in range(nodes)]


def ancestors(parents: list[int], node: int) -> set[int]:
    """The node and its ancestors."""
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


def word(nodes: set[int]) -> int:
    """The bits of some nodes as an int64 has them."""
    bits = sum(1 << node for node in nodes)
    return bits - 2**64 if bits >> SIGN else bits


def tree_words(parents: list[int]) -> torch.Tensor:
    return torch.tensor([word(ancestors(parents, i)) for i in range(len(parents))])


def chain(nodes: int, device: str = "cpu") -> torch.Tensor:
    return draft_tree_mask(torch.arange(-1, nodes - 1, device=device))


class TreeCase(Case):
    """A case of test_kvcache with a tree: "each" sequence has its own, all have a "shared" one, or each has "any" bits."""

    def __init__(self, tree: str = "each", **changes):
        super().__init__(
            **{"causal": False, "heads": 4, "heads_kv": 2, "head_dim": 64, "head_dim_v": 64} | changes
        )
        self.set_tree(tree)

    def set_tree(self, tree: str) -> None:
        n, rows = self.seqlen_q, 1 if tree == "shared" else self.batch
        words = torch.stack([tree_words(drawn_parents(n, self.seed + b)) for b in range(rows)])
        if tree == "any":
            words = torch.randint(
                -(2**63), 2**63 - 1, words.shape, generator=torch.Generator().manual_seed(self.seed)
            )
        words = (words[0] if tree == "shared" else words).to(self.device)
        self.keywords["tree_mask"] = self.options_of_reference["tree_mask"] = words

    def formula(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) in fp64, with a loop over queries and keys that decides what a query sees."""
        outs, lses = [], []
        words = self.keywords["tree_mask"].expand(self.batch, -1).tolist()
        for b, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            k, v = (x[self.where(b, start, end)].double() for x in (self.k_cache, self.v_cache))
            k, v = (x.repeat_interleave(self.heads // self.heads_kv, 1) for x in (k, v))
            length = end - start
            seen = torch.zeros(self.seqlen_q, length, dtype=torch.bool)
            for i, j in itertools.product(range(self.seqlen_q), range(length)):
                seen[i, j] = self.sees(words[b][i], i, j, length)
            scale = self.head_dim**-0.5 if self.scale is None else self.scale
            scores = torch.einsum("qhd,khd->hqk", self.q[b].double(), k) * scale
            if cap := self.options_of_reference.get("softcap"):
                scores = cap * (scores / cap).tanh()
            scores = scores.masked_fill(~seen, -math.inf)
            if (sink := self.options_of_reference.get("sink")) is not None:
                scores = torch.cat((scores, sink.double()[:, None, None].expand(-1, self.seqlen_q, 1)), 2)
            lse = scores.logsumexp(2)
            weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()[..., :length]
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
            lses.append(lse)
        return torch.stack(outs), torch.stack(lses)

    def sees(self, bits: int, query: int, key: int, length: int) -> bool:
        node = key - (length - self.seqlen_q)
        return (node < 0 or bool(bits >> node & 1)) and not (self.causal and node > query)


@pytest.mark.parametrize("nodes", SIZES)
def test_draft_tree_mask_has_each_node_and_its_ancestors(nodes, device):
    trees = [drawn_parents(nodes, seed) for seed in range(8)] + [[*range(-1, nodes - 1)], [-1] * nodes]
    expected = torch.stack([tree_words(parents) for parents in trees])
    for dtype in (torch.int32, torch.int64):
        parents = torch.tensor(trees, dtype=dtype, device=device)
        assert torch.equal(draft_tree_mask(parents).cpu(), expected)
        assert torch.equal(draft_tree_mask(parents[3]).cpu(), expected[3])
    flipped = torch.tensor(trees, device=device).T.contiguous().T  # other strides
    found = draft_tree_mask(flipped)
    assert torch.equal(found.cpu(), expected) and found.dtype == torch.int64 and found.is_contiguous()


def test_draft_tree_mask_of_64_nodes_sets_the_sign():
    assert chain(64)[-1] == -1 and chain(64)[-2] == 2**63 - 1
    assert draft_tree_mask(torch.tensor([-1] * 64))[-1] == -(2**63)


@pytest.mark.parametrize(
    ("parents", "error", "text"),
    [
        ([-1, 0], TypeError, "parents: expected a torch.Tensor"),
        (torch.zeros(3), TypeError, "parents: expected torch.int32 or torch.int64, got torch.float32"),
        (torch.zeros((), dtype=torch.int64), ValueError, "parents: expected 1 or 2 dimensions"),
        (torch.full((65,), -1), NotImplementedError, "parents: expected at most 64 draft tokens"),
        (torch.tensor([-1, 1]), ValueError, r"parents: .*, got 1 as parents\[1\]"),
        (torch.tensor([[-1, 0], [-2, 0]]), ValueError, r"parents: .*, got -2 as parents\[1\]\[0\]"),
    ],
    ids=["list", "dtype", "dimensions", "too-many", "itself", "below"],
)
def test_draft_tree_mask_of_a_wrong_argument_is_an_error(parents, error, text):
    with pytest.raises(error, match=text):
        draft_tree_mask(parents)


def test_draft_tree_mask_of_no_sequences_and_in_vmap():
    assert draft_tree_mask(torch.zeros(0, 5, dtype=torch.int32)).shape == (0, 5)
    with pytest.raises(ValueError, match="parents: expected at least one draft token"):
        draft_tree_mask(torch.zeros(2, 0, dtype=torch.int32))
    parents = torch.tensor([drawn_parents(20, seed) for seed in range(3)])
    assert torch.equal(torch.vmap(draft_tree_mask)(parents), draft_tree_mask(parents))

    def loss(scale, parents):
        return (draft_tree_mask(parents) * scale).sum()

    of_samples = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(torch.tensor(1.0), parents)
    assert torch.equal(of_samples, draft_tree_mask(parents).sum(-1).float())


def test_draft_tree_mask_of_real_parents_under_fake_tensor_mode():
    parents = torch.tensor(drawn_parents(20, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert draft_tree_mask(parents).shape == parents.shape


def test_draft_tree_mask_is_compiled_whole():
    torch._dynamo.reset()
    parents = torch.tensor(drawn_parents(20, 0))
    compiled = torch.compile(draft_tree_mask, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(parents), draft_tree_mask(parents))


@pytest.mark.parametrize("strict", [False, True])
def test_draft_tree_mask_is_exported_for_any_number_of_nodes(strict):
    class Tree(torch.nn.Module):
        def forward(self, parents):
            return draft_tree_mask(parents)

    nodes = {1: torch.export.Dim("nodes", min=2, max=64)}
    program = torch.export.export(
        Tree(), (torch.arange(7)[None] - 1,), dynamic_shapes=(nodes,), strict=strict
    ).module()
    for parents in (torch.arange(64)[None] - 1, torch.tensor([[-1, 0, 0, 1, -1]]), torch.tensor([[-1, 0]])):
        assert torch.equal(program(parents), draft_tree_mask(parents))


@pytest.mark.parametrize("nodes", range(1, MAX_NODES + 1))
def test_tree_of_each_size_matches_a_loop(nodes):
    tree = ("each", "shared", "any")[nodes % 3]
    case = TreeCase(
        tree, seqlen_q=nodes, lengths=(90, 64, 1, 0, nodes, nodes + 1), heads=2, heads_kv=1, seed=nodes
    )
    assert_like_formula(case)


def assert_like_formula(case: TreeCase) -> None:
    out, lse = case.run()
    expected_out, expected_lse = case.formula()
    torch.testing.assert_close(out.double(), expected_out, rtol=2**-8, atol=2**-12)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


CASES = {
    "causal": {"causal": True, "tree": "any"},
    "pages": {"page": 16},
    "large-pages": {"page": 48, "tree": "shared"},
    "new-keys": {"new": 33, "page": 16},
    "new-keys-by-idx": {"new": 33, "by_idx": True},
    "leftpad": {"leftpad": (5, 0, 60, 1)},
    "leftpad-new-keys": {"leftpad": (5, 0, 60, 1), "new": 2, "tree": "shared"},
    "many-heads": {"heads": 16, "heads_kv": 2},
    "options": {"options": "softcap sink", "tree": "any"},
    "softcap": {"options": "softcap"},
    "sink": {"options": "sink", "tree": "any"},
    "fp16": {"dtype": FP16, "scale": -0.2},
    "latents": {"head_dim": 576, "head_dim_v": 512, "heads_kv": 1, "new": 3},
    "one-query": {"seqlen_q": 1, "tree": "any"},
    "sequences-shorter-than-the-tree": {"lengths": (3, 32, 0, 1), "tree": "any"},
}  # fmt: skip


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_tree_matches_a_loop_and_the_reference(changes):
    case = TreeCase(**{"seqlen_q": 33, "lengths": (70, 0, 64, 40), "room": 20} | changes)
    case.check(check_lengths=True)
    assert_like_formula(case)


def test_chain_is_a_causal_mask():
    """To a rounding: on some CPUs torch sums hidden scores in another order."""
    for nodes in (1, 31, 64):
        case = TreeCase(seqlen_q=nodes, lengths=(90, 64, 3, 0))
        causal = case.run(causal=True, tree_mask=None)
        for words in (chain(nodes), chain(nodes).expand(4, -1)):
            for changes in ({}, {"causal": True}, {"window_size": (-1, 0)}):
                for found, expected in zip(case.run(tree_mask=words, **changes), causal, strict=True):
                    eps = torch.finfo(found.dtype).eps
                    torch.testing.assert_close(found, expected, rtol=eps, atol=eps)


def test_one_tree_is_that_of_each_sequence():
    case = TreeCase("shared", seqlen_q=16)
    words = case.keywords["tree_mask"]
    one, each = case.run(), case.run(tree_mask=words.repeat(case.batch, 1))
    assert all(map(torch.equal, one, each))


def test_path_of_a_tree_attends_as_a_sequence_of_its_own():
    parents = drawn_parents(24, 5)
    case = TreeCase("shared", seqlen_q=24, lengths=(50,))
    out, _ = case.run(tree_mask=tree_words(parents))
    for node in range(24):
        path = sorted(ancestors(parents, node))
        keys = [*range(26), *(26 + i for i in path)]
        alone, _ = attention_reference(
            case.q[:, path], case.k_cache[:, keys], case.v_cache[:, keys], causal=True
        )
        torch.testing.assert_close(out[:, node].float(), alone[:, -1].float(), rtol=2**-8, atol=2**-12)


def test_hidden_keys_may_hold_nan():
    case = TreeCase("shared", seqlen_q=3, lengths=(20,), heads=2, heads_kv=1)
    words = torch.tensor([1, 3, 1])  # of node 2 the key is hidden from all
    case.keywords["tree_mask"] = words
    case.v_cache[0, 19] = math.nan
    assert all(x.isfinite().all() for x in case.run())


def test_known_call_takes_the_values_of_its_tree():
    case = TreeCase("shared", seqlen_q=8)
    for seed in range(3):
        case.seed = seed
        case.set_tree("shared")
        case.check()
    for tree in ("each", "shared", "each"):
        case.set_tree(tree)
        case.check()
    plain = case.run(tree_mask=None)
    assert not torch.equal(plain[0], case.run()[0])


ERRORS = {
    "list": ({"tree_mask": [1]}, TypeError, "tree_mask: expected a torch.Tensor, got list"),
    "int32": ({"tree_mask": torch.ones(4, dtype=torch.int32)}, TypeError, "tree_mask: expected torch.int64"),
    "shape": ({"tree_mask": torch.ones(5).long()}, ValueError, r"tree_mask: expected shape \(4,\) or \(5, 4\)"),
    "batch": ({"tree_mask": torch.ones(2, 4).long()}, ValueError, r"tree_mask: expected shape \(4,\) or \(5, 4\)"),
    "strides": ({"tree_mask": torch.ones(4, 5).long().T}, ValueError, "tree_mask: expected a contiguous last"),
    "device": ({"tree_mask": torch.ones(4, device="meta").long()}, ValueError, "tree_mask: expected the device of q"),
    "window": ({"window_size": (8, 0)}, NotImplementedError, "tree_mask: expected None with window_size"),
    "right": ({"window_size": (-1, 2)}, NotImplementedError, "tree_mask: expected None with window_size"),
    "alibi": ({"alibi_slopes": torch.ones(4)}, NotImplementedError, "tree_mask: expected None with alibi_slopes"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_wrong_call_with_a_tree_is_an_error(changes, error, text):
    case = TreeCase("shared", seqlen_q=4)
    case.run()
    with pytest.raises(error, match=text):
        case.run(**changes)
    case.run()


def test_tree_of_more_than_64_queries_or_with_rotary_is_refused():
    case = Case(seqlen_q=65, lengths=(80,))
    with pytest.raises(NotImplementedError, match="tree_mask: expected at most 64 queries.*65"):
        case.run(tree_mask=torch.ones(65, dtype=torch.int64))
    case = Case(seqlen_q=4, lengths=(20,), new=4, rotary=(32, False))
    with pytest.raises(
        NotImplementedError, match="tree_mask: expected None with rotary_cos.*before the call"
    ):
        case.run(tree_mask=chain(4))


def test_kernel_without_a_tree_has_no_argument_for_it():
    plain, tree = decode_arguments(("window",)), decode_arguments(("window", "tree"))
    assert tree[:-1] == plain and tree[-1].name == "Tree"
    assert str(decode_problem("bfloat16", 128, 128, ("tree", "sink"))) == "bf16 d128 full window sink tree"


@needs_tilelang
def test_kernel_reads_the_bit_of_each_node():
    """The formula of kernels/decode/work.py, on constants."""
    from tl_attention.kernels.decode.work import RowTables  # its import makes tvm importable

    from tvm import tirx  # isort: skip

    chance = random.Random(0)
    for node in range(-70, 64):
        bits = chance.choice((chance.getrandbits(64), 1 << max(node, 0), ~(1 << max(node, 0)) % 2**64))
        halves = bits % 2**32, bits >> 32
        rows = object.__new__(RowTables)
        rows.low_bits, rows.high_bits = (
            {(0, 5): tirx.IntImm("int32", half - 2**32 * (half >> 31))} for half in halves
        )
        either = rows.sees_node(0, 5, tirx.IntImm("int32", node)).args  # folded constants
        assert any(x.value for x in either) == (node < 0 or bool(bits >> node & 1)), (node, bits)


@pytest.mark.parametrize("tree", ["shared", "each"])
def test_call_with_a_tree_is_compiled_whole(tree, device):
    torch._dynamo.reset()

    def step(q, k_cache, v_cache, keywords):
        return flash_attn_with_kvcache(q, k_cache, v_cache, **keywords, return_softmax_lse=True)

    cases = [TreeCase(tree, seqlen_q=6, new=2, room=4, device=device) for _ in range(2)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    mine, expected = (
        run(case.q, case.k_cache, case.v_cache, case.keywords)
        for run, case in zip((compiled, step), cases, strict=True)
    )
    torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("sizes", [(5, 7, 9), (1, 7, 9)])
def test_compiled_calls_may_get_a_tree_later(sizes):
    """After calls of other lengths, whose lengths torch.compile no longer compares with numbers by itself."""
    torch._dynamo.reset()

    def step(q, k, words):
        return flash_attn_with_kvcache(q, k, k, cache_seqlens=30, causal=True, tree_mask=words)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for seqlen_q, words in (*((n, None) for n in sizes), (11, chain(11))):
        q, k = torch.randn(2, seqlen_q, 4, 16).bfloat16(), torch.randn(2, 40, 2, 16).bfloat16()
        torch.testing.assert_close(compiled(q, k, words), step(q, k, words))


def test_opcheck(device, monkeypatch):
    calls, op = [], kvcache.decode_op
    monkeypatch.setattr(kvcache, "decode_op", lambda *x: calls.append(x) or op(*x))
    monkeypatch.setattr(kvcache, "is_traced", lambda: True)
    case = TreeCase(seqlen_q=3, lengths=(40, 3), room=8, device=device)
    for x in (case.k_cache, case.v_cache):
        x.nan_to_num_()
    case.run()
    torch.library.opcheck(op, calls[0], test_utils=("test_schema", "test_faketensor"))


def test_schema_of_the_op_ends_with_the_tree():
    """Programs that were exported before have no such argument."""
    last = kvcache.decode_op._opoverload._schema.arguments[-1]
    assert last.name == "tree_mask" and last.has_default_value() and last.default_value is None


ON_GPU = {
    "d128": {"head_dim": 128, "head_dim_v": 128},
    "d128-pages": {"head_dim": 128, "head_dim_v": 128, "page": 16, "new": 5},
    "d128-large-pages": {"head_dim": 128, "head_dim_v": 128, "page": 64, "tree": "shared"},
    "d64": {"tree": "any", "leftpad": (9, 0, 1, 3, 300, 0)},
    "d64-causal": {"tree": "any", "causal": True},
    "fp16-d96-options": {"head_dim": 96, "head_dim_v": 96, "dtype": FP16, "options": "softcap sink"},
    "d192-128": {"head_dim": 192, "head_dim_v": 128, "by_idx": True},
    "d256": {"head_dim": 256, "head_dim_v": 256, "scale": -0.1},
    "latents": {"head_dim": 576, "head_dim_v": 512, "heads_kv": 1, "page": 64},
}  # fmt: skip
RAGGED = 2100, 0, 1, 64, 333, 40


@gpu
@pytest.mark.parametrize("group", [2, 8])
@pytest.mark.parametrize("nodes", [1, 5, 16, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("changes", ON_GPU.values(), ids=ON_GPU)
def test_tree_matches_the_reference_on_a_gpu(changes, nodes, group):
    """Up to 512 rows per key head, of which a warpgroup has 64."""
    heads = group * changes.get("heads_kv", 2)
    sizes = {"seqlen_q": nodes, "lengths": RAGGED, "room": 70, "heads": heads, "seed": nodes}
    TreeCase(**sizes | changes, device="cuda").check()


@gpu
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("heads", [2, 4, 8])
def test_splits_of_a_tree_match_the_reference(splits, heads):
    """Rows per key head: 40, 80 and 160."""
    case = TreeCase(seqlen_q=40, lengths=RAGGED, heads=heads, heads_kv=2, device="cuda")
    case.check(num_splits=splits)


@gpu
def test_tree_at_each_end_of_a_key_block():
    """The nodes are in one or two key blocks."""
    for length in range(60, 330, 3):
        for nodes in (17, 64):
            TreeCase("any", seqlen_q=nodes, lengths=(length,), heads=2, device="cuda", seed=length).check()


@gpu
@pytest.mark.parametrize(("head_dim", "options"), [(64, ""), (64, "softcap sink"), (128, "")])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_chain_is_a_causal_mask_on_a_gpu(head_dim, options, batch_invariant):
    widths = {"head_dim": head_dim, "head_dim_v": head_dim}
    for nodes, heads in ((8, 4), (64, 4), (64, 16)):
        case = TreeCase(seqlen_q=nodes, lengths=RAGGED, heads=heads, options=options, device="cuda", **widths)
        how = {"batch_invariant": batch_invariant, "num_splits": 1}
        causal = case.run(causal=True, tree_mask=None, **how)
        for changes in ({}, {"causal": True}):
            found = case.run(tree_mask=chain(nodes, "cuda"), **changes, **how)
            if batch_invariant:
                assert all(map(torch.equal, found, causal))
            torch.testing.assert_close(found, causal, rtol=2**-7, atol=2**-9)


@gpu
def test_batch_invariant_tree_has_the_bits_of_each_sequence_alone():
    case = TreeCase(seqlen_q=33, lengths=RAGGED, head_dim=128, head_dim_v=128, device="cuda")
    together = case.run(batch_invariant=True)
    case.check_output(*together)
    for b in range(case.batch):
        lengths = case.keywords["cache_seqlens"][b : b + 1]
        tree = case.keywords["tree_mask"][b : b + 1]
        changes = {"cache_seqlens": lengths, "tree_mask": tree, "batch_invariant": True}
        q, k, v = (x[b : b + 1] for x in (case.q, case.k_cache, case.v_cache))
        alone = flash_attn_with_kvcache(q, k, v, **case.keywords | changes, return_softmax_lse=True)
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(together, alone, strict=True))


@gpu
@pytest.mark.parametrize("tree", ["shared", "each"])
def test_cuda_graph_replays_with_another_tree(tree):
    case = TreeCase(tree, seqlen_q=20, lengths=RAGGED, head_dim=128, head_dim_v=128, device="cuda")
    words, parents = case.keywords["tree_mask"], torch.empty_like(case.keywords["tree_mask"])
    case.run()
    draft_tree_mask(torch.full_like(parents, -1))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        words.copy_(draft_tree_mask(parents))
        out, lse = case.run()
    for seed in range(3):
        drawn = [drawn_parents(20, 10 * seed + b) for b in range(case.batch)]
        parents.copy_(torch.tensor(drawn[0] if tree == "shared" else drawn))
        graph.replay()
        assert torch.equal(words, draft_tree_mask(parents))
        case.check_output(out, lse)


@gpu
def test_draft_tree_mask_of_a_gpu_does_not_wait():
    parents = torch.tensor([drawn_parents(33, seed) for seed in range(4)]).cuda()
    case = TreeCase(seqlen_q=33, lengths=(100,) * 4, dtype=BF16, device="cuda")
    case.run()
    draft_tree_mask(parents)
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(tree_mask=draft_tree_mask(parents))
    finally:
        torch.cuda.set_sync_debug_mode("default")
