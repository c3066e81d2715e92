from __future__ import annotations

import dataclasses
import json
import pickle
import random

import pytest
import torch
from safetensors.torch import load, save

from helpers.stored import SHADOW, assert_same, identity, record, sealed, tokens
from sgl_kvevict.errors import CorruptSegmentError
from sgl_kvevict.store import SegmentRecord, decode_segment, encode_segment
from sgl_kvevict.store.identity import FORMAT_VERSION
from sgl_kvevict.store.segment_file import read_header

OWN = identity()
SPACE = OWN.namespace(None, None)
RECORD = record(OWN, SPACE, tokens(40))


TAIL = {"tail_tokens": torch.arange(3), "tail_k": torch.ones(2, 3, 2, 4), "tail_v": torch.zeros(2, 3, 2, 4)}

DRAFT = "ef" * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("with_state", [False, True])
def test_what_is_read_is_what_was_written(dtype, with_state):
    changes = {"order": None, "policy_state": torch.randn(2, 2), "is_read": True} if with_state else {}
    changes |= {name: each.to(dtype) if "tokens" not in name else each for name, each in TAIL.items()}
    ours = dataclasses.replace(RECORD, k=RECORD.k.to(dtype), v=RECORD.v.to(dtype), **changes)
    assert_same(ours, decode_segment(encode_segment(ours), ours.key))


def test_latents_are_stored_as_keys_alone():
    ours = dataclasses.replace(RECORD, v=RECORD.v[:, :0], **TAIL | {"tail_v": TAIL["tail_v"][..., :0]})
    got = decode_segment(encode_segment(ours), ours.key)
    assert_same(ours, got)
    assert got.after(20).v.shape == (int((ours.positions >= 20).sum()), 0)
    with pytest.raises(CorruptSegmentError, match="tail_v: got shape"):
        decode_segment(encode_segment(dataclasses.replace(ours, tail_v=TAIL["tail_v"])), ours.key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_rows_of_a_draft_model_are_read_by_servers_with_that_model(dtype):
    """Another server reads the segment without them."""
    rows = {name: part.to(dtype) if name in ("draft_k", "draft_v") else part for name, part in SHADOW.items()}
    ours = dataclasses.replace(RECORD, **rows)
    of_tail = {name: torch.ones(1, 3, 3, 6).to(dtype) for name in ("draft_tail_k", "draft_tail_v")}
    for plain, full in ((RECORD, ours), *((dataclasses.replace(each, **TAIL) for each in (RECORD, ours)),)):
        full = full if full.tail_k is None else dataclasses.replace(full, **of_tail)
        data = encode_segment(full, DRAFT)
        assert_same(full, decode_segment(data, ours.key, DRAFT))
        for other in ("ee" * 32, ""):
            assert_same(plain, decode_segment(data, ours.key, other))
    assert read_header(data)["draft"] == DRAFT and "draft" not in read_header(encode_segment(RECORD, DRAFT))
    assert_same(RECORD, decode_segment(encode_segment(RECORD, DRAFT), ours.key, DRAFT))
    assert "draft_k" not in read_header(encode_segment(ours))["tensors"]  # a model that cannot be named


def test_rows_of_tokens_that_are_behind_a_segment_are_not_written():
    """A shadow keeps rows of tokens that its segment has dropped, where there is room."""
    behind = SHADOW["draft_positions"].clone()
    behind[1] = 40
    ours = dataclasses.replace(RECORD, **SHADOW | {"draft_positions": behind})
    found = decode_segment(encode_segment(ours, DRAFT), ours.key, DRAFT)
    assert found.draft_positions.tolist() == [1, 0, 20, 21] and found.draft_lens.tolist() == [[1, 0, 3]]
    assert torch.equal(found.draft_k, SHADOW["draft_k"][[0, 2, 3, 4]])
    assert found.draft_paid.tolist() == [0.5, 2.0, 1.0, 0.25]
    later = found.after(20)
    assert later.draft_positions.tolist() == [20, 21] and later.draft_lens.tolist() == [[0, 0, 2]]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"draft_paid": None}, "tensors: got"),
        ({"draft_lens": SHADOW["draft_lens"].long()}, "draft_lens: got torch.int64"),
        ({"draft_lens": torch.tensor([[3, 0, 3]], dtype=torch.int32)}, "draft_lens: sums to 6"),
        ({"draft_lens": torch.tensor([[41, 0, 3]], dtype=torch.int32)}, "draft_lens: expected lengths from 0 to 40"),
        ({"draft_lens": torch.tensor([2, 0, 3], dtype=torch.int32)}, "draft_lens: got shape"),
        ({"draft_positions": SHADOW["draft_positions"] - 1}, "draft_positions: expected all in"),
        ({"draft_positions": SHADOW["draft_positions"] + 1}, "draft_positions: expected all in"),
        ({"draft_positions": SHADOW["draft_positions"].flip(0)}, "draft_positions: expected ascending"),
        ({"draft_k": SHADOW["draft_k"].half()}, "k and v"),
        ({"draft_k": SHADOW["draft_k"].flatten()}, "draft_k: got shape"),
        ({"draft_v": SHADOW["draft_v"][:, :3].contiguous()}, "draft_v: got shape"),
        ({"draft_paid": SHADOW["draft_paid"][:4]}, "draft_paid: got shape"),
        ({"draft_paid": -SHADOW["draft_paid"]}, "draft_paid: expected finite"),
        ({"draft_paid": SHADOW["draft_paid"] / 0}, "draft_paid: expected finite"),
        ({"draft_tail_k": torch.ones(1, 3, 3, 6)}, "tensors: got"),
        ({"draft_tail_k": torch.ones(1, 3, 3, 6), "draft_tail_v": torch.ones(1, 3, 3, 6)}, "tensors: got"),
    ],
)
@pytest.mark.parametrize("draft", [DRAFT, ""], ids=["same", "none"])
def test_rows_of_a_draft_model_that_do_not_fit_together_are_refused(monkeypatch, changes, what, draft):
    """Also by servers that would leave them out."""
    monkeypatch.setattr(SegmentRecord, "shadow_within", lambda _record, _start: {})
    ours = dataclasses.replace(RECORD, **SHADOW | changes)
    with pytest.raises(CorruptSegmentError, match=what):
        decode_segment(encode_segment(ours, DRAFT), ours.key, draft)


