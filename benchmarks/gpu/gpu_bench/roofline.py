"""What each timed line has to do at least: bytes of memory, operations of tensor cores, and the time that these take.

Every byte of K, V, indices, queries and results counts once, partial results and tables not at all; operations are
those of the two matrix products, over visible (query, key) pairs. Launches, latencies and exponentials take no time
here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gpu_bench.decode import SHARERS_SUFFIX, graph_sizes
from gpu_bench.insertion import POLICIES, WINDOW
from gpu_bench.setting import Setting
from gpu_bench.shapes import extend_sizes, shape_sizes

Row = dict[str, Any]
INDEX_BYTES = 4
LSE_BYTES = 4
SCORE_BYTES = 4
LATENT_DIM, LATENT_VALUE_DIM = 576, 512
"""Of DeepSeek V2 and V3: a row is the key, and its first numbers are the value."""
SHARE = "of what is possible"
"""Column of a timed line: least time beside the measured one."""


@dataclass(frozen=True)
class Peaks:
    """Published peaks of a device."""

    bytes_per_second: float  # of its memory
    flops: float  # dense bfloat16 with float32 sums, per second


PEAKS = {
    "H100 PCIe": Peaks(2.0e12, 756e12),
    "H100 NVL": Peaks(3.9e12, 835e12),
    "H100": Peaks(3.35e12, 989e12),
    "H200": Peaks(4.8e12, 989e12),
    "B200": Peaks(8.0e12, 2250e12),
    "A100-SXM4-40GB": Peaks(1.555e12, 312e12),
    "A100": Peaks(2.039e12, 312e12),
    "L40S": Peaks(864e9, 362e12),
    "L4": Peaks(300e9, 121e12),
    "RTX 4090": Peaks(1008e9, 165.2e12),
}
"""By words of the device's name, the first that fit; from NVIDIA's data sheets (H100: SXM; A100: 80 GB, SXM)."""


@dataclass(frozen=True)
class Work:
    """The least that a call can do."""

    num_bytes: float  # read from and written to memory
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def times(self, count: float) -> Work:
        """The same, ``count`` times."""
        return Work(self.num_bytes * count, self.flops * count)

    def least_seconds(self, peaks: Peaks) -> float:
        """Time if the slower of memory and tensor cores ran at its peak, and the other beside it."""
        return max(self.num_bytes / peaks.bytes_per_second, self.flops / peaks.flops)

    def bound(self, peaks: Peaks) -> str:
        """The slower one."""
        is_memory = self.num_bytes / peaks.bytes_per_second >= self.flops / peaks.flops
        return "memory" if is_memory else "tensor cores"


def attention(setting: Setting, *, keys: float, pairs: float, new_tokens: int) -> Work:
    """One layer of attention.

    Args:
        setting: heads and their width.
        keys: entries that are read, per KV head.
        pairs: (new token, visible key), per KV head.
        new_tokens: of all requests.
    """
    heads, width = setting.num_kv_heads, setting.head_dim
    rows = new_tokens * heads * setting.group_size
    num_bytes = keys * heads * (setting.entry_bytes + INDEX_BYTES) + rows * (2 * 2 * width + LSE_BYTES)
    return Work(num_bytes, 4 * width * heads * setting.group_size * pairs)


def decode(setting: Setting, requests: int, spans: int, suffix_tokens: int) -> Work:
    """One layer of a decode step of ``requests`` on ``spans`` prefixes, one each, with suffixes of their own."""
    kept = setting.kept_tokens
    keys = spans * kept + requests * suffix_tokens
    return attention(setting, keys=keys, pairs=requests * (kept + suffix_tokens), new_tokens=requests)


def latent_decode(num_heads: int, requests: int, entries: int) -> Work:
    """One layer of a decode step on latents (MLA): each request's ``entries`` are read by ``num_heads`` query heads."""
    row_bytes = 2 * LATENT_DIM
    rows = requests * num_heads
    num_bytes = requests * entries * (row_bytes + INDEX_BYTES)
    num_bytes += rows * (row_bytes + 2 * LATENT_VALUE_DIM + LSE_BYTES)
    return Work(num_bytes, 2 * (LATENT_DIM + LATENT_VALUE_DIM) * rows * entries)


