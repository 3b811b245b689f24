"""Answers of `tl-attention config`: which config serves a problem given in words, where it comes from and what was tried before."""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch

from tl_attention.config import configs, gpus, legality
from tl_attention.config.buckets import (
    Facts,
    bucket_of,
    buckets,
    bwd_bucket,
    calls_of,
    option_buckets,
    window_bucket,
)
from tl_attention.config.costs import Costs, costs_of
from tl_attention.config.gpus import Gpu
from tl_attention.config.kernel_configs import Config, DecodeConfig, page_rows
from tl_attention.problem.arguments import dtype_name
from tl_attention.problem.attn_problem import (
    BUCKETS,
    DECODE,
    DECODE_OPTIONS,
    DECODE_TILE_WIDTHS,
    DEFAULT_DTYPE,
    DIRECTIONS,
    DTYPES,
    FAR,
    FEW_BUCKET,
    INVARIANT_BUCKET,
    MAX_HEAD_DIM,
    ONLY_DECODE,
    OPTIONS,
    SPLIT_BUCKET,
    AttnProblem,
    decode_problem,
    dtypes,
    length_bucket,
    tile_widths,
)
from tl_attention.problem.options import ALWAYS_INVARIANT, UNLIMITED, canonical_window
from tl_attention.problem.target import DEFAULT_GPU, gpu_name, is_hopper
from tl_attention.testing.shapes import Shape, sequences

SIZES = ("seqlen_q", "seqlen_k", "batch", "heads", "heads_kv", "page_size")
MASKS = ("full", "causal")
PASSES = (*DIRECTIONS, DECODE)
OPTION_WORDS = tuple(dict.fromkeys((*OPTIONS, *DECODE_OPTIONS)))
GPU_HELP = f"a Hopper GPU, such as H100 or its name in torch; default: this GPU, else {DEFAULT_GPU}"
NAMED_BUCKETS = tuple(
    dict.fromkeys(bucket for direction in DIRECTIONS for bucket in option_buckets(direction, OPTIONS))
)


@dataclass
class Question:
    """A problem in the words of a tuning key, and the sizes that choose its bucket."""

    dtype: str = DEFAULT_DTYPE
    head_dims: tuple[int, int] | None = None
    causal: bool = False
    options: list[str] = field(default_factory=list)
    bucket: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    directions: list[str] = field(default_factory=list)  # passes named among the words
    window: tuple[int, ...] = ()  # (left, right) of window=127 or window=127,0
    batch_invariant: bool = ALWAYS_INVARIANT
    max_logits: bool = False

    @property
    def window_keys(self) -> int | None:
        """Keys in the window; None if the words do not say it."""
        if not self.window:
            return None
        left, right = self.window
        return FAR if min(left, right) < 0 else left + right + 1

    @property
    def words(self) -> str:
        """The problem as it was asked: bf16 d100 causal window."""
        options = (option for option in OPTION_WORDS if option in self.options)
        words = [DTYPES[self.dtype].short, width_words(*self.head_dims), MASKS[self.causal], *options]
        words += ["batch_invariant"] * self.batch_invariant + ["max_logits"] * self.max_logits
        return " ".join(words)


def width_words(head_dim: int, head_dim_v: int) -> str:
    """d128, d192-128"""
    return f"d{head_dim}" if head_dim == head_dim_v else f"d{head_dim}-{head_dim_v}"


