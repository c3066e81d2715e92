"""Models with windows and sinks, which SGLang starts only with the attention backends on its list."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.model_override_base import model_config_of, resolved_view
from sglang.srt.arg_groups.overrides import declare_resolution

from sgl_kvevict.sglang_adapter.compat import BACKEND_NAME

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

LISTED = frozenset({"GptOssForCausalLM", "Exaone4ForCausalLM"})
"""Architectures that our attention supports and for which SGLang has such a list."""
STAND_IN = "triton"
"""On every list; the settings that SGLang derives from it are right for ours too."""


def around_model_adjustments(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook: present our backend as ``STAND_IN`` while SGLang checks its list."""
    is_ours = resolved_view(server_args).attention_backend == BACKEND_NAME
    if not is_ours or model_config_of(server_args).hf_config.architectures[0] not in LISTED:
        previous(server_args)
        return
    source = f"{BACKEND_NAME}: around_model_adjustments"
    declare_resolution(server_args, source, attention_backend=STAND_IN)
    previous(server_args)
    declare_resolution(server_args, source, attention_backend=BACKEND_NAME)
