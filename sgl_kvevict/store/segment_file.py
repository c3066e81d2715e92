"""The format of a stored segment: 64 bytes, then a safetensors file. Nothing is ever unpickled.

========  =====  ==========================================================================================
offset    bytes  content
========  =====  ==========================================================================================
0         16     ``sgl-kvevict-seg`` and a newline
16        8      version of the format, little-endian
24        8      bytes that follow the first 64, little-endian
32        32     SHA-256 of the first 32 bytes and of all that follows the first 64
64        n      safetensors: the tensors of :class:`SegmentRecord`, and :class:`SegmentHeader` as metadata
========  =====  ==========================================================================================
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError

from sgl_kvevict.errors import CorruptSegmentError, cut, shown
from sgl_kvevict.store.identity import FORMAT_VERSION, KEY, StoreIdentity, key_bounds

if TYPE_CHECKING:  # torch is imported where tensors are made: `sgl-kvevict store ls` starts without it
    from torch import Tensor

    from sgl_kvevict.copies import CopiedEntries, CopiedRows, CopiedShadow, EvictedPart

MAGIC = b"sgl-kvevict-seg\n"
PREFIX_BYTES = 64
GROUPS = ("rows", "sinks", "shadow", "evicted")
"""Groups of a record's tensors; the last three need not be there."""
MAX_HEADER_BYTES = 1 << 16
"""Limit of the safetensors header, which names a few dozen tensors and six fields."""


class SegmentHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file says of its segment beside tensors; fields as in :class:`SegmentRecord`.

    ``draft``: digest of the draft model whose rows it has; "": it has none.
    """

    key: KEY
    identity: str
    splittable: bool
    draft: str = ""


@dataclass(frozen=True, eq=False)
class SegmentRecord:
    """A segment outside the pool. ``tokens`` is on the CPU; in a file and as it is read all other tensors are, too.

    Attributes:
        key: its name, see :meth:`sgl_kvevict.store.identity.Namespace.segment`.
        identity: digest of the identity that made it.
        start: logical position of its first token; ``end``: after its last token.
        splittable: a prompt that diverges inside it can use its beginning.
        tokens: [end], int64, all tokens of its path.
        kept: its entries.
        shadow: rows of this server's draft model.
        evicted: of a file, entries that had been evicted from it; None: it has none of them.
        parts: in the host's memory, the parts of what had been evicted from it, lost or not, the first one first.
    """

    key: str
    identity: str
    start: int
    end: int
    splittable: bool
    tokens: Tensor
    kept: CopiedEntries
    shadow: CopiedShadow | None = None
    evicted: CopiedRows | None = None
    parts: Sequence[EvictedPart] = ()

    @property
    def is_complete(self) -> bool:
        """Whether it has every entry of its tokens, evicted or not."""
        num_evicted = 0 if self.evicted is None else self.evicted.num_entries
        return self.kept.num_entries + num_evicted == (self.end - self.start) * self.kept.rows.keep_lens.numel()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that it has, by their names in a file."""
        from torch import Tensor

        groups = dict(zip(GROUPS, (self.kept.rows, self.kept.sinks, self.shadow, self.evicted), strict=True))
        return {"tokens": self.tokens} | {
            f"{group}.{name}": each
            for group, owner in groups.items()
            if owner is not None
            for name, each in vars(owner).items()
            if isinstance(each, Tensor)
        }

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> SegmentRecord:
        """The same record with other tensors, by their names in a file: all that it has, and no others."""
        return replace(self, **_grouped(tensors))

    def after(self, position: int) -> SegmentRecord:
        """Return a record without the entries of tokens before a logical position; not to be stored."""
        return replace(
            self,
            start=position,
            kept=self.kept.after(position - self.start, position, self.end),
            shadow=None if self.shadow is None else self.shadow.within(position, self.end),
            evicted=None if self.evicted is None else self.evicted.within(position, self.end),
        )


def encode_segment(record: SegmentRecord, draft: str = "") -> bytes:
    """Return the bytes of a record.

    ``draft``: digest of the draft model whose rows it has, 64 hexadecimal digits; "": they are left out.
    """
    from safetensors.torch import save

    # Rows that do not name their draft model could be read by a server with another one.
    record = record if draft else replace(record, shadow=None)
    if record.shadow is not None:  # a shadow may have rows of tokens that its segment has dropped
        record = replace(record, shadow=record.shadow.within(record.start, record.end))
    named = draft if record.shadow is not None else ""
    header = SegmentHeader(record.key, record.identity, record.splittable, named)
    # Metadata of safetensors are strings only.
    metadata = {name: json.dumps(value) for name, value in msgspec.to_builtins(header).items()}
    # safetensors refuses strided tensors.
    payload = save({name: tensor.contiguous() for name, tensor in record.tensors.items()}, metadata)
    head = MAGIC + FORMAT_VERSION.to_bytes(8, "little") + len(payload).to_bytes(8, "little")
    # The head is hashed, too, so that no byte of the file can change unnoticed.
    return head + hashlib.sha256(head + payload).digest() + payload


