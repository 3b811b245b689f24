"""Classes of the matrix: call kinds that together launch every kernel of the manifest, or of the pack."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tl_attention import catalog, configs, legality
from tl_attention.compilation import manifest
from tl_attention.kernel_configs import (
    PAGE_ROWS,
    BwdConfig,
    DecodeConfig,
    FwdConfig,
    JvpConfig,
    KernelConfig,
    append_kernel,
    jvp_kernels,
)
from tl_attention.problem import (
    BUCKETS,
    DECODE,
    DECODE_OPTIONS,
    DECODE_TILE_WIDTHS,
    DEFAULT_DTYPE,
    DIRECTIONS,
    DTYPES,
    FP32_DTYPES,
    HALF_DTYPES,
    JVP,
    AttnProblem,
    buckets,
    decode_problem,
    option_buckets,
    tile_widths,
)
from tl_attention.program import Program

PAGED = "paged"  # a forward with keys in pages
KINDS = (*DIRECTIONS, PAGED, DECODE, JVP)


@dataclass(frozen=True)
class CallClass:
    """A kind of call with a forced config.

    Args:
        kind: one of KINDS.
        config: of the call. That of a decode follows from the number of rows, which draws choose for it.
    """

    kind: str
    problem: AttnProblem
    config: FwdConfig | BwdConfig | DecodeConfig | JvpConfig

    @property
    def name(self) -> str:
        return f"{self.kind} {self.problem}, {self.config}"

    @property
    def id(self) -> str:
        """Short name for command lines."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:8]

    @property
    def part(self) -> str:
        """Name of the test that runs it: bf16 fwd."""
        direction = {"bwd_det": "bwd"}.get(self.kind, self.kind)
        return f"{DTYPES[self.problem.dtype].short.split('-')[0]} {direction}"

    @functools.cached_property
    def kernels(self) -> dict[str, tuple[AttnProblem, KernelConfig]]:
        """Kernels that its calls launch, by name."""
        found = [(self.problem, self.config)]
        if not isinstance(self.config, JvpConfig):
            found = self.config.kernels(self.problem)
        if self.kind == DECODE:
            found = [*found, append_kernel(self.problem.dtype)]
        return {manifest.kernel_name(*kernel): kernel for kernel in found}

    def matches(self, words: Iterable[str]) -> bool:
        """True if its name, or that of one of its kernels, has all these words."""
        words = list(words)
        return any(all(word in name for word in words) for name in (self.name, *self.kernels))


def shipped_classes() -> list[CallClass]:
    """Classes that launch every kernel of the manifest."""
    found = [
        CallClass(direction, problem, config)
        for problem, direction, config in catalog.shipped_configs(DIRECTIONS)
    ]
    for direction in DIRECTIONS[:2]:
        found += [CallClass(direction, *pair) for pair in catalog.option_problems(direction)]
    found += _paged_of_lines()
    found += _decodes([])
    found += _decodes([name for name in DECODE_OPTIONS if name != "window"])
    found += [CallClass(JVP, *pair) for pair in jvp_kernels()]
    found += _block_masks([DEFAULT_DTYPE])
    return _once(found)


def pack_classes() -> list[CallClass]:
    """Classes that launch every kernel of a whole pack, those of shipped_classes() among them."""
    sets = configs.option_sets().items()
    found = itertools.chain(*(_of_set(tuple(one), section) for section, lists in sets for one in lists))
    others = _once([*found, *_block_masks(HALF_DTYPES)])
    return list({one.name: one for one in [*shipped_classes(), *others]}.values())


def _once(classes: Iterable[CallClass]) -> list[CallClass]:
    """Each class once. A config that serves bwd and bwd_det is of bwd_det, whose calls promise more."""
    found = {one.name: one for one in classes}
    return [
        one
        for one in found.values()
        if not (one.kind == "bwd" and replace(one, kind="bwd_det").name in found)
    ]


def _paged_of_lines() -> Iterator[CallClass]:
    """Forwards with keys in pages of the option lines, as manifest.shipped() has them."""
    for problem, _ in catalog.option_problems(names=(DEFAULT_DTYPE,)):
        problem = replace(problem, options=tuple(name for name in problem.options if name != "dropout"))
        if problem.has("varlen"):
            config = configs.option_config(problem, BUCKETS[0])
            yield CallClass(PAGED, problem, config.paged_forms(problem)[0])


def _decodes(options: Iterable[str]) -> Iterator[CallClass]:
    for dtype, width in itertools.product(HALF_DTYPES, DECODE_TILE_WIDTHS):
        problem = decode_problem(dtype, *width, tuple(options))
        for pages, rows in itertools.product(PAGE_ROWS, configs.DECODE_ROWS):
            yield CallClass(DECODE, problem, configs.decode_config(problem, rows, pages))


def _block_masks(names: Iterable[str]) -> Iterator[CallClass]:
    """Calls with a block mask in bits, as manifest.block_mask_kernels() has them."""
    for direction, band in (("fwd", False), ("bwd", False), ("bwd", True), ("bwd_det", False)):
        mask = Program((), listed=True, bits=True, band=band)
        for dtype, width in itertools.product(names, tile_widths(direction)):
            problem = AttnProblem(dtype, *width, False, program=mask)
            for bucket in buckets(direction):
                yield CallClass(direction, problem, configs.option_config(problem, bucket, direction))


def _of_set(options: tuple[str, ...], section: str) -> Iterator[CallClass]:
    """Classes of a set of options in a section of [pack] of the grid, as catalog.pack_option_kernels() has them."""
    if section == DECODE:
        yield from _decodes(options)
        return
    masks = (False,) if "window" in options else (False, True)
    direction = "fwd" if section == PAGED else section.removeprefix("fp32_")
    names = FP32_DTYPES if section.startswith("fp32_") else HALF_DTYPES
    widths = ((name, width) for name in names for width in tile_widths(direction, name))
    for (dtype, width), causal in itertools.product(widths, masks):
        problem = AttnProblem(dtype, *width, causal, options)
        for bucket in option_buckets(direction, options):
            config = configs.option_config(problem, bucket, direction)
            for form in config.paged_forms(problem) if section == PAGED else [config]:
                if legality.fault(problem, form, direction) is None:
                    yield CallClass(PAGED if section == PAGED else direction, problem, form)
