"""A compressor to which scores are known at any time."""

from __future__ import annotations

from sgl_kvevict.compression import Compressor


class LearnedCompressor(Compressor):
    """As if scores had been learned: any range can be compressed at any time."""

    scores_any_range = True
