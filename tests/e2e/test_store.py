"""Real servers and a store: prefixes outlive their server, and nothing wrong is ever loaded."""

from __future__ import annotations

import json
import random
import shutil
import time
import urllib.error
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from sglang.srt.lora.lora_registry import LoRARef

from helpers.modes import assert_nothing_leaked
from helpers.tiny_model import VOCAB_SIZE, save_adapter
from helpers.traffic import generate, idle_state
from kvevict_tools.launcher import FLOAT32_FLAGS
from sgl_kvevict import client

FLAGS = ("--skip-tokenizer-init", "--max-total-tokens", "6000", "--context-length", "2048")
CONFIG = {"policy": "snapkv", "min_prefix_tokens": 48, "tail_tokens": 16, "policy_options": {"window_size": 16}}
COMPLETE = {**CONFIG, "store_complete": True}
NUM_DOCUMENTS = 3
UNPINNED = "helpers.unpinned"
HANDBOOK = Path(__file__).resolve().parents[2] / "examples" / "data" / "station_handbook.txt"
QUESTIONS = ("Which instruments are named above?", "Who wrote this, and for whom?")


def prompts(count: int = NUM_DOCUMENTS) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(400 + 50 * i)] for i in range(count)]


def questions(documents: list[list[int]]) -> list[list[int]]:
    rng = random.Random(6)
    return [[*document, *(rng.randrange(3, VOCAB_SIZE) for _ in range(9 + 20 * i))]
            for document in documents for i in range(2)]  # fmt: skip


def ask(server, **more) -> list[list[int]]:
    return [generate(server, question, 12, **more)["output_ids"] for question in questions(prompts())]


def answer(server, text: str) -> tuple[str, int]:
    """What a server says, and how many tokens of the prompt it found."""
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    reply = json.loads(server.post("/generate", {"text": text, "sampling_params": sampling}))
    return reply["text"], reply["meta_info"]["cached_tokens"]


def warm(server) -> None:
    for document in prompts():
        generate(server, document, 1)


def store_state(server, *, stored: int = 0) -> dict:
    """The cache's state, once so many segments have been written."""
    while True:
        state = idle_state(server)
        if state["stored_segments"] + state["already_stored"] >= stored:
            return state
        time.sleep(0.1)


def make_store(start, model, folder: Path) -> list[list[int]]:
    """Fill a store and return the answers of the server that did."""
    first = start(model, *FLAGS, config={**COMPLETE, "store": str(folder)})
    warm(first)
    expected = ask(first)
    state = store_state(first, stored=NUM_DOCUMENTS)
    assert state["not_stored"] == state["store"]["dropped"] == state["loaded_segments"] == 0
    first.stop(grace_s=0)
    return expected


def segments(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("segments/*/*") if path.is_file()]


@pytest.fixture(scope="module")
def filled(start, tiny_llama, tmp_path_factory) -> tuple[Path, list[list[int]]]:
    folder = tmp_path_factory.mktemp("filled")
    return folder, make_store(start, tiny_llama, folder)


@pytest.fixture
def folder(filled, tmp_path) -> Path:
    shutil.copytree(filled[0], tmp_path / "store")
    return tmp_path / "store"


def test_the_same_questions_find_the_same_prefixes_after_a_restart(start, tiny_llama, filled, folder):
    server = start(tiny_llama, *FLAGS, config={**CONFIG, "store": str(folder)})
    answers, cached = [], []
    for question in questions(prompts()):
        reply = generate(server, question, 12)
        answers.append(reply["output_ids"])
        cached.append(reply["meta_info"]["cached_tokens"])
    assert answers == filled[1]
    assert cached == [len(document) for document in prompts() for _ in range(2)]
    state = store_state(server)
    assert state["loaded_segments"] >= NUM_DOCUMENTS and state["failed_loads"] == state["late_loads"] == 0
    assert_nothing_leaked(server)
    server.post("/flush_cache?timeout=60")
    assert idle_state(server)["free_slots"] == 6000
    assert ask(server) == filled[1]  # from the store again
    server.post("/flush_cache?timeout=60")
    wish = {"kvevict": {"complete": True}}
    for question in questions(prompts()):
        report = client.CacheReport.of(generate(server, question, 12, custom_params=wish)["meta_info"])
        assert report.compressed.share == 1.0 and report.compressed.num_tokens > 300
    assert store_state(server)["growths"] >= NUM_DOCUMENTS
    server.post("/flush_cache?timeout=60")
    loaded = idle_state(server)["loaded_segments"]
    for document in prompts():
        generate(server, document, 1, extra_key="tenant")
    assert store_state(server)["loaded_segments"] == loaded  # another tenant finds nothing
    server.stop(grace_s=0)


def test_a_model_with_one_trained_row_finds_nothing_of_its_base(start, tiny_llama, folder, tmp_path):
    """The row is that of a token that no prompt has, so that even the keys are the same: the weights decide."""
    shutil.copytree(tiny_llama, tmp_path / "trained")
    weights = load_file(tmp_path / "trained" / "model.safetensors")
    weights["model.embed_tokens.weight"][2] += 0.5
    save_file(weights, tmp_path / "trained" / "model.safetensors", {"format": "pt"})
    server = start(tmp_path / "trained", *FLAGS, config={**CONFIG, "store": str(folder)})
    for document in prompts():
        assert generate(server, document, 1)["meta_info"]["cached_tokens"] == 0
    assert store_state(server, stored=NUM_DOCUMENTS)["loaded_segments"] == 0
    server.stop(grace_s=0)


