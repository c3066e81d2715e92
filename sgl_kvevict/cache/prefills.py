"""Prefills: what is observed of them, and what is done with a prompt when it is complete."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from sgl_kvevict.cache.nodes import Node, Reader, length_of, path_to
from sgl_kvevict.cache.passes import ScoringPasses
from sgl_kvevict.cache.ports import TreePort
from sgl_kvevict.cache.pressure import Pressure
from sgl_kvevict.cache.readers import ReaderRecord, ReaderTable
from sgl_kvevict.cache.records import PrefixTable
from sgl_kvevict.cache.resize import Resizer
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.request import RequestOptions
from sgl_kvevict.segments import Compressor, PromptObservation, ReaderChunk, ReaderObservation, Segment


class Prefills(ABC):
    """Follows prefills from the match of a prompt to its last chunk. Subclasses say what is observed, and what for."""

    def __init__(self, tree: TreePort, table: PrefixTable, readers: ReaderTable, guard: Guard) -> None:
        self._tree = tree
        self._spans = table.spans
        self._readers = readers
        self._guard = guard

    def matched(self, reader: Reader, *, is_cached: bool = True) -> ReaderRecord:
        """A request matches its prompt, possibly not for the first time, and is about to be prefilled.

        Without ``is_cached`` nothing that it computes will be in the tree: nothing is observed, because nothing of it
        can be compressed.
        """
        record = self._readers[reader]
        record.is_live = True
        record.observation = self._new_observation(record, is_cached=is_cached)
        return record

    def observe(
        self, reader: Reader, node: Node, start: int, end: int, prompt_len: int
    ) -> list[PromptObservation | ReaderChunk]:
        """A prefill of the tokens ``[start, end)`` (logical positions) of a request is about to run.

        ``node`` is the last node of its match, ``prompt_len`` the length of the whole prompt.

        Returns:
            Observations that record the queries of each layer; none for decode rows of a mixed batch, policy ``none``,
            and prompts too short to compress.
        """
        observed: list[PromptObservation | ReaderChunk] = []
        with self._guard.at(Place.OBSERVATION) as attempt:
            observation = self._readers[reader].observation
            if observation is not None and not observation.is_complete and self._chunk_begins(reader, end, prompt_len):
                observed = self._observe(observation, reader, path_to(node), start, end, is_last=end >= prompt_len)
        if attempt.failed:
            self._readers[reader].observation = None
        return observed

    @abstractmethod
    def chunk_complete(self, reader: Reader, node: Node) -> None:
        """A chunk of a prompt that goes on is in the tree."""

    @abstractmethod
    def complete(self, reader: Reader, node: Node, options: RequestOptions, *, goes_on: bool = False) -> None:
        """A completely prefilled prompt is in the tree.

        The path to ``node`` may be shorter than the prompt (models with windows or recurrent states). ``goes_on``:
        other requests with the same prompt come next, and read it uncompressed.
        """

    @abstractmethod
    def _new_observation(self, record: ReaderRecord, *, is_cached: bool) -> PromptObservation | None:
        """What observes the prefill of a reader; None: nothing does."""

    @abstractmethod
    def _chunk_begins(self, reader: Reader, end: int, prompt_len: int) -> bool:
        """A prefill of a prompt's tokens up to ``end`` is about to run; return whether it is observed."""

    @abstractmethod
    def _pass_observation(
        self, reader: Reader, path: Sequence[Node]
    ) -> tuple[ReaderObservation | None, Sequence[Segment]]:
        """The observation that a pass adds to, None: to none; and the segments that it may read."""

    def _observe(
        self,
        observation: PromptObservation,
        reader: Reader,
        path: Sequence[Node],
        start: int,
        end: int,
        *,
        is_last: bool,
    ) -> list[PromptObservation | ReaderChunk]:
        compressed_len = self._spans.compressed_len(path)
        slots = self._tree.slots_of(reader, compressed_len, end) if observation.needs_slots else None
        observation.begin_chunk(start, end, is_last=is_last, key_start=compressed_len, token_slots=slots)
        if self._readers[reader].is_pass and (chunk := self._observe_pass(reader, path, start, end)) is not None:
            return [chunk]
        return [observation] if observation.records else []

    def _observe_pass(self, reader: Reader, path: Sequence[Node], start: int, end: int) -> ReaderChunk | None:
        """Observe a pass that reads a prefix to its end; None while it computes the prefix again."""
        observation, segments = self._pass_observation(reader, path)
        if observation is None or end <= observation.end:
            return None
        parts: list[tuple[Segment, Tensor | None]] = [
            (segment, self._tree.slots_of(reader, segment.start, segment.end) if segment.packed is None else None)
            for segment in segments
            if segment.readers is observation
        ]
        return observation.begin_chunk(reader, start, end, parts)


