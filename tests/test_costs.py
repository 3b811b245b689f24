"""Costs of launches: which table serves a GPU, and that tables are whole."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tl_attention.config import configs, gpus
from tl_attention.config.costs import Costs, costs_of
from tl_attention.problem.target import DEFAULT_GPU, H200_SMS


@pytest.mark.parametrize("name", configs.cost_tables())
def test_costs_are_those_of_the_table(name):
    table, costs = configs.cost_tables()[name], costs_of(name)
    assert table.keys() == {field.name for field in fields(Costs)} - {"sms"}
    for section, numbers in table.items():
        if section != "slack":
            assert {name: getattr(getattr(costs, section), name) for name in numbers} == numbers
    assert name in gpus.GPUS


@pytest.mark.parametrize("gpu", [*gpus.GPUS.values(), gpus.Gpu("Some GPU", 99, 1, 1, 1, 1)], ids=str)
def test_gpu_without_a_table_has_the_nearest_one_and_its_own_sms(gpu):
    costs, of_default = costs_of(gpu.name, gpu.sms), costs_of(DEFAULT_GPU)
    assert costs.sms == gpu.sms and of_default.sms == H200_SMS
    if configs.cost_tables().keys() == {DEFAULT_GPU}:
        assert costs.forward == of_default.forward and costs.backward == of_default.backward


def test_costs_of_a_gpu_are_one_object():
    """As an argument of cached functions they are compared by identity."""
    assert costs_of("NVIDIA H20", 78) is costs_of("NVIDIA H20", 78)
    assert costs_of("NVIDIA H20", 78) != costs_of("NVIDIA H20", 70)


def test_fewest_sharers_take_nearly_the_shortest_time():
    costs = costs_of()
    assert costs.fewest({1: 100 * costs.slack, 2: 100.0, 3: 101.0}) == 1
    assert costs.fewest({1: 100 * costs.slack + 1, 2: 102.0, 3: 100.0}) == 2
