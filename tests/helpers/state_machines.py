"""The machines on the pools of a model with recurrent layers."""

from __future__ import annotations

from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import rule

from helpers import machines
from helpers.states import SnapshotsHarness, StatesHarness


class States(machines.CacheMachine):
    """Every machine's operations, and states that are taken away."""

    make_harness = StatesHarness
    harness: StatesHarness

    @rule(count=st.integers(1, 5))
    def take_states(self, count):
        self.harness.evict_states(count)

    def teardown(self):
        super().teardown()
        assert self.harness.rows.mamba_allocator.available_size() == self.harness.num_states


class StatesMachine(States, machines.CacheMachine):
    """A prompt is found where a state is."""


class FewStatesMachine(States, machines.CacheMachine):
    """States are what is short."""

    options: ClassVar[dict[str, Any]] = {"num_states": 14}


class StatePressureMachine(States, machines.PressureMachine):
    """Prefixes shrink under their readers."""


class StateExactMachine(States, machines.ExactMachine):
    """Some requests read nothing compressed, and keep their state to themselves."""


class StateTailMachine(States, machines.TailMachine):
    """T-LRU decides which leaf goes."""


class StateFrequencyMachine(States, machines.FrequencyPressureMachine):
    """So does an order that knows no states."""

    options: ClassVar[dict[str, Any]] = {"waits": True, "eviction_policy": "lfu"}


class StateSessionMachine(States, machines.SessionMachine):
    """Sessions hold states too."""


class StateStockMachine(States, machines.StockMachine):
    """Nothing is compressed."""


class Snapshots(States):
    """The tree gets snapshots (`extra_buffer`), which end where a grid does."""

    make_harness: ClassVar = SnapshotsHarness


class SnapshotsMachine(Snapshots, machines.CacheMachine):
    """A prompt is found where a snapshot is."""


class FewSnapshotsMachine(Snapshots, machines.CacheMachine):
    """Snapshots are what is short."""

    options: ClassVar[dict[str, Any]] = {"num_states": 28}


class SnapshotPressureMachine(Snapshots, machines.PressureMachine):
    """Prefixes shrink under their readers."""


class SnapshotExactMachine(Snapshots, machines.ExactMachine):
    """Some requests read nothing compressed, and keep their snapshots to themselves."""


class SnapshotSessionMachine(Snapshots, machines.SessionMachine):
    """Sessions hold snapshots too."""


class SnapshotStockMachine(Snapshots, machines.StockMachine):
    """Nothing is compressed."""


STATE_MACHINES = (
    StatesMachine,
    FewStatesMachine,
    StatePressureMachine,
    StateExactMachine,
    StateTailMachine,
    StateFrequencyMachine,
    StateSessionMachine,
    StateStockMachine,
    SnapshotsMachine,
    FewSnapshotsMachine,
    SnapshotPressureMachine,
    SnapshotExactMachine,
    SnapshotSessionMachine,
    SnapshotStockMachine,
)
