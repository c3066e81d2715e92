"""Server settings and models that compressed prefixes do not support, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from torch import nn

from kvevict_kernels.device_limits import limits_of
from kvevict_kernels.key_scores import Pooling, largest_kernel_size
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers.window_attention import WindowAttentionScorer
from sgl_kvevict.policies.signals import Signal

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.server_args import ServerArgs

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


@dataclass(frozen=True)
class FlagRefusal:
    """One server argument whose value must be ``allowed``.

    Attributes:
        field: attribute of SGLang's ``ServerArgs``.
        allowed: the only value that works.
        why: what would go wrong.
    """

    field: str
    allowed: object
    why: str

    def reason(self, server_args: ServerArgs) -> str | None:
        """Return the sentence for the user, or None if the setting is fine."""
        value = getattr(server_args, self.field)
        if value == self.allowed:
            return None
        return f"--{self.field.replace('_', '-')} is {value!r}, only {self.allowed!r} is supported: {self.why}"


_SLOT_READERS = "it reads KV by token slot, and a compressed prefix has none"

FLAGS = (
    FlagRefusal("disable_radix_cache", False, "there would be no prefixes to compress"),
    FlagRefusal("enable_hierarchical_cache", False, _SLOT_READERS),
    FlagRefusal("enable_lmcache", False, _SLOT_READERS),
    FlagRefusal("enable_flexkv", False, _SLOT_READERS),
    FlagRefusal("enable_hisparse", False, _SLOT_READERS),
    FlagRefusal("enable_unified_cache_external_linker", False, _SLOT_READERS),
    FlagRefusal("enable_return_routed_experts", False, _SLOT_READERS),
    FlagRefusal("disaggregation_mode", "null", _SLOT_READERS),
    FlagRefusal("is_embedding", False, "its answers are made of whole prompts, and scoring passes would get some"),
    FlagRefusal("speculative_algorithm", None, "draft and verification steps read uncompressed rows"),
    FlagRefusal("dllm_algorithm", None, "diffusion decoding attends in both directions"),
    FlagRefusal("pp_size", 1, "not tested with pipeline stages yet"),
    FlagRefusal("attn_cp_size", 1, "not tested with context parallelism"),
    FlagRefusal("dcp_size", 1, "not tested with context parallelism"),
    FlagRefusal("enable_dp_attention", False, "not tested with idle ranks"),
    FlagRefusal("enable_two_batch_overlap", False, "a step is planned before the previous result is processed"),
    FlagRefusal("enable_pdmux", False, "prefill and decode run on streams of their own"),
    FlagRefusal("enable_streaming_session", False, "a session's turns have no node in the tree, so no path to read"),
    FlagRefusal("enable_unified_memory", False, "the KV pool has another layout"),
    FlagRefusal("enable_page_major_kv_layout", False, "the KV pool has another layout"),
    FlagRefusal("enable_kv_cache_sharding", False, "the KV pool has another layout"),
    FlagRefusal("prefill_only_disable_kv_cache", False, "there would be no KV to compress"),
    FlagRefusal("kv_canary", "none", "it patches the pool's buffers"),
    FlagRefusal("enable_torch_compile", False, "the attention backend is not traceable"),
    FlagRefusal("enable_deterministic_inference", False, "results depend on the batch"),
)

_MODEL_CHECKS: tuple[tuple[Callable[[ModelConfig], bool], str], ...] = (
    (lambda m: m.attention_arch != AttentionArch.MHA, "the model uses latent attention (MLA); only MHA and GQA work"),
    (lambda m: m.is_encoder_decoder, "the model is an encoder-decoder"),
    (lambda m: bool(m.attention_chunk_size), "the model attends within chunks"),
    (
        lambda m: bool(getattr(m.hf_text_config, "attn_logit_softcapping", None)),
        "the model caps its attention logits",
    ),
    (lambda m: m.is_multimodal, "multimodal models are not tested"),
    (lambda m: m.head_dim != m.v_head_dim, "the model's keys and values have different widths"),
)


def server_reasons(server_args: ServerArgs) -> list[str]:
    """Return one sentence for every server argument that is not supported."""
    return [reason for flag in FLAGS if (reason := flag.reason(server_args)) is not None]


def model_reasons(model_config: ModelConfig) -> list[str]:
    """Return one sentence for every property of the model that is not supported."""
    return [reason for applies, reason in _MODEL_CHECKS if applies(model_config)]


def place_reasons(config: KVEvictConfig, policy: Policy | None, ctx: TreeCacheBuildContext) -> list[str]:
    """Return one sentence for everything that models rule out whose prompts go on at certain places only.

    Those are models of which some layers have a sliding window and a KV pool of their own, or a recurrent state.
    """
    reasons = []
    if ctx.is_hybrid_swa and ctx.full_tokens_per_layer == 0:
        reasons.append("every layer of the model has a sliding window and one KV pool: there is nothing to compress")
    if ctx.is_hybrid_ssm and ctx.params.enable_mamba_extra_buffer:
        reasons.append(
            "--mamba-radix-cache-strategy is 'extra_buffer', only 'no_buffer' is supported (with "
            "--disable-overlap-schedule): where the other strategy leaves states is not tested"
        )
    if ctx.is_hybrid_ssm and config.decode_block is not None:
        reasons.append("decode_block: a recurrent state belongs to the end of what was generated, not to a block's")
    if not (ctx.is_hybrid_swa or ctx.is_hybrid_ssm):
        return reasons
    kind = "recurrent layers" if ctx.is_hybrid_ssm else "a KV pool for layers with a sliding window"
    if config.store is not None:
        reasons.append(f"store: the model has {kind}, and what they know of a prefix is not stored")
    if policy is not None and not policy.splittable:
        reasons.append(
            f"policy {policy.name!r} merges tokens into earlier ones, so its prefixes cannot be cut; the model has "
            f"{kind}, which let a prompt go on in the middle of one"
        )
    return reasons


def layer_reasons(model: nn.Module) -> list[str]:
    """Return one sentence for every variant of attention in the model that is not supported."""
    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    reasons = []
    if any(layer.logit_cap for layer in layers):
        reasons.append("a layer caps its attention logits")
    if any(layer.is_cross_attention or layer.attn_type != AttentionType.DECODER for layer in layers):
        reasons.append("a layer's attention is not causal self-attention")
    return reasons


def policy_reasons(policy: Policy | None, head_dim: int, device: torch.device) -> list[str]:
    """Return one sentence for everything about the policy that the device's kernels cannot do."""
    scorer = None if policy is None else policy.scorer
    if device.type != "cuda" or not isinstance(scorer, WindowAttentionScorer):
        return []
    largest = largest_kernel_size(head_dim, limits_of(device))
    if scorer.kernel_size <= largest or not Pooling(scorer.kernel_size, scorer.pooling, scorer.order).pools_rows:
        return []
    return [
        f"kernel_size is {scorer.kernel_size}; with a head_dim of {head_dim} this GPU's shared memory allows at most "
        f"{largest} (or pooling 'avg', or order 'mean-pool')"
    ]


