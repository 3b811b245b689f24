"""Kernels with options on a Hopper GPU, compared with the reference by the error rule, and their configs on any machine.

Unused rows of packed inputs hold NaN, and outputs start as NaN. Rows behind the last sequence must become 0, or -inf in the
log-sum-exp; unused rows of sequences must stay NaN, except in a forward with split keys.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tl_attention import launch
from tl_attention.compilation import building
from tl_attention.config import configs, legality
from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.problem.attn_problem import DIRECTIONS, OPTIONS, AttnProblem, tile_widths
from tl_attention.problem.options import Options
from tl_attention.reference import attention_backward_reference, dropout_keep, varlen_backward_reference
from tl_attention.testing.numeric import check_bwd, check_fwd

ALL = " ".join(OPTIONS)
# (head_dim, head_dim_v, causal, options): each line of configs/grid.toml at the commonest widths, each option alone, all together
CLASSES = [
    (128, 128, False, "window"),
    (128, 128, True, "softcap"),
    (128, 128, False, "window softcap"),
    (128, 128, True, "alibi"),
    (128, 128, False, "alibi"),
    (128, 128, False, "sink"),
    (128, 128, True, "dropout"),
    (128, 128, True, "varlen"),
    (128, 128, False, "window sink varlen"),
    (128, 128, False, ALL),
    (128, 128, False, "window alibi"),
    (64, 64, False, "window"),
    (64, 64, True, "softcap"),
    (64, 64, True, "alibi"),
    (64, 64, False, "alibi"),
    (64, 64, False, "window alibi"),
    (64, 64, True, "alibi varlen"),
    (64, 64, True, "sink"),
    (64, 64, True, "dropout"),
    (64, 64, False, "varlen"),
    (64, 64, False, "window varlen"),
    (64, 64, False, ALL),
    (96, 96, True, "varlen"),
    (96, 96, True, "softcap"),
    (96, 96, False, "window softcap"),
    (96, 96, False, ALL),
    (96, 64, False, "window"),
    (96, 64, False, "window softcap"),
    (192, 128, True, "varlen"),
    (192, 128, True, "softcap"),
    (192, 128, False, "window softcap"),
    (192, 128, False, ALL),
    (192, 192, False, "window sink varlen"),
    (192, 192, False, "window softcap"),
    (256, 128, False, "window softcap"),
    (256, 256, True, "varlen"),
    (256, 256, False, "softcap"),
    (256, 256, False, "window softcap"),
    (256, 256, False, ALL),
]
SCHEDULED = [
    FwdConfig(128, 64, schedule=schedule, q_stages=q_stages)
    for schedule, q_stages in [("grid", 1), ("persistent", 1), ("dynamic", 1), ("dynamic", 2)]
] + [FwdConfig(128, 64, schedule="dynamic", q_stages=2, hold_max=True)]
LENGTHS_Q, LENGTHS_K = [300, 0, 1, 517, 129, 64], [400, 50, 0, 517, 77, 1000]
USED_Q, USED_K = [290, 0, 1, 400, 128, 0], [333, 50, 0, 517, 0, 1000]


@dataclasses.dataclass
class Case:
    """A problem with options: random normal tensors, and the options in the form of a launch and of the reference."""

    head_dim: int
    head_dim_v: int
    causal: bool
    names: tuple[str, ...]
    heads: int = 4
    heads_kv: int = 2
    lengths_q: tuple[int, ...] = tuple(LENGTHS_Q)
    lengths_k: tuple[int, ...] = tuple(LENGTHS_K)
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    batch: int = 2
    seqlen_q: int = 333
    seqlen_k: int = 555
    window: tuple[int, int] = (100, 30)
    softcap: float = 2.0
    dropout_p: float = 0.2
    scale: float | None = None
    num_splits: int = 0
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    @property
    def varlen(self) -> bool:
        return "varlen" in self.names

    def __post_init__(self):
        self.generator = torch.Generator("cuda").manual_seed(self.seed)
        rows_q, rows_k = (self.batch, self.seqlen_q), (self.batch, self.seqlen_k)
        options, self.reference_options = {}, {}
        if self.varlen:
            self.batch = len(self.lengths_q)
            self.seqlen_q, self.seqlen_k = max(self.lengths_q), max(self.lengths_k)
            rows_q, rows_k = (
                (sum(self.lengths_q) + 5,),
                (sum(self.lengths_k) + 9,),
            )  # the last rows belong to no sequence
            lengths = {"cu_seqlens_q": starts(self.lengths_q), "cu_seqlens_k": starts(self.lengths_k)}
            for name, used in (("seqused_q", self.used_q), ("seqused_k", self.used_k)):
                if used is not None:
                    lengths[name] = torch.tensor(used, dtype=torch.int32, device="cuda")
            options |= {**lengths, "max_seqlen_q": self.seqlen_q, "max_seqlen_k": self.seqlen_k}
            self.reference_options |= lengths
        self.q, self.dout = (
            self.randn(*rows_q, self.heads, self.head_dim),
            self.randn(*rows_q, self.heads, self.head_dim_v),
        )
        self.k, self.v = (
            self.randn(*rows_k, self.heads_kv, self.head_dim),
            self.randn(*rows_k, self.heads_kv, self.head_dim_v),
        )
        shared = {}
        if "window" in self.names:
            shared["window"] = self.window
        if "softcap" in self.names:
            shared["softcap"] = self.softcap
        if "alibi" in self.names:
            shared["alibi_slopes"] = 0.3 * torch.rand(
                self.batch, self.heads, device="cuda", generator=self.generator
            )
        if "sink" in self.names:
            shared["sink"] = torch.randn(self.heads, device="cuda", generator=self.generator)
        options |= shared
        self.reference_options |= shared
        if "dropout" in self.names:
            state = torch.tensor([2**40 + self.seed, 77], device="cuda")
            sizes = self.batch, self.heads, self.seqlen_q, self.seqlen_k
            options |= {"dropout_p": self.dropout_p, "rng_state": state}
            self.reference_options |= {
                "dropout_p": self.dropout_p,
                "keep": dropout_keep(state, *sizes, self.dropout_p),
            }
        self.options = Options(**options, num_splits=self.num_splits)
        self.softmax_scale = self.head_dim**-0.5 if self.scale is None else self.scale

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=self.generator).to(self.dtype)

    def used(self, of_keys: bool) -> torch.Tensor:
        """Mask of the used rows of all sequences."""
        lengths, used = (self.lengths_k, self.used_k) if of_keys else (self.lengths_q, self.used_q)
        total = (self.k if of_keys else self.q).shape[0]
        mask = torch.zeros(total, dtype=torch.bool, device="cuda")
        for start, length in zip(itertools.accumulate(lengths, initial=0), used or lengths, strict=False):
            mask[start : start + length] = True
        return mask

    def poison(self, value: float) -> None:
        if self.varlen:
            for x, of_keys in ((self.q, False), (self.dout, False), (self.k, True), (self.v, True)):
                x[~self.used(of_keys)] = value

    def fill_unused(
        self, x: torch.Tensor, of_keys: bool, value: float, heads_first: bool = False, untouched: bool = True
    ) -> torch.Tensor:
        """An output with `value` in its unused rows. Those behind the last sequence must have it already, the others be untouched."""
        if not self.varlen:
            return x
        rows = x.mT if heads_first else x
        unused, end = ~self.used(of_keys), sum(self.lengths_k if of_keys else self.lengths_q)
        assert (rows[end:] == value).all(), "rows behind the last sequence were not cleared"
        assert not untouched or rows[:end][unused[:end]].isnan().all(), "unused rows were written"
        rows = rows.clone()
        rows[unused] = value
        return rows.mT if heads_first else rows


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def check(case: Case, deterministic: bool = False, config: FwdConfig | None = None) -> None:
    """Check forward and backward by the error rule. config: of the forward."""
    case.poison(math.nan)
    out = torch.full_like(case.q[..., : case.head_dim_v], math.nan).contiguous()
    *outer, seqlen, heads, _ = case.q.shape
    lse = torch.full((*outer, heads, seqlen), math.nan, device="cuda")
    q, k, v, dout, options, scale, causal = (
        case.q,
        case.k,
        case.v,
        case.dout,
        case.options,
        case.softmax_scale,
        case.causal,
    )
    forward = launch.fwd.FwdPlan(q, k, v, out, causal, False, options, config=config)
    forward(q, k, v, scale, False, options, out=out, lse=lse)
    assert forward.combine is not None or case.num_splits < 2
    grads = [torch.full_like(x, math.nan) for x in (q, k, v)]
    dlse = torch.randn(lse.shape, device="cuda", generator=case.generator)
    plan = launch.bwd.BwdPlan(dout, q, k, v, out, *grads, causal, False, deterministic, options)
    found = plan(dout, q, k, v, out, lse, scale, False, dlse, options, None, *grads)

    case.poison(0.0)
    kept = forward.combine is None
    filled = (
        case.fill_unused(out, False, 0.0, untouched=kept),
        case.fill_unused(lse, False, -math.inf, True, kept),
    )
    verdict = check_fwd(*filled, q, k, v, scale, causal, **case.reference_options)
    assert verdict.ok, verdict.text
    grads = [case.fill_unused(x, of_keys, 0.0) for x, of_keys in zip(grads, (False, True, True), strict=True)]
    if "sink" in case.names:
        reference = varlen_backward_reference if case.varlen else attention_backward_reference
        named = {"softmax_scale": scale, "causal": causal, "dlse": dlse}
        grads.append(reference(dout, q, k, v, **named, **case.reference_options)[3])
        check_sink_gradient(found["sink"], grads[-1], *filled, dout, dlse, case.options.sink)
    verdict = check_bwd(grads, dout, q, k, v, scale, causal, dlse, **case.reference_options)
    assert verdict.ok, verdict.text


def check_sink_gradient(
    dsink: torch.Tensor,
    expected: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    sink: torch.Tensor,
) -> None:
    """Check the gradient of a sink by a bound of its own.

    PyTorch's own error in bf16 may be 0 by chance: the gradient has few numbers, each a sum over all queries. The bound covers
    the rounding of out to 8 bits in rowsum(dO * O), and sums in fp32.
    """
    weights = (sink.float()[:, None] - lse).where(lse != -math.inf, -math.inf).exp()
    products = (dout.float() * out.float()).abs().sum(-1).mT
    error = (weights * (2**-8 * products + 2**-16 * dlse.nan_to_num(0.0).abs())).sum(-1)
    error = error if error.ndim == 1 else error.sum(0)
    assert ((dsink - expected).abs() <= error + 1e-4).all(), f"dsink {dsink}, expected {expected}"


classes = pytest.mark.parametrize(("head_dim", "head_dim_v", "causal", "names"), CLASSES)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@classes
def test_options_match_reference(head_dim, head_dim_v, causal, names, deterministic):
    check(Case(head_dim, head_dim_v, causal, tuple(names.split())), deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("scale", [-0.1, 0.0, 1e-30, 3.0])
def test_slope_of_a_linear_bias_is_independent_of_the_scale(scale, head_dim, causal):
    """Kernels that add the bias to raw scores divide slopes by the scale."""
    check(Case(head_dim, head_dim, causal, ("alibi",), scale=scale, seqlen_k=1500), False)


@pytest.mark.gpu
@pytest.mark.parametrize("one", CLASSES[:10], ids=str)
def test_options_where_scores_outgrow_a_held_row_max(one):
    *static, names = one
    case = Case(*static, tuple(names.split()), seqlen_k=1500, window=(700, 30), softcap=200.0, scale=5.0)
    check(case)


def shrink_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make head groups as small as if the L2 had one byte."""
    costs = launch.common.device_costs(torch.cuda.current_device())
    small = dataclasses.replace(costs, groups=dataclasses.replace(costs.groups, bytes=1))
    for module in (launch.fwd, launch.bwd):
        monkeypatch.setattr(module, "device_costs", lambda device: small)


