"""Ada-KV: what a prompt holds, and how long the attention of a decode step takes, at equal budget (Fig. 7)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from kvevict_quality.sample import Prompts
from policy_bench.prompt import DemoModel, PrefilledPrompt
from torch import Tensor

from paper_bench.compressed import Compressible, Kept
from paper_bench.results import Results
from paper_bench.texts import question_at_the_end
from sgl_kvevict.attention import AttentionBatch, build_attention
from sgl_kvevict.segments import Segment, SegmentPacker, Sources, TokenRange

PAPER = "ada-kv"
#: Entries per head, the window's among them, as in the paper.
BUDGET = 1024
LENGTHS = (2048, 4096)
NUM_TEXTS = 4
REPEATS = 40
FULL = "full cache"
CASES: Mapping[str, tuple[str, dict[str, Any]] | None] = {
    FULL: None,
    "snapkv": ("snapkv@paper", {}),
    "ada-snapkv, formula": ("ada-snapkv@paper", {"safeguard": "paper"}),
    "ada-snapkv, code": ("ada-snapkv@paper", {"safeguard": "authors_code"}),
}


class Step:
    """The attention of a decode step, in all layers, over what a prompt was compressed to.

    Its token is the prompt's last one. Everything lies in a pool of its own.

    Args:
        prompt: after its prefill.
        kept: of the tokens before the tail; None: all.
    """

    def __init__(self, prompt: PrefilledPrompt, kept: Kept | None) -> None:
        self.prompt = prompt
        k, v = prompt.k_arena.clone(), prompt.v_arena.clone()
        path, self.num_slots = (), prompt.num_tokens
        if kept is not None:
            decision, tokens = kept.decision, prompt.token_slots[: kept.num_range]
            sources = Sources(prompt.geometry, [TokenRange(tokens, 0)], decision.selection)
            packer = SegmentPacker(prompt.geometry, k, v)
            written = packer.rewrite(sources, sources.fewest_slots, merge=decision.merge)
            segment, freed = Segment(prompt.geometry, sources.start, sources.end, written.packed), written.freed
            path, self.num_slots = segment.runs(), prompt.num_tokens - freed.numel()
        self.batch = AttentionBatch(
            paths=(path,),
            seq_lens=[prompt.num_tokens],
            extend_lens=None,
            req_pool_indices=torch.zeros(1, dtype=torch.int64),
            req_to_token=prompt.token_slots.int()[None],
        )
        self.attention = build_attention("numba", prompt.geometry, k, v)
        self.attention.plan(self.batch)

    def run(self) -> list[Tensor]:
        """Outputs of all layers, [1, num_qo_heads, head_dim] each."""
        scale, queries = self.prompt.sm_scale, self.prompt.queries[:, -1:]
        return [self.attention.run(layer, rows, scale)[0] for layer, rows in enumerate(queries)]


@torch.inference_mode()
def measure(demo: DemoModel, prompts: Prompts, results: Results) -> None:
    """All lengths and texts that are not there yet; the cases take turns, and of each the lower quartile counts."""
    for tokens in LENGTHS:
        held, milliseconds = f"share of the slots, {tokens} tokens", f"attention of a step, ms, {tokens} tokens"
        for index in range(NUM_TEXTS):
            if results.has(PAPER, milliseconds, list(CASES)[-1], index):
                continue
            compressible = Compressible(demo.prefill(question_at_the_end(prompts, tokens, index).prompt))
            steps = {
                name: Step(compressible.prompt, None if case is None else compressible.keep(case[0], BUDGET, case[1]))
                for name, case in CASES.items()
            }
            times: dict[str, list[float]] = {name: [] for name in steps}
            for repeat in range(REPEATS + 1):
                for name, step in steps.items():
                    begin = time.perf_counter()
                    step.run()
                    if repeat:
                        times[name].append(time.perf_counter() - begin)
            for name, step in steps.items():
                share = step.num_slots / compressible.prompt.num_tokens
                results.add(PAPER, held, name, index, share)
                results.add(PAPER, milliseconds, name, index, 1000 * sorted(times[name])[REPEATS // 4])
            results.write()
