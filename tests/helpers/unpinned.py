"""Servers with LoRA adapters on a CPU: SGLang pins memory for them, which a torch without an accelerator refuses.

``start(..., patch=unpinned.__name__)`` has a server import this module before anything else. Numbers are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def ignoring_pins(make: Callable[..., Any]) -> Callable[..., Any]:
    """A factory of tensors that does not pin them."""

    @functools.wraps(make)
    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return call


torch.Tensor.pin_memory = lambda self, *_args: self
for name in ("tensor", "zeros", "ones", "empty", "full", "empty_like", "zeros_like", "arange"):
    setattr(torch, name, ignoring_pins(getattr(torch, name)))
