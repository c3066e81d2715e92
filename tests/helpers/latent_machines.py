"""The machines with latents: values are a part of the keys' rows, so one row moves for both."""

from __future__ import annotations

from typing import Any, ClassVar

from helpers.machines import HostMachine, PressureMachine


class LatentsMachine(PressureMachine):
    """Prefixes are cut, shrink and are dropped."""

    options: ClassVar[dict[str, Any]] = PressureMachine.options | {"is_latent": True}


class LatentsHostMachine(HostMachine):
    """They move to the host's memory and come back."""

    options: ClassVar[dict[str, Any]] = HostMachine.options | {"is_latent": True}


LATENT_MACHINES = (LatentsMachine, LatentsHostMachine)
