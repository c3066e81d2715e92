"""The part of SGLang's scheduler that scoring passes go through, around the harness."""

from __future__ import annotations

from types import SimpleNamespace

from sglang.srt.managers.schedule_batch import Req

from helpers.harness import Harness
from sgl_kvevict.cache.readers import Released
from sgl_kvevict.sglang_adapter.passes import SchedulerPasses


class Letters:
    """A tokenizer of one token a character, without a chat template."""

    chat_template = None
    FULL_STOP = 3

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) % 50 + 12 for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join("." if token == self.FULL_STOP else "a" for token in tokens)


TURN_S = 0.0625
"""Seconds of a turn of the loop: exact in binary, so that tests can count turns."""


class CountedTurns(SchedulerPasses):
    """Its clock goes by turns."""

    @property
    def now(self) -> float:
        now: float = self._scheduler.now
        return now


class MiniScheduler:
    """Lets the tree start passes, and runs them."""

    port = CountedTurns

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.now, self.turn_s = 0.0, TURN_S
        self.waiting_queue: list[object] = []
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.tokenizer = Letters()
        self.model_config = SimpleNamespace(hf_eos_token_id={0}, vocab_size=64)
        self.max_req_input_len = 500
        self.tree_cache = harness.tree
        self.passes: list[Req] = []
        self.processed_tokens_counter = 0
        self.running_batch = SimpleNamespace(reqs=[])
        self.last_batch = self.chunked_req = None
        self._engine_paused = False
        self.max_queued_requests: int | None = None
        self.flush_wrapper = SimpleNamespace(_pending=None)

    def _set_or_validate_priority(self, req: Req) -> bool:
        assert req.priority is None
        return True

    def init_req_max_new_tokens(self, req: Req) -> None:
        assert req.sampling_params.max_new_tokens == 0

    def turn(self) -> None:
        """One turn of the loop, in which nothing is run."""
        self.now += self.turn_s
        self.harness.tree.prefixes.between_steps(self.port(self))

    def run_pass(self, chunk: int | None = None) -> bool:
        """Admit and run the waiting pass, as far as slots last; False if there is none."""
        self.turn()
        mine = [req for req in self.waiting_queue if isinstance(req, Req)]
        if not mine or not self.harness.admit(mine[0]):
            return False
        (req,) = mine
        self.passes.append(req)
        self.waiting_queue.remove(req)
        total = len(req.full_untruncated_fill_ids)
        while req in self.harness.live:
            if not self.harness.prefill(req, total if chunk is None else req.prefix_len + chunk):
                self.harness.tree.prefixes.released(req, Released.ABORTED)
        self.harness.check()
        return True

    def run_all(self, chunk: int | None = None) -> int:
        """Run passes until none is left; return how many there were."""
        before = len(self.passes)
        while self.run_pass(chunk):
            pass
        return len(self.passes) - before
