"""Race two source trees on one GPU: a change of kernels, before and after.

    git worktree add ../before HEAD~1
    python benchmarks/trees.py ../before . --shapes 'paper-d128-*' 32,16,16,300,300,64,causal --pass fwd bwd
    python benchmarks/trees.py ../before . --shapes 'paper-*-1k' --pass bwd --dtype fp32-high

Each tree has a process with its package and inputs of its own, and this tree's benchmark. In a round each takes a sample of 10 ms, one
after the other in random order; a ratio is of the two samples of a round. Nothing is checked but that results are finite; `bits` says
whether those of both trees are equal. Sums in no fixed order, of dq, differ from call to call.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Column, Table

from tl_attention.problem.arguments import short_dtype_name
from tl_attention.problem.target import is_hopper
from tl_attention.testing.shapes import Shape, chosen_shapes

DTYPES = ("bf16", "fp16", "fp32-high", "fp32-highest")
PASSES = ("fwd", "bwd")
Call = Callable[[], Any]


class Tree:
    """The process of a source tree. Answers are dicts, with `error` if the tree cannot do what was asked.

    Args:
        folder: holds the package tl_attention.
        command: of the process; default: this file with --serve.
    """

    def __init__(self, folder: Path, command: Sequence[str] = ()):
        self.folder = folder.resolve()
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            command or [sys.executable, __file__, "--serve", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TL_ATTENTION_QUIET": "1"},
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """Ask and wait for the answer."""
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        return json.loads(answer) if answer else {"error": f"its process ended with {self.process.wait()}"}

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def race(trees: Sequence[Tree], question: dict[str, str], rounds: int) -> dict[str, Any]:
    """Samples of both trees on a problem.

    Returns:
        ms: per tree, the median. ratios: of the first tree's time to the second's, per round. same_bits: of the first results. Or `error`.
    """
    answers = [tree.ask(**question) for tree in trees]
    same_bits = len({answer.get("bits") for answer in answers}) == 1
    samples: list[list[float]] = [[] for _ in trees]
    for _ in range(rounds):
        for i in random.sample(range(len(trees)), len(trees)):
            if "error" not in answers[i]:
                answers[i] = trees[i].ask(sample=True)
                samples[i].append(answers[i].get("ms"))
    if errors := [
        f"{tree.folder.name}: {x['error']}" for tree, x in zip(trees, answers, strict=True) if "error" in x
    ]:
        return {"error": "; ".join(errors)}
    before, after = samples
    return {
        "ms": [statistics.median(each) for each in samples],
        "ratios": sorted(x / y for x, y in zip(before, after, strict=True)),
        "same_bits": same_bits,
    }


def table(rows: Sequence[tuple[str, str, dict[str, Any]]], trees: Sequence[Tree]) -> Table:
    """Table of results of race(). rows: (pass, problem, result)."""
    found = Table(
        "pass",
        Column("problem", overflow="fold"),
        *(f"{tree.folder.name}, ms" for tree in trees),
        "before / after",
        "quartiles",
        "bits",
    )
    for direction, problem, result in rows:
        if "error" in result:
            found.add_row(direction, problem, *"–––––")
            continue
        low, middle, high = statistics.quantiles(result["ratios"], n=4)
        times = (f"{ms:.4f}" for ms in result["ms"])
        same = "equal" if result["same_bits"] else "differ"
        found.add_row(direction, problem, *times, f"{middle:.3f}", f"{low:.3f}–{high:.3f}", same)
    return found


def calls_of(direction: str, shape: Shape, dtype: str) -> list[Call]:
    """A pass of the tree's package on a problem, per copy of the inputs."""
    import fp32
    import fwd_bwd
    import library
    import options
    import torch
    from rows import HIGH, OURS

    if dtype.startswith("fp32"):
        name = HIGH if dtype == "fp32-high" else OURS
        element, provider = torch.float32, options.with_passes(name, fp32.PROVIDERS[name])
    else:
        element = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        provider = fwd_bwd.provider_of(OURS, shape)
    copies = fwd_bwd.make_copies(shape, element, direction)
    if provider.layout == "bhsd":
        copies = [tuple(x.transpose(1, 2).contiguous() for x in copy) for copy in copies]
    ready, inputs = library.prepare(provider, shape, direction, copies)
    return [functools.partial(ready.launch, *each) for each in inputs]


def digest(result: Any) -> str:
    """Hash of the bits of the tensors of a result. ValueError: one of them is not finite, except a log-sum-exp of -inf."""
    import torch

    found = hashlib.sha256()
    for x in result:
        if isinstance(x, torch.Tensor):
            if bool(x.isnan().any()) or bool((x == float("inf")).any()):
                raise ValueError("a result has NaN or inf")
            found.update(x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def serve(questions: IO[str], answers: IO[str], folder: Path) -> None:
    """Answer questions, one JSON object per line: a problem is prepared and run once; `sample` times the last one.

    Args:
        folder: of the tree, whose package must be the one that is imported.
    """
    import tl_attention
    from tl_attention.testing import timer

    imported = Path(tl_attention.__file__).resolve().parents[1]
    calls: list[Call] = []
    for line in questions:
        question = json.loads(line)
        try:
            if imported != folder:
                raise RuntimeError(f"expected the package of {folder}, imported that of {imported}")
            if question.get("sample"):
                answer = {"ms": timer.time_interleaved({"it": calls}, 1)["it"].median_ms}
            else:
                calls = []  # frees the last problem's memory
                calls = calls_of(question["direction"], Shape.parse(question["shape"]), question["dtype"])
                answer = {"bits": digest(calls[0]())}
        except Exception as error:
            answer = {"error": timer.first_line(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; 1 if a tree could not run a problem, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/trees.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("before", type=Path, help="folder with the package tl_attention")
    add("after", type=Path, help="another one")
    add("--shapes", nargs="+", required=True, metavar="SHAPE", help="as those of benchmarks/run.py")
    add("--pass", dest="directions", nargs="+", choices=PASSES, default=["fwd"], help="default: fwd")
    add("--dtype", type=short_dtype_name, choices=DTYPES, default="bf16", help="default: bf16")
    add("--rounds", type=int, default=15, metavar="N", help="samples per tree (default 15, at least 2)")
    args = parser.parse_args(argv)
    try:
        shapes = chosen_shapes(args.shapes)
    except ValueError as error:
        parser.error(f"--shapes: {error}")
    for name in ("before", "after"):
        if not (folder := getattr(args, name) / "tl_attention").is_dir():
            parser.error(f"{name}: expected a folder with tl_attention/, got {folder.parent}")
    if args.rounds < 2:
        parser.error(f"--rounds: expected at least 2, got {args.rounds}")
    if not is_hopper(0):
        print("benchmarks/trees.py needs an NVIDIA Hopper GPU")
        return 2
    console, rows = Console(), []
    with contextlib.ExitStack() as at_end:
        trees = [Tree(args.before), Tree(args.after)]
        for tree in trees:
            at_end.callback(tree.close)
        for direction in args.directions:
            for name, shape in shapes.items():
                question = {"direction": direction, "shape": str(shape), "dtype": args.dtype}
                with console.status(f"{direction} {name}"):
                    rows.append((direction, name, race(trees, question, args.rounds)))
    console.print(table(rows, trees))
    failed = [
        f"{direction} {name}: {result['error']}" for direction, name, result in rows if "error" in result
    ]
    console.print(*failed, sep="\n", markup=False)
    return int(bool(failed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        with contextlib.redirect_stdout(sys.stderr):  # libraries may print
            serve(sys.stdin, sys.__stdout__, Path(sys.argv[2]))
    else:
        sys.exit(main())
