"""SGLang's attention backend interface on top of :mod:`sgl_kvevict.attention`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.attention.verify_mask import TreeMaskMode, VerifyMask
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from kvevict_kernels.checks import FP8, is_latent
from kvevict_kernels.row_codec import RowCoding, RowStatistics
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention.backend import build_attention
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.interface import Attention
from sgl_kvevict.config import Bits, load_config
from sgl_kvevict.errors import InvariantError, UnsupportedSetupError
from sgl_kvevict.geometry import UNSCALED, KVGeometry
from sgl_kvevict.guard import Place
from sgl_kvevict.policies.by_name import build_policy
from sgl_kvevict.segments.prompt_observation import Recorder
from sgl_kvevict.sglang_adapter.arena import Arena, arena_of
from sgl_kvevict.sglang_adapter.kv_pools import full_layers_of, full_pool_of, window_layers_of, window_pool_of
from sgl_kvevict.sglang_adapter.model_facts import after_load
from sgl_kvevict.sglang_adapter.model_parts import find_kv_scales, find_sink_dtype, find_windows
from sgl_kvevict.sglang_adapter.platform import share_rows_on_cpu
from sgl_kvevict.sglang_adapter.ranks import TensorRanks
from sgl_kvevict.sglang_adapter.resolution import use_absorbed_queries
from sgl_kvevict.sglang_adapter.tree import KVEvictTree
from sgl_kvevict.sglang_adapter.window_layers import WindowLayers
from sgl_kvevict.support import AFTER_LOAD, ATTENTION, require

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sgl_kvevict.attention.triton.attention import TritonAttention

MASKS = VerifyMask(torch.empty(0, dtype=torch.bool), TreeMaskMode.QLEN_ONLY, max_bs=0)
"""Asks SGLang for masks among drafts only, in new memory each step: all drafts see what is before them."""


class KVEvictAttentionBackend(AttentionBackend):
    """Attention over the compressed spans of a request's path and its uncompressed suffix.

    SGLang builds the backend before the tree; the tree's factory attaches it. Batches without requests (warm-up) read
    no spans. ``places`` are the full-attention layers, as in :func:`full_layers_of`.

    ``bits``: of compressed rows. ``why_16_bits``: reasons why these are 16, whatever the configuration says.
    ``why_whole_answers``: see :class:`AfterLoad`.
    ``coding``: how rows of 4 bits are read; its statistics are filled in once they are found or learned. None: all rows
    have 16.

    Raises:
        UnsupportedSetupError: another radix cache is selected, or the configured attention does not support the device,
            CUDA graphs, model or KV dtype.
        ConfigError: the configuration is invalid.
    """

    slot_positions: Tensor | None = None
    """[3, num_token_slots], int32: positions of the slots' tokens by axis; None unless there are several (M-RoPE)."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.runner = model_runner
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        config = load_config()
        policy = build_policy(config.policy, config.policy_options)
        facts = after_load(model_runner, config, policy)
        require(ATTENTION if model_runner.is_draft_worker else AFTER_LOAD, facts)
        # Shadows are copies of a draft's rows, for which no statistics are learned.
        self.bits: Bits = 16 if model_runner.is_draft_worker else facts.bits
        self.why_16_bits = facts.why_16_bits
        self.why_whole_answers = facts.why_whole_answers
        arena = arena_of(full_pool_of(self.token_to_kv_pool))
        assert arena is not None
        device = torch.device(model_runner.device)
        self.places = full_layers_of(self.token_to_kv_pool)
        verifies = not model_runner.spec_algorithm.is_none()
        self.geometry = _geometry(model_runner, arena, self.places)
        self.arena = arena
        # Neutral at first: attention is built here, before a file is looked for, and reads the same tensors later.
        neutral = RowStatistics.neutral((len(arena.k), *arena.k.shape[2:]), arena.k.device)
        self.coding = None if self.bits == 16 else RowCoding.of(arena.k, neutral)
        sink_dtype = find_sink_dtype(model_runner.model)
        self.attention = _build_attention(
            config.attention, self.geometry, arena, model_runner.dtype, verifies, self.coding, sink_dtype
        )
        self._window_layers = _window_layers(model_runner, config.attention, sink_dtype)
        if device.type == "cpu" and get_parallel().attn_dp_size > 1:
            share_rows_on_cpu()
        if model_runner.model_config.attention_arch == AttentionArch.MLA:
            use_absorbed_queries()
        self._on_gpu: bool = device.type == "cuda"
        self._captured: TritonAttention
        if model_runner.model_config.model_is_mrope:  # time, height and width, see CachedRange
            self.slot_positions = torch.zeros(3, arena.k.shape[1], dtype=torch.int32, device=arena.k.device)
        self.tree: KVEvictTree | None = None
        self._num_new: int | None = None
        self._observed: list[tuple[slice, Recorder]] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan one forward: spans of each request, and which prompts are observed.

        Data-parallel attention pads a batch with rows of no request: they are not planned, see :meth:`forward`.
        """
        if forward_batch.forward_mode.is_idle():
            # A rank without requests still takes part in the others' forward, with rows of padding alone.
            self._num_new = 0
            return
        self._note_positions(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            self._plan_verification(forward_batch)
            return
        # Data-parallel attention pads the tensors of a batch, and not the list of its requests.
        readers = readers_of(forward_batch.rids)
        real = slice(None if readers is None else len(readers))
        seq_lens = forward_batch.seq_lens_cpu[real].tolist()
        is_decode = forward_batch.forward_mode.is_decode()
        extend_lens = None if is_decode else list(forward_batch.extend_seq_lens_cpu[real])
        self._num_new = len(seq_lens) if extend_lens is None else sum(extend_lens)
        if self._num_new == 0:
            return
        rows, device_seq_lens = forward_batch.req_pool_indices[real], forward_batch.seq_lens[real]
        batch = self._batch(readers, seq_lens, extend_lens, rows, device_seq_lens)
        self.attention.plan(batch)
        if self._window_layers is not None:
            new_slots = forward_batch.out_cache_loc[: self._num_new]
            self._window_layers.plan(self.tree, readers, batch, new_slots)
        self._observed = [] if extend_lens is None else self._observed_rows(readers, seq_lens, extend_lens)

    def _note_positions(self, forward_batch: ForwardBatch) -> None:
        """Keep the positions to which RoPE turns the new tokens' keys, of a model with several axes."""
        if self.slot_positions is not None:
            positions = forward_batch.mrope_positions.to(torch.int32)
            self.slot_positions.index_copy_(1, forward_batch.out_cache_loc, positions)

    def _plan_verification(self, forward_batch: ForwardBatch) -> None:
        """Plan a step whose new tokens are drafts, which SGLang does not count in the lengths; none is observed."""
        num_drafts, visible = drafts_of(forward_batch.spec_info, forward_batch.seq_lens)
        seq_lens = [length + num_drafts for length in forward_batch.seq_lens_cpu.tolist()]
        readers, extend_lens = readers_of(forward_batch.rids), [num_drafts] * len(seq_lens)
        ends = forward_batch.seq_lens + num_drafts
        batch = self._batch(readers, seq_lens, extend_lens, forward_batch.req_pool_indices, ends)
        self.attention.plan(replace(batch, visible=visible))
        self._observed, self._num_new = [], None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Prepare for captured decode steps; raises :class:`UnsupportedSetupError` if attention cannot be captured."""
        if not hasattr(self.attention, "start_capture"):  # Triton's alone has it
            raise UnsupportedSetupError([f"a graph cannot record {type(self.attention).__name__}"])
        self._captured = cast("TritonAttention", self.attention)
        # One buffer for all captures: a graph reads it by address, and each replay fills it before.
        self._visible = torch.ones(max_num_tokens, dtype=torch.int64, device=self.arena.k.device)  # of replays

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Lay out a step before its capture, or give a replay the spans of its requests."""
        is_verification = forward_batch.forward_mode.is_target_verify()
        self._observed, self._num_new = [], None
        if in_capture:
            new_len = forward_batch.spec_info.draft_token_num if is_verification else 1
            self._captured.start_capture(forward_batch.batch_size, new_len)
            if self._window_layers is not None:
                self._window_layers.start_capture(forward_batch.batch_size)
            return
        # SGLang pads a batch to the size of a graph.
        real = slice(forward_batch.batch_size - forward_batch.num_padding)
        seq_lens = forward_batch.seq_lens_cpu[real].tolist()
        readers, extend_lens = replayed_readers(self.runner, len(seq_lens)), None
        rows, device_seq_lens = forward_batch.req_pool_indices[real], forward_batch.seq_lens[real]
        if is_verification:
            num_drafts, visible = drafts_of(forward_batch.spec_info, device_seq_lens)
            self._visible[: visible.numel()] = visible
            seq_lens, extend_lens = [length + num_drafts for length in seq_lens], [num_drafts] * len(seq_lens)
        batch = self._batch(readers, seq_lens, extend_lens, rows, device_seq_lens)
        self._captured.follow(batch, forward_batch.batch_size)
        if self._window_layers is not None:
            self._window_layers.follow(self.tree, readers, batch, forward_batch.batch_size)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Read the lengths of a step from SGLang's static buffers; recorded in the graph."""
        self._note_positions(forward_batch)
        seq_lens, rows, visible = forward_batch.seq_lens, forward_batch.req_pool_indices, None
        if forward_batch.forward_mode.is_target_verify():
            num_drafts = forward_batch.spec_info.draft_token_num
            seq_lens, visible = seq_lens + num_drafts, self._visible[: len(rows) * num_drafts]
        self._captured.start_step(seq_lens, rows, self.req_to_token_pool.req_to_token, visible)
        if self._window_layers is not None:
            self._window_layers.start_step(seq_lens, rows, forward_batch.out_cache_loc)

    def _batch(
        self,
        readers: Sequence[Req] | None,
        seq_lens: list[int],
        extend_lens: list[int] | None,
        req_pool_indices: Tensor,
        device_seq_lens: Tensor,
    ) -> AttentionBatch:
        """The batch with the spans of each request; none in warm-up and dummy batches.

        Their rows read at least one slot: SGLang passes length 0 when it postpones its graph runner's warm-up.
        """
        if self.tree is None or readers is None:
            paths: tuple[tuple[Any, ...], ...] = ((),) * len(seq_lens)
            seq_lens, device_seq_lens = [max(length, 1) for length in seq_lens], device_seq_lens.clamp(min=1)
        else:
            paths = self._paths(self.tree, readers)
        return AttentionBatch(
            paths=paths,
            seq_lens=seq_lens,
            extend_lens=extend_lens,
            req_pool_indices=req_pool_indices,
            req_to_token=self.req_to_token_pool.req_to_token,
            device_seq_lens=device_seq_lens if self._on_gpu else None,
        )

    def _paths(self, tree: KVEvictTree, readers: Sequence[Req]) -> tuple[tuple[SpanRuns, ...], ...]:
        """Entries of the compressed prefix that each request of a batch reads."""
        return tree.read_paths(readers)

    def _observed_rows(
        self, readers: Sequence[Req] | None, seq_lens: list[int], extend_lens: list[int]
    ) -> list[tuple[slice, Recorder]]:
        """Rows of each request in the batch's queries, and what records them."""
        if self.tree is None or readers is None:
            return []
        observed: list[tuple[slice, Recorder]] = []
        first_row = 0
        for req, seq_len, extend_len in zip(readers, seq_lens, extend_lens, strict=True):
            rows = slice(first_row, first_row + extend_len)
            observed.extend((rows, seen) for seen in self._observe(self.tree, req, seq_len - extend_len, seq_len))
            first_row += extend_len
        return observed

    def _observe(self, tree: KVEvictTree, req: Req, start: int, end: int) -> Sequence[Recorder]:
        """What records the queries ``[start, end)`` of a request's prefill."""
        return tree.observe(req, start, end)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attend with the rows of requests; rows behind them, with which data-parallel attention pads, get zeros."""
        num_new, attend = self._num_new, super().forward
        if num_new is None or num_new == len(q):
            whole: Tensor = attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            return whole
        # Zeros, and no unwritten memory: these rows go on through the layers of all ranks.
        out = q.new_zeros(len(q), layer.tp_q_head_num * layer.v_head_dim)
        if num_new:
            new_kv = (None if rows is None else rows[:num_new] for rows in (k, v))
            out[:num_new] = attend(q[:num_new], *new_kv, layer, forward_batch, save_kv_cache, **kwargs)
        return out

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend with the new tokens of each request; returns [num_tokens, num_qo_heads * head_dim]."""
        if extras := [repr(name) for name, value in kwargs.items() if value is not None]:
            # Found in SGLang's warm-up, which runs every layer.
            raise UnsupportedSetupError([f"a layer passes {', '.join(extras)} to attention"])
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        new_kv = (k, v) if save_kv_cache and k is not None and v is not None else None
        place = self.places.get(layer.layer_id)
        if place is None:
            assert self._window_layers is not None
            out = self._window_layers.attend(layer, queries, new_kv, forward_batch.out_cache_loc[: len(q)], sinks)
        else:
            if new_kv is not None:
                scales = self.geometry.scales.of(place) if self.geometry.scales.k else ()
                location = KVWriteLoc(forward_batch.out_cache_loc[: len(q)], None)
                # Before attention, which reads the new tokens from their slots.
                self.token_to_kv_pool.set_kv_buffer(layer, location, *new_kv, *scales)
            out, lse = self.attention.run(place, queries, layer.scaling, sinks)
            # A copy: an observation that fails is removed meanwhile.
            for observed in tuple(self._observed):
                rows, observation = observed
                assert self.tree is not None
                # A failed observation may cost one prompt its order, and must not end the forward of a batch.
                with self.tree.guard.at(Place.OBSERVATION) as attempt:
                    observation.record(place, queries[rows], lse[rows], self.arena.k[place], layer.scaling)
                if attempt.failed:
                    observation.has_failed = True
                    self._observed.remove(observed)
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attend with one new token per request: as :meth:`forward_extend`, but no prompt is observed."""
        return self.forward_extend(*args, **kwargs)

    @property
    def verify_mask(self) -> VerifyMask:
        """How SGLang is to lay out the masks of drafts."""
        return MASKS

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """Spans, and on a GPU rows of ``req_to_token``, are read until the last layer has attended.

        Compaction and releases run on the scheduler's stream. It waits for a captured step's replay (only sampling is
        left then), or for a whole prefill, and the next forward waits for it. So nothing moves under a reader.
        """
        return SharedReadEnds.POST_REPLAY if fm.is_decode() else SharedReadEnds.UNKNOWN

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of SGLang's dummy requests, which also pad captured steps."""
        return 1

    # And that of a row of no request, for SGLang's CPU path of data-parallel attention.
    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def support_triton(self) -> bool:
        """Return whether SGLang may use its Triton writers: only on a GPU."""
        return self._on_gpu


