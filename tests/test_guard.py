"""Errors are held where they concern one request, and pass where going on would corrupt answers."""

from __future__ import annotations

import logging

import pytest

from sgl_kvevict.errors import ConfigError, InvariantError
from sgl_kvevict.guard import MAX_TRACE_CHARS, PER_RANK, Guard, Place, accounting


def test_an_error_ends_the_block_only_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()

    def compute() -> str:
        with guard.at(Place.PROMPT):
            return str(1 / 0)
        return "instead"

    with caplog.at_level(logging.ERROR):
        assert [compute(), compute()] == ["instead"] * 2
    assert guard.errors[Place.PROMPT] == 2 and sum(guard.errors.values()) == 2
    (record,) = caplog.records  # once a place
    assert "'prompt'" in record.getMessage() and "ZeroDivisionError" in record.getMessage()
    assert "str(1 / 0)" in record.getMessage()


def test_a_place_that_always_fails_is_logged_again_with_how_many_attempts_did(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    with caplog.at_level(logging.ERROR):
        for number in range(1500):
            with guard.at(Place.COMPRESSION):
                raise ValueError(f"error {number}")
            with guard.at(Place.HOST) as attempt:
                pass
            assert not attempt.failed
    logged = [record.getMessage().splitlines() for record in caplog.records]
    assert [lines[0].split(" failed")[0] for lines in logged] == [
        f"kvevict: {count} of {count} attempts at 'compression'" for count in (1, 10, 100, 1000)
    ]
    assert [lines[-1] for lines in logged] == [f"ValueError: error {count - 1}" for count in (1, 10, 100, 1000)]
    assert guard.attempts[Place.COMPRESSION] == guard.attempts[Place.HOST] == 1500 and guard.errors[Place.HOST] == 0


@pytest.mark.parametrize("place", Place)
def test_errors_of_accounting_and_interrupts_pass_every_guard(place: Place) -> None:
    for error in (InvariantError("slots"), KeyboardInterrupt(), SystemExit(0)):
        guard = Guard()
        with pytest.raises(type(error)), guard.at(place):
            raise error
        assert not any(guard.errors.values())


@pytest.mark.parametrize("place", Place)
def test_ranks_do_not_part(place: Place) -> None:
    guard = Guard(num_ranks=2)
    try:
        with guard.at(place):
            raise ConfigError("x")
    except InvariantError:
        assert place in PER_RANK
    else:
        assert place not in PER_RANK
    assert guard.errors[place] == 1


def test_logs_are_short(caplog: pytest.LogCaptureFixture) -> None:
    def fall(depth: int) -> None:
        if depth == 0:
            raise ValueError("x" * 1_000_000)
        fall(depth - 1)

    with caplog.at_level(logging.ERROR), Guard().at(Place.OPTIONS):
        fall(500)
    assert len(caplog.text) < MAX_TRACE_CHARS + 1000


def test_accounting_makes_every_exception_an_invariant_error() -> None:
    @accounting()
    def move(error: Exception | None) -> str:
        if error is not None:
            raise error
        return "moved"

    assert move(None) == "moved"
    for error in (KeyError("slot"), MemoryError(), InvariantError("same")):
        with pytest.raises(InvariantError):
            move(error)
    with pytest.raises(InvariantError), Guard().at(Place.COMPRESSION):
        move(KeyError("slot"))