def extend(setting: Setting, new_tokens: int) -> Work:
    """One layer of one request's new tokens on a prefix, which may be empty."""
    kept = setting.kept_tokens if setting.prefix_tokens else 0
    pairs = new_tokens * kept + new_tokens * (new_tokens + 1) / 2
    return attention(setting, keys=kept + new_tokens, pairs=pairs, new_tokens=new_tokens)


def scores(setting: Setting) -> Work:
    """``window_scores`` of all layers: every key is read, a pooled and a plain score written per entry."""
    heads, width, tokens = setting.num_kv_heads, setting.head_dim, setting.prefix_tokens
    rows = WINDOW * heads * setting.group_size
    num_bytes = tokens * heads * (2 * width + 2 * SCORE_BYTES) + rows * (2 * width + LSE_BYTES)
    return Work(num_bytes, 2 * width * rows * tokens).times(setting.num_layers)


def selection(setting: Setting, num_scores: int) -> Work:
    """Selection of all layers: ``num_scores`` of every entry are read once, positions of kept entries are written."""
    runs = setting.num_layers * setting.num_kv_heads
    return Work(runs * (num_scores * SCORE_BYTES * setting.prefix_tokens + INDEX_BYTES * setting.kept_tokens))


def moves(setting: Setting) -> Work:
    """Compaction of all layers: kept rows and the places where they lie and go are read once, rows written once."""
    kept = setting.num_layers * setting.num_kv_heads * setting.kept_tokens
    return Work(kept * (2 * setting.entry_bytes + 2 * INDEX_BYTES))


def compression(setting: Setting, policy: str) -> Work:
    """Scores, selection and compaction; ``reconstruction`` has its scores from passes that are not timed."""
    chosen = scores(setting) + selection(setting, 2) if policy == "ada-snapkv" else selection(setting, 1)
    return chosen + moves(setting)


@dataclass(frozen=True)
class Timed:
    """The timed lines of a section."""

    column: str  # of the time
    unit: float  # seconds
    work: Callable[[Setting, Row], Work]  # of one line
    lines: Callable[[Setting], list[Row]]  # the columns that tell them apart


def _unshared(setting: Setting, row: Row) -> Work:
    return decode(setting, row["requests"], row["requests"], setting.suffix_tokens)


def _captured(setting: Setting, row: Row) -> Work:
    return _unshared(replace(setting, prefix_tokens=row["prefix tokens"]), row).times(setting.decode_layers)


def _shape(setting: Setting, row: Row) -> Work:
    return _unshared(replace(setting, head_dim=row["head_dim"], num_kv_heads=row["KV heads"]), row)


def _batches(setting: Setting) -> list[Row]:
    return [{"requests": count} for count in setting.batches]


TIMED = {
    "bandwidth": Timed("us per layer", 1e-6, _unshared, _batches),
    "sharers": Timed(
        *("us per layer", 1e-6, lambda setting, row: decode(setting, row["sharers"], 1, SHARERS_SUFFIX)),
        lambda setting: [{"sharers": count} for count in setting.sharers],
    ),
    "planning": Timed("device us per layer", 1e-6, _unshared, _batches),
    "graph": Timed(
        *("graph us", 1e-6, _captured),
        lambda setting: [{"requests": count, "prefix tokens": prefix} for count, prefix in graph_sizes(setting)],
    ),
    "compaction": Timed(
        *("ms", 1e-3, lambda setting, row: moves(setting)),
        lambda setting: [{"tokens": setting.prefix_tokens}],
    ),
    "compression": Timed(
        *("ms", 1e-3, lambda setting, row: compression(setting, row["policy"])),
        lambda setting: [{"policy": policy} for policy in POLICIES],
    ),
    "shapes": Timed(
        *("us per layer", 1e-6, _shape),
        lambda setting: [
            {"head_dim": head_dim, "KV heads": heads, "requests": count}
            for head_dim, heads, count in shape_sizes(setting)
        ],
    ),
    "extend": Timed(
        *("us per layer", 1e-6),
        lambda setting, row: extend(replace(setting, prefix_tokens=row["prefix tokens"]), row["new tokens"]),
        lambda setting: [{"prefix tokens": prefix, "new tokens": new} for prefix, new in extend_sizes(setting)],
    ),
    "uniform": Timed("ours, us per layer", 1e-6, _unshared, _batches),
    "flashinfer": Timed("triton, us per layer", 1e-6, _unshared, _batches),
}
"""By section of the run; others time the host, or what happens once."""


