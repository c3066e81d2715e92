"""Documents name files and targets that exist, and their Python code can be compiled (links: `make docs`)."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):(?! export)", MAKEFILE, re.MULTILINE))
DOCUMENTS = ("CONTRIBUTING.md", "CHANGELOG.md", ".github/pull_request_template.md", "docs/gallery.md", "docs/design.md")
DOCUMENTS += ("tests/README.md", *(f"docs/design/{page}.md" for page in ("prefix", "layers", "sglang")))
FOLDERS = "sgl_kvevict|kernels|tests|tools|examples|docs|benchmarks|scripts|requirements|\\.ci|\\.github"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_a_document_names_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_targets_that_a_document_names_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    commands = re.findall(r"(?:^|`)make ([a-z][a-z -]*)", text, re.MULTILINE)
    assert {target for command in commands for target in command.split()} - TARGETS == set()


def test_hooks_run_what_make_lint_runs() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None
    commands = [line.strip("\t@").replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == commands


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert project["version"] in (ROOT / "CHANGELOG.md").read_text()


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
