"""Functions of SGLang that we call, override or hook, with the parameters that we rely on."""

from __future__ import annotations

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.components import FullComponent, SWAComponent, TreeComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

SIGNATURES = {
    "UnifiedRadixCache.__init__": (UnifiedRadixCache.__init__, ["self", "params"]),
    "UnifiedRadixCache.reset": (UnifiedRadixCache.reset, ["self"]),
    "UnifiedRadixCache.checkpoint": (UnifiedRadixCache.checkpoint, ["self", "req", "up_to", "kwargs"]),
    "UnifiedRadixCache.match_prefix": (UnifiedRadixCache.match_prefix, ["self", "params"]),
    "UnifiedRadixCache.insert": (UnifiedRadixCache.insert, ["self", "params"]),
    "UnifiedRadixCache.on_release": (UnifiedRadixCache.on_release, ["self", "req", "checkpointed"]),
    "UnifiedRadixCache.touch_prefix": (UnifiedRadixCache.touch_prefix, ["self", "key"]),
    "FullComponent.reclaimable_value_len": (FullComponent.reclaimable_value_len, ["self", "node"]),
    "FullComponent.redistribute_on_node_split": (
        FullComponent.redistribute_on_node_split,
        ["self", "new_parent", "child"],
    ),
    "FullComponent.evict_component": (
        FullComponent.evict_component,
        ["self", "node", "device_frees", "host_frees", "cache_actions", "target"],
    ),
    "FullComponent.apply_component_action": (FullComponent.apply_component_action, ["self", "action"]),
    "SWAComponent._recover_from_incoming": (
        SWAComponent._recover_from_incoming,
        ["self", "node", "incoming_full", "start", "end", "result", "cache_actions"],
    ),
    "SWATokenToKVPoolAllocator.clear_full_to_swa_mapping": (
        SWATokenToKVPoolAllocator.clear_full_to_swa_mapping,
        ["self", "full_indices"],
    ),
    "SWATokenToKVPoolAllocator.free_full_segment": (
        SWATokenToKVPoolAllocator.free_full_segment,
        ["self", "free_index", "start_pos"],
    ),
    "TreeComponent.cleanup_after_caching_req": (
        TreeComponent.cleanup_after_caching_req,
        ["self", "req", "is_finished", "insert_result", "insert_params"],
    ),
    "UnifiedTreeCore.set_component_device_value": (
        UnifiedTreeCore.set_component_device_value,
        ["self", "node_id", "component_type", "value"],
    ),
    "UnifiedTreeCore.node_by_id": (UnifiedTreeCore.node_by_id, ["self", "node_id"]),
    "UnifiedTreeCore.adjust_component_size": (
        UnifiedTreeCore.adjust_component_size,
        ["self", "node_id", "component_type", "delta"],
    ),
    "UnifiedTreeCore.evict_device_leaf": (UnifiedTreeCore.evict_device_leaf, ["self", "node_id", "is_write_back"]),
    "create_unified_radix_cache": (create_unified_radix_cache, ["ctx", "cache_class"]),
    "RadixKey.match": (RadixKey.match, ["self", "other", "page_size"]),
    "RadixKey.child_key": (RadixKey.child_key, ["self", "page_size"]),
    "Req.set_finish_with_abort": (Req.set_finish_with_abort, ["self", "error_msg", "status_code", "err_type"]),
    "Scheduler.abort_request": (Scheduler.abort_request, ["self", "recv_req"]),
    "Scheduler.unload_lora_adapter": (Scheduler.unload_lora_adapter, ["self", "recv_req"]),
    "Scheduler.flush_cache": (Scheduler.flush_cache, ["self", "empty_cache"]),
    "Scheduler._set_or_validate_priority": (Scheduler._set_or_validate_priority, ["self", "req"]),
    "Scheduler.process_batch_result": (Scheduler.process_batch_result, ["self", "batch", "result"]),
    "ScheduleBatch.filter_batch": (ScheduleBatch.filter_batch, ["self", "reqs_to_exclude", "keep_indices"]),
    "Scheduler.init_req_max_new_tokens": (Scheduler.init_req_max_new_tokens, ["self", "req"]),
    "Scheduler._add_request_to_queue": (Scheduler._add_request_to_queue, ["self", "req", "is_retracted"]),
    "ReqToTokenPool.write": (ReqToTokenPool.write, ["self", "indices", "values"]),
    "MHATokenToKVPool._create_buffers_normal": (MHATokenToKVPool._create_buffers_normal, ["self"]),
    "MLATokenToKVPool._create_buffers": (MLATokenToKVPool._create_buffers, ["self"]),
    "MHATokenToKVPool._kv_buffer_shapes": (MHATokenToKVPool._kv_buffer_shapes, ["self"]),
    "AttentionBackend.init_forward_metadata": (
        AttentionBackend.init_forward_metadata,
        ["self", "forward_batch"],
    ),
    "AttentionBackend.forward_decode": (
        AttentionBackend.forward_decode,
        ["self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"],
    ),
    "AttentionBackend.forward_extend": (
        AttentionBackend.forward_extend,
        ["self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"],
    ),
}
