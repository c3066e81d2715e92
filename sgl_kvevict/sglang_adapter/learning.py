"""Learns about a model before its server is ready: it reads texts, and repeats them, in SGLang's own batches.

Statistics of keys and values need the prefill alone; scores need what repetitions of each text attend to.
"""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils import DynamicGradMode
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sgl_kvevict.cache.nodes import Node, key_of, length_of, path_to, tokens_of
from sgl_kvevict.cache.prefills import Prefills
from sgl_kvevict.cache.readers import ReaderRecord
from sgl_kvevict.distill.features import CachedRange
from sgl_kvevict.distill.learner import ScoredText, ScoreLearner
from sgl_kvevict.distill.row_sums import RowSums
from sgl_kvevict.distill.texts import passages_of, repetitions, request_to_repeat
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.policies.methods.distilled import WINDOW_SIZE
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.request import RequestOptions
from sgl_kvevict.segments.prompt_observation import ObservationSpec, PromptObservation, Recorder
from sgl_kvevict.segments.text_attention import TextAttention
from sgl_kvevict.sglang_adapter.scheduler_store import read_with
from sgl_kvevict.sglang_adapter.settings import published, tokenizer_path
from sgl_kvevict.sglang_adapter.tree import KVEvictTree

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from transformers import PreTrainedTokenizerBase

MAX_TEXT_TOKENS = 4096
"""A table has three tokens where prose has one, and repeating it takes nine times as long."""
REPEATED_TOKENS = 512
"""Most tokens of a text that one request repeats."""
MIN_TEXT_TOKENS = 128
"""Shorter texts teach little; a pool or context that takes no longer ones is refused."""
STATISTICS_TOKENS = 512
"""Most tokens of a text where statistics alone are learned: mean and deviation are there sooner than scores."""
SPARE_TOKENS = 32
"""Token slots that SGLang keeps back when it admits a request."""
MAX_IDLE_TURNS = 1000
"""Turns without a batch after which a text counts as not admitted."""
SUBJECTS = {
    False: ("scores of policy distilled", "another policy"),
    True: ("statistics for rows of 4 bits", "bits: 16"),
}
"""What is learned, by whether scores are known, and what does without it."""


_NUMBERS = itertools.count(1)


class TextPrefills(Prefills):
    """The prefill of one text, and of requests that repeat it; nothing is compressed.

    ``sums`` get the queries of the text; None: they are not needed.

    Attributes:
        prompt: observation of the text's prefill.
        node: last node of its path; None until it is prefilled.
        attention: what repetitions pay to the text; None before the first one.
    """

    def __init__(self, tree: KVEvictTree, sums: RowSums | None) -> None:
        super().__init__(tree.prefixes.core, tree.prefixes.resizer)
        spec = ObservationSpec(tree.packer.geometry, frozenset({Signal.WINDOW_QUERIES}), WINDOW_SIZE)
        self.prompt = PromptObservation(spec)
        self.node: Node | None = None
        self.attention: TextAttention | None = None
        self._sums = sums

    def matched(self, reader: Req, *, is_cached: bool = True) -> ReaderRecord:
        """Observe the text."""
        record = self.readers[reader]
        record.is_live = record.is_counted = True  # no client's prompt: totals do not count it
        record.observation = self.prompt if self.attention is None else None
        return record

    def observe(self, reader: Req, node: Node, start: int, end: int, prompt_len: int) -> Sequence[Recorder]:
        """What records a chunk of the text, or of a repetition that has come to its end."""
        attention = self.attention
        if attention is None:
            self.prompt.begin_chunk(start, end, is_last=end >= prompt_len)
            return [self.prompt] if self._sums is None else [self.prompt, self._sums]
        # A request repeats the text first, up to where its repetition begins: these tokens are found in the tree.
        if end <= attention.num_tokens:
            return []
        attention.begin_chunk(start, self._tree.slots_of(reader, 0, attention.num_tokens))
        return [attention]

    def chunk_complete(self, reader: Req, node: Node) -> None:
        """Nothing shrinks."""

    def complete(self, reader: Req, node: Node, options: RequestOptions, num_samples: int = 0) -> None:
        """Note where the text is."""
        self.readers[reader].observation = None
        self.node = node

    def answered(self, node: Node, start: int, end: int, options: RequestOptions, *, is_complete: bool) -> None:
        """Texts have no answers."""


