"""The text of `tl-attention explain`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from tl_attention import legality
from tl_attention.explain import measured, model
from tl_attention.explain.clocks import ADD_BYTES_PER_CLOCK, FP32_PER_CLOCK, GATHERING, SCATTERING
from tl_attention.explain.functions import GATHERED_PER_CLOCK, SCATTERED_PER_CLOCK
from tl_attention.explain.measured import Measurement
from tl_attention.explain.model import Estimate
from tl_attention.explain.work import MIN_KEYS_PER_CTA, Kernel, Work
from tl_attention.gpus import COMPARED, EXP_PER_CLOCK, GPUS, H100, H200, SMEM_BYTES_PER_CLOCK
from tl_attention.kernel_configs import BwdPass, DecodeConfig, FwdConfig
from tl_attention.problem import DECODE
from tl_attention.target import SMEM_LIMIT, SMEM_PER_SM
from tl_attention.testing.shapes import sequences

WIDTH = 128  # of a line
LABEL = 17  # columns of a label
TITLES = {"fwd": "forward", "bwd": "backward", "bwd_det": "deterministic backward", DECODE: "decode"}
FLOP_FORMULAS = {
    "fwd": "2 x pairs x (head_dim + head_dim_v): S = QK', O = PV",
    "bwd": "2 x pairs x (3 head_dim + 2 head_dim_v): five products, S, dP, dV, dK, dQ",
}
ONCE = {
    "fwd": "q, k and v read, out and lse written",
    "bwd": "q, k, v, out, dout and lse read, dq, dk and dv written",
    DECODE: "keys and values of all sequences and q read, out written",
}
# Passes over the N x N matrices of the unfused algorithm, and what they are
UNFUSED = {
    "fwd": (4, "S written and read, P written and read"),
    "bwd": (7, "P read twice; dP written and read; dS written and read twice"),
}
THEOREM = "Dao et al. 2022, FlashAttention, theorem 2; theorem 5 for the backward"
BOUND_ADVICE = {
    "tensor cores": "the products themselves; less padding of tiles or fewer visible pairs would help",
    "exponential unit": "exponentials: every SM makes 16 per clock, whatever the head dim; a larger head dim hides them",
    "fp32 instructions": "the instructions of the softmax and of options beside the products",
    "shared memory": "operands of the tensor cores from shared memory; larger tiles reuse them more",
    "adding dq in L2": "fp32 additions to dq in L2; a pass of its own for dq (bwd_det) trades them for two more products",
    GATHERING: "loads of captured tensors with an index per score; a bias by query and key is read by tiles",
    SCATTERING: "a gradient of a captured tensor to which each score adds; a bias by query and key stores its gradient",
    model.MEMORY: "bytes; fewer or narrower keys and values (GQA, MLA) would help, faster tensor cores would not",
    model.LAUNCHES: "latency of launches and of first loads; more work per call would help (CUDA graphs hide the host's part)",
    model.IDLE: "SMs without a tile: too few tiles, or a last wave that is partly filled",
}
SCHEDULES = {
    "grid": "one CTA per tile, longest tiles first",
    "persistent": "one CTA per SM takes every n-th tile: without a mask all tiles are equally long",
    "shared": "as persistent; CTAs share the keys of the last tiles, under a causal mask those of all tiles",
    "dynamic": "one CTA per SM draws its next tile from a counter, the longest first: tiles differ in length",
    "dynamic-late": "as dynamic; the next tile is drawn at the end of one, as tiles are long",
    "ordered": "as dynamic-late; tiles add to dq in the order in which they are drawn",
    "split": "as dynamic-late; several CTAs may share a key tile by its queries: the last tiles, under a causal mask all or none",
}


def text(work: Work, dtype: str) -> str:
    """The answer for one pass of one shape."""
    estimate = model.estimate(work)
    found = measured.find(work.shape, work.direction, dtype, work.gpu.name)
    sections = {
        "Work": _work(work),
        "Memory": _memory(work, estimate),
        "Roofline": _roofline(work, estimate),
        "Time by the model": _time(work, estimate),
        "Measured": _measured(work, estimate, found),
        "Config": _config(work, estimate),
    }
    title = f"{TITLES[work.direction]} of {work.shape}, {dtype}, on {work.gpu.name}"
    parts = [f"{title}\n{'=' * len(title)}"]
    parts += ["\n".join([name, *map(_wrapped, lines)]) for name, lines in sections.items()]
    return "\n\n".join(parts)


def _wrapped(line: str) -> str:
    """An indented line, further lines of it beside its text if it begins with a label."""
    labelled = line[:LABEL].endswith(" ") and not line.startswith(" " * LABEL)
    hanging = " " * (2 + LABEL) if labelled or line.startswith(" " * LABEL) else " " * 6
    return textwrap.fill(
        line,
        WIDTH,
        initial_indent="  ",
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def short(number: float, unit: str) -> str:
    """A number with three digits and a prefix: 137 GFLOP."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def duration(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def number_of(count: int, noun: str) -> str:
    """1 kernel, 2 kernels"""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _family(direction: str) -> str:
    return direction.removesuffix("_det")


