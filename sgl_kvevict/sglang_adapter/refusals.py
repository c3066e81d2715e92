"""Models, KV pools and settings that are not supported: every function returns one sentence per reason.

They are checked after the model is loaded; checks before that are in ``start_checks.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from torch import nn

from kvevict_kernels.device_limits import limits_of
from kvevict_kernels.key_scores import largest_kernel_size, pools_rows
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.machine import BUILD_TOOLS, check_machine, read_machine
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import WindowAttentionScorer
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.sglang_adapter.settings import ServerSettings
from sgl_kvevict.sglang_adapter.start_checks import MODEL_KEYS, WHAT_WORKS

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


_MODEL_CHECKS: tuple[tuple[Callable[[ModelConfig], bool], str], ...] = (
    (lambda m: is_deepseek_dsa(m.hf_text_config), MODEL_KEYS["index_topk"]),
    (lambda m: m.is_encoder_decoder, MODEL_KEYS["is_encoder_decoder"]),
    (lambda m: bool(m.attention_chunk_size), MODEL_KEYS["attention_chunk_size"]),
    (
        lambda m: bool(getattr(m.hf_text_config, "attn_logit_softcapping", None)),
        MODEL_KEYS["attn_logit_softcapping"],
    ),
    (
        lambda m: m.attention_arch == AttentionArch.MHA and m.head_dim != m.v_head_dim,
        "the model's keys and values have different widths, and a head slot has one",
    ),
)


def model_reasons(model_config: ModelConfig) -> list[str]:
    """Reasons why a model is not served, each with what works instead."""
    reasons = [reason for applies, reason in _MODEL_CHECKS if applies(model_config)]
    return [*reasons, WHAT_WORKS] if reasons else []


def place_reasons(
    config: KVEvictConfig, policy: Policy | None, ctx: TreeCacheBuildContext, settings: ServerSettings
) -> list[str]:
    """Settings refused with a separate sliding-window pool or recurrent layers.

    Prompts of such a model continue a cached prefix only where a window, or a state, is stored.
    """
    reasons = []
    if ctx.is_hybrid_swa and ctx.full_tokens_per_layer == 0:
        reasons.append("every layer of the model has a sliding window and one KV pool: there is nothing to compress")
    if ctx.is_hybrid_ssm and ctx.params.enable_mamba_extra_buffer_lazy:
        reasons.append(
            "--mamba-radix-cache-strategy is 'extra_buffer_lazy', allowed are 'no_buffer' and 'extra_buffer': in its "
            "decode steps a request gives up the state of the prefix that it reads"
        )
    if ctx.is_hybrid_ssm and settings.speculative_algorithm is not None:
        reasons.append(
            "--speculative-algorithm: the model has recurrent layers, and a verification step leaves a state for each "
            "draft; were the tree given one of a rejected draft, every prompt that continues there would be answered "
            "wrongly, and which one it gets is chosen by kernels that need a GPU"
        )
    if ctx.is_hybrid_ssm and config.decode_block is not None:
        reasons.append("decode_block: a recurrent state is kept for the end of an answer, not for the end of a block")
    if not (ctx.is_hybrid_swa or ctx.is_hybrid_ssm):
        return reasons
    kind = "recurrent layers" if ctx.is_hybrid_ssm else "a KV pool for layers with a sliding window"
    if config.store is not None:
        reasons.append(f"store: the model has {kind}, whose part of a prefix is not stored")
    if config.host_bytes:
        reasons.append(f"host_bytes: the model has {kind}, whose part of a prefix is not copied to the host")
    if policy is not None and not policy.splittable:
        reasons.append(
            f"policy {policy.name!r} merges tokens into earlier ones, so its prefixes cannot be cut; the model has "
            f"{kind}, so a prompt may continue in the middle of one"
        )
    return reasons


def image_reasons(policy: Policy | None, model: nn.Module, model_config: ModelConfig) -> list[str]:
    """Settings refused for a model that takes images."""
    if not model_config.is_multimodal:
        return []
    reasons = []
    if hasattr(model, "prepare_attn_masks"):
        reasons.append(
            "an image's tokens attend to later ones of the same image, which causal attention would leave out; "
            "--language-model-only serves the model's text"
        )
    if model_config.model_is_mrope and policy is not None and Signal.QUERY_MOMENTS in policy.needs:
        reasons.append(
            f"policy {policy.name!r} turns queries to the positions that follow, which after an image are not those "
            "that it counts; --language-model-only serves the model's text"
        )
    return reasons


def machine_reasons(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Missing requirements of a process on ``device`` and a model of ``dtype``; optional parts are only logged."""
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    reasons = []
    for check in check_machine(
        read_machine([] if index is None else [index]), device.type, str(dtype).removeprefix("torch.")
    ):
        sentence = f"{check.name}: {check.found} ({check.mend})"
        if check.state == "missing" and check.name not in BUILD_TOOLS:
            reasons.append(sentence)
        elif check.state != "ok" and "memory" not in check.name:  # the pool is allocated already
            logger.warning("kvevict: %s", sentence)
    return reasons


def layer_reasons(model: nn.Module) -> list[str]:
    """Unsupported variants of attention in the model."""
    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    reasons = []
    if any(layer.logit_cap for layer in layers):
        reasons.append("a layer caps its attention logits, which our kernels do not")
    if any(layer.is_cross_attention or layer.attn_type != AttentionType.DECODER for layer in layers):
        reasons.append("a layer's attention is not causal self-attention, and a span holds what is before a query")
    return reasons


