from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from helpers.stored import SHADOW, assert_same, identity, keys_in, record, tokens
from sgl_kvevict.errors import ConfigError, CorruptSegmentError, StoreError
from sgl_kvevict.store import SegmentStore, describe_identity, list_segments, open_backend
from sgl_kvevict.store.directory import SCRATCH, DirectoryBackend
from sgl_kvevict.store.maintenance import copy_store, find_segments, tokens_of_segments, verify_store
from sgl_kvevict.store.manifest import MAX_ENTRIES, ManifestEntry, decode_manifest, encode_manifest
from sgl_kvevict.store.segments import segment_name

OWN = identity()
SPACE = OWN.namespace(None, None)
DRAFT = identity(model="dd" * 32, num_layers=1, num_kv_heads=3, head_dim=6, own_value_dim=6)


@pytest.fixture(params=["folder", "memory", "file"])
def backend(request, tmp_path):
    urls = {"folder": str(tmp_path), "memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}"}
    return open_backend(urls[request.param])


def test_a_segment_is_found_by_any_prompt_that_begins_with_it(backend):
    store = SegmentStore(backend, OWN)
    path = tokens(200)
    ours = record(OWN, SPACE, path)
    assert store.put(ours, SPACE) > 0
    (entry,) = store.find([*path, 5, 6], SPACE)
    chain = SPACE.chain([*path, 5, 6])
    assert (entry.key, entry.start, entry.overlap(chain, 202)) == (ours.key, 0, 200)
    found = store.get(entry.key)
    assert found is not None
    assert_same(ours, found)
    elsewhere = [*path[:150], *tokens(100, seed=1)]
    assert store.find(elsewhere, SPACE)[0].overlap(SPACE.chain(elsewhere), 250) == 128
    assert store.find([1, *path], SPACE) == [] and store.find(path[:15], SPACE) == []


def test_servers_with_other_draft_models_share_segments(backend):
    """Rows of a draft model are written once, and found by servers with that model."""
    plain = record(OWN, SPACE, tokens(40))
    ours = dataclasses.replace(plain, **SHADOW)
    assert SegmentStore(backend, OWN, draft=DRAFT).put(ours, SPACE) > 0
    other = dataclasses.replace(DRAFT, model="de" * 32)
    for theirs, expected in ((DRAFT, ours), (other, plain), (None, plain)):
        store = SegmentStore(backend, OWN, draft=theirs)
        assert store.put(ours, SPACE) == 0
        assert_same(store.get(ours.key), expected)
    assert verify_store(backend, pytest.fail) == {"segments": 1, "manifests": 2}


@pytest.mark.parametrize("change", [{"num_kv_heads": 2}, {"head_dim": 5}, {"dtype": "torch.bfloat16"}])
def test_rows_that_do_not_fit_the_draft_model_are_refused(backend, monkeypatch, change):
    """A file that names this server's draft model, and has rows of another shape."""
    ours = dataclasses.replace(record(OWN, SPACE, tokens(40)), **SHADOW)
    SegmentStore(backend, OWN, draft=DRAFT).put(ours, SPACE)
    monkeypatch.setattr(SegmentStore, "_draft_digest", DRAFT.digest)
    with pytest.raises(CorruptSegmentError, match="draft_k: got"):
        SegmentStore(backend, OWN, draft=dataclasses.replace(DRAFT, **change)).get(ours.key)


def test_a_segment_is_written_once_and_listed_once(backend):
    store = SegmentStore(backend, OWN)
    ours = record(OWN, SPACE, tokens(40))
    assert [store.put(ours, SPACE) > 0 for _ in range(3)] == [True, False, False]
    assert len(store.find(tokens(40), SPACE)) == 1
    assert keys_in(store) == [ours.key]
    assert describe_identity(backend, OWN.digest)["architecture"] == "LlamaForCausalLM"


