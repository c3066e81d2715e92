"""Examples stay short and say how to run them; the gallery shows all of them as they are."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOT_EXAMPLES = {"station.py", "write_gallery.py"}
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in NOT_EXAMPLES)


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_gallery", EXAMPLES / "write_gallery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_gallery_has_every_example(gallery: ModuleType) -> None:
    assert {example.source for example in gallery.EXAMPLES} == {*PROGRAMS, "policies/value_aware.py"}


def test_every_policy_among_the_examples_is_listed() -> None:
    listed = (EXAMPLES / "policies" / "README.md").read_text()
    assert all(f"]({path.name})" in listed for path in (EXAMPLES / "policies").glob("*.py"))


def test_the_gallery_is_what_the_examples_say_and_printed(gallery: ModuleType) -> None:
    page = gallery.PAGE.read_text()
    outputs = gallery.read_outputs(page)
    assert outputs.keys() == {example.source for example in gallery.EXAMPLES} and all(outputs.values())
    assert gallery.render(outputs) == page
