"""Entry of `python -m tests.invariance`, of workers and of the builder."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the package is `invariance`, as for pytest
    from invariance.command import main

    sys.exit(main(sys.argv[1:]))