def decode_segment(data: bytes, key: str, identity: StoreIdentity, draft: StoreIdentity | None = None) -> SegmentRecord:
    """Check bytes from an untrusted source, found under the name ``key``, and return their record.

    ``draft``: identity of the draft model, if there is one; rows of another one are left out.

    CorruptSegmentError: they are not what :func:`encode_segment` returned for this key, identity and draft model.
    """
    from safetensors.torch import load

    payload = _payload(data)
    header, _ = _header(payload)
    # A file under another name would be found with another prompt, maybe of another tenant.
    _require(header.key == key, f"key: got {shown(header.key)}; expected {shown(key)}")
    _require(header.identity == identity.digest, f"identity: got {shown(header.identity)}; expected {identity.digest}")
    try:
        tensors = load(payload)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CorruptSegmentError(f"the tensors cannot be read: {cut(str(error))}") from error
    # The segment is of use without them: what a draft model lacks costs accepted drafts, never correct tokens.
    if draft is None or header.draft != draft.digest:
        tensors = {name: each for name, each in tensors.items() if not name.startswith("shadow.")}
        draft = None
    # How many entries there are is the file's own claim here; `_check_values` compares it with the lengths of runs.
    layout = _layout(key, tensors, identity, draft)
    names, required = tensors.keys(), layout.keys() - {"rows.order"}
    _require(required <= names <= layout.keys(), f"tensors: got {shown(sorted(names))}; expected {sorted(required)}")
    for name, tensor in tensors.items():
        found, (dtype, shape) = (str(tensor.dtype), tuple(tensor.shape)), layout[name]
        _require(found == (dtype, shape), f"{name}: got {found[0]} of {found[1]}; expected {dtype} of {shape}")
    start, end = key_bounds(key)
    record = SegmentRecord(key, header.identity, start, end, header.splittable, **_grouped(tensors))
    # The checksum proves no origin: anyone who can write a file can compute it. Kernels trust lengths and positions,
    # so a made-up one could make a request read other rows.
    _check_values(record, start + identity.num_sinks(start, end))
    return record


def most_bytes(key: str, *models: StoreIdentity) -> int:
    """Bytes of the largest segment of a name: all entries, with 16 bits.

    ``models``: of whose rows it may have; numbers count as 4 bytes, the most that those of a KV pool have.
    """
    start, end = key_bounds(key)
    num_bytes = PREFIX_BYTES + 8 + MAX_HEADER_BYTES + 8 * end
    for model in models:
        # An upper bound is enough: it keeps a forged file from filling the memory, before it is read.
        row = 4 * (model.head_dim + model.own_value_dim) + 8  # with its position, and its order or what it was paid
        run = 8  # lengths of what it has, and of what was evicted
        num_bytes += model.num_layers * model.num_kv_heads * ((end - start) * row + run)
    return num_bytes


def read_header(data: bytes) -> dict[str, Any]:
    """Return fields and shapes of a segment, without its tensors; CorruptSegmentError: not a segment."""
    header, tensors = _header(_payload(data))
    start, end = key_bounds(header.key)
    shapes = {name: [each.get("dtype"), each.get("shape")] for name, each in tensors.items()}
    return {**msgspec.to_builtins(header), "start": start, "end": end, "tensors": shapes}


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


