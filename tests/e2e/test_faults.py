"""An exception at any guarded place of a running server fails one request or job: traffic goes on, nothing leaks."""

from __future__ import annotations

import random
import re
import urllib.error
from pathlib import Path

import pytest

from helpers.event_sockets import wait_until
from helpers.faults import FAULT_FILE, FAULTS
from helpers.tiny_model import VOCAB_SIZE
from helpers.traffic import generate, idle_state, random_jobs, run_jobs
from kvevict_tools.launcher import free_port
from kvevict_tools.measure import plugin_state
from sgl_kvevict.guard import Place

FLAGS = ("--skip-tokenizer-init", "--max-total-tokens", "4000", "--context-length", "1024")


@pytest.fixture(scope="module")
def fault(tmp_path_factory) -> Path:
    """The file that says what breaks."""
    path = tmp_path_factory.mktemp("fault") / "place"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def server(start, tiny_llama, fault, tmp_path_factory):
    events = {"endpoint": f"tcp://127.0.0.1:{free_port()}"}
    config = {"policy": "helpers.faults:breakable", "min_prefix_tokens": 48, "tail_tokens": 16}
    config["store"] = str(tmp_path_factory.mktemp("store"))
    flags = (*FLAGS, "--enable-metrics")
    return start(tiny_llama, *flags, config={**config, "events": events}, env={FAULT_FILE: str(fault)})


def traffic(server, seed: int) -> None:
    """Shared prefixes, so that compressions and releases happen; every request is answered."""
    rng = random.Random(seed)
    document = [rng.randrange(3, VOCAB_SIZE) for _ in range(300)]
    for _ in range(2):
        suffix = [rng.randrange(3, VOCAB_SIZE) for _ in range(20)]
        assert len(generate(server, document + suffix, 4)["output_ids"]) == 4
    jobs = random_jobs(12, seed=seed, vocab_size=VOCAB_SIZE, aborts=False)
    outputs = run_jobs(server, jobs, concurrency=6)
    assert all(len(outputs[job.rid]) == max(job.max_new_tokens, 1) or not job.max_new_tokens for job in jobs)


def test_every_place_has_a_fault():
    assert set(FAULTS) == set(Place)


@pytest.mark.parametrize("place", Place, ids=lambda place: place.value)
def test_a_fault_stays_where_it_happens(server, fault, place):
    seed = list(Place).index(place)
    fault.write_text(place.value)
    if place is Place.OPTIONS:
        with pytest.raises(urllib.error.HTTPError) as error:
            generate(server, [5, 6, 7], 4)
        assert error.value.code == 500
    else:
        traffic(server, seed)
    wait_until(lambda: plugin_state(server)["errors"].get(place.value, 0) > 0)
    fault.write_text("")
    before = plugin_state(server)
    traffic(server, 100 + seed)
    state = idle_state(server)
    assert state["compressions"] > before["compressions"]
    assert state["errors"] == before["errors"]
    assert state["free_slots"] + state["evictable_slots"] == state["total_slots"] and state["leaked_slots"] == 0
    assert server.leak_messages() == []
    series = f'place="{place.value}"'
    wait_until(lambda: any("errors_total" in line and series in line and not line.endswith(" 0.0") for line in
                         server.get_text("/metrics").splitlines()))  # fmt: skip
    first = rf"kvevict: 1 of \d+ attempts at '{place.value}' failed"  # with its trace, once
    assert len(re.findall(first, server.log())) == 1