def policy_reasons(policy: Policy | None, head_dim: int, device: torch.device) -> list[str]:
    """Whether the device's kernels can pool as the policy asks."""
    scorer = None if policy is None else policy.scorer
    if device.type != "cuda" or not isinstance(scorer, WindowAttentionScorer):
        return []
    largest = largest_kernel_size(head_dim, limits_of(device))
    if scorer.kernel_size <= largest or not pools_rows(scorer.kernel_size, scorer.pooling, scorer.order):
        return []
    return [
        f"kernel_size is {scorer.kernel_size}; with a head_dim of {head_dim} this GPU's shared memory allows at most "
        f"{largest} (or pooling 'avg', or order 'mean-pool')"
    ]


def generation_reasons(
    config: KVEvictConfig, policy: Policy | None, settings: ServerSettings, device: str
) -> list[str]:
    """Settings refused with ``decode_block``."""
    if config.decode_block is None or policy is None:
        return []
    reasons = []
    if settings.strips_thinking:
        reasons.append("--strip-thinking-cache takes answers out of the cache, in which decode_block compresses them")
    looks = {Signal.WINDOW_QUERIES, Signal.ACCUMULATED_ATTENTION} & policy.needs
    if looks and device == "cuda" and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
        reasons.append(
            f"decode_block with policy {policy.name!r} looks at the queries of every decode step, which a captured "
            "step does not show: start with --cuda-graph-backend-decode disabled, or with policy streaming-llm"
        )
    return reasons


def data_parallel_reasons(settings: ServerSettings, device: str, *, is_hybrid_ssm: bool) -> list[str]:
    """What only the model and device show of settings refused with data-parallel attention.

    ``is_hybrid_ssm``: the model has recurrent layers.
    """
    if settings.attn_dp_size == 1:
        return []
    reasons = []
    if is_hybrid_ssm:
        reasons.append(
            "--attn-dp-size: the model has recurrent layers, and SGLang makes up requests for ranks that have none, "
            "whose states the tree does not know"
        )
    if device == "cuda" and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
        reasons.append(
            "--attn-dp-size: a rank without requests replays the captured step of the others, and our layout of a step "
            "has at least one request: start with --cuda-graph-backend-decode disabled"
        )
    return reasons


def prefill_reasons(
    config: KVEvictConfig, ctx: TreeCacheBuildContext, geometry: KVGeometry, settings: ServerSettings
) -> list[str]:
    """Settings refused with ``prefill_budget``."""
    if config.prefill_budget is None:
        return []
    reasons = []
    if geometry.has_windows or ctx.is_hybrid_swa or ctx.is_hybrid_ssm:
        reasons.append(
            "prefill_budget ends segments between chunks, and models with sliding windows or recurrent layers keep a "
            "window, or a state, at the end of a prompt"
        )
    if settings.chunked_prefill_size is None:
        reasons.append("prefill_budget: --chunked-prefill-size is off, so a prompt is prefilled in one piece")
    return reasons


def window_reasons(config: KVEvictConfig, policy: Policy | None, geometry: KVGeometry) -> list[str]:
    """Settings refused for layers with a sliding window."""
    if policy is None or not geometry.has_windows:
        return []
    reasons = []
    if policy.merger is not None:
        reasons.append(
            f"policy {policy.name!r} merges evicted entries into others, which a layer with a sliding window may not "
            "show any more"
        )
    if config.decode_block is not None:
        reasons.append("decode_block would evict generated tokens that layers with a sliding window still show")
    return reasons


def latent_reasons(
    config: KVEvictConfig, policy: Policy | None, geometry: KVGeometry, settings: ServerSettings
) -> list[str]:
    """Settings refused for latent attention (MLA)."""
    if not geometry.is_latent:
        return []
    reasons = []
    unmeasured = (
        "the model keeps latents (MLA), and what their eviction costs without scoring passes was never measured"
    )
    if not config.wait_for_passes:
        reasons.append(f"wait_for_passes is false; allowed is true: {unmeasured}")
    if config.prefill_budget is not None:
        reasons.append(f"prefill_budget: {unmeasured}")
    if policy is not None and Signal.OUTPUT_GRAM in policy.needs:
        reasons.append(
            f"policy {policy.name!r} weighs values by the output projection, but another projection lies between it "
            "and a latent (MLA)"
        )
    if settings.speculative_algorithm is not None:
        reasons.append(
            "--speculative-algorithm: drafts of a model with latents (MLA) keep latents, too, and a segment's slots "
            "hold a draft's keys and values"
        )
    return reasons


def verification_reasons(settings: ServerSettings, windows: Sequence[int], *, has_window_pool: bool) -> list[str]:
    """Features of a model that speculative decoding does not support; ``windows`` as in :attr:`KVGeometry.windows`."""
    if settings.speculative_algorithm is None:
        return []
    num_drafts, narrowest = settings.speculative_num_draft_tokens, min(filter(None, windows), default=0)
    reasons = []
    if has_window_pool:
        reasons.append(
            "--speculative-algorithm: the model has a KV pool for layers with a sliding window, whose steps are "
            "planned for one new token a request, not for drafts"
        )
    if num_drafts is not None and 0 < narrowest < num_drafts:
        reasons.append(
            f"--speculative-num-draft-tokens is {num_drafts}; allowed: at most {narrowest}, the narrowest window"
        )
    return reasons


def pool_reasons(pool: Any) -> list[str]:
    """Unsupported properties of SGLang's KV pool."""
    reasons = []
    if pool.page_size != 1:  # SGLang may choose it if the argument is omitted
        reasons.append(
            f"--page-size is {pool.page_size}, only 1 is supported: spans are packed into single token slots"
        )
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        reasons.append(
            f"the KV pool's layout is {pool.kv_cache_layout!r}; only 'nhd' has the heads of a slot side by side"
        )
    if pool.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        reasons.append(f"the KV pool's dtype is {pool.dtype}; allowed are {allowed}")
    return reasons
