"""Lines under the name tl_attention of the logging module: configs and functions that run as options."""

from __future__ import annotations

import logging

import torch

import tl_attention
from tl_attention.config import configs
from tl_attention.launch import common
from tl_attention.problem.target import DEFAULT_GPU


def test_logging_has_the_config_and_its_source(caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: DEFAULT_GPU)
    configs.pick_config.cache_clear()
    with caplog.at_level(logging.DEBUG, "tl_attention"):
        _, config = common.find_config(("bfloat16", 128, 128, True, (), None, "4k", 0), "fwd", None)
    (record,) = caplog.records
    assert record.name == "tl_attention.launch.common"
    assert record.getMessage().startswith(f"fwd bf16 d128 causal 4k -> {config} (fwd row")


def test_logging_has_recognized_functions(caplog):
    q = torch.randn(1, 2, 8, 64)
    with caplog.at_level(logging.DEBUG, "tl_attention"):
        tl_attention.flex_attention(q, q, q, lambda s, b, h, i, j: 13 * torch.tanh(s / 13))
    assert "flex_attention score_mod -> softcap=13.0 (recognized)" in caplog.text
