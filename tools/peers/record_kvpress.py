"""Run the presses of kvpress on the demo model and record what they keep, and the tensors they decided on.

Runs in kvpress' own environment (``make test-peers`` sets it up): ``python -m peers.record_kvpress MODEL_FOLDER``.
Each press's own forward hook compresses a cache of its own during one and the same prefill; kept positions are read
off that cache, whose key rows are looked up among the uncompressed rows. For the shortest prompt every press is also
applied as its users do (``with press(model): model(...)``), to show that this changes nothing.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvpress
import torch
from peers.cases import KEPT_SHARES, Press, make_cases
from peers.prompts import PROMPTS, Prompt
from peers.records import kept_key, record_path, records_dir, scores_key
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils import logging as transformers_logging


def main(model_folder: str) -> None:
    """Record every prompt that has no recording yet."""
    missing = [prompt for prompt in PROMPTS if not record_path(prompt.name).is_file()]
    if not missing:
        return
    for outdated in records_dir().parent.glob("*"):
        if outdated != records_dir():
            shutil.rmtree(outdated)
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    models = {
        attention: AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.float32, attn_implementation=attention
        ).eval()
        for attention in ("sdpa", "eager")
    }
    for prompt in missing:
        started = time.monotonic()
        token_ids = encode(tokenizer, prompt)
        print(f"peers: recording {prompt.name} ({token_ids.shape[1]} tokens)", flush=True)
        tensors = record(models, token_ids)
        if prompt is PROMPTS[0]:
            check_as_users_apply(models, token_ids, tensors)
        save(tensors, record_path(prompt.name))
        print(f"peers:   {time.monotonic() - started:.0f} s", flush=True)


def encode(tokenizer: Any, prompt: Prompt) -> Tensor:
    """Token ids [1, N]."""
    ids: Tensor = tokenizer(prompt.path.read_text(), return_tensors="pt", add_special_tokens=False)["input_ids"]
    if ids.shape[1] < prompt.num_tokens:
        raise ValueError(f"prompt {prompt.name} has {ids.shape[1]} tokens, needs {prompt.num_tokens}")
    return ids[:, : prompt.num_tokens]


@torch.inference_mode()
def record(models: dict[str, Any], token_ids: Tensor) -> dict[str, Tensor]:
    """All tensors of one prompt's recording."""
    cases = [(share, case) for share in KEPT_SHARES for case in make_cases(token_ids.shape[1], share)]
    presses = {repr(case.press): case.press for _, case in cases}
    tensors, outcomes = observe(models["sdpa"], token_ids, [p for p in presses.values() if not p.needs_eager])
    eager, eager_outcomes = observe(models["eager"], token_ids, [p for p in presses.values() if p.needs_eager])
    outcomes |= eager_outcomes
    tensors["accumulated"] = eager["accumulated"]
    for share, case in cases:
        outcome = outcomes[repr(case.press)]
        tensors[kept_key(share, case.name)] = torch.stack(outcome.kept)
        tensors[scores_key(share, case.name)] = torch.stack(outcome.scores)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@dataclass
class Outcome:
    """What one press did, layer by layer: kept [H, N] bool, scores [H, N]."""

    press: Any
    kept: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)


def observe(model: Any, token_ids: Tensor, presses: list[Press]) -> tuple[dict[str, Tensor], dict[str, Outcome]]:
    """One prefill: the tensors of each layer, and what each press keeps of them, by ``repr`` of the press.

    A press acts in a hook after each layer's attention and changes nothing but the cache, so all of them can look at
    the same prefill, each with a cache of its own.
    """
    outcomes = {repr(press): Outcome(build_press(press)) for press in presses}
    for outcome in outcomes.values():
        record_scores(outcome)
        outcome.press.post_init_from_model(model)
    layers: list[dict[str, Tensor]] = []

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: tuple[Tensor, Tensor | None]) -> None:
        cache = kwargs["past_key_values"].layers[module.layer_idx]
        queries = module.q_proj(kwargs["hidden_states"]).view(1, token_ids.shape[1], -1, module.head_dim)
        queries, _ = apply_rotary_pos_emb(queries.transpose(1, 2), cache.keys, *kwargs["position_embeddings"])
        layers.append(reduce_layer(queries[0], cache.keys[0], cache.values[0], output[1], module.scaling))
        places = [row_places(keys) for keys in cache.keys[0]]
        for outcome in outcomes.values():
            own = SimpleNamespace(keys=cache.keys.clone(), values=cache.values.clone())
            own_cache = SimpleNamespace(layers={module.layer_idx: own})
            outcome.press.forward_hook(module, args, {**kwargs, "past_key_values": own_cache}, output)
            outcome.kept.append(read_kept(outcome.press, module, own.keys[0], places))

    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb  # as BasePress.__call__ does
    handles = [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in model.model.layers]
    try:
        model.model(token_ids, past_key_values=DynamicCache())
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}, outcomes


