from __future__ import annotations

import pytest
from serving_bench.streams import Stream, decode_figures
from serving_bench.texts import document, question

from kvevict_tools.models import model_path


def stream(first: float, step: float, count: int) -> Stream:
    return Stream(0.0, tuple((first + i * step, i + 1) for i in range(count)), 10, 5, ())


def test_decode_speed_counts_only_while_all_streams_generate() -> None:
    figures = decode_figures([stream(1.0, 0.5, 9), stream(2.0, 0.5, 5)])
    assert figures["decode_tokens_per_s"] == pytest.approx(4.0)  # two streams, from 2.0 s to 4.0 s
    assert figures["inter_token_ms"] == pytest.approx(500.0)
    assert figures["ttft_s"] == pytest.approx(1.5)


def test_documents_are_as_long_as_asked_and_share_no_long_prefix() -> None:
    model = model_path()
    if model is None:
        pytest.skip("the demo model is not there; make model")
    first, second = document(model, 1, 700), document(model, 2, 700)
    assert (len(first), len(second)) == (700, 700)
    assert first[:6] != second[:6]
    assert question(model, 3) != question(model, 4)
