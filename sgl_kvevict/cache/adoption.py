"""Puts segments from outside the pool into the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from sgl_kvevict.cache.nodes import NamespaceKey, Node, length_of, path_to
from sgl_kvevict.cache.ports import TreePort
from sgl_kvevict.cache.readers import ReaderTable
from sgl_kvevict.cache.records import PrefixTable
from sgl_kvevict.cache.resize import Resizer
from sgl_kvevict.copies import CopiedRows
from sgl_kvevict.errors import StoreError
from sgl_kvevict.guard import accounting
from sgl_kvevict.policies.parts import PolicyState
from sgl_kvevict.segments import CopiedEntries, CopiedShadow, Segment, SegmentPacker
from sgl_kvevict.store import SegmentRecord, StoreIdentity, Wanted


@dataclass(frozen=True)
class Prompt:
    """A prompt to look up in a cache: only the first ``num_tokens`` of ``tokens`` may be found."""

    tokens: Sequence[int]
    num_tokens: int
    namespace: NamespaceKey


class Adoption:
    """Puts stored segments into the tree, as if they had been compressed here."""

    def __init__(
        self, tree: TreePort, table: PrefixTable, readers: ReaderTable, packer: SegmentPacker, resizer: Resizer
    ) -> None:
        self._tree = tree
        self._table = table
        self._spans = table.spans
        self._readers = readers
        self._packer = packer
        self._resizer = resizer

    def place(self, record: SegmentRecord, prompt: Prompt) -> int:
        """Put a segment, and its tail if the prompt goes on like that, into the tree; return as :meth:`adopt`."""
        rest = prompt.tokens[record.end :]
        num_tokens = self.adopt(record, prompt.namespace, rest)
        if num_tokens and record.tail_tokens is not None and _goes_on(prompt, record):
            self.adopt_tail(record, prompt.namespace, rest)
        return num_tokens

    def wanted(self, prompt: Prompt, identity: StoreIdentity) -> Wanted:
        """What the tree lacks of a prompt; a node is cut where the prompt leaves the tree."""
        path = self._tree.find(prompt.tokens[: prompt.num_tokens + self._tree.lookahead], prompt.namespace)
        tokens = list(prompt.tokens[: prompt.num_tokens])
        return Wanted(tokens, identity.namespace(*prompt.namespace), self._spans.compressed_len(path), length_of(path))

    def adopt(self, record: SegmentRecord, namespace: NamespaceKey, rest: Sequence[int] = ()) -> int:
        """Give a stored segment of this server's identity slots and nodes, in the namespace in which it was found.

        ``rest`` is what follows in the prompt that looked for it.

        Returns how many of its last tokens were added; its beginning may be compressed in the tree already. 0: nothing
        was added, though other prefixes may have shrunk for it: there were no slots, the tree has all of it, the tokens
        before it are not compressed, or a reader of the tokens that it would replace is not movable.

        Raises:
            StoreError: the record's entries do not fit this server's pool.
        """
        geometry = self._packer.geometry
        if tuple(record.keep_lens.shape) != (geometry.num_layers, geometry.num_kv_heads):
            raise StoreError(f"a segment of {tuple(record.keep_lens.shape)} runs")
        if geometry.slots_for(record.num_entries) > record.end - record.start:
            raise StoreError(f"a segment of {record.num_entries} entries for {record.end - record.start} tokens")
        tokens = self._key(record.tokens.tolist(), rest)
        there = self._tree.find(tokens, namespace)
        compressed_len = self._spans.compressed_len(there)
        if record.splittable and record.start < compressed_len < record.end:
            record = record.after(compressed_len)
        fewest = -self._tree.largest(-record.num_entries)  # among all ranks
        if fewest == 0 or not self._fits(record, there):
            return 0  # before other prefixes shrink for it
        slots = self._tree.alloc(self._tree.largest(geometry.slots_for(record.num_entries), record.start, record.end))
        if slots is None:
            return 0
        if self._install(record, tokens, slots, namespace):
            return record.end - record.start
        self._tree.free(slots)
        return 0

    def adopt_tail(self, record: SegmentRecord, namespace: NamespaceKey, rest: Sequence[int] = ()) -> bool:
        """Give a loaded segment's tail slots and a node.

        False: it has no tail, there is no place, or a draft model has to compute its rows of the tail.
        """
        drafts = self._packer.drafts
        if record.tail_tokens is None or (drafts is not None and record.draft_tail_k is None):
            return False
        assert record.tail_k is not None and record.tail_v is not None
        slots = self._tree.alloc(record.tail_tokens.numel())
        if slots is None:
            return False
        path: list[int] = record.tokens.tolist()
        tokens = self._key(path + record.tail_tokens.tolist(), rest[slots.numel() :])
        with accounting():
            there = self._tree.find(tokens, namespace)
            is_free = length_of(there) == len(path) == self._spans.compressed_len(there)
            if not is_free or self._tree.add(tokens, namespace, slots) is None:
                self._tree.free(slots)
                return False
            self._packer.place_tokens(slots, record.tail_k, record.tail_v)
            if drafts is not None:
                assert record.draft_tail_k is not None and record.draft_tail_v is not None
                drafts.place_tokens(slots, record.draft_tail_k, record.draft_tail_v)
        return True

    @accounting()
    def _install(self, record: SegmentRecord, tokens: Sequence[int], slots: Tensor, namespace: NamespaceKey) -> bool:
        there = self._tree.find(tokens, namespace)
        if not self._fits(record, there):
            return False
        ordinary = self._spans.uncompressed(there)
        self._table.chain(there)  # segments in place end with the path
        if not record.splittable and not self._is_whole(ordinary):
            return False
        readers = self._readers.movable(ordinary[0]) if ordinary else []
        if readers is None:
            return False
        last = self._tree.add(tokens, namespace)
        if last is None:
            return False
        freed = self._tree.token_slots(ordinary) if ordinary else slots[:0]
        nodes = self._spans.uncompressed(path_to(last))
        self._resizer.exchange(nodes, self._segment(record, slots), readers)
        self._tree.free(freed)
        return True

    def _key(self, path: list[int], rest: Sequence[int]) -> list[int]:
        """Tokens that are looked up to find a path; if nothing follows it in the prompt, any token may."""
        return [*path, *rest[:1], path[-1]][: len(path) + self._tree.lookahead]

    def _is_whole(self, nodes: Sequence[Node]) -> bool:
        """Whether no request reads the last nodes of a path, and no prompt branches off from them.

        Otherwise a request would read only the beginning of an unsplittable segment.
        """
        return all(
            self._tree.num_locks(node) == 0 and all(child is below for child in node.children.values())
            for node, below in zip_longest(nodes, nodes[1:])
        )

    def _fits(self, record: SegmentRecord, there: Sequence[Node]) -> bool:
        """Whether a segment begins where the path's compressed tokens end and ends beyond the path."""
        return length_of(there) < record.end and self._spans.compressed_len(there) == record.start

    def _segment(self, record: SegmentRecord, slots: Tensor) -> Segment:
        part = CopiedRows(16, record.keep_lens, record.positions, record.k, record.v)
        copied = CopiedEntries((part,), record.order)
        segment = self._packer.new_segment(
            slots, copied, record.start, record.end, is_measured=record.is_read, shadow=_shadow_of(record)
        )
        segment.splittable = record.splittable
        if record.policy_state is not None:
            segment.policy_state = PolicyState(record.policy_state.to(slots.device))
        return segment


def _shadow_of(record: SegmentRecord) -> CopiedShadow | None:
    """The draft model's rows of a record; None: it has none."""
    if record.draft_lens is None:
        return None
    assert record.draft_positions is not None and record.draft_paid is not None
    assert record.draft_k is not None and record.draft_v is not None
    return CopiedShadow(record.draft_lens, record.draft_positions, record.draft_k, record.draft_v, record.draft_paid)


def _goes_on(prompt: Prompt, record: SegmentRecord) -> bool:
    """Whether a prompt continues a segment's path with the first token of its tail."""
    assert record.tail_tokens is not None
    if prompt.num_tokens <= record.end:
        return False
    return list(prompt.tokens[: record.end + 1]) == [*record.tokens.tolist(), int(record.tail_tokens[0])]
