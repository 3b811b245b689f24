"""Calls of a class on drawn tensors, and their checks against the formula by the error rule."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from protocol.launches import forced_decode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tl_attention import flash_attn_with_kvcache, launch
from tl_attention.api.flex_lists import kept_mask, listed
from tl_attention.config.catalog import PAGED
from tl_attention.problem.attn_problem import DECODE, DTYPES, JVP, AttnProblem
from tl_attention.problem.options import Options
from tl_attention.problem.program import Call
from tl_attention.reference import (
    attention_backward_reference,
    attention_reference,
    dropout_keep,
    varlen_backward_reference,
    varlen_reference,
)
from tl_attention.reference.attention import true_fp32
from tl_attention.reference.kvcache import rotary_reference
from tl_attention.testing import numeric
from tl_attention.testing.inputs import arrange
from tl_attention.testing.numeric import check_bwd, check_fwd, check_jvp
from tl_attention.tracing.trace import trace

from .classes import CallClass
from .draws import Draw
from .memory import bits, is_untouched

# Times the last keys: the first ones, so that scores exceed a held row max by more than fp32 holds
RAMP = 60.0
# fp32 against fp64: largest error over the largest value, as tests/test_fp32.py has them. At highest four times that of PyTorch in fp32,
# as thousands of draws meet larger errors than one case
RELATIVE_ERROR = {2: 1e-4, 3: 2.0**-21}
LSE_ERROR = {2: 1e-4, 3: 2e-6}
# Of scores up to this magnitude; larger ones err by more, and so does P = exp(S - lse): 4 times 2**-23, the error of a product of three
# terms, is 2**-21
SMALL_SCORES = 4.0
# Error of dP - delta, where the exact difference is 0
CANCELLATION = {2: 2.0**-15, 3: 2.0**-22}
ROWS_OF_NONE = 5, 9  # of queries and of keys, behind the last packed sequence

Outputs = tuple[torch.Tensor, ...]


def trial_of(call_class: CallClass, draw: Draw, device: str) -> Trial:
    """The call of a draw, with its tensors."""
    problem = call_class.problem
    if call_class.kind == DECODE:
        return DecodeTrial(call_class, draw, device)
    if call_class.kind == JVP:
        return JvpTrial(call_class, draw, device)
    if problem.program is not None:
        return BlockMaskTrial(call_class, draw, device)
    return AttentionTrial(call_class, draw, device)


def torch_dtype(problem: AttnProblem) -> torch.dtype:
    return torch.float32 if problem.is_fp32 else getattr(torch, problem.dtype)


def forward_faults(*arguments: Any, **options: Any) -> list[str]:
    """Fault of a forward by the error rule of check_fwd, in words."""
    result = check_fwd(*arguments, **options)
    return [] if result.ok else [result.text]


class Trial:
    """A call on drawn tensors: run() launches it, faults() compares with the formula, repeats() names outputs whose bits are promised."""

    def __init__(self, call_class: CallClass, draw: Draw, device: str):
        self.call_class, self.draw, self.device = call_class, draw, device
        self.problem, self.config = call_class.problem, call_class.config
        self.dtype = torch_dtype(self.problem)
        self.generator = torch.Generator(device).manual_seed(draw.seed)
        self.head_dim = self.problem.head_dim - draw.narrower[0]
        self.head_dim_v = self.problem.head_dim_v - draw.narrower[1]
        self.scale = self.head_dim**-0.5 if draw.scale is None else draw.scale

    def run(self) -> Outputs:
        raise NotImplementedError

    def faults(self, outputs: Outputs) -> list[str]:
        """Faults of outputs, in words."""
        raise NotImplementedError

    def repeats(self, outputs: Outputs) -> Sequence[torch.Tensor]:
        """Outputs whose bits are the same in each run."""
        return outputs

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator).to(self.dtype)

    def ints(self, values: Sequence) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


class AttentionTrial(Trial):
    """A forward or a backward, dense, packed or with keys in pages."""

    def __init__(self, call_class: CallClass, draw: Draw, device: str):
        super().__init__(call_class, draw, device)
        self.packed = self.problem.has("varlen")
        self.backward = call_class.kind.startswith("bwd")
        self.heads_first = draw.layout == "bhsd"
        self.sizes_q, self.sizes_k = ([pair[i] for pair in draw.lengths] for i in (0, 1))
        self.of_reference: dict[str, Any] = {}
        fields: dict[str, Any] = {}
        if self.packed:
            fields |= self._lengths()
            rows_q, rows_k = (
                (sum(n) + more,) for n, more in zip((self.sizes_q, self.sizes_k), ROWS_OF_NONE, strict=True)
            )
        else:
            rows_q, rows_k = (draw.batch, self.sizes_q[0]), (draw.batch, self.sizes_k[0])
        self.q, self.dout = (
            self.randn(*rows_q, draw.heads, width) for width in (self.head_dim, self.head_dim_v)
        )
        self.k, self.v = (
            self.randn(*rows_k, draw.heads_kv, width) for width in (self.head_dim, self.head_dim_v)
        )
        if draw.ramp:
            self.k *= self._ramp()[:, None, None]
        if self.packed:
            for x, used in ((self.q, self.used_q), (self.dout, self.used_q), (self.k, self.used_k), (self.v, self.used_k)):  # fmt: skip
                x[~used] = math.nan
        else:
            self.q, self.k, self.v = arrange(self.q, self.k, self.v, draw.layout)
            if self.heads_first:
                (self.dout, *_) = arrange(self.dout, self.dout, self.dout, "bhsd")
        fields |= self._option_values()
        terms = DTYPES[self.problem.dtype].terms
        self.options = Options(**fields, parts=terms) if fields or terms else None
        self.block_table = None
        if call_class.kind == PAGED:
            self._make_pages()
        if self.backward:
            self._forward_by_formula()

    def _lengths(self) -> dict[str, Any]:
        """Fields of Options for the lengths of packed sequences; sets the masks of used rows."""
        draw = self.draw
        used_q, used_k = zip(*(draw.used or draw.lengths), strict=True)
        self.used_q, self.used_k = (
            self._mask(sizes, used, more)
            for sizes, used, more in zip(
                (self.sizes_q, self.sizes_k), (used_q, used_k), ROWS_OF_NONE, strict=True
            )
        )
        starts_q, starts_k = ([0, *itertools.accumulate(sizes)] for sizes in (self.sizes_q, self.sizes_k))
        # The reference reads these on the host
        self.of_reference |= {
            "cu_seqlens_q": torch.tensor(starts_q),
            "cu_seqlens_k": torch.tensor(starts_k),
        }
        fields = {
            "cu_seqlens_q": self.ints(starts_q),
            "cu_seqlens_k": self.ints(starts_k),
            "max_seqlen_q": max(self.sizes_q),
            "max_seqlen_k": max(self.sizes_k),
        }
        paged = self.call_class.kind == PAGED
        if draw.used is not None:
            self.of_reference |= {"seqused_q": torch.tensor(used_q), "seqused_k": torch.tensor(used_k)}
            fields |= {"seqused_q": self.ints(used_q), "seqused_k": self.ints(used_k)}
        if paged:
            fields |= {"seqused_k": self.ints(used_k), "cu_seqlens_k": fields["cu_seqlens_q"]}
        return fields

    def _mask(self, sizes: Sequence[int], used: Sequence[int], more: int) -> torch.Tensor:
        """Mask of the rows in use: bool [total]."""
        mask = torch.zeros(sum(sizes) + more, dtype=torch.bool)
        for start, rows in zip(itertools.accumulate(sizes, initial=0), used, strict=False):
            mask[start : start + rows] = True
        return mask.to(self.device)

    def _ramp(self) -> torch.Tensor:
        """Factor per key row, from RAMP to 1."""
        peak = RAMP / 2 if self.dtype == torch.float16 else RAMP
        rows = [torch.linspace(peak, 1, n) for n in self.sizes_k]
        if self.packed:
            rows.append(torch.ones(ROWS_OF_NONE[1]))
        return torch.cat(rows).to(self.dtype).to(self.device)

    def _option_values(self) -> dict[str, Any]:
        """Fields of Options for the options of the class; sets those of the reference."""
        draw, problem, batch = self.draw, self.problem, self.draw.batch
        shared: dict[str, Any] = {}
        if problem.has("window"):
            shared["window"] = draw.window
        if problem.has("softcap"):
            shared["softcap"] = draw.softcap
        if problem.has("alibi"):
            shape = (batch, draw.heads) if draw.slopes_of_batch else (draw.heads,)
            shared["alibi_slopes"] = 0.3 * torch.rand(shape, device=self.device, generator=self.generator)
        if problem.has("sink"):
            shared["sink"] = torch.randn(draw.heads, device=self.device, generator=self.generator)
        self.of_reference |= shared
        if problem.has("dropout"):
            state = torch.tensor([2**40 + draw.seed, 77], device=self.device)
            sizes = batch, draw.heads, max(self.sizes_q), max(self.sizes_k)
            self.of_reference |= {
                "dropout_p": draw.dropout_p,
                "keep": dropout_keep(state, *sizes, draw.dropout_p),
            }
            shared = {**shared, "dropout_p": draw.dropout_p, "rng_state": state}
        return shared

    def _make_pages(self) -> None:
        """Put k and v into pages in random order; entries of the table that are not used are out of range."""
        draw, page = self.draw, self.draw.page
        lengths = [k for _, k in (draw.used or draw.lengths)]
        pages_of = [-(-n // page) for n in lengths]
        count, wide = sum(pages_of) + 3, max(pages_of) + 2
        numbers = torch.randperm(count, generator=torch.Generator().manual_seed(draw.seed)).tolist()
        free = iter(numbers)
        table = [[next(free) if i < n else (-7, 2**30)[i % 2] for i in range(wide)] for n in pages_of]
        self.block_table = self.ints(table)
        starts = itertools.accumulate(self.sizes_k, initial=0)
        rows, at_page, at_row = [], [], []
        for start, n, pages in zip(starts, lengths, table, strict=False):
            rows += range(start, start + n)
            at_page += [pages[j // page] for j in range(n)]
            at_row += [j % page for j in range(n)]
        rows, at_page, at_row = (torch.tensor(x, dtype=torch.long, device=self.device) for x in (rows, at_page, at_row))  # fmt: skip
        self.pages = []
        for x in (self.k, self.v):
            pages = x.new_full((count, page, *x.shape[1:]), math.nan)
            if self.heads_first:
                pages = x.new_full((count, x.shape[1], page, x.shape[2]), math.nan).transpose(1, 2)
            pages[at_page, at_row] = x[rows]
            self.pages.append(pages)

    @property
    def exact_dtype(self) -> torch.dtype:
        return torch.float64 if self.problem.is_fp32 else torch.float32

    @property
    def max_logits(self) -> bool:
        """True for a forward that returns these, after out and lse."""
        return getattr(self.config, "max_logits", False)

    def _reference(self, dtype: torch.dtype) -> Outputs:
        reference = varlen_reference if self.packed else attention_reference
        arguments = self.q, self.k, self.v
        options = self.of_reference | ({"max_logits": True} if self.max_logits else {})
        if self.packed:
            options = {"softmax_scale": self.scale, "causal": self.problem.causal, **options}
            return reference(*arguments, dtype=dtype, **options)
        return reference(*arguments, self.scale, self.problem.causal, dtype=dtype, **options)

    def _forward_by_formula(self) -> None:
        """Set out, lse and dlse, the inputs of a backward; NaN in rows that are not used."""
        out, lse = self._reference(self.exact_dtype)
        self.out, self.lse = out.to(self.dtype), lse.float()
        self.dlse = None
        if self.draw.with_dlse:
            self.dlse = torch.randn(lse.shape, device=self.device, generator=self.generator)
        if self.packed:
            self.out[~self.used_q] = math.nan
            self.lse[:, ~self.used_q] = math.nan
        elif self.heads_first:
            (self.out, *_) = arrange(self.out, self.out, self.out, "bhsd")

    def _heads_first(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Tensors as the launch takes them, or back."""
        turned = self.heads_first and not self.packed
        return [x.transpose(1, 2) if turned else x for x in tensors]

    def run(self) -> Outputs:
        turned = self.heads_first and not self.packed
        q, k, v = self._heads_first(self.q, self.k, self.v)
        layout = self.scale, self.problem.causal, False, turned
        given = {"config": self.config, "options": self.options}
        if not self.backward:
            if self.block_table is not None:
                k, v = self.pages
            given |= {"block_table": self.block_table, "max_logits": self.max_logits}
            return launch.forward(q, k, v, *layout, **given)
        dout, out = self._heads_first(self.dout, self.out)
        deterministic = self.call_class.kind == "bwd_det"
        inputs = dout, q, k, v, out, self.lse
        return tuple(launch.backward(*inputs, *layout, deterministic, self.dlse, **given).values())[:3]

    def repeats(self, outputs: Outputs) -> Sequence[torch.Tensor]:
        if self.backward:
            return outputs if self.config.deterministic else outputs[1:]
        if self.packed and self.config.split:  # rows that are not used may hold anything
            out, lse = outputs
            return out[self.used_q], lse[:, self.used_q]
        return outputs

    def faults(self, outputs: Outputs) -> list[str]:
        if self.backward:
            return self._faults_of_gradients(outputs)
        out, lse, *largest = outputs
        (out,) = self._heads_first(out)
        found = []
        if self.packed:
            out, lse, found = self._with_unused((out, 0.0, self.used_q), (lse, -math.inf, self.used_q))
            if any(not bool((x[:, ~self.used_q] == -math.inf).all()) for x in largest):
                found.append("max_logits of rows that are not used are not -inf")
        if self.problem.is_fp32:
            names = ("out", "lse", "max_logits")[: len(outputs)]
            return found + self._fp32_faults(names, (out, lse, *largest), self._reference)
        arguments = self.q, self.k, self.v, self.scale, self.problem.causal
        asked = {"max_logits": largest[0]} if largest else {}
        return found + forward_faults(out, lse, *arguments, **asked, **self.of_reference)

    def _with_unused(self, *outputs: tuple[torch.Tensor, float, torch.Tensor]) -> list:
        """Outputs with a value in rows that are not used, and last the faults.

        Rows behind the last sequence must have the value; the unused ones of a sequence must not be written.
        """
        may_write = self.config.split if not self.backward else False
        lengths = self.options.cu_seqlens_q, self.options.cu_seqlens_k
        results, found = [], []
        for x, value, used in outputs:
            rows = x.mT if x.ndim == 2 else x
            end = int(lengths[used is self.used_k][-1])
            if not bool((rows[end:] == value).all()):
                found.append(f"rows behind the last sequence are not {value}")
            if not may_write and not bool(is_untouched(rows[:end][~used[:end]])):
                found.append("rows that are not used were written")
            rows = rows.clone()
            rows[~used] = value
            results.append(rows.mT if x.ndim == 2 else rows)
        return [*results, found]

    def _faults_of_gradients(self, grads: Outputs) -> list[str]:
        found, grads = [], self._heads_first(*grads)
        if self.packed:
            masks = self.used_q, self.used_k, self.used_k
            *grads, found = self._with_unused(*((x, 0.0, used) for x, used in zip(grads, masks, strict=True)))
        if self.problem.is_fp32:
            return found + self._fp32_faults(("dq", "dk", "dv"), grads, self._gradients)
        arguments = self.dout, self.q, self.k, self.v, self.scale, self.problem.causal, self.dlse
        result = check_bwd(tuple(grads), *arguments, **self.of_reference)
        return found if result.ok else [*found, result.text]

    def _gradients(self, dtype: torch.dtype) -> Outputs:
        reference = varlen_backward_reference if self.packed else attention_backward_reference
        named = {"softmax_scale": self.scale, "causal": self.problem.causal, "dlse": self.dlse}
        return reference(self.dout, self.q, self.k, self.v, dtype=dtype, **named, **self.of_reference)

    def _fp32_faults(
        self,
        names: Sequence[str],
        outputs: Sequence[torch.Tensor],
        reference: Callable[[torch.dtype], Outputs],
    ) -> list[str]:
        """Faults of fp32 outputs against fp64, by the bounds of tests/test_fp32.py; wider for large scores and where dP - delta is 0."""
        terms, found = DTYPES[self.problem.dtype].terms, []
        exact, peer = reference(torch.float64), reference(torch.float32)
        lse = self.lse if self.backward else exact[1]
        times = max(1.0, numeric._peak(lse) / SMALL_SCORES)
        largest_dp = numeric._peak(self.dout.norm(dim=-1)) * numeric._peak(self.v.norm(dim=-1))
        rows = math.sqrt(self.draw.group * max(self.sizes_q))
        factors = {"dq": numeric._peak(self.k), "dk": rows * numeric._peak(self.q)}
        for name, x, wanted, other in zip(names, outputs, exact, peer, strict=True):
            largest = numeric._peak(wanted)
            if name in ("lse", "max_logits"):
                allowed = LSE_ERROR[terms] * max(1.0, largest)
            else:
                allowed = RELATIVE_ERROR[terms] * times * largest
                if terms == 3:
                    allowed += 4 * numeric._peak(other.double() - wanted)
                allowed += CANCELLATION[terms] * abs(self.scale) * largest_dp * factors.get(name, 0.0)
            ratio, text = numeric._compare(name, x.double(), wanted, allowed)
            found += [text] if ratio > 1 else []
        return found


