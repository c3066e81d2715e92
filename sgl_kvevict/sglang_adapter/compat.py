"""Supported SGLang versions, and every SGLang function that we hook, with the reason."""

from __future__ import annotations

import inspect
import json
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sgl_kvevict.config import load_config
from sgl_kvevict.errors import UnsupportedSetupError

logger = logging.getLogger(__name__)

SUPPORTED_SGLANG = ("0.5.23",)
"""Exact versions: SGLang renames cache methods between releases, so an upgrade is a change with its own tests."""


@dataclass(frozen=True)
class Hook:
    """One SGLang function that we wrap."""

    target: str  # dotted path, or name of a step in which SGLang resolves its arguments
    function: str  # dotted path of our hook, `before_...`, `after_...` or `around_...`; imported when it is registered
    why: str  # what goes wrong without it

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
        hook: Callable[..., Any] = pkgutil.resolve_name(self.function)
        return hook

    def register(self) -> None:
        """Register the hook; SGLang applies it once all plugins are loaded."""
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        if self.is_step:
            register_resolution_hook(self.target)(self.load())
        else:
            HookRegistry.register(self.target, self.load(), HookType[self.kind])


_WEIGHT_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_CHANGES = {
    "update_weights_from_disk": "around_change",
    "update_weights_from_tensor": "around_session_change",
    "update_weights_from_distributed": "around_session_change",
    "update_weights_from_ipc": "around_change",
    "end_weight_update": "around_session_change",
    "release_memory_occupation": "around_change",
}

POOL_HOOK = Hook(
    target="sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal",
    function="sgl_kvevict.sglang_adapter.arena.around_create_buffers",
    why="CUDA has no hook for the pool class: the stock pool gets its buffers from one arena",
)

LATENT_POOL_HOOK = Hook(
    target="sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers",
    function="sgl_kvevict.sglang_adapter.arena.around_create_latent_buffers",
    why="as for the pool of keys and values: CUDA has no hook for the class of the pool of latents",
)

LAUNCHER_HOOK = Hook(
    target="sglang.srt.entrypoints.engine._set_envs_and_config",
    function="sgl_kvevict.sglang_adapter.launching.after_launch_handlers",
    why="a scheduler that refuses a setup would end the launcher with -9 and another line below its reasons",
)
"""Registered only in the process that starts a server, because SGLang imports the module of each target."""

HOOKS = (
    POOL_HOOK,
    LATENT_POOL_HOOK,
    Hook(
        target="handle_deprecated_dp_attention",
        function="sgl_kvevict.sglang_adapter.launching.after_first_step",
        why="the first step of a start: setups that cannot work would be refused after a model is loaded",
    ),
    Hook(
        target="handle_attention_backend_compatibility",
        function="sgl_kvevict.sglang_adapter.graphs.after_attention_backend",
        why="CUDA graphs that are on by default, and that our attention cannot follow, would be captured",
    ),
    Hook(
        target="handle_model_specific_adjustments",
        function="sgl_kvevict.sglang_adapter.model_hook.around_model_adjustments",
        why="models with sinks or windows start only with attention backends on a list, which lacks ours",
    ),
    Hook(
        target="sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_env_vars",
        function="sgl_kvevict.sglang_adapter.monitoring.server_info.after_env_vars",
        why="GET /server_info would not show the compressed cache",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.ingest_requests",
        function="sgl_kvevict.sglang_adapter.passes.after_ingest",
        why="between two steps, scoring passes are queued, metrics refreshed and questions about the cache answered",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
        function="sgl_kvevict.sglang_adapter.request_check.before_queueing",
        why="wrong options would be ignored, and token ids outside the vocabulary would end the server",
    ),
    Hook(
        target="sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init",
        function="sgl_kvevict.sglang_adapter.request_check.around_beams",
        why="beams read through rows of the request table without a Req, which cannot be rewritten: they are refused",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
        function="sgl_kvevict.sglang_adapter.scheduler_store.after_queueing",
        why="prefixes that the store has would be computed instead of fetched",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        function="sgl_kvevict.sglang_adapter.scheduler_store.around_admission",
        why="a request would be prefilled before the fetched prefix is in the tree",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.Req.init_next_round_input",
        function="sgl_kvevict.sglang_adapter.host_memory.before_matching",
        why="prefixes that the pool has dropped and the host has would be computed again",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.init_chunked_prefill",
        function="sgl_kvevict.sglang_adapter.long_prompts.after_chunked_prefill",
        why="prompts longer than the pool would be refused, though their chunks can shrink while they are prefilled",
    ),
    Hook(
        target="sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.max_new_tokens_for_memory",
        function="sgl_kvevict.sglang_adapter.long_prompts.around_max_new_tokens",
        why="a prompt longer than the pool would be allowed an answer of no token",
    ),
    Hook(
        target="sglang.srt.managers.schedule_policy.PrefillAdder._check_prefill_budget",
        function="sgl_kvevict.sglang_adapter.long_prompts.around_check",
        why="a prompt longer than the pool, or one that shares a little of a large segment, would never be admitted",
    ),
    Hook(
        target="sglang.srt.mem_cache.prefill_budget.PrefillBudget.available_chunk_tokens",
        function="sgl_kvevict.sglang_adapter.long_prompts.around_available",
        why="where no slot is left for the next chunk, it would be allocated all the same, which ends the server",
    ),
    Hook(
        target="sglang.srt.mem_cache.allocation.alloc_for_extend",
        function="sgl_kvevict.sglang_adapter.long_prompts.before_allocation",
        why="the row of a chunk's prompt is read before room is made, and would keep slots that were released",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        function="sgl_kvevict.sglang_adapter.long_prompts.after_admission",
        why="the prompt whose chunks wait for room is unknown to the hooks above, and could wait for ever",
    ),
    Hook(
        target="sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer."
        "is_request_level_customized_info_key",
        function="sgl_kvevict.sglang_adapter.long_prompts.around_request_level",
        why="what meta_info says of a prompt prefilled compressed would be divided among the tokens of its answer",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_init_info",
        function="sgl_kvevict.sglang_adapter.learning.before_ready",
        why="no event precedes a scheduler's report that it is ready: requests would come before scores are learned",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.handle_shutdown",
        function="sgl_kvevict.sglang_adapter.scheduler_store.after_shutdown",
        why="segments that wait to be written to the store would be lost when the server is stopped",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.abort_request",
        function="sgl_kvevict.sglang_adapter.operations.around_abort",
        why="SGLang aborts every request whose id begins with a client's, our scoring passes too",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.flush_cache",
        function="sgl_kvevict.sglang_adapter.operations.before_flush",
        why="a flush needs an idle server, and scoring passes are requests",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.unload_lora_adapter",
        function="sgl_kvevict.sglang_adapter.operations.before_unload",
        why="SGLang waits for requests that use a LoRA adapter, but not for scoring passes",
    ),
    *(
        Hook(
            target=f"{_WEIGHT_UPDATER}.{operation}",
            function=f"sgl_kvevict.sglang_adapter.operations.{function}",
            why="scoring passes end before it, and compressed prefixes never survive a change of weights",
        )
        for operation, function in _CHANGES.items()
    ),
    Hook(
        target="sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        function="sgl_kvevict.sglang_adapter.forward_readers.after_init_new",
        why="a forward knows its requests by name only, and clients choose the names",
    ),
    Hook(
        target="sglang.srt.model_executor.runner.decode_cuda_graph_runner.build_replay_fb_view",
        function="sgl_kvevict.sglang_adapter.graphs.around_replay_view",
        why="a captured decode step is replayed without its requests, so their spans could not be found",
    ),
    Hook(
        target="sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
        function="sgl_kvevict.sglang_adapter.draft_attention.around_create_backend",
        why="a draft model starts only with attention backends on a list, which lacks ours",
    ),
    Hook(
        target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs",
        function="sgl_kvevict.sglang_adapter.draft_attention.around_capture",
        why="the draft's decode steps would be captured, and their attention plans on the host",
    ),
)


