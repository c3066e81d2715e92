"""Drives the real tree, pools and requests of SGLang without a model, and checks contents and conservation.

K and V of every token are filled with numbers that encode its whole prefix, its layer and its head. So any mix-up of
tokens, layers, heads, namespaces or slots shows when a request's view of the cache is read back.
"""

from __future__ import annotations

import json
import math
import zlib
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import torch
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.mem_cache import events
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from torch.distributed import ProcessGroup

from helpers.encoded import read_as_near
from helpers.host import check_host
from helpers.learned import LearnedCompressor
from helpers.pseudo_random_policy import PseudoRandomPolicy
from helpers.statistics import random_coding
from kvevict_kernels.rotary import Rotary
from kvevict_kernels.row_sizes import WIDTHS
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.cache.nodes import length_of, path_to
from sgl_kvevict.cache.saving import StoreAccess
from sgl_kvevict.config import Bits, KVEvictConfig
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import Policy
from sgl_kvevict.policies.by_name import NO_POLICY
from sgl_kvevict.segments.collectors import COLLECTORS
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.segments.segment import Packed, Segment, Span
from sgl_kvevict.segments.shadow import DraftRows
from sgl_kvevict.sglang_adapter.host_memory import before_matching, host_identity
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state
from sgl_kvevict.sglang_adapter.ranks import TensorRanks
from sgl_kvevict.sglang_adapter.span_component import FULL
from sgl_kvevict.sglang_adapter.tree import KVEvictTree
from sgl_kvevict.store.host import HostSegments

LORA_NAMES = getattr(events, "KvEventLoraNames", events.LoRANameTable)  # which SGLang 0.5.22 has
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}

LEAST_SHARE = {"share": 0.001}
"""Options of a request whose own prompt stays uncompressed until slots are short; it reads any prefix as it is."""
CONFIG = KVEvictConfig(budget=0.3, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6, answer_block=None)
DOCUMENT = [i * 7 % 11 for i in range(60)]
WINDOWS = (1000, 0)
"""Of a harness whose compressed segments cannot be split."""
NO_ROTARY = Rotary(torch.empty(512, 0), is_neox=True)


def publish_server_args(folder: Path) -> None:
    """Install the process-wide configuration that SGLang's request life cycle reads."""
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    ours = {"radix_cache_backend": "kvevict", "attention_backend": "kvevict"}
    publish(ServerArgs(model_path=str(folder), device="cpu", **ours), role="scheduler")


