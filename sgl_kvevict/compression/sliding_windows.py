"""Selection for models with sliding windows in some layers.

Such a layer keeps the range's last ``window - 1`` tokens in every head (later queries see no more), or fewer if its
share of the budget is smaller. The rest of its share goes to the layers without a window, where the policy selects. A
reader of a part of the range would need other tokens, so the segment cannot be split.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvevict_kernels.transfer import to_device
from sgl_kvevict.geometry import KVGeometry, KVScales
from sgl_kvevict.policies.layer_view import Show
from sgl_kvevict.policies.parts import Decision
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.ragged import Selection, run_entries


def last_tokens(geometry: KVGeometry, num_tokens: int, total: int) -> list[int]:
    """Per layer, the number of last tokens that a layer with a window keeps in every head; 0 for other layers."""
    share = total // geometry.num_runs
    return [min(window - 1, num_tokens, share) if window else 0 for window in geometry.windows]


def select_beside_windows(
    policy: Policy,
    show: Show,
    geometry: KVGeometry,
    num_tokens: int,
    total: int,
    protected: int,
    *,
    with_worth: bool,
    device: torch.device,
) -> Decision:
    """Choose ``total`` entries of a range, or fewer if the layers without a window keep everything.

    Arguments are those of :meth:`Policy.select`. The policy, which must not merge, selects in layers without a window;
    ``protected`` tokens are kept there. In layers with a window worth is 0: their entries are evicted by position.
    """
    others = geometry.full_layers
    lasts = torch.tensor(last_tokens(geometry, num_tokens, total))
    num_last = int(lasts.sum()) * geometry.num_kv_heads
    keep_lens = lasts.int().repeat_interleave(geometry.num_kv_heads).view(-1, geometry.num_kv_heads)
    keep_lens, chosen = to_device(keep_lens, device), to_device(torch.tensor(others), device)
    num_rest = min(total - num_last, num_tokens * len(others) * geometry.num_kv_heads)
    decision = None
    if others:
        num_rest -= num_rest % len(others) if policy.reuse_layers > 1 else 0
        part = _without_windows(geometry, others)
        decision = policy.select(lambda row: show(others[row]), part, num_rest, protected, with_worth=with_worth)
        keep_lens.index_copy_(0, chosen, decision.selection.keep_lens)
    num_entries = num_last + (num_rest if others else 0)
    lens = keep_lens.flatten().long()
    starts = lens.cumsum(0) - lens
    runs = torch.repeat_interleave(lens, output_size=num_entries)
    # The last tokens in all layers; the policy's selection overwrites the layers without a window below.
    indices = (torch.arange(num_entries, device=device) - (starts + lens - num_tokens)[runs]).int()
    worth = None
    if decision is not None:
        first, count = (x.view(keep_lens.shape)[chosen].flatten() for x in (starts, lens))
        of_others = run_entries(first, count, num_rest)
        indices[of_others] = decision.selection.indices
        if decision.worth is not None:
            worth = decision.worth.new_zeros(num_entries)
            worth[of_others] = decision.worth
    elif with_worth:
        worth = torch.zeros(num_entries, dtype=torch.int16, device=device)
    return Decision(Selection(keep_lens, indices, num_entries), worth=worth)


def _without_windows(geometry: KVGeometry, layers: tuple[int, ...]) -> KVGeometry:
    scales = geometry.scales
    if scales.k:
        scales = KVScales(tuple(scales.k[layer] for layer in layers), tuple(scales.v[layer] for layer in layers))
    return replace(geometry, num_layers=len(layers), scales=scales, windows=())
