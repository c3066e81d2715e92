"""The experiments of docs/papers.md: what they compute, against plain references on a tiny model."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

WRITE_PAGE = Path(__file__).resolve().parents[3] / "benchmarks" / "papers" / "write_page.py"


@pytest.fixture
def prefilled(tiny_demo, tokens):
    from paper_bench.compressed import Compressible

    return Compressible(tiny_demo.prefill(tokens[None, :160]))


@torch.inference_mode()
def test_nothing_evicted_is_the_models_own_loss(tiny_demo, tokens, prefilled):
    from paper_bench.compressed import ContinuingModel

    kept = prefilled.keep("snapkv", 1.0)
    assert bool(kept.mask.all()) and kept.num_range == 160 - 32
    loss = ContinuingModel(tiny_demo).loss(prefilled, kept, tokens[160:])
    before = tiny_demo.model.config._attn_implementation
    tiny_demo.model.set_attn_implementation("sdpa")
    logits = tiny_demo.model(tokens[None]).logits[0]
    tiny_demo.model.set_attn_implementation(before)
    assert loss == pytest.approx(float(cross_entropy(logits[160:-1].float(), tokens[161:])), rel=0.01)
    less = ContinuingModel(tiny_demo).loss(prefilled, prefilled.keep("random", 0.05), tokens[160:])
    assert abs(less - loss) > 0.05


@pytest.mark.parametrize("policy", ["d2o", "ada-snapkv"])
def test_what_later_tokens_read(prefilled, policy):
    kept = prefilled.keep(policy, 0.2)
    keys, values, valid = prefilled.entries(kept)
    selection, merge, prompt = kept.decision.selection, kept.decision.merge, prefilled.prompt
    assert (merge is not None) == (policy == "d2o")
    entry = 0
    for layer in range(3):
        for head in range(4):
            tokens = kept.mask[layer, head].nonzero().flatten().tolist()
            assert int(valid[layer, head].sum()) == len(tokens) + 32
            for place, token in enumerate(tokens):
                assert int(selection.indices[entry]) == token
                expected = prompt.v_arena[layer, token + 1, head].float()
                if merge is not None:
                    sources = slice(int(merge.indptr[entry]), int(merge.indptr[entry + 1]))
                    rows = prompt.v_arena[layer, merge.indices[sources].long() + 1, head].float()
                    expected = (merge.weights[sources, None] * rows).sum(0)
                torch.testing.assert_close(values[layer, head, place].float(), expected, rtol=0.01, atol=0.01)
                entry += 1
            tail = prompt.k_arena[layer, 129:161, head]
            assert torch.equal(keys[layer, head, -32:], tail)


def test_sizes_are_those_of_a_server(prefilled):
    assert prefilled.keep("snapkv", 0.25).decision.selection.num_entries == 32 * 12
    paper = prefilled.keep("chunkkv@paper", 64)
    assert paper.num_range == 159 and paper.decision.selection.num_entries == 63 * 12
    assert bool(prefilled.keep("random", 0.25).mask[..., :4].all())
    assert not bool(prefilled.keep("random", 0.25, sink_tokens=0).mask[..., :4].all())


@torch.inference_mode()
def test_eviction_loss_against_plain_attention(tiny_demo, tokens):
    from paper_bench.ada_kv import losses
    from paper_bench.compressed import Compressible

    whole = tiny_demo.prefill(tokens[None, :170])
    seen = replace(whole, queries=whole.queries[:, :160], lse=whole.lse[:, :160])
    weights = [layer.self_attn.o_proj.weight.float() for layer in tiny_demo.model.model.layers]
    compressible = Compressible(seen)
    assert losses(whole, 160, compressible.keep("snapkv@paper", 1.0), weights).tolist() == [0, 0, 0]
    kept = compressible.keep("snapkv@paper", 0.4)
    total = 0.0
    for query in range(160, 170):  # layer 1, one query after the other, head by head
        change = torch.zeros(8, 16)
        for head in range(8):
            keys = whole.k_arena[1, 1 : query + 2, head // 2].float()
            values = whole.v_arena[1, 1 : query + 2, head // 2].float()
            logits = keys @ whole.queries[1, query, head].float() * whole.sm_scale
            stays = torch.ones(query + 1, dtype=torch.bool)
            stays[: kept.num_range] = kept.mask[1, head // 2]
            change[head] = logits.softmax(0) @ values - logits[stays].softmax(0) @ values[stays]
        total += float((weights[1] @ change.flatten()).abs().sum())
    assert float(losses(whole, 160, kept, weights)[1]) == pytest.approx(total / 10, rel=1e-3)


@pytest.mark.parametrize("policy", ["snapkv", "ada-snapkv", None])
@torch.inference_mode()
def test_a_timed_step_reads_what_is_kept(prefilled, policy):
    from paper_bench.latency import Step

    prompt = prefilled.prompt
    kept = prefilled.keep(policy or "random", 0.2 if policy else 1.0)
    step = Step(prompt, kept if policy else None)
    assert step.num_slots == (-(-kept.decision.selection.num_entries // 12) + 32 if policy else 160)
    keys, values, valid = prefilled.entries(kept)
    for layer, out in enumerate(step.run()):
        for head in range(8):
            stays = valid[layer, head // 2]
            logits = keys[layer, head // 2, stays].float() @ prompt.queries[layer, -1, head].float() * prompt.sm_scale
            expected = logits.softmax(0) @ values[layer, head // 2, stays].float()
            torch.testing.assert_close(out[0, head].float(), expected, rtol=0.02, atol=0.02)


def test_similarity_of_adjacent_layers():
    from paper_bench.overlap import adjacent_similarity

    kept = torch.zeros(3, 2, 8, dtype=torch.bool)
    kept[0, 0, :4] = kept[1, 0, 2:6] = kept[2, 0, 2:6] = True
    kept[:, 1] = True  # only the first head counts
    assert adjacent_similarity(kept) == pytest.approx((2 / 6 + 1) / 2)


def test_results_survive_the_file(tmp_path):
    from paper_bench.results import Results, mean_and_error

    results = Results(tmp_path / "sub" / "results.csv")
    for text, value in enumerate((1.0, 2.0, 4.5)):
        results.add("p", "m", "case, with a comma", text, value)
    results.write()
    again = Results(results.path)
    assert again.per_text("p", "m", "case, with a comma") == {0: 1.0, 1: 2.0, 2: 4.5}
    assert again.has("p", "m", "case, with a comma", 2) and not again.has("p", "m", "case, with a comma", 3)
    assert again.cases("p", "m") == ["case, with a comma"]
    assert mean_and_error([1.0, 2.0, 4.5]) == (2.5, pytest.approx(math.sqrt(3.25 / 3)))
    assert math.isnan(mean_and_error([1.0])[1])


def test_running_texts_share_no_token():
    from paper_bench.texts import CONTINUATION, running_texts

    class Words:
        def encode(self, text):
            return list(range(len(text.split())))

    texts = running_texts(Words(), 300)
    ids = torch.cat([torch.cat((text.prompt[0], text.continuation)) for text in texts])
    assert len(texts) > 5 and ids.tolist() == list(range(len(texts) * (300 + CONTINUATION)))


def test_the_page_is_up_to_date():
    """Its tables are those that the committed numbers give."""
    subprocess.run([sys.executable, str(WRITE_PAGE), "--check"], check=True)
