"""Named methods as compositions of parts, each with its options."""

from __future__ import annotations

from sgl_kvevict.policies.presets.entry import PolicyEntry
from sgl_kvevict.policies.presets.positional import STREAMING_LLM
from sgl_kvevict.policies.presets.window import ADA_SNAPKV, SNAPKV

ENTRIES: tuple[PolicyEntry, ...] = (STREAMING_LLM, SNAPKV, ADA_SNAPKV)

__all__ = ["ENTRIES", "PolicyEntry"]
