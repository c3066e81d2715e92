"""How well learned scores find what passes keep, over how much and what they were learned from.

Run: python benchmarks/quality/distill.py; writes docs/results/quality/distilled.csv and distilled.md

Outside the server: prefixes are scored by passes once and stay in out/distill. Training texts are those that
servers learn from; the tested ones are the quality benchmark's contexts: other prose, other code, and needles,
which no training text has.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kvevict_quality.corpus import prose
from kvevict_quality.passes import TAIL, PassModel, ScoredPrefix
from kvevict_quality.rows import ROOT
from kvevict_quality.sample import Prompts, Sample
from kvevict_quality.tasks import make_sample

from kvevict_tools.models import ensure_model
from sgl_kvevict.distill import CachedRange, ScoredText, ScoreLearner, ScoreWeights, window_features
from sgl_kvevict.distill.learner import top_recall
from sgl_kvevict.distill.texts import Kind, training_texts
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.methods.distilled import WINDOW_SIZE
from sgl_kvevict.policies.signals import QueryWindow, Signal

WORK = ROOT / "out" / "distill"
RESULTS = ROOT / "docs" / "results" / "quality" / "distilled.csv"
BUDGETS = (0.5, 0.35, 0.2, 0.1, 0.05)
NUM_SINKS = 4
TESTS = (
    *((1024, task) for task in ("needle-single", "needle-multi-key", "code", "multi-turn", "prose")),
    *((2048, task) for task in ("needle-multi-key", "code")),
    (4096, "needle-multi-key"),
)
TEST_SEED = 7
"""Of contexts that no other benchmark measures."""


@dataclass(frozen=True)
class Training:
    """What was learned from.

    Attributes:
        name: of the row.
        texts: (tokens, kind, number) of each prefix.
    """

    name: str
    texts: tuple[tuple[int, Kind, int], ...]


def mixed(tokens: int, count: int) -> tuple[tuple[int, Kind, int], ...]:
    """Prose, code and tables in turn."""
    kinds: Iterator[Kind] = itertools.cycle(("prose", "code", "tables", "prose", "code"))
    taken = {"prose": 0, "code": 0, "tables": 0}
    texts = []
    for kind in itertools.islice(kinds, count):
        texts.append((tokens, kind, taken[kind]))
        taken[kind] += 1
    return tuple(texts)


def one_kind(kind: Kind, count: int) -> tuple[tuple[int, Kind, int], ...]:
    """1,024 tokens each."""
    return tuple((1024, kind, i) for i in range(count))


LENGTHS_MIXED = (*mixed(1024, 5), *mixed(2048, 2), *mixed(512, 1))
TRAININGS = (
    *(Training(f"mixed, {count} of 1,024 tokens", mixed(1024, count)) for count in (1, 2, 4, 8, 16, 32)),
    Training("prose only, 8 of 1,024 tokens", one_kind("prose", 8)),
    Training("code only, 8 of 1,024 tokens", one_kind("code", 8)),
    Training("mixed, 8 of 512 to 2,048 tokens", LENGTHS_MIXED),
    Training("mixed, 10 of 512 to 4,096 tokens", (*LENGTHS_MIXED, *mixed(4096, 2))),
)


class Prefixes:
    """Scored prefixes, made when they are first asked for.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: Path) -> None:
        self.model = PassModel(folder)
        self.prompts = Prompts(self.model.tokenizer)

    def train(self, tokens: int, kind: Kind, number: int) -> ScoredPrefix:
        """The ``number``-th training text of a kind and length; as raw text and as a chat's prompt in turn."""
        place = number + {512: 30, 1024: 0, 2048: 20, 4096: 24}[tokens]
        text = training_texts([tokens * 5] * (place + 1), [kind])[place]
        return self._stored(f"train-{tokens}-{kind}-{place}", lambda: self._training_ids(text, tokens, number))

    def test(self, tokens: int, task: str) -> ScoredPrefix:
        """A context of the quality benchmark."""

        def ids() -> list[int]:
            if task == "prose":
                return self.prompts.context_ids(Sample("\n\n".join(prose()[7:] + prose()), ()))[:tokens]
            return self.prompts.context_ids(make_sample(task, tokens, TEST_SEED, 0, self.prompts.count))

        return self._stored(f"test-{tokens}-{task}", ids)

    def _training_ids(self, text: str, tokens: int, number: int) -> list[int]:
        if number % 2 == 0:
            return self.prompts.context_ids(Sample(text, ()))[:tokens]
        body = self.prompts.decode(self.prompts.encode(text)[: tokens - 40])
        chat = [{"role": "user", "content": body}]
        return self.prompts.encode(
            self.model.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        )

    def _stored(self, name: str, ids: Callable[[], list[int]]) -> ScoredPrefix:
        path = WORK / f"{name}.pt"
        if not path.is_file():
            WORK.mkdir(parents=True, exist_ok=True)
            scored = self.model.score(ids())
            torch.save(vars(scored), path)
        return ScoredPrefix(**torch.load(path))


