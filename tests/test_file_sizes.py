"""Files and functions stay small enough to be read in one go."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("sgl_kvevict", "kernels", "tests", "tools", "examples", "benchmarks")
MAX_FILE_LINES = 550
MAX_FUNCTION_LINES = 60


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def num_lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the docstring: a long description of shapes and errors is welcome, a long body is not."""
    return num_lines_of(function.body[0]) if ast.get_docstring(function) is not None else 0


def too_long(name: str, source: str) -> list[str]:
    """What is too long in a file, one line each."""
    num_lines = len(source.splitlines())
    problems = [f"{name}: {num_lines} lines (at most {MAX_FILE_LINES})"] if num_lines > MAX_FILE_LINES else []
    for function in functions(ast.parse(source)):
        body = function.body[-1].end_lineno or 0
        length = (
            body - function.body[0].lineno + 1 - docstring_lines(function)
        )  # a long list of typed arguments is fine
        if length > MAX_FUNCTION_LINES:
            where = f"{name}:{function.lineno} {function.name}"
            problems.append(f"{where}: {length} lines (at most {MAX_FUNCTION_LINES})")
    return problems


def test_no_file_and_no_function_is_too_long() -> None:
    problems: list[str] = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            problems += too_long(path.relative_to(ROOT).as_posix(), path.read_text())
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("source", "num_problems"),
    [
        ("x = 1\n" * MAX_FILE_LINES, 0),
        ("x = 1\n" * (MAX_FILE_LINES + 1), 1),
        ("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES, 0),
        ('def f():\n    """One.\n\n    Two.\n    """\n' + "    x = 1\n" * MAX_FUNCTION_LINES, 0),
        ("class A:\n    def f(self):\n" + "        x = 1\n" * (MAX_FUNCTION_LINES + 1), 1),
    ],
)
def test_the_limits_themselves(source: str, num_problems: int) -> None:
    assert len(too_long("file.py", source)) == num_problems
