"""Parts of a policy (scorer, budget, selector, merger) and the data that passes between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.ranking import order_keys
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.ragged import MergePlan


class Trait(Enum):
    """Property of scores. Budget rules and selectors require traits; a missing one is an error in :class:`Policy`."""

    COMPARABLE = "comparable across heads"
    """All heads and layers are on one scale, so entries may compete across them."""
    ATTENTION_SUMS = "attention summed over all queries"
    """Column sums of attention, whose variance measures a layer's density."""
    IMPORTANCE = "given with a layer's importance of each token"
    """:attr:`TokenScores.importance` is set."""


@dataclass(frozen=True)
class TokenScores:
    """One layer's scores.

    Attributes:
        values: [num_kv_heads, num_tokens], float32, higher = keep.
        tie_break: same shape, float32; orders equal values. None: the lower position wins.
        importance: [num_tokens], float32, of each token for the whole layer (trait IMPORTANCE).
    """

    values: Tensor
    tie_break: Tensor | None = None
    importance: Tensor | None = None


@dataclass(frozen=True)
class RangeScores:
    """Scores of one range, and its pinned tokens, which every head keeps without competing.

    Attributes:
        values: [num_scored_layers, num_kv_heads, num_tokens], float32; with layer reuse, fewer rows than layers.
        tie_break: same shape, or None.
        importance: [num_scored_layers, num_tokens], or None.
        num_first: pinned tokens at the start of the range (sinks).
        num_last: pinned tokens at the end of the range (observation window).
        num_behind: tokens of the window after the range; papers count them in a budget.
    """

    values: Tensor
    tie_break: Tensor | None
    importance: Tensor | None
    num_first: int
    num_last: int
    num_behind: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in the range."""
        return self.values.shape[-1]

    @property
    def num_pinned(self) -> int:
        """Pinned tokens."""
        return self.num_first + self.num_last

    @property
    def num_candidates(self) -> int:
        """Tokens that are not pinned."""
        return self.num_tokens - self.num_pinned

    def candidates(self, per_token: Tensor) -> Tensor:
        """The candidates' part of a tensor whose last dimension is the range."""
        return per_token[..., self.num_first : self.num_tokens - self.num_last]

    @cached_property
    def keys(self) -> Tensor:
        """[num_scored_layers, num_kv_heads, num_candidates], integers in the order of the scores."""
        values = self.candidates(self.values)
        ties = None if self.tie_break is None else self.candidates(self.tie_break)
        keys = torch.empty(values.shape, dtype=torch.int32 if ties is None else torch.int64, device=values.device)
        for layer in range(values.shape[0]):  # layer by layer: the intermediate integers are as large again
            keys[layer] = order_keys(values[layer], None if ties is None else ties[layer])
        return keys

    def with_pinned(self, kept: Tensor) -> Tensor:
        """Extend a mask over candidates to the whole range, pinned tokens kept."""
        return torch.nn.functional.pad(kept, (self.num_first, self.num_last), value=True)


class Scorer(ABC):
    """Importance of each token to each head of a layer. Frozen, pure.

    Subclasses override the properties below by class attributes, dataclass fields or properties.
    """

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals to collect."""
        return frozenset()

    @property
    def traits(self) -> frozenset[Trait]:
        """Traits of the scores."""
        return frozenset()

    @property
    def window_size(self) -> int:
        """Number of last queries of the prompt that the scorer reads."""
        return 0

    @property
    def kept_window(self) -> int:
        """Number of last tokens of the prompt that every head keeps without competing."""
        return 0

    @abstractmethod
    def score(self, view: LayerView) -> TokenScores:
        """Score one layer; ValueError if the view lacks a signal."""

    def caution(self, num_kv_heads: int) -> str | None:
        """Warning for the log if an option has no effect with this number of KV heads."""
        return None


class BudgetAllocator(ABC):
    """Number of entries that each (layer, head) keeps. Frozen, pure."""

    @property
    def requires(self) -> frozenset[Trait]:
        """Traits that the scores must have."""
        return frozenset()

    @property
    def equal_layers(self) -> bool:
        """Whether every layer gets the same total, so that layers can share positions."""
        return False

    @abstractmethod
    def allocate(self, scores: RangeScores, total: int) -> Tensor:
        """[num_scored_layers, num_kv_heads], int64, each in ``[0, num_candidates]``; sums to ``total``."""


class Selector(ABC):
    """Tokens that each (layer, head) keeps. Frozen, pure."""

    @property
    def requires(self) -> frozenset[Trait]:
        """Traits that the scores must have."""
        return frozenset()

    @abstractmethod
    def select(self, scores: RangeScores, keep_lens: Tensor) -> Tensor:
        """[num_scored_layers, num_kv_heads, num_tokens], bool: pinned tokens and ``keep_lens`` candidates per head."""


class Merger(ABC):
    """Merges evicted rows into later kept ones, so that a span may be split at any token. Frozen, pure."""

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals to collect."""
        return frozenset()

    @abstractmethod
    def merge(self, views: Sequence[LayerView], kept: Tensor) -> MergePlan:
        """Plan the merge of one view per layer; ``kept`` is [num_layers, num_kv_heads, num_tokens], bool."""
