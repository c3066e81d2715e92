"""How many files a prompt enters on its way from SGLang's checkpoint to its packed segment."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

import sgl_kvevict
from helpers.harness import Harness, publish_server_args

PACKAGE = Path(sgl_kvevict.__file__).parent
LAYERS = {"compression", "prefix", "lifecycle", "sglang_adapter"}
"""Folders of layers 2 to 5 without policies and what they learn; the others are below, or not entered."""


@pytest.fixture(scope="module", autouse=True)
def _server_args(tmp_path_factory):
    publish_server_args(tmp_path_factory.mktemp("args"))


def test_a_prompt_enters_as_many_files_as_the_design_says():
    harness = Harness()
    entered: set[Path] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(path.relative_to(PACKAGE))

    checkpoint = harness.tree.checkpoint

    def profiled(*args, **kwargs):
        sys.setprofile(note)
        try:
            checkpoint(*args, **kwargs)
        finally:
            sys.setprofile(None)

    harness.tree.checkpoint = profiled
    assert harness.run(list(range(40))) is not None
    assert len(harness.tree.spans) == 1
    files = [path for path in entered if path.parts[0] in LAYERS]
    design = (PACKAGE.parent / "docs" / "design.md").read_text(encoding="utf-8")
    assert f"a prompt enters {len(files)} files of layers 2 to 5" in design, sorted(files)
