"""Compare what passes, learned scores and both together keep, by the answers of the full cache.

Run: python benchmarks/quality/joint.py; adds to docs/results/quality/joint.csv. Qwens' rows there:
--model qwen-0.5b --seed 12 --contexts 4; --model qwen-1.5b --seed 12 --contexts 3 --tasks table factbook squad

Outside the server. The full cache answers a question greedily; then the same tokens are predicted from what each choice
keeps of the context. The divergence of these predictions shows smaller differences than right and wrong answers do.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from distill import show, tokens_of
from kvevict_quality.passes import TAIL, PassModel, ScoredPrefix
from kvevict_quality.rows import ROOT
from kvevict_quality.sample import Prompts, Question, Sample
from kvevict_quality.tasks import make_sample, select_tasks

from kvevict_tools.models import DEMO, made_model
from sgl_kvevict.distill import (
    ModelIdentity,
    ScoreWeights,
    find_weights,
    load_scores,
    weights_folders,
    window_features,
)
from sgl_kvevict.distill.files import fingerprint_of
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import LayerView, Signal, build_policy
from sgl_kvevict.policies.methods.distilled import relative_norms
from sgl_kvevict.policies.scorers import log_attention

RESULTS = ROOT / "docs" / "results" / "quality" / "joint.csv"
CHOICES = {
    "passes": (0.0, False),
    "learned": (1.0, False),
    "third": (1 / 3, False),
    "half": (1 / 2, False),
    "two thirds": (2 / 3, False),
    "passes, norms": (0.0, True),
    "learned, norms": (1.0, True),
    "third, norms": (1 / 3, True),
    "half, norms": (1 / 2, True),
    "two thirds, norms": (2 / 3, True),
}
"""What is kept: the share of the prediction, and whether attention is multiplied by the norm of values."""
ANSWER_TOKENS = 14
NUM_SINKS = 4


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO, help="a name of `make model ARGS=--list` with learned scores")
    parser.add_argument("--tasks", nargs="*", default=["table", "factbook", "reading", "squad", "needle-multi-key"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--contexts", type=int, default=6)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--budget", type=float, default=0.2)
    return parser.parse_args()


@dataclass
class Divergences:
    """By choice, one number per question: nats per token, and whether all tokens of the answer stay the likeliest."""

    nats: dict[str, list[float]] = field(default_factory=lambda: {choice: [] for choice in CHOICES})
    same: dict[str, list[bool]] = field(default_factory=lambda: {choice: [] for choice in CHOICES})

    def add(self, full: Tensor, found: Tensor, answer: Tensor) -> None:
        """Add a question: log-probabilities [tokens, words] from the full cache and [choices, tokens, words]."""
        nats = (full.exp() * (full - found)).sum(-1).mean(-1).tolist()
        same = (found.argmax(-1) == answer).all(-1).tolist()
        for choice, one, is_same in zip(CHOICES, nats, same, strict=True):
            self.nats[choice].append(one)
            self.same[choice].append(is_same)


class Comparison:
    """One model, what was learned for it, and a budget."""

    def __init__(self, folder: Path, budget: float) -> None:
        self.model = PassModel(folder)
        self.prompts = Prompts(self.model.tokenizer)
        self.weights = self._known(folder)
        self.budget = budget
        heads = self.model.model.config.num_attention_heads
        self.geometry = KVGeometry(self.model.num_layers, heads, self.model.num_heads, self.model.head_dim, 1)

    def _known(self, folder: Path) -> ScoreWeights:
        """The learned scores that come with the package; SystemExit if there are none."""
        sizes = self.model.num_layers, self.model.num_heads, self.model.head_dim
        identity = ModelIdentity(folder.name, fingerprint_of(folder) or "", *sizes, self.model.rotary)
        path = find_weights(identity, weights_folders())
        if path is None:
            raise SystemExit(f"model: got {folder.name}; allowed: models with learned scores (`sgl-kvevict learn`)")
        return load_scores(path, identity)

    def ask(self, sample: Sample, divergences: Divergences) -> None:
        """Compare the choices over the questions of a sample."""
        prefix = self.model.score(self.prompts.context_ids(sample))
        kept = torch.stack([self._kept(scores) for scores in self._scores(prefix).values()])
        for question in sample.questions:
            asked = self.prompts.question_ids(sample, question)
            answer, full = self._full_answer(prefix, asked, question)
            if answer:
                found = self.model.predict(prefix, kept, [*asked, *answer[:-1]], len(answer))
                divergences.add(full, found, torch.tensor(answer))

    def _full_answer(self, prefix: ScoredPrefix, asked: list[int], question: Question) -> tuple[list[int], Tensor]:
        """The greedy answer up to a line's end or a quotation mark, and its log-probabilities [tokens, words]."""
        everything = torch.ones(1, *prefix.scores.shape[:2], prefix.k.shape[1], dtype=torch.bool)
        answer: list[int] = []
        rows = []
        while len(answer) < min(question.max_new_tokens, ANSWER_TOKENS):
            row = self.model.predict(prefix, everything, [*asked, *answer], 1)[0, -1]
            token = int(row.argmax())
            if token in self.model.tokenizer.all_special_ids:
                break
            answer.append(token)
            rows.append(row)
            if {*self.prompts.decode([token])} & {"\n", '"'}:
                break
        return answer, torch.stack(rows) if rows else torch.empty(0)

    def _scores(self, prefix: ScoredPrefix) -> Mapping[str, Tensor]:
        """[num_layers, num_kv_heads, num_tokens - TAIL], by choice."""
        windows = [window_features(show(prefix, layer)) for layer in range(self.model.num_layers)]
        window = torch.stack([part for part in windows if part is not None])
        learned = self.weights.score(tokens_of(prefix), self.model.rotary, window)
        norms = torch.stack([relative_norms(values[: learned.shape[-1]]) for values in prefix.v])
        measured = log_attention(prefix.scores)
        return {
            name: torch.lerp(measured, learned, share) + with_norms * norms
            for name, (share, with_norms) in CHOICES.items()
        }

    def _kept(self, scores: Tensor) -> Tensor:
        """[num_layers, num_kv_heads, num_tokens], bool: what the default policy keeps by these scores, and the tail."""
        policy, end = build_policy("reconstruction", {}), scores.shape[-1]
        assert policy is not None
        nothing = torch.empty(end, scores.shape[1], 0)

        def view(layer: int) -> LayerView:
            signals = {Signal.READER_ATTENTION: scores[layer]}
            return LayerView(layer, 0, nothing, nothing, torch.arange(end), 1.0, signals)

        total = round(self.budget * end) * self.geometry.num_runs
        selection = policy.select(view, self.geometry, total, NUM_SINKS).selection
        runs = torch.repeat_interleave(selection.keep_lens.flatten().long())
        kept = torch.zeros(self.geometry.num_runs, end + TAIL, dtype=torch.bool)
        kept[runs, selection.indices.long()] = True
        kept[:, end:] = True
        return kept.view(*scores.shape[:2], -1)


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """One row per task and choice."""
    folder = Path(made_model(args.model))
    comparison, started = Comparison(folder, args.budget), time.monotonic()
    for task in select_tasks(args.tasks):
        found = Divergences()
        for index in range(args.contexts):
            comparison.ask(make_sample(task, args.tokens, args.seed, index, comparison.prompts.count), found)
        for choice, nats in found.nats.items():
            same = found.same[choice]
            figures = {"kl": fmean(nats), "kl_error": stdev(nats) / len(nats) ** 0.5, "same_answers": fmean(same)}
            where = {"model": folder.name, "task": task, "tokens": args.tokens, "seed": args.seed}
            texts = {name: str(value) for name, value in where.items()}
            texts |= {"budget": f"{args.budget:g}", "questions": str(len(nats)), "keeps": choice}
            yield texts | {name: f"{value:.4f}" for name, value in figures.items()}
        print(f"{time.monotonic() - started:5.0f} s  {task}", flush=True)


def main() -> None:
    """Measure, and add rows after each task."""
    for row in rows_of(parse_arguments()):
        is_new = not RESULTS.exists()
        with RESULTS.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(row)


if __name__ == "__main__":
    main()