def tokens_of(prefix: ScoredPrefix) -> CachedRange:
    """The range that is compressed."""
    end = prefix.k.shape[1] - TAIL
    return CachedRange(prefix.k, prefix.v, torch.arange(end), 0, end)


def show(prefix: ScoredPrefix, layer: int) -> LayerView:
    """What a prefill leaves behind in a layer."""
    num_tokens, head_dim = prefix.k.shape[1], prefix.k.shape[-1]
    window = QueryWindow(prefix.queries[layer], prefix.lse[layer], num_tokens - prefix.queries.shape[1])
    slots = torch.arange(num_tokens - TAIL)
    signals = {Signal.WINDOW_QUERIES: window.last(WINDOW_SIZE)}
    return LayerView(layer, 0, prefix.k[layer], prefix.v[layer], slots, head_dim**-0.5, signals)


def learn(prefixes: Prefixes, texts: Iterable[tuple[int, Kind, int]]) -> ScoreWeights:
    """Weights learned from some texts."""
    model = prefixes.model
    query_heads = model.model.config.num_attention_heads
    geometry = KVGeometry(model.num_layers, query_heads, model.num_heads, model.head_dim, 1)
    learner = ScoreLearner(geometry, model.rotary)
    for text in texts:
        prefix = prefixes.train(*text)
        learner.add(ScoredText(tokens_of(prefix), prefix.scores, lambda layer, seen=prefix: show(seen, layer)))
    return learner.solve()


def recalls(prefixes: Prefixes, weights: ScoreWeights, prefix: ScoredPrefix, *, use_window: bool) -> list[float]:
    """Share of what passes keep that learned scores keep too, at each budget."""
    tokens = tokens_of(prefix)
    windows = [window_features(show(prefix, layer)) for layer in range(tokens.num_layers)] if use_window else []
    window = torch.stack([part for part in windows if part is not None]) if windows else None
    learned = weights.score(tokens, prefixes.model.rotary, window)
    inner: tuple[Tensor, Tensor] = (learned[..., NUM_SINKS:], prefix.scores[..., NUM_SINKS:])
    return [top_recall(*inner, budget) for budget in BUDGETS]


def main() -> None:
    """Measure all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names contain one of these")
    args = parser.parse_args()
    started = time.monotonic()
    prefixes = Prefixes(ensure_model())
    rows: list[dict[str, str]] = []
    for training in TRAININGS:
        if args.only and not any(part in training.name for part in args.only):
            continue
        weights = learn(prefixes, training.texts)
        for use_window in (True, False):
            found = {test: recalls(prefixes, weights, prefixes.test(*test), use_window=use_window) for test in TESTS}
            for length in (1024, 2048, 4096):
                chosen = [values for (tokens, _), values in found.items() if tokens == length]
                means = [sum(column) / len(chosen) for column in zip(*chosen, strict=True)]
                rows.append(_row(training.name, use_window, length, len(chosen), means))
            print(f"{time.monotonic() - started:5.0f} s  {rows[-3]}\n         {rows[-1]}", flush=True)
    if not args.only:
        write(rows)


def _row(training: str, use_window: bool, length: int, contexts: int, means: Sequence[float]) -> dict[str, str]:
    row = {"learned from": training, "looks at": "cache and window" if use_window else "cache alone"}
    row |= {"tested at": str(length), "contexts": str(contexts)}
    return row | {f"{budget:g}": f"{mean:.3f}" for budget, mean in zip(BUDGETS, means, strict=True)}


def write(rows: Sequence[dict[str, str]]) -> None:
    """As CSV and as a table."""
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        "# What learned scores find of what passes keep",
        "",
        "Written by `python benchmarks/quality/distill.py`: SmolLM2-135M-Instruct, bfloat16, outside the server: share",
        "of the highest scores, over all layers and heads, at each budget.",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|---|---|--:|--:|" + "--:|" * len(BUDGETS),
    ]
    lines += ["| " + " | ".join(row.values()) + " |" for row in rows]
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
