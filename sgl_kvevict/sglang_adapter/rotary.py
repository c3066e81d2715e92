"""Finds the model's rotary embedding, for policies that look at queries before RoPE."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.policies.query_moments import Rotary


def find_rotary(model: nn.Module) -> Rotary:
    """Return the one rotary embedding that all layers of a model share.

    Raises:
        UnsupportedSetupError: the model has none, or layers with different ones.
    """
    tables: dict[int, Any] = {}
    for module in model.modules():
        table = getattr(module, "cos_sin_cache", None)
        if isinstance(table, Tensor) and hasattr(module, "is_neox_style"):
            tables[table.data_ptr()] = module
    if len(tables) != 1:
        raise UnsupportedSetupError(
            [f"the policy looks at queries before RoPE, which needs one rotary embedding; the model has {len(tables)}"]
        )
    (module,) = tables.values()
    return Rotary(module.cos_sin_cache, module.is_neox_style)
