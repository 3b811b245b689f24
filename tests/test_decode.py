"""Splits, workspace and plans of a decode, on any machine."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from protocol.launches import SMS, recorded

from tl_attention import launch
from tl_attention.compilation import compiler
from tl_attention.config import configs
from tl_attention.config.kernel_configs import append_kernel
from tl_attention.launch.common import PlanCache
from tl_attention.problem.attn_problem import DECODE_TILE_WIDTHS, AttnProblem, decode_width
from tl_attention.problem.options import BATCH_INVARIANT, Cache, Options

D128 = AttnProblem("bfloat16", 128, 128, False, ("window",))
D64 = AttnProblem("bfloat16", 64, 64, False, ("window",))
LATENT = AttnProblem("bfloat16", 576, 512, False, ("window",))


@pytest.mark.parametrize("rows", [1, 64, 65, 1000])
@pytest.mark.parametrize("width", DECODE_TILE_WIDTHS, ids=str)
def test_config_follows_from_query_rows(width, rows):
    config = configs.decode_config(AttnProblem("bfloat16", *width, False), rows, 16)
    assert config.page_rows == 16
    assert config.block_M == (128 if rows > 64 and width[1] < 512 else 64)
    assert config.columns(D128) * config.warpgroups == 128 * (
        1 if config.divides_columns else config.warpgroups
    )


@pytest.mark.parametrize("width", [(64, 64), (96, 96), (128, 128), (192, 128)], ids=str)
def test_decodes_of_few_items_have_one_cta_per_sm(width):
    problem = AttnProblem("bfloat16", *width, False)
    few, many, tall = (configs.decode_config(problem, rows, 0, n) for rows, n in ((64, 1), (64, 9), (65, 1)))
    assert (few.ctas_per_sm, few.warpgroups) == (1, 1) and (many.ctas_per_sm, tall.warpgroups) == (2, 2)
    assert configs.decode_config(problem, 64) == many
    assert configs.decode_config(problem, 64, 64, 1) == replace(few, page_rows=64)
    assert configs.decode_config(problem, 64, 16, 1) == replace(many, page_rows=16)


@pytest.mark.parametrize(("batch", "splits", "ctas_per_sm"), [(16, 0, 1), (17, 0, 2), (17, 3, 2), (1, 3, 1)])
def test_launches_choose_their_config_by_items(batch, splits, ctas_per_sm):
    q, k = (torch.zeros(batch, n, 8, 128, dtype=torch.bfloat16) for n in (1, 1000))
    decode, _ = recorded(lambda: launch.attend_cache(q, Cache(k, k, 1000), 0.1, Options(num_splits=splits)))
    assert decode.config.ctas_per_sm == ctas_per_sm and 16 * 8 <= SMS < 17 * 8
    partials = decode.arguments[9].shape
    assert partials[1:] == (1, 1, 128)
    needed = 4 * partials[0] * 129
    assert launch.decode_workspace_bytes(batch, 1, 8, 8, 128, splits, 1000, SMS) >= needed


@pytest.mark.parametrize("page", [None, 16, 64])
@pytest.mark.parametrize(("batch", "heads_kv"), [(1, 1), (1, 3), (16, 8), (17, 8)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_a_workspace_holds_the_partials_of_each_config(head_dim, batch, heads_kv, page):
    """It is computed without knowing head_dim and pages, which choose the config; a call refuses one that is too small."""
    head_dim_v = min(head_dim, 128) if head_dim == 192 else head_dim
    rows = 640 if page is None else page
    q = torch.zeros(batch, 1, 2 * heads_kv, head_dim, dtype=torch.bfloat16)
    caches = batch if page is None else batch * (640 // page)
    k, v = (torch.zeros(caches, rows, heads_kv, n, dtype=torch.bfloat16) for n in (head_dim, head_dim_v))
    table = None if page is None else torch.arange(caches, dtype=torch.int32).view(batch, -1)
    size = launch.decode_workspace_bytes(batch, 1, 2 * heads_kv, heads_kv, head_dim_v, 0, 640, SMS)
    workspace = torch.zeros(size, dtype=torch.uint8)
    cache = Cache(k, v, 640, block_table=table)
    assert recorded(lambda: launch.attend_cache(q, cache, 0.1, Options(), workspace))


def test_batch_invariant_decodes_have_one_config_for_any_number_of_items():
    found = set()
    for batch in (1, 16, 17):
        q, k = (torch.zeros(batch, n, 8, 128, dtype=torch.bfloat16) for n in (1, 100))
        options = Options(num_splits=BATCH_INVARIANT)
        found |= {x.config for x in recorded(lambda: launch.attend_cache(q, Cache(k, k, 100), 0.1, options))}  # noqa: B023
    assert len(found) == 1


@pytest.mark.parametrize(
    ("head_dims", "width"),
    [((8, 8), (64, 64)), ((72, 40), (96, 96)), ((136, 64), (192, 128)), ((576, 512), (576, 512))],
)
def test_decode_width_holds_the_head_dims(head_dims, width):
    assert decode_width(*head_dims) == width


def test_split_rule():
    rule = launch.decode._split_rule
    plain, latent = configs.decode_config(D128, 8), configs.decode_config(LATENT, 8)
    assert rule(0, plain, 10**6) == 0
    assert rule(7, plain, 10**6) == -7
    assert rule(10**9, plain, 10**6) == -launch.decode.MAX_SPLITS
    assert rule(BATCH_INVARIANT, replace(plain, batch_invariant=True), 10**6) == -1
    assert rule(BATCH_INVARIANT, latent, 10**5) * latent.block_N == launch.decode.INVARIANT_KEYS
    blocks = rule(BATCH_INVARIANT, latent, 10**9)
    assert -(-(10**9) // (latent.block_N * blocks)) <= launch.decode.MAX_SPLITS


@pytest.mark.parametrize(
    ("num_splits", "slots", "entries"), [(0, 2 * 132 + 16, 16), (5, 80, 16), (BATCH_INVARIANT, 1, 16)]
)
def test_each_partial_output_has_a_slot(num_splits, slots, entries):
    config = replace(configs.decode_config(D128, 8), batch_invariant=num_splits == BATCH_INVARIANT)
    rule = launch.decode._split_rule(num_splits, config, 8192)
    assert launch.decode._launch_sizes(config, 2, 8, 8, rule, 8192, 132) == (1, 264, slots, entries)
    needed = 4 * (slots * 8 * 129 + entries * 8)  # eight rows of 128 columns and their log-sum-exps
    assert launch.decode_workspace_bytes(2, 1, 64, 8, 128, num_splits, 8192, 132) >= needed


def test_batch_invariant_latent_attention_has_a_slot_per_split():
    config = configs.decode_config(LATENT, 8)
    rule = launch.decode._split_rule(BATCH_INVARIANT, config, 8192)
    *_, slots, entries = launch.decode._launch_sizes(config, 2, 8, 1, rule, 8192, 132)
    assert (slots, entries) == (2 * 8, 2)
    needed = 4 * (slots * config.warpgroups * 8 * (config.columns(LATENT) + 1) + entries * 8)
    assert launch.decode_workspace_bytes(2, 1, 8, 1, 512, BATCH_INVARIANT, 8192, 132) >= needed


def test_rows_of_a_cache_include_those_between_two_caches():
    packed = torch.zeros(3, 2, 32, 2, 64)  # keys and values of a page in one tensor
    step, rows = launch.arrays.page_rows_of(packed[:, 0], "k_cache")
    assert (step, rows.shape) == (64, (1, 2 * 64 + 32, 2, 64))
    heads_first = torch.zeros(3, 2, 32, 64).transpose(1, 2)
    assert launch.arrays.page_rows_of(heads_first, "k_cache")[0] == 64
    assert launch.arrays.page_rows_of(packed[:1, 0], "k_cache")[0] == 32
    odd = torch.zeros(200).as_strided((1, 1, 1, 64), (3, 5, 7, 1))  # strides of dimensions of size 1
    assert launch.arrays.page_rows_of(odd, "k_cache")[1].stride()[1:] == (64, 64, 1)
    with pytest.raises(ValueError, match=r"v_cache: expected stride\(0\) to be a multiple of stride\(1\)"):
        launch.arrays.page_rows_of(torch.zeros(2, 33 * 128 - 8)[:, : 32 * 128].view(2, 32, 2, 64), "v_cache")


def test_plans_are_found_by_metadata(monkeypatch):
    made = []

    class Plan:
        def __init__(self, *_):
            made.append(self)

        def __call__(self, *_):
            return self

    monkeypatch.setattr(launch.decode, "DecodePlan", Plan)
    monkeypatch.setattr(launch.decode, "plan_cache", PlanCache())
    q, k = torch.zeros(1, 1, 8, 64), torch.zeros(1, 32, 2, 64)

    def plan(keys, splits=0):
        return launch.attend_cache(q, Cache(keys, keys, 5), 1.0, Options(num_splits=splits))

    assert plan(k) is plan(k) is made[0]
    assert plan(k[:, :16]) is plan(k[:, :16]) is made[1]
    assert plan(k, 2) is plan(k, 2) is made[2]
    assert len(made) == 3


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("name", ["append", "decode", "merge"])
def test_kernels_of_a_decode_wait_for_the_kernel_before_them(name):
    """They launch before its end, so nothing may be read or written before the wait."""
    pytest.importorskip("tilelang")
    few, _, many = (line.config for line in configs.decode_lines(D128.width))
    kernels = {
        "append": append_kernel("bfloat16"),
        "decode": (D128, replace(many, page_rows=16)),
        "merge": few.combine(D64),  # 6 s; that of 64 partials in 128 columns takes 17 s
    }
    source, _ = compiler.lower(*kernels[name])
    signature, body = re.search(r"__launch_bounds__\([^)]*\) \w+\((.*?)\) \{(.*)", source, re.S).groups()
    before, wait, _ = body.partition("cudaGridDependencySynchronize();")
    pointers = re.findall(r"\*(?: __restrict__)? (\w+)", signature)
    assert wait and len(pointers) > 3
    assert [x for x in pointers if re.search(rf"\b{x}\b", before)] == []
    assert "return" not in before
