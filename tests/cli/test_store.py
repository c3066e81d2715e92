from __future__ import annotations

import json

import pytest

from helpers.command_line import run
from helpers.stored import identity, record, tokens, with_header
from sgl_kvevict.errors import CorruptSegmentError
from sgl_kvevict.store.segment_file import read_header
from sgl_kvevict.store.segments import SegmentStore, open_backend

OWN = identity()
SPACE = OWN.namespace(None, None)
RECORDS = [record(OWN, SPACE, [*tokens(32), *tokens(32, seed)], seed=seed) for seed in range(1, 4)]


@pytest.fixture
def folder(tmp_path):
    store = SegmentStore(open_backend(str(tmp_path / "store")), OWN)
    for each in RECORDS:
        store.put(each, SPACE)
    return tmp_path / "store"


def path_of(folder, each):
    return next(folder.rglob(each.key))


def test_ls_lists_every_segment(capsys, folder):
    code, out, _ = run(capsys, "store", "ls", str(folder))
    assert code == 0 and all(each.key[:12] in out for each in RECORDS) and "3 segments" in out
    assert RECORDS[0].key not in out and "LlamaForCausalLM abababab\n" in out
    full = run(capsys, "store", "ls", str(folder), "--long")[1]
    assert all(f"{each.key}  " in full for each in RECORDS) and f"LlamaForCausalLM {'ab' * 32}\n" in full
    assert len(full.splitlines()) == 5  # a heading, a line for each segment, the sum
    listed = json.loads(run(capsys, "store", "ls", str(folder), "--json")[1])
    assert {each["key"] for each in listed} == {each.key for each in RECORDS}
    assert {each["tokens"] for each in listed} == {64}


@pytest.mark.parametrize("architecture", ["\x1b[2J\x1b]0;mine\x07 [/bold]", "[" * 100_000, {"a": "\x9b31m"}])
def test_what_another_server_wrote_neither_commands_the_terminal_nor_breaks_the_list(capsys, folder, architecture):
    """Whoever can write to the store chooses how its identity is described."""
    (description,) = folder.rglob("identity.json")
    nested = isinstance(architecture, str) and architecture.startswith("[[")
    description.write_text(
        architecture if nested else json.dumps({"architecture": architecture, "model": "\x1b[2J[i]"})
    )
    for options in ((), ("--long",)):
        code, out, _ = run(capsys, "store", "ls", str(folder), *options)
        assert code == 0 and len(out.splitlines()) == 5
        assert all(each.isprintable() for each in out.splitlines())
    assert run(capsys, "store", "show", str(folder), RECORDS[0].key[:8])[0] == 0


def test_an_error_about_a_file_does_not_command_the_terminal(capsys, folder):
    """The header of a segment with a sound checksum says whatever its writer wants."""
    path = path_of(folder, RECORDS[0])
    theirs = {"\x1b[2J\nsound": "1"}
    path.write_bytes(with_header(path.read_bytes(), lambda header: header["__metadata__"].update(theirs)))
    with pytest.raises(CorruptSegmentError, match=r"unknown field `\\x1b\[2J\\nsound`"):
        read_header(path.read_bytes())
    code, _, err = run(capsys, "store", "verify", str(folder))
    assert code == 1 and all(each.isprintable() for each in err.splitlines()) and len(err.splitlines()) == 2


def test_show_tells_what_is_known_but_no_token(capsys, folder):
    code, out, _ = run(capsys, "store", "show", str(folder), RECORDS[0].key[:8])
    shown = json.loads(out)
    assert code == 0 and (shown["num_tokens"], shown["made_by"]["architecture"]) == (64, "LlamaForCausalLM")
    assert shown["tensors"]["tokens"] == ["I64", [64]] and "rows.positions" in shown["tensors"]


def test_rm_removes_what_is_named(capsys, folder):
    assert run(capsys, "store", "rm", str(folder), RECORDS[0].key[:8])[:2] == (0, "1 removed\n")
    assert len(json.loads(run(capsys, "store", "ls", str(folder), "--json")[1])) == 2
    assert run(capsys, "store", "rm", str(folder), "--all")[0] == 0
    assert json.loads(run(capsys, "store", "ls", str(folder), "--json")[1]) == []


def test_verify_finds_one_flipped_bit(capsys, folder):
    assert run(capsys, "store", "verify", str(folder))[:2] == (0, "3 segments and 7 files of the index are sound\n")
    path = path_of(folder, RECORDS[1])
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    code, out, err = run(capsys, "store", "verify", str(folder), "--delete")
    assert code == 1 and RECORDS[1].key in err and "2 segments" in out
    assert run(capsys, "store", "verify", str(folder))[0] == 0


def test_push_and_pull_copy_what_is_missing_and_nothing_corrupt(capsys, folder, tmp_path):
    path_of(folder, RECORDS[2]).write_bytes(b"half")
    other = tmp_path / "other"
    code, out, err = run(capsys, "store", "push", str(folder), str(other))
    assert code == 1 and "2 segments and 7 files of the index copied" in out and RECORDS[2].key in err
    store = SegmentStore(open_backend(str(other)), OWN)
    store.put(RECORDS[2], SPACE)
    path_of(folder, RECORDS[2]).unlink()
    assert run(capsys, "store", "pull", str(folder), str(other))[0] == 0
    back = SegmentStore(open_backend(str(folder)), OWN)
    for each in RECORDS:
        assert back.find(each.tokens.tolist(), SPACE)[0][1].key == each.key and back.get(each.key) is not None


def test_of_a_store_that_is_empty_nothing_is_copied(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    code, _, err = run(capsys, "store", "push", str(tmp_path / "empty"), str(tmp_path / "target"))
    assert code == 2 and "nothing is stored" in err and not (tmp_path / "target").exists()
