"""When a prefix is read in order to be scored, and by whom: extra passes, or the requests that extend it."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_kvevict.compression import PromptObservation, ReaderChunk, ReaderObservation
from sgl_kvevict.guard import Place
from sgl_kvevict.policies.observation import Readers
from sgl_kvevict.request import parse_request_options, ticket_digest
from sgl_kvevict.sglang_adapter.observers import REFUSED_NO_MEMORY, REFUSED_NO_ROOM
from sgl_kvevict.sglang_adapter.probes import question_probes, repetition_probes

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

    from sgl_kvevict.sglang_adapter.tree import KVEvictTree

PATIENCE = 8
"""Steps for which users' waiting requests go first; then one pass is let in, or a busy server never compressed."""
ANSWER_REACH = 15
"""Tokens on each side of one that a question attends to that share its score: its answer may stand there."""
MAX_REMEMBERED = 256
"""Outcomes of warm requests that are remembered for who asks."""
MAX_JOBS = 1024
"""Prefixes that may wait for passes; who asks for more is told "busy"."""
MAX_BEGUN_JOBS = 4
"""Jobs between two of their passes, which hold memory; others begin when one of them ends."""


@dataclass(eq=False)
class ScoringJob:
    """A prefix that is to be read before it is compressed.

    Attributes:
        node: last node of the prefix.
        questions: texts to read it with; () for the policy's own way.
        tickets: hashes of the tickets of those who asked for it and want to know what became of it.
        is_wanted: some request asked for it.
        observation: what the passes have seen; None before the first.
        probes: token ids still to be appended to the prefix, one list a pass.
        started: when the pass that runs was handed to the scheduler (seconds, monotonic).
    """

    node: TreeNode
    questions: tuple[str, ...]
    tickets: set[str] = field(default_factory=set)
    is_wanted: bool = False
    observation: ReaderObservation | None = None
    probes: list[list[int]] = field(default_factory=list)
    started: float = 0.0


