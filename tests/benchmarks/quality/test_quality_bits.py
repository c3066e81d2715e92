"""The formats of few bits that are measured are those that rows have, and shares of bytes are what they say."""

from __future__ import annotations

import bits
import pytest
import torch
from kvevict_quality.row_formats import FLOAT8, FOUR

from kvevict_kernels.row_codec import decode_rows, encode_rows
from kvevict_tools.csv_rows import read_rows
from sgl_kvevict.cache.pressure import DIVERGENCE, LOST_PER_NAT
from sgl_kvevict.config import KVEvictConfig


@pytest.mark.parametrize(("measured", "width"), [(FLOAT8, 8), (FOUR, 4)])
def test_what_is_measured_is_what_rows_hold(measured, width):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 40, 64, generator=generator) * 3 + 5
    mean, deviation = torch.randn(2, 64, generator=generator), torch.rand(2, 64, generator=generator) + 0.5
    rows[0, 0] *= 100
    found = measured.read_back(rows, mean, deviation)
    for head in range(2):
        encoded = encode_rows(rows[head], mean[head], deviation[head], width)
        torch.testing.assert_close(found[head], decode_rows(encoded, mean[head], deviation[head], width))


def test_what_the_server_does_is_measured():
    """At every share of the default configuration."""
    mixes = {mix.share: mix for mix in bits.MIXES if mix.is_auto}
    assert tuple(mixes) == KVEvictConfig().shares == (0.2, 0.125, 0.05)
    assert [round(mix.wide, 1) for mix in mixes.values()] == [0.2, 0.2, 0.2]


def test_losses_of_shrinking_follow_from_what_was_measured():
    """Means of SmolLM2 over the texts, which its page shows."""
    for share, nats in DIVERGENCE.items():
        measured = [
            float(row["kl"])
            for row in read_rows(bits.RESULTS)
            if (row["model"], row["format"], row["share"]) == ("SmolLM2-135M-Instruct", "auto", f"{share:g}")
        ]
        assert len(measured) == 3 and nats == pytest.approx(sum(measured) / 3, abs=5e-5)
    with_16 = {
        share: [float(row["kl"]) for row in read_rows(bits.RESULTS) if (row["format"], row["share"]) == ("16", share)]
        for share in ("0.2", "0.1")
    }
    per_nat = [lost / (sum(kl) / len(kl)) for lost, kl in zip((0.06, 0.14), with_16.values(), strict=True)]
    assert pytest.approx(LOST_PER_NAT, abs=0.05) == sum(per_nat) / 2