@pytest.mark.gpu
@pytest.mark.parametrize("config", SCHEDULED, ids=str)
@pytest.mark.parametrize("names", ["window", "window sink varlen", "varlen", ALL])
def test_options_match_reference_in_every_schedule(names, config, monkeypatch):
    """More tiles than SMs, several head groups, and free entries in the tile table."""
    shrink_l2(monkeypatch)
    lengths = tuple((37 * i) % 300 for i in range(1, 60))
    named = tuple(names.split())
    case = Case(
        64, 64, "window" not in named, named, heads=6, lengths_q=lengths, lengths_k=lengths[::-1], batch=9
    )
    assert legality.fault(AttnProblem("bfloat16", 64, 64, case.causal, named), config) is None
    check(case, config=config)
    check(case, config=config)  # a second launch with the same tickets


packed_classes = pytest.mark.parametrize("one", [one for one in CLASSES if "varlen" in one[3]], ids=str)


@pytest.mark.gpu
@packed_classes
def test_unused_rows_are_neither_read_nor_written(one):
    *static, names = one
    check(Case(*static, tuple(names.split()), used_q=tuple(USED_Q), used_k=tuple(USED_K)))


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [2, 3, 7])
@packed_classes
def test_packed_sequences_with_split_keys_match_reference(one, num_splits):
    *static, names = one
    check(Case(*static, tuple(names.split()), num_splits=num_splits))


