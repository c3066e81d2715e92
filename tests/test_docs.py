"""The documentation as a whole: every page is in the site's navigation."""

from __future__ import annotations

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


def test_a_page_that_shows_custom_parameters_says_where_they_are_ignored() -> None:
    """SGLang ignores unknown fields at the top level of a body, so a misplaced ``exact`` is lost without an error."""
    pages = [page for page in (ROOT / "README.md", *DOCS.glob("*.md")) if "custom_params" in page.read_text()]
    assert len(pages) >= 3
    for page in pages:
        text = " ".join(page.read_text().split())
        assert re.search(r"at the top level of a body (is|`kvevict` is) ignored", text), page
