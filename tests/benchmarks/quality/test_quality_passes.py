"""What learned scores are compared with outside of a server: a prefix scored by passes in transformers."""

from __future__ import annotations

import random

import torch

from helpers.tiny_model import VOCAB_SIZE, save_tiny_llama, save_tokenizer


def test_every_token_is_scored_by_passes(tmp_path, monkeypatch):
    from kvevict_quality import passes

    monkeypatch.setattr(passes, "PASS_TOKENS", 100)  # several passes
    save_tokenizer(save_tiny_llama(tmp_path))
    model = passes.PassModel(tmp_path, positions=512)
    ids = random.Random(0).choices(range(3, VOCAB_SIZE), k=300)
    scored = model.score(ids)
    assert scored.scores.shape == (model.num_layers, model.num_heads, 300 - passes.TAIL)
    assert torch.isfinite(scored.scores).all() and (scored.scores > 0).all()


def test_predictions_read_only_what_was_kept_of_the_prefix(tmp_path):
    """As transformers predicts them under a mask; here every layer and head keeps the same tokens."""
    from kvevict_quality import passes

    save_tokenizer(save_tiny_llama(tmp_path))
    model = passes.PassModel(tmp_path, positions=512)
    ids = random.Random(1).choices(range(3, VOCAB_SIZE), k=80)
    num_cached = 70
    prefix = model.score(ids[:num_cached])
    stays = torch.ones(2, num_cached, dtype=torch.bool)
    stays[1, 10:40] = False
    kept = stays[:, None, None].expand(-1, model.num_layers, model.num_heads, -1)
    got = model.predict(prefix, kept, ids[num_cached:], 4)
    assert got.shape[:2] == (2, 4)
    model.model.set_attn_implementation("eager")
    expected = []
    for seen in stays:
        mask = torch.ones(80, 80, dtype=torch.bool).tril()
        mask[num_cached:, :num_cached] &= seen
        bias = torch.zeros(1, 1, 80, 80, dtype=torch.bfloat16).masked_fill(~mask, torch.finfo(torch.bfloat16).min)
        with torch.inference_mode():
            logits = model.model(torch.tensor([ids]), attention_mask=bias, use_cache=False).logits[0, -4:]
        expected.append(logits.float().log_softmax(-1))
    nats = (got[:, None].exp() * (got[:, None] - torch.stack(expected))).sum(-1)  # [ours, theirs, tokens]
    assert nats.diagonal().max() < 0.05 and min(nats[0, 1].mean(), nats[1, 0].mean()) > 0.5  # in bfloat16


def test_a_row_without_what_others_are_compared_with_is_measured_again(tmp_path, prompts):
    """The full cache's distributions stay on the machine that made them; its row is committed."""
    from kvevict_quality import fidelity
    from kvevict_quality.rows import Row, merge_rows
    from kvevict_quality.running import Plan
    from kvevict_quality.systems import FULL, Setup

    plan = Plan(tmp_path, prompts, ["fidelity"], [128], 1, None, 0, tmp_path / "rows.csv", tmp_path / "work")
    setup = Setup(FULL, 1.0)
    key = (setup.engine, FULL, setup.options_text, 1.0, "fidelity", 128, fidelity.PASSAGES, 1)
    rest = (1.0, 0.0, 128.0, 128.0, 0.0, 0.0, tmp_path.name, "float32", 0, "v", "c")
    merge_rows(plan.results, [Row(*key, *rest)])
    assert plan.missing(setup) == [("fidelity", 128)]
    path = plan.full_path("fidelity", 128, 0)
    path.parent.mkdir(parents=True)
    path.touch()
    assert plan.missing(setup) == []
