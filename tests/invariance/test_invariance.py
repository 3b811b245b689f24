"""Rearrangements on a Hopper GPU; on any machine their draws, kernels and command, on the CPU path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from protocol.launches import recording

from . import arrangements
from .arrangements import Arrangement, Sequences
from .command import again
from .draws import LATENT, PER_SET, TABLE_ROWS, OptionSet, Run, draw_of, kernels_of, residue_of
from .worker import Share, run_share

ROOT = Path(__file__).parents[2]


def _command(*words: object) -> subprocess.CompletedProcess:
    program = sys.executable, "-m", "tests.invariance"
    return subprocess.run([*program, *map(str, words)], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.gpu
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("head_dim", ["64", "128", "576-512"])
def test_rearranged_queries_have_their_bits(head_dim):
    run = _command("--draws", 200, "--head-dim", head_dim)
    assert run.returncode == 0, run.stdout + run.stderr


def test_command_compares_draws_on_the_cpu(tmp_path):
    out = tmp_path / "found.json"
    run = _command("--draws", 3, "--options", "causal,sink", "--cpu", "--processes", 1, "--out", out)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(out.read_text())
    assert found["draws"] == found["asked"] == 3 and not found["failures"]
    assert found["compared"] == "within a tolerance" and "compared within a tolerance" in run.stdout
    assert sum(row["rows"] for row in found["kinds"].values()) > 0


def test_another_bit_is_reported_with_its_command(monkeypatch):
    call = arrangements.flash_attn_with_kvcache

    def wrong(*tensors, **how):
        out, lse = call(*tensors, **how)
        out[-1, -1, -1] += 1
        return out, lse

    monkeypatch.setattr(arrangements, "flash_attn_with_kvcache", wrong)
    run, said = Run("fp16", (64, 64), longest=40), []
    run_share(run, Share("causal", 0, 8), "cpu", lambda kind, **values: said.append((kind, values)))
    kind, found = said[-1]
    by_cache = [draw_of(run, OptionSet("causal"), i).kind in ("cache", "decode", "rollout") for i in range(8)]
    assert kind == "end" and found["draws"] == 8 and any(by_cache)
    failed = {index for index, *_ in found["failures"]}
    assert {i for i, one in enumerate(by_cache) if one} <= failed
    assert all("out of" in fault for *_, fault in found["failures"])
    command = again(run, "causal", min(failed))
    assert command.endswith(f"--dtype fp16 --head-dim 64 --seed 0 --longest 40 --draw causal:{min(failed)}")


def test_sets_have_all_lengths_modulo_a_tile():
    run, options, residues = Run("bf16", (128, 128)), OptionSet("causal"), set()
    for number in range(TABLE_ROWS):
        residue = residue_of(options, number)
        lengths = draw_of(run, options, number * PER_SET).sequences.lengths
        assert (
            residue in {n % TABLE_ROWS for pair in lengths for n in pair} or residue == 0
        )  # no sequence is empty so
        residues.add(residue)
    assert len(residues) == TABLE_ROWS


@pytest.mark.parametrize("head_dims", [(64, 64), (192, 128), LATENT], ids=str)
def test_calls_launch_the_listed_kernels(head_dims):
    run = Run("bf16", head_dims, longest=300)
    for name in ("full", "softcap" if run.is_latent else "softcap-sink"):
        options, launched = OptionSet(name), set()
        with recording() as launches:
            for index in range(0, 48, 3):
                draw = draw_of(run, options, index)
                Arrangement(Sequences(run, options, draw.sequences, "cpu"), draw).run()
            launched |= {(one.problem, one.config) for one in launches}
        listed = set(kernels_of(run, [options]))
        assert launched <= listed
        # Those that merge splits are compiled with each decode
        unused = [str(config) for _, config in listed - launched if "combine" not in str(config)]
        assert len(unused) <= len(listed) / 3, unused


def test_wrong_options_are_refused():
    for name in ("causal-full", "windows", "full-window"):
        with pytest.raises(ValueError, match="options: expected words of causal, full, band"):
            OptionSet(name)
