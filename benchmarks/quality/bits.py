"""What few bits cost: divergence of a text's continuation when keys and values of its context are stored in them.

Run: python benchmarks/quality/bits.py [--models demo qwen-0.5b qwen-1.5b]; writes docs/results/quality/bits.csv and
bits.md. Outside the server, in float32: a context is read once, then its continuation once for each format.

Two comparisons: every entry in 4 bits, or a part of each; and shares of the bytes of 16 bits, spent on entries of 16 or
of 4 bits, among them the shares to which prefixes shrink in turn. Rows that are measured again take the place of
earlier ones. Scores, and statistics of channels, are those that the package ships; the tested texts are others than
those that they were learned from.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from kvevict_quality.rows import ROOT
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvevict_kernels.rotary import Rotary
from kvevict_kernels.row_codec import RowStatistics, decode_rows, encode_rows
from kvevict_tools.csv_rows import read_rows, write_rows
from kvevict_tools.models import made_model
from sgl_kvevict.config import Bits, KVEvictConfig
from sgl_kvevict.distill.features import CachedRange
from sgl_kvevict.distill.files import ModelIdentity, files_of, load_learned
from sgl_kvevict.distill.fingerprint import fingerprint_of
from sgl_kvevict.distill.weights import ScoreWeights, score_range
from sgl_kvevict.policies.methods.distilled import relative_norms

RESULTS = ROOT / "docs" / "results" / "quality" / "bits.csv"
ATTENTION = "kvevict_bits"
CONTEXT, CONTINUATION = 1024, 128
NUM_SINKS, TAIL = 4, 32
"""First tokens of a path, always kept and in 16 bits, and last ones, always kept; as configured by default."""
FAR = {"SmolLM2-135M-Instruct": 6000}
"""Position to which a whole text is moved, by model: RoPE has turned its keys further than those of any text that
statistics were learned from."""
FAR_POSITION = 24_000


def texts() -> dict[str, str]:
    """What is tested: a handbook, a novel, and code; none of them is learned from."""
    return {
        "handbook": (ROOT / "examples" / "data" / "station_handbook.txt").read_text(encoding="utf-8"),
        "novel": (ROOT / "tools" / "peers" / "alice.txt").read_text(encoding="utf-8"),
        "code": inspect.getsource(inspect)[20_000:],
    }


@dataclass(frozen=True)
class Context:
    """A context that was read.

    Attributes:
        k: [num_layers, num_kv_heads, num_tokens, head_dim], float32, after RoPE.
        v: likewise.
        continuation: ids of what follows in the text.
        start: position of its first token.
    """

    k: Tensor
    v: Tensor
    continuation: list[int]
    start: int


class Reader:
    """A model in transformers, which reads contexts, and continuations with any keys and values in their place."""

    num_positions = CONTEXT

    def __init__(self, folder: Path) -> None:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, self._attend)
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config
        self.num_layers, self.num_kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self._stored: tuple[Tensor, Tensor, Tensor | None] | None = None

    @torch.inference_mode()
    def read(self, ids: Sequence[int], start: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of a text at positions from ``start`` on, as in :class:`Context`."""
        self.model.set_attn_implementation("sdpa")
        cache = DynamicCache()
        positions = torch.arange(start, start + len(ids))[None]
        self.model.model(torch.tensor([list(ids)]), position_ids=positions, past_key_values=cache)
        layers: list[Any] = cache.layers
        return torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers])

    def context(self, text: str, start: int) -> Context:
        """Read the first ``CONTEXT`` tokens of a text."""
        ids = list(self.tokenizer.encode(text[: 10 * (CONTEXT + CONTINUATION)]))[: CONTEXT + CONTINUATION]
        assert len(ids) == CONTEXT + CONTINUATION
        return Context(*self.read(ids[:CONTEXT], start), ids[CONTEXT:], start)

    @torch.inference_mode()
    def predict(self, context: Context, k: Tensor, v: Tensor, kept: Tensor | None) -> Tensor:
        """Log-probabilities [CONTINUATION, words] with these keys and values of the context.

        ``kept``, [num_layers, num_kv_heads, num_tokens], bool: entries that are there; None: all.
        """
        self.model.set_attn_implementation(ATTENTION)
        self._stored = k, v, kept
        begin = context.start + k.shape[2]
        positions = torch.arange(begin, begin + len(context.continuation))[None]
        hidden = self.model.model(torch.tensor([context.continuation]), position_ids=positions, use_cache=False)
        logits: Tensor = self.model.lm_head(hidden.last_hidden_state[0])
        return logits.log_softmax(-1)

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """Attention as transformers calls it, of [1, num_heads, num_tokens, head_dim], to what is stored and itself."""
        assert self._stored is not None
        stored_k, stored_v, kept = self._stored
        layer, num_new, groups = module.layer_idx, query.shape[2], query.shape[1] // key.shape[1]
        rows = query[0].unflatten(0, (-1, groups)).flatten(1, 2)  # [num_kv_heads, groups * num_new, head_dim]
        to_stored = rows @ stored_k[layer].mT * scaling
        if kept is not None:
            to_stored.masked_fill_(~kept[layer][:, None], float("-inf"))
        is_later = torch.ones(num_new, num_new, dtype=torch.bool).triu(1).repeat(groups, 1)
        to_new = (rows @ key[0].mT * scaling).masked_fill_(is_later, float("-inf"))
        weights = torch.cat([to_stored, to_new], dim=-1).softmax(-1)
        out = weights[..., :-num_new] @ stored_v[layer] + weights[..., -num_new:] @ value[0]
        return out.unflatten(1, (groups, num_new)).flatten(0, 1).transpose(0, 1)[None], None

    def rotary(self) -> Rotary:
        """The model's rotary embedding, for ``num_positions``."""
        cos, sin = self.model.model.rotary_emb(torch.zeros(1), torch.arange(self.num_positions)[None])
        half = self.head_dim // 2
        return Rotary(torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1), is_neox=True)


