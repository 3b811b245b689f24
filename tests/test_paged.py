"""flash_attn_varlen_func with keys in pages (block_table), and with out: results by the error rule, on CPU and GPU, and errors.

Unused rows of pages and all of out hold NaN before, and unused entries of the table are out of range.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from tl_attention import flash_attn_varlen_func
from tl_attention.config import configs, legality
from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.integrations import torch_backend
from tl_attention.problem.attn_problem import SPLIT_BUCKET, TILE_WIDTHS, AttnProblem
from tl_attention.testing.numeric import check_fwd
from tl_attention.testing.shapes import Shape
from tl_attention.tuning.needs import kernels_of

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16, FP16 = torch.bfloat16, torch.float16
gpu = pytest.mark.gpu
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
# (head_dim, head_dim_v, dtype, options, page sizes): most of them kernels of the manifest
CLASSES = [
    (128, 128, BF16, "causal", [16, 64, 256]),
    (128, 128, FP16, "", [48]),
    (128, 128, BF16, "window sink", [16, 64]),
    (128, 128, BF16, "window softcap sink", [32]),
    (128, 128, BF16, "window softcap alibi sink", [16]),
    (64, 64, BF16, "causal sink", [16]),
    (64, 64, BF16, "window sink", [80, 128]),
    (96, 96, BF16, "window sink", [16, 64]),
    (96, 64, BF16, "window sink", [16]),
    (192, 128, BF16, "window sink", [16, 64]),
    (192, 192, BF16, "window sink", [16]),
    (256, 256, BF16, "causal sink", [16, 64]),
]
LENGTHS_Q = (300, 1, 0, 77, 129, 1, 5)
LENGTHS_K = (400, 333, 50, 0, 517, 64, 1000)


@dataclasses.dataclass
class Case:
    """A call with random normal values in the rows that sequences use, NaN in all others."""

    head_dim: int = 128
    head_dim_v: int = 128
    dtype: torch.dtype = BF16
    options: str = "causal"
    page: int = 16
    heads: int = 4
    heads_kv: int = 2
    lengths_q: tuple[int, ...] = LENGTHS_Q
    lengths_k: tuple[int, ...] = LENGTHS_K
    used_q: tuple[int, ...] | None = None
    num_splits: int = 1
    heads_first: bool = False  # memory layout of the pages
    device: str = "cuda"
    seed: int = 0

    def __post_init__(self):
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        total_k, pages_of = sum(self.lengths_k), [-(-n // self.page) for n in self.lengths_k]
        num_pages, wide = sum(pages_of) + 3, max(pages_of) + 2
        self.q = self.randn(sum(self.lengths_q) + 5, self.heads, self.head_dim)  # 5 rows of no sequence
        self.dense = [self.randn(total_k, self.heads_kv, width) for width in (self.head_dim, self.head_dim_v)]
        numbers = torch.randperm(num_pages, generator=torch.Generator().manual_seed(self.seed)).tolist()
        free = iter(numbers)
        rows = [[next(free) if i < n else (-7, 2**30)[i % 2] for i in range(wide)] for n in pages_of]
        self.table = self.ints(rows)
        self.pages = []
        for x in self.dense:
            shape = num_pages, self.page, *x.shape[1:]
            if self.heads_first:
                pages = x.new_full((shape[0], shape[2], shape[1], shape[3]), math.nan).transpose(1, 2)
            else:
                pages = x.new_full(shape, math.nan)
            for b, start in enumerate(itertools.accumulate(self.lengths_k[:-1], initial=0)):
                j = torch.arange(self.lengths_k[b], device=self.device)
                pages[self.table[b, j // self.page].long(), j % self.page] = x[start + j]
            self.pages.append(pages)
        self.cu_q, self.cu_k = (starts(n, self.device) for n in (self.lengths_q, self.lengths_k))
        names = self.options.split()
        self.keywords = {"causal": "causal" in names}
        self.reference = {}
        if "window" in names:
            self.keywords["window_size"] = self.reference["window"] = (100, 30)
        if "softcap" in names:
            self.keywords["softcap"] = self.reference["softcap"] = 2.0
        if "alibi" in names:
            slopes = 0.3 * torch.rand(self.heads, generator=self.generator, device=self.device)
            self.keywords["alibi_slopes"] = self.reference["alibi_slopes"] = slopes
        if "sink" in names:
            sink = torch.randn(self.heads, generator=self.generator, device=self.device)
            self.keywords["learnable_sink"] = self.reference["sink"] = sink
        self.seqused_k = self.ints(self.lengths_k)  # here, as a graph capture cannot copy from the CPU
        if self.used_q is not None:
            self.keywords["seqused_q"] = self.reference["seqused_q"] = self.ints(self.used_q)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(self.dtype)

    def ints(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def call(self, **changes):
        """(out, lse) of the call with pages."""
        keywords = {
            "cu_seqlens_q": self.cu_q,
            "cu_seqlens_k": None,
            "max_seqlen_q": max(self.lengths_q, default=0),
            "max_seqlen_k": max(self.lengths_k, default=0) + 100,
            "seqused_k": self.seqused_k,
            "block_table": self.table,
            "num_splits": self.num_splits,
            "return_attn_probs": True,
            **self.keywords,
        }
        out, lse, _ = flash_attn_varlen_func(self.q, *self.pages, **keywords | changes)
        return out, lse

    def compare(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Check the rows of sequences by the error rule."""
        rows = sum(self.lengths_q)
        lengths = {"cu_seqlens_q": self.cu_q, "cu_seqlens_k": self.cu_k}
        arguments = self.q[:rows], *self.dense, None, self.keywords["causal"]
        comparison = check_fwd(out[:rows], lse[:, :rows], *arguments, **lengths, **self.reference)
        assert comparison.ok, comparison.text


