"""What a forward reads of the tree, and who is told what its queries were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from sgl_kvevict.compression import Compressor, PromptObservation, ReaderChunk
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.ragged import SpanRuns
from sgl_kvevict.sglang_adapter.walk import WalkableTree

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sgl_kvevict.sglang_adapter.scoring import PrefixScoring


class ReadableTree(WalkableTree):
    """Tree whose compressed paths are read by requests, and whose readers are observed.

    Attributes:
        compressor: compresses completed prompts; None (policy ``none``) leaves the tree as stock.
        scoring: has prefixes read before they are compressed; None for policies that need no readers.
        guard: holds errors that concern one request or job.
        max_sharers: most requests of one batch that read one span.
    """

    compressor: Compressor | None
    scoring: PrefixScoring | None
    guard: Guard
    max_sharers: int
    _observations: WeakKeyDictionary[Req, PromptObservation]

    def read_paths(self, readers: Sequence[Req]) -> tuple[tuple[SpanRuns, ...], ...]:
        """Resolve what each request of a batch reads now: the spans on its path, root first.

        Always from the tree, never remembered: other requests may have split nodes of the path since.

        Args:
            readers: the batch's requests.
        """
        paths = []
        for req in readers:
            spans = [self.spans[node] for node in self.path(req.last_node) if node in self.spans]
            paths.append(tuple(span.runs() for span in spans))
        sharers = Counter(runs for path in paths for runs in path)
        self.max_sharers = max(self.max_sharers, *sharers.values(), 0)
        return tuple(paths)

    def observe(self, req: Req, start: int, end: int) -> list[PromptObservation | ReaderChunk]:
        """Return the observations that a prefill chunk ``[start, end)`` of a request adds to.

        Returns:
            None of them for rows that are not prefill (decode rows of a mixed batch), when the policy is ``none``,
            and for prompts too short to compress.
        """
        with self.guard.at(Place.OBSERVATION):
            return self._observe(req, start, end)
        self._observations.pop(req, None)
        return []

    def _observe(self, req: Req, start: int, end: int) -> list[PromptObservation | ReaderChunk]:
        observation = self._observations.get(req)
        if self.compressor is None or observation is None or observation.is_complete:
            return []
        prompt_len = len(req.full_untruncated_fill_ids)
        config = self.compressor.config
        if self.scoring is None and prompt_len < config.min_prefix_tokens + config.tail_tokens:
            return []
        waterline = self.waterline(self.path(req.last_node))
        slots = None
        if observation.needs_slots:
            slots = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, waterline:end].long()
        observation.begin_chunk(start, end, is_last=end >= prompt_len, key_start=waterline, token_slots=slots)
        if self.scoring is not None and (reader := self.scoring.observe(req, start, end)) is not None:
            return [reader]
        return [observation] if observation.records else []
