"""Draw what each policy keeps of the same document: layers x tokens, one small picture per policy.

Run: python benchmarks/policies/draw_kept.py [--tokens 2000] [--budget 0.2] [--out docs/results/policies-kept.png]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the servers

import torch
from policy_bench.measure import PolicyRun
from policy_bench.prompt import DemoModel, PrefilledPrompt
from torch import Tensor

from kvevict_tools.models import ensure_model
from sgl_kvevict.policies import Signal, build_policy, list_policies

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "policies-kept.png"
NUM_BINS = 250
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("chunkkv", {"reuse_layers": 5}),
    ("snapkv", {"budget_rule": "all-layers"}),
]


def cases() -> list[tuple[str, dict[str, Any]]]:
    """All policies that need nothing but the prompt's own forward pass, and two variants."""
    found: list[tuple[str, dict[str, Any]]] = []
    for info in list_policies():
        policy = build_policy(info.name, {})
        if policy is not None and Signal.LEARNED_SCORES not in policy.needs:
            found.append((info.name, {}))
    return found + VARIANTS


@torch.inference_mode()
def kept_share(prompt: PrefilledPrompt, name: str, options: dict[str, Any], budget: float) -> Tensor:
    """Share kept over all heads of a layer: [num_layers, NUM_BINS]."""
    run = PolicyRun(prompt, name, options, budget)
    kept = run.decide(run.observe())[0].kept
    assert kept.numbers is not None
    num_layers, num_heads = kept.lens.shape
    num_tokens = run.token_slots.numel()
    layers = torch.arange(num_layers).repeat_interleave(kept.lens.sum(1).long())
    bins = kept.numbers % num_tokens * NUM_BINS // num_tokens
    counts = torch.bincount(layers * NUM_BINS + bins, minlength=num_layers * NUM_BINS).view(num_layers, NUM_BINS)
    sizes = torch.bincount(torch.arange(num_tokens) * NUM_BINS // num_tokens, minlength=NUM_BINS)
    return torch.div(counts, num_heads * sizes)


def draw(shares: dict[str, Tensor], num_tokens: int, title: str, path: Path) -> None:
    """Small multiples with one scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 3
    rows = -(-len(shares) // columns)
    figure = Figure(figsize=(14, 2.1 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True)
    for place, (name, share) in zip(axes.flat, shares.items(), strict=False):
        extent = (0, num_tokens, share.shape[0], 0)
        image = place.imshow(share, aspect="auto", interpolation="nearest", vmin=0, vmax=1, extent=extent)
        place.set_title(name, fontsize=10)
    for place in axes.flat[len(shares) :]:
        place.set_visible(False)
    figure.supxlabel("token position")
    figure.supylabel("layer")
    figure.suptitle(title)
    figure.colorbar(image, ax=axes, label="share of the entries kept", shrink=0.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    """Prefill once, let every policy decide, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000, help="length of the document's part")
    parser.add_argument("--budget", type=float, default=0.2, help="share of entries kept")
    parser.add_argument("--out", type=Path, default=OUT, help="PNG file to write")
    args = parser.parse_args()
    model = DemoModel(ensure_model())
    prompt = model.prefill(model.encode(args.tokens))
    shares = {}
    for name, options in cases():
        label = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        shares[label] = kept_share(prompt, name, options, args.budget)
    title = f"SmolLM2-135M-Instruct, the station handbook's first {args.tokens:,} tokens, budget {args.budget}"
    draw(shares, args.tokens, title, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
