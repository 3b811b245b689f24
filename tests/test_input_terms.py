"""fp32 inputs split beside attention: who makes which terms on any machine; on a Hopper GPU the same results as with a pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tl_attention import launch
from tl_attention.config import configs, legality
from tl_attention.config.costs import costs_of
from tl_attention.config.kernel_configs import BwdConfig, BwdPass, FirstTermsConfig, FwdConfig, TermsConfig
from tl_attention.config.term_configs import ITEM_ELEMENTS, splits_keys, stores_key_terms, term_items
from tl_attention.launch.common import tile_counts
from tl_attention.launch.terms import AttentionTiles, FirstTermsLaunch
from tl_attention.problem.attn_problem import FP32_DTYPES, AttnProblem
from tl_attention.problem.options import Options

GPU = "NVIDIA H200"
SMS = 132
CASES = [(dtype, width, causal) for dtype in FP32_DTYPES for width in (64, 128) for causal in (False, True)]


@pytest.mark.parametrize(("dtype", "width", "causal"), CASES)
@pytest.mark.parametrize("direction", ["fwd", "bwd", "bwd_det"])
def test_plain_fp32_makes_terms(dtype, width, causal, direction):
    problem = AttnProblem(dtype, width, width, causal)
    for bucket in ("1k", "4k", "long", *["split"] * (direction == "fwd")):
        config, _ = configs.pick_config(problem, bucket, GPU, direction)
        has_room = direction != "fwd" or (config.block_N, dtype) != (80, "float32-high")
        serves = direction != "bwd_det" or (dtype, width) == ("float32-high", 128)
        assert config.makes_terms == (has_room and serves and bucket != "split")
        kinds = {type(kernel) for _, kernel in config.kernels(problem)}
        assert kinds & {FirstTermsConfig, TermsConfig} == {
            FirstTermsConfig if config.makes_terms else TermsConfig
        }
    for other in (replace(problem, options=("varlen",)), AttnProblem("float32-high", 256, 256, causal)):
        assert not configs.pick_config(other, "4k", GPU, direction)[0].makes_terms


@pytest.mark.parametrize(
    ("problem", "config", "text"),
    [
        (("bfloat16", 128), {}, "for bfloat16, whose inputs have no terms"),
        (("float32-high", 256), {"block_N": 32, "kv_stages": 1}, "for head dims above 128"),
        (("float32-high", 128), {"split": True}, "with splits"),
        (("float32-high", 128, ("softcap",)), {}, "with options or a program"),
    ],
)
def test_term_stages_are_refused(problem, config, text):
    dtype, width, *options = problem
    problem = AttnProblem(dtype, width, width, False, *options)
    fault = legality.fault(problem, FwdConfig(**{"block_M": 128, "block_N": 64, "term_stages": 3} | config))
    assert fault.startswith(f"term_stages: expected 0 {text}")


def test_term_stages_are_of_the_first_pass_by_keys():
    problem = AttnProblem("float32-high", 128, 128, False)
    dk_dv, dq = BwdPass("dk+dv", 32, 128), BwdPass("dq", 128, 64, num_stages_do=1)
    makes = {"term_stages": 3}
    assert legality.fault(problem, BwdConfig((replace(dk_dv, **makes), dq))) is None
    fault = legality.fault(problem, BwdConfig((dk_dv, replace(dq, **makes))))
    assert fault.endswith("term_stages: expected 0 in the pass of dq alone, got 3")
    dk, dv = BwdPass("dk", 32, 128), BwdPass("dv", 64, 128)
    fault = legality.fault(problem, BwdConfig((dk, replace(dv, **makes), dq)))
    assert fault == "term_stages: expected 0 after the first pass, got 3"


def test_a_backward_that_makes_terms_may_have_a_cta_per_sm():
    """Only in one pass for all gradients: dk and dv in a pass of their own take as long with it."""
    high, one_pass = (
        AttnProblem("float32-high", 64, 64, True),
        BwdPass("dq+dk+dv", 64, 128, reuse_registers=True),
    )
    for stages in (0, 8):
        config = BwdConfig((replace(one_pass, schedule="dynamic", term_stages=stages),))
        assert legality.fault(high, config) is None
    fault = legality.fault(high, BwdConfig((replace(one_pass, schedule="dynamic-late"),)))
    assert fault.endswith("schedule: expected grid or dynamic here, got 'dynamic-late'")
    two = BwdPass("dk+dv", 64, 128, schedule="dynamic"), BwdPass("dq", 128, 128)
    assert "schedule: expected grid" in legality.fault(high, BwdConfig(two))
    with_options = replace(high, options=("window",))
    assert legality.fault(with_options, BwdConfig((replace(one_pass, schedule="dynamic"),))) is not None
    rows = [
        configs.pick_config(replace(high, causal=causal), bucket, GPU, "bwd")[0].passes[0].schedule
        for causal, bucket in ((True, "1k"), (True, "4k"), (False, "1k"), (False, "long"))
    ]
    assert rows == ["dynamic", "dynamic", "dynamic", "grid"]


def test_first_heads_of_a_backward_are_all_those_of_a_key_head():
    """A key tile reads the queries of all of its heads."""
    problem, (batch, heads, heads_kv) = AttnProblem("float32-high", 128, 128, True), (3, 24, 4)
    q = torch.empty(batch, 1000, heads, 128, device="meta")
    tiles = 8 * batch * heads_kv
    for sms in (1, 20, SMS):
        split = FirstTermsLaunch(
            None, problem, False, AttentionTiles(tiles, 8, tiles, costs_of(sms=sms), 6), q, q
        )
        assert split.heads % 6 == 0
        assert split.heads // 6 * 8 >= min(sms, tiles)


def test_the_first_pass_makes_dk():
    """Later passes read the terms of K and V that it stores."""
    problem = AttnProblem("float32-high", 128, 128, False)
    dk, dv, dq = BwdPass("dk", 32, 128), BwdPass("dv", 64, 128), BwdPass("dq", 128, 64, num_stages_do=1)
    assert legality.fault(problem, BwdConfig((dk, dv, dq))) is None
    for passes, got in (((dv, dk, dq), "dv"), ((dq, dk, dv), "dq")):
        assert legality.fault(problem, BwdConfig(passes)).endswith(f"for the others, got {got}")
    makes = [one.makes for one in (dk, dv, dq, BwdPass("dq+dk+dv", 32, 128))]
    assert [splits_keys(problem, names) for names in makes] == [True, False, False, True]
    assert [stores_key_terms(problem, names) for names in makes] == [True, False, False, False]
    assert not splits_keys(AttnProblem("bfloat16", 128, 128, False), ("dk", "dv"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("on_every_sm", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "heads_kv", "seqlen"),
    [(16, 16, 16, 1024), (1, 16, 16, 16384), (3, 6, 2, 1000), (1, 64, 1, 700), (200, 5, 5, 65), (1, 1, 1, 1)],
)
def test_terms_of_a_tile_are_made_by_ctas_that_run(batch, heads, heads_kv, seqlen, on_every_sm, causal):
    """A CTA that waits has drawn, with those before it, all items of the head group of its tile: none waits for a CTA that cannot begin."""
    problem, group = AttnProblem("float32-high", 128, 128, causal), heads // heads_kv
    kv_bytes = 4 * seqlen * 256
    limit = SMS if on_every_sm else 2**31
    m_blocks, group_heads, ctas = tile_counts(batch, heads, group, kv_bytes, seqlen, 128, costs_of(), limit)
    tiles = m_blocks * batch * heads
    k = torch.empty(batch, seqlen, heads_kv, 128, device="meta")
    split = FirstTermsLaunch(
        None, problem, False, AttentionTiles(tiles, m_blocks * group_heads, ctas, costs_of()), k, k
    )
    items = term_items(128, batch * heads_kv, seqlen)
    of_group = m_blocks * group_heads if causal else m_blocks * group
    assert term_items(128, split.heads, seqlen) * tiles >= min(SMS, tiles) * items
    for tile in range(tiles):
        last_tile = min((tile // of_group + 1) * of_group, tiles)  # of the heads that the tile needs at most
        cta = tile if ctas == tiles else tile % ctas
        stop = -(-items // ctas) * (cta + split.tiles_ahead)
        assert min(stop, items) >= -(-last_tile * items // tiles)


def test_items_cover_all_rows():
    rows = ITEM_ELEMENTS // 64
    assert term_items(64, 5, 2 * rows + 1) == 5 * 2 * 3
    assert term_items(64, 5, rows) == 5 * 2


# The rest needs a GPU

SHAPES = [
    # batch, heads, heads_kv, seqlen_q, seqlen_k, columns that the tile has and the tensors lack
    (2, 4, 2, 777, 1000, 0),
    (1, 1, 1, 130, 60, 0),
    (5, 16, 4, 513, 2049, 8),
    (40, 6, 6, 256, 256, 0),
    (9, 16, 16, 1024, 1024, 0),
]


def before(config):
    """The config whose inputs are split by a pass before it."""
    return configs.with_term_stages(config, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize(("dtype", "width", "causal"), CASES)
def test_terms_made_beside_attention_are_those_of_the_pass(dtype, width, causal, shape):
    batch, heads, heads_kv, seqlen_q, seqlen_k, lacking = shape
    problem, options = AttnProblem(dtype, width, width, causal), Options(parts=FP32_DTYPES[dtype].terms)
    q, dout = (torch.randn(batch, heads, seqlen_q, width - lacking, device="cuda") for _ in range(2))
    k, v = (torch.randn(batch, heads_kv, seqlen_k, width - lacking, device="cuda") for _ in range(2))
    config, _ = configs.pick_config(problem, "4k", GPU)
    arguments = width**-0.5, causal, False, True
    (out, lse), (wanted, wanted_lse) = (
        launch.forward(q, k, v, *arguments, config=one, options=options) for one in (config, before(config))
    )
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    for direction, bucket in (("bwd", "1k"), ("bwd", "long"), ("bwd_det", "4k")):
        config, _ = configs.pick_config(problem, bucket, GPU, direction)
        (dq, *found), (wanted_dq, *wanted) = (
            tuple(launch.backward(dout, q, k, v, out, lse, *arguments, config=one, options=options).values())
            for one in (config, before(config))
        )
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
        if direction == "bwd_det":
            assert torch.equal(dq, wanted_dq)
        torch.testing.assert_close(dq, wanted_dq, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_terms_made_beside_attention_on_two_streams():
    """Each of two launches at once has half of the GPU, and none waits for CTAs that cannot begin."""
    q, k, v = (torch.randn(8, 1024, 16, 128, device="cuda") for _ in range(3))
    call = lambda: launch.forward(q, k, v, 0.1, True, False, options=Options(parts=2))[0]  # noqa: E731
    wanted = call()
    torch.cuda.synchronize()
    streams, outs = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(8):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(call())
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in outs)
