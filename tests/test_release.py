"""What a release says of itself: one version in all files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tl_attention.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def test_release_has_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["kernels"] == [f"tl-attention-kernels=={__version__}"]
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", __version__), "an index takes no local part"
