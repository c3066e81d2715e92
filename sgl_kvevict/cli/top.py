"""``sgl-kvevict top``: watch a server's cache live, on the terminal or as JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import msgspec
import uvloop
from rich.console import Console
from rich.live import Live

from sgl_kvevict.cli.top_view import SORT_KEYS, TopState, render
from sgl_kvevict.events.client import InspectClient, RequestFailedError, ServerSilentError, check_endpoint
from sgl_kvevict.events.questions import Describe, Description, Status, StatusReport


@dataclass(frozen=True)
class TopOptions:
    """Options of ``top``; ``count``: number of reports, 0: no end; ``is_long``: show the model's name in full."""

    endpoint: str
    interval_s: float = 1.0
    rows: int = 50
    sort: str = "slots"
    timeout_s: float = 5.0
    count: int = 0
    is_long: bool = False


def run_top(options: TopOptions, *, as_json: bool) -> None:
    """Show reports until the count is reached, ``q`` or Ctrl-C.

    Raises:
        ServerSilentError: a count was given, and no report came at all.
        ConfigError: the endpoint is not an address.
    """
    watcher = _Watcher(options)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(watcher.print_json() if as_json else watcher.draw())


class _Watcher:
    def __init__(self, options: TopOptions) -> None:
        self.options = options
        self.state = TopState(check_endpoint(options.endpoint), options.sort, is_long=options.is_long)
        self._changed = asyncio.Event()
        self._quit = asyncio.Event()

    async def draw(self) -> None:
        console = Console()
        with _keys(self._press), Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            async for _ in self._reports():
                live.update(render(self.state, console.width, console.height), refresh=True)

    async def print_json(self) -> None:
        async for _ in self._reports():
            state = self.state
            line: dict[str, object] = {"endpoint": state.endpoint, "connected": state.silent is None}
            if state.silent is None:
                line["status"] = state.status
            else:
                line["error"] = state.silent
            sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
            sys.stdout.flush()

    async def _reports(self) -> AsyncIterator[None]:
        """Yield after each report: one per interval, and one after each key; ends with the count or with ``q``."""
        num_reports = 0
        async with InspectClient(self.state.endpoint, self.options.timeout_s) as client:
            while not self._quit.is_set():
                self._changed.clear()
                await self._ask(client)
                yield
                num_reports += 1
                if num_reports == self.options.count:
                    if self.state.status is None:
                        raise ServerSilentError(f"no answer from {self.state.endpoint}")
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self.options.interval_s)

    async def _ask(self, client: InspectClient) -> None:
        state = self.state
        fields = {"op": "status", "limit": self.options.rows, "sort": state.sort}
        try:
            status = await client.ask(msgspec.convert(fields, Status), StatusReport)
            if state.description is None or state.description.started != status.started:
                state.description = await client.ask(Describe(), Description)
            state.update(status)
        except (ServerSilentError, RequestFailedError) as error:
            state.silent = str(error)

    def _press(self, key: str) -> None:
        if key in ("q", "\x03", "\x04"):
            self._quit.set()
        elif key in SORT_KEYS:
            self.state.sort = SORT_KEYS[key]
        else:
            return
        self._changed.set()


@contextlib.contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call ``press`` with every typed key, if standard input is a terminal."""

    def read_keys() -> None:
        for key in os.read(stdin, 64).decode(errors="replace"):
            press(key)

    if not sys.stdin.isatty():
        yield
        return
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    loop = asyncio.get_running_loop()
    tty.setcbreak(stdin)
    loop.add_reader(stdin, read_keys)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
