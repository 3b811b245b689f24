"""Prefix trees: masks of nodes packed depth first, their blocks, positions, attention along each path, and errors."""

from __future__ import annotations

import random
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_create_block_mask import assert_same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from tl_attention import block_masks, create_block_mask, flash_attn_func, flex_attention
from tl_attention.api.flex_lists import kept_mask, lists_with_bits
from tl_attention.checks import masks as checks
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.tracing.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention. CPU tensors")
TREES = {
    "prompt and answers": ([-1, 0, 0, 0], [9, 4, 5, 1]),
    "chain": ([-1, 0, 1, 2], [3, 4, 5, 6]),
    "star of single tokens": ([-1] + [0] * 9, [1] * 10),
    "forest": ([-1, 0, -1, 2, 2, -1], [5, 6, 3, 2, 4, 1]),
    "empty nodes": ([-1, 0, 1, 1, 0, 4, -1, 6], [0, 4, 0, 3, 0, 5, 0, 2]),
    "one node": ([-1], [7]),
    "two levels": ([-1, 0, 1, 1, 0, 4, 4], [8, 1, 3, 2, 6, 1, 1]),
}


def drawn(draw: random.Random, nodes: int, most: int) -> tuple[list[int], list[int]]:
    """(parents, lengths) of a random forest; a third of the nodes has 0 or 1 tokens."""
    parents, path = [], [-1]
    for node in range(nodes):
        path = path[: draw.randint(1, len(path))]
        parents.append(path[-1])
        path.append(node)
    lengths = [
        draw.choice((draw.randint(0, 1), draw.randint(2, most), draw.randint(2, most))) for _ in parents
    ]
    return parents, lengths


