"""A refusal says what would break, not that something is untested."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from sgl_kvevict.attention import refusals as attention_refusals
from sgl_kvevict.sglang_adapter import graphs, refusals, request_check, start_checks
from sgl_kvevict.sglang_adapter.start_checks import FLAGS, MODEL_KEYS

MODULES = (attention_refusals, graphs, refusals, request_check, start_checks)
EMPTY = re.compile(r"\b(untested|not (yet )?(tested|supported|implemented)|unsupported|yet)\b", re.IGNORECASE)


def sentences(source: str) -> list[str]:
    """Every text of a module that is no docstring and has at least four words; parts of an f-string as one."""
    tree = ast.parse(source)
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs]
    return [text for text in texts if isinstance(text, str) and len(text.split()) >= 4]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_no_sentence_hides_behind_a_lack_of_tests(module):
    found = sentences(Path(module.__file__).read_text(encoding="utf-8"))
    assert found and [text for text in found if EMPTY.search(text)] == []


def test_every_flag_and_model_has_a_reason():
    reasons = [reason for _, reason in FLAGS.values()] + list(MODEL_KEYS.values())
    assert all(len(reason.split()) >= 4 and not EMPTY.search(reason) for reason in reasons)
