"""The machines with rows of 8 and 4 bits, of both, and with what else shares a pool with them."""

from __future__ import annotations

from helpers.long_machine import LongMachine, PrefillBudgetMachine, RetainLongMachine
from helpers.machines import (
    BesideMachine,
    BesidePressureMachine,
    BesideRetainMachine,
    CacheMachine,
    CoarsePressureMachine,
    ExactMachine,
    GrowthMachine,
    HostExactMachine,
    HostMachine,
    PressureMachine,
    RetainMachine,
    SessionMachine,
)
from helpers.verify_machines import PairsHostMachine, PairsStoreMachine, VerifyPressureMachine
from sgl_kvevict.config import Bits


def with_bits(machine: type[CacheMachine], bits: Bits) -> type[CacheMachine]:
    """A machine whose compressed rows have these bits."""
    fields = {"options": machine.options | {"bits": bits}, "__doc__": machine.__doc__}
    return type(f"{machine.__name__}{str(bits).title()}", (machine,), fields)


BITS_MACHINES = (
    *(
        with_bits(machine, "auto")
        for machine in (
            CacheMachine,
            PressureMachine,
            ExactMachine,
            CoarsePressureMachine,
            SessionMachine,
            BesideMachine,
            BesideRetainMachine,
            BesidePressureMachine,
            HostMachine,
            GrowthMachine,
            RetainMachine,
            HostExactMachine,
            LongMachine,
            RetainLongMachine,
            PrefillBudgetMachine,
            VerifyPressureMachine,
            PairsHostMachine,
            PairsStoreMachine,
        )
    ),
    *(with_bits(machine, bits) for bits in (8, 4) for machine in (PressureMachine, GrowthMachine, LongMachine)),
)
