"""A text that the model reads before it serves requests, so that scores are learned from it."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.cache.nodes import Node
from sgl_kvevict.segments import PromptObservation, ReaderObservation, Segment


@dataclass(eq=False)
class Lesson:
    """What is observed of one text: its prefill, then passes that repeat it. Nothing is compressed meanwhile.

    Attributes:
        prompt: observation of its prefill.
        node: last node of the text's path, once it is prefilled.
        text: its tokens, as a segment in place that only the lesson knows; None before the first pass.
        readers: observation of the passes over it.
        is_dropped: a part of the text left the cache.
    """

    prompt: PromptObservation
    node: Node | None = None
    text: Segment | None = None
    readers: ReaderObservation | None = None
    is_dropped: bool = False
