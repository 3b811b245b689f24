"""Sizes of the rounding of dq beside a backward pass, see kernels/backward/dq_sinks/round.py."""

from __future__ import annotations

ROUNDED_ROWS = 32  # rows of dq that a warp rounds at a time
ROUNDING_WARPS = 2  # per CTA
ROUND_STAGES = 4  # stages of sums that such a warp loads ahead
ROUND_STAGE_BYTES = 2048  # of fp32 sums: 16 rows of 32 columns
ROUNDING_BYTES = ROUNDING_WARPS * ROUND_STAGES * ROUND_STAGE_BYTES  # shared memory per CTA

# Packed sequences, in waves of a key tile per SM; docs/notes/2026-11-25-rounded-dq.md has other values
SIDE_WAVES = 1  # heads of a sequence whose tiles go side by side
LAST_WAVES = 2  # a sequence with fewer tiles behind it is one of the last, whose heads go side by side
