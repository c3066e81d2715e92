"""Refuses setups in the launcher process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_kvevict.config import load_config
from sgl_kvevict.errors import KVEvictError
from sgl_kvevict.policies.by_name import configured_policy
from sgl_kvevict.sglang_adapter.settings import resolving
from sgl_kvevict.sglang_adapter.start_facts import before_load
from sgl_kvevict.support import BACKEND_NAME, BACKENDS, BEFORE_LOAD, require

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_COMMANDS = ("launch_server.py", "sglang")
"""``python -m sglang.launch_server`` and ``sglang serve``: programs that listen on ``--port``."""


def after_first_step(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook, first step of a server's start: refuse unsupported setups with all reasons.

    The step turns ``--enable-dp-attention --dp-size N`` into ``--attn-dp-size N``; what the checks read is what it
    decided. Prints the reasons and exits with code 1 in SGLang's own commands; raises :class:`KVEvictError` elsewhere
    (``sgl.Engine``).
    """
    # First SGLang's own step: the checks read what it decides.
    previous(server_args)
    value_of = resolving(server_args)
    if BACKEND_NAME not in map(value_of, BACKENDS):
        return
    is_command = Path(sys.argv[0]).name in _COMMANDS
    try:
        config = load_config()
        # Wrong options of a policy would otherwise be found after the model is loaded.
        configured_policy(config)
        address = (str(value_of("host")), value_of("port")) if is_command else None  # it will listen there
        require(BEFORE_LOAD, before_load(value_of, config, address=address))
    except KVEvictError as error:
        if not is_command:
            raise
        # In SGLang's own commands a traceback of its launcher would bury the reasons.
        raise SystemExit(f"sgl-kvevict: error: {error}") from error