def path_of(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors, the root first."""
    return [*path_of(parents, parents[node]), node] if node >= 0 else []


def tokens_of(lengths: list[int], nodes: list[int]) -> list[int]:
    starts = [sum(lengths[:node]) for node in nodes]
    return [
        token
        for start, node in zip(starts, nodes, strict=True)
        for token in range(start, start + lengths[node])
    ]


def shown(parents: list[int], lengths: list[int], seqlen: int) -> torch.Tensor:
    """The mask by its meaning: bool [seqlen, seqlen]."""
    mask = torch.zeros(seqlen, seqlen, dtype=torch.bool)
    for node in range(len(parents)):
        for token in tokens_of(lengths, [node]):
            mask[token, tokens_of(lengths, path_of(parents, node))] = True
    return mask.tril()


def dense(mask, seqlen: int, batch: int = 0) -> torch.Tensor:
    places = torch.arange(seqlen)
    return mask.mask_mod(torch.tensor(batch), torch.tensor(0), places[:, None], places)


@pytest.mark.parametrize("name", TREES)
def test_prefix_tree_shows_nodes_on_the_path(name):
    parents, lengths = TREES[name]
    for seqlen in (None, sum(lengths) + 5):
        n = seqlen or sum(lengths)
        mask = block_masks.prefix_tree(parents, lengths, seqlen, device="cpu", block_size=4)
        assert mask.seq_lengths == (n, n) and torch.equal(dense(mask, n), shown(parents, lengths, n))
        assert_same(mask, torch_create_block_mask(mask.mask_mod, 1, 1, n, n, "cpu", 4))


@pytest.mark.parametrize("group", range(8))
def test_prefix_tree_of_drawn_trees_has_the_blocks_of_torch(group):
    """Twelve forests each; lengths in every residue class of the block sizes."""
    for i in range(12):
        draw = random.Random(100 * group + i)
        parents, lengths = drawn(draw, draw.randint(1, 20), draw.choice((3, 9, 40)))
        n = sum(lengths) + draw.choice((0, 0, 1, 7, 30))
        if not n:
            continue
        block_size = draw.choice((1, 5, 8, 16, 128, (4, 16), (16, 4), (3, 7)))
        mask = block_masks.prefix_tree(parents, lengths, n, device="cpu", block_size=block_size)
        assert torch.equal(dense(mask, n), shown(parents, lengths, n)), (parents, lengths)
        assert_same(
            mask,
            torch_create_block_mask(mask.mask_mod, 1, 1, n, n, "cpu", block_size),
            f"{parents} {lengths}",
        )


def test_prefix_tree_in_each_form():
    """Lists and tensors, with a batch in both arguments or in one, show the same."""
    draw = random.Random(0)
    trees = [drawn(draw, nodes, 30) for nodes in (9, 4, 12)]
    parents, lengths = ([[*tree[i]] for tree in trees] for i in (0, 1))
    n = max(map(sum, lengths)) + 3
    padded = [
        torch.tensor([row + [x] * (12 - len(row)) for row in rows])
        for rows, x in ((parents, -1), (lengths, 0))
    ]
    batch = block_masks.prefix_tree(parents, lengths, n, device="cpu", block_size=16)
    for dtype in (torch.int32, torch.int64):
        assert_same(block_masks.prefix_tree(*(x.to(dtype) for x in padded), n, block_size=16), batch)
    assert_same(batch, torch_create_block_mask(batch.mask_mod, 3, 1, n, n, "cpu", 16))
    for entry, tree in enumerate(trees):
        assert torch.equal(dense(batch, n, entry), shown(*tree, n))
        places = block_masks.prefix_tree_positions(parents, lengths, n, device="cpu")[entry]
        assert torch.equal(places, block_masks.prefix_tree_positions(*tree, n, device="cpu"))
    shared, sizes = [-1, 0, 0], [[5, 6, 7], [1, 0, 3]]
    expected = block_masks.prefix_tree([shared] * 2, sizes, device="cpu", block_size=8)
    for form in (shared, tuple(shared), torch.tensor(shared)):
        assert_same(block_masks.prefix_tree(form, sizes, device="cpu", block_size=8), expected)
        assert_same(block_masks.prefix_tree(form, torch.tensor(sizes), block_size=8), expected)
    chains = [[-1, 0, 1], [-1, -1, -1]]
    of_batch = block_masks.prefix_tree(torch.tensor(chains), [4, 4, 4], block_size=8)
    assert_same(of_batch, block_masks.prefix_tree(chains, [[4] * 3] * 2, device="cpu", block_size=8))
    assert of_batch.kv_num_blocks.shape[0] == 2


def test_prefix_tree_positions_count_along_each_path():
    draw = random.Random(0)
    for tree in (*TREES.values(), *(drawn(draw, 15, 6) for _ in range(40))):
        parents, lengths = tree
        n = sum(lengths)
        positions = block_masks.prefix_tree_positions(parents, lengths, n + 3, device="cpu")
        assert positions.dtype == torch.int64 and positions[n:].tolist() == [0, 1, 2]
        for node in range(len(parents)):
            tokens = tokens_of(lengths, path_of(parents, node))
            assert positions[tokens].tolist() == [*range(len(tokens))]


def leaves(parents: list[int]) -> list[int]:
    return [node for node in range(len(parents)) if node not in parents]


@pytest.mark.parametrize("name", TREES)
def test_prefix_tree_attention_is_that_of_each_path_alone(name):
    """Out of each path, and gradients of the sum over leaves, as if a prompt and its answer were alone; and the dense formula."""
    parents, lengths = TREES[name]
    n = sum(lengths) + 2
    q, k, v, dout = torch.randn(4, 2, 3, n, 16, dtype=torch.float64).float()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask = block_masks.prefix_tree(parents, lengths, n, device="cpu", block_size=8)
    out = flex_attention(q, k, v, block_mask=mask, precision="highest")
    expected = F.scaled_dot_product_attention(q, k, v, shown(parents, lengths, n)).nan_to_num(0)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert not out[:, :, n - 2 :].any()
    grads = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    seen = sum(lengths)
    wanted = F.scaled_dot_product_attention(*(x[:, :, :seen] for x in inputs), shown(parents, lengths, seen))
    wanted = torch.autograd.grad(wanted, inputs, dout[:, :, :seen])
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-4)

    of_leaves, alone = tokens_of(lengths, leaves(parents)), [torch.zeros_like(x) for x in inputs]
    for leaf in leaves(parents):
        path = tokens_of(lengths, path_of(parents, leaf))
        of_leaf = len(path) - lengths[leaf]
        own = [x[:, :, path].detach().requires_grad_() for x in inputs]
        one = F.scaled_dot_product_attention(*own, is_causal=True)
        torch.testing.assert_close(out[:, :, path], one, rtol=1e-4, atol=1e-5)
        found = torch.autograd.grad(one[:, :, of_leaf:], own, dout[:, :, path][:, :, of_leaf:])
        for total, gradient in zip(alone, found, strict=True):
            total.index_add_(2, torch.tensor(path, dtype=torch.long), gradient)
    packed = torch.autograd.grad(out[:, :, of_leaves], inputs, dout[:, :, of_leaves])
    torch.testing.assert_close(packed, tuple(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefix_tree_on_a_gpu_matches_the_formula_and_each_path(head_dim):
    parents, lengths = [-1, 0, 0, 2, 0, -1, 5], [700, 300, 129, 64, 1, 200, 333]
    n = sum(lengths) + 50
    inputs = [torch.randn(2, 4, n, head_dim, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    mask = block_masks.prefix_tree(torch.tensor(parents).cuda(), torch.tensor(lengths).cuda(), n)
    out = flex_attention(*inputs, block_mask=mask)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    seen = shown(parents, lengths, n).cuda()
    wanted = F.scaled_dot_product_attention(*exact, seen | ~seen.any(1, keepdim=True))
    wanted = wanted.masked_fill(~seen.any(1, keepdim=True), 0)
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-2)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, dout), torch.autograd.grad(wanted, exact, dout.float())
    for ours, theirs in zip(*grads, strict=True):
        assert (ours - theirs).square().mean().sqrt() < 2e-2 * theirs.square().mean().sqrt()
    for leaf in leaves(parents):
        path = tokens_of(lengths, path_of(parents, leaf))
        one = flash_attn_func(*(x[:, :, path].transpose(1, 2) for x in inputs), causal=True)
        torch.testing.assert_close(out[:, :, path], one.transpose(1, 2), rtol=2e-2, atol=2e-2)


def test_prefix_tree_of_the_last_queries_alone():
    """Drafts of one token per node beside a cache of the root."""
    past, parents = 40, [-1, 0, 1, 1, 0, 4]
    lengths = [past] + [1] * 5
    whole = block_masks.prefix_tree(parents, lengths, device="cpu")

    def mask_mod(b, h, q_idx, kv_idx):
        return whole.mask_mod(b, h, q_idx + past, kv_idx)

    mask = create_block_mask(mask_mod, None, None, 5, past + 5, "cpu", 16)
    assert_same(mask, torch_create_block_mask(mask_mod, 1, 1, 5, past + 5, "cpu", 16))
    q, k, v = torch.randn(3, 1, 2, past + 5, 16)
    out = flex_attention(q[:, :, past:], k, v, block_mask=mask)
    wanted = F.scaled_dot_product_attention(q, k, v, shown(parents, lengths, past + 5))
    torch.testing.assert_close(out, wanted[:, :, past:], rtol=1e-4, atol=1e-5)


def test_prefix_tree_of_any_shape_is_one_program():
    calls = [
        trace(None, block_masks.prefix_tree(*tree, device="cpu").mask_mod, True) for tree in TREES.values()
    ]
    assert {call.program for call in calls} == {calls[0].program}
    assert [(x.dtype, x.ndim) for x in calls[0].tensors] == [(torch.int32, 1)] and not calls[0].numbers
    batches = [
        trace(None, block_masks.prefix_tree([parents] * 2, [lengths] * 2, device="cpu").mask_mod, True)
        for parents, lengths in TREES.values()
    ]
    assert {call.program for call in batches} == {batches[0].program}
    documents = trace(None, block_masks.documents(torch.zeros(9, dtype=torch.int32)).mask_mod, True)
    programs = [call.program.with_bits[0] for call in (calls[0], calls[1], batches[0], documents)]
    problems = [AttnProblem.of("bfloat16", 128, 128, False, "bwd", (), program) for program in programs]
    assert problems == problems[:1] * 4, "kernels of lists with bits serve all of them"


def test_prefix_tree_of_inference_mode_has_bits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with torch.inference_mode():
        mask = block_masks.prefix_tree(torch.tensor([-1, 0, 0]), torch.tensor([200, 70, 40]))
    lists = kept_mask(mask).lists(1, 2)
    assert lists_with_bits(trace(None, mask.mask_mod, False), lists) is not None


def test_prefix_tree_of_fake_tensors_is_not_read():
    with FakeTensorMode():
        nodes = torch.zeros(3, dtype=torch.int32)
        mask = block_masks.prefix_tree(nodes, nodes, 500)
        assert mask.kv_indices.shape == (1, 1, 4, 4)
        assert block_masks.prefix_tree([-1, 0], [300, 200], device="cpu").seq_lengths == (500, 500)
        with pytest.raises(
            ValueError, match=r"^seqlen: expected an int beside lengths on cpu, which are not"
        ):
            block_masks.prefix_tree(nodes, nodes)


def test_prefix_tree_in_compiled_code_is_made_outside_of_the_graph():
    def of(x, tree):
        mask = block_masks.prefix_tree(*tree, device="cpu")
        return flex_attention(x, x, x, block_mask=mask), block_masks.prefix_tree_positions(
            *tree, device="cpu"
        )

    compiled, x = torch.compile(of, backend="eager"), torch.randn(1, 1, 19, 16)
    for tree in (TREES["prompt and answers"], ([-1, 0, 1], [3, 9, 7])):
        for ours, eager in zip(compiled(x, tree), of(x, tree), strict=True):
            torch.testing.assert_close(ours, eager)


def test_prefix_tree_values_are_checked_on_request(monkeypatch):
    """A tensor that is not on the CPU is read where TL_ATTENTION_CHECK_LENGTHS asks for it."""
    read = torch.tensor([-1, 1])
    monkeypatch.setattr(checks, "_is_read", lambda x: False)
    block_masks.prefix_tree(read, [3, 4])
    monkeypatch.setattr(checks, "_is_read", lambda x: True)
    with pytest.raises(ValueError, match="^parents: expected depth-first order"):
        block_masks.prefix_tree(read, [3, 4])


def test_prefix_tree_example_agrees_with_separate_sequences(monkeypatch, capsys):
    path = Path(__file__).parents[1] / "examples/prefix_tree.py"
    monkeypatch.setattr("sys.argv", [str(path), "--prompt", "30", "--answers", "2"])
    runpy.run_path(str(path), run_name="__main__")
    text = capsys.readouterr().out
    found = re.findall(r"answer \d: log-probability (\S+) packed, (\S+) alone", text)
    assert len(found) == 2 and all(abs(float(x) - float(y)) < 0.01 for x, y in found)
    assert float(re.search(r"at most (\S+) of their norms", text)[1]) < 1e-2


TREE = torch.tensor([-1, 0, 0])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([-1, 0, 0, 1], [1] * 4), ValueError, "parents: expected depth-first order, in which the parent of a node is the node before it"),
        (([-1, 0, 0, 1], [1] * 4), ValueError, 'got 1 for node 3; sort the nodes as "Prefix trees" of docs/flex.md shows'),
        (([-1, 2, 0], [1] * 3), ValueError, "got 2 for node 1"),
        (([-1, 1], [1] * 2), ValueError, "got 1 for node 1"),
        (([0, 0], [1] * 2), ValueError, "got 0 for node 0"),
        (([-1, -2], [1] * 2), ValueError, "got -2 for node 1"),
        (([-1, 0, -1, 0], [1] * 4), ValueError, "got 0 for node 3"),
        (([[-1, 0], [-1, -1, 0]], [[1] * 2, [1] * 3]), ValueError, "parents[1]: expected depth-first order"),
        ((torch.tensor([[-1, 0], [1, 0]]), torch.ones(2, 2).int()), ValueError, "parents[1]: expected depth-first order"),
        (([-1, 0], [3, -1]), ValueError, "lengths: expected at least 0, got -1 as lengths[1]"),
        (([-1, 0], [[3, 4], [3, -1]]), ValueError, "lengths: expected at least 0, got -1 as lengths[1][1]"),
        (([-1, 0], [3]), ValueError, "lengths: expected a length per node of parents, 2, got 1"),
        (([[-1, 0], [-1]], [[3, 4], [3, 4]]), ValueError, "per node of parents, [2, 1] in 2 batch entries, got 2 in each of 2 batch"),
        (([-1, 0], [[3, 4], [3]]), ValueError, "per node of parents, 2, got [2, 1] in 2 batch entries"),
        ((TREE.expand(2, 3), TREE.new_ones(4, 3)), ValueError, "3 in each of 2 batch entries, got 3 in each of 4 batch entries"),
        (([], []), ValueError, "parents: expected at least one node, got []"),
        ((TREE[:0], TREE[:0]), ValueError, "parents: expected 1 or 2 dimensions and at least one element"),
        ((TREE.float(), [1] * 3), TypeError, "parents: expected torch.int32 or torch.int64, got torch.float32; cast it"),
        ((TREE, TREE.view(1, 1, 3)), ValueError, "lengths: expected 1 or 2 dimensions"),
        (([-1, 0.0], [1, 1]), TypeError, "parents: expected 32-bit ints, a list of them per batch entry, or a torch.Tensor, got [-1, 0.0]"),
        (([-1, 0], [1, True]), TypeError, "lengths: expected 32-bit ints, a list of them per batch entry, or a torch.Tensor, got [1, True"),
        (([-1, [0]], [1, 1]), TypeError, "parents: expected 32-bit ints, a list of them per batch entry"),
        ((TREE.numpy(), [1] * 3), TypeError, "parents: expected 32-bit ints, a list of them per batch entry, or a torch.Tensor, got array"),
        (([-1], [10**20]), TypeError, "lengths: expected 32-bit ints, a list of them per batch entry, or a torch.Tensor, got [1000"),
        ((TREE.numpy(), [1] * 3), TypeError, "; pass torch.as_tensor(parents)"),
        ((None, [1]), TypeError, "parents: expected 32-bit ints, a list of them per batch entry, or a torch.Tensor, got None"),
        (([-1, 0], [3, 4], 6), ValueError, "seqlen: expected at least the sum of lengths, 7, got 6"),
        (([-1, 0], [3, 4], 7.0), TypeError, "seqlen: expected an int, got 7.0"),
        (([-1], TREE.to("meta")[:1]), ValueError, "seqlen: expected an int beside lengths on meta, which are not read, got None; pass"),
        ((TREE.to("meta"), [1] * 3, 9, "cpu"), ValueError, "parents: expected a tensor on the device of the mask, cpu, or on the"),
        (([-1, 0], [0, 0]), ValueError, "seqlen: expected 1 to 16777216, got 0"),
    ],
)  # fmt: skip
def test_prefix_tree_refuses(arguments, error, words):
    for function in (block_masks.prefix_tree, block_masks.prefix_tree_positions):
        with pytest.raises(error, match=re.escape(words)):
            function(*arguments[:3], device=arguments[3] if len(arguments) > 3 else None)


def test_lists_do_not_follow_the_default_device():
    with torch.device("meta"):
        mask = block_masks.prefix_tree([-1, 0, 0], [3, 4, 2], device="cpu")
        positions = block_masks.prefix_tree_positions([-1, 0, 0], [3, 4, 2], device="cpu")
    assert mask.kv_indices.device.type == positions.device.type == "cpu"


def test_prefix_tree_refuses_words_of_its_arguments():
    with pytest.raises(ValueError, match=r"^block_size: expected an int from 1"):
        block_masks.prefix_tree([-1], [3], device="cpu", block_size=0)
    with pytest.raises(ValueError, match=r"^device: expected a device of torch, got 'abacus'"):
        block_masks.prefix_tree([-1], [3], device="abacus")
