"""What a store saves after a restart: the first token of a question on a document, loaded or computed again.

Three servers, one after the other, on the same model: the first compresses the documents, answers one question on each
and is stopped; the second has its store; the third has none. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sgl_kvevict.launcher import CPU_ENV, KVEVICT_CPU_FLAGS, RunningServer, config_env, launch
from sgl_kvevict.measure import plugin_state, time_stream
from sgl_kvevict.model import ensure_demo_model
from sgl_kvevict.store.segment_file import read_header

POLICY = {"policy": "snapkv", "budget": 0.2}
ANSWER_TOKENS = 16
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
WORDS = [
    "river",
    "stone",
    "lamp",
    "winter",
    "garden",
    "letter",
    "train",
    "silver",
    "window",
    "bread",
    "market",
    "candle",
]


def document(number: int, num_words: int) -> str:
    """Words in an order of its own."""
    return " ".join(WORDS[(i * (number + 3) + i // 7) % len(WORDS)] for i in range(num_words)) + f" number {number}. "


def question(number: int) -> str:
    """What is asked of a document."""
    return f"\nQuestion {number}: which word comes first, and which one last, in the text above?\nAnswer:"


@contextmanager
def serving(model: str, config: Mapping[str, Any], log: Path, pool: int) -> Iterator[RunningServer]:
    """A server with a configuration."""
    flags = [*KVEVICT_CPU_FLAGS, "--max-total-tokens", str(pool)]
    server = launch(model, flags=flags, env={**CPU_ENV, **config_env(config)}, log_path=log)
    try:
        yield server
    finally:
        server.stop(grace_s=0)


def ask(server: RunningServer, prompt: str) -> str:
    """One answer."""
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    reply: dict[str, Any] = json.loads(server.post("/generate", {"text": prompt, "sampling_params": sampling}))
    return str(reply["text"])


def share_of_full(data: bytes) -> float:
    """Bytes of a stored segment, against those of all keys and values of its tokens."""
    header = read_header(data)
    num_layers, num_heads = header["tensors"]["keep_lens"][1]
    dtype, (_, head_dim) = header["tensors"]["k"]
    num_tokens = header["end"] - header["start"]
    return len(data) / (num_tokens * num_layers * num_heads * 2 * head_dim * ITEM_BYTES[dtype])


def wait_until_stored(server: RunningServer, count: int) -> None:
    """Until so many segments have been written."""
    for _ in range(600):
        state = plugin_state(server)
        if state is not None and state["store"]["stored"] >= count:
            return
        time.sleep(0.1)
    raise TimeoutError(f"not {count} segments were stored: {plugin_state(server)}")


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default=None, help="model folder; default: the demo model")
    options.add_argument("--documents", type=int, default=3)
    options.add_argument("--words", type=int, default=2100)
    options.add_argument("--pool", type=int, default=16_000, help="token slots")
    given = options.parse_args()
    model = given.model or str(ensure_demo_model())
    texts = [document(i, given.words) for i in range(given.documents)]
    with tempfile.TemporaryDirectory() as folder:
        place, logs = Path(folder) / "store", Path(folder)
        with serving(model, {**POLICY, "store": str(place)}, logs / "first.log", given.pool) as server:
            for text in texts:
                time_stream(server, text, 1)
            before = [ask(server, text + question(i)) for i, text in enumerate(texts)]
            wait_until_stored(server, given.documents)
        shares = [share_of_full(path.read_bytes()) for path in place.rglob("segments/*/*")]
        times: dict[str, list[float]] = {}
        for name, config in (("loaded", {**POLICY, "store": str(place)}), ("computed", POLICY)):
            with serving(model, config, logs / f"{name}.log", given.pool) as server:
                time_stream(server, "Good morning.", 4)
                timings = [time_stream(server, text + question(i), ANSWER_TOKENS) for i, text in enumerate(texts)]
                times[name] = [timing.ttft_s for timing in timings]
                if name == "loaded":
                    after = [ask(server, text + question(i)) for i, text in enumerate(texts)]
                    cached = [timing.cached_tokens for timing in timings]
                    state = plugin_state(server)
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    figures = {
        "prompt_tokens": [timing.prompt_tokens for timing in timings],
        "cached_tokens_after_restart": cached,
        "first_token_s": times,
        "ratio": median["loaded"] / median["computed"],
        "same_answers": sum(a == b for a, b in zip(before, after, strict=True)),
        "of": len(texts),
        "bytes_against_full_kv": shares,
        "store": None if state is None else state["store"],
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
