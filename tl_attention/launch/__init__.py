"""Launches of compiled kernels, on tensors that have passed checks/, on a Hopper GPU."""

from tl_attention.launch.bwd import backward, bwd_plan
from tl_attention.launch.bwd_passes import bwd_workspace_bytes
from tl_attention.launch.decode import append_to_cache, attend_cache, decode_plan, decode_workspace_bytes
from tl_attention.launch.fwd import forward, fwd_plan, keep_call, kept_call
from tl_attention.launch.fwd_jvp import forward_jvp
from tl_attention.launch.splits import fwd_bucket
from tl_attention.launch.terms import terms_workspace_bytes

__all__ = [
    "append_to_cache",
    "attend_cache",
    "backward",
    "bwd_plan",
    "bwd_workspace_bytes",
    "decode_plan",
    "decode_workspace_bytes",
    "forward",
    "forward_jvp",
    "fwd_bucket",
    "fwd_plan",
    "keep_call",
    "kept_call",
    "terms_workspace_bytes",
]
