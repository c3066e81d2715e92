"""What clients are told that their answers were read from: native, OpenAI's and the frontend's, streamed or not."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from helpers.event_sockets import wait_until
from kvevict_tools.measure import plugin_state
from sgl_kvevict.client import CacheReport

HANDBOOK = (Path(__file__).resolve().parents[2] / "examples" / "data" / "station_handbook.txt").read_text()
DOCUMENT, OTHER = HANDBOOK[:4000], HANDBOOK[4000:8000]
PREFIX = f"<|im_start|>system\n{DOCUMENT}"
"""As the model's chat template writes a system message."""
EXACT = {"kvevict": {"exact": True}}
SHARE = {"kvevict": {"share": 0.01}}
"""Of a request whose own prompt stays uncompressed until slots are short."""


def generate(server, text: str | list[str], num_new: int = 4, **fields) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True, **fields.pop("sampling", {})}
    return json.loads(server.post("/generate", {"text": text, "sampling_params": sampling, **fields}))


def stream(server, text: str, num_new: int = 4, **more) -> Iterator[dict[str, Any]]:
    """Parts of an answer as they come."""
    sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True, **more}
    body = json.dumps({"text": text, "sampling_params": sampling, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as lines:
        for line in lines:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                yield json.loads(line[len(b"data: ") :])


def told(answer: dict[str, Any]) -> CacheReport:
    return CacheReport.of(answer["meta_info"])


@pytest.fixture(scope="module")
def server(start, demo_model):
    """The document is in its pool, compressed. Without memory of the host nothing that is evicted comes back."""
    server = start(demo_model, "--max-total-tokens", "1800", "--enable-cache-report", config={"host_bytes": 0})
    first = generate(server, PREFIX)
    assert told(first).device == 0 and first["meta_info"]["cached_tokens"] == 0
    return server


@pytest.fixture(scope="module")
def expected(server) -> CacheReport:
    """What whoever reads the document is told."""
    answer = generate(server, f"{PREFIX} Where?")
    report = told(answer)
    assert report.device == answer["meta_info"]["cached_tokens"] == report.compressed.num_tokens > 800
    assert 0.75 < report.compressed.share < 0.82 and 4 <= report.compressed.bits < 4.5
    assert (report.host, report.computed_again, report.prefilled_compressed) == (0, 0, 0)
    return report


def test_a_whole_answer_and_every_part_of_a_stream(server, expected):
    parts = [told(part) for part in stream(server, f"{PREFIX} Who?")]
    assert len(parts) > 2 and all(part.compressed == expected.compressed for part in parts)


def test_a_prefix_that_shrinks_while_it_is_streamed(start, demo_model):
    """The first parts say that nothing was compressed, the last one that it was."""
    with start(demo_model, "--max-total-tokens", "1800", config={}) as server:
        waits = {"custom_params": SHARE}
        generate(server, PREFIX, sampling=waits)
        parts = stream(server, f"{PREFIX} Who?", 300, **waits)
        assert told(next(parts)).compressed.num_tokens == 0
        generate(server, OTHER, sampling=waits)
        assert plugin_state(server)["span_tokens"] > 800
        *_, last = parts
        assert told(last).compressed.num_tokens > 800 and told(last).compressed.bits < 16


def test_samples_and_batches(server, expected):
    samples = generate(server, f"{PREFIX} When?", sampling={"n": 2, "temperature": 0.5})
    batch = generate(server, [f"{PREFIX} How?", "Nothing of this is cached.", f"{PREFIX} Whom?"])
    assert len(samples) == 2
    assert [told(each).compressed for each in (*samples, batch[0], batch[2])] == [expected.compressed] * 4
    assert told(batch[1]).compressed.num_tokens == 0


def test_what_exact_has_cost(server, expected):
    answer = generate(server, f"{PREFIX} Where?", sampling={"custom_params": EXACT})
    report = told(answer)
    assert answer["meta_info"]["cached_tokens"] == report.device == report.compressed.num_tokens == 0
    assert report.computed_again >= expected.device
    assert told(generate(server, f"{PREFIX} Where?")).compressed == expected.compressed  # it stays for others


def test_openais_endpoints(server, expected):
    """Chat has the whole ``meta_info``, completions the places, usage the sum."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages: list[Any] = [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": "Who?"}]
    fields = {"return_meta_info": True, "return_cached_tokens_details": True}
    ask = {"model": "default", "max_tokens": 4, "temperature": 0}
    chat = client.chat.completions.create(messages=messages, extra_body=fields, **ask)
    report = CacheReport.of(chat.choices[0].meta_info)
    assert report.compressed == expected.compressed
    assert chat.sglext["cached_tokens_details"] == {"device": report.device, "host": 0}
    assert chat.usage.prompt_tokens_details.cached_tokens == report.device
    exact = client.chat.completions.create(messages=messages, extra_body=fields | {"custom_params": EXACT}, **ask)
    assert CacheReport.of(exact.choices[0].meta_info).computed_again >= report.device
    del fields["return_meta_info"]
    text = client.completions.create(prompt=f"{PREFIX} Who?", extra_body=fields, **ask)
    assert text.sglext["cached_tokens_details"]["device"] == text.usage.prompt_tokens_details.cached_tokens > 800
    parts = list(client.chat.completions.create(messages=messages, stream=True, extra_body=fields, **ask))
    (sent,) = [part.sglext for part in parts if getattr(part, "sglext", None)]
    assert sent["cached_tokens_details"]["device"] > 800


def test_the_frontend_language(server, expected):
    import sglang as sgl

    @sgl.function
    def ask(s):
        s += f"{PREFIX} Why?" + sgl.gen("answer", max_tokens=4, temperature=0)

    state = ask.run(backend=sgl.RuntimeEndpoint(server.url))
    assert CacheReport.of(state.get_meta_info("answer")).compressed == expected.compressed


def test_an_aborted_request_is_told_what_it_has_read(server, expected):
    parts = stream(server, f"{PREFIX} Whose?", 400)
    first = next(parts)
    server.post("/abort_request", {"rid": first["meta_info"]["id"]})
    *_, last = parts
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert told(last).compressed == told(first).compressed == expected.compressed
    wait_until(lambda: plugin_state(server)["readers"] == 0)


def test_a_request_asks_for_all_entries_and_they_stay_for_others(start, demo_model):
    """The document is compressed as soon as it was read, and is not larger than the budget until a request asks."""
    server = start(demo_model, "--max-total-tokens", "6000", config={})
    generate(server, PREFIX)
    assert plugin_state(server)["share_of_entries"] < 0.82
    wish = {"custom_params": {"kvevict": {"complete": True}}}
    asked = told(generate(server, f"{PREFIX} Where?", sampling=wish))
    assert asked.device > 800 and asked.compressed.num_tokens > 800
    assert asked.compressed.share == 1 and 4 <= asked.compressed.bits < 4.5
    assert told(generate(server, f"{PREFIX} Why?")).compressed == asked.compressed
    generate(server, OTHER)
    assert told(generate(server, f"{OTHER} Why?")).compressed.share < 0.82
    state = plugin_state(server)
    assert state["growths"] == 1 and state["evicted_entries"] > state["returned_entries"] > 0
    assert state["errors"] == {}


def test_wishes_that_exclude_each_other_are_refused(server):
    for options in ({"complete": True, "exact": True}, {"share": 1.5}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            generate(server, "Why?", sampling={"custom_params": {"kvevict": options}})
        assert refused.value.code == 400 and b"kvevict" in refused.value.read()
