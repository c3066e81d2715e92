"""The format of a stored segment: 64 bytes, then a safetensors file. Nothing is ever unpickled.

========  =====  ==========================================================================================
offset    bytes  what
========  =====  ==========================================================================================
0         16     ``sgl-kvevict-seg`` and a newline
16        8      version of the format, little-endian
24        8      bytes that follow the first 64, little-endian
32        32     SHA-256 of the first 32 bytes and of all that follows the first 64
64        n      safetensors: the tensors of :class:`SegmentRecord`, and its other fields as metadata
========  =====  ==========================================================================================
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sgl_kvevict.errors import CorruptSegmentError, shown
from sgl_kvevict.store.identity import FORMAT_VERSION

MAGIC = b"sgl-kvevict-seg\n"
PREFIX_BYTES = 64
MAX_HEADER_BYTES = 1 << 16
"""Of the safetensors header: it names eleven tensors and seven fields."""
MAX_TOKENS = 1 << 26
_FIELDS = ("key", "identity", "start", "end", "splittable", "is_read", "created")
_REQUIRED = {"tokens", "keep_lens", "positions", "k", "v"}
_TAIL = {"tail_tokens", "tail_k", "tail_v"}
_OPTIONAL = {"worth", "policy_state", "biases"} | _TAIL
_DTYPES = {
    "tokens": torch.int64,
    "keep_lens": torch.int32,
    "positions": torch.int32,
    "worth": torch.int16,
    "policy_state": torch.float32,
    "biases": torch.float32,
    "tail_tokens": torch.int64,
}
_ROW_DTYPES = {torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn}


@dataclass(frozen=True, eq=False)
class SegmentRecord:
    """A segment without a place in a pool: what a store keeps of it. All tensors are on the CPU.

    Attributes:
        key: its name, see :meth:`sgl_kvevict.store.identity.Namespace.segment`.
        identity: digest of the identity of who made it.
        start: logical position of the first token that it stands for.
        end: logical position after the last one.
        splittable: see :class:`sgl_kvevict.prefix.Segment`.
        is_read: likewise.
        created: seconds since the epoch.
        tokens: [end], int64, all tokens of its path.
        keep_lens: [num_layers, num_kv_heads], int32, entries of each run.
        positions: [num_entries], int32, run after run, logical positions, ascending within a run.
        k: [num_entries, head_dim], in the dtype of the pool.
        v: likewise.
        worth: [num_entries], int16, or None.
        policy_state: [num_layers, num_kv_heads], float32, what the policy wants to know later, or None.
        biases: [num_entries], float32, added to the scores of its entries; None: it is not fitted.
        tail_tokens: [num_tail], int64, tokens that follow, uncompressed, in the prompt; None: no tail.
        tail_k: [num_layers, num_tail, num_kv_heads, head_dim], in the dtype of the pool, or None.
        tail_v: likewise.
    """

    key: str
    identity: str
    start: int
    end: int
    splittable: bool
    is_read: bool
    created: float
    tokens: Tensor
    keep_lens: Tensor
    positions: Tensor
    k: Tensor
    v: Tensor
    worth: Tensor | None = None
    policy_state: Tensor | None = None
    biases: Tensor | None = None
    tail_tokens: Tensor | None = None
    tail_k: Tensor | None = None
    tail_v: Tensor | None = None

    @property
    def num_entries(self) -> int:
        """Entries stored."""
        return self.positions.numel()

    def after(self, position: int) -> SegmentRecord:
        """The same without the entries of tokens before a logical position; not to be stored."""
        kept = self.positions >= position
        runs = torch.repeat_interleave(self.keep_lens.flatten().long())[kept]
        k, v = (rows.view(torch.uint8)[kept].view(rows.dtype) for rows in (self.k, self.v))
        return replace(
            self,
            start=position,
            keep_lens=runs.bincount(minlength=self.keep_lens.numel()).int().view(self.keep_lens.shape),
            positions=self.positions[kept],
            k=k,
            v=v,
            worth=None if self.worth is None else self.worth[kept],
            biases=None if self.biases is None else self.biases[kept],
        )


def encode_segment(record: SegmentRecord) -> bytes:
    """Return the bytes of a record."""
    names = sorted(_REQUIRED | _OPTIONAL)
    tensors = {name: tensor.contiguous() for name in names if (tensor := getattr(record, name)) is not None}
    fields = {name: json.dumps(getattr(record, name)) for name in _FIELDS}
    payload = save(tensors, fields)
    head = MAGIC + FORMAT_VERSION.to_bytes(8, "little") + len(payload).to_bytes(8, "little")
    return b"".join((head, _checksum(head, payload), payload))


def decode_segment(data: bytes, key: str) -> SegmentRecord:
    """Check bytes that anybody may have written, and return the record that they hold.

    Args:
        data: as read.
        key: under which they were found.

    Raises:
        CorruptSegmentError: they are not exactly what :func:`encode_segment` returned for this key.
    """
    payload = check_segment(data)
    metadata, _ = _header(payload)
    try:
        tensors = load(payload)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CorruptSegmentError(f"the tensors cannot be read: {error}") from error
    values: dict[str, Any] = {**_fields(metadata), **tensors}
    if values["key"] != key:
        raise CorruptSegmentError(f"key: got {shown(values['key'])}; expected {key!r}")
    names = tensors.keys()
    if not names >= _REQUIRED or names - _REQUIRED - _OPTIONAL or len(names & _TAIL) not in (0, len(_TAIL)):
        raise CorruptSegmentError(f"tensors: got {shown(sorted(names))}; expected {sorted(_REQUIRED)}")
    record = SegmentRecord(**values)
    _check_shapes(record)
    _check_positions(record)
    _check_biases(record)
    return record


def check_segment(data: bytes) -> bytes:
    """Check prefix and checksum; return what follows the first 64 bytes.

    Raises:
        CorruptSegmentError: they are wrong.
    """
    if len(data) < PREFIX_BYTES or data[:16] != MAGIC:
        raise CorruptSegmentError(f"not a segment: it begins with {shown(data[:16])}")
    version = int.from_bytes(data[16:24], "little")
    if version != FORMAT_VERSION:
        raise CorruptSegmentError(f"version: got {version}; expected {FORMAT_VERSION}")
    length = int.from_bytes(data[24:32], "little")
    if length != len(data) - PREFIX_BYTES:
        raise CorruptSegmentError(f"length: got {len(data) - PREFIX_BYTES} bytes after the prefix; expected {length}")
    payload = data[PREFIX_BYTES:]
    if _checksum(data[:32], payload) != data[32:PREFIX_BYTES]:
        raise CorruptSegmentError("the checksum does not match")
    return payload


def read_header(data: bytes) -> dict[str, Any]:
    """Fields and shapes of a segment, without its tensors; for ``sgl-kvevict store show``.

    Raises:
        CorruptSegmentError: not a segment.
    """
    metadata, tensors = _header(check_segment(data))
    return {**_fields(metadata), "tensors": {name: [each["dtype"], each["shape"]] for name, each in tensors.items()}}


def _checksum(head: bytes, payload: bytes) -> bytes:
    digest = hashlib.sha256(head)
    digest.update(payload)
    return digest.digest()


def _header(payload: bytes) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Metadata and tensors' descriptions of a safetensors file."""
    length = int.from_bytes(payload[:8], "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, len(payload) - 8):
        raise CorruptSegmentError(
            f"header: got {length} bytes; allowed: 2 to {MAX_HEADER_BYTES}, and not beyond the end"
        )
    try:
        header = json.loads(payload[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise CorruptSegmentError(f"the header cannot be read: {error}") from error
    if not isinstance(header, dict) or not all(isinstance(each, dict) for each in header.values()):
        raise CorruptSegmentError("the header is not an object of objects")
    return header.pop("__metadata__", {}), header


def _fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    if metadata.keys() != set(_FIELDS):
        raise CorruptSegmentError(f"fields: got {shown(sorted(metadata))}; expected {sorted(_FIELDS)}")
    kinds = {"key": str, "identity": str, "start": int, "end": int, "splittable": bool, "is_read": bool}
    fields = {}
    for name in _FIELDS:
        try:
            value = json.loads(metadata[name])
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptSegmentError(f"{name}: got {shown(metadata[name])}, which is not JSON") from error
        if type(value) is not kinds.get(name, float):
            raise CorruptSegmentError(f"{name}: got {shown(value)}; expected a {kinds.get(name, float).__name__}")
        fields[name] = value
    return fields


def _check_shapes(record: SegmentRecord) -> None:
    """Types and shapes fit each other; nothing is computed with them before."""
    if not 0 <= record.start < record.end <= MAX_TOKENS:
        raise CorruptSegmentError(f"start and end: got {record.start} and {record.end}; expected 0 <= start < end")
    for name, dtype in _DTYPES.items():
        tensor = getattr(record, name)
        if tensor is not None and tensor.dtype != dtype:
            raise CorruptSegmentError(f"{name}: got {tensor.dtype}; expected {dtype}")
    rows = (record.k, record.v, record.tail_k, record.tail_v)
    dtypes = {each.dtype for each in rows if each is not None}
    if record.k.dtype not in _ROW_DTYPES or len(dtypes) != 1:
        raise CorruptSegmentError(f"k and v: got {sorted(map(str, dtypes))}")
    if record.keep_lens.dim() != 2 or record.k.dim() != 2:
        raise CorruptSegmentError(
            f"keep_lens and k: got shapes {tuple(record.keep_lens.shape)} and {tuple(record.k.shape)}"
        )
    num_entries, heads = record.positions.numel(), tuple(record.keep_lens.shape)
    expected = {
        "tokens": (record.end,),
        "positions": (num_entries,),
        "k": (num_entries, record.k.shape[1]),
        "v": (num_entries, record.k.shape[1]),
        "worth": (num_entries,),
        "policy_state": heads,
        "biases": (num_entries,),
    }
    if record.tail_tokens is not None:
        num_tail = record.tail_tokens.numel()
        if not 0 < num_tail <= MAX_TOKENS:
            raise CorruptSegmentError(f"tail_tokens: got {num_tail} tokens")
        tail = (heads[0], num_tail, heads[1], record.k.shape[1])
        expected |= {"tail_tokens": (num_tail,), "tail_k": tail, "tail_v": tail}
    for name, shape in expected.items():
        tensor = getattr(record, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise CorruptSegmentError(f"{name}: got shape {tuple(tensor.shape)}; expected {shape}")


def _check_biases(record: SegmentRecord) -> None:
    """A bias that is no number would be every answer's."""
    if record.biases is not None and not bool(record.biases.isfinite().all()):
        raise CorruptSegmentError("biases: expected finite numbers")


def _check_positions(record: SegmentRecord) -> None:
    """Runs have the lengths that they say, and tokens of the segment in ascending order."""
    num_tokens = record.end - record.start
    lens = record.keep_lens.flatten().long()
    if lens.numel() == 0 or int(lens.min()) < 0 or int(lens.max()) > num_tokens:
        raise CorruptSegmentError(f"keep_lens: expected lengths from 0 to {num_tokens}")
    if int(lens.sum()) != record.num_entries or record.num_entries == 0:
        raise CorruptSegmentError(f"keep_lens: sums to {int(lens.sum())}; expected {record.num_entries}, and not 0")
    positions = record.positions
    if int(positions.min()) < record.start or int(positions.max()) >= record.end:
        raise CorruptSegmentError(f"positions: expected all in [{record.start}, {record.end})")
    run = torch.repeat_interleave(lens)
    if not bool(((positions.diff() > 0) | (run.diff() > 0)).all()):
        raise CorruptSegmentError("positions: expected ascending ones within a run")
