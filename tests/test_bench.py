"""The benchmark's command without a GPU: correctness gate, failures, messages, host times."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tl_attention.compilation import building, store, toolkit
from tl_attention.config import catalog
from tl_attention.config.kernel_configs import BwdPass
from tl_attention.testing import counts, environment, timer
from tl_attention.testing.shapes import DIRECTIONS, Shape
from tl_attention.testing.timer import Eager, Timing
from tl_attention.tuning import autotune

pytest.importorskip("rich", reason="the benchmark needs rich")
import ahead
import fwd_bwd
import host
import library
import no_gpu
import rows as row_files
import run
from libraries import naive
from providers import PROVIDERS
from rich.console import Console
from rows import Row

SHAPE, LONGER = "1,2,2,48,48,32,32,causal", "1,2,2,96,96,32,32,causal"
# Passes of naive for another library: one that is wrong, one that raises
NAIVE = naive.PROVIDER
NAMES = ["tl_attention", "naive", "triton", "fa4", "flex"]
ARGUMENTS = {  # of the command, for a direction
    "fwd": [],
    "bwd": ["--pass", "bwd"],
    "bwd_det": ["--pass", "bwd", "--deterministic"],
    "fwd_bwd": ["--pass", "fwd_bwd"],
    "fwd_bwd_det": ["--pass", "fwd_bwd", "--deterministic"],
}


def time_interleaved(calls: dict, rounds: int) -> dict[str, Timing]:
    """Timings without a clock: every call takes as many milliseconds as its position."""
    return {
        name: Timing((float(i),) * rounds, 1, "graph", copies[0]())
        for i, (name, copies) in enumerate(calls.items(), 1)
    }


def boom(*_: object, **_options: object) -> library.Ready:
    raise RuntimeError("no kernel\nand a long story")


def wrong(shape: Shape, *_: torch.Tensor, saves: bool) -> library.Ready:
    return library.same_call(lambda q, k, v: (v + 1, None))


def wrong_backward(shape: Shape, deterministic: bool, *_: object) -> library.Ready:
    return library.same_call(lambda dout, q, k, v, out, lse: (q + 1, k, v))


def like_naive(**passes: object) -> library.Provider:
    """A provider with the passes of naive but for those given."""
    return replace(NAIVE, passes=NAIVE.passes | passes)


@pytest.fixture
def gpu_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors and no clock: naive stands for ours, fa4 is wrong, flex raises."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)  # that of a CUDA build asks the GPU
    for name, stub in {
        "tl_attention": NAIVE,
        "fa4": like_naive(fwd=wrong, bwd=wrong_backward),
        "flex": like_naive(fwd=boom),
    }.items():
        monkeypatch.setitem(PROVIDERS, name, stub)
    for name in ("make_inputs", "make_dout"):
        monkeypatch.setattr(fwd_bwd, name, partial(getattr(fwd_bwd, name), device="cpu"))
    for name, stub in {
        "rotation": lambda nbytes: 2,
        "time_interleaved": time_interleaved,
        "time_eager": lambda call: Eager(1.0, 5.0, call()),
        "measure_cublas_tflops": lambda: 700.0,
        "measure_copy_bandwidth": lambda: 4000.0,
    }.items():
        monkeypatch.setattr(timer, name, stub)
    for name, value in {
        "get_device_name": "NVIDIA H200",
        "synchronize": None,
        "is_available": True,
        "current_device": 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(run, "is_hopper", lambda device: True)
    monkeypatch.setattr(ahead, "kernels_of_rows", lambda shapes, direction, dtype: [direction, dtype])
    monkeypatch.setattr(store, "find", lambda *kernel: None)
    monkeypatch.setattr(building, "build_all", lambda kernels, say: say(f"to build: {kernels}"))
    monkeypatch.setattr(
        environment, "facts", lambda command: {"gpu": "H200", "commit": "c", "command": command}
    )


def run_rows(
    out: Path, *names: str, direction: str = "fwd", status: int = 0, asked: tuple[str, ...] = (SHAPE, LONGER)
) -> list[Row]:
    """The rows of a run."""
    argv = ["--shapes", *asked, "--providers", *names, "--out", str(out), "--rounds", "3"]
    assert run.main([*ARGUMENTS[direction], *argv]) == status
    return row_files.read(out / f"{direction}.jsonl")[0]


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bench_run_gates_speeds_and_writes_all(
    direction: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    names = [name for name in NAMES if name != "triton" or "bwd" in direction]
    rows = run_rows(tmp_path, *names, direction=direction)
    status = {row["provider"]: row["status"] for row in rows}
    expected = dict(zip(NAMES, ("ok", "ok", "skipped", "wrong", "failed"), strict=True))
    assert status == {name: expected[name] for name in names}
    assert [row["shape"] for row in rows[:: len(names)]] == [SHAPE, LONGER]
    ours, *_, wrong, failed = rows[: len(names)]
    assert (ours["pass"], ours["layout"], ours["pct_cublas"]) == (
        direction,
        "bhsd",
        pytest.approx(ours["tflops"] / 7),
    )
    assert ours["ratios"]["naive"] == [2.0] * 3
    assert ours["tflops"] == pytest.approx(counts.flops(Shape.parse(SHAPE), direction) / 1e-3 / 1e12)
    assert wrong["ms"] is wrong["tflops"] is failed["correct"] is failed["max_err_ratio"] is None
    assert "instead of" in wrong["reason"]
    assert failed["reason"] == "RuntimeError: no kernel"
    assert "WRONG" in (tmp_path / "performance.md").read_text()
    _, header = row_files.read(tmp_path / f"{direction}.jsonl")
    assert header["environment"]["copy"] == "4000 GB/s, ridge point 175 FLOP/B"
    out = capsys.readouterr().out
    assert "2.00x" in out and f"to build: ['{direction}', 'bfloat16']" in out


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_bench_run_puts_ours_without_options_beside_it(
    direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from libraries import ours as our_library

    monkeypatch.setattr(timer, "on_capture_stream", contextlib.nullcontext)
    monkeypatch.setitem(PROVIDERS, "tl_attention", our_library.PROVIDER)
    shape = "2,4,2,48,48,32,32,causal,window=9,sink"
    rows = run_rows(tmp_path, "cudnn", "naive", "tl_attention", direction=direction, asked=(shape,))
    by_name = {row["provider"]: row for row in rows}
    assert list(by_name) == ["cudnn", "tl_attention", "plain"], "naive has no options"
    cudnn, ours, plain = by_name.values()
    assert [row["status"] for row in rows] == ["skipped", "ok", "ok"]
    assert cudnn["reason"] == "no window in PyTorch's cuDNN backend"
    assert (ours["layout"], ours["options"]) == ("bshd", ["window=9", "sink"])
    assert row_files.cost(ours) == 0.5
    asked = Shape.parse(shape)
    assert ours["tflops"] == pytest.approx(counts.flops(asked, direction) / 1e-3 / 1e12)
    assert plain["tflops"] == pytest.approx(counts.flops(asked.plain, direction) / 2e-3 / 1e12)


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_keeps_l2_warm_for_some_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    monkeypatch.setattr(fwd_bwd, "compare", lambda shape, bshd, *_: copies.append(len(bshd)))
    rows = run_rows(tmp_path, "tl_attention", status=1, asked=("small-n59-full", "tiny"))
    assert [row["l2"] for row in rows] == ["warm", "cold"]
    assert copies == [1, 2]
    assert row_files.describe(rows[0]) == "B8 H16 S59 d64 full, L2 warm"


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_keeps_what_it_has_when_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = fwd_bwd.measure

    def interrupted(shape: Shape, *rest: object) -> list[Row]:
        if shape.seqlen_q == 96:
            raise KeyboardInterrupt
        return measure(shape, *rest)

    monkeypatch.setattr(fwd_bwd, "measure", interrupted)
    assert len(run_rows(tmp_path, "tl_attention", status=130)) == 1
    assert "B1 H2 S48 d32 causal" in (tmp_path / "performance.md").read_text()


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_adds_to_stored_rows(tmp_path: Path) -> None:
    run_rows(tmp_path, "tl_attention", asked=(SHAPE,))
    argv = [
        "--shapes",
        SHAPE,
        LONGER,
        "--providers",
        "tl_attention",
        "naive",
        "--out",
        str(tmp_path),
        "--add",
    ]
    assert run.main(argv) == 0
    rows, _ = row_files.read(tmp_path / "fwd.jsonl")
    assert [row["provider"] for row in rows] == ["tl_attention", "naive"] * 2
    assert not list(tmp_path.glob("*.added"))


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_replaces_stored_rows(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_rows(tmp_path, "tl_attention", asked=(SHAPE, LONGER))
    argv = ["--shapes", SHAPE, "--providers", "tl_attention", "naive", "--out", str(tmp_path), "--replace"]
    assert run.main(argv) == 0
    rows, _ = row_files.read(tmp_path / "fwd.jsonl")
    assert [row["provider"] for row in rows] == ["tl_attention", "naive", "tl_attention"]
    with pytest.raises(SystemExit):
        run.main([*argv, "--add"])
    assert "--replace: expected no --add" in capsys.readouterr().err


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_leaves_out_a_provider_that_fails_in_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once(calls: dict, rounds: int) -> dict[str, Timing]:
        if "fa2" in calls:
            error = RuntimeError("out of memory")
            raise timer.CallFailed("fa2", error) from error
        return time_interleaved(calls, rounds)

    monkeypatch.setattr(timer, "time_interleaved", fail_once)
    monkeypatch.setitem(PROVIDERS, "fa2", NAIVE)
    rows = run_rows(tmp_path, "tl_attention", "fa2", "naive")
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"] * 2
    assert (rows[1]["reason"], rows[1]["ms"]) == ("RuntimeError: out of memory", None)
    assert rows[0]["ratios"].keys() == {"naive"}


class Forgetful:
    """A pass that is right in its first call alone: later outputs are changed."""

    def __init__(self, prepare: Callable[..., library.Ready], change: Callable) -> None:
        self.prepare, self.change = prepare, change

    def __call__(self, *problem: object, **options: object) -> library.Ready:
        right, calls = self.prepare(*problem, **options).launch, []

        def attend(*inputs: torch.Tensor) -> library.Result:
            first, *rest = right(*inputs)
            calls.append(len(calls))
            return (first if calls == [0] else self.change(first), *rest)

        return library.same_call(attend)


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.parametrize(("direction", "name"), [("fwd", "out"), ("bwd", "dq"), ("fwd_bwd", "dq")])
def test_bench_run_gives_no_speed_to_what_is_wrong_when_timed(
    direction: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful = "fwd" if direction == "fwd" else "bwd"
    changed = Forgetful(NAIVE.passes[forgetful], lambda x: x * torch.nan)
    monkeypatch.setitem(PROVIDERS, "fa2", like_naive(**{forgetful: changed}))
    rows = run_rows(tmp_path, "tl_attention", "fa2", "naive", direction=direction)
    assert [row["status"] for row in rows] == ["ok", "wrong", "ok"] * 2
    assert rows[1]["ms"] is rows[1]["max_err_ratio"] is None
    assert rows[1]["reason"].startswith(f"when timed, {name}[0, 0, 0, 0] is nan instead of")
    assert rows[0]["ratios"].keys() == {"naive"}


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.parametrize(("direction", "status"), [("bwd", "ok"), ("bwd_det", "wrong")])
def test_bench_run_wants_the_same_bits_of_what_is_deterministic(
    direction: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounding = like_naive(bwd=Forgetful(NAIVE.passes["bwd"], lambda x: x * (1 + 2**-7)))
    monkeypatch.setitem(PROVIDERS, "fa2", rounding)
    rows = run_rows(tmp_path, "tl_attention", "fa2", direction=direction)
    assert [row["status"] for row in rows] == ["ok", status] * 2
    reason = None if status == "ok" else "when timed, other bits than in the first call"
    assert rows[1]["reason"] == reason


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_goes_on_after_a_shape_without_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_inputs = fwd_bwd.make_inputs

    def too_large(shape: Shape, *rest: object, **options: object) -> tuple:
        if shape.seqlen_q == 48:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make_inputs(shape, *rest, **options)

    monkeypatch.setattr(fwd_bwd, "make_inputs", too_large)
    rows = run_rows(tmp_path, "tl_attention", "naive", status=1)
    assert [row["status"] for row in rows] == ["failed", "failed", "ok", "ok"]
    assert rows[0]["reason"] == "OutOfMemoryError: CUDA out of memory"


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_stops_where_the_gpu_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def sticky() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def crash(*_: object, **_options: object) -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", sticky)
        raise RuntimeError("the first")

    monkeypatch.setitem(PROVIDERS, "flex", like_naive(fwd=crash))
    rows = run_rows(tmp_path, "naive", "flex", "tl_attention", status=1)
    assert [row["reason"].partition(": ")[2] for row in rows] == [
        "CUDA error: an illegal memory access was encountered",
        "the first",
        "CUDA error: an illegal memory access was encountered",
    ]
    assert {row["status"] for row in rows} == {"failed"}
    assert f"Stopped at {SHAPE}: the GPU" in capsys.readouterr().out
    assert "FAILED" in (tmp_path / "performance.md").read_text()


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_fails_where_ours_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROVIDERS, "tl_attention", PROVIDERS["fa4"])
    run_rows(tmp_path, "tl_attention", status=1)


def test_bench_bad_arguments_end_with_a_message(capsys: pytest.CaptureFixture) -> None:
    for argv, words in (
        (["--shapes", "1,2,full"], "2 numbers"),
        (["--rounds", "0"], "at least 1"),
        (["--deterministic"], "expected --pass bwd or fwd_bwd"),
        (["--shapes", "1,8,8,64,64,640,full"], "head dims: expected at most those of one of"),
        (["--host", "--quick"], "--host: expected no --quick beside it"),
        (["--out", __file__], "--out: expected a folder, got the file"),
        (["--set", "flex", "--shapes", "1,8,8,64,64,64,full,function=half"], "a multiple of 128 queries"),
        (["--set", "options", "--pass", "decode"], "--set options: expected main with --pass decode"),
    ):
        with pytest.raises(SystemExit):
            run.main(argv)
        assert words in capsys.readouterr().err


@pytest.fixture
def no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "is_hopper", lambda device: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_bench_builds_only_kernels_that_no_pack_has(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, built = [Shape.parse("4,16,16,4096,4096,128,causal")], []
    in_pack, missing, *others = ahead.kernels_of_rows(shapes, "bwd", "bfloat16")

    def find(*kernel: object) -> object:
        if kernel in others:
            raise RuntimeError("TileLang is not installed")
        return kernel if kernel == in_pack else None

    monkeypatch.setattr(store, "find", find)
    monkeypatch.setattr(building, "build_all", lambda kernels, say: built.extend(kernels))
    ahead.build(Console(), shapes, "bwd", "bfloat16", ["tl_attention"])
    assert built == [missing]


@pytest.mark.usefixtures("no_hopper")
@pytest.mark.filterwarnings("ignore:tl_attention")
def test_bench_without_gpu_reports_kernels_and_checks_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def refuse(pairs: list[tuple]) -> Iterator[tuple]:
        return ((*pair, autotune.Failure("RuntimeError: nvcc refuses")) for pair in pairs)

    monkeypatch.setattr(autotune, "compile_all", refuse)
    monkeypatch.setattr("tl_attention.compilation.toolkit.find_nvcc", lambda: (Path("nvcc"), "PATH"))
    assert run.main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("The benchmark without a Hopper GPU")
    assert max(map(len, text.splitlines())) <= no_gpu.COLUMNS
    assert (
        "Measured: forward on NVIDIA H200, TFLOPS (benchmarks/results/nvidia_h200/fwd.jsonl, commit"
        in " ".join(text.split())
    )
    assert "B2 H16 S8192 d128 causal: tl_attention " in text
    assert "compiling: 4/4, " in text, "progress on a pipe"
    assert "RuntimeError: nvcc refuses" in text
    assert text.count("as scaled_dot_product_attention") == len(no_gpu.CPU_SHAPES)


@pytest.mark.usefixtures("no_hopper")
@pytest.mark.filterwarnings("ignore:tl_attention")
def test_bench_without_gpu_compiles_all_kernels_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(autotune, "compile_all", lambda pairs: asked.extend(pairs) or ())
    monkeypatch.setattr("tl_attention.compilation.toolkit.find_nvcc", lambda: (Path("nvcc"), "PATH"))
    assert run.main(["--all-kernels"]) == 0
    assert {*catalog.shipped_kernels(), *catalog.decode_kernels()} == {*asked}
    assert {*no_gpu.example_kernels()} < {*asked}


def test_bench_builds_the_kernels_of_all_rows_ahead() -> None:
    shapes = [Shape.parse(text) for text in ("4,16,16,4096,4096,128,causal", "1,8,8,64,64,64,full,sink")]
    kernels = ahead.kernels_of_rows(shapes, "bwd_det", "bfloat16")
    assert len(set(kernels)) == len(kernels)
    passes = {(problem.width, problem.options, type(config).__name__) for problem, config in kernels}
    assert {("d128", (), "FwdConfig"), ("d128", (), "BwdPass"), ("d64", ("sink",), "FwdConfig")} <= passes
    assert ("d64", (), "FwdConfig") in passes, "rows with options have a plain twin"
    summed = [config for _, config in kernels if isinstance(config, BwdPass) and config.adds_dq]
    assert all(config.is_ordered for config in summed)
    paged = Shape.parse("8,64,8,4,8192,128,causal,page=16,ragged")
    kernels = ahead.kernels_of_rows([paged], "decode", "bfloat16")
    assert kernels[0][1].page_rows == 16 and len(kernels) == 4, "decode, two that merge, append"
    assert ahead.kernels_of_rows([Shape.parse("1,1,1,9,9,512,full")], "fwd", "bfloat16") == []


@pytest.mark.usefixtures("no_hopper")
@pytest.mark.filterwarnings("ignore:tl_attention")
def test_bench_without_nvcc_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("tl_attention.compilation.toolkit.find_nvcc", lambda: None)
    assert run.main([]) == 0
    text = capsys.readouterr().out
    assert f"No kernel is compiled: {toolkit.NO_NVCC}" in " ".join(text.split())
    assert text.count("as scaled_dot_product_attention") == len(no_gpu.CPU_SHAPES)


@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("name", ["mha_fwd_interface", "mha_bwd_interface"])
def test_bench_cpu_check_sees_a_wrong_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import tl_attention

    right = getattr(tl_attention, name)
    monkeypatch.setattr(
        tl_attention, name, lambda *given, **options: tuple(1.1 * x for x in right(*given, **options))
    )
    assert no_gpu.check_cpu(Console(quiet=True)) == 1


def test_bench_takes_dtypes_by_all_their_names() -> None:
    parser = run.make_parser()
    assert [parser.parse_args(["--dtype", name]).dtype for name in ("bfloat16", "half", "fp16")] == [
        "bf16", "fp16", "fp16",
    ]  # fmt: skip


def fake_process(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess:
    """A process with the output of first_call.py; that of cudnn fails, and there is no pack."""
    assert command[1].endswith("first_call.py") and Shape.parse(command[3]) == host.FIRST_SHAPE
    if "cudnn" in command:
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nRuntimeError: no engine")
    assert "tl_attention" not in command or env.get("TL_ATTENTION_PACK") in (None, "0")
    empty = env.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == "0"
    assert not empty or all(not Path(env[name]).exists() for name in host.CACHES)
    forward = 9000.0 if empty else 5.5
    found = {"import": 20.0, "forward": forward, "backward": 2.0, "on_disk": 5}
    return subprocess.CompletedProcess(command, 0, f"a warning\n{json.dumps(found)}\n", "")


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.filterwarnings("ignore:tl_attention")
def test_bench_host_times_calls_and_first_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in ("calls", "cache_calls"):
        monkeypatch.setattr(host, name, partial(getattr(host, name), device="cpu"))
    monkeypatch.setattr(host.subprocess, "run", fake_process)
    assert run.main(["--host", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "host.json").read_text())
    ours, flash, *peers = stored["calls"]
    assert (ours["library"], flash["library"]) == ("mha_*_interface", "flash_attn_func")
    assert [ours[mode] for mode in host.MODES] == [5.0] * 4
    assert [flash[mode] for mode in host.MODES] == [5.0] * 3 + [None]
    assert {peer["provider"] for peer in peers} >= {"fa2", "cudnn"}
    assert all(peer["backward"] is None for peer in peers), "the ops take no CPU tensors"
    assert all(peer["reasons"]["backward"] for peer in peers)
    (cached,) = stored["cache_calls"]
    assert [cached[mode] for mode in host.CACHE_MODES] == [5.0] * 3 and not cached["reasons"]
    totals = [row.get("total_ms") for row in stored["first_calls"]]
    assert totals == [9022.0, None, 27.5, 9022.0, 27.5, 9022.0, None]
    text = host.stored_page(tmp_path)
    assert "| backward only | 5.0 | – | – |" in text
    assert "| lengths in a tensor, pages of 64 keys | 5.0 |" in text
    assert "| tl_attention, kernels on disk | 20.0 | 5.5 | 2.0 | 27.5 |" in text
    assert "| tl_attention, empty cache | 20.0 | 9000.0 | 2.0 | 9022.0 |" in text
    assert "kernels in the pack: RuntimeError: expected kernels from the pack, got 5 that were built" in text
    assert "cudnn (torch sdpa): RuntimeError: RuntimeError: no engine" in text
    assert "forward under autograd" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu_stub")
def test_bench_host_fails_where_ours_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("calls", "cache_calls"):
        monkeypatch.setattr(host, name, boom)
    monkeypatch.setattr(host.subprocess, "run", fake_process)
    assert run.main(["--host", "--out", str(tmp_path)]) == 1
    assert "RuntimeError: no kernel" in host.stored_page(tmp_path)


@pytest.mark.usefixtures("no_hopper")
def test_bench_host_needs_a_gpu(capsys: pytest.CaptureFixture) -> None:
    assert run.main(["--host"]) == 2
    assert "--host: expected a Hopper GPU" in capsys.readouterr().out
