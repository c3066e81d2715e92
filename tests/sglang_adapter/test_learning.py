"""The policy that scores by what was learned from texts before the first request."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.harness import Harness
from helpers.scheduling import Letters, MiniScheduler
from kvevict_kernels.rotary import Rotary
from kvevict_kernels.row_codec import RowStatistics
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.distill.files import Learned
from sgl_kvevict.distill.learner import ScoreLearner
from sgl_kvevict.distill.row_sums import RowSums
from sgl_kvevict.distill.weights import LearnedScores, ScoreWeights
from sgl_kvevict.errors import InvariantError, UnsupportedSetupError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import build_policy
from sgl_kvevict.segments.prompt_observation import CacheObservation
from sgl_kvevict.sglang_adapter import learning
from sgl_kvevict.sglang_adapter.distilling import Distilling
from sgl_kvevict.sglang_adapter.learning import TextReader
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state
from sgl_kvevict.sglang_adapter.ranks import TensorRanks

NUM_LAYERS = 2
SUBJECT = "scores", "another policy"
ROTARY = Rotary(torch.empty(600, 0), is_neox=True)


class Words(Letters):
    """A tokenizer that also encodes texts as they are."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text, add_special_tokens=False)


class ReadingScheduler(MiniScheduler):
    """The part of SGLang's scheduler that runs texts before any request: one prefill chunk a batch."""

    CHUNK = 50

    def __init__(self, harness: Harness) -> None:
        super().__init__(harness)
        self.tokenizer = Words()
        self.max_total_num_tokens = harness.num_slots
        self.num_batches = 0

    def get_next_batch_to_run(self, running_batch, last_batch):
        if self.waiting_queue:
            req = self.waiting_queue.pop(0)
            assert self.harness.admit(req)
            self.chunked_req = req
        batch = self.chunked_req
        return SimpleNamespace(running_batch=running_batch, batch_to_run=batch)

    def run_batch(self, req):
        self.num_batches += 1
        assert self.harness.prefill(req, req.prefix_len + self.CHUNK)

    def process_batch_result(self, req, _result):
        if req.finished() or req not in self.harness.live:
            self.chunked_req = None

    def flush_cache(self, empty_cache: bool):
        assert not empty_cache
        self.harness.flush()


class LearnedCache:
    """A cache with learned scores."""

    def __init__(self, num_slots=600, is_known=True):
        values = {"budget": 0.3, "tail_tokens": 4, "sink_tokens": 2, "min_prefix_tokens": 6}
        policy = build_policy("distilled", {})
        self.harness = Harness(num_slots=num_slots, config=KVEvictConfig(**values), policy=policy)
        self.prefixes = self.harness.tree.prefixes
        compressor = self.prefixes.compressor
        self.learned = compressor.learned = LearnedScores(ROTARY)
        if is_known:
            self.learned.weights = ScoreWeights.zeros(self.harness.geometry)

    def ask(self, document, *suffix):
        request = self.harness.run([*document, *suffix])
        self.harness.finish(request)

    @property
    def spans(self):
        return sorted((span.start, span.end) for span in self.prefixes.spans.values())


def document(number):
    return [number, *(i * 7 % 11 for i in range(59))]


# ---- before the first request ---------------------------------------------------------------------------------------


def read(tokens, num_slots=600):
    cache = LearnedCache(num_slots, is_known=False)
    scheduler = ReadingScheduler(cache.harness)
    reader = TextReader(scheduler, cache.harness.tree, *SUBJECT)
    reader.read(tokens)
    return cache, scheduler, reader, reader.score()


def test_a_text_is_prefilled_and_repeated_and_leaves_nothing_behind():
    cache, scheduler, reader, text = read([i % 11 for i in range(140)])
    assert text.tokens.token_slots.numel() == 136 and text.scores.shape == (NUM_LAYERS, 2, 136)
    assert (text.scores > 0).all()
    assert not cache.spans and cache.prefixes.totals.prompts == 0
    # 140 tokens in chunks of 50, then repetitions of 142 tokens (pool and context have room for no longer ones)
    assert scheduler.num_batches > 3
    assert "window_queries" in {signal.value for signal in text.show(0).signals}
    reader.forget()
    cache.harness.check()
    assert cache.harness.tree.total_size()[0] == 0 and cache.prefixes.prefills is reader._served


def test_weights_learned_from_texts_are_in_use_and_requests_are_as_always():
    cache, _, reader, text = read([i % 11 for i in range(140)])
    learner = ScoreLearner(cache.harness.geometry, ROTARY)
    learner.add(text)
    reader.forget()
    cache.learned.weights = learner.solve()
    assert cache_state(cache.harness.tree)["learned_scores"] == {"texts": 1, "recall": None, "is_stale": False}
    cache.ask(document(2), 7, 8, 9)
    assert cache.spans == [(0, 63)]


def test_no_range_is_scored_before_scores_are_known():
    cache = LearnedCache(is_known=False)
    with pytest.raises(InvariantError, match="before scores were learned"):
        cache.prefixes.compressor.rank(torch.arange(1, 21), 0, CacheObservation(), turn=0)


def test_a_pool_that_no_text_fits_is_refused():
    cache = LearnedCache(num_slots=150, is_known=False)
    with pytest.raises(UnsupportedSetupError, match="texts of 128 tokens or more, and pool and context have room for"):
        TextReader(ReadingScheduler(cache.harness), cache.harness.tree, *SUBJECT)


