"""Write docs/performance.md, README's speed block and plot from the stored results.

python benchmarks/report.py                    the results of benchmarks/results
python benchmarks/report.py bench_out          those of another folder, to bench_out/performance.md
python benchmarks/report.py --peers peers.csv  with new scores
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import peers
import performance
import rows as row_files


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders", nargs="*", type=Path, help="folders of a run; default: each of benchmarks/results"
    )
    parser.add_argument("--peers", nargs="+", type=Path, default=(), help=f"{peers.HELP}; default: no change")
    args = parser.parse_args(argv)
    folders = args.folders or sorted(path for path in performance.RESULTS.iterdir() if path.is_dir())
    try:
        table = peers.read(args.peers)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    written: dict[Path, None] = {}
    for folder in folders:
        if not row_files.stored_files(folder):
            parser.error(f"{folder}: expected PASS.jsonl files of benchmarks/run.py, found none")
        if table:
            for path in row_files.stored_files(folder).values():
                judge_file(path, table)
        written |= dict.fromkeys(performance.write(folder))
    print(f"Written: {', '.join(map(str, written))}")
    return 0


def judge_file(path: Path, table: peers.Table) -> None:
    """Rewrite a file with scores by the table."""
    rows, header = row_files.read(path)
    peers.judge(rows, table)
    row_files.write(path, rows, header)


if __name__ == "__main__":
    sys.exit(main())
