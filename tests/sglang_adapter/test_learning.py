"""The policy that learns from its passes: passes until it knows enough, then every prompt is compressed at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from helpers.harness import Harness, publish_server_args
from helpers.passes import MiniScheduler
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.distill import LessonResult, ScoreLearner, learner
from sgl_kvevict.lifecycle.nodes import path_to
from sgl_kvevict.policies import Rotary, build_policy
from sgl_kvevict.policies.methods.distilled import DistilledScorer
from sgl_kvevict.request import ticket_digest
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state

NUM_LAYERS = 2
TICKET = "a-random-text-of-the-asker"


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    publish_server_args(tmp_path_factory.mktemp("tiny-llama"))


class Pupil:
    """A cache that learns; what its passes see is the same everywhere, so what it learns is worth nothing."""

    def __init__(self, monkeypatch, num_prefixes=1, num_slots=600, min_recall=0.0, scorer=None, **fields):
        monkeypatch.setattr(learner, "MIN_RECALL", min_recall)
        values = {"budget": 0.3, "tail_tokens": 4, "sink_tokens": 2, "min_prefix_tokens": 6, "scoring_pass_tokens": 20}
        config = KVEvictConfig(**values, **fields)
        policy = build_policy("distilled", {})
        policy = policy if scorer is None else replace(policy, scorer=scorer)
        self.harness = Harness(num_slots=num_slots, config=config, policy=policy)
        self.manager = self.harness.tree.manager
        rotary = Rotary(torch.empty(600, 0), is_neox=True)
        self.learner = ScoreLearner(self.harness.geometry, rotary, 0.3, num_prefixes)
        compressor = self.manager.compressor
        compressor.learner, compressor.observes = self.learner, replace(compressor.observes, rotary=rotary)
        self.scheduler = MiniScheduler(self.harness)
        self.results = self.scheduler.results

    def ask(self, document, *suffix, **options):
        request = self.harness.run([*document, *suffix], options=options or None)
        self.harness.finish(request)

    def work(self):
        """Passes and lessons until nothing is left to do; the number of passes."""
        before = len(self.scheduler.passes)
        while len(self.manager.scoring.jobs):
            self.scheduler.run_pass()
            self.harness.check()
        return len(self.scheduler.passes) - before

    def teach(self, document):
        self.ask(document, 1, 2, 3)
        self.ask(document, 4, 5, 6)
        return self.work()

    @property
    def spans(self):
        return sorted((span.start, span.end) for span in self.manager.spans.values())


def document(number):
    return [number, *(i * 7 % 11 for i in range(59))]


def test_a_prefix_is_learned_from_layer_by_layer_before_it_is_compressed(monkeypatch):
    pupil = Pupil(monkeypatch)
    pupil.ask(document(0), 1, 2, 3)
    pupil.ask(document(0), 4, 5, 6)
    assert pupil.scheduler.run_pass() and pupil.scheduler.run_pass() and pupil.scheduler.run_pass()
    for _ in range(NUM_LAYERS):
        assert pupil.spans == [] and pupil.results == []
        pupil.scheduler.turn()
    assert pupil.spans == [(0, 56)] and pupil.results == [LessonResult(1, None, False)]
    assert pupil.work() == 0


def test_once_it_has_learned_prompts_wait_for_passes_or_for_a_lack_of_slots(monkeypatch):
    pupil = Pupil(monkeypatch)
    pupil.teach(document(0))
    assert pupil.teach(document(1)) == 3 and pupil.results[-1].is_accepted
    pupil.harness.flush()
    pupil.ask(document(2), 7, 8, 9)
    assert pupil.spans == []
    assert pupil.teach(document(2)) == 3 and pupil.spans == [(0, 56)] and len(pupil.results) == 2
    pupil.ask(document(3), 7, 8, 9)
    assert pupil.harness.evict(1) and pupil.spans == [(0, 56), (0, 59)] and pupil.work() == 0


@dataclass(frozen=True)
class Recorded(DistilledScorer):
    """The scorer of the default policy; keeps which signals it was given."""

    seen: list[set[str]] = field(default_factory=list)

    def score(self, view):
        self.seen.append({signal.value for signal in view.signals})
        return super().score(view)


def test_passes_and_what_was_learned_choose_together_unless_questions_were_read(monkeypatch):
    scorer = Recorded(use_window=True)
    pupil = Pupil(monkeypatch, scorer=scorer)

    def given():
        seen = scorer.seen[:]
        scorer.seen.clear()
        assert len(seen) == NUM_LAYERS
        return seen[0]

    pupil.teach(document(0))
    assert given() == {"window_queries", "reader_attention"}  # nothing is learned yet
    pupil.teach(document(1))
    assert pupil.results[-1].is_accepted and given() == {"window_queries", "reader_attention", "learned_scores"}
    pupil.ask(document(2), 1, 2, 3)
    assert pupil.harness.evict(1) and given() == {"window_queries", "learned_scores"}
    pupil.ask(document(3), warm=True, questions=["Who?"])
    assert pupil.work() == 1 and "learned_scores" not in given()


def test_what_passes_have_read_is_measured_and_what_only_shrank_is_not(monkeypatch):
    pupil = Pupil(monkeypatch)
    for number in range(3):  # learned from, tried on, and read although scores are learned
        pupil.teach(document(number))
    pupil.ask(document(3), 7, 8, 9)
    assert pupil.harness.evict(1)
    segments = {span.segment for span in pupil.manager.spans.values()}
    assert len(segments) == 4 and sum(segment.is_measured for segment in segments) == 3


def test_passes_that_come_late_score_what_is_left(monkeypatch):
    pupil = Pupil(monkeypatch)
    pupil.teach(document(0))
    pupil.teach(document(1))
    pupil.ask(document(2), 1, 2, 3)
    pupil.ask(document(2), warm=True, ticket=TICKET)
    assert pupil.scheduler.run_pass()
    while (0, 60) not in pupil.spans and (0, 56) not in pupil.spans[2:]:
        assert pupil.harness.evict(1)
    assert pupil.work() == 2
    assert {span.segment.is_measured for span in pupil.manager.spans.values() if span.end in (56, 60)} == {True}
    assert cache_state(pupil.harness.tree)["warm_outcomes"][ticket_digest(TICKET)] == "compressed"


def test_echo_is_collected_only_while_slots_are_short_and_nothing_is_learned(monkeypatch):
    pupil = Pupil(monkeypatch)
    compressor = pupil.manager.compressor
    assert not compressor.new_observation().has_echo
    pupil.ask(document(0), 1, 2, 3)
    pupil.harness.evict(1)
    assert compressor.new_observation().has_echo
    pupil.teach(document(1))
    pupil.teach(document(2))
    assert compressor.has_learned and not compressor.new_observation().has_echo


def test_before_anything_is_learned_prefixes_shrink_by_echo_and_passes_read_them_later(monkeypatch):
    pupil = Pupil(monkeypatch, num_prefixes=5)
    pupil.ask(document(0), 1, 2, 3)
    pupil.harness.evict(1)
    assert pupil.spans == []  # nothing was observed yet: the tail was dropped
    pupil.ask(document(1), 1, 2, 3)
    pupil.harness.evict(1)
    assert pupil.spans == [(0, 59)]
    (segment,) = {span.segment for span in pupil.manager.spans.values()}
    assert (segment.num_slots, segment.is_measured) == (30, False)
    pupil.ask(document(1), 4, 5, 6)
    assert pupil.work() == 3 and pupil.results == []
    (segment,) = {span.segment for span in pupil.manager.spans.values()}
    assert (segment.num_slots, segment.is_measured) == (18, True)


def test_what_is_to_be_learned_from_does_not_shrink_and_comes_first(monkeypatch):
    pupil = Pupil(monkeypatch, num_prefixes=5)
    pupil.manager.compressor.is_short = True
    for number in (0, 1):
        pupil.ask(document(number), 1, 2, 3)
        if number == 0:
            pupil.harness.evict(1)
            assert pupil.spans == [(0, 59)]
        pupil.ask(document(number), 4, 5, 6)
    assert pupil.scheduler.run_pass()
    assert pupil.scheduler.passes[0].origin_input_ids[0] == 1
    (job,) = pupil.manager.table.begun_jobs
    while pupil.manager.pressure.relieve(None):
        pupil.harness.check()
    assert not any(node in pupil.manager.spans for node in path_to(job.node))
    pupil.work()
    assert len(pupil.results) == 1


def test_a_prompt_that_found_most_of_it_in_the_cache_has_no_echo_of_it(monkeypatch):
    pupil = Pupil(monkeypatch)
    pupil.ask(document(0), 1, 2, 3)
    pupil.manager.compressor.is_short = True
    pupil.ask(document(0), 4, 5, 6)
    assert not pupil.manager.table.shrinking


def test_without_waiting_the_first_prompt_is_compressed_at_once(monkeypatch):
    pupil = Pupil(monkeypatch, wait_for_passes=False)
    assert pupil.teach(document(0)) == 3 and pupil.teach(document(1)) == 3
    assert [result.is_accepted for result in pupil.results] == [False, True]
    pupil.harness.flush()
    pupil.ask(document(2), 7, 8, 9)
    assert pupil.spans == [(0, 59)] and pupil.work() == 0
    pupil.ask(document(2), 1, 1, 1)  # diverges inside what is compressed
    pupil.harness.check()
    assert cache_state(pupil.harness.tree)["learned_scores"]["in_use"]


def test_what_is_not_good_enough_is_not_used(monkeypatch):
    pupil = Pupil(monkeypatch, min_recall=1.1)
    for number in range(4):
        assert pupil.teach(document(number)) == 3
    assert not any(result.is_accepted for result in pupil.results) and len(pupil.results) == 4


def test_who_waits_for_passes_when_it_has_learned_needs_none_any_more(monkeypatch):
    pupil = Pupil(monkeypatch, wait_for_passes=False)
    pupil.teach(document(0))
    for number in (1, 2):
        pupil.ask(document(number), 1, 2, 3)
        pupil.ask(document(number), 4, 5, 6)
    assert len(pupil.manager.scoring.jobs) == 2
    assert pupil.work() == 3
    assert pupil.spans == [(0, 56)] * 3


def test_wishes_are_granted_at_once_but_for_those_with_questions(monkeypatch):
    pupil = Pupil(monkeypatch, wait_for_passes=False)
    pupil.teach(document(0))
    pupil.teach(document(1))
    pupil.ask(document(2), warm=True, ticket=TICKET)
    assert pupil.work() == 0 and (0, 56) in pupil.spans
    outcomes = cache_state(pupil.harness.tree)["warm_outcomes"]
    assert outcomes[ticket_digest(TICKET)] == "compressed"
    pupil.harness.flush()
    pupil.ask(document(3), warm=True, questions=["Who?", "Where?"])
    assert pupil.spans == [] and pupil.work() == 2 and pupil.spans == [(0, 56)]
    assert len(pupil.results) == 2


def test_questions_teach_nothing(monkeypatch):
    pupil = Pupil(monkeypatch)
    pupil.ask(document(0), warm=True, questions=["Who?"])
    assert pupil.work() == 1 and pupil.spans == [(0, 56)] and pupil.results == []


def test_a_prefix_may_leave_while_it_is_learned_from(monkeypatch):
    pupil = Pupil(monkeypatch)
    pupil.ask(document(0), 1, 2, 3)
    pupil.ask(document(0), 4, 5, 6)
    for _ in range(3):
        pupil.scheduler.run_pass()
    pupil.scheduler.turn()
    pupil.harness.evict(1000)
    assert pupil.work() == 0 and pupil.spans == [] and pupil.results == []
    assert pupil.teach(document(0)) == 3 and len(pupil.results) == 1


def test_new_weights_of_the_model_end_lessons_and_what_was_learned(monkeypatch):
    pupil = Pupil(monkeypatch)
    pupil.teach(document(0))
    pupil.ask(document(1), 1, 2, 3)
    pupil.ask(document(1), 4, 5, 6)
    for _ in range(3):
        pupil.scheduler.run_pass()
    pupil.scheduler.turn()
    pupil.harness.tree.forget_compressed()
    assert pupil.work() == 0 and pupil.learner.num_learned == 0 and len(pupil.results) == 1
