"""Libraries by the text of their kernels: one is compiled once, whatever happens to the sources that leaves its text as it is."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from tl_attention.compilation import texts, toolkit

OPTIONS = {"tl.enable_fast_math": True}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library and its source, kept under the key `text`."""
    path = tmp_path / "sum-1.so"
    path.write_text("code")
    path.with_suffix(".cu").write_text("source")
    texts.keep("text", path)
    return path


def test_a_library_is_found_by_its_text_alone(library):
    other = library.with_name("sum-2.so")
    assert not texts.reuse("another text", other) and not other.exists()
    assert texts.reuse("text", other)
    assert (other.read_text(), other.with_suffix(".cu").read_text()) == ("code", "source")
    assert texts.reuse("text", library), "its own name"
    assert sorted(path.name for path in library.parent.iterdir() if path.is_file()) == [
        *("sum-1.cu", "sum-1.so", "sum-2.cu", "sum-2.so")
    ]


@pytest.mark.parametrize("suffix", [".so", ".cu"])
def test_a_library_that_is_gone_is_not_found(library, suffix):
    library.with_suffix(suffix).unlink()
    other = library.with_name("sum-2.so")
    assert not texts.reuse("text", other) and not other.exists()


def test_a_library_is_copied_where_there_are_no_links(library, monkeypatch):
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", link)
    other = library.with_name("sum-2.so")
    assert texts.reuse("text", other)
    assert other.read_text() == "code" and other.stat().st_ino != library.stat().st_ino


def test_key_has_text_options_and_compilers(monkeypatch):
    key = texts.key("text", OPTIONS)
    assert key == texts.key("text", dict(OPTIONS))
    assert key != texts.key("other", OPTIONS) and key != texts.key("text", {})
    installed = texts.importlib.metadata.version
    other = {"apache-tvm-ffi": "0.0"}
    with monkeypatch.context() as patch:
        patch.setattr(texts.importlib.metadata, "version", lambda name: other.get(name) or installed(name))
        assert texts.key("text", OPTIONS) != key
    with monkeypatch.context() as patch:
        version = subprocess.CompletedProcess([], 0, "nvcc 99")
        patch.setattr(texts.subprocess, "run", lambda *_, **__: version)
        assert texts.key("text", OPTIONS) != key
    monkeypatch.setattr(toolkit, "find_nvcc", lambda: None)
    with pytest.raises(FileNotFoundError, match="nvcc"):
        texts.key("text", OPTIONS)
