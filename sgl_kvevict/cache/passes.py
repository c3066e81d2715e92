"""Scoring passes: which prefixes they read before compression, when, and with which probes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence

from sgl_kvevict.cache.job import Outcome, ScoringJob
from sgl_kvevict.cache.nodes import (
    NamespaceKey,
    Node,
    Reader,
    has_images,
    key_of,
    length_of,
    namespace_of,
    path_to,
    tokens_of,
)
from sgl_kvevict.cache.pacing import Pacing
from sgl_kvevict.cache.ports import PassPort, PassState, TreePort
from sgl_kvevict.cache.pressure import Pressure
from sgl_kvevict.cache.probes import Probes, question_probes, repetition_probes
from sgl_kvevict.cache.readers import ReaderTable, Released
from sgl_kvevict.cache.records import PrefixTable
from sgl_kvevict.cache.resize import Resizer
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.request import RequestOptions, ticket_digest
from sgl_kvevict.segments import Compressor, PromptObservation, ReaderObservation, Segment, bytes_of

MAX_REMEMBERED = 256
"""Outcomes kept for tickets."""
MAX_JOBS = 1024
"""Prefixes that may wait for passes, of one namespace at most half of them; further requests are answered "busy"."""
MAX_BEGUN_JOBS = 4
"""Jobs that have begun, and so hold memory; others begin when one of them ends."""
ANSWER_RADIUS = 15
"""Tokens on each side of an attended one that share its score: a question's answer may stand there."""
MAX_KEPT_PROMPTS = 16
"""Prefixes that may wait for passes with the last queries of a prompt; learned scores rank further ones without any."""


class ScoringJobs:
    """Jobs in order of arrival, at most one per node; round-robin over namespaces.

    ``outcomes``: by ticket, newest last, at most ``MAX_REMEMBERED``.
    """

    def __init__(self, table: PrefixTable) -> None:
        self.outcomes: OrderedDict[str, str] = OrderedDict()
        self._table = table
        self._queue = table.jobs
        self._last_served: dict[NamespaceKey, int] = {}
        self._num_served = 0

    def __len__(self) -> int:
        return len(self._queue)

    def next(self) -> ScoringJob | None:
        """The oldest job of the namespace that was served least recently; None: there is no job."""
        begun = self._table.begun_jobs
        candidates = begun if len(begun) >= MAX_BEGUN_JOBS else self._queue.values()
        last_served = self._last_served.get
        return min(candidates, key=lambda job: last_served(namespace_of(job.node), 0), default=None)

    @property
    def num_bytes(self) -> int:
        """Memory of passes' observations, and of prompts kept with them."""
        kept = (part for job in self._queue.values() for part in (job.observation, job.prompt) if part is not None)
        return sum(part.num_bytes for part in kept)

    def note_served(self, job: ScoringJob) -> None:
        """Note that a pass of a job starts."""
        self._num_served += 1
        self._last_served[namespace_of(job.node)] = self._num_served

    def add(self, job: ScoringJob) -> None:
        """Queue a job, or merge it into the queued job of the same prefix.

        Until that one has begun, the questions of the newest request replace the earlier ones. A job that finds no
        place is reported as "busy".
        """
        queued = self._queue.get(job.node)
        if queued is None and self._has_place(namespace_of(job.node)):
            self._queue.put(job.node, job)
        elif queued is None or len(queued.tickets) + len(job.tickets) > MAX_REMEMBERED:
            self.report(job.tickets, Outcome.BUSY)
            return
        else:
            queued.tickets |= job.tickets
            if job.is_wanted and queued.observation is None:
                queued.questions = job.questions
        self.report(job.tickets, Outcome.QUEUED)

    def _has_place(self, namespace: NamespaceKey) -> bool:
        own = sum(namespace_of(node) == namespace for node, _ in self._queue)
        return len(self) < MAX_JOBS and own < MAX_JOBS // 2

    def end(self, job: ScoringJob, outcome: Outcome) -> None:
        """Remove a job and report its outcome."""
        self.report(job.tickets, outcome)
        if self._queue.get(job.node) is not job:
            return
        self._queue.take(job.node)
        if job.observation is not None:
            self._table.unobserve(job.observation)
        waiting = {namespace_of(node) for node, _ in self._queue}
        self._last_served = {name: number for name, number in self._last_served.items() if name in waiting}

    def report(self, tickets: Collection[str], outcome: Outcome) -> None:
        """Report an outcome under tickets."""
        for ticket in tickets:
            self.outcomes[ticket] = outcome.value
            self.outcomes.move_to_end(ticket)
        while len(self.outcomes) > MAX_REMEMBERED:
            self.outcomes.popitem(last=False)