def generation_reasons(config: KVEvictConfig, policy: Policy | None, server_args: ServerArgs, device: str) -> list[str]:
    """Return one sentence for everything that cannot be done while requests generate (``decode_block``)."""
    if config.decode_block is None or policy is None:
        return []
    reasons = []
    if server_args.strip_thinking_cache:
        reasons.append("--strip-thinking-cache takes answers out of the cache, in which decode_block compresses them")
    looks = {Signal.WINDOW_QUERIES, Signal.ACCUMULATED_ATTENTION} & policy.needs
    if looks and device == "cuda" and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
        reasons.append(
            f"decode_block with policy {policy.name!r} looks at the queries of every decode step, which a captured "
            "step does not show: start with --cuda-graph-backend-decode disabled, or with policy streaming-llm, knorm "
            "or keydiff"
        )
    return reasons


def window_reasons(config: KVEvictConfig, policy: Policy | None, geometry: KVGeometry) -> list[str]:
    """Return one sentence for everything that cannot be done with a model whose layers have sliding windows."""
    if policy is None or not geometry.has_windows:
        return []
    reasons = []
    if policy.merger is not None:
        reasons.append(f"policy {policy.name!r} merges what it evicts, which layers with a sliding window do not do")
    if policy.fitter is not None:
        reasons.append(f"policy {policy.name!r} fits values, which is not tested with sliding windows")
    if config.decode_block is not None:
        reasons.append("decode_block is not tested with layers that have a sliding window")
    return reasons


def pool_reasons(pool: Any) -> list[str]:
    """Return one sentence for every property of SGLang's KV pool that is not supported."""
    reasons = []
    if pool.page_size != 1:  # resolved; the argument itself may be unset
        reasons.append(
            f"--page-size is {pool.page_size}, only 1 is supported: spans are packed into single token slots"
        )
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        reasons.append(f"the KV pool's layout is {pool.kv_cache_layout!r}; only 'nhd' works")
    if pool.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        reasons.append(f"the KV pool's dtype is {pool.dtype}; allowed are {allowed}")
    return reasons
