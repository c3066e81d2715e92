"""Scoring passes are complete requests in every way to schedule them (``make campaign`` runs all of them)."""

from __future__ import annotations

from helpers.modes import CONFIG, FLAGS, MODES, assert_nothing_leaked, serve_readers


def test_passes_run_beside_users_of_other_priority(start, tiny_llama):
    server = start(tiny_llama, *FLAGS, *MODES["priority"], config=CONFIG)
    serve_readers(server, 80, seed=1, priorities=True)
    assert assert_nothing_leaked(server) > 0
