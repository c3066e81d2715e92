"""What layers with a window keep of a range: all that who reads the range can see, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from helpers.decisions import OWN_POLICIES, built
from helpers.packing import compress, resize
from helpers.tolerance import FLOAT32_NOISE, assert_accurate
from kvevict_kernels.rotary import Rotary
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.distill.features import NUM_WINDOW, CachedRange, num_cache_features
from sgl_kvevict.distill.weights import ScoreWeights, with_learned_scores
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import LayerView, Signal
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.prompt_observation import CacheObservation, ObservationSpec, PromptObservation
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.segments.segment import Segment

KNORM = OWN_POLICIES["knorm"]
NUM_TOKENS, START = 150, 40
WINDOWS = (0, 20, 500, 0, 33, 1)
SLOTS = torch.arange(7, 7 + NUM_TOKENS)


def make(budget: float, windows: tuple[int, ...] = WINDOWS, **options: object) -> Compressor:
    """A random arena; ``knorm`` needs nothing but the cache."""
    torch.manual_seed(42)
    geometry = KVGeometry(len(windows), 6, 3, 8, 200, windows=windows)
    config = KVEvictConfig(policy=KNORM, budget=budget, **options)
    return Compressor(config, built(KNORM), SegmentPacker(geometry, *torch.randn(2, *geometry.arena_shape)))


def compressed(compressor: Compressor) -> tuple[Segment, Tensor]:
    """The segment, and the arena's keys as they were."""
    before = compressor.packer.k_arena.clone()
    segment, freed = compress(compressor, SLOTS, START, CacheObservation())
    assert sorted(segment.packed.token_slots.tolist() + freed.tolist()) == SLOTS.tolist()
    return segment, before


def positions(segment: Segment, layer: int) -> list[list[int]]:
    """Of each head's entries."""
    bounds = segment.packed.rows.indptr.tolist()
    heads = segment.geometry.num_kv_heads
    runs = [slice(*bounds[run : run + 2]) for run in range(layer * heads, (layer + 1) * heads)]
    return [segment.packed.rows.positions[run].tolist() for run in runs]


def last(count: int, end: int = START + NUM_TOKENS) -> list[int]:
    return list(range(end - count, end))


def test_windows_are_kept_and_their_room_goes_to_the_others() -> None:
    """The budget is spent to the slot; entries lie where they are looked for."""
    compressor = make(0.3)
    segment, before = compressed(compressor)
    share = int(0.3 * NUM_TOKENS)
    heads = compressor.packer.geometry.num_kv_heads
    for layer, window in enumerate(WINDOWS):
        if window:
            assert positions(segment, layer) == [last(min(window - 1, share))] * heads
    assert segment.num_slots == share and segment.num_entries == share * segment.geometry.num_runs
    rest = share * len(WINDOWS) - (19 + share + 32 + 0)
    assert sum(len(run) for layer in (0, 3) for run in positions(segment, layer)) == rest * heads
    assert rest > 2 * share
    for layer in range(len(WINDOWS)):
        for head, run in enumerate(positions(segment, layer)):
            assert run == sorted(set(run)) and all(START <= position < START + NUM_TOKENS for position in run)
            first = int(segment.packed.rows.indptr[layer * heads + head])
            kept = segment.packed.rows.rows[first : first + len(run)].long()
            rows = compressor.packer.k_arena.view(-1, 8)[kept]
            assert torch.equal(rows, before[layer, SLOTS[torch.tensor(run, dtype=torch.int64) - START], head])


def test_full_layers_of_a_model_on_one_pool_keep_what_windows_do_not_need() -> None:
    """gpt-oss, 24 layers of which every other one sees 128 tokens: within the budget, and 1.8 times as much of each."""
    geometry = KVGeometry(24, 16, 8, 4, 3001, windows=(128, 0) * 12)
    config = KVEvictConfig(policy=KNORM, budget=0.2)
    compressor = Compressor(config, built(KNORM), SegmentPacker(geometry, *torch.randn(2, *geometry.arena_shape)))
    segment, _ = compress(compressor, torch.arange(3000), 0, CacheObservation())
    assert segment.num_slots == 600
    assert all(sum(map(len, positions(segment, layer))) == 127 * 8 for layer in range(0, 24, 2))
    kept = sum(len(run) for layer in range(1, 24, 2) for run in positions(segment, layer)) / (12 * 8 * 3000)
    assert kept == (600 * 24 - 127 * 12) / (12 * 3000) > 0.35


