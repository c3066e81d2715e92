"""Order of a range for models with sliding windows in some layers.

Such a layer keeps the range's last ``window - 1`` tokens in every head (later queries see no more), or fewer if its
share of the token slots is smaller, whatever their order (:meth:`Source.best`). The rest of its share goes to the
layers without a window, where the policy decides. A reader of a part of the range would need other tokens, so the
segment cannot be split.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvevict_kernels.transfer import to_device
from sgl_kvevict.geometry import KVGeometry, KVScales
from sgl_kvevict.policies.layer_view import Show
from sgl_kvevict.policies.order import RangeOrder
from sgl_kvevict.policies.policy import Policy


def order_beside_windows(
    policy: Policy,
    show: Show,
    geometry: KVGeometry,
    token_slots: Tensor,
    total: int,
    protected: int,
    protected_last: int = 0,
) -> RangeOrder:
    """Order all entries of a range, as :meth:`Policy.order` does; ``token_slots`` are the range's.

    The policy, which must not merge, orders the layers without a window. They keep what is left of ``total``, the first
    ``protected`` and the last ``protected_last`` tokens among it. Keys of layers with a window are 0.
    """
    num_tokens, layers = token_slots.numel(), geometry.full_layers
    shape = geometry.num_layers, geometry.num_kv_heads, num_tokens
    order = torch.zeros(shape, dtype=torch.int16, device=token_slots.device)
    if not layers:
        return RangeOrder(policy.name, order, 0, torch.zeros(2, dtype=torch.int64))
    kept = geometry.tokens_to_keep(num_tokens, total // geometry.num_runs)
    num_last = sum(count for count, window in zip(kept, geometry.windows, strict=True) if window)
    num_rest = min(total - num_last * geometry.num_kv_heads, num_tokens * len(layers) * geometry.num_kv_heads)
    # Layers that share positions need equal budgets; the remainder stays free.
    num_rest -= num_rest % len(layers) if policy.reuse_layers > 1 else 0
    shown, others = (lambda row: show(layers[row])), _without_windows(geometry, layers)
    of_others = policy.order(shown, others, num_rest, protected, protected_last)
    order.index_copy_(0, to_device(torch.tensor(layers), order.device), of_others.keys)
    return replace(of_others, keys=order)


def _without_windows(geometry: KVGeometry, layers: tuple[int, ...]) -> KVGeometry:
    scales = geometry.scales
    if scales.k:
        scales = KVScales(tuple(scales.k[layer] for layer in layers), tuple(scales.v[layer] for layer in layers))
    return replace(geometry, num_layers=len(layers), scales=scales, windows=())
