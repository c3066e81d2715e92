"""What it costs that an answer is compressed while it is generated, block by block, each behind compressed ones.

Run: python benchmarks/quality/answers.py [--models demo qwen-0.5b qwen-1.5b]; writes docs/results/quality/answers.csv
and answers.md. Outside the server, in float32, as ``bits.py``, whose formats and scores it uses.

A text is read as a prompt and an answer that goes on. The answer is teacher-forced: its tokens are those of the text.
Compared are the full cache, compression in one piece after the last token, and blocks as a server makes them: each is
computed over the compressed ones, and compressed itself when its tail is there. Then

* divergence of the next tokens of the text from those of the full cache;
* lines of a table that the answer begins with are asked for 2,000 tokens later: found if each token of the number is
  the most probable one.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from bits import NUM_SINKS, TAIL, Context, Reader, kept_entries, learned, read_back, texts
from kvevict_quality.rows import ROOT
from torch import Tensor

from kvevict_tools.csv_rows import read_rows, write_rows
from kvevict_tools.models import made_model
from sgl_kvevict.cache.resize import JOINED
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.distill.features import CachedRange
from sgl_kvevict.distill.weights import score_range
from sgl_kvevict.policies.methods.distilled import relative_norms
from sgl_kvevict.segments.ranker import END_OF_A_TEXT_THAT_GOES_ON

RESULTS = ROOT / "docs" / "results" / "quality" / "answers.csv"
PROMPT, ANSWER, NEXT = 1024, 4096, 128
BLOCKS = (1024, 512, 256)
ONCE, FULL = "one piece", "full cache"
HOW = (FULL, ONCE, *(f"blocks of {block}" for block in BLOCKS))
LATER = 2000
"""Tokens between a table and the questions about it."""
NAMES = (
    *("otter", "maple", "violet", "copper", "falcon", "ginger", "harbor", "lemon", "marble", "pepper"),
    *("badger", "cedar", "indigo", "silver", "heron", "saffron", "island", "cherry", "granite", "thyme"),
)
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""The template of all measured models."""
TASK = TURN.format("Write down the codes of all stations, one in a line. Then write a long manual.")


@dataclass(frozen=True)
class Cache:
    """Keys and values [num_layers, num_kv_heads, num_tokens, head_dim] of a path, and which entries are kept."""

    k: Tensor
    v: Tensor
    kept: Tensor

    @property
    def num_tokens(self) -> int:
        """Of the path."""
        return self.k.shape[2]


