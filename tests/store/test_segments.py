from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import random
import threading
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from helpers.stored import MIN_PREFIX, SHADOW, assert_same, completed, identity, keys_in, record, tokens
from sgl_kvevict.errors import ConfigError, CorruptSegmentError, StoreError
from sgl_kvevict.store.directory import SCRATCH, DirectoryBackend
from sgl_kvevict.store.identity import FORMAT_VERSION
from sgl_kvevict.store.maintenance import copy_store, find_segments, verify_store
from sgl_kvevict.store.segments import SegmentStore, describe_identity, list_segments, open_backend, segment_name
from sgl_kvevict.store.tier import IndexEntry, Lookup, listed_blocks

OWN = identity()
SPACE = OWN.namespace(None, None)
OURS = record(OWN, SPACE, tokens(40))
PLACE = f"v{FORMAT_VERSION}/{OWN.digest}"
DRAFT = identity(model="dd" * 32, num_layers=1, num_kv_heads=3, head_dim=6, own_value_dim=6)


@pytest.fixture(params=["folder", "memory", "file"])
def backend(request, tmp_path):
    urls = {"folder": str(tmp_path), "memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}"}
    return open_backend(urls[request.param])


@pytest.fixture
def store(backend):
    return SegmentStore(backend, OWN)


def test_a_segment_is_found_by_any_prompt_that_begins_with_it(store):
    path = tokens(200)
    ours = record(OWN, SPACE, path)
    assert store.put(ours, SPACE) > 0
    ((same, entry),) = store.find([*path, 5, 6], SPACE)
    assert (entry.key, entry.start, entry.end, same) == (ours.key, 0, 200, 200)
    found = store.get(entry.key)
    assert found is not None
    assert_same(ours, found)
    elsewhere = [*path[:150], *tokens(100, seed=1)]
    assert store.find(elsewhere, SPACE) == [(144, entry)]  # whole blocks; the rest is compared once it is read
    assert store.find([*path[:90], *tokens(100, seed=1)], SPACE) == []  # less than half of it would be used
    assert store.find([1, *path], SPACE) == [] and store.find(path[:15], SPACE) == []


def test_servers_with_other_draft_models_share_segments(backend):
    """Rows of a draft model are written once, and found by servers with that model."""
    ours = dataclasses.replace(OURS, shadow=SHADOW)
    assert SegmentStore(backend, OWN, draft=DRAFT).put(ours, SPACE) > 0
    other = dataclasses.replace(DRAFT, model="de" * 32)
    for theirs, expected in ((DRAFT, ours), (other, OURS), (None, OURS)):
        store = SegmentStore(backend, OWN, draft=theirs)
        assert store.put(ours, SPACE) == 0
        assert_same(store.get(ours.key), expected)
    assert verify_store(backend, pytest.fail) == {"segments": 1, "prefixes": 1}


def test_a_segment_is_written_once_and_listed_once(store, backend):
    assert [store.put(OURS, SPACE) > 0 for _ in range(3)] == [True, False, False]
    assert len(store.find(tokens(40), SPACE)) == 1
    assert keys_in(store) == [OURS.key]
    assert describe_identity(backend, OWN.digest)["architecture"] == "LlamaForCausalLM"


def test_a_removed_segment_is_gone_though_it_is_listed(store):
    store.put(OURS, SPACE)
    assert store.delete(OURS.key) and not store.delete(OURS.key)
    assert store.get(OURS.key) is None
    assert store.put(OURS, SPACE) > 0 and len(store.find(tokens(40), SPACE)) == 1


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
    SegmentStore(backend, OWN).put(OURS, SPACE)
    other = identity(**change)
    theirs = SegmentStore(backend, other)
    assert theirs.find(path, other.namespace(None, None)) == [] and theirs.get(OURS.key) is None
    data = backend.get(segment_name(OWN.digest, OURS.key))
    backend.put(segment_name(other.digest, OURS.key), data)  # moved there by hand
    with pytest.raises(CorruptSegmentError, match="identity: got"):
        theirs.get(OURS.key)


