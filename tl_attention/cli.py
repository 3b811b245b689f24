"""tl-attention bench | tune | compile | doctor."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tl_attention import configs
from tl_attention.problem import (
    DECODE,
    DECODE_TILE_WIDTHS,
    DIRECTIONS,
    DTYPES,
    OPTIONS,
    AttnProblem,
    KernelConfig,
    buckets,
    decode_width,
)
from tl_attention.target import is_hopper

if TYPE_CHECKING:
    from tl_attention.testing.shapes import Shape

NO_GPU = "NVIDIA H200"  # whose tuned table serves where there is no GPU


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"]:
        return bench(argv[1:])
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tl-attention", description="FlashAttention for NVIDIA Hopper, in TileLang."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("bench", help="measure it beside its peers; arguments as of benchmarks/run.py")

    shapes = argparse.ArgumentParser(add_help=False)
    shapes.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help="names or patterns of configs/shapes.toml, or B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..]",
    )
    shapes.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: bfloat16, whose rows serve both")
    shapes.add_argument(
        "--jobs", type=int, help="kernels compiled at once; default: as many as there are CPUs"
    )

    command = commands.add_parser(
        "tune",
        parents=[shapes],
        help="find the fastest config of each problem class and pass on this GPU",
        description="Compile the candidates of configs/grid.toml, check each against the reference, time them"
        " against each other, and write the winners to configs/tuned/ in a checkout, else to the user's table in"
        " the cache folder. Ctrl-C keeps what is done.",
    )
    _add_pass(command, DIRECTIONS, "bwd_det: the deterministic backward; default: all")
    command.add_argument(
        "--only", nargs="+", metavar="WORD", default=(), help="classes with these words: d128 causal 4k"
    )
    command.add_argument(
        "--budget", type=seconds, default=1800.0, metavar="TIME", help="90s, 10m or 1h; default: 30m"
    )
    command.add_argument(
        "--log", type=Path, default=Path("bench_out/tune.jsonl"), help="default: %(default)s"
    )
    command.add_argument(
        "--table", type=Path, help="the table to improve; default: this GPU's of the checkout or the user"
    )
    command.set_defaults(run=tune)

    command = commands.add_parser(
        "compile",
        parents=[shapes],
        help="compile kernels into the disk cache and report on them; needs no GPU",
        description="Compile the kernels of the shipped configs, of those for options, or of those that serve some shapes, for sm_90a,"
        " and print what the compiler made of them. Status 1 if one must not ship.",
    )
    _add_pass(
        command,
        (*DIRECTIONS, DECODE),
        "bwd_det: the deterministic backward; decode: attention to caches, with pages of any size and without, and what appends to"
        " them, of each width or of those of the shapes; default: all but decode",
    )
    command.add_argument(
        "--options",
        action="store_true",
        help="the kernels of each line of [options] in configs/grid.toml, for bfloat16 problems with all options that it is for",
    )
    command.add_argument(
        "words", nargs="*", help="only kernels whose problem and config have all of these: bf16 d128 dq"
    )
    command.set_defaults(run=compile_kernels)

    command = commands.add_parser("support", help="which options go with which passes, dtypes and head dims")
    command.set_defaults(run=support)
    command = commands.add_parser("doctor", help="what is installed, what is missing and what to do about it")
    command.add_argument("--strict", action="store_true", help="status 1 if something needed is missing")
    command.set_defaults(run=doctor)
    return parser


def _add_pass(command: argparse.ArgumentParser, choices: Sequence[str], words: str) -> None:
    command.add_argument(
        "--pass", nargs="+", choices=choices, default=DIRECTIONS, dest="directions", help=words
    )


def seconds(text: str) -> float:
    """90s, 10m, 1h or plain seconds."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m", "h") else (text, "s")
    return float(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def parse_shapes(words: Sequence[str]) -> dict[str, Shape]:
    """Raises SystemExit for a name that configs/shapes.toml lacks, and a shape of another form."""
    from tl_attention.testing.shapes import chosen_shapes

    try:
        return chosen_shapes(words)
    except ValueError as error:
        raise SystemExit(f"--shapes: {error}") from None


def plain_shapes(words: Sequence[str]) -> list[Shape]:
    """Raises SystemExit for a shape with options, too."""
    shapes = parse_shapes(words)
    for name, shape in shapes.items():
        if shape.options:
            raise SystemExit(
                f"--shapes: {name} has options, which tuned rows do not serve; configs/grid.toml says what does"
            )
    return list(shapes.values())


def bench(argv: Sequence[str]) -> int:
    folder = Path(__file__).parents[1] / "benchmarks"
    if not (folder / "run.py").exists():
        print(
            "tl-attention bench: benchmarks/ is in a checkout alone: clone it and pip install -e '.[bench]'"
        )
        return 2
    sys.path.insert(0, str(folder))
    return importlib.import_module("run").main(argv) or 0


def tune(arguments: argparse.Namespace) -> int:
    if not is_hopper(0):
        print("tl-attention tune times kernels on an NVIDIA Hopper GPU, and there is none here.", end=" ")
        print("tl-attention compile needs none and shows what the compiler makes of the shipped configs.")
        return 2
    if not _has_rich("tune"):
        return 2
    from tl_attention import autotune

    table = arguments.table or configs.tuned_path(torch.cuda.get_device_name())
    try:
        autotune.check_writable(table, arguments.log)
    except OSError as error:
        print(f"tl-attention tune cannot write {table} or {arguments.log}: {error}", end="; ")
        print("--table and --log name other places")
        return 2
    results = autotune.tune(
        plain_shapes(arguments.shapes) if arguments.shapes else None,
        arguments.budget,
        directions=arguments.directions,
        dtypes=arguments.dtype or DTYPES[:1],
        only=arguments.only,
        path=arguments.table,
        log=arguments.log,
        jobs=arguments.jobs,
    )
    print(f"{len(results)} rows tuned, in {table}; why each loser lost: {arguments.log}")
    return 0 if results else 1


def compile_kernels(arguments: argparse.Namespace) -> int:
    from tl_attention import autotune, toolkit

    if not toolkit.find_nvcc():
        print(f"tl-attention compile: {toolkit.NO_NVCC}")
        return 2
    if arguments.options and (arguments.shapes or arguments.dtype):
        print(
            "tl-attention compile --options takes the lines of the grid, in bfloat16: expected no --shapes and no --dtype"
        )
        return 2
    if not _has_rich("compile"):
        return 2
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    if arguments.options:
        kernels = configs.option_kernels([one for one in arguments.directions if one != DECODE])
    elif arguments.shapes:
        dtypes = arguments.dtype or DTYPES[:1]
        kernels = _serving(parse_shapes(arguments.shapes).values(), dtypes, arguments.directions)
    else:
        dtypes = arguments.dtype or DTYPES
        kernels = [
            kernel for kernel in configs.shipped_kernels(arguments.directions) if kernel[0].dtype in dtypes
        ]
    kernels = [
        kernel for kernel in dict.fromkeys(kernels) if _has_words("{} {}".format(*kernel), arguments.words)
    ]
    built = autotune.compile_all(kernels, arguments.jobs)
    results = {
        (problem, config): result for problem, config, result in track(built, "compile", total=len(kernels))
    }

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("problem", "kernel", *autotune.REPORT_COLUMNS, "verdict")
    faults = 0
    for problem, config in kernels:
        result = results[problem, config]
        report = None if isinstance(result, autotune.Failure) else result
        fault = report.fault if report else str(result).strip().splitlines()[-1]
        faults += bool(fault)
        table.add_row(str(problem), str(config), *autotune.report_cells(report), fault or "ok")
    console.print(table)
    return 1 if faults or not kernels else 0


def _serving(
    shapes: Iterable[Shape], dtypes: Sequence[str], directions: Sequence[str]
) -> Iterator[tuple[AttnProblem, KernelConfig]]:
    """What calls on such tensors load, whatever the lengths."""
    gpu_name = torch.cuda.get_device_name() if torch.cuda.is_available() else NO_GPU
    for direction, dtype, shape in itertools.product(directions, dtypes, shapes):
        widths = DECODE_TILE_WIDTHS if direction == DECODE else configs.tile_widths(direction)
        if not any(qk >= shape.head_dim and v >= shape.head_dim_v for qk, v in widths):
            raise SystemExit(
                f"--shapes: {shape}: expected head dims that --pass {direction} has kernels for, within one of {widths}"
            )
        if direction == DECODE:
            width = decode_width(shape.head_dim, shape.head_dim_v)
            yield from configs.decode_kernels([dtype], [width], shape.option_names)
            continue
        problem = shape.problem(dtype, direction)
        for bucket in buckets(direction):
            config, _ = configs.pick_config(problem, bucket, gpu_name, direction)
            yield from config.kernels(problem)


def _has_words(text: str, words: Sequence[str]) -> bool:
    return set(words) <= set(text.split())


def _has_rich(command: str) -> bool:
    if importlib.util.find_spec("rich"):
        return True
    print(f"tl-attention {command} draws with rich: pip install 'tl-attention[bench]'")
    return False


def support(arguments: argparse.Namespace) -> int:
    """Print support_table()."""
    print(support_table())
    return 0


def support_table() -> str:
    """In Markdown, the tile widths at which each option, and all at once, have kernels: what configs.is_legal says of their configs."""
    names = {"fwd": "forward", "bwd": "backward", "bwd_det": "deterministic backward"}
    lines = [f"| option | {' | '.join(names.values())} |", "|---" * (1 + len(names)) + "|"]
    for options in (*((option,) for option in OPTIONS), OPTIONS):
        cells = [_support(options, direction) for direction in names]
        lines.append(f"| {'all at once' if options == OPTIONS else options[0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _support(options: tuple[str, ...], direction: str) -> str:
    """bf16, fp16: every width; or the widths that there are kernels for."""
    cells: dict[str, list[str]] = {}
    widths = configs.tile_widths(direction)
    for dtype in DTYPES:
        problems = [AttnProblem(dtype, *width, False, options) for width in widths]
        runs = [
            not configs.is_legal(problem, configs.option_config(problem, "4k", direction), direction)
            for problem in problems
        ]
        named = ", ".join(
            str(problem).split()[1] for problem, runs in zip(problems, runs, strict=True) if runs
        )
        cells.setdefault("every width" if all(runs) else named or "none", []).append(
            str(problems[0]).split()[0]
        )
    return "; ".join(f"{', '.join(dtypes)}: {widths}" for widths, dtypes in cells.items())


def doctor(arguments: argparse.Namespace) -> int:
    """Print what is found and, for what is not, what to do."""
    missing = 0
    for needed, name, find in CHECKS:
        try:
            good, text = find()
        except Exception as error:  # a broken installation is a finding, too
            good, text = False, f"{type(error).__name__}: {error}"
        missing += needed and not good
        print(f"{'ok' if good else 'MISSING' if needed else '-':8}{name:13}{text}")
    return 1 if missing and arguments.strict else 0


def _check_python() -> tuple[bool, str]:
    return sys.version_info >= (3, 10), f"{platform.python_version()}, {platform.machine()}"


def _check_torch() -> tuple[bool, str]:
    cuda = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA, so for CPU tensors only"
    )
    return True, f"{torch.__version__}, {cuda}"


def _check_gpu() -> tuple[bool, str]:
    if not torch.cuda.is_available():
        return False, "no CUDA device: kernels can be compiled and inspected; CPU tensors run the reference"
    sm = "sm_{}{}".format(*torch.cuda.get_device_capability())
    advice = (
        "" if is_hopper(torch.cuda.current_device()) else ": the kernels need sm_90, an H100, H200 or GH200"
    )
    return not advice, f"{torch.cuda.get_device_name()}, {sm}{advice}"


def _check_package(module: str, advice: str) -> Callable[[], tuple[bool, str]]:
    def check() -> tuple[bool, str]:
        from tl_attention.testing.environment import version

        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        return (True, version(module) or "found") if found else (False, f"not installed: {advice}")

    return check


def _check_nvcc() -> tuple[bool, str]:
    from tl_attention import toolkit

    if not (found := toolkit.find_nvcc()):
        return False, toolkit.NO_NVCC
    nvcc, origin = found
    release = (
        subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-2]
    )
    return True, f"{release.rpartition(', ')[2]}, {nvcc}, by {origin}"