def _geometry(model_runner: ModelRunner, arena: Arena, layers: Mapping[int, int]) -> KVGeometry:
    """Sizes of an arena's pool; ``layers``: {layer number in the model: index in the arena}."""
    num_layers, num_token_slots, num_kv_heads, head_dim = arena.k.shape
    return KVGeometry(
        num_layers=num_layers,
        num_qo_heads=model_runner.model_config.num_attention_heads // get_parallel().attn_tp_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_token_slots=num_token_slots,
        scales=find_kv_scales(model_runner.model, layers) if arena.k.dtype == FP8 else UNSCALED,
        windows=find_windows(model_runner.model, layers),
        latent_dim=arena.v.shape[-1] if is_latent(arena.k, arena.v) else 0,
        itemsize=arena.k.element_size(),
    )


def _build_attention(
    name: str,
    geometry: KVGeometry,
    arena: Arena,
    q_dtype: torch.dtype,
    verifies: bool,
    coding: RowCoding | None,
    sink_dtype: torch.dtype | None,
) -> Attention:
    ranks = TensorRanks(get_parallel().attn_tp_group.cpu_group)
    # Kernels that one rank cannot compile are used by none, so that all ranks compute alike.
    pool = arena.k, arena.v, q_dtype, lambda here: all(there for (there,) in ranks.gather([here]))
    return build_attention(name, geometry, *pool, verifies=verifies, coding=coding, sink_dtype=sink_dtype)


