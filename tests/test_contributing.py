"""What contributors are told is true: files and targets exist, and hooks are what CI runs."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):(?! export)", MAKEFILE, re.MULTILINE))
DOCUMENTS = ("CONTRIBUTING.md", "CHANGELOG.md", ".github/pull_request_template.md", "docs/gallery.md")
FOLDERS = "sgl_kvevict|kernels|tests|tools|examples|docs|benchmarks|scripts|requirements|\\.ci|\\.github"


def recipe(target: str) -> list[str]:
    """Commands of a target."""
    match = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert match is not None
    return [line.strip("\t@").replace("$(BIN)", ".venv/bin") for line in match[1].splitlines()]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_a_document_names_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    linked = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in linked if link and not ((ROOT / name).parent / link).exists()]
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", text)
    missing += [path for path in named if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_targets_that_a_document_names_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    commands = re.findall(r"(?:^|`)make ([a-z][a-z -]*)", text, re.MULTILINE)
    assert {target for command in commands for target in command.split()} - TARGETS == set()


def test_help_shows_every_target_under_a_heading() -> None:
    command = ["make", "--no-print-directory", "help"]  # else make in make says which folder it enters
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    groups = [group.splitlines() for group in shown.strip().split("\n\n")]
    listed = [line.split()[1] for _, *lines in groups for line in lines]
    assert sorted(listed) == sorted(TARGETS) and all(not heading.startswith(" ") for heading, *_ in groups)


def test_hooks_before_a_commit_are_what_ci_runs() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == recipe("lint")
    assert {hook["language"] for hook in hooks} == {"system"} and not any(hook["pass_filenames"] for hook in hooks)
    assert "make lint" in (ROOT / ".ci" / "run").read_text()


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert project["version"] in (ROOT / "CHANGELOG.md").read_text()


def test_issue_forms_ask_for_something() -> None:
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 3
    for form in forms:
        content = yaml.safe_load(form.read_text())
        assert content["name"] and content["description"]
        ids = [part["id"] for part in content["body"] if part["type"] != "markdown"]
        assert ids and len(set(ids)) == len(ids)
