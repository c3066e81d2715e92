"""The life of a prefix: what is compressed, when, and from which observations. Imports no SGLang."""

from sgl_kvevict.cache.cache import PrefixCache

__all__ = ["PrefixCache"]
