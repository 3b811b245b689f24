"""Classes of the matrix: call kinds that together launch every kernel of the manifest, or of the pack."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tl_attention.compilation import manifest
from tl_attention.config import catalog
from tl_attention.config.kernel_configs import Config, DecodeConfig, JvpConfig, KernelConfig
from tl_attention.problem.attn_problem import DTYPES, AttnProblem


@dataclass(frozen=True)
class CallClass:
    """A kind of call with a forced config.

    Args:
        call: draws of a decode have as many rows as its config takes; one of batch_invariant follows from the call.
    """

    call: catalog.CallKind

    @property
    def kind(self) -> str:
        return self.call.kind

    @property
    def problem(self) -> AttnProblem:
        return self.call.problem

    @property
    def config(self) -> Config | DecodeConfig | JvpConfig:
        return self.call.config

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
        return {manifest.kernel_name(*kernel): kernel for kernel in self.call.kernels}

    def matches(self, words: Iterable[str]) -> bool:
        """True if its name, or that of one of its kernels, has all these words."""
        words = list(words)
        return any(all(word in name for word in words) for name in (self.name, *self.kernels))


def shipped_classes() -> list[CallClass]:
    """Classes that launch every kernel of the manifest."""
    return _once(catalog.shipped_calls())


def pack_classes() -> list[CallClass]:
    """Classes that launch every kernel of a whole pack, those of shipped_classes() among them."""
    found = [*shipped_classes(), *_once(catalog.pack_calls())]
    return list({one.name: one for one in found}.values())


def _once(calls: Iterable[catalog.CallKind]) -> list[CallClass]:
    """Each class once. A config that serves bwd and bwd_det is of bwd_det, whose calls promise more."""
    calls = dict.fromkeys(calls)
    ordered = {call for call in calls if call.kind == "bwd" and replace(call, kind="bwd_det") in calls}
    return [CallClass(call) for call in calls if call not in ordered]
