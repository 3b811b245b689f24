"""Causal backward with more queries than keys: the first queries see no key, and where they are many no kernel reads them."""

from __future__ import annotations

import pytest
import torch
from test_bwd import both_modes, run

from tl_attention.config.costs import costs_of
from tl_attention.launch.seen import SeenQueries, seen_queries, unseen_queries
from tl_attention.testing.inputs import LAYOUTS
from tl_attention.testing.shapes import Shape


def test_many_unseen_queries_are_left_out():
    costs = costs_of()
    many = costs.backward.least_unseen // 16
    assert unseen_queries(1, 16, 4096, 4096 - many, costs) == many
    assert unseen_queries(1, 16, 4096, 4097 - many, costs) == 0
    assert unseen_queries(64, 16, 4096, 5000, costs) == 0
    q, k = torch.empty(4, 4000, 8, 1), torch.empty(4, 1500, 2, 1)
    assert seen_queries(q, k, heads_first=False, costs=costs) == SeenQueries(-3, 2500, 1500)
    heads_first = (x.transpose(1, 2) for x in (q, k))
    assert seen_queries(*heads_first, heads_first=True, costs=costs) == SeenQueries(-2, 2500, 1500)
    assert seen_queries(k, q, heads_first=False, costs=costs) is None


@pytest.mark.parametrize("heads_first", [False, True])
def test_seen_queries_are_the_last(heads_first):
    seen = SeenQueries(-2 if heads_first else -3, 2, 3)
    x = torch.arange(5.0)[:, None, None].expand(4, 5, 2, 1).clone()
    x = x.transpose(1, 2) if heads_first else x
    (rows,) = seen.rows(x)
    assert rows.unique().tolist() == [2, 3, 4]
    numbers, none = seen.numbers(torch.arange(5.0).expand(4, 2, 5), None)
    assert numbers.unique().tolist() == [2, 3, 4] and numbers.shape == (4, 2, 3) and none is None
    seen.zero_others(x)
    assert x.unique().tolist() == [0, 2, 3, 4] and (rows != 0).all()


@pytest.mark.gpu
@both_modes
@pytest.mark.parametrize(
    "shape",
    [
        "2,8,8,4000,1500,128,128,causal",
        "3,16,4,2345,1111,64,64,causal",
        "2,12,12,2001,777,96,96,causal",
        "4,8,2,2000,333,192,128,causal",
        "2,16,16,1500,90,64,64,causal",
        "1,10,5,3000,1,256,256,causal",
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_match_the_reference(shape, layout, deterministic):
    shape = Shape.parse(shape)
    assert unseen_queries(shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k, costs_of())
    run(shape, layout=layout, deterministic=deterministic, with_dlse=True, lse_base2=True)
