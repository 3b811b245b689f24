"""Shadow kernels: kernels of calls that no pack serves, a few of each kind, so that their texts are guarded like those that ship.

A user writes a score_mod, and a ring of GPUs attends to parts of a sequence: their kernels are built when they are called. The
programs here stand for such functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch

from tl_attention.compilation.compiler import KernelKey
from tl_attention.config import configs
from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.problem.attn_problem import (
    BUCKETS,
    DEFAULT_DTYPE,
    DIRECTIONS,
    FP32_DTYPES,
    NARROW_WIDTH,
    AttnProblem,
)
from tl_attention.problem.program import Program
from tl_attention.tracing.trace import trace

FWD, BWD, BWD_DET = DIRECTIONS
WIDTHS = (64, 128)
ROWS = 8  # of captured tensors; no kernel depends on it


def shadow_kernels() -> dict[str, list[KernelKey]]:
    """Kernels per kind of call; some are in a pack, too."""
    kinds: dict[str, Iterable[KernelKey]] = {}
    for name, functions in _functions().items():
        kinds[name] = _with_program(functions, (DEFAULT_DTYPE,))
    for name in ("learned relative bias", "cap"):
        kinds[f"fp32 {name}"] = _with_program(_functions()[name], FP32_DTYPES)
    # Wide fp32 heads compute values of diagonals for each score
    kinds["fp32 256 learned relative bias"] = _with_program(
        _functions()["learned relative bias"], ["float32-high"], [256]
    )
    kinds["32 learned dense bias"] = _with_program(
        _functions()["learned dense bias"], (DEFAULT_DTYPE,), NARROW_WIDTH[:1], [FWD, BWD]
    )
    kinds["fp32 block mask"] = _with_masks(FP32_DTYPES)
    for (name, directions), options in _option_sets().items():
        kinds[name] = _with_options(
            options, directions, ["float32-high"] if "fp32" in name else [DEFAULT_DTYPE]
        )
    kinds["max_logits"] = _with_max_logits()
    return {name: list(dict.fromkeys(kernels)) for name, kernels in kinds.items()}


def _option_sets() -> dict[tuple[str, tuple[str, ...]], list[tuple[str, ...]]]:
    """(kind, directions) -> sets of options; "causal" stands for the mask."""
    backwards = (BWD, BWD_DET)
    return {
        ("added", (FWD,)): [("causal", "added"), ("added",), ("causal", "varlen", "added")],
        ("partial", backwards): [("causal", "partial"), ("varlen", "partial")],
        ("placed", DIRECTIONS): [("window", "placed")],
        ("placed added", (FWD,)): [("window", "placed", "added"), ("window", "softcap", "placed", "added")],
        ("placed partial", backwards): [("window", "placed", "partial")],
        ("fp32 placed", (FWD, BWD)): [("window", "placed")],
        ("two-sided ALiBi", (FWD,)): [("alibi", "sink"), ("alibi", "varlen"), ("alibi", "sink", "varlen")],
        ("options together", (FWD,)): [
            ("causal", "softcap", "alibi"),
            ("window", "alibi", "sink"),
            ("window", "dropout"),
            ("causal", "sink", "dropout", "varlen"),
        ],
        ("options together in a backward", backwards): [
            ("causal", "softcap", "alibi"),
            ("window", "dropout"),
            ("causal", "alibi", "varlen"),
        ],
        ("fp32 options", (FWD, BWD)): [("causal", "softcap"), ("alibi",), ("causal", "dropout")],
    }


def _functions() -> dict[str, tuple[Callable | None, Callable | None, str]]:
    """Kind -> (score_mod, mask_mod, how a block mask lists its blocks: "", "listed" or "bits")."""
    learned_table = torch.zeros(2, 2 * ROWS, requires_grad=True)
    learned_bias = torch.zeros(2, ROWS, ROWS, dtype=torch.bfloat16, requires_grad=True)
    slopes, documents, shown = (
        torch.zeros(2),
        torch.zeros(ROWS, dtype=torch.int32),
        torch.ones(ROWS, ROWS) > 0,
    )
    bias = torch.zeros(2, ROWS, ROWS)

    def relative_bias(score, b, h, q, k):
        return score + learned_table[h, q - k + ROWS]

    def dense_bias(score, b, h, q, k):
        return score + learned_bias[h, q, k]

    def fixed_dense_bias(score, b, h, q, k):
        return score + bias[h, q, k]

    def cap(score, b, h, q, k):
        return 20.0 * torch.tanh(score / 20.0)

    def distance(score, b, h, q, k):
        return score - slopes[h] * (q - k).abs()

    def document(b, h, q, k):
        return documents[q] == documents[k]

    def dense_mask(b, h, q, k):
        return shown[q, k]

    return {
        "learned relative bias": (relative_bias, None, ""),
        "learned dense bias": (dense_bias, None, ""),
        "dense bias": (fixed_dense_bias, None, ""),
        "cap": (cap, None, ""),
        "slopes": (distance, None, ""),
        "document mask": (None, document, ""),
        "dense mask": (None, dense_mask, ""),
        "listed document mask": (None, document, "listed"),
        "slopes in a block mask": (distance, document, "bits"),
    }


def _with_program(
    functions: tuple[Callable | None, Callable | None, str],
    dtypes: Iterable[str],
    widths: Iterable[int] = WIDTHS,
    directions: Iterable[str] = DIRECTIONS,
) -> Iterator[KernelKey]:
    score_mod, mask_mod, blocks = functions
    for dtype, width, direction in itertools.product(dtypes, widths, directions):
        program = trace(score_mod, mask_mod, direction != FWD).program
        if blocks == "listed":
            program = program.as_listed
        if blocks == "bits":
            program, *_ = program.with_bits
        if direction == BWD_DET:
            program = program.as_exact
        yield from _kernels_of(AttnProblem.of(dtype, width, width, False, direction, (), program), direction)


def _with_max_logits() -> Iterator[KernelKey]:
    """Forwards that store the largest scores, with options, with a score_mod and in fp32."""
    sets = [("causal", "softcap"), ("alibi",), ("causal", "alibi"), ("window", "sink", "varlen")]
    kernels = [
        *_with_options(sets, (FWD,), (DEFAULT_DTYPE,)),
        *_with_options([("causal",)], (FWD,), FP32_DTYPES),
        *_with_program(_functions()["cap"], (DEFAULT_DTYPE,), directions=(FWD,)),
        *_with_program(_functions()["slopes in a block mask"], (DEFAULT_DTYPE,), directions=(FWD,)),
    ]
    for problem, config in kernels:
        if isinstance(config, FwdConfig):
            yield problem, config.storing_max


def _with_masks(dtypes: Iterable[str]) -> Iterator[KernelKey]:
    """Kernels of block masks in bits."""
    mask = Program((), listed=True, bits=True)
    for dtype, width, direction in itertools.product(dtypes, WIDTHS, (FWD, BWD)):
        yield from _kernels_of(AttnProblem(dtype, width, width, False, program=mask), direction)


def _with_options(
    sets: Iterable[tuple[str, ...]], directions: Iterable[str], dtypes: Iterable[str]
) -> Iterator[KernelKey]:
    """Kernels of sets of options, of short and of long sequences."""
    pairs = itertools.product(dtypes, WIDTHS)
    for names, direction, (dtype, width) in itertools.product(sets, directions, pairs):
        options = tuple(name for name in names if name != "causal")
        problem = AttnProblem(dtype, width, width, "causal" in names, options)
        for bucket in (BUCKETS[0], BUCKETS[-1]):
            yield from _kernels_of(problem, direction, bucket)


def _kernels_of(problem: AttnProblem, direction: str, bucket: str = BUCKETS[-1]) -> Iterator[KernelKey]:
    """Kernels of a problem with the config of a call on DEFAULT_GPU."""
    served, gpu = problem.served_as, configs.DEFAULT_GPU
    if served.options or served.program:
        config = configs.option_config(served, bucket, direction)
    else:  # without the user's own rows
        config = configs.config_of_tables(served, bucket, [configs.shipped_tables()[gpu]], direction)
    if problem.has("added"):
        config = config.merging
    yield from config.kernels(problem.compiled_as)
