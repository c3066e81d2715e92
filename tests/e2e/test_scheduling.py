"""Scoring passes are complete requests in every way to schedule them (``make campaign`` runs all of them)."""

from __future__ import annotations

import pytest

from helpers.modes import CONFIG, FLAGS, MODES, assert_nothing_leaked, serve_readers

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.mark.parametrize("mode", ["priority", "hrrn"])
def test_passes_run_beside_users(start, tiny_llama, mode):
    server = start(tiny_llama, *FLAGS, *MODES[mode], config=CONFIG)
    serve_readers(server, 80, seed=1, priorities=mode.startswith("priority"))
    assert assert_nothing_leaked(server) > 0
    server.stop(grace_s=0)
