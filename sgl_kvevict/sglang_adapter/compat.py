"""Supported SGLang versions, and what another version would break."""

from __future__ import annotations

import inspect
import json
import logging
import pkgutil
from functools import cache
from importlib.metadata import version
from pathlib import Path

from sgl_kvevict.config import load_config
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.sglang_adapter.hooks import HOOKS

logger = logging.getLogger(__name__)

SUPPORTED_SGLANG = ("0.5.23",)
"""Exact versions: SGLang renames cache methods between releases, so an upgrade is a change with its own tests."""


OVERRIDING = (
    "sgl_kvevict.sglang_adapter.tree.KVEvictTree",
    "sgl_kvevict.sglang_adapter.span_component.SpanComponent",
    "sgl_kvevict.sglang_adapter.window_component.SpanAwareSWA",
)
"""Our classes that override methods of SGLang's."""
SIGNATURES = Path(__file__).with_name("signatures.json")
"""Results of :func:`signatures` with the supported version (``python tools/write_signatures.py``)."""


def signatures() -> dict[str, str]:
    """Signature of every function of the installed SGLang that we hook or override; if it is gone, the error.

    Steps of its start have none: registering a hook of an unknown step is an error of SGLang's.
    """
    hooks = (hook for hook in HOOKS if not hook.is_step)
    found = {hook.target: _signature(hook.target) for hook in hooks}
    for name in OVERRIDING:
        try:
            ours = pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            found[name] = f"cannot be imported: {error}"
            continue
        (theirs,) = ours.__bases__
        for method in vars(ours):
            if method in dir(theirs) and inspect.isfunction(getattr(theirs, method)) and not method.startswith("__"):
                target = f"{theirs.__module__}.{theirs.__qualname__}.{method}"
                found[target] = _signature(target)
    return found


def _signature(target: str) -> str:
    """Parameters with their defaults, without annotations, which differ between versions of Python."""
    try:
        signature = inspect.signature(pkgutil.resolve_name(target))
    except (ImportError, AttributeError) as error:
        return f"missing: {error}"
    empty = inspect.Parameter.empty
    bare = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=empty))


@cache
def misfits() -> tuple[str, ...]:
    """Differences between the installed SGLang and the supported version, a sentence each."""
    known = json.loads(SIGNATURES.read_text(encoding="utf-8"))
    now = signatures()
    return tuple(
        f"{target}: {now.get(target, 'missing')}; expected {known.get(target, 'nothing')}"
        for target in sorted(known.keys() | now.keys())
        if now.get(target) != known.get(target)
    )


def require_supported_sglang() -> None:
    """Check the version of the installed SGLang; the configuration is read only if it is another one.

    Raises:
        ConfigError: the configuration is invalid.
        UnsupportedSetupError: it is not in ``SUPPORTED_SGLANG``, and a function that we hook or override has changed
            (each is named), or ``accept_untested_sglang`` is off.
    """
    installed = version("sglang")
    if installed in SUPPORTED_SGLANG:
        return
    reason = f"sglang {installed} is installed, but this release supports {', '.join(SUPPORTED_SGLANG)}"
    if found := misfits():
        raise UnsupportedSetupError([f"{reason}; it would break here:", *found])
    if not load_config().accept_untested_sglang:
        raise UnsupportedSetupError(
            [f"{reason}; all functions that it hooks fit, and accept_untested_sglang starts it untested"]
        )
    logger.warning("kvevict: %s; started all the same (accept_untested_sglang)", reason)
