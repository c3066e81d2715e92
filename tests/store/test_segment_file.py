from __future__ import annotations

import dataclasses
import json
import pickle
import random

import pytest
import torch
from safetensors.torch import load, save

from helpers.stored import SHADOW, assert_same, completed, identity, record, sealed, tokens, with_header, with_rows
from kvevict_kernels.row_sizes import row_bytes
from sgl_kvevict.copies import CopiedEntries, CopiedRows, CopiedShadow, CopiedSinks
from sgl_kvevict.errors import CorruptSegmentError
from sgl_kvevict.store.identity import FORMAT_VERSION
from sgl_kvevict.store.segment_file import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    SegmentRecord,
    decode_segment,
    encode_segment,
    most_bytes,
    read_header,
)

OWN = identity()
SPACE = OWN.namespace(None, None)
RECORD = record(OWN, SPACE, tokens(40))
K, V, POSITIONS, KEEP_LENS = (getattr(RECORD.kept.rows, name) for name in ("k", "v", "positions", "keep_lens"))

DRAFT = identity(model="dd" * 32, num_layers=1, num_kv_heads=3, head_dim=6, own_value_dim=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_what_is_read_is_what_was_written(dtype):
    own = identity(dtype=str(dtype))
    ours = dataclasses.replace(with_rows(RECORD, k=K.to(dtype), v=V.to(dtype)), identity=own.digest)
    assert_same(ours, decode_segment(encode_segment(ours), ours.key, own))


def test_latents_are_stored_as_keys_alone():
    own = identity(own_value_dim=0)
    ours = dataclasses.replace(with_rows(RECORD, v=V[:, :0]), identity=own.digest)
    got = decode_segment(encode_segment(ours), ours.key, own)
    assert_same(ours, got)
    assert got.after(20).kept.rows.v.shape == (int((POSITIONS >= 20).sum()), 0)
    with pytest.raises(CorruptSegmentError, match=r"rows\.v: got"):
        decode_segment(encode_segment(with_rows(ours, v=V)), ours.key, own)


FEW_BITS = identity(head_dim=64, own_value_dim=64, dtype="torch.bfloat16", statistics="ef" * 32, sink_tokens=4)


def in_few_bits(start: int = 0) -> SegmentRecord:
    """Entries of 4 bits, whose rows are bytes, and as many sinks as fit to where it starts."""
    path, own = tokens(40), FEW_BITS
    lens = torch.tensor([[1, 0], [2, 0]], dtype=torch.int32)
    positions = torch.tensor([7, 4, 30], dtype=torch.int32)
    order = torch.tensor([1, -2, -3], dtype=torch.int16)
    rows = CopiedRows(lens, positions, *torch.randint(0, 256, (2, 3, row_bytes(4, 64)), dtype=torch.uint8), order)
    sinks = CopiedSinks(*torch.randn(2, 2, 4 - start, 2, 64).bfloat16()) if start < 4 else None
    key = own.namespace(None, None).segment(path, start)
    return SegmentRecord(key, own.digest, start, 40, True, torch.tensor(path), CopiedEntries(rows, sinks))


@pytest.mark.parametrize("start", [0, 1, 4])
def test_rows_of_few_bits_are_bytes_and_sinks_a_group_of_their_own(start):
    ours = in_few_bits(start)
    data = encode_segment(ours)
    shapes = read_header(data)["tensors"]
    assert shapes["rows.k"] == ["U8", [3, 34]] and ours.kept.rows.bits == 4
    assert shapes.get("sinks.v") == (["BF16", [2, 4 - start, 2, 64]] if start < 4 else None)
    assert_same(ours, decode_segment(data, ours.key, FEW_BITS))
    assert_same(ours, ours.with_tensors(load(data[PREFIX_BYTES:])))
    assert ours.kept.num_entries == 3 + 4 * (4 - start)


def test_what_is_behind_a_position_has_the_sinks_behind_it():
    ours = in_few_bits()
    for position, left in ((1, 3), (3, 1)):
        later = ours.after(position)
        assert torch.equal(later.kept.sinks.k, ours.kept.sinks.k[:, position:]) and later.kept.num_sinks == left
        assert later.kept.num_entries == 3 + 4 * left
    later = ours.after(20)
    assert later.kept.sinks is None and later.kept.num_entries == len(later.kept.rows.order) == 1
    assert later.kept.rows.positions.tolist() == [30] and later.kept.rows.keep_lens.tolist() == [[0, 0], [1, 0]]
    assert torch.equal(later.kept.rows.k, ours.kept.rows.k[2:]) and later.kept.rows.order.tolist() == [-3]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sinks": None}, "tensors: got"),
        ({"sinks": CopiedSinks(*torch.zeros(2, 2, 3, 2, 64).bfloat16())}, r"sinks\.[kv]: got"),
        ({"sinks": CopiedSinks(*torch.zeros(2, 2, 4, 2, 64))}, r"sinks\.[kv]: got"),
        ({"positions": torch.tensor([7, 3, 30], dtype=torch.int32)}, r"rows\.positions: expected all in \[4, 40\)"),
        ({"k": torch.zeros(3, 33, dtype=torch.uint8)}, r"rows\.[kv]: got"),
        ({"k": torch.zeros(3, 64).bfloat16()}, r"rows\.[kv]: got"),
    ],
)
def test_sinks_and_rows_of_few_bits_that_do_not_fit_are_refused(changes, what):
    ours = in_few_bits()
    if "sinks" in changes:
        ours = dataclasses.replace(ours, kept=dataclasses.replace(ours.kept, **changes))
    else:
        ours = with_rows(ours, **changes)
    with pytest.raises(CorruptSegmentError, match=what):
        decode_segment(encode_segment(ours), ours.key, FEW_BITS)


