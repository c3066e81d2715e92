"""Sessions: branches of the tree that a session's newer prompts have left are dropped before anything else."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

from sgl_kvevict.cache.nodes import NamespaceKey, Node, length_of, path_to
from sgl_kvevict.cache.records import OTHERS, PrefixTable, Session

MAX_SESSIONS = 16_384
"""Sessions remembered; beyond them the one whose last prompt is the oldest is forgotten: it supersedes nothing more."""

SessionKey = bytes


def session_key(namespace: NamespaceKey, session_id: str) -> SessionKey:
    """A digest of a session's namespace and of the id that its client sends.

    In another namespace the same id is another session. Both texts may be as long as a client likes, and are not kept.
    """
    return hashlib.sha256(repr((*namespace, session_id)).encode()).digest()


class Sessions:
    """Follows the prompts of each session, and marks what its newer ones have left: it is *superseded*.

    A session's prompts begin alike, until the client shortens its history or begins a new one. What the older prompt
    had after that is not asked again, unless somebody else asks for it: only nodes that no other session's request, and
    none without a session, has ever read are superseded. While token slots are ample nothing happens to them. When they
    are short they are dropped first, and not copied to the host's memory.

    A session that comes back to what it had left (several agents under one id) supersedes nothing from then on.

    Attributes:
        on_superseded: called with each node that becomes superseded.
    """

    def __init__(self, table: PrefixTable) -> None:
        self.on_superseded: Callable[[Node], None] = lambda node: None
        self._table = table
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()

    def clear(self) -> None:
        """Forget all sessions: the tree was flushed."""
        self._sessions.clear()

    def reached(self, key: SessionKey | None, node: Node) -> None:
        """A prompt, or one with its answer, is in the tree up to ``node``; ``key`` None: it is of no session."""
        path = path_to(node)
        session = OTHERS if key is None else self._session(key)
        is_back = [self._table.visit(each, session) for each in path]
        if session is OTHERS or not path:
            return
        session.has_returned = session.has_returned or any(is_back) or _continues(path, session.left)
        last = self._table.set_end(session, node)
        if last is None:
            return
        known = set(path)
        older = path_to(last)
        left = [each for each in older if each not in known and self._table.session_of(each) is session]
        if not left or session.has_returned:
            return
        first = left[0]
        session.left = length_of(older[: older.index(first)]), first.key.token_ids[0]
        for each in reversed(left):
            self._table.superseded.add(each)
            self.on_superseded(each)

    def own(self, key: SessionKey | None, path: Sequence[Node]) -> list[Node]:
        """Nodes of a path, and below these, that only requests of one session have read; root side first."""
        session = None if key is None else self._sessions.get(key)
        if session is None:
            return []
        own = [node for node in path if self._table.session_of(node) is session][:1]
        for node in own:
            own += [child for child in node.children.values() if self._table.session_of(child) is session]
        return own

    def _session(self, key: SessionKey) -> Session:
        session = self._sessions.setdefault(key, Session())
        self._sessions.move_to_end(key)
        if len(self._sessions) > MAX_SESSIONS:
            _, oldest = self._sessions.popitem(last=False)
            self._table.set_end(oldest, None)
        return session


def _continues(path: Sequence[Node], left: tuple[int, int] | None) -> bool:
    """Whether a path has the token with which a branch began that was left, at its position."""
    if left is None:
        return False
    start, (position, token) = 0, left
    for node in path:
        if start <= position < start + len(node.key):
            return bool(node.key.token_ids[position - start] == token)
        start += len(node.key)
    return False
