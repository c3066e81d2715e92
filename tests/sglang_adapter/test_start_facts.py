"""Files, folders, ports and sockets that a server could not use are found before anything is loaded."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.sglang_adapter import start_facts
from sgl_kvevict.sglang_adapter.start_facts import before_load
from sgl_kvevict.support import RESOURCES, SETTINGS, BeforeLoad
from sgl_kvevict.support import reasons as reasons_of

OURS = {"radix_cache_backend": "kvevict", "attention_backend": "kvevict"}


def reasons(address=None, flags=None, **fields: Any) -> list[str]:
    return reasons_of(RESOURCES, before_load((flags or {}).get, KVEvictConfig(**fields), address=address))


@pytest.fixture
def taken_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("/etc/hostname", "store: '/etc/hostname' cannot be made or written (/etc/hostname is not a folder)"),
        ("/etc/hostname/x", "cannot be made or written"),
        ("/proc/x", "store: '/proc/x' cannot be made or written"),
        ("ftpx://host/x", "store: got 'ftpx://host/x'"),
    ],
)
def test_a_store_that_cannot_be_written_is_refused(store, message):
    (reason,) = reasons(store=store)
    assert message in reason and "\n" not in reason


def test_a_store_that_can_be_made_is_not_made_yet(tmp_path):
    assert reasons(store=str(tmp_path / "a" / "b")) == reasons(store="memory://x") == []
    assert list(tmp_path.iterdir()) == []


def test_files_of_scores(tmp_path):
    assert reasons(score_weights=str(tmp_path / "new" / "scores")) == []  # they are learned, and written there
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    (reason,) = reasons(score_weights=str(tmp_path / "other.safetensors"))
    assert "got format None; allowed: 'sgl-kvevict score weights 3'" in reason
    (reason,) = reasons(score_weights=str(tmp_path))
    assert reason.startswith("score_weights: score weights ") and "cannot be read" in reason
    for path in ("/proc/x/scores", "/etc/hostname/scores"):
        (reason,) = reasons(score_weights=path)
        assert reason.startswith("score_weights: ") and "cannot be written" in reason


def test_texts_to_learn_from(tmp_path):
    (reason,) = reasons(score_texts=str(tmp_path / "none"))
    assert reason.endswith("allowed: an existing folder, or null")
    (reason,) = reasons(score_texts=str(tmp_path))
    assert reason.startswith("score_texts: got 0 passages of 2,000 characters or more")


def test_ports_that_are_taken(taken_port, tmp_path):
    (reason,) = reasons(("127.0.0.1", taken_port))
    assert reason == f"--port: {taken_port} on 127.0.0.1 cannot be bound (Address already in use); allowed: a free port"
    assert reasons(("", taken_port)) and reasons(("0.0.0.0", taken_port))
    assert reasons(("127.0.0.1", "x")) == ["--port: got 'x'; allowed: 1 to 65535"]
    assert reasons(("127.0.0.1", 70000)) == ["--port: got 70000; allowed: 1 to 65535"]
    (reason,) = reasons(events={"endpoint": f"tcp://*:{taken_port}"})
    assert reason.startswith(f"events.endpoint: 'tcp://*:{taken_port}' cannot be bound (Address already in use)")
    (reason,) = reasons(events={"endpoint": "ipc:///etc/hostname/x"})
    assert "is not a folder" in reason
    assert reasons(events={"endpoint": f"ipc://{tmp_path}/x"}) == []


def test_a_pool_holds_at_least_one_prompt_that_is_compressed():
    config = {"min_prefix_tokens": 100, "tail_tokens": 10}
    assert reasons(**config) == reasons(flags={"max_total_tokens": "100"}, **config) == []
    for wrong in (99, "99", "x", ""):
        (reason,) = reasons(flags={"max_total_tokens": wrong}, **config)
        assert reason.startswith(f"--max-total-tokens: got {wrong!r}; allowed: an integer >= 100")


def test_the_checks_import_neither_sglang_nor_torch():
    source = Path(start_facts.__file__).read_text()
    assert "import torch" not in source and "import sglang" not in source and "from sglang" not in source


def speculation(config=None, **flags):
    return reasons_of(SETTINGS, BeforeLoad((OURS | flags).get, config or KVEvictConfig()))


def test_algorithms_that_speculate():
    for algorithm in (None, "NGRAM", "ngram", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN"):
        assert speculation(speculative_algorithm=algorithm) == []
    assert speculation(speculative_algorithm="STANDALONE", speculative_draft_attention_backend="kvevict") == []
    for algorithm in ("DFLASH", "FROZEN_KV_MTP"):  # SGLang makes the latter of NEXTN for Gemma 4's drafts
        (reason,) = speculation(speculative_algorithm=algorithm)
        allowed = "only 'NGRAM', 'STANDALONE', 'EAGLE', 'EAGLE3', 'NEXTN' are supported"
        assert f"--speculative-algorithm is {algorithm!r}, {allowed}: its drafts read KV of compressed tokens" in reason