@pytest.mark.parametrize("changes", [{"statistics": ""}, {"sink_tokens": 0}])
def test_a_server_of_rows_of_16_bits_or_of_other_sinks_refuses_such_a_segment(changes):
    other = dataclasses.replace(FEW_BITS, **changes)
    ours = dataclasses.replace(in_few_bits(), identity=other.digest)
    with pytest.raises(CorruptSegmentError, match="tensors: got"):
        decode_segment(encode_segment(ours), ours.key, other)
    if not other.statistics:
        ours = dataclasses.replace(ours, kept=CopiedEntries(ours.kept.rows))
        with pytest.raises(CorruptSegmentError, match=r"rows\.[kv]: got torch.uint8"):
            decode_segment(encode_segment(ours), ours.key, other)


COMPLETE = completed(RECORD)


def test_evicted_entries_are_a_group_of_their_own():
    data = encode_segment(COMPLETE)
    assert read_header(data)["tensors"]["evicted.k"] == ["F32", [160 - 18, 4]]
    assert "evicted.k" not in read_header(encode_segment(RECORD))["tensors"]
    assert COMPLETE.is_complete and not RECORD.is_complete
    assert_same(COMPLETE, decode_segment(data, COMPLETE.key, OWN))
    assert_same(COMPLETE, COMPLETE.with_tensors(load(data[PREFIX_BYTES:])))
    later = COMPLETE.after(20)
    assert later.is_complete and later.kept.num_entries + later.evicted.positions.numel() == 20 * 4
    assert int(later.evicted.positions.min()) >= 20 and later.evicted.k.shape == (len(later.evicted.order), 4)
    kept = COMPLETE.evicted.positions >= 20
    assert torch.equal(later.evicted.k, COMPLETE.evicted.k[kept])
    assert torch.equal(later.evicted.order, COMPLETE.evicted.order[kept])


def test_the_largest_segment_of_a_name_has_as_many_bytes_as_one_may():
    """All entries, with everything that goes with them."""
    path, num_shadow = tokens(4000), 3 * 4000
    shadow = CopiedShadow(
        torch.full((1, 3), 4000, dtype=torch.int32),
        torch.arange(4000, dtype=torch.int32).repeat(3),
        *(torch.zeros(num_shadow, 6) for _ in "kv"),
        torch.zeros(num_shadow),
    )
    ours = completed(record(OWN, SPACE, path, shadow=shadow))
    data = encode_segment(ours, DRAFT.digest)
    assert_same(ours, decode_segment(data, ours.key, OWN, DRAFT))
    most = most_bytes(ours.key, OWN, DRAFT)
    assert len(data) <= most < len(data) + 2 * MAX_HEADER_BYTES


