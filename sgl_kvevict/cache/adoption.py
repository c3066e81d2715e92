"""Puts segments from outside the pool into the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from sgl_kvevict.cache.core import Core
from sgl_kvevict.cache.nodes import NamespaceKey, Node, length_of, path_to
from sgl_kvevict.cache.resize import Resizer
from sgl_kvevict.guard import Place, accounting
from sgl_kvevict.segments.segment import Segment
from sgl_kvevict.store.identity import StoreIdentity
from sgl_kvevict.store.segment_file import SegmentRecord
from sgl_kvevict.store.tier import Lookup


@dataclass(frozen=True)
class Prompt:
    """A prompt to look up in a cache: only the first ``num_tokens`` of ``tokens`` may be found."""

    tokens: Sequence[int]
    num_tokens: int
    namespace: NamespaceKey


class Adoption:
    """Puts segments of a tier into the tree, as if they had been compressed here."""

    def __init__(self, core: Core, resizer: Resizer) -> None:
        self._tree, self._spans, self._readers, self._guard = core.tree, core.table.spans, core.readers, core.guard
        self._packer, self._complements, self._resizer = core.compressor.packer, core.complements, resizer

    def lookup(self, prompt: Prompt, identity: StoreIdentity) -> Lookup:
        """What the tree has of a prompt, and lacks; a node is cut where the prompt leaves the tree."""
        path = self._tree.find(prompt.tokens[: prompt.num_tokens + self._tree.lookahead], prompt.namespace)
        tokens = list(prompt.tokens[: prompt.num_tokens])
        return Lookup(tokens, identity.namespace(*prompt.namespace), self._spans.compressed_len(path), length_of(path))

    def adopt(self, record: SegmentRecord, namespace: NamespaceKey, rest: Sequence[int] = ()) -> int:
        """Put a segment into token slots and the tree.

        Args:
            record: a segment that was stored by a server of the same identity.
            namespace: where it was found.
            rest: tokens that follow it in the prompt that looked for it.

        Returns:
            How many of its last tokens were added; its beginning may be compressed in the tree already. 0: nothing was
            added, because there were no slots, the tree has all of it, the tokens before it are not compressed, or a
            reader of the tokens that it would replace is not movable. Other prefixes may have shrunk for it even so.
        """
        path = record.tokens.tolist()
        # If nothing follows it in the prompt, any token may stand there.
        tokens = [*path, *rest[:1], path[-1]][: len(path) + self._tree.lookahead]
        there = self._tree.find(tokens, namespace)
        compressed_len = self._spans.compressed_len(there)
        if record.splittable and record.start < compressed_len < record.end:
            # Entries that the tree has already would be read twice.
            record = record.after(compressed_len)
        fewest = -self._tree.largest(-record.kept.num_entries)  # among all ranks
        # The smallest of all ranks: what one rank cannot place none may, or their trees would differ.
        if fewest == 0 or not self._fits(record, there):
            return 0  # before other prefixes shrink for it
        num_slots = self._packer.slots_of(record.kept)
        # Making room may drop leaves, among them the ones that the segment is to continue.
        with self._tree.holding([node for node in there if node in self._spans]):
            slots = self._tree.alloc(self._tree.largest(num_slots, record.start, record.end))
        if slots is None:
            return 0
        segment = None
        # Before anything changes: the device may lack the memory for it, maybe on one rank of several.
        with self._guard.at(Place.HOST):
            segment = self._packer.new_segment(slots, record.kept, record.start, record.end, shadow=record.shadow)
            segment.splittable = record.splittable
        if segment is None or not self._install(segment, tokens, namespace):
            self._tree.free(slots)
            return 0
        # After the segment is in the tree: what a file has needs room in the host's memory, and is lost without harm.
        segment.evicted = [*record.parts, *self._complements.put_stored(record)]
        return record.end - record.start

    @accounting()
    def _install(self, segment: Segment, tokens: Sequence[int], namespace: NamespaceKey) -> bool:
        """Put a written segment into the tree; False: the tree has no place for it any more."""
        # Looked up again: making room has changed the tree.
        there = self._tree.find(tokens, namespace)
        if not self._fits(segment, there):
            return False
        ordinary = self._spans.uncompressed(there)
        if not segment.splittable and not self._is_whole(ordinary):
            return False
        readers = self._readers.movable(ordinary[0]) if ordinary else []
        if readers is None:
            return False
        last = self._tree.add(tokens, namespace)
        if last is None:
            return False
        # Taken before the nodes hold a span, which replaces these numbers by fillers.
        freed = self._tree.token_slots(ordinary) if ordinary else segment.packed.token_slots[:0]
        self._resizer.exchange(self._spans.uncompressed(path_to(last)), segment, readers)
        # Last, when no reader's row and no node names these slots any more.
        self._tree.free(freed)
        return True

    def _is_whole(self, nodes: Sequence[Node]) -> bool:
        """Whether no request reads the last nodes of a path, and no prompt branches off from them.

        Otherwise a request would read only the beginning of an unsplittable segment.
        """
        return all(
            self._tree.num_locks(node) == 0 and all(child is below for child in node.children.values())
            for node, below in zip_longest(nodes, nodes[1:])
        )

    def _fits(self, record: SegmentRecord | Segment, there: Sequence[Node]) -> bool:
        """Whether a segment begins where the path's compressed tokens end and ends beyond the path."""
        return length_of(there) < record.end and self._spans.compressed_len(there) == record.start