def as_range(k: Tensor, v: Tensor, end: int) -> CachedRange:
    """The first ``end`` tokens as a server has them."""
    return CachedRange(k.transpose(1, 2), v.transpose(1, 2), torch.arange(end), 0, end)


def learned(reader: Reader) -> tuple[ScoreWeights, RowStatistics]:
    """What the package ships of the model; SystemExit if there is none."""
    sizes = reader.num_layers, reader.num_kv_heads, reader.head_dim
    fingerprint = fingerprint_of(reader.folder) or ""
    identity = ModelIdentity(reader.folder.name, fingerprint, *sizes, reader.rotary())
    known = next((load_learned(path, identity) for path in files_of(identity)[-1:] if path.is_file()), None)
    if known is None or known.scores is None or known.statistics is None:
        raise SystemExit(f"models: got {reader.folder.name}; allowed: models of which the package has learned")
    return known.scores, known.statistics


def worth(reader: Reader, context: Context, weights: ScoreWeights) -> Tensor:
    """[num_layers, num_kv_heads, CONTEXT], float32: learned scores of the entries, as the default policy's.

    From the cache alone; the attention of the prompt's last queries is left out. First and last tokens are kept.
    """
    tokens = as_range(context.k, context.v, CONTEXT)
    norms = torch.stack([relative_norms(values[:CONTEXT]) for values in tokens.v_arena])
    scores = score_range(weights.cache, tokens, reader.rotary()) + norms
    scores[..., :NUM_SINKS] = float("inf")
    scores[..., -TAIL:] = torch.finfo(scores.dtype).max
    return scores


FORMATS = {"4": "kv", "K 4, V 16": "k", "K 16, V 4": "v", "4; the first tokens, too": "kv"}
"""What is stored in 4 bits, by the name of the format; the first tokens are not, unless it says so."""
RUNGS = KVEvictConfig().shares
"""Shares to which prefixes shrink in turn."""
SHARES = sorted({0.5, 0.3, 0.25, 0.1, *RUNGS}, reverse=True)


