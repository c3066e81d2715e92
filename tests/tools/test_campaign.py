"""A short campaign in every run of the test suite: a unit of each part that needs no server, and its mutation."""

from __future__ import annotations

import traceback

import pytest
from campaign import bounds, fuzz, machine


@pytest.mark.parametrize("seed", range(len(machine.POLICIES) + 1))
def test_every_forward_reads_what_its_request_may_read(seed):
    assert machine.unit(seed, 0.15)["done"] == 300


@pytest.mark.parametrize("seed", [5, 6])
def test_the_machine_notices_requests_that_are_known_by_name(seed):
    with machine.requests_known_by_name(), pytest.raises(AssertionError) as caught:
        machine.unit(seed, 0.5)
    assert caught.value.__cause__ is not None
    trace = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert "_forward" in {frame.name for frame in trace}  # where a forward reads back what it would attend to


@pytest.mark.parametrize("seed", range(len(fuzz.CASES)))
def test_random_input_is_understood_or_refused(seed):
    assert fuzz.unit(seed, 0.1)["done"] > 0


def test_memory_is_flat():
    assert bounds.unit(0, 0.01)["done"] == 200
