"""Builds the policy of a configuration: by name, with its paper's settings, or a user's own by dotted path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies.methods import METHODS
from sgl_kvevict.policies.methods.streaming_llm import StreamingLLM
from sgl_kvevict.policies.options import NamedPolicy, PaperSettings
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.signals import Signal

PAPER_SUFFIX = "@paper"
"""After a policy's name: options and server sizes of its paper."""

NO_POLICY = replace(StreamingLLM.parse({}).build(), name="none", compresses=False)
"""What a cache works with under policy ``none``; it never asks the parts."""


class NoPolicy(NamedPolicy):
    """The policy ``none``."""

    name = "none"
    summary = "compress nothing: SGLang's own behaviour"
    source = "none"
    use_when = "compression is to be off"

    def build(self) -> None:
        """Nothing is compressed."""


def list_policies() -> tuple[type[NamedPolicy], ...]:
    """All policies, ``none`` first."""
    return (NoPolicy, *METHODS)


def papers() -> dict[str, PaperSettings]:
    """Settings of ``NAME@paper``, by policy name."""
    return {method.name: method.paper for method in METHODS if method.paper is not None}


def find_policy(name: str) -> tuple[type[NamedPolicy], bool]:
    """A policy by its name, and whether the name ends in ``@paper``; ConfigError if either does not exist."""
    own, as_printed = name.removesuffix(PAPER_SUFFIX), name.endswith(PAPER_SUFFIX)
    known = {policy.name: policy for policy in list_policies()}
    if as_printed and own not in papers():
        allowed = ", ".join(f"{printed}{PAPER_SUFFIX}" for printed in papers())
        raise ConfigError(f"policy: got {name!r}; allowed with {PAPER_SUFFIX}: {allowed}")
    if own not in known:
        raise ConfigError(
            f"policy: got {name!r}; allowed: {', '.join(known)}, NAME{PAPER_SUFFIX}, or 'package.module:factory' for "
            "your own"
        )
    return known[own], as_printed


def build_policy(name: str, options: Mapping[str, Any]) -> Policy | None:
    """Build a policy; None for "none".

    ``name`` is one of :func:`list_policies`; one of :func:`papers` with "@paper" after it; or "package.module:factory",
    which is called with the options as keyword arguments and returns a :class:`Policy`. ConfigError: unknown name or
    option, bad value, parts that do not fit, or a user's policy that cannot be loaded.
    """
    if ":" in name:
        return _load_user_policy(name, options)
    found, as_printed = find_policy(name)
    return found.parse(found.paper_options(options) if as_printed else options).build()


def configured_policy(config: KVEvictConfig) -> tuple[KVEvictConfig, Policy | None]:
    """Build a configuration's policy; None for "none".

    The returned configuration has the options and fields of ``@paper`` filled in; given ones win, so a second call
    changes nothing. ConfigError as for :func:`build_policy`, or if budget, tail or ``prefill_budget`` do
    not suit the policy.
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
    if config.prefill_budget is not None and (policy is None or Signal.LEARNED_SCORES not in policy.needs):
        problems.append(
            f"prefill_budget: got {config.prefill_budget} for policy {config.policy!r}, which keeps what later tokens "
            "attend to; allowed: null, or policy distilled"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return config, policy


def _spelled_out(config: KVEvictConfig) -> KVEvictConfig:
    if ":" in config.policy or not config.policy.endswith(PAPER_SUFFIX):
        return config
    found, _ = find_policy(config.policy)
    options = found.paper_options(config.policy_options)
    implied = {field.name: field.value for field in papers()[found.name].fields(options)}
    values: dict[str, Any] = {"policy": found.name, "policy_options": options}
    values |= {name: value for name, value in implied.items() if name not in config.model_fields_set}
    return config.model_copy(update=values)


def _load_user_policy(path: str, options: Mapping[str, Any]) -> Policy:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"policy: got {path!r}; allowed: 'package.module:factory'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"policy: module {module_name!r} of {path!r} cannot be imported: {error}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        public = ", ".join(key for key in vars(module) if not key.startswith("_"))
        raise ConfigError(f"policy: {path!r} names no callable; module {module_name!r} has: {public}")
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        allowed = inspect.signature(factory)
        raise ConfigError(f"policy_options: {error} in policy {path!r}; allowed: {allowed}") from error
    policy = factory(**options)
    if not isinstance(policy, Policy):
        raise ConfigError(f"policy: {path!r} returned {type(policy).__name__}; allowed: sgl_kvevict.policies.Policy")
    return policy
