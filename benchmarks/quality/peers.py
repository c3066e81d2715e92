"""The same contexts and questions with the presses of kvpress, one row each in the same results file.

Run by `make bench-peers` in kvpress' own environment: python benchmarks/quality/peers.py MODEL_FOLDER

A press compresses the context alone; questions follow at their true positions. With --aware it compresses context and
question together, before the answer; the first token of the answer comes from the prefill on both sides. It keeps as
many entries as our server's policy `random` held token slots for the same prompts at this budget, uncompressed tail
included.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

# Neither this folder nor ``tools`` is installed in the environment of kvpress.
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tools"))

import torch
from kvevict_quality import fidelity
from kvevict_quality.origin import commit
from kvevict_quality.presses import PRESSES
from kvevict_quality.rows import AWARE_RESULTS, RESULTS, Row, merge_rows, read_rows
from kvevict_quality.sample import Prompts, Sample
from kvevict_quality.tasks import FIDELITY_TASKS, make_sample, select_tasks
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as transformers_logging

FULL, CONTROL = "full", "random"


@dataclass
class Peer:
    """A model in transformers, its prompts, and how answers end."""

    model: Any
    prompts: Prompts
    seconds_to_prepare: float = 0.0
    seconds_to_answer: float = 0.0

    @torch.inference_mode()
    def answers(self, sample: Sample, ids: list[int], press: Any | None) -> list[str]:
        """Compress the context, then ask every question of it."""
        begin = time.perf_counter()
        cache = DynamicCache()
        with press(self.model) if press is not None else nullcontext():
            self.model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
        prepared = time.perf_counter()
        layers: list[Any] = cache.layers
        held = [layer.keys.shape[2] for layer in layers]
        answers = []
        for conversation in sample.conversations:
            _crop(cache, held)
            position = len(ids)
            for turn, question in enumerate(conversation):
                asked = self.prompts.question_ids(sample, question, turn)
                output, position = self._generate(asked, cache, position, question.max_new_tokens)
                answers.append(self.prompts.decode(output))
        self.seconds_to_prepare += prepared - begin
        self.seconds_to_answer += time.perf_counter() - prepared
        return answers

    @torch.inference_mode()
    def answers_aware(self, sample: Sample, ids: list[int], press: Any | None) -> list[str]:
        """Answer every question from a prompt of its own, context and question, compressed before the answer."""
        begin = time.perf_counter()
        answers = []
        for question in sample.questions:
            prompt, cache = ids + self.prompts.question_ids(sample, question), DynamicCache()
            with press(self.model) if press is not None else nullcontext():
                hidden = self.model.model(input_ids=torch.tensor([prompt]), past_key_values=cache).last_hidden_state
            first = int(self.model.lm_head(hidden[0, -1]).argmax())
            answers.append(self.prompts.decode(self._continue(first, cache, len(prompt), question.max_new_tokens)))
        self.seconds_to_answer += time.perf_counter() - begin
        return answers

    @torch.inference_mode()
    def distributions(
        self, passage: fidelity.Passage, press: Any | None, tail: int = 0
    ) -> tuple[list[fidelity.Distribution], float]:
        """Compress the context, then predict the continuation; as :func:`fidelity.distributions` of a server.

        Args:
            passage: context and continuation.
            press: compresses the context; None: nothing does.
            tail: last tokens of the context that it does not see.
        """
        begin = time.perf_counter()
        cache, start = DynamicCache(), len(passage.context_ids) - tail
        with press(self.model) if press is not None else nullcontext():
            self.model.model(input_ids=torch.tensor([passage.context_ids[:start]]), past_key_values=cache)
        prepared = time.perf_counter()
        text = torch.tensor([passage.context_ids[start:] + passage.continuation_ids])
        positions = torch.arange(start, start + text.shape[1])[None]
        logits = self.model(text, past_key_values=cache, position_ids=positions).logits[0, tail:]
        text = text[:, tail:]
        logprobs = logits[passage.num_given - 1 : -1].log_softmax(-1)
        own = logprobs.gather(1, text[0, passage.num_given :, None])
        top = logprobs.topk(min(fidelity.TOP, logprobs.shape[1]))
        found = [dict(zip(*row, strict=True)) for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
        self.seconds_to_prepare += prepared - begin
        self.seconds_to_answer += time.perf_counter() - prepared
        return found, -float(own.mean())

    def _continue(self, token: int, cache: Any, position: int, max_new_tokens: int) -> list[int]:
        """Greedy continuation that begins with a given token, without the token that ended it."""
        if token == self.model.generation_config.eos_token_id or not max_new_tokens:
            return []
        return [token, *self._generate([token], cache, position, max_new_tokens - 1)[0]]

    def _generate(self, ids: list[int], cache: Any, position: int, max_new_tokens: int) -> tuple[list[int], int]:
        """Greedy continuation without the token that ended it, all of it in the cache; the position after it."""
        eos, output, step = self.model.generation_config.eos_token_id, list[int](), ids
        while True:
            positions = torch.arange(position, position + len(step))[None]
            logits = self.model(torch.tensor([step]), past_key_values=cache, position_ids=positions, logits_to_keep=1)
            position += len(step)
            token = int(logits.logits[0, -1].argmax())
            if len(output) == max_new_tokens or token == eos:
                return output, position
            output.append(token)
            step = [token]


def _crop(cache: Any, held: list[int]) -> None:
    """Back to the compressed context, as kvpress' pipeline does after each answer."""
    for layer, length in zip(cache.layers, held, strict=True):
        layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]


