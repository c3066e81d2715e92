"""The cache in numbers: counters since the start, and gauges of its current contents.

``GET /server_info``, ``/metrics``, the inspection socket and ``sgl-kvevict top`` show these fields by name.
"""

from __future__ import annotations

from typing import Annotated, get_type_hints

import msgspec
from msgspec import Meta

REFUSED = "refused_"
"""Totals with this prefix form one metric, ``refusals``, with the reason as its label."""
ENTRIES = "entries_"
"""Gauges with this prefix form one metric, ``entries``, with the bits of their rows as its label."""


class Totals(msgspec.Struct):
    """Counters since the server started."""

    prompts: Annotated[int, Meta(description="Prompts of requests that were prefilled.")] = 0
    prompt_tokens: Annotated[int, Meta(description="Tokens of these prompts.")] = 0
    found_tokens: Annotated[int, Meta(description="Prompt tokens found in the pool, on the host or in the store.")] = 0
    compressions: Annotated[int, Meta(description="Segments written.")] = 0
    compressed_tokens: Annotated[int, Meta(description="Tokens of these segments.")] = 0
    compression_seconds: Annotated[float, Meta(description="Host time of compressions (on a GPU: launches).")] = 0.0
    released_slots: Annotated[int, Meta(description="Token slots that compressions gave back.")] = 0
    kept_entries: Annotated[int, Meta(description="Entries stored.")] = 0
    evicted_entries: Annotated[int, Meta(description="Entries evicted, by compressions and later.")] = 0
    merged_entries: Annotated[int, Meta(description="Entries merged into stored ones.")] = 0
    prefilled_compressed: Annotated[int, Meta(description="Prompts compressed while they were prefilled.")] = 0
    splits: Annotated[int, Meta(description="Spans cut in two.")] = 0
    repacks: Annotated[int, Meta(description="Segments shrunk after a part was dropped.")] = 0
    resizes: Annotated[int, Meta(description="Segments that shrank further because token slots were short.")] = 0
    resized_slots: Annotated[int, Meta(description="Token slots that these resizes gave back.")] = 0
    growths: Annotated[int, Meta(description="Times that a segment got evicted entries back.")] = 0
    grown_slots: Annotated[int, Meta(description="Token slots that these growths took.")] = 0
    returned_entries: Annotated[int, Meta(description="Evicted entries that came back.")] = 0
    dropped_nodes: Annotated[int, Meta(description="Nodes dropped from the tree.")] = 0
    dropped_spans: Annotated[int, Meta(description="Compressed nodes among the dropped ones.")] = 0
    dropped_slots: Annotated[int, Meta(description="Token slots given back by dropping.")] = 0
    refused_in_use: Annotated[int, Meta(description="Ranges that a request with `exact` reads: compressed later.")] = 0
    refused_not_cached: Annotated[int, Meta(description="Prompts that could not be cached.")] = 0
    refused_no_memory: Annotated[int, Meta(description="Ranges whose observation took too much memory.")] = 0
    clears: Annotated[int, Meta(description="Flushes of the whole cache.")] = 0
    stored_segments: Annotated[int, Meta(description="Segments written to the store.")] = 0
    stored_bytes: Annotated[int, Meta(description="Bytes of the segments written to the store.")] = 0
    already_stored: Annotated[int, Meta(description="Segments that the store had already.")] = 0
    not_stored: Annotated[int, Meta(description="Segments that could not be written, or came too fast.")] = 0
    loaded_segments: Annotated[int, Meta(description="Segments that came from the store into the tree.")] = 0
    loaded_tokens: Annotated[int, Meta(description="Tokens of these segments.")] = 0
    late_loads: Annotated[int, Meta(description="Requests that went on because the store took too long.")] = 0
    failed_loads: Annotated[int, Meta(description="Errors of the store, and segments that were corrupt.")] = 0
    not_placed: Annotated[int, Meta(description="Segments read from the store for which the tree had no place.")] = 0
    moved_out_segments: Annotated[int, Meta(description="Segments copied to the host's memory when dropped.")] = 0
    moved_out_bytes: Annotated[int, Meta(description="Bytes of these copies.")] = 0
    pushed_out_segments: Annotated[int, Meta(description="Segments that left the host's memory to make room.")] = 0
    moved_in_segments: Annotated[int, Meta(description="Segments that came back from the host's memory.")] = 0
    moved_in_tokens: Annotated[int, Meta(description="Tokens of these segments.")] = 0
    moved_in_bytes: Annotated[int, Meta(description="Bytes of these copies.")] = 0
    moved_in_seconds: Annotated[float, Meta(description="Host time of these copies (on a GPU: launching only).")] = 0.0


