"""The formats of few bits that are measured are those that rows have, and shares of bytes are what they say."""

from __future__ import annotations

import bits
import pytest
import torch

from kvevict_kernels.row_codec import RowStatistics, decode_rows, encode_rows
from kvevict_tools.csv_rows import read_rows
from sgl_kvevict.cache.pressure import DIVERGENCE, LOST_PER_NAT
from sgl_kvevict.config import KVEvictConfig


def test_what_is_measured_is_what_rows_hold():
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 3, 40, 64, generator=generator) * 3 + 5 for _ in "kv")
    k[0, 0, 7] *= 100
    of_model = RowStatistics(*(torch.rand(2, 3, 64, generator=generator) + 0.5 for _ in range(4)))
    found, _ = bits.in_four(bits.Context(k, v, [], 0), of_model)
    for layer, head in ((0, 0), (1, 2)):
        own = of_model.k_mean[layer, head], of_model.k_scale[layer, head]
        torch.testing.assert_close(found[layer, head, 4:], decode_rows(encode_rows(k[layer, head, 4:], *own), *own))
    assert torch.equal(found[:, :, :4], k[:, :, :4])


def test_what_the_server_does_is_measured():
    """At every share of the default configuration."""
    assert set(KVEvictConfig().shares) <= set(bits.SHARES)
    scores = torch.rand(2, 3, 1000)
    scores[..., :4] = float("inf")
    kept = bits.kept_entries(scores, 0.2, "auto")
    assert int(kept.sum()) == 6 * (4 + 4 * 196) and kept[..., :4].all()


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
        share: [
            float(row["kl"])
            for row in read_rows(bits.RESULTS)
            if (row["model"], row["format"], row["share"]) == ("SmolLM2-135M-Instruct", "16", share)
        ]
        for share in ("0.2", "0.1")
    }
    per_nat = [lost / (sum(kl) / len(kl)) for lost, kl in zip((0.06, 0.14), with_16.values(), strict=True)]
    assert pytest.approx(LOST_PER_NAT, abs=0.05) == sum(per_nat) / 2
