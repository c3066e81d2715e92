"""The machines with prompts that hold images: their tokens are hashes."""

from __future__ import annotations

from typing import Any, ClassVar

from helpers.harness import Harness
from helpers.machines import BASES, HostMachine, PressureMachine, WindowsMachine

IMAGE = slice(12, 30)
"""Where the image of a prompt lies."""
FIRST_IMAGE_TOKEN = 1_000_000
"""SGLang replaces the tokens of images (and of videos and sound) by hashes, which begin here."""
LARGEST = FIRST_IMAGE_TOKEN + (1 << 62) - 1
"""Of SGLang's hashes."""


class ImagesHarness(Harness):
    """Every other text has an image, whose tokens are large numbers."""

    def request(self, tokens: list[int], *args: Any, **kwargs: Any) -> Any:
        if sum(tokens[: IMAGE.start]) % 2:
            image = [token if token > FIRST_IMAGE_TOKEN else LARGEST - token for token in tokens[IMAGE]]
            tokens = [*tokens[: IMAGE.start], *image, *tokens[IMAGE.stop :]]
        return super().request(tokens, *args, **kwargs)


class ImagesMachine(PressureMachine):
    """Prefixes with images shrink, and are cut inside an image."""

    make_harness: ClassVar[type[Harness]] = ImagesHarness


class ImagesWindowsMachine(WindowsMachine):
    """Segments that cannot be cut: a divergence inside an image takes their place."""

    make_harness: ClassVar[type[Harness]] = ImagesHarness


class ImagesHostMachine(HostMachine, ImagesMachine):
    """They move to the host's memory and come back, found by their hashes."""


IMAGE_MACHINES = (ImagesMachine, ImagesWindowsMachine, ImagesHostMachine)
assert any(sum(base[: IMAGE.start]) % 2 for base in BASES) and not all(sum(base[: IMAGE.start]) % 2 for base in BASES)