class JvpTrial(Trial):
    """A forward with its derivative along a direction."""

    def __init__(self, call_class: CallClass, draw: Draw, device: str):
        super().__init__(call_class, draw, device)
        ((rows, keys),) = draw.lengths
        sizes = (
            (draw.batch, rows, draw.heads, self.head_dim),
            (draw.batch, keys, draw.heads_kv, self.head_dim),
            (draw.batch, keys, draw.heads_kv, self.head_dim_v),
        )
        self.heads_first = draw.layout == "bhsd"
        self.primals, self.tangents = (
            arrange(*(self.randn(*size) for size in sizes), draw.layout) for _ in range(2)
        )

    def run(self) -> Outputs:
        tensors = [x.transpose(1, 2) if self.heads_first else x for x in (*self.primals, *self.tangents)]
        layout = self.scale, self.problem.causal, False, self.heads_first, self.config
        return launch.forward_jvp(*tensors, *layout)

    def faults(self, outputs: Outputs) -> list[str]:
        out, lse, tout, tlse = outputs
        if self.heads_first:
            out, tout = out.transpose(1, 2), tout.transpose(1, 2)
        given = self.primals, self.tangents, self.scale, self.problem.causal
        result = check_jvp((out, lse, tout, tlse), *given)
        return [] if result.ok else [result.text]


