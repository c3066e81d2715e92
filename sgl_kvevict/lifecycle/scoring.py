"""When a prefix is read in order to be scored, and with what: passes of our own, one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from weakref import WeakSet

from sgl_kvevict.compression import Compressor, PromptObservation, ReaderObservation
from sgl_kvevict.distill import Lesson, LessonResult
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.lifecycle.fitting import Fits
from sgl_kvevict.lifecycle.jobs import Outcome, ScoringJob, ScoringJobs
from sgl_kvevict.lifecycle.listener import REFUSED_NO_ROOM, CacheListener
from sgl_kvevict.lifecycle.nodes import Node, Reader, length_of, path_to, tokens_of
from sgl_kvevict.lifecycle.pacing import Pacing
from sgl_kvevict.lifecycle.ports import PassPort, PassState
from sgl_kvevict.lifecycle.pressure import Pressure
from sgl_kvevict.lifecycle.probes import Probes, question_probes, repetition_probes
from sgl_kvevict.lifecycle.ranges import Ranges
from sgl_kvevict.lifecycle.votes import ANSWER_REACH, Votes
from sgl_kvevict.policies.signals import Readers
from sgl_kvevict.prefix import Segment
from sgl_kvevict.request import RequestOptions, ticket_digest

MAX_WAITING_LESSONS = 16
"""Prefixes that may wait with the last queries of a prompt to be learned from; further ones are only scored."""


class PrefixScoring:
    """Counts who finds which prefix, and has prefixes read: one pass at a time, few of them beside users.

    A pass is the cached prefix and a probe after it. It locks the prefix while it runs, like any request; between
    passes nothing is held, so a prefix may be dropped, and its job with it.

    Args:
        compressor: its configuration says when a prefix is due; it learns from what was scored.
        readers: whom the policy learns from.
        ranges: compresses what was scored.
        pressure: knows what was compressed before its passes came, and shrinks it when they have.
        jobs: prefixes that wait for passes.
        votes: makes room for what passes see.
        fits: of what was compressed after its passes; they come before further passes, and count as such.
        guard: holds errors of a job; the job then ends as "failed".

    Attributes:
        listener: told of every pass.
        jobs: prefixes that wait for passes, the one under way included.
        on_learned: told what came of a prefix that was learned from.
    """

    def __init__(
        self,
        compressor: Compressor,
        readers: Readers,
        ranges: Ranges,
        pressure: Pressure,
        jobs: ScoringJobs,
        votes: Votes,
        fits: Fits,
        guard: Guard,
    ) -> None:
        self.listener = CacheListener()
        self.jobs = jobs
        self.readers = readers
        self.on_learned: Callable[[LessonResult], None] = lambda result: None
        self._compressor = compressor
        self._config = compressor.config
        self._votes = votes
        self._fits = fits
        self._ranges = ranges
        self._pressure = pressure
        self._guard = guard
        self._matches: dict[Node, int] = {}
        self._passes: WeakSet[Reader] = WeakSet()
        self._pass: Reader | None = None
        self._job: ScoringJob | None = None
        self._pacing = Pacing(self._config.pass_share, self._config.scoring_pass_tokens)

    # ---- what happens to nodes --------------------------------------------------------------------------------

    def clear(self) -> None:
        """What was cached is gone, or of no use; a pass that waits is taken out of the queue between two steps."""
        self._matches.clear()
        self.jobs.clear()
        self._job = None

    def split(self, upper: Node, lower: Node) -> None:
        """A node was cut: who found the whole of it found its upper part."""
        if lower in self._matches:
            self._matches[upper] = self._matches[lower]

    def installed(self, node: Node, segment: Segment) -> None:
        """Nodes down to this one hold a new segment: passes that were reading them go on with its entries."""
        if segment.is_measured:
            return
        for job in self.jobs.begun:
            if job.observation is not None and node in path_to(job.node):
                job.observation.hand_over(segment)

    def discard(self, node: Node) -> None:
        """A node was dropped."""
        self._matches.pop(node, None)
        job = self.jobs.at(node)
        if job is not None:
            self._end(job, Outcome.DROPPED)

    # ---- what becomes a job -----------------------------------------------------------------------------------

    def found(self, path: Sequence[Node], num_tokens: int, prompt: PromptObservation) -> None:
        """A prompt found the first ``num_tokens`` of its path in the cache: count it, and queue what is due."""
        due, end = None, 0
        needed = self._config.score_after_matches
        for node in path:
            end += len(node.key)
            if end > num_tokens:
                break
            count = self._matches[node] = self._matches.get(node, 0) + 1
            due = node if needed is not None and count >= needed else due
        if due is not None and self.readers is Readers.REPETITION:
            self._queue(ScoringJob(due, prompt=self._lasting(prompt)))

    def wished(self, path: Sequence[Node], num_tokens: int, wish: RequestOptions, prompt: PromptObservation) -> None:
        """Somebody asked to have the first ``num_tokens`` of a path scored now."""
        if not wish.questions and self.readers is not Readers.REPETITION:
            return
        if num_tokens == 0:  # a window or a recurrent state is cached at certain places only
            self.jobs.refuse(_tickets(wish), Outcome.TOO_SHORT)
            return
        node = self._ranges.node_ending_at(path, num_tokens)
        self._queue(ScoringJob(node, tuple(wish.questions), _tickets(wish), True, self._lasting(prompt)))

    def granted(self, node: Node, wish: RequestOptions, *, is_done: bool) -> None:
        """Somebody asked for a prefix that needed no passes; ``is_done``: it is compressed already."""
        self.jobs.end(ScoringJob(node, tickets=_tickets(wish)), Outcome.COMPRESSED if is_done else Outcome.IN_USE)

    def _lasting(self, prompt: PromptObservation) -> PromptObservation | None:
        """What is kept of a prompt while its prefix waits: nothing, unless something is to be learned from it."""
        learner = self._compressor.learner
        learns = learner is not None and learner.weights is None and len(self.jobs) < MAX_WAITING_LESSONS
        return prompt.without_echo() if learns else None

    def _teaches(self, job: ScoringJob) -> bool:
        """Whether something can be learned from a job's prefix; all are alike when nothing is to be learned."""
        if self._compressor.learner is None or self._compressor.has_learned:
            return True
        return job.prompt is not None and self._ranges.bounds(path_to(job.node)) is not None

    def reads(self, node: Node) -> bool:
        """Whether a node belongs to a prefix between two of its passes."""
        return any(node in path_to(job.node) for job in self.jobs.begun)

    def _queue(self, job: ScoringJob) -> None:
        path = path_to(job.node)
        if self._ranges.bounds(path) is None and not self._unread(job, path):
            self.jobs.end(job, Outcome.TOO_SHORT)
        else:
            self.jobs.add(job)

    # ---- passes -----------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Prefixes that wait for passes, or for their fit."""
        return len(self.jobs) + len(self._fits)

    @property
    def running(self) -> Reader | None:
        """The pass that waits or runs."""
        return self._pass

    def is_pass(self, reader: Reader) -> bool:
        """Whether a reader is one of our own."""
        return reader in self._passes

    def observation_of(self, reader: Reader) -> ReaderObservation | None:
        """What the pass that runs adds to; None for one whose prefix is gone."""
        return self._job.observation if reader is self._pass and self._job is not None else None

    def between_steps(self, passes: PassPort) -> None:
        """Start the next pass if it is time for one."""
        if self._pass is not None:
            self._check_pass(self._pass, passes)
            return
        if not self.num_waiting or passes.is_paused:
            return
        num_tokens = self._pacing.step(
            passes.num_users, is_counted=not passes.was_prefill, quiet_turns=passes.quiet_turns
        )
        if num_tokens == 0:
            return
        if self._fits.step():
            self._pacing.started(num_tokens)
            return
        job = self.jobs.next(self._teaches)
        assert job is not None
        if job.lesson is not None:
            self._learn(job, job.lesson)
            self._pacing.started(num_tokens)
            return
        with self._guard.at(Place.PASS):
            probes = self._prepare(job, passes)
            if probes is not None:
                probe = probes.next(num_tokens)
                if self._has_room(job, probe, passes):
                    self._start(job, probe, passes)
                    self._pacing.started(len(probe))
            return
        self._end(job, Outcome.FAILED)

    def pass_ended(self, *, aborted: bool) -> None:
        """The pass that ran is over: its job goes on with the next one, or its prefix is compressed."""
        reader, job, self._pass = self._pass, self._job, None
        if job is None or reader is None:
            return
        if aborted:
            self._end(job, Outcome.ABORTED)
            return
        with self._guard.at(Place.PASS):
            self._count_pass(job, reader)
            return
        self._end(job, Outcome.FAILED)

    def withdraw(self, passes: PassPort) -> None:
        """Take a pass that waits out of the queue; its job stays, and has another pass later."""
        if self._pass is not None and passes.state(self._pass) is PassState.WAITING:
            passes.withdraw(self._pass)
            self.let_go()

    def let_go(self) -> None:
        """The pass that runs is taken off: its job stays, and has another one later."""
        self._pass = self._job = None

    def abort(self, passes: PassPort) -> None:
        """End the job under way, and the pass that waits."""
        if self._job is not None:
            self._end(self._job, Outcome.ABORTED)
        self.withdraw(passes)

    def _check_pass(self, reader: Reader, passes: PassPort) -> None:
        """Notice a pass that was taken out of the queue, and take out one whose prefix is gone."""
        state = passes.state(reader)
        if state is PassState.GONE:
            self._pass = None
            if self._job is not None:
                self._end(self._job, Outcome.ABORTED)
        elif state is PassState.WAITING and self._job is None:
            self.withdraw(passes)

    def _start(self, job: ScoringJob, probe: Sequence[int], passes: PassPort) -> None:
        self.jobs.take_turn(job)
        job.started = time.perf_counter()
        self._pass, self._job = passes.start(job.node, probe), job
        self._passes.add(self._pass)

    def _count_pass(self, job: ScoringJob, reader: Reader) -> None:
        observation, probes = job.observation, job.probes
        assert observation is not None and probes is not None
        if observation.has_failed:
            self._end(job, Outcome.FAILED)
            return
        self.listener.scored(observation.start, observation.end, time.perf_counter() - job.started)
        observation.end_reader(reader)
        probes.was_read()
        if not self._is_as_read(job, observation):
            self._end(job, Outcome.COMPRESSED)
        elif probes.is_empty:
            self._finish(job, observation)

    def _finish(self, job: ScoringJob, observation: ReaderObservation) -> None:
        """A job's passes are over: its prefix is learned from, or compressed."""
        path = path_to(job.node)
        with self._guard.on_one_rank():
            self._pressure.was_read(path, observation)
            bounds = self._ranges.bounds(path)
            if not job.questions and job.prompt is not None and bounds is not None:
                slots = self._ranges.token_slots(path, bounds[1] - bounds[0])
                job.lesson = self._compressor.lesson(slots, observation, job.prompt)
        if job.lesson is None:
            self._compress(job, observation)
        self._job = None

    def _is_as_read(self, job: ScoringJob, observation: ReaderObservation) -> bool:
        """Whether what was compressed since passes began to read it was handed over."""
        return self._ranges.waterline(path_to(job.node)) == observation.start

    def _unread(self, job: ScoringJob, path: Sequence[Node]) -> list[Segment]:
        """Segments of a path that are to be read again; questions ask for the tokens around each one."""
        is_wanted = not job.questions and not self._compressor.compresses_at_once
        return self._pressure.unread(path) if is_wanted else []

    def _learn(self, job: ScoringJob, lesson: Lesson) -> None:
        """Learn from one more layer of a prefix; compress it after the last one."""
        with self._guard.at(Place.COMPRESSION):
            assert job.observation is not None
            result = lesson.step() if self._is_as_read(job, job.observation) else None
            if result is not None:
                self.on_learned(result)
            if result is not None or not self._is_as_read(job, job.observation):
                self._compress(job, job.observation)
            return
        self._end(job, Outcome.FAILED)

    def _compress(self, job: ScoringJob, observation: ReaderObservation) -> None:
        is_done = self._ranges.compress(job.node, self._ranges.end_of(path_to(job.node)), observation)
        self._end(job, Outcome.COMPRESSED if is_done else Outcome.IN_USE)

    def _prepare(self, job: ScoringJob, passes: PassPort) -> Probes | None:
        """What a job's passes still have to read, laid out when it begins; None if there is nothing to do."""
        path = path_to(job.node)
        if job.probes is not None and job.observation is not None:
            if self._is_as_read(job, job.observation):
                return job.probes
            self._end(job, Outcome.COMPRESSED)
            return None
        bounds, unread = self._ranges.bounds(path), self._unread(job, path)
        if bounds is None and not unread:
            self._end(job, Outcome.COMPRESSED)
            return None
        if self._compressor.compresses_at_once and job.prompt is not None and bounds is not None and not job.questions:
            is_done = self._ranges.compress(job.node, bounds[1], job.prompt)  # learned while it waited
            self._end(job, Outcome.COMPRESSED if is_done else Outcome.IN_USE)
            return None
        observed = self._ranges.waterline(path), length_of(path)
        with self._guard.on_one_rank():
            job.observation = self._votes.new_observation(observed, ANSWER_REACH if job.questions else 0, unread)
        if job.observation is None:
            self._end(job, Outcome.NO_MEMORY)
            return None
        start = unread[0].start if unread else observed[0]
        job.probes = self._lay_out(job, tokens_of(path)[start:], passes)
        return job.probes

    def _lay_out(self, job: ScoringJob, tokens: Sequence[int], passes: PassPort) -> Probes:
        """What is to follow a prefix of which ``tokens`` are to be scored."""
        if not job.questions:
            return repetition_probes(passes.tokenizer, tokens)
        assert passes.tokenizer is not None
        return Probes(question_probes(passes.tokenizer, job.questions))

    def _has_room(self, job: ScoringJob, probe: Sequence[int], passes: PassPort) -> bool:
        """Whether prefix and probe fit; if not, the job is over."""
        num_tokens = length_of(path_to(job.node))
        if num_tokens + len(probe) < passes.room:
            return True
        self.listener.refused(REFUSED_NO_ROOM, num_tokens)
        self._end(job, Outcome.NO_ROOM)
        return False

    def _end(self, job: ScoringJob, outcome: Outcome) -> None:
        self.jobs.end(job, outcome)
        if job is self._job:
            self._job = None


def _tickets(wish: RequestOptions) -> set[str]:
    """Hash of the ticket under which a wish's outcome is told, if there is one."""
    return set() if wish.ticket is None else {ticket_digest(wish.ticket)}
