"""The console script: tl-attention bench | tune | compile | pack | cache | config | explain | manifest | support | doctor."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tl_attention.compilation import packing
from tl_attention.config import catalog, configs, legality
from tl_attention.config.kernel_configs import KernelConfig
from tl_attention.problem.arguments import PassWords, at_least, dtype_name, seconds
from tl_attention.problem.attn_problem import (
    DECODE,
    DEFAULT_DTYPE,
    DIRECTIONS,
    DTYPES,
    FP32_TILE_WIDTHS,
    JVP,
    OPTIONS,
    AttnProblem,
    dtypes,
    tile_widths,
)
from tl_attention.problem.target import is_hopper
from tl_attention.tools import cache, doctor, text
from tl_attention.tuning import question
from tl_attention.version import __version__

if TYPE_CHECKING:
    from tl_attention.testing.shapes import Shape


WIDE = 400  # columns of a table in a pipe, which has them all


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns its exit status; SystemExit with a text for bad input ends it with status 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"]:
        return bench(argv[1:])
    parser = _parser()
    if not argv:
        parser.print_help()
        return 2
    arguments = _parse(parser, argv)
    try:
        status = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 141
    except OSError as error:
        if not _is_of_output(error):
            raise
        print(f"tl-attention {argv[0]}: cannot write the output: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except SystemExit as fault:
        if isinstance(fault.code, str):
            named = (
                fault.code
                if fault.code.startswith("tl-attention")
                else f"tl-attention {argv[0]}: {fault.code}"
            )
            print(text.filled(named, rest="    "), file=sys.stderr)
            fault.code = 2
        raise


def _is_of_output(error: OSError) -> bool:
    """True for an error of writing to stdout, as on a full disk, where it cannot write now either."""
    try:
        if sys.stdout is not None:
            print(flush=True)
    except OSError as again:
        return again.errno == error.errno
    return False


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, with the words of a command before, between and after its options, which argparse does not take everywhere."""
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "words") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.words = [*arguments.words, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tl-attention", description="FlashAttention for NVIDIA Hopper, in TileLang."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("bench", help="time it against other libraries; arguments of benchmarks/run.py")
    shapes = _shape_arguments()
    _add_tune(commands.add_parser("tune", **TUNE, parents=[shapes]))
    _add_compile(commands.add_parser("compile", **COMPILE, parents=[shapes]))
    packing.add_arguments(commands.add_parser("pack", **packing.HELP))
    cache.add_arguments(commands.add_parser("cache", **cache.HELP))
    _add_config(commands.add_parser("config", **CONFIG))
    _add_explain(commands.add_parser("explain", **EXPLAIN))
    _add_manifest(commands.add_parser("manifest", **MANIFEST))
    command = commands.add_parser(
        "support", help="table of options, passes, dtypes and head dims with kernels"
    )
    form = command.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the table of docs/options.md")
    form.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=support)
    command = commands.add_parser("doctor", help="what is installed, what is missing and what to do about it")
    command.add_argument("--strict", action="store_true", help="status 1 if something needed is missing")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=lambda arguments: doctor.report(arguments.strict, arguments.json))
    return parser


TUNE = {
    "help": "find the fastest config of each problem class and pass on this GPU",
    "description": "Compile the candidates of configs/grid.toml, check each against the reference, time them against each other, and"
    " write the winners to configs/tuned/ in a checkout, else to the user's table in the cache folder. Ctrl-C keeps finished rows.",
}
COMPILE = {
    "help": "compile kernels into the disk cache and report on them; needs no GPU",
    "description": "Compile kernels for sm_90a and print what the compiler made of them: those of the shipped configs, of the"
    " [options] lines (--options), or of some shapes (--shapes). Status 1 if one must not ship.",
}
CONFIG = {
    "help": "which config serves a problem, where it comes from and why",
    "description": "Print the config that serves a problem and the tuned row or grid line it comes from. Words are in any order."
    " Example: tl-attention config bf16 d128 causal window=127 sink seqlen_k=4096",
}
EXPLAIN = {
    "help": "FLOPs, bytes, what bounds a call, its measured time and its config; needs no GPU",
    "description": "Print the FLOPs and bytes of a call, its intensity beside the ridge of a GPU, what bounds it, its measured time, and"
    " the config that serves it with the reason. Example: tl-attention explain 1,32,8,4096,4096,128,causal",
}
MANIFEST = {
    "help": "rewrite configs/kernels.json and configs/texts.json and print which kernels changed",
    "description": "Trace every kernel of a pack and shadow kernels of calls that no pack serves, print which hashes differ from"
    " configs/kernels.json and configs/texts.json, compile those of the first and rewrite both files. Status 1 if one must not ship."
    " With --check print only; status 1 if a hash differs.",
}


