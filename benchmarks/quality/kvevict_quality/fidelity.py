"""Fidelity to the full cache on real text: next-token distributions over a continuation that is given.

The server lists the ``TOP`` most probable tokens of each position. The divergence is taken over the tokens that both
sides list, with everything else as one more outcome: merging outcomes can only lower it, so it is a lower bound.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvevict_quality.archives import speeches
from kvevict_quality.corpus import prose
from kvevict_quality.sample import Prompts, Sample

if TYPE_CHECKING:  # kvpress' environment lacks what the launcher needs
    from kvevict_tools.launcher import RunningServer

TOP = 64
CONTINUATION = 128
PASSAGES = 6
_TINY = 1e-9

Distribution = dict[int, float]


@dataclass(frozen=True)
class Passage:
    """A piece of real text.

    Attributes:
        context_ids: compressed alone, the beginning of a user's message.
        continuation_ids: what follows in the text; at most half of ``min_prefix_tokens``, so it stays uncompressed.
        num_given: first tokens of the continuation that are not looked at; at least one.
    """

    context_ids: list[int]
    continuation_ids: list[int]
    num_given: int = 1


def make_passage(prompts: Prompts, task: str, tokens: int, index: int) -> Passage:
    """The ``index``-th piece of the prose, which repeats when it ends and overlaps if pieces are long; or a speech."""
    if task == "speeches":
        text = _long_speeches(tokens + CONTINUATION)[index]
    else:
        blocks = prose()
        first = index * 5 % len(blocks)
        text = "\n\n".join(blocks[first:] + blocks)
    ids = prompts.context_ids(Sample(text, ()))[: tokens + CONTINUATION]
    return Passage(ids[:tokens], ids[tokens:])


@functools.cache
def _long_speeches(tokens: int) -> tuple[str, ...]:
    """The newest speech that is long enough in each of ``PASSAGES`` parts of the list; a token has under 7 letters."""
    enough = [text for text in speeches() if len(text) > 7 * tokens]
    return tuple(enough[(i + 1) * len(enough) // PASSAGES - 1] for i in range(PASSAGES))


def distributions(server: RunningServer, passage: Passage) -> tuple[list[Distribution], float]:
    """The most probable tokens of each position that is looked at, with their log-probabilities.

    And the mean negative log-likelihood of the text itself there, nats a token.
    """
    body = {
        "input_ids": [*passage.context_ids, *passage.continuation_ids],
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(passage.context_ids),
        "top_logprobs_num": TOP,
    }
    info = json.loads(server.post("/generate", body, 600.0))["meta_info"]
    num_looked_at = len(passage.continuation_ids) - passage.num_given
    listed = [entry for entry in info["input_top_logprobs"] if entry][-num_looked_at:]
    if len(listed) != num_looked_at:
        raise RuntimeError(f"{len(listed)} positions have log-probabilities, {num_looked_at} expected")
    found = [{int(token): float(logprob) for logprob, token, *_ in entry} for entry in listed]
    own = [float(logprob) for logprob, *_ in info["input_token_logprobs"][-num_looked_at:]]
    return found, -sum(own) / len(own)


def divergence(full: Distribution, other: Distribution) -> float:
    """Kullback-Leibler divergence of ``other`` from ``full`` over the common tokens and the rest, in nats."""
    common = full.keys() & other.keys()
    pairs = [(math.exp(full[token]), math.exp(other[token])) for token in common]
    pairs.append((1 - sum(p for p, _ in pairs), 1 - sum(q for _, q in pairs)))
    return sum(p * math.log(p / max(q, _TINY)) for p, q in pairs if p > _TINY)


def agreement(full: Sequence[Distribution], other: Sequence[Distribution]) -> float:
    """Share of the positions at which both find the same token most probable."""
    same = (max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in zip(full, other, strict=True))
    return sum(same) / len(full)
