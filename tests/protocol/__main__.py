"""The command: checks kinds of calls, and prints a table of their kernels.

python -m tests.protocol                         every kind of call of the pack on 40 draws of lengths
python -m tests.protocol --shipped --draws 4     those of the manifest on 4
python -m tests.protocol -k 'fwd bf16 d128 causal' --lengths 64x800 --verbose
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

import torch

from .calls import Draw, call_of, kinds
from .check import ORDERS, check
from .launches import recorded
from .sample import NOT_CHECKED, check_kinds, program_of


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.protocol",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-k",
        dest="words",
        action="append",
        default=[],
        help="only kinds whose name has this text; may be repeated",
    )
    parser.add_argument(
        "--not", dest="without", action="append", default=[], help="no kinds whose name has this text"
    )
    parser.add_argument("--shipped", action="store_true", help="kinds of the manifest, not of the whole pack")
    parser.add_argument("--every", type=int, default=1, help="of the kinds only each n-th")
    parser.add_argument("--draws", type=int, default=40, help="draws of lengths per kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument(
        "--orders",
        type=int,
        default=2,
        help=f"orders of warps and copies per draw, in turn, of {len(ORDERS)}",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--seconds", type=float, default=1e9, help="most seconds per kind")
    one = parser.add_argument_group("one problem, in all orders")
    one.add_argument("--lengths", help="QUERIESxKEYS; of a packed batch several, joined by commas")
    one.add_argument("--heads", type=int, nargs=2, default=[2, 1], help="of queries and of keys")
    one.add_argument("--batch", type=int, default=1)
    one.add_argument("--window", type=int, nargs=2, default=[100, 0])
    one.add_argument("--sms", type=int, default=3, help="SMs of the GPU")
    one.add_argument("--source", action="store_true", help="print the translated kernels")
    parser.add_argument(
        "--verbose", action="store_true", help="all findings, and the functions of CUDA source that were met"
    )
    parser.add_argument("--list", action="store_true", help="only list the kinds")
    return parser.parse_args(words)


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    chosen = [kind for kind in kinds(not args.shipped) if all(x in kind.name for x in args.words)]
    chosen = [kind for kind in chosen if not any(x in kind.name for x in args.without)][:: args.every]
    if args.list:
        print("\n".join(kind.name for kind in chosen))
        return 0
    return one_problem(args, chosen) if args.lengths else many(args, chosen)


def one_problem(args: argparse.Namespace, chosen: list) -> int:
    pairs = (one.split("x") for one in args.lengths.split(","))
    draw = Draw(
        tuple((int(a), int(b)) for a, b in pairs), *args.heads, args.batch, tuple(args.window), args.sms
    )
    faults = 0
    for kind in chosen:
        for launch in recorded(call_of(kind, draw), draw.sms):
            if type(launch.config) in NOT_CHECKED:
                continue
            begin, program = time.time(), program_of(launch.problem, launch.config)
            if args.source:
                print(program.text)
            runs = check(launch, program, stop=not args.verbose)
            faults += bool(runs)
            print(
                f"{'FAULT' if runs else 'ok':6}{launch.problem}, {launch.config} ({time.time() - begin:.1f} s)",
                flush=True,
            )
            for run in runs:
                print(run)
            if args.verbose:
                print(
                    f"  functions of CUDA source: {', '.join(sorted(program.translated.externs)) or 'none'}"
                )
    return 1 if faults else 0


def many(args: argparse.Namespace, chosen: list) -> int:
    begin, draws = time.time(), list(range(args.first, args.first + args.draws))
    passed: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    faults: dict[str, list[str]] = {}
    skipped: dict[str, str] = {}
    for number, result in enumerate(check_kinds(chosen, draws, args.orders, args.jobs, args.seconds), 1):
        passed.update(result.passed)
        refused.update(result.refused)
        skipped.update(result.skipped)
        for name, texts in result.faults.items():
            faults.setdefault(name, []).extend(texts)
        state = "FAULT" if result.faults else "ok"
        print(f"{number}/{len(chosen)} {state:6}{result.name} ({result.seconds:.1f} s)", flush=True)
        for name, texts in result.faults.items():
            print(f"  {name}\n  " + texts[0].replace("\n", "\n  "), flush=True)
    print(f"\n{'kernel':100} {'passed':>7} {'faults':>7}")
    for name in sorted({*passed, *faults}):
        print(f"{name:100} {passed[name]:7} {len(faults.get(name, ())):7}")
    for text, count in refused.most_common():
        print(f"refused {count} times: {text}")
    for name, reason in sorted(skipped.items()):
        print(f"not checked: {name}: {reason}")
    total = sum(passed.values())
    print(
        f"{len({*passed, *faults})} kernels, {total} launches passed, {len(faults)} kernels with faults, {time.time() - begin:.0f} s"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
