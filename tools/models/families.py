"""Model families: which are served, which are refused and why; ``docs/models.md`` is written from this list.

``python tools/models/families.py`` writes the page, ``--check`` fails when it is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.images import SIGHTS

from sgl_kvevict.support import AFTER_LOAD, ATTENTION, BITS, LAYERS, MODELS, WHAT_WORKS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
WINDOW = 64


@dataclass(frozen=True)
class Family:
    """One kind of model, as a tiny random one stands for it.

    Attributes:
        name: as its makers call it.
        model_type: of the configuration in transformers.
        changes: fields of the tiny configuration that are special to it.
        reason: why it is refused; None: it is served.
        sees: it is served with images.
        flags: what the server has to be started with.
        in_stock: stock SGLang runs it on a CPU, so its answers are what is expected; else those of transformers.
        recurrent: it has recurrent layers, whose kernels SGLang has for GPUs only.
        note: what else a user should know.
        dtype: of weights and KV in the check.
    """

    name: str
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None
    sees: bool = False
    flags: tuple[str, ...] = ()
    in_stock: bool = True
    recurrent: bool = False
    note: str = ""
    dtype: str = "float32"


_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

_EXAONE = _SLIDING | {
    "sliding_window_pattern": "LLG",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},  # SGLang's default for this family
}
_GPT_OSS = {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}
_GATED_DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "full_attention_interval": 3,
}
_MAMBA = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 64}
_LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
LATENT = "latent attention (MLA); on a GPU by `triton`"
ONE_POOL = "sliding windows; SGLang keeps one pool for all layers"

IMAGES = """## Images

SGLang puts hashes where the tokens of an image are. So keys tell images apart, and image tokens are compressed like
others. Learned scores need keys as they were before RoPE. For positions of three axes (M-RoPE) the plugin keeps the
positions of each slot (12 bytes).

Videos and sound go the same way through SGLang, but no test has sent any.
"""

FAMILIES = (
    Family("Llama 2, 3; SmolLM2", "llama"),
    Family(
        "Mistral, Ministral",
        "mistral",
        {"sliding_window": WINDOW},
        note="SGLang ignores the window that some configurations name",
    ),
    Family("Qwen2, Qwen2.5", "qwen2"),
    Family("Qwen3", "qwen3"),
    Family("Qwen3 MoE", "qwen3_moe", _MOE),
    Family("Mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    Family("Phi-3, Phi-4", "phi3", {"sliding_window": None, "pad_token_id": 0}),
    Family("Gemma", "gemma"),
    Family("Granite 3", "granite"),
    Family("OLMo 2", "olmo2"),
    Family("GLM-4", "glm4", {"pad_token_id": 0}),
    Family("ERNIE 4.5", "ernie4_5"),
    Family("Arcee", "arcee"),
    Family(
        "GLM-4.5, GLM-4.6", "glm4_moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    ),
    Family("OLMoE", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 8}),
    Family("StarCoder2", "starcoder2", {"sliding_window": None}),
    Family("Seed-OSS", "seed_oss"),
    Family("Apertus", "apertus"),
    Family("Gemma 3", "gemma3_text", _SLIDING, note=ONE_POOL),
    Family("Olmo 3", "olmo3", _SLIDING, note=ONE_POOL),
    Family("Exaone 4", "exaone4", _EXAONE, in_stock=False, note=ONE_POOL),
    Family(
        "gpt-oss",
        "gpt_oss",
        _GPT_OSS,
        in_stock=False,
        note="sink logits; sliding windows on a KV pool of their own, which is not compressed",
    ),
    Family(
        "gpt-oss, on one pool",
        "gpt_oss",
        _GPT_OSS,
        flags=("--disable-hybrid-swa-memory",),
        in_stock=False,
        note="with `--disable-hybrid-swa-memory`; sliding windows and sink logits",
    ),
    Family("Qwen2-VL", "qwen2_vl", sees=True, note="text and images; M-RoPE"),
    Family("Qwen2.5-VL", "qwen2_5_vl", sees=True, note="text and images; M-RoPE"),
    Family("Qwen3-VL", "qwen3_vl", sees=True, note="text and images; interleaved M-RoPE"),
    Family("GLM-4.1V", "glm4v", sees=True, note="text and images; M-RoPE on half of a head"),
    Family("Mistral Small 3.1, 3.2", "mistral3", sees=True, note="text and images"),
    Family(
        "DeepSeek V2",
        "deepseek_v2",
        _LATENT | {"q_lora_rank": None, "norm_topk_prob": False},
        in_stock=False,
        note=LATENT,
    ),
    Family("DeepSeek V3, R1; Kimi K2", "deepseek_v3", _LATENT | _NOAUX, in_stock=False, note=LATENT),
    Family("Gemma 2", "gemma2", {"sliding_window": WINDOW}, reason=MODELS["attn_logit_softcapping"]),
    Family(
        "Llama 4",
        "llama4_text",
        {"num_local_experts": 2, "intermediate_size_mlp": 128},
        reason=MODELS["attention_chunk_size"],
    ),
    Family("DeepSeek V3.2", "deepseek_v32", _LATENT, reason=MODELS["index_topk"]),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        _GATED_DELTA | _MOE | {"shared_expert_intermediate_size": 64},
        recurrent=True,
    ),
    Family("Qwen3.5, Qwen3.6", "qwen3_5_text", _GATED_DELTA, recurrent=True),
    Family(
        "Qwen3.5 MoE",
        "qwen3_5_moe_text",
        _GATED_DELTA | _MOE | {"shared_expert_intermediate_size": 64},
        recurrent=True,
    ),
    Family(
        "Qwen3.5, Qwen3.6",
        "qwen3_5",
        _GATED_DELTA,
        sees=True,
        recurrent=True,
        note="text and images; interleaved M-RoPE on half of a head",
    ),
    Family("Falcon-H1", "falcon_h1", _MAMBA, recurrent=True),
)


def config_of(family: Family) -> Any:
    """The transformers configuration of a family's tiny model."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    sizes = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    values = sizes | {"initializer_range": 0.25, "tie_word_embeddings": False} | dict(family.changes)
    sight = SIGHTS.get(family.model_type)
    if sight is not None:
        text, vision = {"text_config": values | sight.text}, {"vision_config": dict(sight.vision)}
        values = {"initializer_range": 0.25, "tie_word_embeddings": False, **sight.fields, **text, **vision}
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if sight is None else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    config = AutoConfig.for_model(family.model_type, **values)
    config.architectures = [names[family.model_type]]
    config.dtype = family.dtype
    return config