class TextReader:
    """Has the model read texts, one at a time, in an otherwise empty cache.

    ``subject`` is what is learned, and ``instead`` what does without it, for messages.

    Attributes:
        tokenizer: the model's; loaded from its files on a server that has none (``--skip-tokenizer-init``).
        longest: most tokens of a text; it fits with a part of its repetition after it.

    Raises:
        UnsupportedSetupError: there is no tokenizer, or pool and context are too small.
    """

    def __init__(self, scheduler: Scheduler, tree: KVEvictTree, subject: str, instead: str) -> None:
        self._scheduler = scheduler
        self._tree = tree
        self._served = tree.prefixes.prefills
        self._text: TextPrefills | None = None
        self._subject = subject
        self._instead = instead
        self.tokenizer = scheduler.tokenizer or self._loaded_tokenizer()
        room = min(scheduler.max_req_input_len, scheduler.max_total_num_tokens) - SPARE_TOKENS
        # A quarter at most, so that a small pool is left to the text.
        self._repeated = max(min(REPEATED_TOKENS, room // 4), 1)
        lead = len(request_to_repeat(self.tokenizer)) + 1
        self.longest = min(room - lead - self._repeated, MAX_TEXT_TOKENS)
        if self.longest < MIN_TEXT_TOKENS:
            raise UnsupportedSetupError(
                [
                    f"{subject} are learned from texts of {MIN_TEXT_TOKENS} tokens or more, and pool and "
                    f"context have room for {max(self.longest, 0)} beside a repetition; allowed: a larger "
                    f"--max-total-tokens or --context-length, a file of what was learned (score_weights), or {instead}"
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

    def read(self, tokens: Sequence[int], sums: RowSums | None = None) -> CachedRange:
        """Prefill a text, of whose queries ``sums`` get theirs; its slots stay as they are until :meth:`forget`.

        UnsupportedSetupError: the text was not admitted, or aborted.
        """
        tree = self._tree
        # Takes the place of what compresses prompts, so that the text stays in the tree as it was computed.
        text = self._text = tree.prefixes.prefills = TextPrefills(tree, sums)
        self._run(tokens, is_cached=True)
        if text.node is None or text.prompt.has_failed or (sums is not None and sums.has_failed):
            raise self._unreadable(len(tokens), "its prefill was not observed, or is not cached")
        return tree.compressor.cached(tree.port.token_slots(path_to(text.node)), 0)

    def score(self) -> ScoredText:
        """Have the text that was read last repeated, part by part.

        UnsupportedSetupError: a request was not admitted, or failed, or the text was dropped between two of them.
        """
        tree, text = self._tree, self._text
        assert text is not None and text.node is not None
        path = path_to(text.node)
        num_tokens = length_of(path)
        attention = text.attention = TextAttention(tree.packer.geometry, num_tokens, tree.packer.k_arena.device)
        key = key_of(path)
        for repetition in repetitions(self.tokenizer, tokens_of(path).tolist(), self._repeated):
            self._run([*key, *repetition], is_cached=False)
        path = path_to(text.node)
        # Requests that repeat a text need slots, too; if the text was dropped for them, its nodes have lost their
        # parents.
        above = [tree.root_node, *path[:-1]]
        if any(all(node is not child for child in up.children.values()) for up, node in zip(above, path, strict=True)):
            raise self._unreadable(num_tokens, "it was dropped between two repetitions")
        if attention.has_failed:
            raise self._unreadable(num_tokens, "a repetition failed")
        # The last tokens are protected in a prompt, so no score decides about them.
        slots = tree.port.token_slots(path)[: -tree.compressor.config.tail_tokens]
        show = tree.compressor.show(text.prompt, 0, slots)
        return ScoredText(tree.compressor.cached(slots, 0), attention.sums[..., : slots.numel()].sqrt(), show)

    def forget(self) -> None:
        """Empty the cache; the server is as before the text."""
        # The allocator keeps its memory, which the next text needs again.
        self._scheduler.flush_cache(empty_cache=False)
        self._tree.prefixes.prefills = self._served

    def _run(self, tokens: Sequence[int], *, is_cached: bool) -> None:
        """Prefill tokens: take turns of the scheduler until the request is released, and nothing is left in flight.

        ``is_cached``: the tree keeps what it computes.
        """
        req, num_idle = self._queued(tokens, is_cached=is_cached), 0
        while not req.finished():
            num_idle += not self._turn()
            if num_idle > MAX_IDLE_TURNS:
                raise self._unreadable(len(req.origin_input_ids), "SGLang does not admit it")
        if isinstance(req.finished_reason, FINISH_ABORT):
            raise self._unreadable(len(req.origin_input_ids), req.finished_reason.message)
        # SGLang takes a finished request out of its batches one turn later, and flushes the cache of an idle scheduler
        # only.
        while self._turn():
            pass

    def _queued(self, tokens: Sequence[int], *, is_cached: bool) -> Req:
        """Queue a request without an answer, bypassing the checks and limits for clients."""
        scheduler = self._scheduler
        sampling = SamplingParams(max_new_tokens=0, temperature=0)
        sampling.normalize(None)
        req = Req(
            f"kvevict-text-{next(_NUMBERS)}",  # for logs only
            "",
            array("q", tokens),
            sampling,
            eos_token_ids=scheduler.model_config.hf_eos_token_id,
            vocab_size=scheduler.model_config.vocab_size,
        )
        req.tokenizer = scheduler.tokenizer
        req.logprob_start_len = -1
        req.skip_radix_cache_insert = not is_cached
        req.finished_output = True
        scheduler.init_req_max_new_tokens(req)
        scheduler._set_or_validate_priority(req)
        req.arrival_processed_tokens = scheduler.processed_tokens_counter
        req.time_stats.set_wait_queue_entry_time()
        scheduler.waiting_queue.append(req)
        return req

    def _turn(self) -> bool:
        """One turn of :meth:`Scheduler.event_loop_normal` that receives nothing; False if no batch was run."""
        scheduler = self._scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        return bool(batch)

    def _loaded_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer from its files; :class:`UnsupportedSetupError` if there is none."""
        path = tokenizer_path()
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
                    f"{self._subject} are learned from texts, and no tokenizer can be loaded from {path} ({error}); "
                    f"allowed: a model with a tokenizer, a file of what was learned (score_weights), or {self._instead}"
                ]
            ) from error
        return tokenizer

    def _unreadable(self, num_tokens: int, why: str) -> UnsupportedSetupError:
        return UnsupportedSetupError(
            [
                f"{self._subject} cannot be learned: of a text of {num_tokens} tokens, {why}; allowed: a larger "
                f"--max-total-tokens, a file of what was learned (score_weights), or {self._instead}"
            ]
        )


def learn_before_ready(scheduler: Scheduler) -> None:
    """Learn what a scheduler lacks before it reports that it is ready, and the port opens."""
    tree = scheduler.tree_cache
    if not isinstance(tree, KVEvictTree) or tree.distilling is None:
        return
    tree.distilling.use_none()
    if tree.distilling.lacks_scores or tree.distilling.lacks_statistics:
        # The loop runs on this stream and without gradients; SGLang has not entered either yet.
        with scheduler.device_module.StreamContext(scheduler.schedule_stream), DynamicGradMode():
            learn(scheduler, tree)


def learn(scheduler: Scheduler, tree: KVEvictTree) -> None:
    """Learn from texts what is not known yet, and keep it in a file.

    All ranks take the same steps; the cache is empty afterwards. UnsupportedSetupError: no text can be read.
    ConfigError: the texts of ``score_texts`` cannot be read, or are too few.
    """
    distilling, begin = tree.distilling, time.perf_counter()
    assert distilling is not None
    has_scores = not distilling.lacks_scores
    subject, instead = SUBJECTS[has_scores]
    reader = TextReader(scheduler, tree, subject, instead)
    passages = passages_of(tree.compressor.config.score_texts)
    # Every other one as a chat, because servers get both kinds of prompts.
    *samples, trial = (reader.tokens_of(text, as_chat=i % 2 == 1) for i, text in enumerate(passages))
    what = "scores"
    if has_scores:
        what, samples = "statistics", [tokens[:STATISTICS_TOKENS] for tokens in samples]
    distilling.log(
        logging.INFO, "learning %s of this model from %d texts, before the first request", what, len(samples)
    )
    of_rank = tree.packer.geometry, distilling.learned.rotary, tree.packer.k_arena.device
    learner = None if has_scores else ScoreLearner(*of_rank)
    sums = None if tree.packer.geometry.is_latent else RowSums(*of_rank)  # latents always have rows of 16 bits
    for number, tokens in enumerate(samples, 1):
        since = time.perf_counter()
        text = reader.read(tokens, sums)
        if sums is not None:
            sums.add(text)
        if learner is not None:
            learner.add(reader.score())
        reader.forget()
        size = len(tokens), time.perf_counter() - since
        distilling.log(logging.INFO, "learning %s: text %d of %d, %d tokens, %.1f s", what, number, len(samples), *size)

    def tried() -> ScoredText:
        # Read only if scores were learned: statistics need no trial.
        reader.read(trial)
        return reader.score()

    distilling.finish(learner, sums, tried)
    reader.forget()
    if tree.prefixes.access is not None:
        # Rows in the store were written with some statistics, so these are part of the identity under which they are
        # found.
        read_with(tree.prefixes.access, distilling.digest)
    seconds = time.perf_counter() - begin
    if has_scores:
        distilling.log(logging.INFO, "learned statistics of keys and values; it took %.0f s", seconds)
        return
    weights = distilling.learned.weights
    found = 100 * (0.0 if weights is None else weights.recall or 0.0)
    distilling.log(
        logging.INFO, "learned scores find %.0f %% of what repetitions attend to; it took %.0f s", found, seconds
    )
