"""Triton's interpreter, several times as fast; imported for its effect.

* At each call of a device function it goes through all members of ``triton.language`` to replace its builtins, although
  the launch has replaced them: here only where they are not replaced yet.
* It computes whether sums and products of integers overflow, and drops the answer (assertions need ``debug``).
* It builds a table of NumPy's dtypes at each look at it, and the shape of each tensor anew: here once.
* It takes bfloat16 apart into sign, exponent and mantissa to widen it to float32, and back: here bits are shifted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_convert = interpreter._convert_float
_numpy_dtype_of_scalar = functools.cache(interpreter._get_np_dtype)


@functools.cache
def _languages(function: Callable[..., Any]) -> list[Any]:
    return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]


def _patch_lang(function: Callable[..., Any]) -> Any:
    if any(tl.core.is_builtin(module.load) for module in _languages(function)):
        return _patch(function)
    return interpreter._LangPatchScope()


def _numpy_dtype(dtype: tl.dtype) -> Any:
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _numpy_dtype_of_scalar(scalar)


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """A tensor's shape and number of elements, as constants of the language."""
    return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = _shape(tuple(type.shape) if type.is_block() else ())


def _convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
    if (source, target) == (tl.bfloat16, tl.float32):
        return data.view(np.uint16).astype(np.uint32) << 16
    if (source, target, rounding) == (tl.float32, tl.bfloat16, None):  # truncated
        return (data.view(np.uint32) >> 16).astype(np.uint16)
    return _convert(data, source, target, rounding)


interpreter._patch_lang = _patch_lang
interpreter._convert_float = _convert_float
interpreter._get_np_dtype = _numpy_dtype
tl.tensor.__init__ = _init_tensor
builder = interpreter.interpreter_builder
assert not builder.options.debug
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