@pytest.mark.gpu
@packed_classes
def test_packed_sequences_with_split_keys_read_no_unused_row(one):
    *static, names = one
    used = {"used_q": tuple(USED_Q), "used_k": tuple(USED_K)}
    check(Case(*static, tuple(names.split()), **used, num_splits=3))


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [2, 1000])
def test_packed_sequences_with_split_keys_in_many_tiles(num_splits, monkeypatch):
    """Several head groups, free entries in the tile table, and more splits than key blocks."""
    shrink_l2(monkeypatch)
    lengths = tuple((37 * i) % 300 for i in range(1, 60))
    lengths = {"lengths_q": lengths, "lengths_k": lengths[::-1], "num_splits": num_splits}
    check(Case(64, 64, False, ("window", "varlen"), heads=6, **lengths))


# 128 and 60 queries: few tiles, and enough keys to split
FEW_TILES = {"heads": 2, "heads_kv": 1, "lengths_q": (128, 60), "lengths_k": (9001, 300)}


@pytest.mark.gpu
@pytest.mark.parametrize("names", ["varlen", "window sink varlen"])
def test_packed_sequences_of_few_tiles_are_split(names):
    causal = "window" not in names
    case = Case(128, 128, causal, tuple(names.split()), **FEW_TILES, window=(5000, 0))
    key = case.q, case.k, case.v, case.q, case.causal, False, case.options
    assert launch.fwd.FwdPlan(*key).combine is not None
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [0, 3])
def test_packed_sequences_with_split_keys_in_a_graph(num_splits):
    """Lengths change between replays."""
    case = Case(128, 128, True, ("varlen",), **FEW_TILES, num_splits=num_splits)
    q, k, v = (x[:n].clone() for x, n in ((case.q, 188), (case.k, 9301), (case.v, 9301)))
    run = functools.partial(launch.forward, q, k, v, 0.1, True, False, options=case.options)
    run()
    before = building.compile_count()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    for lengths_q, lengths_k in (((128, 60), (9001, 300)), ((1, 187), (0, 9301)), ((188, 0), (300, 9001))):
        case.options.cu_seqlens_q.copy_(starts(lengths_q))
        case.options.cu_seqlens_k.copy_(starts(lengths_k))
        expected = run()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        verdict = check_fwd(out, lse, q, k, v, 0.1, True, **case.reference_options)
        assert verdict.ok, verdict.text
    assert building.compile_count() == before


