"""What the register() of torch_backend that has PyTorch's ops asks of each call that reaches them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tl_attention.problem.options import ALWAYS_INVARIANT, BATCH_INVARIANT


@dataclass
class Modes:
    """Settings of the process.

    Args:
        batch_invariant: as in flash_attn_func. TL_ATTENTION_BATCH_INVARIANT=1 asks for it, too.
    """

    batch_invariant: bool = False

    @property
    def is_invariant(self) -> bool:
        """True if the bits of a query may not depend on the batch."""
        return self.batch_invariant or ALWAYS_INVARIANT

    @property
    def origin(self) -> str:
        """What asks for it, for an error."""
        return (
            "after torch_backend.register(batch_invariant=True)"
            if self.batch_invariant
            else "with TL_ATTENTION_BATCH_INVARIANT=1"
        )

    @property
    def num_splits(self) -> int:
        """num_splits of Options."""
        return BATCH_INVARIANT if self.is_invariant else 0

    def check(self, **arguments: Any) -> None:
        """Refuse arguments of a call that are not their defaults, None or 0, as batch_invariant cannot be had with them.

        TL_ATTENTION_BATCH_INVARIANT=1 alone leaves this to the checks of all calls, which name the variable.
        """
        for name, value in arguments.items():
            if self.batch_invariant and value:
                raise ValueError(
                    f"{name}: expected none after torch_backend.register(batch_invariant=True), got {value}; leave it out, or remove that"
                    " registration for the call"
                )


MODES = Modes()