class BlockReader(Reader):
    """Reads tokens behind any cache, and keeps what it computes of them."""

    num_positions = PROMPT + ANSWER + NEXT

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.weights, self.statistics = learned(self)

    def _attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        self._computed[module.layer_idx] = key[0], value[0]
        return super()._attend(module, query, key, value, *rest, **more)

    def go_on(self, cache: Cache, ids: Sequence[int]) -> tuple[Cache, Tensor]:
        """The cache with further tokens, and their log-probabilities [len(ids), words]."""
        self._computed: dict[int, tuple[Tensor, Tensor]] = {}
        found = self.predict(Context(cache.k, cache.v, list(ids), 0), cache.k, cache.v, cache.kept)
        k, v = (torch.stack([self._computed[i][side] for i in range(self.num_layers)]) for side in (0, 1))
        kept = torch.ones(k.shape[:3], dtype=torch.bool)
        pairs = ((cache.k, k), (cache.v, v), (cache.kept, kept))
        return Cache(*(torch.cat(pair, dim=2) for pair in pairs)), found

    def full(self, ids: Sequence[int]) -> Cache:
        """The uncompressed cache of a text."""
        k, v = self.read(ids)
        return Cache(k, v, torch.ones(k.shape[:3], dtype=torch.bool))

    def compress(self, cache: Cache, start: int, end: int, share: float, tail: int) -> tuple[Cache, Tensor]:
        """Compress the tokens ``[start, end)``, the last ``tail`` of which every head keeps; return their scores, too.

        Without a tail more tokens follow. The scores are [num_layers, num_kv_heads, end - start].
        """
        slots, text_end = torch.arange(start, end), end if tail else END_OF_A_TEXT_THAT_GOES_ON
        tokens = CachedRange(cache.k.transpose(1, 2), cache.v.transpose(1, 2), slots, start, text_end)
        norms = torch.stack([relative_norms(values[start:end]) for values in tokens.v_arena])
        scores, sinks = score_range(self.weights.cache, tokens, self.rotary()) + norms, max(NUM_SINKS - start, 0)
        scores[..., :sinks] = float("inf")
        scores[..., scores.shape[2] - tail :] = torch.finfo(scores.dtype).max
        k, v, kept = cache.k.clone(), cache.v.clone(), cache.kept.clone()
        kept[:, :, start:end] = kept_entries(scores, share, "auto", sinks)
        s, narrow = self.statistics, slice(start + sinks, end)
        k[:, :, narrow] = read_back(k[:, :, narrow], s.k_mean, s.k_scale)
        v[:, :, narrow] = read_back(v[:, :, narrow], s.v_mean, s.v_scale)
        return Cache(k, v, kept), scores

    def in_blocks(self, ids: Sequence[int], num_prompt: int, block: int, share: float) -> Cache:
        """A prompt, compressed when it is complete, and an answer, of which a block is compressed behind its tail.

        Blocks have more than the share at first. Eight of them, or the last ones, go to it together.
        """
        least, first_share = KVEvictConfig().min_prefix_tokens, KVEvictConfig(budget=share).fresh_share
        cache, done = self.full(ids[:num_prompt]), 0
        if num_prompt >= least:
            cache, done = self.compress(cache, 0, num_prompt, share, TAIL)[0], num_prompt
        first, fresh = done, list[Tensor]()  # of blocks from there on
        while cache.num_tokens < len(ids):
            end = min(max(done, num_prompt) + block + TAIL, len(ids))
            cache, _ = self.go_on(cache, ids[cache.num_tokens : end])
            is_last = end == len(ids)  # the rest of an answer is compressed, too
            if end - TAIL - done >= least:
                cache, scores = self.compress(cache, done, end - TAIL, share if is_last else first_share, 0)
                done = end - TAIL
                fresh.append(scores)
            if fresh and (len(fresh) == JOINED or is_last):
                together, joined = torch.cat(fresh, dim=2), cache.kept[:, :, first:done]
                sinks = max(NUM_SINKS - first, 0)
                joined &= kept_entries(together.masked_fill(~joined, -float("inf")), share, "auto", sinks)
                first, fresh = done, []
        return cache

    def caches(
        self, ids: Sequence[int], num_prompt: int, share: float, blocks: Sequence[int]
    ) -> Iterator[tuple[str, Cache]]:
        """What is compared, the full cache first."""
        full = self.full(ids)
        yield FULL, full
        yield ONCE, self.compress(full, 0, full.num_tokens, share, TAIL)[0]
        for block in blocks:
            yield f"blocks of {block}", self.in_blocks(ids, num_prompt, block, share)


def answers() -> dict[str, str]:
    """What is tested, long enough; nothing is learned from it."""
    pages = sorted((ROOT / "docs" / "design").glob("*.md"))
    return {"pages": "".join(page.read_text(encoding="utf-8") for page in pages), "code": texts()["code"]}


