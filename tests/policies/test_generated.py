"""Which policies may compress what requests generate."""

from __future__ import annotations

import pytest

from helpers.own_policies import OWN_POLICIES
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies import configured_policy
from sgl_kvevict.policies.generated import GENERATED_POLICIES


@pytest.mark.parametrize("policy", GENERATED_POLICIES)
def test_policies_with_a_rule_for_a_growing_cache(policy):
    assert configured_policy(KVEvictConfig(policy=policy, decode_block=64))[1] is not None


@pytest.mark.parametrize("policy", ["distilled", "none", "ada-snapkv", "chunkkv", "k-vec", "random", "knorm"])
def test_other_policies_are_refused_by_name(policy):
    with pytest.raises(
        ConfigError, match=f"decode_block: got 64, but policy '{policy}' has no rule .* allowed: h2o, d2o"
    ):
        configured_policy(KVEvictConfig(policy=OWN_POLICIES.get(policy, policy), decode_block=64))


@pytest.mark.parametrize(
    ("policy", "options", "reason"),
    [
        ("d2o", {"direction": "any"}, "direction 'any'"),
        ("snapkv", {"budget_rule": "adaptive"}, "the budget_rule has no rule for a cache that grows"),
        ("h2o", {"budget_rule": "pyramid"}, "the budget_rule has no rule for a cache that grows"),
        ("h2o", {"normalize": "queries"}, "normalize 'queries'"),
    ],
)
def test_options_that_do_not_fit_are_refused(policy, options, reason):
    with pytest.raises(ConfigError, match=f"decode_block: got 64, but {reason}"):
        configured_policy(KVEvictConfig(policy=policy, policy_options=options, decode_block=64))