def _work(work: Work) -> Iterator[str]:
    shape = work.shape
    every = sum(q * k for q, k in sequences(shape)) * shape.heads_q
    hidden = (
        ""
        if work.pairs == every
        else f", {100 * work.pairs / every:.3g} % of all, as the mask hides the others"
    )
    yield f"visible pairs    {short(work.pairs, ' pairs')} of a query and a key{hidden}"
    formula = FLOP_FORMULAS["fwd" if work.direction == DECODE else _family(work.direction)]
    yield f"FLOPs            {short(work.flops, 'FLOP')} = {formula}"
    executed = _executed(work)
    yield f"executed         {short(executed, 'FLOP')}, of which {100 * work.flops / max(executed, 1):.3g} % count: {_waste(work)}"
    if work.asked:
        yield f"function         {_function_words(work)}"


def _function_words(work: Work) -> str:
    name, asked = work.shape.options.function, work.asked
    if not asked.program:
        return f"{name}: the option {', '.join(asked.shape.options.words)} computes it, as flex_attention recognizes"
    words = [f"{name}: {work.problem.program}"]
    if asked.full is not None:
        blocks, partial = asked.full.numel(), int(asked.partial.sum())
        listed = partial + int(asked.full.sum())
        words.append(f"{100 * listed / blocks:.3g} % of the blocks of 128 x 128 are listed")
        words.append(f"{partial} of {listed} are partial and read a bit per score")
    if asked.bias_bytes:
        words.append(f"a bias of {short(asked.bias_bytes, 'B')}")
    return "; ".join(words)


def _executed(work: Work) -> int:
    return sum(kernel.steps * kernel.flops_per_step for kernel in work.kernels)


def _waste(work: Work) -> str:
    if work.direction == DECODE:
        rows = work.shape.seqlen_q * work.shape.heads_q // work.shape.heads_kv
        return (
            f"the tile has {work.config.block_M} rows, a key head {rows} (queries x query heads per key head)"
        )
    reasons = ["tiles are computed whole"]
    widths, own = (
        (work.problem.head_dim, work.problem.head_dim_v),
        (work.shape.head_dim, work.shape.head_dim_v),
    )
    if widths != own:
        reasons.append(f"head dims {own[0]}/{own[1]} are padded to {widths[0]}/{widths[1]}")
    products = (
        sum(len(kernel.config.makes) + (kernel.config.grads != "dv") + 1 for kernel in work.kernels)
        if work.direction != "fwd"
        else 2
    )
    if products > 5:
        reasons.append(f"{len(work.kernels)} passes take {products} products, as each computes S anew")
    return "; ".join(reasons)


