"""Random sequences of everything a scheduler does, checked against what each request's tokens must read."""

from __future__ import annotations

import pytest

from helpers.image_machines import IMAGE_MACHINES
from helpers.long_machine import LONG_MACHINES
from helpers.machines import LATENT_MACHINES, MACHINES, SETTINGS
from helpers.pool_machines import STATE_MACHINES, WINDOW_MACHINES
from helpers.verify_machines import VERIFY_MACHINES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "machine",
    MACHINES + IMAGE_MACHINES + LATENT_MACHINES + LONG_MACHINES + WINDOW_MACHINES + STATE_MACHINES + VERIFY_MACHINES,
)
def test_random_sequences(machine):
    case = machine.TestCase
    case.settings = SETTINGS
    case("runTest").runTest()