def test_flipped_bits_and_half_files_are_reported_removed_and_computed(start, tiny_llama, filled, folder):
    rng = random.Random(7)
    damaged = segments(folder)
    for i, path in enumerate(damaged):
        data = bytearray(path.read_bytes())
        if i % 2:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data if i % 2 else data[: len(data) // 2])
    server = start(tiny_llama, *FLAGS, config={**CONFIG, "store": str(folder)})
    warm(server)
    assert ask(server) == filled[1]
    state = store_state(server, stored=NUM_DOCUMENTS)
    assert state["failed_loads"] >= NUM_DOCUMENTS and state["loaded_segments"] == 0
    assert state["stored_segments"] >= NUM_DOCUMENTS  # what was computed takes their place
    assert_nothing_leaked(server)
    server.stop(grace_s=0)


def test_a_store_that_goes_away_costs_nothing_but_the_wait(start, tiny_llama, filled, folder):
    server = start(tiny_llama, *FLAGS, config={**CONFIG, "store": str(folder)})
    folder.rename(folder.with_name("gone"))
    folder.write_text("a file where the folder was")
    warm(server)
    assert ask(server) == filled[1]
    state = store_state(server)
    assert state["loaded_segments"] == 0 and state["failed_loads"] >= 1 and state["not_stored"] >= 1
    assert_nothing_leaked(server)
    server.stop(grace_s=0)


def adapted(server, prompt: list[int], adapter: str | None = "adA", extra_key: str | None = None) -> tuple[list, int]:
    """What a server answers with an adapter, and how much of the prompt it found."""
    reply = generate(server, prompt, 12, lora_path=adapter, extra_key=extra_key)
    return reply["output_ids"], reply["meta_info"]["cached_tokens"]


def test_an_adapter_that_was_replaced_is_computed_afresh(start, tiny_llama, tmp_path):
    """``--lora-paths`` alone: SGLang switches adapters on later, and names this one by its path."""
    path, prompt, uuid = tmp_path / "adapter", prompts()[0], "0123456789abcdef" * 2
    lora = ("--lora-paths", f"adA={path}", "--lora-backend", "torch_native", "--max-loras-per-batch", "2")
    config = {**CONFIG, "store": str(tmp_path / "store")}
    save_adapter(path, seed=1)
    first = start(tiny_llama, *FLAGS, *lora, config=config, patch=UNPINNED)
    with pytest.raises(urllib.error.HTTPError, match="400"):  # what SGLang appends is known to anybody
        adapted(first, prompt, None, LoRARef.deterministic_id("adA", str(path)))
    old = adapted(first, prompt)
    assert adapted(first, prompt)[1] > 300  # in the pool
    assert store_state(first)["stored_segments"] == 0 and segments(tmp_path / "store") == []
    adapted(first, prompt, None, uuid)
    assert store_state(first, stored=1)["stored_segments"] == 1  # a key that ends as an adapter's is the client's
    plain = adapted(first, prompt, None, uuid)
    first.stop(grace_s=0)
    save_adapter(path, seed=2)
    second = start(tiny_llama, *FLAGS, *lora, config=config, patch=UNPINNED)
    new, found = adapted(second, prompt)
    assert found == 0 and new != old[0]
    tokens, found = adapted(second, prompt, None, uuid)
    assert found > 300 and tokens == plain[0] and tokens not in (old[0], new)
    state = store_state(second)
    assert state["loaded_segments"] == 1 and state["failed_loads"] == 0
    assert_nothing_leaked(second)
    second.stop(grace_s=0)
    third = start(tiny_llama, *FLAGS, *lora, config=CONFIG, patch=UNPINNED)
    assert adapted(third, prompt) == (new, 0)
    third.stop(grace_s=0)


def leave(server) -> None:
    """Stop a server as an operator does, and wait until it has left."""
    server.process.terminate()  # SGLang's main process only: it asks the others to leave
    server.process.wait(60)


def test_the_default_configuration_finds_its_prefixes_after_a_restart(start, demo_model, tmp_path):
    """What was warmed is stored, and loaded as it was.

    In float32: the first server has split the documents behind their common beginning, the second one has loaded only
    the one that it is asked about, so attention is summed in other parts, which bfloat16 would round otherwise.
    """
    config, flags = {"store": str(tmp_path / "store")}, ("--max-total-tokens", "4000", *FLOAT32_FLAGS)
    handbook = HANDBOOK.read_text()
    documents = [f"<|im_start|>user\n{part}" for part in (handbook[:1500], handbook[4500:6000])]
    texts = [f"{document}\n\n{question}" for document in documents for question in QUESTIONS]
    first = start(demo_model, *flags, config=config)
    for document in documents:
        client.warm(first.url, text=document)
    before = [answer(first, text) for text in texts]
    leave(first)
    assert "the store has all that was to be written" in first.log()
    second = start(demo_model, *flags, config=config)
    after = [answer(second, text) for text in texts]
    assert after == before and min(found for _, found in after) > 250
    state = store_state(second)
    assert (
        state["loaded_segments"] == len(documents)
        and state["failed_loads"] == state["late_loads"] == state["stored_segments"] == 0
    )
    assert idle_state(second)["leaked_slots"] == 0 and second.leak_messages() == []
    second.stop(grace_s=0)
