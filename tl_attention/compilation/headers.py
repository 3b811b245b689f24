"""Headers of tensor instructions for nvcc, with those alone that a kernel's CUDA source calls.

CUTLASS declares a struct per shape, dtypes and operands of wgmma: nearly half of the preprocessed text of a kernel.
"""

from __future__ import annotations

import re
from pathlib import Path

CALL = r"\bwgmma_[rs]s<(?:[^,<>]*,){4} *(\d+)\b"  # a call in TileLang's source: three dtypes, M, N
STRUCTS = ("cute/arch/mma_sm90_gmma.hpp", "cute/arch/mma_sm90_gmma_ext.hpp")  # of CUTLASS
STRUCT = r"^(?:template <\n(?:  .*\n)*>\n)?struct MMA_64x(\d+)x\w+\n\{\n(?:(?!\};).*\n)*\};\n"
CALLS = "tl_templates/cuda/instruction/wgmma.h"  # of TileLang: functions that call them, in lists of N
LISTED = r"^  OP\((\d+)\)"  # an N of such a list


def write_narrowed(source: str, folder: Path) -> bool:
    """Write the headers of wgmma with the N that a source calls. It compiles to the code that all headers give, or is rejected.

    Args:
        folder: nvcc is to search it for headers first. The files have the paths of TileLang 0.1.15 and its CUTLASS.
    Returns:
        False if the source calls no wgmma by name; then nothing is written.
    """
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    widths = set(re.findall(CALL, source))
    if not widths:
        return False

    def kept(found: re.Match) -> str:
        return found[0] if found[1] in widths else ""

    calls = (
        Path(TILELANG_TEMPLATE_PATH, CALLS)
        .read_text()
        .replace('"../common.h"', "<tl_templates/cuda/common.h>")
    )
    texts = {CALLS: re.sub(LISTED, kept, calls, flags=re.MULTILINE)}
    for name in STRUCTS:
        texts[name] = re.sub(STRUCT, kept, Path(CUTLASS_INCLUDE_DIR, name).read_text(), flags=re.MULTILINE)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return True
