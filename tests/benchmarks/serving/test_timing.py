"""Times of functions that call each other are counted once."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace

import pytest


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def batch(is_decode: bool) -> SimpleNamespace:
    return SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: is_decode))


def test_a_function_s_time_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from serving_bench.timing import FORWARDS, seconds_in
    from serving_bench.timing import kvevict_timers as timing

    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", clock)
    timers = timing.Timers(tmp_path / "seconds.json")

    def work(seconds: float, *inner: tuple[str, float]) -> None:
        clock.now += seconds
        for cost, its in inner:
            timers.around(cost, work, its)

    def forward(_runner: object, _batch: object) -> None:
        clock.now += 0.5
        timers.around(timing.NORMS, work, 2.0, (timing.LINEAR, 4.0), (timing.ATTENTION, 8.0))

    timers.around_forward(forward, object(), batch(True))
    timers.around_forward(forward, object(), batch(True))
    timers.around(timing.COMPRESSION, work, 16.0)
    with pytest.raises(ZeroDivisionError):
        timers.around(timing.LINEAR, lambda: 1 / 0)
    timers.around_forward(forward, object(), batch(False))
    decode = {FORWARDS: 2, timing.PLAN: 1.0, timing.NORMS: 4.0, timing.LINEAR: 8.0, timing.ATTENTION: 16.0}
    assert seconds_in(tmp_path / "seconds.json", "decode") == decode | {timing.COMPRESSION: 0.0}
    assert seconds_in(tmp_path / "seconds.json", "prefill")[timing.COMPRESSION] == 16.0


def test_sglang_finds_the_plugin() -> None:
    from serving_bench.timing import FOLDER

    (found,) = distributions(path=[str(FOLDER)])
    (entry,) = found.entry_points
    assert (entry.group, entry.value) == ("sglang.srt.plugins", "kvevict_timers:register")
