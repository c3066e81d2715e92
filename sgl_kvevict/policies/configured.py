"""The policy that a configuration asks for, and the configuration with all that its name implies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies.attention_matcher import AttentionMatcher
from sgl_kvevict.policies.by_name import build_policy, paper_options, paper_settings, split_name
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.signals import Readers
from sgl_kvevict.policies.suffix import suffix_reasons


def configured_policy(config: KVEvictConfig) -> tuple[KVEvictConfig, Policy | None]:
    """Build a configuration's policy.

    Args:
        config: as given; ``policy`` may end in ``@paper``.

    Returns:
        The configuration with every option and field that ``@paper`` sets spelled out (those that were given win, so
        resolving twice changes nothing), and its policy, with a fitter if it is to fit; None for "none".

    Raises:
        ConfigError: unknown policy or option, bad value, or a budget, tail or ``decode_block`` that does not fit the
            policy.
    """
    config = _spelled_out(config)
    policy = build_policy(config.policy, config.policy_options)
    problems = []
    if config.budget_includes_tail and isinstance(config.budget, int) and config.budget <= config.tail_tokens:
        problems.append(
            f"budget: got {config.budget}, which includes the tail of tail_tokens={config.tail_tokens}; allowed: an "
            f"integer >= {config.tail_tokens + 1}"
        )
    limit = None if policy is None else policy.max_tail_tokens
    if policy is not None and limit is not None and config.tail_tokens > limit:
        problems.append(
            f"tail_tokens: got {config.tail_tokens} for policy {config.policy!r}; allowed: 1 to {limit} "
            f"({policy.why_max_tail})"
        )
    if config.fit and (policy is None or policy.readers is not Readers.REPETITION or policy.merger is not None):
        problems.append(
            f"fit: got true for policy {config.policy!r}; allowed: false, or a policy that passes read and that merges "
            "nothing (distilled, reconstruction)"
        )
    if config.decode_block is not None:
        problems += [f"decode_block: got {config.decode_block}, but {reason}" for reason in suffix_reasons(policy)]
    if problems:
        raise ConfigError("\n".join(problems))
    if policy is not None and config.fit:
        policy = replace(policy, fitter=AttentionMatcher(is_causal=config.fit_scope == "causal"))
    return config, policy


def _spelled_out(config: KVEvictConfig) -> KVEvictConfig:
    settings = paper_settings(config.policy)
    if settings is None:
        return config
    options = paper_options(config.policy, config.policy_options)
    implied = {field.name: field.value for field in settings.fields(options)}
    values: dict[str, Any] = {"policy": split_name(config.policy)[0], "policy_options": options}
    values |= {name: value for name, value in implied.items() if name not in config.model_fields_set}
    return config.model_copy(update=values)
