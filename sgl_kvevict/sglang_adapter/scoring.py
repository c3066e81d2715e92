"""When a prefix is read in order to be scored, and by whom: extra passes, or the requests that extend it."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_kvevict.compression import PromptObservation, ReaderChunk, ReaderObservation
from sgl_kvevict.policies.observation import Readers
from sgl_kvevict.request import parse_request_options
from sgl_kvevict.sglang_adapter.observers import REFUSED_NO_ROOM
from sgl_kvevict.sglang_adapter.probes import question_probes, repetition_probes

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode as TreeNode

    from sgl_kvevict.sglang_adapter.tree import KVEvictTree

RID_PREFIX = "kvevict-pass-"
PATIENCE = 8
"""Steps for which users' waiting requests go first; then one pass is let in, or a busy server never compressed."""
ANSWER_REACH = 15
"""Tokens on each side of one that a question attends to that share its score: its answer may stand there."""
MAX_REMEMBERED = 256
"""Outcomes of warm requests that are remembered for who asks."""


@dataclass(eq=False)
class ScoringJob:
    """A prefix that is to be read before it is compressed.

    Attributes:
        node: last node of the prefix.
        questions: texts to read it with; () for the policy's own way.
        rid: request that asked for it, "" if none did.
        observation: what the passes have seen; None before the first.
        probes: token ids still to be appended to the prefix, one list a pass.
        started: when the pass that runs was handed to the scheduler (seconds, monotonic).
    """

    node: TreeNode
    questions: tuple[str, ...]
    rid: str
    observation: ReaderObservation | None = None
    probes: list[list[int]] = field(default_factory=list)
    started: float = 0.0