def _shape_arguments() -> argparse.ArgumentParser:
    shapes = argparse.ArgumentParser(add_help=False)
    shapes.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help="names or patterns of configs/shapes.toml, or B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..]",
    )
    shapes.add_argument(
        "--dtype",
        nargs="+",
        type=dtype_name,
        choices=DTYPES,
        metavar="DTYPE",
        help=f"of {', '.join(DTYPES)}, or short bf16, fp16, ..; default: bfloat16, whose rows serve float16, too; compile without"
        " --shapes: all of them",
    )
    shapes.add_argument(
        "--jobs", type=at_least(1), metavar="N", help="kernels compiled at a time; default: one per CPU"
    )
    return shapes


def _add_pass(
    command: argparse.ArgumentParser,
    passes: Sequence[str],
    default: Sequence[str],
    help: str,
    others: str | None = "words",
) -> None:
    command.add_argument(
        "--pass",
        action=PassWords,
        passes=passes,
        others=others,
        default=default,
        dest="directions",
        metavar="PASS",
        help=f"of {', '.join(passes)}; {help}",
    )


def _add_tune(command: argparse.ArgumentParser) -> None:
    _add_pass(command, DIRECTIONS, DIRECTIONS, "bwd_det: the deterministic backward; default: all", None)
    command.add_argument(
        "--only", nargs="+", metavar="WORD", default=(), help="rows with all these words: d128 causal 4k"
    )
    command.add_argument(
        "--budget", type=seconds, default=1800.0, metavar="TIME", help="90s, 10m or 1h; default: 30m"
    )
    command.add_argument(
        "--log",
        type=Path,
        default=Path("bench_out/tune.jsonl"),
        metavar="FILE",
        help="every attempt; default: %(default)s",
    )
    command.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="the table to improve; default: the one of this GPU in the checkout, or else the user's",
    )
    command.set_defaults(run=tune)


def _add_compile(command: argparse.ArgumentParser) -> None:
    _add_pass(
        command,
        (*DIRECTIONS, DECODE, JVP),
        DIRECTIONS,
        "bwd_det: the deterministic backward; decode: attention to caches with pages of every size, and the append kernel; jvp: the forward"
        " with its derivative of forward mode; default: all but decode and jvp",
    )
    command.add_argument(
        "--options",
        action="store_true",
        help="for each [options] line of configs/grid.toml, the kernels of the bf16 problem with all options it serves",
    )
    command.add_argument(
        "words",
        nargs="*",
        action="extend",
        default=[],
        metavar="WORD",
        help="only kernels whose problem and config have all of these: bf16 d128 dq",
    )
    command.add_argument(
        "--limit",
        type=seconds,
        default=300.0,
        metavar="TIME",
        help="of a kernel, 90s, 10m or 1h: a longer compilation is a failure; default: 5m",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=compile_kernels)


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "words", nargs="*", action="extend", default=[], metavar="WORD", help=question.accepted_words()
    )
    _add_pass(command, question.PASSES, (), "the same as these words without --pass; default: fwd")
    command.add_argument(
        "--gpu",
        metavar="NAME",
        help=question.GPU_HELP,
    )
    command.add_argument(
        "--tried", action="store_true", help="also the rows and lines tried before, and why they do not serve"
    )
    command.add_argument("--json", action="store_true", help="print JSON, with those tried before")
    command.set_defaults(run=show_config)


