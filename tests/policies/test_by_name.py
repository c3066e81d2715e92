from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from helpers.decisions import built
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies import Policy, build_policy, list_policies


def test_none_is_stock_behaviour() -> None:
    assert build_policy("none", {}) is None
    with pytest.raises(ConfigError, match="policy 'none' has no options, got alpha"):
        build_policy("none", {"alpha": 0.2})


def test_every_listed_policy_builds_with_its_defaults() -> None:
    names = [info.name for info in list_policies()]
    assert names[0] == "none" and len(set(names)) == len(names)
    for info in list_policies()[1:]:
        policy = build_policy(info.name, {})
        assert isinstance(policy, Policy) and policy.name == info.name
        assert info.summary and info.source and info.use_when
        assert all(option.meaning and option.allowed for option in info.describe())
        hash(policy)


def test_unknown_name_lists_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"policy: got .snapkw.; allowed: none, .*streaming-llm, snapkv") as caught:
        build_policy("snapkw", {})
    assert "package.module:factory" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"windw_size": 3}, "windw_size: unknown option .value 3. of policy 'snapkv'; allowed: budget_rule"),
        ({"window_size": 0}, "window_size: got 0 for policy 'snapkv'; allowed: an integer >= 1"),
        ({"window_size": 3.0}, "window_size: got 3.0"),
        ({"window_size": True}, "window_size: got true"),
        ({"kernel_size": 4}, "kernel_size: got 4 .*an odd integer from 1 to 127"),
        ({"pooling": "sum"}, r"pooling: got \"sum\" .*'max' or 'avg'"),
        ({"keep_window": 1}, "keep_window: got 1 .*true or false"),
        ({"alpha": 1.5, "budget_rule": "adaptive"}, "alpha: got 1.5 .*a number from 0 to 1"),
        ({"alpha": float("nan"), "budget_rule": "adaptive"}, "alpha: got NaN"),
        ({"alpha": 0.2}, "alpha: has no effect in policy 'snapkv' with budget_rule='uniform'; it needs"),
        ({"floor_share": 0.2}, "floor_share: has no effect"),
    ],
)
def test_bad_options_name_option_value_and_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_policy("snapkv", options)


def test_options_are_models_with_a_schema() -> None:
    for info in list_policies():
        schema = info.model_json_schema()
        assert schema["additionalProperties"] is False and info.model_config["frozen"]
        assert all(option["description"] for option in schema.get("properties", {}).values())
    (snapkv,) = (info.model_json_schema()["properties"] for info in list_policies() if info.name == "snapkv")
    assert snapkv["window_size"]["minimum"] == 1 and snapkv["pooling"]["enum"] == ["max", "avg"]


def test_integers_are_numbers() -> None:
    assert built("ada-snapkv", alpha=1).allocator.heads.alpha == 1.0  # type: ignore[attr-defined]


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("my_policies")
    monkeypatch.setitem(sys.modules, "my_policies", module)
    return module


def test_user_policy_by_dotted_path(user_module: types.ModuleType) -> None:
    snapkv = build_policy("snapkv", {})
    seen = {}

    def factory(share: float = 0.5) -> Policy:
        seen["share"] = share
        assert snapkv is not None
        return snapkv

    user_module.make = factory  # type: ignore[attr-defined]
    assert build_policy("my_policies:make", {"share": 0.25}) is snapkv
    assert seen == {"share": 0.25}
    with pytest.raises(ConfigError, match="unexpected keyword argument 'shore' in policy 'my_policies:make'"):
        build_policy("my_policies:make", {"shore": 1})


def test_user_policy_errors_are_clear(user_module: types.ModuleType) -> None:
    user_module.wrong = lambda: 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="module 'no_such_module' of 'no_such_module:x' cannot be imported"):
        build_policy("no_such_module:x", {})
    with pytest.raises(ConfigError, match=r"'my_policies:missing' names no callable; .* has: wrong"):
        build_policy("my_policies:missing", {})
    with pytest.raises(ConfigError, match=r"'my_policies:wrong' returned int; allowed: .*Policy"):
        build_policy("my_policies:wrong", {})
    with pytest.raises(ConfigError, match=r"allowed: 'package.module:factory'"):
        build_policy(":x", {})
