"""Catalog of problems and kernels: those of the shipped configs, of the option lines of the grid, and of the pack."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tl_attention import configs, legality
from tl_attention.kernel_configs import PAGE_ROWS, Config, KernelConfig, append_kernel, jvp_kernels
from tl_attention.problem import (
    DECODE,
    DECODE_TILE_WIDTHS,
    DEFAULT_DTYPE,
    DIRECTIONS,
    FP32_DTYPES,
    HALF_DTYPES,
    JVP,
    AttnProblem,
    buckets,
    decode_problem,
    dtypes,
    option_buckets,
    tile_widths,
)


def problems(direction: str = "fwd") -> list[AttnProblem]:
    """Every problem class without options that has kernels."""
    return [
        AttnProblem(dtype, *head_dims, causal)
        for dtype in dtypes(direction)
        for head_dims in tile_widths(direction, dtype)
        for causal in (False, True)
    ]


def shipped_configs(directions: Sequence[str] = DIRECTIONS) -> list[tuple[AttnProblem, str, Config]]:
    """(problem, direction, config) of every default and every row of a shipped table, in all dtypes, once each."""

    def rows() -> Iterator[tuple[AttnProblem, str, str]]:
        for direction in directions:
            yield from itertools.product(problems(direction), [direction], buckets(direction))

    defaults = [
        (problem, direction, configs.default_config(problem, direction, bucket))
        for problem, direction, bucket in rows()
    ]
    tuned = [
        (problem, direction, configs.config_of_tables(problem, bucket, [table], direction))
        for table in configs.shipped_tables().values()
        for problem, direction, bucket in rows()
    ]
    return list(dict.fromkeys([*defaults, *tuned]))


def shipped_kernels(directions: Sequence[str] = DIRECTIONS) -> list[tuple[AttnProblem, KernelConfig]]:
    """Kernels of shipped_configs, and of DECODE and JVP if they are among the directions, once each."""
    served = shipped_configs([direction for direction in directions if direction not in (DECODE, JVP)])
    found = [kernel for problem, _, config in served for kernel in config.kernels(problem)]
    if DECODE in directions:
        found += decode_kernels()
    if JVP in directions:
        found += jvp_kernels()
    return list(dict.fromkeys(found))


def decode_kernels(
    names: Iterable[str] = tuple(HALF_DTYPES),
    widths: Iterable[tuple[int, int]] = DECODE_TILE_WIDTHS,
    options: Sequence[str] = (),
) -> list[tuple[AttnProblem, KernelConfig]]:
    """Decode kernels with the given options (of softcap, alibi and sink) for pages of every size, and the append kernels; once each."""
    found = []
    for dtype in names:
        problems = [decode_problem(dtype, *width, options) for width in widths]
        found += [
            kernel
            for problem, pages, rows in itertools.product(problems, PAGE_ROWS, configs.DECODE_ROWS)
            for kernel in configs.decode_config(problem, rows, pages).kernels(problem)
        ]
        found.append(append_kernel(dtype))
    return list(dict.fromkeys(found))


def option_problems(
    direction: str = "fwd", names: Iterable[str] = (DEFAULT_DTYPE, *FP32_DTYPES)
) -> list[tuple[AttnProblem, Config]]:
    """For each [options] line of these dtypes: the problem with every option the line serves, and its config."""
    found = []
    for dtype, head_dims in ((name, width) for name in names for width in tile_widths(direction, name)):
        plain = AttnProblem(dtype, *head_dims, False)
        for line in configs.option_lines(plain.tile_class, direction):
            problem = replace(plain, causal="window" not in line.serves, options=line.serves)
            found.append((problem, line.config(problem, direction)))
    return found


def option_kernels(directions: Sequence[str]) -> list[tuple[AttnProblem, KernelConfig]]:
    """Kernels of option_problems, once each."""
    found = itertools.chain(*(option_problems(direction) for direction in directions))
    return list(dict.fromkeys(kernel for problem, config in found for kernel in config.kernels(problem)))


def pack_option_kernels() -> list[tuple[AttnProblem, KernelConfig]]:
    """Kernels of the option sets in [pack] of the grid: both masks, every width and bucket, once each."""
    sets = configs.option_sets().items()
    found = (_kernels_with(tuple(options), section) for section, lines in sets for options in lines)
    return list(dict.fromkeys(itertools.chain(*found)))


def _kernels_with(options: tuple[str, ...], section: str) -> Iterator[tuple[AttnProblem, KernelConfig]]:
    """Kernels of a set of options in a section of [pack]; a windowed problem has one mask, see AttnProblem."""
    if section == DECODE:
        yield from decode_kernels(options=options)
        return
    masks = (False,) if "window" in options else (False, True)
    direction = "fwd" if section == "paged" else section.removeprefix("fp32_")
    names = FP32_DTYPES if section.startswith("fp32_") else HALF_DTYPES
    widths = ((name, width) for name in names for width in tile_widths(direction, name))
    for (dtype, width), causal in itertools.product(widths, masks):
        problem = AttnProblem(dtype, *width, causal, options)
        for bucket in option_buckets(direction, options):
            config = configs.option_config(problem, bucket, direction)
            for form in config.paged_forms(problem) if section == "paged" else [config]:
                if legality.fault(problem, form, direction) is None:
                    yield from form.kernels(problem)