def test_one_rank_may_have_no_evicted_entries():
    nothing = POSITIONS[:0].short()
    empty = CopiedRows(torch.zeros(2, 2, dtype=torch.int32), POSITIONS[:0], K[:0], V[:0], nothing)
    ours = dataclasses.replace(RECORD, evicted=empty)
    assert_same(ours, decode_segment(encode_segment(ours), ours.key, OWN))
    assert ours.after(20).evicted.positions.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_rows_of_a_draft_model_are_read_by_servers_with_that_model(dtype):
    """Another server reads the segment without them."""
    draft = dataclasses.replace(DRAFT, dtype=str(dtype))
    rows = dataclasses.replace(SHADOW, k=SHADOW.k.to(dtype), v=SHADOW.v.to(dtype))
    ours = dataclasses.replace(RECORD, shadow=rows)
    data = encode_segment(ours, draft.digest)
    assert_same(ours, decode_segment(data, ours.key, OWN, draft))
    for other in (dataclasses.replace(draft, model="ee" * 32), None):
        assert_same(RECORD, decode_segment(data, ours.key, OWN, other))
    assert read_header(data)["draft"] == draft.digest
    without = encode_segment(RECORD, draft.digest)
    assert read_header(without)["draft"] == "" and "shadow.k" not in read_header(without)["tensors"]
    assert_same(RECORD, decode_segment(without, ours.key, OWN, draft))
    assert "shadow.k" not in read_header(encode_segment(ours))["tensors"]  # a model that cannot be named


def test_rows_of_tokens_that_are_behind_a_segment_are_not_written():
    """A shadow keeps rows of tokens that its segment has dropped, where there is room."""
    behind = SHADOW.positions.clone()
    behind[1] = 40
    ours = dataclasses.replace(RECORD, shadow=dataclasses.replace(SHADOW, positions=behind))
    found = decode_segment(encode_segment(ours, DRAFT.digest), ours.key, OWN, DRAFT).shadow
    assert found.positions.tolist() == [1, 0, 20, 21] and found.lens.tolist() == [[1, 0, 3]]
    assert torch.equal(found.k, SHADOW.k[[0, 2, 3, 4]])
    assert found.paid.tolist() == [0.5, 2.0, 1.0, 0.25]
    later = ours.after(20).shadow
    assert later.positions.tolist() == [20, 21] and later.lens.tolist() == [[0, 0, 2]]
    assert all(torch.equal(getattr(later, name), getattr(SHADOW, name)[[3, 4]]) for name in ("k", "v", "paid"))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"paid": None}, "tensors: got"),
        ({"lens": SHADOW.lens.long()}, "shadow.lens: got torch.int64"),
        ({"lens": torch.tensor([[3, 0, 3]], dtype=torch.int32)}, "shadow.lens: sums to 6"),
        ({"lens": torch.tensor([[41, 0, 3]], dtype=torch.int32)}, "shadow.lens: expected lengths from 0 to 40"),
        ({"lens": torch.tensor([2, 0, 3], dtype=torch.int32)}, "shadow.lens: got"),
        ({"positions": SHADOW.positions - 1}, "shadow.positions: expected all in"),
        ({"positions": SHADOW.positions + 1}, "shadow.positions: expected all in"),
        ({"positions": SHADOW.positions.flip(0)}, "shadow.positions: expected ascending"),
        ({"k": SHADOW.k.half()}, "[kv]: got"),
        ({"k": SHADOW.k.flatten()}, "shadow.k: got"),
        ({"v": SHADOW.v[:, :3].contiguous()}, "shadow.v: got"),
        ({"paid": SHADOW.paid[:4]}, "shadow.paid: got"),
        ({"paid": -SHADOW.paid}, "shadow.paid: expected finite"),
        ({"paid": SHADOW.paid / 0}, "shadow.paid: expected finite"),
    ],
)
def test_rows_of_a_draft_model_that_do_not_fit_together_are_refused(monkeypatch, changes, what):
    monkeypatch.setattr(CopiedShadow, "within", lambda shadow, _start, _end: shadow)
    ours = dataclasses.replace(RECORD, shadow=dataclasses.replace(SHADOW, **changes))
    with pytest.raises(CorruptSegmentError, match=what):
        decode_segment(encode_segment(ours, DRAFT.digest), ours.key, OWN, DRAFT)


