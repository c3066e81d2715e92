"""Ada-KV: how concentrated heads are (Fig. 1), and the eviction loss of adaptive against uniform heads (Fig. 3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from policy_bench.prompt import DemoModel, PrefilledPrompt
from torch import Tensor

from paper_bench.compressed import Compressible, Kept
from paper_bench.results import Results
from paper_bench.texts import Text

PAPER = "ada-kv"
WINDOW = 32
BUDGETS = (0.2, 0.4)
#: Adaptive heads: the paper's formula (20 % adaptive), its released code's (80 %), and Algorithm 1 alone.
ADAPTIVE: dict[str, dict[str, Any]] = {
    "formula": {"safeguard": "paper"},
    "code": {"safeguard": "authors_code"},
    "algorithm 1": {"budget_rule": "all-heads"},
}


def measure(demo: DemoModel, texts: list[Text], results: Results) -> None:
    """All numbers of all texts that are not there yet."""
    weights = [layer.self_attn.o_proj.weight.detach().float() for layer in demo.model.model.layers]
    for index, text in enumerate(texts):
        if results.has(PAPER, f"loss ratio, {BUDGETS[-1]:g}", list(ADAPTIVE)[-1], index):
            continue
        whole = demo.prefill(torch.cat((text.prompt, text.continuation[None]), 1))
        num_tokens = text.prompt.shape[1]
        seen = replace(whole, queries=whole.queries[:, :num_tokens], lse=whole.lse[:, :num_tokens])
        _concentration(seen, index, results)
        compressible = Compressible(seen)
        for budget in BUDGETS:
            uniform = losses(whole, num_tokens, compressible.keep("snapkv@paper", budget), weights)
            for name, options in ADAPTIVE.items():
                kept = compressible.keep("ada-snapkv@paper", budget, options)
                ratio = losses(whole, num_tokens, kept, weights) / uniform
                results.add(PAPER, f"loss ratio, {budget:g}", name, index, float(ratio.mean()))
                results.add(
                    PAPER, f"layers with lower loss, {budget:g}", name, index, float((ratio < 1).float().mean())
                )
                for layer, value in enumerate(ratio.tolist()):
                    results.add(PAPER, f"loss ratio by layer, {budget:g}, {name}", f"{layer:02d}", index, value)
        results.write()


def losses(whole: PrefilledPrompt, num_tokens: int, kept: Kept, output_weights: list[Tensor]) -> Tensor:
    """L1 norm of what eviction changes of a layer's attention output, mean over the tokens after the prompt.

    Every layer gets the inputs of the full cache, as in the paper's Eq. 4, 6 and 8.

    Returns:
        [num_layers], float32.
    """
    total = whole.num_tokens
    later = torch.arange(num_tokens, total)
    causal = torch.arange(total) <= later[:, None]
    found = []
    for layer, weight in enumerate(output_weights):
        keys = whole.k_arena[layer, 1:].float().transpose(0, 1)  # [H, T, D]
        values = whole.v_arena[layer, 1:].float().transpose(0, 1)
        group = whole.geometry.num_qo_heads // whole.geometry.num_kv_heads
        queries = whole.queries[layer, num_tokens:].float().transpose(0, 1)  # [Hq, c, D]
        logits = queries @ keys.repeat_interleave(group, 0).transpose(1, 2) * whole.sm_scale
        logits = logits.masked_fill(~causal, -torch.inf)
        evicted = torch.zeros(keys.shape[0], total, dtype=torch.bool)
        evicted[:, : kept.num_range] = ~kept.mask[layer]
        less = logits.masked_fill(evicted.repeat_interleave(group, 0)[:, None], -torch.inf)
        change = (logits.softmax(-1) - less.softmax(-1)) @ values.repeat_interleave(group, 0)  # [Hq, c, D]
        found.append((change.transpose(0, 1).flatten(1) @ weight.T).abs().sum(-1).mean())
    return torch.stack(found)


def _concentration(prompt: PrefilledPrompt, index: int, results: Results) -> None:
    """Share of the tokens before the window that hold 95 % of the attention which the window pays to them."""
    past = prompt.num_tokens - WINDOW
    group = prompt.geometry.num_qo_heads // prompt.geometry.num_kv_heads
    needed = []
    for layer in range(prompt.geometry.num_layers):
        keys = prompt.k_arena[layer, 1 : past + 1].float().transpose(0, 1).repeat_interleave(group, 0)
        queries = prompt.queries[layer, past:].float().transpose(0, 1)
        logits = queries @ keys.transpose(1, 2) * prompt.sm_scale - prompt.lse[layer, past:].T[..., None]
        mass = logits.exp().mean(1).sort(-1, descending=True).values.cumsum(-1)
        needed.append((mass < 0.95 * mass[:, -1:]).sum(-1) + 1)
    share = torch.stack(needed).flatten() / past
    results.add(PAPER, "tokens for 95 % of the mass", "median head", index, float(share.median()))
    results.add(PAPER, "tokens for 95 % of the mass", "widest head", index, float(share.max()))
    for limit in (0.05, 0.2):
        results.add(
            PAPER, "heads with 95 % of their mass", f"in {limit:.0%}", index, float((share <= limit).float().mean())
        )
