"""Which versions of SGLang are served, and what another one changes of the functions that we hook or override."""

from __future__ import annotations

import inspect
import json
import logging
import multiprocessing
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import version
from inspect import Parameter
from pathlib import Path

from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.machine import SGLANG_RANGE, SUPPORTED_SGLANG
from sgl_kvevict.sglang_adapter.hooks import FEATURES, HOOKS, Feature

logger = logging.getLogger(__name__)

OVERRIDING = (
    "sgl_kvevict.sglang_adapter.tree.KVEvictTree",
    "sgl_kvevict.sglang_adapter.span_component.SpanComponent",
    "sgl_kvevict.sglang_adapter.window_component.SpanAwareSWA",
)
"""Our classes that override methods of SGLang's."""
SIGNATURES = Path(__file__).with_name("signatures.json")
"""{version: {function: signature}}: all of the newest supported version, and of older ones those that differ."""
MISSING = "missing"
"""Begins what stands in the place of the signature of a function that is not there."""


def signatures() -> dict[str, str]:
    """Signature of every function of the installed SGLang that we hook or override; if it is gone, the error."""
    return {
        **{hook.target: _step(hook.target) if hook.is_step else _signature(hook.target) for hook in HOOKS},
        **{path: _signature(path) for _, path in _overrides()},
    }


def _overrides() -> Iterator[tuple[Callable[..., object], str]]:
    """Our methods that override one of SGLang's, and the dotted path of that one."""
    for ours in map(pkgutil.resolve_name, OVERRIDING):
        (theirs,) = ours.__bases__
        for name, method in vars(ours).items():
            if inspect.isfunction(getattr(theirs, name, None)) and not name.startswith("__"):
                yield method, f"{theirs.__module__}.{theirs.__qualname__}.{name}"


def _step(name: str) -> str:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    try:
        register_resolution_hook(name)  # registers nothing yet
    except ValueError:
        return f"{MISSING}: SGLang has no such step"
    return "a step of the start"


def _signature(target: str) -> str:
    """Parameters with their defaults, without annotations, which differ between versions of Python."""
    try:
        parameters = _parameters(pkgutil.resolve_name(target))
    except (ImportError, AttributeError) as error:
        return f"{MISSING}: {error}"
    return str(inspect.Signature([parameter.replace(annotation=Parameter.empty) for parameter in parameters]))


def _parameters(function: Callable[..., object]) -> list[Parameter]:
    return list(inspect.signature(function).parameters.values())


@cache
def changes() -> tuple[list[str], dict[str, list[str]], list[str]]:
    """How the installed SGLang differs from the newest supported version, in sentences.

    Returns first those on functions without which no server starts, and that are missing or called as ours cannot be;
    then the same of optional features, by the feature's name, which are off; last those on other calls that ours take.
    """
    known, now = json.loads(SIGNATURES.read_text(encoding="utf-8"))[SUPPORTED_SGLANG[-1]], signatures()
    optional = {hook.target: feature.name for feature in FEATURES if feature.is_optional for hook in feature.hooks}
    broken, off, harmless = [], dict[str, list[str]](), []
    for target in sorted(known.keys() | now.keys()):
        is_now, was = now.get(target, MISSING), known.get(target, "nothing")
        if is_now == was:
            continue
        sentence = f"{target}: {is_now}; expected {was}"
        # A target that the list lacks may have any meaning, so it counts as broken.
        if target in known and not is_now.startswith(MISSING) and _fits(target):
            harmless.append(sentence)
        elif target in optional:
            off.setdefault(optional[target], []).append(sentence)
        else:
            broken.append(sentence)
    return broken, off, harmless


def _fits(target: str) -> bool:
    """Whether ours can be called as SGLang calls a function that we hook or override."""
    theirs = pkgutil.resolve_name(target)
    called = _parameters(theirs)
    has_self = any(each.name == "self" for each in called)
    ours = [_parameters(method)[1:] for method, path in _overrides() if path == target]
    for hook in HOOKS:
        if hook.target == target:  # called with the original function or its result before the object or class
            num_before = (hook.kind != "BEFORE") + (has_self or inspect.ismethod(theirs))
            ours.append(_parameters(hook.load())[num_before:])
    return all(takes(each, called[has_self:]) for each in ours)


def takes(ours: Sequence[Parameter], theirs: Sequence[Parameter]) -> bool:
    """Whether a function can be called wherever one with the parameters ``theirs`` is called, and reads the same.

    An argument has the same name at the same place. One before ``/`` is given by its place alone: it may have any name.
    """
    mine, places = ([each for each in side if each.kind <= Parameter.POSITIONAL_OR_KEYWORD] for side in (ours, theirs))
    my_names, names = ({each.name for each in side if each.kind is Parameter.KEYWORD_ONLY} for side in (ours, theirs))
    others = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}
    # More arguments by place than ours names are taken by ``*args`` if given by place, and by ``**kwargs`` if given by
    # name.
    wanted = others if len(places) > len(mine) else {each.kind for each in theirs} & others
    wanted |= {Parameter.VAR_KEYWORD} if names - my_names else set()
    same = (
        my.name == each.name or my.kind is Parameter.POSITIONAL_ONLY for my, each in zip(mine, places, strict=False)
    )
    return all(same) and len(mine) <= len(places) and my_names <= names and wanted <= {each.kind for each in ours}


def is_on(feature: Feature) -> bool:
    """Whether the installed SGLang has what a feature needs."""
    # A supported version is not compared: that imports much of SGLang, in every process.
    return version("sglang") in SUPPORTED_SGLANG or feature.name not in changes()[1]


@cache
def require_supported_sglang() -> None:
    """Check the version of the installed SGLang, once. Another one that has what we need starts, with one warning.

    Raises :class:`UnsupportedSetupError` if a function without which no server starts is missing, or has changed in a
    way that ours cannot take; each is named.
    """
    installed = version("sglang")
    if installed in SUPPORTED_SGLANG:
        return
    reason = f"sglang {installed} is installed, but this release supports {SGLANG_RANGE}"
    broken, off, harmless = changes()
    if broken:
        raise UnsupportedSetupError([f"{reason}; it would break here:", *broken])
    if multiprocessing.parent_process() is None:  # else the process that started this one has said it
        lines = [f"{reason}; it is not tested, and starts all the same"]
        lines += [f"{name} is off ({'; '.join(sentences)})" for name, sentences in off.items()]
        lines += [f"called in another way: {sentence}" for sentence in harmless]
        logger.warning("kvevict: %s", "\n  - ".join(lines))
