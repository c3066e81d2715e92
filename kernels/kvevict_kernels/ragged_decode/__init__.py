"""Attention of few new tokens per request over compressed spans and uncompressed suffixes, in one launch, on a GPU.

``launch.py`` has the functions that attention calls, ``tables.py`` the lists that the kernels read.
"""