@pytest.mark.parametrize(("draft", "shadow"), [("", SHADOW), (DRAFT, {})], ids=["rows", "model"])
def test_rows_without_a_model_and_a_model_without_rows_are_refused(draft, shadow):
    payload = encode_segment(dataclasses.replace(RECORD, **SHADOW), DRAFT)[64:]
    length = int.from_bytes(payload[:8], "little")
    fields = json.loads(payload[8 : 8 + length])["__metadata__"]
    tensors = {name: part for name, part in load(payload).items() if name in shadow or not name.startswith("draft")}
    with pytest.raises(CorruptSegmentError, match="draft: got"):
        decode_segment(sealed(save(tensors, fields | {"draft": json.dumps(draft)})), RECORD.key)


def test_the_header_tells_what_is_inside():
    header = read_header(encode_segment(RECORD))
    assert (header["start"], header["end"], header["key"]) == (0, 40, RECORD.key)
    assert header["tensors"]["k"] == ["F32", [18, 4]]


def test_no_flipped_bit_is_ever_loaded():
    data = encode_segment(RECORD)
    rng = random.Random(1)
    for _ in range(1000):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with pytest.raises(CorruptSegmentError):
            decode_segment(bytes(flipped), RECORD.key)


def test_no_part_of_a_file_is_ever_loaded():
    data = encode_segment(RECORD)
    for length in [*range(0, 200), *range(200, len(data), 37)]:
        with pytest.raises(CorruptSegmentError):
            decode_segment(data[:length], RECORD.key)
    for more in (b"\0", data):
        with pytest.raises(CorruptSegmentError):
            decode_segment(data + more, RECORD.key)