def parse(words: Sequence[str]) -> Question:
    """Read words such as bf16 d128 causal window=127 sink seqlen_k=4096, in any order; of values of options that of a window alone matters.

    Raises:
        ValueError: an unknown word, or no head dims.
    """
    question = Question()
    given: dict[str, str] = {}  # kind of word -> the word

    def once(kind: str, word: str) -> None:
        if given.setdefault(kind, word) != word:
            raise ValueError(f"{kind}: expected one word, got {given[kind]} and {word}")

    for word in " ".join(words).split():
        name, _, value = word.partition("=")
        if (dtype := dtype_name(word)) in DTYPES:
            once("dtype", word)
            question.dtype = dtype
        elif word in PASSES:
            question.directions.append(word)
        elif match := re.fullmatch(r"d(\d+)(?:-(\d+))?", word):
            once("head dims", word)
            question.head_dims = int(match[1]), int(match[2] or match[1])
            if 0 in question.head_dims:
                raise ValueError(f"head dims: expected numbers above 0, got {word}")
        elif word in MASKS:
            once("mask", word)
            question.causal = word == "causal"
        elif word == "batch_invariant":
            question.batch_invariant = True
        elif word == "max_logits":
            question.max_logits = True
        elif word in NAMED_BUCKETS:
            once("bucket", word)
            question.bucket = word
        elif name in OPTION_WORDS:
            once(name, word)
            if name == "window" and word != name:
                question.window = _window(word)
            elif word != name and _checked_value(name, value) == 0 and name in ("softcap", "dropout"):
                continue  # a call without it
            question.options.append(name)
        elif name in SIZES:
            once(name, word)
            if not value.isdecimal() or int(value) == 0:
                raise ValueError(f"{name}: expected {name}=N, a whole number above 0, got {word}")
            question.sizes[name] = int(value)
        else:
            if like := _close_word(word):
                raise ValueError(
                    f"WORD: expected a word that --help lists, got {word!r}; did you mean {like}?"
                )
            raise ValueError(f"WORD: expected {accepted_words()}; got {word!r}")
    if question.window:
        bounds = question.window[0], question.window[-1]
        causal, question.window = canonical_window(question.causal, bounds)
        if question.window == (UNLIMITED, UNLIMITED):  # a call without a window
            question.causal, question.window = causal, ()
            question.options = [option for option in question.options if option != "window"]
    if question.head_dims is None:
        raise ValueError("head dims: expected a word such as d128 or d192-128, got none")
    if question.batch_invariant and "dropout" in question.options:
        raise ValueError("dropout: expected none with batch_invariant, got dropout")
    if question.batch_invariant and question.head_dims[0] > MAX_HEAD_DIM:
        for name in ("window", "sink"):
            if name in question.options:
                raise ValueError(f"{name}: expected none with batch_invariant and d576-512, got {name}")
    if question.bucket and question.batch_invariant:
        raise ValueError(
            f"bucket: expected none with batch_invariant, which has its own, got {question.bucket}"
        )
    if question.bucket and "seqlen_k" in question.sizes:
        raise ValueError(
            f"bucket: expected a bucket or seqlen_k, which chooses it, got {question.bucket} and {given['seqlen_k']}"
        )
    heads, heads_kv = (question.sizes.get(name, 0) for name in ("heads", "heads_kv"))
    if heads and heads_kv and heads % heads_kv:
        raise ValueError(f"heads_kv: expected a divisor of heads, {heads}, got {given['heads_kv']}")
    return question


def _checked_value(name: str, value: str) -> float:
    """Value of an option, checked as calls do."""
    # Here, as help of the command has no torch
    from tl_attention.checks.common import expect_dropout, expect_softcap

    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected {name} or {name}=NUMBER, got {name}={value}")
    if name == "softcap":
        expect_softcap(number)
    elif name == "dropout":
        expect_dropout(name, number, "")
    return number


def _window(word: str) -> tuple[int, ...]:
    try:
        bounds = tuple(map(int, word.partition("=")[2].split(",")))
    except ValueError:
        bounds = ()
    if len(bounds) not in (1, 2):
        raise ValueError(f"window: expected whole numbers, window=LEFT or window=LEFT,RIGHT, got {word}")
    if min(bounds) < UNLIMITED:
        raise ValueError(f"window: expected bounds of at least 0, with -1 for no limit, got {word}")
    return bounds


