"""The peers' side, with a tiny model in the place of the real one and no kvpress."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from unittest.mock import MagicMock

import pytest
import torch


@pytest.fixture
def peer(monkeypatch, prompts, tmp_path):
    from transformers import AutoModelForCausalLM

    from helpers.tiny_model import save_tiny_llama

    monkeypatch.setitem(sys.modules, "kvpress", MagicMock())  # lives in an environment of its own
    monkeypatch.delitem(sys.modules, "kvevict_quality.presses", raising=False)
    monkeypatch.delitem(sys.modules, "peers", raising=False)
    import peers

    model = AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path), dtype=torch.float32).eval()
    yield peers.Peer(model, prompts)
    for name in ("peers", "kvevict_quality.presses"):
        sys.modules.pop(name, None)


@pytest.fixture
def sample(prompts):
    from kvevict_quality.sample import Question, Sample

    first, second = Question("What is it?", "It is", ("red",), 6), Question("And where is it?", "It is here", ("x",), 6)
    sample = Sample(" ".join(f"word{i}" for i in range(60)), (first, second))
    last = max(prompts.context_ids(sample) + prompts.question_ids(sample, first) + prompts.question_ids(sample, second))
    prompts.encode(" ".join(f"filler{i}" for i in range(511 - last)))  # whatever the model answers is a word
    return sample


def test_without_a_press_both_modes_answer_the_same(peer, prompts, sample):
    ids = prompts.context_ids(sample)
    alone, together = peer.answers(sample, ids, None), peer.answers_aware(sample, ids, None)
    assert together == alone and len(set(alone)) == 2


def test_a_press_sees_the_question_and_is_gone_when_the_answer_begins(peer, prompts, sample):
    seen, active = [], []

    @contextmanager
    def press(model):
        def watch(module, inputs, kwargs):
            seen.append(kwargs["input_ids"].shape[1])

        handle = model.model.register_forward_pre_hook(watch, with_kwargs=True)
        active.append(True)
        yield
        handle.remove()
        active.pop()

    ids = prompts.context_ids(sample)
    peer.answers_aware(sample, ids, press)
    assert seen == [len(ids) + len(prompts.question_ids(sample, question)) for question in sample.questions]
    assert not active


def test_distributions_are_those_of_one_forward_and_change_when_a_press_drops_entries(peer, prompts, sample):
    from kvevict_quality import fidelity

    ids = prompts.context_ids(sample)
    passage = fidelity.Passage(ids[:40], ids[40:56])
    found, nll = peer.distributions(passage, None)
    with torch.inference_mode():
        logprobs = peer.model(torch.tensor([ids[:56]])).logits[0].log_softmax(-1)[40:55]
    own = logprobs.gather(1, torch.tensor(ids[41:56])[:, None])
    assert nll == pytest.approx(-float(own.mean()), abs=1e-4)
    assert [max(entry, key=entry.get) for entry in found] == logprobs.argmax(-1).tolist()
    expected = [dict(enumerate(row)) for row in logprobs.tolist()]
    assert max(map(fidelity.divergence, found, expected)) < 1e-4

    @contextmanager
    def press(model):
        def drop(module, inputs, kwargs, output):
            for layer in kwargs["past_key_values"].layers:
                layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]

        handle = model.model.register_forward_hook(drop, with_kwargs=True)
        yield
        handle.remove()

    half, _ = peer.distributions(passage, press)
    assert max(map(fidelity.divergence, found, half)) > 1e-4


@pytest.mark.parametrize("tail", [0, 8])
def test_a_press_does_not_see_the_tail(peer, prompts, sample, tail):
    from kvevict_quality import fidelity

    ids, seen = prompts.context_ids(sample), []
    passage = fidelity.Passage(ids[:40], ids[40:56])

    @contextmanager
    def press(model):
        handle = model.model.register_forward_pre_hook(
            lambda module, inputs, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        yield
        handle.remove()

    expected, nll = peer.distributions(passage, None)
    found, same_nll = peer.distributions(passage, press, tail)
    assert seen == [40 - tail] and len(found) == len(expected) == 15
    assert same_nll == pytest.approx(nll, abs=1e-4)
    assert max(map(fidelity.divergence, found, expected)) < 1e-4