def _window_layers(model_runner: ModelRunner, name: str, sink_dtype: torch.dtype | None) -> WindowLayers | None:
    """Attention of the sliding-window pool; None if there is none."""
    pool = window_pool_of(model_runner.token_to_kv_pool)
    arena = None if pool is None else arena_of(pool)
    if arena is None:
        return None
    geometry = _geometry(model_runner, arena, window_layers_of(model_runner.token_to_kv_pool))
    built = _build_attention(name, geometry, arena, model_runner.dtype, False, None, sink_dtype)
    return WindowLayers(model_runner.token_to_kv_pool, built, model_runner.req_to_token_pool.req_to_token)


# ---- requests of a forward -------------------------------------------------------------------------------------------


class BatchReaders(list[str]):
    """A forward's request ids together with the requests, because clients choose the ids: two may have the same."""

    def __init__(self, reqs: Sequence[Req]) -> None:
        super().__init__(req.rid for req in reqs)
        self.reqs = tuple(reqs)


def after_init_new(
    forward: ForwardBatch, _cls: type, batch: ScheduleBatch, runner: ModelRunner, /, *_: Any, **__: Any
) -> None:
    """Hook after a forward is created from a scheduler's batch: attach the requests, and note them at the runner."""
    if forward.rids is not None:
        # A list still, because SGLang hands the ids on; None stays None, which marks a warm-up.
        forward.rids = BatchReaders(batch.reqs)
    # A captured step has no ``rids``. It is replayed before the runner's next forward, so the runner remembers them.
    runner.kvevict_readers = forward.rids


