"""Entry point of the life cycle: the tree, the scheduler and the attention call it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

from torch import Tensor

from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.cache.adoption import Adoption
from sgl_kvevict.cache.eviction import CostAwareRecency, StatefulRecency
from sgl_kvevict.cache.generation import Generations
from sgl_kvevict.cache.host import HostTier
from sgl_kvevict.cache.jobs import ScoringJobs
from sgl_kvevict.cache.lesson import Lesson
from sgl_kvevict.cache.listener import CacheListener
from sgl_kvevict.cache.loading import Loading
from sgl_kvevict.cache.nodes import Node, Reader, length_of, path_to
from sgl_kvevict.cache.part import Shared
from sgl_kvevict.cache.ports import PassPort, TreePort
from sgl_kvevict.cache.pressure import Pressure
from sgl_kvevict.cache.readers import ReaderRecord, ReaderTable
from sgl_kvevict.cache.records import PrefixTable
from sgl_kvevict.cache.resize import Occasion, Resizer
from sgl_kvevict.cache.saving import Saving, StoreAccess
from sgl_kvevict.cache.scoring import PrefixScoring
from sgl_kvevict.events.types import Cleared, Dropped, Repacked, Split
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.request import RequestOptions
from sgl_kvevict.segments import (
    Compressor,
    GeneratedCompressor,
    GeneratedStep,
    PromptObservation,
    ReaderChunk,
    Segment,
    SegmentPacker,
)
from sgl_kvevict.store.host import HostSegments


class Released(Enum):
    """Why a reader was released."""

    RETRACTED = auto()
    """It will come again."""
    FINISHED = auto()
    ABORTED = auto()


class PrefixManager:
    """Follows prefixes from the first prompt that holds them until they leave the tree.

    Without ``compressor`` (policy ``none``) nothing is compressed; without ``access`` nothing is stored, without
    ``host`` nothing moves to the host's memory. ``clock`` and
    ``state_slots``: see :class:`CostAwareRecency` and :class:`StatefulRecency`; None: the model has no recurrent
    layers.

    Attributes:
        resizer: None without a compressor, like ``pressure`` and ``access``.
        scoring: None unless the policy needs scoring passes.
        generations: None unless ``decode_block`` is set.
        host: None without memory on the host.
        loading: None if nothing is loaded from the store; ``saving``: None without a store.
        lesson: the text that scores are being learned from, before the first request; None afterwards.
        max_sharers: most requests that ever read one span in one forward.
    """

    def __init__(
        self,
        tree: TreePort,
        packer: SegmentPacker,
        compressor: Compressor | None,
        guard: Guard,
        clock: Callable[[], float],
        state_slots: Callable[[Node], float | None] | None = None,
        access: StoreAccess | None = None,
        host: HostSegments | None = None,
    ) -> None:
        self._tree = tree
        self.compressor = compressor
        self.guard = guard
        shrinks = compressor is not None and len(compressor.config.shares) > 1
        self.table = PrefixTable(packer, CacheListener(guard), shrinks=shrinks)
        self.spans = self.table.spans
        all_shrink = compressor is not None and compressor.config.prefill_budget is not None
        self.readers = ReaderTable(tree, all_shrink=all_shrink)
        self.order = CostAwareRecency(self.spans, clock)
        if state_slots is not None:
            self.order = StatefulRecency(self.spans, clock, state_slots)
        self.lesson: Lesson | None = None
        self.max_sharers = 0
        self._last_read: tuple[tuple[SpanRuns, ...], ...] = ()
        self.resizer: Resizer | None = None
        self.pressure: Pressure | None = None
        self.scoring: PrefixScoring | None = None
        self.generations: Generations | None = None
        self.access = None if compressor is None else access
        self.host: HostTier | None = None
        self.saving: Saving | None = None
        self.loading: Loading | None = None
        if compressor is not None:
            self._build(Shared(tree, self.table, self.readers, packer, compressor, guard), host)

    def _build(self, shared: Shared, segments: HostSegments | None) -> None:
        """Make the parts that compress; each needs only earlier ones."""
        access, policy, config = self.access, shared.compressor.policy, shared.compressor.config
        if access is not None:
            self.saving = Saving(shared, access)
        resizer = self.resizer = Resizer(shared, self.saving)
        adoption = Adoption(shared, resizer)
        if segments is not None:
            self.host = HostTier(shared, adoption, segments)
            self.order.moves = self.host.takes
        if access is not None and access.reader is not None:
            self.loading = Loading(shared, adoption, access, access.reader, self.host)
        pressure = self.pressure = Pressure(shared, resizer, self.order, shared.packer.geometry.num_token_slots)
        if config.decode_block is not None:
            suffixes = GeneratedCompressor(shared.compressor)
            self.generations = Generations(shared, resizer, suffixes, config.decode_block)
        if policy.needs_passes:
            self.scoring = PrefixScoring(shared, resizer, pressure, ScoringJobs(self.table))

    @property
    def listener(self) -> CacheListener:
        """Receives every change of the cache, and has the totals."""
        return self.table.listener

    @listener.setter
    def listener(self, listener: CacheListener) -> None:
        self.table.listener = listener

    @property
    def observation_bytes(self) -> int:
        """Memory, outside the pool, of observations and kept prompts."""
        num_bytes = self.table.prompts.num_bytes
        return num_bytes + sum(part.num_bytes for part in (self.scoring, self.generations) if part is not None)

    # ---- events of requests -----------------------------------------------------------------------------------

    def matched(self, reader: Reader, *, is_cached: bool = True) -> ReaderRecord:
        """A request matches its prompt, possibly not for the first time, and is about to be prefilled.

        Without ``is_cached`` nothing that it computes will be in the tree: nothing is observed, because nothing of it
        can be compressed.
        """
        record = self.readers[reader]
        record.is_live = True
        record.observation = None
        if self.lesson is not None and not record.is_pass:
            record.observation = self.lesson.prompt
        elif self.compressor is not None and (is_cached or record.is_pass):
            record.observation = self.compressor.new_observation()
        return record

    def chunk_observed(
        self, reader: Reader, node: Node, start: int, end: int, prompt_len: int
    ) -> list[PromptObservation | ReaderChunk]:
        """A prefill of the tokens ``[start, end)`` (logical positions) of a request is about to run.

        ``node`` is the last node of its match, ``prompt_len`` the length of the whole prompt.

        Returns:
            Observations that record the queries of each layer; none for decode rows of a mixed batch, policy ``none``,
            and prompts too short to compress.
        """
        observed: list[PromptObservation | ReaderChunk] = []
        with self.guard.at(Place.OBSERVATION) as attempt:
            observed = self._observe(reader, node, start, end, prompt_len)
        if attempt.failed:
            self.readers[reader].observation = None
        return observed

    def step_observed(
        self, readers: Sequence[Reader], seq_lens: Sequence[int], rows: Sequence[int]
    ) -> GeneratedStep | None:
        """A forward is about to run in which requests generate; see :meth:`Generations.step`."""
        if self.generations is None:
            return None
        step = None
        with self.guard.at(Place.OBSERVATION) as attempt:
            step = self.generations.step(readers, seq_lens, rows)
        if attempt.failed:
            self.generations.clear()
        return step

    def chunk_complete(self, reader: Reader, node: Node) -> None:
        """A chunk of a prompt that goes on is in the tree; it may shrink."""
        if self.pressure is not None and self.lesson is None:
            self.pressure.chunk_complete(reader, path_to(node))

    def prefilled_compressed(self, reader: Reader, node: Node) -> int:
        """Tokens of a prompt that were computed, and compressed before its last chunk was computed."""
        observation = self.readers.shrinking_prompt(reader)
        if observation is None:
            return 0
        return max(self.spans.waterline(path_to(node)) - observation.first_query, 0)

    def prompt_complete(self, reader: Reader, node: Node, wish: RequestOptions | None) -> None:
        """A completely prefilled prompt is in the tree: compress it, or count it towards passes.

        The path to ``node`` may be shorter than the prompt (models with windows or recurrent states). ``wish``: the
        request's options.
        """
        record = self.readers[reader]
        observation, record.observation = record.observation, None
        if self.compressor is None or self.resizer is None or observation is None:
            return
        if self.lesson is not None:
            self.lesson.node = node
            return
        path = path_to(node)
        end = min(observation.end, length_of(path))
        asks = wish is not None and bool(wish.questions)
        if self.compressor.compresses_at_once and not asks:
            is_in_use = self.resizer.shrink(path, end - self.compressor.config.tail_tokens, observation)
            if self.scoring is not None and wish is not None and wish.warm:
                self.scoring.granted(wish, is_in_use=is_in_use)
            return
        if self.scoring is None or self.pressure is None:
            return
        self.pressure.prompt_complete(path, end, observation)
        if not self.compressor.compresses_at_once:
            self.scoring.found(path_to(node), min(observation.first_query, end), observation)
        if wish is not None and wish.warm:
            self.scoring.wished(path_to(node), end, wish, observation)

    def released(self, reader: Reader, why: Released) -> None:
        """A request was released: forget its state and compress ranges that waited for it."""
        record = self.readers[reader]
        record.observation, record.is_live, record.is_loaded = None, False, False
        with self.guard.at(Place.RELEASE):
            if self.generations is not None:
                self.generations.end(reader)
            if self.scoring is not None and reader is self.scoring.running and why is not Released.RETRACTED:
                self.scoring.pass_ended(aborted=why is Released.ABORTED)
            if self.resizer is not None:
                self.resizer.try_wanted(Occasion.RELEASED)

    def between_steps(self, passes: PassPort) -> None:
        """The scheduler is between two steps."""
        if self.resizer is not None:
            self.resizer.between_steps()
        if self.generations is not None:
            self.generations.between_steps()
        if self.scoring is not None:
            self.scoring.between_steps(passes)
        if self.saving is not None:
            self.saving.between_steps()
        self.listener.between_steps()

    def reads(self, nodes: Sequence[Node]) -> tuple[tuple[SpanRuns, ...], ...]:
        """Return the entries that each request of a batch reads now, root first; ``nodes``: last node of each path.

        Always resolved from the tree: other requests may have split nodes of the path since the last step.
        """
        paths = tuple(self.spans.runs(path_to(last)) for last in nodes)
        if paths != self._last_read:  # the attention keeps the paths until they change
            sharers = Counter(runs for path in paths for runs in path)
            self.max_sharers = max(self.max_sharers, *sharers.values(), 0)
            self._last_read = paths
        return paths

    # ---- events of nodes --------------------------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        """A node was cut; ``lower`` is the existing object."""
        span = self.table.split(upper, lower)
        if span is not None:
            self.listener.tell(Split(upper.id, lower.id, span.start))

    def leaving(self, node: Node) -> None:
        """A leaf is about to be dropped because slots are short."""
        if self.host is not None and self.lesson is None:
            self.host.leaving(node)

    def dropped(self, node: Node) -> Tensor | None:
        """Remove the record of a leaf that leaves the tree.

        Returns:
            [num_slots], int64, token slots to release; None: its ordinary ones, because it held no span.
        """
        if self.lesson is not None:
            self.lesson.is_dropped = True
        if self.scoring is not None:
            self.scoring.dropped(node)
        drop = self.table.drop(node)
        slots = drop.slots
        if drop.owner is not None:
            assert self.resizer is not None and drop.span is not None
            slots = self.resizer.repack(drop.owner, drop.span.start)
        num_slots = len(node.key) if slots is None else slots.numel()
        released = num_slots if drop.owner is None else 0
        self.listener.tell(Dropped(node.id, len(node.key), released, drop.span is not None))
        if drop.owner is not None and num_slots:
            self.listener.tell(Repacked(drop.owner.id, self.spans[drop.owner].segment.num_slots, num_slots))
        return slots

    def cleared(self) -> None:
        """The whole tree was flushed."""
        self.forget_seen()
        self.table.clear()
        self.listener.tell(Cleared())

    def forget_seen(self) -> None:
        """Forget everything but spans: the tree is empty, or the weights have changed."""
        for _, record in self.readers.items():
            record.observation = None
        for part in (self.scoring, self.generations, self.host):
            if part is not None:
                part.clear()
        self.table.forget()
        if self.pressure is not None:
            self.pressure.clear()

    # ---- the store ----------------------------------------------------------------------------------------------

    def switch_store_off(self) -> None:
        """Stop saving and loading: the weights no longer match the store's identity."""
        if self.access is not None:
            self.access.is_on = False
        if self.loading is not None:
            self.loading.clear()

    def close_store(self, timeout_s: float) -> int:
        """Stop saving and loading, write waiting segments for up to ``timeout_s`` seconds; return how many are left."""
        assert self.access is not None
        self.switch_store_off()
        return self.access.writer.close(timeout_s)

    def store_state(self) -> dict[str, Any] | None:
        """Counts of waiting and dropped work, for ``GET /server_info``; None: there is no store."""
        if self.saving is None or self.access is None:
            return None
        loading = self.loading
        return {
            "is_on": self.access.is_on,
            "dropped": self.access.writer.num_dropped,
            "skipped": 0 if self.access.reader is None else self.access.reader.num_skipped,
            "waiting": self.access.writer.num_waiting + (0 if loading is None else loading.num_waiting),
        }

    # ---- observations -----------------------------------------------------------------------------------------

    def _observe(
        self, reader: Reader, node: Node, start: int, end: int, prompt_len: int
    ) -> list[PromptObservation | ReaderChunk]:
        observation = self.readers[reader].observation
        if self.compressor is None or self.resizer is None or observation is None or observation.is_complete:
            return []
        if self.generations is not None and end >= prompt_len:
            self.generations.begin(reader, end)
        is_observed = self.scoring is not None or self.lesson is not None
        if not is_observed and not self.resizer.is_long_enough(prompt_len - self.compressor.config.tail_tokens):
            return []
        path = path_to(node)
        waterline = self.spans.waterline(path)
        slots = self._tree.row(reader, waterline, end) if observation.needs_slots else None
        observation.begin_chunk(start, end, is_last=end >= prompt_len, key_start=waterline, token_slots=slots)
        if self.readers[reader].is_pass and (chunk := self._observe_pass(reader, path, start, end)) is not None:
            return [chunk]
        return [observation] if observation.records else []

    def _observe_pass(self, reader: Reader, path: Sequence[Node], start: int, end: int) -> ReaderChunk | None:
        """Observe a pass that reads a prefix to its end; None while it computes the prefix again."""
        if self.lesson is not None:
            seen, segments = self.lesson.readers, [] if self.lesson.text is None else [self.lesson.text]
        else:
            seen = None if self.scoring is None else self.scoring.observation_of(reader)
            spans = (self.spans.of(node) for node in path)
            segments = list({span.segment: None for span in spans if span is not None})
        if seen is None or end <= seen.end:
            return None
        parts: list[tuple[Segment, Tensor | None]] = [
            (segment, self._tree.row(reader, segment.start, segment.end) if segment.packed is None else None)
            for segment in segments
            if segment.readers is seen
        ]
        return seen.begin_chunk(reader, start, end, parts)
