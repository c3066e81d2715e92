"""What a client is told of the cache: what the server writes is what the client reads."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import CachedTokensDetails

from sgl_kvevict.cache.readers import ReaderRecord
from sgl_kvevict.cache_report import CacheReport, CompressedRead
from sgl_kvevict.errors import ConfigError

NOTHING = CompressedRead()
QUARTER = CompressedRead(100, (0.0, 1.0))
FIFTH = CompressedRead(100, (0.01, 0.53))


def of(details: object) -> CacheReport:
    return CacheReport.of({"prompt_tokens": 9, "cached_tokens_details": details})


def test_shares_and_bits() -> None:
    assert (NOTHING.share, NOTHING.bits, NOTHING.lost_bits) == (1.0, 16.0, 0.0)
    assert (QUARTER.share, QUARTER.bits, QUARTER.lost_bits) == (1.0, 4.0, 1200.0)
    assert FIFTH.share == pytest.approx(0.54) and FIFTH.bits == pytest.approx((0.16 + 2.12) / 0.54)
    assert FIFTH.lost_bits == pytest.approx(100 * (16 - 2.28))
    evicted = CompressedRead(5)
    assert (evicted.share, evicted.bits, evicted.lost_bits) == (0.0, 16.0, 80.0)


def test_the_least_that_was_read_counts() -> None:
    record = ReaderRecord()
    assert record.report is None
    for read, least in ((NOTHING, NOTHING), (QUARTER, QUARTER), (FIFTH, FIFTH), (QUARTER, FIFTH), (NOTHING, FIFTH)):
        record.has_read(read)
        assert record.report == CacheReport(compressed=least)


def test_what_is_written() -> None:
    assert CacheReport().details == {"kvevict_compressed": 0}
    assert CacheReport(compressed=FIFTH, computed_again=7, prefilled_compressed=8).details == {
        "kvevict_compressed": 100,
        "kvevict_percent_16_bits": 1,
        "kvevict_percent_4_bits": 53,
        "kvevict_computed_again": 7,
        "kvevict_prefilled_compressed": 8,
    }


@given(
    st.tuples(*[st.integers(0, 10**6)] * 3),
    st.integers(1, 10**6),
    st.tuples(*[st.integers(0, 50)] * 2),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_what_is_written_is_what_is_read(places, num_tokens, percent, again, prefilled) -> None:
    """Through the type that SGLang's messages have: anything but whole numbers and strings would end its processes."""
    read = CompressedRead(num_tokens, tuple(each / 100 for each in percent))
    report = CacheReport(*places, read, again, prefilled)
    details = dict(zip(("device", "host", "storage"), places, strict=True)) | report.details
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(details), type=CachedTokensDetails)
    assert of(sent) == report


@pytest.mark.parametrize("details", [None, {}])
def test_nothing_was_found(details: object) -> None:
    assert of(details) == CacheReport() == CacheReport.of({"prompt_tokens": 9})


def test_a_server_without_this_plugin() -> None:
    report = of({"device": 12, "host": 3, "storage": 4, "storage_backend": "file"})
    assert report == CacheReport(12, 3, 4) and report.compressed.share == 1.0


@pytest.mark.parametrize(
    ("meta_info", "message"),
    [
        ({}, "meta_info: got {}; allowed: an object with 'prompt_tokens'"),
        ({"prompt_tokens": 1, "cached_tokens_details": [1]}, "meta_info.cached_tokens_details: got [1]; allowed"),
        (
            {"prompt_tokens": 1, "cached_tokens_details": {"kvevict_compressed": "x"}},
            'meta_info.cached_tokens_details.kvevict_compressed: got "x"; allowed: a whole number',
        ),
    ],
)
def test_what_is_no_report(meta_info: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        CacheReport.of(meta_info)