@dataclass
class Harness:
    """A scheduler in miniature: admits, prefills in chunks, decodes, finishes, retracts and flushes requests.

    Attributes:
        waits: requests ask for a share of their entries, so that prompts stay uncompressed until slots are short.
        host_blocks: memory on the host for what is dropped, in blocks of two slots' entries.
        windows: of the two layers, see :attr:`KVGeometry.windows`.
        is_latent: values are the first numbers of the keys' rows, of one head.
        make_stream: where entries are chosen, if not at once.
        cache_grid: only multiples of so many tokens are cached, and found; as for models with a recurrent state.
        keys_are_pairs: of tokens, as with a draft model that reads hidden states (EAGLE).
        bits: of rows. Fewer than 16 need wider rows, in bfloat16, whose numbers all depend on the token.
    """

    num_slots: int = 120
    num_rows: int = 8
    max_tokens: int = 512
    config: KVEvictConfig = CONFIG
    policy: PseudoRandomPolicy | Policy | None = field(default_factory=PseudoRandomPolicy)
    group: ProcessGroup | None = None
    eviction_policy: str = "lru"
    eviction_config: dict | None = None
    has_sessions: bool = False
    scores_any_range: bool = False
    waits: bool = False
    access: StoreAccess | None = None
    host_blocks: int = 0
    windows: tuple[int, ...] = ()
    cache_grid: int = 1
    is_latent: bool = False
    make_stream: Callable[[], Any] | None = None
    keys_are_pairs: bool = False
    bits: Bits = 16
    geometry: KVGeometry = field(init=False)

    def __post_init__(self) -> None:
        num_kv_heads, latent_dim = (1, 1) if self.is_latent else (2, 0)
        head_dim, dtype = (2, torch.float32) if self.bits == 16 else (32, torch.bfloat16)
        self.geometry = KVGeometry(
            2, 4, num_kv_heads, head_dim, self.num_slots + 1, windows=self.windows, latent_dim=latent_dim
        )
        self.k, self.v = (torch.full(self.geometry.arena_shape, float("nan"), dtype=dtype) for _ in range(2))
        self._packed: WeakSet[Packed] = WeakSet()
        self.arenas: tuple[tuple[torch.Tensor, float], ...] = ((self.k, 1.0), (self.v, -1.0))
        if self.is_latent:
            self.v, self.arenas = self.k[..., :1], self.arenas[:1]
        self.adapters = LORA_NAMES()
        """LoRA adapters that were loaded; one with which a test asks is."""
        params = CacheInitParams(
            kv_event_lora_names=self.adapters,
            disable=False,
            page_size=1,
            attn_tp_cache_group=self.group,
            eviction_policy=self.eviction_policy,
            eviction_policy_config=self.eviction_config,
            enable_session_radix_cache=self.has_sessions,
            is_eagle=self.keys_are_pairs,
            **self._make_pools(),
        )
        self.rows, self.allocator = params.req_to_token_pool, params.token_to_kv_pool_allocator
        coding = None if self.bits == 16 else random_coding(self.geometry, self.k)
        self.config = self.config.model_copy(update={"bits": self.bits})
        if not self._compresses_answers():
            self.config = self.config.model_copy(update={"answer_block": None})  # as the factory does
        store = SegmentPacker(self.geometry, self.k, self.v, self._make_drafts(), coding)
        kind = LearnedCompressor if self.scores_any_range or self.waits else Compressor
        stream = None if self.make_stream is None else self.make_stream()
        policy = cast("Policy", self.policy or NO_POLICY)
        if self.policy is None:
            self.config = self.config.model_copy(update={"policy": "none"})
        compressor = kind(self.config, policy, store, stream=stream)
        ranks = TensorRanks(self.group)
        identity = host_identity(self.config.min_prefix_tokens)
        arena = torch.empty(self.host_blocks, 2 * store.slot_bytes(), dtype=torch.uint8)
        self.host = HostSegments(arena, self.k.device, identity, ranks.largest)
        self.tree = KVEvictTree(params, compressor, self.host, self.access)
        self._take, self.tree.port.alloc = self.tree.port.alloc, self._take_or_leave  # type: ignore[method-assign]
        if self.cache_grid > 1:
            full = self.tree.components[FULL]
            full.floor_cache_len = lambda length: length // self.cache_grid * self.cache_grid
            full.create_match_validator = lambda match_device_only=False: self._is_on_grid
        self.live: list[Req] = []
        self._count = 0

    def _compresses_answers(self) -> bool:
        needs = self.policy.needs if self.policy else frozenset()
        ranks_any_range = self.scores_any_range or self.waits or needs.isdisjoint(COLLECTORS)
        return ranks_any_range and not self.windows and self.cache_grid == 1

    def _make_pools(self) -> dict[str, Any]:
        rows = ReqToTokenPool(self.num_rows, self.max_tokens, "cpu", False)
        allocator = TokenToKVPoolAllocator(self.num_slots, torch.float32, "cpu", None, False)
        return {"req_to_token_pool": rows, "token_to_kv_pool_allocator": allocator, "tree_components": (FULL,)}

    def _make_drafts(self) -> DraftRows | None:
        return None

    def _is_on_grid(self, node) -> bool:
        return length_of(path_to(node)) % self.cache_grid == 0

    # ---- what a scheduler does ------------------------------------------------------------------------------

    def request(
        self, tokens: list[int], extra_key: str | None = None, options: dict | None = None, lora_id: str | None = None
    ) -> Req:
        """Create a request; ``options`` are those for the plugin."""
        self._count += 1
        if self.waits and not {"complete", "exact"} & (options or {}).keys():
            options = LEAST_SHARE | (options or {})
        custom_params = None if options is None else {"kvevict": options}
        if lora_id is not None:
            self.adapters.register(lora_id=lora_id, lora_name="any")
        sampling = SamplingParams(max_new_tokens=8, temperature=0, custom_params=custom_params)
        return Req(f"r{self._count}", "", array("q", tokens), sampling, extra_key=extra_key, lora_id=lora_id)

    def uncached_request(self, tokens: list[int], options: dict | None = None) -> Req:
        """Create a request that SGLang puts nothing of into the tree: what its client gives as ``bootstrap_host``."""
        req = self.request(tokens, options=options)
        req.bootstrap_host, req.skip_radix_cache_insert = FAKE_BOOTSTRAP_HOST, True
        return req

    def admit(self, req: Req) -> bool:
        """Match and lock a request; False if no row is free."""
        if len(self.live) == self.num_rows:
            return False
        before_matching(req, self.tree)
        req.init_next_round_input(self.tree)
        req.lock = self.tree.lock(req.last_node)
        self.live.append(req)
        return True

    def prefill(self, req: Req, end: int | None = None) -> bool:
        """Run one prefill chunk up to ``end``; False (and the request released) if slots are short."""
        total = len(req.full_untruncated_fill_ids)
        end = total if end is None else min(end, total)
        slots = self._alloc(end - req.prefix_len)
        if slots is None:
            self._cancel(req)
            return False
        if not req.kv.holds_kv:
            prefix = self.tree.prefix_device_indices(req) if req.prefix_len else None
            self.rows.alloc([req])
            if prefix is not None:
                self.rows.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), prefix.to(torch.int32))
        start = req.prefix_len
        self.rows.write((req.kv.req_pool_idx, slice(start, end)), slots.to(torch.int32))
        req.kv.kv_committed_len = req.kv.kv_allocated_len = end
        req.extend_end = end
        self._write_tokens(req, start, end, slots)
        self._forward(req, end)
        self._record(req, start, end)
        if end < total:
            checkpoint_kv_cache(req, self.tree)
        else:
            req.output_ids.append(self._next_token(req))
            if len(req.output_ids) >= req.sampling_params.max_new_tokens:
                self.finish(req)
            else:
                checkpoint_kv_cache(req, self.tree)
        self.check()
        return True

    def _record(self, req: Req, start: int, end: int) -> None:
        """Hand the chunk's queries to its observations."""
        for observation in self.tree.observe(req, start, end):
            queries = self._queries(end - start)
            lse = torch.log(torch.arange(start + 1, end + 1.0))[:, None].repeat(1, self.geometry.num_qo_heads)
            for layer in range(self.geometry.num_layers):
                observation.record(layer, queries, lse, self.k[layer], 1.0)

    def _queries(self, count: int) -> torch.Tensor:
        """Zeros, which attend to all tokens alike; ranks of a campaign have others (tools/campaign/machine.py)."""
        return torch.zeros(count, self.geometry.num_qo_heads, self.geometry.head_dim, dtype=self.k.dtype)

    def run(
        self,
        tokens: list[int],
        extra_key: str | None = None,
        chunk: int | None = None,
        options: dict | None = None,
        lora_id: str | None = None,
    ) -> Req | None:
        """Admit and prefill a whole prompt; None if resources are short."""
        req = self.request(tokens, extra_key, options, lora_id)
        if not self.admit(req):
            return None
        end = req.prefix_len
        while True:
            end = len(tokens) if chunk is None else end + chunk
            if not self.prefill(req, end):
                return None
            if end >= len(tokens):
                return req

    def decode(self, req: Req) -> bool:
        """Run one decode step; False (and the request retracted) if slots are short."""
        slots = self._alloc(1)
        if slots is None:
            self.retract(req)
            return False
        req.refresh_fill_ids()
        position = req.kv.kv_allocated_len
        self.rows.write((req.kv.req_pool_idx, slice(position, position + 1)), slots.to(torch.int32))
        req.kv.kv_committed_len = req.kv.kv_allocated_len = position + 1
        self._write_tokens(req, position, position + 1, slots)
        self._forward(req, position + 1)
        req.output_ids.append(self._next_token(req))
        self.check()
        return True

    def serve(self, tokens: list[int], extra_key: str | None = None) -> int:
        """Run a request to its end; return how much of its prompt it found."""
        req = self.request(tokens, extra_key)
        assert self.admit(req)
        found = int(req.prefix_len)
        assert self.prefill(req)
        self.decode(req)
        self.finish(req)
        return found

    def turn(self) -> None:
        """Between two steps."""
        for req in self.live:
            if req.output_ids:
                self.tree.insert_answer(req)
                self.check()
        self.tree.prefixes.resizer.between_steps()
        self.check()

    def finish(self, req: Req) -> None:
        """Finish a request and let the tree keep what it computed."""
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        req.finished_len = len(req.output_ids)
        release_kv_cache(req, self.tree, checkpoint=True)
        self.live.remove(req)
        self.check()

    def retract(self, req: Req) -> None:
        """Release a request without keeping its outputs, as SGLang does under pressure."""
        release_kv_cache(req, self.tree, checkpoint=False)
        req.reset_for_retract()
        self.live.remove(req)
        self.check()

    def flush(self) -> None:
        """Forget everything; only when nothing runs."""
        assert not self.live
        self.tree.reset()
        self.rows.free_slots = list(range(1, self.num_rows + 1))
        self.allocator.clear()
        self.check()

    def drop_all(self) -> None:
        """Everything leaves the pool."""
        while self.evict(1):
            pass
        assert self.allocator.available_size() == self.num_slots

    def found(self, tokens: list[int]) -> int:
        """Tokens of a prompt that are found; the request is released again."""
        req = self.request(tokens)
        self.admit(req)
        self.abort(req)
        return int(req.prefix_len)

    def evict(self, num_slots: int) -> int:
        """Drop leaves; return what came back, checked against the allocator."""
        before = self.tree.slot_allocator.available_size()
        promised = self.tree.evictable_size()
        released = self.tree.evict(EvictParams(num_tokens=num_slots)).num_tokens_evicted
        assert self.tree.slot_allocator.available_size() - before == released >= min(num_slots, promised)
        self.check()
        return released

    def _take_or_leave(self, num_slots: int) -> torch.Tensor | None:
        """Give the cache slots for what it loads or grows, or none; then nothing has shrunk or was dropped for them."""
        held = self.tree.held_slots()
        slots = self._take(num_slots)
        assert slots is not None or self.tree.held_slots() == held or any(self.tree.guard.errors.values())
        return slots

    def _alloc(self, count: int) -> torch.Tensor | None:
        short = count - self.allocator.available_size()
        if short > 0:
            self.evict(short)
        slots = self.allocator.alloc(count)
        if slots is not None:
            rows = slots.long()
            for arena, _ in self.arenas:
                arena[:, rows] = float("nan")
        return slots

    def abort(self, req: Req) -> None:
        """Abort a request, wherever it is."""
        req.finished_reason = FINISH_ABORT("aborted")
        self._cancel(req)

    def _cancel(self, req: Req) -> None:
        if req.kv.holds_kv:
            self.retract(req)
            return
        self.tree.unlock(req.lock)
        req.lock = None
        self.live.remove(req)
        self.check()

    # ---- contents -------------------------------------------------------------------------------------------

    def _next_token(self, req: Req) -> int:
        return (len(req.origin_input_ids) + len(req.output_ids)) % 3

    def _codes(self, req: Req, end: int) -> list[float]:
        """One number per position that identifies the namespace and all tokens up to it."""
        tokens = list(req.origin_input_ids) + list(req.output_ids)
        code = zlib.crc32(repr((req.extra_key, req.cache_salt)).encode())
        codes = []
        for token in tokens[:end]:
            code = zlib.crc32(token.to_bytes(8, "little"), code)
            codes.append(float(code % (1 << 23)))
        return codes

    def _contents(self, codes: list[float]) -> torch.Tensor:
        """[num_layers, num_tokens, num_kv_heads, head_dim]: keys of these tokens, and their negated values."""
        geometry = self.geometry
        runs = torch.arange(geometry.num_runs).view(geometry.num_layers, 1, geometry.num_kv_heads)
        shape = (geometry.num_layers, len(codes), geometry.num_kv_heads)
        both = torch.tensor(codes).long().view(1, -1, 1).expand(shape), runs.expand(shape)
        if geometry.head_dim == 2:
            return torch.stack(both, -1).float()
        mixed = (both[0][..., None] * 2654435761 + both[1][..., None] * 40503 + torch.arange(32) * 97) % 2**32
        for factor in (73244475, 73244475):
            mixed = (mixed ^ (mixed >> 15)) * factor % 2**32
        return ((mixed >> 8) % 4001 / 1000 - 2).to(self.k.dtype)

    def _write_tokens(self, req: Req, start: int, end: int, slots: torch.Tensor) -> None:
        contents = self._contents(self._codes(req, end)[start:end])
        for arena, sign in self.arenas:
            arena[:, slots.long()] = sign * contents[..., : arena.shape[-1]]

    def _forward(self, req: Req, seq_len: int) -> None:
        """Read everything a forward of this request would read, and check every entry."""
        if self.tree.prefixes.readers[req].is_exact:
            assert self.tree.read_paths([req]) == ((),)
        codes = self._codes(req, seq_len)
        contents, start, compressed_len = self._contents(codes), 0, 0
        assert len(codes) == seq_len
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        (path,) = self.tree.read_paths([req])
        if self.cache_grid == 1:  # models with a grid are refused together with what cannot be cut
            nodes = path_to(self.tree.tree_core.node_by_id(req.last_node))
            ends = {span.segment: span.end for node in nodes if (span := self.tree.spans.get(node)) is not None}
            assert all(segment.splittable or segment.end == end for segment, end in ends.items())
        for runs in path:
            start, compressed_len = compressed_len, compressed_len + runs.num_tokens
            self._check_runs(runs, contents, start, compressed_len)
        self._check_report(req, path, compressed_len)
        assert row[:compressed_len].eq(0).all()
        suffix = row[compressed_len:seq_len].long()
        assert suffix.ne(0).all()
        assert all(torch.equal(arena[:, suffix], sign * contents[:, compressed_len:]) for arena, sign in self.arenas)

    def _check_report(self, req: Req, path: tuple[SpanRuns, ...], compressed_len: int) -> None:
        """What a client would be told of a path: its compressed tokens, and their entries, counted on the host.

        Of a segment that the path leaves, the host knows the mean of all its tokens.
        """
        nodes = path_to(self.tree.tree_core.node_by_id(req.last_node))
        told = self.tree.spans.compressed_read(nodes, compressed_len)
        assert told.num_tokens == compressed_len
        segments = {span.segment for node in nodes if (span := self.tree.spans.get(node)) is not None}
        if compressed_len and compressed_len == sum(each.live_end - each.start for each in segments):
            num_entries = compressed_len * self.geometry.num_runs
            read = [sum(int(runs.lens.sum()) for runs in path if runs.bits == bits) for bits in WIDTHS]
            assert all(map(math.isclose, (share * num_entries for share in told.shares), read))

    def _check_runs(self, runs: SpanRuns, contents: torch.Tensor, start: int, end: int) -> None:
        """Check the rows that every (layer, head) reads of the tokens ``[start, end)`` of a path."""
        for layer, head in product(range(self.geometry.num_layers), range(self.geometry.num_kv_heads)):
            first = int(runs.starts[layer, head])
            entries = slice(first, first + int(runs.lens[layer, head]))
            positions = runs.positions[entries].long()
            assert positions.diff().gt(0).all() and ((positions >= start) & (positions < end)).all()
            for (arena, sign), is_value in zip(self.arenas, (False, True), strict=False):
                wanted = sign * contents[layer, positions, head]
                if runs.bits == 16:
                    self._check_rows(arena.view(-1, self.geometry.head_dim)[runs.rows[entries].long()], wanted)
                    continue
                coding = self.tree.packer.coding
                assert coding is not None
                of_run = torch.full_like(positions, layer * self.geometry.num_kv_heads + head)
                found = coding.load(arena, runs.rows[entries], of_run, is_v=is_value)
                assert read_as_near(found, wanted, *coding.statistics.of_runs(of_run, is_v=bool(is_value)))

    def _check_rows(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        """Check rows of 16 bits, [num_entries, head_dim], against what was written of their tokens."""
        assert torch.equal(found, wanted)

    # ---- conservation ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every slot has exactly one owner, and the tree's sizes are what a walk of the tree says."""
        held = Counter(self.tree.slot_allocator.free_pages.tolist())
        sizes = {True: 0, False: 0}
        segments: dict[Segment, list[Span]] = {}
        for node in self.tree.nodes():
            sizes[self.tree.port.num_locks(node) > 0] += self.tree.node_slots(node)
            span = self.tree.spans.get(node)
            if span is None:
                held.update(node.component_data[FULL].value.tolist())
            else:
                assert node.component_data[FULL].value.eq(0).all() and span.num_tokens == len(node.key)
                parent = node.parent
                assert parent is self.tree.root_node or parent in self.tree.spans, (
                    "a compressed node below an uncompressed one"
                )
                segments.setdefault(span.segment, []).append(span)
        assert len(self.tree.spans) == sum(len(spans) for spans in segments.values())
        for segment, spans in segments.items():
            held.update(segment.packed.token_slots.tolist())
            assert segment.num_spans == len(spans)
            self._check_known(segment)
            self._check_places(segment.packed)
            owners = [span.is_owner for span in sorted(spans, key=lambda s: s.start)]
            assert owners == [True] + [False] * (len(spans) - 1)
        self._check_table()
        for req in self.live:
            if req.kv.holds_kv:
                row = self.rows.req_to_token[req.kv.req_pool_idx]
                held.update(row[req.kv.cache_protected_len : req.kv.kv_allocated_len].tolist())
        assert held == Counter(range(1, self.num_slots + 1))
        reclaimable = self.tree.prefixes.pressure.reclaimable()
        counted = (self.tree.protected_size(), self.tree.evictable_size())
        assert counted == (sizes[True] - reclaimable, sizes[False] + reclaimable)
        assert cache_state(self.tree)["leaked_slots"] == 0
        check_host(self.host, self.tree.prefixes.table.packed)
        self.tree.sanity_check()  # SGLang's own: structure, leaf sets, ledgers

    def _check_places(self, packed: Packed) -> None:
        """Entries of a segment have no byte in common, and lie in its slots behind those of its sinks."""
        if packed in self._packed:
            return
        self._packed.add(packed)
        geometry, rows = self.geometry, packed.rows
        num_bytes = geometry.head_dim * self.k.element_size()
        width = num_bytes if rows.bits == 16 else geometry.head_dim // 2
        taken = (rows.rows[:, None].long() * width + torch.arange(width)).flatten()
        assert taken.unique().numel() == taken.numel()
        slots = taken // num_bytes // geometry.num_kv_heads % geometry.num_token_slots
        assert torch.isin(slots, packed.token_slots[packed.num_sinks :]).all()

    def _check_known(self, segment: Segment) -> None:
        """What is known of a segment's entries is known of each."""
        assert segment.keys is None or segment.keys.numel() == segment.packed.rows.num_entries

    def _check_table(self) -> None:
        """Every record is of a node in the tree; open ranges end with uncompressed nodes."""
        table = self.tree.prefixes.table
        owners = {span.segment: node for node in self.tree.nodes() if (span := table.spans.get(node)) and span.is_owner}
        assert owners == table.packed
        for node, span in table.spans.items():
            assert span.num_tokens == len(node.key) and span.end == length_of(path_to(node))
        nodes = {*self.tree.nodes()}
        assert table.open.keys() <= nodes and not table.open.keys() & table.spans.keys()
        waiting = {last for last, opened in table.open.items() if opened.waits}
        assert table.shrinking <= waiting | {*owners.values()} and waiting <= table.shrinking
        known = {*table.spans, *table.retained, *table._awaited}
        assert known <= nodes, "what is known of a node goes with it"
