"""Prefills: what is observed of them, and what is done with a prompt when it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sgl_kvevict.cache.core import Core
from sgl_kvevict.cache.nodes import Node, Reader, length_of, path_to
from sgl_kvevict.cache.readers import ReaderRecord
from sgl_kvevict.cache.resize import Resizer
from sgl_kvevict.guard import Place
from sgl_kvevict.request import RequestOptions
from sgl_kvevict.segments import Recorder


class PrefillEvents(Protocol):
    """Follows prefills from the match of a prompt to its last chunk."""

    def matched(self, reader: Reader, *, is_cached: bool = True) -> ReaderRecord:
        """A request matches its prompt, possibly not for the first time, and is about to be prefilled.

        Without ``is_cached`` nothing that it computes will be in the tree.
        """

    def observe(self, reader: Reader, node: Node, start: int, end: int, prompt_len: int) -> Sequence[Recorder]:
        """A prefill of the tokens ``[start, end)`` (logical positions) of a request is about to run.

        ``node`` is the last node of its match, ``prompt_len`` the length of the whole prompt. Returns what records the
        queries of each layer.
        """

    def chunk_complete(self, reader: Reader, node: Node) -> None:
        """A chunk of a prompt that goes on is in the tree."""

    def complete(self, reader: Reader, node: Node, options: RequestOptions, num_samples: int = 0) -> None:
        """A completely prefilled prompt, of which something was observed, is in the tree.

        The path to ``node`` may be shorter than the prompt (models with windows or recurrent states). ``num_samples``:
        how many requests with the same prompt come next, all of which read it uncompressed; -1: this is one of them.
        """

    def answered(self, node: Node, start: int, end: int, options: RequestOptions) -> None:
        """The tree has a request's answer, ``[start, end)`` (logical positions) of its path, which may end before."""


class Prefills:
    """Prefills of requests: :class:`PrefillEvents`. A complete prompt is compressed."""

    def __init__(self, core: Core, resizer: Resizer) -> None:
        self._tree, self._table, self._readers, self._guard = core.tree, core.table, core.readers, core.guard
        self._spans, self._compressor, self._resizer = core.table.spans, core.compressor, resizer

    def matched(self, reader: Reader, *, is_cached: bool = True) -> ReaderRecord:
        """Observe the prompt, unless nothing of it can be compressed."""
        record = self._readers[reader]
        record.is_live = True
        is_of_use = self._compressor.policy.compresses and is_cached
        record.observation = self._compressor.new_observation() if is_of_use else None
        return record

    def observe(self, reader: Reader, node: Node, start: int, end: int, prompt_len: int) -> Sequence[Recorder]:
        """The request's observation; none for decode rows of a mixed batch, and prompts too short to compress."""
        observation = self._readers[reader].observation
        num_tokens = self._compressor.end_of(prompt_len)
        if observation is None or observation.is_complete or not self._resizer.is_long_enough(num_tokens):
            return []
        with self._guard.at(Place.OBSERVATION) as attempt:
            compressed_len = self._spans.compressed_len(path_to(node))
            slots = self._tree.slots_of(reader, compressed_len, end) if observation.needs_slots else None
            is_last = end >= prompt_len
            observation.begin_chunk(start, end, is_last=is_last, key_start=compressed_len, token_slots=slots)
        if attempt.failed:
            self._readers[reader].observation = None
            return []
        return [observation] if observation.records else []

    def chunk_complete(self, reader: Reader, node: Node) -> None:
        """Compress what is in the tree of a prompt that goes on, if its chunks are compressed, by learned scores."""
        share, observation = self._readers.chunk_share(reader), self._readers[reader].observation
        if share is None or observation is None or observation.has_failed or not self._compressor.scores_any_range:
            return
        path = path_to(node)
        self._resizer.compress(path, length_of(path), share=share, goes_on=True)

    def complete(self, reader: Reader, node: Node, options: RequestOptions, num_samples: int = 0) -> None:
        """Compress a prompt.

        It waits until slots are short if it is configured so (``compress``), or its client wants to read a share.
        """
        record = self._readers[reader]
        # Taken away first: whatever happens below, the prompt is not compressed a second time.
        observation, record.observation = record.observation, None
        if observation is None:
            return
        path = path_to(node)
        end = self._compressor.end_of(min(observation.end, length_of(path)))
        waits = self._waits(options)
        if not waits and num_samples and self._table.await_samples(node, num_samples):
            if num_samples < 0:  # the first of these samples has opened the range
                return
            waits = True
        self._resizer.compress(path, end, observation, waits=waits)

    def answered(self, node: Node, start: int, end: int, options: RequestOptions) -> None:
        """Compress an answer as its prompt, and what is still uncompressed before it; not while samples are awaited."""
        path = path_to(node)
        if not self._table.is_awaited(path):
            end = min(end, length_of(path))
            self._resizer.compress(path, end, waits=self._waits(options), goes_on=True)
            self._resizer.join_small(path_to(node), start)

    def _waits(self, options: RequestOptions) -> bool:
        """Whether what a request has computed stays uncompressed until slots are short."""
        if self._compressor.config.compress == "when short":
            return True
        return bool(options.least_share and self._compressor.scores_any_range)
