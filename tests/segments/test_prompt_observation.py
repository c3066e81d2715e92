"""What is kept of a prefill, over any number of chunks."""

from __future__ import annotations

import pytest
import torch

from helpers.dense_attention import accumulated_attention, dense_attention
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.segments.collectors import COLLECTORS
from sgl_kvevict.segments.prompt_observation import ObservationSpec, PromptObservation

GEOMETRY = KVGeometry(num_layers=2, num_qo_heads=6, num_kv_heads=3, head_dim=8, num_token_slots=64)
NUM_TOKENS = 40
SM_SCALE = 0.3


@pytest.fixture
def prompt():
    """Queries [layers, tokens, heads, dim], their lse (deliberately transposed in memory) and a key buffer."""
    torch.manual_seed(0)
    queries = torch.randn(2, NUM_TOKENS, 6, 8)
    keys = torch.randn(2, 64, 3, 8)
    slots = torch.randperm(63)[:NUM_TOKENS] + 1
    lse = [dense_attention(queries[i], keys[i, slots], sm_scale=SM_SCALE, query_start=0)[1] for i in range(2)]
    return queries, [rows.T.contiguous().T for rows in lse], keys, slots


def observe(prompt, cuts, signals, window_size=16, key_starts=()):
    """Observe a prompt in chunks; from each of the key starts on, a chunk finds the tokens before it compressed."""
    queries, lse, keys, slots = prompt
    observation = PromptObservation(ObservationSpec(GEOMETRY, frozenset(signals), window_size))
    for start, end in zip([0, *cuts], [*cuts, NUM_TOKENS], strict=True):
        first = max((key_start for key_start in key_starts if key_start <= start), default=0)
        observation.begin_chunk(start, end, is_last=end == NUM_TOKENS, key_start=first, token_slots=slots[first:end])
        for layer in range(2):
            observation.record(layer, queries[layer, start:end], lse[layer][start:end], keys[layer], SM_SCALE)
    return observation


def show(observation, prompt, layer, start, end):
    _, _, keys, slots = prompt
    return observation.show(layer, start, keys[layer], keys[layer], slots[start:end]).signals


@pytest.mark.parametrize("cuts", [[], [30], [24], [38], [10, 20, 39], [35, 36, 37, 38, 39]])
def test_window_is_the_last_queries_however_the_prompt_was_cut(prompt, cuts):
    observation = observe(prompt, cuts, [Signal.WINDOW_QUERIES])
    for layer in range(2):
        window = show(observation, prompt, layer, 0, 20)[Signal.WINDOW_QUERIES]
        assert torch.equal(window.queries, prompt[0][layer, -16:]) and window.start == NUM_TOKENS - 16
        assert torch.equal(window.lse, prompt[1][layer][-16:])
        assert window.queries.is_contiguous() and window.lse.is_contiguous()
    assert observation.is_complete and observation.end == NUM_TOKENS


@pytest.mark.parametrize("cuts", [[], [30], [38], [35, 36, 37, 38, 39]])
def test_the_windows_keys_are_those_of_its_queries(prompt, cuts):
    observation = observe(prompt, cuts, [Signal.WINDOW_QUERIES, Signal.WINDOW_KEYS])
    _, _, keys, slots = prompt
    assert observation.spec.needs_slots and not observe(prompt, cuts, [Signal.WINDOW_QUERIES]).spec.needs_slots
    for layer in range(2):
        seen = show(observation, prompt, layer, 0, 20)
        assert torch.equal(seen[Signal.WINDOW_KEYS], keys[layer, slots[-16:]])
    assert Signal.WINDOW_KEYS not in show(observe(prompt, cuts, [Signal.WINDOW_QUERIES]), prompt, 0, 0, 20)


def test_short_chunk_keeps_what_there_is(prompt):
    queries, lse, keys, _ = prompt
    observation = PromptObservation(ObservationSpec(GEOMETRY, frozenset({Signal.WINDOW_QUERIES}), 16))
    observation.begin_chunk(31, NUM_TOKENS, is_last=True)
    for layer in range(2):
        observation.record(layer, queries[layer, 31:], lse[layer][31:], keys[layer], SM_SCALE)
    window = show(observation, prompt, 0, 0, 20)[Signal.WINDOW_QUERIES]
    assert window.start == 31 and window.lse.shape == (9, 6) and window.lse.is_contiguous()


def test_a_prefill_that_starts_again_forgets(prompt):
    observation = observe(prompt, [30], [Signal.WINDOW_QUERIES])
    queries, lse, keys, _ = prompt
    observation.begin_chunk(0, 5, is_last=False)
    observation.record(0, queries[0, :5], lse[0][:5], keys[0], SM_SCALE)
    assert show(observation, prompt, 0, 0, 3)[Signal.WINDOW_QUERIES].queries.shape[0] == 5
    assert Signal.WINDOW_QUERIES not in show(observation, prompt, 1, 0, 3)


@pytest.mark.parametrize("cuts", [[], [17], [1, 2, 39]])
def test_accumulated_attention_adds_up_over_chunks(prompt, cuts):
    observation = observe(prompt, cuts, [Signal.ACCUMULATED_ATTENTION])
    queries, _, keys, slots = prompt
    for layer in range(2):
        weights, _ = dense_attention(queries[layer], keys[layer, slots], sm_scale=SM_SCALE, query_start=0)
        seen = show(observation, prompt, layer, 5, 25)[Signal.ACCUMULATED_ATTENTION]
        torch.testing.assert_close(seen, accumulated_attention(weights, 3)[:, 5:25])


def test_numbers_of_tokens_that_were_compressed_meanwhile_are_forgotten(prompt):
    observation = observe(prompt, [10, 20, 30], [Signal.ACCUMULATED_ATTENTION], key_starts=[8, 23])
    queries, _, keys, slots = prompt
    weights, _ = dense_attention(queries[0], keys[0, slots], sm_scale=SM_SCALE, query_start=0)
    got = show(observation, prompt, 0, 26, 36)[Signal.ACCUMULATED_ATTENTION]
    torch.testing.assert_close(got, accumulated_attention(weights, 3)[:, 26:36])


def test_memory_of_what_was_recorded(prompt):
    per_layer = {
        Signal.WINDOW_QUERIES: 16 * 6 * (8 + 1) * 4,
        Signal.WINDOW_KEYS: 16 * 3 * 8 * 4,
        Signal.ACCUMULATED_ATTENTION: 3 * NUM_TOKENS * 4,
    }
    for signal, num_bytes in per_layer.items():
        assert observe(prompt, [30], [signal]).num_bytes == 2 * num_bytes
    assert observe(prompt, [30], per_layer).num_bytes == 2 * sum(per_layer.values())


def test_each_signal_has_one_collector():
    signals = {Signal.WINDOW_QUERIES, Signal.WINDOW_KEYS, Signal.ACCUMULATED_ATTENTION, Signal.KEYS}
    assert ObservationSpec(GEOMETRY, frozenset(signals)).collectors.keys() == signals - {Signal.KEYS}
    assert len(set(COLLECTORS.values())) == len(COLLECTORS)