def _check_cuobjdump() -> tuple[bool, str]:
    from tl_attention import toolkit

    found = toolkit.find_cuobjdump()
    return bool(found), str(found or "not found, so instructions are counted in PTX: pip install triton")


def _check_cache() -> tuple[bool, str]:
    folder = configs.cache_dir()
    sizes = [path.stat().st_size for path in folder.rglob("*.so")] if folder.exists() else []
    return True, f"{folder}, {len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB"


def _check_table() -> tuple[bool, str]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else NO_GPU
    found = []
    for path in configs.tuned_paths(name):
        table = configs.read_tuned(path)
        if rows := [f"{len(table[direction])} {direction}" for direction in DIRECTIONS if table[direction]]:
            found.append(f"{path}, rows: {', '.join(rows)}")
    if found:
        return True, "; then ".join(found)
    return (
        False,
        f"none for {name}, so the defaults of {configs.data_dir() / 'grid.toml'} serve: tl-attention tune",
    )


CHECKS = (  # (needed, what, how to find it)
    (True, "python", _check_python),
    (True, "torch", _check_torch),
    (True, "GPU", _check_gpu),
    (True, "tilelang", _check_package("tilelang", "pip install 'tilelang[nvcc]==0.1.15'")),
    (True, "nvcc", _check_nvcc),
    (False, "cuobjdump", _check_cuobjdump),
    (True, "cache", _check_cache),
    (False, "tuned table", _check_table),
    (False, "rich", _check_package("rich", "pip install 'tl-attention[bench]'")),
    (False, "matplotlib", _check_package("matplotlib", "pip install 'tl-attention[bench]'")),
    (False, "triton", _check_package("triton", "pip install triton")),
    (False, "fa2", _check_package("flash_attn", "pip install flash-attn --no-build-isolation")),
    (
        False,
        "fa3",
        _check_package("flash_attn_interface", "build hopper/ of github.com/Dao-AILab/flash-attention"),
    ),
    (False, "fa4", _check_package("flash_attn.cute", "pip install flash-attn-4")),
    (False, "flashinfer", _check_package("flashinfer", "pip install flashinfer-python")),
)


if __name__ == "__main__":
    sys.exit(main())
