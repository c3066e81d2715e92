"""The documentation as a whole: every page is in the site's navigation, and it stays short enough to be read."""

from __future__ import annotations

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


def num_words(*files: Path) -> int:
    """Words of files, as ``wc -w`` counts them."""
    return sum(len(file.read_text(encoding="utf-8").split()) for file in files)


def test_the_navigation_has_every_page_once_in_four_kinds() -> None:
    assert [next(iter(kind)) for kind in SITE["nav"]] == ["Start", "Guides", "Reference", "Explanation"]
    listed = sorted(pages(SITE["nav"]))
    written = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert listed == sorted([*written, "index.md"])  # README.md: tools/docs/hooks.py


def test_the_readme_and_the_pages_stay_short() -> None:
    assert num_words(ROOT / "README.md") <= 900
    assert num_words(ROOT / "README.md", *DOCS.glob("*.md")) <= 25_000  # without docs/results, which commands write
