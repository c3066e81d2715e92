"""Python runs this first in every process of a server whose ``PYTHONPATH`` begins with this folder.

* ``CAMPAIGN_CLOCK`` names a file of 8 bytes, seconds as a float: they are added to the time of day from then on, as if
  somebody had set the clock. Clocks that never go back (``time.monotonic``, ``time.perf_counter``) stay what they are.
* ``CAMPAIGN_UNPINNED``: memory is not pinned. SGLang's LoRA code pins all of it, which a torch without CUDA refuses;
  pinned or not, the numbers are the same.
"""

import os

if path := os.environ.get("CAMPAIGN_CLOCK"):
    import mmap
    import struct
    import time

    with open(path, "rb") as file:
        _shift = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + struct.unpack("d", _shift)[0]
    time.time_ns = lambda: _time_ns() + int(struct.unpack("d", _shift)[0] * 1e9)

if "CAMPAIGN_UNPINNED" in os.environ:
    import functools

    import torch

    def _unpinned(make):
        @functools.wraps(make)
        def call(*args, pin_memory=False, **kwargs):
            return make(*args, **kwargs)

        return call

    torch.Tensor.pin_memory = lambda self, *args: self
    for _name in ("tensor", "zeros", "ones", "empty", "full", "empty_like", "zeros_like", "arange"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
