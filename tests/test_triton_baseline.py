"""The Triton baseline of the benchmark, in Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

SCRIPT = """
import torch, triton
from triton_fwd import flash_attn_triton

config = triton.Config({"BLOCK_M": 16, "BLOCK_N": 16})
for case in CASES:
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, dim, dim_v, causal = case
    torch.manual_seed(0)
    q = torch.randn(batch, heads_q, seqlen_q, dim, dtype=torch.float16)
    k = torch.randn(batch, heads_kv, seqlen_k, dim, dtype=torch.float16)
    v = torch.randn(batch, heads_kv, seqlen_k, dim_v, dtype=torch.float16)
    out, lse = flash_attn_triton(q, k, v, causal, config)

    k, v = (t.double().repeat_interleave(heads_q // heads_kv, 1) for t in (k, v))
    scores = q.double() @ k.mT * dim**-0.5
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        seen = seen.tril(seqlen_k - seqlen_q)
    scores = scores.masked_fill(~seen, float("-inf"))
    ref = scores.softmax(-1).nan_to_num() @ v
    torch.testing.assert_close(out.double(), ref, rtol=0, atol=4e-3, msg=lambda m: f"out of {case}: {m}")
    ref_lse = scores.logsumexp(-1)
    torch.testing.assert_close(lse.double(), ref_lse, rtol=0, atol=1e-3, msg=lambda m: f"lse of {case}: {m}")
"""

CASES = [
    (2, 2, 2, 32, 32, 16, 16, False),
    (1, 2, 1, 33, 47, 16, 16, True),  # odd lengths, GQA, bottom-right
    (1, 1, 1, 24, 5, 16, 16, True),  # rows without a key
    (1, 4, 2, 17, 40, 24, 8, True),  # head dims that are padded
    (1, 1, 1, 1, 19, 40, 32, False),
]


def test_triton_baseline_matches_formula() -> None:
    triton = pytest.importorskip("triton", reason="the Triton baseline needs triton")
    script = SCRIPT.replace("CASES", repr(CASES))
    env = os.environ | {"TRITON_INTERPRET": "1"}  # read when triton is imported: hence a process of its own
    folder = Path(__file__).parents[1] / "benchmarks"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=env, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip(
            f"the interpreter of triton {triton.__version__} does not run with numpy {numpy.__version__}"
        )
    assert done.returncode == 0, done.stderr
