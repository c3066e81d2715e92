"""Stores in services that other people wrote: an S3 server, and Mooncake's master and memory. Real processes."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from importlib.util import find_spec

import pytest

from helpers.store_services import Mooncake, s3_server
from helpers.stored import assert_same, identity, keys_in, record, tokens
from sgl_kvevict.errors import ConfigError, StoreError
from sgl_kvevict.store.maintenance import copy_store, verify_store
from sgl_kvevict.store.segments import SegmentStore, list_segments, open_backend, segment_name

pytestmark = pytest.mark.slow

OWN = identity()
SPACE = OWN.namespace(None, None)


def has(*modules: str) -> bool:
    return all(find_spec(module) is not None for module in modules)


needs_s3 = pytest.mark.skipif(not has("s3fs", "moto", "flask"), reason="needs s3fs and moto[server]")


def needs_mooncake() -> None:
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(f"needs mooncake-transfer-engine-non-cuda and its libraries: {error}")


@pytest.fixture
def s3(tmp_path, monkeypatch):
    for name, value in {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    with s3_server(tmp_path) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket/kvevict"
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def mooncake(tmp_path):
    needs_mooncake()
    with ExitStack() as stack:
        services = Mooncake(tmp_path, stack)
        services.start()
        yield services


def check_store(url: str, folder) -> None:
    """What a server and an operator do with a store."""
    store = SegmentStore(open_backend(url), OWN)
    paths = [[*tokens(32), *tokens(40, seed=i)] for i in range(3)]
    records = [record(OWN, SPACE, path, seed=i) for i, path in enumerate(paths)]
    assert all(store.put(each, SPACE) > 0 for each in records) and store.put(records[0], SPACE) == 0
    other = SegmentStore(open_backend(url), OWN)  # of another server
    for path, ours in zip(paths, records, strict=True):
        assert ours.key == other.find([*path, 1], SPACE)[0][1].key
        assert_same(ours, other.get(ours.key))
    assert other.find(tokens(50, seed=9), SPACE) == [] and other.get("00" * 32 + "-0-40") is None
    assert {each.key for each in list_segments(other.backend)} == {each.key for each in records}
    assert all(each.item.size > 0 for each in list_segments(other.backend))
    assert verify_store(other.backend, print)["segments"] == 3
    assert copy_store(other.backend, open_backend(str(folder / "copy")), print)["segments"] == 3
    other.backend.put(segment_name(OWN.digest, records[1].key), b"half")
    assert verify_store(store.backend, lambda line: None, delete=True)["corrupt"] == 1
    assert store.get(records[1].key) is None and store.delete(records[0].key) and not store.delete(records[0].key)


def check_writers(url: str) -> None:
    """Two servers that list segments under the same names at once."""

    def write(number: int) -> None:
        store = SegmentStore(open_backend(url), OWN)
        for i in range(4):
            path = [*tokens(32), *tokens(40, seed=100 + 10 * number + i)]
            store.put(record(OWN, SPACE, path), SPACE)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    store = SegmentStore(open_backend(url), OWN)
    assert len(keys_in(store)) >= 8
    for number in range(8):
        path = [*tokens(32), *tokens(40, seed=100 + 10 * (number // 4) + number % 4)]
        same, entry = store.find(path, SPACE)[0]
        assert same == 72 and store.get(entry.key).tokens.tolist() == path


@needs_s3
def test_s3(s3, tmp_path):
    check_store(s3, tmp_path)
    check_writers(s3)


@needs_s3
def test_an_s3_server_that_goes_away_is_a_store_error(tmp_path, s3, monkeypatch):
    store = SegmentStore(open_backend("s3://no-such-bucket/x"), OWN)
    with pytest.raises(StoreError, match="no-such-bucket"):
        store.put(record(OWN, SPACE, tokens(40)), SPACE)


def test_mooncake(mooncake, tmp_path):
    check_store(mooncake.url, tmp_path)
    check_writers(mooncake.url)
    backend = open_backend(mooncake.url)
    with pytest.raises(StoreError, match="Mooncake's error"):
        backend.put("large", bytes(64 << 20))  # beyond the buffer
    assert backend.get("large") is None


def test_mooncakes_master_may_come_late_and_go(tmp_path, monkeypatch):
    needs_mooncake()
    monkeypatch.setattr("sgl_kvevict.store.mooncake.RETRY_S", 0.0)
    with ExitStack() as stack:
        services = Mooncake(tmp_path, stack)
        backend = open_backend(services.url)  # a server starts without it
        with pytest.raises(StoreError, match="cannot be reached"):
            backend.get("a")
        services.start()
        backend.put("a", b"1")
        assert backend.get("a") == b"1" and backend.get("b") is None
        services.stop_master()
        for call in (lambda: backend.get("a"), lambda: backend.put("a", b"2"), lambda: list(backend.list())):
            with pytest.raises(StoreError, match="cannot be"):
                call()


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("mooncake:///name", "allowed: mooncake://HOST:PORT/NAME"),
        ("mooncake://host:50051", "not a name"),
        ("mooncake://host:port/name", "port"),
        ("mooncake://host/name?protocol=pigeon", "allowed: tcp, rdma"),
        ("mooncake://host/name?size=1", "allowed: mooncake://HOST:PORT/NAME"),
        ("mooncake://host/name?buffer_bytes=many", "many"),
    ],
)
def test_a_mooncake_url_that_makes_no_sense_is_refused(url, what):
    needs_mooncake()
    with pytest.raises(ConfigError, match=what):
        open_backend(url)