def test_a_segment_under_another_name_is_refused():
    with pytest.raises(CorruptSegmentError, match="key: got"):
        decode_segment(encode_segment(RECORD), "00" * 32)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"start": -1}, "start and end"),
        ({"start": 40}, "start and end"),
        ({"end": 1 << 60}, "start and end"),
        ({"end": 41}, "tokens: got shape"),
        ({"end": "40"}, "end: got"),
        ({"splittable": 1}, "splittable: got"),
        ({"tokens": RECORD.tokens.int()}, "tokens: got torch.int32"),
        ({"positions": RECORD.positions.long()}, "positions: got torch.int64"),
        ({"positions": RECORD.positions[:-1]}, "k: got shape"),
        ({"positions": RECORD.positions.flip(0)}, "ascending"),
        ({"positions": RECORD.positions + 30}, "positions: expected all in"),
        ({"positions": RECORD.positions - 30}, "positions: expected all in"),
        ({"keep_lens": torch.tensor([[3, 4], [5, 7]], dtype=torch.int32)}, "sums to 19"),
        ({"keep_lens": torch.tensor([[-1, 8], [5, 6]], dtype=torch.int32)}, "lengths from 0"),
        ({"keep_lens": torch.tensor([[41, 4], [5, 6]], dtype=torch.int32)}, "lengths from 0"),
        ({"keep_lens": torch.tensor([3, 4, 5, 6], dtype=torch.int32)}, "keep_lens: got shape"),
        ({"keep_lens": torch.empty(0, 2, dtype=torch.int32)}, "lengths from 0"),
        ({"k": RECORD.k.double()}, "k and v"),
        ({"v": RECORD.v.half()}, "k and v"),
        ({"v": RECORD.v[:, :2]}, "v: got shape"),
        ({"order": RECORD.order[:3]}, "order: got shape"),
        ({"policy_state": torch.zeros(3, 3)}, "policy_state: got shape"),
        ({"tail_tokens": torch.arange(3)}, "tensors: got"),
        ({**TAIL, "tail_v": None}, "tensors: got"),
        ({**TAIL, "tail_tokens": torch.arange(2)}, "tail_k: got shape"),
        ({**TAIL, "tail_tokens": torch.arange(0)}, "tail_tokens: got 0"),
        ({**TAIL, "tail_tokens": torch.arange(3).int()}, "tail_tokens: got torch.int32"),
        ({**TAIL, "tail_k": TAIL["tail_k"].half()}, "k and v"),
        ({**TAIL, "tail_v": TAIL["tail_v"][:1]}, "tail_v: got shape"),
    ],
)
def test_what_does_not_fit_together_is_refused_though_its_checksum_is_right(changes, what):
    with pytest.raises(CorruptSegmentError, match=what):
        decode_segment(encode_segment(dataclasses.replace(RECORD, **changes)), RECORD.key)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "not a segment"),
        (pickle.dumps({"k": 1}) * 20, "not a segment"),
        (sealed(b"", version=FORMAT_VERSION + 1), "version: got 3"),
        (sealed(b"", length=1 << 63), "length: got 0"),
        (sealed(b""), "header: got 0"),
        (sealed((1 << 63).to_bytes(8, "little") + b"{}"), "header: got"),
        (sealed((100).to_bytes(8, "little") + b"{}"), "header: got 100"),
        (sealed((2).to_bytes(8, "little") + b"{]"), "cannot be read"),
        (sealed((2).to_bytes(8, "little") + b"[]"), "not an object"),
        (sealed((60_000).to_bytes(8, "little") + b"[" * 60_000), "cannot be read"),
        (sealed(save({"k": torch.zeros(2, 2)})), "fields: got"),
        (sealed(save({"k": torch.zeros(2, 2)}, {"key": "1"})), "fields: got"),
    ],
)
def test_hostile_files_are_refused(data, what):
    with pytest.raises(CorruptSegmentError, match=what):
        decode_segment(data, RECORD.key)


def test_offsets_beyond_the_end_are_refused():
    payload = encode_segment(RECORD)[64:]
    length = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + length])
    header["v"]["data_offsets"] = [0, 1 << 50]
    text = json.dumps(header).encode()
    with pytest.raises(CorruptSegmentError, match="cannot be read"):
        decode_segment(sealed(len(text).to_bytes(8, "little") + text + payload[8 + length :]), RECORD.key)