def test_a_removed_segment_is_gone_though_its_manifest_lists_it(backend):
    store = SegmentStore(backend, OWN)
    ours = record(OWN, SPACE, tokens(40))
    store.put(ours, SPACE)
    assert store.delete(ours.key) and not store.delete(ours.key)
    assert store.get(ours.key) is None
    assert store.put(ours, SPACE) > 0 and len(store.find(tokens(40), SPACE)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"model": "ac" * 32},
        {"architecture": "Qwen2ForCausalLM"},
        {"dtype": "torch.bfloat16"},
        {"scales": (1.0, 1.0, 2.0, 1.0)},
        {"num_kv_heads": 1},
        {"rotary": "00" * 32},
        {"rank": 1},
        {"num_ranks": 2},
        {"policy": '{"policy":"snapkv","budget":0.3}'},
        {"min_prefix_tokens": 17},
    ],
)
def test_segments_of_another_identity_are_neither_found_nor_loaded(backend, change):
    path = tokens(40)
    ours = record(OWN, SPACE, path)
    SegmentStore(backend, OWN).put(ours, SPACE)
    other = identity(**change)
    theirs = SegmentStore(backend, other)
    assert theirs.find(path, other.namespace(None, None)) == [] and theirs.get(ours.key) is None
    data = backend.get(segment_name(OWN.digest, ours.key))
    backend.put(segment_name(other.digest, ours.key), data)  # moved there by hand
    with pytest.raises(CorruptSegmentError, match="identity: got"):
        theirs.get(ours.key)


def test_a_tenant_never_finds_what_another_stored(backend):
    store = SegmentStore(backend, OWN)
    path = tokens(40)
    tenants = [(None, None), ("", None), (None, ""), ("a", None), (None, "a"), ("a", "b"), ("ab", None), (None, "ab")]
    spaces = [OWN.namespace(*tenant) for tenant in tenants]
    for space in spaces:
        store.put(record(OWN, space, path), space)
    keys = [[entry.key for entry in store.find(path, space)] for space in spaces]
    assert [len(found) for found in keys] == [1] * len(tenants)
    assert len({found[0] for found in keys}) == len(tenants)


def test_a_segment_is_not_written_under_a_name_that_is_not_its_own(backend):
    store = SegmentStore(backend, OWN)
    ours = record(OWN, SPACE, tokens(40))
    with pytest.raises(ValueError, match="namespace"):
        store.put(ours, OWN.namespace("tenant", None))
    with pytest.raises(ValueError, match="identity"):
        store.put(dataclasses.replace(ours, identity="00" * 32), SPACE)


def test_a_segment_of_another_shape_is_refused(backend):
    store = SegmentStore(backend, OWN)
    ours = record(OWN, SPACE, tokens(40))
    store.put(dataclasses.replace(ours, k=ours.k[:, :2], v=ours.v[:, :2]), SPACE)
    with pytest.raises(CorruptSegmentError, match=r"rows of \(2, 2\) numbers"):
        store.get(ours.key)


def test_a_corrupt_manifest_is_reported_once_and_begun_anew(backend):
    store = SegmentStore(backend, OWN)
    ours = record(OWN, SPACE, tokens(30))
    store.put(ours, SPACE)
    (manifest,) = [item.name for item in backend.list() if "/manifests/" in item.name]
    data = bytearray(backend.get(manifest))
    data[100] ^= 1
    backend.put(manifest, bytes(data))
    with pytest.raises(CorruptSegmentError, match="checksum"):
        store.find(tokens(30), SPACE)
    assert store.find(tokens(30), SPACE) == []
    store.put(ours, SPACE)
    assert len(store.find(tokens(30), SPACE)) == 1


def test_a_manifest_lists_the_newest_segments():
    entries = [ManifestEntry(f"{i:064x}", 0, 64, True, False, "00" * 8) for i in range(5)]
    assert decode_manifest(encode_manifest(entries)) == entries
    assert MAX_ENTRIES >= 5


