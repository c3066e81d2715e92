"""Real servers on a tiny random model, with SGLang's leak checks on; each is gone when its block ends."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from helpers.e2e_env import ENV
from helpers.modes import FLAGS
from helpers.tiny_model import save_adapter, save_tiny_llama, save_tokenizer
from kvevict_tools.launcher import KVEVICT_CPU_FLAGS, RunningServer, config_env, free_port, launch

SHIMS = Path(__file__).parent / "shims"
ADAPTERS = ("first", "second")
OPTIMISTIC = {"SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "0.02", "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "20"}
"""SGLang admits more than fits, has to retract, and soon forgets that it had to."""
SMALL_POOL = ("--max-total-tokens", "1200", "--context-length", "1024")


@contextmanager
def server(*flags: str, config: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Iterator[RunningServer]:
    """A server without a tokenizer, on a small pool."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_llama(Path(folder))
        yield from _serve(model, (*FLAGS, *flags), config, env, Path(folder) / "server.log")


@contextmanager
def whole_server(*flags: str, config: Mapping[str, Any], head_dim: int = 16) -> Iterator[RunningServer]:
    """A server that has to retract, with a tokenizer (so stop strings, schemas, questions) and two LoRA adapters."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_tiny_llama(folder / "model", head_dim=head_dim)
        save_tokenizer(model)
        adapters = {name: save_adapter(folder / name, seed, head_dim=head_dim) for seed, name in enumerate(ADAPTERS)}
        paths = [f"{name}={path}" for name, path in adapters.items()]
        lora = ("--lora-paths", *paths, "--lora-backend", "torch_native", "--max-loras-per-batch", "3")
        variables = {"CAMPAIGN_UNPINNED": "1", **OPTIMISTIC, **shims()}
        yield from _serve(model, (*SMALL_POOL, *lora, *flags), config, variables, folder / "server.log")


def _serve(
    model: Path, flags: tuple[str, ...], config: Mapping[str, Any], env: Mapping[str, str] | None, log_path: Path
) -> Iterator[RunningServer]:
    variables = ENV | dict(env or {}) | config_env(config)
    with launch(model, flags=[*KVEVICT_CPU_FLAGS, *flags], env=variables, log_path=log_path) as running:
        yield running


def shims() -> dict[str, str]:
    """What makes a server's processes read ``shims/sitecustomize.py``."""
    return {"PYTHONPATH": os.pathsep.join([str(SHIMS), os.environ.get("PYTHONPATH", "")])}


class Clock:
    """The time of day of a server's processes.

    Args:
        path: file that they read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0.0)
        self.env = {"CAMPAIGN_CLOCK": str(path), **shims()}

    def set(self, seconds: float) -> None:
        """Let it differ by so much from ours."""
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.write(struct.pack("d", seconds))


def events() -> dict[str, str]:
    """The address of the event socket, on a free port."""
    return {"endpoint": f"tcp://127.0.0.1:{free_port()}"}


def processes(running: RunningServer) -> list[int]:
    """All processes of a server."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(process.name)) == running.process.pid:
                found.append(int(process.name))
    return found


def resident_mb(running: RunningServer) -> float:
    """Memory of all processes of a server."""
    pages = 0
    for pid in processes(running):
        with suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def error_lines(running: RunningServer) -> list[str]:
    """Lines of a server's log that tell of an error."""
    return [line for line in running.log().splitlines() if "ERROR" in line or "Traceback" in line]