def starts(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def check(case: Case, **changes) -> None:
    out = torch.full((*case.q.shape[:2], case.head_dim_v), math.nan, dtype=case.dtype, device=case.device)
    result, lse = case.call(out=out, **changes)
    assert result is out
    case.compare(out, lse)


@devices
def test_paged_matches_the_reference(device):
    check(Case(device=device))
    check(Case(64, 64, options="window sink", page=32, device=device, heads_first=True))
    names = "window softcap alibi sink"
    check(Case(64, 64, options=names, page=48, device=device, used_q=(290, 1, 0, 0, 1, 1, 5)))


@gpu
@pytest.mark.parametrize(("head_dim", "head_dim_v", "dtype", "options", "pages"), CLASSES)
def test_paged_matches_the_reference_in_every_class(head_dim, head_dim_v, dtype, options, pages):
    for seed, page in enumerate(pages):
        check(Case(head_dim, head_dim_v, dtype, options, page, seed=seed))


@gpu
@pytest.mark.parametrize("page", [16, 64, 80])
@pytest.mark.parametrize("num_splits", [2, 7])
def test_paged_splits_match_the_reference(page, num_splits):
    check(Case(page=page, num_splits=num_splits))
    check(Case(page=page, num_splits=num_splits, heads_first=True, seed=1))


@gpu
@pytest.mark.parametrize("page", [16, 64])
def test_paged_matches_packed_keys_bit_by_bit(page):
    lengths = {"lengths_q": (512, 3, 700), "lengths_k": (2000, 5000, 700)}
    case = Case(page=page, **lengths)
    longest = case.cu_q, case.cu_k, 700, 5000
    rows = sum(lengths["lengths_q"])
    out, lse = case.call()
    packed = {"causal": True, "num_splits": 1, "return_attn_probs": True}
    dense_out, dense_lse, _ = flash_attn_varlen_func(case.q, *case.dense, *longest, **packed)
    assert torch.equal(out[:rows], dense_out[:rows])
    assert torch.equal(lse[:, :rows], dense_lse[:, :rows])


@gpu
def test_paged_lengths_change_in_a_graph():
    sizes = {"head_dim": 64, "head_dim_v": 64, "options": "causal sink", "lengths_q": (40, 1, 128)}
    case = Case(**sizes, lengths_k=(500, 333, 1000))
    used, longest = case.ints(case.lengths_k), torch.tensor(5000)
    case.call(seqused_k=used, max_seqlen_k=longest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.call(seqused_k=used, max_seqlen_k=longest)
    for lengths_k in ((500, 333, 1000), (41, 0, 999), (1, 100, 600)):
        other = Case(**sizes, lengths_k=lengths_k, seed=7)
        case.keywords["learnable_sink"].copy_(other.keywords["learnable_sink"])
        for page, x in zip(case.pages, other.pages, strict=True):
            page[: x.shape[0]] = x
        case.table.fill_(-1)
        case.table[:, : other.table.shape[1]] = other.table[:, : case.table.shape[1]]
        used.copy_(other.ints(lengths_k))
        case.q.copy_(other.q)
        graph.replay()
        other.compare(out, lse)


@gpu
def test_paged_keys_past_the_table_are_not_read():
    case = Case(page=16, lengths_q=(64, 64), lengths_k=(160, 320))
    narrow = case.table[:, :10].contiguous()  # 160 keys per sequence
    out, _ = case.call(block_table=narrow, seqused_k=case.ints((160, 10**6)), max_seqlen_k=10**6)
    wanted, _ = case.call()
    assert torch.equal(out[:64], wanted[:64])
    assert not out[64:128].isnan().any()


@gpu
def test_paged_keys_above_2_to_the_31_elements():
    case = Case(lengths_q=(130,), lengths_k=(300,), page=64)
    num_pages = 2**31 // (64 * 2 * 128) + 40
    pages = [torch.zeros(num_pages, 64, 2, 128, dtype=BF16, device="cuda") for _ in range(2)]
    table = case.table.clone()
    for b, i in itertools.product(range(1), range(5)):
        table[b, i] = num_pages - 1 - i
        for x, small in zip(pages, case.pages, strict=True):
            x[num_pages - 1 - i] = small[case.table[b, i]].nan_to_num()
    out, lse = flash_attn_varlen_func(
        case.q, *pages, case.cu_q, None, 130, 300, causal=True, return_attn_probs=True,
        seqused_k=case.ints((300,)), block_table=table, num_splits=1,
    )[:2]  # fmt: skip
    case.compare(out, lse)


@devices
def test_paged_lengths_of_cu_seqlens_k_are_those_of_seqused_k(device):
    case = Case(device=device)
    out, lse = case.call()
    other, other_lse = case.call(cu_seqlens_k=case.cu_k, seqused_k=None)
    rows = sum(case.lengths_q)
    assert torch.equal(out[:rows], other[:rows])
    assert torch.equal(lse[:, :rows], other_lse[:, :rows])


@devices
def test_paged_without_keys_or_queries(device):
    case = Case(64, 64, options="causal sink", lengths_q=(3, 2), lengths_k=(0, 0), device=device)
    for changes in ({}, {"block_table": case.table[:, :0]}):
        out, lse = case.call(**changes)
        assert not out[:5].any()
        assert torch.equal(lse[:, :5], case.keywords["learnable_sink"][:, None].expand(-1, 5))
    case = Case(64, 64, lengths_q=(), lengths_k=(5,), device=device)
    case.q, case.table = case.q[:0], case.table[:0]
    out, lse = case.call(max_seqlen_q=0, max_seqlen_k=0, seqused_k=case.ints([]), cu_seqlens_q=case.ints([0]))
    assert out.shape == (0, 4, 64)
    assert lse.shape == (4, 0)


@devices
def test_out_of_packed_keys_is_the_tensor_passed(device):
    case = Case(device=device)
    lengths = case.cu_q, case.cu_k, max(case.lengths_q), max(case.lengths_k)
    options = {"causal": True, "num_splits": 1}
    wanted = flash_attn_varlen_func(case.q, *case.dense, *lengths, **options)
    out = torch.full_like(wanted, math.nan)
    assert flash_attn_varlen_func(case.q, *case.dense, *lengths, **options, out=out) is out
    rows = sum(case.lengths_q)
    assert torch.equal(out[:rows], wanted[:rows])


@devices
def test_paged_in_compiled_code(device):
    case = Case(64, 64, options="causal sink", device=device)
    rows = sum(case.lengths_q)
    wanted, wanted_lse = case.call()
    out = torch.zeros_like(wanted)

    def call(q, out, table):
        case.q = q
        result, lse = case.call(out=out, block_table=table)
        return result * 2, lse, case.call(block_table=table)[0]

    backend = "inductor" if device == "cuda" else "aot_eager"
    doubled, lse, again = torch.compile(call, fullgraph=True, backend=backend)(case.q, out, case.table)
    for x in (out, doubled / 2, again):
        assert torch.equal(x[:rows], wanted[:rows])
    assert torch.equal(lse[:, :rows], wanted_lse[:, :rows])


def small(**changes):
    """Arguments of a call on the CPU with two sequences, of 20 and 40 keys in pages of 16."""
    case = Case(64, 64, device="cpu", lengths_q=(3, 2), lengths_k=(20, 40))
    k, v = (x.nan_to_num() for x in case.pages)
    arguments = {
        "q": case.q[:5], "k": k, "v": v, "cu_seqlens_q": case.cu_q, "cu_seqlens_k": None, "max_seqlen_q": 3, "max_seqlen_k": 40,
        "seqused_k": case.ints((20, 40)), "block_table": case.table,
    }  # fmt: skip
    return arguments | changes


def zeros(*shape, dtype=BF16):
    return torch.zeros(*shape, dtype=dtype)


ERRORS = {
    "k-packed": ({"k": zeros(9, 2, 64)}, ValueError, r"k: expected 4 dimensions \[pages, page_size, heads_kv, head_dim\], got"),
    "q-4-d": ({"q": zeros(1, 5, 4, 64)}, ValueError, r"q: expected 3 dimensions \[total_q, heads, head_dim\]"),
    "v-shape": ({"v": zeros(3, 16, 2, 64)}, ValueError, r"v: expected the shape of k, .*but for the last dimension, got \(3, 16"),
    "k-head-dim": ({"k": zeros(8, 16, 2, 32)}, ValueError, r"k: expected the head_dim of q, 64, got 32"),
    "dtype": ({"k": zeros(8, 16, 2, 64, dtype=FP16)}, TypeError, r"k: expected the dtype of q, torch\.bfloat16, got torch\.float16"),
    "fp32": ({"q": torch.zeros(5, 4, 64)}, TypeError, r"q: expected bfloat16 or float16 with block_table, got torch\.float32"),
    "heads": ({"q": zeros(5, 3, 64)}, ValueError, r"k, v: expected a number of heads that divides the 3 of q, got 2"),
    "page-size": (
        {"k": zeros(8, 24, 2, 64), "v": zeros(8, 24, 2, 64)}, ValueError, r"k: expected a page_size that is a multiple of 16, got 24",
    ),
    "odd-head-dim": (
        {"q": zeros(5, 4, 60), "k": zeros(8, 16, 2, 60), "v": zeros(8, 16, 2, 60)}, ValueError,
        r"q, k, v: expected head dims that are multiples of 8, as pages are never copied, got 60",
    ),
    "large-head-dim": (
        {"q": zeros(5, 4, 264), "k": zeros(8, 16, 2, 264), "v": zeros(8, 16, 2, 264)}, NotImplementedError,
        r"q, k, v: expected a head_dim of at most 256",
    ),
    "large-odd-head-dim": (
        {"q": zeros(5, 4, 300), "k": zeros(8, 16, 2, 300), "v": zeros(8, 16, 2, 300)}, NotImplementedError,
        r"q, k, v: expected a head_dim of at most 256",
    ),
    "wide-values": (
        {"v": zeros(8, 16, 2, 128)}, NotImplementedError, r"v: expected a head_dim of at most that of q and k, 64, got 128.*; allocate",
    ),
    "strides": (
        {"k": zeros(8, 16, 2, 68)[..., :64], "v": zeros(8, 16, 2, 68)[..., :64]}, ValueError,
        r"k: expected strides that are positive multiples of 8, as a cache is never copied",
    ),
    "table-dtype": ({"block_table": zeros(2, 5, dtype=torch.int64)}, TypeError, r"block_table: expected torch\.int32, got torch\.int64"),
    "table-batch": ({"block_table": zeros(3, 5, dtype=torch.int32)}, ValueError, r"block_table: expected shape \(2, 5\), got \(3, 5\)"),
    "table-list": ({"block_table": [[0]]}, TypeError, r"got list; pass torch\.as_tensor\(block_table, dtype=torch\.int32\)"),
    "cu-0-d": ({"cu_seqlens_q": torch.tensor(5).int()}, ValueError, r"cu_seqlens_q: expected shape \[batch \+ 1\], got \(\)"),
    "no-lengths": ({"seqused_k": None}, ValueError, r"cu_seqlens_k, seqused_k: expected one of them.*pass seqused_k"),
    "seqused-shape": ({"seqused_k": zeros(3, dtype=torch.int32)}, ValueError, r"seqused_k: expected shape \(2,\), got \(3,\)"),
    "dropout": ({"dropout_p": 0.1}, NotImplementedError, r"dropout_p: expected 0 with block_table.*got 0\.1"),
    "causal": ({"causal": 1}, TypeError, r"causal: expected a bool, got 1"),
    "scale": ({"softmax_scale": math.inf}, ValueError, r"softmax_scale: expected a finite number"),
    "splits": ({"num_splits": -1}, ValueError, r"num_splits: expected at least 0"),
    "check": ({"check_lengths": 1}, TypeError, r"check_lengths: expected a bool, got 1"),
    "out-shape": ({"out": zeros(4, 4, 64)}, ValueError, r"out: expected shape \(5, 4, 64\), got \(4, 4, 64\)"),
    "out-dtype": ({"out": zeros(5, 4, 64, dtype=FP16)}, TypeError, r"out: expected the dtype of q, torch\.bfloat16, got torch\.float16"),
    "out-strides": ({"out": zeros(4, 5, 64).transpose(0, 1)}, ValueError, r"out: expected a contiguous tensor"),
    "out-address": ({"out": zeros(5 * 4 * 64 + 1)[1:].view(5, 4, 64)}, ValueError, r"out: expected an address that is a multiple of 16"),
    "page-number": (
        {"block_table": torch.tensor([[0, 1, 2], [3, 99, 4]]).int()}, IndexError,
        r"block_table\[1, 1\]: expected 0 to 7, a page of k, got 99",
    ),
    "long": (
        {"block_table": torch.tensor([[0, 1], [3, 2]]).int()}, IndexError,
        r"seqused_k\[1\]: expected 0 to 32, as sequence 1 has room for 32 keys, got 40",
    ),
    "long-cu": (
        {"seqused_k": None, "cu_seqlens_k": torch.tensor([0, 20, 10]).int()}, IndexError,
        r"cu_seqlens_k\[2\]: expected 20 to 100, as sequence 1 has room for 80 keys, got 10",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_paged_errors(changes, error, text):
    with pytest.raises(error, match=text):
        flash_attn_varlen_func(**small(**changes))


def test_out_refuses_fp32_by_name():
    q, cu_seqlens = torch.zeros(5, 4, 64), torch.tensor([0, 5]).int()
    with pytest.raises(TypeError, match=r"q: expected bfloat16 or float16 with out, got torch\.float32"):
        flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 5, 5, out=torch.zeros_like(q))


def test_out_is_not_an_input():
    arguments = small()
    with pytest.raises(ValueError, match="out: expected memory that q, k and v do not use"):
        flash_attn_varlen_func(**arguments, out=arguments["q"])


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("rows", [-3, 0, 3])
def test_out_may_share_no_memory_with_an_input(name, rows):
    """out that begins before an input, where it does, or inside it."""
    memory = zeros(10, 4, 64)
    tensors = {"q": zeros(4, 4, 64), "k": zeros(4, 4, 64), "v": zeros(4, 4, 64), name: memory[3:7]}
    starts = torch.tensor([0, 4]).int()
    arguments = {
        **tensors,
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }
    text = f"^out: expected memory that q, k and v do not use, .* bytes that {name} spans, too, from byte {max(-rows, 0) * 512} of out on"
    with pytest.raises(ValueError, match=text):
        flash_attn_varlen_func(**arguments, out=memory[3 + rows : 7 + rows])


def test_out_may_share_no_memory_with_pages():
    pool = zeros(12 * 16 * 4 * 64)
    pages = pool[: 8 * 16 * 2 * 64].view(8, 16, 2, 64)
    for first, fails in ((1024, True), (pages.numel() - 64, True), (pages.numel(), False)):
        out = pool[first:][: 5 * 4 * 64].view(5, 4, 64)
        arguments = small(k=pages)
        if not fails:
            assert flash_attn_varlen_func(**arguments, out=out) is out
            continue
        with pytest.raises(
            ValueError, match=r"^out: expected memory that q, k and v do not use, .* that k spans, too"
        ):
            flash_attn_varlen_func(**arguments, out=out)


def test_out_lies_between_its_inputs_in_one_buffer():
    """Neighbours in memory, and rows of one token between those of packed q, k and v, share nothing."""
    starts = torch.tensor([0, 1]).int()
    q, k, v, out = torch.randn(1, 4, 2, 64, dtype=BF16).unbind(1)
    assert flash_attn_varlen_func(q, k, v, starts, starts, 1, 1, out=out) is out
    torch.testing.assert_close(out, v)


def test_pages_and_out_refuse_negated_views():
    arguments = small()
    for name, x in (("k", arguments["k"]), ("v", arguments["v"]), ("out", zeros(5, 4, 64))):
        text = f"^{name}: expected a tensor whose memory holds its values, as it is never copied, got a lazily negated view"
        with pytest.raises(ValueError, match=text):
            flash_attn_varlen_func(**arguments | {name: torch._neg_view(x)})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_paged_and_out_refuse_gradients_by_name(name):
    arguments = small()
    arguments[name] = arguments[name].requires_grad_()
    text = f"{name}: expected a tensor that needs no gradient, as a call with"
    with pytest.raises(NotImplementedError, match=f"{text} block_table has no backward"):
        flash_attn_varlen_func(**arguments)
    with torch.no_grad():
        flash_attn_varlen_func(**arguments)
    packed = {x: arguments[x].flatten(0, 1) for x in ("k", "v")}
    packed |= {
        "q": arguments["q"],
        "cu_seqlens_k": torch.tensor([0, 20, 60]).int(),
        "block_table": None,
        "seqused_k": None,
    }
    if name == "q":
        with pytest.raises(NotImplementedError, match=f"{text} out has no backward"):
            flash_attn_varlen_func(**arguments | packed, out=torch.zeros_like(arguments["q"]))
    with pytest.raises(
        NotImplementedError, match=r"learnable_sink: expected a tensor that needs no gradient"
    ):
        flash_attn_varlen_func(**small(), learnable_sink=torch.zeros(4, requires_grad=True))
    with pytest.raises(NotImplementedError, match=r"out: expected a tensor that needs no gradient"):
        flash_attn_varlen_func(**small(), out=torch.zeros(5, 4, 64, dtype=BF16, requires_grad=True))


@devices
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"table": (1, 1, 99)}, r"block_table\[1, 1\]: expected 0 to 7, a page of k, got 99"),
        ({"table": (0, 0, -2)}, r"block_table\[0, 0\]: expected 0 to 7, a page of k, got -2"),
        (
            {"seqused_k": (20, 81)},
            r"seqused_k\[1\]: expected 0 to 80, as sequence 1 has room for 80 keys, got 81",
        ),
        ({"max_seqlen_k": 39}, r"max_seqlen_k: expected at least 40, the length of sequence 1, got 39"),
        ({"max_seqlen_q": 2}, r"max_seqlen_q: expected at least 3, the length of sequence 0, got 2"),
        ({"cu_seqlens_q": (0, 4, 3)}, r"cu_seqlens_q\[2\]: expected 4 to 5"),
    ],
)
def test_paged_check_lengths_names_the_value(device, changes, text):
    arguments = small(check_lengths=True)
    table = changes.pop("table", None) if "table" in (changes := dict(changes)) else None
    if table:
        arguments["block_table"][table[0], table[1]] = table[2]
    arguments |= {name: torch.tensor(x).int() if isinstance(x, tuple) else x for name, x in changes.items()}
    arguments = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with pytest.raises(IndexError, match=text):
        flash_attn_varlen_func(**arguments)


