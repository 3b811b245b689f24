"""What the register() of torch_backend that has PyTorch's ops asks of each call that reaches them."""

from __future__ import annotations

from dataclasses import dataclass

from tl_attention.problem.options import BATCH_INVARIANT, DEFAULT_SPLITS


@dataclass
class Modes:
    """Settings of the process.

    Args:
        batch_invariant: as in flash_attn_func.
    """

    batch_invariant: bool = False

    @property
    def num_splits(self) -> int:
        """num_splits of Options."""
        return BATCH_INVARIANT if self.batch_invariant else DEFAULT_SPLITS


MODES = Modes()
