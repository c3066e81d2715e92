"""The documentation as a whole: every page is in the site's navigation, its Python code can be compiled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "tools" / "docs" / "mkdocs.yml").read_text())


def pages(entry: object) -> Iterator[str]:
    """Files of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, list):
        for each in entry:
            yield from pages(each)
    elif isinstance(entry, dict):
        yield from pages(list(entry.values()))


def test_the_navigation_has_every_page_once_in_four_kinds() -> None:
    assert [next(iter(kind)) for kind in SITE["nav"]] == ["Start", "Guides", "Reference", "Explanation"]
    listed = sorted(pages(SITE["nav"]))
    written = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert listed == sorted([*written, "index.md"])  # README.md: tools/docs/hooks.py


def test_python_code_of_all_pages_can_be_compiled() -> None:
    blocks = []
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        blocks += re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    for code in blocks:
        compile(code, "code of a page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