def test_paged_check_lengths_allows_garbage_past_the_end():
    arguments = small()
    arguments["block_table"][0, 2:] = 10**6
    wanted = flash_attn_varlen_func(**arguments)
    assert torch.equal(flash_attn_varlen_func(**arguments, check_lengths=True), wanted)


def test_paged_in_torchs_flash_op():
    arguments = small()
    wanted, lse, _ = flash_attn_varlen_func(**arguments, causal=True, return_attn_probs=True)
    q, k, v, cu_q, cu_k, *longest, used, table = arguments.values()
    for cum_seq_k in (cu_k, torch.tensor([0, 20, 60]).int()):
        out, torch_lse, *_ = torch_backend.flash_forward(
            q, k, v, cu_q, cum_seq_k, *longest, 0.0, True, False, seqused_k=used, block_table=table
        )
        assert torch.equal(out, wanted)
        assert torch.equal(torch_lse, lse)
    with pytest.raises(NotImplementedError, match="block_table: expected None with gradients"):
        torch_backend.flash_forward(
            q.requires_grad_(),
            k,
            v,
            cu_q,
            cu_k,
            *longest,
            0.0,
            True,
            False,
            seqused_k=used,
            block_table=table,
        )


def test_paged_kernels_are_known_before_a_call():
    for page, rows in ((16, 16), (48, 16), (64, 64), (256, 64)):
        shape = Shape.parse(f"2,32,8,512,3200,128,causal,varlen,page={page}")
        found = [
            config for _, config in kernels_of(shape, "bfloat16", "fwd") if isinstance(config, FwdConfig)
        ]
        assert [config.page_rows for config in found] == [rows, rows]
        assert [config.split for config in found] == [False, True]
    for text, direction in (("varlen,page=16", "bwd"), ("page=16", "fwd")):
        with pytest.raises(
            ValueError, match="expected page=.. with --pass decode, or with --pass fwd and varlen"
        ):
            kernels_of(Shape.parse(f"2,32,8,512,3200,128,causal,{text}"), "bfloat16", direction)


def test_paged_configs_are_legal_at_every_width():
    for width, options, page_rows, bucket in itertools.product(
        TILE_WIDTHS,
        [("varlen",), ("window", "softcap", "alibi", "sink", "varlen")],
        (16, 64),
        ("1k", SPLIT_BUCKET),
    ):
        problem = AttnProblem("bfloat16", *width, False, options)
        config = configs.option_config(problem, bucket).paged(problem, page_rows)
        assert legality.fault(problem, config) is None
    for options, page_rows in ((("varlen",), 48), ((), 16), (("dropout", "varlen"), 16)):
        problem = AttnProblem("bfloat16", 64, 64, False, options)
        assert "page_rows: expected" in legality.fault(problem, FwdConfig(128, 64, page_rows=page_rows))
