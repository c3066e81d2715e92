"""One file for each named method."""

from __future__ import annotations

import importlib
from pathlib import Path

from sgl_kvevict.policies import list_policies, methods
from sgl_kvevict.policies.methods import METHODS


def test_a_file_has_the_name_of_its_policy_and_no_other_method() -> None:
    files = {path.stem for path in Path(methods.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {info.name.replace("-", "_") for info in list_policies() if info.name != "none"}
    for method in METHODS:
        module = importlib.import_module(f"{methods.__name__}.{method.name.replace('-', '_')}")
        assert method.__module__ == module.__name__ and module.__doc__.startswith(f"``{method.name}``: ")


def test_a_file_says_where_its_method_is_from() -> None:
    assert all(method.source and method.use_when for method in METHODS)
