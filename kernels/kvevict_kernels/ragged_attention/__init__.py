"""Attention of q rows over runs of KV rows, different ones per KV head, on the CPU.

``tiles.py`` cuts the runs into equal blocks, ``cpu.py`` attends to many blocks in one fused call and merges the
partial results, ``reference.py`` is the definition. What runs on a device is ``ragged_decode`` and ``ragged_extend``.
"""