class DecodeTrial(Trial):
    """A call of flash_attn_with_kvcache; rows of the cache that it must not read hold NaN."""

    def __init__(self, call_class: CallClass, draw: Draw, device: str):
        super().__init__(call_class, draw, device)
        self.latent = (self.problem.head_dim, self.problem.head_dim_v) == (576, 512)
        self.queries, self.batch = draw.lengths[0][0], draw.batch
        self.ends = [k for _, k in draw.lengths]
        self.before = [k - draw.new for k in self.ends]
        self.starts = list(draw.leftpad or [0] * self.batch)
        self.q = self.randn(self.batch, self.queries, draw.heads, self.head_dim)
        self.keywords: dict[str, Any] = {
            "causal": draw.causal,
            "window_size": draw.window,
            "softmax_scale": self.scale,
            "cache_seqlens": self.ints(self.before),
            "num_splits": draw.num_splits,
            "batch_invariant": draw.batch_invariant,
        }
        self._make_cache()
        if draw.new:
            new = self.batch, draw.new, draw.heads_kv
            self.keywords["k"] = self.randn(*new, self.head_dim)
            self.keywords["v"] = None if self.latent else self.randn(*new, self.head_dim_v)
        if draw.rotary:
            self._add_rotary()
        if draw.leftpad is not None:
            self.keywords["cache_leftpad"] = self.ints(draw.leftpad)
        self.of_reference: dict[str, Any] = {"window": draw.window}
        if self.problem.has("softcap"):
            self.keywords["softcap"] = self.of_reference["softcap"] = draw.softcap
        if self.problem.has("alibi"):
            shape = (self.batch, draw.heads) if draw.slopes_of_batch else (draw.heads,)
            slopes = 0.3 * torch.rand(shape, device=device, generator=self.generator)
            self.keywords["alibi_slopes"] = self.of_reference["alibi_slopes"] = slopes
        if self.problem.has("sink"):
            sink = torch.randn(draw.heads, device=device, generator=self.generator)
            self.keywords["learnable_sink"] = self.of_reference["sink"] = sink
        if self.problem.has("tree"):
            sizes = (self.batch, self.queries) if draw.tree == "each" else (self.queries,)
            # Any bits, those past the last query too
            words = torch.randint(-(2**63), 2**63 - 1, sizes, device=device, generator=self.generator)
            self.keywords["tree_mask"] = self.of_reference["tree_mask"] = words
        self.wanted_cache = self._cache_after()

    def _make_cache(self) -> None:
        draw, longest = self.draw, max(*self.ends, 1)
        shuffled = torch.Generator().manual_seed(draw.seed)
        if draw.page:
            rows, wide = draw.page, max(-(-longest // draw.page), 1)
            used = [-(-end // draw.page) for end in self.ends]
            caches = sum(used) + 3
            free = iter(torch.randperm(caches, generator=shuffled).tolist())
            table = [[next(free) if i < n else (-7, 2**30)[i % 2] for i in range(wide)] for n in used]
            self.rows_of = [
                [(pages[j // rows], j % rows) for j in range(end)]
                for pages, end in zip(table, self.ends, strict=True)
            ]
            self.keywords["block_table"] = self.ints(table)
        else:
            caches, rows = self.batch + 2 * draw.by_idx, longest + 7
            numbers = list(range(self.batch))
            if draw.by_idx:
                numbers = torch.randperm(caches, generator=shuffled).tolist()[: self.batch]
                self.keywords["cache_batch_idx"] = self.ints(numbers)
            self.rows_of = [
                [(number, j) for j in range(end)] for number, end in zip(numbers, self.ends, strict=True)
            ]
        self.capacity = rows if not draw.page else rows * wide
        self.k_cache, self.v_cache = (
            self._nan_cache(caches, rows, width) for width in (self.head_dim, self.head_dim_v)
        )
        if self.latent:
            self.v_cache = self.k_cache[..., : self.head_dim_v]
        self.old = self._places([*zip(self.starts, self.before, strict=True)])
        self.seen = self._places([*zip(self.starts, self.ends, strict=True)])
        self.added = self._places([*zip(self.before, self.ends, strict=True)])
        for x in (self.k_cache,) if self.latent else (self.k_cache, self.v_cache):
            x[self.old] = self.randn(len(self.old[0]), *x.shape[2:])

    def _nan_cache(self, caches: int, rows: int, width: int) -> torch.Tensor:
        heads_first = self.draw.layout == "bhsd"
        heads = self.draw.heads_kv
        sizes = (caches, heads, rows, width) if heads_first else (caches, rows, heads, width)
        x = torch.full(sizes, math.nan, dtype=self.dtype, device=self.device)
        return x.transpose(1, 2) if heads_first else x

    def _places(self, ranges: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices into the first two dimensions of a cache, of a range of keys per sequence."""
        found = [
            place
            for rows, (start, end) in zip(self.rows_of, ranges, strict=True)
            for place in rows[start:end]
        ]
        at = torch.tensor(found, dtype=torch.long).view(-1, 2).to(self.device)
        return at[:, 0], at[:, 1]

    def _add_rotary(self) -> None:
        half = min(self.draw.rotary, self.head_dim // 16 * 16) // 2
        positions = self.capacity + self.queries + self.draw.new
        angles = 6 * torch.rand(positions, half, generator=self.generator, device=self.device)
        self.angles = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        self.keywords |= dict(zip(("rotary_cos", "rotary_sin"), self.angles, strict=True))
        self.keywords["rotary_interleaved"] = self.draw.interleaved

    def _rotated(self, x: torch.Tensor, moves: bool) -> torch.Tensor:
        """Rows of x rotated by their positions behind the rows before the call."""
        if not self.draw.rotary:
            return x
        first = torch.tensor(self.before, device=self.device)[:, None]
        positions = first + torch.arange(x.shape[1], device=self.device) * moves
        return rotary_reference(x, positions, *self.angles, self.draw.interleaved)

    def _cache_after(self) -> list[torch.Tensor]:
        """Caches as the call must leave them."""
        caches = [self.k_cache.clone(), self.v_cache.clone()]
        k, v = self.keywords.get("k"), self.keywords.get("v")
        if k is not None:
            caches[0][self.added] = self._rotated(k, True).flatten(0, 1)
            caches[1][self.added] = k[..., : self.head_dim_v].flatten(0, 1) if v is None else v.flatten(0, 1)
        return caches

    def run(self) -> Outputs:
        with forced_decode(self.config):
            return flash_attn_with_kvcache(
                self.q, self.k_cache, self.v_cache, **self.keywords, return_softmax_lse=True
            )

    def faults(self, outputs: Outputs) -> list[str]:
        out, lse = outputs
        caches = (self.k_cache, self.v_cache)
        found = [
            f"{name}_cache: a new row is wrong, or another row changed"
            for name, x, wanted in zip("kv", caches, self.wanted_cache, strict=True)
            if not bool((bits(x) == bits(wanted)).all())
        ]
        moves = self.draw.causal or self.draw.window != (-1, -1)
        q = self._rotated(self.q, moves)
        k, v = (x[self.seen] for x in self.wanted_cache)
        keys = [end - start for start, end in zip(self.starts, self.ends, strict=True)]
        lengths = {
            "cu_seqlens_q": torch.arange(self.batch + 1) * self.queries,
            "cu_seqlens_k": torch.tensor([0, *itertools.accumulate(keys)]),
        }
        flat = out.flatten(0, 1), lse.transpose(0, 1).flatten(1), q.flatten(0, 1), k, v
        arguments = *flat, self.scale, self.draw.causal
        return found + forward_faults(*arguments, **lengths, **self.of_reference)


def third(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + k + h) % 3 != 0


def noop(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= 0


def of_batch(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + b * 5) % 4 != k % 4


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


@functools.lru_cache(maxsize=256)
def _band(left: int, right: int) -> Callable:
    def band(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k <= left) & (k - q <= right)

    return band


@functools.lru_cache(maxsize=256)
def _traced(mask_mod: Callable) -> Call:
    return trace(None, mask_mod, False)


class BlockMaskTrial(Trial):
    """A forward or a backward with a block mask whose partial blocks are bits."""

    def __init__(self, call_class: CallClass, draw: Draw, device: str):
        super().__init__(call_class, draw, device)
        self.backward = call_class.kind.startswith("bwd")
        ((rows, keys),) = draw.lengths
        self.lengths, self.batch, self.heads = (rows, keys), draw.batch, draw.heads
        sizes = (self.heads, rows, self.head_dim), (self.heads, rows, self.head_dim_v)
        self.q, self.dout = (self.randn(self.batch, *size) for size in sizes)
        self.k, self.v = (
            self.randn(self.batch, draw.heads_kv, keys, width) for width in (self.head_dim, self.head_dim_v)
        )
        mask, self.shown = self._band() if self.problem.is_band else self._random_lists()
        self.mask = mask  # its lists live as long as it does
        self.traced = listed(_traced(mask.mask_mod), kept_mask(mask), self.q, self.heads)
        if self.backward:
            out, lse = self._formula(torch.float32)[:2]
            self.out, self.lse = out.to(self.dtype), lse
            self.dlse = None
            if draw.with_dlse:
                self.dlse = torch.randn(lse.shape, device=device, generator=self.generator)

    def _indices(self) -> list[torch.Tensor]:
        """Indices of batch entry, head, query and key, to be broadcast."""
        sizes = self.batch, self.heads, *self.lengths
        return [
            torch.arange(n, device=self.device).view([-1 if i == dim else 1 for i in range(4)])
            for dim, n in enumerate(sizes)
        ]

    def _band(self) -> tuple[BlockMask, torch.Tensor]:
        mask_mod = _band(self.draw.seed % 300, self.draw.seed % 77)
        mask = create_block_mask(mask_mod, None, None, *self.lengths, device=self.device)
        shown = mask_mod(*self._indices())
        return mask, shown.expand(self.batch, self.heads, *self.lengths)

    def _random_lists(self) -> tuple[BlockMask, torch.Tensor]:
        """A block mask of random partial and whole blocks, and the elements that it shows."""
        draw, size = self.draw, self.draw.size
        blocks = [-(-n // size) for n in self.lengths]
        outer = (self.batch, self.heads) if draw.seed % 2 else (1, 1)
        chosen = torch.rand(*outer, *blocks, device=self.device, generator=self.generator)
        partial, full = chosen < draw.share / 2, (chosen >= draw.share / 2) & (chosen < draw.share)
        lists = []
        for wanted in (partial, full):
            lists += [wanted.sum(-1).int(), (~wanted).int().argsort(dim=-1, stable=True).int()]
        mask_mod = (third, noop, of_batch, causal)[draw.seed % 4]
        mask = BlockMask.from_kv_blocks(
            *lists, BLOCK_SIZE=(size, size), mask_mod=mask_mod, seq_lengths=self.lengths
        )
        for dim, length in zip((-2, -1), self.lengths, strict=True):
            partial, full = (x.repeat_interleave(size, dim).narrow(dim, 0, length) for x in (partial, full))
        shown = full | partial & mask_mod(*self._indices())
        return mask, shown.expand(self.batch, self.heads, *self.lengths)

    def run(self) -> Outputs:
        tensors, layout = (self.q, self.k, self.v), (self.scale, False, False, True)
        given = {"config": self.config, "traced": self.traced}
        if not self.backward:
            return launch.forward(*tensors, *layout, **given)
        inputs, deterministic = (self.dout, *tensors, self.out, self.lse), self.call_class.kind == "bwd_det"
        return tuple(launch.backward(*inputs, *layout, deterministic, self.dlse, **given).values())[:3]

    def repeats(self, outputs: Outputs) -> Sequence[torch.Tensor]:
        return outputs if not self.backward or self.config.deterministic else outputs[1:]

    def _formula(self, dtype: torch.dtype) -> Outputs:
        """out, lse, and for a backward dq, dk and dv, with products and P in a dtype."""
        group, heads_kv = self.draw.group, self.draw.heads_kv
        q, k, v, dout = (x.to(dtype) for x in (self.q, self.k, self.v, self.dout))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        with true_fp32(q.device):
            scores = ((q * self.scale) @ k.mT).masked_fill(~self.shown, -math.inf)
            lse = scores.float().logsumexp(-1)
            weights = scores.softmax(-1).masked_fill((lse == -math.inf)[..., None], 0)
            out = weights @ v
            if not self.backward or not hasattr(self, "dlse"):
                return out, lse
            delta = (dout * out).sum(-1, keepdim=True)
            if self.dlse is not None:
                delta = delta - self.dlse[..., None].to(dtype)
            ds = weights * (dout @ v.mT - delta)
            dq, dk, dv = ds @ k * self.scale, ds.mT @ q * self.scale, weights.mT @ dout
        # As PyTorch sums the heads that share a key head: in fp32
        dk, dv = (
            x.float().view(self.batch, heads_kv, group, *x.shape[2:]).sum(2).to(dtype) for x in (dk, dv)
        )
        return out, lse, dq, dk, dv

    def faults(self, outputs: Outputs) -> list[str]:
        exact, plain = self._formula(torch.float32), self._formula(self.dtype)
        compared = []
        if self.backward:
            bound = numeric._peak(self.dout.float().norm(dim=-1)) * numeric._peak(self.v.float().norm(dim=-1))
            cancellation = numeric.CANCELLATION_RTOL * abs(self.scale) * bound
            factors = numeric._peak(self.k), numeric._peak(self.q), 0.0
            for name, x, wanted, other, factor in zip(
                ("dq", "dk", "dv"), outputs, exact[2:], plain[2:], factors, strict=True
            ):
                allowed = numeric._allowed_error(3, wanted, other) + cancellation * factor
                compared.append(numeric._compare(name, x, wanted, allowed))
            unseen = ~self.shown.any(-1, keepdim=True)
            dq = outputs[0].where(unseen, 0)
            compared.append(numeric._compare("dq of queries without keys", dq, torch.zeros_like(dq), 0.0))
        else:
            out, lse = outputs
            compared.append(
                numeric._compare("out", out, exact[0], numeric._allowed_error(2, exact[0], plain[0]))
            )
            of_lse = numeric.LSE_RTOL * max(1.0, numeric._peak(exact[1]))
            compared.append(numeric._compare("lse", lse, exact[1], of_lse))
        return [text for ratio, text in compared if ratio > 1]