class PrefixScoring:
    """Counts who finds which prefix, and has prefixes read: one pass at a time, when no user's request waits.

    A pass is a request of our own: the cached prefix and a probe after it, answered to no one and inserted nowhere.
    It locks the prefix while it runs, like any request; between passes nothing is held, so a prefix may be dropped,
    and its job with it.

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
        self._votes: dict[TreeNode, ReaderObservation] = {}
        self._jobs: OrderedDict[TreeNode, ScoringJob] = OrderedDict()
        self._pass: Req | None = None
        self._job: ScoringJob | None = None
        self._num_passes = 0
        self._waited = 0

    @property
    def num_jobs(self) -> int:
        """Prefixes that wait for passes, the one under way included."""
        return len(self._jobs)

    # ---- what the tree tells ----------------------------------------------------------------------------------

    def clear(self) -> None:
        """The tree was flushed."""
        self._matches.clear()
        self._votes.clear()
        for job in list(self._jobs.values()):
            self._end(job, "dropped")
        self._pass = None

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
        observation = self._observation_of_pass(req) if self._is_pass(req) else self._vote(req, start)
        if observation is None:
            return None
        row = self.tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        return observation.begin_chunk(str(req.rid), start, end, row[observation.start : observation.end].long())

    def prompt_complete(self, req: Req, observation: PromptObservation) -> None:
        """A user's prompt is in the tree: count what it found there, and queue what is to be scored."""
        path = self.tree.path(req.last_node)
        found, end = None, 0
        for node in path:
            if end + len(node.key) > observation.first_query:
                break
            end += len(node.key)
            self._matches[node] = self._matches.get(node, 0) + 1
            found = node if self._is_due(self._matches[node]) else found
        if self.readers is Readers.QUESTIONS:
            self._count_vote(req, observation.first_query, path)
        elif found is not None:
            self._enqueue(ScoringJob(found, (), ""))
        options = parse_request_options(req.sampling_params.custom_params, self.config)
        if (options is not None and options.warm) or req.sampling_params.max_new_tokens == 0:
            questions = () if options is None else tuple(options.questions)
            if questions or self.readers is Readers.REPETITION:
                node = self.tree.node_ending_at(path, min(observation.end, sum(len(node.key) for node in path)))
                self._enqueue(ScoringJob(node, questions, req.rid))

    def released(self, req: Req) -> None:
        """A request let go of its path; if it was our pass, go on from there."""
        if not req.finished():
            return
        for vote in self._votes.values():
            vote.forget_reader(str(req.rid))  # aborted before its vote counted: the id may come again
        if self._pass is None or req is not self._pass:
            return
        self._pass = None
        job = self._job
        if job is None:
            return
        if isinstance(req.finished_reason, FINISH_ABORT):
            self._end(job, "aborted")
            return
        assert job.observation is not None
        self.tree.observer.scored(job.observation.start, job.observation.end, time.perf_counter() - job.started)
        job.observation.end_reader(str(req.rid))
        job.probes.pop(0)
        if not job.probes:
            done = self.tree.compress_up_to(job.node, job.observation.end, job.observation, req.rid)
            self._end(job, "compressed" if done else "in-use")

    def turn(self, scheduler: Scheduler) -> None:
        """Between two steps: hand the next pass to the scheduler if it is time for one."""
        if self._pass is not None:
            if not self._pass.kv.holds_kv and self._pass not in scheduler.waiting_queue:
                self._pass = None  # aborted while it waited: nobody is told
                if self._job is not None:
                    self._end(self._job, "aborted")
            return
        if not self._jobs:
            return
        if scheduler.waiting_queue and self._waited < PATIENCE:
            self._waited += 1
            return
        self._waited = 0
        job = next(iter(self._jobs.values()))
        if self._prepare(job, scheduler):
            self._start_pass(job, scheduler)

    # ---- jobs -------------------------------------------------------------------------------------------------

    def _is_due(self, count: int) -> bool:
        return self.config.score_after_matches is not None and count >= self.config.score_after_matches

    def _enqueue(self, job: ScoringJob) -> None:
        if self._range_of(job.node) is None:
            self._remember(job.rid, "too-short")
        elif job.node not in self._jobs:
            self._jobs[job.node] = job
            self._remember(job.rid, "queued")
        elif job.rid and self._jobs[job.node].observation is None:
            self._jobs[job.node] = job  # what somebody asked for replaces what we would have done
            self._remember(job.rid, "queued")
        elif job.rid:
            self._jobs[job.node].rid = job.rid
            self._remember(job.rid, "queued")

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
        job.observation = self.compressor.new_reader_observation(*bounds, ANSWER_REACH if job.questions else 0)
        return True

    def _tokens(self, node: TreeNode) -> list[int]:
        return [token for step in self.tree.path(node) for token in step.key.token_ids]

    def _start_pass(self, job: ScoringJob, scheduler: Scheduler) -> None:
        sampling = SamplingParams(max_new_tokens=0, temperature=0)
        sampling.normalize(None)
        self._num_passes += 1
        key: RadixKey = job.node.key
        req = Req(
            f"{RID_PREFIX}{self._num_passes}",
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
        req.time_stats.set_wait_queue_entry_time()
        job.started = time.perf_counter()
        self._pass, self._job = req, job
        # Not through the public entrance: limits on users' requests are not meant for this one.
        scheduler.waiting_queue.append(req)

    def _end(self, job: ScoringJob, outcome: str) -> None:
        self._remember(job.rid, outcome)
        self._jobs.pop(job.node, None)
        if job is self._job:
            self._job = None

    def _remember(self, rid: str, outcome: str) -> None:
        if rid:
            self.outcomes[rid] = outcome
            self.outcomes.move_to_end(rid)
            if len(self.outcomes) > MAX_REMEMBERED:
                self.outcomes.popitem(last=False)

    def _is_pass(self, req: Req) -> bool:
        return str(req.rid).startswith(RID_PREFIX) and req.skip_radix_cache_insert

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
        last = self.tree.node(req.last_node)
        vote = self._votes.get(last)
        if vote is None or (vote.start, vote.end) != bounds:
            vote = self._votes[last] = self.compressor.new_reader_observation(*bounds, ANSWER_REACH)
        return vote

    def _count_vote(self, req: Req, first_query: int, path: list[TreeNode]) -> None:
        end = 0
        for node in path:
            end += len(node.key)
            if end == first_query and node in self._votes:
                vote = self._votes[node]
                vote.end_reader(str(req.rid))
                if self._is_due(vote.num_readers):
                    del self._votes[node]
                    self.tree.compress_up_to(node, vote.end, vote, req.rid)
                return
