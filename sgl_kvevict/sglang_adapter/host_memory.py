"""Host memory for prefixes that the pool drops: its size, and requests that look there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch
from torch import Tensor

from sgl_kvevict.cache.host import MIN_TOKENS
from sgl_kvevict.config import HOST_PER_POOL, KVEvictConfig
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.machine import GIB, free_host_gib
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.sglang_adapter.ranks import TensorRanks
from sgl_kvevict.sglang_adapter.settings import ranks_per_host
from sgl_kvevict.sglang_adapter.tree import KVEvictTree
from sgl_kvevict.store.host import HostSegments
from sgl_kvevict.store.identity import StoreIdentity

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)

BLOCK_SLOTS = 8
"""Token slots whose entries fill one block."""
FREE_SHARE = 0.25
"""Part of the free memory that all ranks together take at most by default."""


def open_host(config: KVEvictConfig, ctx: TreeCacheBuildContext, packer: SegmentPacker) -> HostSegments:
    """Allocate host memory for dropped prefixes; no blocks: it is off, or the default is too small for one.

    UnsupportedSetupError: ``host_bytes`` is less than one block, or more than is free, or CUDA cannot lock it.
    """
    ranks = TensorRanks(ctx.params.attn_tp_cache_group)
    identity = host_identity(config.min_prefix_tokens)
    block_bytes = BLOCK_SLOTS * packer.slot_bytes()
    num_blocks = 0
    # A copy has full attention only. A prompt that found one would lack rows of the window pool, or a recurrent state.
    if config.policy != "none" and config.host_bytes != 0 and not (ctx.is_hybrid_swa or ctx.is_hybrid_ssm):
        num_blocks = _num_blocks(config, packer, ranks, block_bytes)
    if ranks.is_first and num_blocks:
        logger.info("kvevict: %.2f GiB of host memory for what the pool drops", num_blocks * block_bytes / GIB)
    arena, device = torch.empty(num_blocks, block_bytes, dtype=torch.uint8), packer.k_arena.device
    if device.type == "cuda" and num_blocks:
        _lock(arena)
    return HostSegments(arena, device, identity, ranks.largest)


def _lock(memory: Tensor) -> None:
    """Lock memory into RAM until it is freed: copies from pageable memory would make the host wait.

    PyTorch's own pinned memory is rounded up to a power of two, up to twice the configured bytes.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        raise UnsupportedSetupError([f"host_bytes: CUDA cannot lock {memory.nbytes} bytes (error {code})"])
    finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())


def _num_blocks(config: KVEvictConfig, packer: SegmentPacker, ranks: TensorRanks, block_bytes: int) -> int:
    """Blocks of host memory on each rank."""
    # All ranks of a host see the same free memory.
    free = int(free_host_gib() * GIB) // ranks_per_host()
    wanted: int | None = config.host_bytes
    if wanted is not None and not block_bytes <= wanted <= free:
        raise UnsupportedSetupError(
            [f"host_bytes: got {wanted}; allowed here: 0 (off), or {block_bytes} to {free} on each rank (free memory)"]
        )
    if wanted is None:
        pool = packer.num_bytes + (0 if packer.drafts is None else packer.drafts.num_bytes)
        wanted = min(HOST_PER_POOL * pool, int(free * FREE_SHARE))
    return -ranks.largest(-(wanted // block_bytes))  # ranks may read different amounts


def host_identity(min_prefix_tokens: int) -> StoreIdentity:
    """The identity of segments that only this process reads: nothing of the model needs to be known."""
    return StoreIdentity(min(min_prefix_tokens, MIN_TOKENS))


def before_matching(req: Req, tree_cache: Any = None, *_args: object, **_kwargs: object) -> None:
    """Hook before a request looks up its prompt to be admitted: what the host has of it is put into the tree."""
    if not isinstance(tree_cache, KVEvictTree) or not tree_cache.prefixes.host.segments.num_blocks:
        return
    if req.positional_embed_overrides is None:  # else SGLang matches nothing
        # A request that was retracted looks up its answer, too.
        prompt = tree_cache.prompt_of(req, req.origin_input_ids + req.output_ids)
        tree_cache.prefixes.admitting(req, prompt)
