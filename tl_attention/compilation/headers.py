"""Headers for nvcc with less text, as reading headers is half of its time.

CUTLASS declares a struct per shape, dtypes and operands of wgmma: those of the N and K that a kernel calls are enough. Waiting for an
atomic includes clocks. Other headers serve host code, or functions that a kernel does not call.
"""

from __future__ import annotations

import re
from pathlib import Path

CALL = r"\bwgmma_[rs]s<(?:[^,<>]*,){4} *(\d+), *(\d+)\b"  # a call in TileLang's source: three dtypes, M, N, K
STRUCTS = ("cute/arch/mma_sm90_gmma.hpp", "cute/arch/mma_sm90_gmma_ext.hpp")  # of CUTLASS
STRUCT = r"^(?:template <\n(?:  .*\n)*>\n)?struct MMA_64x(\d+)x(\d+)_\w+\n\{\n(?:(?!\};).*\n)*\};\n"
CALLS = "tl_templates/cuda/instruction/wgmma.h"  # of TileLang: functions that call them, in lists of N
LISTED = r"^  OP\((\d+)\)"  # an N of such a list
DEFINED = r"^(#define TL_WGMMA_DEFINE_\w+\(N\)) *\\\n(?:.*\\\n)*.*\bMMA_64x##N##x(\d+)_\w+\)$"  # what OP is: a function of one K
# Headers that the templates of TileLang and CUTLASS include for host code alone, and mathematics that no kernel calls
HOST = (
    "iostream",
    "iomanip",
    "mutex",
    "vector",
    "algorithm",
    "functional",
    "stdexcept",
    "string",
    "bits/specfun.h",
)
# Headers of TileLang -> calls of their functions
CALLED = {
    "tl_templates/cuda/atomic.h": "Atomic",
    "tl_templates/cuda/scan.h": "Cum|Scan",
    "tl_templates/cuda/debug.h": "debug_print|device_assert",
}
# Threads in CUDA's standard library, which includes clocks. Waiting for an atomic needs them, and no kernel calls it
THREADS = "cuda/std/__thread/threading_support.h"
THREADS_TEXT = """#include <cuda/std/detail/__config>
#define _LIBCUDACXX_POLLING_COUNT 16
_LIBCUDACXX_BEGIN_NAMESPACE_STD
_CCCL_HOST_DEVICE void __cccl_thread_yield();
_CCCL_HOST_DEVICE void __cccl_thread_yield_processor();
template <class _Fn> _CCCL_HOST_DEVICE bool __cccl_thread_poll_with_backoff(_Fn&&);
_LIBCUDACXX_END_NAMESPACE_STD
"""


def write_narrowed(source: str, folder: Path) -> bool:
    """Write headers with what a source calls. It compiles to the code that all headers give, or is rejected.

    Args:
        folder: nvcc is to search it for headers first. The files have the paths of TileLang 0.1.15 and its CUTLASS.
    Returns:
        False if the source calls no wgmma by name; then nothing is written.
    """
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    shapes = set(re.findall(CALL, source))
    if not shapes:
        return False
    widths, depths = (set(sizes) for sizes in zip(*shapes, strict=True))

    def struct(found: re.Match) -> str:
        return found[0] if found[1] in widths and found[2] in depths else ""

    def listed(found: re.Match) -> str:
        return found[0] if found[1] in widths else ""

    def defined(found: re.Match) -> str:
        return found[0] if found[2] in depths else found[1]

    calls = (
        Path(TILELANG_TEMPLATE_PATH, CALLS)
        .read_text(encoding="utf-8")
        .replace('"../common.h"', "<tl_templates/cuda/common.h>")
    )
    calls = re.sub(DEFINED, defined, calls, flags=re.MULTILINE)
    texts = {CALLS: re.sub(LISTED, listed, calls, flags=re.MULTILINE)}
    for name in STRUCTS:
        texts[name] = re.sub(
            STRUCT, struct, Path(CUTLASS_INCLUDE_DIR, name).read_text(encoding="utf-8"), flags=re.MULTILINE
        )
    texts |= dict.fromkeys(HOST, "") | {THREADS: THREADS_TEXT}
    texts |= {name: "" for name, call in CALLED.items() if not re.search(call, source)}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return True
