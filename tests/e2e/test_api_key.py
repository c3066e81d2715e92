"""A server with ``--api-key``: `warm` reaches it with the key in its environment, and says what is missing without."""

from __future__ import annotations

import pytest

from helpers.traffic import numbers
from sgl_kvevict.client import API_KEY_VAR, WarmError, warm

KEY = "a-key-that-nobody-reads"
FLAGS = ("--skip-tokenizer-init", "--max-total-tokens", "2000", "--dtype", "float32")


def test_a_prefix_is_warmed_with_the_key_and_nothing_shows_it(start, tiny_llama, monkeypatch):
    server = start(tiny_llama, *FLAGS, "--api-key", KEY, config={"min_prefix_tokens": 48})
    prefix = numbers(0, 300)
    monkeypatch.delenv(API_KEY_VAR, raising=False)
    with pytest.raises(WarmError, match=r"/generate: status 401: .*; the key of the server's --api-key is needed"):
        warm(server.url, input_ids=prefix)
    with pytest.raises(WarmError, match="status 401") as refused:
        warm(server.url, input_ids=prefix, api_key=KEY + "-not")
    assert KEY not in str(refused.value)
    monkeypatch.setenv(API_KEY_VAR, KEY)
    warm(server.url, input_ids=prefix)
    assert warm(server.url, input_ids=prefix).device > 0
    server.stop(grace_s=0)
