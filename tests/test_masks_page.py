"""docs/masks.md and examples/masks.py."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tl_attention import mask_picture


def load_script():
    """scripts/masks.py; its folder has a module `site`, so it is no path to import from."""
    path = Path(__file__).parents[1] / "scripts/masks.py"
    spec = importlib.util.spec_from_file_location("masks_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


masks = load_script()
GALLERY = masks.load()
FUNCTIONS = [function for functions in GALLERY.GALLERY.values() for function in functions]


def test_masks_page_is_that_of_the_examples() -> None:
    page, pictures = masks.generate()
    assert masks.PAGE.read_text() == page, "run python scripts/masks.py"
    assert {path.name: path.read_text() for path in masks.PICTURES.iterdir()} == pictures


def test_masks_page_has_two_lines_of_text_per_mask() -> None:
    for function in FUNCTIONS:
        assert len(function.__doc__.splitlines()) == 2, function.__name__
        compile(masks.code_of(function), function.__name__, "exec")


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_masks_of_the_gallery_have_the_blocks_of_their_functions(function) -> None:
    n = GALLERY.TOKENS
    mask, head = function(n), GALLERY.HEADS.get(function, 0)
    position = torch.arange(n)
    seen = mask.mask_mod(torch.tensor(0), torch.tensor(head), position[:, None], position)
    counts = seen.expand(n, n).view(n // 128, 128, n // 128, 128).sum((1, 3), dtype=torch.int32)
    expected = (counts > 0).int() + (counts == 128 * 128).int()
    assert mask_picture.block_states(mask, head=head).int().equal(expected)


def test_masks_example_prints_pictures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["masks.py", "chunks", "local_and_strided"])
    runpy.run_path(str(masks.SOURCE), run_name="__main__")
    text = capsys.readouterr().out
    assert text.startswith("chunks: 4096 queries x 4096 keys") and "\nlocal_and_strided: " in text
    monkeypatch.setattr(sys, "argv", ["masks.py", "circle"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(masks.SOURCE), run_name="__main__")
    assert "got circle" in capsys.readouterr().err
