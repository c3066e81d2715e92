"""The part of SGLang's scheduler that this package calls, around the harness."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.schedule_batch import Req

from helpers.harness import Harness


class Letters:
    """A tokenizer of one token a character, without a chat template."""

    chat_template = None
    FULL_STOP = 3

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) % 50 + 12 for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join("." if token == self.FULL_STOP else "a" for token in tokens)


class MiniScheduler:
    """Takes turns."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.waiting_queue: list[Req] = []
        self.tokenizer = Letters()
        self.model_config = SimpleNamespace(hf_eos_token_id={0}, vocab_size=64)
        self.max_req_input_len = 500
        self.tree_cache = harness.tree
        self.processed_tokens_counter = 0
        self.running_batch = SimpleNamespace(reqs=[])
        self.last_batch: Any = None
        self.chunked_req: Req | None = None

    def _set_or_validate_priority(self, req: Req) -> bool:
        assert req.priority is None
        return True

    def init_req_max_new_tokens(self, req: Req) -> None:
        assert req.sampling_params.max_new_tokens == 0

    def turn(self) -> None:
        """One turn of the loop, in which nothing is run."""
        self.harness.tree.prefixes.between_steps()
