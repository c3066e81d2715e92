"""Device operations on KV cache rows: one folder per operation, see README.md beside this file.

Import a function from its folder, e.g. ``from kvevict_kernels.compact_kv import compact_kv``. Nothing is re-exported
here: a function would hide the folder of the same name.
"""