def record_scores(outcome: Outcome) -> None:
    """Keep a copy of what the press's scorer returns (wrappers overwrite it)."""
    scorer = getattr(outcome.press, "press", outcome.press)
    plain_score = scorer.score

    def score(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = plain_score(*args, **kwargs)
        outcome.scores.append(result[0].float().clone())
        return result

    scorer.score = score


def reduce_layer(
    queries: Tensor, keys: Tensor, values: Tensor, weights: Tensor | None, sm_scale: float
) -> dict[str, Tensor]:
    """One layer's tensors, tokens first; ``weights`` [1, Hq, N, N] are given by the eager run only."""
    group = queries.shape[0] // keys.shape[0]
    logits = queries @ keys.repeat_interleave(group, 0).transpose(1, 2) * sm_scale
    num_tokens = logits.shape[-1]
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    lse = logits.masked_fill_(future, -torch.inf).logsumexp(-1)
    layer = {
        "queries": queries.transpose(0, 1),
        "keys": keys.transpose(0, 1),
        "values": values.transpose(0, 1),
        "lse": lse.T,
    }
    if weights is not None:
        layer["accumulated"] = weights[0].sum(1).view(keys.shape[0], group, num_tokens).mean(1)
    return layer


def build_press(press: Press) -> Any:
    """The press object."""
    arguments = dict(press.options)
    if press.inner is not None:
        arguments["press"] = build_press(press.inner)
    return getattr(kvpress, press.name)(**arguments)


def row_bytes(rows: Tensor) -> list[bytes]:
    """Each row of a float32 matrix as bytes."""
    array = rows.contiguous().numpy()
    data: list[bytes] = array.view(f"V{array.shape[1] * array.itemsize}").ravel().tolist()
    return data


def row_places(rows: Tensor) -> dict[bytes, int]:
    """Index of each row by its content."""
    places = {row: index for index, row in enumerate(row_bytes(rows))}
    if len(places) != rows.shape[0]:
        raise ValueError("two tokens have the same key: positions cannot be told from the cache")
    return places


def read_kept(press: Any, module: Any, keys: Tensor, places: list[dict[bytes, int]]) -> Tensor:
    """Kept positions of a layer as a mask [H, N]: the rows ``keys`` [H, M, D] of a compressed cache, looked up.

    AdaKV leaves the cache as it is and masks keys while decoding: there, what is not masked.
    """
    mask = torch.zeros(len(places), len(places[0]), dtype=torch.bool)
    if isinstance(press, kvpress.AdaKVPress):
        _, heads, positions = module.masked_key_indices
        module.masked_key_indices = None
        mask[heads, positions] = True
        return ~mask
    for head, place in enumerate(places):
        mask[head, [place[row] for row in row_bytes(keys[head])]] = True
        if int(mask[head].sum()) != keys.shape[1]:
            raise ValueError("a press kept a token twice")
    return mask


@torch.inference_mode()
def check_as_users_apply(models: dict[str, Any], token_ids: Tensor, tensors: dict[str, Tensor]) -> None:
    """Every press once in its official form, ``with press(model): model(...)``: it must keep the same tokens."""
    share, checked = KEPT_SHARES[-1], set()
    uncompressed = {name: prefill(model, token_ids) for name, model in models.items()}
    for case in make_cases(token_ids.shape[1], share):
        if repr(case.press) in checked:
            continue
        checked.add(repr(case.press))
        attention = "eager" if case.press.needs_eager else "sdpa"
        model, press = models[attention], build_press(case.press)
        with press(model):
            compressed = prefill(model, token_ids)
        recorded = tensors[kept_key(share, case.name)]
        for index, layer in enumerate(model.model.layers):
            places = [row_places(keys) for keys in uncompressed[attention].layers[index].keys[0]]
            kept = read_kept(press, layer.self_attn, compressed.layers[index].keys[0], places)
            if not torch.equal(kept, recorded[index]):
                raise ValueError(f"{case.press} keeps other tokens of layer {index} in its official form")


def prefill(model: Any, token_ids: Tensor) -> Any:
    """The cache after the prompt."""
    cache = DynamicCache()
    model.model(token_ids, past_key_values=cache)
    return cache


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write the file in one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    save_file(tensors, scratch)
    scratch.rename(path)


if __name__ == "__main__":
    main(sys.argv[1])