def _close_word(word: str) -> str | None:
    """The accepted word that an unknown one most likely means; None if none is close."""
    name, _, value = word.partition("=")
    if match := re.fullmatch(r"(?:head_?|h)?(?:d|dim)?=?(\d+)", word):
        widest = max(qk for qk, _ in DECODE_TILE_WIDTHS)
        return f"d{match[1]}" if int(match[1]) <= widest else f"seqlen_k={match[1]}"
    if re.fullmatch(r"(seq_?)?(len|length)?", name) and value.isdecimal():
        return f"seqlen_k={value}"
    if value.isdecimal() and (sizes := difflib.get_close_matches(name, SIZES, 1, 0.65)):
        return f"{sizes[0]}={value}"
    dtypes = (name for dtype in DTYPES.values() for name in (dtype.short, dtype.name))
    known = [
        *dtypes,
        *MASKS,
        *PASSES,
        *NAMED_BUCKETS,
        *OPTION_WORDS,
        "batch_invariant",
        "max_logits",
        *(f"{size}=N" for size in SIZES),
        "d192-128",
    ]
    return next(iter(difflib.get_close_matches(word, known, 1, 0.65)), None)


def accepted_words() -> str:
    return (
        f"a dtype ({', '.join(dtype.short for dtype in DTYPES.values())}), head dims (d128, d192-128), "
        f"a mask ({', '.join(MASKS)}), options ({', '.join(OPTION_WORDS)}; a value such as window=127 is allowed), batch_invariant, "
        f"max_logits, a bucket ({', '.join(NAMED_BUCKETS)}), sizes ({', '.join(f'{name}=N' for name in SIZES)}) "
        f"or passes ({', '.join(PASSES)})"
    )


def gpu_of(words: str | None) -> Gpu:
    """The GPU of --gpu; without it this machine's, or DEFAULT_GPU if that is no Hopper.

    Raises:
        ValueError: a name that is no Hopper GPU.
    """
    if words is not None:
        return gpus.resolve(words)
    here = torch.cuda.is_available() and is_hopper(torch.cuda.current_device())
    return gpus.resolve(gpu_name() if here else DEFAULT_GPU)


def shape_bucket(shape: Shape, problem: AttnProblem, direction: str, gpu: Gpu) -> str:
    """The bucket of a shape and its problem on a GPU."""
    from tl_attention.launch import splits

    longest = max(seqlen_k for _, seqlen_k in sequences(shape))
    if direction != "fwd":
        queries = shape.seqlen_q if problem.is_fp32 and not shape.is_varlen else 0
        return bwd_bucket(direction == "bwd_det", shape.heads_q, shape.heads_kv, longest, seqlen_q=queries)
    costs = costs_of(gpu.name, gpu.sms)
    if shape.is_varlen:
        return SPLIT_BUCKET if _packed_splits(shape, costs) > 1 else length_bucket(longest)
    sizes = shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k
    bucket = splits.fwd_bucket(*sizes, costs, splits.sharing(problem, gpu.name))
    return window_bucket(bucket, problem.options, shape.window_keys)


def _packed_splits(shape: Shape, costs: Costs) -> int:
    """Splits per tile of packed sequences with the lengths of a shape."""
    from tl_attention.launch import splits
    from tl_attention.problem.options import Options

    queries, keys = zip(*sequences(shape), strict=True)
    cu_seqlens_q = torch.empty(shape.batch + 1, dtype=torch.int32, device="meta")
    options = Options(
        window=shape.window_size,
        max_seqlen_q=max(queries),
        max_seqlen_k=max(keys),
        cu_seqlens_q=cu_seqlens_q,
    )
    return splits.packed_splits(options, sum(queries), sum(keys), shape.heads_q, costs)