@pytest.mark.gpu
@pytest.mark.timeout(1800)  # its kernels are built one after the other where none is stored
@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_options_match_reference_on_any_problem(data):
    head_dim, head_dim_v, causal, names = data.draw(st.sampled_from(CLASSES))
    heads_kv = data.draw(st.sampled_from([1, 2, 3]))
    length, few = st.integers(0, 700), st.integers(1, 700)
    batch = data.draw(st.integers(1, 5))
    lengths_q, lengths_k = (data.draw(st.lists(length, min_size=batch, max_size=batch)) for _ in range(2))
    used_q, used_k = (
        data.draw(st.none() | st.tuples(*(st.integers(0, n) for n in lengths)))
        for lengths in (lengths_q, lengths_k)
    )
    # launch.forward and launch.backward handle empty tensors without a kernel
    lengths_q[0], lengths_k[0] = max(lengths_q[0], 1), max(lengths_k[0], 1)
    narrower = data.draw(st.sampled_from([0, 8])) if head_dim == head_dim_v else 0
    check(
        Case(
            head_dim - narrower,
            head_dim_v - narrower - (8 if head_dim == head_dim_v and data.draw(st.booleans()) else 0),
            causal,
            tuple(names.split()),
            heads=heads_kv * data.draw(st.sampled_from([1, 2, 5])),
            heads_kv=heads_kv,
            lengths_q=tuple(lengths_q),
            lengths_k=tuple(lengths_k),
            used_q=used_q,
            used_k=used_k,
            batch=data.draw(st.integers(1, 3)),
            seqlen_q=data.draw(few),
            seqlen_k=data.draw(few),
            window=data.draw(st.tuples(st.integers(0, 800) | st.just(2**30), st.integers(0, 300))),
            softcap=data.draw(st.sampled_from([0.5, 2.0, 30.0])),
            dropout_p=data.draw(st.sampled_from([0.01, 0.1, 0.5])),
            scale=data.draw(st.none() | st.sampled_from([-0.1, 0.0, 0.3])),
            num_splits=data.draw(st.sampled_from([0, 0, 1, 2, 5])),
            seed=data.draw(st.integers(0, 2**20)),
        ),
        data.draw(st.booleans()),
    )


