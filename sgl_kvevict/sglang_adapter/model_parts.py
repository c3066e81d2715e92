"""Finds parts of a model: rotary embedding, sliding windows, FP8 KV scales.

``places`` is {layer number in the model: index in the KV pool} everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor, nn

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.geometry import UNSCALED, KVScales


def find_rotary(model: nn.Module, places: Mapping[int, int]) -> Rotary | None:
    """Return the rotary embedding that all layers without a window share.

    Empty if only layers with a window rotate keys (Exaone 4, Command R7B). None if these layers have none, or different
    ones, or axes in an order that SGLang does not show (ERNIE 4.5 VL).
    """
    parts = [module for module in model.modules() if any(_is_full(child, places) for child in module.children())]
    found: list[Any] = [child for part in parts for child in part.children() if _is_rotary(child)]
    if not found:  # not beside the attention of each layer
        found = [module for module in model.modules() if _is_rotary(module)]
    # Layers share a table, or have modules of their own around the same one: the memory tells.
    tables = {table.cos_sin_cache.data_ptr(): table for table in found}
    turned = {_turns_keys(part) for part in parts}
    if len(tables) != 1 or len(turned) > 1:
        return None
    (table,) = tables.values()
    axis_of = getattr(table, "axis_map", None)
    if axis_of is None and getattr(table, "mrope_section", None):
        return None
    # In latents the rotated part of a key comes after the part that is also the value.
    start = next((layer.v_head_dim for layer in _layers_of(model, places) if layer.v_head_dim != layer.qk_head_dim), 0)
    return Rotary(table.cos_sin_cache[:, : None if turned != {False} else 0], table.is_neox_style, axis_of, start)


def _is_full(module: nn.Module, places: Mapping[int, int]) -> bool:
    return isinstance(module, RadixAttention) and module.layer_id in places and module.sliding_window_size <= 0


def _is_rotary(module: nn.Module) -> bool:
    return isinstance(getattr(module, "cos_sin_cache", None), Tensor) and hasattr(module, "is_neox_style")


def _turns_keys(attention: nn.Module) -> bool:
    """Whether attention without a window rotates its keys; for the models with an attribute that says so."""
    if hasattr(attention, "force_rope"):  # Cohere 2 MoE
        return bool(attention.force_rope)
    if hasattr(attention, "apply_rope_all_layers"):  # Exaone MoE
        return bool(attention.apply_rope_all_layers)
    if hasattr(attention, "v2"):  # Command R and its second version
        return not attention.v2
    is_windowed_model = bool(getattr(attention, "sliding_window_pattern", None))  # Exaone 4
    return not is_windowed_model and bool(getattr(attention, "is_local_attention", True))  # AFMoE


def _layers_of(model: nn.Module, places: Mapping[int, int]) -> list[RadixAttention]:
    """One for each place; of latent attention the first, which reads latents (the other reads expanded heads)."""
    found: dict[int, RadixAttention] = {}
    for module in model.modules():
        if isinstance(module, RadixAttention) and module.layer_id in places:
            found.setdefault(places[module.layer_id], module)
    return [found[place] for place in sorted(found)]


def find_kv_scales(model: nn.Module, places: Mapping[int, int]) -> KVScales:
    """Return FP8 scales per layer, 1.0 if absent; SGLang loaded them from the checkpoint or a file of scales."""
    layers = _layers_of(model, places)
    k, v = (
        tuple(float(getattr(layer, name) or 1.0) for layer in layers) for name in ("k_scale_float", "v_scale_float")
    )
    return KVScales(k, v) if {*k, *v} - {1.0} else UNSCALED


def find_windows(model: nn.Module, places: Mapping[int, int]) -> tuple[int, ...]:
    """Return :attr:`KVGeometry.windows` of a KV pool; () if no layer has a window.

    SGLang's ``sliding_window_size`` excludes the query's own key, and is -1 without a window.
    """
    windows = tuple(max(layer.sliding_window_size, -1) + 1 for layer in _layers_of(model, places))
    return windows if any(windows) else ()


def find_sink_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of the model's attention sink logits; None if there are none."""
    for module in model.modules():
        sinks = getattr(module, "sinks", None)
        if isinstance(sinks, Tensor) and any(isinstance(child, RadixAttention) for child in module.children()):
            return sinks.dtype
    return None
