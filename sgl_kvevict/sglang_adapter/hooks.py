"""Every function of SGLang that we wrap, by the feature that needs it, and what would replace it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True)
class Hook:
    """One SGLang function that we wrap."""

    target: str  # dotted path, or name of a step in which SGLang resolves its arguments
    function: str  # dotted path of our hook, `before_...`, `after_...` or `around_...`; imported when it is registered
    why: str  # what goes wrong without it
    until: str  # what SGLang would have to offer so that it can go

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

    ``is_optional``: with a SGLang that lacks one of the functions, a server starts without the feature. A server with a
    SGLang that lacks a function of another feature does not start.
    """

    def __init__(self, name: str, *hooks: Hook, is_optional: bool = False) -> None:
        self.name, self.hooks, self.is_optional = name, hooks, is_optional


_ADAPTER = "sgl_kvevict.sglang_adapter"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_COMPONENTS = "sglang.srt.managers.scheduler_components"
_WEIGHT_UPDATER = f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager"
_POOL_CLASS = (
    "a KV pool class named by a cache backend; `Platform.get_kv_pool_cls` is asked on other platforms than CUDA"
)
_STEP = "an event of the scheduler before each step, with its waiting requests and running batch"
_LIMIT = "`BasePrefixCache.max_prompt_tokens()` and a room for the next chunk that the cache is asked for"
_CHANGED = "an event of the cache when the weights have changed"

DRAFT_MODELS = Feature(
    "draft models (speculative decoding)",
    Hook(
        target="sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
        function=f"{_ADAPTER}.draft_attention.around_create_backend",
        why="a draft model starts only with attention backends on a list, which lacks ours",
        until="`supports_speculative_draft_attention_backend`, which platforms have, for attention backends",
    ),
    Hook(
        target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs",
        function=f"{_ADAPTER}.draft_attention.around_capture",
        why="the draft's decode steps would be captured, and their attention plans on the host",
        until="the fact about CUDA graphs above, asked for draft models, too",
    ),
    is_optional=True,
)
LONG_PROMPTS = Feature(
    "prompts longer than the pool",
    Hook(
        target="sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.max_new_tokens_for_memory",
        function=f"{_ADAPTER}.long_prompts.around_max_new_tokens",
        why="a prompt longer than the pool would be allowed an answer of no token",
        until=_LIMIT,
    ),
    Hook(
        target="sglang.srt.mem_cache.prefill_budget.PrefillBudget.available_chunk_tokens",
        function=f"{_ADAPTER}.long_prompts.around_available",
        why="where no slot is left for the next chunk, it would be allocated all the same, which ends the server",
        until=_LIMIT,
    ),
    Hook(
        target="sglang.srt.mem_cache.allocation.alloc_for_extend",
        function=f"{_ADAPTER}.long_prompts.before_allocation",
        why="the row of a chunk's prompt is read before room is made, and would keep slots that were released",
        until=_LIMIT,
    ),
    is_optional=True,
)

