"""What the life cycle knows of the prefix tree: nodes that know their parent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

Reader: TypeAlias = Any
"""A request, or a scoring pass, that attends to a prefix: the object itself, never a name that a client chose."""


class Key(Protocol):
    """Tokens of a node, and their namespace."""

    @property
    def extra_key(self) -> str | None:
        """Namespace that a request named: LoRA, tenant."""

    @property
    def cache_salt(self) -> str | None:
        """Further part of the namespace."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens."""

    def __len__(self) -> int:
        """Number of tokens (logical length)."""


class Node(Protocol):
    """Consecutive tokens of prompts that begin alike. The tree's root has no parent and no tokens.

    Nodes are compared by identity. When one is cut, the object that it was keeps the lower part.
    """

    @property
    def id(self) -> int:
        """Number, for logs and events."""

    @property
    def parent(self) -> Node | None:
        """Node of the tokens before; None for the root."""

    @property
    def children(self) -> Mapping[Any, Node]:
        """Nodes of what comes after."""

    @property
    def key(self) -> Key:
        """The node's tokens."""

    @property
    def last_access_time(self) -> float:
        """Number of its last access."""


def path_to(node: Node) -> list[Node]:
    """Nodes from below the root to ``node``."""
    path = []
    while (parent := node.parent) is not None:
        path.append(node)
        node = parent
    path.reverse()
    return path


def length_of(path: Sequence[Node]) -> int:
    """Tokens of a path, or of a part of one."""
    return sum(len(node.key) for node in path)


def tokens_of(path: Sequence[Node]) -> list[int]:
    """Token ids of a path, or of a part of one."""
    return [token for node in path for token in node.key.token_ids]


class NodeSet(set[Node]):
    """Nodes that may shrink or be dropped, and which of them are new since the last question.

    Args:
        nodes: those that there are.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        super().__init__(nodes)
        self._new: dict[Any, None] = dict.fromkeys(self)

    def add(self, node: Node) -> None:
        """A node may shrink or be dropped."""
        if node not in self:
            super().add(node)
            self._new[node] = None

    def discard(self, node: object) -> None:
        """A node may not, or is gone: no reference is kept."""
        super().discard(node)
        self._new.pop(node, None)

    def remove(self, node: Node) -> None:
        """The same for one that is there."""
        super().remove(node)
        self._new.pop(node, None)

    def take_new(self) -> list[Node]:
        """Nodes that came since the last call, in the order in which they did; some may have left again."""
        new, self._new = list(self._new), {}
        return new