def test_a_tenant_never_finds_what_another_stored(store):
    path = tokens(40)
    tenants = [(None, None), ("", None), (None, ""), ("a", None), (None, "a"), ("a", "b"), ("ab", None), (None, "ab")]
    spaces = [OWN.namespace(*tenant) for tenant in tenants]
    for space in spaces:
        store.put(record(OWN, space, path), space)
    keys = [[entry.key for _, entry in store.find(path, space)] for space in spaces]
    assert [len(found) for found in keys] == [1] * len(tenants)
    assert len({found[0] for found in keys}) == len(tenants)


def test_a_segment_is_not_written_under_a_name_that_is_not_its_own(store):
    with pytest.raises(ValueError, match="namespace"):
        store.put(OURS, OWN.namespace("tenant", None))
    with pytest.raises(ValueError, match="identity"):
        store.put(dataclasses.replace(OURS, identity="00" * 32), SPACE)


@pytest.mark.parametrize("data", [b"", b"half", b"[]", b"{}", b"\xff", b'{"key": 1}', b"[" * 5000])
def test_a_damaged_file_of_the_index_is_written_anew(store, backend, data):
    ours = record(OWN, SPACE, tokens(30))
    store.put(ours, SPACE)
    (name,) = [item.name for item in backend.list() if "/prefixes/" in item.name]
    backend.put(name, data)
    assert store.find(tokens(30), SPACE) == []
    assert verify_store(backend, lambda _line: None) == {"segments": 1, "corrupt": 1}
    assert store.put(ours, SPACE) == 0 and len(store.find(tokens(30), SPACE)) == 1


def test_what_the_index_says_of_a_segment_is_not_believed(backend):
    """A prompt that leaves the segment in the middle, and an index that says it can be split."""
    store, path = SegmentStore(backend, OWN), tokens(64)
    whole = record(OWN, SPACE, path, splittable=False)
    store.put(whole, SPACE)
    prompt = [*path[:50], *tokens(30, seed=1)]
    name = store._prefix_name(SPACE.chain(path, MIN_PREFIX)[2])
    backend.put(name, msgspec.json.encode(IndexEntry(whole.key, True)))
    found = store.find(prompt, SPACE)
    assert [same for same, _ in found] == [48]
    assert list(store.continuing(Lookup(prompt, SPACE, 0, 0), found, store.get)) == []


def test_documents_behind_a_shared_header_are_all_found(store):
    """Each is listed under names of its own; those of the header list one of them."""
    system = tokens(80)
    documents = [[*system, *tokens(60, seed=i)] for i in range(5)]
    for document in documents:
        store.put(record(OWN, SPACE, document), SPACE)
    for document in documents:
        same, entry = store.find([*document, 5], SPACE)[0]
        assert (same, entry.key) == (140, SPACE.segment(document, 0))
    ((same, _),) = store.find([*system, *tokens(20, seed=9)], SPACE)
    assert same == 80


def test_a_name_lists_the_newest_segment(backend):
    """Whichever it is, a prompt that finds it uses at least half of it; what is removed is listed no longer."""
    store, path = SegmentStore(backend, OWN), tokens(160)
    short, long = record(OWN, SPACE, path[:100]), record(OWN, SPACE, path)
    for order in ((short, long), (long, short)):
        for each in order:
            store.put(each, SPACE)
        known = 97 if order[1] is short else 96  # whole blocks of the short one are the same: maybe the rest, too
        assert store.find(path[:97], SPACE)[0] == (known, IndexEntry(order[1].key, True))
        assert store.find(path, SPACE)[0] == (160, IndexEntry(long.key, True))
    store.delete(short.key)
    store.put(long, SPACE)
    assert store.find(path[:97], SPACE)[0] == (96, IndexEntry(long.key, True))


def test_a_complete_segment_takes_the_place_of_one_that_lacks_entries(store):
    plain = record(OWN, SPACE, tokens(40))
    full = completed(plain)

    def put(ours):
        return store.put(ours, SPACE), store.find(tokens(40), SPACE)[0][1]

    assert put(plain)[0] > 0 and put(plain) == (0, IndexEntry(plain.key, True))
    assert put(full)[0] > 0
    assert put(plain) == put(full) == (0, IndexEntry(plain.key, True, True))
    assert_same(full, store.get(plain.key))