def _add_explain(command: argparse.ArgumentParser) -> None:
    from tl_attention.tools.explain import command as explain

    explain.add_arguments(command)


def _add_manifest(command: argparse.ArgumentParser) -> None:
    command.add_argument("--check", action="store_true", help="compile and write nothing; needs no nvcc")
    command.add_argument(
        "--every",
        type=at_least(1),
        metavar="N",
        help="with --check: trace one kernel in N, others each day; default: all",
    )
    command.add_argument(
        "--sources",
        action="store_true",
        help="compile those whose CUDA source changed, too: names and bound values are in it, not in the hash",
    )
    command.add_argument(
        "--jobs",
        type=at_least(1),
        metavar="N",
        help="kernels traced or compiled at a time; default: one per CPU",
    )
    command.set_defaults(run=update_manifest)


def parse_shapes(words: Sequence[str]) -> dict[str, Shape]:
    """Shapes by name. Raises SystemExit for a name missing in configs/shapes.toml or a malformed shape."""
    from tl_attention.testing.shapes import chosen_shapes

    try:
        return chosen_shapes(words)
    except ValueError as error:
        raise SystemExit(f"--shapes: {error}") from None


def plain_shapes(words: Sequence[str]) -> list[Shape]:
    """Shapes without options. Raises SystemExit as parse_shapes, and for a shape with options."""
    shapes = parse_shapes(words)
    for name, shape in shapes.items():
        if shape.options:
            raise SystemExit(
                f"--shapes: expected shapes without options, as [options] of configs/grid.toml is not tuned; {name} has options"
            )
    return list(shapes.values())


def bench(argv: Sequence[str]) -> int:
    folder = Path(__file__).parents[2] / "benchmarks"
    if not (folder / "run.py").exists():
        print(
            "tl-attention bench needs benchmarks/, which only a checkout has: clone it and pip install -e '.[bench]'"
        )
        return 2
    sys.path.insert(0, str(folder))
    return importlib.import_module("run").main(argv) or 0


def tune(arguments: argparse.Namespace) -> int:
    shapes = plain_shapes(arguments.shapes) if arguments.shapes else None
    if not is_hopper(0):
        print("tl-attention tune needs an NVIDIA Hopper GPU to time kernels, and found none.", end=" ")
        print("tl-attention compile needs no GPU and reports on the kernels of the shipped configs.")
        return 2
    if not _has_rich("tune"):
        return 2
    from tl_attention.tuning import autotune

    table = arguments.table or configs.tuned_path(torch.cuda.get_device_name())
    try:
        autotune.check_writable(table, arguments.log)
    except OSError as error:
        print(f"tl-attention tune cannot write {table} or {arguments.log}: {error}", end="; ")
        print("name other files with --table and --log")
        return 2
    results = autotune.tune(
        shapes,
        arguments.budget,
        directions=arguments.directions,
        dtypes=arguments.dtype or (DEFAULT_DTYPE,),
        only=arguments.only,
        path=arguments.table,
        log=arguments.log,
        jobs=arguments.jobs,
    )
    without = [row for row, attempts in results.items() if attempts[0].fate != "winner"]
    if without:
        print(f"no winner, left as they were: {', '.join(without)}")
    print(f"{len(results) - len(without)} rows tuned, in {table}; all attempts: {arguments.log}")
    return 0 if results else 1


