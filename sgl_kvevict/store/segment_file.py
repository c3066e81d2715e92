"""The format of a stored segment: 64 bytes, then a safetensors file. Nothing is ever unpickled.

========  =====  ==========================================================================================
offset    bytes  content
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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from sgl_kvevict.errors import CorruptSegmentError, shown
from sgl_kvevict.store.identity import FORMAT_VERSION

if TYPE_CHECKING:  # torch is imported where tensors are made: `sgl-kvevict store ls` starts without it
    from torch import Tensor

MAGIC = b"sgl-kvevict-seg\n"
PREFIX_BYTES = 64
MAX_HEADER_BYTES = 1 << 16
"""Limit of the safetensors header, which names at most 17 tensors and eight fields."""
MAX_TOKENS = 1 << 26
_FIELDS: dict[str, type] = {
    **{"key": str, "identity": str, "start": int, "end": int},
    **{"splittable": bool, "is_read": bool, "created": float},
}
_OF_DRAFT = "draft"
"""Field of a file beside those of its record: the digest of the draft model whose rows it has, if it has any."""
TENSORS = {
    "tokens": ("int64", "end"),
    "keep_lens": ("int32", "layers heads"),
    "positions": ("int32", "entries"),
    "k": ("rows", "entries width"),
    "v": ("rows", "entries value"),
    "order": ("int16", "entries"),
    "policy_state": ("float32", "layers heads"),
    "tail_tokens": ("int64", "tail"),
    "tail_k": ("rows", "layers tail heads width"),
    "tail_v": ("rows", "layers tail heads value"),
    "draft_lens": ("int32", "draft_layers draft_heads"),
    "draft_positions": ("int32", "draft_rows"),
    "draft_k": ("rows", "draft_rows draft_width"),
    "draft_v": ("rows", "draft_rows draft_width"),
    "draft_paid": ("float32", "draft_rows"),
    "draft_tail_k": ("rows", "draft_layers tail draft_heads draft_width"),
    "draft_tail_v": ("rows", "draft_layers tail draft_heads draft_width"),
}
"""Tensors of a record: dtype and names of sizes, which are equal wherever they occur. "rows": dtype of the pool."""
_REQUIRED = {"tokens", "keep_lens", "positions", "k", "v"}
_TAIL = {"tail_tokens", "tail_k", "tail_v"}
_SHADOW_TAIL = {"draft_tail_k", "draft_tail_v"}
_SHADOW = {name for name in TENSORS if name.startswith("draft_")} - _SHADOW_TAIL
_ROW_DTYPES = {"torch.float32", "torch.float16", "torch.bfloat16", "torch.float8_e4m3fn"}


@dataclass(frozen=True, eq=False)
class SegmentRecord:
    """A segment as a store keeps it. All tensors are on the CPU; :data:`TENSORS` has their dtypes and shapes.

    Attributes:
        key: its name, see :meth:`sgl_kvevict.store.identity.Namespace.segment`.
        identity: digest of the identity that made it.
        start: logical position of its first token; ``end``: after its last token.
        splittable: see :class:`sgl_kvevict.store.manifest.ManifestEntry`, also for ``is_read``.
        created: seconds since the epoch.
        tokens: all tokens of its path.
        keep_lens: entries of each run.
        positions: run after run, like ``k``, ``v`` and ``order``; logical, ascending within a run.
        v: without columns if values are a part of the keys' rows; likewise ``tail_v``.
        policy_state: the policy's state.
        tail_tokens: uncompressed tokens that follow in the prompt; None: no tail.
        draft_lens: rows of this server's draft model, of each run; None: none.
        draft_paid: the attention that each row was paid.
        draft_tail_k: the draft model's rows of the tail; like ``draft_tail_v``.
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
    order: Tensor | None = None
    policy_state: Tensor | None = None
    tail_tokens: Tensor | None = None
    tail_k: Tensor | None = None
    tail_v: Tensor | None = None
    draft_lens: Tensor | None = None
    draft_positions: Tensor | None = None
    draft_k: Tensor | None = None
    draft_v: Tensor | None = None
    draft_paid: Tensor | None = None
    draft_tail_k: Tensor | None = None
    draft_tail_v: Tensor | None = None

    @property
    def num_entries(self) -> int:
        """Entries stored."""
        return self.positions.numel()

    def after(self, position: int) -> SegmentRecord:
        """Return a record without the entries of tokens before a logical position; not to be stored."""
        kept, keep_lens = _within(position, self.end, self.positions, self.keep_lens)
        entries = self._rows(("positions", "k", "v", "order"), kept)
        return replace(self, start=position, keep_lens=keep_lens, **entries, **self.shadow_within(position))

    def shadow_within(self, start: int) -> dict[str, Any]:
        """Fields of the shadow, without rows of tokens before ``start`` or behind the segment; {} without a shadow."""
        if self.draft_lens is None:
            return {}
        assert self.draft_positions is not None
        kept, draft_lens = _within(start, self.end, self.draft_positions, self.draft_lens)
        return {"draft_lens": draft_lens, **self._rows(("draft_positions", "draft_k", "draft_v", "draft_paid"), kept)}

    def _rows(self, names: Sequence[str], kept: Tensor) -> dict[str, Any]:
        """Rows of fields, of any dtype, that a mask selects."""
        import torch

        found: dict[str, Any] = {}
        for name in names:
            rows = getattr(self, name)
            if rows is not None:
                numbers = torch.uint8 if rows.element_size() == 1 else rows.dtype  # torch selects no rows of float8
                found[name] = rows.view(numbers)[kept].view(rows.dtype)
        return found


