"""Console script `tl-attention`: help and version are printed without importing torch, which takes seconds."""

from __future__ import annotations

import importlib.util
import sys


def main() -> int:
    """The command. Returns its exit status."""
    arguments = sys.argv[1:]
    asks = not arguments or not {"-h", "--help", "--version"}.isdisjoint(arguments)
    if asks and arguments[:1] != ["bench"] and "--" not in arguments:
        _enter_without_torch()
    from tl_attention.tools import cli

    return cli.main(arguments)


def _enter_without_torch() -> None:
    """Enter the package without its __init__, with a stand-in for torch: parsers of arguments use neither."""
    spec = importlib.util.find_spec("tl_attention")
    sys.modules["tl_attention"] = importlib.util.module_from_spec(spec)
    from tl_attention.compilation.torchless import replace_unneeded

    replace_unneeded()