@pytest.mark.parametrize("missing", ["shadow.k", "shadow.", "rows.v", "rows.", "tokens"])
def test_a_file_has_all_of_what_it_has(missing):
    """All of the draft model's rows that it says it has, too."""
    payload = encode_segment(dataclasses.replace(RECORD, shadow=SHADOW), DRAFT.digest)[PREFIX_BYTES:]
    fields = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])["__metadata__"]
    tensors = load(payload)
    decode_segment(sealed(save(tensors, fields)), RECORD.key, OWN, DRAFT)
    left = {name: each for name, each in tensors.items() if not name.startswith(missing)}
    with pytest.raises(CorruptSegmentError, match="tensors: got"):
        decode_segment(sealed(save(left, fields)), RECORD.key, OWN, DRAFT)


def test_the_header_tells_what_is_inside():
    header = read_header(encode_segment(RECORD))
    assert (header["start"], header["end"], header["key"]) == (0, 40, RECORD.key)
    assert header["tensors"]["rows.k"] == ["F32", [18, 4]]


def test_no_flipped_bit_is_ever_loaded():
    data = encode_segment(COMPLETE)
    rng = random.Random(1)
    for _ in range(1000):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with pytest.raises(CorruptSegmentError):
            decode_segment(bytes(flipped), RECORD.key, OWN)


def test_no_part_of_a_file_is_ever_loaded():
    data = encode_segment(COMPLETE)
    for length in [*range(0, 200), *range(200, len(data), 37)]:
        with pytest.raises(CorruptSegmentError):
            decode_segment(data[:length], RECORD.key, OWN)
    for more in (b"\0", data):
        with pytest.raises(CorruptSegmentError):
            decode_segment(data + more, RECORD.key, OWN)


def test_a_segment_under_another_name_is_refused():
    with pytest.raises(CorruptSegmentError, match="key: got"):
        decode_segment(encode_segment(RECORD), "00" * 32, OWN)


