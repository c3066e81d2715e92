"""Builds the policy of a configuration: by name, or a user's own by dotted path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies.methods import METHODS
from sgl_kvevict.policies.methods.streaming_llm import StreamingLLM
from sgl_kvevict.policies.options import NamedPolicy
from sgl_kvevict.policies.policy import Policy

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


def find_policy(name: str) -> type[NamedPolicy]:
    """A policy by its name; ConfigError if it does not exist."""
    known = {policy.name: policy for policy in list_policies()}
    if name not in known:
        raise ConfigError(
            f"policy: got {name!r}; allowed: {', '.join(known)}, or 'package.module:factory' for your own"
        )
    return known[name]


def build_policy(name: str, options: Mapping[str, Any]) -> Policy | None:
    """Build a policy; None for "none".

    ``name`` is one of :func:`list_policies`, or "package.module:factory", which is called with the options as keyword
    arguments and returns a :class:`Policy`. ConfigError: unknown name or option, bad value, parts that do not fit, or a
    user's policy that cannot be loaded.
    """
    if ":" in name:
        return _load_user_policy(name, options)
    return find_policy(name).parse(options).build()


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
        # Bound before the call: a TypeError from inside the factory is a bug in it, and no wrong option.
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        allowed = inspect.signature(factory)
        raise ConfigError(f"policy_options: {error} in policy {path!r}; allowed: {allowed}") from error
    policy = factory(**options)
    if not isinstance(policy, Policy):
        raise ConfigError(f"policy: {path!r} returned {type(policy).__name__}; allowed: sgl_kvevict.policies.Policy")
    return policy
