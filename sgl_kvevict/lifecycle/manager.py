"""The entry point: what the tree and the attention tell, and what follows from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from weakref import WeakKeyDictionary

from torch import Tensor

from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.compression import Compressor, GeneratedCompressor, GeneratedStep, PromptObservation, ReaderChunk
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.lifecycle.eviction import CostAwareRecency, StatefulRecency
from sgl_kvevict.lifecycle.fitting import Fits
from sgl_kvevict.lifecycle.generation import Generations
from sgl_kvevict.lifecycle.jobs import ScoringJobs
from sgl_kvevict.lifecycle.listener import CacheListener
from sgl_kvevict.lifecycle.nodes import Node, Reader, length_of, path_to
from sgl_kvevict.lifecycle.ports import PassPort, TreePort
from sgl_kvevict.lifecycle.pressure import Pressure
from sgl_kvevict.lifecycle.ranges import Ranges
from sgl_kvevict.lifecycle.readers import LiveReaders
from sgl_kvevict.lifecycle.scoring import PrefixScoring
from sgl_kvevict.lifecycle.spans import SpanTable
from sgl_kvevict.lifecycle.storing import StoredPrefixes
from sgl_kvevict.lifecycle.votes import Votes
from sgl_kvevict.prefix import SegmentPacker
from sgl_kvevict.request import RequestOptions


class Released(Enum):
    """Why a reader let go of its path."""

    RETRACTED = auto()
    """It will come again."""
    FINISHED = auto()
    ABORTED = auto()


class PrefixManager:
    """Follows prefixes from the first prompt that holds them to the moment they leave the tree.

    Args:
        tree: whose nodes.
        store: where segments are written.
        compressor: what is kept; None (policy ``none``): nothing is ever compressed.
        guard: holds errors that concern one request or job.
        clock: numbers accesses, in the order in which nodes note theirs.
        state_slots: token slots that the memory of a node's recurrent state would make, None for a node without; None:
            the model has no such layers.

    Attributes:
        spans: what nodes hold.
        order: what gives way first when slots are short.
        readers: requests that matched and have not let go.
        ranges: what is to be compressed; None without a compressor.
        pressure: what shrinks when slots are short; None without a compressor.
        scoring: has prefixes read before they are compressed; None for policies that need no readers.
        fits: of what was compressed after its passes; None for policies that need no readers.
        generations: compresses what requests generate; None unless ``decode_block`` is set.
        stored: keeps prefixes in a store; None: nothing does.
        max_sharers: most requests that ever read one span in one forward.
    """

    def __init__(
        self,
        tree: TreePort,
        store: SegmentPacker,
        compressor: Compressor | None,
        guard: Guard,
        clock: Callable[[], float],
        state_slots: Callable[[Node], float | None] | None = None,
    ) -> None:
        self.spans = SpanTable(store)
        self.order = CostAwareRecency(self.spans, clock)
        if state_slots is not None:
            self.order = StatefulRecency(self.spans, clock, state_slots)
        self.compressor = compressor
        self.guard = guard
        self.ranges: Ranges | None = None
        self.scoring: PrefixScoring | None = None
        self.votes: Votes | None = None
        self.fits: Fits | None = None
        self.generations: Generations | None = None
        self.readers = LiveReaders(tree)
        self.pressure: Pressure | None = None
        self.max_sharers = 0
        self._last_read: tuple[tuple[SpanRuns, ...], ...] = ()
        self._tree = tree
        self._observations: WeakKeyDictionary[Reader, PromptObservation] = WeakKeyDictionary()
        self._listener = CacheListener(guard)
        self.stored: StoredPrefixes | None = None
        if compressor is None:
            return
        self.ranges = Ranges(tree, self.spans, self.readers, compressor, guard)
        num_slots = store.geometry.num_token_slots
        self.pressure = Pressure(tree, self.spans, self.ranges, self.readers, compressor, self.order, num_slots)
        self.ranges.on_installed = self._installed
        config = compressor.config
        if config.decode_block is not None:
            suffixes = GeneratedCompressor(compressor)
            self.generations = Generations(
                tree, self.spans, self.readers, self.ranges, suffixes, config.decode_block, config.tail_tokens, guard
            )
        readers = compressor.policy.readers
        if readers is not None:
            jobs = ScoringJobs()
            fits = self.fits = Fits(self.spans, compressor, guard)
            votes = self.votes = Votes(compressor, self.ranges, jobs, fits)
            self.scoring = PrefixScoring(compressor, readers, self.ranges, self.pressure, jobs, votes, fits, guard)
            self.ranges.on_fit = fits.add
            self.pressure.is_being_read = self.scoring.reads
        self.listener = self._listener

    @property
    def listener(self) -> CacheListener:
        """Hears of every change, and has the totals."""
        return self._listener

    @listener.setter
    def listener(self, listener: CacheListener) -> None:
        self._listener = listener
        for part in (self.ranges, self.pressure, self.scoring, self.votes, self.generations, self.stored):
            if part is not None:
                part.listener = listener

    @property
    def observation_bytes(self) -> int:
        """Memory, outside the pool, of what readers attended to and of what waits."""
        parts = (self.ranges, self.pressure, self.votes, self.generations)
        return sum(part.num_bytes for part in parts if part is not None)

    def use_store(self, stored: StoredPrefixes) -> None:
        """Keep prefixes in a store from now on."""
        assert self.ranges is not None
        self.stored = stored
        self.ranges.on_budget = stored.on_budget
        if self.fits is not None:
            self.fits.on_ended = stored.on_budget
        stored.listener = self._listener

    # ---- what happens to requests -----------------------------------------------------------------------------

    def matched(self, reader: Reader) -> None:
        """A request looked for its prompt, maybe again, and is about to be prefilled."""
        self.readers.add(reader)
        if self.compressor is not None:
            with self.guard.at(Place.PROMPT):
                self._observations[reader] = self.compressor.new_observation()

    def chunk_observed(
        self, reader: Reader, node: Node, start: int, end: int, prompt_len: int
    ) -> list[PromptObservation | ReaderChunk]:
        """A prefill of the tokens ``[start, end)`` of a request is about to run.

        Args:
            reader: the request.
            node: last node of what it found in the cache.
            start: logical position of the first new token.
            end: logical position after the last one.
            prompt_len: tokens of the whole prompt.

        Returns:
            What the queries of each layer are to be recorded in: nothing for rows that are not prefill (decode rows
            of a mixed batch), when the policy is ``none``, and for prompts too short to compress.
        """
        with self.guard.at(Place.OBSERVATION):
            return self._observe(reader, node, start, end, prompt_len)
        self.forget_observed(reader)
        return []

    def step_observed(
        self, readers: Sequence[Reader], seq_lens: Sequence[int], rows: Sequence[int]
    ) -> GeneratedStep | None:
        """A forward is about to run in which requests generate; see :meth:`Generations.step`."""
        if self.generations is None:
            return None
        with self.guard.at(Place.OBSERVATION):
            return self.generations.step(readers, seq_lens, rows)
        self.generations.clear()
        return None

    def forget_observed(self, reader: Reader) -> None:
        """What was seen of a request is of no use: something went wrong."""
        self._observations.pop(reader, None)

    def is_complete(self, reader: Reader) -> bool:
        """Whether the whole prompt of a request was prefilled, and has not been dealt with."""
        observation = self._observations.get(reader)
        return observation is not None and observation.is_complete

    def prompt_complete(self, reader: Reader, node: Node, wish: RequestOptions | None) -> None:
        """A prompt that was seen to its end is in the tree: compress it, or see who has to read it first.

        Args:
            reader: the request.
            node: last node of its path; it may end before the prompt (what models with a window or a recurrent
                state cache is shorter).
            wish: what the request asked of the cache.
        """
        observation = self._observations.pop(reader)
        if self.compressor is None or self.ranges is None:
            return
        path = path_to(node)
        end = min(observation.end, length_of(path))
        asks = wish is not None and bool(wish.questions)
        if self.compressor.compresses_at_once and not asks:
            is_done = self.ranges.compress(node, end - self.compressor.config.tail_tokens, observation)
            if self.scoring is not None and wish is not None and wish.warm:
                self.scoring.granted(node, wish, is_done=is_done)
            return
        if self.scoring is None or self.pressure is None:
            return
        self.pressure.prompt_complete(path, end, observation)
        path = path_to(node)
        self.scoring.found(path, min(observation.first_query, end), observation)
        if self.votes is not None:
            self.votes.count(reader, observation.first_query, path)
        if wish is not None and wish.warm:
            self.scoring.wished(path_to(node), end, wish, observation)

    def released(self, reader: Reader, why: Released) -> None:
        """A request let go of its path: forget its state and compress what waited for it."""
        self._observations.pop(reader, None)
        self.readers.discard(reader)
        with self.guard.at(Place.RELEASE):
            if self.generations is not None:
                self.generations.end(reader)
            if self.scoring is not None and reader is self.scoring.running and why is not Released.RETRACTED:
                self.scoring.pass_ended(aborted=why is Released.ABORTED)
            if self.ranges is not None:
                self.ranges.try_pending()

    def between_steps(self, passes: PassPort) -> None:
        """The scheduler is between two steps."""
        if self.generations is not None:
            self.generations.between_steps()
        if self.scoring is not None:
            self.scoring.between_steps(passes)
        if self.stored is not None:
            self.stored.between_steps()
        self._listener.between_steps()

    def reads(self, nodes: Sequence[Node]) -> tuple[tuple[SpanRuns, ...], ...]:
        """Resolve what each request of a batch reads now: the spans on its path, root first.

        Always from the tree, never remembered: other requests may have split nodes of the path since.

        Args:
            nodes: last node of each request's path.
        """
        paths = tuple(self.spans.runs(path_to(last)) for last in nodes)
        if paths != self._last_read:  # the attention keeps them for as long
            sharers = Counter(runs for path in paths for runs in path)
            self.max_sharers = max(self.max_sharers, *sharers.values(), 0)
            self._last_read = paths
        return paths

    # ---- what happens to nodes --------------------------------------------------------------------------------

    def _installed(self, nodes: Sequence[Node]) -> None:
        """Consecutive nodes hold a new segment."""
        if self.pressure is not None:
            self.pressure.installed(nodes)
        if self.scoring is not None:
            self.scoring.installed(nodes[-1], self.spans[nodes[-1]].segment)

    def split(self, upper: Node, lower: Node) -> None:
        """A node was cut; ``lower`` is the node that it was."""
        if self.scoring is not None:
            self.scoring.split(upper, lower)
        if self.pressure is not None:
            self.pressure.split(upper, lower)
        span = self.spans.split(upper, lower)
        if span is not None:
            self._listener.split(upper, lower, span.start)

    def dropped(self, node: Node) -> Tensor | None:
        """A leaf leaves the tree, and what was known of its prefix with it.

        Returns:
            [num_slots], int64, token slots that come back; None: it held no span, so they are its ordinary ones.
        """
        for part in (self.ranges, self.pressure, self.scoring, self.votes, self.fits):
            if part is not None:
                part.discard(node)
        drop = self.spans.drop(node, self._tree.largest)
        if drop is None:
            self._listener.dropped(node, None, len(node.key))
            return None
        if drop.owner is None:
            self._listener.dropped(node, drop.span, drop.slots.numel())
            return drop.slots
        self._listener.dropped(node, drop.span, 0)
        self._tree.charge(drop.owner, -drop.slots.numel())
        self._listener.repacked(drop.owner, self.spans[drop.owner].segment, drop.slots.numel())
        return drop.slots

    def cleared(self) -> None:
        """The whole tree was flushed."""
        self.spans.clear()
        self.forget_seen()
        self._listener.cleared()

    def forget_seen(self) -> None:
        """Nothing that was seen or scored is of use any more: the tree is empty, or the model has other weights."""
        self._observations.clear()
        for part in (self.ranges, self.pressure, self.scoring, self.votes, self.fits, self.generations):
            if part is not None:
                part.clear()

    # ---- observations -----------------------------------------------------------------------------------------

    def _observe(
        self, reader: Reader, node: Node, start: int, end: int, prompt_len: int
    ) -> list[PromptObservation | ReaderChunk]:
        observation = self._observations.get(reader)
        if self.compressor is None or observation is None or observation.is_complete:
            return []
        if self.generations is not None and end >= prompt_len:
            self.generations.begin(reader, end)
        config = self.compressor.config
        if self.scoring is None and prompt_len < config.min_prefix_tokens + config.tail_tokens:
            return []
        path = path_to(node)
        waterline = self.spans.waterline(path)
        slots = self._tree.row(reader, waterline, end) if observation.needs_slots else None
        observation.begin_chunk(start, end, is_last=end >= prompt_len, key_start=waterline, token_slots=slots)
        seen = None
        if self.scoring is not None and self.scoring.is_pass(reader):
            seen = self.scoring.observation_of(reader)
        elif self.votes is not None:
            seen = self.votes.observation(path, start)
        if seen is not None and end > seen.end and waterline <= seen.start:  # else it is computed again, or compressed
            segments = {self.spans[above].segment: None for above in path if above in self.spans}
            return [seen.begin_chunk(reader, start, end, self._tree.row(reader, seen.start, seen.end), tuple(segments))]
        return [observation] if observation.records else []