@dataclass(frozen=True)
class Answer:
    """A config, the buckets of a problem that it serves, and why.

    Args:
        problem: the problem that kernels are compiled for.
        asked: the problem in the words of the question; why: where it differs from `problem`, the reasons.
        source: the tuned row or line of the grid that it comes from.
        misses: rows and lines tried before, and why each does not serve.
        fault: why it cannot run; empty if it can.
    """

    direction: str
    problem: str
    buckets: tuple[str, ...]
    gpu: str
    name: str
    config: Config | DecodeConfig
    source: str
    misses: tuple[str, ...]
    fault: str
    asked: str
    why: str

    def lines(self, tried: bool = False) -> Iterator[str]:
        """The answer in words; the first line has the config, the others its fields and the reasons. tried: the misses, too."""
        place = f" on {self.gpu}" if self.gpu else ""
        yield f"{' '.join((self.direction, self.asked, ', '.join(self.buckets))).rstrip()}{place}: {self.name}"
        if self.why:
            yield f"  runs as {self.problem}: {self.why}"
        for one in getattr(self.config, "passes", (self.config,)):
            yield "  " + ", ".join(f"{x.name}={getattr(one, x.name)}" for x in fields(one))
        yield f"  from {short_paths(self.source)}"
        for miss in self.misses if tried else ():
            yield f"  tried before: {short_paths(miss)}"
        if self.fault:
            yield f"  cannot run: {self.fault}"


def short_paths(text: str) -> str:
    """The text with paths of data files as configs/grid.toml."""
    return text.replace(f"{configs.data_dir()}{os.sep}", "configs/")


def legend(answers: Iterable[Answer]) -> Iterator[str]:
    """A line per bucket of the answers, which says what calls it has."""
    found = {}
    for one in answers:
        found |= {bucket: calls_of(one.direction, bucket) for bucket in one.buckets}
    if found:
        yield "Buckets of calls, the first that fits:" if len(found) > 1 else "Bucket of calls:"
    order = [*NAMED_BUCKETS, INVARIANT_BUCKET]
    for bucket in sorted(found, key=lambda name: (name in BUCKETS, order.index(name))):
        yield f"  {bucket}: {found[bucket]}"


def _reasons(question: Question, problem: AttnProblem) -> str:
    """Why the kernels of a question are those of another problem; empty if they are not."""
    reasons = []
    if (problem.head_dim, problem.head_dim_v) != question.head_dims:
        asked = width_words(*question.head_dims)
        reasons.append(f"{asked} takes tiles of {problem.width}, whose other columns are zeros")
    if problem.has("window") and "window" not in question.options:
        reasons.append("each decode kernel has a window, whose bounds are arguments of the launch")
    elif problem.has("window") and question.causal:
        reasons.append("causal is the right bound of the window, an argument of the launch")
    if "sink" in question.options and not problem.has("sink"):
        reasons.append("a sink changes no backward kernel")
    return "; ".join(reasons)


def answer(question: Question, direction: str, gpu: Gpu) -> Iterator[Answer]:
    """Distinct answers for the buckets that a question leaves possible.

    Raises:
        ValueError: the question does not fit the pass.
    """
    if direction == DECODE:
        yield from _answer_decode(question, gpu)
        return
    if "page_size" in question.sizes:
        raise ValueError(
            f"page_size: expected none for {direction}, got page_size={question.sizes['page_size']}; decode alone has configs by page"
            " size, a forward over pages makes its config from that of varlen without pages"
        )
    problem = _problem(question, direction)
    answers: dict[tuple[Config, str], dict[str, tuple[str, ...]]] = {}  # -> misses by bucket
    for bucket in _buckets(question, problem, direction, gpu):
        choice = configs.choose_config(problem, bucket, gpu.name, direction)
        config = choice.config
        if question.max_logits and direction == "fwd":
            if config.split or bucket == FEW_BUCKET:  # no such call: one CTA has all keys of a query
                continue
            config = config.storing_max
        answers.setdefault((config, choice.source), {})[bucket] = choice.misses
    why = _reasons(question, problem)
    for (config, source), served in answers.items():
        misses = tuple(dict.fromkeys(itertools.chain(*served.values())))
        found = str(config), config, source, misses, legality.fault(problem, config, direction) or ""
        yield Answer(direction, str(problem), tuple(served), gpu.name, *found, question.words, why)


