"""Print the changelog's section of the version in pyproject.toml, which has to have a date; with --version the version.

Run: python tools/release_notes.py [--version]. Standard library only: the release workflow calls it before anything is
installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version() -> str:
    """The version in pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def section(changelog: str, wanted: str) -> tuple[str, str]:
    """Return what stands behind a version in the heading of its section, and the section's text.

    Raises:
        ValueError: the changelog has no such section.
    """
    heading = rf"^## \[{re.escape(wanted)}\] - ([^\n]+)\n(.*?)(?=^## \[|\Z)"
    found = re.search(heading, changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"CHANGELOG.md: no section '## [{wanted}] - DATE'")
    return found[1].strip(), found[2].strip() + "\n"


def main() -> None:
    """Print, or end with an error that says what the changelog lacks."""
    if sys.argv[1:] == ["--version"]:
        print(version())
        return
    date, text = section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version())
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        raise SystemExit(f"CHANGELOG.md: section {version()}: got {date!r} for the date; allowed: YYYY-MM-DD")
    print(text, end="")


if __name__ == "__main__":
    main()