def _within(start: int, end: int, positions: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the entries, run after run, are of the tokens ``[start, end)``, and how many these are in each run."""
    import torch

    kept = (positions >= start) & (positions < end)
    runs = torch.repeat_interleave(lens.flatten().long())[kept]
    return kept, runs.bincount(minlength=lens.numel()).int().view(lens.shape)


def encode_segment(record: SegmentRecord, draft: str = "") -> bytes:
    """Return the bytes of a record.

    ``draft``: digest of the draft model whose rows it has, 64 hexadecimal digits; "": they are left out.
    """
    from safetensors.torch import save

    draft = draft if record.draft_lens is not None else ""
    names = TENSORS.keys() - (set() if draft else _SHADOW | _SHADOW_TAIL)
    parts: dict[str, Tensor | None] = {name: getattr(record, name) for name in sorted(names)}
    parts |= record.shadow_within(record.start) if draft else {}
    tensors = {name: part.contiguous() for name, part in parts.items() if part is not None}
    fields = {name: getattr(record, name) for name in _FIELDS} | ({_OF_DRAFT: draft} if draft else {})
    payload = save(tensors, {name: json.dumps(value) for name, value in fields.items()})
    head = MAGIC + FORMAT_VERSION.to_bytes(8, "little") + len(payload).to_bytes(8, "little")
    return head + hashlib.sha256(head + payload).digest() + payload


def decode_segment(data: bytes, key: str, draft: str = "") -> SegmentRecord:
    """Check bytes from an untrusted source, found under the name ``key``, and return their record.

    Rows of another draft model than ``draft`` (its digest; "": there is none) are checked and left out.

    Raises:
        CorruptSegmentError: they are not exactly what :func:`encode_segment` returned for this key.
    """
    from safetensors.torch import load

    payload = _payload(data)
    fields, _ = _header(payload)
    try:
        tensors = load(payload)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CorruptSegmentError(f"the tensors cannot be read: {error}") from error
    _require(fields["key"] == key, f"key: got {shown(fields['key'])}; expected {key!r}")
    names = tensors.keys()
    known = _REQUIRED <= names <= TENSORS.keys()
    known = known and all(len(names & group) in (0, len(group)) for group in (_TAIL, _SHADOW, _SHADOW_TAIL))
    known = known and bool(names & _SHADOW_TAIL) == bool(names & _TAIL and names & _SHADOW)
    _require(known, f"tensors: got {shown(sorted(names))}; expected {sorted(_REQUIRED)}")
    of_draft = fields.pop(_OF_DRAFT, "")
    _require(bool(of_draft) == bool(names & _SHADOW), f"{_OF_DRAFT}: got {shown(of_draft)} and {shown(sorted(names))}")
    values: dict[str, Any] = {**fields, **tensors}
    record = SegmentRecord(**values)
    _check_shapes(record)
    _check_values(record)
    no_shadow: dict[str, Any] = dict.fromkeys(_SHADOW | _SHADOW_TAIL)
    return record if of_draft == draft else replace(record, **no_shadow)


def read_header(data: bytes) -> dict[str, Any]:
    """Return fields and shapes of a segment, without its tensors, for ``sgl-kvevict store show``.

    Raises:
        CorruptSegmentError: not a segment.
    """
    fields, tensors = _header(_payload(data))
    return {**fields, "tensors": {name: [each["dtype"], each["shape"]] for name, each in tensors.items()}}


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise CorruptSegmentError(message)


def _payload(data: bytes) -> bytes:
    """Check magic, version, length and checksum; return the bytes after the first 64."""
    _require(len(data) >= PREFIX_BYTES and data[:16] == MAGIC, f"not a segment: it begins with {shown(data[:16])}")
    version, length = (int.from_bytes(data[at : at + 8], "little") for at in (16, 24))
    _require(version == FORMAT_VERSION, f"version: got {version}; expected {FORMAT_VERSION}")
    payload = data[PREFIX_BYTES:]
    _require(length == len(payload), f"length: got {len(payload)} bytes after the prefix; expected {length}")
    digest = hashlib.sha256(data[:32])
    digest.update(payload)
    _require(digest.digest() == data[32:PREFIX_BYTES], "the checksum does not match")
    return payload


def _header(payload: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of a segment, and dtypes and shapes of its tensors."""
    length = int.from_bytes(payload[:8], "little")
    limit = min(MAX_HEADER_BYTES, len(payload) - 8)
    _require(2 <= length <= limit, f"header: got {length} bytes; allowed: 2 to {limit}")
    try:
        header = json.loads(payload[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise CorruptSegmentError(f"the header cannot be read: {error}") from error
    is_valid = isinstance(header, dict) and all(isinstance(each, dict) for each in header.values())
    _require(is_valid, "the header is not an object of objects")
    metadata = header.pop("__metadata__", {})
    kinds = _FIELDS | ({_OF_DRAFT: str} if _OF_DRAFT in metadata else {})
    _require(metadata.keys() == kinds.keys(), f"fields: got {shown(sorted(metadata))}; expected {sorted(kinds)}")
    fields = {}
    for name, kind in kinds.items():
        try:
            fields[name] = json.loads(metadata[name])
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptSegmentError(f"{name}: got {shown(metadata[name])}, which is not JSON") from error
        _require(type(fields[name]) is kind, f"{name}: got {shown(fields[name])}; expected a {kind.__name__}")
    return fields, header


def _check_shapes(record: SegmentRecord) -> None:
    """Check dtypes and shapes before anything is computed with the tensors."""
    in_order = 0 <= record.start < record.end <= MAX_TOKENS
    _require(in_order, f"start and end: got {record.start} and {record.end}; expected 0 <= start < end")
    for name, (dtype, _) in TENSORS.items():
        tensor = getattr(record, name)
        if tensor is not None and dtype != "rows":
            _require(str(tensor.dtype) == f"torch.{dtype}", f"{name}: got {tensor.dtype}; expected torch.{dtype}")
    ours = record.k, record.v, record.tail_k, record.tail_v
    of_draft = record.draft_k, record.draft_v, record.draft_tail_k, record.draft_tail_v
    for rows in (ours, of_draft if record.draft_k is not None else ours):
        dtypes = {str(each.dtype) for each in rows if each is not None}
        _require(len(dtypes) == 1 and dtypes <= _ROW_DTYPES, f"k and v: got {sorted(dtypes)}")
    if record.tail_tokens is not None:
        num_tail = record.tail_tokens.numel()
        _require(0 < num_tail <= MAX_TOKENS, f"tail_tokens: got {num_tail} tokens")
    value = "none" if record.v.shape[-1:] == (0,) else "width"
    sizes = {"end": record.end, "none": 0}
    for name, (_, words) in TENSORS.items():
        tensor = getattr(record, name)
        if tensor is not None:
            shape, expected = tuple(tensor.shape), words.replace("value", value).split()
            fits = len(shape) == len(expected)
            fits = fits and all(
                sizes.setdefault(word, size) == size for word, size in zip(expected, shape, strict=True)
            )
            _require(fits, f"{name}: got shape {shape}; expected {[sizes.get(word, word) for word in expected]}")


def _check_values(record: SegmentRecord) -> None:
    """Check runs and what rows of the draft model were paid."""
    _check_runs("keep_lens", record.keep_lens, "positions", record.positions, record)
    _require(record.num_entries > 0, "keep_lens: sums to 0; expected more")
    if record.draft_lens is not None:
        assert record.draft_positions is not None and record.draft_paid is not None
        _check_runs("draft_lens", record.draft_lens, "draft_positions", record.draft_positions, record)
        paid = record.draft_paid
        _require(bool((paid.isfinite() & (paid >= 0)).all()), "draft_paid: expected finite numbers >= 0")


def _check_runs(of_lens: str, lens: Tensor, of_positions: str, positions: Tensor, record: SegmentRecord) -> None:
    """Check lengths of runs, and their positions: tokens of the segment, ascending within a run."""
    import torch

    num_tokens, num_entries = record.end - record.start, positions.numel()
    lens = lens.flatten().long()
    in_range = lens.numel() > 0 and int(lens.min()) >= 0 and int(lens.max()) <= num_tokens
    _require(in_range, f"{of_lens}: expected lengths from 0 to {num_tokens}")
    total = int(lens.sum())
    _require(total == num_entries, f"{of_lens}: sums to {total}; expected {num_entries}")
    inside = bool(((positions >= record.start) & (positions < record.end)).all())
    _require(inside, f"{of_positions}: expected all in [{record.start}, {record.end})")
    run = torch.repeat_interleave(lens)
    ascending = bool(((positions.diff() > 0) | (run.diff() > 0)).all())
    _require(ascending, f"{of_positions}: expected ascending ones within a run")
