"""Python code of the documentation can be compiled, and entries of its navigation differ. Links: `make docs`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_python_code_of_all_pages_can_be_compiled() -> None:
    blocks = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        blocks += re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    for code in blocks:
        compile(code, "code of a page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_no_two_entries_of_the_navigation_share_a_name() -> None:
    navigation = (ROOT / "tools" / "docs" / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    names = [name.strip() for name in re.findall(r"^ *- (.+?):", navigation, re.MULTILINE)]
    assert len(names) > 30 and len(set(names)) == len(names)
