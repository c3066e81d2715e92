from __future__ import annotations

import pytest

from helpers.harness import Harness


@pytest.fixture(scope="module", autouse=True)
def _published(server_args):
    """Trees of SGLang read the arguments of their process."""


@pytest.fixture
def harness():
    return Harness()
