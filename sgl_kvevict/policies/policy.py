"""Policy: a scorer, a budget, a selector and optionally a merger, run once per compression."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kvevict.errors import ConfigError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.layer_view import LayerView, Show
from sgl_kvevict.policies.order import RangeOrder, facts_of, order_of
from sgl_kvevict.policies.parts import BudgetAllocator, Merger, RangeScores, Scorer, Selector, TokenScores, Trait
from sgl_kvevict.policies.signals import Signal


@dataclass(frozen=True)
class Policy:
    """A checked combination of parts (ConfigError with the reason if they do not fit together). Frozen and stateless.

    Pinned tokens (protected ones, sinks, and window tokens inside the range) are taken out of the budget first.

    Attributes:
        num_sink_tokens: first tokens of a *path* that every head keeps.
        reuse_layers: layers that share the positions chosen in the first of them.
        compresses: False of policy ``none``: nothing is observed, and none of its parts is ever asked.
    """

    name: str
    scorer: Scorer
    allocator: BudgetAllocator
    selector: Selector
    merger: Merger | None = None
    num_sink_tokens: int = 0
    reuse_layers: int = 1
    compresses: bool = True

    def __post_init__(self) -> None:
        # Checked when the policy is made: a misfit would otherwise show with the first prompt that is compressed.
        have = self.scorer.traits
        for part in (self.allocator, self.selector):
            missing = part.requires - have
            if missing:
                wanted = ", ".join(sorted(trait.value for trait in missing))
                raise ConfigError(
                    f"policy {self.name!r}: {part} needs scores that are {wanted}; those of "
                    f"{type(self.scorer).__name__} are not"
                )
        if self.reuse_layers > 1 and not self.allocator.equal_layers:
            raise ConfigError(
                f"policy {self.name!r}: reuse_layers={self.reuse_layers} needs the same budget in every "
                f"layer, which {type(self.allocator).__name__} does not give; use reuse_layers=1 or "
                "budget_rule='uniform'"
            )
        if self.reuse_layers > 1 and self.merger is not None:
            raise ConfigError(f"policy {self.name!r}: merging needs every layer, so reuse_layers must be 1")

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals that must be collected."""
        return self.scorer.needs | (frozenset() if self.merger is None else self.merger.needs)

    def order(
        self, show: Show, geometry: KVGeometry, total: int, protected: int, protected_last: int = 0
    ) -> RangeOrder:
        """Order all entries of a range, those first of which the policy keeps ``total``, over all layers and heads.

        ``show`` is called once per scored layer, in ascending order; the first ``protected`` and the last
        ``protected_last`` tokens are kept in every head. No host sync on a device, unless a part has one. ValueError if
        ``total`` does not fit the range or the protected tokens, or if a part returns tensors of a wrong shape or
        dtype. What their numbers have to be, :meth:`RangeOrder.check` says.
        """
        views = [show(layer) for layer in range(0, geometry.num_layers, self.reuse_layers)]
        num_tokens, runs = views[0].num_tokens, geometry.num_runs
        num_protected = protected + protected_last
        if not 0 <= num_protected <= total // runs or total > num_tokens * runs:
            raise ValueError(
                f"total must be between protected * {runs} = {num_protected * runs} and {num_tokens * runs} "
                f"entries ({num_tokens} tokens), got {total}"
            )
        scores = self._score(views, total // runs, protected, protected_last)
        kept = self._keep(scores, geometry, total)
        keys = order_of(scores, kept, comparable=Trait.COMPARABLE in self.scorer.traits)
        return RangeOrder(self.name, keys, total, facts_of(scores, kept))

    def _score(self, views: list[LayerView], per_head: int, protected: int, protected_last: int = 0) -> RangeScores:
        first = views[0]
        # Sinks are counted from the path's beginning: a range further down has none of its own.
        num_first = min(max(protected, self.num_sink_tokens - first.start), per_head, first.num_tokens)
        in_range, num_behind = self._kept_window(first)
        # Never more than a head keeps: a policy's window may be wider than a small budget.
        num_last = min(max(in_range, protected_last), per_head - num_first)
        stacks: list[Tensor | None] = []
        for row, view in enumerate(views):
            scores = self._scores_of(view)
            parts = (scores.values, scores.tie_break, scores.importance)
            if not stacks:
                # Filled layer by layer, because `torch.stack` would need the memory twice.
                stacks = [None if part is None else part.new_empty(len(views), *part.shape) for part in parts]
            for stack, part in zip(stacks, parts, strict=True):
                if stack is not None and part is not None:
                    stack[row] = part
        values, tie_break, importance = stacks
        assert values is not None
        return RangeScores(values, tie_break, importance, num_first, num_last, num_behind)

    def _scores_of(self, view: LayerView) -> TokenScores:
        """Score one layer; ValueError if the scorer returns something else than :class:`TokenScores` says."""
        scores, per_entry = self.scorer.score(view), (view.num_kv_heads, view.num_tokens)
        made_by = f"{type(self.scorer).__name__}, layer {view.layer}"
        self._check(f"values of {made_by}", scores.values, per_entry, torch.float32)
        if scores.tie_break is not None:
            self._check(f"tie_break of {made_by}", scores.tie_break, per_entry, torch.float32)
        if scores.importance is not None:
            self._check(f"importance of {made_by}", scores.importance, per_entry[1:], torch.float32)
        return scores

    def _check(self, what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            got = f"{tuple(tensor.shape)}, {tensor.dtype}"
            raise ValueError(f"policy {self.name!r}: {what}: got a tensor of {got}; allowed: {shape}, {dtype}")

    def _kept_window(self, view: LayerView) -> tuple[int, int]:
        """Number of tokens of the kept window inside the range, and after it."""
        if not self.scorer.kept_window:
            return 0, 0
        window = view.need_window().last(self.scorer.kept_window)
        end = min(max(view.start + view.num_tokens, window.start), window.end)
        return end - window.start, window.end - end

    def _keep(self, scores: RangeScores, geometry: KVGeometry, total: int) -> Tensor:
        """[num_layers, num_kv_heads, num_tokens], bool."""
        if total == geometry.num_runs * scores.num_tokens:
            shape = geometry.num_layers, geometry.num_kv_heads, scores.num_tokens
            return torch.ones(shape, dtype=torch.bool, device=scores.values.device)
        net = total - geometry.num_runs * scores.num_pinned
        if self.reuse_layers > 1:
            if net % geometry.num_layers:
                raise ValueError(f"with layer reuse, total must be a multiple of the layers, got {total}")
            net = net // geometry.num_layers * scores.values.shape[0]
        keep_lens = self.allocator.allocate(scores, net)
        scored = tuple(scores.values.shape)
        self._check(f"budgets of {type(self.allocator).__name__}", keep_lens, scored[:2], torch.int64)
        kept = self.selector.select(scores, keep_lens)
        self._check(f"choice of {type(self.selector).__name__}", kept, scored, torch.bool)
        if self.reuse_layers == 1:
            return kept
        return kept.repeat_interleave(self.reuse_layers, dim=0)[: geometry.num_layers]