def test_a_text_that_is_never_admitted_ends_the_start(monkeypatch):
    monkeypatch.setattr(learning, "MAX_IDLE_TURNS", 3)
    cache = LearnedCache(is_known=False)
    scheduler = ReadingScheduler(cache.harness)
    scheduler.get_next_batch_to_run = lambda **_: SimpleNamespace(running_batch=None, batch_to_run=None)
    with pytest.raises(UnsupportedSetupError, match="of a text of 140 tokens, SGLang does not admit it"):
        TextReader(scheduler, cache.harness.tree, *SUBJECT).read([1] * 140)


def test_a_text_that_is_dropped_between_two_repetitions_ends_the_start(monkeypatch):
    cache = LearnedCache(is_known=False)
    queued = TextReader._queued

    def drop_and_queue(reader, tokens, *, is_cached):
        if not is_cached:
            cache.harness.evict(1)
        return queued(reader, tokens, is_cached=is_cached)

    monkeypatch.setattr(TextReader, "_queued", drop_and_queue)
    with pytest.raises(UnsupportedSetupError, match="of a text of 140 tokens, it was dropped between two repetitions"):
        reader = TextReader(ReadingScheduler(cache.harness), cache.harness.tree, *SUBJECT)
        reader.read([i % 11 for i in range(140)])
        reader.score()


def test_texts_are_cut_to_the_room_there_is():
    cache = LearnedCache(is_known=False)
    reader = TextReader(ReadingScheduler(cache.harness), cache.harness.tree, *SUBJECT)
    assert len(reader.tokens_of("a" * 9000, as_chat=True)) == reader.longest < 500


def distilling(*, has_weights=True, windows=(), needs_scores=True, statistics=None):
    made = object.__new__(Distilling)
    made._ranks, made._geometry, made._device = TensorRanks(), KVGeometry(2, 4, 2, 8, 10, windows=windows), None
    made._has_weights, made.learned = has_weights, LearnedScores(ROTARY)
    made._needs_scores, made._statistics, made._known = needs_scores, statistics, Learned()
    return made


def test_scores_that_find_too_little_are_used_and_a_warning_says_so(caplog):
    made = distilling()
    made._use(Learned(replace(ScoreWeights.zeros(made._geometry), recall=0.71)))
    assert made.learned.weights is not None and not caplog.records
    made = distilling()
    made._use(Learned(replace(ScoreWeights.zeros(made._geometry), recall=0.41)))
    assert made.learned.weights.recall == 0.41
    assert "find 41 % of what repetitions of a text attend to, less than 70 %" in caplog.text


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (distilling(has_weights=False), "the weights are random"),
        (distilling(windows=(16, 16)), "all layers have sliding windows"),
        (distilling(windows=(16, 0)), None),
    ],
)
def test_where_nothing_can_be_learned_all_tokens_score_alike(made, why, caplog):
    made.use_none()
    assert made.lacks_scores is (why is None) is (made.learned.weights is None)
    if why is not None:
        assert why in caplog.text and not made.learned.weights.cache.any()


def test_statistics_are_written_into_the_tensors_that_are_read():
    read, found = RowStatistics.neutral((2, 2, 8)), RowStatistics(*(torch.rand(2, 2, 8) + 0.5 for _ in range(4)))
    made = distilling(needs_scores=False, statistics=read)
    table = read.table
    assert made.lacks_statistics and not made.lacks_scores and made.digest == ""
    made._use(Learned(None, found))
    assert not made.lacks_statistics and made.learned.weights is None and len(made.digest) == 64
    assert torch.equal(read.k_mean, found.k_mean) and torch.equal(read.v_scale, found.v_scale)
    assert torch.equal(table[8:].view(2, 2, 4, 8)[:, :, 1], found.k_scale)  # what kernels read


def test_statistics_are_learned_where_scores_cannot_be():
    """Layers with windows have keys and values as others have."""
    made = distilling(statistics=RowStatistics.neutral((2, 2, 8)), windows=(16, 16))
    made.use_none()
    assert made.lacks_statistics and not made.lacks_scores


def test_prefills_alone_give_statistics():
    cache = LearnedCache(is_known=False)
    scheduler = ReadingScheduler(cache.harness)
    reader = TextReader(scheduler, cache.harness.tree, *SUBJECT)
    sums = RowSums(cache.harness.geometry, ROTARY)
    tokens = [i % 11 for i in range(140)]
    text = reader.read(tokens)
    assert text.token_slots.numel() == 140 and scheduler.num_batches == 3
    sums.add(text)
    found = sums.solve()
    torch.testing.assert_close(found.k_mean, cache.harness.tree.packer.k_arena[:, text.token_slots[4:]].float().mean(1))
    reader.forget()
    cache.harness.check()
    assert cache.prefixes.prefills is reader._served and cache.harness.tree.total_size()[0] == 0


# ---- while serving --------------------------------------------------------------------------------------------------


def test_new_weights_of_the_model_keep_what_was_learned_and_say_so(caplog):
    cache = LearnedCache()
    weights = cache.learned.weights
    for _ in range(2):
        cache.harness.tree.forget_compressed()
    assert cache.learned.weights is weights
    assert cache_state(cache.harness.tree)["learned_scores"]["is_stale"]
    assert caplog.text.count("scores learned for those stay in use") == 1
