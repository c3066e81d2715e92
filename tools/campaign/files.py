"""Files that somebody else may have written, as random input: segments of a store, and learned scores."""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from hypothesis import strategies as st

from helpers.stored import SHADOW, identity, record, sealed, tokens
from kvevict_kernels.rotary import Rotary
from kvevict_kernels.row_codec import RowStatistics
from sgl_kvevict.distill.files import Learned, ModelIdentity, load_learned, save_learned
from sgl_kvevict.distill.weights import ScoreWeights
from sgl_kvevict.errors import ConfigError, CorruptSegmentError
from sgl_kvevict.store.segment_file import PREFIX_BYTES, decode_segment, encode_segment

ANGLES = torch.outer(torch.arange(10.0), torch.logspace(0, -3, 4))
ROTARY = Rotary(torch.cat([ANGLES.cos(), ANGLES.sin()], dim=-1), is_neox=True)
MODEL = ModelIdentity("mine", "ab" * 32, 3, 2, 8, ROTARY)
SCORES = ScoreWeights(torch.zeros(3, 2, 20), torch.zeros(3, 2, 22), num_prefixes=7, recall=0.875)
LEARNED = Learned(SCORES, RowStatistics(*(torch.full((3, 2, 8), value) for value in (0.0, 1.0, 0.5, 2.0))))

values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.lists(st.integers(), max_size=3)
)


OWN = identity()
DRAFT = identity(model="dd" * 32, num_layers=1, num_kv_heads=3, head_dim=6, own_value_dim=6)
"""The draft model whose rows the segment has."""


@dataclass(frozen=True)
class Change:
    """What somebody did to a safetensors file.

    Attributes:
        pieces: bytes written over others, from a place on; without bytes it ends there.
        fields: values of metadata or of what the header says of a tensor, by number.
        is_sealed: the checksum before it is made anew.
    """

    pieces: list[tuple[int, bytes]]
    fields: list[tuple[int, object]]
    is_sealed: bool

    def apply(self, data: bytes) -> bytes:
        """The file after it."""
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        places = [(name, field) for name, fields in header.items() for field in fields]
        for number, value in self.fields:
            name, field = places[number % len(places)]
            header[name][field] = json.dumps(value) if name == "__metadata__" else value
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + length :]
        for place, piece in self.pieces:
            place %= len(data) + 1
            data = data[:place] + (piece + data[place + len(piece) :] if piece else b"")
        return data


changes = st.builds(
    Change,
    st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=8)), max_size=2),
    st.lists(st.tuples(st.integers(0, 1 << 16), values), max_size=2),
    st.booleans(),
)


@cache
def _segment_bytes() -> tuple[str, bytes]:
    ours = record(OWN, OWN.namespace(None, None), tokens(40), shadow=SHADOW)
    return ours.key, encode_segment(ours, DRAFT.digest)


def segment(change: Change) -> None:
    """It is read as something that fits together, or refused as corrupt."""
    key, data = _segment_bytes()
    payload = change.apply(data[PREFIX_BYTES:])
    with contextlib.suppress(CorruptSegmentError):
        found = decode_segment(sealed(payload) if change.is_sealed else data[:PREFIX_BYTES] + payload, key, OWN, DRAFT)
        assert found.key == key and found.tokens.numel() == found.end > found.start >= 0
        rows = found.kept.rows
        assert rows.num_entries == len(rows.positions) == len(rows.k) == len(rows.v) == int(rows.keep_lens.sum()) > 0
        if (shadow := found.shadow) is not None:
            assert len(shadow.positions) == len(shadow.k) == len(shadow.v) == int(shadow.lens.sum())
            assert shadow.paid.isfinite().all() and len(shadow.paid) == len(shadow.k)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def score_weights(change: Change) -> None:
    """They are finite numbers for this model, or refused by name."""
    path = Path(_folder().name) / "weights"
    save_learned(path, LEARNED, MODEL)
    path.write_bytes(change.apply(path.read_bytes()))
    with contextlib.suppress(ConfigError):
        found, written = load_learned(path, MODEL).tensors(), LEARNED.tensors()
        assert found and all(tensor.shape == written[name].shape for name, tensor in found.items())
        assert all(tensor.isfinite().all() for tensor in found.values())
        assert all((tensor > 0).all() for name, tensor in found.items() if name.endswith("_scale"))
