"""Device and sizes of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Setting:
    """Sizes of a run.

    Attributes:
        device: "cuda", or "cpu" for a run that only shows that everything works (Triton's interpreter).
        num_layers: layers of the compression sections.
        decode_layers: layers of the decode sections: each call reads another one, so that caches stay cold.
        num_kv_heads: KV heads.
        group_size: q heads per KV head.
        head_dim: width.
        prefix_tokens: tokens of a prefix.
        budget: share of its entries that is kept.
        batches: numbers of requests, each with a prefix of its own.
        sharers: numbers of requests on one prefix.
        suffix_tokens: uncompressed tokens of each request.
        repeats: timed calls.
        model_layers: layers that figures per step are given for.
    """

    device: str
    num_layers: int
    decode_layers: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    prefix_tokens: int
    budget: float
    batches: tuple[int, ...]
    sharers: tuple[int, ...]
    suffix_tokens: int
    repeats: int
    model_layers: int = 32

    @property
    def sm_scale(self) -> float:
        """Softmax scale."""
        return float(self.head_dim**-0.5)

    @property
    def kept_tokens(self) -> int:
        """Average entries per run of a compressed prefix: the token slots that it takes."""
        return max(1, int(self.prefix_tokens * self.budget))

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry, K and V, bfloat16."""
        return 4 * self.head_dim


FULL = Setting("cuda", 32, 8, 8, 4, 128, 32768, 0.2, (1, 8, 64), (1, 2, 4, 8, 16, 32, 64), 128, 30)
SMOKE = Setting("cpu", 2, 2, 2, 4, 32, 96, 0.25, (1, 2), (1, 2), 9, 1)


@contextlib.contextmanager
def syncs_raise(setting: Setting) -> Iterator[None]:
    """Make torch raise at whatever waits for the device."""
    if setting.device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    yield
    if setting.device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
