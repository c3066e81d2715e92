"""Cutting keys into work items: small enough that one request fills the device, large enough to run at full speed.

A chunk depends on its span or suffix, on the device, and on how many tiles the q rows of the span's readers fill: a
row's result depends on other requests only by that number.
"""

from __future__ import annotations

from functools import lru_cache

ITEMS_PER_SM = 2
"""Work items per multiprocessor into which one span or suffix of a single request is cut, if it is long enough."""
CHUNK_STEP = 64
"""Chunks are multiples of this (entries)."""
MIN_CHUNKS = (128, 256)
"""Entries of a work item, at least, by row class; with more q rows the partials of a short chunk cost more."""
MAX_CHUNK = 1024
"""Entries of a span's chunk, at most, unless its run already has ``max_chunks`` chunks."""
RAMPS = (128, 384)
"""Cost of a work item before its loop runs at full speed, in entries, by row class: three dependent loads, and writing
and reading the partials of up to 128 q rows (estimate)."""
EXTEND_RAMP = 256
"""The same for ``ragged_extend``, with writing and reading a tile's partials (estimate)."""
MIN_BUCKET = 512
MIN_EXTEND_KEYS = 256
"""A tile of q rows is not split into parts with fewer keys."""


@lru_cache(maxsize=4096)
def span_chunk(entries: int, num_kv_heads: int, num_items: int, which: int, num_tiles: int = 1) -> int:
    """Entries of one work item of a span: the fastest by a simple model.

    The model: rounds of ``num_items`` concurrent items, each as long as its entries and a ramp. ``entries`` is the
    average of a layer, all heads; each head has a last chunk that is half full on average. ``which`` is the row class,
    ``num_tiles`` are the tiles of the span's q rows, each of which reads every chunk.
    """

    def cost(chunk: int) -> int:
        rounds = -(-(entries // chunk + num_kv_heads // 2 + 1) * num_tiles // num_items)
        return rounds * (chunk + RAMPS[which])

    return min(range(MIN_CHUNKS[which], max(MAX_CHUNK, MIN_CHUNKS[which]) + 1, CHUNK_STEP), key=cost)


def max_chunks(average: int, chunk: int) -> int:
    """Maximum number of chunks of one run: a run of more than twice the average length gets longer chunks instead.

    This bounds a span's partials by numbers that the host knows, however uneven its runs are.
    """
    return 2 * max(1, -(-average // chunk)) + 1


def most_splits(num_kv_heads: int, num_items: int) -> int:
    """Work items per (head, row tile) of a suffix of any length: as many as fill the device."""
    return -(-num_items // num_kv_heads)


def suffix_splits(bound: int, num_kv_heads: int, num_items: int, which: int) -> int:
    """Work items per (head, row tile) of a suffix of at most ``bound`` tokens; the device uses the real length."""
    return min(-(-bound // MIN_CHUNKS[which]), most_splits(num_kv_heads, num_items))


@lru_cache(maxsize=4096)
def extend_splits(num_tiles: int, keys: int, num_sms: int) -> int:
    """Parts into which the keys of each tile of q rows are split.

    ``num_tiles`` are the tiles of the request, all heads; ``keys`` are those of one tile, at most. A tile occupies one
    of the ``num_sms`` multiprocessors.
    """
    most = max(1, min(keys // MIN_EXTEND_KEYS, -(-2 * num_sms // num_tiles)))

    def cost(splits: int) -> float:
        return -(-num_tiles * splits // num_sms) * (keys / splits + EXTEND_RAMP * (splits > 1))

    return min(range(1, most + 1), key=cost)


def bucket(num_tokens: int) -> int:
    """Round up to a power of two, at least ``MIN_BUCKET``: a bound that a growing suffix seldom exceeds."""
    return max(MIN_BUCKET, 1 << (num_tokens - 1).bit_length())
