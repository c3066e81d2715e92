from __future__ import annotations

from sgl_kvevict.attention.batch import MAX_BATCHES, RecentBatches


def test_the_least_recently_used_makes_room_before_another_is_built() -> None:
    log: list[str] = []
    recent: RecentBatches[str, str] = RecentBatches(on_drop=lambda value: log.append(f"drop {value}"))

    def get(key: str) -> str:
        def build() -> str:
            assert len(recent._kept) < MAX_BATCHES
            log.append(f"build {key}")
            return key

        return recent.get(key, build)

    assert [get(key) for key in "abaca"] == list("abaca")
    assert log == ["build a", "build b", "drop b", "build c"]
    get("b")
    assert log[4:] == ["drop c", "build b"]
    assert len(recent._kept) == MAX_BATCHES