def _problem(question: Question, direction: str) -> AttnProblem:
    check_head_dims(*question.head_dims, direction, question.dtype)
    if others := [option for option in question.options if option not in OPTIONS]:
        hint = f"; add the word {DECODE}" if others[0] in ONLY_DECODE else ""
        raise ValueError(
            f"options: expected some of {', '.join(OPTIONS)} for {direction}, got {others[0]}{hint}"
        )
    options = tuple(option for option in OPTIONS if option in question.options)
    if direction != "fwd":
        options = tuple(option for option in options if option != "sink")  # it changes no backward kernel
    causal = question.causal and "window" not in options
    return AttnProblem.of(question.dtype, *question.head_dims, causal, direction, options)


def check_head_dims(head_dim: int, head_dim_v: int, direction: str, dtype: str = DEFAULT_DTYPE) -> None:
    """Raise ValueError for a dtype or head dims that a pass has no kernels for."""
    if dtype not in dtypes(direction):
        raise ValueError(
            f"dtype: expected one of {', '.join(dtypes(direction))} for {direction}, got {dtype}"
        )
    widths = DECODE_TILE_WIDTHS if direction == DECODE else tile_widths(direction, dtype)
    if not any(qk >= head_dim and v >= head_dim_v for qk, v in widths):
        known, got = ", ".join(width_words(*width) for width in widths), width_words(head_dim, head_dim_v)
        by_formula = direction != DECODE and dtype.startswith("float32") and head_dim <= MAX_HEAD_DIM
        wide = "; PyTorch's formula computes it, slower (docs/numerics.md)" if by_formula else ""
        raise ValueError(
            f"head dims: expected at most those of one of the kernels of {direction}, {known}, got {got}{wide}"
        )
    if direction == DECODE:
        _check_cache_widths(head_dim, head_dim_v)


def _check_cache_widths(head_dim: int, head_dim_v: int) -> None:
    """Raise ValueError for head dims that flash_attn_with_kvcache refuses."""
    from tl_attention.checks.kvcache import ALIGNMENT, LATENT

    got = width_words(head_dim, head_dim_v)
    if head_dim > MAX_HEAD_DIM and (head_dim, head_dim_v) != LATENT:
        raise ValueError(
            f"head dims: expected at most d{MAX_HEAD_DIM}, or {width_words(*LATENT)}, for decode, got {got}"
        )
    if head_dim % ALIGNMENT or head_dim_v % ALIGNMENT or head_dim_v > head_dim:
        raise ValueError(
            f"head dims: expected multiples of {ALIGNMENT} for decode, as a cache is never copied, and values no wider than keys, got {got}"
        )


def _buckets(question: Question, problem: AttnProblem, direction: str, gpu: Gpu) -> Sequence[str]:
    """The buckets a question is about: the one it names, those that its sizes leave possible, or all."""
    known, sizes = option_buckets(direction, problem.options), question.sizes
    if question.batch_invariant and direction != "bwd":  # gradients keep their bits if they are deterministic
        return (
            [INVARIANT_BUCKET] if direction == "fwd" else _buckets_of_heads(question, problem, direction, FAR)
        )
    if question.bucket:
        if question.bucket not in known:
            raise ValueError(
                f"bucket: expected one of {', '.join(known)} for {direction}, got {question.bucket}"
            )
        return [question.bucket]
    if "seqlen_k" not in sizes:
        found = [bucket for bucket in buckets(direction) if bucket != FEW_BUCKET or problem.can_share]
        return _with_window(question, problem, found) if direction == "fwd" else found
    seqlen_k = sizes["seqlen_k"]
    if direction != "fwd":
        return _buckets_of_heads(question, problem, direction, seqlen_k)
    if "varlen" in question.options:  # buckets by queries serve no packed sequences
        return [length_bucket(seqlen_k), SPLIT_BUCKET]
    from tl_attention.launch import splits

    seqlen_q, shares = sizes.get("seqlen_q", seqlen_k), splits.sharing(problem, gpu.name)
    ways = [None, SPLIT_BUCKET, *([FEW_BUCKET] if shares else [])]
    if {"batch", "heads"} <= sizes.keys():
        heads, costs = sizes["batch"] * sizes["heads"], costs_of(gpu.name, gpu.sms)
        ways = [splits.sharing_bucket(heads, seqlen_q, seqlen_k, costs, shares)]
    found = [bucket_of("fwd", Facts(seqlen_q, seqlen_k, seqlen_k, sharing=way)) for way in ways]
    return _with_window(question, problem, found)


