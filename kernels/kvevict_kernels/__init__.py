"""Device operations on KV cache rows: one folder per operation, see README.md beside this file.

Import a function from its folder, for example ``from kvevict_kernels.compact_kv import compact_kv``. Nothing
is re-exported here, so that a folder and the function in it never fight for one name.
"""