class ScoringPasses:
    """Counts prompts per prefix, and runs scoring passes, one at a time and few of them beside users.

    A pass is the cached prefix and a probe after it. It locks the prefix while it runs, like any request; between
    passes nothing is locked, so a prefix may be dropped, and its job with it. After an error a job ends as "failed".
    Prefixes with images get none: SGLang would have to compute the images again where a part of the prefix was dropped
    meanwhile.

    Observations of passes share one limit of memory (``observation_bytes``).

    Attributes:
        is_on: whether the policy needs passes; if not, there are no jobs.
        jobs: prefixes that wait for passes, the one under way included.
    """

    def __init__(
        self,
        tree: TreePort,
        table: PrefixTable,
        readers: ReaderTable,
        compressor: Compressor,
        guard: Guard,
        resizer: Resizer,
        pressure: Pressure,
    ) -> None:
        self.is_on = compressor.policy.needs_passes
        self.jobs = ScoringJobs(table)
        self._tree = tree
        self._table = table
        self._spans = table.spans
        self._readers = readers
        self._compressor = compressor
        self._packer = compressor.packer
        self._config = compressor.config
        self._guard = guard
        self._resizer = resizer
        self._pressure = pressure
        self._pass: Reader | None = None
        self._job: ScoringJob | None = None
        self._pacing = Pacing(self._config.pass_share, self._config.scoring_pass_tokens)

    # ---- which prefixes become jobs -----------------------------------------------------------------------------

    def on_match(self, path: Sequence[Node], num_tokens: int, prompt: PromptObservation) -> None:
        """Count a prompt that matched the first ``num_tokens`` of its path, and queue a job if one is due.

        No pass reads a prefix with an image. If one is due, learned scores compress it, unless a pass is still to read
        the text before the first image.
        """
        needed = self._config.score_after_matches or 1
        due: dict[bool, Node] = {}  # by whether the path to the node has an image
        end, is_seen = 0, False
        for node in path:
            end += len(node.key)
            if end > num_tokens:
                break
            is_seen = is_seen or has_images(node)
            count = self._table.count_match(node)
            if count >= needed:
                due[is_seen] = node
        if False in due:
            self._queue(ScoringJob(due[False], prompt=self._kept(prompt)), prompt)
        if True in due and (False not in due or self._table.jobs.get(due[False]) is None):
            self._queue(ScoringJob(due[True]), prompt)

    def on_warm(
        self, path: Sequence[Node], num_tokens: int, options: RequestOptions, prompt: PromptObservation
    ) -> None:
        """Queue a job for the first ``num_tokens`` of a path, as a request asked."""
        if num_tokens == 0:  # windows and recurrent states are cached at certain positions only
            self.jobs.report(_tickets(options), Outcome.TOO_SHORT)
            return
        node = self._resizer.node_ending_at(path, num_tokens)
        job = ScoringJob(node, tuple(options.questions), _tickets(options), True, self._kept(prompt))
        self._queue(job, prompt)

    def report_warm(self, path: Sequence[Node], end: int, options: RequestOptions, *, is_in_use: bool) -> None:
        """Report the outcome of the first ``end`` tokens of a path, a prefix that needed no passes."""
        outcome = self._outcome_of(path, end, is_in_use=is_in_use)
        self.jobs.report(_tickets(options), Outcome.TOO_SHORT if self._resizer.is_too_short(path, end) else outcome)

    def _kept(self, prompt: PromptObservation) -> PromptObservation | None:
        """A prompt's observation if learned scores need it with a job; None if it is not kept."""
        is_needed = self._compressor.scores_any_range and len(self.jobs) < MAX_KEPT_PROMPTS
        return prompt if is_needed else None

    def _queue(self, job: ScoringJob, prompt: PromptObservation) -> None:
        """Queue a job; a prefix with images is compressed by learned scores instead, with ``prompt``'s queries."""
        path = path_to(job.node)
        if any(map(has_images, path)):
            outcome = Outcome.HAS_IMAGES
            if self._compressor.scores_any_range:
                end = self._resizer.end_of(path)
                is_in_use = self._resizer.shrink(path, end, prompt)
                outcome = self._outcome_of(path_to(job.node), end, is_in_use=is_in_use)
            self.jobs.report(job.tickets, outcome)
        elif self._resizer.bounds(path) is None and not self._unmeasured(job, path):
            done = Outcome.QUESTIONS_TOO_LATE if job.questions else Outcome.COMPRESSED
            is_short = self._resizer.is_too_short(path, self._resizer.end_of(path))
            self.jobs.report(job.tickets, Outcome.TOO_SHORT if is_short else done)
        else:
            self.jobs.add(job)

    # ---- passes -----------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """See :attr:`ScoringJobs.num_bytes`."""
        return self.jobs.num_bytes

    @property
    def running(self) -> Reader | None:
        """The pass that waits or runs."""
        return self._pass

    def observation_of(self, reader: Reader) -> ReaderObservation | None:
        """The observation that the running pass adds to; None if its prefix is gone."""
        return self._job.observation if reader is self._pass and self._job is not None else None

    def between_steps(self, passes: PassPort) -> None:
        """Start the next pass if it is time."""
        if not self.is_on:
            return
        if self._pass is not None:
            self._check_pass(self._pass, passes)
        has_pass = self._pass is not None
        num_tokens = self._pacing.turn(passes.now, has_users=passes.has_users, has_pass=has_pass)
        if has_pass or not len(self.jobs):
            return
        if passes.is_paused or passes.has_waiting:
            num_tokens = 0
        num_tokens = -self._tree.largest(-num_tokens)  # each rank has a clock of its own; all must allow it
        if num_tokens == 0:
            return
        job = self.jobs.next()
        assert job is not None
        self._serve(job, passes, num_tokens)

    def released(self, reader: Reader, why: Released) -> None:
        """If a released reader is the running pass, end it: its job continues, or its prefix is compressed."""
        if reader is not self._pass or why is Released.RETRACTED:
            return
        job, self._pass = self._job, None
        if job is None:
            return
        if why is Released.ABORTED:
            self._end(job, Outcome.ABORTED)
            return
        with self._guard.at(Place.PASS) as attempt:
            self._count_pass(job)
            self._pass_read(job)
        if attempt.failed:
            self._end(job, Outcome.FAILED)

    def withdraw(self, passes: PassPort) -> None:
        """Take a waiting pass out of the queue; its job gets another pass later."""
        if self._pass is not None and passes.state(self._pass) is PassState.WAITING:
            passes.withdraw(self._pass)
            self._pacing.withdrawn()
            self.forget_running()

    def forget_running(self) -> None:
        """Forget the running pass; its job gets another one later."""
        self._pass = self._job = None

    def abort(self, passes: PassPort) -> None:
        """End the job under way, and take its waiting pass out of the queue."""
        if self._job is not None:
            self._end(self._job, Outcome.ABORTED)
        self.withdraw(passes)

    def dropped(self, node: Node) -> None:
        """End the job of a node that leaves the tree."""
        job = self._table.jobs.get(node)
        if job is not None:
            self._end(job, Outcome.DROPPED)

    def clear(self) -> None:
        """End all jobs: the tree is flushed, or the weights changed. Between steps a waiting pass is withdrawn."""
        for job in self._table.jobs.values():
            self._end(job, Outcome.DROPPED)

    def _check_pass(self, reader: Reader, passes: PassPort) -> None:
        """Handle a pass that was taken out of the queue elsewhere; withdraw one whose prefix is gone, or for a user."""
        state = passes.state(reader)
        if state is PassState.GONE:
            self._pass = None
            if self._job is not None:
                self._end(self._job, Outcome.ABORTED)
        elif state is PassState.WAITING and (self._job is None or passes.has_waiting):
            self.withdraw(passes)

    # ---- events of jobs ---------------------------------------------------------------------------------------

    def _serve(self, job: ScoringJob, passes: PassPort, num_tokens: int) -> None:
        with self._guard.at(Place.PASS) as attempt:
            if job.observation is None:
                self._begin(job, passes)
            elif job.observation.has_changed:
                self._end(job, Outcome.COMPRESSED)
            if job.observation is not None and self._table.jobs.get(job.node) is job:
                self._start_pass(job, passes, num_tokens)
        if attempt.failed:
            self._end(job, Outcome.FAILED)

    def _pass_read(self, job: ScoringJob) -> None:
        """A pass was read to its end: another one follows, or the prefix shrinks."""
        observation, probes = job.observation, job.probes
        assert observation is not None and probes is not None
        if observation.has_failed:
            self._end(job, Outcome.FAILED)
        elif observation.has_changed:  # what it read is compressed
            self._end(job, Outcome.COMPRESSED)
        elif probes.is_empty:
            is_in_use = self._resizer.passes_over(path_to(job.node), observation)
            path = path_to(job.node)
            self._end(job, self._outcome_of(path, self._resizer.end_of(path), is_in_use=is_in_use))

    def _begin(self, job: ScoringJob, passes: PassPort) -> None:
        """Begin to observe what a job's passes read, and prepare their probes.

        The job ends if there is nothing to read, or no memory. While another job observes the prefix, it waits.
        """
        path = path_to(job.node)
        packed = self._unmeasured(job, path)
        bounds = self._resizer.bounds(path)
        if bounds is None and not packed:
            self._end(job, Outcome.COMPRESSED)  # and further passes would not improve it
            return
        job.start = self._spans.compressed_len(path)
        in_place = [] if bounds is None else self._resizer.range_to(path, bounds[1])
        path = path_to(job.node)
        if any(segment.readers is not None for segment in in_place):
            return
        segments = [*packed, *in_place]
        with self._guard.on_one_rank():
            num_bytes = sum(bytes_of(segment, self._packer.statistics) for segment in segments)
            if self.num_bytes + num_bytes <= self._config.observation_bytes:
                radius = ANSWER_RADIUS if job.questions else 0
                arena = self._packer.k_arena
                job.observation = ReaderObservation(
                    self._packer.geometry, arena, length_of(path), radius, job.prompt, self._packer.statistics
                )
                for segment in segments:
                    job.observation.observe(segment)
        if job.observation is None:
            self._table.totals.refused_no_memory += 1
            self._end(job, Outcome.NO_MEMORY)
            return
        start = packed[0].start if packed else job.start
        if job.questions:
            assert passes.tokenizer is not None
            job.probes = Probes(question_probes(passes.tokenizer, job.questions))
        else:
            job.probes = repetition_probes(passes.tokenizer, tokens_of(path)[start:])

    def _start_pass(self, job: ScoringJob, passes: PassPort, num_tokens: int) -> None:
        assert job.probes is not None
        probe = job.probes.next(num_tokens)
        length = len(key_of(path_to(job.node)))
        if length + len(probe) >= passes.room:
            self._table.totals.refused_no_room += 1
            self._end(job, Outcome.NO_ROOM)
            return
        self.jobs.note_served(job)
        job.started = time.perf_counter()
        self._pass, self._job = passes.start(job.node, probe), job
        self._readers[self._pass].is_pass = True
        self._pacing.started(num_tokens)

    def _count_pass(self, job: ScoringJob) -> None:
        observation, probes = job.observation, job.probes
        assert observation is not None and probes is not None
        if not observation.has_failed:
            self._table.totals.scoring_passes += 1
            probes.was_read()

    def _unmeasured(self, job: ScoringJob, path: Sequence[Node]) -> list[Segment]:
        """Segments of a path that passes are to measure; none for questions, which score the tokens around each one."""
        return [] if job.questions else self._pressure.unmeasured(path)

    def _outcome_of(self, path: Sequence[Node], end: int, *, is_in_use: bool) -> Outcome:
        """What has become of the first ``end`` tokens of a path, which were to shrink."""
        if not self._resizer.has_shrunk(path, end):
            return Outcome.FAILED
        return Outcome.IN_USE if is_in_use else Outcome.COMPRESSED

    def _end(self, job: ScoringJob, outcome: Outcome) -> None:
        self.jobs.end(job, outcome)
        if job is self._job:
            self._job = None


def _tickets(options: RequestOptions) -> set[str]:
    return set() if options.ticket is None else {ticket_digest(options.ticket)}