def test_nothing_is_lost_to_who_reads_the_range() -> None:
    """Attention of every later query, in a layer whose window its share covers, is that of the uncompressed range."""
    compressor = make(0.3)
    v_before = compressor.packer.v_arena.clone()
    segment, k_before = compressed(compressor)
    end = START + NUM_TOKENS
    for layer in (1, 4):
        window = WINDOWS[layer]
        for head, run in enumerate(positions(segment, layer)):
            first = int(segment.packed.rows.indptr[layer * 3 + head])
            slots = segment.packed.rows.rows[first : first + len(run)].long()
            k, v = (arena.view(-1, 8)[slots] for arena in (compressor.packer.k_arena, compressor.packer.v_arena))
            all_k, all_v = k_before[layer, SLOTS, head], v_before[layer, SLOTS, head]
            for position in range(end, end + window - 1):
                q = torch.randn(8)
                seen = torch.tensor(run) > position - window
                before = torch.arange(START, end) > position - window
                got = (k[seen] @ q).softmax(0) @ v[seen]
                want = (all_k[before] @ q).softmax(0) @ all_v[before]
                assert_accurate("out", got, want, want, noise=4 * FLOAT32_NOISE)


def test_what_lacks_tokens_cannot_be_split() -> None:
    """At budget 1.0 nothing lacks."""
    assert not compressed(make(0.3))[0].splittable
    whole = compressed(make(1.0))[0]
    assert whole.splittable and whole.num_entries == NUM_TOKENS * whole.geometry.num_runs
    assert not make(0.3).splittable and make(0.3, (0, 0)).splittable


def test_a_model_of_windows_alone_needs_less_than_the_budget() -> None:
    segment, _ = compressed(make(0.5, (20, 11)))
    assert positions(segment, 0) == [last(19)] * 3 and positions(segment, 1) == [last(10)] * 3
    assert segment.num_slots == 15


def test_full_layers_keep_no_more_than_there_is() -> None:
    segment, _ = compressed(make(0.9, (0, 2, 2, 2)))
    assert positions(segment, 0) == [list(range(START, START + NUM_TOKENS))] * 3
    assert segment.num_slots == -(-(NUM_TOKENS + 3) // 4)


def test_a_resize_shortens_windows_from_their_beginning() -> None:
    """Each to its share; the others give up what comes last in order, and nobody gives up more."""
    compressor = make(0.3, min_budget=0.1)
    segment, _ = compressed(compressor)
    before, held = {layer: positions(segment, layer) for layer in (0, 3)}, segment.num_slots
    freed = resize(compressor.packer, segment, 15)
    assert segment.num_slots == 15 and freed.numel() == held - 15
    for layer, window in enumerate(WINDOWS):
        if window:
            assert positions(segment, layer) == [last(min(window - 1, 15))] * 3
    rest = 15 * len(WINDOWS) - (15 + 15 + 15 + 0)
    assert sum(len(run) for layer in (0, 3) for run in positions(segment, layer)) == rest * 3
    for layer, runs in before.items():
        for run, smaller in zip(runs, positions(segment, layer), strict=True):
            assert set(smaller) <= set(run)


def test_nothing_is_collected_in_layers_with_a_window() -> None:
    """Learned scores, which look at all layers at once, do without."""
    store = make(0.3).packer
    signals = frozenset({Signal.WINDOW_QUERIES, Signal.ACCUMULATED_ATTENTION})
    observation = PromptObservation(ObservationSpec(store.geometry, signals, window_size=8))
    observation.begin_chunk(0, NUM_TOKENS, is_last=True, token_slots=SLOTS)
    queries = torch.randn(NUM_TOKENS, 6, 8)
    for layer in range(len(WINDOWS)):
        observation.record(layer, queries, torch.full((NUM_TOKENS, 6), 5.0), store.k_arena[layer], 0.3)

    def show(layer: int) -> LayerView:
        return observation.show(layer, 0, store.k_arena[layer], store.v_arena[layer], SLOTS)

    assert [set(show(layer).signals) for layer in range(len(WINDOWS))] == [set() if w else signals for w in WINDOWS]
    shape = (len(WINDOWS), 3, num_cache_features(8))
    weights = ScoreWeights(torch.zeros(shape), torch.ones(*shape[:2], shape[2] + NUM_WINDOW), num_prefixes=1)
    tokens = CachedRange(store.k_arena, store.v_arena, SLOTS, 0, NUM_TOKENS)
    rotary = Rotary(torch.empty(NUM_TOKENS, 0), is_neox=True)
    learned = with_learned_scores(show, weights, tokens, rotary)
    for layer in (0, 3):
        assert learned(layer).signals[Signal.LEARNED_SCORES].shape == (3, NUM_TOKENS)
