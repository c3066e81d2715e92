"""Refuses setups in the launcher process, and ends it cleanly when a scheduler refuses."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from os import _exit, getpid
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.utils import kill_process_tree

from sgl_kvevict.config import load_config
from sgl_kvevict.errors import KVEvictError, UnsupportedSetupError
from sgl_kvevict.policies.by_name import configured_policy
from sgl_kvevict.sglang_adapter.compat import BACKEND_NAME, LAUNCHER_HOOK
from sgl_kvevict.sglang_adapter.start_checks import (
    BACKENDS,
    backend_reasons,
    flag_reasons,
    pool_size_reasons,
    port_reasons,
    resource_reasons,
    speculation_reasons,
)

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_COMMANDS = ("launch_server.py", "sglang")
"""``python -m sglang.launch_server`` and ``sglang serve``: programs that listen on ``--port``."""


def before_resolution(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook, first step of a server's start: refuse unsupported setups with all reasons.

    Prints them and exits with code 1 in SGLang's own commands; raises :class:`KVEvictError` elsewhere (``sgl.Engine``).
    """
    if BACKEND_NAME in (getattr(server_args, name) for name in BACKENDS):
        is_command = Path(sys.argv[0]).name in _COMMANDS
        try:
            check_start(server_args, is_command=is_command)
        except KVEvictError as error:
            if not is_command:
                raise
            raise SystemExit(f"sgl-kvevict: error: {error}") from error
        LAUNCHER_HOOK.register()
        HookRegistry.apply_hooks()
    previous(server_args)


def check_start(server_args: ServerArgs, *, is_command: bool) -> None:
    """Check the unresolved server arguments and the configuration; ``is_command``: it will listen on ``--port``.

    Raises:
        ConfigError: the configuration is invalid.
        UnsupportedSetupError: lists every reason.
    """
    config, _ = configured_policy(load_config())
    value_of = partial(getattr, server_args)
    reasons = backend_reasons(value_of) + flag_reasons(value_of) + speculation_reasons(value_of, config)
    reasons += pool_size_reasons(server_args.max_total_tokens, config)
    reasons += resource_reasons(config, max(server_args.dp_size or 1, server_args.attn_dp_size or 1))
    if is_command:
        reasons += port_reasons(server_args.host, server_args.port)
    if reasons:
        raise UnsupportedSetupError(reasons)


def after_launch_handlers(_result: None, server_args: ServerArgs) -> None:
    """Hook after SGLang's launcher set its signal handlers: end with exit code 1 if a scheduler refuses.

    SGLang's handler logs another line below the scheduler's reasons and kills its own process (-9).
    """
    if server_args.custom_sigquit_handler is None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, _end)


def _end(_number: int, _frame: FrameType | None) -> None:
    logging.disable()  # the reasons stay the last lines
    kill_process_tree(getpid(), include_parent=False)
    sys.stdout.flush()
    _exit(1)
