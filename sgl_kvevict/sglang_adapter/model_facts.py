"""What is known once a model and its pools are there, for the table in ``sgl_kvevict/support.py``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state
from sglang.srt.model_executor.cuda_graph_config import Phase
from torch import nn

from kvevict_kernels.device_limits import limits_of
from kvevict_kernels.key_scores import largest_kernel_size, pools_rows
from sgl_kvevict.attention.kernel_facts import kernels_for
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.machine import Check, check_machine, read_machine
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import WindowAttentionScorer
from sgl_kvevict.sglang_adapter.arena import arena_of, kvevict_is_selected
from sgl_kvevict.sglang_adapter.kv_pools import full_layers_of, full_pool_of, window_pool_of
from sgl_kvevict.sglang_adapter.model_parts import find_windows
from sgl_kvevict.sglang_adapter.settings import has_tokenizer_files, has_weights, published
from sgl_kvevict.support import MACHINE, AfterLoad, reasons

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def after_load(runner: ModelRunner, config: KVEvictConfig, policy: Policy | None) -> AfterLoad:
    """Gather the facts of a model, or a draft model; what the machine could have and a server may lack is logged."""
    model, model_config, pools = runner.model, runner.model_config, runner.token_to_kv_pool
    pool, windows_pool = full_pool_of(pools), window_pool_of(pools)
    arena = arena_of(pool)
    device = torch.device(runner.device)
    head_dim = model_config.head_dim if arena is None else arena.k.shape[-1]
    is_latent = model_config.attention_arch == AttentionArch.MLA
    kernels = kernels_for(config.attention, device, pool.dtype, head_dim, is_latent=is_latent)
    graphs = published("cuda_graph_config")
    has_windows_pool = runner.is_hybrid_swa or windows_pool is not None
    windows_class = type(windows_pool).__name__, windows_pool is None or arena_of(windows_pool) is not None
    return AfterLoad(
        **vars(kernels),
        config=config,
        policy=policy,
        value_of=published,
        is_selected=kvevict_is_selected(),
        pool_class=(type(pool).__name__, arena is not None),
        windows_class=windows_class if has_windows_pool else None,
        page_size=pool.page_size,
        # Pools of latents have no layout to choose.
        layout=getattr(pool, "kv_cache_layout", "nhd"),
        has_full_layers=not runner.is_hybrid_swa or runner.full_max_total_num_tokens != 0,
        windows=() if arena is None else find_windows(model, full_layers_of(pools)),
        traits=model_traits(model_config) | layer_traits(model),
        has_states=uses_ssm_state(model_config),
        is_multimodal=model_config.is_multimodal,
        # SGLang calls it on models whose image tokens attend to each other.
        sees_later=hasattr(model, "prepare_attn_masks"),
        prefill_graphs=graphs[Phase.PREFILL].backend,
        decode_graphs=graphs[Phase.DECODE].backend,
        has_glue_graph=envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get(),
        pooling=pooling_of(policy, model_config.head_dim, device),
        num_head_slots=0 if arena is None else arena.k.shape[:3].numel(),
        has_weights=has_weights(runner),
        has_texts=has_tokenizer_files(),
        machine=machine_of(device, runner.dtype, pool.dtype),
    )


def model_traits(model_config: ModelConfig) -> frozenset[str]:
    """Names in :data:`~sgl_kvevict.support.MODELS` that SGLang's reading of a model's configuration shows."""
    text = model_config.hf_text_config
    widths_differ = model_config.head_dim != model_config.v_head_dim
    traits = {
        "index_topk": is_deepseek_dsa(text),
        "is_encoder_decoder": model_config.is_encoder_decoder,
        "attention_chunk_size": model_config.attention_chunk_size,
        "attn_logit_softcapping": getattr(text, "attn_logit_softcapping", None),
        "v_head_dim": model_config.attention_arch == AttentionArch.MHA and widths_differ,
    }
    return frozenset(name for name, value in traits.items() if value)


def layer_traits(model: nn.Module) -> frozenset[str]:
    """Names in :data:`~sgl_kvevict.support.LAYERS` that a layer of the model has."""
    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    traits = {
        "logit_cap": any(layer.logit_cap for layer in layers),
        "attn_type": any(layer.is_cross_attention or layer.attn_type != AttentionType.DECODER for layer in layers),
    }
    return frozenset(name for name, value in traits.items() if value)


def pooling_of(policy: Policy | None, head_dim: int, device: torch.device) -> tuple[int, int]:
    """:attr:`AfterLoad.pooling`; zeros unless the policy pools row by row on a GPU."""
    scorer = None if policy is None else policy.scorer
    # Kernel sizes are limited by a GPU's shared memory alone.
    if device.type != "cuda" or not isinstance(scorer, WindowAttentionScorer):
        return 0, 0
    if not pools_rows(scorer.kernel_size, scorer.pooling, scorer.order):
        return 0, 0
    return scorer.kernel_size, largest_kernel_size(head_dim, limits_of(device))


def machine_of(device: torch.device, dtype: torch.dtype, stored: torch.dtype) -> tuple[Check, ...]:
    """Checks of the machine for a model of ``dtype`` and a pool of ``stored`` on ``device``; what is missing is logged.

    Unless nothing starts without it: then it is among the reasons.
    """
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    machine = read_machine([] if index is None else [index])
    checks = check_machine(machine, device.type, *(str(one).removeprefix("torch.") for one in (dtype, stored)))
    for check in checks:
        # Of memory, the pool has its part already.
        if check.state != "ok" and "memory" not in check.name and not reasons(MACHINE, check):
            logger.warning("kvevict: %s: %s (%s)", check.name, check.found, check.mend)
    return tuple(checks)