OVERRIDING = (
    "sgl_kvevict.sglang_adapter.tree.KVEvictTree",
    "sgl_kvevict.sglang_adapter.span_component.SpanComponent",
    "sgl_kvevict.sglang_adapter.window_component.SpanAwareSWA",
)
"""Our classes that override methods of SGLang's."""
SIGNATURES = Path(__file__).with_name("signatures.json")
"""Results of :func:`signatures` with the supported version (``python tools/write_signatures.py``)."""


def signatures() -> dict[str, str]:
    """Signature of every function of the installed SGLang that we hook or override; if it is gone, the error.

    Steps of its start have none: registering a hook of an unknown step is an error of SGLang's.
    """
    hooks = (hook for hook in (*HOOKS, LAUNCHER_HOOK) if not hook.is_step)
    found = {hook.target: _signature(hook.target) for hook in hooks}
    for name in OVERRIDING:
        try:
            ours = pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            found[name] = f"cannot be imported: {error}"
            continue
        (theirs,) = ours.__bases__
        for method in vars(ours):
            if method in dir(theirs) and inspect.isfunction(getattr(theirs, method)) and not method.startswith("__"):
                target = f"{theirs.__module__}.{theirs.__qualname__}.{method}"
                found[target] = _signature(target)
    return found


def _signature(target: str) -> str:
    """Parameters with their defaults, without annotations, which differ between versions of Python."""
    try:
        signature = inspect.signature(pkgutil.resolve_name(target))
    except (ImportError, AttributeError) as error:
        return f"missing: {error}"
    empty = inspect.Parameter.empty
    bare = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=empty))


@cache
def _misfits() -> tuple[str, ...]:
    """Differences between the installed SGLang and the supported version, a sentence each."""
    known = json.loads(SIGNATURES.read_text(encoding="utf-8"))
    now = signatures()
    return tuple(
        f"{target}: {now.get(target, 'missing')}; expected {known.get(target, 'nothing')}"
        for target in sorted(known.keys() | now.keys())
        if now.get(target) != known.get(target)
    )


def require_supported_sglang() -> None:
    """Check the version of the installed SGLang; the configuration is read only if it is another one.

    Raises:
        ConfigError: the configuration is invalid.
        UnsupportedSetupError: it is not in ``SUPPORTED_SGLANG``, and a function that we hook or override has changed
            (each is named), or ``accept_untested_sglang`` is off.
    """
    installed = version("sglang")
    if installed in SUPPORTED_SGLANG:
        return
    reason = f"sglang {installed} is installed, but this release supports {', '.join(SUPPORTED_SGLANG)}"
    if misfits := _misfits():
        raise UnsupportedSetupError([f"{reason}; it would break here:", *misfits])
    if not load_config().accept_untested_sglang:
        raise UnsupportedSetupError(
            [f"{reason}; all functions that it hooks fit, and accept_untested_sglang starts it untested"]
        )
    logger.warning("kvevict: %s; started all the same (accept_untested_sglang)", reason)