TENSOR_FLOPS = {80: 2048, 89: 1024, 90: 4096, 100: 8192}
"""Dense bfloat16 operations per cycle of a multiprocessor, by architecture: its peak over its boost clock."""
SCHEDULERS = 4
"""Of a multiprocessor; each issues one instruction per cycle."""
LOOP_KEYS = 64
"""Keys to which figures of a loop refer."""


@dataclass(frozen=True)
class ProductLoop:
    """The loop with the products of a kernel of attention, per 64 keys and multiprocessor, from its machine code."""

    arch: int
    head_dim: int
    rows: int  # q rows of a program
    warps: int  # of a program
    programs: int  # resident at once
    instructions: int  # of a warp
    cycles: int  # of a warp alone, products not counted

    @property
    def issue_slots(self) -> float:
        """Cycles in which each scheduler issues something."""
        return self.programs * self.warps * self.instructions / SCHEDULERS

    @property
    def tensor_cycles(self) -> float:
        """Cycles of the products at the peak of the tensor cores."""
        return self.programs * 4 * self.rows * LOOP_KEYS * self.head_dim / TENSOR_FLOPS[self.arch]

    def shares(self) -> tuple[float, float, float]:
        """Share of the tensor cores' peak: no warp overlaps with another; all do; and of the mean of both times.

        A warp waits for each of its products, so its own do not overlap with its other instructions. With others that
        are half a step apart they do, until a scheduler or the tensor cores are always busy.
        """
        alone = max(self.cycles, self.issue_slots) + self.tensor_cycles
        warps = self.programs * self.warps / SCHEDULERS  # of a scheduler
        beside = max(self.tensor_cycles, self.issue_slots, self.cycles + self.tensor_cycles / warps)
        return tuple(self.tensor_cycles / time for time in (alone, beside, (alone + beside) / 2))


def peaks_of(device: str) -> Peaks | None:
    """Peaks of a device by its name; None if they are not listed."""
    return next((peaks for words, peaks in PEAKS.items() if re.search(rf"\b{words}\b", device)), None)


def with_shares(section: str, rows: list[Row], setting: Setting, device: str) -> list[Row]:
    """The rows of a section, each with its share of what is possible and what bounds it, where that is known."""
    timed, peaks = TIMED.get(section), peaks_of(device)
    if timed is None or peaks is None:
        return rows
    return [row | _share(timed, row, timed.work(setting, row), peaks) for row in rows]


def _share(timed: Timed, row: Row, work: Work, peaks: Peaks) -> Row:
    share = work.least_seconds(peaks) / (row[timed.column] * timed.unit)
    return {SHARE: f"{100 * share:.0f} %", "bound by": work.bound(peaks)}


def spoken(section: str, rows: list[Row]) -> list[str]:
    """A sentence for every line whose share is known."""
    if section not in TIMED:
        return []
    return [f"{section}, {_named(row)}: {row[SHARE]} {SHARE} ({row['bound by']})" for row in rows if SHARE in row]


def _named(row: Row) -> str:
    """The columns in front of the first time."""
    names: list[str] = []
    for name, value in row.items():
        if isinstance(value, float):
            break
        names.append(f"{name} {value}")
    return ", ".join(names)