def readers_of(rids: list[str] | None) -> tuple[Req, ...] | None:
    """Return the requests behind ``rids`` of a forward; None in warm-up.

    Raises :class:`InvariantError` if ``rids`` has no requests, because the hook was not applied.
    """
    if rids is None:
        return None
    if not isinstance(rids, BatchReaders):
        raise InvariantError("a forward does not know its requests (the hook on ForwardBatch.init_new was not applied)")
    return rids.reqs


def replayed_readers(runner: ModelRunner, num_requests: int) -> tuple[Req, ...] | None:
    """Return the requests of the captured step that a runner is about to replay; None in warm-up.

    Raises :class:`InvariantError` if the step has another number of requests.
    """
    readers = readers_of(getattr(runner, "kvevict_readers", None))
    if readers is not None and len(readers) != num_requests:
        raise InvariantError(f"a replay of {num_requests} requests follows a forward of {len(readers)}")
    return readers


# ---- verification steps of speculative decoding ----------------------------------------------------------------------


def visible_drafts(mask: Tensor, seq_lens: Tensor, num_drafts: int) -> Tensor:
    """:attr:`AttentionBatch.visible` of a batch of trees; no host sync.

    Args:
        mask: bool, SGLang's ``custom_mask``: request after request [num_drafts, seq_len + num_drafts], or
            [num_drafts, num_drafts] for all of them.
        seq_lens: [num_requests], int, tokens before the drafts.
        num_drafts: draft tokens of each request, at most 64.

    Returns:
        [num_requests * num_drafts], int64.
    """
    num_requests, node = seq_lens.numel(), torch.arange(num_drafts, device=mask.device)
    # SGLang may build either; the sizes differ, because every prompt has a token.
    if mask.numel() == num_requests * num_drafts**2:
        trees = mask.view(num_requests, num_drafts, num_drafts)
    else:
        widths = seq_lens.long() + num_drafts
        # Trees of all requests by one index: a loop over requests would read their lengths from the device.
        starts = num_drafts * (widths.cumsum(0) - widths) + seq_lens
        trees = mask[starts[:, None, None] + node[:, None] * widths[:, None, None] + node]
    # A draft's row becomes the bits of one int64, hence at most 64 drafts.
    return (trees.long() << node).sum(-1).view(-1)


def drafts_of(spec_info: Any, seq_lens: Tensor) -> tuple[int, Tensor]:
    """Draft tokens of each request in a verification step, and what each of them sees; see :func:`visible_drafts`."""
    num_drafts: int = spec_info.draft_token_num
    return num_drafts, visible_drafts(spec_info.custom_mask, seq_lens, num_drafts)
