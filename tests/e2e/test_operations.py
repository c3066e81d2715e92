"""One real server, watched in every way there is, under random traffic on a pool that is too small."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import zmq
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, KVEventBatch

from helpers.event_sockets import wait_until
from helpers.kv_mirror import Mirror
from helpers.prometheus import PROMETHEUS, Prometheus
from helpers.tiny_model import VOCAB_SIZE
from helpers.traffic import generate, idle_state, random_jobs, run_jobs
from kvevict_tools.launcher import free_port
from sgl_kvevict.cli import main
from sgl_kvevict.cli.inspect import ask_snapshot, asked
from sgl_kvevict.events.questions import Status, StatusReport

MONITORING = Path(__file__).resolve().parents[2] / "examples" / "monitoring"
ENDPOINT = f"tcp://127.0.0.1:{free_port()}"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the message that ends a replay of SGLang's KV events."""
KV_EVENTS = {
    "publisher": "zmq",
    "endpoint": f"tcp://*:{free_port()}",
    "replay_endpoint": f"tcp://*:{free_port()}",
    "buffer_steps": 100_000,
}
CONFIG = {
    "policy": "ada-snapkv",
    "budget": 0.2,
    "min_prefix_tokens": 48,
    "tail_tokens": 16,
    "policy_options": {"window_size": 16},
    "host_bytes": 0,  # what is dropped is computed again: every span that there is was compressed here
    "events": {"endpoint": ENDPOINT, "expose_tokens": True},
}
FLAGS = (
    *("--skip-tokenizer-init", "--max-total-tokens", "2000", "--context-length", "1024"),
    *("--enable-metrics", "--kv-events-config", json.dumps(KV_EVENTS)),
)


@pytest.fixture(scope="module")
def kv_subscriber():
    """A subscriber of SGLang's KV events, there before any traffic."""
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.set_hwm(0)
    subscriber.subscribe(b"")
    subscriber.connect(KV_EVENTS["endpoint"].replace("*", "127.0.0.1"))
    yield subscriber
    context.destroy(linger=0)


@pytest.fixture(scope="module")
def server(start, tiny_llama, kv_subscriber):
    server = start(tiny_llama, *FLAGS, config=CONFIG, spins=True)  # a sleeping one answers questions once a second
    run_jobs(server, random_jobs(150, seed=7, vocab_size=VOCAB_SIZE), concurrency=16)
    idle_state(server)
    wait_until(lambda: counted(server) == of_totals(ask(Status(limit=0), StatusReport).totals))  # once a second
    return server


@pytest.fixture(autouse=True)
def server_is_well(server):
    yield
    server.check_alive()
    assert server.leak_messages() == []
    assert idle_state(server)["leaked_slots"] == 0


def ask(request, answer):
    return asked(ENDPOINT, 20.0, lambda client: client.ask(request, answer))


