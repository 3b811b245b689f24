"""Stand-ins for torch and parts of TVM in interpreters that only compile.

TileLang imports torch for types in its signatures and for names of dtypes. Importing torch takes longer than importing TileLang, and
compiling a kernel needs nothing of it: neither tensors nor devices. Nor does it need TVM's graphs and search for schedules, which are a
quarter of an import of TileLang.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

PACKAGE = Path(__file__).parents[1]
# Begin of an interpreter's program: it enters this package without its __init__, which imports torch
PROGRAM = f"""
import types
package = sys.modules[{PACKAGE.name!r}] = types.ModuleType({PACKAGE.name!r})
package.__path__ = [{str(PACKAGE)!r}]
from {__name__} import replace_unneeded
replace_unneeded()
"""
PARTS_OF_TVM = ("tvm.relax", "tvm.s_tir.meta_schedule", "tvm.s_tir.dlight")
DTYPES = "bool short int long half float double int8 int16 int32 int64 uint8 float16 float32 float64 bfloat16"


class DType:
    """Type of the stand-in's dtypes: keys of TileLang's tables, as torch's are."""


class Unavailable:
    """A class that signatures name. None of it is ever made."""


def replace_unneeded() -> None:
    """Make imports in this interpreter give the stand-ins, unless torch or TVM is there already.

    They have what TileLang 0.1.15 asks for. The rest is missing, so a use of it raises an ImportError or AttributeError.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = _torch()
    if "tvm" not in sys.modules:
        sys.modules.update((name, ModuleType(name)) for name in PARTS_OF_TVM)
        sys.modules["tvm.relax"].TensorType = Unavailable


def _torch() -> ModuleType:
    torch = ModuleType("torch", __doc__)
    torch.dtype, torch.Tensor, torch.device = DType, Unavailable, Unavailable
    for name in DTYPES.split():
        setattr(torch, name, DType())
    absent = SimpleNamespace(is_available=lambda: False)
    torch.cuda = absent
    torch.backends = SimpleNamespace(mps=absent)
    torch.version = SimpleNamespace(hip=None, cuda=None)
    return torch
