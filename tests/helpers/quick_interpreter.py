"""Triton's interpreter, in half the time; imported for its effect.

At each call of a device function the interpreter goes through all members of ``triton.language`` to replace its
builtins, although the launch has replaced them. Here it does so only where they are not replaced yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang


@functools.cache
def _languages(function: Callable[..., Any]) -> list[Any]:
    return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]


def _patch_lang(function: Callable[..., Any]) -> Any:
    if any(tl.core.is_builtin(module.load) for module in _languages(function)):
        return _patch(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_lang
