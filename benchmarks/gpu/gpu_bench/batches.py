"""Requests on compressed prefixes in an arena, as a server would hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_bench.setting import Setting
from kvevict_kernels.alloc_head_slots import alloc_head_slots
from kvevict_kernels.row_codec import RowCoding, RowStatistics
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.geometry import KVGeometry


class Requests:
    """A batch on an arena of its own.

    Runs keep between a third and five thirds of the average, so heads and layers are uneven.

    Args:
        setting: sizes.
        count: requests.
        is_shared: all read one prefix; else each has its own.
        is_scattered: token slots in random order; else consecutive.
        suffix_tokens: uncompressed tokens per request, the new ones included.
        new_tokens: of each request; None: a decode step.
        bits: of rows of prefixes. With 4 as many bytes hold more entries; what they are does not matter here.
    """

    def __init__(
        self,
        setting: Setting,
        count: int,
        *,
        is_shared: bool,
        is_scattered: bool,
        suffix_tokens: int,
        new_tokens: int | None = None,
        bits: int = 16,
    ) -> None:
        torch.manual_seed(42)
        self.setting = setting
        self.new_tokens = new_tokens
        self.bits, self.per_slot = bits, 16 // bits
        num_spans = (1 if is_shared else count) if setting.prefix_tokens else 0
        # A run may be longer than the average; its span's slots are counted over all runs.
        span_slots = setting.kept_tokens + 1
        num_slots = 1 + num_spans * span_slots + count * (suffix_tokens + 8)
        heads = setting.num_kv_heads
        layers = setting.decode_layers
        self.geometry = KVGeometry(layers, heads * setting.group_size, heads, setting.head_dim, num_slots)
        shape = (layers, num_slots, heads, setting.head_dim)
        self.k, self.v = (torch.empty(shape, dtype=torch.bfloat16, device=setting.device).normal_() for _ in range(2))
        order = torch.randperm(num_slots - 1) if is_scattered else torch.arange(num_slots - 1)
        free = list((order + 1).to(setting.device).split([span_slots] * num_spans + [suffix_tokens + 8] * count))
        self.spans = [self.span(free.pop(0)) for _ in range(num_spans)]
        self.req_to_token = torch.zeros(
            count, setting.prefix_tokens + suffix_tokens + 8, dtype=torch.int32, device=setting.device
        )
        for row in self.req_to_token:
            row[setting.prefix_tokens :] = free.pop(0).int()
        self.paths = tuple((self.spans[i % num_spans],) if num_spans else () for i in range(count))
        self.suffix_tokens = suffix_tokens
        coding = None if bits == 16 else self.coding()
        self.attention = TritonAttention(self.geometry, self.k, self.v, coding=coding)
        q_shape = (count * (new_tokens or 1), self.geometry.num_qo_heads, setting.head_dim)
        self.q = torch.empty(q_shape, dtype=torch.bfloat16, device=setting.device).normal_()
        self.device_seq_lens = torch.tensor(self.seq_lens(0), dtype=torch.int32, device=setting.device)

    def coding(self) -> RowCoding:
        """Statistics that change nothing, and steps of ordinary size."""
        shape = (self.geometry.num_layers, self.geometry.num_kv_heads, self.setting.head_dim)
        coding = RowCoding.of(self.k, RowStatistics.neutral(shape, self.k.device))
        coding.k_steps.uniform_(0.1, 0.3)
        coding.v_steps.uniform_(0.1, 0.3)
        return coding

    def span(self, token_slots: Tensor) -> SpanRuns:
        """A prefix whose runs are packed into these token slots."""
        setting, geometry = self.setting, self.geometry
        average = min(setting.kept_tokens * self.per_slot, setting.prefix_tokens)
        lens = average * (torch.rand(geometry.num_layers, geometry.num_kv_heads) * 4 / 3 + 1 / 3)
        lens = (lens * (average * lens.numel() / float(lens.sum()))).int().clamp(max=setting.prefix_tokens)
        used = int(lens.sum())
        held = token_slots[: geometry.slots_for(-(-used // self.per_slot))].long()
        on_device = lens.to(setting.device)
        indptr, rows = alloc_head_slots(on_device, held, geometry.num_token_slots, used, per_slot=self.per_slot)
        starts, positions = indptr[:-1].view(lens.shape), torch.zeros_like(rows)
        return SpanRuns(rows, starts, on_device, setting.prefix_tokens, positions, self.bits)

    def seq_lens(self, grown: int) -> list[int]:
        """Logical lengths after so many more tokens."""
        return [self.setting.prefix_tokens + self.suffix_tokens + grown] * len(self.paths)

    def batch(self, grown: int = 0) -> AttentionBatch:
        """A decode step, lengths on the device as a server has them."""
        return AttentionBatch(
            paths=self.paths,
            seq_lens=self.seq_lens(grown),
            extend_lens=None if self.new_tokens is None else [self.new_tokens] * len(self.paths),
            req_pool_indices=torch.arange(len(self.paths), device=self.setting.device),
            req_to_token=self.req_to_token,
            device_seq_lens=self.device_seq_lens,
        )

    def bytes_per_layer(self) -> float:
        """K, V, steps and index bytes that one layer has to read, on average; a shared prefix once."""
        entries = sum(span.rows.numel() for span in self.spans) / self.geometry.num_layers
        own = len(self.paths) * self.suffix_tokens * self.geometry.num_kv_heads
        steps = 4 if self.bits < 16 else 0
        return entries * (self.setting.entry_bytes / self.per_slot + steps + 4) + own * (self.setting.entry_bytes + 4)

    def run(self, i: int) -> tuple[Tensor, Tensor]:
        """One layer of the planned step."""
        return self.attention.run(i % self.geometry.num_layers, self.q, self.setting.sm_scale)

    def seen(self, request: int, layer: int, head: int) -> Tensor:
        """Head slots that one head of a request attends to."""
        span = self.paths[request][0]
        start, length = int(span.starts[layer, head]), int(span.lens[layer, head])
        first = self.setting.prefix_tokens
        slots = self.req_to_token[request, first : first + self.suffix_tokens].long()
        own = (layer * self.geometry.num_token_slots + slots) * self.geometry.num_kv_heads + head
        return torch.cat([span.rows[start : start + length].long(), own])
