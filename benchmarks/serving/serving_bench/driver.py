"""The tests' scheduler in miniature, without its checks, on our tree or on SGLang's: real pools and request objects."""

from __future__ import annotations

import sys

from serving_bench.results import ROOT

sys.path.insert(0, str(ROOT / "tests"))

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from helpers.harness import Harness, publish_server_args
from sgl_kvevict.config import KVEvictConfig

__all__ = ["Driver", "StockDriver", "StockPythonDriver", "build", "publish_server_args"]

MAX_TOKENS = 8192
"""Tokens that a request may have."""


class Driver(Harness):
    """The scheduler in miniature of the tests, without its checks and without contents of K and V."""

    def __post_init__(self) -> None:
        """Build pools; rows are longer than the tests need."""
        super().__post_init__()
        self.rows = ReqToTokenPool(self.num_rows, MAX_TOKENS, "cpu", False)
        self.tree.req_to_token_pool = self.rows

    def check(self) -> None:
        """Nothing: every operation would look at all slots."""

    def _forward(self, req: object, seq_len: int) -> None:
        """Nothing is read."""

    def _write_tokens(self, req: object, start: int, end: int, slots: torch.Tensor) -> None:
        """Nothing is written."""


class StockDriver(Driver):
    """The same on SGLang's own tree.

    Attributes:
        core: which of its cores; None for its default, written in Rust.
    """

    core: str | None = None

    def __post_init__(self) -> None:
        """Replace the tree."""
        super().__post_init__()
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=self.core,
        )
        self.tree = UnifiedRadixCache(params)
        self.tree.observe = lambda *_: ()  # type: ignore[method-assign]


class StockPythonDriver(StockDriver):
    """The same with its core in Python, which trees with components of other packages have."""

    core = "python"


def build(kind: type[Driver], num_slots: int, config: KVEvictConfig | None = None) -> Driver:
    """An empty system with a pool of so many token slots."""
    return kind(num_slots=num_slots) if config is None else kind(num_slots=num_slots, config=config)
