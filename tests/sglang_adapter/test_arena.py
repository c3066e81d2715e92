"""The arena of a pool, and the biases beside it."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.harness import publish_server_args
from sgl_kvevict.config import ENV_VAR
from sgl_kvevict.sglang_adapter.arena import Arena, ArenaKVPool, arena_of


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    publish_server_args(tmp_path_factory.mktemp("tiny-llama"))


def arena(monkeypatch: pytest.MonkeyPatch, **config: object) -> Arena:
    monkeypatch.setenv(ENV_VAR, json.dumps(config))
    pool = ArenaKVPool(
        size=30, page_size=1, dtype=torch.float16, head_num=2, head_dim=16, layer_num=3, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    found = arena_of(pool)
    assert found is not None
    return found


def test_layers_are_views_of_one_arena_without_biases(monkeypatch):
    found = arena(monkeypatch)
    assert found.k.shape == found.v.shape == (3, 31, 2, 16)
    assert found.biases is None


@pytest.mark.parametrize("policy", ["distilled", "reconstruction"])
def test_a_policy_that_fits_has_a_bias_for_every_head_slot(monkeypatch, policy):
    found = arena(monkeypatch, policy=policy, fit=True)
    assert found.biases is not None
    assert (found.biases.shape, found.biases.dtype) == (found.k.shape[:3], torch.float32)
    assert not found.biases.any()
