"""Hooks of mkdocs: pages of files outside docs/, and links to them.

Links of the pages name files of the repository, as code hosts show them, and so do pictures. On the site a link to a file that is no
page is its text.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
LINK = re.compile(r"!?\[([^\]]*)\]\(((?!https?:|mailto:|#)[^)#\s]+)(#[^)\s]*)?\)")


def pages() -> dict[str, str]:
    """Page or picture of the site -> file of the repository, of those outside docs/."""
    results = sorted(path for path in (ROOT / RESULTS).rglob("*") if path.suffix in (".md", ".svg"))
    named = {f"results/{path.relative_to(ROOT / RESULTS)}": str(path.relative_to(ROOT)) for path in results}
    return {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", **named}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/."""
    for page, file in pages().items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Point links at pages of the site."""
    here = page.file.src_uri
    file_of = pages()
    page_of = {file: name for name, file in file_of.items()}
    folder = os.path.dirname(file_of.get(here, f"docs/{here}"))

    def linked(match: re.Match[str]) -> str:
        text, target, anchor = match[1], os.path.normpath(os.path.join(folder, match[2])), match[3] or ""
        is_picture = match[0].startswith("!")
        name = page_of.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        if name is None or files.get_file_from_path(name) is None:
            return match[0] if is_picture else text
        return f"{'!' * is_picture}[{text}]({os.path.relpath(name, os.path.dirname(here) or '.')}{anchor})"

    return LINK.sub(linked, markdown)
