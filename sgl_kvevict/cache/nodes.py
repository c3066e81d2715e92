"""Protocols of the prefix tree's nodes, and functions on paths."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

Reader: TypeAlias = Any
"""A request that attends to a prefix: the object itself, because clients choose request ids."""


NamespaceKey: TypeAlias = tuple[str | None, str | None]
"""(extra_key, cache_salt): prompts of different namespaces share nothing."""


class Key(Protocol):
    """Tokens of a node, and their namespace.

    With drafts from hidden states (EAGLE) a key is pairs: a token and the next one, on which the draft's row depends.
    """

    @property
    def extra_key(self) -> str | None:
        """Namespace that a request named: LoRA, tenant."""

    @property
    def cache_salt(self) -> str | None:
        """Further part of the namespace."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens; of pairs, followed by the second token of the last one."""

    def __len__(self) -> int:
        """Number of tokens (logical length)."""


class Node(Protocol):
    """Consecutive tokens of prompts that begin alike. The tree's root has no parent and no tokens.

    Nodes are compared by identity. On a split, the existing object becomes the lower half.
    """

    @property
    def id(self) -> int:
        """Number, for logs and events."""

    @property
    def parent(self) -> Node | None:
        """Node of the tokens before; None for the root."""

    @property
    def children(self) -> Mapping[Any, Node]:
        """Nodes of the tokens after."""

    @property
    def key(self) -> Key:
        """The node's tokens."""

    @property
    def last_access_time(self) -> float:
        """Number of its last access."""


def namespace_of(node: Node) -> NamespaceKey:
    """Namespace of a node's tokens."""
    return node.key.extra_key, node.key.cache_salt


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


def tokens_of(path: Sequence[Node]) -> array[int]:
    """Token ids of a path, or of a part of one: those that have KV."""
    tokens = array("q")
    for node in path:
        # SGLang's are arrays, too, so this copies memory. The last token of a pair's list has no KV yet.
        tokens.extend(node.key.token_ids[: len(node.key)])
    return tokens


def key_of(path: Sequence[Node]) -> list[int]:
    """Token ids that are looked up to find a path: its tokens and, if keys are pairs, the one after them."""
    last = path[-1].key
    return [*tokens_of(path), *last.token_ids[len(last) :]]


class NodeSet(set[Node]):
    """A set of nodes that also tells which of them are new since the last :meth:`take_new`."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        super().__init__(nodes)
        # A dictionary keeps the order: ranks visit new leaves alike, which a set does not promise.
        self._new: dict[Any, None] = dict.fromkeys(self)

    def add(self, node: Node) -> None:
        """Add a node."""
        if node not in self:
            super().add(node)
            self._new[node] = None

    def discard(self, node: object) -> None:
        """Remove a node, and every reference to it."""
        if node in self:
            super().discard(node)
            self._new.pop(node, None)

    def take_new(self) -> list[Node]:
        """Nodes added since the last call, in order; some may have been removed again."""
        new, self._new = list(self._new), {}
        return new
