"""Python code of the documentation can be compiled. Links and navigation: `make docs`."""

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
