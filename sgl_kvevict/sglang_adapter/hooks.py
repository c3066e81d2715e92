"""Every function of SGLang that we wrap, by the feature that needs it. See docs/design/sglang.md."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True)
class Hook:
    """One SGLang function that we wrap."""

    target: str  # dotted path, or name of a step in which SGLang resolves its arguments
    function: str  # dotted path of our hook, `before_...`, `after_...` or `around_...`; imported when it is registered

    @property
    def is_step(self) -> bool:
        """Whether the target is a step in which SGLang resolves its arguments."""
        return "." not in self.target

    @property
    def kind(self) -> str:
        """Name of SGLang's ``HookType``, with which our function's name begins."""
        return self.function.rpartition(".")[2].partition("_")[0].upper()

    def load(self) -> Callable[..., Any]:
        """Import and return our hook function."""
        return cast("Callable[..., Any]", pkgutil.resolve_name(self.function))

    def register(self) -> None:
        """Register the hook; SGLang applies it once all plugins are loaded."""
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        if self.is_step:
            register_resolution_hook(self.target)(self.load())
        else:
            HookRegistry.register(self.target, self.load(), HookType[self.kind])


class Feature:
    """What a user has, and the hooks without which it would not work.

    ``hooks``: what each of our functions wraps, in ``sgl_kvevict.sglang_adapter`` and in ``sglang.srt``; a comment says
    what goes wrong without it.

    ``is_optional``: with a SGLang that lacks one of the functions, a server starts without the feature. A server with a
    SGLang that lacks a function of another feature does not start.
    """

    def __init__(self, name: str, hooks: Mapping[str, str], *, is_optional: bool = False) -> None:
        self.name, self.is_optional = name, is_optional
        self.hooks = tuple(
            Hook(f"sglang.srt.{target}" if "." in target else target, f"sgl_kvevict.sglang_adapter.{function}")
            for function, target in hooks.items()
        )


_SCHEDULER = "managers.scheduler.Scheduler"
_COMPONENTS = "managers.scheduler_components"
_STATE = f"{_COMPONENTS}.internal_state.SchedulerInternalStateController"
_STREAMER = f"{_COMPONENTS}.output_streamer.SchedulerOutputStreamer"
_ALLOCATOR = "mem_cache.allocator.base.BaseTokenToKVPoolAllocator"
_WEIGHT_UPDATER = f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager"

DRAFT_MODELS = Feature(
    "draft models (speculative decoding)",
    {
        # A draft model starts only with attention backends on a list, which lacks ours.
        "draft_attention.around_create_backend": "speculative.draft_utils.DraftBackendFactory._create_backend",
        # The draft's decode steps would be captured, and their attention plans on the host.
        "draft_attention.around_capture": "speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs",
    },
    is_optional=True,
)
LONG_PROMPTS = Feature(
    "prompts longer than the pool",
    {
        # A prompt longer than the pool would be allowed an answer of no token.
        "long_prompts.around_max_new_tokens": f"{_ALLOCATOR}.max_new_tokens_for_memory",
        # Where no slot is left for the next chunk, it would be allocated all the same, which ends the server.
        "long_prompts.around_available": "mem_cache.prefill_budget.PrefillBudget.available_chunk_tokens",
        # The row of a chunk's prompt is read before room is made, and would keep slots that were released.
        "long_prompts.before_allocation": "mem_cache.allocation.alloc_for_extend",
    },
    is_optional=True,
)

FEATURES = (
    Feature(
        "compressed prefixes on a GPU",
        {
            # CUDA has no hook for the pool class: the stock pool gets its buffers from one arena.
            "arena.around_create_buffers": "mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal",
            # As for the pool of keys and values: CUDA has no hook for the class of the pool of latents.
            "arena.around_create_latent_buffers": "mem_cache.memory_pool.MLATokenToKVPool._create_buffers",
        },
    ),
    Feature(
        "setups that cannot work are refused before a model is loaded",
        {
            # The first step of a start: setups that cannot work would be refused after a model is loaded.
            "resolution.after_first_step": "handle_deprecated_dp_attention",
        },
    ),
    Feature(
        "attention over compressed prefixes",
        {
            # Models with sinks or windows start only with attention backends on a list, which lacks ours; CUDA graphs
            # that are on by default, and that our attention cannot follow, would be captured.
            "resolution.around_model_adjustments": "handle_model_specific_adjustments",
            # A forward knows its requests by name only, and clients choose the names; a replay knows none.
            "attention_backend.after_init_new": "model_executor.forward_batch_info.ForwardBatch.init_new",
        },
    ),
    DRAFT_MODELS,
    Feature(
        "options of requests, and what the store has of their prompts",
        {
            # Wrong options would be ignored, token ids outside the vocabulary, and beams, would end the server, and
            # prefixes that the store has would be computed instead of fetched.
            "operations.around_queueing": f"{_SCHEDULER}._add_request_to_queue",
        },
    ),
    Feature(
        "clients see what was read",
        {
            # Clients would not learn how much of its prompt an answer was read from, and what exact has cost.
            "operations.after_details": f"{_STREAMER}.get_cached_tokens_details",
        },
        is_optional=True,
    ),
    Feature(
        "metrics, and work between two steps",
        {
            # Between two steps prefixes are written, metrics refreshed and questions about the cache answered.
            "operations.after_ingest": f"{_SCHEDULER}.ingest_requests",
        },
    ),
    Feature(
        "the cache in GET /server_info",
        {
            # GET /server_info would not show the compressed cache.
            "monitoring.server_info.after_env_vars": f"{_STATE}._add_env_vars",
        },
        is_optional=True,
    ),
    Feature(
        "new weights",
        {
            # Compressed prefixes would survive a change of weights that flushes nothing.
            "operations.after_flush": f"{_WEIGHT_UPDATER}.flush_cache_after_weight_update",
            # The same, where another process writes the weights.
            "operations.after_session": f"{_WEIGHT_UPDATER}.end_weight_update",
        },
    ),
    Feature(
        "learned scores, and the limit on prompts",
        {
            # No event precedes a scheduler's report that it is ready, and how long prompts may be: requests would come
            # before scores are learned, and prompts longer than the pool would be refused.
            "operations.before_ready": f"{_SCHEDULER}.get_init_info",
        },
    ),
    Feature(
        "host memory and the store",
        {
            # Prefixes that the pool has dropped and the host has would be computed again.
            "host_memory.before_matching": "managers.schedule_batch.Req.init_next_round_input",
            # A request would be prefilled before the fetched prefix is in the tree, and a prompt whose chunks wait for
            # room that nobody can release would wait for ever.
            "operations.around_choice": f"{_SCHEDULER}.get_new_batch_prefill",
        },
    ),
    Feature(
        "requests that share a little of a large segment",
        {
            # A prompt longer than the pool, or one that shares a little of a large segment, would never be admitted.
            "long_prompts.around_check": "managers.schedule_policy.PrefillAdder._check_prefill_budget",
        },
    ),
    LONG_PROMPTS,
)

HOOKS = tuple(hook for feature in FEATURES for hook in feature.hooks)