def kept_entries(scores: Tensor, share: float, bits: Bits, sinks: int = NUM_SINKS) -> Tensor:
    """Which entries a share of the bytes keeps, bool: the best over all layers and heads; the first tokens come first.

    ``scores`` as from :func:`worth`; ``sinks``: how many of the tokens are the first ones of a path.
    """
    num_tokens, place = scores.shape[2], torch.empty(scores.numel(), dtype=torch.int64)
    place[scores.flatten().argsort(descending=True)] = torch.arange(scores.numel())
    config = KVEvictConfig(bits=bits, sink_tokens=sinks)
    kept = config.tokens_kept(config.num_slots(num_tokens, share=share), num_tokens)
    return place.view(scores.shape) < sum(kept.values()) * scores.shape[0] * scores.shape[1]


def read_back(rows: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Keys or values, [num_layers, num_kv_heads, num_tokens, head_dim], as they are read after rows of 4 bits."""
    stored = torch.empty_like(rows)
    for layer, head in itertools.product(range(rows.shape[0]), range(rows.shape[1])):
        own = mean[layer, head], scale[layer, head]
        stored[layer, head] = decode_rows(encode_rows(rows[layer, head], *own), *own)
    return stored


def in_four(context: Context, s: RowStatistics, *, first: int = NUM_SINKS) -> tuple[Tensor, Tensor]:
    """Keys and values of a context in 4 bits, but those of the first tokens."""
    stored = read_back(context.k, s.k_mean, s.k_scale), read_back(context.v, s.v_mean, s.v_scale)
    for whole, rows in zip((context.k, context.v), stored, strict=True):
        rows[:, :, :first] = whole[:, :, :first]
    return stored


def measured(
    reader: Reader, context: Context, full: Tensor, stored: tuple[Tensor, Tensor], kept: Tensor | None = None
) -> dict[str, str]:
    """Divergence from the full cache (nats a token, whole vocabulary) and share of the same most probable tokens."""
    found = reader.predict(context, *stored, kept)
    divergence = (full.exp() * (full - found)).sum(-1).mean()
    same = (full.argmax(-1) == found.argmax(-1)).float().mean()
    return {"kl": f"{divergence:.5f}", "same": f"{same:.3f}"}


def format_rows(reader: Reader, context: Context, statistics: RowStatistics) -> Iterator[dict[str, str]]:
    """Every entry of a context in each format."""
    full = reader.predict(context, context.k, context.v, None)
    for name, narrow in FORMATS.items():
        k, v = in_four(context, statistics, first=0 if "first" in name else NUM_SINKS)
        stored = k if "k" in narrow else context.k, v if "v" in narrow else context.v
        yield {"format": name, "share": "", "kept": "1"} | measured(reader, context, full, stored)


def share_rows(
    reader: Reader, context: Context, scores: Tensor, statistics: RowStatistics, shares: Sequence[float]
) -> Iterator[dict[str, str]]:
    """Shares of the bytes of a context, spent on rows of 16 and of 4 bits; ``scores`` as from :func:`worth`."""
    full = reader.predict(context, context.k, context.v, None)
    of_width: dict[Bits, tuple[Tensor, Tensor]] = {16: (context.k, context.v), "auto": in_four(context, statistics)}
    for share, (bits, stored) in itertools.product(shares, of_width.items()):
        kept = kept_entries(scores, share, bits)
        where = {"format": str(bits), "share": f"{share:g}", "kept": f"{float(kept.float().mean()):.3f}"}
        yield where | measured(reader, context, full, stored, kept)


def model_rows(args: argparse.Namespace, model: str) -> Iterator[dict[str, str]]:
    """All rows of a model."""
    reader = Reader(Path(made_model(model)))
    started = time.monotonic()
    weights, statistics = learned(reader)
    for start in (0, FAR.get(reader.folder.name, FAR_POSITION)):
        for name, text in texts().items():
            context = reader.context(text, start)
            where = {"model": reader.folder.name, "text": name, "first position": str(start)}
            for row in format_rows(reader, context, statistics):
                yield where | row
            print(f"{time.monotonic() - started:5.0f} s  {model}: {name} at {start}, formats", flush=True)
            if start == 0:
                scores = worth(reader, context, weights)
                for row in share_rows(reader, context, scores, statistics, args.shares):
                    yield where | row
                print(f"{time.monotonic() - started:5.0f} s  {model}: {name}, shares", flush=True)


def main() -> None:
    """Measure models, and write the table of all rows that there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["demo", "qwen-0.5b", "qwen-1.5b"])
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for model in args.models:
        new = {key_of(row): row for row in model_rows(args, model)}
        rows = list(({key_of(row): row for row in read_rows(RESULTS)} | new).values())
        write_rows(RESULTS, rows[0], rows)
    RESULTS.with_suffix(".md").write_text(page(read_rows(RESULTS)), encoding="utf-8")