def divergence_rows(reader: BlockReader, args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Divergence of what follows the answer."""
    length = PROMPT + args.answer + NEXT
    for name, text in answers().items():
        ids = list(reader.tokenizer.encode(text[: 10 * length]))[:length]
        assert len(ids) == length
        expected: Tensor | None = None
        for how, cache in reader.caches(ids[:-NEXT], PROMPT, args.share, args.blocks):
            _, found = reader.go_on(cache, ids[-NEXT:])
            expected = found if expected is None else expected
            divergence = (expected.exp() * (expected - found)).sum(-1).mean()
            same = (expected.argmax(-1) == found.argmax(-1)).float().mean()
            held = float(cache.kept.float().mean())
            yield {"what": "divergence", "text": name, "how": how, "value": f"{divergence:.5f}"}
            yield {"what": "same", "text": name, "how": how, "value": f"{same:.3f}"}
            yield {"what": "kept", "text": name, "how": how, "value": f"{held:.3f}"}


def needle_rows(reader: BlockReader, args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Lines of a table that the answer begins with, asked for later: the share that is found."""
    encode = reader.tokenizer.encode
    story = list(encode(answers()["pages"]))[:LATER]
    for seed in range(args.tables):
        rng = random.Random(seed)
        codes = [str(rng.randrange(1000, 10_000)) for _ in NAMES]
        names = rng.sample(NAMES, len(NAMES))
        table = "".join(f"{name} = {code}\n" for name, code in zip(names, codes, strict=True))
        prompt = list(encode(TASK))
        ids = [*prompt, *encode(table), *story]
        for how, cache in reader.caches(ids, len(prompt), args.share, args.blocks):
            found = []
            for name, code in zip(names, codes, strict=True):
                turn = f"<|im_end|>\n{TURN.format(f'Repeat the line of {name}.')}{name} ="
                question, wanted = list(encode(turn)), list(encode(f" {code}"))
                _, logits = reader.go_on(cache, [*question, *wanted])
                found.append(logits[len(question) - 1 : -1].argmax(-1).tolist() == wanted)
            yield {"what": "needles", "text": f"table {seed}", "how": how, "value": f"{fmean(found):.3f}"}


PARTS = {"divergence": divergence_rows, "needles": needle_rows}
KEY = ("model", "share", "what", "text", "how")


def main() -> None:
    """Measure models, and write the table of all rows that there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["demo", "qwen-0.5b", "qwen-1.5b"])
    parser.add_argument("--share", type=float, default=KVEvictConfig().budget)
    parser.add_argument("--blocks", nargs="*", type=int, choices=BLOCKS, default=BLOCKS)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens")
    parser.add_argument("--tables", type=int, default=3, help="of needles")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    for model in args.models:
        reader = BlockReader(Path(made_model(model)))
        for part in args.parts:
            for row in PARTS[part](reader, args):
                row = {"model": reader.folder.name, "share": f"{args.share:g}"} | row
                print(f"{time.monotonic() - started:5.0f} s  {' '.join(row.values())}", flush=True)
                known = {tuple(each[name] for name in KEY): each for each in read_rows(RESULTS)}
                rows = list((known | {tuple(row[name] for name in KEY): row}).values())
                write_rows(RESULTS, row, rows)
    RESULTS.with_suffix(".md").write_text(page(read_rows(RESULTS)), encoding="utf-8")


def page(rows: Sequence[dict[str, str]]) -> str:
    """Means over texts, by model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    titles = {
        "divergence": f"Divergence of the next {NEXT} tokens from those of the full cache, nats a token",
        "same": "Share of them whose most probable token is that of the full cache",
        "needles": f"Lines of the own table that are found {LATER:,} tokens later",
    }
    lines = [
        "# Answers in blocks",
        "",
        f"Written by `python benchmarks/quality/answers.py`: a text is a prompt of {PROMPT:,} tokens and an answer of",
        f"{ANSWER:,}. Its tokens are given; blocks are computed over compressed ones, and compressed by the default",
        "policy. In float32, outside the server. Mean of two texts: pages of these docs, and code.",
    ]
    for what, title in titles.items():
        lines += ["", f"## {title}", "", f"| share | how | {' | '.join(models)} |", "|--:|---|" + "--:|" * len(models)]
        chosen = [row for row in rows if row["what"] == what]
        for share, how in sorted({(r["share"], r["how"]) for r in chosen}, key=lambda at: (at[0], HOW.index(at[1]))):
            cells = []
            for model in models:
                place = (model, share, how)
                values = [float(r["value"]) for r in chosen if (r["model"], r["share"], r["how"]) == place]
                cells.append(f"{fmean(values):.4f}" if values else "")
            lines.append(f"| {share} | {how} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
