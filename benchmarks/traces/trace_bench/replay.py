"""Replays conversations on one server: clients that wait for answers, one prefill at a time, decoding beside it."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, islice

from trace_bench.clock import Machine
from trace_bench.conversations import UNIT, Conversation, Turn
from trace_bench.server import Kept, Running, Server


@dataclass
class Totals:
    """What was counted of a replay, after its warm-up; tokens are units of the trace times :data:`UNIT`.

    Attributes:
        prompt: prompt tokens of the requests.
        pool: of these found in the pool.
        host: of these found on the host.
        kept: of the tokens found, per token.
        prefill_s: seconds of prefills.
        load_s: seconds of loads from the host.
        first_token_s: from a request's arrival to its first token, each.
        seconds: on the clock of the replay.
    """

    requests: int = 0
    prompt: int = 0
    pool: int = 0
    host: int = 0
    kept: Kept = field(default_factory=Kept)
    prefill_s: float = 0.0
    load_s: float = 0.0
    seconds: float = 0.0
    first_token_s: list[float] = field(default_factory=list)


@dataclass
class Client:
    """An agent: it sends one request after the other, and begins the next conversation when one ends."""

    conversation: Conversation
    position: int = 0


class Replay:
    """One run of a server.

    Prompts are computed one at a time in order of arrival. A decode step takes as long as the weights and the KV of all
    running requests are read; the prefill beside it does not slow it down. A client's next request comes as long after
    an answer as in its trace.

    Attributes:
        most_live: the most units that conversations under way had between them at a time, shared ones once.
    """

    def __init__(
        self, server: Server, conversations: Iterable[Conversation], machine: Machine, *, clients: int, warm_up: int
    ) -> None:
        self.totals = Totals()
        self.most_live = 0
        self._server = server
        self._machine = machine
        self._warm_up = warm_up
        self._conversations = iter(conversations)
        self._numbers = count()
        self._events: list[tuple[float, int, str, Client, Running | None]] = []
        self._waiting: deque[tuple[float, Client, Running]] = deque()
        self._arrivals: dict[int, float] = {}
        self._reads: dict[int, float] = {}
        self._is_busy = False
        self._served = 0
        self._live: dict[int, int] = {}
        self._families: Counter[tuple[int, int]] = Counter()
        self._shared: dict[tuple[int, int], int] = {}
        self._clients = [Client(each) for each in islice(self._conversations, clients)]
        for number, client in enumerate(self._clients):  # spread over conversations from the beginning
            client.position = number * len(client.conversation.turns) // clients

    def run(self, num_requests: int) -> Totals:
        """Serve so many requests; those of the warm-up are not counted."""
        for number, client in enumerate(self._clients):
            self._enter(client.conversation)
            self._push(float(number), "arrive", client)
        begin = now = 0.0
        while self._served < num_requests:
            now, _, what, client, running = heapq.heappop(self._events)
            if what == "arrive":
                turn = client.conversation.turns[client.position]
                self._waiting.append((now, client, self._server.submit(turn)))
            else:
                assert running is not None
                if what == "prefilled":
                    self._prefilled(now, client, running)
                else:
                    self._finished(now, client, running)
                    if self._served == self._warm_up:
                        self.totals, begin = Totals(), now
            self._admit(now)
        self.totals.seconds = now - begin
        return self.totals

    def _push(self, when: float, what: str, client: Client, running: Running | None = None) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what, client, running))

    def _admit(self, now: float) -> None:
        if self._is_busy or not self._waiting:
            return
        arrived, client, running = self._waiting[0]
        if not self._server.start(running):
            if not self._reads and not self._is_busy:
                raise RuntimeError(f"a prompt of {len(running.turn.prompt)} units does not fit the pool")
            return
        self._waiting.popleft()
        self._is_busy = True
        found = (running.found + running.host) * UNIT
        total = len(running.turn.prompt) * UNIT
        load = self._machine.load_s(running.loaded * UNIT * self._machine.kv_bytes)
        seconds = self._machine.prefill_s(found, total - found)
        self._count(running, seconds, load)
        self._arrivals[id(running)] = arrived
        self._push(now + load + seconds, "prefilled", client, running)

    def _count(self, running: Running, prefill_s: float, load_s: float) -> None:
        totals = self.totals
        totals.requests += 1
        totals.prompt += len(running.turn.prompt) * UNIT
        totals.pool += running.found * UNIT
        totals.host += running.host * UNIT
        totals.kept += running.kept
        totals.prefill_s += prefill_s
        totals.load_s += load_s

    def _prefilled(self, now: float, client: Client, running: Running) -> None:
        self._is_busy = False
        self.totals.first_token_s.append(now - self._arrivals.pop(id(running)))
        self._reads[id(running)] = self._server.prefilled(running)
        step = self._machine.step_s(sum(self._reads.values()) * UNIT)
        self._push(now + max(len(running.turn.answer), 1) * UNIT * step, "finished", client, running)

    def _finished(self, now: float, client: Client, running: Running) -> None:
        self._server.finish(running)
        del self._reads[id(running)]
        self._served += 1
        self._note_live(client, running.turn)
        client.position += 1
        if client.position == len(client.conversation.turns):
            self._leave(client)
            client.conversation, client.position = next(self._conversations), 0
            self._enter(client.conversation)
        think_s = client.conversation.turns[client.position].think_s if client.position else 0.0
        self._push(now + think_s, "arrive", client)

    # ---- the working set --------------------------------------------------------------------------------------

    def _enter(self, conversation: Conversation) -> None:
        self._families[conversation.family] += 1
        self._shared[conversation.family] = conversation.shared

    def _leave(self, client: Client) -> None:
        self._families[client.conversation.family] -= 1
        self._live.pop(id(client), None)

    def _note_live(self, client: Client, turn: Turn) -> None:
        length = len(turn.prompt) + len(turn.answer)
        self._live[id(client)] = max(length - client.conversation.shared, 0)
        shared = sum(self._shared[family] for family, number in self._families.items() if number > 0)
        self.most_live = max(self.most_live, sum(self._live.values()) + shared)


class Everything(Server):
    """A cache without a limit: what can be found at most, and how large the working set is."""

    def __init__(self) -> None:
        self._units: set[int] = set()

    def submit(self, turn: Turn) -> Running:
        return Running(turn, None)

    def start(self, running: Running) -> bool:
        """Find what any prompt or answer had before; all are admitted."""
        prompt = running.turn.prompt
        while running.found < len(prompt) - 1 and prompt[running.found] in self._units:
            running.found += 1
        running.kept = Kept.whole(running.found)
        return True

    def prefilled(self, running: Running) -> float:
        """Keep the prompt for good."""
        self._units.update(running.turn.prompt)
        return len(running.turn.prompt)

    def finish(self, running: Running) -> None:
        self._units.update(running.turn.answer)
