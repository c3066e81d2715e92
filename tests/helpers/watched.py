"""A scheduler in miniature whose cache is watched: the harness with listeners, a socket and a thread that turns."""

from __future__ import annotations

import random
import threading

from helpers.event_sockets import description_of
from helpers.harness import Harness
from sgl_kvevict.cache.listener import CacheListener
from sgl_kvevict.config import EventsConfig
from sgl_kvevict.events.service import EventService
from sgl_kvevict.events.totals import Totals
from sgl_kvevict.events.types import AnyEvent
from sgl_kvevict.sglang_adapter.monitoring.inspection import Inspection

DOCUMENT = [i * 7 % 11 for i in range(60)]


class WatchedHarness:
    """A harness whose tree publishes and answers; close it."""

    def __init__(self, config: EventsConfig, harness: Harness | None = None, *, started: float = 1.0) -> None:
        self.harness = harness or Harness(num_slots=240)
        tree, totals = self.harness.tree, Totals()
        self.service = EventService(config, description_of(config, started=started), totals=totals)
        self.listener = CacheListener(tree.guard, totals, policy="pseudo-random", exposes_tokens=config.expose_tokens)
        self.emitted: list[AnyEvent] = []  # every event, oldest first
        self.listener.subscribers += [self.service.publish, self.emitted.append]
        self.listener.each_turn.append(Inspection(tree, self.service, started).each_turn)
        tree.prefixes.listener = self.listener
        self._turning: threading.Thread | None = None
        self._stop = threading.Event()

    def turn(self) -> None:
        """One turn of the scheduler's loop."""
        self.harness.tree.prefixes.listener.between_steps()

    def keep_turning(self, *, with_traffic: bool = False) -> None:
        """Turn in a thread of its own, the scheduler's, until closed."""

        def loop() -> None:
            rng = random.Random(0)
            while not self._stop.wait(0.002):
                self.turn()
                if with_traffic:
                    self.one_request(rng)

        self._turning = threading.Thread(target=loop, daemon=True)
        self._turning.start()

    def one_request(self, rng: random.Random) -> None:
        """A request on a document that some others share."""
        shared = rng.choice([20, 40, 60])
        req = self.harness.run(DOCUMENT[:shared] + [rng.randrange(11) for _ in range(rng.choice([3, 12]))])
        if req is not None:
            self.harness.decode(req)
            if req in self.harness.live:
                self.harness.finish(req)

    def close(self) -> None:
        self._stop.set()
        if self._turning is not None:
            self._turning.join()
        self.service.close()

    def __enter__(self) -> WatchedHarness:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