class Pool(msgspec.Struct, frozen=True):
    """Token slots of the pool by holder; the parts sum to ``total``."""

    total: int  # all token slots
    free: int  # on the allocator's list
    compressed: int  # held by segments in the tree
    full: int  # held by uncompressed nodes of the tree
    private: int  # held by running requests outside the tree


class Gauges(msgspec.Struct, frozen=True):
    """Current contents of the cache."""

    pool: Annotated[Pool, Meta(description="Token slots of the pool by holder.")]
    logical_tokens: Annotated[int, Meta(description="Tokens that the radix tree holds.")]
    held_slots: Annotated[int, Meta(description="Token slots that hold these tokens.")]
    tokens_per_slot: Annotated[float, Meta(description="Logical tokens per token slot that holds them.")]
    span_tokens: Annotated[int, Meta(description="Tokens held compressed.")]
    span_slots: Annotated[int, Meta(description="Token slots that hold compressed tokens.")]
    slot_bytes: Annotated[int, Meta(description="Bytes of a token slot on this rank: keys and values of all layers.")]
    held_bytes: Annotated[int, Meta(description="Bytes of the token slots that hold tokens.")]
    span_bytes: Annotated[int, Meta(description="Bytes of the token slots that hold compressed tokens.")]
    beside_bytes: Annotated[int, Meta(description="Bytes on the device beside the pool: entry lists, scale factors.")]
    share_of_bytes: Annotated[float, Meta(description="Share of their uncompressed bytes that compressed tokens take.")]
    share_of_entries: Annotated[float, Meta(description="Share of the entries of compressed tokens that is stored.")]
    entries_16: Annotated[int, Meta(description="Entries of compressed tokens with rows as the pool stores them.")]
    entries_4: Annotated[int, Meta(description="Entries with rows of 4 bits.")]
    spans: Annotated[int, Meta(description="Compressed nodes in the tree.")]
    segments: Annotated[int, Meta(description="Segments that these nodes hold.")]
    dead_entries: Annotated[int, Meta(description="Entries stored that no span reads any more.")]
    pending_ranges: Annotated[int, Meta(description="Ranges that wait to be compressed.")]
    shared_spans: Annotated[int, Meta(description="Spans that two or more running requests read.")]
    readers: Annotated[int, Meta(description="Running requests that read a span, summed over all spans.")]
    readers_per_span: Annotated[float, Meta(description="Running requests that read a span, on average.")]
    max_readers_per_span: Annotated[int, Meta(description="Running requests that read the span with the most readers.")]
    observation_bytes: Annotated[int, Meta(description="Memory outside the pool: observations and kept prompts.")]
    host_bytes: Annotated[int, Meta(description="Host memory for what was dropped or evicted.")]
    host_used_bytes: Annotated[int, Meta(description="Bytes in use of the host's memory.")]
    host_segments: Annotated[int, Meta(description="Segments in the host's memory.")]
    evicted_entries_kept: Annotated[int, Meta(description="Evicted entries on the host; the pool may have some again.")]
    evicted_bytes_kept: Annotated[int, Meta(description="Bytes of these entries.")]
    long_prompt_tokens: Annotated[int, Meta(description="Tokens of a prompt longer than the pool, being prefilled.")]
    long_prompt_computed: Annotated[int, Meta(description="Tokens of this prompt that are computed.")]


def descriptions(numbers: type[Totals] | type[Gauges]) -> dict[str, str]:
    """Return each field's description, in order."""
    hints = get_type_hints(numbers, include_extras=True)
    return {name: hints[name].__metadata__[0].description for name in numbers.__struct_fields__}
