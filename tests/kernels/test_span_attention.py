"""How the compiled call comes about; what it computes is in tests/attention/test_numba_attention.py."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from kvevict_kernels.span_attention import SpanAttention, call
from kvevict_kernels.span_attention import words as w

BUILD = (
    "import logging, torch; logging.basicConfig(level=logging.INFO, format='%(message)s');"
    "from kvevict_kernels.span_attention import SpanAttention;"
    "arena = torch.zeros(1, 8, 1, 16); SpanAttention(arena, arena.clone(), 1)"
)


def build() -> SpanAttention:
    arena = torch.zeros(1, 8, 1, 16)
    return SpanAttention(arena, arena.clone(), 1)


@pytest.fixture
def fresh_process_state():
    call.call.cache_clear()
    yield
    call.call.cache_clear()


def test_a_second_process_compiles_nothing(tmp_path):
    def log() -> str:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", BUILD], env=environment, capture_output=True, text=True, check=True
        )
        return done.stderr

    assert "attention compiled in" in log()
    assert "attention loaded in" in log()


def test_without_a_place_to_keep_it_every_start_compiles_and_says_so(fresh_process_state, monkeypatch, caplog):
    class Compiled:
        cache_hits = 0
        address = 0

    def compile_call(stamp: int, is_cached: bool) -> Compiled:
        if is_cached:
            raise RuntimeError("cannot cache function 'attend': no locator available for file 'numba_impl.py'")
        return Compiled()

    monkeypatch.setattr("kvevict_kernels.span_attention.numba_impl.compile_call", compile_call)
    build()
    assert "cannot be kept for the next start: set NUMBA_CACHE_DIR" in caplog.text


def test_what_goes_wrong_while_compiling_is_not_hidden(fresh_process_state, monkeypatch):
    def compile_call(stamp: int, is_cached: bool) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("kvevict_kernels.span_attention.numba_impl.compile_call", compile_call)
    with pytest.raises(RuntimeError, match="no such instruction"):
        build()


def test_words_of_other_sources_are_left_alone():
    attention = build()
    layout = attention.lay_out([()], [1], [0])
    layout.locate([0], [1], torch.tensor([0]), torch.ones(1, 4, dtype=torch.int32))
    attention.prepare(layout)
    layout.words[w.STAMP] += 1
    q = torch.ones(1, 1, 16)
    out, lse = torch.full_like(q, 7.0), torch.full((1, 1), 7.0)
    attention.run(layout, 0, q, 1.0, out, lse)
    assert np.unique(out.numpy()).tolist() == [7.0]


def test_the_rows_that_a_layout_points_into_stay():
    layout = build().lay_out([()], [1], [0])
    req_to_token = torch.ones(1, 4, dtype=torch.int32)
    held = weakref.ref(req_to_token)
    layout.locate([0], [1], torch.tensor([0]), req_to_token)
    del req_to_token
    gc.collect()
    assert held() is not None
