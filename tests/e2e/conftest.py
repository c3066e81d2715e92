"""Real servers, started once per module and only when a test asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.e2e_env import ENV
from helpers.preloaded import PATCH, Preloaded
from helpers.tiny_model import save_tiny_llama
from kvevict_tools.launcher import KVEVICT_CPU_FLAGS, STOCK_CPU_FLAGS, RunningServer, config_env, launch
from kvevict_tools.models import ensure_model

Start = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ensure_model()


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    process = Preloaded(ENV)
    yield process
    process.close()


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
            """Stock SGLang, or ours if there is a configuration; without the request that SGLang warms up with.

            An idle scheduler of SGLang keeps a core busy unless it is told to sleep; ``spins``: it is not told.
            ``patch`` names a module that changes SGLang.
            """
            base = [*(STOCK_CPU_FLAGS if config is None else KVEVICT_CPU_FLAGS)]
            base += ["--skip-server-warmup"] if spins else ["--skip-server-warmup", "--sleep-on-idle"]
            server = launch(
                str(model),
                flags=[*base, *flags],
                env=(env or {})
                | ({} if config is None else config_env(config))
                | ({} if patch is None else {PATCH: patch}),
                log_path=tmp_path_factory.mktemp("server") / "server.log",
                spawn=preloaded.start,
            )
            stack.callback(server.stop, grace_s=0)  # SGLang takes 7 s to leave in peace
            return server

        yield start_server
