"""What ruff and mypy do not say: how long a file may be, which functions need a docstring, names of classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("sgl_kvevict", "kernels", "tests", "tools", "examples", "benchmarks")
MAX_FILE_LINES = 650
DESCRIBED = ("sgl_kvevict", "kernels", "examples", "benchmarks")
"""Folders whose public functions have docstrings."""


def sources(folders: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Name and text of every Python file."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def undescribed(block: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Public functions and methods of more than one statement without a docstring; classes are left to ruff (D101)."""
    for node in block.body:
        if getattr(node, "name", "_").startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from undescribed(node)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and len(node.body) > 1 and ast.get_docstring(node) is None:
            yield f"{node.lineno} {node.name}"


def test_no_file_is_too_long() -> None:
    lengths = {name: len(source.splitlines()) for name, source in sources(FOLDERS)}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_public_functions_have_docstrings_unless_they_are_one_statement() -> None:
    missing = [f"{name}:{each}" for name, source in sources(DESCRIBED) for each in undescribed(ast.parse(source))]
    assert not missing, "\n".join(missing)


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for name, source in sources(("sgl_kvevict", "kernels")):
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