def _header(payload: bytes) -> tuple[SegmentHeader, dict[str, dict[str, Any]]]:
    """Fields of a segment, and dtypes and shapes of its tensors."""
    length = int.from_bytes(payload[:8], "little")
    # The length is read from the file, and may be anything.
    limit = min(MAX_HEADER_BYTES, len(payload) - 8)
    _require(2 <= length <= limit, f"header: got {length} bytes; allowed: 2 to {limit}")
    try:
        # Nested deeply enough, JSON ends in a RecursionError.
        tensors = msgspec.json.decode(payload[8 : 8 + length], type=dict[str, dict[str, Any]])
        values = {name: json.loads(value) for name, value in tensors.pop("__metadata__", {}).items()}
        return msgspec.convert(values, SegmentHeader), tensors
    except (ValueError, TypeError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise CorruptSegmentError(f"the header cannot be read: {cut(str(error))}") from error


def _grouped(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields of a record that are, or have, tensors; from all their tensors by their names in a file."""
    from sgl_kvevict.copies import CopiedEntries, CopiedRows, CopiedShadow, CopiedSinks

    found: list[Any] = []
    for name, kind in zip(GROUPS, (CopiedRows, CopiedSinks, CopiedShadow, CopiedRows), strict=True):
        prefix = f"{name}."
        group = {each.removeprefix(prefix): tensors[each] for each in tensors if each.startswith(prefix)}
        found.append(kind(**group) if group else None)
    rows, sinks, shadow, evicted = found
    return {"tokens": tensors["tokens"], "kept": CopiedEntries(rows, sinks), "shadow": shadow, "evicted": evicted}


def _layout(
    key: str, tensors: Mapping[str, Tensor], identity: StoreIdentity, draft: StoreIdentity | None
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of all tensors that a file may have, with as many entries as it has."""

    def count(name: str) -> int:
        return tensors[name].numel() if name in tensors else 0

    def rows(prefix: str, model: StoreIdentity, *sizes: int, bits: int = 16) -> None:
        dtype = model.dtype if bits == 16 else "torch.uint8"
        layout.update({f"{prefix}{name}": (dtype, (*sizes, width)) for name, width in model.widths(bits)})

    def entries(prefix: str) -> None:
        n = count(f"{prefix}positions")
        layout.update({f"{prefix}keep_lens": ("torch.int32", runs), f"{prefix}positions": ("torch.int32", (n,))})
        # Keys of the order are numbered as the entries are, so one of another length would belong to other entries.
        layout[f"{prefix}order"] = "torch.int16", (n,)
        is_coded = identity.statistics and str(getattr(tensors.get(f"{prefix}k"), "dtype", "")) == "torch.uint8"
        rows(prefix, identity, n, bits=4 if is_coded else 16)

    runs, (start, end) = (identity.num_layers, identity.num_kv_heads), key_bounds(key)
    layout: dict[str, tuple[str, tuple[int, ...]]] = {"tokens": ("torch.int64", (end,))}
    entries("rows.")
    if num_sinks := identity.num_sinks(start, end):
        rows("sinks.", identity, identity.num_layers, num_sinks, identity.num_kv_heads)
    if any(name.startswith("evicted.") for name in tensors):
        entries("evicted.")
    if draft is not None:
        n, runs = count("shadow.positions"), (draft.num_layers, draft.num_kv_heads)
        layout |= {"shadow.lens": ("torch.int32", runs), "shadow.positions": ("torch.int32", (n,))}
        rows("shadow.", draft, n)
        layout["shadow.paid"] = "torch.float32", (n,)
    return layout


def _check_values(record: SegmentRecord, sink_end: int) -> None:
    """Check bounds, runs, that no entry is there twice, and what rows of the draft model were paid.

    ``sink_end``: logical position after the last sink.
    """
    _require(record.start < record.end, f"start and end: got {record.start} and {record.end}; expected start < end")
    _require(record.kept.num_entries > 0, "keep_lens: sums to 0; expected more")
    groups = {"rows": record.kept.rows} | ({} if record.evicted is None else {"evicted": record.evicted})
    for name, group in groups.items():
        _check_runs(f"{name}.keep_lens", group.keep_lens, f"{name}.positions", group.positions, sink_end, record.end)
    _check_distinct(*groups.values())
    if (shadow := record.shadow) is not None:
        bounds = record.start, record.end
        _check_runs("shadow.lens", shadow.lens, "shadow.positions", shadow.positions, *bounds)
        is_paid = bool((shadow.paid.isfinite() & (shadow.paid >= 0)).all())
        _require(is_paid, "shadow.paid: expected finite numbers >= 0")


def _check_runs(of_lens: str, lens: Tensor, of_positions: str, positions: Tensor, start: int, end: int) -> None:
    """Check lengths of runs, and their positions: tokens of ``[start, end)``, ascending within a run."""
    import torch

    num_entries = positions.numel()
    lens = lens.flatten().long()
    in_range = lens.numel() > 0 and int(lens.min()) >= 0 and int(lens.max()) <= end - start
    _require(in_range, f"{of_lens}: expected lengths from 0 to {end - start}")
    total = int(lens.sum())
    _require(total == num_entries, f"{of_lens}: sums to {total}; expected {num_entries}")
    inside = bool(((positions >= start) & (positions < end)).all())
    _require(inside, f"{of_positions}: expected all in [{start}, {end})")
    run = torch.repeat_interleave(lens)
    # Positions begin anew where a run begins. Within one, kernels search them by halving.
    ascending = bool(((positions.diff() > 0) | (run.diff() > 0)).all())
    _require(ascending, f"{of_positions}: expected ascending ones within a run")


def _check_distinct(*groups: CopiedRows) -> None:
    """Check that no entry is in two groups: attention would read it twice."""
    import torch

    # Run and position in one int64: one sort finds every pair of equal entries.
    coded = [torch.repeat_interleave(each.keep_lens.flatten().long()) << 32 | each.positions for each in groups]
    entries = torch.cat(coded).sort().values
    twice = entries[1:][entries.diff() == 0]
    if twice.numel():
        run, position = divmod(int(twice[0]), 1 << 32)
        got = f"got position {position} in run {run} of each; expected no entry twice"
        raise CorruptSegmentError(f"rows.positions and evicted.positions: {got}")