def measure(peer: Peer, control: Row, name: str, model: Path, *, aware: bool, tail: int = 0) -> Row:
    """One press (or ``FULL``) on the contexts, or passages, that the control's row stands for.

    ``tail`` last tokens of a passage stay out of the press, and count among the entries that are kept.
    """
    peer.seconds_to_prepare = peer.seconds_to_answer = 0.0
    scores: list[float] = []
    divergences: list[float] = []
    nll: list[float] = []
    torch.manual_seed(control.seed)
    share = 1.0 if name == FULL else control.kept_share
    pressed = (share * control.tokens - tail) / (control.tokens - tail)
    press = None if name == FULL else PRESSES[name](1 - pressed)
    for index in range(control.contexts):
        if control.task in FIDELITY_TASKS:
            passage = fidelity.make_passage(peer.prompts, control.task, control.tokens, index)
            distributions, loss = peer.distributions(passage, press, tail)
            full = peer.distributions(passage, None)[0] if press is not None else distributions
            divergences += map(fidelity.divergence, full, distributions)
            scores.append(fidelity.agreement(full, distributions))
            nll.append(loss)
            continue
        sample = make_sample(control.task, control.tokens, control.seed, index, peer.prompts.count)
        answers = peer.answers_aware if aware else peer.answers
        found = answers(sample, peer.prompts.context_ids(sample), press)
        scores += [q.score(answer) for q, answer in zip(sample.questions, found, strict=True)]
    return Row(
        engine="kvpress",
        policy=name,
        options=options_of(name, tail),
        budget=1.0 if name == FULL else control.budget,
        task=control.task,
        tokens=control.tokens,
        contexts=control.contexts,
        questions=len(divergences) or len(scores),
        score=round(sum(scores) / len(scores), 4),
        kl=round(fmean(divergences), 5) if divergences else None,
        context_tokens=control.context_tokens,
        slots=round(share * control.context_tokens, 1),
        prepare_s=round(peer.seconds_to_prepare / control.contexts, 2),
        answer_s=round(peer.seconds_to_answer / control.contexts, 2),
        model=model.name,
        dtype="float32",
        seed=control.seed,
        versions=", ".join(f"{package} {version(package)}" for package in ("kvpress", "transformers", "torch")),
        commit=commit(),
        nll=round(fmean(nll), 5) if nll else None,
        scores=" ".join(f"{score:.4g}" for score in scores),
    )


def options_of(name: str, tail: int) -> str:
    """What a row names beside the press."""
    return f"tail={tail}" if tail and name != FULL else ""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("--presses", nargs="*", default=list(PRESSES), help=f"of {', '.join(PRESSES)}")
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.2, 0.1])
    parser.add_argument("--tasks", nargs="*", default=["needles"])
    parser.add_argument("--lengths", nargs="*", type=int, default=[1024])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--aware", action="store_true", help="context and question in one prompt")
    parser.add_argument("--tail", type=int, default=0, help="last tokens of passages that no press sees; ours: 32")
    parser.add_argument("--results", type=Path, help="CSV file; default: results.csv, or aware.csv, of the documents")
    args = parser.parse_args()
    if args.tail and set(args.tasks) - set(FIDELITY_TASKS):
        parser.error(f"--tail: got {args.tail}; allowed: with tasks {', '.join(FIDELITY_TASKS)} only")
    args.results = args.results or (AWARE_RESULTS if args.aware else RESULTS)
    return args


def main() -> None:
    """Measure every press that has no row yet for what the control was measured on."""
    args = parse_arguments()
    transformers_logging.disable_progress_bar()
    started = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    peer = Peer(model, Prompts(AutoTokenizer.from_pretrained(args.model)))
    tasks = select_tasks(args.tasks)
    rows = read_rows(args.results)
    controls = [
        row
        for row in rows
        if (row.engine, row.policy, row.seed, row.model) == ("kvevict", CONTROL, args.seed, args.model.name)
        and row.task in tasks and row.tokens in args.lengths and row.budget in args.budgets
    ]  # fmt: skip
    done = {row.key: row.contexts for row in rows}
    if not controls:
        raise SystemExit(f"no rows of policy {CONTROL!r} for these tasks and budgets: run benchmarks/quality/run.py")
    for control in controls:
        for name in (FULL, *args.presses):
            budget = 1.0 if name == FULL else control.budget
            key = (
                "kvpress",
                name,
                options_of(name, args.tail),
                budget,
                control.task,
                control.tokens,
                control.model,
                control.seed,
            )
            if done.get(key, 0) >= control.contexts:
                continue
            row = measure(peer, control, name, args.model, aware=args.aware, tail=args.tail)
            merge_rows(args.results, [row])
            done[row.key] = row.contexts
            print(
                f"{time.monotonic() - started:6.0f} s  {name} {budget:g}: {row.task} at {row.tokens}: {row.score:.3f} "
                f"over {row.questions}, kept {row.kept_share:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
