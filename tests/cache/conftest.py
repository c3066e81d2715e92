from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _published(server_args):
    """Trees of SGLang read the arguments of their process."""
