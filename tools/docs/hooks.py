"""What the site does to the pages of docs/: README.md becomes the first one, and links out of docs/ become text."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS, README = ROOT / "docs", ROOT / "README.md"
LINK = re.compile(r"(?<!!)\[(!\[[^]]*\]\([^)]*\)|[^]]+)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md as ``index.md``."""
    files.append(File.generated(config, "index.md", content=README.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Make links relative to the page, and those to files outside of docs/ plain text."""
    source = README if page.file.src_uri == "index.md" else DOCS / page.file.src_uri

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target:
            return match[0]
        file = (source.parent / target).resolve()
        file = DOCS / "index.md" if file == README else file
        if not file.is_relative_to(DOCS):
            return text
        return f"[{text}]({os.path.relpath(file, (DOCS / page.file.src_uri).parent)}{anchor})"

    return LINK.sub(link, markdown)


def on_page_content(html: str, **_: object) -> str:
    """Show names that docstrings mark as Sphinx does (``:class:`X```) as code."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):<code>~?", "<code>", html)
