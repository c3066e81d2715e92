"""A policy for tests that breaks the server it runs in, place by place, when a file says so.

SGLang's scheduler process loads the policy (``"policy": "helpers.faults:breakable"``) before any request comes. From
then on the file named by ``FAULT_FILE`` holds the name of the place that is to fail, or nothing.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sgl_kvevict.guard import Place
from sgl_kvevict.policies.by_name import build_policy
from sgl_kvevict.policies.policy import Policy

FAULT_FILE = "KVEVICT_TEST_FAULT_FILE"
ADAPTER = "sgl_kvevict.sglang_adapter"
CACHE = "sgl_kvevict.cache"
FAULTS: Mapping[Place, str] = {
    Place.OPTIONS: f"{ADAPTER}.request_check.parse_request_options",
    Place.PROMPT: f"{CACHE}.prefills.Prefills.complete",
    Place.OBSERVATION: "sgl_kvevict.segments.prompt_observation.PromptObservation.record",
    Place.COMPRESSION: "sgl_kvevict.segments.ranker.Compressor.rank",
    Place.HOST: f"{CACHE}.host.HostMemory._is_usable",
    Place.RELEASE: f"{CACHE}.resize.Resizer.try_open",
    Place.MONITORING: f"{ADAPTER}.monitoring.metrics.Metrics.refresh",
    Place.SOCKETS: "sgl_kvevict.events.service.EventService._send_answers",
    Place.STORE: f"{CACHE}.saving.export_segment",
    Place.STATE: f"{ADAPTER}.monitoring.server_info.cache_state",
}
"""A function that runs at each guarded place."""


class InjectedFault(Exception):
    """What goes wrong."""


def breakable(**options: Any) -> Policy:
    """Return a policy, in a process that fails on demand."""
    path = Path(os.environ[FAULT_FILE])
    # The launcher builds the policy, too. There the metrics' module must not be imported before SGLang has said that
    # several processes share them.
    is_scheduler = multiprocessing.parent_process() is not None
    for place, target in FAULTS.items() if is_scheduler else ():
        owner_name, _, name = target.rpartition(".")
        owner = pkgutil.resolve_name(owner_name)
        setattr(owner, name, _breakable(getattr(owner, name), place, path))
    policy = build_policy("snapkv", {"window_size": 16} | options)
    assert policy is not None
    return policy


def _breakable(function: Callable[..., Any], place: Place, path: Path) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Slots that are short are no request's: an error there is loud.
        is_guarded = place is not Place.RELEASE or len(args) == 1
        if is_guarded and path.read_text() == place.value:
            raise InjectedFault(place.value)
        return function(*args, **kwargs)

    return call