def compile_kernels(arguments: argparse.Namespace) -> int:
    from tl_attention.compilation import toolkit
    from tl_attention.tuning import autotune

    if not toolkit.find_nvcc():
        print(f"tl-attention compile: {toolkit.NO_NVCC}")
        return 2
    if arguments.options and (arguments.shapes or arguments.dtype):
        print(
            "tl-attention compile --options: expected no --shapes and no --dtype, as lines of the grid are compiled for bfloat16"
        )
        return 2
    if not _has_rich("compile"):
        return 2
    from rich.console import Console

    from tl_attention.tuning.progress import track
    from tl_attention.tuning.results import REPORT_COLUMNS, print_reports, report_cells

    if arguments.options:
        kernels = catalog.option_kernels([name for name in arguments.directions if name in DIRECTIONS])
    elif arguments.shapes:
        dtypes = arguments.dtype or (DEFAULT_DTYPE,)
        kernels = _serving(parse_shapes(arguments.shapes).values(), dtypes, arguments.directions)
    else:
        dtypes = arguments.dtype or DTYPES
        kernels = [
            kernel for kernel in catalog.shipped_kernels(arguments.directions) if kernel[0].dtype in dtypes
        ]
    kernels = packing.choose(dict.fromkeys(kernels), arguments.words)
    if not kernels:
        words = " ".join(arguments.words) or "none"
        raise SystemExit(
            f"tl-attention compile: expected words of a kernel, such as bf16 d128 dq; no kernel has all of: {words}"
        )
    console = Console(width=None if text.on_terminal() else WIDE)
    lines = Console(file=sys.stderr) if arguments.json else console
    built = track(
        autotune.compile_all(kernels, arguments.jobs, limit=arguments.limit), len(kernels), "compile", lines
    )
    results = {(problem, config): result for problem, config, result in built}
    rows, records, faults = [], [], 0
    for problem, config in kernels:
        result = results[problem, config]
        report = None if isinstance(result, autotune.Failure) else result
        fault = report.fault if report else str(result).strip().splitlines()[-1]
        faults += bool(fault)
        rows.append((str(problem), str(config), *report_cells(report), fault or "ok"))
        records.append({"problem": str(problem), "kernel": str(config), "report": report, "fault": fault})
    if arguments.json:
        print(text.as_json(records))
    else:
        print_reports(console, ("problem", "kernel", *REPORT_COLUMNS, "result"), rows)
    return 1 if faults else 0


def _serving(
    shapes: Iterable[Shape], dtypes: Sequence[str], directions: Sequence[str]
) -> Iterator[tuple[AttnProblem, KernelConfig]]:
    """Kernels that calls on these shapes load, for all lengths."""
    from tl_attention.tuning import needs

    for direction, dtype, shape in itertools.product(directions, dtypes, shapes):
        if shape.options.function:
            raise SystemExit(
                f"--shapes: {shape}: expected no function=, whose kernels depend on its code; they are built at its first call"
            )
        try:
            yield from needs.kernels_of(shape, dtype, direction, all_lengths=True)
        except ValueError as error:
            raise SystemExit(f"--shapes: {error}") from None


def show_config(arguments: argparse.Namespace) -> int:
    try:
        asked, gpu = question.parse(arguments.words), question.gpu_of(arguments.gpu)
        directions = dict.fromkeys((*arguments.directions, *asked.directions)) or ("fwd",)
        answers = [found for direction in directions for found in question.answer(asked, direction, gpu)]
    except ValueError as error:
        raise SystemExit(f"tl-attention config: {error}") from None
    if arguments.json:
        print(text.as_json(answers))
        return 0
    for found in answers:
        first, *others = found.lines(arguments.tried)
        print(text.filled(first, rest="    "))
        for line in others:
            print(text.filled(line.strip(), first="  ", rest="      "))
    for line in question.legend(answers):
        print(text.filled(line, rest="    "))
    return 0


def update_manifest(arguments: argparse.Namespace) -> int:
    from tl_attention.compilation import manifest, toolkit

    if toolkit.tilelang_version() not in toolkit.TILELANG:
        print(f"tl-attention manifest: {toolkit.NO_TILELANG}")
        return 2
    if arguments.every and not arguments.check:
        print(
            "tl-attention manifest: --every: expected with --check, got without, as files are written whole"
        )
        return 2
    if arguments.sources and arguments.check:
        print("tl-attention manifest: --sources: expected without --check, which compiles nothing")
        return 2
    if arguments.check:
        difference = manifest.check(arguments.jobs, arguments.every or 1)
        print(difference)
        return 1 if difference.new or difference.changed or difference.gone else 0
    if configs.installed():
        print(
            "tl-attention manifest needs a checkout, as an installed package is read-only; --check compares"
        )
        return 2
    if not toolkit.find_nvcc():
        print(f"tl-attention manifest: {toolkit.NO_NVCC}; --check needs none")
        return 2
    if not toolkit.find_cuobjdump():
        print("tl-attention manifest needs cuobjdump to count instructions: pip install triton")
        return 2
    print(manifest.rewrite(arguments.jobs, arguments.sources))
    faults = manifest.all_faults(manifest.Manifest.read())
    for name, texts in faults.items():
        print(f"fault: {name}: {'; '.join(texts)}")
    return 1 if faults else 0


