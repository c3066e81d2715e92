"""SGLang resolves its platform at import: choose ours before any test module imports it."""

import os

import pytest

os.environ.setdefault("SGLANG_PLATFORM", "kvevict_cpu")


@pytest.fixture(scope="module", autouse=True)
def _published(server_args):
    """Trees of SGLang read the arguments of their process."""


@pytest.fixture
def harness():
    from helpers.harness import Harness  # which imports SGLang

    return Harness()