def test_segments_beyond_a_full_manifest_are_found(backend, monkeypatch):
    """A long system prompt before many documents: the manifest of its first tokens forgets the oldest."""
    monkeypatch.setattr("sgl_kvevict.store.manifest.MAX_ENTRIES", 3)
    monkeypatch.setattr("sgl_kvevict.store.segments.MAX_ENTRIES", 3)
    store = SegmentStore(backend, OWN)
    system = tokens(40)
    documents = [[*system, *tokens(60, seed=i)] for i in range(5)]
    for document in documents:
        store.put(record(OWN, SPACE, document), SPACE)
    found = [{entry.key for entry in store.find([*document, 5], SPACE)} for document in documents]
    assert all(SPACE.segment(document, 0) in keys for document, keys in zip(documents, found, strict=True))
    assert len(store.find([*system, 1, 2], SPACE)) == 3  # the newest


def test_a_segment_ranked_by_readers_replaces_a_predicted_one(backend):
    store = SegmentStore(backend, OWN)
    unread = record(OWN, SPACE, tokens(40))
    read = record(OWN, SPACE, tokens(40), seed=1, is_read=True)
    written = [store.put(each, SPACE) > 0 for each in (unread, read, read, unread)]
    assert written == [True, True, False, False]
    assert_same(store.get(read.key), read)
    (entry,) = store.find(tokens(40), SPACE)
    assert entry.is_read


def put_many(url: str, numbers: list[int]) -> None:
    store = SegmentStore(open_backend(url), OWN)
    for number in numbers:
        path = [*tokens(32), *tokens(32, seed=number)]
        store.put(record(OWN, SPACE, path, seed=7), SPACE)