def _memory(work: Work, estimate: Estimate) -> Iterator[str]:
    shape, least, moved = work.shape, work.least_bytes, estimate.hbm_bytes
    yield f"HBM at least     {short(least, 'B')}: {ONCE[_family(work.direction)]}{_captured_words(work)}, each once"
    parts = {helper.name: helper.bytes - helper.known for helper in work.helpers if helper.bytes}
    if again := moved - least - sum(parts.values()):
        parts[f"rows read again, which the L2 of {work.gpu.l2_mb} MB does not keep"] = again
    detail = "the same, as the L2 keeps what tiles share"
    if parts:
        more = ", ".join(f"{short(size, 'B')} for {name}" for name, size in parts.items())
        detail = f"that and {more}"
    yield f"HBM, scheduled   {short(moved, 'B')}: {detail}"
    yield f"into SMs         {short(estimate.sm_bytes, 'B')}, mostly from L2: {_reuse(work)}"

    number, what = UNFUSED["fwd" if work.direction == DECODE else _family(work.direction)]
    squares = sum(q * k for q, k in sequences(shape)) * shape.heads_q
    matrices = 2 * squares * number
    yield (
        f"unfused          {short(least + matrices, 'B')} of HBM, {(least + matrices) / moved:.3g} x as scheduled: "
        f"{short(matrices, 'B')} more for {what}, N x N numbers each"
    )
    if work.direction == DECODE and matrices < least:
        yield "IO complexity    N d, the cache, fused or not: with few queries S is small, so fusing saves launches, not much traffic"
        return
    width, on_chip = (shape.head_dim + shape.head_dim_v) / 2, SMEM_LIMIT // 2
    linear = sum(q + k for q, k in sequences(shape)) * shape.heads_q * width
    fused = short(squares * width**2 / on_chip, " numbers")
    yield f"IO complexity    fused   O(N^2 d^2 / M) = {fused}, M = {on_chip} numbers in shared memory of an SM"
    yield f"                 unfused O(N d + N^2)   = {short(linear + squares, ' numbers')}, without constant factors and masks"
    yield f"                 ({THEOREM})"
    yield (
        f"                 this schedule loads {short(estimate.sm_bytes / 2, ' numbers')} into SMs; the L2, which the theorem "
        f"does not know, leaves {short(moved / 2, '').strip()} to HBM"
    )


def _captured_words(work: Work) -> str:
    words = ""
    if work.asked and work.asked.bias_bytes:
        words += ", the bias read" if work.direction == "fwd" else ", the bias read and its gradient written"
    if work.asked and work.asked.bits_bytes:
        words += f", {short(work.asked.bits_bytes, 'B')} of mask bits read"
    return words