def row_of(family: Family, *cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join([family.name, f'`{config_of(family).architectures[0]}`', *cells])} |"


def in_general(sentence: str) -> str:
    """A sentence of the table of what is not served, without facts."""
    return re.sub(r"\{f[^}]*\}", "…", sentence)


def page() -> str:
    """``docs/models.md``."""
    served = [row_of(f, f.note) for f in FAMILIES if f.reason is None and not f.recurrent]
    recurrent = [row_of(f, f.note) for f in FAMILIES if f.recurrent]
    refused = [row_of(f, f.reason) for f in FAMILIES if f.reason is not None]
    rows = {name: AFTER_LOAD[name][1] for name in AFTER_LOAD if name in LAYERS or name not in ATTENTION}
    listed = {f.reason for f in FAMILIES} | {WHAT_WORKS}
    sixteen = [f"| {name} | {in_general(sentence)} |" for name, (_, sentence) in BITS.items()]
    others = [f"| {name} | {in_general(sentence)} |" for name, sentence in rows.items() if sentence not in listed]
    return f"""# Models

Which models are served, which are refused and why. A model's attention decides, not its name. Two kinds are served:
latent attention (MLA), and causal attention over all earlier tokens or a sliding window. The second kind needs keys
and values of one width (grouped-query heads and sinks are fine). Families that are not listed are served if SGLang's
plain `RadixAttention` layers are like that. Otherwise they are refused.

* *Served*: a tiny random model of the family was compared in real servers (`make test-models`), in float32. At budget
  1.0, read from spans, it gives the greedy tokens of stock SGLang, and its log-probabilities to 0.002. Where stock has
  no CPU attention for it, transformers stands for stock. With the default configuration its prefixes are compressed.
* *Images*: the same with an image in a shared prefix. A prompt with another image finds nothing of it.
* *Refused*: the server stops at start and says why.

Llama, Mistral, Gemma 3 and gpt-oss are also compared in bfloat16, gpt-oss also with two tensor-parallel ranks.
How layers with a window are compressed: [design](design/layers.md#models-with-other-layers). This page is written by
`python tools/models/families.py`.

## Served

| family | architecture | |
|---|---|---|
{chr(10).join(served)}

## Recurrent layers: served, not seen on a GPU

In models with recurrent layers, the KV of full attention is compressed. SGLang has kernels of recurrent layers for
GPUs only. The tests use slow definitions of them (`tools/models/recurrent`). SGLang's own kernels are equal to these
in Triton's interpreter. With the definitions the families pass the checks above in a real server (`make test-models
ARGS="-k recurrent"`): with states at the ends of requests (`no_buffer`), and with snapshots on a grid (`extra_buffer`,
which allows the overlap schedule). None has run with the plugin and SGLang's own kernels on a GPU. Tree, KV pool and
pool of states are also tested with random operations. `extra_buffer_lazy` is refused.

| family | architecture | |
|---|---|---|
{chr(10).join(recurrent)}

Nemotron-H and other hybrids of full attention and recurrent layers are taken in the same way.

{IMAGES}
## Refused

| family | architecture | reason |
|---|---|---|
{chr(10).join(refused)}

Also refused, in any family (… stands for a value that the server fills in). The table is written from
`sgl_kvevict/support.py`. That file also has the settings that are refused for every model:

| what | sentence |
|---|---|
{chr(10).join(others)}

## Rows of 16 bits only

`bits: auto` means rows of 4 bits ([design](design/prefix.md#packing)). For any of these reasons rows have 16 bits:

| what | reason |
|---|---|
{chr(10).join(sixteen)}
"""


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail when the page is not up to date")
    if parser.parse_args().check:
        if PAGE.read_text(encoding="utf-8") != page():
            raise SystemExit(f"{PAGE.name} is out of date: run python tools/models/families.py")
        return
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
