"""`tl-attention cache`: what is on disk, and its removal beside builds of other processes."""

from __future__ import annotations

import json
import os

import pytest

from tl_attention.compilation import locks, texts
from tl_attention.config import configs
from tl_attention.tools import cache, cli

STEMS = [f"fwd-{n:024x}" for n in range(3)]


@pytest.fixture
def folder():
    """A cache of three kernels of 1100 bytes, used one after the other, with a note per text and a tuned table."""
    path = configs.cache_dir()
    (path / "tuned").mkdir(parents=True)
    (path / "tuned" / "gpu.json").write_text("{}")
    (path / texts.FOLDER).mkdir()
    for day, stem in enumerate(STEMS):
        for suffix, count in ((".so", 1000), (".cu", 100)):
            (path / f"{stem}{suffix}").write_bytes(b"0" * count)
            os.utime(path / f"{stem}{suffix}", (86400.0 * day, 86400.0 * day))
        (path / texts.FOLDER / stem).write_text(f"{stem}.so")
    return path


def run(capsys, *words):
    assert cli.main(["cache", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def kernels(folder):
    return sorted(path.stem for path in folder.glob("*.so"))


def test_cache_shows_what_is_there(folder, capsys):
    found = run(capsys)
    assert (found["kernels"], found["bytes"], found["removed"]) == (3, 3300, 0)
    assert found["tuned_tables"] == [str(folder / "tuned" / "gpu.json")]
    assert cli.main(["cache"]) == 0
    assert "kernels  3, 0.0 MB, used from 1970-01-01 to 1970-01-03" in capsys.readouterr().out


def test_cache_limit_removes_those_used_longest_ago(folder, capsys):
    assert run(capsys, "--limit", "2.5K")["removed"] == 1
    assert kernels(folder) == STEMS[1:]
    assert sorted(path.name for path in (folder / texts.FOLDER).iterdir()) == STEMS[1:]
    assert run(capsys, "--limit", "1GB")["removed"] == 0


def test_cache_limit_counts_a_file_of_two_kernels_once(folder, capsys):
    (folder / f"{STEMS[1]}.so").unlink()
    os.link(folder / f"{STEMS[0]}.so", folder / f"{STEMS[1]}.so")
    assert run(capsys)["bytes"] == 2300
    found = run(capsys, "--limit", "2.2K")  # the first frees its source alone
    assert (found["removed"], found["removed_bytes"], found["bytes"]) == (1, 100, 2200)


def test_cache_clear_leaves_kernels_that_are_being_built_and_tuned_tables(folder, capsys):
    lock = locks.try_lock(folder / f"{STEMS[0]}.so")
    (folder / f"{STEMS[0]}-tmp").mkdir()  # of the build
    found = run(capsys, "--clear")
    assert (found["removed"], kernels(folder)) == (2, STEMS[:1])
    assert (folder / f"{STEMS[0]}-tmp").exists() and (folder / "tuned" / "gpu.json").exists()
    lock.release()
    run(capsys, "--clear")
    assert sorted(path.name for path in folder.iterdir()) == sorted(["tuned", texts.FOLDER])


def test_cache_clear_of_a_folder_that_is_not_there(capsys):
    assert run(capsys, "--clear")["kernels"] == 0


@pytest.mark.parametrize("word, expected", [("500M", 500 * 10**6), ("2gb", 2 * 10**9), ("1.5k", 1500)])
def test_cache_size(word, expected):
    assert cache.size(word) == expected


@pytest.mark.parametrize("word", ["much", "2"])
def test_cache_refuses_other_sizes(word, capsys):
    with pytest.raises(SystemExit):
        cli.main(["cache", "--limit", word])
    assert f"expected a size with a unit, such as 500M or 2GB, got '{word}'" in capsys.readouterr().err
