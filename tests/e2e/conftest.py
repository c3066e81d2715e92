"""Real servers, started once per module and only when a test asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.e2e_env import ENV
from helpers.preloaded import PATCH, Preloaded
from helpers.tiny_model import save_tiny_llama
from sgl_kvevict.launcher import (
    KVEVICT_CPU_FLAGS,
    STOCK_CPU_FLAGS,
    RunningServer,
    config_env,
    launch,
)
from sgl_kvevict.model import ensure_model

Start = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ensure_model()


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Callable[[dict[str, str]], Preloaded]]:
    """A process with SGLang's modules for each environment, made when it is first asked for."""
    by_env: dict[tuple[tuple[str, str], ...], Preloaded] = {}
    with ExitStack() as stack:

        def of_env(env: dict[str, str]) -> Preloaded:
            key = tuple(sorted(env.items()))
            if key not in by_env:
                by_env[key] = Preloaded(env)
                stack.callback(by_env[key].close)
            return by_env[key]

        yield of_env


@pytest.fixture(scope="module")
def start(tmp_path_factory, preloaded) -> Iterator[Start]:
    """Start servers; all are stopped at the end of the module."""
    with ExitStack() as stack:

        def start_server(
            model: Path,
            *flags: str,
            config: dict | None = None,
            env: dict | None = None,
            spins: bool = False,
            patch: str | None = None,
        ) -> RunningServer:
            """Stock SGLang, or ours if there is a configuration; ``patch`` names a module that changes SGLang.

            An idle scheduler of SGLang keeps a core busy unless it is told to sleep; ``spins``: it is not told.
            """
            base = [*(STOCK_CPU_FLAGS if config is None else KVEVICT_CPU_FLAGS)]
            base += [] if spins else ["--sleep-on-idle"]
            server = launch(
                str(model),
                flags=[*base, *flags],
                env=({} if config is None else config_env(config)) | ({} if patch is None else {PATCH: patch}),
                log_path=tmp_path_factory.mktemp("server") / "server.log",
                spawn=preloaded(ENV | (env or {})).start,
            )
            stack.callback(server.stop, grace_s=0)  # SGLang takes 7 s to leave in peace
            return server

        yield start_server
