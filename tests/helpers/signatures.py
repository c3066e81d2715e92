"""Functions of SGLang that we call, with their parameters; ``signatures.json`` has what we hook or override."""

from __future__ import annotations

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.components import FullComponent, TreeComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

SIGNATURES = {
    UnifiedRadixCache.__init__: "self params",
    FullComponent.apply_component_action: "self action",
    SWATokenToKVPoolAllocator.clear_full_to_swa_mapping: "self full_indices",
    SWATokenToKVPoolAllocator.free_full_segment: "self free_index start_pos",
    TreeComponent.cleanup_after_caching_req: "self req is_finished insert_result insert_params",
    UnifiedTreeCore.set_component_device_value: "self node_id component_type value",
    UnifiedTreeCore.node_by_id: "self node_id",
    UnifiedTreeCore.adjust_component_size: "self node_id component_type delta",
    UnifiedTreeCore.evict_device_leaf: "self node_id is_write_back",
    create_unified_radix_cache: "ctx cache_class",
    RadixKey.match: "self other page_size",
    RadixKey.child_key: "self page_size",
    Req.set_finish_with_abort: "self error_msg status_code err_type",
    Scheduler.abort_request: "self recv_req",
    Scheduler.flush_cache: "self empty_cache",
    Scheduler._set_or_validate_priority: "self req",
    Scheduler.process_batch_result: "self batch result",
    Scheduler.init_req_max_new_tokens: "self req",
    ReqToTokenPool.write: "self indices values",
    MHATokenToKVPool._kv_buffer_shapes: "self",
    AttentionBackend.init_forward_metadata: "self forward_batch",
    AttentionBackend.forward_decode: "self q k v layer forward_batch save_kv_cache kwargs",
    AttentionBackend.forward_extend: "self q k v layer forward_batch save_kv_cache kwargs",
}
