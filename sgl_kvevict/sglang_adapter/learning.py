"""Learns scores before a server is ready: the model reads texts and repeats them, in SGLang's own batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.utils import DynamicGradMode
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sgl_kvevict.cache.nodes import length_of, path_to, tokens_of
from sgl_kvevict.cache.probes import repetition_probes
from sgl_kvevict.distill import ScoredText
from sgl_kvevict.distill.texts import passages_of
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.policies.methods.distilled import WINDOW_SIZE
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.segments import ObservationSpec, PromptObservation, ReaderObservation, Segment
from sgl_kvevict.sglang_adapter.passes import SchedulerPasses
from sgl_kvevict.sglang_adapter.settings import published
from sgl_kvevict.sglang_adapter.tree import KVEvictTree

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from transformers import PreTrainedTokenizerBase

MAX_TEXT_TOKENS = 4096
"""A table has three tokens where prose has one, and passes over it take nine times as long."""
PASS_TOKENS = 512
"""Most tokens of a text that one pass repeats."""
MIN_TEXT_TOKENS = 128
"""Shorter texts teach little; a pool or context that takes no longer ones is refused."""
SPARE_TOKENS = 32
"""Token slots that SGLang keeps back when it admits a request."""
MAX_IDLE_TURNS = 1000
"""Turns without a batch after which a text counts as not admitted."""


class TextReader:
    """Has the model read texts, one at a time, in an otherwise empty cache.

    Attributes:
        tokenizer: the model's; loaded from its files on a server that has none (``--skip-tokenizer-init``).
        longest: most tokens of a text; it fits with a pass after it.

    Raises:
        UnsupportedSetupError: there is no tokenizer, or pool and context are too small.
    """

    def __init__(self, scheduler: Scheduler, tree: KVEvictTree) -> None:
        self._scheduler = scheduler
        self._tree = tree
        self._served = tree.prefixes.prefills
        self.tokenizer = scheduler.tokenizer or load_tokenizer()
        room = min(scheduler.max_req_input_len, scheduler.max_total_num_tokens) - SPARE_TOKENS
        lead = len(repetition_probes(self.tokenizer, [0]).next(1))
        self._pass_tokens = max(min(PASS_TOKENS, room // 4), 1)
        self.longest = min(room - lead - self._pass_tokens, MAX_TEXT_TOKENS)
        if self.longest < MIN_TEXT_TOKENS:
            raise UnsupportedSetupError(
                [
                    f"policy distilled learns scores from texts of {MIN_TEXT_TOKENS} tokens or more, and pool and "
                    f"context have room for {max(self.longest, 0)} beside a scoring pass; allowed: a larger "
                    "--max-total-tokens or --context-length, a file of learned scores (score_weights), or another "
                    "policy"
                ]
            )

    def tokens_of(self, text: str, *, as_chat: bool) -> list[int]:
        """Token ids of a text, as the user's turn of a chat if the model has a template; at most ``longest``."""
        tokenizer = self.tokenizer
        if as_chat and tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": text}]
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            return list(tokenizer.encode(text, add_special_tokens=False))[: self.longest]
        return list(tokenizer.encode(text))[: self.longest]

    def read(self, tokens: Sequence[int]) -> ScoredText:
        """Prefill a text, and repeat it in passes; its slots stay as they are until :meth:`forget`.

        Raises:
            UnsupportedSetupError: the text was not admitted, aborted, or dropped between two passes.
        """
        tree, prefixes, passes = self._tree, self._tree.prefixes, SchedulerPasses(self._scheduler)
        geometry = tree.packer.geometry
        spec = ObservationSpec(geometry, frozenset({Signal.WINDOW_QUERIES}), WINDOW_SIZE)
        text = prefixes.prefills = prefixes.sample_text(PromptObservation(spec))
        self._run(passes.prefill(tokens))
        if text.node is None or text.prompt.has_failed:
            raise _unreadable(len(tokens), "its prefill was not observed, or is not cached")
        path = path_to(text.node)
        segment = text.segment = Segment(geometry, 0, length_of(path))
        observation = text.readers = ReaderObservation(geometry, tree.packer.k_arena, segment.end)
        observation.observe(segment)
        probes = repetition_probes(self.tokenizer, tokens_of(path))
        while not probes.is_empty:
            reader = passes.start(text.node, probes.next(self._pass_tokens))
            prefixes.readers[reader].is_pass = True
            self._run(reader)
            probes.was_read()
        path = path_to(text.node)
        above = [tree.root_node, *path[:-1]]
        if any(all(node is not child for child in up.children.values()) for up, node in zip(above, path, strict=True)):
            raise _unreadable(len(tokens), "it was dropped between two passes")
        if observation.has_failed:
            raise _unreadable(len(tokens), "a pass failed")
        slots = tree.port.token_slots(path)[: -tree.compressor.config.tail_tokens]
        assert segment.attention is not None
        return tree.compressor.scored_text(slots, segment.attention, text.prompt)

    def forget(self) -> None:
        """Empty the cache; the server is as before the text."""
        self._scheduler.flush_cache(empty_cache=False)
        self._tree.prefixes.prefills = self._served

    def _run(self, req: Req) -> None:
        """Take turns of the scheduler until a request is released, and nothing is left in flight."""
        num_idle = 0
        while not req.finished():
            num_idle += not self._turn()
            if num_idle > MAX_IDLE_TURNS:
                raise _unreadable(len(req.origin_input_ids), "SGLang does not admit it")
        if isinstance(req.finished_reason, FINISH_ABORT):
            raise _unreadable(len(req.origin_input_ids), req.finished_reason.message)
        while self._turn():
            pass

    def _turn(self) -> bool:
        """One turn of :meth:`Scheduler.event_loop_normal` that receives nothing; False if no batch was run."""
        scheduler = self._scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        return bool(batch)