def _reuse(work: Work) -> str:
    owner = work.kernels[0].config
    if isinstance(owner, DecodeConfig):
        rows = work.shape.seqlen_q * work.shape.heads_q // work.shape.heads_kv
        return f"K and V once per tile of {owner.block_M} rows, {number_of(-(-rows // owner.block_M), 'tile')} per key head"
    if isinstance(owner, FwdConfig):
        tiles = number_of(-(-work.shape.seqlen_q // owner.block_M), "block")
        return (
            f"K and V once per block of {owner.block_M} queries, {tiles} per head; a larger block would not fit, "
            "which is where M comes in"
        )
    parts = []
    for one in (kernel.config for kernel in work.kernels):
        what, owned = (
            ("K and V", f"{one.block_M} queries")
            if one.grads == "dq"
            else ("Q and dO", f"{one.block_N} keys")
        )
        parts.append(f"{what} once per block of {owned} ({one.grads})")
    return ", ".join(parts)


def _roofline(work: Work, estimate: Estimate) -> Iterator[str]:
    own, moved = work.flops / work.least_bytes, work.flops / estimate.hbm_bytes
    yield f"intensity        {own:.4g} FLOP per byte of HBM at least, {moved:.4g} as scheduled"
    side = "right of it: compute" if moved >= work.gpu.ridge else "left of it: memory"
    yield (
        f"ridge point      {work.gpu.ridge:.0f} FLOP/B on this GPU ({work.gpu.tflops:.0f} TFLOPS over {work.gpu.tb_s:g} TB/s); "
        f"the problem is {side}"
    )
    others = ", ".join(
        f"{gpu.name.removeprefix('NVIDIA ')} {gpu.ridge:.0f} ({gpu.tflops:.0f} / {gpu.tb_s:g})"
        for gpu in COMPARED
    )
    yield f"                 {others}"


def _time(work: Work, estimate: Estimate) -> Iterator[str]:
    gpu = work.gpu
    rates = {
        "tensor cores": f"{gpu.tflops:.0f} TFLOPS dense",
        "exponential unit": f"{EXP_PER_CLOCK} per clock and SM",
        "fp32 instructions": f"{FP32_PER_CLOCK} per clock and SM",
        "shared memory": f"{SMEM_BYTES_PER_CLOCK} B per clock and SM",
        "adding dq in L2": f"{ADD_BYTES_PER_CLOCK} B per clock and SM",
        GATHERING: f"{GATHERED_PER_CLOCK:g} elements per clock and SM",
        SCATTERING: f"{SCATTERED_PER_CLOCK:g} additions per clock and SM",
        model.MEMORY: f"{model.HBM_SHARE:.0%} of {gpu.tb_s:g} TB/s",
        model.LAUNCHES: f"{number_of(work.launches, 'kernel')}, {model.LAUNCH_US:g} us each, and the start of tiles",
        model.IDLE: "; ".join(map(_wave_words, work.kernels, estimate.kernels)),
    }
    yield "what each unit takes alone, at full rate:"
    for name, seconds in sorted(estimate.units.items(), key=lambda item: -item[1]):
        share = 100 * seconds / estimate.seconds
        yield f"  {name:22} {duration(seconds):>9} {share:4.0f} %   {rates.get(name, '')}".rstrip()
    yield f"bound by         {estimate.bound}: {BOUND_ADVICE[estimate.bound]}"
    speed = f"{estimate.tflops(work.flops):.4g} TFLOPS"
    if work.direction == DECODE:
        speed = f"{work.least_bytes / estimate.seconds / 1e9:.4g} GB/s"
    yield f"predicted        {duration(estimate.seconds)}, {speed} at {gpu.boost_ghz:g} GHz"
    if gpu.name not in GPUS:
        yield "                 this GPU is unknown: clock, memory and L2 are those of the Hopper with the nearest number of SMs"
    if gpu not in (H100, H200):
        yield "                 the model's constants are fitted on an H200; on this GPU it is not checked"


def _wave_words(kernel: Kernel, time: model.KernelTime) -> str:
    name = f"{kernel.name}: " if kernel.name.startswith("pass") else ""
    return (
        f"{name}{number_of(kernel.count, 'tile')} in {time.waves:.3g} waves, SMs busy {100 * time.busy:.0f} %"
    )


def _measured(work: Work, estimate: Estimate, found: Sequence[Measurement]) -> Iterator[str]:
    if measured.results_dir() is None:
        yield "no results here: an installed package has none; a checkout has them in benchmarks/results"
        return
    if not found:
        words = bench_words(work)
        can = (
            f"; tl-attention bench {words} measures it" if words else ", and tl-attention bench measures none"
        )
        yield f"benchmarks/results has no such row for {work.gpu.name}{can}"
    for one in found:
        speed = f"{work.flops / one.ms / 1e9:.4g} TFLOPS"
        if work.direction == DECODE:
            speed = f"{work.least_bytes / one.ms / 1e6:.4g} GB/s"
        warm = ", inputs in L2" if one.warm else ""
        where = f"{one.path.parent.name}/{one.path.name}, row {one.name}, commit {one.commit}{warm}"
        yield f"{duration(one.ms / 1e3)}, {speed}; predicted / measured {1e3 * estimate.seconds / one.ms:.2f} ({where})"


def bench_words(work: Work) -> str | None:
    """Arguments with which `tl-attention bench` measures a call; None if it measures no such call."""
    shape, direction, dtype = work.shape, work.direction, work.problem.dtype
    of_decode = "page", "ragged"
    others = [word for word in shape.options.words if word.partition("=")[0] not in (*of_decode, "function")]
    words = ["--pass bwd --deterministic" if direction == "bwd_det" else f"--pass {direction}"]
    words.append(f"--shapes {shape}")
    if shape.options.function or work.problem.is_fp32:  # sets of their own
        if direction == "bwd_det" or dtype == "float16" or others:
            return None
        words.append("--set flex" if shape.options.function else "--set fp32")
    elif direction == DECODE and others:
        return None
    elif dtype == "float16":
        words.append("--dtype fp16")
    return " ".join(words)


def _config(work: Work, estimate: Estimate) -> Iterator[str]:
    yield f"{work.config}"
    yield f"from {work.source}"
    yield from (f"tried before: {miss}" for miss in work.misses)
    for kernel, time in zip(work.kernels, estimate.kernels, strict=True):
        yield f"{kernel.name}: {_tile_words(kernel)}"
        yield f"  {_resources(work, kernel)}"
        yield f"  {_wave_words(kernel, time)}"
        if isinstance(kernel.config, BwdPass):
            yield f"  schedule {kernel.config.schedule}: {SCHEDULES[kernel.config.schedule]}"
            if kernel.config.dq_apart:
                yield f"  order {kernel.config.order}: a warpgroup of its own computes dq, and TMA adds it, beside the other warpgroups"
            if kernel.config.rounds(work.problem):
                yield "  rounds-dq: idle warps round dq of a head once its tiles have added it, so its fp32 sums stay in the L2"
    if work.direction == "fwd":
        yield f"schedule {work.config.schedule}: {SCHEDULES[work.config.schedule]}"
        if work.splits > 1:
            yield f"split: {work.splits} CTAs share the keys of a tile, as there are fewer tiles than SMs; a second kernel merges them"
        if work.config.hold_max:
            yield "hold-max: row maxima stay as the first steps found them, which leaves the exponentials less to wait for"
        if work.config.ping_pong:
            yield "ping-pong: while a warpgroup computes its softmax, the other has the tensor cores"
    if work.direction == DECODE:
        yield (
            f"splits: CTAs divide all keys evenly, at least {MIN_KEYS_PER_CTA} keys each: about {work.splits} CTAs per sequence, key head "
            "and tile"
        )
    if work.helpers:
        yield f"further kernels: {'; '.join(helper.name for helper in work.helpers)}"


def _tile_words(kernel: Kernel) -> str:
    config = kernel.config
    if isinstance(config, FwdConfig):
        return (
            f"tiles of {config.block_M} queries, steps of {config.block_N} keys; rings of {config.q_stages} Q and {config.kv_stages} K and"
            f" V tiles; {number_of(config.warpgroups, 'consumer warpgroup')}"
        )
    if isinstance(config, DecodeConfig):
        return (
            f"tiles of {config.block_M} rows, steps of {config.block_N} keys; rings of {config.num_stages} K and V tiles; "
            f"{number_of(config.warpgroups, 'consumer warpgroup')}"
        )
    assert isinstance(config, BwdPass)
    owned, step, rings = (f"{config.block_N} keys", f"{config.block_M} queries", ("Q", "dO"))
    if config.grads == "dq":
        owned, step, rings = f"{config.block_M} queries", f"{config.block_N} keys", ("K", "V")
    stages = f"{config.num_stages} {rings[0]} and {config.num_stages_do} {rings[1]} tiles"
    return f"tiles of {owned}, steps of {step}; rings of {stages}; {number_of(config.warpgroups, 'consumer warpgroup')}"


def _resources(work: Work, kernel: Kernel) -> str:
    smem = legality.smem_bytes(work.problem, kernel.config)
    ctas = max(SMEM_PER_SM // (smem + 2 * legality.BARRIER_BYTES), 1)
    if isinstance(kernel.config, DecodeConfig):
        return f"shared memory {smem} of {SMEM_PER_SM} bytes per SM, {number_of(kernel.ctas_per_sm, 'CTA')} per SM"
    registers = legality.accumulator_registers(work.problem, kernel.config)
    limit = legality.ACCUMULATOR_REGISTERS[type(kernel.config)][kernel.config.warpgroups]
    # Consumers take nearly all registers of an SM, so a second CTA does not fit even where shared memory would let it
    return (
        f"shared memory {smem} of {SMEM_LIMIT} bytes, accumulators in {registers} of {limit} registers per thread: 1 CTA per SM"
        + (", because of registers" if ctas > 1 else "")
    )