def _has_rich(command: str) -> bool:
    if importlib.util.find_spec("rich"):
        return True
    print(f"tl-attention {command} needs rich: pip install 'tl-attention[jit]'")
    return False


def support(arguments: argparse.Namespace) -> int:
    """Print support_rows()."""
    rows = support_rows()
    if arguments.json:
        print(text.as_json(rows))
        return 0
    names = list(next(iter(rows.values())))
    alike: dict[tuple[str, ...], list[str]] = {}
    for option, cells in rows.items():
        alike.setdefault(tuple(cells.values()), []).append(option)
    if arguments.markdown:
        print(f"| options | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|", sep="\n")
        for cells, options in alike.items():
            print(f"| {', '.join(options)} | {' | '.join(cells)} |")
        return 0
    widest = max(qk for qk, _ in tile_widths("fwd", DEFAULT_DTYPE))
    words = "Dtypes and widths with kernels, by options and pass. A head dim takes the next width, zeros in its other columns;"
    print(text.filled(f"{words} every width: up to {widest}."))
    width = max(map(len, names)) + 4
    for cells, options in alike.items():
        print("", text.filled(", ".join(options)), sep="\n")
        for name, cell in zip(names, cells, strict=True):
            first, *others = cell.split("; ")
            print(text.filled(first, f"  {name}".ljust(width), " " * width))
            for other in others:
                print(text.filled(other, " " * width, " " * width))
    return 0


def support_rows() -> dict[str, dict[str, str]]:
    """Per option and pass the tile widths at which options and pages have kernels: what legality.fault says of their configs."""
    names = {"fwd": "forward", "bwd": "backward", "bwd_det": "deterministic backward"}
    rows = {}
    for options in (*((option,) for option in OPTIONS), OPTIONS):
        option = "all of these at once" if options == OPTIONS else options[0]
        rows[option] = {name: _support(options, direction) for direction, name in names.items()}
    all_but_dropout = tuple(option for option in OPTIONS if option != "dropout")
    rows["all but dropout, keys in pages"] = dict.fromkeys(names.values(), "none") | {
        names["fwd"]: _support(all_but_dropout, "fwd", paged=True)
    }
    return rows


def _is_served(problem: AttnProblem, direction: str, paged: bool) -> bool:
    """True if there are kernels for a problem with options."""
    if problem.is_fp32 and paged:
        return False
    config = configs.option_config(problem, "4k", direction)
    forms = config.paged_forms(problem) if paged else [config]
    return all(legality.fault(problem, form, direction) is None for form in forms)


def _support(options: tuple[str, ...], direction: str, paged: bool = False) -> str:
    """A cell of the table: "bf16, fp16: every width", or the widths with kernels."""
    cells: dict[str, list[str]] = {}
    for dtype in (DTYPES[name] for name in dtypes(direction)):
        widths = tile_widths(direction, dtype.name, with_options=bool(options))
        problems = [AttnProblem(dtype.name, *width, False, options) for width in widths]
        served = [problem.width for problem in problems if _is_served(problem, direction, paged)]
        every = len(FP32_TILE_WIDTHS if problems[0].is_fp32 else problems)
        words = "every width" if len(served) == every else ", ".join(served) or "none"
        cells.setdefault(words, []).append(dtype.short)
    return "; ".join(f"{', '.join(dtypes)}: {widths}" for widths, dtypes in cells.items())


if __name__ == "__main__":
    sys.exit(main())
