"""Segments: what forwards record of a range, how its entries are ranked, and how the best of them are written.

Nothing here knows SGLang or the tree; :mod:`sgl_kvevict.cache` decides when which range is ranked and written.
"""