def _buckets_of_heads(question: Question, problem: AttnProblem, direction: str, seqlen_k: int) -> list[str]:
    """Buckets of a backward with so many keys: those of as many and of more query heads than key heads, where the words leave it open."""
    sizes = question.sizes
    seqlen_q = sizes.get("seqlen_q", 0) if problem.is_fp32 else 0
    known = {"heads", "heads_kv"} <= sizes.keys()
    heads = [(sizes["heads"], sizes["heads_kv"])] if known else [(1, 1), (2, 1)]
    found = [bwd_bucket(direction == "bwd_det", *pair, seqlen_k, seqlen_q=seqlen_q) for pair in heads]
    return list(dict.fromkeys(found))


def _with_window(question: Question, problem: AttnProblem, found: Sequence[str]) -> list[str]:
    """Buckets of a forward whose lengths have these, by the keys of its window: with and without a wide one if they are not known."""
    keys = (0, FAR) if question.window_keys is None else (question.window_keys,)
    return list(dict.fromkeys(window_bucket(bucket, problem.options, n) for bucket in found for n in keys))


def _check_page_size(sizes: dict[str, int]) -> None:
    """Raise ValueError for a page_size that flash_attn_with_kvcache refuses."""
    from tl_attention.checks.kvcache import PAGE_STEP

    if sizes.get("page_size", 0) % PAGE_STEP:
        raise ValueError(f"page_size: expected a multiple of {PAGE_STEP}, got page_size={sizes['page_size']}")


def _answer_decode(question: Question, gpu: Gpu) -> Iterator[Answer]:
    check_head_dims(*question.head_dims, DECODE, question.dtype)
    if others := [option for option in question.options if option not in DECODE_OPTIONS]:
        raise ValueError(f"options: expected some of {', '.join(DECODE_OPTIONS)} for decode, got {others[0]}")
    if question.max_logits:
        raise ValueError("max_logits: expected a forward, as decodes do not return it, got decode")
    if "tree" in question.options and (others := {"window", "alibi"} & set(question.options)):
        raise ValueError(f"tree: expected neither window nor alibi beside it, got {min(others)}")
    if question.bucket:
        raise ValueError(f"bucket: expected none for decode, which is not tuned, got {question.bucket}")
    problem, sizes = decode_problem(question.dtype, *question.head_dims, question.options), question.sizes
    _check_page_size(sizes)
    pages = page_rows(sizes["page_size"]) if "page_size" in sizes else 0
    rows: Sequence[int] = (configs.DECODE_ROWS, configs.DECODE_ROWS + 1)
    items_per_sm = [line.items_per_sm for line in configs.decode_lines(problem.width, pages)]
    if question.batch_invariant:
        items_per_sm = [math.inf]
    if {"heads", "heads_kv"} <= sizes.keys():
        rows = [sizes.get("seqlen_q", 1) * sizes["heads"] // sizes["heads_kv"]]
        if "batch" in sizes and not question.batch_invariant:
            items_per_sm = [configs.items_per_sm(sizes["batch"], sizes["heads_kv"], gpu.sms)]
    asked = itertools.product(rows, items_per_sm)
    served = dict.fromkeys((number, configs.decode_line(problem, number, pages, n)) for number, n in asked)
    grid = configs.data_dir() / "grid.toml"
    for number, line in served:
        config = line.config
        source = f"[decode] {problem.width} of {grid}, for {line.launches(number)}"
        if question.batch_invariant and not config.v_in_k:
            shared = tuple(option for option in problem.options if option in OPTIONS)
            forward = AttnProblem.of(question.dtype, *question.head_dims, False, options=shared)
            config = configs.invariant_decode_config(problem, config, forward)
            source += ", with the key blocks of the forward"
        found, why = (str(config), config, source, (), ""), _reasons(question, problem)
        yield Answer(DECODE, str(problem), (), "", *found, question.words, why)
