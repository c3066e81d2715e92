"""The other end of SGLang's stream of KV events."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored


class Mirror:
    """What a cache-aware router knows: every cached block by its hash, with the tokens that lead to it."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}

    def apply(self, events: list[Any]) -> None:
        """Take events over, and check that each fits to those before it."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.blocks[block]
            else:
                assert isinstance(event, BlockStored) and event.block_size == 1
                before = () if event.parent_block_hash is None else self.blocks[event.parent_block_hash]
                for block, token in zip(event.block_hashes, event.token_ids, strict=True):
                    before = (*before, token)
                    assert self.blocks.setdefault(block, before) == before