def before_ready(scheduler: Scheduler, *_args: object, **_kwargs: object) -> None:
    """Hook before a scheduler reports that it is ready: scores are known before the port opens."""
    tree = scheduler.tree_cache
    if not isinstance(tree, KVEvictTree) or tree.distilling is None or tree.distilling.learned.is_known:
        return
    if not tree.distilling.use_none():
        with scheduler.device_module.StreamContext(scheduler.schedule_stream), DynamicGradMode():
            learn(scheduler, tree)


def learn(scheduler: Scheduler, tree: KVEvictTree) -> None:
    """Learn scores from texts, and keep them in a file. All ranks take the same steps; the cache is empty afterwards.

    Raises:
        UnsupportedSetupError: no text can be read.
        ConfigError: the texts of ``score_texts`` cannot be read, or are too few.
    """
    distilling, begin = tree.distilling, time.perf_counter()
    assert distilling is not None
    reader = TextReader(scheduler, tree)
    passages = passages_of(tree.compressor.config.score_texts)
    *samples, trial = (reader.tokens_of(text, as_chat=i % 2 == 1) for i, text in enumerate(passages))
    distilling.log(logging.INFO, "learning scores of this model from %d texts, before the first request", len(samples))
    learner = distilling.new_learner()
    for number, tokens in enumerate(samples, 1):
        since = time.perf_counter()
        learner.add(reader.read(tokens))
        reader.forget()
        size = len(tokens), time.perf_counter() - since
        distilling.log(logging.INFO, "learning scores: text %d of %d, %d tokens, %.1f s", number, len(samples), *size)
    distilling.finish(learner, lambda: reader.read(trial))
    reader.forget()
    found = 100 * (distilling.learned.weights.recall or 0.0)
    seconds = time.perf_counter() - begin
    distilling.log(logging.INFO, "learned scores find %.0f %% of what passes keep; it took %.0f s", found, seconds)


def load_tokenizer() -> PreTrainedTokenizerBase:
    """The model's tokenizer from its files; :class:`UnsupportedSetupError` if there is none."""
    path = str(published("tokenizer_path") or published("model_path"))
    try:
        tokenizer: PreTrainedTokenizerBase = get_tokenizer(
            path,
            tokenizer_mode=published("tokenizer_mode"),
            trust_remote_code=published("trust_remote_code"),
            tokenizer_revision=published("revision"),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedSetupError(
            [
                f"policy distilled learns scores from texts, and no tokenizer can be loaded from {path} ({error}); "
                "allowed: a model with a tokenizer, a file of learned scores (score_weights), or another policy"
            ]
        ) from error
    return tokenizer


def _unreadable(num_tokens: int, why: str) -> UnsupportedSetupError:
    return UnsupportedSetupError(
        [
            f"policy distilled cannot learn scores: of a text of {num_tokens} tokens, {why}; allowed: a larger "
            "--max-total-tokens, a file of learned scores (score_weights), or another policy"
        ]
    )
