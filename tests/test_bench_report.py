"""Files, tables, scores and generated pages of the benchmark, from rows that are made up."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tl_attention.problem.target import DEFAULT_GPU, gpu_slug
from tl_attention.testing.shapes import DIRECTIONS, Shape, chosen_shapes
from tl_attention.tools.explain.measured import bench_words

pytest.importorskip("rich", reason="the benchmark needs rich")
import flex_page
import peers
import performance
import plots
import ranks
import report
import row_grids
import rows as row_files
import run
import summary
import tables
from rich.console import Console
from rows import Row

ENVIRONMENT = {"gpu": "H", "torch": "2", "commit": "c", "command": "run.py"}


def fake_row(provider: str, shape: str, ms: float | None, direction: str = "fwd", **other: object) -> Row:
    """A row of a named shape, or of one given by its sizes; ms None: a wrong row."""
    problem = chosen_shapes([shape])[shape]
    row = {"provider": provider, "title": provider, "library": "1.0", "layout": "bhsd", "shape": shape}
    row |= {"pass": direction, "dtype": "bf16", "gpu": "H", "commit": "c", "l2": "cold", "timer": "graph"}
    row |= row_files.sizes_of(problem) | dict.fromkeys(row_files.MEASURED)
    if ms is None:
        return row | {"status": "wrong", "correct": False, "reason": "out[0] is 1 instead of 2"} | other
    solved = problem.plain if provider == "plain" else problem
    row |= {"status": "ok", "reason": None, "ms": ms, "correct": True, "max_err_ratio": 0.5}
    return row | row_files.speeds_of(solved, direction, ms) | other


def ours(shape: str, ms: float, direction: str = "fwd", **measured: object) -> Row:
    """Our row; measured: peer=our speed over its, and other keys of a row."""
    ratios = {
        name: [x, x, x] for name, x in measured.items() if name in ("fa2", "cudnn", "fa4", "flex", "plain")
    }
    other = {key: x for key, x in measured.items() if key not in ratios}
    return fake_row("tl_attention", shape, ms, direction, **other | ({"ratios": ratios} if ratios else {}))


SHORT, LONG = "paper-d128-full-1k", "paper-d128-full-4k"


def forward(direction: str = "fwd") -> list[Row]:
    """Two problems: one that cudnn wins, one in which cudnn is wrong and fa4 is absent."""
    return [
        ours(SHORT, 1.0, direction, fa2=2.0, cudnn=0.9),
        fake_row("fa2", SHORT, 2.0, direction),
        fake_row("cudnn", SHORT, 0.9, direction),
        ours(LONG, 2.0, direction, fa2=1.125),
        fake_row("fa2", LONG, 2.25, direction, timer="eager: graph capture failed, RuntimeError: no"),
        fake_row("cudnn", LONG, None, direction),
        fake_row("fa4", LONG, None, direction, status="skipped", correct=None, reason="not installed"),
    ]


ROWS = forward()


def store(folder: Path, rows: list[Row], set_name: str = "main") -> Path:
    """The file that a run writes."""
    folder.mkdir(exist_ok=True)
    path = folder / row_files.file_name(rows[0]["pass"], set_name)
    facts = {row["provider"]: {key: row[key] for key in ("title", "library", "layout")} for row in rows}
    header = {key: rows[0][key] for key in ("pass", "dtype", "gpu", "commit")}
    with path.open("w") as file:
        row_files.write_header(file, header | {"environment": ENVIRONMENT, "providers": facts})
        for group in row_files.by_problem(rows).values():
            row_files.write_problem(file, list(group.values()))
    return path


def page_of(folder: Path) -> str:
    return performance.section(folder, folder / "performance.md")


def test_bench_files_hold_all_of_a_row_in_four_digits(tmp_path: Path) -> None:
    rows = [ours(SHORT, 1.23456789, fa2=1.98765432), fake_row("fa2", SHORT, 2.5), *ROWS[3:]]
    path = store(tmp_path, rows)
    assert '"ms": 1.235' in path.read_text() and "1.988" in path.read_text()
    assert "tflops" not in path.read_text(), "it follows from the time"
    found, header = row_files.read(path)
    assert header["environment"] == ENVIRONMENT
    for row, back in zip(rows, found, strict=True):
        assert back["tflops"] == (row["tflops"] and pytest.approx(row["tflops"], rel=1e-3))
        same = set(row) - {"ms", "tflops", "gbps", "ratios"}
        assert {key: back[key] for key in same} == {key: row[key] for key in same}


def test_bench_files_scale_speeds_by_the_rates_of_their_run(tmp_path: Path) -> None:
    path = store(tmp_path, ROWS)
    facts = ENVIRONMENT | {"cuBLAS 8192³ bf16": "700 TFLOPS", "copy": "4000 GB/s, ridge point 175 FLOP/B"}
    path.write_text(path.read_text().replace(json.dumps(ENVIRONMENT), json.dumps(facts)))
    row = row_files.read(path)[0][0]
    assert row["pct_cublas"] == pytest.approx(row["tflops"] / 7)
    assert row["pct_copy"] == pytest.approx(row["gbps"] / 40)


def test_bench_rows_of_another_run_are_added(tmp_path: Path) -> None:
    path = store(tmp_path / "a", ROWS[:3])
    again = [ours(SHORT, 1.1, flex=3.0, fa2=1.0), fake_row("flex", SHORT, 3.3), fake_row("fa2", SHORT, 1.1)]
    new = store(tmp_path / "b", [*again, ours(LONG, 2.0)])
    row_files.add(path, new)
    rows, header = row_files.read(path)
    assert [(row["shape"], row["provider"], row["ms"]) for row in rows] == [
        *(
            (SHORT, name, ms)
            for name, ms in (("tl_attention", 1.0), ("fa2", 2.0), ("cudnn", 0.9), ("flex", 3.3))
        ),
        (LONG, "tl_attention", 2.0),
    ]
    assert row_files.peer_ratios(rows[0]) == {"fa2": 2.0, "cudnn": 0.9, "flex": 3.0}
    assert header["providers"]["flex"]["library"] == "1.0 (in a run of its own, commit c)"
    assert not new.exists()
    third = store(tmp_path / "c", ROWS[:2])
    row_files.add(third, path)
    assert row_files.read(third)[1]["providers"]["flex"]["library"] == "1.0 (in a run of its own, commit c)"


def test_bench_rows_of_another_run_take_the_place_of_older_ones(tmp_path: Path) -> None:
    path = store(tmp_path / "a", ROWS)
    again = [ours(SHORT, 0.5, fa4=2.0) | {"commit": "d"}, fake_row("fa4", SHORT, 1.0) | {"commit": "d"}]
    new = store(tmp_path / "b", again)
    row_files.replace(path, new)
    rows, header = row_files.read(path)
    groups = row_files.by_problem(rows)
    assert [list(group) for group in groups.values()] == [
        ["tl_attention", "fa4"],
        ["tl_attention", "fa2", "cudnn", "fa4"],
    ]
    assert [next(iter(group.values()))["commit"] for group in groups.values()] == ["d", "c"]
    assert (header["commit"], "fa4" in header["providers"]) == ("c", True)
    assert not new.exists()
    assert "- Forward at d: B16 H16 S1024 d128 full" in page_of(tmp_path / "a")


def test_bench_geomeans() -> None:
    means = {"fa2": (pytest.approx(1.5), 2, 2), "cudnn": (pytest.approx(0.9), 0, 1)}
    assert tables.geomeans(ROWS) == means


def test_bench_page_shows_losses_wrong_rows_and_reasons(tmp_path: Path) -> None:
    store(tmp_path, ROWS)
    (tmp_path / performance.NOTES).write_text(f'tests = "all passed"\n[fwd]\n{SHORT} = "memory"\n')
    text = page_of(tmp_path)
    assert "| B16 H16 S1024 d128 full | 137 | 69 | **153** |" in text
    assert "| B4 H16 S4096 d128 full | **275** | 244 | WRONG |" in text
    assert "| Forward | 1.50x (2) | 0.90x (1) | 1.01x (2) |" in text
    assert "1.50x fa2 (faster in 2 of 2 rows), 0.90x cudnn (faster in 0 of 1 rows)" in text
    assert "| B16 H16 S1024 d128 full | 0.90 | cudnn | memory |" in text
    assert "cudnn wrong: out[0] is 1 instead of 2 (B4 H16 S4096 d128 full)" in text
    assert "fa2 eager: graph capture failed" in text
    assert "fa4 skipped: not installed" in text
    assert "FLOPs: 2 x pairs x (head_dim + head_dim_v) x batch" in text
    assert "- Forward: `run.py`; fa2: 1.0; cudnn: 1.0" in text
    assert "### Tests on this GPU\n\nall passed" in text


def test_bench_page_shows_several_gpus(tmp_path: Path) -> None:
    store(tmp_path, ROWS)
    row = {
        "problem": "causal, 8 tokens",
        "method": "gather",
        "one_gpu_ms": 3.0,
        "ms": 2.0,
        "host_ms": 1.0,
        "efficiency": 0.75,
    }
    wrong = row | {"method": "ring", "status": "wrong", "error": 0.5}
    found = {
        "ranks": 2,
        "environment": {"link": "NV18", "clocks": "1980 MHz"},
        "rows": [row | {"status": "ok"}, wrong],
    }
    (tmp_path / ranks.STORED).write_text(json.dumps(found))
    text = page_of(tmp_path)
    assert "### Several GPUs" in text and "clocks 1980 MHz, link NV18." in text
    assert "| causal, 8 tokens | gather | 3.00 | 2.00 | 1.00 | 0.75 |" in text
    assert "| causal, 8 tokens | ring | 3.00 | WRONG, error 0.5 | – | – |" in text


def test_bench_page_puts_deterministic_gradients_beside_the_backward(tmp_path: Path) -> None:
    store(tmp_path, forward("bwd"))
    slower = [
        ours(SHORT, 1.2, "bwd_det"),
        fake_row("fa4", SHORT, 0.5, "bwd_det"),
        ours("paper-d128-full-2k", 9.0, "bwd_det"),  # another problem
        ours(LONG, 2.4, "bwd_det"),
    ]
    store(tmp_path, slower)
    text = page_of(tmp_path)
    assert "Deterministic gradients take 1.20x the time, at most 1.20x." in text
    assert "| problem | tl_attention | fa2 | cudnn | deterministic |" in text
    assert "| B16 H16 S1024 d128 full | 344 | 172 | **382** | 286 |" in text
    assert "### Backward, deterministic" not in text
    same_run = ours(SHORT, 1.0, "bwd_det") | {"provider": "plain"}
    store(tmp_path, [*slower, same_run])
    assert "Deterministic gradients take 1.20x the time, at most 1.20x." in page_of(tmp_path)
    store(tmp_path, [*slower, same_run | {"ms": 0.6}])
    assert "Deterministic gradients take 1.55x the time, at most 2.00x." in page_of(tmp_path)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bench_page_says_what_was_measured(direction: str, tmp_path: Path) -> None:
    store(tmp_path, forward(direction))
    assert f"### {tables.TITLES[direction].capitalize()}" in page_of(tmp_path)
    assert ("3 head_dim + 2 head_dim_v" in tables.convention(direction)) == direction.startswith("bwd")
    assert tables.terminal(forward(direction)).title == f"{tables.TITLES[direction]}, TFLOPS"


def test_bench_report_writes_a_page_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    store(tmp_path, ROWS)
    assert report.main([str(tmp_path)]) == 0
    page, plot = tmp_path / "performance.md", tmp_path / "fwd.svg"
    text = page.read_text()
    assert "![Forward](fwd.svg)" in text
    assert text.count("- Pairs are visible pairs") == 1
    assert str(page) in capsys.readouterr().out
    before = plot.read_bytes(), page.read_bytes()
    assert report.main([str(tmp_path)]) == 0
    assert (plot.read_bytes(), page.read_bytes()) == before, "the same results make the same files"
    with pytest.raises(SystemExit):
        report.main([str(tmp_path / "empty")])
    assert "expected PASS.jsonl files" in capsys.readouterr().err


def test_bench_readme_block_has_a_caption_and_names_losses(tmp_path: Path) -> None:
    shape = f"{plots.SERIES}8k"
    store(tmp_path, [row | {"shape": shape} for row in ROWS[:3]])
    store(tmp_path, [row | {"shape": shape, "commit": "d"} for row in forward("bwd")[:3]])
    (tmp_path / performance.NOTES).write_text('caption = "Older rows."\n')
    text = performance.with_speed_block("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n", tmp_path)
    assert text.startswith(
        "before\n<!-- speed -->\n![TFLOPS of forward and backward by sequence length](docs/speed.svg)\n"
    )
    for name, commit in (("Forward", "c"), ("Backward", "d")):
        assert f"{name}: measured at commit {commit}; rows whose kernels are today's: not known. " in text
    assert " Older rows.\n" in text
    assert "| Forward | 2.00x (2.00) | 0.90x (0.90) |\n| Backward | 2.00x (2.00) | 0.90x (0.90) |\n" in text
    assert "is faster: Forward 1 of 1 (worst 0.90); Backward 1 of 1 (worst 0.90)." in text
    assert text.endswith("\n<!-- /speed -->\nafter\n")
    assert performance.with_speed_block("no markers", tmp_path) == "no markers"


def stored_results() -> Path:
    folder = performance.RESULTS / gpu_slug(DEFAULT_GPU)
    if not row_files.stored_files(folder):
        pytest.skip("no results are stored: python benchmarks/run.py --out benchmarks/results/GPU")
    return folder


def test_bench_performance_page_is_that_of_the_stored_results() -> None:
    stored_results()
    text = performance.PAGE.read_text()
    assert text == performance.whole_page(), "run python benchmarks/report.py"
    assert text.count("\n") <= 180, "a reader's page: the rows are in tables.md"


@pytest.mark.parametrize("folder", sorted(performance.RESULTS.glob("*/")), ids=lambda folder: folder.name)
def test_bench_tables_are_those_of_the_stored_results(folder: Path) -> None:
    assert (folder / performance.TABLES).read_text() == performance.tables_page(folder), (
        "run python benchmarks/report.py"
    )


@pytest.mark.parametrize("folder", sorted(performance.RESULTS.glob("*/")), ids=lambda folder: folder.name)
def test_bench_plots_are_those_of_the_stored_results(folder: Path) -> None:
    runs = {key: row_files.read(path)[0] for key, path in row_files.stored_files(folder).items()}
    found = {path.name: path.read_text() for path in performance.plots_of(folder).iterdir()}
    assert found == plots.draw(runs), "run python benchmarks/report.py"


PICTURES = {summary.MEANS: "![means]", ("fwd", "main"): "![fwd]"}


def test_bench_summary_page_shows_means_lengths_and_every_lost_row() -> None:
    runs = {("fwd", "main"): ROWS}
    text = summary.section("H", "tables.md", runs, {"fwd": {SHORT: "memory"}}, PICTURES, with_grids=True)
    assert "| Forward | 1.50x (1.12) | 0.90x (0.90), 1 of 2 | 1.01x | 1 of 2 |" in text
    assert "| Forward, H16 d128 full, 16k tokens | 137 (**0.90**) | 275 (1.12) |" in text
    assert "| Forward | B16 H16 S1024 d128 full 0.90 cudnn | memory |" in text
    assert "No library is faster" not in text
    assert "\n\n![means]\n\n| race |" in text and "H\n\n![fwd]\n\nTFLOPS;" in text
    without = summary.section("H", "tables.md", {("fwd", "main"): ROWS[3:]}, {}, {}, with_grids=False)
    assert "No library is faster in any row." in without and "16k tokens" not in without


def test_bench_lost_rows_of_one_reason_are_one_line() -> None:
    ratios = {f"1,1,1,{n},{n},64,64,full": ratio for n, ratio in ((64, 0.9), (32, 0.8), (16, 0.95))}
    rows = [ours(shape, 1.0, fa4=ratio) for shape, ratio in ratios.items()]
    rows += [fake_row("fa4", shape, ratio) for shape, ratio in ratios.items()]
    reasons = {rows[0]["shape"]: "memory", rows[1]["shape"]: "as long", "long": "memory"}
    text = summary.lost_rows({("fwd", "main"): rows}, {"fwd": reasons})
    assert "| Forward | B1 H1 S32 d64 full 0.80 fa4; B1 H1 S64 d64 full 0.90 fa4 | memory |" in text
    assert "| Forward | B1 H1 S16 d64 full 0.95 fa4 | not analysed |" in text


def test_bench_summary_page_shows_each_decode() -> None:
    rows = [
        ours("1,8,1,1,2048,128,128,full", 1.0, "decode", fa4=0.8),
        ours("128,8,1,1,2048,128,128,full", 1.0, "decode", fa4=1.5),
        ours("1,8,1,1,2048,128,128,full", 1.0, "decode", fa4=2.0, options=["page=16"]),
    ]
    text = row_grids.of_decode(rows)
    assert "| queries, heads, layout | B1 2k | B128 2k |" in text
    assert "| q1 H8/1 | **0.80** | 1.50 |" in text
    assert "| q1 H8/1 page=16 | 2.00 | – |" in text


def test_bench_readme_shows_the_stored_results() -> None:
    block = performance.speed_block(stored_results())
    readme = performance.README.read_text()
    assert f"<!-- speed -->\n{block}\n<!-- /speed -->" in readme, "run python benchmarks/report.py"
    assert block.count("\n") < 14
    assert performance.PLOT.read_text() == performance.draw_speed(stored_results()), (
        "run python benchmarks/report.py"
    )


def test_bench_flex_page_shows_the_stored_results() -> None:
    page = performance.FLEX_PAGE.read_text()
    assert page == performance.with_flex_blocks(page, stored_results()), "run python benchmarks/report.py"
    for name in ("masks", "functions", "torch", "biases", "fa4"):
        assert f"<!-- {name} -->\n| " in page and f"\n<!-- /{name} -->" in page, name


def test_bench_flex_page_has_a_cell_per_race() -> None:
    causal, cap = "flex-causal-d128-8k", "flex-softcap-d64-8k"
    option = {"option": [1, 0.99, 1], "flex": [2, 2.155, 3]}
    rows = [
        ours(causal, 1.0) | {"ratios": option},
        ours(cap, 2.0) | {"ratios": {"option": [1, 0.5, 1]}},
        fake_row("flex", cap, None, status="failed", correct=None, reason="no config"),
    ]
    found = flex_page.blocks({"fwd": rows, "bwd": []})
    assert "| causal | 1100 (0.99) | – | – | – |" in found["masks"]
    assert "races: 2.15 to 2.15 (forward, d128)." in found["masks"]
    assert "| softcap | – | 2.00 (0.50) | – | – |" in found["functions"] and "ALiBi" not in found["functions"]
    assert "| softcap | – | fails | – | – |" in found["torch"]


def test_bench_stored_notes_are_of_stored_rows() -> None:
    folder = stored_results()
    notes = performance.read_notes(folder)
    for name in (*performance.PROSE, "caption"):
        notes.pop(name, None)
    for stem, reasons in notes.items():
        rows, _ = row_files.read(folder / f"{stem}.jsonl")
        assert reasons.keys() <= {row["shape"] for row in rows}, stem


def test_bench_table_shows_geomeans() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables.terminal(ROWS))
    text = console.export_text()
    assert "geomean of ours over" in text
    assert "1.50x" in text
    assert "WRONG" in text


PEERS = {  # file -> text
    "tflops.csv": "pass,head_dim,mask,seqlen,batch,heads,cudnn,fa4,best\n"
    "fwd,128,full,1024,16,16,500,600,600\n"
    "fwd,128,causal,1024,16,16,,550,600\n"
    "bwd,128,full,1024,16,16,400,300,600\n",
    "us.csv": "pass,batch,heads_q,heads_kv,seqlen_q,seqlen_k,head_dim,head_dim_v,mask,timer,fa2_us,cudnn_us,fa3_us,fa4_us,best_tflops\n"
    "fwd,1,8,1,128,16384,128,128,causal,graph,426.4,400,160,200,51\n"
    "fwd,8,32,2,2048,2048,256,256,causal,do_bench,,971.3,,917.0,600\n",
}


@pytest.fixture
def peers_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "peers"
    folder.mkdir()
    for name, text in PEERS.items():
        (folder / name).write_text(text)
    return folder


def judged(row: Row, table: dict) -> Row:
    row = dict(row)
    peers.judge([row], table)
    return row


def test_bench_score_is_relative_to_the_best_peer(peers_folder: Path) -> None:
    table = peers.read([peers_folder])
    assert table == peers.read(sorted(peers_folder.iterdir()))
    row = ours(SHORT, 1.0, cudnn=0.9)
    assert judged(row, table)["score"] == pytest.approx(0.9 / 1.2)
    assert judged(row | {"pass": "bwd"}, table)["score"] == pytest.approx(0.9 / 1.5)
    both = judged(ours(SHORT, 1.0, cudnn=0.9, fa4=0.8), table)
    assert (both["score"], both["score_over_fa4"]) == (pytest.approx(0.75), 0.8)
    by_fa4 = judged(ours("paper-d128-causal-1k", 1.0, fa4=1.2), table)
    assert (by_fa4["score"], by_fa4["score_over"]) == (pytest.approx(1.2 * 550 / 600), "fa4")
    assert tables.notes([by_fa4]) == ["tl_attention score by way of fa4 (B16 H16 S1024 d128 causal)"]


def test_bench_score_by_a_table_of_microseconds(peers_folder: Path) -> None:
    table = peers.read([peers_folder / "us.csv"])
    few = "1,8,1,128,16384,128,causal"
    assert judged(ours(few, 1.0, cudnn=0.9), table)["score"] == pytest.approx(0.9 / (400 / 160))
    assert judged(ours(few, 1.0, fa4=1.0), table)["score"] == 160 / 200
    assert judged(ours("1,8,2,128,16384,128,causal", 1.0, cudnn=0.9), table)["score"] is None


@pytest.mark.parametrize(
    "other", [{"pass": "fwd_bwd"}, {"dtype": "fp16"}, {"seqlen_k": 999}, {"options": ["sink"]}]
)
def test_bench_rows_without_a_score_are_beside_the_best_of_the_run(other: dict, peers_folder: Path) -> None:
    table = peers.read([peers_folder])
    row = judged(judged(ROWS[0], table) | other, table)
    assert (row["score"], row["score_over"], row["vs_best"]) == (None, None, 0.9)
    assert judged(ours(SHORT, 1.0), {})["vs_best"] is None, "it ran alone"
    assert "vs_best" not in judged(fake_row("cudnn", SHORT, 1.0), {})


def test_bench_peers_of_other_columns_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ValueError, match="expected CSV files in it, found none"):
        peers.read([tmp_path])
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("seqlen,cudnn\n1,2\n")
    words = "expected the columns pass, .*best or pass, .*cudnn_us, found seqlen, cudnn"
    with pytest.raises(ValueError, match=words):
        peers.read([wrong])
    for path in (wrong, tmp_path / "absent.csv"):
        with pytest.raises(SystemExit):
            run.main(["--peers", str(path)])
        assert path.name in capsys.readouterr().err


def test_bench_summary_has_mean_and_worst_of_each_group() -> None:
    rows = [
        ours("gqa-h64-2k", 1.0, score=0.5),
        ours("gqa-h64-8k", 1.0, score=2.0),
        ours("gqa-d256-2k", 1.0, vs_best=0.9),
        ours("1,1,1,1,1,8,8,full", 1.0, vs_best=1.5),
        fake_row("tl_attention", "gqa-h32-2k", None),
        fake_row("fa4", SHORT, 1.0, score=9.0),
    ]
    assert tables.summary(rows) == [
        "gqa, score: 1.00 by geometric mean of 2, worst 0.50 (gqa-h64-2k)",
        "gqa, vs best peer in run: 0.90 by geometric mean of 1, worst 0.90 (gqa-d256-2k)",
        "unnamed, vs best peer in run: 1.50 by geometric mean of 1, worst 1.50 (1,1,1,1,1,8,8,full)",
        "gqa: tl_attention has no speed in 1",
    ]


def test_bench_slowest_rows_come_first() -> None:
    names = list(chosen_shapes(["paper-d64-*"]))
    lines = tables.slowest([ours(name, 1.0, score=1 - i / 100) for i, name in enumerate(names)])
    assert len(lines) == tables.SLOWEST
    assert lines[0] == f"0.89 score, {names[-1]} ({row_files.describe(ours(names[-1], 1.0))})"


def test_bench_shows_our_error_beside_that_of_fa2(tmp_path: Path) -> None:
    errors = {"dq": 3e-3, "dk": 3e-3, "dv": 2e-3}
    rows = forward("bwd")
    rows[0] |= {"mean_errors": errors}
    rows[1] |= {"mean_errors": errors | {"dk": 2e-3}}
    read, _ = row_files.read(store(tmp_path, rows))
    header, _, first, second = tables.markdown(read).splitlines()
    assert header.endswith("| ms | error | error by fa2 |")
    assert first.endswith(" | 1.50 |") and second.endswith(" | – |")


def test_bench_stored_runs_can_be_judged_anew(tmp_path: Path, peers_folder: Path) -> None:
    folder = tmp_path / "run"
    path = store(folder, ROWS)
    assert report.main([str(folder), "--peers", str(peers_folder)]) == 0
    rows, _ = row_files.read(path)
    assert rows[0]["score"] == pytest.approx(0.75)
    assert rows[3]["vs_best"] == 1.125
    assert (
        "| problem | tl_attention | fa2 | cudnn | ms | error | score |"
        in (folder / "performance.md").read_text()
    )


@pytest.mark.parametrize(
    ("text", "direction", "dtype", "words"),
    [
        ("1,2,2,48,48,32,32,causal", "fwd", "float16", "--pass fwd --shapes {} --dtype fp16"),
        ("1,2,2,64,64,64,causal,sink", "bwd_det", "bfloat16", "--pass bwd --deterministic --shapes {}"),
        ("1,2,2,128,128,64,full,function=half", "bwd", "bfloat16", "--pass bwd --shapes {} --set flex"),
        ("1,2,2,64,64,64,causal", "bwd", "float32-high", "--pass bwd --shapes {} --set fp32"),
        (
            "1,8,2,1,512,128,causal,page=64,ragged",
            "decode",
            "float16",
            "--pass decode --shapes {} --dtype fp16",
        ),
        ("1,2,2,128,128,64,full,function=half", "bwd_det", "bfloat16", None),
        ("1,2,2,64,64,64,causal,sink", "fwd", "float32-high", None),
        ("1,8,2,1,512,128,causal,sink", "decode", "bfloat16", None),
    ],
)
def test_explain_names_a_command_that_measures(text, direction, dtype, words):
    shape = Shape.parse(text)
    found = bench_words(shape, direction, dtype)
    assert found == (words and words.format(shape))
    if found:
        asked = run.parse_args(found.split())
        assert list(asked.shapes.values()) == [shape] and asked.direction == direction
