"""What the site does to the pages of docs/: README.md becomes the first one, and links out of docs/ become text.

MkDocs checks links between pages of the site. Those to other files, and those of Markdown files beside docs/, are
checked here; `--strict` makes an error of each warning.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS, README = ROOT / "docs", ROOT / "README.md"
OUTSIDE = [
    *ROOT.glob("*.md"),
    *(page for name in ("benchmarks", "kernels", "examples") for page in (ROOT / name).rglob("*.md")),
]
LINK = re.compile(r"(!?\[(?:!\[[^]]*\]\([^)]*\)|[^]]+)\])\(([^)#\s]+)(#[^)]*)?\)")
log = logging.getLogger("mkdocs.hooks.links")


def on_pre_build(config: MkDocsConfig) -> None:
    """Warn of links in Markdown files beside docs/ that lead to no file."""
    for page in OUTSIDE:
        for _, target, _ in LINK.findall(page.read_text(encoding="utf-8")):
            if "://" not in target:
                warn_if_missing(page, target)


def warn_if_missing(page: Path, target: str) -> None:
    """Warn of a relative link that leads to no file."""
    if not (page.parent / target).exists():
        log.warning("%s: no such file: %s", page.relative_to(ROOT), target)


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
            warn_if_missing(source, target)
            return text[1:-1]
        return f"{text}({os.path.relpath(file, (DOCS / page.file.src_uri).parent)}{anchor})"

    return LINK.sub(link, markdown)


def on_page_content(html: str, **_: object) -> str:
    """Show names that docstrings mark as Sphinx does (``:class:`X```) as code."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):<code>~?", "<code>", html)
