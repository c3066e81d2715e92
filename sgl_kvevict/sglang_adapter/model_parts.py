"""Finds parts of a model: rotary embedding, output projections, sliding windows, scales of fp8 KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor, nn

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.geometry import UNSCALED, KVGeometry, KVScales
from sgl_kvevict.policies.signals import output_gram

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights without scales beside them."""


def find_rotary(model: nn.Module, places: Mapping[int, int]) -> Rotary:
    """Return the one rotary embedding that the layers without a window share.

    It is empty where only layers with a window rotate their keys (Exaone 4, Command R7B).

    Args:
        model: SGLang's model.
        places: of the KV pool's layers in it, by number in the model.

    Raises:
        UnsupportedSetupError: the model has none, or such layers with different ones.
    """
    parts = [module for module in model.modules() if any(_is_full(child, places) for child in module.children())]
    found: list[Any] = [child for part in parts for child in part.children() if _is_rotary(child)]
    if not found:  # not beside the attention of each layer
        found = [module for module in model.modules() if _is_rotary(module)]
    tables = {table.cos_sin_cache.data_ptr(): table for table in found}
    turned = {_turns_keys(part) for part in parts}
    if len(tables) != 1 or len(turned) > 1:
        raise UnsupportedSetupError(
            [
                "the policy rotates queries, which needs one rotary embedding for all layers without a window; "
                f"the model has {len(tables)}" + (", and layers without any" if len(turned) > 1 else "")
            ]
        )
    (table,) = tables.values()
    return Rotary(table.cos_sin_cache[:, : None if turned != {False} else 0], table.is_neox_style)


def _is_full(module: nn.Module, places: Mapping[int, int]) -> bool:
    return isinstance(module, RadixAttention) and module.layer_id in places and module.sliding_window_size <= 0


def _is_rotary(module: nn.Module) -> bool:
    return isinstance(getattr(module, "cos_sin_cache", None), Tensor) and hasattr(module, "is_neox_style")


def _turns_keys(attention: nn.Module) -> bool:
    """Whether an attention without a window rotates its keys; models that do not have an attribute that says so."""
    if hasattr(attention, "force_rope"):  # Cohere 2 MoE
        return bool(attention.force_rope)
    if hasattr(attention, "apply_rope_all_layers"):  # Exaone MoE
        return bool(attention.apply_rope_all_layers)
    if hasattr(attention, "v2"):  # Command R and its second version
        return not attention.v2
    is_windowed_model = bool(getattr(attention, "sliding_window_pattern", None))  # Exaone 4
    return not is_windowed_model and bool(getattr(attention, "is_local_attention", True))  # AFMoE


def _layers_of(model: nn.Module, places: Mapping[int, int]) -> list[RadixAttention]:
    """Layers with attention of one KV pool, in its order; ``places``: place in it by number in the model."""
    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    return sorted((layer for layer in layers if layer.layer_id in places), key=lambda layer: places[layer.layer_id])


def find_kv_scales(model: nn.Module, places: Mapping[int, int]) -> KVScales:
    """Return what a stored 1 of fp8 KV is worth in each layer, as the checkpoint (or a file of scales) says; else 1.

    SGLang has read it into ``k_scale_float`` and ``v_scale_float`` of the layers.

    Args:
        model: SGLang's model, loaded.
        places: of the KV pool's layers in it, by number in the model.
    """
    layers = _layers_of(model, places)
    k, v = (
        tuple(float(getattr(layer, name) or 1.0) for layer in layers) for name in ("k_scale_float", "v_scale_float")
    )
    return KVScales(k, v) if {*k, *v} - {1.0} else UNSCALED


def find_windows(model: nn.Module, places: Mapping[int, int]) -> tuple[int, ...]:
    """Return what :attr:`KVGeometry.windows` says of the layers of a KV pool; () if none has a window.

    SGLang counts the keys that a query sees besides its own, and has -1 where there is no window.

    Args:
        model: SGLang's model.
        places: the index of each of the pool's layers, by its number in the model.
    """
    windows = tuple(max(layer.sliding_window_size, -1) + 1 for layer in _layers_of(model, places))
    return windows if any(windows) else ()


def find_sink_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of the sink logits that lie beside a model's attention layers; None if there are none."""
    for module in model.modules():
        sinks = getattr(module, "sinks", None)
        if isinstance(sinks, Tensor) and any(isinstance(child, RadixAttention) for child in module.children()):
            return sinks.dtype
    return None


def find_output_grams(model: nn.Module, geometry: KVGeometry, places: Mapping[int, int]) -> Tensor:
    """Return the :func:`output_gram` of every layer.

    Args:
        model: SGLang's model.
        geometry: sizes of this rank.
        places: of the KV pool's layers in it, by number in the model.

    Returns:
        [num_layers, num_kv_heads, head_dim, head_dim], float32.

    Raises:
        UnsupportedSetupError: attention layers without one output projection of plain weights beside them.
    """
    grams: dict[int, Tensor] = {}
    for module in model.modules():
        children = list(module.children())
        layers = [child for child in children if isinstance(child, RadixAttention)]
        outputs = [child for child in children if isinstance(child, RowParallelLinear)]
        if len(layers) != 1 or layers[0].layer_id not in places:
            continue
        weight = getattr(outputs[0], "weight", None) if len(outputs) == 1 else None
        if isinstance(weight, Tensor) and weight.dtype in PLAIN_DTYPES:
            gram = output_gram(weight, geometry.num_kv_heads, geometry.head_dim)
            grams[places[layers[0].layer_id]] = gram
    if len(grams) != geometry.num_layers:
        raise UnsupportedSetupError(
            [
                "the policy weighs values, which needs one unquantised output projection beside each attention; "
                f"found {len(grams)} in {geometry.num_layers} layers"
            ]
        )
    return torch.stack([grams[layer] for layer in sorted(grams)])
