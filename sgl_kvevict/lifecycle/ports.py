"""What the life cycle calls: the tree that holds the nodes, and the scheduler that runs passes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from sgl_kvevict.lifecycle.nodes import Node, Reader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TreePort(Protocol):
    """The tree: nodes, locks, slots and rows."""

    def num_locks(self, node: Node) -> int:
        """How many locks a node holds; a lock on a node is one on all nodes above it."""

    def locked_by(self, reader: Reader) -> Node | None:
        """Last node of the path that a reader locks; None if it locks none."""

    def cut(self, path: Sequence[Node], end: int) -> Node:
        """Split the node of a path in which the logical position ``end`` lies, and return the upper part."""

    def token_slots(self, nodes: Sequence[Node]) -> Tensor:
        """[num_tokens], int64, ordinary slots of consecutive uncompressed nodes, in token order."""

    def hold_span(self, node: Node) -> None:
        """From now on a node has no ordinary slots: it holds a span."""

    def charge(self, node: Node, num_slots: int) -> None:
        """Add ``num_slots`` (may be negative) to what the accounting says a node carries."""

    def free(self, token_slots: Tensor) -> None:
        """Give token slots ([n], int64) back to the pool."""

    def alloc(self, num_slots: int) -> Tensor | None:
        """[num_slots], int64, token slots of the pool; others shrink or are dropped for them. None: too few."""

    def find(self, tokens: Sequence[int], extra_key: str | None, cache_salt: str | None) -> list[Node]:
        """Nodes of the longest path that begins as some tokens do; a node in which they part is cut there."""

    def add(
        self, tokens: Sequence[int], extra_key: str | None, cache_salt: str | None, slots: Tensor | None = None
    ) -> Node | None:
        """Add what is missing of a path.

        Args:
            tokens: of the whole path.
            extra_key: namespace.
            cache_salt: likewise.
            slots: [num_new], int64, ordinary slots of its last tokens, which are not there; None: what is new holds a
                filler, and is to be given spans.

        Returns:
            The path's last node; None, and nothing added: it may not be cached.
        """

    def num_known(self, reader: Reader) -> int:
        """Tokens of a request that generates, prompt included; 0 for one whose own tokens are not to be cached."""

    def keep(self, reader: Reader, end: int) -> Node | None:
        """Put the tokens ``[0, end)`` of a request that generates into the tree, and lock them for it.

        Returns:
            Last node of their path, which may end before ``end``; None: they may not be cached.
        """

    def row(self, reader: Reader, start: int, end: int) -> Tensor:
        """[end - start], int64, ordinary slots of the tokens ``[start, end)`` of a reader, its own included."""

    def clear_row(self, reader: Reader, end: int) -> None:
        """A reader finds the tokens ``[0, end)`` in spans from its next forward on."""

    def largest(self, value: int, *same: int) -> int:
        """See :class:`sgl_kvevict.prefix.packer.LargestOfRanks`."""

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Numbers of every tensor-parallel rank, as many on each, by rank."""


class PassState(Enum):
    """Where a pass is."""

    WAITING = auto()
    """In the queue."""
    RUNNING = auto()
    """It holds slots."""
    GONE = auto()
    """It was aborted while it waited; the scheduler does not report that."""


class PassPort(Protocol):
    """The scheduler, between two steps."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's; None on a server without one."""

    @property
    def room(self) -> int:
        """Tokens that a pass must stay below, prefix included."""

    @property
    def num_users(self) -> int:
        """Requests of users that wait to be admitted, or run; the same on every rank."""

    @property
    def was_prefill(self) -> bool:
        """The last step was a prefill that requests waited for which are decoding."""

    @property
    def quiet_turns(self) -> int:
        """Turns of the scheduler without a user, some tenth of a second, before the server counts as idle."""

    @property
    def is_paused(self) -> bool:
        """Nothing new may be started: the engine is paused, or a flush waits for an idle server."""

    def start(self, node: Node, probe: Sequence[int]) -> Reader:
        """Queue a pass: the path to a node, then a probe; answered to no one, inserted nowhere."""

    def state(self, reader: Reader) -> PassState:
        """Where a pass is that has not ended."""

    def withdraw(self, reader: Reader) -> None:
        """Take a pass that waits out of the queue."""
