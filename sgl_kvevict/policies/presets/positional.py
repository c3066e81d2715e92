"""StreamingLLM: sinks and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.presets.budget import BudgetOptions
from sgl_kvevict.policies.presets.entry import PolicyEntry
from sgl_kvevict.policies.scorers import PositionScorer
from sgl_kvevict.policies.selectors import TopKSelector


@dataclass(frozen=True)
class StreamingOptions(BudgetOptions):
    """Options of ``streaming-llm``."""

    num_sink_tokens: int = option(4, "first tokens of a path that every head keeps", minimum=0)


def _streaming_llm(options: StreamingOptions) -> Policy:
    return Policy(
        "streaming-llm",
        PositionScorer(),
        options.allocator(),
        TopKSelector(),
        num_sink_tokens=options.num_sink_tokens,
    )


STREAMING_LLM = PolicyEntry(
    "streaming-llm",
    "first (sink) tokens and the most recent ones, the same in every head",
    StreamingOptions,
    _streaming_llm,
)