@pytest.mark.gpu
def test_new_values_of_options_and_lengths_of_a_class_never_compile():
    case = {"head_dim": 128, "head_dim_v": 128, "causal": False, "names": tuple(ALL.split())}
    for num_splits in (1, 2):
        check(Case(**case, num_splits=num_splits))
    before = building.compile_count()
    check(
        Case(
            **case,
            window=(7, 250),
            softcap=11.0,
            dropout_p=0.5,
            lengths_q=(17, 900, 3),
            lengths_k=(1000, 30, 3),
            scale=0.3,
        )
    )
    assert building.compile_count() == before


@pytest.mark.gpu
def test_packed_sequences_equal_a_dense_batch():
    q, k, v = (torch.randn(3, 300, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lse = launch.forward(q, k, v, 0.1, True, False)
    cu_seqlens = torch.arange(0, 901, 300, dtype=torch.int32, device="cuda")
    options = Options(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=300, max_seqlen_k=300)
    packed_out, packed_lse = launch.forward(
        *(x.flatten(0, 1) for x in (q, k, v)), 0.1, True, False, options=options
    )
    torch.testing.assert_close(packed_out.view_as(out), out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(packed_lse.view(4, 3, 300).transpose(0, 1), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_tile_table_is_sorted_by_length():
    lengths = (100, 5000, 129, 0, 3000)
    cu_seqlens = starts(lengths)
    options = Options(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=5000, max_seqlen_k=5000)
    problem = AttnProblem("bfloat16", 64, 64, True, ("varlen",))
    kernel = building.compile_kernel(*configs.option_config(problem, "4k").kernels(problem)[-1])
    total = sum(lengths)
    out, lse = torch.empty(total, 8, device="cuda"), torch.empty(1, total, device="cuda")
    of_forward, of_backward = (
        launch.common.PackedTiles(kernel, len(lengths), total, total, True, 0) for _ in range(2)
    )
    of_forward.clear_behind([(1, total, 32)], 8)
    of_backward.clear_behind([(1, total, 32)] * 3, 8)
    ends = cu_seqlens.tolist()
    queries = of_forward.table(options, 128, out, lse)
    queries_too, keys = of_backward.tables(options, 128, out, out, out)
    for of_keys, table in ((False, queries), (False, queries_too), (True, keys)):
        rows = [row for row in table.tolist() if row[1] >= 0]
        blocks = [-(-n // 128) if of_keys else max(-(-n // 128), 1) for n in lengths]
        expected = {(b, block) for b, count in enumerate(blocks) for block in range(count)}
        assert {(b, block) for b, block, *_ in rows} == expected and len(rows) == len(expected)
        steps = [blocks[b] - block if of_keys else (block + 1) * (lengths[b] > 0) for b, block, *_ in rows]
        assert steps == sorted(steps, reverse=True)
        assert all(row[2:6] == [ends[row[0] + 1], lengths[row[0]]] * 2 for row in rows)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_each_problem_with_options_has_a_legal_config(direction):
    for count in range(1, len(OPTIONS) + 1):
        for options in itertools.combinations(OPTIONS, count):
            for width in tile_widths(direction, with_options=True):
                problem = AttnProblem("bfloat16", *width, "window" not in options, options)
                for bucket in ("1k", "split") if direction == "fwd" else ("1k",):
                    config = configs.option_config(problem, bucket, direction)
                    assert legality.fault(problem, config, direction) is None, (problem, config)