class PrefixScoring:
    """Counts who finds which prefix, and has prefixes read: one pass at a time, when no user's request waits.

    A pass is a request of our own: the cached prefix and a probe, answered to no one, inserted nowhere. Only while it
    runs it locks the prefix; a job ends with its prefix.

    Args:
        tree: whose prefixes.
        readers: the policy's.
    """

    def __init__(self, tree: KVEvictTree, readers: Readers) -> None:
        assert tree.compressor is not None
        self.tree = tree
        self.readers = readers
        self.compressor = tree.compressor
        self.config = tree.compressor.config
        self.outcomes: OrderedDict[str, str] = OrderedDict()
        self._matches: dict[TreeNode, int] = {}
        self._votes: OrderedDict[TreeNode, ReaderObservation] = OrderedDict()
        self._jobs: OrderedDict[TreeNode, ScoringJob] = OrderedDict()
        self._pass: Req | None = None
        self._passes: WeakSet[Req] = WeakSet()
        self._turns: dict[tuple[str | None, str | None], int] = {}
        self._job: ScoringJob | None = None
        self._num_passes = 0
        self._waited = 0

    @property
    def num_jobs(self) -> int:
        """Prefixes that wait for passes, the one under way included."""
        return len(self._jobs)

    @property
    def num_bytes(self) -> int:
        """Memory that votes, and what passes have seen, take."""
        held = [*self._votes.values(), *(job.observation for job in self._jobs.values())]
        return sum(observation.num_bytes for observation in held if observation is not None)

    # ---- what the tree tells ----------------------------------------------------------------------------------

    def clear(self) -> None:
        """What was cached is gone, or of no use; a pass that waits is taken out of the queue at the next turn."""
        self._matches.clear()
        self._votes.clear()
        for job in list(self._jobs.values()):
            self._end(job, "dropped")

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """A node was cut: who found the whole of it found its upper part."""
        if lower in self._matches:
            self._matches[upper] = self._matches[lower]

    def discard(self, node: TreeNode) -> None:
        """A node was dropped."""
        self._matches.pop(node, None)
        self._votes.pop(node, None)
        if node in self._jobs:
            self._end(self._jobs[node], "dropped")

    def observe(self, req: Req, start: int, end: int) -> ReaderChunk | None:
        """Return what new tokens ``[start, end)`` of a request are to be recorded in, if anything."""
        observation = self._observation_of_pass(req) if req in self._passes else self._vote(req, start)
        if observation is None:
            return None
        row = self.tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        return observation.begin_chunk(req, start, end, row[observation.start : observation.end].long())

    def prompt_complete(self, req: Req, observation: PromptObservation) -> None:
        """A user's prompt is in the tree: count what it found there, and queue what is to be scored."""
        path, found, end = self.tree.path(req.last_node), None, 0
        for node in path:
            if end + len(node.key) > observation.first_query:
                break
            end += len(node.key)
            self._matches[node] = self._matches.get(node, 0) + 1
            found = node if self._is_due(self._matches[node]) else found
        if self.readers is Readers.QUESTIONS:
            self._count_vote(req, observation.first_query, path)
        elif found is not None:
            self._enqueue(ScoringJob(found, ()))
        options = parse_request_options(req.sampling_params.custom_params, self.config)
        if (options is not None and options.warm) or req.sampling_params.max_new_tokens == 0:
            questions = () if options is None else tuple(options.questions)
            if questions or self.readers is Readers.REPETITION:
                path = self.tree.path(req.last_node)  # a vote that counted may have split it
                node = self.tree.node_ending_at(path, observation.end)
                ticket = None if options is None else options.ticket
                tickets = set() if ticket is None else {ticket_digest(ticket)}
                self._enqueue(ScoringJob(node, questions, tickets, is_wanted=True))

    def released(self, req: Req) -> None:
        """A request let go of its path; if it was our pass, go on from there."""
        if not req.finished() or req is not self._pass:
            return
        self._pass = None
        job = self._job
        if job is None:
            return
        with self.tree.guard.at(Place.PASS):
            self._pass_done(job, req)
            return
        self._end(job, "failed")

    def _pass_done(self, job: ScoringJob, req: Req) -> None:
        if isinstance(req.finished_reason, FINISH_ABORT):
            self._end(job, "aborted")
            return
        assert job.observation is not None
        if job.observation.has_failed:
            self._end(job, "failed")
            return
        self.tree.observer.scored(job.observation.start, job.observation.end, time.perf_counter() - job.started)
        job.observation.end_reader(req)
        job.probes.pop(0)
        if not job.probes:
            done = self.tree.compress_up_to(job.node, job.observation.end, job.observation, req)
            self._end(job, "compressed" if done else "in-use")

    # ---- passes and the scheduler -----------------------------------------------------------------------------

    def turn(self, scheduler: Scheduler) -> None:
        """Between two steps: hand the next pass to the scheduler if it is time for one."""
        if self._pass is not None:
            self._check_pass(scheduler)
            return
        if not self._jobs or scheduler._engine_paused or scheduler.flush_wrapper._pending is not None:
            return
        if scheduler.waiting_queue and self._waited < PATIENCE:
            self._waited += 1
            return
        self._waited = 0
        job = self._next_job()
        with self.tree.guard.at(Place.PASS):
            if self._prepare(job, scheduler):
                self._start_pass(job, scheduler)
            return
        self._end(job, "failed")

    def _check_pass(self, scheduler: Scheduler) -> None:
        """Notice a pass that was taken out of the queue, and take out one whose prefix is gone."""
        if self._pass is None or self._pass.kv.holds_kv:
            return
        if self._pass not in scheduler.waiting_queue:
            self._pass = None  # aborted while it waited: nobody is told
            if self._job is not None:
                self._end(self._job, "aborted")
        elif self._job is None:
            self.withdraw(scheduler)

    @property
    def running_pass(self) -> Req | None:
        """The pass that waits or runs."""
        return self._pass

    def is_pass(self, req: Req) -> bool:
        """Whether a request is one of ours."""
        return req in self._passes

    def withdraw(self, scheduler: Scheduler) -> None:
        """Take a pass that waits out of the queue; its job stays, and has another pass later."""
        if self._pass is not None and not self._pass.kv.holds_kv and self._pass in scheduler.waiting_queue:
            scheduler.waiting_queue.remove(self._pass)
            self.let_go()

    def let_go(self) -> None:
        """The pass that runs is taken off: its job stays, and has another one later."""
        self._pass = self._job = None

    def abort(self, scheduler: Scheduler) -> None:
        """End the job under way, and the pass that waits."""
        if self._job is not None:
            self._end(self._job, "aborted")
        self.withdraw(scheduler)

    # ---- jobs -------------------------------------------------------------------------------------------------

    def _is_due(self, count: int) -> bool:
        return self.config.score_after_matches is not None and count >= self.config.score_after_matches

    def _enqueue(self, job: ScoringJob) -> None:
        queued = self._jobs.get(job.node)
        if self._range_of(job.node) is None:
            self._remember(job.tickets, "too-short")
        elif queued is None and len(self._jobs) >= MAX_JOBS:
            self._remember(job.tickets, "busy")
        elif queued is None:
            self._jobs[job.node] = job
            self._remember(job.tickets, "queued")
        elif len(queued.tickets) + len(job.tickets) > MAX_REMEMBERED:
            self._remember(job.tickets, "busy")
        else:
            queued.tickets |= job.tickets
            self._remember(job.tickets, "queued")
            if job.is_wanted and queued.observation is None:  # what was asked for last replaces what was before
                queued.questions, queued.is_wanted = job.questions, True

    def _next_job(self) -> ScoringJob:
        """The oldest job of the namespace whose turn it is: the one that had none, or had its last one longest ago."""
        begun = [job for job in self._jobs.values() if job.observation is not None]
        return min(
            begun if len(begun) >= MAX_BEGUN_JOBS else self._jobs.values(),
            key=lambda job: self._turns.get(_namespace(job), 0),
        )

    def _range_of(self, node: TreeNode) -> tuple[int, int] | None:
        """Logical bounds of what is to be compressed of the path to a node; None if it is too short."""
        path = self.tree.path(node)
        start = self.tree.waterline(path)
        end = sum(len(node.key) for node in path) - self.config.tail_tokens
        return None if end - start < self.config.min_prefix_tokens else (start, end)

    def _prepare(self, job: ScoringJob, scheduler: Scheduler) -> bool:
        """Lay out the passes of a job that begins; False if there is nothing to do."""
        bounds = self._range_of(job.node)
        if bounds is None:
            self._end(job, "compressed")
            return False
        if job.observation is not None:
            return True
        tokens = self._tokens(job.node)
        if job.questions:
            job.probes = list(question_probes(scheduler.tokenizer, job.questions))
        else:
            part = tokens[slice(*bounds)]
            job.probes = list(repetition_probes(scheduler.tokenizer, part, self.config.scoring_pass_tokens))
        room = min(scheduler.max_req_input_len, self.tree.token_to_kv_pool_allocator.size)
        if len(tokens) + max(map(len, job.probes)) >= room:
            self.tree.observer.refused(REFUSED_NO_ROOM, len(tokens))
            self._end(job, "no-room")
            return False
        job.observation = self._new_observation(bounds, ANSWER_REACH if job.questions else 0)
        if job.observation is None:
            self._end(job, "no-memory")
        return job.observation is not None

    def _new_observation(self, bounds: tuple[int, int], reach: int) -> ReaderObservation | None:
        """An empty observation, for which the oldest votes make room; None if there is none."""
        observation = self.compressor.new_reader_observation(*bounds, reach)
        excess = self.num_bytes + observation.num_bytes - self.config.observation_bytes
        while excess > 0 and self._votes:
            _, vote = self._votes.popitem(last=False)
            excess -= vote.num_bytes
            self.tree.observer.refused(REFUSED_NO_MEMORY, vote.end - vote.start)
        if excess <= 0:
            return observation
        self.tree.observer.refused(REFUSED_NO_MEMORY, observation.end - observation.start)
        return None

    def _tokens(self, node: TreeNode) -> list[int]:
        return [token for step in self.tree.path(node) for token in step.key.token_ids]

    def _start_pass(self, job: ScoringJob, scheduler: Scheduler) -> None:
        sampling = SamplingParams(max_new_tokens=0, temperature=0)
        sampling.normalize(None)
        self._num_passes += 1
        key: RadixKey = job.node.key
        req = Req(
            f"kvevict-pass-{self._num_passes}",  # for logs: nothing is known by its name
            "",
            array("q", [*self._tokens(job.node), *job.probes[0]]),
            sampling,
            eos_token_ids=scheduler.model_config.hf_eos_token_id,
            vocab_size=scheduler.model_config.vocab_size,
            extra_key=key.extra_key,
            cache_salt=key.cache_salt,
        )
        req.tokenizer = scheduler.tokenizer
        req.logprob_start_len = -1
        req.skip_radix_cache_insert = True
        req.finished_output = True
        scheduler.init_req_max_new_tokens(req)
        # Not through the public entrance: limits on users' requests are not meant for this one. But complete.
        scheduler._set_or_validate_priority(req)
        req.arrival_processed_tokens = scheduler.processed_tokens_counter
        req.time_stats.set_wait_queue_entry_time()
        job.started = time.perf_counter()
        self._passes.add(req)
        self._pass, self._job = req, job
        self._turns[_namespace(job)] = self._num_passes
        scheduler.waiting_queue.append(req)

    def _end(self, job: ScoringJob, outcome: str) -> None:
        self._remember(job.tickets, outcome)
        self._jobs.pop(job.node, None)
        if job is self._job:
            self._job = None
        waiting = {_namespace(other) for other in self._jobs.values()}
        self._turns = {name: turn for name, turn in self._turns.items() if name in waiting}

    def _remember(self, tickets: Collection[str], outcome: str) -> None:
        for ticket in tickets:
            self.outcomes[ticket] = outcome
            self.outcomes.move_to_end(ticket)
        while len(self.outcomes) > MAX_REMEMBERED:
            self.outcomes.popitem(last=False)

    def _observation_of_pass(self, req: Req) -> ReaderObservation | None:
        return self._job.observation if req is self._pass and self._job is not None else None

    # ---- votes ------------------------------------------------------------------------------------------------

    def _vote(self, req: Req, start: int) -> ReaderObservation | None:
        """What a request that extends an uncompressed prefix attends to, if the policy asks its readers."""
        if self.readers is not Readers.QUESTIONS or self.config.score_after_matches is None:
            return None
        path = self.tree.path(req.last_node)
        if sum(len(node.key) for node in path) != start:
            return None  # a later chunk: the first one was the reader of the prefix
        bounds = self._range_of(req.last_node)
        if bounds is None:
            return None
        vote = self._votes.get(req.last_node)
        if vote is None or vote.has_failed or (vote.start, vote.end) != bounds:
            self._votes.pop(req.last_node, None)
            vote = self._new_observation(bounds, ANSWER_REACH)
            if vote is not None:
                self._votes[req.last_node] = vote
        return vote

    def _count_vote(self, req: Req, first_query: int, path: list[TreeNode]) -> None:
        end = 0
        for node in path:
            end += len(node.key)
            if end == first_query and node in self._votes:
                vote = self._votes[node]
                vote.end_reader(req)
                if self._is_due(vote.num_readers) and not vote.has_failed:
                    del self._votes[node]
                    self.tree.compress_up_to(node, vote.end, vote, req)
                return


def _namespace(job: ScoringJob) -> tuple[str | None, str | None]:
    """Whose prefix it is, as far as the cache can tell."""
    key: RadixKey = job.node.key
    return key.extra_key, key.cache_salt