def replay(endpoint: str) -> list[tuple[int, bytes]]:
    """All messages of a replay socket, asked as SGLang's subscribers do."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, 20_000)
    dealer.connect(endpoint.replace("*", "127.0.0.1"))
    dealer.send_multipart([b"", bytes(8)])
    messages = []
    while True:
        _, _, seq, payload = dealer.recv_multipart()
        if seq == END_OF_REPLAY:
            context.destroy(linger=0)
            return messages
        messages.append((int.from_bytes(seq, "big"), payload))


def test_a_kv_event_subscriber_knows_exactly_what_is_cached(server, kv_subscriber):
    messages = replay(KV_EVENTS["replay_endpoint"])
    assert [seq for seq, _ in messages] == list(range(len(messages)))
    live: list[tuple[int, bytes]] = []
    while not live or live[-1][0] < messages[-1][0]:
        assert kv_subscriber.poll(300_000)
        _, seq, payload = kv_subscriber.recv_multipart()
        live.append((int.from_bytes(seq, "big"), payload))
    assert live == messages[live[0][0] :] and len(live) > len(messages) - 10  # but for those before it had connected
    mirror, kinds = Mirror(), Counter()
    for _, payload in messages:
        events = msgspec.msgpack.decode(payload, type=KVEventBatch).events
        kinds.update(map(type, events))
        mirror.apply(events)
    assert kinds[BlockStored] > 20 and kinds[BlockRemoved] > 20

    snapshot = asked(ENDPOINT, 10.0, lambda client: ask_snapshot(client, limit=20_000, with_tokens=True))
    assert any(node.compressed for node in snapshot.tree.nodes)
    cached = []
    path: dict[int, tuple[int, ...]] = {0: ()}
    for node in snapshot.tree.nodes:
        before = path[node.parent]
        for token in snapshot.tokens[node.id]:
            before = (*before, token)
            cached.append(before)
        path[node.id] = before
    assert sorted(mirror.blocks.values()) == sorted(cached)


COUNTERS = ("compressions", "evicted_entries", "released_slots", "splits", "dropped_nodes", "dropped_spans")


def of_totals(totals) -> dict[str, float]:
    return {name: getattr(totals, name) for name in COUNTERS}


def counted(server) -> dict[str, float]:
    """The same, as metrics have it."""
    series = scrape(server)
    return {name: series.get(f"kvevict:{name}_total", 0.0) for name in COUNTERS}


def scrape(server) -> dict[str, float]:
    """Series by name, without labels, summed."""
    series: Counter = Counter()
    for line in server.get_text("/metrics").splitlines():
        if found := re.match(r"([A-Za-z_:][\w:]*)(?:\{[^}]*\})? (\S+)", line):
            series[found[1]] += float(found[2])
    return dict(series)


def test_metrics_equal_the_report(server):
    idle_state(server)
    # Gauges are written once a second.
    wait_until(lambda: scrape(server)["kvevict:logical_tokens"] == ask(Status(), StatusReport).gauges.logical_tokens)
    series, report = scrape(server), ask(Status(limit=0), StatusReport)
    gauges, totals = report.gauges, report.totals
    assert totals.compressions > 10 and totals.dropped_nodes > 10 and totals.evicted_entries > 0
    assert gauges.spans > 0 and series["kvevict:spans"] == gauges.spans
    assert series["kvevict:pool_slots"] == gauges.pool.total == 2000
    assert series["kvevict:held_slots"] == series["sglang:kv_evictable_tokens"]
    assert counted(server) == of_totals(totals)
    labels = re.search(r"^kvevict:spans\{([^}]*)\}", server.get_text("/metrics"), re.MULTILINE)
    stock_labels = re.search(r"^sglang:evicted_tokens_total\{([^}]*)\}", server.get_text("/metrics"), re.MULTILINE)
    assert labels and stock_labels and labels[1] == stock_labels[1]


@pytest.mark.parametrize("name", ["grafana-dashboard.json", "alerts.yml"])
def test_every_series_named_in_the_examples_exists(server, name):
    wanted = set(re.findall(r"\b(?:kvevict|sglang):\w+", (MONITORING / name).read_text()))
    assert len(wanted) > 4
    assert wanted - scrape(server).keys() == set()


@pytest.mark.skipif(PROMETHEUS is None, reason="needs Prometheus (Debian package prometheus)")
def test_prometheus_draws_every_panel_of_the_dashboard(server, tmp_path):
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 25
    with Prometheus(tmp_path, server.url) as prometheus:
        for query in queries:
            shown = query.replace("$instance", ".*").replace("$__rate_interval", "1m")
            assert prometheus.query(shown), query
        wait_until(lambda: set(prometheus.rules().values()) == {"ok"})


def test_server_info_and_the_commands(server, capsys):
    endpoint = ENDPOINT
    for arguments in (
        ["top", endpoint, "--json", "--count", "2", "--interval", "0.2"],
        ["inspect", endpoint],
        ["inspect", endpoint, "--json"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert capsys.readouterr().out
    state = server.get_json("/server_info")["internal_states"][0]["kvevict"]
    assert state["spans"] == ask(Status(), StatusReport).gauges.spans


def test_malformed_input_does_not_disturb_a_busy_server(server):
    jobs = random_jobs(40, seed=8, vocab_size=VOCAB_SIZE)
    context = zmq.Context()
    clients = [context.socket(kind) for kind in (zmq.XSUB, zmq.DEALER, zmq.DEALER)]
    for client in clients:
        client.connect(ENDPOINT)
    unknown_node = msgspec.msgpack.encode({"op": "kept", "node": 2**63 - 1})
    junk = [b"", b"\xff" * 50, b"\x91" * 5000, unknown_node, bytes(70_000)]
    for i in range(200):
        for client in clients:
            with contextlib.suppress(zmq.Again):  # the server hung up on the last one, and we are not back yet
                client.send_multipart([b"", junk[i % len(junk)]], zmq.NOBLOCK)
            if i % 20 == 0:
                port = int(ENDPOINT.rsplit(":", 1)[1])
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)))
    outputs = run_jobs(server, jobs, concurrency=8)
    assert all(output is not None for output in outputs.values())
    context.destroy(linger=0)
    assert len(generate(server, jobs[0].input_ids, 5)["output_ids"]) == 5
    assert ask(Status(), StatusReport).gauges.pool.total == 2000