def test_a_conversation_is_found_though_another_prompt_shares_its_first_turn(backend):
    """The names of the first turn list the other prompt's segment: its beginning is used, then the second turn."""
    store, turn, more = SegmentStore(backend, OWN), tokens(96), tokens(80, seed=1)
    first, second = record(OWN, SPACE, turn), record(OWN, SPACE, [*turn, *more], start=96)
    other = record(OWN, SPACE, [*turn, *tokens(80, seed=2)])
    for each in (first, second, other):
        store.put(each, SPACE)
    lookup = Lookup([*turn, *more, 1], SPACE, 0, 0)
    found = list(store.continuing(lookup, store.find(lookup.tokens, SPACE), store.get))
    assert [each.key for each in found] == [other.key, second.key]


@pytest.mark.parametrize(("start", "end"), [(0, 16), (0, 40), (3, 20), (500, 1000), (1000, 9999), (0, 64_000)])
def test_a_segment_has_few_names_and_whoever_uses_half_of_it_knows_one(start, end):
    key = f"{'ab' * 32}-{start}-{end}"
    numbers = listed_blocks(IndexEntry(key, True), 16)
    assert numbers == sorted(set(numbers)) and len(numbers) <= 9 and numbers[-1] == end // 16
    half = start + (end - start) / 2
    assert (numbers[0] - 1) * 16 < half and numbers[0] * 16 > start
    steps = [b - a for a, b in pairwise(numbers)]
    assert max(steps, default=0) <= max((end - start) / 16 / 16 + 1, 1)
    assert listed_blocks(IndexEntry(key, False), 16) == [end // 16]


def put_many(url: str, numbers: list[int]) -> None:
    store = SegmentStore(open_backend(url), OWN)
    for number in numbers:
        path = [*tokens(32), *tokens(32, seed=number)]
        store.put(record(OWN, SPACE, path, seed=7), SPACE)


def test_many_writers_at_once_lose_nothing(tmp_path):
    """Processes and threads, each segment by two of them."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=put_many, args=(str(tmp_path), list(range(i, i + 20)))) for i in (0, 10, 20)]
    writers += [threading.Thread(target=put_many, args=(str(tmp_path), list(range(30, 50)))) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    store = SegmentStore(open_backend(str(tmp_path)), OWN)
    for number in range(50):
        path = [*tokens(32), *tokens(32, seed=number)]
        same, entry = store.find(path, SPACE)[0]
        assert same == 64 and store.get(entry.key).tokens.tolist() == path
    assert len(keys_in(store)) == 50


def test_a_folder_that_is_too_large_loses_what_was_used_longest_ago(tmp_path):
    backend = DirectoryBackend(tmp_path, max_bytes=10_000)
    for i in range(9):
        backend.put(f"{PLACE}/{i}", bytes(1000))
        os.utime(tmp_path / PLACE / str(i), (1000 + i, 1000 + i))
    assert backend.get(f"{PLACE}/0") is not None  # used now
    for i in range(9, 12):
        backend.put(f"{PLACE}/{i}", bytes(1000))
    names = {item.name for item in backend.list()}
    assert sum(item.size for item in backend.list()) <= 10_000
    assert f"{PLACE}/0" in names and f"{PLACE}/11" in names and f"{PLACE}/1" not in names
    with pytest.raises(StoreError, match="its limit is 10000"):
        backend.put("b", bytes(10_001))


def test_files_of_others_in_the_folder_are_left_alone(tmp_path):
    """Also those that could be a store's by their letters, whatever the limit, and when the whole store is removed."""
    backend = DirectoryBackend(tmp_path, max_bytes=1000)
    foreign = ("README.md", ".nfs0001", "a/.DS_Store", "thesis.txt", "v4/notes.txt", f"v4/{'g' * 64}/data", "ab/cd/ef")
    for name in foreign:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(bytes(900))
        os.utime(tmp_path / name, (1, 1))
    for name in "bcd":
        backend.put(f"{PLACE}/{name}", bytes(400))
    assert {item.name for item in backend.list()} == {f"{PLACE}/c", f"{PLACE}/d"}
    assert all((tmp_path / name).exists() for name in foreign)


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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_loses_what_was_used_longest_ago(tmp_path, monkeypatch, code):
    """As a folder that reached its limit: what is new is stored."""
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
        backend.put(f"{PLACE}/{i}", bytes(1000))
        os.utime(tmp_path / PLACE / str(i), (1000 + i, 1000 + i))
    backend.get(f"{PLACE}/0")
    for i in range(9, 40):
        backend.put(f"{PLACE}/{i}", bytes(1000))
        os.utime(tmp_path / PLACE / str(i), (time.time() + i,) * 2)
        names = {item.name for item in backend.list()}
        assert f"{PLACE}/{i}" in names and len(names) >= 6
        assert i > 12 or (f"{PLACE}/0" in names and f"{PLACE}/1" not in names) or i < 10
    assert list((tmp_path / SCRATCH).iterdir()) == []
    with pytest.raises(StoreError, match=os.strerror(code)):
        backend.put("larger", bytes(disk + 1))
    assert {item.name for item in backend.list()} == names  # nothing is removed for what cannot fit


@pytest.mark.parametrize(("code", "names"), [(errno.ENOSPC, []), (errno.EIO, [f"{PLACE}/a"])])
def test_an_error_of_a_disk_leaves_nothing_behind_and_removes_nothing(tmp_path, monkeypatch, code, names):
    """One that is full, where nothing can be removed, and one that fails."""
    backend = DirectoryBackend(tmp_path)
    for name in names:
        backend.put(name, b"old")

    def fail(path: Path, _data: bytes) -> int:
        path.touch()
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(StoreError, match=os.strerror(code)):
        backend.put("b", b"new")
    assert [item.name for item in backend.list()] == names and list((tmp_path / SCRATCH).iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder"])
def test_what_is_no_file_is_an_error_that_keeps_nobody_waiting(tmp_path, kind):
    """A pipe has no end before somebody writes to it, and a device may have none at all."""
    backend, path = DirectoryBackend(tmp_path), tmp_path / "a"
    {"pipe": lambda: os.mkfifo(path), "endless": lambda: path.symlink_to("/dev/zero"), "folder": path.mkdir}[kind]()
    errors: list[StoreError] = []

    def read() -> None:
        try:
            backend.get("a")
        except StoreError as error:
            errors.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(30)
    assert len(errors) == 1 and "cannot be read: a" in str(errors[0])


@pytest.mark.parametrize("url", ["{folder}", "file://{folder}"])
def test_a_file_that_is_larger_than_its_name_allows_is_not_read_whole(tmp_path, url):
    """One of 8 TiB, of which the disk has almost nothing, could not be."""
    store = SegmentStore(open_backend(url.format(folder=tmp_path)), OWN)
    store.put(OURS, SPACE)
    for each in ("segments", "prefixes"):
        (path,) = (tmp_path / PLACE / each).rglob("*-*" if each == "segments" else "?" * 64)
        os.truncate(path, 8 << 40)
    assert store.find(tokens(40), SPACE) == []  # its file of the index is damaged
    with pytest.raises(CorruptSegmentError, match=r"length: got more than \d+ bytes, which no segment"):
        store.get(OURS.key)
    assert store.delete(OURS.key) and store.put(OURS, SPACE) > 0 and len(store.find(tokens(40), SPACE)) == 1


def test_a_new_folder_is_open_to_nobody_else(tmp_path):
    """It has the tokens of prompts. A folder that is there keeps its permissions: others may be meant to read it."""
    for name, exists in (("new", False), ("shared", True)):
        folder = tmp_path / name
        if exists:
            folder.mkdir(mode=0o755)
        DirectoryBackend(folder / "deep" if name == "new" else folder).create()
    assert (tmp_path / "new" / "deep").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755


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

    for method in ("pipe_file", "cat_file", "cat", "exists", "find"):
        monkeypatch.setattr(type(backend._files), method, fail)
    for call in (
        lambda: backend.put("a", b""),
        lambda: backend.get("a"),
        lambda: backend.get_many(["a", "b"]),
        lambda: backend.delete("a"),
        lambda: backend.exists("a"),
        lambda: list(backend.list()),
    ):
        with pytest.raises(StoreError, match="connection reset"):
            call()


def test_ten_thousand_segments_are_listed(tmp_path):
    backend = DirectoryBackend(tmp_path)
    for i in range(10_000):
        path = tmp_path / segment_name(OWN.digest, f"{f'{i:064x}'[::-1]}-0-{i + 1}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert {each.num_tokens for each in list_segments(backend)} == set(range(1, 10_001))


def test_files_of_another_format_are_ignored(tmp_path):
    """And removed when they were used longest ago, as any file of a store."""
    old = f"v2/{OWN.digest}/segments/ab/{'ab' * 32}"
    backend = DirectoryBackend(tmp_path, max_bytes=10_000)
    backend.put(old, bytes(5000))
    os.utime(tmp_path / old, (1, 1))
    assert list(list_segments(backend)) == [] and verify_store(backend, pytest.fail) == {}
    assert copy_store(backend, open_backend(str(tmp_path / "target")), pytest.fail) == {}
    backend.put(f"{PLACE}/new", bytes(6000))
    assert {item.name for item in backend.list()} == {f"{PLACE}/new"}


def test_processes_that_remove_at_once_remove_the_same(tmp_path):
    """Each sees the folder above its limit; together they leave what one of them would."""
    (tmp_path / PLACE).mkdir(parents=True)
    for i in range(20):
        (tmp_path / PLACE / f"item{i}").write_bytes(bytes(1000))
        os.utime(tmp_path / PLACE / f"item{i}", (1000 + i, 1000 + i))
    backends = [DirectoryBackend(tmp_path, max_bytes=10_000) for _ in range(4)]
    threads = [threading.Thread(target=each._trim, args=(10_000,)) for each in backends]
    for each in backends:
        each.create()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {item.name for item in backends[0].list()} == {f"{PLACE}/item{i}" for i in range(11, 20)}


def test_random_writers_never_mislead_a_reader(tmp_path):
    """Several servers write, remove, damage and trim at once; what is found always continues the prompt."""
    rng = random.Random(3)
    stores = [SegmentStore(DirectoryBackend(tmp_path, max_bytes=40_000), OWN) for _ in range(3)]
    texts = [tokens(70, seed=seed) for seed in range(3)]
    cuts = [[rng.choice(texts)[: rng.randrange(20, 70)] for _ in range(2)] for _ in range(30)]
    prompts = [[*head, *end] for head, end in cuts]
    num_found = 0
    for step in range(400):
        store, prompt = rng.choice(stores), rng.choice(prompts)
        start = rng.choice([0, 0, 0, rng.randrange(len(prompt) - MIN_PREFIX)])
        ours = record(OWN, SPACE, prompt, start, splittable=rng.random() < 0.7)
        store.put(ours, SPACE)

        def get(key, store=store):
            try:
                return store.get(key)
            except CorruptSegmentError:
                store.delete(key)
                return None

        if start == 0:
            for _ in range(2):  # the first time it may find that what was there is damaged
                found = list(store.continuing(Lookup(prompt, SPACE, 0, 0), store.find(prompt, SPACE), get))
                store.put(ours, SPACE)
            assert found[0].tokens.tolist() == prompt
        if step % 7 == 0:
            items = [item.name for item in store.backend.list() if "identity" not in item.name]
            victim = rng.choice(items)
            path = tmp_path / victim
            path.write_bytes(path.read_bytes()[: rng.randrange(60)]) if rng.random() < 0.5 else path.unlink()
        asked, compressed = rng.choice(prompts), rng.choice([0, 0, 30])
        lookup = Lookup([*asked, 1, 2], SPACE, compressed, compressed)

        reached = compressed
        for found in store.continuing(lookup, store.find(lookup.tokens, SPACE), get):
            path = found.tokens.tolist()
            same = next((i for i, (a, b) in enumerate(zip(lookup.tokens, path, strict=False)) if a != b), len(path))
            assert same >= reached + MIN_PREFIX and (found.start == reached or found.splittable)
            assert found.start <= reached and (found.splittable or same == found.end)
            reached, num_found = same, num_found + 1
        assert sum(item.size for item in store.backend.list()) <= 45_000
    assert num_found > 100