def key_of(row: dict[str, str]) -> tuple[str, ...]:
    """What identifies a measurement."""
    return tuple(row[name] for name in ("model", "text", "first position", "format", "share"))


def page(rows: Sequence[dict[str, str]]) -> str:
    """Both tables, means over the texts."""
    models = list(dict.fromkeys(row["model"] for row in rows))

    def cells(chosen: Sequence[dict[str, str]], *, far: bool = False) -> str:
        means = []
        for model in models:
            values = [
                float(row["kl"]) for row in chosen if row["model"] == model and (row["first position"] != "0") == far
            ]
            means.append(f"{fmean(values):.4f}" if values else "")
        return " | ".join(means)

    heads = " | ".join(models)
    formats = list(dict.fromkeys(row["format"] for row in rows if not row["share"]))
    lines = [
        "# What few bits cost",
        "",
        "Written by `python benchmarks/quality/bits.py`: divergence (nats a token, whole vocabulary, mean of 3 texts)",
        f"of the {CONTINUATION} tokens after a context of {CONTEXT:,}, from those of a full cache in float32. Rows of",
        "4 bits: rotated, normalised by the model's means and scales, both learned from other texts.",
        "",
        "## Every entry in 4 bits",
        "",
        f"The first {NUM_SINKS} tokens, attention sinks, stay in 16 bits unless said otherwise. *Far*: the whole text",
        "at other positions, to which RoPE turns keys further than in any text that was learned from:",
        f"{FAR_POSITION:,}; SmolLM2: {FAR['SmolLM2-135M-Instruct']:,}.",
        "",
        f"| bits of a number | {heads} | {' | '.join(f'{model}, far' for model in models)} |",
        "|---|" + "--:|" * (2 * len(models)),
    ]
    for name in formats:
        chosen = [row for row in rows if (row["format"], row["share"]) == (name, "")]
        lines.append(f"| {name} | {cells(chosen)} | {cells(chosen, far=True)} |")
    lines += [
        "",
        "## Bits or entries: a share of the bytes",
        "",
        "Entries are kept by learned scores, from the cache alone, over all layers and heads. The first",
        f"{NUM_SINKS} tokens stay in 16 bits, the last {TAIL} are kept; both count. *auto*: 4 bits, as by default.",
        "",
        f"| share of bytes | bits | entries kept | {heads} |",
        "|--:|---|--:|" + "--:|" * len(models),
    ]
    spent = dict.fromkeys((row["share"], row["format"]) for row in rows if row["share"])
    for share, name in sorted(spent, key=lambda each: -float(each[0])):
        chosen = [row for row in rows if (row["share"], row["format"]) == (share, name)]
        lines.append(f"| {share} | {name} | {chosen[0]['kept']} | {cells(chosen)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
