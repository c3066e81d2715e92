"""A scheduler in miniature whose cache is watched: the harness with a socket and a thread that turns."""

from __future__ import annotations

import random
import threading

from helpers.event_sockets import description_of
from helpers.harness import DOCUMENT, Harness
from sgl_kvevict.config import EventsConfig
from sgl_kvevict.events.service import EventService
from sgl_kvevict.sglang_adapter.monitoring.inspection import Inspection


class WatchedHarness:
    """A harness whose tree answers questions; close it."""

    def __init__(self, config: EventsConfig, harness: Harness | None = None, *, started: float = 1.0) -> None:
        self.harness = harness or Harness(num_slots=240)
        self.service = EventService(config, description_of(config, started=started))
        self._inspection = Inspection(self.harness.tree, self.service, started)
        self._turning: threading.Thread | None = None
        self._stop = threading.Event()

    def turn(self) -> None:
        """One turn of the scheduler's loop."""
        self._inspection.each_turn()

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
