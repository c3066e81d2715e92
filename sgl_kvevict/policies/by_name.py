"""The policy that a name asks for: a method, a method as its paper prints it, or a user's own by dotted path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies.budget_options import BudgetOptions
from sgl_kvevict.policies.method import PaperSettings
from sgl_kvevict.policies.methods import METHODS
from sgl_kvevict.policies.options import OptionInfo, describe_options, parse_options, without_idle
from sgl_kvevict.policies.policy import Policy

NO_POLICY = "none"
PAPER_SUFFIX = "@paper"
"""After a policy's name: its options and the server's sizes as its paper prints them."""


@dataclass(frozen=True)
class PolicyInfo:
    """What ``sgl-kvevict policies`` prints of one policy.

    Attributes:
        name: as users select it.
        summary: the idea in one line.
        options: its options with defaults.
    """

    name: str
    summary: str
    options: tuple[OptionInfo, ...]


def list_policies() -> tuple[PolicyInfo, ...]:
    """All policies, ``none`` first."""
    none = PolicyInfo(NO_POLICY, "compress nothing: SGLang's own behaviour", ())
    return (none, *(PolicyInfo(m.name, m.summary, describe_options(m.options_type)) for m in METHODS))


def budget_option_names() -> tuple[str, ...]:
    """Options that every policy but ``none`` has: how its budget is split."""
    return tuple(option.name for option in describe_options(BudgetOptions))


def split_name(name: str) -> tuple[str, bool]:
    """A policy's own name, and whether it is asked for as its paper prints it."""
    return name.removesuffix(PAPER_SUFFIX), name.endswith(PAPER_SUFFIX) and ":" not in name


def papers() -> dict[str, PaperSettings]:
    """What ``NAME@paper`` sets, by the name of each policy that has it."""
    return {method.name: method.paper for method in METHODS if method.paper is not None}


def paper_settings(name: str) -> PaperSettings | None:
    """What ``NAME@paper`` sets; None if the name does not end so.

    Raises:
        ConfigError: there are no settings of a paper for this policy.
    """
    own, as_printed = split_name(name)
    if not as_printed:
        return None
    settings = papers()
    if own not in settings:
        allowed = ", ".join(f"{known}{PAPER_SUFFIX}" for known in settings)
        raise ConfigError(f"policy: got {name!r}; allowed with {PAPER_SUFFIX}: {allowed}")
    return settings[own]


def paper_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a policy with those that ``@paper`` sets, if its name ends so.

    Given ones win, and what has no effect beside them is left out (``variance_norm`` with ``budget_rule="uniform"``).
    """
    settings = paper_settings(name)
    if settings is None:
        return dict(given)
    method = next(method for method in METHODS if method.name == split_name(name)[0])
    implied = {value.name: value.value for value in settings.options}
    return {**without_idle(method.options_type, implied, given), **given}


def build_policy(name: str, options: Mapping[str, Any]) -> Policy | None:
    """Make the policy a configuration asks for.

    Args:
        name: a name of :func:`list_policies`, some with "@paper" after it (:func:`papers`), or
            "package.module:factory" for a user's own; the factory is called with the options as keyword arguments and
            returns a :class:`Policy`.
        options: the policy's options; missing ones take their defaults.

    Returns:
        The policy; None for "none".

    Raises:
        ConfigError: unknown name or option, bad value, parts that do not fit, or a user's policy that cannot
            be loaded.
    """
    if ":" in name:
        return _load_user_policy(name, options)
    if name == NO_POLICY:
        if options:
            raise ConfigError(f"policy_options: policy 'none' has no options, got {', '.join(options)}")
        return None
    name, options = split_name(name)[0], paper_options(name, options)
    for method in METHODS:
        if method.name == name:
            return _build(name, method.build, parse_options(name, method.options_type, options))
    known = ", ".join(info.name for info in list_policies())
    raise ConfigError(
        f"policy: got {name!r}; allowed: {known}, NAME{PAPER_SUFFIX}, or 'package.module:factory' for your own"
    )


def _build(name: str, build: Callable[[Any], Policy], options: Any) -> Policy:
    try:
        return build(options)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"policy_options: policy {name!r}: {error}") from error


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
