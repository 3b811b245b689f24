"""Register usage levels of ptxas, by kernel."""

from __future__ import annotations

from tl_attention.config.kernel_configs import BwdPass, DecodeConfig, FwdConfig, KernelConfig
from tl_attention.problem.attn_problem import AttnProblem

# ptxas register usage level, 0 to 10 (higher: more registers for speed); 5 is its own default
REGISTER_LEVEL = 5


def register_level(problem: AttnProblem, config: KernelConfig) -> int:
    """The ptxas register usage level of a kernel."""
    # Forward of d256 in three terms: at 5 it spills 108 bytes, at 0 none (nvcc 13.0.88)
    if isinstance(config, FwdConfig) and problem.terms == 3 and problem.width == "d256":
        return 0
    # dq+dk+dv in two terms: at 5 it spills 4 to 176 bytes, at 0 none (nvcc 13.0.88)
    if isinstance(config, BwdPass) and config.adds_dq and problem.terms == 2:
        return 0
    # dk+dv of d128 in two terms: at 5 it spills 20 to 44 bytes with packed sequences or ALiBi, at 0 none (nvcc 13.0.88)
    if isinstance(config, BwdPass) and config.grads == "dk+dv" and problem.terms == 2:
        return 0 if problem.width == "d128" and problem.options else REGISTER_LEVEL
    # One tile of 192 keys in fp16: at 5 it spills 8 bytes, at 0 none (nvcc 13.0.88)
    if isinstance(config, BwdPass) and config.one_tile and config.warpgroups == 3:
        return 0 if problem.dtype == "float16" else REGISTER_LEVEL
    # Packed backward of d128 in one pass: at 5 it spills 4-64 bytes with options, at 0 none. B4 16 heads 4k causal: 1.41 ms,
    # and 1.66 ms in two passes (H200, 2026-11-22)
    if isinstance(config, BwdPass) and config.adds_dq and problem.width == "d128" and problem.has("varlen"):
        return 0
    # Packed dq of d256 with all options: at 5 it spills 16 bytes, at 0 none, with as many instructions per step (nvcc 13.0.88)
    if isinstance(config, BwdPass) and config.grads == "dq" and problem.width == "d256":
        every = {"softcap", "alibi", "dropout", "varlen"} <= {*problem.options}
        return 0 if every else REGISTER_LEVEL
    # Decode of d128 with two warpgroups and all options: at 5 it spills 12 bytes, at 6 none, with as many instructions per step
    # (nvcc 13.0.88)
    if isinstance(config, DecodeConfig) and config.warpgroups == 2 and not config.page_rows:
        every = {"softcap", "alibi", "sink"} <= {*problem.options}
        return 6 if every and problem.width == "d128" else REGISTER_LEVEL
    return REGISTER_LEVEL
