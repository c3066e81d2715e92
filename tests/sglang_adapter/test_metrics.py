"""Metrics of a tree, written to prometheus_client's own registry."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from helpers.harness import DOCUMENT, Harness
from sgl_kvevict.sglang_adapter.monitoring.metrics import Metrics
from sgl_kvevict.sglang_adapter.monitoring.server_info import read_gauges

ROOT = Path(__file__).resolve().parents[2]
LABELS = {"cache_type": "KVEvictTree", "tp_rank": "0"}


@pytest.fixture(scope="module")
def harness():
    harness = Harness(num_slots=200)
    harness.metrics = Metrics(harness.tree, LABELS)
    return harness


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"kvevict:{name}", LABELS | labels)


def test_an_empty_cache_has_all_series_at_zero(harness):
    harness.metrics.each_turn()
    assert (value("spans"), value("tokens_per_slot"), value("compressions_total")) == (0, 1, 0)
    assert value("refusals_total", reason="not-cached") == 0
    assert value("pool_slots", holder="free") == value("pool_slots", holder="compressed") + 200


def test_series_follow_the_cache(harness):
    rng = random.Random(0)
    readers = []
    for _ in range(200):
        req = harness.run(DOCUMENT[: rng.choice([20, 40, 60])] + [rng.randrange(11) for _ in range(12)])
        if req is not None:
            readers.append(req)
        if len(readers) > 3:
            harness.finish(readers.pop(0))
    harness.metrics.refresh()
    gauges, totals = read_gauges(harness.tree), harness.tree.prefixes.totals
    assert gauges.spans > 0 and totals.dropped_spans > 0 and gauges.max_readers_per_span > 0
    for name in ("spans", "segments", "dead_entries"):
        assert value(name) == getattr(gauges, name)
    assert value("logical_tokens") == sum(len(node.key) for node in harness.tree.nodes())
    assert value("held_slots") == harness.tree.total_size()[0]
    assert value("tokens_per_slot") == pytest.approx(gauges.logical_tokens / harness.tree.total_size()[0])
    assert value("max_readers_per_span") == gauges.max_readers_per_span
    assert value("readers_per_span") == pytest.approx(gauges.readers / gauges.spans)
    assert sum(value("pool_slots", holder=holder) for holder in ("free", "compressed", "full", "private")) == 200
    assert value("compressions_total") == totals.compressions
    assert value("compression_seconds_total") == pytest.approx(totals.compression_seconds)
    assert value("evicted_entries_total") == totals.evicted_entries > 0
    assert value("entries", bits="16") == gauges.entries_16 > 0 == value("entries", bits="4")
    assert value("span_bytes") == gauges.span_slots * value("slot_bytes")
    assert value("dropped_spans_total") == totals.dropped_spans
    for req in readers:
        harness.finish(req)


def test_the_manual_names_exactly_the_series_there_are(harness):
    ours = {
        sample.name
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("kvevict:") and not sample.name.endswith("_created")
    }
    documented = set(re.findall(r"^\|`(kvevict:\w+)`", (ROOT / "docs" / "serve.md").read_text(), re.MULTILINE))
    assert documented == ours


@pytest.mark.parametrize(("seconds", "pause"), [(0.0, 1.0), (0.5, 50.5), (100.0, 160.0)])
def test_series_are_written_at_most_once_a_second_and_in_one_percent_of_the_time(harness, monkeypatch, seconds, pause):
    clock, begun = [0.0], []
    monkeypatch.setattr(harness.metrics, "_next_refresh", 0.0)
    monkeypatch.setattr("sgl_kvevict.sglang_adapter.monitoring.metrics.time.monotonic", lambda: clock[-1])
    monkeypatch.setattr(harness.metrics, "refresh", lambda: begun.append(clock[-1]) or clock.append(now + seconds))
    for now in (2e9, 2e9 + pause - 0.1, 2e9 + pause):
        clock.append(now)
        harness.metrics.each_turn()
    assert begun == [2e9, 2e9 + pause]