FEATURES = (
    Feature(
        "compressed prefixes on a GPU",
        Hook(
            target="sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal",
            function=f"{_ADAPTER}.arena.around_create_buffers",
            why="CUDA has no hook for the pool class: the stock pool gets its buffers from one arena",
            until=_POOL_CLASS,
        ),
        Hook(
            target="sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers",
            function=f"{_ADAPTER}.arena.around_create_latent_buffers",
            why="as for the pool of keys and values: CUDA has no hook for the class of the pool of latents",
            until=_POOL_CLASS,
        ),
    ),
    Feature(
        "setups that cannot work are refused before a model is loaded",
        Hook(
            target="handle_deprecated_dp_attention",
            function=f"{_ADAPTER}.launching.after_first_step",
            why="the first step of a start: setups that cannot work would be refused after a model is loaded",
            until="a check of resolved arguments that a cache backend registers",
        ),
    ),
    Feature(
        "attention over compressed prefixes",
        Hook(
            target="handle_model_specific_adjustments",
            function=f"{_ADAPTER}.model_hook.around_model_adjustments",
            why="models with sinks or windows start only with attention backends on a list, which lacks ours; CUDA "
            "graphs that are on by default, and that our attention cannot follow, would be captured",
            until="facts of an attention backend: whether it supports sinks, windows, and which CUDA graphs",
        ),
        Hook(
            target="sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
            function=f"{_ADAPTER}.forward_readers.after_init_new",
            why="a forward knows its requests by name only, and clients choose the names; a replay knows none",
            until="the requests themselves, or their numbers in the pool, in `ForwardBatch`",
        ),
    ),
    DRAFT_MODELS,
    Feature(
        "options of requests, and what the store has of their prompts",
        Hook(
            target=f"{_SCHEDULER}._add_request_to_queue",
            function=f"{_ADAPTER}.operations.around_queueing",
            why="wrong options would be ignored, token ids outside the vocabulary, and beams, would end the "
            "server, and prefixes that the store has would be computed instead of fetched",
            until="a check of a request that a cache backend registers, and `BasePrefixCache.prefetch(req)`, "
            "called for any cache, not for HiCache alone",
        ),
    ),
    Feature(
        "clients see what was read",
        Hook(
            target=f"{_COMPONENTS}.output_streamer.SchedulerOutputStreamer.get_cached_tokens_details",
            function=f"{_ADAPTER}.cache_details.after_details",
            why="clients would not learn how much of its prompt an answer was read from, and what exact has cost",
            until="`BasePrefixCache.cached_tokens_details(req)`, added to the places that SGLang counts",
        ),
        is_optional=True,
    ),
    Feature(
        "metrics, and work between two steps",
        Hook(
            target=f"{_SCHEDULER}.ingest_requests",
            function=f"{_ADAPTER}.operations.after_ingest",
            why="between two steps prefixes are written, metrics refreshed and questions about the cache answered",
            until=_STEP,
        ),
    ),
    Feature(
        "the cache in GET /server_info",
        Hook(
            target=f"{_COMPONENTS}.internal_state.SchedulerInternalStateController._add_env_vars",
            function=f"{_ADAPTER}.monitoring.server_info.after_env_vars",
            why="GET /server_info would not show the compressed cache",
            until="`BasePrefixCache.state()`, shown by `/server_info`",
        ),
        is_optional=True,
    ),
    Feature(
        "new weights",
        Hook(
            target=f"{_WEIGHT_UPDATER}.flush_cache_after_weight_update",
            function=f"{_ADAPTER}.operations.after_flush",
            why="compressed prefixes would survive a change of weights that flushes nothing",
            until=_CHANGED,
        ),
        Hook(
            target=f"{_WEIGHT_UPDATER}.end_weight_update",
            function=f"{_ADAPTER}.operations.after_session",
            why="the same, where another process writes the weights",
            until=_CHANGED,
        ),
    ),
    Feature(
        "learned scores, and the limit on prompts",
        Hook(
            target=f"{_SCHEDULER}.get_init_info",
            function=f"{_ADAPTER}.operations.before_ready",
            why="no event precedes a scheduler's report that it is ready, and how long prompts may be: requests "
            "would come before scores are learned, and prompts longer than the pool would be refused",
            until="an event of the scheduler before it reports that it is ready",
        ),
    ),
    Feature(
        "host memory and the store",
        Hook(
            target="sglang.srt.managers.schedule_batch.Req.init_next_round_input",
            function=f"{_ADAPTER}.host_memory.before_matching",
            why="prefixes that the pool has dropped and the host has would be computed again",
            until="`BasePrefixCache.match_prefix` that may load, as HiCache's `init_load_back` does",
        ),
        Hook(
            target=f"{_SCHEDULER}.get_new_batch_prefill",
            function=f"{_ADAPTER}.operations.around_choice",
            why="a request would be prefilled before the fetched prefix is in the tree, and a prompt whose chunks "
            "wait for room that nobody can release would wait for ever",
            until="`BasePrefixCache.is_ready(req)`, asked before a request is admitted",
        ),
    ),
    Feature(
        "requests that share a little of a large segment",
        Hook(
            target="sglang.srt.managers.schedule_policy.PrefillAdder._check_prefill_budget",
            function=f"{_ADAPTER}.long_prompts.around_check",
            why="a prompt longer than the pool, or one that shares a little of a large segment, would never be "
            "admitted",
            until=_LIMIT,
        ),
    ),
    LONG_PROMPTS,
)

HOOKS = tuple(hook for feature in FEATURES for hook in feature.hooks)
