"""The requests of one forward: the spans and tokens that each of them reads; layouts of the batches that recur."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvevict_kernels.row_sizes import WIDTHS
from kvevict_kernels.span_runs import SpanRuns, compressed_len_of
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.support import MAX_DRAFTS

Path = tuple[SpanRuns, ...]
"""A request's spans, root first; () if nothing of it is compressed."""


class BatchKey(NamedTuple):
    """The part of a batch that later steps of the same requests share: the key under which layouts are kept."""

    paths: tuple[Path, ...]  # per request
    new_lens: tuple[int, ...]  # per request, new tokens
    suffix_bounds: tuple[int, ...] = ()  # per request, a bound of the tokens after its path, where it sizes a layout
    is_tree: bool = False  # the new tokens are trees


@dataclass(frozen=True)
class AttentionBatch:
    """The requests of one forward.

    The tokens ``[0, compressed_len)`` of a request are compressed into the spans of its path. Each token of
    ``[compressed_len, seq_len)`` has a token slot, in the request's row of ``req_to_token``; the last ``extend_len``
    are new. A row holds fillers in place of compressed tokens, which must not be read.

    With ``visible`` the new tokens of a request are nodes of a tree, each after its ancestors. A node sees everything
    before the new tokens, its ancestors and itself. Its position is that of the first new token plus its depth. Layers
    with a window must not be narrower than the new tokens of a request.

    Raises:
        InvariantError: contradictory lengths, for example more compressed tokens than come before the first new token,
            or a tree of more than ``MAX_DRAFTS`` tokens.
    """

    paths: tuple[Path, ...]  # per request
    seq_lens: list[int]  # per request, logical tokens including the new ones
    extend_lens: list[int] | None  # per request, new tokens; None: a decode step, one new token each
    req_pool_indices: Tensor  # [num_requests], int, rows of ``req_to_token``
    req_to_token: Tensor  # [num_rows, max_context_len], int32, token slots
    device_seq_lens: Tensor | None = None  # [num_requests], int, ``seq_lens`` on the arenas' device, if already there
    # [num_new_tokens], int64, on the arenas' device: bit j is set if the token sees its request's j-th new token. None:
    # every new token sees those before it
    visible: Tensor | None = None

    def __post_init__(self) -> None:
        num_requests = len(self.seq_lens)
        new_lens = self.new_lens
        counts = (len(self.paths), len(new_lens), self.req_pool_indices.numel())
        if any(count != num_requests for count in counts):
            raise InvariantError(f"paths, extend_lens, req_pool_indices: expected {num_requests} of each, got {counts}")
        for i, (compressed_len, seq_len, new) in enumerate(
            zip(self.compressed_lens, self.seq_lens, new_lens, strict=True)
        ):
            # Behind this check stands that no filler of a row is read: a filler is some other token's slot.
            if not 0 <= compressed_len <= seq_len - new <= seq_len <= self.req_to_token.shape[1]:
                raise InvariantError(
                    f"request {i}: compressed_len {compressed_len}, {new} new of {seq_len} tokens, "
                    f"rows of {self.req_to_token.shape[1]}: expected compressed_len <= first new token <= row length"
                )
        if self.visible is not None and (self.visible.numel() != sum(new_lens) or max(new_lens) > MAX_DRAFTS):
            raise InvariantError(
                f"visible: expected one number for each of {sum(new_lens)} new tokens, at most {MAX_DRAFTS} per "
                f"request, got {self.visible.numel()} for {new_lens}"
            )

    @cached_property
    def compressed_lens(self) -> list[int]:
        """Per request, tokens that are compressed into the spans of its path."""
        return [compressed_len_of(path) for path in self.paths]

    @property
    def new_lens(self) -> list[int]:
        """New tokens per request."""
        return [1] * len(self.seq_lens) if self.extend_lens is None else self.extend_lens

    def tree(self, request: int) -> Tensor | None:
        """[num_new, num_new], bool: the new tokens that each new token of a request sees; None: those before it."""
        if self.visible is None:
            return None
        first, new = sum(self.new_lens[:request]), self.new_lens[request]
        return (self.visible[first : first + new, None] >> torch.arange(new, device=self.visible.device)) & 1 == 1

    @property
    def key(self) -> BatchKey:
        """The key of layouts that do not depend on the lengths of suffixes."""
        return BatchKey(self.paths, tuple(self.new_lens), is_tree=self.visible is not None)


def require_widths(paths: Iterable[Path], *, has_coding: bool) -> None:
    """InvariantError for spans that cannot be read: without statistics of the model, those of 4 bits."""
    for span in (span for path in paths for span in path):
        if span.bits != WIDTHS[0] and not (has_coding and span.bits in WIDTHS):
            raise InvariantError(f"a span has rows of {span.bits} bits, which this attention was not built to read")


MAX_BATCHES = 2
"""A server alternates between at most two recurring batches: decode steps, and decode rows inside prefill steps."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RecentBatches(Generic[K, V]):
    """Keeps the layouts of the ``MAX_BATCHES`` most recently used batches.

    ``on_drop`` releases a dropped layout's resources; it is called before the new layout is built.
    """

    def __init__(self, on_drop: Callable[[V], None] | None = None) -> None:
        self._on_drop = on_drop
        self._kept: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, build: Callable[[], V]) -> V:
        """Return the layout of a batch; if it is not kept, drop the least recently used one and ``build`` it."""
        # Taken out and put back: the order of the dictionary is that of the last use.
        value = self._kept.pop(key, None)
        if value is None:
            if len(self._kept) == MAX_BATCHES:
                _, oldest = self._kept.popitem(last=False)
                if self._on_drop is not None:
                    self._on_drop(oldest)
            value = build()
        self._kept[key] = value
        return value
