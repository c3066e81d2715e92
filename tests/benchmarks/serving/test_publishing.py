from __future__ import annotations

import pytest
from serving_bench.options import MAX_BUSY_PCT, MIN_REPEATS, reason_not_to_publish


@pytest.mark.parametrize(
    ("repeats", "needed", "busy_pct", "reason"),
    [
        (MIN_REPEATS, MIN_REPEATS, 0.0, None),
        (1, 1, MAX_BUSY_PCT, None),
        (3, MIN_REPEATS, 0.0, "3 repetitions, at least 5 are needed"),
        (7, MIN_REPEATS, 55.0, "others use 55 % of the processor, at most 10 % are allowed"),
    ],
)
def test_what_belongs_into_the_documentation(repeats: int, needed: int, busy_pct: float, reason: str | None) -> None:
    assert reason_not_to_publish(repeats, needed, busy_pct) == reason