class RequestPrefills(Prefills):
    """Prefills of requests, and of scoring passes: a complete prompt is compressed, or counted towards passes."""

    def __init__(
        self,
        tree: TreePort,
        table: PrefixTable,
        readers: ReaderTable,
        compressor: Compressor,
        guard: Guard,
        resizer: Resizer,
        pressure: Pressure,
        passes: ScoringPasses,
    ) -> None:
        super().__init__(tree, table, readers, guard)
        self._compressor = compressor
        self._tail = compressor.config.tail_tokens
        self._resizer = resizer
        self._pressure = pressure
        self._passes = passes

    def chunk_complete(self, reader: Reader, node: Node) -> None:
        """Let a prompt shrink up to a chunk that is in the tree."""
        self._pressure.chunk_complete(reader, path_to(node))

    def complete(self, reader: Reader, node: Node, options: RequestOptions, *, goes_on: bool = False) -> None:
        """Compress a prompt, or count it towards passes."""
        record = self._readers[reader]
        observation, record.observation = record.observation, None
        if observation is None:
            return
        path = path_to(node)
        end = min(observation.end, length_of(path))
        is_at_once = self._compressor.compresses_at_once
        if goes_on:
            if not observation.has_failed:
                self._resizer.cover(path, end - self._tail, observation, observation.num_bytes)
            return
        if options.least_share and self._compressor.scores_any_range:
            self._pressure.prompt_complete(path, end, observation)  # it shrinks when slots are short
            return
        if is_at_once and not options.questions:
            is_in_use = self._resizer.shrink(path, end - self._tail, observation)
            if options.warm and self._passes.is_on:
                self._passes.report_warm(path_to(node), end - self._tail, options, is_in_use=is_in_use)
            return
        if not self._passes.is_on:
            return
        self._pressure.prompt_complete(path, end, observation)
        if not is_at_once:
            self._passes.on_match(path_to(node), min(observation.first_query, end), observation)
        if options.warm:
            self._passes.on_warm(path_to(node), end, options, observation)

    def _new_observation(self, record: ReaderRecord, *, is_cached: bool) -> PromptObservation | None:
        is_of_use = self._compressor.policy.compresses and (is_cached or record.is_pass)
        return self._compressor.new_observation() if is_of_use else None

    def _chunk_begins(self, reader: Reader, end: int, prompt_len: int) -> bool:
        return self._passes.is_on or self._resizer.is_long_enough(prompt_len - self._tail)

    def _pass_observation(
        self, reader: Reader, path: Sequence[Node]
    ) -> tuple[ReaderObservation | None, Sequence[Segment]]:
        spans = (self._spans.of(node) for node in path)
        return self._passes.observation_of(reader), list({span.segment: None for span in spans if span is not None})


class SampleText(Prefills):
    """The prefill of one text from which scores are learned before the first request, and of passes that repeat it.

    Nothing is compressed, counted or queued.

    Attributes:
        prompt: observation of the text's prefill.
        node: last node of its path; None until it is prefilled.
        segment: its tokens, as a segment in place that the table does not have; None before the first pass.
        readers: observation of the passes.
    """

    def __init__(
        self, tree: TreePort, table: PrefixTable, readers: ReaderTable, guard: Guard, prompt: PromptObservation
    ) -> None:
        super().__init__(tree, table, readers, guard)
        self.prompt = prompt
        self.node: Node | None = None
        self.segment: Segment | None = None
        self.readers: ReaderObservation | None = None

    def chunk_complete(self, reader: Reader, node: Node) -> None:
        """Nothing shrinks."""

    def complete(self, reader: Reader, node: Node, options: RequestOptions, *, goes_on: bool = False) -> None:
        """Note where the text is, after its prefill; passes insert nothing."""
        record = self._readers[reader]
        observation, record.observation = record.observation, None
        if observation is not None:
            self.node = node

    def _new_observation(self, record: ReaderRecord, *, is_cached: bool) -> PromptObservation | None:
        return PromptObservation(self.prompt.spec) if record.is_pass else self.prompt

    def _chunk_begins(self, reader: Reader, end: int, prompt_len: int) -> bool:
        return True

    def _pass_observation(
        self, reader: Reader, path: Sequence[Node]
    ) -> tuple[ReaderObservation | None, Sequence[Segment]]:
        return self.readers, [] if self.segment is None else [self.segment]
