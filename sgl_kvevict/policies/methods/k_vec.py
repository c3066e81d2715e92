"""``k-vec``: SnapKV's scores, adjusted so that heads and layers together cover more of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import max_pool1d

from sgl_kvevict.errors import ConfigError, InvariantError
from sgl_kvevict.policies.budgets import exact_fraction
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.options import BudgetOptions, OddInt
from sgl_kvevict.policies.parts import RangeScores, Scorer, Selector, TokenScores, Trait
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.ranking import key_max, order_keys, top_mask
from sgl_kvevict.policies.signals import QueryWindow, Signal


@dataclass(frozen=True)
class CrossHeadScorer(Scorer):
    """Mean attention of the last queries; a layer's heads with the flattest scores use a longer window.

    Flattest: smallest standard deviation over the tokens. A token's importance for the layer, which the selector reads,
    is the maximum over the KV heads, averaged over the window; it is never pooled. ``rescored_share`` is rounded to
    heads, half up.

    Source: K-VEC (arXiv 2606.29563), Eq. 8, 10, 11, 13; Alg. 1, lines 2-8.
    Differs: "heads" are KV heads, and a KV head's rows are the mean over its query heads (implied by the paper's
        figures). A comment in Alg. 1 calls the flattest heads "most focused"; equation and text say least. The
        deviation (Eq. 10) is over the range and the window's tokens after it, not over tokens compressed earlier.
    Cost: window_size * num_tokens * head_dim per query head.
    """

    options: KVec
    needs = frozenset({Signal.WINDOW_QUERIES, Signal.WINDOW_KEYS, Signal.KEYS})
    traits = frozenset({Trait.COMPARABLE, Trait.IMPORTANCE})

    @property
    def window_size(self) -> int:
        return self.options.extended_window

    @property
    def kept_window(self) -> int:
        return self.options.base_window if self.options.keep_window else 0

    def num_rescored(self, num_heads: int) -> int:
        """Number of KV heads of a layer that use the longer window."""
        return int(exact_fraction(self.options.rescored_share) * num_heads + exact_fraction(0.5))

    def caution(self, num_kv_heads: int) -> str | None:
        """Warning if all or no KV heads are rescored."""
        share, count = self.options.rescored_share, self.num_rescored(num_kv_heads)
        if not share or 0 < count < num_kv_heads:
            return None
        looking = "no head looks" if count == 0 else "every head looks"
        return (
            f"rescored_share={share} of {num_kv_heads} KV heads is {count}: {looking} further back than "
            "the others, so nothing is left of the cross-head part"
        )

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer."""
        window = view.need_window().last(self.window_size)
        rows = attention_rows(view.keys, view.start, window, view.sm_scale)
        base_rows = rows[:, -self.options.base_window :]
        scores, longer = self._pool(base_rows.mean(1)), self._pool(rows.mean(1))
        count = self.num_rescored(rows.shape[0])
        if count:
            behind = _rows_after_range(view, window)[:, -self.options.base_window :].mean(1)
            # float64, because heads are ranked by a difference of nearly equal numbers.
            spread = torch.cat((scores, self._pool(behind)), dim=-1).double().std(-1, correction=0)
            flattest = spread.sort(stable=True).indices[:count]
            scores = scores.index_copy(0, flattest, longer[flattest])
        return TokenScores(scores, importance=base_rows.amax(0).mean(0))

    def _pool(self, mean: Tensor) -> Tensor:
        if self.options.kernel_size == 1 or not mean.shape[-1]:
            return mean
        pooled: Tensor = max_pool1d(mean, self.options.kernel_size, 1, self.options.kernel_size // 2)
        return pooled


def _rows_after_range(view: LayerView, window: QueryWindow) -> Tensor:
    """Attention weights of the window's queries on the window's tokens after the range."""
    first = max(view.start + view.num_tokens - window.start, 0)
    keys = view.need(Signal.WINDOW_KEYS, Tensor)[-window.queries.shape[0] :]
    return attention_rows(keys[first:], window.start + first, window, view.sm_scale)


def attention_rows(token_keys: Tensor, key_start: int, window: QueryWindow, sm_scale: float) -> Tensor:
    """[num_kv_heads, window, num_tokens], float32: attention weights, mean over the query heads of a group.

    ``token_keys`` is [num_tokens, num_kv_heads, head_dim], of consecutive tokens from ``key_start`` on. The loop over a
    group's query heads bounds the memory.
    """
    keys = token_keys.float().permute(1, 2, 0)  # [H, D, N]
    size, num_qo_heads, head_dim = window.queries.shape
    num_heads = keys.shape[0]
    group_size = num_qo_heads // num_heads
    queries = (window.queries.float() * sm_scale).view(size, num_heads, group_size, head_dim)
    lse = window.lse.view(size, num_heads, group_size)
    rows = torch.zeros(num_heads, size, keys.shape[-1], device=keys.device)
    for member in range(group_size):
        logits = queries[:, :, member].transpose(0, 1) @ keys
        rows += logits.sub_(lse[:, :, member].T.unsqueeze(-1)).exp_()
    key_positions = key_start + torch.arange(keys.shape[-1], device=keys.device)
    query_positions = window.start + torch.arange(size, device=keys.device)
    return rows.div_(group_size).masked_fill_(key_positions > query_positions[:, None], 0.0)


@dataclass(frozen=True)
class CoverageSelector(Selector):
    """Layer by layer, ranks tokens by score + ``bonus`` * importance * (1 - coverage).

    Coverage is the share of the layers so far in which any head kept the token. ``protected_share`` of a head's budget
    is reserved for its own highest scores.

    Source: K-VEC (arXiv 2606.29563), Eq. 12, 14-16; Alg. 1, lines 9-15.
    Differs: protected tokens always come first (a bonus can exceed the printed override of 1.0).
    """

    options: KVec
    requires = frozenset({Trait.IMPORTANCE})

    def select(self, scores: RangeScores, keep_lens: Tensor) -> Tensor:
        """Choose tokens; see :class:`Selector`."""
        if scores.importance is None:
            raise InvariantError("the scorer promised an importance per token and gave none")
        values, importance = scores.candidates(scores.values), scores.candidates(scores.importance)
        share = exact_fraction(self.options.protected_share)
        # The paper's share is of a budget that counts the window, inside the range or behind it.
        budgets = keep_lens + scores.num_pinned + scores.num_behind
        num_safe = (budgets * share.numerator).div(share.denominator, rounding_mode="floor")
        safe = top_mask(scores.keys, torch.minimum(num_safe, keep_lens))
        times_kept = torch.zeros_like(importance[0])
        kept = []
        for layer in range(values.shape[0]):
            focus = importance[layer] * (1 - times_kept / (layer + 1))
            keys = order_keys(values[layer] + self.options.bonus * focus)
            kept.append(top_mask(keys.masked_fill(safe[layer], key_max(keys)), keep_lens[layer]))
            times_kept = times_kept + kept[-1].any(0)
        return scores.with_pinned(torch.stack(kept))


class KVec(BudgetOptions):
    """``k-vec``."""

    name = "k-vec"
    summary = "SnapKV's scores, steered so that heads and layers together cover more of the prompt"
    source = "K-VEC (arXiv 2606.29563), Alg. 1"
    use_when = "heads that all keep the same tokens"

    base_window: int = Field(16, ge=1, description="queries at the end of the prompt that score most heads (O)")
    extended_window: int = Field(32, ge=1, description="queries that score the least focused heads (O')")
    rescored_share: float = Field(
        0.375, ge=0, le=1, description="share of a layer's KV heads, the least focused ones (delta: 3 of 8); 0 = none"
    )
    bonus: float = Field(1.0, ge=0, description="weight of the cross-layer bonus (lambda); 0 = none")
    protected_share: float = Field(
        0.25, ge=0, le=1, description="share of a head's budget sure for its own best tokens (beta)"
    )
    kernel_size: OddInt = Field(1, ge=1, description="width of a max pool along the tokens; 1 = no pool")
    keep_window: bool = Field(True, description="base-window tokens inside the range are kept without competing")

    def build(self) -> Policy:
        """Make the policy."""
        if self.extended_window < self.base_window:
            raise ConfigError(
                f"policy_options.extended_window: got {self.extended_window} for policy 'k-vec'; allowed: an "
                f"integer >= base_window = {self.base_window}"
            )
        return self.policy(CrossHeadScorer(self), CoverageSelector(self))
