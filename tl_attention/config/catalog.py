"""Catalog of problems, calls and kernels: those of the shipped configs, of the option lines of the grid, and of the pack."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tl_attention.config import configs, legality
from tl_attention.config.buckets import buckets, option_buckets
from tl_attention.config.kernel_configs import (
    PAGE_ROWS,
    Config,
    DecodeConfig,
    JvpConfig,
    KernelConfig,
    append_kernel,
    jvp_kernels,
)
from tl_attention.problem.attn_problem import (
    BUCKETS,
    DECODE,
    DECODE_OPTIONS,
    DECODE_TILE_WIDTHS,
    DECODE_TREE_OPTIONS,
    DEFAULT_DTYPE,
    DIRECTIONS,
    FP32_DTYPES,
    HALF_DTYPES,
    JVP,
    ONLY_DECODE,
    AttnProblem,
    decode_problem,
    dtypes,
    tile_widths,
)
from tl_attention.problem.program import Program

# Head dims of the kernels with max_logits that ship: those of large models in training
MAX_LOGITS_WIDTHS = (64, 64), (128, 128), (192, 128)
PAGED = "paged"  # a forward with keys in pages
KINDS = (*DIRECTIONS, PAGED, DECODE, JVP)


@dataclass(frozen=True)
class CallKind:
    """Calls of a kind, and the config that serves them.

    Args:
        kind: one of KINDS.
        config: that of a decode serves some numbers of rows.
    """

    kind: str
    problem: AttnProblem
    config: Config | DecodeConfig | JvpConfig

    @property
    def kernels(self) -> list[tuple[AttnProblem, KernelConfig]]:
        """Kernels that they launch."""
        if isinstance(self.config, JvpConfig):
            return [(self.problem, self.config)]
        found = list(self.config.kernels(self.problem))
        return [*found, append_kernel(self.problem.dtype)] if self.kind == DECODE else found


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
    """Decode kernels with the given options, of DECODE_OPTIONS, for pages of every size, and the append kernels; once each."""
    found = (call.kernels for call in _decodes(options, names, widths))
    return list(dict.fromkeys(itertools.chain(*found)))


def _decodes(
    options: Sequence[str],
    names: Iterable[str] = tuple(HALF_DTYPES),
    widths: Iterable[tuple[int, int]] = DECODE_TILE_WIDTHS,
    items_per_sm: float = 0,
) -> Iterator[CallKind]:
    """Decodes with each config of their width that serves launches of so many items per SM."""
    for dtype, width in itertools.product(names, widths):
        problem = decode_problem(dtype, *width, options)
        for pages in PAGE_ROWS:
            for line in configs.decode_lines(problem.width, pages):
                if items_per_sm <= line.items_per_sm:
                    yield CallKind(DECODE, problem, line.config)


def option_problems(
    direction: str = "fwd", names: Iterable[str] = (DEFAULT_DTYPE, *FP32_DTYPES)
) -> list[tuple[AttnProblem, Config]]:
    """For each [options] line of these dtypes: the problem with every option the line serves, and its config."""
    found = []
    for dtype, head_dims in (
        (name, width) for name in names for width in tile_widths(direction, name, with_options=True)
    ):
        plain = AttnProblem(dtype, *head_dims, False)
        for line in configs.option_lines(plain.tile_class, direction):
            problem = replace(plain, causal="window" not in line.serves, options=line.serves)
            found.append((problem, line.config(problem, direction)))
    return found


def option_kernels(directions: Sequence[str]) -> list[tuple[AttnProblem, KernelConfig]]:
    """Kernels of option_problems, once each."""
    found = itertools.chain(*(option_problems(direction) for direction in directions))
    return list(dict.fromkeys(kernel for problem, config in found for kernel in config.kernels(problem)))


@functools.cache
def shipped_calls() -> list[CallKind]:
    """Calls that launch every kernel the package ships.

    They have all defaults and tuned rows in every dtype; each option line of the grid with all options that the line serves (bfloat16
    for a line that float16 shares), also with keys in small pages; decoding without options, with all that a forward has, and with a
    tree and what it combines with (bfloat16); forward mode; and block masks whose mask is bits, batch_invariant
    and max_logits (bfloat16).
    """
    found = [
        CallKind(direction, problem, config) for problem, direction, config in shipped_configs(DIRECTIONS)
    ]
    for direction in DIRECTIONS[:2]:
        found += [CallKind(direction, *pair) for pair in option_problems(direction)]
    found += _paged_of_lines()
    found += _decodes(())
    found += _decodes([name for name in DECODE_OPTIONS if name not in ("window", *ONLY_DECODE)])
    found += _decodes(DECODE_TREE_OPTIONS, (DEFAULT_DTYPE,))
    found += [CallKind(JVP, *pair) for pair in jvp_kernels()]
    found += _block_masks((DEFAULT_DTYPE,))
    found += _batch_invariant((DEFAULT_DTYPE,))
    found += _max_logits((DEFAULT_DTYPE,))
    return list(dict.fromkeys(found))


def pack_calls() -> list[CallKind]:
    """Calls that launch every kernel of a whole pack: shipped_calls(), those of the option sets in [pack] of the grid, and block masks."""
    sets = configs.option_sets().items()
    found = (_of_set(tuple(options), section) for section, lines in sets for options in lines)
    further = *itertools.chain(*found), *_block_masks(HALF_DTYPES), *_batch_invariant(HALF_DTYPES)
    return list(dict.fromkeys([*shipped_calls(), *further]))


def _batch_invariant(names: Iterable[str]) -> Iterator[CallKind]:
    """Calls with batch_invariant: forwards without options, packed ones and those with keys in pages; decodes without options."""
    widths = (
        (width, options)
        for options in ((), ("varlen",))
        for width in tile_widths("fwd", with_options=bool(options))
    )
    for dtype, (width, options), causal in itertools.product(names, widths, (False, True)):
        problem = AttnProblem(dtype, *width, causal, options)
        config = configs.choose_invariant(problem).config
        yield CallKind("fwd", problem, config)
        if options:
            yield from (CallKind(PAGED, problem, form) for form in config.paged_forms(problem))
    for call in _decodes((), names, items_per_sm=math.inf):
        if not call.config.v_in_k:  # latent attention has no forward
            forward = AttnProblem.of(
                call.problem.dtype, call.problem.head_dim, call.problem.head_dim_v, False
            )
            config = configs.invariant_decode_config(call.problem, call.config, forward)
            yield replace(call, config=config)


def _max_logits(names: Iterable[str]) -> Iterator[CallKind]:
    """Calls with max_logits: forwards without options and packed ones, of MAX_LOGITS_WIDTHS."""
    forms = itertools.product(names, MAX_LOGITS_WIDTHS, (False, True), ((), ("varlen",)), BUCKETS)
    for dtype, width, causal, options, bucket in forms:
        problem = AttnProblem(dtype, *width, causal, options)
        if options:
            found = [configs.option_config(problem, bucket)]
        else:
            tables = configs.shipped_tables().values()
            found = [configs.config_of_tables(problem, bucket, [table]) for table in tables]
        for config in found:
            yield CallKind("fwd", problem, config.storing_max)


def _paged_of_lines() -> Iterator[CallKind]:
    """Forwards with keys in pages: for each option line of the grid with packed sequences, all its options but dropout.

    Their pages are the smallest, which take the most copies and registers.
    """
    for problem, _ in option_problems(names=(DEFAULT_DTYPE,)):
        problem = replace(problem, options=tuple(name for name in problem.options if name != "dropout"))
        if problem.has("varlen"):
            yield CallKind(PAGED, problem, configs.option_config(problem, BUCKETS[0]).paged_forms(problem)[0])


def _block_masks(names: Iterable[str]) -> Iterator[CallKind]:
    """Calls with a block mask in bits and without a score_mod, whose kernels serve every mask_mod."""
    for direction, band in (("fwd", False), ("bwd", False), ("bwd", True), ("bwd_det", False)):
        mask = Program((), listed=True, bits=True, band=band)
        for dtype, width in itertools.product(names, tile_widths(direction)):
            problem = AttnProblem(dtype, *width, False, program=mask)
            for bucket in buckets(direction):
                yield CallKind(direction, problem, configs.option_config(problem, bucket, direction))


def _of_set(options: tuple[str, ...], section: str) -> Iterator[CallKind]:
    """Calls with a set of options in a section of [pack], in every width and bucket; a windowed problem has one mask, see AttnProblem."""
    if section == DECODE:
        yield from _decodes(options)
        return
    masks = (False,) if "window" in options else (False, True)
    direction = "fwd" if section == PAGED else section.removeprefix("fp32_")
    names = FP32_DTYPES if section.startswith("fp32_") else HALF_DTYPES
    widths = ((name, width) for name in names for width in tile_widths(direction, name, with_options=True))
    for (dtype, width), causal in itertools.product(widths, masks):
        problem = AttnProblem(dtype, *width, causal, options)
        for bucket in option_buckets(direction, options):
            config = configs.option_config(problem, bucket, direction)
            for form in config.paged_forms(problem) if section == PAGED else [config]:
                if legality.fault(problem, form, direction) is None:
                    yield CallKind(PAGED if section == PAGED else direction, problem, form)
