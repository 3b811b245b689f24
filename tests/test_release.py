"""What a release says of itself: one version in all files; the script that makes its files."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def load_script():
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_release_notes_are_the_section_of_the_version():
    changelog = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- old\n\n## [0.1.0]\n"
    notes = load_script().notes
    assert notes(changelog, "0.2.0") == "### Added\n\n- old\n"
    assert notes(changelog, "0.3.0") == "- new\n"
    assert notes((ROOT / "CHANGELOG.md").read_text(), __version__).startswith("### Added\n")


def test_release_refuses_a_folder_with_other_files(tmp_path, capsys):
    release = load_script()
    names = (
        "tl_attention-{}.tar.gz",
        "tl_attention-{}-py3-none-any.whl",
        "tl_attention_kernels_d64-{}-py3-none-x.whl",
    )
    assert all(release.belongs(name.format(__version__)) for name in names)
    (tmp_path / names[0].format("9.9.9")).touch()
    with pytest.raises(SystemExit):
        release.main(["--out", str(tmp_path)])
    assert "got ['tl_attention-9.9.9.tar.gz']" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["compile", "--help"], ["--version"]], ids=" ".join)
def test_console_script_helps_without_torch(arguments):
    code = f"""
import sys, tl_attention_cli
sys.argv = ["tl-attention", *{arguments}]
try:
    tl_attention_cli.main()
finally:
    assert not hasattr(sys.modules["torch"], "nn"), "torch was imported"
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "tl-attention" in done.stdout
