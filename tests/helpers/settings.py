"""Settings of a server as SGLang resolves them when nothing is given, for tests of what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sgl_kvevict.sglang_adapter.settings import ServerSettings

DEFAULT = ServerSettings(
    ranks_per_host=1,
    attn_dp_size=1,
    chunked_prefill_size=4096,
    speculative_algorithm=None,
    speculative_num_draft_tokens=None,
    strips_thinking=False,
    load_format="auto",
    has_tokenizer=True,
    model_path="model",
    tokenizer_path="model",
)


def settings(**changes: Any) -> ServerSettings:
    return replace(DEFAULT, **changes)
