"""The machines with prompts that hold images: their tokens are hashes, and no pass may read them."""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis.stateful import invariant

from helpers.harness import Harness
from helpers.machines import BASES, HostMachine, PressureMachine, UnsplittableMachine
from sgl_kvevict.cache.nodes import FIRST_IMAGE_TOKEN

IMAGE = slice(12, 30)
"""Where the image of a prompt lies."""
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
    """Once scores are learned: prefixes with images shrink, are cut inside an image, and get no pass."""

    make_harness: ClassVar[type[Harness]] = ImagesHarness

    @invariant()
    def no_pass_reads_an_image(self):
        passes = [req for req in self.scheduler.waiting_queue if hasattr(req, "origin_input_ids")]
        assert all(max(req.origin_input_ids) < FIRST_IMAGE_TOKEN for req in [*passes, *self.scheduler.passes])


class ImagesUnsplittableMachine(UnsplittableMachine):
    """A policy without passes, whose segments cannot be cut: a divergence inside an image takes their place."""

    make_harness: ClassVar[type[Harness]] = ImagesHarness


class ImagesHostMachine(HostMachine, ImagesMachine):
    """They move to the host's memory and come back, found by their hashes."""


IMAGE_MACHINES = (ImagesMachine, ImagesUnsplittableMachine, ImagesHostMachine)
assert any(sum(base[: IMAGE.start]) % 2 for base in BASES) and not all(sum(base[: IMAGE.start]) % 2 for base in BASES)
