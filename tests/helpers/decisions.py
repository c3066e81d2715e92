"""What a policy keeps of a range, as a list of entries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.packing import Selection
from kvevict_kernels.radix_select import largest_entries
from sgl_kvevict.config import parse_config, read_config_file
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import Policy, build_policy
from sgl_kvevict.policies.layer_view import Show
from sgl_kvevict.ragged import MergePlan

Run = Callable[..., Any]
"""A fixture that makes something."""
EXAMPLES = Path(__file__).parents[2] / "examples"
OWN_POLICIES = {"knorm": "knorm:knorm", "keydiff": "keydiff:keydiff"}
"""Dotted paths under which a user serves ``examples/policies``; importable once this module is imported."""

if str(EXAMPLES / "policies") not in sys.path:
    sys.path.insert(0, str(EXAMPLES / "policies"))


@dataclass(frozen=True, eq=False)
class Decision:
    """Kept entries, merges, and the order of all entries."""

    selection: Selection
    merge: MergePlan | None
    order: Tensor


def built(name: str, **options: Any) -> Policy:
    """A policy by its name, which is not "none"."""
    policy = build_policy(name, options)
    assert policy is not None
    return policy


def of_paper(paper: str, **options: Any) -> Policy:
    """The policy of a configuration in ``examples/papers``; ``options`` win."""
    config = parse_config(read_config_file(EXAMPLES / f"papers/{paper}.json"), paper)
    return built(config.policy, **(config.policy_options | options))


def decide(policy: Policy, show: Show, geometry: KVGeometry, total: int, protected: int = 0, last: int = 0) -> Decision:
    """Choose ``total`` entries of a range: the best of its order; each layer is shown once."""
    shown = cache(show)
    num_tokens = shown(0).num_tokens
    order = policy.order(shown, geometry, total, protected, last)
    order.check()
    lens = torch.arange(geometry.num_runs + 1, device=order.keys.device) * num_tokens
    numbers, keep_lens = largest_entries(order.keys.flatten(), lens, total)
    selection = Selection(keep_lens.view(geometry.num_layers, -1), (numbers % num_tokens).int(), total)
    merge = None
    if policy.merger is not None:
        kept = torch.zeros(order.keys.numel(), dtype=torch.bool, device=order.keys.device)
        kept[numbers] = True
        views = [shown(layer) for layer in range(geometry.num_layers)]
        merge = policy.merger.merge(views, kept.view(order.keys.shape))
    return Decision(selection, merge, order.keys)