def test_many_writers_of_one_manifest_lose_nothing(tmp_path):
    """Processes and threads, each segment by two of them."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=put_many, args=(str(tmp_path), list(range(i, i + 20)))) for i in (0, 10, 20)]
    writers += [threading.Thread(target=put_many, args=(str(tmp_path), list(range(30, 50)))) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    store = SegmentStore(open_backend(str(tmp_path)), OWN)
    entries = store.find(tokens(32), SPACE)
    assert len(entries) == len({entry.key for entry in entries}) == 50
    assert all(store.get(entry.key) is not None for entry in entries)


def test_a_folder_that_is_too_large_loses_what_was_used_longest_ago(tmp_path):
    backend = DirectoryBackend(tmp_path, max_bytes=10_000)
    for i in range(9):
        backend.put(f"a/{i}", bytes(1000))
        os.utime(tmp_path / "a" / str(i), (1000 + i, 1000 + i))
    assert backend.get("a/0") is not None  # used now
    for i in range(9, 12):
        backend.put(f"a/{i}", bytes(1000))
    names = {item.name for item in backend.list()}
    assert sum(item.size for item in backend.list()) <= 10_000
    assert "a/0" in names and "a/11" in names and "a/1" not in names
    with pytest.raises(StoreError, match="its limit is 10000"):
        backend.put("b", bytes(10_001))


def test_files_of_others_in_the_folder_are_left_alone(tmp_path):
    backend = DirectoryBackend(tmp_path, max_bytes=1000)
    for name in ("README.md", ".nfs0001", "a/.DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(900))
        os.utime(tmp_path / name, (1, 1))
    for name in "bcd":
        backend.put(name, bytes(400))
    assert {item.name for item in backend.list()} == {"c", "d"}
    assert (tmp_path / "README.md").exists() and (tmp_path / "a" / ".DS_Store").exists()


def test_half_written_files_are_never_seen_and_go_away(tmp_path):
    backend = DirectoryBackend(tmp_path, max_bytes=1000)
    backend.create()
    for name, age_s in (("dead", 7200), ("alive", 0)):
        path = tmp_path / SCRATCH / name
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    assert list(backend.list()) == []
    backend.put("a", b"whole")
    assert [path.name for path in (tmp_path / SCRATCH).iterdir()] == ["alive"]


def test_a_full_disk_is_an_error_that_leaves_nothing_behind(tmp_path, monkeypatch):
    backend = DirectoryBackend(tmp_path)

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StoreError, match="No space left"):
        backend.put("a/b", b"data")
    assert list(backend.list()) == [] and list((tmp_path / SCRATCH).iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_loses_what_was_used_longest_ago(tmp_path, monkeypatch, code):
    """As a folder that reached its limit: what is new is stored, whether it is a segment or a list of them."""
    disk, write = 10_000, Path.write_bytes

    def limited(path: Path, data: bytes) -> int:
        used = sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file())
        if used + len(data) > disk:
            write(path, data[: disk - used])
            raise OSError(code, os.strerror(code))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", limited)
    backend = DirectoryBackend(tmp_path, max_bytes=1_000_000)
    for i in range(9):
        backend.put(f"a/{i}", bytes(1000))
        os.utime(tmp_path / "a" / str(i), (1000 + i, 1000 + i))
    backend.get("a/0")
    for i in range(9, 40):
        backend.put(f"a/{i}", bytes(1000))
        os.utime(tmp_path / "a" / str(i), (time.time() + i,) * 2)
        backend.update("manifest", lambda old: (old or b"") + b"12345678" * 8)
        names = {item.name for item in backend.list()}
        assert f"a/{i}" in names and "manifest" in names and len(names) >= 6
        assert i > 12 or ("a/0" in names and "a/1" not in names) or i < 10
    assert list((tmp_path / SCRATCH).iterdir()) == []
    with pytest.raises(StoreError, match=os.strerror(code)):
        backend.put("larger", bytes(disk + 1))
    assert {item.name for item in backend.list()} == names  # nothing is removed for what cannot fit


def test_another_error_of_a_disk_removes_nothing(tmp_path, monkeypatch):
    backend = DirectoryBackend(tmp_path)
    backend.put("a", b"old")

    def fail(_path: Path, _data: bytes) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "write_bytes", fail)
    for write in (lambda: backend.put("b", b"new"), lambda: backend.update("b", lambda _old: b"new")):
        with pytest.raises(StoreError, match="Input/output"):
            write()
    assert [item.name for item in backend.list()] == ["a"]


def test_a_folder_that_is_gone_is_an_error_and_not_an_empty_store(tmp_path):
    backend = DirectoryBackend(tmp_path / "store")
    backend.create()
    (tmp_path / "store" / SCRATCH).rmdir()
    (tmp_path / "store").rmdir()
    with pytest.raises(StoreError, match="not there"):
        backend.get("a")
    with pytest.raises(StoreError, match="not there"):
        list(backend.list())
    with pytest.raises(StoreError, match="cannot be made"):
        DirectoryBackend(Path("/proc/nothing")).create()


@pytest.mark.parametrize("url", ["{folder}/none", "memory://none", "file://{folder}/none"])
def test_a_place_that_is_not_there_is_an_error_and_is_not_created(tmp_path, url):
    missing = open_backend(url.format(folder=tmp_path))
    target = open_backend(str(tmp_path / "target"))
    for call in (
        lambda: list(list_segments(missing)),
        lambda: verify_store(missing, print),
        lambda: find_segments(missing, ["abcd"]),
        lambda: tokens_of_segments(missing),
        lambda: copy_store(missing, target, print),
    ):
        with pytest.raises(StoreError, match="there"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "..", "../a", "a/../b", "/a", "a//b", ".lock", "a/.scratch", "A", "a b", "a\0"])
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="not a name"):
        DirectoryBackend(tmp_path).get(name)


@pytest.mark.parametrize("url", ["nonsense://bucket/x", "abfs://container/x"])
def test_a_protocol_that_is_missing_is_named(url):
    with pytest.raises(ConfigError, match=url):
        open_backend(url)


def test_a_service_that_fails_is_a_store_error(monkeypatch):
    backend = open_backend("memory://failing")

    def fail(*_args, **_kwargs):
        raise RuntimeError("connection reset")

    for method in ("pipe_file", "cat_file", "exists", "find"):
        monkeypatch.setattr(type(backend._files), method, fail)
    for call in (
        lambda: backend.put("a", b""),
        lambda: backend.get("a"),
        lambda: backend.delete("a"),
        lambda: backend.exists("a"),
        lambda: list(backend.list()),
    ):
        with pytest.raises(StoreError, match="connection reset"):
            call()


def test_ten_thousand_segments_are_listed(tmp_path):
    backend = DirectoryBackend(tmp_path)
    for i in range(10_000):
        path = tmp_path / segment_name(OWN.digest, f"{i:064x}"[::-1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert sum(1 for _ in list_segments(backend)) == 10_000