@pytest.mark.parametrize(
    ("part", "changes", "what"),
    [
        (None, {"tokens": RECORD.tokens[:-1]}, "tokens: got"),
        (None, {"splittable": 1}, "splittable"),
        (None, {"identity": "ab"}, 'identity: got "ab"'),
        (None, {"tokens": RECORD.tokens.int()}, "tokens: got torch.int32"),
        *(
            ("kept", *case)
            for case in (
                ({"positions": POSITIONS.long()}, "positions: got torch.int64"),
                ({"positions": POSITIONS[:-1]}, "got"),
                ({"positions": POSITIONS.flip(0)}, "ascending"),
                ({"positions": POSITIONS + 30}, "positions: expected all in"),
                ({"positions": POSITIONS - 30}, "positions: expected all in"),
                ({"keep_lens": torch.tensor([[3, 4], [5, 7]], dtype=torch.int32)}, "sums to 19"),
                ({"keep_lens": torch.tensor([[-1, 8], [5, 6]], dtype=torch.int32)}, "lengths from 0"),
                ({"keep_lens": torch.tensor([[41, 4], [5, 6]], dtype=torch.int32)}, "lengths from 0"),
                ({"keep_lens": torch.tensor([3, 4, 5, 6], dtype=torch.int32)}, "keep_lens: got"),
                ({"keep_lens": torch.empty(0, 2, dtype=torch.int32)}, "keep_lens: got"),
                ({"k": K.double()}, "[kv]: got"),
                ({"v": V.half()}, "[kv]: got"),
                ({"v": V[:, :2]}, "v: got"),
                ({"order": RECORD.kept.rows.order[:3]}, "order: got"),
            )
        ),
        *(
            ("evicted", *case)
            for case in (
                ({"positions": COMPLETE.evicted.positions.long()}, "evicted.positions: got torch.int64"),
                ({"positions": COMPLETE.evicted.positions.flip(0)}, "evicted.positions: expected ascending"),
                ({"positions": COMPLETE.evicted.positions + 30}, "evicted.positions: expected all in"),
                ({"keep_lens": COMPLETE.evicted.keep_lens + 10}, "evicted.keep_lens: expected lengths from 0 to 40"),
                ({"keep_lens": COMPLETE.evicted.keep_lens - 1}, "evicted.keep_lens: sums to"),
                ({"k": COMPLETE.evicted.k[:9]}, "evicted.k: got"),
                ({"v": None}, "tensors: got"),
                ({"k": COMPLETE.evicted.k.byte()}, "evicted.[kv]: got torch.uint8"),
                ({"order": None}, "tensors: got"),
                ({"order": COMPLETE.evicted.order[:9]}, r"evicted\.order: got"),
                ({"order": COMPLETE.evicted.order.int()}, r"evicted\.order: got"),
            )
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_though_its_checksum_is_right(part, changes, what):
    """Of the segment itself, of its entries, or of those that were evicted."""
    if part == "evicted":
        ours = dataclasses.replace(COMPLETE, evicted=dataclasses.replace(COMPLETE.evicted, **changes))
    else:
        ours = with_rows(RECORD, **changes) if part == "kept" else dataclasses.replace(RECORD, **changes)
    with pytest.raises(CorruptSegmentError, match=what):
        decode_segment(encode_segment(ours), ours.key, OWN)


def moved(part: CopiedRows, run: int, to: int) -> CopiedRows:
    """A part whose first entry in a run has another position."""
    positions = part.positions.clone()
    positions[int(part.keep_lens.flatten()[:run].sum())] = to
    return dataclasses.replace(part, positions=positions)


@pytest.mark.parametrize("run", [0, 2, 3])
def test_an_evicted_entry_that_the_segment_has_is_refused(run):
    first = int(COMPLETE.evicted.positions[int(COMPLETE.evicted.keep_lens.flatten()[:run].sum())])
    ours = dataclasses.replace(COMPLETE, kept=CopiedEntries(moved(RECORD.kept.rows, run, first)))
    names, expected = r"rows\.positions and evicted\.positions", "expected no entry twice"
    with pytest.raises(CorruptSegmentError, match=rf"{names}: got position {first} in run {run} of each; {expected}"):
        decode_segment(encode_segment(ours), ours.key, OWN)


@pytest.mark.parametrize("bounds", ["40-40", "41-40", "0-67108865", "0-41", "0", "-1-40"])
def test_bounds_that_do_not_fit_are_refused(bounds):
    key = f"{'ab' * 32}-{bounds}"
    with pytest.raises(CorruptSegmentError, match=r"start and end: got|tokens: got|cannot be read"):
        decode_segment(encode_segment(dataclasses.replace(RECORD, key=key)), key, OWN)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "not a segment"),
        (pickle.dumps({"k": 1}) * 20, "not a segment"),
        (sealed(b"", version=FORMAT_VERSION + 1), "version: got 8; expected 7"),
        (sealed(b"", version=6), "version: got 6; expected 7"),  # it may have rows of two widths
        (sealed(b"", length=1 << 63), "length: got 0"),
        (sealed(b""), "header: got 0"),
        (sealed((1 << 63).to_bytes(8, "little") + b"{}"), "header: got"),
        (sealed((100).to_bytes(8, "little") + b"{}"), "header: got 100"),
        (sealed((2).to_bytes(8, "little") + b"{]"), "cannot be read"),
        (sealed((2).to_bytes(8, "little") + b"[]"), "cannot be read"),
        (sealed((60_000).to_bytes(8, "little") + b"[" * 60_000), "cannot be read"),
        (sealed(save({"k": torch.zeros(2, 2)})), "header cannot be read"),
        (sealed(save({"k": torch.zeros(2, 2)}, {"key": "1"})), "header cannot be read"),
    ],
)
def test_hostile_files_are_refused(data, what):
    with pytest.raises(CorruptSegmentError, match=what):
        decode_segment(data, RECORD.key, OWN)


def test_offsets_beyond_the_end_are_refused():
    data = with_header(encode_segment(RECORD), lambda header: header["rows.v"].update(data_offsets=[0, 1 << 50]))
    with pytest.raises(CorruptSegmentError, match="cannot be read"):
        decode_segment(data, RECORD.key, OWN)
