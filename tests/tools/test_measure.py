from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import cast

import pytest

from helpers.web_servers import QuietHandler, serving
from kvevict_tools.launcher import RunningServer
from kvevict_tools.measure import PoolGauges, StreamTiming, alone, in_turn, parse_gauges, time_stream

METRICS = """# HELP sglang:kv_available_tokens free
sglang:max_total_num_tokens{engine_type="unified",tp_rank="0"} 6000.0
sglang:kv_available_tokens{engine_type="unified",tp_rank="0"} 3171.0
sglang:kv_evictable_tokens{engine_type="unified",tp_rank="0"} 2829.0
sglang:num_running_reqs{engine_type="unified",tp_rank="0"} 0.0
"""


class _Server:
    """Remembers whether it is suspended."""

    def __init__(self) -> None:
        self.may_run = True

    def suspend(self) -> None:
        self.may_run = False

    def resume(self) -> None:
        self.may_run = True


def test_every_second_round_is_reversed_and_each_server_is_measured_alone() -> None:
    fleet = {name: _Server() for name in "abc"}
    calls: list[tuple[str, int]] = []

    def measure(name: str, number: int) -> None:
        calls.append((name, number))
        assert [other for other, server in fleet.items() if server.may_run] == [name]

    in_turn(cast(dict[str, RunningServer], fleet), 3, measure, ["a", "b"])
    assert calls == [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    assert all(server.may_run for server in fleet.values())


def test_suspended_servers_continue_after_a_failure() -> None:
    servers = [_Server(), _Server()]
    fleet = cast(list[RunningServer], servers)
    with pytest.raises(ValueError, match="mine"), alone(fleet[0], fleet):
        raise ValueError("mine")
    assert servers[1].may_run


def test_gauges_are_read_from_the_metrics_text() -> None:
    gauges = parse_gauges(METRICS)
    assert gauges == PoolGauges(total=6000, available=3171, evictable=2829, running=0)
    assert gauges.missing == 0


class _Stream(QuietHandler):
    """Answers like ``/generate``, one token in each event."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for n in range(1, body["sampling_params"]["max_new_tokens"] + 1):
            meta = {"prompt_tokens": 9, "cached_tokens": 4, "completion_tokens": n}
            self.wfile.write(b"data: " + json.dumps({"text": "x" * n, "meta_info": meta}).encode() + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def stream_server() -> Iterator[RunningServer]:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), _Stream)) as http:
        fake = type("Fake", (), {"url": f"http://127.0.0.1:{http.server_port}"})()
        yield cast(RunningServer, fake)


def test_stream_timing_separates_first_token_from_decode_rate(stream_server: RunningServer) -> None:
    times = iter([5.0, 7.5, *(8.0 + 0.5 * n for n in range(10))])  # the request, then eleven tokens
    timing = time_stream(stream_server, "text", max_new_tokens=11, clock=lambda: next(times))
    assert timing == StreamTiming(prompt_tokens=9, cached_tokens=4, ttft_s=2.5, decode_tokens_per_s=10 / 5.0)
