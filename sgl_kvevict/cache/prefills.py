"""Prefills: what is observed of them, and what is done with a prompt when it is complete."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvevict.cache.core import Core
from sgl_kvevict.cache.nodes import Node, Reader, path_to
from sgl_kvevict.cache.readers import ReaderRecord
from sgl_kvevict.cache.resize import Resizer
from sgl_kvevict.guard import Place
from sgl_kvevict.request import RequestOptions
from sgl_kvevict.segments.prompt_observation import PromptObservation, Recorder


class Prefills:
    """Follows prefills of requests from the match of a prompt to its last chunk. A complete prompt is compressed."""

    def __init__(self, core: Core, resizer: Resizer) -> None:
        self._tree, self._table, self.readers, self._guard = core.tree, core.table, core.readers, core.guard
        self._spans, self._compressor, self._resizer = core.table.spans, core.compressor, resizer

    def matched(self, reader: Reader, *, is_cached: bool = True) -> ReaderRecord:
        """A request matches its prompt, possibly not for the first time, and is about to be prefilled.

        The prompt is observed, unless nothing of it can be compressed. Without ``is_cached`` nothing that it computes
        will be in the tree.
        """
        record = self.readers[reader]
        record.is_live = True
        is_of_use = self._compressor.policy.compresses and is_cached
        record.observation = PromptObservation(self._compressor.observes) if is_of_use else None
        return record

    def observe(self, reader: Reader, node: Node, start: int, end: int, prompt_len: int) -> Sequence[Recorder]:
        """A prefill of the tokens ``[start, end)`` (logical positions) of a request is about to run.

        ``node`` is the last node of its match, ``prompt_len`` the length of the whole prompt. Returns what records the
        queries of each layer: none for decode rows of a mixed batch, and prompts too short to compress.
        """
        observation = self.readers[reader].observation
        num_tokens = self._compressor.end_of(prompt_len)
        if observation is None or observation.is_complete or not self._resizer.is_long_enough(num_tokens):
            return []
        with self._guard.at(Place.OBSERVATION) as attempt:
            compressed_len = self._spans.compressed_len(path_to(node))
            slots = self._tree.slots_of(reader, compressed_len, end) if observation.spec.needs_slots else None
            is_last = end >= prompt_len
            observation.begin_chunk(start, end, is_last=is_last, key_start=compressed_len, token_slots=slots)
        if attempt.failed:
            self.readers[reader].observation = None
            return []
        return [observation] if observation.spec.collectors else []

    def chunk_complete(self, reader: Reader, node: Node) -> None:
        """A chunk of a prompt that goes on is in the tree: compress it if chunks are, by learned scores."""
        record = self.readers[reader]
        share, observation = record.chunk_share, record.observation
        if share is None or observation is None or observation.has_failed or not self._compressor.scores_any_range:
            return
        self._resizer.compress(node, share=share, goes_on=True)

    def complete(self, reader: Reader, node: Node, options: RequestOptions, num_samples: int = 0) -> None:
        """A completely prefilled prompt, of which something was observed, is in the tree: compress it.

        It waits until slots are short if it is configured so (``compress``), or its client wants to read a share. The
        path to ``node`` may be shorter than the prompt (models with windows or recurrent states). ``num_samples``: how
        many requests with the same prompt come next, all of which read it uncompressed; -1: this is one of them.
        """
        record = self.readers[reader]
        # Taken away first: whatever happens below, the prompt is not compressed a second time.
        observation, record.observation = record.observation, None
        if observation is None:
            return
        waits = self._waits(options)
        if not waits and num_samples and self._table.await_samples(node, num_samples):
            if num_samples < 0:  # the first of these samples has opened the range
                return
            waits = True
        self._resizer.compress(node, observation.end, observation, waits=waits)

    def answered(self, node: Node, start: int, end: int, options: RequestOptions, *, is_complete: bool) -> None:
        """The tree has a request's answer, ``[start, end)`` (logical positions) of its path, which may end before.

        Compress it as its prompt, and what is still uncompressed before it; not while samples are awaited. A block of
        an answer that goes on shrinks to the budget later, with others.
        """
        if self._table.is_awaited(path_to(node)):
            return
        waits = self._waits(options)
        share = None if waits or is_complete else self._resizer.block_share
        self._resizer.compress(node, end, share=share, waits=waits, goes_on=True)
        self._resizer.settle(path_to(node), start, is_complete=is_complete)

    def _waits(self, options: RequestOptions) -> bool:
        """Whether what a request has computed stays uncompressed until slots are short."""
        if self._compressor.config.compress == "when short":
            return True
        return bool(options.least_share and self._compressor.scores_any_range)
