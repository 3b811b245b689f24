"""`tl-attention explain`: counts against formulas, the model against results and limits, the text, the picture, bad arguments."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tl_attention import cli, configs, gpus
from tl_attention.explain import errors, measured, model, report, scale, tiles, work
from tl_attention.explain.command import check
from tl_attention.gpus import H100, H200
from tl_attention.problem import DECODE, DIRECTIONS
from tl_attention.query_tiles import first_queries
from tl_attention.testing import counts
from tl_attention.testing.shapes import Shape, chosen_shapes, sequences

SHAPES = chosen_shapes(["*"])
PASSES = (*DIRECTIONS, DECODE)


def call(text: str, direction: str = "fwd", gpu: gpus.Gpu = H200) -> work.Work:
    return work.of_call(Shape.parse(text), direction, "bfloat16", gpu)


@pytest.fixture(autouse=True)
def no_user_tables(monkeypatch, tmp_path):
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(("M", "N"), [(128, 128), (192, 112), (64, 96)])
@pytest.mark.parametrize(
    "text",
    [
        "2,4,2,300,300,128,causal",
        "1,4,4,300,700,128,causal",
        "1,4,4,700,300,128,causal",
        "1,4,4,500,500,128,causal,window=90",
        "1,4,4,500,500,128,full,window=90",
        "1,4,4,333,100,128,full",
        "5,4,4,200,200,128,causal,uneven",
    ],
)
def test_tiles_hold_every_visible_pair_and_no_more_blocks(text, M, N):
    """Blocks by query tiles and by key tiles are those of a mask drawn pair by pair."""
    shape = Shape.parse(text)
    left, right = counts.bounds(shape)
    by_queries, by_keys = tiles.query_tiles(shape, M, N), tiles.key_tiles(shape, M, N)
    from_end = tiles.query_tiles(shape, M, N, from_end=True)
    for (q, k), queries, keys in zip(sequences(shape), by_queries, by_keys, strict=True):
        visible = {(i // M, j // N) for i in range(q) for j in range(k) if -left <= j - i - (k - q) <= right}
        assert queries == [sum(i == m for i, _ in visible) for m in range(-(-q // M))]
        assert keys == [sum(j == n for _, j in visible) for n in range(-(-k // N))]
    for (q, k), queries in zip(sequences(shape), from_end, strict=True):
        for first, blocks in zip(first_queries(M, q, from_end=True), queries, strict=True):
            rows = range(first, min(first + M, q))
            assert blocks == len(
                {j // N for i in rows for j in range(k) if -left <= j - i - (k - q) <= right}
            )


@pytest.mark.parametrize(("M", "N"), [(128, 128), (192, 112)])
@pytest.mark.parametrize(
    "text",
    [
        "1,4,4,300,700,128,causal",
        "1,4,4,500,500,128,causal,window=90",
        "1,4,4,512,512,128,full",
        "3,4,4,200,200,128,causal,uneven",
    ],
)
def test_share_of_steps_that_a_mask_cuts(text, M, N):
    """The share is that of a mask drawn pair by pair; a step past the last query counts as its last one."""
    shape = Shape.parse(text)
    left, right = counts.bounds(shape)
    seen = cut = 0
    for q, k in sequences(shape):
        shown = [
            [j < k and -left <= j - i - (k - q) <= right for j in range(-(-k // N) * N)] for i in range(q)
        ]
        for first, begin in itertools.product(range(0, q, M), range(0, k, N)):
            block = [row[begin : begin + N] for row in shown[first : first + M]]
            seen += any(map(any, block))
            cut += any(map(any, block)) and not all(map(all, block))
    assert tiles.cut_share(shape, M, N) == pytest.approx(cut / seen)


@pytest.mark.parametrize(
    ("direction", "head_dim", "products"),
    [("fwd", 128, 2), ("bwd", 128, 5), ("bwd_det", 128, 5), ("bwd", 256, 8)],
)
def test_executed_flops_are_those_of_the_problem_where_tiles_divide_it(direction, head_dim, products):
    found = call(f"2,8,8,768,768,{head_dim},full", direction)  # 64 and 128 divide 768
    executed = sum(kernel.steps * kernel.flops_per_step for kernel in found.kernels)
    assert executed == counts.flops(found.shape, direction) * products // (2 if direction == "fwd" else 5)


def test_gqa_does_not_change_the_flops_of_a_backward():
    for text in ("1,32,8,2048,2048,128,causal", "1,32,32,2048,2048,128,causal"):
        (kernel,) = call(text, "bwd").kernels
        assert kernel.steps == 32 * sum(range(1, 17)) * 2


@pytest.mark.parametrize(
    "text", ["1,32,8,8192,8192,128,causal", "2,48,8,4096,4096,128,full", "1,64,8,8192,8192,64,causal,sink"]
)
def test_parts_of_a_key_head_compute_each_query_head_once(text):
    shape = Shape.parse(text)
    alone = replace(shape, heads_kv=shape.heads_q)
    executed = [
        sum(k.steps * k.flops_per_step for k in work.of_call(x, "bwd", "bfloat16", H200).kernels)
        for x in (shape, alone)
    ]
    assert executed[0] == executed[1]


def test_least_bytes_of_decode():
    assert call("4,32,8,1,8192,128,full", DECODE).least_bytes == counts.decode_bytes(
        Shape.parse("4,32,8,1,8192,128,full")
    )
    latent = call("4,128,1,1,8192,576,512,full", DECODE)  # V is the first columns of K
    assert latent.least_bytes == 2 * 4 * (8192 * 576 + 128 * (576 + 512))
    window = call("4,32,8,1,8192,128,causal,window=1023", DECODE)
    assert window.least_bytes == 2 * 4 * (8 * 1024 + 32) * 256


def test_hbm_traffic_is_the_least_while_the_l2_holds_the_keys():
    short, long = call("1,4,4,16384,16384,128,full"), call("1,4,4,262144,262144,128,full")
    assert model.hbm_bytes(short) == short.least_bytes
    assert model.hbm_bytes(long) > 5 * long.least_bytes
    assert model.hbm_bytes(long) < sum(kernel.steps * kernel.step_bytes for kernel in long.kernels) / 100


@pytest.mark.parametrize(
    ("tiles", "ctas", "static", "end"),
    [
        (((4, 3),), 2, False, 8),
        (((4, 1), (1, 4)), 2, False, 4),
        (((1, 4), (4, 1)), 2, False, 6),
        (((3, 1), (1, 1), (3, 1)), 2, True, 6),
        (((3, 1), (1, 1), (3, 1)), 2, False, 4),
        (((5, 1),), 132, False, 5),
    ],
)
def test_makespan(tiles, ctas, static, end):
    assert model.makespan(tiles, ctas, float, static) == end


def test_makespan_of_very_many_tiles_is_their_mean():
    assert model.makespan(((2, model.EXACT_TILES), (1, 2)), 4, float) == (2 * model.EXACT_TILES + 2) / 4


def test_launch_order_is_longest_first_over_groups_of_heads():
    order = tiles.launch_order([[1, 2, 3]], 4, 2, False, True, last=True)
    assert order == ((3, 2), (2, 2), (1, 2), (3, 2), (2, 2), (1, 2))
    assert tiles.launch_order([[1, 2], [1, 2]], 2, 1, False, False, last=True) == ((1, 1), (2, 1)) * 4
    assert tiles.launch_order([[1, 3], [2]], 2, 1, True, True, last=True) == ((3, 2), (2, 2), (1, 2))
    uneven = tiles.launch_order([[1, 2]], 4, 2, False, True, last=True, shares=(3, 1))
    assert uneven == ((6, 1), (2, 1), (3, 1), (1, 1)) * 2


def test_step_is_as_long_as_its_longest_work_and_shorter_than_all():
    clocks = {"tensor cores": 4.0, "shared memory": 3.0, "exponential unit": 2.0, "adding dq in L2": 1.0}
    products = 4 + 3 * model.UNHIDDEN
    assert model.step_clocks(clocks, 0.5) == products + (2 + 1) / 2
    assert model.step_clocks(clocks | {"fp32 instructions": 5.0}, 0.0) == 7, "the same warps do both"


RESULTS = [(gpu, found) for gpu in (H100, H200) for found in errors.of_gpu(gpu)]
DOCUMENTED = re.findall(
    r"^\| (H[12]00) \| (\w+) \| (\d+) \| ([\d.]+) % \| (\d+) % \| ([\d.]+), ([\d.]+) \|$",
    (Path(__file__).parents[1] / "docs" / "explain.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize(
    ("gpu", "found"), RESULTS, ids=[f"{gpu.name} {found.path.stem}" for gpu, found in RESULTS]
)
def test_model_is_as_good_as_the_docs_say(gpu, found):
    """docs/explain.md has a row per file of results, with the numbers that --check prints."""
    assert len(found.ratios) >= 6
    low, high = min(found.ratios.values()), max(found.ratios.values())
    expected = (
        gpu.name.split()[1],
        found.path.stem,
        str(len(found.ratios)),
        f"{100 * found.median:.1f}",
        f"{100 * found.close:.0f}",
        f"{low:.2f}",
        f"{high:.2f}",
    )
    assert expected in DOCUMENTED, errors.table(gpu)
    assert found.close >= 0.85, errors.table(gpu)


def test_documented_errors_are_of_files_that_exist():
    assert {row[:2] for row in DOCUMENTED} == {
        (gpu.name.split()[1], found.path.stem) for gpu, found in RESULTS
    }


def test_bytes_of_fp32_count_the_lse_once():
    """q, k, v and out in 4 bytes each, the log-sum-exp in 4; a backward also has dout and three gradients."""
    shape = Shape.parse("2,4,2,256,512,64,full")
    q, k = 2 * 4 * 256 * 64, 2 * 2 * 512 * 64
    lse = 4 * 2 * 4 * 256
    found = {x: work.of_call(shape, x, "float32-high", H200) for x in ("fwd", "bwd")}
    assert found["fwd"].least_bytes == 4 * (2 * q + 2 * k) + lse
    assert found["bwd"].least_bytes == 4 * (4 * q + 4 * k) + lse
    assert found["fwd"].flops == 2 * 2 * 4 * 256 * 512 * 128
    executed = sum(kernel.steps * kernel.flops_per_step for kernel in found["fwd"].kernels)
    assert executed == found["fwd"].flops, "a product of parts counts as one"


def test_backward_leaves_out_the_queries_that_launches_leave_out():
    left_out, whole = (call(f"2,8,8,{queries},1500,128,causal", "bwd") for queries in (4000, 1500))
    assert set(whole.helpers) < set(left_out.helpers) and left_out.launches == whole.launches + 2
    assert left_out.kernels == whole.kernels
    assert left_out.shape.seqlen_q == 4000 and left_out.least_bytes > 1.5 * whole.least_bytes
    counted, few = (call(f"1,4,4,{queries},1500,128,causal", "bwd") for queries in (4000, 1500))
    assert (
        counted.launches == few.launches and counted.helpers[0].bytes == few.helpers[0].bytes * 4000 // 1500
    )


def test_model_orders_what_it_should():
    times = {
        text: model.estimate(call(text)).seconds
        for text in ("1,16,16,4096,4096,128,full", "1,16,16,4096,4096,128,causal")
    }
    full, causal = times.values()
    assert causal < 0.65 * full
    assert model.estimate(call("1,16,16,4096,4096,128,full", "bwd")).seconds > 2 * full
    h20 = gpus.GPUS["NVIDIA H20"]
    assert model.estimate(call("1,16,16,4096,4096,128,full", gpu=h20)).seconds > 4 * full, (
        "a quarter of the tensor cores"
    )
    decode = "32,32,8,1,8192,128,full"
    on_h20, on_h200 = (model.estimate(call(decode, DECODE, gpu)) for gpu in (h20, H200))
    assert on_h200.bound == model.MEMORY
    assert on_h20.bound == "tensor cores", "64 rows per tile for 4 that exist, at a quarter of the rate"


@pytest.mark.parametrize(
    ("text", "direction", "bound"),
    [
        ("4,16,16,4096,4096,128,full", "fwd", "tensor cores"),
        ("2,8,8,8192,8192,256,causal", "bwd_det", "tensor cores"),
        ("32,32,8,1,8192,128,full", DECODE, model.MEMORY),
        ("1,8,1,1,512,128,full", DECODE, model.LAUNCHES),
        ("4,16,16,3000,77,64,full", "fwd", model.MEMORY),
    ],
)
def test_bound(text, direction, bound):
    assert model.estimate(call(text, direction)).bound == bound


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("name", [name for name in SHAPES if not name.startswith("paper")])
def test_every_named_shape_is_explained(name, direction):
    shape = SHAPES[name]
    try:
        check(shape, direction)
    except ValueError as error:
        assert (direction == DECODE and str(shape) in str(error)) or "head dims" in str(error)
        return
    text = report.text(work.of_call(shape, direction, "float16", H200), "float16")
    for section in ("Work", "Memory", "Roofline", "Time by the model", "Measured", "Config"):
        assert f"\n{section}\n" in text
    assert not re.search(r"\bnan\b|\binf\b", text)


def run(capsys, *words: str) -> str:
    """Output of the command, with the line breaks of long lines taken back."""
    assert cli.main(["explain", *words]) == 0
    return re.sub(r"\n {6,}(?=\S)", " ", capsys.readouterr().out)


def test_explain_prints_the_numbers_of_a_forward(capsys):
    out = run(capsys, "paper-d128-causal-8k", "--gpu", "H200")
    shape = SHAPES["paper-d128-causal-8k"]
    assert out.startswith("forward of 2,16,16,8192,8192,128,128,causal, bfloat16, on NVIDIA H200\n====")
    assert report.short(counts.flops(shape, "fwd"), "FLOP") in out
    assert report.short(counts.fwd_bytes(shape), "B") in out
    assert "H100 80GB HBM3 295" in out and "A10 208" in out
    assert re.search(
        r"predicted / measured (0\.9|1\.0)\d \(nvidia_h200/fwd.jsonl, row paper-d128-causal-8k, commit", out
    )
    choice = configs.choose_config(shape.problem("bfloat16"), "long", H200.name)
    assert f"from {choice.source}" in out and f"  {choice.config}\n" in out
    assert "bound by         tensor cores" in out


def test_explain_of_all_passes_and_several_shapes(capsys):
    out = run(capsys, "article", "1,8,8,100,300,64,causal", "--pass", *PASSES, "--dtype", "float16")
    assert [line.split(" of ")[0] for line in out.splitlines() if " float16, on " in line] == [
        "forward", "backward", "deterministic backward", "decode",
    ] * 2  # fmt: skip
    assert "zeros for the fp32 sums of dq" in out
    shared = run(capsys, "1,8,2,4096,4096,128,causal", "--pass", "bwd_det")
    assert "2 passes take 7 products" in shared
    assert "has no such row for NVIDIA H200; tl-attention bench --pass bwd --deterministic --shapes" in out


def test_explain_of_another_gpu_says_that_the_model_is_not_checked_there(capsys):
    out = run(capsys, "article", "--gpu", "h100 pcie")
    assert "on this GPU it is not checked" in out and "has no such row for NVIDIA H100 PCIe" in out
    assert "as NVIDIA H100 PCIe has no such row" in out
    assert "not checked" not in run(capsys, "article", "--gpu", "h200")


def test_unknown_gpu_is_said_to_be_unknown():
    gpu = replace(H200, name="NVIDIA H100 80GB HBM3 MIG 3g.40gb", sms=60)
    text = report.text(call("1,8,8,1024,1024,128,causal", gpu=gpu), "bfloat16")
    assert "this GPU is unknown" in text and "it is not checked" in text


def test_lines_are_not_too_long(capsys):
    assert cli.main(["explain", "gqa-h64-8k", "--pass", *PASSES]) == 0
    lines = capsys.readouterr().out.splitlines()
    paths = str(configs.data_dir())
    assert [
        line for line in lines if len(line) > report.WIDTH and paths not in line and "cache" not in line
    ] == []


def test_explain_of_splits(capsys):
    assert "CTAs share the keys of a tile" in run(capsys, "few-h8-128x16k", "--gpu", "h200")
    out = run(capsys, "1,64,8,1,131072,128,full,page=64", "--pass", "decode", "--gpu", "h200")
    assert (
        "pages 64" in out
        and "33 CTAs per sequence" in out
        and "decode.jsonl, row decode-page64-h64-b1-128k" in out
    )


def test_installed_package_says_that_it_has_no_results(monkeypatch, capsys):
    assert measured.results_dir().name == "results"
    with monkeypatch.context() as patch:
        patch.setattr(configs, "installed", lambda: True)
        assert measured.results_dir() is None
    monkeypatch.setattr(measured, "results_dir", lambda: None)
    assert "an installed package has none; a checkout has them in benchmarks/results" in run(
        capsys, "article"
    )
    with pytest.raises(SystemExit, match="--check: expected benchmarks/results"):
        cli.main(["explain", "--check"])


def test_results_are_found_by_problem_pass_dtype_and_gpu(tmp_path, monkeypatch):
    folder = tmp_path / "nvidia_h200"
    folder.mkdir()
    header = {"pass": "fwd", "dtype": "bf16", "commit": "abc", "gpu": "NVIDIA H200"}
    shape = SHAPES["article"]
    rows = {"tl_attention": {"ms": 0.1}, "fa3": {"ms": 0.2}}
    lines = [
        header,
        {"shape": "article", "problem": str(shape), "rows": rows, "l2": "warm"},
        {"shape": "failed", "problem": str(shape), "rows": {"tl_attention": {"status": "failed"}}},
    ]
    (folder / "fwd.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(measured, "results_dir", lambda: tmp_path)
    (found,) = measured.find(shape, "fwd", "bfloat16", "NVIDIA H200")
    assert (found.ms, found.commit, found.warm) == (0.1, "abc", True)
    for asked in (
        ("bwd", "bfloat16", "NVIDIA H200"),
        ("fwd", "float16", "NVIDIA H200"),
        ("fwd", "bfloat16", "NVIDIA H100 PCIe"),
    ):
        assert measured.find(shape, *asked) == []
    assert measured.find(replace(shape, batch=2), "fwd", "bfloat16", "NVIDIA H200") == []


def test_check_prints_the_error_of_every_file(capsys):
    out = run(capsys, "--check", "--gpu", "h200")
    for found in (found for gpu, found in RESULTS if gpu == H200):
        assert f"{found.path.name} " in out
    assert "median error" in out


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_plot(kind, capsys, tmp_path):
    path = tmp_path / f"roofline.{kind}"
    out = run(capsys, "paper-d128-causal-8k", "--pass", "fwd", "decode", "--plot", str(path), "--gpu", "h200")
    assert out.endswith(f"roofline: {path}\n") and path.stat().st_size > 1000
    if kind == "png":
        assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"--plot needs matplotlib: pip install 'tl-attention\[bench\]'"):
        cli.main(["explain", "article", "--plot", str(tmp_path / "a.png")])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "expected a SHAPE such as 1,32,8,4096,4096,128,causal, or --check; got neither"),
        (["articel"], "shape 'articel': not in configs/shapes.toml"),
        (["1,2,3"], "with mask causal or full, got '3'"),
        (["1,8,3,64,64,128,full"], "Hq a multiple of Hkv, got 8 and 3"),
        (["1,8,8,64,64,512,full"], "head dims: expected at most one of d64, .* for fwd, got d512"),
        (["1,8,8,64,64,640,full", "--pass", "decode"], "head dims: .*d576-512 for decode, got d640"),
        (["1,8,8,64,64,128,full,page=16"], "page is an option of --pass decode, got --pass fwd"),
        (
            ["1,8,8,64,64,128,full,ragged", "--pass", "bwd"],
            "ragged is an option of --pass decode, got --pass bwd",
        ),
        (["1,8,8,64,64,128,full,page=17", "--pass", "decode"], "N a multiple of 16, got 17"),
        (["1,8,8,4,64,128,full,dropout=0.1", "--pass", "decode"], "expected some of window, .* got dropout"),
        (["1,8,8,64,64,128,full,packed", "--pass", "decode"], "got packed"),
        (
            ["article", "--pass", "decode", "--dtype", "float32-high"],
            "dtype: expected one of bfloat16, float16 for decode",
        ),
        (["article", "--gpu", "A100"], "gpu: expected a Hopper GPU.*got 'A100'"),
        (["--check", "--plot", "a.png"], "--plot: expected a SHAPE to draw, got none"),
        (["article", "--plot", "/no/such/folder/a.png"], "--plot: .*/no/such/folder/a.png"),
        (
            ["article", "--plot", "a.xyz"],
            "--plot: expected a file that ends with .png, .svg, .pdf, got a.xyz",
        ),
        (["article", "--ranks", "2000"], "--ranks: expected numbers from 2 to 1024, got 2000"),
        (["article", "--ranks", "2", "--pass", "bwd"], "--pass: expected none with --ranks"),
        (["article", "--ranks", "2", "--plot", "a.png"], "--plot: expected none with --ranks"),
        (["--check", "--ranks", "2"], "--ranks: expected a SHAPE, got none"),
        (["article", "--link", "ib"], "--link: expected --ranks beside it, got none"),
        (["99999999,1,1,64,64,64,full"], "expected B x Hq of at most 262144, got 99999999"),
        (["1,1,1,64,99999999999,64,full"], "expected Sk of at most 67108864, got 99999999999"),
        (["1,8,8,64,64,64,full,softcap=-5"], "expected options of .*, got 'softcap=-5'"),
        (["1,8,8,64,64,64,full,softcap=inf"], "expected options of .*, got 'softcap=inf'"),
        (["1,8,8,64,64,64,full,dropout=nan"], "expected options of .*, got 'dropout=nan'"),
        (["1,8,8,64,64,64,full,dropout=1"], "expected options of .*, got 'dropout=1'"),
        (["1,8,8,64,64,64,full,sink,sink"], "expected each option once, got sink twice"),
        (["1,8,8,64,128,128,full", "--ranks", "2"], "expected one sequence with Sq equal to Sk"),
        (["1,8,8,64,64,128,full", "--ranks", "64"], "expected at least two tokens per rank"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_explain_refuses(words, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"tl-attention explain: .*{text}"):
        cli.main(["explain", *words])


@pytest.mark.parametrize("words", [["article", "--pass", "sideways"], ["article", "--dtype", "fp8"]])
def test_explain_refuses_choices(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["explain", *words])
    assert "invalid choice" in capsys.readouterr().err


def test_constants_of_the_kernels():
    source = Path(work.__file__).parents[1] / "kernels" / "decode_work.py"
    assert f"MIN_KEYS_PER_CTA = {work.MIN_KEYS_PER_CTA} " in source.read_text()


def test_explain_ranks_prints_every_method(capsys):
    out = run(capsys, "1,32,8,8192,8192,128,causal", "--ranks", "2", "8", "64")
    rows = re.findall(r"^ +(\d+)  (\w+) .* (\d\.\d\d)", out, re.MULTILINE)
    assert sorted((int(ranks), method) for ranks, method, _ in rows) == [
        (n, method) for n in (2, 8, 64) for method in ("gather", "ring")
    ]  # fmt: skip
    best = [max(float(share) for ranks, _, share in rows if ranks == n) for n in ("2", "8", "64")]
    assert 1 > best[0] > best[1] > best[2] > 0


def test_explain_ranks_of_ten_million_tokens():
    shape = Shape.parse("1,32,8,10485760,10485760,128,causal")
    fast, slow = (
        {one.method: one for one in scale.methods(shape, 1024, scale.LINKS[link], "bfloat16", H200)}
        for link in ("nvlink", "ib")
    )
    assert scale.efficiency(shape, fast["ring"], 1024, "bfloat16", H200) > 0.9
    assert slow["gather"].seconds > fast["gather"].seconds
    assert (
        slow["gather"].buffer == 10485760 * 8 * 256 * 2
        and slow["ring"].buffer == slow["gather"].buffer // 512
    )
    assert "above the limit of auto: ring" in scale.table(shape, [64], "ib", "bfloat16", H200)


def test_explain_ranks_of_a_window_moves_little():
    full, window = (
        scale.methods(
            Shape.parse(f"1,32,8,65536,65536,128,causal{w}"), 8, scale.LINKS["nvlink"], "bfloat16", H200
        )
        for w in ("", ",window=1023")
    )
    received = [next(one.received for one in found if one.method == "gather") for found in (full, window)]
    assert received[1] == 2 * 2 * 1023 * 8 * 256 * 2 and received[0] > 40 * received[1]


@pytest.mark.parametrize("direction", ["bwd", "bwd_det"])
def test_backward_of_fp32_with_options_is_explained(direction, capsys):
    out = run(capsys, "1,8,8,512,512,64,causal,window=100", "--pass", direction, "--dtype", "float32-high")
    assert "fp32-high d64" in out and "bf16 parts of fp32 tensors" in out
